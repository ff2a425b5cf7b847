//! The lab of examples/links.yaml comes up by one command and behaves as specified: tunnels,
//! segment, delays, guarantee and schedule at once.

use std::thread;
use std::time::{Duration, Instant};

use pdp_e2e::routing::vtysh;
use pdp_e2e::{Background, TestNode, eventually};
use serde_json::Value;

use super::examples::{Shell, commands, first, read};

const EXAMPLE: &str = "examples/links.yaml";
const CABLE: &str = "examples/cable.yaml";

/// The first step of the schedule is at 16 s. The checks
/// before it take 3 s, or more on a slow machine.
const BEFORE_MAX: Duration = Duration::from_secs(6);

/// Next hops of r1 to s3 and of r3 to h1: by their own link, and via r2.
const DIRECT: [&str; 2] = ["10.0.13.2", "10.0.13.1"];
const BY_R2: [&str; 2] = ["10.0.12.2", "10.0.23.1"];

/// Round trips over one side of the triangle take 40 ms
/// plus the machine's delay; over two sides 80 ms.
const SIDE_MS: f64 = 40.0;
const ADDED_MS_MAX: f64 = 35.0;

/// Stations on the segment.
const STATIONS: [&str; 8] = ["h1", "h2", "h3", "h4", "h5", "h6", "h7", "r1"];

/// Answer to a ping: its number, the remaining TTL of 64, and its round trip, milliseconds.
#[derive(Debug)]
struct Answer {
    number: u32,
    ttl: u32,
    ms: f64,
}

fn answers(words: &str) -> Vec<Answer> {
    let answer = |line: &str| {
        let value = |key: &str| line.split_once(key)?.1.split_whitespace().next();
        Some(Answer {
            number: value("icmp_seq=")?.parse().ok()?,
            ttl: value("ttl=")?.parse().ok()?,
            ms: value("time=")?.parse().ok()?,
        })
    };
    words.lines().filter_map(answer).collect()
}

/// Checks that the shortest round trip is that of
/// `sides`, and that all answers have passed `routers`.
#[track_caller]
fn sides_are(words: &str, sides: f64, routers: u32) {
    let answers = answers(words);
    let least = answers.iter().map(|answer| answer.ms).fold(f64::MAX, f64::min);
    let expected = sides * SIDE_MS..sides * SIDE_MS + ADDED_MS_MAX;
    assert!(expected.contains(&least), "{words}");
    assert!(answers.iter().all(|answer| answer.ttl == 64 - routers), "{words}");
}

/// Completed steps of the schedules of both ends of r1 - r3.
fn done(node: &TestNode) -> [u64; 2] {
    let links = node.json(&["get", "links", "links"]);
    ["r1-r3", "r3-r1"].map(|name| {
        let mut links = links.as_array().expect("a list").iter();
        let link = links.find(|link| link["name"] == name).expect("a link");
        link["schedule"]["done"].as_u64().expect("a schedule")
    })
}

/// True if r2 has both neighbours, the others have this many,
/// and traffic between h1 and s3 uses these next hops.
fn has_converged(node: &TestNode, neighbours: usize, next_hops: [&str; 2]) -> bool {
    let full = |router: &str| {
        let show = ["exec", router, "--", "vtysh", "-c", "show ip ospf neighbor"];
        node.try_pdp(&show).map_or(0, |words| words.matches("Full/").count())
    };
    let routed = |router: &str, to: &str, by: &str| {
        let routes = vtysh(node, router, &format!("show ip route {to} json"));
        routes.is_ok_and(|routes| routes[to][0]["nexthops"][0]["ip"] == by)
    };
    full("links/r1") == neighbours
        && full("links/r2") == 2
        && full("links/r3") == neighbours
        && routed("links/r1", "10.3.0.0/24", next_hops[0])
        && routed("links/r3", "10.1.0.0/24", next_hops[1])
        && routed("links/r2", "10.1.0.0/24", "10.0.12.1")
}

/// Carrier of both ends of r1 - r3.
fn carriers(node: &TestNode) -> [String; 2] {
    [("links/r1", "eth2"), ("links/r3", "eth1")].map(|(router, port)| {
        node.exec(router, &format!("cat /sys/class/net/{port}/carrier")).trim().to_owned()
    })
}

/// Checks that each tunnel has its delays, and the full MTU that follows from its headers.
fn tunnels_are_as_written(node: &TestNode) {
    for (router, to, mtu) in
        [("r1", "10.0.13.2", 1500), ("r1", "10.0.12.2", 1438), ("r2", "10.0.23.2", 1430)]
    {
        let line = format!("ping -c5 -i0.05 -w60 -M do -s {} {to}", mtu - 28);
        sides_are(&node.exec(&format!("links/{router}"), &line), 1.0, 0);
        let line = line.replace(&format!("-s {}", mtu - 28), &format!("-s {}", mtu - 27));
        assert!(node.try_exec(&format!("links/{router}"), &line).is_err(), "more than {mtu}");
    }
}

/// Checks that all stations on the segment reach each other.
fn segment_is_one(node: &TestNode) {
    let all = "1 2 3 4 5 6 7 254";
    let line = format!("for n in {all}; do ping -q -c1 -W5 10.1.0.$n || exit 1; done");
    for station in STATIONS {
        node.pdp(&["exec", &format!("links/{station}"), "--", "sh", "-c", &line]);
    }
}

