//! memif: a hostile client, a hostile server, and shared memory with arbitrary contents.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pdp_memif::{
    ConnectionState, Listener, MemifClient, MemifConnection, MemifSettings, ProtocolViolation,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use crate::input::FuzzInput;
use raw::{
    RING_LOG2, RawMessage, SIZE, SLOTS, TO_CLIENT, TO_SERVER, eventfd, honest, send_all, send_one,
};

#[path = "../../memif/tests/common/mod.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../memif/tests/common/raw.rs"]
#[allow(dead_code)]
mod raw;

/// Messages of one client or server.
const MESSAGES_MAX: usize = 24;

/// Rings small enough that a fuzzer fills them.
const SMALL: MemifSettings =
    MemifSettings { ring_log2: 3, buffer_bytes: 128, headroom_bytes: 64, buffers: 80 };

struct MemifTestServer {
    _directory: tempfile::TempDir,
    path: PathBuf,
    listener: Listener,
}

thread_local! {
    static PLACE: MemifTestServer = {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("memif.sock");
        let listener = Listener::bind(&path).expect("a socket");
        MemifTestServer { _directory: directory, path, listener }
    };
    static SPACE: RefCell<Vec<u8>> = RefCell::new(vec![0; 1 << 17]);
}

/// One message of 0 to 256 bytes: a valid one, changed or cut, or noise.
fn message(input: &mut FuzzInput<'_>, honest: &[RawMessage], memory: &OwnedFd) -> RawMessage {
    let which = input.byte();
    let mut changed = match honest.get(usize::from(which & 7)) {
        Some(changed) => changed.clone(),
        None => RawMessage { bytes: vec![0; 128], fds: vec![] },
    };
    for _ in 0..which >> 5 {
        let (at, value) = (input.byte(), input.byte());
        if let Some(byte) = changed.bytes.get_mut(usize::from(at)) {
            *byte = value;
        }
    }
    match which >> 3 & 3 {
        1 => changed.bytes.resize(input.byte().into(), 0),
        2 => {
            changed.fds = match input.byte() % 4 {
                0 => vec![],
                1 => vec![Arc::new(eventfd())],
                2 => vec![Arc::new(memory.try_clone().expect("a descriptor"))],
                _ => vec![Arc::new(eventfd()), Arc::new(eventfd())],
            }
        }
        _ => {}
    }
    if changed.bytes.is_empty() {
        changed.bytes.push(0); // no bytes are how a socket ends
    }
    changed
}

/// Uses a connection once in all ways that a mux does.
fn exercise(server: &mut MemifConnection) -> Result<(), ProtocolViolation> {
    SPACE.with_borrow_mut(|space| {
        server.rx.poll()?;
        for _ in 0..32 {
            let Some(frame) = server.rx.take()? else { break };
            let length = frame.len();
            assert!(length <= SIZE as usize * pdp_memif::CHAIN_SLOTS_MAX);
            let kept = length.min(space.len());
            assert_eq!(frame.copy_to(&mut space[..kept]), kept);
            frame.metadata();
        }
        server.rx.release();
        assert!(server.tx.room()? <= usize::from(u16::MAX));
        for length in [0, 60, 1500, 9000] {
            server.tx.push(1, &space[..length])?;
        }
        server.rx.arm();
        server.rx.disarm();
        server.tx.flush()
    })
}

