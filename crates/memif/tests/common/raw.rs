//! A client that sends given messages, written from the protocol and not from our code.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use pdp_memif::{HandshakeError, Listener, MemifConnection};
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};

use super::common::soon;

/// Bytes of the region.
pub const SIZE: u64 = TO_SERVER + 0x10000;
/// Slots of each ring.
pub const SLOTS: u16 = 128;
pub const RING_LOG2: u8 = 7;
/// Offset of the ring to the server; buffers may lie anywhere.
pub const TO_SERVER: u64 = 0;
/// Offset of the ring to the client.
pub const TO_CLIENT: u64 = 0x1000;

/// Message and its descriptors.
#[derive(Clone, Debug)]
pub struct RawMessage {
    pub bytes: Vec<u8>,
    pub fds: Vec<std::sync::Arc<OwnedFd>>,
}

impl RawMessage {
    fn new(kind: u16, fields: &[&[u8]], fd: Option<OwnedFd>) -> Self {
        let mut bytes = kind.to_le_bytes().to_vec();
        fields.iter().for_each(|field| bytes.extend_from_slice(field));
        bytes.resize(128, 0);
        Self { bytes, fds: fd.into_iter().map(std::sync::Arc::new).collect() }
    }
}

pub fn init(version: u16, id: u32, mode: u8) -> RawMessage {
    RawMessage::new(3, &[&version.to_le_bytes(), &id.to_le_bytes(), &[mode]], None)
}

pub fn region(index: u16, size: u64, fd: Option<OwnedFd>) -> RawMessage {
    RawMessage::new(4, &[&index.to_le_bytes(), &size.to_le_bytes()], fd)
}

pub fn ring(
    to_server: bool,
    index: u16,
    region: u16,
    offset: u32,
    log2: u8,
    fd: Option<OwnedFd>,
) -> RawMessage {
    let flags = u16::from(to_server).to_le_bytes();
    let fields: [&[u8]; 5] =
        [&flags, &index.to_le_bytes(), &region.to_le_bytes(), &offset.to_le_bytes(), &[log2]];
    RawMessage::new(5, &fields, fd)
}

pub fn connect() -> RawMessage {
    RawMessage::new(6, &[b"raw"], None)
}

/// Message of a type without relevant fields.
pub fn bare(kind: u16) -> RawMessage {
    RawMessage::new(kind, &[], None)
}

pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

/// A memfd with both rings initialised, with the given seals.
pub fn memory(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("raw", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    for at in [TO_SERVER, TO_CLIENT] {
        write(&fd, at, &0x3E31F20u32.to_le_bytes());
    }
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

pub fn write(memory: &OwnedFd, at: u64, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(memory, bytes, at).unwrap(), bytes.len());
}

pub fn read16(memory: &OwnedFd, at: u64) -> u16 {
    let mut bytes = [0; 2];
    assert_eq!(rustix::io::pread(memory, &mut bytes, at).unwrap(), 2);
    u16::from_le_bytes(bytes)
}

pub fn set_head(memory: &OwnedFd, ring: u64, head: u16) {
    write(memory, ring + 6, &head.to_le_bytes());
}

pub fn set_descriptor(
    memory: &OwnedFd,
    ring: u64,
    slot: u16,
    (flags, region, length, offset): (u16, u16, u32, u32),
) {
    let mut bytes = Vec::new();
    bytes.extend(flags.to_le_bytes());
    bytes.extend(region.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    write(memory, ring + 128 + 16 * u64::from(slot % SLOTS), &bytes);
}

/// Messages of a valid client, and its memory.
pub fn honest() -> (Vec<RawMessage>, OwnedFd) {
    let memory = memory(SIZE, SealFlags::SHRINK);
    let messages = vec![
        init(0x200, 1, 0),
        region(0, SIZE, Some(memory.try_clone().unwrap())),
        ring(true, 0, 0, TO_SERVER as u32, RING_LOG2, Some(eventfd())),
        ring(false, 0, 0, TO_CLIENT as u32, RING_LOG2, Some(eventfd())),
        connect(),
    ];
    (messages, memory)
}

pub fn socket(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// Sends a message. False if the server has hung up.
pub fn send_one(socket: &OwnedFd, message: &RawMessage) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(|fd| fd.as_fd()).collect();
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let flags = SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(&message.bytes)], &mut control, flags).is_ok()
}

/// Sends all messages and hangs up. Returns the socket and the server's result.
pub fn send_all(
    listener: &Listener,
    path: &Path,
    messages: &[RawMessage],
) -> (OwnedFd, Result<MemifConnection, HandshakeError>) {
    let socket = socket(path);
    let mut handshake = soon("accept", || listener.accept().unwrap());
    for message in messages {
        if !send_one(&socket, message) {
            break;
        }
        match handshake.poll(|_| true) {
            Ok(None) => {}
            Ok(Some(connection)) => return (socket, Ok(connection)),
            Err(error) => return (socket, Err(error)),
        }
    }
    rustix::net::shutdown(&socket, rustix::net::Shutdown::Write).unwrap();
    let result = soon("an end", || handshake.poll(|_| true).transpose());
    (socket, result)
}