/// 8.8 of 10 guaranteed Mbit/s, with all headers, arrive while another link with ten times the
/// weight demands three times the cable's capacity. Without the guarantee only a third would.
fn guarantee_holds(node: &TestNode) {
    for server in ["links/s2", "links/s3"] {
        node.exec(server, "iperf3 -s -D");
    }
    let client = |host: &str, to: &str, mbps: u32, seconds: u32| {
        let line = format!("exec {host} -- iperf3 -J -u -b {mbps}M -l 1350 -t {seconds} -c {to}");
        node.pdp_command(&line.split(' ').collect::<Vec<_>>())
    };
    eventually("the servers listen", || {
        ["links/s2", "links/s3"]
            .iter()
            .all(|server| node.exec(server, "ss -Hltn").contains(":5201"))
    });
    let flood = Background::start(&mut client("links/h7", "10.9.0.2", 60, 100));
    let dropped = || {
        let stats = node.json(&["stats", "links"]);
        let port = &stats["vnets"]["links"]["nodes"]["h7"]["ports"]["eth1"];
        port["dropped"]["queue-full"].as_u64().unwrap_or(0)
    };
    eventually("a flood", || dropped() > 0);
    let before = dropped();
    let words = Background::start(&mut client("links/h1", "10.2.0.2", 8, 3)).finish();
    assert!(dropped() > before + 1000, "it went on");
    drop(flood);
    let report: Value = serde_json::from_str(&words).expect("what iperf3 says");
    let lost = report["end"]["sum"]["lost_percent"].as_f64().expect("a part");
    // A mux without CPU for a third of a second loses some, too.
    assert!(lost < 10.0, "{lost}% lost");
}

/// Traffic of h1 to s3 used r3, then r2 and r3 while that link was down, and r3 again.
#[track_caller]
fn went_the_other_way_and_back(words: &str) {
    let mut answers = answers(words);
    answers.sort_by_key(|answer| answer.number);
    let mut ttls: Vec<u32> = answers.iter().map(|answer| answer.ttl).collect();
    ttls.dedup();
    assert_eq!(ttls, [62, 61, 62], "{words}");
    let (other, direct): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.ttl == 61);
    let within = |answers: &[&Answer], from: f64| {
        answers.iter().filter(|a| (from..from + ADDED_MS_MAX).contains(&a.ms)).count()
    };
    assert!(within(&other, 2.0 * SIDE_MS) > 0 && within(&direct, SIDE_MS) > 0, "{words}");
    // The two directions may only differ in length while routers change their routes.
    let short = other.iter().filter(|answer| answer.ms < 2.0 * SIDE_MS).count();
    assert!(2 * short < other.len() && direct.iter().all(|a| a.ms >= SIDE_MS), "{words}");
}

#[test]
fn lab_example_works_with_all_link_features() {
    let mut node = TestNode::prepare("lab");
    let text = read(EXAMPLE);
    node.namespace().run(&first(CABLE).expect("how to make the cable"));
    node.start_pdpd();
    let commands = commands(EXAMPLE);
    let [up, ping_s2, ping_s3, neighbours, links, fdb] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let shell = Shell::new(&node);
    let start = Instant::now();
    assert_eq!(*up, format!("pdp up -f {CABLE} {EXAMPLE} --wait"));
    shell.run(up);
    let direct = || {
        eventually("routes by all tunnels", || has_converged(&node, 2, DIRECT));
        let ping = || node.try_exec("links/h1", "ping -c1 -W1 10.3.0.2");
        eventually("an answer", || ping().is_ok_and(|words| words.contains("ttl=62")));
    };
    direct();
    if start.elapsed() > BEFORE_MAX {
        eprintln!("a slow machine: time begins anew with another schedule");
        node.apply(&text.replace("{at: 16s", "{at: 16001ms"));
        direct();
    }
    let ping = ["exec", "links/h1", "--", "ping", "-i0.2", "10.3.0.2"];
    let ping = Background::start(&mut node.pdp_command(&ping));
    sides_are(&shell.run(ping_s3), 1.0, 2);
    assert_eq!(shell.run(neighbours).matches("Full/").count(), 2);
    assert_eq!(carriers(&node), ["1", "1"]);
    tunnels_are_as_written(&node);
    assert_eq!(done(&node), [0, 0]);

    thread::scope(|scope| {
        // Traffic that the schedule does not affect.
        scope.spawn(|| {
            sides_are(&shell.run(ping_s2), 1.0, 2);
            segment_is_one(&node);
            let known = shell.run(fdb);
            for end in STATIONS {
                assert!(known.contains(&format!("{end}:eth0")), "{known}");
            }
            guarantee_holds(&node);
        });
        eventually("the first step", || done(&node) == [1, 1]);
        eventually("both ends see that", || carriers(&node) == ["0", "0"]);
        eventually("the other way", || has_converged(&node, 1, BY_R2));
        let shown = shell.run(links);
        assert!(shown.contains("down by its schedule"), "{shown}");
        eventually("the second step", || done(&node) == [2, 2]);
        eventually("both ends see that", || carriers(&node) == ["1", "1"]);
        direct();
        sides_are(&shell.run(ping_s3), 1.0, 2);
    });
    went_the_other_way_and_back(&ping.stop("INT"));

    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert_eq!(node.leftovers(), [""; 0]);
}
