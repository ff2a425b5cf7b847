//! Reads layers and archives as tar. They may be compressed by gzip with one or more members, by
//! zstd with one or more frames, or not at all.
//!
//! Source: RFC 1952 (gzip, 2.2: members), RFC 8878 (zstd, 3.1: frames; 3.1.2: skippable frames,
//! with which pzstd begins each frame and `zstd:chunked` ends).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use sha2::{Digest, Sha256};

use super::{hex, invalid};

/// Compression of a layer or an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    None,
    Gzip,
    Zstd,
}

impl Packing {
    /// Detects the compression by the first bytes, since media types of layers have several
    /// dialects.
    pub fn of(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }

    /// Returns the suffix of a layer's media type.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Gzip => "+gzip",
            Self::Zstd => "+zstd",
        }
    }
}

/// Returns the decompressed bytes of a file, from its beginning on.
pub(super) fn open(file: File) -> io::Result<Box<dyn Read>> {
    let mut file = BufReader::new(file);
    Ok(match Packing::of(file.fill_buf()?) {
        Packing::None => Box::new(file),
        Packing::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        Packing::Zstd => Box::new(ZstdFrames::new(file)),
    })
}

/// Decompresses all zstd frames of a source, one after another.
struct ZstdFrames<R> {
    source: R,
    decoder: FrameDecoder,
    /// True within a frame.
    within: bool,
}

impl<R: BufRead> ZstdFrames<R> {
    fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), within: false }
    }

    /// Begins the next frame with content. Returns false if there is none.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            let length = match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.within = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => u64::from(length),
                Err(error) => return Err(broken(error)),
            };
            let skipped = io::copy(&mut self.source.by_ref().take(length), &mut io::sink())?;
            if skipped < length {
                return Err(invalid("zstd: it ends within a skippable frame".to_owned()));
            }
        }
        Ok(false)
    }

    /// Ends a frame that was read completely.
    fn end(&mut self) -> io::Result<()> {
        self.within = false;
        let (expected, found) =
            (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
        match expected.is_some() && expected != found {
            true => Err(invalid("zstd: wrong checksum of a frame".to_owned())),
            false => Ok(()),
        }
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while !buffer.is_empty() && (self.within || self.begin()?) {
            while self.decoder.can_collect() < buffer.len() && !self.decoder.is_finished() {
                let missing = buffer.len() - self.decoder.can_collect();
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBytes(missing))
                    .map_err(broken)?;
            }
            match self.decoder.read(buffer)? {
                0 => self.end()?,
                count => return Ok(count),
            }
        }
        Ok(0)
    }
}

fn broken(error: FrameDecoderError) -> io::Error {
    invalid(format!("zstd: {error}"))
}

/// A layer's tar. The image's configuration has its digest.
pub(super) struct Tar {
    reader: Box<dyn Read>,
    /// Expected digest in hexadecimal, and the hash of the bytes read so far. `None` if the
    /// configuration has no digest.
    digest: Option<(String, Sha256)>,
}

impl Tar {
    pub fn new(reader: Box<dyn Read>, digest: Option<String>) -> Self {
        Self { reader, digest: digest.map(|digest| (digest, Sha256::new())) }
    }

    /// Reads the bytes after the last entry, at most `bytes_max`, and checks the digest of
    /// everything. It detects a decoder that leaves something out.
    pub fn finish(mut self, bytes_max: u64) -> io::Result<()> {
        let rest = io::copy(&mut (&mut self).take(bytes_max), &mut io::sink())?;
        if rest == bytes_max && self.read(&mut [0])? > 0 {
            return Err(invalid(format!("more than {bytes_max} bytes after its last file")));
        }
        let Some((expected, read)) = self.digest else { return Ok(()) };
        match hex(&read.finalize()) == expected {
            true => Ok(()),
            false => Err(invalid(format!(
                "its unpacked content does not match sha256:{expected} of the configuration (diff_ids)"
            ))),
        }
    }
}

impl Read for Tar {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        if let Some((_, read)) = &mut self.digest {
            read.update(&buffer[..count]);
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn skippable(nibble: u8, bytes: &[u8]) -> Vec<u8> {
        let length = (bytes.len() as u32).to_le_bytes();
        [&[0x50 | nibble, 0x2a, 0x4d, 0x18], &length[..], bytes].concat()
    }

    fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut read = Vec::new();
        ZstdFrames::new(bytes).read_to_end(&mut read).map(|_| read)
    }

    #[test]
    fn truncated_zstd_frame_is_an_error() {
        let whole = [skippable(0, b"abc"), frame(&[7; 3000]), skippable(5, b"defg")].concat();
        assert_eq!(read(&whole).unwrap(), [7; 3000]);
        let ends = [0, 11, whole.len() - 12, whole.len()];
        for end in (0..whole.len()).filter(|end| !ends.contains(end)) {
            assert!(read(&whole[..end]).is_err(), "the first {end} of {}", whole.len());
        }
        assert!(read(&[&whole[..], b"rubbish"].concat()).is_err());
    }

    proptest! {
        #[test]
        fn reads_all_frames_around_skippable_ones(
            pieces in prop::collection::vec((any::<bool>(), 0u8..16, prop::collection::vec(any::<u8>(), 0..5000)), 0..8),
        ) {
            let (mut packed, mut want) = (Vec::new(), Vec::<u8>::new());
            for (skipped, nibble, bytes) in &pieces {
                match skipped {
                    true => packed.extend(skippable(*nibble, bytes)),
                    false => {
                        packed.extend(frame(bytes));
                        want.extend(bytes);
                    }
                }
            }
            prop_assert_eq!(read(&packed).unwrap(), want);
        }
    }
}
