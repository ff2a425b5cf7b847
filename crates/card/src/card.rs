//! The Verilated card, with its ports, its host, and its registers.

use std::collections::VecDeque;

use crate::bus::{RegisterWrite, super_writes, ve_writes};
#[cfg(card_models)]
use crate::ffi::{self, Pins};
use crate::table::TableWrite;
use crate::{CardSizes, CardVerdict};

/// Physical ports.
pub const PORTS: u8 = 4;

/// The line of the host. The others are the ports.
pub const HOST_LINE: u8 = PORTS;

/// Ports and the host.
pub(crate) const LINES: usize = PORTS as usize + 1;

/// Metadata that leaves the card with a frame; `frame_meta_t` of card_frame_pkg.sv.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameMeta {
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
    /// Egress segment of a frame to send, else ingress segment.
    pub segment: u16,
}

/// The part of a frame that enters next at a line.
#[derive(Clone, Copy, Debug)]
pub struct LineFrame<'a> {
    /// Bytes that have not entered, at least one.
    pub rest: &'a [u8],
    /// 12 bits: at a port, the segment on which the frame arrives; at [`HOST_LINE`], `ve << 4 |
    /// vport` by which it leaves.
    pub user: u16,
}

/// A beat that leaves at a line.
#[derive(Clone, Copy, Debug)]
pub struct LineBeat<'a> {
    /// Port, or [`HOST_LINE`].
    pub line: u8,
    /// Bytes of the frame.
    pub bytes: &'a [u8],
    /// The beat is the frame's last one.
    pub last: bool,
    /// Metadata of the frame, the same in each of its beats.
    pub meta: FrameMeta,
}

/// Source and sink of the frames at the card's lines. The calls of a cycle come in the order of
/// the methods.
pub trait CardLines {
    /// Returns the frame that is next to enter at a line.
    fn next(&self, line: u8) -> Option<LineFrame<'_>>;

    /// A beat with the next `bytes` bytes has entered at a line.
    fn enter(&mut self, line: u8, bytes: usize, cycle: u64);

    /// A verdict on the oldest frame of a line that has entered whole and has none.
    fn decide(&mut self, line: u8, meta: FrameMeta);

    /// A beat leaves.
    fn leave(&mut self, beat: LineBeat<'_>, cycle: u64);
}

/// A cycle's inputs beside the lines.
#[derive(Clone, Copy, Debug, Default)]
struct CycleIn {
    reset: bool,
    cycle: u64,
    now: u64,
    ready: u8,
    write_address: Option<u32>,
    write_data: Option<u32>,
    read_address: Option<u32>,
}

/// A cycle's outputs to the bus.
#[derive(Clone, Copy, Debug, Default)]
struct BusOut {
    takes_address: bool,
    takes_data: bool,
    takes_read: bool,
    /// True if the write was refused.
    write_answer: Option<bool>,
    read_answer: Option<Result<u32, ReadRefused>>,
}

/// Error from reading an address that the page can't read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page has no readable register at this address")]
pub struct ReadRefused;

#[cfg(card_models)]
type WideInstance = ffi::Instance<ffi::WidePins, ffi::WideResultPins>;
#[cfg(card_more)]
type NarrowInstance = ffi::Instance<ffi::NarrowPins, ffi::NarrowResultPins>;

#[cfg(card_models)]
#[derive(Debug)]
enum CardInstance {
    Wide(WideInstance),
    #[cfg(card_more)]
    Narrow(NarrowInstance),
}

#[cfg(card_models)]
impl CardInstance {
    fn new(sizes: CardSizes, seed: u32) -> Option<Self> {
        let wide = |functions| Some(Self::Wide(ffi::Instance::new(functions, seed)));
        match sizes {
            CardSizes::CARD_8 => wide(&ffi::CARD_8),
            #[cfg(card_more)]
            CardSizes::CARD_8_NARROW => {
                Some(Self::Narrow(ffi::Instance::new(&ffi::CARD_8_NARROW, seed)))
            }
            #[cfg(card_more)]
            CardSizes::CARD_32 => wide(&ffi::CARD_32),
            #[cfg(card_more)]
            CardSizes::CARD_256 => wide(&ffi::CARD_256),
            _ => None,
        }
    }

