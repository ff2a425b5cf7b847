//! The evaluation of the PdP paper, figure by figure and table by table, with every policy.
//!
//! The paper's forwarding engines are slow PCs behind one multiplexing PC. Here they are guests
//! with a share of a core. Loads are multiples of one engine's capacity, since that differs.
//! docs/paper.md lists all other differences.

use std::time::Duration;

use anyhow::{Result, ensure};
use pdp_testbed::meter::Clock;
use pdp_testbed::{Background, TcpResult, eventually};

use super::rtt;
use super::{BenchExperiment, Subject};
use crate::bed::ForwardingTestbed;
use crate::peers::kernel;
use crate::peers::pdp::{Design, Pdp, site_interfaces};
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, Prefix, Site};

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "pdp-paper",
    about: "the evaluation of the PdP paper: its figures 7 to 12 and tables 1 to 3, with every policy; \
            forwarding engines are guests with a tenth of a core",
    seconds: 800,
    subject: Subject::Pdp,
    run,
};

/// Policies, by their names in specs.
pub(super) const POLICIES: [&str; 5] = ["round-robin", "weighted", "flow", "flowlet", "ordered"];

/// Power of a forwarding engine, thousandths of a core.
const ENGINE: u32 = 100;

/// Powers for the reordering tables, unequal: 75 to 50 in the paper's percent.
const UNEQUAL: [u32; 3] = [150, 100, 100];

/// Largest number of engines in figures 7 to 12 and the tables.
const ENGINES_MAX: usize = 3;

/// Offered loads, as multiples of one engine's capacity.
const LOADS: [f64; 4] = [0.5, 1.0, 2.0, 4.0];
const LOADS_QUICK: [f64; 2] = [0.5, 4.0];

/// Policies of figures 9 to 11: the paper's, and the one that preserves order completely.
const TWO_POLICIES: [&str; 2] = ["round-robin", "ordered"];

fn run(run: &mut ExperimentRun) -> Result<()> {
    let clock = Clock::of_this_machine();
    // The longest experiments come last, in case time is up.
    run.attempt("tables 1 and 2", |run| reordering(run, &clock));
    run.attempt("table 3", rtt::table);
    run.attempt("figure 12", tcp);
    run.attempt("figures 7 to 10", |run| forwarding(run, &clock));
    run.attempt("figure 11", |run| large_table(run, &clock));
    Ok(())
}

/// The figure for judging order.
pub(crate) const REORDERED: &str = "tables 1 and 2: reordered packets";

fn engines(run: &ExperimentRun, guests: &[u32], policy: &'static str) -> Design {
    let [mux, guest] = run.cores();
    Design::capped(mux, guest, guests, policy)
}

