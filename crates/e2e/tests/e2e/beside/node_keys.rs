//! A node's other keys, besides interfaces and commands, as seen inside the node.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use pdp_e2e::specs::SUBSTRATE;
use pdp_e2e::{TestNode, eventually, kill};
use pdp_spec::sysctl::sysctls;
use serde_json::Value;

/// h1 - r1 - h2. r1 has `routes`; h1 reaches h2's loopback address only by them.
fn network(routes: &str) -> String {
    format!(
        r#"{SUBSTRATE}---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
        eth0: {{addresses: [10.1.0.1/24]}}
        eth1: {{addresses: [10.2.0.1/24]}}
      loopback: [1.1.1.1/32, "fdff::1/128"]
      routes: [{routes}]
      dataPlane: {{power: 0.2}}
    h1:
      kind: host
      interfaces: {{eth0: {{addresses: [10.1.0.2/24], gateways: [10.1.0.1]}}}}
    h2:
      kind: host
      interfaces: {{eth0: {{addresses: [10.2.0.2/24], gateways: [10.2.0.1]}}}}
      loopback: [2.2.2.2/32]
      sysctls:
        net.ipv4.tcp_ecn: 1
        net.ipv4.tcp_rmem: "4096 65536 262144"
        net.ipv4.conf.default.proxy_arp: 1
        net.ipv4.conf.eth0.rp_filter: 2
        net.ipv4.ip_forward: 1
        net.ipv4.conf.all.accept_redirects: 1
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#
    )
}

fn pids(node: &TestNode) -> Vec<u64> {
    let status = node.json(&["inspect", "red"])["status"].clone();
    let nodes = status["nodes"].as_array().expect("nodes").clone();
    let pid = |process: &Value| process["pid"].as_u64().expect("it runs");
    let mut pids: Vec<u64> = nodes.iter().map(|node| pid(&node["control"])).collect();
    pids.extend(nodes.iter().flat_map(|node| node["guests"].as_array().unwrap()).map(pid));
    pids
}

fn reaches(node: &TestNode, address: &str) -> bool {
    node.try_exec("red/h1", &format!("ping -c1 -W1 {address}")).is_ok()
}

fn routes(node: &TestNode) -> String {
    node.exec("red/r1", "ip route show proto static")
}

/// Loopback addresses and static routes exist from the start and take effect. Routes change while
/// everything runs, even if pdpd missed the change, and return with the container.
#[test]
fn loopback_addresses_and_static_routes_work() {
    let mut node = TestNode::start("routes");
    node.apply(&network("{to: 2.2.2.2/32, via: 10.2.0.2}, {to: 10.9.0.0/16, type: blackhole}"));
    eventually("h1 reaches both loopbacks", || {
        reaches(&node, "1.1.1.1") && reaches(&node, "2.2.2.2")
    });
    let before = pids(&node);
    let addresses = node.exec("red/r1", "ip -o addr show lo");
    assert!(addresses.contains("inet6 fdff::1/128"), "{addresses}");
    assert!(routes(&node).contains("blackhole 10.9.0.0/16"), "{}", routes(&node));

    node.exec("red/r1", "ip route add 10.8.0.0/16 via 10.2.0.2 proto static");
    node.apply(&network("{to: 2.2.0.0/16, via: 10.2.0.2, metric: 7}"));
    let now = routes(&node);
    assert!(now.contains("2.2.0.0/16 via 10.2.0.2 dev eth1 metric 7"), "{now}");
    assert!(!now.contains("2.2.2.2") && !now.contains("10.9.0.0/16"), "{now}");
    assert!(now.contains("10.8.0.0/16"), "what somebody inside set stays: {now}");
    eventually("the forwarding guest goes by it", || reaches(&node, "2.2.2.2"));

    node.kill_pdpd();
    node.start_pdpd();
    node.apply(&network(""));
    assert_eq!(routes(&node).lines().count(), 1, "the one set inside: {}", routes(&node));
    eventually("it is unreachable", || !reaches(&node, "2.2.2.2"));
    assert_eq!(pids(&node), before, "nothing was made anew");

    node.apply(&network("{to: 2.2.2.2/32, via: 10.2.0.2}"));
    let status = node.json(&["inspect", "red"])["status"].clone();
    let nodes = status["nodes"].as_array().unwrap();
    let r1 = nodes.iter().find(|found| found["name"] == "r1").unwrap();
    kill(u32::try_from(r1["control"]["pid"].as_u64().unwrap()).unwrap());
    eventually("r1 is made anew, and has its route", || {
        node.try_exec("red/r1", "ip route").is_ok_and(|now| now.contains("2.2.2.2 via 10.2.0.2"))
    });
}

/// Sysctls have their values, including those that the kernel derives from others. All listed ones
/// only affect the node, which may write them itself.
#[test]
fn sysctls_are_set_and_belong_to_the_node() {
    let node = TestNode::start("sysctls");
    node.apply(&network(""));
    let value = |name: &str| node.exec("red/h2", &format!("cat /proc/sys/net/{name}"));
    for (name, expected) in [
        ("ipv4/tcp_ecn", "1"),
        ("ipv4/tcp_rmem", "4096\t65536\t262144"),
        ("ipv4/conf/eth0/proxy_arp", "1"),
        ("ipv4/conf/eth0/rp_filter", "2"),
        ("ipv4/ip_forward", "1"),
        ("ipv4/conf/all/accept_redirects", "1"),
    ] {
        assert_eq!(value(name).trim(), expected, "{name}");
    }
    let found =
        node.exec("red/h2", "find /proc/sys/net/ipv4 /proc/sys/net/ipv6 -type f -perm -200");
    let own: BTreeSet<&str> = found.lines().collect();
    assert!(own.len() > 100, "{found}");
    for name in sysctls() {
        let path = format!("/proc/sys/{}", name.replace("INTERFACE", "eth0").replace('.', "/"));
        let exists = Path::new(&path.replace("eth0", "lo")).exists();
        assert!(!exists || own.contains(path.as_str()), "{name} is not the node's own");
    }
    let text = network("").replace("net.ipv4.tcp_ecn: 1", "net.ipv4.tcp_ecn: 77");
    let refused = node.try_apply(&text).unwrap_err();
    assert!(refused.contains("set sysctl net.ipv4.tcp_ecn"), "{refused}");
}

