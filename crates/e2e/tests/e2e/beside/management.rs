//! Management paths into nodes and out of them, separate from their networks. Programs of the node
//! and of the machine use them; the network and the machine itself see nothing of them.

use std::fs;
use std::net::Ipv4Addr;

use pdp_e2e::specs::SUBSTRATE;
use pdp_e2e::{Background, MonitoredProcess, TestMachine, TestNode, eventually, sh};

/// Answers each name query with one address.
const NAMES: &str = r#"
import socket, struct, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 53))
while True:
    asked, who = sock.recvfrom(512)
    end = asked.index(b"\0", 12) + 5
    found = asked[end - 3] == 1
    answer = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(sys.argv[2])
    head = asked[:2] + struct.pack(">HHHHH", 0x8180, 1, found, 0, 0)
    sock.sendto(head + asked[12:end] + (answer if found else b""), who)
"#;

/// Answers each datagram.
const ECHO: &str = r#"
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("127.0.0.1", 53))
while True:
    said, who = sock.recvfrom(2048)
    sock.sendto(b"echo of " + said, who)
"#;

/// r1 runs FRR and h1 BIRD, both on all interfaces that they find.
const LAB: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: lab}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.1.0.1/24]}, eth1: {addresses: [10.2.0.1/24]}}
      dataPlane: {power: 0.2}
      files:
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/ospfd.conf: {content: "router ospf\n redistribute connected\n network 0.0.0.0/0 area 0\n", owner: "frr:frr"}
        /tmp/web/index.html: {content: "the router's page\n"}
        /tmp/echo.py: {content: ECHO}
      commands:
        - /usr/lib/frr/zebra
        - /usr/lib/frr/ospfd
        - [sh, -c, "cd /tmp/web && exec python3 -m http.server 80"]
        - [python3, /tmp/echo.py]
      management: {ports: ["18081:80", "15353:53/udp"]}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}
      files:
        /etc/bird/all.conf: {content: "router id 1.1.1.1; protocol device {} protocol direct { ipv4; } protocol ospf v2 { ipv4 { export all; }; area 0 { interface \"*\" {}; }; }"}
        /tmp/web/index.html: {content: "the host's page\n"}
      commands:
        - bird -f -c /etc/bird/all.conf -s /run/bird.ctl
        - [sh, -c, "cd /tmp/web && exec python3 -m http.server 80"]
      management: {ports: ["18080:80"]}
    h2:
      kind: host
      interfaces: {eth0: {addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#;

fn lab() -> String {
    LAB.replace("ECHO", &serde_json::to_string(ECHO).expect("a string"))
}

/// The machine's name server.
fn resolver() -> Ipv4Addr {
    let text = fs::read_to_string("/etc/resolv.conf").expect("/etc/resolv.conf");
    let servers =
        text.lines().filter_map(|line| line.strip_prefix("nameserver")?.trim().parse().ok());
    servers.into_iter().next().expect("a machine with an IPv4 name server")
}

fn fetched(machine: &TestMachine, port: u16) -> String {
    machine.try_run(&format!("curl -sS -m 5 http://127.0.0.1:{port}/")).unwrap_or_default()
}

/// Process ID of the helper.
fn helper(node: &TestNode, of: &str) -> Option<u32> {
    let pid = node.json(&["inspect", of])["management"]["pid"].as_u64();
    pid.map(|pid| u32::try_from(pid).expect("a process id"))
}

#[test]
fn management_reaches_nodes_and_the_outside() {
    let mut node = TestNode::prepare("management");
    let world = node.machine("w", "w0");
    let machine = node.namespace();
    machine.run("ip addr add 10.9.0.1/24 dev w0; ip route add default via 10.9.0.2");
    world.run("ip addr add 10.9.0.2/24 dev eth0; ip addr add 198.51.100.9/32 dev lo");
    let names = resolver();
    let place = if names.is_loopback() { &machine } else { &world };
    place.run(&format!("ip addr replace {names}/32 dev lo"));
    let directory = node.directory.display().to_string();
    for (file, text) in [("names.py", NAMES), ("page", "the world's page\n"), ("own", "secret\n")] {
        fs::write(node.directory.join(file), text).expect("a file");
    }
    let _names = place.spawn(&format!("python3 {directory}/names.py {names} 198.51.100.9"));
    let _web = world.spawn(&format!("python3 -m http.server 80 -d {directory}"));
    let own = machine.spawn(&format!("python3 -m http.server 8099 -d {directory}"));
    node.start_pdpd();
    node.apply(SUBSTRATE);
    node.apply(&lab());

    // Into the node, by TCP and UDP.
    eventually("the host's page", || fetched(&machine, 18080) == "the host's page\n");
    eventually("the router's page", || fetched(&machine, 18081) == "the router's page\n");
    let ask =
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2);
s.sendto(b'this', ('127.0.0.1', 15353)); print(s.recv(99).decode())";
    fs::write(node.directory.join("ask.py"), ask).expect("a file");
    eventually("an answer by UDP", || {
        let answer = machine.try_run(&format!("python3 {directory}/ask.py"));
        answer.is_ok_and(|answer| answer == "echo of this\n")
    });

    // Out of the node by name: from a router without a route
    // there, and from a host by the interface's name.
    let page = |of: &str, more: &str, url: &str| {
        node.try_exec(of, &format!("curl -sS -m 5 {more} http://{url}"))
    };
    eventually("a page outside", || {
        page("lab/r1", "", "world.example/page").is_ok_and(|page| page == "the world's page\n")
    });
    assert_eq!(
        page("lab/h1", "--interface mgmt0", "world.example/page").as_deref(),
        Ok("the world's page\n")
    );

    // Never the machine, nor addresses that only it reaches.
    assert!(fetched(&machine, 8099).contains("names.py"), "there is something to reach");
    for url in ["10.9.0.1:8099", "127.0.0.1:8099", "192.0.0.1:8099", "169.254.169.254"] {
        for of in ["lab/r1", "lab/h1"] {
            let more = if url.starts_with("127") { "" } else { "--interface mgmt0" };
            let error = page(of, more, url).expect_err(url);
            // The refusal comes at once, instead of a timeout.
            assert!(error.contains("Failed to connect"), "{of} to {url}: {error}");
        }
    }
    // A frame made by root is not forwarded.
    node.exec("lab/r1", "ip addr add 10.9.0.77/24 dev mgmt0");
    assert!(node.try_exec("lab/r1", "ping -c1 -W1 -I 10.9.0.77 10.9.0.2").is_err());
    node.exec("lab/r1", "ip addr del 10.9.0.77/24 dev mgmt0");

    // The network sees nothing of it: neither its routing software, nor the mirror, nor its hosts.
    node.exec("lab/h1", "ping -c1 -W5 10.2.0.2");
    let routers = [
        ("lab/r1", vec!["vtysh", "-c", "show ip ospf interface"], "10.1.0.1/24"),
        ("lab/r1", vec!["vtysh", "-c", "show ip route"], "10.1.0.0/24"),
        ("lab/h1", vec!["birdc", "-s", "/run/bird.ctl", "show", "route"], "10.1.0.0/24"),
        ("lab/h1", vec!["birdc", "-s", "/run/bird.ctl", "show", "ospf", "interface"], "eth0"),
    ];
    for (of, words, sign) in routers {
        let mut shown = String::new();
        eventually("routing software has its own network", || {
            let arguments = [&["exec", of, "--"], &words[..]].concat();
            shown = node.try_pdp(&arguments).unwrap_or_default();
            shown.contains(sign)
        });
        for sign in ["192.0.0.", "127.77.", "10.9.0"] {
            assert!(!shown.contains(sign), "{of} {words:?}: {shown}");
        }
        assert!(!shown.contains("mgmt0 is up") && !shown.contains("dev mgmt0"), "{shown}");
    }
    let inspected = node.json(&["inspect", "lab/r1"]);
    assert_eq!(inspected["conditions"].as_array().map_or(0, Vec::len), 0, "{inspected}");
    let routes = node.pdp(&["routes", "lab/r1"]);
    assert!(!routes.contains("192.0.0") && !routes.contains("mgmt0"), "{routes}");
    node.pdp(&["routes", "lab/r1", "--diff"]);

    // Its processes belong to the node: users, limits, lifetime.
    let pid = helper(&node, "lab/h1").expect("a helper");
    for MonitoredProcess { pid, line, .. } in node.processes() {
        if !line.contains("passt") && !line.contains("pdp-management") {
            continue;
        }
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        assert!(cgroup.contains("_lab/_") && cgroup.contains("/helpers"), "{line}: {cgroup}");
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        assert!(status.contains("CapPrm:\t0000000000000000"), "{line}: {status}");
    }
    // It continues without pdpd, is adopted, and restarts when it ends.
    node.kill_pdpd();
    assert_eq!(fetched(&machine, 18080), "the host's page\n");
    node.start_pdpd();
    eventually("it is known again", || helper(&node, "lab/h1") == Some(pid));
    let control = node.json(&["inspect", "lab/h1"])["control"]["pid"].clone();
    sh(&format!("kill -9 {pid}"));
    eventually("another serves", || {
        helper(&node, "lab/h1").is_some_and(|new| new != pid)
            && fetched(&machine, 18080) == "the host's page\n"
    });
    assert_eq!(node.json(&["inspect", "lab/h1"])["control"]["pid"], control);

    // A new published port needs no restart of the node. A port
    // in use is reported, and published once it is free.
    let other = lab().replace("18080:80", "8099:80");
    let refused = node.try_apply(&other).unwrap_or_else(String::from);
    let error = "port 127.0.0.1:8099 is in use by another program of the machine";
    eventually("the port is told", || {
        refused.contains(error) || node.pdp(&["get"]).contains(error)
    });
    drop(own);
    eventually("the port is had", || fetched(&machine, 8099) == "the host's page\n");
    assert_eq!(fetched(&machine, 18080), "");
    assert_eq!(node.json(&["inspect", "lab/h1"])["control"]["pid"], control);

    node.pdp(&["delete", "lab"]);
    eventually("nothing is left", || {
        let ours = |line: &String| line.contains("passt") || line.contains("pdp-management");
        !node.processes().iter().any(|process| ours(&process.line))
    });
}

/// Python program: sends a datagram three times from
/// one port, and prints each answer with its sender.
const TALK: &str = r#"
import socket, sys, time
port, word, to = int(sys.argv[1]), sys.argv[2].encode(), (sys.argv[3], 9000)
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", port))
sock.settimeout(0.2)
end = time.time() + 6
said = 0
while time.time() < end:
    if time.time() > end - 6 + 2 * said and said < 3:
        said += 1
        try: sock.sendto(word, to)
        except OSError as error: print("error", error.errno, flush=True)
    try:
        data, who = sock.recvfrom(65536)
        print(len(data), data[:40].decode(), who[0], who[1], flush=True)
    except TimeoutError: pass
    except OSError as error: print("error", error.errno, flush=True)
"#;

/// Python program: answers each datagram from 198.51.100.9:9000, with 4,000 bytes more if the
/// datagram says `long`.
const FAR: &str = r#"
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("198.51.100.9", 9000))
while True:
    said, who = sock.recvfrom(2048)
    sock.sendto(b"to " + said + b"." * (4000 if said == b"long" else 0), who)
