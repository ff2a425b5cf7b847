//! An external interface, as one worker has it: its own outlets, and ways to the outlets of other
//! workers.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use pdp_afxdp::{Packet, PacketSocket, Socket, Unread};
use pdp_proto::mux;
use pdp_wire::offload;
use rtrb::{Consumer, Producer};

use crate::core::Connections;
use crate::counters::{ExternalCounters, OuterReason, Reason};
use crate::generator::Generator;
use crate::packets::Packets;
use crate::peer::{Link, PULL_FRAMES};
use crate::sleep::Alarm;
use crate::wake::Wake;

/// Frames on their way to another worker's outlet.
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
    /// No hardware completes what senders left to their device.
    pub is_virtual: bool,
    /// What this worker counted.
    pub counters: ExternalCounters,
    queues: Vec<Queue>,
    paths: Vec<Path>,
}

/// What is behind an external interface, for its owner.
#[derive(Debug)]
pub enum Outlet {
    /// An AF_XDP socket.
    Xdp(Box<Socket>),
    /// A packet socket.
    Packet(Box<PacketSocket>),
    /// A memif connection, while there is one.
    Memif(Option<Box<Link>>),
    /// A generator.
    Generator(Box<Generator>),
}

/// An outlet of this worker's.
#[derive(Debug)]
pub struct Queue {
    /// The outlet.
    pub outlet: Outlet,
    /// Frames from other workers.
    pub inboxes: Vec<Consumer<Packet>>,
}

