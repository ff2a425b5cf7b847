//! Frames that wait at the lines of a card, and those that have left, for tests.

use std::collections::VecDeque;

use crate::CardSizes;
use crate::card::{CardCore, CardLines, FrameMeta, LINES, LineBeat, LineFrame};

/// A model whose frames are lists of bytes.
pub type CardModel = CardCore<FrameLines>;

/// A frame that has left the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardOutput {
    /// Cycle of the first beat.
    pub cycle: u64,
    /// Port, or [`HOST_LINE`].
    pub line: u8,
    /// The frame.
    pub bytes: Vec<u8>,
    /// Metadata of the frame.
    pub meta: FrameMeta,
}

/// A frame that has entered the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardInput {
    /// Cycle of the last beat.
    pub cycle: u64,
    /// Port, or [`HOST_LINE`].
    pub line: u8,
}

/// A frame that waits at a line.
#[derive(Clone, Debug)]
struct PendingFrame {
    bytes: Vec<u8>,
    user: u16,
    /// Bytes that have entered.
    sent: usize,
}

/// A frame of which some beats have left.
#[derive(Clone, Debug, Default)]
struct LeavingFrame {
    first_cycle: u64,
    bytes: Vec<u8>,
}

/// Frames as lists of bytes.
#[derive(Clone, Debug, Default)]
pub struct FrameLines {
    waiting: [VecDeque<PendingFrame>; LINES],
    leaving: [LeavingFrame; LINES],
    inputs: Vec<CardInput>,
    decisions: Vec<(u8, FrameMeta)>,
    outputs: Vec<CardOutput>,
}

impl FrameLines {
    /// Appends a frame to those that wait at a line. `user` is that of [`LineFrame`].
    ///
    /// # Panics
    /// If the frame is empty, or `user` has more than 12 bits.
    pub fn send(&mut self, line: u8, frame: &[u8], user: u16) {
        assert!(!frame.is_empty() && user < 1 << 12, "{} bytes, user {user:#x}", frame.len());
        let frame = PendingFrame { bytes: frame.to_vec(), user, sent: 0 };
        self.waiting[usize::from(line)].push_back(frame);
    }
}

impl CardLines for FrameLines {
    fn next(&self, line: u8) -> Option<LineFrame<'_>> {
        let frame = self.waiting[usize::from(line)].front()?;
        Some(LineFrame { rest: &frame.bytes[frame.sent..], user: frame.user })
    }

    fn enter(&mut self, line: u8, bytes: usize, cycle: u64) {
        let waiting = &mut self.waiting[usize::from(line)];
        let Some(frame) = waiting.front_mut() else { return };
        frame.sent += bytes;
        if frame.sent == frame.bytes.len() {
            waiting.pop_front();
            self.inputs.push(CardInput { cycle, line });
        }
    }

    fn decide(&mut self, line: u8, meta: FrameMeta) {
        self.decisions.push((line, meta));
    }

    fn leave(&mut self, beat: LineBeat<'_>, cycle: u64) {
        let frame = &mut self.leaving[usize::from(beat.line)];
        if frame.bytes.is_empty() {
            frame.first_cycle = cycle;
        }
        frame.bytes.extend_from_slice(beat.bytes);
        if beat.last {
            let LeavingFrame { first_cycle, bytes } = std::mem::take(frame);
            let LineBeat { line, meta, .. } = beat;
            self.outputs.push(CardOutput { cycle: first_cycle, line, bytes, meta });
        }
    }
}

impl CardModel {
    /// Most cycles from the last beat of a frame to the first one at an idle output.
    pub const LATENCY: u64 = 64;

    /// Makes a model and resets it; the memories' first contents depend on `seed`. Returns `None`
    /// if there is no model of these sizes, or the crate was built without models.
    pub fn new(sizes: CardSizes, seed: u32) -> Option<Self> {
        Self::with_lines(sizes, seed, FrameLines::default())
    }

    /// Simulates a reset of three cycles. Frames on the way are lost, and so are register accesses.
    /// The memories keep their contents.
    pub fn reset(&mut self) {
        *self.lines_mut() = FrameLines::default();
        self.reset_card();
    }

    /// Appends a frame to those that wait at a line; see [`FrameLines::send`].
    ///
    /// # Panics
    /// If the frame is empty, or `user` has more than 12 bits.
    pub fn send(&mut self, line: u8, frame: &[u8], user: u16) {
        self.lines_mut().send(line, frame, user);
    }

    /// Takes the frames that have entered.
    pub fn take_inputs(&mut self) -> Vec<CardInput> {
        std::mem::take(&mut self.lines_mut().inputs)
    }

    /// Takes the frames that have left, in the order of their last beats.
    pub fn take_outputs(&mut self) -> Vec<CardOutput> {
        std::mem::take(&mut self.lines_mut().outputs)
    }

    /// Takes the verdicts, with the lines where their frames entered, in the order of the frames.
    pub fn take_decisions(&mut self) -> Vec<(u8, FrameMeta)> {
        std::mem::take(&mut self.lines_mut().decisions)
    }
}
