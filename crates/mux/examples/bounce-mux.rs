//! The mux's whole way but for the network card: VXLAN frames of 64 bytes inside are classified,
//! distributed, copied to a guest, copied back, dispatched and encapsulated.
//!
//! `cargo run --release -p pdp-mux --example bounce-mux -- [SECONDS] [GUESTS] [WORKER_CPU] [GUEST_CPU]`
//!
//! With guests, they are threads on a CPU of their own, and packets per second are those of the
//! wall clock; both sides poll, so give each a CPU without other work. With 0 guests, one is
//! served by the same thread between the mux's rounds, and what is shown is the processor time
//! of the mux alone: no cache line crosses from core to core, and a busy machine disturbs less.
//! Cycles are that time at the clock rate that /proc/cpuinfo shows.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pdp_memif::{Buf, Client, Listener, Settings};
use pdp_mux::classify::{PortRef, Table};
use pdp_mux::core::Core;
use pdp_mux::encapsulate::{Outside, Way};
use pdp_mux::external::{External, PATH_FRAMES, Path as SocketPath};
use pdp_mux::packets::Packets;
use pdp_mux::peer::Link;
use pdp_mux::underlay::NextHop;
use pdp_mux::vnet::{Vnet, Who};
use pdp_mux::wake::Wake;
use pdp_mux::worker::Worker;
use pdp_proto::mux::{
    Attach, Encapsulation, End, FlowKey, Node, Policy, Port, Rate, Router, Vlink,
};
use pdp_wire::{outer, tag::LAST, vxlan};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const INNER_BYTES: usize = 64;
const BATCH: usize = 256;

/// Frames on their way through each guest.
const WINDOW: u64 = 512;

const WARM_UP: Duration = Duration::from_millis(500);

