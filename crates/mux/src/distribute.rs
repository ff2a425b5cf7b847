//! Which forwarding guest gets a frame.
//!
//! Only connected guests are members. Round-robin and weighted take turns (weighted: smooth, so
//! that a guest's turns are spread out and not in a row). By flow: a flow's slot of
//! [`FLOW_SLOTS`] belongs to the member that wins a weighted rendezvous for it, so that when a
//! member leaves only its own flows move, and when one joins it takes its share and no others
//! move.
//!
//! Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998);
//! weights as -w / ln(hash) (Schindelhauer and Schomaker, 2005).

use pdp_proto::mux::{FlowKey, Policy};
use pdp_wire::flow;

/// Slots that flows are spread over; the granularity of weights.
pub const FLOW_SLOTS: usize = 4096;

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

/// Picks guests for frames.
#[derive(Debug)]
pub struct Distributor {
    policy: Policy,
    key: FlowKey,
    members: Vec<Member>,
    /// Round-robin: whose turn it is.
    turn: usize,
    /// Weighted: how much each member is owed.
    credits: Vec<i64>,
    /// By flow: slot to guest.
    slots: Vec<u16>,
}

impl Distributor {
    /// Without members yet.
    pub fn new(policy: Policy, key: FlowKey) -> Self {
        Self { policy, key, members: vec![], turn: 0, credits: vec![], slots: vec![] }
    }

    /// Replaces the members.
    pub fn set_members(&mut self, members: Vec<Member>) {
        self.turn = 0;
        self.credits = vec![0; members.len()];
        self.slots = match (self.policy, members.is_empty()) {
            (Policy::Flow | Policy::Flowlet | Policy::Ordered, false) => {
                (0..FLOW_SLOTS).map(|slot| winner(&members, slot)).collect()
            }
            _ => vec![],
        };
        self.members = members;
    }

    /// The guest for `frame`; `None` without members.
    pub fn pick(&mut self, frame: &[u8]) -> Option<usize> {
        if let [only] = self.members.as_slice() {
            return Some(only.guest);
        }
        match self.policy {
            Policy::RoundRobin => {
                self.turn = if self.turn + 1 < self.members.len() { self.turn + 1 } else { 0 };
                self.members.get(self.turn).map(|member| member.guest)
            }
            Policy::Weighted => self.next_weighted(),
            Policy::Flow | Policy::Flowlet | Policy::Ordered => {
                let slot = self.flow(frame) as usize % FLOW_SLOTS;
                self.slots.get(slot).map(|guest| usize::from(*guest))
            }
        }
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

    fn frame(flow: u32) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[..4].copy_from_slice(&flow.to_be_bytes());
        frame
    }

    #[test]
    fn nobody_there_nobody_picked() {
        for policy in [Policy::RoundRobin, Policy::Weighted, Policy::Flow] {
            assert_eq!(distributor(policy, &[]).pick(&frame(0)), None);
            assert_eq!(distributor(policy, &[5]).pick(&[]), Some(0));
        }
    }

    #[test]
    fn bytes_of_the_vnets_choice_make_a_flow() {
        let key = FlowKey::Bytes(vec![Field { offset: 3, mask: vec![0x0f] }]);
        let mut distributor = Distributor::new(Policy::Flow, key);
        distributor.set_members(members(&[1; 8]));
        let mut seen = [None; 16];
        for flow in 0..256u32 {
            let guest = distributor.pick(&frame(flow));
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
                counts[distributor.pick(&[]).unwrap()] += 1;
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
                counts[distributor.pick(&[]).unwrap()] += 1;
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
            let before: Vec<_> = (0..2000).map(|flow| distributor.pick(&frame(flow))).collect();
            let mut rest = members(&weights);
            rest.remove(gone);
            distributor.set_members(rest);
            for (flow, guest) in before.iter().enumerate() {
                let now = distributor.pick(&frame(flow as u32));
                prop_assert_ne!(now, Some(gone));
                prop_assert!(*guest == Some(gone) || now == *guest);
            }
            distributor.set_members(members(&weights));
            for (flow, guest) in before.iter().enumerate() {
                prop_assert_eq!(distributor.pick(&frame(flow as u32)), *guest);
            }
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
