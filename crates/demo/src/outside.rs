//! The environment of the node: the underlay, and the external machines with their tunnels and
//! routing software. All of it is in network namespaces and one directory of files ([`paths`]).

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use ipnet::IpNet;
use pdp_testbed::{TestMachine, ip_batch, remove_machines, retry, try_sh};

use crate::paths;
use crate::table::AnnouncementTable;

/// Pause between two checks of an awaited condition.
pub const POLL_PAUSE: Duration = Duration::from_millis(200);

/// External machine at each port of each vnet's `r1`.
pub const OUTSIDE: [(&str, &[(&str, &str)]); 3] = [
    ("red", &[("eth0", "red-x"), ("eth1", "red-y")]),
    ("blue", &[("eth0", "blue-x"), ("eth1", "blue-y")]),
    ("green", &[("eth0", "g0"), ("eth1", "g1"), ("eth2", "g2"), ("eth3", "g3"), ("eth4", "g4")]),
];

/// Arguments that turn off frames larger than the
/// wire's, and checksums left to a nonexistent device.
const NO_OFFLOADS: &str = "tx off gso off tso off gro off";

/// MTU inside a VXLAN tunnel and inside Ethernet in UDP, over 1500 bytes of IPv4.
const VXLAN_MTU: u32 = 1450;
const UDP_MTU: u32 = 1458;

/// Kind of a machine's tunnel to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineTunnel {
    /// The kernel's VXLAN device, with this network identifier.
    Vxlan(u32),
    /// socat between a TAP and UDP, this port at both ends.
    Udp(u16),
}

/// Routing software of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Software {
    /// FRR's OSPF.
    Ospf,
    /// FRR's IS-IS, with the last two digits of its system identifier.
    Isis(u8),
    /// BIRD, announcing a peer's part of the table.
    Bird(usize),
    /// None: a default route to the node.
    None,
}

/// An external machine.
#[derive(Clone, Copy, Debug)]
pub struct ExternalMachine {
    /// Name: the vnet and its position there.
    pub name: &'static str,
    /// True if it is on external interface A, otherwise on B.
    pub on_a: bool,
    /// Last byte of its underlay address.
    pub host: u8,
    /// Tunnel.
    pub tunnel: MachineTunnel,
    /// Addresses of its tunnel interface.
    pub addresses: &'static [&'static str],
    /// An address behind it.
    pub own: Option<&'static str>,
    /// The node at the tunnel's other end.
    pub gateways: &'static [&'static str],
    /// Routing software.
    pub software: Software,
}

/// All external machines.
pub const MACHINES: [ExternalMachine; 9] = [
    ExternalMachine {
        name: "red-x",
        on_a: true,
        host: 11,
        tunnel: MachineTunnel::Vxlan(10),
        addresses: &["10.0.0.2/30"],
        own: Some("10.0.10.1"),
        gateways: &[],
        software: Software::Ospf,
    },
    ExternalMachine {
        name: "red-y",
        on_a: false,
        host: 11,
        tunnel: MachineTunnel::Udp(5010),
        addresses: &["10.0.0.6/30"],
        own: Some("10.0.20.1"),
        gateways: &[],
        software: Software::Ospf,
    },
    ExternalMachine {
        name: "blue-x",
        on_a: true,
        host: 12,
        tunnel: MachineTunnel::Vxlan(20),
        addresses: &["10.0.0.2/30"],
        own: Some("10.0.10.1"),
        gateways: &[],
        software: Software::Isis(2),
    },
    ExternalMachine {
        name: "blue-y",
        on_a: false,
        host: 12,
        tunnel: MachineTunnel::Udp(5020),
        addresses: &["10.0.0.6/30"],
        own: Some("10.0.20.1"),
        gateways: &[],
        software: Software::Isis(3),
    },
    ExternalMachine {
        name: "g0",
        on_a: true,
        host: 20,
        tunnel: MachineTunnel::Vxlan(100),
        addresses: &["10.1.0.2/30", "fd00:1:0::2/64"],
        own: None,
        gateways: &["10.1.0.1", "fd00:1:0::1"],
        software: Software::None,
    },
    peer("g1", true, 21, MachineTunnel::Vxlan(101), &["10.1.1.2/30", "fd00:1:1::2/64"], 0),
    peer("g2", true, 22, MachineTunnel::Udp(5102), &["10.1.2.2/30", "fd00:1:2::2/64"], 1),
    peer("g3", false, 23, MachineTunnel::Vxlan(103), &["10.1.3.2/30", "fd00:1:3::2/64"], 2),
    peer("g4", false, 24, MachineTunnel::Udp(5104), &["10.1.4.2/30", "fd00:1:4::2/64"], 3),
];

/// Table of a peer's kernel for the moving routes. BIRD
/// follows it without reading its configuration again.
const MOVING_TABLE: u32 = 77;

const fn peer(
    name: &'static str,
    on_a: bool,
    host: u8,
    tunnel: MachineTunnel,
    addresses: &'static [&'static str],
    number: usize,
) -> ExternalMachine {
    let software = Software::Bird(number);
    ExternalMachine { name, on_a, host, tunnel, addresses, own: None, gateways: &[], software }
}

