use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::Problem;

/// Selects routes of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RoutesQuery {
    /// Routes of this forwarding guest. Absent: those of the control guest's kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<u32>,
    /// Only differences between the kernel and the guest (guest 0 if none is given).
    #[serde(default)]
    pub diff: bool,
    /// Only routes that cover or are inside this prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<String>)]
    pub within: Option<IpNet>,
}

/// One line of the answer: any number of `route`, then one `end` or `problem`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum RouteLine {
    /// A route.
    Route(RouteEntry),
    /// End of a complete table.
    End(RouteEnd),
    /// Cause why the table is incomplete.
    Problem(Problem),
}

/// End of a complete table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteEnd {
    /// Number of routes before this line.
    pub count: u64,
}

/// A route. In a single table only that side is set. In a comparison, a side without the route is
/// absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteEntry {
    /// Destination prefix.
    #[schema(value_type = String)]
    pub prefix: IpNet,
    /// Target in the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<RouteTarget>,
    /// Target in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<RouteTarget>,
}

/// Target of a route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum RouteTarget {
    /// One of these next hops, chosen by flow and weight.
    Hops(Vec<RouteHop>),
    /// The control guest's kernel.
    Punt,
    /// Silent drop.
    Drop,
}

/// Formats the target as `ip route` does.
impl fmt::Display for RouteTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hops = match self {
            Self::Punt => return f.write_str("punt"),
            Self::Drop => return f.write_str("blackhole"),
            Self::Hops(hops) => hops,
        };
        let weighted = hops.len() > 1;
        for (index, hop) in hops.iter().enumerate() {
            f.write_str(if index > 0 { " " } else { "" })?;
            f.write_str(if weighted { "nexthop " } else { "" })?;
            if let Some(gateway) = hop.gateway {
                write!(f, "via {gateway} ")?;
            }
            write!(f, "dev {}", hop.port)?;
            if weighted {
                write!(f, " weight {}", hop.weight)?;
            }
        }
        Ok(())
    }
}

/// One weighted next hop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteHop {
    /// Name of the egress port.
    pub port: String,
    /// Address of the gateway. Absent if the destination is on-link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gateway: Option<IpAddr>,
    /// Relative share of the flows, 1..=65535.
    pub weight: u16,
}
