//! The queues at one end of a vlink, with weighted deficit round robin.
//!
//! Queues with frames are in a ring. At its turn a queue adds its quantum to its deficit,
//! sends frames while the deficit covers them, and moves to the end of the ring. An empty
//! queue leaves the ring and loses its deficit (Shreedhar and Varghese, Efficient Fair
//! Queuing Using Deficit Round-Robin, SIGCOMM 1995). So each queue gets its part by weight,
//! in bytes as the vlink's rate counts them. What one queue does not use goes to the others.
//!
//! A quantum is the longest frame times the queue's weight, divided by the mean weight of
//! the queues in the ring when the round begins. So a round has as many of the longest
//! frames as there are queues in it, whatever their weights. A frame costs two turns on
//! average, at most. Of two queues with frames, neither gets further ahead than a quantum
//! and a frame. A queue that enters the ring has its first turn in the next round.
//!
//! Limit: [`QUEUES_MAX`] queues. [`Queues::has_room`] bounds
//! each of them. Pure: there is no time or rate in this module.

use std::mem;

use pdp_afxdp::{PacketBuffer, prefetch};
use pdp_model::QueueStats;
use pdp_proto::limits::{OVERHEAD_BYTES_MAX, QUEUES_MAX, WEIGHT_MAX};
use pdp_proto::mux::{self, EgressConfig};
use pdp_proto::slowpath::QueueState;
use pdp_wire::ecn;

use crate::packets::Packets;

/// Longest frame as counted, bytes.
const FRAME_BYTES_MAX: u64 = 2048 + OVERHEAD_BYTES_MAX as u64;

/// Fraction bits of a deficit.
const FRACTION_BITS: u32 = 8;

// A deficit is less than a quantum and a frame. A quantum
// is the greatest weight times the longest frame, at most.
const _: () =
    assert!(((WEIGHT_MAX as u64 + 1) * FRAME_BYTES_MAX) << FRACTION_BITS <= u32::MAX as u64);

/// Index that means no frame or no queue.
const NONE: u32 = u32::MAX;

/// Number of DSCP values (RFC 2474 section 3).
const DSCPS: usize = 64;

/// Packets that are reserved for queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Number of reserved packets.
    pub reserved: usize,
    /// Reserved packets that hold frames.
    pub filled: usize,
}

impl Buffers {
    /// Returns the reserved packets that hold no frame.
    #[inline]
    pub fn left(self) -> usize {
        self.reserved - self.filled
    }

    /// Returns how many of `waiting` queued frames are in packets that are not reserved.
    #[inline]
    pub fn beside(self, waiting: usize) -> usize {
        waiting - self.filled
    }

    /// Returns the sum of both.
    pub fn and(self, other: Self) -> Self {
        Self { reserved: self.reserved + other.reserved, filled: self.filled + other.filled }
    }

    /// Returns the difference. `other` is part of these.
    pub fn without(self, other: Self) -> Self {
        Self { reserved: self.reserved - other.reserved, filled: self.filled - other.filled }
    }

    /// Updates the filled packets after a part of these changed from `before` to `now`.
    #[inline]
    pub fn change(&mut self, before: Self, now: Self, packets: &mut Packets) {
        if before.filled != now.filled {
            packets.reserve(before.left(), now.left());
            self.filled = self.filled - before.filled + now.filled;
        }
    }
}

/// Queues of one end.
#[derive(Debug)]
pub struct Queues {
    queues: Box<[DrrQueue]>,
    /// Further data of each queue, and the queues' indices ordered by key.
    known: Box<[QueueInfo]>,
    by_key: Box<[u16]>,
    /// Number of queues that a program has set.
    set: usize,
    /// Queue of each DSCP.
    of_dscp: [u16; DSCPS],
    /// Bytes that count for each frame beyond its own.
    overhead_bytes: u32,
    /// Slots for frames. Each links to the next frame of its queue, or to the next free slot.
    places: Vec<FrameSlot>,
    free: u32,
    waiting: usize,
    /// Packets that are reserved for these queues, and how many of them hold frames.
    reserved: u32,
    filled: u32,
    /// The ring: the queue whose turn it is, the last queue,
    /// the number of queues, and the sum of their weights.
    current: u32,
    last: u32,
    count: u32,
    weights: u32,
    /// Queues that have not had their turn in this round, and
    /// the quantum for a weight of 1, bytes with a fraction.
    left: u32,
    unit: u32,
    /// True if the queue whose turn it is has added its quantum.
    has_quantum: bool,
}

