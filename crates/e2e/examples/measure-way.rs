//! Measures the whole path of a packet through a node: packets per second, loss, and CPU cycles.
//!
//! `cargo run --release -p pdp-e2e --example measure-way -- [SECONDS] [GUESTS]`, as root, after
//! `cargo build --release --bins`.
//!
//! A node of the end-to-end harness (pdpd, mux, a router in forwarding guests) has two external
//! interfaces with a VXLAN tunnel each. Machine A sends prepared frames through AF_XDP; machine B
//! drops them as early as its kernel can. A packet only counts as delivered if it took the whole
//! path. After each run the counters of the generator, of every stage of the mux, of the guests and
//! of machine B's interface must add up to the packet, or the program ends.
//!
//! Contents of the figures:
//! - Cycles are those of all threads of a process, in user mode and in the kernel. With AF_XDP on a
//!   veth the sender's soft interrupts do much of the kernel's work. The XDP program and the copy
//!   to the mux count as the generator's cost for its packets. Dropping in machine B counts as the
//!   mux's cost. Such interrupts also burden any other program on that CPU. Work of ksoftirqd
//!   threads has its own row. A kernel that accounts interrupts separately
//!   (`CONFIG_IRQ_TIME_ACCOUNTING`) excludes them from CPU time.
//! - Without hardware counters (as in most virtual machines), cycles are CPU time multiplied by the
//!   frequency that the kernel reports. Then waiting for the host's other guests counts as well.
//! - The generator needs its own CPU to measure a node's packets per second. With two CPUs it
//!   shares one with the guests, and only cycles per packet are meaningful.
//! - Each run shows the latency between the two CPUs just before it, in nanoseconds. Hosts move
//!   virtual CPUs, and runs with different values must not be compared. Thousands mean that others
//!   use these CPUs.
//! - Every packet is of the forwarded kind: none is punted, and neighbours are permanent.

#![forbid(unsafe_code)]

use std::fs;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use pdp_afxdp::{PacketBuffer, Pool, RING_ENTRIES, XdpSocket, bind_socket, create_socket};
use pdp_api::{NodeStats, PortStats, Stats};
use pdp_e2e::meter::{Clock, CycleCounter, ProcessCycles, cpu, cpu_to_cpu_ns, pin, processes};
use pdp_e2e::{TestMachine, TestNode, eventually};
use pdp_wire::checksum::Sum;
use pdp_wire::{ether, ipv4, udp, vxlan};

/// MAC addresses in the frames. No interface has them: machine B's kernel drops frames for others
/// before any other processing.
const MAC_A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
const MAC_B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
const MAC_ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Addresses of the tunnels' endpoints, of the node and of the machine.
const UNDERLAY_A: [[u8; 4]; 2] = [[192, 0, 2, 1], [192, 0, 2, 2]];
const UNDERLAY_B: [[u8; 4]; 2] = [[198, 51, 100, 1], [198, 51, 100, 2]];
const VXLAN_PORT: u16 = 4789;
const VNI_A: u32 = 7;

/// MTU of the underlay, bytes: the longest frame in a tunnel.
const UNDERLAY_MTU: usize = 1600;

/// Headers before the inner frame, bytes, and the offset of the inner IPv4 header.
const OUTER_BYTES: usize =
    ether::HEADER_BYTES + ipv4::HEADER_BYTES + udp::HEADER_BYTES + vxlan::HEADER_BYTES;
const INNER_IP: usize = OUTER_BYTES + ether::HEADER_BYTES;

/// Shortest and longest inner frame, bytes: headers with room for a payload, and the tunnel's MTU.
const FRAME_BYTES_MIN: u64 = 60;
const FRAME_BYTES_MAX: u64 = 1514;

/// Routes, prefixes of 24 bits below 20.0.0.0/8.
const ROUTES_MAX: u64 = 1 << 16;

/// Packets of the generator: a full ring, and as many being prepared.
const PACKETS: usize = 2 * RING_ENTRIES as usize;

