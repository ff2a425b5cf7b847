//! Forwarding guests, and their programs.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    DataPlaneKind, DataPlaneNeeds, EngineDemand, KernelHooks, Plane, PuntFilter, PuntLimits, Punts,
};
use crate::command::Command;
use crate::file::File;
use crate::image::{Image, ImageSource};
use crate::limits::*;
use crate::node_check::NodeCheck;
use crate::path::is_below;
use crate::units::{Bytes, Cores, Hex};

/// The kind of [`Parallel`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ParallelKind {
    /// One or more forwarding guests in parallel.
    #[default]
    Parallel,
}

/// Forwarding guests.
///
/// Forwarding guests run the built-in router or any program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parallel {
    /// Kind.
    pub kind: ParallelKind,
    /// Power guaranteed to all guests together, from engines' `capacity`. Without `borrow`, it is
    /// also the limit. Default: none; 0.1 for tenants or with `borrow: false`. A guest with 0.01
    /// may pause for 0.1 s, with 0.001 for 1 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// Use spare CPU time beyond `power`. Default: `true` without `power`, else `false`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub borrow: Option<bool>,
    /// Number of guests, with equal `power`. Default: as few as possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = GUESTS_MAX))]
    pub guests: Option<u32>,
    /// Divide the part of `power` beyond whole engines if no engine has room for it.
    pub split: bool,
    /// Program of the guests.
    pub program: GuestProgram,
    /// Memory limit per guest.
    pub memory: Bytes,
    /// Processes and threads per guest.
    #[schemars(range(min = 2, max = PROCESSES_MAX))]
    pub processes: u32,
    /// Frames per ring and direction, a power of two. Only for the built-in router and `attach:
    /// runtime`, with 16 MiB of `memory` plus 8 KiB per frame.
    #[schemars(range(min = GUEST_QUEUE_MIN, max = GUEST_QUEUE_MAX))]
    pub queue: u32,
    /// Distribution of frames among the guests.
    pub distribution: Distribution,
    /// Frames to punt without further processing. The first match applies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub punt: Vec<PuntFilter>,
    /// Rate limits of punts, per interface. PdP drops the excess.
    pub punt_limits: PuntLimits,
    /// Treatment of packets that kernel hooks, such as firewalls, may change (docs/dataplane.md).
    pub kernel_hooks: KernelHooks,
}

impl Default for Parallel {
    fn default() -> Self {
        Self {
            kind: ParallelKind::Parallel,
            power: None,
            borrow: None,
            guests: None,
            split: false,
            program: GuestProgram::default(),
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
    /// True if its guests may use spare power of their CPUs.
    pub fn borrows(&self) -> bool {
        self.borrow.unwrap_or(self.power.is_none())
    }

    /// Attachment of the program.
    pub fn attach(&self) -> ProgramAttach {
        match &self.program {
            GuestProgram::BuiltIn(BuiltIn::Router) => ProgramAttach::Runtime,
            GuestProgram::Own(program) => program.attach,
        }
    }

    fn check_queue(&self, check: &mut NodeCheck<'_>) {
        let Self { queue, memory, .. } = *self;
        if !queue.is_power_of_two() {
            let below = 1 << queue.ilog2();
            let hint = format!("use {below} or {}", below * 2);
            let message = format!("queue {queue} is not a power of two");
            check.fault(&["dataPlane", "queue"], message, hint);
        }
        let needs = GUEST_MEMORY_BASE + u64::from(queue) * GUEST_MEMORY_PER_FRAME;
        if memory.0 < needs {
            let needs = Bytes(needs);
            let message = format!("memory {memory} is below the {needs} that queue {queue} needs");
            let hint = format!("set memory to {needs}, or a smaller queue");
            check.fault(&["dataPlane", "memory"], message, hint);
        }
    }
}

impl Plane for Parallel {
    fn name(&self) -> &'static str {
        DataPlaneKind::Parallel.name()
    }

    fn forwarder(&self) -> &'static str {
        "forwarding guests"
    }

    fn needs(&self) -> DataPlaneNeeds<'_> {
        DataPlaneNeeds {
            guests: Some(self),
            engines: Some(EngineDemand {
                power: self.power,
                borrows: self.borrows(),
                shares: self.guests,
                split: self.split,
            }),
            punts: Some(Punts {
                filters: &self.punt,
                limits: &self.punt_limits,
                hooks: self.kernel_hooks,
            }),
            ..DataPlaneNeeds::default()
        }
    }

    fn power_mut(&mut self) -> Option<(&mut Option<Cores>, &mut Option<bool>)> {
        Some((&mut self.power, &mut self.borrow))
    }

    fn guests_mut(&mut self) -> Option<&mut Parallel> {
        Some(self)
    }

    fn check(&self, check: &mut NodeCheck<'_>) {
        check.plane_power(self.power);
        check.memory(&["dataPlane", "memory"], self.memory);
        if let GuestProgram::Own(program) = &self.program {
            check.command(&["dataPlane", "program", "run"], &program.run);
            check.image(&["dataPlane", "program", "image"], &program.image);
            program.check_files(check);
        }
        if self.attach() == ProgramAttach::Runtime {
            self.check_queue(check);
        } else {
            // Both policies need the guest to return each frame.
            let policy = match self.distribution.policy {
                DistributionPolicy::Ordered => Some("ordered"),
                DistributionPolicy::Flowlet => Some("flowlet"),
                DistributionPolicy::Flow
                | DistributionPolicy::RoundRobin
                | DistributionPolicy::Weighted => None,
            };
            if let Some(policy) = policy {
                let hint = "use flow, or a program on the runtime";
                let path = ["dataPlane", "distribution", "policy"];
                check.fault(&path, format!("policy {policy} needs attach: runtime"), hint);
            }
            if self.queue != GUEST_QUEUE_DEFAULT {
                let hint = "remove it: other programs have their own queues";
                check.fault(&["dataPlane", "queue"], "queue needs attach: runtime", hint);
            }
        }
        if let FlowDefinition::Fields(fields) = &self.distribution.flow {
            let path = ["dataPlane", "distribution", "flow"];
            check.too_many(&path, fields.len(), FIELDS_MAX);
            if fields.is_empty() {
                check.fault(&path, "flow has no fields", "give ip, or a list of fields");
            }
            for (index, field) in fields.iter().enumerate() {
                let index = index.to_string();
                check.field(&[&path[..], &[&index]].concat(), field.offset, field.mask.0.len());
            }
            check.fields(&path, fields.iter().map(|field| field.mask.0.len()).sum());
        }
    }
}

