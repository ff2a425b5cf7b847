//! What goes wrong in a soak: kinds, the draw by a seed, and how each is done.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::leaks::{self, Process};
use crate::figure::VNETS;
use crate::node::Node;
use crate::table::Random;
use crate::{place, shell};

/// How long a guest is stopped, an interface or a link down, a daemon missing, a capture on.
const OUTAGE: Duration = Duration::from_secs(1);
/// Longest wait for guests that are added or taken out, and for a vnet that comes up.
const CHANGE_MAX: Duration = Duration::from_secs(120);

/// Forwarding guests of green, with the power of all, as Figure 1 has it, and what it is scaled to.
pub const GREEN_GUESTS: usize = 2;
const GREEN_POWER: &str = "0.6";
const SCALES: [(usize, &str); 2] = [(4, GREEN_POWER), (1, "0.3")];

/// A vnet that comes and goes, on an engine of its own ([`engine`]).
const LAB: &str = "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: lab}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.1.0.1/24]}, eth1: {addresses: [10.2.0.1/24]}}
      dataPlane: {power: 0.1}
    h1: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}}
  links:
    - endpoints: [\"r1:eth0\", \"h1:eth0\"]
    - endpoints: [\"r1:eth1\", \"h2:eth0\"]
";

/// The substrate of Figure 1 with an engine for [`LAB`].
pub fn engine(figure1: &str) -> Result<String> {
    let substrate = figure1.split("\n---").next().unwrap_or_default();
    let (before, after) = substrate.split_once("    fe1:").context("figure1.yaml has no fe1")?;
    Ok(format!("{before}    lab: {{cpus: \"0-1\", capacity: 0.1}}\n    fe1:{after}\n"))
}

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// kill -9 of pdpd, which is started again.
    Daemon,
    /// kill -9 of the mux.
    Mux,
    /// kill -9 of a forwarding guest.
    Guest,
    /// kill -9 of a TAP helper.
    Tap,
    /// kill -9 of a route mirror.
    Mirror,
    /// kill -9 of a routing daemon in a control guest.
    Routing,
    /// kill -9 of a shim.
    Shim,
    /// A forwarding guest stands still.
    Stop,
    /// An underlay interface goes down and up.
    Underlay,
    /// A vlink goes down and up.
    Link,
    /// Green gets more or fewer forwarding guests, then as many as before.
    Scale,
    /// Another vnet comes and goes.
    Vnet,
    /// A capture is broken off.
    Capture,
    /// A spec is refused.
    Refused,
}

/// All kinds.
pub const KINDS: [Kind; 14] = [
    Kind::Daemon,
    Kind::Mux,
    Kind::Guest,
    Kind::Tap,
    Kind::Mirror,
    Kind::Routing,
    Kind::Shim,
    Kind::Stop,
    Kind::Underlay,
    Kind::Link,
    Kind::Scale,
    Kind::Vnet,
    Kind::Capture,
    Kind::Refused,
];

impl Kind {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Daemon => "kill -9 of pdpd",
            Self::Mux => "kill -9 of the mux",
            Self::Guest => "kill -9 of a forwarding guest",
            Self::Tap => "kill -9 of a TAP helper",
            Self::Mirror => "kill -9 of a route mirror",
            Self::Routing => "kill -9 of a routing daemon",
            Self::Shim => "kill -9 of a shim",
            Self::Stop => "a forwarding guest stopped for 1 s",
            Self::Underlay => "an underlay interface down for 1 s",
            Self::Link => "a vlink down for 1 s",
            Self::Scale => "green scaled and scaled back",
            Self::Vnet => "a vnet applied and deleted",
            Self::Capture => "a capture broken off",
            Self::Refused => "a spec refused",
        }
    }

    /// Networks for which it is: blue's kernel forwards, without guests and without a mirror.
    fn vnets(self) -> &'static [&'static str] {
        match self {
            Self::Guest | Self::Stop | Self::Mirror => &["red", "green"],
            _ => &VNETS,
        }
    }

    /// Programs of which one is killed or stopped.
    fn roles(self) -> &'static [&'static str] {
        match self {
            Self::Daemon => &["pdpd"],
            Self::Mux => &["pdp-mux"],
            Self::Guest | Self::Stop => &["pdp-router"],
            Self::Tap => &["pdp-tap"],
            Self::Mirror => &["pdp-mirror"],
            Self::Routing => &["zebra", "ospfd", "isisd", "bird"],
            Self::Shim => &["pdp-shim"],
            _ => &[],
        }
    }
}

