//! Tunnels whose remote ends are devices of a stock
//! Debian kernel: gretap, ip6gretap, geneve and VLANs.
//!
//! Two TAPs join the machine to PdP. One is attached by AF_XDP, and the machine leaves checksums to
//! it. The other is attached by packet sockets, and the machine also leaves cutting of long frames
//! to it. vm/peer.sh is the machine's init; nothing else runs there.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use pdp_e2e::{Background, COMMAND_MAX, TestNode, all_answered, eventually};
use serde_json::Value;

use super::{BOOT_S_MAX, PEER_DISK, WORK, machine};

/// A tunnel. Its subnet is `10.0.NUMBER.0/24`, the same in every vnet.
struct Kind {
    number: u8,
    /// Keys in the spec, with [`Vnet::words`] as placeholders.
    external: &'static str,
    /// Options of the device's `ip link add`, with the same placeholders.
    device: &'static str,
    /// MTU of the device.
    mtu: u32,
}

const fn kind(number: u8, external: &'static str, device: &'static str, mtu: u32) -> Kind {
    Kind { number, external, device, mtu }
}

const KINDS: [Kind; 8] = [
    kind(2, "gre: {key: KEY, V4}", "type gretap TO4 key KEY", 1458),
    kind(3, "gre: {key: 1KEY, SEALED, V4}", "type gretap TO4 key 1KEY csum seq", 1450),
    // Without a key: an address differs.
    kind(
        4,
        "gre: {local: NET4.1, remote: NET4.10KEY}",
        "type gretap local NET4.10KEY remote NET4.1",
        1462,
    ),
    kind(
        5,
        "gre: {key: KEY, checksum: true, V6}",
        "type ip6gretap TO6 key KEY csum encaplimit none",
        1434,
    ),
    // With the default 8 bytes of options before GRE.
    kind(6, "gre: {key: 1KEY, SEALED, V6}", "type ip6gretap TO6 key 1KEY csum seq", 1422),
    kind(7, "geneve: {vni: KEY, V4}", "type geneve id KEY remote NET4.1", 1450),
    kind(8, "geneve: {vni: KEY, V6}", "type geneve id KEY remote NET6::1", 1430),
    kind(9, "vlan: {id: KEY}", "link DEVICE type vlan id KEY", 1500),
];

/// Vnet. The tunnels of two vnets differ by their keys, or by the interface.
struct Vnet {
    name: &'static str,
    key: u8,
    /// Interface.
    by: &'static Interface,
}

struct Interface {
    name: &'static str,
    attach: &'static str,
    /// Device in the machine.
    device: &'static str,
    /// Prefix of its addresses.
    net4: &'static str,
    net6: &'static str,
    /// Offloads that the machine's device lacks.
    without: &'static str,
}

const A: Interface = Interface {
    name: "A",
    attach: "af-xdp",
    device: "eth0",
    net4: "192.0.2",
    net6: "fd00:a",
    without: "host_tso4=off,host_tso6=off,host_ufo=off",
};

const B: Interface = Interface {
    name: "B",
    attach: "packet",
    device: "eth1",
    net4: "198.51.100",
    net6: "fd00:b",
    without: "host_ufo=off",
};

const VNETS: [Vnet; 4] = [
    Vnet { name: "red", key: 7, by: &A },
    Vnet { name: "blue", key: 8, by: &A },
    Vnet { name: "green", key: 7, by: &B },
    Vnet { name: "grey", key: 8, by: &B },
];

impl Vnet {
    fn words(&self, text: &str) -> String {
        text.replace("SEALED", "checksum: true, sequence: true")
            .replace("V4", "local: NET4.1, remote: NET4.2")
            .replace("V6", "local: \"NET6::1\", remote: \"NET6::2\"")
            .replace("TO4", "local NET4.2 remote NET4.1")
            .replace("TO6", "local NET6::2 remote NET6::1")
            .replace("NET4", self.by.net4)
            .replace("NET6", self.by.net6)
            .replace("KEY", &self.key.to_string())
            .replace("DEVICE", self.by.device)
    }

