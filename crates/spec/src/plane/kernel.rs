//! Kernel routers: the control guest's kernel forwards.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DataPlaneKind, DataPlaneNeeds, EngineDemand, Plane};
use crate::node_check::NodeCheck;
use crate::units::Cores;

/// The kind of [`Kernel`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KernelKind {
    /// The control guest's kernel forwards.
    #[default]
    Kernel,
}

/// The control guest's kernel forwards.
///
/// The control guest's kernel forwards, with all features of Linux (docs/kernel.md).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Kernel {
    /// Kind.
    pub kind: KernelKind,
    /// Power guaranteed for forwarding, from one engine's `capacity`. Without `borrow`, it is also
    /// the limit. Default: none; 0.1 for tenants or with `borrow: false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Cores>,
    /// Use spare CPU time beyond `power`. Default: `true` without `power`, else `false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub borrow: Option<bool>,
    /// Path of packets that are only routed.
    #[serde(default)]
    pub kernel_hooks: XdpBypass,
}

impl Kernel {
    /// True if it may use spare power of its engine's CPUs.
    pub fn borrows(&self) -> bool {
        self.borrow.unwrap_or(self.power.is_none())
    }
}

impl Plane for Kernel {
    fn name(&self) -> &'static str {
        DataPlaneKind::Kernel.name()
    }

    fn forwarder(&self) -> &'static str {
        "its control guest's kernel"
    }

    fn needs(&self) -> DataPlaneNeeds<'_> {
        DataPlaneNeeds {
            engines: Some(EngineDemand {
                power: self.power,
                borrows: self.borrows(),
                shares: Some(1),
                split: false,
            }),
            kernel: Some(self.kernel_hooks),
            ..DataPlaneNeeds::default()
        }
    }

    fn power_mut(&mut self) -> Option<(&mut Option<Cores>, &mut Option<bool>)> {
        Some((&mut self.power, &mut self.borrow))
    }

    fn check(&self, check: &mut NodeCheck<'_>) {
        check.plane_power(self.power);
    }
}

/// Path of packets that a namespace only routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum XdpBypass {
    /// XDP bypass, unless hooks apply.
    #[default]
    Follow,
    /// Whole network stack.
    Strict,
}
