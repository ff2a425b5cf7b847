//! Captures as pcap: nanoseconds, little-endian, Ethernet.
//!
//! Source: draft-ietf-opsawg-pcap.

/// Header of a file: magic number for nanoseconds, version
/// 2.4, frames of up to 65,535 bytes, Ethernet.
pub const HEADER: [u8; 24] =
    [0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 1, 0, 0, 0];

/// Length of a frame's record header, bytes.
pub const RECORD_BYTES: usize = 16;

/// Record header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcapRecordHeader {
    /// Time of capture, nanoseconds since 1970.
    pub at_ns: u64,
    /// Bytes of the frame in the file.
    pub kept: u32,
    /// Whole length of the frame, bytes.
    pub length: u32,
}

impl PcapRecordHeader {
    /// Returns the bytes in a file. Seconds overflow in 2106.
    pub fn emit(self) -> [u8; RECORD_BYTES] {
        let Self { at_ns, kept, length } = self;
        let words = [(at_ns / 1_000_000_000) as u32, (at_ns % 1_000_000_000) as u32, kept, length];
        let mut bytes = [0; RECORD_BYTES];
        bytes.chunks_exact_mut(4).zip(words).for_each(|(to, word)| {
            to.copy_from_slice(&word.to_le_bytes());
        });
        bytes
    }

    /// Reads the bytes of a file.
    pub fn parse(bytes: &[u8; RECORD_BYTES]) -> Self {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let at_ns = u64::from(word(0)) * 1_000_000_000 + u64::from(word(4));
        Self { at_ns, kept: word(8), length: word(12) }
    }
}
