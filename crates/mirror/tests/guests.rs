//! Guests that connect, disconnect, are slow or hostile; limits; pdpd's requests.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::guest::{Guest, Shared};
use common::reference::{equal, of_kernel};
use common::{Mirror, Netns, Process, eventually, many};
use pdp_proto::mirror::TableSource;
use pdp_proto::routes::{FromGuest, ResolvedRoute, VERSION, encode};

fn connect(mirror: &Mirror, number: u32) -> Guest {
    let guest = Guest::connect(&mirror.config.routes_socket, number);
    eventually("a snapshot", || guest.snapshots() == 1);
    guest
}

#[test]
fn late_guests_get_the_same_state() {
    let netns = Netns::new(2);
    let mirror = Mirror::new(&netns);
    let early = connect(&mirror, 0);
    netns.batch(&many("add", 5000, "via 172.16.0.2"));
    netns.ip("route add 10.0.0.0/8 nexthop via 172.16.0.2 nexthop via 172.16.1.2 weight 3");
    netns.ip("neigh add 172.16.0.2 lladdr 02:00:00:00:00:01 dev e0");
    equal(&netns, &early);
    let late_guest = connect(&mirror, 1);
    assert_eq!(late_guest.state(), early.state());
    assert_eq!(late_guest.state().forwarding, (true, true));
    eventually("both synced", || {
        mirror.status().stats.guests.iter().filter(|g| g.synced).count() == 2
    });
    let status = mirror.status();
    assert!(status.stats.guests.iter().all(|g| g.backlog_bytes == 0), "{status:?}");
    assert!(status.stats.guests.iter().any(|g| g.guest == 0 && g.apply_us_max > 0), "{status:?}");
    assert_eq!((status.stats.routes_v4, status.stats.groups), (5003, 6), "{status:?}");
    // Everything that a barrier stands for arrives before it.
    netns.ip("route del 10.0.0.0/8");
    equal(&netns, &early);
    eventually("a barrier at last", || early.shared.lock().unwrap().at_barrier);
}

#[test]
fn changes_during_a_snapshot_are_applied() {
    let netns = Netns::new(2);
    let mirror = Mirror::new(&netns);
    netns.batch(&many("add", 100_000, "via 172.16.0.2"));
    netns.ip("route add 1.0.0.0/8 via 172.16.0.2");
    eventually("all routes", || mirror.status().stats.routes_v4 > 100_000);
    let routes = mirror.status().stats.routes_v4;
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    // The guest stops reading, so the snapshot stops in the middle.
    let lock = guest.shared.lock().unwrap();
    eventually("a snapshot half told", || {
        mirror.status().stats.guests.first().is_some_and(|guest| guest.backlog_bytes > 0)
    });
    netns.ip("route del 1.0.0.0/8");
    netns.ip("route replace 20.0.0.0/32 via 172.16.1.2");
    eventually("one route less", || mirror.status().stats.routes_v4 < routes);
    drop(lock);
    eventually("a snapshot", || guest.snapshots() == 1);
    equal(&netns, &guest);
}

#[test]
fn guest_is_synced_only_after_applying() {
    let netns = Netns::new(1);
    let mirror = Mirror::new(&netns);
    let shared = Arc::<Mutex<Shared>>::default();
    shared.lock().unwrap().silent = true;
    let guest = Guest::reconnect(&mirror.config.routes_socket, 0, shared);
    eventually("a snapshot", || guest.snapshots() == 1);
    let synced = || mirror.status().stats.guests[0].synced;
    assert!(!synced());
    let asked_early = std::thread::scope(|scope| {
        let comparison = scope.spawn(|| mirror.routes(TableSource::Diff(0), None));
        // Long enough for a mirror that does not wait to fail. A mirror that waits always passes.
        std::thread::sleep(Duration::from_millis(300));
        let asked_early = guest.shared.lock().unwrap().dumps;
        guest.confirm();
        assert_eq!(comparison.join().unwrap().unwrap(), []);
        asked_early
    });
    assert_eq!(asked_early, 0);
    eventually("synced", synced);
}

#[test]
fn many_routes_follow_their_shared_nexthop_group() {
    let netns = Netns::new(2);
    netns.ip("nexthop add id 5 via 172.16.0.2 dev e0");
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror, 0);
    netns.sysctl("net.ipv4.nexthop_compat_mode=0");
    netns.batch(&many("add", 5000, "nhid 5"));
    equal(&netns, &guest);
    let before = guest.shared.lock().unwrap().messages;
    netns.ip("nexthop replace id 5 via 172.16.1.9 dev e1");
    equal(&netns, &guest);
    let received = guest.shared.lock().unwrap().messages - before;
    assert!(received < 10, "{received} messages for one group");
}