/// Frames sent per system call.
const BURST: usize = 64;

/// Sleep of a paced generator that has nothing to send yet.
const PACE_SLEEP: Duration = Duration::from_micros(100);

/// Loss up to this fraction counts as none.
const LOSS_MAX: f64 = 0.001;

/// Ratio at which the search for the highest load without loss ends.
const SEARCH_RATIO: f64 = 1.05;

/// A run that fills caches and settles schedulers.
const WARM_UP: Duration = Duration::from_millis(500);

/// Measures the whole way of a packet through a PdP node
#[derive(Parser)]
#[command(
    name = "measure-way",
    after_help = "Examples:
  measure-way                        # 5 s a run, one guest: saturation, then a search
  measure-way 10 2 --frame 1500      # two guests, frames of 1500 bytes
  measure-way --load 200000 --runs 5 # a fixed load, five times"
)]
struct Arguments {
    /// Length of a run, seconds
    #[arg(default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Forwarding guests
    #[arg(default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=16))]
    guests: u64,
    /// Bytes of the frame inside the tunnel, without FCS
    #[arg(long, default_value_t = 64,
          value_parser = clap::value_parser!(u64).range(FRAME_BYTES_MIN..=FRAME_BYTES_MAX))]
    frame: u64,
    /// Routes to draw destinations from
    #[arg(long, default_value_t = ROUTES_MAX,
          value_parser = clap::value_parser!(u64).range(1..=ROUTES_MAX))]
    routes: u64,
    /// Only this load, packets a second; without it: saturation,
    /// then a search for the highest load with a loss below 0.1 %
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    load: Option<u64>,
    /// Number of runs for each load
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    runs: u64,
}

fn main() {
    let arguments = Arguments::parse();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    if cpus < 2 {
        eprintln!("one CPU: the mux and the guests would share it; use at least two");
        std::process::exit(1);
    }
    let path = MeasuredPath::make(&arguments, cpus);
    let clock = Clock::of_this_machine();
    println!(
        "{}-byte frames in VXLAN, {} routes, {} forwarding guest(s); {cpus} CPUs, {}",
        arguments.frame,
        arguments.routes,
        arguments.guests,
        cpu("model name")
    );
    println!("cycles: {clock}");
    if cpus == 2 {
        println!("the generator shares CPU 1 with the guests: read cycles, not packets a second");
    }
    path.run(Some(1000), WARM_UP, &clock);
    path.run(None, WARM_UP, &clock);
    let time = Duration::from_secs(arguments.seconds);
    let runs = |load| (0..arguments.runs).map(|_| path.run(load, time, &clock)).collect::<Vec<_>>();
    if let Some(load) = arguments.load {
        return show(&format!("{load} pps"), &runs(Some(load)));
    }
    let saturated = runs(None);
    show("saturation", &saturated);
    let mut most = saturated.iter().map(Run::delivered_pps).fold(0.0, f64::max) * SEARCH_RATIO;
    let (mut least, mut best) = (0.0, None);
    while most > least * SEARCH_RATIO && most > 1.0 {
        let load = if least > 0.0 { (least + most) / 2.0 } else { most * 0.75 };
        let run = path.run(Some(load as u64), time, &clock);
        println!("  {:.0} pps: {:.3} % lost", load, run.loss() * 100.0);
        if run.loss() < LOSS_MAX {
            (least, best) = (load, Some(load as u64));
        } else {
            most = load;
        }
    }
    if let Some(load) = best {
        show("highest without loss in one run", &runs(Some(load)));
    }
}

// The node

/// The node and the external machines.
struct MeasuredPath {
    node: TestNode,
    b: TestMachine,
    generator: mpsc::Sender<Task>,
    meters: Vec<(String, Vec<u32>)>,
    ping_cpus: [usize; 2],
}

