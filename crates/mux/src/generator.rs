//! A source and sink of frames inside the mux, for measurements.
//!
//! Generated frames enter before classification, like those of any other external interface. They
//! take no CPU but the mux's. A number in each frame reveals lost and reordered frames (RFC
//! 4737 section 3.3: a frame is reordered if one with a higher number arrived before it).

use pdp_afxdp::PACKET_BYTES;
use pdp_model::ExternalStats;
use pdp_proto::mux::{self, NUMBER_MARK, Rate};

use crate::counters::Reason;
use crate::netdev::{KEEP_FREE, NetdevContext, NetdevDriver, RECEIVE_FRAMES};
use crate::packets::{PacketBatch, Packets};
use crate::police::TokenBucket;

/// Bytes of all frames that one generator repeats, at most.
pub const FRAMES_BYTES_MAX: usize = 64 << 20;

/// Frames that a generator repeats.
#[derive(Debug, Default)]
pub struct GeneratorFrames {
    bytes: Vec<u8>,
    /// End of each frame. The next frame begins there.
    ends: Vec<u32>,
}

impl GeneratorFrames {
    /// Parses frames in the format of [`mux::GeneratorConfig`]. The error names the frame and its
    /// fault.
    pub fn parse(mut file: &[u8]) -> Result<Self, String> {
        if file.len() > FRAMES_BYTES_MAX {
            return Err(format!("{} bytes of frames exceed {FRAMES_BYTES_MAX}", file.len()));
        }
        let mut frames = Self::default();
        while let Some((length, rest)) = file.split_first_chunk::<2>() {
            let length = usize::from(u16::from_le_bytes(*length));
            let number = frames.ends.len();
            let frame = rest.get(..length).ok_or(format!("frame {number} is truncated"))?;
            if length > PACKET_BYTES - pdp_afxdp::HEADROOM_BYTES {
                return Err(format!("frame {number} has {length} bytes, more than a packet"));
            }
            frames.bytes.extend_from_slice(frame);
            frames.ends.push(frames.bytes.len() as u32);
            file = &rest[length..];
        }
        if file.is_empty() {
            Ok(frames)
        } else {
            Err("the last frame's length is truncated".into())
        }
    }

    fn get(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..self.ends[index] as usize]
    }
}

/// A generator.
#[derive(Debug)]
pub struct FrameGenerator {
    spec: mux::GeneratorConfig,
    frames: GeneratorFrames,
    next: usize,
    bucket: TokenBucket,
    made: u64,
    numbered: u64,
    late: u64,
    /// Number of the next frame if none is late.
    expected: u64,
}

impl FrameGenerator {
    /// Creates a generator from `spec`, with these frames.
    pub fn new(spec: mux::GeneratorConfig, frames: GeneratorFrames) -> Self {
        let bucket = TokenBucket::limit(Rate { bps: 0, pps: spec.pps });
        Self { spec, frames, next: 0, bucket, made: 0, numbered: 0, late: 0, expected: 0 }
    }

    /// Changes the generator to `spec`, and its frames if there are new ones.
    pub fn change(&mut self, spec: mux::GeneratorConfig, frames: Option<GeneratorFrames>) {
        if spec.frames != self.spec.frames {
            self.made = 0;
        }
        if spec.pps != self.spec.pps {
            self.bucket = TokenBucket::limit(Rate { bps: 0, pps: spec.pps });
        }
        if let Some(frames) = frames {
            (self.frames, self.next) = (frames, 0);
        }
        self.spec = spec;
    }

    /// Makes the frames that are due. Without a rate it makes `room` at
    /// most. Returns when the next one is due, unless that is at once.
    pub fn make(
        &mut self,
        now_ns: u64,
        room: usize,
        packets: &mut Packets,
        to: &mut PacketBatch,
    ) -> Option<u64> {
        let Self { spec, frames, next, bucket, made, .. } = self;
        if frames.ends.is_empty() {
            return None;
        }
        let paced = spec.pps > 0;
        let left = if spec.frames == 0 { u64::MAX } else { spec.frames.saturating_sub(*made) };
        let count = RECEIVE_FRAMES.min(if paced { usize::MAX } else { room });
        for _ in 0..(count as u64).min(left) {
            if paced && let Err(due_ns) = bucket.take(now_ns, 0) {
                return Some(due_ns);
            }
            let Some(mut packet) = packets.take() else { break };
            let frame = frames.get(*next);
            packet.room_mut()[..frame.len()].copy_from_slice(frame);
            let _ = packet.set_len(frame.len());
            if let Some((mark, number)) = number_place(spec.number_at, packet.bytes_mut()) {
                (*mark, *number) = (NUMBER_MARK, made.to_le_bytes());
            }
            *next = if *next + 1 < frames.ends.len() { *next + 1 } else { 0 };
            *made += 1;
            to.push(packet);
        }
        None
    }

