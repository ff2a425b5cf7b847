//! Rate of frames that circulate between our two sides: server, ring, client, ring, server.
//!
//! `cargo run --release -p pdp-memif --example bounce-memif [-- FRAME_BYTES]` prints results for
//! one thread and for two, each as median, least and most of seven runs:
//! - million frames a second of wall time,
//! - million frames a second of the server's own CPU time,
//! - its cycles a frame (by the time stamp counter's rate).
//!
//! With one thread, these include the client's work. On a busy machine only the figures by CPU time
//! are meaningful, and with two threads none.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pdp_memif::{Buf, ConnectionState, Listener, MemifClient, MemifConnection, MemifSettings};

const BATCH: usize = 32;
const RUNS: usize = 7;
const RUN: Duration = Duration::from_millis(500);

/// Result of a run.
#[derive(Clone, Copy)]
struct Figure {
    wall_mpps: f64,
    cpu_mpps: f64,
    cycles_per_frame: f64,
}

fn main() {
    let bytes = std::env::args().nth(1).map_or(64, |text| text.parse().expect("frame bytes"));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("memif.sock");
    let one: Vec<_> = (0..RUNS).map(|_| one_thread(&path, bytes)).collect();
    let two: Vec<_> = (0..RUNS).map(|_| two_threads(&path, bytes)).collect();
    for (name, figures) in [("one thread", one), ("two threads", two)] {
        let spread = |of: fn(&Figure) -> f64| {
            let mut sorted: Vec<_> = figures.iter().map(of).collect();
            sorted.sort_by(f64::total_cmp);
            format!("{:.2} ({:.2}..{:.2})", sorted[RUNS / 2], sorted[0], sorted[RUNS - 1])
        };
        println!("{name}, {bytes} B frames:");
        println!("  {} Mpps", spread(|figure| figure.wall_mpps));
        println!("  {} Mpps of CPU time", spread(|figure| figure.cpu_mpps));
        println!("  {} cycles/frame", spread(|figure| figure.cycles_per_frame));
    }
}

fn pair(path: &Path) -> (MemifClient, MemifConnection) {
    let listener = Listener::bind(path).expect("listener");
    let mut client = MemifClient::new(path, 0, "bounce", MemifSettings::default()).expect("client");
    client.poll();
    let mut handshake = listener.accept().expect("accept").expect("a client");
    let mut connection = None;
    while client.poll() != ConnectionState::Up {
        if connection.is_none() {
            connection = handshake.poll(|_| true).expect("handshake");
        }
    }
    (client, connection.expect("a connection"))
}

/// Sends received frames back; returns their number.
fn bounce(client: &mut MemifClient, bufs: &mut Vec<Buf>) -> usize {
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

/// Takes returned frames and sends a batch; returns the number of returned frames.
fn drive(server: &mut MemifConnection, frame: &[u8], space: &mut [u8]) -> usize {
    let mut count = 0;
    server.rx.poll().expect("honest client");
    while count < BATCH
        && let Some(frame) = server.rx.take().expect("honest client")
    {
        frame.copy_to(space);
        count += 1;
    }
    server.rx.release();
    for _ in 0..BATCH {
        if !server.tx.push(1, frame).expect("honest client") {
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

/// CPU time of this thread, seconds.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn measure(mut step: impl FnMut() -> usize) -> Figure {
    let (start, start_cycles, start_cpu) = (Instant::now(), cycles(), cpu_seconds());
    let mut frames = 0;
    while start.elapsed() < RUN {
        for _ in 0..64 {
            frames += step();
        }
    }
    let cpu = cpu_seconds() - start_cpu;
    let wall = start.elapsed().as_secs_f64();
    let frames = frames.max(1) as f64;
    Figure {
        wall_mpps: frames / wall / 1e6,
        cpu_mpps: frames / cpu / 1e6,
        cycles_per_frame: (cycles() - start_cycles) as f64 / wall * cpu / frames,
    }
}

fn one_thread(path: &Path, bytes: usize) -> Figure {
    let (mut client, mut server) = pair(path);
    let (frame, mut space, mut bufs) = (vec![7; bytes], vec![0; 1 << 16], Vec::new());
    measure(|| {
        let count = drive(&mut server, &frame, &mut space);
        bounce(&mut client, &mut bufs);
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
                bounce(&mut client, &mut bufs);
            }
        });
        let figure = measure(|| drive(&mut server, &frame, &mut space));
        stop.store(true, Ordering::Relaxed);
        figure
    })
}
