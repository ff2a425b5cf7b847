//! The objects of a spec, as they are written, stored as JSON, and read back.
//!
//! Doc comments of fields are the descriptions in the JSON Schema and in docs/spec.md. Fields that
//! are `None` after [`crate::check`] are those whose comment says so; all other defaults are
//! filled in by it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use pdp_proto::mux;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bind::Bind;
use crate::command::{ExecCommand, NodeCommand};
use crate::limits::*;
use crate::link::Link;
use crate::management::{Management, ManagementGrant};
use crate::route::StaticRoute;
use crate::sysctl::SysctlValue;
use crate::tunnel::{External, Grant};
use crate::units::{Address, Base64, BitRate, Bytes, Cores, CpuSet, Hex, Mac};
use crate::volume::Volume;

/// One document of a spec.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind")]
#[allow(clippy::large_enum_variant, reason = "there are few, and each is taken apart at once")]
pub enum Object {
    /// The machine that is shared. One a node of PdP.
    Substrate(Substrate),
    /// One virtual network.
    VirtualNetwork(VirtualNetwork),
    /// Somebody who has virtual networks of their own.
    Tenant(Tenant),
}

impl Object {
    /// `Substrate`, `VirtualNetwork` or `Tenant`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Substrate(_) => "Substrate",
            Self::VirtualNetwork(_) => "VirtualNetwork",
            Self::Tenant(_) => "Tenant",
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Substrate(substrate) => &substrate.metadata.name,
            Self::VirtualNetwork(vnet) => &vnet.metadata.name,
            Self::Tenant(tenant) => &tenant.metadata.name,
        }
    }
}

/// Version of the format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    /// The first.
    #[default]
    #[serde(rename = "pdp/v1")]
    V1,
}

/// What an object is called.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Name, unique among objects of the kind: lower-case letters, digits and `-`, at most 63. A
    /// tenant's virtual networks are called `TENANT.NAME`, at most 63 in all.
    #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
    pub name: String,
    /// Anything that helps to find the object again; PdP makes nothing of it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// The machine that is shared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Substrate {
    /// Version of the format: `pdp/v1`.
    pub api_version: ApiVersion,
    /// What the object is called.
    pub metadata: Metadata,
    /// What is wanted.
    pub spec: SubstrateSpec,
    /// What was allocated, what runs and what went wrong. Written by the daemon; ignored when
    /// applied, so that what was read back can be applied again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_json::Map<String, serde_json::Value>>,
}

impl Substrate {
    /// What holds while none was applied: the mux on the first CPU, and one forwarding engine with all
    /// of the others; half and half where there is one CPU only. No external interfaces.
    pub fn of_machine(cpus: &BTreeSet<u32>) -> Self {
        let first: BTreeSet<u32> = cpus.iter().take(1).copied().collect();
        let rest: BTreeSet<u32> = cpus.iter().skip(1).copied().collect();
        let (power, engine_cpus, capacity) = match rest.len() as u32 {
            0 => (500, first.clone(), 500),
            count => (1000, rest, count * 1000),
        };
        let engine = ForwardingEngine { cpus: CpuSet(engine_cpus), capacity: Cores(capacity) };
        Self {
            api_version: ApiVersion::V1,
            metadata: Metadata { name: "default".into(), ..Metadata::default() },
            spec: SubstrateSpec {
                interfaces: BTreeMap::new(),
                mux: Mux { cpus: CpuSet(first), workers: 1, power: Some(Cores(power)) },
                forwarding_engines: BTreeMap::from([("fe1".to_owned(), engine)]),
                management_host: None,
            },
            status: None,
        }
    }
}

/// What a substrate is to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SubstrateSpec {
    /// External interfaces of the machine, by the name that virtual networks use.
    #[serde(default)]
    pub interfaces: BTreeMap<String, ExternalInterface>,
    /// The mux, which moves all packets. Not given, without `forwardingEngines`: both as in the default Substrate.
    #[serde(default, skip_serializing_if = "Mux::is_missing")]
    pub mux: Mux,
    /// Pools of processing power for forwarding guests, by name.
    #[serde(default)]
    pub forwarding_engines: BTreeMap<String, ForwardingEngine>,
    /// Where control guests and hosts run. Not given: on all CPUs, with no bound in common.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management_host: Option<ManagementHost>,
}

impl SubstrateSpec {
    /// True if it leaves mux and engines to what the machine has.
    pub fn is_of_machine(&self) -> bool {
        self.mux.is_missing() && self.forwarding_engines.is_empty()
    }
}

/// An external interface: exactly one of `device`, `memif` and `generator`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExternalInterface {
    /// Name of a network device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = INTERFACE_CHARS_MAX))]
    pub device: Option<String>,
    /// How frames of the device are had. Not given: `af-xdp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<DeviceAttach>,
    /// A program that speaks memif, for one external that is the whole interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memif: Option<MemifInterface>,
    /// A source and sink of frames inside the mux, for measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generator: Option<Generator>,
    /// What links over it send in all, with all headers and the 24 bytes that Ethernet takes for each frame beyond
    /// it (preamble, checksum, gap): they share it by their `guarantee` and `weight`. Not given: they do not wait for
    /// each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<BitRate>,
}

