//! Real routing software writes the kernel's table and is restarted, and the guests follow.

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::guest::Guest;
use common::reference::equal;
use common::{Mirror, Netns, Process, eventually};
use pdp_proto::mirror::TableSource;
use pdp_proto::routes::ResolvedRoute;

/// Real prefixes from a full table of the Internet (see data/README.md).
fn prefixes(family: &str, count: usize) -> Vec<String> {
    let path =
        format!("{}/../../data/internet-2022-10-29.{family}.txt.xz", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("xzcat").arg(&path).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let first = |line: &str| line.split_whitespace().next().map(str::to_string);
    let all: Vec<String> = text.lines().filter_map(first).collect();
    let step = (all.len() / count).max(1);
    all.into_iter().step_by(step).take(count).collect()
}

/// Returns BIRD's configuration with static routes over four vports, some over two of them.
fn bird_config(v4: &[String], v6: &[String], shift: usize) -> String {
    let mut text = String::from(
        "router id 1.1.1.1;\nprotocol device {}\n\
         protocol kernel { persist; merge paths on limit 8; ipv4 { export all; }; }\n\
         protocol kernel { persist; merge paths on limit 8; ipv6 { export all; }; }\n",
    );
    for (name, prefixes) in [("ipv4", v4), ("ipv6", v6)] {
        text += &format!("protocol static {{ {name};\n");
        for (i, prefix) in prefixes.iter().enumerate() {
            let via = |vport: usize| match name {
                "ipv4" => format!("via 172.16.{}.2", vport % 4),
                _ => format!("via fd00:{}::2", vport % 4),
            };
            let vport = (i + shift) % 4;
            let other = if i % 10 == 0 { via(vport + 1) } else { String::new() };
            text += &format!("route {prefix} {} {other};\n", via(vport));
        }
        text += "}\n";
    }
    text
}

fn bird(netns: &Netns, directory: &Path) -> Process {
    let path = |name: &str| directory.join(name);
    let mut command = netns.command("bird");
    command.arg("-f").arg("-c").arg(path("bird.conf")).arg("-s").arg(path("bird.ctl"));
    command.arg("-P").arg(path("bird.pid")).stdout(Stdio::null()).stderr(Stdio::null());
    Process(command.spawn().unwrap())
}

fn birdc(directory: &Path, words: &[&str]) {
    let socket = directory.join("bird.ctl");
    let output = Command::new("birdc").arg("-s").arg(socket).args(words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn connect(mirror: &Mirror) -> Guest {
    let guest = Guest::connect(&mirror.config.routes_socket, 0);
    eventually("a snapshot", || guest.snapshots() == 1);
    guest
}

fn count(guest: &Guest) -> usize {
    guest.shared.lock().unwrap().state.routes.len()
}

#[test]
fn bird_writes_a_hundred_thousand_routes() {
    let netns = Netns::new(4);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror);
    let own = count(&guest);
    let (v4, v6) = (prefixes("v4", 90_000), prefixes("v6", 20_000));
    let directory = tempfile::tempdir().unwrap();
    let write = |shift| {
        std::fs::write(directory.path().join("bird.conf"), bird_config(&v4, &v6, shift)).unwrap();
    };
    write(0);
    let first = bird(&netns, directory.path());
    let all = v4.len() + v6.len() + own;
    eventually("all routes", || count(&guest) == all);
    equal(&netns, &guest);
    let multipath = guest.state().resolved().into_values();
    let multipath = multipath.filter(|r| matches!(r, ResolvedRoute::Hops(hops) if hops.len() == 2));
    assert_eq!(multipath.count(), v4.len() / 10 + v6.len() / 10);
    assert!(guest.state().groups.len() < 30, "equal hops are not shared");

    write(1);
    birdc(directory.path(), &["configure"]);
    let moved = |guest: &Guest| {
        let state = guest.state();
        state.routes.get(&v4[1].parse().unwrap()).map(|target| state.resolve(*target))
    };
    let hop = |vport: u16| pdp_proto::routes::GroupHop {
        vport,
        gateway: Some(format!("172.16.{vport}.2").parse().unwrap()),
        weight: 1,
    };
    eventually("another vport", || moved(&guest) == Some(ResolvedRoute::Hops(vec![hop(2)])));
    equal(&netns, &guest);

    // After a kill, BIRD's routes stay; the next BIRD takes them over.
    let gone = guest.shared.lock().unwrap().routes_gone;
    first.signal("-KILL");
    drop(first);
    let _second = bird(&netns, directory.path());
    eventually("the second answers", || {
        let socket = directory.path().join("bird.ctl");
        let output = Command::new("birdc").arg("-s").arg(socket).arg("show status").output();
        output.is_ok_and(|output| output.status.success())
    });
    equal(&netns, &guest);
    assert_eq!(count(&guest), all);
    assert_eq!(guest.shared.lock().unwrap().routes_gone, gone, "a route went meanwhile");
    assert_eq!(mirror.routes(TableSource::Diff(0), None).unwrap(), []);
}

/// Starts zebra or another daemon of FRR, in the foreground.
fn frr(netns: &Netns, directory: &Path, daemon: &str, config: &str) -> Process {
    let path = |name: String| directory.join(name);
    std::fs::write(path(format!("{daemon}.conf")), config).unwrap();
    common::run("chown", &["-R", "frr:frr", directory.to_str().unwrap()]);
    let mut command = netns.command(&format!("/usr/lib/frr/{daemon}"));
    command.args(["-u", "frr", "-g", "frr", "--log", "stdout", "-f"]);
    command.arg(path(format!("{daemon}.conf"))).arg("-i").arg(path(format!("{daemon}.pid")));
    command.arg("-z").arg(path("zserv.api".into())).arg("--vty_socket").arg(directory);
    if daemon == "zebra" {
        command.args(["-K", "60"]);
    }
    Process(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

#[test]
fn frr_writes_nexthop_objects() {
    let netns = Netns::new(3);
    let mirror = Mirror::new(&netns);
    let guest = connect(&mirror);
    let directory = tempfile::tempdir().unwrap();
    let mut config = String::from("log stdout\n");
    // staticd's time to read them grows with the square of their number.
    for i in 0..150 {
        let vport = i % 3;
        config += &format!("ip route 20.{}.{}.0/24 172.16.{vport}.2\n", i / 100, i % 100);
        config += &format!("ipv6 route 2001:db8:{i:x}::/48 fd00:{vport}::2\n");
    }
    config += "ip route 30.0.0.0/8 172.16.0.2\nip route 30.0.0.0/8 172.16.1.2\n";
    config += "ip route 30.0.0.0/8 172.16.2.2\nip route 31.0.0.0/8 blackhole\n";
    config += "ip route 32.0.0.0/8 reject\n";
    let zebra = frr(&netns, directory.path(), "zebra", "log stdout\n");
    eventually("zebra listens", || directory.path().join("zserv.api").exists());
    let staticd = frr(&netns, directory.path(), "staticd", &config);
    let own = 6;
    eventually("all routes", || count(&guest) == 303 + own);
    equal(&netns, &guest);
    assert!(netns.ip("route show 30.0.0.0/8").contains("nhid"), "no nexthop objects");
    let state = guest.state();
    let three = state.routes.get(&"30.0.0.0/8".parse().unwrap()).map(|t| state.resolve(*t));
    assert!(matches!(three, Some(ResolvedRoute::Hops(hops)) if hops.len() == 3));

    // One link goes down and comes back.
    netns.ip("link set x1 down");
    equal(&netns, &guest);
    netns.ip("link set x1 up");
    eventually("all routes", || count(&guest) == 303 + own);
    equal(&netns, &guest);

    // After a kill, both daemons' routes stay; the next ones take them over.
    let gone = guest.shared.lock().unwrap().routes_gone;
    for process in [zebra, staticd] {
        process.signal("-KILL");
    }
    std::fs::remove_file(directory.path().join("zserv.api")).unwrap();
    let _zebra = frr(&netns, directory.path(), "zebra", "log stdout\n");
    eventually("zebra listens", || directory.path().join("zserv.api").exists());
    let _staticd = frr(&netns, directory.path(), "staticd", &config);
    netns.ip("route add 40.0.0.0/8 via 172.16.0.2");
    eventually("the last route", || count(&guest) == 304 + own);
    equal(&netns, &guest);
    assert_eq!(guest.shared.lock().unwrap().routes_gone, gone, "a route went meanwhile");
    assert_eq!(mirror.routes(TableSource::Diff(0), None).unwrap(), []);
}

#[test]
fn frr_learns_by_ospf() {
    let (here, peer) = (Netns::new(1), Netns::new(1));
    here.ip("link set x0 down");
    here.ip("link del e0");
    peer.ip("link del e0");
    here.ip(&format!("link add e0 type veth peer name e0 netns {}", peer.name));
    for (netns, host) in [(&here, 1), (&peer, 2)] {
        netns.ip("link set e0 up");
        netns.ip(&format!("addr add 172.16.0.{host}/24 dev e0"));
    }
    for i in 0..100 {
        peer.ip(&format!("addr add 20.0.{i}.1/24 dev lo"));
    }
    let mirror = Mirror::new(&here);
    let guest = connect(&mirror);
    let mut daemons = Vec::new();
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for (netns, directory) in [&here, &peer].into_iter().zip(&directories) {
        daemons.push(frr(netns, directory.path(), "zebra", "log stdout\n"));
        eventually("zebra listens", || directory.path().join("zserv.api").exists());
        let config = "interface e0\n ip ospf hello-interval 1\n ip ospf dead-interval 3\n\
                      router ospf\n network 0.0.0.0/0 area 0\n";
        daemons.push(frr(netns, directory.path(), "ospfd", config));
    }
    eventually("routes by OSPF", || count(&guest) >= 100);
    equal(&here, &guest);
    peer.ip("addr del 20.0.7.1/24 dev lo");
    let prefix = "20.0.7.0/24".parse().unwrap();
    eventually("one less", || !guest.state().routes.contains_key(&prefix));
    equal(&here, &guest);
}
