//! Errors of the host's networking.

use std::io;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{what} {object}")]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// Interface, path or address of the operation.
        object: String,
        /// Cause.
        source: io::Error,
    },
    /// There is no such interface here.
    #[error("interface {0} does not exist in this network namespace")]
    NoInterface(String),
    /// A value out of its bounds.
    #[error("{object}: {text}")]
    Invalid {
        /// Object with the invalid value.
        object: String,
        /// Value, its bound and what to do.
        text: String,
    },
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds the operation and its object to an error.
pub(crate) trait NetContext<T> {
    fn on(self, what: &'static str, object: impl ToString) -> Result<T>;
}

impl<T, E: Into<io::Error>> NetContext<T> for std::result::Result<T, E> {
    fn on(self, what: &'static str, object: impl ToString) -> Result<T> {
        self.map_err(|error| Error::Io { what, object: object.to_string(), source: error.into() })
    }
}
