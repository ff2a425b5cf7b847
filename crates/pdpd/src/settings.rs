//! Raises the settings of the machine that bound what all guests use together.

use std::sync::atomic::{AtomicU64, Ordering};

use pdp_container::{INOTIFY_INSTANCES_MAX, TERMINALS_MAX};
use pdp_net::shared;

use crate::host::words;

/// Entries in a neighbour table that are not of PdP's networks.
const NEIGHBOURS_OF_OTHERS: u64 = 1024;

/// Entries of a neighbour table whatever all networks together need. They take about 100 MB of the kernel's memory,
/// which is charged to no cgroup.
const NEIGHBOURS_MAX: u64 = 1 << 18;

/// Pseudo-terminals that are not of PdP's guests.
const TERMINALS_OF_OTHERS: u64 = 1024;

/// The highest value that pdpd writes to any of the settings.
const SETTING_MAX: u64 = 1 << 20;

/// The settings that grow with the networks.
#[derive(Debug, Default)]
pub struct Settings {
    neighbours: Setting,
    terminals: Setting,
    inotify_instances: Setting,
}

/// The highest count that somebody asked for.
#[derive(Debug, Default)]
struct Setting(AtomicU64);

impl Settings {
    /// Makes room for this many entries in the neighbour tables.
    pub fn hold_neighbours(&self, count: u64) {
        self.neighbours.raise(
            (count + NEIGHBOURS_OF_OTHERS).min(NEIGHBOURS_MAX),
            shared::raise_neighbours,
            "the networks may need more neighbours than the kernel keeps; set net.ipv4.neigh.default.gc_thresh3 and \
             net.ipv6.neigh.default.gc_thresh3",
        );
    }

    /// Makes room for the terminals of all guests, of which there are `all`, and for the inotify instances of the
    /// guests of one network, of which there are `of_vnet` (they are one user to the kernel).
    pub fn hold_guests(&self, all: u64, of_vnet: u64) {
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

impl Setting {
    /// Raises the setting unless it was raised to this count before. `advice` says what happens otherwise, and which
    /// setting the operator can set.
    fn raise(&self, count: u64, raise: impl FnOnce(u64) -> pdp_net::Result<()>, advice: &str) {
        let count = count.min(SETTING_MAX);
        if self.0.fetch_max(count, Ordering::Relaxed) < count
            && let Err(error) = raise(count)
        {
            tracing::warn!("{advice} to {count}: {}", words(&error));
        }
    }
}
