//! Links that are more than a wire: transits from one
//! external end to another, and Ethernet segments.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::time::{Duration, Instant};

use common::*;
use pdp_afxdp::PacketBuffer;
use pdp_model::{NodeStats, PortStats, Stats};
use pdp_mux::channel::PeerChannel;
use pdp_mux::classify::{InnerFrame, PortRef, TunnelTable};
use pdp_mux::control::check::check;
use pdp_mux::control::plan::{changed, outside_ends};
use pdp_mux::core::Core;
use pdp_mux::egress::LATE_FRAMES;
use pdp_mux::encapsulate::{ExternalPath, VlinkPath};
use pdp_mux::external::WorkerExternal as Card;
use pdp_mux::netdev::path::{PATH_FRAMES, RemoteNetdev as SocketPath};
use pdp_mux::packets::Packets;
use pdp_mux::ringers::Ringers;
use pdp_mux::vnet::{MuxVnet as Live, NodePeer};
use pdp_mux::wake::Wake;
use pdp_mux::worker::{Worker, WorkerCommand};
use pdp_proto::mux::*;
use pdp_underlay::TunnelNextHop;
use pdp_wire::{geneve, gre, outer, udp, vlan, vxlan};
use proptest::prelude::*;
use rtrb::{Consumer, RingBuffer};

const SHARE: usize = 4096;
const CARDS: [&str; 2] = ["A", "B"];
const MAC: [u8; 6] = [2, 0, 0, 0, 10, 1];
const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 10, 9];

/// A worker driven by hand, with two cards and one vnet.
struct Lab {
    worker: Worker,
    /// Frames that leave, by card.
    lines: Vec<Consumer<PacketBuffer>>,
    spec: VnetConfig,
    hop: Arc<TunnelNextHop>,
    /// Number of the last frame that arrived by a tunnel.
    number: u32,
    _wake: Arc<Wake>,
    _commands: SyncSender<WorkerCommand>,
}

fn card(name: &str) -> usize {
    CARDS.iter().position(|card| *card == name).unwrap()
}

fn vxlan_end(name: &str, card: &str, vni: u32) -> VlinkEnd {
    let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
    outside(name, card, Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni }))
}

fn udp_end(name: &str, card: &str, local_port: u16) -> VlinkEnd {
    let (local, remote) = ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
    let tunnel = udp::UdpTunnel { local, remote, local_port, remote_port: 6000 };
    outside(name, card, Encapsulation::Udp(tunnel))
}

impl Lab {
    fn new(spec: &VnetConfig) -> Self {
        let (_pool, mut parts) = Packets::pool(1, SHARE).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let (dropped, _) = mpsc::channel();
        let ringers = Ringers::start().unwrap();
        let core = Core::new(parts.remove(0), dropped, wake.clone(), ringers).unwrap();
        let (commands, obeyed) = mpsc::sync_channel(1);
        let mut worker = Worker::new(0, core, vec![None], obeyed, wake.clone()).unwrap();
        let mut lines = vec![];
        for name in CARDS {
            let (port, line) = RingBuffer::new(PATH_FRAMES);
            let mut card = Card::new(name.into(), MAC, 1500);
            card.netdevs.add_path(SocketPath::new(port, wake.clone()));
            worker.core.externals.push(Some(card));
            lines.push(line);
        }
        let hop = Arc::new(TunnelNextHop::known(NEIGHBOUR));
        let (spec, generation) = (spec.clone(), 0);
        let mut lab =
            Self { worker, lines, spec, hop, number: 0, _wake: wake, _commands: commands };
        lab.install(generation, None);
        lab
    }

    /// Changes the vnet.
    fn reshape(&mut self, spec: &VnetConfig) {
        let before = std::mem::replace(&mut self.spec, spec.clone());
        let same = changed(&before, spec, None);
        self.install(u32::from(same.is_none()), same);
    }

    fn install(&mut self, generation: u32, changed: Option<Vec<u16>>) {
        check(&self.spec).unwrap();
        let mut live = Live::new(&self.spec, 0, generation, |number, end| match end {
            VlinkEnd::External { interface, by, .. } => {
                ExternalPath::new(card(interface), number, by, || self.hop.clone())
                    .map(VlinkPath::Outside)
            }
            VlinkEnd::Port { .. } => None,
        });
        live.changed = changed;
        let mut tables = [(); CARDS.len()].map(|()| TunnelTable::new(Some(MAC)));
        for end in outside_ends(&self.spec) {
            let to = PortRef { worker: 0, vnet: 0, port: end.port, generation };
            tables[card(end.interface)].insert(end.by, to).unwrap();
        }
        self.worker.replace(0, Some(live));
        self.worker.classifier = Arc::new(tables.to_vec());
    }