#[derive(Debug)]
struct FrameSlot {
    frame: Option<PacketBuffer>,
    next: u32,
}

/// Data of a queue that is seldom used.
#[derive(Debug)]
struct QueueInfo {
    /// Hash of its name, to find the queue again after a change.
    key: u64,
    /// Parameters from its spec, and those that a program has set within them; 0: not set.
    spec: QueueParameters,
    set: QueueParameters,
}

/// Parameters of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueParameters {
    /// Weight relative to other queues with frames.
    pub weight: u16,
    /// Frames that the queue may have.
    pub frames: u16,
    /// Bytes that the queue may have, as counted. [`u32::MAX`]: no limit but that of the frames.
    pub bytes: u32,
}

impl QueueParameters {
    /// Limits the set parameters by those of the spec.
    fn within(self, spec: Self) -> Self {
        let or = |set: u32, spec: u32| if set == 0 { spec } else { set };
        let weight = or(self.weight.into(), spec.weight.into()).clamp(1, WEIGHT_MAX) as u16;
        let frames = or(self.frames.into(), spec.frames.into()) as u16;
        let bytes = or(self.bytes, spec.bytes).min(spec.bytes);
        Self { weight, frames: frames.min(spec.frames), bytes }
    }
}

/// Queues at the ports of a node.
pub trait AtPorts {
    /// Returns the egress queues of a vport, if it has several.
    fn at(&mut self, vport: u8) -> Option<&mut Queues>;
    /// Calls `act` for the queues of each port.
    fn each(&mut self, act: &mut dyn FnMut(&mut Queues));
}

/// A queue. It fits one cache line, so that frames cost few cache misses with many queues.
#[derive(Debug)]
#[repr(align(64))]
struct DrrQueue {
    sent: u64,
    sent_bytes: u64,
    dropped: u64,
    /// Queued frames: the first, the last, their number, and their own bytes.
    first: u32,
    last: u32,
    frames: u32,
    bytes: u32,
    /// The next queue in the ring.
    next: u32,
    /// Bytes that it may still send in its turn, with a fraction.
    deficit: u32,
    bytes_max: u32,
    frames_max: u16,
    weight: u16,
    /// Packets that are reserved for it.
    buffers: u16,
}

/// An empty queue takes no more memory than this, beside its key: 65,536 queues take 4 MiB.
const _: () = assert!(size_of::<DrrQueue>() == 64);

