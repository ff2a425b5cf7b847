//! Workers driven by hand, round by round, with rings instead of network cards.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use pdp_afxdp::PacketBuffer;
use pdp_model::NodeStats;
use pdp_mux::channel::PeerChannel;
use pdp_mux::classify::{PortRef, TunnelTable};
use pdp_mux::control::MuxServer;
use pdp_mux::control::plan::changed;
use pdp_mux::core::Core;
use pdp_mux::counters::Reason;
use pdp_mux::egress::PENDING_FRAMES_MAX;
use pdp_mux::encapsulate::{ExternalPath, VlinkPath};
use pdp_mux::external::WorkerExternal as Card;
use pdp_mux::netdev::path::{PATH_FRAMES, RemoteNetdev as SocketPath};
use pdp_mux::netdev::program::MemifNetdev;
use pdp_mux::netdev::{NetdevContext, NetdevDriver};
use pdp_mux::packets::{PacketBatch, Packets};
use pdp_mux::ringers::{Ringers, RungFor};
use pdp_mux::sleep::{Alarm, WAKE_EACH_NS, WAKE_FRAMES, WAKE_NS};
use pdp_mux::vnet::MuxVnet as Live;
use pdp_mux::wake::Wake;
use pdp_mux::worker::{HANDOVER_FRAMES, NeighbourWorker, Worker, WorkerCommand};
use pdp_proto::mux::*;
use pdp_underlay::{NextHopInfo, TunnelNextHop};
use pdp_wire::{outer, vxlan};
use rtrb::{Consumer, RingBuffer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const SHARE: usize = 4096;

/// Two workers. The card's frames arrive at the first; the vnet is at the second.
struct Bench {
    workers: [Worker; 2],
    line: Consumer<PacketBuffer>,
    hop: Arc<TunnelNextHop>,
    spec: Option<VnetConfig>,
    _commands: Vec<SyncSender<WorkerCommand>>,
    _controls: Vec<pdp_memif::MemifControl>,
}

fn tunnel(vni: u32) -> Encapsulation {
    let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
    Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni })
}

fn spec(root: &Path, police: Option<Rate>) -> VnetConfig {
    let outside = outside("out", "A", tunnel(5));
    let mut vnet = two_hosts(root, "red", &[]);
    vnet.police = police;
    vnet.vlinks[0].ends[0] = outside;
    vnet
}

impl Bench {
    fn new(spec: &VnetConfig) -> Self {
        let (_pool, parts) = Packets::pool(2, SHARE).unwrap();
        let wakes = [(); 2].map(|()| Arc::new(Wake::new().unwrap()));
        let (one, two) = (RingBuffer::new(HANDOVER_FRAMES), RingBuffer::new(HANDOVER_FRAMES));
        let meshes = [
            vec![None, Some(NeighbourWorker { to: one.0, from: two.1, wake: wakes[1].clone() })],
            vec![Some(NeighbourWorker { to: two.0, from: one.1, wake: wakes[0].clone() }), None],
        ];
        let mut commands = vec![];
        let mut made = parts.into_iter().zip(meshes).zip(&wakes).enumerate().map(
            |(number, ((packets, neighbours), wake))| {
                let (dropped, _) = mpsc::channel();
                let core =
                    Core::new(packets, dropped, wake.clone(), Ringers::start().unwrap()).unwrap();
                let (sender, obeyed) = mpsc::sync_channel(1);
                commands.push(sender);
                Worker::new(number as u16, core, neighbours, obeyed, wake.clone()).unwrap()
            },
        );
        let mut workers = [made.next().unwrap(), made.next().unwrap()];
        drop(made);
        let (port, line) = RingBuffer::new(PATH_FRAMES);
        let mut table = TunnelTable::new(Some(MAC));
        let reference = PortRef { worker: 1, vnet: 0, port: 0, generation: 7 };
        table.insert(&tunnel(5), reference).unwrap();
        let classifier = Arc::new(vec![table]);
        for worker in &mut workers {
            worker.core.externals.push(Some(Card::new("A".into(), MAC, 1500)));
            worker.classifier = classifier.clone();
        }
        let card = workers[1].core.external(0).unwrap();
        card.netdevs.add_path(SocketPath::new(port, wakes[0].clone()));
        let hop = Arc::new(TunnelNextHop::default());
        let mut bench =
            Self { workers, line, hop, spec: None, _commands: commands, _controls: vec![] };
        bench.reshape(spec);
        bench
    }

