//! Adaptive time of looking for work before going to sleep.
//!
//! Looking pays off if another CPU produces the work. If mux and guest share a CPU, it only delays
//! the producer. The algorithm adapts like KVM's halt polling and needs no configuration:
//! - A thread that looked and slept nevertheless looks for a shorter time before its next sleep.
//!   Now and then it looks for the longest time again.
//! - A thread that finds work while looking extends its limit to twice the time that this took.
//! - If the thread did not look for a while and then finds work, another thread had its CPU. That
//!   does not count as found.
//!
//! Unsolicited work and answers to given work have separate limits. A peer
//! that is woken on another CPU answers later than sleeping and waking take.
//! A thread that slept meanwhile adds its own wake-up to that.

/// Longest time of looking, nanoseconds: about the cost of going to sleep and waking up.
const BUSY_POLL_NS_MAX: u64 = 10_000;

/// Longest time of looking for an answer, nanoseconds: waking an idle virtual CPU, and the answer.
const ANSWER_POLL_NS_MAX: u64 = 50_000;

/// Longest gap between two looks, nanoseconds, unless another thread has the CPU.
const GAP_NS_MAX: u64 = 10_000;

/// One of this many sleeps follows a look of the longest time.
const PROBE_SLEEPS: u32 = 32;

/// Adaptive limits of one thread.
#[derive(Debug)]
pub struct Patience {
    anything: BusyPollLimit,
    answer: BusyPollLimit,
    busy_poll: Option<BusyPoll>,
}

/// Time of looking for one kind of work.
#[derive(Debug)]
struct BusyPollLimit {
    max_ns: u64,
    limit_ns: u64,
    /// Sleeps since the last one that followed a look of the longest time.
    sleeps: u32,
}

/// A look that has found nothing yet.
#[derive(Clone, Copy, Debug)]
struct BusyPoll {
    for_answer: bool,
    since_ns: u64,
    last_ns: u64,
}

impl BusyPollLimit {
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
            anything: BusyPollLimit::new(BUSY_POLL_NS_MAX),
            answer: BusyPollLimit::new(ANSWER_POLL_NS_MAX),
            busy_poll: None,
        }
    }
}

impl Patience {
    /// Ends a round. True if it is time to sleep; call [`Patience::slept`] afterwards. `now_ns`
    /// reads any monotonic clock, only in and after rounds without work. `for_answer` returns true
    /// if the answer to some given work is outstanding. It is called when looking begins.
    #[inline]
    pub fn ends(
        &mut self,
        found_work: bool,
        for_answer: impl FnOnce() -> bool,
        now_ns: impl FnOnce() -> u64,
    ) -> bool {
        if found_work {
            if let Some(busy_poll) = self.busy_poll.take() {
                self.found(busy_poll, now_ns());
            }
            return false;
        }
        let now_ns = now_ns();
        let begin = || BusyPoll { for_answer: for_answer(), since_ns: now_ns, last_ns: now_ns };
        let busy_poll = self.busy_poll.get_or_insert_with(begin);
        busy_poll.last_ns = now_ns;
        let busy_poll = *busy_poll;
        let limit = self.limit(busy_poll.for_answer);
        let longest_ns = if limit.probes() { limit.max_ns } else { limit.limit_ns };
        now_ns - busy_poll.since_ns >= longest_ns
    }

    fn limit(&mut self, for_answer: bool) -> &mut BusyPollLimit {
        if for_answer { &mut self.answer } else { &mut self.anything }
    }

    fn found(&mut self, busy_poll: BusyPoll, now_ns: u64) {
        let limit = self.limit(busy_poll.for_answer);
        if now_ns.saturating_sub(busy_poll.last_ns) > GAP_NS_MAX {
            return limit.impatient();
        }
        let polled_ns = now_ns.saturating_sub(busy_poll.since_ns);
        limit.limit_ns = limit.limit_ns.max(2 * polled_ns).min(limit.max_ns);
    }

    /// Notes that the thread did something else instead of looking.
    pub fn stop_polling(&mut self) {
        self.busy_poll = None;
    }

    /// Notes that the thread slept, or was about to.
    pub fn slept(&mut self) {
        // Without a look there was nothing to wait for, or no peer.
        let busy_poll = self.busy_poll.take();
        let limit = self.limit(busy_poll.is_some_and(|busy_poll| busy_poll.for_answer));
        limit.impatient();
        limit.sleeps = if limit.probes() { 0 } else { limit.sleeps + 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_NS: u64 = 100;

    /// Returns the time of looking before the sleep. `None`
    /// if work comes first, after `work_after` rounds.
    fn poll_ns(patience: &mut Patience, for_answer: bool, work_after: u64) -> Option<u64> {
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
    fn fruitless_busy_polling_backs_off_and_retries() {
        for (for_answer, max_ns) in [(false, BUSY_POLL_NS_MAX), (true, ANSWER_POLL_NS_MAX)] {
            let mut patience = Patience::default();
            let mut poll = || poll_ns(&mut patience, for_answer, u64::MAX);
            let polled: Vec<_> = (0..300).filter_map(|_| poll()).collect();
            assert_eq!(polled[..2], [max_ns, max_ns - max_ns / 4]);
            let later = &polled[40..];
            let long = later.iter().filter(|polled| **polled == max_ns).count();
            assert!((7..=9).contains(&long), "{polled:?}");
            let short = later.iter().filter(|polled| **polled <= ROUND_NS).count();
            assert_eq!(short, later.len() - long);
        }
    }

    #[test]
    fn fruitful_busy_polling_continues() {
        for (for_answer, rounds) in [(false, [25, 37]), (true, [125, 185])] {
            let mut patience = Patience::default();
            (0..50).for_each(|_| _ = poll_ns(&mut patience, for_answer, u64::MAX));
            let slept =
                (0..1000).filter(|_| poll_ns(&mut patience, for_answer, rounds[0]).is_some());
            let slept = slept.count();
            assert!(slept <= 33, "{slept}");
            // Every other time in vain.
            let slept = (0..1000).filter(|round| {
                let work_after = if round % 2 == 0 { rounds[1] } else { u64::MAX };
                poll_ns(&mut patience, for_answer, work_after).is_some() && round % 2 == 0
            });
            let slept = slept.count();
            assert!(slept <= 33, "{slept}");
        }
    }

    /// Timely answers say nothing about other work, and vice versa.
    #[test]
    fn busy_polling_learns_answers_separately() {
        let mut patience = Patience::default();
        for _ in 0..100 {
            poll_ns(&mut patience, false, u64::MAX);
            poll_ns(&mut patience, true, 200);
        }
        assert!(poll_ns(&mut patience, false, u64::MAX).unwrap() <= BUSY_POLL_NS_MAX);
        assert_eq!(poll_ns(&mut patience, true, 200), None);
    }

    /// On a shared CPU, work is there after another thread had the CPU.
    #[test]
    fn busy_polling_ignores_work_found_after_preemption() {
        for for_answer in [false, true] {
            let mut patience = Patience::default();
            for _ in 0..50 {
                assert!(!patience.ends(false, || for_answer, || 0));
                assert!(!patience.ends(true, || for_answer, || GAP_NS_MAX + 1));
            }
            assert!(poll_ns(&mut patience, for_answer, u64::MAX).unwrap() <= ROUND_NS);
        }
    }
}
