//! The Verilated header pipeline.

use pdp_ip::Decision;
use pdp_wire::tag::{GuestDrop, PuntClass};

#[cfg(card_models)]
use crate::ffi::{self, Pins};
use crate::table::TableWord;

/// Bytes of a frame that the header pipeline sees.
pub const HEADER_BYTES: usize = 64;

/// Longest frame, bytes.
pub const FRAME_BYTES_MAX: usize = 1714;

/// The port to the driver.
pub const HOST_PORT: u8 = 7;

/// Verdict on a frame; `verdict_t` of card_pkg.sv.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CardVerdict {
    /// Out of a port.
    Out,
    /// To the control guest: for the router itself.
    PuntLocal,
    /// To the control guest: a neighbour to resolve, or a neighbour's message.
    PuntNeighbour,
    /// To the control guest: an exception.
    PuntException,
    /// To the control guest: its kernel decides.
    PuntHook,
    /// To the control guest: a routing protocol.
    PuntControl,
    /// Drop: to another station.
    DropNotForUs,
    /// Drop: broken header.
    DropMalformed,
    /// Drop: an address that no packet may have.
    DropPolicy,
    /// Drop: blackhole route.
    DropBlackhole,
    /// Drop: no VE has the address.
    DropNoVe,
    /// Drop: beyond the VE's rate.
    DropRate,
    /// Drop: sent by the host from another address.
    DropSpoof,
    /// Drop: full queue.
    DropQueue,
}

impl CardVerdict {
    /// Returns the verdict with this code.
    pub fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::Out,
            1 => Self::PuntLocal,
            2 => Self::PuntNeighbour,
            3 => Self::PuntException,
            4 => Self::PuntHook,
            5 => Self::PuntControl,
            8 => Self::DropNotForUs,
            9 => Self::DropMalformed,
            10 => Self::DropPolicy,
            11 => Self::DropBlackhole,
            12 => Self::DropNoVe,
            13 => Self::DropRate,
            14 => Self::DropSpoof,
            15 => Self::DropQueue,
            _ => return None,
        })
    }

    /// Returns the verdict that says the same; `None` if the card does not have it.
    pub fn of(decision: Decision) -> Option<Self> {
        Some(match decision {
            Decision::Out(_) => Self::Out,
            Decision::Punt(PuntClass::Local) => Self::PuntLocal,
            Decision::Punt(PuntClass::Neighbour) => Self::PuntNeighbour,
            Decision::Punt(PuntClass::Exception) => Self::PuntException,
            Decision::Punt(PuntClass::Hook) => Self::PuntHook,
            Decision::Punt(PuntClass::Control) => Self::PuntControl,
            Decision::Drop(GuestDrop::NotForUs) => Self::DropNotForUs,
            Decision::Drop(GuestDrop::Malformed) => Self::DropMalformed,
            Decision::Drop(GuestDrop::Policy) => Self::DropPolicy,
            Decision::Drop(GuestDrop::Blackhole) => Self::DropBlackhole,
            Decision::Drop(_) => return None,
        })
    }

    /// True if the frame goes to the control guest.
    pub fn is_punt(self) -> bool {
        (Self::PuntLocal..=Self::PuntControl).contains(&self)
    }
}

/// A frame that enters; `header_in_t` of card_pkg.sv.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderIn {
    /// The frame's first bytes, zero behind its end.
    pub bytes: [u8; HEADER_BYTES],
    /// Bytes of the whole frame.
    pub length: u16,
    /// Port that received the frame.
    pub port: u8,
    /// Segment of the frame.
    pub segment: u16,
    /// From [`HOST_PORT`] only: VE whose page sent the frame.
    pub ve: u8,
    /// From [`HOST_PORT`] only: vport by which the frame leaves.
    pub vport: u8,
    /// Opaque number that comes back with the result.
    pub token: u16,
}

impl HeaderIn {
    /// Returns the record of a frame from a port.
    pub fn new(frame: &[u8], port: u8, segment: u16, token: u16) -> Self {
        let mut bytes = [0; HEADER_BYTES];
        let known = frame.len().min(HEADER_BYTES);
        bytes[..known].copy_from_slice(&frame[..known]);
        Self { bytes, length: frame.len() as u16, port, segment, ve: 0, vport: 0, token }
    }

    #[cfg(card_models)]
    fn pins(&self) -> [u64; 9] {
        let mut low = u64::from(self.length & 0x7ff);
        low = low << 3 | u64::from(self.port & 7);
        low = low << 12 | u64::from(self.segment & 0xfff);
        low = low << 8 | u64::from(self.ve);
        low = low << 4 | u64::from(self.vport & 15);
        low = low << 16 | u64::from(self.token);
        let mut pins = [low, 0, 0, 0, 0, 0, 0, 0, 0];
        for (at, bytes) in self.bytes.as_chunks::<8>().0.iter().enumerate() {
            let word = u64::from_le_bytes(*bytes);
            pins[at] |= word << 54;
            pins[at + 1] = word >> 10;
        }
        pins
    }
}

