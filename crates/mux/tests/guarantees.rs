//! Links' parts of an interface's capacity. Workers are driven by
//! hand and the test sets the time, so that every figure is exact.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::time::{Duration, Instant};

use common::*;
use pdp_model::{NodeStats, QueueStats, Stats};
use pdp_mux::control::MuxServer;
use pdp_mux::control::plan::{changed, outside_ends};
use pdp_mux::core::Core;
use pdp_mux::counters::Reason;
use pdp_mux::encapsulate::{ExternalPath, VlinkPath};
use pdp_mux::external::WorkerExternal as Card;
use pdp_mux::netdev::path::{PATH_FRAMES, RemoteNetdev};
use pdp_mux::netdev::{NetdevContext, NetdevDriver};
use pdp_mux::packets::{PacketBatch, Packets};
use pdp_mux::ringers::Ringers;
use pdp_mux::traffic_class::{Capacity, TrafficClass, WIRE_BYTES};
use pdp_mux::vnet::MuxVnet as Live;
use pdp_mux::wake::Wake;
use pdp_mux::wfq::{BYTES_MAX, BandwidthShare};
use pdp_mux::worker::{Worker, WorkerCommand};
use pdp_proto::mux::*;
use pdp_underlay::TunnelNextHop;
use pdp_wire::vxlan;
use rtrb::RingBuffer;

const SHARE: usize = 8192;
const MAC: [u8; 6] = [2, 0, 0, 0, 10, 1];
const CAPACITY_BPS: u64 = 100_000_000;

/// Bytes of the VXLAN over IPv4 headers.
const HEADER_BYTES: usize = 50;

/// Time between two rounds of a worker, nanoseconds.
const STEP_NS: u64 = 20_000;

/// A frame that left: its time, its link, its number in that link, and its bytes on the interface.
#[derive(Clone, Copy, Debug)]
struct Left {
    at_ns: u64,
    link: usize,
    number: u64,
    bytes: u64,
    dscp: u8,
}

/// Reports the frames that leave.
#[derive(Debug)]
struct Wire(Sender<Left>);

impl NetdevDriver for Wire {
    fn room(&mut self) -> usize {
        usize::MAX
    }

    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        for packet in frames.drain(..) {
            let mark = mark(&packet.bytes()[HEADER_BYTES..]);
            let (link, number) = ((mark >> 32) as usize & 0xffff, mark & 0xffff_ffff);
            let bytes = (packet.len() + WIRE_BYTES) as u64;
            let dscp = (mark >> 50) as u8 & 63;
            self.0.send(Left { at_ns: tools.now_ns, link, number, bytes, dscp }).unwrap();
            tools.packets.give(packet);
        }
        Reason::ExternalRingFull
    }
}

/// Returns an IPv4 packet with this DSCP and a number.
/// It is valid only as far as the DSCP requires.
fn frame_of(dscp: u8, bytes: usize, mark: u64) -> Vec<u8> {
    let mut frame = frame(bytes, mark | 0x45 << 56 | u64::from(dscp) << 50);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame
}

/// Load of a link, and its share.
#[derive(Clone, Copy)]
struct Sends {
    guarantee_bps: u64,
    weight: u32,
    /// Bytes of each of its frames.
    bytes: usize,
    /// Rate on the interface, bits a second.
    bps: u64,
}

impl Sends {
    fn flood(weight: u32, bytes: usize) -> Self {
        Self { guarantee_bps: 0, weight, bytes, bps: CAPACITY_BPS }
    }

    fn wire_bytes(&self) -> u64 {
        (self.bytes + HEADER_BYTES + WIRE_BYTES) as u64
    }
}

struct Lab {
    workers: Vec<Worker>,
    specs: Vec<VnetConfig>,
    links: Vec<Sends>,
    /// For the first link: its rate, its queues, and the DSCPs that it sends in rotation.
    rate_bps: Option<u64>,
    queues: Vec<QueueConfig>,
    dscps: Vec<u8>,
    capacity: Arc<Capacity>,
    classes: Vec<Arc<TrafficClass>>,
    /// Frames that each link has sent, and bytes on the interface that it may still send.
    sent: Vec<(u64, f64)>,
    now_ns: u64,
    wire: Receiver<Left>,
    /// All frames that have left.
    all: Vec<Left>,
    _kept: (Arc<Wake>, Vec<SyncSender<WorkerCommand>>),
}