    fn spec(&self) -> String {
        let each = |line: &dyn Fn(&Kind) -> String| KINDS.iter().map(line).collect::<String>();
        let ports =
            each(&|k| format!("        eth{0}: {{addresses: [10.0.{0}.1/24]}}\n", k.number));
        let externals = each(&|k| {
            let by = self.words(k.external);
            format!("    t{}: {{interface: {}, {by}}}\n", k.number, self.by.name)
        });
        let links =
            each(&|k| format!("    - endpoints: [\"h1:eth{0}\", \"external:t{0}\"]\n", k.number));
        format!(
            "---\napiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {}}}\nspec:\n  \
             nodes:\n    h1:\n      kind: host\n      interfaces:\n{ports}  \
             externals:\n{externals}  links:\n{links}",
            self.name
        )
    }

    /// The remote ends: devices in a namespace of the machine.
    fn devices(&self) -> String {
        let Self { name, .. } = self;
        let mut lines = format!("ip netns add {name}; ip -n {name} link set lo up\n");
        lines += "ip -batch - <<END\n";
        for Kind { number, device, mtu, .. } in &KINDS {
            let device = self.words(device);
            lines += &format!("link add name {name}{number} mtu {mtu} {device}\n");
            lines += &format!("link set {name}{number} netns {name}\n");
        }
        lines += &format!("END\nip -n {name} -batch - <<END\n");
        for Kind { number, .. } in &KINDS {
            lines += &format!("addr add 10.0.{number}.2/24 dev {name}{number}\n");
            lines += &format!("link set {name}{number} addrgenmode none up\n");
        }
        lines + "END"
    }
}

fn spec() -> String {
    let interfaces = [&A, &B]
        .map(|by| format!("    {0}: {{device: ext{0}, attach: {1}}}\n", by.name, by.attach))
        .concat();
    let vnets: String = VNETS.iter().map(Vnet::spec).collect();
    format!(
        "apiVersion: pdp/v1\nkind: Substrate\nmetadata: {{name: node}}\nspec:\n  \
         mux: {{cpus: \"0-1\", power: 0.5}}\n  interfaces:\n{interfaces}{vnets}"
    )
}

/// The emulated machine.
struct Peer {
    process: Child,
    lines: ChildStdin,
    said: Receiver<String>,
}

