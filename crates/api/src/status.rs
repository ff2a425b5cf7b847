use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

pub use pdp_spec::DataPlaneKind;

use crate::command::{CommandState, CommandStatus};
use crate::specs;

/// State of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// Stored and not started yet, or stopped by `down`.
    #[default]
    Stopped,
    /// Starting.
    Starting,
    /// As the spec says.
    Running,
    /// Partly as the spec says. `message` tells what differs, and the daemon retries.
    Degraded,
    /// Not as the spec says; `message` tells why.
    Failed,
    /// Deleted, but not gone yet. `message` tells why, and for how long.
    Removing,
}

impl Phase {
    /// Word in JSON and in tables.
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

/// A fact about an object that its user should know although the object runs as its spec says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Kind of the condition.
    pub kind: ConditionKind,
    /// Node of the vnet that it concerns.
    pub node: String,
    /// The fact and its consequence.
    pub message: String,
}

/// Kind of a [`Condition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum ConditionKind {
    /// The control guest's kernel may treat packets differently than forwarding guests do; see
    /// `kernelHooks` of the spec.
    KernelHooks,
    /// A limit of the spec drops a node's packets: `puntLimits` or `floodPps`. The condition ends
    /// once the limit has dropped nothing for 10 s.
    LimitDrops,
    /// A node or one of its guests reached a limit of its spec. The kernel refused to start
    /// processes or threads, or killed processes for their memory. The condition ends when the
    /// limit is changed or the node restarts.
    LimitReached,
    /// A guest changed its end of a port whose link stays in the kernel: name, MTU, MAC address, or
    /// administrative state. This affects only that guest. The condition ends when the guest undoes
    /// the change.
    PortChanged,
}

/// A vnet in a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VnetSummary {
    /// Name of the vnet.
    pub name: String,
    /// State of the vnet.
    pub phase: Phase,
    /// Description of what is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The first commands and guests that the vnet waits for, while nothing is wrong: `r1 ospfd, r2
    /// g0, and 3 more`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Other facts that its user should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Number of routers.
    pub routers: u32,
    /// Number of hosts.
    pub hosts: u32,
    /// Number of links.
    pub links: u32,
    /// True if all its nodes are ready.
    #[serde(default)]
    pub ready: bool,
    /// Number of forwarding guests that are connected to the mux.
    pub guests_connected: u32,
    /// Number of forwarding guests.
    pub guests: u32,
    /// Guaranteed power of its routers, thousandths of a core.
    pub power_millicores: u64,
    /// Names of the FEs that run its forwarding guests, each once.
    pub fes: Vec<String>,
    /// True if some of its processes did not answer in time. Their information is missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
}

/// A vnet: its spec and its status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Vnet {
    /// Name of the vnet.
    pub name: String,
    /// The stored document, `kind: VirtualNetwork`; see `schema/pdp-v1.json`.
    #[schema(schema_with = specs::vnet)]
    pub spec: Value,
    /// Allocations, running processes, and errors.
    pub status: VnetStatus,
}

/// Status of a vnet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VnetStatus {
    /// State of the vnet.
    pub phase: Phase,
    /// Description of what is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// True if all its nodes are ready.
    #[serde(default)]
    pub ready: bool,
    /// Status of its nodes, in the spec's order.
    pub nodes: Vec<NodeStatus>,
    /// Status of its links, in the spec's order.
    pub links: Vec<LinkStatus>,
}

/// Kind of a vnet's node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum NodeType {
    /// A vrouter.
    #[default]
    Router,
    /// A container with an ordinary IP stack.
    Host,
}

/// Status of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Name of the node.
    pub name: String,
    /// Kind of the node.
    pub kind: NodeType,
    /// Kind of its data plane; routers only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_plane: Option<DataPlaneKind>,
    /// Labels from the spec.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// State of the node.
    pub phase: Phase,
    /// Description of what is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Other facts that its user should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// True if the node is as its spec says, all its commands are ready, all commands with `once`
    /// are done, and its forwarding guests are connected.
    #[serde(default)]
    pub ready: bool,
    /// Status of its commands, `exec` last. Empty if the node was started by an older version
    /// without this field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<CommandStatus>,
    /// Guaranteed power, thousandths of a core; routers only. 0: it borrows unused power.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_millicores: Option<u64>,
    /// Process of its control guest, or of the host itself.
    pub control: ProcessStatus,
    /// The helper that serves the node's TAPs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<ProcessStatus>,
    /// The node's route mirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<ProcessStatus>,
    /// The helper for access outside its networks and for its published ports (`management`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management: Option<ProcessStatus>,
    /// Ports of the machine that PdP forwards to the node, as in its spec: `8080:80`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<String>,
    /// Status of its forwarding guests, by number.
    pub guests: Vec<ForwardingGuest>,
    /// Status of the mux's own forwarding, for routers that use it (`fastpath`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineStatus>,
    /// Status of its ports, by index.
    pub ports: Vec<PortStatus>,
    /// Addresses of its `lo` from the spec.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loopback: Vec<String>,
}

impl NodeStatus {
    /// Names the commands, guests and routes that a running node waits for: `ospfd`, `g0`,
    /// `routes`. Names a command that waits for others only if there is nothing else.
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

/// Status of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessStatus {
    /// State of the process.
    pub phase: Phase,
    /// Process id on the machine, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Number of restarts.
    pub restarts: u64,
    /// Reason of the process's last end, or of its failure to start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// True if it did not answer in time. Its information is missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
}

