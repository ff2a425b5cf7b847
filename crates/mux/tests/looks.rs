//! Frames and completions of guests, check by check: turns,
//! guests that count as dead, and peers that may sleep.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;

use common::*;
use pdp_model::GuestStats;
use pdp_mux::channel::PULL_FRAMES;
use pdp_mux::core::Core;
use pdp_mux::packets::Packets;
use pdp_mux::ringers::Ringers;
use pdp_mux::vnet::{CHECK_NS, MuxVnet as Live, NodePeer, SILENCE_NS_MAX};
use pdp_mux::wake::Wake;
use pdp_mux::worker::{Worker, WorkerCommand};
use pdp_proto::mux::*;

/// A worker with one vnet, and its connected peers.
struct Bench {
    worker: Worker,
    peers: Vec<Peer>,
    links: u64,
    _controls: Vec<pdp_memif::MemifControl>,
    _commands: mpsc::SyncSender<WorkerCommand>,
    _pool: pdp_afxdp::Pool,
}

impl Bench {
    /// Connects all guests of `spec`, one node after the other.
    fn new(spec: &VnetConfig) -> Self {
        let (pool, mut parts) = Packets::pool(1, 8192).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let (dropped, _) = mpsc::channel();
        let ringers = Ringers::start().unwrap();
        let core = Core::new(parts.remove(0), dropped, wake.clone(), ringers).unwrap();
        let (commands, obeyed) = mpsc::sync_channel(1);
        let worker = Worker::new(0, core, vec![None], obeyed, wake).unwrap();
        let mut bench = Self {
            worker,
            peers: vec![],
            links: 0,
            _controls: vec![],
            _commands: commands,
            _pool: pool,
        };
        bench.worker.replace(0, Some(Live::new(spec, 0, 1, |_, _| None)));
        for node in &spec.nodes {
            for guest in node.router.iter().flat_map(|router| &router.guests) {
                let peer = bench.connect(&node.name, guest);
                bench.peers.push(peer);
            }
        }
        bench
    }

    fn connect(&mut self, node: &str, guest: &GuestConfig) -> Peer {
        self.links += 1;
        let (peer, link, control) = pair(&guest.socket, 0, self.links);
        self._controls.push(control);
        let place = NodePeer::Guest(guest.number);
        let attached = self.worker.change(0, |vnet, _| vnet.attach(node, place, 0, link).is_ok());
        assert_eq!(attached, Some(true));
        peer
    }

    fn give(&mut self, port: u16, frames: usize) {
        let packets = (0..frames).map(|_| {
            let mut packet = self.worker.core.packets.take().unwrap().at(port.into());
            packet.set_len(60).unwrap();
            packet.bytes_mut().copy_from_slice(&frame(60, 0));
            packet
        });
        let mut batch: Vec<_> = packets.collect();
        self.vnet(|vnet, core| vnet.ingress(core, &mut batch));
    }

    fn vnet<T>(&mut self, by: impl FnOnce(&mut Live, &mut Core) -> T) -> T {
        self.worker.change(0, by).unwrap()
    }

    /// Lets armed peers ring. Returns true if the worker may then sleep.
    fn may_sleep(&mut self) -> bool {
        self.vnet(|vnet, core| {
            vnet.note_ring(core.now_ns);
            vnet.arm(core)
        })
    }

    /// Takes the frames that the peers sent, this much later.
    fn check(&mut self, later_ns: u64) -> usize {
        self.worker.core.now_ns += later_ns;
        self.vnet(|vnet, core| {
            vnet.note_ring(core.now_ns);
            let received = vnet.from_peers(core);
            vnet.flush(core);
            received
        })
    }

    fn guest(&mut self, node: &str, number: u32) -> GuestStats {
        self.vnet(|vnet, _| vnet.stats().nodes[node].guests[&number].clone())
    }
}

/// Returns a vnet with these vrouters. Each has `guests` guests, and the policy `policy`.
fn routers(root: &Path, names: &[&str], guests: u32, policy: GuestDistribution) -> VnetConfig {
    let guests: Vec<_> = (0..guests).map(|number| (number, AttachMode::Runtime)).collect();
    let mut nodes: Vec<_> = names.iter().map(|name| router(root, name, 1, &guests)).collect();
    nodes.iter_mut().for_each(|node| node.router.as_mut().unwrap().policy = policy);
    VnetConfig { name: "red".into(), police: None, nodes, vlinks: vec![] }
}

fn own(vport: u8) -> pdp_wire::tag::Tag {
    pdp_wire::tag::Tag { last: false, ..out(vport, 0) }
}

/// Peers that have unlimited frames get equal parts, however many they send at once.
#[test]
fn worker_drains_full_rings_equally() {
    let all = [("r1", 0), ("r1", 1), ("r2", 0), ("r2", 1)];
    for at_once in [1000, 200] {
        let root = tempfile::tempdir().unwrap();
        let mut bench =
            Bench::new(&routers(root.path(), &["r1", "r2"], 2, GuestDistribution::Flow));
        let mut sent = [0; 4];
        for _ in 0..100 {
            for (at, (node, guest)) in all.into_iter().enumerate() {
                let received = bench.guest(node, guest).from_guest;
                while sent[at] - received < at_once {
                    assert!(bench.peers[at].send(own(0), &frame(60, 0)));
                    sent[at] += 1;
                }
            }
            bench.check(1000);
        }
        let received = all.map(|(node, guest)| bench.guest(node, guest).from_guest);
        let (least, most) = (*received.iter().min().unwrap(), *received.iter().max().unwrap());
        assert!(most - least <= 2 * PULL_FRAMES as u64, "{at_once} at once: {received:?}");
        assert_eq!(received.iter().sum::<u64>(), 100 * 256, "{at_once} at once");
    }
}

