//! A small ternary memory, for the few filters that no table takes together with enough others.
//!
//! As in Lakshman and Stiliadis, "High-Speed Policy-based Packet Forwarding Using
//! Efficient Multi-dimensional Range Matching" (SIGCOMM 1998): each value of each part
//! of a key has a bitmap with a bit per filter, set if the filter matches that value.
//! The intersection of the bitmaps of a key's parts has the filters that match the key.

/// Maximum number of filters.
pub const CAM_MAX: usize = 512;

const WORDS: usize = CAM_MAX / 64;

/// Bits of a part of a key.
const PART: u32 = 4;

/// Parts of a word of a key.
const PARTS: usize = (u64::BITS / PART) as usize;

type FilterBitmap = [u64; WORDS];

/// For each value of a part: the filters that match it.
#[derive(Clone, Debug)]
struct KeyByteIndex {
    rows: [FilterBitmap; 1 << PART],
    /// Number of filters whose mask covers the part.
    filters: u32,
}

/// The memory.
#[derive(Debug)]
pub struct Cam<const W: usize> {
    parts: Vec<KeyByteIndex>,
    /// Parts that some filter's mask covers.
    looked_at: Vec<u16>,
    used: FilterBitmap,
    /// Slot of the filter at each used place.
    pub slots: [u32; CAM_MAX],
    pub priorities: [u32; CAM_MAX],
    /// Number of used places.
    count: usize,
    /// Upper bound of its filters' priorities.
    pub max: u32,
}

impl<const W: usize> Cam<W> {
    pub fn new() -> Self {
        let all = KeyByteIndex { rows: [[u64::MAX; WORDS]; 1 << PART], filters: 0 };
        Self {
            parts: vec![all; W * PARTS],
            looked_at: Vec::with_capacity(W * PARTS),
            used: [0; WORDS],
            slots: [u32::MAX; CAM_MAX],
            priorities: [0; CAM_MAX],
            count: 0,
            max: 0,
        }
    }

    /// Number of filters.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Memory in bytes.
    pub fn memory(&self) -> usize {
        size_of::<Self>() + self.parts.len() * size_of::<KeyByteIndex>()
    }

    /// Returns the used places.
    pub fn places(&self) -> impl Iterator<Item = usize> + use<W> {
        let used = self.used;
        (0..WORDS).flat_map(move |word| ones(used[word]).map(move |bit| word * 64 + bit))
    }

    /// Adds a filter. Returns its place, or `None` if the memory is full.
    pub fn add(
        &mut self,
        slot: u32,
        value: &[u64; W],
        mask: &[u64; W],
        priority: u32,
    ) -> Option<u16> {
        let word = self.used.iter().position(|word| *word != u64::MAX)?;
        let bit = self.used[word].trailing_ones();
        self.used[word] |= 1 << bit;
        for at in 0..W * PARTS {
            let (value, mask) = (part(value, at), part(mask, at));
            if mask == 0 {
                continue;
            }
            let part = &mut self.parts[at];
            for (other, row) in part.rows.iter_mut().enumerate() {
                if (other ^ value) & mask != 0 {
                    row[word] &= !(1 << bit);
                }
            }
            part.filters += 1;
            if part.filters == 1 {
                self.looked_at.push(at as u16);
            }
        }
        let place = word * 64 + bit as usize;
        self.slots[place] = slot;
        self.priorities[place] = priority;
        self.count += 1;
        self.max = self.max.max(priority);
        Some(place as u16)
    }

    /// Removes the filters at these places; `mask` returns the mask of a slot's filter.
    pub fn remove(&mut self, places: &[u16], mask: impl Fn(u32) -> [u64; W]) {
        let mut gone = [0; WORDS];
        let mut is_max_gone = false;
        for &place in places {
            let place = usize::from(place);
            gone[place / 64] |= 1 << (place % 64);
            is_max_gone |= self.priorities[place] == self.max;
            let mask = mask(self.slots[place]);
            for at in 0..W * PARTS {
                self.parts[at].filters -= u32::from(part(&mask, at) != 0);
            }
        }
        for &at in &self.looked_at {
            for row in &mut self.parts[usize::from(at)].rows {
                (0..WORDS).for_each(|word| row[word] |= gone[word]);
            }
        }
        let parts = &self.parts;
        self.looked_at.retain(|at| parts[usize::from(*at)].filters > 0);
        (0..WORDS).for_each(|word| self.used[word] &= !gone[word]);
        self.count -= places.len();
        if is_max_gone {
            self.max = self.places().map(|place| self.priorities[place]).max().unwrap_or(0);
        }
    }

    /// Calls `found` with each place whose filter matches a key.
    #[inline]
    pub fn each(&self, key: &[u64; W], mut found: impl FnMut(usize)) {
        let mut meets = self.used;
        for &at in &self.looked_at {
            let at = usize::from(at);
            let row = &self.parts[at].rows[part(key, at)];
            for word in 0..WORDS {
                meets[word] &= row[word];
            }
        }
        for (word, bits) in meets.into_iter().enumerate() {
            ones(bits).for_each(|bit| found(word * 64 + bit));
        }
    }
}

fn part<const W: usize>(key: &[u64; W], at: usize) -> usize {
    (key[at / PARTS] >> (at % PARTS * PART as usize)) as usize & ((1 << PART) - 1)
}

/// Returns the numbers of the bits that are set.
fn ones(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (bits != 0).then(|| {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            bit
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_filters_free_all_their_slots() {
        let mut cam = Cam::<2>::new();
        for _ in 0..3 {
            let mask = |slot: u32| [u64::from(slot) << 20, u64::MAX << (slot % 64)];
            for slot in 0..CAM_MAX as u32 {
                assert_eq!(cam.add(slot, &[0, 5], &mask(slot), slot), Some(slot as u16));
            }
            assert_eq!(cam.add(0, &[0, 5], &mask(0), 0), None);
            let places: Vec<u16> = (0..CAM_MAX as u16).collect();
            let (some, others) = places.split_at(100);
            cam.remove(others, mask);
            assert_eq!((cam.count(), cam.max), (100, 99));
            cam.remove(some, mask);
            assert_eq!((cam.count(), cam.max, cam.places().count()), (0, 0, 0));
            assert!(cam.looked_at.is_empty());
            let is_as_new = |part: &KeyByteIndex| part.rows == [[u64::MAX; WORDS]; 1 << PART];
            assert!(cam.parts.iter().all(is_as_new));
        }
    }
}
