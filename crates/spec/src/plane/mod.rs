//! Data planes of routers: each kind has a file, and a line in `kinds!`.
//!
//! Everything else that differs between kinds is in their implementation of [`Plane`]. Checks,
//! allocation, accounting, planning and status see no kind, only this trait (a test refuses a
//! comparison with a kind elsewhere).

mod fastpath;
mod kernel;
mod parallel;
#[cfg(test)]
mod pretend;

use std::fmt;
use std::ops::{Deref, DerefMut};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::frame_limit::FrameLimit;
use crate::limits::*;
use crate::node_check::NodeCheck;
use crate::units::{Cores, Hex};

pub use fastpath::*;
pub use kernel::*;
pub use parallel::*;
#[cfg(test)]
use pretend::Pretend;

/// Defines [`DataPlane`] and [`DataPlaneKind`] from one list, with a line for each kind: its type,
/// and its word in `kind`.
macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $(#[cfg($when:meta)])? $kind:ident = $name:literal,)+) => {
        /// Data plane of a router, by `kind`. Default: `parallel`.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[serde(untagged)]
        #[allow(clippy::large_enum_variant, reason = "one a router, beside much more")]
        pub enum DataPlane {
            $($(#[doc = $doc])+ $(#[cfg($when)])? $kind($kind),)+
        }

        /// Kind of a router's `dataPlane` in the spec: the part that forwards its packets.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
        #[serde(rename_all = "camelCase")]
        pub enum DataPlaneKind {
            $($(#[doc = $doc])+ $(#[cfg($when)])? $kind,)+
        }

        impl DataPlane {
            /// Returns its kind.
            pub fn kind(&self) -> DataPlaneKind {
                match self {
                    $($(#[cfg($when)])? Self::$kind(_) => DataPlaneKind::$kind,)+
                }
            }
        }

        impl DataPlaneKind {
            /// Word in JSON, in tables and in specs.
            pub fn name(self) -> &'static str {
                match self {
                    $($(#[cfg($when)])? Self::$kind => $name,)+
                }
            }
        }

        impl Deref for DataPlane {
            type Target = dyn Plane;

            fn deref(&self) -> &Self::Target {
                match self {
                    $($(#[cfg($when)])? Self::$kind(plane) => plane,)+
                }
            }
        }

        impl DerefMut for DataPlane {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $($(#[cfg($when)])? Self::$kind(plane) => plane,)+
                }
            }
        }
    };
}

kinds! {
    /// Forwarding guests forward.
    Parallel = "parallel",
    /// The mux forwards.
    Fastpath = "fastpath",
    /// The control guest's kernel forwards.
    Kernel = "kernel",
    /// A test's own.
    #[cfg(test)]
    Pretend = "pretend",
}

impl Default for DataPlane {
    fn default() -> Self {
        Self::Parallel(Parallel::default())
    }
}

/// A kind of data plane, with its settings.
pub trait Plane: fmt::Debug {
    /// Word in `kind`.
    fn name(&self) -> &'static str;

    /// Part that forwards, for messages: `its data plane is …`.
    fn forwarder(&self) -> &'static str;

    /// Returns the resources that it needs.
    fn needs(&self) -> DataPlaneNeeds<'_>;

    /// Mutable references to its keys `power` and `borrow`, if they apply to forwarding engines.
    fn power_mut(&mut self) -> Option<(&mut Option<Cores>, &mut Option<bool>)> {
        None
    }

    /// Mutable reference to its forwarding guests' settings, if it has any.
    fn guests_mut(&mut self) -> Option<&mut Parallel> {
        None
    }

    /// Checks keys that its needs do not show, and reports all faults.
    fn check(&self, _check: &mut NodeCheck<'_>) {}
}

/// Resources of a data plane besides its control guest and ports. Planning,
/// accounting and allocation see no other difference between the kinds.
#[derive(Clone, Copy, Debug, Default)]
pub struct DataPlaneNeeds<'a> {
    /// Forwarding guests, if it has any.
    pub guests: Option<&'a Parallel>,
    /// Demand on forwarding engines, if any.
    pub engines: Option<EngineDemand>,
    /// True if the mux itself follows the control guest's routes.
    pub mux_routes: bool,
    /// Numbers of filters and counters that programs of
    /// the control guest may use in the mux, if any.
    pub slowpath: Option<(u32, u32)>,
    /// Fields that the mux matches and changes, if it does not forward by routes.
    pub fields: Option<&'a FastpathFields>,
    /// Guaranteed part of the mux's power, thousandths of a core; 0: none.
    pub mux_millicores: u32,
    /// Frames to punt to the control guest; a route mirror serves
    /// all others. `None` if the control guest's kernel forwards everything.
    pub punts: Option<Punts<'a>>,
    /// Path of packets that are only routed, if the control guest's kernel forwards
    /// with a share of an engine. Its links may then stay in the kernel.
    pub kernel: Option<XdpBypass>,
}

/// Demand for processing power of forwarding engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineDemand {
    /// Total guarantee. `None`: no guarantee, only spare power.
    pub power: Option<Cores>,
    /// True if it may also use spare power.
    pub borrows: bool,
    /// Number of shares; `None`: as few as possible.
    pub shares: Option<u32>,
    /// True if the remainder beyond whole engines may be divided among several.
    pub split: bool,
}

/// Frames that a vrouter punts to its control guest, where something else forwards.
#[derive(Clone, Copy, Debug)]
pub struct Punts<'a> {
    /// Filters for frames that are punted without further processing.
    pub filters: &'a [PuntFilter],
    /// Rate limits of punts.
    pub limits: &'a PuntLimits,
    /// Treatment of packets that the kernel's hooks may handle differently.
    pub hooks: KernelHooks,
}

/// Treatment of packets that the control guest's kernel may handle differently from the data plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KernelHooks {
    /// Punt them (class `hook`).
    #[default]
    Strict,
    /// Forward them without the hooks.
    Ignore,
}

/// Frames to punt to the control guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PuntFilter {
    /// Conditions that must all hold.
    #[serde(rename = "match")]
    pub matches: Vec<ByteMatch>,
    /// Class of `puntLimits`.
    pub class: PuntClass,
}

/// Bytes that a frame must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ByteMatch {
    /// Byte offset from the start of the frame.
    #[schemars(range(max = MTU_MAX))]
    pub offset: u16,
    /// Expected bytes, after masking.
    pub value: Hex,
    /// Relevant bits, as long as `value`. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<Hex>,
}

/// Class of punted frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PuntClass {
    /// Local.
    Local,
    /// Neighbour.
    Neighbour,
    /// Exception.
    Exception,
    /// Hook.
    Hook,
    /// Control.
    Control,
}

/// Rate limits of punts by class, per interface.
///
/// Classes of punted packets (docs/guests.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PuntLimits {
    /// Other packets for the router itself.
    pub local: FrameLimit,
    /// ARP, neighbour discovery, packets to unknown MAC addresses.
    pub neighbour: FrameLimit,
    /// Packets without a route, with an expired TTL or IP options, or too big.
    pub exception: FrameLimit,
    /// Packets that the kernel forwards, such as into tunnels.
    pub hook: FrameLimit,
    /// Packets for the router with DSCP CS6 or CS7, and LLC frames (IS-IS).
    pub control: FrameLimit,
}

impl Default for PuntLimits {
    fn default() -> Self {
        let pps = |pps| FrameLimit { rate: None, pps: Some(pps) };
        Self {
            local: pps(100_000),
            neighbour: pps(1_000),
            exception: pps(1_000),
            hook: pps(100_000),
            control: pps(20_000),
        }
    }
}
