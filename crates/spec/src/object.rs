//! Objects of a spec, in the form in which users write
//! them and the daemon stores and returns them as JSON.
//!
//! Doc comments of fields become the descriptions in the JSON Schema
//! and in docs/spec.md. [`crate::check`] fills in all defaults,
//! except for fields whose comment allows `None` afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bind::Bind;
use crate::command::{ExecCommand, NodeCommand, RestartScope};
use crate::file::File;
use crate::frame_limit::FrameLimit;
use crate::image::Image;
use crate::limits::*;
use crate::link::Link;
use crate::management::{Management, ManagementGrant};
use crate::plane::{DataPlane, EngineDemand, OwnProgram, Parallel};
use crate::route::StaticRoute;
use crate::sysctl::SysctlValue;
use crate::tunnel::{External, Grant};
use crate::units::{Address, Base64, BitRate, Bytes, Cores, CpuSet, Mac};
use crate::volume::Volume;

/// One document of a spec.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind")]
#[allow(clippy::large_enum_variant, reason = "there are few, and each is taken apart at once")]
pub enum Object {
    /// The shared machine; one per PdP node.
    Substrate(Substrate),
    /// One virtual network.
    VirtualNetwork(VirtualNetwork),
    /// A party with its own virtual networks.
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

    /// Name of the object.
    pub fn name(&self) -> &str {
        match self {
            Self::Substrate(substrate) => &substrate.metadata.name,
            Self::VirtualNetwork(vnet) => &vnet.metadata.name,
            Self::Tenant(tenant) => &tenant.metadata.name,
        }
    }
}

/// Format version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    /// First version.
    #[default]
    #[serde(rename = "pdp/v1")]
    V1,
}

/// Name and labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Name, unique per kind. A tenant's network is called `TENANT.NAME`.
    #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
    pub name: String,
    /// Free text; PdP ignores it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// The shared machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Substrate {
    /// Format version.
    pub api_version: ApiVersion,
    /// Name and labels.
    pub metadata: Metadata,
    /// Desired state.
    pub spec: SubstrateSpec,
    /// State from the daemon; `apply` ignores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_json::Map<String, serde_json::Value>>,
}

impl Substrate {
    /// Returns the default substrate, used until one is applied. The mux
    /// gets the first CPU, and one forwarding engine gets all others. A
    /// single CPU is divided in half. There are no external interfaces.
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

/// Substrate configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SubstrateSpec {
    /// External interfaces, by name.
    #[serde(default)]
    pub interfaces: BTreeMap<String, ExternalInterface>,
    /// Process that receives and sends all frames. Required with `forwardingEngines`.
    #[serde(default, skip_serializing_if = "Mux::is_missing")]
    pub mux: Mux,
    /// CPU pools for forwarding guests, by name.
    #[serde(default)]
    pub forwarding_engines: BTreeMap<String, ForwardingEngine>,
    /// CPUs and memory for guests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management_host: Option<ManagementHost>,
}

impl SubstrateSpec {
    /// True if mux and engines are left to their machine-dependent defaults.
    pub fn is_of_machine(&self) -> bool {
        self.mux.is_missing() && self.forwarding_engines.is_empty()
    }
}

/// An external interface.
///
/// Set exactly one of `device`, `memif` and `generator`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExternalInterface {
    /// Name of a network device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = INTERFACE_CHARS_MAX))]
    pub device: Option<String>,
    /// Driver for the device (docs/outside.md).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attach: Option<DeviceAttach>,
    /// Connection to a memif program, for one external.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memif: Option<MemifInterface>,
    /// Frame source and sink in the mux, for measurements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generator: Option<Generator>,
    /// Egress rate of all links together, counting whole frames plus 24 bytes each. Default:
    /// unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<BitRate>,
}

/// An [`ExternalInterface`] as one of its three forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalForm<'a> {
    /// A network device and its driver.
    Device(&'a str, DeviceAttach),
    /// A memif program.
    Memif(&'a MemifInterface),
    /// A source and sink inside the mux.
    Generator(&'a Generator),
}

impl ExternalInterface {
    /// Returns the form that is set. `None` if none is; [`crate::check`] rejects that.
    pub fn outlet(&self) -> Option<ExternalForm<'_>> {
        match (&self.device, &self.memif, &self.generator) {
            (Some(device), ..) => {
                Some(ExternalForm::Device(device, self.attach.unwrap_or_default()))
            }
            (None, Some(memif), _) => Some(ExternalForm::Memif(memif)),
            (None, None, Some(generator)) => Some(ExternalForm::Generator(generator)),
            (None, None, None) => None,
        }
    }
}

/// Driver that receives and sends frames on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceAttach {
    /// AF_XDP (default).
    #[default]
    AfXdp,
    /// AF_XDP with busy polling; the mux needs its own CPU.
    AfXdpBusyPoll,
    /// Packet sockets, for drivers without AF_XDP. PdP turns GRO off for VLANs and whole
    /// interfaces.
    Packet,
}