    /// Changes the vnet.
    fn reshape(&mut self, spec: &VnetConfig) {
        self.reshape_as(spec, 7);
    }

    fn reshape_as(&mut self, spec: &VnetConfig, generation: u32) {
        let mut vnet = Live::new(spec, 0, generation, |number, end| match end {
            VlinkEnd::External { by, .. } => {
                ExternalPath::new(0, number, by, || self.hop.clone()).map(VlinkPath::Outside)
            }
            VlinkEnd::Port { .. } => None,
        });
        vnet.changed = self.spec.as_ref().and_then(|before| changed(before, spec, None));
        self.spec = Some(spec.clone());
        self.workers[1].replace(0, Some(vnet));
    }

    /// Lets frames of the tunnel arrive at the first worker.
    fn receive(&mut self, count: usize) {
        let headers = outer::HeaderTemplate::new(&tunnel(5).reversed()).unwrap();
        let mut frames = Vec::new();
        for _ in 0..count {
            let mut packet = self.workers[0].core.packets.take().unwrap();
            packet.set_len(headers.len() + 60).unwrap();
            packet.bytes_mut().fill(0);
            headers.write(packet.bytes_mut(), MAC, [9; 6]).unwrap();
            frames.push(packet);
        }
        self.workers[0].classify_frames(0, &mut frames);
    }

    /// Runs rounds, and lets enough time pass for an idle vnet to be activated.
    fn rounds(&mut self) {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_micros(10));
            self.workers.iter_mut().for_each(|worker| {
                worker.round();
            });
        }
    }

    /// Connects a TAP helper to a node.
    fn connect(&mut self, path: &Path, node: &str) -> Peer {
        self.connect_to(0, path, node)
    }

    fn connect_to(&mut self, slot: u16, path: &Path, node: &str) -> Peer {
        let (tap, link, control) = pair(path, 0, 1);
        self._controls.push(control);
        let peer = pdp_mux::vnet::NodePeer::Tap;
        self.workers[1]
            .core
            .connections
            .watch
            .add_bell(Some(slot), &link.channel.doorbell().unwrap())
            .unwrap();
        let attached =
            self.workers[1].change(slot, |vnet, _| vnet.attach(node, peer, 0, link).is_ok());
        assert_eq!(attached, Some(true));
        tap
    }
    fn sleeps(&self) -> bool {
        self.workers[1].is_idle(0)
    }

    fn node(&self, name: &str) -> NodeStats {
        self.workers[1].vnets[0].as_ref().unwrap().stats().nodes[name].clone()
    }

    fn outer_dropped(&mut self, worker: usize, reason: &str) -> u64 {
        let stats = self.workers[worker].core.external(0).unwrap().stats();
        stats.dropped.get(reason).copied().unwrap_or(0)
    }

    fn free(&self) -> [usize; 2] {
        [0, 1].map(|at: usize| self.workers[at].core.packets.free())
    }
}

#[test]
fn workers_hand_over_frames_and_return_packets() {
    let root = tempfile::tempdir().unwrap();
    let spec = spec(root.path(), None);
    let mut bench = Bench::new(&spec);
    bench.receive(100);
    bench.rounds();
    let r1 = bench.node("r1");
    assert_eq!((r1.ports["eth0"].received, r1.ports["eth0"].received_bytes), (100, 6000));
    assert_eq!(dropped(&r1, "no-guest"), 100);
    assert_eq!(bench.free(), [SHARE, SHARE]);
    // More frames than the other worker takes. The rest is counted where it was received.
    bench.receive(HANDOVER_FRAMES + 30);
    assert_eq!(bench.outer_dropped(0, "handover-full"), 30);
    bench.rounds();
    assert_eq!(bench.free(), [SHARE, SHARE]);
    // A changed vnet gets no frames that were meant for the old one.
    bench.receive(10);
    bench.reshape_as(&spec, 8);
    bench.rounds();
    assert_eq!(bench.outer_dropped(1, "stale"), 10);
    assert_eq!(bench.node("r1").ports["eth0"].received, 100 + HANDOVER_FRAMES as u64);
    assert_eq!(bench.free(), [SHARE, SHARE]);
}