/// An [`ExternalInterface`] as one of its three forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlet<'a> {
    /// A network device.
    Device(&'a str, DeviceAttach),
    /// A program that speaks memif.
    Memif(&'a MemifInterface),
    /// A source and sink inside the mux.
    Generator(&'a Generator),
}

impl ExternalInterface {
    /// Which form it has; `None` where none is given, which [`crate::check`] refuses.
    pub fn outlet(&self) -> Option<Outlet<'_>> {
        match (&self.device, &self.memif, &self.generator) {
            (Some(device), ..) => Some(Outlet::Device(device, self.attach.unwrap_or_default())),
            (None, Some(memif), _) => Some(Outlet::Memif(memif)),
            (None, None, Some(generator)) => Some(Outlet::Generator(generator)),
            (None, None, None) => None,
        }
    }
}

/// How frames of a device are had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceAttach {
    /// By AF_XDP: what is PdP's is taken before the kernel sees it. Either way, checksums that a sender leaves
    /// to its device are completed, and long frames cut (docs/outside.md).
    #[default]
    AfXdp,
    /// By AF_XDP, with the mux polling the device's queues instead of interrupts (docs/outside.md): for
    /// hardware whose driver can do it, when the mux has a CPU of its own.
    AfXdpBusyPoll,
    /// By packet sockets, for drivers on which AF_XDP can't be had: what is PdP's is taken after the
    /// kernel made a packet of it. Where the whole interface is PdP's, receive aggregation (GRO) is turned off on it.
    Packet,
}

/// A program that speaks memif. It connects as client to
/// `RUN/externals/NAME/memif.sock` (RUN: the daemon's run directory), interface 0, one ring each
/// way, Ethernet mode, no secret; `pdp inspect substrate` shows the path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MemifInterface {
    /// Largest IP packet, bytes.
    #[schemars(range(min = MTU_MIN, max = MTU_MAX))]
    pub mtu: u32,
    /// Group of the machine, by name or number, whose programs may connect beside root's. Not
    /// given: root's alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
    pub group: Option<String>,
}

impl Default for MemifInterface {
    fn default() -> Self {
        Self { mtu: MTU_DEFAULT, group: None }
    }
}

/// A source and sink of frames inside the mux: frames enter before classification, and no CPU but
/// the mux's is needed. Without frames: a sink alone. Externals may be tunnels over it, to any
/// addresses; link addresses of tunnels' frames are not looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Generator {
    /// Path of a file in pcap format with the frames to send, again and again in this order,
    /// relative to the spec's own and below its directory, unless `pdp` is told
    /// `--allow-files-outside`. Replaced by its `pcap` when applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames: Option<String>,
    /// The file itself in base64, at most 10 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcap: Option<Base64>,
    /// Frames a second. Not given: as many as are taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = RATE_PPS_MAX))]
    pub pps: Option<u64>,
    /// Frames in all; a change of it starts anew. Not given: no end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub count: Option<u64>,
    /// Bytes from the start of each frame where a number is written that counts the frames, and
    /// where it is looked for in frames that come: `PdP#`, then eight bytes little-endian. Checksums
    /// over these twelve bytes are not corrected. Not given: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MTU_MAX))]
    pub number_at: Option<u16>,
}

/// The mux.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mux {
    /// CPUs that it runs on.
    pub cpus: CpuSet,
    /// Worker threads.
    #[serde(default = "one_worker")]
    #[schemars(range(min = 1, max = WORKERS_MAX))]
    pub workers: u32,
    /// Processing power kept for it on its CPUs: what engines on the same CPUs can't have. Fast paths can be
    /// guaranteed half of it. Not given: one core a worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
}

impl Default for Mux {
    /// One that is not given.
    fn default() -> Self {
        Self { cpus: CpuSet(BTreeSet::new()), workers: one_worker(), power: None }
    }
}

impl Mux {
    /// True if it is not given: one that is has CPUs.
    fn is_missing(&self) -> bool {
        self.cpus.0.is_empty()
    }

    /// The processing power kept for it.
    pub fn power(&self) -> Cores {
        self.power.unwrap_or(Cores(self.workers * 1000))
    }

    /// What all fast paths together can be guaranteed of that, and those of one virtual network, which one worker
    /// forwards for.
    pub fn fastpath_power(&self) -> (Cores, Cores) {
        let all = self.power().0 / FASTPATH_POWER_PART;
        (Cores(all), Cores(all / self.workers.max(1)))
    }

    /// How many packets queues of all virtual networks can have set aside: as many as there are wherever these are.
    pub fn buffers(&self) -> u64 {
        u64::from(POOL_PACKETS / self.workers.max(1) / BUFFERS_PART)
    }
}

fn one_worker() -> u32 {
    1
}

/// A forwarding engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ForwardingEngine {
    /// CPUs that its guests run on.
    pub cpus: CpuSet,
    /// Processing power that it has, at most what its CPUs leave beside the mux and other engines.
    pub capacity: Cores,
}

/// Where control guests and hosts run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ManagementHost {
    /// CPUs that they run on. Not given: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuSet>,
    /// Memory limits of all guests may add up to this. Not given: they are not added up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
}

/// Somebody who has virtual networks of their own, called `TENANT.NAME`, and what these may take of
/// the node. Applied, changed and deleted by operators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tenant {
    /// Version of the format: `pdp/v1`.
    pub api_version: ApiVersion,
    /// What the object is called.
    pub metadata: Metadata,
    /// What it may do.
    #[serde(default)]
    pub spec: TenantSpec,
    /// Ignored when applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_json::Map<String, serde_json::Value>>,
}

/// What a tenant may do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TenantSpec {
    /// Users of the machine that are this tenant on the daemon's Unix socket: names, or user ids as
    /// text. A user is of one tenant.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unix_users: Vec<String>,
    /// What all its virtual networks together may have.
    pub quota: Quota,
    /// External interfaces of the substrate that its virtual networks may use, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub interfaces: BTreeMap<String, Grant>,
    /// Directories of the machine below which its `rootfs` and `ociLayout` may be, as absolute
    /// paths; its `archive` too. Only operators should be able to write there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
    /// Directories of the machine from which its nodes may have `binds`, with what is below, as absolute
    /// paths: `/srv/acme`, or `/srv/acme:rw` where they may write; what they write there is bounded by its file
    /// system alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub binds: Vec<String>,
    /// What its nodes may have of the machine's network. Not given: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub management: Option<ManagementGrant>,
    /// What it may pull: registries, or parts of them, like `registry.example` or `docker.io/frrouting`. Not given:
    /// nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub registries: Vec<String>,
    /// Whether what it pulls is asked for with the daemon's credentials (`pdpd --registry-auth`).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub registry_auth: bool,
}

