//! Why a command failed, in words on standard error, and its exit code.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use pdp_api::Problem;
use pdp_api::client::Error;
use pdp_api::exec::FrameError;
use pdp_spec::{Diagnostic, SourceFile};

/// It failed.
const FAILED: u8 = 1;
/// The command line is wrong; as clap has it.
const USAGE: u8 = 2;
/// No daemon answers.
const NO_DAEMON: u8 = 3;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The daemon refused or does not answer.
    #[error(transparent)]
    Api(#[from] Error),
    /// Reading or writing here failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The connection of a command in a guest broke.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// What was asked for makes no sense.
    #[error("{0}")]
    Usage(String),
    /// It failed; the text says why and what to do.
    #[error("{0}")]
    Other(String),
    /// Files are wrong.
    #[error("{} in the files", pdp_spec::count(.0.len(), "fault"))]
    Files(Vec<Diagnostic>, Vec<SourceFile>),
}

impl Failure {
    /// Turns a refusal of files into one that can show their lines.
    pub fn about(self, files: &[SourceFile]) -> Self {
        match self {
            Self::Api(Error::Problem(problem)) if !problem.diagnostics.is_empty() => {
                Self::Files(problem.diagnostics, files.to_vec())
            }
            other => other,
        }
    }

    /// Says why on standard error; returns the exit code.
    pub fn report(self) -> ExitCode {
        if self.is_broken_pipe() {
            // Whoever read the output has seen enough.
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

    /// The words, and the exit code.
    pub fn text(&self) -> (String, u8) {
        match self {
            Self::Api(Error::NoDaemon { place, source }) => {
                let denied = source.kind() == io::ErrorKind::PermissionDenied;
                let hint = match (denied, place.starts_with('/')) {
                    (true, _) => "a directory above it is not for this user; ask an operator",
                    (_, true) => {
                        "start it with `pdp up`, or say which it is with --name or --socket"
                    }
                    (_, false) => {
                        "start it there with --listen, or say where it listens with --server or \
                         PDP_SERVER"
                    }
                };
                (format!("error: no daemon at {place}: {source}\nhint: {hint}\n"), NO_DAEMON)
            }
            Self::Api(Error::Tls { .. }) => {
                let hint = "say by --ca FILE which certificate to trust; `pdp version` on the \
                            server's machine shows the SHA-256 of its own";
                (format!("error: {}\nhint: {hint}\n", with_causes(self)), FAILED)
            }
            Self::Api(Error::Place(text)) => (format!("error: {text}\n"), USAGE),
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
