//! Every kind of tunnel against another implementation. Open vSwitch's user-space datapath is the
//! remote end, and tshark decodes the sent frames. This kernel has no GRE, Geneve or VLAN devices.

use std::process::Command;

use pdp_e2e::ovs::OpenVswitch;
use pdp_e2e::{TestMachine, TestNode, all_answered, eventually};

/// Tunnel. Its subnet is `10.0.NUMBER.0/24`, the same in every vnet; keys differ by vnet.
struct Kind {
    number: u8,
    /// Keys in the spec, with `KEY` as placeholder.
    external: &'static str,
    /// Options of Open vSwitch's port, with `KEY` as placeholder; empty for the VLAN.
    port: &'static str,
    /// MTU inside, over 1500 bytes outside.
    mtu: u32,
}

const V4: &str = "local: 192.0.2.1, remote: 192.0.2.2";
const V6: &str = "local: \"fd00:a::1\", remote: \"fd00:a::2\"";
const TO_V4: &str = "options:local_ip=192.0.2.2 options:remote_ip=192.0.2.1 options:key=KEY";
const TO_V6: &str = "options:local_ip=fd00:a::2 options:remote_ip=fd00:a::1 options:key=KEY";

const fn kind(number: u8, external: &'static str, port: &'static str, mtu: u32) -> Kind {
    Kind { number, external, port, mtu }
}

const KINDS: [Kind; 8] = [
    kind(2, "vxlan: {vni: KEY, V4}", "type=vxlan V4", 1450),
    kind(3, "gre: {key: KEY, V4}", "type=gre V4", 1458),
    kind(4, "geneve: {vni: KEY, V4}", "type=geneve V4", 1450),
    kind(5, "vxlan: {vni: KEY, V6}", "type=vxlan V6", 1430),
    kind(6, "gre: {key: KEY, checksum: true, V6}", "type=gre options:csum=true V6", 1434),
    kind(7, "geneve: {vni: KEY, V6}", "type=geneve V6", 1430),
    // Not with a checksum too: Open vSwitch computes it before it inserts the number.
    kind(8, "gre: {key: 1KEY, sequence: true, V4}", "type=gre options:seq=true V4", 1454),
    kind(9, "vlan: {id: KEY}", "", 1500),
];

/// Both have the same addresses inside; only the key differs.
const VNETS: [(&str, u8); 2] = [("red", 7), ("blue", 8)];

fn words(text: &str, key: u8, with: [&str; 2]) -> String {
    text.replace("V4", with[0]).replace("V6", with[1]).replace("KEY", &key.to_string())
}

fn spec() -> String {
    let vnet = |(name, key): (&str, u8)| {
        let each = |line: &dyn Fn(&Kind) -> String| KINDS.iter().map(line).collect::<String>();
        let ports =
            each(&|k| format!("        eth{0}: {{addresses: [10.0.{0}.1/24]}}\n", k.number));
        let externals = each(&|k| {
            format!("    t{}: {{interface: A, {}}}\n", k.number, words(k.external, key, [V4, V6]))
        });
        let links =
            each(&|k| format!("    - endpoints: [\"h1:eth{0}\", \"external:t{0}\"]\n", k.number));
        format!(
            "---\napiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\nspec:\n  \
             nodes:\n    h1:\n      kind: host\n      interfaces:\n{ports}        \
             eth1: {{addresses: [10.0.1.1/24]}}\n  externals:\n{externals}    \
             t1: {{interface: A, udp: {{localPort: 500{key}, remotePort: 500{key}, {V4}}}}}\n  \
             links:\n{links}    - endpoints: [\"h1:eth1\", \"external:t1\"]\n"
        )
    };
    let vnets = VNETS.map(vnet).concat();
    format!(
        "apiVersion: pdp/v1\nkind: Substrate\nmetadata: {{name: node}}\nspec:\n  \
         mux: {{cpus: \"0-1\", power: 0.5}}\n  interfaces: {{A: {{device: extA, attach: ATTACH}}}}\n\
         {vnets}"
    )
}

/// The remote ends of all tunnels: a port of the switch in the machine of each vnet.
fn other_ends(switch: &OpenVswitch, underlay: &TestMachine, machines: &[TestMachine]) {
    switch.vsctl(
        "add-br phy -- set bridge phy datapath_type=netdev -- add-port phy eth0
         -- add-br int -- set bridge int datapath_type=netdev",
    );
    let mac = underlay.run("cat /sys/class/net/eth0/address");
    switch.vsctl(&format!("set bridge phy other-config:hwaddr=\"{}\"", mac.trim()));
    underlay.run(
        "ip addr add 192.0.2.2/24 dev phy; ip addr add fd00:a::2/64 dev phy nodad; ip link set phy up",
    );
    for ((vnet, key), machine) in VNETS.iter().zip(machines) {
        for Kind { number, port, mtu, .. } in &KINDS {
            let inside = format!("{vnet}{number}");
            let bridge = if port.is_empty() { "phy" } else { "int" };
            let tag = if port.is_empty() { format!("tag={key}") } else { String::new() };
            switch.vsctl(&format!(
                "add-port {bridge} {inside} {tag} -- set interface {inside} type=internal mtu_request={mtu}"
            ));
            if !port.is_empty() {
                // One of two GRE tunnels between the same addresses needs another key.
                let key = if *number == 8 { 10 + key } else { *key };
                let port = words(port, key, [TO_V4, TO_V6]);
                let tunnel = format!("t{inside}");
                switch.vsctl(&format!("add-port int {tunnel} -- set interface {tunnel} {port}"));
                for (from, to) in [(&inside, &tunnel), (&tunnel, &inside)] {
                    let flow = format!("priority=10,in_port={from},actions=output:{to}");
                    switch.ofctl(&["add-flow", "int", &flow]);
                }
            }
            underlay.run(&format!("ip link set {inside} netns {}", machine.netns));
            machine.run(&format!(
                "ip link set {inside} mtu {mtu} up; ip addr add 10.0.{number}.2/24 dev {inside}
                 sysctl -qw net.ipv6.conf.{inside}.disable_ipv6=1"
            ));
        }
    }
}