#[test]
fn mux_polices_frames_from_external_interfaces() {
    let root = tempfile::tempdir().unwrap();
    let mut bench = Bench::new(&spec(root.path(), Some(Rate { bps: 0, pps: 1 })));
    bench.receive(50);
    bench.rounds();
    let r1 = bench.node("r1");
    assert_eq!(r1.ports["eth0"].received, 50);
    assert_eq!((dropped(&r1, "policed"), dropped(&r1, "no-guest")), (18, 32));
}

#[test]
fn every_blocked_egress_path_counts_its_reason() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = spec(root.path(), None);
    // h2's port goes outside, so that the frames that it makes leave by the tunnel.
    spec.vlinks[1].ends[0] = spec.vlinks[0].ends[0].clone();
    spec.vlinks.remove(0);
    spec.nodes[2].ports[0].mtu = 9000;
    let mut bench = Bench::new(&spec);
    let mut tap = bench.connect(&spec.nodes[2].tap_socket, "h2");
    // A frame that does not fit does not delay the others of its batch.
    bench.hop.resolve(Some(NextHopInfo { mac: [9; 6], mtu: 1500 }));
    for length in [60, 1465, 61, 1464] {
        assert!(tap.out(0, &frame(length, 1)));
    }
    bench.rounds();
    for length in [60, 61, 1464] {
        let packet = bench.line.pop().unwrap();
        assert_eq!(packet.len(), length + 50);
        bench.workers[1].core.packets.give(packet);
    }
    let port = &bench.node("h2").ports["eth0"];
    assert_eq!((port.sent, port.sent_bytes, port.made), (3, 60 + 61 + 1464, 4));
    let mut blocked = |bench: &mut Bench, reason: &str, length: usize, times: u64| {
        for _ in 0..times {
            assert!(tap.out(0, &frame(length, 1)));
            bench.workers[1].round();
        }
        bench.rounds();
        dropped(&bench.node("h2"), reason)
    };
    bench.hop.resolve(Some(NextHopInfo { mac: [9; 6], mtu: 1499 }));
    assert_eq!(blocked(&mut bench, "underlay-path-too-big", 1464, 1), 1);
    bench.hop.resolve(Some(NextHopInfo { mac: [9; 6], mtu: 1500 }));
    assert_eq!(blocked(&mut bench, "underlay-too-big", 1465, 1), 2);
    assert_eq!(blocked(&mut bench, "underlay-too-big", 1464, 1), 2);
    assert_eq!(blocked(&mut bench, "too-big", 1780, 0), 0);
    assert_eq!(bench.node("h2").ports["eth0"].sent, 4);
    let rest = PATH_FRAMES as u64 - 1;
    assert_eq!(blocked(&mut bench, "external-ring-full", 60, rest), 0);
    assert_eq!(blocked(&mut bench, "external-ring-full", 60, 3), 3);
    while let Ok(packet) = bench.line.pop() {
        assert_eq!(packet.bytes()[..6], [9; 6]);
        bench.workers[1].core.packets.give(packet);
    }
    let Worker { core, .. } = &mut bench.workers[1];
    if let Some(Some(card)) = core.externals.get_mut(0) {
        card.netdevs.detach_all(&mut core.packets);
    }
    assert_eq!(blocked(&mut bench, "external-gone", 60, 2), 2);
    let h2 = bench.node("h2");
    assert_eq!(h2.ports["eth0"].made, 7 + rest + 3 + 2);
    assert_eq!(h2.ports["eth0"].sent, 3 + PATH_FRAMES as u64);
    assert_eq!(bench.free(), [SHARE, SHARE]);
}