impl Peer {
    /// Boots it, with a TAP in the node's namespace for each of its devices.
    fn start(node: &TestNode) -> Self {
        let mut command = node.namespace().command("qemu-system-x86_64");
        command.args(machine(PEER_DISK, "init=/root/peer.sh net.ifnames=0"));
        for (at, Interface { name, without, net4, net6, .. }) in [&A, &B].into_iter().enumerate() {
            node.namespace().run(&format!(
                "ip tuntap add ext{name} mode tap; ip link set ext{name} up
                 ip addr add {net4}.1/24 dev ext{name}; ip addr add {net6}::1/64 dev ext{name} nodad"
            ));
            let tap = format!("tap,id=n{at},ifname=ext{name},script=no,downscript=no");
            let device =
                format!("virtio-net-pci,netdev=n{at},romfile=,mac=02:00:00:00:01:0{at},{without}");
            command.args(["-netdev", &tap, "-device", &device]);
        }
        let console = WORK.join("console-peer.log");
        let mut process = command
            .args(["-smp", "1", "-m", "512", "-display", "none", "-monitor", "none"])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .args(["-serial", "stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-system-x86_64");
        let lines = process.stdin.take().expect("piped");
        let mut words = BufReader::new(process.stdout.take().expect("piped")).split(0);
        let (sender, said) = channel();
        std::thread::spawn(move || {
            let said = |words: Vec<u8>| String::from_utf8_lossy(&words).into_owned();
            while let Some(Ok(words)) = words.next()
                && sender.send(said(words)).is_ok()
            {}
        });
        let peer = Self { process, lines, said };
        let version = peer.hear(Duration::from_secs(BOOT_S_MAX));
        assert!(version.contains("-amd64"), "not a kernel of Debian: {version}");
        peer
    }

    fn hear(&self, within: Duration) -> String {
        let console = WORK.join("console-peer.log");
        self.said.recv_timeout(within).unwrap_or_else(|error| {
            panic!("the machine said nothing: {error}; see {}", console.display())
        })
    }

    /// Runs shell lines there; panics if that fails.
    #[track_caller]
    fn run(&mut self, lines: &str) -> String {
        self.lines.write_all(format!("{lines}\0").as_bytes()).expect("it runs");
        let words = self.hear(COMMAND_MAX);
        assert_eq!(self.hear(COMMAND_MAX), "0", "{lines}\n{words}");
        words
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(WORK.join(PEER_DISK));
    }
}

/// Number of requests that a ping sent, according to its output.
fn transmitted(words: &str) -> u64 {
    let line =
        words.lines().find(|line| line.contains(" packets transmitted")).expect("its last words");
    line.split(' ').next().and_then(|number| number.parse().ok()).expect("a number")
}

/// Pings by each kind, with the longest frames that fit; IPv4 and ICMP have 28 bytes.
fn pings(end: u8) -> String {
    let ping = |Kind { number, mtu, .. }: &Kind| {
        let size = mtu - 28;
        format!("echo by {number}; ping -c5 -i0.01 -w60 -M do -s {size} 10.0.{number}.{end}\n")
    };
    KINDS.iter().map(ping).collect()
}

fn assert_answered(vnet: &Vnet, words: &str) {
    let each: Vec<&str> = words.split("by ").skip(1).collect();
    assert_eq!(each.len(), KINDS.len(), "{words}");
    for words in each {
        assert!(all_answered(words, 5), "{}: {words}", vnet.name);
    }
}

/// Reasons and counts of the interfaces' dropped frames.
fn dropped(node: &TestNode) -> [Value; 2] {
    let stats = node.json(&["stats"]);
    [&A, &B].map(|by| stats["externals"][by.name]["dropped"].clone())
}

/// An IP counter of the kernel there (`IpExt` of `/proc/net/netstat`).
fn counted(netstat: &str, what: &str) -> u64 {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt: "));
    let [names, values] = [lines.next(), lines.next()].map(|line| line.expect("IpExt").split(' '));
    let (_, value) = names.zip(values).find(|(name, _)| *name == what).expect(what);
    value.parse().expect("a number")
}

/// RFC 6040 with Linux at the remote end: by gretap and geneve of one vnet.
fn marks(node: &TestNode, peer: &mut Peer) {
    let vnet = &VNETS[0];
    let host = format!("{}/h1", vnet.name);
    let netstat = "cat /proc/net/netstat";
    let there = |peer: &mut Peer, what: &str| {
        counted(&peer.run(&format!("ip netns exec {} {netstat}", vnet.name)), what)
    };
    let here = |what: &str| counted(&node.exec(&host, netstat), what);
    let refused = || dropped(node)[0]["ce-on-not-ect"].as_u64().unwrap_or(0);
    // A congested switch on the machine's side of the TAP:
    // before it decapsulates, or after it encapsulates.
    peer.run("modprobe act_pedit; modprobe act_csum; tc qdisc add dev eth0 clsact");
    let congest = |peer: &mut Peer, way: &str, is: bool| {
        peer.run(&match is {
            true => format!(
                "tc filter add dev eth0 {way} prio 1 protocol ip matchall \
                 action pedit ex munge ip dsfield set 3 retain 3 pipe action csum ip"
            ),
            false => format!("tc filter del dev eth0 {way} prio 1"),
        });
    };
    for number in [2, 7] {
        // An emulated machine may answer late, and ping sends
        // more meanwhile. Lost frames are not waited for.
        let ping = |mark: u8| {
            let wait = if mark == 0 { "-W2" } else { "-w60" };
            format!("ping -c5 -i0.01 {wait} -Q {mark} 10.0.{number}")
        };
        let from_there = |peer: &mut Peer, mark: u8| {
            peer.run(&format!("ip netns exec {} {}.1 || true", vnet.name, ping(mark)))
        };
        // The outer header carries the mark.
        let outer = |peer: &mut Peer| counted(&peer.run(netstat), "InECT1Pkts");
        let before = outer(peer);
        let answered = |mark: u8| {
            let words = node.exec(&host, &format!("{}.2", ping(mark)));
            // The counters show the reasons for losses.
            assert!(all_answered(&words, 5), "by {number}: {words}{}", node.pdp(&["stats"]));
            5..=transmitted(&words)
        };
        let sent = answered(1);
        assert!(sent.contains(&(outer(peer) - before)), "by {number}: {sent:?}");
        // Linux's tunnel sees congestion: with ECT it marks
        // the inner packet, without ECT it drops the frame.
        let before = here("InCEPkts");
        congest(peer, "egress", true);
        let words = from_there(peer, 2);
        assert!(all_answered(&words, 5), "{words}");
        let sent = 5..=transmitted(&words);
        assert!(sent.contains(&(here("InCEPkts") - before)), "by {number}: {sent:?}");
        let lost = refused();
        assert!(from_there(peer, 0).contains(" 0 received"));
        assert!(refused() >= lost + 5, "by {number}");
        congest(peer, "egress", false);
        // PdP's tunnel behaves like Linux's.
        let before = there(peer, "InCEPkts");
        congest(peer, "ingress", true);
        let sent = answered(2);
        assert!(sent.contains(&(there(peer, "InCEPkts") - before)), "by {number}: {sent:?}");
        assert!(node.try_exec(&host, &format!("{}.2", ping(0))).is_err());
        congest(peer, "ingress", false);
    }
}

#[test]
fn stock_kernel_devices_interoperate_with_every_tunnel_kind() {
    let node = TestNode::start("debian");
    let mut peer = Peer::start(&node);
    for Interface { device, net4, net6, .. } in [&A, &B] {
        peer.run(&format!(
            "ip link set {device} up; ip addr add {net6}::2/64 dev {device} nodad
             for last in 2 107 108; do ip addr add {net4}.$last/24 dev {device}; done"
        ));
    }
    for vnet in &VNETS {
        peer.run(&vnet.devices());
    }
    node.apply(&spec());
    for vnet in &VNETS {
        let host = format!("{}/h1", vnet.name);
        for Kind { number, external, .. } in &KINDS {
            eventually(&format!("{} by {external}", vnet.name), || {
                node.try_exec(&host, &format!("ping -c1 -W1 10.0.{number}.2")).is_ok()
            });
        }
    }
    let before = dropped(&node);
    let mut servers = vec![];
    for vnet in &VNETS {
        let host = format!("{}/h1", vnet.name);
        assert_answered(vnet, &node.pdp(&["exec", &host, "--", "sh", "-ec", &pings(2)]));
        // Prints its vnet, and echoes all input.
        let answer = format!("SYSTEM:echo {}; exec cat", vnet.name);
        let listen = "TCP-LISTEN:9000,reuseaddr,fork";
        servers.push(Background::start(
            &mut node.pdp_command(&["exec", &host, "--", "socat", listen, &answer]),
        ));
    }
    peer.run("head -c 300000 /dev/urandom > /run/sent");
    for vnet in &VNETS {
        let Vnet { name, .. } = vnet;
        let there = |lines: &str| format!("ip netns exec {name} bash -ec '{lines}'");
        assert_answered(vnet, &peer.run(&there(&pings(1))));
        // Streams to it and back.
        for Kind { number, external, .. } in &KINDS {
            let lines = format!(
                "until {{ exec 3<>/dev/tcp/10.0.{number}.1/9000; }} 2>/dev/null; do sleep 0.2; done
                 read -r whose <&3; test $whose = {name}
                 cat /run/sent >&3 & head -c 300000 <&3 | cmp - /run/sent"
            );
            let words = peer.run(&there(&lines));
            assert!(words.is_empty(), "{name} by {external}: {words}");
        }
        let faults = "cat /sys/class/net/*/statistics/rx_errors | sort -u";
        assert_eq!(peer.run(&there(faults)), "0", "{name}: Linux complains of a frame");
    }
    assert_eq!(dropped(&node), before, "PdP complains of a frame");
    marks(&node, &mut peer);
}
