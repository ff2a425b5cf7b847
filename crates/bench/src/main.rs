//! `pdp-bench`: measures PdP and its peers on this machine.

#![forbid(unsafe_code)]

use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use pdp_bench::against::Comparison;
use pdp_bench::experiments::{self, BenchExperiment};
use pdp_bench::machine;
use pdp_bench::report;
use pdp_bench::run::{Effort, ExperimentRun};
use pdp_bench::site::repository;

/// Measures PdP and its peers on this machine
#[derive(Parser)]
#[command(
    name = "pdp-bench",
    version,
    after_help = "Examples:
  pdp-bench list
  pdp-bench run veth --quick
  pdp-bench run veth rtt --rounds 7
  pdp-bench run vnets --at 16,64 --binaries target/release
  pdp-bench run router --at 2 --against /path/of/another/build
  pdp-bench run                        # all of them
  pdp-bench report                     # plots and REPORT.md, from existing results"
)]
struct Args {
    #[command(subcommand)]
    verb: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// List the experiments
    List,
    /// Run experiments and write their results
    Run {
        /// Experiments; none: all
        names: Vec<String>,
        /// Shorter runs with fewer parameters
        #[arg(long)]
        quick: bool,
        /// Rounds of all measurements [default: 3, with --quick 2]
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
        rounds: Option<u32>,
        /// Only these parameters, and their references for comparison [default: all]
        #[arg(long, value_delimiter = ',')]
        at: Vec<usize>,
        /// PdP without its peers
        #[arg(long)]
        alone: bool,
        /// Directory with the binaries of PdP to measure [default: that of this program]
        #[arg(long)]
        binaries: Option<PathBuf>,
        /// Directory with the binaries of another build to compare with:
        /// alternating pairs, as many as rounds [default: 12], each from
        /// its own start, with the ratio of this build to the other
        #[arg(long, conflicts_with = "minutes", requires = "names")]
        against: Option<PathBuf>,
        /// Commit of that other build, for the report
        #[arg(long, requires = "against", default_value = "another build")]
        commit: String,
        /// Time limit in minutes; experiments beyond it are missing [default: no limit]
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1440))]
        minutes: Option<u32>,
        /// File for the results, of one experiment [default: bench/results/NAME.json]
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Forward each datagram received at an address to
    /// another one; figure 9 of `spp` runs this in a guest
    #[command(hide = true)]
    ForwardUdp {
        /// Address that receives datagrams
        from: SocketAddr,
        /// Address that they are sent to
        to: SocketAddr,
    },
    /// Write plots and REPORT.md from the results
    Report {
        /// Directory with `results/`, for `plots/` and `REPORT.md`
        #[arg(long, default_value = "bench")]
        directory: PathBuf,
    },
}

/// Default number of rounds.
const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 2;
/// Default number of pairs of two builds.
const PAIRS: u32 = 12;

/// Fraction of the later experiments' usual time that is reserved while earlier ones run.
const KEPT_SHARE: f64 = 0.75;

