//! The watch stream, in front of a hub to which the tests publish.

mod node;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use futures::{SinkExt, StreamExt};
use node::{EVENTUALLY, Server, eventually};
use pdp_api::client::{Client, Error, WatchStream};
use pdp_api::*;
use pdpd::api::{HEARD_BYTES_MAX, Listeners, STREAMS_MAX, listen, serve};
use pdpd::events::log::EVENTS_MAX;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, Message};

type Socket = tokio_tungstenite::WebSocketStream<tokio::net::UnixStream>;

fn client(server: &Server) -> Client {
    Client::new(server.socket())
}

/// Returns a client for a tenant's vnets.
fn as_tenant(server: &Server, tenant: &str) -> (Client, u64) {
    let state = &server.guard.state;
    let hash = |secret: &str| {
        use sha2::{Digest, Sha256};
        Sha256::digest(secret.as_bytes()).to_vec()
    };
    let secret = format!("pdp_{tenant}");
    let token = state.put_token(&hash(&secret), Role::Tenant, Some(tenant), None).unwrap().unwrap();
    (client(server).with_token(secret), token.id)
}

async fn line(watch: &mut WatchStream) -> WatchLine {
    let next = tokio::time::timeout(EVENTUALLY, watch.next());
    next.await.expect("a line").unwrap().expect("not the end")
}

async fn snapshot(watch: &mut WatchStream) -> Snapshot {
    match line(watch).await {
        WatchLine::Snapshot(snapshot) => snapshot,
        other => panic!("no snapshot: {other:?}"),
    }
}

async fn event(watch: &mut WatchStream) -> WatchEvent {
    match line(watch).await {
        WatchLine::Event(event) => event,
        other => panic!("no event: {other:?}"),
    }
}

fn post(server: &Server, object: &str, message: impl ToString) {
    let message = Some(message.to_string());
    let event = WatchEvent { object: object.into(), message, ..WatchEvent::default() };
    server.hub().post(WatchEvent { what: EventKind::Ended, ..event });
}

fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.vnets.iter().map(|vnet| vnet.name.as_str()).collect()
}

#[tokio::test]
async fn watch_sends_a_snapshot_and_then_events() {
    let server = Server::idle();
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    let first = snapshot(&mut watch).await;
    assert_eq!(names(&first), ["acme.red", "other.red", "red"]);
    assert_eq!((first.vnets[2].phase, first.vnets[2].guests_connected), (Phase::Degraded, 1));
    assert_eq!(first.status, None);
    post(&server, "vnet/red/node/r1/g0", "with code 7");
    let ended = event(&mut watch).await;
    assert_eq!((ended.seq, ended.boot.as_str()), (first.seq + 1, first.boot.as_str()));
    assert_eq!((ended.what, ended.message.as_deref()), (EventKind::Ended, Some("with code 7")));
    server.hub().publish_vnet("red", None, false);
    let gone = event(&mut watch).await;
    assert_eq!((gone.object.as_str(), gone.what), ("vnet/red", EventKind::Gone));
    // Without samples the daemon does not determine the status itself.
    let (vnet, detail) = (Some("acme.red".into()), Detail::None);
    let query = WatchQuery { vnet, detail, ..WatchQuery::default() };
    let mut watch = client(&server).watch(&query).await.unwrap();
    let one = snapshot(&mut watch).await;
    assert_eq!(names(&one), ["acme.red"]);
    assert_eq!(one.status.unwrap().nodes[0].guests[0].routes_synced, Some(true));
    for object in ["mux", "vnet/other.red", "vnet/acme.red/link/a"] {
        post(&server, object, "");
    }
    assert_eq!(event(&mut watch).await.object, "vnet/acme.red/link/a");
}