/// Lines of tshark for the node's frames.
fn decoded(file: &str, mac: &str, filter: &str) -> Vec<String> {
    // Frames of a VLAN have the inner port's address.
    let filter = format!("(eth.src == {mac} || ip.src == 10.0.9.1) && ({filter})");
    let output = Command::new("tshark")
        .args(["-n", "-r", file, "-2", "-R", &filter])
        .args(["-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE"])
        .args(["-d", "udp.port==5007,eth", "-d", "udp.port==5008,eth"])
        // A tunnel's source port may be this protocol's port.
        .args(["--disable-protocol", "elasticsearch"])
        .output()
        .expect("tshark");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

fn all_kinds(attach: &str) {
    let mut node = TestNode::start(&format!("kinds-{attach}"));
    let underlay = node.machine("mA", "extA");
    let machines = [node.machine("red", "extR"), node.machine("blue", "extB")];
    node.namespace()
        .run("ip addr add 192.0.2.1/24 dev extA; ip addr add fd00:a::1/64 dev extA nodad");
    let switch = OpenVswitch::start(&underlay, "", &[]);
    other_ends(&switch, &underlay, &machines);
    node.apply(&spec().replace("ATTACH", attach));
    let file = node.directory.join("sent.pcap");
    let file = file.to_str().expect("UTF-8");
    // Captured at the receiver: the sender's device shows no frames that bypass its queues.
    let capture = underlay.spawn(&format!("tcpdump -U -Z root -i eth0 -w {file}"));
    for ((vnet, _), machine) in VNETS.iter().zip(&machines) {
        for Kind { number, external, .. } in &KINDS {
            eventually(&format!("{vnet} by {external}"), || {
                machine.try_run(&format!("ping -c1 -W0.3 10.0.{number}.1")).is_ok()
            });
        }
    }
    for ((vnet, _), machine) in VNETS.iter().zip(&machines) {
        let host = format!("{vnet}/h1");
        let sink = "TCP-LISTEN:9000,reuseaddr,fork OPEN:/dev/null";
        let outside = machine.spawn(&format!("socat -u {sink}"));
        for Kind { number, external, mtu, .. } in &KINDS {
            // Frames as long as the tunnel permits, both ways; IPv4 and ICMP have 28 bytes.
            let ping = format!("ping -c10 -i0.01 -w60 -M do -s {} 10.0.{number}", mtu - 28);
            let outward = machine.run(&format!("{ping}.1"));
            assert!(all_answered(&outward, 10), "{external}: {outward}");
            let here = node.exec(&host, &format!("{ping}.2"));
            assert!(all_answered(&here, 10), "{external}: {here}");
            let stream = format!("socat -u /dev/zero,readbytes=300000 TCP:10.0.{number}.2:9000");
            eventually(&format!("a stream of {external}"), || {
                node.try_exec(&host, &stream).is_ok()
            });
        }
        // Nobody answers; the sent frames count.
        assert!(node.try_exec(&host, "ping -c1 -W0.3 10.0.1.2").is_err());
        drop(outside);
    }
    capture.stop("INT");
    let mac = node.namespace().run("cat /sys/class/net/extA/address");
    let mac = mac.trim();
    let complaints = "_ws.malformed || ip.checksum.status == 0 || udp.checksum.status == 0 || gre.checksum.incorrect";
    assert_eq!(decoded(file, mac, complaints), [""; 0]);
    for (sent, filter) in [
        ("VXLAN", "vxlan && icmp"),
        ("Geneve", "geneve && icmp"),
        ("GRE with a sequence", "gre.sequence_number && icmp"),
        ("GRE with a checksum", "gre.checksum && icmp"),
        ("a VLAN", "vlan.id == 7 && icmp"),
        ("Ethernet in UDP", "udp.port == 5007 && arp"),
    ] {
        let lines = decoded(file, mac, filter).len();
        assert!(lines > 0, "tshark found no {sent}");
    }
    let stats = node.json(&["stats"]);
    let dropped = &stats["externals"]["A"]["dropped"];
    for reason in ["gre-sequence", "gre-checksum", "unknown-peer", "geneve-header", "udp-checksum"]
    {
        assert!(dropped[reason].is_null(), "{dropped}");
    }
    drop(switch);
}

#[test]
fn ovs_and_tshark_understand_tunnels_over_af_xdp() {
    all_kinds("af-xdp");
}

#[test]
fn ovs_and_tshark_understand_tunnels_over_packet_sockets() {
    all_kinds("packet");
}
