//! Static routes of a node, as they are written.

use std::net::IpAddr;

use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::{HOP_WEIGHT_MAX, MTU_MAX, MTU_MIN};
use crate::units::Destination;

/// A static route. What is not said is as `ip route add` has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StaticRoute {
    /// Where to: a prefix, an address, or `default`, of the family of its next hop.
    pub to: Destination,
    /// What becomes of packets.
    #[serde(default, rename = "type", skip_serializing_if = "RouteKind::is_unicast")]
    pub kind: RouteKind,
    /// The next hop, or a list of several among which flows are shared out. One of IPv4 may have an IPv6
    /// address. Not given: the destination is on the link of `dev` itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// Interface that it goes out by. Not given: the one in whose subnet the next hop is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// Takes the next hop to be on the link of `dev` whatever addresses that has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub onlink: bool,
    /// The lower, the better. Not given: 0 of IPv4, 1024 of IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<u32>,
    /// Table that it is in. Not given: `main`, 254, the one that forwarding guests follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub table: Option<u32>,
    /// Address, one of the node's own, that packets of its own programs get as their source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub src: Option<IpAddr>,
    /// Largest IP packet by this route, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = MTU_MIN, max = MTU_MAX))]
    pub mtu: Option<u32>,
    /// How far the destination is; of IPv4. Not given: `global` with a next hop, else `link`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<RouteScope>,
}

impl StaticRoute {
    /// Its next hops, or the interface alone that it goes out by; none of routes that go nowhere.
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
                    Hop::Address(via) => one(Some(*via)),
                    Hop::Weighted(hop) => NextHop {
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

    /// The prefix that it is for; `None` where it is `default` and has no next hop that says of which family.
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

/// A next hop, with what it has of its route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// Its address; none: the destination is on the link.
    pub via: Option<IpAddr>,
    /// Interface that it goes out by.
    pub dev: Option<String>,
    /// On the link whatever addresses the interface has.
    pub onlink: bool,
    /// Its part beside others.
    pub weight: u32,
}

/// One next hop, or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Via {
    /// One.
    One(IpAddr),
    /// Several.
    Several(Vec<Hop>),
}

/// One of several next hops: its address, or a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Hop {
    /// Its address.
    Address(IpAddr),
    /// With more.
    Weighted(WeightedHop),
}

/// One of several next hops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WeightedHop {
    /// Its address. Not given: the destination is on the link of `dev` itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<IpAddr>,
    /// Interface that it goes out by. Not given: the route's `dev`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// Takes the next hop to be on the link of `dev` whatever addresses that has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub onlink: bool,
    /// Its part beside the others.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = HOP_WEIGHT_MAX))]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

/// What becomes of packets by a route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouteKind {
    /// They go to the next hop.
    #[default]
    Unicast,
    /// They are dropped without a word.
    Blackhole,
    /// They are dropped, and who sent them is told that the destination is unreachable.
    Unreachable,
    /// They are dropped, and who sent them is told that it is prohibited.
    Prohibit,
    /// The table is left as if it had no route.
    Throw,
}

impl RouteKind {
    fn is_unicast(&self) -> bool {
        *self == Self::Unicast
    }
}

/// How far a destination is.
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
