//! Streaming responses: route tables, captures, logs.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE};
use pdp_api::{
    CaptureQuery, GuestProcess, LogQuery, NodeProcess, Problem, ProblemKind, RouteEnd, RouteLine,
    RoutesQuery, paths,
};
use std::os::unix::fs::MetadataExt;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt, SeekFrom};
use tokio::net::unix::pipe;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::AuthorizedRequest;
use super::answer::{NDJSON, PCAP, Params, PathParams, ProblemResponse, panicked};
use crate::status::frames::Captured;
use crate::status::{frames, tables};

/// Bytes of routes that are gathered into one chunk.
const CHUNK_BYTES: usize = 32 << 10;

/// Chunks of routes that may wait for the client; then the producer waits.
const CHUNKS_MAX: usize = 4;

/// Longest wait for a client with [`CHUNKS_MAX`] waiting chunks of routes; then the stream ends.
const ROUTES_STALL_MAX: Duration = Duration::from_secs(30);

/// Part of a log file that is read, bytes; older text is left out.
const LOG_BYTES_MAX: u64 = 16 << 20;

/// Pause between two reads of a followed log.
const FOLLOW_PAUSE: Duration = Duration::from_millis(200);

/// Formats a value as one JSON line.
pub fn lines(value: &impl serde::Serialize) -> Bytes {
    let mut line = Vec::new();
    push_line(&mut line, value);
    line.into()
}

fn push_line(to: &mut Vec<u8>, value: &impl serde::Serialize) {
    // The API's types are plain data with string keys, and a vector takes every byte.
    let _ = serde_json::to_writer(&mut *to, value);
    to.push(b'\n');
}

/// Returns a response of JSON lines.
pub fn ndjson(lines: impl Stream<Item = Bytes> + Send + 'static) -> impl IntoResponse {
    body(NDJSON, lines.map(Ok::<_, Infallible>))
}

fn body<E: Into<axum::BoxError> + 'static>(
    content_type: &'static str,
    bytes: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
) -> Response {
    let headers = [(CONTENT_TYPE, content_type), (CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(bytes)).into_response()
}

/// Wraps a stream such that it fails with an error, instead of ending, when
/// [`AuthorizedRequest::over`] completes. The stream keeps its request's permit until then.
fn bounded(
    api: &AuthorizedRequest,
    stream: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    let api = api.clone();
    let over = async move { api.over().await };
    let state = (Box::pin(stream), Box::pin(over));
    stream::try_unfold(state, async |(mut stream, mut over)| {
        tokio::select! {
            next = stream.next() => Ok(next.transpose()?.map(|bytes| (bytes, (stream, over)))),
            _ = &mut over => Err(io::Error::other("broken off")),
        }
    })
}

/// Streams the routes of a router or host.
#[utoipa::path(get, path = paths::ROUTES, tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The node"),
        RoutesQuery),
    responses(
    (status = OK, body = [RouteLine], content_type = "application/x-ndjson",
        description = "One line per route; the last line is the end or the problem")))]
pub async fn routes(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    Params(query): Params<RoutesQuery>,
) -> Result<Response, ProblemResponse> {
    let access = api.node();
    let (chunks, mut queue) = mpsc::channel::<Bytes>(CHUNKS_MAX);
    let runtime = Handle::current();
    let task = tokio::task::spawn_blocking(move || {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES + 1024);
        let mut count = 0;
        let (mut sent, mut stalled) = (false, false);
        let mut take = |route| {
            push_line(&mut chunk, &RouteLine::Route(route));
            count += 1;
            if chunk.len() < CHUNK_BYTES {
                return true;
            }
            sent = true;
            let chunk = std::mem::take(&mut chunk).into();
            let taken = runtime.block_on(chunks.send_timeout(chunk, ROUTES_STALL_MAX));
            stalled = taken.is_err();
            !stalled
        };
        let result =
            access.call(|daemon, _| tables::routes(daemon, &vnet, &node, query, &mut take));
        let last = match result {
            Ok(()) if stalled => {
                let text =
                    format!("the client took no routes for {} s", ROUTES_STALL_MAX.as_secs());
                RouteLine::Problem(Problem::new(ProblemKind::TimedOut, text))
            }
            Ok(()) => RouteLine::End(RouteEnd { count }),
            Err(problem) if !sent => return Err(problem),
            Err(problem) => RouteLine::Problem(problem),
        };
        push_line(&mut chunk, &last);
        Ok(Bytes::from(chunk))
    });
    let Some(first) = queue.recv().await else {
        return Ok(body(
            NDJSON,
            stream::iter([Ok::<_, Infallible>(task.await.map_err(panicked)??)]),
        ));
    };
    let rest = stream::unfold(queue, async |mut queue| Some((queue.recv().await?, queue)));
    let last = stream::once(async { task.await?.map_err(io::Error::other) });
    let all = stream::iter([first]).chain(rest).map(Ok).chain(last);
    Ok(body(NDJSON, bounded(&api, all)))
}

/// Streams the frames of a port, in both directions, as pcap, until the client goes away.
#[utoipa::path(get, path = paths::CAPTURE, tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The node"),
        ("port" = String, Path, description = "The port"),
        CaptureQuery),
    responses(
    (status = OK, body = Vec<u8>, content_type = "application/vnd.tcpdump.pcap",
        description = "A pcap file that grows until the client disconnects")))]
