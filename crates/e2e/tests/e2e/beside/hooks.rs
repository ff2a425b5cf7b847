//! Processing by the control guest's kernel that forwarding
//! guests lack is reported and, by default, done.

use std::time::{Duration, Instant};

use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{TestNode, all_answered, beside, eventually};

const FIREWALL: [&str; 3] = [
    "nft add table ip fw",
    "nft add chain ip fw forward { type filter hook forward priority 0 ; policy accept ; }",
    "nft add rule ip fw forward icmp type echo-request drop",
];

fn reaches(node: &TestNode) -> bool {
    node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2").is_ok()
}

/// Messages of `get`, `inspect` and `routes --diff` about r1's hooks: all equal, or empty.
fn hook_text(node: &TestNode) -> String {
    let conditions = |value: &serde_json::Value| -> String {
        let all = value["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().map(|about| about["message"].as_str().expect("words").to_owned()).collect()
    };
    // It may change between two reads.
    let mut text = String::new();
    eventually("get and inspect say the same", || {
        text = conditions(&node.json(&["get"])[0]);
        text == conditions(&node.json(&["inspect", "red/r1"]))
    });
    text
}

#[test]
fn kernel_hooks_are_reported_and_applied() {
    let _turn = beside();
    let node = TestNode::start("hooks");
    let spec = |hooks| two_hosts("red", &format!("{{power: 0.2, kernelHooks: {hooks}}}"));
    node.apply(SUBSTRATE);
    node.apply(&two_hosts("red", "{power: 0.2}"));
    eventually("h1 reaches h2", || reaches(&node));
    assert_eq!(hook_text(&node), "");
    let control = node.json(&["inspect", "red/r1"])["control"]["pid"].clone();

    FIREWALL.iter().for_each(|line| drop(node.exec("red/r1", line)));
    let begun = Instant::now();
    eventually("the firewall is told", || hook_text(&node).contains("nft chain ip fw forward"));
    assert!(begun.elapsed() < Duration::from_secs(2), "told after {:?}", begun.elapsed());
    assert!(hook_text(&node).contains("strict"));
    eventually("nothing passes the firewall", || !reaches(&node));
    assert!((0..3).all(|_| !reaches(&node)), "the firewall holds");
    let punted = &node.json(&["stats", "red"])["vnets"]["red"]["nodes"]["r1"]["ports"]["eth0"];
    assert!(punted["punted"].as_u64() > Some(3), "{punted}");
    let diff = node.pdp_command(&["routes", "red/r1", "--diff"]).output().expect("pdp routes");
    let note = String::from_utf8_lossy(&diff.stderr).into_owned();
    assert!(diff.status.success() && note.contains("note: nft chain ip fw forward"), "{diff:?}");
    assert!(node.pdp(&["get"]).contains("nft chain ip fw forward"), "the table has it too");

    // `kernelHooks: ignore` gives full speed nevertheless. Only the mirror restarts.
    node.apply(&spec("ignore"));
    eventually("the firewall is ignored", || reaches(&node));
    eventually("and that is told", || hook_text(&node).contains("kernelHooks: ignore"));
    assert_eq!(node.json(&["inspect", "red/r1"])["control"]["pid"], control);
    node.apply(&spec("strict"));
    eventually("the firewall is obeyed again", || !reaches(&node));
    node.exec("red/r1", "nft delete table ip fw");
    eventually("no firewall", || reaches(&node));
    eventually("and nothing is told", || hook_text(&node).is_empty());

    // A rule by source, which the main table lacks.
    node.exec("red/r1", "ip rule add from 10.1.0.2 prohibit");
    eventually("the rule is told", || hook_text(&node).contains("from 10.1.0.2/32"));
    eventually("and obeyed", || {
        let answer = node.try_exec("red/h1", "ping -c1 -W1 10.2.0.2");
        answer.is_err_and(|error| error.contains("Packet filtered"))
    });
}

/// Values of `/proc/net/stat/arp_cache`, or IPv6's:
/// current entries, and how often the table was full.
fn table(name: &str) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/net/stat/{name}")).expect("the kernel's");
    let rows: Vec<Vec<u64>> = text
        .lines()
        .skip(1)
        .map(|row| row.split(' ').flat_map(|word| u64::from_str_radix(word, 16)).collect())
        .collect();
    (rows[0][0], rows.iter().map(|row| *row.last().expect("a column")).sum())
}

