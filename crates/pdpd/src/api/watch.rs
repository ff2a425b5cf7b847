//! The watch stream, as JSON lines or as WebSocket messages.
//!
//! Both have the same lines and the same limits ([`WatchReader`]). A
//! WebSocket client only listens. It may send pings and a close frame,
//! in frames of [`HEARD_BYTES_MAX`]. Anything else ends the connection.

use std::pin::pin;
use std::time::Duration;

use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{SinkExt, Stream, stream};
use hyper::HeaderMap;
use hyper::header::{HOST, ORIGIN, UPGRADE};
use pdp_api::{Problem, ProblemKind, WATCH_EVERY_MS, WatchEnd, WatchLine, WatchQuery, paths};
use tokio::time::{sleep, timeout};

use super::answer::{Params, ProblemResponse};
use super::stream::{lines, ndjson};
use super::{AuthorizedRequest, UpgradedConnection};
use crate::access::no_vnet;
use crate::events::WatchReader;
use crate::status::publisher;

/// Largest message of a client, bytes.
pub const HEARD_BYTES_MAX: usize = 1 << 10;

/// Interval of pings to an idle WebSocket client, which reveal whether it is still there.
const PING_PAUSE: Duration = Duration::from_secs(30);

/// Longest time for a WebSocket client to answer the close frame.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(1);

/// Streams the current state, and what happens from then on.
#[utoipa::path(get, path = paths::WATCH, tag = "observe", params(WatchQuery), responses(
    (status = SWITCHING_PROTOCOLS, description = "To `Upgrade: websocket` (RFC 6455): each line is a text message"),
    (status = OK, body = [WatchLine], content_type = "application/x-ndjson",
        description = "One line per snapshot, event or sample, until the client disconnects")))]
pub async fn watch(
    api: AuthorizedRequest,
    Params(query): Params<WatchQuery>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ProblemResponse> {
    if let Some(vnet) = &query.vnet
        && !api.caller.scope.sees(vnet)
    {
        return Err(no_vnet(vnet).into());
    }
    let invalid =
        |problem: String| ProblemResponse::from(Problem::new(ProblemKind::Invalid, problem));
    if let Some(every_ms) = query.every_ms
        && !WATCH_EVERY_MS.contains(&every_ms)
    {
        let (min, max) = (WATCH_EVERY_MS.start(), WATCH_EVERY_MS.end());
        return Err(invalid(format!("everyMs {every_ms} is not within {min} to {max}")));
    }
    let upgrade = match (headers.get(UPGRADE), upgrade) {
        (None, _) => None,
        (Some(_), Ok(upgrade)) => Some(upgrade),
        (Some(_), Err(why)) => return Err(invalid(format!("upgrade: {}", why.body_text()))),
    };
    if upgrade.is_some() && is_foreign(&headers) {
        let problem = "a page of another origin may not open a WebSocket here";
        return Err(Problem::new(ProblemKind::Forbidden, problem)
            .hint("its Origin is not this Host")
            .into());
    }
    let reader = api.call(move |daemon, scope| Ok(publisher::open(daemon, scope, query))).await?;
    let Some(upgrade) = upgrade else { return Ok(ndjson(chunks(api, reader)).into_response()) };
    let attended = UpgradedConnection::new(&api.api);
    let upgrade = upgrade.max_message_size(HEARD_BYTES_MAX).max_frame_size(HEARD_BYTES_MAX);
    Ok(upgrade.on_upgrade(async move |socket| {
        attend(api, reader, socket).await;
        drop(attended);
    }))
}

/// True if a browser sends the request for a page of another server
/// (RFC 6455 section 10.2). Clients other than browsers send no Origin.
fn is_foreign(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(ORIGIN) else { return false };
    let page = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    let own = headers.get(HOST).and_then(|host| host.to_str().ok());
    !matches!((page, own), (Some((_, page)), Some(own)) if page.eq_ignore_ascii_case(own))
}

/// Returns the last line.
fn end(api: &AuthorizedRequest) -> WatchLine {
    let reason = match api.api.stops() {
        true => "the daemon stops; networks keep running",
        false => "the client lost its rights",
    };
    WatchLine::End(WatchEnd { reason: reason.into() })
}

/// Returns the lines until the client loses its permission or the
/// daemon stops. The last line says which.
fn chunks(
    api: AuthorizedRequest,
    reader: WatchReader,
) -> impl Stream<Item = Bytes> + Send + 'static {
    let over = {
        let api = api.clone();
        Box::pin(async move { api.over().await })
    };
    stream::unfold(Some((api, reader, over)), async |state| {
        let (api, mut reader, mut over) = state?;
        tokio::select! {
            bytes = reader.next() => Some((bytes, Some((api, reader, over)))),
            _ = &mut over => Some((lines(&end(&api)), None)),
        }
    })
}

