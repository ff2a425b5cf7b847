//! The labs of examples/: the test follows their instructions.

use std::fs;

use pdp_e2e::{TestNode, all_answered, alone, eventually};

use crate::beside::examples::{Shell, commands, first, read};

/// Brings an example up as in its comment.
fn bring_up(shell: &Shell<'_>, example: &str) {
    let up = commands(example).remove(0);
    let is_so = up.starts_with("pdp up ") && up.contains(" -f ");
    assert!(is_so && up.ends_with(&format!("{example} --wait")), "{up}");
    shell.run(&up);
}

/// Follows the comment of a running example. Returns the output of the commands after `up`.
fn follow(node: &TestNode, shell: &Shell<'_>, example: &str) -> Vec<String> {
    let mut outputs = Vec::new();
    for command in &commands(example)[1..] {
        if command.starts_with("curl ") {
            outputs.push(node.namespace().run(command));
            continue;
        }
        // Else ping calls answers of a busy machine lost.
        let patient = command.replace("ping -c3 ", "ping -c3 -w60 ");
        // `up` awaited the state in which commands work. With one link less, routing daemons need
        // time, as do programs after a restart, and adjacencies after the machine was overloaded.
        let mut words = String::new();
        eventually(command, || {
            let output = shell.try_run(&patient);
            words = String::from_utf8_lossy(&output.stdout).into_owned();
            output.status.success() && (patient == *command || all_answered(&words, 3))
        });
        outputs.push(words);
    }
    outputs
}

/// Pings of several sizes; ping checks the payload of the answers.
fn hosts_talk(node: &TestNode, vnet: &str) {
    for bytes in [0, 56, 1472] {
        let line = format!("ping -c5 -i0.1 -w60 -p a55a -s {bytes} 10.0.0.2");
        let words = node.exec(&format!("{vnet}/h1"), &line);
        assert!(all_answered(&words, 5) && !words.contains("wrong"), "{words}");
    }
    let stats = node.json(&["stats", vnet]);
    let r1 = &stats["vnets"][vnet]["nodes"]["r1"];
    let count = |name: &str| r1["guests"]["0"][name].as_u64().expect("a counter");
    assert!(count("toGuest") >= 30 && count("fromGuest") >= 30, "{r1}");
}

/// Check of a running example whose comment was followed, given that output.
pub(crate) type Check = fn(&TestNode, &[String]);

/// Labs that run side by side on one node, and their checks.
pub(crate) const LABS: [(&str, Check); 16] = [
    ("bgp.yaml", bgp),
    ("customers.yaml", customers),
    ("evpn.yaml", evpn),
    ("fastpath.yaml", fastpath),
    ("fields.yaml", fields),
    ("firewall.yaml", firewall),
    ("image.yaml", image),
    ("ipv6.yaml", ipv6),
    ("isis.yaml", isis),
    ("kernel.yaml", kernel),
    ("lan.yaml", lan),
    ("nat.yaml", nat),
    ("ospf.yaml", ospf),
    ("taps.yaml", taps),
    ("testpmd.yaml", testpmd),
    ("web.yaml", web),
];

/// All run on one machine with two CPUs at once, without disturbing each other.
#[test]
fn example_labs_work_side_by_side() {
    let _alone = alone();
    let mut node = TestNode::prepare("examples");
    node.namespace().run(&first("examples/cable.yaml").expect("how to make the cable"));
    node.start_pdpd();
    let mut shell = Shell::new(&node);
    let root = node.directory.join("busybox");
    // Exactly as in the lab's file. A spec must be beside its files, so the file is a copy.
    let copy = node.directory.join("image.yaml");
    let (written, here) = ("/srv/pdp-busybox", root.to_str().expect("a path"));
    fs::write(&copy, read("examples/image.yaml").replace(written, here)).expect("a spec");
    shell.instead = vec![(written, root), ("examples/image.yaml", copy)];
    for (file, _) in LABS {
        let example = format!("examples/{file}");
        if let Some(first) = first(&example) {
            shell.run(&first);
        }
        bring_up(&shell, &example);
    }
    for (file, check) in LABS {
        let example = format!("examples/{file}");
        check(&node, &follow(&node, &shell, &example));
    }
}

fn ospf(node: &TestNode, outputs: &[String]) {
    let [_ping, neighbours, diff] = outputs else { panic!("{outputs:?}") };
    assert!(neighbours.contains("Full/"), "{neighbours}");
    assert!(!diff.contains("10."), "{diff}");
    let route = node.pdp(&["routes", "ospf/r1", "--guest", "0", "--within", "10.2.0.0/24"]);
    assert!(route.contains("10.0.12.2") && route.contains("eth1"), "{route}");
}

fn fastpath(node: &TestNode, outputs: &[String]) {
    let [_ping, neighbours, diff, stats] = outputs else { panic!("{outputs:?}") };
    assert!(neighbours.contains("Full/"), "{neighbours}");
    assert!(!diff.contains("10.") && stats.contains("Engines"), "{diff}{stats}");
    assert_eq!(node.json(&["inspect", "fastpath"])["status"]["ready"], true);
}

