//! Frame formats.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{Ipv4HeaderSlice, Ipv6HeaderSlice};
use pdp_wire::checksum::{self as sums, Sum};
use pdp_wire::outer::OuterPayload;
use pdp_wire::tag::Tag;
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::{ether, flow as flows, geneve, gre, outer as outers, udp as udps, vxlan as vxlans};

use crate::input::FuzzInput;

/// RFC 1071 section 4.1, word by word.
pub(crate) fn slow_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

pub(crate) fn ethernet(bytes: &[u8]) {
    let header = ether::EthernetHeader::parse(bytes);
    assert_eq!(header.is_some(), bytes.len() >= ether::HEADER_BYTES);
    assert!(header.is_none_or(|header| header.emit() == bytes[..ether::HEADER_BYTES]));
    assert!(ether::payload_len(bytes) <= bytes.len().saturating_sub(ether::HEADER_BYTES));
}

pub(crate) fn ipv4(bytes: &[u8]) {
    let header = pdp_wire::ipv4::Ipv4Packet::parse(bytes);
    let reference = Ipv4HeaderSlice::from_slice(bytes).ok().filter(|header| {
        let total = usize::from(header.total_len());
        total >= header.slice().len() && total <= bytes.len() && slow_checksum(header.slice()) == 0
    });
    let (Some(header), Some(reference)) = (header, &reference) else {
        return assert_eq!(header.is_some(), reference.is_some());
    };
    assert_eq!(header.header_bytes, reference.slice().len());
    assert_eq!(header.packet_bytes, usize::from(reference.total_len()));
    assert_eq!(header.has_options(), !reference.options().is_empty());
    assert_eq!(Ipv4Addr::from(header.source), reference.source_addr());
    assert_eq!(Ipv4Addr::from(header.destination), reference.destination_addr());
    if header.ttl > 0 {
        let mut sent = bytes.to_vec();
        pdp_wire::ipv4::decrement_ttl(&mut sent);
        let after = pdp_wire::ipv4::Ipv4Packet { ttl: header.ttl - 1, ..header };
        assert_eq!(
            pdp_wire::ipv4::Ipv4Packet::parse(&sent),
            Some(after),
            "what was right stays right"
        );
    }
}

pub(crate) fn ipv6(bytes: &[u8]) {
    let header = pdp_wire::ipv6::Ipv6Packet::parse(bytes);
    let reference = Ipv6HeaderSlice::from_slice(bytes)
        .ok()
        .filter(|header| 40 + usize::from(header.payload_length()) <= bytes.len());
    let (Some(header), Some(reference)) = (header, &reference) else {
        return assert_eq!(header.is_some(), reference.is_some());
    };
    assert_eq!(header.packet_bytes, 40 + usize::from(reference.payload_length()));
    assert_eq!(
        (header.next_header, header.hop_limit),
        (reference.next_header().0, reference.hop_limit())
    );
    assert_eq!(Ipv6Addr::from(header.source), reference.source_addr());
    assert_eq!(Ipv6Addr::from(header.destination), reference.destination_addr());
    let discovery = pdp_wire::ipv6::is_discovery(bytes, &header);
    assert!(!discovery || (header.next_header == 58 && header.packet_bytes > 40));
}

pub(crate) fn udp(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let mut segment = input.take(bytes.len()).to_vec();
    let Some(header) = udps::UdpHeader::parse(&segment) else { return };
    assert!((udps::HEADER_BYTES..=segment.len()).contains(&header.length.into()));
    assert_eq!(header.emit(), segment[..udps::HEADER_BYTES]);
    segment.truncate(header.length.into());
    for (from, to) in [
        (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])),
        (IpAddr::from([1u16; 8]), IpAddr::from([2u16; 8])),
    ] {
        let octets = |address| match address {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let mut pseudo = [octets(from), octets(to), vec![0, 17]].concat();
        pseudo.extend((segment.len() as u32).to_be_bytes());
        let right = |segment: &[u8]| slow_checksum(&[&pseudo[..], segment].concat()) == 0;
        assert_eq!(udps::verify(from, to, &segment), right(&segment));
        segment[6..8].fill(0);
        let checksum = udps::checksum(from, to, &segment);
        assert_ne!(checksum, 0, "none at all");
        segment[6..8].copy_from_slice(&checksum.to_be_bytes());
        assert!(right(&segment) && udps::verify(from, to, &segment));
    }
}

pub(crate) fn vxlan(bytes: &[u8]) {
    let Some(vni) = vxlans::parse(bytes) else { return };
    assert!(vni < vxlans::VNI_END && bytes.len() >= vxlans::HEADER_BYTES);
    assert_eq!(vxlans::parse(&vxlans::emit(vni)), Some(vni));
}

pub(crate) fn tag(bytes: &[u8]) {
    let word = FuzzInput(bytes).long();
    if let Ok(tag) = Tag::parse(word) {
        assert_eq!(Tag::parse(tag.emit()), Ok(tag));
    }
}

