//! Plans what shall run, from the specs, the allocations and the daemon's paths.
//!
//! Pure: no clock, no file, no socket; the same input gives the same plan. Every object of a
//! plan has a hash of its inputs, so that a change affects only the objects that it concerns.
//! Properties that can change while an object runs (limits) are not part of the hash.
//!
//! [`node`] plans one node. [`kernel_links`] and [`kernel_tunnels`] select the links that stay in
//! the kernel. [`hosts`] makes the nodes' names for each other. [`convert`] translates a spec's
//! terms into those of the mux and the guests.
//!
//! Source: docs/ARCHITECTURE.md, "Places".

pub mod allocations;
mod commands;
mod convert;
mod hosts;
mod kernel_links;
mod kernel_tunnels;
pub mod key;
mod network;
mod node;
#[cfg(test)]
mod pretend;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::IpNet;
use pdp_container::{GuestSpec, HelperSpec, LOG_BYTES_MAX, Limits};
use pdp_net::route::StaticRouteSpec;
use pdp_net::tap::TapSpec;
use pdp_net::xdp::Take;
use pdp_proto::limits::{ANSWERED_MAX, ASKED_MAX};
use pdp_proto::{management, mirror, mux, tap};
use pdp_spec::units::{Base64, Endpoint};
use pdp_spec::{
    DeviceAttach, ExternalForm, LinkEgress, NodeKind, SubstrateSpec, VirtualNetworkSpec, Vnets,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::plan::allocations::{
    Allocations, EnginePlacement, UID_BASE, VnetAllocation, vnet_uid_base,
};
use crate::plan::key::{ObjectKey, ProcessRole, dotless};
use crate::util::shared::{self, SharedMap, differing};
pub use commands::CommandPlan;
use convert::rate;
pub use kernel_links::{
    KernelLinkPort, KernelLinkPortState, KernelLinkTarget, KernelTunnel, LinkPath,
    kernel_link_ports,
};
use kernel_tunnels::KernelTunnelLink;
pub use kernel_tunnels::kernel_tunnel_ports;
pub use network::SysctlPlan;
use node::NodePlanner;

/// Paths and names of one pdpd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonPaths {
    /// Run directory.
    pub run: PathBuf,
    /// Directory of the helper binaries.
    pub lib: PathBuf,
    /// Directory of pins, below a BPF file system.
    pub pins: PathBuf,
}

impl DaemonPaths {
    /// Directory of process records, each in a directory named by its id. Only root
    /// can access it; guests, helpers and the mux can't write anything in there.
    pub fn records(&self) -> PathBuf {
        self.run.join("records")
    }

    /// Returns the records of an object's process.
    pub fn record(&self, key: &ObjectKey, role: ProcessRole) -> PathBuf {
        self.records().join(key.process_id(role))
    }

    /// Returns the directory of a node's sockets.
    pub fn node(&self, vnet: &str, node: &str) -> PathBuf {
        self.run.join("vnets").join(vnet).join(node)
    }

    /// Name of a vnet's directory that only its nodes may enter. No node has this name.
    pub const NAMES: &str = "_names";

    /// File in that directory that nodes see as `/etc/hosts`.
    pub const HOSTS: &str = "hosts";

    /// Counterpart of that file in older versions, next to that directory.
    pub const HOSTS_BEFORE: &str = "_hosts";

    /// Returns the file that the nodes of a vnet see as `/etc/hosts`.
    pub fn hosts(&self, vnet: &str) -> PathBuf {
        self.run.join("vnets").join(vnet).join(Self::NAMES).join(Self::HOSTS)
    }

    /// Returns the mux's control socket.
    pub fn mux_control(&self) -> PathBuf {
        self.run.join("mux/control.sock")
    }

    /// Returns the socket at which the mux listens for the program behind an external interface.
    pub fn external_memif(&self, name: &str) -> PathBuf {
        self.run.join("externals").join(name).join("memif.sock")
    }

    /// Returns the cgroup of a vnet, below pdpd's own. Names that PdP users choose get
    /// the prefix `_`, which no kernel file next to a cgroup has (`tasks`, `cpu.max`).
    pub fn vnet_cgroup(vnet: &str) -> String {
        format!("vnets/_{}", dotless(vnet))
    }

    /// Returns the cgroup of a node's control side.
    pub fn node_cgroup(vnet: &str, node: &str) -> String {
        format!("{}/_{node}", Self::vnet_cgroup(vnet))
    }

    /// Returns the cgroup of a forwarding guest.
    pub fn guest_cgroup(vnet: &str, node: &str, number: u32) -> String {
        format!("{}.g{number}", Self::node_cgroup(vnet, node))
    }

    /// Returns the cgroup of the kernel's work for a node whose kernel forwards.
    pub fn kernel_cgroup(vnet: &str, node: &str) -> String {
        format!("{}.kernel", Self::node_cgroup(vnet, node))
    }

    /// Returns the directories of all processes that an object may have, inner ones first.
    pub fn processes(&self, key: &ObjectKey) -> Vec<PathBuf> {
        key.roles().iter().rev().map(|role| self.record(key, *role)).collect()
    }

