//! What is to run, from the specs, the ledger and the machine's places.
//!
//! Pure: no clock, no file, no socket; the same input gives the same plan. Every object of a plan
//! has a hash of what it is made from, so that a change is found where it is and nowhere else;
//! what can be changed while an object runs (limits) is left out of it.
//!
//! [`node`] plans one node, [`straight`] and [`far`] which of its links stay in the kernel, [`hosts`] what names its nodes have for
//! each other, [`ways`] its way out and in beside its networks, [`words`] puts a spec's words into those of the mux and
//! the guests.
//!
//! Source: docs/ARCHITECTURE.md, "Places".

mod commands;
mod far;
mod hosts;
mod network;
mod node;
mod straight;
mod ways;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::IpNet;
use pdp_container::{GuestSpec, HelperSpec, LOG_BYTES_MAX, Limits};
use pdp_net::route::Route;
use pdp_net::tap::TapSpec;
use pdp_net::xdp::Take;
use pdp_proto::limits::{ANSWERED_MAX, ASKED_MAX};
use pdp_proto::{management, mirror, mux, tap};
use pdp_spec::units::{Base64, Endpoint};
use pdp_spec::{DeviceAttach, Leaving, NodeKind, Outlet, SubstrateSpec, VirtualNetworkSpec, Vnets};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::key::Key;
use crate::ledger::{Holding, Ledger, Placement, UID_BASE, vnet_uid_base};
use crate::shared::{self, Shared, differing};
pub use commands::CommandPlan;
use far::FarLink;
pub use far::{Far, far_ports};
pub use network::Sysctls;
use node::NodePlanner;
pub use straight::{LinkWay, PortNow, StraightPort, To, straight_ports};
use words::rate;

/// Directories and names of one pdpd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Run directory.
    pub run: PathBuf,
    /// Directory of the helper binaries.
    pub lib: PathBuf,
    /// Below a BPF file system.
    pub pins: PathBuf,
}

impl Places {
    /// Where what is known of processes is, each in a directory named by its id. Root's alone: nothing that a
    /// guest, a helper or the mux can write is in there.
    pub fn records(&self) -> PathBuf {
        self.run.join("records")
    }

    /// The directory of a process of a node.
    pub fn record(&self, vnet: &str, node: &str, part: Part) -> PathBuf {
        self.records().join(part.id(vnet, node))
    }

    /// Where a node's sockets are.
    pub fn node(&self, vnet: &str, node: &str) -> PathBuf {
        self.run.join("vnets").join(vnet).join(node)
    }

    /// A vnet's directory that its nodes alone may enter. No node is called so.
    pub const NAMES: &str = "_names";

    /// The file there that they see as `/etc/hosts`.
    pub const HOSTS: &str = "hosts";

    /// The file that older versions have them see, beside that directory.
    pub const HOSTS_BEFORE: &str = "_hosts";

    /// What the nodes of a vnet see as `/etc/hosts`.
    pub fn hosts(&self, vnet: &str) -> PathBuf {
        self.run.join("vnets").join(vnet).join(Self::NAMES).join(Self::HOSTS)
    }

    /// The mux's control socket.
    pub fn mux_control(&self) -> PathBuf {
        self.run.join("mux/control.sock")
    }

    /// Where the mux listens for the program behind an external interface.
    pub fn external_memif(&self, name: &str) -> PathBuf {
        self.run.join("externals").join(name).join("memif.sock")
    }

    /// The cgroup of a vnet, below pdpd's own. Names that are not pdpd's begin with `_`, as those of no
    /// file of the kernel do that lies beside a cgroup (`tasks`, `cpu.max`).
    pub fn vnet_cgroup(vnet: &str) -> String {
        format!("vnets/_{}", dotless(vnet))
    }

    /// The cgroup of a node's control side.
    pub fn node_cgroup(vnet: &str, node: &str) -> String {
        format!("{}/_{node}", Self::vnet_cgroup(vnet))
    }

    /// The cgroup of a forwarding guest.
    pub fn guest_cgroup(vnet: &str, node: &str, number: u32) -> String {
        format!("{}.g{number}", Self::node_cgroup(vnet, node))
    }

    /// The cgroup of what the kernel does with the frames of a node whose namespace forwards.
    pub fn kernel_cgroup(vnet: &str, node: &str) -> String {
        format!("{}.kernel", Self::node_cgroup(vnet, node))
    }

