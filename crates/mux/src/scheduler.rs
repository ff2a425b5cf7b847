//! Whose frame is next to an interface of known capacity ([`Fair`]), and when: the one place for all of its exits.

use std::sync::Arc;

use pdp_afxdp::Packet;

use crate::class::{Class, on_wire};
use crate::counters::{OuterReason, Reason};
use crate::exit::{Exit, Tools};
use crate::fair::{Fair, Next, Part};
use crate::packets::Batch;

/// How much time that it lost to a worker that came late it makes good, nanoseconds: what ports have there is enough
/// for that.
pub const LATE_NS: u64 = crate::class::AHEAD_NS;

/// The class of frames whose own is gone.
const NOBODYS: usize = 0;

/// An interface's scheduler.
#[derive(Debug)]
pub struct Scheduler {
    /// Frames, and the exits that they go by.
    fair: Fair<(usize, Packet)>,
    /// By number.
    classes: Vec<Option<Arc<Class>>>,
    /// Whose turn it is, where its exit has no room.
    stuck: Option<(usize, Packet)>,
    /// For the frame whose turn it is; empty between calls.
    one: Batch,
    /// When the next one's turn is.
    due_ns: Option<u64>,
}

impl Default for Scheduler {
    fn default() -> Self {
        let mut fair = Fair::new(LATE_NS);
        fair.set(NOBODYS, Part { guarantee_bps: 0, weight: 1 }, 0);
        Self { fair, classes: vec![], stuck: None, one: vec![], due_ns: None }
    }
}

impl Scheduler {
    /// Gives the interface another capacity, bits a second; `None`: all goes at once.
    pub fn set_capacity(&mut self, bps: Option<u64>) {
        self.fair.set_capacity(bps);
        self.due_ns = None;
    }

    /// Has a class, from now on with this part.
    pub fn set(&mut self, class: Arc<Class>, part: Part, now_ns: u64) {
        let number = class.number();
        if self.classes.len() <= number {
            self.classes.resize(number + 1, None);
        }
        self.classes[number] = Some(class);
        self.fair.set(number, part, now_ns);
    }

    /// Lets go of a class whose port sends no more. What it has there goes as nobody's.
    pub fn remove(&mut self, number: usize, now_ns: u64) -> Option<Arc<Class>> {
        let class = self.classes.get_mut(number)?.take()?;
        for (frame, bytes) in self.fair.remove(number) {
            class.sub(1, bytes.into());
            self.fair.put(NOBODYS, frame, bytes, now_ns);
        }
        Some(class)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.stuck.is_none() && self.fair.waiting() == 0
    }

    /// Has a frame wait for its turn that is of the class with this number, and goes by exit `at`.
    #[inline]
    pub fn put(&mut self, number: usize, at: usize, packet: Packet, now_ns: u64) {
        let known = matches!(self.classes.get(number), Some(Some(_)));
        let bytes = on_wire(packet.len());
        self.fair.put(if known { number } else { NOBODYS }, (at, packet), bytes, now_ns);
    }

    /// Sends those whose turn it is. Returns how many.
    pub fn run(&mut self, exits: &mut [Box<dyn Exit>], tools: &mut Tools<'_>) -> usize {
        let mut sent = 0;
        while !exits.is_empty() {
            let (at, packet) = match self.stuck.take() {
                Some(stuck) => stuck,
                None => match self.fair.next(tools.now_ns) {
                    Next::Go(number, frame) => {
                        if let Some(Some(class)) = self.classes.get(number) {
                            class.sub(1, on_wire(frame.1.len()).into());
                        }
                        frame
                    }
                    next => {
                        self.due_ns = if let Next::At(at_ns) = next { Some(at_ns) } else { None };
                        return sent;
                    }
                },
            };
            self.one.push(packet);
            let why = exits[at % exits.len()].send(tools, &mut self.one);
            match self.one.pop() {
                None => sent += 1,
                Some(packet) if why == Reason::ExternalGone => {
                    tools.counters.drop(OuterReason::Gone);
                    tools.packets.give(packet);
                }
                Some(packet) => {
                    self.stuck = Some((at, packet));
                    break;
                }
            }
        }
        // Who makes room says so.
        self.due_ns = None;
        sent
    }

    /// When the next frame's turn is, nanoseconds, if one waits for it.
    pub fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// Takes all that waits.
    pub fn drain(&mut self) -> Batch {
        self.fair.set_capacity(None);
        let mut all: Batch = self.stuck.take().into_iter().map(|it| it.1).collect();
        while let Next::Go(_, (_, packet)) = self.fair.next(u64::MAX >> 1) {
            all.push(packet);
        }
        all
    }
}
