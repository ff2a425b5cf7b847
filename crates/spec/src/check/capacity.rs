//! Checks that all virtual networks together fit on the machine.

use super::{DesiredState, Existing, Reporter, Vnets};
use crate::limits::{MEMIF_REGIONS_MAX, REGIONS_MAX};
use crate::link::Link;
use crate::object::VirtualNetwork;
use crate::units::Bytes;
use crate::usage::Usage;

pub(super) fn check(
    wanted: &DesiredState<'_>,
    vnets: &Vnets,
    existing: &Existing,
    reporter: &mut Reporter,
) {
    let mut all = Usage::default();
    for vnet in vnets.values() {
        all += vnet.usage();
    }
    memory(wanted, &all, reporter);
    descriptors(&all, existing, reporter);
    regions(wanted, &all, reporter);
    buffers(wanted, reporter);
}

/// Checks the sum of all guests' memory against the machine's limit.
fn memory(wanted: &DesiredState<'_>, all: &Usage, reporter: &mut Reporter) {
    let host = wanted.substrate.as_ref().and_then(|s| s.spec.management_host.as_ref());
    let Some(bound) = host.and_then(|host| host.memory) else { return };
    if all.memory_bytes > bound.0 {
        let sum = Bytes(all.memory_bytes);
        let all =
            format!("memory of all guests and their helpers, {sum}, exceeds the {bound} there is");
        let message = reporter.of_all(all, "the node has no room for the memory of these guests");
        let hint = reporter.of_all(
            "lower resources.memory, resources.routes or dataPlane.memory, or raise \
             managementHost.memory"
                .into(),
            "lower resources.memory, resources.routes or dataPlane.memory",
        );
        reporter.general(message, hint);
    }
}

/// Checks the file descriptors that the daemon needs.
fn descriptors(all: &Usage, existing: &Existing, reporter: &mut Reporter) {
    let Some(has) = existing.descriptors else { return };
    let (needed, left) = (all.descriptors, has.limit.saturating_sub(has.unchanged_vnets));
    if needed > left {
        let all = format!(
            "{needed} descriptors, one for each interface and each process, exceed {left}: the \
             daemon may open {}, of which it keeps {} for its API",
            has.limit, has.unchanged_vnets
        );
        let little = "the node has no room for so many interfaces and processes";
        let message = reporter.of_all(all, little);
        let hint = reporter.of_all(
            "raise LimitNOFILE of pdpd's service (or `ulimit -Hn`) and start pdpd anew, or delete some"
                .into(),
            "ask for less, or ask an operator",
        );
        reporter.general(message, hint);
    }
}

/// Checks the memory regions that the mux may have to map.
fn regions(wanted: &DesiredState<'_>, all: &Usage, reporter: &mut Reporter) {
    let interfaces = wanted.substrate.iter().flat_map(|s| s.spec.interfaces.values());
    let outside = interfaces.filter(|interface| interface.memif.is_some()).count() as u64;
    let needed = all.regions.saturating_add(outside * MEMIF_REGIONS_MAX);
    if needed > REGIONS_MAX {
        let all = format!("{needed} regions of memory exceed the {REGIONS_MAX} that the mux maps");
        let message = reporter.of_all(all, "the node has no room for so many memif connections");
        let hint = reporter.of_all(
            format!(
                "a memif program takes {MEMIF_REGIONS_MAX} for each of its interfaces; use fewer of \
                 both, or delete some"
            ),
            "use fewer forwarding guests or interfaces, or ask an operator",
        );
        reporter.general(message, hint);
    }
}

/// Checks that the mux has enough packets for all reserved queue buffers.
fn buffers(wanted: &DesiredState<'_>, reporter: &mut Reporter) {
    let Some(substrate) = &wanted.substrate else { return };
    let bound = substrate.spec.mux.buffers();
    let kept: u64 = wanted.reserved().map(|(_, vnet)| vnet.usage().buffers).sum();
    let asked = |vnet: &VirtualNetwork| vnet.spec.links.iter().map(Link::buffers).sum::<u64>();
    let has = |name: &str| wanted.before.get(name).map_or(0, |vnet| vnet.usage().buffers);
    let (grow, stay): (Vec<_>, Vec<_>) =
        wanted.changed.iter().partition(|(name, vnet)| asked(vnet) > has(name));
    // Networks that want no more than they have come first, so
    // that others in the same change get what they release.
    let mut given = kept + stay.iter().map(|(_, vnet)| asked(vnet)).sum::<u64>();
    for (vnet, spec) in grow {
        for (at, link) in spec.spec.links.iter().enumerate().filter(|it| it.1.buffers() > 0) {
            let buffers = link.buffers();
            if given + buffers <= bound {
                given += buffers;
                continue;
            }
            let free = bound.saturating_sub(given);
            let told = format!(
                "buffers {buffers} have no room: queues can have {bound} packets of the mux, of which {free} are free"
            );
            let message = reporter.of_all(told, &format!("buffers {buffers}: the mux has no room"));
            let hint = reporter.of_all(
                "ask for less, leave buffers out to share what others leave, take them from another queue, or give \
                 the mux fewer workers, which share its packets"
                    .into(),
                "ask for less, leave buffers out to share what others leave, or take them from another of your queues",
            );
            reporter.vnet(vnet, &["spec", "links", &at.to_string()], message, hint);
        }
    }
    if kept > bound && reporter.substrate.is_some() {
        let workers = substrate.spec.mux.workers;
        let message = format!(
            "{workers} workers leave {bound} packets for the buffers of queues, below the {kept} that these have"
        );
        let hint = "keep fewer workers, or lower buffers of queues first";
        reporter.substrate(&["spec", "mux", "workers"], message, hint);
    }
}
