//! Paths of tunnels through the underlay, as the host's kernel knows them: the next hop's MAC
//! address, and the path MTU.
//!
//! This crate queries the kernel for the route of each tunnel. Kernel notifications report changes
//! of neighbours and links, and when to query routes again. To make the kernel resolve a next hop,
//! it sends a datagram to the discard port (RFC 863) from an ordinary socket. It does so if the
//! kernel has no neighbour, or has not confirmed one for long while frames go there.
//!
//! While frames go to a remote, a datagram as long as the longest of them goes there each second.
//! If it is too long for a router on the path, the router's error (RFC 1191, RFC 8201) finds this
//! socket. The kernel checks and keeps the path MTU as for any program (for 10 minutes, and not
//! below 552 bytes, or 1,280 over IPv6), and includes it in the route. Errors about the frames
//! themselves are lost: these have source ports of flows, where no socket listens.
//!
//! Needs no privilege. Workers read one atomic word. Other threads wait
//! for changes with [`Underlay::wait`]. Changes of an unused tunnel cost
//! nothing. Other work has limits: [`ASKS_MAX`] datagrams and queries a
//! second, and a tenth of a CPU for changes that affect all tunnels.

#![forbid(unsafe_code)]

mod kernel;

use pdp_model::UnderlayProblem;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr as InetAddress, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pdp_netlink::{Netlink, NetlinkRead, messages};
use pdp_wire::{outer, udp};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::sockopt::set_socket_recv_buffer_size;

pub use crate::kernel::TunnelEndpoints;
use crate::kernel::{
    NEIGHBOURS, OTHERS, Query, RemoteRoute, UnderlayLink, UnderlayNeighbour, UnderlayNeighbours,
    link, neighbour,
};

/// Limit of different pairs of outer addresses.
pub const TUNNELS_MAX: usize = 16384;

/// Datagrams and queries about single tunnels per second. Further ones come later.
pub const ASKS_MAX: usize = 2048;

/// Time in which notifications and requests accumulate.
const SETTLE: Duration = Duration::from_millis(1);

/// After querying all tunnels, pause for this many times the duration, and at least this time.
const REST_TIMES: u32 = 9;
const REST_MIN: Duration = Duration::from_millis(20);

/// Time between two datagrams to a next hop that does not answer.
const POKE_EVERY: Duration = Duration::from_millis(500);

/// Time between two datagrams if no frame waits for the next hop. They check if it still fails.
const POKE_UNUSED_EVERY: Duration = Duration::from_secs(10);

/// Time between two checks of all tunnels, and between two datagrams along a used path.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Time for a router on the path to report that a
/// datagram is too long, before the kernel is queried.
const ANSWER_AFTER: Duration = Duration::from_millis(200);

/// Time after which a next hop that does not answer is reported.
const UNANSWERED: Duration = Duration::from_secs(1);

/// Open sockets for datagrams. Each local address needs
/// one; each link-local address needs one per interface.
const SOCKETS_MAX: usize = 256;

/// Notifications read at a time.
const HEARD_MAX: usize = 1024;

/// Destination port of datagrams (RFC 863).
const DISCARD_PORT: u16 = 9;

/// Smallest path MTU. Every path carries packets of this length (RFC 8200 section 5), or the kernel
/// ignores routers that report less (net.ipv4.route.min_pmtu).
const IPV6_BYTES_MIN: u32 = 1280;
const IPV4_BYTES_MIN: u32 = 552;

/// Payload of datagrams, up to the longest.
static NOTHING: [u8; 1 << 16] = [0; 1 << 16];

/// One tunnel's next hop, as workers see it.
#[derive(Debug, Default)]
pub struct TunnelNextHop {
    /// The MAC address in the low 48 bits, and [`NextHopInfo::mtu`] above. 0 while unknown.
    state: AtomicU64,
    used: AtomicBool,
    wish: Option<(usize, Arc<Wishes>)>,
}

/// Result of resolving a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHopInfo {
    /// MAC address.
    pub mac: [u8; 6],
    /// Path MTU to the remote as far as known, bytes of the IP packet.
    pub mtu: u16,
}

impl TunnelNextHop {
    /// Returns the next hop if its MAC address is known. Calling
    /// this keeps it fresh, or requests its resolution.
    #[inline]
    pub fn find(&self) -> Option<NextHopInfo> {
        let hop = self.peek();
        if hop.is_none() {
            self.wish();
        } else if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        hop
    }

