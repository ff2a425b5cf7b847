//! The queues that frames wait in at one end of a vlink, and which of them is next: weighted deficit round robin.
//!
//! Queues that have frames stand in a ring. The one whose turn it is has its quantum added to its deficit, sends frames
//! as long as the deficit covers them, and goes to the ring's end; one that is empty leaves the ring, and its deficit is
//! gone (Shreedhar and Varghese, Efficient Fair Queuing Using Deficit Round-Robin, SIGCOMM 1995). So each has its part by
//! weight of what all send, in bytes as the vlink's rate counts them, and what one does not want goes to the others.
//!
//! A quantum is the longest frame times the queue's weight over the mean weight of those in the ring when the round
//! begins: a round is as many of the longest frames as there are queues in it, whatever their weights. So no frame costs
//! more than two turns on average, and of two queues that have frames neither gets further ahead of the other than a
//! quantum and a frame. Who comes into the ring has its first turn in the next round.
//!
//! Limit: [`QUEUES_MAX`]; what waits in each is bounded by [`Queues::has_room`]. Pure: knows no time and no rate.

use std::mem;

use pdp_afxdp::{Packet, prefetch};
use pdp_proto::limits::{OVERHEAD_BYTES_MAX, QUEUES_MAX, WEIGHT_MAX};
use pdp_proto::mux::{self, Leaving, QueueStats};
use pdp_proto::slowpath::QueueState;
use pdp_wire::ecn;

use crate::packets::Packets;

/// Bytes of the longest frame as it counts.
const FRAME_BYTES_MAX: u64 = 2048 + OVERHEAD_BYTES_MAX as u64;

/// Bits of a deficit behind the point.
const FRACTION_BITS: u32 = 8;

// A deficit is less than a quantum and a frame, and a quantum no more than the greatest weight in longest frames.
const _: () =
    assert!(((WEIGHT_MAX as u64 + 1) * FRAME_BYTES_MAX) << FRACTION_BITS <= u32::MAX as u64);

/// No frame, and no queue.
const NONE: u32 = u32::MAX;

/// Values of a DSCP (RFC 2474 section 3).
const DSCPS: usize = 64;

/// Packets that queues have set aside for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// How many.
    pub reserved: usize,
    /// How many of them frames are in.
    pub filled: usize,
}

impl Buffers {
    /// Those that no frame is in.
    #[inline]
    pub fn left(self) -> usize {
        self.reserved - self.filled
    }

    /// Of so many frames that wait, with those that are in these: how many are in others' room.
    #[inline]
    pub fn beside(self, waiting: usize) -> usize {
        waiting - self.filled
    }

    /// Those of both.
    pub fn and(self, other: Self) -> Self {
        Self { reserved: self.reserved + other.reserved, filled: self.filled + other.filled }
    }

    /// Those that are not `other`'s, which are among them.
    pub fn without(self, other: Self) -> Self {
        Self { reserved: self.reserved - other.reserved, filled: self.filled - other.filled }
    }

    /// Of some among these, that frames are in as `before`, frames are in as `now`.
    #[inline]
    pub fn change(&mut self, before: Self, now: Self, packets: &mut Packets) {
        if before.filled != now.filled {
            packets.set_aside(before.left(), now.left());
            self.filled = self.filled - before.filled + now.filled;
        }
    }
}

/// The queues of one end.
#[derive(Debug)]
pub struct Queues {
    queues: Box<[Queue]>,
    /// What else is known of each; and their numbers in the order of its keys.
    known: Box<[Known]>,
    by_key: Box<[u16]>,
    /// Queues that a program has set.
    set: usize,
    /// The queue of each DSCP.
    of_dscp: [u16; DSCPS],
    /// What each frame counts beyond its bytes.
    overhead_bytes: u32,
    /// Places of frames, each with the next one of its queue, or of those that are free.
    places: Vec<Place>,
    free: u32,
    waiting: usize,
    /// Packets that are set aside for these queues, and how many of them frames are in.
    reserved: u32,
    filled: u32,
    /// The ring: the queue whose turn it is, and the last one; how many there are, and the sum of their weights.
    turn: u32,
    last: u32,
    count: u32,
    weights: u32,
    /// How many of them have their turns yet in this round, and what a weight of 1 has in it: bytes with a fraction.
    left: u32,
    unit: u32,
    /// Whether the queue whose turn it is has its quantum.
    has_quantum: bool,
}