/// A network scans all stations of its link. An unrelated network still resolves each new station
/// of its own at the first ping.
#[test]
fn link_scan_takes_no_neighbours_from_others() {
    let _turn = beside();
    let node = TestNode::start("scan");
    let wide = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: eve}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.1.0.1/24, "fd01::1/64"]}
        eth1: {addresses: [10.16.0.1/12, "fd02::1/64"]}
      dataPlane: {power: 0.2}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.2/24, "fd01::2/64"], gateways: [10.1.0.1, "fd01::1"]}}
    h2:
      kind: host
      interfaces: {eth0: {addresses: [10.16.0.2/12], gateways: [10.16.0.1]}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#;
    node.apply(SUBSTRATE);
    node.apply(wide);
    node.apply(&two_hosts("vic", "{power: 0.2}"));
    for vnet in ["eve", "vic"] {
        let to = if vnet == "eve" { "10.16.0.2" } else { "10.2.0.2" };
        let ping = format!("ping -c1 -W1 {to}");
        eventually(vnet, || node.try_exec(&format!("{vnet}/h1"), &ping).is_ok());
    }
    // 900 per second, one to each: below the punt limit.
    let scan = "import socket, time, itertools
four = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
with_options = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
with_options.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes([1, 1, 1, 1]))
end = time.time() + 8
for i in itertools.count():
    if time.time() > end: break
    four.sendto(b'', ('10.%d.%d.%d' % (17 + (i >> 16), i >> 8 & 255, i & 255), 9))
    with_options.sendto(b'', ('10.%d.%d.%d' % (21 + (i >> 16), i >> 8 & 255, i & 255), 9))
    six.sendto(b'', ('fd02::%x' % (i + 16), 9))
    time.sleep(1 / 450)";
    let scan = node.pdp_command(&["exec", "eve/h1", "--", "python3", "-c", scan]);
    let full = [table("arp_cache"), table("ndisc_cache")];
    let scan = pdp_e2e::Background::start(&mut { scan });
    std::thread::sleep(Duration::from_secs(3));
    let mut lost = Vec::new();
    for new in 3..30 {
        node.exec("vic/h2", &format!("ip addr add 10.2.0.{new}/24 dev eth0"));
        if node.try_exec("vic/h1", &format!("ping -c1 -W1 10.2.0.{new}")).is_err() {
            lost.push(new);
        }
    }
    scan.finish();
    let [four, six] = [table("arp_cache"), table("ndisc_cache")];
    assert_eq!([four.1, six.1], full.map(|(_, fulls)| fulls), "tables were full: {lost:?}");
    assert!(lost.is_empty(), "no answer from the first ping of {lost:?}");
    let port = &node.json(&["stats", "eve"])["vnets"]["eve"]["nodes"]["r1"]["ports"]["eth0"];
    let beyond = port["dropped"]["guest-unresolved"].as_u64().unwrap_or(0);
    assert!(beyond > 1000, "more was asked for than may be at a time: {port}");
    assert!(node.try_exec("eve/h1", "ping -c1 -W1 10.16.0.2").is_ok(), "who is known is reached");
}

