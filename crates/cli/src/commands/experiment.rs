//! Measurements of PdP and its peers by the program `pdp-bench`, which lies beside this command.

use std::io;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::failure::CliFailure;

/// Measure PdP and its peers on this machine; without a name, list the experiments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp experiment veth --quick --json veth.json

Uses its own namespaces and node. Needs root, but no daemon. `make bench` runs them all.")]
pub struct ExperimentArgs {
    /// Name of the experiment.
    name: Option<String>,
    /// Shorter runs with fewer parameters.
    #[arg(long, requires = "name")]
    quick: bool,
    /// Number of times to measure everything.
    #[arg(long, requires = "name")]
    rounds: Option<u32>,
    /// Only these parameters, and their baselines.
    #[arg(long, requires = "name", value_delimiter = ',')]
    at: Vec<u32>,
    /// Directory with the binaries of another build. Measures pairs of both builds in turn, one per
    /// round, and prints the ratio of this build to the other.
    #[arg(long, requires = "name")]
    against: Option<PathBuf>,
    /// File for the results [default: bench/results/NAME.json of the repository].
    #[arg(long, requires = "name")]
    json: Option<PathBuf>,
}

/// Runs the experiment and returns its exit code.
pub fn run(experiment: ExperimentArgs) -> Result<ExitCode, CliFailure> {
    let program = std::env::current_exe()?.with_file_name("pdp-bench");
    let mut command = Command::new(&program);
    match experiment.name {
        None => command.arg("list"),
        Some(name) => command.args(["run", &name]),
    };
    if experiment.quick {
        command.arg("--quick");
    }
    if let Some(rounds) = experiment.rounds {
        command.args(["--rounds", &rounds.to_string()]);
    }
    for at in experiment.at {
        command.args(["--at", &at.to_string()]);
    }
    if let Some(directory) = experiment.against {
        command.arg("--against").arg(directory);
    }
    if let Some(json) = experiment.json {
        command.arg("--json").arg(json);
    }
    let status = command.status().map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => "; `make build` builds it, and `make install` leaves it out",
            _ => "",
        };
        CliFailure::Other(format!("run {}: {error}{hint}", program.display()))
    })?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}