    fn end(&self, name: &str) -> VlinkEnd {
        let is_it = |end: &&VlinkEnd| matches!(end, VlinkEnd::External { name: known, .. } if known == name);
        self.spec.vlinks.iter().flat_map(|vlink| &vlink.ends).find(is_it).unwrap().clone()
    }

    /// Lets frames arrive by an external end.
    fn receive(&mut self, end: &str, frames: impl IntoIterator<Item = Vec<u8>>) {
        let VlinkEnd::External { interface, by, .. } = self.end(end) else { unreachable!() };
        let mut batch = vec![];
        for frame in frames {
            self.number += 1;
            let bytes = wrapped(&by, &frame, self.number);
            let mut packet = self.worker.core.packets.take().unwrap();
            packet.set_len(bytes.len()).unwrap();
            packet.bytes_mut().copy_from_slice(&bytes);
            batch.push(packet);
        }
        self.worker.classify_frames(card(&interface), &mut batch);
        self.rounds();
    }

    fn rounds(&mut self) {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_micros(10));
            self.worker.round();
        }
    }

    /// Returns the frames that have left, decapsulated, each with the name of its external end.
    fn left(&mut self) -> Vec<(String, Vec<u8>)> {
        let mut all = vec![];
        for (at, line) in self.lines.iter_mut().enumerate() {
            while let Ok(packet) = line.pop() {
                let ends = self.spec.vlinks.iter().flat_map(|vlink| &vlink.ends);
                let mut found = ends.filter_map(|end| {
                    let VlinkEnd::External { name, interface, by } = end else { return None };
                    let inner = unwrapped(by, packet.bytes()).filter(|_| card(interface) == at)?;
                    Some((name.clone(), inner))
                });
                all.push(found.next().expect("an end's"));
                self.worker.core.packets.give(packet);
            }
        }
        all
    }

    fn node(&self, name: &str) -> NodeStats {
        self.worker.vnets[0].as_ref().unwrap().stats().nodes[name].clone()
    }

    /// Checks that everything is accounted for, at every node and on
    /// every link. With `at_rest`, also checks that no packet is missing.
    fn assert_adds_up(&self, at_rest: bool) {
        let stats = self.worker.vnets[0].as_ref().unwrap().stats();
        let (mut vnets, name) = (Stats::default(), self.spec.name.clone());
        vnets.vnets.insert(name, stats);
        assert_adds_up(&vnets);
        if at_rest {
            assert_eq!(self.worker.core.packets.free(), SHARE);
        }
    }
}

/// Returns the frame that the other end sends, with this number if its frames have one.
fn wrapped(by: &Encapsulation, inner: &[u8], number: u32) -> Vec<u8> {
    let Some(template) = outer::HeaderTemplate::new(&by.reversed()) else { return inner.to_vec() };
    let template = template.from_number(number);
    let mut frame = vec![0; template.len()];
    frame.extend(inner);
    template.write(&mut frame, MAC, NEIGHBOUR).unwrap();
    frame
}

/// Returns the inner frame, if the outer one is of this end.
fn unwrapped(by: &Encapsulation, frame: &[u8]) -> Option<Vec<u8>> {
    let mut far_table = TunnelTable::new(None);
    let to = PortRef { worker: 0, vnet: 0, port: 0, generation: 0 };
    far_table.insert(&by.reversed(), to).unwrap();
    match far_table.classify(frame).ok()?.1 {
        InnerFrame::Whole => Some(frame.to_vec()),
        InnerFrame::Behind(inner) => Some(frame[inner].to_vec()),
        InnerFrame::Untagged => {
            let mut frame = frame.to_vec();
            vlan::strip(&mut frame);
            Some(frame.split_off(vlan::TAG_BYTES))
        }
    }
}

/// Returns two transits: from a tunnel to one of another
/// kind, and from a tunnel to a whole interface.
fn transit(root: &Path) -> VnetConfig {
    let mut vnet = two_hosts(root, "red", &[]);
    vnet.vlinks = vec![
        vlink("far", vxlan_end("west", "A", 5), udp_end("east", "B", 5000)),
        vlink("near", vxlan_end("north", "A", 6), outside("south", "B", Encapsulation::Interface)),
    ];
    vnet
}

fn marks(left: &[(String, Vec<u8>)], end: &str) -> Vec<u64> {
    left.iter().filter(|(name, _)| name == end).map(|(_, frame)| mark(frame)).collect()
}

