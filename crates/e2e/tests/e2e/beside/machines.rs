//! Nodes that behave like machines: servers and clients of the machine's own programs, with their
//! defaults.

use std::path::Path;

use pdp_e2e::specs::SUBSTRATE;
use pdp_e2e::{TestNode, eventually};

/// False, with a message, if the machine lacks a program.
fn has(program: &str) -> bool {
    let exists = Path::new(program).exists();
    if !exists {
        eprintln!("not tested: {program} is not on this machine; see scripts/install-deps");
    }
    exists
}

/// A DHCP server in a host and a client behind a router that does not relay. They share a link.
const DHCP: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: dhcp}
spec:
  nodes:
    srv:
      kind: host
      interfaces: {eth0: {addresses: [10.0.0.1/24]}}
      commands:
        - >-
          dnsmasq -d -C /dev/null --port=0 --dhcp-range=10.0.0.100,10.0.0.150,2m --dhcp-option=26,1400
          --dhcp-option=121,10.9.0.0/16,10.0.0.1
    pc: {kind: host, interfaces: {eth0: {}}, commands: ["dhclient -d -v eth0"]}
  links: [{endpoints: ["srv:eth0", "pc:eth0"]}]
"#;

#[test]
fn dhcp_client_gets_one_address_with_options() {
    if !has("/usr/sbin/dnsmasq") || !has("/usr/sbin/dhclient") && !has("/sbin/dhclient") {
        return;
    }
    let node = TestNode::start("dhcp");
    node.apply(SUBSTRATE);
    node.apply(DHCP);
    eventually("the client has an address", || node.pdp(&["logs", "dhcp/pc"]).contains("bound to"));
    let addresses = node.exec("dhcp/pc", "ip -4 -o addr show dev eth0");
    assert_eq!(addresses.matches("10.0.0.1").count(), 1, "{addresses}");
    assert_eq!(node.exec("dhcp/pc", "cat /sys/class/net/eth0/mtu"), "1400\n");
    assert!(node.exec("dhcp/pc", "ip route show 10.9.0.0/16").contains("via 10.0.0.1"));
    assert!(node.exec("dhcp/srv", "cat /var/lib/misc/dnsmasq.leases").contains("10.0.0.1"));
    let logs = node.pdp(&["logs", "dhcp/pc"]) + &node.pdp(&["logs", "dhcp/srv"]);
    for word in ["DECLINE", "No such file", "can't create"] {
        assert!(!logs.contains(word), "{word}: {logs}");
    }
}

/// r1 has the kernel's data plane, r2 forwarding guests.
const SSH: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: ssh}
spec:
  kinds: {host: {commands: [/usr/sbin/sshd -D]}, router: {commands: [/usr/sbin/sshd -D]}}
  defaults:
    files: {/root/.ssh/authorized_keys: {content: "KEY", mode: "0600"}}
  nodes:
    h1: {kind: host, interfaces: {eth0: {addresses: [10.1.0.2/24]}}, management: {ports: ["22901:22"]}}
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.1.0.1/24]}, eth1: {addresses: [10.2.0.1/24]}}
      dataPlane: {kind: kernel}
      management: {ports: ["22902:22"]}
    r2:
      kind: router
      interfaces: {eth0: {addresses: [10.2.0.2/24]}}
      dataPlane: {power: 0.2}
      management: {ports: ["22903:22"]}
  links: [{endpoints: ["h1:eth0", "r1:eth0"]}, {endpoints: ["r1:eth1", "r2:eth0"]}]
"#;

/// The spec's `commands: [/usr/sbin/sshd -D]` suffices for Ansible and similar tools.
#[test]
fn hosts_and_routers_are_reached_by_ssh() {
    if !has("/usr/sbin/sshd") {
        return;
    }
    let node = TestNode::start("ssh");
    let machine = node.namespace();
    let key = node.directory.join("key");
    machine.run(&format!("ssh-keygen -q -t ed25519 -N '' -f {}", key.display()));
    let public = std::fs::read_to_string(key.with_extension("pub")).expect("a key");
    node.apply(SUBSTRATE);
    node.apply(&SSH.replace("KEY", &format!("{}\\n", public.trim())));
    let ssh = |port: u32, line: &str| {
        machine.try_run(&format!(
            "timeout 20 ssh -p {port} -i {} -o BatchMode=yes -o StrictHostKeyChecking=no -o LogLevel=ERROR \
             -o UserKnownHostsFile=/dev/null root@127.0.0.1 {line}",
            key.display()
        ))
    };
    for (port, name) in [(22901, "h1"), (22902, "r1"), (22903, "r2")] {
        let mut output = Ok(String::new());
        eventually("a login", || {
            output = ssh(port, "hostname");
            output.is_ok()
        });
        assert_eq!(output, Ok(format!("{name}\n")));
    }
}

const HTTPS: &str = r#"
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: web}
spec:
  nodes:
    www:
      kind: host
      interfaces: {eth0: {addresses: [10.1.0.2/24]}}
      commands:
        - run: >-
            sh -c "cd /tmp && openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -days 1 -subj /CN=www
            -addext subjectAltName=DNS:www && exec openssl s_server -accept 443 -key key -cert cert -www"
          user: root
    pc: {kind: host, interfaces: {eth0: {addresses: [10.1.0.3/24]}}}
  links: [{endpoints: ["www:eth0", "pc:eth0"]}]
"#;

#[test]
fn https_is_checked_against_known_authorities() {
    let node = TestNode::start("https");
    node.apply(SUBSTRATE);
    node.apply(HTTPS);
    eventually("a page", || node.try_exec("web/pc", "curl -sSk -m 5 https://www/").is_ok());
    // The certificate is unknown; 77 would mean that there are no certificates.
    let refused = node.try_exec("web/pc", "curl -sS -m 5 https://www/");
    assert!(refused.as_ref().is_err_and(|error| error.contains("curl: (60)")), "{refused:?}");
    let known = node.exec("web/www", "cat /tmp/cert");
    let script = format!(
        "echo '{known}' > /tmp/ca; curl -sS -m 5 --cacert /tmp/ca -o /dev/null -w '%{{http_code}}' https://www/"
    );
    assert_eq!(node.pdp(&["exec", "web/pc", "--", "sh", "-c", &script]), "200");
}
