//! Datagrams of the node on the machine: each flow has a connected socket whose port the machine's kernel chose.
//!
//! Only the far end that the node sent to can answer: the kernel gives a connected socket nothing else, and no port of
//! the machine is listened at. The sockets are made before the helper enters the node's namespace, since a socket stays
//! where it was made; a flow that ends gives its socket back. A flow is one ephemeral port of the machine, of which
//! [`Ports`] leaves others their half.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pdp_proto::management::GATEWAY;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, connect_unspec, recv,
    recvfrom, send, socket_with,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;
use tokio::task::coop::consume_budget;

use crate::flows::{Flow, Flows, Slot};
use crate::frames::{self, DATAGRAM_MAX};

/// Flows of a node at a time; the least recently used ends for another.
pub const FLOWS_MAX: usize = 256;

/// Flows that a node has however many ports of the machine are in use.
const FLOWS_SURE: usize = 16;

/// Time between two looks for flows that are over.
const LOOK: Duration = Duration::from_secs(5);

/// Pause after a failure that is not one flow's (memory).
const PAUSE: Duration = Duration::from_millis(100);

/// Datagrams that a socket can have when its flow ends.
const LEFT_MAX: usize = 1 << 16;

/// A connected socket tells an error of the far end, and nothing to read.
const WATCHED: Interest = Interest::READABLE.add(Interest::ERROR);

/// UDP sockets in the machine's network namespace, one for each flow.
pub struct Sockets {
    sockets: Vec<OwnedFd>,
    ports: Ports,
    resolver: Option<Ipv4Addr>,
}

impl Sockets {
    /// In this thread's network namespace.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = |_| socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None);
        let sockets = (0..FLOWS_MAX).map(socket).collect::<Result<_, _>>()?;
        let names = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        Ok(Self { sockets, ports: Ports::open()?, resolver: resolver(&names) })
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

/// Ephemeral ports of the machine that sockets for datagrams have.
struct Ports {
    /// Counters of the namespace in which it was opened.
    counters: File,
    /// Ports in use from which on a node has [`FLOWS_SURE`] flows alone.
    most: usize,
}

impl Ports {
    fn open() -> io::Result<Self> {
        let counters = File::open("/proc/thread-self/net/sockstat")?;
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
        let mut range = range.split_whitespace().map(|port| port.parse::<usize>().unwrap_or(0));
        let (first, last) = (range.next().unwrap_or(0), range.next().unwrap_or(0));
        Ok(Self { counters, most: (last + 1).saturating_sub(first) / 2 })
    }

    fn in_use(&self) -> io::Result<usize> {
        let mut text = [0; 1024];
        let length = self.counters.read_at(&mut text, 0)?;
        let text = String::from_utf8_lossy(&text[..length]);
        let line = text.lines().find_map(|line| line.strip_prefix("UDP: inuse "));
        let count = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        count.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn has_room(&self) -> bool {
        self.in_use().is_ok_and(|in_use| in_use < self.most)
    }
}

/// Takes frames for the node.
type Give = Box<dyn Fn(&[u8])>;

/// See the module.
pub struct Datagrams {
    sockets: Vec<AsyncFd<OwnedFd>>,
    flows: RefCell<Flows>,
    ports: Ports,
    resolver: Option<Ipv4Addr>,
    give: Give,
    received: RefCell<Vec<u8>>,
    frame: RefCell<Vec<u8>>,
}

impl Datagrams {
    /// `give` takes frames for the node.
    pub fn new(sockets: Sockets, give: impl Fn(&[u8]) + 'static) -> io::Result<Self> {
        let Sockets { sockets, ports, resolver } = sockets;
        #[expect(deprecated, reason = "what replaces it is unsafe; a socket keeps its descriptor")]
        let watched = |socket| AsyncFd::with_interest(socket, WATCHED);
        let sockets: Vec<_> = sockets.into_iter().map(watched).collect::<io::Result<_>>()?;
        let flows = RefCell::new(Flows::new(sockets.len()));
        let (received, frame) = (RefCell::new(vec![0; DATAGRAM_MAX]), RefCell::default());
        Ok(Self { sockets, flows, ports, resolver, give: Box::new(give), received, frame })
    }