#[test]
fn transit_joins_two_external_ends_and_counts_both() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = transit(root.path());
    let mut lab = Lab::new(&spec);
    lab.receive("west", (0..40).map(|mark| frame(100, mark)));
    lab.receive("east", (40..60).map(|mark| frame(100, mark)));
    lab.receive("south", (60..61).map(|mark| frame(100, mark)));
    let left = lab.left();
    assert_eq!(left.len(), 61);
    assert_eq!(marks(&left, "east"), (0..40).collect::<Vec<_>>(), "in order");
    assert_eq!(marks(&left, "west"), (40..60).collect::<Vec<_>>());
    assert_eq!(marks(&left, "north"), [60]);
    let ends = lab.node(OUTSIDE).ports;
    let (west, east) = (&ends["west"], &ends["east"]);
    assert_eq!((west.received, west.received_bytes, west.consumed), (40, 4000, 40));
    assert_eq!((east.made, east.sent, east.sent_bytes), (40, 40, 4000));
    assert_eq!((east.received, east.consumed, west.made, west.sent), (20, 20, 20, 20));
    lab.assert_adds_up(true);
    // The frame is too long for its egress tunnel, although its ingress tunnel carries it.
    lab.receive("west", [frame(14 + 1439, 0)]);
    assert_eq!(lab.left().len(), 0);
    assert_eq!(dropped(&lab.node(OUTSIDE), "underlay-too-big"), 1);
    // At its rate, with a full queue.
    spec.vlinks[0].leaving.iter_mut().for_each(|it| it.rate_bps = Some(80_000));
    spec.vlinks[0].leaving.iter_mut().for_each(|it| it.queue_frames = 8);
    lab.reshape(&spec);
    lab.receive("west", (0..100).map(|mark| frame(1000, mark)));
    let left = lab.left().len() as u64;
    let out = lab.node(OUTSIDE);
    let full = out.ports["east"].dropped["queue-full"];
    assert!(left >= 2 && (1..=8).contains(&out.in_flight), "{left}: {out:?}");
    assert!(full > 70 && left + full + out.in_flight == 100, "{left}: {out:?}");
    lab.assert_adds_up(false);
    // Queued frames continue when other vlinks change. They are dropped when the link goes down.
    spec.vlinks.remove(1);
    lab.reshape(&spec);
    let ends = lab.node(OUTSIDE);
    assert!(ends.in_flight > 0 && ends.ports["west"].received == 141, "{ends:?}");
    assert!(!ends.ports.contains_key("north"));
    spec.vlinks[0].up = false;
    lab.reshape(&spec);
    lab.receive("east", [frame(100, 0)]);
    let ends = lab.node(OUTSIDE);
    assert_eq!(
        (ends.in_flight, ends.ports["east"].dropped["link-down"] > 1),
        (0, true),
        "{ends:?}"
    );
    lab.left();
    lab.assert_adds_up(true);
}

#[test]
fn invalid_queues_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let queue = |name: usize| QueueConfig { name: format!("q{name}"), ..QueueConfig::default() };
    let refused = |change: &dyn Fn(&mut VnetConfig)| {
        let mut spec = transit(root.path());
        spec.vlinks[0].queues = vec![(0..2).map(queue).collect()];
        check(&spec).unwrap();
        change(&mut spec);
        check(&spec).unwrap_err()
    };
    let first =
        |change: fn(&mut QueueConfig)| refused(&|spec| change(&mut spec.vlinks[0].queues[0][0]));
    let words = first(|it| it.weight = 1001);
    assert_eq!(words, "vlink red/far: queue q0: weight: 1001, 1000 at most");
    assert!(first(|it| it.frames = 4097).contains("frames: 4097"));
    assert!(first(|it| it.bytes = (8 << 20) + 1).contains("bytes: 8388609"));
    assert!(first(|it| it.dscp = vec![3, 64]).contains("DSCP: 64"));
    assert!(first(|it| it.dscp = vec![3, 3]).contains("two queues select DSCP 3"));
    assert!(first(|it| it.name = "q1".into()).contains("queue q1 exists twice"));
    let many = refused(&|spec| spec.vlinks[0].queues[0] = (0..4097).map(queue).collect());
    assert!(many.contains("queues at an end: 4097, 4096 at most"), "{many}");
    let all = refused(&|spec| spec.vlinks[0].queues = vec![(0..4096).map(queue).collect(); 17]);
    assert_eq!(all, "vnet red: queues: 69632, 65536 at most");
}