    /// Like [`find`](Self::find), without marking the next hop as used.
    #[inline]
    fn peek(&self) -> Option<NextHopInfo> {
        let state = self.state.load(Ordering::Relaxed);
        let [high, low, mac @ ..] = state.to_be_bytes();
        (state != 0).then_some(NextHopInfo { mac, mtu: u16::from_be_bytes([high, low]) })
    }

    /// Requests its resolution.
    fn wish(&self) {
        if let Some((slot, wishes)) = &self.wish {
            wishes.add(*slot);
        }
    }

    /// Returns a next hop that needs no resolution.
    pub fn known(mac: [u8; 6]) -> Self {
        let hop = Self::default();
        hop.resolve(Some(NextHopInfo { mac, mtu: u16::MAX }));
        hop
    }

    /// Sets the value that workers see.
    pub fn resolve(&self, hop: Option<NextHopInfo>) {
        let state = hop.map_or(0, |NextHopInfo { mac: [a, b, c, d, e, f], mtu }| {
            let [high, low] = mtu.max(1).to_be_bytes();
            u64::from_be_bytes([high, low, a, b, c, d, e, f])
        });
        self.state.store(state, Ordering::Relaxed);
    }

    fn is_known(&self) -> bool {
        self.state.load(Ordering::Relaxed) != 0
    }
}

/// Tunnels for whose next hops frames wait, one bit each. Any thread may add to them.
#[derive(Debug)]
struct Wishes {
    bits: Box<[AtomicU64]>,
    bell: OwnedFd,
    /// True if the bell was rung since the follower last woke.
    rung: AtomicBool,
}

impl Wishes {
    fn new() -> io::Result<Self> {
        let bits = (0..TUNNELS_MAX.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { bits, bell, rung: AtomicBool::new(false) })
    }

    fn add(&self, slot: usize) {
        let (word, bit) = (&self.bits[slot / 64], 1 << (slot % 64));
        if word.load(Ordering::Relaxed) & bit == 0
            && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
        {
            self.ring();
        }
    }

    /// Wakes the follower to handle a new request.
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Fails only after 2^64 unanswered rings.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Marks the follower as awake. It sees all requests made before.
    fn awake(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        self.rung.swap(false, Ordering::AcqRel);
    }

    fn remove(&self, slot: usize) {
        self.bits[slot / 64].fetch_and(!(1 << (slot % 64)), Ordering::Relaxed);
    }

    /// All bits.
    fn all(&self) -> Vec<u64> {
        self.bits.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }
}

/// Slots of the bits that are set.
fn slots(bits: &[u64]) -> impl Iterator<Item = usize> {
    bits.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(|(at, word)| {
        (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 64 + bit)
    })
}

/// The host's routes, neighbours and links, followed by a dedicated thread.
#[derive(Clone, Debug)]
pub struct Underlay {
    tunnels: Arc<Mutex<Tunnels>>,
    wishes: Arc<Wishes>,
    questions: Arc<AtomicU64>,
    changes: Arc<UnderlayChangeCount>,
}

/// Number of changes so far, and the waiters for the next.
#[derive(Debug, Default)]
struct UnderlayChangeCount {
    count: Mutex<u64>,
    bell: Condvar,
}

