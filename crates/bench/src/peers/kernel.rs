//! The kernel's own forwarding.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use anyhow::Result;
use pdp_testbed::{TestMachine, ip_batch, meter};

use crate::site::{MAC_A, MAC_B, Prefix, Site, words};

/// Routes for one `ip -batch`, which keeps kilobytes of each until it ends.
pub const ROUTES_AT_ONCE: usize = 50_000;

/// Routes for `ip -batch`, with these next hops in turn, each a neighbour and its device.
pub fn routes(prefixes: &[Prefix], hops: &[(String, String)]) -> String {
    let mut text = String::new();
    for ((address, length), (neighbour, device)) in prefixes.iter().zip(hops.iter().cycle()) {
        let address = Ipv4Addr::from(*address);
        // Writing to a String always succeeds.
        let _ = writeln!(text, "route replace {address}/{length} via {neighbour} dev {device}");
    }
    text
}

/// Enables forwarding in the site's node.
pub fn start(site: &Site) {
    site.node.namespace().run(&format!(
        "sysctl -qw net.ipv4.ip_forward=1
         ip addr add 10.0.1.1/24 dev extA
         ip addr add 10.0.2.1/24 dev extB
         ip neigh replace 10.0.1.2 lladdr {} dev extA nud permanent
         ip neigh replace 10.0.2.2 lladdr {} dev extB nud permanent",
        words(MAC_A),
        words(MAC_B)
    ));
}

/// Adds routes to the node.
pub fn add_routes(site: &Site, prefixes: &[Prefix]) -> Result<()> {
    let hops = [("10.0.2.2".to_owned(), "extB".to_owned())];
    for some in prefixes.chunks(ROUTES_AT_ONCE) {
        ip_batch(site.node.namespace().command("ip"), &routes(some, &hops))?;
    }
    Ok(())
}

/// Makes the node forward in its own threads on one CPU, or
/// in interrupts of the sender's CPU. Returns the threads.
pub fn set_own_core(middle: &TestMachine, cpu: Option<usize>) -> Vec<u32> {
    let on = u8::from(cpu.is_some());
    middle.run(&format!("echo {on} > /sys/class/net/extA/threaded"));
    let Some(cpu) = cpu else { return Vec::new() };
    let threads = meter::processes("comm", "napi/extA-");
    for thread in &threads {
        pdp_testbed::sh(&format!("taskset -pc {cpu} {thread}"));
    }
    threads
}
