//! Keeps the control sockets of memif connections: listens, shakes hands, notices who is gone.
//!
//! A thread of its own; workers get connections ready to use. A place keeps listening while
//! somebody is connected, so that a replacement finds it. Who broke the contract has to wait
//! [`FAULT_PAUSE`] before it may come again, and whoever comes more often than
//! [`CONNECTS_A_SECOND`] waits in the kernel: connecting costs this process memory maps and workers a
//! command each, which a guest must not be able to take without end.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pdp_memif::{Connection, Control, Handshake, HandshakeError, Listener, Share};
use pdp_proto::mux::Rate;
use rustix::event::{Timespec, epoll};
use tracing::{info, warn};

use crate::control::WorkerHandle;
use crate::core::{Core, Dropped};
use crate::peer::Link;
use crate::police::TokenBucket;
use crate::vnet::Who;
use crate::wake::Wake;

/// Handshakes at one place at a time.
const HANDSHAKES_MAX: usize = 8;

/// How long who broke the contract is kept out.
const FAULT_PAUSE: Duration = Duration::from_secs(1);

/// Connections that are begun at one place, each second and at once, for each of its interfaces.
const CONNECTS_A_SECOND: u64 = 10;
const CONNECTS_AT_ONCE: u64 = 32;

/// What a place rests longer than it must, so that several are taken at a time.
const REST_NS: u64 = 200_000_000;

/// How often handshakes are looked at for having taken too long.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// What somebody is expected for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The vnet with this name.
    Vnet(String),
    /// The external interface with this name.
    External(String),
}

impl Owner {
    /// Who it is of: of one tenant's vnets (`TENANT.NAME`) the tenant, of others themselves.
    fn tenant(&self) -> (bool, &str) {
        match self {
            Self::Vnet(name) => (true, name.split_once('.').map_or(name, |(tenant, _)| tenant)),
            Self::External(name) => (false, name),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vnet(name) => write!(f, "vnet {name}"),
            Self::External(name) => write!(f, "external {name}"),
        }
    }
}

/// Somebody who is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// For what.
    pub owner: Owner,
    /// The worker that has it.
    pub worker: usize,
    /// The owner's slot there.
    pub slot: u16,
    /// Of a vnet: of which node, and who.
    pub seat: Option<(String, Who)>,
    /// Interface ids from 0 that may connect.
    pub interfaces: u32,
    /// Regions that each may have.
    pub regions: usize,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.seat {
            Some((node, who)) => write!(f, "{}: {who:?} of {node}", self.owner),
            None => write!(f, "{}: its program", self.owner),
        }
    }
}

impl Expected {
    /// Has the worker let go of a connection, if it still has it.
    fn detach(&self, epoch: u64, workers: &[WorkerHandle]) {
        let (slot, of_vnet) = (self.slot, self.seat.is_some());
        let detached = workers[self.worker].call(move |worker| {
            if of_vnet {
                worker.change(slot, |vnet, core| vnet.detach(epoch, core));
                return;
            }
            let Core { externals, connections, .. } = &mut worker.core;
            if let Some(Some(external)) = externals.get_mut(usize::from(slot)) {
                external.detach(epoch, connections);
            }
        });
        if let Err(error) = detached {
            warn!("{error}");
        }
    }
}

impl Expected {
    /// Writes a refusal down where the tenant can read it.
    fn note(&self, fault: String, workers: &[WorkerHandle]) {
        let Some((node, Who::Guest(number))) = self.seat.clone() else { return };
        let slot = self.slot;
        let noted = workers[self.worker].call(move |worker| {
            worker.change(slot, |vnet, _| vnet.note_fault(&node, number, fault));
        });
        if let Err(error) = noted {
            warn!("{error}");
        }
    }
}

struct Place {
    expected: Expected,
    /// What its regions count for: all that is of one tenant.
    share: Arc<Share>,
    listener: Listener,
    handshakes: Vec<Handshake>,
    connected: Vec<Connected>,
    not_before: Option<Instant>,
    /// Limit of connections that are begun.
    connects: TokenBucket,
    /// Nobody is listened to until then, nanoseconds since the keeper began.
    rests_until_ns: Option<u64>,
}

struct Connected {
    interface: u32,
    epoch: u64,
    control: Control,
}

/// The places, by path.
type Places = HashMap<PathBuf, Place>;

/// Places that are ready but not in force yet.
pub struct Prepared {
    owner: Owner,
    wanted: HashMap<PathBuf, Expected>,
    listeners: HashMap<PathBuf, Listener>,
}

/// Why something is not prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no socket to listen at these paths; it can be had.
    Lacks(Vec<PathBuf>),
    /// It can't be had.
    Failed(String),
}

impl From<String> for Refusal {
    fn from(error: String) -> Self {
        Self::Failed(error)
    }
}

