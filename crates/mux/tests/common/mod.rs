//! A mux in the test's own process, and peers that speak memif to it.
#![allow(dead_code)]

pub mod engines;
pub mod place;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_memif::{ConnectionState, Listener, MemifClient, MemifSettings};
use pdp_model::{NodeStats, Stats};
use pdp_mux::control::{MuxServer, MuxSettings};
use pdp_mux::memif::Memif;
use pdp_proto::mux::*;
use pdp_wire::tag::{Tag, TagVerdict};

/// Every expected event happens within this time.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn start(workers: usize) -> MuxServer {
    MuxServer::start(&MuxSettings { workers, cpus: vec![], pool_packets: 8192 * workers }).unwrap()
}

/// Sends a request as pdpd does: gives the mux the sockets that it lacks.
pub fn put_with_sockets(
    mut ask: impl FnMut(MuxRequest, Vec<OwnedFd>) -> MuxReply,
    request: MuxRequest,
) -> MuxReply {
    let MuxReply::Lacks { sockets } = ask(request.clone(), vec![]) else {
        return ask(request, vec![]);
    };
    let listeners = sockets.iter().map(|path| Listener::bind(path).unwrap().into()).collect();
    assert_eq!(ask(MuxRequest::Listen { sockets }, listeners), MuxReply::Done);
    ask(request, vec![])
}

fn put_vnet(mux: &MuxServer, vnet: &VnetConfig) -> MuxReply {
    put_with_sockets(
        |request, fds| mux.handle(request, fds),
        MuxRequest::PutVnet(Box::new(vnet.clone())),
    )
}

pub fn put(mux: &MuxServer, vnet: &VnetConfig) {
    assert_eq!(put_vnet(mux, vnet), MuxReply::Done);
}

pub fn refused(mux: &MuxServer, vnet: &VnetConfig) -> String {
    match put_vnet(mux, vnet) {
        MuxReply::Failed { error } => error,
        other => panic!("not refused: {other:?}"),
    }
}

pub fn stats(mux: &MuxServer) -> Stats {
    match mux.handle(MuxRequest::Stats { vnet: None }, vec![]) {
        MuxReply::Stats(stats) => *stats,
        other => panic!("{other:?}"),
    }
}

pub fn node_stats(mux: &MuxServer, vnet: &str, node: &str) -> NodeStats {
    stats(mux).vnets[vnet].nodes[node].clone()
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits as [`eventually`], and returns the value.
pub fn soon<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let mut found = None;
    eventually(what, || {
        found = check();
        found.is_some()
    });
    found.unwrap()
}

/// Checks every node's balance: the frames that it received
/// or made equal those that ended or are in flight.
pub fn assert_adds_up(stats: &Stats) {
    for (vnet, counters) in &stats.vnets {
        for (name, node) in &counters.nodes {
            let ports = node.ports.values();
            let received: u64 =
                ports.clone().map(|port| port.received + port.made + port.duplicated).sum();
            let ended: u64 = ports
                .map(|p| p.sent + p.punted + p.consumed + p.dropped.values().sum::<u64>())
                .sum();
            assert_eq!(received, ended + node.in_flight, "{vnet}/{name}: {node:#?}");
        }
    }
}

pub fn dropped(node: &NodeStats, reason: &str) -> u64 {
    node.ports.values().filter_map(|port| port.dropped.get(reason)).sum()
}

pub fn unlimited() -> Rate {
    Rate { bps: 0, pps: 0 }
}

pub fn ports(count: u8) -> Vec<PortConfig> {
    let port =
        |index| PortConfig { name: format!("eth{index}"), mac: [2, 0, 0, 0, 0, index], mtu: 1500 };
    (0..count).map(port).collect()
}

pub fn directory(root: &Path, name: &str) -> PathBuf {
    let directory = root.join(name);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

pub fn host(root: &Path, name: &str) -> NodeConfig {
    let tap_socket = directory(root, name).join("trunk.sock");
    NodeConfig { name: name.into(), ports: ports(1), tap_socket, router: None }
}

pub fn router(root: &Path, name: &str, count: u8, guests: &[(u32, AttachMode)]) -> NodeConfig {
    let guests = guests.iter().map(|(number, attach)| GuestConfig {
        number: *number,
        socket: directory(root, &format!("{name}-g{number}")).join("memif.sock"),
        attach: *attach,
        weight: 1000,
        leaving: false,
    });
    NodeConfig {
        name: name.into(),
        ports: ports(count),
        tap_socket: directory(root, name).join("trunk.sock"),
        router: Some(RouterConfig {
            guests: guests.collect(),
            policy: GuestDistribution::RoundRobin,
            flow: FlowKey::Ip,
            punt_filters: vec![],
            punt_limits: [unlimited(); PUNT_CLASSES],
            engine: None,
        }),
    }
}

pub fn port(node: &str, port: u16) -> VlinkEnd {
    VlinkEnd::Port { node: node.into(), port }
}

pub fn vlink(name: &str, a: VlinkEnd, b: VlinkEnd) -> Vlink {
    vlink_of(name, vec![a, b])
}

/// Returns a vlink; with more than two ends, a segment.
pub fn vlink_of(name: &str, ends: Vec<VlinkEnd>) -> Vlink {
    let segment = (ends.len() > 2).then_some(SegmentConfig { addresses: 16_384, flood_pps: 1000 });
    let leaving = vec![EgressConfig { queue_frames: 256, ..EgressConfig::default() }; ends.len()];
    Vlink { name: name.into(), ends, leaving, up: true, segment, schedule: None, queues: vec![] }
}

/// Returns an external end with this name.
pub fn outside(name: &str, interface: &str, by: Encapsulation) -> VlinkEnd {
    VlinkEnd::External { name: name.into(), interface: interface.into(), by }
}

/// Returns a vnet with the hosts h1 and h2, and between them r1 with two ports and these guests.
pub fn two_hosts(root: &Path, name: &str, guests: &[(u32, AttachMode)]) -> VnetConfig {
    let root = directory(root, name);
    VnetConfig {
        name: name.into(),
        police: None,
        nodes: vec![router(&root, "r1", 2, guests), host(&root, "h1"), host(&root, "h2")],
        vlinks: vec![
            vlink("left", port("h1", 0), port("r1", 0)),
            vlink("right", port("r1", 1), port("h2", 0)),
        ],
    }
}

pub fn frame(length: usize, mark: u64) -> Vec<u8> {
    let mut frame = vec![0; length.max(60)];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame[14..22].copy_from_slice(&mark.to_be_bytes());
    frame
}

pub fn mark(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame[14..22].try_into().unwrap())
}

