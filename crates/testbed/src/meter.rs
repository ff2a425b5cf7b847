//! CPU cycles of processes and threads, the current
//! speed of a CPU, and the latency between two CPUs.
//!
//! Cycles are those of all threads in user mode and in the kernel. Without hardware counters (as in
//! most virtual machines) they are CPU time multiplied by the frequency that the kernel reports.
//! Then waiting for the host's other guests counts as well.

use std::fmt;
use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::Background;

/// Round trips of one measurement of the latency between two CPUs.
const BOUNCES: u32 = 20_000;

/// Turns of one measurement of a CPU's speed.
const TURNS: u32 = 5_000;

/// Chains of operations in a turn, more than a core has units for.
const CHAINS: usize = 8;

/// Operations in a turn of a chain.
const OPERATIONS: usize = 2;

/// Measurements of a CPU's speed; their median counts.
const TRIES: usize = 5;

/// Processes with this text in this file of /proc.
pub fn processes(file: &str, text: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let has = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/{file}")).is_ok_and(|found| found.contains(text))
    };
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(has).collect()
}

/// A field of the first CPU in /proc/cpuinfo.
pub fn cpu(what: &str) -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(what));
    line.unwrap_or("").trim_start_matches([' ', '\t', ':']).to_owned()
}

/// Half a round trip of a cache line between two CPUs
pub fn cpu_to_cpu_ns(cpus: [usize; 2]) -> f64 {
    let ball = AtomicU32::new(0);
    let play = |cpu: usize, parity: u32| {
        pin(cpu);
        for round in 0..BOUNCES {
            while ball.load(Ordering::Acquire) != 2 * round + parity {
                std::hint::spin_loop();
            }
            ball.store(2 * round + parity + 1, Ordering::Release);
        }
    };
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| play(cpus[0], 0));
        scope.spawn(|| play(cpus[1], 1));
    });
    start.elapsed().as_nanos() as f64 / f64::from(2 * BOUNCES)
}

/// Independent operations of a CPU per cycle of its nominal frequency. If the core's other thread
/// is also busy, it is about half as many. A virtual machine can't see that thread, which may
/// belong to another machine, and its clock reports no stolen time for it.
pub fn operations_a_cycle(cpu: usize, hz: f64) -> f64 {
    let measure = || {
        pin(cpu);
        let mut tries = [(); TRIES].map(|()| {
            let mut chains: [u64; CHAINS] =
                std::hint::black_box(std::array::from_fn(|at| at as u64));
            let key = std::hint::black_box(0x9e37_79b9_7f4a_7c15);
            let start = Instant::now();
            for _ in 0..TURNS {
                for chain in &mut chains {
                    *chain = chain.rotate_left(7) ^ key;
                }
            }
            std::hint::black_box(chains);
            let operations = f64::from(TURNS) * (CHAINS * OPERATIONS) as f64;
            operations / (start.elapsed().as_secs_f64() * hz)
        });
        tries.sort_by(f64::total_cmp);
        tries[TRIES / 2]
    };
    thread::scope(|scope| scope.spawn(measure).join().expect("a CPU of this machine"))
}

/// Pins this thread to one CPU.
pub fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).expect("a CPU of this machine");
}

/// Cycles of a process.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessCycles {
    /// In user mode.
    pub user: f64,
    /// In the kernel.
    pub kernel: f64,
}

/// Method of counting cycles.
#[derive(Clone, Debug)]
pub enum Clock {
    /// By the processor, read through perf.
    Perf,
    /// CPU time multiplied by the CPU's frequency.
    CpuTime {
        /// That frequency, Hz.
        hz: f64,
    },
}

/// Running measurement.
#[derive(Debug)]
pub enum CycleCounter {
    /// `perf stat`.
    Perf(Background),
    /// Threads' CPU times.
    CpuTime {
        /// Their directories in /proc.
        tasks: Vec<String>,
        /// CPU times at the start.
        before: [f64; 3],
    },
}

