//! An external interface, as one worker has it: its own exits, or else ways to those of other workers.

use std::any::Any;
use std::sync::Arc;

use pdp_afxdp::Packet;
use pdp_proto::mux;
use rtrb::Consumer;

use crate::class::Class;
use crate::counters::{ExternalCounters, OuterReason, Reason};
use crate::exit::path::Path;
use crate::exit::{Exit, Tools};
use crate::packets::{Batch, Packets};
use crate::scheduler::Scheduler;

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
    /// Where its frames go.
    pub exits: Exits,
}

/// Exits of this worker's, or else ways to those of others.
#[derive(Debug, Default)]
pub struct Exits {
    all: Vec<Box<dyn Exit>>,
    inboxes: Vec<Inbox>,
    /// How many of `all` are ways to another worker's.
    paths: usize,
    /// Whose frame is next, where the interface has had a capacity; it is where the exits are.
    pub scheduler: Option<Box<Scheduler>>,
}

/// Frames from another worker.
#[derive(Debug)]
struct Inbox {
    /// By which exit they go.
    exit: usize,
    from: Consumer<Packet>,
    /// Those that the exit had no room for.
    left: Batch,
}

impl External {
    /// Without exits yet.
    pub fn new(name: String, mac: [u8; 6], mtu: u32) -> Self {
        Self { name, mac, mtu, counters: ExternalCounters::default(), exits: Exits::default() }
    }

    /// What this worker counted, and what only the exits know.
    pub fn stats(&self) -> mux::ExternalStats {
        let mut stats = self.counters.stats();
        self.exits.all.iter().for_each(|exit| exit.count(&mut stats));
        stats
    }
}

impl Exits {
    /// Adds an exit of this worker's, and what other workers send by it.
    pub fn add(&mut self, exit: Box<dyn Exit>, inboxes: Vec<Consumer<Packet>>) {
        // Who has an exit needs no way to another's.
        self.close_paths();
        let at = self.all.len();
        let inboxes = inboxes.into_iter().map(|from| Inbox { exit: at, from, left: vec![] });
        self.inboxes.extend(inboxes);
        self.all.push(exit);
    }

    /// Adds a way to another worker's exit.
    pub fn add_path(&mut self, path: Path) {
        if self.paths == self.all.len() {
            self.paths += 1;
            self.all.push(Box::new(path));
        }
    }

    /// Sends no more frames to other workers' exits.
    pub fn close_paths(&mut self) {
        if std::mem::take(&mut self.paths) > 0 {
            self.all.clear();
        }
    }

    /// Takes the exits away, which the caller closes, and gives what other workers had for them back. Those have
    /// closed their paths before: what is put into an inbox that nobody empties any more is lost to the pool.
    pub fn take(&mut self, packets: &mut Packets) -> Vec<Box<dyn Exit>> {
        self.close_paths();
        for Inbox { mut from, mut left, .. } in self.inboxes.drain(..) {
            packets.give_all(&mut left);
            while let Ok(packet) = from.pop() {
                packets.give(packet);
            }
        }
        std::mem::take(&mut self.all)
    }

    /// All of them.
    pub fn all(&self) -> &[Box<dyn Exit>] {
        &self.all
    }

    /// All of them.
    pub fn all_mut(&mut self) -> &mut [Box<dyn Exit>] {
        &mut self.all
    }

    /// The exit of this kind, if there is one here.
    pub fn find<E: Exit>(&mut self) -> Option<&mut E> {
        let exits = self.all.iter_mut().map(|exit| &mut **exit as &mut dyn Any);
        exits.filter_map(|exit| exit.downcast_mut()).next()
    }

    /// Gives exits packets to receive into, and takes those back whose frames are out.
    pub fn refill(&mut self, tools: &mut Tools<'_>) {
        self.all.iter_mut().for_each(|exit| exit.fill(tools.packets));
        self.all.iter_mut().for_each(|exit| exit.complete(tools));
    }

