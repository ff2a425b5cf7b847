//! Times and durations of the command line.

use std::ops::RangeInclusive;
use std::time::Duration;

use pdp_api::WATCH_EVERY_MS;

/// Parses seconds with a fraction, from a tenth to an hour.
pub fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds @ 0.1..=3600.0) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("use seconds from 0.1 to 3600".into()),
    }
}

/// Parses the seconds between two samples of a watch.
pub fn every(text: &str) -> Result<Duration, String> {
    seconds_within(text, WATCH_EVERY_MS)
}

pub fn seconds_within(text: &str, range_ms: RangeInclusive<u64>) -> Result<Duration, String> {
    let (min, max) = (*range_ms.start() as f64, *range_ms.end() as f64);
    match text.parse::<f64>() {
        Ok(seconds) if (min..=max).contains(&(seconds * 1000.0)) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!("use seconds from {} to {}", min / 1000.0, max / 1000.0)),
    }
}

/// Parses a number with `s`, `m`, `h` or `d`, from one second to [`pdp_api::TOKEN_SECONDS_MAX`].
pub fn duration(text: &str) -> Result<Duration, String> {
    const FORM: &str = "use a number with s, m, h or d, for example 90m or 30d, at most ten years";
    let unit = text.chars().last().ok_or(FORM)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 24 * 3600,
        _ => return Err(FORM.into()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| FORM)?;
    match number.checked_mul(seconds) {
        Some(all @ 1..=pdp_api::TOKEN_SECONDS_MAX) => Ok(Duration::from_secs(all)),
        _ => Err(FORM.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit_and_bounds() {
        assert_eq!(duration("90m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("30d"), Ok(Duration::from_secs(30 * 24 * 3600)));
        for bad in ["", "s", "0s", "-1s", "5", "1.5h", "999999d", "18446744073709551615d", "1ü"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn seconds_have_bounds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds_within("60", 100..=60_000), Ok(Duration::from_secs(60)));
        assert!(
            seconds_within("61", 100..=60_000)
                .is_err_and(|text| text == "use seconds from 0.1 to 60")
        );
        for bad in ["0", "-1", "nan", "inf", "3601", "x"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
