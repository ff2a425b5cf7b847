//! Measures queues of links: the cost of a frame with one, a thousand
//! and 65,536 queues, their memory, and the accuracy of their parts.
//!
//! `cargo run --release -p pdp-mux --example measure-queues -- [ROUNDS]`
//!
//! A worker is driven by hand. Frames arrive at the first ends of transits, and wait
//! in queues of the second ends, because these have a rate. Then they are
//! encapsulated and leave. All queues have frames all the time. The example sets the
//! time, so that only the worker's cost is measured. Rounds of all setups alternate.

use std::sync::{Arc, mpsc};
use std::time::Instant;

use pdp_mux::control::plan::outside_ends;
use pdp_mux::core::Core;
use pdp_mux::counters::Reason;
use pdp_mux::encapsulate::{ExternalPath, VlinkPath};
use pdp_mux::external::WorkerExternal;
use pdp_mux::netdev::{NetdevContext, NetdevDriver};
use pdp_mux::packets::{PacketBatch, Packets};
use pdp_mux::queues::Queues;
use pdp_mux::ringers::Ringers;
use pdp_mux::vnet::MuxVnet as Live;
use pdp_mux::wake::Wake;
use pdp_mux::worker::Worker;
use pdp_proto::mux::{self, EgressConfig, Encapsulation, Vlink, VlinkEnd, VnetConfig};
use pdp_underlay::TunnelNextHop;
use pdp_wire::vxlan;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng};

const FRAME_BYTES: usize = 300;
const ROW: usize = 32;
const FRAMES: usize = 2_000_000;
const RATE_BPS: u64 = 1_000_000_000;

/// Frames in all queues together. They do not depend on the
/// number of queues, so that packets are equally cold for all.
const WAITING: usize = 65_536;

/// Number of ends, and queues of each; 0: one queue for all frames, without a choice.
const SETUPS: [(usize, usize); 5] = [(16, 0), (16, 1), (16, 64), (16, 1000), (16, 4096)];

/// Gives back the frames that leave.
#[derive(Debug)]
struct Wire;

impl NetdevDriver for Wire {
    fn room(&mut self) -> usize {
        usize::MAX
    }

    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        tools.packets.give_all(frames);
        Reason::ExternalRingFull
    }
}

struct Bench {
    worker: Worker,
    /// Ingress ports of frames.
    ports: Vec<u16>,
    queues: usize,
    now_ns: u64,
    random: SmallRng,
    memory_bytes: u64,
    _kept: (Arc<Wake>, mpsc::SyncSender<pdp_mux::worker::WorkerCommand>),
}

fn spec(ends: usize, queues: usize) -> VnetConfig {
    let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
    let by = |vni| Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni });
    let end = |name: String, vni: usize| VlinkEnd::External {
        name,
        interface: "A".into(),
        by: by(vni as u32),
    };
    let queue = |at| mux::QueueConfig {
        name: format!("q{at}"),
        frames: 4096,
        ..mux::QueueConfig::default()
    };
    let vlink = |at: usize| Vlink {
        name: format!("l{at}"),
        ends: vec![end(format!("in{at:02}"), at), end(format!("out{at:02}"), 100 + at)],
        leaving: vec![
            EgressConfig::default(),
            EgressConfig {
                rate_bps: Some(RATE_BPS / ends as u64),
                queue_frames: 4096,
                ..EgressConfig::default()
            },
        ],
        queues: vec![vec![], (0..queues).map(queue).collect()],
        up: true,
        segment: None,
        schedule: None,
    };
    VnetConfig {
        name: "v".into(),
        police: None,
        nodes: vec![],
        vlinks: (0..ends).map(vlink).collect(),
    }
}