/// Status of the mux's own forwarding for a router.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineStatus {
    /// True if it has a snapshot of its control guest's routes.
    pub synced: bool,
    /// True if its routes equal its control guest's. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes_synced: Option<bool>,
    /// Why the routes can't be equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Status of a forwarding guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForwardingGuest {
    /// Number of the guest in its vrouter.
    pub number: u32,
    /// Name of the FE that runs it.
    pub fe: String,
    /// Guaranteed share of the FE, thousandths of a core.
    pub share_millicores: u64,
    /// True if it is connected to the mux and the mux distributes frames to it.
    pub connected: bool,
    /// True if its routes equal its kernel's. Absent if unknown: its mirror has not answered, or it
    /// takes no routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes_synced: Option<bool>,
    /// Status of the guest's process.
    #[serde(flatten)]
    pub process: ProcessStatus,
}

/// Status of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PortStatus {
    /// Name of the port.
    pub name: String,
    /// MAC address, `02:…`.
    pub mac: String,
    /// Largest IP packet, bytes.
    pub mtu_bytes: u32,
    /// Addresses from the spec.
    pub addresses: Vec<String>,
    /// Name of its link, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// True if its interface has carrier.
    pub carrier: bool,
}

/// Status of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LinkStatus {
    /// Name of the link.
    pub name: String,
    /// Ends of the link: `r1:eth0`, or `A (vxlan 10.9.0.1 > 10.9.0.2 vni 7)` for an external end.
    pub endpoints: Vec<String>,
    /// Path of its frames.
    #[serde(default)]
    pub path: ForwardingPath,
    /// Why its frames go through the mux although an end is a router that the kernel forwards for:
    /// `it has a delay`, `h1 is a host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_reason: Option<String>,
    /// True if its user has set it up (see `link down`).
    pub up: bool,
    /// True if it is down but its ends keep their carrier.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub silent: bool,
    /// True if its ends have carrier. It is up, or down silently; if it has two ends, both exist.
    pub carrier: bool,
    /// Why it does not forward frames, and what to do. For a tunnel also problems of its outer
    /// path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Current egress rate of each end, bits per second. Absent for no limit. If ends differ, the
    /// highest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bps: Option<u64>,
    /// Current impairments as in its spec: `delay 20ms, loss 1%`; listed by end if they differ.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub impairments: String,
    /// Progress of its schedule, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleStatus>,
    /// Queues at its ends, if it has several, as in the spec. An answer lists a network's first
    /// 1,024. `stats` has their counters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStatus>,
}

/// Path of a link's frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum ForwardingPath {
    /// Through the mux.
    #[default]
    Mux,
    /// In the kernel, from one port directly to the other.
    Kernel,
}

impl ForwardingPath {
    /// Word in tables.
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
    /// Egress end, as in `endpoints`.
    pub end: String,
    /// Name of the queue.
    pub name: String,
    /// Weight relative to other queues that have frames.
    pub weight: u32,
    /// Largest number of waiting frames.
    pub frames: u32,
    /// Largest number of waiting bytes. Absent: as many as the frames have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Packet buffers of the mux reserved for the queue.
    #[serde(default, skip_serializing_if = "is_none_set_aside")]
    pub buffers: u32,
    /// DSCPs of the queue's packets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dscp: Vec<u8>,
}

fn is_none_set_aside(buffers: &u32) -> bool {
    *buffers == 0
}

/// Progress of a schedule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleStatus {
    /// Time since the schedule began, milliseconds.
    pub elapsed_ms: u64,
    /// Number of steps.
    pub steps: usize,
    /// Number of steps done.
    pub done: usize,
    /// Time of the next step, milliseconds from the schedule's beginning. Absent if all are done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_ms: Option<u64>,
}

/// The substrate: its spec and its status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SubstrateInfo {
    /// The stored document, `kind: Substrate`, or the default one; absent for a tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = specs::substrate, required = false)]
    pub spec: Option<Value>,
    /// Status of the substrate.
    pub status: SubstrateStatus,
}

/// Status of the substrate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SubstrateStatus {
    /// State of the substrate.
    pub phase: Phase,
    /// Description of what is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The mux.
    pub mux: ProcessStatus,
    /// Power of the mux for fast paths.
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
    /// Available power, thousandths of a core.
    pub capacity_millicores: u64,
    /// Power guaranteed to routers, thousandths of a core. For a tenant: to its own routers.
    pub used_millicores: u64,
}

/// Status of a forwarding engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FeStatus {
    /// Name of the FE.
    pub name: String,
    /// CPUs of the FE, as a list: `0-1,4`.
    pub cpus: String,
    /// Capacity, thousandths of a core.
    pub capacity_millicores: u64,
    /// Power guaranteed to guests, thousandths of a core.
    pub used_millicores: u64,
    /// Guests on it.
    pub guests: Vec<FeGuest>,
}

/// Share of an FE that belongs to a forwarding guest, or to a router that the kernel forwards for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FeGuest {
    /// Name of the vnet.
    pub vnet: String,
    /// Name of the router.
    pub node: String,
    /// Number of the guest in its vrouter; 0 where the kernel forwards.
    pub number: u32,
    /// Guaranteed share, thousandths of a core. 0: it borrows unused power.
    pub share_millicores: u64,
}

/// Status of an external interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExternalStatus {
    /// Name in the substrate.
    pub name: String,
    /// Name of the device, `memif` with the mux's socket, or `generator`.
    pub device: String,
    /// MTU, bytes. Absent while its device is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu_bytes: Option<u32>,
    /// True if the mux receives from it and sends to it.
    pub attached: bool,
    /// True if its device has carrier. Absent if it has no device or the device is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carrier: Option<bool>,
    /// Description of what is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
