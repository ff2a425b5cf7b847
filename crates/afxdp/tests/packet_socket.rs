//! A packet socket at one end of a veth, in the test's own network namespace. The other end sends.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use pdp_afxdp::{
    PacketBuffer, PacketSocket, Pool, RECEIVE_BYTES_MAX, RING_ENTRIES, SendOutcome, Unread,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const PATIENCE: Duration = Duration::from_secs(20);

/// Packets of the pools here.
const PACKETS: usize = 4 * RING_ENTRIES as usize;

/// A namespace with the veth a–b, entered by the calling thread; removed when dropped.
struct PacketNamespace(String);

impl PacketNamespace {
    fn enter(test: &str) -> Self {
        let place = Self(format!("psock-{test}-{}", std::process::id()));
        run(&format!("ip netns add {}", place.0));
        run(&format!("ip -n {} link add name a mtu 9000 type veth peer name b mtu 9000", place.0));
        for end in ["a", "b"] {
            run(&format!(
                "ip netns exec {} sysctl -qw net.ipv6.conf.{end}.disable_ipv6=1",
                place.0
            ));
            run(&format!("ip -n {} link set dev {end} up", place.0));
        }
        let start = Instant::now();
        while !["a", "b"].iter().all(|end| place.is_up(end)) {
            assert!(start.elapsed() < PATIENCE, "the veth has no carrier");
        }
        let netns = File::open(format!("/run/netns/{}", place.0)).unwrap();
        // SAFETY: changes this thread only, which belongs to the test.
        assert_eq!(unsafe { libc::setns(netns.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
        place
    }

    /// True if the kernel sends frames that it is given for a device. It
    /// detects the carrier some time after the other end is up
    /// (net/core/link_watch.c). Until then it drops frames without an error.
    fn is_up(&self, device: &str) -> bool {
        let words = ["-n", &self.0, "link", "show", "dev", device];
        let output = Command::new("ip").args(words).output().unwrap();
        String::from_utf8_lossy(&output.stdout).contains("state UP")
    }
}

impl Drop for PacketNamespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{command}");
}

/// Returns a packet socket bound to a device. It does not receive the frames that it sends.
fn open(device: &str) -> OwnedFd {
    let name = std::ffi::CString::new(device).unwrap();
    // SAFETY: plain system calls with whole arguments of the lengths given.
    unsafe {
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0, "needs root");
        let mut address: libc::sockaddr_ll = std::mem::zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
        set(fd, libc::PACKET_IGNORE_OUTGOING);
        let bytes = size_of_val(&address) as u32;
        assert_eq!(libc::bind(fd, (&raw const address).cast(), bytes), 0);
        OwnedFd::from_raw_fd(fd)
    }
}

fn set(fd: i32, option: i32) {
    let on = 1i32;
    // SAFETY: the value has the stated length.
    let result =
        unsafe { libc::setsockopt(fd, libc::SOL_PACKET, option, (&raw const on).cast(), 4) };
    assert_eq!(result, 0);
}

/// Both ends: a sender that writes any bytes, and the socket under test.
struct Ends {
    sender: OwnedFd,
    socket: PacketSocket,
    free: Vec<PacketBuffer>,
    _pool: Pool,
}

impl Ends {
    fn new() -> Self {
        let (sender, socket) = (open("a"), PacketSocket::new(open("b")).unwrap());
        set(sender.as_raw_fd(), libc::PACKET_VNET_HDR);
        let (_pool, free) = Pool::new(PACKETS).unwrap();
        Self { sender, socket, free, _pool }
    }

    /// Sends a frame. `checksum`: offset where the device
    /// begins to sum, and position of the sum after that.
    fn write(&self, frame: &[u8], checksum: Option<(u16, u16)>) {
        self.write_segments(frame, checksum, (0, 0));
    }

