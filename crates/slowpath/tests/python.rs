//! The Python client against the same peer, and its patterns compared with the library's.

mod fake;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use fake::{EVENTUALLY, Fake, eventually};
use pdp_proto::slowpath::{
    FilterCounter, FilterVerdict, QueueSetting, QueueState, SlowPathReply, SlowPathRequest,
};
use pdp_slowpath::{FilterPattern, PatternCode, pattern};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

const NAMES: [&str; 4] = ["eth0", "eth1", "eth10", "9"];

fn python(arguments: &[&Path]) -> Child {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/client.py");
    with_client().arg(script).args(arguments).spawn().unwrap()
}

/// Python with the client in its path.
fn with_client() -> Command {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let mut python = Command::new("python3");
    python
        .env("PYTHONPATH", repository.join("clients/python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    python
}

/// Text that often is a pattern.
fn text() -> impl Strategy<Value = String> {
    let value = prop_oneof![
        "(10\\.0\\.0\\.[0-3]|2001:db8::[0-3]|::ffff:1\\.2\\.3\\.4|1\\.2\\.3)(/(0|8|9|32|64|129|255\\.0\\.255\\.0|ffff::))?",
        "(0|1|53|63|64|255|256|65535|65536|0x1f|0xfc00|-1|\\+1|1_0|٣|)(/(0|1|0xff|0xfc|252|0xfc00|0xffff))?",
        "(tcp|udp|icmp6|icmpv6|ospf|UDP|eth0|eth10|eth7|9)",
    ];
    let word = "(src|dst|proto|sport|dport|tos|dscp|in|port)";
    let condition = (word, value).prop_map(|(word, value)| format!(" {word} {value}"));
    let first = "(ip|ip|ip6|ip6|raw|)";
    let words = (first, prop::collection::vec(condition, 0..4))
        .prop_map(|(first, condition)| first + &condition.concat());
    let raw = "raw [0-9a-f]{0,84}(/[0-9a-f]{0,84})?( in (eth10|1|9|3/1|x))?";
    let even = prop::collection::vec(any::<(u8, u8)>(), 0..42).prop_map(|bytes| {
        let hex = |of: fn(&(u8, u8)) -> u8| -> String {
            bytes.iter().map(|it| format!("{:02x}", of(it))).collect()
        };
        format!("raw {}/{} in 9", hex(|it| it.0), hex(|it| it.1))
    });
    prop_oneof![6 => words, 1 => raw, 1 => even]
}

#[test]
fn rust_and_python_parse_patterns_alike() {
    let mut runner = TestRunner::deterministic();
    let texts: Vec<String> =
        (0..20_000).map(|_| text().new_tree(&mut runner).unwrap().current()).collect();
    let mut python = python(&[]);
    let mut to = python.stdin.take().unwrap();
    let all = texts.join("\n") + "\n";
    let writer = std::thread::spawn(move || to.write_all(all.as_bytes()).unwrap());
    let mut good = 0;
    let mut lines = BufReader::new(python.stdout.take().unwrap()).lines();
    for text in texts {
        let line = lines.next().expect("a line").unwrap();
        let line = line.splitn(3, ' ').collect::<Vec<_>>();
        let meant = match pattern::parse(&text, &NAMES) {
            Err(_) => vec!["wrong".to_owned()],
            Ok(found) => {
                good += 1;
                let (value, mask): (&[u8], &[u8]) = match &found {
                    FilterPattern::Short { value, mask } => (value, mask),
                    FilterPattern::Long { value, mask } => (value, mask),
                };
                let hex = |bytes: &[u8]| bytes.iter().map(|it| format!("{it:02x}")).collect();
                let (value, mask): (String, String) = (hex(value), hex(mask));
                let words = line.get(2).copied().unwrap_or_default();
                let (ip, raw) = words.split_once(" | ").expect("two texts");
                assert_eq!(pattern::text(&found, PatternCode::Fields, &NAMES), raw, "{text}");
                // Versions of Python write some IPv6 addresses differently.
                assert_eq!(pattern::parse(ip, &NAMES), Ok(found), "{text}: {ip}");
                let own = pattern::text(&found, PatternCode::Ip, &NAMES);
                assert!(own == ip || own.contains("::ffff:1.2.3.4"), "{text}: {ip}");
                vec![value, mask, words.to_owned()]
            }
        };
        assert_eq!(line, meant, "{text}");
    }
    writer.join().unwrap();
    assert!(python.wait().unwrap().success());
    assert!(good > 1000, "{good} are patterns");
}

#[test]
fn python_client_changes_filters_counts_and_sends() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let mut fake = Fake::start(&path);
    fake.table().queues = vec![QueueState { weight: 3, frames: 7, ..Default::default() }; 600];
    let mut python = python(&[&path]);
    let mut to = python.stdin.take().unwrap();
    let mut lines = BufReader::new(python.stdout.take().unwrap()).lines();
    let mut step = |expected: &str| match lines.next() {
        Some(line) => assert_eq!(line.unwrap(), expected),
        None => panic!("it failed before {expected:?}"),
    };
    let ids = |fake: &Fake| fake.table().filters.keys().copied().collect::<Vec<_>>();
    step("changed");
    assert_eq!((ids(&fake), fake.table().commits.clone()), (vec![1, 2], vec![true, false]));
    assert_eq!(fake.table().filters[&1].action.counter, 3);
    fake.start_anew();
    writeln!(to).unwrap();
    step("kept");
    assert_eq!(ids(&fake), [1, 2]);
    fake.start_anew();
    writeln!(to).unwrap();
    step("many");
    assert_eq!(ids(&fake), [1]);
    let set = [(1, 5, 0, 0), (2, 0, 0, 0), (600, 8, 7, 6)].map(|(queue, weight, frames, bytes)| {
        ((1, queue), QueueSetting { vport: 1, queue, weight, frames, bytes })
    });
    assert_eq!(fake.table().set, set.into());
    fake.table().counters[3] = FilterCounter { packets: 7, bytes: 700, sent: 5, sent_bytes: 500 };
    writeln!(to).unwrap();
    step("sent");
    let frame = |out, vport, queue, byte| SlowPathRequest::Frame {
        out,
        vport,
        queue,
        bytes: vec![byte; 60],
    };
    assert_eq!(fake.table().frames, [frame(true, 2, 5, 1), frame(false, 3, 0, 2)]);
    let greeted = fake.table().greeted;
    writeln!(to).unwrap();
    // It waits, or is about to.
    std::thread::sleep(EVENTUALLY / 600);
    fake.disconnect("as asked");
    step("disconnected");
    for _ in 0..2 {
        fake.table().farewell = Some("as asked".into());
        writeln!(to).unwrap();
        step("disconnected");
    }
    assert_eq!(fake.table().greeted, greeted + 3);
    fake.kill();
    std::fs::remove_file(&path).unwrap();
    let listener = fake::listen_at(&path);
    let mut farewell = vec![];
    SlowPathReply::Bye("at once".into()).encode(&mut farewell);
    writeln!(to).unwrap();
    fake::say_once(&listener, &farewell);
    step("disconnected at once");
    drop(listener);
    writeln!(to).unwrap();
    eventually("it ends", || python.try_wait().unwrap().is_some());
    assert!(python.wait().unwrap().success());
}

/// Runs clients/python/limit.py unchanged, but at another socket and for two seconds.
const LIMIT: &str = "
import sys, limit, pdp_slowpath
pdp_slowpath.SlowPath.__init__.__defaults__ = (sys.argv.pop(1), 30.0)
limit.DROPPED_FOR = 2
limit.main()
";

#[test]
fn example_drops_heavy_senders_for_a_while() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let fake = Fake::start(&path);
    let mut limit = with_client();
    limit.args(["-c", LIMIT]).arg(&path).args(["10", "192.0.2.1", "198.51.100.0/24"]);
    let mut limit = limit.spawn().unwrap();
    let verdicts = || {
        let table = fake.table();
        table.filters.values().map(|filter| filter.action.verdict).collect::<Vec<_>>()
    };
    eventually("both pass", || verdicts() == [FilterVerdict::Pass, FilterVerdict::Pass]);
    fake.table().counters[1].packets = 11;
    eventually("one is dropped", || verdicts() == [FilterVerdict::Pass, FilterVerdict::Drop]);
    eventually("both pass again", || verdicts() == [FilterVerdict::Pass, FilterVerdict::Pass]);
    limit.kill().unwrap();
    limit.wait().unwrap();
}
