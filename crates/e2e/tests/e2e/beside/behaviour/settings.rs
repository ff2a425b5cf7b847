//! Settings and devices of the control guest.

use super::case::{Case, case, v4, v6};
use super::frames::{ECHO, ECHO_V6, ICMP, ICMPV6, Mac, echo};

/// VRRP's MAC address (RFC 9568 7.3), as used by FRR's vrrpd.
const VIRTUAL: Mac = [0, 0, 0x5e, 0, 1, 5];
const MACVLAN: &str = "
    ip link add vrrp4 link eth0 type macvlan mode bridge
    ip link set vrrp4 addrgenmode none address 00:00:5e:00:01:05
    ip addr add 10.0.0.254/16 dev vrrp4 noprefixroute
    ip link set vrrp4 up";
const NO_MACVLAN: &str = "ip link del vrrp4";

pub fn cases() -> Vec<Case> {
    [forwarding(), virtual_macs(), others(), devices()].into_iter().flatten().collect()
}

fn forwarding() -> Vec<Case> {
    let set = |name: &str, value: u8| format!("echo {value} >/proc/sys/net/ipv4/{name}");
    vec![
        v4("ip_forward 0", |_, _| {})
            .v6(|_, _| {})
            .setup(&set("ip_forward", 0))
            .undo(&set("ip_forward", 1)),
        v6("forwarding 0", |_, _| {})
            .v4(|_, _| {})
            .setup("echo 0 >/proc/sys/net/ipv6/conf/all/forwarding")
            .undo("echo 1 >/proc/sys/net/ipv6/conf/all/forwarding"),
        v4("forwarding of one interface 0", |_, _| {})
            .v4(|p, _| p.to("10.0.0.1").segment(ICMP, echo(ECHO, 1, 8)).done())
            .v4(|p, host| {
                p.link.enter(host, 3);
                p.from("10.3.0.77");
            })
            .v6(|_, _| {})
            .setup(&set("conf/eth0/forwarding", 0))
            .undo(&set("conf/eth0/forwarding", 1)),
        v4("forwarding of the other interface 0", |_, _| {})
            .setup(&set("conf/eth1/forwarding", 0))
            .undo(&set("conf/eth1/forwarding", 1)),
        v4("ip_forward 0, forwarding of one interface 1", |_, _| {})
            .v4(|p, host| {
                p.link.enter(host, 3);
                p.from("10.3.0.77");
            })
            .setup(&set("ip_forward", 0))
            .setup(&set("conf/eth0/forwarding", 1))
            .undo(&set("ip_forward", 1)),
        v6("forwarding of one interface 0", |_, _| {})
            .setup("echo 0 >/proc/sys/net/ipv6/conf/eth0/forwarding")
            .undo("echo 1 >/proc/sys/net/ipv6/conf/eth0/forwarding"),
    ]
}

fn virtual_macs() -> Vec<Case> {
    let to = |p: &mut super::frames::V4| p.link.to = VIRTUAL;
    let ping = |name: &str| {
        v4(name, move |p, _| {
            p.to("10.0.0.254").segment(ICMP, echo(ECHO, 1, 8));
            to(p);
        })
    };
    vec![
        ping("echo to a macvlan's address and MAC (as VRRP)").setup(MACVLAN).undo(NO_MACVLAN),
        v4("forwarded by way of a macvlan's MAC", move |p, _| to(p))
            .v6(|p, _| p.link.to = VIRTUAL)
            .setup(MACVLAN)
            .undo(NO_MACVLAN),
        v4("out of where it came from by way of a macvlan's MAC", move |p, _| to(p.to("10.0.7.7")))
            .setup(MACVLAN)
            .undo(NO_MACVLAN),
        v4("to a macvlan's MAC at another port", |p, host| {
            p.link.enter(host, 3);
            p.from("10.3.0.77").link.to = VIRTUAL;
        })
        .setup(MACVLAN)
        .undo(NO_MACVLAN),
        v4("to the MAC of a macvlan that is down", move |p, _| to(p))
            .setup(MACVLAN)
            .setup("ip link set vrrp4 down")
            .undo(NO_MACVLAN),
        v4("to the MAC of a macvlan that is gone", move |p, _| to(p))
            .setup(MACVLAN)
            .setup(NO_MACVLAN),
        v4("own traffic beside a macvlan", |_, _| {}).setup(MACVLAN).undo(NO_MACVLAN),
        case("ARP request for a macvlan's address")
            .frame(|host| (0, super::frames::ask(host, [10, 0, 0, 254].into())))
            .setup(MACVLAN)
            .undo(NO_MACVLAN),
        v4("TTL 1 to a macvlan's MAC", move |p, _| {
            p.ttl = 1;
            to(p);
        })
        .setup(MACVLAN)
        .undo(NO_MACVLAN),
    ]
}

