//! Two machines with a forwarder between them, in network namespaces. Machine A sends (`eth0`, to
//! the middle's `extA`), and machine B receives (`eth0`, from the middle's `extB`).
//!
//! Frames go from A's address to destinations behind B:
//! those of the Internet's routes, or of a few prefixes.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pdp_testbed::meter::{self, Clock};
use pdp_testbed::{TemporaryNode, TestMachine, finish, retry};

use crate::live::{DESTINATIONS_MAX, Load, LoadGenerator, StreamSink};
use crate::reading::Reading;
use crate::stream::FrameStream;

/// MAC address of machine A.
pub const MAC_A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
/// MAC address of machine B.
pub const MAC_B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
/// MAC address of the middle towards A: the destination
/// of testpmd's flows (DPDK, app/test-pmd/flowgen.c).
pub const MAC_MIDDLE_A: [u8; 6] = [0, 1, 2, 3, 4, 1];
/// MAC address of the middle towards B.
pub const MAC_MIDDLE_B: [u8; 6] = [2, 0, 0, 0, 1, 0xb];

/// Time without frames after which sink and counters are final.
const QUIET: Duration = Duration::from_millis(50);

/// Longest wait for the end of the previous sink.
const SINK_MAX: Duration = Duration::from_millis(2500);

/// Addresses of each prefix of [`stream_in_turn`].
const HOSTS_IN_TURN: u8 = 8;

/// An IPv4 prefix: address and length.
pub type Prefix = ([u8; 4], u8);

/// Two prefixes.
pub fn few() -> Vec<Prefix> {
    some(2)
}

/// `count` prefixes, at most 256.
pub fn some(count: usize) -> Vec<Prefix> {
    (0..=u8::MAX).take(count).map(|third| ([20, 0, third, 0], 24)).collect()
}

/// A single address: one flow.
pub fn one_flow() -> Vec<Prefix> {
    vec![([20, 0, 0, 7], 32)]
}

/// The Internet's IPv4 prefixes in `data/`, except those that this measurement uses itself.
pub fn internet() -> Result<Vec<Prefix>> {
    let own = |(address, length): (IpAddr, u32)| match address {
        IpAddr::V4(address) if address.octets()[0] != 10 => {
            Some((address.octets(), u8::try_from(length).ok()?))
        }
        _ => None,
    };
    Ok(prefixes("data/internet-2022-10-29.v4.txt.xz")?.into_iter().filter_map(own).collect())
}

/// Prefixes in a file of the repository: address and length.
pub fn prefixes(file: &str) -> Result<Vec<(IpAddr, u32)>> {
    let path = repository().join(file);
    let text = finish(Command::new("xzcat").arg(&path)).context("package xz-utils")?;
    let prefix = |line: &str| {
        let (address, length) = line.split(' ').next()?.split_once('/')?;
        Some((address.parse().ok()?, length.parse().ok()?))
    };
    Ok(text.lines().filter_map(prefix).collect())
}

/// Root of the repository where this program was built.
pub fn repository() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).unwrap_or(own).to_owned()
}

/// Repeatable pseudo-random numbers: xorshift (Marsaglia 2003).
#[derive(Clone, Debug)]
pub struct Random(u32);

impl Default for Random {
    fn default() -> Self {
        Self(0x9e37_79b9)
    }
}

impl Random {
    /// Returns the next number, never 0.
    pub fn draw(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }
}

/// Random addresses from random prefixes; the same in each run.
pub fn destinations(prefixes: &[Prefix]) -> Vec<[u8; 4]> {
    let mut random = Random::default();
    let count = (prefixes.len() * 256).next_power_of_two().min(DESTINATIONS_MAX);
    let draw = |_| {
        let at = (u64::from(random.draw()) * prefixes.len() as u64) >> 32;
        let (address, length) = prefixes[at as usize];
        let host = u32::MAX.checked_shr(length.into()).unwrap_or(0);
        (u32::from_be_bytes(address) | random.draw() & host).to_be_bytes()
    };
    (0..count).map(draw).collect()
}

/// Frames from machine A through the middle to random addresses in these prefixes.
pub fn stream(prefixes: &[Prefix], bytes: usize) -> FrameStream {
    stream_to(destinations(prefixes), bytes)
}

/// Frames from machine A through the middle to /24 prefixes in turn, with some addresses of each.
pub fn stream_in_turn(prefixes: &[Prefix], bytes: usize) -> FrameStream {
    let to =
        |host| prefixes.iter().map(move |(address, _)| [address[0], address[1], address[2], host]);
    stream_to((1..=HOSTS_IN_TURN).flat_map(to).collect(), bytes)
}

