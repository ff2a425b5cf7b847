//! Plans one node: its control side, its forwarding guests, and its
//! part of the mux's configuration.

mod management_paths;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use pdp_container::{
    BindMount, CommandRestart, GuestCommand, GuestFile, GuestSpec, HelperSpec, Limits, Profile,
    RootFilesystem, UserRange, VolumeMount,
};
use pdp_net::ports::PortSpec;
use pdp_net::tap::TapSpec;
use pdp_proto::{mirror, mux, routes, tap};
use pdp_spec::limits::POWER_MILLICORES_DEFAULT;
use pdp_spec::{
    BuiltIn, DataPlaneNeeds, Distribution, DistributionPolicy, FlowDefinition, GuestProgram,
    KernelHooks, KnownFlow, Node, NodeKind, Parallel, Plane, ProgramAttach, Punts, XdpBypass,
};

use super::commands::commands;
use super::convert::{bind, owner, punt_filter, rate, root, volume};
use super::kernel_links::{self, KernelLinkPort, KernelLinkTarget};
use super::kernel_tunnels;
use super::network::{self, SysctlPlan};
use super::{
    DaemonPaths, DirectoryPlan, GuestPlan, KernelPlan, LOG_BYTES_MAX, MUX_UID, MirrorPlan,
    NodePlan, PlanError, TapHelperPlan, VnetPlanner, check_socket, hash, hosts,
};
use crate::plan::allocations::{EnginePlacement, UIDS_PER_VNET, image_owner_of};
use crate::plan::key::{ObjectKey, ProcessRole};

/// User id of forwarding programs inside a guest.
const PROGRAM_UID: u32 = 1000;

/// Offset of the user id of a vnet's TAP helpers, above those that its guests map.
const HELPER_UID_OFFSET: u32 = UIDS_PER_VNET;

/// Open files of each process of a control guest or host.
const OPEN_FILES_MAX: u64 = 16_384;

/// Open files of each process of a forwarding guest, plus more for each vport.
/// Everything that waits for the mux's doorbells costs the mux time at each ring.
const FORWARDING_OPEN_FILES_MAX: u64 = 64;
const VPORT_OPEN_FILES_MAX: u64 = 8;

/// Route that a gateway stands for.
const DEFAULT_V4: IpNet = IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0));
const DEFAULT_V6: IpNet = IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0));

/// File in a guest's `quota` directory with the cores that it may use.
const QUOTA_FILE: &str = "cores";

/// Directory of what pdpd binds into a forwarding guest.
pub const GUEST_RUN: &str = "/run/pdp";

/// Socket at which the mux listens for programs of a control guest, in their common directory.
pub const SLOWPATH_SOCKET: &str = "control.sock";

pub(super) struct NodePlanner<'a> {
    pub(super) vnet: &'a VnetPlanner<'a>,
    pub(super) name: &'a str,
    pub(super) node: &'a Node,
    /// The node's data plane; `None` for a host.
    pub(super) plane: Option<&'a dyn Plane>,
}

