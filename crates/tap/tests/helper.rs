//! The helper with real TAPs in their own namespaces, and a mux that joins two vports.
//!
//! Needs root and iproute2.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdp_memif::{Listener, MemifConnection};
use pdp_model::TapStats;
use pdp_proto::channel::Channel;
use pdp_proto::tap::{TapPort, TapReply, TapRequest};
use pdp_wire::tag::{Tag, TagVerdict};

/// Longest time that "soon" may take on a busy machine.
const SOON: Duration = Duration::from_secs(20);

fn soon<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(value) = step() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Network namespace with one TAP, `tap0`, which has an address.
struct Namespace {
    name: String,
    tap: OwnedFd,
}

impl Namespace {
    fn new(address: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("pdp-tap-{}-{number}", std::process::id());
        ip(&format!("netns add {name}"));
        let tap = tap_in(&name);
        ip(&format!("-n {name} link set tap0 mtu 9000 up"));
        ip(&format!("-n {name} address add {address}/24 dev tap0"));
        Self { name, tap }
    }

    fn ping(&self, arguments: &str) -> bool {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, "ping", "-W", "1", "-i", "0.02"]);
        command.args(arguments.split(' ')).stdout(Stdio::null());
        command.status().unwrap().success()
    }

    /// Pings until an answer arrives.
    fn reaches(&self, address: &str) {
        soon(address, || self.ping(&format!("-c 1 {address}")).then_some(()));
    }

    fn has_carrier(&self) -> bool {
        let output = Command::new("ip").args(["-n", &self.name, "link", "show", "tap0"]).output();
        String::from_utf8(output.unwrap().stdout).unwrap().contains("LOWER_UP")
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.name]).status();
    }
}