    /// Sends a datagram of the node; it is dropped where the socket has no room for it.
    pub fn send(&self, flow: Flow, payload: &[u8], now: Instant) {
        let Some(to) = self.far_end(&flow) else { return self.nobody_listens(&flow) };
        let more = |in_use| in_use < FLOWS_SURE || self.ports.has_room();
        let slot = self.flows.borrow_mut().sent(flow, now, more);
        let (Slot::Has(at) | Slot::Gets(at) | Slot::Takes(at)) = slot;
        let socket = &self.sockets[at];
        if let Slot::Takes(_) = slot {
            release(socket);
        }
        if !matches!(slot, Slot::Has(_)) {
            if connect(socket, &to).is_err() {
                release(socket);
                self.flows.borrow_mut().end(at);
                return;
            }
            // The kernel binds before it connects, and a stranger may have met the moment between.
            drain(socket);
        }
        let go = || send(socket, payload, SendFlags::NOSIGNAL);
        if go() == Err(Errno::CONNREFUSED) {
            // That is about an earlier one.
            self.nobody_listens(&flow);
            let _ = go();
        }
    }

    /// Gives the node the answers, and ends flows when their time is over. It returns with an error alone.
    pub async fn serve(self: Rc<Self>) -> io::Result<()> {
        let mut receivers = JoinSet::new();
        for at in 0..self.sockets.len() {
            receivers.spawn_local(self.clone().receive(at));
        }
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                Some(ended) = receivers.join_next() => return ended.map_err(io::Error::other)?,
                _ = look.tick() => {
                    let ended = self.flows.borrow_mut().expire(Instant::now());
                    ended.into_iter().for_each(|at| release(&self.sockets[at]));
                }
            }
        }
    }

    /// Gives the node what comes at a socket, whichever flow has it.
    async fn receive(self: Rc<Self>, at: usize) -> io::Result<()> {
        loop {
            let mut ready = self.sockets[at].ready(WATCHED).await?;
            if let Ok(Err(_)) = ready.try_io(|_| self.take(at)) {
                tokio::time::sleep(PAUSE).await;
            }
            consume_budget().await;
        }
    }

