//! Routers with the kernel data plane.

use pdp_e2e::counters::missing;
use pdp_e2e::{Background, TestNode, all_answered, eventually, kill};
use serde_json::Value;

use super::fastpath::{kept, lab, pings};
use super::watch::Watched;

fn nodes(node: &TestNode, vnet: &str) -> Vec<Value> {
    let status = node.json(&["inspect", vnet])["status"].clone();
    status["nodes"].as_array().expect("nodes").clone()
}

fn named(nodes: &[Value], name: &str) -> Value {
    nodes.iter().find(|found| found["name"] == name).expect("the node").clone()
}

/// Path of each link, and the reason.
fn paths(node: &TestNode) -> Vec<String> {
    let links = node.json(&["inspect", "fastpath"])["status"]["links"].clone();
    let path = |link: &Value| {
        let words = ["path", "pathReason"].map(|key| link[key].as_str().unwrap_or_default());
        words.join(" ").trim().to_owned()
    };
    links.as_array().expect("links").iter().map(path).collect()
}

/// From each kind of data plane to the kernel and back. Only the router's own data plane restarts.
#[test]
fn router_switches_to_kernel_forwarding_and_back() {
    let node = TestNode::start("tokernel");
    // r2 keeps its guests, so that the link between them uses the mux in any case.
    let lab = |plane: &str| {
        let own = format!("    r1:\n      kind: router\n      dataPlane: {plane}\n");
        lab("{power: 0.1}").replace("    r1:\n      kind: router\n", &own)
    };
    let ready = || node.pdp(&["wait", "fastpath", "--for", "ready", "--timeout", "60s"]);
    node.apply(&lab("{power: 0.1}"));
    ready();
    pings(&node);
    let before = kept(&node);
    let mut ping = node.pdp_command(&["exec", "fastpath/h1", "--", "ping", "-i0.02", "10.2.0.2"]);
    let ping = Background::start(&mut ping);
    let kernel = "{kind: kernel}";
    for plane in [kernel, "{power: 0.1}", kernel, "{kind: fastpath}", kernel] {
        node.apply(&lab(plane));
        ready();
        pings(&node);
        assert_eq!(kept(&node), before, "{plane}");
        let router = named(&nodes(&node, "fastpath"), "r1");
        assert_eq!(router["kind"], "router", "{router}");
        let others = router["mirror"].is_object() || router["engine"].is_object();
        let guests = router["guests"].as_array().is_some_and(|guests| !guests.is_empty());
        assert_eq!((others, guests), (plane != kernel, plane.contains("power")), "{router}");
    }
    drop(ping);
    let words = node.try_pdp(&["scale", "fastpath/r1", "2"]).expect_err("nothing to scale");
    assert!(words.contains("its data plane is its control guest's kernel"), "{words}");
    let refused = node.try_apply(&lab("{kind: kernel, guests: 2}")).expect_err("no guests");
    assert!(refused.contains("\"guests\" is not a key of kind kernel"), "{refused}");
}