/// The way to an outlet of another worker's.
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
    /// Without outlets yet.
    pub fn new(name: String, mac: [u8; 6], mtu: u32) -> Self {
        let counters = ExternalCounters::default();
        let (queues, paths) = (vec![], vec![]);
        Self { name, mac, mtu, is_virtual: false, counters, queues, paths }
    }

    /// Adds an outlet.
    pub fn add_queue(&mut self, queue: Queue) {
        self.queues.push(queue);
    }

    /// Adds a way to another worker's outlet.
    pub fn add_path(&mut self, path: Path) {
        self.paths.push(path);
    }

    /// Sends no more frames to other workers' outlets.
    pub fn close_paths(&mut self) {
        self.paths.clear();
    }

    /// Closes all outlets and takes their packets back. The other workers have closed their paths to
    /// them before: what is put into an inbox that nobody empties any more is lost to the pool. Returns
    /// the generator, if this was one: it may go on elsewhere, and is large.
    pub fn close(
        &mut self,
        packets: &mut Packets,
        connections: &Connections,
    ) -> Option<Box<Generator>> {
        self.close_paths();
        let mut closed = None;
        for queue in self.queues.drain(..) {
            for mut inbox in queue.inboxes {
                while let Ok(packet) = inbox.pop() {
                    packets.give(packet);
                }
            }
            match queue.outlet {
                Outlet::Xdp(socket) => {
                    (*socket).close().into_iter().for_each(|packet| packets.give(packet));
                }
                Outlet::Packet(socket) => {
                    (*socket).close().into_iter().for_each(|packet| packets.give(packet));
                }
                Outlet::Memif(link) => {
                    if let Some(link) = link {
                        connections.end(*link, "the external interface was removed", false);
                    }
                }
                Outlet::Generator(generator) => closed = Some(generator),
            }
        }
        closed
    }

    /// This worker's outlets.
    pub fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// Sockets of this worker's, for sleeping.
    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter().filter_map(|queue| match &queue.outlet {
            Outlet::Xdp(socket) => Some(socket.as_fd()),
            Outlet::Packet(socket) => Some(socket.as_fd()),
            Outlet::Memif(_) | Outlet::Generator(_) => None,
        })
    }

    /// Connections of programs, for sleeping.
    pub fn links(&mut self) -> impl Iterator<Item = &mut Link> {
        self.queues.iter_mut().filter_map(|queue| match &mut queue.outlet {
            Outlet::Memif(link) => link.as_deref_mut(),
            Outlet::Xdp(_) | Outlet::Packet(_) | Outlet::Generator(_) => None,
        })
    }

    /// Lets programs ring; false if one has sent something.
    pub fn arm(&mut self, connections: &Connections, alarm: &mut Alarm) -> bool {
        let mut quiet = true;
        for queue in &mut self.queues {
            let Outlet::Memif(place) = &mut queue.outlet else { continue };
            match place.as_mut().map(|link| link.arm(alarm)) {
                Some(Err(fault)) => lose(place, connections, &fault),
                Some(Ok(armed)) => quiet &= armed,
                None => {}
            }
        }
        quiet
    }

    /// Takes in the connection of a program, whose doorbell is watched already; false if none is
    /// expected, or one is there.
    pub fn attach(&mut self, link: Link) -> bool {
        for queue in &mut self.queues {
            if let Outlet::Memif(place @ None) = &mut queue.outlet {
                *place = Some(Box::new(link));
                return true;
            }
        }
        false
    }

    /// Lets go of the connection with this number.
    pub fn detach(&mut self, epoch: u64, connections: &Connections) {
        for queue in &mut self.queues {
            if let Outlet::Memif(place) = &mut queue.outlet
                && let Some(link) = place.take_if(|link| link.epoch == epoch)
            {
                connections.end(*link, "gone", false);
            }
        }
    }

    /// Whether a program is connected whose doorbell can't be relied on.
    pub fn has_unsure_peer(&self) -> bool {
        self.queues.iter().any(|queue| matches!(queue.outlet, Outlet::Memif(Some(_))))
    }

    /// The generator, if this is one and it is here.
    pub fn generator(&mut self) -> Option<&mut Generator> {
        self.queues.iter_mut().find_map(|queue| match &mut queue.outlet {
            Outlet::Generator(generator) => Some(&mut **generator),
            Outlet::Xdp(_) | Outlet::Packet(_) | Outlet::Memif(_) => None,
        })
    }

    /// Takes frames from outlet `index`. `room` is how many there is room for, where all frames
    /// have one way: what has no room stays with the program that sent it. Returns when to come
    /// again at the latest.
    pub fn receive(
        &mut self,
        index: usize,
        now_ns: u64,
        room: usize,
        packets: &mut Packets,
        connections: &Connections,
        frames: &mut Vec<Packet>,
    ) -> Option<u64> {
        let queue = self.queues.get_mut(index)?;
        let (mut due_ns, mut unread) = (None, Unread::default());
        match &mut queue.outlet {
            Outlet::Xdp(socket) => {
                let before = frames.len();
                socket.receive(frames, RECEIVE_FRAMES);
                // AF_XDP does not say which checksums are to be completed, packet sockets do.
                for packet in frames[before..].iter_mut().filter(|_| self.is_virtual) {
                    offload::complete(packet.bytes_mut());
                }
            }
            Outlet::Packet(socket) => {
                let (free, keep) = packets.free_mut(KEEP_FREE);
                unread = socket.receive(free, keep, RECEIVE_FRAMES, frames);
            }
            Outlet::Memif(place) => {
                let room = room.min(PULL_FRAMES).min(packets.free().saturating_sub(KEEP_FREE));
                let pulled = place.as_mut().map(|link| {
                    link.pull(packets, room, |packet| match packet {
                        Some(packet) => frames.push(packet),
                        None => unread.too_long += 1,
                    })
                });
                if let Some(Err(fault)) = pulled {
                    lose(place, connections, &fault);
                }
            }
            Outlet::Generator(generator) => {
                let room = room.min(packets.free().saturating_sub(KEEP_FREE));
                due_ns = generator.make(now_ns, room, packets, frames);
            }
        }
        let Unread { too_long, not_cut } = unread;
        self.counters.received += (frames.len() + too_long + not_cut) as u64;
        self.counters.drop_all(OuterReason::TooLong, too_long as u64);
        self.counters.drop_all(OuterReason::NotCut, not_cut as u64);
        due_ns
    }

    /// Gives sockets packets to receive into, and takes those back whose frames are out.
    pub fn refill(&mut self, packets: &mut Packets, scratch: &mut Vec<Packet>) {
        for queue in &mut self.queues {
            if let Outlet::Xdp(socket) = &mut queue.outlet {
                let (free, keep) = packets.free_mut(KEEP_FREE);
                socket.fill(free, keep);
            }
        }
        for queue in &mut self.queues {
            if let Outlet::Xdp(socket) = &mut queue.outlet {
                self.counters.sent += socket.complete(scratch) as u64;
                packets.give_sent(scratch);
            }
        }
    }

    /// Sends frames by one of the outlets; those with the same `spread` take the same one. What does not fit is
    /// put into `refused`, and the reason returned.
    #[inline]
    pub fn send(
        &mut self,
        spread: usize,
        packets: &mut Packets,
        connections: &Connections,
        frames: impl Iterator<Item = Packet>,
        refused: &mut Vec<Packet>,
    ) -> Reason {
        if !self.queues.is_empty() {
            let index = spread % self.queues.len();
            let outlet = &mut self.queues[index].outlet;
            let (sent, why) = outlet.send(packets, connections, frames, refused);
            // What a socket sends is counted when the kernel has taken it.
            self.counters.sent += sent;
            why
        } else if !self.paths.is_empty() {
            let index = spread % self.paths.len();
            let path = &mut self.paths[index];
            path.dirty = true;
            for packet in frames {
                if let Err(rtrb::PushError::Full(packet)) = path.ring.push(packet) {
                    refused.push(packet);
                }
            }
            Reason::ExternalRingFull
        } else {
            refused.extend(frames);
            Reason::ExternalGone
        }
    }

    /// Has the kernel send what was sent here and by other workers. Programs that sleep are rung by `alarm`.
    /// Returns how many frames came from other workers.
    pub fn flush(
        &mut self,
        packets: &mut Packets,
        connections: &Connections,
        scratch: &mut Vec<Packet>,
        alarm: &mut Alarm,
    ) -> usize {
        let mut taken = 0;
        for queue in &mut self.queues {
            for inbox in &mut queue.inboxes {
                // A full outlet is pressure back on who fills the inbox.
                while queue.outlet.has_room()
                    && let Ok(packet) = inbox.pop()
                {
                    taken += 1;
                    let one = std::iter::once(packet);
                    let (sent, _) = queue.outlet.send(packets, connections, one, scratch);
                    self.counters.sent += sent;
                    self.counters.drop_all(OuterReason::Gone, scratch.len() as u64);
                    packets.give_all(scratch);
                }
            }
            let counters = &mut self.counters;
            queue.outlet.flush(packets, connections, scratch, alarm, counters);
        }
        for path in self.paths.iter_mut().filter(|path| path.dirty) {
            path.dirty = false;
            path.worker.ring();
        }
        taken
    }

    /// Whether frames are on their way out that the kernel has not reported yet.
    pub fn is_sending(&self) -> bool {
        self.queues.iter().any(|queue| match &queue.outlet {
            Outlet::Xdp(socket) => socket.sending() > 0,
            Outlet::Packet(socket) => socket.sending() > 0,
            Outlet::Memif(_) | Outlet::Generator(_) => false,
        })
    }

    /// What this worker counted, and what only the outlets know.
    pub fn stats(&self) -> mux::ExternalStats {
        let mut stats = self.counters.stats();
        for queue in &self.queues {
            match &queue.outlet {
                Outlet::Xdp(socket) => stats.kernel_dropped += socket.kernel_dropped(),
                Outlet::Packet(socket) => stats.kernel_dropped += socket.kernel_dropped(),
                Outlet::Generator(generator) => (stats.numbered, stats.late) = generator.counted(),
                Outlet::Memif(_) => {}
            }
        }
        stats
    }
}