fn others() -> Vec<Case> {
    vec![
        v4("MAC of an interface changed", |p, _| p.link.to = [2, 0xcc, 0, 0, 0, 1])
            .setup("ip link set eth0 address 02:cc:00:00:00:01")
            .undo("ip link set eth0 address MAC0")
            .dead(&[0]),
        v4("accept_local 1: from an address of the router", |p, _| p.from("10.1.0.1").done())
            .setup("echo 1 >/proc/sys/net/ipv4/conf/eth0/accept_local")
            .undo("echo 0 >/proc/sys/net/ipv4/conf/eth0/accept_local")
            .differs(ACCEPT_LOCAL, "eth1 udp", "nothing"),
        v4("source of an address on lo", |p, _| p.from("172.20.0.1").done())
            .setup("ip addr add 172.20.0.1/32 dev lo")
            .undo("ip addr del 172.20.0.1/32 dev lo"),
        v4("source of a second address", |p, _| p.from("10.3.0.2").done())
            .setup("ip addr add 10.3.0.2/16 dev eth3")
            .undo("ip addr del 10.3.0.2/16 dev eth3"),
        v4("source of an address that is gone", |p, _| p.from("10.3.0.2").done())
            .setup("ip addr add 10.3.0.2/16 dev eth3; ip addr del 10.3.0.2/16 dev eth3"),
        v4("source of a peer's address", |p, _| p.from("172.20.9.9").done())
            .setup("ip addr add 172.20.0.1 peer 172.20.9.9 dev eth1")
            .undo("ip addr del 172.20.0.1 peer 172.20.9.9 dev eth1"),
        v4("source of a local range", |p, _| p.from("203.0.113.77").done())
            .setup("ip route add local 203.0.113.0/24 dev lo")
            .undo("ip route del local 203.0.113.0/24 dev lo")
            .differs(LOCAL_SOURCE, "nothing", "eth1 udp"),
        v4("route_localnet 1", |p, _| p.to("127.5.5.5").done())
            .setup("echo 1 >/proc/sys/net/ipv4/conf/eth0/route_localnet")
            .undo("echo 0 >/proc/sys/net/ipv4/conf/eth0/route_localnet")
            .differs("`route_localnet`", "eth0 icmp 3/3", "nothing"),
        v4("bc_forwarding 1: directed broadcast", |p, _| p.to("10.1.255.255").done())
            .setup(
                "echo 1 >/proc/sys/net/ipv4/conf/all/bc_forwarding
                 echo 1 >/proc/sys/net/ipv4/conf/eth0/bc_forwarding",
            )
            .undo(
                "echo 0 >/proc/sys/net/ipv4/conf/all/bc_forwarding
                 echo 0 >/proc/sys/net/ipv4/conf/eth0/bc_forwarding",
            ),
        v6("disable_ipv6 of the interface that it comes by", |p, host| {
            // Another packet makes the neighbour known.
            p.link.enter(host, 3);
            p.from("fd00:3::77").segment(ICMPV6, echo(ECHO_V6, 1, 8)).done();
        })
        .then()
        .v6(|_, _| {})
        .setup("echo 1 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6")
        .undo(
            "echo 0 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6
             ip addr add fd00::1/64 dev eth0 nodad",
        )
        .differs(DISABLED, "eth1 icmp6 128/0", "eth1 icmp6 128/0, eth1 udp6"),
        v6("disable_ipv6 of the interface that it leaves by", |_, _| {})
            .setup("echo 1 >/proc/sys/net/ipv6/conf/eth1/disable_ipv6")
            .undo(
                "echo 0 >/proc/sys/net/ipv6/conf/eth1/disable_ipv6
                 ip addr add fd00:1::1/64 dev eth1 nodad",
            ),
        v4("an interface without ARP", |_, _| {})
            .setup("ip link set eth1 arp off")
            .undo(
                "ip link set eth1 arp on
                 ip neigh replace 10.1.255.250 lladdr 02:04:01:01:ff:fa dev eth1",
            )
            .dead(&[1]),
        v4("an interface whose addresses are gone", |_, _| {})
            .v4(|p, host| {
                p.link.enter(host, 1);
                p.from("10.1.0.9").to("10.3.0.9").done();
            })
            .setup("ip addr del 10.1.0.1/16 dev eth1")
            .undo("ip addr add 10.1.0.1/16 dev eth1")
            .dead(&[1]),
        v4("from 0.0.0.0 to all (DHCP)", |p, _| {
            p.from("0.0.0.0").to("255.255.255.255").link.to = [0xff; 6];
        }),
        v6("source is the router's other link-local address", |p, _| p.from("fe80::1:1").done())
            .setup("ip addr add fe80::1:1/64 dev eth0 nodad")
            .undo("ip addr del fe80::1:1/64 dev eth0"),
        v4("multicast, ttl 1", |p, _| {
            p.to("239.1.1.1").ttl = 1;
            p.link.to = [1, 0, 0x5e, 1, 1, 1];
        }),
        v4("multicast to an unknown group", |p, _| {
            p.to("239.1.1.1").link.to = [1, 0, 0x5e, 1, 1, 1];
        }),
        v6("multicast to an unknown group", |p, _| {
            p.to("ff0e::9").link.to = [0x33, 0x33, 0, 0, 0, 9];
        }),
        v6("SRv6 inline", |p, _| p.to("2001:db8:9::5").done()).setup(
            "ip -6 route add 2001:db8:e::/48 via fd00:1::7
             ip -6 route add 2001:db8:9::/48 encap seg6 mode inline segs 2001:db8:e::1 dev eth1",
        ),
        v6("SRv6 encapsulation", |p, _| p.to("2001:db8:9::5").done()).setup(
            "ip -6 route add 2001:db8:e::/48 via fd00:1::7
             ip -6 route add 2001:db8:9::/48 encap seg6 mode encap segs 2001:db8:e::1 dev eth1 || true",
        ),
        v4("an interface has another name", |_, _| {})
            .setup("ip link set eth1 down; ip link set eth1 name other; ip link set other up")
            .undo(
                "ip link set other down; ip link set other name eth1; ip link set eth1 up
                 ip addr add fd00:1::1/64 dev eth1 nodad 2>/dev/null || true
                 ip neigh replace 10.1.255.250 lladdr 02:04:01:01:ff:fa dev eth1",
            )
            .dead(&[1]),
    ]
}

