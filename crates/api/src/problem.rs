use std::fmt;

use pdp_spec::Diagnostic;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was not met. Nothing was changed unless the text says so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// What sort of refusal; decides the HTTP status.
    pub kind: ProblemKind,
    /// The object, the value, the bound.
    pub error: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Where in the files that were sent, for specs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diagnostics: Vec<Diagnostic>,
}

/// What sort of refusal a [`Problem`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum ProblemKind {
    /// The request is wrong (400).
    Invalid,
    /// Nobody knows who asks (401).
    Unauthorized,
    /// Who asks may not (403).
    Forbidden,
    /// No such object, or none that who asks may know of (404).
    NotFound,
    /// Not in the state that things are in: in use, not running, no capacity (409).
    Conflict,
    /// The request is larger than the limit (413).
    TooLarge,
    /// Too many requests at a time (429).
    Busy,
    /// What it takes is not there now: the mux or a helper does not answer (503).
    Unavailable,
    /// It took longer than the limit (504).
    TimedOut,
    /// The node failed (500).
    Internal,
}

impl ProblemKind {
    /// The HTTP status code.
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
    /// A problem without a hint.
    pub fn new(kind: ProblemKind, error: impl Into<String>) -> Self {
        Self { kind, error: error.into(), hint: None, diagnostics: Vec::new() }
    }

    /// No such object.
    pub fn not_found(error: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, error)
    }

    /// The node failed.
    pub fn internal(error: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Internal, error.to_string())
    }

    /// The same with what to do about it.
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
