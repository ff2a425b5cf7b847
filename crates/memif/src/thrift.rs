//! How much looking for work a quota leaves room for.
//!
//! Who looks for work all the time uses all of a CPU. Where the kernel allows it a part of one, it then
//! stands still for the rest of each period, for longer than rings hold what comes meanwhile, although
//! the work itself would have needed less. Who has used most of its part therefore stops looking and
//! rests ([`Thrift::is_spent`]) for a time in which frames gather: each costs less then, and nothing is
//! lost. (Network cards moderate interrupts for the same reason.)

/// What looking and working may use of a quota before looking stops; the rest is for what is not counted:
/// the kernel's part, and its clock's error.
const USABLE: f64 = 0.75;

/// What can be saved up or owed, nanoseconds of CPU time: looking after a pause, and how soon looking
/// begins again after much work.
const SAVED_NS_MAX: f64 = 250_000.0;

/// The books of who has a quota; it has a CPU's worth, and need not save, until told otherwise.
#[derive(Debug, Default)]
pub struct Thrift {
    /// Nanoseconds of CPU time that each nanosecond brings, where it has to save.
    income: Option<f64>,
    saved_ns: f64,
    now_ns: u64,
    cpu_ns: u64,
}

impl Thrift {
    /// Sets the quota, in cores.
    pub fn allow(&mut self, cores: f64) {
        self.income = (cores < 1.0).then_some(USABLE * cores);
    }

    /// Whether there is nothing left to look for work with. `now_ns` is any clock that does not go back,
    /// `cpu_ns` its CPU time, which is asked only where it has to save.
    pub fn is_spent(&mut self, now_ns: u64, cpu_ns: impl FnOnce() -> u64) -> bool {
        let Some(income) = self.income else { return false };
        let cpu_ns = cpu_ns();
        let earned = income * now_ns.saturating_sub(self.now_ns) as f64;
        let used = cpu_ns.saturating_sub(self.cpu_ns) as f64;
        self.saved_ns = (self.saved_ns + earned - used).clamp(-SAVED_NS_MAX, SAVED_NS_MAX);
        (self.now_ns, self.cpu_ns) = (now_ns, cpu_ns);
        self.saved_ns < 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAP_NS: u64 = 250_000;
    const LOOK_NS: u64 = 1_000;

    /// The part of the time that one uses which looks all the time, but rests when it has to.
    fn used(cores: f64) -> f64 {
        let mut thrift = Thrift::default();
        thrift.allow(cores);
        let (mut now_ns, mut cpu_ns) = (0, 0);
        while now_ns < 1_000_000_000 {
            now_ns += LOOK_NS;
            cpu_ns += LOOK_NS;
            if thrift.is_spent(now_ns, || cpu_ns) {
                now_ns += NAP_NS;
            }
        }
        cpu_ns as f64 / now_ns as f64
    }

    #[test]
    fn looking_uses_most_of_a_quota_and_no_more() {
        for cores in [0.01, 0.1, 0.15, 0.5, 0.9] {
            let used = used(cores) / cores;
            assert!((0.65..0.8).contains(&used), "{used} of {cores} cores");
        }
        assert!(used(1.0) > 0.99, "who has all need not save");
    }

    #[test]
    fn who_did_little_may_look_at_once_and_who_did_much_again_soon() {
        let mut thrift = Thrift::default();
        thrift.allow(0.1);
        assert!(!thrift.is_spent(1_000_000_000, || 0));
        // Whatever it has saved, it is not for long.
        assert!(thrift.is_spent(1_001_000_000, || 1_000_000));
        // After a second of work alone.
        assert!(thrift.is_spent(2_000_000_000, || 1_000_000_000));
        assert!(!thrift.is_spent(2_010_000_000, || 1_000_000_000));
    }
}
