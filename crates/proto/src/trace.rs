//! Text and matching for packet traces, independent of who runs the trace.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::mux::BytePattern;

/// Beginning of the reason that a trace gives if no frame arrived.
pub const NO_FRAME: &str = "no such frame arrived";

/// Separator between a traced packet's addresses, at the end of the details of stage `classify`.
pub const ADDRESSES: &str = " > ";

/// Returns a packet's source and destination; `None` if it is not IP.
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

/// Returns a packet's addresses as text, separated by [`ADDRESSES`]. For ARP (RFC 826) and
/// neighbour discovery (RFC 4861 section 4), the text begins with the question or answer.
pub fn addresses(frame: &[u8]) -> Option<String> {
    let Some((from, to)) = ends(frame) else { return arp(frame) };
    Some(format!("{}, {from}{ADDRESSES}{to}", discovery(frame).unwrap_or_default()))
}

fn arp(frame: &[u8]) -> Option<String> {
    /// ARP of IPv4 on Ethernet.
    const HEADER: [u8; 8] = [0x08, 0x06, 0, 1, 8, 0, 6, 4];
    if frame.get(12..20)? != HEADER {
        return None;
    }
    let address = |at: usize| Some(Ipv4Addr::from(*frame.get(at..)?.first_chunk::<4>()?));
    let (sender, target) = (address(28)?, address(38)?);
    match frame.get(20..22)? {
        [0, 1] => Some(format!(", ARP who has {target}, tell {sender}")),
        [0, 2] => {
            let mac = frame.get(22..)?.first_chunk::<6>()?.map(|byte| format!("{byte:02x}"));
            Some(format!(", ARP {sender} is at {}", mac.join(":")))
        }
        _ => None,
    }
}

fn discovery(frame: &[u8]) -> Option<String> {
    const ICMPV6: u8 = 58;
    let address = Ipv6Addr::from(*frame.get(62..)?.first_chunk::<16>()?);
    match (*frame.get(20)?, *frame.get(54)?) {
        (ICMPV6, 135) => Some(format!(", ND who has {address}")),
        (ICMPV6, 136) => Some(format!(", ND answer for {address}")),
        _ => None,
    }
}

/// True if `frame` has all these bytes. Bytes beyond its end match nothing.
#[inline]
pub fn matches(frame: &[u8], patterns: &[BytePattern]) -> bool {
    patterns.iter().all(|pattern| {
        let start = usize::from(pattern.offset);
        let bytes = frame.get(start..start + pattern.value.len());
        bytes.is_some_and(|bytes| {
            // Without a branch per byte; the longest filters cost a tenth.
            let all = bytes.iter().zip(&pattern.value).zip(&pattern.mask);
            all.fold(0, |other, ((byte, value), mask)| other | (byte ^ value) & mask) == 0
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_shows_addresses_of_complete_ip_headers() {
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
    fn trace_shows_arp_and_nd_with_their_sender() {
        let mut arp = vec![0; 12];
        arp.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 2, 10, 0, 0, 2]);
        arp.extend([0, 0, 0, 0, 0, 0, 10, 0, 0, 1]);
        let shown = |frame: &[u8]| addresses(frame);
        assert_eq!(shown(&arp).as_deref(), Some(", ARP who has 10.0.0.1, tell 10.0.0.2"));
        assert_eq!(shown(&arp[..41]), None);
        arp[21] = 2;
        assert_eq!(shown(&arp).as_deref(), Some(", ARP 10.0.0.2 is at 02:00:00:00:00:02"));
        arp[21] = 3;
        assert_eq!(shown(&arp), None);
        let mut nd = vec![0; 14 + 40 + 24];
        nd[12..14].copy_from_slice(&[0x86, 0xdd]);
        (nd[20], nd[37], nd[53], nd[54], nd[77]) = (58, 2, 9, 135, 1);
        assert_eq!(shown(&nd).as_deref(), Some(", ND who has ::1, ::2 > ::9"));
        assert_eq!(shown(&nd[..77]).as_deref(), Some(", ::2 > ::9"));
        nd[54] = 136;
        assert_eq!(shown(&nd).as_deref(), Some(", ND answer for ::1, ::2 > ::9"));
        nd[20] = 17;
        assert_eq!(shown(&nd).as_deref(), Some(", ::2 > ::9"));
    }

    #[test]
    fn matching() {
        let pattern = |offset, value: &[u8], mask: &[u8]| {
            vec![BytePattern { offset, value: value.to_vec(), mask: mask.to_vec() }]
        };
        assert!(matches(b"abc", &pattern(1, b"b", &[0xff])));
        assert!(matches(b"abc", &pattern(1, b"c", &[0xfe])));
        assert!(!matches(b"abc", &pattern(1, b"c", &[0xff])));
        assert!(!matches(b"abc", &pattern(2, b"cd", &[0xff, 0])));
        assert!(matches(b"", &[]));
    }
}