impl UnderlayChangeCount {
    fn count(&self) -> MutexGuard<'_, u64> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All tunnels.
#[derive(Debug, Default)]
struct Tunnels {
    slots: Vec<Option<UnderlayTunnel>>,
    free: Vec<usize>,
    by_ends: HashMap<TunnelEndpoints, usize>,
    /// Slots by the next hops of their routes.
    by_gateway: BTreeSet<(u32, IpAddr, usize)>,
    /// Slots whose routes must be queried, as they or their links are new or have changed.
    new: Vec<usize>,
    links: HashMap<u32, UnderlayLink>,
    /// True if a link or a resolved next hop has changed since the waiters were last woken.
    changed: bool,
}

#[derive(Debug)]
struct UnderlayTunnel {
    ends: TunnelEndpoints,
    hop: Arc<TunnelNextHop>,
    /// Longest IP packet of its vlinks, bytes.
    packet_bytes: u32,
    route: Option<RemoteRoute>,
    /// True if the host does not have the local address.
    no_address: bool,
    /// Time of the last datagram to resolve the next hop, while it is unknown.
    poked: Option<Instant>,
    /// Time since which the next hop does not answer.
    unanswered: Option<Instant>,
}

impl Underlay {
    /// Starts following the network namespace of the calling thread.
    pub fn start() -> io::Result<Self> {
        let underlay = Self {
            tunnels: Arc::default(),
            wishes: Arc::new(Wishes::new()?),
            questions: Arc::default(),
            changes: Arc::default(),
        };
        let follower = UnderlayFollower {
            underlay: underlay.clone(),
            monitors: [
                Netlink::listening(libc::NETLINK_ROUTE, NEIGHBOURS)?,
                Netlink::listening(libc::NETLINK_ROUTE, OTHERS)?,
            ],
            query: Query::new()?,
            neighbours: HashMap::new(),
            sockets: HashMap::new(),
            asks_left: ASKS_MAX,
            next_slot: 0,
            asked: vec![],
        };
        let thread = std::thread::Builder::new().name("underlay".into());
        thread.spawn(move || follower.run())?;
        Ok(underlay)
    }

    /// Number of routes queried so far.
    pub fn queries(&self) -> u64 {
        self.questions.load(Ordering::Relaxed)
    }

    fn tunnels(&self) -> MutexGuard<'_, Tunnels> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next hop from `local` to `remote` by the interface `ifindex`, for IP packets of up to
    /// `packet_bytes`. `None` beyond [`TUNNELS_MAX`].
    pub fn next_hop(
        &self,
        ifindex: u32,
        local: IpAddr,
        remote: IpAddr,
        packet_bytes: u32,
    ) -> Option<Arc<TunnelNextHop>> {
        let hop = self.tunnels().take((ifindex, local, remote), packet_bytes, &self.wishes)?;
        self.wishes.ring();
        Some(hop)
    }

    /// Returns the next hop of such a path, with the MTU also limited by the interface. `None` if
    /// unknown, or while the interface is down or has no carrier.
    pub fn path(&self, ends: TunnelEndpoints) -> Option<NextHopInfo> {
        let tunnels = self.tunnels();
        let hop = tunnels.slots[*tunnels.by_ends.get(&ends)?].as_ref()?.hop.peek()?;
        let link = tunnels.links.get(&ends.0).filter(|link| link.up && link.carrier)?;
        Some(NextHopInfo { mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX).min(hop.mtu), ..hop })
    }

    /// Waits until a result of [`Underlay::path`] may have changed since this returned `seen`, or
    /// for `most`. `seen` is 0 for the first call.
    pub fn wait(&self, seen: u64, most: Duration) -> u64 {
        let count = self.changes.count();
        let waited = self.changes.bell.wait_timeout_while(count, most, |count| *count == seen);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sets the longest IP packets of tunnels, bytes.
    pub fn set_lengths(&self, lengths: &HashMap<TunnelEndpoints, u32>) {
        self.tunnels().set_lengths(lengths);
        self.wishes.ring();
    }

    /// Problem of the path for such packets, if any. `None`
    /// also for a tunnel that was never requested.
    pub fn problem(
        &self,
        ifindex: u32,
        local: IpAddr,
        remote: IpAddr,
        packet_bytes: u32,
    ) -> Option<UnderlayProblem> {
        let tunnels = self.tunnels();
        let slot = *tunnels.by_ends.get(&(ifindex, local, remote))?;
        let tunnel = tunnels.slots[slot].as_ref()?;
        match tunnels.links.get(&ifindex) {
            Some(UnderlayLink { up: true, carrier: true, mtu }) => {
                tunnel.problem(packet_bytes, *mtu)
            }
            Some(UnderlayLink { up: true, .. }) => Some(UnderlayProblem::NoCarrier),
            _ => Some(UnderlayProblem::Down),
        }
    }
}

impl Tunnels {
    fn take(
        &mut self,
        ends: TunnelEndpoints,
        packet_bytes: u32,
        wishes: &Arc<Wishes>,
    ) -> Option<Arc<TunnelNextHop>> {
        if let Some(&slot) = self.by_ends.get(&ends) {
            let tunnel = self.slots[slot].as_mut()?;
            if packet_bytes > tunnel.packet_bytes {
                tunnel.packet_bytes = packet_bytes;
                self.new.push(slot);
            }
            return Some(tunnel.hop.clone());
        }
        if self.by_ends.len() >= TUNNELS_MAX {
            self.forget_unused(wishes);
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < TUNNELS_MAX => {
                self.slots.push(None);
                self.slots.len() - 1
            }
            None => return None,
        };
        let hop = Arc::new(TunnelNextHop {
            wish: Some((slot, wishes.clone())),
            ..TunnelNextHop::default()
        });
        self.slots[slot] = Some(UnderlayTunnel {
            ends,
            hop: hop.clone(),
            packet_bytes,
            route: None,
            no_address: false,
            poked: None,
            unanswered: None,
        });
        self.by_ends.insert(ends, slot);
        self.new.push(slot);
        Some(hop)
    }

