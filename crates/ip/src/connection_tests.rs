//! Tests of the routes client against a mirror that follows a script.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net};
use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{
    FromGuest, GroupHop, ResolvedRoute, RouteDecision, ToGuest, VERSION, decode, encode,
};
use tempfile::TempDir;

use crate::fib::Fib;
use crate::{FollowerDeadline, MirrorFollower, MirrorSocket};

const PATIENCE: Duration = Duration::from_secs(30);

/// A guest's side: tables and connection, driven like in the runtime.
struct Side {
    fib: Fib,
    path: PathBuf,
    connection: Option<MirrorSocket>,
    follower: MirrorFollower,
    start: Instant,
    longest: Duration,
}

impl Side {
    fn new(path: &std::path::Path) -> Self {
        Self {
            fib: Fib::default(),
            path: path.into(),
            connection: None,
            follower: MirrorFollower::default(),
            start: Instant::now(),
            longest: Duration::ZERO,
        }
    }

    /// Polls until the condition holds; fails if that takes too long.
    fn until(&mut self, what: &str, mut so: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !so(self) {
            let now = Instant::now();
            assert!(now < end, "not {what}: {:?}", self.follower);
            if self.connection.is_none() {
                self.connection = MirrorSocket::open(&self.path, 3).ok();
            }
            let now_ns = (now - self.start).as_nanos() as u64;
            let mut left = 64;
            let go_on = || {
                left -= 1;
                left > 0
            };
            let due = self.follower.poll(&mut self.fib, self.connection.as_mut(), now_ns, go_on);
            self.longest = self.longest.max(now.elapsed());
            match due {
                Ok(FollowerDeadline::Now) => {}
                Ok(FollowerDeadline::At(_)) => std::thread::sleep(Duration::from_micros(100)),
                Err(_) => {
                    self.connection = None;
                    self.follower.restart();
                }
            }
        }
    }

    fn table(&self) -> BTreeMap<IpNet, ResolvedRoute> {
        let mut cursor = Default::default();
        let mut table = BTreeMap::new();
        loop {
            let routes = self.fib.dump_some(&mut cursor, 7);
            if routes.is_empty() {
                return table;
            }
            for (prefix, target) in routes {
                assert_eq!(table.insert(prefix, target), None, "{prefix} twice");
            }
        }
    }
}

/// The mirror's side of one connection.
struct Peer {
    stream: UnixStream,
    reader: FrameReader,
    heard: std::vec::IntoIter<FromGuest>,
}