/// Frames of a tunnel whose next hop is not known yet.
#[test]
fn frames_pending_on_next_hop_stay_ordered() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = spec(root.path(), None);
    spec.vlinks[1].ends[0] = spec.vlinks[0].ends[0].clone();
    spec.vlinks.remove(0);
    let mut bench = Bench::new(&spec);
    let mut tap = bench.connect(&spec.nodes[2].tap_socket, "h2");
    let mut send = |bench: &mut Bench, marks: std::ops::Range<u64>| {
        for mark in marks {
            assert!(tap.out(0, &frame(60, mark)));
            bench.workers[1].round();
        }
        bench.rounds();
    };
    let unresolved = |bench: &mut Bench| dropped(&bench.node("h2"), "underlay-unresolved");
    // The oldest frames are dropped for others.
    let pending = PENDING_FRAMES_MAX as u64;
    send(&mut bench, 0..pending + 2);
    assert_eq!((unresolved(&mut bench), bench.node("h2").in_flight), (2, pending));
    // They leave as soon as it is known, before frames that arrive now.
    bench.hop.resolve(Some(NextHopInfo { mac: [9; 6], mtu: 1500 }));
    send(&mut bench, pending + 2..pending + 3);
    for want in 2..pending + 3 {
        let packet = bench.line.pop().unwrap();
        assert_eq!(mark(&packet.bytes()[packet.len() - 60..]), want);
        bench.workers[1].core.packets.give(packet);
    }
    assert_eq!((bench.node("h2").ports["eth0"].sent, bench.node("h2").in_flight), (pending + 1, 0));
    // They leave even if no new frames arrive. A change of the vnet does not affect them.
    bench.hop.resolve(None);
    send(&mut bench, 0..3);
    bench.reshape(&spec);
    assert_eq!(bench.node("h2").in_flight, 3);
    // Nor does a change of a port, or an additional port.
    let mtu = std::mem::replace(&mut spec.nodes[2].ports[0].mtu, 40);
    bench.reshape(&spec);
    send(&mut bench, 0..1);
    assert_eq!(dropped(&bench.node("h2"), "too-big"), 1);
    spec.nodes[2].ports[0].mtu = mtu;
    bench.reshape(&spec);
    let more = NodeConfig { name: "h0".into(), ..spec.nodes[1].clone() };
    let portless = NodeConfig { ports: vec![], ..more.clone() };
    for first in [more, portless] {
        spec.nodes.insert(0, first);
        bench.reshape(&spec);
        spec.nodes.remove(0);
        bench.reshape(&spec);
    }
    assert_eq!(bench.node("h2").in_flight, 3);
    bench.hop.resolve(Some(NextHopInfo { mac: [9; 6], mtu: 1500 }));
    eventually("it is looked at again", || {
        bench.workers[1].round();
        bench.node("h2").in_flight == 0
    });
    assert_eq!(bench.node("h2").ports["eth0"].sent, pending + 4);
    // They are dropped if it never becomes known.
    bench.hop.resolve(None);
    send(&mut bench, 0..3);
    eventually("they end", || {
        bench.workers[1].round();
        unresolved(&mut bench) == 5
    });
    while let Ok(packet) = bench.line.pop() {
        bench.workers[1].core.packets.give(packet);
    }
    assert_eq!(bench.node("h2").in_flight, 0);
    bench.rounds();
    assert_eq!(bench.free(), [SHARE, SHARE]);
}

/// The neighbour appears and disappears while frames that wait for it are checked.
#[test]
fn pending_frames_survive_a_flapping_next_hop() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = spec(root.path(), None);
    spec.vlinks[1].ends[0] = spec.vlinks[0].ends[0].clone();
    spec.vlinks.remove(0);
    let mut bench = Bench::new(&spec);
    let mut tap = bench.connect(&spec.nodes[2].tap_socket, "h2");
    let (hop, known) = (bench.hop.clone(), Some(NextHopInfo { mac: [9; 6], mtu: 1500 }));
    let [flaps, over] = [false; 2].map(|it| Arc::new(AtomicBool::new(it)));
    let [flaps_there, over_there] = [flaps.clone(), over.clone()];
    let neighbour = std::thread::spawn(move || {
        while !over_there.load(Ordering::Relaxed) {
            if flaps_there.load(Ordering::Relaxed) {
                hop.resolve(None);
                std::hint::spin_loop();
                hop.resolve(known);
            }
        }
    });
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(1) {
        bench.hop.resolve(None);
        assert!(tap.out(0, &frame(60, 1)));
        bench.rounds();
        flaps.store(true, Ordering::Relaxed);
        let flapping = Instant::now();
        while flapping.elapsed() < Duration::from_millis(1) {
            bench.workers[1].round();
        }
        flaps.store(false, Ordering::Relaxed);
        let waiting = Instant::now();
        while bench.node("h2").in_flight > 0 {
            // The other thread may just have removed it.
            bench.hop.resolve(known);
            bench.workers[1].round();
            assert!(waiting.elapsed() < PATIENCE, "a frame waits on");
        }
        while let Ok(packet) = bench.line.pop() {
            bench.workers[1].core.packets.give(packet);
        }
    }
    over.store(true, Ordering::Relaxed);
    neighbour.join().unwrap();
    bench.rounds();
    assert_eq!(bench.free(), [SHARE, SHARE]);
}

