//! Packets that are reserved for queues. A worker is driven by hand, and the test sets the time.

use std::sync::{Arc, mpsc};

use pdp_mux::control::plan::{changed, outside_ends};
use pdp_mux::core::Core;
use pdp_mux::counters::Reason;
use pdp_mux::encapsulate::{ExternalPath, VlinkPath};
use pdp_mux::external::WorkerExternal as Card;
use pdp_mux::netdev::{NetdevContext, NetdevDriver};
use pdp_mux::packets::{PacketBatch, Packets};
use pdp_mux::ringers::Ringers;
use pdp_mux::vnet::MuxVnet as Live;
use pdp_mux::wake::Wake;
use pdp_mux::worker::{Worker, WorkerCommand};
use pdp_proto::mux::*;
use pdp_underlay::TunnelNextHop;
use pdp_wire::vxlan;
use proptest::prelude::*;

const SHARE: usize = 4096;
const MAC: [u8; 6] = [2, 0, 0, 0, 10, 1];
const FRAME_BYTES: usize = 100;
const RATE_BPS: u64 = 1_000_000;

/// Frames that leave at once after idle time.
const BURST: usize = 30;

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

struct Lab {
    worker: Worker,
    /// Specs by slot. Each vnet is a transit whose second end has the queues.
    specs: Vec<Option<VnetConfig>>,
    now_ns: u64,
    _kept: (Arc<Wake>, mpsc::SyncSender<WorkerCommand>),
}

fn queue(name: usize, buffers: u32) -> QueueConfig {
    QueueConfig { name: format!("q{name}"), frames: 4096, buffers, ..QueueConfig::default() }
}

impl Lab {
    fn new() -> Self {
        let (_pool, mut parts) = Packets::pool(1, SHARE).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let (dropped, _) = mpsc::channel();
        let core = Core::new(parts.remove(0), dropped, wake.clone(), Ringers::start().unwrap());
        let (command, obeyed) = mpsc::sync_channel(1);
        let mut worker = Worker::new(0, core.unwrap(), vec![None], obeyed, wake.clone()).unwrap();
        let mut card = Card::new("A".into(), MAC, 1600);
        card.netdevs.add(Box::new(Wire), vec![]);
        worker.core.externals.push(Some(card));
        Self { worker, specs: vec![], now_ns: 1, _kept: (wake, command) }
    }

