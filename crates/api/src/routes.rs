use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::Problem;

/// Whose routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RoutesQuery {
    /// Of this forwarding guest; of the control guest's kernel if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<u32>,
    /// Only where kernel and guest (0 if none is named) differ.
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
    Route(RouteRow),
    /// The table is whole.
    End(RouteEnd),
    /// The table is not whole.
    Problem(Problem),
}

/// The end of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteEnd {
    /// Routes before this line.
    pub count: u64,
}

/// A route. For a single table only that side is set; of a difference, the missing side is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteRow {
    /// Destination.
    #[schema(value_type = String)]
    pub prefix: IpNet,
    /// In the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<RouteTarget>,
    /// In the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<RouteTarget>,
}

/// Where a route leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum RouteTarget {
    /// One of these hops, by flow and weight.
    Hops(Vec<RouteHop>),
    /// To the control guest's kernel.
    Punt,
    /// Dropped silently.
    Drop,
}

/// As `ip route` would say it.
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

/// One next hop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteHop {
    /// Name of the port by which it is reached.
    pub port: String,
    /// The gateway; absent where the destination is on the link itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gateway: Option<IpAddr>,
    /// Share of the flows, 1..=65535.
    pub weight: u16,
}
