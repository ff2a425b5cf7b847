//! The lists of allowed system calls compared with those of real guests: FRR and BIRD,
//! `pdp-router`, testpmd, programs on TAPs and in Python, and typical commands in hosts. strace(1)
//! traces each from its first step. Each call must be in the guest's list, except those named here
//! with a reason. The test prints listed calls that nobody makes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use pdp_e2e::specs::{SUBSTRATE, two_hosts};
use pdp_e2e::{Background, TestNode, eventually};
use serde_json::{Value, json};

const GUEST: &str = include_str!("hostile/guest.py");

/// Replacement for runc: does the same under a tracer that
/// outlives it, and saves the bundle's configuration.
const WATCHED: &str = r#"#!/bin/sh
out=DIRECTORY
for word; do
    [ "$last" = --bundle ] && bundle=$word
    last=$word
done
[ -z "$bundle" ] || cp "$bundle/config.json" $out/$last.json
echo "$@" > $out/$$.words
exec strace -DDD -f -qq --decode-pids=pidns -o $out/$$.trace /usr/sbin/runc "$@"
"#;

/// Calls that real guests try, that are refused, and that they can do without.
const TRIED: [(&str, &str); 3] = [
    ("clone3", "falls back to clone(2), whose flags the list can look at"),
    ("iopl", "DPDK, for ports of devices; it has none"),
    ("ioperm", "the same"),
];

const ROUTERS: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: net}
spec:
  nodes:
    frr:
      kind: router
      interfaces:
        eth0: {addresses: [10.1.0.1/24]}
        eth1: {addresses: [10.0.12.1/24]}
      commands:
        - /usr/lib/frr/zebra -A 127.0.0.1
        - /usr/lib/frr/staticd -A 127.0.0.1
        - /usr/lib/frr/ospfd -A 127.0.0.1
        - /usr/lib/frr/isisd -A 127.0.0.1
        - /usr/lib/frr/bgpd -A 127.0.0.1
        - /usr/lib/frr/bfdd
      files:
        /etc/frr/zebra.conf: {content: "log stdout\n", owner: frr}
        /etc/frr/staticd.conf: {content: "ip route 10.9.0.0/16 blackhole\n", owner: frr}
        /etc/frr/ospfd.conf:
          owner: frr
          content: |
            interface eth1
             ip ospf network point-to-point
             ip ospf hello-interval 1
             ip ospf dead-interval 5
            router ospf
             network 10.0.0.0/8 area 0
             redistribute static
        /etc/frr/isisd.conf:
          owner: frr
          content: |
            interface eth1
             ip router isis one
            router isis one
             net 49.0001.0000.0000.0001.00
        /etc/frr/bgpd.conf:
          owner: frr
          content: |
            router bgp 65001
             no bgp ebgp-requires-policy
             neighbor 10.0.12.2 remote-as 65002
             neighbor 10.0.12.2 bfd
             address-family ipv4 unicast
              redistribute connected
      dataPlane: {power: 0.1}
    bird:
      kind: router
      interfaces:
        eth0: {addresses: [10.0.12.2/24]}
        eth1: {addresses: [10.2.0.1/24]}
      commands: [/usr/sbin/bird -f -c /etc/bird/bird.conf]
      files:
        /etc/bird/bird.conf:
          content: |
            log stderr all;
            router id 10.0.12.2;
            protocol device {}
            protocol direct { ipv4; }
            protocol kernel { ipv4 { export all; }; }
            protocol bgp one {
              local as 65002;
              neighbor 10.0.12.1 as 65001;
              ipv4 { import all; export all; };
            }
            protocol ospf two {
              ipv4 { import all; export none; };
              area 0 { interface "eth0" { type ptp; hello 1; dead 5; }; };
            }
      dataPlane: {power: 0.1}
    h1: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}
    h2: {kind: host, interfaces: {eth0: {addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}}
  links:
    - endpoints: ["frr:eth0", "h1:eth0"]
    - endpoints: ["frr:eth1", "bird:eth0"]
    - endpoints: ["bird:eth1", "h2:eth0"]
"#;

const TESTPMD: &str = "dpdk-testpmd --no-huge --no-shconf --no-pci --no-telemetry -m 128 \
    --lcores 0@1,1@1 \
    --vdev=net_memif0,role=client,id=0,socket=/run/pdp/memif/memif.sock,socket-abstract=no \
    --vdev=net_memif1,role=client,id=1,socket=/run/pdp/memif/memif.sock,socket-abstract=no \
    -- --forward-mode=io --total-num-mbufs=4096 --no-mlockall --no-flush-rx --auto-start \
    --stats-period=3600";

/// A bridge between two TAPs.
const ON_TAPS: &str = "
import select, socket
ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW) for _ in range(2)]
for number, end in enumerate(ends):
    end.bind((f'eth{number}', 3))
