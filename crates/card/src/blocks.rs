//! Allocator of blocks of neighbouring entries in a segment.

use std::collections::{BTreeMap, BTreeSet};

/// Free entries of a segment as blocks that are as large as possible.
///
/// An allocation takes the smallest block that is large enough, the first of several.
#[derive(Clone, Debug)]
pub struct BlockAllocator {
    /// Lengths of the free blocks by their first index.
    by_first: BTreeMap<u32, u32>,
    /// Free blocks: length, first index.
    by_length: BTreeSet<(u32, u32)>,
    free: u32,
}

impl BlockAllocator {
    /// Makes an allocator of the indices `0..length`.
    pub fn new(length: u32) -> Self {
        let mut blocks =
            Self { by_first: BTreeMap::new(), by_length: BTreeSet::new(), free: length };
        if length > 0 {
            blocks.add(0, length);
        }
        blocks
    }

    /// Number of free entries.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Allocates `count` neighbouring entries; returns the first index. Zero entries are at 0.
    pub fn allocate(&mut self, count: u32) -> Option<u32> {
        if count == 0 {
            return Some(0);
        }
        let &(length, first) = self.by_length.range((count, 0)..).next()?;
        self.take(first, length);
        if length > count {
            self.add(first + count, length - count);
        }
        self.free -= count;
        Some(first)
    }

    /// Frees allocated entries.
    pub fn release(&mut self, first: u32, count: u32) {
        if count == 0 {
            return;
        }
        let (mut first, mut length) = (first, count);
        if let Some((&before, &before_length)) = self.by_first.range(..first).next_back()
            && before + before_length == first
        {
            self.take(before, before_length);
            (first, length) = (before, length + before_length);
        }
        if let Some(&after_length) = self.by_first.get(&(first + length)) {
            self.take(first + length, after_length);
            length += after_length;
        }
        self.add(first, length);
        self.free += count;
    }

    fn add(&mut self, first: u32, length: u32) {
        self.by_first.insert(first, length);
        self.by_length.insert((length, first));
    }

    fn take(&mut self, first: u32, length: u32) {
        self.by_first.remove(&first);
        self.by_length.remove(&(length, first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_come_back(
            steps in prop::collection::vec((1u32..70, any::<bool>(), any::<usize>()), 0..300),
        ) {
            let mut blocks = BlockAllocator::new(1000);
            let mut used = Vec::new();
            for (count, allocate, which) in steps {
                if allocate {
                    match blocks.allocate(count) {
                        Some(first) => used.push((first, count)),
                        None => prop_assert!(blocks.by_length.last().is_none_or(|b| b.0 < count)),
                    }
                } else if !used.is_empty() {
                    let (first, count) = used.swap_remove(which % used.len());
                    blocks.release(first, count);
                }
                let mut taken = [false; 1000];
                for &(first, count) in &used {
                    for entry in &mut taken[first as usize..(first + count) as usize] {
                        prop_assert!(!std::mem::replace(entry, true));
                    }
                }
                prop_assert_eq!(blocks.free() as usize, taken.iter().filter(|&&t| !t).count());
            }
            for (first, count) in used {
                blocks.release(first, count);
            }
            prop_assert_eq!(blocks.by_length, BTreeSet::from([(1000, 0)]));
        }
    }
}
