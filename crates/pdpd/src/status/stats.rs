//! Counters of this moment.

use std::collections::BTreeMap;

use pdp_api::{Problem, Stats, StatsQuery};
use pdp_proto::mux;

use crate::access::{AccessScope, no_vnet};
use crate::engine::{DaemonCore, unavailable};
use crate::events::node_counters::{HelperCounters, HelperEndpoint, complete};
use crate::host::query::{HelperReply, Question};

/// Returns the current counters of all vnets of a scope, or of one.
pub fn current(
    engine: &DaemonCore,
    scope: &AccessScope,
    query: StatsQuery,
) -> Result<Stats, Problem> {
    let model = engine.model();
    if let Some(vnet) = &query.vnet
        && !model.vnets.contains_key(vnet)
    {
        return Err(no_vnet(vnet));
    }
    let mut stats = engine.host.stats(query.vnet.as_deref(), &model.plan).map_err(unavailable)?;
    if *scope != AccessScope::Node {
        // A tenant learns nothing about the mux as a whole.
        stats.externals.clear();
        stats.workers.clear();
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    stats.at_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    stats.vnets.retain(|vnet, _| model.plan.vnets.contains_key(vnet) && scope.sees(vnet));
    let mut nodes = Vec::new();
    for (vnet, stats) in &mut stats.vnets {
        let plan = &model.plan.vnets[vnet];
        stats.nodes.retain(|node, _| plan.nodes.contains_key(node) || node == mux::OUTSIDE);
        let known = stats.nodes.iter_mut();
        nodes.extend(known.map(|(node, stats)| (vnet, plan.nodes.get(node), stats)));
    }
    let mut questions = Vec::new();
    for (index, (vnet, plan, _)) in nodes.iter().enumerate() {
        let Some(plan) = plan else { continue };
        let helper = plan.tap_helper.as_ref().map(|helper| HelperEndpoint::Tap(&helper.control));
        let mirror = plan.mirror.as_ref();
        let mirror = mirror.map(|mirror| HelperEndpoint::Mirror(&mirror.config.control_socket));
        for helper in [helper, mirror].into_iter().flatten() {
            let tenant = pdp_spec::tenant_of(vnet).map(str::to_owned);
            let path = helper.path().to_owned();
            questions.push(Question { path, tenant, what: (index, helper) });
        }
    }
    let answers = engine.late_helpers.query_all(&questions, |(_, helper), wait| helper.ask(wait));
    let mut replies: BTreeMap<usize, Vec<(&HelperEndpoint<'_>, HelperReply<HelperCounters>)>> =
        BTreeMap::new();
    for (Question { what: (index, helper), .. }, answer) in questions.iter().zip(answers) {
        replies.entry(*index).or_default().push((helper, answer));
    }
    for (index, (_, plan, stats)) in nodes.into_iter().enumerate() {
        complete(stats, plan, replies.remove(&index).unwrap_or_default());
    }
    Ok(stats)
}
