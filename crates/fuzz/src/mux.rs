//! The data plane: frames from outside, and peers that violate the protocol.

use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Seek};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use pdp_afxdp::PacketBuffer;
use pdp_memif::{Listener, MemifClient, MemifConnection, MemifControl, MemifSettings};
use pdp_model::{PortStats, VnetStats};
use pdp_mux::capture::{channel, write};
use pdp_mux::channel::{PeerChannel, PeerConnection};
use pdp_mux::classify::{InnerFrame, PortRef, TunnelTable};
use pdp_mux::control::plan::outside_ends;
use pdp_mux::core::Core;
use pdp_mux::encapsulate::{ExternalPath, VlinkPath};
use pdp_mux::external::WorkerExternal;
use pdp_mux::netdev::path::{PATH_FRAMES, RemoteNetdev};
use pdp_mux::packets::Packets;
use pdp_mux::ringers::Ringers;
use pdp_mux::vnet::{MuxVnet as Live, NodePeer};
use pdp_mux::wake::Wake;
use pdp_mux::worker::Worker;
use pdp_proto::mux::*;
use pdp_underlay::{NextHopInfo, TunnelNextHop};
use pdp_wire::tag::{GuestDrop, PuntClass, Tag, TagVerdict};
use pdp_wire::{geneve, gre, outer, udp, vlan, vxlan};
use rtrb::{Consumer, RingBuffer};

use crate::input::FuzzInput;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Packets of the worker.
const PACKETS: usize = 2048;

/// Most steps of a fuzzed worker.
const STEPS_MAX: usize = 64;

/// Small, so that rings fill up.
const PEER: MemifSettings =
    MemifSettings { ring_log2: 5, buffer_bytes: 2048, headroom_bytes: 64, buffers: 128 };

fn vxlan_tunnel(vni: u32) -> Encapsulation {
    let (local, remote) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
    Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni })
}

fn tunnels() -> Vec<Encapsulation> {
    let six = |last| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]);
    let four = |last| IpAddr::from([10, 0, 0, last]);
    let udp = |local, remote| {
        Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port: 7001, remote_port: 7000 })
    };
    let gre = |local, remote, key: Option<u32>| {
        let checksum = key.is_some();
        Encapsulation::Gre(gre::GreTunnel { local, remote, key, checksum, sequence: false })
    };
    let (local, remote) = (six(1), six(2));
    vec![
        vxlan_tunnel(5),
        vxlan_tunnel(6),
        Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: 5 }),
        udp(four(1), four(2)),
        udp(six(1), six(2)),
        Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: 6081, vni: 5 }),
        gre(four(1), four(2), None),
        gre(six(1), six(2), Some(5)),
        Encapsulation::Vlan(vlan::VlanTunnel { id: 5 }),
    ]
}

/// The headers that the other end of a tunnel sends.
fn headers(by: &Encapsulation) -> outer::HeaderTemplate {
    outer::HeaderTemplate::new(&by.reversed()).expect("a tunnel")
}

