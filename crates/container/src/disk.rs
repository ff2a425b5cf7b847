//! Free space on disks.

use std::io;
use std::path::Path;

/// Returns the free bytes on the disk of a path, without those reserved for root.
///
/// # Errors
/// There is no such path, or the disk does not report its size.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(path)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}
