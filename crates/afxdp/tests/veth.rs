//! Two sockets at the ends of a veth, in a network namespace of the test's own.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use pdp_afxdp::{
    PacketBuffer, Pool, RING_ENTRIES, XdpSocket, bind_socket, create_socket, poll_busily,
};
use pdp_net::xdp::Xdp;

const PATIENCE: Duration = Duration::from_secs(20);

/// A namespace with the veth a–b, entered by the calling thread; removed when dropped.
struct VethNamespace {
    name: String,
    programs: Vec<PathBuf>,
}

impl VethNamespace {
    fn enter(test: &str) -> Self {
        let place = Self { name: format!("afxdp-{test}-{}", std::process::id()), programs: vec![] };
        run(&format!("ip netns add {}", place.name));
        run(&format!("ip -n {} link add name a type veth peer name b", place.name));
        for end in ["a", "b"] {
            run(&format!(
                "ip netns exec {} sysctl -qw net.ipv6.conf.{end}.disable_ipv6=1",
                place.name
            ));
            run(&format!("ip -n {} link set dev {end} up", place.name));
        }
        let netns = File::open(format!("/run/netns/{}", place.name)).unwrap();
        // SAFETY: changes this thread only, which belongs to the test.
        assert_eq!(unsafe { libc::setns(netns.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
        place
    }

    /// Returns a socket that receives all frames of an end.
    fn socket(&mut self, device: &str, pool: &Pool) -> XdpSocket {
        self.socket_polled(device, pool, false)
    }

    fn socket_polled(&mut self, device: &str, pool: &Pool, busily: bool) -> XdpSocket {
        let name = std::ffi::CString::new(device).unwrap();
        // SAFETY: a C string.
        let ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) };
        let fd = create_socket(pool.memfd()).unwrap();
        if busily {
            poll_busily(fd.as_fd()).unwrap();
        }
        let socket = XdpSocket::new(fd, pool).unwrap();
        bind_socket(socket.as_fd(), ifindex, 0).unwrap();
        let pins = PathBuf::from(format!("/sys/fs/bpf/{}-{device}", self.name));
        self.programs.push(pins.clone());
        pdp_net::xdp::mount_bpf_fs().unwrap();
        let mut xdp = Xdp::attach(device, &pins).unwrap();
        xdp.take_all(true).unwrap();
        xdp.set_sockets(&[(0, socket.as_fd())]).unwrap();
        socket
    }
}

impl Drop for VethNamespace {
    fn drop(&mut self) {
        for pins in &self.programs {
            let _ = pdp_net::xdp::detach(pins);
        }
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{command}");
}

fn option(socket: &impl AsFd, name: i32) -> i32 {
    let (mut value, mut bytes) = (-1i32, 4);
    let fd = socket.as_fd().as_raw_fd();
    let at = (&raw mut value).cast();
    // SAFETY: the kernel writes the four bytes that it is given.
    let result = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, at, &mut bytes) };
    assert_eq!(result, 0);
    value
}

fn fill(packet: &mut PacketBuffer, number: u32) {
    let length = 60 + number as usize % 1440;
    packet.reset();
    packet.set_len(length).unwrap();
    let bytes = packet.bytes_mut();
    bytes.fill(number as u8);
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    bytes[14..18].copy_from_slice(&number.to_be_bytes());
}

#[test]
fn xdp_sockets_pass_frames_and_return_packets() {
    pass_frames(false);
}

#[test]
fn busy_polling_sockets_receive_every_frame() {
    pass_frames(true);
}

fn pass_frames(busily: bool) {
    const FRAMES: u32 = 20_000;
    let mut place = VethNamespace::enter(if busily { "busily" } else { "all" });
    let (pool, mut free) = Pool::new(16384).unwrap();
    let mut a = place.socket_polled("a", &pool, busily);
    let mut b = place.socket_polled("b", &pool, busily);
    let options = [libc::SO_PREFER_BUSY_POLL, libc::SO_BUSY_POLL].map(|name| option(&b, name) > 0);
    assert_eq!(options, [busily; 2]);
    let start = Instant::now();
    let (mut sent, mut got) = (0, 0);
    let mut arrived = Vec::new();
    while got < FRAMES {
        assert!(start.elapsed() < PATIENCE, "{got} of {FRAMES}, {} dropped", b.kernel_dropped());
        b.fill(&mut free, 4096);
        // At most as many in flight as the receive ring holds.
        while sent < FRAMES && sent - got < RING_ENTRIES / 2 {
            let Some(mut packet) = free.pop() else { break };
            fill(&mut packet, sent);
            if let Err(packet) = a.send(packet) {
                free.push(packet);
                break;
            }
            sent += 1;
        }
        a.flush();
        a.complete(&mut free);
        b.receive(&mut arrived, 64);
        for mut packet in arrived.drain(..) {
            let bytes = packet.bytes().to_vec();
            fill(&mut packet, got);
            assert_eq!(bytes, packet.bytes(), "frame {got}");
            got += 1;
            free.push(packet);
        }
    }
    while a.sending() > 0 {
        assert!(start.elapsed() < PATIENCE);
        a.flush();
        a.complete(&mut free);
    }
    assert_eq!(b.kernel_dropped(), 0);
    free.extend(a.close());
    free.extend(b.close());
    let mut numbers: Vec<usize> = free.iter().map(PacketBuffer::number).collect();
    numbers.sort();
    assert_eq!(numbers, (0..16384).collect::<Vec<_>>());
}