    fn binary(&self, name: &str) -> String {
        self.lib.join(name).to_string_lossy().into_owned()
    }
}

/// Everything that shall run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The mux, unless the plan is empty.
    pub mux: Option<Arc<MuxPlan>>,
    /// External interfaces by name.
    pub externals: BTreeMap<String, Arc<ExternalPlan>>,
    /// Vnets by name. An unchanged one is the same object.
    pub vnets: SharedMap<VnetPlan>,
    /// Stopped vnets by name. Nothing of them runs, and their persistent parts stay.
    pub stopped: SharedMap<VnetPlan>,
    /// Vnets whose specs can't be used. Nothing of them runs, and their volumes stay.
    pub damaged: BTreeSet<String>,
    /// Sum of the vnets' weights, [`VnetPlan::weight`].
    pub weight: u64,
    /// Capacity of all forwarding engines, thousandths of a core.
    pub capacity: u64,
    /// Entries of the kernel's neighbour table for all vnets, [`VnetPlan::neighbours`].
    pub neighbours: u64,
    /// Guests of all vnets, [`VnetPlan::guests`].
    pub guests: u64,
}

impl Plan {
    /// Returns the CPU weight of all vnets together, relative to the mux:
    /// the engines' capacity, or the sum of the vnets' weights if that is
    /// higher. So vnets without power of their own get unused capacity.
    pub fn weight_together(&self) -> u32 {
        u32::try_from(self.weight.max(self.capacity)).unwrap_or(u32::MAX)
    }

    /// True if nothing shall run.
    pub fn is_empty(&self) -> bool {
        self.mux.is_none() && self.externals.is_empty() && self.vnets.is_empty()
    }

    /// Returns the keys of all objects.
    pub fn keys(&self) -> BTreeSet<ObjectKey> {
        let mut keys: BTreeSet<ObjectKey> =
            self.externals.keys().map(|name| ObjectKey::external(name)).collect();
        keys.extend(self.mux.is_some().then_some(ObjectKey::Mux));
        for (name, vnet) in &*self.vnets {
            keys.extend(vnet.keys(name));
        }
        keys
    }

    /// True if an object is planned.
    pub fn has(&self, key: &ObjectKey) -> bool {
        match key {
            ObjectKey::Mux => self.mux.is_some(),
            ObjectKey::External(name) => self.externals.contains_key(name),
            ObjectKey::Vnet(vnet) => self.vnets.contains_key(vnet),
            ObjectKey::Node { vnet, node } => self.node(vnet, node).is_some(),
            ObjectKey::Guest { vnet, node, number } => {
                self.node(vnet, node).is_some_and(|node| node.guests.contains_key(number))
            }
            ObjectKey::Leftovers => true,
        }
    }

    /// Returns the plan in which nothing runs and all vnets of this plan are stopped.
    pub fn at_rest(&self) -> Self {
        Self { stopped: self.vnets.clone(), damaged: self.damaged.clone(), ..Self::default() }
    }

    /// Returns the names of a node's volumes that shall stay.
    pub fn volumes(&self, vnet: &str, node: &str) -> BTreeSet<&str> {
        let vnet = self.vnets.get(vnet).or_else(|| self.stopped.get(vnet));
        let node = vnet.and_then(|vnet| vnet.nodes.get(node));
        let volumes = node.into_iter().flat_map(|node| &node.control.volumes);
        volumes.map(|volume| volume.name.as_str()).collect()
    }

    /// Returns the numbers of all ports whose frames stay in the kernel, except those of one node.
    pub fn ports(&self, without: Option<&ObjectKey>) -> BTreeSet<u32> {
        let nodes = self.vnets.iter().flat_map(|(name, vnet)| {
            vnet.nodes.iter().map(move |(node, plan)| (ObjectKey::node(name, node), plan))
        });
        let others = nodes.filter(|(key, _)| Some(key) != without);
        others
            .flat_map(|(_, plan)| plan.kernel_links.values())
            .map(|port| port.spec.number)
            .collect()
    }

    /// Returns the directories of control guests with volumes that shall stay.
    pub fn with_volumes(&self) -> impl Iterator<Item = &PathBuf> {
        let vnets = self.vnets.values().chain(self.stopped.values());
        let controls = vnets.flat_map(|vnet| vnet.nodes.values()).map(|node| &node.control);
        controls.filter(|control| !control.volumes.is_empty()).map(|control| &control.dir)
    }

    fn node(&self, vnet: &str, node: &str) -> Option<&NodePlan> {
        self.vnets.get(vnet)?.nodes.get(node)
    }

