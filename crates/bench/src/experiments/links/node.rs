//! Measurements that need a whole node: a guaranteed
//! link on a device that others overload, and TCP.

use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_memif::{ConnectionState, MemifClient, MemifSettings};
use pdp_net::netns::within;
use pdp_testbed::{
    EVENTUALLY_MAX, TcpResult, TemporaryNode, TestMachine, eventually, meter, retry,
};
use pdp_wire::vxlan;

use super::{FROM, NUMBER_AT, TO, WARM_UP};
use crate::alone::{frame, tagged};
use crate::run::{ExperimentRun, Reading};
use crate::statistics::quantile;
use crate::stream::write_pcap;

/// Links on the interface. The first has a guaranteed tenth of it.
const LINKS: u16 = 10;
const CAPACITY_BPS: u64 = 100_000_000;

/// Length of frames of the guaranteed link and of others, and the overhead of each on the
/// interface: VXLAN over IPv4, preamble, checksum and gap.
const OWN_BYTES: usize = 400;
const OTHER_BYTES: usize = 1000;
const MORE_BYTES: usize = 50 + 24;

/// Fraction of its part that the guaranteed link uses.
const OWN_SHARE: f64 = 0.9;

/// Load of the other links, as a multiple of the capacity.
const OVERLOAD: u64 = 10;

/// Time after which a missing frame counts as lost.
const LATE: Duration = Duration::from_millis(200);

/// Link of the TCP connection.
const TCP: &str = r#"apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: tcp}
spec:
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.0.0.1/24]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.0.0.2/24]}}}
  links:
    - {endpoints: ["h1:eth0", "h2:eth0"], rate: 100Mbps, queue: 100ms, delay: 50ms}
"#;
const TCP_MBPS: f64 = 100.0;

pub(super) fn tcp(run: &mut ExperimentRun) -> Result<()> {
    // The time of window growth does not count.
    let (time, omitted) = if run.quick() { (2, 3) } else { (6, 5) };
    let bed = run.attempt("TCP", |_| {
        let node = TemporaryNode::start("tcp");
        node.apply(TCP);
        eventually("h1 reaches h2", || node.try_exec("tcp/h1", "ping -c1 -W1 10.0.0.2").is_ok());
        Ok(node)
    });
    let Some(node) = bed else { return Ok(()) };
    run.rounds(|run| {
        run.take("pdp, 50 ms each way", TCP_MBPS, "Mbit/s asked", || {
            let mut server = node.pdp_command(&["exec", "tcp/h2", "--", "iperf3", "-s", "-1"]);
            let mut server = server.stdout(std::process::Stdio::null()).spawn()?;
            eventually("iperf3 listens", || {
                node.try_exec("tcp/h2", "ss -Hltn sport = :5201")
                    .is_ok_and(|lines| !lines.trim().is_empty())
            });
            let line = format!("iperf3 -J -c 10.0.0.2 -O {omitted} -t {time}");
            let words = node.exec("tcp/h1", &line);
            server.wait()?;
            let bps = TcpResult::parse(&words)?.received_bps;
            Ok(vec![Reading::new("TCP", bps / 1e6, "Mbit/s")])
        });
        Ok(())
    })
}

pub(super) fn guaranteed(run: &mut ExperimentRun) -> Result<()> {
    let (cores, time) = (run.cores(), run.time());
    let Some(mut bed) = run.attempt("guaranteed", |_| TransitTestbed::start(cores[0])) else {
        return Ok(());
    };
    run.rounds(|run| {
        run.take("pdp, 10 of 100 Mbit/s guaranteed", OVERLOAD as f64, "times the capacity", || {
            bed.load(true);
            thread::sleep(WARM_UP);
            let measured = thread::scope(|scope| {
                let measured = scope.spawn(|| {
                    meter::pin(cores[1]);
                    bed.delays(time)
                });
                measured.join().ok().context("the thread that sends")
            });
            bed.load(false);
            let (delays, lost) = measured??;
            let of = |share| quantile(&delays, share);
            Ok(vec![
                Reading::new("guaranteed: delay, median", of(0.5), "ms"),
                Reading::new("guaranteed: delay, p99", of(0.99), "ms"),
                Reading::new("guaranteed: frames lost", lost as f64, "frames"),
            ])
        });
        Ok(())
    })
}

/// Node with ten transits to a machine behind a device. The first carries frames of this program,
/// the others those of a generator.
struct TransitTestbed {
    node: TemporaryNode,
    _machine: TestMachine,
    mux: usize,
    from: MemifClient,
    to: UdpSocket,
}

