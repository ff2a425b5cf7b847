//! Resources of the machine that nodes use, as limits and numbers.
//!
//! This is the only computation: the daemon sets the same limits that quotas
//! count. It also counts memory that the kernel charges to no cgroup.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::image::ImageSource;
use crate::limits::{LOG_BYTES_MAX, MEMIF_REGIONS_MAX};
use crate::object::{Node, NodeKind};
use crate::plane::{Parallel, ProgramAttach};

/// Memory of a node's helpers, bytes, besides the guest's own limit.
const HELPER_MEMORY_BYTES: u64 = 64 << 20;

/// Additional memory per route that the route mirror may hold, bytes.
const HELPER_ROUTE_BYTES: u64 = 512;

/// Memory of the mux for the routes of a router that it forwards for, bytes: a base, and
/// more per possible route. The Internet's look-up tables take 17 bytes per IPv4 route and
/// 40 per IPv6 route, twice during a snapshot. Next hop groups and neighbours come on top.
const ENGINE_MEMORY_BYTES: u64 = 32 << 20;
const ENGINE_ROUTE_BYTES: u64 = 256;

/// Memory per filter that the router's programs may set, bytes, and per
/// counter. It covers an IPv6 filter and one that waits for its commit.
const FILTER_BYTES: u64 = 1024;
const COUNTER_BYTES: u64 = 32;

/// Additional memory for a node with access to the machine's network,
/// bytes: the helper's, and passt's with its socket buffers.
const MANAGEMENT_MEMORY_BYTES: u64 = 64 << 20;

/// Processes and threads of a node's helpers, besides the guest's own limit.
const HELPER_PROCESSES: u64 = 32;

/// Socket buffer for route notifications, bytes per route that a mirror may hold,
/// with minimum and maximum. A notification takes some 830 bytes. If all routes
/// change at once, a part waits there, and lost notifications cause a new dump.
const NOTIFICATION_ROUTE_BYTES: u64 = 64;
const NOTIFICATION_BYTES_MIN: u64 = 1 << 20;
const NOTIFICATION_BYTES_MAX: u64 = 64 << 20;

/// The kernel provides twice the requested size (socket(7), SO_RCVBUF).
const NOTIFICATION_FACTOR: u64 = 2;

/// Run directory memory of a guest and its helpers, besides its spec's text: root,
/// bundle and records. The kernel charges it to no cgroup. 370 KiB on Debian 12.
pub const RUN_BYTES: u64 = 512 << 10;

/// Overhead of a file there: a page that is not full.
const RUN_FILE_BYTES: u64 = 4096;

/// Log files per process.
const LOG_FILES: u64 = 2;

/// Resources that nodes use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Number of nodes.
    pub nodes: u64,
    /// CPU quota of hosts and control guests, thousandths of a core.
    pub cpu_millicores: u64,
    /// Allocated power of forwarding guests and fast paths, thousandths of a core.
    pub power_millicores: u64,
    /// Memory limits, and memory charged to no cgroup such as the run directory's, bytes.
    pub memory_bytes: u64,
    /// Limits of processes and threads.
    pub processes: u64,
    /// Number of interfaces.
    pub vports: u64,
    /// Routes that mirrors may hold.
    pub routes: u64,
    /// Bytes of full logs.
    pub log_bytes: u64,
    /// Bytes of volumes.
    pub volume_bytes: u64,
    /// File descriptors of the daemon: one per TAP and per process.
    pub descriptors: u64,
    /// Maximum number of memory regions that the mux maps.
    pub regions: u64,
    /// Packets of the mux that queues reserve.
    pub buffers: u64,
}

impl Usage {
    /// Combines each number with the corresponding one of `other`.
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
    /// Memory limit of the node's control side in total, bytes.
    pub fn control_memory_bytes(&self) -> u64 {
        let routes = match self.kind {
            NodeKind::Router => u64::from(self.resources.routes) * HELPER_ROUTE_BYTES,
            NodeKind::Host => 0,
        };
        let outside = self.management.as_ref().is_some_and(|management| management.outside);
        let outside = if outside { MANAGEMENT_MEMORY_BYTES } else { 0 };
        self.resources.memory.0.saturating_add(HELPER_MEMORY_BYTES + routes + outside)
    }

    /// Memory that the mux may use for the node's routes if it forwards for it, bytes.
    pub fn engine_memory_bytes(&self) -> u64 {
        ENGINE_MEMORY_BYTES + u64::from(self.resources.routes) * ENGINE_ROUTE_BYTES
    }

    /// Limit on processes and threads of the node's control side in total.
    pub fn control_processes(&self) -> u64 {
        u64::from(self.resources.processes) + HELPER_PROCESSES
    }

    /// Bytes of its volumes.
    fn volume_bytes(&self) -> u64 {
        let sizes = self.volumes.iter().filter_map(|volume| Some(volume.parts()?.size.0));
        sizes.fold(0, u64::saturating_add)
    }

    /// Socket buffer for notifications that a router's mirror requests from the kernel, bytes.
    pub fn notification_bytes(&self) -> u64 {
        let bytes = u64::from(self.resources.routes) * NOTIFICATION_ROUTE_BYTES;
        bytes.clamp(NOTIFICATION_BYTES_MIN, NOTIFICATION_BYTES_MAX)
    }

    /// Returns the node's usage. `shares` has the power of
    /// each of its forwarding guests, thousandths of a core.
    pub fn usage(&self, shares: impl IntoIterator<Item = u32>) -> Usage {
        let ports = self.interfaces.len() as u64;
        // Besides the control guest or host itself: the server of its TAPs.
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
            let needs = self.plane().map(|plane| plane.needs());
            if needs.is_some_and(|needs| needs.punts.is_some()) {
                processes += 1;
                let notifications = self.notification_bytes() * NOTIFICATION_FACTOR;
                usage.memory_bytes = usage.memory_bytes.saturating_add(notifications);
            }
            if let Some(plane) = needs.and_then(|needs| needs.guests) {
                let files = plane.program.user_program().map_or(0, |own| own.files.len());
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

    /// Returns the images unpacked for the node, by path or name, and reference or digest.
    pub fn oci_images(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        self.images().filter_map(|image| match image.source() {
            ImageSource::OciLayout(path, reference) => Some((path, reference)),
            ImageSource::Archive(path, _, digest) => Some((path, digest)),
            ImageSource::Pull(name, digest) => Some((name, digest)),
            ImageSource::Host | ImageSource::Rootfs(_) => None,
        })
    }
}

/// Returns the run directory's memory for a guest with this spec, bytes. Its
/// files, environment and commands are no longer there than in the spec.
fn run_bytes(spec: &impl Serialize, files: usize) -> u64 {
    // Plain data with string keys: it is always JSON.
    let words = serde_json::to_string(spec).map_or(0, |text| text.len() as u64);
    RUN_BYTES + words.next_multiple_of(RUN_FILE_BYTES) + files as u64 * RUN_FILE_BYTES
}

/// Adds a forwarding guest. Returns the number of its processes with a log.
fn of_guest(plane: &Parallel, (ports, memory): (u64, u64), share: u32, usage: &mut Usage) -> u64 {
    usage.power_millicores += u64::from(share);
    usage.memory_bytes = usage.memory_bytes.saturating_add(memory);
    usage.processes += u64::from(plane.processes);
    let (processes, regions) = match plane.attach() {
        // The mux accepts no more of these.
        ProgramAttach::Runtime => (1, 1),
        ProgramAttach::Tap => (2, 1),
        ProgramAttach::Memif => (1, ports * MEMIF_REGIONS_MAX),
    };
    usage.regions += regions;
    processes
}
