//! Timers of many numbered objects. A due object is found without checking all of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Time of an object without a timer.
const NEVER: u64 = u64::MAX;

/// One time for each number, or none.
#[derive(Debug, Default)]
pub struct Timers {
    /// Times by number, nanoseconds.
    due_ns: Vec<u64>,
    /// All of these times, the earliest on top. It may also have
    /// outdated, later times of the same number, which are ignored.
    heap: BinaryHeap<Reverse<(u64, u16)>>,
}

impl Timers {
    /// Sets the time of `number` to `at_ns`, unless it is already earlier.
    pub fn set(&mut self, number: u16, at_ns: u64) {
        let at = usize::from(number);
        if self.due_ns.len() <= at {
            self.due_ns.resize(at + 1, NEVER);
        }
        if at_ns < self.due_ns[at] {
            self.due_ns[at] = at_ns;
            self.heap.push(Reverse((at_ns, number)));
        }
        if self.heap.len() > 2 * self.due_ns.len() {
            self.heap.clear();
            let due_ns = self.due_ns.iter().copied().zip(0..);
            self.heap.extend(due_ns.filter(|due| due.0 != NEVER).map(Reverse));
        }
    }

    /// Returns a number whose time has come, the earliest first, and clears its time.
    pub fn pop(&mut self, now_ns: u64) -> Option<u16> {
        loop {
            let Reverse((at_ns, number)) = *self.heap.peek().filter(|top| top.0.0 <= now_ns)?;
            self.heap.pop();
            let due_ns = &mut self.due_ns[usize::from(number)];
            if *due_ns == at_ns {
                *due_ns = NEVER;
                return Some(number);
            }
        }
    }

    /// Returns a lower bound of all times, nanoseconds. `None` if there are none.
    pub fn next_ns(&self) -> Option<u64> {
        self.heap.peek().map(|top| top.0.0)
    }

    /// Returns the numbers that have a time.
    pub fn numbers(&self) -> impl Iterator<Item = u16> {
        let due_ns = self.due_ns.iter().zip(0..);
        due_ns.filter(|(due_ns, _)| **due_ns != NEVER).map(|(_, number)| number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with a scan that checks each number when its
        /// time has come. At an earlier time, neither finds any.
        #[test]
        fn timers_match_a_linear_scan(
            steps in prop::collection::vec((0u16..40, 0u64..1000, 0u64..30), 1..500),
        ) {
            let (mut timers, mut scan, mut now_ns) = (Timers::default(), [NEVER; 40], 0);
            for (number, ahead_ns, pause_ns) in steps {
                timers.set(number, now_ns + ahead_ns);
                let due_ns = &mut scan[usize::from(number)];
                *due_ns = (*due_ns).min(now_ns + ahead_ns);
                now_ns += pause_ns;
                let mut last_ns = 0;
                let earliest_ns = scan.iter().copied().min();
                prop_assert!(timers.next_ns() <= earliest_ns);
                while let Some(popped) = timers.pop(now_ns) {
                    let due_ns = std::mem::replace(&mut scan[usize::from(popped)], NEVER);
                    prop_assert!(last_ns <= due_ns && due_ns <= now_ns);
                    last_ns = due_ns;
                }
                prop_assert!(scan.iter().all(|due_ns| *due_ns > now_ns));
                let waits = (0..40).filter(|at| scan[usize::from(*at)] != NEVER);
                prop_assert!(timers.numbers().eq(waits));
                prop_assert!(timers.heap.len() <= 2 * scan.len());
                prop_assert!(timers.next_ns().is_none_or(|at_ns| at_ns > now_ns));
            }
        }
    }
}