/// A memif program.
///
/// The program connects as client to `externals/NAME/memif.sock` in the run directory: interface 0,
/// one ring per direction, Ethernet mode, no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MemifInterface {
    /// Largest IP packet, in bytes.
    #[schemars(range(min = MTU_MIN, max = MTU_MAX))]
    pub mtu: u32,
    /// Group, by name or number, whose programs may connect. Default: only root.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = NAME_CHARS_MAX))]
    pub group: Option<String>,
}

impl Default for MemifInterface {
    fn default() -> Self {
        Self { mtu: MTU_DEFAULT, group: None }
    }
}

/// A frame source and sink in the mux.
///
/// Without frames, it is only a sink. Its externals may be tunnels to any addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Generator {
    /// Path of a pcap file to send in a loop, as for a file's `from`. `apply` stores it as `pcap`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames: Option<String>,
    /// Contents of the pcap file: at most 10 MiB, frames of 14 to 1,714 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcap: Option<Base64>,
    /// Frames to send per second. Default: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = RATE_PPS_MAX))]
    pub pps: Option<u64>,
    /// Number of frames to send; a change restarts the generator. Default: endless.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub count: Option<u64>,
    /// Byte offset of a sequence number in sent and received frames: `PdP#` and eight little-endian
    /// bytes. PdP updates no checksums.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MTU_MAX))]
    pub number_at: Option<u16>,
}

/// The process that moves all packets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mux {
    /// CPUs of the mux.
    pub cpus: CpuSet,
    /// Worker threads.
    #[serde(default = "one_worker")]
    #[schemars(range(min = 1, max = WORKERS_MAX))]
    pub workers: u32,
    /// Power reserved for the mux. Fast paths can be guaranteed half of it. Default and maximum: 1
    /// per worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
}

impl Default for Mux {
    /// Returns the value for a missing mux.
    fn default() -> Self {
        Self { cpus: CpuSet(BTreeSet::new()), workers: one_worker(), power: None }
    }
}

impl Mux {
    /// True if the spec has no mux. One in a spec always has CPUs.
    fn is_missing(&self) -> bool {
        self.cpus.0.is_empty()
    }

    /// Processing power reserved for the mux.
    pub fn power(&self) -> Cores {
        self.power.unwrap_or(Cores(self.workers * 1000))
    }

    /// Power that can be guaranteed to all fast paths together, and to those of
    /// one virtual network. One worker forwards for all routers of a network.
    pub fn fastpath_power(&self) -> (Cores, Cores) {
        let all = self.power().0 / FASTPATH_POWER_PART;
        (Cores(all), Cores(all / self.workers.max(1)))
    }

    /// Packets that the queues of all virtual networks
    /// together may reserve. They fit on any single worker.
    pub fn buffers(&self) -> u64 {
        u64::from(POOL_PACKETS / self.workers.max(1) / BUFFERS_PART)
    }
}

fn one_worker() -> u32 {
    1
}

/// A CPU pool for forwarding guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ForwardingEngine {
    /// CPUs of its guests.
    pub cpus: CpuSet,
    /// Power that routers can be guaranteed, at most what the mux and other engines leave of its
    /// CPUs.
    pub capacity: Cores,
}

/// Limits for hosts and control guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ManagementHost {
    /// CPUs of hosts and control guests. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuSet>,
    /// Limit for all guests and helpers together, counted as for `quota`. Default: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
}

