//! Figure 9: output against input, by payload. Measures the mux's fast
//! path, the `parallel` router, the kernel, and a guest whose program
//! forwards datagrams between two sockets, like Click in a vServer.
//!
//! All forward on the first core, between two veth devices; generator
//! and sink use the last core. In addition, fast path and router are
//! measured with source and sink inside the mux, without devices.

use anyhow::{Context, Result};
use pdp_container::cgroup::Cgroups;
use pdp_testbed::meter::Clock;
use pdp_testbed::{bin, eventually};

use crate::bed::ForwardingTestbed;
use crate::live::Load;
use crate::peers::kernel;
use crate::peers::pdp::{Design, Pdp, batch, site_interfaces};
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Prefix, Site, words};
use crate::stream::HEADERS_BYTES;

/// Measured payloads of UDP over IPv4, bytes. With the smallest, frames have the length of the
/// other experiments' frames.
const PAYLOADS: [usize; 3] = [22, 400, 1400];
const PAYLOADS_QUICK: [usize; 2] = [22, 400];

/// Ethernet's overhead besides a frame's own bytes: preamble, checksum, and gap.
const WIRE_BYTES: usize = 24;

/// Input, thousand frames per second.
const INPUTS_KPPS: [u32; 7] = [25, 50, 100, 200, 400, 800, 1600];
const INPUTS_QUICK_KPPS: [u32; 2] = [50, 800];

/// Smallest fraction of an input that must be generated, for a point in a plot.
const MADE_MIN: f64 = 0.9;

const HIGHEST: &str = "figure 9: highest throughput";
const HIGHEST_KPPS: &str = "figure 9: most frames";

/// Address where the forwarder in the guest receives datagrams, and where it sends them.
const FORWARDER: [&str; 2] = ["10.0.1.1:9", "10.0.2.2:9"];

/// Name of each payload's throughput.
fn throughput(payload: usize) -> &'static str {
    match payload {
        22 => "figure 9: throughput, 22 bytes",
        400 => "figure 9: throughput, 400 bytes",
        _ => "figure 9: throughput, 1400 bytes",
    }
}

/// Megabits per second on the wire of frames with this payload.
fn mbps(pps: f64, payload: usize) -> f64 {
    pps * ((HEADERS_BYTES + payload + WIRE_BYTES) * 8) as f64 / 1e6
}

struct RateContender {
    series: &'static str,
    site: Site,
    /// Destinations of its frames.
    prefixes: Vec<Prefix>,
    /// PdP's processes.
    processes: Vec<u32>,
    is_kernel: bool,
}

/// A series and the function that starts its forwarder at a site. It returns the frames'
/// destinations and the processes.
type RateSetup<'a> = (&'static str, &'a dyn Fn(&mut Site) -> Result<(Vec<Prefix>, Vec<u32>)>);

fn pdp(site: &mut Site, design: &Design) -> Result<(Vec<Prefix>, Vec<u32>)> {
    site.node.start_pdpd();
    let pdp = Pdp::start(&site.node, design, &site_interfaces("af-xdp"))?;
    pdp.add_routes(&site.node, &site::few())?;
    Ok((site::few(), pdp.processes))
}

