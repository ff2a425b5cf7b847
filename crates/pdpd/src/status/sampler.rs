//! Collects facts that are not reported to the daemon, while there are
//! watchers, once for all of them.
//!
//! A sample is one call to the mux, and a look at cgroups. The call is for a single vnet
//! if all watchers watch that one. Cgroups of vnets that are watched by name are read
//! each time, and all others in turn, as long as the sampler's CPU share lasts. Expensive
//! samples come less often, so that the sampler takes at most [`LOAD_MAX`] of a core.
//!
//! A separate thread asks the mirrors, which run on their tenants' CPU share.
//! Mirrors of vnets that are watched by name are asked once a second. All others
//! are asked at most once in [`MIRROR_PAUSE`], [`MIRRORS_AT_ONCE`] a second.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdp_api::ResourceUsage;
use pdp_model::{Stats, UnderlayProblem, VnetStats};
use rustix::time::{ClockId, clock_gettime};

use crate::engine::DaemonCore;
use crate::events::snapshot::{NodeUsage, UsageSample, VnetUsage};
use crate::events::{LatestStats, SampleRequest};
use crate::host::control::MirrorClient;
use crate::host::query::{HelperReply, Question};
use crate::plan::{DaemonPaths, NodePlan, Plan};
use crate::util::{lock, now_ms};

/// Largest share of a core for the sampler: one in this many.
pub const LOAD_MAX: u32 = 25;

/// Largest share of a core, one in this many, for reading cgroups in turn, in
/// addition to the rest of a sample. So a round ends however much the mux reports.
const ROUND_LOAD_MAX: u32 = 100;

/// Pause between two rounds of requests to mirrors.
const MIRRORS_EVERY: Duration = Duration::from_secs(1);

/// Pause between two requests to a mirror that nobody watches by name.
pub const MIRROR_PAUSE: Duration = Duration::from_secs(10);

/// Such mirrors that are asked in one round.
pub const MIRRORS_AT_ONCE: usize = 32;

/// Statuses that are determined again at each sample without a report,
/// in turn. The state of commands, for example, is visible in files
/// only. In addition, all vnets that are watched by name.
const STATUSES_AT_ONCE: usize = 8;

/// State of the sampler between samples.
#[derive(Debug, Default)]
pub struct Sampler {
    number: u64,
    usage: BTreeMap<String, Arc<VnetUsage>>,
    /// The vnet and node whose cgroups were read last, in turn.
    last: Option<(String, String)>,
    /// The vnet whose status was determined last, in turn.
    last_touched: String,
}