#[derive(Debug)]
struct Place {
    frame: Option<Packet>,
    next: u32,
}

/// What is known of a queue and seldom looked at.
#[derive(Debug)]
struct Known {
    /// Knows it again when there are others: of its name.
    key: u64,
    /// What its spec says, and what a program has set within that; 0: nothing.
    spec: Setting,
    set: Setting,
}

/// How a queue is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// Its part beside others that have frames.
    pub weight: u16,
    /// Frames that may wait in it.
    pub frames: u16,
    /// Bytes that may, as they count; [`u32::MAX`]: as many as these frames have.
    pub bytes: u32,
}

impl Setting {
    /// What is set holds within what the spec says.
    fn within(self, spec: Self) -> Self {
        let or = |set: u32, spec: u32| if set == 0 { spec } else { set };
        let weight = or(self.weight.into(), spec.weight.into()).clamp(1, WEIGHT_MAX) as u16;
        let frames = or(self.frames.into(), spec.frames.into()) as u16;
        let bytes = or(self.bytes, spec.bytes).min(spec.bytes);
        Self { weight, frames: frames.min(spec.frames), bytes }
    }
}

/// The queues at the ports of a node.
pub trait AtPorts {
    /// Those where a vport's frames leave, where these are several.
    fn at(&mut self, vport: u8) -> Option<&mut Queues>;
    /// Does so with all of them.
    fn each(&mut self, act: &mut dyn FnMut(&mut Queues));
}

/// In one line of the caches: where there are many, a frame costs few of them.
#[derive(Debug)]
#[repr(align(64))]
struct Queue {
    sent: u64,
    sent_bytes: u64,
    dropped: u64,
    /// Frames that wait: the first and the last, how many, and their own bytes.
    first: u32,
    last: u32,
    frames: u32,
    bytes: u32,
    /// The next one in the ring.
    next: u32,
    /// Bytes that it may send in its turn, with a fraction.
    deficit: u32,
    bytes_max: u32,
    frames_max: u16,
    weight: u16,
    /// Packets that are set aside for it.
    buffers: u16,
}

/// All that an empty queue takes, beside its key: 65,536 of them are 4 MiB.
const _: () = assert!(size_of::<Queue>() == 64);

impl Queue {
    fn new(spec: &mux::Queue, leaving: &Leaving) -> Self {
        let (frames, bytes) = match (spec.frames, spec.bytes) {
            (0, 0) => (leaving.queue_frames, leaving.queue_bytes),
            given => given,
        };
        // All of these are bounded by `check`.
        let bytes_max =
            if bytes == 0 { u32::MAX } else { u32::try_from(bytes).unwrap_or(u32::MAX) };
        Self {
            sent: 0,
            sent_bytes: 0,
            dropped: 0,
            first: NONE,
            last: NONE,
            frames: 0,
            bytes: 0,
            next: NONE,
            deficit: 0,
            bytes_max,
            frames_max: u16::try_from(frames).unwrap_or(u16::MAX),
            weight: u16::try_from(spec.weight.max(1)).unwrap_or(u16::MAX),
            buffers: u16::try_from(spec.buffers).unwrap_or(u16::MAX),
        }
    }

    fn setting(&self) -> Setting {
        Setting { weight: self.weight, frames: self.frames_max, bytes: self.bytes_max }
    }

    /// How many of the packets that are set aside for it frames are in.
    fn filled(&self) -> u32 {
        self.frames.min(self.buffers.into())
    }
}