/// What the virtual networks of a tenant together may have. What is not given has a bound too, but for
/// `rate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Quota {
    /// Virtual networks. Not given: 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vnets: Option<u32>,
    /// Routers and hosts. Not given: 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u32>,
    /// Power of all forwarding guests as it is given out, a guest's rounded up to 0.001, and of all fast paths. Not
    /// given: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// `resources.cpu` of all routers and hosts. Not given: 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cores>,
    /// Memory limits of all guests with their helpers, and what the kernel keeps for them. A node has
    /// 64 MiB more than its `resources.memory`; a router 512 bytes more for each route, and from 2 to
    /// 128 MiB for notifications of routes, 128 bytes for each. Not given: 8Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// Limits of processes and threads of all guests, 32 a node more for its helpers. Not given: 16384.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
    /// Interfaces of all routers and hosts. Not given: 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vports: Option<u32>,
    /// Rates of all links, each of which needs one then. Not given: no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<BitRate>,
    /// `resources.routes` of all routers. Not given: 4000000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routes: Option<u32>,
    /// Bytes of the specs themselves, with their files, as JSON. Not given: 64Mi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub specs: Option<Bytes>,
    /// Bytes of the logs of all processes when they are full: 8 MiB for each guest, each TAP helper and
    /// each route mirror. Not given: 4Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logs: Option<Bytes>,
    /// Bytes of the volumes of all routers and hosts, which are kept on disk. Not given: 1Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Bytes>,
    /// Different images of OCI layouts, archives and registries, each of which is unpacked once and has 16 GiB at
    /// most. Not given: 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci_images: Option<u32>,
    /// Bytes of the images that the daemon keeps for it, of archives and registries, as they came and unpacked, in
    /// blocks of 4 KiB and one more for each file and directory; also of those that nothing uses (`pdp images prune`). Not given: 4Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<Bytes>,
    /// Files and directories of these images, unpacked. Not given: 200000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_files: Option<u32>,
    /// Descriptors that the daemon holds: one for each interface and each process. Not given: 1024.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub descriptors: Option<u32>,
    /// Regions of memory that the mux may have to map: one for each node with interfaces and each
    /// forwarding guest on the runtime or on TAPs, 16 for each interface of each on memif. Not given:
    /// 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions: Option<u32>,
    /// Packets of the mux that queues of links have set aside (`buffers`). Not given: 2048.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buffers: Option<u32>,
    /// Sessions at a time: captures, logs, route tables, commands. Not given: 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u32>,
    /// Rows of the audit log that are kept, of each of three sorts: changes, what was asked, what was
    /// refused. Not given: 10000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<u32>,
}

/// One virtual network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VirtualNetwork {
    /// Version of the format: `pdp/v1`.
    pub api_version: ApiVersion,
    /// What the object is called.
    pub metadata: Metadata,
    /// What is wanted.
    pub spec: VirtualNetworkSpec,
    /// What was allocated, what runs and what went wrong. Written by the daemon; ignored when
    /// applied, so that what was read back can be applied again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_json::Map<String, serde_json::Value>>,
}

/// What a virtual network is to be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VirtualNetworkSpec {
    /// Limit on what may arrive for the whole virtual network, from outside and on links inside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub police: Option<Limit>,
    /// Routers and hosts, by name.
    pub nodes: BTreeMap<String, Node>,
    /// Ends outside, by name; a link's endpoint names one as `external:NAME`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub externals: BTreeMap<String, External>,
    /// Links.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
}

/// A limit on a stream of frames. At least one of the two is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limit {
    /// Bits a second of the frames. Not given: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<BitRate>,
    /// Frames a second. Not given: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = RATE_PPS_MAX))]
    pub pps: Option<u64>,
}

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NodeKind {
    /// Forwards packets: a control guest and one or more forwarding guests.
    Router,
    /// A container with an ordinary IP stack.
    Host,
}

/// A router or a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    /// What it is.
    pub kind: NodeKind,
    /// What `-l` of `pdp` selects nodes by, as in Kubernetes: at most 64, keys `NAME` or `DOMAIN/NAME`, names and
    /// values of at most 63 letters, digits, `-`, `_` and `.`. A change of them restarts nothing.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Root file system. Not given: made of the machine's own programs.
    #[serde(default)]
    pub image: Image,
    /// Interfaces, by name.
    #[serde(default)]
    pub interfaces: BTreeMap<String, Interface>,
    /// Addresses of the node itself, on `lo`: `1.1.1.1/32`, `2001:db8::1/128`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loopback: Vec<Address>,
    /// Static routes, which the kernel has before the commands start. A change of them restarts nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<StaticRoute>,
    /// Kernel settings (sysctl) of the node's network, by name: `net.ipv4.tcp_ecn: 1`, or for one of its
    /// interfaces `net.ipv4.conf.eth0.rp_filter: 2`. docs/sysctls.md has those that can be set.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, SysctlValue>,
    /// Files to put in before the commands start, by absolute path: below `/etc`, `/root`, `/run`, `/tmp`
    /// or `/var`; with an image below `/etc`, `/root`, `/run`, `/tmp`, `/var/log` or `/var/tmp`. Forwarding
    /// guests do not have them, but those of `dataPlane.program.files`. A change restarts this node's container and no other; a router's
    /// forwarding guests stay.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, File>,
    /// Files and directories of the machine to show in it: `SOURCE:TARGET` or `SOURCE:TARGET:ro` as docker has it,
    /// or a mapping. No part of SOURCE may be a symbolic link, and what is mounted below it is not shown. Owners
    /// on the machine are not those in the node, where they are `nobody`: it reads what everybody may read, and
    /// writes where everybody may write. Tenants need a grant. A change restarts this node's container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub binds: Vec<Bind>,
    /// Directories whose contents stay when its container starts anew (a restart, a crash, a changed spec, a reboot):
    /// `NAME:TARGET`, as Compose has it, or a mapping with a `size`. One that is new is empty, with the owner and mode of what
    /// the node has at TARGET. It is the node's alone, on the daemon's disk, and gone with the node, with its network
    /// (`pdp delete`, `pdp down --purge`; not `pdp down`), and when the spec no longer has it. `files` are
    /// put into it at each start. A change restarts this node's container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// Programs to start, and to start again when they end; in order, each without waiting for
    /// the one before, unless it says that it comes `after` another. Not given, with an image of an archive or a
    /// registry: the image's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<NodeCommand>,
    /// Commands to run once, one after the other, when the interfaces are there and all `commands` are ready.
    /// One that does not end with code 0 makes the node `degraded`, and those after it are not run, unless it says
    /// `mayFail: true`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exec: Vec<ExecCommand>,
    /// What is started again when a command ends.
    #[serde(default)]
    pub restart: Restart,
    /// Environment variables of the commands.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Lets the host or control guest mount, and make namespaces of its own (`ip netns`, FRR's VRFs
    /// by namespace) and the kernel's IPsec, within its own user namespace. Not for tenants.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub privileged: bool,
    /// A way out of the node and into it beside its interfaces: `{}`, or with `ports`. Not given: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management: Option<Management>,
    /// Limits of the host or control guest.
    #[serde(default)]
    pub resources: Resources,
    /// How packets are processed; routers only. Not given: the built-in router, which uses what
    /// others leave of the CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_plane: Option<DataPlane>,
}

