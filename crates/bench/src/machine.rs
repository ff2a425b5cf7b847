//! The machine, and the versions of the peers.

use std::fs;
use std::path::Path;
use std::process::Command;

use pdp_testbed::{finish, meter};
use serde::{Deserialize, Serialize};

use crate::site::repository;

/// Machine of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// Model of the CPU.
    pub cpu: String,
    /// Frequency as reported by the kernel, MHz.
    pub cpu_mhz: String,
    /// Number of cores.
    pub cores: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// The distribution.
    pub system: String,
    /// Hypervisor, if it is a virtual machine.
    pub hypervisor: String,
    /// Version of PdP (git), with `-dirty` if files other than results differ from it.
    pub pdp: String,
    /// Version of Debian's package `dpdk-dev`.
    pub dpdk: String,
    /// Version of Debian's package `openvswitch-switch`.
    pub openvswitch: String,
}

impl MachineInfo {
    /// This machine. Unknown fields are empty.
    pub fn here() -> Self {
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let system = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let package = |name| first_output_line("dpkg-query", &["-W", "-f", "${Version}", name]);
        Self {
            cpu: meter::cpu("model name"),
            cpu_mhz: meter::cpu("cpu MHz"),
            cores: cores(),
            kernel: kernel.trim().to_owned(),
            system: system.unwrap_or_default().trim_matches('"').to_owned(),
            hypervisor: first_output_line(
                "sh",
                &["-c", "LC_ALL=C lscpu | sed -n 's/^Hypervisor vendor: *//p'"],
            ),
            pdp: version(),
            dpdk: package("dpdk-dev"),
            openvswitch: package("openvswitch-switch"),
        }
    }
}

/// Programs of others used by measurements, and their Debian packages.
const PROGRAMS: [(&str, &str); 7] = [
    ("dpdk-testpmd", "dpdk-dev"),
    ("ovs-vswitchd", "openvswitch-switch"),
    ("ovsdb-server", "openvswitch-switch"),
    ("iperf3", "iperf3"),
    ("ethtool", "ethtool"),
    ("xzcat", "xz-utils"),
    ("perf", "linux-perf"),
];

/// Prints the peers and measuring tools that this machine lacks.
pub fn tell_what_lacks() {
    let (path, sbin) = (std::env::var("PATH").unwrap_or_default(), "/usr/sbin");
    let is_there = |program: &str| {
        path.split(':').chain([sbin]).any(|directory| Path::new(directory).join(program).exists())
    };
    for (program, package) in PROGRAMS.iter().filter(|(program, _)| !is_there(program)) {
        eprintln!(
            "{program} is missing (Debian package {package}; scripts/install-deps installs it): the \
             report will lack what needs it"
        );
    }
}

/// Commit of this program, as far as git knows.
fn version() -> String {
    let root = repository().display().to_string();
    let commit = first_output_line("git", &["-C", &root, "describe", "--always"]);
    let others = [":/", ":(exclude,top)bench"];
    let status = ["-C", &root, "status", "--porcelain", "--untracked-files=no", "--"];
    let changed = first_output_line("git", &[&status[..], &others].concat());
    if changed.is_empty() { commit } else { commit + "-dirty" }
}

/// Number of cores of this machine.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// First line of a command's output. Empty if it can't be run or fails.
pub fn first_output_line(program: &str, arguments: &[&str]) -> String {
    let output = finish(Command::new(program).args(arguments)).unwrap_or_default();
    output.lines().next().unwrap_or_default().trim().to_owned()
}
