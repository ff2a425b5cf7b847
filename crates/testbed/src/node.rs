//! A node: its places, the `pdp` command that reaches it, and what it holds of the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{CommandError, bin, output_of, try_sh};

/// A PdP node on this machine, running or not.
#[derive(Clone, Debug)]
pub struct PdpNode {
    /// Network namespace.
    pub netns: String,
    /// Name of its cgroup in every hierarchy, and of its directory of BPF pins.
    name: String,
    run: PathBuf,
    state: PathBuf,
    /// Directories with all of its files.
    directories: Vec<PathBuf>,
}

/// Process of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitoredProcess {
    /// Process ID.
    pub pid: u32,
    /// Program's name.
    pub role: String,
    /// Arguments, each followed by a space.
    pub line: String,
    /// Cgroup with a slash at its end, if it is one of the node's, otherwise empty.
    pub cgroup: String,
}

impl PdpNode {
    /// A node with these run and state directories.
    pub fn new(netns: String, name: String, [run, state]: [PathBuf; 2]) -> Self {
        let directories = vec![run.clone(), state.clone()];
        Self { netns, name, run, state, directories }
    }

    /// A node with its run and its state directory in one directory.
    pub fn inside(netns: String, name: String, directory: &Path) -> Self {
        let (run, state) = (directory.join("run"), directory.join("state"));
        Self { netns, name, run, state, directories: vec![directory.to_owned()] }
    }

    /// Run directory of pdpd.
    pub fn run_dir(&self) -> PathBuf {
        self.run.clone()
    }

    /// State directory of pdpd.
    pub fn state_dir(&self) -> PathBuf {
        self.state.clone()
    }

    /// Socket of the API.
    pub fn socket(&self) -> PathBuf {
        self.run.join("pdpd.sock")
    }

    /// Directory of a process's record, by its id: `VNET.NODE`, `VNET.NODE.g0`, `mux`.
    pub fn record(&self, id: &str) -> PathBuf {
        self.run.join("records").join(id)
    }

    /// Output of the process with this id.
    pub fn log_of(&self, id: &str) -> String {
        let log = self.state.join("logs").join(format!("{id}.log"));
        fs::read_to_string(log).unwrap_or_default()
    }

    /// Directory of a node's sockets, `VNET/NODE`, inside the run directory.
    pub fn socket_directory(&self, node: &str) -> PathBuf {
        self.run.join("vnets").join(node)
    }

    /// Name of pdpd's cgroup in every hierarchy.
    pub fn cgroup(&self) -> String {
        self.name.clone()
    }

    /// Directory of pdpd's BPF pins.
    pub fn pins(&self) -> PathBuf {
        Path::new("/sys/fs/bpf").join(&self.name)
    }

    /// Arguments of pdpd for its state directory, cgroup, and pins.
    pub fn daemon_arguments(&self) -> [String; 6] {
        let [state, pins] = [&self.state, &self.pins()].map(|path| path.display().to_string());
        ["--state-dir", &state, "--cgroup", &self.name, "--bpf-pin-dir", &pins].map(str::to_owned)
    }