    /// Directories of all processes that an object may have, inner ones first.
    pub fn processes(&self, key: &Key) -> Vec<PathBuf> {
        match key {
            Key::Mux => vec![self.records().join("mux")],
            Key::Node { vnet, node } => {
                let parts = [Part::Management, Part::Mirror, Part::Tap, Part::Control];
                parts.map(|part| self.record(vnet, node, part)).into()
            }
            Key::Guest { vnet, node, number } => {
                let parts = [Part::GuestTap(*number), Part::Guest(*number)];
                parts.map(|part| self.record(vnet, node, part)).into()
            }
            Key::External(_) | Key::Vnet(_) | Key::Leftovers => Vec::new(),
        }
    }

    fn binary(&self, name: &str) -> String {
        self.lib.join(name).to_string_lossy().into_owned()
    }
}

/// A process of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The control guest or host.
    Control,
    /// The helper that serves its TAPs.
    Tap,
    /// The route mirror.
    Mirror,
    /// The helper of its way out and in beside its networks.
    Management,
    /// The forwarding guest with this number.
    Guest(u32),
    /// For programs on TAPs: the helper that serves those of the guest with this number.
    GuestTap(u32),
}

impl Part {
    /// Its id: unique, since no name of a vnet (made [`dotless`]) or node has a dot.
    pub fn id(self, vnet: &str, node: &str) -> String {
        let node = format!("{}.{node}", dotless(vnet));
        match self {
            Self::Control => node,
            Self::Tap => format!("{node}.tap"),
            Self::Mirror => format!("{node}.mirror"),
            Self::Management => format!("{node}.management"),
            Self::Guest(number) => format!("{node}.g{number}"),
            Self::GuestTap(number) => format!("{node}.tap-g{number}"),
        }
    }
}

/// A vnet's name where a dot has a meaning: ids of containers, whose parts dots join, and cgroups,
/// beside which the kernel has files like `cpu.max`. No name has `_`, so that none meet.
fn dotless(vnet: &str) -> String {
    vnet.replace('.', "_")
}

/// All that is to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The mux; there is one as soon as there is anything.
    pub mux: Option<Arc<MuxPlan>>,
    /// External interfaces by name.
    pub externals: BTreeMap<String, Arc<ExternalPlan>>,
    /// Vnets by name. One that is as before is the same one.
    pub vnets: Shared<VnetPlan>,
    /// The same of those that are stopped: nothing of them runs, and what outlasts that stays.
    pub stopped: Shared<VnetPlan>,
    /// Vnets whose specs can't be used: nothing of them runs, and their volumes stay.
    pub damaged: BTreeSet<String>,
    /// The sum of the vnets' weights, [`VnetPlan::weight`].
    pub weight: u64,
    /// Capacity of all forwarding engines, thousandths of a core.
    pub capacity: u64,
    /// Entries of the kernel's neighbour table that the vnets may have together,
    /// [`VnetPlan::neighbours`].
    pub neighbours: u64,
    /// Guests of all vnets, [`VnetPlan::guests`].
    pub guests: u64,
}

impl Plan {
    /// What part of a CPU the vnets get together, beside the mux: what the engines have, so that
    /// vnets with nothing of their own get as far as it does, or the sum of their weights if that is more.
    pub fn weight_together(&self) -> u32 {
        u32::try_from(self.weight.max(self.capacity)).unwrap_or(u32::MAX)
    }

    /// Whether nothing is to run.
    pub fn is_empty(&self) -> bool {
        self.mux.is_none() && self.externals.is_empty() && self.vnets.is_empty()
    }

    /// All objects.
    pub fn keys(&self) -> BTreeSet<Key> {
        let mut keys: BTreeSet<Key> =
            self.externals.keys().map(|name| Key::external(name)).collect();
        keys.extend(self.mux.is_some().then_some(Key::Mux));
        for (name, vnet) in &*self.vnets {
            keys.extend(vnet.keys(name));
        }
        keys
    }

    /// Whether an object is to be.
    pub fn has(&self, key: &Key) -> bool {
        match key {
            Key::Mux => self.mux.is_some(),
            Key::External(name) => self.externals.contains_key(name),
            Key::Vnet(vnet) => self.vnets.contains_key(vnet),
            Key::Node { vnet, node } => self.node(vnet, node).is_some(),
            Key::Guest { vnet, node, number } => {
                self.node(vnet, node).is_some_and(|node| node.guests.contains_key(number))
            }
            Key::Leftovers => true,
        }
    }

    /// The plan of nothing that runs, where all of this is stopped.
    pub fn at_rest(&self) -> Self {
        Self { stopped: self.vnets.clone(), damaged: self.damaged.clone(), ..Self::default() }
    }

    /// Names of a node's volumes that are to stay.
    pub fn volumes(&self, vnet: &str, node: &str) -> BTreeSet<&str> {
        let vnet = self.vnets.get(vnet).or_else(|| self.stopped.get(vnet));
        let node = vnet.and_then(|vnet| vnet.nodes.get(node));
        let volumes = node.into_iter().flat_map(|node| &node.control.volumes);
        volumes.map(|volume| volume.name.as_str()).collect()
    }

