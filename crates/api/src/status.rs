use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::command::{CommandState, CommandStatus};
use crate::specs;

/// How an object is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// Stored, not begun, or stopped by `down`.
    #[default]
    Stopped,
    /// On its way up.
    Starting,
    /// As the spec says.
    Running,
    /// Partly as the spec says; `message` says what is not, and it is being tried again.
    Degraded,
    /// Not as the spec says; `message` says why.
    Failed,
    /// Deleted, and not gone: `message` says why, and for how long.
    Removing,
}

impl Phase {
    /// The word in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Degraded => "degraded",
            Self::Failed => "failed",
            Self::Removing => "removing",
        }
    }
}

/// Something about an object that its user should know, while it is as its spec says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it is about.
    pub kind: ConditionKind,
    /// The node of a vnet that it is about.
    pub node: String,
    /// What is so, and what that means.
    pub message: String,
}

/// What a condition is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum ConditionKind {
    /// Something in the control guest's kernel may treat packets otherwise than forwarding guests do: see
    /// `kernelHooks` of the spec.
    KernelHooks,
    /// A limit of the spec drops a node's packets: `puntLimits` or `floodPps`. The condition ends once the limit has
    /// dropped nothing for 10 s.
    LimitDrops,
    /// A node or a guest of it reached a limit of its spec: starts of processes or threads were refused, or the kernel
    /// killed processes for their memory. The condition goes when the limit is changed or the node starts anew.
    LimitReached,
    /// A guest changed its end of a port whose link stays in the kernel: its name, its MTU, its link address, or that it
    /// is up. It hurts itself alone, and the condition goes when the guest undoes it.
    PortChanged,
}

/// A vnet in a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VnetSummary {
    /// Its name.
    pub name: String,
    /// How it is.
    pub phase: Phase,
    /// What is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The first commands and guests that it waits for, while nothing is wrong: `r1 ospfd, r2 g0, and 3 more`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// What else its user should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Routers.
    pub routers: u32,
    /// Hosts.
    pub hosts: u32,
    /// Links.
    pub links: u32,
    /// All its nodes are ready.
    #[serde(default)]
    pub ready: bool,
    /// Forwarding guests that are connected to the mux.
    pub guests_connected: u32,
    /// Forwarding guests in all.
    pub guests: u32,
    /// Power that its routers are guaranteed, thousandths of a core.
    pub power_millicores: u64,
    /// FEs that its forwarding guests are on, by name, each once.
    pub fes: Vec<String>,
    /// Some of its processes did not answer in time: what they would say is missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
}

/// A vnet: what is wanted and what is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Vnet {
    /// Its name.
    pub name: String,
    /// The stored document, `kind: VirtualNetwork`; see `schema/pdp-v1.json`.
    #[schema(schema_with = specs::vnet)]
    pub spec: Value,
    /// What was allocated, what runs, and what went wrong.
    pub status: VnetStatus,
}

/// What is, of a vnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VnetStatus {
    /// How it is.
    pub phase: Phase,
    /// What is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// All its nodes are ready.
    #[serde(default)]
    pub ready: bool,
    /// Its nodes, in the spec's order.
    pub nodes: Vec<NodeStatus>,
    /// Its links, in the spec's order.
    pub links: Vec<LinkStatus>,
}

/// What a node of a vnet is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum NodeKind {
    /// A vrouter.
    #[default]
    Router,
    /// A container with an ordinary IP stack.
    Host,
}

/// Kind of a router's `dataPlane` in the spec: the part that forwards its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum DataPlane {
    /// Forwarding guests.
    Parallel,
    /// The mux itself.
    Fastpath,
    /// The kernel, in the control guest's network namespace.
    Kernel,
}

impl DataPlane {
    /// The word in JSON, in tables and in specs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parallel => "parallel",
            Self::Fastpath => "fastpath",
            Self::Kernel => "kernel",
        }
    }
}

