//! The router alone. The mux makes and drops the frames.

use anyhow::Result;
use pdp_testbed::meter::Clock;

use super::paper::POLICIES;
use super::{BenchExperiment, Subject};
use crate::bed::ForwardingTestbed;
use crate::peers::pdp::Design;
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, Prefix};

pub(super) const ROUTER: BenchExperiment = BenchExperiment {
    name: "router",
    about: "generator, mux, router guest in its container, mux, sink; mux and guest on a core \
            each, 64-byte packets, 2 routes and the full table with random destinations",
    seconds: 70,
    subject: Subject::Pdp,
    run: router,
};

pub(super) const ONE_CORE: BenchExperiment = BenchExperiment {
    name: "one-core",
    about: "the same with mux and guest on one core, by the guest's share of it",
    seconds: 35,
    subject: Subject::Pdp,
    run: one_core,
};

pub(super) const OVERLOAD: BenchExperiment = BenchExperiment {
    name: "overload",
    about: "offered load from half the capacity of a capped guest to ten times of it",
    seconds: 50,
    subject: Subject::Pdp,
    run: overload,
};

pub(super) const SCALING: BenchExperiment = BenchExperiment {
    name: "scaling",
    about: "512 flows over 1 to 4 guests of a tenth of a core each, as many packets as are taken; \
            late: whatever their flow. A CPU second of a guest is one of its cgroup's: what the host \
            stole is not in it",
    seconds: 120,
    subject: Subject::Pdp,
    run: scaling,
};

const FRAME_BYTES: usize = 64;

/// Power of a capped guest, thousandths of a core.
const CAPPED: u32 = 100;

fn design(run: &ExperimentRun) -> Design {
    let [mux, guest] = run.cores();
    Design::plain(mux, guest)
}

fn capped(run: &ExperimentRun, guests: &[u32], policy: &'static str) -> Design {
    let [mux, guest] = run.cores();
    Design::capped(mux, guest, guests, policy)
}

/// Tables of routes, to be loaded one after another.
pub(super) fn tables(run: &ExperimentRun) -> Result<Vec<Vec<Prefix>>> {
    let mut tables = vec![site::few()];
    if !run.quick() {
        tables.push(site::internet()?);
    }
    tables.retain(|prefixes| run.wants(prefixes.len()));
    Ok(tables)
}

fn router(run: &mut ExperimentRun) -> Result<()> {
    let clock = Clock::of_this_machine();
    let time = run.time();
    for prefixes in tables(run)? {
        let design = design(run);
        let bed = run.attempt("pdp", |_| ForwardingTestbed::start(design, &prefixes, FRAME_BYTES));
        let Some(bed) = bed else { continue };
        run.rounds(|run| {
            run.take("pdp, two cores", prefixes.len() as f64, "routes", || {
                Ok(bed.offer(0, time, &clock)?.readings())
            });
            Ok(())
        })?;
    }
    Ok(())
}

fn one_core(run: &mut ExperimentRun) -> Result<()> {
    let clock = Clock::of_this_machine();
    let time = run.time();
    let shares: &[u32] = if run.quick() { &[500] } else { &[250, 500, 750] };
    for &share in shares {
        if !run.wants(share as usize / 10) {
            continue;
        }
        let [core, _] = run.cores();
        let design = Design { mux: core, guest: core, guests: vec![share], ..design(run) };
        let bed =
            run.attempt("pdp", |_| ForwardingTestbed::start(design, &site::few(), FRAME_BYTES));
        let Some(bed) = bed else { continue };
        run.rounds(|run| {
            run.take("pdp", f64::from(share) / 10.0, "% of the core for the guest", || {
                Ok(bed.offer(0, time, &clock)?.readings())
            });
            Ok(())
        })?;
    }
    Ok(())
}

fn overload(run: &mut ExperimentRun) -> Result<()> {
    let clock = Clock::of_this_machine();
    let time = run.time() / 2;
    let loads: &[f64] =
        if run.quick() { &[1.0, 10.0] } else { &[0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0] };
    let design = capped(run, &[CAPPED], "ordered");
    let Some(bed) =
        run.attempt("pdp", |_| ForwardingTestbed::start(design, &site::few(), FRAME_BYTES))
    else {
        return Ok(());
    };
    run.rounds(|run| {
        let Some(capacity) = run.attempt("capacity", |_| bed.offer(0, time, &clock)) else {
            return Ok(());
        };
        let (mut peak, mut peak_of_cpu) = (0.0f64, 0.0f64);
        for &load in loads {
            let pps = (capacity.rate_pps * load) as u64;
            let (x_unit, offer) = ("times the capacity offered", || bed.offer(pps, time, &clock));
            run.take_as("pdp", load, x_unit, offer, |passed| {
                peak = peak.max(passed.rate_pps);
                let mut readings = passed.readings_of_capped();
                readings.push(Reading::new("of peak", passed.rate_pps / peak * 100.0, "%"));
                // Below its capacity a guest sleeps and wakes; the cost of that is no overload.
                if load >= 1.0 {
                    peak_of_cpu = peak_of_cpu.max(passed.rate_pgps);
                    let share = passed.rate_pgps / peak_of_cpu * 100.0;
                    readings.push(Reading::new("of peak, for a guest's CPU second", share, "%"));
                }
                readings
            });
        }
        Ok(())
    })
}

fn scaling(run: &mut ExperimentRun) -> Result<()> {
    let clock = Clock::of_this_machine();
    let time = run.time() / 2;
    let counts: &[usize] = if run.quick() { &[1, 2] } else { &[1, 2, 3, 4] };
    for policy in POLICIES {
        let mut beds = Vec::new();
        for &count in counts {
            let design = capped(run, &vec![CAPPED; count], policy);
            let bed = run
                .attempt(policy, |_| ForwardingTestbed::start(design, &site::few(), FRAME_BYTES));
            beds.extend(bed.map(|bed| (count, bed)));
        }
        run.rounds(|run| {
            let mut one = None;
            for (count, bed) in &beds {
                let (guests, offer) = (*count as f64, || bed.offer(0, time, &clock));
                run.take_as(policy, guests, "guests", offer, |passed| {
                    let now = (passed.rate_pps / guests, passed.rate_pgps);
                    let (rate, of_cpu) = *one.get_or_insert(now);
                    let mut readings = passed.readings_of_capped();
                    readings.push(Reading::new("of linear", now.0 / rate * 100.0, "%"));
                    let share = now.1 / of_cpu * 100.0;
                    readings.push(Reading::new("of linear, for a guest's CPU second", share, "%"));
                    readings
                });
            }
            Ok(())
        })?;
    }
    Ok(())
}
