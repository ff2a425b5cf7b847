//! What the mux forwards by itself, beside a router guest on the same core. Frames are made and ended inside the mux,
//! as in `router`.

use anyhow::Result;
use pdp_e2e::meter::Clock;

use super::{Experiment, Subject};
use crate::bed::Bed;
use crate::peers::pdp::Design;
use crate::run::{Reading, Run};
use crate::site;

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "fastpath",
    about: "the mux's own forwarding and a router guest, each on one core with the mux, 64-byte packets, 2 routes and \
            the full table with random destinations, in turn",
    seconds: 90,
    subject: Subject::Pdp,
    run: fastpath,
};

pub(super) const VNETS: Experiment = Experiment {
    name: "fastpath-vnets",
    about: "1 to 1,024 virtual networks that the mux forwards for by itself, VXLAN tunnels on one generator and one \
            sink, frames to them in turn, at saturation; one by itself is measured before many in each round",
    seconds: 200,
    subject: Subject::Pdp,
    run: vnets,
};

const FRAME_BYTES: usize = 64;

fn fastpath(run: &mut Run) -> Result<()> {
    let (clock, time) = (Clock::of_this_machine(), run.time());
    let [core, _] = run.cores();
    let mut tables = vec![site::few()];
    if !run.quick() {
        tables.push(site::internet()?);
    }
    for prefixes in tables {
        if !run.wants(prefixes.len()) {
            continue;
        }
        let designs =
            [("router guest", Design::plain(core, core)), ("fast path", Design::fastpath(core, 1))];
        let mut beds = Vec::new();
        for (series, design) in designs {
            let bed = run.attempt(series, |_| Bed::start(design, &prefixes, FRAME_BYTES));
            beds.extend(bed.map(|bed| (series, bed)));
        }
        run.rounds(|run| {
            let mut guest = None;
            for (series, bed) in &beds {
                let offer = || bed.offer(0, time, &clock);
                run.take_as(series, prefixes.len() as f64, "routes", offer, |passed| {
                    let mut readings = passed.readings();
                    let guest = *guest.get_or_insert(passed.rate_pps);
                    readings.push(Reading::new(
                        "of the guest",
                        passed.rate_pps / guest * 100.0,
                        "%",
                    ));
                    readings
                });
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn vnets(run: &mut Run) -> Result<()> {
    let (clock, time) = (Clock::of_this_machine(), run.time());
    let [core, _] = run.cores();
    let one = Design { carriers: Design::fastpath(core, 2).carriers, ..Design::fastpath(core, 1) };
    let Some(one) = run.attempt(1, |_| Bed::start(one, &site::few(), FRAME_BYTES)) else {
        return Ok(());
    };
    for count in run.choose(&[16, 64, 256, 1024], &[16, 256]) {
        let start =
            |_: &mut Run| Bed::start(Design::fastpath(core, count), &site::few(), FRAME_BYTES);
        let Some(bed) = run.attempt(count, start) else { continue };
        run.rounds(|run| {
            let mut single = None;
            for (x, bed) in [(1, &one), (count, &bed)] {
                let offer = || bed.offer(0, time, &clock);
                run.take_as("fast path", x as f64, "vnets", offer, |passed| {
                    let mut readings = passed.readings();
                    readings.retain(|reading| reading.what() != "late");
                    let single = *single.get_or_insert(passed.rate_pps);
                    readings.push(Reading::new("of one", passed.rate_pps / single * 100.0, "%"));
                    readings
                });
            }
            Ok(())
        })?;
    }
    Ok(())
}
