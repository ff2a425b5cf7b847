//! PdP at a site: a router between the two external interfaces, its guests in their containers.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pdp_e2e::{Node, eventually, meter};

use super::kernel;
use crate::site::{MAC_A, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Prefix, Site, words};

/// Time that a full table gets on its way to a guest, and how often it is looked for.
const TABLE_MAX: Duration = Duration::from_secs(120);
const TABLE_LOOK: Duration = Duration::from_millis(500);

/// The CPUs of the mux and of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Of the mux.
    pub mux: usize,
    /// Of the guest.
    pub guest: usize,
}

impl Placement {
    /// Power of the guest, thousandths of a core.
    fn millicores(self) -> u32 {
        if self.mux == self.guest { 500 } else { 1000 }
    }
}

/// A running router.
#[derive(Debug)]
pub struct Pdp {
    /// Processes of mux and guest.
    pub processes: Vec<u32>,
}

impl Pdp {
    /// Starts daemon, mux and a router with one guest in the site's node.
    pub fn start(site: &mut Site, placement: Placement) -> Self {
        site.node.start_pdpd();
        site.node.apply(&spec(placement));
        let node = &site.node;
        for (address, mac, device) in [("10.0.1.2", MAC_A, "eth0"), ("10.0.2.2", MAC_B, "eth1")] {
            let mac = words(mac);
            let line =
                format!("ip neigh replace {address} lladdr {mac} dev {device} nud permanent");
            node.exec("bench/r1", &line);
        }
        let substrate = node.json(&["inspect", "substrate"]);
        let mux = substrate["status"]["mux"]["pid"].as_u64().unwrap_or_default();
        let mut processes = vec![mux as u32];
        let cgroup = format!("{}/vnets/bench/r1.g0/guest\n", node.cgroup());
        eventually("the guest runs", || {
            processes.truncate(1);
            processes.extend(meter::processes("cgroup", &cgroup));
            processes.len() > 1
        });
        Self { processes }
    }

    /// Gives the router routes, and waits until its guest has them.
    pub fn add_routes(&self, site: &Site, prefixes: &[Prefix]) -> Result<()> {
        let mut batch = site.node.pdp_command(&["exec", "bench/r1", "--", "ip", "-batch", "-"]);
        let output = pdp_e2e::run(&mut batch, &kernel::routes(prefixes, "eth1"));
        ensure!(output.status.success(), "ip -batch: {}", String::from_utf8_lossy(&output.stderr));
        wait_for_routes(&site.node, 0, prefixes.len())
    }
}

/// Waits until a guest of router `bench/r1` has so many routes.
pub fn wait_for_routes(node: &Node, guest: usize, wanted: usize) -> Result<()> {
    let end = Instant::now() + TABLE_MAX;
    loop {
        let rows = node.try_pdp(&["routes", "bench/r1", "--guest", &guest.to_string()]);
        let count = rows.as_deref().map_or(0, |rows| rows.lines().count());
        if count > wanted {
            return Ok(());
        }
        let problem = rows.err().unwrap_or_default();
        ensure!(Instant::now() < end, "{count} routes of {wanted} reached the guest {problem}");
        std::thread::sleep(TABLE_LOOK);
    }
}

fn spec(placement: Placement) -> String {
    let Placement { mux, guest } = placement;
    let millicores = placement.millicores();
    let (mac_a, mac_b) = (words(MAC_MIDDLE_A), words(MAC_MIDDLE_B));
    format!(
        r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {{name: node}}
spec:
  mux: {{cpus: "{mux}", power: {millicores}m}}
  interfaces: {{A: {{device: extA}}, B: {{device: extB}}}}
  forwardingEngines: {{fe0: {{cpus: "{guest}", capacity: {millicores}m}}}}
---
apiVersion: pdp/v1
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
      dataPlane: {{power: {millicores}m, memory: 1Gi}}
  externals: {{a: {{interface: A}}, b: {{interface: B}}}}
  links:
    - endpoints: ["r1:eth0", "external:a"]
    - endpoints: ["r1:eth1", "external:b"]
"#
    )
}
