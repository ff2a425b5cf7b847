//! The kernel's neighbour tables, of which there is one for each family and all network namespaces.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::shared::first_netns;
use crate::sysctl;

/// Gives both tables room for this many entries at least, as `gc_thresh3` has it; one that has more keeps it.
/// From half of it on the kernel looks for entries that it can let go of whenever one is made (`gc_thresh2`).
///
/// # Errors
/// Neither the caller nor the first process of the machine is in its first network namespace, which alone
/// has these settings, or they may not be changed.
pub fn make_room(count: u64) -> Result<()> {
    let first = first_netns()?;
    for family in ["ipv4", "ipv6"] {
        // In this order: what is above the next is of no use.
        for (name, wanted) in [("gc_thresh3", count), ("gc_thresh2", count / 2)] {
            let key = format!("net.{family}.neigh.default.{name}");
            let has = sysctl::get(first.as_fd(), &key)?;
            if has.parse().is_ok_and(|has: u64| has < wanted) {
                sysctl::set(first.as_fd(), &key, &wanted.to_string())?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_settings_are_found() {
        // Less than any machine has.
        super::make_room(1).unwrap();
    }
}
