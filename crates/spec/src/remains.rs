//! What may still be there of virtual networks that were deleted, or of their nodes that were deleted or made smaller.
//!
//! Quotas count what exists. A change is stored before the machine follows it, and a removal may take long or fail. So
//! the most that each changed node took is noted when the change is stored, and counts beside what is wanted until the
//! daemon knows that it is gone.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::check::Placed;
use crate::usage::Usage;

/// One part of a virtual network: a node, or its links under the empty name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// What it takes of the machine.
    pub usage: Usage,
    /// Rates of links, bits a second.
    pub rate_bps: u64,
    /// Images that are unpacked for it, by path or name, and reference or digest.
    pub images: BTreeSet<(String, Option<String>)>,
}

/// Parts by name of node; the links under the empty name.
pub type Parts = BTreeMap<String, Part>;

/// What may still be there of a virtual network beside what is wanted of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Remains {
    /// When the first of these changes was stored, seconds since 1970.
    pub since_s: u64,
    /// The most that each part took since then.
    pub parts: Parts,
}

/// Remains by virtual network.
pub type AllRemains = BTreeMap<String, Remains>;

impl Part {
    /// What this one takes beyond the other.
    pub fn beyond(&self, other: &Self) -> Self {
        Self {
            usage: self.usage.combine(other.usage, u64::saturating_sub),
            rate_bps: self.rate_bps.saturating_sub(other.rate_bps),
            images: self.images.difference(&other.images).cloned().collect(),
        }
    }

    /// Whether it takes nothing.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    fn raise(&mut self, other: Self) {
        self.usage = self.usage.combine(other.usage, u64::max);
        self.rate_bps = self.rate_bps.max(other.rate_bps);
        self.images.extend(other.images);
    }
}

impl Remains {
    /// Notes what a virtual network was `before` a change, as far as it is less or gone `after` it.
    pub fn note(&mut self, before: &Placed, after: Option<&Placed>, now_s: u64) {
        let is_gone = after.is_none();
        let after = after.map(Placed::parts).unwrap_or_default();
        for (name, part) in before.parts() {
            let beyond = part.beyond(after.get(&name).unwrap_or(&Part::default()));
            // One that is gone counts as a network, and what was noted earlier may be there beside.
            let is_less = !beyond.is_nothing() || (is_gone && name.is_empty());
            if is_less || self.parts.contains_key(&name) {
                if self.parts.is_empty() {
                    self.since_s = now_s;
                }
                self.parts.entry(name).or_default().raise(part);
            }
        }
    }

    /// What counts beside the parts that are wanted.
    pub fn beyond<'a>(&'a self, wanted: &'a Parts) -> impl Iterator<Item = Part> + 'a {
        let none = Part::default();
        self.parts.iter().map(move |(name, part)| part.beyond(wanted.get(name).unwrap_or(&none)))
    }
}
