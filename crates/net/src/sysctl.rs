//! Sysctls of network namespaces.

use std::os::fd::BorrowedFd;

use crate::error::Result;

/// Sets a sysctl of a network namespace, e.g. `net.ipv4.ip_forward`; `.` in an interface's name is
/// written `/` as with sysctl(8).
pub fn set(netns: BorrowedFd<'_>, key: &str, value: &str) -> Result<()> {
    todo!("{netns:?} {key} {value}")
}

/// Reads a sysctl of a network namespace, without the line's end.
pub fn get(netns: BorrowedFd<'_>, key: &str) -> Result<String> {
    todo!("{netns:?} {key}")
}
