//! Queries to the host's kernel, and its notifications.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;

use pdp_netlink::{Netlink, Request, address, attributes, family, is_v6, u16_at, u32_at};

/// Interface index, local and remote address.
pub type TunnelEndpoints = (u32, IpAddr, IpAddr);

/// Notification groups. Each set has its own socket, so that losses in one do not affect the other.
pub(super) const NEIGHBOURS: [u32; 1] = [libc::RTNLGRP_NEIGH];
pub(super) const OTHERS: [u32; 8] = [
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV4_RULE,
    libc::RTNLGRP_IPV6_IFADDR,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV6_RULE,
    libc::RTNLGRP_NEXTHOP,
];

/// The attribute of a route's metrics that is its MTU (linux/rtnetlink.h).
const RTAX_MTU: u16 = 2;

/// The kernel's route to a remote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteRoute {
    /// The next hop's address, of either family.
    pub(super) gateway: IpAddr,
    /// Path MTU, if it is below the device's or the route has its own.
    pub(super) mtu: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnderlayLink {
    pub(super) up: bool,
    pub(super) carrier: bool,
    /// Longest IP packet, bytes.
    pub(super) mtu: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnderlayNeighbour {
    Known([u8; 6]),
    Failed,
}

pub(super) type UnderlayNeighbours = HashMap<(u32, IpAddr), UnderlayNeighbour>;

/// Queries to the kernel, one at a time.
pub(super) struct Query(Netlink);

impl Query {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(Netlink::routing()?))
    }

    /// All known neighbours, and those that did not answer.
    pub(super) fn neighbours(&mut self) -> io::Result<UnderlayNeighbours> {
        let mut request = Request::new(libc::RTM_GETNEIGH, 0, &[0; 12]);
        let all = self.0.list(&mut request, |message| {
            let (by, neighbour) = neighbour(message.payload)?;
            Some((by, neighbour?))
        })?;
        Ok(all.into_iter().collect())
    }

    pub(super) fn links(&mut self) -> io::Result<HashMap<u32, UnderlayLink>> {
        let mut request = Request::new(libc::RTM_GETLINK, 0, &[0; 16]);
        Ok(self.0.list(&mut request, |message| link(message.payload))?.into_iter().collect())
    }

    /// The route for packets to `remote` by the interface, if there is one.
    pub(super) fn route(
        &mut self,
        (ifindex, local, remote): TunnelEndpoints,
    ) -> Option<RemoteRoute> {
        let bits = if remote.is_ipv4() { 32 } else { 128 };
        let mut header = [family(remote.is_ipv6()), bits, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        if remote.is_ipv4() {
            // IPv6 always reports the table, and refuses this flag.
            header[8..].copy_from_slice(&libc::RTM_F_LOOKUP_TABLE.to_ne_bytes());
        }
        let mut request = Request::new(libc::RTM_GETROUTE, 0, &header);
        request.address(libc::RTA_DST, remote).address(libc::RTA_SRC, local);
        request.number(libc::RTA_OIF, ifindex);
        self.0.query(&mut request, |answer| route_by(answer.payload, ifindex, remote)).ok()?
    }
}

/// A neighbour's interface and address, and its state if known.
pub(super) fn neighbour(payload: &[u8]) -> Option<((u32, IpAddr), Option<UnderlayNeighbour>)> {
    is_v6(*payload.first()?)?;
    let ifindex = u32_at(payload, 4)?;
    let (mut remote, mut mac) = (None, None);
    for (kind, value) in attributes(payload.get(12..)?) {
        match kind {
            libc::NDA_DST => remote = address(value),
            libc::NDA_LLADDR => mac = value.try_into().ok(),
            _ => {}
        }
    }
    let neighbour = match u16_at(payload, 8)? {
        libc::NUD_STALE
        | libc::NUD_REACHABLE
        | libc::NUD_DELAY
        | libc::NUD_PROBE
        | libc::NUD_PERMANENT
        | libc::NUD_NOARP => mac.map(UnderlayNeighbour::Known),
        libc::NUD_FAILED => Some(UnderlayNeighbour::Failed),
        _ => None,
    };
    Some(((ifindex, remote?), neighbour))
}

/// An interface's index and state. `None` for a bridge's view of its port.
pub(super) fn link(payload: &[u8]) -> Option<(u32, UnderlayLink)> {
    if *payload.first()? != libc::AF_UNSPEC as u8 {
        return None;
    }
    let flags = u32_at(payload, 8)? as i32;
    let mut mtus = attributes(payload.get(16..)?).filter(|(kind, _)| *kind == libc::IFLA_MTU);
    let link = UnderlayLink {
        up: flags & libc::IFF_UP != 0,
        carrier: flags & libc::IFF_LOWER_UP != 0,
        mtu: mtus.next().and_then(|(_, mtu)| u32_at(mtu, 0)).unwrap_or(u32::MAX),
    };
    Some((u32_at(payload, 4)?, link))
}

/// Returns a route to `remote` if it uses `ifindex`. Its next hop is the remote itself if that is
/// on the link. The next hop may be of the other family (RFC 8950).
fn route_by(payload: &[u8], ifindex: u32, remote: IpAddr) -> Option<RemoteRoute> {
    let mut found = RemoteRoute { gateway: remote, mtu: None };
    let mut by = None;
    for (kind, value) in attributes(payload.get(12..)?) {
        match kind {
            libc::RTA_GATEWAY => found.gateway = address(value)?,
            libc::RTA_VIA => found.gateway = address(value.get(2..)?)?,
            libc::RTA_METRICS => {
                let mut mtus = attributes(value).filter(|(kind, _)| *kind == RTAX_MTU);
                found.mtu = mtus.next().and_then(|(_, mtu)| u32_at(mtu, 0));
            }
            libc::RTA_OIF => by = u32_at(value, 0),
            // Without any route by the interface, IPv4 assumes that the address is on its link.
            libc::RTA_TABLE if u32_at(value, 0) == Some(0) => return None,
            _ => {}
        }
    }
    (by == Some(ifindex)).then_some(found)
}
