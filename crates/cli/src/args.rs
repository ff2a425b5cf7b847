//! Arguments of the command line.

use clap::builder::Resettable;
use clap::{CommandFactory, Parser, Subcommand};

use crate::commands::{
    access, capture, change, cp, events, exec, experiment, export, fastpath, fdb, get, images,
    inspect, machine, restart, routes, stats, top, validate, wait, watch,
};
use crate::daemon::connection::Connection;

/// Host isolated virtual networks on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "pdp",
    version,
    max_term_width = 100,
    propagate_version = false,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon answers; exec and \
                  shell pass the command's on.\n\n\
                  Example: pdp up examples/ospf.yaml && pdp inspect ospf"
)]
pub struct Args {
    #[command(flatten)]
    pub connection: Connection,
    #[command(subcommand)]
    pub command: CliCommand,
}

impl Args {
    /// Reads the command line.
    ///
    /// # Errors
    /// Invalid command line. A usage in the error shows the options that were given there, and no
    /// values of the environment.
    pub fn read() -> Result<Self, clap::Error> {
        Self::try_parse().map_err(|error| {
            // Help names the environment variables, so it stays as it is.
            if !error.use_stderr() {
                return error;
            }
            let command = Self::command().mut_args(|arg| arg.env(Resettable::Reset));
            command.try_get_matches().err().unwrap_or(error)
        })
    }
}

#[derive(Debug, Subcommand)]
pub enum CliCommand {
    Up(change::UpArgs),
    Down(change::DownArgs),
    Apply(change::ApplyArgs),
    Delete(change::DeleteArgs),
    Export(export::ExportArgs),
    #[command(visible_alias = "list")]
    Get(get::GetArgs),
    Inspect(inspect::InspectArgs),
    Wait(wait::WaitArgs),
    Exec(exec::ExecArgs),
    Cp(cp::CpArgs),
    Shell(exec::ShellArgs),
    Logs(watch::LogsArgs),
    Link(change::LinkArgs),
    Fdb(fdb::FdbArgs),
    Scale(change::ScaleArgs),
    Restart(restart::RestartArgs),
    Stats(stats::StatsArgs),
    Events(events::EventsArgs),
    Top(top::TopArgs),
    Routes(routes::RoutesArgs),
    Fastpath(fastpath::FastpathArgs),
    Capture(capture::CaptureArgs),
    Trace(watch::TraceArgs),
    Validate(validate::ValidateArgs),
    #[command(visible_alias = "image")]
    Images(images::ImagesArgs),
    Token(access::TokenArgs),
    Audit(access::AuditArgs),
    Doctor(machine::DoctorArgs),
    Experiment(experiment::ExperimentArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "Example: source <(pdp completion bash)")]
    Completion {
        /// Name of the shell.
        shell: clap_complete::Shell,
    },
    Version(machine::VersionArgs),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_verb_has_an_example() {
        let mut command = Args::command();
        command.build();
        command.clone().debug_assert();
        for verb in command.get_subcommands().filter(|verb| verb.get_name() != "help") {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = format!("pdp {}", verb.get_name());
            assert!(help.contains(&example), "{}: no example", verb.get_name());
            assert!(verb.get_about().is_some(), "{}: not described", verb.get_name());
        }
    }
}
