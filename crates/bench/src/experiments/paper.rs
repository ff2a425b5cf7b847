//! The evaluation of the PdP paper, figure by figure and table by table, with every policy.
//!
//! The paper's forwarding engines are slow PCs behind one multiplexing PC; here they are guests with
//! a share of a core. Loads are given as multiples of one guest's capacity, since that differs.
//! docs/paper.md says what else does.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pdp_e2e::meter::Clock;

use super::Experiment;
use super::rtt;
use crate::bed::Bed;
use crate::peers::kernel;
use crate::peers::pdp::{Design, Pdp, SITE_INTERFACES};
use crate::run::{Reading, Run};
use crate::site::{self, Prefix, Site};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "pdp-paper",
    about: "the evaluation of the PdP paper: its figures 7 to 12 and tables 1 to 3, with every policy; \
            forwarding engines are guests with a tenth of a core",
    seconds: 900,
    run,
};

/// The policies, as they are written.
pub(super) const POLICIES: [&str; 5] = ["round-robin", "weighted", "flow", "flowlet", "ordered"];

/// Power of a forwarding engine, thousandths of a core.
const ENGINE: u32 = 100;

/// Those of the reordering tables, unequal: 75 to 50 in the paper's percent.
const UNEQUAL: [u32; 3] = [150, 100, 100];

/// Offered loads as shares of what so many engines can do.
const LOADS: [f64; 5] = [0.25, 0.5, 0.75, 1.0, 1.5];
const LOADS_QUICK: [f64; 2] = [0.5, 1.5];

fn run(run: &mut Run) -> Result<()> {
    let clock = Clock::of_this_machine();
    run.attempt("figures 7 to 10", |run| forwarding(run, &clock));
    run.attempt("figure 11", |run| large_table(run, &clock));
    run.attempt("figure 12", tcp);
    run.attempt("tables 1 and 2", |run| reordering(run, &clock));
    run.attempt("table 3", rtt::table);
    Ok(())
}

fn engines(run: &Run, guests: &[u32], policy: &'static str) -> Design {
    let [mux, guest] = run.cores();
    Design::capped(mux, guest, guests, policy)
}