/// The thread, and what it keeps.
#[derive(Clone)]
pub struct Keeper {
    places: Arc<Mutex<Places>>,
    /// Sockets that listen, for places to come.
    listeners: Arc<Mutex<HashMap<PathBuf, Listener>>>,
    epoll: Arc<OwnedFd>,
    workers: Arc<[WorkerHandle]>,
}

impl Keeper {
    /// Starts; workers tell of connections that they gave up by `dropped` and ring `wake`.
    pub fn start(
        workers: Arc<[WorkerHandle]>,
        dropped: Receiver<Dropped>,
        wake: Arc<Wake>,
    ) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let keeper = Self { places: Arc::default(), listeners: Arc::default(), epoll, workers };
        keeper.watch(&*wake)?;
        let thread = keeper.clone();
        let run = move || thread.run(&dropped, &wake);
        std::thread::Builder::new().name("keeper".into()).spawn(run)?;
        Ok(keeper)
    }

    /// Keeps sockets that listen for what is prepared next.
    pub fn offer(&self, listeners: impl IntoIterator<Item = (PathBuf, Listener)>) {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).extend(listeners);
    }

    /// Gets ready to listen where `owner` expects somebody and nobody listens yet, by sockets that were offered.
    /// Nothing is in force before [`Keeper::commit`].
    pub fn prepare(
        &self,
        owner: Owner,
        wanted: HashMap<PathBuf, Expected>,
    ) -> Result<Prepared, Refusal> {
        let places = self.lock();
        let mut new = Vec::new();
        for path in wanted.keys() {
            match places.get(path) {
                Some(place) if place.expected.owner == owner => {}
                Some(place) => {
                    let other = &place.expected.owner;
                    return Err(format!("socket {} is taken by {other}", path.display()).into());
                }
                None => new.push(path.clone()),
            }
        }
        let mut offered = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let lacking: Vec<_> =
            new.iter().filter(|path| !offered.contains_key(*path)).cloned().collect();
        if !lacking.is_empty() {
            return Err(Refusal::Lacks(lacking));
        }
        let mut listeners = HashMap::new();
        for path in new {
            let Some(listener) = offered.remove(&path) else { continue };
            let fail = |error| format!("can't listen at {}: {error}", path.display());
            self.watch(&listener).map_err(fail)?;
            listeners.insert(path, listener);
        }
        Ok(Prepared { owner, wanted, listeners })
    }

    /// Puts what was prepared into force, and ends what the owner does not expect any more.
    pub fn commit(&self, prepared: Prepared) {
        let Prepared { owner, mut wanted, listeners } = prepared;
        let mut places = self.lock();
        places.retain(|path, place| {
            if place.expected.owner != owner {
                return true;
            }
            match wanted.remove(path) {
                Some(expected) => {
                    let who = |it: &Expected| (it.seat.clone(), it.worker);
                    if who(&place.expected) != who(&expected) {
                        place.clear(&self.workers, "replaced");
                    }
                    place.expected = expected;
                    true
                }
                None => {
                    place.clear(&self.workers, "removed");
                    false
                }
            }
        });
        let of_tenant = |place: &&Place| place.expected.owner.tenant() == owner.tenant();
        let share = places.values().find(of_tenant).map(|place| place.share.clone());
        let share = share.unwrap_or_default();
        for (path, listener) in listeners {
            let Some(expected) = wanted.remove(&path) else { continue };
            let interfaces = u64::from(expected.interfaces);
            let rate = Rate { bps: 0, pps: CONNECTS_A_SECOND * interfaces };
            let place = Place {
                expected,
                share: share.clone(),
                listener,
                handshakes: vec![],
                connected: vec![],
                not_before: None,
                connects: TokenBucket::new(rate, 0, CONNECTS_AT_ONCE * interfaces),
                rests_until_ns: None,
            };
            places.insert(path, place);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, fd: &impl AsFd) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        match epoll::add(&*self.epoll, fd, data, epoll::EventFlags::IN) {
            // A connection has the descriptor of its handshake.
            Err(rustix::io::Errno::EXIST) => Ok(()),
            other => Ok(other?),
        }
    }

    fn run(&self, dropped: &Receiver<Dropped>, wake: &Wake) {
        let (mut epoch, began) = (0, Instant::now());
        loop {
            wake.sleeping();
            let mut places = self.lock();
            let gone: Vec<_> = dropped.try_iter().collect();
            for dropped in &gone {
                places.values_mut().for_each(|place| place.give_up(dropped));
            }
            for (path, place) in places.iter_mut() {
                place.notice_hangups(&self.workers);
                place.accept(began.elapsed().as_nanos() as u64, self);
                place.shake_hands(path, &mut epoch, self);
            }
            let due =
                |place: &Place| !place.handshakes.is_empty() || place.rests_until_ns.is_some();
            let shaking = places.values().any(due);
            drop(places);
            // With nobody waiting for it.
            for Dropped { link, watch, .. } in gone {
                watch.remove(&link.rx);
            }
            let mut events = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }];
            let _ = epoll::wait(&*self.epoll, &mut events, shaking.then_some(&LOOK));
            wake.awake();
        }
    }
}

