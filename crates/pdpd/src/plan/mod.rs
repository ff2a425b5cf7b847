//! What is to run, from the specs, the ledger and the machine's places.
//!
//! Pure: no clock, no file, no socket; the same input gives the same plan. Every object of a plan
//! has a hash of what it is made from, so that a change is found where it is and nowhere else;
//! what can be changed while an object runs (limits) is left out of it.
//!
//! [`node`] plans one node, [`words`] puts a spec's words into those of the mux and the guests.
//!
//! Source: docs/ARCHITECTURE.md, "Places".

mod node;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use pdp_container::{GuestSpec, HelperSpec, LOG_BYTES_MAX, Limits};
use pdp_net::tap::TapSpec;
use pdp_net::xdp::Take;
use pdp_proto::{mirror, mux, tap};
use pdp_spec::units::{Base64, Endpoint};
use pdp_spec::{DeviceAttach, Outlet, SubstrateSpec, VirtualNetworkSpec};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::ledger::{Ledger, Placement, UID_BASE, VNETS, vnet_uid_base};
use node::NodePlanner;
use words::{encapsulation, rate};

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
    /// Where a node's things are.
    pub fn node(&self, vnet: &str, node: &str) -> PathBuf {
        self.run.join("vnets").join(vnet).join(node)
    }

    /// The mux's control socket; its directory is the mux's to write.
    pub fn mux_control(&self) -> PathBuf {
        self.run.join("mux/control.sock")
    }

    /// Where the mux listens for the program behind an external interface.
    pub fn external_memif(&self, name: &str) -> PathBuf {
        self.run.join("externals").join(name).join("memif.sock")
    }

    /// The cgroup of a vnet, below pdpd's own.
    pub fn vnet_cgroup(vnet: &str) -> String {
        format!("vnets/{}", dotless(vnet))
    }

    fn binary(&self, name: &str) -> String {
        self.lib.join(name).to_string_lossy().into_owned()
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
    pub mux: Option<MuxPlan>,
    /// External interfaces by name.
    pub externals: BTreeMap<String, ExternalPlan>,
    /// Vnets by name.
    pub vnets: BTreeMap<String, VnetPlan>,
}