/// Flows over two gateways without traffic so far. The kernel, which gets their first packets,
/// would only request the gateways that it chooses itself.
#[test]
fn flows_over_several_gateways_leave_the_slow_path() {
    let _turn = beside();
    let node = TestNode::start("gateways");
    let hosts: String = [2, 3]
        .map(|n| {
            format!(
                "    h{n}:
      kind: host
      interfaces: {{eth0: {{addresses: [10.{n}.0.2/24, \"fd0{n}::2/64\"]}}}}\n"
            )
        })
        .concat();
    let spec = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {addresses: [10.1.0.1/24, "fd01::1/64"]}
        eth1: {addresses: [10.2.0.1/24, "fd02::1/64"]}
        eth2: {addresses: [10.3.0.1/24, "fd03::1/64"]}
      dataPlane: {power: 0.3}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.2/24, "fd01::2/64"], gateways: [10.1.0.1, "fd01::1"]}}
HOSTS  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
    - endpoints: ["r1:eth2", "h3:eth0"]
"#;
    node.apply(SUBSTRATE);
    node.apply(&spec.replace("HOSTS", &hosts));
    eventually("h1 reaches r1", || node.try_exec("red/h1", "ping -c1 -W1 10.1.0.1").is_ok());
    for (family, prefix, gateways) in [
        ("-4", "203.0.113.0/24", ["10.2.0.2", "10.3.0.2"]),
        ("-6", "2001:db8::/32", ["fd02::2", "fd03::2"]),
    ] {
        let [one, two] = gateways;
        let route = format!("ip {family} route add {prefix} nexthop via {one} nexthop via {two}");
        node.exec("red/r1", &route);
    }
    eventually("the guests have the routes", || {
        let diff = node.pdp_command(&["routes", "red/r1", "--diff"]).output().expect("pdp routes");
        diff.status.success()
            && node.pdp(&["routes", "red/r1", "--guest", "0"]).contains("203.0.113")
    });
    // One flow at a time, while no gateway is known: several flows would request both.
    const PACKETS: u64 = 100;
    let ports = 5000..5012u16;
    for port in ports.clone() {
        node.exec("red/r1", "ip neigh flush all");
        let (family, to) =
            if port % 2 == 0 { ("INET", "203.0.113.9") } else { ("INET6", "2001:db8::9") };
        let flow = format!(
            "import socket, time
flow = socket.socket(socket.AF_{family}, socket.SOCK_DGRAM)
flow.bind(('', {port}))
for turn in range({PACKETS}):
    flow.sendto(b'x', ('{to}', 9))
    time.sleep(1 / 400)"
        );
        let sent = node.pdp_command(&["exec", "red/h1", "--", "python3", "-c", &flow]).output();
        let sent = sent.expect("pdp exec");
        assert!(sent.status.success(), "{sent:?}");
    }
    let port = &node.json(&["stats", "red"])["vnets"]["red"]["nodes"]["r1"]["ports"]["eth0"];
    let (received, punted) = (port["received"].as_u64(), port["punted"].as_u64());
    assert!(received > Some(PACKETS * ports.len() as u64), "{port}");
    assert!(punted < Some(PACKETS * ports.len() as u64 / 4), "flows are punted for good: {port}");
}

/// h1 - r1 - h2, where r1 has the kernel data plane.
fn of_a_kernel(name: &str) -> String {
    format!(
        r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.1.0.1/16, "fd01::1/64"]}}
        eth1: {{addresses: [10.16.0.1/12, "fd02::1/64"]}}
      dataPlane: {{kind: kernel}}
    h1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.1.0.2/16, "fd01::2/64"], gateways: [10.1.0.1, "fd01::1"]}}}}
    h2:
      kind: host
      interfaces: {{eth0: {{addresses: [10.16.0.2/12, "fd02::2/64"], gateways: [10.16.0.1, "fd02::1"]}}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#
    )
}

/// Sends packets of each family to nonexistent stations for some seconds, at a given rate.
const SCAN: &str = r#"
import itertools, socket, struct, sys, time
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("eth0", 0))
own, router = s.getsockname()[4], bytes.fromhex(sys.argv[1])
def four(source, to):
    ip = bytearray(struct.pack(">BBHHHBBH", 0x45, 0, 28, 0, 0, 64, 17, 0) + source + to)
    total = sum(struct.unpack(">10H", ip))
    total = (total & 0xffff) + (total >> 16)
    ip[10:12] = struct.pack(">H", ~((total & 0xffff) + (total >> 16)) & 0xffff)
    return router + own + b"\x08\x00" + bytes(ip) + struct.pack(">HHHH", 9, 9, 8, 0)