impl Node {
    /// Interfaces in the order of their vport indices: by name, numbers in names by value.
    pub fn ports(&self) -> Vec<(&str, &Interface)> {
        let mut ports: Vec<_> = self.interfaces.iter().map(|(n, i)| (n.as_str(), i)).collect();
        ports.sort_by_cached_key(|(name, _)| {
            let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
            let number = name[stem.len()..].parse::<u64>().ok();
            (stem.to_owned(), number, (*name).to_owned())
        });
        ports
    }

    /// How its packets are processed; `None` for a host.
    pub fn plane(&self) -> Option<DataPlane> {
        match self.kind {
            NodeKind::Router => Some(self.data_plane.clone().unwrap_or_default()),
            NodeKind::Host => None,
        }
    }

    /// What it takes of forwarding engines, if anything.
    pub fn of_engines(&self) -> Option<OfEngines> {
        self.plane()?.needs().engines
    }

    /// Its forwarding guests, if its packets are processed by such.
    pub fn guests(&self) -> Option<Parallel> {
        match self.plane()? {
            DataPlane::Parallel(plane) => Some(plane),
            DataPlane::Fastpath(_) | DataPlane::Kernel(_) => None,
        }
    }

    /// The program of its own that its forwarding guests run, if they do.
    pub fn program(&self) -> Option<&OwnProgram> {
        self.data_plane.as_ref()?.parallel()?.program.own()
    }

    /// Its image, and that of its forwarding guests' program.
    pub fn images(&self) -> impl Iterator<Item = &Image> {
        let program = self.program().map(|program| &program.image);
        [Some(&self.image), program].into_iter().flatten()
    }

    /// The same, to be changed.
    pub fn images_mut(&mut self) -> impl Iterator<Item = &mut Image> {
        let plane = self.data_plane.as_mut().and_then(DataPlane::parallel_mut);
        let program = plane.and_then(|plane| plane.program.own_mut());
        let program = program.map(|program| &mut program.image);
        [Some(&mut self.image), program].into_iter().flatten()
    }

    /// Index of the vport with this name.
    pub fn port_index(&self, interface: &str) -> Option<u16> {
        let index = self.ports().iter().position(|(name, _)| *name == interface)?;
        u16::try_from(index).ok()
    }
}

/// A root file system: the name of an image in a registry, as docker writes it
/// (`registry.example/frr:10`), or where else it comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Image {
    /// The same as `pull`.
    Reference(String),
    /// Where it comes from.
    Form(ImageForm),
}

impl Default for Image {
    fn default() -> Self {
        Self::Form(ImageForm::default())
    }
}

/// Where a root file system comes from: exactly one of `host`, `rootfs`, `ociLayout`, `archive` and `pull`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageForm {
    /// `true`: the machine's own programs (`/usr`, read-only) with an `/etc` of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<bool>,
    /// Absolute path of a directory that is the root, read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<String>,
    /// Absolute path of an OCI image layout. Of the image its files alone are used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oci_layout: Option<String>,
    /// Absolute path of an archive that `docker save` or `podman save` wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive: Option<String>,
    /// An image in a registry, as docker writes it: `frrouting/frr:10`, `registry.example:5000/lab/frr@sha256:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// Which image of a layout, by its `org.opencontainers.image.ref.name`, or of an archive, by its tag. Not
    /// given: the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Digest of the manifest of an archive's or a pulled image. Not given: what it is when applied; the stored spec
    /// has it, so that the node starts from the same image again. Given: that image and no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// An [`Image`] as one of its forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageSource<'a> {
    /// The machine's own programs.
    Host,
    /// A directory.
    Rootfs(&'a str),
    /// An OCI image layout, and which image of it.
    OciLayout(&'a str, Option<&'a str>),
    /// An archive, and which image of it; and the digest where that is known.
    Archive(&'a str, Option<&'a str>, Option<&'a str>),
    /// An image of a registry by its name, and the digest where that is known.
    Pull(&'a str, Option<&'a str>),
}

impl ImageSource<'_> {
    /// The digest of an image that the daemon keeps; empty where it is to be found out when it is applied.
    pub fn kept(&self) -> Option<&str> {
        match *self {
            Self::Host | Self::Rootfs(_) | Self::OciLayout(..) => None,
            Self::Archive(_, _, digest) | Self::Pull(_, digest) => Some(digest.unwrap_or_default()),
        }
    }
}

