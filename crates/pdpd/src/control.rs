//! Calls to the mux, the TAP helpers and the route mirrors.
//!
//! Each call is a connection of its own, so that a peer that was replaced is met at the next
//! call, and a long call (a trace, a capture) holds nothing else up. Every call ends within its
//! time-out, whatever the peer says, and reads no more of it than an answer may have.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pdp_proto::channel::{Channel, FRAME_BYTES_MAX};
use pdp_proto::limits::{ADDRESSES_MAX, PORTS_MAX, VNET_QUEUES_MAX};
use pdp_proto::{mirror, mux, tap};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest wait for an answer to an ordinary call.
pub const CALL_MAX: Duration = Duration::from_secs(20);

/// Bytes of an answer of the mux, but for counters: the sockets of the largest vnet, or the names of all.
const MUX_ANSWER_BYTES_MAX: usize = 4 << 20;

/// Bytes of the counters of one vnet: 1 KiB for each port that it may have, and 256 for each queue.
const VNET_STATS_BYTES_MAX: usize = (PORTS_MAX << 10) + (VNET_QUEUES_MAX << 8);

/// Bytes of what a segment has learned: 128 for each address, of which it may have half as many again as it is to.
const FDB_BYTES_MAX: usize = (ADDRESSES_MAX as usize) * 3 / 2 * 128;

/// Bytes of an answer of a TAP helper, or of a mirror's status.
const HELPER_ANSWER_BYTES_MAX: usize = 1 << 20;

/// Bytes of a part of a mirror's routes: 1,024 with 128 hops each, on both sides.
const ROUTES_BYTES_MAX: usize = 32 << 20;

/// Why a call was not answered as hoped.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The peer can't be reached, or went away.
    #[error("{peer} at {path}: no answer to {request}")]
    Unreachable {
        /// Who.
        peer: &'static str,
        /// Its socket.
        path: PathBuf,
        /// What was asked.
        request: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The peer said no.
    #[error("{peer}: {reason}")]
    Refused {
        /// Who.
        peer: &'static str,
        /// Its words.
        reason: String,
    },
    /// An answer that does not fit the question: another version.
    #[error("{peer} at {path}: its answer to {request} does not fit; install one version of all")]
    Unexpected {
        /// Who.
        peer: &'static str,
        /// Its socket.
        path: PathBuf,
        /// What was asked.
        request: &'static str,
    },
}

impl ControlError {
    /// Whether the peer is there and did not answer in time.
    pub fn is_late(&self) -> bool {
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        matches!(self, Self::Unreachable { source, .. } if matches!(source.kind(), TimedOut | WouldBlock))
    }

    /// Whether the mux was not there, or went away before it answered.
    pub fn is_mux_gone(&self) -> bool {
        matches!(self, Self::Unreachable { peer, .. } if *peer == MUX)
            && !self.is_late()
            && !self.is_nonsense_of_mux()
    }

    /// Whether the mux answered what no mux of this version does.
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

/// What the mux is called in errors.
const MUX: &str = "mux";

/// One peer's kind of call.
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
pub struct Mux {
    /// Where it listens.
    pub path: PathBuf,
}

/// What became of something put into a mux.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is in force.
    Done,
    /// Nothing was changed: it has no socket to listen at these paths yet.
    Lacks(Vec<PathBuf>),
}

/// What a mux has.
#[derive(Debug)]
pub struct MuxHello {
    /// External interfaces with sockets.
    pub externals: Vec<String>,
    /// Vnets.
    pub vnets: Vec<String>,
    /// The packet pool's memory.
    pub pool: OwnedFd,
}