/// With every policy, a guest that has frames and completes none is disconnected after some
/// checks, and not earlier. A slow guest is not, and neither is any guest because the clock jumps.
#[test]
fn guest_without_completions_is_disconnected() {
    for policy in [
        GuestDistribution::RoundRobin,
        GuestDistribution::Weighted,
        GuestDistribution::Flow,
        GuestDistribution::Flowlet,
        GuestDistribution::Ordered,
    ] {
        let root = tempfile::tempdir().unwrap();
        let mut spec = routers(root.path(), &["r1"], 2, policy);
        // The second guest has a thousandth of a core.
        spec.nodes[0].router.as_mut().unwrap().guests[1].weight = 1;
        let mut bench = Bench::new(&spec);
        // One guest has frames, then two.
        bench.give(0, 40);
        let given = [0, 1].map(|number| bench.guest("r1", number).to_guest);
        assert_eq!(given.iter().sum::<u64>(), 40);
        // The machine stands still for an hour, again and
        // again. The guest completes one frame each time.
        for _ in 0..4 {
            for second in 0..2 {
                bench.check(3600 * 1_000_000_000);
                for (peer, given) in bench.peers.iter_mut().zip(given) {
                    if second == 0 && given > 0 {
                        assert!(peer.send(out(0, 0), &frame(60, 0)));
                    }
                }
            }
        }
        for number in 0..2 {
            assert!(bench.guest("r1", number).connected, "{policy:?}");
        }
        // No completions any more.
        bench.check(0);
        let mut looked_ns = 0;
        let mut lost_ns = [None; 2];
        while looked_ns < 20_000_000_000 {
            bench.check(CHECK_NS / 10);
            looked_ns += CHECK_NS / 10;
            for (number, lost_ns) in lost_ns.iter_mut().enumerate() {
                let guest = bench.guest("r1", number as u32);
                if !guest.connected {
                    assert!(guest.last_fault.unwrap().contains("no completion"));
                    lost_ns.get_or_insert(looked_ns);
                }
            }
        }
        for (number, lost_ns) in lost_ns.into_iter().enumerate() {
            let times = match (number, policy) {
                // It has already completed a frame, which waits for one of the second guest's.
                (0, GuestDistribution::Ordered) => 7,
                (0, _) => 1,
                _ => 6,
            };
            let least_ns = times * SILENCE_NS_MAX;
            let in_time = least_ns..=least_ns + 6 * CHECK_NS;
            match given[number] {
                0 => assert_eq!(lost_ns, None, "{policy:?}: it has nothing"),
                _ => assert!(
                    in_time.contains(&lost_ns.unwrap()),
                    "{policy:?}, {number}: {lost_ns:?}"
                ),
            }
        }
        let left = bench.vnet(|vnet, _| vnet.stats().nodes["r1"].in_flight);
        assert_eq!(left, 0, "{policy:?}");
    }
}

/// A guest's own frames are no progress, however many there
/// are. A guest that completes a frame among them is alive.
#[test]
fn guest_sending_only_own_frames_is_disconnected() {
    let root = tempfile::tempdir().unwrap();
    let mut bench = Bench::new(&routers(root.path(), &["r1"], 2, GuestDistribution::RoundRobin));
    bench.give(0, 40);
    let mut lost_ns = None;
    for check in 1..=120 {
        if check % 10 == 0 {
            assert!(bench.peers[1].send(out(0, 0), &frame(60, 0)));
        }
        // More frames than the mux takes, and fewer.
        for (peer, frames) in bench.peers.iter_mut().zip([300, 100]) {
            (0..frames).for_each(|_| _ = peer.send(own(0), &frame(60, 0)));
        }
        bench.check(CHECK_NS / 10);
        if !bench.guest("r1", 0).connected {
            lost_ns.get_or_insert(check * CHECK_NS / 10);
        }
    }
    let lost_ns = lost_ns.expect("no completion");
    assert!((SILENCE_NS_MAX..=SILENCE_NS_MAX + 2 * CHECK_NS).contains(&lost_ns), "{lost_ns}");
    assert!(bench.guest("r1", 1).connected);
}

/// Guests that wait for another's turn neither keep the worker awake nor wait any longer than that.
#[test]
fn guests_waiting_their_turn_let_workers_sleep() {
    let root = tempfile::tempdir().unwrap();
    let mut bench = Bench::new(&routers(root.path(), &["r1"], 2, GuestDistribution::Ordered));
    let complete = |bench: &mut Bench, guest: usize| {
        (0..32).for_each(|_| assert!(bench.peers[guest].send(out(0, 0), &frame(60, 0))));
    };
    for _ in 0..3 {
        // A turn of 32 frames for each. The second guest's turn is first.
        bench.give(0, 64);
        assert_eq!(bench.peers.iter_mut().map(|peer| peer.receive().len()).sum::<usize>(), 64);
        complete(&mut bench, 0);
        assert_eq!(bench.check(1000), 0);
        assert!(bench.may_sleep(), "the worker may sleep");
        complete(&mut bench, 1);
        assert!(!bench.may_sleep(), "the one that is awaited has rung");
        assert_eq!(bench.check(1000), 64, "both in one look");
        assert!(bench.may_sleep());
    }
    // A guest's own frames wait for no other guest.
    assert!(bench.peers[0].send(own(0), &frame(60, 0)));
    assert!(!bench.may_sleep());
    assert_eq!(bench.check(1000), 1);
}
