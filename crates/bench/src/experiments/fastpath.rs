//! What the mux forwards by itself, beside a router guest on the same core. Frames are made and ended inside the mux,
//! as in `router`.

use anyhow::Result;

use super::many::{Contender, START, compare};
use super::router::tables;
use super::{Experiment, Subject};
use crate::bed::Bed;
use crate::peers::pdp::Design;
use crate::run::Run;
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
    let [core, _] = run.cores();
    for prefixes in tables(run)? {
        let start = |design| Bed::start(design, &prefixes, FRAME_BYTES);
        let guest = run.attempt("router guest", |_| start(Design::plain(core, core)));
        let mux = run.attempt("fast path", |_| start(Design::fastpath(core, 1)));
        let (Some(guest), Some(mux)) = (guest, mux) else { continue };
        let x = prefixes.len();
        let guest = Contender { series: "pdp, router guest", x, bed: &guest, active: 1, of: &[] };
        let of = [("of the guest", 0)];
        let mux = Contender { series: "pdp, fast path", bed: &mux, of: &of, ..guest };
        compare(run, "routes", &[guest, mux])?;
    }
    Ok(())
}

fn vnets(run: &mut Run) -> Result<()> {
    let [core, _] = run.cores();
    let start = |design| Bed::start(design, &site::few(), FRAME_BYTES);
    // In tunnels, as many are.
    let one = Design { vnets: 1, ..Design::fastpath(core, 2) };
    let Some(one) = run.attempt(1, |_| start(one)) else { return Ok(()) };
    let one = Contender { series: "pdp, fast path", x: 1, bed: &one, active: 1, of: &[] };
    for count in run.choose(&[16, 64, 256, 1024], &[16, 256]) {
        if run.left() < START * count as u32 {
            run.miss(format!("{count} vnets: no time left to start them"));
            continue;
        }
        let Some(bed) = run.attempt(count, |_| start(Design::fastpath(core, count))) else {
            continue;
        };
        let of = [("of one", 0)];
        compare(
            run,
            "vnets",
            &[one, Contender { x: count, bed: &bed, active: count, of: &of, ..one }],
        )?;
    }
    Ok(())
}