"#;

/// Sends datagrams from another port of the far end to each port of the machine from 1024 on.
const STRANGER: &str = r#"
import socket, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("198.51.100.9", 9001))
for port in range(1024, 65536):
    try: sock.sendto(b"unasked", ("10.9.0.1", port))
    except OSError: pass
    if port % 500 == 0: time.sleep(0.01)
"#;

/// Tenants of [`beside_each_other`].
const TENANTS: [&str; 2] = ["acme", "other"];

/// Starts a node with a host of each tenant, which has a path outside and the file `/tmp/FILE`.
/// Returns the node, its machine, and the machine's neighbour with the address 198.51.100.9.
fn beside_each_other(
    name: &str,
    (file, text): (&str, &str),
) -> (TestNode, TestMachine, TestMachine) {
    let mut node = TestNode::prepare(name);
    let world = node.machine("w", "w0");
    let machine = node.namespace();
    machine.run("ip addr add 10.9.0.1/24 dev w0; ip route add default via 10.9.0.2");
    world.run("ip addr add 10.9.0.2/24 dev eth0; ip addr add 198.51.100.9/32 dev lo");
    machine.run("sysctl -qw net.ipv4.ping_group_range='0 2147483647'");
    node.start_pdpd();
    node.apply(SUBSTRATE);
    let text = serde_json::to_string(text).expect("a string");
    for (tenant, ports) in TENANTS.into_iter().zip(["30500-30599", "30600-30699"]) {
        node.apply(&format!(
            "apiVersion: pdp/v1\nkind: Tenant\nmetadata: {{name: {tenant}}}\n\
             spec: {{management: {{outside: true, ports: \"{ports}\"}}}}\n"
        ));
        node.apply(&format!(
            "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {tenant}.lab}}\n\
             spec: {{nodes: {{h: {{kind: host, files: {{/tmp/{file}: {{content: {text}}}}}, \
             management: {{outside: true}}}}}}}}\n"
        ));
    }
    for tenant in TENANTS {
        eventually("a way outside", || {
            node.try_exec(&format!("{tenant}.lab/h"), "ip link show dev mgmt0 up").is_ok()
        });
    }
    (node, machine, world)
}

