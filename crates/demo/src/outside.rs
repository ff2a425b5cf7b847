//! What is outside the node: the underlay, and the external machines with their tunnels and
//! routing software. All of it is in network namespaces and one directory of files ([`place`]).

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;

use crate::counters::OUTSIDE;
use crate::place;
use crate::shell::{LOOK_PAUSE, background, command, run, script, wait};
use crate::table::Table;

/// What turns off everything that makes frames larger than the wire's, or leaves checksums to a
/// device that isn't there.
const NO_OFFLOADS: &str = "tx off gso off tso off gro off";

/// MTU inside a VXLAN tunnel and inside Ethernet in UDP, over 1500 bytes of IPv4.
const VXLAN_MTU: u32 = 1450;
const UDP_MTU: u32 = 1458;

/// Longest wait for killed processes to be gone.
const END_MAX: Duration = Duration::from_secs(20);

/// How a machine's tunnel to the node is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tunnel {
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
pub struct Machine {
    /// Its name: of a vnet and its place there.
    pub name: &'static str,
    /// Whether it is on external interface A, else on B.
    pub on_a: bool,
    /// Last byte of its underlay address.
    pub host: u8,
    /// Its tunnel.
    pub tunnel: Tunnel,
    /// Addresses of its tunnel's interface.
    pub addresses: &'static [&'static str],
    /// An address of its own behind it.
    pub own: Option<&'static str>,
    /// The node at the tunnel's other end.
    pub gateways: &'static [&'static str],
    /// What routes.
    pub software: Software,
}

/// All external machines.
pub const MACHINES: [Machine; 9] = [
    Machine {
        name: "red-x",
        on_a: true,
        host: 11,
        tunnel: Tunnel::Vxlan(10),
        addresses: &["10.0.0.2/30"],
        own: Some("10.0.10.1"),
        gateways: &[],
        software: Software::Ospf,
    },
    Machine {
        name: "red-y",
        on_a: false,
        host: 11,
        tunnel: Tunnel::Udp(5010),
        addresses: &["10.0.0.6/30"],
        own: Some("10.0.20.1"),
        gateways: &[],
        software: Software::Ospf,
    },
    Machine {
        name: "blue-x",
        on_a: true,
        host: 12,
        tunnel: Tunnel::Vxlan(20),
        addresses: &["10.0.0.2/30"],
        own: Some("10.0.10.1"),
        gateways: &[],
        software: Software::Isis(2),
    },
    Machine {
        name: "blue-y",
        on_a: false,
        host: 12,
        tunnel: Tunnel::Udp(5020),
        addresses: &["10.0.0.6/30"],
        own: Some("10.0.20.1"),
        gateways: &[],
        software: Software::Isis(3),
    },
    Machine {
        name: "g0",
        on_a: true,
        host: 20,
        tunnel: Tunnel::Vxlan(100),
        addresses: &["10.1.0.2/30", "fd00:1:0::2/64"],
        own: None,
        gateways: &["10.1.0.1", "fd00:1:0::1"],
        software: Software::None,
    },
    peer("g1", true, 21, Tunnel::Vxlan(101), &["10.1.1.2/30", "fd00:1:1::2/64"], 0),
    peer("g2", true, 22, Tunnel::Udp(5102), &["10.1.2.2/30", "fd00:1:2::2/64"], 1),
    peer("g3", false, 23, Tunnel::Vxlan(103), &["10.1.3.2/30", "fd00:1:3::2/64"], 2),
    peer("g4", false, 24, Tunnel::Udp(5104), &["10.1.4.2/30", "fd00:1:4::2/64"], 3),
];

/// Table of a peer's kernel with the routes that come and go: BIRD announces them as they are there,
/// without reading its configuration again.
const MOVING_TABLE: u32 = 77;

const fn peer(
    name: &'static str,
    on_a: bool,
    host: u8,
    tunnel: Tunnel,
    addresses: &'static [&'static str],
    number: usize,
) -> Machine {
    let software = Software::Bird(number);
    Machine { name, on_a, host, tunnel, addresses, own: None, gateways: &[], software }
}

