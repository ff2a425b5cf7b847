//! A program's view of the trunk: batches of frames to decide on, and a means to send others.

use pdp_memif::{Buf, MemifClient};
use pdp_wire::tag::{GuestDrop, PuntClass, Tag, TagVerdict, VPORTS_MAX};

use crate::counters::RuntimeCounters;

/// A frame that has been received and not completed.
#[derive(Debug)]
pub(crate) struct TrunkFrame {
    pub(crate) buf: Buf,
    /// Vport that received it.
    pub(crate) vport: u8,
    pub(crate) trace: u8,
    pub(crate) verdict: TagVerdict,
    /// Destination vport, for a frame that is sent or punted.
    pub(crate) to: u8,
}

/// Copy that is sent before the completion of its frame.
#[derive(Debug)]
pub(crate) struct Extra {
    pub(crate) frame: usize,
    pub(crate) buf: Buf,
}

/// Frame that a program keeps with [`Batch::keep`], to send it
/// later by [`Outbox::send`] or free it by [`Outbox::discard`].
#[derive(Debug)]
#[must_use = "a kept frame holds a buffer: send or discard it"]
pub struct KeptFrame {
    buf: Buf,
    vport: u8,
    trace: u8,
}

impl KeptFrame {
    /// Vport that received the frame.
    pub fn vport(&self) -> u16 {
        self.vport.into()
    }

    /// Length of the frame, bytes.
    pub fn len(&self) -> usize {
        self.buf.len()
    }

    /// True if the frame has no bytes.
    pub fn is_empty(&self) -> bool {
        self.buf.is_empty()
    }
}

/// Up to [`Batch::FRAMES_MAX`] frames. The program decides on each by its index; its last decision
/// counts. A frame without a decision is dropped as [`GuestDrop::Policy`].
///
/// Methods that take an index panic if it is not below [`Batch::len`].
#[derive(Debug)]
pub struct Batch<'a> {
    pub(crate) client: &'a mut MemifClient,
    pub(crate) frames: &'a mut [TrunkFrame],
    pub(crate) extras: &'a mut Vec<Extra>,
    /// Free ring slots that no completion of this batch needs.
    pub(crate) spare_slots: usize,
    pub(crate) kept: &'a mut usize,
    pub(crate) kept_max: usize,
    pub(crate) counters: &'a mut RuntimeCounters,
}

impl Batch<'_> {
    /// Most frames in a batch.
    pub const FRAMES_MAX: usize = 64;

    /// Number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// True if there are no frames. A program never gets such a batch.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Vport that received the frame.
    #[inline]
    pub fn vport(&self, frame: usize) -> u16 {
        self.frames[frame].vport.into()
    }

    /// Contents of the frame, from its destination address on.
    #[inline]
    pub fn frame(&self, frame: usize) -> &[u8] {
        self.client.bytes(&self.frames[frame].buf)
    }

    /// Contents of the frame, to change in place.
    #[inline]
    pub fn frame_mut(&mut self, frame: usize) -> &mut [u8] {
        self.client.bytes_mut(&mut self.frames[frame].buf)
    }

    /// Sets the frame's length to `bytes`: cuts its end, or adds undefined bytes there. False (and
    /// no change) if its buffer is too small.
    pub fn set_len(&mut self, frame: usize, bytes: usize) -> bool {
        self.frames[frame].buf.set_len(bytes)
    }

    /// Removes `bytes` from the frame's front. False (and no change) if it has fewer.
    pub fn trim_front(&mut self, frame: usize, bytes: usize) -> bool {
        self.frames[frame].buf.trim_front(bytes)
    }

    /// Adds `bytes` undefined bytes before the frame. False (and no
    /// change) without enough headroom. There is headroom for at least
    /// 64 bytes, and for those that [`Batch::trim_front`] removed.
    pub fn grow_front(&mut self, frame: usize, bytes: usize) -> bool {
        self.frames[frame].buf.grow_front(bytes)
    }

    /// Sends the frame out of a vport. Drops it as
    /// [`GuestDrop::PortDown`] if the number is too high for any vport.
    #[inline]
    pub fn forward(&mut self, frame: usize, vport: u16) {
        if usize::from(vport) >= VPORTS_MAX {
            return self.drop(frame, GuestDrop::PortDown);
        }
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (TagVerdict::Out, vport as u8);
    }

    /// Punts the frame to the control guest, on the interface of the vport that received it.
    #[inline]
    pub fn punt(&mut self, frame: usize, class: PuntClass) {
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (TagVerdict::Punt(class), frame.vport);
    }

    /// Drops the frame. The vport that received it counts it under this reason.
    #[inline]
    pub fn drop(&mut self, frame: usize, reason: GuestDrop) {
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (TagVerdict::Drop(reason), frame.vport);
    }

    /// Sends a copy of the frame as it is now out of a vport, regardless of the decision on the
    /// frame itself. False if there is no room for it; this is counted.
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
        // Fails for a frame that grew into its headroom beyond the size of a free buffer.
        if !buf.set_len(original.buf.len()) {
            self.client.free(buf);
            return None;
        }
        copy(self.client, &original.buf, &mut buf);
        write_tag(&mut buf, TagVerdict::Out, vport as u8, false, original.trace);
        self.extras.push(Extra { frame, buf });
        Some(())
    }

    /// Keeps the frame, which counts as a decision. `None` if the program keeps too many already,
    /// or there is no buffer for the completion; then decide otherwise.
    pub fn keep(&mut self, frame: usize) -> Option<KeptFrame> {
        if *self.kept >= self.kept_max {
            return None;
        }
        let stand_in = self.client.alloc()?;
        let frame = &mut self.frames[frame];
        (frame.verdict, frame.to) = (TagVerdict::Kept, frame.vport);
        *self.kept += 1;
        let buf = std::mem::replace(&mut frame.buf, stand_in);
        Some(KeptFrame { buf, vport: frame.vport, trace: frame.trace })
    }
}