impl Image {
    /// Which form it has; the machine's own where none is given.
    pub fn source(&self) -> ImageSource<'_> {
        let form = match self {
            Self::Reference(name) => return ImageSource::Pull(name, None),
            Self::Form(form) => form,
        };
        let (reference, digest) = (form.reference.as_deref(), form.digest.as_deref());
        match (&form.rootfs, &form.oci_layout, &form.archive, &form.pull) {
            (Some(path), ..) => ImageSource::Rootfs(path),
            (None, Some(path), ..) => ImageSource::OciLayout(path, reference),
            (None, None, Some(path), _) => ImageSource::Archive(path, reference, digest),
            (None, None, None, Some(name)) => ImageSource::Pull(name, digest),
            (None, None, None, None) => ImageSource::Host,
        }
    }

    /// Has the daemon's image of this digest, where it is one from an archive or a registry.
    pub fn pin(&mut self, digest: String) {
        if let Self::Reference(name) = self {
            *self = Self::Form(ImageForm { pull: Some(name.clone()), ..ImageForm::default() });
        }
        if let Self::Form(form) = self {
            form.digest = Some(digest);
        }
    }
}

/// An interface of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Interface {
    /// Link address. Not given: one that follows from the names of virtual network, node and
    /// interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Largest IP packet, bytes, at most 1700 and at most what the link's tunnel carries. Not
    /// given: 1500, or less where the tunnel carries less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = MTU_MIN))]
    pub mtu: Option<u32>,
    /// Addresses; routing software may set others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Address>,
    /// Default gateways, at most one of IPv4 and one of IPv6, in a subnet of `addresses`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<IpAddr>,
    /// `true`: other interfaces of its link that say so too may have its `mac` and its addresses, as those of an anycast
    /// gateway do. On a segment frames for such a MAC address go to the end that it was heard at last.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub anycast: bool,
}

/// A file to put into a node: exactly one of `content` and `from`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct File {
    /// The text itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Path of a text file, relative to the spec's own and below its directory, unless `pdp` is told
    /// `--allow-files-outside`. Replaced by its `content` when applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Permissions, octal digits in quotes.
    #[serde(default = "file_mode")]
    #[schemars(length(min = 3, max = 4), regex(pattern = "^[0-7]{3,4}$"))]
    pub mode: String,
    /// Owner inside the node, `USER` or `USER:GROUP` by name or number; not given a group: the
    /// user's own.
    #[serde(default = "file_owner")]
    pub owner: String,
}

fn file_mode() -> String {
    "0644".into()
}

fn file_owner() -> String {
    "root:root".into()
}

/// A command: a list of words, or a text that is split as a shell does, without its expansions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Command {
    /// The words.
    Words(Vec<String>),
    /// To be split.
    Line(String),
}

impl Command {
    /// The words; empty where quotes do not close, which [`crate::check`] refuses.
    pub fn words(&self) -> Vec<String> {
        match self {
            Self::Words(words) => words.clone(),
            Self::Line(line) => shlex::split(line).unwrap_or_default(),
        }
    }
}

/// What is started again when a command ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// It alone.
    #[default]
    Each,
    /// It and all after it, which are killed, whether they need it or not. For programs that do not re-announce their
    /// state to a restarted peer: FRR's daemons do not give their routes to a new zebra, which therefore comes before
    /// them.
    Following,
}

/// Limits of a host or control guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Resources {
    /// CPU quota.
    pub cpu: Cores,
    /// Memory limit, with the kernel's memory for its routes.
    pub memory: Bytes,
    /// Processes and threads.
    #[schemars(range(min = 8, max = PROCESSES_MAX))]
    pub processes: u32,
    /// Routes that the route mirror follows; more are not mirrored, and a condition says so.
    #[schemars(range(min = 1, max = ROUTES_MAX))]
    pub routes: u32,
}

impl Default for Resources {
    fn default() -> Self {
        Self { cpu: Cores(500), memory: Bytes(256 << 20), processes: 256, routes: 100_000 }
    }
}

/// How a router's packets are processed, by its `kind`. Not given: `parallel`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant, reason = "one a router, beside much more")]
pub enum DataPlane {
    /// By forwarding guests.
    Parallel(Parallel),
    /// By the mux itself.
    Fastpath(Fastpath),
    /// By the control guest's own kernel.
    Kernel(Kernel),
}

impl Default for DataPlane {
    fn default() -> Self {
        Self::Parallel(Parallel::default())
    }
}

/// What a data plane needs beside its control guest and its ports: all that differs between the kinds for whoever
/// plans, counts and gives out.
#[derive(Clone, Copy, Debug)]
pub struct Needs<'a> {
    /// Forwarding guests.
    pub guests: Option<&'a Parallel>,
    /// What is taken of forwarding engines for it, if anything is.
    pub engines: Option<OfEngines>,
    /// Whether the mux itself follows the control guest's routes.
    pub mux_routes: bool,
    /// Filters and counters that programs of the control guest may have the mux use, if they may have any.
    pub slowpath: Option<(u32, u32)>,
    /// How the mux looks at and changes frames, where it does not forward by routes.
    pub fields: Option<&'a Fields>,
    /// What it is guaranteed of the mux's power, thousandths of a core; 0: nothing.
    pub mux_millicores: u32,
    /// What goes to the control guest, and a route mirror for all the rest. `None`: there is no rest, since the
    /// control guest's kernel forwards.
    pub punts: Option<Punts<'a>>,
}

/// Processing power of forwarding engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfEngines {
    /// What is guaranteed in all; `None`: nothing, and what others leave is used.
    pub power: Option<Cores>,
    /// Whether what others leave may be used beside it.
    pub borrows: bool,
    /// How many shares it is in; `None`: as few as engines allow.
    pub shares: Option<u32>,
    /// Whether what is left beside whole engines may be spread over several.
    pub split: bool,
}

