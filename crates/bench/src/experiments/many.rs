//! Many compared with one: virtual networks, ports of a router, guests of a router, and tunnels
//! compared with plain interfaces. The mux makes and drops the frames, as in `router`.
//!
//! All runs of a comparison have the same frames, and guests on a core that the mux does not use.
//! Each round measures the reference just before the figure.

use std::time::Duration;

use anyhow::Result;
use pdp_testbed::meter::Clock;

use super::{BenchExperiment, Subject};
use crate::bed::ForwardingTestbed;
use crate::peers::pdp::{Design, ExternalDriver};
use crate::run::{ExperimentRun, Reading};
use crate::site;

pub(super) const VNETS: BenchExperiment = BenchExperiment {
    name: "vnets",
    about: "1 to 1,024 virtual networks, each with a router and VXLAN tunnels on one generator and \
            one sink, frames to them in turn, at saturation; their guests share a core. Beside it as \
            many of which 16 have traffic. One by itself, and 16, are measured before many in each \
            round",
    seconds: 380,
    subject: Subject::Pdp,
    run: vnets,
};

pub(super) const PORTS: BenchExperiment = BenchExperiment {
    name: "ports",
    about: "a router whose frames leave by 1 to 64 ports in turn, each a VXLAN tunnel on one sink, at \
            saturation; the same 64 routes and frames for all; one port is measured before many in \
            each round",
    seconds: 70,
    subject: Subject::Pdp,
    run: ports,
};

pub(super) const GUESTS: BenchExperiment = BenchExperiment {
    name: "guests",
    about: "a router with 1 to 4 guests that share a core, 512 flows over them by policy flow, at \
            saturation; one guest is measured before many in each round",
    seconds: 40,
    subject: Subject::Pdp,
    run: guests,
};

pub(super) const TUNNELS: BenchExperiment = BenchExperiment {
    name: "tunnels",
    about: "a router with VXLAN on both sides, over IPv4 and over IPv6, and with plain interfaces, at \
            saturation; plain interfaces are measured before each in each round",
    seconds: 45,
    subject: Subject::Pdp,
    run: tunnels,
};

const FRAME_BYTES: usize = 64;

/// Virtual networks with traffic, among all.
const ACTIVE: usize = 16;

/// Largest number of virtual networks.
const VNETS_MAX: usize = 1024;

/// Ports, and routes for frames that leave by several ports.
const PORTS_MAX: usize = 64;

/// Time to start a virtual network and to give it routes.
pub(super) const START: Duration = Duration::from_millis(150);

/// A measurement: its series and parameter, and the number of virtual networks with traffic.
#[derive(Clone, Copy)]
pub(super) struct VnetContender<'a> {
    pub(super) series: &'a str,
    pub(super) x: usize,
    pub(super) bed: &'a ForwardingTestbed,
    pub(super) active: usize,
    /// Earlier contenders for comparison of the rate, in percent: a description, and the index.
    pub(super) of: &'a [(&'static str, usize)],
}

