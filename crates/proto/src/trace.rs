//! What traces say of frames, whoever follows them.

use std::net::IpAddr;

use crate::mux::Match;

/// Between the addresses of a packet that is traced, at the end of the details of its stage `classify`.
pub const ADDRESSES: &str = " > ";

/// From where to where a packet goes; `None` if it is not IP.
pub fn ends(frame: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let (kind, packet) = (frame.get(12..14)?, frame.get(14..)?);
    Some(match kind {
        [0x08, 0x00] => {
            let at = |start: usize| packet.get(start..)?.first_chunk::<4>().copied();
            (IpAddr::from(at(12)?), IpAddr::from(at(16)?))
        }
        [0x86, 0xdd] => {
            let at = |start: usize| packet.get(start..)?.first_chunk::<16>().copied();
            (IpAddr::from(at(8)?), IpAddr::from(at(24)?))
        }
        _ => return None,
    })
}

/// The same in words, with [`ADDRESSES`] between.
pub fn addresses(frame: &[u8]) -> Option<String> {
    ends(frame).map(|(from, to)| format!(", {from}{ADDRESSES}{to}"))
}

/// Whether `frame` has all these bytes. Bytes beyond its end match nothing.
#[inline]
pub fn matches(frame: &[u8], wanted: &[Match]) -> bool {
    wanted.iter().all(|wanted| {
        let start = usize::from(wanted.offset);
        let bytes = frame.get(start..start + wanted.value.len());
        bytes.is_some_and(|bytes| {
            // Without a branch a byte: the longest filters cost a tenth.
            let all = bytes.iter().zip(&wanted.value).zip(&wanted.mask);
            all.fold(0, |other, ((byte, value), mask)| other | (byte ^ value) & mask) == 0
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_of_ip_alone_and_as_far_as_it_goes() {
        let mut frame = vec![0; 14 + 40];
        assert_eq!(addresses(&frame), None);
        frame[12] = 8;
        frame[26..34].copy_from_slice(&[10, 0, 1, 2, 10, 0, 2, 2]);
        assert_eq!(addresses(&frame).as_deref(), Some(", 10.0.1.2 > 10.0.2.2"));
        assert_eq!(addresses(&frame[..33]), None);
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        frame[53] = 1;
        assert!(addresses(&frame).unwrap().ends_with(" > ::1"));
        assert_eq!((addresses(&frame[..53]), addresses(&[])), (None, None));
    }

    #[test]
    fn matching() {
        let wanted = |offset, value: &[u8], mask: &[u8]| {
            vec![Match { offset, value: value.to_vec(), mask: mask.to_vec() }]
        };
        assert!(matches(b"abc", &wanted(1, b"b", &[0xff])));
        assert!(matches(b"abc", &wanted(1, b"c", &[0xfe])));
        assert!(!matches(b"abc", &wanted(1, b"c", &[0xff])));
        assert!(!matches(b"abc", &wanted(2, b"cd", &[0xff, 0])));
        assert!(matches(b"", &[]));
    }
}