/// A kernel link joins two vrouters with the kernel data plane, without any PdP process.
#[test]
fn link_between_kernel_routers_needs_no_process() {
    let mut node = TestNode::start("straight");
    let ready =
        |node: &TestNode| node.pdp(&["wait", "fastpath", "--for", "ready", "--timeout", "60s"]);
    node.apply(&lab("{kind: kernel}"));
    ready(&node);
    pings(&node);
    let counters = |node: &TestNode| {
        let stats = node.json(&["stats", "fastpath"]);
        assert_eq!(missing(&stats), [], "{stats}");
        let port = stats["vnets"]["fastpath"]["nodes"]["r1"]["ports"]["eth1"].clone();
        ["sent", "punted"].map(|name| port[name].as_u64().expect("a counter"))
    };
    let before = counters(&node);
    assert_eq!(paths(&node), ["mux h1 is a host", "kernel", "mux h2 is a host"]);
    // The common parts of kernel ports are in use.
    let doctor = node.pdp(&["doctor"]);
    assert!(doctor.contains("nothing outlives its network or tenant"), "{doctor}");
    // Every process that could be on the path dies, and no frame is lost.
    let pings = "setsid ping -c1500 -i0.002 -w60 10.0.12.2 >/tmp/said 2>&1 &";
    node.pdp(&["exec", "fastpath/r1", "--", "sh", "-c", pings]);
    let pids = |node: &TestNode| {
        let all = nodes(node, "fastpath");
        ["r1", "r2"].map(|name| named(&all, name)["control"]["pid"].clone())
    };
    let guests = pids(&node);
    let mux = |node: &TestNode| {
        let mut all = node.processes().into_iter();
        all.find(|process| process.line.contains("pdp-mux")).map(|process| process.pid)
    };
    kill(mux(&node).expect("a mux"));
    node.kill_pdpd();
    std::thread::sleep(std::time::Duration::from_millis(300));
    node.start_pdpd();
    let output = || node.try_exec("fastpath/r1", "cat /tmp/said").unwrap_or_default();
    eventually("all is said", || output().contains("packets transmitted"));
    let stats = node.json(&["stats", "fastpath"]);
    assert!(all_answered(&output(), 1500), "{}{stats:#}", output());
    ready(&node);
    eventually("a new mux has the hosts again", || {
        node.try_exec("fastpath/h1", "ping -c1 -W1 10.2.0.2").is_ok()
    });
    assert_eq!(pids(&node), guests, "the guests are those of before");
    let after = counters(&node);
    assert!((0..2).all(|at| after[at] >= before[at] + 1500), "{before:?} {after:?}");

    // A link that is down takes the carrier on both sides.
    let carrier = |node: &TestNode, router: &str| {
        let path = "cat /sys/class/net/eth1/carrier";
        node.exec(&format!("fastpath/{router}"), path).trim().to_owned()
    };
    node.pdp(&["link", "down", "fastpath/link2"]);
    assert_eq!(["r1", "r2"].map(|router| carrier(&node, router)), ["0", "0"]);
    node.pdp(&["link", "up", "fastpath/link2"]);
    assert_eq!(["r1", "r2"].map(|router| carrier(&node, router)), ["1", "1"]);
    ready(&node);
    eventually("OSPF again", || node.try_exec("fastpath/h1", "ping -c1 -W1 10.2.0.2").is_ok());

    // Its rate holds without a queue, and changes while it is used.
    let rate = |rate: &str| {
        let plain = "- endpoints: [\"r1:eth1\", \"r2:eth1\"]";
        lab("{kind: kernel}").replace(plain, &format!("{plain}\n      rate: {rate}"))
    };
    node.apply(&rate("1Mbps"));
    node.try_exec("fastpath/r1", "ping -f -c400 -l400 -W1 -s 1400 10.0.12.2").ok();
    let policed = |node: &TestNode| {
        let stats = node.json(&["stats", "fastpath"]);
        let port = stats["vnets"]["fastpath"]["nodes"]["r1"]["ports"]["eth1"].clone();
        port["dropped"]["policed"].as_u64().unwrap_or(0)
    };
    assert!(policed(&node) > 100, "{}", policed(&node));
    assert_eq!(pids(&node), guests, "a rate starts nothing anew");

    // A guest that deletes its end gets it back, with its address and its link.
    node.exec("fastpath/r1", "ip link del eth1");
    let since = std::time::Instant::now();
    eventually("it is there again", || {
        node.try_exec("fastpath/r1", "ping -c1 -W1 10.0.12.2").is_ok()
    });
    assert!(since.elapsed().as_secs() < 5, "{:?}", since.elapsed());
    assert_eq!(pids(&node), guests, "and nothing else");

    // Other changes are reported until they are undone.
    let reported = || -> Vec<String> {
        let r1 = named(&nodes(&node, "fastpath"), "r1");
        let conditions = r1["conditions"].as_array().cloned().unwrap_or_default();
        let ours = conditions.iter().filter(|it| it["kind"] == "portChanged");
        ours.map(|it| it["message"].as_str().expect("words").to_owned()).collect()
    };
    assert_eq!(reported(), [""; 0]);
    node.exec("fastpath/r1", "ip link set eth1 mtu 1400");
    let words = "port eth1: its MTU set to 1400 (by the guest itself)";
    eventually("its MTU is told", || reported() == [words]);
    node.exec("fastpath/r1", "ip link set eth1 mtu 1500");
    eventually("that is undone", || reported().is_empty());
    let since = ["events", "fastpath", "--since", "10m", "--no-samples", "--format", "json"];
    let changes = ["condition", "conditionGone"].map(|what| ("vnet/fastpath/node/r1", what));
    Watched::of(&node, &since).expect(&changes);
    node.exec("fastpath/r1", "ip link set eth1 address 02:00:00:00:00:99 name other");
    eventually("its name and address are told", || {
        let changes = reported();
        changes.len() == 1 && changes[0].contains("renamed to other, its MAC address set to 02:00:")
    });
    // A new pdpd finds it as well, and continues counting from its first answer.
    let before = counters(&node);
    node.kill_pdpd();
    node.start_pdpd();
    let after = counters(&node);
    assert!((0..2).all(|at| after[at] >= before[at]), "{before:?} {after:?}");
    eventually("a new pdpd tells it", || {
        let r1 = named(&nodes(&node, "fastpath"), "r1");
        r1["conditions"].to_string().contains("renamed to other")
    });
    node.pdp(&["restart", "fastpath/r1"]);
    ready(&node);
    let r1 = named(&nodes(&node, "fastpath"), "r1");
    assert!(r1["conditions"].is_null(), "{r1}");

    // With a delay the link uses the mux. That restarts
    // both routers, so `link set` requires --restart.
    let guests = pids(&node);
    let delay = ["link", "set", "fastpath/link2", "delay=5ms"];
    let refused = node.try_pdp(&delay).expect_err("it restarts routers");
    assert!(refused.contains("this restarts r1 and r2"), "{refused}");
    assert_eq!(pids(&node), guests);
    node.pdp(&[&delay[..], &["--restart"]].concat());
    ready(&node);
    assert_ne!(pids(&node), guests);
    assert_eq!(paths(&node)[1], "mux it has a delay");
    let words = node.exec("fastpath/r1", "ping -c3 -i0.1 10.0.12.2");
    assert!(words.contains("time=1") && all_answered(&words, 3), "{words}");
    let pins = node.pins().join("_ports");
    assert!(!pins.exists(), "nothing is left of a link in the kernel");
    node.apply(&lab("{kind: kernel}"));
    ready(&node);
    assert!(pins.exists());
    node.pdp(&["down", "--purge"]);
    node.wait_pdpd();
    assert!(!pins.exists() && !node.run_dir().join("ports").exists());
}

