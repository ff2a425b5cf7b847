//! Resources that may still exist of deleted virtual
//! networks, and of nodes that were deleted or reduced.
//!
//! Quotas count what exists. The daemon stores a change before the machine follows
//! it, and a removal may take long or fail. So the daemon notes the maximum usage
//! of each changed node when it stores the change. This usage counts in addition
//! to the desired state until the daemon knows that it is gone.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::usage::Usage;

/// One part of a virtual network: a node, or its links under the empty name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VnetPart {
    /// Resources of the machine that it uses.
    pub usage: Usage,
    /// Sum of link rates, bits per second.
    pub rate_bps: u64,
    /// Images unpacked for it, by path or name, and reference or digest.
    pub images: BTreeSet<(String, Option<String>)>,
}

/// Parts by node name; the links under the empty name.
pub type VnetParts = BTreeMap<String, VnetPart>;

/// Resources of a virtual network that may still exist beyond its desired state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VnetRemains {
    /// Time when the first of these changes was stored, seconds since 1970.
    pub since_s: u64,
    /// Maximum usage of each part since then.
    pub parts: VnetParts,
}

/// Remains by virtual network.
pub type RemainsByVnet = BTreeMap<String, VnetRemains>;

impl VnetPart {
    /// Returns what this part uses beyond the other.
    pub fn beyond(&self, other: &Self) -> Self {
        Self {
            usage: self.usage.combine(other.usage, u64::saturating_sub),
            rate_bps: self.rate_bps.saturating_sub(other.rate_bps),
            images: self.images.difference(&other.images).cloned().collect(),
        }
    }

    /// True if it uses nothing.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn raise(&mut self, other: Self) {
        self.usage = self.usage.combine(other.usage, u64::max);
        self.rate_bps = self.rate_bps.max(other.rate_bps);
        self.images.extend(other.images);
    }
}

impl VnetRemains {
    /// Returns what counts in addition to the desired parts.
    pub fn beyond<'a>(&'a self, desired: &'a VnetParts) -> impl Iterator<Item = VnetPart> + 'a {
        let none = VnetPart::default();
        self.parts.iter().map(move |(name, part)| part.beyond(desired.get(name).unwrap_or(&none)))
    }
}
