//! Validation of a vnet before anything is changed for it.

use std::collections::HashSet;

use pdp_proto::limits::{
    ADDRESSES_MAX, DELAY_NS_MAX, DSCP_MAX, ENDS_MAX, FLOOD_PPS_MAX, GUESTS_MAX, OVERHEAD_BYTES_MAX,
    PATTERN_BYTES_MAX, PORTS_MAX, PUNT_FILTERS_MAX, QUEUE_BYTES_MAX, QUEUE_FRAMES_MAX, QUEUES_MAX,
    SCHEDULE_STEPS_MAX, VNET_ADDRESSES_MAX, VNET_LINES_BYTES_MAX, VNET_QUEUES_MAX, WEIGHT_MAX,
};
use pdp_proto::mux::{
    self, BytePattern, EgressConfig, FlowKey, FrameFraction, Impairments, OUTSIDE, QueueConfig,
    Vlink, VnetConfig,
};
use pdp_proto::slowpath::{COUNTERS_MAX, DATA_BYTES, FILTERS_MAX};
use pdp_wire::tag::{PuntClass, VPORTS_MAX};

/// Checks everything that does not depend on other vnets.
/// The error names the object, the value and the bound.
pub fn check(vnet: &VnetConfig) -> Result<(), String> {
    let own = vnet.own_ends();
    let total: usize = vnet.nodes.iter().map(|node| node.ports.len()).sum::<usize>() + own.len();
    bound(&format!("vnet {}", vnet.name), "ports", total, PORTS_MAX)?;
    unique("external", own.iter().map(|own| own.name))?;
    unique("node", vnet.nodes.iter().map(|node| node.name.as_str()))?;
    unique("vlink", vnet.vlinks.iter().map(|vlink| vlink.name.as_str()))?;
    for node in &vnet.nodes {
        let name = format!("node {}/{}", vnet.name, node.name);
        if node.name == OUTSIDE {
            return Err(format!("{name}: the name {OUTSIDE} is reserved"));
        }
        bound(&name, "ports", node.ports.len(), VPORTS_MAX)?;
        unique("port", node.ports.iter().map(|port| port.name.as_str()))?;
        let Some(router) = &node.router else { continue };
        bound(&name, "guests", router.guests.len(), GUESTS_MAX)?;
        bound(&name, "punt filters", router.punt_filters.len(), PUNT_FILTERS_MAX)?;
        if let Some(mux::EngineCode::Fields(fields)) = router.engine.as_ref().map(|it| &it.code) {
            let bytes = fields.key.iter().map(|field| usize::from(field.bytes)).sum();
            bound(&name, "bytes of a key", bytes, mux::KEY_FIELD_BYTES_MAX)?;
            bound(&name, "writes", fields.write.len(), mux::WRITES_MAX)?;
            let data = fields.write.iter().filter_map(|write| match write.what {
                mux::WriteSource::Data { from, bytes } => {
                    Some(usize::from(from) + usize::from(bytes))
                }
                _ => None,
            });
            bound(&name, "bytes of data", data.max().unwrap_or(0), DATA_BYTES)?;
        }
        if let Some(slowpath) = router.engine.as_ref().and_then(|it| it.slowpath.as_ref()) {
            bound(&name, "filters", slowpath.filters as usize, FILTERS_MAX as usize)?;
            bound(&name, "counters", slowpath.counters as usize, COUNTERS_MAX as usize)?;
        }
        let mut numbers = HashSet::new();
        for guest in &router.guests {
            if !numbers.insert(guest.number) {
                return Err(format!("{name}: guest number {} is used twice", guest.number));
            }
        }
        if let FlowKey::Bytes(fields) = &router.flow {
            let bytes = fields.iter().map(|field| field.mask.len()).sum();
            bound(&name, "bytes in its flow key", bytes, PATTERN_BYTES_MAX)?;
        }
        for filter in &router.punt_filters {
            check_matches(&name, &filter.matches)?;
            if PuntClass::from_code(filter.class).is_none() {
                return Err(format!("{name}: punt class {} does not exist", filter.class));
            }
        }
    }
    check_vlinks(vnet)
}

/// Checks a list of matches.
pub fn check_matches(name: &str, matches: &[BytePattern]) -> Result<(), String> {
    let bytes = matches.iter().map(|range| range.value.len()).sum();
    bound(name, "bytes in a filter", bytes, PATTERN_BYTES_MAX)?;
    match matches.iter().find(|range| range.value.len() != range.mask.len()) {
        None => Ok(()),
        Some(range) => Err(format!(
            "{name}: filter at offset {}: {} bytes of value, but {} of mask",
            range.offset,
            range.value.len(),
            range.mask.len()
        )),
    }
}

