//! Debian's DPDK (22.11, net_memif) as the other side of each of our roles.
//!
//! Runs `dpdk-testpmd` without huge pages, devices and privileges; needs about 300 MB.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{accept, soon};
use pdp_memif::{ConnectionState, Listener, MemifClient, MemifConnection, MemifSettings};

/// A running testpmd; killed when dropped.
struct Testpmd(Child, PathBuf);

impl Testpmd {
    /// Forwards between its ports: port 0 to 1 and back, or port 0 to itself if it is alone.
    fn start(directory: &Path, devices: &[String]) -> Self {
        let mut command = Command::new("stdbuf");
        command.args(["-oL", "setpriv"]);
        command.args(["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]);
        command.arg("dpdk-testpmd");
        command.args(["--no-huge", "--no-shconf", "--no-pci", "--no-telemetry", "-m", "256"]);
        command.args(["-l", "0,1"]);
        for device in devices {
            command.arg(format!("--vdev={device}"));
        }
        command.args([
            "--",
            "--forward-mode=io",
            "--total-num-mbufs=8192",
            "--no-mlockall",
            "--no-flush-rx",
        ]);
        command.args(["--auto-start", "--stats-period=3600"]);
        // testpmd ends at the end of its input.
        command.stdin(Stdio::piped()).current_dir(directory);
        let path = directory.join("testpmd.log");
        let log = std::fs::File::create(&path).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        Self(command.spawn().expect("setpriv and dpdk-testpmd (package dpdk)"), path)
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(&self.1).unwrap_or_default());
        }
    }
}

/// Ethernet frame whose bytes encode its number. Lengths exceed the buffers' 2048 bytes.
fn frame(number: usize) -> Vec<u8> {
    let length = 60 + (number * 37) % 1400;
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5];
    frame.extend(number.to_le_bytes());
    frame.extend((frame.len()..length).map(|at| (at ^ number) as u8));
    frame
}

/// Pushes frames `from..to` into one connection; expects them whole and in order from another.
fn forward(tx: &mut MemifConnection, rx: &mut MemifConnection, from: usize, to: usize) {
    let (mut sent, mut seen) = (from, from);
    soon("all frames", || {
        // At most as many in flight as the smallest queue holds.
        while sent < to && sent - seen < 256 && tx.tx.push(0, &frame(sent)).unwrap() {
            sent += 1;
        }
        tx.tx.flush().unwrap();
        rx.rx.poll().unwrap();
        while let Some(taken) = rx.rx.take().unwrap() {
            let mut bytes = vec![0; taken.len()];
            taken.copy_to(&mut bytes);
            assert_eq!(bytes, frame(seen), "frame {seen}");
            seen += 1;
        }
        rx.rx.release();
        (seen == to).then_some(())
    });
}

#[test]
fn testpmd_as_client_carries_frames_between_two_interfaces() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memif.sock");
    let listener = Listener::bind(&path).unwrap();
    let device = |id: u32, more: &str| {
        let socket = path.display();
        format!("net_memif{id},role=client,id={id},socket={socket},socket-abstract=no{more}")
    };
    let testpmd = Testpmd::start(directory.path(), &[device(0, ""), device(1, ",rsize=8")]);
    let mut ports = [accept(&listener).unwrap(), accept(&listener).unwrap()];
    ports.sort_by_key(|port| port.interface_id);
    let [mut a, mut b] = ports;
    assert_eq!((a.interface_id, b.interface_id), (0, 1));
    assert!(a.name.starts_with("DPDK"), "{}", a.name);
    assert_eq!(a.interface_name, "net_memif0");
    forward(&mut a, &mut b, 0, 5000);
    forward(&mut b, &mut a, 5000, 10_000);

    assert_eq!(a.control.check(), Ok(()));
    drop(testpmd);
    soon("seen to be gone", || a.control.check().is_err().then_some(()));
}

#[test]
fn testpmd_as_server_sends_back_what_our_client_sends() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memif.sock");
    let device =
        format!("net_memif0,role=server,id=7,socket={},socket-abstract=no", path.display());
    let settings = MemifSettings { ring_log2: 8, ..MemifSettings::default() };
    let mut client = MemifClient::new(&path, 7, "pdp test", settings).unwrap();
    // The second testpmd finds the client's memory as the first left it.
    for _ in 0..2 {
        let _testpmd = Testpmd::start(directory.path(), std::slice::from_ref(&device));
        soon("link", || (client.poll() == ConnectionState::Up).then_some(()));
        let (mut sent, mut seen) = (0, 0);
        let mut bufs = Vec::new();
        soon("all frames", || {
            while sent < 5000 && sent - seen < 256 {
                let bytes = frame(sent);
                let Some(mut buf) = client.alloc() else { break };
                assert!(buf.set_len(bytes.len()));
                client.bytes_mut(&mut buf).copy_from_slice(&bytes);
                if let Err(buf) = client.send(buf) {
                    client.free(buf);
                    break;
                }
                sent += 1;
            }
            client.flush();
            client.receive(&mut bufs, 32);
            for buf in bufs.drain(..) {
                assert!(!buf.continues());
                assert_eq!(client.bytes(&buf), frame(seen), "frame {seen}");
                seen += 1;
                client.free(buf);
            }
            (seen == 5000).then_some(())
        });
        drop(_testpmd);
        soon("down", || (client.poll() == ConnectionState::Down).then_some(()));
        std::fs::remove_file(&path).unwrap();
    }
}
