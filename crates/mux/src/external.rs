//! An external interface at one worker: its netdevs, or else paths to other workers' netdevs.

use std::any::Any;
use std::sync::Arc;

use pdp_afxdp::PacketBuffer;
use pdp_model::ExternalStats;
use rtrb::Consumer;

use crate::counters::{ExternalCounters, OuterReason, Reason};
use crate::netdev::path::RemoteNetdev;
use crate::netdev::{NetdevContext, NetdevDriver};
use crate::packets::{PacketBatch, Packets};
use crate::scheduler::Scheduler;
use crate::traffic_class::TrafficClass;

/// An external interface at one worker.
#[derive(Debug)]
pub struct WorkerExternal {
    /// Name in the substrate.
    pub name: String,
    /// MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet on it, bytes.
    pub mtu: u32,
    /// Counters of this worker.
    pub counters: ExternalCounters,
    /// Netdevs that send and receive its frames.
    pub netdevs: WorkerNetdevs,
}

/// Netdevs of this worker, or else paths to those of others.
#[derive(Debug, Default)]
pub struct WorkerNetdevs {
    all: Vec<Box<dyn NetdevDriver>>,
    inboxes: Vec<Inbox>,
    /// Number of paths to another worker's netdevs in `all`.
    paths: usize,
    /// Scheduler, if the interface has or had a capacity. It is at the worker that has the netdevs.
    pub scheduler: Option<Box<Scheduler>>,
}

/// Frames from another worker.
#[derive(Debug)]
struct Inbox {
    /// Index of the netdev that sends them.
    netdev: usize,
    from: Consumer<PacketBuffer>,
    /// Frames that the netdev had no space for.
    left: PacketBatch,
}

impl WorkerExternal {
    /// Creates the interface without netdevs.
    pub fn new(name: String, mac: [u8; 6], mtu: u32) -> Self {
        Self {
            name,
            mac,
            mtu,
            counters: ExternalCounters::default(),
            netdevs: WorkerNetdevs::default(),
        }
    }

    /// Returns the counters of this worker, and those that only the netdevs have.
    pub fn stats(&self) -> ExternalStats {
        let mut stats = self.counters.stats();
        self.netdevs.all.iter().for_each(|netdev| netdev.count(&mut stats));
        stats
    }
}

impl WorkerNetdevs {
    /// Adds a netdev of this worker, and the rings by which other workers send to it.
    pub fn add(&mut self, netdev: Box<dyn NetdevDriver>, inboxes: Vec<Consumer<PacketBuffer>>) {
        // A worker with a netdev needs no paths to others.
        self.close_paths();
        let at = self.all.len();
        let inboxes = inboxes.into_iter().map(|from| Inbox { netdev: at, from, left: vec![] });
        self.inboxes.extend(inboxes);
        self.all.push(netdev);
    }

    /// Adds a path to another worker's netdev.
    pub fn add_path(&mut self, path: RemoteNetdev) {
        if self.paths == self.all.len() {
            self.paths += 1;
            self.all.push(Box::new(path));
        }
    }

    /// Removes the paths to other workers' netdevs.
    pub fn close_paths(&mut self) {
        if std::mem::take(&mut self.paths) > 0 {
            self.all.clear();
        }
    }

    /// Removes the netdevs for the caller to close, and frees the frames that other
    /// workers queued for them. The other workers must have closed their paths
    /// before. A packet that is pushed into an abandoned inbox is lost to the pool.
    pub fn detach_all(&mut self, packets: &mut Packets) -> Vec<Box<dyn NetdevDriver>> {
        self.close_paths();
        for Inbox { mut from, mut left, .. } in self.inboxes.drain(..) {
            packets.give_all(&mut left);
            while let Ok(packet) = from.pop() {
                packets.give(packet);
            }
        }
        std::mem::take(&mut self.all)
    }

    /// Returns all netdevs.
    pub fn all(&self) -> &[Box<dyn NetdevDriver>] {
        &self.all
    }

    /// Returns all netdevs.
    pub fn all_mut(&mut self) -> &mut [Box<dyn NetdevDriver>] {
        &mut self.all
    }

    /// Returns the netdev of this kind, if there is one.
    pub fn find<E: NetdevDriver>(&mut self) -> Option<&mut E> {
        let netdevs = self.all.iter_mut().map(|netdev| &mut **netdev as &mut dyn Any);
        netdevs.filter_map(|netdev| netdev.downcast_mut()).next()
    }