    fn set_lengths(&mut self, lengths: &HashMap<TunnelEndpoints, u32>) {
        for (ends, bytes) in lengths {
            if let Some(&slot) = self.by_ends.get(ends)
                && let Some(tunnel) = self.slots[slot].as_mut()
                && tunnel.packet_bytes != *bytes
            {
                tunnel.packet_bytes = *bytes;
                self.new.push(slot);
            }
        }
    }

    /// Removes tunnels that no vlink uses any more.
    fn forget_unused(&mut self, wishes: &Wishes) {
        for slot in 0..self.slots.len() {
            let unused = |tunnel: &mut UnderlayTunnel| Arc::strong_count(&tunnel.hop) == 1;
            if let Some(tunnel) = self.slots[slot].take_if(unused) {
                self.by_ends.remove(&tunnel.ends);
                if let Some(route) = tunnel.route {
                    self.by_gateway.remove(&(tunnel.ends.0, route.gateway, slot));
                }
                wishes.remove(slot);
                self.free.push(slot);
            }
        }
    }

    /// Sets the tunnel's route.
    fn set_route(&mut self, slot: usize, route: Option<RemoteRoute>) {
        let Some(tunnel) = self.slots[slot].as_mut() else { return };
        let was = std::mem::replace(&mut tunnel.route, route);
        let (was, is) = (was.map(|it| it.gateway), route.map(|it| it.gateway));
        if was == is {
            return;
        }
        tunnel.unanswered = None;
        tunnel.hop.wish();
        if let Some(was) = was {
            self.by_gateway.remove(&(tunnel.ends.0, was, slot));
        }
        if let Some(is) = is {
            self.by_gateway.insert((tunnel.ends.0, is, slot));
        }
    }

    /// Publishes the tunnel's next hop to workers.
    fn show(&mut self, slot: usize, neighbours: &UnderlayNeighbours, wishes: &Wishes) {
        let Some(tunnel) = self.slots[slot].as_mut() else { return };
        let route = tunnel.route.map(|route| (route, (tunnel.ends.0, route.gateway)));
        let hop = match route.map(|(route, by)| (route, neighbours.get(&by))) {
            Some((route, Some(UnderlayNeighbour::Known(mac)))) => {
                (tunnel.poked, tunnel.unanswered) = (None, None);
                wishes.remove(slot);
                let mtu = route.mtu.and_then(|mtu| u16::try_from(mtu).ok()).unwrap_or(u16::MAX);
                Some(NextHopInfo { mac: *mac, mtu })
            }
            Some((_, Some(UnderlayNeighbour::Failed))) => {
                tunnel.unanswered.get_or_insert_with(Instant::now);
                None
            }
            Some((_, None)) | None => None,
        };
        self.changed |= tunnel.hop.peek() != hop;
        tunnel.hop.resolve(hop);
    }

    /// Slots of the tunnels with this next hop.
    fn by(&self, (ifindex, gateway): (u32, IpAddr)) -> Vec<usize> {
        let all = (ifindex, gateway, 0)..=(ifindex, gateway, usize::MAX);
        self.by_gateway.range(all).map(|(_, _, slot)| *slot).collect()
    }
}

impl UnderlayTunnel {
    fn problem(&self, packet_bytes: u32, link_mtu: u32) -> Option<UnderlayProblem> {
        if self.no_address {
            return Some(UnderlayProblem::NoAddress);
        }
        let Some(route) = self.route else { return Some(UnderlayProblem::NoRoute) };
        if self.unanswered.is_some_and(|since| since.elapsed() >= UNANSWERED) {
            return Some(UnderlayProblem::Unanswered { router: route.gateway != self.ends.2 });
        }
        let path_bytes = route.mtu.map_or(link_mtu, |mtu| mtu.min(link_mtu));
        let problem = UnderlayProblem::PathMtu { path_bytes, packet_bytes };
        (path_bytes < packet_bytes).then_some(problem)
    }