/// What of a vrouter's frames goes to its control guest, where something else forwards.
#[derive(Clone, Copy, Debug)]
pub struct Punts<'a> {
    /// Frames that do without being looked at further.
    pub filters: &'a [PuntFilter],
    /// Limits.
    pub limits: &'a PuntLimits,
    /// What becomes of packets that the kernel's hooks may treat otherwise.
    pub hooks: KernelHooks,
}

impl DataPlane {
    /// What it needs.
    pub fn needs(&self) -> Needs<'_> {
        match self {
            Self::Parallel(plane) => Needs {
                guests: Some(plane),
                engines: Some(OfEngines {
                    power: plane.power,
                    borrows: plane.borrows(),
                    shares: plane.guests,
                    split: plane.split,
                }),
                mux_routes: false,
                slowpath: None,
                fields: None,
                mux_millicores: 0,
                punts: Some(Punts {
                    filters: &plane.punt,
                    limits: &plane.punt_limits,
                    hooks: plane.kernel_hooks,
                }),
            },
            Self::Fastpath(plane) => Needs {
                guests: None,
                engines: None,
                mux_routes: plane.code == Code::Ip,
                slowpath: Some((plane.filters, plane.counters)).filter(|it| *it != (0, 0)),
                fields: plane.fields.as_ref().filter(|_| plane.code == Code::Fields),
                mux_millicores: plane.power.map_or(0, |power| power.0),
                punts: Some(Punts {
                    filters: &plane.punt,
                    limits: &plane.punt_limits,
                    hooks: plane.kernel_hooks,
                }),
            },
            Self::Kernel(plane) => Needs {
                guests: None,
                engines: Some(OfEngines {
                    power: plane.power,
                    borrows: plane.borrows(),
                    shares: Some(1),
                    split: false,
                }),
                mux_routes: false,
                slowpath: None,
                fields: None,
                mux_millicores: 0,
                punts: None,
            },
        }
    }

    /// Its keys `power` and `borrow`, to be changed, where they are of forwarding engines.
    pub fn power_mut(&mut self) -> Option<(&mut Option<Cores>, &mut Option<bool>)> {
        match self {
            Self::Parallel(plane) => Some((&mut plane.power, &mut plane.borrow)),
            Self::Kernel(plane) => Some((&mut plane.power, &mut plane.borrow)),
            Self::Fastpath(_) => None,
        }
    }

    /// Its forwarding guests, if it is of that kind.
    pub fn parallel(&self) -> Option<&Parallel> {
        match self {
            Self::Parallel(plane) => Some(plane),
            Self::Fastpath(_) | Self::Kernel(_) => None,
        }
    }

    /// The same, to be changed.
    pub fn parallel_mut(&mut self) -> Option<&mut Parallel> {
        match self {
            Self::Parallel(plane) => Some(plane),
            Self::Fastpath(_) | Self::Kernel(_) => None,
        }
    }
}

/// The kind of [`Parallel`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ParallelKind {
    /// One or more forwarding guests in parallel.
    #[default]
    Parallel,
}

/// The kind of [`Fastpath`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FastpathKind {
    /// The mux forwards by itself, without crossing to a guest.
    #[default]
    Fastpath,
}

/// The kind of [`Kernel`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KernelKind {
    /// The control guest's kernel forwards.
    #[default]
    Kernel,
}

/// Forwarding by the kernel in the control guest's network namespace, with everything that Linux can: netfilter and
/// NAT, policy routing, multicast, fragments, `tc` (docs/kernel.md). There are no forwarding guests and no route mirror.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Kernel {
    /// Kind of the data plane.
    pub kind: KernelKind,
    /// Processing power that its namespace is guaranteed for what the kernel does there with frames: it is taken from
    /// one engine's `capacity`, and is its limit as well unless it may `borrow`. Not given: it is guaranteed
    /// nothing and refused nothing, and uses what others leave; in a tenant's virtual network, or with
    /// `borrow: false`, 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// Whether it may use what others leave of the engine's CPUs. `power` is then no limit, but what it gets while all
    /// others want their part as well. Not given: where no `power` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub borrow: Option<bool>,
    /// By which way packets go that the namespace would only route.
    #[serde(default)]
    pub kernel_hooks: ShortWay,
}

impl Kernel {
    /// Whether it may use what others leave of its engine's CPUs.
    pub fn borrows(&self) -> bool {
        self.borrow.unwrap_or(self.power.is_none())
    }
}

/// By which way packets go that a namespace would only route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ShortWay {
    /// By the short way, without the whole stack, as long as nothing hooks into forwarding: a rule is obeyed from the
    /// command on that sets it.
    #[default]
    Follow,
    /// By the whole stack, like all others.
    Strict,
}

/// Forwarding by the mux itself: as fast as it gets, with code that comes with PdP. What it can't do goes to the
/// control guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fastpath {
    /// Kind of the data plane.
    pub kind: FastpathKind,
    /// What forwards.
    #[serde(default)]
    pub code: Code,
    /// For `code: fields`: what filters look at, and what is written into frames that they send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fields: Option<Fields>,
    /// Filters that a program of the control guest may set at `/run/pdp/slowpath/control.sock` (docs/slowpath.md), of
    /// IPv4 and of IPv6 each. With these and `counters` 0, nobody listens there.
    #[serde(default = "filters")]
    #[schemars(range(max = FILTERS_MAX))]
    pub filters: u32,
    /// Counters that they may use.
    #[serde(default = "filters")]
    #[schemars(range(max = COUNTERS_MAX))]
    pub counters: u32,
    /// Processing power of the mux that it is guaranteed: for parsing, looking up, rewriting and moving its network's
    /// frames and for changes of its routes, also while others want all there is. It is taken from half of the mux's
    /// `power`, and is no limit: what others leave is had beside it. Not given: it is guaranteed nothing and
    /// refused nothing, and uses what others leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// Frames that go to the control guest without being looked at further; the first that matches decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub punt: Vec<PuntFilter>,
    /// Limits of what goes to the control guest, for each interface.
    #[serde(default)]
    pub punt_limits: PuntLimits,
    /// What becomes of packets that something in the control guest's kernel, which the mux does not follow, may treat
    /// otherwise, as docs/dataplane.md lists. Either way a condition tells of it.
    #[serde(default)]
    pub kernel_hooks: KernelHooks,
}