/// For a router with the kernel data plane, and a host, as for others: OSPF's routes and next-hop
/// objects, and those set by hand.
#[test]
fn kernel_routes_are_listed_with_their_ports() {
    let node = TestNode::start("kroutes");
    node.apply(&lab("{kind: kernel}"));
    node.pdp(&["wait", "fastpath", "--for", "ready", "--timeout", "60s"]);
    let listed = |arguments: &[&str]| -> Vec<String> {
        let words = node.pdp(&[&["routes"], arguments].concat());
        words.lines().map(str::to_owned).collect()
    };
    let default = ["0.0.0.0/0 via 10.1.0.1 dev eth0", "10.1.0.0/24 dev eth0"];
    assert_eq!(listed(&["fastpath/h1"]), default);
    assert_eq!(listed(&["fastpath/h1", "--within", "10.9.0.0/24"]), default[..1]);
    let r1 = |line: &str| node.exec("fastpath/r1", line);
    r1("ip route add 192.0.2.0/24 nexthop via 10.0.12.2 weight 3 nexthop via 10.1.0.2");
    r1("ip -6 addr add fd00:1::1/64 dev eth0 nodad");
    r1("ip -6 addr add fd00:12::1/64 dev eth1 nodad");
    r1("ip -6 route add 2001:db8::/32 nexthop via fd00:12::2 nexthop via fd00:1::2");
    r1("ip route add blackhole 198.51.100.0/24");
    let ospf = "10.2.0.0/24 via 10.0.12.2 dev eth1";
    let own = [
        "192.0.2.0/24 nexthop via 10.1.0.2 dev eth0 weight 1 nexthop via 10.0.12.2 dev eth1 weight 3",
        "198.51.100.0/24 blackhole",
        "2001:db8::/32 nexthop via fd00:1::2 dev eth0 weight 1 nexthop via fd00:12::2 dev eth1 weight 1",
    ];
    eventually("all are there", || {
        let all = listed(&["fastpath/r1"]);
        [ospf].iter().chain(&own).all(|line| all.iter().any(|found| found == line))
    });
    let same = |prefix: &str| listed(&["fastpath/r1", "--within", prefix]);
    assert_eq!(same("2001:db8::/48"), own[2..]);
    let refused = node.try_pdp(&["routes", "fastpath/r1", "--guest", "0"]).expect_err("no guest");
    assert!(refused.contains("its own kernel forwards for it"), "{refused}");
    // There is no other table to compare with.
    assert_eq!(node.pdp(&["routes", "fastpath/r1", "--diff"]), "");
}