    /// True if it is time for another datagram to resolve the next hop.
    fn is_poke_due(&self, every: Duration) -> bool {
        self.poked.is_none_or(|at| at.elapsed() >= every)
    }
}

/// The thread that follows the kernel.
struct UnderlayFollower {
    underlay: Underlay,
    /// For neighbours, and for everything else.
    monitors: [Netlink; 2],
    query: Query,
    neighbours: UnderlayNeighbours,
    /// Sources of datagrams since the last check, by local address (and interface, if link-local).
    /// Errors from routers find them.
    sockets: HashMap<(IpAddr, u32), UdpSocket>,
    asks_left: usize,
    /// Slot where the next check begins.
    next_slot: usize,
    /// Slots whose routes must be queried after routers had time to answer.
    asked: Vec<usize>,
}

/// Notifications from the kernel.
#[derive(Debug, Default)]
struct UnderlayChanges {
    /// True if notifications about neighbours, or about everything
    /// else, were lost. Then all of them may have changed.
    lost: [bool; 2],
    routes: bool,
    neighbours: Vec<(u32, IpAddr)>,
    links: Vec<(u32, Option<UnderlayLink>)>,
}

impl UnderlayFollower {
    fn run(mut self) {
        let mut heard = UnderlayChanges { lost: [true; 2], ..UnderlayChanges::default() };
        let start = Instant::now();
        let (mut next_look, mut next_all) = (start, start);
        let mut next_answers = None;
        loop {
            let now = Instant::now();
            let underlay = self.underlay.clone();
            let mut tunnels = underlay.tunnels();
            for (ifindex, link) in std::mem::take(&mut heard.links) {
                tunnels.changed = true;
                match link {
                    Some(link) => tunnels.links.insert(ifindex, link),
                    None => tunnels.links.remove(&ifindex),
                };
            }
            if heard.concerns_all() && now >= next_all {
                self.ask_for_all(&mut tunnels, &mut heard);
                next_all = Instant::now() + (now.elapsed() * REST_TIMES).max(REST_MIN);
            }
            for by in std::mem::take(&mut heard.neighbours) {
                for slot in tunnels.by(by) {
                    tunnels.show(slot, &self.neighbours, &self.underlay.wishes);
                }
            }
            for slot in std::mem::take(&mut tunnels.new) {
                self.ask(&mut tunnels, slot);
                match &tunnels.slots[slot] {
                    Some(tunnel) if self.asks_left == 0 => tunnel.hop.wish(),
                    _ => self.poke(&mut tunnels, slot),
                }
            }
            if next_answers.is_some_and(|at| now >= at) {
                next_answers = None;
                for slot in std::mem::take(&mut self.asked) {
                    self.ask(&mut tunnels, slot);
                }
            }
            if now >= next_look {
                next_look = now + LOOK_EVERY;
                self.check(&mut tunnels);
            }
            let next_poke = self.grant(&mut tunnels);
            let changed = std::mem::take(&mut tunnels.changed);
            drop(tunnels);
            if changed {
                *underlay.changes.count() += 1;
                underlay.changes.bell.notify_all();
            }
            if !self.asked.is_empty() {
                next_answers.get_or_insert(now + ANSWER_AFTER);
            }
            let waits = heard.concerns_all().then_some(next_all);
            let others = [next_poke, next_answers, waits];
            self.sleep(others.into_iter().flatten().fold(next_look, Instant::min));
            self.hear(&mut heard);
        }
    }

    /// Queries the state that affects all tunnels.
    fn ask_for_all(&mut self, tunnels: &mut Tunnels, heard: &mut UnderlayChanges) {
        let [neighbours_lost, others_lost] = heard.lost;
        if neighbours_lost && let Ok(neighbours) = self.query.neighbours() {
            heard.lost[0] = false;
            self.neighbours = neighbours;
        }
        if others_lost && let Ok(links) = self.query.links() {
            heard.lost[1] = false;
            (tunnels.links, tunnels.changed) = (links, true);
        }
        let routes = std::mem::take(&mut heard.routes) || others_lost;
        for slot in 0..tunnels.slots.len() {
            if routes {
                self.ask(tunnels, slot);
            } else {
                tunnels.show(slot, &self.neighbours, &self.underlay.wishes);
            }
        }
    }