/// Returns four hosts, two tunnels and a whole interface on one segment.
fn lan(root: &Path) -> VnetConfig {
    let root = directory(root, "lan");
    let hosts: Vec<_> = (1..=4).map(|n| host(&root, &format!("h{n}"))).collect();
    let mut ends: Vec<_> = hosts.iter().map(|host| port(&host.name, 0)).collect();
    ends.push(vxlan_end("west", "A", 5));
    ends.push(udp_end("east", "A", 5000));
    ends.push(outside("wire", "B", Encapsulation::Interface));
    VnetConfig {
        name: "lan".into(),
        police: None,
        nodes: hosts,
        vlinks: vec![vlink_of("lan", ends)],
    }
}

const ALL: [u8; 6] = [0xff; 6];

fn mac(station: u32) -> [u8; 6] {
    let [a, b, c, d] = station.to_be_bytes();
    [2, 0, a, b, c, d]
}

fn between(to: [u8; 6], from: u32, number: u64) -> Vec<u8> {
    let mut frame = frame(60, number);
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&mac(from));
    frame
}

/// A segment, and a TAP helper for each host.
struct Lan {
    lab: Lab,
    taps: Vec<Peer>,
    _controls: Vec<pdp_memif::MemifControl>,
}

impl Lan {
    fn new(root: &Path, spec: &VnetConfig) -> Self {
        let mut lan = Self { lab: Lab::new(spec), taps: vec![], _controls: vec![] };
        for (at, node) in spec.nodes.iter().enumerate() {
            let path = root.join(format!("{}.sock", node.name));
            let (tap, link, control) = pair(&path, 0, 1 + at as u64);
            let watch = &lan.lab.worker.core.connections.watch;
            watch.add_bell(Some(0), &link.channel.doorbell().unwrap()).unwrap();
            let attached = lan
                .lab
                .worker
                .change(0, |vnet, _| vnet.attach(&node.name, NodePeer::Tap, 0, link).is_ok());
            assert_eq!(attached, Some(true));
            lan.taps.push(tap);
            lan._controls.push(control);
        }
        lan
    }

    /// Sends frames from host `at`, counted from 0.
    fn send(&mut self, at: usize, frames: impl IntoIterator<Item = Vec<u8>>) {
        for frame in frames {
            assert!(self.taps[at].out(0, &frame));
        }
        self.lab.rounds();
    }

    /// Returns the receivers of frames since the last call, with the
    /// frames' marks: hosts by number from 1, and external ends by name.
    fn got(&mut self) -> Vec<(String, u64)> {
        let mut all = vec![];
        for (at, tap) in self.taps.iter_mut().enumerate() {
            let frames = tap.receive().into_iter();
            all.extend(frames.map(|(_, frame)| (format!("h{}", at + 1), mark(&frame))));
        }
        self.lab.rounds();
        let left = self.lab.left().into_iter();
        all.extend(left.map(|(end, frame)| (end, mark(&frame))));
        all.sort();
        all
    }

    fn port(&self, at: usize) -> PortStats {
        self.lab.node(&format!("h{}", at + 1)).ports["eth0"].clone()
    }

    /// Checks that the frames that entered the segment left it, including copies.
    fn assert_adds_up(&self) {
        self.lab.assert_adds_up(true);
        let stats = self.lab.worker.vnets[0].as_ref().unwrap().stats();
        let (mut into, mut out) = (0, 0);
        for (name, node) in &stats.nodes {
            for port in node.ports.values() {
                let is_own = name == OUTSIDE;
                into += port.copied + if is_own { port.consumed } else { port.sent };
                out += if is_own { port.made } else { port.received };
            }
        }
        assert_eq!(into, out, "{stats:#?}");
    }
}

fn at(ends: &[&str], mark: u64) -> Vec<(String, u64)> {
    let mut all: Vec<_> = ends.iter().map(|end| (end.to_string(), mark)).collect();
    all.sort();
    all
}