impl MeasuredPath {
    fn make(arguments: &Arguments, cpus: usize) -> Self {
        let mut node = TestNode::prepare("way");
        let (a, b) = (node.machine("mA", "extA"), node.machine("mB", "extB"));
        let here = node.namespace();
        for (machine, device, address, neighbour, mac) in [
            (&a, "extA", UNDERLAY_A[0], UNDERLAY_A[1], MAC_A),
            (&b, "extB", UNDERLAY_B[0], UNDERLAY_B[1], MAC_B),
        ] {
            let quiet = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1";
            machine.run(&format!("{quiet}; ip link set eth0 mtu {UNDERLAY_MTU}"));
            here.run(&format!(
                "{quiet}; ip link set {device} mtu {UNDERLAY_MTU}; ip addr add {}/24 dev {device}
                 ip neigh replace {} lladdr {} dev {device} nud permanent",
                dotted(address),
                dotted(neighbour),
                words(&mac)
            ));
        }
        node.start_pdpd();
        node.apply(&spec(arguments.guests as usize, cpus));
        let routes: String = (0..arguments.routes)
            .map(|route| format!("route add 20.{}.{}.0/24 via 10.0.2.2\n", route >> 8, route & 255))
            .collect();
        node.exec(
            "way/r1",
            &format!("ip neigh replace 10.0.2.2 lladdr {} dev eth1 nud permanent", words(&MAC_B)),
        );
        let mut batch = node.pdp_command(&["exec", "way/r1", "--", "ip", "-batch", "-"]);
        let output = pdp_e2e::run(&mut batch, &routes);
        assert!(output.status.success(), "routes: {output:?}");
        eventually("every guest has every route", || {
            (0..arguments.guests).all(|guest| {
                let guest = guest.to_string();
                let rows = node.try_pdp(&["routes", "way/r1", "--guest", &guest]);
                rows.is_ok_and(|rows| rows.lines().count() as u64 > arguments.routes)
            })
        });
        let substrate = node.json(&["inspect", "substrate"]);
        let mux = substrate["status"]["mux"]["pid"].as_u64().expect("the mux runs");
        let mut meters = vec![("mux".to_owned(), vec![mux as u32])];
        for guest in 0..arguments.guests {
            let cgroup = format!("{}/vnets/way/r1.g{guest}/guest\n", node.cgroup());
            meters.push((format!("guest {guest}"), processes("cgroup", &cgroup)));
        }
        meters.push(("ksoftirqd".into(), processes("comm", "ksoftirqd/")));
        let device_mac = here.run("cat /sys/class/net/extA/address");
        let frames = Frames::new(&device_mac, arguments.frame as usize, arguments.routes as u32);
        let generator = start_generator(&a, frames, cpus - 1);
        Self { node, b, generator, meters, ping_cpus: [0, cpus - 1] }
    }

    /// Offers a load, or as much as possible, for `time`.
    /// Ends the program if counters do not add up.
    fn run(&self, load: Option<u64>, time: Duration, clock: &Clock) -> Run {
        let (sender, receiver) = mpsc::channel();
        let cpu_to_cpu_ns = cpu_to_cpu_ns(self.ping_cpus);
        let before = self.counters();
        let mut meters: Vec<CycleCounter> =
            self.meters.iter().map(|(_, pids)| clock.start(pids, false)).collect();
        let task = Task { load, time, clock: clock.clone(), result: sender };
        self.generator.send(task).expect("the generator runs");
        let sent = receiver.recv().expect("the generator runs");
        let mut after = self.counters();
        eventually("nothing is in flight", || {
            let last = std::mem::replace(&mut after, self.counters());
            after.r1.in_flight == 0 && last.arrived == after.arrived && last.taken == after.taken
        });
        let cycles = meters.drain(..).map(|meter| clock.stop(meter)).collect::<Vec<_>>();
        let outcome = after.since(&before, sent.frames);
        if let Err(error) = outcome.check() {
            panic!("counters do not add up, so nothing was measured: {error}\n{outcome:?}");
        }
        let names = self.meters.iter().map(|(name, _)| name.clone());
        let mut cycles: Vec<(String, ProcessCycles)> = names.zip(cycles).collect();
        cycles.push(("generator".into(), sent.cycles));
        Run { seconds: sent.seconds, outcome, cycles, cpu_to_cpu_ns }
    }