/// Makes `tap0` in a namespace, from a new thread, since this moves the thread there.
fn tap_in(namespace: &str) -> OwnedFd {
    let netns = std::fs::File::open(format!("/run/netns/{namespace}")).unwrap();
    std::thread::spawn(move || {
        // SAFETY: moves only this thread into a namespace that is open.
        assert_eq!(unsafe { libc::setns(netns.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
        let tun = std::fs::File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        // SAFETY: ifreq is plain data, for which zero is a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name[..4].copy_from_slice(&b"tap0".map(|byte| byte as libc::c_char));
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
        // SAFETY: TUNSETIFF reads and writes one ifreq.
        let result = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &mut request) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from(tun)
    })
    .join()
    .unwrap()
}

/// Forwards frames between vport 0 and vport 1.
struct Mux {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Mux {
    fn start(path: &Path) -> Self {
        let listener = Listener::bind(path).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut handshake = None;
            let mut connection: Option<MemifConnection> = None;
            while !stopped.load(Ordering::Relaxed) {
                if let Some(fresh) = listener.accept().unwrap() {
                    handshake = Some(fresh);
                }
                if let Some(shaking) = &mut handshake
                    && let Some(fresh) = shaking.poll(|id| id == 0).unwrap()
                {
                    connection = Some(fresh);
                    handshake = None;
                }
                if let Some(connected) = &mut connection {
                    if connected.control.check().is_err() {
                        connection = None;
                        continue;
                    }
                    turn_around(connected);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

fn turn_around(connection: &mut MemifConnection) {
    connection.rx.poll().unwrap();
    while let Some(frame) = connection.rx.take().unwrap() {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        let tag = Tag::parse(frame.metadata()).unwrap();
        assert_eq!((tag.verdict, tag.last), (TagVerdict::Out, false));
        let deliver = Tag::deliver(1 - tag.vport, 0).emit();
        connection.tx.push(deliver, &bytes).unwrap();
        // Vport 9 has no TAP, which must not affect others.
        connection.tx.push(Tag::deliver(9, 0).emit(), &bytes).unwrap();
    }
    connection.rx.release();
    connection.tx.flush().unwrap();
}

impl Drop for Mux {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

/// A running helper; killed (-9) when dropped.
struct Helper(Child);

impl Helper {
    fn start(directory: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pdp-tap"));
        command.arg("--trunk").arg(directory.join("trunk.sock"));
        let control = directory.join("control.sock");
        let _ = std::fs::remove_file(&control);
        let listener = std::os::unix::net::UnixListener::bind(&control).unwrap();
        command.arg("--control").stdin(OwnedFd::from(listener));
        Self(command.spawn().unwrap())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// pdpd's side of the control socket.
struct Daemon(Channel);

impl Daemon {
    fn connect(directory: &Path) -> Self {
        let path = directory.join("control.sock");
        let channel = soon("control socket", || Channel::connect(&path).ok());
        channel.stream().set_read_timeout(Some(SOON)).unwrap();
        Self(channel)
    }

    fn ask(&mut self, request: &TapRequest, fds: &[&OwnedFd]) -> (TapReply, Vec<OwnedFd>) {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.0.send(request, &fds).unwrap();
        self.0.receive().unwrap().expect("an answer")
    }

    fn serve(&mut self, vports: &[u16], fds: &[&OwnedFd]) -> TapReply {
        let ports = vports.iter().map(|&vport| port(vport)).collect();
        self.ask(&TapRequest::Serve { ports }, fds).0
    }

    fn stats(&mut self, vport: u16) -> TapStats {
        let (TapReply::Stats { ports }, _) = self.ask(&TapRequest::Stats, &[]) else {
            panic!("no stats");
        };
        ports.into_iter().find(|port| port.vport == vport).unwrap().stats
    }
}

fn port(vport: u16) -> TapPort {
    TapPort { vport, name: format!("eth{vport}") }
}

#[test]
fn pings_cross_and_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (Namespace::new("10.9.0.1"), Namespace::new("10.9.0.2"));
    let _mux = Mux::start(&directory.path().join("trunk.sock"));
    let _helper = Helper::start(directory.path());
    let mut daemon = Daemon::connect(directory.path());
    assert_eq!(daemon.serve(&[0, 1], &[&a.tap, &b.tap]), TapReply::Done);
    a.reaches("10.9.0.2");
    // Frames of one buffer, at the boundary to two, and of five.
    for bytes in [56, 1472, 1900, 1933, 1934, 1935, 1936, 1937, 1938, 1942, 1943, 1944, 8900] {
        assert!(a.ping(&format!("-c 2 -s {bytes} 10.9.0.2")), "{bytes} bytes");
    }
    // The TAPs' counters agree at both ends of a burst, once it is over.
    soon("counters agree", || {
        let (from_a, to_b) = (daemon.stats(0).from_tap, daemon.stats(1).to_tap);
        (from_a == to_b && from_a >= 28).then_some(())
    });
    for vport in [0, 1] {
        let stats = daemon.stats(vport);
        assert_eq!((stats.to_tap_refused, stats.from_tap_dropped), (0, 0));
    }
    assert!(daemon.stats(9).to_tap_refused > 0);
}

#[test]
fn refusing_port_is_counted_and_delays_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (Namespace::new("10.9.0.1"), Namespace::new("10.9.0.2"));
    let _mux = Mux::start(&directory.path().join("trunk.sock"));
    let _helper = Helper::start(directory.path());
    let mut daemon = Daemon::connect(directory.path());
    assert_eq!(daemon.serve(&[0, 1], &[&a.tap, &b.tap]), TapReply::Done);
    a.reaches("10.9.0.2");
    ip(&format!("-n {} link set tap0 down", b.name));
    assert!(!a.ping("-c 3 10.9.0.2"));
    soon("refused", || (daemon.stats(1).to_tap_refused > 0).then_some(()));
    ip(&format!("-n {} link set tap0 up", b.name));
    a.reaches("10.9.0.2");
}

#[test]
fn taps_keep_carrier_across_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, b) = (Namespace::new("10.9.0.1"), Namespace::new("10.9.0.2"));
    let _mux = Mux::start(&directory.path().join("trunk.sock"));
    let helper = Helper::start(directory.path());
    let mut daemon = Daemon::connect(directory.path());
    assert_eq!(daemon.serve(&[1, 0], &[&b.tap, &a.tap]), TapReply::Done);
    a.reaches("10.9.0.2");

    // A helper dies. Its successor gets the TAPs from pdpd.
    drop(helper);
    assert!(a.has_carrier() && b.has_carrier());
    let _helper = Helper::start(directory.path());
    let mut daemon = soon("successor", || {
        let mut daemon = Daemon::connect(directory.path());
        daemon.0.send(&TapRequest::Hold, &[]).ok()?;
        let (reply, fds) = daemon.0.receive().ok()??;
        assert_eq!((reply, fds.len()), (TapReply::Held { ports: vec![] }, 0));
        Some(daemon)
    });
    assert_eq!(daemon.serve(&[1, 0], &[&b.tap, &a.tap]), TapReply::Done);
    a.reaches("10.9.0.2");

    // pdpd dies in the middle of a message. Its successor gets the TAPs from the helper.
    use std::io::Write;
    daemon.0.stream().write_all(&[3]).unwrap();
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let b_tap = {
        let (name, tap) = (&b.name, null());
        let mut second = Daemon::connect(directory.path());
        // Now only the helper has descriptors of a's TAP.
        drop(std::mem::replace(&mut a.tap, tap));
        assert!(a.has_carrier(), "{name}");
        drop(daemon);
        let (reply, fds) = second.ask(&TapRequest::Hold, &[]);
        assert_eq!(reply, TapReply::Held { ports: vec![port(1), port(0)] });
        let [b_tap, a_tap] = <[OwnedFd; 2]>::try_from(fds).unwrap();
        a.tap = a_tap;
        assert_eq!(second.serve(&[1, 0], &[&b_tap, &a.tap]), TapReply::Done);
        b_tap
    };
    a.reaches("10.9.0.2");
    drop(b_tap);
    assert!(b.has_carrier());
}

#[test]
fn helper_reconnects_to_a_restarted_mux() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (Namespace::new("10.9.0.1"), Namespace::new("10.9.0.2"));
    let trunk = directory.path().join("trunk.sock");
    let _helper = Helper::start(directory.path());
    let mut daemon = Daemon::connect(directory.path());
    assert_eq!(daemon.serve(&[0, 1], &[&a.tap, &b.tap]), TapReply::Done);
    for _ in 0..3 {
        // Nobody reads the TAPs meanwhile, and nothing is counted as dropped.
        assert!(!a.ping("-c 1 10.9.0.2"));
        let _mux = Mux::start(&trunk);
        a.reaches("10.9.0.2");
    }
    assert_eq!(daemon.stats(0).from_tap_dropped, 0);
    assert!(a.has_carrier());
}

#[test]
fn invalid_serve_request_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (Namespace::new("10.9.0.1"), Namespace::new("10.9.0.2"));
    let _mux = Mux::start(&directory.path().join("trunk.sock"));
    let _helper = Helper::start(directory.path());
    let mut daemon = Daemon::connect(directory.path());
    assert_eq!(daemon.serve(&[0, 1], &[&a.tap, &b.tap]), TapReply::Done);
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    for (vports, fds) in [
        (&[0, 1][..], &[&a.tap][..]),
        (&[0], &[&a.tap, &b.tap]),
        (&[0, 0], &[&a.tap, &b.tap]),
        (&[0, 256], &[&a.tap, &b.tap]),
        (&[0, 1], &[&a.tap, &file]),
    ] {
        let reply = daemon.serve(vports, fds);
        assert!(matches!(reply, TapReply::Failed { .. }), "{vports:?}: {reply:?}");
    }
    a.reaches("10.9.0.2");
    let before = daemon.stats(0).from_tap;
    assert_eq!(daemon.serve(&[0], &[&a.tap]), TapReply::Done);
    assert!(daemon.stats(0).from_tap >= before, "counters go on");
    assert!(!a.ping("-c 1 10.9.0.2"));
    assert_eq!(daemon.serve(&[], &[]), TapReply::Done);
    assert_eq!(daemon.ask(&TapRequest::Hold, &[]).0, TapReply::Held { ports: vec![] });
}

#[test]
fn inherited_taps_need_no_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (Namespace::new("10.9.0.1"), Namespace::new("10.9.0.2"));
    let trunk = directory.path().join("trunk.sock");
    let _mux = Mux::start(&trunk);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pdp-tap"));
    command.arg("--trunk").arg(&trunk).arg("--inherit");
    command.arg(format!("0={},1={}", a.tap.as_raw_fd(), b.tap.as_raw_fd()));
    for tap in [&a.tap, &b.tap] {
        rustix::io::fcntl_setfd(tap, rustix::io::FdFlags::empty()).unwrap();
    }
    let _helper = Helper(command.spawn().unwrap());
    a.reaches("10.9.0.2");
}
