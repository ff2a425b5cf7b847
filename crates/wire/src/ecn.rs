//! Explicit congestion notification through tunnels: RFC 6040, normal mode.
//!
//! The outer header gets the inner mark ([`of`], section 4.1). After decapsulation, the inner
//! header gets the marks that routers on the path set ([`decapsulate`], section 4.2). Frames that
//! are not IP have no mark and stay unchanged. Never panics.

use crate::checksum::Sum;
use crate::{ether, ipv4, ipv6};

/// ECN mark: the two lowest bits of TOS or traffic class (RFC 3168 section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mark {
    /// Not ECN-capable; also for frames that are not IP.
    NotEct = 0,
    /// ECN-capable, ECT(1).
    Ect1 = 1,
    /// ECN-capable, ECT(0).
    Ect0 = 2,
    /// Congestion experienced.
    Ce = 3,
}

impl Mark {
    fn of_bits(bits: u8) -> Self {
        [Self::NotEct, Self::Ect1, Self::Ect0, Self::Ce][usize::from(bits & 3)]
    }
}

/// Returns the offset of a frame's IP packet, and the mark's bit shift in its second byte.
#[inline]
fn packet(frame: &[u8]) -> Option<(usize, u32)> {
    let (kind, at) = ether::payload(frame);
    match (kind, frame.get(at)? >> 4) {
        (ether::kind::IPV4, 4) if frame.len() >= at + ipv4::HEADER_BYTES => Some((at, 0)),
        (ether::kind::IPV6, 6) if frame.len() >= at + ipv6::HEADER_BYTES => Some((at, 4)),
        _ => None,
    }
}

/// Returns the mark of an Ethernet frame, behind up to two VLAN tags.
#[inline]
pub fn of(frame: &[u8]) -> Mark {
    packet(frame).map_or(Mark::NotEct, |(at, shift)| Mark::of_bits(frame[at + 1] >> shift))
}

/// Returns the DSCP of an Ethernet frame, from the same byte (RFC 2474 section 3), behind up to two
/// VLAN tags; 0 for a frame that is not IP.
#[inline]
pub fn dscp(frame: &[u8]) -> u8 {
    packet(frame).map_or(0, |(at, shift)| {
        let word = u16::from_be_bytes([frame[at], frame[at + 1]]);
        (word >> (2 + shift)) as u8 & 63
    })
}

/// Applies the outer mark to a decapsulated frame, and updates its IPv4 checksum (RFC
/// 1624). Returns false if the frame must be dropped: it met congestion, but its sender
/// does not support ECN and only notices a loss.
#[inline]
#[must_use]
pub fn decapsulate(frame: &mut [u8], outer: Mark) -> bool {
    match outer {
        // The inner mark stays.
        Mark::NotEct | Mark::Ect0 => true,
        Mark::Ect1 | Mark::Ce => mark(frame, outer),
    }
}

