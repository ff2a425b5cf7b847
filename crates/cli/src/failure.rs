//! Failures of commands: messages on standard error, and exit codes.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use pdp_api::Problem;
use pdp_api::client::Error;
use pdp_api::exec::ExecFrameError;
use pdp_spec::{Diagnostic, SourceFile};

/// Exit code of a failure.
const FAILED: u8 = 1;
/// Exit code of a wrong command line, the same as clap's.
const USAGE: u8 = 2;
/// Exit code if no daemon answers.
const NO_DAEMON: u8 = 3;

/// Cause of a command's failure.
#[derive(Debug, thiserror::Error)]
pub enum CliFailure {
    /// The daemon refuses or does not answer.
    #[error(transparent)]
    Api(#[from] Error),
    /// Reading or writing on this machine failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The connection of a command in a guest broke off.
    #[error(transparent)]
    Frame(#[from] ExecFrameError),
    /// The command line makes no sense.
    #[error("{0}")]
    Usage(String),
    /// Another failure; the text tells why and what to do.
    #[error("{0}")]
    Other(String),
    /// Files have errors.
    #[error("{} in the files", pdp_spec::count(.0.len(), "fault"))]
    Files(Vec<Diagnostic>, Vec<SourceFile>),
}

impl CliFailure {
    /// If the daemon refused files, returns a failure that shows their lines.
    pub fn about(self, files: &[SourceFile]) -> Self {
        match self {
            Self::Api(Error::Problem(problem)) if !problem.diagnostics.is_empty() => {
                Self::Files(problem.diagnostics, files.to_vec())
            }
            other => other,
        }
    }

    /// Prints the failure on standard error. Returns the exit code.
    pub fn report(self) -> ExitCode {
        if self.is_broken_pipe() {
            // The reader of the output needs no more.
            return ExitCode::SUCCESS;
        }
        let (text, code) = self.text();
        let _ = io::stderr().write_all(text.as_bytes());
        ExitCode::from(code)
    }

    fn is_broken_pipe(&self) -> bool {
        match self {
            Self::Io(error) | Self::Api(Error::Io(error)) => {
                error.kind() == io::ErrorKind::BrokenPipe
            }
            _ => false,
        }
    }

    /// Returns the message and the exit code.
    pub fn text(&self) -> (String, u8) {
        match self {
            Self::Api(Error::NoDaemon { place, source }) => {
                let denied = source.kind() == io::ErrorKind::PermissionDenied;
                let hint = match (denied, place.starts_with('/')) {
                    (true, _) => "this user may not open a directory above it; ask an operator",
                    (_, true) => {
                        "start it with `pdp up`, or select another with --name or --socket"
                    }
                    (_, false) => "start it there with --listen, or correct --server or PDP_SERVER",
                };
                (format!("error: no daemon at {place}: {source}\nhint: {hint}\n"), NO_DAEMON)
            }
            Self::Api(Error::Tls { .. }) => {
                let hint = "trust its certificate with --ca FILE; `pdp version` on the server's \
                            machine shows the SHA-256";
                (format!("error: {}\nhint: {hint}\n", with_causes(self)), FAILED)
            }
            Self::Api(Error::InvalidAddress(text)) => (format!("error: {text}\n"), USAGE),
            Self::Api(Error::Problem(problem)) => (problem_text(problem), FAILED),
            Self::Files(diagnostics, files) => {
                let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
                let shown = pdp_spec::render(diagnostics, files, colour);
                (format!("{shown}error: {self}; nothing was changed\n"), FAILED)
            }
            Self::Usage(_) => (format!("error: {self}\n"), USAGE),
            _ => (format!("error: {}\n", with_causes(self)), FAILED),
        }
    }
}

fn problem_text(problem: &Problem) -> String {
    let mut text = format!("error: {}\n", problem.error);
    for diagnostic in &problem.diagnostics {
        text += &format!("  {diagnostic}\n");
    }
    if let Some(hint) = &problem.hint {
        text += &format!("hint: {hint}\n");
    }
    text
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
