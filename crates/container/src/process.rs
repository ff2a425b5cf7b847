//! Processes named by id and start time, so that another process with the same id is not taken
//! for them.

use serde::{Deserialize, Serialize};

/// A process of this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it began, clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// What it returned, if it did.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// When, milliseconds since 1970.
    pub at_ms: u64,
}
