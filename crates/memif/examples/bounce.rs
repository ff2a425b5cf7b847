//! How fast frames go round between our two sides: server, ring, client, ring, server.
//!
//! `cargo run --release -p pdp-memif --example bounce [-- FRAME_BYTES]` prints, for one thread
//! and for two, million frames a second and CPU cycles a frame (both sides together) of seven
//! runs: median, least and most. Two threads on one CPU say little; see the placement.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_memif::{Buf, Client, Connection, Link, Listener, Settings};

const BATCH: usize = 32;
const RUNS: usize = 7;
const RUN: Duration = Duration::from_millis(500);

/// What a run came to.
#[derive(Clone, Copy)]
struct Figure {
    mega_frames_per_second: f64,
    cycles_per_frame: f64,
}

fn main() {
    let bytes = std::env::args().nth(1).map_or(64, |text| text.parse().expect("frame bytes"));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("memif.sock");
    let one: Vec<_> = (0..RUNS).map(|_| one_thread(&path, bytes)).collect();
    let two: Vec<_> = (0..RUNS).map(|_| two_threads(&path, bytes)).collect();
    for (name, figures) in [("one thread", one), ("two threads", two)] {
        let mut rates: Vec<_> = figures.iter().map(|f| f.mega_frames_per_second).collect();
        let mut cycles: Vec<_> = figures.iter().map(|f| f.cycles_per_frame).collect();
        rates.sort_by(f64::total_cmp);
        cycles.sort_by(f64::total_cmp);
        println!(
            "{name}: {bytes} B, {:.2} Mpps ({:.2}..{:.2}), {:.0} cycles/frame ({:.0}..{:.0})",
            rates[RUNS / 2],
            rates[0],
            rates[RUNS - 1],
            cycles[RUNS / 2],
            cycles[0],
            cycles[RUNS - 1],
        );
    }
}

fn pair(path: &Path) -> (Client, Connection) {
    let listener = Listener::bind(path).expect("listener");
    let mut client = Client::new(path, 0, "bounce", Settings::default()).expect("client");
    client.poll();
    let mut handshake = listener.accept().expect("accept").expect("a client");
    let mut connection = None;
    while client.poll() != Link::Up {
        if connection.is_none() {
            connection = handshake.poll(|_| true).expect("handshake");
        }
    }
    (client, connection.expect("a connection"))
}

/// Sends back what came; returns how many frames.
fn turn(client: &mut Client, bufs: &mut Vec<Buf>) -> usize {
    let count = client.receive(bufs, BATCH);
    for mut buf in bufs.drain(..) {
        client.bytes_mut(&mut buf)[0] ^= 1;
        if let Err(buf) = client.send(buf) {
            client.free(buf);
        }
    }
    client.flush();
    count
}

/// Takes what came back and sends a batch; returns how many frames came back.
fn drive(server: &mut Connection, frame: &[u8], space: &mut [u8]) -> usize {
    let count = server.rx.peek(BATCH).expect("honest client");
    for number in 0..count {
        let length = server.rx.frame_len(number);
        server.rx.copy_out(number, 0, &mut space[..length]);
    }
    server.rx.release(count);
    for _ in 0..BATCH {
        if !server.tx.push(&[&frame[..8], &frame[8..]]).expect("honest client") {
            break;
        }
    }
    server.tx.flush().expect("honest client");
    count
}

/// Time stamp counter, cycles at the nominal rate.
fn cycles() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

fn measure(threads: f64, mut step: impl FnMut() -> usize) -> Figure {
    let (start, start_cycles) = (Instant::now(), cycles());
    let mut frames = 0;
    while start.elapsed() < RUN {
        for _ in 0..64 {
            frames += step();
        }
    }
    let spent = (cycles() - start_cycles) as f64;
    Figure {
        mega_frames_per_second: frames as f64 / start.elapsed().as_secs_f64() / 1e6,
        cycles_per_frame: threads * spent / frames.max(1) as f64,
    }
}

fn one_thread(path: &Path, bytes: usize) -> Figure {
    let (mut client, mut server) = pair(path);
    let (frame, mut space, mut bufs) = (vec![7; bytes], vec![0; 1 << 16], Vec::new());
    measure(1.0, || {
        let count = drive(&mut server, &frame, &mut space);
        turn(&mut client, &mut bufs);
        count
    })
}

fn two_threads(path: &Path, bytes: usize) -> Figure {
    let (mut client, mut server) = pair(path);
    let (frame, mut space) = (vec![7; bytes], vec![0; 1 << 16]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bufs = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                turn(&mut client, &mut bufs);
            }
        });
        let figure = measure(2.0, || drive(&mut server, &frame, &mut space));
        stop.store(true, Ordering::Relaxed);
        figure
    })
}