    fn step(&mut self, input: &CycleIn, lines: &mut impl CardLines) -> BusOut {
        match self {
            Self::Wide(instance) => step(instance, input, lines),
            #[cfg(card_more)]
            Self::Narrow(instance) => step(instance, input, lines),
        }
    }
}

/// Returns `width` bits from bit `at` on.
#[cfg(card_models)]
fn bits(from: &[u8], at: usize, width: usize) -> u32 {
    (0..width).fold(0, |bits, bit| {
        let place = at + bit;
        bits | u32::from(from[place / 8] >> (place % 8) & 1) << bit
    })
}

#[cfg(card_models)]
fn set_bits(to: &mut [u8], at: usize, width: usize, value: usize) {
    for bit in (0..width).filter(|bit| value >> bit & 1 != 0) {
        to[(at + bit) / 8] |= 1 << ((at + bit) % 8);
    }
}

/// Number of a line in registers and in verdicts.
#[cfg(card_models)]
fn line_of(port: u8) -> u8 {
    if port == crate::header::HOST_PORT { HOST_LINE } else { port }
}

#[cfg(card_models)]
fn step<const BYTES: usize, const COUNTS: usize>(
    instance: &mut ffi::Instance<ffi::CardPins<BYTES, COUNTS>, ffi::CardResultPins<BYTES, COUNTS>>,
    input: &CycleIn,
    lines: &mut impl CardLines,
) -> BusOut {
    let count_bits = BYTES.ilog2() as usize + 1;
    let mut pins = ffi::CardPins::zero();
    (pins.rst, pins.now_i, pins.ready_i) = (input.reset.into(), input.now, input.ready);
    let (mut data, mut counts, mut offered) = ([[0; BYTES]; LINES], [0; COUNTS], [0; LINES]);
    for line in 0..LINES {
        let Some(frame) = lines.next(line as u8) else { continue };
        let count = frame.rest.len().min(BYTES);
        offered[line] = count;
        pins.valid_i |= 1 << line;
        data[line][..count].copy_from_slice(&frame.rest[..count]);
        set_bits(&mut counts, line * count_bits, count_bits, count);
        pins.last_i |= u8::from(frame.rest.len() <= BYTES) << line;
        pins.user_i |= u64::from(frame.user) << (12 * line);
    }
    (pins.data_i, pins.bytes_i) = (data, counts);
    pins.awvalid_i = input.write_address.is_some().into();
    pins.awaddr_i = input.write_address.unwrap_or(0);
    pins.wvalid_i = input.write_data.is_some().into();
    pins.wdata_i = input.write_data.unwrap_or(0);
    pins.wstrb_i = 15;
    pins.arvalid_i = input.read_address.is_some().into();
    pins.araddr_i = input.read_address.unwrap_or(0);
    (pins.bready_i, pins.rready_i) = (1, 1);
    let outputs = instance.step_before_edge(&pins);
    let (data, counts, meta) = (outputs.data_o, outputs.bytes_o, outputs.meta_o);
    // Registers have any contents before the first reset.
    let [taken, leaves] = [(outputs.ready_o, pins.valid_i), (outputs.valid_o, input.ready)]
        .map(|(from, to)| if input.reset { 0 } else { from & to });
    for line in (0..LINES).filter(|line| taken >> line & 1 != 0) {
        lines.enter(line as u8, offered[line], input.cycle);
    }
    if !input.reset && outputs.decided_o != 0 {
        let meta = FrameMeta::from_bits(outputs.decided_meta_o);
        lines.decide(line_of(outputs.decided_port_o), meta);
    }
    for line in (0..LINES).filter(|line| leaves >> line & 1 != 0) {
        let count = bits(&counts, line * count_bits, count_bits) as usize;
        let beat = LineBeat {
            line: line as u8,
            bytes: &data[line][..count],
            last: outputs.last_o >> line & 1 != 0,
            meta: FrameMeta::from_bits(bits(&meta, 30 * line, 30)),
        };
        lines.leave(beat, input.cycle);
    }
    let read = if outputs.rresp_o == 0 { Ok(outputs.rdata_o) } else { Err(ReadRefused) };
    BusOut {
        takes_address: outputs.awready_o != 0,
        takes_data: outputs.wready_o != 0,
        takes_read: outputs.arready_o != 0,
        write_answer: (outputs.bvalid_o != 0).then_some(outputs.bresp_o != 0),
        read_answer: (outputs.rvalid_o != 0).then_some(read),
    }
}

impl FrameMeta {
    fn from_bits(bits: u32) -> Self {
        Self {
            verdict: CardVerdict::from_code((bits >> 26) as u8).expect("a known verdict"),
            group: bits >> 25 & 1 != 0,
            owned: bits >> 24 & 1 != 0,
            ve: (bits >> 16) as u8,
            vport: (bits >> 12 & 15) as u8,
            segment: (bits & 0xfff) as u16,
        }
    }
}

/// A model of `card`, with a source and sink of frames. Its memories begin with contents that
/// depend on the seed, with 0 for seed 0; its queues begin empty.
#[derive(Debug)]
pub struct CardCore<L> {
    #[cfg(card_models)]
    instance: CardInstance,
    lines: L,
    cycles: u64,
    write_addresses: VecDeque<u32>,
    write_data: VecDeque<u32>,
    read_address: Option<u32>,
    read_answer: Option<Result<u32, ReadRefused>>,
    unanswered: u64,
    refused_count: u64,
}

impl<L: CardLines> CardCore<L> {
    /// Makes a model with these lines, and resets it. Returns `None` if there is no model of these
    /// sizes.
    #[cfg(card_models)]
    pub fn with_lines(sizes: CardSizes, seed: u32, lines: L) -> Option<Self> {
        let mut model = Self {
            instance: CardInstance::new(sizes, seed)?,
            lines,
            cycles: 0,
            write_addresses: VecDeque::new(),
            write_data: VecDeque::new(),
            read_address: None,
            read_answer: None,
            unanswered: 0,
            refused_count: 0,
        };
        model.reset_card();
        Some(model)
    }