    /// Numbers of all ports whose frames stay in the kernel, but for those of a node.
    pub fn ports(&self, without: Option<&Key>) -> BTreeSet<u32> {
        let nodes = self.vnets.iter().flat_map(|(name, vnet)| {
            vnet.nodes.iter().map(move |(node, plan)| (Key::node(name, node), plan))
        });
        let others = nodes.filter(|(key, _)| Some(key) != without);
        others.flat_map(|(_, plan)| plan.straight.values()).map(|port| port.spec.number).collect()
    }

    /// Directories of the control sides that have volumes which are to stay.
    pub fn with_volumes(&self) -> impl Iterator<Item = &PathBuf> {
        let vnets = self.vnets.values().chain(self.stopped.values());
        let controls = vnets.flat_map(|vnet| vnet.nodes.values()).map(|node| &node.control);
        controls.filter(|control| !control.volumes.is_empty()).map(|control| &control.dir)
    }

    fn node(&self, vnet: &str, node: &str) -> Option<&NodePlan> {
        self.vnets.get(vnet)?.nodes.get(node)
    }

    /// Directories of the processes of an object that are to run.
    pub fn processes(&self, key: &Key) -> Vec<&Path> {
        let mut directories: Vec<&Path> = Vec::new();
        match key {
            Key::Mux => directories.extend(self.mux.iter().map(|mux| mux.process.dir.as_path())),
            Key::Node { vnet, node } => {
                let Some(node) = self.node(vnet, node) else { return directories };
                directories.push(&node.control.dir);
                directories.extend(node.tap_helper.iter().map(|helper| &*helper.process.dir));
                directories.extend(node.mirror.iter().map(|mirror| &*mirror.process.dir));
                directories.extend(node.management.iter().map(|helper| &*helper.process.dir));
            }
            Key::Guest { vnet, node, number } => {
                let node = self.node(vnet, node);
                let Some(guest) = node.and_then(|node| node.guests.get(number)) else {
                    return directories;
                };
                directories.push(&guest.container.dir);
                directories.extend(guest.taps.iter().map(|(_, helper)| &*helper.process.dir));
            }
            Key::External(_) | Key::Vnet(_) | Key::Leftovers => {}
        }
        directories
    }

    /// Objects that the step from `before` to this makes, changes or removes. What a vnet has in common
    /// with the one before is not looked into.
    pub fn changed_from(&self, before: &Self) -> BTreeSet<Key> {
        let mut changed = BTreeSet::new();
        let new_mux = match (&before.mux, &self.mux) {
            (Some(was), Some(is)) => was.hash != is.hash,
            (was, is) => was.is_some() != is.is_some(),
        };
        if before.mux != self.mux {
            changed.insert(Key::Mux);
        }
        let names = self.externals.keys().chain(before.externals.keys());
        for name in names {
            // A new mux has to be told of all.
            if new_mux || before.externals.get(name) != self.externals.get(name) {
                changed.insert(Key::external(name));
            }
        }
        if new_mux {
            changed.extend(self.vnets.keys().map(|name| Key::vnet(name)));
        }
        for name in differing(&before.vnets, &self.vnets) {
            let (was, is) = (before.vnets.get(name), self.vnets.get(name));
            changed.insert(Key::vnet(name));
            // Carriers of a node's ports follow the links.
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
                        node.straight.clone(),
                        management,
                        node.kernel.clone(),
                    )
                };
                if links || was.map(control) != is.map(control) {
                    changed.insert(Key::node(name, node));
                }
                for &number in was.iter().chain(&is).flat_map(|node| node.guests.keys()) {
                    let guest = |node: &'_ NodePlan| node.guests.get(&number).cloned();
                    if was.and_then(guest) != is.and_then(guest) {
                        changed.insert(Key::guest(name, node, number));
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
    /// Its process.
    pub process: HelperSpec,
    /// Limits of its cgroup.
    pub limits: Limits,
    /// Of all but the limits.
    pub hash: String,
}

/// An external interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalPlan {
    /// What links over it may send in all, bits a second.
    pub capacity_bps: Option<u64>,
    /// What is behind it.
    pub outlet: OutletPlan,
}

/// What is behind an external interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutletPlan {
    /// A network device.
    Device(DevicePlan),
    /// A program that speaks memif.
    Memif(MemifPlan),
    /// A source and sink inside the mux.
    Generator(GeneratorPlan),
}

