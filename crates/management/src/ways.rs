//! What the machine's kernel would do with an address: only what it would send elsewhere may a node reach.

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// How long an answer of the kernel holds. The machine's addresses change seldom.
const FRESH: Duration = Duration::from_secs(1);

/// Answers that are kept; all are forgotten when they are more.
const KNOWN_MAX: usize = 1024;

/// Questions to the kernel of the namespace that it was made in.
pub struct Ways {
    socket: Socket,
    known: HashMap<Ipv4Addr, (bool, Instant)>,
    /// Number of the last question.
    asked: u32,
}

impl Ways {
    /// In this thread's network namespace.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, known: HashMap::new(), asked: 0 })
    }

    /// Whether an address is elsewhere: none of the machine's own, on whatever interface, and no loopback,
    /// link-local (where clouds tell machines their secrets), multicast or broadcast one; and there is a route.
    pub fn leads_away(&mut self, to: Ipv4Addr, now: Instant) -> bool {
        if to.is_loopback() || to.is_link_local() || to.is_multicast() || to.octets()[0] == 0 {
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

    /// Asks the kernel for the route to an address (rtnetlink(7), RTM_GETROUTE).
    fn send(&mut self, to: Ipv4Addr) -> io::Result<()> {
        const GET_ROUTE: u16 = 26;
        const REQUEST: u16 = 1;
        const FAMILY_IPV4: u8 = 2;
        const DESTINATION: u16 = 1;
        let mut request = Vec::with_capacity(36);
        request.extend_from_slice(&36u32.to_ne_bytes());
        request.extend_from_slice(&GET_ROUTE.to_ne_bytes());
        request.extend_from_slice(&REQUEST.to_ne_bytes());
        self.asked = self.asked.wrapping_add(1);
        request.extend_from_slice(&self.asked.to_ne_bytes());
        request.extend_from_slice(&[0; 4]);
        request.extend_from_slice(&[FAMILY_IPV4, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        request.extend_from_slice(&8u16.to_ne_bytes());
        request.extend_from_slice(&DESTINATION.to_ne_bytes());
        request.extend_from_slice(&to.octets());
        self.socket.send(&request, 0)?;
        Ok(())
    }

    /// Whether the kernel has a unicast route to an address.
    fn ask(&mut self, to: Ipv4Addr) -> io::Result<bool> {
        const HEADER: usize = 16;
        const NEW_ROUTE: u16 = 24;
        const TYPE_AT: usize = HEADER + 7;
        const UNICAST: u8 = 1;
        self.send(to)?;
        let mut answer = Vec::with_capacity(4096);
        // What an earlier question left is no answer to this one.
        while answer.get(8..12) != Some(&self.asked.to_ne_bytes()[..]) {
            answer.clear();
            self.socket.recv(&mut answer, 0)?;
        }
        let kind = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
        Ok(kind == Some(NEW_ROUTE) && answer.get(TYPE_AT) == Some(&UNICAST))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_machine_itself_is_nowhere_else() {
        let mut ways = Ways::new().unwrap();
        let now = Instant::now();
        for own in ["127.0.0.1", "127.9.9.9", "169.254.169.254", "0.0.0.0", "224.0.0.5"] {
            assert!(!ways.leads_away(own.parse().unwrap(), now), "{own}");
        }
        // The address of an interface with a route is not elsewhere, though its neighbour is.
        let namespace = Namespace::new();
        namespace.run("link add w0 type veth peer name w1");
        for words in ["addr add 10.9.0.1/24 dev w0", "link set w0 up", "link set w1 up"] {
            namespace.run(words);
        }
        namespace.run("route add default via 10.9.0.2");
        let file = std::fs::File::open(format!("/run/netns/{}", namespace.0)).unwrap();
        let answers = std::thread::spawn(move || {
            let network = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(file.as_fd(), network).unwrap();
            let mut ways = Ways::new().unwrap();
            ["10.9.0.1", "10.9.0.255", "10.9.0.2", "192.0.2.77"]
                .map(|to| ways.leads_away(to.parse().unwrap(), now))
        });
        assert_eq!(answers.join().unwrap(), [false, false, true, true]);
    }

    /// A network namespace, which goes with it.
    struct Namespace(String);

    impl Namespace {
        fn new() -> Self {
            let name = format!("pdp-ways-{}", std::process::id());
            ip(&["netns", "add", &name]);
            Self(name)
        }

        fn run(&self, words: &str) {
            ip(&[&["-n", &self.0], &words.split(' ').collect::<Vec<_>>()[..]].concat());
        }
    }

    impl Drop for Namespace {
        fn drop(&mut self) {
            ip(&["netns", "del", &self.0]);
        }
    }

    fn ip(words: &[&str]) {
        let output = std::process::Command::new("ip").args(words).output().unwrap();
        assert!(output.status.success(), "ip {words:?}: {output:?}");
    }

    #[test]
    fn an_answer_is_that_of_its_question() {
        let mut ways = Ways::new().unwrap();
        for to in ["127.0.0.1", "192.0.2.77"].map(|to| to.parse().unwrap()) {
            let alone = ways.ask(to).unwrap();
            for left in ["192.0.2.77", "127.0.0.1"] {
                ways.send(left.parse().unwrap()).unwrap();
                assert_eq!(ways.ask(to).unwrap(), alone, "{to} after {left}");
            }
        }
    }
}