#[test]
fn datagrams_reach_only_the_node_that_asked() {
    let (node, machine, world) = beside_each_other("management-udp", ("talk.py", TALK));
    // Limits the kernel's ICMP errors, so that unreachable
    // ports do not cost more datagrams than arrive.
    machine.run("sysctl -qw net.ipv4.icmp_ratelimit=1000");
    let directory = node.directory.display().to_string();
    for (file, text) in [("far.py", FAR), ("stranger.py", STRANGER)] {
        fs::write(node.directory.join(file), text).expect("a file");
    }
    let _far = world.spawn(&format!("python3 {directory}/far.py"));
    eventually("a far end", || world.run("ss -Huln").contains("198.51.100.9:9000"));
    let listening = || machine.run("ss -Huln");
    assert_eq!(listening(), "", "no port of the machine is listened at");
    let talk = |tenant: &str, port: u16, word: &str, to: &str| {
        let of = format!("{tenant}.lab/h");
        let mut command = node.pdp_command(&["exec", &of, "--", "python3", "/tmp/talk.py"]);
        Background::start(command.args([&port.to_string(), word, to]))
    };

    // Nodes of two tenants use one source port, while a stranger sends to all ports of the machine.
    let asking = TENANTS.map(|tenant| talk(tenant, 30_500, tenant, "198.51.100.9"));
    let long = talk("acme", 30_501, "long", "198.51.100.9");
    std::thread::sleep(std::time::Duration::from_secs(1));
    world.run(&format!("python3 {directory}/stranger.py"));
    // Still not listening; connected sockets have ports chosen by the kernel.
    assert_eq!(listening(), "");
    assert!(!machine.run("ss -Huan").contains(":3050"), "{}", machine.run("ss -Huan"));
    // A published port is free, whatever source port another tenant's node uses.
    machine.run("python3 -c 'import socket; socket.socket(2, 2).bind((\"\", 30500))'");
    for (tenant, asking) in TENANTS.iter().zip(asking) {
        let got = asking.finish();
        let own = format!("{} to {tenant} 198.51.100.9 9000\n", 3 + tenant.len());
        assert_eq!(got, own.repeat(3), "{tenant}");
    }
    // A datagram longer than the MTU arrives whole.
    let got = long.finish();
    assert_eq!(got.matches("4007 to long").count(), 3, "{got}");

    // The node learns of a closed port at once: ECONNREFUSED is 111.
    let program = "import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect(('198.51.100.9', 9999))
sock.settimeout(5)
sock.send(b'x')
try: sock.recv(9)
except OSError as error: print(error.errno)";
    let refused = node.try_pdp(&["exec", "acme.lab/h", "--", "python3", "-c", program]);
    assert_eq!(refused.as_deref(), Ok("111\n"));
}