impl ExternalPlan {
    /// The device behind it.
    pub fn device_plan(&self) -> Option<&DevicePlan> {
        match &self.outlet {
            OutletPlan::Device(device) => Some(device),
            OutletPlan::Memif(_) | OutletPlan::Generator(_) => None,
        }
    }

    /// Its name.
    pub fn device(&self) -> Option<&str> {
        Some(&self.device_plan()?.device)
    }
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// Its name.
    pub device: String,
    /// How its frames are had.
    pub attach: DeviceAttach,
    /// Workers of the mux, of which each has a packet socket.
    pub workers: u32,
    /// What the XDP program takes.
    pub takes: Takes,
    /// Where its pins are.
    pub pins: PathBuf,
}

/// What is taken of a device's frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Takes {
    /// Every frame.
    pub all: bool,
    /// Frames of tunnels.
    pub tunnels: BTreeSet<Take>,
    /// Some of these are for ports whose frames stay in the kernel.
    pub ports: bool,
}

impl Takes {
    /// Whether frames come that are not for the device's own link address.
    pub fn anybodys(&self) -> bool {
        self.all || self.tunnels.iter().any(Take::is_anybodys)
    }
}

/// A program that speaks memif.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemifPlan {
    /// Where the mux listens for it; its directory has nothing else.
    pub socket: PathBuf,
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Group of the machine, by name or number, whose programs may connect.
    pub group: Option<String>,
}

/// A source and sink inside the mux.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratorPlan {
    /// What the mux is told.
    pub told: mux::Generator,
    /// The pcap file with its frames.
    pub pcap: Option<Base64>,
    /// Of the file.
    pub hash: String,
}

/// A vnet.
#[derive(Clone, Debug, PartialEq)]
pub struct VnetPlan {
    /// Its nodes by name.
    pub nodes: BTreeMap<String, NodePlan>,
    /// What the mux is told, and the vlinks in `far`. Its nodes are in the order of [`VnetPlan::nodes`].
    pub mux: mux::Vnet,
    /// Links as written: name and the two ends, in the order of `mux.vlinks`.
    pub links: Vec<Vec<Endpoint>>,
    /// Which way each of them takes, in the same order.
    pub ways: Vec<LinkWay>,
    /// Names of links to the outside that stay in the kernel.
    pub far: BTreeSet<String>,
    /// Names of links that are down and whose ends keep their carrier.
    pub silent: BTreeSet<String>,
    /// What its nodes see as `/etc/hosts`.
    pub hosts: String,
    /// What it takes of external interfaces.
    pub takes: BTreeMap<String, Takes>,
    /// What part of a CPU it gets, in thousandths of a core
    /// ([`pdp_container::cgroup::Cgroups::weigh`]): the power that its guests are guaranteed, so that
    /// what its control side takes of a CPU that it shares with its guests is these guests'. One without
    /// any has [`LENT_WEIGHT`].
    pub weight: u32,
    /// Entries of the kernel's neighbour table, which all network namespaces share, of each family: what its
    /// forwarding guests may ask for at a time, room for what kernels that forward do, and stations on its links.
    pub neighbours: u64,
    /// Containers: control guests, hosts and forwarding guests.
    pub guests: u64,
}

/// A node: its control side and its forwarding guests.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePlan {
    /// Router or host.
    pub kind: NodeKind,
    /// Where its sockets are.
    pub directory: PathBuf,
    /// The control guest or host. Its limits are those of the node's control side as a whole.
    pub control: GuestSpec,
    /// What its commands are called, in their order.
    pub commands: Vec<CommandPlan>,
    /// Of all of the control side but limits and MTUs.
    pub hash: String,
    /// Its interfaces, by index of the vport: TAPs, but for those that are `straight`.
    pub taps: Vec<TapSpec>,
    /// Those whose frames stay in the kernel.
    pub straight: BTreeMap<u16, StraightPort>,
    /// Sysctls of its network namespace.
    pub sysctls: Sysctls,
    /// Addresses of its `lo`, beside the kernel's own.
    pub loopback: Vec<IpNet>,
    /// Its static routes, which may be changed while it runs.
    pub routes: Vec<Route>,
    /// The helper that serves the TAPs; `None` without any.
    pub tap_helper: Option<TapHelperPlan>,
    /// The route mirror, where something else than the control guest's kernel forwards: its process, and its
    /// configuration but for the namespaces.
    pub mirror: Option<MirrorPlan>,
    /// Its way out and in beside its networks.
    pub management: Option<ManagementPlan>,
    /// Forwarding guests by number.
    pub guests: BTreeMap<u32, GuestPlan>,
    /// How the kernel forwards in its namespace, in their place.
    pub kernel: Option<KernelPlan>,
    /// How the mux forwards by itself, in their place.
    pub engine: Option<mux::Engine>,
    /// What it is guaranteed for that of the mux's power, thousandths of a core; 0: nothing.
    pub mux_millicores: u32,
    /// Directories that are made before anything else, with owner, group and mode.
    pub directories: Vec<Directory>,
}