/// h1 - r1 - r2 - r3 - h3, with static routes. PdP moves no frame of r2's interfaces.
pub(super) const ROW: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: row}
spec:
  kinds: {router: {dataPlane: {kind: kernel}}}
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}
    h3: {kind: host, interfaces: {eth0: {addresses: [10.3.0.2/24], gateways: [10.3.0.1]}}}
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.1.0.1/24]}, eth1: {addresses: [10.12.0.1/24]}}
      routes: [{to: 10.0.0.0/8, via: 10.12.0.2}]
    r2:
      kind: router
      interfaces: {eth0: {addresses: [10.12.0.2/24]}, eth1: {addresses: [10.23.0.2/24]}}
      routes: [{to: 10.1.0.0/24, via: 10.12.0.1}, {to: 10.3.0.0/24, via: 10.23.0.3}]
    r3:
      kind: router
      interfaces: {eth0: {addresses: [10.3.0.1/24]}, eth1: {addresses: [10.23.0.3/24]}}
      routes: [{to: 10.0.0.0/8, via: 10.23.0.2}]
  links:
    - endpoints: ["h1:eth0", "r1:eth0"]
    - {name: first, endpoints: ["r1:eth1", "r2:eth0"]}
    - {name: last, endpoints: ["r2:eth1", "r3:eth1"]}
    - endpoints: ["r3:eth0", "h3:eth0"]
"#;

#[test]
fn router_between_routers_needs_no_helper() {
    let node = TestNode::start("row");
    node.apply(ROW);
    node.pdp(&["wait", "row", "--for", "ready", "--timeout", "60s"]);
    let r2 = named(&nodes(&node, "row"), "r2");
    assert!(r2["tap"].is_null() && r2["mirror"].is_null(), "{r2}");
    let words = node.exec("row/h1", "ping -c20 -i0.02 -w20 10.3.0.2");
    assert!(all_answered(&words, 20), "{words}");
    // Whole frames, and TCP of the routers themselves, whose checksums no device writes.
    let words = node.exec("row/h1", "ping -c3 -i0.1 -w20 -M do -s 1472 10.3.0.2");
    assert!(all_answered(&words, 3), "{words}{:#}", node.json(&["stats", "row"]));
    let serve = "cd /usr/bin; setsid python3 -m http.server 8000 >/dev/null 2>&1 &";
    node.pdp(&["exec", "row/r3", "--", "sh", "-c", serve]);
    eventually("a file comes whole", || {
        let get = "curl -sS -o /tmp/got http://10.23.0.3:8000/python3.11 && cmp /tmp/got /usr/bin/python3.11";
        node.try_pdp(&["exec", "row/r1", "--", "sh", "-c", get]).is_ok()
    });
    assert_eq!(missing(&node.json(&["stats", "row"])), []);
    // Only r2's end restarts, and both of its links are there again.
    node.pdp(&["restart", "row/r2"]);
    node.pdp(&["wait", "row", "--for", "ready", "--timeout", "60s"]);
    let words = node.exec("row/h1", "ping -c5 -i0.1 -w20 10.3.0.2");
    assert!(all_answered(&words, 5), "{words}");
}