impl DrrQueue {
    fn new(spec: &mux::QueueConfig, egress: &EgressConfig) -> Self {
        let (frames, bytes) = match (spec.frames, spec.bytes) {
            (0, 0) => (egress.queue_frames, egress.queue_bytes),
            given => given,
        };
        // `check` bounds all of these.
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

    fn setting(&self) -> QueueParameters {
        QueueParameters { weight: self.weight, frames: self.frames_max, bytes: self.bytes_max }
    }

    /// Returns how many of its reserved packets hold frames.
    fn filled(&self) -> u32 {
        self.frames.min(self.buffers.into())
    }
}

/// Returns the hash of a name (FNV-1a). If two queues of one end collide, by
/// chance or on purpose, they share the queued frames when queues change.
fn key(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Queues {
    /// Creates the queues of `spec`, for an end with
    /// these egress settings. `None` if there are none.
    pub fn of(spec: &[mux::QueueConfig], egress: &EgressConfig) -> Option<Box<Self>> {
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
        let queues: Box<[_]> = spec.iter().map(|queue| DrrQueue::new(queue, egress)).collect();
        let known = queues.iter().zip(spec).map(|(queue, spec)| QueueInfo {
            key: key(&spec.name),
            spec: queue.setting(),
            set: QueueParameters::default(),
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
            overhead_bytes: egress.overhead_bytes,
            places: vec![],
            free: NONE,
            waiting: 0,
            reserved,
            filled: 0,
            current: NONE,
            last: NONE,
            count: 0,
            weights: 0,
            left: 0,
            unit: 0,
            has_quantum: false,
        }))
    }

    /// Returns the number of queued frames.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the packets that are reserved for these queues, and how many of them hold frames.
    pub fn buffers(&self) -> Buffers {
        Buffers { reserved: self.reserved as usize, filled: self.filled as usize }
    }

    /// Returns the queue for a frame: the one that was chosen for it, or else that of its DSCP.
    #[inline]
    pub fn choose(&self, packet: &PacketBuffer) -> usize {
        match usize::from(packet.queue).checked_sub(1) {
            Some(chosen) if chosen < self.queues.len() => chosen,
            _ => self.of_dscp[usize::from(ecn::dscp(packet.bytes()))].into(),
        }
    }

    /// True if the queue can take one more frame: always the first, and others within its
    /// limits. Beyond its reserved packets the queue may have `spare` frames. These are the
    /// packets that its vnet could still get, so that a filled queue leaves some to the others.
    pub fn has_room(&self, queue: usize, packet: &PacketBuffer, spare: usize) -> bool {
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

    /// Counts a frame of this queue that is sent without waiting.
    pub fn passed(&mut self, queue: usize, packet: &PacketBuffer) {
        let here = &mut self.queues[queue];
        (here.sent, here.sent_bytes) = (here.sent + 1, here.sent_bytes + packet.len() as u64);
    }

    /// Counts a dropped frame of this queue.
    pub fn dropped(&mut self, queue: usize) {
        self.queues[queue].dropped += 1;
    }

    /// Queues a frame.
    pub fn put(&mut self, queue: usize, packet: PacketBuffer) {
        let bytes = packet.len() as u32;
        let place = FrameSlot { frame: Some(packet), next: NONE };
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

    /// Returns the bytes of the next frame, as counted and its own. `None` if no frame is queued.
    pub fn first(&mut self) -> Option<(usize, usize)> {
        loop {
            let current = self.current;
            let here = self.queues.get(current as usize)?;
            if !self.has_quantum {
                expect(&self.places, &self.queues, here.next);
                let here = &mut self.queues[current as usize];
                if self.left == 0 {
                    let frames = (FRAME_BYTES_MAX * u64::from(self.count)) << FRACTION_BITS;
                    (self.left, self.unit) =
                        (self.count, (frames / u64::from(self.weights)) as u32);
                }
                self.left -= 1;
                here.deficit += self.unit * u32::from(here.weight);
                self.has_quantum = true;
            }
            let here = &mut self.queues[current as usize];
            let first = self.places[here.first as usize].frame.as_ref();
            let bytes = first.map_or(0, PacketBuffer::len);
            let counted = bytes + self.overhead_bytes as usize;
            if here.deficit >> FRACTION_BITS >= counted as u32 {
                return Some((counted, bytes));
            }
            self.current = mem::replace(&mut here.next, NONE);
            self.has_quantum = false;
            self.append(current);
        }
    }

    /// Takes the next frame.
    pub fn pop(&mut self) -> Option<PacketBuffer> {
        let (counted, bytes) = self.first()?;
        let here = &mut self.queues[self.current as usize];
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
            self.current = mem::replace(&mut here.next, NONE);
            self.has_quantum = false;
        }
        packet
    }
}

/// Prefetches the data for the turn of `next`, and the queue behind it in the ring,
/// which in turn prefetches its own. With many queues none of this is in the caches.
#[inline]
fn expect(places: &[FrameSlot], queues: &[DrrQueue], next: u32) {
    let Some(next) = queues.get(next as usize) else { return };
    places.get(next.first as usize).inspect(|place| prefetch(*place));
    queues.get(next.next as usize).inspect(|queue| prefetch(*queue));
}

impl Queues {
    /// Prefetches the queues of frames that will be offered next.
    pub fn expect(&self, frames: &[PacketBuffer]) {
        frames.iter().for_each(|packet| prefetch(&self.queues[self.choose(packet)]));
    }

    /// Adds a queue that now has frames to the ring.
    fn enter(&mut self, queue: usize) {
        self.count += 1;
        self.weights += u32::from(self.queues[queue].weight);
        self.append(queue as u32);
    }

    fn append(&mut self, queue: u32) {
        match self.current {
            NONE => self.current = queue,
            _ => self.queues[self.last as usize].next = queue,
        }
        self.last = queue;
    }

    /// Continues where `old` stopped. Each queue gets the frames of the old queue with the same
    /// key, even beyond its limits. The first queue gets the frames of all others, behind its own.
    pub fn take_over(&mut self, old: &mut Self) {
        (self.places, self.free) = (mem::take(&mut old.places), old.free);
        self.waiting = mem::take(&mut old.waiting);
        for (was, known) in old.queues.iter_mut().zip(&old.known) {
            let Some(at) = self.find(known.key) else { continue };
            if known.set != QueueParameters::default() {
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
        // In the order of the old ring. The first queue
        // is entered only once for the frames of others.
        let mut next = old.current;
        while let Some(was) = old.queues.get(next as usize) {
            let at = self.find(old.known[next as usize].key).unwrap_or(0);
            if !self.is_in_ring(at) {
                self.enter(at);
            }
            next = was.next;
        }
        let key = |all: &Self| all.known.get(all.current as usize).map(|current| current.key);
        self.has_quantum = old.has_quantum && key(self) == key(old);
        self.filled = self.queues.iter().map(DrrQueue::filled).sum();
        old.filled = 0;
    }

    /// Returns the queue with this key.
    fn find(&self, key: u64) -> Option<usize> {
        let found = self.by_key.binary_search_by_key(&key, |at| self.known[usize::from(*at)].key);
        found.ok().map(|at| self.by_key[at].into())
    }

    fn is_in_ring(&self, queue: usize) -> bool {
        self.queues[queue].next != NONE || self.last as usize == queue && self.current != NONE
    }

    /// Sets a queue's parameters within those of its spec,
    /// whatever is queued. Ignores queues that do not exist.
    pub fn set(&mut self, queue: usize, to: QueueParameters) {
        let is_in_ring = queue < self.queues.len() && self.is_in_ring(queue);
        let (Some(here), Some(known)) = (self.queues.get_mut(queue), self.known.get_mut(queue))
        else {
            return;
        };
        let (is_set, was_set) =
            (to != QueueParameters::default(), known.set != QueueParameters::default());
        self.set = self.set + usize::from(is_set) - usize::from(was_set);
        known.set = to;
        let QueueParameters { weight, frames, bytes } = to.within(known.spec);
        if is_in_ring {
            self.weights = self.weights - u32::from(here.weight) + u32::from(weight);
        }
        (here.weight, here.frames_max, here.bytes_max) = (weight, frames, bytes);
    }

    /// Resets all queues to their specs.
    pub fn unset(&mut self) {
        for queue in 0..self.queues.len() {
            if self.set == 0 {
                return;
            }
            if self.known[queue].set != QueueParameters::default() {
                self.set(queue, QueueParameters::default());
            }
        }
    }

    /// Returns the parameters of a queue's spec, if the queue exists.
    pub fn spec(&self, queue: usize) -> Option<QueueParameters> {
        self.known.get(queue).map(|known| known.spec)
    }

    /// Returns the number of queues.
    pub fn count(&self) -> usize {
        self.queues.len()
    }

    /// Returns the states of the queues in order, beginning with queue `from`.
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

    /// Returns the counters of the queues in order, beginning with queue `from`.
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

    fn queue(name: &str, weight: u32) -> mux::QueueConfig {
        mux::QueueConfig { name: name.into(), weight, ..mux::QueueConfig::default() }
    }

    fn queues(weights: &[u32], overhead_bytes: u32) -> Queues {
        let all = weights.iter().zip(0..);
        let spec: Vec<_> = all.map(|(weight, at)| queue(&format!("q{at}"), *weight)).collect();
        let egress = EgressConfig { overhead_bytes, queue_frames: 4096, ..EgressConfig::default() };
        *Queues::of(&spec, &egress).unwrap()
    }

    fn sized(mut packet: PacketBuffer, bytes: usize, mark: u32) -> PacketBuffer {
        packet.set_len(bytes).unwrap();
        packet.mark = mark;
        packet
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u8, usize),
        Pop,
        /// Replaces the queues by these, with their weights.
        Change(Vec<(u8, u32)>),
        /// Sets the weight and length of one queue.
        Set(u8, QueueParameters),
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
                Step::Set(at, QueueParameters { weight, frames, bytes: 0 })
            }),
        ]
    }

