//! Limits looking for work to what a CPU quota allows.
//!
//! A thread that looks for work all the time uses a whole CPU. Under a quota, the kernel then stops
//! it for the rest of each period. Rings overflow during this pause, although the work itself needs
//! less than the quota. Therefore a thread that has used most of its quota stops looking and sleeps
//! ([`Thrift::is_spent`]) while frames gather. Each frame then costs less, and none is lost.
//! (Network cards moderate interrupts for the same reason.)

/// Part of a quota that looking and working may use before looking stops. The rest covers what is
/// not counted: the kernel's work, and its clock's error.
const USABLE: f64 = 0.75;

/// Largest credit or debt, nanoseconds of CPU time. It bounds the time of looking after a pause,
/// and the delay until looking begins again after much work.
const SAVED_NS_MAX: f64 = 250_000.0;

/// CPU time account of a thread with a quota. Until [`Thrift::allow`] it has a whole CPU.
#[derive(Debug, Default)]
pub struct Thrift {
    /// CPU time earned per nanosecond, if the quota is below one core.
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

    /// True if no CPU time is left for looking. `now_ns` is any monotonic clock. `cpu_ns` reads the
    /// thread's CPU time, and is only called under a quota below one core.
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

    /// Part of the time used by a thread that looks all the time, but sleeps when it has to.
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
    fn busy_polling_stays_within_the_cpu_quota() {
        for cores in [0.01, 0.1, 0.15, 0.5, 0.9] {
            let used = used(cores) / cores;
            assert!((0.65..0.8).contains(&used), "{used} of {cores} cores");
        }
        assert!(used(1.0) > 0.99, "who has all need not save");
    }

    #[test]
    fn cpu_quota_recovers_soon_after_heavy_work() {
        let mut thrift = Thrift::default();
        thrift.allow(0.1);
        assert!(!thrift.is_spent(1_000_000_000, || 0));
        // The saved credit does not last long.
        assert!(thrift.is_spent(1_001_000_000, || 1_000_000));
        // After a second of work alone.
        assert!(thrift.is_spent(2_000_000_000, || 1_000_000_000));
        assert!(!thrift.is_spent(2_010_000_000, || 1_000_000_000));
    }
}
