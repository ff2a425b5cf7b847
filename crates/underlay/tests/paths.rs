//! Paths of tunnels in network namespaces of the test's own. Needs root.

mod common;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::{Place, ends, eventually, problem};
use pdp_model::UnderlayProblem;
use pdp_underlay::{ASKS_MAX, NextHopInfo, TUNNELS_MAX, Underlay};

#[test]
fn next_hop_is_the_remote_on_the_same_link() {
    let place = Place::enter("link");
    let underlay = Underlay::start().unwrap();
    let mac = place.mac("out1", "eth0");
    for ends in [ends("a", "10.9.1.1", "10.9.1.2"), ends("a", "fd00:1::1", "fd00:1::2")] {
        assert_eq!(problem(&underlay, ends), None, "never requested");
        let hop = underlay.next_hop(ends.0, ends.1, ends.2, 1500).unwrap();
        eventually("it is known", || hop.find().is_some());
        assert_eq!(hop.find(), Some(NextHopInfo { mac, mtu: u16::MAX }));
        assert_eq!(underlay.path(ends), Some(NextHopInfo { mac, mtu: 1500 }));
        assert_eq!(problem(&underlay, ends), None);
        place.exec("out1", "ip link set dev eth0 address 02:00:00:00:99:01");
        place.exec("node", "ip neigh flush dev a");
        eventually("the new address", || hop.find().is_some_and(|hop| hop.mac[4..] == [0x99, 1]));
        place.exec("out1", &format!("ip link set dev eth0 address {}", words(mac)));
        place.exec("out1", "ip addr replace fd00:1::2/64 dev eth0 nodad");
        place.exec("node", "ip neigh flush dev a");
        eventually("the old address", || hop.find().is_some_and(|hop| hop.mac == mac));
    }
}

