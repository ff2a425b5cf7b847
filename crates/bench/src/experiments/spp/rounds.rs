//! Figure 5: length of a scheduling round of eight busy guests, by how their core is divided.
//!
//! Each guest reads the clock without end and records when it was not
//! running. As in the paper, a round is estimated as that time plus the
//! guest's own part of the core: 8/7 of it if all guests are alike.
//!
//! Limit: a guest records no absence below [`ABSENCE_MIN_US`].
//! Shorter ones are interrupts rather than other guests' slices.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pdp_container::Limits;
use pdp_container::cgroup::{CPU_PERIOD_US, Cgroups};
use pdp_testbed::{TemporaryNode, eventually, meter, output_of};

use crate::experiments::schedulers::weigh;
use crate::peers::pdp::Design;
use crate::run::{ExperimentRun, Point, Reading};
use crate::statistics::quantile;

/// Number of guests, each in its own network.
const GUESTS: usize = 8;

/// Power of each, thousandths of a core: as in the paper, slightly less than an eighth.
const POWER: u32 = 120;

/// Shortest absence that counts.
const ABSENCE_MIN_US: u32 = 300;

/// Division of the core.
#[derive(Clone, Copy, Debug)]
enum RoundSetting {
    /// Quotas of [`POWER`] per period, in microseconds.
    Quota(u64),
    /// No quotas. The first guest has this multiple of the others' weight, and all request slices
    /// of this many microseconds (0: the kernel's default).
    Weights(u64, u64),
}

/// All settings, with their names.
const SETTINGS: [(&str, RoundSetting); 9] = [
    ("quota, 10 ms", RoundSetting::Quota(CPU_PERIOD_US)),
    ("quota, 20 ms", RoundSetting::Quota(20_000)),
    ("quota, 50 ms", RoundSetting::Quota(50_000)),
    ("quota, 100 ms", RoundSetting::Quota(100_000)),
    ("equal weights", RoundSetting::Weights(1, 0)),
    ("equal weights, slice 0.5 ms", RoundSetting::Weights(1, 500)),
    ("equal weights, slice 2 ms", RoundSetting::Weights(1, 2_000)),
    ("equal weights, slice 16 ms", RoundSetting::Weights(1, 16_000)),
    ("one of 4 times the weight", RoundSetting::Weights(4, 0)),
];
const QUICK: [usize; 3] = [0, 4, 5];

/// Grid of round lengths for the distribution, milliseconds.
const GRID_MS: [u32; 19] =
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024];

