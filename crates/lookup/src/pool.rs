//! Blocks of neighbouring items, with reuse of freed blocks.
//!
//! Blocks have a few size classes, so most insertions happen in place. A block of an even
//! size begins at an even index. Limits: blocks of [`BLOCK_MAX`] items, 2^31 items in total.

/// Items of the largest block.
pub(crate) const BLOCK_MAX: usize = 128;

const CLASS_SIZES: [u8; 14] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, BLOCK_MAX as u8];

pub(crate) fn class_of(count: usize) -> usize {
    CLASS_SIZES.partition_point(|&size| usize::from(size) < count)
}

/// Allocator of blocks. The owner identifies a block by its first index and its
/// number of items. A block without items has no memory, whatever its index.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    end: usize,
    /// Free blocks by class, up to the highest class used so far.
    free: Vec<Vec<u32>>,
}

impl Blocks {
    /// Allocates a block for `count` items.
    pub(crate) fn allocate(&mut self, count: usize) -> u32 {
        if count == 0 {
            return 0;
        }
        let class = class_of(count);
        self.free.get_mut(class).and_then(Vec::pop).unwrap_or_else(|| {
            let size = usize::from(CLASS_SIZES[class]);
            if size.is_multiple_of(2) && !self.end.is_multiple_of(2) {
                self.release(self.end as u32, 1);
                self.end += 1;
            }
            let first = self.end;
            self.end += size;
            assert!(self.end <= 1 << 31, "look-up table of more than 2^31 items");
            first as u32
        })
    }

    pub(crate) fn release(&mut self, first: u32, count: usize) {
        if count > 0 {
            let class = class_of(count);
            if self.free.len() <= class {
                self.free.resize_with(class + 1, Vec::new);
            }
            self.free[class].push(first);
        }
    }

    /// Upper bound of all blocks' indices.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// Bytes of this list.
    pub(crate) fn memory_bytes(&self) -> usize {
        let lists = self.free.iter().map(|list| list.capacity() * size_of::<u32>());
        self.free.capacity() * size_of::<Vec<u32>>() + lists.sum::<usize>()
    }
}

/// A vector divided into blocks.
#[derive(Clone, Debug)]
pub(crate) struct BlockPool<T> {
    pub(crate) items: Vec<T>,
    blocks: Blocks,
}

impl<T: Copy + Default> BlockPool<T> {
    pub(crate) fn new() -> Self {
        Self { items: Vec::new(), blocks: Blocks::default() }
    }

    /// Allocates a block for `count` items with undefined content.
    pub(crate) fn allocate(&mut self, count: usize) -> u32 {
        let first = self.blocks.allocate(count);
        if self.items.len() < self.blocks.end() {
            self.items.resize(self.blocks.end(), T::default());
        }
        first
    }

    pub(crate) fn release(&mut self, first: u32, count: usize) {
        self.blocks.release(first, count);
    }

    pub(crate) fn block(&self, first: u32, count: usize) -> &[T] {
        &self.items[first as usize..][..count]
    }

    /// Inserts an item into a block of `count`, before index `at`; returns the block's new index.
    pub(crate) fn insert(&mut self, first: u32, count: usize, at: usize, item: T) -> u32 {
        let old = first as usize;
        let new = if count > 0 && class_of(count) == class_of(count + 1) {
            old
        } else {
            self.allocate(count + 1) as usize
        };
        self.items.copy_within(old + at..old + count, new + at + 1);
        if new != old {
            self.items.copy_within(old..old + at, new);
            self.release(first, count);
        }
        self.items[new + at] = item;
        new as u32
    }

    /// Removes the item at index `at` from a block of `count`; returns the block's new index.
    pub(crate) fn remove(&mut self, first: u32, count: usize, at: usize) -> u32 {
        let old = first as usize;
        if count == 1 {
            self.release(first, count);
            return 0;
        }
        let new = if class_of(count) == class_of(count - 1) {
            old
        } else {
            self.allocate(count - 1) as usize
        };
        if new != old {
            self.items.copy_within(old..old + at, new);
        }
        self.items.copy_within(old + at + 1..old + count, new + at);
        if new != old {
            self.release(first, count);
        }
        new as u32
    }

    /// Reserves memory, so that the vector does not move until it has `count` items.
    pub(crate) fn reserve(&mut self, count: usize) {
        self.items.reserve_exact(count.saturating_sub(self.items.len()));
    }

    /// Bytes in use or free for reuse.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.items.len() * size_of::<T>() + self.blocks.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pool_blocks_match_vectors(steps in prop::collection::vec((0usize..4, 0usize..130, any::<bool>()), 0..600)) {
            let mut pool = BlockPool::new();
            let mut blocks: Vec<(u32, Vec<u32>)> = vec![(0, Vec::new()); 4];
            for (step, (which, at, insert)) in steps.into_iter().enumerate() {
                let (first, items) = &mut blocks[which];
                if insert && items.len() < BLOCK_MAX {
                    let at = at % (items.len() + 1);
                    *first = pool.insert(*first, items.len(), at, step as u32);
                    items.insert(at, step as u32);
                } else if !items.is_empty() {
                    let at = at % items.len();
                    *first = pool.remove(*first, items.len(), at);
                    items.remove(at);
                }
                for (first, items) in &blocks {
                    prop_assert_eq!(pool.block(*first, items.len()), &items[..]);
                }
            }
        }
    }

    #[test]
    fn pool_reuses_released_blocks() {
        let mut pool = BlockPool::<u32>::new();
        let blocks: Vec<_> = (1..=BLOCK_MAX).map(|count| (pool.allocate(count), count)).collect();
        let length = pool.items.len();
        for (first, count) in blocks {
            pool.release(first, count);
        }
        for count in 1..=BLOCK_MAX {
            pool.allocate(count);
        }
        assert_eq!(pool.items.len(), length);
    }
}