    /// Which one is for what is spread by this number.
    #[inline]
    pub fn at(&self, spread: usize) -> usize {
        // A division takes longer than all else that is done with a row of a few frames.
        if self.all.len() > 1 { spread % self.all.len() } else { 0 }
    }

    /// Frames that exit `at` takes now.
    pub fn room(&mut self, at: usize) -> usize {
        match self.all.get_mut(at) {
            Some(exit) if self.scheduler.is_none() => exit.room(),
            _ => usize::MAX,
        }
    }

    /// Sends frames of one port by exit `at`, or has them wait for their turn. What does not go is left in `frames`,
    /// and the reason returned.
    #[inline]
    pub fn send(&mut self, at: usize, tools: &mut Tools<'_>, frames: &mut Batch) -> Reason {
        if self.scheduler.is_some() {
            return self.send_in_turn(at, tools, frames);
        }
        match self.all.get_mut(at) {
            Some(exit) => exit.send(tools, frames),
            None => Reason::ExternalGone,
        }
    }

    /// The same where there is a scheduler.
    fn send_in_turn(&mut self, at: usize, tools: &mut Tools<'_>, frames: &mut Batch) -> Reason {
        let Self { scheduler: Some(scheduler), all, .. } = self else {
            return Reason::ExternalGone;
        };
        let Some(first) = frames.first().filter(|_| at < all.len()) else {
            return Reason::ExternalGone;
        };
        if let Some(number) = Class::of(first.mark) {
            frames.drain(..).for_each(|packet| scheduler.put(number, at, packet, tools.now_ns));
            return Reason::ExternalRingFull;
        }
        // A port that knows of no capacity, yet or any more: what waits was before it.
        if !scheduler.is_empty() {
            scheduler.run(all, tools);
        }
        if scheduler.is_empty() { all[at].send(tools, frames) } else { Reason::ExternalRingFull }
    }

    /// Has no classes with these numbers any more, whose ports send no more. What is on its way from there is taken in
    /// before.
    pub fn remove_classes(&mut self, numbers: &[usize], tools: &mut Tools<'_>) -> Vec<Arc<Class>> {
        self.flush(tools);
        let Some(scheduler) = &mut self.scheduler else { return vec![] };
        numbers.iter().filter_map(|number| scheduler.remove(*number, tools.now_ns)).collect()
    }

    /// When a frame's turn is, nanoseconds, if one waits for it.
    pub fn due_ns(&self) -> Option<u64> {
        self.scheduler.as_ref()?.due_ns()
    }

    /// Has the kernel, programs and other workers take what was sent here and by other workers. Returns how many
    /// frames came from those.
    pub fn flush(&mut self, tools: &mut Tools<'_>) -> usize {
        let mut taken = 0;
        for Inbox { exit: at, from, left } in &mut self.inboxes {
            let exit = &mut self.all[*at];
            // A full exit is pressure back on who fills the inbox. A frame may take several of its places, so that
            // some may be left. What has a class waits for its turn, and its port sends no more than there is room for.
            if left.is_empty() {
                let room = if self.scheduler.is_some() { usize::MAX } else { exit.room() };
                let count = from.slots().min(room);
                taken += count;
                match (from.read_chunk(count), &mut self.scheduler) {
                    (Ok(chunk), None) => left.extend(chunk),
                    (Ok(chunk), Some(scheduler)) => {
                        for packet in chunk {
                            match Class::of(packet.mark) {
                                Some(number) => scheduler.put(number, *at, packet, tools.now_ns),
                                None => left.push(packet),
                            }
                        }
                    }
                    (Err(_), _) => {}
                }
            }
            if !left.is_empty() && exit.send(tools, left) == Reason::ExternalGone {
                tools.counters.drop_all(OuterReason::Gone, left.len() as u64);
                tools.packets.give_all(left);
            }
        }
        if let Some(scheduler) = &mut self.scheduler {
            taken += scheduler.run(&mut self.all, tools);
        }
        self.all.iter_mut().for_each(|exit| exit.flush(tools));
        taken
    }
}
