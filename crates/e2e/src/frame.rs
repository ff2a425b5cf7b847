//! A frame for generators in tests of distribution.

use std::path::Path;

use pdp_wire::checksum::checksum;

/// Offset of the frame's number: behind Ethernet, IPv4 and UDP.
pub const NUMBER_AT: usize = 42;

/// Writes a pcap file with one UDP datagram of 64 bytes from 10.0.1.2 to 10.0.2.2, sent to the MAC
/// address 02:00:00:00:01:01.
pub fn write_frame(path: &Path) -> std::io::Result<()> {
    write_frame_to(path, [10, 0, 2, 2])
}

/// Writes it with another destination address.
pub fn write_frame_to(path: &Path, to: [u8; 4]) -> std::io::Result<()> {
    let mut frame = [0; 64];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 1, 2, 8, 0]);
    let ip = [0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 1, 2, to[0], to[1], to[2], to[3]];
    frame[14..34].copy_from_slice(&ip);
    let sum = checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame[34..40].copy_from_slice(&[195, 80, 0, 9, 0, 30]);
    let words = [0xa1b2_c3d4u32, 4 << 16 | 2, 0, 0, 65_535, 1, 0, 0, 64, 64];
    let mut file: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    file.extend(frame);
    std::fs::write(path, file)
}
