//! An engine's end of its slow path. It handles the requests
//! of programs in the control guest, in bounded pieces.
//!
//! The thread that reads their sockets (`control/slowpath.rs`) checks each
//! request. It hands the request over as a [`SlowPathJob`], with all memory that the job
//! needs. The engine does the job between two batches and gives it back. Jobs travel
//! by two rings of the same length, so that there is always space to give one back.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pdp_filters::Filters;
use pdp_model::SlowPathStats;
use pdp_proto::slowpath::{Filter, FilterCounter, QueueState};
use pdp_wire::tag::PuntClass;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::actions::{Actions, ChangeSet};
use crate::packets::{PacketBatch, Packets};
use crate::queues::AtPorts;
use crate::wake::{RungLast, Wake};

/// Jobs of an engine that may be outstanding.
pub const JOBS_MAX: usize = 64;

/// Ids that are searched for filters between two checks of the time.
const LISTED_AT_ONCE: usize = 64;

/// A job for an engine.
#[derive(Debug)]
pub enum SlowPathJob {
    /// Installs these tables. Returns with the old ones.
    Actions(Option<Box<Actions>>),
    /// Installs a set for filters with short patterns. Returns unchanged if there are no tables.
    Short(Option<Box<Filters<2>>>),
    /// Installs a set for filters with long patterns. Returns unchanged if there are no tables.
    Long(Option<Box<Filters<5>>>),
    /// Applies these commits; the number counts those
    /// that are done. Returns once all have a result.
    Commit(Vec<Commit>, usize),
    /// Reads the counters with these numbers. Returns with their values at one moment.
    Count(Range<u32>, Vec<FilterCounter>),
    /// Lists filters from this id on. Returns with as many as
    /// fit and, if there are more, the id to continue with.
    List(u32, Vec<Filter>, Option<u32>),
    /// Lists the queues of a vport, from the given one on, counted from 0.
    /// Returns with as many as fit. The flag is true if there are more.
    Queues(u8, u16, Vec<QueueState>, bool),
    /// Sends a frame.
    Send {
        /// True: out of the vport. False: as if it had arrived there.
        out: bool,
        /// The vport.
        vport: u8,
        /// The port's queue, counted from 1; 0: the port chooses.
        queue: u16,
        /// The frame, beginning with the Ethernet header.
        bytes: Vec<u8>,
    },
}

/// Changes of a program that shall take effect together.
#[derive(Debug)]
pub struct Commit {
    /// The program's number for this commit.
    pub number: u64,
    /// Changes, in order.
    pub changes: ChangeSet,
    /// An invalid filter, and the reason. No change is applied then.
    pub wrong: Option<(u32, String)>,
}

/// A job, and the program that asked for it.
#[derive(Debug)]
pub struct AddressedJob {
    /// The program's number at the thread.
    pub client: u64,
    /// The program's number for this job.
    pub number: u64,
    /// The job.
    pub job: SlowPathJob,
}

/// State that both ends share.
#[derive(Debug, Default)]
pub struct SlowPathShared {
    /// True once the engine is in use.
    pub used: AtomicBool,
    /// Cycles that the thread spent for it, and that its vnet was not charged with yet.
    pub outstanding_cycles: AtomicU64,
    /// Number of vports of its node.
    pub vports: AtomicU64,
    /// Number of connected programs.
    pub programs: AtomicU64,
    /// Reason for the last disconnection of a program.
    pub fault: Mutex<Option<String>>,
}

/// The thread's end.
#[derive(Debug)]
pub struct SlowPathHandle {
    /// Jobs to the engine.
    pub to: Producer<AddressedJob>,
    /// Jobs that the engine gives back.
    pub from: Consumer<AddressedJob>,
    /// State that both ends share.
    pub shared: Arc<SlowPathShared>,
}

/// Destinations of the frames that programs send.
pub struct SlowPathOutputs<'a> {
    /// Source of free packets.
    pub packets: &'a mut Packets,
    /// The node's ports.
    pub ports: Range<u16>,
    /// Frames that arrive at their ports.
    pub local: &'a mut PacketBatch,
    /// Frames that leave by their ports.
    pub out: &'a mut PacketBatch,
    /// Ports of frames that found no free packet.
    pub missed: &'a mut Vec<u16>,
    /// Packets that frames may take.
    pub room: usize,
    /// Queues at the ports.
    pub queues: &'a mut dyn AtPorts,
}

/// The engine's end.
#[derive(Debug)]
pub struct EngineSlowPath {
    from: Consumer<AddressedJob>,
    to: Producer<AddressedJob>,
    // Declared after the rings, so that the reader finds them abandoned when it is rung.
    reader: RungLast,
    shared: Arc<SlowPathShared>,
    /// The current job.
    now: Option<AddressedJob>,
    /// Filters, actions and counters. `None` until the first program connects.
    pub actions: Option<Box<Actions>>,
}

impl EngineSlowPath {
    /// Returns both ends. `reader` is the thread's doorbell.
    pub fn new(reader: Arc<Wake>) -> (Self, SlowPathHandle) {
        let (to, from_desk) = RingBuffer::new(JOBS_MAX);
        let (to_desk, from) = RingBuffer::new(JOBS_MAX);
        let shared = Arc::<SlowPathShared>::default();
        let slowpath = Self {
            from: from_desk,
            to: to_desk,
            reader: RungLast(reader),
            shared: shared.clone(),
            now: None,
            actions: None,
        };
        (slowpath, SlowPathHandle { to, from, shared })
    }

