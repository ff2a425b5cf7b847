//! Which forwarding guest gets a frame.
//!
//! Only connected guests are members. Round-robin and weighted take turns (weighted: smooth, so
//! that a guest's turns are spread out and not in a row). By flow: a flow's slot of
//! [`FLOW_SLOTS`] belongs to the member that wins a weighted rendezvous for it, so that when a
//! member leaves only its own flows move, and when one joins it takes its share and no others
//! move. Flowlet: a slot stays with its member while any of its frames is in that guest, and may
//! then go to the member with the most room: so a flow moves after a pause that is longer than
//! the guests' skew, as it is at that moment and not as somebody guessed it. Ordered: to the member
//! with the most room, [`TURN_FRAMES`] in a row; the order is kept by [`crate::order`].
//!
//! Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998);
//! weights as -w / ln(hash) (Schindelhauer and Schomaker, 2005); flowlets: Sinha, Kandula and
//! Katabi, "Harnessing TCP's burstiness with flowlet switching" (2004).

use std::hash::Hasher;

use pdp_proto::limits::GUESTS_MAX;
use pdp_proto::mux::{FlowKey, Policy};
use pdp_wire::flow;

use crate::order::Order;

/// Slots that flows are spread over; the granularity of weights.
pub const FLOW_SLOTS: usize = 4096;

/// Frames that one guest gets in a row with [`Policy::Ordered`].
pub const TURN_FRAMES: usize = 32;

/// A guest that may connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its number, by which its flows are found again when it comes back.
    pub number: u32,
    /// Its share; 0 is taken for 1.
    pub weight: u32,
}

/// What a distributor asks about the guests, by their place in the list.
pub trait Guests {
    /// Frames that the guest has room for.
    fn room(&mut self, guest: usize) -> usize;
    /// Frames that were ever given to it.
    fn given(&self, guest: usize) -> u64;
    /// How many of these it has not any more.
    fn done(&self, guest: usize) -> u64;
}

/// Where the frames of a slot's flows went last.
#[derive(Clone, Copy, Debug, Default)]
struct Flowlet {
    guest: u16,
    /// What the guest had been given then.
    given: u64,
}

/// Picks guests for frames.
#[derive(Clone, Debug)]
pub struct Distributor {
    policy: Policy,
    key: FlowKey,
    weights: Vec<u32>,
    /// Those that frames may go to, by their places in the list of guests.
    members: Vec<usize>,
    /// Whose turn it is.
    turn: usize,
    /// Ordered: frames left of the turn.
    left: usize,
    /// Weighted: how much each member is owed.
    credits: Vec<i64>,
    /// By flow: the ranks of each guest, by slot.
    ranks: Vec<Vec<u16>>,
    /// By flow: the rank of the guest that has the slot.
    slots: Vec<u16>,
    /// Flowlets by slot.
    flowlets: Vec<Flowlet>,
    /// Flowlet: the slot of the last pick, and what it is if its frame is given.
    picked: Option<(usize, Flowlet)>,
}

impl Distributor {
    /// For `guests`, none of which is a member yet; a flow falls into one of `slots`, a power of two.
    /// Not for a worker: it takes up to 20 ms for [`GUESTS_MAX`] guests.
    pub fn new(policy: Policy, key: FlowKey, guests: &[Candidate], slots: usize) -> Self {
        assert!(slots.is_power_of_two() && guests.len() <= GUESTS_MAX);
        // A single guest needs no table.
        let of = |wanted| if policy == wanted && guests.len() > 1 { slots } else { 0 };
        Self {
            policy,
            key,
            weights: guests.iter().map(|guest| guest.weight.max(1)).collect(),
            members: Vec::with_capacity(guests.len()),
            turn: 0,
            left: 0,
            credits: vec![0; guests.len()],
            ranks: ranks(guests, of(Policy::Flow)),
            slots: vec![u16::MAX; of(Policy::Flow)],
            flowlets: vec![Flowlet::default(); of(Policy::Flowlet)],
            picked: None,
        }
    }

    /// Whether frames are to be sent on in the order in which they came, whatever their flow.
    pub fn is_ordered(&self) -> bool {
        self.policy == Policy::Ordered
    }