fn stream_to(destinations: Vec<[u8; 4]>, bytes: usize) -> FrameStream {
    FrameStream {
        to_mac: MAC_MIDDLE_A,
        from_mac: MAC_A,
        source: [10, 0, 1, 2],
        destinations,
        bytes,
    }
}

/// MAC address as text.
pub fn words(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// The two machines and the node between them, which has no daemon yet.
#[derive(Debug)]
pub struct Site {
    /// The node in the middle.
    pub node: TemporaryNode,
    /// The sender.
    pub a: TestMachine,
    /// The receiver.
    pub b: TestMachine,
    generator: Option<LoadGenerator>,
    sink: Option<StreamSink>,
}

impl Site {
    /// Makes the machines and the node.
    pub fn make(label: &str) -> Self {
        let mut node = TemporaryNode::prepare(label);
        let (a, b) = (node.machine("mA", "extA"), node.machine("mB", "extB"));
        let quiet = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1";
        for (machine, mac) in [(&a, MAC_A), (&b, MAC_B)] {
            machine.run(&format!("{quiet}; ip link set eth0 address {}", words(mac)));
        }
        node.namespace().run(&format!(
            "{quiet}
             ip link set extA address {}; ip link set extB address {}
             # So that frames of the kernel's own generator are taken.
             ethtool -K extA gro on",
            words(MAC_MIDDLE_A),
            words(MAC_MIDDLE_B)
        ));
        Self { node, a, b, generator: None, sink: None }
    }

    /// Adds addresses and routes to the machines, to run programs on them.
    pub fn add_hosts(&self) {
        for (machine, net, mac) in [(&self.a, 1, MAC_MIDDLE_A), (&self.b, 2, MAC_MIDDLE_B)] {
            machine.run(&format!(
                "ip addr add 10.0.{net}.2/24 dev eth0
                 ip neigh replace 10.0.{net}.1 lladdr {} dev eth0 nud permanent
                 ip route add default via 10.0.{net}.1",
                words(mac)
            ));
        }
    }

    /// Starts a generator in A, on a CPU, and a sink in B.
    pub fn aim(&mut self, prefixes: &[Prefix], bytes: usize, cpu: usize) -> Result<()> {
        (self.generator, self.sink) = (None, None);
        let stream = stream(prefixes, bytes);
        self.generator = Some(LoadGenerator::start(&self.a.netns, "eth0", cpu, &stream)?);
        // The previous sink's attachment may end a little later.
        let start = || StreamSink::start(&self.b.netns, "eth0");
        self.sink = Some(retry(SINK_MAX, QUIET, "the previous sink ends", start)?);
        Ok(())
    }

    /// Offers a load for `time` and returns the result. Cycles are those of the given processes, or
    /// of the generator and interrupts if there are none.
    pub fn offer(
        &self,
        load: Load,
        time: Duration,
        processes: &[u32],
        clock: &Clock,
    ) -> Result<Vec<Reading>> {
        let generator = self.generator.as_ref().context("no generator")?;
        let sink = self.sink.as_ref().context("no sink")?;
        generator.send(load, time / 10, clock)?;
        let before = sink.settled(QUIET)?;
        let interrupts = meter::processes("comm", "ksoftirqd/");
        let measured = if processes.is_empty() { &*interrupts } else { processes };
        let meter = clock.start(measured, false);
        let sent = generator.send(load, time, clock)?;
        let cycles = clock.stop(meter);
        let after = sink.settled(QUIET)?;
        let received = after.received - before.received;
        ensure!(received > 0, "none of {} frames arrived", sent.frames);
        let mut all = cycles.user + cycles.kernel;
        let mut notes = "";
        if processes.is_empty() {
            all += sent.cycles.user + sent.cycles.kernel;
            notes = "cycles with those of the generator";
        }
        let offered = sent.frames as f64;
        let (rate, offered_mpps) =
            (received as f64 / sent.seconds / 1e6, offered / sent.seconds / 1e6);
        let loss = (1.0 - received as f64 / offered.max(1.0)) * 100.0;
        let reordered = (after.reordered - before.reordered) as f64 / received as f64 * 100.0;
        Ok(vec![
            Reading::new("rate", rate, "Mpps").cycles(all / received as f64).notes(notes),
            Reading::new("offered", offered_mpps, "Mpps"),
            Reading::new("loss", loss, "%"),
            Reading::new("late", reordered, "%"),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_cover_all_prefixes() {
        let drawn = destinations(&few());
        assert_eq!(drawn.len(), 512);
        assert!(drawn.iter().all(|to| to[..2] == [20, 0] && to[2] < 2));
        assert!((0..2).all(|third| drawn.iter().filter(|to| to[2] == third).count() > 200));
        assert_eq!(destinations(&[([192, 0, 2, 7], 32)])[0], [192, 0, 2, 7]);
    }
}