/// A tenant's node gets the contents of the granted directory, but no target of a link in it. That
/// holds when it is applied, and when the directory itself later becomes a link.
#[test]
fn tenant_bind_stays_within_its_grant() {
    let node = TestNode::start("binds");
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    for (name, text) in [("granted", "granted"), ("secret", "secret")] {
        fs::create_dir_all(at(name).join("in")).unwrap();
        fs::write(at(name).join("in/x"), text).unwrap();
    }
    symlink(at("secret"), at("granted/link")).unwrap();
    let granted = at("granted").display().to_string();
    let spec = |source: &str| {
        format!(
            "{SUBSTRATE}---\napiVersion: pdp/v1\nkind: Tenant\nmetadata: {{name: acme}}\n\
             spec: {{binds: [{granted}]}}\n---\napiVersion: pdp/v1\nkind: VirtualNetwork\n\
             metadata: {{name: acme.lab}}\nspec: {{nodes: {{h1: {{kind: host, binds: [\"{source}\"]}}}}}}\n"
        )
    };
    node.apply(&spec(&format!("{granted}/in:/data:ro")));
    let read = || node.try_exec("acme.lab/h1", "cat /data/x");
    eventually("the node runs", || read().is_ok_and(|text| text == "granted"));
    assert!(node.try_exec("acme.lab/h1", "touch /data/y").is_err());
    for (source, why) in [
        (format!("{granted}/link/in:/data:ro"), "the path contains a symbolic link"),
        (format!("{granted}/../secret/in:/data:ro"), "not an absolute path without .."),
        (
            format!("{}:/data:ro", at("secret").display()),
            "is not below a directory that the tenant may bind",
        ),
        (format!("{granted}/in:/data"), "is writable, but the tenant may only read it"),
        (format!("{granted}/none:/data:ro"), "No such file"),
    ] {
        let refused = node.try_apply(&spec(&source)).unwrap_err();
        assert!(refused.contains(why), "{source}: {refused}");
    }
    assert_eq!(read().unwrap(), "granted", "what was refused changed nothing");

    fs::rename(at("granted"), at("kept")).unwrap();
    symlink(at("secret"), at("granted")).unwrap();
    let status = node.json(&["inspect", "acme.lab"])["status"].clone();
    kill(u32::try_from(status["nodes"][0]["control"]["pid"].as_u64().unwrap()).unwrap());
    eventually("it is told why the node is not made", || {
        node.log().contains("the path contains a symbolic link")
    });
    assert!(read().is_err());
    fs::remove_file(at("granted")).unwrap();
    fs::rename(at("kept"), at("granted")).unwrap();
    eventually("it is back", || read().is_ok_and(|text| text == "granted"));
}

/// A deleted network leaves files in a directory that two tenants may write. Only their owner can
/// still read them: the other tenant's next network has other user IDs, even after a restart.
#[test]
fn leftover_files_belong_to_no_other_tenant() {
    let mut node = TestNode::start("reuse");
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let place = place.path().display().to_string();
    let tenant = |name: &str| {
        format!(
            "---\napiVersion: pdp/v1\nkind: Tenant\nmetadata: {{name: {name}}}\n\
             spec: {{binds: [\"{place}:rw\"]}}\n"
        )
    };
    let lab = |name: &str| {
        format!(
            "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\n\
             spec: {{nodes: {{h1: {{kind: host, binds: [\"{place}:/data\"]}}}}}}\n"
        )
    };
    node.apply(&format!("{SUBSTRATE}{}{}", tenant("acme"), tenant("other")));
    let runs = |vnet: &str, command: &str| {
        let host = format!("{vnet}/h1");
        eventually("the host runs", || node.try_exec(&host, "true").is_ok());
        node.try_pdp(&["exec", &host, "--", "sh", "-c", command])
    };
    node.apply(&lab("other.lab"));
    runs("other.lab", "umask 077; echo key > /data/key").unwrap();
    node.pdp(&["delete", "other.lab"]);
    node.apply(&lab("acme.lab"));
    let read = runs("acme.lab", "cat /data/key").unwrap_err();
    assert!(read.contains("Permission denied"), "{read}");
    node.pdp(&["delete", "acme.lab"]);
    node.kill_pdpd();
    node.start_pdpd();
    let runs = |vnet: &str, command: &str| {
        let host = format!("{vnet}/h1");
        eventually("the host runs", || node.try_exec(&host, "true").is_ok());
        node.try_pdp(&["exec", &host, "--", "sh", "-c", command])
    };
    node.apply(&lab("acme.lab"));
    runs("acme.lab", "cat /data/key").unwrap_err();
    // The tenant itself gets them back.
    node.apply(&lab("other.new"));
    assert_eq!(runs("other.new", "cat /data/key").unwrap().trim(), "key");
}
