//! `pdp events`, run as users run it, against the real HTTP layer in front of a board that the tests
//! write.

#[path = "../../pdpd/tests/fake/mod.rs"]
mod fake;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use fake::{Server, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pdp_api::{VnetStatus, WatchEvent, WatchLine, What};

fn pdp(server: &Server, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pdp"));
    command.env("PDP_SOCKET", server.socket()).env("NO_COLOR", "1").args(arguments);
    command
}

/// What comes out of something, as far as it came.
fn gathered(mut from: impl Read + Send + 'static) -> Arc<Mutex<String>> {
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
    let event = WatchEvent { object: object.into(), what: What::Ended, ..WatchEvent::default() };
    server.fake.board.post(WatchEvent { message, ..event });
}

#[test]
fn events_come_as_they_happen_until_an_interrupt() {
    let mut server = Server::start();
    post(&server, "vnet/red/node/r1/g0", "long ago");
    let start = |arguments: &[&str]| {
        let mut command = pdp(&server, arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut child = start(&["events", "red", "--since", "1h"]);
    let (told, wrong) =
        (gathered(child.stdout.take().unwrap()), gathered(child.stderr.take().unwrap()));
    let has = |text: &str| told.lock().unwrap().contains(text);
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
    server.fake.board.tell("new", Some(VnetStatus::default()), true);
    let WatchLine::Event(created) = line() else { panic!("an event") };
    assert_eq!((created.object.as_str(), created.what), ("vnet/new", What::Created));
    server.stop();
    eventually("the daemon's end is told", || {
        wrong.lock().unwrap().contains("pdp: the daemon stops; what runs goes on; waiting")
    });
    for mut child in [child, json] {
        signal(&child, Signal::SIGINT);
        assert!(child.wait().unwrap().success());
    }
    let refused = pdp(&server, &["events", "--every", "0.01"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("0.1 to 60"), "{refused:?}");
}
