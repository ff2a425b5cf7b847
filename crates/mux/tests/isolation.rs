//! No frame and no count of one virtual network shows in another. This is a property over random
//! sets of networks that share interfaces. Most of these networks are as alike as possible.
//!
//! All networks have the same node names, MACs and addresses inside. Their links are
//! wires, transits and segments. Their tunnels are drawn from few addresses, ports and
//! keys, or are another network's with one thing changed. Guests of every attachment,
//! TAP helpers and machines outside send arbitrary frames: tags of foreign ports, VLAN
//! tags, and frames that look like those of other networks' tunnels.
//!
//! Every frame ends with the external end that it came by, if any, and the number
//! of the network that it was sent in. The test checks these wherever it sees a
//! frame. Frames that came by one end of a network leave only by ends that its link
//! joins to that one. From one tunnel of a segment, no frame leaves by another.
//!
//! A separate test shows that the property detects errors. It finds a classifier
//! that ignores one part of a tunnel's key within [`MUTANT_CASES`] cases.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;

use common::*;
use pdp_afxdp::PacketBuffer;
use pdp_mux::channel::PeerChannel;
use pdp_mux::classify::{PortRef, TunnelTable};
use pdp_mux::control::plan::outside_ends;
use pdp_mux::core::Core;
use pdp_mux::encapsulate::{ExternalPath, VlinkPath};
use pdp_mux::external::WorkerExternal as Card;
use pdp_mux::netdev::path::{PATH_FRAMES, RemoteNetdev as SocketPath};
use pdp_mux::packets::Packets;
use pdp_mux::ringers::Ringers;
use pdp_mux::vnet::{MuxVnet as Live, NodePeer};
use pdp_mux::wake::Wake;
use pdp_mux::worker::{HANDOVER_FRAMES, NeighbourWorker, Worker, WorkerCommand};
use pdp_proto::mux::*;
use pdp_underlay::TunnelNextHop;
use pdp_wire::tag::{Tag, TagVerdict};
use pdp_wire::tunnel::KINDS;
use pdp_wire::{geneve, gre, outer, udp, vlan, vxlan};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rtrb::{Consumer, RingBuffer};
use serde_json::{Map, Value, json};

/// Cases of the property. The seed of case N is N.
const CASES: u64 = 40;

/// Cases within which every mutant is found.
const MUTANT_CASES: u64 = 20;

/// Number of networks in a case.
const VNETS: std::ops::RangeInclusive<usize> = 2..=5;

const WORKERS: usize = 2;
const SHARE: usize = 4096;
const CARDS: [(&str, [u8; 6]); 2] = [("A", [2, 0, 0, 0, 10, 1]), ("B", [2, 0, 0, 0, 11, 1])];
const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 10, 9];

/// Addresses, ports and keys that tunnels are drawn from.
/// The machine has the same addresses on both cards.
const LOCALS: [&str; 3] = ["10.0.0.1", "10.0.0.3", "2001:db8::1"];
const REMOTES: [&str; 3] = ["10.0.0.2", "10.0.0.4", "2001:db8::2"];
const VXLAN_PORTS: [u16; 2] = [4789, 4790];
const GENEVE_PORTS: [u16; 2] = [6081, 4790];
const UDP_PORTS: [u16; 2] = [5000, 5001];
const VNIS: [u16; 3] = [5, 6, 5 << 8];

/// Mark of the networks' frames, to tell them from others.
const MARK: u32 = 0x5044_5000;

/// Marks a frame with its origin: the number of its external end, if any, and of its network.
fn marked(mut frame: Vec<u8>, by: Option<usize>, vnet: usize) -> Vec<u8> {
    frame.extend(by.map_or(0, |by| by as u32 + 1).to_be_bytes());
    frame.extend((MARK | vnet as u32).to_be_bytes());
    frame
}

fn words_of(frame: &[u8]) -> [u32; 2] {
    let [.., a, b, c, d, e, f, g, h] = *frame else { panic!("a frame that nobody sent") };
    [[a, b, c, d], [e, f, g, h]].map(u32::from_be_bytes)
}

fn vnet_of(frame: &[u8]) -> usize {
    let [_, word] = words_of(frame);
    assert_eq!(word & !0xff, MARK, "a frame that nobody sent: {frame:x?}");
    (word & 0xff) as usize
}