impl Lab {
    /// Creates link N, a transit, at worker N modulo `count`. The interface is at the first worker.
    fn new(count: usize, links: &[Sends]) -> Self {
        let (_pool, parts) = Packets::pool(count, SHARE).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let (wire_to, wire) = mpsc::channel();
        let mut commands = vec![];
        let mut workers: Vec<_> = parts
            .into_iter()
            .zip(0..)
            .map(|(packets, number)| {
                let (dropped, _) = mpsc::channel();
                let ringers = Ringers::start().unwrap();
                let mut core = Core::new(packets, dropped, wake.clone(), ringers).unwrap();
                core.externals.push(Some(Card::new("A".into(), MAC, 1600)));
                let (command, obeyed) = mpsc::sync_channel(1);
                commands.push(command);
                let neighbours = (0..count).map(|_| None).collect();
                Worker::new(number, core, neighbours, obeyed, wake.clone()).unwrap()
            })
            .collect();
        let mut inboxes = vec![];
        for worker in &mut workers[1..] {
            let (to, from) = RingBuffer::new(PATH_FRAMES);
            inboxes.push(from);
            let netdevs = &mut worker.core.externals[0].as_mut().unwrap().netdevs;
            netdevs.add_path(RemoteNetdev::new(to, wake.clone()));
        }
        let netdevs = &mut workers[0].core.externals[0].as_mut().unwrap().netdevs;
        netdevs.add(Box::new(Wire(wire_to)), inboxes);
        let mut lab = Self {
            workers,
            specs: vec![],
            links: links.to_vec(),
            rate_bps: None,
            queues: vec![],
            dscps: vec![0],
            capacity: Arc::default(),
            classes: vec![],
            sent: vec![(0, 0.0); links.len()],
            now_ns: 1,
            wire,
            all: vec![],
            _kept: (wake, commands),
        };
        let of_vnet: Vec<_> = (0..count).map(|_| Arc::new(AtomicUsize::new(0))).collect();
        let class = |at: usize| Arc::new(TrafficClass::new(&lab.capacity, &of_vnet[at % count]));
        lab.classes = (0..links.len()).map(class).collect();
        lab.set_capacity(Some(CAPACITY_BPS));
        lab.install(true);
        lab
    }

    fn set_capacity(&mut self, bps: Option<u64>) {
        self.capacity.set(bps);
        let netdevs = &mut self.workers[0].core.externals[0].as_mut().unwrap().netdevs;
        netdevs.scheduler.get_or_insert_default().set_capacity(bps);
    }

