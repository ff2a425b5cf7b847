//! Network namespaces: a shell in each, TAPs, settings.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use pdp_net::tap::{self, TapSpec};

use super::bench::PORTS;
use super::frames::Mac;

/// Persistent shell in a network namespace.
pub struct Shell {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Shell {
    pub fn new(netns: &Path) -> Self {
        let mut child = Command::new("nsenter")
            .arg(format!("--net={}", netns.display()))
            .arg("sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("nsenter");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    pub fn begin(&mut self, lines: &str) {
        writeln!(self.input, "( set -e\n{lines}\n) 2>&1 </dev/null; echo \"=== $?\"")
            .expect("a shell");
    }

    /// Ends it. Returns its output if all commands succeeded.
    pub fn end(&mut self) -> Result<String, String> {
        let mut words = String::new();
        loop {
            let start = words.len();
            assert_ne!(self.output.read_line(&mut words).expect("a shell"), 0, "the shell ended");
            if let Some(code) = words[start..].strip_prefix("=== ") {
                let failed = code.trim() != "0";
                words.truncate(start);
                return if failed { Err(words) } else { Ok(words) };
            }
        }
    }

    #[track_caller]
    pub fn run(&mut self, lines: &str) -> String {
        self.begin(lines);
        self.end().unwrap_or_else(|error| panic!("{lines}: {error}"))
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn make_tap(netns: &Path, name: &str, mac: Mac, mtu: u32) -> File {
    let netns = File::open(netns).expect("the namespace");
    let (addresses, routes) = (Vec::new(), Vec::new());
    let name = name.to_string();
    let spec = TapSpec { name, mac, mtu, addresses, routes, queue_frames: None, owner: None };
    let tap: OwnedFd = tap::create(netns.as_fd(), &spec).expect("a TAP");
    File::from(tap)
}

/// MAC addresses of eth0 to eth3.
pub fn link_addresses(links: &str) -> [Mac; PORTS] {
    std::array::from_fn(|port| {
        let name = format!("eth{port}");
        let line = links.lines().find(|line| line.contains(&name)).expect("an interface");
        let (_, rest) = line.split_once("link/ether ").expect("Ethernet");
        let mut bytes = rest.split([':', ' ']);
        std::array::from_fn(|_| u8::from_str_radix(bytes.next().unwrap_or(""), 16).expect("hex"))
    })
}

pub fn words_of(mac: &Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Copies all settings of one namespace to the other.
pub fn make_settings_equal(from: &Path, to: &Path) {
    let open = |path: &Path| File::open(path).expect("the namespace");
    let (from, to) = (open(from), open(to));
    let read =
        |netns: &File| pdp_net::netns::within(netns.as_fd(), || Ok(settings())).expect("read");
    let expected = read(&from);
    for _ in 0..3 {
        let is = read(&to);
        let missing = expected.iter().filter(|(name, value)| is.get(*name) != Some(value));
        let missing: Vec<(PathBuf, String)> =
            missing.map(|(name, value)| (name.clone(), value.clone())).collect();
        let write = || {
            for (name, value) in &missing {
                // Some are read-only.
                let _ = fs::write(name, value);
            }
            Ok(())
        };
        pdp_net::netns::within(to.as_fd(), write).expect("write");
    }
    let is = read(&to);
    let different: Vec<_> =
        expected.iter().filter(|(name, value)| is.get(*name) != Some(value)).collect();
    assert!(different.is_empty(), "settings: {different:?}");
}

/// The IP settings in the thread's network namespace.
fn settings() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut left =
        ["ipv4", "ipv6"].map(|family| PathBuf::from("/proc/sys/net").join(family)).to_vec();
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(path);
            } else if let Ok(value) = fs::read_to_string(&path) {
                found.insert(path, value);
            }
        }
    }
    found
}
