//! Network namespaces of a node between two machines: `out1 –a– node –b– out2`. Needs root.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use pdp_underlay::{TunnelEndpoints, Underlay};

/// Three namespaces, which disappear with it. The calling thread is in the node's.
pub struct Place {
    id: String,
}

impl Place {
    /// Makes the namespaces, with 10.9.1.0/24 and fd00:1::/64 on `a`, and 10.9.2.0/24 and
    /// fd00:2::/64 on `b`. The node is the first host of each network.
    pub fn enter(test: &str) -> Self {
        let place = Self { id: format!("underlay-{test}-{}", std::process::id()) };
        for name in ["node", "out1", "out2"] {
            run(&format!("ip netns add {}", place.netns(name)));
        }
        for (device, out, net) in [("a", "out1", 1), ("b", "out2", 2)] {
            place.connect("node", device, out, net);
        }
        let node = File::open(format!("/run/netns/{}", place.netns("node"))).unwrap();
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(node.as_fd(), kind).unwrap();
        place
    }

    /// Adds another machine, `far`, behind `out1`, which becomes a router. Its networks are
    /// 10.9.7.0/24 and fd00:7::/64.
    pub fn add_far(&self) {
        run(&format!("ip netns add {}", self.netns("far")));
        self.connect("out1", "far", "far", 7);
        self.exec("far", "ip route add default via 10.9.7.1");
        self.exec("far", "ip route add default via fd00:7::1");
        self.exec("out1", "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
    }

    /// Connects a device of one machine to `eth0` of another.
    fn connect(&self, near: &str, device: &str, far: &str, net: u32) {
        let ends = [(near, device, 1), (far, "eth0", 2)];
        let [near, far] = [near, far].map(|name| self.netns(name));
        run(&format!(
            "ip link add name {device} netns {near} type veth peer name eth0 netns {far}"
        ));
        for (name, device, host) in ends {
            self.exec(name, &format!("ip addr add 10.9.{net}.{host}/24 dev {device}"));
            self.exec(name, &format!("ip addr add fd00:{net}::{host}/64 dev {device} nodad"));
            self.exec(name, &format!("ip link set dev {device} up"));
        }
    }

    fn netns(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }

    /// Runs a command on a machine. Returns its output.
    pub fn exec(&self, name: &str, command: &str) -> String {
        run(&format!("ip netns exec {} {command}", self.netns(name)))
    }

    /// Returns the MAC address of a machine's device.
    pub fn mac(&self, name: &str, device: &str) -> [u8; 6] {
        let text = self.exec(name, &format!("cat /sys/class/net/{device}/address"));
        let bytes = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap());
        bytes.collect::<Vec<_>>().try_into().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for name in ["node", "out1", "out2", "far"] {
            // Not every place has `far`.
            let _ = output(&format!("ip netns del {}", self.netns(name)));
        }
    }
}

fn output(command: &str) -> Output {
    let mut words = command.split(' ');
    Command::new(words.next().unwrap()).args(words).output().unwrap()
}

fn run(command: &str) -> String {
    let output = output(command);
    assert!(output.status.success(), "{command}\n{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the index of a device of the calling thread's namespace, and both addresses.
pub fn ends(device: &str, local: &str, remote: &str) -> TunnelEndpoints {
    let family = rustix::net::AddressFamily::INET;
    let socket = rustix::net::socket(family, rustix::net::SocketType::DGRAM, None).unwrap();
    let index = rustix::net::netdevice::name_to_index(&socket, device).unwrap();
    (index, local.parse().unwrap(), remote.parse().unwrap())
}

/// Returns the problem of a tunnel with packets of up to 1,500 bytes.
pub fn problem(underlay: &Underlay, ends: TunnelEndpoints) -> Option<pdp_model::UnderlayProblem> {
    underlay.problem(ends.0, ends.1, ends.2, 1500)
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    const EVENTUALLY: Duration = Duration::from_secs(30);
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < EVENTUALLY, "not within {EVENTUALLY:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
