//! `pdp-demo`: Figure 1 of the PdP paper on one machine, with real routing software, the real
//! Internet table and traffic, checked and left up to explore.
//!
//! The node is driven through the `pdp` command alone, as a user would; everything outside it is
//! network namespaces whose names begin with `pdp-fig1`, or as `--name` has it. Nothing happens in
//! the machine's own network namespace. `soak` runs it for long, under churn and faults.

#![forbid(unsafe_code)]

mod counters;
mod figure;
mod node;
mod outside;
mod place;
mod run;
mod shell;
mod soak;
mod table;
mod traffic;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Figure 1 of the PdP paper on one machine.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Name of the demo, for several at a time: all that it makes is called pdp-NAME or
    /// pdp-NAME.SOMETHING; fig1 if not given, and soak for `soak`.
    #[arg(long, global = true, value_parser = place::parse)]
    name: Option<String>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Bring it up, run traffic through it, check everything, leave it up.
    Up {
        /// Directory of the repository, with examples/ and data/.
        #[arg(long, default_value = ".")]
        repo: PathBuf,
        #[command(flatten)]
        figure: figure::Figure,
    },
    /// Remove every trace.
    Down,
    /// Run it under traffic, route churn and random faults, and report what leaked or was lost.
    Soak(soak::Options),
    /// Send numbered datagrams to the addresses of a file; prints how many were sent.
    #[command(hide = true)]
    Generate { targets: PathBuf, run: u32, rounds: u64, pps: u64 },
    /// Receive numbered datagrams until standard input ends; writes what arrived to a file.
    #[command(hide = true)]
    Sink { out: PathBuf, run: u32 },
}

fn main() -> anyhow::Result<()> {
    let Args { name, verb } = Args::parse();
    let default = if matches!(verb, Verb::Soak(_)) { soak::NAME } else { place::NAME_DEFAULT };
    place::set_name(name.unwrap_or_else(|| default.to_owned()));
    match verb {
        Verb::Up { repo, figure } => run::up(&repo, figure),
        Verb::Down => run::down(),
        Verb::Soak(options) => soak::run(&options),
        Verb::Generate { targets, run, rounds, pps } => {
            println!("{}", traffic::generate(&targets, run, rounds, pps)?);
            Ok(())
        }
        Verb::Sink { out, run } => traffic::sink(&out, run),
    }
}
