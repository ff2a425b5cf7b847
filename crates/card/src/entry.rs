//! Entries of the look-up's tables, and the words that the write bus carries.

/// Address family of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteFamily {
    /// IPv4: an address is in a key's first 32 bits.
    V4,
    /// IPv6.
    V6,
}

impl RouteFamily {
    /// Bits of an address.
    pub fn bits(self) -> u32 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

/// Treatment of a packet by its route; `leaf_kind_t` of card_lpm_pkg.sv.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LeafKind {
    /// There is no route.
    #[default]
    None = 0,
    /// Sends the packet to a hop of the group.
    Group = 1,
    /// Drops the packet.
    Blackhole = 2,
    /// Passes the packet to the control guest's hook.
    Hook = 3,
    /// The destination is the router's own address.
    Local = 4,
    /// The route did not fit: the packet goes to the control guest and is counted.
    Excess = 5,
}

const KINDS: [LeafKind; 6] = [
    LeafKind::None,
    LeafKind::Group,
    LeafKind::Blackhole,
    LeafKind::Hook,
    LeafKind::Local,
    LeafKind::Excess,
];

/// A route's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Leaf {
    /// Treatment of the packet.
    pub kind: LeafKind,
    /// Index in the VE's segment of groups, `0..1024`.
    pub group: u16,
}

impl Leaf {
    /// The leaf of addresses without a route.
    pub const NONE: Self = Self { kind: LeafKind::None, group: 0 };

    /// Largest group index.
    pub const GROUP_MAX: u16 = (1 << 10) - 1;

    /// Returns a leaf that sends packets to a group.
    pub fn group(group: u16) -> Self {
        Self { kind: LeafKind::Group, group }
    }

    /// Returns the stored bits.
    pub fn bits(self) -> u16 {
        (self.kind as u16) << 10 | self.group & Self::GROUP_MAX
    }

    /// Returns the leaf with these bits, or `None` if its kind does not exist.
    pub fn from_bits(bits: u16) -> Option<Self> {
        let kind = *KINDS.get(usize::from(bits >> 10))?;
        Some(Self { kind, group: bits & Self::GROUP_MAX })
    }
}

/// Entry of level 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RootEntry {
    /// No route.
    #[default]
    None,
    /// Index of a leaf.
    Leaf(u32),
    /// Index of a node in level 1.
    Node(u32),
    /// Routes that did not fit.
    Excess,
}

/// A node of six bits; see `card_lpm_level.sv`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeEntry {
    /// Slots that lead to a node of the next level.
    pub child_map: u64,
    /// Slots where a new leaf begins; the hardware ignores bit 0, where the first one begins.
    pub leaf_map: u64,
    /// Index of the first child in the next level.
    pub child_base: u32,
    /// Index of the first leaf.
    pub leaf_base: u32,
}

/// One write to a VE's tables. Indices are relative to the VE's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LpmWrite {
    /// Writes an entry of level 0.
    Root {
        /// Family of the keys.
        family: RouteFamily,
        /// The key's first eight bits.
        slot: u8,
        /// The new entry.
        entry: RootEntry,
    },
    /// Writes a node.
    Node {
        /// The level, from 1.
        level: u8,
        /// Index of the node.
        index: u32,
        /// The new node.
        entry: NodeEntry,
    },
    /// Writes a leaf.
    Leaf {
        /// Index of the leaf.
        index: u32,
        /// The new leaf.
        leaf: Leaf,
    },
}

/// A VE's share of the nodes of each level and of the leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LpmSegment {
    /// First node.
    pub node_base: u32,
    /// Number of nodes in each level.
    pub node_length: u32,
    /// First leaf.
    pub leaf_base: u32,
    /// Number of leaves.
    pub leaf_length: u32,
}

/// Tables of the write bus; `lpm_table_t` of card_lpm_pkg.sv.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LpmTable {
    /// Entries of level 0.
    #[default]
    Root = 0,
    /// Nodes of the levels from 1.
    Node = 1,
    /// Leaves.
    Leaf = 2,
    /// Segments; only the super user's page writes them.
    Segment = 3,
}

/// A word of the write bus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LpmWord {
    /// The table.
    pub table: LpmTable,
    /// The level of a node.
    pub level: u8,
    /// The VE whose table it is.
    pub ve: u8,
    /// Index relative to the VE's segment.
    pub index: u32,
    /// The entry, least significant word first.
    pub data: [u32; 6],
}

fn halves(map: u64) -> [u32; 2] {
    [map as u32, (map >> 32) as u32]
}

impl LpmWrite {
    /// Returns the write of a VE as a word of the bus.
    pub fn word(&self, ve: u8) -> LpmWord {
        match *self {
            Self::Root { family, slot, entry } => {
                let (index, kind) = match entry {
                    RootEntry::None => (0, 0),
                    RootEntry::Leaf(index) => (index, 1),
                    RootEntry::Node(index) => (index, 2),
                    RootEntry::Excess => (0, 3),
                };
                let at = u32::from(slot) | u32::from(family == RouteFamily::V6) << 8;
                let data = [index, kind, 0, 0, 0, 0];
                LpmWord { table: LpmTable::Root, level: 0, ve, index: at, data }
            }
            Self::Node { level, index, entry } => {
                let [child_low, child_high] = halves(entry.child_map);
                let [leaf_low, leaf_high] = halves(entry.leaf_map);
                let bases = (entry.child_base, entry.leaf_base);
                let data = [child_low, child_high, leaf_low, leaf_high, bases.0, bases.1];
                LpmWord { table: LpmTable::Node, level, ve, index, data }
            }
            Self::Leaf { index, leaf } => {
                let data = [u32::from(leaf.bits()), 0, 0, 0, 0, 0];
                LpmWord { table: LpmTable::Leaf, level: 0, ve, index, data }
            }
        }
    }
}

impl LpmSegment {
    /// Returns the super user's write that gives a VE this segment.
    pub fn word(&self, ve: u8) -> LpmWord {
        let data = [self.node_base, self.node_length, self.leaf_base, self.leaf_length, 0, 0];
        LpmWord { table: LpmTable::Segment, level: 0, ve, index: 0, data }
    }
}
