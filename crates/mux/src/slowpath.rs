//! An engine's end of its slow path: what programs in the control guest ask for, done a bounded piece at a time.
//!
//! The thread that reads their sockets ([`crate::control::slowpath`]) checks what they say and hands it over as a
//! [`Job`], with all memory that it takes; the engine does it between two batches and gives it back. Jobs go round by
//! two rings of the same length, so that there is always room to give one back.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pdp_filters::Filters;
use pdp_proto::mux;
use pdp_proto::slowpath::{Counter, Filter, QueueState};
use pdp_wire::tag::PuntClass;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::actions::{Actions, Changes};
use crate::packets::{Batch, Packets};
use crate::queues::AtPorts;
use crate::wake::{RungLast, Wake};

/// Jobs of an engine that are under way.
pub const JOBS_MAX: usize = 64;

/// Ids that are looked at for filters between two looks at the time.
const LISTED_AT_ONCE: usize = 64;

/// Something to do.
#[derive(Debug)]
pub enum Job {
    /// These are the tables from now on; those of before come back.
    Actions(Option<Box<Actions>>),
    /// There is room for filters with short patterns; comes back as it was where there are no tables.
    Short(Option<Box<Filters<2>>>),
    /// The same for long ones.
    Long(Option<Box<Filters<5>>>),
    /// Commits, and how many of them are done; come back once something has become of all.
    Commit(Vec<Commit>, usize),
    /// Counters with these numbers; comes back with what they have at one moment.
    Count(Range<u32>, Vec<Counter>),
    /// Filters from this id on; comes back with as many as there is room for, and the id where to go on, if there are more.
    List(u32, Vec<Filter>, Option<u32>),
    /// The queues of a vport, from one on, counted from 0; comes back with as many as there is room for, and whether
    /// there are more.
    Queues(u8, u16, Vec<QueueState>, bool),
    /// A frame.
    Send {
        /// Out of the vport, and not in by it.
        out: bool,
        /// The vport.
        vport: u8,
        /// The port's queue, counted from 1; 0: the port chooses.
        queue: u16,
        /// From Ethernet's header on.
        bytes: Vec<u8>,
    },
}

/// What a program wants to come into force together.
#[derive(Debug)]
pub struct Commit {
    /// The program's number for it.
    pub number: u64,
    /// Changes, in order.
    pub changes: Changes,
    /// A filter that makes no sense, and why: then nothing comes of them.
    pub wrong: Option<(u32, String)>,
}

/// A job, and for which program.
#[derive(Debug)]
pub struct Asked {
    /// Whose it is, as the thread counts.
    pub whose: u64,
    /// The program's number for it.
    pub number: u64,
    /// What it is.
    pub job: Job,
}

/// What both ends know.
#[derive(Debug, Default)]
pub struct Shared {
    /// The engine is in use.
    pub used: AtomicBool,
    /// Cycles that the thread took for it and that its vnet has not been charged with.
    pub owed: AtomicU64,
    /// Vports that its node has.
    pub vports: AtomicU64,
    /// Programs that are connected.
    pub programs: AtomicU64,
    /// Why one of them was disconnected, the last one.
    pub fault: Mutex<Option<String>>,
}

/// The thread's end.
#[derive(Debug)]
pub struct Desk {
    /// Jobs to the engine.
    pub to: Producer<Asked>,
    /// Jobs that come back.
    pub from: Consumer<Asked>,
    /// What both know.
    pub shared: Arc<Shared>,
}

/// Where frames of programs go.
pub struct Ways<'a> {
    /// Where there are packets.
    pub packets: &'a mut Packets,
    /// The node's ports.
    pub ports: Range<u16>,
    /// In by their ports.
    pub local: &'a mut Batch,
    /// Out of their ports.
    pub out: &'a mut Batch,
    /// Ports of those that there was no packet for.
    pub missed: &'a mut Vec<u16>,
    /// Packets that may be taken.
    pub room: usize,
    /// Where they wait.
    pub queues: &'a mut dyn AtPorts,
}

/// The engine's end.
#[derive(Debug)]
pub struct SlowPath {
    from: Consumer<Asked>,
    to: Producer<Asked>,
    // Behind the rings: it sees that they are gone.
    reader: RungLast,
    shared: Arc<Shared>,
    /// What is being done.
    now: Option<Asked>,
    /// What it has the engine do; `None` until a program has come.
    pub actions: Option<Box<Actions>>,
}

