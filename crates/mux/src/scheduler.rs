//! Scheduler of an interface of known capacity: which frame is next
//! ([`WfqScheduler`]), and when. One scheduler serves all netdevs of the interface.

use std::sync::Arc;

use pdp_afxdp::PacketBuffer;

use crate::counters::{OuterReason, Reason};
use crate::netdev::{NetdevContext, NetdevDriver};
use crate::packets::PacketBatch;
use crate::traffic_class::{TrafficClass, on_wire};
use crate::wfq::{BandwidthShare, NextFrame, WfqScheduler};

/// Lost time that it catches up on when the worker is late, nanoseconds.
/// The frames that ports may have at the scheduler suffice for that.
pub const LATE_NS: u64 = crate::traffic_class::AHEAD_NS;

/// Traffic class of frames whose own class was removed.
const NOBODYS: usize = 0;

/// An interface's scheduler.
#[derive(Debug)]
pub struct Scheduler {
    /// Frames, and the indices of their netdevs.
    wfq: WfqScheduler<(usize, PacketBuffer)>,
    /// Traffic classes by number.
    classes: Vec<Option<Arc<TrafficClass>>>,
    /// The next frame, if its netdev has no space.
    stuck: Option<(usize, PacketBuffer)>,
    /// Buffer for the frame that is being sent; empty between calls.
    one: PacketBatch,
    /// Time when the next frame may be sent.
    due_ns: Option<u64>,
}

impl Default for Scheduler {
    fn default() -> Self {
        let mut wfq = WfqScheduler::new(LATE_NS);
        wfq.set(NOBODYS, BandwidthShare { guarantee_bps: 0, weight: 1 }, 0);
        Self { wfq, classes: vec![], stuck: None, one: vec![], due_ns: None }
    }
}

impl Scheduler {
    /// Sets the interface's capacity, bits a second. `None`: all frames are sent at once.
    pub fn set_capacity(&mut self, bps: Option<u64>) {
        self.wfq.set_capacity(bps);
        self.due_ns = None;
    }

    /// Adds a traffic class, or changes its share.
    pub fn set(&mut self, class: Arc<TrafficClass>, part: BandwidthShare, now_ns: u64) {
        let number = class.number();
        if self.classes.len() <= number {
            self.classes.resize(number + 1, None);
        }
        self.classes[number] = Some(class);
        self.wfq.set(number, part, now_ns);
    }

    /// Removes a traffic class whose port sends no more.
    /// Its remaining frames go to class `NOBODYS`.
    pub fn remove(&mut self, number: usize, now_ns: u64) -> Option<Arc<TrafficClass>> {
        let class = self.classes.get_mut(number)?.take()?;
        for (frame, bytes) in self.wfq.remove(number) {
            class.sub(1, bytes.into());
            self.wfq.enqueue(NOBODYS, frame, bytes, now_ns);
        }
        Some(class)
    }

    /// True if no frame is queued.
    pub fn is_empty(&self) -> bool {
        self.stuck.is_none() && self.wfq.waiting() == 0
    }

    /// Queues a frame of the class with this number, for netdev `at`.
    #[inline]
    pub fn put(&mut self, number: usize, at: usize, packet: PacketBuffer, now_ns: u64) {
        let known = matches!(self.classes.get(number), Some(Some(_)));
        let bytes = on_wire(packet.len());
        self.wfq.enqueue(if known { number } else { NOBODYS }, (at, packet), bytes, now_ns);
    }

    /// Sends the frames that the capacity permits now. Returns their number.
    pub fn run(
        &mut self,
        netdevs: &mut [Box<dyn NetdevDriver>],
        tools: &mut NetdevContext<'_>,
    ) -> usize {
        let mut sent = 0;
        while !netdevs.is_empty() {
            let (at, packet) = match self.stuck.take() {
                Some(stuck) => stuck,
                None => match self.wfq.next(tools.now_ns) {
                    NextFrame::Send(number, frame) => {
                        if let Some(Some(class)) = self.classes.get(number) {
                            class.sub(1, on_wire(frame.1.len()).into());
                        }
                        frame
                    }
                    next => {
                        self.due_ns =
                            if let NextFrame::At(at_ns) = next { Some(at_ns) } else { None };
                        return sent;
                    }
                },
            };
            self.one.push(packet);
            let why = netdevs[at % netdevs.len()].send(tools, &mut self.one);
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
        // A netdev that gets space is flushed again, so no timer is needed.
        self.due_ns = None;
        sent
    }

    /// Returns when the next queued frame may be sent, nanoseconds, if there is one.
    pub fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// Removes and returns all queued frames.
    pub fn drain(&mut self) -> PacketBatch {
        self.wfq.set_capacity(None);
        let mut all: PacketBatch = self.stuck.take().into_iter().map(|it| it.1).collect();
        while let NextFrame::Send(_, (_, packet)) = self.wfq.next(u64::MAX >> 1) {
            all.push(packet);
        }
        all
    }
}
