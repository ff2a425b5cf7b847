//! A card that forwards for routers: the loop of the process `pdp-card`.
//!
//! One thread clocks the model while frames or register writes are on their way. Between two pieces
//! of up to [`CYCLES`] cycles it takes frames from the trunks and sends completions. An idle card
//! is not clocked: the thread sleeps until a frame, a route, or a request comes. Each router has a
//! thread of its own that makes the writes of its routes.

mod routes;
mod trunks;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_memif::ConnectionState;
use pdp_proto::card::{
    CardLimit, CardReply, CardRequest, CardRouter, CardRouterStatus, CardStatus,
};
use pdp_proto::listener::ControlListener;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::bus::super_writes;
use crate::driver::CARD_VPORTS;
use crate::setup::{add_ve, clear_ve, enable_ve, equal_queues};
use crate::table::{AttachmentEntry, MacAddress, MeterEntry, VmacEntry};
use crate::{
    BusScheduler, CardCore, CardSizes, RegisterWrite, TableWrite, VeDriver, VmacTable, registers,
};
use routes::{PROBLEMS_MAX, RouteBatch, RouteThread, VportMacs};
use trunks::{TrunkLines, port_of, segment_of};

/// Cycles between two looks at trunks.
const CYCLES: u32 = 64;

/// Cells that each queue has for itself.
const GUARANTEE: u16 = 2;

/// Register writes in front of the card. Few, so that the bus is divided by [`BusScheduler`].
const WRITES_AHEAD: u64 = 8;

/// Time between two looks at routes and requests while the card is clocked.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Time between two looks at the connections to the mux, if all are up, and else.
const LINK_INTERVAL: Duration = Duration::from_millis(100);
const RECONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Longest sleep.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Lines that take a beat: all.
const READY: u8 = u8::MAX;

/// Error of a card's process.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The program was built without the model.
    #[error("built without the card's model: install its tools with make deps, and build again")]
    NoModel,
    /// The card has too few cells for the guarantees of all queues.
    #[error("too few cells for {0} queues")]
    Cells(u32),
    /// The system refused to wait.
    #[error("waiting for frames")]
    Wait(#[source] io::Error),
    /// The control socket failed.
    #[error("control socket")]
    Control(#[source] io::Error),
    /// The system refused a descriptor.
    #[error("doorbell")]
    Bell(#[source] io::Error),
}

/// Steps of a router's life on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouterState {
    /// The card empties its tables.
    Clearing,
    /// It forwards, if it is enabled.
    Serving,
    /// It is disabled, and frames of it may still be on the card.
    Leaving,
}

/// Progress of a router's batch of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchState {
    /// There is none.
    Idle,
    /// It waits for the bus.
    Written,
    /// It is in force. Frames that entered before are on the card until EPOCH has this value.
    Epoch(u32),
}

#[derive(Debug)]
struct RouterOnCard {
    config: CardRouter,
    state: RouterState,
    routes: RouteThread,
    batch: BatchState,
    granted: BTreeMap<u8, BTreeSet<MacAddress>>,
    /// MAC addresses that it did not get.
    refused: BTreeSet<String>,
    /// Register writes that the card has not answered.
    unanswered: u64,
    /// The card lets its frames in.
    enabled: bool,
}

/// The service of one card.
#[derive(Debug)]
pub struct CardService {
    model: CardCore<TrunkLines>,
    sizes: CardSizes,
    vmacs: VmacTable,
    bus: BusScheduler,
    super_writes: VecDeque<RegisterWrite>,
    /// VEs of the writes that the card has not answered; `None`: of the super page.
    owners: VecDeque<Option<u8>>,
    wanted: BTreeMap<u8, CardRouter>,
    /// The routers differ from those wanted.
    moves: bool,
    routers: BTreeMap<u8, RouterOnCard>,
    /// VEs whose tables another router has used.
    used_ves: BTreeSet<u8>,
    /// A read of EPOCH is under way.
    reads_epoch: bool,
    /// The routers' threads ring it.
    bell: Arc<OwnedFd>,
    started: Instant,
    poll_at: Instant,
    link_at: Instant,
}

