//! Echo requests of the node on the machine. Each flow is one
//! ping socket, whose identifier the machine's kernel chose.
//!
//! The kernel permits a program ping sockets if `net.ipv4.ping_group_range`
//! includes its group. It writes the socket's identifier and a checksum into
//! each request, and delivers all replies with that identifier.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use rustix::process::Gid;
use rustix::thread::{set_thread_groups, set_thread_res_gid};

use crate::flows::{self, OutboundFlow};
use crate::frames;
use crate::number_share::FlowQuota;
use crate::sockets::{Protocol, Sockets};

/// Most echo flows of a node at a time. A further flow replaces the least recently used one.
pub const ECHOES_MAX: usize = 64;

/// Receive buffer of a flow, bytes. The kernel charges waiting replies to no cgroup.
const ROOM: usize = 1 << 15;

/// Echo requests of the node.
#[derive(Debug)]
pub struct EchoProtocol;

impl EchoProtocol {
    /// Makes the sockets in this thread's network namespace as a program of that group. `None` if
    /// the machine permits the group none.
    pub fn open(group: u32) -> io::Result<Option<Sockets<Self>>> {
        // The kernel checks the groups of the creating thread, but no capability.
        let made = std::thread::scope(|scope| scope.spawn(|| make(group)).join());
        let sockets = match made.map_err(|_| io::ErrorKind::Other)? {
            Err(Errno::ACCESS) => return Ok(None),
            made => made?,
        };
        let quota = FlowQuota::of_identifiers(ECHOES_MAX)?;
        Ok(Some(Sockets { sockets, quota, protocol: Self }))
    }
}

/// Makes ping sockets. The thread belongs to that group from then on.
fn make(group: u32) -> rustix::io::Result<Vec<OwnedFd>> {
    let group = Gid::from_raw(group);
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = |_| {
        let protocol = Some(ipproto::ICMP);
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, protocol)?;
        set_socket_recv_buffer_size(&socket, ROOM)?;
        Ok(socket)
    };
    (0..ECHOES_MAX).map(socket).collect()
}

impl Protocol for EchoProtocol {
    const STREAM: Duration = flows::QUESTION;

    fn answer(&self, frame: &mut Vec<u8>, flow: &OutboundFlow, message: &[u8]) -> bool {
        frames::echo_reply(frame, flow, message)
    }

    fn nobody_listens(&self, _: &mut Vec<u8>, _: &OutboundFlow) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::{Ipv4Addr, SocketAddrV4};
    use std::rc::Rc;
    use std::time::Instant;

    use super::*;
    use crate::namespace::Namespace;
    use crate::number_share::FLOWS_SURE;
    use crate::sockets::FlowSockets;
    use crate::sockets::testing::{Frames, connected, run, until};

    const GROUP: u32 = 70_000;

    /// Runs a test in its own namespace, where programs of these groups may have ping sockets.
    fn within(name: &str, groups: &str, test: impl FnOnce() + Send) {
        let namespace = Namespace::new(name);
        namespace.run("link set lo up");
        namespace.within(|| {
            fs::write("/proc/sys/net/ipv4/ping_group_range", groups).unwrap();
            test();
        });
    }

    fn echoes() -> (Rc<FlowSockets<EchoProtocol>>, Frames) {
        connected(EchoProtocol::open(GROUP).unwrap().expect("ping sockets"))
    }

    fn flow(id: u16, to: Ipv4Addr) -> OutboundFlow {
        OutboundFlow { port: id, to: SocketAddrV4::new(to, 0) }
    }

    /// An echo request in the form that `frames` passes on.
    fn request(id: u16, sequence: u8, payload: &[u8]) -> Vec<u8> {
        let [high, low] = id.to_be_bytes();
        [&[8, 0, 1, 2, high, low, 0, sequence], payload].concat()
    }

    /// Identifier, sequence number and payload of each reply.
    fn replies(frames: Vec<Vec<u8>>) -> Vec<(u16, u8, Vec<u8>)> {
        let reply = |frame: Vec<u8>| {
            (u16::from_be_bytes([frame[38], frame[39]]), frame[41], frame[42..].to_vec())
        };
        frames.into_iter().map(reply).collect()
    }

