//! The path out of the node: frames between the node's
//! interface, passt and the sockets of its flows.
//!
//! Each direction waits only for its own other end. passt drops frames if the socket is full, and
//! the kernel drops unread frames of the interface. Datagrams and echo requests never wait.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pdp_net::tap::TapSpec;
use pdp_proto::management::{GATEWAY, INTERFACE, MTU, SOURCE};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::task::coop::consume_budget;

use crate::echo::EchoProtocol;
use crate::frames::{self, EgressVerdict, INSIDE, MAC_NODE, MAC_PASST, PREFIX_LENGTH};
use crate::reachability::RouteQuery;
use crate::sockets::{FlowSockets, Protocol, Sockets};
use crate::udp::UdpProtocol;

/// Longest frame, bytes.
const FRAME_MAX: usize = 1 << 16;

/// Bytes of the length before each frame on passt's socket, as in QEMU's protocol.
const LENGTH: usize = 4;

/// A deleted interface reports an error, but is not readable.
const WATCHED: Interest = Interest::READABLE.add(Interest::ERROR);

/// The ends of the path, before it forwards frames.
pub struct Uplink {
    tap: OwnedFd,
    socket: UnixStream,
    passt: Child,
    routes: RouteQuery,
    datagrams: Sockets<UdpProtocol>,
    /// `None` if the machine permits the node no ping sockets.
    echoes: Option<Sockets<EchoProtocol>>,
}

impl Uplink {
    /// Starts passt on the machine, and makes the node's interface.
    pub fn open(netns: &File, uid: u32) -> Result<Self> {
        let routes = RouteQuery::new().context("cannot ask the machine's kernel for routes")?;
        let datagrams = UdpProtocol::open().context("cannot make sockets for datagrams")?;
        let echoes = EchoProtocol::open(uid).context("cannot make sockets for echo requests")?;
        if echoes.is_none() {
            eprintln!(
                "pings get no answer: net.ipv4.ping_group_range of the machine lacks group {uid}"
            );
        }
        let (socket, passt) = start_passt(uid)?;
        let spec = TapSpec {
            name: INTERFACE.into(),
            mac: MAC_NODE,
            mtu: MTU,
            addresses: Vec::new(),
            routes: Vec::new(),
            queue_frames: None,
            owner: None,
        };
        let tap = pdp_net::management::create(netns.as_fd(), &spec, SOURCE, GATEWAY)
            .with_context(|| format!("cannot make the node's {INTERFACE}"))?;
        Ok(Self { tap, socket, passt, routes, datagrams, echoes })
    }

    /// Forwards frames. Fails when the interface or passt is gone.
    pub async fn run(self) -> Result<()> {
        let Self { tap, socket, mut passt, routes, datagrams, echoes } = self;
        #[expect(deprecated, reason = "what replaces it is unsafe; a File keeps its descriptor")]
        let tap = AsyncFd::with_interest(File::from(tap), WATCHED)
            .context("cannot watch the interface")?;
        let tap = Rc::new(tap);
        socket.set_nonblocking(true).context("cannot watch passt")?;
        let socket = tokio::net::UnixStream::from_std(socket).context("cannot watch passt")?;
        let (from_passt, to_passt) = socket.into_split();
        let datagrams = connected(datagrams, &tap)?;
        let echoes = echoes.map(|echoes| connected(echoes, &tap)).transpose()?;
        let flows = (datagrams.clone(), echoes.clone());
        let result = tokio::select! {
            result = forward_to_passt(tap.clone(), to_passt, flows, routes) => result,
            result = forward_to_node(from_passt, tap.clone()) => result,
            result = datagrams.serve() => result.context("cannot watch datagrams"),
            Some(result) = async { Some(echoes?.serve().await) } => {
                result.context("cannot watch echo requests")
            }
        };
        // passt has written the reason to the same log.
        let ended = passt.try_wait().ok().flatten();
        match ended {
            Some(status) => bail!("passt ended: {status}"),
            None => result,
        }
    }
}

/// Makes the flows whose answers go to the node.
fn connected<P: Protocol + 'static>(
    sockets: Sockets<P>,
    tap: &Rc<AsyncFd<File>>,
) -> Result<Rc<FlowSockets<P>>> {
    let tap = tap.clone();
    let connected = FlowSockets::new(sockets, move |frame| give(&tap, frame));
    Ok(Rc::new(connected.context("cannot watch sockets of flows")?))
}

