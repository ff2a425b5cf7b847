//! PdP: virtual networks `bench0`, `bench1`, …, each with a router `r1` between the external
//! interfaces `A0` and `B0`, with its guests in their containers. Several networks, or several
//! ports of one, use these interfaces through tunnels.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pdp_container::cgroup::Cgroups;
use pdp_spec::limits::{FIELD_BYTES_MAX, FIELDS_BYTES_MAX, PUNT_FILTERS_MAX};
use pdp_testbed::{TemporaryNode, enter, eventually, ip_batch, retry};
use pdp_wire::tunnel::Encapsulation;
use pdp_wire::{ether, outer, udp, vxlan};
use rustix::thread::{CpuSet, Pid, sched_setaffinity};

use super::kernel;
use crate::site::{self, MAC_A, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Prefix, stream, words};

/// Longest time for a full table to reach a guest, and the time between two checks.
const TABLE_MAX: Duration = Duration::from_secs(120);
const TABLE_LOOK: Duration = Duration::from_millis(200);

/// Virtual networks applied at once.
const VNETS_AT_ONCE: usize = 64;

/// Frames in the rings of a guest: the usual number, and that of a guest with a small share of a
/// core. The latter is stopped for tens of milliseconds when its quota is used up (the kernel
/// enforces it in ticks of 4 ms).
const QUEUE: u32 = 1024;
const QUEUE_CAPPED: u32 = 16384;
/// Frames in the rings of one guest among many: packets of all of them must fit in the caches.
const QUEUE_MANY: u32 = 512;

/// Encapsulation of frames on an external interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalDriver {
    /// None: the interface has one user, which gets all its frames.
    Plain,
    /// VXLAN over IPv4, with a VNI for each port.
    Vxlan4,
    /// VXLAN over IPv6, with a VNI for each port.
    Vxlan6,
}

impl ExternalDriver {
    /// Bytes of its headers.
    pub fn bytes(self) -> usize {
        let udp = udp::HEADER_BYTES + vxlan::HEADER_BYTES;
        match self {
            Self::Plain => 0,
            Self::Vxlan4 => ether::HEADER_BYTES + outer::IPV4_BYTES + udp,
            Self::Vxlan6 => ether::HEADER_BYTES + outer::IPV6_BYTES + udp,
        }
    }

    /// Endpoints of its tunnels: the node's, and the remote.
    fn ends(self) -> Option<[IpAddr; 2]> {
        match self {
            Self::Plain => None,
            Self::Vxlan4 => Some([[192, 0, 2, 1], [192, 0, 2, 2]].map(IpAddr::from)),
            Self::Vxlan6 => {
                let end = |last| IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last]);
                Some([end(1), end(2)])
            }
        }
    }

    /// External interface in YAML.
    fn external(self, interface: &str, vni: usize) -> String {
        let tunnel = self.ends().map_or(String::new(), |[here, there]| {
            format!(", vxlan: {{local: \"{here}\", remote: \"{there}\", vni: {vni}}}")
        });
        format!("{{interface: {interface}{tunnel}}}")
    }
}

/// Design of a setup.
#[derive(Clone, Debug)]
pub struct Design {
    /// CPU of the mux.
    pub mux: usize,
    /// CPU of all guests.
    pub guest: usize,
    /// Power of each guest of a router, thousandths of a core. Empty if the mux forwards by itself.
    pub guests: Vec<u32>,
    /// If true, guests have no quota and may use idle time of
    /// their CPU: for many guests with little power each.
    pub borrow: bool,
    /// Policy for distributing frames to guests.
    pub policy: &'static str,
    /// Frames in the rings of a guest.
    pub queue: u32,
    /// Number of virtual networks, each with these guests.
    pub vnets: usize,
    /// Egress ports of each router, over `B0`.
    pub ports: usize,
    /// Limits of slow paths' filters and counters, if not the defaults.
    pub slowpath: Option<(u32, u32)>,
    /// Encapsulation on `A0` and on `B0`. If several networks or ports use one of them, tunnels.
    pub carriers: [ExternalDriver; 2],
    /// For networks whose packets the mux itself forwards: guaranteed
    /// power of each, thousandths of a core; 0 for none.
    pub mux_power: u32,
    /// Number of additional networks that the mux forwards for, with the most expensive frames
    /// possible. A generator floods each with the frames of this pcap file ([`write_dear`]).
    pub expensive_vnets: (usize, Option<PathBuf>),
}

/// Offset from which expensive frames are zeros, and their length, bytes.
const DEAR_FROM: usize = 64;
const DEAR_BYTES: usize = DEAR_FROM + FIELDS_BYTES_MAX;

/// Expensive frames per second in total.
const DEAR_PPS: u64 = 1_000_000;