/// What the kernel is given to forward in a node's namespace.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelPlan {
    /// The cgroup of all that does it.
    pub cgroup: String,
    /// Its limits.
    pub limits: Limits,
    /// Its share of a forwarding engine.
    pub placement: Placement,
    /// Whether that is no limit.
    pub borrows: bool,
    /// Whether packets that it would only route may go the short way.
    pub short_way: bool,
}

/// A process that serves TAPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapHelperPlan {
    /// Its process.
    pub process: HelperSpec,
    /// Where it listens for pdpd.
    pub control: PathBuf,
    /// What it serves, in order.
    pub ports: Vec<tap::Port>,
}

/// A route mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorPlan {
    /// Its process.
    pub process: HelperSpec,
    /// Its configuration file.
    pub config_file: PathBuf,
    /// What is written into it; the namespaces are filled in when the control guest has some.
    pub config: mirror::Config,
}

/// The helper of a node's way out and in beside its networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagementPlan {
    /// Its process.
    pub process: HelperSpec,
    /// Its configuration file.
    pub config_file: PathBuf,
    /// What is written into it; the namespace is filled in when the node has one.
    pub config: management::Config,
}

/// A forwarding guest.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestPlan {
    /// The container.
    pub container: GuestSpec,
    /// Where the mux listens for it.
    pub socket: PathBuf,
    /// Of all but the limits.
    pub hash: String,
    /// Whether it forwards by the control guest's routes, which it has to get first.
    pub mirrored: bool,
    /// The forwarding engine and the share of it.
    pub placement: Placement,
    /// For programs that work on TAPs: those, and who serves them.
    pub taps: Option<(Vec<TapSpec>, TapHelperPlan)>,
    /// The file that says to a program on the runtime how many cores it may use.
    pub quota: Option<PathBuf>,
}

/// A directory of root's to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    /// Where.
    pub path: PathBuf,
    /// Group on the host, whose processes may pass.
    pub gid: u32,
    /// Whether they may also make files in it: it is a file system of its own then, with a bound, whose files
    /// nobody but their owner removes.
    pub writable: bool,
}

/// Why there can't be a plan. What the checks of specs find is not repeated here.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A vnet without a number: the ledger has none left for its owner.
    #[error(
        "vnet {vnet}: no range of user ids left for its owner, {max} in all; delete vnets or tenants first"
    )]
    NoNumber {
        /// The vnet.
        vnet: String,
        /// The bound.
        max: u32,
    },
    /// A port whose frames stay in the kernel without a number.
    #[error(
        "vnet {vnet}: no number left for ports between routers of kind kernel, {max} at most; delete some first"
    )]
    NoPort {
        /// The vnet.
        vnet: String,
        /// The bound.
        max: u32,
    },
    /// A path too long for a Unix socket.
    #[error(
        "{path}: {bytes} bytes, {max} at most for a socket; use a shorter run directory or shorter names"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
        /// The bound.
        max: usize,
    },
}

/// Bytes of a Unix socket's path (sockaddr_un, without the closing zero).
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The user id of the mux on the host.
pub const MUX_UID: u32 = UID_BASE;

