//! Chooses the forwarding guest for each frame.
//!
//! Only connected guests are members. The policies:
//!
//! - Round-robin and weighted: members take turns. With weights
//!   the turns of a guest are spread out, not in a row.
//! - By flow: each flow has one of [`FLOW_SLOTS`] slots. A slot belongs to the
//!   member that wins a weighted rendezvous for it. When a member leaves, only its
//!   own flows move. When one joins, it takes its part, and no other flows move.
//! - Flowlet: a slot stays with its member while that guest has any of its frames. Then
//!   it may move to the member with the most free space. So a flow moves after a pause
//!   longer than the guests' actual skew at that moment. No timeout has to be guessed.
//! - Ordered: [`TURN_FRAMES`] in a row go to the member with
//!   the most free space. [`crate::order`] restores the order.
//!
//! Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates"
//! (1998); weights as -w / ln(hash) (Schindelhauer and Schomaker, 2005); flowlets: Sinha,
//! Kandula and Katabi, "Harnessing TCP's burstiness with flowlet switching" (2004).

use std::hash::Hasher;

use pdp_proto::limits::GUESTS_MAX;
use pdp_proto::mux::{FlowKey, GuestDistribution};
use pdp_wire::flow;

use crate::order::CompletionOrder;

/// Slots for flows; the granularity of weights.
pub const FLOW_SLOTS: usize = 4096;

/// Frames that one guest gets in a row with the policy `ordered`.
pub const TURN_FRAMES: usize = 32;

/// A guest that may connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestCandidate {
    /// Number of the guest, by which it gets its old flows when it reconnects.
    pub number: u32,
    /// Weight; 0 counts as 1.
    pub weight: u32,
}

/// Load of the guests, by their index in the list. The distributor asks for it.
pub trait GuestLoads {
    /// Returns the frames that the guest can take now.
    fn room(&mut self, guest: usize) -> usize;
    /// Returns the frames ever given to the guest.
    fn given(&self, guest: usize) -> u64;
    /// Returns how many of these the guest has completed.
    fn done(&self, guest: usize) -> u64;
}

/// Guest of a slot's latest frame.
#[derive(Clone, Copy, Debug, Default)]
struct Flowlet {
    guest: u16,
    /// Frames that the guest had been given by then.
    given: u64,
}

/// Chooses guests for frames.
#[derive(Clone, Debug)]
pub struct Distributor {
    policy: GuestDistribution,
    key: FlowKey,
    weights: Vec<u32>,
    /// Guests that may get frames, by their index in the list.
    members: Vec<usize>,
    /// Index of the member whose turn it is.
    current: usize,
    /// Ordered: frames left of its turn.
    left: usize,
    /// Weighted: credit of each member.
    credits: Vec<i64>,
    /// By flow: the ranks of each guest, by slot.
    ranks: Vec<Vec<u16>>,
    /// By flow: rank of the guest that has the slot.
    slots: Vec<u16>,
    /// Flowlets by slot.
    flowlets: Vec<Flowlet>,
    /// Flowlet: slot of the last pick, and its new value once the frame is given.
    picked: Option<(usize, Flowlet)>,
}

impl Distributor {
    /// Creates a distributor for `guests`, none of which is a member
    /// yet. Flows are hashed into `slots`, a power of two. Takes up to
    /// 20 ms for [`GUESTS_MAX`] guests, so a worker must not call it.
    pub fn new(
        policy: GuestDistribution,
        key: FlowKey,
        guests: &[GuestCandidate],
        slots: usize,
    ) -> Self {
        assert!(slots.is_power_of_two() && guests.len() <= GUESTS_MAX);
        // A single guest needs no table.
        let of = |wanted| if policy == wanted && guests.len() > 1 { slots } else { 0 };
        Self {
            policy,
            key,
            weights: guests.iter().map(|guest| guest.weight.max(1)).collect(),
            members: Vec::with_capacity(guests.len()),
            current: 0,
            left: 0,
            credits: vec![0; guests.len()],
            ranks: ranks(guests, of(GuestDistribution::Flow)),
            slots: vec![u16::MAX; of(GuestDistribution::Flow)],
            flowlets: vec![Flowlet::default(); of(GuestDistribution::Flowlet)],
            picked: None,
        }
    }

