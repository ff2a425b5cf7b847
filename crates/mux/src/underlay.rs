//! Link addresses of tunnels' next hops, as the host's kernel knows them.
//!
//! The kernel is asked for the route of each tunnel and for its neighbours; notifications say when
//! to ask again. Where it has no neighbour yet, or has not heard of one for long while frames go
//! there, a datagram to the discard port (RFC 863) from an ordinary socket makes it look. Needs no
//! privilege. Workers read one atomic word.
//!
//! Limits: [`TUNNELS_MAX`] pairs of addresses; the kernel is asked again at most every
//! [`SETTLE_MS`] milliseconds.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr as InetAddress, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::wake::Wake;

/// Different pairs of outer addresses.
pub const TUNNELS_MAX: usize = 16384;

/// Time between two questions to the kernel.
pub const SETTLE_MS: u64 = 20;

/// Time between two datagrams to one next hop.
const POKE_EVERY: Duration = Duration::from_millis(500);

/// Where they go (RFC 863).
const DISCARD_PORT: u16 = 9;

/// RTNLGRP_LINK, _NEIGH, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR, _IPV6_ROUTE.
const GROUPS: [u32; 6] = [1, 3, 5, 7, 9, 11];

/// One tunnel's next hop, as workers see it.
#[derive(Debug, Default)]
pub struct NextHop {
    /// The link address in the low 48 bits, [`KNOWN`] above them; 0 while unknown.
    state: AtomicU64,
    used: AtomicBool,
    wanted: AtomicBool,
    bell: Option<Arc<Wake>>,
}

const KNOWN: u64 = 1 << 63;

impl NextHop {
    /// The link address to send to, if known; that it is asked for keeps it fresh.
    pub fn mac(&self) -> Option<[u8; 6]> {
        let state = self.state.load(Ordering::Relaxed);
        if state & KNOWN == 0 {
            if !self.wanted.swap(true, Ordering::Relaxed)
                && let Some(bell) = &self.bell
            {
                bell.ring();
            }
            return None;
        }
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        let [_, _, mac @ ..] = state.to_be_bytes();
        Some(mac)
    }

    /// One that needs no looking for.
    pub fn known(mac: [u8; 6]) -> Self {
        let hop = Self::default();
        hop.resolve(Some(mac));
        hop
    }

    /// Sets what workers see.
    pub fn resolve(&self, mac: Option<[u8; 6]>) {
        let state = mac
            .map_or(0, |[a, b, c, d, e, f]| KNOWN | u64::from_be_bytes([0, 0, a, b, c, d, e, f]));
        self.state.store(state, Ordering::Relaxed);
    }
}

/// The host's routes and neighbours, followed by a thread of its own.
#[derive(Clone, Debug)]
pub struct Underlay {
    tunnels: Arc<Mutex<HashMap<Ends, Tunnel>>>,
    wake: Arc<Wake>,
}

/// Interface index, local and remote address.
type Ends = (u32, IpAddr, IpAddr);

#[derive(Debug)]
struct Tunnel {
    hop: Arc<NextHop>,
    gateway: Option<IpAddr>,
    poked: Option<Instant>,
}

impl Underlay {
    /// Starts following the network namespace of the calling thread.
    pub fn start() -> io::Result<Self> {
        let mut monitor = Socket::new(NETLINK_ROUTE)?;
        monitor.bind_auto()?;
        for group in GROUPS {
            monitor.add_membership(group)?;
        }
        monitor.set_non_blocking(true)?;
        let query = Query::new()?;
        let underlay = Self { tunnels: Arc::default(), wake: Arc::new(Wake::new()?) };
        let follower = underlay.clone();
        std::thread::Builder::new()
            .name("underlay".into())
            .spawn(move || follower.follow(&monitor, query))?;
        Ok(underlay)
    }

