//! Whether all virtual networks together have room on the machine.

use super::{Existing, Reporter, Vnets, Wanted};
use crate::limits::{MEMIF_REGIONS_MAX, REGIONS_MAX};
use crate::units::Bytes;
use crate::usage::Usage;

pub(super) fn check(
    wanted: &Wanted<'_>,
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
}

/// Checks that the memory of all guests adds up to no more than there is for them.
fn memory(wanted: &Wanted<'_>, all: &Usage, reporter: &mut Reporter) {
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

/// Checks that the daemon may open what it has to hold.
fn descriptors(all: &Usage, existing: &Existing, reporter: &mut Reporter) {
    let Some(has) = existing.descriptors else { return };
    let (needed, left) = (all.descriptors, has.limit.saturating_sub(has.kept));
    if needed > left {
        let all = format!(
            "{needed} descriptors, one for each interface and each process, exceed {left}: the \
             daemon may open {}, of which it keeps {} for its API",
            has.limit, has.kept
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

/// Checks that the mux can map what all may have it map.
fn regions(wanted: &Wanted<'_>, all: &Usage, reporter: &mut Reporter) {
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