/// Rate and loss against the input rate, for three frame lengths and 1 to 3 engines.
fn forwarding(run: &mut ExperimentRun, clock: &Clock) -> Result<()> {
    let policies: &[&'static str] = if run.quick() { &TWO_POLICIES } else { &POLICIES };
    let figures = ["figure 7: rate, 64 bytes", "figure 8: loss, 64 bytes"];
    loads(run, clock, policies, &site::few(), 64, figures)?;
    if run.quick() {
        return Ok(());
    }
    let figures = ["figure 9: rate, 512 bytes", "figure 9: loss, 512 bytes"];
    loads(run, clock, &TWO_POLICIES, &site::few(), 512, figures)?;
    let figures = ["figure 10: rate, 1500 bytes", "figure 10: loss, 1500 bytes"];
    loads(run, clock, &TWO_POLICIES, &site::few(), 1500, figures)
}

/// Rate and loss with the Internet's table.
fn large_table(run: &mut ExperimentRun, clock: &Clock) -> Result<()> {
    if run.quick() {
        return Ok(());
    }
    let figures = ["figure 11: rate, large table", "figure 11: loss, large table"];
    loads(run, clock, &TWO_POLICIES, &site::internet()?, 64, figures)
}

/// Offers loads to 1 to 3 engines.
fn loads(
    run: &mut ExperimentRun,
    clock: &Clock,
    policies: &[&'static str],
    prefixes: &[Prefix],
    bytes: usize,
    figures: [&'static str; 2],
) -> Result<()> {
    let loads: &[f64] = if run.quick() { &LOADS_QUICK } else { &LOADS };
    let (time, [rate, loss]) = (run.time() / 5, figures);
    for &policy in policies {
        let mut beds = Vec::new();
        for count in 1..=ENGINES_MAX {
            let design = engines(run, &vec![ENGINE; count], policy);
            let series = format!("{policy}, {count} FE");
            let bed = run.attempt(&series, |_| ForwardingTestbed::start(design, prefixes, bytes));
            beds.extend(bed.map(|bed| (series, bed)));
        }
        let Some((_, one)) = beds.first() else { continue };
        run.rounds(|run| {
            let capacity = run.attempt(policy, |_| one.offer(0, time, clock));
            let Some(capacity) = capacity else { return Ok(()) };
            for &load in loads {
                let pps = (capacity.rate_pps * load) as u64;
                for (series, bed) in &beds {
                    let (x_unit, offer) =
                        ("times one FE's capacity offered", || bed.offer(pps, time, clock));
                    run.take_as(series, load, x_unit, offer, |passed| {
                        vec![
                            Reading::new(rate, passed.rate_pps / 1e6, "Mpps").cycles(passed.cycles),
                            Reading::new(loss, passed.loss(), "%"),
                        ]
                    });
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Reordered packets of one flow at half of the engines' capacity.
fn reordering(run: &mut ExperimentRun, clock: &Clock) -> Result<()> {
    let time = run.time() / 2;
    for policy in POLICIES {
        for count in 1..=ENGINES_MAX {
            let design = engines(run, &UNEQUAL[..count], policy);
            let bed =
                run.attempt(policy, |_| ForwardingTestbed::start(design, &site::one_flow(), 64));
            let Some(bed) = bed else { continue };
            run.rounds(|run| {
                let most = run.attempt(policy, |_| bed.offer(0, time / 2, clock));
                let Some(most) = most else { return Ok(()) };
                let pps = (most.rate_pps / 2.0) as u64;
                let offer = || bed.offer(pps, time, clock);
                run.take_as(policy, count as f64, "FE", offer, |passed| {
                    vec![
                        Reading::new(REORDERED, passed.reordered_percent, "%")
                            .notes(passed.notes()),
                        Reading::new("tables 1 and 2: loss", passed.loss(), "%"),
                    ]
                });
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Goodput of one TCP connection through the kernel, and through 1 to 3 engines.
fn tcp(run: &mut ExperimentRun) -> Result<()> {
    let mut sites = Vec::new();
    if run.wants_series("kernel") {
        sites.extend(run.attempt("kernel", |_| {
            let site = Site::make("tcp");
            kernel::start(&site);
            listen(&site).map(|server| ("kernel", 0, site, server))
        }));
    }
    let policies: &[&'static str] = if run.quick() { &TWO_POLICIES } else { &POLICIES };
    for &policy in policies {
        for count in 1..=ENGINES_MAX {
            let design = engines(run, &vec![ENGINE; count], policy);
            sites.extend(run.attempt(policy, |_| {
                let mut site = Site::make("tcp");
                site.node.start_pdpd();
                Pdp::start(&site.node, &design, &site_interfaces("af-xdp"))?;
                listen(&site).map(|server| (policy, count, site, server))
            }));
        }
    }
    let time = run.time();
    run.rounds(|run| {
        for (series, count, site, _server) in &sites {
            run.take(series, *count as f64, "FE", || goodput(site, time));
        }
        Ok(())
    })
}

fn listen(site: &Site) -> Result<Background> {
    site.add_hosts();
    let server = site.b.spawn("iperf3 --server");
    eventually("iperf3 listens", || site.b.try_run("ss -Htln | grep -q :5201").is_ok());
    Ok(server)
}

fn goodput(site: &Site, time: Duration) -> Result<Vec<Reading>> {
    let seconds = time.as_secs().max(1);
    let line = format!("iperf3 --client 10.0.2.2 --json --time {seconds} --omit 1");
    let tcp = TcpResult::parse(&site.a.try_run(&line)?)?;
    ensure!(tcp.received_bps > 0.0, "nothing arrived");
    Ok(vec![
        Reading::new("figure 12: TCP goodput", tcp.received_bps / 1e6, "Mb/s"),
        Reading::new("figure 12: segments sent again", tcp.retransmits as f64, "segments"),
    ])
}
