//! Entries of the header pipeline's tables, and the words that its write bus carries.

use crate::{CardSizes, LpmSegment, LpmTable, LpmWrite, registers};

/// Next hops, neighbours, or blocks of buckets that an index of 12 bits reaches.
pub const INDEX_REACH: u16 = 1 << 12;

/// Tables of the write bus; `table_t` of card_pkg.sv.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CardTable {
    /// VMAC-VE table.
    #[default]
    Vmac = registers::TABLE_VMAC,
    /// Stash of the VMAC-VE table.
    VmacStash = registers::TABLE_VMAC_STASH,
    /// Seed of the VMAC-VE table's hash.
    VmacSeed = registers::TABLE_VMAC_SEED,
    /// Rate limits.
    Meter = registers::TABLE_METER,
    /// VEs that are enabled.
    VeControl = registers::TABLE_VE_CONTROL,
    /// Places of the vports.
    Attachment = registers::TABLE_ATTACHMENT,
    /// Parts of the tables of next hops.
    HopSegments = registers::TABLE_HOP_SEGMENTS,
    /// Parts of the look-up's tables.
    LpmSegments = registers::TABLE_LPM_SEGMENTS,
    /// Options.
    VeOptions = registers::TABLE_VE_OPTIONS,
    /// Contexts of the vports.
    Context = registers::TABLE_CONTEXT,
    /// The router's own IPv4 addresses.
    OwnV4 = registers::TABLE_OWN_V4,
    /// Groups of next hops.
    Group = registers::TABLE_GROUP,
    /// Buckets of groups with several hops.
    Bucket = registers::TABLE_BUCKET,
    /// Next hops.
    Hop = registers::TABLE_HOP,
    /// Neighbours' MAC addresses.
    Arp = registers::TABLE_ARP,
    /// Level 0 of the look-up.
    LpmRoot = registers::TABLE_LPM_ROOT,
    /// Nodes of the look-up.
    LpmNode = registers::TABLE_LPM_NODE,
    /// Leaves of the look-up.
    LpmLeaf = registers::TABLE_LPM_LEAF,
}

/// A word of the write bus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableWord {
    /// The table.
    pub table: CardTable,
    /// The VE whose table it is; 0 for tables of all VEs.
    pub ve: u8,
    /// Index, relative to the VE's segment where the table is pooled.
    pub index: u32,
    /// The entry, least significant word first.
    pub data: [u32; 6],
}

/// A MAC address; the byte that is first on the wire comes first.
pub type MacAddress = [u8; 6];

/// An entry of the VMAC-VE table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmacEntry {
    /// Segment of the frame, 12 bits.
    pub segment: u16,
    /// Destination of the frame.
    pub mac: MacAddress,
    /// VE that owns the address.
    pub ve: u8,
    /// Vport of that VE, 4 bits.
    pub vport: u8,
}

/// Rate limit of a VE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeterEntry {
    /// 2^-20 bytes per tick, 28 bits.
    pub rate: u32,
    /// Bytes, 20 bits.
    pub burst: u32,
}

/// Place of a vport outside of its VE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachmentEntry {
    /// Physical port.
    pub port: u8,
    /// Segment, 12 bits.
    pub segment: u16,
    /// MAC address of the vport.
    pub mac: MacAddress,
}

/// A VE's part of a pooled table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableRange {
    /// First entry.
    pub base: u16,
    /// Number of entries.
    pub length: u16,
}

/// A VE's parts of the tables of next hops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HopSegments {
    /// Neighbours.
    pub arps: TableRange,
    /// Next hops.
    pub hops: TableRange,
    /// Blocks of 256 buckets.
    pub blocks: TableRange,
    /// Groups.
    pub groups: TableRange,
}

/// Options of a VE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VeOptions {
    /// The VE forwards IPv4.
    pub forwards_v4: bool,
    /// The VE forwards IPv6.
    pub forwards_v6: bool,
    /// The card chooses among several next hops of IPv4 routes.
    pub chooses_v4: bool,
    /// The card chooses among several next hops of IPv6 routes.
    pub chooses_v6: bool,
    /// Seed of the choice.
    pub seed: u32,
}

/// Context of a vport that the mirror has named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextEntry {
    /// The vport is up.
    pub up: bool,
    /// The kernel forwards IPv4 packets that arrive on the vport.
    pub forwards_v4: bool,
    /// Frames that the kernel may handle in another way.
    pub hooked: pdp_proto::routes::VportHooks,
    /// Largest IP packet, bytes, 14 bits.
    pub mtu: u16,
}

/// A group of next hops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupEntry {
    /// No hop.
    Empty,
    /// Index of the only hop.
    Hop(u16),
    /// Index of the block of buckets.
    Block(u16),
}