/// The netdevs of an interface are replaced again and again while another worker sends by them.
#[test]
fn replaced_netdevs_return_all_packets() {
    let root = tempfile::tempdir().unwrap();
    let mux = start(2);
    let free = |mux: &MuxServer| stats(mux).workers.iter().map(|it| it.free_packets).sum::<u64>();
    let before = free(&mux);
    let sink = |round: usize| {
        let outlet = match round % 2 {
            0 => pdp_proto::mux::OutletConfig::Generator(GeneratorConfig {
                pps: 1,
                frames: 1,
                number_at: None,
            }),
            _ => pdp_proto::mux::OutletConfig::Memif { socket: root.path().join("memif.sock") },
        };
        MuxRequest::PutExternal(ExternalConfig::new("A", 1500, outlet))
    };
    assert_eq!(mux.handle(sink(0), vec![]), MuxReply::Done);
    // The first vnet is at the first worker, like the interface. The second vnet is at the
    // other worker and stays there, because it has a tunnel and not the whole interface.
    put(&mux, &two_hosts(root.path(), "red", &[]));
    let mut blue = two_hosts(root.path(), "blue", &[]);
    blue.vlinks[1].ends[0] = outside("out", "A", tunnel(5));
    blue.vlinks.remove(0);
    put(&mux, &blue);
    let (stop, path) = (Arc::new(AtomicBool::new(false)), blue.nodes[2].tap_socket.clone());
    let stopped = stop.clone();
    let sending = std::thread::spawn(move || {
        let mut tap = Peer::connect(&path, 0);
        let mut sent = 0;
        while !stopped.load(Ordering::Relaxed) {
            sent += u64::from(tap.out(0, &frame(60, sent)));
        }
        sent
    });
    eventually("frames leave", || node_stats(&mux, "blue", "h2").ports["eth0"].sent > 0);
    for round in 1..=100 {
        let ask = |request, fds| mux.handle(request, fds);
        assert_eq!(put_with_sockets(ask, sink(round)), MuxReply::Done);
        let sent = || node_stats(&mux, "blue", "h2").ports["eth0"].sent;
        let was = sent();
        eventually("frames leave", || sent() > was);
    }
    stop.store(true, Ordering::Relaxed);
    assert!(sending.join().unwrap() > 0);
    eventually("all packets are back", || free(&mux) == before);
    assert_adds_up(&stats(&mux));
}

/// A port sends by another worker's memif interface. Frames
/// for which that has no program any more are counted there.
#[test]
fn unsendable_frames_of_another_worker_are_counted() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = two_hosts(root.path(), "red", &[]);
    let by = Encapsulation::Interface;
    spec.vlinks[1].ends[0] = outside("out", "A", by);
    spec.vlinks.remove(0);
    let mut bench = Bench::new(&spec);
    let mut tap = bench.connect(&spec.nodes[2].tap_socket, "h2");
    let line = std::mem::replace(&mut bench.line, RingBuffer::new(1).1);
    let card = bench.workers[0].core.external(0).unwrap();
    card.netdevs.add(Box::<MemifNetdev>::default(), vec![line]);
    for _ in 0..5 {
        assert!(tap.out(0, &frame(60, 1)));
    }
    bench.rounds();
    assert_eq!(bench.node("h2").ports["eth0"].sent, 5);
    assert_eq!(bench.outer_dropped(0, "gone"), 5);
    assert_eq!(bench.free(), [SHARE, SHARE]);
}

/// A netdev that takes frames while it is open.
#[derive(Clone, Debug, Default)]
struct Gate(Arc<Mutex<(bool, Vec<u64>)>>);

impl NetdevDriver for Gate {
    fn room(&mut self) -> usize {
        // Space may be for parts of a frame.
        3
    }

