//! The runtime on a trunk of a real memif server that plays the mux.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Mux, PATIENCE, setup, until};
use pdp_guest::{
    Batch, ForwardingProgram, GuestDrop, KeptFrame, NextPoll, Outbox, ProgramRuntime, PuntClass,
};
use pdp_wire::tag::{Tag, TagVerdict};
use proptest::prelude::*;

/// Program that treats each frame as its first byte says.
#[derive(Debug, Default)]
struct Obedient {
    kept: Vec<KeptFrame>,
    release: bool,
    batches: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Forward,
    Punt,
    Drop,
    Nothing,
    Keep,
    Copies,
    Grow,
    Trim,
    Nowhere,
}

const ORDERS: [Order; 9] = [
    Order::Forward,
    Order::Punt,
    Order::Drop,
    Order::Nothing,
    Order::Keep,
    Order::Copies,
    Order::Grow,
    Order::Trim,
    Order::Nowhere,
];

impl ForwardingProgram for Obedient {
    fn process(&mut self, batch: &mut Batch<'_>) {
        self.batches += 1;
        // Backwards: the order of decisions differs from that of completions.
        for frame in (0..batch.len()).rev() {
            let Some(&order) = batch.frame(frame).first() else { continue };
            let vport = batch.vport(frame);
            match ORDERS[usize::from(order) % ORDERS.len()] {
                Order::Forward => batch.forward(frame, vport + 1),
                Order::Punt => batch.punt(frame, PuntClass::Exception),
                Order::Drop => batch.drop(frame, GuestDrop::Blackhole),
                Order::Nothing => {}
                Order::Keep => match batch.keep(frame) {
                    Some(kept) => self.kept.push(kept),
                    None => batch.drop(frame, GuestDrop::NoBuffer),
                },
                Order::Copies => {
                    batch.copy_to(frame, 7);
                    batch.frame_mut(frame)[0] = 0xcc;
                    batch.copy_to(frame, 8);
                    batch.drop(frame, GuestDrop::Policy);
                }
                Order::Grow => {
                    assert!(batch.grow_front(frame, 20));
                    batch.frame_mut(frame)[..20].fill(0xee);
                    batch.forward(frame, vport);
                }
                Order::Trim => {
                    assert!(batch.trim_front(frame, 1));
                    batch.forward(frame, vport);
                }
                Order::Nowhere => batch.forward(frame, 256),
            }
        }
    }

    fn poll(&mut self, _now: Instant, outbox: &mut Outbox<'_>) -> NextPoll {
        if self.release {
            for kept in self.kept.drain(..) {
                let vport = kept.vport();
                outbox.send(kept, vport).unwrap();
            }
        }
        NextPoll::Until(None)
    }
}

/// Returns a guest connected to the mux.
fn attach(path: &Path, mux: &mut Mux) -> ProgramRuntime<Obedient> {
    let mut runtime = ProgramRuntime::new(path, "test", Obedient::default()).unwrap();
    mux.connect(|| {
        runtime.round();
    });
    while runtime.counters().connections == 0 {
        runtime.round();
    }
    runtime
}