    /// Returns the roles of an object's processes that shall run.
    pub fn processes(&self, key: &ObjectKey) -> BTreeSet<ProcessRole> {
        let roles = key.roles().iter().copied();
        match key {
            ObjectKey::Node { vnet, node } => {
                let Some(node) = self.node(vnet, node) else { return BTreeSet::new() };
                let runs = |role: &ProcessRole| match role {
                    ProcessRole::Main => true,
                    ProcessRole::Tap => node.tap_helper.is_some(),
                    ProcessRole::Mirror => node.mirror.is_some(),
                    ProcessRole::Management => node.management.is_some(),
                };
                roles.filter(runs).collect()
            }
            ObjectKey::Guest { vnet, node, number } => {
                let node = self.node(vnet, node);
                let Some(guest) = node.and_then(|node| node.guests.get(number)) else {
                    return BTreeSet::new();
                };
                roles.filter(|role| *role == ProcessRole::Main || guest.taps.is_some()).collect()
            }
            ObjectKey::Mux => roles.filter(|_| self.mux.is_some()).collect(),
            ObjectKey::External(_) | ObjectKey::Vnet(_) | ObjectKey::Leftovers => BTreeSet::new(),
        }
    }

    /// Returns the objects that change from `before` to this plan, including
    /// new and removed ones. Parts that both plans have in common are skipped.
    pub fn changed_from(&self, before: &Self) -> BTreeSet<ObjectKey> {
        let mut changed = BTreeSet::new();
        let new_mux = match (&before.mux, &self.mux) {
            (Some(was), Some(is)) => was.hash != is.hash,
            (was, is) => was.is_some() != is.is_some(),
        };
        if before.mux != self.mux {
            changed.insert(ObjectKey::Mux);
        }
        let names = self.externals.keys().chain(before.externals.keys());
        for name in names {
            // A new mux needs all of them again.
            if new_mux || before.externals.get(name) != self.externals.get(name) {
                changed.insert(ObjectKey::external(name));
            }
        }
        if new_mux {
            changed.extend(self.vnets.keys().map(|name| ObjectKey::vnet(name)));
        }
        for name in differing(&before.vnets, &self.vnets) {
            let (was, is) = (before.vnets.get(name), self.vnets.get(name));
            changed.insert(ObjectKey::vnet(name));
            // The carrier of a node's ports follows from the links.
            let links = |vnet: &&Arc<VnetPlan>| (vnet.mux.vlinks.clone(), vnet.silent.clone());
            let links = was.as_ref().map(links) != is.as_ref().map(links);
            for node in was.iter().chain(&is).flat_map(|vnet| vnet.nodes.keys()) {
                let was = was.and_then(|vnet| vnet.nodes.get(node));
                let is = is.and_then(|vnet| vnet.nodes.get(node));
                let control = |node: &NodePlan| {
                    let hooks = node.mirror.as_ref().map(|mirror| mirror.config.hooks);
                    let management = node.management.as_ref().map(|helper| helper.config.clone());
                    (
                        node.hash.clone(),
                        node.control.limits.clone(),
                        hooks,
                        node.routes.clone(),
                        node.kernel_links.clone(),
                        management,
                        node.kernel.clone(),
                    )
                };
                if links || was.map(control) != is.map(control) {
                    changed.insert(ObjectKey::node(name, node));
                }
                for &number in was.iter().chain(&is).flat_map(|node| node.guests.keys()) {
                    let guest = |node: &'_ NodePlan| node.guests.get(&number).cloned();
                    if was.and_then(guest) != is.and_then(guest) {
                        changed.insert(ObjectKey::guest(name, node, number));
                    }
                }
            }
        }
        changed
    }
}

/// The mux.
#[derive(Clone, Debug, PartialEq)]
pub struct MuxPlan {
    /// Process of the mux.
    pub process: HelperSpec,
    /// Limits of its cgroup.
    pub limits: Limits,
    /// Hash of everything except the limits.
    pub hash: String,
}

/// An external interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalPlan {
    /// Limit of what all its links may send together, bit/s.
    pub capacity_bps: Option<u64>,
    /// Outlet of the interface.
    pub outlet: OutletPlan,
}

/// Outlet of an external interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutletPlan {
    /// A network device.
    Device(DevicePlan),
    /// A memif program.
    Memif(MemifPlan),
    /// A traffic generator and sink inside the mux.
    Generator(GeneratorPlan),
}

impl ExternalPlan {
    /// Returns the device behind it.
    pub fn device_plan(&self) -> Option<&DevicePlan> {
        match &self.outlet {
            OutletPlan::Device(device) => Some(device),
            OutletPlan::Memif(_) | OutletPlan::Generator(_) => None,
        }
    }

    /// Returns the device's name.
    pub fn device(&self) -> Option<&str> {
        Some(&self.device_plan()?.device)
    }
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// Name of the device.
    pub device: String,
    /// Driver that receives and sends frames on this device.
    pub attach: DeviceAttach,
    /// Workers of the mux; each has a packet socket.
    pub workers: u32,
    /// Frames that the XDP program takes.
    pub selection: FrameSelection,
    /// Directory of its pins.
    pub pins: PathBuf,
}

/// Selection of a device's frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameSelection {
    /// Take every frame.
    pub all: bool,
    /// Take frames of these tunnels.
    pub tunnels: BTreeSet<Take>,
    /// True if some of these tunnels belong to ports whose frames stay in the kernel.
    pub ports: bool,
}

impl FrameSelection {
    /// True if this includes frames that are not sent to the device's own MAC address.
    pub fn anybodys(&self) -> bool {
        self.all || self.tunnels.iter().any(Take::accepts_any_sender)
    }
}

