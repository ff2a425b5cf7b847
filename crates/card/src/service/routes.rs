//! A thread for each router that follows its mirror, and makes the writes of its tables.
//!
//! A change may take this thread long: the router's owner decides on the number of routes and
//! neighbours. The thread has the lowest priority, so that neither the card nor, for long, another
//! router's routes wait for it. One batch of writes at a time is on its way to the card.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_ip::{FollowerDeadline, RouteClient, RouteReport, RouteTables};
use pdp_proto::routes::{ResolvedRoute, ToGuest};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::driver::route_prefix;
use crate::table::MacAddress;
use crate::trie::RoutePrefix;
use crate::{TableWrite, VeDriver};

/// Problems that are listed one by one.
pub(super) const PROBLEMS_MAX: usize = 16;

/// Messages of the mirror that may become one batch.
const MESSAGES_STEP: usize = 64;

/// Longest sleep of a thread.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Neighbours in one report. The mirror refuses reports of more than 8 MiB.
const USED_STEP: usize = 1 << 16;

/// Lowest priority of a thread.
const NICE: i32 = 19;

/// MAC addresses of a vport.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct VportMacs {
    /// That of the control guest's interface, the source of what leaves.
    pub(super) own: MacAddress,
    /// All, `own` included.
    pub(super) all: BTreeSet<MacAddress>,
}

/// Writes to make for a router.
#[derive(Debug, Default)]
pub(super) struct RouteBatch {
    pub(super) macs: BTreeMap<u8, VportMacs>,
    pub(super) writes: Vec<TableWrite>,
}

/// State of a router's tables.
#[derive(Clone, Debug, Default)]
pub(super) struct RouteState {
    /// The mirror's whole snapshot is in force, or excess.
    pub(super) synced: bool,
    pub(super) excess: u64,
    pub(super) free_hops: u32,
    pub(super) free_leaves: u32,
    pub(super) problems: Vec<String>,
}

/// Data that the card and a router's thread exchange.
#[derive(Debug, Default)]
struct Exchange {
    batch: Option<RouteBatch>,
    /// The last batch is in force, and no frame on the card can have seen the tables before.
    done: bool,
    /// Stations to which frames were sent, by vport and MAC address.
    used: HashSet<(u8, MacAddress)>,
    /// A frame was punted since its neighbour is unknown.
    wants_neighbour: bool,
    state: RouteState,
}

#[derive(Debug)]
struct Shared {
    exchange: Mutex<Exchange>,
    /// Wakes the thread.
    bell: OwnedFd,
    /// Wakes the card.
    card_bell: Arc<OwnedFd>,
    stop: AtomicBool,
}

impl Shared {
    /// Locks the exchange. Each caller only moves values, so the other side hardly waits.
    fn lock(&self) -> MutexGuard<'_, Exchange> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a doorbell.
pub(super) fn bell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn ring(bell: &OwnedFd) {
    // It fails only if it has been rung already, nearly without end.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Empties a doorbell.
pub(super) fn drain(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0; 8]);
}

/// The card's side of a router's thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct RouteThread {
    shared: Arc<Shared>,
}

impl Drop for RouteThread {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        ring(&self.shared.bell);
    }
}

impl RouteThread {
    /// Starts a thread for guest number `guest` of the mirror that listens at `path`. It rings
    /// `card_bell` when there is a batch.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub(super) fn start(
        path: &Path,
        guest: u32,
        driver: VeDriver,
        card_bell: Arc<OwnedFd>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            exchange: Mutex::default(),
            bell: bell()?,
            card_bell,
            stop: AtomicBool::new(false),
        });
        let mut follower = Follower {
            shared: shared.clone(),
            client: RouteClient::new(path, guest),
            routes: CardRoutes::new(driver),
        };
        std::thread::Builder::new().name("routes".into()).spawn(move || follower.run())?;
        Ok(Self { shared })
    }

    /// Takes the writes to make. The next ones come after [`Self::done`].
    pub(super) fn take_batch(&self) -> Option<RouteBatch> {
        self.shared.lock().batch.take()
    }

    /// Reports that the batch is in force.
    pub(super) fn done(&self) {
        self.shared.lock().done = true;
        ring(&self.shared.bell);
    }

    /// Reports stations to which frames were sent, and an unknown neighbour.
    pub(super) fn report(&self, used: HashSet<(u8, MacAddress)>, wants_neighbour: bool) {
        if !used.is_empty() || wants_neighbour {
            let mut exchange = self.shared.lock();
            exchange.used.extend(used);
            exchange.wants_neighbour |= wants_neighbour;
        }
    }

    /// State of the tables when the mirror last rested.
    pub(super) fn state(&self) -> RouteState {
        self.shared.lock().state.clone()
    }
}

/// The thread's own side.
struct Follower {
    shared: Arc<Shared>,
    client: RouteClient<Option<RoutePrefix>>,
    routes: CardRoutes,
}

impl Follower {
    fn run(&mut self) {
        if let Err(error) = rustix::process::nice(NICE) {
            eprintln!("pdp-card: no low priority for a router's routes: {error}");
        }
        while !self.shared.stop.load(Ordering::Relaxed) {
            let mut until = Some(Instant::now() + SLEEP_MAX);
            self.exchange();
            if !self.routes.is_pending {
                match self.client.poll(&mut self.routes, Instant::now(), MESSAGES_STEP) {
                    FollowerDeadline::Now => until = None,
                    FollowerDeadline::At(at) => {
                        until = at.map(|at| self.client.time(at)).into_iter().chain(until).min();
                        self.publish();
                    }
                }
                self.send();
            }
            match until {
                Some(until) => self.wait(until.saturating_duration_since(Instant::now())),
                // The card rings when the batch is in force.
                None if self.routes.is_pending => self.wait(SLEEP_MAX),
                None => {}
            }
        }
    }

