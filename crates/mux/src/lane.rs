//! A lane: the way to one who processes frames or takes them, and back.
//!
//! The mux knows who is there by [`Lane`] alone. Its first kind is a memif connection ([`crate::memif`]). Calls
//! take as many frames as there are, so that it costs nothing a frame not to know which kind it is.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use pdp_afxdp::Packet;
use pdp_proto::mux::Attach;
use pdp_wire::tag::{Tag, Verdict};

use crate::packets::Packets;
use crate::sleep::{Alarm, Peer, State};

/// Frames taken from one lane at a time.
pub const PULL_FRAMES: usize = 256;

/// How a peer broke the contract, in words for it.
pub type Fault = String;

/// Who processes frames, and the two ways between it and the worker. What a fault ends is the caller's to end.
pub trait Lane: Peer<Fault = Fault> + Debug + Send {
    /// What is at the other end: whether its frames have tags, and if not, of which of its node's ports they
    /// are. Said once, before the first frame.
    fn attach(&mut self, attach: Attach, vport: u8);
    /// Frames that there is room for. A fault shows with the next push.
    fn room(&mut self) -> usize;
    /// Gives it frames of a node whose first port is `first`, in their order, until there is no more room;
    /// how many. It sees them once they are shown.
    fn push(&mut self, first: u16, frames: &[Packet]) -> Result<usize, Fault>;
    /// Takes up to `max` frames, no more than there are packets, and up to `completions` completions, of a node
    /// with these `ports`. What came before a fault was taken.
    fn pull(
        &mut self,
        ports: Range<u16>,
        max: usize,
        completions: usize,
        packets: &mut Packets,
        pulled: &mut Pulled,
    ) -> Result<(), Fault>;
    /// Whether it has sent something that was not pulled yet.
    fn has_sent(&mut self) -> bool;
    /// What is watched while it is armed.
    fn doorbell(&self) -> Option<BorrowedFd<'_>>;
}

/// A lane in use: whose it is, and whether it sleeps.
#[derive(Debug)]
pub struct Link<L: ?Sized = dyn Lane> {
    /// The connection's number.
    pub epoch: u64,
    /// Whether its doorbell can be relied on, and it is rung once a sleep: programs of our own.
    sure: bool,
    state: State,
    /// When it last sent something, nanoseconds.
    sent_ns: u64,
    /// The lane.
    pub lane: L,
}

impl<L> Link<L> {
    /// The connection with this number.
    pub fn of(lane: L, epoch: u64) -> Self {
        let (sure, state, sent_ns) = Default::default();
        Self { epoch, sure, state, sent_ns, lane }
    }
}

impl<L: Lane + ?Sized> Link<L> {
    /// As [`Lane::attach`]. The doorbells of programs of our own can be relied on.
    pub fn attach(&mut self, attach: Attach, vport: u8) {
        self.sure = attach != Attach::Memif;
        self.lane.attach(attach, vport);
    }

    /// Whether its doorbell can be relied on.
    pub fn is_sure(&self) -> bool {
        self.sure
    }

    /// Whether nothing can be there until it rings.
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.state.is_armed()
    }

    /// Whether it may sleep through what it was shown, and is rung when it is time.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }

    /// Lets the peer see what was pushed, and has it rung for that when it is time, or `at_once`. One that
    /// waits for room is rung once half of its ring was taken: where it shares a CPU with the mux each
    /// ring is two switches between them.
    #[inline]
    pub fn flush(&mut self, alarm: &mut Alarm, at_once: bool) -> Result<(), Fault> {
        self.state.flush(&mut self.lane, alarm, at_once)
    }

    /// Lets the peer ring, which is not looked at any more; false if it has sent something.
    pub fn arm(&mut self, alarm: &mut Alarm) -> Result<bool, Fault> {
        self.state.arm(&mut self.lane, alarm)
    }

    /// Notes that it sent `frames`. One that has sent nothing for `quiet_ns` is armed, if it can be relied on.
    #[inline]
    pub fn sent(
        &mut self,
        frames: usize,
        alarm: &mut Alarm,
        now_ns: u64,
        quiet_ns: u64,
    ) -> Result<(), Fault> {
        if frames > 0 {
            self.sent_ns = now_ns;
        }
        // One that waits to be rung is when it is time.
        let quiet = self.sure
            && self.state == State::Polled
            && now_ns.saturating_sub(self.sent_ns) >= quiet_ns;
        if quiet { self.arm(alarm).map(|_| ()) } else { Ok(()) }
    }

    /// The peer is looked at from now on, and does not ring.
    pub fn disarm(&mut self, now_ns: u64) {
        self.state.disarm(&mut self.lane);
        self.sent_ns = now_ns;
    }
}

/// What a peer sent.
#[derive(Debug, Default)]
pub struct Pulled {
    /// Frames in all, those that were dropped and kept included.
    pub frames: usize,
    /// Completions among them.
    pub completed: usize,
    /// Frames to send, at their ports.
    pub packets: Vec<Packet>,
    /// Frames for the control guest, at their ports.
    pub punted: Vec<Packet>,
    /// All but those that are sent for a frame that they complete.
    pub runs: Vec<Run>,
}

/// Frames in a row about which a peer says the same, or completions without frames.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// What the peer says about them.
    pub tag: Tag,
    /// How many.
    pub frames: usize,
    /// The place of the first among the packets or those punted; `None` without: where the tag says that no
    /// frame follows, or if they were too long for a packet.
    pub at: Option<usize>,
}

impl Pulled {
    /// Adds what came next from a node whose first port is `first`.
    #[inline]
    pub fn add(&mut self, first: u16, tag: Tag, packet: Option<Packet>) {
        self.frames += 1;
        self.completed += usize::from(tag.last);
        let packet = packet.map(|packet| packet.at(usize::from(first) + usize::from(tag.vport)));
        match (packet, tag) {
            (Some(packet), Tag { verdict: Verdict::Out, last: true, trace: 0, .. }) => {
                self.packets.push(packet);
            }
            (packet, _) => self.note(tag, packet),
        }
    }

    fn note(&mut self, tag: Tag, packet: Option<Packet>) {
        let punted = matches!(tag.verdict, Verdict::Punt(_));
        let to = if punted { &mut self.punted } else { &mut self.packets };
        let at = packet.is_some().then_some(to.len());
        to.extend(packet);
        match self.runs.last_mut() {
            Some(run) if run.tag == tag && run.at.map(|first| first + run.frames) == at => {
                run.frames += 1;
            }
            _ => self.runs.push(Run { tag, frames: 1, at }),
        }
    }

    /// Frames that are sent or punted, were they too long or not.
    pub fn sent(&self) -> usize {
        let is_frame = |run: &&Run| matches!(run.tag.verdict, Verdict::Out | Verdict::Punt(_));
        let others = self.runs.iter().filter(|run| !is_frame(run)).map(|run| run.frames);
        self.frames - others.sum::<usize>()
    }

    /// Empties it; its packets go home.
    pub fn clear(&mut self, packets: &mut Packets) {
        packets.give_all(&mut self.packets);
        packets.give_all(&mut self.punted);
        self.runs.clear();
        (self.frames, self.completed) = (0, 0);
    }
}