fn filters() -> u32 {
    FILTERS
}

/// What forwards in a fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// IPv4 and IPv6 by the control guest's routes, as the built-in router does.
    #[default]
    Ip,
    /// Any protocol, IP or not, by filters alone, which a program of the control guest sets (docs/slowpath.md): `fields` says
    /// what they look at.
    Fields,
}

/// How a fast path looks at and changes frames of a protocol that PdP knows nothing of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fields {
    /// Bytes of a frame that filters are compared with, in this order; 38 in all at most. A frame that is too short for them
    /// is dropped.
    pub key: Vec<KeyField>,
    /// What is written into frames that a filter sends, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub write: Vec<FieldWrite>,
    /// What becomes of frames that meet no filter, or that one passes.
    #[serde(default)]
    pub miss: Miss,
}

/// Bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeyField {
    /// Bytes from the start of the frame's destination address.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// How many.
    #[schemars(range(min = 1, max = KEY_BYTES_MAX))]
    pub bytes: u8,
}

/// What is written into a frame: one of `data`, `source` and `hops`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FieldWrite {
    /// Bytes from the start of the frame's destination address.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// Bytes of the filter's data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataBytes>,
    /// `true`: the link address of the interface that it leaves by.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub source: bool,
    /// `true`: one less than the byte has. A frame where that has 1 or 0 is not sent, but goes to the control guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hops: bool,
}

impl FieldWrite {
    /// What is written; `None`: nothing, or more than one thing.
    pub fn written(&self) -> Option<mux::Written> {
        match (self.data, self.source, self.hops) {
            (Some(DataBytes { from, bytes }), false, false) => {
                Some(mux::Written::Data { from, bytes })
            }
            (None, true, false) => Some(mux::Written::Source),
            (None, false, true) => Some(mux::Written::Hops),
            _ => None,
        }
    }
}

impl Fields {
    /// As the mux has it.
    pub fn of_mux(&self) -> mux::Fields {
        let key = |field: &KeyField| mux::KeyField { offset: field.offset, bytes: field.bytes };
        let write =
            |write: &FieldWrite| Some(mux::Write { offset: write.offset, what: write.written()? });
        mux::Fields {
            key: self.key.iter().map(key).collect(),
            write: self.write.iter().filter_map(write).collect(),
            miss: match self.miss {
                Miss::Drop => mux::Miss::Drop,
                Miss::Punt => mux::Miss::Punt,
            },
        }
    }
}

/// Bytes of a filter's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DataBytes {
    /// The first, counted from 0.
    #[schemars(range(max = 15))]
    pub from: u8,
    /// How many.
    #[schemars(range(min = 1, max = 16))]
    pub bytes: u8,
}

/// What becomes of frames that no filter decides on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Miss {
    /// They are dropped.
    #[default]
    Drop,
    /// They go to the control guest.
    Punt,
}

/// Forwarding by guests: any program, in as many of them as it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parallel {
    /// Kind of the data plane.
    pub kind: ParallelKind,
    /// Processing power that all forwarding guests together are guaranteed: it is taken from an engine's
    /// `capacity`, and is their limit as well unless they `borrow`. Not given: they are guaranteed nothing
    /// and refused nothing, and use what others leave; in a tenant's virtual network, or with
    /// `borrow: false`, 0.1. A guest with less than 0.1 gets it in pieces of a millisecond: one with 0.01
    /// may stand still for up to 0.1 s, one with 0.001 for 1 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// Whether the guests may use what others leave of their CPUs. `power` is then no limit, but what
    /// they get while all others want their part as well; for many virtual networks with little each.
    /// Not given: where no `power` is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub borrow: Option<bool>,
    /// Forwarding guests, each with an equal part of `power`; several may be on one engine. A change
    /// of it loses no frame: see `pdp scale`. Not given: as few as the engines allow.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = GUESTS_MAX))]
    pub guests: Option<u32>,
    /// Whether what is left beside whole engines may be spread over several engines where none has
    /// room for it alone.
    pub split: bool,
    /// What the forwarding guests run.
    pub program: Program,
    /// Memory limit of each forwarding guest.
    pub memory: Bytes,
    /// Processes and threads of each forwarding guest.
    #[schemars(range(min = 2, max = PROCESSES_MAX))]
    pub processes: u32,
    /// Frames that each forwarding guest's rings hold, to it and from it: a power of two. Only for
    /// programs on the runtime, which need `memory` of 16 MiB and 8 KiB more for each of these.
    #[schemars(range(min = GUEST_QUEUE_MIN, max = GUEST_QUEUE_MAX))]
    pub queue: u32,
    /// How frames are shared out among the forwarding guests.
    pub distribution: Distribution,
    /// Frames that go to the control guest and not to a forwarding guest; the first that matches
    /// decides. For programs that can't tell by themselves.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub punt: Vec<PuntFilter>,
    /// Limits of what goes to the control guest, for each interface.
    pub punt_limits: PuntLimits,
    /// What becomes of packets that something in the control guest's kernel, which forwarding guests do
    /// not follow, may treat otherwise than they do: policy rules, VRFs, nftables, `tc` and more, as
    /// docs/dataplane.md lists. Either way a condition tells of it. Only for the built-in router.
    pub kernel_hooks: KernelHooks,
}

/// What becomes of packets that something in the control guest's kernel may treat otherwise than the
/// forwarding guests do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KernelHooks {
    /// They are punted (class `hook`), so that the kernel decides, at the speed of its own forwarding.
    #[default]
    Strict,
    /// Forwarding guests forward them all the same, at full speed.
    Ignore,
}