#[test]
fn segment_floods_unknown_addresses_and_learns() {
    let root = tempfile::tempdir().unwrap();
    let spec = lan(root.path());
    let mut lan = Lan::new(root.path(), &spec);
    lan.send(0, [between(ALL, 1, 1)]);
    assert_eq!(lan.got(), at(&["h2", "h3", "h4", "west", "east", "wire"], 1), "not to who sent it");
    lan.send(1, [between(mac(1), 2, 2)]);
    assert_eq!(lan.got(), at(&["h1"], 2), "to who has it alone");
    lan.send(2, [between(mac(9), 3, 3)]);
    assert_eq!(lan.got(), at(&["h1", "h2", "h4", "west", "east", "wire"], 3), "nobody knows");
    // BPDUs are for bridges on the segment. The segment itself is none.
    lan.send(3, [between([1, 0x80, 0xc2, 0, 0, 0], 4, 4)]);
    assert_eq!(lan.got(), at(&["h1", "h2", "h3", "west", "east", "wire"], 4));
    // Frames from one tunnel never go to another.
    lan.lab.receive("west", [between(ALL, 5, 5)]);
    assert_eq!(lan.got(), at(&["h1", "h2", "h3", "h4", "wire"], 5));
    lan.lab.receive("east", [between(ALL, 6, 6), between(mac(5), 6, 7)]);
    assert_eq!(lan.got(), at(&["h1", "h2", "h3", "h4", "wire"], 6), "7 is for the other tunnel");
    lan.lab.receive("wire", [between(mac(6), 7, 8), between(mac(5), 7, 9)]);
    assert_eq!(lan.got(), [("east".into(), 8), ("west".into(), 9)]);
    lan.send(0, [between(mac(5), 1, 10), between(mac(1), 1, 11)]);
    assert_eq!(lan.got(), at(&["west"], 10), "11 is for who sent it");
    let ends = lan.lab.node(OUTSIDE).ports;
    assert_eq!(
        (lan.port(0).sent, lan.port(0).copied, lan.port(0).dropped["no-other-end"]),
        (2, 5, 1)
    );
    assert_eq!((ends["east"].consumed, ends["east"].copied, ends["east"].made), (1, 4, 4));
    assert_eq!(ends["east"].dropped["no-other-end"], 1);
    lan.assert_adds_up();
    // An end that is removed takes its addresses with it. The others stay known.
    let mut less = spec.clone();
    less.vlinks[0]
        .ends
        .retain(|end| !matches!(end, VlinkEnd::External { name, .. } if name == "east"));
    lan.lab.reshape(&less);
    lan.send(0, [between(mac(5), 1, 12), between(mac(6), 1, 13)]);
    let mut expected = at(&["west"], 12);
    expected.extend(at(&["h2", "h3", "h4", "west", "wire"], 13));
    expected.sort();
    assert_eq!(lan.got(), expected);
    lan.lab.assert_adds_up(true);
}

#[test]
fn flooding_end_uses_only_its_own_rate() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = lan(root.path());
    spec.vlinks[0].segment = Some(SegmentConfig { addresses: 1024, flood_pps: 100 });
    let mut lan = Lan::new(root.path(), &spec);
    lan.send(0, [between(ALL, 1, 0)]);
    lan.send(1, [between(ALL, 2, 0)]);
    lan.got();
    // Host 3 broadcasts, each time from another address, and
    // as host 2. Host 4 bridges the frames that it gets back.
    let (mut replies, mut asked) = (0, 0);
    for number in 0..60u64 {
        let strange = (0..30).map(|n| between(ALL, 1000 + (number * 30 + n) as u32, 1));
        lan.send(2, strange.chain([between(ALL, 2, 1)]));
        let back: Vec<_> = lan.taps[3].receive().into_iter().map(|(_, frame)| frame).collect();
        lan.send(3, back);
        // Meanwhile host 1 sends requests to host 2, which answers.
        lan.send(1, [between(mac(1), 2, 2)]);
        lan.send(0, [between(mac(2), 1, 3)]);
        asked += 1;
        replies += lan.got().iter().filter(|(node, mark)| node == "h2" && *mark == 3).count();
    }
    assert_eq!(replies, asked, "what others have of each other is not lost");
    let (one, three, four) = (lan.port(0), lan.port(2), lan.port(3));
    assert!(three.dropped["flood-limit"] > 1000 && three.sent < 600, "{three:?}");
    assert!(four.sent < 600, "{four:?}");
    assert!(one.dropped.is_empty(), "{one:?}");
    lan.assert_adds_up();
}

#[test]
fn flooded_copies_respect_the_packet_limit() {
    let root = tempfile::tempdir().unwrap();
    let root = directory(root.path(), "wide");
    let hosts: Vec<_> = (1..=200).map(|n| host(&root, &format!("h{n}"))).collect();
    let ends = hosts.iter().map(|host| port(&host.name, 0)).collect();
    let mut wide = vlink_of("wide", ends);
    wide.segment = Some(SegmentConfig { addresses: 1024, flood_pps: 1_000_000 });
    let mut spec =
        VnetConfig { name: "wide".into(), police: None, nodes: hosts, vlinks: vec![wide] };
    spec.nodes.truncate(200);
    let mut lab = Lab::new(&spec);
    let path = root.join("h1.sock");
    let (mut tap, link, _control) = pair(&path, 0, 1);
    let watch = &lab.worker.core.connections.watch;
    watch.add_bell(Some(0), &link.channel.doorbell().unwrap()).unwrap();
    lab.worker.change(0, |vnet, _| vnet.attach("h1", NodePeer::Tap, 0, link).is_ok()).unwrap();
    // As many as are handled at once.
    for number in 0..30 {
        assert!(tap.out(0, &between(ALL, 1, number)));
    }
    lab.rounds();
    let stats = lab.worker.vnets[0].as_ref().unwrap().stats();
    let h1 = &stats.nodes["h1"].ports["eth0"];
    assert_eq!((h1.sent, h1.copied), (30, 30 * 198));
    let others =
        || stats.nodes.iter().filter(|(name, _)| *name != "h1").map(|it| &it.1.ports["eth0"]);
    assert_eq!(others().map(|port| port.received).sum::<u64>(), 30 * 199);
    let missed: u64 = others().filter_map(|port| port.dropped.get("no-packet")).sum();
    let made = 30 * 198 - missed;
    assert!((SHARE as u64 / 2 - 200..=SHARE as u64 / 2).contains(&made), "{made}");
    lab.assert_adds_up(true);
}