    /// Sends a frame that the device must cut. `cut`: its GSO type, and payload bytes per segment.
    fn write_segments(&self, frame: &[u8], checksum: Option<(u16, u16)>, cut: (u8, u16)) {
        let (start, at) = checksum.unwrap_or_default();
        // For a frame to be cut, the kernel needs the length of its headers.
        let headers: u16 = if cut.0 == 0 { 0 } else { start + 20 };
        let mut all = vec![u8::from(checksum.is_some()), cut.0];
        all.extend([headers, cut.1, start, at].map(u16::to_le_bytes).as_flattened());
        all.extend(frame);
        // SAFETY: the buffer has the stated length.
        let sent =
            unsafe { libc::send(self.sender.as_raw_fd(), all.as_ptr().cast(), all.len(), 0) };
        assert_eq!(sent, all.len() as isize, "{}", std::io::Error::last_os_error());
    }

    /// Returns `count` received frames, less those that are too long, and the number of these.
    fn read(&mut self, count: usize) -> (Vec<Vec<u8>>, usize) {
        let start = Instant::now();
        let (mut frames, mut too_long) = (Vec::new(), 0);
        while frames.len() + too_long < count {
            assert!(start.elapsed() < PATIENCE, "{} of {count}", frames.len() + too_long);
            too_long += self.socket.receive(&mut self.free, 0, 64, &mut frames).too_long;
        }
        let bytes = frames.iter().map(|packet| packet.bytes().to_vec()).collect();
        self.free.append(&mut frames);
        (bytes, too_long)
    }
}

/// A frame with its own EtherType, and a number and a length that identify it.
fn numbered(number: u32) -> Vec<u8> {
    let mut frame = vec![number as u8; 60 + number as usize % 1440];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    frame[14..18].copy_from_slice(&number.to_be_bytes());
    frame
}

#[test]
fn packet_socket_receives_all_lengths_and_tags() {
    let _place = PacketNamespace::enter("lengths");
    let ends = RefCell::new(Ends::new());
    let tags = prop_oneof![
        Just(vec![]),
        any::<u16>().prop_map(|tag| vec![(0x8100, tag)]),
        any::<u16>().prop_map(|tag| vec![(0x88a8, tag)]),
        any::<[u16; 2]>().prop_map(|tags| vec![(0x88a8, tags[0]), (0x8100, tags[1])]),
    ];
    let frames = proptest::collection::vec((tags, 46..RECEIVE_BYTES_MAX + 40), 1..40);
    let test = |frames: Vec<(Vec<(u16, u16)>, usize)>| {
        let mut ends = ends.borrow_mut();
        let mut expected = Vec::new();
        for (number, (tags, length)) in frames.iter().enumerate() {
            let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
            for (kind, tag) in tags {
                frame.extend([kind.to_be_bytes(), tag.to_be_bytes()].as_flattened());
            }
            frame.extend([0x88, 0xb5]);
            frame.extend((0..*length).map(|at| (at + number) as u8));
            ends.write(&frame, None);
            // The outermost tag does not count: the kernel passes it beside the frame.
            if frame.len() - 4 * usize::from(!tags.is_empty()) <= RECEIVE_BYTES_MAX {
                expected.push(frame);
            }
        }
        let (got, too_long) = ends.read(frames.len());
        prop_assert_eq!(too_long, frames.len() - expected.len());
        prop_assert_eq!(got, expected);
        Ok(())
    };
    TestRunner::new(Config::with_cases(64)).run(&frames, test).unwrap();
    let ends = ends.into_inner();
    assert_eq!((ends.free.len(), ends.socket.kernel_dropped()), (PACKETS, 0));
}

#[test]
fn packet_socket_completes_offloaded_checksums() {
    let _place = PacketNamespace::enter("sums");
    let ends = RefCell::new(Ends::new());
    // The kernel needs space for a network header before the summed bytes.
    const HEADER: usize = 40;
    let payload = proptest::collection::vec(any::<u8>(), HEADER + 8..1400);
    let test = |(payload, tag): (Vec<u8>, bool)| {
        let mut ends = ends.borrow_mut();
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        if tag {
            frame.extend([0x81, 0, 0, 5]);
        }
        frame.extend([0x88, 0xb5]);
        let start = frame.len() + HEADER;
        frame.extend(&payload);
        ends.write(&frame, Some((start as u16, 6)));
        let (got, _) = ends.read(1);
        // With its checksum, the sum of all bytes is the sum of no bits.
        let sum = |bytes: &[u8]| {
            let pair =
                |two: &[u8]| u64::from(two[0]) << 8 | two.get(1).map_or(0, |low| u64::from(*low));
            bytes.chunks(2).map(pair).sum::<u64>() % 0xffff
        };
        // The field was part of the sum.
        let field = u64::from(u16::from_be_bytes([frame[start + 6], frame[start + 7]]));
        prop_assert_eq!((sum(&got[0][start..]) + field) % 0xffff, 0);
        frame[start + 6..start + 8].copy_from_slice(&got[0][start + 6..start + 8]);
        prop_assert_eq!(&got[0], &frame);
        Ok(())
    };
    TestRunner::new(Config::with_cases(64)).run(&(payload, any::<bool>()), test).unwrap();
}

#[test]
fn full_receive_ring_drops_and_counts_frames() {
    let _place = PacketNamespace::enter("full");
    let mut ends = Ends::new();
    let extra = 10;
    for number in 0..RING_ENTRIES + extra {
        ends.write(&numbered(number), None);
    }
    let (frames, _) = ends.read(RING_ENTRIES as usize);
    assert!(frames.into_iter().eq((0..RING_ENTRIES).map(numbered)));
    assert_eq!(ends.socket.kernel_dropped(), extra.into());
    assert_eq!(ends.socket.kernel_dropped(), extra.into(), "reading clears the kernel's");
    // Without packets, frames stay in the ring.
    ends.write(&numbered(7), None);
    let mut frames = Vec::new();
    assert_eq!(ends.socket.receive(&mut ends.free, PACKETS, 64, &mut frames), Unread::default());
    assert!(frames.is_empty());
    assert_eq!(ends.read(1).0, [numbered(7)]);
}

#[test]
fn packet_socket_sends_in_order_and_returns_packets() {
    const FRAMES: u32 = 20_000;
    let _place = PacketNamespace::enter("out");
    let (pool, mut free) = Pool::new(PACKETS).unwrap();
    let mut a = PacketSocket::new(open("a")).unwrap();
    let mut b = PacketSocket::new(open("b")).unwrap();
    let start = Instant::now();
    let (mut sent, mut got) = (0, 0);
    let mut arrived = Vec::new();
    while got < FRAMES {
        assert!(start.elapsed() < PATIENCE, "{got} of {FRAMES}, {} dropped", b.kernel_dropped());
        // At most as many in flight as the receive ring holds.
        while sent < FRAMES && sent - got < RING_ENTRIES / 2 {
            let Some(mut packet) = free.pop() else { break };
            let frame = numbered(sent);
            packet.reset();
            packet.set_len(frame.len()).unwrap();
            packet.bytes_mut().copy_from_slice(&frame);
            a.send(packet).unwrap();
            sent += 1;
        }
        assert_eq!(a.flush(&mut free).refused, 0);
        assert_eq!(b.receive(&mut free, 0, 64, &mut arrived), Unread::default());
        for packet in arrived.drain(..) {
            assert_eq!(packet.bytes(), numbered(got), "frame {got}");
            got += 1;
            free.push(packet);
        }
    }
    // A socket does not receive its own frames.
    assert_eq!(a.receive(&mut free, 0, 64, &mut arrived), Unread::default());
    assert!(arrived.is_empty());
    assert_eq!((a.kernel_dropped(), b.kernel_dropped()), (0, 0));
    // Frames too long for the device, then a device that is down.
    run("ip link set dev a mtu 1000");
    for number in [10, 1200, 20] {
        let mut packet = free.pop().unwrap();
        packet.reset();
        packet.set_len(numbered(number).len()).unwrap();
        packet.bytes_mut().copy_from_slice(&numbered(number));
        a.send(packet).unwrap();
    }
    assert_eq!(a.flush(&mut free), SendOutcome { taken: 2, refused: 1 });
    run("ip link set dev a down");
    for _ in 0..3 {
        let mut packet = free.pop().unwrap();
        packet.reset();
        packet.set_len(60).unwrap();
        a.send(packet).unwrap();
    }
    assert_eq!(a.flush(&mut free), SendOutcome { taken: 0, refused: 3 });
    free.extend(a.close());
    free.extend(b.close());
    let mut numbers: Vec<usize> = free.iter().map(PacketBuffer::number).collect();
    numbers.sort();
    assert_eq!(numbers, (0..pool.packets()).collect::<Vec<_>>());
}

#[test]
fn packet_socket_backlog_is_bounded_and_returned() {
    let _place = PacketNamespace::enter("bounded");
    let (_pool, mut free) = Pool::new(PACKETS).unwrap();
    let mut socket = PacketSocket::new(open("a")).unwrap();
    let mut refused = 0;
    for _ in 0..RING_ENTRIES + 10 {
        let mut packet = free.pop().unwrap();
        packet.reset();
        packet.set_len(60).unwrap();
        if let Err(packet) = socket.send(packet) {
            refused += 1;
            free.push(packet);
        }
    }
    assert_eq!((refused, socket.room(), socket.sending()), (10, 0, RING_ENTRIES as usize));
    free.extend(socket.close());
    assert_eq!(free.len(), PACKETS);
    // A descriptor that is no packet socket is refused.
    let file = File::open("/proc/self/exe").unwrap();
    let error = PacketSocket::new(file.into()).unwrap_err();
    assert!(error.to_string().contains("PACKET_VERSION"), "{error}");
}

/// A TCP segment over IPv4 with the checksum left to the device, and the offset of its TCP header.
fn long_tcp(payload: &[u8]) -> (Vec<u8>, u16) {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    let total = (40 + payload.len()) as u16;
    frame.extend([0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame[16..18].copy_from_slice(&total.to_be_bytes());
    let sum = pdp_wire::checksum::checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    let pseudo = pdp_wire::checksum::Sum::default().with(&frame[26..34]).with_word(6);
    let left = !pseudo.with_word(total - 20).finish();
    frame.extend([0, 80, 0, 90, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x18, 1, 0]);
    frame.extend(left.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    (frame, 34)
}

#[test]
fn packet_socket_segments_offloaded_frames() {
    const TCP_OVER_IPV4: u8 = 1;
    let _place = PacketNamespace::enter("cut");
    let mut ends = Ends::new();
    // Frames longer than a slot, as long as possible, and
    // with all segments in one slot; between others.
    for (bytes, segment) in [(5_000, 1400), (65_000, 1448), (1000, 300), (1, 1000)] {
        let payload: Vec<u8> = (0..bytes).map(|at: usize| (at ^ (at >> 8)) as u8).collect();
        let (frame, start) = long_tcp(&payload);
        ends.write(&numbered(1), None);
        ends.write_segments(&frame, Some((start, 16)), (TCP_OVER_IPV4, segment));
        ends.write(&numbered(2), None);
        let (frames, lost) = ends.read(bytes.div_ceil(segment.into()) + 2);
        assert_eq!((lost, ends.socket.kernel_dropped()), (0, 0));
        assert_eq!([&frames[0], &frames[frames.len() - 1]], [&numbered(1), &numbered(2)]);
        let mut got: Vec<u8> = Vec::new();
        for frame in &frames[1..frames.len() - 1] {
            let total = (frame.len() - 14) as u16;
            assert_eq!(frame[16..18], total.to_be_bytes());
            assert_eq!(pdp_wire::checksum::checksum(&frame[14..34]), 0);
            let pseudo = pdp_wire::checksum::Sum::default().with(&frame[26..34]).with_word(6);
            assert_eq!(pseudo.with_word(total - 20).with(&frame[34..]).finish(), 0);
            assert_eq!(frame[38..42], (got.len() as u32).to_be_bytes());
            got.extend(&frame[54..]);
        }
        assert_eq!(got, payload);
    }
    // Frames whose segments are all longer than a packet, and a long frame that must not be cut.
    let (frame, start) = long_tcp(&[1; 8_000]);
    ends.write_segments(&frame, Some((start, 16)), (TCP_OVER_IPV4, 4_000));
    ends.write(&numbered(3), None);
    assert_eq!(ends.read(2), (vec![numbered(3)], 1));
    ends.write(&[7; 8_000], None);
    ends.write(&numbered(4), None);
    assert_eq!(ends.read(2), (vec![numbered(4)], 1));
    assert_eq!(ends.free.len(), PACKETS, "no packet is lost");
}