/// Writes the frames that are expensive to classify.
pub fn write_dear(path: &Path) -> Result<()> {
    stream(&site::few(), DEAR_BYTES).write_pcap(path, 64, &[])
}

/// Network with the most filters possible, each of the greatest length. Each differs from an
/// expensive frame in the last byte only.
fn dear_vnet(number: usize) -> String {
    let fields = FIELDS_BYTES_MAX / FIELD_BYTES_MAX;
    let field = |at: usize| {
        let last = if at + 1 == fields { "01" } else { "00" };
        let value = "00".repeat(FIELD_BYTES_MAX - 1) + last;
        format!("{{offset: {}, value: \"{value}\"}}", DEAR_FROM + at * FIELD_BYTES_MAX)
    };
    let fields: Vec<_> = (0..fields).map(field).collect();
    let filter = format!("{{class: exception, match: [{}]}}", fields.join(", "));
    let filters = vec![filter; PUNT_FILTERS_MAX].join(", ");
    format!(
        r#"apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: dear{number}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{addresses: [10.0.1.1/24]}}}}
      resources: {{memory: 64Mi, routes: 1000}}
      dataPlane: {{kind: fastpath, punt: [{filters}]}}
  externals: {{d: {{interface: D{number}}}}}
  links: [{{endpoints: ["r1:eth0", "external:d"]}}]
"#
    )
}

impl Design {
    /// One guest with its own core, or half of the mux's.
    pub fn plain(mux: usize, guest: usize) -> Self {
        let power = if mux == guest { 500 } else { 1000 };
        Self {
            mux,
            guest,
            guests: vec![power],
            borrow: false,
            policy: "flow",
            queue: QUEUE,
            vnets: 1,
            ports: 1,
            slowpath: None,
            carriers: [ExternalDriver::Plain; 2],
            mux_power: 0,
            expensive_vnets: (0, None),
        }
    }

    /// Guests with shares of their own core.
    pub fn capped(mux: usize, guest: usize, guests: &[u32], policy: &'static str) -> Self {
        let guests = guests.to_vec();
        Self { guests, policy, queue: QUEUE_CAPPED, ..Self::plain(mux, guest) }
    }

    /// Networks whose packets the mux itself forwards.
    pub fn fastpath(mux: usize, vnets: usize) -> Self {
        let (many, plain) = (Self::many(mux, mux, vnets), Self::plain(mux, mux));
        let carriers = if vnets > 1 { many.carriers } else { plain.carriers };
        Self { guests: vec![], vnets, carriers, ..plain }
    }

    /// `vnets` virtual networks with equal shares of a core for their guests.
    pub fn many(mux: usize, guest: usize, vnets: usize) -> Self {
        let (guests, carriers) = (vec![(1000 / vnets as u32).max(1)], [ExternalDriver::Vxlan4; 2]);
        let plain = Self::plain(mux, guest);
        Self { guests, borrow: true, queue: QUEUE_MANY, vnets, carriers, ..plain }
    }

    /// Removes the flood of expensive frames.
    pub fn quiet(&self) -> Self {
        Self { expensive_vnets: (self.expensive_vnets.0, None), ..self.clone() }
    }

    /// A router with `ports` egress ports.
    pub fn fanned(mux: usize, guest: usize, ports: usize) -> Self {
        let carriers = [ExternalDriver::Plain, ExternalDriver::Vxlan4];
        Self { ports, carriers, ..Self::plain(mux, guest) }
    }

    /// A router with `guests` guests on one core, without quotas.
    pub fn shared(mux: usize, guest: usize, guests: usize) -> Self {
        let guests = vec![1000 / guests as u32; guests];
        Self { guests, borrow: true, ..Self::plain(mux, guest) }
    }

    /// Tunnels of the frames for the first `vnets` virtual networks.
    pub fn tunnels(&self, vnets: usize) -> Result<Vec<outer::HeaderTemplate>> {
        let Some([here, there]) = self.carriers[0].ends() else { return Ok(Vec::new()) };
        let tunnel = |number: usize| {
            let vni = u32::try_from(number * self.vnets / vnets)?;
            let tunnel = vxlan::VxlanTunnel { local: there, remote: here, port: vxlan::PORT, vni };
            outer::HeaderTemplate::new(&Encapsulation::Vxlan(tunnel)).context("VXLAN")
        };
        (0..vnets).map(tunnel).collect()
    }

