//! Static routes of a node, as written in specs.

use std::net::IpAddr;

use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{HOP_WEIGHT_MAX, MTU_MAX, MTU_MIN};
use crate::units::Destination;

/// A static route. Defaults are those of `ip route add`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StaticRoute {
    /// Destination. `default` has the next hop's IP version.
    pub to: Destination,
    /// Action on packets.
    #[serde(default, rename = "type", skip_serializing_if = "RouteKind::is_unicast")]
    pub kind: RouteKind,
    /// Next hop, or a list to distribute flows over. IPv4 routes may have IPv6 next hops. Default:
    /// directly on `dev`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// Egress interface. Default: the one with the next hop's subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// The next hop is on `dev`, even outside its subnets.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub onlink: bool,
    /// Lower is better. Default: 0 for IPv4, 1024 for IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<u32>,
    /// Routing table. Default: 254 (`main`), which forwarding guests follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub table: Option<u32>,
    /// Source address of the node's own packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub src: Option<IpAddr>,
    /// Largest IP packet, in bytes. Default: the interface's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = MTU_MIN, max = MTU_MAX))]
    pub mtu: Option<u32>,
    /// Distance; IPv4 only. Default: `global` with a next hop, else `link`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<RouteScope>,
}

impl StaticRoute {
    /// Returns its next hops, or only the egress interface. Empty if the route has neither.
    pub fn hops(&self) -> Vec<NextHop> {
        let one = |via: Option<IpAddr>| NextHop {
            via,
            dev: self.dev.clone(),
            onlink: self.onlink,
            weight: 1,
        };
        match &self.via {
            Some(Via::One(via)) => vec![one(Some(*via))],
            Some(Via::Several(hops)) => hops
                .iter()
                .map(|hop| match hop {
                    MultipathHop::Address(via) => one(Some(*via)),
                    MultipathHop::Weighted(hop) => NextHop {
                        via: hop.via,
                        dev: hop.dev.clone().or(self.dev.clone()),
                        onlink: hop.onlink || self.onlink,
                        weight: hop.weight,
                    },
                })
                .collect(),
            None if self.dev.is_some() => vec![one(None)],
            None => Vec::new(),
        }
    }

    /// Returns its prefix. `None` for `default` without a next hop that tells the IP version.
    pub fn prefix(&self) -> Option<IpNet> {
        match self.to {
            Destination::Prefix(prefix) => Some(prefix),
            Destination::Default => {
                let via = self.hops().iter().find_map(|hop| hop.via)?;
                Some(Destination::default_of(via.is_ipv4()))
            }
        }
    }
}

/// A next hop, with the values that it takes from its route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// Address; `None`: the destination is on the link.
    pub via: Option<IpAddr>,
    /// Egress interface.
    pub dev: Option<String>,
    /// True if it is on the link, whatever addresses the interface has.
    pub onlink: bool,
    /// Weight among several next hops.
    pub weight: u32,
}

/// One next hop, or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Via {
    /// One.
    One(IpAddr),
    /// Several.
    Several(Vec<MultipathHop>),
}

/// One of several next hops: its address, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum MultipathHop {
    /// Address only.
    Address(IpAddr),
    /// Address with options.
    Weighted(WeightedHop),
}

/// One of several next hops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WeightedHop {
    /// Address. Default: directly on `dev`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<IpAddr>,
    /// Egress interface. Default: the route's `dev`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// The next hop is on `dev`, even outside its subnets.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub onlink: bool,
    /// Weight among the next hops.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = HOP_WEIGHT_MAX))]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

/// Action on packets of a route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouteKind {
    /// Forward (default).
    #[default]
    Unicast,
    /// Drop.
    Blackhole,
    /// Reject as unreachable.
    Unreachable,
    /// Reject as prohibited.
    Prohibit,
    /// Continue with the next table.
    Throw,
}

impl RouteKind {
    fn is_unicast(&self) -> bool {
        *self == Self::Unicast
    }
}

/// Distance of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouteScope {
    /// Anywhere.
    Global,
    /// On the link.
    Link,
    /// The node itself.
    Host,
}
