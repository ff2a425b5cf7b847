//! Sends frames through an unprivileged `dpdk-testpmd` that forwards between two memif interfaces
//! of our server. Prints the rate of returning frames.
//!
//! `cargo run --release -p pdp-memif --example testpmd [-- FRAME_BYTES]`
//! starts testpmd on CPU 1 by itself, and drives it from CPU 0. The
//! figures are those of the example `bounce`, for the driving side.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pdp_memif::{Listener, MemifConnection};

const BATCH: usize = 32;
const RUNS: usize = 7;
const RUN: Duration = Duration::from_millis(300);

fn main() {
    let bytes: usize = std::env::args().nth(1).map_or(64, |text| text.parse().expect("bytes"));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("memif.sock");
    let listener = Listener::bind(&path).expect("listener");
    let mut testpmd = start(directory.path(), &path);
    let mut ports = [accept(&listener), accept(&listener)];
    ports.sort_by_key(|port| port.interface_id);
    let [mut a, mut b] = ports;
    let frame = vec![2; bytes];
    let mut space = vec![0; 1 << 16];
    // Until testpmd forwards.
    let deadline = Instant::now() + Duration::from_secs(20);
    while drive(&mut a, &mut b, &frame, &mut space) == (0, 0) {
        assert!(Instant::now() < deadline, "testpmd does not forward");
    }
    for (name, both) in [("one way", false), ("both ways", true)] {
        let mut rates: Vec<f64> = (0..RUNS)
            .map(|_| {
                let start = Instant::now();
                let mut frames = 0;
                while start.elapsed() < RUN {
                    for _ in 0..64 {
                        frames += drive(&mut a, &mut b, &frame, &mut space).1;
                        if both {
                            frames += drive(&mut b, &mut a, &frame, &mut space).1;
                        }
                    }
                }
                frames as f64 / start.elapsed().as_secs_f64() / 1e6
            })
            .collect();
        rates.sort_by(f64::total_cmp);
        println!(
            "{name}: {bytes} B, {:.2} Mpps out of testpmd ({:.2}..{:.2})",
            rates[RUNS / 2],
            rates[0],
            rates[RUNS - 1]
        );
    }
    let _ = testpmd.kill();
    let _ = testpmd.wait();
}

/// Pushes a batch into `tx` and takes one from `rx`. Returns the frames pushed and taken.
fn drive(
    tx: &mut MemifConnection,
    rx: &mut MemifConnection,
    frame: &[u8],
    space: &mut [u8],
) -> (usize, usize) {
    let mut count = 0;
    rx.rx.poll().expect("honest client");
    while count < BATCH
        && let Some(frame) = rx.rx.take().expect("honest client")
    {
        frame.copy_to(space);
        count += 1;
    }
    rx.rx.release();
    let mut pushed = 0;
    while pushed < BATCH && tx.tx.push(0, frame).expect("honest client") {
        pushed += 1;
    }
    tx.tx.flush().expect("honest client");
    (pushed, count)
}

fn accept(listener: &Listener) -> MemifConnection {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut handshake = None;
    loop {
        assert!(Instant::now() < deadline, "testpmd does not connect");
        match &mut handshake {
            None => handshake = listener.accept().expect("accept"),
            Some(shaking) => {
                if let Some(connection) = shaking.poll(|_| true).expect("handshake") {
                    return connection;
                }
            }
        }
    }
}

fn start(directory: &Path, socket: &Path) -> Child {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
    command.args(["--bounding-set=-all", "--inh-caps=-all", "dpdk-testpmd"]);
    command.args(["--no-huge", "--no-shconf", "--no-pci", "--no-telemetry", "-m", "256"]);
    command.args(["--lcores", "0@0,1@1"]);
    for id in 0..2 {
        let socket = socket.display();
        command.arg(format!(
            "--vdev=net_memif{id},role=client,id={id},socket={socket},socket-abstract=no"
        ));
    }
    command.args(["--", "--forward-mode=io", "--total-num-mbufs=8192", "--no-mlockall"]);
    command.args(["--auto-start", "--stats-period=3600", "--no-flush-rx"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    std::fs::set_permissions(directory, std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .expect("directory open to testpmd");
    command.spawn().expect("setpriv and dpdk-testpmd (package dpdk)")
}