impl CardService {
    /// Makes a card without routers.
    ///
    /// # Errors
    /// If the crate was built without a model of these sizes.
    pub fn new(sizes: CardSizes, seed: u64) -> Result<Self, ServiceError> {
        let lines = TrunkLines::new(sizes.ves, sizes.data_bits as usize / 8);
        let model = CardCore::with_lines(sizes, 0, lines).ok_or(ServiceError::NoModel)?;
        let now = Instant::now();
        let mut service = Self {
            model,
            sizes,
            vmacs: VmacTable::new(sizes.vmac_sets(), seed >> 4),
            bus: BusScheduler::new(sizes.ves),
            super_writes: VecDeque::new(),
            owners: VecDeque::new(),
            wanted: BTreeMap::new(),
            moves: false,
            routers: BTreeMap::new(),
            used_ves: BTreeSet::new(),
            reads_epoch: false,
            bell: Arc::new(routes::bell().map_err(ServiceError::Bell)?),
            started: now,
            poll_at: now,
            link_at: now,
        };
        let queues = equal_queues(&sizes, GUARANTEE).ok_or(ServiceError::Cells(sizes.ves + 1))?;
        service.super_writes.extend(queues);
        for write in service.vmacs.clear_writes() {
            service.super_writes.extend(super_writes(0, &write));
        }
        Ok(service)
    }

    /// Serves routers until `stop` is set. A sleeping service notices it after a signal or within a
    /// second.
    ///
    /// # Errors
    /// If the system refuses to wait, or the control socket fails.
    pub fn run(
        &mut self,
        control: &mut ControlListener,
        stop: &AtomicBool,
    ) -> Result<(), ServiceError> {
        while !stop.load(Ordering::Relaxed) {
            if self.round(control)? {
                continue;
            }
            self.sleep(control)?;
        }
        Ok(())
    }

    /// Does a piece of all due work. True if there is more.
    ///
    /// # Errors
    /// If the control socket fails.
    pub fn round(&mut self, control: &mut ControlListener) -> Result<bool, ServiceError> {
        let now = Instant::now();
        if now >= self.link_at {
            self.look_after_links(now);
        }
        let mut more = false;
        if now >= self.poll_at {
            while control.accept().map_err(ServiceError::Control)?.is_some() {}
            control
                .serve("pdp-card", |request, _, channel| channel.send(&self.answer(request), &[]));
            more |= self.poll_routers();
            self.poll_at = now + POLL_INTERVAL;
        }
        let routers = &self.routers;
        let is_open = |ve| routers.get(&ve).is_some_and(|it| it.state != RouterState::Leaving);
        self.model.lines_mut().feed(is_open);
        let clocked = self.clock(now);
        self.model.lines_mut().complete();
        Ok(more || clocked)
    }

    /// True if something is on its way on the card.
    fn is_busy(&self) -> bool {
        !self.model.lines().is_empty()
            || self.model.unanswered() > 0
            || !self.super_writes.is_empty()
            || !self.bus.is_empty()
            || self.reads_epoch
    }

    /// Clocks the card while something is on its way. True if it was.
    fn clock(&mut self, now: Instant) -> bool {
        let busy = self.is_busy();
        let now_ns = now.saturating_duration_since(self.started).as_nanos() as u64;
        for _ in 0..CYCLES {
            if !self.is_busy() {
                break;
            }
            while self.model.unanswered() < WRITES_AHEAD {
                // Entries of the super page are never torn apart.
                let write = self.super_writes.pop_front().map(|write| (None, write));
                let next = write.or_else(|| {
                    let write = self.bus.take()?;
                    Some((write.ve(), write))
                });
                let Some((owner, write)) = next else { break };
                self.owners.push_back(owner);
                if let Some(router) = owner.and_then(|ve| self.routers.get_mut(&ve)) {
                    router.unanswered += 1;
                }
                self.model.write(write);
            }
            self.model.step_at(READY, now_ns);
            while self.owners.len() as u64 > self.model.unanswered() {
                let owner = self.owners.pop_front().flatten();
                if let Some(router) = owner.and_then(|ve| self.routers.get_mut(&ve)) {
                    router.unanswered -= 1;
                }
            }
        }
        self.advance_batches();
        busy
    }