impl TransitTestbed {
    fn start(mux: usize) -> Result<Self> {
        let mut node = TemporaryNode::prepare("links");
        let machine = node.machine("mB", "extB");
        machine.run("ip addr add 192.0.2.2/24 dev eth0");
        node.namespace().run("ip addr add 192.0.2.1/24 dev extB");
        node.start_pdpd();
        let path = format!("/run/netns/{}", machine.netns);
        let netns = File::open(&path).context(path)?;
        let to = within(netns.as_fd(), || Ok(UdpSocket::bind(("0.0.0.0", vxlan::PORT))))??;
        to.set_nonblocking(true)?;
        // One frame for each of the other links.
        let others = (2..=LINKS).map(|id| Ok(tagged(frame(TO, FROM, OTHER_BYTES), id)));
        write_pcap(&pcap(&node), others)?;
        node.apply(&(substrate(&node, mux, false) + "---\n" + &vnet()));
        let socket = node.run_dir().join("externals/A0/memif.sock");
        let mut from = MemifClient::new(&socket, 0, "bench", MemifSettings::default())?;
        eventually("memif", || from.poll() == ConnectionState::Up);
        let mut bed = Self { node, _machine: machine, mux, from, to };
        retry(EVENTUALLY_MAX, Duration::ZERO, "frames get to the machine", || {
            bed.delays(Duration::from_millis(50))
        })?;
        Ok(bed)
    }

    /// Starts or stops the other links' load.
    fn load(&self, on: bool) {
        self.node.apply(&substrate(&self.node, self.mux, on));
    }

    /// Delays of the guaranteed link's frames, milliseconds, sorted, and the number of lost ones.
    fn delays(&mut self, time: Duration) -> Result<(Vec<f64>, usize)> {
        let own_bps = (CAPACITY_BPS / u64::from(LINKS)) as f64 * OWN_SHARE;
        let pause = Duration::from_secs_f64((OWN_BYTES + MORE_BYTES) as f64 * 8.0 / own_bps);
        let mut own = frame(TO, FROM, OWN_BYTES);
        let (mut sent, mut took, mut datagram) = (Vec::new(), Vec::new(), [0; 2048]);
        let start = Instant::now();
        let mut next = start;
        while start.elapsed() < time + LATE {
            let now = Instant::now();
            if now < start + time && now >= next {
                // Frames missed while this thread did not run are not made up for.
                next = now.max(next + pause);
                own[NUMBER_AT..NUMBER_AT + 4].copy_from_slice(&(sent.len() as u32).to_le_bytes());
                let mut buf = self.from.alloc().context("a buffer")?;
                ensure!(buf.set_len(own.len()), "a buffer is too short");
                self.from.bytes_mut(&mut buf).copy_from_slice(&own);
                sent.push(Instant::now());
                if let Err(buf) = self.from.send(buf) {
                    self.from.free(buf);
                }
                self.from.flush();
            }
            let Ok(count) = self.to.recv(&mut datagram) else { continue };
            let (now, at) = (Instant::now(), vxlan::HEADER_BYTES);
            let is_own = count == at + OWN_BYTES && datagram[at..at + 6] == TO;
            let number = datagram[at + NUMBER_AT..][..4].try_into().map(u32::from_le_bytes)?;
            if let Some(then) = sent.get(number as usize).filter(|_| is_own) {
                took.push(now.duration_since(*then).as_secs_f64() * 1e3);
            }
        }
        ensure!(took.len() > sent.len() / 2, "of {} frames, {} arrived", sent.len(), took.len());
        took.sort_by(f64::total_cmp);
        let lost = sent.len().saturating_sub(took.len());
        Ok((took, lost))
    }
}

fn pcap(node: &TemporaryNode) -> std::path::PathBuf {
    node.directory.join("others.pcap")
}

fn substrate(node: &TemporaryNode, mux: usize, loaded: bool) -> String {
    let pps = OVERLOAD * CAPACITY_BPS / 8 / (OTHER_BYTES + MORE_BYTES) as u64;
    let frames = format!("frames: {}, pps: {pps}", pcap(node).display());
    let frames = if loaded { frames } else { String::new() };
    format!(
        "apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: \"{mux}\", power: 1000m}}
  interfaces:
    A0: {{memif: {{}}}}
    B0: {{device: extB, capacity: {CAPACITY_BPS}bps}}
    G0: {{generator: {{{frames}}}}}
"
    )
}

fn vnet() -> String {
    let (mut externals, mut links) = (String::new(), String::new());
    for id in 1..=LINKS {
        let source = match id {
            1 => "interface: A0".to_owned(),
            _ => format!("interface: G0, vlan: {{id: {id}}}"),
        };
        let part = match id {
            1 => {
                let bps = CAPACITY_BPS / u64::from(LINKS);
                format!("at: {{\"external:b1\": {{guarantee: {bps}bps}}}}")
            }
            _ => "weight: 100".to_owned(),
        };
        externals += &format!(
            "    a{id}: {{{source}}}
    b{id}: {{interface: B0, vxlan: {{vni: {id}, local: 192.0.2.1, remote: 192.0.2.2}}}}
"
        );
        links +=
            &format!("    - {{endpoints: [\"external:a{id}\", \"external:b{id}\"], {part}}}\n");
    }
    format!(
        "apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: bench}}
spec:
  nodes: {{}}
  externals:
{externals}  links:
{links}"
    )
}
