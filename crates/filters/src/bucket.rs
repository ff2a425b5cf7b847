//! The hash table that all filter tables share: buckets of a cache line, each with several chains.

/// Slot number that stands for no filter, such as the result of
/// [`Filters::find`](crate::Filters::find) for a key that none matches.
pub const NONE: u32 = u32::MAX;

/// Chains per bucket.
const CHAINS: usize = 12;

/// Maximum distance of a chain from its home bucket, in buckets.
pub const AWAY_MAX: usize = 16;

const ONES: u64 = 0x0101_0101_0101_0101;

/// A cache line. Tag 0 means a free place.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
struct HashBucket {
    tags: [u8; CHAINS],
    /// Number of chains in later buckets whose home is this bucket or an earlier one.
    beyond: u32,
    heads: [u32; CHAINS],
}

/// Home of a hash: its bucket and tag.
#[derive(Clone, Copy, Debug, Default)]
pub struct HomeBucket {
    bucket: u32,
    tag: u8,
}

/// Position of a chain's head.
#[derive(Clone, Copy, Debug)]
pub struct ChainPosition {
    bucket: u32,
    chain: u8,
    away: u8,
}

/// All buckets.
#[derive(Debug)]
pub struct HashBuckets {
    buckets: Vec<HashBucket>,
}

impl HashBuckets {
    /// Makes buckets for this number of chains.
    pub fn new(chains: usize) -> Self {
        // At most three of five places are used. With seven chains per
        // home bucket on average, one in thirty buckets has more than fit.
        let count = (chains * 5).div_ceil(CHAINS * 3).max(1);
        let empty = HashBucket { tags: [0; CHAINS], beyond: 0, heads: [NONE; CHAINS] };
        Self { buckets: vec![empty; count] }
    }

    /// Returns the home of a hash, whose highest 32 bits must be well distributed.
    #[inline]
    pub fn home(&self, hash: u64) -> HomeBucket {
        // Scales the hash to the number of buckets (Lemire, "Fast
        // Random Integer Generation in an Interval", ACM TOMACS 2019).
        let place = (hash >> 32) * self.buckets.len() as u64;
        HomeBucket { bucket: (place >> 32) as u32, tag: ((place >> 24) as u8).max(1) }
    }

    /// Calls `found` with the heads of all chains with this tag. Mostly that
    /// is none if the chain does not exist, and only its own if it does.
    #[inline]
    pub fn each(&self, home: HomeBucket, mut found: impl FnMut(u32)) {
        let mut at = home.bucket as usize;
        for _ in 0..AWAY_MAX.min(self.buckets.len()) {
            let bucket = &self.buckets[at];
            let mut meets = bucket.meets(home.tag);
            while meets != 0 {
                found(bucket.heads[meets.trailing_zeros() as usize / 8 % CHAINS]);
                meets &= meets - 1;
            }
            if bucket.beyond == 0 {
                return;
            }
            at = self.after(at);
        }
    }

    /// Returns the chain whose head satisfies `is`.
    pub fn chain(&self, home: HomeBucket, is: impl Fn(u32) -> bool) -> Option<ChainPosition> {
        let mut at = home.bucket as usize;
        for away in 0..AWAY_MAX.min(self.buckets.len()) {
            let bucket = &self.buckets[at];
            for chain in 0..CHAINS {
                if bucket.tags[chain] == home.tag && is(bucket.heads[chain]) {
                    return Some(ChainPosition {
                        bucket: at as u32,
                        chain: chain as u8,
                        away: away as u8,
                    });
                }
            }
            if bucket.beyond == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Returns the next bucket; the first follows the last.
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// Adds a new chain. Returns false if all buckets in reach are full.
    pub fn add(&mut self, home: HomeBucket, head: u32) -> bool {
        let count = self.buckets.len();
        let at = |away: usize| (home.bucket as usize + away) % count;
        let free = |away: &usize| self.buckets[at(*away)].tags.contains(&0);
        let Some(away) = (0..AWAY_MAX.min(count)).find(free) else { return false };
        for before in 0..away {
            self.buckets[at(before)].beyond += 1;
        }
        let bucket = &mut self.buckets[at(away)];
        let chain = bucket.tags.iter().position(|tag| *tag == 0).expect("a free one");
        bucket.tags[chain] = home.tag;
        bucket.heads[chain] = head;
        true
    }

    /// Returns the head of a chain.
    pub fn head(&self, place: ChainPosition) -> u32 {
        self.buckets[place.bucket as usize].heads[usize::from(place.chain)]
    }

    /// Sets the head of a chain.
    pub fn set_head(&mut self, place: ChainPosition, head: u32) {
        self.buckets[place.bucket as usize].heads[usize::from(place.chain)] = head;
    }

    /// Removes an empty chain.
    pub fn remove(&mut self, place: ChainPosition) {
        let count = self.buckets.len();
        let bucket = &mut self.buckets[place.bucket as usize];
        bucket.tags[usize::from(place.chain)] = 0;
        bucket.heads[usize::from(place.chain)] = NONE;
        for away in 1..=usize::from(place.away) {
            self.buckets[(place.bucket as usize + count - away) % count].beyond -= 1;
        }
    }

    /// Memory in bytes.
    pub fn memory(&self) -> usize {
        self.buckets.len() * size_of::<HashBucket>()
    }
}

impl HashBucket {
    /// Returns the highest bit of each byte that has this tag.
    #[inline]
    fn meets(&self, tag: u8) -> u128 {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            let length = (CHAINS - at).min(8);
            bytes[..length].copy_from_slice(&self.tags[at..at + length]);
            u64::from_le_bytes(bytes)
        };
        let meets = |word: u64| {
            let differs = word ^ ONES.wrapping_mul(u64::from(tag));
            let seven = ONES * 0x7f;
            !(((differs & seven) + seven) | differs | seven)
        };
        // No chain has tag 0, so bytes after the last tag never match.
        u128::from(meets(word(8))) << 64 | u128::from(meets(word(0)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few buckets, so that many are full and chains are outside their home buckets.
        #[test]
        fn each_chain_is_found_until_it_is_removed(
            changes in prop::collection::vec((any::<bool>(), 0..6_u64, 1..4_u8), 0..300),
            chains in 1..40_usize,
        ) {
            let mut buckets = HashBuckets::new(chains);
            let mut kept: Vec<(HomeBucket, u32)> = Vec::new();
            for (number, (add, bucket, tag)) in changes.into_iter().enumerate() {
                let bucket = (bucket % buckets.buckets.len() as u64) as u32;
                let (home, head) = (HomeBucket { bucket, tag }, number as u32);
                if add {
                    if buckets.add(home, head) {
                        kept.push((home, head));
                    } else {
                        prop_assert!(kept.len() >= CHAINS);
                    }
                } else if !kept.is_empty() {
                    let (home, head) = kept.swap_remove(number % kept.len());
                    let place = buckets.chain(home, |it| it == head).expect("it was added");
                    prop_assert_eq!(buckets.head(place), head);
                    buckets.remove(place);
                }
                for (home, head) in &kept {
                    let mut found = Vec::new();
                    buckets.each(*home, |it| found.push(it));
                    prop_assert!(found.contains(head));
                    let known = |it: &u32| kept.iter().any(|(_, head)| head == it);
                    prop_assert!(found.iter().all(known), "{:?}", found);
                }
            }
            for (home, head) in kept {
                let place = buckets.chain(home, |it| it == head).expect("it was added");
                buckets.remove(place);
            }
            prop_assert!(buckets.buckets.iter().all(|it| it.beyond == 0 && it.tags == [0; CHAINS]));
        }
    }
}
