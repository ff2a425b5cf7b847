//! What can go wrong with the host's networking.

use std::io;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{what} {object}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which interface, path or address.
        object: String,
        /// Why not.
        source: io::Error,
    },
    /// There is no such interface here.
    #[error("interface {0}: there is none of this name in this network namespace")]
    NoInterface(String),
    /// A value out of its bounds.
    #[error("{object}: {text}")]
    Invalid {
        /// What.
        object: String,
        /// The value, its bound and what to do.
        text: String,
    },
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Says what was tried with which object when it fails.
pub(crate) trait Context<T> {
    fn on(self, what: &'static str, object: impl ToString) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn on(self, what: &'static str, object: impl ToString) -> Result<T> {
        self.map_err(|error| Error::Io { what, object: object.to_string(), source: error.into() })
    }
}
