//! What nodes take of the machine, in limits and in numbers.
//!
//! Computed here alone: the daemon sets the limits that quotas count. What is in no limit because the
//! kernel charges it to nobody is counted all the same.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::limits::{LOG_BYTES_MAX, MEMIF_REGIONS_MAX};
use crate::object::{Attach, ImageSource, Node, NodeKind, Parallel};

/// Memory of a node's helpers, bytes, beside what its spec allows the guest.
const HELPER_MEMORY_BYTES: u64 = 64 << 20;

/// More of it for each route that the route mirror may hold.
const HELPER_ROUTE_BYTES: u64 = 512;

/// Memory that the mux may take for the routes of a router that it forwards for, bytes: so much, and more for each route
/// that it may have. The Internet's look-up tables take 17 for each of IPv4's and 40 for each of IPv6's, twice while a
/// snapshot comes; its groups of next hops and neighbours come beside.
const ENGINE_MEMORY_BYTES: u64 = 32 << 20;
const ENGINE_ROUTE_BYTES: u64 = 256;

/// The same for each filter that its programs may set, with one of IPv6 and one that waits for its commit, and for each
/// counter.
const FILTER_BYTES: u64 = 1024;
const COUNTER_BYTES: u64 = 32;

/// More of it for a node with a way to outside: the helper's, and passt's with what its sockets hold.
const MANAGEMENT_MEMORY_BYTES: u64 = 64 << 20;

/// Processes and threads of a node's helpers, beside what its spec allows the guest.
const HELPER_PROCESSES: u64 = 32;

/// Bytes that are asked of the kernel for notifications of routes, for each route that a mirror may
/// hold, and their bounds: a notification takes some 830, of routes that all change at once a part may
/// wait, and what is lost is read anew.
const NOTIFICATION_ROUTE_BYTES: u64 = 64;
const NOTIFICATION_BYTES_MIN: u64 = 1 << 20;
const NOTIFICATION_BYTES_MAX: u64 = 64 << 20;

/// The kernel gives twice what it is asked for (socket(7), SO_RCVBUF).
const NOTIFICATION_FACTOR: u64 = 2;

/// What the run directory, which is memory that the kernel charges to no node, has of a guest and its helpers beside the
/// words of its spec: the root that is made for it, its bundle and its records. 370 KiB on Debian 12.
pub const RUN_BYTES: u64 = 512 << 10;

/// What a file there takes beside what is in it: a page that is not full.
const RUN_FILE_BYTES: u64 = 4096;

/// Files of a process's log.
const LOG_FILES: u64 = 2;

/// What nodes take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Nodes.
    pub nodes: u64,
    /// CPU quota of hosts and control guests, thousandths of a core.
    pub cpu_millicores: u64,
    /// Power of forwarding guests as it was given out, and of fast paths, thousandths of a core.
    pub power_millicores: u64,
    /// Memory limits, and what is charged to none, as what the run directory has of them, bytes.
    pub memory_bytes: u64,
    /// Limits of processes and threads.
    pub processes: u64,
    /// Interfaces.
    pub vports: u64,
    /// Routes that mirrors may hold.
    pub routes: u64,
    /// Bytes of logs, when they are full.
    pub log_bytes: u64,
    /// Bytes of volumes.
    pub volume_bytes: u64,
    /// Descriptors that the daemon holds: one a TAP and one a process.
    pub descriptors: u64,
    /// Regions of memory that the mux maps at most.
    pub regions: u64,
    /// Packets of the mux that queues have set aside.
    pub buffers: u64,
}

impl Usage {
    /// Combines each number with the other's.
    #[must_use]
    pub fn combine(mut self, other: Self, how: impl Fn(u64, u64) -> u64) -> Self {
        let Self {
            nodes,
            cpu_millicores,
            power_millicores,
            memory_bytes,
            processes,
            vports,
            routes,
            log_bytes,
            volume_bytes,
            descriptors,
            regions,
            buffers,
        } = &mut self;
        for (own, other) in [
            (nodes, other.nodes),
            (cpu_millicores, other.cpu_millicores),
            (power_millicores, other.power_millicores),
            (memory_bytes, other.memory_bytes),
            (processes, other.processes),
            (vports, other.vports),
            (routes, other.routes),
            (log_bytes, other.log_bytes),
            (volume_bytes, other.volume_bytes),
            (descriptors, other.descriptors),
            (regions, other.regions),
            (buffers, other.buffers),
        ] {
            *own = how(*own, other);
        }
        self
    }
}

impl AddAssign for Usage {
    fn add_assign(&mut self, more: Self) {
        *self = self.combine(more, u64::saturating_add);
    }
}

impl Node {
    /// Memory limit of the node's control side as a whole, bytes.
    pub fn control_memory_bytes(&self) -> u64 {
        let routes = match self.kind {
            NodeKind::Router => u64::from(self.resources.routes) * HELPER_ROUTE_BYTES,
            NodeKind::Host => 0,
        };
        let outside = self.management.as_ref().is_some_and(|management| management.outside);
        let outside = if outside { MANAGEMENT_MEMORY_BYTES } else { 0 };
        self.resources.memory.0.saturating_add(HELPER_MEMORY_BYTES + routes + outside)
    }

