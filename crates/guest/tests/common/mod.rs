//! The mux's side of a trunk, for tests.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_memif::{Listener, MemifConnection};
use pdp_wire::tag::Tag;
use tempfile::TempDir;

pub const PATIENCE: Duration = Duration::from_secs(20);

/// A mux with one guest.
pub struct Mux {
    listener: Listener,
    pub connection: Option<MemifConnection>,
}

impl Mux {
    pub fn new(path: &Path) -> Self {
        Self { listener: Listener::bind(path).unwrap(), connection: None }
    }

    /// Waits for the guest, while `beside` lets it run.
    pub fn connect(&mut self, mut beside: impl FnMut()) {
        let end = Instant::now() + PATIENCE;
        let mut handshake = None;
        while self.connection.is_none() {
            assert!(Instant::now() < end, "no guest");
            beside();
            if handshake.is_none() {
                handshake = self.listener.accept().unwrap();
            }
            if let Some(shaking) = &mut handshake {
                match shaking.poll(|id| id == 0) {
                    Ok(connection) => self.connection = connection,
                    Err(_) => handshake = None,
                }
            }
        }
    }

    pub fn give(&mut self, vport: u16, trace: u8, frame: &[u8]) -> bool {
        let tx = &mut self.connection.as_mut().unwrap().tx;
        let pushed = tx.push(Tag::deliver(vport as u8, trace).emit(), frame).unwrap();
        tx.flush().unwrap();
        pushed
    }

    pub fn take(&mut self) -> Vec<(Tag, Vec<u8>)> {
        let rx = &mut self.connection.as_mut().unwrap().rx;
        let mut frames = Vec::new();
        rx.poll().unwrap();
        while frames.len() < 64
            && let Some(frame) = rx.take().unwrap()
        {
            let mut bytes = vec![0; frame.len()];
            frame.copy_to(&mut bytes);
            frames.push((Tag::parse(frame.metadata()).unwrap(), bytes));
        }
        rx.release();
        frames
    }
}

#[allow(dead_code, reason = "not every test has one mux")]
pub fn setup() -> (TempDir, PathBuf, Mux) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memif.sock");
    let mux = Mux::new(&path);
    (directory, path, mux)
}

/// Waits until `so` returns true.
#[allow(dead_code, reason = "not every test waits")]
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "no {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}
