//! Connected sockets on the machine for a node's flows by one protocol.
//!
//! Only the far end that the node addressed can answer. Each flow has its own connected socket, at
//! a port or an identifier that the machine's kernel chose. A socket stays in the namespace where
//! it was made, so the helper makes all of them before it enters the node's. A flow that ends
//! returns its socket. [`FlowQuota`] limits the node's use of the machine's ports and identifiers.

use std::cell::RefCell;
use std::io;
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, connect, connect_unspec, recv, recvfrom, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;
use tokio::task::coop::consume_budget;

use crate::flows::{FlowSlot, Flows, OutboundFlow};
use crate::frames::PAYLOAD_MAX;
use crate::number_share::FlowQuota;

/// Time between two checks for expired flows, and for flows beyond the node's current quota.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Pause after a failure that is not specific to one flow (memory).
const PAUSE: Duration = Duration::from_millis(100);

/// Most messages that a socket can hold when its flow ends.
const LEFT_MAX: usize = 1 << 16;

/// A connected socket reports an error of the far end, but is then not readable.
const WATCHED: Interest = Interest::READABLE.add(Interest::ERROR);

/// Differences between the protocols of flows.
pub trait Protocol {
    /// Time without an answer after which an established flow ends.
    const STREAM: Duration;

    /// Destination of a flow on the machine's network; `None` if there is none.
    fn far_end(&self, flow: &OutboundFlow) -> Option<SocketAddrV4> {
        Some(flow.to)
    }

    /// Writes the frame that delivers the far end's message to the node. False if it is no answer.
    fn answer(&self, frame: &mut Vec<u8>, flow: &OutboundFlow, message: &[u8]) -> bool;

    /// Writes the frame that reports a closed port at the far end. False if there is none.
    fn nobody_listens(&self, frame: &mut Vec<u8>, flow: &OutboundFlow) -> bool;
}

/// Unconnected sockets in the machine's network namespace, one for each flow.
pub struct Sockets<P> {
    /// The sockets.
    pub sockets: Vec<OwnedFd>,
    /// Quota of their ports or identifiers.
    pub quota: FlowQuota,
    /// Their protocol.
    pub protocol: P,
}

/// Function that delivers a frame to the node.
type Give = Box<dyn Fn(&[u8])>;

/// Flows of the node by one protocol, and their sockets.
pub struct FlowSockets<P> {
    sockets: Vec<AsyncFd<OwnedFd>>,
    flows: RefCell<Flows>,
    quota: FlowQuota,
    protocol: P,
    give: Give,
    received: RefCell<Vec<u8>>,
    frame: RefCell<Vec<u8>>,
}