    fn counters(&self) -> Counters {
        let stats: Stats = serde_json::from_value(self.node.json(&["stats"])).expect("stats");
        let (a, b) = (&stats.externals["A"], &stats.externals["B"]);
        let links = |machine: &TestMachine, device: &str| -> serde_json::Value {
            let text = machine.run(&format!("ip -j -s link show {device}"));
            serde_json::from_str(&text).expect("JSON of iproute2")
        };
        let count = |links: &serde_json::Value, direction: &str, what: &str| {
            links[0]["stats64"][direction][what].as_u64().expect("a counter of the kernel")
        };
        let device = links(&self.node.namespace(), "extA");
        Counters {
            arrived: count(&links(&self.b, "eth0"), "rx", "packets"),
            lost: count(&device, "rx", "dropped"),
            taken: a.received,
            refused: a.kernel_dropped,
            outer_dropped: a.dropped.values().sum(),
            out: b.sent,
            r1: stats.vnets["way"].nodes["r1"].clone(),
        }
    }
}

/// The mux on CPU 0, the generator on the last, and guests on the CPUs between.
fn spec(guests: usize, cpus: usize) -> String {
    let for_guests = (cpus - 2).max(1);
    let millicores = 1000 / guests.div_ceil(for_guests);
    let mut engines = String::new();
    for guest in 0..guests {
        let cpu = 1 + guest % for_guests;
        engines += &format!("    fe{guest}: {{cpus: \"{cpu}\", capacity: {millicores}m}}\n");
    }
    format!(
        r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "0", power: 1}}
  interfaces: {{A: {{device: extA}}, B: {{device: extB}}}}
  forwardingEngines:
{engines}---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: way}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: "{}"}}
        eth1: {{addresses: [10.0.2.1/24]}}
      dataPlane: {{power: {}m}}
  externals:
    a: {{interface: A, vxlan: {{vni: {VNI_A}, local: {}, remote: {}}}}}
    b: {{interface: B, vxlan: {{vni: 8, local: {}, remote: {}}}}}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
"#,
        words(&MAC_ROUTER),
        millicores * guests,
        dotted(UNDERLAY_A[0]),
        dotted(UNDERLAY_A[1]),
        dotted(UNDERLAY_B[0]),
        dotted(UNDERLAY_B[1]),
    )
}