    /// Consumes a frame that arrived.
    pub fn absorb(&mut self, frame: &mut [u8]) {
        if let Some((mark, number)) = number_place(self.spec.number_at, frame)
            && *mark == NUMBER_MARK
        {
            let number = u64::from_le_bytes(*number);
            self.numbered += 1;
            if number == 0 || number >= self.expected {
                self.expected = number.saturating_add(1);
            } else {
                self.late += 1;
            }
        }
    }

    /// Returns how many frames with a number arrived, and how many of these were late.
    pub fn counted(&self) -> (u64, u64) {
        (self.numbered, self.late)
    }
}

impl NetdevDriver for FrameGenerator {
    fn receive(
        &mut self,
        room: usize,
        tools: &mut NetdevContext<'_>,
        frames: &mut PacketBatch,
    ) -> Option<u64> {
        let before = frames.len();
        let room = room.min(tools.packets.at_hand().saturating_sub(KEEP_FREE));
        let due_ns = self.make(tools.now_ns, room, tools.packets, frames);
        tools.counters.stats.received += (frames.len() - before) as u64;
        due_ns
    }

    fn room(&mut self) -> usize {
        usize::MAX
    }

    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        tools.counters.stats.sent += frames.len() as u64;
        frames.iter_mut().for_each(|packet| self.absorb(packet.bytes_mut()));
        tools.packets.give_all(frames);
        Reason::ExternalRingFull
    }

    fn count(&self, stats: &mut ExternalStats) {
        (stats.numbered, stats.late) = self.counted();
    }
}

#[inline]
fn number_place(at: Option<u16>, frame: &mut [u8]) -> Option<(&mut [u8; 4], &mut [u8; 8])> {
    let (mark, rest) = frame.get_mut(usize::from(at?)..)?.split_first_chunk_mut()?;
    Some((mark, rest.first_chunk_mut()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(frames: &[&[u8]]) -> Vec<u8> {
        let each =
            frames.iter().map(|frame| [&(frame.len() as u16).to_le_bytes(), *frame].concat());
        each.collect::<Vec<_>>().concat()
    }

    #[test]
    fn generator_refuses_truncated_files() {
        let whole = file(&[&[1; 60], &[2; 61]]);
        for length in 0..whole.len() {
            let result = GeneratorFrames::parse(&whole[..length]);
            assert_eq!(result.is_ok(), length == 0 || length == 62, "{length}");
        }
        assert!(GeneratorFrames::parse(&file(&[&[0; PACKET_BYTES]])).is_err());
        assert_eq!(GeneratorFrames::parse(&whole).unwrap().get(1), [2; 61]);
    }

    #[test]
    fn generator_repeats_numbers_paces_and_counts_frames() {
        let (_pool, mut parts) = Packets::pool(1, 64).unwrap();
        let spec = mux::GeneratorConfig { pps: 1000, frames: 40, number_at: Some(4) };
        let frames = GeneratorFrames::parse(&file(&[&[1; 60], &[2; 61]])).unwrap();
        let mut source = FrameGenerator::new(spec.clone(), frames);
        let mut sink = FrameGenerator::new(spec, GeneratorFrames::default());
        let mut made = vec![];
        // A burst, then one frame a millisecond.
        let due = source.make(1_000_000, 0, &mut parts[0], &mut made).unwrap();
        assert_eq!(made.len(), 32);
        assert_eq!(source.make(due, 0, &mut parts[0], &mut made), Some(due + 1_000_000));
        assert_eq!(source.make(due + 1_000_000_000, 0, &mut parts[0], &mut made), None);
        assert_eq!(made.len(), 40, "no more than wanted");
        for (number, packet) in made.iter().enumerate() {
            assert_eq!(packet.len(), 60 + number % 2);
            assert_eq!(packet.bytes()[4..8], *b"PdP#");
            assert_eq!(packet.bytes()[8..16], (number as u64).to_le_bytes());
        }
        made.swap(3, 9);
        parts[0].give(made.remove(20));
        for packet in &mut made {
            sink.absorb(packet.bytes_mut());
        }
        sink.absorb(&mut [7; 60]);
        // After 9 come 4 to 8, and 3.
        assert_eq!(sink.counted(), (39, 6));
    }

    #[test]
    fn generator_without_rate_fills_the_free_space() {
        let (_pool, mut parts) = Packets::pool(1, 64).unwrap();
        let spec = mux::GeneratorConfig { pps: 0, frames: 0, number_at: None };
        let mut source =
            FrameGenerator::new(spec, GeneratorFrames::parse(&file(&[&[1; 60]])).unwrap());
        let mut made = vec![];
        for room in [0, 7, 1000] {
            assert_eq!(source.make(0, room, &mut parts[0], &mut made), None);
        }
        assert_eq!(made.len(), 64, "7, then all that the pool has");
    }
}