    fn send(&mut self, tools: &mut NetdevContext<'_>, frames: &mut PacketBatch) -> Reason {
        let (open, sent) = &mut *self.0.lock().unwrap();
        let taken = if *open { frames.len().min(2) } else { 0 };
        for packet in frames.drain(..taken) {
            sent.push(mark(packet.bytes()));
            tools.packets.give(packet);
        }
        Reason::ExternalRingFull
    }
}

/// Frames that another worker's netdev has no space for wait
/// there, in order. They are freed if the netdev is removed.
#[test]
fn frames_wait_when_another_workers_netdev_is_full() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = two_hosts(root.path(), "red", &[]);
    let by = Encapsulation::Interface;
    spec.vlinks[1].ends[0] = outside("out", "A", by);
    spec.vlinks.remove(0);
    let mut bench = Bench::new(&spec);
    let mut tap = bench.connect(&spec.nodes[2].tap_socket, "h2");
    let line = std::mem::replace(&mut bench.line, RingBuffer::new(1).1);
    let gate = Gate::default();
    bench.workers[0].core.external(0).unwrap().netdevs.add(Box::new(gate.clone()), vec![line]);
    (0..9).for_each(|number| assert!(tap.out(0, &frame(60, number))));
    bench.rounds();
    assert_eq!((bench.outer_dropped(0, "gone"), gate.0.lock().unwrap().1.len()), (0, 0));
    gate.0.lock().unwrap().0 = true;
    bench.workers[0].round();
    bench.workers[0].round();
    assert_eq!(gate.0.lock().unwrap().1, [0, 1, 2]);
    let Worker { core, .. } = &mut bench.workers[0];
    core.externals[0].as_mut().unwrap().netdevs.detach_all(&mut core.packets);
    bench.rounds();
    assert_eq!(bench.free(), [SHARE, SHARE]);
}

#[test]
fn idle_vnet_wakes_on_doorbell_or_frame() {
    let root = tempfile::tempdir().unwrap();
    let mut spec = spec(root.path(), None);
    // h2's port goes outside, so that the frames that it makes leave by the tunnel.
    spec.vlinks[1].ends[0] = spec.vlinks[0].ends[0].clone();
    spec.vlinks.remove(0);
    let mut bench = Bench::new(&spec);
    bench.hop.resolve(Some(NextHopInfo { mac: [9; 6], mtu: u16::MAX }));
    let mut tap = bench.connect(&spec.nodes[2].tap_socket, "h2");
    for made in 1..=20 {
        eventually("it rests", || {
            bench.rounds();
            bench.sleeps()
        });
        assert!(tap.out(0, &frame(60, 1)));
        eventually("what its peer sent leaves", || {
            bench.rounds();
            bench.node("h2").ports["eth0"].sent == made
        });
    }
    eventually("it rests", || {
        bench.rounds();
        bench.sleeps()
    });
    bench.receive(1);
    for _ in 0..2 {
        bench.workers.iter_mut().for_each(|worker| {
            worker.round();
        });
    }
    assert!(!bench.sleeps());
    assert_eq!(bench.node("r1").ports["eth0"].received, 1);
}

/// Flushes, and rings as the mux's ringer threads do.
fn flush(link: &mut pdp_mux::channel::PeerConnection, alarm: &mut Alarm) {
    alarm.owner = RungFor::External(0);
    link.flush(alarm, false).unwrap();
    alarm.bells.drain(..).for_each(|(_, bell)| bell.ring().unwrap());
}

