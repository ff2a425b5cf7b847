//! No frame and no count of one virtual network shows in another: a property, over sets of networks
//! that share interfaces, drawn at random, most of them as alike as may be.
//!
//! All networks have the same node names, MACs and addresses inside. Their links are wires, transits and
//! segments; their tunnels are drawn from few addresses, ports and keys, or are another network's with one thing
//! changed. Guests of every attachment, TAP helpers and machines outside send what they like: tags of ports that
//! are not theirs, VLAN tags, and frames that look like those of other networks' tunnels. Every frame ends
//! with the end outside that it came by, if any, and the number of the network that it was sent in, and wherever
//! one is seen that is looked at: what came by one end of a network leaves only by ends that its link joins to
//! that, and from one tunnel of a segment nothing leaves by another.
//!
//! That the property finds what it is there for is a test of its own: a classifier that ignores one
//! part of what tells tunnels apart is found within [`MUTANT_CASES`] cases.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;

use common::*;
use pdp_afxdp::Packet;
use pdp_mux::classify::{PortRef, Table};
use pdp_mux::control::plan::outside_ends;
use pdp_mux::core::Core;
use pdp_mux::encapsulate::{Outside, Way};
use pdp_mux::exit::path::{PATH_FRAMES, Path as SocketPath};
use pdp_mux::external::External as Card;
use pdp_mux::lane::Lane;
use pdp_mux::packets::Packets;
use pdp_mux::ringers::Ringers;
use pdp_mux::vnet::{Vnet as Live, Who};
use pdp_mux::wake::Wake;
use pdp_mux::worker::{Command, HANDOVER_FRAMES, Neighbour, Worker};
use pdp_proto::mux::*;
use pdp_underlay::NextHop;
use pdp_wire::tag::{Tag, Verdict};
use pdp_wire::tunnel::KINDS;
use pdp_wire::{geneve, gre, outer, udp, vlan, vxlan};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rtrb::{Consumer, RingBuffer};
use serde_json::{Map, Value, json};

/// Cases of the property; the seed of case N is N.
const CASES: u64 = 40;

/// Within so many cases every mutant is found.
const MUTANT_CASES: u64 = 20;

/// Networks of a case.
const VNETS: std::ops::RangeInclusive<usize> = 2..=5;

const WORKERS: usize = 2;
const SHARE: usize = 4096;
const CARDS: [(&str, [u8; 6]); 2] = [("A", [2, 0, 0, 0, 10, 1]), ("B", [2, 0, 0, 0, 11, 1])];
const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 10, 9];

/// What tunnels are drawn from. The machine has the same addresses on both cards.
const LOCALS: [&str; 3] = ["10.0.0.1", "10.0.0.3", "2001:db8::1"];
const REMOTES: [&str; 3] = ["10.0.0.2", "10.0.0.4", "2001:db8::2"];
const VXLAN_PORTS: [u16; 2] = [4789, 4790];
const GENEVE_PORTS: [u16; 2] = [6081, 4790];
const UDP_PORTS: [u16; 2] = [5000, 5001];
const VNIS: [u16; 3] = [5, 6, 5 << 8];

/// What tells networks' frames from those of nobody.
const MARK: u32 = 0x5044_5000;

/// With where it was sent: in a network, by the end outside with a number.
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

/// The end outside that it came by.
fn end_of(frame: &[u8]) -> Option<usize> {
    words_of(frame)[0].checked_sub(1).map(|by| by as usize)
}

/// The same as a node sends it that had it.
fn sent_on(mut frame: Vec<u8>) -> Vec<u8> {
    let at = frame.len() - 8;
    frame[at..at + 4].fill(0);
    frame
}

/// What the classifier under test leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    None,
    /// A part of the key of a kind, as messages call both.
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

/// A tunnel's kind and the parts of its key.
fn parts(by: &Encapsulation) -> (String, Map<String, Value>) {
    let Value::Object(of_kind) = serde_json::to_value(by).unwrap() else {
        return (String::new(), Map::new());
    };
    let (kind, parts) = of_kind.into_iter().next().unwrap();
    (kind, serde_json::from_value(parts).unwrap())
}

impl Mutant {
    /// What a classifier sees that ignores this: the same for all.
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

/// How the tunnels of a case are drawn: most often of one kind, so that many are alike in all things but one.
#[derive(Clone, Copy, Debug)]
struct Draw {
    often: usize,
    /// Of all of GRE.
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
                Encapsulation::Udp(udp::Tunnel { local, remote, local_port, remote_port })
            }
            "gre" => {
                let Self { checksum, sequence, .. } = self;
                let key = number(&VNIS);
                let key = (key != VNIS[1]).then_some(key.into());
                Encapsulation::Gre(gre::Tunnel { local, remote, key, checksum, sequence })
            }
            "geneve" => {
                let (port, vni) = (number(&GENEVE_PORTS), number(&VNIS).into());
                Encapsulation::Geneve(geneve::Tunnel { local, remote, port, vni })
            }
            "vlan" => Encapsulation::Vlan(vlan::Tunnel { id: number(&VNIS) }),
            _ => {
                let (port, vni) = (number(&VXLAN_PORTS), number(&VNIS).into());
                Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port, vni })
            }
        }
    }
}

