//! Peer listener: it listens at the control sockets of memif
//! connections, does handshakes, and notices disconnected peers.
//!
//! It runs in its own thread, and gives workers connections that are ready to use.
//! However many sockets there are, it checks only those with events. A socket
//! keeps listening while a peer is connected, so that a replacement finds it.
//!
//! A peer that broke the contract has to wait [`FAULT_PAUSE`] before it may reconnect. Peers that
//! connect more often than [`CONNECTS_A_SECOND`] wait in the kernel. Connecting costs this process
//! memory maps, and workers one command each. A guest must not be able to cause this without limit.

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pdp_memif::{Handshake, HandshakeError, Listener, MemifConnection, MemifControl, RegionQuota};
use pdp_proto::mux::Rate;
use rustix::event::{Timespec, epoll};
use tracing::{info, warn};

use crate::channel::{PeerChannel, PeerConnection};
use crate::connections::{Dropped, Ended};
use crate::control::plan::{Expected, SocketOwner};
use crate::control::workers::WorkerHandle;
use crate::core::Core;
use crate::netdev::program::MemifNetdev;
use crate::police::TokenBucket;
use crate::vnet::NodePeer;
use crate::wake::Wake;

/// Handshakes at one socket at a time.
const HANDSHAKES_MAX: usize = 8;

/// Time for which a peer that broke the contract is refused.
const FAULT_PAUSE: Duration = Duration::from_secs(1);

/// Connections that may begin at one socket each second, and at once, for each of its interfaces.
const CONNECTS_A_SECOND: u64 = 10;
const CONNECTS_AT_ONCE: u64 = 32;

/// Additional pause of a socket, so that it accepts several connections at a time afterwards.
const EXTRA_PAUSE_NS: u64 = 200_000_000;

/// Interval of checks for expired handshakes and for sockets whose pause is over.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Sockets that are checked before the lock is released.
const EVENTS_MAX: usize = 64;

/// Number of the thread's own doorbell.
const WAKE: u64 = 0;

impl Expected {
    /// Lets the worker detach a connection, if it still has it.
    fn detach(&self, epoch: u64, workers: &[WorkerHandle]) {
        let (slot, of_vnet) = (self.slot, self.peer.is_some());
        workers[self.worker].notify(move |worker| {
            if of_vnet {
                worker.change(slot, |vnet, core| vnet.detach(epoch, core));
                return;
            }
            let Core { externals, connections, .. } = &mut worker.core;
            let external = externals.get_mut(usize::from(slot)).and_then(Option::as_mut);
            if let Some(program) = external.and_then(|it| it.netdevs.find::<MemifNetdev>()) {
                program.detach(epoch, connections);
            }
        });
    }

    /// Records a refusal where the tenant can read it.
    fn note(&self, fault: String, workers: &[WorkerHandle]) {
        let Some((node, NodePeer::Guest(number))) = self.peer.clone() else { return };
        let slot = self.slot;
        workers[self.worker].notify(move |worker| {
            worker.change(slot, |vnet, _| vnet.note_fault(&node, number, fault));
        });
    }
}

/// A socket where a peer may connect. Every watched socket has a
/// unique number. A connection has the number of its handshake.
struct PeerSocket {
    number: u64,
    expected: Expected,
    /// Limit that its memory regions count against. All sockets of one tenant share it.
    share: Arc<RegionQuota>,
    listener: Listener,
    handshakes: HashMap<u64, Handshake>,
    connected: HashMap<u64, ConnectedPeer>,
    not_before: Option<Instant>,
    /// Rate limit of new connections.
    connects: TokenBucket,
    /// End of its pause, nanoseconds since the listener began. It does not listen before.
    paused_until_ns: Option<u64>,
}

struct ConnectedPeer {
    interface: u32,
    control: MemifControl,
}

/// All sockets, by path.
#[derive(Default)]
struct PeerSockets {
    all: HashMap<Arc<Path>, PeerSocket>,
    /// Paths of the listening and connected sockets, by number.
    paths: HashMap<u64, Arc<Path>>,
    /// Paths that are paused or have handshakes.
    due: HashSet<Arc<Path>>,
    /// Last number used.
    number: u64,
}

/// Prepared changes of an owner's sockets, for [`PeerListener::commit`].
pub struct Prepared {
    owner: SocketOwner,
    wanted: HashMap<PathBuf, Expected>,
    listeners: HashMap<PathBuf, Listener>,
}

/// Reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestRefusal {
    /// No listening sockets were offered for these paths. The request may succeed once they are.
    Lacks(Vec<PathBuf>),
    /// The request failed.
    Failed(String),
}

impl From<String> for RequestRefusal {
    fn from(error: String) -> Self {
        Self::Failed(error)
    }
}