    /// Bytes that the mux may take for the node's routes, where it forwards by itself.
    pub fn engine_memory_bytes(&self) -> u64 {
        ENGINE_MEMORY_BYTES + u64::from(self.resources.routes) * ENGINE_ROUTE_BYTES
    }

    /// Limit of processes and threads of the node's control side as a whole.
    pub fn control_processes(&self) -> u64 {
        u64::from(self.resources.processes) + HELPER_PROCESSES
    }

    /// Bytes of its volumes.
    fn volume_bytes(&self) -> u64 {
        let sizes = self.volumes.iter().filter_map(|volume| Some(volume.parts()?.size.0));
        sizes.fold(0, u64::saturating_add)
    }

    /// Bytes of notifications that a router's mirror asks the kernel to keep for it.
    pub fn notification_bytes(&self) -> u64 {
        let bytes = u64::from(self.resources.routes) * NOTIFICATION_ROUTE_BYTES;
        bytes.clamp(NOTIFICATION_BYTES_MIN, NOTIFICATION_BYTES_MAX)
    }

    /// What the node takes, where its forwarding guests have these shares of power, thousandths of a
    /// core each.
    pub fn usage(&self, shares: impl IntoIterator<Item = u32>) -> Usage {
        let ports = self.interfaces.len() as u64;
        // Beside the control guest or host itself: who serves its TAPs.
        let mut processes = 1 + u64::from(ports > 0) + u64::from(self.management.is_some());
        let mut usage = Usage {
            nodes: 1,
            cpu_millicores: self.resources.cpu.0.into(),
            memory_bytes: self
                .control_memory_bytes()
                .saturating_add(run_bytes(self, self.files.len())),
            processes: self.control_processes(),
            vports: ports,
            volume_bytes: self.volume_bytes(),
            regions: u64::from(ports > 0),
            ..Usage::default()
        };
        if self.kind == NodeKind::Router {
            usage.routes = self.resources.routes.into();
            let plane = self.plane();
            let needs = plane.as_ref().map(|plane| plane.needs());
            if needs.is_some_and(|needs| needs.punts.is_some()) {
                processes += 1;
                let notifications = self.notification_bytes() * NOTIFICATION_FACTOR;
                usage.memory_bytes = usage.memory_bytes.saturating_add(notifications);
            }
            if let Some(plane) = needs.and_then(|needs| needs.guests) {
                let files = plane.program.own().map_or(0, |own| own.files.len());
                let run = run_bytes(&plane.program, files);
                let memory = plane.memory.0.saturating_add(run);
                for share in shares {
                    processes += of_guest(plane, (ports, memory), share, &mut usage);
                }
            } else {
                usage.power_millicores += shares.into_iter().map(u64::from).sum::<u64>();
            }
            if needs.is_some_and(|needs| needs.mux_routes) {
                usage.memory_bytes = usage.memory_bytes.saturating_add(self.engine_memory_bytes());
            }
            if let Some((filters, counters)) = needs.and_then(|needs| needs.slowpath) {
                let bytes = u64::from(filters) * FILTER_BYTES + u64::from(counters) * COUNTER_BYTES;
                usage.memory_bytes = usage.memory_bytes.saturating_add(bytes);
            }
            usage.power_millicores += needs.map_or(0, |needs| u64::from(needs.mux_millicores));
        }
        usage.log_bytes = processes * LOG_FILES * LOG_BYTES_MAX;
        usage.descriptors = ports + processes;
        usage
    }

    /// The images that are unpacked for the node: by path or name, and reference or digest.
    pub fn oci_images(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.images().filter_map(|image| match image.source() {
            ImageSource::OciLayout(path, reference) => Some((path, reference)),
            ImageSource::Archive(path, _, digest) => Some((path, digest)),
            ImageSource::Pull(name, digest) => Some((name, digest)),
            ImageSource::Host | ImageSource::Rootfs(_) => None,
        })
    }
}

/// What the run directory has of a guest whose spec this is. Its files, environment and commands are in the spec as long
/// as they are there, or longer.
fn run_bytes(spec: &impl Serialize, files: usize) -> u64 {
    // Plain data with string keys: it is always JSON.
    let words = serde_json::to_string(spec).map_or(0, |text| text.len() as u64);
    RUN_BYTES + words.next_multiple_of(RUN_FILE_BYTES) + files as u64 * RUN_FILE_BYTES
}

/// Counts a forwarding guest in; its processes that have a log.
fn of_guest(plane: &Parallel, (ports, memory): (u64, u64), share: u32, usage: &mut Usage) -> u64 {
    usage.power_millicores += u64::from(share);
    usage.memory_bytes = usage.memory_bytes.saturating_add(memory);
    usage.processes += u64::from(plane.processes);
    let (processes, regions) = match plane.attach() {
        // The mux takes no more of these.
        Attach::Runtime => (1, 1),
        Attach::Tap => (2, 1),
        Attach::Memif => (1, ports * MEMIF_REGIONS_MAX),
    };
    usage.regions += regions;
    processes
}