print('bridges', flush=True)
while True:
    for end in select.select(ends, [], [])[0]:
        end.recvfrom(2048)
";

/// Typical commands in hosts.
const IN_HOSTS: [&str; 9] = [
    "ping -c2 -i0.2 10.2.0.2",
    "traceroute -n -w1 -q1 10.2.0.2",
    "ping -c3 -i0.3 10.2.0.2 & timeout 10 tcpdump -ni eth0 -c1 icmp; wait",
    "ip -j addr",
    "nft list ruleset",
    "ethtool -k eth0",
    "socat -T1 -U tcp:10.2.0.2:7777 exec:date",
    "iperf3 -c 10.2.0.2 -t1 -b1M",
    "python3 -c \"import asyncio, multiprocessing, socket, subprocess, tempfile, threading
if __name__ == '__main__':
    threading.Thread(target=print).start()
    subprocess.run(['true']), tempfile.TemporaryFile()
    multiprocessing.get_context('spawn').Pool(1).map(abs, [1])
    asyncio.run(asyncio.sleep(0))
    socket.getaddrinfo('localhost', 80)\"",
];

/// System calls of a guest's own programs, from a trace of runc.
fn called(trace: &str) -> BTreeSet<String> {
    let mut guests: BTreeSet<&str> = BTreeSet::new();
    let mut calls: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut children: Vec<(&str, &str)> = Vec::new();
    for line in trace.lines() {
        let Some((pid, rest)) = line.split_once(char::is_whitespace) else { continue };
        let rest = rest.trim_start();
        let resumed = rest.strip_prefix("<... ");
        let name_end = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let name = resumed.unwrap_or(rest).split(name_end).next().unwrap_or_default();
        if name == "execve" && resumed.is_none() {
            let path = rest.split('"').nth(1).unwrap_or_default();
            if !path.starts_with("/proc/self/") && !path.ends_with("/runc") {
                guests.insert(pid);
            }
        }
        if !guests.contains(pid) {
            // Perhaps a child of a guest's, whose creation comes later in the trace.
            calls.entry(pid).or_default().push(name);
            continue;
        }
        // Its earlier calls are runc's.
        let own = calls.entry(pid).or_default();
        if name == "execve" && resumed.is_none() && !own.contains(&"execve-of-guest") {
            own.clear();
            own.push("execve-of-guest");
        }
        own.push(name);
    }
    for line in trace.lines() {
        let Some((pid, rest)) = line.split_once(char::is_whitespace) else { continue };
        let makes = ["clone", "fork", "vfork"].iter().any(|name| {
            let rest = rest.trim_start();
            rest.starts_with(name) || rest.starts_with(&format!("<... {name}"))
        });
        let Some((_, result)) = rest.rsplit_once(" = ").filter(|_| makes) else { continue };
        let translated = result.split("/* ").nth(1).and_then(|rest| rest.split(' ').next());
        let child = translated.or_else(|| result.split(' ').next());
        children.extend(child.map(|child| (pid, child)));
    }
    loop {
        let more: Vec<_> = children
            .iter()
            .filter(|(parent, child)| guests.contains(parent) && !guests.contains(child))
            .map(|(_, child)| *child)
            .collect();
        if more.is_empty() {
            break;
        }
        guests.extend(more);
    }
    let own = calls.into_iter().filter(|(pid, _)| guests.contains(pid));
    let names = own.flat_map(|(_, names)| names).filter(|name| !name.is_empty());
    names.filter(|name| *name != "execve-of-guest").map(str::to_owned).collect()
}

/// System calls that a bundle allows, some of them only with certain arguments.
fn allowed(config: &Value) -> BTreeSet<String> {
    let rules = config["linux"]["seccomp"]["syscalls"].as_array().expect("rules");
    let allowing = rules.iter().filter(|rule| rule["action"] == "SCMP_ACT_ALLOW");
    let names = allowing.flat_map(|rule| rule["names"].as_array().expect("names"));
    names.map(|name| name.as_str().expect("a name").to_owned()).collect()
}

/// By profile: calls made, and calls allowed.
fn compare(traces: &Path, profile: impl Fn(&str) -> &'static str) -> Profiles {
    let mut profiles = Profiles::new();
    for entry in fs::read_dir(traces).expect("traces") {
        let path = entry.expect("traces").path();
        if path.extension().is_none_or(|extension| extension != "words") {
            continue;
        }
        let words = fs::read_to_string(&path).expect("words");
        let words: Vec<&str> = words.split_whitespace().collect();
        let bundle = |word: &&&str| traces.join(format!("{word}.json")).exists();
        let Some(id) = words.iter().find(bundle) else { continue };
        let config = fs::read(traces.join(format!("{id}.json"))).expect("a bundle");
        let config: Value = serde_json::from_slice(&config).expect("a bundle");
        let trace = fs::read(path.with_extension("trace")).unwrap_or_default();
        let (called_all, allowed_all) = profiles.entry(profile(id)).or_default();
        for name in called(&String::from_utf8_lossy(&trace)) {
            called_all.entry(name).or_default().insert((*id).to_owned());
        }
        *allowed_all = allowed(&config);
    }
    profiles
}

