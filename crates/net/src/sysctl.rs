//! Sysctls of network namespaces.

use std::fs;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use crate::error::{Context, Error, Result};
use crate::netns::within;

/// Sets a sysctl of a network namespace, e.g. `net.ipv4.ip_forward`; `.` in an interface's name is
/// written `/` as with sysctl(8).
pub fn set(netns: BorrowedFd<'_>, key: &str, value: &str) -> Result<()> {
    within(netns, || set_here(key, value))
}

/// Sets several, in this order.
pub fn set_all(netns: BorrowedFd<'_>, values: &[(String, String)]) -> Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    within(netns, || values.iter().try_for_each(|(key, value)| set_here(key, value)))
}

/// Reads a sysctl of a network namespace, without the line's end.
pub fn get(netns: BorrowedFd<'_>, key: &str) -> Result<String> {
    within(netns, || {
        let value = fs::read_to_string(path(key)?).on("read sysctl", key)?;
        Ok(value.trim_end().to_owned())
    })
}

/// Sets a sysctl of the calling thread's network namespace.
pub(crate) fn set_here(key: &str, value: &str) -> Result<()> {
    fs::write(path(key)?, value).on("set sysctl", key)
}

/// /proc/sys/net is that of the thread that opens it.
fn path(key: &str) -> Result<PathBuf> {
    let swapped: String = key
        .chars()
        .map(|c| match c {
            '.' => '/',
            '/' => '.',
            other => other,
        })
        .collect();
    let plain = swapped.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if plain && swapped.starts_with("net/") {
        return Ok(PathBuf::from("/proc/sys").join(swapped));
    }
    let text = "no sysctl of a network namespace: net. and names".to_owned();
    Err(Error::Invalid { object: key.to_owned(), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dot_in_an_interface_name_stays_one() {
        let want = PathBuf::from("/proc/sys/net/ipv4/conf/eth0.5/rp_filter");
        assert_eq!(path("net.ipv4.conf.eth0/5.rp_filter").unwrap(), want);
    }

    #[test]
    fn a_key_leads_nowhere_but_below_net() {
        for key in ["kernel.hostname", "net..x", "net.//.kernel", "net.//.//.x", ""] {
            assert!(path(key).is_err(), "{key}");
        }
    }
}
