//! Every protocol violation of a client, one at a time. Each is a fault or a refusal, never a
//! panic, a hang or an access outside the client's memory.

mod common;
#[path = "common/raw.rs"]
mod raw;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::soon;
use pdp_memif::{
    CHAIN_SLOTS_MAX, HANDSHAKE_MS_MAX, HandshakeError, Listener, MemifConnection,
    ProtocolViolation, REGION_BYTES_MAX,
};
use proptest::prelude::*;
use raw::{
    RING_LOG2, RawMessage, SIZE, SLOTS, TO_CLIENT, TO_SERVER, bare, connect, eventfd, honest, init,
    memory, region, ring, send_all, send_one, set_descriptor, set_head, socket,
};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

struct HostileServer {
    _directory: tempfile::TempDir,
    path: PathBuf,
    listener: Listener,
}

fn place() -> HostileServer {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memif.sock");
    let listener = Listener::bind(&path).unwrap();
    HostileServer { _directory: directory, path, listener }
}

impl HostileServer {
    fn refuses(&self, case: &str, messages: &[RawMessage]) {
        match send_all(&self.listener, &self.path, messages).1 {
            Ok(_) => panic!("{case}: connected"),
            Err(HandshakeError::Refused(_)) => {}
            Err(other) => panic!("{case}: {other:?}"),
        }
    }

    /// Returns a connection whose client violates the protocol from now on.
    fn connected(&self) -> (OwnedFd, OwnedFd, MemifConnection) {
        let (messages, memory) = honest();
        let (socket, connection) = send_all(&self.listener, &self.path, &messages);
        (socket, memory, connection.unwrap())
    }
}

/// Takes up to `max` frames and returns their number.
fn take(server: &mut MemifConnection, max: usize) -> Result<usize, ProtocolViolation> {
    server.rx.poll()?;
    let mut count = 0;
    while count < max && server.rx.take()?.is_some() {
        count += 1;
    }
    Ok(count)
}

#[test]
fn an_honest_client_is_connected() {
    let place = place();
    let (_socket, memory, mut server) = place.connected();
    assert_eq!(server.interface_id, 1);
    set_descriptor(&memory, TO_SERVER, 0, (0, 0, 5, SIZE as u32 - 5));
    raw::write(&memory, SIZE - 5, b"hello");
    set_head(&memory, TO_SERVER, 1);
    assert_eq!(server.rx.poll(), Ok(true));
    let mut bytes = [0; 9];
    assert_eq!(server.rx.take().unwrap().unwrap().copy_to(&mut bytes), 5);
    assert_eq!(&bytes[..5], b"hello");
    assert!(server.rx.take().unwrap().is_none());
    server.rx.release();
    assert_eq!(raw::read16(&memory, TO_SERVER + 64), 1, "tail");
}

#[test]
fn invalid_handshakes_are_refused() {
    let place = place();
    for version in [0, 0x100, 0x1ff, 0x201, 0xffff] {
        place.refuses("version", &[init(version, 1, 0)]);
    }
    for mode in [1, 2, 255] {
        place.refuses("mode", &[init(0x200, 1, mode)]);
    }
    // Each message missing once, and each sent twice.
    for at in 0..4 {
        let (mut messages, _memory) = honest();
        messages.remove(at);
        place.refuses("left out", &messages);
        let (mut messages, _memory) = honest();
        messages.insert(at, messages[at].clone());
        place.refuses("twice", &messages);
    }
    let (mut messages, _memory) = honest();
    messages.rotate_right(1);
    place.refuses("connect first", &messages);
    for kind in [0, 1, 2, 7, 9, 255, 0xffff] {
        for at in 0..5 {
            let (mut messages, _memory) = honest();
            messages.insert(at, bare(kind));
            place.refuses("a message of the server, or of nobody", &messages);
        }
    }
}