    /// Installs the vnets that the links describe.
    /// `classed` is true if the interface has a capacity.
    fn install(&mut self, classed: bool) {
        let netdevs = &mut self.workers[0].core.externals[0].as_mut().unwrap().netdevs;
        let scheduler = netdevs.scheduler.as_mut().unwrap();
        for (class, link) in self.classes.iter().zip(&self.links) {
            let part = BandwidthShare { guarantee_bps: link.guarantee_bps, weight: link.weight };
            scheduler.set(class.clone(), part, self.now_ns);
        }
        let before = std::mem::take(&mut self.specs);
        for at in 0..self.workers.len() {
            let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
            let vxlan =
                |vni| Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni });
            let here = (at..self.links.len()).step_by(self.workers.len());
            let vlinks = here.map(|link| {
                let number = link as u32;
                let near = outside(&format!("in{link:02}"), "B", vxlan(1000 + number));
                let mut vlink = vlink(
                    &format!("l{link}"),
                    near,
                    outside(&format!("out{link:02}"), "A", vxlan(number)),
                );
                vlink.leaving[1].weight = self.links[link].weight;
                vlink.leaving[1].guarantee_bps = self.links[link].guarantee_bps;
                if link == 0 {
                    vlink.leaving[1].rate_bps = self.rate_bps;
                    vlink.queues = vec![vec![], self.queues.clone()];
                }
                vlink
            });
            let vlinks = vlinks.collect();
            let spec = VnetConfig { name: format!("v{at}"), police: None, nodes: vec![], vlinks };
            let mut live = Live::new(&spec, 0, 0, |number, end| {
                let VlinkEnd::External { name, by, .. } = end else { return None };
                let hop = || Arc::new(TunnelNextHop::known(MAC));
                let mut path = ExternalPath::new(0, number, by, hop)?;
                let link = name.strip_prefix("out").and_then(|link| link.parse::<usize>().ok());
                path.class = link.filter(|_| classed).map(|link| self.classes[link].clone());
                Some(VlinkPath::Outside(path))
            });
            // All ports change, as when the interface changes.
            live.changed = before.get(at).and_then(|was| changed(was, &spec, Some("A")));
            self.workers[at].replace(0, Some(live));
            self.specs.push(spec);
        }
    }

    /// Lets time pass while the links send. Returns the frames that left.
    fn run(&mut self, span_ns: u64) -> Vec<Left> {
        let end_ns = self.now_ns + span_ns;
        while self.now_ns < end_ns {
            self.now_ns += STEP_NS;
            for at in 0..self.links.len() {
                let Sends { bytes, bps, .. } = self.links[at];
                let each = self.links[at].wire_bytes() as f64;
                self.sent[at].1 += bps as f64 / 8e9 * STEP_NS as f64;
                while self.sent[at].1 >= each {
                    self.sent[at].1 -= each;
                    self.send(at, bytes);
                }
            }
            self.check();
        }
        let left: Vec<_> = self.wire.try_iter().collect();
        self.all.extend(&left);
        left
    }

    /// Sends one more frame by a link.
    fn send(&mut self, link: usize, bytes: usize) {
        let at = link % self.workers.len();
        let number = self.sent[link].0;
        self.sent[link].0 += 1;
        let name = format!("in{link:02}");
        let port = {
            let mut ends = outside_ends(&self.specs[at]);
            ends.find(|end| end.external == name).unwrap().port
        };
        let core = &mut self.workers[at].core;
        core.packets.collect();
        let dscp = self.dscps[number as usize % self.dscps.len()];
        let mark = (link as u64) << 32 | number;
        let frame = if link == 0 { frame_of(dscp, bytes, mark) } else { frame(bytes, mark) };
        let packet = core.packets.copy_of(&frame, 0).unwrap();
        self.visit(at, vec![packet.at(port.into())]);
    }

    fn visit(&mut self, at: usize, mut frames: PacketBatch) {
        self.workers[at].core.now_ns = self.now_ns;
        self.workers[at].change(0, |vnet, core| vnet.visit(core, &mut frames));
    }

    /// Does the part of a round that handles queued frames.
    fn check(&mut self) {
        for at in (0..self.workers.len()).rev() {
            self.visit(at, vec![]);
            let core = &mut self.workers[at].core;
            core.packets.collect();
            let (netdevs, mut tools) = core.netdevs(0).unwrap();
            netdevs.flush(&mut tools);
        }
    }

    /// Returns the drops at a link's two ends, for all reasons together.
    fn dropped(&self, link: usize) -> u64 {
        let vnet = self.workers[link % self.workers.len()].vnets[0].as_ref().unwrap();
        let ends = &vnet.stats().nodes[OUTSIDE].ports;
        let of = |name: String| ends[&name].dropped.values().sum::<u64>();
        of(format!("in{link:02}")) + of(format!("out{link:02}"))
    }

    fn assert_adds_up(&self) {
        let mut stats = Stats::default();
        for (at, worker) in self.workers.iter().enumerate() {
            stats.vnets.insert(format!("v{at}"), worker.vnets[0].as_ref().unwrap().stats());
        }
        assert_adds_up(&stats);
    }

    /// Stops sending. Queued frames leave in order. Checks that
    /// everything is accounted for and that no packet is missing.
    fn rest(&mut self) {
        self.links.iter_mut().for_each(|link| link.bps = 0);
        self.run(1_000_000_000);
        self.assert_adds_up();
        assert!(self.workers.iter().all(|worker| worker.core.packets.free() == SHARE));
        let sent: u64 = self.sent.iter().map(|sent| sent.0).sum();
        assert_eq!(self.all.len() as u64 + self.all_dropped(), sent);
        let mut last = BTreeMap::new();
        for it in &self.all {
            let before = last.insert((it.link, it.dscp), it.number);
            assert!(before < Some(it.number), "{it:?} after {before:?}");
        }
    }

    fn all_dropped(&self) -> u64 {
        (0..self.links.len()).map(|link| self.dropped(link)).sum()
    }
}