/// A fault as drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What goes wrong.
    pub kind: Kind,
    /// For whom, where it is for one vnet.
    pub vnet: &'static str,
    /// Which of several.
    pick: u64,
}

/// Draws faults: each kind once, in an order of its own, before any comes again.
pub struct Bag {
    random: Random,
    left: Vec<Kind>,
}

impl Bag {
    /// A bag whose draws repeat by the seed.
    pub fn new(seed: u64) -> Self {
        Self { random: Random(seed), left: Vec::new() }
    }

    /// The next fault.
    pub fn draw(&mut self) -> Fault {
        if self.left.is_empty() {
            self.left = KINDS.to_vec();
        }
        let at = self.random.next() % self.left.len() as u64;
        let kind = self.left.swap_remove(at as usize);
        let vnets = kind.vnets();
        let vnet = vnets[(self.random.next() % vnets.len() as u64) as usize];
        Fault { kind, vnet, pick: self.random.next() }
    }
}

impl Fault {
    /// Whether it leaves forwarding alone, so that nothing may be lost.
    pub fn is_harmless(&self) -> bool {
        match self.kind {
            // What comes from outside for blue's kernel goes by it.
            Kind::Tap => self.vnet != "blue",
            Kind::Daemon
            | Kind::Mirror
            | Kind::Scale
            | Kind::Vnet
            | Kind::Capture
            | Kind::Refused => true,
            _ => false,
        }
    }

    /// One of several, by the draw.
    fn one<T: Copy>(&self, of: &[T]) -> Option<T> {
        let at = self.pick.checked_rem(of.len() as u64)?;
        of.get(at as usize).copied()
    }

    /// Does it, and undoes what would last; what it was, in detail.
    pub fn inject(&self, node: &Node) -> Result<String> {
        let Self { kind, vnet, .. } = *self;
        match kind {
            Kind::Underlay => {
                let device = self.one(&["ext-a", "ext-b"]).context("no device")?;
                let netns = place::node();
                let set =
                    |state| shell::run(None, &["ip", "-n", &netns, "link", "set", device, state]);
                set("down")?;
                std::thread::sleep(OUTAGE);
                set("up")?;
                Ok(device.into())
            }
            Kind::Link => {
                let ports = if vnet == "green" { 5 } else { 3 };
                let port = format!("{vnet}/r1:eth{}", self.pick % ports);
                node.pdp(&["link", "down", &port])?;
                std::thread::sleep(OUTAGE);
                node.pdp(&["link", "up", &port])?;
                Ok(port)
            }
            Kind::Scale => {
                let (guests, power) = self.one(&SCALES).context("no scale")?;
                scale(node, guests, power)?;
                scale(node, GREEN_GUESTS, GREEN_POWER)?;
                Ok(format!("{guests} guests"))
            }
            Kind::Vnet => {
                apply(node, LAB)?;
                let ping = ["ping", "-c1", "-W1", "10.2.0.2"];
                shell::wait("lab", CHANGE_MAX, || node.exec("lab/h1", &ping).map(drop))?;
                node.pdp(&["delete", "lab"])?;
                Ok("lab".into())
            }
            Kind::Capture => {
                let port = format!("{vnet}/r1:eth0");
                let file = place::outside().join("capture.pcap");
                let words = ["capture", &*port, "-w", &*file.to_string_lossy()];
                let mut capture = node.command(&words).stderr(Stdio::null()).spawn()?;
                std::thread::sleep(OUTAGE);
                capture.kill()?;
                capture.wait()?;
                Ok(port)
            }
            Kind::Refused => {
                let refused = apply(node, &LAB.replace("power: 0.1", "power: 9"));
                ensure!(refused.is_err(), "a vnet that asks for 9 cores was not refused");
                ensure!(node.inspect("lab").is_err(), "a vnet that was refused is there");
                Ok("lab".into())
            }
            Kind::Stop => {
                let guest = self.victim()?;
                signal(&guest, Signal::STOP)?;
                std::thread::sleep(OUTAGE);
                // It may have been replaced.
                let _ = signal(&guest, Signal::CONT);
                Ok(format!("{} of {vnet}", guest.role))
            }
            _ => {
                let victim = self.victim()?;
                signal(&victim, Signal::KILL)?;
                shell::wait(&victim.line, CHANGE_MAX, || {
                    let there = leaks::processes().iter().any(|one| one.pid == victim.pid);
                    ensure!(!there, "process {} does not end", victim.pid);
                    Ok(())
                })?;
                if kind == Kind::Daemon {
                    std::thread::sleep(OUTAGE);
                    node.up(None)?;
                }
                Ok(match kind {
                    Kind::Daemon | Kind::Mux => victim.role,
                    _ => format!("{} of {vnet}", victim.role),
                })
            }
        }
    }