impl ExternalMachine {
    /// Returns the machine of this name.
    pub fn named(name: &str) -> Result<&'static Self> {
        let found = MACHINES.iter().find(|machine| machine.name == name);
        found.with_context(|| format!("there is no external machine {name}"))
    }

    /// Returns its network namespace.
    pub fn machine(&self) -> TestMachine {
        paths::machine(self.name)
    }

    fn directory(&self) -> PathBuf {
        paths::outside().join(self.name)
    }

    fn underlay(&self, host: u8) -> String {
        format!("{}.{host}", if self.on_a { "192.0.2" } else { "198.51.100" })
    }

    /// Makes the machine, including its addresses.
    fn make(&self) -> Result<()> {
        let bridge = if self.on_a { "bridge-a" } else { "bridge-b" };
        fs::create_dir_all(self.directory())?;
        let machine = TestMachine::make(paths::netns(self.name))?;
        connect(&machine, "under0", &paths::underlay(), (self.name, bridge))?;
        let (local, remote) = (self.underlay(self.host), self.underlay(1));
        script(&machine, &format!("ip addr add {local}/24 dev under0"))?;
        let mtu = match self.tunnel {
            MachineTunnel::Vxlan(vni) => {
                script(
                    &machine,
                    &format!(
                        "ip link add eth0 type vxlan id {vni} local {local} remote {remote} \
                         dstport 4789 dev under0
                         ethtool -K eth0 {NO_OFFLOADS}"
                    ),
                )?;
                VXLAN_MTU
            }
            MachineTunnel::Udp(port) => {
                let udp = format!("UDP4-DATAGRAM:{remote}:{port},bind={local}:{port}");
                let tap = "TUN,tun-type=tap,tun-name=eth0,iff-no-pi";
                let log = self.directory().join("socat.log");
                machine.background(&["socat", &udp, tap], &log)?;
                retry(Duration::from_secs(10), POLL_PAUSE, "socat's TAP", || {
                    script(&machine, "ip link show eth0")
                })?;
                UDP_MTU
            }
        };
        let mut lines = format!("ip link set eth0 mtu {mtu} up\n");
        for address in self.addresses {
            let nodad = if address.contains(':') { "nodad" } else { "" };
            lines += &format!("ip addr add {address} dev eth0 {nodad}\n");
        }
        if let Some(own) = self.own {
            lines += &format!("ip addr add {own}/32 dev lo\n");
        }
        for gateway in self.gateways {
            lines += &format!("ip route add default via {gateway}\n");
        }
        script(&machine, &lines)
    }

    /// Starts its routing software.
    fn start(&self, table: &AnnouncementTable) -> Result<()> {
        match self.software {
            Software::Ospf => {
                let interface = " ip ospf network point-to-point\n ip ospf hello-interval 1\n \
                                 ip ospf dead-interval 10\n";
                let ospfd = format!(
                    "interface eth0\n{interface}router ospf\n network 10.0.0.0/16 area 0\n"
                );
                self.frr(&[("zebra", ""), ("ospfd", &ospfd)])
            }
            Software::Isis(system) => {
                let isisd = format!(
                    "interface eth0\n ip router isis blue\n isis network point-to-point\n \
                     isis hello-interval 1\n isis hello-multiplier 10\n\
                     interface lo\n ip router isis blue\n isis passive\n\
                     router isis blue\n net 49.0001.0000.0000.{system:04}.00\n \
                     is-type level-2-only\n lsp-gen-interval 1\n spf-interval 1\n"
                );
                self.frr(&[("zebra", ""), ("isisd", &isisd)])
            }
            Software::Bird(number) => self.bird(number, table),
            Software::None => Ok(()),
        }
    }

    fn frr(&self, daemons: &[(&str, &str)]) -> Result<()> {
        let directory = self.directory();
        let path = |name: &str| directory.join(name).to_string_lossy().into_owned();
        for (daemon, config) in daemons {
            fs::write(path(&format!("{daemon}.conf")), format!("log stdout\n{config}"))?;
        }
        try_sh(&format!("chown -R frr:frr {}", directory.display()))?;
        for (daemon, _) in daemons {
            let (socket, config) = (path("zserv.api"), path(&format!("{daemon}.conf")));
            let program = format!("/usr/lib/frr/{daemon}");
            let pid = path(&format!("{daemon}.pid"));
            let vty = directory.to_string_lossy().into_owned();
            let words = [&program, "-f", &config, "-i", &pid, "-z", &socket, "--vty_socket", &vty];
            self.machine().background(&words, &directory.join(format!("{daemon}.log")))?;
            if *daemon == "zebra" {
                retry(Duration::from_secs(20), POLL_PAUSE, "zebra's socket", || {
                    fs::metadata(&socket).map(drop).map_err(Into::into)
                })?;
            }
        }
        Ok(())
    }

    fn bird(&self, number: usize, table: &AnnouncementTable) -> Result<()> {
        let directory = self.directory();
        let mut config =
            format!("router id 10.1.{0}.2;\nlog stderr all;\nprotocol device {{}}\n", number + 1);
        for (v4, family) in [(true, "ipv4"), (false, "ipv6")] {
            let gateway = if v4 {
                format!("10.1.{}.1", number + 1)
            } else {
                format!("fd00:1:{}::1", number + 1)
            };
            let routes = directory.join(format!("routes.{family}"));
            fs::write(&routes, table.routes_of(number, v4))?;
            config += &format!(
                "protocol static s{family} {{ {family};\ninclude \"{}\";\n}}\n\
                 protocol kernel k{family} {{ learn; kernel table {MOVING_TABLE};\n  \
                 scan time 10; {family} {{ import all; export none; }};\n}}\n\
                 protocol bgp b{family} {{\n  local as {};\n  neighbor {gateway} as 65000;\n  \
                 connect retry time 2;\n  connect delay time 1;\n  error wait time 2, 10;\n  \
                 hold time 240;\n  {family} {{ import none; export where source = RTS_STATIC || source = RTS_INHERIT; }};\n}}\n",
                routes.display(),
                65001 + number
            );
        }
        let path = directory.join("bird.conf");
        fs::write(&path, config)?;
        self.change_routes(table.moving_of(number).map(|prefix| (prefix, true)))?;
        let (config, control) = (path.to_string_lossy(), directory.join("bird.ctl"));
        try_sh(&format!("bird -p -c {config}"))?;
        let words = ["bird", "-f", "-c", &config, "-s", &control.to_string_lossy()];
        self.machine().background(&words, &directory.join("bird.log")).map(drop)
    }

    /// Announces and withdraws prefixes.
    pub fn change_routes(&self, changes: impl Iterator<Item = (IpNet, bool)>) -> Result<()> {
        let mut lines = String::new();
        for (prefix, announced) in changes {
            let verb = if announced { "replace" } else { "delete" };
            lines += &format!("route {verb} blackhole {prefix} table {MOVING_TABLE}\n");
        }
        Ok(ip_batch(self.machine().enter("ip"), &lines)?)
    }

    /// Makes it accept datagrams for any address, without a route for the datagrams that it sends.
    pub fn accept_everything(&self) -> Result<()> {
        script(
            &self.machine(),
            "for family in -4 -6; do
                ip $family route replace local default dev lo table 100
                ip $family rule add iif eth0 pref 100 lookup 100 2>/dev/null || true
             done",
        )
    }
}