fn bytes(left: &[Left], link: usize) -> f64 {
    left.iter().filter(|left| left.link == link).map(|left| left.bytes as f64).sum()
}

fn assert_shares(left: &[Left], expected: &[f64], within: f64) {
    let sum: f64 = left.iter().map(|left| left.bytes as f64).sum();
    for (link, expected) in expected.iter().enumerate() {
        let share = bytes(left, link) / sum;
        assert!((share - expected).abs() < within, "link {link} has {share}, not {expected}");
    }
}

#[test]
fn links_share_the_capacity_by_weight_and_guarantee() {
    let percents = [30, 25, 20, 15, 10];
    let sizes = [1500, 60, 300, 1000, 700];
    let mut links: Vec<_> =
        percents.iter().zip(sizes).map(|(weight, bytes)| Sends::flood(*weight, bytes)).collect();
    let expected = percents.map(|percent| f64::from(percent) / 100.0);
    for workers in [1, 2] {
        let mut lab = Lab::new(workers, &links);
        lab.run(50_000_000);
        let left = lab.run(1_000_000_000);
        assert_shares(&left, &expected, 0.005 / 2.0);
        let bits: u64 = left.iter().map(|left| left.bytes * 8).sum();
        assert!(bits.abs_diff(CAPACITY_BPS) < CAPACITY_BPS / 500, "{bits}");
        lab.assert_adds_up();
        lab.rest();
    }
    // The same with guarantees that leave nothing to divide.
    for (link, percent) in links.iter_mut().zip(percents) {
        (link.guarantee_bps, link.weight) = (u64::from(percent) * CAPACITY_BPS / 100, 1);
    }
    let mut lab = Lab::new(2, &links);
    lab.run(50_000_000);
    assert_shares(&lab.run(1_000_000_000), &expected, 0.005 / 2.0);
    // The others get what one link does not use, by weight.
    lab.links[0].bps = 0;
    lab.run(200_000_000);
    let quarter = 0.3 / 4.0;
    let expected = [0.0, 0.25 + quarter, 0.2 + quarter, 0.15 + quarter, 0.1 + quarter];
    assert_shares(&lab.run(500_000_000), &expected, 0.0025);
}

#[test]
fn sixty_four_links_share_beside_one_guarantee() {
    let mut links = vec![Sends { bps: CAPACITY_BPS / 16, ..Sends::flood(1, 500) }; 64];
    links[5] = Sends { guarantee_bps: CAPACITY_BPS / 2, ..Sends::flood(1, 1200) };
    let mut lab = Lab::new(2, &links);
    lab.run(100_000_000);
    let each = 0.5 / 64.0;
    let mut expected = [each; 64];
    expected[5] = 0.5 + each;
    assert_shares(&lab.run(1_000_000_000), &expected, 0.0001);
}

/// docs/links.md derives the bound.
#[test]
fn guaranteed_link_meets_its_delay_bound_under_overload() {
    let guarantee_bps = CAPACITY_BPS / 10;
    let mine = Sends { guarantee_bps, weight: 1, bytes: 400, bps: guarantee_bps / 10 * 9 };
    let other = |at: usize| Sends::flood(1000, [60, 1500][at % 2]);
    let links: Vec<_> = (0..10).map(|at| if at == 0 { mine } else { other(at) }).collect();
    for workers in [1, 2] {
        let mut lab = Lab::new(workers, &links);
        let mut arrivals = vec![];
        let mut delays = vec![];
        for _ in 0..25_000 {
            let left = lab.run(STEP_NS);
            arrivals.resize(lab.sent[0].0 as usize, lab.now_ns);
            let mine = left.iter().filter(|left| left.link == 0);
            delays.extend(mine.map(|left| left.at_ns - arrivals[left.number as usize]));
        }
        assert_eq!(lab.dropped(0), 0);
        assert!((1..10).all(|link| lab.dropped(link) > 100));
        assert!(
            arrivals.len() > 1000 && arrivals.len() - delays.len() < 4,
            "{} {}",
            arrivals.len(),
            delays.len()
        );
        delays.sort();
        let bits = BYTES_MAX * 8_000_000_000;
        let bound_ns = bits / guarantee_bps + bits / CAPACITY_BPS + STEP_NS;
        assert!(*delays.last().unwrap() <= bound_ns, "{delays:?}, {bound_ns} at the most");
    }
}