#[test]
fn invalid_regions_are_refused() {
    let place = place();
    let first = |region: RawMessage| vec![init(0x200, 1, 0), region];
    let sealed = || memory(SIZE, SealFlags::SHRINK);
    let file = |name: &str| Some(OwnedFd::from(std::fs::File::open(name).unwrap()));
    let regular = tempfile::tempfile().unwrap();
    regular.set_len(SIZE).unwrap();
    let read_only = {
        use std::os::fd::AsRawFd;
        let memory = sealed();
        file(&format!("/proc/self/fd/{}", memory.as_raw_fd()))
    };
    let lies = [
        ("index", region(1, SIZE, Some(sealed()))),
        ("index", region(u16::MAX, SIZE, Some(sealed()))),
        ("no descriptor", region(0, SIZE, None)),
        ("no bytes", region(0, 0, Some(sealed()))),
        ("a byte more than there is", region(0, SIZE + 1, Some(sealed()))),
        ("more than the limit", region(0, REGION_BYTES_MAX + 1, Some(sealed()))),
        ("all bytes", region(0, u64::MAX, Some(sealed()))),
        ("unsealed", region(0, SIZE, Some(memory(SIZE, SealFlags::empty())))),
        ("only sealed against growing", region(0, SIZE, Some(memory(SIZE, SealFlags::GROW)))),
        ("sealed against writing", {
            region(0, SIZE, Some(memory(SIZE, SealFlags::SHRINK | SealFlags::WRITE)))
        }),
        ("read only", region(0, SIZE, read_only)),
        ("a file", region(0, SIZE, Some(regular.into()))),
        ("a device", region(0, SIZE, file("/dev/zero"))),
        ("an eventfd", region(0, SIZE, Some(eventfd()))),
        ("a directory", region(0, SIZE, file("/"))),
    ];
    for (case, lie) in lies {
        place.refuses(case, &first(lie));
    }
    // One region too many, and regions that are too large together.
    let many = |count: u16, size: u64| {
        let mut messages = vec![init(0x200, 1, 0)];
        messages
            .extend((0..count).map(|at| region(at, size, Some(memory(size, SealFlags::SHRINK)))));
        messages
    };
    place.refuses("17 regions", &many(17, 0x2000));
    place.refuses("too large together", &many(2, REGION_BYTES_MAX / 2 + 1));
    // Huge pages, if this machine has any for a memfd.
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    if let Ok(huge) = rustix::fs::memfd_create("huge", flags) {
        rustix::fs::ftruncate(&huge, 2 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
        place.refuses("huge pages", &first(region(0, 2 << 20, Some(huge))));
    }
}

#[test]
fn invalid_rings_are_refused() {
    let place = place();
    let end = SIZE as u32 - 128 - 16 * u32::from(SLOTS);
    let bell = || Some(eventfd());
    let lies = [
        ("index", ring(true, 1, 0, 0, RING_LOG2, bell())),
        ("region", ring(true, 0, 1, 0, RING_LOG2, bell())),
        ("region", ring(true, 0, u16::MAX, 0, RING_LOG2, bell())),
        ("slots", ring(true, 0, 0, 0, 15, bell())),
        ("slots", ring(true, 0, 0, 0, 16, bell())),
        ("slots", ring(true, 0, 0, 0, 64, bell())),
        ("slots", ring(true, 0, 0, 0, 255, bell())),
        ("more slots than bytes", ring(true, 0, 0, 0, 14, bell())),
        ("unaligned", ring(true, 0, 0, 4, RING_LOG2, bell())),
        ("beyond", ring(true, 0, 0, end + 8, RING_LOG2, bell())),
        ("beyond", ring(true, 0, 0, u32::MAX - 7, RING_LOG2, bell())),
        ("no cookie", ring(true, 0, 0, 0x2000, RING_LOG2, bell())),
        ("no bell", ring(true, 0, 0, 0, RING_LOG2, None)),
        ("a file as bell", {
            ring(true, 0, 0, 0, RING_LOG2, Some(tempfile::tempfile().unwrap().into()))
        }),
        ("a pipe as bell", {
            ring(true, 0, 0, 0, RING_LOG2, Some(rustix::pipe::pipe().unwrap().1))
        }),
    ];
    for (case, lie) in lies {
        let (mut messages, _memory) = honest();
        messages[2] = lie;
        place.refuses(case, &messages);
    }
    let (mut messages, memory) = honest();
    raw::write(&memory, u64::from(end), &0x3E31F20u32.to_le_bytes());
    messages[2] = ring(true, 0, 0, end, RING_LOG2, bell());
    assert!(
        send_all(&place.listener, &place.path, &messages).1.is_ok(),
        "the last place is a place"
    );
}

#[test]
fn messages_of_any_other_length_are_refused() {
    let place = place();
    for at in 0..5 {
        // A message of no bytes is an end of file.
        for length in (1..128).chain([129, 130, 256, 4096]) {
            let (mut messages, _memory) = honest();
            messages[at].bytes.resize(length, 0);
            place.refuses("length", &messages[..=at]);
        }
    }
    let (mut messages, _memory) = honest();
    messages[1].fds.push(eventfd().into());
    place.refuses("two descriptors", &messages);
}

#[test]
fn slow_handshake_times_out() {
    let place = place();
    let _socket = socket(&place.path);
    let mut handshake = soon("accept", || place.listener.accept().unwrap());
    let since = Instant::now();
    let error = soon("an end", || handshake.poll(|_| true).err());
    assert!(since.elapsed() >= Duration::from_millis(HANDSHAKE_MS_MAX));
    assert!(matches!(error, HandshakeError::Refused(_)), "{error:?}");
}

proptest! {
    /// Noise on the control socket before, between and after valid messages.
    #[test]
    fn noise_on_the_control_socket_disconnects(
        honest_count in 0usize..5,
        noise: [[u8; 32]; 4],
        kind in 0u8..10,
        with_fd: bool,
    ) {
        let place = place();
        let (mut messages, _memory) = honest();
        messages.truncate(honest_count);
        let mut bytes = noise.concat();
        bytes[..2].copy_from_slice(&[kind, 0]);
        let fds = if with_fd { vec![eventfd().into()] } else { vec![] };
        messages.push(RawMessage { bytes, fds });
        let result = send_all(&place.listener, &place.path, &messages).1;
        prop_assert!(kind == 6 && honest_count == 4 || result.is_err());
    }
}

#[test]
fn any_message_after_connected_disconnects() {
    let place = place();
    for message in [bare(0), bare(1), bare(3), bare(6), bare(99), connect()] {
        let (socket, _memory, mut server) = place.connected();
        assert_eq!(server.control.check(), Ok(()));
        assert!(send_one(&socket, &message));
        assert!(server.control.check().is_err(), "{message:?}");
    }
    let (socket, _memory, mut server) = place.connected();
    let mut bye = bare(8);
    bye.bytes[6..9].copy_from_slice(b"bye");
    assert!(send_one(&socket, &bye));
    assert_eq!(server.control.check().unwrap_err().reason, "bye");
    let (socket, _memory, mut server) = place.connected();
    drop(socket);
    assert!(server.control.check().is_err());
}

#[test]
fn indices_beyond_the_ring_are_faults() {
    let place = place();
    for head in [SLOTS + 1, SLOTS + 2, 0x7fff, 0x8000, u16::MAX] {
        let (_socket, memory, mut server) = place.connected();
        set_head(&memory, TO_SERVER, head);
        set_head(&memory, TO_CLIENT, head);
        let fault = ProtocolViolation::Index { head, tail: 0, slots: SLOTS };
        assert_eq!(server.rx.poll(), Err(fault));
        assert_eq!(server.tx.room(), Err(fault));
        assert_eq!(server.tx.push(0, b"x"), Err(fault));
        assert!(!server.rx.arm(), "no sleep on a lie");
    }
    // Backwards.
    let (_socket, memory, mut server) = place.connected();
    set_head(&memory, TO_SERVER, 2);
    assert_eq!(take(&mut server, 2), Ok(2));
    set_head(&memory, TO_SERVER, 1);
    assert!(matches!(server.rx.poll(), Err(ProtocolViolation::Index { .. })));
    server.rx.release();
    assert!(matches!(server.rx.poll(), Err(ProtocolViolation::Index { .. })));
    // A completely full ring is valid.
    let (_socket, memory, mut server) = place.connected();
    set_head(&memory, TO_SERVER, SLOTS);
    assert_eq!(take(&mut server, 1000), Ok(SLOTS.into()));
}

/// Buffers that were posted, relied on, and taken back.
#[test]
fn client_ring_moving_backwards_is_a_fault() {
    let place = place();
    for back in 0..3 {
        let (_socket, memory, mut server) = place.connected();
        for slot in 0..SLOTS {
            set_descriptor(&memory, TO_CLIENT, slot, (0, 0, 64, 0x4000));
        }
        set_head(&memory, TO_CLIENT, 3);
        assert_eq!(server.tx.push(0, b"short"), Ok(true));
        set_head(&memory, TO_CLIENT, back);
        // The client had posted as many buffers as this needs.
        let fault = server.tx.push(0, &[7; 100]);
        assert!(matches!(fault, Err(ProtocolViolation::Index { .. })), "{back}: {fault:?}");
        server.tx.flush().unwrap();
        assert_eq!(raw::read16(&memory, TO_CLIENT + 64), 1, "nothing but the first was filled");
    }
}

#[test]
fn descriptors_out_of_bounds_are_faults() {
    let place = place();
    let size = SIZE as u32;
    let bounds = [
        (1, size),
        (size + 1, 0),
        (2, size - 1),
        (u32::MAX, 0),
        (u32::MAX, u32::MAX),
        (1, u32::MAX),
        (0, u32::MAX),
        (0x8000_0000, 0x8000_0000),
    ];
    for (length, offset) in bounds {
        let (_socket, memory, mut server) = place.connected();
        for ring in [TO_SERVER, TO_CLIENT] {
            set_descriptor(&memory, ring, 0, (0, 0, length, offset));
            set_head(&memory, ring, 1);
        }
        let fault = ProtocolViolation::Bounds { offset, length, size: SIZE as usize };
        assert_eq!(take(&mut server, 1), Err(fault));
        assert_eq!(server.tx.push(0, b"x"), Err(fault));
    }
    for number in [1, 2, 0x8000, u16::MAX] {
        let (_socket, memory, mut server) = place.connected();
        for ring in [TO_SERVER, TO_CLIENT] {
            set_descriptor(&memory, ring, 0, (0, number, 1, 0));
            set_head(&memory, ring, 1);
        }
        let fault = ProtocolViolation::Region { region: number, count: 1 };
        assert_eq!(take(&mut server, 1), Err(fault));
        assert_eq!(server.tx.push(0, b"x"), Err(fault));
    }
    // Behind a valid first buffer.
    let (_socket, memory, mut server) = place.connected();
    for ring in [TO_SERVER, TO_CLIENT] {
        set_descriptor(&memory, ring, 0, (1, 0, 4, 0x4000));
        set_descriptor(&memory, ring, 1, (0, 0, 4, size));
        set_head(&memory, ring, 2);
    }
    assert!(matches!(take(&mut server, 1), Err(ProtocolViolation::Bounds { .. })));
    assert!(matches!(server.tx.push(0, b"longer than 4"), Err(ProtocolViolation::Bounds { .. })));
}

#[test]
fn endless_chains_are_faults() {
    let place = place();
    for shown in [1, 2, CHAIN_SLOTS_MAX as u16, SLOTS] {
        let (_socket, memory, mut server) = place.connected();
        for slot in 0..shown {
            set_descriptor(&memory, TO_SERVER, slot, (1, 0, 8, 0x4000));
        }
        set_head(&memory, TO_SERVER, shown);
        let slots = CHAIN_SLOTS_MAX.min(shown.into());
        assert_eq!(take(&mut server, 1), Err(ProtocolViolation::Chain { slots }));
    }
    let (_socket, memory, mut server) = place.connected();
    let last = CHAIN_SLOTS_MAX as u16 - 1;
    for slot in 0..last {
        set_descriptor(&memory, TO_SERVER, slot, (1, 0, 8, 0x4000));
    }
    set_descriptor(&memory, TO_SERVER, last, (0, 0, 8, 0x4000));
    set_head(&memory, TO_SERVER, last + 1);
    server.rx.poll().unwrap();
    let longest = server.rx.take().unwrap().unwrap();
    assert_eq!(longest.len(), 8 * CHAIN_SLOTS_MAX, "the longest chain is a frame");
    // Buffers that are too small: empty, or too short.
    for length in [0, 1] {
        let (_socket, memory, mut server) = place.connected();
        for slot in 0..SLOTS {
            set_descriptor(&memory, TO_CLIENT, slot, (0, 0, length, 0x4000));
        }
        set_head(&memory, TO_CLIENT, SLOTS);
        let fault = ProtocolViolation::Chain { slots: CHAIN_SLOTS_MAX };
        assert_eq!(server.tx.push(0, &[7; 1500]), Err(fault));
    }
}

#[test]
fn taken_frame_keeps_its_descriptor() {
    let place = place();
    let (_socket, memory, mut server) = place.connected();
    raw::write(&memory, 0x4000, b"first");
    set_descriptor(&memory, TO_SERVER, 0, (0, 0, 5, 0x4000));
    set_head(&memory, TO_SERVER, 1);
    server.rx.poll().unwrap();
    let frame = server.rx.take().unwrap().unwrap();
    set_descriptor(&memory, TO_SERVER, 0, (1, 9, u32::MAX, u32::MAX));
    assert_eq!(frame.len(), 5);
    let mut bytes = [0; 64];
    assert_eq!(frame.copy_to(&mut bytes), 5);
    assert_eq!(&bytes[..5], b"first");
}

#[test]
fn full_doorbell_does_not_block_the_server() {
    let place = place();
    let (mut messages, memory) = honest();
    let bell = eventfd();
    messages[3] = ring(false, 0, 0, TO_CLIENT as u32, RING_LOG2, Some(bell.try_clone().unwrap()));
    let (_socket, connection) = send_all(&place.listener, &place.path, &messages);
    let mut server = connection.unwrap();
    rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    set_descriptor(&memory, TO_CLIENT, 0, (0, 0, 64, 0x4000));
    set_head(&memory, TO_CLIENT, 1);
    assert_eq!(server.tx.push(0, b"ring"), Ok(true));
    assert_eq!(server.tx.flush(), Ok(()));
}

#[test]
fn holes_in_memory_read_as_zeros() {
    let place = place();
    let (_socket, memory, mut server) = place.connected();
    set_descriptor(&memory, TO_SERVER, 0, (0, 0, 5, 0x4000));
    raw::write(&memory, 0x4000, b"there");
    set_head(&memory, TO_SERVER, 1);
    server.rx.poll().unwrap();
    let frame = server.rx.take().unwrap().unwrap();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(memory.as_fd(), flags, 0, SIZE).unwrap();
    let mut bytes = [7; 5];
    assert_eq!(frame.copy_to(&mut bytes), 5);
    assert_eq!(bytes, [0; 5]);
    assert!(rustix::fs::ftruncate(&memory, 0).is_err(), "the seal holds");
}

/// Uses a connection once in all ways that a mux does. Any fault ends it.
fn exercise(server: &mut MemifConnection, space: &mut [u8]) -> Result<(), ProtocolViolation> {
    server.rx.poll()?;
    for _ in 0..32 {
        let Some(frame) = server.rx.take()? else { break };
        let length = frame.len().min(space.len());
        let copied = frame.copy_to(&mut space[..length]);
        assert!(copied == length);
    }
    server.rx.release();
    for length in [0, 60, 1500, 9000] {
        server.tx.push(1, &space[..length])?;
    }
    server.rx.arm();
    server.rx.disarm();
    server.tx.flush()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Noise in the rings, with indices and regions that are plausible more often than random ones.
    #[test]
    fn noise_in_the_rings_is_a_fault_or_a_frame(
        noise in proptest::collection::vec(any::<u8>(), 2 * 16 * usize::from(SLOTS)),
        tame in any::<u8>(),
        heads: [u8; 2],
    ) {
        let place = place();
        let (_socket, memory, mut server) = place.connected();
        let (first, second) = noise.split_at(noise.len() / 2);
        for (ring, noise) in [(TO_SERVER, first), (TO_CLIENT, second)] {
            let mut noise = noise.to_vec();
            for descriptor in noise.chunks_mut(16).filter(|chunk| chunk[15] | tame == 255 || tame > 200) {
                descriptor[1..4].fill(0);
                descriptor[6..8].fill(0);
                descriptor[10..12].fill(0);
            }
            raw::write(&memory, ring + 128, &noise);
        }
        set_head(&memory, TO_SERVER, heads[0].into());
        set_head(&memory, TO_CLIENT, heads[1].into());
        let mut space = vec![0; 1 << 16];
        for _ in 0..4 {
            if exercise(&mut server, &mut space).is_err() {
                break;
            }
        }
    }
}

/// A client that writes to its rings all the time, from another thread.
#[test]
fn server_survives_constantly_changing_memory() {
    let place = place();
    let stop = AtomicBool::new(false);
    let (_socket, memory, server) = place.connected();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut state = 1u64;
            while !stop.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let ring = if state >> 63 == 0 { TO_SERVER } else { TO_CLIENT };
                let at = (state >> 40) % (128 + 16 * u64::from(SLOTS));
                raw::write(&memory, ring + at, &(state >> 16).to_le_bytes()[..1]);
            }
        });
        let mut server = Some(server);
        let mut space = vec![0; 1 << 16];
        let mut faults = 0;
        let mut connections = Vec::new();
        while faults < 200 {
            // A fault ends a connection; the next connection uses the same memory.
            let Some(connected) = &mut server else { break };
            if exercise(connected, &mut space).is_err() {
                faults += 1;
                let (mut messages, _) = honest();
                messages[1] = region(0, SIZE, Some(memory.try_clone().unwrap()));
                let (socket, connection) = send_all(&place.listener, &place.path, &messages);
                connections.push(socket);
                // If the cookie is overwritten, no connection succeeds any more.
                server = connection.ok();
                if server.is_none() {
                    raw::write(&memory, TO_SERVER, &0x3E31F20u32.to_le_bytes());
                    raw::write(&memory, TO_CLIENT, &0x3E31F20u32.to_le_bytes());
                    server = send_all(&place.listener, &place.path, &messages).1.ok();
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(faults > 0);
    });
}
