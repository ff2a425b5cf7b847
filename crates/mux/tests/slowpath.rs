//! Programs that control the mux's engine with arbitrary requests.

mod common;

use std::os::fd::OwnedFd;
use std::path::Path;

use common::engines::*;
use common::*;
use pdp_model::Stats;
use pdp_mux::control::MuxServer;
use pdp_proto::mux::*;
use pdp_proto::slowpath::{
    COUNTERS_MAX, FILTERS_MAX, Filter, FilterAction, FilterCounter, FilterPattern, FilterVerdict,
    PACKET_BYTES_MAX, QueueSetting, QueueState, SlowPathReply as Answer, SlowPathRequest as Ask,
    VERSION, Welcome,
};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

/// A connected program.
struct Program {
    socket: OwnedFd,
    rest: Vec<Answer>,
    number: u64,
}

impl Program {
    fn connect(path: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let (unix, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(unix, kind, flags, None).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).unwrap();
        set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE)).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self { socket, rest: vec![], number: 0 }
    }

    fn start(vnet: &VnetConfig) -> (Self, Welcome) {
        let mut program = Self::connect(socket_of(vnet));
        program.request(&[Ask::Hello(VERSION)]);
        match program.hear() {
            Answer::Welcome(welcome) => (program, welcome),
            other => panic!("{other:?}"),
        }
    }

    fn send(&self, packet: &[u8]) -> bool {
        rustix::net::send(&self.socket, packet, SendFlags::NOSIGNAL).is_ok()
    }

    fn request(&self, requests: &[Ask]) {
        for some in requests.chunks(300) {
            let mut packet = vec![];
            some.iter().for_each(|request| request.encode(&mut packet));
            assert!(self.send(&packet));
        }
    }

    fn hear(&mut self) -> Answer {
        if self.rest.is_empty() {
            let mut bytes = vec![0; PACKET_BYTES_MAX];
            let (_, length) =
                rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::empty()).unwrap();
            let mut packet = &bytes[..length];
            while let Some(answer) = Answer::decode(&mut packet).unwrap() {
                self.rest.push(answer);
            }
        }
        self.rest.remove(0)
    }

    /// Commits changes.
    fn commit(&mut self, changes: &[Ask], sweep: bool) -> Result<u32, (u32, String)> {
        self.number += 1;
        self.request(&[changes, &[Ask::Commit { number: self.number, sweep }]].concat());
        match self.hear() {
            Answer::Done { number, filters } if number == self.number => Ok(filters),
            Answer::Refused { number, id, reason } if number == self.number => Err((id, reason)),
            other => panic!("{other:?}"),
        }
    }

    fn counters(&mut self, first: u32, count: u32) -> Vec<FilterCounter> {
        self.request(&[Ask::Counters { number: 99, first, count }]);
        let mut all = vec![];
        loop {
            match self.hear() {
                Answer::Counters { number: 99, first: at, counters, more } => {
                    assert_eq!(at as usize, first as usize + all.len());
                    all.extend(counters);
                    if !more {
                        return all;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn list(&mut self) -> Vec<Filter> {
        self.request(&[Ask::List { number: 98, first: 0 }]);
        let mut all = vec![];
        loop {
            match self.hear() {
                Answer::Filters { number: 98, filters, more } => {
                    all.extend(filters);
                    if !more {
                        return all;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn queues(&mut self, vport: u8) -> Vec<QueueState> {
        self.request(&[Ask::Queues { number: 97, vport, first: 1 }]);
        let mut all = vec![];
        loop {
            match self.hear() {
                Answer::Queues { number: 97, first, queues, more } => {
                    assert_eq!(usize::from(first), all.len() + 1);
                    all.extend(queues);
                    if !more {
                        return all;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Returns the reason why the program is disconnected.
    fn bye(&mut self) -> String {
        loop {
            if let Answer::Bye(why) = self.hear() {
                return why;
            }
        }
    }
}

fn socket_of(vnet: &VnetConfig) -> &Path {
    let engine = vnet.nodes[0].router.as_ref().unwrap().engine.as_ref().unwrap();
    &engine.slowpath.as_ref().unwrap().socket
}

/// Returns a vnet with a slow path, its mirror, and its hosts.
fn slowpath(
    mux: &MuxServer,
    root: &Path,
    name: &str,
    (filters, counters): (u32, u32),
) -> (VnetConfig, Mirror, [Peer; 3]) {
    let (mut vnet, listener) = engine(root, name);
    let router = vnet.nodes[0].router.as_mut().unwrap();
    let socket = root.join(format!("{name}.control"));
    router.engine.as_mut().unwrap().slowpath = Some(SlowPathConfig { socket, filters, counters });
    put(mux, &vnet);
    let mut mirror = Mirror::accept(&listener);
    mirror.snapshot();
    let peers = [0, 1, 2].map(|node: usize| Peer::tap_of(&vnet.nodes[node]));
    (vnet, mirror, peers)
}

/// Returns the pattern of IPv4 packets to this address.
fn to(address: [u8; 4]) -> FilterPattern {
    let (mut value, mut mask) = ([0; 16], [0; 16]);
    value[4..8].copy_from_slice(&address);
    mask[4..8].fill(0xff);
    FilterPattern::Short { value, mask }
}

fn filter(id: u32, pattern: FilterPattern, action: FilterAction) -> Ask {
    Ask::Set(Filter { id, priority: 1, pattern, action })
}

fn does(verdict: FilterVerdict) -> FilterAction {
    FilterAction { verdict, ..FilterAction::default() }
}

#[test]
fn slow_path_filters_decide_packet_verdicts() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (vnet, _mirror, [mut tap, mut h1, mut h2]) = slowpath(&mux, root.path(), "red", (64, 8));
    let (mut program, welcome) = Program::start(&vnet);
    assert_eq!((welcome.filters_max, welcome.counters, welcome.vports), (64, 8, 2));
    let station = [2, 0, 0, 9, 9, 9];
    let mut data = [0; 16];
    data[..6].copy_from_slice(&station);
    let sent = FilterAction { data, vport: 1, counter: 2, ..does(FilterVerdict::Send) };
    let copied = FilterAction {
        copies_count: 2,
        copies: [0, 1, 0, 0, 0, 0, 0, 0],
        ..does(FilterVerdict::Drop)
    };
    let all = [
        filter(0, to([10, 2, 0, 7]), FilterAction { counter: 0, ..does(FilterVerdict::Drop) }),
        filter(1, to([10, 2, 0, 8]), does(FilterVerdict::Punt)),
        filter(2, to([10, 9, 0, 9]), sent),
        filter(3, to([10, 2, 0, 2]), FilterAction { counter: 1, ..does(FilterVerdict::Pass) }),
        filter(4, to([10, 2, 0, 6]), copied),
    ];
    assert_eq!(program.commit(&all, false), Ok(5));
    let bytes = packet([0; 4], 0).len() as u64;
    for mark in 0..3 {
        assert!(h1.out(0, &packet([10, 2, 0, 7], mark)));
    }
    forwards(&mut h1, &mut h2, 4);
    assert!(h1.out(0, &packet([10, 2, 0, 8], 5)));
    assert_eq!(mark_of(&tap.expect(1)[0].1), 5);
    assert!(h1.out(0, &packet([10, 9, 0, 9], 6)));
    let [(_, frame)] = &h2.expect(1)[..] else { panic!("one frame") };
    assert_eq!((&frame[..6], &frame[6..12]), (&station[..], &router_mac(1)[..]));
    assert_eq!((mark_of(frame), frame[22]), (6, 63));
    // Copies leave as the packet arrived.
    let original = packet([10, 2, 0, 6], 7);
    assert!(h1.out(0, &original));
    assert_eq!(h1.expect(1)[0].1, original);
    assert_eq!(h2.expect(1)[0].1, original);
    let counted = |packets, sent| FilterCounter {
        packets,
        bytes: packets * bytes,
        sent,
        sent_bytes: sent * bytes,
    };
    assert_eq!(
        program.counters(0, 4),
        [counted(3, 0), counted(1, 1), counted(1, 1), counted(0, 0)]
    );
    assert_eq!(dropped(&node_stats(&mux, "red", "r1"), "filtered"), 4);
    // The program sends frames: out of a port unchanged,
    // and in by a port as if they had arrived there.
    let frame = packet([10, 2, 0, 2], 8);
    let by = |out, vport| Ask::Frame { out, vport, queue: 0, bytes: frame.clone() };
    program.request(&[by(true, 0), by(false, 0), by(true, 200)]);
    assert_eq!(h1.expect(1)[0].1, frame);
    let [(_, through)] = &h2.expect(1)[..] else { panic!("one frame") };
    assert_eq!((mark_of(through), &through[..6]), (8, &host_mac(2)[..]));
    assert_eq!(program.counters(1, 1), [counted(2, 2)]);
    // Existing filters.
    let asked: Vec<_> = all
        .iter()
        .map(|ask| match ask {
            Ask::Set(filter) => *filter,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(program.list(), asked);
    assert_eq!(program.commit(&[Ask::Remove(0), Ask::Remove(63)], false), Ok(4));
    assert_eq!(program.list(), asked[1..]);
    let stats = engine_stats(&mux, "red").slowpath.unwrap();
    assert_eq!((stats.programs, stats.filters, stats.fault), (1, 4, None));
    assert_adds_up(&stats_of(&mux));
}

fn stats_of(mux: &MuxServer) -> Stats {
    common::stats(mux)
}

#[test]
fn committed_filters_apply_together_and_outlive_their_client() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (mut vnet, mut mirror, [mut tap, mut h1, mut h2]) =
        slowpath(&mux, root.path(), "red", (2000, 8));
    let (mut program, first) = Program::start(&vnet);
    let drops = |id| filter(id, to([10, 2, 0, 2]), does(FilterVerdict::Drop));
    // Uncommitted changes have no effect. An invalid one makes its whole commit fail.
    program.request(&[drops(1)]);
    forwards(&mut h1, &mut h2, 1);
    let wrong = [
        (filter(2000, to([1; 4]), does(FilterVerdict::Drop)), "the router has 2000 filters"),
        (
            filter(3, to([1; 4]), FilterAction { counter: 8, ..does(FilterVerdict::Pass) }),
            "the router has 8",
        ),
        (
            filter(4, to([1; 4]), FilterAction { vport: 2, ..does(FilterVerdict::Send) }),
            "the router has 2",
        ),
        (filter(5, to([1; 4]), does(FilterVerdict::Send)), "no destination MAC address"),
        (
            filter(
                6,
                to([1; 4]),
                FilterAction { copies_count: 1, copies: [9; 8], ..does(FilterVerdict::Pass) },
            ),
            "vport 9",
        ),
    ];
    for (wrong, why) in wrong {
        let Err((_, reason)) = program.commit(&[drops(7), wrong, drops(8)], false) else {
            panic!("{why} is no reason")
        };
        assert!(reason.contains(why), "{reason}");
        forwards(&mut h1, &mut h2, 2);
    }
    // Each commit in one packet has its own answer, in order.
    let commit = |number, sweep| Ask::Commit { number, sweep };
    let wrong = filter(9, to([1; 4]), does(FilterVerdict::Send));
    let some = [drops(1), commit(21, false), wrong, commit(22, false), commit(23, false)];
    program.request(&[&some[..], &[drops(2), commit(24, false), commit(25, true)]].concat());
    let answers = [(21, Some(1)), (22, None), (23, Some(1)), (24, Some(2)), (25, Some(0))];
    for expected in answers {
        let answer = match program.hear() {
            Answer::Done { number, filters } => (number, Some(filters)),
            Answer::Refused { number, id: 9, .. } => (number, None),
            other => panic!("{other:?}"),
        };
        assert_eq!(answer, expected);
    }
    // Too many filters that are alike.
    let alike: Vec<_> = (0..2000).map(drops).collect();
    let (_, reason) = program.commit(&alike, false).unwrap_err();
    assert!(reason.contains("similar filters"), "{reason}");
    assert_eq!(program.list(), []);
    forwards(&mut h1, &mut h2, 3);
    // Many filters at once.
    let many: Vec<_> = (0..2000_u32)
        .map(|id| filter(id, to([10, 3, (id >> 8) as u8, id as u8]), does(FilterVerdict::Drop)))
        .collect();
    assert_eq!(program.commit(&many, false), Ok(2000));
    // The program dies. Filters stay, even when the vnet changes.
    drop(program);
    vnet.nodes[2].ports[0].mtu = 1400;
    put(&mux, &vnet);
    mirror.settle(2);
    assert!(h1.out(0, &packet([10, 3, 1, 1], 4)));
    eventually("dropped", || dropped(&node_stats(&mux, "red", "r1"), "filtered") == 1);
    // The next program sets its filters, and the others are removed.
    let (mut program, second) = Program::start(&vnet);
    assert_eq!(second.tables, first.tables);
    assert_eq!(program.commit(&[many[7].clone(), drops(2)], true), Ok(2));
    assert_eq!(program.list().iter().map(|it| it.id).collect::<Vec<_>>(), [2, 7]);
    assert!(h1.out(0, &packet([10, 3, 1, 1], 5)));
    assert_eq!(mark_of(&tap.expect(1)[0].1), 5);
    // With a different number of filters, the engine is replaced by an empty one.
    let engine = vnet.nodes[0].router.as_mut().unwrap().engine.as_mut().unwrap();
    engine.slowpath.as_mut().unwrap().filters = 100;
    put(&mux, &vnet);
    assert!(program.bye().contains("removed or replaced"));
    let (mut program, third) = Program::start(&vnet);
    assert_ne!(third.tables, second.tables);
    assert_eq!((third.filters_max, program.list()), (100, vec![]));
    // Without a slow path, no program can connect.
    let socket = socket_of(&vnet).to_path_buf();
    let engine = vnet.nodes[0].router.as_mut().unwrap().engine.as_mut().unwrap();
    engine.slowpath = None;
    put(&mux, &vnet);
    assert!(program.bye().contains("removed or replaced"));
    let address = SocketAddrUnix::new(&socket).unwrap();
    eventually("nobody listens", || {
        let (unix, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket(unix, kind, None).unwrap();
        rustix::net::connect(&socket, &address).is_err()
    });
}

#[test]
fn invalid_slow_path_client_is_disconnected() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (red, _mirror, [_tap, mut h1, mut h2]) = slowpath(&mux, root.path(), "red", (1000, 10));
    let (blue, _other, [_, mut b1, mut b2]) = slowpath(&mux, root.path(), "blue", (64, 0));
    let (mut good, _) = Program::start(&blue);
    let mut mark = 0;
    let mut all_go_on = |h1: &mut Peer, h2: &mut Peer| {
        mark += 1;
        forwards(h1, h2, mark);
        forwards(&mut b1, &mut b2, mark);
        let drop = filter(1, to([10, 3, 0, 1]), does(FilterVerdict::Drop));
        assert_eq!(good.commit(&[drop], true), Ok(1));
    };
    let hello = |asks: &[Ask]| {
        let mut packet = vec![];
        Ask::Hello(VERSION).encode(&mut packet);
        asks.iter().for_each(|ask| ask.encode(&mut packet));
        packet
    };
    let drops = |id| filter(id, to([1; 4]), does(FilterVerdict::Drop));
    let short = Ask::Frame { out: true, vport: 0, queue: 0, bytes: vec![0; 13] };
    let nonsense = [
        (vec![0xff; 64], "wrong length"),
        (vec![0, 4, 77, 0], "unknown message kind 77"),
        (vec![0, 5, 1, 0, 0], "wrong length"),
        (vec![0, 0, 1, 0], "wrong length"),
        (vec![0], "wrong length"),
        (
            {
                let mut packet = vec![];
                Ask::Hello(9).encode(&mut packet);
                packet
            },
            "version 9",
        ),
        (
            {
                let mut packet = vec![];
                drops(1).encode(&mut packet);
                packet
            },
            "first request",
        ),
        (hello(&[Ask::Counters { number: 1, first: 5, count: 6 }]), "the router has 10"),
        (hello(&[Ask::Counters { number: 1, first: 9, count: u32::MAX }]), "the router has 10"),
        (hello(&[short]), "frame of 13 bytes"),
        (vec![0; PACKET_BYTES_MAX + 100], "at most"),
    ];
    for (packet, why) in nonsense {
        let mut program = Program::connect(socket_of(&red));
        assert!(program.send(&packet), "{why}");
        let reason = program.bye();
        assert!(reason.contains(why), "{reason}: not {why}");
        eventually("it is noted", || {
            let fault = engine_stats(&mux, "red").slowpath.unwrap().fault;
            fault.is_some_and(|fault| fault.contains(why))
        });
        all_go_on(&mut h1, &mut h2);
    }
    // Changes without a commit.
    let (mut program, _) = Program::start(&red);
    let some: Vec<_> = (0..400).map(drops).collect();
    let mut packet = vec![];
    some.iter().for_each(|ask| ask.encode(&mut packet));
    while program.send(&packet) {
        all_go_on(&mut h1, &mut h2);
    }
    assert!(program.bye().contains("uncommitted changes"));
    // A program that does not read its answers is no longer
    // heard, and then disconnected. So is one that says nothing.
    let (silent, (slow, _)) = (Program::connect(socket_of(&red)), Program::start(&red));
    let asks: Vec<_> =
        (0..2000).map(|number| Ask::Counters { number, first: 0, count: 10 }).collect();
    set_socket_timeout(&slow.socket, Timeout::Send, Some(std::time::Duration::from_millis(300)))
        .unwrap();
    let mut packet = vec![];
    asks.iter().for_each(|ask| ask.encode(&mut packet));
    while slow.send(&packet) {
        all_go_on(&mut h1, &mut h2);
    }
    eventually("both are gone", || engine_stats(&mux, "red").slowpath.unwrap().programs == 0);
    drop((silent, slow));
    // As many programs as allowed.
    let some: Vec<_> = (0..4).map(|_| Program::start(&red)).collect();
    assert!(Program::connect(socket_of(&red)).bye().contains("4 programs"));
    drop(some);
    // Random bytes.
    let mut random = SmallRng::seed_from_u64(3);
    for _ in 0..30 {
        let (program, _) = soon("a place is free", || {
            let mut program = Program::connect(socket_of(&red));
            program.request(&[Ask::Hello(VERSION)]);
            matches!(program.hear(), Answer::Welcome(_)).then_some((program, ()))
        });
        for _ in 0..20 {
            let mut bytes = vec![0; random.random_range(0..200)];
            random.fill_bytes(&mut bytes);
            if let [high, low, kind, ..] = &mut bytes[..] {
                (*high, *kind) = (0, random.random_range(0..9));
                *low = random.random_range(0..140);
            }
            program.send(&bytes);
        }
        all_go_on(&mut h1, &mut h2);
    }
    assert_adds_up(&stats_of(&mux));
}

/// A filter chooses the queue of the packet's egress port.
#[test]
fn filters_and_slow_path_clients_choose_the_queue() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (mut vnet, _mirror, [_tap, mut h1, mut h2]) = slowpath(&mux, root.path(), "red", (8, 0));
    let queue = |name: &str| QueueConfig { name: name.into(), weight: 1, ..QueueConfig::default() };
    let right = vnet.vlinks.iter_mut().find(|link| link.name == "right").unwrap();
    let r1 = port("r1", 1);
    right.queues = right
        .ends
        .iter()
        .map(|end| match *end == r1 {
            true => ["rest", "a", "b"].map(queue).into(),
            false => vec![],
        })
        .collect();
    put(&mux, &vnet);
    let (mut program, _) = Program::start(&vnet);
    let mut data = [0; 16];
    data[..6].copy_from_slice(&host_mac(2));
    let all = [
        filter(0, to([10, 2, 0, 2]), FilterAction { queue: 2, ..does(FilterVerdict::Pass) }),
        filter(
            1,
            to([10, 9, 0, 1]),
            FilterAction { queue: 3, data, vport: 1, ..does(FilterVerdict::Send) },
        ),
        // If the queue does not exist, the packet is treated as if none were chosen.
        filter(
            2,
            to([10, 9, 0, 2]),
            FilterAction { queue: 9, data, vport: 1, ..does(FilterVerdict::Send) },
        ),
    ];
    assert_eq!(program.commit(&all, false), Ok(3));
    for (address, count) in [([10, 2, 0, 2], 3), ([10, 9, 0, 1], 2), ([10, 9, 0, 2], 4)] {
        for mark in 0..count {
            assert!(h1.out(0, &packet(address, mark)));
        }
    }
    let frame = Ask::Frame { out: true, vport: 1, queue: 3, bytes: packet([1; 4], 9) };
    program.request(&[frame]);
    h2.expect(10);
    let asked = mux.handle(MuxRequest::Stats { vnet: Some("red".into()) }, vec![]);
    let MuxReply::Stats(stats) = asked else { panic!("{asked:?}") };
    let sent: Vec<_> = stats.vnets["red"].nodes["r1"].ports["eth1"]
        .queues
        .iter()
        .map(|queue| queue.sent)
        .collect();
    assert_eq!(sent, [4, 3, 3]);
    assert_adds_up(&stats_of(&mux));
}

/// Returns the link behind the router's second port, and the index of the router's end.
fn right_link(vnet: &mut VnetConfig) -> (&mut Vlink, usize) {
    let right = vnet.vlinks.iter_mut().find(|link| link.name == "right").unwrap();
    let at = right.ends.iter().position(|end| *end == port("r1", 1)).unwrap();
    (right, at)
}

/// Counts before and behind the queue. The difference was dropped there, or still waits.
#[test]
fn filter_counters_count_matched_and_sent_packets() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (mut vnet, _mirror, [_tap, mut h1, mut h2]) = slowpath(&mux, root.path(), "red", (8, 4));
    let (right, at) = right_link(&mut vnet);
    let slow = EgressConfig {
        rate_bps: Some(200_000),
        burst_bytes: 2048,
        queue_frames: 8,
        ..right.leaving[at]
    };
    right.leaving[at] = slow;
    put(&mux, &vnet);
    let (mut program, _) = Program::start(&vnet);
    let mut data = [0; 16];
    data[..6].copy_from_slice(&host_mac(2));
    let counted = |counter, action: FilterAction| FilterAction { counter, ..action };
    let copied = FilterAction {
        copies_count: 1,
        copies: [1, 0, 0, 0, 0, 0, 0, 0],
        ..does(FilterVerdict::Drop)
    };
    let all = [
        filter(0, to([10, 2, 0, 2]), counted(0, does(FilterVerdict::Pass))),
        filter(
            1,
            to([10, 9, 0, 1]),
            counted(1, FilterAction { data, vport: 1, ..does(FilterVerdict::Send) }),
        ),
        filter(2, to([10, 9, 0, 2]), counted(2, copied)),
    ];
    assert_eq!(program.commit(&all, false), Ok(3));
    let mut send = |address, count| {
        for mark in 0..count {
            assert!(h1.out(0, &packet(address, mark)));
        }
    };
    send([10, 9, 0, 2], 5);
    for _ in 0..60 {
        send([10, 9, 0, 1], 1);
        send([10, 2, 0, 2], 1);
    }
    send([10, 2, 0, 2], 40);
    let port = |mux: &MuxServer| stats_of(mux).vnets["red"].nodes["r1"].ports["eth1"].clone();
    let packets = |all: &[FilterCounter]| all.iter().map(|it| it.packets).collect::<Vec<_>>();
    eventually("all are counted", || packets(&program.counters(0, 4)) == [100, 60, 5, 0]);
    eventually("nothing waits", || {
        let some = program.counters(0, 4);
        assert!(some.iter().all(|it| it.sent <= it.packets && it.sent_bytes == it.sent * 60));
        let here = port(&mux);
        here.waiting == 0 && here.sent + here.dropped.values().sum::<u64>() == 165
    });
    let counters = program.counters(0, 4);
    assert_eq!(packets(&counters), [100, 60, 5, 0]);
    let here = port(&mux);
    // Copies count among the port's sent and dropped frames, and nowhere else.
    let copies = here.sent - counters.iter().map(|it| it.sent).sum::<u64>();
    assert_eq!((counters[2].sent, counters[3].sent), (0, 0));
    let missing: u64 = counters[..2].iter().map(|it| it.packets - it.sent).sum();
    assert_eq!(missing + (5 - copies), here.dropped["queue-full"]);
    assert!(missing > 50 && counters[0].sent > 0 && counters[1].sent > 0, "{counters:?}");
    h2.expect(here.sent as usize);
    // Packets that wait while the counters are replaced count nowhere.
    send([10, 2, 0, 2], 40);
    eventually("all are counted", || program.counters(0, 1)[0].packets == 140);
    let router = vnet.nodes[0].router.as_mut().unwrap();
    router.engine.as_mut().unwrap().slowpath.as_mut().unwrap().filters += 1;
    put(&mux, &vnet);
    let (mut program, _) = Program::start(&vnet);
    eventually("nothing waits", || port(&mux).waiting == 0);
    assert_eq!(program.counters(0, 4), [FilterCounter::default(); 4]);
    assert_adds_up(&stats_of(&mux));
}

/// Parameters are set within those of the spec, a batch completely or not
/// at all, as long as the engine's tables last. A program that reads
/// slowly gets the values that all counters had at the moment of reading.
#[test]
fn slow_readers_get_a_consistent_counter_snapshot() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (vnet, _mirror, [_tap, mut h1, mut h2]) =
        slowpath(&mux, root.path(), "red", (8, COUNTERS_MAX));
    let (mut program, _) = Program::start(&vnet);
    let last = COUNTERS_MAX - 1;
    let all = FilterPattern::Short { value: [0; 16], mask: [0; 16] };
    let counts = filter(0, all, FilterAction { counter: last, ..does(FilterVerdict::Pass) });
    assert_eq!(program.commit(&[counts], false), Ok(1));
    program.request(&[Ask::Counters { number: 1, first: 0, count: COUNTERS_MAX }]);
    let mut received = vec![];
    loop {
        let Answer::Counters { number: 1, first, counters, more } = program.hear() else {
            panic!("counters")
        };
        assert_eq!(first as usize, received.len());
        if received.is_empty() {
            // Answers that the socket has no space for are not built yet.
            forwards(&mut h1, &mut h2, 1);
        }
        received.extend(counters);
        if !more {
            break;
        }
    }
    assert_eq!((received.len(), received[last as usize].packets), (COUNTERS_MAX as usize, 0));
    assert_eq!(program.counters(last, 1)[0].packets, 1);
}

#[test]
fn slow_path_client_sets_queues_within_the_spec() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (mut vnet, _mirror, [_tap, mut h1, mut h2]) = slowpath(&mux, root.path(), "red", (8, 4));
    let (right, at) = right_link(&mut vnet);
    right.leaving[at] = EgressConfig {
        rate_bps: Some(200_000),
        burst_bytes: 2048,
        queue_frames: 50,
        ..right.leaving[at]
    };
    let queue = |number: usize| QueueConfig {
        name: format!("q{number}"),
        weight: 10,
        bytes: if number == 2 { 9000 } else { 0 },
        frames: if number == 2 { 4096 } else { 0 },
        ..QueueConfig::default()
    };
    right.queues = vec![vec![]; 2];
    right.queues[at] = (0..300).map(queue).collect();
    put(&mux, &vnet);
    let (mut program, _) = Program::start(&vnet);
    let set = |vport, queue, weight, frames, bytes| {
        Ask::Queue(QueueSetting { vport, queue, weight, frames, bytes })
    };
    let has = |program: &mut Program, queue: usize| {
        let it = program.queues(1)[queue - 1];
        (it.weight, it.frames, it.bytes)
    };
    assert_eq!(program.queues(1).len(), 300);
    assert!(program.queues(0).is_empty());
    assert_eq!((has(&mut program, 1), has(&mut program, 3)), ((10, 50, 0), (10, 4096, 9000)));
    // Together with filters.
    let first =
        filter(0, to([10, 2, 0, 2]), FilterAction { queue: 2, ..does(FilterVerdict::Pass) });
    let all = [first.clone(), set(1, 1, 30, 0, 0), set(1, 2, 0, 2, 0), set(1, 3, 1, 7, 8999)];
    assert_eq!(program.commit(&all, false), Ok(1));
    let expected = [(30, 50, 0), (10, 2, 0), (1, 7, 8999)];
    let three = |program: &mut Program| [1, 2, 3].map(|queue| has(program, queue));
    assert_eq!(three(&mut program), expected);
    // Or none of it.
    let second = filter(1, to([10, 9, 0, 1]), does(FilterVerdict::Drop));
    for (wrong, reason) in [
        (set(1, 301, 1, 1, 0), "queue 301 of vport 1 does not exist (use 1 to 300)"),
        (set(1, 0, 1, 1, 0), "queue 0 of vport 1: queues are numbered from 1"),
        (set(0, 1, 1, 1, 0), "vport 0 has no queues (set `queues` of its link's end in the spec)"),
        (set(2, 1, 1, 1, 0), "vport 2 does not exist: the router has 2, numbered from 0"),
        (set(1, 1, 1001, 1, 0), "queue 1 of vport 1: weight 1001 exceeds 1000"),
        (
            set(1, 1, 1, 51, 0),
            "queue 1 of vport 1 holds at most 50 frames (raise its length in the spec)",
        ),
        (
            set(1, 3, 1, 1, 9001),
            "queue 3 of vport 1 holds at most 9000 bytes (raise its length in the spec)",
        ),
    ] {
        let refused = program.commit(&[second.clone(), set(1, 1, 7, 7, 0), wrong], false);
        assert_eq!(refused, Err((u32::MAX, reason.into())));
        assert_eq!((three(&mut program), program.list().len()), (expected, 1), "{reason}");
    }
    // New parameters apply at once: of twenty frames beyond
    // the burst two wait, although the spec allows more.
    for mark in 0..80 {
        assert!(h1.out(0, &packet([10, 2, 0, 2], mark)));
    }
    eventually("some are dropped", || {
        let it = program.queues(1)[1];
        assert!(it.waiting <= 2);
        it.sent + it.dropped + u64::from(it.waiting) == 80 && it.dropped > 20
    });
    // The link changes, and the spec of the queues. The settings stay, within the new spec.
    let (right, at) = right_link(&mut vnet);
    right.queues[at][0].frames = 40;
    right.queues[at].swap(1, 2);
    right.queues[at][1].bytes = 5000;
    put(&mux, &vnet);
    assert_eq!(three(&mut program), [(30, 40, 0), (1, 7, 5000), (10, 2, 0)]);
    // A new program sets all that it wants, and the rest is reset.
    drop(program);
    let (mut program, _) = Program::start(&vnet);
    assert_eq!(program.commit(&[first.clone(), set(1, 2, 5, 0, 0)], true), Ok(1));
    assert_eq!(three(&mut program), [(10, 40, 0), (5, 4096, 5000), (10, 50, 0)]);
    // New tables have no settings.
    let router = vnet.nodes[0].router.as_mut().unwrap();
    router.engine.as_mut().unwrap().slowpath.as_mut().unwrap().counters += 1;
    put(&mux, &vnet);
    let (mut program, _) = Program::start(&vnet);
    assert_eq!(three(&mut program), [(10, 40, 0), (10, 4096, 5000), (10, 50, 0)]);
    // Invalid requests.
    let many = vec![set(1, 1, 1, 1, 0); 4097];
    program.request(&many);
    assert_eq!(program.bye(), "more than 4096 queues in one commit");
    for (nonsense, reason) in [
        (
            Ask::Queues { number: 1, vport: 2, first: 1 },
            "vport 2 does not exist: the router has 2, numbered from 0",
        ),
        (
            Ask::Queues { number: 1, vport: 1, first: 0 },
            "queue 0 does not exist: queues are numbered from 1",
        ),
    ] {
        let (mut program, _) = Program::start(&vnet);
        program.request(&[nonsense]);
        assert_eq!(program.bye(), reason);
    }
    let sent = stats_of(&mux).vnets["red"].nodes["r1"].ports["eth1"].sent;
    h2.expect(sent as usize);
    assert_adds_up(&stats_of(&mux));
}

/// Frames that are not IP: two bytes select the destination, and one is the hop limit.
#[test]
fn fields_engine_forwards_any_protocol() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let mut vnet = two_hosts(root.path(), "red", &[]);
    let fields = |offset: u16, bytes: u8| KeyFieldConfig { offset, bytes };
    let write = |offset, what| HeaderWrite { offset, what };
    let code = EngineCode::Fields(FieldsConfig {
        key: vec![fields(12, 2), fields(14, 2)],
        write: vec![
            write(16, WriteSource::Hops),
            write(0, WriteSource::Data { from: 0, bytes: 6 }),
            write(6, WriteSource::Source),
            write(14, WriteSource::Data { from: 6, bytes: 2 }),
        ],
        miss: MissPolicy::Drop,
    });
    let socket = root.path().join("control");
    let slowpath = Some(SlowPathConfig { socket, filters: 16, counters: 4 });
    let router = vnet.nodes[0].router.as_mut().unwrap();
    router.engine = Some(EngineConfig { code, memory_bytes: 0, slowpath, power: 0 });
    put(&mux, &vnet);
    let [mut tap, mut h1, mut h2] = [0, 1, 2].map(|node: usize| Peer::tap_of(&vnet.nodes[node]));
    let labelled = |label: u16, hops: u8, mark: u64| {
        let mut frame = [&router_mac(0)[..], &host_mac(1), &[0x88, 0xb5]].concat();
        frame.extend(label.to_be_bytes());
        frame.push(hops);
        frame.extend([7; 40]);
        frame.extend(mark.to_be_bytes());
        frame
    };
    assert!(engine_stats(&mux, "red").synced);
    // Without filters no frame is forwarded.
    assert!(h1.out(0, &labelled(5, 9, 1)));
    eventually("dropped", || dropped(&node_stats(&mux, "red", "r1"), "unmatched") == 1);
    let (mut program, welcome) = Program::start(&vnet);
    assert_eq!(welcome.code, 1);
    let label = |label: u16| {
        let (mut value, mut mask) = ([0; 16], [0; 16]);
        value[..2].copy_from_slice(&[0x88, 0xb5]);
        value[2..4].copy_from_slice(&label.to_be_bytes());
        // Matches only the first port.
        mask[..4].fill(0xff);
        mask[14..].fill(0xff);
        FilterPattern::Short { value, mask }
    };
    let mut data = [0; 16];
    data[..6].copy_from_slice(&host_mac(2));
    data[6..8].copy_from_slice(&77_u16.to_be_bytes());
    let copies = [0, 1, 0, 0, 0, 0, 0, 0];
    let swaps = FilterAction { data, vport: 1, counter: 3, ..does(FilterVerdict::Send) };
    let all = [
        filter(0, label(5), swaps),
        filter(1, label(6), does(FilterVerdict::Punt)),
        filter(2, label(7), FilterAction { copies_count: 1, copies, ..swaps }),
    ];
    assert_eq!(program.commit(&all, false), Ok(3));
    let long = FilterPattern::Long { value: [0; 40], mask: [0; 40] };
    assert!(program.commit(&[filter(3, long, swaps)], false).unwrap_err().1.contains("16 bytes"));
    assert!(h1.out(0, &labelled(5, 9, 2)));
    let mut expected = labelled(77, 8, 2);
    expected[..12].copy_from_slice(&[host_mac(2), [2, 0, 0, 0, 0, 1]].concat());
    assert_eq!(h2.expect(1)[0].1, expected);
    // To the slow path: by a filter's action, and because the hop limit is reached.
    for (label, hops, mark) in [(6, 9, 3), (5, 1, 4)] {
        assert!(h1.out(0, &labelled(label, hops, mark)));
        assert_eq!(mark_of(&tap.expect(1)[0].1), mark);
    }
    // A copy leaves by another port, with that port's address.
    assert!(h1.out(0, &labelled(7, 3, 5)));
    let mut expected = labelled(77, 2, 5);
    expected[..12].copy_from_slice(&[host_mac(2), [2, 0, 0, 0, 0, 1]].concat());
    assert_eq!(h2.expect(1)[0].1, expected);
    expected[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 0]);
    assert_eq!(h1.expect(1)[0].1, expected);
    // Another port, another label, and a frame that is too short.
    assert!(h2.out(0, &labelled(5, 9, 6)));
    assert!(h1.out(0, &labelled(8, 9, 7)));
    assert!(h1.out(0, &labelled(5, 9, 8)[..16]));
    eventually("all are dropped", || {
        let stats = node_stats(&mux, "red", "r1");
        dropped(&stats, "unmatched") == 3 && dropped(&stats, "guest-malformed") == 1
    });
    assert_eq!(program.counters(3, 1)[0].packets, 3);
    assert_adds_up(&stats_of(&mux));
}

/// Requests of one packet may take much more memory than
/// the packet. They are handled one after the other.
#[test]
fn unread_replies_take_little_memory() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (red, _mirror, [_tap, mut h1, mut h2]) =
        slowpath(&mux, root.path(), "red", (8, COUNTERS_MAX));
    // Lists of the most filters, with the longest patterns.
    let all: Vec<_> = (0..FILTERS_MAX)
        .map(|id| {
            let (mut value, mask) = ([0; 40], [255; 40]);
            value[..4].copy_from_slice(&id.to_be_bytes());
            filter(id, FilterPattern::Long { value, mask }, does(FilterVerdict::Drop))
        })
        .collect();
    let lists: Vec<_> = (0..3000).map(|number| Ask::List { number, first: 0 }).collect();
    let others = ["blue", "green"].map(|name| {
        let (vnet, mirror, peers) = slowpath(&mux, root.path(), name, (FILTERS_MAX, 0));
        let (mut program, _) = Program::start(&vnet);
        assert_eq!(program.commit(&all, false), Ok(FILTERS_MAX));
        let mut packet = vec![];
        lists.iter().for_each(|ask| ask.encode(&mut packet));
        assert!(program.send(&packet));
        (program, mirror, peers)
    });
    let (program, _) = Program::start(&red);
    let asks: Vec<_> =
        (0..3000).map(|number| Ask::Counters { number, first: 0, count: COUNTERS_MAX }).collect();
    let mut packet = vec![];
    asks.iter().for_each(|ask| ask.encode(&mut packet));
    assert!(program.send(&packet));
    eventually("it is gone", || {
        forwards(&mut h1, &mut h2, 1);
        let programs = |name| engine_stats(&mux, name).slowpath.unwrap().programs;
        ["red", "blue", "green"].map(programs) == [0; 3]
    });
    drop(others);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let (_, peak) = status.split_once("VmHWM:").unwrap();
    let peak: u64 = peak.split_whitespace().next().unwrap().parse().unwrap();
    // In kilobytes. All requested counters together take
    // 6 GB, and 32 lists of each of the others 1.1 GB.
    assert!(peak < 1 << 20, "{peak} kB");
}

/// The most filters and the most expensive ones. Others keep running, and everything is counted.
#[test]
fn most_expensive_filters_slow_only_their_own_vnet() {
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let (red, _mirror, [mut tap, mut h1, mut h2]) =
        slowpath(&mux, root.path(), "red", (FILTERS_MAX, COUNTERS_MAX));
    let (_blue, _other, [_, mut b1, mut b2]) = slowpath(&mux, root.path(), "blue", (64, 0));
    let (mut program, _) = Program::start(&red);
    // Masks of random single bits take as many steps as allowed. Refused filters are left out.
    let mut random = SmallRng::seed_from_u64(5);
    let mut kept = 0;
    for part in 0..40 {
        let some: Vec<_> = (0..100)
            .map(|at| {
                let mut mask = [0; 16];
                for _ in 0..5 {
                    mask[random.random_range(0..16_usize)] |= 1 << random.random_range(0..8);
                }
                let pattern = FilterPattern::Short { value: random.random(), mask };
                let action = FilterAction { counter: part * 100 + at, ..does(FilterVerdict::Pass) };
                Ask::Set(Filter {
                    id: part * 100 + at,
                    priority: random.random_range(0..9),
                    pattern,
                    action,
                })
            })
            .collect();
        kept += u32::from(program.commit(&some, false).is_ok());
    }
    assert!(kept > 1, "{kept}");
    let (mut sent, mut received, mut last) = (0, 0, [0; 2]);
    // Frames that a visit has no time for precede later ones.
    let mut take = |of: [&mut Peer; 2]| {
        for (peer, last) in of.into_iter().zip(&mut last) {
            for (_, frame) in peer.receive() {
                assert!(mark_of(&frame) > *last, "{} after {last}", mark_of(&frame));
                (received, *last) = (received + 1, mark_of(&frame));
            }
        }
    };
    for round in 0..60 {
        for _ in 0..250 {
            let to = [10, 2, random.random(), random.random()];
            sent += u64::from(h1.out(0, &packet(to, sent + 1)));
        }
        take([&mut h2, &mut tap]);
        if round % 10 == 0 {
            forwards(&mut b1, &mut b2, round);
            assert_eq!(program.counters(0, COUNTERS_MAX).len(), COUNTERS_MAX as usize);
        }
    }
    eventually("all is counted", || {
        take([&mut h2, &mut tap]);
        let stats = node_stats(&mux, "red", "r1");
        let port = &stats.ports["eth0"];
        port.received >= sent && stats.in_flight == 0
    });
    assert!(received > 0);
    assert_adds_up(&stats_of(&mux));
}

/// As many filters as a node may have: eight vrouters with the most each, one batch for each.
#[test]
fn node_holds_a_million_filters() {
    const VROUTERS: u32 = 8;
    let (root, mux) = (tempfile::tempdir().unwrap(), start(1));
    let drops = |id: u32| {
        let [_, high, middle, low] = id.to_be_bytes();
        filter(id, to([10, 3 + high, middle, low]), does(FilterVerdict::Drop))
    };
    let all: Vec<_> = (0..FILTERS_MAX).map(drops).collect();
    let mut vrouters: Vec<_> = (0..VROUTERS)
        .map(|at| slowpath(&mux, root.path(), &format!("v{at}"), (FILTERS_MAX, 0)))
        .collect();
    let programs: Vec<_> = vrouters
        .iter()
        .map(|(vnet, ..)| {
            let (mut program, _) = Program::start(vnet);
            assert_eq!(program.commit(&all, true), Ok(FILTERS_MAX));
            program
        })
        .collect();
    let mut bytes = 0;
    for (vnet, _, [_, h1, h2]) in &mut vrouters {
        for id in [0, FILTERS_MAX - 1] {
            let [_, high, middle, low] = id.to_be_bytes();
            assert!(h1.out(0, &packet([10, 3 + high, middle, low], 1)));
        }
        forwards(h1, h2, 2);
        eventually("dropped", || dropped(&node_stats(&mux, &vnet.name, "r1"), "filtered") == 2);
        bytes += engine_stats(&mux, &vnet.name).slowpath.unwrap().memory_bytes;
    }
    // The quota counts more for each filter.
    assert!(bytes / u64::from(VROUTERS * FILTERS_MAX) < 192, "{bytes} bytes");
    drop(programs);
}