/// Returns the memory of this process, bytes.
fn resident() -> u64 {
    let words = std::fs::read_to_string("/proc/self/statm").unwrap();
    words.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

impl Bench {
    fn new(ends: usize, queues: usize) -> Self {
        let (_pool, mut parts) = Packets::pool(1, 2 * WAITING + 8192).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let (dropped, _) = mpsc::channel();
        let core = Core::new(parts.remove(0), dropped, wake.clone(), Ringers::start().unwrap());
        let (commands, obeyed) = mpsc::sync_channel(1);
        let mut worker = Worker::new(0, core.unwrap(), vec![None], obeyed, wake.clone()).unwrap();
        let mut card = WorkerExternal::new("A".into(), [2; 6], 1600);
        card.netdevs.add(Box::new(Wire), vec![]);
        worker.core.externals.push(Some(card));
        let spec = spec(ends, queues);
        let before = resident();
        let live = Live::new(&spec, 0, 0, |number, end| {
            let VlinkEnd::External { by, .. } = end else { return None };
            let hop = || Arc::new(TunnelNextHop::known([2; 6]));
            ExternalPath::new(0, number, by, hop).map(VlinkPath::Outside)
        });
        let memory_bytes = resident().saturating_sub(before);
        worker.replace(0, Some(live));
        let ins = outside_ends(&spec).filter(|end| end.external.starts_with("in"));
        let ports = ins.map(|end| end.port).collect();
        let (random, kept) = (SmallRng::seed_from_u64(7), (wake, commands));
        let mut bench =
            Self { worker, ports, queues, now_ns: 1, random, memory_bytes, _kept: kept };
        // Equally many frames in each queue.
        for at in 0..WAITING / ROW {
            bench.row(|row| at * ROW + row);
        }
        bench
    }

    /// Passes in a burst of frames for the queues that `queue` returns.
    fn row(&mut self, mut queue: impl FnMut(usize) -> usize) {
        let ends = self.ports.len();
        self.worker.core.now_ns = self.now_ns;
        let mut row: PacketBatch = vec![];
        for at in 0..ROW {
            let mut packet = self.worker.core.packets.take().unwrap();
            packet.set_len(FRAME_BYTES).unwrap();
            packet.bytes_mut()[..64].fill(at as u8);
            let queue = queue(at);
            packet.port = self.ports[queue % ends];
            packet.queue = match self.queues {
                0 => 0,
                count => (queue / ends % count) as u16 + 1,
            };
            row.push(packet);
        }
        // Bursts of one port, as from an interface.
        row.sort_by_key(|packet| packet.port);
        self.worker.change(0, |vnet, core| vnet.visit(core, &mut row));
    }

    /// Returns the nanoseconds for each frame, while equally many frames arrive and leave.
    fn measure(&mut self) -> f64 {
        let row_ns = (ROW * FRAME_BYTES * 8) as u64 * 1_000_000_000 / RATE_BPS;
        let all = self.ports.len() * self.queues.max(1);
        let sent = self.sent();
        let began = Instant::now();
        for _ in 0..FRAMES / ROW {
            self.now_ns += row_ns;
            let first: [usize; ROW] = std::array::from_fn(|_| self.random.random_range(0..all));
            self.row(|at| first[at]);
        }
        let elapsed_ns = began.elapsed().as_nanos() as f64;
        elapsed_ns / (self.sent() - sent) as f64
    }

    fn sent(&self) -> u64 {
        let stats = self.worker.vnets[0].as_ref().unwrap().stats();
        stats.nodes[mux::OUTSIDE].ports.values().map(|port| port.sent).sum()
    }

    fn waiting(&self) -> (u64, usize) {
        let stats = self.worker.vnets[0].as_ref().unwrap().stats();
        let ports = || stats.nodes[mux::OUTSIDE].ports.values();
        let empty = ports().flat_map(|port| &port.queues).filter(|queue| queue.waiting == 0);
        (ports().map(|port| port.waiting).sum(), empty.count())
    }
}

/// Returns the largest errors of the queues' parts in each of three
/// seconds: in percent of the total, and of their own part. The queues
/// always have frames of all sizes, and weights from 1 to `most`.
fn shares(count: usize, most: u32, bps: u64) -> (f64, f64) {
    let mut random = SmallRng::seed_from_u64(1);
    let (_pool, mut parts) = Packets::pool(1, 2 * count).unwrap();
    let packets = &mut parts[0];
    let weights: Vec<u32> = (0..count).map(|_| random.random_range(1..=most)).collect();
    let queue = |(at, weight): (usize, &u32)| mux::QueueConfig {
        name: at.to_string(),
        weight: *weight,
        ..mux::QueueConfig::default()
    };
    let spec: Vec<_> = weights.iter().enumerate().map(queue).collect();
    let mut queues = Queues::of(&spec, &EgressConfig::default()).unwrap();
    let mut sized = |mut packet: pdp_afxdp::PacketBuffer, at: usize| {
        packet.set_len(random.random_range(60..=1514)).unwrap();
        packet.mark = at as u32;
        packet
    };
    for at in (0..2 * count).map(|it| it % count) {
        queues.put(at, sized(packets.take().unwrap(), at));
    }
    let all: u32 = weights.iter().sum();
    let (mut of_all, mut of_own) = (0f64, 0f64);
    for _ in 0..3 {
        let (mut sent, mut sum) = (vec![0u64; count], 0);
        while sum < bps / 8 {
            let packet = queues.pop().unwrap();
            let at = packet.mark as usize;
            sent[at] += packet.len() as u64;
            sum += packet.len() as u64;
            queues.put(at, sized(packet, at));
        }
        for (sent, weight) in sent.into_iter().zip(&weights) {
            let part = f64::from(*weight) / f64::from(all);
            let off = (sent as f64 / sum as f64 - part).abs();
            (of_all, of_own) = (of_all.max(off), of_own.max(off / part));
        }
    }
    (of_all * 100.0, of_own * 100.0)
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|it| it.parse().ok()).unwrap_or(5);
    let mut benches: Vec<_> =
        SETUPS.iter().map(|(ends, queues)| Bench::new(*ends, *queues)).collect();
    let mut taken = vec![vec![]; SETUPS.len()];
    for _ in 0..rounds {
        for (bench, taken) in benches.iter_mut().zip(&mut taken) {
            taken.push(bench.measure());
        }
    }
    let median = |taken: &mut Vec<f64>| {
        taken.sort_by(f64::total_cmp);
        (taken[taken.len() / 2], taken[0], taken[taken.len() - 1])
    };
    let all: Vec<_> = taken.iter_mut().map(median).collect();
    println!(
        "ends queues      ns a frame (least, most)   rate beside one queue   frames waiting, queues empty"
    );
    for (((ends, queues), (ns, least, most)), bench) in SETUPS.iter().zip(&all).zip(&benches) {
        let (waiting, empty) = bench.waiting();
        let rate = all[1].0 / ns * 100.0;
        println!(
            "{ends:4} {queues:6}      {ns:6.1} ({least:.1}, {most:.1})      {rate:6.0}%      {waiting}, {empty}"
        );
    }
    let bytes = benches[SETUPS.len() - 1].memory_bytes as f64;
    println!("memory of each of 65,536: {:.0} bytes", bytes / 65_536.0);
    for (count, bps) in
        [(1, 10_000_000), (10, 10_000_000), (100, 1_000_000_000), (1000, 10_000_000_000)]
    {
        let (of_all, _) = shares(count, 100, bps);
        let (_, of_own) = shares(count, 1, bps);
        println!(
            "{count} queues at {bps} bit/s, off in any second: {of_all:.4}% of all by weights of 1 to 100, \
             {of_own:.3}% of their own by equal ones"
        );
    }
}
