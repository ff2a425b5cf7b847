//! Datagrams of the node on the machine. Each flow uses one
//! ephemeral port of the machine, where nobody listens.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use pdp_proto::management::GATEWAY;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::flows::{self, OutboundFlow};
use crate::frames;
use crate::number_share::FlowQuota;
use crate::sockets::{Protocol, Sockets};

/// Most UDP flows of a node at a time. A further flow replaces the least recently used one.
pub const FLOWS_MAX: usize = 256;

/// Datagrams of the node. The gateway represents the machine's name server.
#[derive(Debug)]
pub struct UdpProtocol {
    resolver: Option<Ipv4Addr>,
}

impl UdpProtocol {
    /// Makes the sockets in this thread's network namespace.
    pub fn open() -> io::Result<Sockets<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = |_| socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None);
        let sockets = (0..FLOWS_MAX).map(socket).collect::<Result<_, _>>()?;
        let names = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        let protocol = Self { resolver: resolver(&names) };
        Ok(Sockets { sockets, quota: FlowQuota::of_ports(FLOWS_MAX)?, protocol })
    }
}

impl Protocol for UdpProtocol {
    const STREAM: Duration = flows::STREAM;

    fn far_end(&self, flow: &OutboundFlow) -> Option<SocketAddrV4> {
        if *flow.to.ip() != GATEWAY {
            return Some(flow.to);
        }
        Some(SocketAddrV4::new(self.resolver?, flow.to.port()))
    }

    fn answer(&self, frame: &mut Vec<u8>, flow: &OutboundFlow, message: &[u8]) -> bool {
        frames::answer(frame, flow, message);
        true
    }

    fn nobody_listens(&self, frame: &mut Vec<u8>, flow: &OutboundFlow) -> bool {
        frames::nobody_listens(frame, flow);
        true
    }
}

/// The machine's first IPv4 name server (resolv.conf(5)).
fn resolver(text: &str) -> Option<Ipv4Addr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then_some(words.next()?)
    });
    servers.filter_map(|server| server.parse().ok()).next()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::rc::Rc;
    use std::time::Instant;

    use super::*;
    use crate::number_share::FLOWS_SURE;
    use crate::sockets::FlowSockets;
    use crate::sockets::testing::{Frames, connected, run, until};

    #[test]
    fn the_first_ipv4_name_server_is_asked() {
        let text = "# nameserver 10.0.0.1\nsearch x\nnameserver fd00::1\nnameserver\t127.0.0.53 \nnameserver 10.0.0.2";
        assert_eq!(resolver(text), Some(Ipv4Addr::new(127, 0, 0, 53)));
        assert_eq!(resolver("nameserver\nnameserverx 10.0.0.1\noptions 10.0.0.1"), None);
    }

    fn datagrams(resolver: Option<Ipv4Addr>) -> (Rc<FlowSockets<UdpProtocol>>, Frames) {
        connected(Sockets { protocol: UdpProtocol { resolver }, ..UdpProtocol::open().unwrap() })
    }

    /// A far end that waits for a datagram for a limited time.
    fn far_end(at: &str) -> (std::net::UdpSocket, SocketAddrV4) {
        let socket = std::net::UdpSocket::bind((at, 0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let SocketAddr::V4(address) = socket.local_addr().unwrap() else { panic!("IPv4") };
        (socket, address)
    }

    fn payload(frame: &[u8]) -> &[u8] {
        &frame[42..]
    }

    #[test]
    fn only_the_far_end_can_answer_a_flow() {
        run(async {
            let ((peer, to), (stranger, _)) = (far_end("127.0.0.1"), far_end("127.0.0.1"));
            let (datagrams, given) = datagrams(None);
            tokio::task::spawn_local(datagrams.clone().serve());
            let flow = OutboundFlow { port: 30_000, to };
            datagrams.send(flow, b"question", Instant::now());
            let mut buffer = [0; 100];
            let (length, from) = peer.recv_from(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"question");
            // The machine does not use the node's own port.
            assert_ne!(from.port(), 30_000);
            drop(std::net::UdpSocket::bind("0.0.0.0:30000").unwrap());
            let _ = stranger.send_to(b"unasked", from);
            let answer = vec![7; 9_000];
            peer.send_to(&answer, from).unwrap();
            assert_eq!(payload(&until(&given, 1).await[0]), answer);
            assert_eq!(datagrams.count(), 1);
            datagrams.end_expired(flows::STREAM);
            assert_eq!(datagrams.count(), 0);
            peer.send_to(b"late", from).unwrap();
            drop(std::net::UdpSocket::bind(("0.0.0.0", from.port())).unwrap());
            // Another flow gets the socket, but nothing of the previous flow.
            datagrams.send(OutboundFlow { port: 30_001, to }, b"another", Instant::now());
            let (_, from) = peer.recv_from(&mut buffer).unwrap();
            peer.send_to(b"its answer", from).unwrap();
            assert_eq!(payload(&until(&given, 1).await[0]), b"its answer");
        });
    }

    #[test]
    fn node_gets_port_unreachable() {
        run(async {
            let (_, to) = far_end("127.0.0.1");
            let (datagrams, given) = datagrams(None);
            tokio::task::spawn_local(datagrams.clone().serve());
            let names = SocketAddrV4::new(GATEWAY, 53);
            for to in [to, names] {
                let flow = OutboundFlow { port: 30_000, to };
                datagrams.send(flow, b"question", Instant::now());
                let mut reply = Vec::new();
                frames::nobody_listens(&mut reply, &flow);
                assert_eq!(until(&given, 1).await, [reply]);
            }
        });
    }

    #[test]
    fn dns_queries_go_to_the_machines_resolver() {
        run(async {
            let (server, at) = far_end("127.0.0.53");
            let port = at.port();
            let (datagrams, given) = datagrams(Some(Ipv4Addr::new(127, 0, 0, 53)));
            tokio::task::spawn_local(datagrams.clone().serve());
            let flow = OutboundFlow { port: 30_000, to: SocketAddrV4::new(GATEWAY, port) };
            datagrams.send(flow, b"name", Instant::now());
            let mut buffer = [0; 100];
            let (_, from) = server.recv_from(&mut buffer).unwrap();
            server.send_to(b"address", from).unwrap();
            let answer = until(&given, 1).await.remove(0);
            assert_eq!(payload(&answer), b"address");
            assert_eq!(answer[26..30], GATEWAY.octets());
        });
    }

    #[test]
    fn udp_sockets_per_node_are_bounded() {
        run(async {
            let (_peer, to) = far_end("127.0.0.1");
            let (mut datagrams, _) = datagrams(None);
            let few = Rc::get_mut(&mut datagrams).unwrap();
            assert!(few.quota_mut().in_use().unwrap() < FLOWS_MAX, "a machine with few sockets");
            let send_all = |datagrams: &FlowSockets<UdpProtocol>| {
                let send = |port| datagrams.send(OutboundFlow { port, to }, b"x", Instant::now());
                (1..=1_000).for_each(send);
                datagrams.count()
            };
            assert_eq!(send_all(few), FLOWS_MAX);
            assert!(few.quota_mut().in_use().unwrap() >= FLOWS_MAX);
            // With fewer ports for nodes than are in use, the
            // node ends flows of its own and takes no more.
            few.quota_mut().set_shared(0);
            few.end_expired(Duration::ZERO);
            assert_eq!(few.count(), FLOWS_SURE);
            assert_eq!(send_all(few), FLOWS_SURE);
            few.end_expired(flows::STREAM);
            assert_eq!(few.count(), 0);
            assert_eq!(send_all(few), FLOWS_SURE);
        });
    }
}
