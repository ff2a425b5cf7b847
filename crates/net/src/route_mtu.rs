//! Watches those properties of a namespace's routes that the kernel's FIB lookup for XDP does not
//! report: the smallest MTU of any route. Also confirms neighbours in use. A data plane that
//! forwards by this lookup alone needs both.
//!
//! A poll reads at most [`LOOK_BYTES`]. So a namespace with a million routes, or with
//! constantly changing ones, costs the watcher no more than any other. If more changes occur
//! between two polls than the kernel queues, the watch starts over after [`REST`]. Until it has
//! read all routes, it reports nothing. Programs with full privileges in the namespace can
//! mislead it, but only about their own routes.
//!
//! Source: Linux net/ipv4/route.c (`ip_dst_mtu_maybe_forward` heeds every route's MTU,
//! `bpf_fib_lookup` only locked ones), net/core/neighbour.c (`NTF_USE`).

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

use crate::error::{NetContext, Result};
use crate::netns::within;
use crate::ports::NO_MTU;

/// Most bytes that a poll reads: some thousands of routes.
pub const LOOK_BYTES: usize = 512 << 10;

/// Pause after routes changed faster than they could be read.
pub const REST: Duration = Duration::from_secs(10);

/// Shortest interval between full reads of the routes, after a route with an MTU was removed.
const AGAIN: Duration = Duration::from_secs(30);

/// Most bytes that the kernel queues between two polls.
const KEPT_BYTES: usize = 256 << 10;

/// Longer than any datagram of the kernel.
const DATAGRAM_BYTES: usize = 32 << 10;

/// Attempts at an uninterrupted dump, before an interrupted one is accepted.
const TRIES: u32 = 3;

/// Most neighbours that are confirmed at a time.
pub const CONFIRMED_MAX: usize = 64;

/// Sequence numbers of the requests.
const LIST: u32 = 1;
const CONFIRM: u32 = 2;

/// RTMGRP_IPV4_ROUTE and RTMGRP_IPV6_ROUTE of linux/rtnetlink.h.
const RTNLGRP_ROUTES: u32 = 1 << 6 | 1 << 10;

/// Watches the MTUs of a namespace's routes.
#[derive(Debug)]
pub struct RouteMtu {
    socket: OwnedFd,
    state: RouteMtuState,
    /// Smallest MTU for IPv4 and for IPv6, once known.
    smallest: Option<[u32; 2]>,
    /// Smallest MTUs in the current dump so far.
    found: [u32; 2],
    listed: Instant,
    /// True if a route with an MTU was removed.
    stale: bool,
    tries: u32,
}

#[derive(Clone, Copy, Debug)]
enum RouteMtuState {
    /// A dump of all routes runs; `interrupted` if routes changed meanwhile.
    Dumping {
        interrupted: bool,
    },
    Watching,
    Paused {
        until: Instant,
    },
}

impl RouteMtu {
    /// Starts watching a namespace.
    ///
    /// # Errors
    /// The kernel refuses the socket.
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
            state: RouteMtuState::Watching,
            smallest: None,
            found: [NO_MTU; 2],
            listed: Instant::now(),
            stale: false,
            tries: 0,
        };
        this.list()?;
        Ok(this)
    }

    /// Returns the smallest MTUs of routes, for IPv4 and for IPv6 ([`NO_MTU`]: no route has one),
    /// from all notifications so far; `None` while unknown. Call it about once per second.
    ///
    /// # Errors
    /// The kernel refuses to list routes.
    pub fn poll(&mut self) -> Result<Option<[u32; 2]>> {
        let paused = match self.state {
            RouteMtuState::Paused { until } if Instant::now() < until => return Ok(None),
            RouteMtuState::Paused { .. } => true,
            _ => false,
        };
        let (mut buffer, mut read) = (vec![0; DATAGRAM_BYTES], 0);
        while read < LOOK_BYTES {
            match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(count) if paused => read += count,
                Ok(count) => {
                    read += count;
                    self.take(&buffer[..count])?;
                }
                Err(Errno::EAGAIN) => {
                    let again = self.stale && self.listed.elapsed() > AGAIN;
                    if paused || again && matches!(self.state, RouteMtuState::Watching) {
                        self.list()?;
                    }
                    return Ok(self.smallest);
                }
                Err(Errno::EINTR) => {}
                // Reported once, if more changes arrived than the queue can keep.
                Err(Errno::ENOBUFS) if paused => {}
                Err(Errno::ENOBUFS) => {
                    self.pause();
                    return Ok(None);
                }
                Err(error) => return Err(error).on("read", "changes of routes"),
            }
        }
        if paused {
            // Changes still arrive faster than they can be read.
            self.pause();
        }
        Ok(self.smallest)
    }

    fn pause(&mut self) {
        self.smallest = None;
        self.state = RouteMtuState::Paused { until: Instant::now() + REST };
    }

    /// Asks for all routes of both families.
    fn list(&mut self) -> Result<()> {
        self.state = RouteMtuState::Dumping { interrupted: false };
        self.found = [NO_MTU; 2];
        self.stale = false;
        self.listed = Instant::now();
        let mut routes = RouteMessage::default();
        // For any family: the kernel lists one after the other.
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
                // A message with a wrong length, or one that cannot be parsed.
                let length = rest.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
                let length = (length.max(1) as usize).next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
                continue;
            };
            let length = (message.header.length as usize).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
            if let RouteMtuState::Dumping { interrupted } = &mut self.state {
                *interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
            }
            match message.payload {
                NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) => {
                    if let Some((family, mtu)) = mtu(&route) {
                        self.found[family] = self.found[family].min(mtu);
                        if let Some(smallest) = &mut self.smallest {
                            smallest[family] = smallest[family].min(mtu);
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
        let RouteMtuState::Dumping { interrupted } = self.state else { return Ok(()) };
        self.tries = if interrupted { self.tries + 1 } else { 0 };
        if interrupted && self.tries < TRIES {
            return self.list();
        }
        self.tries = 0;
        self.smallest = Some(self.found);
        self.state = RouteMtuState::Watching;
        Ok(())
    }

    /// Tells the kernel that these neighbours are in use, by interface, so that it confirms stale
    /// ones. Skips neighbours that do not exist, and those beyond [`CONFIRMED_MAX`].
    pub fn confirm(&self, used: impl IntoIterator<Item = (u32, IpAddr)>) {
        for (index, address) in used.into_iter().take(CONFIRMED_MAX) {
            let mut neighbour = NeighbourMessage::default();
            neighbour.header.family = if address.is_ipv4() { Family::Inet } else { Family::Inet6 };
            neighbour.header.ifindex = index;
            neighbour.header.flags = NeighbourFlags::Use;
            neighbour.attributes.push(NeighbourAttribute::Destination(address.into()));
            // The kernel refuses neighbours that are gone by now, which does not matter.
            let _ = self.say(RouteNetlinkMessage::NewNeighbour(neighbour), CONFIRM, 0);
        }
    }
}

/// Returns the family and the MTU of a route that has one.
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