#[test]
fn restarted_mirror_sweeps_stale_routes() {
    let netns = Netns::new(2);
    let mut mirror = Mirror::new(&netns);
    netns.batch(&many("add", 2000, "via 172.16.0.2"));
    let guest = connect(&mirror, 0);
    equal(&netns, &guest);
    mirror.process.0.kill().unwrap();
    let shared = guest.leave();
    let before = shared.lock().unwrap().state.clone();
    netns.batch(&many("del", 1000, ""));
    netns.ip("route add 10.0.0.0/8 via 172.16.1.2");
    mirror.restart();
    assert_eq!(shared.lock().unwrap().state, before);
    let guest = Guest::reconnect(&mirror.config.routes_socket, 0, shared);
    eventually("a second snapshot", || guest.snapshots() == 2);
    equal(&netns, &guest);
    let groups = guest.state().groups;
    assert!(groups.keys().all(|id| !before.groups.contains_key(id)), "numbers are used again");
}

#[test]
fn slow_guest_is_disconnected_without_delaying_others() {
    let netns = Netns::new(2);
    let mirror = Mirror::with(&netns, u64::MAX, &[("BACKLOG", 1 << 20)]);
    let quick = connect(&mirror, 0);
    let mut slow = UnixStream::connect(&mirror.config.routes_socket).unwrap();
    slow.write_all(&encode(&[FromGuest::Hello { version: VERSION, guest: 1 }]).unwrap()).unwrap();
    eventually("two guests", || mirror.status().stats.guests.len() == 2);
    netns.batch(&many("add", 150_000, "via 172.16.0.2"));
    eventually("the slow one is gone", || mirror.status().stats.guests.len() == 1);
    equal(&netns, &quick);
    assert_eq!(quick.snapshots(), 1, "the quick one was let go too");
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).unwrap();
    let again = connect(&mirror, 1);
    assert_eq!(again.state(), quick.state());
}

#[test]
fn hostile_guests_are_disconnected() {
    let netns = Netns::new(1);
    let mirror = Mirror::new(&netns);
    let good = connect(&mirror, 0);
    let hello = encode(&[FromGuest::Hello { version: VERSION, guest: 1 }]).unwrap();
    let bad: [Vec<u8>; 5] = [
        encode(&[FromGuest::Hello { version: 9, guest: 1 }]).unwrap(),
        encode(&[FromGuest::Applied(3)]).unwrap(),
        [hello.clone(), hello.clone()].concat(),
        [hello.clone(), u32::MAX.to_le_bytes().to_vec()].concat(),
        [hello, vec![3, 0, 0, 0, 0xff, 0xff, 0xff]].concat(),
    ];
    for bytes in bad {
        let mut stream = UnixStream::connect(&mirror.config.routes_socket).unwrap();
        stream.write_all(&bytes).unwrap();
        // The connection ends, whether or not something was sent before.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    good.say(FromGuest::Applied(u64::MAX));
    good.say(FromGuest::Used(vec![(9, "1.2.3.4".parse().unwrap()); 1000]));
    netns.ip("route add 10.0.0.0/8 via 172.16.0.2");
    equal(&netns, &good);
    assert_eq!(mirror.status().stats.guests.len(), 1);
}

#[test]
fn routes_beyond_the_limit_are_counted_and_retried() {
    let netns = Netns::new(1);
    let mirror = Mirror::with(&netns, 100, &[]);
    let guest = connect(&mirror, 0);
    netns.batch(&many("add", 150, "via 172.16.0.2"));
    eventually("refused routes", || mirror.status().stats.routes_refused >= 50);
    let status = mirror.status();
    assert_eq!(status.stats.routes_v4 + status.stats.routes_v6, 100, "{status:?}");
    eventually("the guest has the rest", || guest.state().routes.len() >= 100);
    assert_eq!(guest.state().routes.len(), 100);
    netns.batch(&many("del", 90, ""));
    eventually("room for all", || mirror.status().stats.routes_refused == 0);
    equal(&netns, &guest);
}

#[test]
fn tables_and_differences_can_be_queried() {
    let netns = Netns::new(2);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror, 7);
    netns.batch(&many("add", 3000, "via 172.16.0.2"));
    netns.ip("route add blackhole 10.9.0.0/16");
    netns.ip("-6 route add 2001:db8::/32 via fd00:1::2");
    equal(&netns, &guest);
    let reference = of_kernel(&netns);

    let rows = mirror.routes(TableSource::Kernel, None).unwrap();
    let kernel = rows.into_iter().map(|row| (row.prefix, row.kernel.unwrap())).collect();
    assert_eq!(reference.routes, kernel);
    let rows = mirror.routes(TableSource::Guest(7), None).unwrap();
    let reported = rows.into_iter().map(|row| (row.prefix, row.guest.unwrap())).collect();
    assert_eq!(reference.routes, reported);

    let rows = mirror.routes(TableSource::Kernel, Some("10.9.1.0/24")).unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].kernel, Some(ResolvedRoute::Drop));
    assert!(mirror.routes(TableSource::Guest(8), None).unwrap_err().contains("guest 8"));

    assert_eq!(mirror.routes(TableSource::Diff(7), None).unwrap(), []);
    let prefix = "2001:db8::/32".parse().unwrap();
    guest.shared.lock().unwrap().lie = Some(prefix);
    let rows = mirror.routes(TableSource::Diff(7), None).unwrap();
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert_eq!(rows[0].prefix, prefix);
    assert_eq!(rows[0].guest, Some(ResolvedRoute::Drop));
    assert_eq!(rows[0].kernel.as_ref(), reference.routes.get(&prefix));
    assert_eq!(mirror.routes(TableSource::Diff(7), Some("10.0.0.0/8")).unwrap(), []);
}