/// Rate and loss against the input rate, for frames of three lengths and 1 to 3 engines.
fn forwarding(run: &mut Run, clock: &Clock) -> Result<()> {
    let sizes: &[(usize, [&'static str; 2])] = &[
        (64, ["figure 7: rate, 64 bytes", "figure 8: loss, 64 bytes"]),
        (512, ["figure 9: rate, 512 bytes", "figure 9: loss, 512 bytes"]),
        (1500, ["figure 10: rate, 1500 bytes", "figure 10: loss, 1500 bytes"]),
    ];
    let sizes = if run.quick() { &sizes[..1] } else { sizes };
    let policies: &[&'static str] =
        if run.quick() { &["round-robin", "ordered"] } else { &POLICIES };
    for &(bytes, what) in sizes {
        for &policy in policies {
            for guests in 1..=3 {
                let design = engines(run, &vec![ENGINE; guests], policy);
                loads(run, clock, design, &site::few(), bytes, what)?;
            }
        }
    }
    Ok(())
}

/// The same with the Internet's table.
fn large_table(run: &mut Run, clock: &Clock) -> Result<()> {
    if run.quick() {
        return Ok(());
    }
    let internet = site::internet()?;
    let what = ["figure 11: rate, large table", "figure 11: loss, large table"];
    for policy in ["round-robin", "ordered"] {
        for guests in 1..=3 {
            let design = engines(run, &vec![ENGINE; guests], policy);
            loads(run, clock, design, &internet, 64, what)?;
        }
    }
    Ok(())
}

/// Offers loads to one design.
fn loads(
    run: &mut Run,
    clock: &Clock,
    design: Design,
    prefixes: &[Prefix],
    bytes: usize,
    what: [&'static str; 2],
) -> Result<()> {
    let loads: &[f64] = if run.quick() { &LOADS_QUICK } else { &LOADS };
    let (count, time) = (design.guests.len(), run.time() / 2);
    let series = format!("{}, {count} FE", design.policy);
    let bed = run.attempt(&series, |_| Bed::start(design, prefixes, bytes));
    let Some(bed) = bed else { return Ok(()) };
    run.rounds(|run| {
        let most = run.attempt(&series, |_| bed.offer(0, time, clock));
        let Some(most) = most else { return Ok(()) };
        for &load in loads {
            run.take(&series, load * count as f64, "times one FE's capacity offered", || {
                let pps = most.rate_pps / count as f64 * load * count as f64;
                let passed = bed.offer(pps as u64, time, clock)?;
                let loss = (1.0 - passed.rate_pps / passed.offered_pps).max(0.0) * 100.0;
                Ok(vec![
                    Reading::new(what[0], passed.rate_pps / 1e6, "Mpps").cycles(passed.cycles),
                    Reading::new(what[1], loss, "%"),
                ])
            });
        }
        Ok(())
    })
}

/// Reordered packets of one flow at half of what the engines can do.
fn reordering(run: &mut Run, clock: &Clock) -> Result<()> {
    let time = run.time();
    for policy in POLICIES {
        for count in 1..=3 {
            let design = engines(run, &UNEQUAL[..count], policy);
            let bed = run.attempt(policy, |_| Bed::start(design, &site::one_flow(), 64));
            let Some(bed) = bed else { continue };
            run.rounds(|run| {
                let most = run.attempt(policy, |_| bed.offer(0, time / 2, clock));
                let Some(most) = most else { return Ok(()) };
                run.take(policy, count as f64, "FE", || {
                    let passed = bed.offer((most.rate_pps / 2.0) as u64, time, clock)?;
                    let what = "tables 1 and 2: reordered packets";
                    Ok(vec![Reading::new(what, passed.late, "%").notes(passed.notes())])
                });
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Goodput of one TCP connection through the kernel, and through 1 to 3 engines.
fn tcp(run: &mut Run) -> Result<()> {
    let mut sites = Vec::new();
    sites.extend(run.attempt("kernel", |_| {
        let site = Site::make("tcp");
        kernel::start(&site);
        listen(&site).map(|server| ("kernel", 0, site, server))
    }));
    let policies: &[&'static str] =
        if run.quick() { &["round-robin", "ordered"] } else { &POLICIES };
    for &policy in policies {
        for count in 1..=3 {
            let design = engines(run, &vec![ENGINE; count], policy);
            sites.extend(run.attempt(policy, |_| {
                let mut site = Site::make("tcp");
                site.node.start_pdpd();
                Pdp::start(&site.node, &design, SITE_INTERFACES)?;
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

fn listen(site: &Site) -> Result<pdp_e2e::Background> {
    site.add_hosts();
    let server = site.b.spawn("iperf3 --server");
    pdp_e2e::eventually("iperf3 listens", || site.b.try_run("ss -Htln | grep -q :5201").is_ok());
    Ok(server)
}

fn goodput(site: &Site, time: Duration) -> Result<Vec<Reading>> {
    let seconds = time.as_secs().max(1);
    let line = format!("iperf3 --client 10.0.2.2 --json --time {seconds} --omit 1");
    let text = site.a.try_run(&line).map_err(|error| anyhow::anyhow!("{error}"))?;
    let said: serde_json::Value = serde_json::from_str(&text)?;
    let bps = said["end"]["sum_received"]["bits_per_second"].as_f64();
    let bps = bps.context("iperf3's result")?;
    ensure!(bps > 0.0, "nothing arrived");
    let again = said["end"]["sum_sent"]["retransmits"].as_u64().unwrap_or(0);
    let what = "figure 12: TCP goodput";
    Ok(vec![
        Reading::new(what, bps / 1e6, "Mb/s"),
        Reading::new("figure 12: segments sent again", again as f64, "segments"),
    ])
}