fn clock(id: ClockId) -> Duration {
    let now = clock_gettime(id);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Returns the CPU time of this thread.
fn cpu() -> Duration {
    clock(ClockId::ThreadCPUTime)
}

/// Returns the monotonic clock, nanoseconds.
fn at_ns() -> u64 {
    u64::try_from(clock(ClockId::Monotonic).as_nanos()).unwrap_or(u64::MAX)
}

/// Takes samples while there are watchers. Does not return.
pub fn run(engine: &DaemonCore) {
    let (hub, mut sampler) = (engine.watch_hub(), Sampler::default());
    loop {
        let wishes = hub.wait_for_wishes();
        let every = wishes.iter().map(|wish| wish.every).min().unwrap_or_default();
        let began = (Instant::now(), cpu());
        sampler.sample(engine, &wishes, every);
        // A new watcher need not wait for the next sample, but for the sampler's CPU share.
        let least = (cpu() - began.1) * LOAD_MAX;
        std::thread::sleep(least.saturating_sub(began.0.elapsed()));
        hub.wait_for_others(every.saturating_sub(began.0.elapsed()));
    }
}

/// Returns the vnets that are watched by name; `None` if a reader watches all.
fn named(wishes: &[SampleRequest]) -> Option<Vec<&str>> {
    let names: Option<Vec<&str>> = wishes.iter().map(|wish| wish.vnet.as_deref()).collect();
    names.map(|mut names| {
        names.sort_unstable();
        names.dedup();
        names
    })
}

impl Sampler {
    fn sample(&mut self, engine: &DaemonCore, wishes: &[SampleRequest], every: Duration) {
        let began = cpu();
        let (hub, plan) = (engine.watch_hub(), engine.model().plan.clone());
        let names = named(wishes);
        let one = match names.as_deref() {
            Some([name]) => Some(*name),
            _ => None,
        };
        let stats = match engine.host.stats(one, &plan) {
            Ok(stats) => stats,
            Err(error) if error.is_timeout() => return,
            // No mux runs, or it lacks this vnet.
            Err(_) => Stats::default(),
        };
        let Stats { externals, vnets, workers, .. } = stats;
        // In an `Arc`, since the many counters are kept twice: for statuses and for the sample.
        let vnets = shared(vnets);
        let changed = lock(&hub.latest_stats).absorb(&vnets, one);
        hub.touch_vnets(changed.iter().map(String::as_str));
        self.usage.retain(|name, _| plan.vnets.contains_key(name));
        match &names {
            Some(names) => hub.touch_vnets(names.iter().copied()),
            None => {
                let named = wishes.iter().filter_map(|wish| wish.vnet.as_deref());
                let after = (Bound::Excluded(self.last_touched.as_str()), Bound::Unbounded);
                let after = plan.vnets.range::<str, _>(after).map(|(name, _)| name.as_str());
                let next: Vec<&str> = after.take(STATUSES_AT_ONCE).collect();
                let full = next.len() == STATUSES_AT_ONCE;
                let last = next.last().filter(|_| full).map(|name| (*name).to_owned());
                hub.touch_vnets(next.into_iter().chain(named));
                self.last_touched = last.unwrap_or_default();
            }
        }
        let enough = |began: Duration, part: u32| cpu() - began > every / part;
        for wish in wishes {
            let wanted = wish.vnet.as_ref().and_then(|name| plan.vnets.get_key_value(name));
            let Some((name, vnet)) = wanted else { continue };
            for (node, wanted) in &vnet.nodes {
                if enough(began, LOAD_MAX) {
                    break;
                }
                self.read_guest_usage(engine, name, node, wanted);
            }
        }
        if names.is_none() {
            let began = cpu();
            self.read_next_usage(engine, &plan, || enough(began, ROUND_LOAD_MAX));
        }
        self.number += 1;
        let mirrors = lock(&hub.latest_stats).mirrors.clone();
        hub.publish_sample(UsageSample {
            number: self.number,
            at_ms: now_ms(),
            at_ns: at_ns(),
            vnets,
            externals,
            workers,
            plan,
            usage: self.usage.clone(),
            mirrors,
        });
    }

    /// Reads the nodes' cgroups from where the last round ended, once around at most.
    fn read_next_usage(&mut self, engine: &DaemonCore, plan: &Plan, enough: impl Fn() -> bool) {
        let (first, node) = self.last.take().unwrap_or_default();
        let after = plan.vnets.range::<str, _>((Bound::Included(first.as_str()), Bound::Unbounded));
        let before =
            plan.vnets.range::<str, _>((Bound::Unbounded, Bound::Excluded(first.as_str())));
        for (name, vnet) in after.chain(before) {
            for (at, wanted) in &vnet.nodes {
                if *name == first && *at <= node {
                    continue;
                }
                self.read_guest_usage(engine, name, at, wanted);
                if enough() {
                    self.last = Some((name.clone(), at.clone()));
                    return;
                }
            }
        }
    }

    fn read_guest_usage(&mut self, engine: &DaemonCore, vnet: &str, node: &str, plan: &NodePlan) {
        let cgroups = engine.host.runtime.cgroups();
        let usage = |cgroup: &str| {
            // A missing cgroup has no usage yet.
            let used = cgroups.usage(cgroup).ok()?;
            Some(ResourceUsage {
                usage_at_ns: at_ns(),
                cpu_ns: used.cpu_ns,
                throttled_ns: used.throttled_ns,
                memory_bytes: used.memory_bytes,
                memory_kills: used.memory_kills,
            })
        };
        let guests = plan.guests.keys().filter_map(|&number| {
            Some((number, usage(&DaemonPaths::guest_cgroup(vnet, node, number))?))
        });
        let guests = guests.collect();
        let control = usage(&DaemonPaths::node_cgroup(vnet, node)).unwrap_or_default();
        let kernel = plan.kernel.as_ref().and_then(|kernel| usage(&kernel.cgroup));
        let nodes = Arc::make_mut(self.usage.entry(vnet.to_owned()).or_default());
        nodes.insert(node.to_owned(), NodeUsage { control, guests, kernel });
    }
}

/// The mux's counters, by vnet.
type VnetStatsMap = BTreeMap<String, Arc<VnetStats>>;

pub(super) fn shared(vnets: BTreeMap<String, VnetStats>) -> VnetStatsMap {
    vnets.into_iter().map(|(name, stats)| (name, Arc::new(stats))).collect()
}

impl LatestStats {
    /// Takes the mux's counters of one vnet or of all. Returns the
    /// vnets whose status may change because of them.
    pub(super) fn absorb(&mut self, vnets: &VnetStatsMap, one: Option<&str>) -> Vec<String> {
        let mut changed = Vec::new();
        for (name, now) in vnets {
            let before = self.mux.insert(name.clone(), now.clone());
            if before.is_none_or(|before| facts(&before) != facts(now)) {
                changed.push(name.clone());
            }
        }
        let is_gone =
            |name: &String| !vnets.contains_key(name) && one.is_none_or(|one| one == name);
        let gone: Vec<String> = self.mux.keys().filter(|name| is_gone(name)).cloned().collect();
        for name in gone {
            self.mux.remove(&name);
            changed.push(name);
        }
        changed
    }
}

/// Returns the part of a vnet's counters that its status shows.
fn facts(stats: &VnetStats) -> Vec<(bool, Option<UnderlayProblem>, &[String])> {
    let nodes = stats.nodes.values();
    let each = nodes.flat_map(|node| {
        let guests = node.guests.values().map(|guest| guest.connected);
        let engine = node.engine.iter().map(|engine| engine.synced);
        let processes = guests.chain(engine).map(|is| (is, None, &[][..]));
        processes.chain(node.ports.values().map(|port| (false, port.underlay, &port.limiting[..])))
    });
    each.collect()
}

/// Asks mirrors while there are watchers. Does not return.
pub fn ask_mirrors(engine: &DaemonCore) {
    loop {
        let wishes = engine.watch_hub().wait_for_wishes();
        ask_some(engine, &wishes);
        std::thread::sleep(MIRRORS_EVERY);
    }
}

/// Asks the mirrors of vnets that are watched by name. If a reader
/// watches all, also asks some others whose last answer is old.
fn ask_some(engine: &DaemonCore, wishes: &[SampleRequest]) {
    let plan = engine.model().wanted();
    let is_named = |name: &str| wishes.iter().any(|wish| wish.vnet.as_deref() == Some(name));
    let all = named(wishes).is_none();
    let replies = lock(&engine.watch_hub().latest_stats).mirrors.clone();
    let (mut chosen, mut others) = (Vec::new(), Vec::new());
    for (name, vnet) in plan.vnets.iter() {
        let wanted = is_named(name);
        if !wanted && !all {
            continue;
        }
        for mirror in vnet.nodes.values().filter_map(|node| node.mirror.as_ref()) {
            let path = &mirror.config.control_socket;
            let asked_at = replies
                .get(name)
                .and_then(|replies| replies.get(path))
                .map(|(asked_at, _)| *asked_at);
            match (wanted, asked_at) {
                (true, _) => chosen.push((name, path)),
                (false, Some(asked_at)) if asked_at.elapsed() < MIRROR_PAUSE => {}
                (false, asked_at) => others.push((asked_at, name, path)),
            }
        }
    }
    others.sort_unstable();
    chosen.extend(others.into_iter().take(MIRRORS_AT_ONCE).map(|(_, name, path)| (name, path)));
    let questions: Vec<_> = chosen
        .iter()
        .map(|(name, path)| Question {
            path: (*path).clone(),
            tenant: pdp_spec::tenant_of(name).map(str::to_owned),
            what: MirrorClient { path: (*path).clone() },
        })
        .collect();
    let answers = engine
        .late_helpers
        .query_all(&questions, |mirror: &MirrorClient, wait| mirror.status(wait));
    for ((name, path), answer) in chosen.into_iter().zip(answers) {
        store_reply(engine, name, path, answer);
    }
}

/// Stores a mirror's answer. If it changes the status of its vnet, that is determined again.
pub(super) fn store_reply(
    engine: &DaemonCore,
    vnet: &str,
    path: &std::path::Path,
    answer: HelperReply<pdp_proto::mirror::MirrorStatusReply>,
) {
    let shown = |answer: &HelperReply<pdp_proto::mirror::MirrorStatusReply>| match answer {
        HelperReply::Reply(reply) => {
            let guests: Vec<_> =
                reply.stats.guests.iter().map(|guest| (guest.guest, guest.synced)).collect();
            HelperReply::Reply((
                reply.settled,
                reply.stats.routes_refused > 0,
                reply.hooks.clone(),
                guests,
            ))
        }
        HelperReply::None => HelperReply::None,
        HelperReply::TimedOut => HelperReply::TimedOut,
    };
    let hub = engine.watch_hub();
    let mut seen = lock(&hub.latest_stats);
    let replies = Arc::make_mut(seen.mirrors.entry(vnet.to_owned()).or_default());
    let is = shown(&answer);
    let was = replies.insert(path.into(), (Instant::now(), answer));
    drop(seen);
    if was.is_none_or(|(_, was)| shown(&was) != is) {
        hub.touch_vnets([vnet]);
    }
}
