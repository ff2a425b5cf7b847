//! The daemon's HTTP API over a Unix socket and TLS. This module only parses
//! requests, writes JSON, and decides who may do what ([`access`](crate::access)).
//! One place checks every request and writes it to the audit log. One table has
//! a row for each endpoint (`endpoints`).
//!
//! Handlers call [`DaemonCore`], and [`status`](crate::status) for reads. [`serve`] runs
//! the API on a listener of [`listen`]. Types and paths are in [`pdp_api`]. The
//! description is in `schema/openapi.json` and at `GET /v1/openapi.json`.
//!
//! Whatever a client sends, the response is JSON, with a [`Problem`](pdp_api::Problem)
//! for every failure. When a client goes away, its commands are killed, and its
//! captures and logs are closed. Changes that have begun run to their end.
//!
//! Limits: [`CONNECTIONS_MAX`], [`CONNECTIONS_PER_PEER_MAX`], [`CALLS_MAX`], [`STREAMS_MAX`],
//! [`TENANT_CALLS_MAX`], [`TENANTS_CALLS_MAX`], [`TENANTS_STREAMS_MAX`], [`HANDSHAKE_TIME_MAX`],
//! [`HEAD_BYTES_MAX`], [`HEADERS_TIME_MAX`], [`BODY_TIME_MAX`], [`CALL_TIME_MAX`],
//! [`SMALL_BODY_BYTES_MAX`], [`pdp_api::BODY_BYTES_MAX`], [`HEARD_BYTES_MAX`], and bytes of all
//! bodies together ([`BODIES_BYTES_MAX`], [`TENANT_BODIES_BYTES_MAX`],
//! [`TENANTS_BODIES_BYTES_MAX`]).

mod answer;
mod auth;
mod change;
mod connection;
mod description;
mod endpoints;
mod exec;
mod fastpath;
mod identity;
mod images;
mod limits;
mod process;
mod read;
mod request;
mod stream;
pub mod tls;
mod watch;

use std::io;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use pdp_api::Listens;
use pdp_container::Process;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

pub use connection::{ConnectionTask, HttpServer};
pub use limits::{BODIES_BYTES_MAX, TENANT_BODIES_BYTES_MAX, TENANTS_BODIES_BYTES_MAX};
pub use watch::HEARD_BYTES_MAX;

use endpoints::{RuleTable, endpoints};
use limits::RequestQuotas;
use pdp_spec::shared::{CALLS, CONNECTIONS, SESSIONS};
use request::AuthorizedRequest;
use tls::Tls;

use crate::access::Authenticator;
use crate::access::audit::Audit;
use crate::engine::DaemonCore;

/// Limit of simultaneous connections, for each of three groups: operators on the Unix
/// socket, other users on it, and clients over TLS. Excess connections are closed at once.
pub const CONNECTIONS_MAX: usize = CONNECTIONS.operators as usize;

/// Limit of simultaneous connections of one user that is no operator, or of one address over TLS.
pub const CONNECTIONS_PER_PEER_MAX: usize = CONNECTIONS.tenant as usize;

/// Limit of simultaneous calls (everything but streams) of operators
/// and viewers of the node; more are refused.
pub const CALLS_MAX: usize = CALLS.operators as usize;

/// Limit of simultaneous streams of operators and viewers of the node:
/// watches, captures, logs, route tables, commands. More are refused.
pub const STREAMS_MAX: usize = CALLS_MAX;

/// Limit of simultaneous calls of one tenant; more are refused. Its
/// quota's `sessions` limits its streams.
pub const TENANT_CALLS_MAX: usize = CALLS.tenant as usize;

/// Limit of simultaneous calls of all tenants together; more are refused.
pub const TENANTS_CALLS_MAX: usize = CALLS.tenants() as usize;

/// Limit of simultaneous streams of all tenants together; more are refused.
pub const TENANTS_STREAMS_MAX: usize = SESSIONS.tenants() as usize;

/// Threads on which requests may block, besides those that serve
/// connections: one for each call and stream, and some to identify clients.
pub const THREADS_MAX: usize =
    CALLS_MAX + STREAMS_MAX + TENANTS_CALLS_MAX + TENANTS_STREAMS_MAX + CALLS_MAX;

/// Most descriptors that the API needs, including occasional needs of the rest of the daemon.
/// One per connection, four per session (a command's streams or terminal), two per helper that
/// is asked. As many as there are connections for the state, threads, and started processes.
pub const DESCRIPTORS_MAX: u64 = (3 * CONNECTIONS_MAX
    + 4 * (STREAMS_MAX + TENANTS_STREAMS_MAX)
    + 2 * crate::host::query::ASKED_AT_ONCE
    + CONNECTIONS_MAX) as u64;

/// Largest request body, bytes. Requests that apply files or set
/// filters may have [`pdp_api::BODY_BYTES_MAX`].
pub const SMALL_BODY_BYTES_MAX: usize = 256 << 10;

/// Longest wait for the end of a TLS handshake.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// Largest head of a request, bytes.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Longest wait for the head of a request.
pub const HEADERS_TIME_MAX: Duration = Duration::from_secs(15);

/// Longest wait for the body of a request.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(30);

/// Longest wait for the answer to a read-only call.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(90);

/// Idle time of a TLS connection after which the kernel probes the peer. If
/// the peer vanished silently, the connection ends and its permit is released.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);

/// Longest time for connections to end once the daemon stops.
const STOP_TIME_MAX: Duration = Duration::from_secs(5);

