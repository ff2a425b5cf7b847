//! Network namespaces with a node between two outside machines, and a mux on its interfaces.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use pdp_afxdp::{bind_socket, create_socket};
use pdp_mux::control::MuxServer;
use pdp_net::interface::InterfaceInfo;
use pdp_net::xdp::{Take, Xdp};
use pdp_proto::mux::*;

use super::{Peer, directory, out, outside, port, router, vlink};

/// A mux, in this process or in its own.
pub trait Control {
    fn ask(&mut self, request: MuxRequest, fds: Vec<OwnedFd>) -> MuxReply;
    fn pool(&self) -> BorrowedFd<'_>;
}

impl Control for MuxServer {
    fn ask(&mut self, request: MuxRequest, fds: Vec<OwnedFd>) -> MuxReply {
        self.handle(request, fds)
    }

    fn pool(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

/// Three namespaces; the calling thread is in the node's.
pub struct Place {
    id: String,
    pins: Vec<PathBuf>,
    /// XDP programs of the mux's devices, in the order in which it got them.
    pub programs: Vec<Xdp>,
    children: Vec<Child>,
}

impl Place {
    pub fn enter(test: &str) -> Self {
        let id = format!("mux-{test}-{}", std::process::id());
        let place = Self { id, pins: vec![], programs: vec![], children: vec![] };
        for name in ["node", "out1", "out2"] {
            run(&format!("ip netns add {}", place.netns(name)));
        }
        for (device, out, net) in [("a", "out1", 1), ("b", "out2", 2)] {
            let (node, out) = (place.netns("node"), place.netns(out));
            run(&format!(
                "ip link add name {device} netns {node} type veth peer name eth0 netns {out}"
            ));
            run(&format!("ip netns exec {out} ethtool -K eth0 tx off"));
            run(&format!("ip -n {node} addr add 10.9.{net}.1/24 dev {device}"));
            run(&format!("ip -n {node} addr add fd00:{net}::1/64 dev {device} nodad"));
            run(&format!("ip -n {out} addr add 10.9.{net}.2/24 dev eth0"));
            run(&format!("ip -n {out} addr add fd00:{net}::2/64 dev eth0 nodad"));
            run(&format!("ip -n {node} link set dev {device} up"));
            run(&format!("ip -n {out} link set eth0 up"));
        }
        pdp_net::xdp::mount_bpf_fs().unwrap();
        let netns = File::open(format!("/run/netns/{}", place.netns("node"))).unwrap();
        enter(&netns);
        place
    }

    pub fn netns(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }

    /// Makes a device an external interface of the mux.
    pub fn external(&mut self, mux: &mut impl Control, device: &str, takes: &[Take]) {
        let facts = InterfaceInfo::by_name(device).unwrap();
        let socket = create_socket(mux.pool()).unwrap();
        let pins = PathBuf::from(format!("/sys/fs/bpf/{}-{device}", self.id));
        self.pins.push(pins.clone());
        let mut xdp = Xdp::attach(device, &pins).unwrap();
        xdp.set_takes(takes).unwrap();
        xdp.take_all(takes.is_empty()).unwrap();
        xdp.set_sockets(&[(0, socket.as_fd())]).unwrap();
        let (index, twin) = (facts.index, socket.try_clone().unwrap());
        self.put_external(mux, facts, xdp, vec![socket], OutletConfig::Xdp);
        bind_socket(twin.as_fd(), index, 0).unwrap();
    }

    /// Makes a whole device an external interface of the mux, by a packet socket.
    pub fn packet_external(&mut self, mux: &mut impl Control, device: &str) {
        let facts = InterfaceInfo::by_name(device).unwrap();
        let pins = PathBuf::from(format!("/sys/fs/bpf/{}-{device}", self.id));
        self.pins.push(pins.clone());
        let (mut program, filter) = Xdp::attach_behind_sockets(device, &pins).unwrap();
        program.take_all(true).unwrap();
        let fds = pdp_net::packet::open(device, facts.index, 1, filter.as_fd()).unwrap();
        self.put_external(mux, facts, program, fds, OutletConfig::Packet);
    }

    fn put_external(
        &mut self,
        mux: &mut impl Control,
        facts: InterfaceInfo,
        program: Xdp,
        fds: Vec<OwnedFd>,
        outlet: impl Fn(Device) -> OutletConfig,
    ) {
        let InterfaceInfo { name: device, index: ifindex, mac, mtu, .. } = facts;
        let name = device.to_uppercase();
        let outlet = outlet(Device { device, ifindex, mac, is_virtual: true });
        let external = ExternalConfig::new(name, mtu, outlet);
        assert_eq!(mux.ask(MuxRequest::PutExternal(external), fds), MuxReply::Done);
        self.programs.push(program);
    }

    /// Stops the kernels from sending packets of their own on the wires.
    pub fn hush(&self) {
        for (name, device) in [("node", "a"), ("node", "b"), ("out1", "eth0"), ("out2", "eth0")] {
            self.exec(name, &format!("sysctl -qw net.ipv6.conf.{device}.disable_ipv6=1"));
            self.exec(name, &format!("ip addr flush dev {device}"));
        }
    }

    /// Adds another machine, `far`, behind `out1`, which becomes
    /// a router. Its networks are 10.9.7.0/24 and fd00:7::/64.
    pub fn add_far(&self) {
        run(&format!("ip netns add {}", self.netns("far")));
        let (out, far) = (self.netns("out1"), self.netns("far"));
        run(&format!("ip link add name far netns {out} type veth peer name eth0 netns {far}"));
        for (netns, device, host) in [(&out, "far", 1), (&far, "eth0", 2)] {
            run(&format!("ip netns exec {netns} ethtool -K {device} tx off"));
            run(&format!("ip -n {netns} addr add 10.9.7.{host}/24 dev {device}"));
            run(&format!("ip -n {netns} addr add fd00:7::{host}/64 dev {device} nodad"));
            run(&format!("ip -n {netns} link set {device} up"));
        }
        run(&format!("ip -n {far} route add default via 10.9.7.1"));
        run(&format!("ip -n {far} route add default via fd00:7::1"));
        let sysctl = "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1";
        self.exec("out1", sysctl);
    }

    /// Returns true if a command in the namespace succeeds.
    pub fn succeeds(&self, name: &str, command: &str) -> bool {
        let words = format!("netns exec {} {command}", self.netns(name));
        Command::new("ip").args(words.split(' ')).output().unwrap().status.success()
    }

    /// Opens a packet socket on an outside machine's wire.
    pub fn raw(&self, name: &str) -> Raw {
        self.raw_on(name, "eth0")
    }

    /// Opens a packet socket on any device.
    pub fn raw_on(&self, name: &str, device: &'static str) -> Raw {
        let netns = File::open(format!("/run/netns/{}", self.netns(name))).unwrap();
        std::thread::spawn(move || {
            enter(&netns);
            Raw::open(device)
        })
        .join()
        .unwrap()
    }

    pub fn exec(&self, name: &str, command: &str) {
        run(&format!("ip netns exec {} {command}", self.netns(name)));
    }

    pub fn spawn(&mut self, name: &str, command: &str) {
        let mut all = Command::new("ip");
        all.args(["netns", "exec", &self.netns(name)]).args(command.split(' '));
        self.children.push(all.stderr(Stdio::null()).spawn().unwrap());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        for pins in &self.pins {
            let _ = pdp_net::xdp::detach(pins);
        }
        for name in ["node", "out1", "out2", "far"] {
            let mut delete = Command::new("ip");
            // Not every place has `far`.
            let _ = delete.args(["netns", "del", &self.netns(name)]).stderr(Stdio::null()).status();
        }
    }
}

/// Moves the calling thread into a namespace.
fn enter(netns: &File) {
    let kind = Some(rustix::thread::LinkNameSpaceType::Network);
    rustix::thread::move_into_link_name_space(netns.as_fd(), kind).unwrap();
}

/// A packet socket that sends any bytes, and receives frames.
pub struct Raw(OwnedFd);

impl Raw {
    fn open(device: &str) -> Self {
        let name = std::ffi::CString::new(device).unwrap();
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: plain system calls with whole arguments of the lengths given.
        unsafe {
            let fd = libc::socket(libc::AF_PACKET, kind, 0);
            assert!(fd >= 0, "needs root");
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
            address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
            for (level, option, value) in [
                (libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1i32),
                (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 64 << 20),
            ] {
                let value = (&raw const value).cast();
                assert_eq!(libc::setsockopt(fd, level, option, value, 4), 0);
            }
            let bytes = size_of_val(&address) as u32;
            assert_eq!(libc::bind(fd, (&raw const address).cast(), bytes), 0);
            Self(OwnedFd::from_raw_fd(fd))
        }
    }

    /// Sends a frame. False if the kernel refused it: it is
    /// shorter than a header, or longer than the wire's MTU.
    pub fn send(&self, frame: &[u8]) -> bool {
        rustix::io::write(&self.0, frame).is_ok()
    }

    /// Receives all frames so far.
    pub fn receive(&self) -> Vec<Vec<u8>> {
        let mut bytes = [0; 4096];
        let mut frames = Vec::new();
        while let Ok(count) = rustix::io::read(&self.0, &mut bytes) {
            frames.push(bytes[..count].to_vec());
        }
        frames
    }
}

pub fn run(command: &str) {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}\n{output:?}");
}

/// Returns a vnet with a router between two external ends, whose guest is a wire.
pub fn wire_vnet(root: &Path, name: &str, a: Encapsulation, b: Encapsulation) -> VnetConfig {
    let root = directory(root, name);
    VnetConfig {
        name: name.into(),
        police: None,
        nodes: vec![router(&root, "r1", 2, &[(0, AttachMode::Runtime)])],
        vlinks: vec![
            vlink("left", port("r1", 0), outside("a", "A", a)),
            vlink("right", outside("b", "B", b), port("r1", 1)),
        ],
    }
}

/// Serves as the guest of each vnet until `stop`.
pub fn wires(vnets: &[&VnetConfig], stop: Arc<AtomicBool>) -> JoinHandle<()> {
    let mut guests: Vec<Peer> =
        vnets.iter().map(|vnet| Peer::guest_of(&vnet.nodes[0], 0)).collect();
    std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            for guest in &mut guests {
                guest.is_up();
                for (tag, bytes) in guest.receive() {
                    let tag = out(1 - tag.vport, tag.trace);
                    while !guest.send(tag, &bytes) && !stop.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                }
            }
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    })
}
