//! Path to another worker's netdev: a ring that the other worker empties.

use std::sync::Arc;

use pdp_afxdp::PacketBuffer;
use rtrb::Producer;

use crate::counters::Reason;
use crate::netdev::{NetdevContext, NetdevDriver};
use crate::packets::PacketBatch;
use crate::wake::Wake;

/// Frames in the ring.
pub const PATH_FRAMES: usize = 1024;

/// Path to another worker's netdev.
#[derive(Debug)]
pub struct RemoteNetdev {
    ring: Producer<PacketBuffer>,
    worker: Arc<Wake>,
    dirty: bool,
}

impl RemoteNetdev {
    /// Returns a path by `ring`. `worker` empties the other end.
    pub fn new(ring: Producer<PacketBuffer>, worker: Arc<Wake>) -> Self {
        Self { ring, worker, dirty: false }
    }
}

impl NetdevDriver for RemoteNetdev {
    fn room(&mut self) -> usize {
        self.ring.slots()
    }

    fn send(&mut self, _: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        let taken = frames.len().min(self.ring.slots());
        if let Ok(chunk) = self.ring.write_chunk_uninit(taken) {
            self.dirty |= chunk.fill_from_iter(frames.drain(..taken)) > 0;
        }
        Reason::ExternalRingFull
    }

    fn flush(&mut self, _: &mut NetdevContext<'_>) {
        if std::mem::take(&mut self.dirty) {
            self.worker.ring();
        }
    }
}