/// Returns a memfd with one frame for a generator.
pub fn one_frame() -> OwnedFd {
    let fd = rustix::fs::memfd_create("frames", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    let frame = frame(60, 0);
    std::io::Write::write_all(&mut file, &(frame.len() as u16).to_le_bytes()).unwrap();
    std::io::Write::write_all(&mut file, &frame).unwrap();
    file.into()
}

/// The mux's side of a connection.
pub type MuxLink = pdp_mux::channel::PeerConnection<Memif>;

/// A memif client.
pub struct Peer {
    pub client: MemifClient,
}

impl Peer {
    /// Connects to interface `id` at `path`.
    pub fn connect(path: &Path, id: u32) -> Self {
        let mut peer = Self::new(path, id);
        eventually("memif connection", || peer.client.poll() == ConnectionState::Up);
        peer
    }

    pub fn new(path: &Path, id: u32) -> Self {
        let settings = MemifSettings { buffers: 4096, ..MemifSettings::default() };
        Self { client: MemifClient::new(path, id, "test", settings).unwrap() }
    }

    pub fn tap_of(node: &NodeConfig) -> Self {
        Self::connect(&node.tap_socket, 0)
    }

    pub fn guest_of(node: &NodeConfig, index: usize) -> Self {
        Self::connect(&node.router.as_ref().unwrap().guests[index].socket, 0)
    }

    /// Sends one frame (or completion) behind a tag. False if there is no space.
    pub fn send(&mut self, tag: Tag, frame: &[u8]) -> bool {
        self.send_raw(tag.emit(), frame)
    }

    /// Sends one frame with a word that may not be a valid tag.
    pub fn send_raw(&mut self, word: u32, frame: &[u8]) -> bool {
        let Some(mut buf) = self.client.alloc() else { return false };
        assert!(buf.set_len(frame.len()));
        self.client.bytes_mut(&mut buf).copy_from_slice(frame);
        buf.set_metadata(word);
        let sent = self.client.send(buf);
        let ok = sent.is_ok();
        if let Err(buf) = sent {
            self.client.free(buf);
        }
        self.client.flush();
        ok
    }

    pub fn out(&mut self, vport: u8, frame: &[u8]) -> bool {
        self.send(Tag { verdict: TagVerdict::Out, vport, last: false, trace: 0 }, frame)
    }

    /// Receives all frames so far, with tags.
    pub fn receive(&mut self) -> Vec<(Tag, Vec<u8>)> {
        let raw = self.receive_words().into_iter();
        raw.map(|(word, bytes)| (Tag::parse(word).unwrap(), bytes)).collect()
    }

    /// Receives all frames so far, on an interface without tags.
    pub fn receive_raw(&mut self) -> Vec<Vec<u8>> {
        self.receive_words().into_iter().map(|(_, bytes)| bytes).collect()
    }

    fn receive_words(&mut self) -> Vec<(u32, Vec<u8>)> {
        let mut bufs = Vec::new();
        self.client.receive(&mut bufs, 256);
        let mut frames = Vec::new();
        for buf in bufs {
            frames.push((buf.metadata(), self.client.bytes(&buf).to_vec()));
            self.client.free(buf);
        }
        self.client.flush();
        frames
    }

    /// Waits for `count` frames, and returns them.
    pub fn expect(&mut self, count: usize) -> Vec<(Tag, Vec<u8>)> {
        let mut frames = Vec::new();
        eventually("frames", || {
            frames.extend(self.receive());
            frames.len() >= count
        });
        frames
    }

    pub fn is_up(&mut self) -> bool {
        self.client.poll() == ConnectionState::Up
    }
}

/// Returns the tag of the completion that sends the frame out.
pub fn out(vport: u8, trace: u8) -> Tag {
    Tag { verdict: TagVerdict::Out, vport, last: true, trace }
}

/// Returns both ends of a connection to an interface at
/// `path`, where nobody listens yet. `epoch` is its number.
pub fn pair(path: &Path, interface: u32, epoch: u64) -> (Peer, MuxLink, pdp_memif::MemifControl) {
    let listener = Listener::bind(path).unwrap();
    let mut peer = Peer::new(path, interface);
    let (mut handshake, mut connection) = (None, None);
    eventually("connected", || {
        peer.client.poll();
        if handshake.is_none() {
            handshake = listener.accept().unwrap();
        }
        if let (Some(handshake), None) = (&mut handshake, &connection) {
            connection = handshake.poll(|_| true).unwrap();
        }
        peer.is_up() && connection.is_some()
    });
    let pdp_memif::MemifConnection { tx, rx, control, .. } = connection.unwrap();
    (peer, MuxLink::new(tx, rx, epoch), control)
}
