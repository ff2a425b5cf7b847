//! Resources of the machine that the node holds: processes by role with their memory, descriptors
//! and mappings; cgroups, mounts, network namespaces, files; rows of its state. Two samples are
//! compared: some values must be equal, others may grow within a bound.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pdp_testbed::MonitoredProcess;
use rusqlite::{Connection, OpenFlags};

use crate::{outside, paths};

/// Additional descriptors that a process may have: connections just open.
const DESCRIPTORS_SLACK: u64 = 3;
/// Additional mappings that a process may have: a thread's stack, parts of its heap.
const MAPS_SLACK: u64 = 16;
/// Additional memory of a role: a percentage, and this much for each process.
const MEMORY_SLACK_PERCENT: u64 = 20;
const MEMORY_SLACK_KB: u64 = 4 << 10;
/// Most rows of an unknown table, which may be a bounded history.
const ROWS_MAX: i64 = 10_000;
/// Tables with current state, without history.
const TABLES: [&str; 7] =
    ["documents", "numbers", "placements", "links_down", "links_silent", "settings", "things"];
/// Most bytes of the state: a few specs, and the log of SQLite, which it cuts at 4 MiB.
const STATE_BYTES_MAX: u64 = 16 << 20;
/// Bytes of a log and its predecessor (`LOG_BYTES_MAX` in crates/container).
const LOG_BYTES_MAX: u64 = 2 * (4 << 20);

/// Commands that talk to the node without being part of it.
const COMMANDS: [&str; 3] = ["pdp", "nsenter", "setsid"];

/// Processes of the node, without commands.
pub fn processes() -> Vec<MonitoredProcess> {
    let mut found = paths::pdp_node().processes();
    found.retain(|process| !COMMANDS.contains(&process.role.as_str()));
    found
}

/// Number of processes, by role.
pub fn roles(processes: &[MonitoredProcess]) -> BTreeMap<String, u64> {
    let mut roles = BTreeMap::new();
    for process in processes {
        *roles.entry(process.role.clone()).or_default() += 1;
    }
    roles
}

/// Resources of a role's processes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleUsage {
    /// Number of processes.
    pub processes: u64,
    /// Own memory, KiB: anonymous memory, of shared memory the proportional part. The memory that
    /// mux and guests share has its own sizes, so it is counted by its mappings.
    pub memory_kb: u64,
    /// Resident memory, KiB. Shared memory counts fully in each process.
    pub resident_kb: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Mappings.
    pub maps: u64,
}

/// Resources of the node at one time.
#[derive(Clone, Debug, Default)]
pub struct ResourceSample {
    /// Time, minutes after the start.
    pub minute: f64,
    /// By program.
    pub roles: BTreeMap<String, RoleUsage>,
    /// Names of resources, by kind.
    pub resources: BTreeMap<&'static str, BTreeSet<String>>,
    /// Network namespaces with processes of the node in them.
    pub namespaces: u64,
    /// Rows by table.
    pub rows: BTreeMap<String, i64>,
    /// Bytes of the state directory.
    pub state_bytes: u64,
    /// Bytes of all logs, without their predecessors.
    pub log_bytes: u64,
    /// Number of logs.
    pub logs: u64,
}

impl ResourceSample {
    /// Takes a sample.
    pub fn take(minute: f64) -> Result<Self> {
        let mut sample =
            Self { minute, rows: rows()?, resources: resources_in_use(), ..Self::default() };
        let mut namespaces = BTreeSet::new();
        for process in processes() {
            let place = PathBuf::from(format!("/proc/{}", process.pid));
            let role = sample.roles.entry(process.role).or_default();
            let memory = fs::read_to_string(place.join("smaps_rollup")).unwrap_or_default();
            role.processes += 1;
            role.memory_kb += kilobytes(&memory, "Pss_Anon:");
            role.resident_kb += kilobytes(&memory, "Rss:");
            role.descriptors += fs::read_dir(place.join("fd")).into_iter().flatten().count() as u64;
            let maps = fs::read_to_string(place.join("maps")).unwrap_or_default();
            role.maps += maps.lines().count() as u64;
            namespaces.extend(fs::read_link(place.join("ns/net")));
        }
        sample.namespaces = namespaces.len() as u64;
        for path in below(&paths::state()) {
            sample.state_bytes += fs::metadata(path).map_or(0, |data| data.size());
        }
        for path in below(&paths::run()).iter().filter(|path| is_log(path)) {
            sample.log_bytes += fs::metadata(path).map_or(0, |data| data.size());
            sample.logs += u64::from(path.extension().is_none_or(|number| number != "1"));
        }
        Ok(sample)
    }
}

