//! Names with ranges: `leaf[1-40]`, `pod[1-4]-leaf[01-10]`.

/// Numbers from one to another, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NumberRange {
    first: u64,
    last: u64,
    /// Minimum number of digits.
    digits: usize,
}

impl NumberRange {
    fn count(self) -> u64 {
        (self.last - self.first).saturating_add(1)
    }
}

/// A name, or the pattern of several names: texts, and ranges between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamePattern<'a> {
    before: Vec<(&'a str, NumberRange)>,
    after: &'a str,
}

impl<'a> NamePattern<'a> {
    /// Parses a name.
    ///
    /// # Errors
    /// Why a bracket in it starts no range.
    pub fn read(text: &'a str) -> Result<Self, String> {
        let mut before = Vec::new();
        let mut after = text;
        while let Some((name, rest)) = after.split_once('[') {
            let (inside, rest) =
                rest.split_once(']').ok_or_else(|| format!("{text:?} has a [ without ]"))?;
            let number = |digits: &str| {
                let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
                digits.parse::<u64>().ok().filter(|_| plain)
            };
            let ends = inside.split_once('-');
            let ends = ends.and_then(|(a, b)| Some((number(a)?, number(b)?, a)));
            let Some((first, last, written)) = ends else {
                return Err(format!("[{inside}] in {text:?} is not a range of numbers"));
            };
            if first > last {
                return Err(format!("[{inside}] in {text:?} ends below its start"));
            }
            let digits = if written.starts_with('0') { written.len() } else { 1 };
            before.push((name, NumberRange { first, last, digits }));
            after = rest;
        }
        Ok(Self { before, after })
    }

    /// Parses a name that may have brackets of its own.
    pub fn read_or_plain(text: &'a str) -> Self {
        Self::read(text).unwrap_or(Self { before: Vec::new(), after: text })
    }

    /// Number of ranges.
    pub fn ranges(&self) -> usize {
        self.before.len()
    }

    /// Number of names that it expands to; at least 1, saturating.
    pub fn count(&self) -> u64 {
        self.before.iter().fold(1, |count: u64, (_, range)| count.saturating_mul(range.count()))
    }

    /// Returns the name at an index, from 0, and the
    /// numbers of its ranges. The last range changes first.
    pub fn at(&self, mut place: u64) -> (String, Vec<u64>) {
        let mut numbers = Vec::new();
        for (_, range) in self.before.iter().rev() {
            numbers.push(range.first + place % range.count());
            place /= range.count();
        }
        numbers.reverse();
        let mut name = String::new();
        for ((text, range), number) in self.before.iter().zip(&numbers) {
            name.push_str(text);
            name.push_str(&format!("{number:0width$}", width = range.digits));
        }
        name.push_str(self.after);
        (name, numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let pattern = NamePattern::read(text).unwrap();
        (0..pattern.count()).map(|place| pattern.at(place).0).collect()
    }

    #[test]
    fn ranges_expand_to_names() {
        assert_eq!(names("r1"), ["r1"]);
        assert_eq!(names("leaf[9-11]"), ["leaf9", "leaf10", "leaf11"]);
        assert_eq!(names("[08-10]x"), ["08x", "09x", "10x"]);
        assert_eq!(names("p[1-2]-l[1-2]"), ["p1-l1", "p1-l2", "p2-l1", "p2-l2"]);
        assert_eq!(NamePattern::read("p[3-4]l[1-9]").unwrap().at(10).1, [4, 2]);
    }

    #[test]
    fn malformed_ranges_are_reported_and_counts_never_overflow() {
        for (text, why) in [
            ("a[1-", "\"a[1-\" has a [ without ]"),
            ("a[]", "[] in \"a[]\" is not a range of numbers"),
            ("a[1,2]", "[1,2] in \"a[1,2]\" is not a range of numbers"),
            ("a[+1-2]", "[+1-2] in \"a[+1-2]\" is not a range of numbers"),
            ("a[2-1]", "[2-1] in \"a[2-1]\" ends below its start"),
            (
                "a[0-99999999999999999999]",
                "[0-99999999999999999999] in \"a[0-99999999999999999999]\" is not a range of numbers",
            ),
        ] {
            assert_eq!(NamePattern::read(text).unwrap_err(), why);
            assert_eq!(NamePattern::read_or_plain(text).at(0).0, text);
        }
        let all = format!("a[0-{}]", u64::MAX);
        assert_eq!(NamePattern::read(&all).unwrap().count(), u64::MAX);
        assert_eq!(NamePattern::read(&all.repeat(3)).unwrap().count(), u64::MAX);
    }
}
