//! What a program sees of the trunk: batches of frames to decide on, and a way to send others.

use pdp_memif::{Buf, Client};
use pdp_wire::tag::{GuestDrop, PuntClass, Tag, VPORTS_MAX, Verdict};

use crate::runtime::Counters;

/// A frame that has been received and not completed.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) buf: Buf,
    /// Arrived by it.
    pub(crate) vport: u8,
    pub(crate) trace: u8,
    pub(crate) verdict: Verdict,
    /// Where a frame that is sent goes.
    pub(crate) to: u8,
}

/// A copy that goes before the completion of the frame that it is of.
#[derive(Debug)]
pub(crate) struct Extra {
    pub(crate) frame: usize,
    pub(crate) buf: Buf,
}

/// A frame that a program holds back, with [`Batch::keep`], to send it later by
/// [`Outbox::send`] or give it up by [`Outbox::discard`].
#[derive(Debug)]
#[must_use = "a kept frame holds a buffer: send or discard it"]
pub struct Kept {
    buf: Buf,
    vport: u8,
    trace: u8,
}

impl Kept {
    /// The vport that the frame came in by.
    pub fn vport(&self) -> u16 {
        self.vport.into()
    }

    /// Bytes of the frame.
    pub fn len(&self) -> usize {
        self.buf.len()
    }

    /// Whether the frame has no bytes.
    pub fn is_empty(&self) -> bool {
        self.buf.is_empty()
    }
}

/// Up to [`Batch::FRAMES_MAX`] frames, to decide on each by its index. What is decided last
/// counts; a frame without a decision is dropped as [`GuestDrop::Policy`].
///
/// Methods that take an index panic if it is not below [`Batch::len`].
#[derive(Debug)]
pub struct Batch<'a> {
    pub(crate) client: &'a mut Client,
    pub(crate) frames: &'a mut [Frame],
    pub(crate) extras: &'a mut Vec<Extra>,
    /// Slots of the ring that no completion of this batch needs.
    pub(crate) spare_slots: usize,
    pub(crate) kept: &'a mut usize,
    pub(crate) kept_max: usize,
    pub(crate) counters: &'a mut Counters,
}

impl Batch<'_> {
    /// Frames of a batch.
    pub const FRAMES_MAX: usize = 64;

    /// Count of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there are no frames. A program is never given such a batch.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The vport that the frame came in by.
    #[inline]
    pub fn vport(&self, frame: usize) -> u16 {
        self.frames[frame].vport.into()
    }

    /// The frame, from its destination address on.
    #[inline]
    pub fn frame(&self, frame: usize) -> &[u8] {
        self.client.bytes(&self.frames[frame].buf)
    }

    /// The frame, to change in place.
    #[inline]
    pub fn frame_mut(&mut self, frame: usize) -> &mut [u8] {
        self.client.bytes_mut(&mut self.frames[frame].buf)
    }

    /// Makes the frame `bytes` long, cut or with undefined bytes at its end; false (and nothing
    /// done) if its buffer has no room.
    pub fn set_len(&mut self, frame: usize, bytes: usize) -> bool {
        self.frames[frame].buf.set_len(bytes)
    }

    /// Takes `bytes` off the frame's front; false (and nothing done) if it has fewer.
    pub fn trim_front(&mut self, frame: usize, bytes: usize) -> bool {
        self.frames[frame].buf.trim_front(bytes)
    }

    /// Puts `bytes` undefined bytes before the frame; false (and nothing done) if there is no
    /// room. There is for 64 at least, and for what [`Batch::trim_front`] took off.
    pub fn grow_front(&mut self, frame: usize, bytes: usize) -> bool {
        self.frames[frame].buf.grow_front(bytes)
    }

    /// Sends the frame out of a vport (drops it as [`GuestDrop::PortDown`] if there can't be one
    /// of this number).
    #[inline]
    pub fn forward(&mut self, frame: usize, vport: u16) {
        if usize::from(vport) >= VPORTS_MAX {
            return self.drop(frame, GuestDrop::PortDown);
        }
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (Verdict::Out, vport as u8);
    }

    /// Hands the frame to the control guest, on the interface of the vport that it came in by.
    #[inline]
    pub fn punt(&mut self, frame: usize, class: PuntClass) {
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (Verdict::Punt(class), frame.vport);
    }

    /// Drops the frame, counted under this reason on the vport that it came in by.
    #[inline]
    pub fn drop(&mut self, frame: usize, reason: GuestDrop) {
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (Verdict::Drop(reason), frame.vport);
    }

    /// Sends a copy of the frame as it is now out of a vport, whatever is decided on the frame
    /// itself. False if there is no room for it; that is counted.
    pub fn copy_to(&mut self, frame: usize, vport: u16) -> bool {
        let made = self.try_copy_to(frame, vport).is_some();
        *if made { &mut self.counters.copies } else { &mut self.counters.copies_refused } += 1;
        made
    }

    fn try_copy_to(&mut self, frame: usize, vport: u16) -> Option<()> {
        let original = &self.frames[frame];
        self.spare_slots = self.spare_slots.checked_sub(1)?;
        if usize::from(vport) >= VPORTS_MAX {
            return None;
        }
        let mut buf = self.client.alloc()?;
        // Fails for a frame that was grown into its headroom beyond what a free buffer takes.
        if !buf.set_len(original.buf.len()) {
            self.client.free(buf);
            return None;
        }
        copy(self.client, &original.buf, &mut buf);
        write_tag(&mut buf, Verdict::Out, vport as u8, false, original.trace);
        self.extras.push(Extra { frame, buf });
        Some(())
    }

    /// Holds the frame back; it counts as decided. `None` if the program holds too many already,
    /// or there is no buffer for the completion: decide otherwise then.
    pub fn keep(&mut self, frame: usize) -> Option<Kept> {
        if *self.kept >= self.kept_max {
            return None;
        }
        let stand_in = self.client.alloc()?;
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (Verdict::Kept, frame.vport);
        *self.kept += 1;
        let buf = std::mem::replace(&mut frame.buf, stand_in);
        Some(Kept { buf, vport: frame.vport, trace: frame.trace })
    }
}