#[cold]
fn mark(frame: &mut [u8], outer: Mark) -> bool {
    let Some((at, shift)) = packet(frame) else { return true };
    let to = match (Mark::of_bits(frame[at + 1] >> shift), outer) {
        (Mark::NotEct, Mark::Ce) => return false,
        (Mark::Ect0 | Mark::Ect1, Mark::Ce) => Mark::Ce,
        (Mark::Ect0, Mark::Ect1) => Mark::Ect1,
        _ => return true,
    };
    let was = [frame[at], frame[at + 1]];
    frame[at + 1] = was[1] & !(3 << shift) | (to as u8) << shift;
    if shift == 0 {
        // RFC 1624 equation 3: ~(~checksum + ~was + is).
        let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let sum = Sum::default().with_word(!word(at + 10)).with_word(!u16::from_be_bytes(was));
        let sum = sum.with_word(word(at)).finish();
        frame[at + 10..at + 12].copy_from_slice(&sum.to_be_bytes());
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    const MARKS: [Mark; 4] = [Mark::NotEct, Mark::Ect0, Mark::Ect1, Mark::Ce];

    /// Figure 4 of RFC 6040: inner marks by row, outer marks
    /// by column, both in the order of [`MARKS`].
    const FIGURE_4: [[Option<Mark>; 4]; 4] = [
        [Some(Mark::NotEct), Some(Mark::NotEct), Some(Mark::NotEct), None],
        [Some(Mark::Ect0), Some(Mark::Ect0), Some(Mark::Ect1), Some(Mark::Ce)],
        [Some(Mark::Ect1), Some(Mark::Ect1), Some(Mark::Ect1), Some(Mark::Ce)],
        [Some(Mark::Ce), Some(Mark::Ce), Some(Mark::Ce), Some(Mark::Ce)],
    ];

    fn frame(v4: bool, class: u8, tags: usize, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        let builder = PacketBuilder::ethernet2([1; 6], [2; 6]);
        if v4 {
            let builder = builder.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 9).udp(1, 2);
            builder.write(&mut frame, payload).unwrap();
            frame[15] = class;
            frame[24..26].fill(0);
            let sum = crate::checksum::checksum(&frame[14..34]);
            frame[24..26].copy_from_slice(&sum.to_be_bytes());
        } else {
            builder.ipv6([1; 16], [2; 16], 9).udp(1, 2).write(&mut frame, payload).unwrap();
            frame[14] |= class >> 4;
            frame[15] |= class << 4;
        }
        for _ in 0..tags {
            frame.splice(12..12, [0x81, 0, 0, 5]);
        }
        frame
    }

    #[test]
    fn ecn_decapsulation_matches_rfc_6040_figure_4() {
        for (v4, tags, dscp) in
            [true, false].into_iter().flat_map(|v4| (0..3).map(move |tags| (v4, tags, 46 << 2)))
        {
            for (row, inner) in MARKS.into_iter().enumerate() {
                for (column, outer) in MARKS.into_iter().enumerate() {
                    let was = frame(v4, dscp | inner as u8, tags, b"payload");
                    assert_eq!(of(&was), inner);
                    let mut is = was.clone();
                    let kept = decapsulate(&mut is, outer);
                    let want = FIGURE_4[row][column];
                    assert_eq!(kept.then(|| of(&is)), want, "{inner:?} in {outer:?}");
                    let want = want.map_or(was, |it| frame(v4, dscp | it as u8, tags, b"payload"));
                    assert_eq!(is, want, "nothing else, and the checksum is right");
                }
            }
        }
    }

    #[test]
    fn ecn_leaves_non_ip_frames_unchanged() {
        let arp = [&[1; 12][..], &[8, 6], &[0x45; 40]].concat();
        let lie = [&[1; 12][..], &[8, 0], &[0x65; 40]].concat();
        let short = [&[1; 12][..], &[8, 0], &[0x45; 19]].concat();
        let deep = frame(true, 2, 3, b"");
        for was in [arp, lie, short, deep] {
            let mut is = was.clone();
            assert_eq!(of(&is), Mark::NotEct);
            assert!(decapsulate(&mut is, Mark::Ce));
            assert_eq!(is, was);
        }
    }

    proptest! {
        #[test]
        fn incremental_checksum_matches_the_full_one(
            identification: u16, class: u8, outer in prop::sample::select(&MARKS[..]),
        ) {
            let mut bytes = frame(true, class, 0, b"");
            bytes[18..20].copy_from_slice(&identification.to_be_bytes());
            bytes[24..26].fill(0);
            let sum = crate::checksum::checksum(&bytes[14..34]);
            bytes[24..26].copy_from_slice(&sum.to_be_bytes());
            let _ = decapsulate(&mut bytes, outer);
            prop_assert_eq!(crate::checksum::checksum(&bytes[14..34]), 0);
        }

        #[test]
        fn noise_never_panics(mut bytes: Vec<u8>, outer in prop::sample::select(&MARKS[..]), kind: u8) {
            if let Some(kinds) = bytes.get_mut(12..14) {
                let kinds_of = [[8, 0], [0x86, 0xdd], [0x81, 0]];
                kinds.copy_from_slice(&kinds_of[usize::from(kind) % 3]);
            }
            let _ = decapsulate(&mut bytes, outer);
        }
    }
}