type Profiles = BTreeMap<&'static str, (BTreeMap<String, BTreeSet<String>>, BTreeSet<String>)>;

/// Runs a shell line in a node; returns its output.
fn shell(node: &TestNode, name: &str, line: &str) -> String {
    node.pdp(&["exec", name, "--", "sh", "-c", line])
}

#[test]
fn seccomp_lists_cover_real_guest_syscalls() {
    let mut node = TestNode::prepare("syscalls");
    let traces = node.directory.join("traces");
    fs::create_dir(&traces).expect("a directory");
    let watched = node.directory.join("watched-runc");
    let script = WATCHED.replace("DIRECTORY", traces.to_str().expect("a path"));
    fs::write(&watched, script).expect("written");
    fs::set_permissions(&watched, fs::Permissions::from_mode(0o755)).expect("a program");
    node.pdpd_arguments(&["--runc", watched.to_str().expect("a path")]);
    node.start_pdpd();
    node.apply(SUBSTRATE);
    node.apply(ROUTERS);
    let own = |attach: &str, run: Value| {
        let program = json!({"attach": attach, "run": run});
        let memory = json!({"power": 0.1, "memory": "600Mi", "processes": 64, "program": program});
        memory.to_string()
    };
    node.apply(&two_hosts("dpdk", &own("memif", TESTPMD.into())));
    node.apply(&two_hosts("taps", &own("tap", json!(["python3", "-c", ON_TAPS]))));
    node.apply(&two_hosts("py", &own("runtime", json!(["python3", "-c", GUEST, "silent"]))));
    eventually("the routers are neighbours", || {
        let ospf = shell(&node, "net/frr", "vtysh -c 'show ip ospf neighbor'");
        let bgp = shell(&node, "net/bird", "birdc show protocols");
        ospf.contains("Full/") && bgp.contains("Established")
    });
    eventually("h1 reaches h2", || node.try_exec("net/h1", "ping -c1 -W1 10.2.0.2").is_ok());
    shell(
        &node,
        "net/frr",
        "vtysh -c 'show running-config' -c 'write memory' -c 'show isis interface'",
    );
    let serve = "iperf3 -s -1 -D; socat -u tcp-listen:7777,reuseaddr create:/tmp/got &
        sleep 3; cat /tmp/got";
    let server = ["exec", "net/h2", "--", "sh", "-c", serve];
    let _server = Background::start(&mut node.pdp_command(&server));
    eventually("the servers listen", || {
        let sockets = node.exec("net/h2", "ss -Hltn");
        sockets.contains(":5201") && sockets.contains(":7777")
    });
    for line in IN_HOSTS {
        let output = shell(&node, "net/h1", line);
        println!("{line}: {}", output.lines().last().unwrap_or_default());
    }
    for (vnet, want) in [("dpdk", ""), ("taps", " bridges"), ("py", " connected")] {
        eventually(&format!("{vnet} is at work"), || {
            let guest = &node.json(&["stats", vnet])["vnets"][vnet]["nodes"]["r1"]["guests"]["0"];
            let output = node.pdp(&["logs", &format!("{vnet}/r1"), "--guest", "0"]);
            // A guest that completes nothing is disconnected after a while.
            (guest["connected"] == true || vnet == "py") && output.contains(want)
        });
    }
    for vnet in ["net", "dpdk", "taps", "py"] {
        node.pdp(&["delete", vnet]);
    }
    let profiles = compare(&traces, |id| match id.split('.').collect::<Vec<_>>()[..] {
        [_, _, _] => "forwarding",
        [_, "frr" | "bird" | "r1"] => "control",
        _ => "host",
    });
    assert_eq!(profiles.keys().copied().collect::<Vec<_>>(), ["control", "forwarding", "host"]);
    for (profile, (called, allowed)) in &profiles {
        // A program's start alone needs this many; fewer mean a broken trace.
        assert!(called.len() > 40, "{profile}: {called:?}");
        let tried = TRIED.map(|(name, _)| name);
        let refused: Vec<_> = called
            .iter()
            .filter(|(name, _)| !allowed.contains(*name) && !tried.contains(&name.as_str()))
            .collect();
        let unused: Vec<_> = allowed.iter().filter(|name| !called.contains_key(*name)).collect();
        println!("{profile}: {} of {} are called", called.len(), allowed.len());
        println!("{profile}: nobody called {unused:?}");
        println!("{profile}: tried {refused:?}");
        assert!(refused.is_empty(), "{profile}: not in its list: {refused:?}");
    }
}