/// Program of a guest. On SIGUSR1 it prints its absences since the last signal, in microseconds.
fn program() -> String {
    format!(
        "import signal, time
now, absences, told = time.monotonic_ns, [], False
def tell(*_):
    global told
    told = True
signal.signal(signal.SIGUSR1, tell)
print('busy', flush=True)
last = now()
while True:
    at = now()
    if at - last >= {ABSENCE_MIN_US}000:
        absences.append((at - last) // 1000)
    if told:
        print('absences', *absences, flush=True)
        absences, told, at = [], False, now()
    last = at
"
    )
}

/// Requests scheduler slices for processes (sched_setattr(2), `sched_runtime` of SCHED_OTHER; Linux
/// 6.12 or later). Neither chrt(1) of util-linux 2.38 nor a safe library does.
const SLICE: &str = "
import ctypes, os, struct, sys
SYS_SCHED_SETATTR = 314
libc = ctypes.CDLL(None, use_errno=True)
for pid in sys.argv[2:]:
    attr = struct.pack('=IIQiIQQQ', 48, os.SCHED_OTHER, 0, 0, 0, int(sys.argv[1]), 0, 0)
    if libc.syscall(SYS_SCHED_SETATTR, int(pid), attr, 0) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
";

pub(super) fn figure(run: &mut ExperimentRun) -> Result<()> {
    let guests = CoreGuests::start(run.cores())?;
    let settings: Vec<_> = match run.quick() {
        true => QUICK.iter().map(|at| SETTINGS[*at]).collect(),
        false => SETTINGS.to_vec(),
    };
    let time = run.time();
    run.rounds(|run| {
        for (name, setting) in &settings {
            let Some(()) = run.attempt(name, |_| guests.set(*setting)) else { continue };
            let measure = || guests.rounds_ms(*setting, time);
            run.take_points(name, measure, |(rounds, had)| points(name, &rounds, had));
        }
        Ok(())
    })
}

/// Figures of sorted rounds, milliseconds, for guests that had this part of their core, percent.
fn points(name: &str, rounds: &[f64], had: f64) -> Vec<Point> {
    let point = |x: f64, x_unit, readings| Point { series: name.to_owned(), x, x_unit, readings };
    let at = |what, share| Reading::new(what, quantile(rounds, share), "ms");
    let whole = vec![
        at("figure 5: round, median", 0.5),
        at("figure 5: round, p95", 0.95),
        at("figure 5: round, longest", 1.0),
        Reading::new("figure 5: rounds seen", rounds.len() as f64, "rounds"),
        Reading::new("figure 5: of the core, the guests had", had, "%"),
    ];
    let share = |most: u32| {
        let until = rounds.partition_point(|round| *round <= f64::from(most));
        let value = until as f64 / rounds.len() as f64 * 100.0;
        Reading::new("figure 5: rounds no longer than that", value, "%")
    };
    let of_grid = GRID_MS.iter().map(|most| point(f64::from(*most), "ms", vec![share(*most)]));
    [point(GUESTS as f64, "guests", whole)].into_iter().chain(of_grid).collect()
}

/// The guests, on the last core.
struct CoreGuests {
    node: TemporaryNode,
    cgroups: Cgroups,
    cpu: usize,
    processes: Vec<u32>,
}

/// Cgroup of a network, below the node's, and that of its guest.
fn cgroups_of(guest: usize) -> [String; 2] {
    [format!("vnets/_busy{guest}"), format!("vnets/_busy{guest}/_r1.g0")]
}

impl CoreGuests {
    fn start([mux, cpu]: [usize; 2]) -> Result<Self> {
        let node = TemporaryNode::start("busy");
        // Engines with an eighth of the core each.
        let design =
            Design { guests: vec![1000 / GUESTS as u32; GUESTS], ..Design::plain(mux, cpu) };
        let program = serde_json::to_string(&program())?;
        let vnet = |number| {
            format!(
                "---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: busy{number}}}
spec:
  nodes:
    r1:
      kind: router
      dataPlane:
        power: {POWER}m
        program: {{attach: memif, run: [python3, /busy.py], files: {{/busy.py: {{content: {program}}}}}}}
"
            )
        };
        let vnets: String = (0..GUESTS).map(vnet).collect();
        node.apply(&(design.substrate("    S0: {generator: {}}\n") + &vnets));
        let cgroups = Cgroups::new(&node.cgroup())?;
        let mut processes = Vec::new();
        for guest in 0..GUESTS {
            let leaf = format!("{}/guest", cgroups_of(guest)[1]);
            eventually("a guest is busy", || node.log_of(&id(guest)).contains("busy"));
            let programs = meter::processes("comm", "python3");
            // Beside its first process, which waits for it.
            let mut own = cgroups.processes(&leaf)?;
            own.retain(|process| programs.contains(process));
            ensure!(own.len() == 1, "{leaf} has {} processes of the program", own.len());
            processes.extend(own);
        }
        Ok(Self { node, cgroups, cpu, processes })
    }

    /// Applies a setting.
    fn set(&self, setting: RoundSetting) -> Result<()> {
        let (quota, period, first, slice_us) = match setting {
            RoundSetting::Quota(period) => (Some(f64::from(POWER) / 1e3), period, 1, 0),
            RoundSetting::Weights(first, slice_us) => (None, CPU_PERIOD_US, first, slice_us),
        };
        let limits = Limits {
            cpu_cores: quota,
            cpu_period_us: Some(period),
            cpus: Some(self.cpu.to_string()),
            ..Limits::default()
        };
        for guest in 0..GUESTS {
            let [network, own] = cgroups_of(guest);
            self.cgroups.ensure(&own, &limits)?;
            let times = if guest == 0 { first } else { 1 };
            let network = format!("{}/{network}", self.node.cgroup());
            weigh(self.cgroups.version(), &network, times)?;
        }
        let mut slice = Command::new("python3");
        slice.args(["-c", SLICE, &(slice_us * 1000).to_string()]);
        output_of(slice.args(self.processes.iter().map(u32::to_string)), "")
            .with_context(|| format!("slices of {slice_us} µs"))?;
        Ok(())
    }

    /// CPU time of all guests so far, seconds.
    fn cpu_seconds(&self) -> Result<f64> {
        let of = |guest| -> Result<f64> {
            Ok(self.cgroups.usage(&cgroups_of(guest)[1])?.cpu_ns as f64 / 1e9)
        };
        (0..GUESTS).map(of).sum()
    }

    /// Rounds of all guests within `time`, milliseconds, sorted,
    /// and the part of their core that they had, percent.
    fn rounds_ms(&self, setting: RoundSetting, time: Duration) -> Result<(Vec<f64>, f64)> {
        self.absences()?;
        let (used, start) = (self.cpu_seconds()?, Instant::now());
        thread::sleep(time);
        let had = (self.cpu_seconds()? - used) / start.elapsed().as_secs_f64() * 100.0;
        let all = self.absences()?;
        let first = if let RoundSetting::Weights(first, _) = setting { first } else { 1 };
        let sum = (first + GUESTS as u64 - 1) as f64;
        let mut rounds = Vec::new();
        for (guest, absences) in all.iter().enumerate() {
            let part = if guest == 0 { first as f64 } else { 1.0 } / sum;
            rounds.extend(absences.iter().map(|absence| absence / 1e3 / (1.0 - part)));
        }
        ensure!(!rounds.is_empty(), "no guest was ever absent");
        rounds.sort_by(f64::total_cmp);
        Ok((rounds, had))
    }

    /// Absences of each guest since the last call, microseconds.
    fn absences(&self) -> Result<Vec<Vec<f64>>> {
        let reports = |guest| -> Vec<String> {
            let log = self.node.log_of(&id(guest));
            // Skips an incomplete line.
            let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let reports = whole.lines().filter_map(|line| line.split_once("absences"));
            reports.map(|(_, reports)| reports.to_owned()).collect()
        };
        let before: Vec<usize> = (0..GUESTS).map(|guest| reports(guest).len()).collect();
        for process in &self.processes {
            pdp_testbed::sh(&format!("kill -USR1 {process}"));
        }
        let mut all = Vec::new();
        for (guest, before) in before.into_iter().enumerate() {
            let mut now = Vec::new();
            eventually("a guest answers", || {
                now = reports(guest);
                now.len() > before
            });
            let last = now.last().context("an answer")?;
            let absences = last.split_whitespace().map(str::parse::<f64>);
            all.push(absences.collect::<Result<_, _>>().context("absences")?);
        }
        Ok(all)
    }
}

/// Identifies a guest's log.
fn id(guest: usize) -> String {
    format!("busy{guest}.r1.g0")
}
