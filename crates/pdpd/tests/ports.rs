//! Ports whose links stay in the kernel, of nodes that come while others go.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use pdp_container::Process;
use pdp_container::cgroup::Cgroups;
use pdp_net::ports::PortSpec;
use pdpd::plan::{Places, PortNow, StraightPort, To};
use pdpd::ports::Ports;

/// How long one that is to be made is waited for while others are removed.
const WHILE: Duration = Duration::from_millis(300);

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process in a network namespace of its own, in place of a guest.
struct Guest(Child);

impl Guest {
    fn new() -> Self {
        let child = Command::new("unshare").args(["-n", "sleep", "600"]).spawn().expect("unshare");
        let name = format!("/proc/{}/comm", child.id());
        eventually("it is in its namespace", || {
            fs::read_to_string(&name).is_ok_and(|name| name == "sleep\n")
        });
        Self(child)
    }

    fn process(&self) -> Process {
        Process::of(self.0.id()).expect("it runs")
    }

    fn has(&self, interface: &str) -> bool {
        let link = format!("/proc/{}/net/dev", self.0.id());
        fs::read_to_string(link).expect("it runs").contains(&format!(" {interface}:"))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn port(number: u32, to: u32) -> StraightPort {
    let spec = PortSpec {
        number,
        vrouter: number,
        name: format!("eth{number}"),
        mac: [2, 0, 0, 0, 0, number as u8],
        mtu: 1500,
        addresses: vec![],
        routes: vec![],
    };
    StraightPort { spec, to: To::Port(to), rate: None }
}

/// One is removed that nothing wants any more. Meanwhile a spec that has another is stored, and the node of that is made:
/// what is wanted was asked for before, and says nothing of it.
#[test]
fn who_is_made_while_others_are_removed_stays() {
    let run = tempfile::tempdir().expect("a directory");
    let pins = Path::new("/sys/fs/bpf").join(format!("pdp-test-ports-{}", std::process::id()));
    let places =
        Places { run: run.path().to_owned(), lib: run.path().to_owned(), pins: pins.clone() };
    let ports = Ports::new(&places);
    let cgroups = Cgroups::new("pdp-test-ports").expect("cgroups");
    let (guest, all) = (Guest::new(), [port(0, 1), port(1, 0), port(2, 3)]);
    let see_to = |node: &str, at: usize| {
        let now = PortNow { port: &all[at], carrier: true, joined: true, device: None };
        ports.see_to(("red", node), guest.process(), None, &[now], &cgroups).expect("a port");
    };
    see_to("stays", 0);
    see_to("goes", 1);
    std::thread::scope(|scope| {
        let kept = || {
            let comes = scope.spawn(|| see_to("comes", 2));
            let begun = Instant::now();
            while !comes.is_finished() && begun.elapsed() < WHILE {
                std::thread::sleep(Duration::from_millis(1));
            }
            BTreeSet::from([0])
        };
        ports.remove_but(&kept, &|| false).expect("removed");
    });
    assert_eq!(["eth0", "eth1", "eth2"].map(|name| guest.has(name)), [true, false, true]);
    ports.remove_but(&BTreeSet::new, &|| false).expect("all removed");
    eventually("their namespace is gone, and they with it", || {
        !guest.has("eth0") && !guest.has("eth2")
    });
    assert!(!pins.join("_ports").exists() && !run.path().join("ports").exists());
    let _ = fs::remove_dir(pins);
}
