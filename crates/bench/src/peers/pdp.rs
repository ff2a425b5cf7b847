//! PdP: a router `bench/r1` between the external interfaces A and B, its guests in their containers.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_e2e::{Node, eventually, meter};

use super::kernel;
use crate::site::{MAC_A, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Prefix, words};

/// Time that a full table gets on its way to a guest, and how often it is looked for.
const TABLE_MAX: Duration = Duration::from_secs(120);
const TABLE_LOOK: Duration = Duration::from_millis(500);

/// Frames that the rings of a guest hold: usually, and of one that has a small share of a core and
/// stands still for tens of milliseconds when that is used up (the kernel takes it away by ticks of
/// 4 ms).
const QUEUE: u32 = 1024;
const QUEUE_CAPPED: u32 = 16384;

/// What is put up.
#[derive(Clone, Debug)]
pub struct Design {
    /// CPU of the mux.
    pub mux: usize,
    /// CPU of all guests.
    pub guest: usize,
    /// Power of each guest, thousandths of a core.
    pub guests: Vec<u32>,
    /// How frames are shared out.
    pub policy: &'static str,
}

impl Design {
    /// One guest with a core of its own, or half of the mux's.
    pub fn plain(mux: usize, guest: usize) -> Self {
        let power = if mux == guest { 500 } else { 1000 };
        Self { mux, guest, guests: vec![power], policy: "flow" }
    }

    /// The spec of a substrate with these interfaces, lines of YAML.
    pub fn substrate(&self, interfaces: &str) -> String {
        let Self { mux, guest, guests, .. } = self;
        let beside: u32 = if mux == guest { guests.iter().sum() } else { 0 };
        let power = 1000u32.saturating_sub(beside);
        let mut engines = String::new();
        for (number, power) in guests.iter().enumerate() {
            engines += &format!("    fe{number}: {{cpus: \"{guest}\", capacity: {power}m}}\n");
        }
        format!(
            "apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: \"{mux}\", power: {power}m}}
  interfaces:
{interfaces}  forwardingEngines:
{engines}"
        )
    }

    /// The spec of the virtual network.
    pub fn vnet(&self) -> String {
        let power: u32 = self.guests.iter().sum();
        let capped = self.guests.iter().any(|&power| power < 500);
        let queue = if capped { QUEUE_CAPPED } else { QUEUE };
        let (mac_a, mac_b) = (words(MAC_MIDDLE_A), words(MAC_MIDDLE_B));
        let policy = self.policy;
        format!(
            r#"apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: bench}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: "{mac_a}"}}
        eth1: {{addresses: [10.0.2.1/24], mac: "{mac_b}"}}
      resources: {{cpu: 1, memory: 2Gi, routes: 1200000}}
      dataPlane:
        power: {power}m
        memory: 1Gi
        queue: {queue}
        split: true
        distribution: {{policy: {policy}}}
  externals: {{a: {{interface: A}}, b: {{interface: B}}}}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
"#
        )
    }
}

/// A running router.
#[derive(Debug)]
pub struct Pdp {
    /// Processes of the mux and of each guest.
    pub processes: Vec<u32>,
    guests: usize,
}

impl Pdp {
    /// Applies it to a node whose daemon runs, with these interfaces and permanent neighbours.
    pub fn start(node: &Node, design: &Design, interfaces: &str) -> Result<Self> {
        node.apply(&format!("{}---\n{}", design.substrate(interfaces), design.vnet()));
        for (address, mac, device) in [("10.0.1.2", MAC_A, "eth0"), ("10.0.2.2", MAC_B, "eth1")] {
            let mac = words(mac);
            let line =
                format!("ip neigh replace {address} lladdr {mac} dev {device} nud permanent");
            node.exec("bench/r1", &line);
        }
        let substrate = node.json(&["inspect", "substrate"]);
        let mux = substrate["status"]["mux"]["pid"].as_u64().context("the mux's process")?;
        let mut processes = vec![u32::try_from(mux)?];
        for guest in 0..design.guests.len() {
            let cgroup = format!("{}/vnets/bench/r1.g{guest}/guest\n", node.cgroup());
            let mut found = Vec::new();
            eventually("the guest runs", || {
                found = meter::processes("cgroup", &cgroup);
                !found.is_empty()
            });
            processes.extend(found);
        }
        Ok(Self { processes, guests: design.guests.len() })
    }

    /// Gives the router routes, and waits until its guests have them.
    pub fn add_routes(&self, node: &Node, prefixes: &[Prefix]) -> Result<()> {
        let mut batch = node.pdp_command(&["exec", "bench/r1", "--", "ip", "-batch", "-"]);
        let output = pdp_e2e::run(&mut batch, &kernel::routes(prefixes, "eth1"));
        ensure!(output.status.success(), "ip -batch: {}", String::from_utf8_lossy(&output.stderr));
        let end = Instant::now() + TABLE_MAX;
        for guest in (0..self.guests).map(|guest| guest.to_string()) {
            loop {
                let rows = node.try_pdp(&["routes", "bench/r1", "--guest", &guest]);
                let count = rows.as_deref().map_or(0, |rows| rows.lines().count());
                if count > prefixes.len() {
                    break;
                }
                let problem = rows.err().unwrap_or_default();
                ensure!(Instant::now() < end, "{count} routes reached guest {guest} {problem}");
                std::thread::sleep(TABLE_LOOK);
            }
        }
        Ok(())
    }
}

/// The interfaces of a [`crate::site::Site`].
pub const SITE_INTERFACES: &str = "    A: {device: extA}\n    B: {device: extB}\n";
