//! A set of small numbers: a bitmap, with a summary bit for each of its words.

/// Set of numbers below a bound.
#[derive(Debug)]
pub struct NumberSet {
    words: Vec<u64>,
    /// Bit per word: set if the word is not zero.
    some: Vec<u64>,
}

impl NumberSet {
    /// Makes an empty set for numbers below `count`.
    pub fn new(count: usize) -> Self {
        let words = count.div_ceil(64);
        Self { words: vec![0; words], some: vec![0; words.div_ceil(64)] }
    }

    /// Adds a number, which may be present already.
    pub fn add(&mut self, number: u32) {
        let word = number as usize / 64;
        self.words[word] |= 1 << (number % 64);
        self.some[word / 64] |= 1 << (word % 64);
    }

    /// Removes the smallest number. Reads at most one word per 4,096 numbers.
    pub fn pop(&mut self) -> Option<u32> {
        let at = self.some.iter().position(|some| *some != 0)?;
        let word = at * 64 + self.some[at].trailing_zeros() as usize;
        let bit = self.words[word].trailing_zeros();
        self.words[word] &= self.words[word] - 1;
        if self.words[word] == 0 {
            self.some[at] &= self.some[at] - 1;
        }
        Some(word as u32 * 64 + bit)
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.some.iter().all(|some| *some == 0)
    }

    /// Memory in bytes.
    pub fn memory(&self) -> usize {
        (self.words.len() + self.some.len()) * size_of::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn number_set_pops_each_number_in_order(
            steps in prop::collection::vec(prop::option::of(0..20_000_u32), 0..200),
        ) {
            let (mut bits, mut slow) = (NumberSet::new(20_000), BTreeSet::new());
            for step in steps {
                match step {
                    Some(number) => {
                        bits.add(number);
                        slow.insert(number);
                    }
                    None => prop_assert_eq!(bits.pop(), slow.pop_first()),
                }
                prop_assert_eq!(bits.is_empty(), slow.is_empty());
            }
            while let Some(number) = slow.pop_first() {
                prop_assert_eq!(bits.pop(), Some(number));
            }
            prop_assert_eq!(bits.pop(), None);
        }
    }
}