/// Returns the external end that the frame came by.
fn end_of(frame: &[u8]) -> Option<usize> {
    words_of(frame)[0].checked_sub(1).map(|by| by as usize)
}

/// Returns the frame as a node forwards it.
fn sent_on(mut frame: Vec<u8>) -> Vec<u8> {
    let at = frame.len() - 8;
    frame[at..at + 4].fill(0);
    frame
}

/// Part of the key that the classifier under test ignores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// A part of a kind's key, with the names of kind and part in messages.
    Part(&'static str, &'static str),
    Card,
}

/// Every part of every kind's key.
const PARTS: [(&str, &[&str]); KINDS.len()] = [
    ("Vxlan", &["local", "remote", "port", "vni"]),
    ("Udp", &["local", "remote", "local_port", "remote_port"]),
    ("Gre", &["local", "remote", "key"]),
    ("Geneve", &["local", "remote", "port", "vni"]),
    ("Vlan", &["id"]),
];

/// Returns a tunnel's kind, and the parts of its key.
fn parts(by: &Encapsulation) -> (String, Map<String, Value>) {
    let Value::Object(of_kind) = serde_json::to_value(by).unwrap() else {
        return (String::new(), Map::new());
    };
    let (kind, parts) = of_kind.into_iter().next().unwrap();
    (kind, serde_json::from_value(parts).unwrap())
}

impl Mutant {
    /// Returns the key with the ignored part set to the same value for all tunnels.
    fn blind(self, (card, by): (usize, Encapsulation)) -> (usize, Encapsulation) {
        match self {
            Self::None => (card, by),
            Self::Card => (0, by),
            Self::Part(kind, part) => {
                let (of, mut parts) = parts(&by);
                if of != kind {
                    return (card, by);
                }
                let six = by.ends().is_some_and(|(local, _)| local.is_ipv6());
                parts[part] = match part {
                    "local" => LOCALS[if six { 2 } else { 0 }].into(),
                    "remote" => REMOTES[if six { 2 } else { 0 }].into(),
                    _ => 5.into(),
                };
                (card, serde_json::from_value(json!({kind: parts})).unwrap())
            }
        }
    }
}

fn address(text: &str) -> std::net::IpAddr {
    text.parse().unwrap()
}

/// Distribution of a case's tunnels. They are most often
/// of one kind, so that many differ in only one thing.
#[derive(Clone, Copy, Debug)]
struct Draw {
    often: usize,
    /// Applies to all GRE tunnels.
    checksum: bool,
    sequence: bool,
}

impl Draw {
    fn of(seed: u64) -> Self {
        let kinds = KINDS.len() as u64;
        let round = seed / kinds;
        let often = (seed % kinds) as usize;
        Self { often, checksum: round % 2 == 1, sequence: round % 4 > 1 }
    }

    fn tunnel(self, random: &mut SmallRng) -> Encapsulation {
        let rarely = random.random_ratio(1, 4);
        let kind = if rarely { random.random_range(0..KINDS.len()) } else { self.often };
        let at = if random.random_ratio(1, 4) { 2 } else { random.random_range(0..2) };
        let local = address(LOCALS[at]);
        let remote = address(REMOTES[if at == 2 { 2 } else { random.random_range(0..2) }]);
        let mut number = |from: &[u16]| *from.choose(random).unwrap();
        match KINDS[kind].name {
            "udp" => {
                let (local_port, remote_port) = (number(&UDP_PORTS), number(&UDP_PORTS));
                Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port, remote_port })
            }
            "gre" => {
                let Self { checksum, sequence, .. } = self;
                let key = number(&VNIS);
                let key = (key != VNIS[1]).then_some(key.into());
                Encapsulation::Gre(gre::GreTunnel { local, remote, key, checksum, sequence })
            }
            "geneve" => {
                let (port, vni) = (number(&GENEVE_PORTS), number(&VNIS).into());
                Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port, vni })
            }
            "vlan" => Encapsulation::Vlan(vlan::VlanTunnel { id: number(&VNIS) }),
            _ => {
                let (port, vni) = (number(&VXLAN_PORTS), number(&VNIS).into());
                Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port, vni })
            }
        }
    }
}

