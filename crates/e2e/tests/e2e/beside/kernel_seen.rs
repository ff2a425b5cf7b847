//! Captures and traces of frames on kernel links.

use std::cell::Cell;
use std::thread;
use std::time::Duration;

use pdp_e2e::meter::cpu_s;
use pdp_e2e::{Background, TestNode, all_answered, eventually, sh};
use serde_json::Value;

use super::kernel::{ROW, by_stack};

/// Sends a broadcast frame out of r1's port to r2, with these bytes behind its addresses.
fn send(node: &TestNode, bytes: &str) {
    let line = format!(
        "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind((\"eth1\", 0)); \
         s.send(bytes.fromhex(\"ffffffffffff020000000001{bytes}\") + b\"x\" * 50)"
    );
    node.pdp(&["exec", "row/r1", "--", "python3", "-c", &line]);
}

/// Captures frames matching a filter at a port, into a
/// file, until there are `count`. `make` makes some.
fn captured(node: &TestNode, filter: &str, count: usize, make: impl Fn()) -> Vec<String> {
    let file = node.directory.join("seen.pcap").display().to_string();
    let count = count.to_string();
    let arguments = ["capture", "row/r2:eth0", "-f", filter, "-c", &count, "-w", &file];
    let mut capture = Background::start(&mut node.pdp_command(&arguments));
    eventually(&format!("{count} of {filter}"), || {
        make();
        !capture.runs()
    });
    sh(&format!("tcpdump -ner {file} 2>/dev/null")).lines().map(str::to_owned).collect()
}

/// Stages of a frame matching a filter at a port, while it is pinged from `from`.
fn traced(node: &TestNode, port: &str, filter: &str, (from, to): (&str, &str)) -> Vec<[String; 2]> {
    let trace = thread::scope(|scope| {
        let waits = scope.spawn(|| node.json(&["trace", port, "-f", filter, "--wait", "60"]));
        while !waits.is_finished() {
            let _ = node.try_exec(from, &format!("ping -c1 -W1 {to}"));
        }
        waits.join().expect("pdp trace")
    });
    let stages = trace["stages"].as_array().expect("stages");
    let times: Vec<u64> = stages.iter().map(|it| it["atNs"].as_u64().expect("a time")).collect();
    assert!(times.is_sorted(), "{times:?}");
    let text = |stage: &Value, key: &str| stage[key].as_str().expect("text").to_owned();
    stages.iter().map(|it| [text(it, "stage"), text(it, "detail")]).collect()
}

fn are(stages: &[[String; 2]], expected: &[(&str, &str)]) {
    let is_it = |([stage, detail], (name, words)): (&[String; 2], &(&str, &str))| {
        stage == name && detail.contains(words)
    };
    let all = stages.len() == expected.len() && stages.iter().zip(expected).all(is_it);
    assert!(all, "{stages:#?}");
}

