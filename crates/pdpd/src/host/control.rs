//! Calls to the mux, the TAP helpers and the route mirrors.
//!
//! Each call uses its own connection. So the next call reaches a peer that was replaced,
//! and a long call (a trace, a capture) delays no other. Every call ends within its
//! time-out, whatever the peer sends. It reads no more than an answer may have.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_model::Stats;
use pdp_proto::channel::{Channel, FRAME_BYTES_MAX};
use pdp_proto::limits::{ADDRESSES_MAX, PORTS_MAX, VNET_QUEUES_MAX};
use pdp_proto::{mirror, mux, tap};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest wait for an answer to an ordinary call.
pub const CALL_MAX: Duration = Duration::from_secs(20);

/// Longest answer of the mux except counters, bytes: the sockets of the
/// largest vnet, or the names of all vnets.
const MUX_ANSWER_BYTES_MAX: usize = 4 << 20;

/// Longest answer with the counters of one vnet, bytes: 1 KiB for each
/// port that it may have, and 256 for each queue.
const VNET_STATS_BYTES_MAX: usize = (PORTS_MAX << 10) + (VNET_QUEUES_MAX << 8);

/// Longest forwarding database of a segment, bytes: 128 per address. A
/// segment may have half as many again as its limit.
const FDB_BYTES_MAX: usize = (ADDRESSES_MAX as usize) * 3 / 2 * 128;

/// Longest answer of a TAP helper, or of a mirror's status, bytes.
const HELPER_ANSWER_BYTES_MAX: usize = 1 << 20;

/// Longest part of a mirror's routes, bytes: 1,024 routes with 128 hops each, on both sides.
const ROUTES_BYTES_MAX: usize = 32 << 20;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The peer can't be reached, or closed the connection.
    #[error("{peer} at {path}: no answer to {request}")]
    Unreachable {
        /// Name of the peer.
        peer: &'static str,
        /// Socket of the peer.
        path: PathBuf,
        /// The request.
        request: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The peer refused.
    #[error("{peer}: {reason}")]
    Refused {
        /// Name of the peer.
        peer: &'static str,
        /// The peer's reason.
        reason: String,
    },
    /// The answer does not match the request: the peer has another version.
    #[error(
        "{peer} at {path}: unexpected answer to {request}; install one version of all programs"
    )]
    Unexpected {
        /// Name of the peer.
        peer: &'static str,
        /// Its socket.
        path: PathBuf,
        /// The request.
        request: &'static str,
    },
}

impl ControlError {
    /// True if the peer runs and did not answer in time.
    pub fn is_timeout(&self) -> bool {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        matches!(self, Self::Unreachable { source, .. } if matches!(source.kind(), TimedOut | WouldBlock))
    }

    /// True if the mux did not run, or ended before it answered.
    pub fn is_mux_gone(&self) -> bool {
        matches!(self, Self::Unreachable { peer, .. } if *peer == MUX)
            && !self.is_timeout()
            && !self.is_nonsense_of_mux()
    }

    /// True if the answer is one that no mux of this version sends.
    pub fn is_nonsense_of_mux(&self) -> bool {
        match self {
            Self::Unexpected { peer, .. } => *peer == MUX,
            Self::Unreachable { peer, source, .. } => {
                *peer == MUX && source.kind() == std::io::ErrorKind::InvalidData
            }
            Self::Refused { .. } => false,
        }
    }
}

/// Name of the mux in errors.
const MUX: &str = "mux";

/// One request to one peer.
struct Call<'a> {
    peer: &'static str,
    path: &'a Path,
    request: &'static str,
    answer_bytes_max: usize,
}

impl Call<'_> {
    fn unreachable(&self, source: std::io::Error) -> ControlError {
        let Self { peer, path, request, .. } = *self;
        ControlError::Unreachable { peer, path: path.into(), request, source }
    }

    fn unexpected<T>(&self) -> Result<T, ControlError> {
        let Self { peer, path, request, .. } = *self;
        Err(ControlError::Unexpected { peer, path: path.into(), request })
    }

    fn refused<T>(&self, reason: String) -> Result<T, ControlError> {
        Err(ControlError::Refused { peer: self.peer, reason })
    }

    fn open(&self, wait: Duration) -> Result<Channel, ControlError> {
        let deadline = Instant::now() + wait;
        let mut channel =
            Channel::connect_until(self.path, deadline).map_err(|e| self.unreachable(e))?;
        channel.limit_frames(self.answer_bytes_max);
        Ok(channel)
    }

    fn answer<M: DeserializeOwned>(
        &self,
        channel: &mut Channel,
    ) -> Result<(M, Vec<OwnedFd>), ControlError> {
        match channel.receive() {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.unreachable(std::io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(self.unreachable(error)),
        }
    }

    fn make<Q: Serialize, A: DeserializeOwned>(
        &self,
        question: &Q,
        fds: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<(A, Vec<OwnedFd>), ControlError> {
        let mut channel = self.open(wait)?;
        channel.send(question, fds).map_err(|e| self.unreachable(e))?;
        self.answer(&mut channel)
    }
}

/// The mux's control socket.
#[derive(Clone, Debug)]
pub struct MuxClient {
    /// Path of the socket.
    pub path: PathBuf,
}

/// Result of adding or changing an object in the mux.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is in force.
    Done,
    /// Nothing was changed: the mux has no listening socket for these paths yet.
    Lacks(Vec<PathBuf>),
}

