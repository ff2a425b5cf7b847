//! Keeps the control sockets of memif connections: listens, shakes hands, notices who is gone.
//!
//! A thread of its own; workers get connections ready to use. A place keeps listening while
//! somebody is connected, so that a replacement finds it. Who broke the contract has to wait
//! [`FAULT_PAUSE`] before it may come again.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pdp_memif::{Connection, Control, Handshake, Listener};
use rustix::event::{Timespec, epoll};
use tracing::{info, warn};

use crate::control::WorkerHandle;
use crate::core::Dropped;
use crate::peer::Link;
use crate::vnet::Who;
use crate::wake::Wake;

/// Handshakes at one place at a time.
const HANDSHAKES_MAX: usize = 8;

/// How long who broke the contract is kept out.
const FAULT_PAUSE: Duration = Duration::from_secs(1);

/// How often handshakes are looked at for having taken too long.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Somebody who is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Of this vnet.
    pub vnet: String,
    /// The worker that has it.
    pub worker: usize,
    /// The vnet's slot there.
    pub slot: u16,
    /// Of this node.
    pub node: String,
    /// Who.
    pub who: Who,
    /// Interface ids from 0 that may connect.
    pub interfaces: u32,
}

impl Expected {
    /// Has the worker let go of a connection, if it still has it.
    fn detach(&self, epoch: u64, workers: &[WorkerHandle]) {
        let slot = usize::from(self.slot);
        let detached = workers[self.worker].call(move |worker| {
            if let Some(Some(vnet)) = worker.vnets.get_mut(slot) {
                vnet.detach(epoch, &mut worker.core);
            }
        });
        if let Err(error) = detached {
            warn!("{error}");
        }
    }
}

struct Place {
    expected: Expected,
    listener: Listener,
    handshakes: Vec<Handshake>,
    connected: Vec<Connected>,
    not_before: Option<Instant>,
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
    vnet: String,
    wanted: HashMap<PathBuf, Expected>,
    listeners: HashMap<PathBuf, Listener>,
}

/// The thread, and what it keeps.
#[derive(Clone)]
pub struct Keeper {
    places: Arc<Mutex<Places>>,
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
        let keeper = Self { places: Arc::default(), epoll, workers };
        keeper.watch(&*wake)?;
        let thread = keeper.clone();
        let run = move || thread.run(&dropped, &wake);
        std::thread::Builder::new().name("keeper".into()).spawn(run)?;
        Ok(keeper)
    }

    /// Listens where `vnet` expects somebody and nobody listens yet. Nothing is in force before
    /// [`Keeper::commit`].
    pub fn prepare(
        &self,
        vnet: &str,
        wanted: HashMap<PathBuf, Expected>,
    ) -> Result<Prepared, String> {
        let places = self.lock();
        let mut listeners = HashMap::new();
        for path in wanted.keys() {
            match places.get(path) {
                Some(place) if place.expected.vnet == vnet => continue,
                Some(place) => {
                    let other = &place.expected.vnet;
                    return Err(format!("socket {} is taken by vnet {other}", path.display()));
                }
                None => {}
            }
            let fail = |error| format!("can't listen at {}: {error}", path.display());
            let listener = Listener::bind(path).map_err(fail)?;
            self.watch(&listener).map_err(fail)?;
            listeners.insert(path.clone(), listener);
        }
        Ok(Prepared { vnet: vnet.to_string(), wanted, listeners })
    }

    /// Puts what was prepared into force, and ends what the vnet does not expect any more.
    pub fn commit(&self, prepared: Prepared) {
        let Prepared { vnet, mut wanted, listeners } = prepared;
        let mut places = self.lock();
        places.retain(|path, place| {
            if place.expected.vnet != vnet {
                return true;
            }
            match wanted.remove(path) {
                Some(expected) => {
                    let same = (&place.expected.node, place.expected.who)
                        == (&expected.node, expected.who);
                    if !same {
                        place.clear(&self.workers, "replaced");
                    }
                    place.expected = expected;
                    true
                }
                None => {
                    place.clear(&self.workers, "removed");
                    // Fails only if it is gone already.
                    let _ = std::fs::remove_file(path);
                    false
                }
            }
        });
        for (path, listener) in listeners {
            let Some(expected) = wanted.remove(&path) else { continue };
            let (handshakes, connected) = (vec![], vec![]);
            let place = Place { expected, listener, handshakes, connected, not_before: None };
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
        let mut epoch = 0;
        loop {
            wake.sleeping();
            let mut places = self.lock();
            while let Ok(dropped) = dropped.try_recv() {
                places.values_mut().for_each(|place| place.give_up(&dropped));
            }
            for (path, place) in places.iter_mut() {
                place.notice_hangups(&self.workers);
                place.accept(self);
                place.shake_hands(path, &mut epoch, self);
            }
            let shaking = places.values().any(|place| !place.handshakes.is_empty());
            drop(places);
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
        let Expected { vnet, node, who, .. } = &self.expected;
        let reason = &dropped.reason;
        if dropped.fault {
            warn!("{vnet}/{node}: {who:?} is disconnected: {reason}");
            self.not_before = Some(Instant::now() + FAULT_PAUSE);
        }
        self.connected.swap_remove(at).control.disconnect(reason);
    }

    fn notice_hangups(&mut self, workers: &[WorkerHandle]) {
        let expected = &self.expected;
        self.connected.retain_mut(|it| {
            let Err(closed) = it.control.check() else { return true };
            let Expected { vnet, node, who, .. } = expected;
            info!("{vnet}/{node}: {who:?}, interface {}: {closed}", it.interface);
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

    fn accept(&mut self, keeper: &Keeper) {
        while let Ok(Some(handshake)) = self.listener.accept() {
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
                Err(error) => warn!("{}: {error}", path.display()),
            }
        }
    }

    fn attach(&mut self, connection: Connection, epoch: u64, keeper: &Keeper) {
        let Connection { interface_id: interface, name, tx, rx, control, .. } = connection;
        let Expected { vnet, node, who, worker, slot, .. } = self.expected.clone();
        let (in_vnet, at) = (vnet.clone(), node.clone());
        let attached = keeper.workers[worker].call(move |worker| {
            let vnet = worker.vnets.get_mut(usize::from(slot)).and_then(Option::as_mut);
            let vnet = vnet.filter(|vnet| vnet.name == in_vnet);
            let link = Link::new(tx, rx, epoch);
            vnet.is_some_and(|vnet| vnet.attach(&at, who, interface, link, &worker.core))
        });
        match attached {
            Ok(true) => {
                info!("{vnet}/{node}: {who:?}, interface {interface}: {name:?} is connected");
                if keeper.watch(&control).is_err() {
                    warn!("{vnet}/{node}: can't watch {who:?}");
                }
                self.connected.push(Connected { interface, epoch, control });
            }
            Ok(false) => control.disconnect("not expected"),
            Err(error) => warn!("{error}"),
        }
    }
}
