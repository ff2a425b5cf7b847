//! Figure 9: what comes out of what goes in, by payload: the mux's fast path, the `parallel` router, the kernel, and a
//! guest whose program takes datagrams at a socket and sends them on by another, as Click in a vServer does.
//!
//! All forward on the first core, between two veth devices; the generator and the sink have the last. Beside that,
//! fast path and router with source and sink inside the mux, where no device is in the way.

use anyhow::{Context, Result};
use pdp_container::cgroup::Cgroups;
use pdp_e2e::meter::Clock;
use pdp_e2e::{bin, eventually};

use crate::bed::Bed;
use crate::live::Load;
use crate::peers::kernel;
use crate::peers::pdp::{Design, Pdp, batch, site_interfaces};
use crate::run::{Reading, Run};
use crate::site::{self, MAC_B, MAC_MIDDLE_A, MAC_MIDDLE_B, Prefix, Site, words};
use crate::stream::HEADERS_BYTES;

/// Payloads of UDP in IPv4 that are measured, bytes. With the least, frames are as long as those of other experiments.
const PAYLOADS: [usize; 3] = [22, 400, 1400];
const PAYLOADS_QUICK: [usize; 2] = [22, 400];

/// What Ethernet takes beside a frame's own bytes: preamble, checksum, and the gap.
const WIRE_BYTES: usize = 24;

/// Input, thousand frames a second.
const INPUTS_KPPS: [u32; 7] = [25, 50, 100, 200, 400, 800, 1600];
const INPUTS_QUICK_KPPS: [u32; 2] = [50, 800];

/// An input of which less than this part could be made is no point of a plot.
const MADE_MIN: f64 = 0.9;

const HIGHEST: &str = "figure 9: highest throughput";
const HIGHEST_KPPS: &str = "figure 9: most frames";

/// Where the forwarder in the guest takes datagrams, and where it sends them.
const FORWARDER: [&str; 2] = ["10.0.1.1:9", "10.0.2.2:9"];

/// What each payload's throughput is called.
fn throughput(payload: usize) -> &'static str {
    match payload {
        22 => "figure 9: throughput, 22 bytes",
        400 => "figure 9: throughput, 400 bytes",
        _ => "figure 9: throughput, 1400 bytes",
    }
}

/// Megabits a second on the wire of frames with this payload.
fn mbps(pps: f64, payload: usize) -> f64 {
    pps * ((HEADERS_BYTES + payload + WIRE_BYTES) * 8) as f64 / 1e6
}

struct Contender {
    series: &'static str,
    site: Site,
    /// Where its frames go.
    prefixes: Vec<Prefix>,
    /// PdP's processes.
    processes: Vec<u32>,
    is_kernel: bool,
}

/// A series and how what forwards is started at a site: where frames go, and its processes.
type Maker<'a> = (&'static str, &'a dyn Fn(&mut Site) -> Result<(Vec<Prefix>, Vec<u32>)>);

fn pdp(site: &mut Site, design: &Design) -> Result<(Vec<Prefix>, Vec<u32>)> {
    site.node.start_pdpd();
    let pdp = Pdp::start(&site.node, design, &site_interfaces("af-xdp"))?;
    pdp.add_routes(&site.node, &site::few())?;
    Ok((site::few(), pdp.processes))
}

/// A host of a virtual network whose program forwards, on the first core as the mux.
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

pub(super) fn figure(run: &mut Run) -> Result<()> {
    let [core, generator_core] = run.cores();
    let clock = Clock::of_this_machine();
    let makers: [Maker<'_>; 4] = [
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
            Ok(Contender { series, site, prefixes, processes, is_kernel })
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
        let start = |design| Bed::start(design, &site::few(), HEADERS_BYTES + payload);
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

/// All inputs, and the highest throughput among them.
fn veth(run: &mut Run, contender: &Contender, payload: usize, core: usize, clock: &Clock) {
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
            let (made, came) = (rate("offered")?, rate("rate")?);
            Ok((made >= MADE_MIN * pps).then_some(came))
        };
        let x = mbps(pps, payload).round();
        run.take_as(contender.series, x, "Mb/s offered", offer, |came| {
            most_pps = most_pps.max(came.unwrap_or(0.0));
            let reading = |came| Reading::new(throughput(payload), mbps(came, payload), "Mb/s");
            came.map(reading).into_iter().collect()
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
