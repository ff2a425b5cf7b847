//! `pdp-bench`: measures PdP and its peers on this machine.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use pdp_bench::experiments::{self, Experiment};
use pdp_bench::report;
use pdp_bench::run::{self, Effort, Run};
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
  pdp-bench run                        # all of them
  pdp-bench report                     # plots and REPORT.md, from the results that are there"
)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// List the experiments
    List,
    /// Run experiments and write their results
    Run {
        /// Experiments; none: all
        names: Vec<String>,
        /// Shorter runs with fewer parameters
        #[arg(long)]
        quick: bool,
        /// Times that everything is measured [default: 3, with --quick 2]
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
        rounds: Option<u32>,
        /// File for the results, of one experiment [default: bench/results/NAME.json]
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Write plots and REPORT.md from the results
    Report {
        /// Directory with `results/`, for `plots/` and `REPORT.md`
        #[arg(long, default_value = "bench")]
        directory: PathBuf,
    },
}

/// Rounds unless told otherwise.
const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 2;

fn main() -> ExitCode {
    match work(Args::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pdp-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn work(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::List => {
            for experiment in experiments::ALL {
                println!("{:<14} {}", experiment.name, experiment.about);
            }
        }
        Verb::Run { names, quick, rounds, json } => {
            let chosen = chosen(&names)?;
            anyhow::ensure!(json.is_none() || chosen.len() == 1, "--json is for one experiment");
            let rounds = rounds.unwrap_or(if quick { ROUNDS_QUICK } else { ROUNDS });
            let mut code = ExitCode::SUCCESS;
            run::end_on_signals()?;
            for (number, experiment) in chosen.iter().enumerate() {
                eprint!("[{}/{}] ", number + 1, chosen.len());
                let results = Run::of(experiment, Effort { rounds, quick });
                anyhow::ensure!(
                    !run::interrupted(),
                    "interrupted; {} is not kept",
                    experiment.name
                );
                let usual = || repository().join(format!("bench/results/{}.json", experiment.name));
                let path = json.clone().unwrap_or_else(usual);
                results.write(&path)?;
                let (count, seconds) = (results.samples.len(), results.seconds);
                eprintln!("  {count} samples in {seconds} s: {}", path.display());
                if results.samples.is_empty() {
                    code = ExitCode::FAILURE;
                }
            }
            return Ok(code);
        }
        Verb::Report { directory } => report::write(&directory)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn chosen(names: &[String]) -> Result<Vec<&'static Experiment>> {
    if names.is_empty() {
        return Ok(experiments::ALL.iter().collect());
    }
    let named = |name: &String| {
        experiments::named(name)
            .with_context(|| format!("no experiment {name}; pdp-bench list shows all"))
    };
    names.iter().map(named).collect()
}
