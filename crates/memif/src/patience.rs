//! How long to look for work before going to sleep.
//!
//! Looking pays where what is waited for is made on another CPU. Where mux and guest share a CPU it
//! only keeps the other from making it. Nobody needs to be told which is the case: who slept
//! although it had looked looks for less long the next time, and now and then for as long as
//! ever; who finds something while looking goes on looking for twice as long as that took. (KVM's
//! halt polling adapts in this way.) Who finds something after not having looked for a while was not
//! looking, but another on its CPU was at work.
//!
//! What may come at any time and the answer of somebody who was given work are waited for each in
//! its own way: who is woken on another CPU answers later than going to sleep and waking up take,
//! and who slept meanwhile adds its own waking up to that.

/// Time of looking, at most, nanoseconds: about what going to sleep and waking up cost.
const LOOK_NS_MAX: u64 = 10_000;

/// Time of looking for an answer, at most, nanoseconds: what waking an idle virtual CPU takes, and
/// the answer.
const LOOK_ANSWER_NS_MAX: u64 = 50_000;

/// Who looks does so at least as often as this, nanoseconds, unless another has the CPU.
const GAP_NS_MAX: u64 = 10_000;

/// Of so many sleeps one comes after looking for as long as ever.
const PROBE_SLEEPS: u32 = 32;

/// What one thread has learnt.
#[derive(Debug)]
pub struct Patience {
    anything: Limit,
    answer: Limit,
    look: Option<Look>,
}

/// How long to look for one kind of thing.
#[derive(Debug)]
struct Limit {
    max_ns: u64,
    limit_ns: u64,
    /// Sleeps since the last that came after looking for as long as ever.
    sleeps: u32,
}

/// Looking in vain.
#[derive(Clone, Copy, Debug)]
struct Look {
    for_answer: bool,
    since_ns: u64,
    last_ns: u64,
}

impl Limit {
    fn new(max_ns: u64) -> Self {
        Self { max_ns, limit_ns: max_ns, sleeps: 0 }
    }

    fn probes(&self) -> bool {
        self.sleeps >= PROBE_SLEEPS
    }

    fn impatient(&mut self) {
        self.limit_ns -= self.limit_ns / 4;
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            anything: Limit::new(LOOK_NS_MAX),
            answer: Limit::new(LOOK_ANSWER_NS_MAX),
            look: None,
        }
    }
}

impl Patience {
    /// A round is over; true if it is time to sleep: call [`Patience::slept`] after. `now_ns` is
    /// any clock that does not go back; it is asked only in and after rounds without work.
    /// `for_answer` says whether somebody has been given work whose answer is still to come; it is
    /// asked when looking begins.
    #[inline]
    pub fn ends(
        &mut self,
        found_work: bool,
        for_answer: impl FnOnce() -> bool,
        now_ns: impl FnOnce() -> u64,
    ) -> bool {
        if found_work {
            if let Some(look) = self.look.take() {
                self.found(look, now_ns());
            }
            return false;
        }
        let now_ns = now_ns();
        let begin = || Look { for_answer: for_answer(), since_ns: now_ns, last_ns: now_ns };
        let look = self.look.get_or_insert_with(begin);
        look.last_ns = now_ns;
        let look = *look;
        let limit = self.limit(look.for_answer);
        let longest_ns = if limit.probes() { limit.max_ns } else { limit.limit_ns };
        now_ns - look.since_ns >= longest_ns
    }

    fn limit(&mut self, for_answer: bool) -> &mut Limit {
        if for_answer { &mut self.answer } else { &mut self.anything }
    }

    fn found(&mut self, look: Look, now_ns: u64) {
        let limit = self.limit(look.for_answer);
        if now_ns.saturating_sub(look.last_ns) > GAP_NS_MAX {
            return limit.impatient();
        }
        let looked_ns = now_ns.saturating_sub(look.since_ns);
        limit.limit_ns = limit.limit_ns.max(2 * looked_ns).min(limit.max_ns);
    }

    /// It did something else, and has not looked.
    pub fn looked_away(&mut self) {
        self.look = None;
    }

    /// It slept, or was about to.
    pub fn slept(&mut self) {
        // Without a look there was nothing to wait for, or no peer.
        let look = self.look.take();
        let limit = self.limit(look.is_some_and(|look| look.for_answer));
        limit.impatient();
        limit.sleeps = if limit.probes() { 0 } else { limit.sleeps + 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_NS: u64 = 100;

    /// How long it looks until it sleeps; `None` if it does not, since work comes after so many
    /// rounds.
    fn looks(patience: &mut Patience, for_answer: bool, work_after: u64) -> Option<u64> {
        for round in 0..work_after {
            if patience.ends(false, || for_answer, || round * ROUND_NS) {
                patience.slept();
                return Some(round * ROUND_NS);
            }
        }
        patience.ends(true, || for_answer, || work_after * ROUND_NS);
        None
    }

    #[test]
    fn looking_in_vain_is_given_up_and_tried_again() {
        for (for_answer, max_ns) in [(false, LOOK_NS_MAX), (true, LOOK_ANSWER_NS_MAX)] {
            let mut patience = Patience::default();
            let mut look = || looks(&mut patience, for_answer, u64::MAX);
            let looked: Vec<_> = (0..300).filter_map(|_| look()).collect();
            assert_eq!(looked[..2], [max_ns, max_ns - max_ns / 4]);
            let later = &looked[40..];
            let long = later.iter().filter(|looked| **looked == max_ns).count();
            assert!((7..=9).contains(&long), "{looked:?}");
            let short = later.iter().filter(|looked| **looked <= ROUND_NS).count();
            assert_eq!(short, later.len() - long);
        }
    }

    #[test]
    fn looking_that_pays_goes_on() {
        for (for_answer, rounds) in [(false, [25, 37]), (true, [125, 185])] {
            let mut patience = Patience::default();
            (0..50).for_each(|_| _ = looks(&mut patience, for_answer, u64::MAX));
            let slept = (0..1000).filter(|_| looks(&mut patience, for_answer, rounds[0]).is_some());
            let slept = slept.count();
            assert!(slept <= 33, "{slept}");
            // Every other time in vain.
            let slept = (0..1000).filter(|round| {
                let work_after = if round % 2 == 0 { rounds[1] } else { u64::MAX };
                looks(&mut patience, for_answer, work_after).is_some() && round % 2 == 0
            });
            let slept = slept.count();
            assert!(slept <= 33, "{slept}");
        }
    }

    /// That answers come says nothing about how soon anything else does, nor the other way round.
    #[test]
    fn answers_are_waited_for_in_their_own_way() {
        let mut patience = Patience::default();
        for _ in 0..100 {
            looks(&mut patience, false, u64::MAX);
            looks(&mut patience, true, 200);
        }
        assert!(looks(&mut patience, false, u64::MAX).unwrap() <= LOOK_NS_MAX);
        assert_eq!(looks(&mut patience, true, 200), None);
    }

    /// On a CPU that is shared, work is there after another had the CPU.
    #[test]
    fn what_another_made_on_the_same_cpu_does_not_count_as_found() {
        for for_answer in [false, true] {
            let mut patience = Patience::default();
            for _ in 0..50 {
                assert!(!patience.ends(false, || for_answer, || 0));
                assert!(!patience.ends(true, || for_answer, || GAP_NS_MAX + 1));
            }
            assert!(looks(&mut patience, for_answer, u64::MAX).unwrap() <= ROUND_NS);
        }
    }
}
