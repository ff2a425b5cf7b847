//! Ways of tunnels through the underlay, as the host's kernel knows them: the link address of the
//! next hop, and how long a packet may be.
//!
//! The kernel is asked for the route of each tunnel; it tells what becomes of neighbours and links,
//! and when to ask for routes again. Where it has no neighbour, or has not heard of one for long
//! while frames go there, a datagram to the discard port (RFC 863) from an ordinary socket makes it
//! look. While frames go to a remote, one as long as the longest of them goes there each second: what
//! a router on the way says to one that is too long (RFC 1191, RFC 8201) finds this socket, so that the
//! kernel checks and keeps it as it does for any program (for 10 minutes, and not below 552 bytes or
//! 1,280 over IPv6), and has it in the route when it is asked again. Frames themselves have source
//! ports of flows, where nobody listens; what is said to them is nobody's.
//!
//! Needs no privilege. Workers read one atomic word; who has to hand on what changes waits for it
//! ([`Underlay::wait`]). What happens to a tunnel that nobody uses costs
//! nothing, and the other work has bounds: [`ASKS_MAX`] datagrams and questions a second, a tenth of
//! a CPU for what concerns all tunnels.

#![forbid(unsafe_code)]

mod kernel;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr as InetAddress, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use netlink_packet_core::{NetlinkBuffer, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::Socket;
use pdp_proto::mux::UnderlayProblem;
use pdp_wire::{outer, udp};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::sockopt::set_socket_recv_buffer_size;

use crate::kernel::{
    ADDRESSES, LINKS_AND_NEIGHBOURS, Link, NEIGHBOURS, Neighbour, Neighbours, OTHERS, Query, Route,
    link, monitor, neighbour,
};

/// Different pairs of outer addresses.
pub const TUNNELS_MAX: usize = 16384;

/// Datagrams and questions about single tunnels in a second. What is beyond has its turn later.
pub const ASKS_MAX: usize = 2048;

/// Time in which notifications and wishes gather.
const SETTLE: Duration = Duration::from_millis(1);

/// After questions about all tunnels as many times as long without any, and this long at least.
const REST_TIMES: u32 = 9;
const REST_MIN: Duration = Duration::from_millis(20);

/// Time between two datagrams to one next hop that does not answer.
const POKE_EVERY: Duration = Duration::from_millis(500);

/// The same while no frame waits for it: whether what is told of it is still so.
const POKE_UNUSED_EVERY: Duration = Duration::from_secs(10);

/// Time between two looks at all tunnels, and two datagrams along a way that is used.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Time that a router on the way has to say that a datagram is too long, before the kernel is asked.
const ANSWER_AFTER: Duration = Duration::from_millis(200);

/// A next hop that does not answer for this long is told.
const UNANSWERED: Duration = Duration::from_secs(1);

/// Sockets for datagrams, one for each local address (of a link, on each interface), that are open at a time.
const SOCKETS_MAX: usize = 256;

/// Notifications that are read at a time.
const HEARD_MAX: usize = 1024;

/// Where datagrams go (RFC 863).
const DISCARD_PORT: u16 = 9;

/// Longest IP packet that every way carries, or below which the kernel believes no router (RFC 8200
/// section 5; net.ipv4.route.min_pmtu).
const IPV6_BYTES_MIN: u32 = 1280;
const IPV4_BYTES_MIN: u32 = 552;

/// What datagrams carry, the longest as well.
static NOTHING: [u8; 1 << 16] = [0; 1 << 16];

/// One tunnel's next hop, as workers see it.
#[derive(Debug, Default)]
pub struct NextHop {
    /// The link address in the low 48 bits, above them [`Hop::mtu`]; 0 while unknown.
    state: AtomicU64,
    used: AtomicBool,
    wish: Option<(usize, Arc<Wishes>)>,
}

/// What is known of a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Its link address.
    pub mac: [u8; 6],
    /// Longest IP packet that the way to the remote carries, bytes, as far as known.
    pub mtu: u16,
}

