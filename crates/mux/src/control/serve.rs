//! Requests, and who sends them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pdp_memif::Listener;
use pdp_proto::channel::Channel;
use pdp_proto::mux::{Reply, Request, VERSION};
use tracing::warn;

use crate::control::base::Control;
use crate::control::keeper::Refusal;
use crate::control::workers::Settings;

/// Connections of pdpd (and its tools) at a time.
const CONNECTIONS_MAX: usize = 32;

/// A running mux.
#[derive(Clone)]
pub struct Mux {
    control: Arc<Control>,
    connections: Arc<AtomicUsize>,
}

impl Mux {
    /// Starts all threads in the calling thread's network namespace, and the process's handler
    /// for shared memory that is taken away.
    pub fn start(settings: &Settings) -> anyhow::Result<Self> {
        pdp_memif::sigbus::install()?;
        let control = Arc::new(Control::start(settings)?);
        Control::keep_time(&control)?;
        Ok(Self { control, connections: Arc::default() })
    }

    /// Serves who connects to `listener`, for ever.
    pub fn serve(&self, listener: &UnixListener) -> io::Result<()> {
        listener.set_nonblocking(false)?;
        for stream in listener.incoming() {
            let stream = stream?;
            if self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                warn!("more than {CONNECTIONS_MAX} control connections");
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
            let hello = matches!(request, Request::Hello);
            let reply = self.handle(request, descriptors);
            let fds: Vec<BorrowedFd<'_>> =
                if hello { vec![self.control.pool.memfd()] } else { vec![] };
            channel.send(&reply, &fds)?;
        }
        Ok(())
    }

    /// Looks at sockets of peers until now, for whether it looks at those alone that something came to.
    pub fn looks(&self) -> u64 {
        self.control.keeper.looks()
    }

    /// Answers one request.
    pub fn handle(&self, request: Request, descriptors: Vec<OwnedFd>) -> Reply {
        let result = match request {
            Request::Hello => Ok(self.hello()),
            Request::Listen { sockets } => self.listen(sockets, descriptors),
            Request::PutExternal(spec) => self.control.put_external(spec, descriptors),
            Request::DeleteExternal { name } => self.control.delete_external(&name),
            Request::PutVnet(spec) => self.control.put_vnet(*spec),
            Request::DeleteVnet { name } => self.control.delete_vnet(&name),
            Request::Stats { vnet } => self.control.stats(vnet.as_deref()).map_err(Refusal::Failed),
            Request::Fdb { vnet, vlink, clear } => {
                self.control.fdb(&vnet, &vlink, clear).map_err(Refusal::Failed)
            }
            Request::Capture { port, snap_bytes } => {
                let begun = self.control.capture(&port, snap_bytes, None, descriptors);
                begun.map_err(Refusal::Failed)
            }
            Request::CaptureBy { port, snap_bytes, program } => {
                let begun = self.control.capture(&port, snap_bytes, Some(program), descriptors);
                begun.map_err(Refusal::Failed)
            }
            Request::Trace { port, filter, wait_ms } => {
                self.control.trace(&port, filter, None, wait_ms).map_err(Refusal::Failed)
            }
            Request::TraceBy { port, filter, program, wait_ms } => {
                let traced = self.control.trace(&port, filter, Some(program), wait_ms);
                traced.map_err(Refusal::Failed)
            }
        };
        result.unwrap_or_else(|refusal| match refusal {
            Refusal::Lacks(sockets) => Reply::Lacks { sockets },
            Refusal::Failed(error) => Reply::Failed { error },
        })
    }

    fn listen(&self, sockets: Vec<PathBuf>, fds: Vec<OwnedFd>) -> Result<Reply, Refusal> {
        if sockets.len() != fds.len() {
            let (paths, count) = (sockets.len(), fds.len());
            return Err(format!("{paths} paths and {count} sockets to listen at").into());
        }
        self.control.keeper.offer(sockets.into_iter().zip(fds.into_iter().map(Listener::new)));
        Ok(Reply::Done)
    }

    fn hello(&self) -> Reply {
        let state = self.control.state();
        let ready = state.externals.iter().flatten().filter(|external| external.outlets > 0);
        Reply::Hello {
            version: VERSION,
            externals: ready.map(|external| external.spec.name.clone()).collect(),
            vnets: state.vnets.keys().cloned().collect(),
        }
    }
}

impl AsFd for Mux {
    /// The packet pool's memory.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.pool.memfd()
    }
}
