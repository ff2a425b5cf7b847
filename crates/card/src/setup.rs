//! The super user's writes that set a card up.
//!
//! A new VE takes these steps:
//!
//! 1. [`add_ve`] disables the VE and gives it its parts and vports.
//! 2. [`clear_ve`] empties these parts. They hold what another VE had there, or any contents after
//!    power-on. So a new tenant neither forwards by them nor finds out what they were. If the VE's
//!    own page makes the writes, they also replace the words of `WRITE_DATA` there.
//! 3. The VE gets its own page, and its driver writes its tables.
//! 4. [`enable_ve`] lets frames in.

use crate::bus::queue_writes;
use crate::card::PORTS;
use crate::driver::{CARD_VPORTS, LEVELS, clear_writes};
use crate::header::HOST_PORT;
use crate::table::{AttachmentEntry, GroupEntry, HopSegments, TableRange, VeOptions, VmacEntry};
use crate::{
    CardSizes, Leaf, LpmSegment, LpmWrite, NodeEntry, RegisterWrite, TableWrite, VmacError,
    VmacTable, registers,
};

/// Cells that `card_queues` never uses.
const SPARE_CELLS: u32 = 8;

/// A VE that the card can't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// The card has no such vport.
    #[error("vport {0}: the card has vports 0 to 15 of a VE")]
    Vport(u8),
    /// A MAC address of the VE.
    #[error(transparent)]
    Vmac(#[from] VmacError),
}

/// Returns register writes after which all queues have equal weights, `guarantee` cells each, and
/// all other cells as a pool that each may fill. Returns `None` if the card has fewer cells than
/// the guarantees.
pub fn equal_queues(sizes: &CardSizes, guarantee: u16) -> Option<Vec<RegisterWrite>> {
    let slots = sizes.ves as u16 + 1;
    let guaranteed = u32::from(guarantee) * u32::from(slots) * u32::from(PORTS + 1);
    let pool = sizes.cells.checked_sub(SPARE_CELLS)?.checked_sub(guaranteed)? as u16;
    let mut writes = vec![RegisterWrite { address: registers::POOL, data: pool.into() }];
    for port in (0..PORTS).chain([HOST_PORT]) {
        writes.extend((0..slots).flat_map(|slot| queue_writes(port, slot, (guarantee, pool), 1)));
    }
    Some(writes)
}

/// Returns the super page's writes for a new VE without a rate limit: its parts of the tables and
/// the places of its vports. The VE is disabled.
///
/// # Errors
/// If a vport does not exist, or a MAC address has no place or belongs to another VE of its
/// segment. Then `vmacs` is unchanged.
pub fn add_ve(
    ve: u8,
    (hops, lpm): (HopSegments, LpmSegment),
    places: &[(u8, AttachmentEntry)],
    vmacs: &mut VmacTable,
) -> Result<Vec<TableWrite>, SetupError> {
    if let Some((vport, _)) = places.iter().find(|(vport, _)| *vport >= CARD_VPORTS) {
        return Err(SetupError::Vport(*vport));
    }
    let mut writes = vec![TableWrite::Enabled(false)];
    writes.extend([TableWrite::HopSegments(hops), TableWrite::LpmSegments(lpm)]);
    let place_of = |vport| places.iter().find(|place| place.0 == vport).map(|place| place.1);
    writes.extend((0..CARD_VPORTS).map(|vport| TableWrite::Attachment(vport, place_of(vport))));
    // An error must not leave entries in the copy that the card never gets.
    let mut changed = vmacs.clone();
    for &(vport, AttachmentEntry { segment, mac, .. }) in places {
        changed.insert(VmacEntry { segment, mac, ve, vport }, &mut writes)?;
    }
    *vmacs = changed;
    writes.push(TableWrite::Meter(None));
    Ok(writes)
}