impl NextHop {
    /// What is known, if its link address is. That it is asked for keeps it fresh, or has it looked
    /// for.
    #[inline]
    pub fn find(&self) -> Option<Hop> {
        let hop = self.peek();
        if hop.is_none() {
            self.wish();
        } else if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        hop
    }

    /// The same, without being asked for.
    #[inline]
    fn peek(&self) -> Option<Hop> {
        let state = self.state.load(Ordering::Relaxed);
        let [high, low, mac @ ..] = state.to_be_bytes();
        (state != 0).then_some(Hop { mac, mtu: u16::from_be_bytes([high, low]) })
    }

    /// Has it looked for.
    fn wish(&self) {
        if let Some((slot, wishes)) = &self.wish {
            wishes.add(*slot);
        }
    }

    /// One that needs no looking for.
    pub fn known(mac: [u8; 6]) -> Self {
        let hop = Self::default();
        hop.resolve(Some(Hop { mac, mtu: u16::MAX }));
        hop
    }

    /// Sets what workers see.
    pub fn resolve(&self, hop: Option<Hop>) {
        let state = hop.map_or(0, |Hop { mac: [a, b, c, d, e, f], mtu }| {
            let [high, low] = mtu.max(1).to_be_bytes();
            u64::from_be_bytes([high, low, a, b, c, d, e, f])
        });
        self.state.store(state, Ordering::Relaxed);
    }

    fn is_known(&self) -> bool {
        self.state.load(Ordering::Relaxed) != 0
    }
}

/// The tunnels for whose next hops frames wait, a bit each; any thread may wish.
#[derive(Debug)]
struct Wishes {
    bits: Box<[AtomicU64]>,
    bell: OwnedFd,
    /// Whether the bell was rung since the follower last woke up.
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

    /// Wakes the follower, after something was left for it.
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Fails only if it was rung 2^64 times and not answered.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// The follower is awake, and sees what was left until now.
    fn awake(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        self.rung.swap(false, Ordering::AcqRel);
    }

    fn remove(&self, slot: usize) {
        self.bits[slot / 64].fetch_and(!(1 << (slot % 64)), Ordering::Relaxed);
    }

    /// All of them.
    fn all(&self) -> Vec<u64> {
        self.bits.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }
}

/// The slots of bits that are set.
fn slots(bits: &[u64]) -> impl Iterator<Item = usize> {
    bits.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(|(at, word)| {
        (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 64 + bit)
    })
}

/// The host's routes, neighbours and links, followed by a thread of its own.
#[derive(Clone, Debug)]
pub struct Underlay {
    tunnels: Arc<Mutex<Tunnels>>,
    wishes: Arc<Wishes>,
    questions: Arc<AtomicU64>,
    changes: Arc<Changes>,
}

/// How many times something was another way than before, and who waits for that.
#[derive(Debug, Default)]
struct Changes {
    count: Mutex<u64>,
    bell: Condvar,
}

impl Changes {
    fn count(&self) -> MutexGuard<'_, u64> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Interface index, local and remote address.
pub type Ends = (u32, IpAddr, IpAddr);

/// All tunnels.
#[derive(Debug, Default)]
struct Tunnels {
    slots: Vec<Option<Tunnel>>,
    free: Vec<usize>,
    by_ends: HashMap<Ends, usize>,
    /// Slots by the next hops of their routes.
    by_gateway: BTreeSet<(u32, IpAddr, usize)>,
    /// Slots that the kernel was not asked for since they or their links changed.
    new: Vec<usize>,
    links: HashMap<u32, Link>,
    /// Whether a link, or what is known of a next hop, is another one since that was told.
    changed: bool,
}

#[derive(Debug)]
struct Tunnel {
    ends: Ends,
    hop: Arc<NextHop>,
    /// Longest IP packet of its vlinks, bytes.
    packet_bytes: u32,
    route: Option<Route>,
    /// The local address is none of the host's.
    no_address: bool,
    /// When the kernel was last made to look for the next hop, while it is not known.
    poked: Option<Instant>,
    /// Since when the next hop does not answer.
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
        let follower = Follower {
            underlay: underlay.clone(),
            monitors: [monitor(&NEIGHBOURS)?, monitor(&OTHERS)?],
            query: Query::new()?,
            neighbours: HashMap::new(),
            sockets: HashMap::new(),
            asks_left: ASKS_MAX,
            turn: 0,
            asked: vec![],
            buffer: Vec::with_capacity(1 << 16),
        };
        let thread = std::thread::Builder::new().name("underlay".into());
        thread.spawn(move || follower.run())?;
        Ok(underlay)
    }

