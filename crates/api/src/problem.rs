use std::fmt;

use pdp_spec::Diagnostic;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request failed. It changed nothing unless the text says so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// Kind of failure; decides the HTTP status.
    pub kind: ProblemKind,
    /// The fault: the object, the value, the limit.
    pub error: String,
    /// Advice on what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Errors in the files that were sent, with positions, for specs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diagnostics: Vec<Diagnostic>,
}

/// Kind of a [`Problem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum ProblemKind {
    /// The request is wrong (400).
    Invalid,
    /// The client is unknown (401).
    Unauthorized,
    /// The client lacks the rights (403).
    Forbidden,
    /// No such object, or none that the client may see (404).
    NotFound,
    /// Impossible in the current state: in use, not running, no capacity (409).
    Conflict,
    /// The request is larger than the limit (413).
    TooLarge,
    /// Too many requests at the same time (429).
    Busy,
    /// The mux or a helper that is needed does not answer (503).
    Unavailable,
    /// The request took longer than the limit (504).
    TimedOut,
    /// The node failed (500).
    Internal,
}

impl ProblemKind {
    /// Returns the HTTP status code.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Unauthorized => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::Busy => 429,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::TimedOut => 504,
        }
    }
}

impl Problem {
    /// Returns a problem without a hint.
    pub fn new(kind: ProblemKind, error: impl Into<String>) -> Self {
        Self { kind, error: error.into(), hint: None, diagnostics: Vec::new() }
    }

    /// Returns a problem: no such object.
    pub fn not_found(error: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, error)
    }

    /// Returns a problem: the node failed.
    pub fn internal(error: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Internal, error.to_string())
    }

    /// Adds a hint on what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)?;
        self.hint.iter().try_for_each(|hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for Problem {}