/// A memif program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemifPlan {
    /// Socket at which the mux listens for it. Its directory contains nothing else.
    pub socket: PathBuf,
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Group whose programs may connect, by name or number on this machine.
    pub group: Option<String>,
}

/// A traffic generator and sink inside the mux.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratorPlan {
    /// Configuration for the mux.
    pub config: mux::GeneratorConfig,
    /// The pcap file with its frames.
    pub pcap: Option<Base64>,
    /// Hash of the file.
    pub hash: String,
}

/// A vnet.
#[derive(Clone, Debug, PartialEq)]
pub struct VnetPlan {
    /// Nodes by name.
    pub nodes: BTreeMap<String, NodePlan>,
    /// Configuration for the mux, plus the vlinks in `kernel_tunnels`. Its nodes
    /// are in the order of [`VnetPlan::nodes`].
    pub mux: mux::VnetConfig,
    /// Links as written: name and the two ends, in the order of `mux.vlinks`.
    pub links: Vec<Vec<Endpoint>>,
    /// Path of each link's frames, in the same order.
    pub paths: Vec<LinkPath>,
    /// Names of external links that stay in the kernel.
    pub kernel_tunnels: BTreeSet<String>,
    /// Names of links that are down and whose ends keep their carrier.
    pub silent: BTreeSet<String>,
    /// File that its nodes see as `/etc/hosts`.
    pub hosts: String,
    /// Frames that it takes from external interfaces.
    pub frame_selections: BTreeMap<String, FrameSelection>,
    /// CPU weight, thousandths of a core ([`pdp_container::cgroup::Cgroups::weigh`]): the
    /// guaranteed power of its guests. Its control side thus competes with its own guests for
    /// their CPU, and not with others. A vnet without guaranteed power has [`LENT_WEIGHT`].
    pub weight: u32,
    /// Entries in the kernel's neighbour table, which all network namespaces
    /// share, per family. They cover what its forwarding guests may resolve at
    /// one time, an allowance for forwarding kernels, and stations on its links.
    pub neighbours: u64,
    /// Number of containers: control guests, hosts and forwarding guests.
    pub guests: u64,
}

/// A node: its control side (control guest and helpers) and its forwarding guests.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePlan {
    /// Router or host.
    pub kind: NodeKind,
    /// Directory of its sockets.
    pub directory: PathBuf,
    /// Control guest or host. Its limits are those of the node's control side as a whole.
    pub control: GuestSpec,
    /// Plans of its commands, in order.
    pub commands: Vec<CommandPlan>,
    /// Hash of the control side except limits and MTUs.
    pub hash: String,
    /// Interfaces, by index of the vport. They are TAPs, except those in `kernel_links`.
    pub taps: Vec<TapSpec>,
    /// Interfaces whose frames stay in the kernel.
    pub kernel_links: BTreeMap<u16, KernelLinkPort>,
    /// Sysctls of its network namespace.
    pub sysctls: SysctlPlan,
    /// Addresses of its `lo`, in addition to the kernel's own.
    pub loopback: Vec<IpNet>,
    /// Static routes, which can change while the node runs.
    pub routes: Vec<StaticRouteSpec>,
    /// Helper that serves the TAPs; `None` without TAPs.
    pub tap_helper: Option<TapHelperPlan>,
    /// Route mirror, if something other than the control guest's kernel
    /// forwards: its process, and its configuration except the namespaces.
    pub mirror: Option<MirrorPlan>,
    /// Management access besides its networks.
    pub management: Option<ManagementPlan>,
    /// Forwarding guests by number.
    pub guests: BTreeMap<u32, GuestPlan>,
    /// Forwarding by the kernel in its namespace, instead of guests.
    pub kernel: Option<KernelPlan>,
    /// Forwarding by the mux itself, instead of guests.
    pub engine: Option<mux::EngineConfig>,
    /// Part of the mux's power that is guaranteed for that, thousandths of a core; 0 means none.
    pub mux_millicores: u32,
    /// Directories that are created first, with owner, group and mode.
    pub directories: Vec<DirectoryPlan>,
}

/// Resources of the kernel for forwarding in a node's namespace.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelPlan {
    /// The cgroup of its kernel threads.
    pub cgroup: String,
    /// Limits of that cgroup.
    pub limits: Limits,
    /// Share of a forwarding engine.
    pub placement: EnginePlacement,
    /// True if the share is not a limit.
    pub borrows: bool,
    /// True if packets that are only routed may use the XDP bypass.
    pub xdp_bypass: bool,
}

/// A helper that serves TAPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapHelperPlan {
    /// Process of the helper.
    pub process: HelperSpec,
    /// Socket at which it listens for pdpd.
    pub control: PathBuf,
    /// TAPs that it serves, in order.
    pub ports: Vec<tap::TapPort>,
}

/// A route mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorPlan {
    /// Process of the mirror.
    pub process: HelperSpec,
    /// Path of the configuration file.
    pub config_file: PathBuf,
    /// Content of the file. The namespaces are filled in once the control guest has some.
    pub config: mirror::MirrorConfig,
}