    /// True if all entries of a VE are in the tables.
    fn is_written(&self, ve: u8) -> bool {
        self.bus.waiting(ve) == 0 && self.routers.get(&ve).is_none_or(|it| it.unanswered == 0)
    }

    /// Moves routers whose tables are written to their next state. Tells a router's thread when its
    /// batch is in force and all frames that entered before have left the tables.
    fn advance_batches(&mut self) {
        let epoch = self.model.take_read().and_then(|answer| {
            self.reads_epoch = false;
            answer.ok()
        });
        let is_empty = self.model.lines().is_empty();
        let written: Vec<u8> =
            self.routers.keys().copied().filter(|&ve| self.is_written(ve)).collect();
        let mut waits = false;
        for ve in written {
            let Some(router) = self.routers.get_mut(&ve) else { continue };
            if router.state == RouterState::Clearing && self.super_writes.is_empty() {
                router.state = RouterState::Serving;
            }
            let done = match (router.batch, epoch) {
                (BatchState::Idle, _) => continue,
                _ if is_empty => true,
                (BatchState::Written, Some(epoch)) => {
                    router.batch = BatchState::Epoch(epoch.wrapping_add(2));
                    false
                }
                (BatchState::Epoch(end), Some(epoch)) => epoch.wrapping_sub(end) as i32 >= 0,
                _ => false,
            };
            waits |= !done;
            if done {
                router.batch = BatchState::Idle;
                router.routes.done();
            }
        }
        if waits && !self.reads_epoch {
            self.reads_epoch = true;
            self.model.start_read(registers::super_page(registers::EPOCH));
        }
    }

    fn look_after_links(&mut self, now: Instant) {
        let mut all_up = true;
        for trunk in self.model.lines_mut().all_mut() {
            all_up &= trunk.look_after() == ConnectionState::Up;
        }
        self.link_at = now + if all_up { LINK_INTERVAL } else { RECONNECT_INTERVAL };
    }

    /// Moves the routers towards what is wanted, and takes the writes of their routes. True if
    /// there is more to do.
    fn poll_routers(&mut self) -> bool {
        if self.moves {
            self.moves = self.move_routers();
        }
        let ves: Vec<u8> = self.routers.keys().copied().collect();
        for ve in ves {
            let Some(router) = self.routers.get_mut(&ve) else { continue };
            if router.state != RouterState::Serving {
                continue;
            }
            if let Some(trunk) = self.model.lines_mut().trunk(ve) {
                router.routes.report(trunk.take_used(), trunk.take_wants());
            }
            if router.batch == BatchState::Idle
                && let Some(RouteBatch { macs, writes }) = router.routes.take_batch()
            {
                router.batch = BatchState::Written;
                self.bus.push(ve, writes);
                for (vport, macs) in macs {
                    self.grant(ve, vport, macs);
                }
            }
            self.enable(ve);
        }
        self.moves
    }

    fn super_write(&mut self, ve: u8, writes: impl IntoIterator<Item = TableWrite>) {
        for write in writes {
            self.super_writes.extend(super_writes(ve, &write));
        }
    }

    /// Gives a vport the MAC addresses that the router's mirror has named, and no others.
    fn grant(&mut self, ve: u8, vport: u8, VportMacs { own, all }: VportMacs) {
        if vport >= CARD_VPORTS {
            return;
        }
        let segment = segment_of(ve, vport);
        let Some(router) = self.routers.get_mut(&ve) else { return };
        let before = router.granted.insert(vport, all.clone()).unwrap_or_default();
        let mut writes = Vec::new();
        for &mac in &all {
            let entry = VmacEntry { segment, mac, ve, vport };
            if let Err(error) = self.vmacs.insert(entry, &mut writes) {
                router.refused.insert(format!("vport {vport}: {error}"));
            }
        }
        for &mac in before.difference(&all) {
            self.vmacs.remove(ve, segment, mac, &mut writes);
        }
        let place = AttachmentEntry { port: port_of(vport), segment, mac: own };
        writes.push(TableWrite::Attachment(vport, Some(place)));
        self.super_write(ve, writes);
    }