/// A party with its own virtual networks, `TENANT.NAME`, and its limits. Managed by operators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tenant {
    /// Format version.
    pub api_version: ApiVersion,
    /// Name and labels.
    pub metadata: Metadata,
    /// Rights and limits.
    #[serde(default)]
    pub spec: TenantSpec,
    /// State from the daemon; `apply` ignores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Rights and limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TenantSpec {
    /// Users, by name or id, who act as this tenant on the Unix socket.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unix_users: Vec<String>,
    /// Limits for all its networks together.
    pub quota: Quota,
    /// External interfaces that it may use.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub interfaces: BTreeMap<String, Grant>,
    /// Directories for its `rootfs`, `ociLayout` and `archive` images. Only operators should have
    /// write access.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
    /// Directories for its nodes' `binds`: `/srv/acme`, or `/srv/acme:rw` with write access.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub binds: Vec<String>,
    /// Its nodes' access to the machine's network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub management: Option<ManagementGrant>,
    /// Registries, or parts of them, for `pull`: `registry.example`, `docker.io/frrouting`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub registries: Vec<String>,
    /// Pull with the daemon's credentials (`pdpd --registry-auth`).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub registry_auth: bool,
}

/// Limits for all virtual networks of a tenant together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Quota {
    /// Virtual networks. Default: 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vnets: Option<u32>,
    /// Routers and hosts. Default: 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<u32>,
    /// Guaranteed power, at least 0.001 per forwarding guest. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// Sum of `resources.cpu`. Default: 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cores>,
    /// Memory of guests, helpers and the run directory (docs/tenants.md). Default: 8Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// Process limits of all guests, plus 32 per node. Default: 16384.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
    /// Interfaces of all nodes. Default: 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vports: Option<u32>,
    /// Sum of link rates. Every link then needs a `rate`. Default: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<BitRate>,
    /// Sum of `resources.routes`. Default: 4000000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routes: Option<u32>,
    /// Size of specs as JSON, with their files. Default: 64Mi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub specs: Option<Bytes>,
    /// Logs, 8 MiB per guest and helper. Default: 4Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logs: Option<Bytes>,
    /// Size of volumes. Default: 1Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Bytes>,
    /// Images from OCI layouts, archives and registries, at most 16 GiB each. Default: 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci_images: Option<u32>,
    /// Disk space of images from archives and registries. Default: 4Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<Bytes>,
    /// Files and directories in images from archives and registries. Default: 200000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_files: Option<u32>,
    /// The daemon's file descriptors: one per interface, guest and helper. Default: 1024.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub descriptors: Option<u32>,
    /// Memory regions in the mux: one per node with interfaces and per runtime or TAP guest, 16 per
    /// memif interface. Default: 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions: Option<u32>,
    /// Packets reserved by `buffers` of link queues. Default: 2048.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buffers: Option<u32>,
    /// Concurrent watches, captures, log readers, route dumps and commands. Default: 16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u32>,
    /// Audit log entries of each kind: changes, reads, refusals. Default: 10000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<u32>,
}

/// One virtual network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VirtualNetwork {
    /// Format version.
    pub api_version: ApiVersion,
    /// Name and labels.
    pub metadata: Metadata,
    /// Desired state.
    pub spec: VirtualNetworkSpec,
    /// State from the daemon; `apply` ignores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Nodes, links and externals.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VirtualNetworkSpec {
    /// Limit for frames from all externals together. PdP drops the excess.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub police: Option<FrameLimit>,
    /// Routers and hosts, by name.
    pub nodes: BTreeMap<String, Node>,
    /// Attachments to the outside, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub externals: BTreeMap<String, External>,
    /// Links between nodes and externals.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
}

/// Kind of node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NodeKind {
    /// Control guest and data plane.
    Router,
    /// Ordinary IP stack.
    Host,
}