/// Returns a tunnel of any kind, over IPv4 or IPv6, all to one
/// machine. GRE has both a checksum and a number, or neither.
fn any_tunnel(which: u32) -> Encapsulation {
    let text =
        if which.is_multiple_of(2) { ["10.0.0.1", "10.0.0.2"] } else { ["fd00::1", "fd00::2"] };
    let [local, remote] = text.map(|text| text.parse().unwrap());
    // Distinguishes tunnels of one kind and family.
    let id = which / 10 + 5;
    match which / 2 % 5 {
        0 => Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: id }),
        1 => {
            let (local_port, remote_port) = (5000 + id as u16, 6000);
            Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port, remote_port })
        }
        2 => {
            let sealed = which % 4 < 2;
            let (checksum, sequence) = (sealed, sealed);
            Encapsulation::Gre(gre::GreTunnel { local, remote, key: Some(id), checksum, sequence })
        }
        3 => Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port: 6081, vni: id }),
        _ => Encapsulation::Vlan(vlan::VlanTunnel { id: which as u16 + 5 }),
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A host (of four) or an external end (of five) sends frames
    /// between stations. The last station is the broadcast address.
    Send { by: usize, to: u32, from: u32, count: u8 },
    /// pdpd requests a change.
    Change { rate: Option<u64>, queue: u32, up: bool, flood_pps: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let rate = prop_oneof![Just(None), (100_000u64..100_000_000).prop_map(Some)];
    prop_oneof![
        6 => (0usize..9, 0u32..6, 0u32..5, 1u8..40)
            .prop_map(|(by, to, from, count)| Step::Send { by, to, from, count }),
        1 => (rate, 0u32..50, prop::bool::weighted(0.8), 1u64..2000).prop_map(
            |(rate, queue, up, flood_pps)| Step::Change { rate, queue, up, flood_pps }
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 100, ..ProptestConfig::default() })]

    #[test]
    fn segment_accounts_for_every_frame(
        steps in prop::collection::vec(step(), 1..40),
        kinds in prop::sample::subsequence((0..20).collect::<Vec<u32>>(), 4).prop_shuffle(),
    ) {
        let root = tempfile::tempdir().unwrap();
        let mut spec = lan(root.path());
        // Two tunnels and a wire on the segment, and a transit; all of any kind.
        let ends = spec.vlinks[0].ends.iter().filter(|end| matches!(end, VlinkEnd::Port { .. }));
        let tunnel = |at: usize| {
            let name = ["west", "east", "north", "south"][at];
            outside(name, CARDS[at / 2], any_tunnel(kinds[at]))
        };
        let wire = outside("wire", "B", Encapsulation::Interface);
        let ends = ends.cloned().chain([tunnel(0), tunnel(1), wire]).collect();
        spec.vlinks = vec![vlink_of("lan", ends), vlink("through", tunnel(2), tunnel(3))];
        let mut lan = Lan::new(root.path(), &spec);
        for step in steps {
            match step {
                Step::Send { by, to, from, count } => {
                    let to = if to == 5 { ALL } else { mac(to) };
                    let frames = (0..count).map(|number| between(to, from, number.into()));
                    match by.checked_sub(4) {
                        None => lan.send(by, frames),
                        Some(end) => {
                            let ends = ["west", "east", "wire", "north", "south"];
                            lan.lab.receive(ends[end], frames);
                        }
                    }
                }
                Step::Change { rate, queue, up, flood_pps } => {
                    spec.vlinks[0].leaving.iter_mut().for_each(|it| it.rate_bps = rate);
                    spec.vlinks[0].leaving.iter_mut().for_each(|it| it.queue_frames = queue);
                    spec.vlinks[0].up = up;
                    spec.vlinks[0].segment = Some(SegmentConfig { addresses: 8, flood_pps });
                    lan.lab.reshape(&spec);
                }
            }
            lan.lab.assert_adds_up(false);
            lan.got();
        }
        spec.vlinks[0].leaving.iter_mut().for_each(|it| it.rate_bps = None);
        lan.lab.reshape(&spec);
        eventually("nothing on its way", || {
            lan.got();
            let stats = lan.lab.worker.vnets[0].as_ref().unwrap().stats();
            stats.nodes.values().all(|node| node.in_flight == 0)
        });
        lan.assert_adds_up();
    }
}