/// Handle of the peer listener's thread and its state.
#[derive(Clone)]
pub struct PeerListener {
    sockets: Arc<Mutex<PeerSockets>>,
    /// Offered listening sockets that are not in use yet.
    listeners: Arc<Mutex<HashMap<PathBuf, Listener>>>,
    epoll: Arc<OwnedFd>,
    workers: Arc<[WorkerHandle]>,
    checks: Arc<AtomicU64>,
}

impl PeerListener {
    /// Starts the thread. Workers send the connections
    /// that they gave up by `dropped`, and ring `wake`.
    pub fn start(
        workers: Arc<[WorkerHandle]>,
        dropped: Receiver<Dropped>,
        wake: Arc<Wake>,
    ) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let (places, listeners, checks) = (Arc::default(), Arc::default(), Arc::default());
        let listener = Self { sockets: places, listeners, epoll, workers, checks };
        listener.watch(&*wake, WAKE, epoll::EventFlags::IN)?;
        let thread = listener.clone();
        let run = move || thread.run(&dropped, &wake);
        std::thread::Builder::new().name("peer-listener".into()).spawn(run)?;
        Ok(listener)
    }

    /// Returns the number of socket checks so far.
    pub fn checks(&self) -> u64 {
        self.checks.load(Ordering::Relaxed)
    }

    /// Stores listening sockets for later calls of [`PeerListener::prepare`].
    pub fn offer(&self, listeners: impl IntoIterator<Item = (PathBuf, Listener)>) {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).extend(listeners);
    }

    /// Prepares to listen at all `wanted` sockets of `owner`, with sockets
    /// that were offered. Takes no effect before [`PeerListener::commit`]. Sockets
    /// for `others` must have been offered too, for [`PeerListener::take`].
    pub fn prepare(
        &self,
        owner: SocketOwner,
        wanted: HashMap<PathBuf, Expected>,
        others: &[PathBuf],
    ) -> Result<Prepared, RequestRefusal> {
        let places = self.lock();
        let mut new = Vec::new();
        for path in wanted.keys() {
            match places.all.get(&**path) {
                Some(place) if place.expected.owner == owner => {}
                Some(place) => {
                    let other = &place.expected.owner;
                    return Err(
                        format!("socket {} is already used by {other}", path.display()).into()
                    );
                }
                None => new.push(path.clone()),
            }
        }
        let mut offered = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let lacking: Vec<_> =
            new.iter().chain(others).filter(|path| !offered.contains_key(*path)).cloned().collect();
        if !lacking.is_empty() {
            return Err(RequestRefusal::Lacks(lacking));
        }
        let mut listeners = HashMap::new();
        for path in new {
            let Some(listener) = offered.remove(&path) else { continue };
            let fail = |error| format!("can't listen at {}: {error}", path.display());
            self.watch(&listener, WAKE, epoll::EventFlags::empty()).map_err(fail)?;
            listeners.insert(path, listener);
        }
        Ok(Prepared { owner, wanted, listeners })
    }

    /// Takes a socket that was offered.
    pub fn take(&self, path: &Path) -> Option<Listener> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).remove(path)
    }

    /// Applies prepared changes, and ends connections that the owner no longer expects.
    pub fn commit(&self, prepared: Prepared) {
        let Prepared { owner, mut wanted, listeners } = prepared;
        let mut places = self.lock();
        let PeerSockets { all, paths, due, number } = &mut *places;
        all.retain(|path, place| {
            if place.expected.owner != owner {
                return true;
            }
            let wanted = wanted.remove(&**path);
            let identity = |it: &Expected| (it.peer.clone(), it.worker);
            if wanted.as_ref().map(identity) != Some(identity(&place.expected)) {
                let reason = if wanted.is_some() { "replaced" } else { "removed" };
                place.clear(&self.workers, reason, paths);
            }
            let Some(expected) = wanted else {
                // The process that made the socket may also hold it, so closing it is not enough.
                let _ = epoll::delete(&*self.epoll, &place.listener);
                let shaking = place.handshakes.keys().copied();
                shaking.chain([place.number]).for_each(|number| drop(paths.remove(&number)));
                due.remove(path);
                return false;
            };
            place.expected = expected;
            true
        });
        let of_tenant = |place: &&PeerSocket| place.expected.owner.tenant() == owner.tenant();
        let share = all.values().find(of_tenant).map(|place| place.share.clone());
        let share = share.unwrap_or_default();
        for (path, listener) in listeners {
            let Some(expected) = wanted.remove(&path) else { continue };
            let interfaces = u64::from(expected.interfaces);
            let rate = Rate { bps: 0, pps: CONNECTS_A_SECOND * interfaces };
            *number += 1;
            let place = PeerSocket {
                number: *number,
                expected,
                share: share.clone(),
                listener,
                handshakes: HashMap::new(),
                connected: HashMap::new(),
                not_before: None,
                connects: TokenBucket::new(rate, 0, CONNECTS_AT_ONCE * interfaces),
                paused_until_ns: None,
            };
            self.listen(&place, true);
            let path: Arc<Path> = path.into();
            paths.insert(*number, path.clone());
            all.insert(path, place);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PeerSockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, fd: &impl AsFd, number: u64, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&*self.epoll, fd, epoll::EventData::new_u64(number), flags)?)
    }

    /// Accepts connections at `place` from now on, or stops accepting them.
    fn listen(&self, place: &PeerSocket, listens: bool) {
        let flags = if listens { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let data = epoll::EventData::new_u64(place.number);
        if let Err(error) = epoll::modify(&*self.epoll, &place.listener, data, flags) {
            warn!("can't watch {}: {error}", place.expected);
        }
    }

    fn run(&self, dropped: &Receiver<Dropped>, wake: &Wake) {
        let began = Instant::now();
        let mut checked = began;
        let mut ready = Vec::new();
        loop {
            wake.sleeping();
            let mut places = self.lock();
            let gone: Vec<_> = dropped.try_iter().collect();
            for dropped in &gone {
                if let Dropped::Connection(ended) = dropped {
                    places.give_up(ended);
                }
            }
            let now = Instant::now();
            let now_ns = now.duration_since(began).as_nanos() as u64;
            ready.drain(..).for_each(|number| self.handle_event(&mut places, number, now_ns));
            if now.duration_since(checked) >= CHECK_INTERVAL {
                checked = now;
                self.check_due(&mut places, now_ns);
            }
            let left =
                (!places.due.is_empty()).then(|| CHECK_INTERVAL.saturating_sub(checked.elapsed()));
            drop(places);
            // Done without the lock, because it may take long.
            for dropped in gone {
                if let Dropped::Connection(Ended { link, watch, .. }) = dropped {
                    link.channel.doorbell().inspect(|bell| watch.remove(bell));
                }
            }
            let left = left.map(|left| Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() });
            let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
            if let Ok((events, _)) = epoll::wait(&*self.epoll, &mut events, left.as_ref()) {
                ready.extend(events.iter().map(|event| event.data.u64()));
            }
            wake.awake();
        }
    }

    /// Handles an event of the socket with this number.
    fn handle_event(&self, places: &mut PeerSockets, number: u64, now_ns: u64) {
        // It may have ended meanwhile.
        let Some(path) = places.paths.get(&number).cloned() else { return };
        let PeerSockets { all, paths, due, number: last } = places;
        let Some(place) = all.get_mut(&path) else { return };
        self.checks.fetch_add(1, Ordering::Relaxed);
        if place.number == number {
            for handshake in place.accept(now_ns, self) {
                *last += 1;
                if self.watch(&handshake, *last, epoll::EventFlags::IN).is_ok() {
                    paths.insert(*last, path.clone());
                    place.handshakes.insert(*last, handshake);
                }
            }
            if !place.handshakes.is_empty() || place.paused_until_ns.is_some() {
                due.insert(path);
            }
        } else if place.handshakes.contains_key(&number) {
            place.shake_hands(&path, number, self, paths);
        } else {
            place.notice_hangup(number, &self.workers, paths);
        }
    }

    /// Checks for expired handshakes, and for sockets whose pause is over.
    fn check_due(&self, places: &mut PeerSockets, now_ns: u64) {
        let PeerSockets { all, paths, due, .. } = places;
        due.retain(|path| {
            let Some(place) = all.get_mut(path) else { return false };
            if place.paused_until_ns.take_if(|until| now_ns >= *until).is_some() {
                self.listen(place, true);
            }
            let numbers: Vec<_> = place.handshakes.keys().copied().collect();
            for number in numbers {
                self.checks.fetch_add(1, Ordering::Relaxed);
                place.shake_hands(path, number, self, paths);
            }
            !place.handshakes.is_empty() || place.paused_until_ns.is_some()
        });
    }
}

