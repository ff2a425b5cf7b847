//! Parameters of the models.

/// Parameters by their names in SystemVerilog.
pub type Parameters = Vec<(&'static str, u32)>;

/// A variant of `card_lpm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LpmVariant {
    /// Number of VEs.
    pub ves: u32,
    /// Levels of six bits.
    pub levels: u8,
    /// Nodes per level.
    pub nodes: u32,
    /// Leaves.
    pub leaves: u32,
    /// First level in external memory; none if it is above `levels`.
    pub ext_from: u8,
    /// Cycles of a read of external memory.
    pub ext_latency: u32,
}

impl LpmVariant {
    /// Four VEs with small tables on chip.
    pub const SMALL: Self =
        Self { ves: 4, levels: 20, nodes: 256, leaves: 2048, ext_from: 21, ext_latency: 4 };

    /// Two VEs with room for the Internet's table; levels behind 20 bits in external memory.
    pub const LARGE: Self =
        Self { ves: 2, levels: 10, nodes: 1 << 19, leaves: 1 << 22, ext_from: 3, ext_latency: 4 };

    /// Returns the parameters of the module.
    pub fn parameters(&self) -> Parameters {
        vec![
            ("VES", self.ves),
            ("LEVELS", self.levels.into()),
            ("NODES", self.nodes),
            ("LEAVES", self.leaves),
            ("EXT_FROM", self.ext_from.into()),
            ("EXT_LATENCY", self.ext_latency),
        ]
    }
}

/// Sizes of a card's tables and its data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardSizes {
    /// Bits of a beat.
    pub data_bits: u32,
    /// Cells of the queues, of 64 bytes each.
    pub cells: u32,
    /// VEs.
    pub ves: u32,
    /// Entries of the VMAC-VE table.
    pub vmacs: u32,
    /// Nodes per level of the look-up.
    pub nodes: u32,
    /// Leaves of the look-up.
    pub leaves: u32,
    /// Groups.
    pub groups: u32,
    /// Blocks of 256 buckets.
    pub bucket_blocks: u32,
    /// Next hops.
    pub hops: u32,
    /// Neighbours.
    pub arps: u32,
}

impl CardSizes {
    /// The card with 8 VEs.
    pub const CARD_8: Self = Self {
        data_bits: 512,
        cells: 1024,
        ves: 8,
        vmacs: 256,
        nodes: 2048,
        leaves: 32768,
        groups: 1024,
        bucket_blocks: 64,
        hops: 1024,
        arps: 2048,
    };

    /// The same with a narrow data path.
    pub const CARD_8_NARROW: Self = Self { data_bits: 64, ..Self::CARD_8 };

    /// The card with 32 VEs.
    pub const CARD_32: Self = Self::CARD_8.times(4);

    /// The card with 256 VEs.
    pub const CARD_256: Self = Self { vmacs: 1024, cells: 8192, ..Self::CARD_8.times(32) };

    /// The header pipeline alone.
    pub const HEADER: Self = Self { ves: 4, vmacs: 256, ..Self::CARD_8 };

    /// The same parts of the tables for so many times the VEs.
    const fn times(self, times: u32) -> Self {
        Self {
            ves: times * self.ves,
            vmacs: times * self.vmacs,
            nodes: times * self.nodes,
            leaves: times * self.leaves,
            groups: times * self.groups,
            bucket_blocks: times * self.bucket_blocks,
            hops: times * self.hops,
            arps: times * self.arps,
            ..self
        }
    }

    /// Returns the parameters of `card_header`.
    pub fn header_parameters(&self) -> Parameters {
        vec![
            ("VES", self.ves),
            ("VMACS", self.vmacs),
            ("NODES", self.nodes),
            ("LEAVES", self.leaves),
            ("GROUPS", self.groups),
            ("BUCKET_BLOCKS", self.bucket_blocks),
            ("HOPS", self.hops),
            ("ARPS", self.arps),
        ]
    }

    /// Returns the parameters of `card`.
    pub fn card_parameters(&self) -> Parameters {
        let mut parameters = self.header_parameters();
        parameters.extend([("DATA_BITS", self.data_bits), ("CELLS", self.cells)]);
        parameters
    }
}