/// Sends the lines as WebSocket messages. At most one chunk is buffered:
/// while the client does not take it, the reader gets no next one.
async fn attend(api: AuthorizedRequest, mut reader: WatchReader, mut socket: WebSocket) {
    let mut over = pin!(api.over());
    let last = loop {
        let outgoing = tokio::select! {
            lines = reader.next() => messages(&lines),
            heard = socket.recv() => match heard {
                // The library answers pings, and a close frame once it is written.
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
                Some(Ok(Message::Close(_))) => break Vec::new(),
                Some(Ok(_)) => {
                    break vec![close(close_code::UNSUPPORTED, "a watch takes no messages")];
                }
                Some(Err(_)) | None => return,
            },
            () = sleep(PING_PAUSE) => vec![Message::Ping(Bytes::new())],
            _ = &mut over => break end_messages(&api),
        };
        tokio::select! {
            sent = send(&mut socket, outgoing) => if sent.is_err() { return },
            _ = &mut over => break end_messages(&api),
        }
    };
    let farewell = async {
        // The client's close frame answers ours. Earlier messages are not read any more.
        if send(&mut socket, last).await.is_ok() {
            while let Some(Ok(_)) = socket.recv().await {}
        }
    };
    let _ = timeout(CLOSE_TIME_MAX, farewell).await;
}

/// Sends all messages in as few writes as possible.
async fn send(socket: &mut WebSocket, messages: Vec<Message>) -> Result<(), axum::Error> {
    socket.send_all(&mut stream::iter(messages.into_iter().map(Ok))).await
}

fn close(code: u16, reason: &'static str) -> Message {
    Message::Close(Some(CloseFrame { code, reason: Utf8Bytes::from_static(reason) }))
}

fn end_messages(api: &AuthorizedRequest) -> Vec<Message> {
    let mut messages = messages(&lines(&end(api)));
    messages.push(match api.api.stops() {
        true => close(close_code::AWAY, "the daemon stops"),
        false => close(close_code::POLICY, "access ended"),
    });
    messages
}

/// Splits complete lines into one message each.
fn messages(lines: &Bytes) -> Vec<Message> {
    let ends = lines.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(end, _)| end);
    let mut begin = 0;
    let texts = ends.filter_map(|end| {
        let line = lines.slice(begin..end);
        begin = end + 1;
        // JSON is valid UTF-8.
        Utf8Bytes::try_from(line).ok().map(Message::Text)
    });
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_detects_pages_of_other_origins() {
        let foreign = |origin: Option<&str>, host: Option<&str>| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(ORIGIN, origin), (HOST, host)] {
                headers.extend(value.map(|value| (name, value.parse().unwrap())));
            }
            is_foreign(&headers)
        };
        assert!(!foreign(None, Some("pdp")));
        assert!(!foreign(Some("https://Node.example:7443"), Some("node.example:7443")));
        for origin in
            ["null", "", "https://evil.example", "https://node.example", "node.example:7443"]
        {
            assert!(foreign(Some(origin), Some("node.example:7443")), "{origin}");
        }
        assert!(foreign(Some("https://node.example"), None));
    }
}
