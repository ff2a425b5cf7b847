//! PdP: virtual networks `bench0`, `bench1`, …, each with a router `r1` between the external
//! interfaces `A0` and `B0`, its guests in their containers. Several share these by tunnels.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_container::cgroup::Cgroups;
use pdp_e2e::{Node, eventually};
use pdp_wire::{ether, outer, udp, vxlan};

use super::kernel;
use crate::site::{MAC_A, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Prefix, words};

/// Time that a full table gets on its way to a guest, and how often it is looked for.
const TABLE_MAX: Duration = Duration::from_secs(120);
const TABLE_LOOK: Duration = Duration::from_millis(200);

/// Virtual networks that are applied in one go.
const VNETS_AT_ONCE: usize = 64;

/// Frames that the rings of a guest hold: usually, and of one that has a small share of a core and
/// stands still for tens of milliseconds when that is used up (the kernel takes it away by ticks of
/// 4 ms).
const QUEUE: u32 = 1024;
const QUEUE_CAPPED: u32 = 16384;
/// Of one among many: packets of all of them together are in the caches, or not.
const QUEUE_MANY: u32 = 256;

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
    /// Frames that the rings of a guest hold.
    pub queue: u32,
    /// Virtual networks, each with so many guests.
    pub vnets: usize,
    /// Whether each has a VXLAN tunnel on both external interfaces; else the only one has all of
    /// them.
    pub tunnels: bool,
}

/// Bytes of the headers of a tunnel.
pub const TUNNEL_BYTES: usize =
    ether::HEADER_BYTES + outer::IPV4_BYTES + udp::HEADER_BYTES + vxlan::HEADER_BYTES;

/// Ends of the tunnels: the node's, and the other one.
const TUNNEL_ENDS: [[u8; 4]; 2] = [[192, 0, 2, 1], [192, 0, 2, 2]];
/// UDP ports of frames that come: of who sends them, and VXLAN's.
const TUNNEL_PORTS: [u16; 2] = [50_000, 4789];

impl Design {
    /// One guest with a core of its own, or half of the mux's.
    pub fn plain(mux: usize, guest: usize) -> Self {
        let power = if mux == guest { 500 } else { 1000 };
        let guests = vec![power];
        Self { mux, guest, guests, policy: "flow", queue: QUEUE, vnets: 1, tunnels: false }
    }

    /// Guests with shares of a core of their own.
    pub fn capped(mux: usize, guest: usize, guests: &[u32], policy: &'static str) -> Self {
        let guests = guests.to_vec();
        Self { guests, policy, queue: QUEUE_CAPPED, ..Self::plain(mux, guest) }
    }

    /// So many virtual networks with equal shares of a core for their guests. What does not fit
    /// there for shares being whole thousandths is on the mux's.
    pub fn many(mux: usize, guest: usize, vnets: usize) -> Self {
        let power = (1000 / vnets as u32).max(1);
        let plain = Self::plain(mux, guest);
        Self { guests: vec![power], queue: QUEUE_MANY, vnets, tunnels: true, ..plain }
    }

    /// The tunnels of the virtual networks, as frames come.
    pub fn tunnels(&self) -> Result<Vec<outer::Template>> {
        let [here, there] = TUNNEL_ENDS.map(IpAddr::from);
        let count = if self.tunnels { self.vnets as u32 } else { 0 };
        let tunnel = |vni| {
            outer::Template::new(there, here, TUNNEL_PORTS, &vxlan::emit(vni)).context("VXLAN")
        };
        (0..count).map(tunnel).collect()
    }

    /// How the virtual network with this number has its externals, in YAML.
    fn externals(&self, number: usize) -> String {
        let [here, there] = TUNNEL_ENDS.map(IpAddr::from);
        let tunnel = if self.tunnels {
            format!(", vxlan: {{local: {here}, remote: {there}, vni: {number}}}")
        } else {
            String::new()
        };
        format!("{{a: {{interface: A0{tunnel}}}, b: {{interface: B0{tunnel}}}}}")
    }

    /// Forwarding engines in YAML: one for each guest where there are few.
    fn engines(&self) -> String {
        let Self { mux, guest, guests, .. } = self;
        let engine = |name: &str, cpu: &usize, power: u32| {
            format!("    {name}: {{cpus: \"{cpu}\", capacity: {power}m}}\n")
        };
        let power = self.power();
        match power.saturating_sub(1000) {
            _ if !self.tunnels => {
                let each = guests.iter().enumerate();
                each.map(|(number, power)| engine(&format!("fe{number}"), guest, *power)).collect()
            }
            0 => engine("fe0", guest, power),
            beside => engine("fe0", guest, 1000) + &engine("fe1", mux, beside),
        }
    }

    /// Power of all guests.
    fn power(&self) -> u32 {
        self.guests.iter().sum::<u32>() * self.vnets as u32
    }