    /// Lets frames in once the router's tables are in force, or keeps them out.
    fn enable(&mut self, ve: u8) {
        let Some(router) = self.routers.get_mut(&ve) else { return };
        let wanted = router.config.enabled && router.state == RouterState::Serving;
        if router.enabled != wanted {
            router.enabled = wanted;
            let write = if wanted { enable_ve() } else { TableWrite::Enabled(false) };
            self.super_write(ve, [write]);
        }
    }

    /// Adds, changes, and removes routers. True if a router has to leave first.
    fn move_routers(&mut self) -> bool {
        let ves: Vec<u8> = self.routers.keys().copied().collect();
        for ve in ves {
            let wanted = self.wanted.get(&ve).cloned();
            let Some(router) = self.routers.get_mut(&ve) else { continue };
            let same = |a: &CardRouter, b: &CardRouter| {
                (&a.name, &a.trunk, &a.routes, a.guest) == (&b.name, &b.trunk, &b.routes, b.guest)
            };
            let leaves = router.state == RouterState::Leaving;
            match wanted.filter(|wanted| same(wanted, &router.config)) {
                _ if leaves => {}
                None => self.disable_router(ve),
                Some(wanted) if wanted != router.config => self.change_router(ve, wanted),
                Some(_) => {}
            }
            self.remove_router(ve);
        }
        let added: Vec<CardRouter> =
            self.wanted.values().filter(|it| !self.routers.contains_key(&it.ve)).cloned().collect();
        added.into_iter().for_each(|router| self.add_router(router));
        self.routers.values().any(|router| router.state == RouterState::Leaving)
    }

    fn add_router(&mut self, config: CardRouter) {
        let ve = config.ve;
        let (hops, lpm) = self.sizes.equal_parts(ve);
        let driver = VeDriver::new(&hops, &lpm);
        let cleared = driver.clear_writes();
        let added = self.model.lines_mut().add(ve, &config.trunk, config.weight);
        let thread = RouteThread::start(&config.routes, config.guest, driver, self.bell.clone());
        let writes = add_ve(ve, (hops, lpm), &[], &mut self.vmacs);
        let (Ok(()), Ok(routes), Ok(mut writes)) = (added, thread, writes) else {
            eprintln!("pdp-card: router {}: no memory or thread for it", config.name);
            self.model.lines_mut().remove(ve);
            self.wanted.remove(&ve);
            return;
        };
        writes.push(meter(config.limit));
        self.super_write(ve, writes);
        // The memories of a new card are zero.
        if !self.used_ves.insert(ve) {
            self.bus.push(ve, clear_ve(&hops, &lpm));
        }
        self.bus.push(ve, cleared);
        let router = RouterOnCard {
            config,
            state: RouterState::Clearing,
            routes,
            batch: BatchState::Idle,
            granted: BTreeMap::new(),
            refused: BTreeSet::new(),
            unanswered: 0,
            enabled: false,
        };
        self.routers.insert(ve, router);
        self.link_at = Instant::now();
    }

    fn change_router(&mut self, ve: u8, config: CardRouter) {
        if let Some(trunk) = self.model.lines_mut().trunk(ve) {
            trunk.set_weight(config.weight);
        }
        self.super_write(ve, [meter(config.limit)]);
        if let Some(router) = self.routers.get_mut(&ve) {
            router.config = config;
        }
        self.enable(ve);
    }

    /// Keeps the router's frames out, and takes its MAC addresses.
    fn disable_router(&mut self, ve: u8) {
        let Some(router) = self.routers.get_mut(&ve) else { return };
        router.state = RouterState::Leaving;
        let mut writes = vec![TableWrite::Enabled(false)];
        for (vport, macs) in std::mem::take(&mut router.granted) {
            for mac in macs {
                self.vmacs.remove(ve, segment_of(ve, vport), mac, &mut writes);
            }
        }
        self.bus.clear(ve);
        self.super_write(ve, writes);
    }

    /// Removes a router that is leaving, once none of its frames is on the card.
    fn remove_router(&mut self, ve: u8) {
        let leaves = |it: &RouterOnCard| it.state == RouterState::Leaving && it.unanswered == 0;
        let lines = self.model.lines_mut();
        if self.routers.get(&ve).is_some_and(leaves)
            && lines.trunk(ve).is_none_or(|trunk| trunk.is_empty())
            && self.super_writes.is_empty()
        {
            lines.remove(ve);
            self.routers.remove(&ve);
            let clear = RegisterWrite { address: registers::CLEAR_COUNTERS, data: ve.into() };
            self.super_writes.push_back(clear);
        }
    }