    /// Returns `None`: the crate was built without models.
    #[cfg(not(card_models))]
    pub fn with_lines(_sizes: CardSizes, _seed: u32, _lines: L) -> Option<Self> {
        None
    }

    /// Source and sink of the frames.
    pub fn lines(&self) -> &L {
        &self.lines
    }

    /// Source and sink of the frames, mutable.
    pub fn lines_mut(&mut self) -> &mut L {
        &mut self.lines
    }

    /// Simulated clock cycles.
    pub fn cycles(&self) -> u64 {
        self.cycles
    }

    /// Number of register writes that the card has not answered.
    pub fn unanswered(&self) -> u64 {
        self.unanswered
    }

    /// Number of refused register writes.
    pub fn refused_count(&self) -> u64 {
        self.refused_count
    }

    /// Simulates a reset of three cycles. The memories keep their contents.
    pub(crate) fn reset_card(&mut self) {
        (self.write_addresses, self.write_data) = Default::default();
        (self.read_address, self.read_answer, self.unanswered) = Default::default();
        for _ in 0..3 {
            #[cfg(card_models)]
            self.instance.step(&CycleIn { reset: true, ..CycleIn::default() }, &mut self.lines);
            self.cycles += 1;
        }
    }

    /// Appends a register write to those that wait for the bus.
    pub fn write(&mut self, write: RegisterWrite) {
        self.unanswered += 1;
        self.write_addresses.push_back(write.address);
        self.write_data.push_back(write.data);
    }