/// A reader that asked for a vnet before it existed sees its status come and go.
#[tokio::test]
async fn watch_accepts_a_vnet_not_created_yet() {
    let server = Server::idle();
    let (vnet, detail) = (Some("late".into()), Detail::None);
    let query = WatchQuery { vnet, detail, ..WatchQuery::default() };
    let mut watch = client(&server).watch(&query).await.unwrap();
    let none = snapshot(&mut watch).await;
    assert!(none.vnets.is_empty() && none.status.is_none() && none.removing.is_empty());
    let hub = server.hub();
    hub.publish_vnet("late", Some(VnetStatus::default()), true);
    assert_eq!(event(&mut watch).await.what, EventKind::Created);
    hub.publish_vnet("late", None, true);
    let mut again = client(&server).watch(&query).await.unwrap();
    let after = snapshot(&mut again).await;
    assert_eq!((after.vnets.len(), after.removing), (0, vec!["late".to_owned()]));
    hub.publish_vnet("late", None, false);
    for watch in [&mut watch, &mut again] {
        assert_eq!(event(watch).await.what, EventKind::Gone);
    }
}

#[tokio::test]
async fn watch_delivers_all_kept_events_in_order() {
    let server = Server::idle();
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    let first = snapshot(&mut watch).await;
    // Together with the earlier ones, as many events as are kept.
    let count = EVENTS_MAX - first.seq as usize;
    for number in 0..count {
        post(&server, "vnet/red/node/r1", number);
    }
    for number in 0..count {
        let event = event(&mut watch).await;
        assert_eq!(event.seq, first.seq + 1 + number as u64);
        assert_eq!(event.message, Some(number.to_string()));
    }
    // A client that returns gets the events that it missed.
    let after = Some(EventCursor { boot: first.boot, seq: first.seq + count as u64 - 10 });
    let query = WatchQuery { after, ..WatchQuery::default() };
    let mut again = client(&server).watch(&query).await.unwrap();
    for number in count - 10..count {
        assert_eq!(event(&mut again).await.message, Some(number.to_string()));
    }
}

