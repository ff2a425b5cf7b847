//! Places of the VMAC-VE table's entries.

use std::collections::BTreeMap;

use crate::table::{MacAddress, TableWrite, VmacEntry, vmac_key};

const WAYS: u8 = 4;
const STASH: u8 = 8;

/// Most places that the search for a free one looks at.
const MOVES_SEEN_MAX: usize = 512;

/// Hash of the VMAC-VE table; each way takes its set from eight other bits. See card_pkg.sv.
pub fn vmac_hash(segment: u16, mac: MacAddress, seed: u64) -> u32 {
    let mixed = vmac_key(segment, mac) ^ seed;
    let mut spread = 0u64;
    for row in (0..60).step_by(5) {
        let at = |bit: u32| mixed >> (row + bit % 5) & 1;
        for bit in 0..5 {
            spread |= (at(bit) ^ ((at(bit + 1) ^ 1) & at(bit + 2))) << (row + bit);
        }
    }
    (0..60).rev().fold(0u32, |crc, at| {
        let carry = u64::from(crc >> 31) ^ (spread >> at & 1) != 0;
        crc << 1 ^ if carry { 0x04c1_1db7 } else { 0 }
    })
}

/// A MAC address that a VE can't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VmacError {
    /// All places of the address are taken, as is the stash.
    #[error("no free place for a MAC address: its 4 sets and the stash are full; use another seed")]
    Full,
    /// Another VE has the address on the segment. The error does not tell which one.
    #[error("MAC address is taken on this segment: use another one")]
    Taken,
}

/// Place of an entry: a way and its set, or the stash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum VmacPlace {
    Way(u8, u8),
    Stash(u8),
}

impl VmacPlace {
    fn write(self, entry: Option<VmacEntry>) -> TableWrite {
        match self {
            Self::Way(way, set) => TableWrite::Vmac { way, set, entry },
            Self::Stash(slot) => TableWrite::Stash { slot, entry },
        }
    }
}

/// The super user's copy of the VMAC-VE table.
#[derive(Clone, Debug)]
pub struct VmacTable {
    sets: u16,
    seed: u64,
    places: BTreeMap<VmacPlace, (u16, MacAddress)>,
    by_key: BTreeMap<(u16, MacAddress), (VmacPlace, VmacEntry)>,
}

impl VmacTable {
    /// Makes an empty table with a seed of 60 bits and `sets` per way, a power of two up to 256.
    pub fn new(sets: u16, seed: u64) -> Self {
        Self { sets, seed, places: BTreeMap::new(), by_key: BTreeMap::new() }
    }

    /// Returns writes that empty the card's table and set the seed.
    pub fn clear_writes(&self) -> Vec<TableWrite> {
        let way = |way| (0..self.sets).map(move |set| VmacPlace::Way(way, set as u8));
        let places = (0..WAYS).flat_map(way).chain((0..STASH).map(VmacPlace::Stash));
        let cleared = places.map(|place| place.write(None));
        cleared.chain([TableWrite::Seed(self.seed)]).collect()
    }

    /// Returns the VE and vport of an address.
    pub fn get(&self, segment: u16, mac: MacAddress) -> Option<VmacEntry> {
        self.by_key.get(&(segment, mac)).map(|(_, entry)| *entry)
    }

    /// Adds or replaces an entry. Other entries may move; they are never absent meanwhile.
    ///
    /// # Errors
    /// If there is no place for its address, or another VE has it on the segment. The table is
    /// unchanged.
    pub fn insert(
        &mut self,
        entry: VmacEntry,
        writes: &mut Vec<TableWrite>,
    ) -> Result<(), VmacError> {
        let key = (entry.segment, entry.mac);
        let old = match self.by_key.get(&key) {
            Some((_, old)) if old.ve != entry.ve => return Err(VmacError::Taken),
            old => old.map(|(place, _)| *place),
        };
        let free = |place: &VmacPlace| !self.places.contains_key(place);
        let place = old
            .or_else(|| self.ways_of(key).into_iter().find(free))
            .or_else(|| self.make_room(key, writes))
            .or_else(|| {
                (0..STASH).map(VmacPlace::Stash).find(|place| !self.places.contains_key(place))
            })
            .ok_or(VmacError::Full)?;
        self.put(place, entry, writes);
        Ok(())
    }

    fn put(&mut self, place: VmacPlace, entry: VmacEntry, writes: &mut Vec<TableWrite>) {
        let key = (entry.segment, entry.mac);
        self.places.insert(place, key);
        self.by_key.insert(key, (place, entry));
        writes.push(place.write(Some(entry)));
    }

    /// Returns the place of an address in each way.
    fn ways_of(&self, (segment, mac): (u16, MacAddress)) -> [VmacPlace; WAYS as usize] {
        let hash = vmac_hash(segment, mac, self.seed);
        std::array::from_fn(|way| {
            let set = (hash >> (8 * way)) as u16 & (self.sets - 1);
            VmacPlace::Way(way as u8, set as u8)
        })
    }