/// A hostile client. It ends with a refusal, or with a connection with valid rings.
pub(crate) fn server(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let (honest, memory) = honest();
    let mut messages = Vec::new();
    // Some messages are valid, so that the others get further.
    let start = usize::from(input.byte() % 6);
    messages.extend(honest.iter().take(start).cloned());
    while !input.is_empty() && messages.len() < MESSAGES_MAX {
        messages.push(message(&mut input, &honest, &memory));
    }
    PLACE.with(|place| {
        let (_socket, connection) = send_all(&place.listener, &place.path, &messages);
        if let Ok(mut connection) = connection {
            for name in [&connection.name, &connection.interface_name] {
                assert!(name.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{name:?}");
            }
            let _ = exercise(&mut connection);
            let _ = connection.control.check();
        }
    });
}

/// A client writes to memory between a server's looks.
/// The result is a fault, or frames inside bounds.
pub(crate) fn rings(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let (messages, memory) = honest();
    PLACE.with(|place| {
        let (_socket, connection) = send_all(&place.listener, &place.path, &messages);
        let mut server = connection.expect("an honest client");
        for _ in 0..64 {
            if input.is_empty() {
                break;
            }
            let choice = input.byte();
            let ring = if choice & 1 == 0 { TO_SERVER } else { TO_CLIENT };
            match choice >> 1 & 3 {
                0 => raw::set_head(&memory, ring, input.byte().into()),
                1 => {
                    let tame = choice & 8 == 0;
                    let flags = input.byte().into();
                    let region = if tame { 0 } else { input.word() };
                    let (length, offset) = match tame {
                        true => (input.word().into(), input.word().into()),
                        false => (input.long(), input.long()),
                    };
                    let slot = input.byte().into();
                    raw::set_descriptor(&memory, ring, slot, (flags, region, length, offset));
                }
                2 => {
                    let at = ring + u64::from(input.word()) % (128 + 16 * u64::from(SLOTS));
                    raw::write(&memory, at, input.take(usize::from(choice >> 4)));
                }
                _ => {
                    if exercise(&mut server).is_err() {
                        return; // the mux ends it
                    }
                }
            }
        }
        let _ = exercise(&mut server);
    });
}

/// A hostile server. The client disconnects from it, and loses no buffer.
pub(crate) fn client(bytes: &[u8]) {
    thread_local! {
        static SERVER: (tempfile::TempDir, PathBuf, OwnedFd) = {
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("memif.sock");
            let listener = listen(&path);
            (directory, path, listener)
        };
    }
    let mut input = FuzzInput(bytes);
    SERVER.with(|(_, path, listener)| {
        let mut client = MemifClient::new(path, 3, "fuzz", SMALL).expect("memory");
        client.poll();
        let Ok(peer) = rustix::net::accept(listener) else { return };
        let mut bufs = Vec::new();
        for message in honest_server(usize::from(input.byte() % 6)) {
            send_one(&peer, &message);
            client.poll();
        }
        for _ in 0..MESSAGES_MAX {
            if input.is_empty() {
                break;
            }
            let mut message = RawMessage { bytes: vec![0; 128], fds: vec![] };
            let which = input.byte();
            message.bytes[0] = which % 10;
            let fields = input.take(usize::from(which >> 4) * 4);
            message.bytes[2..2 + fields.len()].copy_from_slice(fields);
            if which & 8 != 0 {
                message.bytes.truncate(usize::from(input.byte()).max(1));
            }
            if !send_one(&peer, &message) {
                break;
            }
            client.poll();
            client.receive(&mut bufs, 8);
            bufs.drain(..).for_each(|buf| client.free(buf));
            if let Some(mut buf) = client.alloc() {
                buf.set_len(60);
                if let Err(buf) = client.send(buf) {
                    client.free(buf);
                }
            }
            client.flush();
        }
        drop(peer);
        // Not connected any more: all buffers in the rings have returned.
        while client.poll() == ConnectionState::Up {}
        let all: Vec<_> = std::iter::from_fn(|| client.alloc()).collect();
        assert_eq!(all.len(), SMALL.buffers as usize, "no buffer is lost");
        all.into_iter().for_each(|buf| client.free(buf));
        // It may have begun to reconnect.
        while rustix::net::accept(listener).is_ok() {}
    });
}

fn listen(path: &Path) -> OwnedFd {
    let flags = rustix::net::SocketFlags::NONBLOCK;
    let kind = SocketType::SEQPACKET;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket");
    let address = SocketAddrUnix::new(path).expect("a short path");
    rustix::net::bind(&socket, &address).expect("a free path");
    rustix::net::listen(&socket, 64).expect("a socket that listens");
    socket
}

/// Messages of a valid server: hello, an acknowledgement of each message, connected.
fn honest_server(count: usize) -> Vec<RawMessage> {
    let bare = |kind: u16| raw::bare(kind);
    let mut hello = bare(2);
    let fields = [0x0200u16, 0x0200, 15, 0, 0];
    let fields = fields.iter().flat_map(|field| field.to_le_bytes());
    hello.bytes.splice(34..44, fields);
    hello.bytes[44] = RING_LOG2;
    let mut messages = vec![hello];
    messages.extend((0..4).map(|_| bare(1)));
    messages.push(bare(7));
    messages.truncate(count + 1);
    messages
}