/// A next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopEntry {
    /// Egress vport, 4 bits.
    pub vport: u8,
    /// The hop is one of several.
    pub chosen: bool,
    /// Index of the neighbour's MAC address, 12 bits. `None`: the neighbour is not known.
    pub arp: Option<u16>,
    /// Largest packet of its routes, bytes, 14 bits.
    pub mtu: u16,
}

/// One write to the header pipeline's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableWrite {
    /// Sets or erases an entry of a way.
    Vmac {
        /// The way, `0..4`.
        way: u8,
        /// The set.
        set: u8,
        /// The entry.
        entry: Option<VmacEntry>,
    },
    /// Sets or erases an entry of the stash.
    Stash {
        /// The entry's number, `0..8`.
        slot: u8,
        /// The entry.
        entry: Option<VmacEntry>,
    },
    /// Sets the seed of the VMAC-VE table's hash, 60 bits.
    Seed(u64),
    /// Limits the VE's rate; `None`: without a limit.
    Meter(Option<MeterEntry>),
    /// Enables or disables the VE.
    Enabled(bool),
    /// Attaches or detaches a vport.
    Attachment(u8, Option<AttachmentEntry>),
    /// Gives the VE its parts of the tables of next hops.
    HopSegments(HopSegments),
    /// Gives the VE its parts of the look-up's tables.
    LpmSegments(LpmSegment),
    /// Sets the VE's options.
    Options(VeOptions),
    /// Sets a vport's context; `None`: the mirror has not named it.
    Context(u8, Option<ContextEntry>),
    /// Sets one of 16 own IPv4 addresses.
    OwnV4(u8, Option<u32>),
    /// Sets the group at an index.
    Group(u16, GroupEntry),
    /// Sets a bucket of a block to the index of a hop.
    Bucket {
        /// Index of the block.
        block: u16,
        /// The bucket.
        bucket: u8,
        /// Index of the hop.
        hop: u16,
    },
    /// Sets the hop at an index.
    Hop(u16, Option<HopEntry>),
    /// Sets a neighbour's MAC address; `None`: unknown.
    Arp(u16, Option<MacAddress>),
    /// Writes to the look-up.
    Lpm(LpmWrite),
}

impl CardSizes {
    /// Returns the parts of the tables for a VE if all VEs have equal ones.
    pub fn equal_parts(&self, ve: u8) -> (HopSegments, LpmSegment) {
        let range = |entries: u32| {
            let length = (entries / self.ves) as u16;
            TableRange { base: length * u16::from(ve), length }
        };
        let hops = HopSegments {
            arps: range(self.arps),
            hops: range(self.hops),
            blocks: range(self.bucket_blocks),
            groups: range(self.groups),
        };
        let [node_length, leaf_length] = [self.nodes, self.leaves].map(|all| all / self.ves);
        let lpm = LpmSegment {
            node_base: node_length * u32::from(ve),
            node_length,
            leaf_base: leaf_length * u32::from(ve),
            leaf_length,
        };
        (hops, lpm)
    }

    /// Sets of each of the four ways of the VMAC-VE table.
    pub fn vmac_sets(&self) -> u16 {
        (self.vmacs / 4) as u16
    }
}

/// Packs fields of some bits each, the most significant one first.
///
/// # Panics
/// If a value has more bits: it would change its neighbour.
fn pack<const N: usize>(fields: [(u64, u32); N]) -> [u32; 6] {
    let packed = fields.into_iter().fold(0u128, |packed, (value, bits)| {
        assert!(bits == 64 || value >> bits == 0, "{value:#x} in {bits} bits");
        packed << bits | u128::from(value)
    });
    let word = |at: u32| packed.checked_shr(32 * at).unwrap_or(0) as u32;
    std::array::from_fn(|at| word(at as u32))
}

/// Returns a MAC address as a number.
fn mac_bits(mac: MacAddress) -> u64 {
    mac.into_iter().fold(0, |bits, byte| bits << 8 | u64::from(byte))
}

/// Returns the key of the VMAC-VE table.
pub(crate) fn vmac_key(segment: u16, mac: MacAddress) -> u64 {
    u64::from(segment) << 48 | mac_bits(mac)
}

fn vmac_data(entry: Option<VmacEntry>) -> [u32; 6] {
    entry.map_or([0; 6], |entry| {
        let key = vmac_key(entry.segment, entry.mac);
        pack([(1, 1), (key, 60), (entry.ve.into(), 8), (entry.vport.into(), 4)])
    })
}

