//! Smallest MTU of a namespace's routes, and confirmation of
//! neighbours in use, with the real kernel. Needs root.

mod live;

use live::{Netns, eventually, isolated};
use pdp_net::ports::NO_MTU;
use pdp_net::route_mtu::RouteMtu;

#[test]
fn tracks_the_smallest_route_mtu() {
    isolated(|| {
        let netns = Netns::new();
        netns.run("ip link add a0 type veth peer name b0; ip link set a0 up; ip link set b0 up");
        // More than one poll reads.
        let routes = "for a in $(seq 0 79); do for b in $(seq 0 249); do \
                      echo route add 172.$a.$b.0/24 dev a0; done; done; \
                      echo route add 192.0.2.0/24 dev a0 mtu 1300; \
                      echo route add 2001:db8:1::/48 dev a0 mtu 1400";
        netns.run(&format!("( {routes} ) | ip -batch -"));
        let mut watch = RouteMtu::open(netns.fd()).unwrap();
        assert_eq!(watch.poll().unwrap(), None, "not all are known at once");
        eventually("all are known", || watch.poll().unwrap() == Some([1300, 1400]));
        netns.run("ip route add 192.0.3.0/24 dev a0 mtu 1200");
        assert_eq!(watch.poll().unwrap(), Some([1200, 1400]), "from the next look on");
        netns.run("ip route del 192.0.3.0/24; ip -6 route del 2001:db8:1::/48");
        // The smaller MTU may stay in force for a while.
        assert_eq!(watch.poll().unwrap(), Some([1200, 1400]));
        let mut anew = RouteMtu::open(netns.fd()).unwrap();
        eventually("those that went are forgotten", || {
            anew.poll().unwrap() == Some([1300, NO_MTU])
        });
        // More changes than its queue can keep.
        netns.run("ip route flush 172.0.0.0/8; ip route flush root 172.0.0.0/8");
        assert_eq!(anew.poll().unwrap(), None, "it does not know what it missed");
        assert_eq!(anew.poll().unwrap(), None, "it rests");
    });
}

#[test]
fn used_neighbours_are_probed() {
    isolated(|| {
        let netns = Netns::new();
        netns.run(
            "ip link add a0 type veth peer name b0; ip link set a0 up; ip link set b0 up
             ip addr add 10.0.0.1/8 dev a0; ip addr add 2001:db8::1/64 dev a0 nodad
             for it in 10.0.0.2 10.0.0.3 2001:db8::2; do
                 ip neigh add $it lladdr 02:00:00:00:00:09 dev a0 nud stale
             done",
        );
        let watch = RouteMtu::open(netns.fd()).unwrap();
        let index = netns.index("a0");
        let used = ["10.0.0.2", "2001:db8::2", "10.0.0.77"].map(|it| (index, it.parse().unwrap()));
        watch.confirm(used);
        let of = |address: &str| netns.run(&format!("ip neigh show {address} dev a0"));
        for address in ["10.0.0.2", "2001:db8::2"] {
            assert!(of(address).contains("DELAY"), "{}", of(address));
        }
        assert!(of("10.0.0.3").contains("STALE"), "{}", of("10.0.0.3"));
        assert_eq!(of("10.0.0.77"), "", "none is made");
    });
}
