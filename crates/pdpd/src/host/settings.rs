//! Raises settings of the machine that limit all guests together.

use crate::util::error_chain;
use std::sync::atomic::{AtomicU64, Ordering};

use pdp_container::{INOTIFY_INSTANCES_MAX, TERMINALS_MAX};
use pdp_net::shared;

/// Entries of a neighbour table for others than PdP's networks.
const NEIGHBOURS_OF_OTHERS: u64 = 1024;

/// Most entries of a neighbour table, whatever all networks need. They take
/// about 100 MB of the kernel's memory, which is charged to no cgroup.
const NEIGHBOURS_MAX: u64 = 1 << 18;

/// Pseudo-terminals for others than PdP's guests.
const TERMINALS_OF_OTHERS: u64 = 1024;

/// Highest value that pdpd writes to any of the settings.
const SETTING_MAX: u64 = 1 << 20;

/// Settings that grow with the networks.
#[derive(Debug, Default)]
pub struct KernelSettings {
    neighbours: RaisedSetting,
    terminals: RaisedSetting,
    inotify_instances: RaisedSetting,
}

/// Highest count requested so far.
#[derive(Debug, Default)]
struct RaisedSetting(AtomicU64);

impl KernelSettings {
    /// Raises the size of the neighbour tables for this many entries.
    pub fn raise_neighbour_limits(&self, count: u64) {
        self.neighbours.raise(
            (count + NEIGHBOURS_OF_OTHERS).min(NEIGHBOURS_MAX),
            shared::raise_neighbours,
            "the networks may need more neighbours than the kernel keeps; set net.ipv4.neigh.default.gc_thresh3 and \
             net.ipv6.neigh.default.gc_thresh3",
        );
    }

    /// Raises the number of terminals for `all` guests, and of inotify instances
    /// for the `of_vnet` guests of one network, which are one user to the kernel.
    pub fn raise_guest_limits(&self, all: u64, of_vnet: u64) {
        self.terminals.raise(
            all * u64::from(TERMINALS_MAX) + TERMINALS_OF_OTHERS,
            shared::raise_terminals,
            "one guest can use up the pseudo-terminals of all; set kernel.pty.max",
        );
        self.inotify_instances.raise(
            of_vnet * u64::from(INOTIFY_INSTANCES_MAX),
            shared::raise_inotify_instances,
            "one guest can use up the inotify instances of its network; set fs.inotify.max_user_instances",
        );
    }
}

impl RaisedSetting {
    /// Raises the setting unless it was raised to this count before. `advice`
    /// describes the consequence of a failure, and names the setting for the operator.
    fn raise(&self, count: u64, raise: impl FnOnce(u64) -> pdp_net::Result<()>, advice: &str) {
        let count = count.min(SETTING_MAX);
        if self.0.fetch_max(count, Ordering::Relaxed) < count
            && let Err(error) = raise(count)
        {
            tracing::warn!("{advice} to {count}: {}", error_chain(&error));
        }
    }
}