    /// The next hop from `local` to `remote` by the interface `ifindex`; `None` beyond
    /// [`TUNNELS_MAX`].
    pub fn next_hop(&self, ifindex: u32, local: IpAddr, remote: IpAddr) -> Option<Arc<NextHop>> {
        let mut tunnels = self.tunnels.lock().unwrap_or_else(PoisonError::into_inner);
        // What no vlink uses any more is forgotten.
        tunnels.retain(|_, tunnel| Arc::strong_count(&tunnel.hop) > 1);
        if tunnels.len() >= TUNNELS_MAX {
            return None;
        }
        let bell = Some(self.wake.clone());
        let tunnel = tunnels.entry((ifindex, local, remote)).or_insert_with(|| {
            let hop = NextHop { bell, wanted: AtomicBool::new(true), ..NextHop::default() };
            Tunnel { hop: Arc::new(hop), gateway: None, poked: None }
        });
        let hop = tunnel.hop.clone();
        drop(tunnels);
        self.wake.ring();
        Some(hop)
    }

    fn follow(&self, monitor: &Socket, mut query: Query) {
        let mut known = 0;
        let (mut routes_changed, mut neighbours) = (true, HashMap::new());
        let mut neighbours_changed = true;
        loop {
            let mut wait_ms = 1000;
            {
                let mut tunnels = self.tunnels.lock().unwrap_or_else(PoisonError::into_inner);
                if neighbours_changed && let Ok(all) = query.neighbours() {
                    neighbours = all;
                }
                for (ends, tunnel) in tunnels.iter_mut() {
                    if routes_changed || tunnel.poked.is_none() {
                        tunnel.gateway = query.gateway(*ends);
                    }
                    wait_ms = wait_ms.min(tunnel.update(*ends, &neighbours));
                }
                routes_changed = known != tunnels.len();
                known = tunnels.len();
            }
            self.wake.sleeping();
            neighbours_changed = self.wait(monitor, wait_ms, &mut routes_changed);
            self.wake.awake();
        }
    }