/// Runs shell lines in a machine to their end; stops at the first failure.
fn script(machine: &TestMachine, lines: &str) -> Result<()> {
    machine.finish(&["sh", "-ec", lines])?;
    Ok(())
}

/// Connects a device of a machine to a bridge of the underlay, by a port of this name.
fn connect(
    machine: &TestMachine,
    device: &str,
    underlay: &TestMachine,
    (port, bridge): (&str, &str),
) -> Result<()> {
    machine.connect(device, (underlay, port), NO_OFFLOADS)?;
    script(underlay, &format!("ip link set {port} master {bridge}"))
}

/// Makes the underlay, the node's namespace, and the external interfaces A and B.
pub fn make_underlay() -> Result<()> {
    fs::create_dir_all(paths::outside())?;
    let underlay = TestMachine::make(paths::underlay().netns)?;
    let node = TestMachine::make(paths::node().netns)?;
    for (side, address) in [("a", "192.0.2.1/24"), ("b", "198.51.100.1/24")] {
        let (bridge, device) = (format!("bridge-{side}"), format!("ext-{side}"));
        script(&underlay, &format!("ip link add {bridge} type bridge; ip link set {bridge} up"))?;
        connect(&node, &device, &underlay, (&format!("node-{side}"), &bridge))?;
        script(&node, &format!("ip addr add {address} dev {device}"))?;
    }
    Ok(())
}

/// Makes all external machines.
pub fn make_machines() -> Result<()> {
    MACHINES.iter().try_for_each(ExternalMachine::make)
}

/// Starts the routing software of these vnets' external machines.
pub fn start_software(table: &AnnouncementTable, vnets: &[&str]) -> Result<()> {
    let of = |machine: &&ExternalMachine| {
        let found =
            OUTSIDE.iter().find(|(_, ports)| ports.iter().any(|(_, name)| *name == machine.name));
        found.is_some_and(|(vnet, _)| vnets.contains(vnet))
    };
    MACHINES.iter().filter(of).try_for_each(|machine| machine.start(table))
}

/// True if anything of the demo exists.
pub fn exists() -> bool {
    !namespaces().is_empty()
}

/// Names of the demo's existing network namespaces.
pub fn namespaces() -> Vec<String> {
    let entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let prefix = paths::netns("");
    names.filter(|name| name.starts_with(&prefix)).collect()
}

/// Kills every process in the demo's namespaces, and removes the namespaces and files.
pub fn remove() -> Result<()> {
    let removed = remove_machines(&namespaces());
    if paths::outside().exists() {
        fs::remove_dir_all(paths::outside())?;
    }
    removed
}
