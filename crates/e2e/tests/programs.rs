//! Programs of others as data planes: one that speaks memif, one on TAPs, one on the runtime that
//! is not IP.

use std::fs;
use std::path::Path;
use std::process::Command;

use pdp_e2e::{Background, Node, bin, eventually, sh};

const SUBSTRATE: &str = r#"
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: "0", power: 0.5}
  forwardingEngines:
    fe1: {cpus: "1", capacity: 1}
"#;

/// Two hosts in one subnet, joined by a router whose program passes frames between two ports.
fn vnet(data_plane: &str) -> String {
    format!(
        r#"{SUBSTRATE}---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: red}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{}}, eth1: {{}}}}
      dataPlane:
{data_plane}
    h1: {{kind: host, interfaces: {{eth0: {{addresses: [10.0.0.1/24]}}}}}}
    h2: {{kind: host, interfaces: {{eth0: {{addresses: [10.0.0.2/24]}}}}}}
  links:
    - endpoints: ["r1:eth0", "h1:eth0"]
    - endpoints: ["r1:eth1", "h2:eth0"]
"#
    )
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("        {line}\n")).collect()
}

/// Pings of several sizes; ping checks the payload of the answers.
fn hosts_talk(node: &Node) {
    eventually("h1 reaches h2", || node.try_exec("red/h1", "ping -c1 -W1 10.0.0.2").is_ok());
    for bytes in [0, 56, 1472] {
        let line = format!("ping -c5 -i0.1 -W5 -p a55a -s {bytes} 10.0.0.2");
        let words = node.exec("red/h1", &line);
        assert!(words.contains(" 0% packet loss") && !words.contains("wrong"), "{words}");
    }
    let stats = node.json(&["stats", "red"]);
    let r1 = &stats["vnets"]["red"]["nodes"]["r1"];
    let count = |name: &str| r1["guests"]["0"][name].as_u64().expect("a counter");
    assert!(count("toGuest") >= 30 && count("fromGuest") >= 30, "{r1}");
}

#[test]
fn testpmd_of_debian_is_a_data_plane() {
    let node = Node::start("memif");
    node.apply(&vnet(&indented(
        r#"power: 0.5
memory: 600Mi
processes: 64
program:
  attach: memif
  run: >-
    dpdk-testpmd --no-huge --no-shconf --no-pci --no-telemetry -m 256 --lcores 0@{cpus},1@{cpus}
    --vdev=net_memif0,role=client,id=0,socket=/run/pdp/memif/memif.sock,socket-abstract=no
    --vdev=net_memif1,role=client,id=1,socket=/run/pdp/memif/memif.sock,socket-abstract=no
    -- --forward-mode=io --total-num-mbufs=8192 --no-mlockall --no-flush-rx --auto-start
    --stats-period=3600"#,
    )));
    hosts_talk(&node);
    let line = "grep -c Cap.*0000000000000000 /proc/self/status";
    let found = node.pdp(&["exec", "red/r1", "--guest", "0", "--", "sh", "-c", line]);
    assert_eq!(found.trim(), "5", "CapInh, CapPrm, CapEff, CapBnd and CapAmb are empty");
}

#[test]
fn a_program_on_taps_is_a_data_plane() {
    let node = Node::start("taps");
    node.apply(&vnet(&indented(
        r#"power: 0.3
program:
  attach: tap
  run:
    - python3
    - -c
    - |
      import select, socket
      ends = []
      for name in ("eth0", "eth1"):
          end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
          end.bind((name, 3))
          end.setsockopt(263, 1, __import__("struct").pack("iHH8s", socket.if_nametoindex(name), 1, 0, b""))
          ends.append(end)
      while True:
          for end in select.select(ends, [], [])[0]:
              frame, address = end.recvfrom(2048)
              if address[2] != 4:  # PACKET_OUTGOING
                  ends[1 - ends.index(end)].send(frame)"#,
    )));
    hosts_talk(&node);
}

/// Puts a program and the libraries that it needs into a directory that can be a guest's root.
fn make_root(root: &Path, program: &str) {
    let target = root.join("opt/pdp");
    fs::create_dir_all(&target).expect("root of the guest");
    for directory in ["proc", "dev", "sys", "run", "tmp", "etc"] {
        fs::create_dir_all(root.join(directory)).expect("root of the guest");
    }
    fs::copy(bin(program), target.join(program)).expect("program");
    for word in sh(&format!("ldd {}", bin(program).display())).split_whitespace() {
        if let Some(path) = word.strip_prefix('/') {
            let to = root.join(path);
            fs::create_dir_all(to.parent().expect("a directory")).expect("root of the guest");
            fs::copy(word, to).expect("library");
        }
    }
}

#[test]
fn a_network_that_is_not_ip() {
    let node = Node::start("label");
    let root = node.directory.join("root");
    make_root(&root, "pdp-label");
    node.apply(&vnet(&indented(&format!(
        "power: 0.1\nprogram:\n  attach: runtime\n  run: [/opt/pdp/pdp-label]\n  image: {{rootfs: {}}}",
        root.display()
    ))));
    let receive = "import socket\n\
        s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88b5))\n\
        s.bind((\"eth0\", 0x88b5)); s.settimeout(50)\n\
        print(s.recv(2000)[14:])";
    let mut station: Command =
        node.pdp_command(&["exec", "red/h2", "--", "python3", "-c", receive]);
    let station = Background::start(&mut station);
    let send = "import socket, time\n\
        s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind((\"eth0\", 0x88b5))\n\
        for _ in range(100):\n    \
            s.send(bytes(12) + bytes.fromhex(\"88b50007000310\") + b\"hello\"); time.sleep(0.05)";
    node.pdp(&["exec", "red/h1", "--", "python3", "-c", send]);
    let heard = station.finish();
    assert!(heard.contains(r"\x00\x07\x00\x03\x0fhello"), "one hop was taken off: {heard}");
}
