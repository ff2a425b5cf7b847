//! What can go wrong with guests.

use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A wish that can't be met.
    #[error("guest {id}: {text}")]
    Spec {
        /// Id of the guest or helper.
        id: String,
        /// What, the bound, and what to do.
        text: String,
    },
    /// There is no guest or helper in a directory.
    #[error("{}: there is no guest or helper", .0.display())]
    Absent(PathBuf),
    /// The container runtime or the shim refused.
    #[error("guest {id}: {what}: {text}")]
    Runtime {
        /// Id of the guest or helper.
        id: String,
        /// What was tried.
        what: &'static str,
        /// What it said.
        text: String,
    },
    /// Something did not end in time.
    #[error("{what} still there after {seconds} s")]
    Stuck {
        /// What.
        what: String,
        /// Time given, seconds.
        seconds: u64,
    },
    /// An image that can't be used.
    #[error("image {}: {text}", path.display())]
    Image {
        /// Path of the image layout.
        path: PathBuf,
        /// What is wrong with it.
        text: String,
    },
    /// The machine's cgroups can't be used.
    #[error("cgroups: {0}")]
    Cgroup(String),
    /// The operating system refused.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// An error with its causes, in one line.
pub fn words(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what was tried with which path when it fails.
pub(crate) trait Context<T> {
    fn at(self, what: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn at(self, what: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| Error::Io { what, path: path.to_owned(), source: error.into() })
    }
}