/// Returns the number of differences between two ends. `None` if they are of different kinds.
fn differences(a: &(usize, Encapsulation), b: &(usize, Encapsulation)) -> Option<usize> {
    let ((kind_a, parts_a), (kind_b, parts_b)) = (parts(&a.1), parts(&b.1));
    let differing =
        parts_a.iter().filter(|(part, value)| parts_b.get(*part) != Some(value)).count();
    (kind_a == kind_b).then_some(usize::from(a.0 != b.0) + differing)
}

/// Returns another network's end with one thing changed.
fn neighbour_of(
    end: &(usize, Encapsulation),
    draw: Draw,
    random: &mut SmallRng,
) -> (usize, Encapsulation) {
    for _ in 0..1000 {
        let other = (random.random_range(0..CARDS.len()), draw.tunnel(random));
        if differences(end, &other) == Some(1) {
            return other;
        }
    }
    (1 - end.0, end.1.clone())
}

/// Kind of a vlink with an external end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Wire,
    Transit,
    Segment,
}

/// Owner of the frames that arrive by an external end.
#[derive(Clone, Debug)]
struct Owner {
    end: (usize, Encapsulation),
    vnet: usize,
    /// Number of its vlink.
    vlink: usize,
    kind: Kind,
    /// Node and port that count its frames.
    counted: (String, String),
}

impl Owner {
    /// True if a frame may leave here that came by another end of the network, or from a node.
    fn lets_out(&self, came_by: Option<&Self>) -> bool {
        let Some(by) = came_by else { return self.kind != Kind::Transit };
        let is_tunnel = |owner: &Self| owner.end.1 != Encapsulation::Interface;
        let joined = self.vlink == by.vlink && self.end != by.end;
        match self.kind {
            Kind::Wire => false,
            Kind::Transit => joined,
            Kind::Segment => joined && !(is_tunnel(self) && is_tunnel(by)),
        }
    }
}

/// A peer of the mux inside a network.
struct Inside {
    vnet: usize,
    node: &'static str,
    attach: AttachMode,
    peer: Peer,
}

struct World {
    random: SmallRng,
    draw: Draw,
    mutant: Mutant,
    workers: Vec<Worker>,
    /// Frames that leave, by worker and card.
    lines: Vec<Vec<Consumer<PacketBuffer>>>,
    owners: Vec<Owner>,
    inside: Vec<Inside>,
    /// Frames that were sent from outside to each of `owners`.
    sent: Vec<u64>,
    /// Number of the last of these frames.
    number: u32,
    /// Frames that peers inside received, and frames that left.
    seen: [u64; 2],
    /// Networks in which a guest or a TAP has sent.
    spoke: Vec<bool>,
    /// Violations of the property.
    wrong: Vec<String>,
    _commands: Vec<SyncSender<WorkerCommand>>,
    _controls: Vec<pdp_memif::MemifControl>,
    _wakes: Vec<Arc<Wake>>,
}

