//! Median and spread.

use crate::sample::{Sample, State};

/// Several samples of the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The one in the middle; of an even count the mean of the two.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The most.
    pub most: f64,
    /// How many.
    pub count: usize,
}

impl Summary {
    /// Of some values; `None` of none.
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

/// The value below which a share of all lies, nearest rank; 0 of none.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).wrapping_sub(1)).copied().unwrap_or(0.0)
}

/// Samples that differ in their round alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Whose.
    pub series: String,
    /// The parameter.
    pub x: f64,
    /// How near the cores were.
    pub state: State,
    /// The figures.
    pub value: Summary,
    /// Cycles a packet, where all have them.
    pub cycles: Option<Summary>,
    /// The most that a CPU lost to the host during any of them, share of its time.
    pub stolen: f64,
}

/// Groups the samples of one kind (see [`Sample::what`]), in the order of parameter, state and first
/// appearance.
pub fn groups(samples: &[Sample], what: &str) -> Vec<Group> {
    let mut members: Vec<Vec<&Sample>> = Vec::new();
    for sample in samples.iter().filter(|sample| sample.what == what) {
        let same = |group: &&mut Vec<&Sample>| {
            group.first().is_some_and(|first| {
                (&first.series, first.x, first.state) == (&sample.series, sample.x, sample.state)
            })
        };
        match members.iter_mut().find(same) {
            Some(group) => group.push(sample),
            None => members.push(vec![sample]),
        }
    }
    let group = |members: &Vec<&Sample>| {
        let first = members.first()?;
        let cycles: Option<Vec<f64>> = members.iter().map(|s| s.cycles_per_packet).collect();
        Some(Group {
            series: first.series.clone(),
            x: first.x,
            state: first.state,
            value: Summary::of(members.iter().map(|sample| sample.value))?,
            cycles: cycles.and_then(Summary::of),
            stolen: members.iter().map(|sample| sample.stolen).fold(0.0, f64::max),
        })
    };
    let mut groups: Vec<Group> = members.iter().filter_map(group).collect();
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

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
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
        let of = |group: &Group| (group.series.clone(), group.x, group.state, group.value.median);
        let found: Vec<_> = groups(&results.samples, "rate").iter().map(of).collect();
        let expected = [
            ("pdp", 1.0, State::Near, 3.0),
            ("pdp", 2.0, State::Near, 19.0),
            ("kernel", 2.0, State::Near, 1.0),
            ("pdp", 2.0, State::Far, 6.0),
        ];
        assert_eq!(found, expected.map(|(series, x, state, v)| (series.to_owned(), x, state, v)));
    }
}
