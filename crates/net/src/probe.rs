//! What this machine can do, for `pdp doctor`.

use serde::Serialize;

/// How a facility is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// There.
    Ok,
    /// There with a limit, or its absence costs something.
    Warn,
    /// Not there, and needed.
    Missing,
}

/// What was found of one facility.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The facility.
    pub name: &'static str,
    /// How it is.
    pub level: Level,
    /// What was found.
    pub detail: String,
    /// What to install or do; empty if nothing.
    pub remedy: String,
}

/// Tries everything out, in a network namespace of its own, within a few seconds. Needs root;
/// says so otherwise.
pub fn run() -> Vec<Check> {
    todo!()
}
