//! The daemon's HTTP API over a Unix socket and TLS: requests in, JSON out, and nothing decided here
//! but who may ask ([`access`](crate::access)), which every request is held against in one place
//! and written down for the audit log.
//!
//! [`Daemon`] is what the rest of the daemon gives this module; [`serve`] runs the API on a
//! listener of [`listen`]. Types and paths are [`pdp_api`]'s; the description is in
//! `schema/openapi.json` and at `GET /v1/openapi.json`.
//!
//! Whatever a client sends or however it goes away, the answer is JSON (a
//! [`Problem`](pdp_api::Problem) for every failure), and what it had running is ended: commands
//! are killed, captures and logs closed. Changes that have begun run to their end.
//!
//! Limits: [`CONNECTIONS_MAX`], [`CONNECTIONS_PER_PEER_MAX`], [`CALLS_MAX`], [`STREAMS_MAX`],
//! [`TENANT_CALLS_MAX`], [`TENANTS_CALLS_MAX`], [`TENANTS_STREAMS_MAX`], [`HANDSHAKE_TIME_MAX`],
//! [`HEAD_BYTES_MAX`], [`HEADERS_TIME_MAX`], [`BODY_TIME_MAX`], [`CALL_TIME_MAX`],
//! [`SMALL_BODY_BYTES_MAX`], [`pdp_api::BODY_BYTES_MAX`], [`HEARD_BYTES_MAX`], and bytes of all bodies together
//! ([`BODIES_BYTES_MAX`], [`TENANT_BODIES_BYTES_MAX`], [`TENANTS_BODIES_BYTES_MAX`]).

mod answer;
mod change;
mod connection;
mod daemon;
mod description;
mod exec;
mod fastpath;
mod gate;
mod images;
mod look;
mod process;
mod room;
mod stream;
pub mod tls;
mod watch;
mod who;

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
use utoipa_axum::routes;

pub use connection::{Connection, Server};
pub use daemon::{Captured, Daemon, ProgressFn, RouteFn};
pub use room::{BODIES_BYTES_MAX, TENANT_BODIES_BYTES_MAX, TENANTS_BODIES_BYTES_MAX};
pub use watch::HEARD_BYTES_MAX;

use gate::Asked;
use pdp_spec::shared::{CALLS, CONNECTIONS, SESSIONS};
use room::Rooms;
use tls::Tls;

use crate::access::Guard;
use crate::audit::Audit;

/// Connections at a time, each: of operators by the Unix socket, of other users by it, and over TLS.
/// More are closed at once.
pub const CONNECTIONS_MAX: usize = CONNECTIONS.operators as usize;

/// Connections at a time of one user that is no operator, or of one address over TLS.
pub const CONNECTIONS_PER_PEER_MAX: usize = CONNECTIONS.tenant as usize;

/// Calls (all but streams) at a time of operators and viewers of the node; more are refused.
pub const CALLS_MAX: usize = CALLS.operators as usize;

/// Streams at a time of these: watches, captures, logs, route tables, commands; more are refused.
pub const STREAMS_MAX: usize = CALLS_MAX;

/// Calls at a time of one tenant; more are refused. Its streams are its quota's `sessions`.
pub const TENANT_CALLS_MAX: usize = CALLS.tenant as usize;

/// Calls at a time of all tenants together; more are refused.
pub const TENANTS_CALLS_MAX: usize = CALLS.tenants() as usize;

/// Streams at a time of all tenants together; more are refused.
pub const TENANTS_STREAMS_MAX: usize = SESSIONS.tenants() as usize;

/// Threads on which requests may wait, beside those that serve connections: one for each call and each
/// stream, and some to find out who asks.
pub const THREADS_MAX: usize =
    CALLS_MAX + STREAMS_MAX + TENANTS_CALLS_MAX + TENANTS_STREAMS_MAX + CALLS_MAX;

/// Descriptors that the API needs at most, with what everything else needs now and then: one a
/// connection, four a session (a command's streams or its terminal's), two a helper that is asked, and
/// as many as there are connections for the state, threads, and what is started.
pub const DESCRIPTORS_MAX: u64 = (3 * CONNECTIONS_MAX
    + 4 * (STREAMS_MAX + TENANTS_STREAMS_MAX)
    + 2 * crate::ask::ASKED_AT_ONCE
    + CONNECTIONS_MAX) as u64;

/// Bytes of the body of a request other than those that apply files or set filters, whose may have
/// [`pdp_api::BODY_BYTES_MAX`].
pub const SMALL_BODY_BYTES_MAX: usize = 256 << 10;

/// Longest wait for the end of a TLS handshake.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// Bytes of the head of a request.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Longest wait for the head of a request.
pub const HEADERS_TIME_MAX: Duration = Duration::from_secs(15);

/// Longest wait for the body of a request.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(30);

/// Longest wait for the answer to a call that changes nothing.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(90);

/// Time without a sign of who is at the other end of a connection over TLS, after which the kernel asks whether it is
/// still there: one that went without a word ends, and gives back its place.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);

/// How long connections may take to end once the daemon stops.
const STOP_TIME_MAX: Duration = Duration::from_secs(5);

