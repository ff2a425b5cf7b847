//! The listening side, which trusts nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::memory::Mapping;
use crate::message::{AddRing, Hello, Init, MODE_ETHERNET, Message, VERSION};
use crate::receiver::Receiver;
use crate::ring::{Regions, Ring};
use crate::sender::Sender;
use crate::seqpacket::{self, ReceivedMessage};
use crate::sigbus::RegionQuota;
use crate::{Bell, HANDSHAKE_MS_MAX, REGION_BYTES_MAX, REGIONS_MAX, RING_LOG2_MAX};

/// Name that the server sends.
const NAME: &str = "pdp";

/// Reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// A system call failed.
    #[error("memif handshake")]
    Io(#[from] io::Error),
    /// The peer broke the protocol; the server has told it so.
    #[error("memif peer refused: {0}")]
    Refused(&'static str),
    /// The peer gave up.
    #[error("memif peer left: {0}")]
    Disconnected(String),
}

/// Reason why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memif peer left: {reason}")]
pub struct Closed {
    /// The peer's message, or why the server considers it gone.
    pub reason: String,
}

/// Listens at a path.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// Listens at `path` and replaces any earlier listener there. Every process that may enter the
    /// directory may connect. Never blocks afterwards. The file stays when this is dropped.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Ok(Self { socket: seqpacket::listen(path)? })
    }

    /// Takes over a listening socket (SOCK_SEQPACKET, non-blocking).
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Accepts the next waiting client, if any.
    pub fn accept(&self) -> io::Result<Option<Handshake>> {
        self.accept_for(&Arc::default(), REGIONS_MAX)
    }

    /// Like [`Self::accept`], but the client may have
    /// `regions_max` regions, which count for `share`.
    pub fn accept_for(
        &self,
        share: &Arc<RegionQuota>,
        regions_max: usize,
    ) -> io::Result<Option<Handshake>> {
        let Some(socket) = seqpacket::accept(self.socket.as_fd())? else { return Ok(None) };
        let hello = Message::Hello(Hello {
            name: NAME.into(),
            version_min: VERSION,
            version_max: VERSION,
            region_max: regions_max.min(REGIONS_MAX) as u16 - 1,
            ring_to_client_max: 0,
            ring_to_server_max: 0,
            ring_log2_max: RING_LOG2_MAX,
        });
        // If the peer is already gone, the first poll shows it.
        let _ = seqpacket::send(&socket, &hello, None);
        Ok(Some(Handshake {
            socket: Arc::new(socket),
            since: Instant::now(),
            share: share.clone(),
            regions_max: regions_max.min(REGIONS_MAX),
            init: None,
            regions: Vec::new(),
            to_client: None,
            to_server: None,
        }))
    }
}

impl From<Listener> for OwnedFd {
    fn from(listener: Listener) -> Self {
        listener.socket
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Client during its handshake.
#[derive(Debug)]
pub struct Handshake {
    socket: Arc<OwnedFd>,
    since: Instant,
    share: Arc<RegionQuota>,
    regions_max: usize,
    init: Option<Init>,
    regions: Vec<Mapping>,
    to_client: Option<(AddRing, Bell)>,
    to_server: Option<(AddRing, Bell)>,
}

impl Handshake {
    /// Handles the messages received so far, without blocking. Call it
    /// when the descriptor is readable and at intervals: it fails once
    /// the handshake takes longer than [`HANDSHAKE_MS_MAX`].
    ///
    /// `accepts` returns true if the requested interface id may connect now. Two clients may be in
    /// their handshake with the same id: check again when the connection is complete. Drop the
    /// handshake after `Ok(Some(_))` or an error.
    pub fn poll(
        &mut self,
        accepts: impl FnOnce(u32) -> bool,
    ) -> Result<Option<MemifConnection>, HandshakeError> {
        let mut accepts = Some(accepts);
        let mut accept = |id| accepts.take().is_some_and(|accepts| accepts(id));
        // Terminates: it accepts no type of message more often than there are regions.
        loop {
            let (message, fd) = match seqpacket::receive(&*self.socket)? {
                ReceivedMessage::Message(message, fd) => (message, fd),
                ReceivedMessage::End => return Err(HandshakeError::Disconnected("hung up".into())),
                ReceivedMessage::Bad(why) => return Err(self.refuse(why)),
                ReceivedMessage::Nothing => {
                    if self.since.elapsed() > Duration::from_millis(HANDSHAKE_MS_MAX) {
                        return Err(self.refuse("handshake takes too long"));
                    }
                    return Ok(None);
                }
            };
            match message {
                Message::Disconnect { reason } => return Err(HandshakeError::Disconnected(reason)),
                Message::Connect { name } => match self.connect(name) {
                    Ok(connection) => {
                        let connected = Message::Connected { name: NAME.into() };
                        seqpacket::send(&*self.socket, &connected, None)?;
                        return Ok(Some(connection));
                    }
                    Err(why) => return Err(self.refuse(why)),
                },
                message => match self.step(message, fd, &mut accept) {
                    Ok(()) => seqpacket::send(&*self.socket, &Message::Ack, None)?,
                    Err(why) => return Err(self.refuse(why)),
                },
            }
        }
    }

    /// Reports the client's error to it.
    fn refuse(&self, why: &'static str) -> HandshakeError {
        let _ = seqpacket::send(&*self.socket, &Message::Disconnect { reason: why.into() }, None);
        HandshakeError::Refused(why)
    }

    fn step(
        &mut self,
        message: Message,
        fd: Option<OwnedFd>,
        accept: &mut impl FnMut(u32) -> bool,
    ) -> Result<(), &'static str> {
        match message {
            Message::Init(init) if self.init.is_none() => {
                if init.version != VERSION {
                    return Err("only memif version 2.0");
                }
                if init.mode != MODE_ETHERNET {
                    return Err("only ethernet mode");
                }
                if !accept(init.interface_id) {
                    return Err("no such interface, or connected already");
                }
                self.init = Some(init);
                Ok(())
            }
            Message::AddRegion { index, size } if self.init.is_some() => {
                self.add_region(index, size, fd.ok_or("region without descriptor")?)
            }
            Message::AddRing(ring) if self.init.is_some() => {
                self.add_ring(ring, fd.ok_or("ring without descriptor")?)
            }
            _ => Err("unexpected message"),
        }
    }

    fn add_region(&mut self, index: u16, size: u64, fd: OwnedFd) -> Result<(), &'static str> {
        if usize::from(index) != self.regions.len() || self.regions.len() == self.regions_max {
            return Err("region index out of order or too many");
        }
        let mapped: u64 = self.regions.iter().map(|region| region.bytes() as u64).sum();
        if size == 0 || size > REGION_BYTES_MAX - mapped {
            return Err("region is empty or too large");
        }
        self.regions.push(Mapping::of_peer(fd.as_fd(), size, &self.share)?);
        Ok(())
    }