impl PeerSockets {
    /// Handles a connection that a worker gave up.
    fn give_up(&mut self, Ended { epoch, reason, fault, .. }: &Ended) {
        let place = self.paths.get(epoch).and_then(|path| self.all.get_mut(path));
        let Some(place) = place else { return };
        let Some(connected) = place.connected.remove(epoch) else { return };
        self.paths.remove(epoch);
        if *fault {
            warn!("{} is disconnected: {reason}", place.expected);
            place.not_before = Some(Instant::now() + FAULT_PAUSE);
        }
        connected.control.disconnect(reason);
    }
}

impl PeerSocket {
    fn notice_hangup(
        &mut self,
        number: u64,
        workers: &[WorkerHandle],
        paths: &mut HashMap<u64, Arc<Path>>,
    ) {
        let Some(connected) = self.connected.get_mut(&number) else { return };
        let Err(closed) = connected.control.check() else { return };
        info!("{}, interface {}: {closed}", self.expected, connected.interface);
        self.expected.detach(number, workers);
        self.connected.remove(&number);
        paths.remove(&number);
    }

    /// Ends all connections.
    fn clear(
        &mut self,
        workers: &[WorkerHandle],
        reason: &str,
        paths: &mut HashMap<u64, Arc<Path>>,
    ) {
        for (number, it) in self.connected.drain() {
            self.expected.detach(number, workers);
            it.control.disconnect(reason);
            paths.remove(&number);
        }
    }

