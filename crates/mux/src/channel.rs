//! Channels: how frames go to a peer that processes or takes them, and back.
//!
//! The mux knows peers only by the trait [`PeerChannel`]. The first kind
//! is a memif connection ([`crate::memif`]). Calls pass many frames
//! at once, so that dynamic dispatch costs nothing per frame.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use pdp_afxdp::PacketBuffer;
use pdp_proto::mux::AttachMode;
use pdp_wire::tag::{Tag, TagVerdict};

use crate::packets::Packets;
use crate::sleep::{Alarm, PeerPollState, WakeablePeer};

/// Frames taken from one channel at a time.
pub const PULL_FRAMES: usize = 256;

/// Description of a peer's breach of the contract, for that peer.
pub type PeerFault = String;

/// A channel to a peer and back. After a fault, the caller ends the channel.
pub trait PeerChannel: WakeablePeer<Fault = PeerFault> + Debug + Send {
    /// Sets the kind of peer: whether its frames have tags and, if not, which
    /// port of its node they belong to. Called once, before the first frame.
    fn attach(&mut self, attach: AttachMode, vport: u8);
    /// Returns how many frames the peer can take. The next push reports a fault.
    fn room(&mut self) -> usize;
    /// Pushes frames of a node whose first port is `first`, in order, while there
    /// is space. Returns how many. The peer sees them after [`WakeablePeer::show`].
    fn push(&mut self, first: u16, frames: &[PacketBuffer]) -> Result<usize, PeerFault>;
    /// Takes up to `max` frames and up to `completions` completions of a node with these
    /// `ports`, limited by the free packets. On a fault, `pulled` has what preceded it.
    fn pull(
        &mut self,
        ports: Range<u16>,
        max: usize,
        completions: usize,
        packets: &mut Packets,
        pulled: &mut Pulled,
    ) -> Result<(), PeerFault>;
    /// True if the peer has sent something that was not pulled yet.
    fn has_sent(&mut self) -> bool;
    /// Returns the doorbell to watch while the channel is armed.
    fn doorbell(&self) -> Option<BorrowedFd<'_>>;
}

/// A connected channel: its number, and the peer's sleep state.
#[derive(Debug)]
pub struct PeerConnection<L: ?Sized = dyn PeerChannel> {
    /// The connection's number.
    pub epoch: u64,
    /// True for PdP's own programs: their doorbell is reliable, and they are rung once per sleep.
    reliable: bool,
    state: PeerPollState,
    /// Time when the peer last sent something, nanoseconds.
    sent_ns: u64,
    /// The channel.
    pub channel: L,
}

impl<L> PeerConnection<L> {
    /// Creates the connection with this number.
    pub fn of(channel: L, epoch: u64) -> Self {
        let (sure, state, sent_ns) = Default::default();
        Self { epoch, reliable: sure, state, sent_ns, channel }
    }
}

impl<L: PeerChannel + ?Sized> PeerConnection<L> {
    /// Sets the kind of peer, as [`PeerChannel::attach`]. The
    /// doorbells of PdP's own programs are reliable.
    pub fn attach(&mut self, attach: AttachMode, vport: u8) {
        self.reliable = attach != AttachMode::Memif;
        self.channel.attach(attach, vport);
    }

    /// True if its doorbell is reliable.
    pub fn is_reliable(&self) -> bool {
        self.reliable
    }

