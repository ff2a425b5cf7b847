//! Whoever is at the other end of a memif connection: forwarding guests and TAP helpers.

use std::collections::VecDeque;

use pdp_afxdp::Packet;
use pdp_memif::{Fault, Receiver, Sender};
use pdp_proto::mux::{Attach, Guest as Spec, GuestStats};
use pdp_wire::tag::{self, TAG_BYTES, Tag, Verdict};

use crate::core::{Core, Dropped};
use crate::distribute::Member;

/// Frames that a guest can have taken and not completed.
pub const OUTSTANDING_MAX: usize = 8192;

/// Frames taken from one ring at a time.
pub const PULL_FRAMES: usize = 256;

/// Time after which a peer that may not ring is looked at, nanoseconds: DPDK's memif has no fence
/// between its ring and its doorbell.
pub const UNSURE_SLEEP_NS: u64 = 5_000_000;

/// One connection.
#[derive(Debug)]
pub struct Link {
    /// Frames to the peer.
    pub tx: Sender,
    /// Frames from it.
    pub rx: Receiver,
    /// The connection's number.
    pub epoch: u64,
    dirty: bool,
}

/// A frame from a peer, or a completion without one.
#[derive(Debug)]
pub struct Pulled {
    /// What the peer says about it.
    pub tag: Tag,
    /// The frame; `None` where the tag says that none follows, or if it was too long for a packet.
    pub packet: Option<Packet>,
}

impl Link {
    /// A connection that the handshake made.
    pub fn new(tx: Sender, rx: Receiver, epoch: u64) -> Self {
        Self { tx, rx, epoch, dirty: false }
    }

    /// Copies a frame into the peer's memory, behind a tag if there is one. False without room.
    pub fn push(&mut self, tag: Option<Tag>, frame: &[u8]) -> Result<bool, Fault> {
        self.dirty = true;
        match tag {
            Some(tag) => self.tx.push(&[&tag.emit(), frame]),
            None => self.tx.push(&[frame]),
        }
    }

    /// Lets the peer see what was pushed.
    pub fn flush(&mut self) -> Result<(), Fault> {
        if std::mem::take(&mut self.dirty) { self.tx.flush() } else { Ok(()) }
    }

    /// Copies up to `max` frames out of the peer's memory. On a trunk (`port` is `None`) each has a
    /// tag, else they leave by `port`. An error is the peer's fault, in words for it; what came
    /// before it was taken.
    pub fn pull(
        &mut self,
        core: &mut Core,
        max: usize,
        port: Option<u16>,
        pulled: &mut Vec<Pulled>,
    ) -> Result<usize, String> {
        let max = max.min(core.packets.free());
        if max == 0 {
            return Ok(0);
        }
        let count = self.rx.peek(max).map_err(|fault| fault.to_string())?;
        let mut result = Ok(count);
        for frame in 0..count {
            match pull_one(&self.rx, frame, core, port) {
                Ok(one) => pulled.push(one),
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            }
        }
        if count > 0 {
            self.rx.release(count);
        }
        result
    }
}

fn pull_one(
    rx: &Receiver,
    frame: usize,
    core: &mut Core,
    port: Option<u16>,
) -> Result<Pulled, String> {
    let length = rx.frame_len(frame);
    let (tag, from) = match port {
        Some(vport) => (Tag { verdict: Verdict::Out, vport, last: false, trace: 0 }, 0),
        None => {
            let mut bytes = [0; TAG_BYTES];
            let got = rx.copy_out(frame, 0, &mut bytes);
            let tag = Tag::parse(&bytes[..got])
                .map_err(|bad| format!("frame with a bad tag {bytes:02x?}: {bad:?}"))?;
            (tag, TAG_BYTES)
        }
    };
    if !matches!(tag.verdict, Verdict::Out | Verdict::Punt(_)) {
        return Ok(Pulled { tag, packet: None });
    }
    let Some(mut packet) = core.packets.take() else { return Ok(Pulled { tag, packet: None }) };
    let room = packet.room_mut();
    if length - from > room.len() {
        core.packets.give(packet);
        return Ok(Pulled { tag, packet: None });
    }
    let got = rx.copy_out(frame, from, room);
    let _ = packet.set_len(got);
    Ok(Pulled { tag, packet: Some(packet) })
}

/// Gives up a connection: `reason` is for the peer.
pub fn release(link: Link, core: &Core, reason: &str, fault: bool) {
    core.unwatch(&link.rx);
    core.drop_connection(Dropped { epoch: link.epoch, reason: reason.to_string(), fault });
}

/// A forwarding guest.
#[derive(Debug)]
pub struct Guest {
    /// As configured.
    pub spec: Spec,
    /// Its connections: one, or by vport for [`Attach::Memif`].
    pub links: Vec<Option<Link>>,
    /// Ports of the frames that it has not completed, oldest first (indices in its node).
    pub outstanding: VecDeque<u8>,
    /// Counters but for `connected`.
    pub stats: GuestStats,
}

const _: () = assert!(tag::VPORTS_MAX == 256, "a vport is one byte in `outstanding`");

impl Guest {
    /// Not connected yet.
    pub fn new(spec: Spec, ports: usize) -> Self {
        let count = if spec.attach == Attach::Memif { ports } else { 1 };
        Self {
            outstanding: VecDeque::with_capacity(match spec.attach {
                Attach::Runtime => OUTSTANDING_MAX,
                Attach::Memif | Attach::Tap => 0,
            }),
            spec,
            links: (0..count).map(|_| None).collect(),
            stats: GuestStats::default(),
        }
    }

    /// Whether frames can be given to it.
    pub fn is_connected(&self) -> bool {
        self.links.iter().any(Option::is_some)
    }

    /// As a member of the distribution, at `index` in the list of guests.
    pub fn member(&self, index: usize) -> Option<Member> {
        let (number, weight) = (self.spec.number, self.spec.weight.max(1));
        self.is_connected().then_some(Member { guest: index, number, weight })
    }
}
