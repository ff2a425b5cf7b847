//! Connected sockets on the machine for a node's flows by one protocol.
//!
//! Only the far end that the node sent to can answer: each flow has a connected socket of its own, at a port or an
//! identifier that the machine's kernel chose. The sockets are made before the helper enters the node's namespace,
//! since a socket stays where it was made; a flow that ends gives its socket back. [`Share`] bounds what a node takes
//! of the machine's ports and identifiers.

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

use crate::flows::{Flow, Flows, Slot};
use crate::frames::PAYLOAD_MAX;
use crate::share::Share;

/// Time between two looks for flows that are over, and for more of them than the node may have by now.
const LOOK: Duration = Duration::from_secs(5);

/// Pause after a failure that is not one flow's (memory).
const PAUSE: Duration = Duration::from_millis(100);

/// Messages that a socket can have when its flow ends.
const LEFT_MAX: usize = 1 << 16;

/// A connected socket tells an error of the far end, and nothing to read.
const WATCHED: Interest = Interest::READABLE.add(Interest::ERROR);

/// What differs between the protocols of flows.
pub trait Protocol {
    /// Time without an answer after which a flow ends that was answered for a while.
    const STREAM: Duration;

    /// Returns where a flow leads on the machine's network, or `None` if nobody is there.
    fn far_end(&self, flow: &Flow) -> Option<SocketAddrV4> {
        Some(flow.to)
    }

    /// Writes the frame that brings the node what the far end sent; false: that is no answer.
    fn answer(&self, frame: &mut Vec<u8>, flow: &Flow, message: &[u8]) -> bool;

    /// Writes the frame that tells the node that nobody listens at the far end; false: there is none.
    fn nobody_listens(&self, frame: &mut Vec<u8>, flow: &Flow) -> bool;
}

/// Unconnected sockets in the machine's network namespace, one for each flow.
pub struct Sockets<P> {
    /// The sockets.
    pub sockets: Vec<OwnedFd>,
    /// What the node may have of their ports or identifiers.
    pub share: Share,
    /// Their protocol.
    pub protocol: P,
}

/// Takes frames for the node.
type Give = Box<dyn Fn(&[u8])>;

/// Flows of the node by one protocol, and their sockets.
pub struct Connected<P> {
    sockets: Vec<AsyncFd<OwnedFd>>,
    flows: RefCell<Flows>,
    share: Share,
    protocol: P,
    give: Give,
    received: RefCell<Vec<u8>>,
    frame: RefCell<Vec<u8>>,
}

impl<P: Protocol + 'static> Connected<P> {
    /// `give` takes frames for the node.
    pub fn new(sockets: Sockets<P>, give: impl Fn(&[u8]) + 'static) -> io::Result<Self> {
        let Sockets { sockets, share, protocol } = sockets;
        #[expect(deprecated, reason = "what replaces it is unsafe; a socket keeps its descriptor")]
        let watched = |socket| AsyncFd::with_interest(socket, WATCHED);
        let sockets: Vec<_> = sockets.into_iter().map(watched).collect::<io::Result<_>>()?;
        let flows = RefCell::new(Flows::new(sockets.len(), P::STREAM));
        let (received, frame) = (RefCell::new(vec![0; PAYLOAD_MAX]), RefCell::default());
        Ok(Self { sockets, flows, share, protocol, give: Box::new(give), received, frame })
    }

    /// Sends a message of the node; it is dropped where the socket has no room for it.
    pub fn send(&self, flow: Flow, message: &[u8], now: Instant) {
        let Some(to) = self.protocol.far_end(&flow) else { return self.nobody_listens(&flow) };
        let slot = self.flows.borrow_mut().sent(flow, now, |flows| self.share.has_room(flows));
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
        let go = || send(socket, message, SendFlags::NOSIGNAL);
        match go() {
            Ok(_) | Err(Errno::AGAIN) => {}
            // The error is about an earlier one.
            Err(error) => {
                if error == Errno::CONNREFUSED {
                    self.nobody_listens(&flow);
                }
                let _ = go();
            }
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
                _ = look.tick() => self.look(Instant::now()),
            }
        }
    }

    /// Ends the flows that are over, and those that others' share leaves no room for any more.
    fn look(&self, now: Instant) {
        let mut flows = self.flows.borrow_mut();
        flows.expire(now).into_iter().for_each(|at| release(&self.sockets[at]));
        while self.share.is_exceeded(flows.count()) {
            let Some(at) = flows.end_least_recent() else { return };
            release(&self.sockets[at]);
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

    /// Gives the node one message of its flow's far end, or the error that the far end sent.
    fn take(&self, at: usize) -> io::Result<()> {
        let mut received = self.received.borrow_mut();
        let result = recvfrom(&self.sockets[at], &mut received[..], RecvFlags::DONTWAIT);
        let mut flows = self.flows.borrow_mut();
        let Some(flow) = flows.of(at) else { return result.map(drop).map_err(io::Error::from) };
        match result {
            Ok((length, _, from)) => {
                // A ping socket has what anybody sends to its identifier.
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

    fn nobody_listens(&self, flow: &Flow) {
        let mut frame = self.frame.borrow_mut();
        if self.protocol.nobody_listens(&mut frame, flow) {
            (self.give)(&frame);
        }
    }
}

/// Gives the machine a socket's port or identifier back.
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

/// What tests of protocols share.
#[cfg(test)]
pub mod testing {
    use rustix::net::getsockname;
    use tokio::task::LocalSet;

    use super::*;

    /// Frames that the node was given.
    pub type Frames = Rc<RefCell<Vec<Vec<u8>>>>;

    /// Flows by these sockets, and what the node is given.
    pub fn connected<P: Protocol + 'static>(sockets: Sockets<P>) -> (Rc<Connected<P>>, Frames) {
        let given = Rc::new(RefCell::new(Vec::new()));
        let to = given.clone();
        let give = move |frame: &[u8]| to.borrow_mut().push(frame.to_vec());
        (Rc::new(Connected::new(sockets, give).unwrap()), given)
    }

    /// Runs a test as the helper runs.
    pub fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            tokio::time::timeout(Duration::from_secs(20), test).await.expect("in time");
        });
    }

    /// Waits until the node was given so many frames.
    pub async fn until(given: &RefCell<Vec<Vec<u8>>>, count: usize) -> Vec<Vec<u8>> {
        while given.borrow().len() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        given.take()
    }

    impl<P: Protocol + 'static> Connected<P> {
        /// Its share.
        pub fn share(&mut self) -> &mut Share {
            &mut self.share
        }

        /// Ends the flows that would be over after so long.
        pub fn look_after(&self, time: Duration) {
            self.look(Instant::now() + time);
        }

        /// Sockets that have a port or an identifier.
        pub fn count(&self) -> usize {
            let number = |socket: &AsyncFd<OwnedFd>| {
                SocketAddr::try_from(getsockname(socket).unwrap()).unwrap().port()
            };
            self.sockets.iter().filter(|socket| number(socket) != 0).count()
        }
    }
}