#[test]
fn frames_that_stay_in_the_kernel_are_captured_and_traced() {
    let node = TestNode::start("kernelseen");
    node.apply(ROW);
    node.pdp(&["wait", "row", "--for", "ready", "--timeout", "60s"]);
    eventually("pdpd lends the short way", || by_stack(&node) < 10);

    // Both directions, each frame once, although it would use the XDP bypass. Also from the
    // beginning, although the bypass was enabled for ten seconds.
    let pings = Cell::new(0);
    let ping = || {
        pings.set(pings.get() + 1);
        let _ = node.try_exec("row/h1", "ping -c1 -W1 10.3.0.2");
    };
    let lines = captured(&node, "icmp", 20, ping);
    assert!(pings.get() <= 20, "{} pings until 10 were seen", pings.get());
    let count = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
    let seen =
        ["10.1.0.2 > 10.3.0.2: ICMP echo req", "10.3.0.2 > 10.1.0.2: ICMP echo rep"].map(count);
    assert_eq!((lines.len(), seen), (20, [10, 10]), "{lines:#?}");
    eventually("packets go the short way again", || by_stack(&node) < 10);

    // Tags are where they were, also for filters, although the kernel removes them.
    let (tagged, plain) = ("8100000588b5", "88b5");
    let lines =
        captured(&node, "vlan 5", 1, || [plain, tagged].iter().for_each(|it| send(&node, it)));
    assert!(lines[0].contains("vlan 5,"), "{lines:#?}");
    let lines = captured(&node, "ether proto 0x88b5", 2, || {
        [tagged, plain].iter().for_each(|it| send(&node, it));
    });
    assert!(lines.iter().all(|line| !line.contains("vlan")), "{lines:#?}");

    // From one port to the other.
    let (from, to) = ("row/h1", "10.3.0.2");
    let filter = "icmp[icmptype] == icmp-echo";
    let stages = traced(&node, "row/r2:eth0", filter, (from, to));
    let mut forwarded = [
        ("receive", "98 bytes by link first, which stays in the kernel"),
        ("classify", "port eth0, 10.1.0.2 > 10.3.0.2"),
        ("forward", "by its kernel's routes to 10.23.0.3 by eth1; without the XDP bypass"),
        ("send", "by eth1 to 02:"),
    ];
    are(&stages, &forwarded);
    // Regardless of address translation.
    let rule = "nft 'add table ip t; add chain ip t c { type nat hook postrouting priority 100; }; \
                add rule ip t c oifname eth1 masquerade'";
    node.pdp(&["exec", "row/r2", "--", "sh", "-c", rule]);
    are(&traced(&node, "row/r2:eth0", filter, (from, to)), &forwarded);
    node.exec("row/r2", "nft delete table ip t");
    // To the router itself, and without a route.
    let stages = traced(&node, "row/r2:eth0", filter, ("row/r1", "10.12.0.2"));
    forwarded[1].1 = "port eth0, 10.12.0.1 > 10.12.0.2";
    forwarded[2].1 = "by its kernel, to which 10.12.0.2 belongs";
    forwarded[3] = ("wait", "no such frame left within 1000 ms");
    are(&stages, &forwarded);
    node.exec("row/r2", "ip route add unreachable 10.9.0.0/16");
    let stages = traced(&node, "row/r2:eth0", filter, (from, "10.9.0.1"));
    forwarded[1].1 = "port eth0, 10.1.0.2 > 10.9.0.1";
    forwarded[2].1 =
        "by its kernel, whose routes say: ask for the route to 10.9.0.1: No route to host";
    are(&stages, &forwarded);
    let error = node.try_pdp(&["trace", "row/r2:eth0", "-f", "ip proto 253", "--wait", "0.3"]);
    assert!(error.expect_err("none").contains("no such frame arrived within 300 ms"));
    // For a link through the mux, the trace tells why.
    let stages = traced(&node, "row/r1:eth0", filter, (from, to));
    assert!(
        stages[0][1].ends_with("; link link1 passes through the mux: h1 is a host"),
        "{stages:#?}"
    );

    // If its router deletes a port meanwhile, the output contains nothing false.
    let arguments = ["trace", "row/r2:eth0", "-f", "ip proto 253", "--wait", "60"];
    let error = thread::scope(|scope| {
        let waits = scope.spawn(|| node.try_pdp(&arguments));
        while !waits.is_finished() {
            thread::sleep(Duration::from_secs(1));
            let _ = node.try_exec("row/r2", "ip link del eth0");
        }
        waits.join().expect("pdp trace")
    });
    let error = error.expect_err("no such frame");
    assert!(error.contains("the router or its port was recreated meanwhile"), "{error}");
    eventually("the port is there again", || {
        // The router has to set the lost routes again.
        let _ = node.try_exec("row/r2", "ip route replace 10.1.0.0/24 via 10.12.0.1");
        node.try_exec("row/h1", "ping -c1 -W1 10.3.0.2").is_ok()
    });

    // A reader that takes nothing misses frames, which are counted. Others miss none.
    let arguments = ["capture", "row/r2:eth0", "-w", "-"];
    let start = || Background::start(&mut node.pdp_command(&arguments));
    let mut captures = vec![start()];
    let missed = || {
        let port = &node.json(&["stats", "row"])["vnets"]["row"]["nodes"]["r2"]["ports"]["eth0"];
        port["captureMissed"].as_u64().expect("a counter")
    };
    eventually("frames are missed", || {
        let words = node.exec("row/h1", "ping -c1000 -i0.002 -s1400 -w60 10.3.0.2");
        assert!(all_answered(&words, 1000), "{words}");
        missed() > 0
    });
    // Their number is limited, and none outlives its node.
    captures.extend((0..15).map(|_| start()));
    eventually("one more is refused", || {
        // The tried one was in its way.
        captures
            .iter_mut()
            .filter_map(|it| (!it.runs()).then_some(it))
            .for_each(|it| *it = start());
        // It captures the ping and ends, if there is room for it.
        let arguments = ["capture", "row/r2:eth0", "-c", "1", "-w", "/dev/null"];
        thread::scope(|scope| {
            let tried = scope.spawn(|| node.try_pdp(&arguments));
            while !tried.is_finished() {
                let _ = node.try_exec("row/h1", "ping -c1 -W1 10.3.0.2");
            }
            let tried = tried.join().expect("pdp capture");
            tried.is_err_and(|error| {
                error.contains("operators: the limit of 16 captures at a time is reached")
            })
        })
    });
    node.pdp(&["delete", "row"]);
    eventually("captures end", || captures[1..].iter_mut().all(|it| !it.runs()));
}

#[test]
fn capture_of_a_flood_has_bounded_cpu_cost() {
    const LASTS: Duration = Duration::from_secs(3);
    let node = TestNode::start("kernelflood");
    node.apply(ROW);
    node.pdp(&["wait", "row", "--for", "ready", "--timeout", "60s"]);
    let flood = "import socket\ns = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\ns.bind((\"eth1\", 0))\n\
                 while True: s.send(b\"\\xff\" * 6 + b\"\\x02\" * 6 + b\"\\x88\\xb5\" + b\"x\" * 50)";
    let flood = ["exec", "row/r1", "--", "timeout", "60", "python3", "-c", flood];
    let mut flood = Background::start(&mut node.pdp_command(&flood));
    let capture = ["capture", "row/r2:eth0", "-w", "/dev/null"];
    let mut capture = Background::start(&mut node.pdp_command(&capture));
    let missed = || {
        let stats = node.json(&["stats", "row"]);
        stats["vnets"]["row"]["nodes"]["r2"]["ports"]["eth0"]["captureMissed"].as_u64()
    };
    eventually("more comes than is read", || missed() > Some(0));
    let used = || cpu_s(&[node.pdpd_pid()]);
    let before = used();
    thread::sleep(LASTS);
    let part = (used() - before) / LASTS.as_secs_f64();
    assert!(capture.runs() && flood.runs());
    // The capture has a tenth of a CPU. The daemon also does other work.
    assert!(part < 0.2, "{part} of a CPU");
}