    /// Routes that the kernel was asked for until now.
    pub fn questions(&self) -> u64 {
        self.questions.load(Ordering::Relaxed)
    }

    fn tunnels(&self) -> MutexGuard<'_, Tunnels> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next hop from `local` to `remote` by the interface `ifindex`, for IP packets of up to
    /// `packet_bytes`; `None` beyond [`TUNNELS_MAX`].
    pub fn next_hop(
        &self,
        ifindex: u32,
        local: IpAddr,
        remote: IpAddr,
        packet_bytes: u32,
    ) -> Option<Arc<NextHop>> {
        let hop = self.tunnels().take((ifindex, local, remote), packet_bytes, &self.wishes)?;
        self.wishes.ring();
        Some(hop)
    }

    /// What is known of such a way, and the longest IP packet that the interface carries as well; `None` also while the
    /// interface has no carrier.
    pub fn way(&self, ends: Ends) -> Option<Hop> {
        let tunnels = self.tunnels();
        let hop = tunnels.slots[*tunnels.by_ends.get(&ends)?].as_ref()?.hop.peek()?;
        let link = tunnels.links.get(&ends.0).filter(|link| link.up && link.carrier)?;
        Some(Hop { mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX).min(hop.mtu), ..hop })
    }

    /// Waits until what [`Underlay::way`] says of some way may be otherwise than when this returned `seen`, or for as
    /// long as `most`. Before the first time, `seen` is 0.
    pub fn wait(&self, seen: u64, most: Duration) -> u64 {
        let count = self.changes.count();
        let waited = self.changes.bell.wait_timeout_while(count, most, |count| *count == seen);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Says how long the longest IP packets of tunnels are, bytes.
    pub fn set_lengths(&self, lengths: &HashMap<Ends, u32>) {
        self.tunnels().set_lengths(lengths);
        self.wishes.ring();
    }

    /// What is wrong with the way of such packets; `None` also for what nobody has asked for.
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
            Some(Link { up: true, carrier: true, mtu }) => tunnel.problem(packet_bytes, *mtu),
            Some(Link { up: true, .. }) => Some(UnderlayProblem::NoCarrier),
            _ => Some(UnderlayProblem::Down),
        }
    }
}