    /// Forwarding engines in YAML: one for each guest, or one for all that borrow. Shares are whole
    /// thousandths, so the remainder that does not fit on their CPU is counted to both CPUs.
    /// [`Pdp::start`] keeps it off the mux's.
    fn engines(&self) -> String {
        let Self { mux, guest, guests, .. } = self;
        let engine = |name: &str, cpus: &str, power: u32| {
            format!("    {name}: {{cpus: \"{cpus}\", capacity: {power}m}}\n")
        };
        let (power, guest) = (self.power(), guest.to_string());
        match power.saturating_sub(1000) {
            // At least one engine is required.
            _ if guests.is_empty() => engine("fe0", &guest, 1),
            _ if !self.borrow => {
                let each = guests.iter().enumerate();
                each.map(|(number, power)| engine(&format!("fe{number}"), &guest, *power)).collect()
            }
            0 => engine("fe0", &guest, power),
            beside => {
                engine("fe0", &guest, 1000) + &engine("fe1", &format!("{guest},{mux}"), beside)
            }
        }
    }

    /// Power of all guests.
    fn power(&self) -> u32 {
        self.guests.iter().sum::<u32>() * self.vnets as u32
    }

    /// Spec of a substrate with these interfaces, given as lines of YAML.
    pub fn substrate(&self, interfaces: &str) -> String {
        let Self { mux, guest, .. } = self;
        let power = self.power().max(1);
        let beside = if mux == guest { power } else { power.saturating_sub(1000) };
        let power = 1000u32.saturating_sub(beside);
        let engines = self.engines();
        let (dear, frames) = &self.expensive_vnets;
        let frames = frames.as_ref().map_or(String::new(), |it| {
            format!("frames: {}, pps: {}", it.display(), DEAR_PPS / (*dear).max(1) as u64)
        });
        let dear = (0..*dear).map(|at| format!("    D{at}: {{generator: {{{frames}}}}}\n"));
        let dear: String = dear.collect();
        format!(
            "apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: \"{mux}\", power: {power}m}}
  interfaces:
{interfaces}{dear}  forwardingEngines:
{engines}"
        )
    }

    /// Spec of a virtual network.
    fn vnet(&self, number: usize) -> String {
        let Self { policy, queue, borrow, ports, carriers: [carrier_a, carrier_b], .. } = self;
        let (power, mac_a) = (self.guests.iter().sum::<u32>(), words(MAC_MIDDLE_A));
        let external_a = carrier_a.external("A0", number);
        let (mut interfaces, mut externals, mut links) =
            (String::new(), String::new(), String::new());
        for OutputPort { number: port, device, address, mac, .. } in self.ports() {
            let external = carrier_b.external("B0", number * ports + port);
            interfaces +=
                &format!("        {device}: {{addresses: [{address}/24], mac: \"{mac}\"}}\n");
            externals += &format!("    b{port}: {external}\n");
            links += &format!("    - endpoints: [\"r1:{device}\", \"external:b{port}\"]\n");
        }
        let (resources, memory) = if *borrow || self.vnets > 1 {
            ("{memory: 64Mi, routes: 1000}", "32Mi")
        } else {
            ("{cpu: 1, memory: 2Gi, routes: 1200000}", "1Gi")
        };
        let guests = if *borrow {
            format!("\n        guests: {}", self.guests.len())
        } else {
            String::new()
        };
        let plane = match self.guests.is_empty() {
            true => {
                let power = match self.mux_power {
                    0 => String::new(),
                    power => format!("\n        power: {power}m"),
                };
                let slowpath = self.slowpath.map(|(filters, counters)| {
                    format!("\n        filters: {filters}\n        counters: {counters}")
                });
                format!("        kind: fastpath{power}{}", slowpath.unwrap_or_default())
            }
            false => format!(
                "        power: {power}m
        borrow: {borrow}{guests}
        memory: {memory}
        queue: {queue}
        split: true
        distribution: {{policy: {policy}}}"
            ),
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
{interfaces}      resources: {resources}
      dataPlane:
{plane}
  externals:
    a: {external_a}
{externals}  links:
    - endpoints: ["r1:eth0", "external:a"]
{links}"#
        )
    }

    /// The egress ports.
    fn ports(&self) -> impl Iterator<Item = OutputPort> {
        (0..self.ports).map(|number| {
            let mut mac = MAC_MIDDLE_B;
            mac[4] += number as u8;
            OutputPort {
                number,
                device: format!("eth{}", number + 1),
                address: format!("10.0.{}.1", number + 2),
                neighbour: format!("10.0.{}.2", number + 2),
                mac: words(mac),
            }
        })
    }
}

/// Egress port.
struct OutputPort {
    number: usize,
    device: String,
    address: String,
    /// The neighbour behind it.
    neighbour: String,
    mac: String,
}

/// Running setup.
#[derive(Debug)]
pub struct Pdp {
    /// Processes of the mux and of each guest.
    pub processes: Vec<u32>,
    cgroups: Cgroups,
    design: Design,
}

