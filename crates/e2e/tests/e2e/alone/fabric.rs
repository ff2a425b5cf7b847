//! The unchanged fabric of examples/fabric.yaml: 50
//! routers, 40 hosts and 440 links on this machine.

use pdp_e2e::{TestNode, all_answered, alone, eventually};

use crate::beside::examples::{Shell, commands};

#[test]
fn fabric_of_fifty_routers_uses_all_paths() {
    let _alone = alone();
    let node = TestNode::start("fabric");
    let shell = Shell::new(&node);
    let commands = commands("examples/fabric.yaml");
    let [_up, ping, routes] = &commands.iter().map(|line| shell.run(line)).collect::<Vec<_>>()[..]
    else {
        panic!("{commands:?}")
    };
    assert!(all_answered(ping, 3), "{ping}");
    assert!(ping.contains("ttl=61"), "leaf, spine and leaf: {ping}");
    assert!(routes.contains("nexthop via 10."), "{routes}");
    eventually("all ten spines, in kernel and forwarding guest", || {
        let kernel = node.exec("fabric/leaf1", "ip route show 172.16.40.0/24");
        let guest = ["routes", "fabric/leaf1", "--guest", "0", "--within", "172.16.40.0/24"];
        let guest = node.pdp(&guest);
        (1..=10)
            .map(|n| format!("10.{n}.1.0"))
            .all(|hop| kernel.contains(&hop) && guest.contains(&hop))
    });
    let vnets = node.json(&["get"]);
    assert_eq!(vnets[0]["ready"], true, "{vnets}");
}
