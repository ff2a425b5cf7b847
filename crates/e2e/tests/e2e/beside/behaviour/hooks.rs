//! Hooks into the kernel's forwarding: the router leaves
//! such packets to the kernel (`kernelHooks: strict`).

use super::case::{Case, v4, v6};

pub fn cases() -> Vec<Case> {
    [rules(), filters(), settings()].into_iter().flatten().collect()
}

fn rules() -> Vec<Case> {
    let by_eth3 = "ip route add default via 10.3.0.7 table 100";
    let gone = "ip route flush table 100";
    vec![
        v4("ip rule by source to another table", |_, _| {})
            .v4(|p, host| {
                p.link.enter(host, 3);
                p.from("10.3.0.77").done();
            })
            .setup(by_eth3)
            .setup("ip rule add from 10.0.0.0/16 to 10.1.0.0/16 lookup 100 pref 7")
            .undo("ip rule del pref 7")
            .undo(gone),
        v4("ip rule by interface", |_, _| {})
            .v4(|p, host| {
                p.link.enter(host, 3);
                p.from("10.3.0.77").done();
            })
            .setup("ip rule add iif eth0 prohibit pref 7")
            .undo("ip rule del pref 7"),
        v6("ip rule by destination to another table", |_, _| {})
            .v4(|_, _| {})
            .setup("ip -6 route add default via fd00:3::7 table 100")
            .setup("ip -6 rule add to fd00:1::/64 lookup 100 pref 7")
            .undo("ip -6 rule del pref 7; ip -6 route flush table 100"),
        v4("ip rule that suppresses the default route", |p, _| p.to("203.0.113.5").done())
            .v4(|_, _| {})
            .setup(by_eth3)
            .setup("ip rule add lookup main suppress_prefixlength 0 pref 7")
            .setup("ip rule add lookup 100 pref 8")
            .undo("ip rule del pref 7; ip rule del pref 8")
            .undo(gone),
        v4("ip rule that no packet meets", |_, _| {})
            .setup(by_eth3)
            .setup("ip rule add fwmark 9 lookup 100 pref 7")
            .undo("ip rule del pref 7")
            .undo(gone),
        v4("VRF with eth0 and eth3", |_, _| {})
            .v4(|p, _| p.to("10.3.0.9").done())
            .needs("ip link add v type vrf table 10; ip link del v")
            .setup("ip link add v type vrf table 10; ip link set v up")
            .setup("ip link set eth0 master v; ip link set eth3 master v")
            .undo("ip link del v")
            .dead(&[0, 3]),
    ]
}

fn filters() -> Vec<Case> {
    let base = |hook: &str, kind: &str| {
        format!(
            "nft 'add table inet t; add chain inet t c {{ type {kind} hook {hook} priority 0; }}'"
        )
    };
    let gone = "nft delete table inet t";
    vec![
        v4("nft drop in forward", |_, _| {})
            .v6(|_, _| {})
            .v4(|p, _| p.to("10.3.0.9").done())
            .setup(&base("forward", "filter"))
            .setup("nft add rule inet t c oifname eth1 drop")
            .undo(gone),
        v4("nft masquerade", |_, _| {})
            .setup(&base("postrouting", "nat"))
            .setup("nft add rule inet t c oifname eth1 masquerade")
            .undo(gone),
        v6("nft sets the hop limit", |_, _| {})
            .setup(&base("prerouting", "filter"))
            .setup("nft add rule inet t c ip6 hoplimit set 9")
            .undo(gone),
        v4("nft drop at the ingress of eth0", |_, _| {})
            .v6(|_, _| {})
            .setup(
                "nft 'add table netdev t; add chain netdev t c \
                 { type filter hook ingress device eth0 priority 0; }'",
            )
            .setup("nft add rule netdev t c ip daddr 10.1.0.9 drop")
            .undo("nft delete table netdev t"),
        v4("tc at the egress of eth1", |_, _| {})
            .v6(|_, _| {})
            .setup("tc qdisc add dev eth1 root pfifo")
            .undo("tc qdisc del dev eth1 root"),
        v4("tc drops at the ingress of eth0", |_, _| {})
            .needs("tc qdisc add dev lo clsact && tc filter add dev lo ingress matchall action drop && tc qdisc del dev lo clsact")
            .setup("tc qdisc add dev eth0 clsact; tc filter add dev eth0 ingress matchall action drop")
            .undo("tc qdisc del dev eth0 clsact")
            .dead(&[0]),
    ]
}

fn settings() -> Vec<Case> {
    let set = |name: &str, value: u8| format!("echo {value} >/proc/sys/net/ipv4/{name}");
    vec![
        v4("rp_filter 1, source by another way", |p, _| p.from("10.3.0.77").done())
            .v4(|_, _| {})
            .setup(&set("conf/eth0/rp_filter", 1))
            .undo(&set("conf/eth0/rp_filter", 0)),
        v4("send_redirects 1, out of where it came from", |p, _| p.to("10.0.7.7").done())
            .setup(&set("conf/eth0/send_redirects", 1))
            .undo(&set("conf/eth0/send_redirects", 0)),
        v6("out of where it came from, with a redirect", |p, _| p.to("fd00::777").done()),
        v4("hash policy 0: multipath", |p, _| p.to("203.0.113.5").done())
            .v4(|p, _| p.to("203.0.113.6").done())
            .setup(&set("fib_multipath_hash_policy", 0))
            .setup("ip route add 203.0.113.0/24 nexthop via 10.1.0.7 nexthop via 10.3.0.7")
            .undo(&set("fib_multipath_hash_policy", 1))
            .same_ways(),
    ]
}