    /// Queries the route of a tunnel, and checks its local address.
    fn ask(&mut self, tunnels: &mut Tunnels, slot: usize) {
        let Some(tunnel) = tunnels.slots[slot].as_mut() else { return };
        let (ifindex, local, _) = tunnel.ends;
        let missing = |error: io::Error| error.kind() == io::ErrorKind::AddrNotAvailable;
        tunnel.no_address = self.socket(ifindex, local).is_err_and(missing);
        self.underlay.questions.fetch_add(1, Ordering::Relaxed);
        let route = self.query.route(tunnel.ends);
        tunnels.set_route(slot, route);
        tunnels.show(slot, &self.neighbours, &self.underlay.wishes);
    }

    /// Each second, checks which paths are used and which next hops failed last time.
    fn check(&mut self, tunnels: &mut Tunnels) {
        tunnels.forget_unused(&self.underlay.wishes);
        self.sockets.clear();
        self.asks_left = ASKS_MAX;
        let count = tunnels.slots.len();
        for slot in (self.next_slot..count).chain(0..self.next_slot.min(count)) {
            let Some(tunnel) = &tunnels.slots[slot] else { continue };
            let due = match tunnel.hop.is_known() {
                true => tunnel.hop.used.load(Ordering::Relaxed),
                false => tunnel.unanswered.is_some() && tunnel.is_poke_due(POKE_UNUSED_EVERY),
            };
            // The other half is for tunnels with waiting frames.
            if due && self.asks_left <= ASKS_MAX / 2 {
                self.next_slot = slot;
                return;
            }
            if due {
                tunnel.hop.used.store(false, Ordering::Relaxed);
                self.poke(tunnels, slot);
            }
        }
    }

    /// Resolves the next hops for which frames wait. Returns
    /// the time to continue with the remaining ones.
    fn grant(&mut self, tunnels: &mut Tunnels) -> Option<Instant> {
        let wishes = self.underlay.wishes.clone();
        let mut next: Option<Instant> = None;
        for slot in slots(&wishes.all()) {
            let tunnel = tunnels.slots.get(slot).and_then(Option::as_ref);
            let open = tunnel.filter(|tunnel| !tunnel.hop.is_known());
            let poked = open
                .and_then(|tunnel| tunnel.poked)
                .filter(|_| open.is_some_and(|tunnel| !tunnel.is_poke_due(POKE_EVERY)));
            if let Some(poked) = poked {
                next = next.into_iter().chain([poked + POKE_EVERY]).min();
            } else if open.is_some() && self.asks_left == 0 {
                continue;
            } else {
                wishes.remove(slot);
                if open.is_some() {
                    self.poke(tunnels, slot);
                }
            }
        }
        next
    }

    /// Sends a datagram along a tunnel's path, as long as its longest packet. The kernel resolves
    /// the next hop, and learns of a router for which the datagram is too long.
    fn poke(&mut self, tunnels: &mut Tunnels, slot: usize) {
        let Some(tunnel) = tunnels.slots[slot].as_mut() else { return };
        let now = Instant::now();
        self.asks_left = self.asks_left.saturating_sub(1);
        self.asked.push(slot);
        tunnel.poked = (!tunnel.hop.is_known()).then_some(now);
        let (ifindex, local, remote) = tunnel.ends;
        let (Ok(socket), Some(route)) = (self.socket(ifindex, local), tunnel.route) else { return };
        if !tunnel.hop.is_known() {
            tunnel.unanswered.get_or_insert(now);
        }
        let (header, least) = match remote {
            IpAddr::V4(_) => (outer::IPV4_BYTES, IPV4_BYTES_MIN),
            IpAddr::V6(_) => (outer::IPV6_BYTES, IPV6_BYTES_MIN),
        };
        let bytes = tunnel.packet_bytes;
        let link_mtu = tunnels.links.get(&ifindex).map_or(u32::MAX, |link| link.mtu);
        // The kernel would fragment a datagram longer than the known path MTU.
        let whole = (least + 1..=route.mtu.unwrap_or(link_mtu).min(link_mtu)).contains(&bytes);
        let payload = if whole { bytes as usize - header - udp::HEADER_BYTES } else { 1 };
        let payload = &NOTHING[..payload.min(NOTHING.len())];
        // Fails if there is no route or neighbour.
        let _ = socket.send_to(payload, inet(remote, DISCARD_PORT, ifindex));
    }