impl Place {
    /// A worker let go of a connection.
    fn give_up(&mut self, dropped: &Dropped) {
        let Some(at) = self.connected.iter().position(|it| it.epoch == dropped.epoch) else {
            return;
        };
        let reason = &dropped.reason;
        if dropped.fault {
            warn!("{} is disconnected: {reason}", self.expected);
            self.not_before = Some(Instant::now() + FAULT_PAUSE);
        }
        self.connected.swap_remove(at).control.disconnect(reason);
    }

    fn notice_hangups(&mut self, workers: &[WorkerHandle]) {
        let expected = &self.expected;
        self.connected.retain_mut(|it| {
            let Err(closed) = it.control.check() else { return true };
            info!("{expected}, interface {}: {closed}", it.interface);
            expected.detach(it.epoch, workers);
            false
        });
    }

    /// Ends all connections.
    fn clear(&mut self, workers: &[WorkerHandle], reason: &str) {
        for it in self.connected.drain(..) {
            self.expected.detach(it.epoch, workers);
            it.control.disconnect(reason);
        }
    }

    fn accept(&mut self, now_ns: u64, keeper: &Keeper) {
        if self.rests_until_ns.is_some_and(|until| now_ns < until) {
            return;
        }
        if self.rests_until_ns.take().is_some() && keeper.watch(&self.listener).is_err() {
            warn!("can't watch {}", self.expected);
        }
        while let Ok(Some(handshake)) = self.listener.accept_for(&self.share, self.expected.regions)
        {
            if let Err(until_ns) = self.connects.take(now_ns, 0) {
                // This one, too many by one, is let go; the others wait in the kernel.
                warn!("{} connects too often, and waits", self.expected);
                self.rests_until_ns = Some(until_ns + REST_NS);
                let _ = epoll::delete(&*keeper.epoll, &self.listener);
                break;
            }
            if self.handshakes.len() < HANDSHAKES_MAX && keeper.watch(&handshake).is_ok() {
                self.handshakes.push(handshake);
            }
        }
    }

    fn shake_hands(&mut self, path: &Path, epoch: &mut u64, keeper: &Keeper) {
        for mut handshake in std::mem::take(&mut self.handshakes) {
            let welcome = self.not_before.is_none_or(|at| Instant::now() >= at);
            let free = |id: u32| {
                let there = self.connected.iter().any(|it| it.interface == id);
                welcome && id < self.expected.interfaces && !there
            };
            match handshake.poll(free) {
                Ok(None) => self.handshakes.push(handshake),
                Ok(Some(connection)) => {
                    *epoch += 1;
                    self.attach(connection, *epoch, keeper);
                }
                Err(error) => {
                    warn!("{}: {error}", path.display());
                    // Who is kept out was told why before.
                    if welcome && matches!(error, HandshakeError::Refused(_)) {
                        self.expected.note(error.to_string(), &keeper.workers);
                    }
                }
            }
        }
    }

    fn attach(&mut self, connection: Connection, epoch: u64, keeper: &Keeper) {
        let Connection { interface_id: interface, name, tx, rx, control, .. } = connection;
        let expected = self.expected.clone();
        let slot = expected.seat.is_some().then_some(expected.slot);
        if let Err(error) = keeper.workers[expected.worker].watch.add_bell(slot, &rx) {
            warn!("{expected}: its doorbell can't be watched: {error}");
            return control.disconnect("doorbell can't be watched");
        }
        let attached = keeper.workers[expected.worker].call(move |worker| {
            let Expected { owner, slot, seat, .. } = expected;
            let link = Link::new(tx, rx, epoch);
            match (owner, seat) {
                (Owner::Vnet(name), Some((node, who))) => {
                    let attached = worker.change(slot, |vnet, _| {
                        vnet.name == name && vnet.attach(&node, who, interface, link)
                    });
                    attached.unwrap_or(false)
                }
                (Owner::External(name), None) => {
                    let external = worker.core.external(usize::from(slot));
                    let external = external.filter(|external| external.name == name);
                    external.is_some_and(|external| external.attach(link))
                }
                _ => false,
            }
        });
        match attached {
            Ok(true) => {
                let expected = &self.expected;
                info!("{expected}, interface {interface}: {name:?} is connected");
                if keeper.watch(&control).is_err() {
                    warn!("can't watch {expected}");
                }
                self.connected.push(Connected { interface, epoch, control });
            }
            Ok(false) => control.disconnect("not expected"),
            Err(error) => warn!("{error}"),
        }
    }
}
