//! Median and spread.

use crate::sample::{CoreProximity, FigureSample};

/// Summary of several samples of the same figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The middle value; for an even count the mean of the two.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The most.
    pub most: f64,
    /// Number of values.
    pub count: usize,
}

impl Summary {
    /// Summarises some values; `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (least, most) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        Some(Self { median, least, most, count: sorted.len() })
    }
}

/// Returns the 95 % confidence interval of the median, for any distribution of the values. `None`
/// for fewer than six values, since even their extremes are too close.
///
/// Source: order statistics; each value is above the median with probability one half.
pub fn median_interval(values: &[f64]) -> Option<[f64; 2]> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    // Probabilities that exactly, and at most, this many values are below the median.
    let mut exactly = 0.5f64.powi(i32::try_from(count).ok()?);
    let mut at_most = exactly;
    let mut left_out = 0;
    while left_out < count && at_most <= 0.025 {
        left_out += 1;
        exactly *= (count + 1 - left_out) as f64 / left_out as f64;
        at_most += exactly;
    }
    let lower = left_out.checked_sub(1)?;
    Some([sorted[lower], sorted[count - 1 - lower]])
}

/// The value below which a given fraction of all lies, nearest rank; 0 if there are none.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).wrapping_sub(1)).copied().unwrap_or(0.0)
}

/// Samples that only differ in their round.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleGroup {
    /// Series.
    pub series: String,
    /// The parameter.
    pub x: f64,
    /// State of the cores.
    pub state: CoreProximity,
    /// The figures.
    pub value: Summary,
    /// Cycles per packet, if all samples have them.
    pub cycles: Option<Summary>,
    /// Largest loss of a CPU to the host during any of them, as a fraction of its time.
    pub stolen: f64,
}

/// Groups the samples of one kind (see [`FigureSample::what`]),
/// in the order of parameter, state and first appearance.
pub fn groups(samples: &[FigureSample], what: &str) -> Vec<SampleGroup> {
    let mut members: Vec<Vec<&FigureSample>> = Vec::new();
    for sample in samples.iter().filter(|sample| sample.what == what) {
        let same = |group: &&mut Vec<&FigureSample>| {
            group.first().is_some_and(|first| {
                (&first.series, first.x, first.state) == (&sample.series, sample.x, sample.state)
            })
        };
        match members.iter_mut().find(same) {
            Some(group) => group.push(sample),
            None => members.push(vec![sample]),
        }
    }
    let group = |members: &Vec<&FigureSample>| {
        let first = members.first()?;
        let cycles: Option<Vec<f64>> = members.iter().map(|s| s.cycles_per_packet).collect();
        Some(SampleGroup {
            series: first.series.clone(),
            x: first.x,
            state: first.state,
            value: Summary::of(members.iter().map(|sample| sample.value))?,
            cycles: cycles.and_then(Summary::of),
            stolen: members.iter().map(|sample| sample.stolen).fold(0.0, f64::max),
        })
    };
    let mut groups: Vec<SampleGroup> = members.iter().filter_map(group).collect();
    groups.sort_by(|a, b| a.x.total_cmp(&b.x).then(a.state.cmp(&b.state)));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::results;

    #[test]
    fn median_and_spread() {
        let of = |values: &[f64]| Summary::of(values.iter().copied());
        assert_eq!(of(&[]), None);
        let odd = Summary { median: 2.0, least: -1.0, most: 9.0, count: 3 };
        assert_eq!(of(&[9.0, -1.0, 2.0]), Some(odd));
        assert_eq!(of(&[4.0, 1.0, 2.0, 9.0]).unwrap().median, 3.0);
    }

    /// The ranks, from 1, match tables of the sign test (n = 6, 8, 9, 12, 20, 50).
    #[test]
    fn median_interval_uses_sign_test_ranks() {
        let of = |count: u32| {
            let values: Vec<f64> = (1..=count).rev().map(f64::from).collect();
            median_interval(&values).map(|bounds| bounds.map(|value| value as u32))
        };
        assert_eq!([0, 1, 5].map(of), [None; 3]);
        let ranks = [[1, 6], [1, 8], [2, 8], [3, 10], [6, 15], [18, 33]];
        assert_eq!([6, 8, 9, 12, 20, 50].map(of), ranks.map(Some));
    }

    #[test]
    fn quantiles_use_the_nearest_rank() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        let of = |share| quantile(&hundred, share);
        assert_eq!([of(0.0), of(0.5), of(0.99), of(1.0)], [1.0, 50.0, 99.0, 100.0]);
        assert_eq!((quantile(&[], 0.5), quantile(&[7.0], 0.99)), (0.0, 7.0));
    }

    #[test]
    fn states_are_never_mixed() {
        let results = results(&[
            ("pdp", 2.0, 18.0, 60.0),
            ("pdp", 2.0, 20.0, 60.0),
            ("pdp", 2.0, 6.0, 300.0),
            ("kernel", 2.0, 1.0, 60.0),
            ("pdp", 1.0, 3.0, 60.0),
        ]);
        let of =
            |group: &SampleGroup| (group.series.clone(), group.x, group.state, group.value.median);
        let found: Vec<_> = groups(&results.samples, "rate").iter().map(of).collect();
        let expected = [
            ("pdp", 1.0, CoreProximity::Near, 3.0),
            ("pdp", 2.0, CoreProximity::Near, 19.0),
            ("kernel", 2.0, CoreProximity::Near, 1.0),
            ("pdp", 2.0, CoreProximity::Far, 6.0),
        ];
        assert_eq!(found, expected.map(|(series, x, state, v)| (series.to_owned(), x, state, v)));
    }
}