/// Starts passt as an ordinary user, at the other end of a socket.
fn start_passt(uid: u32) -> Result<(UnixStream, Child)> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None);
    let (ours, theirs) = pair.context("cannot make a socket for passt")?;
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC).context("cannot keep a socket")?;
    let mac = MAC_PASST.map(|byte| format!("{byte:02x}")).join(":");
    let mut command = Command::new("passt");
    command
        .args(["--foreground", "--quiet", "--fd", &theirs.as_raw_fd().to_string()])
        // A machine may have no default route (yet). passt only checks that `lo` exists.
        .args(["--ipv4-only", "--interface", "lo", "--mac-addr", &mac])
        .args(["--address", &INSIDE.to_string(), "--netmask", &PREFIX_LENGTH.to_string()])
        .args(["--gateway", &GATEWAY.to_string(), "--mtu", &MTU.to_string()])
        // The gateway represents no address of the machine.
        .args(["--no-map-gw", "--tcp-ports", "none"])
        // Older versions of passt bind the node's source ports and echo identifiers on the machine.
        // So it gets no datagrams and echo requests, and makes none.
        .args(["--udp-ports", "none", "--no-icmp", "--no-dhcp", "--dns", "none"])
        .uid(uid)
        .gid(uid)
        .current_dir("/")
        .stdin(Stdio::null());
    let child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            anyhow::anyhow!("passt is missing (install the package passt, or set outside: false)")
        }
        _ => anyhow::Error::new(error).context("cannot start passt"),
    })?;
    Ok((UnixStream::from(ours), child))
}

/// Forwards frames of the node.
async fn forward_to_passt(
    tap: Rc<AsyncFd<File>>,
    mut passt: tokio::net::unix::OwnedWriteHalf,
    (datagrams, echoes): (Rc<FlowSockets<UdpProtocol>>, Option<Rc<FlowSockets<EchoProtocol>>>),
    mut routes: RouteQuery,
) -> Result<()> {
    let mut buffer = vec![0; LENGTH + FRAME_MAX];
    loop {
        let mut ready = tap.ready(WATCHED).await.context("cannot wait for the interface")?;
        let read = ready.try_io(|tap| tap.get_ref().read(&mut buffer[LENGTH..]));
        let Ok(read) = read else { continue };
        let length = read.with_context(|| format!("{INTERFACE} is gone"))?;
        let (head, frame) = buffer.split_at_mut(LENGTH);
        let frame = &mut frame[..length];
        let verdict = frames::egress(frame, |to: Ipv4Addr| routes.leads_away(to, Instant::now()));
        match verdict {
            EgressVerdict::Forward => {
                // It is at most FRAME_MAX.
                head.copy_from_slice(&(length as u32).to_be_bytes());
                passt.write_all(&buffer[..LENGTH + length]).await.context("passt is gone")?;
            }
            EgressVerdict::Datagram(flow, bytes) => {
                datagrams.send(flow, &frame[bytes], Instant::now())
            }
            EgressVerdict::Echo(flow, bytes) => {
                if let Some(echoes) = &echoes {
                    echoes.send(flow, &frame[bytes], Instant::now());
                }
            }
            EgressVerdict::Refused(reply) => give(&tap, &reply),
            EgressVerdict::Dropped => {}
        }
        // The node may always have more to send.
        consume_budget().await;
    }
}

/// Forwards frames of passt.
async fn forward_to_node(
    passt: tokio::net::unix::OwnedReadHalf,
    tap: Rc<AsyncFd<File>>,
) -> Result<()> {
    let mut passt = BufReader::with_capacity(FRAME_MAX, passt);
    let mut buffer = vec![0; FRAME_MAX];
    loop {
        let length = passt.read_u32().await.context("passt is gone")? as usize;
        let Some(frame) = buffer.get_mut(..length) else { bail!("passt sent invalid data") };
        passt.read_exact(frame).await.context("passt is gone")?;
        if frames::ingress(frame) {
            give(&tap, frame);
        }
    }
}

/// Writes a frame to the node. An interface that is down refuses it.
fn give(tap: &AsyncFd<File>, frame: &[u8]) {
    let _ = tap.get_ref().write(frame);
}