    /// Simulates one cycle. Lines whose bit of `ready` is set take a beat. A tick of the meters is
    /// one cycle.
    ///
    /// # Panics
    /// If the hardware returns an unknown verdict.
    pub fn step(&mut self, ready: u8) {
        self.step_at(ready, self.cycles);
    }

    /// Like [`CardCore::step`], at the tick `now` of the meters, which has 48 bits.
    ///
    /// # Panics
    /// As there.
    pub fn step_at(&mut self, ready: u8, now: u64) {
        let input = CycleIn {
            reset: false,
            cycle: self.cycles,
            now: now & ((1 << 48) - 1),
            ready,
            write_address: self.write_addresses.front().copied(),
            write_data: self.write_data.front().copied(),
            read_address: self.read_address,
        };
        let output = self.step_model(&input);
        self.advance_bus(&input, &output);
        self.cycles += 1;
    }

    #[cfg(card_models)]
    fn step_model(&mut self, input: &CycleIn) -> BusOut {
        self.instance.step(input, &mut self.lines)
    }

    #[cfg(not(card_models))]
    fn step_model(&mut self, _: &CycleIn) -> BusOut {
        BusOut::default()
    }

    /// Follows the AXI-Lite handshakes of a cycle. Answers are taken at once.
    fn advance_bus(&mut self, input: &CycleIn, output: &BusOut) {
        if output.takes_address && input.write_address.is_some() {
            self.write_addresses.pop_front();
        }
        if output.takes_data && input.write_data.is_some() {
            self.write_data.pop_front();
        }
        if let Some(refused) = output.write_answer {
            self.unanswered -= 1;
            self.refused_count += u64::from(refused);
        }
        if output.takes_read && input.read_address.is_some() {
            self.read_address = None;
        }
        if output.read_answer.is_some() {
            self.read_answer = output.read_answer;
        }
    }

    /// Simulates cycles with all outputs ready until all register writes are answered.
    ///
    /// # Panics
    /// If the card does not answer.
    pub fn finish_writes(&mut self) {
        let limit = self.cycles + 100_000 + 32 * self.unanswered;
        while self.unanswered > 0 {
            assert!(self.cycles < limit, "{} register writes without an answer", self.unanswered);
            self.step(u8::MAX);
        }
    }

    /// Makes entries' writes by the super page, and waits until all are in the tables.
    pub fn super_write_all(&mut self, ve: u8, writes: impl IntoIterator<Item = TableWrite>) {
        for write in writes {
            super_writes(ve, &write).for_each(|write| self.write(write));
        }
        self.finish_writes();
    }

    /// Makes entries' writes by the VE's page, and waits until all are in the tables.
    pub fn ve_write_all(&mut self, ve: u8, writes: impl IntoIterator<Item = TableWrite>) {
        for write in writes {
            ve_writes(ve, &write).for_each(|write| self.write(write));
        }
        self.finish_writes();
    }

    /// Starts to read a register. Only one read may be under way.
    pub fn start_read(&mut self, address: u32) {
        self.read_address = Some(address);
    }

    /// Takes the answer to the read that was started, once it is there.
    pub fn take_read(&mut self) -> Option<Result<u32, ReadRefused>> {
        self.read_answer.take()
    }

    /// Reads a register; other outputs stay ready.
    ///
    /// # Errors
    /// If the page has no readable register there.
    ///
    /// # Panics
    /// If the card does not answer.
    pub fn read(&mut self, address: u32) -> Result<u32, ReadRefused> {
        self.start_read(address);
        for _ in 0..100_000 {
            self.step(u8::MAX);
            if let Some(answer) = self.take_read() {
                return answer;
            }
        }
        panic!("no answer to a read of {address:#x}");
    }

    /// Reads a counter of 64 bits.
    ///
    /// # Errors
    /// If the page has no counter there.
    pub fn read_counter(&mut self, address: u32) -> Result<u64, ReadRefused> {
        let low = self.read(address)?;
        let high = self.read(address + 4)?;
        Ok(u64::from(high) << 32 | u64::from(low))
    }
}
