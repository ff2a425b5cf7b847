//! Our client and our server with each other.

mod common;

use std::collections::VecDeque;
use std::os::fd::AsFd;

use common::{join, pair, soon};
use pdp_memif::{Buf, ConnectionState, MemifClient, MemifConnection, MemifSettings};
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const SMALL: MemifSettings =
    MemifSettings { ring_log2: 3, buffer_bytes: 128, headroom_bytes: 64, buffers: 80 };

/// Bytes that differ from frame to frame.
fn frame(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (seed.wrapping_mul(31) ^ at.wrapping_mul(7)) as u8).collect()
}

fn receive_all(connection: &mut MemifConnection, max: usize) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    connection.rx.poll().unwrap();
    while frames.len() < max
        && let Some(frame) = connection.rx.take().unwrap()
    {
        let mut bytes = vec![0; frame.len()];
        assert_eq!(frame.copy_to(&mut bytes), bytes.len());
        frames.push(bytes);
    }
    connection.rx.release();
    frames
}

/// Copies a frame into buffers of the client; `None` if it has too few.
fn buffers(client: &mut MemifClient, frame: &[u8]) -> Option<Vec<Buf>> {
    let mut bufs = Vec::new();
    for piece in frame.chunks(64) {
        let Some(mut buf) = client.alloc() else {
            bufs.drain(..).for_each(|buf| client.free(buf));
            return None;
        };
        assert!(buf.set_len(piece.len()));
        client.bytes_mut(&mut buf).copy_from_slice(piece);
        bufs.push(buf);
    }
    Some(bufs)
}

/// Takes received frames and checks where their buffers end.
fn take(client: &mut MemifClient, max: usize) -> Vec<Vec<u8>> {
    let mut bufs = Vec::new();
    let count = client.receive(&mut bufs, max);
    let mut frames = vec![Vec::new()];
    for buf in bufs {
        frames.last_mut().unwrap().extend_from_slice(client.bytes(&buf));
        if !buf.continues() {
            frames.push(Vec::new());
        }
        client.free(buf);
    }
    assert_eq!(frames.pop().unwrap(), Vec::<u8>::new(), "a frame without end");
    assert_eq!(frames.len(), count);
    frames
}

#[derive(Clone, Debug)]
enum Step {
    ToClient(usize),
    ToServer(usize),
    FlushServer,
    FlushClient,
    ServerTakes(usize),
    ClientTakes(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0usize..400).prop_map(Step::ToClient),
        3 => (1usize..400).prop_map(Step::ToServer),
        1 => Just(Step::FlushServer),
        1 => Just(Step::FlushClient),
        1 => (1usize..12).prop_map(Step::ServerTakes),
        1 => (1usize..12).prop_map(Step::ClientTakes),
    ];
    proptest::collection::vec(step, 1..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Frames of any length, chained over buffers of 64 bytes, in any interleaving of both sides on
    /// rings of 8 slots. They arrive once, whole and in order. Nothing arrives before its flush.
    #[test]
    fn frames_arrive_in_order(steps in steps()) {
        let directory = tempfile::tempdir().unwrap();
        let (_listener, mut client, mut server) = pair(directory.path(), SMALL);
        let (mut to_client, mut to_server) = (VecDeque::new(), VecDeque::new());
        let (mut client_sees, mut server_sees) = (0, 0);
        for (seed, step) in steps.into_iter().enumerate() {
            match step {
                Step::ToClient(bytes) => {
                    let frame = frame(seed, bytes);
                    if server.tx.push(seed as u32, &frame).unwrap() {
                        to_client.push_back(frame);
                    }
                }
                Step::ToServer(bytes) => {
                    let frame = frame(seed, bytes);
                    if let Some(mut bufs) = buffers(&mut client, &frame) {
                        if client.send_chain(&mut bufs) {
                            to_server.push_back(frame);
                        } else {
                            bufs.into_iter().for_each(|buf| client.free(buf));
                        }
                    }
                }
                Step::FlushServer => {
                    server.tx.flush().unwrap();
                    client_sees = to_client.len();
                }
                Step::FlushClient => {
                    client.flush();
                    server_sees = to_server.len();
                }
                Step::ServerTakes(max) => {
                    let got = receive_all(&mut server, max);
                    prop_assert_eq!(got.len(), max.min(server_sees));
                    server_sees -= got.len();
                    for frame in got {
                        prop_assert_eq!(Some(frame), to_server.pop_front());
                    }
                }
                Step::ClientTakes(max) => {
                    let got = take(&mut client, max);
                    prop_assert_eq!(got.len(), max.min(client_sees));
                    client_sees -= got.len();
                    for frame in got {
                        prop_assert_eq!(Some(frame), to_client.pop_front());
                    }
                }
            }
        }
        server.tx.flush().unwrap();
        client.flush();
        prop_assert_eq!(receive_all(&mut server, 100), Vec::from(to_server));
        prop_assert_eq!(take(&mut client, 100), Vec::from(to_client));
        client.flush();
        // No buffer was lost: all but the posted ones are free.
        let free = std::iter::from_fn(|| client.alloc()).count();
        prop_assert_eq!(free, SMALL.buffers as usize - 8);
    }
}