def six(source, to):
    ip = struct.pack(">IHBB", 6 << 28, 8, 17, 64) + source + to
    return router + own + b"\x86\xdd" + ip + struct.pack(">HHHH", 9, 9, 8, 1)
here, there = socket.inet_pton(socket.AF_INET6, "fd01::"), socket.inet_pton(socket.AF_INET6, "fd02::")
seconds, rate, start = float(sys.argv[2]), float(sys.argv[3]), time.time()
for i in itertools.count(256):
    station = struct.pack(">I", i)
    s.send(four(bytes([10, 1, 0, 2]), bytes([10, 17 + (i >> 16) % 8]) + station[2:]))
    s.send(six(here[:15] + b"\x02", there[:8] + b"\0\0\0\1" + station))
    if i % 64 == 0:
        time.sleep(max(0, start + (i - 256) / rate - time.time()))
        if time.time() > start + seconds:
            break
print(i - 256)
"#;

/// Previous value of a neighbour table's setting, restored afterwards.
struct Setting(String, String);

impl Setting {
    fn of(family: &str, name: &str) -> Self {
        let path = format!("/proc/sys/net/{family}/neigh/default/{name}");
        let was = std::fs::read_to_string(&path).expect("the machine's first namespace");
        Self(path, was)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.0, &self.1);
    }
}

/// Scans forwarded by one network's kernel: 4,000 unknown stations of each family per second.
#[test]
fn kernel_forwarded_scan_takes_no_neighbours_from_others() {
    let _turn = beside();
    // The values that pdpd sets for two such routers in the machine's first network namespace.
    let both = ["ipv4", "ipv6"]
        .map(|family| ["gc_thresh2", "gc_thresh3"].map(|name| Setting::of(family, name)));
    pdp_net::shared::raise_neighbours(2 * 16_384).expect("the tables have room");
    let node = TestNode::start("kernelscan");
    node.apply(SUBSTRATE);
    let known = ["10.16.0.2", "fd02::2", "fd01::1"];
    for name in ["eve", "vic"] {
        node.apply(&of_a_kernel(name));
        for to in known {
            eventually(&format!("{name}/h1 reaches {to}"), || {
                node.try_exec(&format!("{name}/h1"), &format!("ping -c1 -W1 {to}")).is_ok()
            });
        }
    }
    node.exec("vic/h2", "ip addr add 10.16.0.3/12 dev eth0");
    let full = [table("arp_cache"), table("ndisc_cache")];
    let mac = node.exec("eve/r1", "cat /sys/class/net/eth0/address").replace(':', "");
    let words = ["exec", "eve/h1", "--", "python3", "-c", SCAN, mac.trim(), "6", "4000"];
    let scan = pdp_e2e::Background::start(&mut node.pdp_command(&words));
    std::thread::sleep(Duration::from_secs(3));
    let filled = [table("arp_cache").0, table("ndisc_cache").0];
    let pings = known.into_iter().chain(["10.16.0.3"]).map(|to| {
        let line = format!("ping -c50 -i0.02 -w60 {to}");
        let words: Vec<&str> =
            ["exec", "vic/h1", "--"].into_iter().chain(line.split(' ')).collect();
        (to, pdp_e2e::Background::start(&mut node.pdp_command(&words)))
    });
    let pings: Vec<_> = pings.collect();
    for (to, ping) in pings {
        let words = ping.finish();
        assert!(all_answered(&words, 50), "{to}: {words}");
    }
    println!("{} of each were scanned; {filled:?} entries", scan.finish().trim());
    // More than the default tables of a machine hold.
    assert!(filled.iter().all(|entries| *entries > 2048), "{filled:?}");
    let fulls = [table("arp_cache").1, table("ndisc_cache").1];
    assert_eq!(fulls, full.map(|(_, fulls)| fulls), "tables were full");
    drop(both);
}
