//! A virtual network that was checked, with what counts of it where all share something.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use pdp_alloc::{Given, LENT_LOAD_MILLICORES, Share};

use super::management::{self, Published};
use super::outside::{self, Outside};
use crate::link::Link;
use crate::object::{DataPlane, Node, NodeKind, VirtualNetwork};
use crate::remains::{Part, Parts};
use crate::usage::Usage;

/// Virtual networks by name. One that is as before is the same one, by its pointer.
pub type Vnets = BTreeMap<String, Arc<Placed>>;

/// Shares of power by vrouter: a forwarding guest a share, in this order, or the kernel's one.
pub type Shares = BTreeMap<String, Vec<Share>>;

/// A virtual network that was checked, and the power that its vrouters have. It is not changed, but
/// made anew: what is counted of it is counted once.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    vnet: VirtualNetwork,
    shares: Shares,
    sums: Sums,
}

/// What is counted of a virtual network.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sums {
    /// What its nodes take.
    pub(super) usage: Usage,
    /// Length of its spec as JSON.
    pub(super) spec_bytes: u64,
    /// Rates of its links, bits a second, and whether each has one.
    pub(super) rate_bps: u64,
    pub(super) rated: bool,
    /// Images that are unpacked, as [`Node::oci_images`] has them.
    pub(super) images: BTreeSet<(String, Option<String>)>,
    /// The same by its parts.
    pub(super) parts: Parts,
    /// What it has of forwarding engines.
    pub(super) power: Given,
    /// Its guests that borrow on them, as [`pdp_alloc::lend`] counts them.
    pub(super) lent: Given,
    /// What its fast paths are guaranteed of the mux's power, thousandths of a core.
    pub(super) fastpath: u64,
    /// Whether each of its vrouters that take of forwarding engines has a share.
    pub(super) placed: bool,
    /// What it has of external interfaces.
    pub(super) outside: BTreeMap<String, Outside>,
    /// Largest IP packet of an interface, bytes.
    pub(super) mtu: u32,
    /// Ports of the machine that lead into its nodes.
    pub(super) published: Vec<Published>,
}

impl Placed {
    /// Of a virtual network as it came from [`crate::check`], and shares of its vrouters.
    pub fn new(vnet: VirtualNetwork, shares: Shares) -> Self {
        Self { sums: Sums::of(&vnet, &shares), vnet, shares }
    }

    /// Shares of its vrouters.
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// What its nodes take of the machine, with the power that they were given.
    pub fn usage(&self) -> Usage {
        self.sums.usage
    }

    /// What counts of it, by its parts.
    pub fn parts(&self) -> Parts {
        self.sums.parts.clone()
    }

    pub(super) fn sums(&self) -> &Sums {
        &self.sums
    }
}

impl Deref for Placed {
    type Target = VirtualNetwork;

    fn deref(&self) -> &VirtualNetwork {
        &self.vnet
    }
}

impl Sums {
    pub(super) fn of(vnet: &VirtualNetwork, shares: &Shares) -> Self {
        let mut sums = Self {
            // Plain data with string keys: it is always JSON.
            spec_bytes: serde_json::to_string(vnet).map_or(u64::MAX, |text| text.len() as u64),
            rated: vnet.spec.links.iter().all(|link| link.rate_bps_max().is_some()),
            placed: true,
            outside: outside::of(vnet),
            published: management::published(vnet),
            ..Self::default()
        };
        for link in &vnet.spec.links {
            sums.rate_bps = sums.rate_bps.saturating_add(link.rate_bps_max().unwrap_or(0));
        }
        sums.usage.memory_bytes =
            vnet.spec.links.iter().map(Link::mux_bytes).fold(0, u64::saturating_add);
        sums.usage.buffers = vnet.spec.links.iter().map(Link::buffers).sum();
        let links = Part { usage: sums.usage, rate_bps: sums.rate_bps, ..Part::default() };
        sums.parts.insert(String::new(), links);
        let owned = |(path, tag): (&str, Option<&str>)| (path.to_owned(), tag.map(str::to_owned));
        for (name, node) in &vnet.spec.nodes {
            let shares = shares.get(name).map_or(&[][..], Vec::as_slice);
            let usage = node.usage(shares.iter().map(|share| share.millicores));
            sums.usage += usage;
            let images = node.oci_images().map(owned).collect();
            sums.parts.insert(name.clone(), Part { usage, images, rate_bps: 0 });
            let plane = node.data_plane.as_ref().map(DataPlane::needs);
            let asks = node.kind == NodeKind::Router && plane.is_none_or(|it| it.engines.is_some());
            sums.placed &= !asks || !shares.is_empty();
            sums.fastpath += plane.map_or(0, |plane| u64::from(plane.mux_millicores));
            for share in shares {
                *sums.power.entry(share.engine.clone()).or_default() += u64::from(share.millicores);
                if share.millicores == 0 {
                    *sums.lent.entry(share.engine.clone()).or_default() += LENT_LOAD_MILLICORES;
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