#[test]
fn indices_wrap_around() {
    let directory = tempfile::tempdir().unwrap();
    let (_listener, mut client, mut server) = pair(directory.path(), SMALL);
    for round in 0..70_000usize {
        let bytes = frame(round, 1 + round % 64);
        assert!(server.tx.push(0, &bytes).unwrap());
        server.tx.flush().unwrap();
        let mut bufs = Vec::new();
        assert_eq!(client.receive(&mut bufs, 2), 1);
        let buf = bufs.pop().unwrap();
        assert_eq!(client.bytes(&buf), bytes);
        client.send(buf).unwrap();
        client.flush();
        assert_eq!(receive_all(&mut server, 2), [bytes]);
    }
}

#[test]
fn frame_copy_stops_at_the_buffer_end() {
    let directory = tempfile::tempdir().unwrap();
    let (_listener, mut client, mut server) = pair(directory.path(), SMALL);
    let frame = frame(1, 200);
    let mut bufs = buffers(&mut client, &frame).unwrap();
    assert!(client.send_chain(&mut bufs));
    client.flush();
    assert_eq!(server.rx.poll(), Ok(true));
    let taken = server.rx.take().unwrap().unwrap();
    for length in 0..300 {
        let mut bytes = vec![0; length];
        let count = taken.copy_to(&mut bytes);
        assert_eq!(bytes[..count], frame[..length.min(200)], "{length} bytes");
        assert!(bytes[count..].iter().all(|byte| *byte == 0), "nothing beyond");
    }
}

#[test]
fn headroom_allows_trimming_and_growing_the_front() {
    let directory = tempfile::tempdir().unwrap();
    let (_listener, mut client, mut server) = pair(directory.path(), SMALL);
    assert!(server.tx.push(7, b"tagframe").unwrap());
    server.tx.flush().unwrap();
    let mut bufs = Vec::new();
    assert_eq!(client.receive(&mut bufs, 1), 1);
    let mut buf = bufs.pop().unwrap();
    assert_eq!(buf.metadata(), 7);
    buf.set_metadata(8);
    assert!(buf.trim_front(3));
    assert!(!buf.trim_front(6));
    assert_eq!(client.bytes(&buf), b"frame");
    assert!(buf.grow_front(67), "headroom and the tag");
    assert!(!buf.grow_front(1));
    assert!(!buf.set_len(129), "beyond the buffer");
    assert!(buf.trim_front(63));
    client.bytes_mut(&mut buf)[..4].copy_from_slice(b"TAG+");
    client.send(buf).unwrap();
    client.flush();
    assert_eq!(server.rx.poll(), Ok(true));
    let taken = server.rx.take().unwrap().unwrap();
    assert_eq!(taken.metadata(), 8);
    let mut bytes = [0; 9];
    assert_eq!(taken.copy_to(&mut bytes), 9);
    assert_eq!(&bytes, b"TAG+frame");
    server.rx.release();
}