/// Helper for a node's management access besides its networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagementPlan {
    /// Process of the helper.
    pub process: HelperSpec,
    /// Path of the configuration file.
    pub config_file: PathBuf,
    /// Content of the file. The namespace is filled in once the node has one.
    pub config: management::ManagementConfig,
}

/// A forwarding guest.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestPlan {
    /// The container.
    pub container: GuestSpec,
    /// Socket at which the mux listens for it.
    pub socket: PathBuf,
    /// Hash of everything except the limits.
    pub hash: String,
    /// True if it forwards by the control guest's routes, which it has to get first.
    pub mirrored: bool,
    /// Forwarding engine, and the share of it.
    pub placement: EnginePlacement,
    /// For programs that use TAPs: the TAPs, and the helper that serves them.
    pub taps: Option<(Vec<TapSpec>, TapHelperPlan)>,
    /// File that tells a program on the runtime how many cores it may use.
    pub quota: Option<PathBuf>,
}

/// A directory of root's that shall exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryPlan {
    /// Path of the directory.
    pub path: PathBuf,
    /// Group on the host whose processes may traverse it.
    pub gid: u32,
    /// True if they may also create files in it. It is then a file system of
    /// its own with a size limit, in which only the owner can remove a file.
    pub writable: bool,
}

/// Why no plan can be made. Findings of the checks of specs are not repeated here.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// No number is left for a vnet's owner.
    #[error(
        "vnet {vnet}: no range of user ids left for its owner, {max} in all; delete vnets or tenants first"
    )]
    NoNumber {
        /// The vnet.
        vnet: String,
        /// The limit.
        max: u32,
    },
    /// No number is left for a port whose frames stay in the kernel.
    #[error(
        "vnet {vnet}: no number left for ports between routers of kind kernel, {max} at most; delete some first"
    )]
    NoPort {
        /// The vnet.
        vnet: String,
        /// The limit.
        max: u32,
    },
    /// A path is too long for a Unix socket.
    #[error(
        "{path}: {bytes} bytes, {max} at most for a socket; use a shorter run directory or shorter names"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Length of the path, bytes.
        bytes: usize,
        /// The limit, bytes.
        max: usize,
    },
}

/// Longest path of a Unix socket, bytes (sockaddr_un, without the final zero).
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// User id of the mux on the host.
pub const MUX_UID: u32 = UID_BASE;

/// Makes the plan for these specs from `before`. Vnets that are not in `changed`
/// are taken from there. `same` says whether the substrate is that of `before`.
pub fn plan(
    places: &DaemonPaths,
    substrate: &SubstrateSpec,
    vnets: &Vnets,
    allocations: &Allocations,
    changed: &BTreeSet<&str>,
    (before, same): (&Plan, bool),
) -> Result<Plan, PlanError> {
    let (mut planned, mut weight) = (before.vnets.clone(), before.weight);
    let (mut neighbours, mut guests) = (before.neighbours, before.guests);
    let guests_of =
        |plan: &SharedMap<VnetPlan>, name: &str| plan.get(name).map_or(0, |vnet| vnet.guests);
    let neighbours_of =
        |plan: &SharedMap<VnetPlan>, name: &str| plan.get(name).map_or(0, |vnet| vnet.neighbours);
    let weight_of = |plan: &SharedMap<VnetPlan>, name: &str| {
        plan.get(name).map_or(0, |vnet| u64::from(vnet.weight))
    };
    for &name in changed {
        let plan = vnets.get(name).map(|vnet| {
            let allocation = allocations.vnets.get(name).ok_or_else(|| PlanError::NoNumber {
                vnet: name.to_owned(),
                max: crate::plan::allocations::NUMBERS_MAX,
            })?;
            let uid = vnet_uid_base(allocation.number);
            let kernel_tunnels =
                kernel_tunnels::kernel_tunnel_links(name, &vnet.spec, substrate, allocation);
            VnetPlanner {
                places,
                substrate,
                name,
                spec: &vnet.spec,
                uid,
                allocation,
                kernel_tunnels,
            }
            .plan()
        });
        shared::set(&mut planned, name, plan.transpose()?);
        weight = weight - weight_of(&before.vnets, name) + weight_of(&planned, name);
        neighbours =
            neighbours - neighbours_of(&before.vnets, name) + neighbours_of(&planned, name);
        guests = guests - guests_of(&before.vnets, name) + guests_of(&planned, name);
    }
    let takes_as_before = |name: &&str| {
        let [was, is] = [&before.vnets, &planned]
            .map(|plan| plan.get(*name).map(|vnet| &vnet.frame_selections));
        was.unwrap_or(&BTreeMap::new()) == is.unwrap_or(&BTreeMap::new())
    };
    if same && changed.iter().all(takes_as_before) {
        return Ok(Plan { vnets: planned, weight, neighbours, guests, ..before.clone() });
    }
    let mut externals = BTreeMap::new();
    for (name, interface) in &substrate.interfaces {
        // The check of specs guarantees that there is one.
        let Some(outlet) = interface.outlet() else { continue };
        let outlet = outlet_plan(places, substrate, name, outlet);
        if let OutletPlan::Memif(memif) = &outlet {
            check_socket(&memif.socket)?;
        }
        let capacity_bps = interface.capacity.map(|capacity| capacity.0);
        externals.insert(name.clone(), ExternalPlan { capacity_bps, outlet });
    }
    for (interface, takes) in planned.values().flat_map(|vnet| &vnet.frame_selections) {
        let external = externals.get_mut(interface).map(|external| &mut external.outlet);
        if let Some(OutletPlan::Device(device)) = external {
            device.selection.all |= takes.all;
            device.selection.tunnels.extend(&takes.tunnels);
            device.selection.ports |= takes.ports;
        }
    }
    Ok(Plan {
        mux: Some(Arc::new(mux_plan(places, substrate))),
        externals: externals.into_iter().map(|(name, plan)| (name, Arc::new(plan))).collect(),
        vnets: planned,
        stopped: SharedMap::default(),
        damaged: BTreeSet::new(),
        weight,
        capacity: substrate.forwarding_engines.values().map(|it| u64::from(it.capacity.0)).sum(),
        neighbours,
        guests,
    })
}

