//! Checked virtual networks, with sums of their shared resources.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use pdp_alloc::{AllocatedPower, EngineShare, LENT_LOAD_MILLICORES};

use super::external_use::{ExternalUse, external_use};
use super::published::{Published, published};
use crate::link::Link;
use crate::object::{Node, NodeKind, VirtualNetwork};
use crate::remains::{VnetPart, VnetParts, VnetRemains};
use crate::usage::Usage;

/// Virtual networks by name. Unchanged ones keep their pointers.
pub type Vnets = BTreeMap<String, Arc<PlacedVnet>>;

/// Power shares by vrouter, in order: one per forwarding guest, or the kernel's single one.
pub type PowerShares = BTreeMap<String, Vec<EngineShare>>;

/// A checked virtual network, and the power of its vrouters. It is
/// immutable: changes make a new one, so its sums are computed once.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedVnet {
    vnet: VirtualNetwork,
    shares: PowerShares,
    sums: VnetTotals,
}

/// Sums of a virtual network.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct VnetTotals {
    /// Usage of its nodes.
    pub(super) usage: Usage,
    /// Length of its spec as JSON, bytes.
    pub(super) spec_bytes: u64,
    /// Sum of its link rates, bits per second, and whether each link has one.
    pub(super) rate_bps: u64,
    pub(super) rated: bool,
    /// Unpacked images, as in [`Node::oci_images`].
    pub(super) images: BTreeSet<(String, Option<String>)>,
    /// Sums of each part.
    pub(super) parts: VnetParts,
    /// Guaranteed power from forwarding engines.
    pub(super) power: AllocatedPower,
    /// Load of its borrowing guests, as counted by [`pdp_alloc::lend`].
    pub(super) borrowed: AllocatedPower,
    /// Guarantees of its fast paths from the mux's power, thousandths of a core.
    pub(super) fastpath: u64,
    /// True if each vrouter that needs forwarding engines has a share.
    pub(super) placed: bool,
    /// Use of external interfaces.
    pub(super) outside: BTreeMap<String, ExternalUse>,
    /// Largest IP packet of an interface, bytes.
    pub(super) mtu: u32,
    /// Ports of the machine that its nodes publish.
    pub(super) published: Vec<Published>,
}

impl PlacedVnet {
    /// Takes a virtual network from [`crate::check`], and shares of its vrouters.
    pub fn new(vnet: VirtualNetwork, shares: PowerShares) -> Self {
        Self { sums: VnetTotals::of(&vnet, &shares), vnet, shares }
    }

    /// Shares of its vrouters.
    pub fn shares(&self) -> &PowerShares {
        &self.shares
    }

    /// Usage of its nodes, including their allocated power.
    pub fn usage(&self) -> Usage {
        self.sums.usage
    }

    /// Usage by parts.
    pub fn parts(&self) -> VnetParts {
        self.sums.parts.clone()
    }

    pub(super) fn sums(&self) -> &VnetTotals {
        &self.sums
    }
}

impl VnetRemains {
    /// Notes the resources of a virtual network `before` a change that it no longer has `after` it.
    pub fn note(&mut self, before: &PlacedVnet, after: Option<&PlacedVnet>, now_s: u64) {
        let is_gone = after.is_none();
        let after = after.map(PlacedVnet::parts).unwrap_or_default();
        for (name, part) in before.parts() {
            let beyond = part.beyond(after.get(&name).unwrap_or(&VnetPart::default()));
            // A deleted network counts as a network. Earlier remains may exist besides.
            let is_less = !beyond.is_nothing() || (is_gone && name.is_empty());
            if is_less || self.parts.contains_key(&name) {
                if self.parts.is_empty() {
                    self.since_s = now_s;
                }
                self.parts.entry(name).or_default().raise(part);
            }
        }
    }
}

impl Deref for PlacedVnet {
    type Target = VirtualNetwork;

    fn deref(&self) -> &VirtualNetwork {
        &self.vnet
    }
}

impl VnetTotals {
    pub(super) fn of(vnet: &VirtualNetwork, shares: &PowerShares) -> Self {
        let mut sums = Self {
            // Plain data with string keys: it is always JSON.
            spec_bytes: serde_json::to_string(vnet).map_or(u64::MAX, |text| text.len() as u64),
            rated: vnet.spec.links.iter().all(|link| link.rate_bps_max().is_some()),
            placed: true,
            outside: external_use(vnet),
            published: published(vnet),
            ..Self::default()
        };
        for link in &vnet.spec.links {
            sums.rate_bps = sums.rate_bps.saturating_add(link.rate_bps_max().unwrap_or(0));
        }
        sums.usage.memory_bytes =
            vnet.spec.links.iter().map(Link::mux_bytes).fold(0, u64::saturating_add);
        sums.usage.buffers = vnet.spec.links.iter().map(Link::buffers).sum();
        let links = VnetPart { usage: sums.usage, rate_bps: sums.rate_bps, ..VnetPart::default() };
        sums.parts.insert(String::new(), links);
        let owned = |(path, tag): (&str, Option<&str>)| (path.to_owned(), tag.map(str::to_owned));
        for (name, node) in &vnet.spec.nodes {
            let shares = shares.get(name).map_or(&[][..], Vec::as_slice);
            let usage = node.usage(shares.iter().map(|share| share.millicores));
            sums.usage += usage;
            let images = node.oci_images().map(owned).collect();
            sums.parts.insert(name.clone(), VnetPart { usage, images, rate_bps: 0 });
            let plane = node.data_plane.as_ref().map(|plane| plane.needs());
            let asks = node.kind == NodeKind::Router && plane.is_none_or(|it| it.engines.is_some());
            sums.placed &= !asks || !shares.is_empty();
            sums.fastpath += plane.map_or(0, |plane| u64::from(plane.mux_millicores));
            for share in shares {
                *sums.power.entry(share.engine.clone()).or_default() += u64::from(share.millicores);
                if share.millicores == 0 {
                    *sums.borrowed.entry(share.engine.clone()).or_default() += LENT_LOAD_MILLICORES;
                }
            }
            let mtus = node.interfaces.values().filter_map(|interface| interface.mtu);
            sums.mtu = mtus.fold(sums.mtu, u32::max);
        }
        let images = vnet.spec.nodes.values().flat_map(Node::oci_images);
        sums.images.extend(images.map(owned));
        sums
    }
}