impl World {
    fn new(root: &Path, seed: u64, mutant: Mutant) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let (_pool, parts) = Packets::pool(WORKERS, SHARE).unwrap();
        let wakes: Vec<_> = (0..WORKERS).map(|_| Arc::new(Wake::new().unwrap())).collect();
        let (one, two) = (RingBuffer::new(HANDOVER_FRAMES), RingBuffer::new(HANDOVER_FRAMES));
        let meshes = [
            vec![None, Some(NeighbourWorker { to: one.0, from: two.1, wake: wakes[1].clone() })],
            vec![Some(NeighbourWorker { to: two.0, from: one.1, wake: wakes[0].clone() }), None],
        ];
        let (mut workers, mut lines, mut commands) = (vec![], vec![], vec![]);
        for ((number, packets), neighbours) in parts.into_iter().enumerate().zip(meshes) {
            let (dropped, _) = mpsc::channel();
            let wake = wakes[number].clone();
            let core =
                Core::new(packets, dropped, wake.clone(), Ringers::start().unwrap()).unwrap();
            let (sender, obeyed) = mpsc::sync_channel(1);
            commands.push(sender);
            let mut worker = Worker::new(number as u16, core, neighbours, obeyed, wake).unwrap();
            let mut out = vec![];
            for (name, mac) in CARDS {
                let (port, line) = RingBuffer::new(PATH_FRAMES);
                let mut card = Card::new(name.into(), mac, 1500);
                card.netdevs.add_path(SocketPath::new(port, wakes[0].clone()));
                worker.core.externals.push(Some(card));
                out.push(line);
            }
            workers.push(worker);
            lines.push(out);
        }
        let count = random.random_range(VNETS);
        let mut world = Self {
            random,
            draw: Draw::of(seed),
            mutant,
            workers,
            lines,
            owners: vec![],
            inside: vec![],
            sent: vec![],
            number: 0,
            seen: [0; 2],
            spoke: vec![false; count],
            wrong: vec![],
            _commands: commands,
            _controls: vec![],
            _wakes: wakes,
        };
        let mut tables = CARDS.map(|(_, mac)| TunnelTable::new(Some(mac)));
        let mut taken = tables.clone();
        for vnet in 0..count {
            world.add(root, vnet, &mut taken, &mut tables);
        }
        world.sent = vec![0; world.owners.len()];
        let classifier = Arc::new(tables.to_vec());
        for worker in &mut world.workers {
            worker.classifier = classifier.clone();
        }
        world
    }

    fn end(&mut self) -> (usize, Encapsulation) {
        let whole = |owner: &Owner| owner.end.1 == Encapsulation::Interface;
        let tunnels: Vec<_> = self.owners.iter().filter(|owner| !whole(owner)).collect();
        match tunnels.choose(&mut self.random) {
            Some(other) if self.random.random_ratio(2, 3) => {
                neighbour_of(&other.end.clone(), self.draw, &mut self.random)
            }
            _ if !self.owners.iter().any(whole) && self.random.random_ratio(1, 6) => {
                (1, Encapsulation::Interface)
            }
            _ => self.anywhere(),
        }
    }

    fn anywhere(&mut self) -> (usize, Encapsulation) {
        (self.random.random_range(0..CARDS.len()), self.draw.tunnel(&mut self.random))
    }

    /// Returns external ends for a vlink of a network, as many as are available.
    fn outside(
        &mut self,
        (vnet, vlink, kind): (usize, usize, Kind),
        count: usize,
        taken: &mut [TunnelTable],
    ) -> Vec<VlinkEnd> {
        let mut ends = vec![];
        for _ in 0..count {
            let end = self.end();
            let known = self.owners.iter().any(|owner| owner.end == end);
            let nobody = PortRef { worker: 0, vnet: 0, port: 0, generation: 0 };
            // If two networks can't share a tunnel, the second
            // does not get it. A mutant can't tell them apart.
            let is_taken = !known && taken[end.0].insert(&end.1, nobody).is_err();
            if known || (is_taken && self.mutant == Mutant::None) {
                continue;
            }
            let name = format!("x{}", self.owners.len());
            ends.push(outside(&name, CARDS[end.0].0, end.1.clone()));
            self.owners.push(Owner { end, vnet, vlink, kind, counted: Default::default() });
        }
        ends
    }

    /// Adds external ends to a network's vlinks: on a router's wires
    /// to its hosts, beside these on a segment, and two at a transit.
    fn lead_out(&mut self, spec: &mut VnetConfig, vnet: usize, taken: &mut [TunnelTable]) {
        for (at, near) in [(0, 0), (1, 1)] {
            if at == 1 && self.random.random_ratio(1, 2) {
                continue;
            }
            let vlink = &mut spec.vlinks[at];
            if self.random.random_ratio(2, 3) {
                if let Some(end) = self.outside((vnet, at, Kind::Wire), 1, taken).pop() {
                    vlink.ends[near] = end;
                }
            } else {
                let count = self.random.random_range(1..4);
                let ends = self.outside((vnet, at, Kind::Segment), count, taken);
                if !ends.is_empty() {
                    *vlink = vlink_of(&vlink.name, [vlink.ends.clone(), ends].concat());
                }
            }
        }
        if self.random.random_ratio(1, 2) {
            let before = self.owners.len();
            let ends = self.outside((vnet, spec.vlinks.len(), Kind::Transit), 2, taken);
            match <[VlinkEnd; 2]>::try_from(ends) {
                Ok([a, b]) => spec.vlinks.push(vlink("through", a, b)),
                Err(_) => self.owners.truncate(before),
            }
        }
    }

    /// Adds a network: a router and two hosts, with guests of any kind.
    fn add(
        &mut self,
        root: &Path,
        vnet: usize,
        taken: &mut [TunnelTable],
        tables: &mut [TunnelTable],
    ) {
        let kinds = [AttachMode::Runtime, AttachMode::Memif, AttachMode::Tap];
        let guests: Vec<(u32, AttachMode)> = (0..self.random.random_range(1..3))
            .map(|number| (number, *kinds.choose(&mut self.random).unwrap()))
            .collect();
        let mut spec = two_hosts(root, &format!("v{vnet}"), &guests);
        let (worker, slot) = (vnet % WORKERS, (vnet / WORKERS) as u16);
        let first = self.owners.len();
        self.lead_out(&mut spec, vnet, taken);
        for end in outside_ends(&spec) {
            let here = |owner: &&mut Owner| {
                (CARDS[owner.end.0].0, &owner.end.1) == (end.interface, end.by)
            };
            let owner = self.owners[first..].iter_mut().find(here).unwrap();
            owner.counted = (end.name.0.into(), end.name.1.into());
            let (card, seen) = self.mutant.blind(owner.end.clone());
            let (worker, port) = (worker as u16, end.port);
            let reference = PortRef { worker, vnet: slot, port, generation: 7 };
            let inserted = tables[card].insert(&seen, reference);
            assert!(inserted.is_ok() || self.mutant != Mutant::None, "{inserted:?}");
        }
        let cards = |name: &str| CARDS.iter().position(|(card, _)| *card == name).unwrap();
        let hop = Arc::new(TunnelNextHop::known(NEIGHBOUR));
        let live = Live::new(&spec, slot, 7, |number, end| match end {
            VlinkEnd::External { by, interface, .. } => {
                ExternalPath::new(cards(interface), number, by, || hop.clone())
                    .map(VlinkPath::Outside)
            }
            VlinkEnd::Port { .. } => None,
        });
        let slots = &mut self.workers[worker].vnets;
        if slots.len() <= usize::from(slot) {
            slots.resize_with(usize::from(slot) + 1, || None);
        }
        self.workers[worker].replace(slot, Some(live));
        let taps = [("r1", 0), ("h1", 1), ("h2", 2)];
        for (node, at) in taps {
            let path = spec.nodes[at].tap_socket.clone();
            self.connect(vnet, node, &path, 0, NodePeer::Tap, AttachMode::Tap);
        }
        for (at, (number, attach)) in guests.into_iter().enumerate() {
            let path = spec.nodes[0].router.as_ref().unwrap().guests[at].socket.clone();
            let interfaces = if attach == AttachMode::Memif { 0..2 } else { 0..1 };
            for interface in interfaces {
                self.connect(vnet, "r1", &path, interface, NodePeer::Guest(number), attach);
            }
        }
    }

    fn connect(
        &mut self,
        vnet: usize,
        node: &'static str,
        path: &Path,
        interface: u32,
        place: NodePeer,
        attach: AttachMode,
    ) {
        // A guest's interfaces are at one path, one after the other.
        let _ = std::fs::remove_file(path);
        let (peer, link, control) = pair(path, interface, 1 + self.inside.len() as u64);
        let slot = (vnet / WORKERS) as u16;
        let watch = &self.workers[vnet % WORKERS].core.connections.watch;
        watch.add_bell(Some(slot), &link.channel.doorbell().unwrap()).unwrap();
        let attached = self.workers[vnet % WORKERS]
            .change(slot, |vnet, _| vnet.attach(node, place, interface, link).is_ok());
        assert_eq!(attached, Some(true));
        self._controls.push(control);
        self.inside.push(Inside { vnet, node, attach, peer });
    }

    /// Returns a frame that a network may have: of any kind, in
    /// a VLAN, or similar to a frame of other networks' tunnels.
    fn inner(&mut self, by: Option<usize>, vnet: usize) -> Vec<u8> {
        let length = self.random.random_range(60..200);
        let mut frame = frame(length, 0);
        // Uses few stations, so that segments learn some.
        frame[5] = self.random.random_range(0..5);
        frame[11] = self.random.random_range(0..5);
        match self.random.random_range(0..5) {
            0 => frame[12..16].copy_from_slice(&[0x81, 0, 0, 5]),
            1 => self.random.fill(&mut frame[12..]),
            2 => {
                let other = self.owners.choose(&mut self.random).map(|owner| owner.end.clone());
                if let Some(other) = other {
                    frame = wrapped(&other, &frame, self.number);
                }
            }
            3 => frame[..6].fill(0xff),
            _ => {}
        }
        marked(frame, by, vnet)
    }

    /// Sends frames from outside: to an end's owner, or to nobody.
    fn receive(&mut self) {
        let Some(owner) = self.owners.choose(&mut self.random) else { return };
        let mut end = owner.end.clone();
        if self.random.random_ratio(1, 4) {
            end = self.anywhere();
        }
        let exact = self.owners.iter().position(|owner| owner.end == end);
        let is_whole = |owner: &Owner| owner.end == (end.0, Encapsulation::Interface);
        let to = exact.or_else(|| self.owners.iter().position(is_whole));
        let vnet = to.map_or(0xff, |to| self.owners[to].vnet);
        let mut inner = self.inner(to, vnet);
        if end.1 == Encapsulation::Interface {
            // A frame that looks like one of a tunnel on that card would belong to that tunnel.
            inner = marked(frame(80, 0), to, vnet);
        }
        if let Some(to) = to {
            self.sent[to] += 1;
        }
        let (card, seen) = self.mutant.blind(end);
        self.number += 1;
        let bytes = wrapped(&(card, seen), &inner, self.number);
        let worker = &mut self.workers[self.random.random_range(0..WORKERS)];
        let mut packet = worker.core.packets.take().unwrap();
        packet.set_len(bytes.len()).unwrap();
        packet.bytes_mut().copy_from_slice(&bytes);
        worker.classify_frames(card, &mut vec![packet]);
    }

    /// Lets peers check the frames that they get, and send some.
    fn serve(&mut self) {
        for at in 0..self.inside.len() {
            let Inside { vnet, node, attach, ref mut peer } = self.inside[at];
            let frames: Vec<(Option<Tag>, Vec<u8>)> = match attach {
                AttachMode::Memif => {
                    peer.receive_raw().into_iter().map(|frame| (None, frame)).collect()
                }
                _ => peer.receive().into_iter().map(|(tag, frame)| (Some(tag), frame)).collect(),
            };
            for (tag, frame) in frames {
                self.seen[0] += 1;
                if vnet_of(&frame) != vnet {
                    self.wrong.push(format!("v{vnet}/{node} sees a frame of v{}", vnet_of(&frame)));
                }
                let last = attach == AttachMode::Runtime;
                let vport = tag.map_or(0, |tag| 1 - tag.vport.min(1));
                let verdict = match self.random.random_range(0..8) {
                    0 => TagVerdict::Kept,
                    1 => TagVerdict::Punt(pdp_wire::tag::PuntClass::Local),
                    _ => TagVerdict::Out,
                };
                let verdict = if last { verdict } else { TagVerdict::Out };
                let peer = &mut self.inside[at].peer;
                if node == "r1" && (last || self.random.random_ratio(1, 2)) {
                    peer.send(Tag { verdict, vport, last, trace: 0 }, &sent_on(frame));
                }
            }
            if self.random.random_ratio(1, 3) {
                let frame = self.inner(None, vnet);
                let lie = self.random.random_ratio(1, 12);
                let word = match lie {
                    true => self.random.random(),
                    false => {
                        let vport = self.random.random_range(0..3);
                        Tag { verdict: TagVerdict::Out, vport, last: false, trace: 0 }.emit()
                    }
                };
                self.inside[at].peer.send_raw(word, &frame);
                self.spoke[vnet] = true;
            }
        }
    }

    /// Checks the frames that left, by card.
    fn look_at_the_lines(&mut self) {
        for worker in 0..WORKERS {
            for card in 0..CARDS.len() {
                while let Ok(packet) = self.lines[worker][card].pop() {
                    let left = packet.bytes().to_vec();
                    self.workers[worker].core.packets.give(packet);
                    self.seen[1] += 1;
                    let (from, by) = (vnet_of(&left), end_of(&left).map(|by| &self.owners[by]));
                    let may = |owner: &&Owner| {
                        owner.vnet == from
                            && owner.end.0 == card
                            && is_of(&left, &owner.end.1)
                            && owner.lets_out(by)
                    };
                    if self.owners.iter().find(may).is_none() {
                        let wrong = format!("card {card}: v{from} sent {left:x?}, come by {by:?}");
                        self.wrong.push(wrong);
                    }
                }
            }
        }
    }

    /// Checks that the counters match the frames that were sent.
    fn look_at_the_counters(&mut self) {
        for (vnet, spoke) in self.spoke.iter().enumerate() {
            let live = &self.workers[vnet % WORKERS].vnets[vnet / WORKERS];
            let stats = live.as_ref().unwrap().stats();
            let ends = self.owners.iter().zip(&self.sent);
            let mut silent = !spoke;
            for (owner, sent) in ends.filter(|(owner, _)| owner.vnet == vnet) {
                let (node, port) = &owner.counted;
                let counted = stats.nodes[node].ports[port].received;
                if counted != *sent {
                    self.wrong.push(format!("v{vnet}: {sent} sent, {counted} counted: {owner:?}"));
                }
                silent &= *sent == 0;
            }
            let mut all = stats.nodes.values().flat_map(|node| node.ports.values());
            if silent && all.any(|port| port.received + port.made + port.sent + port.punted > 0) {
                self.wrong.push(format!("v{vnet} was silent and has counted: {stats:?}"));
            }
        }
    }

    fn rounds(&mut self) {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_micros(10));
            for worker in &mut self.workers {
                worker.round();
            }
        }
    }

    /// Runs the case. Returns the violations, and how many frames were received inside and left.
    fn run(mut self) -> (Vec<String>, [u64; 2]) {
        for _ in 0..10 {
            for _ in 0..8 {
                self.receive();
            }
            self.rounds();
            self.serve();
            self.rounds();
            self.look_at_the_lines();
        }
        self.look_at_the_counters();
        (self.wrong, self.seen)
    }

    fn collides(&self) -> bool {
        self.owners.iter().enumerate().any(|(at, a)| {
            let others = &self.owners[at + 1..];
            others.iter().any(|b| a.vnet != b.vnet && differences(&a.end, &b.end) == Some(1))
        })
    }
}

