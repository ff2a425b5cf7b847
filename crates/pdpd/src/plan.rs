//! What is to run, from the specs, the ledger and the machine's places.
//!
//! Pure: no clock, no file, no socket; the same input gives the same plan. Every object of a plan
//! has a hash of what it is made from, so that a change is found where it is and nowhere else;
//! what can be changed while an object runs (limits) is left out of it.
//!
//! Source: docs/ARCHITECTURE.md, "Places".

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_container::{
    Bind, Command, File, GuestSpec, HelperSpec, Limits, Owned, Profile, Restart, Root, UserRange,
};
use pdp_net::tap::TapSpec;
use pdp_net::xdp::Take;
use pdp_proto::{mirror, mux, tap};
use pdp_spec::units::Endpoint;
use pdp_spec::{
    Attach, BuiltIn, DataPlane, External as OutsideEnd, Flow, Image, ImageSource, KnownFlow, Limit,
    Node, NodeKind, Policy, Program, SubstrateSpec, VirtualNetworkSpec,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::ledger::{Ledger, Placement, UID_BASE, UIDS_PER_VNET, VNETS, vnet_uid_base};

/// Where a forwarding guest finds what pdpd binds into it.
pub const GUEST_RUN: &str = "/run/pdp";

/// Inside a guest: user id of forwarding programs.
const PROGRAM_UID: u32 = 1000;

/// Offset of the user id that a vnet's TAP helpers have: beyond what its guests map.
const HELPER_UID_OFFSET: u32 = UIDS_PER_VNET;

/// Bytes of one log file of a guest or helper; there are two of each.
const LOG_BYTES_MAX: u64 = 4 << 20;

/// Processes of a node's helpers, beside what its spec allows the guest.
const HELPER_PROCESSES: u64 = 32;

/// Memory of a node's helpers, beside what its spec allows the guest.
const HELPER_MEMORY_BYTES: u64 = 64 << 20;

/// Name of the route that a gateway stands for.
const DEFAULT_V4: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0));
const DEFAULT_V6: IpNet = IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0));

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

    fn binary(&self, name: &str) -> String {
        self.lib.join(name).to_string_lossy().into_owned()
    }
}

/// All that is to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The mux; there is one as soon as there is a substrate or a vnet.
    pub mux: Option<MuxPlan>,
    /// External interfaces by name.
    pub externals: BTreeMap<String, ExternalPlan>,
    /// Vnets by name.
    pub vnets: BTreeMap<String, VnetPlan>,
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
    /// Its device.
    pub device: String,
    /// What the XDP program takes.
    pub takes: BTreeSet<TakeKey>,
    /// Whether it takes every frame.
    pub take_all: bool,
    /// Where its pins are.
    pub pins: PathBuf,
}

/// A [`Take`] that can be put in order.
pub type TakeKey = (IpAddr, u16);