/// Of a name (FNV-1a): two of one end that are alike by chance or on purpose share what waits when queues change.
fn key(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Queues {
    /// As they are said to be, of an end by which frames leave so; `None` where none are.
    pub fn of(spec: &[mux::Queue], leaving: &Leaving) -> Option<Box<Self>> {
        let spec = &spec[..spec.len().min(QUEUES_MAX)];
        if spec.is_empty() {
            return None;
        }
        let mut of_dscp = [0; DSCPS];
        for (at, queue) in (0..).zip(spec) {
            for dscp in &queue.dscp {
                of_dscp[usize::from(*dscp) % DSCPS] = at;
            }
        }
        let queues: Box<[_]> = spec.iter().map(|queue| Queue::new(queue, leaving)).collect();
        let known = queues.iter().zip(spec).map(|(queue, spec)| Known {
            key: key(&spec.name),
            spec: queue.setting(),
            set: Setting::default(),
        });
        let known: Box<[_]> = known.collect();
        let mut by_key: Box<[u16]> = (0..).take(queues.len()).collect();
        by_key.sort_unstable_by_key(|at| known[usize::from(*at)].key);
        let reserved = queues.iter().map(|queue| u32::from(queue.buffers)).sum();
        Some(Box::new(Self {
            queues,
            known,
            by_key,
            set: 0,
            of_dscp,
            overhead_bytes: leaving.overhead_bytes,
            places: vec![],
            free: NONE,
            waiting: 0,
            reserved,
            filled: 0,
            turn: NONE,
            last: NONE,
            count: 0,
            weights: 0,
            left: 0,
            unit: 0,
            has_quantum: false,
        }))
    }

    /// Frames that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Packets that are set aside for these queues, and how many of them frames are in.
    pub fn buffers(&self) -> Buffers {
        Buffers { reserved: self.reserved as usize, filled: self.filled as usize }
    }

    /// The queue that a frame is for: the one that was chosen for it, or else that of its DSCP.
    #[inline]
    pub fn choose(&self, packet: &Packet) -> usize {
        match usize::from(packet.queue).checked_sub(1) {
            Some(chosen) if chosen < self.queues.len() => chosen,
            _ => self.of_dscp[usize::from(ecn::dscp(packet.bytes()))].into(),
        }
    }

    /// Whether one more frame may wait in this queue: always one, and as many as have room in it. Beside those that packets
    /// are set aside for it has no more than `spare` then: packets that its vnet could still have, so that a queue that is
    /// filled leaves some to the others.
    pub fn has_room(&self, queue: usize, packet: &Packet, spare: usize) -> bool {
        let here = &self.queues[queue];
        let frames = u64::from(here.frames) + 1;
        let bytes = u64::from(here.bytes) + packet.len() as u64;
        let fits = frames == 1 || self.as_counted(frames, bytes) <= here.bytes_max.into();
        let shared = frames.saturating_sub(here.buffers.into());
        frames <= here.frames_max.into() && fits && shared <= spare as u64
    }

    fn as_counted(&self, frames: u64, bytes: u64) -> u64 {
        bytes + frames * u64::from(self.overhead_bytes)
    }

    /// A frame of this queue goes without a wait.
    pub fn passed(&mut self, queue: usize, packet: &Packet) {
        let here = &mut self.queues[queue];
        (here.sent, here.sent_bytes) = (here.sent + 1, here.sent_bytes + packet.len() as u64);
    }

    /// A frame of this queue was dropped.
    pub fn dropped(&mut self, queue: usize) {
        self.queues[queue].dropped += 1;
    }

    /// Has a frame wait in this queue.
    pub fn put(&mut self, queue: usize, packet: Packet) {
        let bytes = packet.len() as u32;
        let place = Place { frame: Some(packet), next: NONE };
        let at = match self.places.get_mut(self.free as usize) {
            Some(free) => {
                let at = mem::replace(&mut self.free, free.next);
                *free = place;
                at
            }
            None => {
                self.places.push(place);
                (self.places.len() - 1) as u32
            }
        };
        let here = &mut self.queues[queue];
        match self.places.get_mut(here.last as usize) {
            Some(last) => last.next = at,
            None => here.first = at,
        }
        here.last = at;
        self.filled += u32::from(here.frames < here.buffers.into());
        (here.frames, here.bytes) = (here.frames + 1, here.bytes + bytes);
        self.waiting += 1;
        if here.frames == 1 {
            self.enter(queue);
        }
    }

    /// Bytes of the frame that is next, as they count, and its own. None waits if there is none.
    pub fn first(&mut self) -> Option<(usize, usize)> {
        loop {
            let turn = self.turn;
            let here = self.queues.get(turn as usize)?;
            if !self.has_quantum {
                expect(&self.places, &self.queues, here.next);
                let here = &mut self.queues[turn as usize];
                if self.left == 0 {
                    let frames = (FRAME_BYTES_MAX * u64::from(self.count)) << FRACTION_BITS;
                    (self.left, self.unit) =
                        (self.count, (frames / u64::from(self.weights)) as u32);
                }
                self.left -= 1;
                here.deficit += self.unit * u32::from(here.weight);
                self.has_quantum = true;
            }
            let here = &mut self.queues[turn as usize];
            let first = self.places[here.first as usize].frame.as_ref();
            let bytes = first.map_or(0, Packet::len);
            let counted = bytes + self.overhead_bytes as usize;
            if here.deficit >> FRACTION_BITS >= counted as u32 {
                return Some((counted, bytes));
            }
            self.turn = mem::replace(&mut here.next, NONE);
            self.has_quantum = false;
            self.append(turn);
        }
    }

    /// Takes the frame that is next.
    pub fn pop(&mut self) -> Option<Packet> {
        let (counted, bytes) = self.first()?;
        let here = &mut self.queues[self.turn as usize];
        let place = &mut self.places[here.first as usize];
        let packet = place.frame.take();
        self.free = mem::replace(&mut here.first, mem::replace(&mut place.next, self.free));
        here.deficit -= (counted as u32) << FRACTION_BITS;
        (here.frames, here.bytes) = (here.frames - 1, here.bytes - bytes as u32);
        (here.sent, here.sent_bytes) = (here.sent + 1, here.sent_bytes + bytes as u64);
        self.filled -= u32::from(here.frames < here.buffers.into());
        self.waiting -= 1;
        if let Some(packet) = &packet {
            packet.prefetch();
        }
        if here.frames == 0 {
            (here.last, here.deficit) = (NONE, 0);
            (self.count, self.weights) = (self.count - 1, self.weights - u32::from(here.weight));
            self.turn = mem::replace(&mut here.next, NONE);
            self.has_quantum = false;
        }
        packet
    }
}

/// Has the CPU fetch what the turn of `next` needs, and the queue behind it in the ring, which it fetches in the turn before:
/// where there are many queues none is in the caches.
#[inline]
fn expect(places: &[Place], queues: &[Queue], next: u32) {
    let Some(next) = queues.get(next as usize) else { return };
    places.get(next.first as usize).inspect(|place| prefetch(*place));
    queues.get(next.next as usize).inspect(|queue| prefetch(*queue));
}

impl Queues {
    /// Has the CPU fetch the queues of frames that come.
    pub fn expect(&self, frames: &[Packet]) {
        frames.iter().for_each(|packet| prefetch(&self.queues[self.choose(packet)]));
    }

    /// Has a queue that has frames now stand in the ring.
    fn enter(&mut self, queue: usize) {
        self.count += 1;
        self.weights += u32::from(self.queues[queue].weight);
        self.append(queue as u32);
    }

    fn append(&mut self, queue: u32) {
        match self.turn {
            NONE => self.turn = queue,
            _ => self.queues[self.last as usize].next = queue,
        }
        self.last = queue;
    }

    /// Goes on where `old` stopped: each queue with what its like had, be it more than there is room for now. What the
    /// others had goes to the first one, behind its own.
    pub fn take_over(&mut self, old: &mut Self) {
        (self.places, self.free) = (mem::take(&mut old.places), old.free);
        self.waiting = mem::take(&mut old.waiting);
        for (was, known) in old.queues.iter_mut().zip(&old.known) {
            let Some(at) = self.find(known.key) else { continue };
            if known.set != Setting::default() {
                self.set(at, known.set);
            }
            let here = &mut self.queues[at];
            if here.frames == 0 {
                (here.first, here.last) = (was.first, was.last);
                (here.frames, here.bytes) = (mem::take(&mut was.frames), was.bytes);
                (here.sent, here.sent_bytes) = (was.sent, was.sent_bytes);
                (here.dropped, here.deficit) = (was.dropped, was.deficit);
            }
        }
        let first = &mut self.queues[0];
        for was in old.queues.iter().filter(|was| was.frames > 0) {
            match self.places.get_mut(first.last as usize) {
                Some(last) => last.next = was.first,
                None => first.first = was.first,
            }
            first.last = was.last;
            (first.frames, first.bytes) = (first.frames + was.frames, first.bytes + was.bytes);
        }
        // In the order in which they stood there. What the first one has of others is in the ring once.
        let mut next = old.turn;
        while let Some(was) = old.queues.get(next as usize) {
            let at = self.find(old.known[next as usize].key).unwrap_or(0);
            if !self.is_in_ring(at) {
                self.enter(at);
            }
            next = was.next;
        }
        let key = |all: &Self| all.known.get(all.turn as usize).map(|turn| turn.key);
        self.has_quantum = old.has_quantum && key(self) == key(old);
        self.filled = self.queues.iter().map(Queue::filled).sum();
        old.filled = 0;
    }

    /// The queue with this key.
    fn find(&self, key: u64) -> Option<usize> {
        let found = self.by_key.binary_search_by_key(&key, |at| self.known[usize::from(*at)].key);
        found.ok().map(|at| self.by_key[at].into())
    }

    fn is_in_ring(&self, queue: usize) -> bool {
        self.queues[queue].next != NONE || self.last as usize == queue && self.turn != NONE
    }

    /// Has a queue, if there is one, be so within what its spec says, whatever waits in it.
    pub fn set(&mut self, queue: usize, to: Setting) {
        let is_in_ring = queue < self.queues.len() && self.is_in_ring(queue);
        let (Some(here), Some(known)) = (self.queues.get_mut(queue), self.known.get_mut(queue))
        else {
            return;
        };
        let (is_set, was_set) = (to != Setting::default(), known.set != Setting::default());
        self.set = self.set + usize::from(is_set) - usize::from(was_set);
        known.set = to;
        let Setting { weight, frames, bytes } = to.within(known.spec);
        if is_in_ring {
            self.weights = self.weights - u32::from(here.weight) + u32::from(weight);
        }
        (here.weight, here.frames_max, here.bytes_max) = (weight, frames, bytes);
    }

    /// Has all be as their specs say.
    pub fn unset(&mut self) {
        for queue in 0..self.queues.len() {
            if self.set == 0 {
                return;
            }
            if self.known[queue].set != Setting::default() {
                self.set(queue, Setting::default());
            }
        }
    }

    /// What the spec of a queue says, if there is one.
    pub fn spec(&self, queue: usize) -> Option<Setting> {
        self.known.get(queue).map(|known| known.spec)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.queues.len()
    }

    /// How each is, in order, from one of them on.
    pub fn states(&self, from: usize) -> impl Iterator<Item = QueueState> {
        self.queues.iter().skip(from).map(|queue| QueueState {
            weight: queue.weight.into(),
            frames: queue.frames_max.into(),
            bytes: if queue.bytes_max == u32::MAX { 0 } else { queue.bytes_max },
            buffers: queue.buffers.into(),
            waiting: queue.frames,
            waiting_bytes: queue.bytes,
            sent: queue.sent,
            sent_bytes: queue.sent_bytes,
            dropped: queue.dropped,
        })
    }

    /// What was counted of each, in order, from one of them on.
    pub fn stats(&self, from: usize) -> impl Iterator<Item = QueueStats> {
        self.queues.iter().skip(from).map(|queue| QueueStats {
            name: String::new(),
            waiting: queue.frames.into(),
            waiting_bytes: queue.bytes.into(),
            sent: queue.sent,
            sent_bytes: queue.sent_bytes,
            dropped: queue.dropped,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_afxdp::Pool;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    fn queue(name: &str, weight: u32) -> mux::Queue {
        mux::Queue { name: name.into(), weight, ..mux::Queue::default() }
    }

    fn queues(weights: &[u32], overhead_bytes: u32) -> Queues {
        let all = weights.iter().zip(0..);
        let spec: Vec<_> = all.map(|(weight, at)| queue(&format!("q{at}"), *weight)).collect();
        let leaving = Leaving { overhead_bytes, queue_frames: 4096, ..Leaving::default() };
        *Queues::of(&spec, &leaving).unwrap()
    }

    fn sized(mut packet: Packet, bytes: usize, mark: u32) -> Packet {
        packet.set_len(bytes).unwrap();
        packet.mark = mark;
        packet
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u8, usize),
        Pop,
        /// From now on these, with these weights.
        Change(Vec<(u8, u32)>),
        /// One has another weight and length from now on.
        Set(u8, Setting),
    }

    fn step() -> impl Strategy<Value = Step> {
        let change = prop::collection::btree_map(0u8..8, 1u32..1000, 1..8)
            .prop_map(|all| all.into_iter().collect::<Vec<_>>())
            .prop_shuffle();
        prop_oneof![
            8 => (any::<u8>(), 0usize..1700).prop_map(|(at, bytes)| Step::Put(at, bytes)),
            7 => Just(Step::Pop),
            1 => change.prop_map(Step::Change),
            2 => (any::<u8>(), 0..1000u16, 0..20u16).prop_map(|(at, weight, frames)| {
                Step::Set(at, Setting { weight, frames, bytes: 0 })
            }),
        ]
    }

    proptest! {
        /// Against a list for each queue: frames of one keep their order, none is lost or made up, and something goes
        /// as long as something waits, whatever queues come and go; and what is set aside for one has room, and no other
        /// frame.
        #[test]
        fn each_queue_is_a_queue(steps in prop::collection::vec(step(), 1..300)) {
            let (_pool, mut free) = Pool::new(steps.len()).unwrap();
            let buffers_of = |weight: u32| weight as usize % 5;
            let of = |all: &[(u8, u32)]| {
                let queue = |(name, weight): &(u8, u32)| mux::Queue {
                    frames: 12, buffers: buffers_of(*weight) as u32, ..queue(&name.to_string(), *weight)
                };
                let spec: Vec<_> = all.iter().map(queue).collect();
                *Queues::of(&spec, &Leaving { overhead_bytes: 24, ..Leaving::default() }).unwrap()
            };
            let mut names = vec![(0, 1)];
            let mut set: BTreeMap<u8, Setting> = BTreeMap::new();
            let mut queues = of(&names);
            let mut model: BTreeMap<u8, VecDeque<u32>> = BTreeMap::new();
            for (mark, step) in (0..).zip(steps.into_iter().chain([const { Step::Pop }; 300])) {
                match step {
                    Step::Put(at, bytes) => {
                        let at = usize::from(at) % names.len();
                        let packet = sized(free.pop().unwrap(), bytes, mark);
                        let waits = model.get(&names[at].0).map_or(0, VecDeque::len);
                        for spare in 0..14 {
                            let most = set.get(&names[at].0).map_or(0, |it| it.frames.into());
                            let most = if most == 0 { 12 } else { most.min(12) };
                            let fits = waits < most && waits < buffers_of(names[at].1) + spare;
                            prop_assert_eq!(queues.has_room(at, &packet, spare), fits);
                        }
                        queues.put(at, packet);
                        model.entry(names[at].0).or_default().push_back(mark);
                    }
                    Step::Pop => {
                        let next = queues.first();
                        let packet = queues.pop();
                        prop_assert_eq!(packet.is_none(), model.is_empty());
                        let Some(packet) = packet else { continue };
                        prop_assert_eq!(next, Some((packet.len() + 24, packet.len())));
                        let own = model.iter_mut().find(|(_, it)| it.front() == Some(&packet.mark));
                        let (name, own) = own.expect("the first of its queue");
                        own.pop_front();
                        let name = *name;
                        model.retain(|_, it| !it.is_empty());
                        let at = names.iter().position(|it| it.0 == name).unwrap();
                        let waits = model.get(&name).map_or(0, VecDeque::len);
                        prop_assert_eq!(queues.stats(at).next().unwrap().waiting, waits as u64);
                        free.push(packet);
                    }
                    Step::Set(at, to) => {
                        let at = usize::from(at) % names.len();
                        queues.set(at, to);
                        set.insert(names[at].0, to);
                    }
                    Step::Change(to) => {
                        set.retain(|name, _| to.iter().any(|it| it.0 == *name));
                        let mut new = of(&to);
                        new.take_over(&mut queues);
                        let gone = names.iter().filter(|(name, _)| to.iter().all(|it| it.0 != *name));
                        let gone: Vec<_> = gone.filter_map(|(name, _)| model.remove(name)).collect();
                        if !gone.is_empty() {
                            model.entry(to[0].0).or_default().extend(gone.into_iter().flatten());
                        }
                        (queues, names) = (new, to);
                    }
                }
                prop_assert_eq!(queues.waiting(), model.values().map(VecDeque::len).sum::<usize>());
                let in_ring = queues.queues.iter().filter(|queue| queue.frames > 0);
                prop_assert_eq!(queues.weights, in_ring.map(|it| u32::from(it.weight)).sum::<u32>());
                let has = queues.states(0).map(|it| it.weight).collect::<Vec<_>>();
                let wanted = |(name, weight): &(u8, u32)| match set.get(name) {
                    Some(it) if it.weight > 0 => it.weight.into(),
                    _ => *weight,
                };
                prop_assert_eq!(has, names.iter().map(wanted).collect::<Vec<_>>());
                let filled = names.iter().map(|(name, weight)| {
                    model.get(name).map_or(0, VecDeque::len).min(buffers_of(*weight))
                });
                let reserved = names.iter().map(|it| buffers_of(it.1)).sum();
                prop_assert_eq!(queues.buffers(), Buffers { reserved, filled: filled.sum() });
            }
        }

        /// Of two that wait all the time neither gets further ahead of the other, by its weight, than a quantum and a
        /// frame of each, however others come and go.
        #[test]
        fn none_is_far_ahead(
            weights in prop::collection::vec(1u32..1000, 2..12), overhead in 0u32..256,
            steps in prop::collection::vec((any::<u8>(), 1usize..1700, 0u8..4), 200..600),
        ) {
            let (_pool, mut free) = Pool::new(steps.len() * 4 + 40).unwrap();
            let mut queues = queues(&weights, overhead);
            let mut sent = [0u64; 2];
            let sizes: Vec<_> = steps.iter().map(|it| it.1).collect();
            let mut first_sizes = sizes.into_iter().cycle();
            let least = |from: usize| weights[from..].iter().copied().min().unwrap_or(u32::MAX);
            // The mean weight is never less than this.
            let unit = FRAME_BYTES_MAX as f64 / f64::from(least(0)).max(1.0);
            let mut behind = [0f64; 2];
            for (at, bytes, pops) in steps {
                let others = weights.len() - 2;
                if others > 0 && free.len() > 40 {
                    let at = 2 + usize::from(at) % others;
                    queues.put(at, sized(free.pop().unwrap(), bytes, at as u32));
                }
                for _ in 0..=pops {
                    for at in 0..2 {
                        while queues.queues[at].frames < 3 {
                            let bytes = first_sizes.next().unwrap();
                            queues.put(at, sized(free.pop().unwrap(), bytes, at as u32));
                        }
                    }
                    let packet = queues.pop().unwrap();
                    if let Some(sent) = sent.get_mut(packet.mark as usize) {
                        *sent += packet.len() as u64 + u64::from(overhead);
                    }
                    free.push(packet);
                    for at in 0..2 {
                        behind[at] = sent[at] as f64 / f64::from(weights[at]);
                    }
                    let frames: f64 = weights[..2].iter().map(|it| FRAME_BYTES_MAX as f64 / f64::from(*it)).sum();
                    let far = (behind[0] - behind[1]).abs();
                    prop_assert!(far <= unit + frames, "{far} of {} and {}", unit, frames);
                }
            }
        }
    }

    /// Queues that always have frames, of all sizes, share what goes in each of three seconds within 0.5% of all, and as
    /// near to their parts as two quanta and frames are.
    #[test]
    fn shares_are_as_asked_for_in_any_second() {
        let mut random = 7u64;
        let mut draw = |most: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % most
        };
        for (count, bytes_each_second) in
            [(1, 1_250_000), (2, 1_250_000), (10, 12_500_000), (1000, 125_000_000)]
        {
            let (_pool, mut free) = Pool::new(2 * count).unwrap();
            let weights: Vec<u32> = (0..count).map(|_| 1 + draw(1000) as u32).collect();
            let mut queues = queues(&weights, 24);
            for at in 0..count {
                for _ in 0..2 {
                    let bytes = 60 + draw(1455) as usize;
                    queues.put(at, sized(free.pop().unwrap(), bytes, at as u32));
                }
            }
            let all: u32 = weights.iter().sum();
            for _ in 0..3 {
                let (mut sent, mut sum) = (vec![0u64; count], 0);
                while sum < bytes_each_second {
                    let packet = queues.pop().unwrap();
                    let at = packet.mark as usize;
                    sent[at] += packet.len() as u64 + 24;
                    sum += packet.len() as u64 + 24;
                    queues.put(at, sized(packet, 60 + draw(1455) as usize, at as u32));
                }
                for (sent, weight) in sent.into_iter().zip(&weights) {
                    let part = f64::from(*weight) / f64::from(all);
                    let off = sent as f64 - part * sum as f64;
                    let quantum = FRAME_BYTES_MAX as f64 * count as f64 * part;
                    assert!(off.abs() <= 0.005 * sum as f64, "{off} bytes off of {count}");
                    assert!(
                        off.abs() <= 2.0 * (quantum + 1538.0),
                        "{off} bytes, {quantum} at a time"
                    );
                }
            }
            while let Some(packet) = queues.pop() {
                free.push(packet);
            }
        }
    }

    #[test]
    fn a_frame_is_for_who_was_chosen_or_has_its_dscp() {
        let dscp = |name: &str, dscp: &[u8]| mux::Queue { dscp: dscp.into(), ..queue(name, 1) };
        let spec = [dscp("rest", &[]), dscp("voice", &[46, 44]), dscp("bulk", &[8])];
        let queues = Queues::of(&spec, &Leaving::default()).unwrap();
        let (_pool, mut free) = Pool::new(1).unwrap();
        let mut packet = free.pop().unwrap();
        let mut of = |frame: &[u8], queue| {
            packet.set_len(frame.len()).unwrap();
            packet.bytes_mut().copy_from_slice(frame);
            packet.queue = queue;
            queues.choose(&packet)
        };
        let frame = |tags: &[u8], kind: u16, first: [u8; 2]| {
            let start = [&[0; 12], tags, &kind.to_be_bytes(), &first].concat();
            [start, vec![0; 46]].concat()
        };
        let v4 = frame(&[], 0x0800, [0x45, 46 << 2 | 1]);
        assert_eq!((of(&v4, 0), of(&v4, 1), of(&v4, 3), of(&v4, 4)), (1, 0, 2, 1));
        let v6 = frame(&[0x81, 0, 0, 7], 0x86dd, [0x60 | 8 >> 2, 0x2f]);
        assert_eq!(of(&v6, 0), 2);
        assert_eq!(of(&frame(&[], 0x0806, [0x45, 46 << 2]), 0), 0, "no IP");
        for end in 0..v4.len() {
            of(&v4[..end], 0);
        }
    }
}