    fn add_ring(&mut self, ring: AddRing, fd: OwnedFd) -> Result<(), &'static str> {
        if ring.index != 0 {
            return Err("more than one ring per direction");
        }
        if ring.ring_log2 > RING_LOG2_MAX {
            return Err("ring with too many slots");
        }
        let bell = Bell::of_peer(fd).ok_or("doorbell can't be rung: not an eventfd")?;
        let place = if ring.to_server { &mut self.to_server } else { &mut self.to_client };
        if place.is_some() {
            return Err("ring added twice");
        }
        *place = Some((ring, bell));
        Ok(())
    }

    /// Builds the connection from the announced regions and rings.
    fn connect(&mut self, interface_name: String) -> Result<MemifConnection, &'static str> {
        let (Some(init), Some(to_client), Some(to_server)) =
            (self.init.take(), self.to_client.take(), self.to_server.take())
        else {
            return Err("connect before init and both rings");
        };
        let regions: Regions = std::mem::take(&mut self.regions).into();
        let ring = |ring: AddRing| {
            let (region, offset) = (ring.region.into(), ring.offset as usize);
            Ring::new(regions.clone(), region, offset, 1 << ring.ring_log2)
                .filter(Ring::has_cookie)
                .ok_or("ring out of its region, unaligned or without cookie")
        };
        Ok(MemifConnection {
            interface_id: init.interface_id,
            name: init.name,
            interface_name,
            tx: Sender::new(ring(to_client.0)?, to_client.1),
            rx: Receiver::new(ring(to_server.0)?, to_server.1),
            control: MemifControl { socket: self.socket.clone() },
        })
    }
}

impl AsFd for Handshake {
    /// The socket. The connection's [`MemifControl`] uses the same descriptor.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connected client.
#[derive(Debug)]
pub struct MemifConnection {
    /// The interface id that the client asked for.
    pub interface_id: u32,
    /// Name that the client sent: printable ASCII, at most 32 bytes.
    pub name: String,
    /// Interface name that the client sent: printable ASCII, at most 32 bytes.
    pub interface_name: String,
    /// Frames to the client.
    pub tx: Sender,
    /// Frames from the client.
    pub rx: Receiver,
    /// The control socket. Keep it: dropping it (and the
    /// handshake) tells the client that the server is gone.
    pub control: MemifControl,
}

/// Control socket of a connection. Readable when the client has left.
#[derive(Debug)]
pub struct MemifControl {
    socket: Arc<OwnedFd>,
}

impl MemifControl {
    /// Fails if the client is gone. Never blocks.
    pub fn check(&mut self) -> Result<(), Closed> {
        let reason = match seqpacket::receive(&*self.socket) {
            Ok(ReceivedMessage::Nothing) => return Ok(()),
            Ok(ReceivedMessage::Message(Message::Disconnect { reason }, _)) => reason,
            Ok(ReceivedMessage::Message(..)) => "unexpected message".into(),
            Ok(ReceivedMessage::End) => "hung up".into(),
            Ok(ReceivedMessage::Bad(why)) => why.into(),
            Err(error) => error.to_string(),
        };
        Err(Closed { reason })
    }

    /// Sends the client the reason (the first 95 bytes of ASCII), and closes.
    pub fn disconnect(self, reason: &str) {
        let bye = Message::Disconnect { reason: reason.into() };
        // A client that does not read sees the socket close.
        let _ = seqpacket::send(&*self.socket, &bye, None);
    }
}

impl AsFd for MemifControl {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