impl ExternalPlan {
    /// What the XDP program takes.
    pub fn takes(&self) -> Vec<Take> {
        self.takes.iter().map(|&(local, port)| Take { local, port }).collect()
    }
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
    /// The forwarding engine and the share of it.
    pub placement: Placement,
    /// For programs that work on TAPs: those, and who serves them.
    pub taps: Option<(Vec<TapSpec>, TapHelperPlan)>,
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
    /// More ports than descriptors go with one message.
    #[error("node {vnet}/{node}: {count} interfaces, {max} at most")]
    Ports {
        /// The vnet.
        vnet: String,
        /// The node.
        node: String,
        /// How many.
        count: usize,
        /// The bound.
        max: usize,
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
        plan.externals.insert(
            name.clone(),
            ExternalPlan {
                device: interface.device.clone(),
                takes: BTreeSet::new(),
                take_all: false,
                pins: places.pins.join(name),
            },
        );
    }
    for (name, spec) in vnets {
        for outside in spec.externals.values() {
            if let Some(external) = plan.externals.get_mut(&outside.interface) {
                match encapsulation(outside) {
                    mux::Encapsulation::Interface => external.take_all = true,
                    mux::Encapsulation::Vxlan { local, port, .. }
                    | mux::Encapsulation::Udp { local, local_port: port, .. } => {
                        external.takes.insert((local, port));
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

fn mux_plan(places: &Places, substrate: &SubstrateSpec) -> MuxPlan {
    let directory = places.run.join("mux");
    let process = HelperSpec {
        id: "mux".into(),
        dir: directory.join("process"),
        argv: vec![
            places.binary("pdp-mux"),
            "--control".into(),
            places.mux_control().to_string_lossy().into_owned(),
            "--workers".into(),
            substrate.mux.workers.to_string(),
        ],
        env: BTreeMap::new(),
        cgroup: "mux".into(),
        uid: MUX_UID,
        keep_root: false,
        log_bytes_max: LOG_BYTES_MAX,
    };
    let limits = Limits { cpus: Some(substrate.mux.cpus.to_string()), ..Limits::default() };
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

struct NodePlanner<'a> {
    vnet: &'a VnetPlanner<'a>,
    name: &'a str,
    node: &'a Node,
}

impl NodePlanner<'_> {
    fn plan(&self) -> Result<NodePlan, PlanError> {
        let ports = self.node.ports();
        if ports.len() > pdp_proto::channel::DESCRIPTORS_MAX {
            return Err(PlanError::Ports {
                vnet: self.vnet.name.into(),
                node: self.name.into(),
                count: ports.len(),
                max: pdp_proto::channel::DESCRIPTORS_MAX,
            });
        }
        let directory = self.directory();
        let taps = self.taps(None);
        let control = self.control();
        let mut directories = vec![Directory {
            path: directory.join("tap"),
            uid: MUX_UID,
            gid: self.helper_uid(),
            mode: 0o770,
        }];
        let tap_helper = (!taps.is_empty()).then(|| {
            let sockets = directory.join("tap");
            self.tap_helper("tap", &self.cgroup(), &sockets.join("trunk.sock"), &sockets)
        });
        let mirror = (self.node.kind == NodeKind::Router).then(|| {
            directories.push(Directory {
                path: directory.join("routes"),
                uid: 0,
                gid: self.vnet.uid + PROGRAM_UID,
                mode: 0o750,
            });
            self.mirror()
        });
        let mut guests = BTreeMap::new();
        if let Some(data_plane) = self.data_plane() {
            let key = (self.vnet.name.to_string(), self.name.to_string());
            for (&number, placement) in self.vnet.ledger.placements.get(&key).into_iter().flatten()
            {
                let guest = directory.join(format!("g{number}"));
                let group = match attach(&data_plane.program) {
                    Attach::Tap => self.helper_uid(),
                    Attach::Runtime | Attach::Memif => self.vnet.uid + PROGRAM_UID,
                };
                directories.push(Directory {
                    path: guest.join("memif"),
                    uid: MUX_UID,
                    gid: group,
                    mode: 0o750,
                });
                let plan = self.guest(&data_plane, number, placement);
                if plan.taps.is_some() {
                    directories.push(Directory {
                        path: guest.join("tap"),
                        uid: self.helper_uid(),
                        gid: 0,
                        mode: 0o700,
                    });
                }
                guests.insert(number, plan);
            }
        }
        let plan = NodePlan {
            hash: self.control_hash(&control, &taps),
            directory,
            control,
            taps,
            tap_helper,
            mirror,
            guests,
            directories,
        };
        for path in plan.sockets() {
            let bytes = path.as_os_str().len();
            if bytes > SOCKET_PATH_BYTES_MAX {
                let max = SOCKET_PATH_BYTES_MAX;
                return Err(PlanError::PathTooLong { path: path.into(), bytes, max });
            }
        }
        Ok(plan)
    }

    fn directory(&self) -> PathBuf {
        self.vnet.places.node(self.vnet.name, self.name)
    }

    fn cgroup(&self) -> String {
        format!("vnets/{}/{}", self.vnet.name, self.name)
    }

    fn helper_uid(&self) -> u32 {
        self.vnet.uid + HELPER_UID_OFFSET
    }

    fn users(&self) -> UserRange {
        UserRange { base: self.vnet.uid, length: UIDS_PER_VNET }
    }

    fn data_plane(&self) -> Option<DataPlane> {
        match self.node.kind {
            NodeKind::Router => Some(self.node.data_plane.clone().unwrap_or_default()),
            NodeKind::Host => None,
        }
    }

    /// The node's interfaces as TAPs; for a forwarding guest that works on TAPs without addresses.
    fn taps(&self, owner: Option<u32>) -> Vec<TapSpec> {
        let control = owner.is_none();
        let mut taps = Vec::new();
        for (index, (name, interface)) in self.node.ports().into_iter().enumerate() {
            let routes = interface.gateways.iter().map(|&gateway| match gateway {
                IpAddr::V4(_) => (DEFAULT_V4, gateway),
                IpAddr::V6(_) => (DEFAULT_V6, gateway),
            });
            taps.push(TapSpec {
                name: if control { name.into() } else { format!("eth{index}") },
                mac: self.mac(name),
                mtu: interface.mtu.unwrap_or(pdp_spec::limits::MTU_DEFAULT),
                addresses: match control {
                    true => interface.addresses.iter().map(|address| address.0).collect(),
                    false => Vec::new(),
                },
                routes: if control { routes.collect() } else { Vec::new() },
                queue_frames: None,
                owner,
            });
        }
        taps
    }

    fn mac(&self, interface: &str) -> [u8; 6] {
        if let Some(mac) = self.node.interfaces.get(interface).and_then(|port| port.mac) {
            return mac.0;
        }
        default_mac(self.vnet.name, self.name, interface)
    }

    fn control(&self) -> GuestSpec {
        let resources = &self.node.resources;
        let management = self.vnet.substrate.management_host.as_ref();
        let router = self.node.kind == NodeKind::Router;
        GuestSpec {
            id: format!("{}.{}", self.vnet.name, self.name),
            dir: self.directory().join("control"),
            cgroup: self.cgroup(),
            root: root(&self.node.image),
            profile: if router { Profile::Control } else { Profile::Host },
            users: self.users(),
            uid: 0,
            hostname: self.name.into(),
            files: self.files(),
            binds: Vec::new(),
            commands: self
                .node
                .commands
                .iter()
                .map(|command| Command { argv: command.words(), restart: Restart::Always })
                .collect(),
            env: self.node.env.clone(),
            sysctls: BTreeMap::new(),
            limits: Limits {
                cpu_cores: Some(f64::from(resources.cpu.0) / 1000.0),
                cpu_period_us: None,
                memory_bytes: Some(resources.memory.0 + HELPER_MEMORY_BYTES),
                processes: Some(u64::from(resources.processes) + HELPER_PROCESSES),
                cpus: management.and_then(|host| host.cpus.as_ref()).map(ToString::to_string),
            },
            log_bytes_max: LOG_BYTES_MAX,
        }
    }

    fn files(&self) -> Vec<File> {
        let mut files = Vec::new();
        for (path, file) in &self.node.files {
            files.push(File {
                path: path.into(),
                content: file.content.clone().unwrap_or_default(),
                // Digits are checked with the spec.
                mode: u32::from_str_radix(&file.mode, 8).unwrap_or(0o644),
                owner: owner(&file.owner),
                writable: true,
            });
        }
        files
    }

    fn tap_helper(
        &self,
        name: &str,
        cgroup: &str,
        trunk: &Path,
        control_directory: &Path,
    ) -> TapHelperPlan {
        let control = control_directory.join("control.sock");
        let process = HelperSpec {
            id: format!("{}.{}.{name}", self.vnet.name, self.name),
            dir: self.directory().join("helpers").join(name),
            argv: vec![
                self.vnet.places.binary("pdp-tap"),
                "--trunk".into(),
                trunk.to_string_lossy().into_owned(),
                "--control".into(),
                control.to_string_lossy().into_owned(),
            ],
            env: BTreeMap::new(),
            cgroup: format!("{cgroup}/helpers"),
            uid: self.helper_uid(),
            keep_root: false,
            log_bytes_max: LOG_BYTES_MAX,
        };
        let names = self.taps(name.starts_with("tap-").then_some(0));
        let ports = names.into_iter().enumerate();
        let ports = ports.map(|(index, tap)| tap::Port { vport: index as u16, name: tap.name });
        TapHelperPlan { process, control, ports: ports.collect() }
    }

    fn mirror(&self) -> MirrorPlan {
        let directory = self.directory();
        let helper = directory.join("helpers/mirror");
        let config_file = directory.join("mirror.json");
        let process = HelperSpec {
            id: format!("{}.{}.mirror", self.vnet.name, self.name),
            dir: helper,
            argv: vec![
                self.vnet.places.binary("pdp-mirror"),
                config_file.to_string_lossy().into_owned(),
            ],
            env: BTreeMap::new(),
            cgroup: format!("{}/helpers", self.cgroup()),
            uid: 0,
            keep_root: true,
            log_bytes_max: LOG_BYTES_MAX,
        };
        let config = mirror::Config {
            netns: PathBuf::new(),
            userns: None,
            vports: self.node.ports().into_iter().map(|(name, _)| name.to_string()).collect(),
            routes_socket: directory.join("routes/routes.sock"),
            control_socket: directory.join("mirror.sock"),
            routes_max: u64::from(self.node.resources.routes),
        };
        MirrorPlan { process, config_file, config }
    }

    fn guest(&self, data_plane: &DataPlane, number: u32, placement: &Placement) -> GuestPlan {
        let directory = self.directory().join(format!("g{number}"));
        let cgroup = format!("{}.g{number}", self.cgroup());
        let engine = self.vnet.substrate.forwarding_engines.get(&placement.engine);
        let cpus = engine.map(|engine| engine.cpus.to_string());
        let attach = attach(&data_plane.program);
        let mut binds = vec![Bind {
            source: self.directory().join("routes"),
            target: Path::new(GUEST_RUN).join("routes"),
            writable: false,
        }];
        if attach != Attach::Tap {
            binds.push(Bind {
                source: directory.join("memif"),
                target: Path::new(GUEST_RUN).join("memif"),
                writable: false,
            });
        }
        let (argv, image) = match &data_plane.program {
            Program::BuiltIn(BuiltIn::Router) => {
                let inside = format!("{GUEST_RUN}/pdp-router");
                binds.push(Bind {
                    source: self.vnet.places.lib.join("pdp-router"),
                    target: inside.clone().into(),
                    writable: false,
                });
                (vec![inside], Root::Host)
            }
            Program::Own(program) => {
                let ports = self.node.interfaces.len().to_string();
                let words = program.run.words().into_iter().map(|word| {
                    word.replace("{ports}", &ports)
                        .replace("{guest}", &number.to_string())
                        .replace("{cpus}", cpus.as_deref().unwrap_or_default())
                });
                (words.collect(), root(&program.image))
            }
        };
        let container = GuestSpec {
            id: format!("{}.{}.g{number}", self.vnet.name, self.name),
            dir: directory.clone(),
            cgroup: cgroup.clone(),
            root: image,
            profile: Profile::Forwarding { tap: attach == Attach::Tap },
            users: self.users(),
            uid: PROGRAM_UID,
            hostname: format!("{}-g{number}", self.name),
            files: Vec::new(),
            binds,
            commands: vec![Command { argv, restart: Restart::Never }],
            env: BTreeMap::from([
                ("PDP_GUEST".into(), number.to_string()),
                ("PDP_PORTS".into(), self.node.interfaces.len().to_string()),
                ("PDP_MEMIF".into(), format!("{GUEST_RUN}/memif/memif.sock")),
                ("PDP_ROUTES".into(), format!("{GUEST_RUN}/routes/routes.sock")),
            ]),
            sysctls: BTreeMap::new(),
            limits: Limits {
                cpu_cores: Some(f64::from(placement.power_millicores) / 1000.0),
                cpu_period_us: None,
                memory_bytes: Some(data_plane.memory.0),
                processes: Some(u64::from(data_plane.processes)),
                cpus,
            },
            log_bytes_max: LOG_BYTES_MAX,
        };
        let taps = (attach == Attach::Tap).then(|| {
            let taps = self.taps(Some(self.vnet.uid + PROGRAM_UID));
            let helper = self.tap_helper(
                &format!("tap-g{number}"),
                &cgroup,
                &directory.join("memif/memif.sock"),
                &directory.join("tap"),
            );
            (taps, helper)
        });
        let hash = hash(&(
            &without_limits(&container),
            taps.as_ref().map(|(taps, helper)| (tap_words(taps), helper.process.clone())),
        ));
        GuestPlan { container, hash, placement: placement.clone(), taps }
    }

    /// Of the control side: a change of it makes the control guest, its TAPs and helpers anew.
    fn control_hash(&self, control: &GuestSpec, taps: &[TapSpec]) -> String {
        hash(&(without_limits(control), tap_words(taps), self.node.resources.routes))
    }

    fn mux_node(&self, plan: &NodePlan) -> mux::Node {
        let ports = plan.taps.iter().map(|tap| mux::Port {
            name: tap.name.clone(),
            mac: tap.mac,
            mtu: tap.mtu,
        });
        let router = self.data_plane().map(|data_plane| mux::Router {
            guests: plan
                .guests
                .iter()
                .map(|(&number, guest)| mux::Guest {
                    number,
                    socket: plan.directory.join(format!("g{number}/memif/memif.sock")),
                    attach: match attach(&data_plane.program) {
                        Attach::Runtime => mux::Attach::Runtime,
                        Attach::Memif => mux::Attach::Memif,
                        Attach::Tap => mux::Attach::Tap,
                    },
                    weight: guest.placement.power_millicores,
                })
                .collect(),
            policy: match data_plane.distribution.policy {
                Policy::RoundRobin => mux::Policy::RoundRobin,
                Policy::Weighted => mux::Policy::Weighted,
                Policy::Flow => mux::Policy::Flow,
            },
            flow: match &data_plane.distribution.flow {
                Flow::Known(KnownFlow::Ip) => mux::FlowKey::Ip,
                Flow::Fields(fields) => mux::FlowKey::Bytes(
                    fields
                        .iter()
                        .map(|field| mux::Field {
                            offset: field.offset,
                            mask: field.mask.0.clone(),
                        })
                        .collect(),
                ),
            },
            punt_filters: data_plane.punt.iter().map(punt_filter).collect(),
            punt_limits: [
                rate(data_plane.punt_limits.local),
                rate(data_plane.punt_limits.neighbour),
                rate(data_plane.punt_limits.exception),
            ],
        });
        mux::Node {
            name: self.name.into(),
            ports: ports.collect(),
            tap_socket: plan.directory.join("tap/trunk.sock"),
            router,
        }
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

/// Locally administered, unicast link address from names.
fn default_mac(vnet: &str, node: &str, interface: &str) -> [u8; 6] {
    let mut mac = [0; 6];
    // Names have no '/'.
    let digest = Sha256::digest(format!("{vnet}/{node}/{interface}"));
    mac.copy_from_slice(&digest[..6]);
    mac[0] = mac[0] & 0xfc | 0x02;
    mac
}

fn attach(program: &Program) -> Attach {
    match program {
        Program::BuiltIn(BuiltIn::Router) => Attach::Runtime,
        Program::Own(program) => program.attach,
    }
}

fn root(image: &Image) -> Root {
    match image.source() {
        ImageSource::Host => Root::Host,
        ImageSource::Rootfs(path) => Root::Rootfs(path.into()),
        ImageSource::OciLayout(path, reference) => {
            Root::OciLayout { path: path.into(), reference: reference.map(Into::into) }
        }
    }
}

fn owner(text: &str) -> Owned {
    let (user, group) = text.split_once(':').unwrap_or((text, text));
    match (user.parse(), group.parse()) {
        (Ok(uid), Ok(gid)) => Owned::Ids { uid, gid },
        _ if user == "root" && group == "root" => Owned::ROOT,
        _ => Owned::User(user.into()),
    }
}

fn rate(limit: Limit) -> mux::Rate {
    mux::Rate { bps: limit.rate.map_or(0, |rate| rate.0), pps: limit.pps.unwrap_or(0) }
}

fn punt_filter(filter: &pdp_spec::PuntFilter) -> mux::PuntFilter {
    mux::PuntFilter {
        matches: filter
            .matches
            .iter()
            .map(|bytes| mux::Match {
                offset: bytes.offset,
                value: bytes.value.0.clone(),
                mask: match &bytes.mask {
                    Some(mask) => mask.0.clone(),
                    None => vec![0xff; bytes.value.0.len()],
                },
            })
            .collect(),
        class: match filter.class {
            pdp_spec::PuntClass::Local => 0,
            pdp_spec::PuntClass::Neighbour => 1,
            pdp_spec::PuntClass::Exception => 2,
        },
    }
}

fn encapsulation(outside: &OutsideEnd) -> mux::Encapsulation {
    match (&outside.vxlan, &outside.udp) {
        (Some(vxlan), _) => mux::Encapsulation::Vxlan {
            local: vxlan.local,
            remote: vxlan.remote,
            port: vxlan.port,
            vni: vxlan.vni,
        },
        (None, Some(udp)) => mux::Encapsulation::Udp {
            local: udp.local,
            remote: udp.remote,
            local_port: udp.local_port,
            remote_port: udp.remote_port,
        },
        (None, None) => mux::Encapsulation::Interface,
    }
}

fn without_limits(guest: &GuestSpec) -> GuestSpec {
    GuestSpec { limits: Limits::default(), ..guest.clone() }
}

fn tap_words(taps: &[TapSpec]) -> Vec<String> {
    taps.iter().map(|tap| format!("{tap:?}")).collect()
}

/// Hexadecimal SHA-256 of the JSON of a value. Types of plans always have one.
fn hash(value: &impl Serialize) -> String {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
