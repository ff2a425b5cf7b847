//! A kernel's routes read anew.

mod common;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::thread;

use common::Netns;
use ipnet::IpNet;
use pdp_mirror::listing::Listing;
use pdp_proto::routes::{GroupHop, ResolvedRoute};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const KEPT_MAX: usize = 1000;

/// All routes of a namespace, or why not.
fn listed(netns: &Netns) -> Result<BTreeMap<IpNet, ResolvedRoute>, String> {
    let place = File::open(format!("/run/netns/{}", netns.name)).unwrap();
    let list = move || {
        move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&place),
            Some(LinkNameSpaceType::Network),
        )
        .unwrap();
        let mut listing = Listing::new(vec!["e0".into(), "e1".into()], KEPT_MAX);
        let mut routes = BTreeMap::new();
        while let Some(part) = listing.part()? {
            for (prefix, target) in part {
                assert_eq!(routes.insert(prefix, target), None, "{prefix} once");
            }
        }
        Ok(routes)
    };
    thread::spawn(list).join().unwrap()
}

fn hop(vport: u16, gateway: &str, weight: u16) -> GroupHop {
    GroupHop { vport, gateway: Some(gateway.parse().unwrap()), weight }
}

#[test]
fn lists_each_kernel_route_once() {
    let netns = Netns::new(3);
    netns.ip("route add 10.1.0.0/16 nexthop via 172.16.0.2 weight 3 nexthop via 172.16.1.2");
    netns.ip("-6 route add 2001:db8::/32 nexthop via fd00:0::2 nexthop via fd00:1::2");
    netns.ip("nexthop add id 7 via 172.16.1.3 dev e1");
    netns.ip("route add 10.2.0.0/16 nhid 7");
    netns.ip("route add 10.3.0.0/16 via 172.16.2.2");
    netns.ip("route add blackhole 10.4.0.0/16");
    netns.ip("route add 10.5.0.0/16 via 172.16.0.3 metric 9");
    netns.ip("route add 10.5.0.0/16 via 172.16.1.3 metric 5");
    netns.ip("-6 route add local 2001:db8:9::/48 dev lo");
    let link = |vport| ResolvedRoute::Hops(vec![GroupHop { vport, gateway: None, weight: 1 }]);
    let expected: BTreeMap<IpNet, ResolvedRoute> = [
        ("172.16.0.0/24", link(0)),
        ("172.16.1.0/24", link(1)),
        ("172.16.2.0/24", ResolvedRoute::Punt),
        ("fd00:0::/64", link(0)),
        ("fd00:1::/64", link(1)),
        ("fd00:2::/64", ResolvedRoute::Punt),
        (
            "10.1.0.0/16",
            ResolvedRoute::Hops(vec![hop(0, "172.16.0.2", 3), hop(1, "172.16.1.2", 1)]),
        ),
        ("2001:db8::/32", ResolvedRoute::Hops(vec![hop(0, "fd00::2", 1), hop(1, "fd00:1::2", 1)])),
        ("10.2.0.0/16", ResolvedRoute::Hops(vec![hop(1, "172.16.1.3", 1)])),
        ("10.3.0.0/16", ResolvedRoute::Punt),
        ("10.4.0.0/16", ResolvedRoute::Drop),
        ("10.5.0.0/16", ResolvedRoute::Hops(vec![hop(1, "172.16.1.3", 1)])),
        ("2001:db8:9::/48", ResolvedRoute::Punt),
    ]
    .map(|(prefix, target)| (prefix.parse().unwrap(), target))
    .into();
    assert_eq!(listed(&netns).unwrap(), expected);
}

#[test]
fn listing_many_routes_needs_little_state() {
    let netns = Netns::new(2);
    let mut lines = String::new();
    for n in 0..4 * KEPT_MAX {
        writeln!(lines, "route add 10.{}.{}.0/24 via 172.16.0.2", n / 256, n % 256).unwrap();
    }
    netns.batch(&lines);
    assert!(listed(&netns).unwrap().len() > 4 * KEPT_MAX);
}

#[test]
fn route_listing_state_is_bounded() {
    let kinds: [fn(usize) -> String; 4] = [
        |n| format!("route add local 10.{}.{}.0/24 dev lo", n / 256, n % 256),
        |n| format!("nexthop add id {} via 172.16.0.2 dev e0", n + 1),
        |n| format!("route add 10.0.0.0/8 via 172.16.0.2 metric {n}"),
        |n| format!("route add 2001:db8::/32 from 2001:db8:{n:x}::/48 via fd00:0::2"),
    ];
    for line in kinds {
        let netns = Netns::new(2);
        assert!(listed(&netns).is_ok());
        let lines: Vec<String> = (0..KEPT_MAX).map(line).collect();
        netns.batch(&lines.join("\n"));
        let why = listed(&netns).unwrap_err();
        assert!(why.contains("more than 1000"), "{}: {why}", line(0));
    }
}