/// The plan for these specs, made of `before`, where all vnets but those that `changed` names are as they
/// are to be. `same` is whether the substrate is the one of `before`.
pub fn plan(
    places: &Places,
    substrate: &SubstrateSpec,
    vnets: &Vnets,
    ledger: &Ledger,
    changed: &BTreeSet<&str>,
    (before, same): (&Plan, bool),
) -> Result<Plan, PlanError> {
    let (mut planned, mut weight) = (before.vnets.clone(), before.weight);
    let (mut neighbours, mut guests) = (before.neighbours, before.guests);
    let guests_of =
        |plan: &Shared<VnetPlan>, name: &str| plan.get(name).map_or(0, |vnet| vnet.guests);
    let neighbours_of =
        |plan: &Shared<VnetPlan>, name: &str| plan.get(name).map_or(0, |vnet| vnet.neighbours);
    let weight_of = |plan: &Shared<VnetPlan>, name: &str| {
        plan.get(name).map_or(0, |vnet| u64::from(vnet.weight))
    };
    for &name in changed {
        let plan = vnets.get(name).map(|vnet| {
            let holding = ledger.vnets.get(name).ok_or_else(|| PlanError::NoNumber {
                vnet: name.to_owned(),
                max: crate::ledger::NUMBERS_MAX,
            })?;
            let uid = vnet_uid_base(holding.number);
            let far = far::ways(name, &vnet.spec, substrate, holding);
            VnetPlanner { places, substrate, name, spec: &vnet.spec, uid, holding, far }.plan()
        });
        shared::set(&mut planned, name, plan.transpose()?);
        weight = weight - weight_of(&before.vnets, name) + weight_of(&planned, name);
        neighbours =
            neighbours - neighbours_of(&before.vnets, name) + neighbours_of(&planned, name);
        guests = guests - guests_of(&before.vnets, name) + guests_of(&planned, name);
    }
    let takes_as_before = |name: &&str| {
        let [was, is] =
            [&before.vnets, &planned].map(|plan| plan.get(*name).map(|vnet| &vnet.takes));
        was.unwrap_or(&BTreeMap::new()) == is.unwrap_or(&BTreeMap::new())
    };
    if same && changed.iter().all(takes_as_before) {
        return Ok(Plan { vnets: planned, weight, neighbours, guests, ..before.clone() });
    }
    let mut externals = BTreeMap::new();
    for (name, interface) in &substrate.interfaces {
        // The check of specs has seen to it that there is one.
        let Some(outlet) = interface.outlet() else { continue };
        let outlet = outlet_plan(places, substrate, name, outlet);
        if let OutletPlan::Memif(memif) = &outlet {
            check_socket(&memif.socket)?;
        }
        let capacity_bps = interface.capacity.map(|capacity| capacity.0);
        externals.insert(name.clone(), ExternalPlan { capacity_bps, outlet });
    }
    for (interface, takes) in planned.values().flat_map(|vnet| &vnet.takes) {
        let external = externals.get_mut(interface).map(|external| &mut external.outlet);
        if let Some(OutletPlan::Device(device)) = external {
            device.takes.all |= takes.all;
            device.takes.tunnels.extend(&takes.tunnels);
            device.takes.ports |= takes.ports;
        }
    }
    Ok(Plan {
        mux: Some(Arc::new(mux_plan(places, substrate))),
        externals: externals.into_iter().map(|(name, plan)| (name, Arc::new(plan))).collect(),
        vnets: planned,
        stopped: Shared::default(),
        damaged: BTreeSet::new(),
        weight,
        capacity: substrate.forwarding_engines.values().map(|it| u64::from(it.capacity.0)).sum(),
        neighbours,
        guests,
    })
}

fn outlet_plan(
    places: &Places,
    substrate: &SubstrateSpec,
    name: &str,
    outlet: Outlet<'_>,
) -> OutletPlan {
    match outlet {
        Outlet::Device(device, attach) => OutletPlan::Device(DevicePlan {
            device: device.into(),
            attach,
            workers: substrate.mux.workers,
            takes: Takes::default(),
            pins: places.pins.join(name),
        }),
        Outlet::Memif(memif) => OutletPlan::Memif(MemifPlan {
            socket: places.external_memif(name),
            mtu: memif.mtu,
            group: memif.group.clone(),
        }),
        Outlet::Generator(generator) => OutletPlan::Generator(GeneratorPlan {
            told: mux::Generator {
                pps: generator.pps.unwrap_or(0),
                frames: generator.count.unwrap_or(0),
                number_at: generator.number_at,
            },
            hash: hash(&generator.pcap.as_ref().map(|pcap| &pcap.0[..])),
            pcap: generator.pcap.clone(),
        }),
    }
}

/// That a path is short enough for a socket.
fn check_socket(path: &Path) -> Result<(), PlanError> {
    let (bytes, max) = (path.as_os_str().len(), SOCKET_PATH_BYTES_MAX);
    if bytes > max { Err(PlanError::PathTooLong { path: path.into(), bytes, max }) } else { Ok(()) }
}

