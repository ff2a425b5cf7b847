//! The Verilated route look-up.

#[cfg(card_models)]
use crate::ffi::{self, Pins};
use crate::sizes::LpmVariant;
use crate::{Leaf, LpmWord, RouteFamily};

impl LpmVariant {
    /// Cycles of a look-up; `lpm_latency` of card_lpm_pkg.sv.
    pub fn latency(&self) -> u32 {
        let level = |level| 1 + if level >= self.ext_from { self.ext_latency } else { 1 };
        3 + (1..=self.levels).map(level).sum::<u32>()
    }

    /// Cycles from a write until look-ups that enter see it in all tables; no fewer than
    /// `LPM_WRITE_LATENCY` of card_lpm_pkg.sv plus one.
    pub const WRITE_CYCLES: u32 = 5;

    #[cfg(card_models)]
    fn functions(&self) -> Option<&'static ffi::ModelFunctions<ffi::LpmIn, ffi::LpmOut>> {
        match *self {
            Self::SMALL => Some(&ffi::CARD_LPM_SMALL),
            Self::LARGE => Some(&ffi::CARD_LPM_LARGE),
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
    instance: ffi::Instance<ffi::LpmIn, ffi::LpmOut>,
    variant: LpmVariant,
    cycles: u64,
    refused_count: u64,
}

impl LpmModel {
    /// Makes a model and resets it; the memories' first contents depend on `seed`. Returns `None`
    /// if there is no model of this variant, or the crate was built without models.
    #[cfg(card_models)]
    pub fn new(variant: LpmVariant, seed: u32) -> Option<Self> {
        let instance = ffi::Instance::new(variant.functions()?, seed);
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
        self.instance.step(&ffi::LpmIn { rst: 1, ..Pins::zero() });
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
        let mut input = ffi::LpmIn::zero();
        if let Some(lookup) = lookup {
            input.valid_i = 1;
            input.ve_i = lookup.ve;
            input.is_v6_i = u8::from(lookup.family == RouteFamily::V6);
            input.token_i = lookup.token;
            input.key_i = std::array::from_fn(|word| (lookup.key >> (32 * word)) as u32);
        }
        if let Some(write) = write {
            input.wr_valid_i = 1;
            input.wr_table_i = write.table as u8;
            input.wr_level_i = write.level;
            input.wr_ve_i = write.ve;
            input.wr_index_i = write.index;
            input.wr_data_i = write.data;
        }
        let output = self.instance.step(&input);
        self.refused_count += u64::from(output.wr_refused_o);
        (output.valid_o != 0).then(|| LpmResult {
            leaf: Leaf::from_bits(output.leaf_o).expect("a known kind of leaf"),
            fault: output.fault_o != 0,
            ve: output.ve_o,
            token: output.token_o,
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
