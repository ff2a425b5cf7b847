//! Programs on the guest's runtime, behind a mux that sends any frame with any tag.

use std::cell::RefCell;
use std::path::Path;

use pdp_guest::router::RouterProgram;
use pdp_guest::{ForwardingProgram, ProgramRuntime};
use pdp_memif::{Handshake, Listener, MemifConnection};
use pdp_wire::tag::{Tag, TagVerdict};

use crate::input::FuzzInput;
use label::LabelSwitch;

#[path = "../../guest/src/bin/pdp-label.rs"]
#[allow(dead_code)]
mod label;

/// Vports of the label switch.
const VPORTS: u16 = 3;

/// Frames in the rings.
const QUEUE: u32 = 64;

/// Frames of one input: few enough for all completions, and copies to all vports.
const FRAMES_MAX: usize = 16;

struct RuntimeBench<P> {
    runtime: ProgramRuntime<P>,
    mux: MemifConnection,
    _handshake: Handshake,
    _directory: tempfile::TempDir,
}

impl<P: ForwardingProgram> RuntimeBench<P> {
    fn new(program: impl FnOnce(&Path) -> P) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("memif.sock");
        let listener = Listener::bind(&path).expect("a socket");
        let program = program(&directory.path().join("routes.sock"));
        let mut runtime =
            ProgramRuntime::with_queue(&path, "fuzz", QUEUE, program).expect("memory");
        let mut handshake = loop {
            runtime.round();
            if let Some(handshake) = listener.accept().expect("a socket") {
                break handshake;
            }
        };
        let mux = loop {
            runtime.round();
            if let Some(mux) = handshake.poll(|_| true).expect("an honest guest") {
                break mux;
            }
        };
        while runtime.counters().connections == 0 {
            runtime.round();
        }
        Self { runtime, mux, _handshake: handshake, _directory: directory }
    }

    /// Checks that each frame is completed once, and sent only to existing vports.
    fn run(&mut self, mut input: FuzzInput<'_>, vports: u8) {
        let mut given = 0;
        while !input.is_empty() && given < FRAMES_MAX {
            let choice = input.byte();
            let word = match choice & 0x80 {
                0 => Tag::deliver(choice % vports, choice >> 4).emit(),
                _ => input.long(),
            };
            let mut frame = input.counted().to_vec();
            frame.resize(frame.len().max(if choice & 0x40 == 0 { 0 } else { 3000 }), choice);
            if !self.mux.tx.push(word, &frame).expect("an honest guest") {
                break;
            }
            given += 1;
        }
        self.mux.tx.flush().expect("an honest guest");
        let (mut completed, mut rounds) = (0, 0);
        while completed < given {
            self.runtime.round();
            self.mux.rx.poll().expect("an honest guest");
            while let Some(frame) = self.mux.rx.take().expect("an honest guest") {
                let tag = Tag::parse(frame.metadata()).expect("a tag");
                assert_ne!(tag.verdict, TagVerdict::Deliver);
                if tag.verdict == TagVerdict::Out {
                    assert!(tag.vport < vports, "{tag:?}");
                }
                assert!(frame.len() <= 2048);
                completed += usize::from(tag.last);
            }
            self.mux.rx.release();
            rounds += 1;
            assert!(rounds < 1000, "{completed} of {given} completed");
        }
        assert_eq!(completed, given);
        self.runtime.round();
        assert!(!self.mux.rx.poll().expect("an honest guest"), "and no more");
    }
}

/// The label switch and the router, which has no routes, on any frame.
pub(crate) fn guests(bytes: &[u8]) {
    thread_local! {
        static LABEL: RefCell<RuntimeBench<LabelSwitch>> =
            RefCell::new(RuntimeBench::new(|_| LabelSwitch::new(VPORTS)));
        static ROUTER: RefCell<RuntimeBench<RouterProgram>> = RefCell::new(RuntimeBench::new(|path| RouterProgram::new(path, 0)));
    }
    let mut input = FuzzInput(bytes);
    if input.byte() & 1 == 0 {
        LABEL.with_borrow_mut(|bench| bench.run(input, VPORTS as u8));
    } else {
        ROUTER.with_borrow_mut(|bench| bench.run(input, VPORTS as u8));
    }
}
