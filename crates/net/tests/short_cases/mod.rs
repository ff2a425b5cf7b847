//! Random routers and frames.

use std::fmt::Write as _;

use pdp_wire::checksum::checksum;

pub const PORTS: usize = 4;

/// MAC address of a router's port.
pub fn mac_of(port: usize) -> [u8; 6] {
    [2, 0xaa, 0, 0, 0, port as u8]
}

/// SplitMix64 generator, and true if its frames are hostile rather than like those of hosts.
pub struct Random(pub u64, pub bool);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    /// Once in so many times.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// Something odd, once in so many times.
    pub fn odd(&mut self, times: usize) -> bool {
        self.1 && self.once_in(times)
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Configuration of both routers, as commands of ip(8) and of a shell.
#[derive(Default)]
pub struct Router {
    /// Lines of `ip -batch`.
    pub ip: String,
    pub undo_ip: String,
    /// A script, often none.
    pub shell: String,
    /// True if a command can't be undone.
    pub is_spoilt: bool,
    /// The smallest MTUs of routes.
    pub bytes_max: [u32; 2],
    v4: Vec<(u32, u32)>,
    v6: Vec<(u128, u32)>,
}

const V4_NET: u32 = 0xc612_0000; // 198.18.0.0/15
const V6_NET: u128 = 0x2001_0db8_0000_0000_0000_0000_0000_0000;

/// Configuration of all routers, applied once to each.
pub fn base() -> String {
    let mut lines = String::from("link set lo up\n");
    for port in 0..PORTS {
        let _ = writeln!(
            lines,
            "link set eth{port} up
             addr add 10.{port}.0.1/16 dev eth{port}
             -6 addr add fd00:{port}::1/64 dev eth{port} nodad
             -6 addr add fe80::{port}:1/64 dev eth{port} nodad"
        );
        for host in 2..12 {
            let _ = writeln!(
                lines,
                "neigh add 10.{port}.0.{host} lladdr 02:04:00:00:{port:02x}:{host:02x} dev eth{port} nud permanent
                 neigh add fd00:{port}::{host:x} lladdr 02:06:00:00:{port:02x}:{host:02x} dev eth{port} nud permanent"
            );
        }
        let _ = writeln!(
            lines,
            "neigh add fe80::77 lladdr 02:07:00:00:{port:02x}:77 dev eth{port} nud permanent
             neigh add 192.0.2.77 lladdr 02:08:00:00:{port:02x}:77 dev eth{port} nud permanent"
        );
    }
    lines
}

/// Settings of both, applied before there are interfaces. The kernel's time-based limits are off.
pub const SETTINGS: &str = "
    cd /proc/sys/net
    echo 0 > ipv6/conf/default/accept_dad; echo 1 > ipv6/conf/default/addr_gen_mode
    echo 0 > ipv6/conf/default/router_solicitations; echo 0 > ipv6/conf/default/mldv2_unsolicited_report_interval
    for it in all default; do echo 0 > ipv4/conf/$it/rp_filter; echo 0 > ipv4/conf/$it/send_redirects; done
    echo 1 > ipv4/ip_forward; echo 1 > ipv6/conf/all/forwarding; echo 1 > ipv6/conf/default/forwarding
    echo 0 > ipv4/icmp_ratelimit; echo 0 > ipv4/icmp_ratemask; echo 0 > ipv6/icmp/ratelimit
    echo 1 > ipv4/fib_multipath_hash_policy; echo 1 > ipv6/fib_multipath_hash_policy
    [ -e ipv4/icmp_msgs_per_sec ] && echo 1000000 > ipv4/icmp_msgs_per_sec
    [ -e ipv4/icmp_msgs_burst ] && echo 1000000 > ipv4/icmp_msgs_burst; true";

/// Settings of each interface once it exists. Frames that wait for a neighbour charge a socket that
/// all namespaces share, and that sends ICMP errors.
pub const INTERFACE_SETTINGS: &str = "
    for it in eth0 eth1 eth2 eth3; do
        echo 100000 > /proc/sys/net/ipv4/neigh/$it/retrans_time_ms
        echo 100000 > /proc/sys/net/ipv6/neigh/$it/retrans_time_ms
        echo 0 > /proc/sys/net/ipv4/neigh/$it/unres_qlen_bytes
        echo 0 > /proc/sys/net/ipv6/neigh/$it/unres_qlen_bytes
    done";

/// Undoes [`Router::ip`] and [`Router::shell`], except for
/// rules, MTUs, and commands that can't be undone.
pub const RESET: &str = "
    set +e
    ip route flush proto 99; ip -6 route flush proto 99; ip nexthop flush > /dev/null
    ip route flush table 100; ip -6 route flush table 100
    for it in eth0 eth1 eth2 eth3; do
        ip neigh flush dev $it nud incomplete; ip -6 neigh flush dev $it nud incomplete
    done
    echo 1 > /proc/sys/net/ipv4/fib_multipath_hash_policy
    echo 1 > /proc/sys/net/ipv6/fib_multipath_hash_policy";

impl Router {
    pub fn new(random: &mut Random) -> Self {
        let mut this = Self { bytes_max: [u32::MAX; 2], ..Self::default() };
        for (id, family) in [(1, 4), (2, 4), (3, 4), (4, 6), (5, 6)] {
            let port = random.below(PORTS);
            let host = 2 + random.below(10);
            let _ = match family {
                4 if random.once_in(8) => writeln!(this.ip, "nexthop add id {id} blackhole"),
                4 => writeln!(this.ip, "nexthop add id {id} via 10.{port}.0.{host} dev eth{port}"),
                _ => {
                    writeln!(this.ip, "nexthop add id {id} via fd00:{port}::{host:x} dev eth{port}")
                }
            };
        }
        let _ = writeln!(this.ip, "nexthop add id 10 group 1,{}/2", 1 + random.below(5));
        let _ = writeln!(this.ip, "nexthop add id 11 group 2/3\nnexthop add id 12 group 4/5");
        for _ in 0..4 + random.below(10) {
            this.route_v4(random);
            this.route_v6(random);
        }
        if !random.once_in(4) {
            this.ip += "route add default via 10.3.0.5 proto 99\n";
            this.ip += "-6 route add default via fd00:3::5 proto 99\n";
        }
        for _ in 0..random.below(3) {
            this.rule(random, false);
        }
        if random.once_in(3) {
            this.rule(random, true);
        }
        if random.once_in(2) {
            let (port, mtu) = (random.below(PORTS), random.of(&[1280, 1300, 1400]));
            let _ = writeln!(this.ip, "link set eth{port} mtu {mtu}");
            let _ = writeln!(this.undo_ip, "link set eth{port} mtu 1500");
        }
        if random.once_in(3) {
            let policy = random.below(4);
            for family in ["ipv4", "ipv6"] {
                let name = format!("/proc/sys/net/{family}/fib_multipath_hash_policy");
                let _ = writeln!(this.shell, "echo {policy} > {name}");
            }
        }
        if random.once_in(3) {
            this.hook(random);
        }
        this
    }

    /// Options of a route. A route whose next hop may be shared gets no MTU: the
    /// kernel caches a found route with the next hop and reuses it for others, so
    /// their MTU would depend on which packet came first.
    fn options(&mut self, random: &mut Random, family: usize, shared: bool) -> String {
        let mut options = String::new();
        if !shared && random.once_in(8) {
            let mtu = random.of(&[1280, 1290, 1350, 1450]);
            self.bytes_max[family] = self.bytes_max[family].min(mtu);
            let lock = random.of(&["", "lock "]);
            let _ = write!(options, " mtu {lock}{mtu}");
        }
        if random.once_in(6) {
            let _ = write!(options, " metric {}", 10 + random.below(3));
        }
        if random.once_in(12) {
            options += " table 100";
        }
        options
    }

    fn route_v4(&mut self, random: &mut Random) {
        let length = random.of(&[15, 18, 20, 24, 25, 30, 31, 32]);
        let near = !self.v4.is_empty() && random.once_in(2);
        let base =
            if near { random.of(&self.v4).0 } else { V4_NET | random.next() as u32 & 0x1_ffff };
        let prefix = base & (u32::MAX << (32 - length));
        self.v4.push((base, length));
        let (port, other) = (random.below(PORTS), random.below(PORTS));
        // Neighbours above 11 have no known MAC address.
        let unknown = random.once_in(8);
        let (host, host_2) =
            (if unknown { 12 } else { 2 + random.below(10) }, 2 + random.below(10));
        let kind = random.below(16);
        let options = self.options(random, 0, kind == 6);
        let tos = if random.once_in(12) { " tos 0x10" } else { "" };
        let to = match kind {
            0 => format!("blackhole {}/{length}{tos}", std::net::Ipv4Addr::from(prefix)),
            1 => format!("unreachable {}/{length}{tos}", std::net::Ipv4Addr::from(prefix)),
            2 => format!("prohibit {}/{length}{tos}", std::net::Ipv4Addr::from(prefix)),
            3 => format!("throw {}/{length}{tos}", std::net::Ipv4Addr::from(prefix)),
            kind => {
                let target = match kind {
                    4 | 5 => format!(
                        "nexthop via 10.{port}.0.{host} dev eth{port} weight {} \
                         nexthop via 10.{other}.0.{host_2} dev eth{other}",
                        1 + random.below(4)
                    ),
                    6 => format!("nhid {}", random.of(&[1, 2, 10, 11])),
                    7 => format!("via inet6 fe80::77 dev eth{port}"),
                    8 => format!("via 192.0.2.77 dev eth{port} onlink"),
                    9 => format!("dev eth{port}"),
                    10 => "dev lo".to_string(),
                    _ => format!("via 10.{port}.0.{host} dev eth{port}"),
                };
                let prefix = std::net::Ipv4Addr::from(prefix);
                // The route's own options come before its next hops.
                format!("{prefix}/{length}{tos}{options} {target}")
            }
        };
        let _ = writeln!(self.ip, "route append {to} proto 99");
    }

    fn route_v6(&mut self, random: &mut Random) {
        let length = random.of(&[32, 40, 48, 64, 80, 127, 128]);
        let near = !self.v6.is_empty() && random.once_in(2);
        let base = match near {
            true => random.of(&self.v6).0,
            false => V6_NET | u128::from(random.next()) << 40 | u128::from(random.next() & 0xffff),
        };
        let prefix = std::net::Ipv6Addr::from(base & (u128::MAX << (128 - length)));
        self.v6.push((base, length));
        let (port, other) = (random.below(PORTS), random.below(PORTS));
        let unknown = random.once_in(8);
        let (host, host_2) =
            (if unknown { 12 } else { 2 + random.below(10) }, 2 + random.below(10));
        let kind = random.below(14);
        let options = self.options(random, 1, kind == 6);
        let from = if random.once_in(10) { " from fd00:1::/64" } else { "" };
        let to = match kind {
            0 => format!("blackhole {prefix}/{length}"),
            1 => format!("unreachable {prefix}/{length}"),
            2 => format!("prohibit {prefix}/{length}"),
            3 => format!("throw {prefix}/{length}"),
            kind => {
                let target = match kind {
                    4 | 5 => format!(
                        "nexthop via fd00:{port}::{host:x} dev eth{port} weight {} \
                         nexthop via fd00:{other}::{host_2:x} dev eth{other}",
                        1 + random.below(4)
                    ),
                    6 => format!("nhid {}", random.of(&[4, 5, 12])),
                    7 => format!("via fe80::77 dev eth{port}"),
                    8 => format!("dev eth{port}"),
                    _ => format!("via fd00:{port}::{host:x} dev eth{port}"),
                };
                format!("{prefix}/{length}{from}{options} {target}")
            }
        };
        let _ = writeln!(self.ip, "-6 route append {to} proto 99");
    }

    fn rule(&mut self, random: &mut Random, v6: bool) {
        let port = random.below(PORTS);
        let (dash, own, far) = match v6 {
            false => ("", format!("10.{port}.0.0/16"), "198.18.0.0/16".to_string()),
            true => ("-6 ", format!("fd00:{port}::/64"), "2001:db8::/36".to_string()),
        };
        let selects = match random.below(8) {
            0 => format!("from {own}"),
            1 => format!("iif eth{port}"),
            2 => format!("to {far}"),
            3 => "tos 0x10".to_string(),
            4 => "ipproto udp dport 2000".to_string(),
            5 => "sport 1000".to_string(),
            6 => format!("not from {own} fwmark 0"),
            _ => format!("oif eth{port}"),
        };
        let does = match random.below(6) {
            0 => "blackhole".to_string(),
            1 => "unreachable".to_string(),
            2 => "prohibit".to_string(),
            3 => "lookup main suppress_prefixlength 0".to_string(),
            _ => "lookup 100".to_string(),
        };
        let rule = format!("priority {} {selects} {does}", 100 + random.below(50));
        let _ = writeln!(self.ip, "{dash}rule add {rule}");
        let _ = writeln!(self.undo_ip, "{dash}rule del {rule}");
        let suppresses = does.contains("suppress");
        if suppresses {
            // Routes that are not found in the one table are in another.
            let _ = writeln!(self.ip, "{dash}rule add priority 160 lookup 100");
            let _ = writeln!(self.undo_ip, "{dash}rule del priority 160 lookup 100");
        }
        if suppresses || random.once_in(2) {
            let (kind, hop) = if v6 {
                ("-6 route", format!("fd00:{port}::7"))
            } else {
                ("route", format!("10.{port}.0.7"))
            };
            let _ = writeln!(self.ip, "{kind} append default via {hop} table 100 proto 99");
        }
    }

    /// Something that sees or changes forwarded packets, without any report by the watcher.
    fn hook(&mut self, random: &mut Random) {
        let port = random.below(PORTS);
        let chain = |family: &str, at: &str, rule: &str| {
            format!(
                "nft add table {family} t
                 nft 'add chain {family} t f {{ type filter hook {at} priority 0; }}'
                 nft add rule {family} t f {rule}"
            )
        };
        let macvlan = |mode: &str| {
            format!("ip link add mv0 link eth{port} type macvlan mode {mode}; ip link set mv0 up")
        };
        let side = random.of(&["ingress", "egress"]);
        self.is_spoilt = true;
        self.shell += &match random.below(18) {
            0 => chain("ip", "forward", "udp dport 2000 drop"),
            1 => chain("ip6", "prerouting", "ip6 hoplimit set 9"),
            2 => chain("inet", "postrouting", "tcp dport 2000 drop"),
            3 => chain("netdev", &format!("ingress device eth{port}"), "ip ttl 64 drop"),
            4 => chain("netdev", &format!("egress device eth{port}"), "ip6 hoplimit 63 drop"),
            5 => format!("echo 1 > /proc/sys/net/ipv4/conf/eth{port}/rp_filter"),
            6 => "echo 2 > /proc/sys/net/ipv4/conf/all/rp_filter".to_string(),
            7 => format!("echo 0 > /proc/sys/net/ipv4/conf/eth{port}/forwarding"),
            8 => format!(
                "echo 0 > /proc/sys/net/ipv6/conf/all/forwarding
                 echo 1 > /proc/sys/net/ipv6/conf/eth{port}/forwarding"
            ),
            9 => format!("ip link set eth{port} address 02:cc:00:00:00:01"),
            10 => macvlan("passthru"),
            11 => macvlan("bridge"),
            12 => format!(
                "ip link add br0 type bridge; ip link set br0 up; ip link set eth{port} master br0"
            ),
            13 => format!("tc qdisc add dev eth{port} root tbf rate 1mbit burst 10 limit 10"),
            14 => format!(
                "tc qdisc add dev eth{port} clsact
                 tc filter add dev eth{port} {side} protocol all u32 match u32 0 0 \
                    action mirred egress redirect dev lo"
            ),
            15 => format!("ip link set eth{port} down"),
            16 => format!("echo 1 > /proc/sys/net/ipv6/conf/eth{port}/disable_ipv6"),
            _ => "ip xfrm policy add dir fwd src 0.0.0.0/0 dst 198.18.0.0/16 action block
                  ip -6 xfrm policy add dir out src ::/0 dst 2001:db8::/36 action block"
                .to_string(),
        };
        self.shell += "\n";
    }

    /// Returns a frame, and its ingress port.
    pub fn frame(&self, random: &mut Random) -> (usize, Vec<u8>) {
        random.1 = random.once_in(2);
        let port = random.below(PORTS);
        let mut frame = match random.below(20) {
            0 | 1 if !random.1 => mac_of(port).to_vec(),
            0 => mac_of(random.below(PORTS)).to_vec(),
            1 => random
                .of(&[
                    [0xff; 6],
                    [1, 0, 0x5e, 0, 0, 5],
                    [0x33, 0x33, 0, 0, 0, 9],
                    [2, 9, 9, 9, 9, 9],
                ])
                .to_vec(),
            _ => mac_of(port).to_vec(),
        };
        frame.extend([2, 4, 0, 0, port as u8, 2]);
        if random.odd(20) {
            frame.extend(random.of(&[[0x81, 0, 0, 0], [0x81, 0, 0, 5], [0x88, 0xa8, 0, 0]]));
        }
        let v6 = random.once_in(2);
        let kind: u16 = match random.below(60) {
            0 if random.1 => 0x8847,
            1 if random.1 => 0x0800,
            2 if random.1 => 0x86dd,
            _ if v6 => 0x86dd,
            _ => 0x0800,
        };
        frame.extend(kind.to_be_bytes());
        let packet = if v6 { self.v6(random, port) } else { self.v4(random, port) };
        frame.extend(packet);
        match random.below(24) {
            0 => frame.extend(vec![0x55; random.below(40)]),
            1 if random.1 => frame.truncate(14 + random.below(frame.len() - 13)),
            _ => {}
        }
        (port, frame)
    }

    fn v4(&self, random: &mut Random, port: usize) -> Vec<u8> {
        let connected = |random: &mut Random| {
            [10, random.below(PORTS) as u8, 0, random.of(&[2, 3, 4, 5, 6, 7, 11, 12, 13])]
        };
        let far = |random: &mut Random| -> [u8; 4] {
            if self.v4.is_empty() || random.once_in(8) {
                return (V4_NET | random.next() as u32 & 0x1_ffff).to_be_bytes();
            }
            let (base, length) = random.of(&self.v4);
            let inside = (random.next() as u32).checked_shr(length).unwrap_or(0);
            (base & (u32::MAX << (32 - length)) | inside).to_be_bytes()
        };
        let special: [[u8; 4]; 12] = [
            [0, 0, 0, 0],
            [0, 1, 2, 3],
            [127, 0, 0, 1],
            [10, random.below(PORTS) as u8, 255, 255],
            [10, random.below(PORTS) as u8, 0, 1],
            [224, 0, 0, 5],
            [239, 1, 1, 1],
            [240, 0, 0, 1],
            [255, 255, 255, 255],
            [10, random.below(PORTS) as u8, 0, 0],
            [169, 254, 1, 1],
            [192, 0, 2, 77],
        ];
        let source = match random.below(12) {
            0 if random.1 => random.of(&special),
            1 => far(random),
            2 => connected(random),
            _ => [10, port as u8, 0, random.of(&[2, 3, 4, 12])],
        };
        let destination = match random.below(12) {
            0 if random.1 => random.of(&special),
            1 | 2 => connected(random),
            _ => far(random),
        };
        let mut options = Vec::new();
        if random.odd(10) {
            options = random
                .of(&[
                    &[1_u8, 1, 1, 0][..],
                    &[0x94, 4, 0, 0],
                    &[7, 7, 4, 0, 0, 0, 0, 0],
                    &[0x83, 7, 4, 10, 3, 0, 9, 0],
                    &[0x44, 0, 0, 0],
                ])
                .to_vec();
        }
        let protocol = protocol(random, false);
        let room = length(random).saturating_sub(20 + options.len());
        let payload = payload(random, protocol, room, Some((source, destination)));
        let total = 20 + options.len() + payload.len();
        let mut packet =
            vec![0x45 + options.len() as u8 / 4, random.of(&[0, 0, 0, 0x10, 0x03, 0xb8])];
        packet.extend((total as u16).to_be_bytes());
        packet.extend((random.next() as u16).to_be_bytes());
        let fragment: u16 = match random.below(20) {
            0..5 if !random.1 => 0x4000,
            0 => 0x2000,
            1 => 60,
            2 => 0x2000 | 185,
            3 => 0x8000,
            4 => 0x4000 | 20,
            5..12 => 0x4000,
            _ => 0,
        };
        packet.extend(fragment.to_be_bytes());
        packet.extend([ttl(random), protocol, 0, 0]);
        packet.extend(source);
        packet.extend(destination);
        packet.extend(&options);
        if random.odd(20) {
            packet[0] = random.of(&[0x44, 0x46, 0x4f, 0x55, 0x65, 0x40]);
        }
        if random.odd(20) {
            let total = random.of(&[0, 19, 20, 21, total as u16 + 1, total as u16 - 1, 2000]);
            packet[2..4].copy_from_slice(&total.to_be_bytes());
        }
        let mut sum = checksum(&packet);
        if random.odd(15) {
            sum = random.of(&[0, 0xffff, sum ^ 0x100, sum.wrapping_add(1), sum.wrapping_sub(1)]);
        } else if random.once_in(20) {
            // Makes the right checksum zero, in either form, or
            // lets it become zero when the TTL decreases.
            let right = random.of(&[0, 0xfeff]);
            packet[4..6].fill(0);
            let id = u32::from(checksum(&packet)) + u32::from(!right);
            let id = (id & 0xffff) + (id >> 16);
            packet[4..6].copy_from_slice(&(id as u16).to_be_bytes());
            sum = if right == 0 { random.of(&[0, 0xffff]) } else { right };
        }
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend(payload);
        packet
    }

    fn v6(&self, random: &mut Random, port: usize) -> Vec<u8> {
        let address = |text: String| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        let connected = |random: &mut Random| {
            address(format!(
                "fd00:{}::{}",
                random.below(PORTS),
                random.of(&["2", "3", "4", "b", "c", "d"])
            ))
        };
        let far = |random: &mut Random| -> [u8; 16] {
            if self.v6.is_empty() || random.once_in(8) {
                return (V6_NET | u128::from(random.next()) << 32).to_be_bytes();
            }
            let (base, length) = random.of(&self.v6);
            let any = u128::from(random.next()) << 64 | u128::from(random.next());
            (base & (u128::MAX << (128 - length)) | any.checked_shr(length).unwrap_or(0))
                .to_be_bytes()
        };
        let specials = [
            "::",
            "::1",
            "fe80::99",
            "fe80::1:1",
            "ff02::5",
            "ff0e::9",
            "::ffff:10.0.0.2",
            "64:ff9b::1",
            "fd00:1::",
            "fd00:1::1",
            "4000::1",
            "fec0::1",
        ];
        let special = |random: &mut Random| address(random.of(&specials).to_string());
        let source = match random.below(14) {
            0 if random.1 => special(random),
            1 => far(random),
            2 => connected(random),
            _ => address(format!("fd00:{port}::{}", random.of(&["2", "3", "4", "c"]))),
        };
        let destination = match random.below(12) {
            0 if random.1 => special(random),
            1 | 2 => connected(random),
            _ => far(random),
        };
        let protocol = protocol(random, true);
        let room = length(random).saturating_sub(40);
        let payload = payload(random, protocol, room, None);
        let flow = match random.below(3) {
            0 => 0,
            _ => random.next() as u32 & 0x0fff_ffff,
        };
        let mut packet = (6 << 28 | flow).to_be_bytes().to_vec();
        let mut bytes = payload.len() as u16;
        if random.odd(20) {
            bytes = random.of(&[0, bytes + 1, bytes.saturating_sub(1), 2000]);
        }
        if random.odd(30) {
            packet[0] = 0x45;
        }
        packet.extend(bytes.to_be_bytes());
        packet.extend([protocol, ttl(random)]);
        packet.extend(source);
        packet.extend(destination);
        packet.extend(payload);
        packet
    }
}

fn ttl(random: &mut Random) -> u8 {
    match random.below(24) {
        0 if random.1 => random.of(&[0, 1]),
        1 | 2 => 2,
        3 => 255,
        _ => 64,
    }
}

/// Bytes of a packet, often about an MTU.
fn length(random: &mut Random) -> usize {
    match random.below(4) {
        0 => 20 + random.below(1500),
        1 => (random.of(&[1280, 1290, 1300, 1350, 1400, 1450, 1500]) + random.below(5))
            .saturating_sub(2),
        _ => 44 + random.below(100),
    }
}

fn protocol(random: &mut Random, v6: bool) -> u8 {
    match random.below(8) {
        0..3 => 17,
        3 | 4 => 6,
        5 => random.of(&[132, 136, 33, 50, 51, 47, 4, 41, 89, 137, 253]),
        6 if v6 && random.1 => random.of(&[0, 43, 44, 60, 59, 135, 139, 140]),
        _ => {
            if v6 {
                58
            } else {
                1
            }
        }
    }
}

fn payload(
    random: &mut Random,
    protocol: u8,
    room: usize,
    v4: Option<([u8; 4], [u8; 4])>,
) -> Vec<u8> {
    let mut payload: Vec<u8> = (0..room).map(|_| random.next() as u8).collect();
    let ports = [random.of(&[1000_u16, 1001, 1002]), random.of(&[2000_u16, 2001, 9])];
    match protocol {
        17 | 6 | 132 | 136 | 33 if room >= 4 => {
            payload[..2].copy_from_slice(&ports[0].to_be_bytes());
            payload[2..4].copy_from_slice(&ports[1].to_be_bytes());
        }
        1 | 58 if room >= 8 => {
            payload[0] = match protocol {
                1 if !random.1 => 8,
                _ if !random.1 => 128,
                1 => random.of(&[8, 8, 0, 3, 5, 11, 12, 4]),
                _ => random.of(&[128, 128, 129, 1, 2, 3, 4, 135, 136]),
            };
            payload[1] = 0;
            if protocol == 1 {
                payload[2..4].fill(0);
                let sum = checksum(&payload);
                payload[2..4].copy_from_slice(&sum.to_be_bytes());
            }
        }
        // An inner packet, which hash policies may consider.
        4 if room >= 28 => {
            let (source, destination) = v4.unwrap_or(([10, 9, 0, 1], [10, 9, 0, 2]));
            payload[0] = 0x45;
            payload[12..16].copy_from_slice(&destination);
            payload[16..20].copy_from_slice(&source);
        }
        0 | 43 | 60 | 135 | 139 | 140 if room >= 8 => {
            payload[..8].copy_from_slice(&[17, 0, 1, 4, 0, 0, 0, 0]);
        }
        44 if room >= 8 => {
            payload[..8].copy_from_slice(&[17, 0, 0, random.of(&[0, 1, 8]), 0, 0, 0, 9])
        }
        _ => {}
    }
    payload
}