pub async fn capture(
    api: AuthorizedRequest,
    PathParams((vnet, node, port)): PathParams<(String, String, String)>,
    Params(query): Params<CaptureQuery>,
) -> Result<Response, ProblemResponse> {
    let Captured { frames, permit: place } = api
        .call(move |daemon, scope| frames::capture(daemon, scope, &vnet, &node, &port, query))
        .await?;
    let pipe = pipe::Receiver::from_owned_fd(frames).map_err(Problem::internal)?;
    let bytes = stream::try_unfold((pipe, place), async |(mut pipe, place)| {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        let count = pipe.read_buf(&mut chunk).await?;
        Ok::<_, io::Error>((count > 0).then(|| (Bytes::from(chunk), (pipe, place))))
    });
    Ok(body(PCAP, bounded(&api, bytes)))
}

/// Returns a log of the node itself.
#[utoipa::path(get, path = paths::LOGS, tag = "observe",
    params(("process" = NodeProcess, Path, description = "Process of the log"), LogQuery),
    responses(
    (status = OK, body = String, content_type = "text/plain; charset=utf-8",
        description = "The log; with `follow`, new lines until the client disconnects")))]
pub async fn logs(
    api: AuthorizedRequest,
    PathParams(process): PathParams<NodeProcess>,
    Params(query): Params<LogQuery>,
) -> Result<Response, ProblemResponse> {
    let path = api.call(move |daemon, _| daemon.log(process)).await?;
    log(&api, path, query).await
}

/// Returns a log of a vnet's node.
#[utoipa::path(get, path = paths::NODE_LOGS, tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The node"),
        ("process" = String, Path,
            description = "`control`, `tap`, `mirror`, or `g0`, `g1`, … for a forwarding guest"),
        LogQuery),
    responses(
    (status = OK, body = String, content_type = "text/plain; charset=utf-8",
        description = "The log; with `follow`, new lines until the client disconnects")))]
pub async fn node_logs(
    api: AuthorizedRequest,
    PathParams((vnet, node, process)): PathParams<(String, String, GuestProcess)>,
    Params(query): Params<LogQuery>,
) -> Result<Response, ProblemResponse> {
    let path = api.call(move |daemon, _| daemon.node_log(&vnet, &node, process)).await?;
    log(&api, path, query).await
}

async fn log(
    api: &AuthorizedRequest,
    path: PathBuf,
    query: LogQuery,
) -> Result<Response, ProblemResponse> {
    let unreadable = |error: io::Error| {
        let problem = format!("log {}: {error}", path.display());
        let problem = Problem::new(ProblemKind::NotFound, problem);
        api.node().redact(problem.hint("nothing was logged yet"))
    };
    let mut file = File::open(&path).await.map_err(unreadable)?;
    // The older half, which the writer keeps next to the log.
    let mut older = path.clone().into_os_string();
    older.push(".1");
    let mut text = match File::open(&older).await {
        Ok(mut older) => read_end(&mut older).await.map_err(unreadable)?,
        Err(_) => Vec::new(),
    };
    text.extend(read_end(&mut file).await.map_err(unreadable)?);
    let start = query.tail.map_or(0, |count| last_lines(&text, count));
    let kept = stream::iter([Ok::<_, io::Error>(Bytes::from(text).slice(start..))]);
    let content_type = "text/plain; charset=utf-8";
    if !query.follow {
        return Ok(body(content_type, bounded(api, kept)));
    }
    let more = stream::try_unfold((file, path), follow);
    Ok(body(content_type, bounded(api, kept.chain(more))))
}

/// Waits for the next bytes of a log and returns them. The file at
/// `path` may be replaced or truncated.
async fn follow((mut file, path): (File, PathBuf)) -> io::Result<Option<(Bytes, (File, PathBuf))>> {
    loop {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        if file.read_buf(&mut chunk).await? > 0 {
            return Ok(Some((chunk.into(), (file, path))));
        }
        let open = file.metadata().await?;
        if let Ok(there) = tokio::fs::metadata(&path).await
            && (there.dev(), there.ino()) != (open.dev(), open.ino())
        {
            file = File::open(&path).await?;
            continue;
        }
        if open.len() < file.stream_position().await? {
            file.rewind().await?;
            continue;
        }
        tokio::time::sleep(FOLLOW_PAUSE).await;
    }
}

/// Reads the end of a file from a line's start, at most
/// [`LOG_BYTES_MAX`]. `file` is at its end afterwards.
async fn read_end(file: &mut File) -> io::Result<Vec<u8>> {
    let length = file.metadata().await?.len();
    let mut text = Vec::new();
    if length > LOG_BYTES_MAX {
        file.seek(SeekFrom::Start(length - LOG_BYTES_MAX)).await?;
    }
    (&mut *file).take(LOG_BYTES_MAX).read_to_end(&mut text).await?;
    if length > LOG_BYTES_MAX {
        let line = text.iter().position(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        text.drain(..line);
    }
    Ok(text)
}

/// Returns the offset at which the last `count` lines begin.
fn last_lines(text: &[u8], count: u64) -> usize {
    let Some(before) = usize::try_from(count).ok().and_then(|count| count.checked_sub(1)) else {
        return if count == 0 { text.len() } else { 0 };
    };
    let whole = text.strip_suffix(b"\n").unwrap_or(text);
    let mut ends = whole.iter().enumerate().rev().filter(|&(_, &byte)| byte == b'\n');
    ends.nth(before).map_or(0, |(end, _)| end + 1)
}
