//! Figures for a full table of the Internet; shown, and never a reason to fail.
//!
//! `cargo test --release -p pdp-mirror --test scale -- --ignored --nocapture`

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::guest::Guest;
use common::{Mirror, Netns, Process, many};
use pdp_proto::mirror::Source;

fn wait(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    start.elapsed()
}

fn full_table() -> String {
    let mut text = String::from(
        "router id 1.1.1.1;\nprotocol device {}\n\
         protocol kernel { persist; ipv4 { export all; }; }\n\
         protocol kernel { persist; ipv6 { export all; }; }\n",
    );
    for (family, name) in [("v4", "ipv4"), ("v6", "ipv6")] {
        let path = format!(
            "{}/../../data/internet-2022-10-29.{family}.txt.xz",
            env!("CARGO_MANIFEST_DIR")
        );
        let output = Command::new("xzcat").arg(&path).output().unwrap();
        text += &format!("protocol static {{ {name};\n");
        for (i, line) in String::from_utf8(output.stdout).unwrap().lines().enumerate() {
            let prefix = line.split_whitespace().next().unwrap();
            let vport = i % 4;
            let via = if family == "v4" {
                format!("172.16.{vport}.{}", 2 + i / 4 % 8)
            } else {
                format!("fd00:{vport}::{}", 2 + i / 4 % 8)
            };
            text += &format!("route {prefix} via {via};\n");
        }
        text += "}\n";
    }
    text
}

#[test]
#[ignore = "takes minutes, and shows figures"]
fn full_table_figures() {
    let netns = Netns::new(4);
    let mirror = Mirror::new(&netns);
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    let limit = Duration::from_secs(300);
    wait("a snapshot", limit, || guest.snapshots() == 1);
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("bird.conf"), full_table()).unwrap();
    let mut command = netns.command("bird");
    command.arg("-f").arg("-c").arg(path("bird.conf")).arg("-s").arg(path("bird.ctl"));
    command.arg("-P").arg(path("bird.pid")).stdout(Stdio::null()).stderr(Stdio::null());
    let start = Instant::now();
    let _bird = Process(command.spawn().unwrap());
    let (all_v4, all_v6) = (968_428, 177_846);
    wait("the copy", limit, || {
        let status = mirror.status();
        status.routes_v4 >= all_v4 && status.routes_v6 >= all_v6
    });
    println!("from BIRD's start to the mirror's copy: {:?}", start.elapsed());
    let all = (all_v4 + all_v6) as usize;
    wait("the guest", limit, || guest.shared.lock().unwrap().state.routes.len() >= all);
    println!("from BIRD's start to the guest's table: {:?}", start.elapsed());
    let status = mirror.status();
    println!("{status:?}");
    println!("largest memory of the mirror: {} MB", mirror.memory_bytes() >> 20);

    for number in 1..4 {
        let start = Instant::now();
        let late = Guest::connect(&mirror.config.routes_socket, number);
        wait("a snapshot", limit, || late.snapshots() == 1);
        let shared = late.shared.lock().unwrap();
        println!(
            "snapshot to a new guest: {:?} from connecting, {:?} of it from begin to end",
            start.elapsed(),
            shared.snapshot_ended.unwrap() - shared.snapshot_begun.unwrap()
        );
    }

    let mut times = Vec::new();
    for i in 0..200 {
        let verb = if i % 2 == 0 { "add" } else { "del" };
        netns.ip(&format!("route {verb} 10.77.0.0/16 via 172.16.1.2"));
        std::thread::sleep(Duration::from_millis(5));
        times.push(mirror.status().guests[0].apply_us);
    }
    times.sort_unstable();
    println!(
        "a route's notification to applied: median {} us, p95 {} us, largest {} us",
        times[100], times[190], times[199]
    );

    let file = path("batch");
    std::fs::write(&file, many("add", 500_000, "via 172.16.0.2")).unwrap();
    let before = mirror.status().notifications;
    let start = Instant::now();
    common::run("ip", &["-n", &netns.name, "-batch", file.to_str().unwrap()]);
    let written = start.elapsed();
    wait("the guest", limit, || guest.shared.lock().unwrap().state.routes.len() >= all + 500_000);
    let took = start.elapsed();
    let status = mirror.status();
    println!(
        "500,000 routes by ip -batch: written in {written:?}, in the guest after {took:?}; {} notifications, {} overruns; {:?}",
        status.notifications - before,
        status.overruns,
        status.guests[0]
    );

    let start = Instant::now();
    let rows = mirror.routes(Source::Diff(0), None).unwrap();
    println!("diff of all: {} rows in {:?}", rows.len(), start.elapsed());
    println!("largest memory of the mirror: {} MB", mirror.memory_bytes() >> 20);

    let start = Instant::now();
    let resyncs = mirror.status().resyncs;
    netns.ip("link set x3 down");
    wait("a resync", limit, || mirror.status().resyncs > resyncs);
    wait("a notification to be applied", limit, || {
        !guest.shared.lock().unwrap().state.vports[&3].up
    });
    println!(
        "carrier loss with all routes: vport down in the guest and resync begun after {:?}",
        start.elapsed()
    );
    let start = Instant::now();
    netns.ip("link set e0 down");
    wait("routes of a link", limit, || {
        let shared = guest.shared.lock().unwrap();
        shared.state.routes.len() < all + 500_000 - 700_000
    });
    println!(
        "link down with 790,000 routes on it: gone from the guest after {:?}",
        start.elapsed()
    );
    println!("largest memory of the mirror: {} MB", mirror.memory_bytes() >> 20);
}
