//! Counters of a forwarding guest's runtime.

/// Counters of a runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuntimeCounters {
    /// Frames received. Each was completed.
    pub received: u64,
    /// Copies sent.
    pub copies: u64,
    /// Copies that found no room.
    pub copies_refused: u64,
    /// Frames made by the program.
    pub made: u64,
    /// Received frames without a valid trunk tag, or longer than a buffer.
    pub unreadable: u64,
    /// Times the guest went to sleep.
    pub sleeps: u64,
    /// Sleeps that the mux ended by ringing.
    pub wakes: u64,
    /// Times the guest yielded its CPU.
    pub yields: u64,
    /// Connections to a mux.
    pub connections: u64,
}
