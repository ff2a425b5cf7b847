//! Captures as streams: a reader of pcap, and a writer that puts frames of several ports into one
//! pcapng. The pcapng records each frame's port.
//!
//! Source: draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng. The input is the daemon's:
//! nanoseconds, little-endian, Ethernet.

use std::io::{self, Write};

use bytes::{Buf, BytesMut};
use pdp_api::client::{Error, ResponseStream};
use pdp_wire::pcap::{self, HEADER, RECORD_BYTES};

use crate::failure::CliFailure;

/// Longest frame that the daemon sends, bytes.
const FRAME_BYTES_MAX: usize = 1 << 16;

/// A frame of a pcap stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcapRecord {
    /// Time of capture, nanoseconds since 1970.
    pub at_ns: u64,
    /// Length of the whole frame, bytes.
    pub length: u32,
    /// Captured beginning of the frame.
    pub bytes: Vec<u8>,
}

/// Parses frames from a stream that arrives in pieces.
#[derive(Debug, Default)]
pub struct PcapReader {
    bytes: BytesMut,
    begun: bool,
}

impl PcapReader {
    /// Returns the next frame of a capture; `None` at its end.
    pub async fn next(
        &mut self,
        from: &mut ResponseStream,
    ) -> Result<Option<PcapRecord>, CliFailure> {
        loop {
            if let Some(record) = self.take()? {
                return Ok(Some(record));
            }
            match from.next().await? {
                Some(bytes) => self.bytes.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }

    /// Parses the next frame from the buffer; `None` if more bytes are needed.
    fn take(&mut self) -> Result<Option<PcapRecord>, CliFailure> {
        if !self.begun {
            if self.bytes.len() < HEADER.len() {
                return Ok(None);
            }
            // Magic number and version.
            let is_ours = self.bytes[..8] == HEADER[..8];
            self.bytes.advance(HEADER.len());
            if !is_ours {
                return Err(Error::Answer(
                    "a capture that is not pcap with nanosecond timestamps".into(),
                )
                .into());
            }
            self.begun = true;
        }
        let Some(head) = self.bytes.first_chunk::<RECORD_BYTES>() else { return Ok(None) };
        let pcap::PcapRecordHeader { at_ns, kept, length } = pcap::PcapRecordHeader::parse(head);
        let kept = kept as usize;
        if kept > FRAME_BYTES_MAX {
            return Err(Error::Answer(format!("a frame of {kept} bytes in a capture")).into());
        }
        if self.bytes.len() < RECORD_BYTES + kept {
            return Ok(None);
        }
        self.bytes.advance(RECORD_BYTES);
        Ok(Some(PcapRecord { at_ns, length, bytes: self.bytes.split_to(kept).to_vec() }))
    }
}

/// Writer of a file with frames of ports.
pub struct PcapWriter<W> {
    to: W,
    several: bool,
}

impl<W: Write> PcapWriter<W> {
    /// Writes the header: pcap for one port, pcapng for several.
    pub fn new(mut to: W, ports: &[String]) -> io::Result<Self> {
        let several = ports.len() > 1;
        if several {
            let mut section = Vec::new();
            section.extend(0x1a2b_3c4d_u32.to_le_bytes());
            section.extend([1, 0, 0, 0]);
            section.extend((-1i64).to_le_bytes());
            block(&mut to, 0x0a0d_0d0a, &section)?;
            for port in ports {
                // Link type Ethernet, no snap length, the port's name, nanoseconds.
                let mut interface = vec![1, 0, 0, 0, 0, 0, 0, 0];
                option(&mut interface, 2, port.as_bytes());
                option(&mut interface, 9, &[9]);
                option(&mut interface, 0, &[]);
                block(&mut to, 1, &interface)?;
            }
        } else {
            to.write_all(&HEADER)?;
        }
        to.flush()?;
        Ok(Self { to, several })
    }

    /// Writes a frame of the port with this index.
    pub fn write(&mut self, port: u32, record: &PcapRecord) -> io::Result<()> {
        let PcapRecord { at_ns, length, bytes } = record;
        let kept = bytes.len() as u32;
        if self.several {
            let mut packet = Vec::with_capacity(20 + bytes.len() + 3);
            for word in [port, (at_ns >> 32) as u32, *at_ns as u32, kept, *length] {
                packet.extend(word.to_le_bytes());
            }
            packet.extend(bytes);
            pad(&mut packet);
            block(&mut self.to, 6, &packet)?;
        } else {
            let record = pcap::PcapRecordHeader { at_ns: *at_ns, kept, length: *length };
            self.to.write_all(&record.emit())?;
            self.to.write_all(bytes)?;
        }
        self.to.flush()
    }
}

fn block(to: &mut impl Write, kind: u32, body: &[u8]) -> io::Result<()> {
    let length = (12 + body.len() as u32).to_le_bytes();
    to.write_all(&kind.to_le_bytes())?;
    to.write_all(&length)?;
    to.write_all(body)?;
    to.write_all(&length)
}

fn option(to: &mut Vec<u8>, code: u16, value: &[u8]) {
    to.extend(code.to_le_bytes());
    to.extend((value.len() as u16).to_le_bytes());
    to.extend(value);
    pad(to);
}

fn pad(to: &mut Vec<u8>) {
    to.resize(to.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<PcapRecord> {
        let record =
            |at: u64, bytes: &[u8]| PcapRecord { at_ns: at, length: 1514, bytes: bytes.to_vec() };
        vec![record(1_700_000_000_123_456_789, b"abcde"), record(7, b""), record(8, &[9; 60])]
    }

    #[test]
    fn pcap_reader_reassembles_split_frames() {
        let mut file = Vec::new();
        let mut writer = PcapWriter::new(&mut file, &["red/r1:eth0".into()]).unwrap();
        records().iter().for_each(|record| writer.write(0, record).unwrap());
        for size in [1, 7, 24, 1000] {
            let (mut reader, mut found) = (PcapReader::default(), Vec::new());
            for piece in file.chunks(size) {
                reader.bytes.extend_from_slice(piece);
                while let Some(record) = reader.take().unwrap() {
                    found.push(record);
                }
            }
            assert_eq!(found, records(), "{size}");
        }
        let mut long = PcapReader { begun: true, ..PcapReader::default() };
        long.bytes.extend_from_slice(&[0xff; RECORD_BYTES]);
        assert!(long.take().is_err());
        let mut other = PcapReader::default();
        other.bytes.extend_from_slice(&[0; HEADER.len()]);
        assert!(other.take().is_err());
    }

    /// Checks the output with tcpdump.
    #[test]
    fn tcpdump_reads_pcapng_of_several_ports() {
        let mut file = Vec::new();
        let ports = ["red/r1:eth0".to_owned(), "red/r2:eth1".to_owned()];
        let mut writer = PcapWriter::new(&mut file, &ports).unwrap();
        let mut frame = vec![0xff; 12];
        frame.extend([0x88, 0xb5, 1, 2, 3]);
        for port in 0..2 {
            let record =
                PcapRecord { at_ns: 1_700_000_000_000_000_001, length: 17, bytes: frame.clone() };
            writer.write(port, &record).unwrap();
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("both.pcapng");
        std::fs::write(&path, &file).unwrap();
        let run = |arguments: &[&str]| {
            let path = path.to_str().unwrap();
            let mut command = std::process::Command::new("tcpdump");
            let output = command.args(["-r", path]).args(arguments).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        let text = run(&["-ne", "-ttt", "--nano"]);
        assert_eq!(text.matches("ethertype").count(), 2, "{text}");
        assert!(text.contains("ethertype Unknown (0x88b5), length 17"), "{text}");
        assert_eq!(file.windows(11).filter(|part| part == b"red/r2:eth1").count(), 1);
    }
}