    /// A `pdp` command, not yet started (for captures and long runs).
    pub fn pdp_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(bin("pdp"));
        command.arg("--socket").arg(self.socket()).args(arguments).env("NO_COLOR", "1");
        command
    }

    /// Runs `pdp` with these arguments. Panics with its output if it fails.
    #[track_caller]
    pub fn pdp(&self, arguments: &[&str]) -> String {
        self.try_pdp(arguments).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs `pdp`. Returns its output as error on failure.
    pub fn try_pdp(&self, arguments: &[&str]) -> Result<String, CommandError> {
        output_of(&mut self.pdp_command(arguments), "")
    }

    /// Runs `pdp ARGUMENTS --format json` and parses the output.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let text = self.pdp(&[arguments, &["--format", "json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
    }

    /// Runs `pdp apply -f -` with these YAML documents. Returns its output as error on failure.
    pub fn try_apply(&self, yaml: &str) -> Result<String, CommandError> {
        output_of(&mut self.pdp_command(&["apply", "--allow-files-outside", "-f", "-"]), yaml)
    }

    /// Runs a command line (split at spaces) in a node of a vnet, `VNET/NODE`.
    #[track_caller]
    pub fn exec(&self, node: &str, line: &str) -> String {
        self.try_exec(node, line).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Like [`PdpNode::exec`], but returns its output as error on failure.
    pub fn try_exec(&self, node: &str, line: &str) -> Result<String, CommandError> {
        let mut arguments = vec!["exec", node, "--"];
        arguments.extend(line.split_whitespace());
        self.try_pdp(&arguments)
    }

    /// Processes of this node: those in its cgroups, and those with arguments that name one of its
    /// directories.
    pub fn processes(&self) -> Vec<MonitoredProcess> {
        let group = format!("/{}/", self.name);
        let places: Vec<String> =
            self.directories.iter().map(|directory| directory.display().to_string()).collect();
        let names = |argument: &str| {
            let is_it =
                |place: &String| argument == place || argument.contains(&format!("{place}/"));
            places.iter().any(is_it)
        };
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
            let read = |file| {
                let bytes = fs::read(entry.path().join(file)).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            // The state follows the name in parentheses, which may contain anything. Zombies are
            // skipped, since init is slow to reap.
            if read("stat").rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z')) {
                continue;
            }
            let (role, arguments, groups) =
                (read("comm").trim().to_owned(), read("cmdline"), read("cgroup"));
            let path = |line: &str| line.splitn(3, ':').nth(2).map(|path| format!("{path}/"));
            let cgroup = groups.lines().filter_map(path).find(|path| path.starts_with(&group));
            let is_named = pid != std::process::id() && arguments.split('\0').any(names);
            if cgroup.is_some() || is_named {
                let line = arguments.replace('\0', " ");
                found.push(MonitoredProcess {
                    pid,
                    role,
                    line,
                    cgroup: cgroup.unwrap_or_default(),
                });
            }
        }
        found
    }

    /// Mounts in its directories, the last one first.
    pub fn mounts(&self) -> Vec<PathBuf> {
        let text = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let paths = text.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
        let mut mounts: Vec<PathBuf> = paths.filter(|path| self.contains(path)).collect();
        mounts.reverse();
        mounts
    }

    /// Returns the paths of its cgroup, one for each hierarchy that has it.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        let root = Path::new("/sys/fs/cgroup");
        let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path());
        let all = std::iter::once(root.to_owned()).chain(hierarchies);
        all.map(|hierarchy| hierarchy.join(&self.name)).filter(|path| path.is_dir()).collect()
    }

    /// Remains of this node, one line each. Those of a running pdpd, given by its process id, do
    /// not count. Network namespaces are not listed.
    pub fn leftovers(&self, pdpd: Option<u32>) -> Vec<String> {
        let mut found = Vec::new();
        for MonitoredProcess { pid, line, .. } in self.processes() {
            if Some(pid) != pdpd {
                found.push(format!("process {pid}: {line}"));
            }
        }
        for mount in self.mounts() {
            found.push(format!("mount {}", mount.display()));
        }
        // A running pdpd has these two, even if they are empty.
        let directories = |path: &Path| {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            entries.filter(|entry| entry.path().is_dir()).count()
        };
        let is_claim = |path: &Path| pdpd.is_some() && directories(path) == 0;
        for cgroup in self.cgroups().into_iter().filter(|cgroup| !is_claim(cgroup)) {
            found.push(format!("cgroup {}", cgroup.display()));
        }
        if self.pins().exists() && !is_claim(&self.pins()) {
            found.push(format!("pins {}", self.pins().display()));
        }
        for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            let backing = entry.path().join("loop/backing_file");
            let backing = fs::read_to_string(backing).unwrap_or_default();
            if self.contains(Path::new(&backing)) {
                found.push(format!("loop device {}: {}", entry.path().display(), backing.trim()));
            }
        }
        let volumes = fs::read_dir(self.state.join("volumes")).into_iter().flatten();
        for volumes in volumes.flatten() {
            found.push(format!("volumes {}", volumes.path().display()));
        }
        for entry in fs::read_dir(&self.run).into_iter().flatten().flatten() {
            let own = ["pdpd.sock", "pdpd.lock", "pdpd.log", "version"];
            if !own.iter().any(|name| entry.file_name() == *name) {
                found.push(format!("file {}", entry.path().display()));
            }
        }
        if Path::new("/run/netns").join(&self.netns).exists() {
            let list = |what| try_sh(&format!("ip -n {} -o link show {what}", self.netns));
            let [links, programs] = [list("type tun"), list("| grep xdp || true")]
                .map(|lines| lines.unwrap_or_else(String::from));
            found.extend(links.lines().map(|line| format!("interface {line}")));
            found.extend(programs.lines().map(|line| format!("xdp {line}")));
        }
        found
    }

    fn contains(&self, path: &Path) -> bool {
        self.directories.iter().any(|directory| path.starts_with(directory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Background;

    #[test]
    fn processes_that_name_a_directory_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().display().to_string();
        let node = PdpNode::inside("none".into(), "pdp-none".into(), directory.path());
        // It goes on without the file.
        let start =
            |file: String| Background::start(Command::new("tail").args(["-f", "/dev/null", &file]));
        let own = [start(place.clone()), start(format!("log={place}/log"))];
        let _other = start(format!("{place}x/log"));
        let mut found: Vec<u32> = node.processes().iter().map(|process| process.pid).collect();
        found.sort_unstable();
        let mut expected = own.each_ref().map(Background::pid);
        expected.sort_unstable();
        assert_eq!(found, expected);
        assert!(node.processes().iter().all(|process| process.role == "tail"));
        assert!(node.processes().iter().all(|process| process.cgroup.is_empty()));
    }
}