impl Pdp {
    /// Applies the design to a node with a running daemon,
    /// with these interfaces and permanent neighbours.
    pub fn start(node: &TemporaryNode, design: &Design, interfaces: &str) -> Result<Self> {
        let vnets = (0..design.vnets).map(|vnet| design.vnet(vnet));
        let vnets: Vec<String> =
            vnets.chain((0..design.expensive_vnets.0).map(dear_vnet)).collect();
        node.apply(&design.quiet().substrate(interfaces));
        for some in vnets.chunks(VNETS_AT_ONCE) {
            node.apply(&some.join("---\n"));
        }
        let neighbour = |address: &str, mac, device: &str| {
            format!("neigh replace {address} lladdr {} dev {device} nud permanent\n", words(mac))
        };
        let mut neighbours = neighbour("10.0.1.2", MAC_A, "eth0");
        neighbours.extend(design.ports().map(|p| neighbour(&p.neighbour, MAC_B, &p.device)));
        let cgroups = Cgroups::new(&node.cgroup())?;
        for vnet in 0..design.vnets {
            batch(&cgroups, &format!("bench{vnet}"), &neighbours)?;
        }
        let substrate = node.json(&["inspect", "substrate"]);
        let mux = substrate["status"]["mux"]["pid"].as_u64().context("the mux's process")?;
        let mut processes = vec![u32::try_from(mux)?];
        for cgroup in guest_cgroups(design) {
            let mut found = Vec::new();
            eventually("the guest runs", || {
                found = cgroups.processes(&format!("{cgroup}/guest")).unwrap_or_default();
                !found.is_empty()
            });
            processes.extend(found);
        }
        if design.power() > 1000 {
            processes[1..].iter().try_for_each(|guest| keep_on(design.guest, *guest))?;
        }
        Ok(Self { processes, cgroups, design: design.clone() })
    }

    /// CPU time of each guest so far, seconds.
    pub fn guests_cpu_seconds(&self) -> Result<Vec<f64>> {
        let seconds = |cgroup: String| Ok(self.cgroups.usage(&cgroup)?.cpu_ns as f64 / 1e9);
        guest_cgroups(&self.design).map(seconds).collect()
    }

    /// Adds routes to the routers, and waits until their guests have them.
    pub fn add_routes(&self, node: &TemporaryNode, prefixes: &[Prefix]) -> Result<()> {
        let hops: Vec<_> = self.design.ports().map(|port| (port.neighbour, port.device)).collect();
        // Guests receive theirs while the next network's are added.
        for vnet in 0..self.design.vnets {
            for some in prefixes.chunks(kernel::ROUTES_AT_ONCE) {
                batch(&self.cgroups, &format!("bench{vnet}"), &kernel::routes(some, &hops))?;
            }
        }
        for vnet in 0..self.design.vnets {
            let router = format!("bench{vnet}/r1");
            // The mux's own routes are those of guest 0.
            for guest in (0..self.design.guests.len().max(1)).map(|guest| guest.to_string()) {
                retry(TABLE_MAX, TABLE_LOOK, &router, || {
                    let rows = node.try_pdp(&["routes", &router, "--guest", &guest])?;
                    let count = rows.lines().count();
                    ensure!(count > prefixes.len(), "{count} routes reached guest {guest}");
                    Ok(())
                })?;
            }
        }
        Ok(())
    }
}

/// Cgroups of the guests, grouped by virtual network.
fn guest_cgroups(design: &Design) -> impl Iterator<Item = String> {
    let guests = design.guests.len();
    let of = move |vnet| (0..guests).map(move |guest| format!("vnets/_bench{vnet}/_r1.g{guest}"));
    (0..design.vnets).flat_map(of)
}

/// Pins all threads of a process to one CPU.
pub fn keep_on(cpu: usize, process: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let number = thread?.file_name().to_str().and_then(|name| name.parse().ok());
        let thread = number.and_then(Pid::from_raw).context("a thread's number")?;
        sched_setaffinity(Some(thread), &set)?;
    }
    Ok(())
}

/// Runs `ip -batch` with these lines in the network namespace of a virtual network's `r1`. `pdp
/// exec` would start a process in the container for it.
pub fn batch(cgroups: &Cgroups, vnet: &str, lines: &str) -> Result<()> {
    let router = cgroups.processes(&format!("vnets/_{vnet}/_r1/guest"))?;
    let router = router.first().with_context(|| format!("{vnet}/r1 does not run"))?;
    Ok(ip_batch(enter(&format!("/proc/{router}/ns/net"), "ip"), lines)?)
}

/// The interfaces of a [`crate::site::Site`], attached in this mode.
pub fn site_interfaces(attach: &str) -> String {
    let interface = |side| format!("    {side}0: {{device: ext{side}, attach: {attach}}}\n");
    ["A", "B"].map(interface).concat()
}