fn main() -> Result<()> {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let at = |index: usize, otherwise| arguments.get(index).copied().unwrap_or(otherwise);
    let (seconds, guests, worker_cpu, guest_cpu) = (at(0, 5), at(1, 1), at(2, 0), at(3, 1));
    let directory = std::env::temp_dir().join(format!("pdp-bounce-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let result = bounce(&directory, seconds, guests, worker_cpu, guest_cpu);
    std::fs::remove_dir_all(&directory)?;
    result
}

fn tunnel(vni: u32) -> Result<Encapsulation> {
    let (local, remote) = ("10.0.0.1".parse()?, "10.0.0.2".parse()?);
    Ok(Encapsulation::Vxlan { local, remote, port: 4789, vni })
}

fn spec(directory: &Path, guests: usize) -> Result<pdp_proto::mux::Vnet> {
    let none = Rate { bps: 0, pps: 0 };
    let port = |name: &str| Port { name: name.into(), mac: MAC, mtu: 1500 };
    let vlink = |index: u16| -> Result<Vlink> {
        Ok(Vlink {
            name: format!("link{index}"),
            a: End::Port { node: "r1".into(), port: index },
            b: End::External { interface: "A".into(), by: tunnel(index.into())? },
            rate_bps: None,
            queue_frames: 0,
            up: true,
        })
    };
    let guest = |number| pdp_proto::mux::Guest {
        number,
        socket: directory.join(format!("g{number}.sock")),
        attach: Attach::Runtime,
        weight: 1000,
        leaving: false,
    };
    Ok(pdp_proto::mux::Vnet {
        name: "bench".into(),
        police: None,
        nodes: vec![Node {
            name: "r1".into(),
            ports: vec![port("eth0"), port("eth1")],
            tap_socket: directory.join("tap.sock"),
            router: Some(Router {
                guests: (0..guests.max(1) as u32).map(guest).collect(),
                policy: Policy::Flow,
                flow: FlowKey::Ip,
                punt_filters: vec![],
                punt_limits: [none; 3],
            }),
        }],
        vlinks: vec![vlink(0)?, vlink(1)?],
    })
}

/// Frames as they arrive, each of a flow of its own.
fn arriving() -> Result<Vec<Vec<u8>>> {
    let remote = "10.0.0.2".parse()?;
    let headers = outer::Template::new(remote, "10.0.0.1".parse()?, [50000, 4789], &vxlan::emit(0))
        .context("addresses of one family")?;
    let one = |flow: u32| {
        let mut frame = vec![0; headers.len() + INNER_BYTES];
        let inner = &mut frame[headers.len()..];
        inner[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
        inner[23] = 17;
        inner[26..30].copy_from_slice(&flow.to_be_bytes());
        headers.write(&mut frame, MAC, [9; 6], None).context("room for headers")?;
        Ok(frame)
    };
    (0..4096).map(one).collect()
}

fn bounce(
    directory: &Path,
    seconds: usize,
    guests: usize,
    worker_cpu: usize,
    guest_cpu: usize,
) -> Result<()> {
    core_affinity::set_for_current(core_affinity::CoreId { id: worker_cpu });
    let (_pool, mut parts) = Packets::pool(1, 16384)?;
    let (dropped, _kept) = mpsc::channel();
    let wake = Arc::new(Wake::new()?);
    let packets = parts.pop().context("one part")?;
    let core = Core::new(packets, dropped, wake.clone())?;
    let (_commands, obeyed) = mpsc::sync_channel(1);
    let mut worker = Worker::new(0, core, vec![None], obeyed, wake.clone())?;

    let (port, mut line) = rtrb::RingBuffer::new(PATH_FRAMES);
    let mut external = External::new("A".into(), MAC, 1600);
    external.add_path(SocketPath::new(port, wake));
    worker.core.externals.push(Some(external));
    let mut table = Table::new(MAC);
    for port in 0..2 {
        let reference = PortRef { worker: 0, vnet: 0, port, generation: 0 };
        table.insert(&tunnel(port.into())?, reference)?;
    }
    worker.classifier = Arc::new(vec![table]);
    let spec = spec(directory, guests)?;
    let hop = Arc::new(NextHop::default());
    hop.resolve(Some([9; 6]));
    let mut vnet = Vnet::new(&spec, 0, 0, |number, end| match end {
        End::External { by, .. } => Outside::new(0, number, by, || hop.clone()).map(Way::Outside),
        End::Port { .. } => None,
    });

    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    let mut inline = None;
    for number in 0..guests.max(1) {
        let path = directory.join(format!("g{number}.sock"));
        let listener = Listener::bind(&path)?;
        let mut guest = Guest::new(&path)?;
        let connection = connect(&listener, &mut guest)?;
        if guests == 0 {
            inline = Some(guest);
        } else {
            let (stop, cpu) = (stop.clone(), guest_cpu);
            threads.push(thread::spawn(move || {
                core_affinity::set_for_current(core_affinity::CoreId { id: cpu });
                while !stop.load(Ordering::Relaxed) {
                    if guest.serve() == 0 {
                        std::hint::spin_loop();
                    }
                }
            }));
        }
        let link = Link::new(connection.tx, connection.rx, number as u64);
        let attached = vnet.attach("r1", Who::Guest(number as u32), 0, link, &worker.core);
        anyhow::ensure!(attached, "the guest is not expected");
        // Dropping the control socket would say goodbye.
        std::mem::forget(connection.control);
    }
    worker.vnets.push(Some(vnet));

    let frames = arriving()?;
    let mut batch = Vec::with_capacity(BATCH);
    let (mut next, mut given, mut out) = (0, 0u64, 0u64);
    let mut spent = Duration::ZERO;
    let mut mark = None;
    let start = Instant::now();
    let (came, time, busy) = loop {
        // As a card would, but no more than the guests' rings hold.
        if given - out < WINDOW * guests.max(1) as u64 {
            for _ in 0..BATCH {
                let Some(mut packet) = worker.core.packets.take() else { break };
                let frame: &[u8] = &frames[next % frames.len()];
                next += 1;
                packet.room_mut()[..frame.len()].copy_from_slice(frame);
                packet.set_len(frame.len()).context("room")?;
                batch.push(packet);
            }
            given += batch.len() as u64;
        }
        let before = processor_time();
        worker.classify(0, &mut batch);
        worker.round();
        spent += processor_time() - before;
        if let Some(guest) = &mut inline {
            guest.serve();
        }
        while let Ok(packet) = line.pop() {
            out += 1;
            worker.core.packets.give(packet);
        }
        match mark {
            None if start.elapsed() > WARM_UP => mark = Some((out, Instant::now(), spent)),
            Some((before, since, spent_before)) if since.elapsed().as_secs() >= seconds as u64 => {
                break (out - before, since.elapsed(), spent - spent_before);
            }
            _ => {}
        }
    };
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        if thread.join().is_err() {
            bail!("a guest panicked");
        }
    }
    let (each, mhz) = (|time: Duration| time.as_nanos() as f64 / came as f64, clock_mhz()?);
    let ns = each(busy);
    if guests > 0 {
        println!("{:.2} Mpps by the wall clock", 1e3 / each(time));
    }
    println!("mux: {ns:.1} ns, {:.0} cycles a packet ({mhz:.0} MHz)", ns * mhz / 1e3);
    let stats = worker.vnets[0].as_ref().context("there")?.stats();
    for (name, port) in &stats.nodes["r1"].ports {
        println!(
            "{name}: received {}, sent {}, dropped {:?}",
            port.received, port.sent, port.dropped
        );
    }
    Ok(())
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn connect(listener: &Listener, guest: &mut Guest) -> Result<pdp_memif::Connection> {
    let start = Instant::now();
    let mut handshake = None;
    let mut connected = None;
    while start.elapsed() < Duration::from_secs(5) {
        let up = guest.client.poll() == pdp_memif::Link::Up;
        if handshake.is_none() {
            handshake = listener.accept()?;
        }
        if let (Some(handshake), None) = (&mut handshake, &connected) {
            connected = handshake.poll(|_| true)?;
        }
        if up && let Some(connection) = connected {
            return Ok(connection);
        }
        thread::sleep(Duration::from_millis(1));
    }
    bail!("no guest came");
}

/// Sends every frame out of port 1, in place.
struct Guest {
    client: Client,
    bufs: Vec<Buf>,
}

impl Guest {
    fn new(path: &Path) -> Result<Self> {
        Ok(Self { client: Client::new(path, 0, "bounce", Settings::default())?, bufs: vec![] })
    }

    fn serve(&mut self) -> usize {
        let count = self.client.receive(&mut self.bufs, BATCH);
        for mut buf in self.bufs.drain(..) {
            self.client.bytes_mut(&mut buf)[..3].copy_from_slice(&[2, LAST, 1]);
            if let Err(buf) = self.client.send(buf) {
                self.client.free(buf);
            }
        }
        if count > 0 {
            self.client.flush();
        }
        count
    }
}

fn clock_mhz() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    let line = text.lines().find(|line| line.starts_with("cpu MHz")).context("cpu MHz")?;
    Ok(line.split(':').nth(1).context("a value")?.trim().parse()?)
}