/// Devices of the control guest on top of its ports. Not every kernel has them.
fn devices() -> Vec<Case> {
    let bridge = "ip link add br0 type bridge; ip link set br0 up
                  ip link set eth0 master br0; ip link set eth3 master br0";
    vec![
        v4("bridge of eth0 and eth3: between stations", |p, _| p.link.to = [2, 4, 3, 0, 0, 9])
            .setup(bridge)
            .undo("ip link del br0")
            .dead(&[0, 3]),
        v4("bridge over eth0 with its address", |_, _| {})
            .v4(|p, _| p.to("10.0.0.1").segment(ICMP, echo(ECHO, 1, 8)).done())
            .setup(
                "ip link add br0 address MAC0 type bridge; ip link set br0 up
                 ip link set eth0 master br0; ip addr del 10.0.0.1/16 dev eth0
                 ip addr add 10.0.0.1/16 dev br0",
            )
            .undo(
                "ip link del br0; ip addr add 10.0.0.1/16 dev eth0
                 ip neigh replace 10.0.255.250 lladdr 02:04:00:00:ff:fa dev eth0",
            )
            .dead(&[0]),
        v4("VLAN interface over eth0: tagged", |p, _| p.link.tags = vec![0x81, 0, 0, 5])
            .needs("ip link add link eth0 name v5 type vlan id 5; ip link del v5")
            .setup(
                "ip link add link eth0 name v5 type vlan id 5; ip link set v5 up
                 ip addr add 10.5.0.1/16 dev v5",
            )
            .undo("ip link del v5"),
        v4("route to a dummy interface", |p, _| p.to("203.0.113.5").done())
            .needs("ip link add d0 type dummy; ip link del d0")
            .setup(
                "ip link add d0 type dummy; ip link set d0 up
                 ip route add 203.0.113.0/24 dev d0",
            )
            .undo("ip link del d0"),
        v4("MPLS label is taken off", |p, _| {
            p.link.tags = vec![0x88, 0x47, 0, 6, 0x41, 64];
        })
        .needs("[ -e /proc/sys/net/mpls/platform_labels ]")
        .setup(
            "echo 1000 >/proc/sys/net/mpls/platform_labels
             echo 1 >/proc/sys/net/mpls/conf/eth0/input
             ip -f mpls route add 100 via inet 10.1.0.7",
        )
        .undo("ip -f mpls route del 100"),
    ]
}

const LOCAL_SOURCE: &str = "A range that is local by hand (`ip route add local`), as source";
const DISABLED: &str = "`net.ipv6.conf.NAME.disable_ipv6` of the interface that a packet comes by";
const ACCEPT_LOCAL: &str = "`accept_local`";