/// Pause after the system could not accept a connection (no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What all requests have in common.
#[derive(Clone)]
struct Api {
    daemon: Arc<dyn Daemon>,
    guard: Arc<Guard>,
    audit: Audit,
    rooms: Arc<Rooms>,
    listens: Option<Listens>,
    /// How many connections that were upgraded are attended to.
    attended: tokio::sync::watch::Sender<usize>,
    /// Turns true, or its sender goes, when the daemon stops.
    stopped: tokio::sync::watch::Receiver<bool>,
}

impl Api {
    /// Whether the daemon stops.
    fn stops(&self) -> bool {
        *self.stopped.borrow()
    }

    /// Waits until the daemon stops.
    async fn stop(&self) {
        let _ = self.stopped.clone().wait_for(|&stopped| stopped).await;
    }
}

/// One who attends to a connection that was upgraded, from the answer that says so: nobody else waits for what it was
/// upgraded to. The daemon does, until this is dropped.
struct Attended(tokio::sync::watch::Sender<usize>);

impl Attended {
    fn new(api: &Api) -> Self {
        api.attended.send_modify(|count| *count += 1);
        Self(api.attended.clone())
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// Where the API is served.
#[derive(Debug)]
pub struct Listeners {
    /// Of [`listen`].
    pub unix: UnixListener,
    /// With TLS as well.
    pub tls: Option<(TcpListener, Tls)>,
}

/// Listens at `path`, for everybody (mode 0666): the kernel says who connects, and the gate whether
/// that may anything. A socket that nobody answers at is replaced, also while what a daemon that was killed
/// had just forked still holds it; that of another daemon is left alone, as an error.
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

/// Whether the process that listened at the other end has ended.
fn listener_is_gone(stream: &UnixStream) -> bool {
    // Number 0 is a process of another PID namespace, of which nothing is known.
    let pid = getsockopt(stream, PeerCredentials).map(|peer| peer.pid());
    pid.is_ok_and(|pid| pid > 0 && Process::of(pid as u32).is_none())
}

/// The API, without listeners, and what stops it: for connections that are made otherwise too.
///
/// # Errors
/// There is no thread for the audit log.
pub fn server(
    daemon: Arc<dyn Daemon>,
    guard: Arc<Guard>,
    listens: Option<Listens>,
) -> io::Result<(Server, tokio::sync::watch::Sender<bool>)> {
    let (stopping, stopped) = tokio::sync::watch::channel(false);
    let audit = Audit::start(guard.state.clone())?;
    let rooms = Arc::new(Rooms::default());
    let attended = tokio::sync::watch::Sender::new(0);
    Ok((Server::new(Api { daemon, guard, audit, rooms, listens, attended, stopped }), stopping))
}

/// Serves the API until `stop` is done; what still streams or runs is ended then.
pub async fn serve(
    listeners: Listeners,
    daemon: Arc<dyn Daemon>,
    guard: Arc<Guard>,
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
            // No room: closed at once.
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

/// The description of the API, OpenAPI 3.1, as JSON text.
pub fn openapi() -> String {
    let description = description::complete(described().into_openapi());
    let description = description::with_specs(&description);
    // Plain data with string keys: can't fail.
    serde_json::to_string_pretty(&description).unwrap_or_default() + "\n"
}

fn router(api: Api) -> Router {
    let (router, _) = described().split_for_parts();
    router
        .fallback(gate::no_such_path)
        .method_not_allowed_fallback(gate::no_such_method)
        .layer(axum::middleware::from_fn_with_state(api.clone(), gate::gate))
        .with_state(api)
}

fn described() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(description::Description::openapi())
        .routes(routes!(look::version))
        .routes(routes!(description::openapi))
        .routes(routes!(description::spec_schema))
        .routes(routes!(look::doctor))
        .routes(routes!(look::substrate, change::delete_substrate))
        .routes(routes!(look::vnets))
        .routes(routes!(look::vnet, change::delete_vnet))
        .routes(routes!(look::stats))
        .routes(routes!(watch::watch))
        .routes(routes!(look::fdb, look::clear_fdb))
        .routes(routes!(look::trace))
        .routes(routes!(change::apply))
        .routes(routes!(change::up))
        .routes(routes!(change::down))
        .routes(routes!(change::set_link, change::change_link))
        .routes(routes!(change::scale))
        .routes(routes!(change::restart))
        .routes(routes!(stream::routes))
        .routes(routes!(fastpath::fastpath_filters, fastpath::change_fastpath))
        .routes(routes!(fastpath::fastpath_counters))
        .routes(routes!(fastpath::fastpath_queues))
        .routes(routes!(fastpath::send_frame))
        .routes(routes!(stream::capture))
        .routes(routes!(stream::logs))
        .routes(routes!(stream::node_logs))
        .routes(routes!(exec::exec))
        .routes(routes!(who::tenants))
        .routes(routes!(change::delete_tenant))
        .routes(routes!(who::tokens, who::create_token))
        .routes(routes!(who::revoke_token))
        .routes(routes!(who::audit))
        .routes(routes!(images::images, images::pull_image, images::prune_images))
        .routes(routes!(images::delete_image))
}
