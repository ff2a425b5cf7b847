//! CPU time that the host took away during a measurement.
//!
//! A virtual CPU that was taken away for a while spoils the figures of its programs and of those
//! that waited for them. So each sample records the stolen fraction. A sample that lost more than
//! [`STOLEN_MAX`] is repeated, at most [`REPEATS_MAX`] times; the least disturbed one counts.
//!
//! Limit: the kernel counts ticks of 10 ms, which limits the resolution for short samples. Source:
//! proc_stat(5), field `steal`.

use std::fs;

/// Fraction of a CPU's time above which a sample is repeated.
pub const STOLEN_MAX: f64 = 0.02;

/// Most repeats of a sample.
pub const REPEATS_MAX: u32 = 2;

/// Number of times from `user` to `steal` in a line of
/// /proc/stat. Later ones are included in `user` and `nice`.
const TIMES: usize = 8;

/// CPU times since the machine was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticks(Vec<Tick>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tick {
    stolen: u64,
    all: u64,
}

impl Ticks {
    /// Reads the current times. Empty if the kernel does not report them.
    pub fn now() -> Self {
        Self::read(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    fn read(text: &str) -> Self {
        let tick = |line: &str| {
            let rest = line.strip_prefix("cpu")?;
            let (_number, times) = rest.split_once(' ').filter(|(number, _)| !number.is_empty())?;
            let times: Vec<u64> = times.split(' ').map_while(|word| word.parse().ok()).collect();
            let times = times.get(..TIMES)?;
            Some(Tick { stolen: times[TIMES - 1], all: times.iter().sum() })
        };
        Self(text.lines().filter_map(tick).collect())
    }

    /// Stolen fraction since an earlier moment, of the CPU that lost most.
    pub fn stolen_since(&self, earlier: &Self) -> f64 {
        let share = |(now, then): (&Tick, &Tick)| {
            let all = now.all.saturating_sub(then.all);
            now.stolen.saturating_sub(then.stolen) as f64 / all.max(1) as f64
        };
        self.0.iter().zip(&earlier.0).map(share).fold(0.0, f64::max)
    }
}

/// Repeats a measurement until it lost at most [`STOLEN_MAX`], gave no result, or may not be
/// repeated. Returns the one that lost least. `measure` returns a sample and its loss.
pub fn least_disturbed<T>(
    mut measure: impl FnMut() -> Option<(T, f64)>,
    mut may_repeat: impl FnMut() -> bool,
) -> Option<(T, f64)> {
    let mut best = measure()?;
    for _ in 0..REPEATS_MAX {
        if best.1 <= STOLEN_MAX || !may_repeat() {
            break;
        }
        let Some(again) = measure() else { break };
        if again.1 < best.1 {
            best = again;
        }
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steal_counts_the_most_disturbed_cpu() {
        let read = |stolen: [u64; 2]| {
            let [a, b] = stolen;
            Ticks::read(&format!(
                "cpu  9 9 9 9 9 9 9 9 0 0\n\
                 cpu0 1 2 3 {} 5 6 7 {a} 900 0\n\
                 cpu1 1 2 3 {} 5 6 7 {b} 900 0\nintr 5\n",
                1000 - a,
                2000 - b
            ))
        };
        assert_eq!(read([0, 0]).0, [Tick { stolen: 0, all: 1024 }, Tick { stolen: 0, all: 2024 }]);
        let later = Ticks(vec![Tick { stolen: 3, all: 1124 }, Tick { stolen: 20, all: 2224 }]);
        assert_eq!(later.stolen_since(&read([0, 0])), 0.1);
        assert_eq!(later.stolen_since(&later), 0.0);
        assert_eq!(Ticks::read("").stolen_since(&later), 0.0);
    }

    /// Returns the loss of the kept sample, given each
    /// sample's loss, and the number of measurements.
    fn kept(shares: &[Option<f64>], may_repeat: bool) -> (Option<f64>, usize) {
        let mut taken = 0;
        let measure = || {
            taken += 1;
            shares[taken - 1].map(|share| (share, share))
        };
        let best = least_disturbed(measure, || may_repeat);
        (best.map(|(sample, _)| sample), taken)
    }

    #[test]
    fn disturbed_samples_repeat_and_the_best_is_kept() {
        assert_eq!(kept(&[Some(0.0)], true), (Some(0.0), 1));
        assert_eq!(kept(&[Some(STOLEN_MAX)], true), (Some(STOLEN_MAX), 1), "the bound is allowed");
        assert_eq!(kept(&[Some(0.3), Some(0.01)], true), (Some(0.01), 2));
        assert_eq!(kept(&[Some(0.3), Some(0.1), Some(0.2)], true), (Some(0.1), 3), "no fourth");
        assert_eq!(kept(&[Some(0.3)], false), (Some(0.3), 1), "no time to repeat");
        assert_eq!(
            kept(&[Some(0.3), None], true),
            (Some(0.3), 2),
            "a failed repeat spoils nothing"
        );
        assert_eq!(kept(&[None], true), (None, 1));
    }
}
