//! Checks that all virtual networks together fit on the machine.

use super::{DesiredState, Existing, Reporter, Vnets};
use crate::limits::{MEMIF_REGIONS_MAX, REGIONS_MAX};
use crate::link::Link;
use crate::object::VirtualNetwork;
use crate::units::Bytes;
use crate::usage::Usage;

pub(super) fn check(
    desired: &DesiredState<'_>,
    vnets: &Vnets,
    existing: &Existing,
    reporter: &mut Reporter,
) {
    let mut all = Usage::default();
    for vnet in vnets.values() {
        all += vnet.usage();
    }
    memory(desired, &all, reporter);
    descriptors(&all, existing, reporter);
    regions(desired, &all, reporter);
    buffers(desired, reporter);
}

/// Checks the sum of all guests' memory against the machine's limit.
fn memory(desired: &DesiredState<'_>, all: &Usage, reporter: &mut Reporter) {
    let host = desired.substrate.as_ref().and_then(|s| s.spec.management_host.as_ref());
    let Some(bound) = host.and_then(|host| host.memory) else { return };
    if all.memory_bytes > bound.0 {
        let sum = Bytes(all.memory_bytes);
        let all = format!(
            "memory of all guests and their helpers, {sum}, exceeds managementHost.memory {bound}"
        );
        let message = reporter.of_all(all, "the machine has too little memory for these guests");
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
            "{needed} file descriptors, one per interface and process, exceed {left}: pdpd may \
             open {}, of which it keeps {} for its API",
            has.limit, has.unchanged_vnets
        );
        let little = "the machine can't take so many interfaces and processes";
        let message = reporter.of_all(all, little);
        let hint = reporter.of_all(
            "raise LimitNOFILE of pdpd's service (or `ulimit -Hn`) and restart pdpd, or delete some"
                .into(),
            "ask for less, or ask an operator",
        );
        reporter.general(message, hint);
    }
}

/// Checks the memory regions that the mux may have to map.
fn regions(desired: &DesiredState<'_>, all: &Usage, reporter: &mut Reporter) {
    let interfaces = desired.substrate.iter().flat_map(|s| s.spec.interfaces.values());
    let outside = interfaces.filter(|interface| interface.memif.is_some()).count() as u64;
    let needed = all.regions.saturating_add(outside * MEMIF_REGIONS_MAX);
    if needed > REGIONS_MAX {
        let all = format!("{needed} memory regions exceed the {REGIONS_MAX} that the mux can map");
        let message = reporter.of_all(all, "the machine can't take so many memif connections");
        let hint = reporter.of_all(
            format!(
                "a memif program uses {MEMIF_REGIONS_MAX} per interface; use fewer programs or \
                 interfaces, or delete some"
            ),
            "use fewer forwarding guests or interfaces, or ask an operator",
        );
        reporter.general(message, hint);
    }
}

/// Checks that the mux has enough packets for all reserved queue buffers.
fn buffers(desired: &DesiredState<'_>, reporter: &mut Reporter) {
    let Some(substrate) = &desired.substrate else { return };
    let bound = substrate.spec.mux.buffers();
    let kept: u64 = desired.reserved().map(|(_, vnet)| vnet.usage().buffers).sum();
    let requested = |vnet: &VirtualNetwork| vnet.spec.links.iter().map(Link::buffers).sum::<u64>();
    let reserved = |name: &str| desired.before.get(name).map_or(0, |vnet| vnet.usage().buffers);
    let (grow, stay): (Vec<_>, Vec<_>) =
        desired.changed.iter().partition(|(name, vnet)| requested(vnet) > reserved(name));
    // Networks that want no more than they have come first, so
    // that others in the same change get what they release.
    let mut given = kept + stay.iter().map(|(_, vnet)| requested(vnet)).sum::<u64>();
    for (vnet, spec) in grow {
        for (at, link) in spec.spec.links.iter().enumerate().filter(|it| it.1.buffers() > 0) {
            let buffers = link.buffers();
            if given + buffers <= bound {
                given += buffers;
                continue;
            }
            let free = bound.saturating_sub(given);
            let details = format!(
                "buffers {buffers} exceed the {free} free: queues can reserve {bound} of the mux's \
                 packets"
            );
            let message = reporter
                .of_all(details, &format!("buffers {buffers} exceed the mux's free packets"));
            let hint = reporter.of_all(
                "lower buffers, leave the key out to share unreserved packets, lower those of \
                 another queue, or give the mux fewer workers, which split its packets"
                    .into(),
                "lower buffers, leave the key out to share unreserved packets, or lower those of \
                 another of your queues",
            );
            reporter.vnet(vnet, &["spec", "links", &at.to_string()], message, hint);
        }
    }
    if kept > bound && reporter.substrate.is_some() {
        let workers = substrate.spec.mux.workers;
        let message = format!(
            "{workers} workers leave {bound} packets for buffers of queues, but queues reserve \
             {kept}"
        );
        let hint = "use fewer workers, or lower the queues' buffers first";
        reporter.substrate(&["spec", "mux", "workers"], message, hint);
    }
}