/// Corrects a frame's IPv4 header checksum, which random bytes hardly ever match.
fn repair(frame: &mut [u8]) {
    let header = 14 + usize::from(frame.get(14).unwrap_or(&0) & 0xf) * 4;
    if header >= 34 && header <= frame.len() && frame[12..14] == [8, 0] {
        frame[24..26].fill(0);
        let sum = crate::wire::slow_checksum(&frame[14..header]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Classifying the same frame twice gives the same port, with an inner frame inside. Only a frame
/// with a tunnel's headers belongs to the tunnel.
pub(crate) fn classify(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let flags = input.byte();
    let mut frame = input.0.to_vec();
    if flags & 1 == 0 {
        repair(&mut frame);
    }
    if flags & 2 == 0 && frame.len() >= 6 {
        frame[..6].copy_from_slice(&MAC);
    }
    let mut table = TunnelTable::new((flags & 4 == 0).then_some(MAC));
    let reference = |port| PortRef { worker: 0, vnet: 0, port, generation: 1 };
    let tunnels = tunnels();
    for (number, tunnel) in (0..).zip(&tunnels) {
        assert_eq!(table.insert(tunnel, reference(number)), Ok(()));
    }
    let whole = tunnels.len() as u16;
    if flags & 8 == 0 {
        assert_eq!(table.insert(&Encapsulation::Interface, reference(whole)), Ok(()));
    }
    let found = table.classify(&frame);
    assert_eq!(table.classify(&frame), found);
    let Ok((port, inner)) = found else { return };
    if port.port == whole {
        return assert_eq!(inner, InnerFrame::Whole);
    }
    let inner = match inner {
        InnerFrame::Whole => unreachable!("not the interface's"),
        InnerFrame::Untagged => {
            assert_eq!(
                tunnels[usize::from(port.port)],
                Encapsulation::Vlan(vlan::VlanTunnel { id: 5 })
            );
            assert!(frame.len() >= 18 && frame[12..14] == [0x81, 0]);
            return assert_eq!([frame[14] & 0xf, frame[15]], [0, 5]);
        }
        InnerFrame::Behind(inner) => inner,
    };
    assert!(inner.start <= inner.end && inner.end <= frame.len());
    // The frame that the tunnel's other end writes before this inner frame, except for free fields:
    // MAC addresses, source port, lengths, options, hop limits, reserved bits.
    let by = &tunnels[usize::from(port.port)];
    match by {
        Encapsulation::Vxlan(tunnel) => {
            let udp = inner.start - 16;
            assert_eq!(frame[udp + 2..udp + 4], tunnel.port.to_be_bytes());
            assert_eq!(frame[udp + 12..udp + 15], tunnel.vni.to_be_bytes()[1..]);
        }
        Encapsulation::Udp(tunnel) => {
            let udp = inner.start - 8;
            assert_eq!(frame[udp..udp + 2], tunnel.remote_port.to_be_bytes());
            assert_eq!(frame[udp + 2..udp + 4], tunnel.local_port.to_be_bytes());
        }
        Encapsulation::Geneve(tunnel) => {
            let udp =
                if frame[12..14] == [8, 0] { 14 + usize::from(frame[14] & 0xf) * 4 } else { 54 };
            assert_eq!(frame[udp + 2..udp + 4], tunnel.port.to_be_bytes());
            assert_eq!(inner.start, udp + 16 + 4 * usize::from(frame[udp + 8]));
            assert_eq!(frame[udp + 9] & 0xc0, 0);
            assert_eq!(frame[udp + 10..udp + 12], [0x65, 0x58]);
            assert_eq!(frame[udp + 12..udp + 15], tunnel.vni.to_be_bytes()[1..]);
        }
        Encapsulation::Gre(tunnel) => {
            // With a key and a checksum, or neither; a sequence number is optional.
            let key = tunnel.key.map_or(0, |_| 8);
            let numbered = |start: usize| frame[start] & 0x10 != 0;
            let header = [4 + key, 8 + key].into_iter().find(|bytes| {
                let start = inner.start - bytes;
                numbered(start) == (*bytes > 4 + key) && frame[start + 2..start + 4] == [0x65, 0x58]
            });
            let start = inner.start - header.expect("a header of GRE");
            if let Some(key) = tunnel.key {
                assert_eq!(frame[start] & 0xa0, 0xa0);
                assert_eq!(frame[start + 8..start + 12], key.to_be_bytes());
            }
        }
        Encapsulation::Vlan(_) | Encapsulation::Interface => unreachable!("has no outer headers"),
    }
    let Some((local, remote)) = by.ends() else { return };
    match (local, remote) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            assert_eq!(frame[26..34], [remote.octets(), local.octets()].concat());
        }
        (IpAddr::V6(local), IpAddr::V6(remote)) => {
            assert_eq!(frame[22..54], [remote.octets(), local.octets()].concat());
        }
        _ => unreachable!("one family"),
    }
}

/// Requests that pdpd may send: refused, or executed.
pub(crate) fn vnet_check(bytes: &[u8]) {
    let Ok(vnet) = serde_json::from_slice::<VnetConfig>(bytes) else { return };
    let checked = pdp_mux::control::check::check(&vnet);
    assert_eq!(pdp_mux::control::check::check(&vnet), checked);
    if let Err(error) = checked {
        return assert!(!error.is_empty());
    }
    let live = Live::new(&vnet, 0, 0, |_, _| None);
    let stats = live.stats();
    assert_eq!(stats.nodes.len(), vnet.nodes.len());
    for node in &vnet.nodes {
        assert_eq!(stats.nodes[&node.name].ports.len(), node.ports.len());
    }
}

/// A capture's file contains the captured frames, cut to the snap length.
pub(crate) fn capture(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let snap = u32::from(input.word());
    let (mut sink, source) = channel(snap, None);
    let mut kept = Vec::new();
    while !input.is_empty() {
        let frame = input.counted();
        if sink.offer(1, frame) {
            let cut = if snap == 0 { frame.len() } else { frame.len().min(snap as usize) };
            kept.push((frame[..cut].to_vec(), frame.len() as u32));
        }
    }
    drop(sink);
    let memory = rustix::fs::memfd_create("capture", rustix::fs::MemfdFlags::CLOEXEC);
    let memory = memory.expect("memory");
    let mut file = File::from(memory.try_clone().expect("a descriptor"));
    write(source, memory).expect("room");
    let mut written = Vec::new();
    file.rewind().expect("a file");
    file.read_to_end(&mut written).expect("a file");
    let mut reader = pcap_file::pcap::PcapReader::new(&written[..]).expect("a header");
    let mut read = Vec::new();
    while let Some(packet) = reader.next_raw_packet() {
        let packet = packet.expect("a frame");
        read.push((packet.data.to_vec(), packet.orig_len));
    }
    assert_eq!(read, kept);
}

/// A worker with a permanent interface, and a new vnet for each input.
struct MuxBench {
    worker: Worker,
    line: Consumer<PacketBuffer>,
    hop: Arc<TunnelNextHop>,
    listener: Listener,
    path: PathBuf,
    _directory: tempfile::TempDir,
    _commands: mpsc::SyncSender<pdp_mux::worker::WorkerCommand>,
    /// Ended connections, with their descriptors.
    dropped: mpsc::Receiver<pdp_mux::connections::Dropped>,
}

impl MuxBench {
    fn new() -> Self {
        let (_pool, parts) = Packets::pool(1, PACKETS).expect("memory");
        let packets = parts.into_iter().next().expect("one part");
        let wake = Arc::new(Wake::new().expect("an eventfd"));
        let (dropped, ended) = mpsc::channel();
        let ringers = Ringers::start().expect("threads");
        let core = Core::new(packets, dropped, wake.clone(), ringers).expect("an epoll");
        let (commands, obeyed) = mpsc::sync_channel(1);
        let mut worker = Worker::new(0, core, vec![None], obeyed, wake.clone()).expect("a worker");
        let (port, line) = RingBuffer::new(PATH_FRAMES);
        let mut card = WorkerExternal::new("A".into(), MAC, 1500);
        card.netdevs.add_path(RemoteNetdev::new(port, wake));
        worker.core.externals.push(Some(card));
        let mut table = TunnelTable::new(Some(MAC));
        for end in outside_ends(&vnet()) {
            let reference = PortRef { worker: 0, vnet: 0, port: end.port, generation: 7 };
            table.insert(end.by, reference).expect("free");
        }
        worker.classifier = Arc::new(vec![table]);
        let hop = Arc::new(TunnelNextHop::default());
        hop.resolve(Some(NextHopInfo { mac: [9; 6], mtu: u16::MAX }));
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("memif.sock");
        let listener = Listener::bind(&path).expect("a socket");
        Self {
            worker,
            line,
            hop,
            listener,
            path,
            _directory: directory,
            _commands: commands,
            dropped: ended,
        }
    }

    fn attach(&mut self, node: &str, peer: NodePeer) -> (MemifClient, MemifControl) {
        let mut client = MemifClient::new(&self.path, 0, "fuzz", PEER).expect("memory");
        client.poll();
        let mut handshake = self.listener.accept().expect("a socket").expect("a client");
        let connection = loop {
            if let Some(connection) = handshake.poll(|_| true).expect("an honest client") {
                break connection;
            }
            client.poll();
        };
        while client.poll() != pdp_memif::ConnectionState::Up {}
        let MemifConnection { tx, rx, control, .. } = connection;
        let link = PeerConnection::new(tx, rx, 1);
        self.worker
            .core
            .connections
            .watch
            .add_bell(Some(0), &link.channel.doorbell().expect("a doorbell"))
            .expect("an eventfd");
        let done = self.worker.change(0, |vnet, _| vnet.attach(node, peer, 0, link).is_ok());
        assert_eq!(done, Some(true));
        (client, control)
    }

    fn refused(&mut self) -> u64 {
        let stats = self.worker.core.external(0).expect("it is there").stats();
        stats.dropped.values().sum()
    }

    /// Delivers a frame on the interface. False if it is longer than a packet.
    fn feed(&mut self, frame: &[u8]) -> bool {
        let mut packet = self.worker.core.packets.take().expect("a packet");
        if packet.set_len(frame.len()).is_none() {
            self.worker.core.packets.give(packet);
            return false;
        }
        packet.bytes_mut().copy_from_slice(frame);
        self.worker.classify_frames(0, &mut vec![packet]);
        true
    }

    /// Number of frames that left since the last call.
    fn left(&mut self) -> u64 {
        let mut count = 0;
        while let Ok(packet) = self.line.pop() {
            // A VLAN has no MAC addresses of its own.
            let is_tagged = packet.bytes()[12..14] == [0x81, 0];
            assert!(packet.bytes().len() <= 14 + 1500 + if is_tagged { 4 } else { 0 });
            assert!(is_tagged || packet.bytes()[..12] == [[9; 6], MAC].concat());
            self.worker.core.packets.give(packet);
            count += 1;
        }
        count
    }
}

/// The router r1 between a tunnel and a segment, with one guest on the runtime; and two transits.
/// The segment has the host h1 and tunnels.
fn vnet() -> VnetConfig {
    let port =
        |index| PortConfig { name: format!("eth{index}"), mac: [2, 0, 0, 0, 1, index], mtu: 1500 };
    let none = Rate { bps: 0, pps: 0 };
    let guest = GuestConfig {
        number: 0,
        socket: PathBuf::new(),
        attach: AttachMode::Runtime,
        weight: 1000,
        leaving: false,
    };
    let router = RouterConfig {
        guests: vec![guest],
        policy: GuestDistribution::Flow,
        flow: FlowKey::Ip,
        punt_filters: vec![PuntFilterConfig {
            matches: vec![BytePattern { offset: 12, value: vec![8, 6], mask: vec![0xff, 0xff] }],
            class: 1,
        }],
        punt_limits: [none; PUNT_CLASSES],
        engine: None,
    };
    let node = |name: &str, ports: Vec<PortConfig>, router| NodeConfig {
        name: name.into(),
        ports,
        tap_socket: PathBuf::new(),
        router,
    };
    let end = |node: &str, port| VlinkEnd::Port { node: node.into(), port };
    let outside = |at: usize| VlinkEnd::External {
        name: format!("t{at}"),
        interface: "A".into(),
        by: tunnels().swap_remove(at),
    };
    let vlink = |name: &str, ends: Vec<VlinkEnd>| Vlink {
        name: name.into(),
        segment: (ends.len() > 2).then_some(SegmentConfig { addresses: 16, flood_pps: 1000 }),
        leaving: vec![EgressConfig { queue_frames: 8, ..EgressConfig::default() }; ends.len()],
        ends,
        up: true,
        schedule: None,
        queues: vec![],
    };
    let on_segment = [2, 3, 5, 7].map(outside);
    VnetConfig {
        name: "red".into(),
        police: None,
        nodes: vec![
            node("r1", vec![port(0), port(1)], Some(router)),
            node("h1", vec![port(0)], None),
        ],
        vlinks: vec![
            vlink("left", vec![outside(0), end("r1", 0)]),
            vlink("right", [end("r1", 1), end("h1", 0)].into_iter().chain(on_segment).collect()),
            vlink("through", vec![outside(1), outside(8)]),
            vlink("across", vec![outside(4), outside(6)]),
        ],
    }
}

/// A tag, or another word.
fn word(input: &mut FuzzInput<'_>) -> u32 {
    let bits = input.byte();
    let verdict = match bits & 7 {
        0 | 1 => TagVerdict::Out,
        2 => TagVerdict::Punt(PuntClass::ALL[usize::from(bits >> 3 & 1)]),
        3 => TagVerdict::Drop(GuestDrop::ALL[usize::from(bits >> 3 & 3)]),
        4 => TagVerdict::Kept,
        5 => TagVerdict::Deliver,
        _ if bits & 0xc0 == 0 => return input.long(),
        _ => TagVerdict::Out,
    };
    let vport = if bits & 0x20 == 0 { bits >> 4 & 1 } else { input.byte() };
    Tag { verdict, vport, last: bits & 0x40 != 0, trace: 0 }.emit()
}

fn send(client: &mut MemifClient, word: u32, frame: &[u8]) {
    let Some(mut buf) = client.alloc() else { return };
    if buf.set_len(frame.len()) {
        client.bytes_mut(&mut buf).copy_from_slice(frame);
        buf.set_metadata(word);
        match client.send(buf) {
            Ok(()) => client.flush(),
            Err(buf) => client.free(buf),
        }
    } else {
        client.free(buf);
    }
}

/// Received frames, each with its tag.
fn receive(client: &mut MemifClient) -> Vec<(Tag, Vec<u8>)> {
    let mut bufs = Vec::new();
    client.receive(&mut bufs, 64);
    let mut frames = Vec::new();
    for buf in bufs {
        let tag = Tag::parse(buf.metadata()).expect("the mux's tag");
        assert_eq!(tag.verdict, TagVerdict::Deliver);
        frames.push((tag, client.bytes(&buf).to_vec()));
        client.free(buf);
    }
    client.flush();
    frames
}

/// Checks every node's sums: frames received or made equal frames ended plus frames in flight.
fn assert_adds_up(stats: &VnetStats) {
    for (name, node) in &stats.nodes {
        let ports = node.ports.values();
        let received: u64 = ports.clone().map(|port| port.received + port.made).sum();
        let ended =
            |p: &PortStats| p.sent + p.punted + p.consumed + p.dropped.values().sum::<u64>();
        let ended: u64 = ports.map(ended).sum();
        assert_eq!(received, ended + node.in_flight, "{name}: {node:#?}");
    }
}

/// Frames from outside, from TAPs and from a guest, in any order and with any tag. All are
/// accounted for, and no packet is lost.
pub(crate) fn worker(bytes: &[u8]) {
    thread_local! {
        static BENCH: RefCell<MuxBench> = RefCell::new(MuxBench::new());
    }
    BENCH.with_borrow_mut(|bench| run(bench, FuzzInput(bytes)));
}

fn run(bench: &mut MuxBench, mut input: FuzzInput<'_>) {
    let hop = bench.hop.clone();
    let outside = |number: usize, end: &VlinkEnd| match end {
        VlinkEnd::External { by, .. } => {
            ExternalPath::new(0, number, by, || hop.clone()).map(VlinkPath::Outside)
        }
        VlinkEnd::Port { .. } => None,
    };
    let live = Live::new(&vnet(), 0, 7, outside);
    bench.worker.replace(0, Some(live));
    bench.dropped.try_iter().for_each(drop);
    let mut peers = [
        bench.attach("h1", NodePeer::Tap),
        bench.attach("r1", NodePeer::Guest(0)),
        bench.attach("r1", NodePeer::Tap),
    ];
    let templates: Vec<_> = tunnels().iter().map(headers).collect();
    let refused = bench.refused();
    let (mut fed, mut left) = (0, 0);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        let choice = input.byte();
        let [h1, guest, tap] = &mut peers;
        match choice & 7 {
            0 => fed += u64::from(bench.feed(input.counted())),
            1 => {
                let template = &templates[usize::from(choice >> 3 & 0xf) % templates.len()];
                let mut frame = vec![0; template.len()];
                frame.extend(input.counted());
                if template.write(&mut frame, MAC, [9; 6]).is_some() {
                    fed += u64::from(bench.feed(&frame));
                }
            }
            2 => send(&mut h1.0, word(&mut input), input.counted()),
            3 => send(&mut guest.0, word(&mut input), input.counted()),
            4 => send(&mut tap.0, word(&mut input), input.counted()),
            5 => {
                for (tag, frame) in receive(&mut guest.0) {
                    assert!(tag.vport < 2 && frame.len() <= 14 + 1500);
                    let tag =
                        Tag { verdict: TagVerdict::Out, vport: 1 - tag.vport, last: true, ..tag };
                    send(&mut guest.0, tag.emit(), &frame);
                }
            }
            6 => {
                for (client, _) in [h1, tap] {
                    receive(client);
                }
            }
            _ => {
                bench.worker.round();
            }
        }
        left += bench.left();
        if choice & 0x80 != 0 {
            bench.worker.round();
        }
    }
    // The worker checks doorbells only now and then, so
    // more work may appear after several idle rounds.
    let mut rounds = 0;
    while bench.worker.round() || rounds < 8 {
        left += bench.left();
        rounds += 1;
    }
    left += bench.left();
    let stats = bench.worker.vnets[0].as_ref().expect("it is there").stats();
    assert_adds_up(&stats);
    let own =
        |of: fn(&PortStats) -> u64| -> u64 { stats.nodes[OUTSIDE].ports.values().map(of).sum() };
    let wire = &stats.nodes["r1"].ports["eth0"];
    let refused = bench.refused() - refused;
    assert_eq!(fed, wire.received + own(|port| port.received) + refused, "frames from outside");
    assert_eq!(left, wire.sent + own(|port| port.sent), "frames to outside");
    // All frames sent into the segment and the transits came out.
    let near = [&stats.nodes["r1"].ports["eth1"], &stats.nodes["h1"].ports["eth0"]];
    let went: u64 = near.iter().map(|port| port.sent + port.copied).sum();
    let received: u64 = near.iter().map(|port| port.received).sum();
    assert_eq!(
        went + own(|port| port.consumed + port.copied),
        received + own(|port| port.made),
        "{stats:#?}"
    );
    drop(peers);
    bench.worker.replace(0, None);
    bench.left();
    assert_eq!(bench.worker.core.packets.free(), PACKETS, "no packet is lost");
}