/// A bridge removes the tag from received frames and leaves re-inserting it to the veth.
#[test]
fn vlan_tags_arrive_with_their_frames() {
    let mut place = VethNamespace::enter("vlan");
    let bridge = [
        "link add name br type bridge",
        "link add name c type veth peer name d",
        "link set dev b master br",
        "link set dev c master br",
        "link set dev br up",
        "link set dev c up",
        "link set dev d up",
    ];
    bridge.iter().for_each(|command| run(&format!("ip {command}")));
    let (pool, mut free) = Pool::new(8192).unwrap();
    let (mut a, mut d) = (place.socket("a", &pool), place.socket("d", &pool));
    a.fill(&mut free, 4096);
    // Sends until the bridge forwards and a frame arrives; returns its bytes.
    let mut through = |free: &mut Vec<PacketBuffer>| {
        let (start, mut arrived) = (Instant::now(), Vec::new());
        loop {
            assert!(start.elapsed() < PATIENCE, "no frame arrives");
            let mut packet = free.pop().unwrap();
            fill(&mut packet, 100);
            packet.bytes_mut()[12..18].copy_from_slice(&[0x81, 0, 0, 5, 0x88, 0xb5]);
            let sent = packet.bytes().to_vec();
            assert!(d.send(packet).is_ok());
            d.flush();
            std::thread::sleep(Duration::from_millis(20));
            d.complete(free);
            a.receive(&mut arrived, 64);
            let ours = arrived.iter().map(|packet| packet.bytes().to_vec());
            let ours = ours.rev().find(|bytes| bytes[..12] == sent[..12]);
            free.append(&mut arrived);
            a.fill(free, 4096);
            if let Some(bytes) = ours {
                return (sent, bytes);
            }
        }
    };
    let (sent, without) = through(&mut free);
    assert_eq!(without.len(), sent.len() - 4, "what this test is about: the tag is gone");
    let device = pdp_net::interface::InterfaceInfo::by_name("a").unwrap();
    assert_eq!(device.veth_peer.as_deref(), Some("b"));
    assert!(pdp_net::ethtool::tags_in_frames("a", device.veth_peer.as_deref()).unwrap());
    std::thread::sleep(Duration::from_millis(100));
    through(&mut free);
    let (sent, with) = through(&mut free);
    assert_eq!(with, sent);
}

#[test]
fn full_transmit_ring_returns_packets() {
    let mut place = VethNamespace::enter("full");
    let (pool, mut free) = Pool::new(8192).unwrap();
    let (mut a, b) = (place.socket("a", &pool), place.socket("b", &pool));
    let mut refused = 0;
    for number in 0..RING_ENTRIES + 10 {
        let mut packet = free.pop().unwrap();
        fill(&mut packet, number);
        if let Err(packet) = a.send(packet) {
            refused += 1;
            free.push(packet);
        }
    }
    assert_eq!((refused, a.room()), (10, 0));
    let start = Instant::now();
    while a.sending() > 0 {
        assert!(start.elapsed() < PATIENCE);
        a.flush();
        a.complete(&mut free);
    }
    while b.kernel_dropped() < u64::from(RING_ENTRIES) {
        assert!(start.elapsed() < PATIENCE, "{} dropped", b.kernel_dropped());
    }
    assert_eq!(free.len(), 8192);
}

/// As a device with a full queue does, or a full send buffer.
#[test]
fn flush_does_not_retry_a_busy_device() {
    let mut place = VethNamespace::enter("busy");
    let (pool, mut free) = Pool::new(8192).unwrap();
    let mut a = place.socket("a", &pool);
    let mut packet = free.pop().unwrap();
    fill(&mut packet, 0);
    a.send(packet).unwrap();
    // Replaces the kernel's side by one that counts requests and takes nothing.
    let (asked, takes_nothing) = UnixDatagram::pair().unwrap();
    asked.set_nonblocking(true).unwrap();
    // SAFETY: both descriptors are open, and the socket's mappings do not need its own.
    unsafe { libc::dup2(takes_nothing.as_raw_fd(), a.as_fd().as_raw_fd()) };
    let asked = || std::iter::from_fn(|| asked.recv(&mut [0]).ok()).count();
    (0..3).for_each(|_| a.flush());
    assert_eq!((asked(), a.sending()), (3, 1));
}

#[test]
fn errors_say_what_to_do() {
    let mut place = VethNamespace::enter("errors");
    let (pool, _free) = Pool::new(64).unwrap();
    let _taken = place.socket("a", &pool);
    let text = |device: &str, queue| {
        let name = std::ffi::CString::new(device).unwrap();
        // SAFETY: a C string.
        let ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) };
        let socket = create_socket(pool.memfd()).unwrap();
        bind_socket(socket.as_fd(), ifindex, queue).unwrap_err().to_string()
    };
    assert!(text("a", 0).contains("has a socket already"), "{}", text("a", 0));
    assert!(text("b", 99).contains("no such receive queue"), "{}", text("b", 99));
    let file = File::open("/proc/self/exe").unwrap();
    let not = create_socket(file.as_fd()).unwrap_err();
    assert!(!not.to_string().is_empty());
}
