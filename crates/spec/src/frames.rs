//! Parser of pcap files, for generators' frames.
//!
//! Never panics, whatever the bytes. Limits: [`PCAP_BYTES_MAX`] per
//! file, frames of [`FRAME_BYTES_MIN`] to [`FRAME_BYTES_MAX`] bytes.
//! Source: draft-ietf-opsawg-pcap, "PCAP Capture File Format".

use crate::limits::{FRAME_BYTES_MAX, FRAME_BYTES_MIN, PCAP_BYTES_MAX};

/// First four bytes of a file with timestamps in microseconds, and in nanoseconds.
const MAGIC_US: u32 = 0xa1b2_c3d4;
const MAGIC_NS: u32 = 0xa1b2_3c4d;
/// First four bytes of a pcapng file.
const MAGIC_NG: u32 = 0x0a0d_0d0a;
/// Link type Ethernet.
const LINKTYPE_ETHERNET: u32 = 1;
/// Header bytes of a file, and of a frame.
const HEADER_BYTES: usize = 24;
const RECORD_BYTES: usize = 16;

/// Error in a pcap file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PcapError {
    /// Another format.
    #[error("is not a pcap file")]
    NoPcap,
    /// The newer format.
    #[error("is a pcapng file, not pcap (`editcap -F pcap` converts it)")]
    Pcapng,
    /// Too long, bytes.
    #[error("has {0} bytes, {PCAP_BYTES_MAX} at most")]
    TooLong(usize),
    /// Frames of another link type.
    #[error("has frames of link type {0}, not Ethernet ({LINKTYPE_ETHERNET})")]
    LinkType(u32),
    /// The file ends within a frame.
    #[error("ends within frame {0}")]
    CutOff(usize),
    /// A frame that was captured only in part.
    #[error("has {has} of the {had} bytes of frame {number} (capture without a snap length)")]
    Snapped {
        /// Number of the frame, from 1.
        number: usize,
        /// Captured bytes.
        has: usize,
        /// Original bytes.
        had: usize,
    },
    /// A frame too short or too long.
    #[error("has a frame {number} of {bytes} bytes, not {FRAME_BYTES_MIN} to {FRAME_BYTES_MAX}")]
    Length {
        /// Number of the frame, from 1.
        number: usize,
        /// Length of the frame, bytes.
        bytes: usize,
    },
    /// No frames.
    #[error("has no frame")]
    Empty,
}

/// Returns the frames of a pcap file.
///
/// # Errors
/// The first error in the file.
pub fn read(file: &[u8]) -> Result<Vec<&[u8]>, PcapError> {
    let (header, mut rest) = file.split_first_chunk::<HEADER_BYTES>().ok_or(PcapError::NoPcap)?;
    let magic = [header[0], header[1], header[2], header[3]];
    let little = u32::from_le_bytes(magic);
    let number = match (little, little.swap_bytes()) {
        (MAGIC_US | MAGIC_NS, _) => u32::from_le_bytes,
        (_, MAGIC_US | MAGIC_NS) => u32::from_be_bytes,
        (MAGIC_NG, _) => return Err(PcapError::Pcapng),
        _ => return Err(PcapError::NoPcap),
    };
    if file.len() > PCAP_BYTES_MAX {
        return Err(PcapError::TooLong(file.len()));
    }
    // The upper four bits say whether frames end with a checksum.
    let link = number([header[20], header[21], header[22], header[23]]) & 0x0fff_ffff;
    if link != LINKTYPE_ETHERNET {
        return Err(PcapError::LinkType(link));
    }
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let at = frames.len() + 1;
        let (record, after) =
            rest.split_first_chunk::<RECORD_BYTES>().ok_or(PcapError::CutOff(at))?;
        let has = number([record[8], record[9], record[10], record[11]]) as usize;
        let had = number([record[12], record[13], record[14], record[15]]) as usize;
        let (frame, after) = after.split_at_checked(has).ok_or(PcapError::CutOff(at))?;
        if has != had {
            return Err(PcapError::Snapped { number: at, has, had });
        }
        if !(FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&has) {
            return Err(PcapError::Length { number: at, bytes: has });
        }
        frames.push(frame);
        rest = after;
    }
    if frames.is_empty() { Err(PcapError::Empty) } else { Ok(frames) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a file with these frames, in this byte order.
    fn file(big: bool, frames: &[Vec<u8>]) -> Vec<u8> {
        let number = |n: u32| if big { n.to_be_bytes() } else { n.to_le_bytes() };
        let mut file = number(if big { MAGIC_NS } else { MAGIC_US }).to_vec();
        file.extend([2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0]);
        file.extend(number(LINKTYPE_ETHERNET));
        for frame in frames {
            file.extend([0; 8]);
            file.extend(number(frame.len() as u32));
            file.extend(number(frame.len() as u32));
            file.extend(frame);
        }
        file
    }

    #[test]
    fn pcap_faults_are_reported() {
        let good = file(false, &[vec![1; 60], vec![2; 60]]);
        let with = |at: usize, byte: u8| {
            let mut file = good.clone();
            file[at] = byte;
            read(&file).map(|frames| frames.len()).unwrap_err()
        };
        assert_eq!(with(0, 0), PcapError::NoPcap);
        assert_eq!(with(20, 113), PcapError::LinkType(113));
        assert_eq!(
            with(HEADER_BYTES + 12, 200),
            PcapError::Snapped { number: 1, has: 60, had: 200 }
        );
        let length = |bytes| read(&file(true, &[vec![0; bytes]])).map(|f| f.len());
        assert_eq!(length(13), Err(PcapError::Length { number: 1, bytes: 13 }));
        assert_eq!(length(1715), Err(PcapError::Length { number: 1, bytes: 1715 }));
        assert_eq!((length(14), length(1714)), (Ok(1), Ok(1)));
        assert_eq!(read(&file(false, &[])), Err(PcapError::Empty));
        assert_eq!(read(&[0x0a; HEADER_BYTES]), Err(PcapError::NoPcap));
        assert_eq!(
            read(&[&[0x0a, 0x0d, 0x0d, 0x0a][..], &[0; 30]].concat()),
            Err(PcapError::Pcapng)
        );
        let long = vec![vec![0; 1000]; PCAP_BYTES_MAX / 1000];
        assert!(matches!(read(&file(false, &long)), Err(PcapError::TooLong(_))));
    }

    #[test]
    fn every_truncation_is_found() {
        let whole = file(true, &[vec![1; 60], vec![2; 14]]);
        for end in 0..whole.len() {
            let frames = read(&whole[..end]);
            let first = HEADER_BYTES + RECORD_BYTES + 60;
            assert_eq!(frames.is_ok(), end == first, "{end}");
        }
    }

    proptest! {
        #[test]
        fn pcap_frames_are_read_back(
            big: bool,
            frames in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), FRAME_BYTES_MIN..200), 1..9),
        ) {
            let file = file(big, &frames);
            prop_assert_eq!(read(&file).unwrap(), frames);
        }

        #[test]
        fn noise_never_panics(mut noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            let header = file(false, &[]);
            let length = noise.len().min(header.len());
            noise[..length].copy_from_slice(&header[..length]);
            let _ = read(&noise);
        }
    }
}
