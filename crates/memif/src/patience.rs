//! How long to look for work before going to sleep.
//!
//! Looking pays where what is waited for is made on another CPU. Where mux and guest share a CPU it
//! only keeps the other from making it. Nobody needs to be told which is the case: who slept
//! although it had looked looks for less long the next time, and now and then for as long as
//! ever; who finds something while looking goes on looking for twice as long as that took. (KVM's
//! halt polling adapts in this way.) Who finds something after longer than it may look was not
//! looking, but another on its CPU was at work.

/// Time of looking, at most, nanoseconds: about what going to sleep and waking up cost.
/// something to a sleeper still looks when that has answered.
const LOOK_NS_MAX: u64 = 10_000;

/// Of so many sleeps one comes after looking for as long as ever.
const PROBE_SLEEPS: u32 = 32;

/// What one thread has learnt.
#[derive(Debug)]
pub struct Patience {
    /// How long to look, nanoseconds.
    limit_ns: u64,
    /// Since when it looks in vain.
    since_ns: Option<u64>,
    /// Sleeps since the last that came after looking for as long as ever.
    sleeps: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self { limit_ns: LOOK_NS_MAX, since_ns: None, sleeps: 0 }
    }
}

impl Patience {
    /// A round is over; true if it is time to sleep: call [`Patience::slept`] after. `now_ns` is
    /// any clock that does not go back; it is asked only in and after rounds without work.
    #[inline]
    pub fn ends(&mut self, found_work: bool, now_ns: impl FnOnce() -> u64) -> bool {
        if found_work {
            if let Some(since_ns) = self.since_ns.take() {
                let looked_ns = now_ns().saturating_sub(since_ns);
                if looked_ns <= LOOK_NS_MAX {
                    self.limit_ns = self.limit_ns.max(2 * looked_ns).min(LOOK_NS_MAX);
                } else {
                    self.impatient();
                }
            }
            return false;
        }
        let now_ns = now_ns();
        let looked_ns = now_ns - *self.since_ns.get_or_insert(now_ns);
        let probes = self.sleeps >= PROBE_SLEEPS;
        looked_ns >= if probes { LOOK_NS_MAX } else { self.limit_ns }
    }

    /// It slept, or was about to.
    pub fn slept(&mut self) {
        self.impatient();
        self.sleeps = if self.sleeps >= PROBE_SLEEPS { 0 } else { self.sleeps + 1 };
        self.since_ns = None;
    }

    fn impatient(&mut self) {
        self.limit_ns -= self.limit_ns / 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_NS: u64 = 100;

    /// How long it looks until it sleeps; `None` if it does not, since work comes after so many
    /// rounds.
    fn looks(patience: &mut Patience, work_after: u64) -> Option<u64> {
        for round in 0..work_after {
            if patience.ends(false, || round * ROUND_NS) {
                patience.slept();
                return Some(round * ROUND_NS);
            }
        }
        patience.ends(true, || work_after * ROUND_NS);
        None
    }

    #[test]
    fn looking_in_vain_is_given_up_and_tried_again() {
        let mut patience = Patience::default();
        let looked: Vec<_> = (0..300).filter_map(|_| looks(&mut patience, u64::MAX)).collect();
        assert_eq!(looked[..4], [10_000, 7_500, 5_700, 4_300]);
        let later = &looked[30..];
        let long = later.iter().filter(|looked| **looked == LOOK_NS_MAX).count();
        assert!((7..=9).contains(&long), "{looked:?}");
        assert_eq!(later.iter().filter(|looked| **looked <= ROUND_NS).count(), later.len() - long);
    }

    #[test]
    fn looking_that_pays_goes_on() {
        let mut patience = Patience::default();
        (0..50).for_each(|_| _ = looks(&mut patience, u64::MAX));
        let slept = (0..1000).filter(|_| looks(&mut patience, 25).is_some()).count();
        assert!(slept <= 33, "{slept}");
        // Every other time in vain.
        let slept = (0..1000).filter(|round| {
            let work_after = if round % 2 == 0 { 37 } else { u64::MAX };
            looks(&mut patience, work_after).is_some() && round % 2 == 0
        });
        let slept = slept.count();
        assert!(slept <= 33, "{slept}");
    }

    /// On a CPU that is shared, work is there after another had the CPU.
    #[test]
    fn what_another_made_on_the_same_cpu_does_not_count_as_found() {
        let mut patience = Patience::default();
        for _ in 0..50 {
            assert!(!patience.ends(false, || 0));
            assert!(!patience.ends(true, || 3_000_000));
        }
        assert!(looks(&mut patience, u64::MAX).unwrap() <= ROUND_NS);
    }
}