/// Returns writes that empty all tables of a VE: each entry of its parts, and its own addresses,
/// contexts, and options. Both the super page and the VE's page may make them.
pub fn clear_ve(hops: &HopSegments, lpm: &LpmSegment) -> impl Iterator<Item = TableWrite> + use<> {
    let indices = |part: TableRange| 0..part.length;
    let groups = indices(hops.groups).map(|index| TableWrite::Group(index, GroupEntry::Empty));
    let buckets = indices(hops.blocks).flat_map(|block| {
        (0..=u8::MAX).map(move |bucket| TableWrite::Bucket { block, bucket, hop: 0 })
    });
    let hop_writes = indices(hops.hops).map(|index| TableWrite::Hop(index, None));
    let arps = indices(hops.arps).map(|index| TableWrite::Arp(index, None));
    let (node_length, entry) = (lpm.node_length, NodeEntry::default());
    let node =
        move |level| (0..node_length).map(move |index| LpmWrite::Node { level, index, entry });
    let leaf = |index| LpmWrite::Leaf { index, leaf: Leaf::NONE };
    let lpm = (1..=LEVELS).flat_map(node).chain((0..lpm.leaf_length).map(leaf));
    let first = clear_writes(VeOptions::default()).into_iter();
    first.chain(groups).chain(buckets).chain(hop_writes).chain(arps).chain(lpm.map(TableWrite::Lpm))
}

/// Returns the super page's write that lets frames into a VE, when its tables are written.
pub fn enable_ve() -> TableWrite {
    TableWrite::Enabled(true)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::table::{CardTable, MacAddress};

    const SIZES: CardSizes = CardSizes::CARD_8;

    fn place(vport: u8, mac: MacAddress) -> (u8, AttachmentEntry) {
        (vport, AttachmentEntry { port: 0, segment: 1, mac })
    }

    #[test]
    fn guarantees_beyond_the_cells_are_refused() {
        // 9 slots of 5 lines; 8 of 1,024 cells are spare.
        let pool = |guarantee| equal_queues(&SIZES, guarantee).map(|writes| writes[0].data);
        assert_eq!((pool(22), pool(23)), (Some(1016 - 22 * 45), None));
        assert_eq!(equal_queues(&CardSizes { cells: 7, ..SIZES }, 0), None);
    }

    #[test]
    fn refused_ve_leaves_no_mac_address() {
        let mut vmacs = VmacTable::new(SIZES.vmac_sets(), 1);
        add_ve(0, SIZES.equal_parts(0), &[place(0, [2; 6])], &mut vmacs).unwrap();
        let mut add = |places: &[_]| add_ve(1, SIZES.equal_parts(1), places, &mut vmacs);
        let taken = add(&[place(0, [4; 6]), place(1, [2; 6])]);
        assert_eq!(taken, Err(SetupError::Vmac(VmacError::Taken)));
        assert_eq!(add(&[place(0, [4; 6]), place(16, [6; 6])]), Err(SetupError::Vport(16)));
        assert_eq!(vmacs.get(1, [4; 6]), None);
        assert_eq!(vmacs.get(1, [2; 6]).map(|entry| entry.ve), Some(0));
        let added = add_ve(1, SIZES.equal_parts(1), &[place(0, [4; 6])], &mut vmacs).unwrap();
        assert_eq!(added[0], TableWrite::Enabled(false));
        assert!(!added.contains(&TableWrite::Enabled(true)));
    }

    #[test]
    fn all_entries_of_a_part_are_cleared() {
        let (hops, lpm) = SIZES.equal_parts(3);
        let mut counts = BTreeMap::new();
        let mut indices = std::collections::BTreeSet::new();
        for write in clear_ve(&hops, &lpm) {
            let word = write.word(3);
            assert_eq!(word.data, [0; 6], "{write:?}");
            assert!(indices.insert((word.table, word.index)), "{write:?} twice");
            *counts.entry(word.table).or_insert(0) += 1;
        }
        let lengths = [
            (CardTable::VeOptions, 1),
            (CardTable::Context, 16),
            (CardTable::OwnV4, 16),
            (CardTable::Group, 1024 / 8),
            (CardTable::Bucket, 64 / 8 * 256),
            (CardTable::Hop, 1024 / 8),
            (CardTable::Arp, 2048 / 8),
            (CardTable::LpmRoot, 2 * 256),
            (CardTable::LpmNode, 20 * 2048 / 8),
            (CardTable::LpmLeaf, 32768 / 8),
        ];
        assert_eq!(counts, BTreeMap::from(lengths));
    }
}
