//! A set of small numbers: a bit for each, and one for each word of these.

/// Numbers below a bound.
#[derive(Debug)]
pub struct Bits {
    words: Vec<u64>,
    /// Words that have some.
    some: Vec<u64>,
}

impl Bits {
    /// None of so many.
    pub fn new(count: usize) -> Self {
        let words = count.div_ceil(64);
        Self { words: vec![0; words], some: vec![0; words.div_ceil(64)] }
    }

    /// Takes a number in, which may be there.
    pub fn add(&mut self, number: u32) {
        let word = number as usize / 64;
        self.words[word] |= 1 << (number % 64);
        self.some[word / 64] |= 1 << (word % 64);
    }

    /// Takes the smallest out. Looks at one word for each 4,096 numbers at most.
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

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.some.iter().all(|some| *some == 0)
    }

    /// Bytes.
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
        fn numbers_come_out_once_and_in_order(
            steps in prop::collection::vec(prop::option::of(0..20_000_u32), 0..200),
        ) {
            let (mut bits, mut slow) = (Bits::new(20_000), BTreeSet::new());
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