/// A frame that leaves; `header_out_t` of card_pkg.sv.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderOut {
    /// The frame's first bytes; those behind its end are undefined.
    pub bytes: [u8; HEADER_BYTES],
    /// Bytes of the whole frame.
    pub length: u16,
    /// The verdict.
    pub verdict: CardVerdict,
    /// The frame goes to each VE of the segment.
    pub group: bool,
    /// The frame belongs to `ve`.
    pub owned: bool,
    /// VE of the frame.
    pub ve: u8,
    /// Egress vport of a frame to send, else ingress vport.
    pub vport: u8,
    /// Egress port of a frame to send, else [`HOST_PORT`].
    pub port: u8,
    /// Egress segment of a frame to send, else ingress segment.
    pub segment: u16,
    /// Number of the frame.
    pub token: u16,
    /// An index led out of a part of the VE.
    pub fault: bool,
    /// The route of the frame did not fit.
    pub excess: bool,
}

impl HeaderOut {
    #[cfg(card_models)]
    fn read(output: &ffi::HeaderResultPins) -> Self {
        let pins = output.header_o;
        let field = |low: u32, bits: u32| pins[0] >> low & ((1 << bits) - 1);
        let mut bytes = [0; HEADER_BYTES];
        for (at, chunk) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *chunk = (pins[at] >> 60 | pins[at + 1] << 4).to_le_bytes();
        }
        Self {
            bytes,
            length: field(49, 11) as u16,
            verdict: CardVerdict::from_code(field(45, 4) as u8).expect("a known verdict"),
            group: field(44, 1) != 0,
            owned: field(43, 1) != 0,
            ve: field(35, 8) as u8,
            vport: field(31, 4) as u8,
            port: field(28, 3) as u8,
            segment: field(16, 12) as u16,
            token: field(0, 16) as u16,
            fault: output.fault_o != 0,
            excess: output.excess_o != 0,
        }
    }
}

/// A model of `card_header`. Its memories begin with random contents, its pipeline empty.
#[derive(Debug)]
pub struct HeaderModel {
    #[cfg(card_models)]
    instance: ffi::Instance<ffi::HeaderPins, ffi::HeaderResultPins>,
    cycles: u64,
    refused_count: u64,
}

impl HeaderModel {
    /// Cycles from a frame to its result.
    pub const LATENCY: u32 = 56;

    /// Cycles from a write until frames that enter see it in all tables.
    pub const WRITE_CYCLES: u32 = 6;

    /// Makes a model and resets it; the memories' first contents depend on `seed`. Returns `None`
    /// if the crate was built without models.
    #[cfg(card_models)]
    pub fn new(seed: u32) -> Option<Self> {
        let instance = ffi::Instance::new(&ffi::CARD_HEADER, seed);
        let mut model = Self { instance, cycles: 0, refused_count: 0 };
        model.reset();
        Some(model)
    }

    /// Returns `None`: the crate was built without models.
    #[cfg(not(card_models))]
    pub fn new(_seed: u32) -> Option<Self> {
        None
    }

    /// Number of refused writes.
    pub fn refused_count(&self) -> u64 {
        self.refused_count
    }

    /// Simulates a reset of three cycles. Frames on the way have no result. The memories keep
    /// their contents.
    pub fn reset(&mut self) {
        for _ in 0..3 {
            #[cfg(card_models)]
            self.instance.step(&ffi::HeaderPins { rst: 1, ..Pins::zero() });
            self.cycles += 1;
        }
    }

    /// Simulates one cycle in which a frame and a write may enter. A frame's result is that of the
    /// call [`HeaderModel::LATENCY`]` - 1` calls after the one in which it entered. A tick of the
    /// meters is one cycle.
    ///
    /// # Panics
    /// If the hardware returns an unknown verdict.
    pub fn step(
        &mut self,
        frame: Option<&HeaderIn>,
        write: Option<TableWord>,
    ) -> Option<HeaderOut> {
        self.cycles += 1;
        self.step_model(frame, write)
    }

    #[cfg(not(card_models))]
    fn step_model(&mut self, _: Option<&HeaderIn>, _: Option<TableWord>) -> Option<HeaderOut> {
        None
    }

    #[cfg(card_models)]
    fn step_model(
        &mut self,
        frame: Option<&HeaderIn>,
        write: Option<TableWord>,
    ) -> Option<HeaderOut> {
        let now = self.cycles & ((1 << 48) - 1);
        let mut input = ffi::HeaderPins { now_i: now, ..Pins::zero() };
        if let Some(frame) = frame {
            input.valid_i = 1;
            input.header_i = frame.pins();
        }
        if let Some(write) = write {
            input.wr_valid_i = 1;
            input.wr_table_i = write.table as u8;
            input.wr_ve_i = write.ve;
            input.wr_index_i = write.index;
            input.wr_data_i = write.data;
        }
        let output = self.instance.step(&input);
        self.refused_count += u64::from(output.wr_refused_o);
        (output.valid_o != 0).then(|| HeaderOut::read(&output))
    }

    /// Writes words without frames, and waits until all are in the tables.
    pub fn write_all(&mut self, words: impl IntoIterator<Item = TableWord>) {
        for word in words {
            self.step(None, Some(word));
        }
        for _ in 0..Self::WRITE_CYCLES {
            self.step(None, None);
        }
    }

    /// Passes frames, one per cycle, through the empty pipeline; returns their results.
    ///
    /// # Panics
    /// If a frame's result is late, early, or missing.
    pub fn process(&mut self, frames: &[HeaderIn]) -> Vec<HeaderOut> {
        let delay = Self::LATENCY as usize - 1;
        let mut results = Vec::with_capacity(frames.len());
        for cycle in 0..frames.len() + delay {
            let result = self.step(frames.get(cycle), None);
            assert_eq!(result.is_some(), cycle >= delay, "a result in cycle {cycle}");
            results.extend(result);
        }
        results
    }
}
