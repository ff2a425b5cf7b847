//! Round trips under load, for several ways to schedule the CPU of a forwarding guest.
//!
//! The path is that of `rtt`. The guest shares its core with another virtual network, whose guest
//! computes without end (a hog). Each gets half of the core. The mux, the other load's generator
//! and both machines' programs use the other core. So settings only differ in the scheduling of the
//! guest. PdP's own setting is a quota in periods of 10 ms. The others are set by hand in its
//! place, to show what they would achieve.
//!
//! Limit: real-time scheduling and weights are set for the router's guest, not for hogs or the mux.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pdp_container::Limits;
use pdp_container::cgroup::{CPU_PERIOD_US, CgroupVersion, Cgroups};
use pdp_testbed::meter::{self, Clock};
use pdp_testbed::{eventually, output_of};

use super::rtt::EchoSocket;
use super::{BenchExperiment, Subject};
use crate::live::Load;
use crate::peers::pdp::{Design, Pdp, site_interfaces};
use crate::run::{ExperimentRun, Reading};
use crate::site::{self, Site};
use crate::statistics::quantile;

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "schedulers",
    about: "round-trip time of a UDP echo under load, by how the forwarding guest is scheduled: its \
            core is shared with a hog, half for each",
    seconds: 90,
    subject: Subject::Pdp,
    run,
};

/// Scheduling of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SchedulerSetting {
    /// Half of the core as a quota per period, in microseconds, with or without the hog.
    Quota { period_us: u64, hog: bool },
    /// No quotas. The guest's weight is this multiple of the hog's.
    Weight(u64),
    /// No quota, and the hog in SCHED_IDLE (sched(7)).
    IdleHog,
    /// No quota, and the guest in SCHED_FIFO.
    RealTime,
}

/// All settings, with their names.
const SETTINGS: [(&str, SchedulerSetting); 8] = [
    ("quota, 10 ms, no hog", SchedulerSetting::Quota { period_us: CPU_PERIOD_US, hog: false }),
    ("quota, 10 ms", SchedulerSetting::Quota { period_us: CPU_PERIOD_US, hog: true }),
    ("quota, 5 ms", SchedulerSetting::Quota { period_us: 5_000, hog: true }),
    ("quota, 100 ms", SchedulerSetting::Quota { period_us: 100_000, hog: true }),
    ("weight 1:1", SchedulerSetting::Weight(1)),
    ("weight 64:1", SchedulerSetting::Weight(64)),
    ("hog idle class", SchedulerSetting::IdleHog),
    ("guest real-time", SchedulerSetting::RealTime),
];

/// Other load through the same router, thousand frames per second.
const LOADS_KPPS: [u32; 2] = [0, 100];

/// Power of guest and hog, thousandths of a core.
const HALF: u32 = 500;

/// The hog's virtual network: its guest connects to nothing.
const HOG: &str = r#"apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: hog}
spec:
  nodes:
    r1:
      kind: router
      dataPlane:
        power: 500m
        program: {attach: memif, run: ["sh", "-c", "while :; do :; done"]}
"#;

/// Cgroups below the node's: the one with the weight, and those with the quotas.
const ROUTER: &str = "vnets/_bench0";
const ROUTER_GUEST: &str = "vnets/_bench0/_r1.g0";
const HOG_GUEST: &str = "vnets/_hog/_r1.g0";

/// The usual weight in cgroup version 1, and in version 2, where the least is 1.
const WEIGHT_V1: u64 = 1024;
const WEIGHT_V2: u64 = 100;

/// Microseconds per second for real-time processes, at each level down to the guest.
const REAL_TIME_US: [u32; 5] = [900_000, 850_000, 800_000, 800_000, 800_000];

fn run(run: &mut ExperimentRun) -> Result<()> {
    let (clock, time) = (Clock::of_this_machine(), run.time() / 2);
    let settings = if run.quick() { &SETTINGS[..2] } else { &SETTINGS };
    let bed = SchedulerTestbed::start(run.cores())?;
    run.rounds(|run| {
        for (name, setting) in settings {
            let Some(()) = run.attempt(name, |_| bed.set(*setting)) else { continue };
            for load_kpps in LOADS_KPPS {
                run.take(name, load_kpps.into(), "kpps beside", || {
                    bed.trips(f64::from(load_kpps) * 1e3, time, &clock)
                });
            }
        }
        Ok(())
    })
}

/// Router, hog, and the senders.
struct SchedulerTestbed {
    echo: EchoSocket,
    site: Site,
    pdp: Pdp,
    hog: Vec<u32>,
    cgroups: Cgroups,
    /// The CPU of everything else, and the CPU of guest and hog.
    cpus: [usize; 2],
}