impl SlowPath {
    /// Both ends; `reader` is the thread's doorbell.
    pub fn new(reader: Arc<Wake>) -> (Self, Desk) {
        let (to, from_desk) = RingBuffer::new(JOBS_MAX);
        let (to_desk, from) = RingBuffer::new(JOBS_MAX);
        let shared = Arc::<Shared>::default();
        let slowpath = Self {
            from: from_desk,
            to: to_desk,
            reader: RungLast(reader),
            shared: shared.clone(),
            now: None,
            actions: None,
        };
        (slowpath, Desk { to, from, shared })
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.now.is_none()
            && self.from.is_empty()
            && self.actions.as_ref().is_none_or(|it| it.is_settled())
    }

    /// How it is.
    pub fn stats(&self) -> mux::SlowPathStats {
        let fault = self.shared.fault.try_lock().ok();
        mux::SlowPathStats {
            programs: self.shared.programs.load(Ordering::Relaxed) as u32,
            filters: self.actions.as_ref().map_or(0, |it| it.count()),
            memory_bytes: self.actions.as_ref().map_or(0, |it| it.memory()) as u64,
            fault: fault.and_then(|fault| fault.clone()),
        }
    }

    /// Cycles that the thread took since this was asked before.
    pub fn take_owed(&self) -> u64 {
        match self.shared.owed.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.shared.owed.swap(0, Ordering::Relaxed),
        }
    }

    /// Does what was asked, as long as `go_on` says. Returns whether there was anything to do.
    pub fn tend(&mut self, ways: &mut Ways<'_>, mut go_on: impl FnMut() -> bool) -> bool {
        if !self.shared.used.load(Ordering::Relaxed) {
            self.shared.used.store(true, Ordering::Release);
            self.reader.0.ring();
        }
        let vports = ways.ports.len() as u64;
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
            if !self.act(&mut asked.job, ways, &mut go_on) {
                self.now = Some(asked);
                break;
            }
            // There is room: no more are under way.
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

    /// Goes on with a job; whether it is done.
    fn act(&mut self, job: &mut Job, ways: &mut Ways<'_>, mut go_on: impl FnMut() -> bool) -> bool {
        match job {
            Job::Actions(new) => std::mem::swap(&mut self.actions, new),
            Job::Short(new) => {
                self.actions.iter_mut().for_each(|it| std::mem::swap(&mut it.short, new));
            }
            Job::Long(new) => {
                self.actions.iter_mut().for_each(|it| std::mem::swap(&mut it.long, new));
            }
            Job::Commit(all, done) => {
                let Some(actions) = &mut self.actions else { return true };
                while let Some(commit) = all.get_mut(*done) {
                    let Commit { changes, wrong, .. } = commit;
                    if wrong.is_none() && !actions.apply(changes, ways.queues, &mut go_on) {
                        return false;
                    }
                    *done += 1;
                    if !go_on() {
                        return *done == all.len();
                    }
                }
            }
            Job::Count(numbers, counters) => {
                let numbers = numbers.start as usize..numbers.end as usize;
                let all = self.actions.as_ref().and_then(|it| it.counters.get(numbers));
                counters.extend_from_slice(all.unwrap_or_default());
            }
            Job::Queues(vport, first, states, more) => {
                if let Some(queues) = ways.queues.at(*vport) {
                    let room = states.capacity();
                    states.extend(queues.states((*first).into()).take(room));
                    *more = queues.count() > usize::from(*first) + states.len();
                }
            }
            Job::List(next, filters, more) => return self.list(next, filters, more, go_on),
            Job::Send { out, vport, queue, bytes } => ways.send(*out, *vport, *queue, bytes),
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

impl Ways<'_> {
    /// A frame of a port that the node does not have is nobody's.
    fn send(&mut self, out: bool, vport: u8, queue: u16, bytes: &[u8]) {
        let port = self.ports.start + u16::from(vport);
        if !self.ports.contains(&port) {
            return;
        }
        let packet = if self.room > 0 { self.packets.copy_of(bytes, 0) } else { None };
        let Some(packet) = packet else { return self.missed.push(port) };
        self.room -= 1;
        let way = if out { &mut *self.out } else { &mut *self.local };
        let mut packet = packet.at(port.into());
        packet.queue = if out { queue } else { 0 };
        way.push(packet);
    }
}

/// Class of packets that a filter hands to the control guest.
pub const PUNTED_AS: PuntClass = PuntClass::Hook;