    /// Replaces those that frames may go to, given by their places in the list. What the guests have
    /// (`holds`: number and count of frames) is sent on before what they get from now on, where the
    /// policy keeps an order.
    pub fn set_members(
        &mut self,
        members: impl Iterator<Item = usize> + Clone,
        holds: impl Iterator<Item = (u32, usize)>,
        order: &mut Order,
    ) {
        if members.clone().eq(self.members.iter().copied()) {
            return;
        }
        let needs_barrier = match self.policy {
            Policy::RoundRobin | Policy::Weighted => false,
            Policy::Flow | Policy::Flowlet => true,
            // Later all that the guests have was noted.
            Policy::Ordered => self.members.is_empty(),
        };
        if needs_barrier {
            order.barrier(holds);
        }
        self.members.clear();
        self.members.extend(members);
        (self.turn, self.left, self.picked) = (0, 0, None);
        self.credits.fill(0);
        self.flowlets.fill(Flowlet::default());
        self.slots.fill(u16::MAX);
        for member in &self.members {
            for (best, rank) in self.slots.iter_mut().zip(self.ranks[*member].iter()) {
                *best = (*best).min(*rank);
            }
        }
    }

    /// The guest for `frame`, and how many frames in a row it may get; `None` without members.
    #[inline]
    pub fn pick(
        &mut self,
        frame: &[u8],
        guests: &mut (impl Guests + ?Sized),
    ) -> Option<(usize, usize)> {
        if let [only] = self.members.as_slice() {
            return Some((*only, usize::MAX));
        }
        match self.policy {
            Policy::RoundRobin => {
                self.turn = if self.turn + 1 < self.members.len() { self.turn + 1 } else { 0 };
                self.members.get(self.turn).map(|guest| (*guest, 1))
            }
            Policy::Weighted => self.next_weighted().map(|guest| (guest, 1)),
            Policy::Flow => {
                self.members.first()?;
                Some((self.guest_of_flow(frame).into(), 1))
            }
            Policy::Flowlet => self.next_flowlet(frame, guests).map(|guest| (guest, 1)),
            Policy::Ordered => self.next_turn(guests),
        }
    }