fn mux_plan(places: &Places, substrate: &SubstrateSpec) -> MuxPlan {
    let cpus: Vec<String> = substrate.mux.cpus.0.iter().map(u32::to_string).collect();
    let process = HelperSpec {
        id: "mux".into(),
        dir: places.records().join("mux"),
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

/// How frames leave by an end of a link, for the mux.
fn told(link: &str, end: usize, leaving: &Leaving) -> mux::Leaving {
    let mut told = leaving.told();
    if !told.impairments.are_none() {
        told.impairments.seed ^= stream(link, end);
    }
    told
}

/// What sets the chances of an end of a link apart from those of others with the same seed (FNV-1a).
fn stream(link: &str, end: usize) -> u64 {
    let bytes = link.bytes().chain((end as u64).to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

struct VnetPlanner<'a> {
    places: &'a Places,
    substrate: &'a SubstrateSpec,
    name: &'a str,
    spec: &'a VirtualNetworkSpec,
    uid: u32,
    holding: &'a Holding,
    /// Its links to the outside that stay in the kernel.
    far: Vec<FarLink<'a>>,
}

impl VnetPlanner<'_> {
    fn plan(&self) -> Result<VnetPlan, PlanError> {
        let mut nodes = BTreeMap::new();
        let mut mux_nodes = Vec::new();
        for (name, node) in &self.spec.nodes {
            let planner = NodePlanner { vnet: self, name, node };
            let plan = planner.plan()?;
            mux_nodes.push(planner.mux_node(&plan));
            nodes.insert(name.clone(), plan);
        }
        let mut links = Vec::new();
        let mut vlinks = Vec::new();
        let mut ways = Vec::new();
        let mut far = BTreeSet::new();
        for (index, link) in self.spec.links.iter().enumerate() {
            let ends: Option<Vec<_>> = link.endpoints.iter().map(|end| self.end(end)).collect();
            let Some(ends) = ends else { continue };
            let name = link.name.clone().unwrap_or_else(|| format!("link{}", index + 1));
            let down = self.holding.links_down.contains(&name);
            let is_far = self.far.iter().any(|far| std::ptr::eq(far.link, link));
            if is_far {
                far.insert(name.clone());
            }
            let leaving = link.endpoints.iter().enumerate().map(|(at, end)| {
                if !link.has_leaving(end) {
                    return Leaving::default().told();
                }
                told(&name, at, &link.leaving(end))
            });
            let steps = link.steps().into_iter().map(|(at, up, leaving)| mux::Step {
                at_ns: at.0,
                up,
                leaving: leaving.iter().enumerate().map(|(at, it)| told(&name, at, it)).collect(),
            });
            let began = self.holding.schedules.get(&name);
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
                segment: link.segment.map(|segment| mux::Segment {
                    addresses: segment.addresses,
                    flood_pps: segment.flood_pps,
                }),
            });
            links.push(link.endpoints.clone());
            ways.push(match is_far {
                true => LinkWay::Kernel,
                false => LinkWay::of(self.name, self.spec, link),
            });
        }
        let mux = mux::Vnet {
            name: self.name.into(),
            police: self.spec.police.map(rate),
            nodes: mux_nodes,
            vlinks,
        };
        let (weight, neighbours) = (weight(&nodes), neighbours(&nodes));
        let guests = nodes.values().map(|node| 1 + node.guests.len() as u64).sum();
        let silent = self.holding.links_silent.clone();
        let hosts = hosts::text(self.name, self.spec);
        let takes = self.takes();
        Ok(VnetPlan {
            nodes,
            mux,
            links,
            ways,
            far,
            silent,
            hosts,
            takes,
            weight,
            neighbours,
            guests,
        })
    }

    fn takes(&self) -> BTreeMap<String, Takes> {
        let mut all: BTreeMap<String, Takes> = BTreeMap::new();
        for outside in self.spec.externals.values() {
            let takes = all.entry(outside.interface.clone()).or_default();
            match outside.encapsulation().takes() {
                None => takes.all = true,
                Some(take) => _ = takes.tunnels.insert(take),
            }
        }
        for link in &self.far {
            all.entry(link.far.interface.clone()).or_default().ports = true;
        }
        all
    }

    fn end(&self, endpoint: &Endpoint) -> Option<mux::End> {
        Some(match endpoint {
            Endpoint::Port { node, interface } => mux::End::Port {
                node: node.clone(),
                port: self.spec.nodes.get(node)?.port_index(interface)?,
            },
            Endpoint::External(name) => {
                let outside = self.spec.externals.get(name)?;
                mux::End::External {
                    name: name.clone(),
                    interface: outside.interface.clone(),
                    by: outside.encapsulation(),
                }
            }
        })
    }
}

/// What part of a CPU a vnet gets that is guaranteed none: the least that both versions of cgroups tell from
/// none, so that many of these take next to nothing from those that are.
const LENT_WEIGHT: u32 = 2;

fn weight(nodes: &BTreeMap<String, NodePlan>) -> u32 {
    let placements = nodes.values().flat_map(NodePlan::placements);
    let power = placements.map(|placement| placement.power_millicores).fold(0, u32::saturating_add);
    power.max(LENT_WEIGHT)
}

/// Stations on the links of a node, of which a machine's kernel keeps entries.
const STATIONS_OF_PORT: u64 = 64;

/// Stations that a kernel which forwards by itself may ask for at a time (3 s): 5,000 that are new a second. Nothing
/// holds it to that.
const ASKED_BY_KERNEL: u64 = 16_384;

