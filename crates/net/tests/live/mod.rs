//! Frames that the kernel itself makes and counts, network namespaces, and devices between them
//! (`bpf/measure.bpf.c`), for tests and measurements.

#![allow(dead_code, unused_imports, reason = "each test uses some of it")]

#[path = "../common/mod.rs"]
mod common;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput, ProgramMut,
};
use pdp_net::interface::InterfaceInfo;
use pdp_net::netns::within;

pub use common::{Pins, Place, adds_up, eventually, isolated, run, sum_of};

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/measure.bpf.o"));

/// From include/uapi/linux/bpf.h: BPF_F_TEST_XDP_LIVE_FRAMES.
const LIVE_FRAMES: u32 = 1 << 1;

/// Size of `struct xdp_md`, and the offset of the frame's end in it.
const XDP_MD_BYTES: usize = 24;
const XDP_MD_DATA_END: usize = 4;

/// `struct device` and `struct settings`.
const DEVICE_BYTES: usize = 112;
const SETTINGS_BYTES: usize = 40;

/// Offset of the rate in the latter, and of its state.
const PACE: std::ops::Range<usize> = 8..32;

/// Network namespace that disappears with this value.
pub struct Netns {
    child: Child,
    fd: OwnedFd,
}

impl Netns {
    pub fn new() -> Self {
        let command = ["-n", "sleep", "1000"];
        let child = Command::new("unshare").args(command).stdout(Stdio::null()).spawn().unwrap();
        let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let path = format!("/proc/{}/ns/net", child.id());
        eventually("it is in its namespace", || {
            std::fs::read_link(&path).is_ok_and(|netns| netns != own)
        });
        let fd = File::open(path).unwrap().into();
        Self { child, fd }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn index(&self, device: &str) -> u32 {
        within(self.fd(), || InterfaceInfo::by_name(device)).unwrap().index
    }

    /// Returns the output of a shell command there, if it succeeds.
    pub fn run(&self, script: &str) -> String {
        let pid = self.pid().to_string();
        output(Command::new("nsenter").args(["-t", &pid, "-n", "sh", "-ec", script]), script)
    }

    /// Runs commands of ip(8), one per line, and ignores failures. Commands for IPv4 and for both
    /// families run first, then those that begin with `-6`.
    pub fn ip(&self, lines: &str) {
        let (v6, others): (Vec<&str>, Vec<&str>) =
            lines.lines().map(str::trim).partition(|line| line.starts_with("-6 "));
        let v6: Vec<&str> = v6.iter().filter_map(|line| line.strip_prefix("-6 ")).collect();
        for (family, lines) in [("-4", others), ("-6", v6)] {
            self.batch(family, &lines.join("\n"));
        }
    }

    fn batch(&self, family: &str, lines: &str) {
        use std::io::Write;
        if lines.is_empty() {
            return;
        }
        let pid = self.pid().to_string();
        let mut command = Command::new("nsenter");
        command.args(["-t", &pid, "-n", "ip"]);
        if family == "-6" {
            command.arg(family);
        }
        let mut child = command
            .args(["-force", "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(if std::env::var("PDP_SHORT_VERBOSE").is_ok() {
                Stdio::inherit()
            } else {
                Stdio::null()
            })
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        child.stdin.take();
        let _ = child.wait().unwrap();
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn output(command: &mut Command, script: &str) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{script}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Target of a generator's frames: a device of its namespace, and the MAC and IP addresses in them.
#[derive(Clone, Copy, Default)]
pub struct To {
    pub index: u32,
    /// The device is the root end of this port: each frame is
    /// passed to the inner end, as by its program.
    pub port: Option<u32>,
    pub mac: [u8; 6],
    pub source: [u8; 4],
    pub destination: [u8; 4],
}

/// The programs, loaded.
pub struct Live {
    object: Object,
    links: Vec<Link>,
    bytes: usize,
}

impl Live {
    /// Generator with frames of this size.
    pub fn new(bytes: usize) -> Self {
        libbpf_rs::set_print(None);
        let object = ObjectBuilder::default().open_memory(OBJECT).unwrap().load().unwrap();
        let mut this = Self { object, links: Vec::new(), bytes };
        // On an interface that receives nothing: a program that is attached nowhere starts slowly.
        this.attach("generate", InterfaceInfo::by_name("lo").unwrap().index);
        this
    }

    fn program(&self, name: &str) -> ProgramMut<'_> {
        self.object.progs_mut().find(|program| program.name() == name).unwrap()
    }

    fn map(&self, name: &str) -> MapHandle {
        MapHandle::try_from(&self.object.maps().find(|map| map.name() == name).unwrap()).unwrap()
    }

    /// Attaches one of the programs to a device of the
    /// thread's namespace, as long as this value exists.
    pub fn attach(&mut self, name: &str, index: u32) {
        let link = self.program(name).attach_xdp(index as i32).unwrap();
        self.links.push(link);
    }

    /// Replaces the program of a pinned link by one of the programs.
    pub fn replace(&mut self, name: &str, pin: &std::path::Path) {
        let mut link = Link::open(pin).unwrap();
        link.update_prog(&self.program(name)).unwrap();
    }

    /// Opens a packet socket that gets everything that a device of the thread's namespace receives.
    pub fn socket(&self, device: &str, index: u32) -> OwnedFd {
        let filter = self.program("all");
        pdp_net::packet::open(device, index, 1, filter.as_fd()).unwrap().remove(0)
    }

    /// Sends to these targets from now on, `1 << shift` frames to each in turn.
    pub fn send_to(&self, to: &[To], shift: u32) {
        let devices = self.map("devices");
        for (at, to) in (0_u32..).zip(to) {
            let note = to.port.map_or(0, |port| port + 1);
            let mut value = [to.index, note, 0, 0].map(u32::to_ne_bytes).concat();
            value.extend(headers(to, self.bytes));
            value.resize(DEVICE_BYTES, 0);
            devices.update(&at.to_ne_bytes(), &value, MapFlags::ANY).unwrap();
        }
        let mut settings = [to.len() as u32, shift].map(u32::to_ne_bytes).concat();
        settings.resize(SETTINGS_BYTES, 0);
        self.map("settings").update(&[0; 4], &settings, MapFlags::ANY).unwrap();
    }

    /// Sets the rate in frames per second; 0: as many as possible.
    pub fn set_rate(&self, pps: u64) {
        let map = self.map("settings");
        let mut settings = map.lookup(&[0; 4], MapFlags::ANY).unwrap().unwrap();
        settings[PACE].fill(0);
        settings[8..16].copy_from_slice(&pps.to_ne_bytes());
        map.update(&[0; 4], &settings, MapFlags::ANY).unwrap();
    }

    /// Makes frames for about this time, in the calling thread.
    pub fn generate(&self, time: Duration) {
        let start = Instant::now();
        let mut frames = 1 << 12;
        while start.elapsed() < time {
            let called = Instant::now();
            self.call(frames);
            // A call makes a pool of pages that exists for a second
            // or longer, so no call may be too short.
            if called.elapsed() < Duration::from_millis(10) {
                frames = (frames * 2).min(1 << 20);
            }
        }
    }

    /// Makes so many frames.
    pub fn call(&self, frames: u32) {
        let mut context = [0; XDP_MD_BYTES];
        let end = (self.bytes as u32).to_ne_bytes();
        context[XDP_MD_DATA_END..XDP_MD_DATA_END + 4].copy_from_slice(&end);
        let frame = vec![0; self.bytes];
        let input = ProgramInput {
            context_in: Some(&mut context),
            data_in: Some(&frame),
            flags: LIVE_FRAMES,
            repeat: frames,
            ..Default::default()
        };
        self.program("generate").test_run(input).unwrap();
    }

    /// Returns the frames made, and the frames that arrived at sinks, so far.
    pub fn counters(&self) -> [u64; 2] {
        let map = self.map("counters");
        [0_u32, 1].map(|at| {
            let by_cpu = map.lookup_percpu(&at.to_ne_bytes(), MapFlags::ANY).unwrap().unwrap();
            let number = |bytes: &Vec<u8>| u64::from_ne_bytes(*bytes.first_chunk().unwrap());
            by_cpu.iter().map(number).sum()
        })
    }
}

/// Ethernet, IPv4 and UDP to the discard port.
fn headers(to: &To, bytes: usize) -> Vec<u8> {
    let total = bytes as u16 - 14;
    let mut ip = vec![0x45, 0];
    ip.extend(total.to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    ip.extend(to.source);
    ip.extend(to.destination);
    let sum = pdp_wire::checksum::checksum(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut frame = [&to.mac[..], &[2, 0, 0, 0, 0, 1, 8, 0], &ip].concat();
    for word in [1000, 9, total - 20, 0] {
        frame.extend(word.to_be_bytes());
    }
    frame
}

/// Returns the CPU time of a task so far, nanoseconds; 0 for a task that has ended.
pub fn cpu_ns(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}

/// The number of the calling thread.
pub fn thread_id() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// The kernel's softirq threads.
pub fn ksoftirqd() -> Vec<u32> {
    let text = run("pgrep '^ksoftirqd/'");
    text.lines().map(|line| line.trim().parse().unwrap()).collect()
}

/// Sends a frame over a packet socket. Returns false if the device refuses it.
pub fn send(socket: &OwnedFd, frame: &[u8]) -> bool {
    let flags = nix::sys::socket::MsgFlags::empty();
    nix::sys::socket::send(socket.as_raw_fd(), frame, flags).is_ok()
}

/// Returns the next frame of a packet socket.
pub fn receive(socket: &OwnedFd) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 1 << 16];
    let flags = nix::sys::socket::MsgFlags::MSG_DONTWAIT;
    let bytes = nix::sys::socket::recv(socket.as_raw_fd(), &mut buffer, flags).ok()?;
    buffer.truncate(bytes);
    Some(buffer)
}