/// In how many things two ends differ; `None` if they are of different kinds.
fn differences(a: &(usize, Encapsulation), b: &(usize, Encapsulation)) -> Option<usize> {
    let ((kind_a, parts_a), (kind_b, parts_b)) = (parts(&a.1), parts(&b.1));
    let differ = parts_a.iter().filter(|(part, value)| parts_b.get(*part) != Some(value)).count();
    (kind_a == kind_b).then_some(usize::from(a.0 != b.0) + differ)
}

/// One thing of another network's end changed.
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

/// What a vlink with an end outside is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Wire,
    Transit,
    Segment,
}

/// Who takes what arrives by an end of a vlink.
#[derive(Clone, Debug)]
struct Owner {
    end: (usize, Encapsulation),
    vnet: usize,
    /// Its vlink's number.
    vlink: usize,
    kind: Kind,
    /// Node and port that count it.
    counted: (String, String),
}

impl Owner {
    /// Whether a frame may leave here that came by another end of the network, or from a node.
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
    attach: Attach,
    peer: Peer,
}

struct World {
    random: SmallRng,
    draw: Draw,
    mutant: Mutant,
    workers: Vec<Worker>,
    /// What leaves, by worker and card.
    lines: Vec<Vec<Consumer<Packet>>>,
    owners: Vec<Owner>,
    inside: Vec<Inside>,
    /// Frames that were sent from outside by each end of `owners`.
    sent: Vec<u64>,
    /// The number of the last of them.
    number: u32,
    /// Frames that peers inside saw, and that left.
    seen: [u64; 2],
    /// Networks that a guest or a TAP sent in.
    spoke: Vec<bool>,
    /// Why the property does not hold.
    wrong: Vec<String>,
    _commands: Vec<SyncSender<Command>>,
    _controls: Vec<pdp_memif::Control>,
    _wakes: Vec<Arc<Wake>>,
}

