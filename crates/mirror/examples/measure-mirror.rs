//! Measures the mirror with a full table of the Internet: times, and its memory.
//!
//! `cargo build --release -p pdp-mirror && cargo run --release -p pdp-mirror --example
//! measure-mirror`, as root; takes about two minutes. BIRD writes the table of `data/`
//! into a network namespace. Guests are plain programs in this process that share the
//! CPUs with the mirror, so the apply times are theirs. Ends with an error if a
//! guest's table ever differs from the kernel's.

#[path = "../tests/common/mod.rs"]
mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::guest::Guest;
use common::{Mirror, Netns, Process, many};
use pdp_proto::mirror::TableSource;

/// The table of `data/`.
const ROUTES_V4: u64 = 968_428;
const ROUTES_V6: u64 = 177_846;
/// Interfaces that the table is spread over.
const VPORTS: usize = 4;
/// Routes added by one `ip -batch`, all through the first interface.
const BURST: u32 = 500_000;
/// Single changes.
const CHANGES: usize = 200;
/// New guests.
const LATE_GUESTS: u32 = 3;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(300);

fn wait(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    start.elapsed()
}

fn show(what: &str, time: Duration) {
    println!("{what:<64} {:>9.1} ms", time.as_secs_f64() * 1e3);
}

fn show_memory(mirror: &Mirror, when: &str) {
    let what = format!("largest memory of the mirror, {when}");
    println!("{what:<64} {:>9} MB", mirror.memory_bytes() >> 20);
}

/// Returns BIRD's configuration with the whole table, spread
/// over the interfaces and eight gateways each.
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
        let output = Command::new("xzcat").arg(&path).output().expect("xzcat");
        let table = String::from_utf8(output.stdout).expect("UTF-8");
        text += &format!("protocol static {{ {name};\n");
        for (i, line) in table.lines().enumerate() {
            let prefix = line.split_whitespace().next().expect("a prefix");
            let (vport, host) = (i % VPORTS, 2 + i / VPORTS % 8);
            let via = match name {
                "ipv4" => format!("172.16.{vport}.{host}"),
                _ => format!("fd00:{vport}::{host}"),
            };
            text += &format!("route {prefix} via {via};\n");
        }
        text += "}\n";
    }
    text
}

fn main() {
    let netns = Netns::new(VPORTS);
    let mirror = Mirror::new(&netns);
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    wait("a snapshot", || guest.snapshots() == 1);
    let routes = || guest.shared.lock().expect("a guest").state.routes.len();
    let own = routes();
    let equal = |when: &str| {
        let start = Instant::now();
        let rows = mirror.routes(TableSource::Diff(0), None).expect("a comparison");
        assert!(rows.is_empty(), "{when}: {} routes differ, the first {:?}", rows.len(), rows[0]);
        show(&format!("{when}: all compared with the kernel's"), start.elapsed());
    };

    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("bird.conf"), full_table()).expect("a file");
    let mut command = netns.command("bird");
    command.arg("-f").arg("-c").arg(path("bird.conf")).arg("-s").arg(path("bird.ctl"));
    command.arg("-P").arg(path("bird.pid")).stdout(Stdio::null()).stderr(Stdio::null());
    let start = Instant::now();
    let _bird = Process(command.spawn().expect("bird"));
    let all = own + (ROUTES_V4 + ROUTES_V6) as usize;
    wait("the guest", || routes() == all);
    show("BIRD's start to the guest's whole table", start.elapsed());
    let status = mirror.status();
    println!("{} notifications, {} overruns", status.stats.notifications, status.stats.overruns);
    show_memory(&mirror, "whole table");
    equal("whole table");

    for number in 1..=LATE_GUESTS {
        let start = Instant::now();
        let new_guest = Guest::connect(&mirror.config.routes_socket, number);
        wait("a snapshot", || new_guest.snapshots() == 1);
        show("snapshot to a new guest, from connecting", start.elapsed());
        assert_eq!(new_guest.shared.lock().expect("a guest").state.routes.len(), all);
    }

    let mut times = Vec::new();
    for i in 0..CHANGES {
        let verb = if i % 2 == 0 { "add" } else { "del" };
        netns.ip(&format!("route {verb} 10.77.0.0/16 via 172.16.1.2"));
        std::thread::sleep(Duration::from_millis(5));
        times.push(Duration::from_micros(mirror.status().stats.guests[0].apply_us));
    }
    times.sort_unstable();
    show("one change, read to applied: median", times[CHANGES / 2]);
    show("one change, read to applied: 95 of 100", times[CHANGES * 95 / 100]);

    let file = path("batch");
    std::fs::write(&file, many("add", BURST, "via 172.16.0.2")).expect("a file");
    let start = Instant::now();
    common::run("ip", &["-n", &netns.name, "-batch", file.to_str().expect("UTF-8")]);
    show(&format!("{BURST} routes by ip -batch: written"), start.elapsed());
    let burst = BURST as usize;
    let behind = wait("the guest", || routes() == all + burst);
    show("and in the guest, after that", behind);
    equal("with these");
    show_memory(&mirror, "with these");

    let start = Instant::now();
    netns.ip("link set x3 down");
    wait("a vport down", || !guest.shared.lock().expect("a guest").state.vports[&3].up);
    show("carrier lost: vport down in the guest", start.elapsed());
    let start = Instant::now();
    netns.ip("link set e0 down");
    // The kernel removes a quarter of the table and all of the burst without notifications.
    wait("routes of a link", || routes() < all - all / VPORTS + all / 100);
    show("link down: its routes gone from the guest", start.elapsed());
    equal("at the end");
    show_memory(&mirror, "at the end");
}