fn check_vlinks(vnet: &VnetConfig) -> Result<(), String> {
    let mut taken = HashSet::new();
    let (mut addresses, mut line_bytes, mut steps, mut queues) = (0, 0u64, 0, 0);
    for vlink in &vnet.vlinks {
        let name = format!("vlink {}/{}", vnet.name, vlink.name);
        check_ends(&name, vlink)?;
        let scheduled = vlink.schedule.iter().flat_map(|schedule| &schedule.steps);
        let of_steps = scheduled.clone().map(|step| &step.leaving);
        for egress in of_steps.chain([&vlink.leaving]) {
            egress.iter().try_for_each(|egress| check_egress(&name, egress))?;
        }
        vlink.queues.iter().try_for_each(|queues| check_queues(&name, queues))?;
        queues += vlink.queues.iter().map(Vec::len).sum::<usize>();
        if !scheduled.clone().is_sorted_by_key(|step| step.at_ns) {
            return Err(format!("{name}: the steps of its schedule are not sorted by time"));
        }
        steps += scheduled.count();
        line_bytes = line_bytes.saturating_add(vlink.line_bytes_max());
        addresses += vlink.segment.map_or(0, |segment| u64::from(segment.addresses));
        for (node, port) in vlink.ports() {
            let known = vnet.nodes.iter().find(|known| known.name == node);
            if known.is_none_or(|known| usize::from(port) >= known.ports.len()) {
                return Err(format!("{name}: node {node} has no port {port}"));
            }
            if !taken.insert((node, port)) {
                return Err(format!("{name}: port {port} of node {node} is used by another vlink"));
            }
        }
    }
    let name = format!("vnet {}", vnet.name);
    let most = VNET_LINES_BYTES_MAX as usize;
    bound(&name, "bytes of delayed frames", line_bytes as usize, most)?;
    bound(&name, "queues", queues, VNET_QUEUES_MAX)?;
    bound(&name, "schedule steps", steps, SCHEDULE_STEPS_MAX)?;
    let most = VNET_ADDRESSES_MAX as usize;
    bound(&name, "segment addresses", addresses as usize, most)
}

fn check_egress(name: &str, egress: &EgressConfig) -> Result<(), String> {
    if egress.rate_bps == Some(0) {
        return Err(format!("{name}: rate is 0 (leave it out for no limit)"));
    }
    let bound = |what, count: u64, most: u64| bound(name, what, count as usize, most as usize);
    bound("queued frames", egress.queue_frames.into(), QUEUE_FRAMES_MAX.into())?;
    bound("bytes of overhead", egress.overhead_bytes.into(), OVERHEAD_BYTES_MAX.into())?;
    bound("weight", egress.weight.into(), WEIGHT_MAX.into())?;
    let Impairments { delay_ns, jitter_ns, loss, reorder, corrupt, duplicate, .. } =
        egress.impairments;
    bound("delay in ns", delay_ns, DELAY_NS_MAX)?;
    bound("jitter in ns", jitter_ns, delay_ns)?;
    let most = [loss, reorder, corrupt, duplicate].into_iter().max().unwrap_or_default();
    bound("share in 1e-9", most.0.into(), FrameFraction::ALL.0.into())
}

fn check_queues(name: &str, queues: &[QueueConfig]) -> Result<(), String> {
    bound(name, "queues at an end", queues.len(), QUEUES_MAX)?;
    unique("queue", queues.iter().map(|queue| queue.name.as_str()))?;
    for QueueConfig { name: queue, weight, frames, bytes, buffers, dscp } in queues {
        let name = format!("{name}: queue {queue}");
        bound(&name, "weight", *weight as usize, WEIGHT_MAX as usize)?;
        bound(&name, "frames", *frames as usize, QUEUE_FRAMES_MAX as usize)?;
        bound(&name, "bytes", *bytes as usize, QUEUE_BYTES_MAX as usize)?;
        bound(&name, "buffers", *buffers as usize, QUEUE_FRAMES_MAX as usize)?;
        bound(&name, "DSCP", dscp.iter().copied().max().unwrap_or(0).into(), DSCP_MAX.into())?;
    }
    let all: Vec<_> = queues.iter().flat_map(|queue| &queue.dscp).collect();
    match all.iter().enumerate().find(|(at, dscp)| all[..*at].contains(dscp)) {
        None => Ok(()),
        Some((_, dscp)) => Err(format!("{name}: two queues select DSCP {dscp}")),
    }
}

fn check_ends(name: &str, vlink: &Vlink) -> Result<(), String> {
    let (count, most) = (vlink.ends.len(), ADDRESSES_MAX as usize);
    match &vlink.segment {
        None if count == 2 => Ok(()),
        None => Err(format!("{name}: {count} ends, 2 expected; only a segment may have more")),
        Some(_) if count <= 2 => {
            Err(format!("{name}: a segment with {count} ends, 3 or more expected"))
        }
        Some(segment) => {
            bound(name, "ends", count, ENDS_MAX)?;
            bound(name, "addresses", segment.addresses as usize, most)?;
            bound(
                name,
                "flooded frames a second",
                segment.flood_pps as usize,
                FLOOD_PPS_MAX as usize,
            )
        }
    }
}

fn bound(name: &str, what: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most {
        return Err(format!("{name}: {what}: {count}, {most} at most"));
    }
    Ok(())
}

fn unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(format!("{what} {name} exists twice"));
        }
    }
    Ok(())
}