/// Expected output of the guest for a frame, in order. The last element completes it.
fn expected(vport: u8, trace: u8, frame: &[u8]) -> Vec<(Tag, Vec<u8>)> {
    let tag = |verdict, vport, last| Tag { verdict, vport, last, trace };
    let done = |verdict| vec![(tag(verdict, vport, true), vec![])];
    let out = |vport, bytes: Vec<u8>| vec![(tag(TagVerdict::Out, vport, true), bytes)];
    let Some(&order) = frame.first() else { return done(TagVerdict::Drop(GuestDrop::Policy)) };
    match ORDERS[usize::from(order) % ORDERS.len()] {
        Order::Forward => out(vport + 1, frame.to_vec()),
        Order::Punt => {
            vec![(tag(TagVerdict::Punt(PuntClass::Exception), vport, true), frame.to_vec())]
        }
        Order::Drop => done(TagVerdict::Drop(GuestDrop::Blackhole)),
        Order::Nothing => done(TagVerdict::Drop(GuestDrop::Policy)),
        Order::Keep => done(TagVerdict::Kept),
        Order::Copies => {
            let mut changed = frame.to_vec();
            changed[0] = 0xcc;
            vec![
                (tag(TagVerdict::Out, 7, false), frame.to_vec()),
                (tag(TagVerdict::Out, 8, false), changed),
                (tag(TagVerdict::Drop(GuestDrop::Policy), vport, true), vec![]),
            ]
        }
        Order::Grow => out(vport, [&[0xee; 20], frame].concat()),
        Order::Trim => out(vport, frame[1..].to_vec()),
        Order::Nowhere => done(TagVerdict::Drop(GuestDrop::PortDown)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(32) })]

    /// Every frame is completed once, in order, with its trace number, after its copies.
    #[test]
    fn completions_are_in_order(
        frames in prop::collection::vec(
            (0u16..200, any::<u8>(), prop::collection::vec(any::<u8>(), 0..300)), 1..300),
    ) {
        let (_directory, path, mut mux) = setup();
        let mut runtime = attach(&path, &mut mux);
        let mut want = Vec::new();
        let mut got = Vec::new();
        for (vport, trace, frame) in &frames {
            prop_assert!(mux.give(*vport, *trace, frame));
            want.extend(expected(*vport as u8, *trace, frame));
        }
        let end = Instant::now() + PATIENCE;
        while got.len() < want.len() {
            prop_assert!(Instant::now() < end);
            runtime.round();
            got.extend(mux.take());
        }
        runtime.round();
        prop_assert!(mux.take().is_empty());
        // Copies of one frame may come in any order.
        let key = |(tag, bytes): &(Tag, Vec<u8>)| (tag.last, tag.vport, bytes.clone());
        for list in [&mut want, &mut got] {
            list.chunk_by_mut(|first, _| !first.0.last).for_each(|group| group.sort_by_key(key));
        }
        prop_assert_eq!(got, want);
        prop_assert_eq!(runtime.counters().received, frames.len() as u64);
    }
}

#[test]
fn kept_frame_is_sent_later_without_completion() {
    let (_directory, path, mut mux) = setup();
    let mut runtime = attach(&path, &mut mux);
    mux.give(3, 9, &[4, 1, 2, 3]);
    runtime.round();
    let completion = Tag { verdict: TagVerdict::Kept, vport: 3, last: true, trace: 9 };
    assert_eq!(mux.take(), [(completion, vec![])]);
    runtime.program_mut().release = true;
    let end = Instant::now() + PATIENCE;
    let sent = loop {
        assert!(Instant::now() < end);
        runtime.round();
        let got = mux.take();
        if !got.is_empty() {
            break got;
        }
    };
    let tag = Tag { verdict: TagVerdict::Out, vport: 3, last: false, trace: 9 };
    assert_eq!(sent, [(tag, vec![4, 1, 2, 3])]);
}

/// Copies give way to completions if the ring is full. Every frame gets its completion.
#[test]
fn full_ring_drops_copies_but_not_completions() {
    let (_directory, path, mut mux) = setup();
    let mut runtime = attach(&path, &mut mux);
    let copies = ORDERS.iter().position(|&order| order == Order::Copies).unwrap() as u8;
    let mut sent = 0u64;
    for _ in 0..3 {
        while mux.give(1, 0, &[copies; 60]) {
            sent += 1;
        }
        for _ in 0..100 {
            runtime.round();
        }
    }
    let (mut completed, mut all) = (0, 0);
    for _ in 0..2000 {
        for (tag, _) in mux.take() {
            completed += u64::from(tag.last);
            all += 1;
        }
        runtime.round();
    }
    let counters = runtime.counters();
    assert_eq!(completed, sent);
    assert_eq!(all, sent + counters.copies);
    assert_eq!(counters.copies + counters.copies_refused, 2 * sent);
    assert!(counters.copies_refused > 0 && counters.copies > 0, "{counters:?}");
}

