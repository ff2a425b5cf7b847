//! Netlink conversations: in the calling thread's network
//! namespace, or over sockets that stay in their own.

use std::fs::File;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    socket,
};
use rtnetlink::Handle;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;

use crate::error::{Error, NetContext, Result};
use crate::netns::{in_thread, within};

/// Runs `work` with a netlink handle to completion, in a thread of its own. Callers may be inside a
/// runtime, which cannot contain another one.
pub(crate) fn run_in_thread<T: Send, F: Future<Output = Result<T>>>(
    work: impl FnOnce(Handle) -> F + Send,
) -> Result<T> {
    in_thread(|| converse_here(work))
}

fn converse_here<T, F: Future<Output = Result<T>>>(work: impl FnOnce(Handle) -> F) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .on("start", "a netlink conversation")?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().on("open", "rtnetlink")?;
        let connection = tokio::spawn(connection);
        let result = work(handle).await;
        connection.abort();
        result
    })
}

/// Adds the operation and its object to an error from the kernel.
pub(crate) fn refused(
    what: &'static str,
    object: impl ToString,
) -> impl FnOnce(rtnetlink::Error) -> Error {
    let object = object.to_string();
    move |error| {
        let source = match &error {
            rtnetlink::Error::NetlinkError(message) => message.to_io(),
            _ => io::Error::other(error.to_string()),
        };
        Error::Io { what, object, source }
    }
}

/// Longer than any datagram of the kernel.
const DATAGRAM_BYTES: usize = 64 << 10;

/// Pool of netlink sockets in the network namespace where the first one was opened, usable from any
/// namespace. A request takes two system calls, and never waits for another thread's.
#[derive(Debug)]
pub(crate) struct NetlinkPool {
    netns: OwnedFd,
    /// Idle sockets: as many as were ever in use at the same time.
    idle: Mutex<Vec<RequestSocket>>,
}

#[derive(Debug)]
struct RequestSocket {
    socket: OwnedFd,
    /// Number of the last request.
    number: u32,
    buffer: Vec<u8>,
}

impl RequestSocket {
    /// Opens a socket in the calling thread's network namespace.
    fn open() -> Result<Self> {
        let kind = SockProtocol::NetlinkRoute;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, kind)
            .on("open", "rtnetlink")?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0)).on("open", "rtnetlink")?;
        Ok(Self { socket, number: 0, buffer: vec![0; DATAGRAM_BYTES] })
    }

    fn ask(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        let Self { socket, number, buffer } = self;
        *number = number.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.sequence_number = *number;
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        send(socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        let mut answers = Vec::new();
        loop {
            let count = recv(socket.as_raw_fd(), buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..count];
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(io::Error::other)?;
                let length = (message.header.length as usize).next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
                if message.header.sequence_number != *number {
                    // Answer to an earlier request that was not read completely.
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(answer) => answers.push(answer),
                    NetlinkPayload::Done(_) => return Ok(answers),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(answers),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    _ => {}
                }
            }
        }
    }
}

impl NetlinkPool {
    /// Opens the pool in the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        let netns = File::open("/proc/thread-self/ns/net").on("open", "the network namespace")?;
        Ok(Self { netns: netns.into(), idle: Mutex::new(vec![RequestSocket::open()?]) })
    }

    /// Sends `message` with these flags beside the common ones, and returns the kernel's answers.
    pub(crate) fn exchange(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        let idle = self.idle().pop();
        let mut asking = match idle {
            Some(asking) => asking,
            None => within(self.netns.as_fd(), RequestSocket::open).map_err(io::Error::other)?,
        };
        let answers = asking.ask(message, flags);
        self.idle().push(asking);
        answers
    }

    fn idle(&self) -> MutexGuard<'_, Vec<RequestSocket>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