impl Clock {
    /// Uses the processor's counters if possible.
    pub fn of_this_machine() -> Self {
        let perf = std::process::Command::new("perf")
            .args(["stat", "-x;", "-e", "cycles:u,cycles:k", "true"])
            .output();
        let text = perf.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
        if text.as_deref().is_ok_and(|text| perf_counts(text).is_some()) {
            return Self::Perf;
        }
        Self::CpuTime { hz: cpu("cpu MHz").parse::<f64>().expect("the CPU's frequency") * 1e6 }
    }

    /// Starts counting for these processes, or threads of this process.
    pub fn start(&self, ids: &[u32], threads: bool) -> CycleCounter {
        let texts: Vec<String> = ids.iter().map(u32::to_string).collect();
        match self {
            Self::Perf => {
                let mut command = std::process::Command::new("perf");
                command.args(["stat", "-x;", "-e", "cycles:u,cycles:k"]);
                command.arg(if threads { "-t" } else { "-p" }).arg(texts.join(","));
                let perf = Background::start(&mut command);
                // It prints nothing when counting begins.
                thread::sleep(Duration::from_millis(200));
                CycleCounter::Perf(perf)
            }
            Self::CpuTime { .. } => {
                let tasks: Vec<String> = match threads {
                    true => texts.iter().map(|id| format!("/proc/self/task/{id}")).collect(),
                    false => texts.iter().flat_map(|id| tasks_of(id)).collect(),
                };
                let before = cpu_times(&tasks);
                CycleCounter::CpuTime { tasks, before }
            }
        }
    }

    /// Ends a measurement; returns the cycles used.
    pub fn stop(&self, meter: CycleCounter) -> ProcessCycles {
        match meter {
            CycleCounter::Perf(perf) => {
                let text = perf.stop("INT");
                perf_counts(&text).unwrap_or_else(|| panic!("perf says: {text}"))
            }
            CycleCounter::CpuTime { tasks, before } => {
                let Self::CpuTime { hz } = self else { return ProcessCycles::default() };
                let now = cpu_times(&tasks);
                let [seconds, user, kernel] = [0, 1, 2].map(|i| now[i] - before[i]);
                // Ticks only give the ratio; the time itself is exact.
                let user = if user + kernel > 0.0 { user / (user + kernel) } else { 0.0 };
                ProcessCycles { user: seconds * hz * user, kernel: seconds * hz * (1.0 - user) }
            }
        }
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Perf => write!(f, "counted by the processor (perf stat)"),
            Self::CpuTime { hz } => write!(
                f,
                "CPU time of the threads at {:.0} MHz (no hardware counters here); user and kernel by the kernel's ticks",
                hz / 1e6
            ),
        }
    }
}

/// Cycles in user mode and in the kernel, from the output of `perf stat -x;`.
fn perf_counts(text: &str) -> Option<ProcessCycles> {
    let count = |event: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.contains(event))?;
        line.split(';').next()?.trim().parse().ok()
    };
    Some(ProcessCycles { user: count("cycles:u")?, kernel: count("cycles:k")? })
}

/// CPU time of all threads of processes so far, seconds.
pub fn cpu_s(pids: &[u32]) -> f64 {
    cpu_times(&pids.iter().flat_map(|pid| tasks_of(&pid.to_string())).collect::<Vec<_>>())[0]
}

fn tasks_of(pid: &str) -> Vec<String> {
    let tasks = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&tasks).into_iter().flatten().flatten();
    entries.map(|entry| entry.path().display().to_string()).collect()
}

/// Seconds on a CPU, and ticks in user mode and in the kernel, of these threads.
fn cpu_times(tasks: &[String]) -> [f64; 3] {
    let mut times = [0.0; 3];
    for task in tasks {
        let read = |file: &str| fs::read_to_string(format!("{task}/{file}")).unwrap_or_default();
        let nanoseconds = read("schedstat");
        let nanoseconds = nanoseconds.split(' ').next().and_then(|word| word.parse::<f64>().ok());
        times[0] += nanoseconds.unwrap_or(0.0) / 1e9;
        // After the name in parentheses: state is the third field of proc(5), utime the 14th.
        let stat = read("stat");
        let mut fields = stat.rsplit(") ").next().unwrap_or("").split(' ').skip(11);
        for time in &mut times[1..] {
            *time += fields.next().and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0);
        }
    }
    times
}
