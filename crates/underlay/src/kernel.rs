//! Queries to the host's kernel, and its notifications, by netlink (RFC 3549).

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

use super::TunnelEndpoints;

/// RTNLGRP_NEIGH; and _LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV4_RULE,
/// _IPV6_IFADDR, _IPV6_ROUTE, _IPV6_RULE, _NEXTHOP. Each set has its
/// own socket, so that losses in one do not affect the other.
pub(super) const NEIGHBOURS: [u32; 1] = [3];
pub(super) const OTHERS: [u32; 8] = [1, 5, 7, 8, 9, 11, 19, 32];

/// RTM_NEWLINK, _DELLINK, _NEWNEIGH, _DELNEIGH.
pub(super) const LINKS_AND_NEIGHBOURS: [u16; 4] = [16, 17, 28, 29];

/// RTM_NEWADDR, _DELADDR.
pub(super) const ADDRESSES: [u16; 2] = [20, 21];

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

/// Makes a socket for notifications of these groups.
pub(super) fn monitor(groups: &[u32]) -> io::Result<Socket> {
    let mut monitor = Socket::new(NETLINK_ROUTE)?;
    monitor.bind_auto()?;
    for group in groups {
        monitor.add_membership(*group)?;
    }
    monitor.set_non_blocking(true)?;
    Ok(monitor)
}

/// Queries to the kernel, one at a time.
pub(super) struct Query {
    socket: Socket,
}

impl Query {
    pub(super) fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket })
    }

    /// All known neighbours, and those that did not answer.
    pub(super) fn neighbours(&mut self) -> io::Result<UnderlayNeighbours> {
        let mut all = UnderlayNeighbours::new();
        let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        self.ask(request, NLM_F_REQUEST | NLM_F_DUMP, |answer| {
            if let RouteNetlinkMessage::NewNeighbour(message) = answer
                && let Some((by, Some(neighbour))) = neighbour(&message)
            {
                all.insert(by, neighbour);
            }
        })?;
        Ok(all)
    }

    pub(super) fn links(&mut self) -> io::Result<HashMap<u32, UnderlayLink>> {
        let mut all = HashMap::new();
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        self.ask(request, NLM_F_REQUEST | NLM_F_DUMP, |answer| {
            if let RouteNetlinkMessage::NewLink(message) = answer {
                all.insert(message.header.index, link(&message));
            }
        })?;
        Ok(all)
    }

    /// The route for packets to `remote` by the interface, if there is one.
    pub(super) fn route(
        &mut self,
        (ifindex, local, remote): TunnelEndpoints,
    ) -> Option<RemoteRoute> {
        let mut request = RouteMessage::default();
        let (family, bits) = match remote {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        request.header.address_family = family;
        request.header.destination_prefix_length = bits;
        request.header.source_prefix_length = bits;
        request.header.flags = RouteFlags::LookupTable;
        request.attributes = vec![
            RouteAttribute::Destination(route_address(remote)),
            RouteAttribute::Source(route_address(local)),
            RouteAttribute::Oif(ifindex),
        ];
        let mut route = None;
        self.ask(RouteNetlinkMessage::GetRoute(request), NLM_F_REQUEST, |answer| {
            if let RouteNetlinkMessage::NewRoute(answer) = answer {
                route = route_by(&answer, ifindex, remote);
            }
        })
        .ok()?;
        route
    }

    fn ask(
        &mut self,
        request: RouteNetlinkMessage,
        flags: u16,
        mut answer: impl FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut buffer = Vec::with_capacity(1 << 16);
        loop {
            buffer.clear();
            self.socket.recv(&mut buffer, 0)?;
            let mut rest = &buffer[..];
            while !rest.is_empty() {
                let whole = NetlinkBuffer::new_checked(rest).map_err(io::Error::other)?;
                let length = whole.length() as usize;
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest);
                match message.map(|message| message.payload) {
                    Ok(NetlinkPayload::InnerMessage(inner)) => answer(inner),
                    Ok(NetlinkPayload::Done(_)) => return Ok(()),
                    Ok(NetlinkPayload::Error(error)) => {
                        return if error.code.is_none() { Ok(()) } else { Err(error.to_io()) };
                    }
                    // Messages that this library can't read are
                    // not the requested neighbours or routes.
                    _ => {}
                }
                if flags & NLM_F_DUMP != NLM_F_DUMP {
                    return Ok(());
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

/// A neighbour's interface and address, and its state if known.
pub(super) fn neighbour(
    message: &NeighbourMessage,
) -> Option<((u32, IpAddr), Option<UnderlayNeighbour>)> {
    let mut address = None;
    let mut mac = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                address = Some(IpAddr::V4(*v4));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                address = Some(IpAddr::V6(*v6));
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok(),
            _ => {}
        }
    }
    let neighbour = match message.header.state {
        NeighbourState::Stale
        | NeighbourState::Reachable
        | NeighbourState::Delay
        | NeighbourState::Probe
        | NeighbourState::Permanent
        | NeighbourState::Noarp => mac.map(UnderlayNeighbour::Known),
        NeighbourState::Failed => Some(UnderlayNeighbour::Failed),
        _ => None,
    };
    Some(((message.header.ifindex, address?), neighbour))
}

pub(super) fn link(message: &LinkMessage) -> UnderlayLink {
    let flags = message.header.flags;
    let mtu = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    });
    UnderlayLink {
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::LowerUp),
        mtu: mtu.unwrap_or(u32::MAX),
    }
}

/// Returns a route to `remote` if it uses `ifindex`. Its next hop is the remote itself if that is
/// on the link. The next hop may be of the other family (RFC 8950).
fn route_by(route: &RouteMessage, ifindex: u32, remote: IpAddr) -> Option<RemoteRoute> {
    let mut found = RemoteRoute { gateway: remote, mtu: None };
    let mut by = None;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(v4))
            | RouteAttribute::Via(RouteVia::Inet(v4)) => found.gateway = IpAddr::V4(*v4),
            RouteAttribute::Gateway(RouteAddress::Inet6(v6))
            | RouteAttribute::Via(RouteVia::Inet6(v6)) => found.gateway = IpAddr::V6(*v6),
            RouteAttribute::Metrics(metrics) => {
                found.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            RouteAttribute::Oif(index) => by = Some(*index),
            // Without any route by the interface, IPv4 assumes that the address is on its link.
            RouteAttribute::Table(0) => return None,
            _ => {}
        }
    }
    (by == Some(ifindex)).then_some(found)
}

fn route_address(address: IpAddr) -> RouteAddress {
    match address {
        IpAddr::V4(v4) => RouteAddress::Inet(v4),
        IpAddr::V6(v6) => RouteAddress::Inet6(v6),
    }
}