/// Sends what no received frame is answered by: kept frames, and frames of the program's own.
#[derive(Debug)]
pub struct Outbox<'a> {
    pub(crate) client: &'a mut Client,
    pub(crate) kept: &'a mut usize,
    pub(crate) counters: &'a mut Counters,
}

impl Outbox<'_> {
    /// The bytes of a kept frame.
    pub fn frame(&self, kept: &Kept) -> &[u8] {
        self.client.bytes(&kept.buf)
    }

    /// The bytes of a kept frame, to change in place.
    pub fn frame_mut(&mut self, kept: &mut Kept) -> &mut [u8] {
        self.client.bytes_mut(&mut kept.buf)
    }

    /// Sends a kept frame out of a vport. Gives it back if there is no room now, or can't be a
    /// vport of this number.
    pub fn send(&mut self, kept: Kept, vport: u16) -> Result<(), Kept> {
        if usize::from(vport) >= VPORTS_MAX {
            return Err(kept);
        }
        let Kept { mut buf, vport: came_by, trace } = kept;
        write_tag(&mut buf, Verdict::Out, vport as u8, false, trace);
        match self.client.send(buf) {
            Ok(()) => {
                *self.kept -= 1;
                Ok(())
            }
            Err(buf) => Err(Kept { buf, vport: came_by, trace }),
        }
    }

    /// Gives a kept frame up.
    pub fn discard(&mut self, kept: Kept) {
        self.client.free(kept.buf);
        *self.kept -= 1;
    }

    /// Sends a frame of the program's own out of a vport; false if there is no room now, or if
    /// it is longer than a buffer.
    pub fn make(&mut self, vport: u16, frame: &[u8]) -> bool {
        if usize::from(vport) >= VPORTS_MAX {
            return false;
        }
        let Some(mut buf) = self.client.alloc() else { return false };
        if buf.set_len(frame.len()) {
            self.client.bytes_mut(&mut buf).copy_from_slice(frame);
            write_tag(&mut buf, Verdict::Out, vport as u8, false, 0);
            match self.client.send(buf) {
                Ok(()) => {
                    self.counters.made += 1;
                    return true;
                }
                Err(back) => buf = back,
            }
        }
        self.client.free(buf);
        false
    }
}

/// Copies all bytes of one buffer into another of the same length.
fn copy(client: &mut Client, from: &Buf, to: &mut Buf) {
    // One client can't lend two buffers at once: through the stack, a piece at a time.
    let mut piece = [0; 256];
    let mut at = 0;
    while at < from.len() {
        let end = (at + piece.len()).min(from.len());
        let piece = &mut piece[..end - at];
        piece.copy_from_slice(&client.bytes(from)[at..end]);
        client.bytes_mut(to)[at..end].copy_from_slice(piece);
        at = end;
    }
}

/// Says what is to be done with a frame.
#[inline]
pub(crate) fn write_tag(buf: &mut Buf, verdict: Verdict, vport: u8, last: bool, trace: u8) {
    buf.set_metadata(Tag { verdict, vport, last, trace }.emit());
}