impl Peer {
    fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut peer = Self { stream, reader: FrameReader::default(), heard: vec![].into_iter() };
        assert_eq!(peer.hear(), FromGuest::Hello { version: VERSION, guest: 3 });
        peer
    }

    fn push(&mut self, messages: &[ToGuest]) {
        self.stream.write_all(&encode(messages).unwrap()).unwrap();
    }

    fn hear(&mut self) -> FromGuest {
        loop {
            if let Some(message) = self.heard.next() {
                return message;
            }
            if let Some(frame) = self.reader.next_frame().unwrap() {
                self.heard = decode(frame).unwrap().into_iter();
                continue;
            }
            assert_ne!(self.reader.read_from(&mut self.stream).unwrap(), 0, "guest left");
        }
    }

    /// Expects the barrier as next message, apart from reports of used neighbours.
    fn barrier(&mut self, number: u64) {
        self.push(&[ToGuest::Barrier(number)]);
        loop {
            match self.hear() {
                FromGuest::Used(_) => {}
                other => return assert_eq!(other, FromGuest::Applied(number)),
            }
        }
    }

    fn dump(&mut self, number: u64) -> BTreeMap<IpNet, ResolvedRoute> {
        self.push(&[ToGuest::Dump(number)]);
        self.table(number)
    }

    fn table(&mut self, number: u64) -> BTreeMap<IpNet, ResolvedRoute> {
        let mut table = BTreeMap::new();
        loop {
            match self.hear() {
                FromGuest::Used(_) => {}
                FromGuest::Table { dump, routes } => {
                    assert_eq!(dump, number);
                    table.extend(routes);
                }
                FromGuest::TableEnd(dump) => {
                    assert_eq!(dump, number);
                    return table;
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

fn setup() -> (TempDir, PathBuf, UnixListener) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("routes.sock");
    let listener = UnixListener::bind(&path).unwrap();
    (directory, path, listener)
}

/// Runs the mirror's script beside the guest until the script ends.
fn play<T: Send + 'static>(
    side: &mut Side,
    listener: UnixListener,
    script: impl FnOnce(&UnixListener) -> T + Send + 'static,
) -> (UnixListener, T) {
    let thread: JoinHandle<_> = std::thread::spawn(move || {
        let result = script(&listener);
        (listener, result)
    });
    side.until("through with the script", |_| thread.is_finished());
    thread.join().unwrap()
}

fn hop(last: u8) -> GroupHop {
    GroupHop { vport: 1, gateway: Some(IpAddr::from([10, 0, 0, last])), weight: 1 }
}

fn group(id: u32, last: u8) -> ToGuest {
    ToGuest::Group { id, hops: vec![hop(last)], mtu: 0 }
}

fn route(prefix: &str, id: u32) -> ToGuest {
    ToGuest::Route { prefix: prefix.parse().unwrap(), target: RouteDecision::Group(id) }
}

fn to(prefix: &str, last: u8) -> (IpNet, ResolvedRoute) {
    (prefix.parse().unwrap(), ResolvedRoute::Hops(vec![hop(last)]))
}

#[test]
fn follows_snapshot_changes_and_another_mirror() {
    let (_directory, path, listener) = setup();
    let mut side = Side::new(&path);
    let (listener, ()) = play(&mut side, listener, |listener| {
        let mut peer = Peer::accept(listener);
        peer.push(&[
            ToGuest::Begin,
            group(1, 1),
            group(2, 2),
            route("10.1.0.0/16", 1),
            route("10.2.0.0/16", 2),
            route("2001:db8::/32", 2),
            ToGuest::End,
        ]);
        peer.barrier(1);
        let first =
            BTreeMap::from([to("10.1.0.0/16", 1), to("10.2.0.0/16", 2), to("2001:db8::/32", 2)]);
        assert_eq!(peer.dump(10), first);
        peer.push(&[
            group(1, 9),
            ToGuest::RouteGone("10.2.0.0/16".parse().unwrap()),
            ToGuest::Route { prefix: "0.0.0.0/0".parse().unwrap(), target: RouteDecision::Drop },
        ]);
        peer.barrier(2);
        let mut changed = BTreeMap::from([to("10.1.0.0/16", 9), to("2001:db8::/32", 2)]);
        changed.insert("0.0.0.0/0".parse().unwrap(), ResolvedRoute::Drop);
        assert_eq!(peer.dump(11), changed);
        // The mirror dies during another snapshot, which redefines old numbers.
        drop(peer);
        let mut peer = Peer::accept(listener);
        peer.push(&[ToGuest::Begin, group(1, 2), group(2, 77), route("10.3.0.0/16", 1)]);
    });
    side.until("disconnected", |side| side.connection.is_none());
    let table = side.table();
    // The tables are unchanged, except for the one new route.
    assert_eq!(table[&"10.1.0.0/16".parse().unwrap()], ResolvedRoute::Hops(vec![hop(9)]));
    assert_eq!(table[&"2001:db8::/32".parse().unwrap()], ResolvedRoute::Hops(vec![hop(2)]));
    assert_eq!(table[&"10.3.0.0/16".parse().unwrap()], ResolvedRoute::Hops(vec![hop(2)]));
    assert_eq!(table.len(), 4);
    let (_listener, ()) = play(&mut side, listener, |listener| {
        let mut peer = Peer::accept(listener);
        // Messages after the end of a snapshot wait for the sweep, even in the same frame.
        peer.push(&[
            ToGuest::Begin,
            group(5, 5),
            route("10.1.0.0/16", 5),
            ToGuest::End,
            ToGuest::Dump(12),
        ]);
        assert_eq!(peer.table(12), BTreeMap::from([to("10.1.0.0/16", 5)]));
    });
    assert_eq!(side.fib.groups_count(), 1);
}

#[test]
fn snapshot_removes_unnamed_objects() {
    let (_directory, path, listener) = setup();
    let mut side = Side::new(&path);
    let snapshot = |last: u8| {
        vec![
            ToGuest::Begin,
            ToGuest::Forwarding { v4: true, v6: false },
            ToGuest::Vport(pdp_proto::routes::Vport {
                index: last.into(),
                mac: [2; 6],
                mtu: 1500,
                up: true,
                hooked: Default::default(),
                macs: vec![],
                forwards_v4: true,
            }),
            ToGuest::Local { address: IpAddr::from([10, 0, 1, last]), own: true },
            ToGuest::Neighbour {
                vport: last.into(),
                address: IpAddr::from([10, 0, 2, last]),
                mac: Some([2; 6]),
            },
            ToGuest::End,
        ]
    };
    play(&mut side, listener, move |listener| {
        for last in [1, 2] {
            let mut peer = Peer::accept(listener);
            peer.push(&snapshot(last));
            peer.barrier(1);
        }
    });
    let fib = &side.fib;
    assert!(fib.vport(1).is_none() && fib.vport(2).is_some());
    assert!(!fib.is_local_v4(0x0a00_0101) && fib.is_local_v4(0x0a00_0102));
    assert_eq!(fib.neighbours_count(), 1);
    assert!(fib.forwards_v4() && !fib.forwards_v6());
}

#[test]
fn used_neighbours_are_reported() {
    let (_directory, path, listener) = setup();
    let mut side = Side::new(&path);
    let address = IpAddr::from([10, 0, 0, 1]);
    side.fib.apply(ToGuest::Neighbour { vport: 1, address, mac: Some([2; 6]) });
    let resolved =
        crate::group::ResolvedHop { vport: 1, gateway: None, chosen: false, mtu: u32::MAX };
    assert!(side.fib.link_address(&resolved, || address).is_some());
    play(&mut side, listener, move |listener| {
        let mut peer = Peer::accept(listener);
        assert_eq!(peer.hear(), FromGuest::Used(vec![(1, address)]));
    });
}

#[test]
fn unresolved_gateways_are_requested_periodically() {
    let (_directory, path, listener) = setup();
    let mut side = Side::new(&path);
    let address = IpAddr::from([10, 0, 0, 1]);
    let hop = |vport| pdp_proto::routes::GroupHop { vport, gateway: Some(address), weight: 1 };
    side.fib.apply(ToGuest::Group { id: 1, hops: vec![hop(1), hop(2)], mtu: 0 });
    let prefix = "10.1.0.0/16".parse().unwrap();
    side.fib.apply(ToGuest::Route { prefix, target: pdp_proto::routes::RouteDecision::Group(1) });
    let mut values = [0];
    side.fib.lookup_v4(&[0x0a01_0001], &mut values);
    let crate::fib::RouteVerdict::Group(group) = crate::fib::Fib::route(values[0]) else {
        panic!()
    };
    let mut all_resolved: Vec<_> = (0..1000u32)
        .filter_map(|flow| side.fib.next_hop(group, || flow.wrapping_mul(0x85eb_ca6b)))
        .collect();
    all_resolved.sort_by_key(|resolved| resolved.vport);
    all_resolved.dedup_by_key(|resolved| resolved.vport);
    for resolved in all_resolved.iter().chain(&all_resolved) {
        assert_eq!(side.fib.link_address(resolved, || unreachable!()), None);
    }
    play(&mut side, listener, move |listener| {
        let mut peer = Peer::accept(listener);
        assert_eq!(peer.hear(), FromGuest::Wanted(vec![(1, address), (2, address)]));
    });
    assert!(!side.fib.has_wanted());
    // The guest repeats its request, except for gateways that are known or gone.
    all_resolved
        .iter()
        .for_each(|resolved| assert_eq!(side.fib.link_address(resolved, || unreachable!()), None));
    side.fib.apply(ToGuest::Neighbour { vport: 1, address, mac: Some([2; 6]) });
    side.fib.apply(ToGuest::RouteGone(prefix));
    side.fib.apply(ToGuest::GroupGone(1));
    assert_eq!(side.fib.take_wanted(), vec![]);
}

#[test]
fn invalid_message_only_ends_the_connection() {
    let (_directory, path, listener) = setup();
    let mut side = Side::new(&path);
    play(&mut side, listener, |listener| {
        for nonsense in [&[0xff; 64][..], &[3, 0, 0, 0, 9, 9, 9], &[1, 0, 0, 0, 0xff, 0xff]] {
            let mut peer = Peer::accept(listener);
            peer.push(&[route("10.0.0.0/8", 1)]);
            peer.barrier(1);
            peer.stream.write_all(nonsense).unwrap();
            assert_eq!(peer.stream.read(&mut [0; 64]).unwrap(), 0, "hung up");
        }
        let mut peer = Peer::accept(listener);
        // The kernel decides for routes to an unknown group.
        let want = BTreeMap::from([("10.0.0.0/8".parse().unwrap(), ResolvedRoute::Punt)]);
        assert_eq!(peer.dump(1), want);
    });
}

/// A million routes are added, dumped, and removed by a snapshot without them. No
/// single step may delay the guest's packets for long (the test prints the longest).
#[test]
fn million_routes_are_applied_in_short_steps() {
    const COUNT: u32 = 1_000_000;
    let prefix = |number: u32| IpNet::from(Ipv4Net::new((number << 8).into(), 24).unwrap());
    let (_directory, path, listener) = setup();
    let mut side = Side::new(&path);
    let (listener, peer) = play(&mut side, listener, move |listener| {
        let mut peer = Peer::accept(listener);
        let groups: Vec<_> = (0..4).map(|id| group(id, id as u8)).collect();
        peer.push(&[ToGuest::Begin]);
        peer.push(&groups);
        for first in (0..COUNT).step_by(1000) {
            let routes = (first..first + 1000).map(|number| ToGuest::Route {
                prefix: prefix(number),
                target: RouteDecision::Group(number % 4),
            });
            peer.push(&routes.collect::<Vec<_>>());
        }
        peer.push(&[ToGuest::End]);
        peer.barrier(1);
        peer
    });
    assert_eq!(side.fib.routes_count(), (COUNT as usize, 0));
    let (listener, ()) = play(&mut side, listener, move |_| {
        let mut peer = peer;
        let table = peer.dump(1);
        assert_eq!(table.len(), COUNT as usize);
        for number in (0..COUNT).step_by(997) {
            assert_eq!(table[&prefix(number)], ResolvedRoute::Hops(vec![hop((number % 4) as u8)]));
        }
    });
    play(&mut side, listener, move |listener| {
        let mut peer = Peer::accept(listener);
        peer.push(&[ToGuest::Begin, group(1, 1)]);
        let kept = [0, 5, COUNT - 1].map(|number| ToGuest::Route {
            prefix: prefix(number),
            target: RouteDecision::Group(1),
        });
        peer.push(&kept);
        peer.push(&[ToGuest::End]);
        peer.barrier(2);
        assert_eq!(peer.dump(2).len(), 3);
    });
    assert_eq!(side.fib.routes_count(), (3, 0));
    println!("longest step {:?}, tables {} bytes", side.longest, side.fib.tables_bytes());
}