impl Lab {
    /// Returns the frames that leave by `end` until none is under way.
    fn all_left(&mut self, end: &str) -> Vec<Vec<u8>> {
        let mut all = vec![];
        let since = Instant::now();
        loop {
            self.rounds();
            all.extend(self.left().into_iter().filter(|(name, _)| name == end).map(|(_, it)| it));
            if self.node(OUTSIDE).in_flight == 0 {
                return all;
            }
            assert!(since.elapsed() < Duration::from_secs(10), "still on its way");
        }
    }
}

/// Returns the transit with these impairments at its eastern end.
fn impaired(spec: &VnetConfig, impairments: Impairments) -> VnetConfig {
    let mut spec = spec.clone();
    spec.vlinks[0].leaving[1].impairments = impairments;
    spec
}

const MS: u64 = 1_000_000;

#[test]
fn impairments_take_effect_and_are_counted() {
    let root = tempfile::tempdir().unwrap();
    let spec = transit(root.path());
    let share = FrameFraction(FrameFraction::ALL.0 / 10);
    let all = Impairments {
        delay_ns: 3 * MS,
        jitter_ns: 2 * MS,
        loss: share,
        reorder: FrameFraction::default(),
        corrupt: share,
        duplicate: share,
        seed: 1,
    };
    let frames = || (0..400).map(|mark| frame(1000, mark));
    let mut outcomes = vec![];
    for config in
        [all, all, Impairments { seed: 2, ..all }, Impairments { delay_ns: 0, jitter_ns: 0, ..all }]
    {
        let mut lab = Lab::new(&impaired(&spec, config));
        let mut waited = 0;
        for frame in frames() {
            lab.receive("west", [frame]);
            waited += lab.node(OUTSIDE).in_flight;
        }
        let left = lab.all_left("east");
        // Each frame waits for at least one round, though maybe not for its millisecond.
        assert_eq!(waited > 200, config.delay_ns > 0, "{waited}");
        let ends = lab.node(OUTSIDE).ports;
        let (west, east) = (&ends["west"], &ends["east"]);
        let lost = east.dropped["loss"];
        assert_eq!((west.consumed, east.made, east.reordered), (400, 400, 0));
        assert_eq!(east.sent, 400 + east.duplicated - lost, "{east:?}");
        assert_eq!(left.len() as u64, east.sent);
        for count in [lost, east.duplicated, east.corrupted] {
            // A tenth of 400, with a tolerance of 6 standard deviations.
            assert!((4..=76).contains(&count), "{east:?}");
        }
        let original: Vec<_> = frames().collect();
        let turned = |frame: &[u8]| {
            let bits = |one: &[u8]| -> u32 {
                one.iter().zip(frame).map(|(a, b)| (a ^ b).count_ones()).sum()
            };
            let (at, bits) =
                original.iter().map(|it| bits(it)).enumerate().min_by_key(|it| it.1).unwrap();
            (at, bits)
        };
        let outcome: Vec<_> = left.iter().map(|frame| turned(frame)).collect();
        assert!(outcome.iter().all(|(_, bits)| *bits <= 1), "one bit at most");
        let twice = outcome.windows(2).filter(|two| two[0].0 == two[1].0).count() as u64;
        assert_eq!(twice, east.duplicated);
        assert!(outcome.windows(2).all(|two| two[0].0 <= two[1].0), "in order");
        outcomes.push(outcome);
        lab.assert_adds_up(true);
    }
    assert_eq!(outcomes[0], outcomes[1], "the same seed");
    assert_ne!(outcomes[0], outcomes[2], "another one");
    assert_eq!(outcomes[0], outcomes[3], "without a delay as with one");
}