    /// Moves entries, each to another one's place, so that a place of an address becomes free
    /// (cuckoo hashing, Fotakis et al. 2003). The search is in breadth, so that few move.
    fn make_room(
        &mut self,
        key: (u16, MacAddress),
        writes: &mut Vec<TableWrite>,
    ) -> Option<VmacPlace> {
        // Places, each with the number of the one whose entry would move to it.
        let mut seen: Vec<(VmacPlace, Option<usize>)> =
            self.ways_of(key).into_iter().map(|place| (place, None)).collect();
        let mut at = 0;
        while at < seen.len() && seen.len() < MOVES_SEEN_MAX {
            let occupant = *self.places.get(&seen[at].0)?;
            for place in self.ways_of(occupant) {
                if seen.iter().any(|(known, _)| *known == place) {
                    continue;
                }
                seen.push((place, Some(at)));
                if !self.places.contains_key(&place) {
                    return Some(self.shift(&seen, writes));
                }
            }
            at += 1;
        }
        None
    }

    /// Moves the entries on the way to the last place, which is free, the last one first. Returns
    /// the first place.
    fn shift(
        &mut self,
        seen: &[(VmacPlace, Option<usize>)],
        writes: &mut Vec<TableWrite>,
    ) -> VmacPlace {
        let mut to = seen[seen.len() - 1];
        while let Some(from) = to.1 {
            let moved = self.places.get(&seen[from].0).and_then(|key| self.by_key.get(key));
            if let Some((_, entry)) = moved.copied() {
                self.put(to.0, entry, writes);
            }
            to = seen[from];
        }
        to.0
    }

    /// Removes an entry of a VE. An entry of another VE stays.
    pub fn remove(&mut self, ve: u8, segment: u16, mac: MacAddress, writes: &mut Vec<TableWrite>) {
        let key = (segment, mac);
        let Some(&(place, _)) = self.by_key.get(&key).filter(|(_, entry)| entry.ve == ve) else {
            return;
        };
        self.by_key.remove(&key);
        self.places.remove(&place);
        writes.push(place.write(None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The card's memory.
    fn write(memory: &mut BTreeMap<VmacPlace, VmacEntry>, write: &TableWrite) {
        let (place, entry) = match *write {
            TableWrite::Vmac { way, set, entry } => (VmacPlace::Way(way, set), entry),
            TableWrite::Stash { slot, entry } => (VmacPlace::Stash(slot), entry),
            _ => panic!("{write:?}"),
        };
        match entry {
            Some(entry) => memory.insert(place, entry),
            None => memory.remove(&place),
        };
    }

    #[test]
    fn nearly_all_places_can_be_used_and_no_entry_is_absent_meanwhile() {
        let mut table = VmacTable::new(256, 77);
        let mut memory = BTreeMap::new();
        let entry = |at: u32| {
            let [_, _, high, low] = at.wrapping_mul(0x9e37_79b1).to_be_bytes();
            let mac = [2, 0, 0, high, low, (at >> 8) as u8 ^ at as u8];
            VmacEntry { segment: (at % 5) as u16, mac, ve: at as u8, vport: 3 }
        };
        for at in 0..990 {
            let mut writes = Vec::new();
            table.insert(entry(at), &mut writes).unwrap();
            for each in writes {
                write(&mut memory, &each);
                if at % 97 == 0 || at > 900 {
                    for known in (0..at).map(entry) {
                        let place = |place: &VmacPlace| memory.get(place) == Some(&known);
                        let key = (known.segment, known.mac);
                        let stash = (0..STASH).map(VmacPlace::Stash);
                        assert!(table.ways_of(key).into_iter().chain(stash).any(|p| place(&p)));
                    }
                }
            }
        }
        let mut writes = Vec::new();
        for at in 0..990 {
            assert_eq!(table.get(entry(at).segment, entry(at).mac), Some(entry(at)));
            table.remove(entry(at).ve, entry(at).segment, entry(at).mac, &mut writes);
        }
        writes.iter().for_each(|each| write(&mut memory, each));
        assert!(memory.is_empty() && table.places.is_empty());
    }

    #[test]
    fn address_of_another_ve_is_refused_and_stays() {
        let mut table = VmacTable::new(256, 1);
        let mut writes = Vec::new();
        let entry = |segment, ve, vport| VmacEntry { segment, mac: [2; 6], ve, vport };
        table.insert(entry(1, 3, 0), &mut writes).unwrap();
        assert_eq!(table.insert(entry(1, 4, 0), &mut writes), Err(VmacError::Taken));
        let text = VmacError::Taken.to_string();
        assert!(!text.chars().any(|letter| letter.is_ascii_digit()), "{text}");
        table.remove(4, 1, [2; 6], &mut writes);
        assert_eq!((table.get(1, [2; 6]), writes.len()), (Some(entry(1, 3, 0)), 1));
        table.insert(entry(1, 3, 5), &mut writes).unwrap();
        table.insert(entry(2, 4, 0), &mut writes).unwrap();
        table.remove(3, 1, [2; 6], &mut writes);
        table.insert(entry(1, 4, 0), &mut writes).unwrap();
        assert_eq!(table.get(1, [2; 6]), Some(entry(1, 4, 0)));
    }
}