    /// True if the peer sends nothing without ringing.
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.state.is_armed()
    }

    /// True if the peer may have missed a notification, and must be rung when its time comes.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, PeerPollState::Waiting { .. })
    }

    /// Shows the pushed frames to the peer. Rings it when its time comes, or now if
    /// `at_once`. A peer that waits for space is rung once half of its ring was emptied.
    /// Each ring costs two context switches if the peer shares a CPU with the mux.
    #[inline]
    pub fn flush(&mut self, alarm: &mut Alarm, at_once: bool) -> Result<(), PeerFault> {
        self.state.flush(&mut self.channel, alarm, at_once)
    }

    /// Lets the peer ring, and stops polling it. False if it has sent something.
    pub fn arm(&mut self, alarm: &mut Alarm) -> Result<bool, PeerFault> {
        self.state.arm(&mut self.channel, alarm)
    }

    /// Records that the peer sent `frames`. Arms a peer that has
    /// sent nothing for `quiet_ns`, if its doorbell is reliable.
    #[inline]
    pub fn sent(
        &mut self,
        frames: usize,
        alarm: &mut Alarm,
        now_ns: u64,
        quiet_ns: u64,
    ) -> Result<(), PeerFault> {
        if frames > 0 {
            self.sent_ns = now_ns;
        }
        // A waiting peer is armed only after it was rung.
        let quiet = self.reliable
            && self.state == PeerPollState::Polled
            && now_ns.saturating_sub(self.sent_ns) >= quiet_ns;
        if quiet { self.arm(alarm).map(|_| ()) } else { Ok(()) }
    }

    /// Polls the peer from now on, which need not ring.
    pub fn disarm(&mut self, now_ns: u64) {
        self.state.disarm(&mut self.channel);
        self.sent_ns = now_ns;
    }
}

/// Frames and completions that a peer sent.
#[derive(Debug, Default)]
pub struct Pulled {
    /// All frames, including dropped and consumed ones.
    pub frames: usize,
    /// Completions among them.
    pub completed: usize,
    /// Frames to send, with their ports.
    pub packets: Vec<PacketBuffer>,
    /// Frames for the control guest, with their ports.
    pub punted: Vec<PacketBuffer>,
    /// Runs of all frames, except those that are sent out and complete a frame.
    pub runs: Vec<TagRun>,
}

/// Consecutive frames with the same tag, or completions without frames.
#[derive(Clone, Copy, Debug)]
pub struct TagRun {
    /// The tag of these frames.
    pub tag: Tag,
    /// Number of frames.
    pub frames: usize,
    /// Index of the first one in `packets` or `punted`. `None` if the tag
    /// announces no frame, or if the frames were too long for a packet.
    pub at: Option<usize>,
}

impl Pulled {
    /// Adds the next frame of a node whose first port is `first`.
    #[inline]
    pub fn add(&mut self, first: u16, tag: Tag, packet: Option<PacketBuffer>) {
        self.frames += 1;
        self.completed += usize::from(tag.last);
        let packet = packet.map(|packet| packet.at(usize::from(first) + usize::from(tag.vport)));
        match (packet, tag) {
            (Some(packet), Tag { verdict: TagVerdict::Out, last: true, trace: 0, .. }) => {
                self.packets.push(packet);
            }
            (packet, _) => self.note(tag, packet),
        }
    }

    fn note(&mut self, tag: Tag, packet: Option<PacketBuffer>) {
        let punted = matches!(tag.verdict, TagVerdict::Punt(_));
        let to = if punted { &mut self.punted } else { &mut self.packets };
        let at = packet.is_some().then_some(to.len());
        to.extend(packet);
        match self.runs.last_mut() {
            Some(run) if run.tag == tag && run.at.map(|first| first + run.frames) == at => {
                run.frames += 1;
            }
            _ => self.runs.push(TagRun { tag, frames: 1, at }),
        }
    }

    /// Returns how many frames are sent or punted, including those that were too long.
    pub fn sent(&self) -> usize {
        let is_frame =
            |run: &&TagRun| matches!(run.tag.verdict, TagVerdict::Out | TagVerdict::Punt(_));
        let others = self.runs.iter().filter(|run| !is_frame(run)).map(|run| run.frames);
        self.frames - others.sum::<usize>()
    }

    /// Clears it, and returns its packets to the pool.
    pub fn clear(&mut self, packets: &mut Packets) {
        packets.give_all(&mut self.packets);
        packets.give_all(&mut self.punted);
        self.runs.clear();
        (self.frames, self.completed) = (0, 0);
    }
}