/// Linux features that no other data plane has at full speed apply to each frame. All frames
/// received by a port leave by another or are counted.
#[test]
fn kernel_data_plane_has_all_linux_features() {
    let node = TestNode::start("linux");
    node.apply(&lab("{kind: kernel}"));
    node.pdp(&["wait", "fastpath", "--for", "ready", "--timeout", "60s"]);
    let r1 = |line: &str| node.exec("fastpath/r1", line);
    let h1 = |line: &str| node.exec("fastpath/h1", line);
    // Netfilter sees each packet, and translates addresses.
    r1("nft add table ip t");
    r1("nft add chain ip t f { type filter hook forward priority 0 ; }");
    r1("nft add rule ip t f icmp type echo-request counter");
    r1("nft add chain ip t n { type nat hook postrouting priority 100 ; }");
    r1("nft add rule ip t n oifname eth1 ip protocol icmp counter masquerade");
    let words = h1("ping -c20 -i0.02 -w20 10.2.0.2");
    assert!(all_answered(&words, 20), "{words}");
    let rules = r1("nft list chain ip t f");
    assert!(rules.contains("counter packets 20 "), "{rules}");
    let rules = r1("nft list chain ip t n");
    assert!(rules.contains("counter packets 1 "), "once for all packets of the flow: {rules}");
    r1("nft delete table ip t");
    // Policy routing with a separate table.
    r1("ip route add blackhole default table 7");
    r1("ip rule add from 10.1.0.2 to 10.2.0.2 table 7");
    let words = node.try_exec("fastpath/h1", "ping -c3 -i0.1 -W1 10.2.0.2").expect_err("dropped");
    assert!(words.contains("100% packet loss"), "{words}");
    r1("ip rule del from 10.1.0.2 to 10.2.0.2 table 7");
    // Fragments are made. On an interface without an OSPF
    // neighbour, as OSPF would treat it as a new interface.
    node.exec("fastpath/r2", "ip link set eth0 mtu 1400");
    let words = h1("ping -c3 -i0.1 -w20 -M dont -s 1472 10.2.0.2");
    assert!(all_answered(&words, 3), "{words}");
    // The guest's own shaper: 60 packets of 1,028 bytes at 400 kbit/s take more than a second.
    r1("tc qdisc add dev eth1 root tbf rate 400kbit burst 2kb latency 2s");
    let begun = std::time::Instant::now();
    let words = h1("ping -c60 -l60 -i0.002 -W5 -s 1000 10.2.0.2");
    assert!(all_answered(&words, 60) && begun.elapsed().as_secs_f64() > 1.0, "{words}");
    assert_eq!(missing(&node.json(&["stats", "fastpath"])), []);
}

/// h1 - r1 - r2 - h2, with FRR's PIM; r1 is privileged, so that it has the kernel's IPsec.
const MULTICAST: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: cast}
spec:
  kinds: {router: {dataPlane: {kind: kernel}}}
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}}
    r1:
      kind: router
      privileged: true
      interfaces: {eth0: {addresses: [10.1.0.1/24]}, eth1: {addresses: [10.12.0.1/24]}}
      routes: [{to: 10.2.0.0/24, via: 10.12.0.2}]
      files: &files
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: "frr:frr"}
        /etc/frr/pimd.conf:
          owner: "frr:frr"
          content: |
            log stdout
            interface eth0
             ip pim
             ip igmp
            interface eth1
             ip pim
             ip pim hello 1
      commands: &commands
        - /usr/lib/frr/zebra
        - sh -c "until [ -S /run/frr/zserv.api ]; do sleep 0.05; done; exec /usr/lib/frr/pimd"
    r2:
      kind: router
      interfaces: {eth0: {addresses: [10.2.0.1/24]}, eth1: {addresses: [10.12.0.2/24]}}
      routes: [{to: 10.1.0.0/24, via: 10.12.0.1}]
      files: *files
      commands: *commands
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "r2:eth1"]
    - endpoints: ["r2:eth0", "h2:eth0"]
"#;

/// Sends numbers to a group, 100 per second, for a minute. [`RECEIVE`] joins the group with this
/// source, and checks the numbers.
const SEND: &str = "import socket, struct, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 8)
for number in range(6000):
    s.sendto(struct.pack('>I', number), ('232.1.1.1', 5000))
    time.sleep(0.01)";
const RECEIVE: &str = "import socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('232.1.1.1', 5000))
ends = map(socket.inet_aton, ('232.1.1.1', '10.2.0.2', '10.1.0.2'))
s.setsockopt(socket.IPPROTO_IP, 39, b''.join(ends))
s.settimeout(50)
first = None
for turn in range(200):
    number, = struct.unpack('>I', s.recv(4))
    first = number if first is None else first
    assert number == first + turn, (first, turn, number)";

