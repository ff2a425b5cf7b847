//! Forwarding by the mux itself, compared with a router guest on the same core. The mux makes and
//! drops the frames, as in `router`.

use anyhow::Result;

use super::many::{START, VnetContender, compare};
use super::router::tables;
use super::rtt::{self, EchoSocket};
use super::{BenchExperiment, Subject};
use crate::bed::ForwardingTestbed;
use crate::peers::pdp::{Design, site_interfaces, write_dear};
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, Site};
use crate::statistics::quantile;

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "fastpath",
    about: "the mux's own forwarding and a router guest, each on one core with the mux, 64-byte packets, 2 routes and \
            the full table with random destinations, in turn",
    seconds: 90,
    subject: Subject::Pdp,
    run: fastpath,
};

pub(super) const VNETS: BenchExperiment = BenchExperiment {
    name: "fastpath-vnets",
    about: "1 to 1,024 virtual networks that the mux forwards for by itself, VXLAN tunnels on one generator and one \
            sink, frames to them in turn, at saturation; one by itself is measured before many in each round",
    seconds: 200,
    subject: Subject::Pdp,
    run: vnets,
};

pub(super) const DEAR: BenchExperiment = BenchExperiment {
    name: "fastpath-dear",
    about: "a network with power of the mux beside none, one and eight that are flooded and whose frames are as dear as \
            filters make them: its rate at saturation, and the round trip of a UDP echo through it, with power and \
            without",
    seconds: 120,
    subject: Subject::Pdp,
    run: dear,
};

const FRAME_BYTES: usize = 64;

/// Power of the network beside expensive ones, thousandths of a core.
const POWER: u32 = 400;

fn fastpath(run: &mut ExperimentRun) -> Result<()> {
    let [core, _] = run.cores();
    for prefixes in tables(run)? {
        let start = |design| ForwardingTestbed::start(design, &prefixes, FRAME_BYTES);
        let guest = run.attempt("router guest", |_| start(Design::plain(core, core)));
        let mux = run.attempt("fast path", |_| start(Design::fastpath(core, 1)));
        let (Some(guest), Some(mux)) = (guest, mux) else { continue };
        let x = prefixes.len();
        let guest =
            VnetContender { series: "pdp, router guest", x, bed: &guest, active: 1, of: &[] };
        let of = [("of the guest", 0)];
        let mux = VnetContender { series: "pdp, fast path", bed: &mux, of: &of, ..guest };
        compare(run, "routes", &[guest, mux])?;
    }
    Ok(())
}

fn dear(run: &mut ExperimentRun) -> Result<()> {
    let [core, _] = run.cores();
    let directory = tempfile::tempdir()?;
    let frames = directory.path().join("dear.pcap");
    write_dear(&frames)?;
    let design = |mux_power, dear| Design {
        mux_power,
        expensive_vnets: (dear, Some(frames.clone())),
        ..Design::fastpath(core, 1)
    };
    let start = |design| ForwardingTestbed::start(design, &site::few(), FRAME_BYTES);
    let Some(alone) = run.attempt("alone", |_| start(design(POWER, 0))) else { return Ok(()) };
    let alone = VnetContender { series: "pdp, with power", x: 0, bed: &alone, active: 1, of: &[] };
    for count in run.choose(&[1, 8], &[8]) {
        let with = run.attempt(count, |_| start(design(POWER, count)));
        let without = run.attempt(count, |_| start(design(0, count)));
        let (Some(with), Some(without)) = (with, without) else { continue };
        let of = [("of all there is", 0)];
        let with = VnetContender { x: count, bed: &with, of: &of, ..alone };
        let without = VnetContender { series: "pdp, without", bed: &without, ..with };
        compare(run, "dear networks", &[alone, with, without])?;
    }
    let mut sites = Vec::new();
    for (series, power) in [("pdp, with power", POWER), ("pdp, without", 0)] {
        for count in run.choose(&[0, 1, 8], &[0, 8]) {
            sites.extend(run.attempt(series, |_| {
                let mut site = Site::make("dear");
                site.add_hosts();
                let design = design(power, count);
                rtt::pdp(&mut site, &design, "af-xdp")?;
                Ok((series, design, EchoSocket::start(&site)?, site))
            }));
        }
    }
    let trips = if run.quick() { rtt::TRIPS / 4 } else { rtt::TRIPS };
    run.rounds(|run| {
        for (series, design, echo, site) in &sites {
            run.take(series, design.expensive_vnets.0 as f64, "dear networks", || {
                site.node.apply(&design.substrate(&site_interfaces("af-xdp")));
                let times = echo.trips(trips);
                site.node.apply(&design.quiet().substrate(&site_interfaces("af-xdp")));
                let times = times?;
                let at = |what, share| Reading::new(what, quantile(&times, share), "µs");
                Ok(vec![at("round trip, median", 0.5), at("round trip, p99", 0.99)])
            });
        }
        Ok(())
    })
}

fn vnets(run: &mut ExperimentRun) -> Result<()> {
    let [core, _] = run.cores();
    let start = |design| ForwardingTestbed::start(design, &site::few(), FRAME_BYTES);
    // In tunnels, like the runs with many.
    let one = Design { vnets: 1, ..Design::fastpath(core, 2) };
    let Some(one) = run.attempt(1, |_| start(one)) else { return Ok(()) };
    let one = VnetContender { series: "pdp, fast path", x: 1, bed: &one, active: 1, of: &[] };
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
            &[one, VnetContender { x: count, bed: &bed, active: count, of: &of, ..one }],
        )?;
    }
    Ok(())
}
