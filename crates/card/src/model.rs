//! The Verilated route look-up.

#[cfg(card_models)]
use crate::ffi;
use crate::{Leaf, LpmWord, RouteFamily};

/// True if the crate was built with Verilated models.
pub const MODELS: bool = cfg!(card_models);

/// A variant of `card_lpm` with its parameters, as in build.rs.
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

    /// Cycles of a look-up; `lpm_latency` of card_lpm_pkg.sv.
    pub fn latency(&self) -> u32 {
        let level = |level| 1 + if level >= self.ext_from { self.ext_latency } else { 1 };
        3 + (1..=self.levels).map(level).sum::<u32>()
    }

    /// Cycles from a write until look-ups that enter see it in all tables; no fewer than
    /// `LPM_WRITE_LATENCY` of card_lpm_pkg.sv plus one.
    pub const WRITE_CYCLES: u32 = 5;

    #[cfg(card_models)]
    fn functions(&self) -> Option<&'static ffi::LpmFunctions> {
        match *self {
            Self::SMALL => Some(&ffi::SMALL),
            Self::LARGE => Some(&ffi::LARGE),
            _ => None,
        }
    }
}

/// A look-up that enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LpmLookup {
    /// VE of the packet.
    pub ve: u8,
    /// Family of the packet.
    pub family: RouteFamily,
    /// Destination, aligned to the left.
    pub key: u128,
    /// Opaque number that comes back with the result.
    pub token: u16,
}

/// A look-up that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LpmResult {
    /// The longest matching route's leaf.
    pub leaf: Leaf,
    /// True if an index led outside of the VE's segments.
    pub fault: bool,
    /// VE of the look-up.
    pub ve: u8,
    /// Number of the look-up.
    pub token: u16,
}

/// A model of `card_lpm`. Its memories begin with random contents, its pipeline empty.
#[derive(Debug)]
pub struct LpmModel {
    #[cfg(card_models)]
    instance: ffi::LpmInstance,
    variant: LpmVariant,
    cycles: u64,
    refused_count: u64,
}

impl LpmModel {
    /// Makes a model and resets it; the memories' first contents depend on `seed`. Returns `None`
    /// if there is no model of this variant, or the crate was built without models.
    #[cfg(card_models)]
    pub fn new(variant: LpmVariant, seed: u32) -> Option<Self> {
        let instance = ffi::LpmInstance::new(variant.functions()?, seed);
        let mut model = Self { instance, variant, cycles: 0, refused_count: 0 };
        model.reset();
        Some(model)
    }

    /// Returns `None`: the crate was built without models.
    #[cfg(not(card_models))]
    pub fn new(_variant: LpmVariant, _seed: u32) -> Option<Self> {
        None
    }

    /// The model's variant.
    pub fn variant(&self) -> LpmVariant {
        self.variant
    }

    /// Simulated clock cycles.
    pub fn cycles(&self) -> u64 {
        self.cycles
    }

    /// Number of refused writes.
    pub fn refused_count(&self) -> u64 {
        self.refused_count
    }

    /// Simulates one cycle of reset. Look-ups on the way have no result; writes on the way are lost
    /// or done. The memories keep their contents.
    pub fn reset(&mut self) {
        #[cfg(card_models)]
        self.instance.step(&ffi::LpmIn { rst: 1, ..Default::default() });
        self.cycles += 1;
    }

    /// Simulates one cycle in which a look-up and a write may enter. A look-up's result is that of
    /// the call `latency() - 1` calls after the one in which it entered.
    ///
    /// # Panics
    /// If the hardware returns a leaf of an unknown kind.
    pub fn step(&mut self, lookup: Option<LpmLookup>, write: Option<LpmWord>) -> Option<LpmResult> {
        self.cycles += 1;
        self.step_model(lookup, write)
    }

    #[cfg(not(card_models))]
    fn step_model(&mut self, _: Option<LpmLookup>, _: Option<LpmWord>) -> Option<LpmResult> {
        None
    }

    #[cfg(card_models)]
    fn step_model(
        &mut self,
        lookup: Option<LpmLookup>,
        write: Option<LpmWord>,
    ) -> Option<LpmResult> {
        let mut input = ffi::LpmIn::default();
        if let Some(lookup) = lookup {
            input.valid = 1;
            input.ve = lookup.ve;
            input.is_v6 = u8::from(lookup.family == RouteFamily::V6);
            input.token = lookup.token;
            input.key = std::array::from_fn(|word| (lookup.key >> (32 * word)) as u32);
        }
        if let Some(write) = write {
            input.wr_valid = 1;
            input.wr_table = write.table as u8;
            input.wr_level = write.level;
            input.wr_ve = write.ve;
            input.wr_index = write.index;
            input.wr_data = write.data;
        }
        let output = self.instance.step(&input);
        self.refused_count += u64::from(output.wr_refused);
        (output.valid != 0).then(|| LpmResult {
            leaf: Leaf::from_bits(output.leaf).expect("a known kind of leaf"),
            fault: output.fault != 0,
            ve: output.ve,
            token: output.token,
        })
    }

    /// Writes words without look-ups, and waits until all are in the tables.
    pub fn write_all(&mut self, words: impl IntoIterator<Item = LpmWord>) {
        for word in words {
            self.step(None, Some(word));
        }
        for _ in 0..LpmVariant::WRITE_CYCLES {
            self.step(None, None);
        }
    }

    /// Looks one key up with nothing else in flight.
    pub fn lookup(&mut self, ve: u8, family: RouteFamily, key: u128) -> LpmResult {
        let mut result = self.step(Some(LpmLookup { ve, family, key, token: 0 }), None);
        for _ in 1..self.variant.latency() {
            assert!(result.is_none(), "a result too early");
            result = self.step(None, None);
        }
        result.expect("a result after the latency")
    }
}
