//! Settings of the kernel that are one for all network namespaces, where one tenant's use would be everybody's.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;

use crate::error::{Context, Error, Result};
use crate::sysctl;

/// Connections that each network namespace may track; each takes 1.6 KB that no cgroup is charged for.
pub const CONNECTIONS_MAX: u64 = 16_384;

/// A machine that tracks more than this in its own namespace needs its bound for itself.
const OWN_CONNECTIONS_MAX: u64 = CONNECTIONS_MAX / 8;

const CONNECTIONS: &str = "net.netfilter.nf_conntrack_max";

/// The machine's first network namespace, which alone has these settings: the caller's, or that of process 1.
pub(crate) fn first_netns() -> Result<File> {
    let own = Path::new("/proc/sys/net/ipv4/neigh/default/gc_thresh3").exists();
    let first = if own { "/proc/thread-self/ns/net" } else { "/proc/1/ns/net" };
    File::open(first).on("open", first)
}

/// Raises the bounds of the memory of all TCP and of all UDP sockets to all memory of the machine, where they are lower:
/// then the bounds of cgroups are met before, each by its own sockets alone.
///
/// # Errors
/// Neither the caller nor process 1 is in the machine's first network namespace, or the settings may not be changed.
pub fn raise_socket_memory() -> Result<()> {
    let (first, pages) = (first_netns()?, memory_pages()?);
    for (key, has) in socket_memory(&first)? {
        let raised = has.map(|has| has.max(pages));
        if raised != has {
            let value = raised.map(|pages| pages.to_string()).join(" ");
            sysctl::set(first.as_fd(), key, &value)?;
        }
    }
    Ok(())
}

/// Returns the names of those that [`raise_socket_memory`] would raise.
pub fn low_socket_memory() -> Result<Vec<&'static str>> {
    let pages = memory_pages()?;
    let all = socket_memory(&first_netns()?)?.into_iter();
    Ok(all.filter(|(_, has)| has.iter().any(|has| *has < pages)).map(|(key, _)| key).collect())
}

/// Pages, by the name of the setting: below the first one there is no pressure, beyond the last one none are had.
fn socket_memory(first: &File) -> Result<Vec<(&'static str, [u64; 3])>> {
    let read = |key: &'static str| {
        let value = sysctl::get(first.as_fd(), key)?;
        let pages: Vec<u64> = value.split_whitespace().flat_map(str::parse).collect();
        let text = format!("{value:?}, not three numbers");
        let pages = pages.try_into().map_err(|_| Error::Invalid { object: key.into(), text })?;
        Ok((key, pages))
    };
    ["net.ipv4.tcp_mem", "net.ipv4.udp_mem"].into_iter().map(read).collect()
}

fn memory_pages() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").on("read", "/proc/meminfo")?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|total| total.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let text = "no MemTotal".to_owned();
    let kib = kib.ok_or(Error::Invalid { object: "/proc/meminfo".into(), text })?;
    Ok(kib / (rustix::param::page_size() as u64 >> 10))
}

/// Lowers what each network namespace may track to [`CONNECTIONS_MAX`], unless the machine itself tracks many.
/// Returns false if the kernel tracks nothing yet: then it is to be called again later.
///
/// # Errors
/// As [`raise_socket_memory`]; and [`Error::Invalid`]: the machine tracks many.
pub fn bound_connections() -> Result<bool> {
    let Some(most) = connections_max()? else { return Ok(false) };
    if most <= CONNECTIONS_MAX {
        return Ok(true);
    }
    let first = first_netns()?;
    let now = sysctl::get(first.as_fd(), "net.netfilter.nf_conntrack_count")?;
    if !now.parse().is_ok_and(|now: u64| now <= OWN_CONNECTIONS_MAX) {
        let text = format!("the machine itself tracks {now}; {most} stay the bound of each node");
        return Err(Error::Invalid { object: CONNECTIONS.into(), text });
    }
    sysctl::set(first.as_fd(), CONNECTIONS, &CONNECTIONS_MAX.to_string())?;
    Ok(true)
}

/// Connections that each network namespace may track; `None`: the kernel tracks none yet.
pub fn connections_max() -> Result<Option<u64>> {
    match sysctl::get(first_netns()?.as_fd(), CONNECTIONS) {
        Ok(most) => Ok(most.parse().ok()),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_are_found() {
        let found = socket_memory(&first_netns().unwrap()).unwrap();
        assert!(found.iter().all(|(_, [low, pressure, high])| low <= pressure && pressure <= high));
        assert!(memory_pages().unwrap() > 1000);
        connections_max().unwrap();
    }
}
