//! Numbered UDP datagrams in IPv4 and Ethernet, as sent by all generators here.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pdp_wire::checksum::checksum;
use pdp_wire::{ether, ipv4, outer, udp};

/// Bytes of all headers.
pub const HEADERS_BYTES: usize = ether::HEADER_BYTES + ipv4::HEADER_BYTES + udp::HEADER_BYTES;

/// Offset of a frame's number, 8 bytes.
pub const NUMBER_AT: usize = HEADERS_BYTES;

/// Shortest frame: headers and number.
pub const FRAME_BYTES_MIN: usize = HEADERS_BYTES + 8;

/// UDP "discard" (RFC 863); sinks check for it.
const DISCARD_PORT: u16 = 9;

/// Offsets of the IPv4 header's checksum and destination in a frame.
const CHECKSUM_AT: usize = ether::HEADER_BYTES + 10;
const DESTINATION_AT: usize = ether::HEADER_BYTES + 16;

/// Frames that a generator sends.
#[derive(Clone, Debug)]
pub struct FrameStream {
    /// Destination MAC address.
    pub to_mac: [u8; 6],
    /// Source MAC address.
    pub from_mac: [u8; 6],
    /// Source IPv4 address.
    pub source: [u8; 4],
    /// Destination IPv4 addresses, in turn.
    pub destinations: Vec<[u8; 4]>,
    /// Length of each without FCS, bytes; at least [`FRAME_BYTES_MIN`].
    pub bytes: usize,
}

impl FrameStream {
    /// The headers, with zeros for the IPv4 header's destination and checksum.
    pub fn headers(&self) -> Result<[u8; HEADERS_BYTES]> {
        ensure!(self.bytes >= FRAME_BYTES_MIN, "frames of {} bytes", self.bytes);
        let ip_bytes = u16::try_from(self.bytes - ether::HEADER_BYTES)?;
        let mut ip = [0; ipv4::HEADER_BYTES];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&ip_bytes.to_be_bytes());
        ip[8..10].copy_from_slice(&[64, udp::PROTOCOL]);
        ip[12..16].copy_from_slice(&self.source);
        let length = ip_bytes - ipv4::HEADER_BYTES as u16;
        let (source_port, destination_port) = (50_000, DISCARD_PORT);
        let udp = udp::UdpHeader { source_port, destination_port, length, checksum: 0 };
        let kind = ether::kind::IPV4;
        let ethernet =
            ether::EthernetHeader { destination: self.to_mac, source: self.from_mac, kind };
        let mut headers = [0; HEADERS_BYTES];
        let parts = [&ethernet.emit()[..], &ip, &udp.emit()].concat();
        headers.copy_from_slice(&parts);
        Ok(headers)
    }

    /// Writes a pcap file with a frame for each of the first `count` destinations, through each of
    /// these tunnels in turn, if there are any.
    pub fn write_pcap(
        &self,
        path: &Path,
        count: usize,
        tunnels: &[outer::HeaderTemplate],
    ) -> Result<()> {
        let mut frame = self.headers()?.to_vec();
        frame.resize(self.bytes, 0);
        let destinations = self.destinations.iter().cycle().take(count).enumerate();
        let frames = destinations.map(|(number, destination)| {
            frame[CHECKSUM_AT..CHECKSUM_AT + 2].fill(0);
            frame[DESTINATION_AT..DESTINATION_AT + 4].copy_from_slice(destination);
            let sum = checksum(&frame[ether::HEADER_BYTES..][..ipv4::HEADER_BYTES]);
            frame[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&sum.to_be_bytes());
            let mut sent = frame.clone();
            if !tunnels.is_empty() {
                let tunnel = &tunnels[number % tunnels.len()];
                sent.splice(..0, vec![0; tunnel.len()]);
                tunnel.write(&mut sent, self.to_mac, self.from_mac).context("tunnel")?;
            }
            Ok(sent)
        });
        write_pcap(path, frames)
    }
}

/// Writes frames as a pcap file.
pub fn write_pcap(path: &Path, frames: impl Iterator<Item = Result<Vec<u8>>>) -> Result<()> {
    let file = File::create(path).with_context(|| path.display().to_string())?;
    let mut file = BufWriter::new(file);
    // draft-ietf-opsawg-pcap section 4: version 2.4, frames of 65,535 bytes at most, Ethernet.
    for word in [0xa1b2_c3d4u32, 4 << 16 | 2, 0, 0, 65_535, 1] {
        file.write_all(&word.to_le_bytes())?;
    }
    for frame in frames {
        let frame = frame?;
        let length = u32::try_from(frame.len())?;
        for word in [0, 0, length, length] {
            file.write_all(&word.to_le_bytes())?;
        }
        file.write_all(&frame)?;
    }
    file.flush().with_context(|| path.display().to_string())
}