    /// The spec of a substrate with these interfaces, lines of YAML.
    pub fn substrate(&self, interfaces: &str) -> String {
        let Self { mux, guest, .. } = self;
        let beside = if mux == guest { self.power() } else { self.power().saturating_sub(1000) };
        let power = 1000u32.saturating_sub(beside);
        let engines = self.engines();
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

    /// The spec of a virtual network.
    fn vnet(&self, number: usize) -> String {
        let power: u32 = self.guests.iter().sum();
        let (mac_a, mac_b) = (words(MAC_MIDDLE_A), words(MAC_MIDDLE_B));
        let Self { policy, queue, tunnels: borrow, .. } = self;
        let externals = self.externals(number);
        let (resources, memory) = if self.tunnels {
            ("{memory: 64Mi, routes: 1000}", "32Mi")
        } else {
            ("{cpu: 1, memory: 2Gi, routes: 1200000}", "1Gi")
        };
        format!(
            r#"apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: bench{number}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: "{mac_a}"}}
        eth1: {{addresses: [10.0.2.1/24], mac: "{mac_b}"}}
      resources: {resources}
      dataPlane:
        power: {power}m
        borrow: {borrow}
        memory: {memory}
        queue: {queue}
        split: true
        distribution: {{policy: {policy}}}
  externals: {externals}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
"#
        )
    }
}

/// What runs.
#[derive(Debug)]
pub struct Pdp {
    /// Processes of the mux and of each guest.
    pub processes: Vec<u32>,
    cgroups: Cgroups,
    guests: usize,
    vnets: usize,
}

impl Pdp {
    /// Applies it to a node whose daemon runs, with these interfaces and permanent neighbours.
    pub fn start(node: &Node, design: &Design, interfaces: &str) -> Result<Self> {
        let vnets: Vec<String> = (0..design.vnets).map(|vnet| design.vnet(vnet)).collect();
        node.apply(&design.substrate(interfaces));
        for some in vnets.chunks(VNETS_AT_ONCE) {
            node.apply(&some.join("---\n"));
        }
        let neighbours = format!(
            "neigh replace 10.0.1.2 lladdr {} dev eth0 nud permanent
             neigh replace 10.0.2.2 lladdr {} dev eth1 nud permanent\n",
            words(MAC_A),
            words(MAC_B)
        );
        for vnet in 0..design.vnets {
            batch(node, vnet, &neighbours)?;
        }
        let substrate = node.json(&["inspect", "substrate"]);
        let mux = substrate["status"]["mux"]["pid"].as_u64().context("the mux's process")?;
        let mut processes = vec![u32::try_from(mux)?];
        let (guests, vnets) = (design.guests.len(), design.vnets);
        let cgroups = Cgroups::new(&node.cgroup())?;
        for cgroup in guest_cgroups(vnets, guests) {
            let mut found = Vec::new();
            eventually("the guest runs", || {
                found = cgroups.processes(&format!("{cgroup}/guest")).unwrap_or_default();
                !found.is_empty()
            });
            processes.extend(found);
        }
        Ok(Self { processes, cgroups, guests, vnets })
    }

    /// CPU time that each guest used so far, seconds.
    pub fn guests_cpu_seconds(&self) -> Result<Vec<f64>> {
        let seconds = |cgroup: String| Ok(self.cgroups.usage(&cgroup)?.cpu_ns as f64 / 1e9);
        guest_cgroups(self.vnets, self.guests).map(seconds).collect()
    }

    /// Gives the routers routes, and waits until their guests have them.
    pub fn add_routes(&self, node: &Node, prefixes: &[Prefix]) -> Result<()> {
        for vnet in 0..self.vnets {
            let end = Instant::now() + TABLE_MAX;
            for some in prefixes.chunks(kernel::ROUTES_AT_ONCE) {
                batch(node, vnet, &kernel::routes(some, "eth1"))?;
            }
            for guest in (0..self.guests).map(|guest| guest.to_string()) {
                loop {
                    let router = format!("bench{vnet}/r1");
                    let rows = node.try_pdp(&["routes", &router, "--guest", &guest]);
                    let count = rows.as_deref().map_or(0, |rows| rows.lines().count());
                    if count > prefixes.len() {
                        break;
                    }
                    let problem = rows.err().unwrap_or_default();
                    ensure!(Instant::now() < end, "{count} routes reached {router} {problem}");
                    std::thread::sleep(TABLE_LOOK);
                }
            }
        }
        Ok(())
    }
}

/// Cgroups of the guests, those of a virtual network after each other.
fn guest_cgroups(vnets: usize, guests: usize) -> impl Iterator<Item = String> {
    let of = move |vnet| (0..guests).map(move |guest| format!("vnets/bench{vnet}/r1.g{guest}"));
    (0..vnets).flat_map(of)
}

/// Gives `ip -batch` in a router these lines.
fn batch(node: &Node, vnet: usize, lines: &str) -> Result<()> {
    let router = format!("bench{vnet}/r1");
    let mut command = node.pdp_command(&["exec", &router, "--", "ip", "-batch", "-"]);
    let output = pdp_e2e::run(&mut command, lines);
    let (errors, status) = (String::from_utf8_lossy(&output.stderr), output.status);
    ensure!(status.success(), "ip -batch in {router}: {status} {errors}");
    Ok(())
}

/// The interfaces of a [`crate::site::Site`].
pub const SITE_INTERFACES: &str = "    A0: {device: extA}\n    B0: {device: extB}\n";
