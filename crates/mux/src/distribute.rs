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

use pdp_proto::mux::{FlowKey, Policy};
use pdp_wire::flow;

/// Slots that flows are spread over; the granularity of weights.
pub const FLOW_SLOTS: usize = 4096;

/// Frames that one guest gets in a row with [`Policy::Ordered`].
pub const TURN_FRAMES: usize = 32;

/// A guest that frames may go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Where it is in the list of guests.
    pub guest: usize,
    /// Its number, by which its flows are found again when it comes back.
    pub number: u32,
    /// Its share, at least 1.
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
#[derive(Clone, Copy, Debug)]
struct Flowlet {
    guest: u16,
    /// What the guest had been given then.
    given: u64,
}

/// Picks guests for frames.
#[derive(Debug)]
pub struct Distributor {
    policy: Policy,
    key: FlowKey,
    members: Vec<Member>,
    /// Whose turn it is.
    turn: usize,
    /// Ordered: frames left of the turn.
    left: usize,
    /// Weighted: how much each member is owed.
    credits: Vec<i64>,
    /// By flow: slot to guest.
    slots: Vec<u16>,
    /// Flowlets by slot.
    flowlets: Vec<Flowlet>,
}

impl Distributor {
    /// Without members yet.
    pub fn new(policy: Policy, key: FlowKey) -> Self {
        Self {
            policy,
            key,
            members: vec![],
            turn: 0,
            left: 0,
            credits: vec![],
            slots: vec![],
            flowlets: vec![],
        }
    }

    /// Whether frames are to be sent on in the order in which they came, whatever their flow.
    pub fn is_ordered(&self) -> bool {
        self.policy == Policy::Ordered
    }

    /// Who frames may go to.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Replaces the members.
    pub fn set_members(&mut self, members: Vec<Member>) {
        (self.turn, self.left) = (0, 0);
        self.credits = vec![0; members.len()];
        (self.slots, self.flowlets) = (vec![], vec![]);
        match (self.policy, members.first()) {
            (Policy::Flow, Some(_)) => {
                self.slots = (0..FLOW_SLOTS).map(|slot| winner(&members, slot)).collect();
            }
            (Policy::Flowlet, Some(first)) => {
                self.flowlets = vec![Flowlet { guest: first.guest as u16, given: 0 }; FLOW_SLOTS];
            }
            _ => {}
        }
        self.members = members;
    }

    /// The guest for `frame`, and how many frames in a row it may get; `None` without members.
    #[inline]
    pub fn pick(
        &mut self,
        frame: &[u8],
        guests: &mut (impl Guests + ?Sized),
    ) -> Option<(usize, usize)> {
        if let [only] = self.members.as_slice() {
            return Some((only.guest, usize::MAX));
        }
        match self.policy {
            Policy::RoundRobin => {
                self.turn = if self.turn + 1 < self.members.len() { self.turn + 1 } else { 0 };
                self.members.get(self.turn).map(|member| (member.guest, 1))
            }
            Policy::Weighted => self.next_weighted().map(|guest| (guest, 1)),
            Policy::Flow => {
                let slot = self.flow(frame) as usize % FLOW_SLOTS;
                self.slots.get(slot).map(|guest| (usize::from(*guest), 1))
            }
            Policy::Flowlet => self.next_flowlet(frame, guests).map(|guest| (guest, 1)),
            Policy::Ordered => {
                if self.left == 0 {
                    self.turn = self.roomiest(guests)?;
                    self.left = TURN_FRAMES;
                }
                self.members.get(self.turn).map(|member| (member.guest, self.left))
            }
        }
    }

    /// `frames` of those that the last pick allowed were given.
    #[inline]
    pub fn gave(&mut self, frames: usize) {
        self.left = self.left.saturating_sub(frames);
    }

    /// Frames that there is room for: as many as one of the members has, or all of them together
    /// where any may get any frame.
    pub fn room(&self, guests: &mut (impl Guests + ?Sized)) -> usize {
        let rooms = self.members.iter().map(|member| guests.room(member.guest));
        if self.is_ordered() { rooms.sum() } else { rooms.max().unwrap_or(usize::MAX) }
    }