/// Python program: `NAME FIRST COUNT ROUNDS PAUSE` pings 198.51.100.9 with COUNT ids, and prints
/// the number of replies for each id, payload and sender.
const PING: &str = r#"
import socket, struct, sys, time
name, (first, count, rounds), pause = sys.argv[1].encode(), map(int, sys.argv[2:5]), float(sys.argv[5])
sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
def checksum(data):
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return total ^ 0xffff
def message(id, sequence, payload):
    text = payload + b"." * (1472 - len(payload))
    head = struct.pack(">BBHHH", 8, 0, 0, id, sequence)
    return struct.pack(">BBHHH", 8, 0, checksum(head + text), id, sequence) + text
got = {}
def take(seconds):
    end = time.time() + seconds
    while (left := end - time.time()) > 0:
        sock.settimeout(left)
        try: data, who = sock.recvfrom(65536)
        except TimeoutError: return
        if data[20] != 0: continue
        key = (*struct.unpack(">H", data[24:26]), data[28:].rstrip(b".").decode(), who[0], len(data), checksum(data[20:]))
        got[key] = got.get(key, 0) + 1
for sequence in range(rounds):
    for id in range(first, first + count):
        sock.sendto(message(id, sequence, name), ("198.51.100.9", 0))
        take(pause)