/// Measures all contenders in each round.
pub(super) fn compare(
    run: &mut ExperimentRun,
    x_unit: &str,
    contenders: &[VnetContender<'_>],
) -> Result<()> {
    let (clock, time) = (Clock::of_this_machine(), run.time());
    run.rounds(|run| {
        let mut rates = vec![None; contenders.len()];
        for (at, VnetContender { series, x, bed, active, of }) in contenders.iter().enumerate() {
            let offer = || {
                bed.aim(*active)?;
                bed.offer(0, time, &clock)
            };
            run.take_as(series, *x as f64, x_unit, offer, |passed| {
                rates[at] = Some(passed.rate_pps);
                let mut readings = passed.readings();
                // All networks, ports and flows use one numbering.
                readings.retain(|reading| reading.what() != "late");
                readings.extend(of.iter().filter_map(|(what, earlier)| {
                    Some(Reading::new(what, passed.rate_pps / rates[*earlier]? * 100.0, "%"))
                }));
                readings
            });
        }
        Ok(())
    })
}

fn vnets(run: &mut ExperimentRun) -> Result<()> {
    let [mux, guest] = run.cores();
    let start = |count| {
        ForwardingTestbed::start(Design::many(mux, guest, count), &site::few(), FRAME_BYTES)
    };
    // Measured anew in each round, before those that are compared with it.
    let Some(single) = run.attempt(1, |_| start(1)) else { return Ok(()) };
    let (of_one, of_active) = ([("of one", 0)], [("of one", 0), ("of 16", 1)]);
    let one = VnetContender { series: "pdp", x: 1, bed: &single, active: 1, of: &[] };
    let counts = run.choose(&[ACTIVE, 64, 256, VNETS_MAX], &[ACTIVE, 256]);
    if counts.is_empty() {
        return compare(run, "vnets", &[one]);
    }
    let Some(few) = run.attempt(ACTIVE, |_| start(ACTIVE)) else { return Ok(()) };
    let few = VnetContender { x: ACTIVE, bed: &few, active: ACTIVE, of: &of_one, ..one };
    for count in counts {
        if count == ACTIVE {
            compare(run, "vnets", &[one, few])?;
            continue;
        }
        if run.left() < START * count as u32 {
            run.miss(format!("{count}: no time to start them; as the only experiment it has"));
            continue;
        }
        let Some(many) = run.attempt(count, |_| start(count)) else { continue };
        let many = VnetContender { x: count, bed: &many, active: count, of: &of_one, ..one };
        let some = VnetContender {
            series: "pdp, 16 with traffic",
            active: ACTIVE,
            of: &of_active,
            ..many
        };
        compare(run, "vnets", &[one, few, many, some])?;
    }
    Ok(())
}

/// Compares some with the first of them, one after the other.
fn with_first(
    run: &mut ExperimentRun,
    x_unit: &str,
    of: &'static str,
    contenders: &[(&str, usize, ForwardingTestbed)],
) -> Result<()> {
    let Some(((series, x, bed), others)) = contenders.split_first() else { return Ok(()) };
    let first = VnetContender { series, x: *x, bed, active: 1, of: &[] };
    for (series, x, bed) in others {
        let other = VnetContender { series, x: *x, bed, of: &[(of, 0)], ..first };
        compare(run, x_unit, &[first, other])?;
    }
    if others.is_empty() { compare(run, x_unit, &[first]) } else { Ok(()) }
}

fn ports(run: &mut ExperimentRun) -> Result<()> {
    let [mux, guest] = run.cores();
    let mut contenders = Vec::new();
    for count in [vec![1], run.choose(&[4, 16, PORTS_MAX], &[16])].concat() {
        contenders.extend(run.attempt(count, |_| {
            let (prefixes, design) = (site::some(PORTS_MAX), Design::fanned(mux, guest, count));
            let stream = site::stream_in_turn(&prefixes, FRAME_BYTES);
            Ok(("pdp", count, ForwardingTestbed::start_with(design, &prefixes, stream)?))
        }));
    }
    with_first(run, "ports", "of one", &contenders)
}

fn guests(run: &mut ExperimentRun) -> Result<()> {
    let [mux, guest] = run.cores();
    let mut contenders = Vec::new();
    for count in [vec![1], run.choose(&[2, 4], &[2])].concat() {
        contenders.extend(run.attempt(count, |_| {
            let design = Design::shared(mux, guest, count);
            Ok(("pdp", count, ForwardingTestbed::start(design, &site::few(), FRAME_BYTES)?))
        }));
    }
    with_first(run, "guests", "of one", &contenders)
}

fn tunnels(run: &mut ExperimentRun) -> Result<()> {
    let [mux, guest] = run.cores();
    let kinds = [
        ("pdp, plain", ExternalDriver::Plain),
        ("pdp, VXLAN over IPv4", ExternalDriver::Vxlan4),
        ("pdp, VXLAN over IPv6", ExternalDriver::Vxlan6),
    ];
    let mut contenders = Vec::new();
    for (series, carrier) in kinds {
        contenders.extend(run.attempt(series, |_| {
            let design = Design { carriers: [carrier; 2], ..Design::plain(mux, guest) };
            Ok((series, FRAME_BYTES, ForwardingTestbed::start(design, &site::few(), FRAME_BYTES)?))
        }));
    }
    with_first(run, "bytes", "of plain", &contenders)
}
