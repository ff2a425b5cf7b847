//! `pdp events`, `pdp top` and `pdp wait`, run as users run them, against fixed answers in front of
//! a real node, whose event log the tests write.

mod fake;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fake::Server;
use fake::node::eventually;
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pdp_api::{EventKind, VnetStatus, WatchEvent, WatchLine};
use pdpd::access::AccessScope;
use pdpd::api::STREAMS_MAX;

fn pdp(server: &Server, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pdp"));
    command.env("PDP_SOCKET", server.socket()).env("NO_COLOR", "1").args(arguments);
    command
}

/// Collects the output of a reader as far as it has arrived.
fn collected(mut from: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let text = Arc::new(Mutex::new(String::new()));
    let to = text.clone();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            *to.lock().unwrap() += &String::from_utf8_lossy(&bytes[..count]);
        }
    });
    text
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

fn post(server: &Server, object: &str, message: &str) {
    let message = Some(message.to_owned());
    let event =
        WatchEvent { object: object.into(), what: EventKind::Ended, ..WatchEvent::default() };
    server.hub().post(WatchEvent { message, ..event });
}

#[test]
fn events_are_printed_live_until_interrupted() {
    let mut server = Server::start();
    post(&server, "vnet/red/node/r1/g0", "long ago");
    let start = |arguments: &[&str]| {
        let mut command = pdp(&server, arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut child = start(&["events", "red", "--since", "1h"]);
    let (text, wrong) =
        (collected(child.stdout.take().unwrap()), collected(child.stderr.take().unwrap()));
    let has = |part: &str| text.lock().unwrap().contains(part);
    eventually("what happened before", || has("vnet/red/node/r1/g0  ended: long ago\n"));
    post(&server, "vnet/acme.red", "of another");
    post(&server, "vnet/red", "now\u{1b}[2J");
    eventually("what happens now", || has("vnet/red  ended: now [2J\n"));
    assert!(!has("of another") && !has("\u{1b}"));
    let mut json = start(&["events", "--initial", "--format", "json"]);
    let mut lines = BufReader::new(json.stdout.take().unwrap()).lines();
    let mut line = || serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    let WatchLine::Snapshot(first) = line() else { panic!("what is") };
    assert_eq!(first.vnets.len(), 3);
    server.hub().publish_vnet("new", Some(VnetStatus::default()), true);
    let WatchLine::Event(created) = line() else { panic!("an event") };
    assert_eq!((created.object.as_str(), created.what), ("vnet/new", EventKind::Created));
    server.stop();
    eventually("the daemon's end is told", || {
        wrong.lock().unwrap().contains("pdp: the daemon stops; networks keep running; waiting")
    });
    for mut child in [child, json] {
        signal(&child, Signal::SIGINT);
        assert!(child.wait().unwrap().success());
    }
    let refused = pdp(&server, &["events", "--every", "0.01"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("0.1 to 60"), "{refused:?}");
}

/// On a terminal of 80 columns: shows state, events and reacts to keys. Restores the terminal
/// however it ends.
#[test]
fn top_restores_the_terminal() {
    let server = Server::start();
    for end in [None, Some(Signal::SIGTERM), Some(Signal::SIGHUP)] {
        let size = nix::pty::Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None).unwrap();
        let side = |fd: &OwnedFd| Stdio::from(fd.try_clone().unwrap());
        let mut child = pdp(&server, &["top"])
            .env("TERM", "xterm")
            .stdin(side(&pty.slave))
            .stdout(side(&pty.slave))
            .stderr(side(&pty.slave))
            .spawn()
            .unwrap();
        let mut keys = fs::File::from(pty.master.try_clone().unwrap());
        let screen = collected(fs::File::from(pty.master.try_clone().unwrap()));
        let has = |text: &str| screen.lock().unwrap().contains(text);
        let canonical = || {
            let local = rustix::termios::tcgetattr(&pty.slave).unwrap().local_modes;
            local.contains(rustix::termios::LocalModes::ICANON)
        };
        eventually("all vnets", || has("acme.red") && has("other.red") && has("degraded"));
        assert!(!canonical(), "keys come one by one");
        // Blank cells are not written, so that each word arrives by itself.
        post(&server, "vnet/red/node/r1/g0", "with-code-7");
        eventually("an event", || has("with-code-7"));
        keys.write_all(b"?").unwrap();
        eventually("help", || has("Up/Down"));
        match end {
            None => keys.write_all(b"q").unwrap(),
            Some(end) => signal(&child, end),
        }
        assert!(child.wait().unwrap().success(), "{end:?}");
        // The alternate screen is closed (xterm's control sequences, mode 1049).
        eventually("the screen is given back", || has("\u{1b}[?1049l"));
        assert!(canonical(), "and the terminal");
    }
    let pipe = pdp(&server, &["top"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(pipe.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&pipe.stderr).contains("--once"), "{pipe:?}");
}

/// A network that is removed only once its node's directory can be.
const LATE: &str = "apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: late}
spec: {nodes: {h1: {kind: host}}}
";

/// Events of one vnet decide when to check again. Without events it is checked every other second
/// at most.
#[test]
fn wait_checks_again_after_events() {
    let server = Server::start();
    let looks = || server.fake.looks.load(Ordering::Relaxed);
    let began = Instant::now();
    let mut ready = pdp(&server, &["wait", "red"]).spawn().unwrap();
    eventually("a few seconds", || began.elapsed() > Duration::from_secs(4));
    // It checks first, at the watch's snapshot, and then only after events.
    let most = 3 + began.elapsed().as_secs() / 2;
    assert!((1..=most).contains(&looks()), "{}", looks());
    let before = looks();
    for number in 0..3 {
        post(&server, "vnet/red/node/r1", &number.to_string());
    }
    eventually("it looks", || looks() > before);
    server.fake.ready.store(true, Ordering::Relaxed);
    post(&server, "vnet/red/node/r1", "ready");
    assert!(ready.wait().unwrap().success());
    // A vnet being deleted is not gone.
    server.apply(LATE.into());
    let stays = server.engine.host.places.node("late", "h1");
    server.machine.set(|inside| assert!(inside.refuses.insert(stays)));
    server.engine.delete_vnet(&AccessScope::Node, "late", &mut |_| ()).unwrap_err();
    let before = looks();
    let mut gone = pdp(&server, &["wait", "late", "--for", "gone"]).spawn().unwrap();
    eventually("it looks", || looks() > before);
    assert!(gone.try_wait().unwrap().is_none());
    server.machine.set(|inside| inside.refuses.clear());
    eventually("it is removed", || !server.engine.reconcile_loop.may_exist("late"));
    server.hub().publish_vnet("late", None, false);
    assert!(gone.wait().unwrap().success());
    assert!(
        pdp(&server, &["wait", "late", "red", "--for", "gone", "--timeout", "0.5"])
            .output()
            .unwrap()
            .status
            .code()
            == Some(1)
    );
}

/// Without a free watch, the command checks periodically.
#[test]
fn wait_polls_without_a_watch() {
    let server = Server::start();
    let streams: Vec<Child> = (0..STREAMS_MAX)
        .map(|_| {
            let mut command = pdp(&server, &["events", "--initial"]);
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let mut first = [0];
            child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
            child
        })
        .collect();
    let mut ready = pdp(&server, &["wait", "red"]).spawn().unwrap();
    let looks = || server.fake.looks.load(Ordering::Relaxed);
    eventually("it looks again and again", || looks() > 4);
    server.fake.ready.store(true, Ordering::Relaxed);
    assert!(ready.wait().unwrap().success());
    for mut child in streams {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
