//! `make demo` and `make demo-down`: Figure 1 of the PdP paper with the real table, whole, under
//! a name of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pdp_e2e::bin;

/// Longest run of the demo, seconds: it waits within bounds of its own, together less than that.
const DEMO_S_MAX: &str = "1500";

/// A demo; taken down when dropped, after a panic too.
struct Demo {
    name: String,
}

impl Demo {
    fn run(&self, verb: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=20", DEMO_S_MAX]).arg(bin("pdp-demo"));
        command.args(["--name", &self.name]).args(verb).output().expect("pdp-demo")
    }

    /// All that exists of it: a line each.
    fn leftovers(&self) -> Vec<String> {
        let own = format!("pdp-{}", self.name);
        let is_own = |text: &str| text.contains(&own);
        let mut found = Vec::new();
        let mut places: Vec<PathBuf> =
            ["/run", "/run/netns", "/var/lib", "/sys/fs/bpf", "/sys/fs/cgroup"]
                .map(PathBuf::from)
                .into();
        // Each hierarchy of version 1.
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

/// A row of the closing table, one cell for each vnet.
fn row<'a>(table: &'a str, name: &str) -> Vec<&'a str> {
    let cells = |line: &'a str| line.split(['|', '│', '┆']).map(str::trim).collect::<Vec<_>>();
    let mut rows = table.lines().map(cells);
    let found = rows.find(|cells| cells.contains(&name)).unwrap_or_default();
    found.into_iter().filter(|cell| !cell.is_empty() && *cell != name).collect()
}

#[test]
fn figure_1_comes_up_adds_up_and_goes() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/e2e");
    let demo = Demo { name: format!("test{}", std::process::id()) };
    let up = demo.run(&["up", "--repo", repository.to_str().expect("a path")]);
    let said = words(&up);
    assert!(up.status.success(), "{}\n{said}", up.status);
    assert!(!said.contains("WRONG"), "{said}");
    for check in ["adds up", "agrees with the kernel"] {
        assert_eq!(row(&said, check), ["yes"; 3], "{check}\n{said}");
    }
    // 968,428 prefixes of IPv4 and 177,846 of IPv6, and green's own links.
    assert!(said.contains("green learned 968428 IPv4 and 177846 IPv6 routes"), "{said}");
    assert!(!demo.leftovers().is_empty(), "it stays up");

    let down = demo.run(&["down"]);
    assert!(down.status.success(), "{}", words(&down));
    assert_eq!(demo.leftovers(), [""; 0]);
}
