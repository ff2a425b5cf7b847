//! Routers between two veth devices: PdP, the kernel, Open vSwitch in user space.

use std::time::Duration;

use anyhow::Result;
use pdp_testbed::meter::Clock;

use super::{BenchExperiment, Subject};
use crate::live::Load;
use crate::peers::kernel;
use crate::peers::ovs::{Ovs, OvsDevice};
use crate::peers::pdp::{Design, Pdp, site_interfaces};
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, Prefix, Site};

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "veth",
    about: "veth to veth at saturation, 64-byte packets, 2 routes and the full table",
    seconds: 220,
    subject: Subject::Pdp,
    run,
};

pub(super) const LOAD: BenchExperiment = BenchExperiment {
    name: "veth-load",
    about: "veth to veth, 2 routes: what comes out of what is offered; the generator keeps its core \
            busy, which receiving ends in interrupts and the guest of PdP on two cores share with it",
    seconds: 290,
    subject: Subject::Pdp,
    run: load,
};

/// Length of a frame without FCS, bytes.
const FRAME_BYTES: usize = 64;

/// Loads of [`LOAD`], million frames per second.
const LOADS_MPPS: [f64; 5] = [0.1, 0.2, 0.4, 0.8, 1.6];
const LOADS_QUICK_MPPS: [f64; 2] = [0.1, 0.4];

/// Forwarder at its own site.
enum VethPeer {
    /// In interrupts of the generator's core, or in its own thread on another core.
    Kernel {
        own_core: Option<usize>,
    },
    Ovs(Ovs),
    Pdp(Pdp),
}

/// A series and the function that starts its peer at a site.
type VethSetup<'a> = (&'static str, &'a dyn Fn(&mut Site) -> Result<VethPeer>);

struct VethContender {
    series: &'static str,
    site: Site,
    peer: VethPeer,
}

impl VethContender {
    /// Takes one sample.
    fn offer(&self, load: Load, time: Duration, clock: &Clock) -> Result<Vec<Reading>> {
        match &self.peer {
            VethPeer::Kernel { own_core } => {
                let threads = kernel::set_own_core(&self.site.node.namespace(), *own_core);
                self.site.offer(load, time, &threads, clock)
            }
            VethPeer::Ovs(ovs) => {
                ovs.wake();
                let readings = self.site.offer(load, time, &[ovs.pid()], clock);
                ovs.sleep();
                readings
            }
            VethPeer::Pdp(pdp) => self.site.offer(load, time, &pdp.processes, clock),
        }
    }

    /// Adds routes. False if the peer can't have them.
    fn add_routes(&self, prefixes: &[Prefix]) -> Result<bool> {
        match &self.peer {
            VethPeer::Kernel { .. } => kernel::add_routes(&self.site, prefixes)?,
            VethPeer::Ovs(_) => return Ok(false),
            VethPeer::Pdp(pdp) => pdp.add_routes(&self.site.node, prefixes)?,
        }
        Ok(true)
    }
}

fn pdp(site: &mut Site, design: &Design, attach: &str) -> Result<VethPeer> {
    site.node.start_pdpd();
    Ok(VethPeer::Pdp(Pdp::start(&site.node, design, &site_interfaces(attach))?))
}

fn pdp_by_packet_sockets(site: &mut Site, design: &Design) -> Result<VethPeer> {
    let pdp = pdp(site, design, "packet")?;
    // PdP turns it off for packet sockets, but frames of the generator need it.
    site.node.namespace().run("ethtool -K extA gro on");
    Ok(pdp)
}

/// Every contender that this machine can run, with two routes. The contender uses the first core
/// and the generator the last. PdP's guest runs beside the generator, or beside the mux.
fn contenders(run: &mut ExperimentRun) -> Vec<VethContender> {
    let [core, generator_core] = run.cores();
    let mut contenders = Vec::new();
    let makers: [VethSetup<'_>; 8] = [
        ("kernel, in interrupts", &|site| {
            kernel::start(site);
            Ok(VethPeer::Kernel { own_core: None })
        }),
        ("kernel, own core", &|site| {
            kernel::start(site);
            Ok(VethPeer::Kernel { own_core: Some(core) })
        }),
        ("ovs, packet sockets", &|site| {
            Ok(VethPeer::Ovs(Ovs::start(site, OvsDevice::Packet, core)?))
        }),
        ("ovs, AF_XDP", &|site| Ok(VethPeer::Ovs(Ovs::start(site, OvsDevice::Xdp, core)?))),
        ("pdp, two cores", &|site| pdp(site, &Design::plain(core, generator_core), "af-xdp")),
        ("pdp, busy polling", &|site| {
            pdp(site, &Design::plain(core, generator_core), "af-xdp-busy-poll")
        }),
        ("pdp, packet sockets", &|site| {
            pdp_by_packet_sockets(site, &Design::plain(core, generator_core))
        }),
        ("pdp, one core", &|site| pdp(site, &Design::plain(core, core), "af-xdp")),
    ];
    for (series, make) in makers {
        if !run.wants_series(series) {
            continue;
        }
        let made = run.attempt(series, |_| {
            let mut site = Site::make("veth");
            let peer = make(&mut site)?;
            let mut contender = VethContender { series, site, peer };
            contender.add_routes(&site::few())?;
            contender.site.aim(&site::few(), FRAME_BYTES, generator_core)?;
            Ok(contender)
        });
        contenders.extend(made);
    }
    contenders
}

fn run(run: &mut ExperimentRun) -> Result<()> {
    let clock = Clock::of_this_machine();
    let (time, generator_core) = (run.time() / 2, run.cores()[1]);
    let mut contenders = contenders(run);
    if run.wants(2) {
        saturate(run, &contenders, 2, time, &clock)?;
    }
    let internet = site::internet()?;
    if run.quick() || !run.wants(internet.len()) {
        return Ok(());
    }
    let mut with_table = Vec::new();
    for mut contender in contenders.drain(..) {
        let added = run.attempt(format!("{}, full table", contender.series), |_| {
            if !contender.add_routes(&internet)? {
                return Ok(None);
            }
            contender.site.aim(&internet, FRAME_BYTES, generator_core)?;
            Ok(Some(contender))
        });
        with_table.extend(added.flatten());
    }
    saturate(run, &with_table, internet.len(), time, &clock)
}

fn saturate(
    run: &mut ExperimentRun,
    contenders: &[VethContender],
    routes: usize,
    time: Duration,
    clock: &Clock,
) -> Result<()> {
    run.rounds(|run| {
        for contender in contenders {
            let offer = || contender.offer(Load::Most, time, clock);
            run.take(contender.series, routes as f64, "routes", offer);
        }
        Ok(())
    })
}

fn load(run: &mut ExperimentRun) -> Result<()> {
    let clock = Clock::of_this_machine();
    let time = run.time() / 4;
    let loads: &[f64] = if run.quick() { &LOADS_QUICK_MPPS } else { &LOADS_MPPS };
    let contenders = contenders(run);
    run.rounds(|run| {
        for &load in loads {
            for contender in &contenders {
                let offer = || contender.offer(Load::Even(load * 1e6), time, &clock);
                run.take(contender.series, load, "Mpps offered", offer);
            }
        }
        Ok(())
    })
}