impl Mux {
    fn call(&self, request: &'static str) -> Call<'_> {
        let answer_bytes_max = MUX_ANSWER_BYTES_MAX;
        Call { peer: MUX, path: &self.path, request, answer_bytes_max }
    }

    fn done(
        &self,
        name: &'static str,
        request: &mux::Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        let call = self.call(name);
        match call.make(request, fds, CALL_MAX)?.0 {
            mux::Reply::Done => Ok(()),
            mux::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    fn put(
        &self,
        name: &'static str,
        request: &mux::Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Put, ControlError> {
        let call = self.call(name);
        match call.make(request, fds, CALL_MAX)?.0 {
            mux::Reply::Done => Ok(Put::Done),
            mux::Reply::Lacks { sockets } => Ok(Put::Lacks(sockets)),
            mux::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// What is there.
    pub fn hello(&self) -> Result<MuxHello, ControlError> {
        let call = self.call("hello");
        let (reply, mut fds) = call.make(&mux::Request::Hello, &[], CALL_MAX)?;
        match (reply, fds.pop()) {
            (mux::Reply::Hello { version: mux::VERSION, externals, vnets }, Some(pool)) => {
                Ok(MuxHello { externals, vnets, pool })
            }
            // Also where this process had no descriptor left to take it: no fault of the mux's.
            (mux::Reply::Hello { version: mux::VERSION, .. }, None) => {
                call.refused("the memory of its packets did not come with its answer".into())
            }
            (mux::Reply::Failed { error }, _) => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// What a segment has learned; with `clear` it forgets all, and nothing is returned.
    pub fn fdb(
        &self,
        vnet: &str,
        vlink: &str,
        clear: bool,
    ) -> Result<Vec<mux::Heard>, ControlError> {
        let request = mux::Request::Fdb { vnet: vnet.into(), vlink: vlink.into(), clear };
        let call = Call { answer_bytes_max: FDB_BYTES_MAX, ..self.call("fdb") };
        match call.make(&request, &[], CALL_MAX)?.0 {
            mux::Reply::Fdb { heard } => Ok(heard),
            mux::Reply::Done => Ok(vec![]),
            mux::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Puts an external interface, with its AF_XDP sockets or with none to keep those it has.
    pub fn put_external(
        &self,
        external: mux::External,
        sockets: &[BorrowedFd<'_>],
    ) -> Result<Put, ControlError> {
        self.put("put external", &mux::Request::PutExternal(external), sockets)
    }

    /// Forgets an external interface.
    pub fn delete_external(&self, name: &str) -> Result<(), ControlError> {
        self.done("delete external", &mux::Request::DeleteExternal { name: name.into() }, &[])
    }

    /// Puts a vnet.
    pub fn put_vnet(&self, vnet: mux::Vnet) -> Result<Put, ControlError> {
        self.put("put vnet", &mux::Request::PutVnet(Box::new(vnet)), &[])
    }

    /// Gives it sockets to listen at, one descriptor a path.
    pub fn listen(
        &self,
        sockets: Vec<PathBuf>,
        listeners: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        self.done("listen", &mux::Request::Listen { sockets }, listeners)
    }

    /// Forgets a vnet.
    pub fn delete_vnet(&self, name: &str) -> Result<(), ControlError> {
        self.done("delete vnet", &mux::Request::DeleteVnet { name: name.into() }, &[])
    }

    /// Counters of all vnets, or one.
    pub fn stats(&self, vnet: Option<&str>) -> Result<mux::Stats, ControlError> {
        let answer_bytes_max = vnet.map_or(FRAME_BYTES_MAX, |_| VNET_STATS_BYTES_MAX);
        let call = Call { answer_bytes_max, ..self.call("stats") };
        let request = mux::Request::Stats { vnet: vnet.map(str::to_string) };
        match call.make(&request, &[], CALL_MAX)?.0 {
            mux::Reply::Stats(stats) => Ok(*stats),
            mux::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Begins a capture into `pipe`.
    pub fn capture(
        &self,
        port: mux::PortName,
        snap_bytes: u32,
        program: Option<mux::Program>,
        pipe: BorrowedFd<'_>,
    ) -> Result<(), ControlError> {
        let request = match program {
            None => mux::Request::Capture { port, snap_bytes },
            Some(program) => mux::Request::CaptureBy { port, snap_bytes, program },
        };
        self.done("capture", &request, &[pipe])
    }

    /// Follows the next frame at a port.
    pub fn trace(
        &self,
        port: mux::PortName,
        filter: Vec<mux::Match>,
        program: Option<mux::Program>,
        wait: Duration,
    ) -> Result<Vec<mux::TraceStage>, ControlError> {
        let call = self.call("trace");
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let request = match program {
            None => mux::Request::Trace { port, filter, wait_ms },
            Some(program) => mux::Request::TraceBy { port, filter, program, wait_ms },
        };
        match call.make(&request, &[], wait.saturating_add(CALL_MAX))?.0 {
            mux::Reply::Traced { stages } => Ok(stages),
            mux::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }
}

/// A TAP helper's control socket.
#[derive(Clone, Debug)]
pub struct TapHelper {
    /// Where it listens.
    pub path: PathBuf,
}

impl TapHelper {
    fn call(&self, request: &'static str) -> Call<'_> {
        let answer_bytes_max = HELPER_ANSWER_BYTES_MAX;
        Call { peer: "TAP helper", path: &self.path, request, answer_bytes_max }
    }

    /// Has it serve these TAPs, one descriptor a port.
    pub fn serve(
        &self,
        ports: Vec<tap::Port>,
        taps: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        let call = self.call("serve");
        match call.make(&tap::Request::Serve { ports }, taps, CALL_MAX)?.0 {
            tap::Reply::Done => Ok(()),
            tap::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// The TAPs it holds.
    pub fn hold(&self) -> Result<Vec<(tap::Port, OwnedFd)>, ControlError> {
        let call = self.call("hold");
        match call.make(&tap::Request::Hold, &[], CALL_MAX)? {
            (tap::Reply::Held { ports }, fds) if ports.len() == fds.len() => {
                Ok(ports.into_iter().zip(fds).collect())
            }
            (tap::Reply::Failed { error }, _) => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// What it carried.
    pub fn stats(&self, wait: Duration) -> Result<Vec<tap::PortStats>, ControlError> {
        let call = self.call("stats");
        match call.make(&tap::Request::Stats, &[], wait)?.0 {
            tap::Reply::Stats { ports } => Ok(ports),
            tap::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }
}

/// A route mirror's control socket.
#[derive(Clone, Debug)]
pub struct Mirror {
    /// Where it listens.
    pub path: PathBuf,
}

impl Mirror {
    fn call(&self, request: &'static str) -> Call<'_> {
        let answer_bytes_max = HELPER_ANSWER_BYTES_MAX;
        Call { peer: "route mirror", path: &self.path, request, answer_bytes_max }
    }

    /// How it is.
    pub fn status(&self, wait: Duration) -> Result<mirror::Status, ControlError> {
        let call = self.call("status");
        match call.make(&mirror::Request::Status, &[], wait)?.0 {
            mirror::Reply::Status(status) => Ok(status),
            mirror::Reply::Failed { error } => call.refused(error),
            _ => call.unexpected(),
        }
    }

    /// Hands the routes of a table to `take` in parts, as they come. A part that `take` refuses
    /// (its reader has gone) ends the call.
    pub fn routes(
        &self,
        source: mirror::Source,
        within: Option<ipnet::IpNet>,
        wait: Duration,
        mut take: impl FnMut(Vec<mirror::RouteRow>) -> bool,
    ) -> Result<(), ControlError> {
        let call = Call { answer_bytes_max: ROUTES_BYTES_MAX, ..self.call("routes") };
        let mut channel = call.open(wait)?;
        channel
            .send(&mirror::Request::Routes { source, within }, &[])
            .map_err(|e| call.unreachable(e))?;
        loop {
            // Each part has its time: who takes them may be slow.
            channel.set_deadline(Instant::now() + wait);
            match call.answer(&mut channel)?.0 {
                mirror::Reply::Routes(rows) => {
                    if !take(rows) {
                        return Ok(());
                    }
                }
                mirror::Reply::End => return Ok(()),
                mirror::Reply::Failed { error } => return call.refused(error),
                mirror::Reply::Status(_) => return call.unexpected(),
            }
        }
    }
}