impl SchedulerTestbed {
    fn start(cpus: [usize; 2]) -> Result<Self> {
        let [other, shared] = cpus;
        let mut site = Site::make("sched");
        site.add_hosts();
        site.node.start_pdpd();
        let design = Design { guests: vec![HALF], ..Design::plain(other, shared) };
        let pdp = Pdp::start(&site.node, &design, &site_interfaces("af-xdp"))?;
        pdp.add_routes(&site.node, &site::few())?;
        // A second engine on the same CPU.
        let both = Design { guests: vec![HALF; 2], ..design };
        site.node.apply(&format!("{}---\n{HOG}", both.substrate(&site_interfaces("af-xdp"))));
        let cgroups = Cgroups::new(&site.node.cgroup())?;
        let mut hog = Vec::new();
        eventually("the hog runs", || {
            hog = cgroups.processes(&format!("{HOG_GUEST}/guest")).unwrap_or_default();
            !hog.is_empty()
        });
        site.aim(&site::few(), 64, other)?;
        let echo = thread::scope(|scope| {
            // Its answering thread stays on this CPU too.
            let start = scope.spawn(|| {
                meter::pin(other);
                EchoSocket::start(&site)
            });
            start.join().ok().context("the echo")?
        })?;
        Ok(Self { echo, site, pdp, hog, cgroups, cpus })
    }

    /// Applies a setting to guest and hog, and clears the previous one.
    fn set(&self, setting: SchedulerSetting) -> Result<()> {
        let (quota, period) = match setting {
            SchedulerSetting::Quota { period_us, .. } => (Some(f64::from(HALF) / 1e3), period_us),
            _ => (None, CPU_PERIOD_US),
        };
        let limits = Limits {
            cpu_cores: quota,
            cpu_period_us: Some(period),
            cpus: Some(self.cpus[1].to_string()),
            ..Limits::default()
        };
        for guest in [ROUTER_GUEST, HOG_GUEST] {
            self.cgroups.ensure(guest, &limits)?;
        }
        let version = self.cgroups.version();
        let weight = if let SchedulerSetting::Weight(times) = setting { times } else { 1 };
        weigh(version, &format!("{}/{ROUTER}", self.site.node.cgroup()), weight)?;
        let real_time = setting == SchedulerSetting::RealTime;
        if real_time && version == CgroupVersion::V1 {
            let path = format!("{}/{ROUTER_GUEST}/guest", self.site.node.cgroup());
            let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
            for (end, most_us) in ends.zip(REAL_TIME_US) {
                write(version, &path[..end], "cpu.rt_runtime_us", most_us.into())?;
            }
        }
        schedule(&self.pdp.processes[1..], if real_time { "--fifo 1" } else { "--other 0" })?;
        let idle = setting == SchedulerSetting::IdleHog;
        schedule(&self.hog, if idle { "--idle 0" } else { "--other 0" })?;
        let runs = !matches!(setting, SchedulerSetting::Quota { hog: false, .. });
        for process in &self.hog {
            pdp_testbed::sh(&format!("kill -{} {process}", if runs { "CONT" } else { "STOP" }));
        }
        Ok(())
    }

    /// Measures round trips beside a load.
    fn trips(&self, load_pps: f64, time: Duration, clock: &Clock) -> Result<Vec<Reading>> {
        let (trips, offered) = thread::scope(|scope| {
            let trips = scope.spawn(|| {
                meter::pin(self.cpus[0]);
                self.echo.trips_for(time)
            });
            let offered = (load_pps > 0.0)
                .then(|| self.site.offer(Load::Bursts(load_pps), time, &self.pdp.processes, clock))
                .transpose();
            (trips.join(), offered)
        });
        let times = trips.ok().context("the echo")??;
        let note = offered?.map_or(String::new(), |readings| {
            let lost = readings.iter().find(|reading| reading.what() == "loss");
            match lost.map_or(0.0, Reading::value) {
                lost if lost >= 1.0 => "of the load beside it some was lost".to_owned(),
                _ => String::new(),
            }
        });
        ensure!(times.len() > 1, "no round trips");
        let at = |what, share| Reading::new(what, quantile(&times, share), "µs").notes(&*note);
        Ok(vec![at("median", 0.5), at("p99", 0.99)])
    }
}

/// Sets a multiple of the usual weight for a cgroup of the CPU controller.
pub(super) fn weigh(version: CgroupVersion, cgroup: &str, times: u64) -> Result<()> {
    let (file, usual) = match version {
        CgroupVersion::V1 => ("cpu.shares", WEIGHT_V1),
        CgroupVersion::V2 => ("cpu.weight", WEIGHT_V2),
    };
    write(version, cgroup, file, usual * times)
}

/// Writes a file of a cgroup of the CPU controller.
fn write(version: CgroupVersion, cgroup: &str, file: &str, value: u64) -> Result<()> {
    let root = match version {
        CgroupVersion::V1 => "/sys/fs/cgroup/cpu",
        CgroupVersion::V2 => "/sys/fs/cgroup",
    };
    let path = Path::new(root).join(cgroup).join(file);
    fs::write(&path, value.to_string()).with_context(|| path.display().to_string())
}

/// Sets policy and priority of processes, in the words of chrt(1).
fn schedule(processes: &[u32], words: &str) -> Result<()> {
    let (policy, priority) = words.split_once(' ').context("policy and priority")?;
    for process in processes {
        let mut command = std::process::Command::new("chrt");
        command.args(["--all-tasks", policy, "--pid", priority, &process.to_string()]);
        output_of(&mut command, "")?;
    }
    Ok(())
}
