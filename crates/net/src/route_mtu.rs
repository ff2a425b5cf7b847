//! What the kernel's look-up does not say of a network namespace, so that somebody has to watch it for whoever forwards
//! by that look-up alone: the smallest MTU that a route has, and that neighbours are used.
//!
//! A look reads no more than [`LOOK_BYTES`], so that a namespace with a million routes, or one whose routes change all
//! the time, takes no more of the watcher than any other. More changes between two looks than the kernel keeps for
//! this make it begin anew after [`REST`]; until it has seen all routes, it knows nothing. Programs with all rights in
//! the namespace can tell it what they like, of their own routes.
//!
//! Source: Linux net/ipv4/route.c (`ip_dst_mtu_maybe_forward` heeds every route's MTU, `bpf_fib_lookup` those alone that
//! are locked), net/core/neighbour.c (`NTF_USE`).

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt,
};
use rtnetlink::packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage};
use rtnetlink::packet_route::route::{RouteAttribute, RouteMessage, RouteMetric};
use rtnetlink::packet_route::{AddressFamily as Family, RouteNetlinkMessage};

use crate::error::{Context, Result};
use crate::netns::within;
use crate::ports::NO_MTU;

/// What a look reads at most, bytes: some thousands of routes.
pub const LOOK_BYTES: usize = 512 << 10;

/// How long it rests when routes changed faster than it could read.
pub const REST: Duration = Duration::from_secs(10);

/// All routes are looked through again where one with the smallest MTU went, but not sooner after the last time.
const AGAIN: Duration = Duration::from_secs(30);

/// What the kernel keeps between two looks, bytes.
const KEPT_BYTES: usize = 256 << 10;

/// More than the kernel sends in one datagram.
const DATAGRAM_BYTES: usize = 32 << 10;

/// Tries for a list that no change interrupts, before one that was is taken.
const TRIES: u32 = 3;

/// Neighbours that are confirmed at a time.
pub const CONFIRMED_MAX: usize = 64;

/// Numbers of what it asks.
const LIST: u32 = 1;
const CONFIRM: u32 = 2;

/// RTMGRP_IPV4_ROUTE and RTMGRP_IPV6_ROUTE of linux/rtnetlink.h.
const RTNLGRP_ROUTES: u32 = 1 << 6 | 1 << 10;

/// Watches the routes of a namespace.
#[derive(Debug)]
pub struct RouteMtu {
    socket: OwnedFd,
    state: State,
    /// Of IPv4 and of IPv6, once they are known.
    known: Option<[u32; 2]>,
    /// As far as this list has come.
    found: [u32; 2],
    listed: Instant,
    /// A route that had the smallest one went.
    stale: bool,
    tries: u32,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// All routes come, and were changed meanwhile or not.
    Lists {
        interrupted: bool,
    },
    Watches,
    Rests {
        until: Instant,
    },
}