    /// Accepts new connections, as many as may do handshakes at a time.
    fn accept(&mut self, now_ns: u64, listener: &PeerListener) -> Vec<Handshake> {
        let mut accepted = vec![];
        while let Ok(Some(handshake)) = self.listener.accept_for(&self.share, self.expected.regions)
        {
            if let Err(until_ns) = self.connects.take(now_ns, 0) {
                // This connection exceeds the rate and is dropped. Others wait in the kernel.
                warn!("{} connects too often: its connections are paused", self.expected);
                self.paused_until_ns = Some(until_ns + EXTRA_PAUSE_NS);
                listener.listen(self, false);
                break;
            }
            if self.handshakes.len() + accepted.len() < HANDSHAKES_MAX {
                accepted.push(handshake);
            }
        }
        accepted
    }

    fn shake_hands(
        &mut self,
        path: &Path,
        number: u64,
        listener: &PeerListener,
        paths: &mut HashMap<u64, Arc<Path>>,
    ) {
        let Some(mut handshake) = self.handshakes.remove(&number) else { return };
        let welcome = self.not_before.is_none_or(|at| Instant::now() >= at);
        let free = |id: u32| {
            let connected = self.connected.values().any(|it| it.interface == id);
            welcome && id < self.expected.interfaces && !connected
        };
        match handshake.poll(free) {
            Ok(None) => {
                self.handshakes.insert(number, handshake);
                return;
            }
            Ok(Some(connection)) => {
                if self.attach(connection, number, listener) {
                    return;
                }
            }
            Err(error) => {
                warn!("{}: {error}", path.display());
                // A peer that is refused was told the reason before.
                if welcome && matches!(error, HandshakeError::Refused(_)) {
                    self.expected.note(error.to_string(), &listener.workers);
                }
            }
        }
        paths.remove(&number);
    }

    /// Gives a connection to its worker. False if the worker does not expect it.
    fn attach(
        &mut self,
        connection: MemifConnection,
        number: u64,
        listener: &PeerListener,
    ) -> bool {
        let MemifConnection { interface_id: interface, name, tx, rx, control, .. } = connection;
        let expected = self.expected.clone();
        let slot = expected.peer.is_some().then_some(expected.slot);
        let worker = &listener.workers[expected.worker];
        if let Err(error) = worker.watch.add_bell(slot, &rx) {
            warn!("{expected}: its doorbell can't be watched: {error}");
            control.disconnect("doorbell can't be watched");
            return false;
        }
        let attached = worker.call(move |worker| {
            let Expected { owner, slot, peer, .. } = expected;
            let mut refused = Some(PeerConnection::new(tx, rx, number));
            match (owner, peer) {
                (SocketOwner::Vnet(name), Some((node, place))) => {
                    worker.change(slot, |vnet, _| {
                        if let Some(link) = refused.take_if(|_| vnet.name == name) {
                            refused = vnet.attach(&node, place, interface, link).err();
                        }
                    });
                }
                (SocketOwner::External(name), None) => {
                    let external = worker.core.external(usize::from(slot));
                    let external = external.filter(|external| external.name == name);
                    if let Some(program) = external.and_then(|it| it.netdevs.find::<MemifNetdev>())
                    {
                        let link = refused.take().map(Box::new);
                        refused = link.and_then(|it| program.attach(it).err()).map(|it| *it);
                    }
                }
                _ => {}
            }
            refused
        });
        match attached {
            Ok(None) => {
                info!("{}, interface {interface}: {name:?} is connected", self.expected);
                self.connected.insert(number, ConnectedPeer { interface, control });
                return true;
            }
            Ok(Some(link)) => {
                link.channel.doorbell().inspect(|bell| worker.watch.remove(bell));
                control.disconnect("not expected");
            }
            Err(error) => warn!("{error}"),
        }
        false
    }
}