fn kernel(node: &TestNode, outputs: &[String]) {
    let [_, neighbours, _, _, _, routes, _] = outputs else { panic!("{outputs:?}") };
    assert!(neighbours.contains("Full/"), "{neighbours}");
    assert!(routes.contains("10.2.0.0/24"), "{routes}");
    let router = node.json(&["inspect", "kernel"])["status"]["nodes"].clone();
    assert!(!router.to_string().contains("mirror"), "{router}");
}

fn nat(node: &TestNode, outputs: &[String]) {
    let [outside, inside, rules, _] = outputs else { panic!("{outputs:?}") };
    assert_eq!((outside.trim(), inside.trim()), ("hello from outside", "hello from inside"));
    assert!(rules.contains("masquerade") && !rules.contains("packets 0 "), "{rules}");
    let log = node.pdp(&["logs", "nat/isp"]);
    assert!(log.contains("192.0.2.1 - - ") && !log.contains("10.1.0."), "{log}");
}

fn fields(node: &TestNode, outputs: &[String]) {
    let [_, _, filters, counters] = outputs else { panic!("{outputs:?}") };
    assert!(filters.contains("88b50014") && counters.contains('0'), "{filters}{counters}");
    let heard = |host: &str, words: &str| {
        let heard = || node.exec(&format!("fields/{host}"), "cat /tmp/heard").contains(words);
        eventually(words, heard);
    };
    heard("h2", "label 30, 6 hops left: hello, h2\n");
    for (from, label, to, words) in [
        ("h2", "40", "h1", "label 50, 6 hops left: back\n"),
        ("h1", "60", "h3", "label 60, 7 hops left: aside\n"),
    ] {
        let text = words.rsplit(' ').next().expect("words");
        node.exec(&format!("fields/{from}"), &format!("python3 /root/say.py {label} {text}"));
        heard(to, words);
    }
    // A frame with an unknown label ends where it is unknown.
    let dropped = || {
        let stats = node.json(&["stats", "fields"]);
        let port = &stats["vnets"]["fields"]["nodes"]["a"]["ports"]["eth0"];
        port["dropped"]["unmatched"].as_u64().unwrap_or(0)
    };
    let before = dropped();
    node.exec("fields/h1", "python3 /root/say.py 99 lost");
    eventually("it is dropped", || dropped() > before);
    assert!(!node.exec("fields/h2", "cat /tmp/heard").contains("lost"));
}

fn isis(node: &TestNode, outputs: &[String]) {
    let [ping, ping6, neighbours, diff, _down, around] = outputs else { panic!("{outputs:?}") };
    assert!(ping.contains("ttl=62") && ping6.contains("ttl=62"), "{ping}{ping6}");
    assert_eq!(neighbours.matches(" Up ").count(), 2, "{neighbours}");
    assert!(!diff.contains("10."), "{diff}");
    assert!(around.contains("packets transmitted"), "{around}");
    let ping = || node.try_exec("isis/h1", "ping -c1 -w2 10.2.0.2");
    eventually("by the third router", || ping().is_ok_and(|words| words.contains("ttl=61")));
}

fn bgp(node: &TestNode, outputs: &[String]) {
    let [ping, _summary, _routes, _diff, _down, around] = outputs else { panic!("{outputs:?}") };
    assert!(ping.contains("ttl=61"), "{ping}");
    assert!(around.contains("packets transmitted"), "{around}");
    // On a busy machine, the routers may need longer than the example's pings.
    let ping = || node.try_exec("bgp/h1", "ping -c3 -i0.2 -w20 10.3.0.2");
    eventually("by the other spine", || ping().is_ok_and(|words| all_answered(&words, 3)));
    // A router that still has both links has both paths, in its kernel and in its forwarding guest.
    let both = |words: &str| words.contains("10.0.12.0") && words.contains("10.0.22.0");
    eventually("both ways", || {
        let kernel = node.exec("bgp/leaf2", "ip route show 10.3.0.0/24");
        let route = ["routes", "bgp/leaf2", "--guest", "0", "--within", "10.3.0.0/24"];
        both(&kernel) && both(&node.pdp(&route))
    });
}

fn evpn(node: &TestNode, outputs: &[String]) {
    let [ping, summary, _macs, _fdb] = outputs else { panic!("{outputs:?}") };
    assert!(ping.contains("ttl=64"), "nobody routed it: {ping}");
    assert!(summary.contains("10.0.1.0") && !summary.contains("Active"), "{summary}");
    let peer = node.exec("evpn/h2", "cat /sys/class/net/eth0/address");
    // The last two commands again: on a busy machine, BGP may tell of the peer later.
    eventually("the peer's address by BGP", || {
        let show = ["exec", "evpn/leaf1", "--", "vtysh", "-c", "show evpn mac vni 100"];
        let macs = node.pdp(&show);
        let row = macs.lines().find(|line| line.starts_with(peer.trim()));
        row.is_some_and(|row| row.contains("remote") && row.contains("10.255.0.2"))
    });
    eventually("the peer's address in the bridge", || {
        let fdb = node.exec("evpn/leaf1", "bridge fdb show dev vxlan100");
        fdb.contains(&format!("{} dst 10.255.0.2", peer.trim()))
    });
    // Whole frames pass, including VXLAN's overhead.
    let words = node.exec("evpn/h1", "ping -c3 -i0.1 -w60 -M do -s 1472 10.1.0.2");
    assert!(all_answered(&words, 3), "{words}");
}