/// Sends frames without a received counterpart: kept frames, and the program's own.
#[derive(Debug)]
pub struct Outbox<'a> {
    pub(crate) client: &'a mut MemifClient,
    pub(crate) kept: &'a mut usize,
    pub(crate) counters: &'a mut RuntimeCounters,
}

impl Outbox<'_> {
    /// Contents of a kept frame.
    pub fn frame(&self, kept: &KeptFrame) -> &[u8] {
        self.client.bytes(&kept.buf)
    }

    /// Contents of a kept frame, to change in place.
    pub fn frame_mut(&mut self, kept: &mut KeptFrame) -> &mut [u8] {
        self.client.bytes_mut(&mut kept.buf)
    }

    /// Sends a kept frame out of a vport. Returns it if there is
    /// no room now, or the number is too high for any vport.
    pub fn send(&mut self, kept: KeptFrame, vport: u16) -> Result<(), KeptFrame> {
        if usize::from(vport) >= VPORTS_MAX {
            return Err(kept);
        }
        let KeptFrame { mut buf, vport: came_by, trace } = kept;
        write_tag(&mut buf, TagVerdict::Out, vport as u8, false, trace);
        match self.client.send(buf) {
            Ok(()) => {
                *self.kept -= 1;
                Ok(())
            }
            Err(buf) => Err(KeptFrame { buf, vport: came_by, trace }),
        }
    }

    /// Frees a kept frame.
    pub fn discard(&mut self, kept: KeptFrame) {
        self.client.free(kept.buf);
        *self.kept -= 1;
    }

    /// Sends a frame of the program's own out of a vport. False if
    /// there is no room now, or if it is longer than a buffer.
    pub fn make(&mut self, vport: u16, frame: &[u8]) -> bool {
        if usize::from(vport) >= VPORTS_MAX {
            return false;
        }
        let Some(mut buf) = self.client.alloc() else { return false };
        if buf.set_len(frame.len()) {
            self.client.bytes_mut(&mut buf).copy_from_slice(frame);
            write_tag(&mut buf, TagVerdict::Out, vport as u8, false, 0);
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

/// Copies the contents of one buffer into another of the same length.
fn copy(client: &mut MemifClient, from: &Buf, to: &mut Buf) {
    // A client can't lend two buffers at once. So this
    // copies through the stack, one piece at a time.
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

/// Sets a frame's tag.
#[inline]
pub(crate) fn write_tag(buf: &mut Buf, verdict: TagVerdict, vport: u8, last: bool, trace: u8) {
    buf.set_metadata(Tag { verdict, vport, last, trace }.emit());
}