    /// True if frames must be forwarded in the order of their arrival, whatever their flow.
    pub fn is_ordered(&self) -> bool {
        self.policy == GuestDistribution::Ordered
    }

    /// Replaces the members, given by their index in the list. Frames that
    /// the guests have (`holds`: guest number and count of frames) go before
    /// the frames that they get from now on, if the policy keeps an order.
    pub fn set_members(
        &mut self,
        members: impl Iterator<Item = usize> + Clone,
        holds: impl Iterator<Item = (u32, usize)>,
        order: &mut CompletionOrder,
    ) {
        if members.clone().eq(self.members.iter().copied()) {
            return;
        }
        let needs_barrier = match self.policy {
            GuestDistribution::RoundRobin | GuestDistribution::Weighted => false,
            GuestDistribution::Flow | GuestDistribution::Flowlet => true,
            // If there were members before, the order has noted all frames of the guests.
            GuestDistribution::Ordered => self.members.is_empty(),
        };
        if needs_barrier {
            order.barrier(holds);
        }
        self.members.clear();
        self.members.extend(members);
        (self.current, self.left, self.picked) = (0, 0, None);
        self.credits.fill(0);
        self.flowlets.fill(Flowlet::default());
        self.slots.fill(u16::MAX);
        for member in &self.members {
            for (best, rank) in self.slots.iter_mut().zip(self.ranks[*member].iter()) {
                *best = (*best).min(*rank);
            }
        }
    }

    /// Returns the guest for `frame`, and how many frames
    /// in a row it may get. `None` if there are no members.
    #[inline]
    pub fn pick(
        &mut self,
        frame: &[u8],
        guests: &mut (impl GuestLoads + ?Sized),
    ) -> Option<(usize, usize)> {
        if let [only] = self.members.as_slice() {
            return Some((*only, usize::MAX));
        }
        match self.policy {
            GuestDistribution::RoundRobin => {
                self.current =
                    if self.current + 1 < self.members.len() { self.current + 1 } else { 0 };
                self.members.get(self.current).map(|guest| (*guest, 1))
            }
            GuestDistribution::Weighted => self.next_weighted().map(|guest| (guest, 1)),
            GuestDistribution::Flow => {
                self.members.first()?;
                Some((self.guest_of_flow(frame).into(), 1))
            }
            GuestDistribution::Flowlet => self.next_flowlet(frame, guests).map(|guest| (guest, 1)),
            GuestDistribution::Ordered => self.next_turn(guests),
        }
    }