    /// Takes the card's reports.
    fn exchange(&mut self) {
        let mut exchange = self.shared.lock();
        self.routes.used.extend(std::mem::take(&mut exchange.used));
        self.routes.wants_neighbour |= std::mem::take(&mut exchange.wants_neighbour);
        let done = std::mem::take(&mut exchange.done);
        drop(exchange);
        if done {
            self.routes.is_pending = false;
            self.routes.driver.retire();
            self.send();
        }
    }

    /// Passes the writes so far to the card.
    fn send(&mut self) {
        let routes = &mut self.routes;
        let batch = RouteBatch {
            macs: std::mem::take(&mut routes.asked_macs),
            writes: routes.driver.take_writes(),
        };
        if batch.macs.is_empty() && batch.writes.is_empty() {
            return;
        }
        routes.is_pending = true;
        let mut exchange = self.shared.lock();
        exchange.batch = Some(batch);
        exchange.state.synced = false;
        drop(exchange);
        ring(&self.shared.card_bell);
    }

    /// Publishes the state. It looks at all routes, so call it when there is nothing to apply.
    fn publish(&mut self) {
        let Self { routes, client, shared } = self;
        let free = routes.driver.free_tables();
        let state = RouteState {
            synced: client.status().synced && !routes.is_pending,
            excess: routes.driver.excess_count() as u64,
            free_hops: free.hops as u32,
            free_leaves: free.leaves,
            problems: routes.problems.iter().cloned().collect(),
        };
        shared.lock().state = state;
    }

    /// Waits for the card, or for the mirror unless a batch is on its way.
    fn wait(&self, time: Duration) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.shared.bell.as_fd(), PollFlags::IN)];
        let socket = self.client.socket().filter(|_| !self.routes.is_pending);
        fds.extend(socket.map(|it| PollFd::from_borrowed_fd(it.as_fd(), it.wants())));
        wait(&mut fds, time);
        drain(&self.shared.bell);
    }
}

/// Waits for descriptors. After an error, the caller looks at once, and again after its interval.
fn wait(fds: &mut [PollFd<'_>], time: Duration) {
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    let _ = poll(fds, Some(&time));
}

/// Tables of one router.
#[derive(Debug)]
struct CardRoutes {
    driver: VeDriver,
    /// MAC addresses that the mirror has named, by vport, until the super user grants them.
    asked_macs: BTreeMap<u8, VportMacs>,
    used: HashSet<(u8, MacAddress)>,
    wants_neighbour: bool,
    /// Writes are on their way to the card.
    is_pending: bool,
    problems: BTreeSet<String>,
}

impl CardRoutes {
    fn new(driver: VeDriver) -> Self {
        Self {
            driver,
            asked_macs: BTreeMap::new(),
            used: HashSet::new(),
            wants_neighbour: false,
            is_pending: false,
            problems: BTreeSet::new(),
        }
    }
}

impl RouteTables for CardRoutes {
    type Report = Self;

    fn report(&mut self) -> &mut Self {
        self
    }

    fn apply(&mut self, message: ToGuest) {
        match &message {
            ToGuest::Begin => self.problems.clear(),
            ToGuest::Vport(vport) => {
                if let Ok(index) = u8::try_from(vport.index) {
                    let all = vport.macs.iter().copied().chain([vport.mac]).collect();
                    self.asked_macs.insert(index, VportMacs { own: vport.mac, all });
                }
            }
            _ => {}
        }
        if let Err(problem) = self.driver.apply(&message)
            && self.problems.len() < PROBLEMS_MAX
        {
            self.problems.insert(problem.to_string());
        }
        self.is_pending |= self.driver.has_writes() || !self.asked_macs.is_empty();
    }

    fn is_pending(&self) -> bool {
        self.is_pending
    }
}

impl RouteReport for CardRoutes {
    type Cursor = Option<RoutePrefix>;

    /// Reports all at once, at most [`USED_STEP`]: the others look unused.
    fn take_used(&mut self, _count_max: usize) -> (Vec<(u16, IpAddr)>, bool) {
        let used = std::mem::take(&mut self.used);
        let is_used = |vport: u16, mac: MacAddress| {
            u8::try_from(vport).is_ok_and(|vport| used.contains(&(vport, mac)))
        };
        let known = self.driver.known_neighbours();
        let used = known.filter(|&(_, vport, mac)| is_used(vport, mac)).take(USED_STEP);
        (used.map(|(address, vport, _)| (vport, address)).collect(), false)
    }

    fn has_wanted(&self) -> bool {
        self.wants_neighbour && self.driver.unknown_gateways().next().is_some()
    }

    fn take_wanted(&mut self) -> Vec<(u16, IpAddr)> {
        self.wants_neighbour = false;
        self.driver.unknown_gateways().collect()
    }

    fn dump_some(
        &self,
        cursor: &mut Option<RoutePrefix>,
        count_max: usize,
    ) -> Vec<(IpNet, ResolvedRoute)> {
        let routes = self.driver.routes_after(*cursor, count_max);
        *cursor = routes.last().map(|(net, _)| route_prefix(*net)).or(*cursor);
        routes
    }
}
