//! The super user's writes that set a card up.

use crate::bus::queue_writes;
use crate::card::PORTS;
use crate::header::HOST_PORT;
use crate::table::{AttachmentEntry, HopSegments, VmacEntry};
use crate::{CardSizes, LpmSegment, RegisterWrite, TableWrite, VmacFull, VmacTable, registers};

/// Cells that `card_queues` never uses.
const SPARE_CELLS: u32 = 8;

/// Returns register writes after which all queues have equal weights, `guarantee` cells each, and
/// all other cells as a pool that each may fill.
pub fn equal_queues(sizes: &CardSizes, guarantee: u16) -> Vec<RegisterWrite> {
    let slots = sizes.ves as u16 + 1;
    let guaranteed = u32::from(guarantee) * u32::from(slots) * u32::from(PORTS + 1);
    let pool = (sizes.cells - SPARE_CELLS - guaranteed) as u16;
    let mut writes = vec![RegisterWrite { address: registers::POOL, data: pool.into() }];
    for port in (0..PORTS).chain([HOST_PORT]) {
        writes.extend((0..slots).flat_map(|slot| queue_writes(port, slot, (guarantee, pool), 1)));
    }
    writes
}

/// Returns the super page's writes for a new VE without a rate limit: its parts of the tables and
/// the places of its vports.
///
/// # Errors
/// If there is no place for a MAC address.
pub fn add_ve(
    ve: u8,
    (hops, lpm): (HopSegments, LpmSegment),
    places: &[(u8, AttachmentEntry)],
    vmacs: &mut VmacTable,
) -> Result<Vec<TableWrite>, VmacFull> {
    let mut writes = vec![TableWrite::HopSegments(hops), TableWrite::LpmSegments(lpm)];
    let place_of = |vport| places.iter().find(|place| place.0 == vport).map(|place| place.1);
    writes.extend((0..16).map(|vport| TableWrite::Attachment(vport, place_of(vport))));
    for &(vport, AttachmentEntry { segment, mac, .. }) in places {
        vmacs.insert(VmacEntry { segment, mac, ve, vport }, &mut writes)?;
    }
    writes.extend([TableWrite::Meter(None), TableWrite::Enabled(true)]);
    Ok(writes)
}