/// Program of a forwarding guest: `router`, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant, reason = "one a router, beside much more")]
pub enum GuestProgram {
    /// A program included in PdP.
    BuiltIn(BuiltIn),
    /// A user-supplied program.
    Own(OwnProgram),
}

impl GuestProgram {
    /// The user-supplied program, if it is one.
    pub fn user_program(&self) -> Option<&OwnProgram> {
        match self {
            Self::Own(program) => Some(program),
            Self::BuiltIn(_) => None,
        }
    }

    /// Mutable reference to the same program.
    pub fn own_mut(&mut self) -> Option<&mut OwnProgram> {
        match self {
            Self::Own(program) => Some(program),
            Self::BuiltIn(_) => None,
        }
    }
}

impl Default for GuestProgram {
    fn default() -> Self {
        Self::BuiltIn(BuiltIn::Router)
    }
}

/// Programs included in PdP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BuiltIn {
    /// Forwards IP by the control guest's routes.
    Router,
}

/// A user-supplied program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OwnProgram {
    /// Program and arguments. `{ports}` becomes the router's number of interfaces, `{guest}` the
    /// guest's number, `{cpus}` its engine's CPUs.
    pub run: Command,
    /// Interface of the program (docs/guests.md).
    pub attach: ProgramAttach,
    /// Root file system. Default: the machine's programs.
    #[serde(default)]
    pub image: Image,
    /// Read-only files, by absolute path directly below `/`, or below `/etc`, `/home`, `/opt`,
    /// `/root`, `/run`, `/srv`, `/tmp` or `/var`. With an image: below `/run` or `/tmp`, or in
    /// place of a file. `owner` is a number or `root`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, File>,
}

impl OwnProgram {
    fn check_files(&self, check: &mut NodeCheck<'_>) {
        let key = ["dataPlane", "program", "files"];
        check.too_many(&key, self.files.len(), PROGRAM_FILES_MAX);
        let own_image = !matches!(self.image.source(), ImageSource::Host);
        for (path, file) in &self.files {
            let at = [&key[..], &[path]].concat();
            let below = |place: &&str| is_below(path, place);
            let placed = own_image
                || path.matches('/').count() == 1
                || PROGRAM_FILE_DIRECTORIES.iter().any(below);
            if check.file(&at, path, file) && !placed {
                let message = format!("PdP puts no files at {path}");
                let places = PROGRAM_FILE_DIRECTORIES.join(", ");
                let hint = format!("use a path directly below / or below one of {places}");
                check.fault(&at, message, hint);
            }
            // The root for name look-ups has no accounts of programs.
            let number = |part: &str| part == "root" || part.parse::<u32>().is_ok();
            if !file.owner.split(':').all(number) {
                let message = format!("owner {:?} is not a number", file.owner);
                let hint = "the program runs as user and group 1000";
                check.fault(&[&at[..], &["owner"]].concat(), message, hint);
            }
        }
        let bytes = |file: &File| file.content.as_ref().map_or(0, String::len);
        let bytes: usize = self.files.values().map(bytes).sum();
        if bytes > PROGRAM_FILES_BYTES_MAX {
            let message = format!("files have {bytes} bytes, {PROGRAM_FILES_BYTES_MAX} at most");
            check.fault(&key, message, "put them into an image instead");
        }
    }
}

/// Attachment of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProgramAttach {
    /// PdP's guest runtime.
    Runtime,
    /// One memif connection per interface.
    Memif,
    /// One TAP per interface.
    Tap,
}

/// Distribution of frames among the guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Distribution {
    /// Choice of the guest for each frame (docs/ordering.md). `flowlet` and `ordered` need the
    /// built-in router or `attach: runtime`.
    pub policy: DistributionPolicy,
    /// Bits that define a flow.
    pub flow: FlowDefinition,
}

/// Distribution rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DistributionPolicy {
    /// One guest per flow.
    #[default]
    Flow,
    /// In turn.
    RoundRobin,
    /// In turn, weighted by power.
    Weighted,
    /// One guest per flow at a time, in order.
    Flowlet,
    /// Any guest with room; frames keep their order.
    Ordered,
}

/// `ip`, or fields of the frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum FlowDefinition {
    /// A protocol that PdP knows.
    Known(KnownFlow),
    /// These bits.
    Fields(Vec<FlowField>),
}

impl Default for FlowDefinition {
    fn default() -> Self {
        Self::Known(KnownFlow::Ip)
    }
}

/// Flows that PdP knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KnownFlow {
    /// Addresses, protocol and ports; of other frames, MAC addresses and EtherType.
    Ip,
}

/// Bits of a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FlowField {
    /// Byte offset from the start of the frame.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// Relevant bits; the field has the mask's length.
    pub mask: Hex,
}
