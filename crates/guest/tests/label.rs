//! The label program as a process, between memif and three stations.

mod common;

use std::process::{Child, Command};

use common::{Mux, setup, until};
use pdp_wire::tag::{GuestDrop, Tag, TagVerdict};

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn frame(to: u16, from: u16, hops: u8) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    frame.extend(to.to_be_bytes());
    frame.extend(from.to_be_bytes());
    frame.push(hops);
    frame.extend(b"hello");
    frame
}

/// Sends a frame to the program and returns its output, in order of vports.
fn ask(mux: &mut Mux, vport: u16, frame: &[u8]) -> Vec<(TagVerdict, u8, Vec<u8>)> {
    until("room in the ring", || mux.give(vport, 5, frame));
    let mut got: Vec<(Tag, Vec<u8>)> = Vec::new();
    until("a completion", || {
        got.extend(mux.take());
        got.last().is_some_and(|(tag, _)| tag.last)
    });
    assert!(got.iter().all(|(tag, _)| tag.trace == 5));
    assert_eq!(got.iter().filter(|(tag, _)| tag.last).count(), 1);
    let mut answer: Vec<_> =
        got.into_iter().map(|(tag, bytes)| (tag.verdict, tag.vport, bytes)).collect();
    answer.sort_by_key(|(_, vport, _)| *vport);
    answer
}

#[test]
fn label_guest_floods_learns_and_counts_hops() {
    let (_directory, path, mut mux) = setup();
    let command = Command::new(env!("CARGO_BIN_EXE_pdp-label"))
        .arg("--memif")
        .arg(&path)
        .env("PDP_PORTS", "3")
        .spawn();
    let _process = Process(command.unwrap());
    mux.connect(|| std::thread::sleep(std::time::Duration::from_millis(1)));

    // 7 is unknown: the frame goes to all but the sender.
    let sent = |vport, frame| (TagVerdict::Out, vport, frame);
    let flooded = ask(&mut mux, 1, &frame(7, 3, 9));
    assert_eq!(flooded, [sent(0, frame(7, 3, 8)), sent(2, frame(7, 3, 8))]);
    // 7 answers: directly to the vport of 3, and back.
    assert_eq!(ask(&mut mux, 2, &frame(3, 7, 1)), [sent(1, frame(3, 7, 0))]);
    assert_eq!(ask(&mut mux, 1, &frame(7, 3, 9)), [sent(2, frame(7, 3, 8))]);
    // 7 moves.
    assert_eq!(ask(&mut mux, 0, &frame(0xffff, 7, 2)).len(), 2);
    assert_eq!(ask(&mut mux, 1, &frame(7, 3, 9)), [sent(0, frame(7, 3, 8))]);

    let dropped = |reason| [(TagVerdict::Drop(reason), 0, vec![])];
    assert_eq!(ask(&mut mux, 0, &frame(3, 7, 0)), dropped(GuestDrop::Policy));
    assert_eq!(ask(&mut mux, 0, &frame(7, 7, 2)), dropped(GuestDrop::NotForUs));
    for length in 0..19 {
        assert_eq!(ask(&mut mux, 0, &frame(3, 7, 2)[..length]), dropped(GuestDrop::Malformed));
    }
    let mut other = frame(3, 7, 2);
    other[13] = 0xb6;
    assert_eq!(ask(&mut mux, 0, &other), dropped(GuestDrop::Malformed));
}
