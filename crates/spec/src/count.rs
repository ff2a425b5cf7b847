//! Counts in messages.

use std::fmt::Display;

/// A number with its noun, in the plural unless it is 1.
#[must_use]
pub fn count(number: impl Display, noun: &str) -> String {
    let number = number.to_string();
    match noun.strip_suffix('y') {
        _ if number == "1" => format!("1 {noun}"),
        Some(stem) => format!("{number} {stem}ies"),
        None => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let all = [0, 1, 2].map(|number| [count(number, "node"), count(number, "entry")]);
        assert_eq!(
            all.concat(),
            ["0 nodes", "0 entries", "1 node", "1 entry", "2 nodes", "2 entries"]
        );
    }
}