    /// Waits for notifications, a worker's wish, or time; true if neighbours may have changed.
    fn wait(&self, monitor: &Socket, wait_ms: u64, routes_changed: &mut bool) -> bool {
        let timeout = Timespec {
            tv_sec: (wait_ms / 1000) as i64,
            tv_nsec: (wait_ms % 1000 * 1_000_000) as i64,
        };
        let mut fds =
            [PollFd::new(monitor, PollFlags::IN), PollFd::new(&*self.wake, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&timeout));
        std::thread::sleep(Duration::from_millis(SETTLE_MS.min(wait_ms)));
        let mut any = false;
        let mut buffer = Vec::with_capacity(1 << 16);
        loop {
            buffer.clear();
            match monitor.recv(&mut buffer, 0) {
                Ok(0) => return any,
                Ok(_) => {
                    any = true;
                    *routes_changed |= !is_neighbour(&buffer);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return any,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Notifications were lost: everything may have changed.
                Err(_) => {
                    *routes_changed = true;
                    return true;
                }
            }
        }
    }
}

impl Tunnel {
    /// Follows what the kernel knows; returns in how many milliseconds to come back.
    fn update(&mut self, (ifindex, local, remote): Ends, neighbours: &Neighbours) -> u64 {
        let known = self.gateway.and_then(|gateway| neighbours.get(&(ifindex, gateway)));
        self.hop.resolve(known.map(|neighbour| neighbour.mac));
        let wanted = self.hop.wanted.load(Ordering::Relaxed);
        let (poke, wait_ms) = match known {
            Some(neighbour) => {
                self.hop.wanted.store(false, Ordering::Relaxed);
                (neighbour.stale && self.hop.used.swap(false, Ordering::Relaxed), 1000)
            }
            None => (wanted, if wanted { 100 } else { 1000 }),
        };
        if poke && self.poked.is_none_or(|at| at.elapsed() >= POKE_EVERY) {
            self.poked = Some(Instant::now());
            self.hop.wanted.store(false, Ordering::Relaxed);
            // Fails while the host has no such address or no route: then there is nobody to find.
            let _ = UdpSocket::bind(InetAddress::new(local, 0)).and_then(|socket| {
                socket.set_nonblocking(true)?;
                socket.send_to(&[0], InetAddress::new(remote, DISCARD_PORT))
            });
        }
        wait_ms
    }
}

#[derive(Clone, Copy, Debug)]
struct Neighbour {
    mac: [u8; 6],
    stale: bool,
}

type Neighbours = HashMap<(u32, IpAddr), Neighbour>;

/// Questions to the kernel, one at a time.
struct Query {
    socket: Socket,
}

impl Query {
    fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket })
    }

    /// All neighbours that frames can be sent to.
    fn neighbours(&mut self) -> io::Result<Neighbours> {
        let mut all = Neighbours::new();
        let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        self.ask(request, NLM_F_REQUEST | NLM_F_DUMP, |answer| {
            if let RouteNetlinkMessage::NewNeighbour(message) = answer {
                all.extend(usable(&message));
            }
        })?;
        Ok(all)
    }

    /// The address to resolve on the interface for frames to `remote`, if there is a route by it.
    fn gateway(&mut self, (ifindex, local, remote): Ends) -> Option<IpAddr> {
        let mut request = RouteMessage::default();
        let (family, bits) = match remote {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        request.header.address_family = family;
        request.header.destination_prefix_length = bits;
        request.header.source_prefix_length = bits;
        request.attributes = vec![
            RouteAttribute::Destination(route_address(remote)),
            RouteAttribute::Source(route_address(local)),
            RouteAttribute::Oif(ifindex),
        ];
        let mut gateway = None;
        self.ask(RouteNetlinkMessage::GetRoute(request), NLM_F_REQUEST, |answer| {
            if let RouteNetlinkMessage::NewRoute(route) = answer {
                gateway = next_hop_of(&route, ifindex, remote);
            }
        })
        .ok()?;
        gateway
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
                    // What this library can't read is no neighbour or route that we asked for.
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

fn usable(message: &NeighbourMessage) -> Option<((u32, IpAddr), Neighbour)> {
    let stale = match message.header.state {
        NeighbourState::Stale => true,
        NeighbourState::Reachable
        | NeighbourState::Delay
        | NeighbourState::Probe
        | NeighbourState::Permanent
        | NeighbourState::Noarp => false,
        _ => return None,
    };
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
    Some(((message.header.ifindex, address?), Neighbour { mac: mac?, stale }))
}

/// The gateway of a route by `ifindex`, or the destination itself where it is on the link.
fn next_hop_of(route: &RouteMessage, ifindex: u32, remote: IpAddr) -> Option<IpAddr> {
    let mut gateway = remote;
    let mut by = None;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet(v4)) => gateway = IpAddr::V4(*v4),
            RouteAttribute::Gateway(RouteAddress::Inet6(v6)) => gateway = IpAddr::V6(*v6),
            RouteAttribute::Oif(index) => by = Some(*index),
            _ => {}
        }
    }
    (by == Some(ifindex)).then_some(gateway)
}

fn route_address(address: IpAddr) -> RouteAddress {
    match address {
        IpAddr::V4(v4) => RouteAddress::Inet(v4),
        IpAddr::V6(v6) => RouteAddress::Inet6(v6),
    }
}

/// Whether all notifications in `bytes` are of neighbours.
fn is_neighbour(bytes: &[u8]) -> bool {
    const RTM_NEWNEIGH: u16 = 28;
    const RTM_DELNEIGH: u16 = 29;
    NetlinkBuffer::new_checked(bytes).is_ok_and(|message| {
        (RTM_NEWNEIGH..=RTM_DELNEIGH).contains(&message.message_type())
            && message.length() as usize == bytes.len()
    })
}
