//! Requests of pdpd, and their connections.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pdp_memif::Listener;
use pdp_proto::channel::Channel;
use pdp_proto::mux::{MuxReply, MuxRequest, VERSION};
use tracing::warn;

use crate::control::base::MuxControl;
use crate::control::peer_listener::RequestRefusal;
use crate::control::workers::MuxSettings;

/// Connections of pdpd and its tools at a time.
const CONNECTIONS_MAX: usize = 32;

/// A running mux.
#[derive(Clone)]
pub struct MuxServer {
    control: Arc<MuxControl>,
    connections: Arc<AtomicUsize>,
}

impl MuxServer {
    /// Starts all threads in the calling thread's network namespace. Installs
    /// the process's signal handler for shared memory that a peer takes away.
    pub fn start(settings: &MuxSettings) -> anyhow::Result<Self> {
        pdp_memif::sigbus::install()?;
        let control = Arc::new(MuxControl::start(settings)?);
        MuxControl::keep_time(&control)?;
        Ok(Self { control, connections: Arc::default() })
    }

    /// Serves connections to `listener` for ever.
    pub fn serve(&self, listener: &UnixListener) -> io::Result<()> {
        listener.set_nonblocking(false)?;
        for stream in listener.incoming() {
            let stream = stream?;
            if self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                warn!("more than {CONNECTIONS_MAX} control connections: one was closed");
                self.connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let mux = self.clone();
            thread::Builder::new().name("control".into()).spawn(move || {
                if let Err(error) = mux.converse(Channel::new(stream)) {
                    warn!("control connection: {error}");
                }
                mux.connections.fetch_sub(1, Ordering::Relaxed);
            })?;
        }
        Ok(())
    }

    fn converse(&self, mut channel: Channel) -> io::Result<()> {
        while let Some((request, descriptors)) = channel.receive()? {
            let hello = matches!(request, MuxRequest::Hello);
            let reply = self.handle(request, descriptors);
            let fds: Vec<BorrowedFd<'_>> =
                if hello { vec![self.control.pool.memfd()] } else { vec![] };
            channel.send(&reply, &fds)?;
        }
        Ok(())
    }

    /// Returns the number of checks of peers' sockets so far. Tests
    /// verify with it that only sockets with events are checked.
    pub fn socket_checks(&self) -> u64 {
        self.control.listener.checks()
    }

    /// Answers one request.
    pub fn handle(&self, request: MuxRequest, descriptors: Vec<OwnedFd>) -> MuxReply {
        let result = match request {
            MuxRequest::Hello => Ok(self.hello()),
            MuxRequest::Listen { sockets } => self.listen(sockets, descriptors),
            MuxRequest::PutExternal(spec) => self.control.put_external(spec, descriptors),
            MuxRequest::DeleteExternal { name } => self.control.delete_external(&name),
            MuxRequest::PutVnet(spec) => self.control.put_vnet(*spec),
            MuxRequest::DeleteVnet { name } => self.control.delete_vnet(&name),
            MuxRequest::Stats { vnet } => {
                self.control.stats(vnet.as_deref()).map_err(RequestRefusal::Failed)
            }
            MuxRequest::Fdb { vnet, vlink, clear } => {
                self.control.fdb(&vnet, &vlink, clear).map_err(RequestRefusal::Failed)
            }
            MuxRequest::Capture { port, snap_bytes } => {
                let begun = self.control.capture(&port, snap_bytes, None, descriptors);
                begun.map_err(RequestRefusal::Failed)
            }
            MuxRequest::CaptureBy { port, snap_bytes, program } => {
                let begun = self.control.capture(&port, snap_bytes, Some(program), descriptors);
                begun.map_err(RequestRefusal::Failed)
            }
            MuxRequest::Trace { port, filter, wait_ms } => {
                self.control.trace(&port, filter, None, wait_ms).map_err(RequestRefusal::Failed)
            }
            MuxRequest::TraceBy { port, filter, program, wait_ms } => {
                let traced = self.control.trace(&port, filter, Some(program), wait_ms);
                traced.map_err(RequestRefusal::Failed)
            }
        };
        result.unwrap_or_else(|refusal| match refusal {
            RequestRefusal::Lacks(sockets) => MuxReply::Lacks { sockets },
            RequestRefusal::Failed(error) => MuxReply::Failed { error },
        })
    }

    fn listen(&self, sockets: Vec<PathBuf>, fds: Vec<OwnedFd>) -> Result<MuxReply, RequestRefusal> {
        if sockets.len() != fds.len() {
            let (paths, count) = (sockets.len(), fds.len());
            return Err(format!("{paths} paths, but {count} listening sockets").into());
        }
        self.control.listener.offer(sockets.into_iter().zip(fds.into_iter().map(Listener::new)));
        Ok(MuxReply::Done)
    }

    fn hello(&self) -> MuxReply {
        let state = self.control.state();
        let ready = state.externals.iter().flatten().filter(|external| external.outlets > 0);
        MuxReply::Hello {
            version: VERSION,
            externals: ready.map(|external| external.spec.name.clone()).collect(),
            vnets: state.vnets.keys().cloned().collect(),
        }
    }
}

impl AsFd for MuxServer {
    /// The packet pool's memory.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.pool.memfd()
    }
}