#[test]
fn delay_change_keeps_delayed_frames_in_order() {
    let root = tempfile::tempdir().unwrap();
    let spec = transit(root.path());
    let delay = |ms| Impairments { delay_ns: ms * MS, ..Impairments::default() };
    let mut lab = Lab::new(&impaired(&spec, delay(60)));
    let mut next = 0;
    let send = |lab: &mut Lab, from: u64| {
        lab.receive("west", (from..from + 20).map(|mark| frame(100, mark)));
        from + 20
    };
    next = send(&mut lab, next);
    // Another vlink is removed and added again. Then the delay
    // gets shorter, longer and zero, and the seed changes.
    let mut without = impaired(&spec, delay(5));
    without.vlinks.remove(1);
    let shapes = [
        without,
        impaired(&spec, delay(1)),
        impaired(&spec, delay(20)),
        spec.clone(),
        impaired(&spec, Impairments { seed: 9, ..delay(7) }),
    ];
    for shape in shapes {
        lab.reshape(&shape);
        assert_eq!(lab.left().len(), 0, "60 ms are not over");
        next = send(&mut lab, next);
        assert_eq!(lab.node(OUTSIDE).in_flight, next);
        lab.assert_adds_up(false);
    }
    let since = Instant::now();
    let left = lab.all_left("east");
    assert!(since.elapsed() < Duration::from_millis(500));
    assert_eq!(
        left.iter().map(|frame| mark(frame)).collect::<Vec<_>>(),
        (0..next).collect::<Vec<_>>()
    );
    lab.assert_adds_up(true);
    // Some frames overtake others, and only those leave early.
    // Frames that wait at a link that goes down are dropped.
    lab.reshape(&impaired(
        &spec,
        Impairments { reorder: FrameFraction(FrameFraction::ALL.0 / 4), ..delay(30) },
    ));
    lab.receive("west", (0..100).map(|mark| frame(100, mark)));
    let early = marks(&lab.left(), "east");
    let ends = lab.node(OUTSIDE);
    let reordered = ends.ports["east"].reordered;
    // The first ones may have nothing to overtake.
    assert!(
        reordered > 5 && (reordered..=reordered + 4).contains(&(early.len() as u64)),
        "{ends:?}"
    );
    assert_eq!(ends.in_flight, 100 - early.len() as u64);
    let mut down = impaired(&spec, delay(30));
    down.vlinks[0].up = false;
    lab.reshape(&down);
    let ends = lab.node(OUTSIDE);
    assert_eq!(ends.ports["east"].dropped["link-down"], 100 - early.len() as u64);
    lab.assert_adds_up(true);
}

/// However many frames are due when the worker is late, others get packets, too.
#[test]
fn overdue_frames_leave_in_bounded_batches() {
    const SENT: u64 = 3000;
    let root = tempfile::tempdir().unwrap();
    let delayed = Impairments { delay_ns: 300 * MS, ..Impairments::default() };
    let mut lab = Lab::new(&impaired(&transit(root.path()), delayed));
    for part in 0..SENT / 100 {
        lab.receive("west", (part * 100..(part + 1) * 100).map(|mark| frame(60, mark)));
    }
    assert_eq!(lab.node(OUTSIDE).in_flight, SENT, "300 ms are not over");
    std::thread::sleep(Duration::from_millis(400));
    let mut received = vec![];
    while lab.node(OUTSIDE).in_flight > 0 {
        lab.worker.round();
        let part = marks(&lab.left(), "east");
        assert!(part.len() <= LATE_FRAMES, "{}", part.len());
        received.extend(part);
    }
    assert_eq!(received, (0..SENT).collect::<Vec<_>>());
    lab.assert_adds_up(true);
}

#[test]
fn delay_line_holds_rate_times_delay() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = impaired(
        &transit(root.path()),
        Impairments { delay_ns: 50 * MS, ..Impairments::default() },
    );
    spec.vlinks[0].leaving[1].rate_bps = Some(1_000_000);
    spec.vlinks[0].leaving[1].queue_frames = 4;
    let mut lab = Lab::new(&spec);
    let packets = lab.worker.core.packets.free();
    // On a busy machine, frames leave while this program waits.
    let (since, mut most) = (Instant::now(), 0);
    while most <= 60 && since.elapsed() < PATIENCE {
        for _ in 0..300 {
            lab.receive("west", (0..4).map(|mark| frame(60, mark)));
            lab.left();
        }
        most = most.max(lab.node(OUTSIDE).in_flight);
    }
    let ends = lab.node(OUTSIDE);
    assert!(!ends.ports["east"].dropped.contains_key("delay-full"), "{ends:?}");
    assert!(most > 60, "{most}: {ends:?}");
    assert!(packets - lab.worker.core.packets.free() <= 4, "those that wait hold no packets");
    lab.all_left("east");
    lab.assert_adds_up(true);
    // Larger values than allowed are refused.
    let egress = &mut spec.vlinks[0].leaving[1];
    (egress.rate_bps, egress.impairments.delay_ns) = (Some(1_000_000_000_000), 10_000 * MS);
    assert!(check(&spec).unwrap_err().contains("bytes of delayed frames"));
}