#[test]
fn changing_routes_are_not_reported_as_differences() {
    let netns = Netns::new(2);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror, 0);
    netns.batch(&many("add", 20_000, "via 172.16.0.2"));
    equal(&netns, &guest);
    let lines: String =
        (0..20).map(|i| many("replace", 1000, &format!("via 172.16.{}.3", i % 2))).collect();
    std::thread::scope(|scope| {
        let churn = scope.spawn(|| netns.batch(&lines));
        while !churn.is_finished() {
            let rows = mirror.routes(TableSource::Diff(0), None).unwrap();
            assert!(rows.is_empty(), "{} rows, the first {:?}", rows.len(), rows[0]);
        }
    });
}

/// Life of a used neighbour entry: the kernel is asked to
/// confirm it, asks the neighbour, and gets no answer.
fn used_neighbour(netns: &Netns, guest: &Guest) {
    netns.ip("neigh replace 172.16.0.9 lladdr 02:00:00:00:00:09 dev e0 nud stale");
    let address = "172.16.0.9".parse().unwrap();
    eventually("known", || guest.state().neighbours.contains_key(&(0, address)));
    guest.say(FromGuest::Used(vec![(0, address)]));
    eventually("asked", || {
        let shown = netns.ip("neigh show 172.16.0.9 dev e0");
        shown.contains("DELAY") || shown.contains("PROBE")
    });
    eventually("not known any more", || !guest.state().neighbours.contains_key(&(0, address)));
}

#[test]
fn used_neighbours_are_confirmed() {
    let netns = Netns::new(1);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror, 0);
    used_neighbour(&netns, &guest);
    // A missing entry is not made.
    guest.say(FromGuest::Used(vec![(0, "172.16.0.77".parse().unwrap())]));
    netns.ip("route add 10.0.0.0/8 via 172.16.0.2");
    equal(&netns, &guest);
    assert_eq!(netns.ip("neigh show 172.16.0.77"), "");
}

/// In a user namespace, the mirror keeps one capability there, and none of the host's.
#[test]
fn privileges_are_dropped_in_a_user_namespace() {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--net", "--map-root-user", "--kill-child", "sleep", "600"]);
    let sleeper = Process(unshare.spawn().unwrap());
    let pid = sleeper.0.id();
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    eventually("namespaces", || namespace(&pid.to_string()) != namespace("self"));
    eventually("a user map", || {
        std::fs::read_to_string(format!("/proc/{pid}/uid_map")).is_ok_and(|map| !map.is_empty())
    });
    let netns = Netns::of_process(1, pid);
    let mirror = Mirror::of_process(&netns, pid);
    let guest = connect(&mirror, 0);
    netns.ip("route add 10.0.0.0/8 via 172.16.0.2");
    equal(&netns, &guest);

    let mirror_pid = mirror.process.0.id();
    let status = std::fs::read_to_string(format!("/proc/{mirror_pid}/status")).unwrap();
    let line = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_string()
    };
    const NET_ADMIN_ONLY: &str = "0000000000001000";
    assert_eq!(line("CapEff:"), NET_ADMIN_ONLY);
    assert_eq!(line("CapPrm:"), NET_ADMIN_ONLY);
    assert_eq!(line("NoNewPrivs:"), "1");
    let user = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
    assert_eq!(user(mirror_pid), user(pid));
    used_neighbour(&netns, &guest);
}