    /// The member with the most room; of equals the one that comes first after the last turn.
    fn roomiest(&self, guests: &mut (impl Guests + ?Sized)) -> Option<usize> {
        let count = self.members.len();
        let from_next = (1..=count).map(|step| (self.turn + step) % count);
        // Of equals the last is taken.
        from_next.rev().max_by_key(|at| guests.room(self.members[*at].guest))
    }

    /// Every member is owed its weight each turn; the one that is owed most gets the frame and
    /// pays for all.
    fn next_weighted(&mut self) -> Option<usize> {
        let mut total = 0;
        for (credit, member) in self.credits.iter_mut().zip(&self.members) {
            *credit += i64::from(member.weight);
            total += i64::from(member.weight);
        }
        let most = (0..self.members.len()).rev().max_by_key(|index| self.credits[*index])?;
        self.credits[most] -= total;
        Some(self.members[most].guest)
    }

    fn next_flowlet(&mut self, frame: &[u8], guests: &mut (impl Guests + ?Sized)) -> Option<usize> {
        let slot = self.flow(frame) as usize % FLOW_SLOTS;
        let mut guest = usize::from(self.flowlets.get(slot)?.guest);
        if guests.done(guest) >= self.flowlets[slot].given {
            self.turn = self.roomiest(guests)?;
            guest = self.members[self.turn].guest;
        }
        self.flowlets[slot] = Flowlet { guest: guest as u16, given: guests.given(guest) + 1 };
        Some(guest)
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

/// The guest that wins `slot`.
fn winner(members: &[Member], slot: usize) -> u16 {
    let score = |member: &Member| {
        let hash = mix(u64::from(member.number) << 32 | slot as u64);
        let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        -f64::from(member.weight.max(1)) / uniform.ln()
    };
    let best = members.iter().max_by(|a, b| score(a).total_cmp(&score(b)));
    best.map_or(0, |member| member.guest as u16)
}

/// The finalizer of SplitMix64.
fn mix(mut word: u64) -> u64 {
    word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_proto::mux::Field;
    use proptest::prelude::*;

    fn members(weights: &[u32]) -> Vec<Member> {
        let numbered = weights.iter().enumerate();
        numbered.map(|(at, &weight)| Member { guest: at, number: at as u32 + 7, weight }).collect()
    }

    fn distributor(policy: Policy, weights: &[u32]) -> Distributor {
        let mut distributor = Distributor::new(policy, FlowKey::Ip);
        distributor.set_members(members(weights));
        distributor
    }

    /// Guests that take and complete as the test says.
    #[derive(Clone, Debug, Default)]
    struct Fake {
        given: Vec<u64>,
        done: Vec<u64>,
    }

    impl Fake {
        const RING: usize = 64;

        fn of(count: usize) -> Self {
            Self { given: vec![0; count], done: vec![0; count] }
        }
    }

    impl Guests for Fake {
        fn room(&mut self, guest: usize) -> usize {
            Self::RING - (self.given[guest] - self.done[guest]) as usize
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
        let mut distributor = Distributor::new(Policy::Flow, key);
        distributor.set_members(members(&[1; 8]));
        let mut seen = [None; 16];
        for flow in 0..256u32 {
            let guest = pick(&mut distributor, &frame(flow));
            assert_eq!(*seen[flow as usize % 16].get_or_insert(guest), guest);
        }
        assert!(seen.iter().any(|guest| *guest != seen[0]));
    }

    proptest! {
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
            let mut rest = members(&weights);
            rest.remove(gone);
            distributor.set_members(rest);
            for (flow, guest) in before.iter().enumerate() {
                let now = pick(&mut distributor, &frame(flow as u32));
                prop_assert_ne!(now, Some(gone));
                prop_assert!(*guest == Some(gone) || now == *guest);
            }
            distributor.set_members(members(&weights));
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
                    continue;
                }
                guests.given[guest] += 1;
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
                let got = slots.iter().filter(|slot| usize::from(**slot) == guest).count() as f64;
                let fair = FLOW_SLOTS as f64 * f64::from(*weight) / f64::from(total);
                prop_assert!((got - fair).abs() < 6.0 * fair.sqrt() + 1.0, "{got} of {fair}");
            }
        }
    }
}