impl Outlet {
    /// Sends frames, and returns how many are sent for good, and why others are in `refused`.
    #[inline]
    fn send(
        &mut self,
        packets: &mut Packets,
        connections: &Connections,
        frames: impl Iterator<Item = Packet>,
        refused: &mut Vec<Packet>,
    ) -> (u64, Reason) {
        let mut sent = 0;
        match self {
            Self::Xdp(socket) => refused.extend(frames.filter_map(|it| socket.send(it).err())),
            Self::Packet(socket) => refused.extend(frames.filter_map(|it| socket.send(it).err())),
            Self::Memif(place) => {
                for packet in frames {
                    match place.as_mut().map(|link| link.push(0, packet.bytes())) {
                        Some(Ok(true)) => {
                            sent += 1;
                            packets.give(packet);
                            continue;
                        }
                        Some(Err(fault)) => lose(place, connections, &fault),
                        Some(Ok(false)) | None => {}
                    }
                    refused.push(packet);
                }
                if place.is_none() {
                    return (sent, Reason::ExternalGone);
                }
            }
            Self::Generator(generator) => {
                for mut packet in frames {
                    sent += 1;
                    generator.absorb(packet.bytes_mut());
                    packets.give(packet);
                }
            }
        }
        (sent, Reason::ExternalRingFull)
    }

    fn has_room(&mut self) -> bool {
        match self {
            Self::Xdp(socket) => socket.room() > 0,
            Self::Packet(socket) => socket.room() > 0,
            Self::Memif(Some(link)) => link.tx.room().is_ok_and(|room| room > 0),
            Self::Memif(None) | Self::Generator(_) => true,
        }
    }

    /// Lets the other side see what was sent, and counts what it took for good.
    fn flush(
        &mut self,
        packets: &mut Packets,
        connections: &Connections,
        scratch: &mut Vec<Packet>,
        alarm: &mut Alarm,
        counters: &mut ExternalCounters,
    ) {
        match self {
            Self::Xdp(socket) if socket.sending() > 0 => {
                socket.flush();
            }
            Self::Packet(socket) if socket.sending() > 0 => {
                let sent = socket.flush(scratch);
                packets.give_all(scratch);
                counters.sent += sent.taken as u64;
                counters.drop_all(OuterReason::Refused, sent.refused as u64);
            }
            Self::Memif(place) => {
                let flushed = place.as_mut().map(|link| link.flush(alarm, true));
                if let Some(Err(fault)) = flushed {
                    lose(place, connections, &fault);
                }
            }
            Self::Xdp(_) | Self::Packet(_) | Self::Generator(_) => {}
        }
    }
}

/// Ends the connection of a program that broke the rules.
fn lose(place: &mut Option<Box<Link>>, connections: &Connections, fault: &pdp_memif::Fault) {
    if let Some(link) = place.take() {
        connections.end(*link, &fault.to_string(), true);
    }
}