fn main() -> ExitCode {
    match work(Args::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pdp-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn work(verb: BenchCommand) -> Result<ExitCode> {
    match verb {
        BenchCommand::List => {
            for experiment in experiments::ALL {
                println!("{:<14} {}", experiment.name, experiment.about);
            }
        }
        BenchCommand::Run {
            names,
            quick,
            rounds,
            at,
            alone,
            binaries,
            against,
            commit,
            minutes,
            json,
        } => {
            let chosen = chosen(&names)?;
            anyhow::ensure!(json.is_none() || chosen.len() == 1, "--json is for one experiment");
            if let Some(before) = against {
                let effort = Effort { rounds: rounds.unwrap_or(PAIRS), quick, at, alone: true };
                return compare(&chosen, &effort, binaries.as_deref(), (&before, &commit), json);
            }
            let rounds = rounds.unwrap_or(if quick { ROUNDS_QUICK } else { ROUNDS });
            let minutes = minutes.map(|minutes| Duration::from_secs(60 * u64::from(minutes)));
            if let Some(directory) = binaries {
                pdp_testbed::use_binaries_from(&directory);
            }
            let effort = Effort { rounds, quick, at, alone };
            return measure(&chosen, names.is_empty(), &effort, minutes, json);
        }
        BenchCommand::ForwardUdp { from, to } => forward(from, to)?,
        BenchCommand::Report { directory } => report::write(&directory)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Forwards datagrams one by one, without end.
fn forward(from: SocketAddr, to: SocketAddr) -> Result<()> {
    let socket = UdpSocket::bind(from).with_context(|| from.to_string())?;
    let mut bytes = [0; 2048];
    loop {
        let count = socket.recv(&mut bytes)?;
        // If its socket is full, the datagram is lost, as in any network.
        let _ = socket.send_to(&bytes[..count], to);
    }
}

/// Measures. The exit code is 0 if each experiment finished with results. Before a run of `all`,
/// removes results of earlier runs, so that none of them is taken for one of this run.
fn measure(
    chosen: &[&BenchExperiment],
    all: bool,
    effort: &Effort,
    time: Option<Duration>,
    json: Option<PathBuf>,
) -> Result<ExitCode> {
    anyhow::ensure!(
        machine::first_output_line("id", &["-u"]) == "0",
        "needs root, for namespaces and cgroups"
    );
    pdp_testbed::end_on_signals()?;
    machine::tell_what_lacks();
    let path = |experiment: &BenchExperiment| {
        let usual = || repository().join(format!("bench/results/{}.json", experiment.name));
        json.clone().unwrap_or_else(usual)
    };
    for old in chosen.iter().map(|experiment| path(experiment)).filter(|path| all && path.exists())
    {
        fs::remove_file(&old).with_context(|| old.display().to_string())?;
    }
    let start = Instant::now();
    let end = time.map(|time| start + time);
    let mut failed: Vec<&str> = Vec::new();
    for (number, experiment) in chosen.iter().enumerate() {
        let left = |from: usize| chosen[from..].iter().map(|e| e.usual(effort.quick)).sum();
        let (now, later): (Duration, Duration) = (left(number), left(number + 1));
        eprintln!(
            "[{}/{}] {} min since the start, usually {} min more",
            number + 1,
            chosen.len(),
            minutes(start.elapsed()),
            minutes(now)
        );
        let kept = later.mul_f64(KEPT_SHARE);
        let own_end = end.map(|end| end.checked_sub(kept).unwrap_or(start));
        let (results, whole) = ExperimentRun::of(experiment, effort, own_end);
        anyhow::ensure!(
            !pdp_testbed::interrupted(),
            "interrupted; {} is not kept",
            experiment.name
        );
        let path = path(experiment);
        results.write(&path)?;
        let (count, seconds) = (results.samples.len(), results.seconds);
        eprintln!("  {count} samples in {seconds} s: {}", path.display());
        if !whole {
            failed.push(experiment.name);
        }
    }
    eprintln!("{} min in all", minutes(start.elapsed()));
    if !failed.is_empty() {
        eprintln!("failed or unfinished: {}", failed.join(", "));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Compares two builds. The exit code is 0 if no figure is worse than the previous build's.
fn compare(
    chosen: &[&BenchExperiment],
    effort: &Effort,
    now: Option<&Path>,
    (before, commit): (&Path, &str),
    json: Option<PathBuf>,
) -> Result<ExitCode> {
    pdp_testbed::end_on_signals()?;
    let mut is_slower = false;
    for experiment in chosen {
        let comparison = Comparison::of(experiment, effort, now, before, commit)?;
        let usual = || repository().join(Comparison::file(experiment.name));
        comparison.write(&json.clone().unwrap_or_else(usual))?;
        print!("{}", comparison.table());
        is_slower |= comparison.ratios().iter().any(|r| r.is_no_slower() == Some(false));
    }
    Ok(if is_slower { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Formats a time for people.
fn minutes(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() / 60.0)
}

fn chosen(names: &[String]) -> Result<Vec<&'static BenchExperiment>> {
    if names.is_empty() {
        return Ok(experiments::ALL.iter().collect());
    }
    let named = |name: &String| {
        experiments::named(name)
            .with_context(|| format!("no experiment {name}; pdp-bench list shows all"))
    };
    names.iter().map(named).collect()
}
