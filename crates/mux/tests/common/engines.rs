//! Vrouters that the mux itself forwards for, and mirrors that the test controls.

use std::io::Write;
use std::net::IpAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use pdp_model::EngineStats;
use pdp_mux::control::MuxServer;
use pdp_proto::channel::FrameReader;
use pdp_proto::mux::*;
use pdp_proto::routes::{
    self, FromGuest, GroupHop, RouteDecision, ToGuest, VportHooks, decode, encode,
};
use pdp_wire::checksum::checksum;

use super::*;

pub const MEMORY_BYTES: u64 = 32 << 20;

/// Returns a vnet whose router the mux forwards for, and the socket where its mirror listens.
pub fn engine(root: &Path, name: &str) -> (VnetConfig, UnixListener) {
    let mut vnet = two_hosts(root, name, &[]);
    let routes: PathBuf = root.join(format!("{name}.routes"));
    let listener = UnixListener::bind(&routes).unwrap();
    let router = vnet.nodes[0].router.as_mut().unwrap();
    router.engine = Some(EngineConfig {
        code: EngineCode::Ip { routes },
        memory_bytes: MEMORY_BYTES,
        slowpath: None,
        power: 0,
    });
    (vnet, listener)
}

/// A mirror, as an engine sees it.
pub struct Mirror {
    pub stream: UnixStream,
    reader: FrameReader,
}

impl Mirror {
    pub fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut mirror = Self { stream, reader: FrameReader::default() };
        let hello = FromGuest::Hello { version: routes::VERSION, guest: 0 };
        assert_eq!(mirror.hear(), [hello]);
        mirror
    }

    pub fn push(&mut self, messages: &[ToGuest]) {
        self.stream.write_all(&encode(messages).unwrap()).unwrap();
    }

    pub fn hear(&mut self) -> Vec<FromGuest> {
        loop {
            if let Some(frame) = self.reader.next_frame().unwrap() {
                return decode(frame).unwrap();
            }
            assert!(self.reader.read_from(&mut self.stream).unwrap() > 0, "hung up");
        }
    }

    /// Waits until all messages so far are applied.
    pub fn settle(&mut self, number: u64) {
        self.push(&[ToGuest::Barrier(number)]);
        while !self.hear().contains(&FromGuest::Applied(number)) {}
    }

    /// Sends a snapshot: h1 is 10.1.0.2 behind eth0, h2 is 10.2.0.2 behind eth1.
    pub fn snapshot(&mut self) {
        let mut all = vec![ToGuest::Begin, ToGuest::Forwarding { v4: true, v6: true }];
        for index in 0..2 {
            all.push(ToGuest::Vport(routes::Vport {
                index,
                mac: router_mac(index as u8),
                mtu: 1500,
                up: true,
                hooked: VportHooks::default(),
                macs: vec![],
                forwards_v4: true,
            }));
            let net = index as u8 + 1;
            let address = IpAddr::from([10, net, 0, 1]);
            all.push(ToGuest::Local { address, own: true });
            let address = IpAddr::from([10, net, 0, 2]);
            all.push(ToGuest::Neighbour { vport: index, address, mac: Some(host_mac(net)) });
            let hops = vec![GroupHop { vport: index, gateway: None, weight: 1 }];
            all.push(ToGuest::Group { id: net.into(), hops, mtu: 0 });
            let prefix = format!("10.{net}.0.0/16").parse().unwrap();
            all.push(ToGuest::Route { prefix, target: RouteDecision::Group(net.into()) });
        }
        all.push(ToGuest::End);
        self.push(&all);
        self.settle(1);
    }
}

pub fn router_mac(port: u8) -> [u8; 6] {
    [2, 0, 0, 0, 1, port]
}

pub fn host_mac(net: u8) -> [u8; 6] {
    [2, 0, 0, 0, 2, net]
}

/// Returns a packet from h1 to this address, with a mark at its end.
pub fn packet(to: [u8; 4], mark: u64) -> Vec<u8> {
    let mut frame = [&router_mac(0)[..], &host_mac(1), &[8, 0]].concat();
    let mut header = [0; 20];
    header[0] = 0x45;
    header[2..4].copy_from_slice(&46u16.to_be_bytes());
    (header[8], header[9]) = (64, 17);
    header[12..16].copy_from_slice(&[10, 1, 0, 2]);
    header[16..].copy_from_slice(&to);
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    frame.extend(header);
    frame.extend([0; 18]);
    frame.extend(mark.to_be_bytes());
    frame
}

pub fn mark_of(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame[frame.len() - 8..].try_into().unwrap())
}

pub fn engine_stats(mux: &MuxServer, vnet: &str) -> EngineStats {
    node_stats(mux, vnet, "r1").engine.unwrap()
}

pub fn forwards(h1: &mut Peer, h2: &mut Peer, mark: u64) {
    assert!(h1.out(0, &packet([10, 2, 0, 2], mark)));
    let [(_, frame)] = &h2.expect(1)[..] else { panic!("one frame") };
    assert_eq!(mark_of(frame), mark);
    assert_eq!((&frame[..6], &frame[6..12]), (&host_mac(2)[..], &router_mac(1)[..]));
    assert_eq!(frame[22], 63, "the TTL");
}