impl NodePlanner<'_> {
    pub(super) fn plan(&self) -> Result<NodePlan, PlanError> {
        let directory = self.directory();
        let taps = self.taps(None);
        let kernel_links = self.kernel_links(&taps);
        let (commands, named) = commands(self.node);
        let mut control = self.control(commands);
        // Hash only what the spec requests, so that PdP's own additions restart nothing.
        let hash = self.control_hash(&control, &taps, &kernel_links);
        hosts::show(&self.vnet.places.hosts(self.vnet.name), &mut control);
        let passed = |path, gid| DirectoryPlan { path, gid, writable: false };
        let mut directories = vec![passed(directory.join("tap"), self.helper_uid())];
        let needs = self.plane.map(Plane::needs);
        let kernel = needs.and_then(|needs| self.kernel(needs));
        let tap_helper = (taps.len() > kernel_links.len()).then(|| {
            let sockets = directory.join("tap");
            let trunk = sockets.join("trunk.sock");
            let cgroup = kernel.as_ref().map_or_else(|| self.cgroup(), |it| it.cgroup.clone());
            let mut helper = self.tap_helper(&self.key(), &cgroup, &trunk, &sockets);
            helper.ports.retain(|port| !kernel_links.contains_key(&port.vport));
            helper
        });
        let slowpath = directory.join("slowpath");
        if needs.is_some() {
            // For all data planes, so that another kind restarts nothing.
            directories.push(passed(slowpath.clone(), self.vnet.uid));
            let target = Path::new(GUEST_RUN).join("slowpath");
            let source = slowpath.clone();
            control.binds.push(BindMount { source, target, writable: false, wished: false });
        }
        let mirror = needs.and_then(|needs| {
            let punts = needs.punts?;
            let reader = if needs.mux_routes { MUX_UID } else { self.vnet.uid + PROGRAM_UID };
            directories.push(passed(directory.join("routes"), reader));
            Some(self.mirror(punts.hooks))
        });
        let mux_millicores = needs.map_or(0, |needs| needs.mux_millicores);
        let ip = mirror.as_ref().filter(|_| needs.is_some_and(|needs| needs.mux_routes));
        let ip = ip.map(|it| mux::EngineCode::Ip { routes: it.config.routes_socket.clone() });
        let fields = needs.and_then(|needs| needs.fields);
        let code = ip.or_else(|| fields.map(|fields| mux::EngineCode::Fields(fields.of_mux())));
        let engine = code.map(|code| mux::EngineConfig {
            code,
            power: part_of_worker(&self.vnet.substrate.mux, mux_millicores),
            memory_bytes: self.node.engine_memory_bytes(),
            slowpath: needs.and_then(|needs| needs.slowpath).map(|(filters, counters)| {
                mux::SlowPathConfig { socket: slowpath.join(SLOWPATH_SOCKET), filters, counters }
            }),
        });
        let management = self.management();
        let mut guests = BTreeMap::new();
        if let Some(data_plane) = needs.and_then(|needs| needs.guests) {
            for (&number, placement) in
                self.vnet.allocation.guests.get(self.name).into_iter().flatten()
            {
                let guest = directory.join(format!("g{number}"));
                let attach = data_plane.attach();
                let program = self.vnet.uid + PROGRAM_UID;
                directories.push(DirectoryPlan {
                    path: guest.join("memif"),
                    gid: if attach == ProgramAttach::Tap { self.helper_uid() } else { program },
                    // DPDK's client refuses a socket in a directory that is not writable for it.
                    writable: attach == ProgramAttach::Memif,
                });
                if attach == ProgramAttach::Runtime {
                    directories.push(passed(guest.join("quota"), program));
                }
                let plan = self.guest(data_plane, number, placement);
                if plan.taps.is_some() {
                    directories.push(passed(guest.join("tap"), 0));
                }
                guests.insert(number, plan);
            }
        }
        let plan = NodePlan {
            kind: self.node.kind,
            hash,
            directory,
            control,
            commands: named,
            taps,
            kernel_links,
            sysctls: self.sysctls(),
            loopback: network::loopback(self.node),
            routes: network::routes(self.node),
            tap_helper,
            mirror,
            management,
            guests,
            kernel,
            engine,
            mux_millicores,
            directories,
        };
        for path in plan.sockets() {
            check_socket(path)?;
        }
        Ok(plan)
    }

    pub(super) fn directory(&self) -> PathBuf {
        self.vnet.places.node(self.vnet.name, self.name)
    }

    /// Returns the key of the node's control side.
    pub(super) fn key(&self) -> ObjectKey {
        ObjectKey::node(self.vnet.name, self.name)
    }

    pub(super) fn cgroup(&self) -> String {
        DaemonPaths::node_cgroup(self.vnet.name, self.name)
    }

    pub(super) fn helper_uid(&self) -> u32 {
        self.vnet.uid + HELPER_UID_OFFSET
    }

    fn users(&self) -> UserRange {
        UserRange { base: self.vnet.uid, length: UIDS_PER_VNET }
    }

    /// Returns all sysctls, PdP's own before the spec's. The node's hash
    /// includes the spec's alone, since PdP's own follow from names.
    fn sysctls(&self) -> SysctlPlan {
        let (vnet, given) = (self.vnet.name, &self.node.sysctls);
        let own = network::defaults(vnet, self.name, given, pdp_net::sysctl::exists);
        let mut sysctls = network::sysctls(self.node);
        sysctls.before.splice(0..0, own);
        sysctls
    }

    /// Returns the node's interfaces as TAPs. Those of a forwarding
    /// guest that uses TAPs have no addresses.
    fn taps(&self, owner: Option<u32>) -> Vec<TapSpec> {
        let control = owner.is_none();
        let mut taps = Vec::new();
        for (name, interface) in self.node.ports() {
            let routes = interface.gateways.iter().map(|&gateway| match gateway {
                IpAddr::V4(_) => (DEFAULT_V4, gateway),
                IpAddr::V6(_) => (DEFAULT_V6, gateway),
            });
            taps.push(TapSpec {
                name: name.into(),
                // The check of specs gives every interface one.
                mac: interface.mac.map_or([0; 6], |mac| mac.0),
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

    /// Returns the interfaces whose links stay in the kernel.
    fn kernel_links(&self, taps: &[TapSpec]) -> BTreeMap<u16, KernelLinkPort> {
        let ports = taps.iter().enumerate().filter_map(|(index, tap)| {
            let VnetPlanner { name, spec, allocation, kernel_tunnels: tunnels, .. } = self.vnet;
            let link = kernel_links::kernel_link_of(name, spec, allocation, self.name, &tap.name);
            let link = link.map(|(number, to, rate)| (number, KernelLinkTarget::Port(to), rate));
            let (number, to, rate) = link.or_else(|| {
                kernel_tunnels::tunnel_of(tunnels, allocation, (self.name, &tap.name))
            })?;
            let TapSpec { name, mac, mtu, addresses, routes, .. } = tap.clone();
            let spec = PortSpec { number, vrouter: number, name, mac, mtu, addresses, routes };
            Some((index as u16, KernelLinkPort { spec, to, rate }))
        });
        let mut ports: BTreeMap<u16, KernelLinkPort> = ports.collect();
        if let Some(vrouter) = ports.values().map(|port| port.spec.number).min() {
            ports.values_mut().for_each(|port| port.spec.vrouter = vrouter);
        }
        ports
    }

    fn control(&self, commands: Vec<GuestCommand>) -> GuestSpec {
        let resources = &self.node.resources;
        let management = self.vnet.substrate.management_host.as_ref();
        let router = self.node.kind == NodeKind::Router;
        GuestSpec {
            id: self.key().process_id(ProcessRole::Main),
            dir: self.vnet.places.record(&self.key(), ProcessRole::Main),
            cgroup: self.cgroup(),
            owner: image_owner_of(self.vnet.name).to_owned(),
            root: root(self.vnet.name, &self.node.image),
            profile: if router { Profile::Control } else { Profile::Host },
            privileged: self.node.privileged,
            packet_rings: pdp_spec::tenant_of(self.vnet.name).is_none(),
            users: self.users(),
            uid: 0,
            hostname: self.name.into(),
            files: files(&self.node.files, true).into_iter().chain(self.resolv_conf()).collect(),
            binds: self.binds(),
            volumes: self.volumes(),
            commands,
            env: self.node.env.clone(),
            sysctls: BTreeMap::new(),
            limits: Limits {
                cpu_cores: Some(f64::from(resources.cpu.0) / 1000.0),
                cpu_period_us: None,
                cpu_weight: Some(resources.cpu.0),
                memory_bytes: Some(self.node.control_memory_bytes()),
                processes: Some(self.node.control_processes()),
                cpus: management.and_then(|host| host.cpus.as_ref()).map(ToString::to_string),
                io_weight: None,
            },
            open_files_max: OPEN_FILES_MAX,
            log_bytes_max: LOG_BYTES_MAX,
        }
    }

    /// Returns the binds of the spec, outer ones first.
    fn binds(&self) -> Vec<BindMount> {
        let mut binds: Vec<BindMount> = self.node.binds.iter().filter_map(bind).collect();
        binds.sort_by(|a, b| a.target.cmp(&b.target));
        binds
    }

    /// Returns the volumes, by name. They outlive the container.
    fn volumes(&self) -> Vec<VolumeMount> {
        let mut volumes: Vec<VolumeMount> = self.node.volumes.iter().filter_map(volume).collect();
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        volumes
    }

    /// Plans the TAP helper of an object: of the control side or of a guest.
    fn tap_helper(
        &self,
        key: &ObjectKey,
        cgroup: &str,
        trunk: &Path,
        control_directory: &Path,
    ) -> TapHelperPlan {
        let control = control_directory.join("control.sock");
        let process = HelperSpec {
            id: key.process_id(ProcessRole::Tap),
            dir: self.vnet.places.record(key, ProcessRole::Tap),
            argv: vec![
                self.vnet.places.binary("pdp-tap"),
                "--trunk".into(),
                trunk.to_string_lossy().into_owned(),
                "--control".into(),
            ],
            env: BTreeMap::new(),
            cgroup: format!("{cgroup}/helpers"),
            uid: self.helper_uid(),
            keep_root: false,
            log_bytes_max: LOG_BYTES_MAX,
        };
        let ports = self.node.ports().into_iter().enumerate();
        let ports =
            ports.map(|(index, (name, _))| tap::TapPort { vport: index as u16, name: name.into() });
        TapHelperPlan { process, control, ports: ports.collect() }
    }

    fn mirror(&self, hooks: KernelHooks) -> MirrorPlan {
        let directory = self.directory();
        let config_file = directory.join("mirror.json");
        let process = HelperSpec {
            id: self.key().process_id(ProcessRole::Mirror),
            dir: self.vnet.places.record(&self.key(), ProcessRole::Mirror),
            argv: vec![
                self.vnet.places.binary("pdp-mirror"),
                "--config".into(),
                config_file.to_string_lossy().into_owned(),
            ],
            env: BTreeMap::new(),
            cgroup: format!("{}/helpers", self.cgroup()),
            uid: 0,
            keep_root: true,
            log_bytes_max: LOG_BYTES_MAX,
        };
        let config = mirror::MirrorConfig {
            netns: PathBuf::new(),
            userns: None,
            vports: self.node.ports().into_iter().map(|(name, _)| name.to_string()).collect(),
            routes_socket: directory.join("routes/routes.sock"),
            control_socket: directory.join("mirror.sock"),
            routes_max: u64::from(self.node.resources.routes),
            receive_bytes: self.node.notification_bytes(),
            hooks: match hooks {
                KernelHooks::Strict => mirror::HookPolicy::Strict,
                KernelHooks::Ignore => mirror::HookPolicy::Ignore,
            },
        };
        MirrorPlan { process, config_file, config }
    }

    fn kernel(&self, needs: DataPlaneNeeds<'_>) -> Option<KernelPlan> {
        let xdp_bypass = needs.kernel? == XdpBypass::Follow;
        let borrows = needs.engines?.borrows;
        let placement = self.vnet.allocation.guests.get(self.name)?.values().next()?.clone();
        let limits = self.power_limits(&placement, borrows);
        let cgroup = DaemonPaths::kernel_cgroup(self.vnet.name, self.name);
        Some(KernelPlan { cgroup, limits, placement, borrows, xdp_bypass })
    }

    /// Returns the CPU limits that follow from a share of an engine.
    fn power_limits(&self, placement: &EnginePlacement, borrows: bool) -> Limits {
        let engine = self.vnet.substrate.forwarding_engines.get(&placement.engine);
        Limits {
            cpu_cores: (!borrows).then_some(f64::from(placement.power_millicores) / 1000.0),
            cpu_period_us: None,
            // Relative to the control side of its own vnet.
            // VnetPlan::weight covers what other vnets leave.
            cpu_weight: Some(match placement.power_millicores {
                0 => POWER_MILLICORES_DEFAULT,
                power => power,
            }),
            cpus: engine.map(|engine| engine.cpus.to_string()),
            ..Limits::default()
        }
    }

    fn guest(&self, data_plane: &Parallel, number: u32, placement: &EnginePlacement) -> GuestPlan {
        let key = ObjectKey::guest(self.vnet.name, self.name, number);
        let directory = self.directory().join(format!("g{number}"));
        let cgroup = DaemonPaths::guest_cgroup(self.vnet.name, self.name, number);
        let limits = self.power_limits(placement, data_plane.borrows());
        let attach = data_plane.attach();
        let mut binds = vec![BindMount {
            source: self.directory().join("routes"),
            target: Path::new(GUEST_RUN).join("routes"),
            writable: false,
            wished: false,
        }];
        if attach != ProgramAttach::Tap {
            binds.push(BindMount {
                source: directory.join("memif"),
                target: Path::new(GUEST_RUN).join("memif"),
                writable: attach == ProgramAttach::Memif,
                wished: false,
            });
        }
        let (argv, image) = match &data_plane.program {
            GuestProgram::BuiltIn(BuiltIn::Router) => {
                let inside = format!("{GUEST_RUN}/pdp-router");
                binds.push(BindMount {
                    source: self.vnet.places.lib.join("pdp-router"),
                    target: inside.clone().into(),
                    writable: false,
                    wished: false,
                });
                (vec![inside], RootFilesystem::Host)
            }
            GuestProgram::Own(program) => {
                let ports = self.node.interfaces.len().to_string();
                let words = program.run.words().into_iter().map(|word| {
                    word.replace("{ports}", &ports)
                        .replace("{guest}", &number.to_string())
                        .replace("{cpus}", limits.cpus.as_deref().unwrap_or_default())
                });
                (words.collect(), root(self.vnet.name, &program.image))
            }
        };
        let mut env = BTreeMap::from([
            ("PDP_GUEST".into(), number.to_string()),
            ("PDP_PORTS".into(), self.node.interfaces.len().to_string()),
            ("PDP_MEMIF".into(), format!("{GUEST_RUN}/memif/memif.sock")),
            ("PDP_ROUTES".into(), format!("{GUEST_RUN}/routes/routes.sock")),
        ]);
        if attach == ProgramAttach::Runtime {
            env.insert("PDP_QUEUE".into(), data_plane.queue.to_string());
            env.insert("PDP_QUOTA".into(), format!("{GUEST_RUN}/quota/{QUOTA_FILE}"));
            binds.push(BindMount {
                source: directory.join("quota"),
                target: Path::new(GUEST_RUN).join("quota"),
                writable: false,
                wished: false,
            });
        }
        let container = GuestSpec {
            id: key.process_id(ProcessRole::Main),
            dir: self.vnet.places.record(&key, ProcessRole::Main),
            cgroup: cgroup.clone(),
            owner: image_owner_of(self.vnet.name).to_owned(),
            root: image,
            profile: Profile::Forwarding { tap: attach == ProgramAttach::Tap },
            privileged: false,
            packet_rings: false,
            users: self.users(),
            uid: PROGRAM_UID,
            hostname: format!("{}-g{number}", self.name),
            files: match &data_plane.program {
                GuestProgram::Own(program) => files(&program.files, false),
                GuestProgram::BuiltIn(_) => Vec::new(),
            },
            binds,
            volumes: Vec::new(),
            commands: vec![GuestCommand::new(argv, CommandRestart::Never)],
            env,
            sysctls: BTreeMap::new(),
            limits: Limits {
                memory_bytes: Some(data_plane.memory.0),
                processes: Some(u64::from(data_plane.processes)),
                ..limits
            },
            open_files_max: FORWARDING_OPEN_FILES_MAX
                + VPORT_OPEN_FILES_MAX * self.node.interfaces.len() as u64,
            log_bytes_max: LOG_BYTES_MAX,
        };
        let taps = (attach == ProgramAttach::Tap).then(|| {
            let taps = self.taps(Some(self.vnet.uid + PROGRAM_UID));
            let helper = self.tap_helper(
                &key,
                &cgroup,
                &directory.join("memif/memif.sock"),
                &directory.join("tap"),
            );
            (taps, helper)
        });
        let hash = hash(&(
            (pdp_wire::tag::VERSION, routes::VERSION, tap::VERSION),
            &without_limits(&container),
            taps.as_ref().map(|(taps, helper)| (tap_words(taps), helper.process.clone())),
        ));
        let mirrored = matches!(data_plane.program, GuestProgram::BuiltIn(BuiltIn::Router));
        let quota =
            (attach == ProgramAttach::Runtime).then(|| directory.join("quota").join(QUOTA_FILE));
        let (socket, placement) = (directory.join("memif/memif.sock"), placement.clone());
        GuestPlan { container, socket, hash, mirrored, placement, taps, quota }
    }

    /// Returns the hash of the control side. If it changes, the control
    /// guest, its TAPs and helpers are recreated.
    fn control_hash(
        &self,
        control: &GuestSpec,
        taps: &[TapSpec],
        kernel_links: &BTreeMap<u16, KernelLinkPort>,
    ) -> String {
        let versions = (pdp_wire::tag::VERSION, tap::VERSION, mirror::VERSION);
        let loopback = self.node.loopback.iter().map(|address| format!("lo {address}"));
        let sysctls = network::sysctls(self.node);
        // Like other properties of an interface: if it changes, the
        // routing software sees a new interface.
        let kernel_links = kernel_links.keys().map(|vport| format!("straight {vport}"));
        let network: Vec<String> = tap_words(taps)
            .into_iter()
            .chain(loopback)
            .chain(sysctls.words())
            .chain(kernel_links)
            .collect();
        hash(&(versions, without_limits(control), network, self.node.resources.routes))
    }

    pub(super) fn mux_node(&self, plan: &NodePlan) -> mux::NodeConfig {
        let ports = plan.taps.iter().map(|tap| mux::PortConfig {
            name: tap.name.clone(),
            mac: tap.mac,
            mtu: tap.mtu,
        });
        let router = self.plane.and_then(|plane| {
            let DataPlaneNeeds { guests, punts, .. } = plane.needs();
            let Punts { filters, limits, .. } = punts?;
            let attach = match guests.map(Parallel::attach) {
                Some(ProgramAttach::Memif) => mux::AttachMode::Memif,
                Some(ProgramAttach::Tap) => mux::AttachMode::Tap,
                Some(ProgramAttach::Runtime) | None => mux::AttachMode::Runtime,
            };
            let guest = |(&number, guest): (&u32, &GuestPlan)| mux::GuestConfig {
                number,
                socket: guest.socket.clone(),
                attach,
                // Guests that borrow are equal. The mux gives the vnet at least its minimum weight.
                weight: guest.placement.power_millicores.max(1),
                leaving: false,
            };
            let none = Distribution::default();
            let distribution = guests.map_or(&none, |guests| &guests.distribution);
            Some(mux::RouterConfig {
                guests: plan.guests.iter().map(guest).collect(),
                policy: match distribution.policy {
                    DistributionPolicy::RoundRobin => mux::GuestDistribution::RoundRobin,
                    DistributionPolicy::Weighted => mux::GuestDistribution::Weighted,
                    DistributionPolicy::Flow => mux::GuestDistribution::Flow,
                    DistributionPolicy::Flowlet => mux::GuestDistribution::Flowlet,
                    DistributionPolicy::Ordered => mux::GuestDistribution::Ordered,
                },
                flow: match &distribution.flow {
                    FlowDefinition::Known(KnownFlow::Ip) => mux::FlowKey::Ip,
                    FlowDefinition::Fields(fields) => mux::FlowKey::Bytes(
                        fields
                            .iter()
                            .map(|field| mux::MaskedField {
                                offset: field.offset,
                                mask: field.mask.0.clone(),
                            })
                            .collect(),
                    ),
                },
                punt_filters: filters.iter().map(punt_filter).collect(),
                punt_limits: [
                    rate(limits.local),
                    rate(limits.neighbour),
                    rate(limits.exception),
                    rate(limits.hook),
                    rate(limits.control),
                ],
                engine: plan.engine.clone(),
            })
        });
        mux::NodeConfig {
            name: self.name.into(),
            ports: ports.collect(),
            tap_socket: plan.directory.join("tap/trunk.sock"),
            router,
        }
    }
}

/// Converts thousandths of a core into a share of a worker's time, in units of
/// [`mux::POWER_WHOLE`]. The share is larger if the mux has less than a core per worker.
fn part_of_worker(mux: &pdp_spec::Mux, millicores: u32) -> u32 {
    let of_worker = u64::from(mux.power().0 / mux.workers.max(1)).max(1);
    let part = u64::from(millicores) * u64::from(mux::POWER_WHOLE) / of_worker;
    u32::try_from(part).unwrap_or(u32::MAX).min(mux::POWER_WHOLE)
}

fn files(files: &BTreeMap<String, pdp_spec::File>, writable: bool) -> Vec<GuestFile> {
    let file = |(path, file): (&String, &pdp_spec::File)| GuestFile {
        path: path.into(),
        content: file.content.clone().unwrap_or_default(),
        // The check of specs validates the digits.
        mode: u32::from_str_radix(&file.mode, 8).unwrap_or(0o644),
        owner: owner(&file.owner),
        writable,
    };
    files.iter().map(file).collect()
}

fn without_limits(guest: &GuestSpec) -> GuestSpec {
    GuestSpec { limits: Limits::default(), ..guest.clone() }
}

fn tap_words(taps: &[TapSpec]) -> Vec<String> {
    taps.iter().map(|tap| format!("{tap:?}")).collect()
}