/// What is, of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: NodeKind,
    /// Kind of its data plane; routers only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_plane: Option<DataPlane>,
    /// Its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// How it is.
    pub phase: Phase,
    /// What is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// What else its user should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// It is as its spec says, all its commands are ready, those to be run once have been, and its forwarding
    /// guests are connected.
    #[serde(default)]
    pub ready: bool,
    /// Its commands, `exec` last; empty for one that was started before an upgrade to a version that has this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<CommandStatus>,
    /// Power that it is guaranteed, thousandths of a core, 0 where it borrows what others leave; routers only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_millicores: Option<u64>,
    /// Its control guest, or the host itself.
    pub control: ProcessStatus,
    /// The helper that serves its TAPs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<ProcessStatus>,
    /// Its route mirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<ProcessStatus>,
    /// The helper of its way out and in beside its networks (`management`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management: Option<ProcessStatus>,
    /// Ports of the machine that lead into it, as its spec has them: `8080:80`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<String>,
    /// Its forwarding guests, by number.
    pub guests: Vec<ForwardingGuest>,
    /// Of a router that the mux forwards for by itself (`fastpath`): how that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineStatus>,
    /// Its ports, by index.
    pub ports: Vec<PortStatus>,
    /// Addresses of its `lo` that the spec gives it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loopback: Vec<String>,
}

impl NodeStatus {
    /// Names the commands, guests and routes that a running node waits for: `ospfd`, `g0`, `routes`. It names a command
    /// that waits for others only if there is nothing else.
    pub fn waits_for(&self) -> Vec<String> {
        if self.phase != Phase::Running {
            return Vec::new();
        }
        let open = self.commands.iter().filter(|command| !command.ready);
        let (waiting, under_way): (Vec<_>, Vec<_>) =
            open.partition(|command| command.state == CommandState::Waiting);
        let guests = self.guests.iter().filter(|guest| !guest.connected);
        let routes = self.engine.iter().filter(|engine| !engine.synced);
        let mut names: Vec<String> =
            under_way.into_iter().map(|command| command.name.clone()).collect();
        names.extend(guests.map(|guest| format!("g{}", guest.number)));
        names.extend(routes.map(|_| "routes".to_owned()));
        if names.is_empty() {
            names.extend(waiting.into_iter().map(|command| command.name.clone()));
        }
        names
    }
}

/// How a process is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessStatus {
    /// How it is.
    pub phase: Phase,
    /// Its process on the machine, while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Times it was started again.
    pub restarts: u64,
    /// How it ended last, or why it does not start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// It did not answer in time: what it would say is missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
}

/// How the mux's own forwarding for a router is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineStatus {
    /// It has a snapshot of its control guest's routes.
    pub synced: bool,
    /// Whether its routes are its control guest's. Absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes_synced: Option<bool>,
    /// Why they can't be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What is, of a forwarding guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForwardingGuest {
    /// Its number in its vrouter.
    pub number: u32,
    /// The FE that it is on.
    pub fe: String,
    /// Its share of the FE, thousandths of a core.
    pub share_millicores: u64,
    /// Connected to the mux and in the distribution.
    pub connected: bool,
    /// Whether its routes equal its kernel's; absent where nobody says: its mirror does not answer or was not asked
    /// yet, or it takes no routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes_synced: Option<bool>,
    /// Its process.
    #[serde(flatten)]
    pub process: ProcessStatus,
}

/// What is, of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PortStatus {
    /// Its name.
    pub name: String,
    /// Its link address, `02:…`.
    pub mac: String,
    /// Largest IP packet, bytes.
    pub mtu_bytes: u32,
    /// Addresses that the spec gives it.
    pub addresses: Vec<String>,
    /// Name of its link, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// Whether its interface has carrier.
    pub carrier: bool,
}