    /// Sets the queues of the network in `slot`. Without queues, removes the network.
    fn put(&mut self, slot: usize, queues: Vec<QueueConfig>) {
        if self.specs.len() <= slot {
            self.specs.resize(slot + 1, None);
        }
        self.worker.core.now_ns = self.now_ns;
        if queues.is_empty() {
            self.worker.replace(slot as u16, None);
            self.specs[slot] = None;
            return;
        }
        let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let end = |name: &str, vni| VlinkEnd::External {
            name: name.into(),
            interface: "A".into(),
            by: Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni }),
        };
        let number = 2 * slot as u32;
        let egress = EgressConfig { rate_bps: Some(RATE_BPS), ..EgressConfig::default() };
        let vlink = Vlink {
            name: "through".into(),
            ends: vec![end("in", number), end("out", number + 1)],
            leaving: vec![EgressConfig::default(), egress],
            queues: vec![vec![], queues],
            up: true,
            segment: None,
            schedule: None,
        };
        let (name, vlinks) = (format!("v{slot}"), vec![vlink]);
        let spec = VnetConfig { name, police: None, nodes: vec![], vlinks };
        let mut live = Live::new(&spec, slot as u16, 0, |number, end| {
            let VlinkEnd::External { by, .. } = end else { return None };
            let hop = || Arc::new(TunnelNextHop::known(MAC));
            ExternalPath::new(0, number, by, hop).map(VlinkPath::Outside)
        });
        live.changed = self.specs[slot].as_ref().and_then(|was| changed(was, &spec, Some("A")));
        self.worker.replace(slot as u16, Some(live));
        self.specs[slot] = Some(spec);
    }

    /// Sends this many frames for each of these queues
    /// of the network in `slot`, one after the other.
    fn send(&mut self, slot: usize, queues: impl Iterator<Item = usize> + Clone, count: usize) {
        let Some(spec) = &self.specs[slot] else { return };
        let port = outside_ends(spec).find(|end| end.external == "in").unwrap().port;
        for _ in 0..count {
            for queue in queues.clone() {
                // Frames are received into packets at hand, whatever is reserved.
                let core = &mut self.worker.core;
                let mut packet = core.packets.copy_of(&[7; FRAME_BYTES], 0).expect("a packet");
                packet.port = port;
                packet.queue = queue as u16 + 1;
                self.visit(slot, vec![packet]);
            }
        }
    }

    fn visit(&mut self, slot: usize, mut frames: PacketBatch) {
        self.worker.core.now_ns = self.now_ns;
        self.worker.change(slot as u16, |vnet, core| vnet.visit(core, &mut frames));
    }

    /// Returns the frames in each queue of the network
    /// in `slot`, and the frames that each has dropped.
    fn queues(&self, slot: usize) -> Vec<(u64, u64)> {
        let Some(Some(vnet)) = self.worker.vnets.get(slot) else { return vec![] };
        let stats = vnet.stats();
        let queues = &stats.nodes[OUTSIDE].ports["out"].queues;
        queues.iter().map(|queue| (queue.waiting, queue.dropped)).collect()
    }

    /// Returns the reserved packets that are not in use, counted queue by queue.
    fn unused(&self) -> usize {
        let all = self.specs.iter().enumerate().filter_map(|(slot, it)| Some((slot, it.as_ref()?)));
        let of = |(slot, spec): (usize, &VnetConfig)| {
            let queues = self.queues(slot);
            let each = spec.vlinks[0].queues[1].iter().zip(queues);
            each.map(|(queue, it)| (queue.buffers as usize).saturating_sub(it.0 as usize))
                .sum::<usize>()
        };
        all.map(of).sum()
    }

    fn assert_adds_up(&self) {
        let packets = &self.worker.core.packets;
        let waiting: u64 =
            (0..self.specs.len()).flat_map(|slot| self.queues(slot)).map(|it| it.0).sum();
        assert_eq!(packets.at_hand(), SHARE - waiting as usize);
        let aside = self.unused().min(SHARE / 2);
        assert_eq!(packets.free(), packets.at_hand().saturating_sub(aside));
    }
}

/// Returns a lab in which seven networks keep filling all of their queues.
fn flooded(buffers: u32) -> Lab {
    let mut lab = Lab::new();
    lab.put(0, vec![queue(0, 0), queue(1, buffers)]);
    for other in 1..8 {
        lab.put(other, (0..16).map(|at| queue(at, 0)).collect());
    }
    lab.send(0, 0..1, BURST);
    for _ in 0..40 {
        (1..8).for_each(|other| lab.send(other, 0..16, 2));
    }
    assert!((1..8).all(|other| lab.queues(other).iter().all(|it| it.1 > 0)), "all are full");
    lab
}

#[test]
fn reserved_buffers_survive_floods_of_other_vnets() {
    let mut lab = flooded(1000);
    for _ in 0..500 {
        lab.send(0, 1..2, 2);
        (1..8).for_each(|other| lab.send(other, 0..16, 1));
    }
    assert_eq!(lab.queues(0)[1], (1000, 0), "all of them wait");
    lab.assert_adds_up();
    // The others have as many unreserved packets as in a pool that is smaller by the reserved ones.
    let waiting: u64 = (1..8).flat_map(|other| lab.queues(other)).map(|it| it.0).sum();
    let shared = (SHARE - 1000) as u64;
    assert!(waiting > shared * 3 / 4 && waiting < shared * 15 / 16, "{waiting} of {shared}");
    // Beyond its reserved packets, its network competes with the others.
    lab.send(0, 0..1, 200);
    lab.send(0, 1..2, 200);
    let [rest, kept] = lab.queues(0)[..] else { panic!("two queues") };
    assert!(rest.0 > 20 && kept.0 > 1000 && kept.0 + rest.0 < 1400, "{rest:?} {kept:?}");
    lab.assert_adds_up();
    // Without reserved packets there is no such space.
    let mut lab = flooded(0);
    for _ in 0..500 {
        lab.send(0, 1..2, 2);
        (1..8).for_each(|other| lab.send(other, 0..16, 1));
    }
    assert!(lab.queues(0)[1].1 > 400, "{:?}", lab.queues(0));
}