    /// The guest for each of `frames` at once, where that depends on nothing but the frame: by flow, over
    /// several. False, and nothing is said, elsewhere.
    #[inline]
    pub fn pick_by_flow<'a>(
        &self,
        frames: impl Iterator<Item = &'a [u8]>,
        picks: &mut Vec<u8>,
    ) -> bool {
        let by_flow = self.policy == Policy::Flow && self.members.len() > 1;
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

    /// `frames` of those that the last pick allowed were given.
    #[inline]
    pub fn gave(&mut self, frames: usize) {
        self.left = self.left.saturating_sub(frames);
        if let Some((slot, flowlet)) = self.picked.take_if(|_| frames > 0) {
            self.flowlets[slot] = flowlet;
        }
    }

    /// Frames that there is room for: as many as one of the members has, or all of them together
    /// where any may get any frame.
    pub fn room(&self, guests: &mut (impl Guests + ?Sized)) -> usize {
        let rooms = self.members.iter().map(|guest| guests.room(*guest));
        if self.is_ordered() { rooms.sum() } else { rooms.max().unwrap_or(usize::MAX) }
    }

    /// The member with the most room, and how much; of equals the one that comes first after the last
    /// turn.
    fn roomiest(&self, guests: &mut (impl Guests + ?Sized)) -> Option<(usize, usize)> {
        let count = self.members.len();
        let from_next = (1..=count).map(|step| (self.turn + step) % count);
        // Of equals the last is taken.
        let rooms = from_next.rev().map(|at| (at, guests.room(self.members[at])));
        rooms.max_by_key(|(_, room)| *room)
    }

    /// A turn ends when its guest has no room any more: others may have some.
    fn next_turn(&mut self, guests: &mut (impl Guests + ?Sized)) -> Option<(usize, usize)> {
        let mut room = 0;
        if self.left > 0 {
            room = guests.room(self.members[self.turn]);
        }
        if room == 0 {
            (self.turn, room) = self.roomiest(guests)?;
            self.left = TURN_FRAMES;
        }
        // Where nobody has room a whole turn is refused at once.
        let count = if room == 0 { self.left } else { self.left.min(room) };
        Some((self.members[self.turn], count))
    }

    /// Every member is owed its weight each turn; the one that is owed most gets the frame and
    /// pays for all.
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

    fn next_flowlet(&mut self, frame: &[u8], guests: &mut (impl Guests + ?Sized)) -> Option<usize> {
        self.members.first()?;
        let slot = self.flow(frame) as usize & (self.flowlets.len() - 1);
        let Flowlet { guest, given } = self.flowlets[slot];
        let mut guest = usize::from(guest);
        if guests.done(guest) >= given {
            (self.turn, _) = self.roomiest(guests)?;
            guest = self.members[self.turn];
        }
        let given = guests.given(guest) + 1;
        self.picked = Some((slot, Flowlet { guest: guest as u16, given }));
        Some(guest)
    }

    /// What the next picks depend on, beside the policy and the guests.
    #[cfg(test)]
    pub(crate) fn state(&self) -> impl std::hash::Hash {
        let flowlets: Vec<_> = self.flowlets.iter().map(|it| (it.guest, it.given)).collect();
        (self.members.clone(), self.turn, self.left, flowlets)
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

/// By guest and slot: its rank there, 0 for the guest whose slot it is when all are members, times
/// [`GUESTS_MAX`], plus the guest. So the least of the members' ranks says whose slot it is.
fn ranks(guests: &[Candidate], slots: usize) -> Vec<Vec<u16>> {
    let mut ranks = vec![Vec::with_capacity(slots); guests.len()];
    let mut scores = Vec::with_capacity(guests.len());
    for slot in 0..slots {
        scores.clear();
        scores.extend(guests.iter().map(|guest| score(guest, slot)).zip(0..));
        // Of equals the last comes first.
        scores.sort_by(|(a, one): &(f64, u16), (b, other)| b.total_cmp(a).then(other.cmp(one)));
        for (rank, (_, guest)) in (0..).zip(&scores) {
            ranks[usize::from(*guest)].push(rank * GUESTS_MAX as u16 + guest);
        }
    }
    ranks
}

/// The member with the highest score has the slot.
fn score(guest: &Candidate, slot: usize) -> f64 {
    let mut hash = flow::Hash::default();
    [guest.number.into(), slot as u64, 0].into_iter().for_each(|word| hash.write_u64(word));
    let uniform = ((hash.finish() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -f64::from(guest.weight.max(1)) / uniform.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_proto::mux::Field;
    use proptest::prelude::*;

    fn join(distributor: &mut Distributor, members: impl Iterator<Item = usize> + Clone) {
        distributor.set_members(members, std::iter::empty(), &mut Order::default());
    }

    fn distributor_by(policy: Policy, key: FlowKey, weights: &[u32]) -> Distributor {
        let numbered = (7..).zip(weights);
        let guests: Vec<_> =
            numbered.map(|(number, &weight)| Candidate { number, weight }).collect();
        let mut distributor = Distributor::new(policy, key, &guests, FLOW_SLOTS);
        join(&mut distributor, 0..weights.len());
        distributor
    }

    fn distributor(policy: Policy, weights: &[u32]) -> Distributor {
        distributor_by(policy, FlowKey::Ip, weights)
    }

    /// Guests that take and complete as the test says.
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

    impl Guests for Fake {
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

    /// Picks where it does not matter how much room there is.
    fn pick(distributor: &mut Distributor, frame: &[u8]) -> Option<usize> {
        distributor.pick(frame, &mut Fake::of(100)).map(|(guest, _)| guest)
    }

    const ALL: [Policy; 5] =
        [Policy::RoundRobin, Policy::Weighted, Policy::Flow, Policy::Flowlet, Policy::Ordered];

    fn frame(flow: u32) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[..4].copy_from_slice(&flow.to_be_bytes());
        frame
    }

    #[test]
    fn nobody_there_nobody_picked() {
        for policy in ALL {
            assert_eq!(pick(&mut distributor(policy, &[]), &frame(0)), None);
            assert_eq!(pick(&mut distributor(policy, &[5]), &[]), Some(0));
        }
    }

    #[test]
    fn bytes_of_the_vnets_choice_make_a_flow() {
        let key = FlowKey::Bytes(vec![Field { offset: 3, mask: vec![0x0f] }]);
        let mut distributor = distributor_by(Policy::Flow, key, &[1; 8]);
        let mut seen = [None; 16];
        for flow in 0..256u32 {
            let guest = pick(&mut distributor, &frame(flow));
            assert_eq!(*seen[flow as usize % 16].get_or_insert(guest), guest);
        }
        assert!(seen.iter().any(|guest| *guest != seen[0]));
    }

    /// Gives frames as the mux does; returns how many were refused.
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
    fn a_turn_ends_with_its_guests_room() {
        let mut distributor = distributor(Policy::Ordered, &[1; 3]);
        let mut guests = Fake::with_rings(vec![20, 10, 5]);
        assert_eq!(give(&mut distributor, &mut guests, 35), 0);
        assert_eq!(guests.given, [20, 10, 5]);
        assert_eq!(give(&mut distributor, &mut guests, 100), 100);
        guests.done[1] = 3;
        assert_eq!(give(&mut distributor, &mut guests, 4), 1);
    }

    /// What was refused is in no guest, and keeps its flow nowhere.
    #[test]
    fn a_flowlet_whose_frame_was_refused_may_move() {
        let mut distributor = distributor(Policy::Flowlet, &[1; 2]);
        let mut guests = Fake::with_rings(vec![4, 4]);
        let (first, _) = distributor.pick(&frame(1), &mut guests).unwrap();
        guests.given[first] = 4;
        distributor.gave(1);
        // Three of another flow are behind its frame; it completes, and the next is refused.
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
        /// Where all go where there is room, none is refused while anybody has some.
        #[test]
        fn nothing_is_refused_while_any_guest_has_room(
            rings in prop::collection::vec(1usize..100, 2..6),
            steps in prop::collection::vec((1usize..100, 0usize..6, 0u64..100), 1..50),
        ) {
            let mut distributor = distributor(Policy::Ordered, &vec![1; rings.len()]);
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
        fn turns_are_even(count in 2usize..20, rounds in 1usize..20) {
            let mut distributor = distributor(Policy::RoundRobin, &vec![1; count]);
            let mut counts = vec![0; count];
            for _ in 0..count * rounds {
                counts[pick(&mut distributor, &[]).unwrap()] += 1;
            }
            prop_assert!(counts.iter().all(|got| *got == rounds));
        }

        /// Over a whole cycle exactly the weights; at any moment off by less than one turn for
        /// each member.
        #[test]
        fn weights_are_kept_smoothly(weights in prop::collection::vec(1u32..50, 2..6)) {
            let total: u32 = weights.iter().sum();
            let mut distributor = distributor(Policy::Weighted, &weights);
            let mut counts = vec![0u32; weights.len()];
            for turn in 1..=total {
                counts[pick(&mut distributor, &[]).unwrap()] += 1;
                for (count, weight) in counts.iter().zip(&weights) {
                    let fair = f64::from(turn) * f64::from(*weight) / f64::from(total);
                    prop_assert!((f64::from(*count) - fair).abs() < weights.len() as f64);
                }
            }
            prop_assert_eq!(counts, weights);
        }

        /// Who leaves takes its own flows along only; who comes back finds them again.
        #[test]
        fn flows_stay(weights in prop::collection::vec(100u32..1000, 2..9), gone: prop::sample::Index) {
            let gone = gone.index(weights.len());
            let mut distributor = distributor(Policy::Flow, &weights);
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

        /// A flow's frames come back in order: it never goes to another guest while one of its
        /// frames is in the one it had. And whoever has nothing to do gets flows that paused.
        #[test]
        fn flowlets_move_only_when_nothing_of_them_is_on_its_way(
            steps in prop::collection::vec((0u32..20, 0usize..3, 0u64..4), 1..300),
        ) {
            let mut distributor = distributor(Policy::Flowlet, &[1; 3]);
            let mut guests = Fake::of(3);
            // By flow: guest and number of its last frame there.
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

        /// Turns go to who has the most room: whoever stands still gets no more than two turns
        /// while others go on.
        #[test]
        fn turns_of_the_ordered_go_where_there_is_room(stalled in 0usize..3, turns in 3usize..50) {
            let mut distributor = distributor(Policy::Ordered, &[1; 3]);
            let mut guests = Fake::of(3);
            for _ in 0..turns {
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
        fn flows_are_shared_by_weight(weights in prop::collection::vec(100u32..1000, 2..6)) {
            let slots = distributor(Policy::Flow, &weights).slots;
            let total: u32 = weights.iter().sum();
            for (guest, weight) in weights.iter().enumerate() {
                let got = slots.iter().filter(|rank| usize::from(**rank) % GUESTS_MAX == guest).count() as f64;
                let fair = FLOW_SLOTS as f64 * f64::from(*weight) / f64::from(total);
                prop_assert!((got - fair).abs() < 6.0 * fair.sqrt() + 1.0, "{got} of {fair}");
            }
        }
    }
}
