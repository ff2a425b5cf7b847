//! A memif connection as a [`PeerChannel`]. Frames are copied into the peer's memory, and out of
//! it.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use pdp_afxdp::PacketBuffer;
use pdp_memif::{Receiver, RingFrame, Sender};
use pdp_proto::mux::AttachMode;
use pdp_wire::tag::{Tag, TagVerdict};

use crate::channel::{PeerChannel, PeerConnection, PeerFault, Pulled};
use crate::packets::Packets;
use crate::ringers::RungFor;
use crate::sleep::{Alarm, WAKE_FRAMES, WakeablePeer};

/// A connection after its handshake.
#[derive(Debug)]
pub struct Memif {
    tx: Sender,
    rx: Receiver,
    /// For a peer without tags: its port of the node.
    vport: Option<u8>,
    /// True if frames were pushed but not shown.
    dirty: bool,
}

impl PeerConnection<Memif> {
    /// Creates a connection after its handshake. It is treated
    /// as a program without tags until it is attached.
    pub fn new(tx: Sender, rx: Receiver, epoch: u64) -> Self {
        Self::of(Memif { tx, rx, vport: Some(0), dirty: false }, epoch)
    }
}

impl Memif {
    /// Copies one frame with a tag, or with 0 for none,
    /// as [`PeerChannel::push`]. False if there is no space.
    #[inline]
    pub fn push_one(&mut self, tag: u32, frame: &[u8]) -> Result<bool, PeerFault> {
        self.dirty = true;
        self.tx.push(tag, frame).map_err(in_words)
    }

    /// Takes up to `max` frames without tags, as [`PeerChannel::pull`].
    /// Passes `None` to `to` for a frame longer than a packet.
    #[inline]
    pub fn take(
        &mut self,
        packets: &mut Packets,
        max: usize,
        mut to: impl FnMut(Option<PacketBuffer>),
    ) -> Result<(), PeerFault> {
        self.each(max.min(packets.at_hand()), |frame| {
            to(copy_out(&frame, packets));
            Ok(true)
        })
    }

    /// Takes frames until `to` returns false.
    #[inline]
    fn each(
        &mut self,
        max: usize,
        mut to: impl FnMut(RingFrame<'_>) -> Result<bool, PeerFault>,
    ) -> Result<(), PeerFault> {
        self.rx.poll().map_err(in_words)?;
        let (mut taken, mut result) = (0, Ok(true));
        while taken < max && result == Ok(true) {
            result = match self.rx.take() {
                Ok(Some(frame)) => to(frame),
                Ok(None) => break,
                Err(fault) => Err(in_words(fault)),
            };
            taken += 1;
        }
        self.rx.release();
        result.map(|_| ())
    }
}

impl PeerChannel for Memif {
    fn attach(&mut self, attach: AttachMode, vport: u8) {
        self.vport = (attach == AttachMode::Memif).then_some(vport);
        if attach != AttachMode::Memif {
            self.tx.ring_once_a_sleep();
        }
    }

    fn room(&mut self) -> usize {
        self.tx.room().unwrap_or(0)
    }

    fn push(&mut self, first: u16, frames: &[PacketBuffer]) -> Result<usize, PeerFault> {
        for (at, packet) in frames.iter().enumerate() {
            let tag = match self.vport {
                Some(_) => 0,
                None => Tag::deliver((packet.port - first) as u8, packet.mark as u8).emit(),
            };
            if !self.push_one(tag, packet.bytes())? {
                return Ok(at);
            }
        }
        Ok(frames.len())
    }

    fn pull(
        &mut self,
        ports: Range<u16>,
        max: usize,
        completions: usize,
        packets: &mut Packets,
        pulled: &mut Pulled,
    ) -> Result<(), PeerFault> {
        let untagged =
            self.vport.map(|vport| Tag { verdict: TagVerdict::Out, vport, last: false, trace: 0 });
        self.each(max.min(packets.at_hand()), |frame| {
            let tag = match untagged {
                Some(tag) => tag,
                None => Tag::parse(frame.metadata())
                    .map_err(|bad| format!("frame with a bad tag: {bad:x?}"))?,
            };
            if usize::from(tag.vport) >= ports.len() {
                return Err(format!("vport {} does not exist", tag.vport));
            }
            let has_frame = matches!(tag.verdict, TagVerdict::Out | TagVerdict::Punt(_));
            let packet = if has_frame { copy_out(&frame, packets) } else { None };
            pulled.add(ports.start, tag, packet);
            Ok(pulled.completed < completions)
        })
    }

    fn has_sent(&mut self) -> bool {
        self.rx.poll().unwrap_or(false)
    }

    fn doorbell(&self) -> Option<BorrowedFd<'_>> {
        Some(self.rx.as_fd())
    }
}

impl WakeablePeer for Memif {
    type Fault = PeerFault;

    fn show(&mut self) -> Result<bool, PeerFault> {
        let dirty = std::mem::take(&mut self.dirty);
        if dirty {
            self.tx.publish().map_err(in_words)?;
        }
        Ok(dirty)
    }

    fn is_worth(&self) -> bool {
        self.tx.unnotified() >= WAKE_FRAMES.min(self.tx.slots() / 2)
    }

    fn awaits_room(&mut self) -> bool {
        self.rx.awaits_room()
    }

    fn ring(&mut self, alarm: &mut Alarm) -> Result<(), PeerFault> {
        if let Some(bell) = self.tx.sleeper().map_err(in_words)?
            && bell.request()
        {
            match alarm.owner {
                // Ringing is quick: the guest has too few descriptors
                // to make more waiters than a ring of frames outlasts.
                RungFor::Vnet(_) if bell.is_trusted() => bell.ring().map_err(in_words)?,
                owner => alarm.bells.push((owner, bell.clone())),
            }
        }
        Ok(())
    }

    fn arm(&mut self) -> bool {
        self.rx.arm()
    }

    fn disarm(&mut self) {
        self.rx.disarm();
    }
}

#[cold]
fn in_words(fault: pdp_memif::ProtocolViolation) -> PeerFault {
    fault.to_string()
}

/// Copies a frame into a packet. `None` if it is longer than a packet.
#[inline]
fn copy_out(frame: &RingFrame<'_>, packets: &mut Packets) -> Option<PacketBuffer> {
    let mut packet = packets.take()?;
    let room = packet.room_mut();
    if frame.len() > room.len() {
        packets.give(packet);
        return None;
    }
    let bytes = frame.copy_to(room);
    let _ = packet.set_len(bytes);
    Some(packet)
}