fn words(mac: &[u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn dotted(address: [u8; 4]) -> String {
    std::net::Ipv4Addr::from(address).to_string()
}

// The generator

/// Task of the generator.
struct Task {
    load: Option<u64>,
    time: Duration,
    clock: Clock,
    result: mpsc::Sender<Sent>,
}

/// Result of a task.
struct Sent {
    frames: u64,
    seconds: f64,
    cycles: ProcessCycles,
}

/// Frames that only differ in their destinations.
struct Frames {
    bytes: Vec<u8>,
    routes: u32,
    random: u32,
    /// Checksum of the inner IPv4 header without destination and checksum.
    sum: Sum,
}

impl Frames {
    fn new(device_mac: &str, bytes: usize, routes: u32) -> Self {
        let mut mac = [0; 6];
        for (byte, text) in mac.iter_mut().zip(device_mac.trim().split(':')) {
            *byte = u8::from_str_radix(text, 16).expect("a link address");
        }
        let kind = ether::kind::IPV4;
        let ethernet =
            |destination, source| ether::EthernetHeader { destination, source, kind }.emit();
        let datagram = |destination_port, bytes: usize| {
            let length = bytes as u16;
            udp::UdpHeader { source_port: 50_000, destination_port, length, checksum: 0 }.emit()
        };
        let inner_ip = bytes - ether::HEADER_BYTES;
        let outer_udp = udp::HEADER_BYTES + vxlan::HEADER_BYTES + bytes;
        let mut frame = Vec::new();
        frame.extend(ethernet(mac, MAC_A));
        let outer = ip_header(ipv4::HEADER_BYTES + outer_udp, UNDERLAY_A[1], UNDERLAY_A[0]);
        frame.extend(outer);
        frame.extend(datagram(VXLAN_PORT, outer_udp));
        frame.extend(vxlan::emit(VNI_A));
        frame.extend(ethernet(MAC_ROUTER, MAC_A));
        let mut inner = ip_header(inner_ip, [10, 0, 1, 2], [0; 4]);
        frame.extend(inner);
        inner[10..12].fill(0);
        frame.extend(datagram(9, inner_ip - ipv4::HEADER_BYTES));
        frame.resize(OUTER_BYTES + bytes, 0x5a);
        Self { bytes: frame, routes, random: 1, sum: Sum::default().with(&inner) }
    }

    /// Writes a whole frame into a fresh packet.
    fn write(&self, packet: &mut PacketBuffer) {
        packet.reset();
        packet.room_mut()[..self.bytes.len()].copy_from_slice(&self.bytes);
    }

    /// Sets the next destination in a packet with such a frame.
    fn draw(&mut self, packet: &mut PacketBuffer) {
        // Xorshift (Marsaglia 2003): all routes in an order that defeats caches.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        let route = ((u64::from(self.random) * u64::from(self.routes)) >> 32) as u32;
        let destination = (20 << 24 | route << 8 | self.random & 0xff).to_be_bytes();
        packet.set_len(self.bytes.len()).expect("a packet's room");
        let header = &mut packet.bytes_mut()[INNER_IP..INNER_IP + ipv4::HEADER_BYTES];
        header[16..20].copy_from_slice(&destination);
        header[10..12].copy_from_slice(&self.sum.with(&destination).finish().to_be_bytes());
    }
}

fn ip_header(bytes: usize, source: [u8; 4], destination: [u8; 4]) -> [u8; ipv4::HEADER_BYTES] {
    let mut header = [0x45, 0, 0, 0, 0, 0, 0, 0, 64, udp::PROTOCOL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    header[2..4].copy_from_slice(&(bytes as u16).to_be_bytes());
    header[12..16].copy_from_slice(&source);
    header[16..20].copy_from_slice(&destination);
    let checksum = pdp_wire::checksum::checksum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

/// Starts the thread that sends from machine A, on one CPU.
fn start_generator(a: &TestMachine, mut frames: Frames, cpu: usize) -> mpsc::Sender<Task> {
    let (tasks, receive) = mpsc::channel::<Task>();
    let (pool, mut free) = Pool::new(PACKETS).expect("packets of the generator");
    let netns = fs::File::open(format!("/run/netns/{}", a.netns)).expect("machine A");
    let made = pdp_net::netns::within(netns.as_fd(), || {
        let index = pdp_net::interface::InterfaceInfo::by_name("eth0")?.index;
        Ok(create_socket(pool.memfd()).map(|fd| (fd, index)))
    });
    let (fd, index) = made.expect("machine A").expect("an AF_XDP socket of machine A");
    let mut socket = XdpSocket::new(fd, &pool).expect("rings of machine A");
    bind_socket(socket.as_fd(), index, 0).expect("a free queue of machine A");
    free.iter_mut().for_each(|packet| frames.write(packet));
    thread::spawn(move || {
        pin(cpu);
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        for task in receive {
            let meter = task.clock.start(&[thread], true);
            let (sent, seconds) = generate(&task, &mut socket, &mut free, &mut frames);
            let cycles = task.clock.stop(meter);
            // If the program ends, nobody waits for the result.
            let _ = task.result.send(Sent { frames: sent, seconds, cycles });
        }
    });
    tasks
}

/// Sends for the task's time. Returns the frames that the kernel accepted, and the seconds used.
fn generate(
    task: &Task,
    socket: &mut XdpSocket,
    free: &mut Vec<PacketBuffer>,
    frames: &mut Frames,
) -> (u64, f64) {
    let start = Instant::now();
    let (mut put, mut done) = (0u64, 0u64);
    loop {
        done += socket.complete(free) as u64;
        let elapsed = start.elapsed();
        let over = elapsed >= task.time;
        if over && socket.sending() == 0 {
            return (done, task.time.as_secs_f64());
        }
        let due = match task.load {
            _ if over => 0,
            None => BURST,
            Some(load) => {
                let due = (elapsed.as_secs_f64() * load as f64) as u64;
                due.saturating_sub(put).min(BURST as u64) as usize
            }
        };
        let burst = due.min(free.len()).min(socket.room());
        for mut packet in free.drain(free.len() - burst..) {
            frames.draw(&mut packet);
            socket.send(packet).expect("there was room");
        }
        put += burst as u64;
        socket.flush();
        if task.load.is_some() && due == 0 {
            thread::sleep(PACE_SLEEP);
        }
    }
}

// Results

/// Counters of every stage on the path.
#[derive(Debug)]
struct Counters {
    /// Received by machine B's interface.
    arrived: u64,
    /// Dropped by interface A: by its driver, and `refused`.
    lost: u64,
    /// Received by the mux, and refused because it had no room.
    taken: u64,
    refused: u64,
    /// Dropped by classification.
    outer_dropped: u64,
    /// Sent by the mux to machine B.
    out: u64,
    r1: NodeStats,
}

impl Counters {
    fn since(&self, before: &Self, offered: u64) -> FrameOutcome {
        let port = |name: &str, of: fn(&PortStats) -> u64| {
            of(&self.r1.ports[name]) - of(&before.r1.ports[name])
        };
        let guests = |of: fn(&pdp_api::GuestStats) -> u64| {
            let sum = |node: &NodeStats| node.guests.values().map(of).sum::<u64>();
            sum(&self.r1) - sum(&before.r1)
        };
        let mut dropped = Vec::new();
        for (name, now) in &self.r1.ports {
            for (reason, count) in &now.dropped {
                let then = before.r1.ports[name].dropped.get(reason).copied().unwrap_or(0);
                if *count > then {
                    dropped.push((reason.clone(), count - then));
                }
            }
        }
        let both = |of: fn(&PortStats) -> u64| port("eth0", of) + port("eth1", of);
        FrameOutcome {
            offered,
            lost: self.lost - before.lost,
            refused: self.refused - before.refused,
            taken: self.taken - before.taken,
            outer_dropped: self.outer_dropped - before.outer_dropped,
            received: port("eth0", |port| port.received),
            others: both(|port| port.made + port.punted + port.consumed)
                + port("eth1", |port| port.received)
                + port("eth0", |port| port.sent),
            dropped,
            to_guests: guests(|guest| guest.to_guest),
            completed: guests(|guest| guest.completed),
            from_guests: guests(|guest| guest.from_guest),
            sent: port("eth1", |port| port.sent),
            out: self.out - before.out,
            arrived: self.arrived - before.arrived,
        }
    }
}

/// Results of a run's packets, in the order of the path.
#[derive(Debug)]
struct FrameOutcome {
    offered: u64,
    lost: u64,
    refused: u64,
    taken: u64,
    outer_dropped: u64,
    received: u64,
    /// Packets on other paths: from or to the control guest, or in the other direction.
    others: u64,
    dropped: Vec<(String, u64)>,
    to_guests: u64,
    completed: u64,
    from_guests: u64,
    sent: u64,
    out: u64,
    arrived: u64,
}

impl FrameOutcome {
    /// Succeeds if every packet that arrived took the whole path, and every other is accounted for.
    fn check(&self) -> Result<(), String> {
        let before_guests = ["policed", "link-down", "runt", "too-big", "no-guest"];
        let full = ["guest-ring-full", "guest-window-full"];
        let never = |reason: &str| before_guests.contains(&reason) || full.contains(&reason);
        let sum = |of: &dyn Fn(&str) -> bool| -> u64 {
            self.dropped.iter().filter(|(reason, _)| of(reason)).map(|(_, count)| count).sum()
        };
        let not_given = sum(&never);
        let given = sum(&|reason| !never(reason));
        for (what, is, should_be) in [
            ("packets that took another path", self.others, 0),
            ("offered", self.offered, self.taken + self.refused + self.veth_lost()),
            ("taken by the mux", self.taken, self.received + self.outer_dropped),
            ("received by the port", self.received, self.to_guests + not_given),
            ("given to guests", self.to_guests, self.completed),
            ("completed by guests", self.completed, self.from_guests),
            ("got from guests", self.from_guests, self.sent + given),
            ("sent by the port", self.sent, self.out),
            ("sent to machine B", self.out, self.arrived),
        ] {
            if is != should_be {
                return Err(format!("{what}: {is} instead of {should_be}"));
            }
        }
        Ok(())
    }

    /// Lost between machine A and the XDP program.
    fn veth_lost(&self) -> u64 {
        self.lost.saturating_sub(self.refused)
    }

    /// Formats the stages of losses.
    fn losses(&self) -> String {
        let places = [("veth", self.veth_lost()), ("receive ring of the mux", self.refused)];
        let places = places.map(|(place, count)| (place.to_owned(), count));
        let lost = places.into_iter().chain(self.dropped.iter().cloned());
        let lost = lost.filter(|(_, count)| *count > 0);
        lost.map(|(place, count)| format!("{place} {count}")).collect::<Vec<_>>().join(", ")
    }
}

/// One run.
struct Run {
    seconds: f64,
    outcome: FrameOutcome,
    cycles: Vec<(String, ProcessCycles)>,
    cpu_to_cpu_ns: f64,
}

impl Run {
    fn delivered_pps(&self) -> f64 {
        self.outcome.arrived as f64 / self.seconds
    }

    fn loss(&self) -> f64 {
        1.0 - self.outcome.arrived as f64 / self.outcome.offered.max(1) as f64
    }
}

/// Prints each run, and the medians with their spread.
fn show(title: &str, runs: &[Run]) {
    println!("\n{title}");
    for run in runs {
        println!(
            "  offered {:.0} pps, delivered {:.0} pps, lost {:.3} % ({}); CPU to CPU {:.0} ns",
            run.outcome.offered as f64 / run.seconds,
            run.delivered_pps(),
            run.loss() * 100.0,
            Some(run.outcome.losses()).filter(|text| !text.is_empty()).unwrap_or("nowhere".into()),
            run.cpu_to_cpu_ns
        );
    }
    let median = |of: &dyn Fn(&Run) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        [values[values.len() / 2], values[0], values[values.len() - 1]]
    };
    let [pps, least, most] = median(&Run::delivered_pps);
    println!("  median of {}: {pps:.0} pps delivered ({least:.0} to {most:.0})", runs.len());
    for (index, (name, _)) in runs[0].cycles.iter().enumerate() {
        let per_packet = |run: &Run, of: fn(&ProcessCycles) -> f64| {
            of(&run.cycles[index].1) / run.outcome.arrived.max(1) as f64
        };
        let [all, least, most] = median(&|run| per_packet(run, |c| c.user + c.kernel));
        let [user, ..] = median(&|run| per_packet(run, |c| c.user));
        println!(
            "  {name:<10} {all:>7.0} cycles/delivered packet ({least:.0} to {most:.0}), {user:.0} \
             of them in user mode"
        );
    }
    // Print at once for waiting people.
    let _ = std::io::stdout().flush();
}