    fn socket(&mut self, ifindex: u32, local: IpAddr) -> io::Result<&UdpSocket> {
        if self.sockets.len() >= SOCKETS_MAX {
            self.sockets.clear();
        }
        let scope = if is_of_link(local) { ifindex } else { 0 };
        match self.sockets.entry((local, scope)) {
            Entry::Occupied(open) => Ok(open.into_mut()),
            Entry::Vacant(place) => {
                let socket = UdpSocket::bind(inet(local, 0, ifindex))?;
                socket.set_nonblocking(true)?;
                // Nobody reads from it, so it needs the smallest buffer.
                set_socket_recv_buffer_size(&socket, 0)?;
                Ok(place.insert(socket))
            }
        }
    }

    /// Sleeps until a notification, a new request, or `until`.
    fn sleep(&self, until: Instant) {
        if self.underlay.tunnels().new.is_empty() {
            let wait = until.saturating_duration_since(Instant::now());
            let timeout =
                Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
            let [neighbours, others] = &self.monitors;
            let mut fds = [neighbours.as_fd(), others.as_fd(), self.underlay.wishes.bell.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            // A signal ends it as well.
            let _ = poll(&mut fds, Some(&timeout));
        }
        self.underlay.wishes.awake();
        std::thread::sleep(SETTLE);
    }

    /// Reads the kernel's notifications.
    fn hear(&mut self, heard: &mut UnderlayChanges) {
        let Self { monitors, neighbours, sockets, .. } = self;
        for (from, monitor) in monitors.iter_mut().enumerate() {
            for _ in 0..HEARD_MAX {
                match monitor.receive() {
                    Ok(NetlinkRead::Datagram(datagram)) => {
                        heard.read(datagram, neighbours, sockets)
                    }
                    Ok(NetlinkRead::Empty) => break,
                    // The remaining notifications are older than the state that is queried next.
                    Ok(NetlinkRead::Lost) | Err(_) => heard.lost[from] = true,
                }
            }
        }
    }
}

impl UnderlayChanges {
    /// Notes the changes in a datagram. Closes `sockets` if local addresses changed.
    fn read(
        &mut self,
        datagram: &[u8],
        neighbours: &mut UnderlayNeighbours,
        sockets: &mut HashMap<(IpAddr, u32), UdpSocket>,
    ) {
        for message in messages(datagram) {
            match message.kind {
                libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => {
                    let Some((by, state)) = neighbour(message.payload) else { continue };
                    let was = match state.filter(|_| message.kind == libc::RTM_NEWNEIGH) {
                        Some(state) => neighbours.insert(by, state),
                        None => neighbours.remove(&by),
                    };
                    if neighbours.get(&by) != was.as_ref() {
                        self.neighbours.push(by);
                    }
                }
                libc::RTM_NEWLINK | libc::RTM_DELLINK => {
                    self.routes = true;
                    let Some((ifindex, link)) = link(message.payload) else { continue };
                    let link = Some(link).filter(|_| message.kind == libc::RTM_NEWLINK);
                    self.links.push((ifindex, link));
                }
                kind => {
                    self.routes = true;
                    if matches!(kind, libc::RTM_NEWADDR | libc::RTM_DELADDR) {
                        sockets.clear();
                    }
                }
            }
        }
    }

    /// True if all tunnels may be affected.
    fn concerns_all(&self) -> bool {
        self.lost != [false; 2] || self.routes
    }
}

/// True for addresses that are specific to a link.
fn is_of_link(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Socket address. A link-local address includes its interface.
fn inet(address: IpAddr, port: u16, ifindex: u32) -> InetAddress {
    match address {
        IpAddr::V6(v6) if is_of_link(address) => SocketAddrV6::new(v6, port, 0, ifindex).into(),
        _ => InetAddress::new(address, port),
    }
}
