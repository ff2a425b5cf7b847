//! Ports whose links stay in the kernel, of nodes that are created while others are removed.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use pdp_container::Process;
use pdp_container::cgroup::Cgroups;
use pdp_net::ports::PortSpec;
use pdpd::kernel::ports::KernelPorts;
use pdpd::plan::{DaemonPaths, KernelLinkPort, KernelLinkPortState, KernelLinkTarget};

/// Longest wait for a node that is created while others are removed.
const WHILE: Duration = Duration::from_millis(300);

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process in its own network namespace, in place of a guest.
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

fn port(number: u32, to: u32) -> KernelLinkPort {
    let spec = PortSpec {
        number,
        vrouter: number,
        name: format!("eth{number}"),
        mac: [2, 0, 0, 0, 0, number as u8],
        mtu: 1500,
        addresses: vec![],
        routes: vec![],
    };
    KernelLinkPort { spec, to: KernelLinkTarget::Port(to), rate: None }
}

/// An unwanted port is removed. Meanwhile a spec with another port is stored, and its
/// node is created. The list of wanted ports was read before, and does not include it.
#[test]
fn new_port_survives_concurrent_port_removal() {
    let run = tempfile::tempdir().expect("a directory");
    let pins = Path::new("/sys/fs/bpf").join(format!("pdp-test-ports-{}", std::process::id()));
    let places =
        DaemonPaths { run: run.path().to_owned(), lib: run.path().to_owned(), pins: pins.clone() };
    let ports = KernelPorts::new(&places);
    let cgroups = Cgroups::new("pdp-test-ports").expect("cgroups");
    let (guest, all) = (Guest::new(), [port(0, 1), port(1, 0), port(2, 3)]);
    let see_to = |node: &str, at: usize| {
        let now = KernelLinkPortState { port: &all[at], carrier: true, joined: true, device: None };
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