impl<P: Protocol + 'static> FlowSockets<P> {
    /// `give` delivers frames to the node.
    pub fn new(sockets: Sockets<P>, give: impl Fn(&[u8]) + 'static) -> io::Result<Self> {
        let Sockets { sockets, quota, protocol } = sockets;
        #[expect(deprecated, reason = "what replaces it is unsafe; a socket keeps its descriptor")]
        let watched = |socket| AsyncFd::with_interest(socket, WATCHED);
        let sockets: Vec<_> = sockets.into_iter().map(watched).collect::<io::Result<_>>()?;
        let flows = RefCell::new(Flows::new(sockets.len(), P::STREAM));
        let (received, frame) = (RefCell::new(vec![0; PAYLOAD_MAX]), RefCell::default());
        Ok(Self { sockets, flows, quota, protocol, give: Box::new(give), received, frame })
    }

    /// Sends a message of the node. It is dropped if the socket is full.
    pub fn send(&self, flow: OutboundFlow, message: &[u8], now: Instant) {
        let Some(to) = self.protocol.far_end(&flow) else { return self.nobody_listens(&flow) };
        let slot = self.flows.borrow_mut().sent(flow, now, |flows| self.quota.allows(flows));
        let (FlowSlot::Has(at) | FlowSlot::Gets(at) | FlowSlot::Takes(at)) = slot;
        let socket = &self.sockets[at];
        if let FlowSlot::Takes(_) = slot {
            release(socket);
        }
        if !matches!(slot, FlowSlot::Has(_)) {
            if connect(socket, &to).is_err() {
                release(socket);
                self.flows.borrow_mut().end(at);
                return;
            }
            // The kernel binds before it connects; in between, the
            // socket may have received a stranger's message.
            drain(socket);
        }
        let go = || send(socket, message, SendFlags::NOSIGNAL);
        match go() {
            Ok(_) | Err(Errno::AGAIN) => {}
            // The error is about an earlier message.
            Err(error) => {
                if error == Errno::CONNREFUSED {
                    self.nobody_listens(&flow);
                }
                let _ = go();
            }
        }
    }

    /// Delivers answers to the node, and ends flows when
    /// their time is over. Only returns with an error.
    pub async fn serve(self: Rc<Self>) -> io::Result<()> {
        let mut receivers = JoinSet::new();
        for at in 0..self.sockets.len() {
            receivers.spawn_local(self.clone().receive(at));
        }
        let mut check = tokio::time::interval(CHECK_INTERVAL);
        loop {
            tokio::select! {
                Some(ended) = receivers.join_next() => return ended.map_err(io::Error::other)?,
                _ = check.tick() => self.end_excess(Instant::now()),
            }
        }
    }

    /// Ends expired flows, and flows beyond the current quota.
    fn end_excess(&self, now: Instant) {
        let mut flows = self.flows.borrow_mut();
        flows.expire(now).into_iter().for_each(|at| release(&self.sockets[at]));
        while self.quota.is_exceeded(flows.count()) {
            let Some(at) = flows.end_least_recent() else { return };
            release(&self.sockets[at]);
        }
    }

    /// Delivers all messages received at a socket, of any flow.
    async fn receive(self: Rc<Self>, at: usize) -> io::Result<()> {
        loop {
            let mut ready = self.sockets[at].ready(WATCHED).await?;
            if let Ok(Err(_)) = ready.try_io(|_| self.deliver(at)) {
                tokio::time::sleep(PAUSE).await;
            }
            consume_budget().await;
        }
    }

    /// Delivers one message or error of the flow's far end to the node.
    fn deliver(&self, at: usize) -> io::Result<()> {
        let mut received = self.received.borrow_mut();
        let result = recvfrom(&self.sockets[at], &mut received[..], RecvFlags::DONTWAIT);
        let mut flows = self.flows.borrow_mut();
        let Some(flow) = flows.of(at) else { return result.map(drop).map_err(io::Error::from) };
        match result {
            Ok((length, _, from)) => {
                // A ping socket receives messages of any sender to its identifier.
                let far_end = self.protocol.far_end(&flow).map(SocketAddr::V4);
                let mut frame = self.frame.borrow_mut();
                if from.and_then(|from| SocketAddr::try_from(from).ok()) == far_end
                    && self.protocol.answer(&mut frame, &flow, &received[..length])
                {
                    flows.answered(at, Instant::now());
                    (self.give)(&frame);
                }
            }
            Err(Errno::CONNREFUSED) => self.nobody_listens(&flow),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn nobody_listens(&self, flow: &OutboundFlow) {
        let mut frame = self.frame.borrow_mut();
        if self.protocol.nobody_listens(&mut frame, flow) {
            (self.give)(&frame);
        }
    }
}

/// Returns a socket's port or identifier to the machine.
fn release(socket: &AsyncFd<OwnedFd>) {
    let _ = connect_unspec(socket);
    drain(socket);
}

/// Discards a socket's received messages.
fn drain(socket: &AsyncFd<OwnedFd>) {
    for _ in 0..LEFT_MAX {
        if recv(socket, &mut [0; 1], RecvFlags::DONTWAIT) == Err(Errno::AGAIN) {
            return;
        }
    }
}

/// Helpers for the tests of protocols.
#[cfg(test)]
pub mod testing {
    use rustix::net::getsockname;
    use tokio::task::LocalSet;

    use super::*;

    /// Frames delivered to the node.
    pub type Frames = Rc<RefCell<Vec<Vec<u8>>>>;

    /// Returns flows with these sockets, and the frames delivered to the node.
    pub fn connected<P: Protocol + 'static>(sockets: Sockets<P>) -> (Rc<FlowSockets<P>>, Frames) {
        let given = Rc::new(RefCell::new(Vec::new()));
        let to = given.clone();
        let give = move |frame: &[u8]| to.borrow_mut().push(frame.to_vec());
        (Rc::new(FlowSockets::new(sockets, give).unwrap()), given)
    }

    /// Runs a test like the helper runs.
    pub fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            tokio::time::timeout(Duration::from_secs(20), test).await.expect("in time");
        });
    }

    /// Waits until the node was given `count` frames.
    pub async fn until(given: &RefCell<Vec<Vec<u8>>>, count: usize) -> Vec<Vec<u8>> {
        while given.borrow().len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        given.take()
    }

    impl<P: Protocol + 'static> FlowSockets<P> {
        /// The quota.
        pub fn quota_mut(&mut self) -> &mut FlowQuota {
            &mut self.quota
        }

        /// Ends the flows that will have expired after `time`.
        pub fn end_expired(&self, time: Duration) {
            self.end_excess(Instant::now() + time);
        }

        /// Number of sockets with a port or an identifier.
        pub fn count(&self) -> usize {
            let number = |socket: &AsyncFd<OwnedFd>| {
                SocketAddr::try_from(getsockname(socket).unwrap()).unwrap().port()
            };
            self.sockets.iter().filter(|socket| number(socket) != 0).count()
        }
    }
}