    /// Chooses the guest for each of `frames` at once, if the choice depends on the frame
    /// alone: by flow, with several members. Otherwise returns false and chooses none.
    #[inline]
    pub fn pick_by_flow<'a>(
        &self,
        frames: impl Iterator<Item = &'a [u8]>,
        picks: &mut Vec<u8>,
    ) -> bool {
        let by_flow = self.policy == GuestDistribution::Flow && self.members.len() > 1;
        if by_flow {
            picks.clear();
            picks.extend(frames.map(|frame| self.guest_of_flow(frame)));
        }
        by_flow
    }

    #[inline]
    fn guest_of_flow(&self, frame: &[u8]) -> u8 {
        let slot = self.flow(frame) as usize & (self.slots.len() - 1);
        (self.slots[slot] % GUESTS_MAX as u16) as u8
    }

    /// Records that `frames` of the frames which the last pick allowed were given.
    #[inline]
    pub fn gave(&mut self, frames: usize) {
        self.left = self.left.saturating_sub(frames);
        if let Some((slot, flowlet)) = self.picked.take_if(|_| frames > 0) {
            self.flowlets[slot] = flowlet;
        }
    }

    /// Returns how many frames the members can take: the most of
    /// any one member, or the sum if any member may get any frame.
    pub fn room(&self, guests: &mut (impl GuestLoads + ?Sized)) -> usize {
        let rooms = self.members.iter().map(|guest| guests.room(*guest));
        if self.is_ordered() { rooms.sum() } else { rooms.max().unwrap_or(usize::MAX) }
    }

    /// Returns the member with the most free space, and how much
    /// it has. Among equals, the first after the last turn wins.
    fn roomiest(&self, guests: &mut (impl GuestLoads + ?Sized)) -> Option<(usize, usize)> {
        let count = self.members.len();
        let from_next = (1..=count).map(|step| (self.current + step) % count);
        // Among equals, `max_by_key` returns the last.
        let rooms = from_next.rev().map(|at| (at, guests.room(self.members[at])));
        rooms.max_by_key(|(_, room)| *room)
    }

    /// Chooses the next guest of an ordered node. A turn also ends
    /// when its guest has no space left, because others may have some.
    fn next_turn(&mut self, guests: &mut (impl GuestLoads + ?Sized)) -> Option<(usize, usize)> {
        let mut room = 0;
        if self.left > 0 {
            room = guests.room(self.members[self.current]);
        }
        if room == 0 {
            (self.current, room) = self.roomiest(guests)?;
            self.left = TURN_FRAMES;
        }
        // If no guest has space, a whole turn is refused at once.
        let count = if room == 0 { self.left } else { self.left.min(room) };
        Some((self.members[self.current], count))
    }

    /// Adds each member's weight to its credit. The member
    /// with the most credit gets the frame and pays for all.
    fn next_weighted(&mut self) -> Option<usize> {
        let mut total = 0;
        for member in &self.members {
            let weight = i64::from(self.weights[*member]);
            self.credits[*member] += weight;
            total += weight;
        }
        let most = self.members.iter().rev().copied().max_by_key(|it| self.credits[*it])?;
        self.credits[most] -= total;
        Some(most)
    }

    fn next_flowlet(
        &mut self,
        frame: &[u8],
        guests: &mut (impl GuestLoads + ?Sized),
    ) -> Option<usize> {
        self.members.first()?;
        let slot = self.flow(frame) as usize & (self.flowlets.len() - 1);
        let Flowlet { guest, given } = self.flowlets[slot];
        let mut guest = usize::from(guest);
        if guests.done(guest) >= given {
            (self.current, _) = self.roomiest(guests)?;
            guest = self.members[self.current];
        }
        let given = guests.given(guest) + 1;
        self.picked = Some((slot, Flowlet { guest: guest as u16, given }));
        Some(guest)
    }

    /// Returns the state that the next picks depend on, beside the policy and the guests.
    #[cfg(test)]
    pub(crate) fn state(&self) -> impl std::hash::Hash {
        let flowlets: Vec<_> = self.flowlets.iter().map(|it| (it.guest, it.given)).collect();
        (self.members.clone(), self.current, self.left, flowlets)
    }

    fn flow(&self, frame: &[u8]) -> u32 {
        match &self.key {
            FlowKey::Ip => flow::ip(frame),
            FlowKey::Bytes(fields) => {
                flow::bytes(frame, fields.iter().map(|field| (field.offset, &field.mask[..])))
            }
        }
    }
}

const _: () = assert!(GUESTS_MAX * GUESTS_MAX <= u16::MAX as usize, "a rank is below u16::MAX");

/// Returns the rank of each guest in each slot, times [`GUESTS_MAX`],
/// plus the guest's index. Rank 0 has the slot when all guests are
/// members. So the lowest value among the members says who has the slot.
fn ranks(guests: &[GuestCandidate], slots: usize) -> Vec<Vec<u16>> {
    let mut ranks = vec![Vec::with_capacity(slots); guests.len()];
    let mut scores = Vec::with_capacity(guests.len());
    for slot in 0..slots {
        scores.clear();
        scores.extend(guests.iter().map(|guest| score(guest, slot)).zip(0..));
        // Among equals, the last comes first.
        scores.sort_by(|(a, one): &(f64, u16), (b, other)| b.total_cmp(a).then(other.cmp(one)));
        for (rank, (_, guest)) in (0..).zip(&scores) {
            ranks[usize::from(*guest)].push(rank * GUESTS_MAX as u16 + guest);
        }
    }
    ranks
}