fn outlet_plan(
    places: &DaemonPaths,
    substrate: &SubstrateSpec,
    name: &str,
    outlet: ExternalForm<'_>,
) -> OutletPlan {
    match outlet {
        ExternalForm::Device(device, attach) => OutletPlan::Device(DevicePlan {
            device: device.into(),
            attach,
            workers: substrate.mux.workers,
            selection: FrameSelection::default(),
            pins: places.pins.join(name),
        }),
        ExternalForm::Memif(memif) => OutletPlan::Memif(MemifPlan {
            socket: places.external_memif(name),
            mtu: memif.mtu,
            group: memif.group.clone(),
        }),
        ExternalForm::Generator(generator) => OutletPlan::Generator(GeneratorPlan {
            config: mux::GeneratorConfig {
                pps: generator.pps.unwrap_or(0),
                frames: generator.count.unwrap_or(0),
                number_at: generator.number_at,
            },
            hash: hash(&generator.pcap.as_ref().map(|pcap| &pcap.0[..])),
            pcap: generator.pcap.clone(),
        }),
    }
}

/// Checks that a path is short enough for a socket.
fn check_socket(path: &Path) -> Result<(), PlanError> {
    let (bytes, max) = (path.as_os_str().len(), SOCKET_PATH_BYTES_MAX);
    if bytes > max { Err(PlanError::PathTooLong { path: path.into(), bytes, max }) } else { Ok(()) }
}

fn mux_plan(places: &DaemonPaths, substrate: &SubstrateSpec) -> MuxPlan {
    let cpus: Vec<String> = substrate.mux.cpus.0.iter().map(u32::to_string).collect();
    let process = HelperSpec {
        id: ObjectKey::Mux.process_id(ProcessRole::Main),
        dir: places.record(&ObjectKey::Mux, ProcessRole::Main),
        argv: vec![
            places.binary("pdp-mux"),
            "--workers".into(),
            substrate.mux.workers.to_string(),
            "--cpus".into(),
            cpus.join(","),
        ],
        env: BTreeMap::new(),
        cgroup: "mux".into(),
        uid: MUX_UID,
        keep_root: false,
        log_bytes_max: LOG_BYTES_MAX,
    };
    let limits = Limits {
        cpus: Some(substrate.mux.cpus.to_string()),
        cpu_weight: Some(substrate.mux.power().0),
        ..Limits::default()
    };
    MuxPlan { hash: hash(&(mux::VERSION, &process)), process, limits }
}

/// Returns the mux's egress configuration of a link's end.
fn egress_config(link: &str, end: usize, leaving: &LinkEgress) -> mux::EgressConfig {
    let mut config = leaving.to_mux();
    if !config.impairments.are_none() {
        config.impairments.seed ^= stream(link, end);
    }
    config
}

