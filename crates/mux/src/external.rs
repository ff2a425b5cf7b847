//! An external interface, as one worker has it: its own AF_XDP sockets, and ways to the sockets
//! of other workers.

use std::sync::Arc;

use pdp_afxdp::{Packet, Socket};
use rtrb::{Consumer, Producer};

use crate::counters::{ExternalCounters, Reason};
use crate::packets::Packets;
use crate::wake::Wake;

/// Frames on their way to another worker's socket.
pub const PATH_FRAMES: usize = 1024;

/// Frames taken from one socket in one round.
pub const RECEIVE_FRAMES: usize = 256;

/// Free packets that sockets leave for frames from guests.
const KEEP_FREE: usize = 1024;

/// An external interface.
#[derive(Debug)]
pub struct External {
    /// Its name in the substrate.
    pub name: String,
    /// Its link address.
    pub mac: [u8; 6],
    /// Largest IP packet on it, bytes.
    pub mtu: u32,
    /// What this worker counted.
    pub counters: ExternalCounters,
    queues: Vec<Queue>,
    paths: Vec<Path>,
}

/// A socket of this worker's.
#[derive(Debug)]
pub struct Queue {
    /// The socket.
    pub socket: Socket,
    /// Frames from other workers.
    pub inboxes: Vec<Consumer<Packet>>,
}

/// The way to a socket of another worker's.
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

impl External {
    /// Without sockets yet.
    pub fn new(name: String, mac: [u8; 6], mtu: u32) -> Self {
        let counters = ExternalCounters::default();
        Self { name, mac, mtu, counters, queues: vec![], paths: vec![] }
    }

    /// Adds a socket.
    pub fn add_queue(&mut self, queue: Queue) {
        self.queues.push(queue);
    }

    /// Adds a way to another worker's socket.
    pub fn add_path(&mut self, path: Path) {
        self.paths.push(path);
    }

    /// Closes all sockets and takes their packets back.
    pub fn close(&mut self, packets: &mut Packets) {
        self.paths.clear();
        for queue in self.queues.drain(..) {
            for mut inbox in queue.inboxes {
                while let Ok(packet) = inbox.pop() {
                    packets.give(packet);
                }
            }
            for packet in queue.socket.close() {
                packets.give(packet);
            }
        }
    }

    /// This worker's sockets.
    pub fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// Takes frames from queue `index` and gives its socket packets for more.
    pub fn receive(&mut self, index: usize, packets: &mut Packets, frames: &mut Vec<Packet>) {
        let Some(queue) = self.queues.get_mut(index) else { return };
        self.counters.received += queue.socket.receive(frames, RECEIVE_FRAMES) as u64;
        queue.socket.fill(packets.free_mut(), KEEP_FREE);
    }

    /// Sends a frame by one of the sockets; frames with the same `spread` take the same one.
    pub fn send(&mut self, spread: usize, packet: Packet) -> Result<(), (Reason, Packet)> {
        let full = |packet| (Reason::ExternalRingFull, packet);
        if !self.queues.is_empty() {
            let index = spread % self.queues.len();
            self.queues[index].socket.send(packet).map_err(full)
        } else if !self.paths.is_empty() {
            let index = spread % self.paths.len();
            let path = &mut self.paths[index];
            path.dirty = true;
            path.ring.push(packet).map_err(|rtrb::PushError::Full(packet)| full(packet))
        } else {
            Err((Reason::ExternalGone, packet))
        }
    }

    /// Has the kernel send what was sent here and by other workers; takes packets back whose
    /// frames are out. Returns how many frames came from other workers.
    pub fn flush(&mut self, packets: &mut Packets, scratch: &mut Vec<Packet>) -> usize {
        let mut taken = 0;
        for queue in &mut self.queues {
            for inbox in &mut queue.inboxes {
                // A full ring of the socket is pressure back on who fills the inbox.
                while queue.socket.room() > 0
                    && let Ok(packet) = inbox.pop()
                {
                    taken += 1;
                    scratch.extend(queue.socket.send(packet).err());
                }
            }
            if queue.socket.sending() > 0 {
                queue.socket.flush();
                self.counters.sent += queue.socket.complete(scratch) as u64;
            }
            for packet in scratch.drain(..) {
                packets.give(packet);
            }
        }
        for path in self.paths.iter_mut().filter(|path| path.dirty) {
            path.dirty = false;
            path.worker.ring();
        }
        taken
    }

    /// Whether frames are on their way out that the kernel has not reported yet.
    pub fn is_sending(&self) -> bool {
        self.queues.iter().any(|queue| queue.socket.sending() > 0)
    }

    /// Frames that the kernel had for our sockets and dropped.
    pub fn kernel_dropped(&self) -> u64 {
        self.queues.iter().map(|queue| queue.socket.kernel_dropped()).sum()
    }
}