/// Returns the frame that the other end sends, with this number if its frames have one.
fn wrapped((card, by): &(usize, Encapsulation), inner: &[u8], number: u32) -> Vec<u8> {
    let Some(template) = outer::HeaderTemplate::new(&by.reversed()) else { return inner.to_vec() };
    let template = template.from_number(number);
    let mut frame = vec![0; template.len()];
    frame.extend(inner);
    template.write(&mut frame, CARDS[*card].1, NEIGHBOUR).unwrap();
    frame
}

/// True if a frame that left is one of this end, as its other
/// end sees it. An end with a whole interface may send anything.
fn is_of(frame: &[u8], by: &Encapsulation) -> bool {
    let mut far_table = TunnelTable::new(None);
    far_table
        .insert(&by.reversed(), PortRef { worker: 0, vnet: 0, port: 0, generation: 0 })
        .unwrap();
    far_table.classify(frame).is_ok()
}

struct Outcome {
    collides: bool,
    wrong: Vec<String>,
    seen: [u64; 2],
}

fn case(seed: u64, mutant: Mutant) -> Outcome {
    let root = tempfile::tempdir().unwrap();
    let world = World::new(root.path(), seed, mutant);
    let collides = world.collides();
    let (wrong, seen) = world.run();
    Outcome { collides, wrong, seen }
}

#[test]
fn vnets_are_isolated_from_each_other() {
    let (mut collided, mut inside, mut left) = (0, 0, 0);
    for seed in 0..CASES {
        let Outcome { collides, wrong, seen } = case(seed, Mutant::None);
        assert!(wrong.is_empty(), "case {seed}: {wrong:#?}");
        collided += u64::from(collides);
        inside += seen[0];
        left += seen[1];
    }
    assert!(collided * 2 >= CASES, "{collided} of {CASES} cases have alike tunnels");
    assert!(inside > 20 * CASES && left > 10 * CASES, "{inside} seen inside, {left} left");
}

#[test]
fn isolation_test_detects_every_classifier_mutant() {
    let parts = PARTS.iter().flat_map(|(kind, parts)| parts.iter().map(|part| (*kind, *part)));
    for mutant in parts.map(|(kind, part)| Mutant::Part(kind, part)).chain([Mutant::Card]) {
        let found = (0..MUTANT_CASES).find(|seed| !case(*seed, mutant).wrong.is_empty());
        assert!(found.is_some(), "{mutant:?} was not found in {MUTANT_CASES} cases");
        println!("{mutant:?}: found by case {}", found.unwrap_or_default());
    }
}