#[test]
fn reserved_buffers_change_without_losses() {
    let mut lab = flooded(1000);
    lab.send(0, 1..2, 1000);
    for (first, second) in [(0, 10), (300, 0), (0, 0), (700, 1200), (0, 1000)] {
        lab.put(0, vec![queue(0, first), queue(1, second)]);
        assert_eq!(lab.queues(0)[1], (1000, 0));
        lab.assert_adds_up();
    }
    // When queues are removed and added, the first queue gets the frames of removed ones.
    lab.put(0, vec![queue(2, 600), queue(3, 50)]);
    assert_eq!(lab.queues(0)[0].0, 1000);
    lab.assert_adds_up();
    lab.put(0, vec![]);
    lab.assert_adds_up();
    // Its space becomes free as the others' frames leave.
    lab.put(0, vec![queue(0, 2000)]);
    while lab.worker.core.packets.at_hand() < 2100 {
        lab.now_ns += 10_000_000;
        (1..8).for_each(|other| lab.visit(other, vec![]));
    }
    lab.send(0, 0..1, BURST);
    for _ in 0..1000 {
        lab.send(0, 0..1, 2);
        (1..8).for_each(|other| lab.send(other, 0..16, 1));
    }
    assert_eq!(lab.queues(0)[0], (2000, 0));
    lab.assert_adds_up();
    (0..8).for_each(|slot| lab.put(slot, vec![]));
    assert_eq!(lab.worker.core.packets.free(), SHARE);
}

#[derive(Clone, Debug)]
enum Step {
    Send(usize, usize, usize),
    Pass(u64),
    Put(usize, Vec<(usize, u32)>),
}

fn step() -> impl Strategy<Value = Step> {
    let queues = prop::collection::btree_map(0usize..6, prop_oneof![Just(0), 0u32..900], 0..5)
        .prop_map(|all| all.into_iter().collect())
        .prop_shuffle();
    prop_oneof![
        6 => (0usize..3, 0usize..6, 1usize..600).prop_map(|(slot, at, count)| Step::Send(slot, at, count)),
        2 => (0u64..2_000_000_000).prop_map(Step::Pass),
        2 => (0usize..3, queues).prop_map(|(slot, queues)| Step::Put(slot, queues)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever changes, the count of reserved packets is what a scan of all queues finds.
    /// A queue with fewer frames than its reserved packets can always take one more.
    #[test]
    fn reserved_count_matches_a_scan_of_queues(steps in prop::collection::vec(step(), 1..40)) {
        let mut lab = Lab::new();
        (0..3).for_each(|slot| lab.put(slot, vec![queue(0, 100 * slot as u32)]));
        for step in steps {
            match step {
                Step::Send(slot, at, count) => {
                    for _ in 0..count.min(lab.worker.core.packets.at_hand()) {
                        let Some(spec) = &lab.specs[slot] else { break };
                        let queues = &spec.vlinks[0].queues[1];
                        let (at, buffers) = (at % queues.len(), u64::from(queues[at % queues.len()].buffers));
                        let before = lab.queues(slot)[at];
                        lab.send(slot, at..at + 1, 1);
                        let now = lab.queues(slot)[at];
                        prop_assert!(now.1 == before.1 || before.0 >= buffers, "{before:?} of {buffers}");
                    }
                }
                Step::Pass(ns) => {
                    lab.now_ns += ns;
                    (0..3).for_each(|slot| lab.visit(slot, vec![]));
                }
                Step::Put(slot, queues) => {
                    lab.put(slot, queues.into_iter().map(|(name, buffers)| queue(name, buffers)).collect());
                }
            }
            lab.assert_adds_up();
        }
        (0..3).for_each(|slot| lab.put(slot, vec![]));
        prop_assert_eq!(lab.worker.core.packets.free(), SHARE);
    }
}
