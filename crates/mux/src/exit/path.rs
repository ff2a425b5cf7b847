//! The exit of another worker, which takes frames from a ring and sends them.

use std::sync::Arc;

use pdp_afxdp::Packet;
use rtrb::Producer;

use crate::counters::Reason;
use crate::exit::{Exit, Tools};
use crate::packets::Batch;
use crate::wake::Wake;

/// Frames on their way there.
pub const PATH_FRAMES: usize = 1024;

/// The way to it.
#[derive(Debug)]
pub struct Path {
    ring: Producer<Packet>,
    worker: Arc<Wake>,
    dirty: bool,
}

impl Path {
    /// By `ring`, whose other end `worker` empties.
    pub fn new(ring: Producer<Packet>, worker: Arc<Wake>) -> Self {
        Self { ring, worker, dirty: false }
    }
}

impl Exit for Path {
    fn room(&mut self) -> usize {
        self.ring.slots()
    }

    fn send(&mut self, _: &mut Tools<'_>, frames: &mut Batch) -> Reason {
        let taken = frames.len().min(self.ring.slots());
        if let Ok(chunk) = self.ring.write_chunk_uninit(taken) {
            self.dirty |= chunk.fill_from_iter(frames.drain(..taken)) > 0;
        }
        Reason::ExternalRingFull
    }

    fn flush(&mut self, _: &mut Tools<'_>) {
        if std::mem::take(&mut self.dirty) {
            self.worker.ring();
        }
    }
}