impl Default for Parallel {
    fn default() -> Self {
        Self {
            kind: ParallelKind::Parallel,
            power: None,
            borrow: None,
            guests: None,
            split: false,
            program: Program::default(),
            memory: Bytes(256 << 20),
            processes: 16,
            queue: GUEST_QUEUE_DEFAULT,
            distribution: Distribution::default(),
            punt: Vec::new(),
            punt_limits: PuntLimits::default(),
            kernel_hooks: KernelHooks::default(),
        }
    }
}

impl Parallel {
    /// Whether its guests may use what others leave of their CPUs.
    pub fn borrows(&self) -> bool {
        self.borrow.unwrap_or(self.power.is_none())
    }

    /// How the program is attached.
    pub fn attach(&self) -> Attach {
        match &self.program {
            Program::BuiltIn(BuiltIn::Router) => Attach::Runtime,
            Program::Own(program) => program.attach,
        }
    }
}

/// What a forwarding guest runs: `router`, or a program of one's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant, reason = "one a router, beside much more")]
pub enum Program {
    /// A program that comes with PdP.
    BuiltIn(BuiltIn),
    /// Any other.
    Own(OwnProgram),
}

impl Program {
    /// One of one's own.
    pub fn own(&self) -> Option<&OwnProgram> {
        match self {
            Self::Own(program) => Some(program),
            Self::BuiltIn(_) => None,
        }
    }

    /// The same, to be changed.
    pub fn own_mut(&mut self) -> Option<&mut OwnProgram> {
        match self {
            Self::Own(program) => Some(program),
            Self::BuiltIn(_) => None,
        }
    }
}

impl Default for Program {
    fn default() -> Self {
        Self::BuiltIn(BuiltIn::Router)
    }
}

/// Programs that come with PdP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BuiltIn {
    /// Forwards IPv4 and IPv6 by the control guest's routes.
    Router,
}

/// A program of one's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OwnProgram {
    /// What to run. `{ports}` is replaced by the number of vports, `{guest}` by the guest's
    /// number, `{cpus}` by the engine's CPUs.
    pub run: Command,
    /// How it is attached.
    pub attach: Attach,
    /// Root file system. Not given: made of the machine's own programs.
    #[serde(default)]
    pub image: Image,
    /// Files to show to it read-only, by absolute path, 256 KiB in all: directly below `/`, or anywhere below
    /// `/etc`, `/home`, `/opt`, `/root`, `/run`, `/srv`, `/tmp` or `/var`; with an image below `/run` or
    /// `/tmp`, or in place of a file that it has. `owner` is by number, or `root`. A change makes the router's
    /// forwarding guests anew.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, File>,
}

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Attach {
    /// It is built on PdP's guest runtime: one trunk.
    Runtime,
    /// It speaks memif: one interface a vport.
    Memif,
    /// It reads and writes TAPs: one a vport.
    Tap,
}

/// How frames are shared out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Distribution {
    /// By what rule.
    pub policy: Policy,
    /// Which bits of a frame make a flow, for the policies `flow` and `flowlet`.
    pub flow: Flow,
}

/// Rule by which frames are shared out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Frames of one flow go to one guest.
    #[default]
    Flow,
    /// In turn.
    RoundRobin,
    /// In turn, each guest as often as its power says.
    Weighted,
    /// As `flow`, but a flow goes to a guest with less to do when none of its frames is in a
    /// guest. Keeps the order of each flow. Only for programs on the runtime.
    Flowlet,
    /// Whatever their flow, to a guest that has room, and sent on in the order in which they came.
    /// Only for programs on the runtime.
    Ordered,
}

/// What makes a flow: `ip`, or fields of the frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Flow {
    /// By a protocol that PdP knows.
    Known(KnownFlow),
    /// By these bits.
    Fields(Vec<FlowField>),
}

impl Default for Flow {
    fn default() -> Self {
        Self::Known(KnownFlow::Ip)
    }
}

/// Flows that PdP knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KnownFlow {
    /// Addresses, protocol and ports of IPv4 and IPv6; addresses and type of other Ethernet.
    Ip,
}

/// Bits of a frame that make a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FlowField {
    /// Bytes from the start of the frame's destination address.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// Which bits count; as many bytes as the field has.
    pub mask: Hex,
}

/// Frames that go to the control guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PuntFilter {
    /// All of these must be so.
    #[serde(rename = "match")]
    pub matches: Vec<Match>,
    /// Whose limit counts.
    pub class: PuntClass,
}

/// Bytes that a frame must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Match {
    /// Bytes from the start of the frame's destination address.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// The bytes, after the mask.
    pub value: Hex,
    /// Which bits count, as long as `value`. Not given: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<Hex>,
}

/// Class of what goes to the control guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PuntClass {
    /// Packets for the router itself, without those of `control`.
    Local,
    /// ARP and IPv6 neighbour discovery.
    Neighbour,
    /// Packets that the control guest's kernel answers, or that are rare.
    Exception,
    /// Packets that the control guest's kernel forwards.
    Hook,
    /// Routing protocols: packets for the router itself with a DSCP of CS6 or CS7, and LLC frames.
    Control,
}

/// Limits of punts by class, for each interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PuntLimits {
    /// Packets for the router itself, without those of `control`.
    pub local: Limit,
    /// ARP and IPv6 neighbour discovery, and packets to neighbours whose MAC address is not known.
    pub neighbour: Limit,
    /// Packets that the control guest's kernel answers, or that are rare: no route, TTL expired, IP options.
    pub exception: Limit,
    /// Packets that the control guest's kernel forwards: into tunnels, in fragments, and where `kernelHooks` says so.
    pub hook: Limit,
    /// Routing protocols: packets for the router itself with a DSCP of CS6 or CS7, and LLC frames (IS-IS).
    pub control: Limit,
}

impl Default for PuntLimits {
    fn default() -> Self {
        let pps = |pps| Limit { rate: None, pps: Some(pps) };
        Self {
            local: pps(100_000),
            neighbour: pps(1_000),
            exception: pps(1_000),
            hook: pps(100_000),
            control: pps(20_000),
        }
    }
}
