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

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use pdp_netlink::{
    Netlink, NetlinkRead, Request, attributes, family, is_v6, messages, u16_at, u32_at,
};

use crate::error::{NetContext, Result};
use crate::netns::within;
use crate::ports::NO_MTU;
use crate::route::RTAX_MTU;

/// Most bytes that a poll reads: some thousands of routes.
pub const LOOK_BYTES: usize = 512 << 10;

/// Pause after routes changed faster than they could be read.
pub const REST: Duration = Duration::from_secs(10);

/// Shortest interval between full reads of the routes, after a route with an MTU was removed.
const AGAIN: Duration = Duration::from_secs(30);

/// Most bytes that the kernel queues between two polls.
const KEPT_BYTES: usize = 256 << 10;

/// Types of messages that end an answer.
const DONE: u16 = libc::NLMSG_DONE as u16;
const ERROR: u16 = libc::NLMSG_ERROR as u16;

/// Attempts at an uninterrupted dump, before an interrupted one is accepted.
const TRIES: u32 = 3;

/// Most neighbours that are confirmed at a time.
pub const CONFIRMED_MAX: usize = 64;

/// Watches the MTUs of a namespace's routes.
#[derive(Debug)]
pub struct RouteMtu {
    netlink: Netlink,
    found: FoundMtus,
    listed: Instant,
}

#[derive(Debug)]
struct FoundMtus {
    state: RouteMtuState,
    /// Smallest MTU for IPv4 and for IPv6, once known.
    smallest: Option<[u32; 2]>,
    /// Smallest MTUs in the current dump so far.
    dumped: [u32; 2],
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
        let groups = [libc::RTNLGRP_IPV4_ROUTE, libc::RTNLGRP_IPV6_ROUTE];
        let netlink = within(netns, || {
            let netlink = Netlink::routing().on("open", "rtnetlink")?;
            netlink.set_receive_bytes(KEPT_BYTES).on("keep", "changes of routes")?;
            // A list then includes the kernel's cached exceptions, which also have MTUs.
            netlink.set_strict(false).on("list", "routes")?;
            netlink.join(groups).on("watch", "routes")?;
            Ok(netlink)
        })?;
        let found = FoundMtus {
            state: RouteMtuState::Watching,
            smallest: None,
            dumped: [NO_MTU; 2],
            stale: false,
            tries: 0,
        };
        let mut this = Self { netlink, found, listed: Instant::now() };
        this.list()?;
        Ok(this)
    }

    /// Returns the smallest MTUs of routes, for IPv4 and for IPv6 ([`NO_MTU`]: no route has one),
    /// from all notifications so far; `None` while unknown. Call it about once per second.
    ///
    /// # Errors
    /// The kernel refuses to list routes.
    pub fn poll(&mut self) -> Result<Option<[u32; 2]>> {
        let paused = match self.found.state {
            RouteMtuState::Paused { until } if Instant::now() < until => return Ok(None),
            RouteMtuState::Paused { .. } => true,
            _ => false,
        };
        let mut read = 0;
        while read < LOOK_BYTES {
            match self.netlink.receive().on("read", "changes of routes")? {
                NetlinkRead::Datagram(datagram) if paused => read += datagram.len(),
                NetlinkRead::Datagram(datagram) => {
                    read += datagram.len();
                    if self.found.take(datagram).on("list", "routes")? {
                        self.list()?;
                    }
                }
                NetlinkRead::Empty => {
                    let again = self.found.stale && self.listed.elapsed() > AGAIN;
                    if paused || again && matches!(self.found.state, RouteMtuState::Watching) {
                        self.list()?;
                    }
                    return Ok(self.found.smallest);
                }
                // Reported once, if more changes arrived than the queue can keep.
                NetlinkRead::Lost if paused => {}
                NetlinkRead::Lost => {
                    self.pause();
                    return Ok(None);
                }
            }
        }
        if paused {
            // Changes still arrive faster than they can be read.
            self.pause();
        }
        Ok(self.found.smallest)
    }

    fn pause(&mut self) {
        self.found.smallest = None;
        self.found.state = RouteMtuState::Paused { until: Instant::now() + REST };
    }

    /// Asks for all routes of both families.
    fn list(&mut self) -> Result<()> {
        self.found.state = RouteMtuState::Dumping { interrupted: false };
        self.found.dumped = [NO_MTU; 2];
        self.found.stale = false;
        self.listed = Instant::now();
        // For any family: the kernel lists one after the other.
        let request = Request::new(libc::RTM_GETROUTE, libc::NLM_F_DUMP, &[0; 12]);
        self.netlink.send(&request).on("list", "routes")
    }

    /// Tells the kernel that these neighbours are in use, by interface, so that it confirms stale
    /// ones. Skips neighbours that do not exist, and those beyond [`CONFIRMED_MAX`].
    pub fn confirm(&self, used: impl IntoIterator<Item = (u32, IpAddr)>) {
        for (index, address) in used.into_iter().take(CONFIRMED_MAX) {
            let mut header = [0; 12];
            header[0] = family(address.is_ipv6());
            header[4..8].copy_from_slice(&index.to_ne_bytes());
            header[10] = libc::NTF_USE;
            let mut request = Request::new(libc::RTM_NEWNEIGH, 0, &header);
            // The kernel refuses neighbours that are gone by now, which does not matter.
            let _ = self.netlink.send(request.address(libc::NDA_DST, address));
        }
    }
}

impl FoundMtus {
    /// Reads messages. Returns true if the routes must be listed again.
    ///
    /// # Errors
    /// The kernel refuses to list routes.
    fn take(&mut self, datagram: &[u8]) -> io::Result<bool> {
        let mut again = false;
        for message in messages(datagram) {
            if let RouteMtuState::Dumping { interrupted } = &mut self.state {
                *interrupted |= message.is_interrupted();
            }
            match message.kind {
                libc::RTM_NEWROUTE => {
                    if let Some((family, mtu)) = mtu(message.payload) {
                        self.dumped[family] = self.dumped[family].min(mtu);
                        if let Some(smallest) = &mut self.smallest {
                            smallest[family] = smallest[family].min(mtu);
                        }
                    }
                }
                libc::RTM_DELROUTE => self.stale |= mtu(message.payload).is_some(),
                DONE => again |= self.listed(),
                // The error of a request contains its type. Those of neighbours do not matter.
                ERROR if u16_at(message.payload, 8) == Some(libc::RTM_GETROUTE) => {
                    message.result()?;
                }
                _ => {}
            }
        }
        Ok(again)
    }

    /// Ends a list. Returns true if the routes must be listed again.
    fn listed(&mut self) -> bool {
        let RouteMtuState::Dumping { interrupted } = self.state else { return false };
        self.tries = if interrupted { self.tries + 1 } else { 0 };
        if interrupted && self.tries < TRIES {
            return true;
        }
        self.tries = 0;
        self.smallest = Some(self.dumped);
        self.state = RouteMtuState::Watching;
        false
    }
}

/// Returns the family (0: IPv4, 1: IPv6) and the MTU of a route that has one.
fn mtu(payload: &[u8]) -> Option<(usize, u32)> {
    let family = usize::from(is_v6(*payload.first()?)?);
    let mut all = attributes(payload.get(12..)?);
    let (_, metrics) = all.find(|(kind, _)| *kind == libc::RTA_METRICS)?;
    let (_, mtu) = attributes(metrics).find(|(kind, _)| *kind == RTAX_MTU)?;
    u32_at(mtu, 0).filter(|mtu| *mtu > 0).map(|mtu| (family, mtu))
}