/// Remains of a removed node and of its environment, one line each.
pub fn leftovers() -> Vec<String> {
    let mut left = paths::pdp_node().leftovers(None);
    left.extend(named_namespaces().iter().map(|path| path.display().to_string()));
    let places = [paths::run(), paths::state(), paths::outside()];
    left.extend(places.iter().filter(|place| place.exists()).map(|p| p.display().to_string()));
    left
}

/// Differences between two samples of a node whose resources should be the same, by kind.
pub fn compare(start: &ResourceSample, end: &ResourceSample) -> Vec<(&'static str, Vec<String>)> {
    let (mut processes, mut memory) = (Vec::new(), Vec::new());
    let (mut descriptors, mut maps) = (Vec::new(), Vec::new());
    let names: BTreeSet<&String> = start.roles.keys().chain(end.roles.keys()).collect();
    for name in names {
        let [from, to] = [start, end].map(|s| s.roles.get(name).copied().unwrap_or_default());
        let count = from.processes;
        if to.processes != count {
            processes.push(format!("{name}: {count}, then {}", to.processes));
        }
        let bound = |found: &mut Vec<String>, from: u64, to: u64, slack: u64, unit: &str| {
            if to > from + slack {
                found.push(format!("{name}: {from}, then {to}{unit}; {slack} more allowed"));
            }
        };
        let slack = from.memory_kb * MEMORY_SLACK_PERCENT / 100 + MEMORY_SLACK_KB * count;
        bound(&mut memory, from.memory_kb, to.memory_kb, slack, " KiB");
        let slack = DESCRIPTORS_SLACK * count;
        bound(&mut descriptors, from.descriptors, to.descriptors, slack, "");
        bound(&mut maps, from.maps, to.maps, MAPS_SLACK * count, "");
    }
    let mut found = vec![
        ("processes as before", processes),
        ("memory within its bound", memory),
        ("descriptors within their bound", descriptors),
        ("mappings within their bound", maps),
    ];
    let kinds: BTreeSet<&'static str> =
        start.resources.keys().chain(end.resources.keys()).copied().collect();
    for kind in kinds {
        let none = BTreeSet::new();
        let [from, to] = [start, end].map(|sample| sample.resources.get(kind).unwrap_or(&none));
        let more = to.difference(from).map(|name| format!("{name} is new"));
        let fewer = from.difference(to).map(|name| format!("{name} is gone"));
        found.push((kind, more.chain(fewer).collect()));
    }
    let namespaces = match (start.namespaces, end.namespaces) {
        (from, to) if from == to => Vec::new(),
        (from, to) => vec![format!("{from}, then {to}")],
    };
    found.push(("network namespaces in use as before", namespaces));
    found.push(("rows of the state as before", compare_rows(&start.rows, &end.rows)));
    let mut bytes = Vec::new();
    if end.state_bytes > STATE_BYTES_MAX {
        bytes.push(format!("state: {} bytes of {STATE_BYTES_MAX}", end.state_bytes));
    }
    if end.log_bytes > LOG_BYTES_MAX * end.logs {
        bytes.push(format!("{} logs: {} bytes", end.logs, end.log_bytes));
    }
    found.push(("state and logs within their bounds", bytes));
    found
}

fn compare_rows(start: &BTreeMap<String, i64>, end: &BTreeMap<String, i64>) -> Vec<String> {
    let mut found = Vec::new();
    for (table, to) in end {
        let from = start.get(table).copied().unwrap_or(0);
        let known = TABLES.contains(&table.as_str());
        if known && *to != from || !known && *to > ROWS_MAX {
            found.push(format!("{table}: {from}, then {to}"));
        }
    }
    found
}

/// Slope of the least-squares line over (minute, value): change per minute.
pub fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len().max(1) as f64;
    let mean_x = points.iter().map(|point| point.0).sum::<f64>() / count;
    let mean_y = points.iter().map(|point| point.1).sum::<f64>() / count;
    let along = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>();
    let across = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum::<f64>();
    if across > 0.0 { along / across } else { 0.0 }
}

/// Reads a number in /proc/PID/smaps_rollup.
fn kilobytes(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn resources_in_use() -> BTreeMap<&'static str, BTreeSet<String>> {
    let node = paths::pdp_node();
    let shown = |paths: Vec<PathBuf>| paths.iter().map(|p| p.display().to_string()).collect();
    let mut cgroups = node.cgroups();
    let inner: Vec<PathBuf> = cgroups.iter().flat_map(|cgroup| below(cgroup)).collect();
    cgroups.extend(inner.into_iter().filter(|path| path.is_dir()));
    let mut files = below(&paths::run());
    files.retain(|path| !is_log(path));
    BTreeMap::from([
        ("cgroups as before", shown(cgroups)),
        ("mounts as before", shown(node.mounts())),
        ("named network namespaces as before", shown(named_namespaces())),
        ("pins as before", shown(below(&node.pins()))),
        ("files in the run directory as before", shown(files)),
    ])
}

