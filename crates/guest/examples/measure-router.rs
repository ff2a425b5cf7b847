//! Measures the router over memif: packets a second, and the cost of a full table.
//!
//! `cargo run --release -p pdp-guest --example measure-router -- V4-FILE V6-FILE`; a file has lines
//! `PREFIX ANYTHING`, and is read through `xz` if its name ends in `.xz`. One thread is the router,
//! the other generates and counts; each wants a core.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_guest::ProgramRuntime;
use pdp_guest::router::RouterProgram;
use pdp_memif::{Listener, MemifConnection};
use pdp_proto::channel::FrameReader;
use pdp_proto::routes::{
    FromGuest, GroupHop, RouteDecision, ToGuest, Vport, VportHooks, decode, encode,
};
use pdp_wire::tag::{Tag, TagVerdict};

const RUN: Duration = Duration::from_secs(2);
const RUNS: usize = 5;
const BATCH: usize = 64;

fn main() {
    let mut routes: Vec<IpNet> = Vec::new();
    for file in std::env::args().skip(1) {
        let program = if file.ends_with(".xz") { "xzcat" } else { "cat" };
        let output = Command::new(program).arg(&file).output().expect("the file's text");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        routes
            .extend(text.lines().filter_map(|line| line.split(' ').next()?.parse::<IpNet>().ok()));
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (memif, sock) = (directory.path().join("memif.sock"), directory.path().join("routes.sock"));
    let listener = UnixListener::bind(&sock).expect("a socket");
    let server = Listener::bind(&memif).expect("a server");
    let stop = Arc::new(AtomicBool::new(false));
    let (task, router) = std::sync::mpsc::channel();
    let guest = std::thread::spawn({
        let stop = stop.clone();
        move || {
            task.send(std::fs::read_link("/proc/thread-self").expect("/proc")).expect("a reader");
            let mut runtime = ProgramRuntime::new(&memif, "measure", RouterProgram::new(&sock, 0))
                .expect("memory");
            runtime.run(&stop).expect("a run");
            let fib = runtime.program().fib();
            println!("tables: {:.1} MB", fib.tables_bytes() as f64 / 1e6);
        }
    });
    let router = Path::new("/proc").join(router.recv().expect("the router")).join("schedstat");
    let mut mirror = Mirror::accept(&listener);
    let mut connection = connect(&server);

    let two = ["0.0.0.0/1", "128.0.0.0/1"].map(|prefix| prefix.parse().expect("a prefix"));
    mirror.push(&head());
    mirror.push(&two.map(route));
    mirror.push(&[ToGuest::End]);
    mirror.barrier();
    packets("2 routes", &router, &mut connection, &frames(&[]));

    let before = resident_bytes();
    let start = Instant::now();
    mirror.push(&head());
    for piece in routes.chunks(1024) {
        mirror.push(&piece.iter().copied().map(route).collect::<Vec<_>>());
    }
    mirror.push(&[ToGuest::End]);
    mirror.barrier();
    println!(
        "{} routes by the routes channel in {:.2} s, {:.1} MB more resident",
        routes.len(),
        start.elapsed().as_secs_f64(),
        (resident_bytes() as f64 - before as f64) / 1e6
    );
    packets("full table, random destinations", &router, &mut connection, &frames(&routes));

    let start = Instant::now();
    let changes = routes.len().min(500_000);
    for piece in routes[..changes].chunks(1024) {
        let changed = piece.iter().enumerate().map(|(at, &prefix)| match at % 2 {
            0 => ToGuest::RouteGone(prefix),
            _ => ToGuest::Route { prefix, target: RouteDecision::Group(1) },
        });
        mirror.push(&changed.collect::<Vec<_>>());
    }
    mirror.barrier();
    println!("{:.0} route changes/s", changes as f64 / start.elapsed().as_secs_f64());
    let mut times: Vec<Duration> = (0..200)
        .map(|_| {
            let start = Instant::now();
            mirror.push(&[route(two[0])]);
            mirror.barrier();
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("one change to a sleeping router and its answer: {:?} (median)", times[100]);
    stop.store(true, Ordering::Relaxed);
    guest.join().expect("the router");
}

fn head() -> Vec<ToGuest> {
    let mut head = vec![ToGuest::Begin, ToGuest::Forwarding { v4: true, v6: true }];
    for index in 0..4u16 {
        let address = [10, 0, index as u8, 1].into();
        head.push(ToGuest::Vport(Vport {
            index,
            mac: mac(index),
            mtu: 1500,
            up: true,
            hooked: VportHooks::default(),
            macs: vec![],
            forwards_v4: true,
        }));
        head.push(ToGuest::Neighbour { vport: index, address, mac: Some([2; 6]) });
        let hop = GroupHop { vport: index, gateway: Some(address), weight: 1 };
        head.push(ToGuest::Group { id: index.into(), hops: vec![hop], mtu: 0 });
    }
    head
}

fn mac(vport: u16) -> [u8; 6] {
    [2, 0, 0, 0, 1, vport as u8]
}

fn route(prefix: IpNet) -> ToGuest {
    let hash = match prefix {
        IpNet::V4(net) => u32::from(net.addr()) >> 8,
        IpNet::V6(net) => (u128::from(net.addr()) >> 80) as u32,
    };
    ToGuest::Route { prefix, target: RouteDecision::Group(hash.wrapping_mul(0x9e37_79b1) >> 30) }
}

/// 64-byte frames (60 without FCS) to random destinations inside IPv4 routes.
fn frames(routes: &[IpNet]) -> Vec<Vec<u8>> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let v4: Vec<_> = routes.iter().filter(|net| matches!(net, IpNet::V4(_))).collect();
    let mut list = Vec::new();
    while list.len() < 1 << 16 {
        let noise = random() as u32;
        let destination = match v4.get(random() as usize % v4.len().max(1)) {
            Some(IpNet::V4(net)) => u32::from(net.addr()) | noise & u32::from(net.hostmask()),
            _ => noise,
        };
        if matches!((destination >> 24) as u8, 0 | 127 | 224..) {
            continue;
        }
        let destination = destination.to_be_bytes();
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2([2; 6], mac(0))
            .ipv4([10, 0, 0, 9], destination, 64)
            .udp(1000, 2000)
            .write(&mut frame, &[0; 18])
            .expect("a frame");
        list.push(frame);
    }
    list
}

/// CPU time of a thread, nanoseconds.
fn cpu_ns(schedstat: &Path) -> u64 {
    let text = std::fs::read_to_string(schedstat).unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}

fn packets(name: &str, router: &Path, connection: &mut MemifConnection, frames: &[Vec<u8>]) {
    let mut rates = Vec::new();
    let mut next = frames.iter().cycle();
    let tag = Tag::deliver(0, 0).emit();
    let (mut out, mut other) = (0u64, 0u64);
    let cpu_before = cpu_ns(router);
    for _ in 0..RUNS {
        let start = Instant::now();
        let mut completed = 0u64;
        for round in 0u64.. {
            // Reading the clock takes time.
            if round % 256 == 0 && start.elapsed() > RUN {
                break;
            }
            if connection.tx.room().expect("a ring") >= BATCH {
                for frame in next.by_ref().take(BATCH) {
                    connection.tx.push(tag, frame).expect("a ring");
                }
                connection.tx.flush().expect("a ring");
            }
            connection.rx.poll().expect("a ring");
            while let Some(frame) = connection.rx.take().expect("a ring") {
                completed += 1;
                match Tag::parse(frame.metadata()).map(|tag| tag.verdict) {
                    Ok(TagVerdict::Out) => out += 1,
                    _ => other += 1,
                }
            }
            connection.rx.release();
        }
        rates.push(completed as f64 / start.elapsed().as_secs_f64() / 1e6);
    }
    rates.sort_by(f64::total_cmp);
    let cpu_per_packet = (cpu_ns(router) - cpu_before) as f64 / (out + other) as f64;
    println!(
        "{name}: {:.2} Mpps of 64 bytes (median of {RUNS}, {:.2} to {:.2}), {cpu_per_packet:.0} ns \
         of the router's CPU each (waiting included); {out} out, {other} not",
        rates[RUNS / 2],
        rates[0],
        rates[RUNS - 1]
    );
}

fn connect(server: &Listener) -> MemifConnection {
    let mut handshake = None;
    loop {
        if handshake.is_none() {
            handshake = server.accept().expect("a socket");
        }
        if let Some(shaking) = &mut handshake
            && let Some(connection) = shaking.poll(|_| true).expect("a handshake")
        {
            return connection;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string(Path::new("/proc/self/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

struct Mirror {
    stream: UnixStream,
    reader: FrameReader,
    barriers: u64,
}

impl Mirror {
    fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().expect("a guest");
        Self { stream, reader: FrameReader::default(), barriers: 0 }
    }

    fn push(&mut self, messages: &[ToGuest]) {
        self.stream.write_all(&encode(messages).expect("a frame")).expect("a guest");
    }

    fn barrier(&mut self) {
        self.barriers += 1;
        self.push(&[ToGuest::Barrier(self.barriers)]);
        loop {
            while let Some(frame) = self.reader.next_frame().expect("a frame") {
                if decode(frame).expect("a message").contains(&FromGuest::Applied(self.barriers)) {
                    return;
                }
            }
            self.reader.read_from(&mut self.stream).expect("a guest");
        }
    }
}
