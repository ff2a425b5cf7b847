//! A table: which bits of a key it hashes, how, and the lengths of its chains.

/// Sizes of bit groups. A table's mask has only whole
/// groups of one of these sizes, starting with the largest.
pub const LEVELS: [u32; 4] = [16, 8, 4, 1];

/// Maximum length of a chain: filters of one table with the same hashed bits.
pub const CHAIN_MAX: usize = 24;

/// A table.
#[derive(Clone, Debug)]
pub struct FilterTable<const W: usize> {
    /// Hashed bits.
    pub mask: [u64; W],
    /// Random words of the hash.
    salts: [u64; W],
    /// Multiplier that moves the sum into the highest bits; odd.
    factor: u64,
    /// Number of hashed bits.
    pub bits: u32,
    /// Upper bound of its filters' priorities.
    pub max: u32,
    /// Highest priority seen in the current pass over all slots.
    pub fresh: u32,
    /// Number of filters.
    pub filters: u32,
    /// Number of chains of each length.
    lengths: [u32; CHAIN_MAX + 1],
    /// Length of its longest chain.
    longest: usize,
}

impl<const W: usize> FilterTable<W> {
    /// Makes a table that hashes these bits; `random` returns unpredictable words.
    pub fn new(mask: [u64; W], random: &mut impl FnMut() -> u64) -> Self {
        let salts = std::array::from_fn(|_| random());
        let bits = mask.iter().map(|word| word.count_ones()).sum();
        let factor = random() | 1;
        let lengths = [0; CHAIN_MAX + 1];
        Self { mask, salts, factor, bits, max: 0, fresh: 0, filters: 0, lengths, longest: 0 }
    }

    /// Maximum steps for a key: one hash, and a walk of the longest chain.
    pub fn steps(&self) -> usize {
        1 + self.longest
    }

    /// Maximum steps for a key after a chain of this length grows by one.
    pub fn steps_with(&self, length: usize) -> usize {
        1 + self.longest.max(length + 1)
    }

    /// Records that a chain, of length 0 if it is new, grows by one.
    pub fn add_to_chain(&mut self, length: usize) {
        self.lengths[length] -= u32::from(length > 0);
        self.lengths[length + 1] += 1;
        self.longest = self.longest.max(length + 1);
        self.filters += 1;
    }

    /// Records that a chain shrinks by one.
    pub fn take_from_chain(&mut self, length: usize) {
        self.lengths[length] -= 1;
        self.lengths[length - 1] += u32::from(length > 1);
        if length == self.longest && self.lengths[length] == 0 {
            self.longest -= 1;
        }
        self.filters -= 1;
    }

    /// Hashes a key; the highest bits are well distributed. NH (RFC 4418, section
    /// 5.2.2), then multiply-shift (Dietzfelbinger et al., "A Reliable Randomized
    /// Algorithm for the Closest-Pair Problem", Journal of Algorithms 1997).
    ///
    /// Keys that differ in one word only, such as consecutive addresses, have sums in an arithmetic
    /// progression. A multiplication keeps that, and some progressions meet few buckets. Folding
    /// the halves of the sum breaks the progression.
    #[inline]
    pub fn hash(&self, key: &[u64; W]) -> u64 {
        let product = |word: usize| {
            let (bits, salt) = (key[word] & self.mask[word], self.salts[word]);
            let low = (bits as u32).wrapping_add(salt as u32);
            let high = ((bits >> 32) as u32).wrapping_add((salt >> 32) as u32);
            u64::from(low).wrapping_mul(u64::from(high))
        };
        let sum = (0..W).fold(0, |sum: u64, word| sum.wrapping_add(product(word)));
        (sum ^ sum >> 32).wrapping_mul(self.factor)
    }

    /// True if it can have a filter with this mask.
    pub fn takes(&self, mask: &[u64; W]) -> bool {
        (0..W).all(|word| self.mask[word] & !mask[word] == 0)
    }
}

/// Reduces a mask to its whole groups of this many bits, a power of 2.
pub fn relaxed<const W: usize>(mask: &[u64; W], group: u32) -> [u64; W] {
    mask.map(|word| {
        // A group's lowest bit remains if the whole group is set.
        let (mut all, mut step) = (word, 1);
        while step < group {
            all &= all >> step;
            step *= 2;
        }
        let lowest = match group {
            1 => u64::MAX,
            group => u64::MAX / ((1 << group) - 1),
        };
        let all = all & lowest;
        match group {
            1 => all,
            group => all.wrapping_mul((1 << group) - 1),
        }
    })
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    /// 1,024 consecutive values are hashed to as many buckets. With random
    /// values, fewer than one bucket in 10^9 would have more than 12.
    #[test]
    fn consecutive_values_are_spread() {
        let mut random = StdRng::seed_from_u64(1);
        let worst = (0..20_000).map(|at| {
            let mask = [[u64::from(u32::MAX), 0], [0, u64::from(u32::MAX) << 32]][at % 2];
            let table = FilterTable::new(mask, &mut || random.random());
            let mut loads = [0_u16; 1024];
            for value in 0..1024 {
                let key = [[value, 0], [0, value << 32]][at % 2];
                loads[(table.hash(&key) >> 54) as usize] += 1;
            }
            loads.into_iter().max().unwrap()
        });
        let worst = worst.max().unwrap();
        assert!(worst <= 12, "{worst}");
    }
}