/// While the mux has other work, a sleeping peer is woken for
/// frames that are worth it or have waited, and once per sleep.
#[test]
fn sleeping_peer_is_woken_once_per_sleep() {
    let root = tempfile::tempdir().unwrap();
    let (mut peer, mut link, _control) = pair(&root.path().join("memif.sock"), 0, 1);
    link.attach(AttachMode::Runtime, 0);
    let rings = |peer: &Peer| {
        let mut fds = [PollFd::new(&peer.client, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    };
    peer.client.disarm();
    let all = |peer: &mut Peer| {
        let takes = std::iter::repeat_with(|| peer.receive_raw().len());
        takes.take_while(|frames| *frames > 0).sum::<usize>()
    };
    let mut taken = 0;
    for (frames, later_ns, busy, woken) in [
        (1, 0, false, true),
        (1, 0, true, false),
        (WAKE_FRAMES - 1, 0, true, false),
        (WAKE_FRAMES, 0, true, true),
        (1, WAKE_NS - 1, true, false),
        (1, WAKE_NS, true, true),
        (0, WAKE_NS, false, false),
    ] {
        let case = format!("{frames} frames, {later_ns} ns, {busy}");
        let mut alarm = Alarm::default();
        taken += all(&mut peer);
        assert!(peer.client.arm());
        assert!(!rings(&peer));
        (0..frames).for_each(|_| assert!(link.channel.push_one(0, &frame(60, 0)).unwrap()));
        alarm.next(1_000_000, true);
        flush(&mut link, &mut alarm);
        alarm.next(1_000_000 + later_ns, busy);
        flush(&mut link, &mut alarm);
        assert_eq!(rings(&peer), woken, "{case}");
        if woken {
            // It was rung, but has not got the CPU yet.
            rustix::io::read(&peer.client, &mut [0; 8]).unwrap();
            assert!(link.channel.push_one(0, &frame(60, 0)).unwrap());
            flush(&mut link, &mut Alarm::default());
            assert!(!rings(&peer), "{case}: rung again");
        }
        peer.client.disarm();
        flush(&mut link, &mut Alarm::default());
    }
    taken += all(&mut peer);
    assert_eq!(taken, 1 + 1 + 2 * usize::from(WAKE_FRAMES) - 1 + 1 + 1 + 3);
}

/// A peer that only receives, such as a TAP helper in
/// a storm of punts, is also rung when its time comes.
#[test]
fn quiet_sleeping_peer_is_rung_once_per_interval() {
    let root = tempfile::tempdir().unwrap();
    let (mut peer, mut link, _control) = pair(&root.path().join("memif.sock"), 0, 1);
    link.attach(AttachMode::Runtime, 0);
    peer.client.disarm();
    assert!(peer.client.arm());
    assert!(link.channel.push_one(0, &frame(60, 0)).unwrap());
    let mut alarm = Alarm::default();
    alarm.next(10_000_000, true);
    flush(&mut link, &mut alarm);
    link.sent(0, &mut alarm, 10_000_000, 1_000_000).unwrap();
    assert!(alarm.bells.is_empty() && !link.is_armed());
    alarm.next(10_000_000 + WAKE_NS, true);
    link.flush(&mut alarm, false).unwrap();
    assert_eq!(alarm.bells.len(), 1);
    link.sent(0, &mut alarm, 10_000_000 + WAKE_NS, 1_000_000).unwrap();
    assert!(link.is_armed(), "it knows of all");
}

/// However many sleeping peers wait, few are rung at once.
/// After that there is at most one ring in [`WAKE_EACH_NS`].
#[test]
fn mux_wakes_sleepers_at_a_bounded_rate() {
    const SLEEPERS: usize = 40;
    let root = tempfile::tempdir().unwrap();
    let mut pairs: Vec<_> =
        (0..SLEEPERS).map(|number| pair(&root.path().join(number.to_string()), 0, 1)).collect();
    let mut alarm = Alarm::default();
    for (peer, link, _) in &mut pairs {
        link.attach(AttachMode::Runtime, 0);
        peer.client.disarm();
        assert!(peer.client.arm());
        assert!(link.channel.push_one(0, &frame(60, 0)).unwrap());
    }
    let mut woken = vec![];
    let begin_ns = 1_000_000;
    let end_ns = begin_ns + WAKE_NS + WAKE_EACH_NS * SLEEPERS as u64;
    for now_ns in (begin_ns..end_ns).step_by(WAKE_EACH_NS as usize) {
        alarm.next(now_ns, true);
        for (_, link, _) in &mut pairs {
            flush(link, &mut alarm);
        }
        let rings = pairs.iter().filter(|(peer, ..)| {
            let mut fds = [PollFd::new(&peer.client, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        });
        woken.push((now_ns - begin_ns, rings.count()));
    }
    let first = woken.iter().position(|(_, count)| *count > 0).unwrap();
    assert!(woken[first].0 >= WAKE_NS, "{woken:?}");
    assert!(woken[first].1 < 12, "{woken:?}");
    assert!(woken[first..].windows(2).all(|two| two[1].1 <= two[0].1 + 1), "{woken:?}");
    let woken: Vec<_> = woken.into_iter().map(|(_, count)| count).collect();
    assert_eq!(*woken.last().unwrap(), SLEEPERS, "{woken:?}");
}

/// There are more vnets than a round visits. A worker does
/// not go idle before it has visited all that may have work.
#[test]
fn worker_goes_idle_after_visiting_all_vnets() {
    const VNETS: u16 = 40;
    let root = tempfile::tempdir().unwrap();
    let mut bench = Bench::new(&spec(root.path(), None));
    let mut peers = vec![];
    for slot in 0..VNETS {
        let mut spec = two_hosts(root.path(), &format!("v{slot}"), &[]);
        // Directly from one host to the other.
        spec.vlinks[0].ends[1] = spec.vlinks[1].ends[1].clone();
        spec.vlinks.pop();
        let vnet = Live::new(&spec, slot, 0, |_, _| None);
        bench.workers[1].replace(slot, Some(vnet));
        let taps = ["h1", "h2"].map(|host| {
            let node = spec.nodes.iter().find(|node| node.name == host).unwrap();
            bench.connect_to(slot, &node.tap_socket, host)
        });
        peers.push(taps);
    }
    let [_, worker] = &mut bench.workers;
    let mut shown = 0;
    eventually("the last of many was awake and had something", || {
        // All have work, then only the last one.
        for [h1, h2] in &mut peers {
            assert!(h1.out(0, &frame(60, 1)));
            h2.receive();
        }
        while worker.round() {}
        for [_, h2] in &mut peers {
            h2.receive();
        }
        let last = usize::from(VNETS) - 1;
        assert!(peers[last][0].out(0, &frame(60, 2)));
        if (0..VNETS).any(|slot| worker.is_idle(slot)) {
            return false;
        }
        // The worker finds it after some rounds, and continues in later ones.
        while worker.vnets[last].as_ref().unwrap().stats().nodes["h1"].ports["eth0"].sent % 2 > 0 {
            worker.round();
        }
        while worker.round() {}
        assert_eq!(peers[last][1].receive().len(), 1);
        shown += 1;
        shown == 20
    });
}

/// Neither a thread's timer slack nor the addition of poll(2) prolongs a long sleep.
#[test]
fn kernel_does_not_prolong_worker_sleeps() {
    let _mux = start(1);
    let slacks = || -> Vec<String> {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().map(|it| it.unwrap().path());
        let is_worker = |it: &std::path::PathBuf| {
            let name = std::fs::read_to_string(it.join("comm"));
            name.is_ok_and(|name| name == "worker0\n")
        };
        let of = |thread: std::path::PathBuf| {
            let number = thread.file_name()?.to_str()?.to_owned();
            std::fs::read_to_string(format!("/proc/{number}/timerslack_ns")).ok()
        };
        threads.filter(is_worker).filter_map(of).collect()
    };
    eventually("workers have none", || {
        let slacks = slacks();
        !slacks.is_empty() && slacks.iter().all(|slack| slack == "1\n")
    });

    // poll(2) would add a thousandth. The machine may be busy, so one of
    // many sleeps, each ending at a different time, has to end in time.
    let overslept = |number: u64| {
        rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1)).unwrap();
        let (_pool, mut parts) = Packets::pool(1, 64).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let ringers = Ringers::start().unwrap();
        let core = Core::new(parts.remove(0), mpsc::channel().0, wake, ringers).unwrap();
        let (asked, start) = (Duration::from_millis(1000 + 3 * number), Instant::now());
        let left_ns = || asked.saturating_sub(start.elapsed()).as_nanos() as u64;
        while left_ns() > 0 {
            core.connections.sleep(left_ns(), std::iter::empty());
        }
        start.elapsed() - asked
    };
    eventually("a sleep of a second ends within 500 us", || {
        let sleepers: Vec<_> =
            (0..32).map(|number| std::thread::spawn(move || overslept(number))).collect();
        let overslept = sleepers.into_iter().map(|sleeper| sleeper.join().unwrap()).min();
        overslept.is_some_and(|overslept| overslept < Duration::from_micros(500))
    });
}