take(2)
for key in sorted(got): print(*key, got[key])
"#;

/// Sends unsolicited echo replies with each id, from another address than the pinged one.
const REPLIES: &str = r#"
import socket, struct, time
sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
for id in range(65536):
    total = id + 0x4242
    total = (total & 0xffff) + (total >> 16)
    try: sock.sendto(struct.pack(">BBHHH", 0, 0, total ^ 0xffff, id, 0) + b"BB", ("10.9.0.1", 0))
    except OSError: pass
    if id % 500 == 0: time.sleep(0.01)
"#;

#[test]
fn echo_replies_reach_only_the_node_that_pinged() {
    let (node, machine, world) = beside_each_other("management-ping", ("ping.py", PING));
    let replies = node.directory.join("replies.py");
    fs::write(&replies, REPLIES).expect("a file");
    let ping = |tenant: &str, ids: &str| {
        let of = format!("{tenant}.lab/h");
        let mut command = node.pdp_command(&["exec", &of, "--", "python3", "/tmp/ping.py", tenant]);
        Background::start(command.args(ids.split(' ')))
    };
    let own =
        |tenant: &str, id: u16, count: u16| format!("{id} {tenant} 198.51.100.9 1500 0 {count}\n");

    // Nodes of two tenants use one id, while a stranger replies to all ids.
    let pinging = TENANTS.map(|tenant| ping(tenant, "1234 1 10 0.3"));
    std::thread::sleep(std::time::Duration::from_secs(1));
    world.run(&format!("python3 {}", replies.display()));
    let got = pinging.map(Background::finish);
    assert_eq!(got, TENANTS.map(|tenant| own(tenant, 1234, 10)));
    // The kernel chooses the machine's ids: 04D2 is 1234.
    assert!(!machine.run("cat /proc/net/icmp").contains(":04D2"));

    // One tenant's node pings with many ids, including another's.
    let other = ping("other", "1100 1 20 0.2");
    let acme = ping("acme", "1000 300 1 0.01").finish();
    assert_eq!(other.finish(), own("other", 1100, 20));
    let ids = acme.lines().filter(|line| line.contains(" acme ")).count();
    assert!(ids > 250 && ids == acme.lines().count(), "{ids} ids: {acme}");
}