/// Files of the demo's network namespaces.
fn named_namespaces() -> Vec<PathBuf> {
    outside::namespaces().iter().map(|name| Path::new("/run/netns").join(name)).collect()
}

fn is_log(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.trim_end_matches(".1").ends_with("log")
}

/// All paths below a directory. Bundles and mounted roots appear without their contents.
fn below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && entry.file_name() != "bundle" {
            found.extend(below(&path));
        }
        found.push(path);
    }
    found
}

/// Number of rows of each table of the state, read while pdpd has it open.
fn rows() -> Result<BTreeMap<String, i64>> {
    let path = paths::state().join("pdpd.sqlite");
    let read = || -> rusqlite::Result<BTreeMap<String, i64>> {
        let state = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        let mut names = state.prepare("SELECT name FROM sqlite_master WHERE type = 'table'")?;
        let names: Vec<String> =
            names.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
        let mut rows = BTreeMap::new();
        for name in names {
            let query = format!("SELECT count(*) FROM \"{name}\"");
            rows.insert(name, state.query_row(&query, [], |row| row.get(0))?);
        }
        Ok(rows)
    };
    read().with_context(|| format!("state {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_least_squares() {
        assert_eq!(slope(&[]), 0.0);
        assert_eq!(slope(&[(1.0, 5.0)]), 0.0);
        assert!((slope(&[(0.0, 10.0), (1.0, 13.0), (2.0, 16.0)]) - 3.0).abs() < 1e-9);
        assert!(slope(&[(0.0, 1.0), (1.0, 2.0), (2.0, 1.0)]).abs() < 1e-9);
    }

    fn sample() -> ResourceSample {
        let role = RoleUsage {
            processes: 2,
            memory_kb: 1000,
            resident_kb: 2000,
            descriptors: 20,
            maps: 100,
        };
        ResourceSample {
            roles: [("pdp-mux".into(), role)].into(),
            resources: [("mounts as before", ["/a".to_owned()].into())].into(),
            rows: [("things".into(), 7), ("history".into(), 3)].into(),
            ..ResourceSample::default()
        }
    }

    fn wrong(end: &ResourceSample) -> Vec<&'static str> {
        let found = compare(&sample(), end).into_iter();
        found.filter(|(_, differences)| !differences.is_empty()).map(|(what, _)| what).collect()
    }

    #[test]
    fn leaks_are_detected() {
        assert!(wrong(&sample()).is_empty());
        let with = |change: fn(&mut ResourceSample)| {
            let mut end = sample();
            change(&mut end);
            wrong(&end)
        };
        fn mux(sample: &mut ResourceSample) -> &mut RoleUsage {
            sample.roles.get_mut("pdp-mux").unwrap()
        }
        assert_eq!(with(|end| mux(end).processes = 1), ["processes as before"]);
        assert_eq!(with(|end| mux(end).descriptors = 27), ["descriptors within their bound"]);
        assert!(with(|end| mux(end).descriptors = 26).is_empty());
        assert_eq!(with(|end| mux(end).maps = 133), ["mappings within their bound"]);
        assert_eq!(with(|end| mux(end).memory_kb = 10_000), ["memory within its bound"]);
        assert!(with(|end| mux(end).memory_kb = 9_000).is_empty());
        let more = |end: &mut ResourceSample| {
            end.resources.get_mut("mounts as before").unwrap().insert("/b".into());
        };
        assert_eq!(with(more), ["mounts as before"]);
        assert_eq!(with(|end| end.namespaces = 1), ["network namespaces in use as before"]);
        let rows = |end: &mut ResourceSample| *end.rows.get_mut("things").unwrap() = 8;
        assert_eq!(with(rows), ["rows of the state as before"]);
        assert!(with(|end| *end.rows.get_mut("history").unwrap() = 900).is_empty());
        let rows = |end: &mut ResourceSample| *end.rows.get_mut("history").unwrap() = 10_001;
        assert_eq!(with(rows), ["rows of the state as before"]);
        assert_eq!(with(|end| end.log_bytes = 1), ["state and logs within their bounds"]);
    }

    #[test]
    fn parses_memory_usage() {
        let text = "00400000-7ffd ---p 00000000 00:00 0 [rollup]\nRss:  34 kB\nPss_Anon:   12 kB\n";
        assert_eq!(kilobytes(text, "Pss_Anon:"), 12);
        assert_eq!(kilobytes(text, "Shared:"), 0);
    }
}
