//! Room on disks.

use std::io;
use std::path::Path;

/// Bytes that are free on the disk of a path, without those that are reserved for root.
///
/// # Errors
/// There is no such path, or the disk does not say.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(path)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}
