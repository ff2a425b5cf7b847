//! How long to look for work before going to sleep.
//!
//! Looking pays where what is waited for is made on another CPU. Where mux and guest share a CPU it
//! only keeps the other from making it. Nobody needs to be told which is the case: who slept
//! although it had looked looks for less long the next time, and now and then for as long as
//! ever; who finds something while looking goes on looking for twice as long as that took. (KVM's
//! halt polling adapts in this way.)

/// Rounds of looking, at most: some 40 µs, longer than it takes to wake a thread, so that who hands
/// something to a sleeper still looks when that has answered.
const ROUNDS_MAX: u32 = 512;

/// Of so many sleeps one comes after looking for as long as ever.
const PROBE_SLEEPS: u32 = 32;

/// What one thread has learnt.
#[derive(Debug)]
pub struct Patience {
    /// Rounds to look for.
    limit: u32,
    /// Rounds without work so far.
    idle: u32,
    /// Sleeps since the last that came after looking for as long as ever.
    sleeps: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self { limit: ROUNDS_MAX, idle: 0, sleeps: 0 }
    }
}

impl Patience {
    /// A round is over; true if it is time to sleep: call [`Patience::slept`] after.
    #[inline]
    pub fn ends(&mut self, found_work: bool) -> bool {
        if found_work {
            if self.idle > 0 {
                self.limit = self.limit.max(2 * self.idle).min(ROUNDS_MAX);
                self.idle = 0;
            }
            return false;
        }
        self.idle += 1;
        let probes = self.sleeps >= PROBE_SLEEPS;
        self.idle > if probes { ROUNDS_MAX } else { self.limit }
    }

    /// It slept, or was about to.
    pub fn slept(&mut self) {
        self.limit -= self.limit.div_ceil(4);
        self.sleeps = if self.sleeps >= PROBE_SLEEPS { 0 } else { self.sleeps + 1 };
        self.idle = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds until it sleeps, where work comes after `work_after` rounds.
    fn rounds(patience: &mut Patience, work_after: u32) -> Option<u32> {
        for round in 1..=work_after {
            if patience.ends(false) {
                patience.slept();
                return Some(round);
            }
        }
        patience.ends(true);
        None
    }

    #[test]
    fn looking_in_vain_is_given_up_and_tried_again() {
        let mut patience = Patience::default();
        let looked: Vec<_> = (0..200).filter_map(|_| rounds(&mut patience, u32::MAX)).collect();
        assert_eq!(looked[..4], [513, 385, 289, 217]);
        let later = &looked[30..];
        let long = later.iter().filter(|rounds| **rounds == 513).count();
        assert!((4..=7).contains(&long), "{looked:?}");
        assert_eq!(later.iter().filter(|rounds| **rounds == 1).count(), later.len() - long);
    }

    #[test]
    fn looking_that_pays_goes_on() {
        let mut patience = Patience::default();
        (0..50).for_each(|_| _ = rounds(&mut patience, u32::MAX));
        let slept = (0..1000).filter(|_| rounds(&mut patience, 40).is_some()).count();
        assert!(slept <= 33, "{slept}");
        // Every other time in vain.
        let slept = (0..1000).filter(|round| {
            let work_after = if round % 2 == 0 { 200 } else { u32::MAX };
            rounds(&mut patience, work_after).is_some() && round % 2 == 0
        });
        let slept = slept.count();
        assert!(slept <= 33, "{slept}");
    }
}