    /// Gives the node one datagram of its flow's far end, or the error that the far end sent.
    fn take(&self, at: usize) -> io::Result<()> {
        let mut received = self.received.borrow_mut();
        let result = recvfrom(&self.sockets[at], &mut received[..], RecvFlags::DONTWAIT);
        let mut flows = self.flows.borrow_mut();
        let Some(flow) = flows.of(at) else { return result.map(drop).map_err(io::Error::from) };
        match result {
            Ok((length, _, from)) => {
                let far_end = self.far_end(&flow).map(SocketAddr::V4);
                if from.and_then(|from| SocketAddr::try_from(from).ok()) == far_end {
                    flows.answered(at, Instant::now());
                    let mut frame = self.frame.borrow_mut();
                    frames::answer(&mut frame, &flow, &received[..length]);
                    (self.give)(&frame);
                }
            }
            Err(Errno::CONNREFUSED) => self.nobody_listens(&flow),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Returns where a flow leads on the machine's network; the gateway stands for who answers names.
    fn far_end(&self, flow: &Flow) -> Option<SocketAddrV4> {
        if *flow.to.ip() != GATEWAY {
            return Some(flow.to);
        }
        Some(SocketAddrV4::new(self.resolver?, flow.to.port()))
    }

    fn nobody_listens(&self, flow: &Flow) {
        let mut frame = self.frame.borrow_mut();
        frames::nobody_listens(&mut frame, flow);
        (self.give)(&frame);
    }
}

/// Gives the machine a socket's port back.
fn release(socket: &AsyncFd<OwnedFd>) {
    let _ = connect_unspec(socket);
    drain(socket);
}

/// Forgets what a socket has received.
fn drain(socket: &AsyncFd<OwnedFd>) {
    for _ in 0..LEFT_MAX {
        if recv(socket, &mut [0; 1], RecvFlags::DONTWAIT) == Err(Errno::AGAIN) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::getpeername;
    use tokio::task::LocalSet;

    use super::*;

    #[test]
    fn the_first_ipv4_name_server_is_asked() {
        let text = "# nameserver 10.0.0.1\nsearch x\nnameserver fd00::1\nnameserver\t127.0.0.53 \nnameserver 10.0.0.2";
        assert_eq!(resolver(text), Some(Ipv4Addr::new(127, 0, 0, 53)));
        assert_eq!(resolver("nameserver\nnameserverx 10.0.0.1\noptions 10.0.0.1"), None);
    }

    /// Frames that the node was given.
    type Frames = Rc<RefCell<Vec<Vec<u8>>>>;

    fn datagrams(resolver: Option<Ipv4Addr>) -> (Rc<Datagrams>, Frames) {
        let mut sockets = Sockets::open().unwrap();
        sockets.resolver = resolver;
        let given = Rc::new(RefCell::new(Vec::new()));
        let to = given.clone();
        let give = move |frame: &[u8]| to.borrow_mut().push(frame.to_vec());
        (Rc::new(Datagrams::new(sockets, give).unwrap()), given)
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            tokio::time::timeout(Duration::from_secs(20), test).await.expect("in time");
        });
    }

    /// A far end that waits a while for a datagram.
    fn far_end(at: &str) -> (std::net::UdpSocket, SocketAddrV4) {
        let socket = std::net::UdpSocket::bind((at, 0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let SocketAddr::V4(address) = socket.local_addr().unwrap() else { panic!("IPv4") };
        (socket, address)
    }

    async fn until(given: &RefCell<Vec<Vec<u8>>>, count: usize) -> Vec<Vec<u8>> {
        while given.borrow().len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        given.take()
    }

    fn payload(frame: &[u8]) -> &[u8] {
        &frame[42..]
    }

    #[test]
    fn only_the_far_end_answers_and_an_ended_flow_has_no_port() {
        run(async {
            let ((peer, to), (stranger, _)) = (far_end("127.0.0.1"), far_end("127.0.0.1"));
            let (datagrams, given) = datagrams(None);
            tokio::task::spawn_local(datagrams.clone().serve());
            let flow = Flow { port: 30_000, to };
            datagrams.send(flow, b"question", Instant::now());
            let mut buffer = [0; 100];
            let (length, from) = peer.recv_from(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"question");
            // The node's own port is nobody's on the machine.
            assert_ne!(from.port(), 30_000);
            drop(std::net::UdpSocket::bind("0.0.0.0:30000").unwrap());
            let _ = stranger.send_to(b"unasked", from);
            let answer = vec![7; 9_000];
            peer.send_to(&answer, from).unwrap();
            assert_eq!(payload(&until(&given, 1).await[0]), answer);
            let ended = datagrams.flows.borrow_mut().expire(Instant::now() + crate::flows::STREAM);
            ended.iter().for_each(|&at| release(&datagrams.sockets[at]));
            assert_eq!(ended.len(), 1);
            peer.send_to(b"late", from).unwrap();
            drop(std::net::UdpSocket::bind(("0.0.0.0", from.port())).unwrap());
            // Another flow gets the socket, and nothing of the one before.
            datagrams.send(Flow { port: 30_001, to }, b"another", Instant::now());
            let (_, from) = peer.recv_from(&mut buffer).unwrap();
            peer.send_to(b"its answer", from).unwrap();
            assert_eq!(payload(&until(&given, 1).await[0]), b"its answer");
        });
    }

    #[test]
    fn the_node_is_told_that_nobody_listens() {
        run(async {
            let (_, to) = far_end("127.0.0.1");
            let (datagrams, given) = datagrams(None);
            tokio::task::spawn_local(datagrams.clone().serve());
            let names = SocketAddrV4::new(GATEWAY, 53);
            for to in [to, names] {
                let flow = Flow { port: 30_000, to };
                datagrams.send(flow, b"question", Instant::now());
                let mut told = Vec::new();
                frames::nobody_listens(&mut told, &flow);
                assert_eq!(until(&given, 1).await, [told]);
            }
        });
    }

    #[test]
    fn names_are_asked_of_the_machines_resolver() {
        run(async {
            let (server, at) = far_end("127.0.0.53");
            let port = at.port();
            let (datagrams, given) = datagrams(Some(Ipv4Addr::new(127, 0, 0, 53)));
            tokio::task::spawn_local(datagrams.clone().serve());
            let flow = Flow { port: 30_000, to: SocketAddrV4::new(GATEWAY, port) };
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
    fn a_node_of_many_flows_has_so_many_sockets_and_leaves_others_their_half() {
        run(async {
            let (_peer, to) = far_end("127.0.0.1");
            let (mut datagrams, _) = datagrams(None);
            let count = |datagrams: &Datagrams| {
                let connected = |socket: &&AsyncFd<OwnedFd>| getpeername(socket).is_ok();
                datagrams.sockets.iter().filter(connected).count()
            };
            let before = datagrams.ports.in_use().unwrap();
            for port in 1..=1_000 {
                datagrams.send(Flow { port, to }, b"x", Instant::now());
            }
            assert_eq!(count(&datagrams), FLOWS_MAX);
            assert!(datagrams.ports.in_use().unwrap() >= FLOWS_MAX);
            assert!(before < FLOWS_MAX, "a machine with few sockets");
            let few = Rc::get_mut(&mut datagrams).unwrap();
            few.ports.most = 0;
            (0..FLOWS_MAX).for_each(|at| few.flows.borrow_mut().end(at));
            few.sockets.iter().for_each(release);
            for port in 1..=1_000 {
                datagrams.send(Flow { port, to }, b"x", Instant::now());
            }
            assert_eq!(count(&datagrams), FLOWS_SURE);
        });
    }
}