#[test]
fn shares_and_capacity_change_without_losing_queued_frames() {
    let links = [Sends::flood(1, 1000), Sends::flood(1, 1000), Sends::flood(1, 1000)];
    let mut lab = Lab::new(2, &links);
    lab.run(100_000_000);
    let step = |lab: &mut Lab, expected: [f64; 3], bps: u64| {
        // All queues are full.
        let before = lab.all_dropped();
        lab.install(true);
        assert_eq!(lab.all_dropped(), before);
        lab.run(20_000_000);
        let left = lab.run(300_000_000);
        assert_shares(&left, &expected, 0.01);
        let bits: u64 = left.iter().map(|left| left.bytes * 8).sum();
        assert!(bits.abs_diff(bps * 3 / 10) < bps / 100, "{bits}");
    };
    lab.links[0].weight = 2;
    step(&mut lab, [0.5, 0.25, 0.25], CAPACITY_BPS);
    lab.links[1].guarantee_bps = CAPACITY_BPS / 5 * 3;
    step(&mut lab, [0.2, 0.7, 0.1], CAPACITY_BPS);
    lab.set_capacity(Some(CAPACITY_BPS * 2));
    step(&mut lab, [0.35, 0.475, 0.175], CAPACITY_BPS * 2);
    lab.set_capacity(Some(CAPACITY_BPS));
    lab.links[1].guarantee_bps = 0;
    lab.links[0].weight = 1;
    step(&mut lab, [1.0 / 3.0; 3], CAPACITY_BPS);
    // Without a capacity all frames leave at once. With one again they wait.
    lab.links.iter_mut().for_each(|link| link.bps = 0);
    let before = lab.all_dropped();
    lab.set_capacity(None);
    lab.install(false);
    let at_once = lab.run(3_000_000);
    assert!(at_once.len() > 600, "{}", at_once.len());
    lab.links.iter_mut().for_each(|link| link.bps = CAPACITY_BPS);
    let left = lab.run(50_000_000);
    assert!(left.len() as u64 > CAPACITY_BPS / 20 / 8 / links[0].wire_bytes() * 29 / 10);
    assert_eq!(lab.all_dropped(), before);
    lab.set_capacity(Some(CAPACITY_BPS));
    step(&mut lab, [1.0 / 3.0; 3], CAPACITY_BPS);
    lab.rest();
    // Short frames may fit where a long one does not. They stay behind it.
    (0..100).for_each(|number| lab.send(0, [1500, 60][number % 2]));
    lab.rest();
}

fn queue(name: &str, weight: u32, frames: u32, dscp: &[u8]) -> QueueConfig {
    QueueConfig { name: name.into(), weight, frames, bytes: 0, buffers: 0, dscp: dscp.into() }
}

impl Lab {
    /// Returns the frames that wait at the first link.
    fn waiting(&self) -> u64 {
        let stats = self.workers[0].vnets[0].as_ref().unwrap().stats();
        stats.nodes[OUTSIDE].ports["out00"].waiting
    }

    /// Returns the counters of the first link's queues.
    fn queue_stats(&self) -> Vec<QueueStats> {
        let stats = self.workers[0].vnets[0].as_ref().unwrap().stats();
        stats.nodes[OUTSIDE].ports["out00"].queues.clone()
    }
}

/// Checks the parts of the first link's DSCPs.
fn assert_parts(left: &[Left], expected: &[(u8, f64)], counted: impl Fn(&Left) -> u64) {
    let of = |dscp| left.iter().filter(move |it| it.link == 0 && dscp == Some(it.dscp));
    let all = left.iter().filter(|it| it.link == 0).map(&counted).sum::<u64>() as f64;
    for (dscp, expected) in expected {
        let part = of(Some(*dscp)).map(&counted).sum::<u64>() as f64 / all;
        assert!((part - expected).abs() < 0.005, "DSCP {dscp} has {part}, not {expected}");
    }
}