/// Host of a virtual network whose program forwards, on the first core like the mux.
fn forwarder(site: &mut Site, core: usize) -> Result<(Vec<Prefix>, Vec<u32>)> {
    site.node.start_pdpd();
    let hosts = format!("  managementHost: {{cpus: \"{core}\"}}\n");
    let substrate = Design::fastpath(core, 1).substrate(&site_interfaces("af-xdp")) + &hosts;
    let (program, [from, to]) = (bin("pdp-bench").canonicalize()?, FORWARDER);
    let (mac_a, mac_b) = (words(MAC_MIDDLE_A), words(MAC_MIDDLE_B));
    site.node.apply(&format!(
        "{substrate}---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: udp}}
spec:
  nodes:
    r1:
      kind: host
      interfaces:
        eth0: {{addresses: [10.0.1.1/24], mac: \"{mac_a}\"}}
        eth1: {{addresses: [10.0.2.1/24], mac: \"{mac_b}\"}}
      resources: {{cpu: 1}}
      binds: [\"{}:/opt/pdp-bench:ro\"]
      commands: [{{run: [/opt/pdp-bench, forward-udp, \"{from}\", \"{to}\"]}}]
  externals: {{a: {{interface: A0}}, b: {{interface: B0}}}}
  links:
    - {{endpoints: [\"r1:eth0\", \"external:a\"]}}
    - {{endpoints: [\"r1:eth1\", \"external:b\"]}}
",
        program.display()
    ));
    site.node.pdp(&["wait", "udp", "--for", "ready", "--timeout", "60s"]);
    let neighbour =
        format!("neigh replace 10.0.2.2 lladdr {} dev eth1 nud permanent\n", words(MAC_B));
    let cgroups = Cgroups::new(&site.node.cgroup())?;
    batch(&cgroups, "udp", &neighbour)?;
    eventually("the forwarder listens", || {
        site.node.try_exec("udp/r1", "ss -lun").is_ok_and(|sockets| sockets.contains(from))
    });
    let mut processes = cgroups.processes("vnets/_udp/_r1/guest")?;
    let mux = site.node.json(&["inspect", "substrate"])["status"]["mux"]["pid"].as_u64();
    processes.push(u32::try_from(mux.context("the mux's process")?)?);
    Ok(([([10, 0, 1, 1], 32)].into(), processes))
}

pub(super) fn figure(run: &mut ExperimentRun) -> Result<()> {
    let [core, generator_core] = run.cores();
    let clock = Clock::of_this_machine();
    let makers: [RateSetup<'_>; 4] = [
        ("pdp, fast path", &|site| pdp(site, &Design::fastpath(core, 1))),
        ("pdp, router guest", &|site| pdp(site, &Design::plain(core, core))),
        ("kernel", &|site| {
            kernel::start(site);
            kernel::add_routes(site, &site::few())?;
            Ok((site::few(), Vec::new()))
        }),
        ("UDP forwarder in a guest", &|site| forwarder(site, core)),
    ];
    let payloads = if run.quick() { &PAYLOADS_QUICK[..] } else { &PAYLOADS };
    let mut contenders = Vec::new();
    for (series, make) in makers {
        contenders.extend(run.attempt(series, |_| {
            let mut site = Site::make("rates");
            let (prefixes, processes) = make(&mut site)?;
            let is_kernel = processes.is_empty();
            Ok(RateContender { series, site, prefixes, processes, is_kernel })
        }));
    }
    for payload in payloads {
        for contender in &mut contenders {
            let bytes = HEADERS_BYTES + payload;
            contender.site.aim(&contender.prefixes, bytes, generator_core)?;
        }
        run.rounds(|run| {
            for contender in &contenders {
                veth(run, contender, *payload, core, &clock);
            }
            Ok(())
        })?;
    }
    drop(contenders);
    for payload in payloads {
        let start =
            |design| ForwardingTestbed::start(design, &site::few(), HEADERS_BYTES + payload);
        let fast = run.attempt("fast path", |_| start(Design::fastpath(core, 1)));
        let guest = run.attempt("router guest", |_| start(Design::plain(core, core)));
        let (Some(fast), Some(guest)) = (fast, guest) else { continue };
        let beds = [
            ("pdp, fast path, source and sink in the mux", fast),
            ("pdp, router guest, source and sink in the mux", guest),
        ];
        let time = run.time() / 4;
        run.rounds(|run| {
            for (series, bed) in &beds {
                run.take(series, *payload as f64, "bytes of payload", || {
                    let passed = bed.offer(0, time, &clock)?;
                    Ok(highest(passed.rate_pps, *payload, Some(passed.cycles)))
                });
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Measures all inputs, and the highest throughput among them.
fn veth(
    run: &mut ExperimentRun,
    contender: &RateContender,
    payload: usize,
    core: usize,
    clock: &Clock,
) {
    let inputs = if run.quick() { &INPUTS_QUICK_KPPS[..] } else { &INPUTS_KPPS };
    let (time, mut most_pps) = (run.time() / 5, 0.0f64);
    for kpps in inputs {
        let pps = f64::from(*kpps) * 1e3;
        let offer = || {
            let threads = match contender.is_kernel {
                true => kernel::set_own_core(&contender.site.node.namespace(), Some(core)),
                false => contender.processes.clone(),
            };
            let passed = contender.site.offer(Load::Even(pps), time, &threads, clock)?;
            let of = |what| passed.iter().find(|it| it.what() == what).map(Reading::value);
            let rate = |what| of(what).map(|mpps| mpps * 1e6).context("a rate");
            let (made, passed_pps) = (rate("offered")?, rate("rate")?);
            Ok((made >= MADE_MIN * pps).then_some(passed_pps))
        };
        let x = mbps(pps, payload).round();
        run.take_as(contender.series, x, "Mb/s offered", offer, |passed_pps| {
            most_pps = most_pps.max(passed_pps.unwrap_or(0.0));
            let reading =
                |passed_pps| Reading::new(throughput(payload), mbps(passed_pps, payload), "Mb/s");
            passed_pps.map(reading).into_iter().collect()
        });
    }
    if most_pps > 0.0 {
        run.take(contender.series, payload as f64, "bytes of payload", || {
            Ok(highest(most_pps, payload, None))
        });
    }
}

fn highest(pps: f64, payload: usize, cycles: Option<f64>) -> Vec<Reading> {
    let rate = Reading::new(HIGHEST_KPPS, pps / 1e3, "kpps");
    let rate = match cycles {
        Some(cycles) => rate.cycles(cycles),
        None => rate,
    };
    vec![Reading::new(HIGHEST, mbps(pps, payload), "Mb/s"), rate]
}
