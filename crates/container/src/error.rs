//! Errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A spec that can't be fulfilled.
    #[error("guest {id}: {text}")]
    Spec {
        /// Id of the guest or helper.
        id: String,
        /// Object, limit, and what to do.
        text: String,
    },
    /// There is no guest or helper in a directory.
    #[error("{}: no guest or helper", .0.display())]
    Absent(PathBuf),
    /// The container runtime or the shim refused.
    #[error("guest {id}: {what}: {text}")]
    Runtime {
        /// Id of the guest or helper.
        id: String,
        /// Operation that failed.
        what: &'static str,
        /// Message of the runtime or the shim.
        text: String,
    },
    /// A process or cgroup did not end in time.
    #[error("{what} still exists after {seconds} s")]
    Stuck {
        /// Process or cgroup.
        what: String,
        /// Time allowed, seconds.
        seconds: u64,
    },
    /// An image that can't be used.
    #[error("image {}: {text}", path.display())]
    Image {
        /// Path of the image layout.
        path: PathBuf,
        /// Fault of the image.
        text: String,
    },
    /// The machine's cgroups can't be used.
    #[error("cgroups: {0}")]
    Cgroup(String),
    /// The operating system refused.
    #[error("{what} {}", path.display())]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// Path of the operation.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
}

/// Formats an error with its causes, in one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds the operation and the path to an error.
pub(crate) trait ErrorContext<T> {
    fn at(self, what: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> ErrorContext<T> for std::result::Result<T, E> {
    fn at(self, what: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| Error::Io { what, path: path.to_owned(), source: error.into() })
    }
}
