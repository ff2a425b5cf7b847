//! What there is, as the daemon reports it with an object.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Cores;

/// State of a substrate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SubstrateStatus {
    /// External interfaces by name.
    pub interfaces: BTreeMap<String, InterfaceStatus>,
    /// Forwarding engines by name.
    pub forwarding_engines: BTreeMap<String, EngineStatus>,
    /// What holds and what doesn't.
    pub conditions: Vec<Condition>,
    /// What went wrong, for people; empty when all is well.
    pub problems: Vec<String>,
}

/// State of an external interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct InterfaceStatus {
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Administratively up and with carrier.
    pub up: bool,
}

/// State of a forwarding engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineStatus {
    /// Power that it has.
    pub capacity: Cores,
    /// Power that is given away.
    pub used: Cores,
    /// Guests on it.
    pub guests: u32,
}

/// State of a virtual network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualNetworkStatus {
    /// In one word.
    pub phase: Phase,
    /// Nodes by name.
    pub nodes: BTreeMap<String, NodeStatus>,
    /// What holds and what doesn't.
    pub conditions: Vec<Condition>,
    /// What went wrong, for people; empty when all is well.
    pub problems: Vec<String>,
}

/// State in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Being brought up.
    #[default]
    Pending,
    /// All of it runs.
    Ready,
    /// Some of it doesn't.
    Degraded,
    /// None of it does.
    Failed,
}

/// State of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// In one word.
    pub phase: Phase,
    /// Process id of the control guest's or host's first process.
    pub pid: Option<u32>,
    /// Times that its container was started again.
    pub restarts: u32,
    /// Forwarding guests, by number from 0.
    pub guests: Vec<GuestStatus>,
}

/// State of a forwarding guest, and the power that it was given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GuestStatus {
    /// Its number in its vrouter.
    pub number: u32,
    /// The forwarding engine that it runs on.
    pub engine: String,
    /// Its share of the engine.
    pub power: Cores,
    /// In one word.
    pub phase: Phase,
    /// Process id of its first process.
    pub pid: Option<u32>,
    /// Times that it was started again.
    pub restarts: u32,
}

/// Something that holds or doesn't.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// What: `Allocated`, `Running`, `RoutesMirrored`, ….
    #[serde(rename = "type")]
    pub kind: String,
    /// Whether it holds.
    pub status: bool,
    /// Why, in one word for programs.
    pub reason: String,
    /// Why, for people.
    pub message: String,
}
