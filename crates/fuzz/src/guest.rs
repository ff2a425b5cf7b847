//! The router: hostile frames, and absurd routes.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};

use pdp_card::{CardSizes, VeDriver};
use pdp_ip::{Decision, FRAMES_MAX, Fib, FrameList, IpForwarder};
use pdp_proto::routes::{GroupHop, RouteDecision, ToGuest, Vport, VportHooks};

use crate::input::FuzzInput;
use crate::messages;

/// Vports 0 to 2 are up, 3 is down; no others.
const UP: std::ops::Range<u16> = 0..3;

/// The mirror's messages for the router.
pub(crate) fn mirror_messages() -> Vec<ToGuest> {
    let mut messages = Vec::new();
    let mut apply = |message| messages.push(message);
    apply(ToGuest::Begin);
    apply(ToGuest::Forwarding { v4: true, v6: true });
    for index in 0..4 {
        let mac = [2, 0, 0, 0, 0, index as u8];
        apply(ToGuest::Vport(Vport {
            index,
            mac,
            mtu: 1500,
            up: UP.contains(&index),
            hooked: VportHooks::default(),
            macs: vec![],
            forwards_v4: true,
        }));
    }
    let hop = |vport, gateway: &str| GroupHop {
        vport,
        gateway: (!gateway.is_empty()).then(|| gateway.parse().expect("an address")),
        weight: 1,
    };
    let groups = [
        vec![hop(0, "")],
        vec![hop(1, "10.1.0.1"), hop(2, "10.2.0.1")],
        vec![hop(3, "10.3.0.1")],
        vec![hop(2, "fd00::1"), hop(1, "")],
    ];
    for (id, hops) in (0..).zip(groups) {
        apply(ToGuest::Group { id, hops, mtu: 0 });
    }
    for (prefix, target) in [
        ("0.0.0.0/0", RouteDecision::Group(1)),
        ("10.0.0.0/8", RouteDecision::Group(0)),
        ("192.168.0.0/16", RouteDecision::Group(2)),
        ("172.16.0.0/12", RouteDecision::Drop),
        ("198.18.0.0/15", RouteDecision::Punt),
        ("::/0", RouteDecision::Group(3)),
        ("2001:db8::/32", RouteDecision::Drop),
    ] {
        apply(ToGuest::Route { prefix: prefix.parse().expect("a prefix"), target });
    }
    for (vport, address) in [(1, "10.1.0.1"), (2, "10.2.0.1"), (2, "fd00::1"), (0, "10.0.0.9")] {
        let address = address.parse().expect("an address");
        apply(ToGuest::Neighbour { vport, address, mac: Some([6; 6]) });
    }
    apply(ToGuest::Local { address: IpAddr::from([10, 0, 0, 1]), own: true });
    apply(ToGuest::End);
    messages
}

pub(crate) fn fib() -> Fib {
    let mut fib = Fib::default();
    mirror_messages().into_iter().for_each(|message| fib.apply(message));
    fib
}

/// Returns the frames of an input, each with its vport.
pub(crate) fn router_frames(bytes: &[u8]) -> FrameList {
    let mut input = FuzzInput(bytes);
    let mut frames = FrameList::default();
    while !input.is_empty() && frames.0.len() < FRAMES_MAX {
        let vport = input.byte();
        let mut frame = input.counted().to_vec();
        // Most are for the router and have a valid checksum, which random bytes hardly ever have.
        if vport & 0x80 == 0 && frame.len() >= 34 {
            frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, vport & 3]);
            let header = 14 + usize::from(frame[14] & 0xf) * 4;
            if frame[12..14] == [8, 0] && (34..=frame.len()).contains(&header) {
                set_checksum(&mut frame[14..header]);
            }
        }
        frames.0.push(((vport & 7).into(), frame, None));
    }
    frames
}

fn set_checksum(header: &mut [u8]) {
    header[10..12].fill(0);
    let sum = crate::wire::slow_checksum(header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

/// Returns a UDP frame of 60 bytes to a station's MAC address.
pub(crate) fn udp_frame(mac: [u8; 6], to: Ipv4Addr) -> Vec<u8> {
    let mut frame = vec![0; 60];
    frame[..6].copy_from_slice(&mac);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..17].copy_from_slice(&[0x45, 0, 0]);
    frame[17] = 46;
    frame[22..24].copy_from_slice(&[64, 17]);
    frame[26..30].copy_from_slice(&[192, 0, 2, 1]);
    frame[30..34].copy_from_slice(&to.octets());
    set_checksum(&mut frame[14..34]);
    frame
}

/// A batch of frames. Each is decided once, sent out of
/// vports that are up, and treated as if it were alone.
pub(crate) fn router(bytes: &[u8]) {
    thread_local! {
        static ROUTER: RefCell<(Fib, IpForwarder)> = RefCell::new((fib(), IpForwarder::default()));
    }
    let mut frames = router_frames(bytes);
    let before = frames.clone();
    ROUTER.with_borrow_mut(|(fib, forwarder)| {
        forwarder.process(fib, &mut frames);
        for (frame, before) in frames.0.iter().zip(&before.0) {
            match frame.2.expect("decided") {
                Decision::Out(vport) => {
                    assert!(UP.contains(&vport), "{vport}");
                    let (sent, received) = (&frame.1, &before.1);
                    assert!(sent.len() <= received.len() && sent.len() <= 14 + 1500);
                    assert_eq!(sent[..12], [6, 6, 6, 6, 6, 6, 2, 0, 0, 0, 0, vport as u8]);
                    let ttl = if sent[12..14] == [8, 0] { 22 } else { 21 };
                    assert_eq!(sent[ttl], received[ttl] - 1);
                }
                Decision::Punt(_) | Decision::Drop(_) => assert_eq!(frame.1, before.1),
            }
            let mut alone = FrameList(vec![before.clone()]);
            forwarder.process(fib, &mut alone);
            assert_eq!(alone.0[0], *frame, "the same as alone");
        }
    });
}

/// Messages of the mirror, in any order: no panic, and tables that still answer.
pub(crate) fn routes(bytes: &[u8]) {
    let messages = messages::batch::<ToGuest>(bytes);
    if messages.is_empty() {
        return;
    }
    let (hops, lpm) = CardSizes::CARD_8.equal_parts(0);
    let mut driver = VeDriver::new(&hops, &lpm);
    for message in &messages {
        // It may refuse a message. Its writes always fit into the words of the card's bus.
        let _ = driver.apply(message);
        driver.take_writes().iter().for_each(|write| _ = write.word(0));
        driver.retire();
    }
    let mut fib = Fib::default();
    let mut named = Vec::new();
    for message in messages {
        if let ToGuest::Route { prefix, .. } = &message {
            named.push(prefix.addr());
        }
        fib.apply(message);
    }
    let mut forwarder = IpForwarder::default();
    for address in named {
        fib.resolve(address);
        let frame = match address {
            IpAddr::V4(to) => udp_frame([0; 6], to),
            IpAddr::V6(_) => vec![0; 60],
        };
        let mut frames = FrameList(vec![(0, frame, None)]);
        forwarder.process(&mut fib, &mut frames);
        assert!(frames.0[0].2.is_some());
    }
}