pub(crate) fn checksum(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let cut = usize::from(input.word()) & !1;
    let all = input.0;
    let (first, second) = all.split_at(cut.min(all.len() & !1));
    let slow = slow_checksum(all);
    assert_eq!(sums::checksum(all), slow);
    assert_eq!(Sum::default().with(first).with(second).finish(), slow);
    let words = all.as_chunks::<2>().0.iter().map(|word| u16::from_be_bytes(*word));
    let sum = words.fold(Sum::default(), Sum::with_word).with(&all[all.len() & !1..]);
    assert_eq!(sum.finish(), slow);
}

pub(crate) fn flow(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let (offset, mask) = (input.word() % 256, input.take(16));
    let frame = input.0;
    let key = flows::ip(frame);
    assert_eq!(key, flows::ip(frame));
    let mut masked = frame.to_vec();
    for (at, byte) in masked.iter_mut().enumerate() {
        let bits = at.checked_sub(offset.into()).and_then(|at| mask.get(at)).unwrap_or(&0);
        *byte &= bits;
    }
    let field = |frame| flows::bytes(frame, [(offset, mask)]);
    assert_eq!(field(frame), field(&masked), "only bits under the mask count");
    // MAC addresses, time to live and checksum are not part of a whole IPv4 packet's flow.
    if frame.len() >= 34 && frame[12..14] == [8, 0] && frame[14] & 0xf >= 5 {
        let mut hop = frame.to_vec();
        hop[..12].fill(0x5a);
        hop[22] ^= 0xff;
        hop[24..26].fill(0);
        assert_eq!(flows::ip(&hop), key);
    }
}

pub(crate) fn outer(bytes: &[u8]) {
    let Ok(outer) = outers::parse(bytes) else { return };
    let payload = outer.payload();
    assert!(payload.start <= payload.end && payload.end <= bytes.len());
    assert_eq!(outer.local.is_ipv4(), outer.remote.is_ipv4());
    match outer.carried {
        OuterPayload::Udp { remote_port, local_port, .. } => {
            let ports = payload.start - 8;
            assert_eq!(remote_port.to_be_bytes(), bytes[ports..ports + 2]);
            assert_eq!(local_port.to_be_bytes(), bytes[ports + 2..ports + 4]);
        }
        OuterPayload::Gre(header) => {
            let start = payload.start - header.bytes;
            assert_eq!(bytes[start + 2..start + 4], [0x65, 0x58]);
            let parts = bytes[start] & 0xb0;
            assert_eq!(header.bytes, 4 + 4 * parts.count_ones() as usize);
            assert_eq!(header.key.is_some(), parts & 0x20 != 0);
        }
    }
    assert!(!outer.checksum_ok(bytes, false) || outer.checksum_ok(bytes, true));
    // Bytes behind the packet, such as Ethernet's padding, change nothing.
    let padded = [bytes, &[0x5a; 9]].concat();
    assert_eq!(outers::parse(&padded), Ok(outer.clone()));
    assert_eq!(outer.checksum_ok(&padded, true), outer.checksum_ok(bytes, true));
}

pub(crate) fn encapsulate(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let (flags, ports, vni) = (input.byte(), [input.word(), input.word()], input.long());
    let (local, remote) = if flags & 1 == 0 {
        (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]))
    } else {
        (IpAddr::from([1u16; 8]), IpAddr::from([2u16; 8]))
    };
    let by = match flags >> 1 & 3 {
        0 => Encapsulation::Vxlan(vxlans::VxlanTunnel { local, remote, port: ports[1], vni }),
        1 => Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: ports[1], vni }),
        2 => Encapsulation::Gre(gre::GreTunnel {
            local,
            remote,
            key: (flags & 8 == 0).then_some(vni),
            checksum: flags & 16 == 0,
            sequence: flags & 32 == 0,
        }),
        _ => {
            let [local_port, remote_port] = ports;
            Encapsulation::Udp(udps::UdpTunnel { local, remote, local_port, remote_port })
        }
    };
    let template = outers::HeaderTemplate::new(&by).expect("one family");
    let inner = input.0;
    let mut frame = vec![0x77; template.len()];
    frame.extend(inner);
    template.write(&mut frame, [1; 6], [2; 6]).expect("room");
    let outer = outers::parse(&frame).expect("what is written reads back");
    assert_eq!((outer.local, outer.remote), (remote, local));
    assert!(frame[outer.payload()].ends_with(inner));
    assert!(outer.checksum_ok(&frame, false) && outer.checksum_ok(&frame, true));
    assert_eq!(Some(frame.len() - ether::HEADER_BYTES), template.packet_bytes(inner.len()));
    let overhead = by.overhead() as usize;
    assert_eq!(template.len() - ether::HEADER_BYTES, overhead - ether::HEADER_BYTES);
}