fn neighbours(nodes: &BTreeMap<String, NodePlan>) -> u64 {
    let of_node = |node: &NodePlan| {
        // Those of this time and of the one before.
        node.followers() * 2 * (ASKED_MAX + ANSWERED_MAX) as u64
            + u64::from(node.is_kernels()) * ASKED_BY_KERNEL
            + node.taps.len() as u64 * STATIONS_OF_PORT
    };
    nodes.values().map(of_node).sum()
}

impl VnetPlan {
    /// External interfaces that its links use.
    pub fn externals(&self) -> impl Iterator<Item = &str> {
        self.mux.vlinks.iter().flat_map(mux::Vlink::interfaces)
    }

    /// What the mux is told: it has no part in tunnels of links that stay in the kernel.
    pub fn told(&self) -> mux::Vnet {
        let mut told = self.mux.clone();
        told.vlinks.retain(|link| !self.far.contains(&link.name));
        told
    }

    /// Nodes with a port whose link ends at an external interface.
    pub fn nodes_at(&self, vnet: &str, external: &str) -> Vec<Key> {
        let links = self.mux.vlinks.iter();
        let there = links.filter(|link| link.interfaces().any(|name| name == external));
        there.flat_map(mux::Vlink::ports).map(|(node, _)| Key::node(vnet, node)).collect()
    }

    /// It and its parts.
    pub fn keys(&self, name: &str) -> Vec<Key> {
        let mut keys = vec![Key::vnet(name)];
        for (node, plan) in &self.nodes {
            keys.push(Key::node(name, node));
            keys.extend(plan.guests.keys().map(|&number| Key::guest(name, node, number)));
        }
        keys
    }

    /// External interfaces without which the ports of a link have no carrier: that of the only other end.
    pub fn cut_off_by(link: &mux::Vlink) -> impl Iterator<Item = &str> {
        link.interfaces().filter(|_| link.is_wire())
    }

    /// Whether a link gives its ends carrier at a moment of its schedule's clock: it is up, or down silently.
    pub fn has_carrier(&self, link: &mux::Vlink, now_ns: u64) -> bool {
        link.is_up(now_ns) || self.silent.contains(&link.name)
    }

    /// The port of a node that a link joins this external to by itself: the node and its interface.
    pub fn other_end(&self, external: &str) -> Option<(String, String)> {
        let is_it = |end: &Endpoint| matches!(end, Endpoint::External(name) if name == external);
        let ends = self.links.iter().find(|ends| ends.len() == 2 && ends.iter().any(is_it))?;
        ends.iter().find_map(|end| match end {
            Endpoint::Port { node, interface } => Some((node.clone(), interface.clone())),
            Endpoint::External(_) => None,
        })
    }

    /// The vlink of a port.
    pub fn link_of(&self, node: &str, port: u16) -> Option<&mux::Vlink> {
        self.way_of(node, port).map(|(link, _)| link)
    }

    /// The same, and which way it takes.
    pub fn way_of(&self, node: &str, port: u16) -> Option<(&mux::Vlink, &LinkWay)> {
        let mut links = std::iter::zip(&self.mux.vlinks, &self.ways);
        links.find(|(link, _)| link.ports().any(|end| end == (node, port)))
    }
}

impl NodePlan {
    /// Its interfaces that are TAPs, with the index of the vport.
    pub fn tapped(&self) -> impl Iterator<Item = (u16, &TapSpec)> {
        let all = self.taps.iter().enumerate().map(|(index, tap)| (index as u16, tap));
        all.filter(|(index, _)| !self.straight.contains_key(index))
    }

    /// Its shares of forwarding engines.
    pub fn placements(&self) -> impl Iterator<Item = &Placement> {
        let guests = self.guests.values().map(|guest| &guest.placement);
        guests.chain(self.kernel.iter().map(|kernel| &kernel.placement))
    }

    /// How many forward by the control guest's routes: guests, or the mux.
    pub fn followers(&self) -> u64 {
        let guests = self.guests.values().filter(|guest| guest.mirrored).count() as u64;
        guests + u64::from(self.mux_follows())
    }

    /// Whether its control guest's kernel forwards for it.
    pub fn is_kernels(&self) -> bool {
        self.kind == NodeKind::Router && self.mirror.is_none()
    }

    /// Whether the mux forwards by the control guest's routes.
    pub fn mux_follows(&self) -> bool {
        let code = self.engine.as_ref().map(|engine| &engine.code);
        matches!(code, Some(mux::Code::Ip { .. }))
    }

    /// Where the mux listens for programs of its control guest.
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

/// Hexadecimal SHA-256 of the JSON of a value. Types of plans always have one.
pub(crate) fn hash(value: &impl Serialize) -> String {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
