//! The daemon's HTTP API over a Unix socket: requests in, JSON out, nothing decided here.
//!
//! [`Daemon`] is what the rest of the daemon gives this module; [`serve`] runs the API on a
//! listener of [`listen`]. Types and paths are [`pdp_api`]'s; the description is in
//! `schema/openapi.json` and at `GET /v1/openapi.json`.
//!
//! Whatever a client sends or however it goes away, the answer is JSON (a
//! [`Problem`](pdp_api::Problem) for every failure), and what it had running is ended: commands
//! are killed, captures and logs closed. Changes that have begun run to their end.
//!
//! Limits: [`CONNECTIONS_MAX`], [`CALLS_MAX`], [`STREAMS_MAX`], [`HEADERS_TIME_MAX`],
//! [`BODY_TIME_MAX`], [`CALL_TIME_MAX`], [`pdp_api::BODY_BYTES_MAX`].

mod answer;
mod change;
mod daemon;
mod exec;
mod look;
mod process;
mod stream;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper::StatusCode;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pdp_api::{Problem, ProblemKind};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub use daemon::{Daemon, ProgressFn, RouteFn};

use answer::Failure;

/// Connections at a time; more wait to be accepted.
pub const CONNECTIONS_MAX: usize = 256;

/// Calls (all but streams) at a time; more are refused.
pub const CALLS_MAX: usize = 64;

/// Streams at a time: captures, logs, route tables, commands; more are refused.
pub const STREAMS_MAX: usize = 64;

/// Longest wait for the head of a request.
pub const HEADERS_TIME_MAX: Duration = Duration::from_secs(15);

/// Longest wait for the body of a request.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(30);

/// Longest wait for the answer to a call that changes nothing.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(90);

/// How long connections may take to end once the daemon stops.
const STOP_TIME_MAX: Duration = Duration::from_secs(5);

/// Pause after the system could not accept a connection (no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What every handler has.
#[derive(Clone)]
struct Api {
    daemon: Arc<dyn Daemon>,
    calls: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    /// Turns true, or its sender goes, when the daemon stops.
    stopped: watch::Receiver<bool>,
}

impl Api {
    fn new(daemon: Arc<dyn Daemon>, stopped: watch::Receiver<bool>) -> Self {
        let calls = Arc::new(Semaphore::new(CALLS_MAX));
        let streams = Arc::new(Semaphore::new(STREAMS_MAX));
        Self { daemon, calls, streams, stopped }
    }

    /// Waits until the daemon stops.
    async fn stop(&self) {
        let _ = self.stopped.clone().wait_for(|&stopped| stopped).await;
    }
}

/// Listens at `path`, for root and the owner's group (mode 0660). A socket that nobody answers at
/// is replaced; that of another daemon is left alone, as an error.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixStream::connect(path) {
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("another daemon answers at {}", path.display()),
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)?;
        }
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    Ok(listener)
}

/// Answers what comes on one connection until that ends.
///
/// # Errors
/// What the client sent that is no HTTP, or how it went away.
pub async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    daemon: Arc<dyn Daemon>,
) -> hyper::Result<()> {
    let (_stopping, stopped) = watch::channel(false);
    let service = TowerToHyperService::new(router(Api::new(daemon, stopped)));
    builder().serve_connection(TokioIo::new(stream), service).with_upgrades().await
}

/// Serves the API until `stop` is done; what still streams or runs is ended then.
pub async fn serve(
    listener: UnixListener,
    daemon: Arc<dyn Daemon>,
    stop: impl Future<Output = ()> + Send,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let (stopping, stopped) = watch::channel(false);
    let api = Api::new(daemon, stopped);
    let service = TowerToHyperService::new(router(api.clone()));
    let builder = builder();
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    tokio::pin!(stop);
    loop {
        while connections.try_join_next().is_some() {}
        let accepted = async {
            let Ok(permit) = room.clone().acquire_owned().await else {
                return Err(io::ErrorKind::Other.into());
            };
            listener.accept().await.map(|(stream, _)| (stream, permit))
        };
        let (stream, permit) = tokio::select! {
            () = &mut stop => break,
            accepted = accepted => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "can't accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        let connection =
            builder.serve_connection(TokioIo::new(stream), service.clone()).with_upgrades();
        let api = api.clone();
        connections.spawn(async move {
            let _permit = permit;
            tokio::pin!(connection);
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = api.stop() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "connection of a client");
            }
        });
    }
    stopping.send_replace(true);
    let all = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(STOP_TIME_MAX, all).await;
    Ok(())
}

fn builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADERS_TIME_MAX);
    builder
}

/// The description of the API, OpenAPI 3.1, as JSON text.
pub fn openapi() -> String {
    let (_, description) = described().split_for_parts();
    // Plain data with string keys: can't fail.
    description.to_pretty_json().unwrap_or_default() + "\n"
}

fn router(api: Api) -> Router {
    let (router, _) = described().split_for_parts();
    router
        .route(pdp_api::paths::OPENAPI, axum::routing::get(description))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .with_state(api)
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "PdP",
        description = "A node that hosts isolated virtual networks. JSON over HTTP/1.1 on the \
            Unix socket /run/pdp/pdpd.sock. Every failure is a Problem.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(pdp_api::NodeProcess)),
    servers((url = "http://pdp", description = "The host name means nothing on a Unix socket"))
)]
struct Description;

fn described() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(look::version))
        .routes(routes!(look::doctor))
        .routes(routes!(look::substrate, change::delete_substrate))
        .routes(routes!(look::vnets))
        .routes(routes!(look::vnet, change::delete_vnet))
        .routes(routes!(look::stats))
        .routes(routes!(look::trace))
        .routes(routes!(change::apply))
        .routes(routes!(change::up))
        .routes(routes!(change::down))
        .routes(routes!(change::set_link))
        .routes(routes!(change::scale))
        .routes(routes!(stream::routes))
        .routes(routes!(stream::capture))
        .routes(routes!(stream::logs))
        .routes(routes!(stream::node_logs))
        .routes(routes!(exec::exec))
}

async fn description() -> Response {
    ([(hyper::header::CONTENT_TYPE, "application/json")], openapi()).into_response()
}

async fn no_such_path(uri: hyper::Uri) -> Failure {
    Problem::not_found(format!("no such path: {}", uri.path()))
        .hint(format!("GET {} lists them", pdp_api::paths::OPENAPI))
        .into()
}

async fn no_such_method(method: hyper::Method, uri: hyper::Uri) -> Response {
    let problem = Problem::new(ProblemKind::Invalid, format!("{method} is not for {}", uri.path()))
        .hint(format!("GET {} lists the methods", pdp_api::paths::OPENAPI));
    (StatusCode::METHOD_NOT_ALLOWED, Json(problem)).into_response()
}
