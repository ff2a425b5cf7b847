//! Versions of the kernel and of programs.

/// Returns the first two numbers of a version; 0 for a missing or malformed number.
pub(crate) fn version(text: &str) -> (u32, u32) {
    let mut numbers =
        text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}