    /// The process to kill or to stop.
    fn victim(&self) -> Result<Process> {
        // A process of a network is in a cgroup of its, has files in a directory of its, or has a record of its id.
        let group = format!("/_{}/", self.vnet);
        let named = [format!("/{}/", self.vnet), format!("/records/{}.", self.vnet)];
        // A new control guest of green would learn the whole table anew.
        let spared = "/records/green.r1 ";
        let mut found = leaks::processes();
        found.retain(|process| {
            let of_vnet = matches!(self.kind, Kind::Daemon | Kind::Mux)
                || process.cgroup.contains(&group)
                || named.iter().any(|named| process.line.contains(named));
            let is_spared = self.kind == Kind::Shim && process.line.contains(spared);
            self.kind.roles().contains(&process.role.as_str()) && of_vnet && !is_spared
        });
        found.sort_by(|a, b| a.line.cmp(&b.line));
        let at = self.one(&(0..found.len()).collect::<Vec<_>>());
        let at =
            at.with_context(|| format!("{}: no process of {}", self.kind.name(), self.vnet))?;
        Ok(found.swap_remove(at))
    }
}

fn signal(process: &Process, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(process.pid.try_into()?).context("process 0")?;
    kill_process(pid, signal).with_context(|| process.line.clone())
}

/// `pdp apply` of a text.
pub fn apply(node: &Node, spec: &str) -> Result<()> {
    let file = place::outside().join("applied.yaml");
    fs::write(&file, spec)?;
    node.pdp(&["apply", "-f", &file.to_string_lossy()]).map(drop)
}

fn scale(node: &Node, guests: usize, power: &str) -> Result<()> {
    node.pdp(&["scale", "green/r1", &guests.to_string(), "--power", power])?;
    shell::wait("green's forwarding guests", CHANGE_MAX, || {
        let router = node.stats_of("green", "r1")?;
        let connected = router.guests.values().filter(|guest| guest.connected).count();
        ensure!(connected == guests, "{connected} of {guests} are connected");
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_repeat_by_seed_and_leave_no_kind_out() {
        let draw = |seed| {
            let mut bag = Bag::new(seed);
            (0..3 * KINDS.len()).map(|_| bag.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draw(5), draw(5));
        assert_ne!(draw(5), draw(6));
        for part in draw(7).chunks(KINDS.len()) {
            let mut kinds: Vec<Kind> = part.iter().map(|fault| fault.kind).collect();
            kinds.sort_unstable();
            assert_eq!(kinds, KINDS);
        }
    }

    #[test]
    fn the_substrate_gets_an_engine() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/figure1/figure1.yaml");
        let substrate = engine(&fs::read_to_string(path).unwrap()).unwrap();
        assert!(substrate.contains("kind: Substrate") && substrate.contains("    lab: {"));
        assert!(!substrate.contains("VirtualNetwork"));
    }
}