/// Returns a guest's score. The member with the highest score has the slot.
fn score(guest: &GuestCandidate, slot: usize) -> f64 {
    let mut hash = flow::FlowHash::default();
    [guest.number.into(), slot as u64, 0].into_iter().for_each(|word| hash.write_u64(word));
    let uniform = ((hash.finish() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -f64::from(guest.weight.max(1)) / uniform.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_proto::mux::MaskedField;
    use proptest::prelude::*;

    fn join(distributor: &mut Distributor, members: impl Iterator<Item = usize> + Clone) {
        distributor.set_members(members, std::iter::empty(), &mut CompletionOrder::default());
    }

    fn distributor_by(policy: GuestDistribution, key: FlowKey, weights: &[u32]) -> Distributor {
        let numbered = (7..).zip(weights);
        let guests: Vec<_> =
            numbered.map(|(number, &weight)| GuestCandidate { number, weight }).collect();
        let mut distributor = Distributor::new(policy, key, &guests, FLOW_SLOTS);
        join(&mut distributor, 0..weights.len());
        distributor
    }

    fn distributor(policy: GuestDistribution, weights: &[u32]) -> Distributor {
        distributor_by(policy, FlowKey::Ip, weights)
    }

    /// Guests that take and complete frames as the test says.
    #[derive(Clone, Debug, Default)]
    struct Fake {
        rings: Vec<usize>,
        given: Vec<u64>,
        done: Vec<u64>,
    }

    impl Fake {
        const RING: usize = 64;

        fn of(count: usize) -> Self {
            Self::with_rings(vec![Self::RING; count])
        }

        fn with_rings(rings: Vec<usize>) -> Self {
            Self { given: vec![0; rings.len()], done: vec![0; rings.len()], rings }
        }
    }

    impl GuestLoads for Fake {
        fn room(&mut self, guest: usize) -> usize {
            self.rings[guest] - (self.given[guest] - self.done[guest]) as usize
        }

        fn given(&self, guest: usize) -> u64 {
            self.given[guest]
        }

        fn done(&self, guest: usize) -> u64 {
            self.done[guest]
        }
    }

    /// Picks a guest, with ample space at all guests.
    fn pick(distributor: &mut Distributor, frame: &[u8]) -> Option<usize> {
        distributor.pick(frame, &mut Fake::of(100)).map(|(guest, _)| guest)
    }

    const ALL: [GuestDistribution; 5] = [
        GuestDistribution::RoundRobin,
        GuestDistribution::Weighted,
        GuestDistribution::Flow,
        GuestDistribution::Flowlet,
        GuestDistribution::Ordered,
    ];

    fn frame(flow: u32) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[..4].copy_from_slice(&flow.to_be_bytes());
        frame
    }

    #[test]
    fn distributor_without_guests_picks_none() {
        for policy in ALL {
            assert_eq!(pick(&mut distributor(policy, &[]), &frame(0)), None);
            assert_eq!(pick(&mut distributor(policy, &[5]), &[]), Some(0));
        }
    }

    #[test]
    fn configured_bytes_define_a_flow() {
        let key = FlowKey::Bytes(vec![MaskedField { offset: 3, mask: vec![0x0f] }]);
        let mut distributor = distributor_by(GuestDistribution::Flow, key, &[1; 8]);
        let mut seen = [None; 16];
        for flow in 0..256u32 {
            let guest = pick(&mut distributor, &frame(flow));
            assert_eq!(*seen[flow as usize % 16].get_or_insert(guest), guest);
        }
        assert!(seen.iter().any(|guest| *guest != seen[0]));
    }

    /// Gives frames as the mux does. Returns the number of refused frames.
    fn give(distributor: &mut Distributor, guests: &mut Fake, mut frames: usize) -> usize {
        let mut refused = 0;
        while frames > 0 {
            let (guest, count) = distributor.pick(&[], guests).unwrap();
            let count = count.min(frames);
            let given = count.min(guests.room(guest));
            guests.given[guest] += given as u64;
            distributor.gave(given);
            refused += count - given;
            frames -= count;
        }
        refused
    }

    #[test]
    fn distributor_turn_ends_when_the_ring_is_full() {
        let mut distributor = distributor(GuestDistribution::Ordered, &[1; 3]);
        let mut guests = Fake::with_rings(vec![20, 10, 5]);
        assert_eq!(give(&mut distributor, &mut guests, 35), 0);
        assert_eq!(guests.given, [20, 10, 5]);
        assert_eq!(give(&mut distributor, &mut guests, 100), 100);
        guests.done[1] = 3;
        assert_eq!(give(&mut distributor, &mut guests, 4), 1);
    }

    /// A refused frame is in no guest, so it keeps its flow with none.
    #[test]
    fn flowlet_may_move_after_its_frame_was_refused() {
        let mut distributor = distributor(GuestDistribution::Flowlet, &[1; 2]);
        let mut guests = Fake::with_rings(vec![4, 4]);
        let (first, _) = distributor.pick(&frame(1), &mut guests).unwrap();
        guests.given[first] = 4;
        distributor.gave(1);
        // Three frames of another flow follow its frame.
        // Its frame completes, and the next one is refused.
        guests.given[first] = 5;
        guests.done[first] = 1;
        assert_eq!(guests.room(first), 0);
        let other = 1 - first;
        guests.given[other] = 4;
        let (full, _) = distributor.pick(&frame(1), &mut guests).unwrap();
        assert_eq!(guests.room(full), 0);
        distributor.gave(0);
        guests.done[1 - full] = guests.given[1 - full];
        assert_eq!(distributor.pick(&frame(1), &mut guests), Some((1 - full, 1)));
    }

    proptest! {
        /// If frames go to any guest with space, none is refused while a guest has some.
        #[test]
        fn distributor_accepts_frames_while_any_guest_has_space(
            rings in prop::collection::vec(1usize..100, 2..6),
            steps in prop::collection::vec((1usize..100, 0usize..6, 0u64..100), 1..50),
        ) {
            let mut distributor = distributor(GuestDistribution::Ordered, &vec![1; rings.len()]);
            let mut guests = Fake::with_rings(rings);
            for (frames, completes, count) in steps {
                let room = distributor.room(&mut guests);
                let refused = give(&mut distributor, &mut guests, frames);
                prop_assert_eq!(refused, frames.saturating_sub(room));
                let at = completes % guests.done.len();
                guests.done[at] = guests.given[at].min(guests.done[at] + count);
            }
        }

        #[test]
        fn round_robin_is_even(count in 2usize..20, rounds in 1usize..20) {
            let mut distributor = distributor(GuestDistribution::RoundRobin, &vec![1; count]);
            let mut counts = vec![0; count];
            for _ in 0..count * rounds {
                counts[pick(&mut distributor, &[]).unwrap()] += 1;
            }
            prop_assert!(counts.iter().all(|got| *got == rounds));
        }

        /// A whole cycle matches the weights exactly. At any
        /// moment each member is off by less than one turn.
        #[test]
        fn weighted_round_robin_is_smooth(weights in prop::collection::vec(1u32..50, 2..6)) {
            let total: u32 = weights.iter().sum();
            let mut distributor = distributor(GuestDistribution::Weighted, &weights);
            let mut counts = vec![0u32; weights.len()];
            for step in 1..=total {
                counts[pick(&mut distributor, &[]).unwrap()] += 1;
                for (count, weight) in counts.iter().zip(&weights) {
                    let ideal = f64::from(step) * f64::from(*weight) / f64::from(total);
                    prop_assert!((f64::from(*count) - ideal).abs() < weights.len() as f64);
                }
            }
            prop_assert_eq!(counts, weights);
        }

        /// A leaving guest moves only its own flows. When it comes back, it gets the same flows.
        #[test]
        fn flows_stay_with_their_guest(weights in prop::collection::vec(100u32..1000, 2..9), gone: prop::sample::Index) {
            let gone = gone.index(weights.len());
            let mut distributor = distributor(GuestDistribution::Flow, &weights);
            let before: Vec<_> = (0..2000).map(|flow| pick(&mut distributor, &frame(flow))).collect();
            join(&mut distributor, (0..weights.len()).filter(|guest| *guest != gone));
            for (flow, guest) in before.iter().enumerate() {
                let now = pick(&mut distributor, &frame(flow as u32));
                prop_assert_ne!(now, Some(gone));
                prop_assert!(*guest == Some(gone) || now == *guest);
            }
            join(&mut distributor, 0..weights.len());
            for (flow, guest) in before.iter().enumerate() {
                prop_assert_eq!(pick(&mut distributor, &frame(flow as u32)), *guest);
            }
        }

        /// A flow's frames come back in order. The flow never moves to another guest while
        /// its guest still has one of its frames. An idle guest gets flows that paused.
        #[test]
        fn flowlets_move_only_with_no_frame_in_flight(
            steps in prop::collection::vec((0u32..20, 0usize..3, 0u64..4), 1..300),
        ) {
            let mut distributor = distributor(GuestDistribution::Flowlet, &[1; 3]);
            let mut guests = Fake::of(3);
            // By flow: the guest of its last frame, and the frame's number there.
            let mut last: [Option<(usize, u64)>; 20] = [None; 20];
            for (flow, completes, frames) in steps {
                guests.done[completes] = guests.given[completes].min(guests.done[completes] + frames);
                let (guest, count) = distributor.pick(&frame(flow), &mut guests).unwrap();
                prop_assert_eq!(count, 1);
                if guests.room(guest) == 0 {
                    distributor.gave(0);
                    continue;
                }
                guests.given[guest] += 1;
                distributor.gave(1);
                if let Some((was, number)) = last[flow as usize].replace((guest, guests.given[guest]))
                    && was != guest
                {
                    prop_assert!(guests.done[was] >= number);
                    let room = guests.room(guest) + 1;
                    prop_assert!((0..3).all(|other| guests.room(other) <= room));
                }
            }
        }

        /// Turns go to the guest with the most space. A guest that
        /// stands still gets at most two turns while others continue.
        #[test]
        fn ordered_policy_picks_the_guest_with_most_space(stalled in 0usize..3, picks in 3usize..50) {
            let mut distributor = distributor(GuestDistribution::Ordered, &[1; 3]);
            let mut guests = Fake::of(3);
            for _ in 0..picks {
                let (guest, count) = distributor.pick(&[], &mut guests).unwrap();
                prop_assert_eq!(count, TURN_FRAMES);
                guests.given[guest] += count as u64;
                distributor.gave(count);
                (0..3).filter(|at| *at != stalled).for_each(|at| guests.done[at] = guests.given[at]);
            }
            prop_assert!(guests.given[stalled] <= TURN_FRAMES as u64);
            let others: Vec<_> = (0..3).filter(|at| *at != stalled).map(|at| guests.given[at]).collect();
            prop_assert!(others[0].abs_diff(others[1]) <= 2 * TURN_FRAMES as u64, "{others:?}");
            prop_assert_eq!(distributor.room(&mut guests), 3 * Fake::RING - guests.given[stalled] as usize);
        }

        #[test]
        fn flows_are_distributed_by_weight(weights in prop::collection::vec(100u32..1000, 2..6)) {
            let slots = distributor(GuestDistribution::Flow, &weights).slots;
            let total: u32 = weights.iter().sum();
            for (guest, weight) in weights.iter().enumerate() {
                let got = slots.iter().filter(|rank| usize::from(**rank) % GUESTS_MAX == guest).count() as f64;
                let ideal = FLOW_SLOTS as f64 * f64::from(*weight) / f64::from(total);
                prop_assert!((got - ideal).abs() < 6.0 * ideal.sqrt() + 1.0, "{got} of {ideal}");
            }
        }
    }
}