impl Tunnels {
    fn take(
        &mut self,
        ends: Ends,
        packet_bytes: u32,
        wishes: &Arc<Wishes>,
    ) -> Option<Arc<NextHop>> {
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
        let hop = Arc::new(NextHop { wish: Some((slot, wishes.clone())), ..NextHop::default() });
        self.slots[slot] = Some(Tunnel {
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

    fn set_lengths(&mut self, lengths: &HashMap<Ends, u32>) {
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

    /// What no vlink has any more.
    fn forget_unused(&mut self, wishes: &Wishes) {
        for slot in 0..self.slots.len() {
            let unused = |tunnel: &mut Tunnel| Arc::strong_count(&tunnel.hop) == 1;
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

    /// The tunnel's route is this one.
    fn set_route(&mut self, slot: usize, route: Option<Route>) {
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

    /// Lets workers see what is known of a tunnel's next hop.
    fn show(&mut self, slot: usize, neighbours: &Neighbours, wishes: &Wishes) {
        let Some(tunnel) = self.slots[slot].as_mut() else { return };
        let route = tunnel.route.map(|route| (route, (tunnel.ends.0, route.gateway)));
        let hop = match route.map(|(route, by)| (route, neighbours.get(&by))) {
            Some((route, Some(Neighbour::Known(mac)))) => {
                (tunnel.poked, tunnel.unanswered) = (None, None);
                wishes.remove(slot);
                let mtu = route.mtu.and_then(|mtu| u16::try_from(mtu).ok()).unwrap_or(u16::MAX);
                Some(Hop { mac: *mac, mtu })
            }
            Some((_, Some(Neighbour::Failed))) => {
                tunnel.unanswered.get_or_insert_with(Instant::now);
                None
            }
            Some((_, None)) | None => None,
        };
        self.changed |= tunnel.hop.peek() != hop;
        tunnel.hop.resolve(hop);
    }

    /// The slots of tunnels by this next hop.
    fn by(&self, (ifindex, gateway): (u32, IpAddr)) -> Vec<usize> {
        let all = (ifindex, gateway, 0)..=(ifindex, gateway, usize::MAX);
        self.by_gateway.range(all).map(|(_, _, slot)| *slot).collect()
    }
}

impl Tunnel {
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

    /// Whether a datagram is due that makes the kernel look for the next hop.
    fn is_poke_due(&self, every: Duration) -> bool {
        self.poked.is_none_or(|at| at.elapsed() >= every)
    }
}

/// The thread that follows the kernel.
struct Follower {
    underlay: Underlay,
    /// For neighbours, and for all else.
    monitors: [Socket; 2],
    query: Query,
    neighbours: Neighbours,
    /// From which datagrams went since the last look, by local address and, where that is of a link, its
    /// interface: answers find them.
    sockets: HashMap<(IpAddr, u32), UdpSocket>,
    asks_left: usize,
    /// Slot from which on the next look begins.
    turn: usize,
    /// Slots whose routes are to be asked for once datagrams were answered.
    asked: Vec<usize>,
    buffer: Vec<u8>,
}

/// What the kernel has told.
#[derive(Debug, Default)]
struct Heard {
    /// What was lost of neighbours, and of all else: everything of it may have changed.
    lost: [bool; 2],
    routes: bool,
    neighbours: Vec<(u32, IpAddr)>,
    links: Vec<(u32, Option<Link>)>,
}

impl Follower {
    fn run(mut self) {
        let mut heard = Heard { lost: [true; 2], ..Heard::default() };
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
                self.look(&mut tunnels);
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

    /// Asks for what concerns all tunnels.
    fn ask_for_all(&mut self, tunnels: &mut Tunnels, heard: &mut Heard) {
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

    /// Asks for the route of one, and whether it has its address.
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

    /// Sees, each second, which ways are used, and which next hops did not answer the last time.
    fn look(&mut self, tunnels: &mut Tunnels) {
        tunnels.forget_unused(&self.underlay.wishes);
        self.sockets.clear();
        self.asks_left = ASKS_MAX;
        let count = tunnels.slots.len();
        for slot in (self.turn..count).chain(0..self.turn.min(count)) {
            let Some(tunnel) = &tunnels.slots[slot] else { continue };
            let due = match tunnel.hop.is_known() {
                true => tunnel.hop.used.load(Ordering::Relaxed),
                false => tunnel.unanswered.is_some() && tunnel.is_poke_due(POKE_UNUSED_EVERY),
            };
            // Half is for those that frames wait for.
            if due && self.asks_left <= ASKS_MAX / 2 {
                self.turn = slot;
                return;
            }
            if due {
                tunnel.hop.used.store(false, Ordering::Relaxed);
                self.poke(tunnels, slot);
            }
        }
    }

    /// Has the kernel look for those that frames wait for. Returns when to go on with those that
    /// wait on.
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

    /// Sends a datagram along the way of a tunnel, as long as the longest of its packets: the kernel looks
    /// for the next hop, and hears of a router that finds it too long.
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
        // One that is longer than what is known of the way the kernel would send in pieces.
        let whole = (least + 1..=route.mtu.unwrap_or(link_mtu).min(link_mtu)).contains(&bytes);
        let payload = if whole { bytes as usize - header - udp::HEADER_BYTES } else { 1 };
        let payload = &NOTHING[..payload.min(NOTHING.len())];
        // Fails where there is nobody to find.
        let _ = socket.send_to(payload, inet(remote, DISCARD_PORT, ifindex));
    }

    fn socket(&mut self, ifindex: u32, local: IpAddr) -> io::Result<&UdpSocket> {
        if self.sockets.len() >= SOCKETS_MAX {
            self.sockets.clear();
        }
        let scope = if is_of_link(local) { ifindex } else { 0 };
        match self.sockets.entry((local, scope)) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => {
                let socket = UdpSocket::bind(inet(local, 0, ifindex))?;
                socket.set_nonblocking(true)?;
                // Nobody reads what comes: as little as can be is kept.
                set_socket_recv_buffer_size(&socket, 0)?;
                Ok(place.insert(socket))
            }
        }
    }

    /// Sleeps until the kernel tells something, somebody wishes something new, or it is time.
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

    /// Takes in what the kernel has told.
    fn hear(&mut self, heard: &mut Heard) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for from in 0..self.monitors.len() {
            for _ in 0..HEARD_MAX {
                buffer.clear();
                match self.monitors[from].recv(&mut buffer, 0) {
                    Ok(0) => break,
                    Ok(_) => self.read(&buffer, heard),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    // Some were lost. What is left of them is older than what is asked for then.
                    Err(_) => heard.lost[from] = true,
                }
            }
        }
        self.buffer = buffer;
    }

    fn read(&mut self, mut rest: &[u8], heard: &mut Heard) {
        while let Ok(message) = NetlinkBuffer::new_checked(rest) {
            let length = message.length() as usize;
            if !LINKS_AND_NEIGHBOURS.contains(&message.message_type()) {
                heard.routes = true;
                if ADDRESSES.contains(&message.message_type()) {
                    self.sockets.clear();
                }
            } else if let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                && let NetlinkPayload::InnerMessage(message) = message.payload
            {
                self.note(&message, heard);
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }

    fn note(&mut self, message: &RouteNetlinkMessage, heard: &mut Heard) {
        let (by, neighbour) = match message {
            RouteNetlinkMessage::NewNeighbour(message) => match neighbour(message) {
                Some((by, neighbour)) => (by, neighbour),
                None => return,
            },
            RouteNetlinkMessage::DelNeighbour(message) => match neighbour(message) {
                Some((by, _)) => (by, None),
                None => return,
            },
            RouteNetlinkMessage::NewLink(message) => {
                heard.routes = true;
                return heard.links.push((message.header.index, Some(link(message))));
            }
            RouteNetlinkMessage::DelLink(message) => {
                heard.routes = true;
                return heard.links.push((message.header.index, None));
            }
            _ => return,
        };
        let was = match neighbour {
            Some(neighbour) => self.neighbours.insert(by, neighbour),
            None => self.neighbours.remove(&by),
        };
        if was != neighbour {
            heard.neighbours.push(by);
        }
    }
}

impl Heard {
    /// Whether all tunnels may be concerned.
    fn concerns_all(&self) -> bool {
        self.lost != [false; 2] || self.routes
    }
}

/// Whether an address is another one on each link.
fn is_of_link(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// An address for sockets; one of a link names it.
fn inet(address: IpAddr, port: u16, ifindex: u32) -> InetAddress {
    match address {
        IpAddr::V6(v6) if is_of_link(address) => SocketAddrV6::new(v6, port, 0, ifindex).into(),
        _ => InetAddress::new(address, port),
    }
}