impl TableWrite {
    /// Returns the write of a VE as a word of the bus; tables of all VEs ignore `ve`.
    pub fn word(&self, ve: u8) -> TableWord {
        let whole = |range: TableRange| [(range.base.into(), 16), (range.length.into(), 16)];
        let (table, index, data) = match *self {
            Self::Vmac { way, set, entry } => {
                (CardTable::Vmac, u32::from(way) << 8 | u32::from(set), vmac_data(entry))
            }
            Self::Stash { slot, entry } => (CardTable::VmacStash, slot.into(), vmac_data(entry)),
            Self::Seed(seed) => (CardTable::VmacSeed, 0, pack([(seed, 60)])),
            Self::Meter(limit) => {
                let data = limit.map_or([0; 6], |limit| {
                    pack([(1, 1), (limit.rate.into(), 28), (limit.burst.into(), 20)])
                });
                (CardTable::Meter, 0, data)
            }
            Self::Enabled(enabled) => (CardTable::VeControl, 0, pack([(enabled.into(), 1)])),
            Self::Attachment(vport, attachment) => {
                let data = attachment.map_or([0; 6], |place| {
                    let AttachmentEntry { port, segment, mac } = place;
                    pack([(1, 1), (port.into(), 3), (segment.into(), 12), (mac_bits(mac), 48)])
                });
                (CardTable::Attachment, vport.into(), data)
            }
            Self::HopSegments(parts) => {
                let [[a, b], [c, d], [e, f], [g, h]] =
                    [parts.arps, parts.hops, parts.blocks, parts.groups].map(whole);
                (CardTable::HopSegments, 0, pack([a, b, c, d, e, f, g, h]))
            }
            Self::LpmSegments(segment) => (CardTable::LpmSegments, 0, segment.word(ve).data),
            Self::Options(options) => {
                let data = pack([
                    (options.forwards_v4.into(), 1),
                    (options.forwards_v6.into(), 1),
                    (options.chooses_v4.into(), 1),
                    (options.chooses_v6.into(), 1),
                    (options.seed.into(), 32),
                ]);
                (CardTable::VeOptions, 0, data)
            }
            Self::Context(vport, context) => {
                let data = context.map_or([0; 6], |context| {
                    pack([
                        (1, 1),
                        (context.up.into(), 1),
                        (context.forwards_v4.into(), 1),
                        (context.hooked.all.into(), 1),
                        (context.hooked.v4.into(), 1),
                        (context.hooked.v6.into(), 1),
                        (context.hooked.out.into(), 1),
                        (context.hooked.back_v4.into(), 1),
                        (context.hooked.back_v6.into(), 1),
                        (context.mtu.into(), 14),
                    ])
                });
                (CardTable::Context, vport.into(), data)
            }
            Self::OwnV4(slot, address) => {
                let data = address.map_or([0; 6], |address| pack([(1, 1), (address.into(), 32)]));
                (CardTable::OwnV4, slot.into(), data)
            }
            Self::Group(index, group) => {
                let data = match group {
                    GroupEntry::Empty => [0; 6],
                    GroupEntry::Hop(hop) => pack([(0b10, 2), (hop.into(), 12)]),
                    GroupEntry::Block(block) => pack([(0b11, 2), (block.into(), 12)]),
                };
                (CardTable::Group, index.into(), data)
            }
            Self::Bucket { block, bucket, hop } => {
                let index = u32::from(block) << 8 | u32::from(bucket);
                (CardTable::Bucket, index, pack([(hop.into(), 12)]))
            }
            Self::Hop(index, hop) => {
                let data = hop.map_or([0; 6], |hop| {
                    pack([
                        (1, 1),
                        (hop.vport.into(), 4),
                        (hop.chosen.into(), 1),
                        (hop.arp.is_some().into(), 1),
                        (hop.arp.unwrap_or(0).into(), 12),
                        (hop.mtu.into(), 14),
                    ])
                });
                (CardTable::Hop, index.into(), data)
            }
            Self::Arp(index, mac) => {
                let data = mac.map_or([0; 6], |mac| pack([(1, 1), (mac_bits(mac), 48)]));
                (CardTable::Arp, index.into(), data)
            }
            Self::Lpm(write) => {
                let word = write.word(ve);
                let (table, index) = match word.table {
                    LpmTable::Root => (CardTable::LpmRoot, word.index),
                    LpmTable::Node => {
                        (CardTable::LpmNode, u32::from(word.level) << 27 | word.index)
                    }
                    LpmTable::Leaf => (CardTable::LpmLeaf, word.index),
                    LpmTable::Segment => (CardTable::LpmSegments, word.index),
                };
                (table, index, word.data)
            }
        };
        let of_all = matches!(self, Self::Vmac { .. } | Self::Stash { .. } | Self::Seed(_));
        TableWord { table, ve: if of_all { 0 } else { ve }, index, data }
    }
}