/// Pause after a failed accept (no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// State that all requests have in common.
#[derive(Clone)]
struct Api {
    daemon: Arc<DaemonCore>,
    guard: Arc<Authenticator>,
    audit: Audit,
    rules: Arc<RuleTable>,
    quotas: Arc<RequestQuotas>,
    listens: Option<Listens>,
    /// Number of upgraded connections that are still served.
    attended: tokio::sync::watch::Sender<usize>,
    /// Becomes true, or loses its sender, when the daemon stops.
    stopped: tokio::sync::watch::Receiver<bool>,
}

impl Api {
    /// True if the daemon is stopping.
    fn stops(&self) -> bool {
        *self.stopped.borrow()
    }

    /// Waits until the daemon stops.
    async fn stop(&self) {
        let _ = self.stopped.clone().wait_for(|&stopped| stopped).await;
    }
}

/// Marks an upgraded connection as served, from the upgrade response on. The HTTP server
/// does not wait for such a connection, but the daemon does until this value is dropped.
struct UpgradedConnection(tokio::sync::watch::Sender<usize>);

impl UpgradedConnection {
    fn new(api: &Api) -> Self {
        api.attended.send_modify(|count| *count += 1);
        Self(api.attended.clone())
    }
}

impl Drop for UpgradedConnection {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// Sockets on which the API is served.
#[derive(Debug)]
pub struct Listeners {
    /// Socket of [`listen`].
    pub unix: UnixListener,
    /// TLS socket, if enabled.
    pub tls: Option<(TcpListener, Tls)>,
}

/// Listens at `path` for everybody (mode 0666). The kernel identifies
/// the clients, and the authorization layer decides what they may do.
///
/// A socket on which nobody answers is replaced. This includes a socket
/// that is still held by a fresh child of a killed daemon. The socket
/// of another running daemon is not touched; that is an error.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixStream::connect(path) {
        Ok(stream) if !listener_is_gone(&stream) => {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("another daemon answers at {}", path.display()),
            ));
        }
        Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => {}
        _ => std::fs::remove_file(path)?,
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// True if the process that listened at the other end has ended.
fn listener_is_gone(stream: &UnixStream) -> bool {
    // Number 0 stands for a process of another PID namespace, about which nothing is known.
    let pid = getsockopt(stream, PeerCredentials).map(|peer| peer.pid());
    pid.is_ok_and(|pid| pid > 0 && Process::of(pid as u32).is_none())
}

/// Returns the API without listeners, so that it can also serve other
/// connections, and the sender that stops it.
///
/// # Errors
/// The thread of the audit log can't be started.
pub fn server(
    daemon: Arc<DaemonCore>,
    guard: Arc<Authenticator>,
    listens: Option<Listens>,
) -> io::Result<(HttpServer, tokio::sync::watch::Sender<bool>)> {
    let (stopping, stopped) = tokio::sync::watch::channel(false);
    let audit = Audit::start(guard.state.clone())?;
    let (rules, quotas) = (Arc::new(RuleTable::new()), Arc::default());
    let attended = tokio::sync::watch::Sender::new(0);
    let api = Api { daemon, guard, audit, rules, quotas, listens, attended, stopped };
    Ok((HttpServer::new(api), stopping))
}

/// Serves the API until `stop` completes, then ends all streams and commands.
pub async fn serve(
    listeners: Listeners,
    daemon: Arc<DaemonCore>,
    guard: Arc<Authenticator>,
    stop: impl Future<Output = ()> + Send,
) -> io::Result<()> {
    listeners.unix.set_nonblocking(true)?;
    let unix = tokio::net::UnixListener::from_std(listeners.unix)?;
    let mut listens = None;
    let tls = match listeners.tls {
        Some((listener, tls)) => {
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?.to_string();
            listens = Some(Listens { address, certificate_sha256: tls.sha256 });
            let acceptor = TlsAcceptor::from(tls.config);
            Some((tokio::net::TcpListener::from_std(listener)?, acceptor))
        }
        None => None,
    };
    let (server, stopping) = server(daemon, guard, listens)?;
    let mut connections = JoinSet::new();
    tokio::pin!(stop);
    loop {
        while connections.try_join_next().is_some() {}
        let over_tls = async {
            match &tls {
                Some((listener, _)) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = unix.accept() => accepted.map(|(stream, _)| server.unix(stream)),
            accepted = over_tls => accepted.map(|(stream, from)| {
                let (_, acceptor) = tls.as_ref()?;
                server.tls(stream, from, acceptor)
            }),
        };
        match accepted {
            Ok(Some(connection)) => drop(connections.spawn(connection)),
            // The limit is reached: the connection is closed at once.
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    stopping.send_replace(true);
    let all = async {
        while connections.join_next().await.is_some() {}
        let _ = server.api.attended.subscribe().wait_for(|count| *count == 0).await;
    };
    let _ = tokio::time::timeout(STOP_TIME_MAX, all).await;
    server.api.audit.flush().await;
    Ok(())
}

/// Returns the API description, OpenAPI 3.1, as JSON text.
pub fn openapi() -> String {
    let description = description::complete(described().into_openapi());
    let description = description::with_specs(&description);
    // Plain data with string keys: can't fail.
    serde_json::to_string_pretty(&description).unwrap_or_default() + "\n"
}

fn router(api: Api) -> Router {
    let (router, _) = described().split_for_parts();
    router
        .fallback(auth::no_such_path)
        .method_not_allowed_fallback(auth::no_such_method)
        .layer(axum::middleware::from_fn_with_state(api.clone(), auth::authorize))
        .with_state(api)
}

fn described() -> OpenApiRouter<Api> {
    let none = OpenApiRouter::with_openapi(description::Description::openapi());
    endpoints().into_iter().fold(none, |router, endpoint| router.routes(endpoint.route))
}