#[test]
fn untagged_and_oversized_frames_complete_as_malformed() {
    let (_directory, path, mut mux) = setup();
    let mut runtime = attach(&path, &mut mux);
    let tx = &mut mux.connection.as_mut().unwrap().tx;
    for word in [0, 9, u32::MAX] {
        tx.push(word, &[9; 50]).unwrap();
    }
    assert!(tx.push(Tag::deliver(2, 5).emit(), &[0; 4000]).unwrap());
    tx.flush().unwrap();
    mux.give(2, 6, &[0; 60]);
    runtime.round();
    let got = mux.take();
    assert_eq!(got.len(), 5, "{got:?}");
    for (tag, bytes) in &got[..4] {
        assert_eq!((tag.verdict, tag.last), (TagVerdict::Drop(GuestDrop::Malformed), true));
        assert!(bytes.is_empty());
    }
    assert_eq!((got[3].0.vport, got[3].0.trace), (2, 5));
    assert_eq!(got[4].1, [0; 60]);
}

/// The guest sleeps without work, wakes for a frame, and finds a new mux when its mux dies.
#[test]
fn guest_sleeps_wakes_and_reconnects() {
    let (_directory, path, mut mux) = setup();
    let stop = Arc::new(AtomicBool::new(false));
    let guest = std::thread::spawn({
        let (path, stop) = (path.clone(), stop.clone());
        move || {
            let mut runtime = ProgramRuntime::new(&path, "test", Obedient::default()).unwrap();
            runtime.run(&stop).unwrap();
            (runtime.counters(), runtime.program().batches)
        }
    });
    for _ in 0..3 {
        mux.connect(|| std::thread::sleep(Duration::from_millis(1)));
        for number in 0..50u8 {
            if number % 10 == 0 {
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(mux.give(1, number, &[0, number]));
            let end = Instant::now() + PATIENCE;
            let got = loop {
                assert!(Instant::now() < end, "no answer to frame {number}");
                let got = mux.take();
                if !got.is_empty() {
                    break got;
                }
                std::thread::sleep(Duration::from_micros(50));
            };
            assert_eq!(got[0].1, [0, number]);
        }
        // The mux dies with its sockets, and another takes its place.
        drop(mux);
        mux = Mux::new(&path);
    }
    stop.store(true, Ordering::Relaxed);
    let (counters, batches) = guest.join().unwrap();
    assert_eq!((counters.received, counters.connections), (150, 3));
    assert_eq!(counters.yields, 0, "it never had many");
    assert!(batches <= 150 && counters.sleeps >= 15, "{counters:?}");
    // The 15 pauses are long enough for the guest to fall asleep. Each new mux rings once more.
    assert!(counters.wakes >= 10, "{counters:?}");
}

/// A guest that has had many frames and finds no more yields its CPU.
#[test]
fn guest_yields_its_cpu_after_many_frames() {
    let (_directory, path, mut mux) = setup();
    let stop = Arc::new(AtomicBool::new(false));
    let guest = std::thread::spawn({
        let stop = stop.clone();
        move || {
            let mut runtime = ProgramRuntime::new(&path, "test", Obedient::default()).unwrap();
            runtime.run(&stop).unwrap();
            runtime.counters()
        }
    });
    mux.connect(|| std::thread::sleep(Duration::from_millis(1)));
    for _ in 0..10 {
        let mut left = 256;
        // All at once, so that it does not sleep between them.
        let tx = &mut mux.connection.as_mut().unwrap().tx;
        let tag = Tag::deliver(1, 0).emit();
        (0..left).for_each(|_| until("room", || tx.push(tag, &[0, 0]).unwrap()));
        tx.flush().unwrap();
        until("answer", || {
            left -= mux.take().len();
            left == 0
        });
    }
    stop.store(true, Ordering::Relaxed);
    let counters = guest.join().unwrap();
    assert!(counters.received == 2560 && (1..=40).contains(&counters.yields), "{counters:?}");
}