    fn answer(&mut self, request: CardRequest) -> CardReply {
        match request {
            CardRequest::Status => CardReply::Status(self.status()),
            CardRequest::Serve { routers } => {
                let mut wanted = BTreeMap::new();
                for router in routers {
                    let ve = router.ve;
                    if u32::from(ve) >= self.sizes.ves {
                        let most = self.sizes.ves - 1;
                        let error = format!("router {}: VE {ve} exceeds {most}", router.name);
                        return CardReply::Failed { error };
                    }
                    if let Some(other) = wanted.insert(ve, router) {
                        let error = format!("VE {ve} is given twice, such as to {}", other.name);
                        return CardReply::Failed { error };
                    }
                }
                (self.wanted, self.moves) = (wanted, true);
                CardReply::Done
            }
        }
    }

    /// Returns sizes and counters.
    fn status(&mut self) -> CardStatus {
        let mut routers = Vec::new();
        for (&ve, router) in &self.routers {
            let Some(trunk) = self.model.lines_mut().trunk(ve) else { continue };
            let counters = trunk.counters();
            let state = router.routes.state();
            let problems = router.refused.iter().cloned().chain(state.problems);
            routers.push(CardRouterStatus {
                ve,
                connected: trunk.connection().link() == ConnectionState::Up,
                synced: state.synced,
                received: counters.received,
                forwarded: counters.forwarded,
                punted: counters.punted,
                dropped: counters.dropped,
                excess: state.excess,
                free_hops: state.free_hops,
                free_leaves: state.free_leaves,
                problems: problems.take(PROBLEMS_MAX).collect(),
            });
        }
        CardStatus {
            ves: self.sizes.ves,
            cycles: self.model.cycles(),
            refused_writes: self.model.refused_count(),
            routers,
        }
    }

    /// Waits for a frame, writes of routes, a request, or the next deadline.
    fn sleep(&mut self, control: &ControlListener) -> Result<(), ServiceError> {
        let now = Instant::now();
        let until = self.link_at.min(now + SLEEP_MAX);
        let mut armed = true;
        for trunk in self.model.lines_mut().all_mut() {
            let client = trunk.client();
            let full = client.link() == ConnectionState::Up && client.room() == 0;
            armed &= if full { client.arm_for_room() } else { client.arm() };
        }
        let time = until.saturating_duration_since(now);
        let woken = if armed { self.wait(control, time) } else { Ok(()) };
        self.model.lines_mut().all_mut().for_each(|trunk| trunk.client().disarm());
        routes::drain(&self.bell);
        // Whatever woke it, a look at routes and requests is due.
        self.poll_at = Instant::now();
        woken
    }

    fn wait(&self, control: &ControlListener, time: Duration) -> Result<(), ServiceError> {
        let mut fds: Vec<(BorrowedFd<'_>, PollFlags)> = Vec::new();
        for trunk in self.model.lines().all() {
            let client = trunk.connection();
            fds.push((client.as_fd(), PollFlags::IN));
            fds.extend(client.control().map(|fd| (fd, PollFlags::IN)));
        }
        fds.push((self.bell.as_fd(), PollFlags::IN));
        fds.extend(control.descriptors().map(|fd| (fd, PollFlags::IN)));
        let mut fds: Vec<PollFd<'_>> =
            fds.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        let time =
            Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        match poll(&mut fds, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ServiceError::Wait(error.into())),
        }
    }
}

/// Returns the write of a limit. A tick of the meters is a nanosecond.
fn meter(limit: Option<CardLimit>) -> TableWrite {
    let entry = |limit: CardLimit| {
        let rate = (u128::from(limit.bits_per_second) << 20) / 8_000_000_000;
        let rate = (rate as u32).clamp(1, (1 << 28) - 1);
        MeterEntry { rate, burst: limit.burst_bytes.min((1 << 20) - 1) }
    };
    TableWrite::Meter(limit.map(entry))
}