/// Queues divide their link's part of a capacity, or its rate, by
/// weight in each second. The others get what one queue does not use.
/// A full queue drops its own frames. Queues change without losses.
#[test]
fn queues_share_their_link_and_change_without_losses() {
    let on_wire = |it: &Left| it.bytes;
    let inside = |it: &Left| it.bytes - (HEADER_BYTES + WIRE_BYTES) as u64;
    for rate_bps in [None, Some(CAPACITY_BPS / 5)] {
        let links = [Sends { bps: 0, ..Sends::flood(3, 700) }, Sends::flood(1, 1000)];
        let mut lab = Lab::new(2, &links);
        lab.rate_bps = rate_bps;
        lab.queues = vec![
            queue("rest", 10, 0, &[]),
            queue("voice", 60, 40, &[46]),
            queue("video", 30, 80, &[34, 36]),
        ];
        lab.install(true);
        // Frames of all sizes. Each DSCP alone sends as much as the capacity.
        let sizes = [1500, 60, 300, 1000, 701];
        let run = |lab: &mut Lab, span_ms: u64, dscps: &[u8]| {
            let mut left = vec![];
            lab.dscps = dscps.to_vec();
            for _ in 0..span_ms * 10 {
                for _ in 0..dscps.len() * 2 {
                    let bytes = sizes[lab.sent[0].0 as usize / dscps.len() % sizes.len()];
                    lab.send(0, bytes);
                }
                left.extend(lab.run(100_000));
            }
            left
        };
        // With a rate the link's own bytes count, otherwise those on the interface.
        let counted = |it: &Left| if rate_bps.is_some() { inside(it) } else { on_wire(it) };
        run(&mut lab, 50, &[0, 46, 34]);
        let before = lab.queue_stats();
        for _ in 0..2 {
            let left = run(&mut lab, 1000, &[0, 46, 34]);
            assert_parts(&left, &[(0, 0.1), (46, 0.6), (34, 0.3)], inside);
            let sum = left.iter().filter(|it| it.link == 0).map(counted).sum::<u64>() as f64 * 8.0;
            let expected = rate_bps.unwrap_or(CAPACITY_BPS / 4 * 3) as f64;
            assert!(
                (sum - expected).abs() < expected * 0.005,
                "{sum} bits in a second, not {expected}"
            );
        }
        // Each queue has as many frames as it may.
        let now = lab.queue_stats();
        for ((now, before), most) in now.iter().zip(&before).zip([256, 40, 80]) {
            assert!((most / 2..=most).contains(&now.waiting), "{now:?}");
            assert!(now.dropped > before.dropped && now.sent > before.sent, "{now:?}");
        }
        let dropped: u64 = now.iter().map(|queue| queue.dropped).sum();
        assert_eq!(lab.dropped(0), dropped);
        // The others get what voice does not use.
        run(&mut lab, 100, &[0, 36]);
        assert_parts(&run(&mut lab, 500, &[0, 36]), &[(0, 0.25), (36, 0.75)], inside);
        // A little voice traffic loses nothing beside floods.
        let before = lab.queue_stats()[1].clone();
        for _ in 0..100 {
            lab.dscps = vec![46];
            lab.send(0, 300);
            run(&mut lab, 1, &[0, 36]);
        }
        let now = &lab.queue_stats()[1];
        assert!((now.dropped, now.waiting) == (before.dropped, 0), "{now:?}");
        assert_eq!(now.sent, before.sent + 100);
        // Other queues, in another order and with other lengths.
        // The first queue gets the frames of the removed one.
        run(&mut lab, 20, &[0, 46, 34]);
        let (dropped, was) = (lab.all_dropped(), lab.queue_stats());
        lab.queues = vec![queue("voice", 1, 5, &[46, 34]), queue("rest", 3, 0, &[0])];
        lab.install(true);
        let is = lab.queue_stats();
        assert_eq!(lab.all_dropped(), dropped);
        assert_eq!(is[0].waiting, was[1].waiting + was[2].waiting);
        assert_eq!((is[1].waiting, is[1].sent), (was[0].waiting, was[0].sent));
        run(&mut lab, 300, &[0, 46]);
        assert_parts(&run(&mut lab, 500, &[0, 46]), &[(0, 0.75), (46, 0.25)], inside);
        assert!(lab.queue_stats()[0].waiting <= 5);
        // One queue for all frames, which are more than
        // it has space for; then several queues again.
        lab.queues.push(queue("more", 1, 400, &[7]));
        lab.install(true);
        lab.dscps = vec![7];
        (0..400).for_each(|_| lab.send(0, 300));
        for queues in [vec![], lab.queues.clone()] {
            let dropped = lab.dropped(0);
            assert!(lab.waiting() > 256);
            lab.queues = queues;
            lab.install(true);
            lab.run(2_000_000);
            assert_eq!(lab.dropped(0), dropped);
        }
        lab.rest();
        assert!(
            lab.queue_stats().iter().all(|queue| (queue.waiting, queue.waiting_bytes) == (0, 0))
        );
    }
}