    proptest! {
        /// Compares with a list for each queue. Frames of a queue keep their order, and none is
        /// lost or invented. While frames are queued, some are sent, whatever queues come and
        /// go. Reserved packets have space for the frames of their queue, and for no others.
        #[test]
        fn queues_match_a_model_of_lists(steps in prop::collection::vec(step(), 1..300)) {
            let (_pool, mut free) = Pool::new(steps.len()).unwrap();
            let buffers_of = |weight: u32| weight as usize % 5;
            let of = |all: &[(u8, u32)]| {
                let queue = |(name, weight): &(u8, u32)| mux::QueueConfig {
                    frames: 12, buffers: buffers_of(*weight) as u32, ..queue(&name.to_string(), *weight)
                };
                let spec: Vec<_> = all.iter().map(queue).collect();
                *Queues::of(&spec, &EgressConfig { overhead_bytes: 24, ..EgressConfig::default() }).unwrap()
            };
            let mut names = vec![(0, 1)];
            let mut set: BTreeMap<u8, QueueParameters> = BTreeMap::new();
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
                let expected = |(name, weight): &(u8, u32)| match set.get(name) {
                    Some(it) if it.weight > 0 => it.weight.into(),
                    _ => *weight,
                };
                prop_assert_eq!(has, names.iter().map(expected).collect::<Vec<_>>());
                let filled = names.iter().map(|(name, weight)| {
                    model.get(name).map_or(0, VecDeque::len).min(buffers_of(*weight))
                });
                let reserved = names.iter().map(|it| buffers_of(it.1)).sum();
                prop_assert_eq!(queues.buffers(), Buffers { reserved, filled: filled.sum() });
            }
        }

        /// If two queues always have frames, neither gets further ahead by weight
        /// than a quantum and a frame of each, however other queues come and go.
        #[test]
        fn drr_keeps_backlogged_queues_close(
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
                    let gap = (behind[0] - behind[1]).abs();
                    prop_assert!(gap <= unit + frames, "{gap} of {} and {}", unit, frames);
                }
            }
        }
    }

    /// Queues that always have frames, of all sizes, divide the bytes of each of three
    /// seconds within 0.5% of all. They are as near to their parts as two quanta and frames.
    #[test]
    fn drr_shares_match_weights_in_each_second() {
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
    fn frame_enters_the_chosen_or_dscp_queue() {
        let dscp =
            |name: &str, dscp: &[u8]| mux::QueueConfig { dscp: dscp.into(), ..queue(name, 1) };
        let spec = [dscp("rest", &[]), dscp("voice", &[46, 44]), dscp("bulk", &[8])];
        let queues = Queues::of(&spec, &EgressConfig::default()).unwrap();
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