/// Objects that a mux has.
#[derive(Debug)]
pub struct MuxHello {
    /// External interfaces with sockets.
    pub externals: Vec<String>,
    /// Vnets.
    pub vnets: Vec<String>,
    /// The packet pool's memory.
    pub pool: OwnedFd,
}

impl MuxClient {
    fn call(&self, request: &'static str) -> Call<'_> {
        let answer_bytes_max = MUX_ANSWER_BYTES_MAX;
        Call { peer: MUX, path: &self.path, request, answer_bytes_max }
    }

    fn done(
        &self,
        name: &'static str,
        request: &mux::MuxRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        let call = self.call(name);
        match call.make(request, fds, CALL_MAX)?.0 {
            mux::MuxReply::Done => Ok(()),
            mux::MuxReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    fn put(
        &self,
        name: &'static str,
        request: &mux::MuxRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Put, ControlError> {
        let call = self.call(name);
        match call.make(request, fds, CALL_MAX)?.0 {
            mux::MuxReply::Done => Ok(Put::Done),
            mux::MuxReply::Lacks { sockets } => Ok(Put::Lacks(sockets)),
            mux::MuxReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Returns the objects that the mux has.
    pub fn hello(&self) -> Result<MuxHello, ControlError> {
        let call = self.call("hello");
        let (reply, mut fds) = call.make(&mux::MuxRequest::Hello, &[], CALL_MAX)?;
        match (reply, fds.pop()) {
            (mux::MuxReply::Hello { version: mux::VERSION, externals, vnets }, Some(pool)) => {
                Ok(MuxHello { externals, vnets, pool })
            }
            // Also if this process had no free descriptor for it, which is no fault of the mux.
            (mux::MuxReply::Hello { version: mux::VERSION, .. }, None) => {
                call.refused("its answer lacks the packet pool".into())
            }
            (mux::MuxReply::Failed { error }, _) => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Returns the addresses that a segment has learned. With `clear`
    /// the segment forgets them all, and nothing is returned.
    pub fn fdb(
        &self,
        vnet: &str,
        vlink: &str,
        clear: bool,
    ) -> Result<Vec<mux::LearnedMac>, ControlError> {
        let request = mux::MuxRequest::Fdb { vnet: vnet.into(), vlink: vlink.into(), clear };
        let call = Call { answer_bytes_max: FDB_BYTES_MAX, ..self.call("fdb") };
        match call.make(&request, &[], CALL_MAX)?.0 {
            mux::MuxReply::Fdb { heard } => Ok(heard),
            mux::MuxReply::Done => Ok(vec![]),
            mux::MuxReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Adds or changes an external interface, with its AF_XDP sockets
    /// or with none to keep those it has.
    pub fn put_external(
        &self,
        external: mux::ExternalConfig,
        sockets: &[BorrowedFd<'_>],
    ) -> Result<Put, ControlError> {
        self.put("put external", &mux::MuxRequest::PutExternal(external), sockets)
    }

    /// Deletes an external interface.
    pub fn delete_external(&self, name: &str) -> Result<(), ControlError> {
        self.done("delete external", &mux::MuxRequest::DeleteExternal { name: name.into() }, &[])
    }

    /// Adds or changes a vnet.
    pub fn put_vnet(&self, vnet: mux::VnetConfig) -> Result<Put, ControlError> {
        self.put("put vnet", &mux::MuxRequest::PutVnet(Box::new(vnet)), &[])
    }

    /// Passes listening sockets to the mux, one descriptor per path.
    pub fn listen(
        &self,
        sockets: Vec<PathBuf>,
        listeners: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        self.done("listen", &mux::MuxRequest::Listen { sockets }, listeners)
    }

    /// Deletes a vnet.
    pub fn delete_vnet(&self, name: &str) -> Result<(), ControlError> {
        self.done("delete vnet", &mux::MuxRequest::DeleteVnet { name: name.into() }, &[])
    }

    /// Returns the counters of all vnets, or of one.
    pub fn stats(&self, vnet: Option<&str>) -> Result<Stats, ControlError> {
        let answer_bytes_max = vnet.map_or(FRAME_BYTES_MAX, |_| VNET_STATS_BYTES_MAX);
        let call = Call { answer_bytes_max, ..self.call("stats") };
        let request = mux::MuxRequest::Stats { vnet: vnet.map(str::to_string) };
        match call.make(&request, &[], CALL_MAX)?.0 {
            mux::MuxReply::Stats(stats) => Ok(*stats),
            mux::MuxReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Starts a capture that writes into `pipe`.
    pub fn capture(
        &self,
        port: mux::PortName,
        snap_bytes: u32,
        program: Option<mux::BpfProgram>,
        pipe: BorrowedFd<'_>,
    ) -> Result<(), ControlError> {
        let request = match program {
            None => mux::MuxRequest::Capture { port, snap_bytes },
            Some(program) => mux::MuxRequest::CaptureBy { port, snap_bytes, program },
        };
        self.done("capture", &request, &[pipe])
    }

    /// Traces the next frame at a port.
    pub fn trace(
        &self,
        port: mux::PortName,
        filter: Vec<mux::BytePattern>,
        program: Option<mux::BpfProgram>,
        wait: Duration,
    ) -> Result<Vec<mux::TraceStage>, ControlError> {
        let call = self.call("trace");
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let request = match program {
            None => mux::MuxRequest::Trace { port, filter, wait_ms },
            Some(program) => mux::MuxRequest::TraceBy { port, filter, program, wait_ms },
        };
        match call.make(&request, &[], wait.saturating_add(CALL_MAX))?.0 {
            mux::MuxReply::Traced { stages } => Ok(stages),
            mux::MuxReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }
}

/// A TAP helper's control socket.
#[derive(Clone, Debug)]
pub struct TapHelperClient {
    /// Path of the socket.
    pub path: PathBuf,
}

impl TapHelperClient {
    fn call(&self, request: &'static str) -> Call<'_> {
        let answer_bytes_max = HELPER_ANSWER_BYTES_MAX;
        Call { peer: "TAP helper", path: &self.path, request, answer_bytes_max }
    }

    /// Makes the helper serve these TAPs, one descriptor per port.
    pub fn serve(
        &self,
        ports: Vec<tap::TapPort>,
        taps: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        let call = self.call("serve");
        match call.make(&tap::TapRequest::Serve { ports }, taps, CALL_MAX)?.0 {
            tap::TapReply::Done => Ok(()),
            tap::TapReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Returns the TAPs that the helper holds.
    pub fn taps(&self) -> Result<Vec<(tap::TapPort, OwnedFd)>, ControlError> {
        let call = self.call("hold");
        match call.make(&tap::TapRequest::Hold, &[], CALL_MAX)? {
            (tap::TapReply::Held { ports }, fds) if ports.len() == fds.len() => {
                Ok(ports.into_iter().zip(fds).collect())
            }
            (tap::TapReply::Failed { error }, _) => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Returns the counters of the helper's ports.
    pub fn stats(&self, wait: Duration) -> Result<Vec<tap::TapPortStats>, ControlError> {
        let call = self.call("stats");
        match call.make(&tap::TapRequest::Stats, &[], wait)?.0 {
            tap::TapReply::Stats { ports } => Ok(ports),
            tap::TapReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }
}

/// A route mirror's control socket.
#[derive(Clone, Debug)]
pub struct MirrorClient {
    /// Path of the socket.
    pub path: PathBuf,
}

impl MirrorClient {
    fn call(&self, request: &'static str) -> Call<'_> {
        let answer_bytes_max = HELPER_ANSWER_BYTES_MAX;
        Call { peer: "route mirror", path: &self.path, request, answer_bytes_max }
    }

    /// Returns the mirror's status.
    pub fn status(&self, wait: Duration) -> Result<mirror::MirrorStatusReply, ControlError> {
        let call = self.call("status");
        match call.make(&mirror::MirrorRequest::Status, &[], wait)?.0 {
            mirror::MirrorReply::Status(status) => Ok(status),
            mirror::MirrorReply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Passes the routes of a table to `take` in parts, as they arrive.
    /// The call ends if `take` returns false because its reader has gone.
    pub fn routes(
        &self,
        source: mirror::TableSource,
        within: Option<ipnet::IpNet>,
        wait: Duration,
        mut take: impl FnMut(Vec<mirror::MirrorRoute>) -> bool,
    ) -> Result<(), ControlError> {
        let call = Call { answer_bytes_max: ROUTES_BYTES_MAX, ..self.call("routes") };
        let mut channel = call.open(wait)?;
        channel
            .send(&mirror::MirrorRequest::Routes { source, within }, &[])
            .map_err(|e| call.unreachable(e))?;
        loop {
            // Each part has its own deadline, since the consumer may be slow.
            channel.set_deadline(Instant::now() + wait);
            match call.answer(&mut channel)?.0 {
                mirror::MirrorReply::Routes(rows) => {
                    if !take(rows) {
                        return Ok(());
                    }
                }
                mirror::MirrorReply::End => return Ok(()),
                mirror::MirrorReply::Failed { error } => return call.refused(error),
                mirror::MirrorReply::Status(_) => return call.unexpected(),
            }
        }
    }
}
