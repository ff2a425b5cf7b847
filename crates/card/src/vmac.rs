//! Places of the VMAC-VE table's entries.

use std::collections::BTreeMap;

use crate::table::{MacAddress, TableWrite, VmacEntry, vmac_key};

const WAYS: u8 = 4;
const STASH: u8 = 8;

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

/// Error from an entry whose places are all taken, as is the stash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no free place for a MAC address: its 4 sets and the stash are full; use another seed")]
pub struct VmacFull;

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

    /// Adds or replaces an entry.
    ///
    /// # Errors
    /// If all places of its address are taken. The table is unchanged.
    pub fn insert(
        &mut self,
        entry: VmacEntry,
        writes: &mut Vec<TableWrite>,
    ) -> Result<(), VmacFull> {
        let VmacEntry { segment, mac, .. } = entry;
        let key = (segment, mac);
        let hash = vmac_hash(segment, mac, self.seed);
        let set = |way: u8| ((hash >> (8 * way)) as u16 & (self.sets - 1)) as u8;
        let mut all = (0..WAYS)
            .map(|way| VmacPlace::Way(way, set(way)))
            .chain((0..STASH).map(VmacPlace::Stash));
        let old = self.by_key.get(&key).map(|(place, _)| *place);
        let free = || all.find(|place| !self.places.contains_key(place));
        let place = old.or_else(free).ok_or(VmacFull)?;
        self.places.insert(place, key);
        self.by_key.insert(key, (place, entry));
        writes.push(place.write(Some(entry)));
        Ok(())
    }

    /// Removes an entry.
    pub fn remove(&mut self, segment: u16, mac: MacAddress, writes: &mut Vec<TableWrite>) {
        if let Some((place, _)) = self.by_key.remove(&(segment, mac)) {
            self.places.remove(&place);
            writes.push(place.write(None));
        }
    }
}