impl Plan {
    /// Cgroups above those of guests, and what part of a CPU they get in thousandths of a core
    /// ([`pdp_container::cgroup::Cgroups::weigh`]): a vnet's is the power of all of its guests, so that
    /// what its control side takes of a CPU that it shares with its guests is these guests'. Without
    /// forwarding guests it is the `cpu` of its hosts. Of the vnets that run; none without any.
    pub fn weights(&self, runs: impl Fn(&String) -> bool) -> Vec<(String, u32)> {
        let guests = |vnet: &VnetPlan| {
            let guests = vnet.nodes.values().flat_map(|node| node.guests.values());
            guests.map(|guest| guest.placement.power_millicores).fold(0, u32::saturating_add)
        };
        let controls = |vnet: &VnetPlan| {
            let controls = vnet.nodes.values().filter_map(|node| node.control.limits.cpu_weight);
            controls.fold(0, u32::saturating_add)
        };
        let weight = |vnet: &VnetPlan| match guests(vnet) {
            0 => controls(vnet),
            power => power,
        };
        let vnets = self.vnets.iter().filter(|(name, _)| runs(name));
        let mut weights: Vec<_> =
            vnets.map(|(name, vnet)| (Places::vnet_cgroup(name), weight(vnet))).collect();
        if !weights.is_empty() {
            let all = weights.iter().map(|(_, weight)| *weight).fold(0, u32::saturating_add);
            weights.push(("vnets".to_owned(), all));
        }
        weights
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

/// An external interface, by what is behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExternalPlan {
    /// A network device.
    Device(DevicePlan),
    /// A program that speaks memif.
    Memif(MemifPlan),
    /// A source and sink inside the mux.
    Generator(GeneratorPlan),
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
    pub takes: BTreeSet<TakeKey>,
    /// Whether it takes every frame.
    pub take_all: bool,
    /// Where its pins are.
    pub pins: PathBuf,
}

/// A [`Take`] that can be put in order.
pub type TakeKey = (IpAddr, u16);

impl DevicePlan {
    /// What the XDP program takes.
    pub fn takes(&self) -> Vec<Take> {
        self.takes.iter().map(|&(local, port)| Take { local, port }).collect()
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
    /// What the mux is told. Its nodes are in the order of [`VnetPlan::nodes`].
    pub mux: mux::Vnet,
    /// Links as written: name and the two ends, in the order of `mux.vlinks`.
    pub links: Vec<[Endpoint; 2]>,
}

/// A node: its control side and its forwarding guests.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePlan {
    /// Its directory.
    pub directory: PathBuf,
    /// The control guest or host. Its limits are those of the node's control side as a whole.
    pub control: GuestSpec,
    /// Of all of the control side but limits and MTUs.
    pub hash: String,
    /// Its TAPs, by index of the vport.
    pub taps: Vec<TapSpec>,
    /// The helper that serves them; `None` without ports.
    pub tap_helper: Option<TapHelperPlan>,
    /// The route mirror, for routers: its process, and its configuration but for the namespaces.
    pub mirror: Option<MirrorPlan>,
    /// Forwarding guests by number.
    pub guests: BTreeMap<u32, GuestPlan>,
    /// Directories that are made before anything else, with owner, group and mode.
    pub directories: Vec<Directory>,
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

/// A forwarding guest.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestPlan {
    /// The container.
    pub container: GuestSpec,
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

/// A directory to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    /// Where.
    pub path: PathBuf,
    /// Owner on the host.
    pub uid: u32,
    /// Group on the host.
    pub gid: u32,
    /// Permission bits.
    pub mode: u32,
}

/// Why there can't be a plan. What the checks of specs find is not repeated here.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A vnet without a number: more than the ledger has.
    #[error("vnet {vnet}: no range of user ids left, {max} vnets at most; delete one first")]
    NoNumber {
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

/// The plan for these specs.
pub fn plan(
    places: &Places,
    substrate: &SubstrateSpec,
    vnets: &BTreeMap<String, VirtualNetworkSpec>,
    ledger: &Ledger,
) -> Result<Plan, PlanError> {
    let mut plan = Plan { mux: Some(mux_plan(places, substrate)), ..Plan::default() };
    for (name, interface) in &substrate.interfaces {
        // The check of specs has seen to it that there is one.
        let Some(outlet) = interface.outlet() else { continue };
        let external = external_plan(places, substrate, name, outlet);
        if let ExternalPlan::Memif(memif) = &external {
            check_socket(&memif.socket)?;
        }
        plan.externals.insert(name.clone(), external);
    }
    for (name, spec) in vnets {
        for outside in spec.externals.values() {
            if let Some(ExternalPlan::Device(device)) = plan.externals.get_mut(&outside.interface) {
                match encapsulation(outside) {
                    mux::Encapsulation::Interface => device.take_all = true,
                    mux::Encapsulation::Vxlan { local, port, .. }
                    | mux::Encapsulation::Udp { local, local_port: port, .. } => {
                        device.takes.insert((local, port));
                    }
                }
            }
        }
        let number = ledger.numbers.get(VNETS).and_then(|numbers| numbers.get(name));
        let number = *number.ok_or_else(|| PlanError::NoNumber {
            vnet: name.clone(),
            max: crate::ledger::VNETS_MAX,
        })?;
        let vnet =
            VnetPlanner { places, substrate, name, spec, uid: vnet_uid_base(number), ledger };
        plan.vnets.insert(name.clone(), vnet.plan()?);
    }
    Ok(plan)
}

fn external_plan(
    places: &Places,
    substrate: &SubstrateSpec,
    name: &str,
    outlet: Outlet<'_>,
) -> ExternalPlan {
    match outlet {
        Outlet::Device(device, attach) => ExternalPlan::Device(DevicePlan {
            device: device.into(),
            attach,
            workers: substrate.mux.workers,
            takes: BTreeSet::new(),
            take_all: false,
            pins: places.pins.join(name),
        }),
        Outlet::Memif(memif) => ExternalPlan::Memif(MemifPlan {
            socket: places.external_memif(name),
            mtu: memif.mtu,
            group: memif.group.clone(),
        }),
        Outlet::Generator(generator) => ExternalPlan::Generator(GeneratorPlan {
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
    let directory = places.run.join("mux");
    let cpus: Vec<String> = substrate.mux.cpus.0.iter().map(u32::to_string).collect();
    let process = HelperSpec {
        id: "mux".into(),
        dir: directory.join("process"),
        argv: vec![
            places.binary("pdp-mux"),
            "--control".into(),
            places.mux_control().to_string_lossy().into_owned(),
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
    MuxPlan { hash: hash(&process), process, limits }
}

struct VnetPlanner<'a> {
    places: &'a Places,
    substrate: &'a SubstrateSpec,
    name: &'a str,
    spec: &'a VirtualNetworkSpec,
    uid: u32,
    ledger: &'a Ledger,
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
        for (index, link) in self.spec.links.iter().enumerate() {
            let [a, b] = link.endpoints.as_slice() else { continue };
            let (Some(end_a), Some(end_b)) = (self.end(a), self.end(b)) else { continue };
            let name = link.name.clone().unwrap_or_else(|| format!("link{}", index + 1));
            let down = self.ledger.links_down.contains(&(self.name.to_string(), name.clone()));
            vlinks.push(mux::Vlink {
                name,
                a: end_a,
                b: end_b,
                rate_bps: link.rate.map(|rate| rate.0),
                queue_frames: link.queue,
                up: !down,
            });
            links.push([a.clone(), b.clone()]);
        }
        let mux = mux::Vnet {
            name: self.name.into(),
            police: self.spec.police.map(rate),
            nodes: mux_nodes,
            vlinks,
        };
        Ok(VnetPlan { nodes, mux, links })
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
                    interface: outside.interface.clone(),
                    by: encapsulation(outside),
                }
            }
        })
    }
}

impl VnetPlan {
    /// Whether a port's link is up; a port without a link has none.
    pub fn carrier(&self, node: &str, port: u16) -> bool {
        self.link_of(node, port).is_some_and(|link| link.up)
    }

    /// The vlink of a port.
    pub fn link_of(&self, node: &str, port: u16) -> Option<&mux::Vlink> {
        let is_port = |end: &mux::End| match end {
            mux::End::Port { node: of, port: index } => of == node && *index == port,
            mux::End::External { .. } => false,
        };
        self.mux.vlinks.iter().find(|link| is_port(&link.a) || is_port(&link.b))
    }
}

impl NodePlan {
    fn sockets(&self) -> Vec<&Path> {
        let mut paths: Vec<&Path> = Vec::new();
        paths.extend(self.tap_helper.as_ref().map(|helper| helper.control.as_path()));
        if let Some(mirror) = &self.mirror {
            paths.extend([&*mirror.config.control_socket, &*mirror.config.routes_socket]);
        }
        for guest in self.guests.values() {
            // As long as any path to its memif socket.
            paths.push(&guest.container.dir);
            paths.extend(guest.taps.as_ref().map(|(_, helper)| helper.control.as_path()));
        }
        paths
    }
}

/// Hexadecimal SHA-256 of the JSON of a value. Types of plans always have one.
fn hash(value: &impl Serialize) -> String {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
