//! Words and numbers for people.

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Returns `yes` or `no`.
pub fn yes(it_is: bool) -> String {
    if it_is { "yes" } else { "no" }.into()
}

/// Formats the guaranteed power of a router or one of its guests.
pub fn power(millicores: u64) -> String {
    if millicores == 0 { "borrows".into() } else { cores(millicores) }
}

/// Formats power in cores, in the notation of specs.
pub fn cores(millicores: u64) -> String {
    (millicores as f64 / 1000.0).to_string()
}

/// Formats a rate in the notation of specs.
pub fn bits(bps: u64) -> String {
    match bps {
        1_000_000_000.. => format!("{}Gbit/s", trimmed(bps, 1_000_000_000)),
        1_000_000.. => format!("{}Mbit/s", trimmed(bps, 1_000_000)),
        1_000.. => format!("{}kbit/s", trimmed(bps, 1_000)),
        _ => format!("{bps}bit/s"),
    }
}

fn trimmed(value: u64, unit: u64) -> f64 {
    (value as f64 * 100.0 / unit as f64).round() / 100.0
}

/// Formats a size in mebibytes.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1}MiB", bytes as f64 / f64::from(1 << 20))
}

/// Formats a time in UTC, RFC 3339, with a precision of seconds.
pub fn time(ms: u64) -> String {
    rfc3339(ms).unwrap_or_else(|| "-".into())
}

/// Time with milliseconds, from milliseconds since 1970.
pub fn time_with_ms(ms: u64) -> String {
    let whole = rfc3339(ms).as_deref().and_then(|text| text.strip_suffix('Z')).map(str::to_owned);
    whole.map_or_else(|| "-".into(), |text| format!("{text}.{:03}Z", ms % 1000))
}

fn rfc3339(ms: u64) -> Option<String> {
    let seconds = i64::try_from(ms / 1000).unwrap_or(i64::MAX);
    let at = OffsetDateTime::from_unix_timestamp(seconds).ok();
    at.and_then(|at| at.format(&Rfc3339).ok())
}
