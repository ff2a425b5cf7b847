//! The machine kernel's routing decisions. A node may only
//! reach addresses that the machine would forward elsewhere.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use pdp_netlink::{Netlink, Request, family};

/// Validity of an answer of the kernel. The machine's addresses change seldom.
const FRESH: Duration = Duration::from_secs(1);

/// Most cached answers. Beyond it, all are forgotten.
const KNOWN_MAX: usize = 1024;

/// True for addresses that are never routed away: loopback,
/// link-local, multicast, and those of "this" network.
pub fn is_near(to: IpAddr) -> bool {
    match to {
        IpAddr::V4(to) => {
            to.is_loopback() || to.is_link_local() || to.is_multicast() || to.octets()[0] == 0
        }
        IpAddr::V6(to) => {
            to.is_loopback()
                || to.is_unicast_link_local()
                || to.is_multicast()
                || to.is_unspecified()
        }
    }
}

/// True for addresses of the public Internet: neither near nor private, shared, reserved or for
/// documentation, and without an embedded IPv4 address (RFC 6890).
pub fn is_public(to: IpAddr) -> bool {
    match to.to_canonical() {
        IpAddr::V4(to) => {
            let [a, b, c, _] = to.octets();
            let special = matches!(
                (a, b, c),
                (100, 64..=127, _) | (192, 0, 0) | (192, 88, 99) | (198, 18 | 19, _) | (240.., ..)
            );
            !(special || is_near(to.into()) || to.is_private() || to.is_documentation())
        }
        IpAddr::V6(to) => {
            let [a, b, ..] = to.segments();
            // 2001::/23 is for protocols (Teredo among them), 2002::/16 is 6to4, 3fff::/20 for
            // documentation.
            let special = a == 0x2001 && (b < 0x200 || b == 0xdb8) || a == 0x2002 || a == 0x3fff;
            a & 0xe000 == 0x2000 && !special
        }
    }
}

/// Route queries to the kernel, in the namespace where it was made.
pub struct RouteQuery {
    netlink: Netlink,
    known: HashMap<IpAddr, (bool, Instant)>,
}

impl RouteQuery {
    /// Opens a socket in this thread's network namespace.
    pub fn new() -> io::Result<Self> {
        Ok(Self { netlink: Netlink::routing()?, known: HashMap::new() })
    }

    /// True if an address is elsewhere and has a route. Not elsewhere are the machine's own
    /// addresses on any interface, and loopback, link-local (where clouds offer secrets to
    /// machines), multicast and broadcast addresses.
    pub fn leads_away(&mut self, to: impl Into<IpAddr>, now: Instant) -> bool {
        let to = to.into().to_canonical();
        if is_near(to) {
            return false;
        }
        if let Some((away, at)) = self.known.get(&to)
            && now.saturating_duration_since(*at) < FRESH
        {
            return *away;
        }
        let away = self.ask(to).unwrap_or(false);
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        self.known.insert(to, (away, now));
        away
    }

    /// True if the kernel has a unicast route to an address (rtnetlink(7), RTM_GETROUTE).
    fn ask(&mut self, to: IpAddr) -> io::Result<bool> {
        /// Place of the type in `struct rtmsg`.
        const TYPE_AT: usize = 7;
        let bits = if to.is_ipv4() { 32 } else { 128 };
        let header = [family(to.is_ipv6()), bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut request = Request::new(libc::RTM_GETROUTE, 0, &header);
        request.address(libc::RTA_DST, to);
        self.netlink
            .query(&mut request, |route| route.payload.get(TYPE_AT) == Some(&libc::RTN_UNICAST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::Namespace;

    #[test]
    fn machine_addresses_are_not_outside() {
        let mut query = RouteQuery::new().unwrap();
        let now = Instant::now();
        for own in ["127.0.0.1", "127.9.9.9", "169.254.169.254", "0.0.0.0", "224.0.0.5"] {
            assert!(!query.leads_away(own.parse::<IpAddr>().unwrap(), now), "{own}");
        }
        // The address of an interface with a route is not elsewhere, but its neighbour is.
        let namespace = Namespace::new("ways");
        namespace.run("link add w0 type veth peer name w1");
        for words in ["addr add 10.9.0.1/24 dev w0", "link set w0 up", "link set w1 up"] {
            namespace.run(words);
        }
        namespace.run("route add default via 10.9.0.2");
        let answers = namespace.within(move || {
            let mut query = RouteQuery::new().unwrap();
            ["10.9.0.1", "10.9.0.255", "10.9.0.2", "192.0.2.77"]
                .map(|to| query.leads_away(to.parse::<IpAddr>().unwrap(), now))
        });
        assert_eq!(answers, [false, false, true, true]);
    }

    #[test]
    fn only_internet_addresses_are_public() {
        for public in ["1.1.1.1", "192.0.1.1", "100.128.0.1", "2606:4700::1111", "2a00::1"] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        let others = "0.0.0.1 10.1.1.1 100.64.0.1 127.0.0.1 169.254.169.254 172.16.0.1 192.0.0.1 192.0.2.1 192.168.0.1 \
            198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::ffff:10.0.0.1 \
            ::ffff:127.0.0.1 64:ff9b::1 fe80::1 fd00::1 ff02::1 2001::1 2001:db8::1 2002:7f00:1::1 3fff::1";
        for other in others.split_whitespace() {
            assert!(!is_public(other.parse().unwrap()), "{other}");
        }
    }
}
