//! `pdp-demo`: Figure 1 of the PdP paper on one machine, with real routing software, the real
//! Internet table and traffic. It is checked and left running to explore.
//!
//! The demo only uses the `pdp` command to control the node, as a user would.
//! Everything outside the node is in network namespaces whose names begin with
//! `pdp-fig1`, or as set by `--name`. The machine's own network namespace stays
//! unchanged. `soak` runs the demo for long, with churn and faults.

#![forbid(unsafe_code)]

mod counters;
mod figure;
mod node;
mod outside;
mod paths;
mod run;
mod soak;
mod table;
mod traffic;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Figure 1 of the PdP paper on one machine.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Name of the demo, to run several at a time. All that it makes is named pdp-NAME or
    /// pdp-NAME.SOMETHING [default: fig1, or soak for `soak`]
    #[arg(long, global = true, value_parser = paths::parse)]
    name: Option<String>,
    #[command(subcommand)]
    verb: DemoCommand,
}

#[derive(Debug, Subcommand)]
enum DemoCommand {
    /// Bring it up, run traffic through it, check everything, and leave it running
    Up {
        /// Directory of the repository, with examples/ and data/.
        #[arg(long, default_value = ".")]
        repo: PathBuf,
        #[command(flatten)]
        figure: figure::Figure1,
    },
    /// Remove every trace
    Down,
    /// Run it under traffic, route churn and random faults, and report leaks and losses
    Soak(soak::Options),
    /// Send numbered datagrams to the addresses in a file; print the number sent
    #[command(hide = true)]
    Generate { targets: PathBuf, run: u32, rounds: u64, pps: u64 },
    /// Receive numbered datagrams until standard input ends; write the arrivals to a file
    #[command(hide = true)]
    Sink { out: PathBuf, run: u32 },
}

fn main() -> anyhow::Result<()> {
    let Args { name, verb } = Args::parse();
    let default =
        if matches!(verb, DemoCommand::Soak(_)) { soak::NAME } else { paths::NAME_DEFAULT };
    paths::set_name(name.unwrap_or_else(|| default.to_owned()));
    match verb {
        DemoCommand::Up { repo, figure } => run::up(&repo, figure),
        DemoCommand::Down => run::down(),
        DemoCommand::Soak(options) => soak::run(&options),
        DemoCommand::Generate { targets, run, rounds, pps } => {
            println!("{}", traffic::generate(&targets, run, rounds, pps)?);
            Ok(())
        }
        DemoCommand::Sink { out, run } => traffic::sink(&out, run),
    }
}
