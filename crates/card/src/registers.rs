//! Register map of the card. Generated from hw/registers.toml; see docs/hardware.md.

/// Returns the address of an offset in the super page.
pub const fn super_page(offset: u32) -> u32 {
    offset
}

/// Returns the address of an offset in a VE's page.
pub const fn ve_page(ve: u8, offset: u32) -> u32 {
    (1 + ve as u32) << 16 | offset
}

/// Returns the offset of the register that commits an entry to a table.
pub const fn commit(table: u32) -> u32 {
    COMMIT + 4 * table
}

/// Returns the offset of a counter by ingress port and verdict.
pub const fn verdict(port: u8, verdict: u8) -> u32 {
    VERDICT + 256 * port as u32 + 16 * verdict as u32
}

/// The card: `PdPc`.
pub const ID: u32 = 0x0000;
/// Version of this map.
pub const VERSION: u32 = 0x0004;
/// Width of the frame streams.
pub const DATA_BITS: u32 = 0x0008;
/// Physical ports; the host is port 7.
pub const PORTS: u32 = 0x000c;
/// Virtual environments.
pub const VES: u32 = 0x0010;
/// Cells of 64 bytes that the queues can use, guaranteed or of the pool.
pub const CELLS: u32 = 0x0014;
/// Entries of the VMAC-VE table.
pub const VMACS: u32 = 0x0018;
/// Levels of the look-up.
pub const LEVELS: u32 = 0x001c;
/// Nodes per level of the look-up.
pub const NODES: u32 = 0x0020;
/// Leaves of the look-up.
pub const LEAVES: u32 = 0x0024;
/// Groups of next hops.
pub const GROUPS: u32 = 0x0028;
/// Blocks of 256 buckets.
pub const BUCKET_BLOCKS: u32 = 0x002c;
/// Next hops.
pub const HOPS: u32 = 0x0030;
/// Neighbours.
pub const ARPS: u32 = 0x0034;
/// Clock in steps of at least a frame's time in the header pipeline.
pub const EPOCH: u32 = 0x0040;
/// VE whose tables and counters the super page reaches. The value VES stands for no VE.
pub const TARGET: u32 = 0x0044;
/// Cells that the queues may hold together above their guarantees.
pub const POOL: u32 = 0x0048;
/// Address of the last refused write.
pub const REFUSED_ADDRESS: u32 = 0x004c;
/// Clears the counters of this VE, or of no VE: VES. Refused while CLEARING is 1.
pub const CLEAR_COUNTERS: u32 = 0x0050;
/// 1 while counters are being cleared. Each waits for a cycle in which none of its kind counts. So
/// it may stay 1 while each cycle has an event.
pub const CLEARING: u32 = 0x0054;
/// Bits 31:0 of the next entry. Each page has its own.
pub const WRITE_DATA_0: u32 = 0x0100;
/// Bits 63:32 of the next entry.
pub const WRITE_DATA_1: u32 = 0x0104;
/// Bits 95:64 of the next entry.
pub const WRITE_DATA_2: u32 = 0x0108;
/// Bits 127:96 of the next entry.
pub const WRITE_DATA_3: u32 = 0x010c;
/// Bits 159:128 of the next entry.
pub const WRITE_DATA_4: u32 = 0x0110;
/// Bits 191:160 of the next entry.
pub const WRITE_DATA_5: u32 = 0x0114;
/// Frames whose look-up ended outside of the VE's part of a table.
pub const FAULTS: u32 = 0x1000;
/// Frames whose route did not fit.
pub const EXCESS: u32 = 0x1010;
/// Refused writes to the VE's page; for TARGET = VES, to the super page and to pages without a VE.
pub const REFUSED: u32 = 0x1020;
/// Frames that left a queue, by egress port. Bytes without cut padding.
pub const SENT: u32 = 0x1100;
/// Frames that arrived, by ingress port. Bytes without those of frames that are too long.
pub const RECEIVED: u32 = 0x1200;
/// Frames longer than 1,714 bytes, by ingress port. The card drops them.
pub const OVERSIZE: u32 = 0x1300;
/// Frames by ingress port and verdict. Bytes as received.
pub const VERDICT: u32 = 0x1800;
/// Index to commit an entry of table 0.
pub const COMMIT: u32 = 0x0200;

/// Number of table VMAC.
pub const TABLE_VMAC: u32 = 0;
/// Number of table VMAC_STASH.
pub const TABLE_VMAC_STASH: u32 = 1;
/// Number of table VMAC_SEED.
pub const TABLE_VMAC_SEED: u32 = 2;
/// Number of table METER.
pub const TABLE_METER: u32 = 3;
/// Number of table VE_CONTROL.
pub const TABLE_VE_CONTROL: u32 = 4;
/// Number of table ATTACHMENT.
pub const TABLE_ATTACHMENT: u32 = 5;
/// Number of table HOP_SEGMENTS.
pub const TABLE_HOP_SEGMENTS: u32 = 6;
/// Number of table LPM_SEGMENTS.
pub const TABLE_LPM_SEGMENTS: u32 = 7;
/// Number of table VE_OPTIONS.
pub const TABLE_VE_OPTIONS: u32 = 8;
/// Number of table CONTEXT.
pub const TABLE_CONTEXT: u32 = 9;
/// Number of table OWN_V4.
pub const TABLE_OWN_V4: u32 = 10;
/// Number of table GROUP.
pub const TABLE_GROUP: u32 = 11;
/// Number of table BUCKET.
pub const TABLE_BUCKET: u32 = 12;
/// Number of table HOP.
pub const TABLE_HOP: u32 = 13;
/// Number of table ARP.
pub const TABLE_ARP: u32 = 14;
/// Number of table LPM_ROOT.
pub const TABLE_LPM_ROOT: u32 = 15;
/// Number of table LPM_NODE.
pub const TABLE_LPM_NODE: u32 = 16;
/// Number of table LPM_LEAF.
pub const TABLE_LPM_LEAF: u32 = 17;
/// Number of table QUOTA.
pub const TABLE_QUOTA: u32 = 18;
/// Number of table WEIGHT.
pub const TABLE_WEIGHT: u32 = 19;

/// Words of an entry, by table.
pub const ENTRY_WORDS: [usize; 20] = [3, 3, 2, 2, 1, 2, 4, 4, 2, 1, 2, 1, 1, 2, 2, 2, 6, 1, 1, 1];