/// Distinguishes the random sequence of a link's end from those of
/// others with the same seed (FNV-1a).
fn stream(link: &str, end: usize) -> u64 {
    let bytes = link.bytes().chain((end as u64).to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

struct VnetPlanner<'a> {
    places: &'a DaemonPaths,
    substrate: &'a SubstrateSpec,
    name: &'a str,
    spec: &'a VirtualNetworkSpec,
    uid: u32,
    allocation: &'a VnetAllocation,
    /// External links of the vnet that stay in the kernel.
    kernel_tunnels: Vec<KernelTunnelLink<'a>>,
}

impl VnetPlanner<'_> {
    fn plan(&self) -> Result<VnetPlan, PlanError> {
        let mut nodes = BTreeMap::new();
        let mut mux_nodes = Vec::new();
        for (name, node) in &self.spec.nodes {
            let plane = node.plane().map(|plane| &**plane);
            let planner = NodePlanner { vnet: self, name, node, plane };
            let plan = planner.plan()?;
            mux_nodes.push(planner.mux_node(&plan));
            nodes.insert(name.clone(), plan);
        }
        let mut links = Vec::new();
        let mut vlinks = Vec::new();
        let mut paths = Vec::new();
        let mut tunnel_names = BTreeSet::new();
        for (index, link) in self.spec.links.iter().enumerate() {
            let ends: Option<Vec<_>> = link.endpoints.iter().map(|end| self.end(end)).collect();
            let Some(ends) = ends else { continue };
            let name = link.name.clone().unwrap_or_else(|| format!("link{}", index + 1));
            let down = self.allocation.links_down.contains(&name);
            let stays_in_kernel =
                self.kernel_tunnels.iter().any(|tunnel| std::ptr::eq(tunnel.link, link));
            if stays_in_kernel {
                tunnel_names.insert(name.clone());
            }
            let leaving = link.endpoints.iter().enumerate().map(|(at, end)| {
                if !link.has_egress(end) {
                    return LinkEgress::default().to_mux();
                }
                egress_config(&name, at, &link.egress(end))
            });
            let steps = link.steps().into_iter().map(|(at, up, leaving)| mux::ScheduleStep {
                at_ns: at.0,
                up,
                leaving: leaving
                    .iter()
                    .enumerate()
                    .map(|(at, it)| egress_config(&name, at, it))
                    .collect(),
            });
            let began = self.allocation.schedules.get(&name);
            let schedule =
                began.map(|it| mux::Schedule { began_ns: it.at_ns, steps: steps.collect() });
            let mut queues: Vec<_> = link.endpoints.iter().map(|end| link.queues(end)).collect();
            if queues.iter().all(Vec::is_empty) {
                queues.clear();
            }
            vlinks.push(mux::Vlink {
                leaving: leaving.collect(),
                queues,
                schedule,
                name,
                ends,
                up: !down,
                segment: link.segment.map(|segment| mux::SegmentConfig {
                    addresses: segment.addresses,
                    flood_pps: segment.flood_pps,
                }),
            });
            links.push(link.endpoints.clone());
            paths.push(match stays_in_kernel {
                true => LinkPath::Kernel,
                false => LinkPath::of(self.name, self.spec, link),
            });
        }
        let mux = mux::VnetConfig {
            name: self.name.into(),
            police: self.spec.police.map(rate),
            nodes: mux_nodes,
            vlinks,
        };
        let (weight, neighbours) = (weight(&nodes), neighbours(&nodes));
        let guests = nodes.values().map(|node| 1 + node.guests.len() as u64).sum();
        let silent = self.allocation.links_silent.clone();
        let hosts = hosts::text(self.name, self.spec);
        let takes = self.frame_selections();
        Ok(VnetPlan {
            nodes,
            mux,
            links,
            paths,
            kernel_tunnels: tunnel_names,
            silent,
            hosts,
            frame_selections: takes,
            weight,
            neighbours,
            guests,
        })
    }

    fn frame_selections(&self) -> BTreeMap<String, FrameSelection> {
        let mut all: BTreeMap<String, FrameSelection> = BTreeMap::new();
        for outside in self.spec.externals.values() {
            let takes = all.entry(outside.interface.clone()).or_default();
            match outside.encapsulation().takes() {
                None => takes.all = true,
                Some(take) => _ = takes.tunnels.insert(take),
            }
        }
        for link in &self.kernel_tunnels {
            all.entry(link.tunnel.interface.clone()).or_default().ports = true;
        }
        all
    }

    fn end(&self, endpoint: &Endpoint) -> Option<mux::VlinkEnd> {
        Some(match endpoint {
            Endpoint::Port { node, interface } => mux::VlinkEnd::Port {
                node: node.clone(),
                port: self.spec.nodes.get(node)?.port_index(interface)?,
            },
            Endpoint::External(name) => {
                let outside = self.spec.externals.get(name)?;
                mux::VlinkEnd::External {
                    name: name.clone(),
                    interface: outside.interface.clone(),
                    by: outside.encapsulation(),
                }
            }
        })
    }
}

/// CPU weight of a vnet without guaranteed power. It is the lowest that both versions of
/// cgroups distinguish from none, so that many such vnets take almost nothing from others.
const LENT_WEIGHT: u32 = 2;

fn weight(nodes: &BTreeMap<String, NodePlan>) -> u32 {
    let placements = nodes.values().flat_map(NodePlan::placements);
    let power = placements.map(|placement| placement.power_millicores).fold(0, u32::saturating_add);
    power.max(LENT_WEIGHT)
}

/// Stations on one port's link for which the machine's kernel keeps entries.
const STATIONS_OF_PORT: u64 = 64;

/// Stations that a forwarding kernel may resolve at one time (3 s), at
/// 5,000 new ones a second. Nothing enforces this.
const ASKED_BY_KERNEL: u64 = 16_384;

fn neighbours(nodes: &BTreeMap<String, NodePlan>) -> u64 {
    let of_node = |node: &NodePlan| {
        // Those of this period and of the previous one.
        node.followers() * 2 * (ASKED_MAX + ANSWERED_MAX) as u64
            + u64::from(node.is_kernels()) * ASKED_BY_KERNEL
            + node.taps.len() as u64 * STATIONS_OF_PORT
    };
    nodes.values().map(of_node).sum()
}

impl VnetPlan {
    /// Returns the external interfaces that its links use.
    pub fn externals(&self) -> impl Iterator<Item = &str> {
        self.mux.vlinks.iter().flat_map(mux::Vlink::interfaces)
    }

