//! Settings (sysctls) that limit the joint use of resources by all guests of a machine.
//!
//! Each function sets one so that no guest can use up another guest's part. Higher settings stay.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::error::{Error, NetContext, Result};
use crate::netns::within;
use crate::sysctl;

/// Most connections that each network namespace may track.
/// Each takes 1.6 KB that no cgroup is charged for.
pub const CONNECTIONS_MAX: u64 = 16_384;

/// If the machine tracks more connections than this in its
/// own namespace, it needs its limit for itself.
const OWN_CONNECTIONS_MAX: u64 = CONNECTIONS_MAX / 8;

const CONNECTIONS: &str = "net.netfilter.nf_conntrack_max";

/// Raises `kernel.pty.max` so that `count` pseudo-terminals
/// remain beside those of the machine itself.
///
/// # Errors
/// The setting may not be changed. This applies to each of these functions.
pub fn raise_terminals(count: u64) -> Result<()> {
    // The kernel reserves `reserve` of them for the machine's own devpts mount.
    let reserved = numbers("kernel.pty.reserve")?.into_iter().next().unwrap_or(0);
    raise("kernel.pty.max", count + reserved)
}

/// Raises the limit on inotify instances per user to `count`.
pub fn raise_inotify_instances(count: u64) -> Result<()> {
    raise("fs.inotify.max_user_instances", count)
}

/// Raises the limit on entries in each of the neighbour tables, IPv4 and IPv6,
/// to `count` (`gc_thresh3`). While a table has more than half of it
/// (`gc_thresh2`), the kernel removes unused entries.
pub fn raise_neighbours(count: u64) -> Result<()> {
    let families = ["ipv4", "ipv6"].into_iter();
    // A kernel without IPv6 has no such table.
    for family in families.filter(|family| sysctl::exists(&format!("net.{family}"))) {
        // In this order: a value above the next threshold has no effect.
        for (name, count) in [("gc_thresh3", count), ("gc_thresh2", count / 2)] {
            raise(&format!("net.{family}.neigh.default.{name}"), count)?;
        }
    }
    Ok(())
}

const SOCKET_MEMORY: [&str; 2] = ["net.ipv4.tcp_mem", "net.ipv4.udp_mem"];

/// Raises the memory limits of all TCP sockets and of all UDP sockets to the memory of the machine.
/// Then sockets reach the limit of their cgroup first.
pub fn raise_socket_memory() -> Result<()> {
    let pages = memory_pages()?;
    SOCKET_MEMORY.into_iter().try_for_each(|key| raise(key, pages))
}

/// Returns the names of the settings that [`raise_socket_memory`] would raise.
pub fn low_socket_memory() -> Result<Vec<&'static str>> {
    let pages = memory_pages()?;
    let mut low = Vec::new();
    for key in SOCKET_MEMORY {
        if numbers(key)?.iter().any(|has| *has < pages) {
            low.push(key);
        }
    }
    Ok(low)
}

fn memory_pages() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").on("read", "/proc/meminfo")?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|total| total.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let text = "no MemTotal".to_owned();
    let kib = kib.ok_or(Error::Invalid { object: "/proc/meminfo".into(), text })?;
    Ok(kib / (rustix::param::page_size() as u64 >> 10))
}

/// Raises each number of a setting that is lower than `least`; never lowers one.
fn raise(key: &str, least: u64) -> Result<()> {
    match raised(&numbers(key)?, least) {
        Some(value) => write(key, &value),
        None => Ok(()),
    }
}

/// Returns the value with each number raised to at least `least`; `None` if all are high enough.
fn raised(numbers: &[u64], least: u64) -> Option<String> {
    let low = numbers.iter().any(|number| *number < least);
    let raised = || numbers.iter().map(|number| number.max(&least).to_string());
    low.then(|| raised().collect::<Vec<_>>().join(" "))
}

fn numbers(key: &str) -> Result<Vec<u64>> {
    let value = where_set(key, || fs::read_to_string(path(key)).on("read sysctl", key))?;
    let numbers = value.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>();
    let text = format!("{:?}, which is no list of numbers", value.trim_end());
    numbers.map_err(|_| Error::Invalid { object: key.into(), text })
}

fn write(key: &str, value: &str) -> Result<()> {
    where_set(key, || fs::write(path(key), value).on("set sysctl", key))
}

fn path(key: &str) -> PathBuf {
    Path::new("/proc/sys").join(key.replace('.', "/"))
}

/// Runs `work` where the setting `key` is. Settings of the network that limit all namespaces
/// together exist only in the machine's initial one: the caller's, or that of process 1.
fn where_set<T: Send>(key: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if !key.starts_with("net.") || path("net.ipv4.neigh.default.gc_thresh3").exists() {
        return work();
    }
    const FIRST: &str = "/proc/1/ns/net";
    within(File::open(FIRST).on("open", FIRST)?.as_fd(), work)
}

/// Lowers the limit on tracked connections of each network namespace to [`CONNECTIONS_MAX`], unless
/// the machine itself tracks many. Returns the earlier limit; `None` if the kernel tracks nothing
/// yet, or the limit is as low already.
///
/// # Errors
/// [`Error::Invalid`]: the machine itself tracks many.
pub fn bound_connections() -> Result<Option<u64>> {
    let Some(most) = connections_max()?.filter(|most| *most > CONNECTIONS_MAX) else {
        return Ok(None);
    };
    let now = own_connections()?;
    if now > OWN_CONNECTIONS_MAX {
        let text = format!("the machine itself tracks {now}; each node keeps the limit {most}");
        return Err(Error::Invalid { object: CONNECTIONS.into(), text });
    }
    write(CONNECTIONS, &CONNECTIONS_MAX.to_string())?;
    Ok(Some(most))
}

/// Restores the machine's earlier limit if it itself tracks more than half of
/// [`CONNECTIONS_MAX`]. Returns true if it did.
pub fn unbound_connections(before: u64) -> Result<bool> {
    let needs = own_connections()? > CONNECTIONS_MAX / 2;
    if needs {
        write(CONNECTIONS, &before.to_string())?;
    }
    Ok(needs)
}

/// Returns the count of connections that the machine's initial network namespace tracks now.
fn own_connections() -> Result<u64> {
    Ok(numbers("net.netfilter.nf_conntrack_count")?.iter().sum())
}

/// Returns the limit on tracked connections of each network
/// namespace; `None` if the kernel tracks none yet.
pub fn connections_max() -> Result<Option<u64>> {
    match numbers(CONNECTIONS) {
        Ok(most) => Ok(most.first().copied()),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_raises_shared_kernel_settings() {
        for key in SOCKET_MEMORY {
            let is = numbers(key).unwrap();
            assert!(is.len() == 3 && is.is_sorted(), "{key}: {is:?}");
        }
        assert!(memory_pages().unwrap() > 1000);
        connections_max().unwrap();
        // Less than any machine has.
        raise_neighbours(1).unwrap();
        raise_inotify_instances(1).unwrap();
        raise_terminals(0).unwrap();
        assert!(raise("kernel.pty.none", 1).is_err());
    }

    #[test]
    fn settings_are_raised_and_never_lowered() {
        assert_eq!(raised(&[128], 129).as_deref(), Some("129"));
        assert_eq!(raised(&[129], 129), None);
        assert_eq!(raised(&[10, 200, 30], 100).as_deref(), Some("100 200 100"));
    }
}
