//! A sample, and the parts of it that each reader gets. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use pdp_api::{Detail, GuestSample, NodeSample, ResourceUsage, VnetSample, WatchSample};
use pdp_model::{ExternalStats, NodeStats, VnetStats, WorkerStats};
use pdp_proto::mux;

use super::MirrorReplies;
use super::log::EventFilter;
use super::node_counters::complete;
use crate::access::AccessScope;
use crate::host::query::HelperReply;
use crate::plan::{Plan, VnetPlan};

/// Counters of one moment.
#[derive(Debug)]
pub struct UsageSample {
    /// Ascending.
    pub number: u64,
    /// Time, milliseconds since 1970.
    pub at_ms: u64,
    /// Time by the monotonic clock, nanoseconds.
    pub at_ns: u64,
    /// The mux's counters, of all vnets or of the one that is watched.
    pub vnets: BTreeMap<String, Arc<VnetStats>>,
    /// The mux's counters of external interfaces.
    pub externals: BTreeMap<String, ExternalStats>,
    /// The mux's counters of its threads.
    pub workers: Vec<WorkerStats>,
    /// The plan at that time.
    pub plan: Arc<Plan>,
    /// Resource usage of guests, by vnet.
    pub usage: BTreeMap<String, Arc<VnetUsage>>,
    /// Answers of mirrors, by vnet.
    pub mirrors: BTreeMap<String, Arc<MirrorReplies>>,
}

/// Resource usage of a vnet's guests, by node.
pub type VnetUsage = BTreeMap<String, NodeUsage>;

/// Resource usage of a node.
#[derive(Clone, Debug, Default)]
pub struct NodeUsage {
    /// The control side.
    pub control: ResourceUsage,
    /// The forwarding guests.
    pub guests: BTreeMap<u32, ResourceUsage>,
    /// The kernel, if it forwards.
    pub kernel: Option<ResourceUsage>,
}

impl UsageSample {
    /// Returns the part that a reader gets.
    pub fn sample(&self, filter: &EventFilter, detail: Detail) -> WatchSample {
        let mut sample =
            WatchSample { at_ms: self.at_ms, at_ns: self.at_ns, ..WatchSample::default() };
        for (name, plan) in self.plan.vnets.iter().filter(|(name, _)| filter.selects(Some(name))) {
            let mut vnet = self.vnet(name, plan);
            if detail == Detail::Ports {
                vnet.nodes = self.nodes(name, plan);
            }
            sample.vnets.insert(name.clone(), vnet);
        }
        if filter.scope == AccessScope::Node && filter.vnet.is_none() {
            sample.externals = self.externals.clone();
            sample.workers = self.workers.clone();
        }
        sample
    }

    fn vnet(&self, name: &str, plan: &VnetPlan) -> VnetSample {
        let mut sum = VnetSample::default();
        let guests = plan.nodes.values().map(|node| node.guests.len()).sum::<usize>();
        sum.guests = u32::try_from(guests).unwrap_or(u32::MAX);
        for node in self.vnets.get(name).iter().flat_map(|stats| stats.nodes.values()) {
            for port in node.ports.values() {
                sum.received += port.received;
                sum.received_bytes += port.received_bytes;
                sum.sent += port.sent;
                sum.sent_bytes += port.sent_bytes;
                sum.dropped += port.dropped.values().sum::<u64>();
                sum.waiting += port.waiting;
            }
            sum.in_flight += node.in_flight;
            let connected = node.guests.values().filter(|guest| guest.connected).count();
            sum.guests_connected += u32::try_from(connected).unwrap_or(u32::MAX);
        }
        for node in self.usage.get(name).iter().flat_map(|nodes| nodes.values()) {
            sum.usage.add(&node.control);
            node.guests.values().chain(&node.kernel).for_each(|usage| sum.usage.add(usage));
        }
        sum
    }

    fn nodes(&self, name: &str, plan: &VnetPlan) -> BTreeMap<String, NodeSample> {
        let none = BTreeMap::new();
        let stats = self.vnets.get(name).map_or(&none, |stats| &stats.nodes);
        let usage = self.usage.get(name);
        let mut nodes = BTreeMap::new();
        let outside = stats.get_key_value(mux::OUTSIDE).map(|(name, _)| name);
        for name in plan.nodes.keys().chain(outside) {
            let mut counters = stats.get(name).cloned().unwrap_or_default();
            let node = plan.nodes.get(name);
            complete(&mut counters, node, Vec::new());
            let NodeStats { ports, guests, in_flight, .. } = counters;
            let used = usage.and_then(|nodes| nodes.get(name)).cloned().unwrap_or_default();
            let guest = |(number, counters)| {
                let usage = used.guests.get(&number).copied().unwrap_or_default();
                (number, GuestSample { counters, usage })
            };
            let guests = guests.into_iter().map(guest).collect();
            let mirror = node.and_then(|node| node.mirror.as_ref());
            let routes = mirror.and_then(|mirror| {
                let reply = self.mirrors.get(self.name_of(plan)?)?;
                match reply.get(&mirror.config.control_socket) {
                    Some((_, HelperReply::Reply(status))) => Some(status.stats.clone()),
                    _ => None,
                }
            });
            let (control, kernel) = (used.control, used.kernel);
            let sample = NodeSample { ports, guests, in_flight, control, kernel, routes };
            nodes.insert(name.clone(), sample);
        }
        nodes
    }

    fn name_of<'a>(&self, plan: &'a VnetPlan) -> Option<&'a str> {
        Some(plan.mux.name.as_str())
    }
}