    /// Gives the netdevs packets to receive into, and takes back the packets of transmitted frames.
    pub fn refill(&mut self, tools: &mut NetdevContext<'_>) {
        self.all.iter_mut().for_each(|netdev| netdev.fill(tools.packets));
        self.all.iter_mut().for_each(|netdev| netdev.complete(tools));
    }

    /// Returns the index of the netdev for frames with this number.
    #[inline]
    pub fn at(&self, spread: usize) -> usize {
        // A division would take longer than all other work on a burst of a few frames.
        if self.all.len() > 1 { spread % self.all.len() } else { 0 }
    }

    /// Returns how many frames netdev `at` takes now.
    pub fn room(&mut self, at: usize) -> usize {
        match self.all.get_mut(at) {
            Some(netdev) if self.scheduler.is_none() => netdev.room(),
            _ => usize::MAX,
        }
    }

    /// Sends frames of one port by netdev `at`, or queues them at the scheduler.
    /// Frames that are not taken stay in `frames`. Returns the drop reason for them.
    #[inline]
    pub fn send(
        &mut self,
        at: usize,
        tools: &mut NetdevContext<'_>,
        frames: &mut PacketBatch,
    ) -> Reason {
        if self.scheduler.is_some() {
            return self.send_in_turn(at, tools, frames);
        }
        match self.all.get_mut(at) {
            Some(netdev) => netdev.send(tools, frames),
            None => Reason::ExternalGone,
        }
    }

    /// Sends as [`WorkerNetdevs::send`], where there is a scheduler.
    fn send_in_turn(
        &mut self,
        at: usize,
        tools: &mut NetdevContext<'_>,
        frames: &mut PacketBatch,
    ) -> Reason {
        let Self { scheduler: Some(scheduler), all, .. } = self else {
            return Reason::ExternalGone;
        };
        let Some(first) = frames.first().filter(|_| at < all.len()) else {
            return Reason::ExternalGone;
        };
        if let Some(number) = TrafficClass::of(first.mark) {
            frames.drain(..).for_each(|packet| scheduler.put(number, at, packet, tools.now_ns));
            return Reason::ExternalRingFull;
        }
        // The port does not know of a capacity, either yet or
        // any more. Frames at the scheduler precede its frames.
        if !scheduler.is_empty() {
            scheduler.run(all, tools);
        }
        if scheduler.is_empty() { all[at].send(tools, frames) } else { Reason::ExternalRingFull }
    }

    /// Removes the traffic classes with these numbers. Their ports must send
    /// no more. Takes in the frames that are still under way from there first.
    pub fn remove_classes(
        &mut self,
        numbers: &[usize],
        tools: &mut NetdevContext<'_>,
    ) -> Vec<Arc<TrafficClass>> {
        self.flush(tools);
        let Some(scheduler) = &mut self.scheduler else { return vec![] };
        numbers.iter().filter_map(|number| scheduler.remove(*number, tools.now_ns)).collect()
    }

    /// Returns the time when the next queued frame may be sent, nanoseconds, if one waits.
    pub fn due_ns(&self) -> Option<u64> {
        self.scheduler.as_ref()?.due_ns()
    }

    /// Passes the frames of this worker and of other workers to the kernel
    /// and to programs. Returns how many frames came from other workers.
    pub fn flush(&mut self, tools: &mut NetdevContext<'_>) -> usize {
        let mut taken = 0;
        for Inbox { netdev: at, from, left } in &mut self.inboxes {
            let netdev = &mut self.all[*at];
            // A full netdev exerts back pressure on the workers that fill the inbox. A frame
            // may take several places in the netdev's ring, so some frames may be left. Frames
            // with a traffic class wait at the scheduler, and their ports respect its budget.
            if left.is_empty() {
                let room = if self.scheduler.is_some() { usize::MAX } else { netdev.room() };
                let count = from.slots().min(room);
                taken += count;
                match (from.read_chunk(count), &mut self.scheduler) {
                    (Ok(chunk), None) => left.extend(chunk),
                    (Ok(chunk), Some(scheduler)) => {
                        for packet in chunk {
                            match TrafficClass::of(packet.mark) {
                                Some(number) => scheduler.put(number, *at, packet, tools.now_ns),
                                None => left.push(packet),
                            }
                        }
                    }
                    (Err(_), _) => {}
                }
            }
            if !left.is_empty() && netdev.send(tools, left) == Reason::ExternalGone {
                tools.counters.drop_all(OuterReason::Gone, left.len() as u64);
                tools.packets.give_all(left);
            }
        }
        if let Some(scheduler) = &mut self.scheduler {
            taken += scheduler.run(&mut self.all, tools);
        }
        self.all.iter_mut().for_each(|netdev| netdev.flush(tools));
        taken
    }
}
