//! Faults of a soak: kinds, the draw with a seed, and their injection.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pdp_testbed::specs::two_hosts;
use pdp_testbed::{MonitoredProcess, retry};
use rustix::process::{Pid, Signal, kill_process};

use super::leaks;
use crate::figure::VNETS;
use crate::node::DemoNode;
use crate::outside::POLL_PAUSE;
use crate::paths;
use crate::table::SplitMix64;

/// Duration of a stopped guest, an interface or a link down, a missing daemon, or a capture.
const OUTAGE: Duration = Duration::from_secs(1);
/// Longest wait for added or removed guests, and for a vnet to come up.
const CHANGE_MAX: Duration = Duration::from_secs(120);

/// Number and total power of green's forwarding guests in Figure 1, and the values for scaling.
pub const GREEN_GUESTS: usize = 2;
const GREEN_POWER: &str = "0.6";
const SCALES: [(usize, &str); 2] = [(4, GREEN_POWER), (1, "0.3")];

/// A temporary vnet on its own engine ([`engine`]), whose router has this power.
fn lab(power: f32) -> String {
    two_hosts("lab", &format!("{{power: {power}}}"))
}

/// The substrate of Figure 1 with an engine for [`lab`].
pub fn engine(figure1: &str) -> Result<String> {
    let substrate = figure1.split("\n---").next().unwrap_or_default();
    let (before, after) = substrate.split_once("    fe1:").context("figure1.yaml has no fe1")?;
    Ok(format!("{before}    lab: {{cpus: \"0-1\", capacity: 0.1}}\n    fe1:{after}\n"))
}

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SoakFaultKind {
    /// kill -9 of pdpd, which is restarted.
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
    /// A forwarding guest is stopped.
    Stop,
    /// An underlay interface goes down and up.
    Underlay,
    /// A vlink goes down and up.
    Link,
    /// Green gets more or fewer forwarding guests, then the original number.
    Scale,
    /// Another vnet is applied and deleted.
    Vnet,
    /// A capture is aborted.
    Capture,
    /// An invalid spec is refused.
    Refused,
}

/// All kinds.
pub const KINDS: [SoakFaultKind; 14] = [
    SoakFaultKind::Daemon,
    SoakFaultKind::Mux,
    SoakFaultKind::Guest,
    SoakFaultKind::Tap,
    SoakFaultKind::Mirror,
    SoakFaultKind::Routing,
    SoakFaultKind::Shim,
    SoakFaultKind::Stop,
    SoakFaultKind::Underlay,
    SoakFaultKind::Link,
    SoakFaultKind::Scale,
    SoakFaultKind::Vnet,
    SoakFaultKind::Capture,
    SoakFaultKind::Refused,
];

impl SoakFaultKind {
    /// Name for people.
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
            Self::Capture => "a capture interrupted",
            Self::Refused => "a spec refused",
        }
    }

    /// Networks that it may affect. Blue's kernel forwards, without guests and mirror.
    fn vnets(self) -> &'static [&'static str] {
        match self {
            Self::Guest | Self::Stop | Self::Mirror => &["red", "green"],
            _ => &VNETS,
        }
    }

    /// Programs of which it kills or stops one.
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

/// Drawn fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoakFault {
    /// Kind.
    pub kind: SoakFaultKind,
    /// Vnet, if it affects one.
    pub vnet: &'static str,
    /// Random number that selects among several targets.
    pick: u64,
}

/// Draws faults: each kind once, in random order, before any repeats.
pub struct Bag {
    random: SplitMix64,
    left: Vec<SoakFaultKind>,
}

impl Bag {
    /// Makes a bag whose draws repeat for the same seed.
    pub fn new(seed: u64) -> Self {
        Self { random: SplitMix64(seed), left: Vec::new() }
    }

    /// Draws the next fault.
    pub fn draw(&mut self) -> SoakFault {
        if self.left.is_empty() {
            self.left = KINDS.to_vec();
        }
        let at = self.random.next() % self.left.len() as u64;
        let kind = self.left.swap_remove(at as usize);
        let vnets = kind.vnets();
        let vnet = vnets[(self.random.next() % vnets.len() as u64) as usize];
        SoakFault { kind, vnet, pick: self.random.next() }
    }
}

impl SoakFault {
    /// True if it leaves forwarding alone, so that nothing may be lost.
    pub fn is_harmless(&self) -> bool {
        match self.kind {
            // The TAP helper carries external packets to blue's kernel.
            SoakFaultKind::Tap => self.vnet != "blue",
            SoakFaultKind::Daemon
            | SoakFaultKind::Mirror
            | SoakFaultKind::Scale
            | SoakFaultKind::Vnet
            | SoakFaultKind::Capture
            | SoakFaultKind::Refused => true,
            _ => false,
        }
    }

    /// Selects one of several.
    fn one<T: Copy>(&self, of: &[T]) -> Option<T> {
        let at = self.pick.checked_rem(of.len() as u64)?;
        of.get(at as usize).copied()
    }