impl World {
    fn new(root: &Path, seed: u64, mutant: Mutant) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let (_pool, parts) = Packets::pool(WORKERS, SHARE).unwrap();
        let wakes: Vec<_> = (0..WORKERS).map(|_| Arc::new(Wake::new().unwrap())).collect();
        let (one, two) = (RingBuffer::new(HANDOVER_FRAMES), RingBuffer::new(HANDOVER_FRAMES));
        let meshes = [
            vec![None, Some(Neighbour { to: one.0, from: two.1, wake: wakes[1].clone() })],
            vec![Some(Neighbour { to: two.0, from: one.1, wake: wakes[0].clone() }), None],
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
                card.exits.add_path(SocketPath::new(port, wakes[0].clone()));
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
        let mut tables = CARDS.map(|(_, mac)| Table::new(Some(mac)));
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

    /// Ends outside for a vlink of a network, as many of them as are to be had.
    fn outside(
        &mut self,
        (vnet, vlink, kind): (usize, usize, Kind),
        count: usize,
        taken: &mut [Table],
    ) -> Vec<End> {
        let mut ends = vec![];
        for _ in 0..count {
            let end = self.end();
            let known = self.owners.iter().any(|owner| owner.end == end);
            let nobody = PortRef { worker: 0, vnet: 0, port: 0, generation: 0 };
            // What two can't share, the second does not get. A mutant can't tell them apart.
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

    /// Puts ends outside at a network's vlinks: at a router's wires to its hosts, or beside these on a segment; and
    /// two at a transit.
    fn lead_out(&mut self, spec: &mut Vnet, vnet: usize, taken: &mut [Table]) {
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
            match <[End; 2]>::try_from(ends) {
                Ok([a, b]) => spec.vlinks.push(vlink("through", a, b)),
                Err(_) => self.owners.truncate(before),
            }
        }
    }

    /// A router and two hosts, with guests of any kind.
    fn add(&mut self, root: &Path, vnet: usize, taken: &mut [Table], tables: &mut [Table]) {
        let kinds = [Attach::Runtime, Attach::Memif, Attach::Tap];
        let guests: Vec<(u32, Attach)> = (0..self.random.random_range(1..3))
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
        let hop = Arc::new(NextHop::known(NEIGHBOUR));
        let live = Live::new(&spec, slot, 7, |number, end| match end {
            End::External { by, interface, .. } => {
                Outside::new(cards(interface), number, by, || hop.clone()).map(Way::Outside)
            }
            End::Port { .. } => None,
        });
        let slots = &mut self.workers[worker].vnets;
        if slots.len() <= usize::from(slot) {
            slots.resize_with(usize::from(slot) + 1, || None);
        }
        self.workers[worker].replace(slot, Some(live));
        let taps = [("r1", 0), ("h1", 1), ("h2", 2)];
        for (node, at) in taps {
            let path = spec.nodes[at].tap_socket.clone();
            self.connect(vnet, node, &path, 0, Who::Tap, Attach::Tap);
        }
        for (at, (number, attach)) in guests.into_iter().enumerate() {
            let path = spec.nodes[0].router.as_ref().unwrap().guests[at].socket.clone();
            let interfaces = if attach == Attach::Memif { 0..2 } else { 0..1 };
            for interface in interfaces {
                self.connect(vnet, "r1", &path, interface, Who::Guest(number), attach);
            }
        }
    }

    fn connect(
        &mut self,
        vnet: usize,
        node: &'static str,
        path: &Path,
        interface: u32,
        who: Who,
        attach: Attach,
    ) {
        // The interfaces of a guest are at one path, one after the other.
        let _ = std::fs::remove_file(path);
        let (peer, link, control) = pair(path, interface, 1 + self.inside.len() as u64);
        let slot = (vnet / WORKERS) as u16;
        let watch = &self.workers[vnet % WORKERS].core.connections.watch;
        watch.add_bell(Some(slot), &link.lane.doorbell().unwrap()).unwrap();
        let attached = self.workers[vnet % WORKERS]
            .change(slot, |vnet, _| vnet.attach(node, who, interface, link).is_ok());
        assert_eq!(attached, Some(true));
        self._controls.push(control);
        self.inside.push(Inside { vnet, node, attach, peer });
    }

    /// A frame as a network may have it: of any kind, a VLAN's, or one like a tunnel's of others.
    fn inner(&mut self, by: Option<usize>, vnet: usize) -> Vec<u8> {
        let length = self.random.random_range(60..200);
        let mut frame = frame(length, 0);
        // Between few stations, so that segments learn some.
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

    /// Frames from outside: to who has the end, or to nobody.
    fn arrive(&mut self) {
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
            // What is a tunnel's on that card is the tunnel's.
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
        worker.sort(card, &mut vec![packet]);
    }

    /// Peers look at what they have and send something.
    fn serve(&mut self) {
        for at in 0..self.inside.len() {
            let Inside { vnet, node, attach, ref mut peer } = self.inside[at];
            let frames: Vec<(Option<Tag>, Vec<u8>)> = match attach {
                Attach::Memif => {
                    peer.receive_raw().into_iter().map(|frame| (None, frame)).collect()
                }
                _ => peer.receive().into_iter().map(|(tag, frame)| (Some(tag), frame)).collect(),
            };
            for (tag, frame) in frames {
                self.seen[0] += 1;
                if vnet_of(&frame) != vnet {
                    self.wrong.push(format!("v{vnet}/{node} sees a frame of v{}", vnet_of(&frame)));
                }
                let last = attach == Attach::Runtime;
                let vport = tag.map_or(0, |tag| 1 - tag.vport.min(1));
                let verdict = match self.random.random_range(0..8) {
                    0 => Verdict::Kept,
                    1 => Verdict::Punt(pdp_wire::tag::PuntClass::Local),
                    _ => Verdict::Out,
                };
                let verdict = if last { verdict } else { Verdict::Out };
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
                        Tag { verdict: Verdict::Out, vport, last: false, trace: 0 }.emit()
                    }
                };
                self.inside[at].peer.send_raw(word, &frame);
                self.spoke[vnet] = true;
            }
        }
    }

    /// What left, by each card.
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

    /// What was counted is what was sent.
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

    /// What was wrong, and how many frames were seen inside and left.
    fn run(mut self) -> (Vec<String>, [u64; 2]) {
        for _ in 0..10 {
            for _ in 0..8 {
                self.arrive();
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

/// The frame that the other end sends, with this number where its frames have one.
fn wrapped((card, by): &(usize, Encapsulation), inner: &[u8], number: u32) -> Vec<u8> {
    let Some(template) = outer::Template::new(&by.reversed()) else { return inner.to_vec() };
    let template = template.from_number(number);
    let mut frame = vec![0; template.len()];
    frame.extend(inner);
    template.write(&mut frame, CARDS[*card].1, NEIGHBOUR).unwrap();
    frame
}

/// Whether a frame that left is one of this end, as its other end sees it. Who has a whole interface may send
/// anything.
fn is_of(frame: &[u8], by: &Encapsulation) -> bool {
    let mut there = Table::new(None);
    there.insert(&by.reversed(), PortRef { worker: 0, vnet: 0, port: 0, generation: 0 }).unwrap();
    there.classify(frame).is_ok()
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
fn nothing_of_one_vnet_shows_in_another() {
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
fn a_classifier_that_ignores_anything_is_found() {
    let parts = PARTS.iter().flat_map(|(kind, parts)| parts.iter().map(|part| (*kind, *part)));
    for mutant in parts.map(|(kind, part)| Mutant::Part(kind, part)).chain([Mutant::Card]) {
        let found = (0..MUTANT_CASES).find(|seed| !case(*seed, mutant).wrong.is_empty());
        assert!(found.is_some(), "{mutant:?} was not found in {MUTANT_CASES} cases");
        println!("{mutant:?}: found by case {}", found.unwrap_or_default());
    }
}