/// What is, of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LinkStatus {
    /// Its name.
    pub name: String,
    /// Its ends: `r1:eth0`, or `A (vxlan 10.9.0.1 > 10.9.0.2 vni 7)` for the outside.
    pub endpoints: Vec<String>,
    /// Which way its frames take.
    #[serde(default)]
    pub way: LinkWay,
    /// Why they go by the mux, where one of its ends is a router that the kernel forwards for: `it has a delay`,
    /// `h1 is a host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub way_reason: Option<String>,
    /// Set up by its user (see `link down`).
    pub up: bool,
    /// Of one that is down: its ends keep their carrier.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub silent: bool,
    /// Whether its ends have carrier: up, or down silently, and, of two, both are there.
    pub carrier: bool,
    /// Why it does not carry frames, and what to do; of a tunnel also what is wrong with its way outside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Rate of what leaves by each end now, bits a second; absent for no limit. Where ends differ, the highest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bps: Option<u64>,
    /// What it does to frames on purpose now, as its spec has it: `delay 20ms, loss 1%`; by end where they differ.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub impairments: String,
    /// How far its schedule is, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleStatus>,
    /// The queues that frames wait in at its ends, where there are several, as the spec has them; of a network the first
    /// 1,024. Their counters are in `stats`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStatus>,
}

/// Which way a link's frames take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum LinkWay {
    /// By the mux.
    #[default]
    Mux,
    /// They stay in the kernel, from one port to the other.
    Kernel,
}

impl LinkWay {
    /// The word in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mux => "mux",
            Self::Kernel => "kernel",
        }
    }
}

/// A queue at an end of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct QueueStatus {
    /// The end that frames leave by, as in `endpoints`.
    pub end: String,
    /// Its name.
    pub name: String,
    /// Its part beside other queues that have frames.
    pub weight: u32,
    /// Frames that may wait in it.
    pub frames: u32,
    /// Bytes that may; absent: as many as these frames have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Packets of the mux that are set aside for it.
    #[serde(default, skip_serializing_if = "is_none_set_aside")]
    pub buffers: u32,
    /// DSCPs of packets that are for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dscp: Vec<u8>,
}

fn is_none_set_aside(buffers: &u32) -> bool {
    *buffers == 0
}

/// How far a schedule is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleStatus {
    /// Since it began, milliseconds.
    pub elapsed_ms: u64,
    /// Its steps.
    pub steps: usize,
    /// Of these, those that are done.
    pub done: usize,
    /// When the next one is to be done, milliseconds from its beginning; absent if all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_ms: Option<u64>,
}

/// The substrate: what is wanted and what is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Substrate {
    /// The stored document, `kind: Substrate`, or the default one; absent for a tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = specs::substrate, required = false)]
    pub spec: Option<Value>,
    /// What is.
    pub status: SubstrateStatus,
}

/// What is, of the substrate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SubstrateStatus {
    /// How it is.
    pub phase: Phase,
    /// What is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The mux.
    pub mux: ProcessStatus,
    /// What it can guarantee fast paths.
    #[serde(default)]
    pub fastpaths: FastpathPower,
    /// Forwarding engines.
    pub fes: Vec<FeStatus>,
    /// External interfaces.
    pub externals: Vec<ExternalStatus>,
}

/// Power of the mux that is for fast paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FastpathPower {
    /// What there is, thousandths of a core.
    pub capacity_millicores: u64,
    /// How much is guaranteed to routers, thousandths of a core; for a tenant, to its own.
    pub used_millicores: u64,
}

/// What is, of a forwarding engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FeStatus {
    /// Its name.
    pub name: String,
    /// Its CPUs, as a list: `0-1,4`.
    pub cpus: String,
    /// Its capacity, thousandths of a core.
    pub capacity_millicores: u64,
    /// How much is guaranteed to guests, thousandths of a core.
    pub used_millicores: u64,
    /// Guests on it.
    pub guests: Vec<FeGuest>,
}

/// A forwarding guest's share of an FE, or that of a router whose namespace forwards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FeGuest {
    /// The vnet.
    pub vnet: String,
    /// The router.
    pub node: String,
    /// Number of the guest in its vrouter; 0 where the kernel forwards.
    pub number: u32,
    /// Its share, thousandths of a core; 0: it borrows what others leave.
    pub share_millicores: u64,
}

/// What is, of an external interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExternalStatus {
    /// Its name in the substrate.
    pub name: String,
    /// What is behind it: the name of a device, `memif` and where the mux listens, or `generator`.
    pub device: String,
    /// Its MTU, bytes; absent while its device is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu_bytes: Option<u32>,
    /// The mux receives from it and sends to it.
    pub attached: bool,
    /// Whether its device has carrier; absent where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carrier: Option<bool>,
    /// What is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