    /// Injects it, and undoes lasting effects. Returns its details.
    pub fn inject(&self, node: &DemoNode) -> Result<String> {
        let Self { kind, vnet, .. } = *self;
        match kind {
            SoakFaultKind::Underlay => {
                let device = self.one(&["ext-a", "ext-b"]).context("no device")?;
                let node = paths::node();
                let set = |state| node.finish(&["ip", "link", "set", device, state]);
                set("down")?;
                std::thread::sleep(OUTAGE);
                set("up")?;
                Ok(device.into())
            }
            SoakFaultKind::Link => {
                let ports = if vnet == "green" { 5 } else { 3 };
                let port = format!("{vnet}/r1:eth{}", self.pick % ports);
                node.pdp(&["link", "down", &port])?;
                std::thread::sleep(OUTAGE);
                node.pdp(&["link", "up", &port])?;
                Ok(port)
            }
            SoakFaultKind::Scale => {
                let (guests, power) = self.one(&SCALES).context("no scale")?;
                scale(node, guests, power)?;
                scale(node, GREEN_GUESTS, GREEN_POWER)?;
                Ok(format!("{guests} guests"))
            }
            SoakFaultKind::Vnet => {
                node.apply(&lab(0.1))?;
                let ping = ["ping", "-c1", "-W1", "10.2.0.2"];
                retry(CHANGE_MAX, POLL_PAUSE, "lab", || node.exec("lab/h1", &ping).map(drop))?;
                node.pdp(&["delete", "lab"])?;
                Ok("lab".into())
            }
            SoakFaultKind::Capture => {
                let port = format!("{vnet}/r1:eth0");
                let file = paths::outside().join("capture.pcap");
                let words = ["capture", &*port, "-w", &*file.to_string_lossy()];
                let mut capture = node.command(&words).stderr(Stdio::null()).spawn()?;
                std::thread::sleep(OUTAGE);
                capture.kill()?;
                capture.wait()?;
                Ok(port)
            }
            SoakFaultKind::Refused => {
                let refused = node.apply(&lab(9.0));
                ensure!(refused.is_err(), "a vnet that asks for 9 cores was not refused");
                ensure!(node.inspect("lab").is_err(), "a refused vnet exists");
                Ok("lab".into())
            }
            SoakFaultKind::Stop => {
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
                retry(CHANGE_MAX, POLL_PAUSE, &victim.line, || {
                    let alive = leaks::processes().iter().any(|one| one.pid == victim.pid);
                    ensure!(!alive, "process {} does not end", victim.pid);
                    Ok(())
                })?;
                if kind == SoakFaultKind::Daemon {
                    std::thread::sleep(OUTAGE);
                    node.up(None)?;
                }
                Ok(match kind {
                    SoakFaultKind::Daemon | SoakFaultKind::Mux => victim.role,
                    _ => format!("{} of {vnet}", victim.role),
                })
            }
        }
    }

    /// Process to kill or to stop.
    fn victim(&self) -> Result<MonitoredProcess> {
        // A network's process is in one of the network's cgroups, or uses one of its directories,
        // or has a record with its id.
        let group = format!("/_{}/", self.vnet);
        let named = [format!("/{}/", self.vnet), format!("/records/{}.", self.vnet)];
        // A new control guest of green would have to learn the whole table again.
        let spared = "/records/green.r1 ";
        let mut found = leaks::processes();
        found.retain(|process| {
            let of_vnet = matches!(self.kind, SoakFaultKind::Daemon | SoakFaultKind::Mux)
                || process.cgroup.contains(&group)
                || named.iter().any(|named| process.line.contains(named));
            let is_spared = self.kind == SoakFaultKind::Shim && process.line.contains(spared);
            self.kind.roles().contains(&process.role.as_str()) && of_vnet && !is_spared
        });
        found.sort_by(|a, b| a.line.cmp(&b.line));
        let at = self.one(&(0..found.len()).collect::<Vec<_>>());
        let at =
            at.with_context(|| format!("{}: no process of {}", self.kind.name(), self.vnet))?;
        Ok(found.swap_remove(at))
    }
}

fn signal(process: &MonitoredProcess, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(process.pid.try_into()?).context("process 0")?;
    kill_process(pid, signal).with_context(|| process.line.clone())
}

fn scale(node: &DemoNode, guests: usize, power: &str) -> Result<()> {
    node.pdp(&["scale", "green/r1", &guests.to_string(), "--power", power])?;
    retry(CHANGE_MAX, POLL_PAUSE, "green's forwarding guests", || {
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
    fn fault_draws_are_repeatable_and_complete() {
        let draw = |seed| {
            let mut bag = Bag::new(seed);
            (0..3 * KINDS.len()).map(|_| bag.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draw(5), draw(5));
        assert_ne!(draw(5), draw(6));
        for part in draw(7).chunks(KINDS.len()) {
            let mut kinds: Vec<SoakFaultKind> = part.iter().map(|fault| fault.kind).collect();
            kinds.sort_unstable();
            assert_eq!(kinds, KINDS);
        }
    }

    #[test]
    fn the_substrate_gets_an_engine() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/figure1/figure1.yaml");
        let substrate = engine(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(substrate.contains("kind: Substrate") && substrate.contains("    lab: {"));
        assert!(!substrate.contains("VirtualNetwork"));
    }
}
