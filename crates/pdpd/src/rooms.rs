//! Settings of the kernel that bound what all guests have together. pdpd raises them to the sum of the guests' own bounds,
//! so that no guest finds its part taken by another. A setting that is higher stays.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use pdp_container::{INOTIFY_INSTANCES_MAX, TERMINALS_MAX};

/// Pseudo-terminals of the machine, and those of them that the kernel gives to no container.
const TERMINALS: &str = "/proc/sys/kernel/pty/max";
const TERMINALS_RESERVED: &str = "/proc/sys/kernel/pty/reserve";

/// Pseudo-terminals of containers that are none of PdP's.
const TERMINALS_OF_OTHERS: u64 = 1024;

/// Inotify instances of a user: all guests of a network are one to the kernel.
const INOTIFY_INSTANCES: &str = "/proc/sys/fs/inotify/max_user_instances";

/// The highest value that is written to either, which the kernel takes.
const SETTING_MAX: u64 = 1 << 20;

/// What was asked for so far.
#[derive(Debug, Default)]
pub struct Rooms {
    terminals: AtomicU64,
    inotify_instances: AtomicU64,
}

impl Rooms {
    /// Has each of `all` guests have its terminals, and each of `of_vnet` guests of one network its inotify instances.
    pub fn for_guests(&self, all: u64, of_vnet: u64) {
        let reserved = read(Path::new(TERMINALS_RESERVED)).unwrap_or(0);
        let terminals = all * u64::from(TERMINALS_MAX) + reserved + TERMINALS_OF_OTHERS;
        let instances = of_vnet * u64::from(INOTIFY_INSTANCES_MAX);
        for (path, before, count) in [
            (TERMINALS, &self.terminals, terminals),
            (INOTIFY_INSTANCES, &self.inotify_instances, instances),
        ] {
            let count = count.min(SETTING_MAX);
            if before.fetch_max(count, Ordering::Relaxed) < count
                && let Err(error) = raise(Path::new(path), count)
            {
                tracing::warn!(
                    "guests may find {path} used up by others: {error}; write {count} there"
                );
            }
        }
    }
}

fn read(path: &Path) -> io::Result<u64> {
    fs::read_to_string(path)?.trim().parse().map_err(io::Error::other)
}

/// Has a setting be at least this.
fn raise(path: &Path, count: u64) -> io::Result<()> {
    match read(path)? {
        has if has >= count => Ok(()),
        _ => fs::write(path, count.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raises_settings_and_never_lowers_them() {
        let setting = tempfile::NamedTempFile::new().unwrap();
        for (before, count, after) in
            [("128\n", 129, "129"), ("129\n", 129, "129\n"), ("9999\n", 1, "9999\n")]
        {
            fs::write(setting.path(), before).unwrap();
            raise(setting.path(), count).unwrap();
            assert_eq!(fs::read_to_string(setting.path()).unwrap(), after);
        }
        fs::write(setting.path(), "max\n").unwrap();
        assert!(raise(setting.path(), 1).is_err());
        assert!(raise(&setting.path().with_extension("none"), 1).is_err());
    }
}
