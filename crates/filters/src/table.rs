//! A table: what of a key it hashes, how, and how long its chains are.

/// What of masks a table keeps: whole groups of so many bits. The first tables have few bits.
pub const LEVELS: [u32; 4] = [16, 8, 4, 1];

/// Filters of one table whose values are equal in all that the table hashes: a chain.
pub const CHAIN_MAX: usize = 24;

/// A table.
#[derive(Clone, Debug)]
pub struct Table<const W: usize> {
    /// Bits that it hashes.
    pub mask: [u64; W],
    /// What it hashes them with.
    salts: [u64; W],
    /// What brings all of a sum into the highest bits; odd.
    factor: u64,
    /// How many bits it hashes.
    pub bits: u32,
    /// No filter in it has a higher priority.
    pub max: u32,
    /// The same of those that were looked at since the last time that all were.
    pub fresh: u32,
    /// Filters in it.
    pub filters: u32,
    /// Chains of each length.
    lengths: [u32; CHAIN_MAX + 1],
    /// Filters in its longest chain.
    longest: usize,
}

impl<const W: usize> Table<W> {
    /// One that hashes these bits; `random` gives words that nobody can guess.
    pub fn new(mask: [u64; W], random: &mut impl FnMut() -> u64) -> Self {
        let salts = std::array::from_fn(|_| random());
        let bits = mask.iter().map(|word| word.count_ones()).sum();
        let factor = random() | 1;
        let lengths = [0; CHAIN_MAX + 1];
        Self { mask, salts, factor, bits, max: 0, fresh: 0, filters: 0, lengths, longest: 0 }
    }

    /// What a key takes here at most: it is hashed, and the longest chain is walked.
    pub fn steps(&self) -> usize {
        1 + self.longest
    }

    /// What a key takes here at most once a chain of this length has one more.
    pub fn steps_with(&self, length: usize) -> usize {
        1 + self.longest.max(length + 1)
    }

    /// A chain, which may be a new one of length 0, has one more.
    pub fn add_to_chain(&mut self, length: usize) {
        self.lengths[length] -= u32::from(length > 0);
        self.lengths[length + 1] += 1;
        self.longest = self.longest.max(length + 1);
        self.filters += 1;
    }

    /// A chain has one less.
    pub fn take_from_chain(&mut self, length: usize) {
        self.lengths[length] -= 1;
        self.lengths[length - 1] += u32::from(length > 1);
        if length == self.longest && self.lengths[length] == 0 {
            self.longest -= 1;
        }
        self.filters -= 1;
    }

    /// Hashes a key: its highest bits are good. NH (RFC 4418, section 5.2.2), then multiply-shift (Dietzfelbinger et
    /// al., "A Reliable Randomized Algorithm for the Closest-Pair Problem", Journal of Algorithms 1997).
    #[inline]
    pub fn hash(&self, key: &[u64; W]) -> u64 {
        let product = |word: usize| {
            let (bits, salt) = (key[word] & self.mask[word], self.salts[word]);
            let low = (bits as u32).wrapping_add(salt as u32);
            let high = ((bits >> 32) as u32).wrapping_add((salt >> 32) as u32);
            u64::from(low).wrapping_mul(u64::from(high))
        };
        let sum = (0..W).fold(0, |sum: u64, word| sum.wrapping_add(product(word)));
        sum.wrapping_mul(self.factor)
    }

    /// Whether a filter with this mask can be in it.
    pub fn takes(&self, mask: &[u64; W]) -> bool {
        (0..W).all(|word| self.mask[word] & !mask[word] == 0)
    }
}

/// A mask's whole groups of so many bits, a power of 2.
pub fn relaxed<const W: usize>(mask: &[u64; W], group: u32) -> [u64; W] {
    mask.map(|word| {
        // A group's lowest bit stays if all of the group is there.
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