/// Their names are reported if one vnet is requested. All vnets together may have very many.
#[test]
fn stats_name_queues_of_one_vnet() {
    let mux = start(1);
    generator(&mux, "S", 0, NUMBER_AT, None, 0);
    let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
    let by = |vni| Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni });
    let port = |at: &str| outside(at, "S", by(at.len() as u32));
    let mut vlink = vlink("through", port("in"), port("out"));
    let names: Vec<_> = (0..100).map(|at| format!("q{at}")).collect();
    let queues = names.iter().map(|name| queue(name, 1, 7, &[]));
    vlink.queues = vec![vec![], queues.collect()];
    put(&mux, &VnetConfig { name: "v".into(), police: None, nodes: vec![], vlinks: vec![vlink] });
    let names_in = |vnet: Option<&str>| {
        let vnet = vnet.map(str::to_owned);
        let MuxReply::Stats(stats) = mux.handle(MuxRequest::Stats { vnet }, vec![]) else {
            panic!()
        };
        let ports = &stats.vnets["v"].nodes[OUTSIDE].ports;
        ["in", "out"]
            .map(|end| ports[end].queues.iter().map(|queue| queue.name.clone()).collect::<Vec<_>>())
    };
    assert_eq!(names_in(Some("v")).concat(), names);
    assert!(names_in(None).iter().all(Vec::is_empty));
}

/// Frames at the scheduler count like frames that wait
/// for a rate. No vnet has more packets than are free.
#[test]
fn flood_on_many_links_uses_half_the_packets() {
    let mut lab = Lab::new(1, &[Sends { bps: 0, ..Sends::flood(1, 60) }; 64]);
    lab.set_capacity(Some(100 * CAPACITY_BPS));
    for _ in 0..300 {
        (0..64).for_each(|link| lab.send(link, 60));
    }
    let free = lab.workers[0].core.packets.free();
    assert!((SHARE / 2 - 1..SHARE / 2 + 2).contains(&free), "{free}");
    assert_eq!(lab.all_dropped(), 64 * 300 - (SHARE - free) as u64);
    lab.rest();
}

/// Returns a generator's frame, with a number behind its Ethernet header.
const NUMBER_AT: u16 = 14;