    /// True if there is no work.
    pub fn is_idle(&self) -> bool {
        self.now.is_none()
            && self.from.is_empty()
            && self.actions.as_ref().is_none_or(|it| it.is_settled())
    }

    /// Returns its state.
    pub fn stats(&self) -> SlowPathStats {
        let fault = self.shared.fault.try_lock().ok();
        SlowPathStats {
            programs: self.shared.programs.load(Ordering::Relaxed) as u32,
            filters: self.actions.as_ref().map_or(0, |it| it.count()),
            memory_bytes: self.actions.as_ref().map_or(0, |it| it.memory()) as u64,
            fault: fault.and_then(|fault| fault.clone()),
        }
    }

    /// Returns the cycles that the thread spent since the last call.
    pub fn take_outstanding_cycles(&self) -> u64 {
        match self.shared.outstanding_cycles.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.shared.outstanding_cycles.swap(0, Ordering::Relaxed),
        }
    }

    /// Does jobs while `go_on` returns true. Returns true if there was work.
    pub fn poll(
        &mut self,
        outputs: &mut SlowPathOutputs<'_>,
        mut go_on: impl FnMut() -> bool,
    ) -> bool {
        if !self.shared.used.load(Ordering::Relaxed) {
            self.shared.used.store(true, Ordering::Release);
            self.reader.0.ring();
        }
        let vports = outputs.ports.len() as u64;
        if self.shared.vports.load(Ordering::Relaxed) != vports {
            self.shared.vports.store(vports, Ordering::Relaxed);
        }
        if self.is_idle() {
            return false;
        }
        let mut done = false;
        loop {
            let Some(mut asked) = self.now.take().or_else(|| self.from.pop().ok()) else {
                self.actions.iter_mut().for_each(|actions| _ = actions.settle(&mut go_on));
                break;
            };
            if !self.act(&mut asked.job, outputs, &mut go_on) {
                self.now = Some(asked);
                break;
            }
            // The ring has space: no more jobs are outstanding than it has slots.
            let _ = self.to.push(asked);
            done = true;
            if !go_on() {
                break;
            }
        }
        if done {
            self.reader.0.ring();
        }
        true
    }

    /// Continues with a job. True if it is done.
    fn act(
        &mut self,
        job: &mut SlowPathJob,
        outputs: &mut SlowPathOutputs<'_>,
        mut go_on: impl FnMut() -> bool,
    ) -> bool {
        match job {
            SlowPathJob::Actions(new) => std::mem::swap(&mut self.actions, new),
            SlowPathJob::Short(new) => {
                self.actions.iter_mut().for_each(|it| std::mem::swap(&mut it.short, new));
            }
            SlowPathJob::Long(new) => {
                self.actions.iter_mut().for_each(|it| std::mem::swap(&mut it.long, new));
            }
            SlowPathJob::Commit(all, done) => {
                let Some(actions) = &mut self.actions else { return true };
                while let Some(commit) = all.get_mut(*done) {
                    let Commit { changes, wrong, .. } = commit;
                    if wrong.is_none() && !actions.apply(changes, outputs.queues, &mut go_on) {
                        return false;
                    }
                    *done += 1;
                    if !go_on() {
                        return *done == all.len();
                    }
                }
            }
            SlowPathJob::Count(numbers, counters) => {
                let numbers = numbers.start as usize..numbers.end as usize;
                let all = self.actions.as_ref().and_then(|it| it.counters.get(numbers));
                counters.extend_from_slice(all.unwrap_or_default());
            }
            SlowPathJob::Queues(vport, first, states, more) => {
                if let Some(queues) = outputs.queues.at(*vport) {
                    let room = states.capacity();
                    states.extend(queues.states((*first).into()).take(room));
                    *more = queues.count() > usize::from(*first) + states.len();
                }
            }
            SlowPathJob::List(next, filters, more) => return self.list(next, filters, more, go_on),
            SlowPathJob::Send { out, vport, queue, bytes } => {
                outputs.send(*out, *vport, *queue, bytes)
            }
        }
        true
    }

    fn list(
        &self,
        next: &mut u32,
        filters: &mut Vec<Filter>,
        more: &mut Option<u32>,
        mut go_on: impl FnMut() -> bool,
    ) -> bool {
        let Some(actions) = &self.actions else { return true };
        while *next < actions.filters_max() {
            let end = next.saturating_add(LISTED_AT_ONCE as u32).min(actions.filters_max());
            while *next < end {
                if let Some(filter) = actions.filter(*next) {
                    if filters.len() == filters.capacity() {
                        *more = Some(*next);
                        return true;
                    }
                    filters.push(filter);
                }
                *next += 1;
            }
            if !go_on() {
                return *next == actions.filters_max();
            }
        }
        true
    }
}

impl SlowPathOutputs<'_> {
    /// Sends a frame by a port of the node. Ignores frames for ports that the node does not have.
    fn send(&mut self, out: bool, vport: u8, queue: u16, bytes: &[u8]) {
        let port = self.ports.start + u16::from(vport);
        if !self.ports.contains(&port) {
            return;
        }
        let packet = if self.room > 0 { self.packets.copy_of(bytes, 0) } else { None };
        let Some(packet) = packet else { return self.missed.push(port) };
        self.room -= 1;
        let output = if out { &mut *self.out } else { &mut *self.local };
        let mut packet = packet.at(port.into());
        packet.queue = if out { queue } else { 0 };
        output.push(packet);
    }
}

/// Punt class of packets that a filter sends to the control guest.
pub const PUNTED_AS: PuntClass = PuntClass::Hook;