impl RouteMtu {
    /// Watches a namespace.
    ///
    /// # Errors
    /// The kernel gives no socket.
    pub fn open(netns: BorrowedFd<'_>) -> Result<Self> {
        let socket = within(netns, || {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let kind = SockProtocol::NetlinkRoute;
            let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, kind)
                .on("open", "rtnetlink")?;
            setsockopt(&socket, sockopt::RcvBufForce, &KEPT_BYTES)
                .on("keep", "changes of routes")?;
            bind(socket.as_raw_fd(), &NetlinkAddr::new(0, RTNLGRP_ROUTES)).on("watch", "routes")?;
            Ok(socket)
        })?;
        let mut this = Self {
            socket,
            state: State::Watches,
            known: None,
            found: [NO_MTU; 2],
            listed: Instant::now(),
            stale: false,
            tries: 0,
        };
        this.list()?;
        Ok(this)
    }

    /// The smallest MTUs of routes, of IPv4 and of IPv6 ([`NO_MTU`]: none has one), by all that the kernel has said
    /// so far; `None` while that is not known. To be called once a second or so.
    ///
    /// # Errors
    /// The kernel refuses to list routes.
    pub fn look(&mut self) -> Result<Option<[u32; 2]>> {
        let rests = match self.state {
            State::Rests { until } if Instant::now() < until => return Ok(None),
            State::Rests { .. } => true,
            _ => false,
        };
        let (mut buffer, mut read) = (vec![0; DATAGRAM_BYTES], 0);
        while read < LOOK_BYTES {
            match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(count) if rests => read += count,
                Ok(count) => {
                    read += count;
                    self.take(&buffer[..count])?;
                }
                Err(Errno::EAGAIN) => {
                    let again = self.stale && self.listed.elapsed() > AGAIN;
                    if rests || again && matches!(self.state, State::Watches) {
                        self.list()?;
                    }
                    return Ok(self.known);
                }
                Err(Errno::EINTR) => {}
                // Once, where more came than it keeps.
                Err(Errno::ENOBUFS) if rests => {}
                Err(Errno::ENOBUFS) => {
                    self.rest();
                    return Ok(None);
                }
                Err(error) => return Err(error).on("read", "changes of routes"),
            }
        }
        if rests {
            // It goes on.
            self.rest();
        }
        Ok(self.known)
    }

    fn rest(&mut self) {
        self.known = None;
        self.state = State::Rests { until: Instant::now() + REST };
    }

    /// Asks for all routes of both families.
    fn list(&mut self) -> Result<()> {
        self.state = State::Lists { interrupted: false };
        self.found = [NO_MTU; 2];
        self.stale = false;
        self.listed = Instant::now();
        let mut routes = RouteMessage::default();
        // Of any family: the kernel lists one after the other.
        routes.header.address_family = Family::Unspec;
        self.say(RouteNetlinkMessage::GetRoute(routes), LIST, NLM_F_DUMP).on("list", "routes")
    }

    fn say(&self, message: RouteNetlinkMessage, number: u32, flags: u16) -> nix::Result<()> {
        let mut header = NetlinkHeader::default();
        header.sequence_number = number;
        header.flags = NLM_F_REQUEST | flags;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty()).map(drop)
    }

    fn take(&mut self, mut rest: &[u8]) -> Result<()> {
        while !rest.is_empty() {
            let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest) else {
                // Not one of its length, or none that is understood.
                let length = rest.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
                let length = (length.max(1) as usize).next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
                continue;
            };
            let length = (message.header.length as usize).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
            if let State::Lists { interrupted } = &mut self.state {
                *interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
            }
            match message.payload {
                NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) => {
                    if let Some((family, mtu)) = mtu(&route) {
                        self.found[family] = self.found[family].min(mtu);
                        if let Some(known) = &mut self.known {
                            known[family] = known[family].min(mtu);
                        }
                    }
                }
                NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelRoute(route)) => {
                    self.stale |= mtu(&route).is_some();
                }
                NetlinkPayload::Done(_) => self.listed()?,
                NetlinkPayload::Error(error)
                    if message.header.sequence_number == LIST && error.code.is_some() =>
                {
                    return Err(error.to_io()).on("list", "routes");
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn listed(&mut self) -> Result<()> {
        let State::Lists { interrupted } = self.state else { return Ok(()) };
        self.tries = if interrupted { self.tries + 1 } else { 0 };
        if interrupted && self.tries < TRIES {
            return self.list();
        }
        self.tries = 0;
        self.known = Some(self.found);
        self.state = State::Watches;
        Ok(())
    }

    /// Has the kernel see that these neighbours are used, by interface, so that it asks again for those that it has not
    /// heard of for long. What is not there, or beyond [`CONFIRMED_MAX`], is left out.
    pub fn confirm(&self, used: impl IntoIterator<Item = (u32, IpAddr)>) {
        for (index, address) in used.into_iter().take(CONFIRMED_MAX) {
            let mut neighbour = NeighbourMessage::default();
            neighbour.header.family = if address.is_ipv4() { Family::Inet } else { Family::Inet6 };
            neighbour.header.ifindex = index;
            neighbour.header.flags = NeighbourFlags::Use;
            neighbour.attributes.push(NeighbourAttribute::Destination(address.into()));
            // One that is gone meanwhile is refused, which nobody needs to know.
            let _ = self.say(RouteNetlinkMessage::NewNeighbour(neighbour), CONFIRM, 0);
        }
    }
}

/// The MTU that a route has of its own, and of which family it is.
fn mtu(route: &RouteMessage) -> Option<(usize, u32)> {
    let family = match route.header.address_family {
        Family::Inet => 0,
        Family::Inet6 => 1,
        _ => return None,
    };
    route.attributes.iter().find_map(|attribute| {
        let RouteAttribute::Metrics(metrics) = attribute else { return None };
        let mtu = metrics.iter().find_map(|metric| match metric {
            RouteMetric::Mtu(mtu) => Some(*mtu),
            _ => None,
        });
        mtu.filter(|mtu| *mtu > 0).map(|mtu| (family, mtu))
    })
}
