//! The environment of the node: the underlay, and the external machines with their tunnels and
//! routing software. All of it is in network namespaces and one directory of files ([`paths`]).

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;

use crate::paths;
use crate::shell::{POLL_PAUSE, background, command, run, script, wait};
use crate::table::AnnouncementTable;

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

/// Longest wait for killed processes to end.
const END_MAX: Duration = Duration::from_secs(20);

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

    /// Network namespace.
    pub fn netns(&self) -> String {
        paths::netns(self.name)
    }

    fn directory(&self) -> PathBuf {
        paths::outside().join(self.name)
    }

    fn underlay(&self, host: u8) -> String {
        format!("{}.{host}", if self.on_a { "192.0.2" } else { "198.51.100" })
    }

    /// Makes the machine, including its addresses.
    fn make(&self) -> Result<()> {
        let (netns, name, underlay) = (self.netns(), self.name, paths::underlay());
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
            MachineTunnel::Vxlan(vni) => {
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
            MachineTunnel::Udp(port) => {
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
        run(None, &["bird", "-p", "-c", &config])?;
        let words = ["bird", "-f", "-c", &config, "-s", &control.to_string_lossy()];
        background(&self.netns(), &words, &directory.join("bird.log")).map(drop)
    }

    /// Announces and withdraws prefixes.
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

    /// Makes it accept datagrams for any address, without a route for the datagrams that it sends.
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

/// Makes the underlay, the node's namespace, and the external interfaces A and B.
pub fn make_underlay() -> Result<()> {
    let (node, underlay) = (paths::node(), paths::underlay());
    fs::create_dir_all(paths::outside())?;
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
fn namespaces() -> Vec<String> {
    let entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let prefix = paths::netns("");
    names.filter(|name| name.starts_with(&prefix)).collect()
}

/// Kills every process in the demo's namespaces, and removes the namespaces and files.
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
    // A process with a full table takes a moment to end.
    let end = Instant::now() + END_MAX;
    while !killed.is_empty() && Instant::now() < end {
        std::thread::sleep(POLL_PAUSE);
        killed.retain(|pid| runs(pid));
    }
    if !killed.is_empty() {
        failed.push(format!("processes survived SIGKILL for {END_MAX:?}: {killed:?}"));
    }
    for netns in &netnss {
        if let Err(error) = run(None, &["ip", "netns", "delete", netns]) {
            failed.push(error.to_string());
        }
    }
    if paths::outside().exists() {
        fs::remove_dir_all(paths::outside())?;
    }
    if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("\n")) }
}

/// True if a process still has its memory. A zombie has none.
fn runs(pid: &str) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}