    #[test]
    fn nodes_with_equal_echo_ids_get_own_replies() {
        within("echo", "0 2147483647", || {
            run(async {
                let nodes = [echoes(), echoes()];
                for (node, _) in &nodes {
                    tokio::task::spawn_local(node.clone().serve());
                }
                let to = Ipv4Addr::LOCALHOST;
                for sequence in 0..3 {
                    for (name, (node, _)) in (b'a'..).zip(&nodes) {
                        let payload = [name; 1_472];
                        let message = request(9, sequence, &payload);
                        node.send(flow(9, to), &message, Instant::now());
                    }
                }
                for (name, (node, given)) in (b'a'..).zip(&nodes) {
                    let own = |sequence| (9, sequence, vec![name; 1_472]);
                    assert_eq!(replies(until(given, 3).await), [own(0), own(1), own(2)]);
                    assert_eq!(node.count(), 1);
                }
                // An ended flow has no identifier, and another flow gets its own replies.
                let (node, given) = &nodes[0];
                node.end_expired(flows::QUESTION);
                assert_eq!(
                    (node.count(), FlowQuota::of_identifiers(1).unwrap().in_use().unwrap()),
                    (0, 1)
                );
                let other = Ipv4Addr::new(127, 0, 0, 2);
                node.send(flow(9, other), &request(9, 7, b"x"), Instant::now());
                let got = until(given, 1).await;
                assert_eq!(got[0][26..30], other.octets());
                assert_eq!(replies(got), [(9, 7, b"x".to_vec())]);
            });
        });
    }

    #[test]
    fn only_the_pinged_address_can_reply() {
        within("echo-stranger", "0 2147483647", || {
            run(async {
                let (node, given) = echoes();
                tokio::task::spawn_local(node.clone().serve());
                let to = Ipv4Addr::LOCALHOST;
                // From here on the flow has an identifier; the stranger tries all of them.
                node.send(flow(9, to), &request(9, 0, b"x"), Instant::now());
                assert_eq!(replies(until(&given, 1).await).len(), 1);
                let flags = SocketFlags::CLOEXEC;
                let raw =
                    socket_with(AddressFamily::INET, SocketType::RAW, flags, Some(ipproto::ICMP));
                let raw = raw.unwrap();
                let stranger = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 3), 0);
                rustix::net::bind(&raw, &stranger).unwrap();
                for id in 0..=u16::MAX {
                    let mut reply = request(id, 0, b"unasked!");
                    reply[..4].copy_from_slice(&[0; 4]);
                    let sum = pdp_wire::checksum::checksum(&reply);
                    reply[2..4].copy_from_slice(&sum.to_be_bytes());
                    let to = SocketAddrV4::new(to, 0);
                    rustix::net::sendto(&raw, &reply, rustix::net::SendFlags::empty(), &to)
                        .unwrap();
                }
                node.send(flow(9, to), &request(9, 1, b"y"), Instant::now());
                assert_eq!(replies(until(&given, 1).await), [(9, 1, b"y".to_vec())]);
            });
        });
    }

    #[test]
    fn echo_sockets_per_node_are_bounded() {
        within("echo-many", "0 2147483647", || {
            run(async {
                let (mut node, _) = echoes();
                let node = Rc::get_mut(&mut node).unwrap();
                let send_all = |node: &FlowSockets<EchoProtocol>| {
                    for id in 0..1_000 {
                        let message = request(id, 0, b"x");
                        node.send(flow(id, Ipv4Addr::LOCALHOST), &message, Instant::now());
                    }
                    node.count()
                };
                assert_eq!(send_all(node), ECHOES_MAX);
                assert_eq!(node.quota_mut().in_use().unwrap(), ECHOES_MAX);
                node.quota_mut().set_shared(0);
                node.end_expired(Duration::ZERO);
                assert_eq!(node.count(), FLOWS_SURE);
                assert_eq!(send_all(node), FLOWS_SURE);
            });
        });
    }

    #[test]
    fn ping_group_range_is_respected() {
        for (groups, may) in [("1 0", false), ("0 0", false), ("70000 70000", true)] {
            within("echo-groups", groups, || {
                assert_eq!(EchoProtocol::open(GROUP).unwrap().is_some(), may, "{groups}");
            });
        }
    }
}