impl Machine {
    /// The machine of this name.
    pub fn named(name: &str) -> Result<&'static Self> {
        let found = MACHINES.iter().find(|machine| machine.name == name);
        found.with_context(|| format!("there is no external machine {name}"))
    }

    /// Its network namespace.
    pub fn netns(&self) -> String {
        place::netns(self.name)
    }

    fn directory(&self) -> PathBuf {
        place::outside().join(self.name)
    }

    fn underlay(&self, host: u8) -> String {
        format!("{}.{host}", if self.on_a { "192.0.2" } else { "198.51.100" })
    }

    /// Makes it, up to its addresses.
    fn make(&self) -> Result<()> {
        let (netns, name, underlay) = (self.netns(), self.name, place::underlay());
        let bridge = if self.on_a { "bridge-a" } else { "bridge-b" };
        fs::create_dir_all(self.directory())?;
        script(
            None,
            &format!(
                "ip netns add {netns}
                 ip link add under0 netns {netns} type veth peer name {name} netns {underlay}
                 ip -n {netns} addr add {}/24 dev under0
                 ip -n {netns} link set lo up
                 ip -n {netns} link set under0 up
                 ip -n {underlay} link set {name} master {bridge} up
                 nsenter --net=/run/netns/{netns} ethtool -K under0 {NO_OFFLOADS}
                 nsenter --net=/run/netns/{underlay} ethtool -K {name} {NO_OFFLOADS}",
                self.underlay(self.host)
            ),
        )?;
        let (local, remote) = (self.underlay(self.host), self.underlay(1));
        let mtu = match self.tunnel {
            Tunnel::Vxlan(vni) => {
                script(
                    Some(&netns),
                    &format!(
                        "ip link add eth0 type vxlan id {vni} local {local} remote {remote} \
                         dstport 4789 dev under0
                         ethtool -K eth0 {NO_OFFLOADS}"
                    ),
                )?;
                VXLAN_MTU
            }
            Tunnel::Udp(port) => {
                let udp = format!("UDP4-DATAGRAM:{remote}:{port},bind={local}:{port}");
                let tap = "TUN,tun-type=tap,tun-name=eth0,iff-no-pi";
                let log = self.directory().join("socat.log");
                background(&netns, &["socat", &udp, tap], &log)?;
                wait("socat's TAP", Duration::from_secs(10), || {
                    run(Some(&netns), &["ip", "link", "show", "eth0"]).map(drop)
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
        script(Some(&netns), &lines).map(drop)
    }

    /// Starts its routing software.
    fn start(&self, table: &Table) -> Result<()> {
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
        run(None, &["chown", "-R", "frr:frr", &directory.to_string_lossy()])?;
        for (daemon, _) in daemons {
            let (socket, config) = (path("zserv.api"), path(&format!("{daemon}.conf")));
            let program = format!("/usr/lib/frr/{daemon}");
            let pid = path(&format!("{daemon}.pid"));
            let vty = directory.to_string_lossy().into_owned();
            let words = [&program, "-f", &config, "-i", &pid, "-z", &socket, "--vty_socket", &vty];
            background(&self.netns(), &words, &directory.join(format!("{daemon}.log")))?;
            if *daemon == "zebra" {
                wait("zebra's socket", Duration::from_secs(20), || {
                    fs::metadata(&socket).map(drop).map_err(Into::into)
                })?;
            }
        }
        Ok(())
    }

    fn bird(&self, number: usize, table: &Table) -> Result<()> {
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
        run(None, &["bird", "-p", "-c", &config])?;
        let words = ["bird", "-f", "-c", &config, "-s", &control.to_string_lossy()];
        background(&self.netns(), &words, &directory.join("bird.log")).map(drop)
    }

    /// Begins or ceases to announce prefixes.
    pub fn change_routes(&self, changes: impl Iterator<Item = (IpNet, bool)>) -> Result<()> {
        let mut lines = String::new();
        for (prefix, announced) in changes {
            let verb = if announced { "replace" } else { "delete" };
            lines += &format!("route {verb} blackhole {prefix} table {MOVING_TABLE}\n");
        }
        let path = self.directory().join("changes");
        fs::write(&path, lines)?;
        run(Some(&self.netns()), &["ip", "-batch", &path.to_string_lossy()]).map(drop)
    }

    /// Lets it take datagrams for any address that arrives, without a route for what it sends.
    pub fn accept_everything(&self) -> Result<()> {
        script(
            Some(&self.netns()),
            "for family in -4 -6; do
                ip $family route replace local default dev lo table 100
                ip $family rule add iif eth0 pref 100 lookup 100 2>/dev/null || true
             done",
        )
        .map(drop)
    }
}

/// Makes the underlay, with the node's namespace and its external interfaces A and B.
pub fn make_underlay() -> Result<()> {
    let (node, underlay) = (place::node(), place::underlay());
    fs::create_dir_all(place::outside())?;
    script(
        None,
        &format!(
            "ip netns add {underlay}
             ip netns add {node}
             ip -n {node} link set lo up
             for side in a b; do
               ip -n {underlay} link add bridge-$side type bridge
               ip -n {underlay} link set bridge-$side up
               ip link add ext-$side netns {node} type veth peer name node-$side netns {underlay}
               ip -n {underlay} link set node-$side master bridge-$side up
               ip -n {node} link set ext-$side up
               nsenter --net=/run/netns/{node} ethtool -K ext-$side {NO_OFFLOADS}
               nsenter --net=/run/netns/{underlay} ethtool -K node-$side {NO_OFFLOADS}
             done
             ip -n {node} addr add 192.0.2.1/24 dev ext-a
             ip -n {node} addr add 198.51.100.1/24 dev ext-b"
        ),
    )
    .map(drop)
}

/// Makes all external machines.
pub fn make_machines() -> Result<()> {
    MACHINES.iter().try_for_each(Machine::make)
}

/// Starts the routing software of the external machines of these vnets.
pub fn start_software(table: &Table, vnets: &[&str]) -> Result<()> {
    let of = |machine: &&Machine| {
        let found =
            OUTSIDE.iter().find(|(_, ports)| ports.iter().any(|(_, name)| *name == machine.name));
        found.is_some_and(|(vnet, _)| vnets.contains(vnet))
    };
    MACHINES.iter().filter(of).try_for_each(|machine| machine.start(table))
}

/// Whether anything of the demo is there.
pub fn exists() -> bool {
    !namespaces().is_empty()
}

/// Names of the demo's network namespaces that exist.
fn namespaces() -> Vec<String> {
    let entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let prefix = place::netns("");
    names.filter(|name| name.starts_with(&prefix)).collect()
}

/// Ends every process in the demo's namespaces, and removes the namespaces and files.
pub fn remove() -> Result<()> {
    let mut failed = Vec::new();
    let mut killed = Vec::new();
    let netnss = namespaces();
    for netns in &netnss {
        let pids = run(None, &["ip", "netns", "pids", netns]).unwrap_or_default();
        for pid in pids.split_whitespace() {
            // It may have ended meanwhile.
            let _ = command(None, &["kill", "-9", pid]).output();
            killed.push(pid.to_owned());
        }
    }
    // One with a full table takes a moment to end.
    let end = Instant::now() + END_MAX;
    while !killed.is_empty() && Instant::now() < end {
        std::thread::sleep(LOOK_PAUSE);
        killed.retain(|pid| runs(pid));
    }
    if !killed.is_empty() {
        failed.push(format!("killed, but not gone after {END_MAX:?}: processes {killed:?}"));
    }
    for netns in &netnss {
        if let Err(error) = run(None, &["ip", "netns", "delete", netns]) {
            failed.push(error.to_string());
        }
    }
    if place::outside().exists() {
        fs::remove_dir_all(place::outside())?;
    }
    if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("\n")) }
}

/// Whether a process still has its memory; one that has ended and waits for its parent has none.
fn runs(pid: &str) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}