/// Returns a MAC address as ip-link(8) takes it.
fn words(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[test]
fn gateway_follows_the_route() {
    let place = Place::enter("gateway");
    let underlay = Underlay::start().unwrap();
    let there = ends("a", "10.9.1.1", "10.64.0.1");
    let _hop = underlay.next_hop(there.0, there.1, there.2, 1500).unwrap();
    let is = |what: &str, expected: Option<[u8; 6]>, expected_problem| {
        eventually(what, || {
            underlay.path(there).map(|hop| hop.mac) == expected
                && problem(&underlay, there) == expected_problem
        });
        // Then only notifications lead to queries.
        eventually("rest", || {
            let queries = underlay.queries();
            std::thread::sleep(Duration::from_millis(300));
            underlay.queries() == queries
        });
    };
    let gateway = Some(place.mac("out1", "eth0"));
    is("no route", None, Some(UnderlayProblem::NoRoute));
    place.exec("node", "ip route add 10.64.0.0/16 via 10.9.1.2");
    is("a gateway", gateway, None);
    // The next hop may be of the other family (RFC 8950).
    place.exec("node", "ip neigh replace fd00:1::9 lladdr 02:00:00:00:00:09 dev a");
    place.exec("node", "ip route replace 10.64.0.0/16 via inet6 fd00:1::9 dev a");
    is("an IPv6 gateway", Some([2, 0, 0, 0, 0, 9]), None);
    place.exec("node", "ip nexthop add id 7 via 10.9.1.2 dev a");
    place.exec("node", "ip route replace 10.64.0.0/16 nhid 7");
    is("a nexthop object", gateway, None);
    place.exec("node", "ip route replace 10.64.0.0/16 via 10.9.2.2");
    is("by another device", None, Some(UnderlayProblem::NoRoute));
    place.exec("node", "ip route add 10.64.0.0/16 via 10.9.1.2 table 7");
    is("no rule", None, Some(UnderlayProblem::NoRoute));
    place.exec("node", "ip rule add to 10.64.0.0/16 lookup 7");
    is("a rule and its table", gateway, None);
}

/// The path's MTU comes from routers' errors, the route, and the device.
#[test]
fn path_mtu_is_the_smallest_on_the_path() {
    let place = Place::enter("mtu");
    place.add_far();
    place.exec("node", "ip route add 10.9.7.0/24 via 10.9.1.2");
    place.exec("node", "ip route add fd00:7::/64 via fd00:1::2");
    let underlay = Underlay::start().unwrap();
    let paths = [ends("a", "10.9.1.1", "10.9.7.2"), ends("a", "fd00:1::1", "fd00:7::2")];
    let hops = paths.map(|(index, from, to)| underlay.next_hop(index, from, to, 1500).unwrap());
    let is = |what: &str, mtu: u16| {
        let path_bytes = mtu.into();
        let expected = UnderlayProblem::PathMtu { path_bytes, packet_bytes: 1500 };
        let expected = (mtu < 1500).then_some(expected);
        eventually(what, || {
            // Only used paths are measured.
            hops.iter().for_each(|hop| _ = hop.find());
            paths.iter().all(|&path| {
                underlay.path(path).is_some_and(|path| path.mtu == mtu)
                    && problem(&underlay, path) == expected
            })
        });
    };
    is("the devices' MTU", 1500);
    place.exec("out1", "ip link set dev far mtu 1400");
    is("a router's error", 1400);
    place.exec("out1", "ip link set dev far mtu 1500");
    place.exec("node", "ip route flush cache");
    place.exec("node", "ip -6 route flush cache");
    is("the devices' MTU again", 1500);
    place.exec("node", "ip route replace 10.9.7.0/24 via 10.9.1.2 mtu 1350");
    place.exec("node", "ip route replace fd00:7::/64 via fd00:1::2 mtu 1350");
    is("the route's MTU", 1350);
    place.exec("node", "ip link set dev a mtu 1300");
    is("the device's MTU", 1300);
}

#[test]
fn device_and_address_problems_are_reported() {
    let place = Place::enter("device");
    let underlay = Underlay::start().unwrap();
    let there = ends("a", "10.9.1.7", "10.9.1.2");
    let hop = underlay.next_hop(there.0, there.1, there.2, 1500).unwrap();
    let is = |what: &str, expected| {
        eventually(what, || {
            problem(&underlay, there) == expected
                && (hop.find().is_some() && underlay.path(there).is_some()) == expected.is_none()
        });
    };
    is("no address", Some(UnderlayProblem::NoAddress));
    place.exec("node", "ip addr add 10.9.1.7/24 dev a");
    is("nothing", None);
    place.exec("node", "ip addr del 10.9.1.7/24 dev a");
    eventually("no address", || problem(&underlay, there) == Some(UnderlayProblem::NoAddress));
    place.exec("node", "ip addr add 10.9.1.7/24 dev a");
    is("nothing", None);
    place.exec("out1", "ip link set dev eth0 down");
    eventually("no carrier", || problem(&underlay, there) == Some(UnderlayProblem::NoCarrier));
    assert_eq!(underlay.path(there), None);
    place.exec("out1", "ip link set dev eth0 up");
    is("nothing", None);
    place.exec("node", "ip link set dev a down");
    is("down", Some(UnderlayProblem::Down));
    place.exec("node", "ip link set dev a up");
    is("nothing", None);
    place.exec("node", "ip link del dev a");
    is("no device", Some(UnderlayProblem::Down));
}

#[test]
fn silent_next_hops_are_reported() {
    let place = Place::enter("silent");
    place.exec("node", "ip route add 10.64.0.0/16 via 10.9.1.98");
    let underlay = Underlay::start().unwrap();
    for (remote, router) in [("10.9.1.99", false), ("10.64.0.1", true), ("fd00:1::99", false)] {
        let local = if remote.contains(':') { "fd00:1::1" } else { "10.9.1.1" };
        let there = ends("a", local, remote);
        let hop = underlay.next_hop(there.0, there.1, there.2, 1500).unwrap();
        let silent = Some(UnderlayProblem::Unanswered { router });
        eventually("nobody answers", || {
            hop.find().is_none() && problem(&underlay, there) == silent
        });
    }
    place.exec("out1", "ip addr add 10.9.1.98/24 dev eth0");
    let there = ends("a", "10.9.1.1", "10.64.0.1");
    let hop = underlay.next_hop(there.0, there.1, there.2, 1500).unwrap();
    eventually("the gateway answers", || {
        hop.find().is_some() && problem(&underlay, there).is_none()
    });
}

#[test]
fn unused_tunnels_make_room() {
    let _place = Place::enter("room");
    let underlay = Underlay::start().unwrap();
    let (index, local, remote) = ends("a", "10.9.1.1", "10.9.1.2");
    let known = underlay.next_hop(index, local, remote, 1500).unwrap();
    let take = |number: u32| {
        let remote = IpAddr::from((0x0a40_0000 + number).to_be_bytes());
        underlay.next_hop(index, local, remote, 1500)
    };
    let mut hops: Vec<_> = (1..TUNNELS_MAX as u32).map(|number| take(number).unwrap()).collect();
    assert!(take(0).is_none());
    assert!(take(1).is_some(), "the same tunnel again");
    hops.truncate(TUNNELS_MAX - 2);
    hops.push(take(0).unwrap());
    assert!(take(TUNNELS_MAX as u32).is_none());
    eventually("a tunnel among them works", || known.find().is_some());
}

/// Sent datagrams have a limit per second, even if thousands of tunnels are new at once.
#[test]
fn new_tunnels_share_the_limit_of_datagrams() {
    let place = Place::enter("asks");
    place.exec("node", "ip route add 10.64.0.0/16 via 10.9.1.2");
    let underlay = Underlay::start().unwrap();
    let (index, local, _) = ends("a", "10.9.1.1", "10.9.1.2");
    let start = Instant::now();
    let hops: Vec<_> = (0..4 * ASKS_MAX as u16)
        .map(|number| {
            let [high, low] = number.to_be_bytes();
            underlay.next_hop(index, local, [10, 64, high, low].into(), 1500).unwrap()
        })
        .collect();
    let sent = || {
        let text = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
        let at = lines.next().unwrap().split(' ').position(|name| name == "OutDatagrams");
        let values = lines.next().unwrap();
        values.split(' ').nth(at.unwrap()).unwrap().parse::<u64>().unwrap()
    };
    let within_limit = || {
        let sent = sent();
        let seconds = start.elapsed().as_secs() + 2;
        assert!(sent <= ASKS_MAX as u64 * seconds, "{sent} in {seconds} s");
    };
    eventually("all are known", || {
        within_limit();
        hops.iter().all(|hop| hop.find().is_some())
    });
    while start.elapsed() < Duration::from_secs(2) {
        within_limit();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(sent() > 0);
}

/// Thousands of unused tunnels, while neighbours and routes change.
#[test]
fn underlay_changes_cost_idle_tunnels_little_cpu() {
    let place = Place::enter("churn");
    let underlay = Underlay::start().unwrap();
    let (index, local, _) = ends("a", "10.9.1.1", "10.9.1.2");
    place.exec("node", "ip route add 10.64.0.0/16 via 10.9.1.2");
    let remote = |number: u16| [10, 64, (number >> 8) as u8, number as u8].into();
    const TUNNELS: u64 = 4096;
    let hops: Vec<_> = (0..TUNNELS as u16)
        .map(|number| underlay.next_hop(index, local, remote(number), 1500).unwrap())
        .collect();
    eventually("all are known", || hops.iter().all(|hop| hop.find().is_some()));
    // The CPU time of each thread with this name. Other tests have threads of their own.
    let cpu_ns = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
        let named = tasks.filter(|task| {
            std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == "underlay")
        });
        let used = |task: &std::path::Path| {
            let text = std::fs::read_to_string(task.join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        };
        named.filter_map(|task| Some((task.clone(), used(&task)?))).collect::<BTreeMap<_, _>>()
    };
    for kind in ["neigh", "route"] {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = |number: usize| match kind {
            "neigh" => format!("neigh replace 10.9.1.9 lladdr 2:0:0:0:0:{:x} dev a\n", number % 2),
            _ => format!("route {} 10.65.0.0/16 via 10.9.1.2\n", ["add", "del"][number % 2]),
        };
        std::fs::write(file.path(), (0..1000).map(line).collect::<String>()).unwrap();
        eventually("they are idle", || {
            let before = underlay.queries();
            std::thread::sleep(Duration::from_millis(2500));
            underlay.queries() == before
        });
        let (asked, before, start) = (underlay.queries(), cpu_ns(), Instant::now());
        let mut changes = 0;
        while start.elapsed() < Duration::from_secs(2) {
            place.exec("node", &format!("ip -batch {}", file.path().display()));
            changes += 1000;
            std::thread::sleep(Duration::from_millis(50));
        }
        let (asked, time, after) = (underlay.queries() - asked, start.elapsed(), cpu_ns());
        let used = after.iter().filter_map(|(task, after)| Some(after - before.get(task)?)).max();
        let used = used.unwrap() as f64 / time.as_nanos() as f64;
        println!("{kind}: {changes} changes in {time:?}: {used:.3} of a CPU, {asked} questions");
        match kind {
            "neigh" => assert_eq!(asked, 0),
            // All tunnels at once, and not more often than REST_MIN permits.
            _ => assert!(asked / TUNNELS <= time.as_millis() as u64 / 20 + 1, "{asked}"),
        }
    }
    drop(hops);
}

/// The same link-local address on another link is another address.
#[test]
fn link_local_addresses_are_separate_per_link() {
    let place = Place::enter("links");
    let address = |name: &str, device: &str, host: u8| {
        place.exec(name, &format!("ip addr add fe80::{host}/64 dev {device} nodad"));
    };
    address("node", "a", 1);
    address("out1", "eth0", 2);
    address("out2", "eth0", 2);
    let underlay = Underlay::start().unwrap();
    let links = ["a", "b"].map(|device| ends(device, "fe80::1", "fe80::2"));
    let hops = links.map(|(index, from, to)| underlay.next_hop(index, from, to, 1500).unwrap());
    eventually("one is known", || hops[0].find().is_some() && underlay.queries() > 1);
    assert_eq!(problem(&underlay, links[1]), Some(UnderlayProblem::NoAddress));
    address("node", "b", 1);
    eventually("both are known", || hops.iter().all(|hop| hop.find().is_some()));
    assert_eq!(problem(&underlay, links[1]), None);
    assert_ne!(hops[0].find(), hops[1].find());
}

/// A path reports each of its changes to its listener, and no change of another path.
#[test]
fn path_listener_gets_each_change() {
    let place = Place::enter("told");
    let underlay = Underlay::start().unwrap();
    let (index, local, remote) = ends("a", "10.9.1.1", "10.9.1.2");
    let _hop = underlay.next_hop(index, local, remote, 1500).unwrap();
    let path = || underlay.path((index, local, remote));
    let mut seen = 0;
    let mut reports = |what: &str, is: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !is() {
            seen = underlay.wait(seen, Duration::from_secs(10));
            assert!(start.elapsed() < Duration::from_secs(5), "{what}");
        }
        // A path shows its change shortly before it reports the change.
        loop {
            let told = underlay.wait(seen, Duration::from_millis(100));
            if std::mem::replace(&mut seen, told) == told {
                return told;
            }
        }
    };
    reports("it is known", &|| path().is_some_and(|hop| hop.mtu == 1500));
    place.exec("node", "ip neigh replace 10.9.1.2 lladdr 02:00:00:00:09:09 dev a");
    let seen = reports("another neighbour", &|| path().is_some_and(|hop| hop.mac[5] == 9));
    place.exec("node", "ip neigh replace 10.9.1.7 lladdr 02:00:00:00:09:07 dev a");
    assert_eq!(underlay.wait(seen, Duration::from_millis(300)), seen, "another path's change");
    place.exec("node", "ip link set dev a mtu 1400");
    reports("another MTU", &|| path().is_some_and(|hop| hop.mtu == 1400));
    place.exec("node", "ip link set dev a down");
    reports("the device is down", &|| path().is_none());
    place.exec("node", "ip link set dev a up");
    reports("it is up", &|| path().is_none());
    let hop = underlay.next_hop(index, local, remote, 1500).unwrap();
    assert!(hop.find().is_none() || path().is_some());
    reports("it is known again", &|| path().is_some());
}