    /// Returns the configuration for the mux, without tunnels of links that stay in the kernel.
    pub fn mux_config(&self) -> mux::VnetConfig {
        let mut config = self.mux.clone();
        config.vlinks.retain(|link| !self.kernel_tunnels.contains(&link.name));
        config
    }

    /// Returns the nodes with a port whose link ends at an external interface.
    pub fn nodes_at(&self, vnet: &str, external: &str) -> Vec<ObjectKey> {
        let links = self.mux.vlinks.iter();
        let links_there = links.filter(|link| link.interfaces().any(|name| name == external));
        links_there
            .flat_map(mux::Vlink::ports)
            .map(|(node, _)| ObjectKey::node(vnet, node))
            .collect()
    }

    /// Returns its key and those of its parts.
    pub fn keys(&self, name: &str) -> Vec<ObjectKey> {
        let mut keys = vec![ObjectKey::vnet(name)];
        for (node, plan) in &self.nodes {
            keys.push(ObjectKey::node(name, node));
            keys.extend(plan.guests.keys().map(|&number| ObjectKey::guest(name, node, number)));
        }
        keys
    }

    /// Returns the external interfaces that a link's ports need for
    /// their carrier: that of the other end, if there are only two ends.
    pub fn cut_off_by(link: &mux::Vlink) -> impl Iterator<Item = &str> {
        link.interfaces().filter(|_| link.is_wire())
    }

    /// True if a link gives its ends carrier at a time of its
    /// schedule's clock: it is up, or down silently.
    pub fn has_carrier(&self, link: &mux::Vlink, now_ns: u64) -> bool {
        link.is_up(now_ns) || self.silent.contains(&link.name)
    }

    /// Returns the node and interface at the other end of this external's link, if it has two ends.
    pub fn other_end(&self, external: &str) -> Option<(String, String)> {
        let is_it = |end: &Endpoint| matches!(end, Endpoint::External(name) if name == external);
        let ends = self.links.iter().find(|ends| ends.len() == 2 && ends.iter().any(is_it))?;
        ends.iter().find_map(|end| match end {
            Endpoint::Port { node, interface } => Some((node.clone(), interface.clone())),
            Endpoint::External(_) => None,
        })
    }

    /// Returns the vlink of a port.
    pub fn link_of(&self, node: &str, port: u16) -> Option<&mux::Vlink> {
        self.path_of(node, port).map(|(link, _)| link)
    }

    /// Returns the vlink of a port, and the path of its frames.
    pub fn path_of(&self, node: &str, port: u16) -> Option<(&mux::Vlink, &LinkPath)> {
        let mut links = std::iter::zip(&self.mux.vlinks, &self.paths);
        links.find(|(link, _)| link.ports().any(|end| end == (node, port)))
    }
}

impl NodePlan {
    /// Returns its TAP interfaces, with the index of the vport.
    pub fn tapped(&self) -> impl Iterator<Item = (u16, &TapSpec)> {
        let all = self.taps.iter().enumerate().map(|(index, tap)| (index as u16, tap));
        all.filter(|(index, _)| !self.kernel_links.contains_key(index))
    }

    /// Returns its shares of forwarding engines.
    pub fn placements(&self) -> impl Iterator<Item = &EnginePlacement> {
        let guests = self.guests.values().map(|guest| &guest.placement);
        guests.chain(self.kernel.iter().map(|kernel| &kernel.placement))
    }

    /// Returns the number of forwarders that follow the control guest's routes: guests, or the mux.
    pub fn followers(&self) -> u64 {
        let guests = self.guests.values().filter(|guest| guest.mirrored).count() as u64;
        guests + u64::from(self.mux_follows())
    }

    /// True if its control guest's kernel forwards for it.
    pub fn is_kernels(&self) -> bool {
        self.kind == NodeKind::Router && self.mirror.is_none()
    }

    /// True if the mux forwards by the control guest's routes.
    pub fn mux_follows(&self) -> bool {
        let code = self.engine.as_ref().map(|engine| &engine.code);
        matches!(code, Some(mux::EngineCode::Ip { .. }))
    }

    /// Returns the socket at which the mux listens for programs of its control guest.
    pub fn slowpath_socket(&self) -> Option<&Path> {
        Some(self.engine.as_ref()?.slowpath.as_ref()?.socket.as_path())
    }

    fn sockets(&self) -> Vec<&Path> {
        let mut paths: Vec<&Path> = Vec::new();
        paths.extend(self.tap_helper.as_ref().map(|helper| helper.control.as_path()));
        if let Some(mirror) = &self.mirror {
            paths.extend([&*mirror.config.control_socket, &*mirror.config.routes_socket]);
        }
        paths.extend(self.slowpath_socket());
        paths.extend(self.management.as_ref().map(|helper| &*helper.config.control_socket));
        for guest in self.guests.values() {
            paths.push(&guest.socket);
            paths.extend(guest.taps.as_ref().map(|(_, helper)| helper.control.as_path()));
        }
        paths
    }
}

/// Returns the hexadecimal SHA-256 of a value's JSON. Types of plans always have one.
pub(crate) fn hash(value: &impl Serialize) -> String {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