/// True if a descriptor is readable now.
fn rings(fd: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

#[test]
fn doorbells_ring_only_for_sleepers() {
    let directory = tempfile::tempdir().unwrap();
    let (_listener, mut client, mut server) = pair(directory.path(), SMALL);
    client.disarm();
    server.rx.disarm();

    assert!(server.tx.push(0, b"one").unwrap());
    server.tx.flush().unwrap();
    assert!(!rings(&client), "the client is awake");
    assert!(!client.arm(), "a frame is there");
    take(&mut client, 1);
    assert!(client.arm());
    assert!(!rings(&client));
    assert!(server.tx.push(0, b"two").unwrap());
    assert!(!rings(&client), "not shown yet");
    server.tx.flush().unwrap();
    assert!(rings(&client));
    client.disarm();
    assert!(!rings(&client));

    let buf = buffers(&mut client, b"three").unwrap().pop().unwrap();
    client.send(buf).unwrap();
    client.flush();
    assert!(!rings(&server.rx), "the server is awake");
    assert!(!server.rx.arm());
    receive_all(&mut server, 1);
    assert!(server.rx.arm());
    let buf = buffers(&mut client, b"four").unwrap().pop().unwrap();
    client.send(buf).unwrap();
    client.flush();
    assert!(rings(&server.rx));
}

#[test]
fn client_waiting_for_space_is_rung() {
    let directory = tempfile::tempdir().unwrap();
    let (_listener, mut client, mut server) = pair(directory.path(), SMALL);
    client.disarm();
    for round in 0..3 {
        assert_eq!(receive_all(&mut server, 8).len(), if round == 0 { 0 } else { 4 });
        assert!(!server.rx.awaits_room(), "the ring was not full");
        while client.room() > 0 {
            let buf = buffers(&mut client, b"frame").unwrap().pop().unwrap();
            client.send(buf).unwrap();
        }
        client.flush();
        assert!(client.arm_for_room(), "no room");
        assert_eq!(receive_all(&mut server, 1).len(), 1);
        assert!(!server.rx.awaits_room(), "more than half full");
        assert!(!rings(&client));
        server.tx.wake().unwrap();
        assert!(rings(&client), "round {round}");
        client.disarm();
        assert!(!client.arm_for_room(), "there is room");
        server.tx.wake().unwrap();
        assert!(!rings(&client), "the client is awake");
        assert_eq!(receive_all(&mut server, 2).len(), 2);
        assert!(!server.rx.awaits_room(), "more than half full");
        assert_eq!(receive_all(&mut server, 1).len(), 1);
        assert!(server.rx.awaits_room());
        assert!(!server.rx.awaits_room(), "once");
    }
}

#[test]
fn disconnect_is_seen_and_loses_no_buffer() {
    let directory = tempfile::tempdir().unwrap();
    let (listener, mut client, mut server) = pair(directory.path(), SMALL);
    let mut kept = Vec::new();
    for round in 0..5 {
        // Leave frames in every state: taken, shown, pushed, sent, shown to the server.
        for number in 0..6 {
            assert!(server.tx.push(0, &frame(number, 50)).unwrap());
        }
        server.tx.flush().unwrap();
        assert_eq!(client.receive(&mut kept, 2), 2);
        for number in 0..4 {
            let buf = buffers(&mut client, &frame(number, 60)).unwrap().pop().unwrap();
            client.send(buf).unwrap();
            if number == 1 {
                client.flush();
            }
        }
        assert_eq!(server.interface_id, 3);
        if round % 2 == 0 {
            server.control.disconnect("done with you");
            assert_eq!(client.poll(), ConnectionState::Down);
            assert_eq!(client.last_error(), Some("done with you"));
        } else {
            drop(server);
            soon("down", || (client.poll() == ConnectionState::Down).then_some(()));
        }
        assert!(client.control().is_none());
        assert_eq!(client.room(), 0);
        let buf = client.alloc().unwrap();
        let buf = client.send(buf).unwrap_err();
        client.free(buf);
        server = join(&listener, &mut client);
        assert_eq!(server.rx.poll(), Ok(false), "the ring is new");
    }
    assert_eq!(client.bytes(&kept[0]), frame(0, 50), "buffers outlive connections");
    kept.drain(..).for_each(|buf| client.free(buf));
    let free = std::iter::from_fn(|| client.alloc()).count();
    assert_eq!(free, SMALL.buffers as usize - 8);

    assert_eq!(server.control.check(), Ok(()));
    drop(client);
    assert!(server.control.check().is_err());
}

#[test]
fn server_refuses_unknown_interface_ids() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memif.sock");
    let listener = pdp_memif::Listener::bind(&path).unwrap();
    let mut client = MemifClient::new(&path, 9, "x", SMALL).unwrap();
    client.poll();
    let mut handshake = listener.accept().unwrap().unwrap();
    let error = soon("refusal", || {
        if client.link() == ConnectionState::Connecting {
            client.poll();
        }
        handshake.poll(|id| id != 9).err()
    });
    assert!(error.to_string().contains("no such interface"), "{error}");
    soon("told", || {
        client.poll();
        client.last_error().is_some_and(|why| why.contains("no such interface")).then_some(())
    });
}

#[test]
fn without_a_server_the_client_stays_down() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nobody.sock");
    let mut client = MemifClient::new(&path, 0, "x", SMALL).unwrap();
    for _ in 0..3 {
        assert_eq!(client.poll(), ConnectionState::Down);
    }
    assert!(client.last_error().is_some());
    assert!(client.arm(), "asleep until there is a link");
    client.flush();
}

#[test]
fn invalid_client_settings_are_refused() {
    let path = std::path::Path::new("/nowhere");
    for wrong in [
        MemifSettings { ring_log2: 0, ..SMALL },
        MemifSettings { ring_log2: 15, buffers: 1 << 17, ..SMALL },
        MemifSettings { buffer_bytes: 100, ..SMALL },
        MemifSettings { buffer_bytes: 0, ..SMALL },
        MemifSettings { headroom_bytes: 128, ..SMALL },
        MemifSettings { buffers: 79, ..SMALL },
        MemifSettings { buffers: 1 << 20, buffer_bytes: 2048, ..SMALL },
        MemifSettings { buffers: u32::MAX, buffer_bytes: 1 << 31, ..SMALL },
    ] {
        assert!(MemifClient::new(path, 0, "x", wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn listener_replaces_a_dead_servers_socket_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memif.sock");
    drop(pdp_memif::Listener::bind(&path).unwrap());
    let listener = pdp_memif::Listener::bind(&path).unwrap();
    let mut client = MemifClient::new(&path, 0, "x", SMALL).unwrap();
    join(&listener, &mut client);
}