fn generator(
    mux: &MuxServer,
    name: &str,
    pps: u64,
    number_at: u16,
    capacity_bps: Option<u64>,
    bytes: usize,
) {
    let fd = rustix::fs::memfd_create("frames", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    let number_at = Some(number_at);
    if bytes > 0 {
        file.write_all(&(bytes as u16).to_le_bytes()).unwrap();
        file.write_all(&frame(bytes, 0)).unwrap();
    }
    let outlet = OutletConfig::Generator(GeneratorConfig { pps, frames: 0, number_at });
    let external = ExternalConfig { capacity_bps, ..ExternalConfig::new(name, 1600, outlet) };
    assert_eq!(mux.handle(MuxRequest::PutExternal(external), vec![file.into()]), MuxReply::Done);
}

/// A mux of two workers has sources and a sink. The interface gets a capacity, another one, other
/// weights, and none again, while frames pass. Each source's vnet is at one worker or the other.
#[test]
fn capacity_changes_while_frames_pass() {
    let mux = start(2);
    let percents = [40, 30, 20, 10];
    let capacity_bps = 20_000_000;
    let sink = |capacity_bps| {
        generator(&mux, "S", 0, NUMBER_AT + HEADER_BYTES as u16, capacity_bps, 0);
    };
    sink(None);
    let put_vnet = |at: usize, weight: u32| {
        let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let by = vxlan::VxlanTunnel { local, remote, port: 4789, vni: at as u32 };
        let near = outside("in", &format!("G{at}"), Encapsulation::Interface);
        let far = outside("out", "S", Encapsulation::Vxlan(by));
        let mut vlink = vlink("through", near, far);
        vlink.leaving[1].weight = weight;
        let (name, vlinks) = (format!("v{at}"), vec![vlink]);
        put(&mux, &VnetConfig { name, police: None, nodes: vec![], vlinks });
    };
    let bytes = 1000;
    // Each source sends the capacity. The sink ignores frames without a number.
    let pps = capacity_bps / 8 / (bytes + HEADER_BYTES + WIRE_BYTES) as u64;
    for (at, percent) in percents.into_iter().enumerate() {
        generator(
            &mux,
            &format!("G{at}"),
            pps,
            if at == 0 { NUMBER_AT } else { 2000 },
            None,
            bytes,
        );
        put_vnet(at, percent);
    }
    let out = |at: usize| {
        let stats = node_stats(&mux, &format!("v{at}"), OUTSIDE);
        let port = &stats.ports["out"];
        (port.made, port.sent, stats.in_flight)
    };
    let all_sent = || (0..4).map(|at| out(at).1).sum::<u64>();
    eventually("frames pass", || (0..4).all(|at| out(at).1 > 100));
    let total =
        |node: &NodeStats| node.ports.values().flat_map(|it| it.dropped.values()).sum::<u64>();
    let drops =
        || (0..4).map(|at| total(&node_stats(&mux, &format!("v{at}"), OUTSIDE))).sum::<u64>();
    assert_eq!(drops(), 0);
    sink(Some(capacity_bps));
    eventually("queues are full", || (0..4).all(|at| out(at).2 > 200));
    let shares = |span_ms| {
        let (before, since): (Vec<_>, _) = ((0..4).map(|at| out(at).1).collect(), Instant::now());
        std::thread::sleep(Duration::from_millis(span_ms));
        let sent: Vec<_> = (0..4).map(|at| out(at).1 - before[at]).collect();
        let sum: u64 = sent.iter().sum();
        let most = pps as f64 * (since.elapsed().as_secs_f64() + 0.05);
        assert!(sum as f64 <= most, "{sum}, {most} at the most");
        sent.into_iter().map(|sent| sent as f64 / sum as f64).collect::<Vec<_>>()
    };
    // If the machine does not run a worker for long, its links lose their turns.
    let about = |expected: [f64; 4]| {
        eventually("shares", || {
            let shares = shares(300);
            shares.iter().zip(expected).all(|(share, expected)| (share - expected).abs() < 0.05)
        });
    };
    about([0.4, 0.3, 0.2, 0.1]);
    (0..4).for_each(|at| put_vnet(at, percents[3 - at]));
    about([0.1, 0.2, 0.3, 0.4]);
    sink(Some(capacity_bps / 2));
    (0..4).for_each(|at| put_vnet(at, 1));
    about([0.25; 4]);
    let waiting: u64 = (0..4).map(|at| out(at).2).sum();
    assert!(waiting > 500);
    sink(None);
    eventually("nothing waits", || (0..4).all(|at| out(at).2 == 0));
    let before = drops();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(drops(), before);
    // Every numbered frame that left arrived in order.
    sink(Some(capacity_bps / 2));
    (0..4).for_each(|at| generator(&mux, &format!("G{at}"), 1, 2000, None, 0));
    eventually("all is out", || {
        let sink = &stats(&mux).externals["S"];
        let free: u64 = stats(&mux).workers.iter().map(|worker| worker.free_packets).sum();
        (sink.sent, sink.late, free) == (all_sent(), 0, 2 * 8192)
    });
    assert!(stats(&mux).externals["S"].numbered > 500);
    assert_adds_up(&stats(&mux));
    // Queued frames are given back when the vnets and the interface are removed.
    (0..4).for_each(|at| generator(&mux, &format!("G{at}"), pps, 2000, None, bytes));
    eventually("queues are full", || (0..4).all(|at| out(at).2 > 200));
    for at in 0..4 {
        let (name, source) = (format!("v{at}"), format!("G{at}"));
        assert_eq!(mux.handle(MuxRequest::DeleteVnet { name }, vec![]), MuxReply::Done);
        assert_eq!(mux.handle(MuxRequest::DeleteExternal { name: source }, vec![]), MuxReply::Done);
    }
    let gone = mux.handle(MuxRequest::DeleteExternal { name: "S".into() }, vec![]);
    assert_eq!(gone, MuxReply::Done);
    eventually("packets are back", || {
        stats(&mux).workers.iter().map(|worker| worker.free_packets).sum::<u64>() == 2 * 8192
    });
}
