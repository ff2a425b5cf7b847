//! `make demo` and `make demo-down`: the whole Figure 1 of
//! the PdP paper with the real table, under its own name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use pdp_e2e::{all_answered, alone, bin, meter};

/// Longest run of the demo, seconds. Its own waits have bounds whose sum is less than that.
const DEMO_S_MAX: &str = "1500";

/// Demo; taken down when dropped, even after a panic.
pub(crate) struct Demo {
    pub(crate) name: String,
}

impl Demo {
    pub(crate) fn run(&self, verb: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=20", DEMO_S_MAX]).arg(bin("pdp-demo"));
        command.args(["--name", &self.name]).args(verb).output().expect("pdp-demo")
    }

    /// Brings it up with these arguments, and checks that all is well. Returns its output.
    pub(crate) fn up(&self, arguments: &[&str], vnets: usize) -> String {
        let repository =
            Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/e2e");
        let repository = repository.to_str().expect("a path");
        let up = self.run(&[&["up", "--repo", repository], arguments].concat());
        let output = words(&up);
        assert!(up.status.success(), "{}\n{output}", up.status);
        assert!(!output.contains("WRONG"), "{output}");
        for check in ["adds up", "agrees with the kernel"] {
            assert_eq!(row(&output, check), vec!["yes"; vnets], "{check}\n{output}");
        }
        output
    }

    /// Takes it down, and checks that nothing remains.
    pub(crate) fn down(&self) {
        assert!(!self.leftovers().is_empty(), "it stays up");
        let down = self.run(&["down"]);
        assert!(down.status.success(), "{}", words(&down));
        assert_eq!(self.leftovers(), [""; 0]);
    }

    /// All that exists of it, one line each.
    fn leftovers(&self) -> Vec<String> {
        let own = format!("pdp-{}", self.name);
        let is_own = |text: &str| text.contains(&own);
        let mut found = Vec::new();
        let mut places: Vec<PathBuf> =
            ["/run", "/run/netns", "/var/lib", "/sys/fs/bpf", "/sys/fs/cgroup"]
                .map(PathBuf::from)
                .into();
        // All version 1 hierarchies.
        places.extend(entries(Path::new("/sys/fs/cgroup")));
        for entry in places.iter().flat_map(|place| entries(place)) {
            found.extend(is_own(&entry.to_string_lossy()).then(|| entry.display().to_string()));
        }
        for process in entries(Path::new("/proc")) {
            let line = fs::read(process.join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            found.extend(is_own(&line).then(|| format!("{}: {line}", process.display())));
        }
        let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
        found.extend(mounts.lines().filter(|line| is_own(line)).map(str::to_owned));
        found
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.run(&["down"]);
        }
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Row of the closing table, one cell for each vnet.
pub(crate) fn row<'a>(table: &'a str, name: &str) -> Vec<&'a str> {
    let cells = |line: &'a str| line.split(['|', '│', '┆']).map(str::trim).collect::<Vec<_>>();
    let mut rows = table.lines().map(cells);
    let found = rows.find(|cells| cells.contains(&name)).unwrap_or_default();
    found.into_iter().filter(|cell| !cell.is_empty() && *cell != name).collect()
}

/// Measuring time of an idle demo, and the most cores
/// that its mux, guests and helpers may use together.
const IDLE: Duration = Duration::from_secs(5);
const IDLE_CORES_MAX: f64 = 0.05;

/// Pings after the idle time, the first of them immediately.
const BURST: usize = 500;

/// CPU time so far of the processes in the demo's cgroup, by program.
fn cpu_s(demo: &Demo) -> BTreeMap<String, f64> {
    let own = format!("/pdp-{}/", demo.name);
    let mut all = BTreeMap::new();
    for process in entries(Path::new("/proc")) {
        let read = |file: &Path| fs::read_to_string(file).unwrap_or_default();
        if !read(&process.join("cgroup")).contains(&own) {
            continue;
        }
        let pid = process.file_name().and_then(|name| name.to_str()?.parse().ok());
        let name = read(&process.join("comm")).trim().to_owned();
        *all.entry(name).or_default() += meter::cpu_s(&pid.into_iter().collect::<Vec<_>>());
    }
    all
}

/// An idle demo uses little CPU, and a burst afterwards loses nothing.
fn idles(demo: &Demo) {
    let before = cpu_s(demo);
    assert!(before.contains_key("pdp-mux") && before.contains_key("pdp-router"), "{before:?}");
    std::thread::sleep(IDLE);
    let after = cpu_s(demo);
    let used = |name: &String| (after[name] - before.get(name).unwrap_or(&0.0)).max(0.0);
    let each: BTreeMap<_, _> = after
        .keys()
        .map(|name| (name, format!("{:.2} %", used(name) / IDLE.as_secs_f64() * 100.0)))
        .collect();
    let cores = after.keys().map(used).sum::<f64>() / IDLE.as_secs_f64();
    println!("idle: {:.2} % of a core: {each:?}", cores * 100.0);
    assert!(cores < IDLE_CORES_MAX, "{each:?}");

    let socket = format!("/run/pdp-{}/pdpd.sock", demo.name);
    let line = format!("ping -c{BURST} -l64 -i0.002 -w60 10.0.20.1");
    let mut ping = Command::new(bin("pdp"));
    ping.args(["--socket", &socket, "exec", "red/h1", "--"]).args(line.split(' '));
    let output = ping.output().expect("pdp");
    assert!(all_answered(&words(&output), BURST), "{}", words(&output));
}

#[test]
fn figure_1_runs_and_its_counters_add_up() {
    let _alone = alone();
    let demo = Demo { name: format!("test{}", std::process::id()) };
    let output = demo.up(&[], 3);
    assert_eq!(row(&output, "forwards")[1], "the kernel", "{output}");
    // 968,428 prefixes of IPv4 and 177,846 of IPv6, and green's own links.
    assert!(output.contains("green learned 968428 IPv4 and 177846 IPv6 routes"), "{output}");
    idles(&demo);
    demo.down();
}