#[test]
fn multicast_routing_and_ipsec_policies_work() {
    let node = TestNode::start("cast");
    node.apply(MULTICAST);
    node.pdp(&["wait", "cast", "--for", "ready", "--timeout", "60s"]);
    eventually("h1 reaches h2", || node.try_exec("cast/h1", "ping -c1 -W1 10.2.0.2").is_ok());
    let sender = node.pdp_command(&["exec", "cast/h1", "--", "python3", "-c", SEND]);
    let _sender = Background::start(&mut { sender });
    node.pdp(&["exec", "cast/h2", "--", "python3", "-c", RECEIVE]);
    let routes = node.exec("cast/r2", "ip mroute show");
    assert!(routes.contains("(10.1.0.2,232.1.1.1)") && routes.contains("Iif: eth1"), "{routes}");
    let stats = node.json(&["stats", "cast"]);
    let sent = stats["vnets"]["cast"]["nodes"]["r1"]["ports"]["eth1"]["sent"].as_u64();
    assert!(sent >= Some(200), "by the link in the kernel: {stats}");

    // IPsec policies; this test's machine may lack encryption.
    let r1 = |line: &str| node.exec("cast/r1", line);
    let counted = |name: &str| {
        let text = r1("cat /proc/net/xfrm_stat");
        let line = text.lines().find(|line| line.starts_with(name)).expect("a counter").to_owned();
        line.split_whitespace()
            .last()
            .and_then(|count| count.parse::<u64>().ok())
            .expect("a number")
    };
    let hosts = "src 10.1.0.2/32 dst 10.2.0.2/32";
    let template = "tmpl src 10.12.0.1 dst 10.12.0.2 proto esp mode tunnel level required";
    for (policy, counter) in [
        (format!("dir fwd {hosts} action block"), "XfrmInPolBlock"),
        (format!("dir out {hosts} {template}"), "XfrmOutNoStates"),
    ] {
        let before = counted(counter);
        r1(&format!("ip xfrm policy add {policy}"));
        assert!(node.try_exec("cast/h1", "ping -c3 -i0.1 -W1 10.2.0.2").is_err(), "{policy}");
        assert!(counted(counter) >= before + 3, "{policy}: {}", r1("cat /proc/net/xfrm_stat"));
        r1("ip xfrm policy flush");
        let words = node.exec("cast/h1", "ping -c3 -i0.1 -w20 10.2.0.2");
        assert!(all_answered(&words, 3), "{words}");
    }
}

/// Number of 50 packets from h1 to h3 that pass through the stack of r2.
pub(super) fn by_stack(node: &TestNode) -> u64 {
    let sent = || -> u64 {
        let file = "cat /sys/class/net/eth1/statistics/tx_packets";
        node.exec("row/r2", file).trim().parse().expect("a number")
    };
    let before = sent();
    let _ = node.try_exec("row/h1", "ping -c50 -i0.01 -W5 10.3.0.2");
    sent() - before
}

/// Packets without hooks pass a router by the XDP bypass. The interface's own counters count them.
#[test]
fn packets_use_xdp_bypass_until_a_hook_appears() {
    let node = TestNode::start("shortway");
    node.apply(ROW);
    node.pdp(&["wait", "row", "--for", "ready", "--timeout", "60s"]);
    eventually("pdpd lends the short way", || by_stack(&node) < 10);
    let short = node.json(&["stats", "row"])["vnets"]["row"]["nodes"]["r2"]["ports"].clone();
    assert!(short["eth1"]["made"].as_u64() > Some(50), "they are counted all the same: {short}");
    // From the command on.
    let rule =
        "nft add table ip t; nft add chain ip t c '{ type filter hook forward priority 0; }'";
    node.pdp(&["exec", "row/r2", "--", "sh", "-c", rule]);
    assert!(by_stack(&node) >= 40);
    node.exec("row/r2", "nft delete table ip t");
    assert!(by_stack(&node) < 10);
    // The router watches properties that the kernel's look-up does not return.
    node.exec("row/r2", "ip route replace 10.3.0.0/24 via 10.23.0.3 mtu 1000");
    eventually("the route's MTU is heeded", || {
        let words = node.try_exec("row/h1", "ping -c1 -W1 -M do -s 1200 10.3.0.2");
        words.is_err_and(|words| words.contains("mtu = 1000") || words.contains("mtu=1000"))
    });
    // `kernelHooks: strict` sends all packets through the stack.
    let strict = ROW.replace("{kind: kernel}", "{kind: kernel, kernelHooks: strict}");
    let pid = named(&nodes(&node, "row"), "r2")["control"]["pid"].clone();
    node.apply(&strict);
    assert!(by_stack(&node) >= 40);
    assert_eq!(named(&nodes(&node, "row"), "r2")["control"]["pid"], pid, "nothing was begun anew");
}