/// The client reads nothing while twenty times as many events happen as are kept. The daemon
/// stores nothing for it. The client learns of every loss, and then has the current state.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_gets_a_gap_and_a_snapshot() {
    let server = Server::idle();
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    let mut seq = snapshot(&mut watch).await.seq;
    let hub = server.hub().clone();
    let before = Arc::strong_count(&hub);
    let text = "x".repeat(400);
    for _ in 0..20 * EVENTS_MAX {
        post(&server, "vnet/red/node/r1", &text);
    }
    let end = seq + 20 * EVENTS_MAX as u64;
    let mut gaps = 0;
    while seq < end {
        match line(&mut watch).await {
            WatchLine::Event(event) => {
                assert_eq!(event.seq, seq + 1, "nothing is missing in silence");
                seq = event.seq;
            }
            WatchLine::Gap(gap) => {
                gaps += 1;
                let after = snapshot(&mut watch).await;
                assert!(after.seq >= seq + gap.lost.expect("a count"), "{after:?}");
                seq = after.seq;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(gaps > 0);
    drop(watch);
    eventually("nothing is kept for it", || Arc::strong_count(&hub) < before);
}

#[tokio::test]
async fn watch_reports_a_gap_after_daemon_restart() {
    let old = Server::idle();
    let query = WatchQuery::default();
    let Snapshot { boot, seq, .. } = snapshot(&mut client(&old).watch(&query).await.unwrap()).await;
    let new = Server::idle();
    let query = WatchQuery { after: Some(EventCursor { boot, seq }), ..query };
    let mut watch = client(&new).watch(&query).await.unwrap();
    assert_eq!(line(&mut watch).await, WatchLine::Gap(Gap { lost: None }));
    assert_eq!(snapshot(&mut watch).await.vnets.len(), 3);
}

/// A tenant learns nothing from the state, from events, or from numbers
/// that others' activity advances.
#[tokio::test]
async fn watch_hides_other_tenants() {
    let server = Server::idle();
    let (acme, _) = as_tenant(&server, "acme");
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
    stream.write_all(b"GET /v1/watch HTTP/1.0\r\nAuthorization: Bearer pdp_acme\r\n\r\n").unwrap();
    let mut text = String::new();
    let mut read_until = |expected: &str| {
        while !text.contains(expected) {
            let mut bytes = [0; 4096];
            let count = stream.read(&mut bytes).unwrap();
            assert!(count > 0, "{text}");
            text += std::str::from_utf8(&bytes[..count]).unwrap();
        }
        text.clone()
    };
    // Events go to readers that watched before.
    read_until("snapshot");
    let mut watch = acme.watch(&WatchQuery::default()).await.unwrap();
    let first = snapshot(&mut watch).await;
    assert_eq!(names(&first), ["acme.red"]);
    for number in 0..100 {
        post(&server, "vnet/other.red/node/canary", number);
        post(&server, "vnet/canary/node/r1", number);
        post(&server, "external/canary", number);
    }
    server.hub().publish_vnet("other.canary", Some(VnetStatus::default()), true);
    post(&server, "vnet/acme.red/node/r1", "mine");
    let next = event(&mut watch).await;
    assert_eq!((next.message.as_deref(), next.seq), (Some("mine"), first.seq + 1));
    let text = read_until("mine");
    for secret in ["canary", "other"] {
        assert!(!text.contains(secret), "{text}");
    }
    let query = WatchQuery { vnet: Some("other.red".into()), ..WatchQuery::default() };
    let Err(Error::Problem(none)) = acme.watch(&query).await else { panic!("refused") };
    assert_eq!((none.kind, none.error.as_str()), (ProblemKind::NotFound, r#"no vnet "other.red""#));
}

/// Opens a WebSocket like a browser or a program, with these additional headers.
async fn socket(server: &Server, headers: &[(&'static str, &str)]) -> Result<Socket, u16> {
    socket_at(&server.socket(), headers).await
}

async fn socket_at(path: &Path, headers: &[(&'static str, &str)]) -> Result<Socket, u16> {
    let stream = tokio::net::UnixStream::connect(path).await.unwrap();
    let mut request = "ws://pdp/v1/watch?vnet=acme.red&detail=none".into_client_request().unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    match tokio_tungstenite::client_async(request, stream).await {
        Ok((socket, response)) => {
            assert_eq!(response.status(), 101);
            Ok(socket)
        }
        Err(tungstenite::Error::Http(response)) => Err(response.status().as_u16()),
        Err(error) => panic!("{error}"),
    }
}

async fn message(socket: &mut Socket) -> Option<Message> {
    let next = tokio::time::timeout(EVENTUALLY, socket.next());
    next.await.expect("a message").transpose().unwrap_or(None)
}

async fn text(socket: &mut Socket) -> WatchLine {
    match message(socket).await {
        Some(Message::Text(text)) => serde_json::from_str(&text).unwrap(),
        other => panic!("no text: {other:?}"),
    }
}

/// Returns the code with which the server closes it.
async fn close(socket: &mut Socket) -> u16 {
    match message(socket).await {
        Some(Message::Close(Some(close))) => close.code.into(),
        other => panic!("no end: {other:?}"),
    }
}

/// The same lines as messages. Either side can end it; the server gives a reason.
#[tokio::test(flavor = "multi_thread")]
async fn websocket_delivers_the_same_lines() {
    let mut server = Server::idle();
    let mut sockets = Vec::new();
    for _ in 0..2 {
        sockets.push(socket(&server, &[]).await.unwrap());
    }
    for socket in &mut sockets {
        assert!(matches!(text(socket).await, WatchLine::Snapshot(_)));
    }
    post(&server, "vnet/acme.red", "one");
    post(&server, "mux", "not this");
    post(&server, "vnet/acme.red", "two");
    for socket in &mut sockets {
        for expected in ["one", "two"] {
            let WatchLine::Event(event) = text(socket).await else { panic!("an event") };
            assert_eq!(event.message.as_deref(), Some(expected));
        }
    }
    let mut last = sockets.pop().unwrap();
    let mut first = sockets.pop().unwrap();
    first.close(None).await.unwrap();
    assert!(matches!(message(&mut first).await, Some(Message::Close(_))));
    assert!(message(&mut first).await.is_none());
    // A revoked token, and a daemon that stops, are reported as on lines.
    let (_, token) = as_tenant(&server, "acme");
    let mut revoked = socket(&server, &[("authorization", "Bearer pdp_acme")]).await.unwrap();
    assert!(matches!(text(&mut revoked).await, WatchLine::Snapshot(_)));
    server.guard.revoke_token(token).unwrap();
    let WatchLine::End(end) = text(&mut revoked).await else { panic!("the end") };
    assert!(end.reason.contains("lost its rights"), "{end:?}");
    assert_eq!(close(&mut revoked).await, 1008);
    server.stop();
    let WatchLine::End(end) = text(&mut last).await else { panic!("the end") };
    assert!(end.reason.contains("stops"), "{end:?}");
    assert_eq!(close(&mut last).await, 1001);
}

/// The server waits for the tasks of upgraded connections, though it no
/// longer serves these connections itself.
#[tokio::test(flavor = "multi_thread")]
async fn stopping_daemon_waits_for_websocket_ends() {
    let server = Server::idle();
    let path = server.dir.path().join("second.sock");
    let listeners = Listeners { unix: listen(&path).unwrap(), tls: None };
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stopped = async { drop(stopped.await) };
    let before = Arc::strong_count(server.hub());
    let served =
        tokio::spawn(serve(listeners, server.engine.clone(), server.guard.clone(), stopped));
    let mut socket = socket_at(&path, &[]).await.unwrap();
    assert!(matches!(text(&mut socket).await, WatchLine::Snapshot(_)));
    assert!(Arc::strong_count(server.hub()) > before);
    // The client reads nothing, and so does not answer the close frame.
    stop.send(()).unwrap();
    served.await.unwrap().unwrap();
    assert_eq!(Arc::strong_count(server.hub()), before, "nobody attends to it any more");
    assert!(matches!(text(&mut socket).await, WatchLine::End(_)));
    assert_eq!(close(&mut socket).await, 1001);
}

/// Clients with a page of another server, with too long messages, or with too many connections.
#[tokio::test(flavor = "multi_thread")]
async fn websocket_refuses_foreign_pages_and_enforces_limits() {
    let server = Server::idle();
    let hub = server.hub().clone();
    for origin in ["https://evil.example", "null"] {
        assert_eq!(socket(&server, &[("origin", origin)]).await.err(), Some(403), "{origin}");
    }
    assert_eq!(socket(&server, &[("sec-websocket-version", "12")]).await.err(), Some(400));
    assert_eq!(socket(&server, &[("authorization", "Bearer pdp_nobody")]).await.err(), Some(401));
    let before = Arc::strong_count(&hub);
    let mut page = socket(&server, &[("origin", "http://pdp")]).await.unwrap();
    assert!(matches!(text(&mut page).await, WatchLine::Snapshot(_)));
    page.send(Message::Ping("there?".into())).await.unwrap();
    assert_eq!(message(&mut page).await, Some(Message::Pong("there?".into())));
    for message in [Message::Text("hello".into()), Message::Binary(vec![0; HEARD_BYTES_MAX].into())]
    {
        let mut talker = socket(&server, &[]).await.unwrap();
        assert!(matches!(text(&mut talker).await, WatchLine::Snapshot(_)));
        talker.send(message).await.unwrap();
        assert_eq!(close(&mut talker).await, 1003);
    }
    let mut large = socket(&server, &[]).await.unwrap();
    assert!(matches!(text(&mut large).await, WatchLine::Snapshot(_)));
    large.send(Message::Binary(vec![0; HEARD_BYTES_MAX + 1].into())).await.unwrap();
    assert!(!matches!(message(&mut large).await, Some(Message::Text(_))));
    let mut all = Vec::new();
    let refused = loop {
        match socket(&server, &[]).await {
            Ok(socket) => all.push(socket),
            Err(status) => break status,
        }
    };
    assert_eq!(refused, 429);
    // Ended ones may hold their permit until their end is complete.
    assert!((STREAMS_MAX - 4..STREAMS_MAX).contains(&all.len()), "{}", all.len());
    drop((all, page, large));
    eventually("nothing is kept for them", || Arc::strong_count(&hub) <= before);
    eventually("and their places are free", || {
        let open = socket(&server, &[]);
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(open)).is_ok()
    });
}

/// A client's messages do not disturb the lines that it gets.
#[tokio::test(flavor = "multi_thread")]
async fn client_pings_lose_no_events() {
    let server = Server::idle();
    let mut socket = socket(&server, &[]).await.unwrap();
    assert!(matches!(text(&mut socket).await, WatchLine::Snapshot(_)));
    let (mut to, mut from) = socket.split();
    let pings =
        tokio::spawn(async move { while to.send(Message::Ping("x".into())).await.is_ok() {} });
    let count = EVENTS_MAX / 2;
    let hub = server.hub().clone();
    let posts = std::thread::spawn(move || {
        for number in 0..count {
            let event = WatchEvent { object: "vnet/acme.red".into(), ..WatchEvent::default() };
            hub.post(WatchEvent { message: Some(number.to_string()), ..event });
            if number % 8 == 0 {
                std::thread::yield_now();
            }
        }
    });
    let mut number = 0;
    while number < count {
        let next = tokio::time::timeout(EVENTUALLY, from.next()).await.expect("a message");
        let Message::Text(text) = next.unwrap().unwrap() else { continue };
        let WatchLine::Event(event) = serde_json::from_str(&text).unwrap() else {
            panic!("{text}")
        };
        assert_eq!(event.message, Some(number.to_string()));
        number += 1;
    }
    posts.join().unwrap();
    pings.abort();
}

/// As for lines: the client reads nothing while twenty times as many events happen as are kept.
#[tokio::test(flavor = "multi_thread")]
async fn slow_websocket_reader_gets_a_gap_and_snapshot() {
    let server = Server::idle();
    let mut slow = socket(&server, &[]).await.unwrap();
    let WatchLine::Snapshot(first) = text(&mut slow).await else { panic!("what is") };
    let mut seq = first.seq;
    let message = "x".repeat(400);
    for _ in 0..20 * EVENTS_MAX {
        post(&server, "vnet/acme.red/node/r1", &message);
    }
    post(&server, "vnet/acme.red", "the last");
    let mut gaps = 0;
    loop {
        match text(&mut slow).await {
            WatchLine::Event(event) => {
                assert_eq!(event.seq, seq + 1, "nothing is missing in silence");
                seq = event.seq;
                if event.message.as_deref() == Some("the last") {
                    break;
                }
            }
            WatchLine::Gap(gap) => {
                gaps += 1;
                let WatchLine::Snapshot(after) = text(&mut slow).await else { panic!("what is") };
                assert!(after.seq >= seq + gap.lost.expect("a count"), "{after:?}");
                seq = after.seq;
                if seq == first.seq + 20 * EVENTS_MAX as u64 + 1 {
                    break;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(gaps > 0);
}

/// A vnet that was being removed when the daemon started is shown until it is gone.
#[tokio::test]
async fn removal_begun_before_restart_is_reported_when_finished() {
    let server = Server::idle();
    let hub = server.hub();
    hub.expect(["stays".to_owned(), "deleted".to_owned()], ["late".to_owned()]);
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    assert_eq!(snapshot(&mut watch).await.removing, ["late"]);
    hub.publish_vnet("stays", Some(VnetStatus::default()), true);
    hub.publish_vnet("late", None, true);
    hub.publish_vnet("late", None, false);
    // Before any other event of it.
    hub.publish_vnet("deleted", None, false);
    for object in ["vnet/late", "vnet/deleted"] {
        let gone = event(&mut watch).await;
        assert_eq!((gone.object.as_str(), gone.what), (object, EventKind::Gone));
    }
}

#[tokio::test]
async fn a_watch_ends_with_its_reason() {
    let mut server = Server::idle();
    let (acme, token) = as_tenant(&server, "acme");
    let mut watch = acme.watch(&WatchQuery::default()).await.unwrap();
    snapshot(&mut watch).await;
    server.guard.revoke_token(token).unwrap();
    let WatchLine::End(end) = line(&mut watch).await else { panic!("the end") };
    assert!(end.reason.contains("lost its rights"), "{end:?}");
    assert!(watch.next().await.unwrap().is_none());
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    snapshot(&mut watch).await;
    server.stop();
    let WatchLine::End(end) = line(&mut watch).await else { panic!("the end") };
    assert!(end.reason.contains("stops"), "{end:?}");
    assert!(watch.next().await.unwrap().is_none());
}