fn ipv6(node: &TestNode, outputs: &[String]) {
    let [ping, neighbours, _routes] = outputs else { panic!("{outputs:?}") };
    assert!(ping.contains("ttl=61"), "{ping}");
    assert_eq!(neighbours.matches("Full/").count(), 2, "{neighbours}");
    let addresses = node.exec("ipv6/r2", "ip -4 -br address show scope global");
    assert!(addresses.trim().is_empty(), "{addresses}");
}

fn customers(node: &TestNode, outputs: &[String]) {
    let [red, blue, _stats, substrate] = outputs else { panic!("{outputs:?}") };
    for ping in [red, blue] {
        assert!(ping.contains("ttl=62"), "{ping}");
    }
    assert!(substrate.contains("borrows"), "{substrate}");
    // The 10.2.0.2 of each network is its own.
    node.exec("red/h2", "touch /tmp/red");
    let others = node.exec("blue/h2", "ls /tmp");
    assert!(!others.contains("red"), "{others}");
    node.pdp(&["link", "down", "red/link2"]);
    let ping = |vnet: &str, within: u8| {
        node.try_exec(&format!("{vnet}/h1"), &format!("ping -c1 -w{within} 10.2.0.2"))
    };
    eventually("red's tunnel is cut", || ping("red", 3).is_err());
    ping("blue", 60).expect("and blue's is not");
}

fn lan(node: &TestNode, outputs: &[String]) {
    let [_neighbour, beyond, out, fdb, bridge] = outputs else { panic!("{outputs:?}") };
    assert!(beyond.contains("ttl=64"), "nobody routed it: {beyond}");
    assert!(out.contains("ttl=63"), "{out}");
    assert!(fdb.contains("sw:eth0") && fdb.contains("h1:eth0"), "{fdb}");
    // The bridge has learned the addresses behind its ports.
    let macs = node.exec("lan/h4", "cat /sys/class/net/eth0/address");
    let line = bridge.lines().find(|line| line.contains(macs.trim()));
    assert!(line.is_some_and(|line| line.contains("eth2")), "{bridge}");
}

fn firewall(node: &TestNode, outputs: &[String]) {
    let [page, log, _rules, get] = outputs else { panic!("{outputs:?}") };
    assert_eq!(page.trim(), "hello from outside");
    assert!(log.contains("192.0.2.1 - - ") && !log.contains("10.1.0."), "{log}");
    assert!(get.contains("firewall"), "{get}");
    node.exec("firewall/pc2", "ping -c1 -w60 192.0.2.2");
    // It has the route, but ingress is blocked, for a new packet as well as for the first.
    let ping = |to: &str, within: u8| {
        node.try_exec("firewall/www", &format!("ping -c3 -i0.2 -w{within} {to}"))
    };
    ping("192.0.2.1", 60).expect("the firewall itself");
    let refused = ping("10.1.0.1", 3).expect_err("shut");
    assert!(refused.contains("100% packet loss"), "{refused}");
}

fn image(node: &TestNode, outputs: &[String]) {
    let [page, programs, _, _, more] = outputs else { panic!("{outputs:?}") };
    assert_eq!(page.trim(), "hello from an image");
    assert_eq!(more.trim(), "more", "it stayed");
    assert!(programs.contains("httpd -> busybox") && !programs.contains("python"), "{programs}");
    assert!(node.try_pdp(&["exec", "image/www", "--", "/usr/bin/python3", "-V"]).is_err());
}

fn web(node: &TestNode, outputs: &[String]) {
    let [outside, inside, nodes] = outputs else { panic!("{outputs:?}") };
    for page in [outside, inside] {
        assert_eq!(page.trim(), "hello from the lab");
    }
    let row = nodes.lines().find(|line| line.starts_with("web/www"));
    assert!(row.is_some_and(|row| row.contains("8080:80")), "{nodes}");
    let routes = node.exec("web/r1", "ip -o route show");
    assert!(!routes.contains("mgmt0"), "the lab has nothing of it: {routes}");
}

fn testpmd(node: &TestNode, _: &[String]) {
    hosts_talk(node, "testpmd");
    let line = "grep -c Cap.*0000000000000000 /proc/self/status";
    let found = node.pdp(&["exec", "testpmd/r1", "--guest", "0", "--", "sh", "-c", line]);
    assert_eq!(found.trim(), "5", "CapInh, CapPrm, CapEff, CapBnd and CapAmb are empty");
}

fn taps(node: &TestNode, _: &[String]) {
    hosts_talk(node, "taps");
}