/// A router or a host.
///
/// The node's container is its host or control guest. Changing a key restarts it, except for
/// `labels`, `management.ports`, `routes`, `resources` (but `resources.routes` restarts it), and
/// most changes of `dataPlane`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    /// Kind of node.
    pub kind: NodeKind,
    /// At most 64, for `pdp -l`, with the syntax of Kubernetes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Root file system, such as `registry.example/frr:10`. Default: the machine's programs.
    #[serde(default)]
    pub image: Image,
    /// Interfaces, by name of at most 15 characters.
    #[serde(default)]
    pub interfaces: BTreeMap<String, Interface>,
    /// Addresses of `lo`: `1.1.1.1/32`, `2001:db8::1/128`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loopback: Vec<Address>,
    /// Static routes, set before commands start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<StaticRoute>,
    /// Kernel settings (docs/sysctls.md): `net.ipv4.tcp_ecn: 1`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, SysctlValue>,
    /// Files to create at each start, by absolute path below `/etc`, `/root`, `/run`, `/tmp` or
    /// `/var` (with an image: `/var/log` or `/var/tmp`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, File>,
    /// Files and directories of the machine: `SOURCE:TARGET[:ro]`, or a mapping. The permissions
    /// for others apply.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub binds: Vec<Bind>,
    /// Directories that outlive the container: `NAME:TARGET`, or a mapping. New ones are empty,
    /// with TARGET's owner and mode. PdP deletes them with the entry or the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// Programs to start, and to restart when they end (docs/ready.md). Default: the command of an
    /// image from an archive or registry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<NodeCommand>,
    /// Commands to run once, in order, when interfaces exist and `commands` are ready
    /// (docs/ready.md).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exec: Vec<ExecCommand>,
    /// Commands to restart when one ends.
    #[serde(default)]
    pub restart: RestartScope,
    /// Environment variables of commands.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Allow mounts, own namespaces (`ip netns`, FRR's VRFs by namespace) and kernel IPsec. Not for
    /// tenants.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub privileged: bool,
    /// Access to the machine's network (docs/outside.md): `{}`, or with `ports`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management: Option<Management>,
    /// Limits for the host or control guest.
    #[serde(default)]
    pub resources: Resources,
    /// Forwarding of a router, by `kind`. Default: the built-in router with spare CPU time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_plane: Option<DataPlane>,
}

impl Node {
    /// Returns interfaces in the order of their vport indices:
    /// by name, with numbers in names compared by value.
    pub fn ports(&self) -> Vec<(&str, &Interface)> {
        let mut ports: Vec<_> = self.interfaces.iter().map(|(n, i)| (n.as_str(), i)).collect();
        ports.sort_by_cached_key(|(name, _)| {
            let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
            let number = name[stem.len()..].parse::<u64>().ok();
            (stem.to_owned(), number, (*name).to_owned())
        });
        ports
    }

    /// Data plane of the node; `None` for a host.
    pub fn plane(&self) -> Option<&DataPlane> {
        static DEFAULT: LazyLock<DataPlane> = LazyLock::new(DataPlane::default);
        (self.kind == NodeKind::Router).then(|| self.data_plane.as_ref().unwrap_or(&DEFAULT))
    }

    /// Demand on forwarding engines, if any.
    pub fn of_engines(&self) -> Option<EngineDemand> {
        self.plane()?.needs().engines
    }

    /// Returns its forwarding guests, if it uses them.
    pub fn guests(&self) -> Option<&Parallel> {
        self.plane()?.needs().guests
    }

    /// The user-supplied program of its forwarding guests, if any.
    pub fn program(&self) -> Option<&OwnProgram> {
        self.data_plane.as_ref()?.needs().guests?.program.user_program()
    }

    /// Returns its image and its forwarding guests' program image.
    pub fn images(&self) -> impl Iterator<Item = &Image> {
        let program = self.program().map(|program| &program.image);
        [Some(&self.image), program].into_iter().flatten()
    }

    /// Mutable references to the same images.
    pub fn images_mut(&mut self) -> impl Iterator<Item = &mut Image> {
        let plane = self.data_plane.as_mut().and_then(|plane| plane.guests_mut());
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

/// An interface of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Interface {
    /// MAC address. Default: derived from the names of network, node and interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Largest IP packet, in bytes; at most 1700 and the tunnel's limit. Default: 1500, or that
    /// limit if lower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = MTU_MIN))]
    pub mtu: Option<u32>,
    /// Addresses. Routing software may add others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Address>,
    /// Default gateways in its subnets, one per IP version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<IpAddr>,
    /// Other `anycast` interfaces of the link may have the same `mac` and addresses.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub anycast: bool,
}

/// Limits for a host or control guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Resources {
    /// CPU limit.
    pub cpu: Cores,
    /// Memory limit, including the kernel's memory for routes.
    pub memory: Bytes,
    /// Processes and threads.
    #[schemars(range(min = 8, max = PROCESSES_MAX))]
    pub processes: u32,
    /// Routes that the data plane follows. The kernel forwards by others, more slowly.
    #[schemars(range(min = 1, max = ROUTES_MAX))]
    pub routes: u32,
}

impl Default for Resources {
    fn default() -> Self {
        Self { cpu: Cores(500), memory: Bytes(256 << 20), processes: 256, routes: 100_000 }
    }
}
