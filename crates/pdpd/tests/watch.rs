//! The stream of everybody who watches, in front of a board that the tests write.

mod fake;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use fake::{EVENTUALLY, Server, eventually};
use pdp_api::client::{Client, Error, Watch};
use pdp_api::*;
use pdpd::watch::log::EVENTS_MAX;

fn client(server: &Server) -> Client {
    Client::new(server.socket())
}

/// One for a tenant's vnets.
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

async fn line(watch: &mut Watch) -> WatchLine {
    let next = tokio::time::timeout(EVENTUALLY, watch.next());
    next.await.expect("a line").unwrap().expect("not the end")
}

async fn snapshot(watch: &mut Watch) -> Snapshot {
    match line(watch).await {
        WatchLine::Snapshot(snapshot) => snapshot,
        other => panic!("no snapshot: {other:?}"),
    }
}

async fn event(watch: &mut Watch) -> WatchEvent {
    match line(watch).await {
        WatchLine::Event(event) => event,
        other => panic!("no event: {other:?}"),
    }
}

fn post(server: &Server, object: &str, message: impl ToString) {
    let message = Some(message.to_string());
    let event = WatchEvent { object: object.into(), message, ..WatchEvent::default() };
    server.fake.board.post(WatchEvent { what: What::Ended, ..event });
}

fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.vnets.iter().map(|vnet| vnet.name.as_str()).collect()
}

#[tokio::test]
async fn what_is_comes_first_and_then_what_happens() {
    let server = Server::start();
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    let first = snapshot(&mut watch).await;
    assert_eq!(names(&first), ["acme.red", "other.red", "red"]);
    assert_eq!((first.vnets[2].phase, first.vnets[2].guests_connected), (Phase::Degraded, 1));
    assert_eq!(first.status, None);
    post(&server, "vnet/red/node/r1/g0", "with code 7");
    let ended = event(&mut watch).await;
    assert_eq!((ended.seq, ended.boot.as_str()), (first.seq + 1, first.boot.as_str()));
    assert_eq!((ended.what, ended.message.as_deref()), (What::Ended, Some("with code 7")));
    server.fake.board.tell("red", None, false);
    let gone = event(&mut watch).await;
    assert_eq!((gone.object.as_str(), gone.what), ("vnet/red", What::Gone));
    let query = WatchQuery { vnet: Some("acme.red".into()), ..WatchQuery::default() };
    let mut watch = client(&server).watch(&query).await.unwrap();
    let one = snapshot(&mut watch).await;
    assert_eq!(names(&one), ["acme.red"]);
    assert_eq!(one.status.unwrap().nodes[0].guests[0].routes_synced, Some(true));
    for object in ["mux", "vnet/other.red", "vnet/acme.red/link/a"] {
        post(&server, object, "");
    }
    assert_eq!(event(&mut watch).await.object, "vnet/acme.red/link/a");
}

/// With a status that goes and comes for what was asked for before it was there.
#[tokio::test]
async fn a_vnet_may_come_later() {
    let server = Server::start();
    let query = WatchQuery { vnet: Some("late".into()), ..WatchQuery::default() };
    let mut watch = client(&server).watch(&query).await.unwrap();
    let none = snapshot(&mut watch).await;
    assert!(none.vnets.is_empty() && none.status.is_none() && none.going.is_empty());
    let board = &server.fake.board;
    board.tell("late", Some(VnetStatus::default()), true);
    assert_eq!(event(&mut watch).await.what, What::Created);
    board.tell("late", None, true);
    let mut again = client(&server).watch(&query).await.unwrap();
    let going = snapshot(&mut again).await;
    assert_eq!((going.vnets.len(), going.going), (0, vec!["late".to_owned()]));
    board.tell("late", None, false);
    for watch in [&mut watch, &mut again] {
        assert_eq!(event(watch).await.what, What::Gone);
    }
}

#[tokio::test]
async fn ten_thousand_events_at_once_come_all_and_in_order() {
    let server = Server::start();
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    let first = snapshot(&mut watch).await;
    // With those of before they are as many as are kept.
    let count = EVENTS_MAX - first.seq as usize;
    for number in 0..count {
        post(&server, "vnet/red/node/r1", number);
    }
    for number in 0..count {
        let event = event(&mut watch).await;
        assert_eq!(event.seq, first.seq + 1 + number as u64);
        assert_eq!(event.message, Some(number.to_string()));
    }
    // And whoever comes back gets what it missed.
    let after = Some(Cursor { boot: first.boot, seq: first.seq + count as u64 - 10 });
    let query = WatchQuery { after, ..WatchQuery::default() };
    let mut again = client(&server).watch(&query).await.unwrap();
    for number in count - 10..count {
        assert_eq!(event(&mut again).await.message, Some(number.to_string()));
    }
}

/// It reads nothing while twenty times as much happens as is kept: the daemon keeps nothing for it, it misses nothing
/// without being told, and what it has after that is what is.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_gets_a_gap_and_a_snapshot() {
    let server = Server::start();
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    let mut seq = snapshot(&mut watch).await.seq;
    let board = server.fake.board.clone();
    let before = Arc::strong_count(&board);
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
    eventually("nothing is kept for it", || Arc::strong_count(&board) < before);
}

#[tokio::test]
async fn a_daemon_that_started_anew_says_so() {
    let old = Server::start();
    let query = WatchQuery::default();
    let Snapshot { boot, seq, .. } = snapshot(&mut client(&old).watch(&query).await.unwrap()).await;
    let new = Server::start();
    let query = WatchQuery { after: Some(Cursor { boot, seq }), ..query };
    let mut watch = client(&new).watch(&query).await.unwrap();
    assert_eq!(line(&mut watch).await, WatchLine::Gap(Gap { lost: None }));
    assert_eq!(snapshot(&mut watch).await.vnets.len(), 3);
}

/// Neither in what is, nor in what happens, nor by numbers that others' activity moves.
#[tokio::test]
async fn a_tenant_learns_nothing_of_others() {
    let server = Server::start();
    let (acme, _) = as_tenant(&server, "acme");
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
    stream.write_all(b"GET /v1/watch HTTP/1.0\r\nAuthorization: Bearer pdp_acme\r\n\r\n").unwrap();
    let mut watch = acme.watch(&WatchQuery::default()).await.unwrap();
    let first = snapshot(&mut watch).await;
    assert_eq!(names(&first), ["acme.red"]);
    for number in 0..100 {
        post(&server, "vnet/other.red/node/canary", number);
        post(&server, "vnet/canary/node/r1", number);
        post(&server, "external/canary", number);
    }
    server.fake.board.tell("other.canary", Some(VnetStatus::default()), true);
    post(&server, "vnet/acme.red/node/r1", "mine");
    let next = event(&mut watch).await;
    assert_eq!((next.message.as_deref(), next.seq), (Some("mine"), first.seq + 1));
    let mut text = String::new();
    while !text.contains("mine") {
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).unwrap();
        assert!(count > 0, "{text}");
        text += std::str::from_utf8(&bytes[..count]).unwrap();
    }
    for secret in ["canary", "other"] {
        assert!(!text.contains(secret), "{text}");
    }
    let query = WatchQuery { vnet: Some("other.red".into()), ..WatchQuery::default() };
    let Err(Error::Problem(none)) = acme.watch(&query).await else { panic!("refused") };
    assert_eq!((none.kind, none.error.as_str()), (ProblemKind::NotFound, r#"no vnet "other.red""#));
}

#[tokio::test]
async fn a_watch_ends_with_its_reason() {
    let mut server = Server::start();
    let (acme, token) = as_tenant(&server, "acme");
    let mut watch = acme.watch(&WatchQuery::default()).await.unwrap();
    snapshot(&mut watch).await;
    server.guard.revoke_token(token).unwrap();
    let WatchLine::End(end) = line(&mut watch).await else { panic!("the end") };
    assert!(end.reason.contains("may not"), "{end:?}");
    assert!(watch.next().await.unwrap().is_none());
    let mut watch = client(&server).watch(&WatchQuery::default()).await.unwrap();
    snapshot(&mut watch).await;
    server.stop();
    let WatchLine::End(end) = line(&mut watch).await else { panic!("the end") };
    assert!(end.reason.contains("stops"), "{end:?}");
    assert!(watch.next().await.unwrap().is_none());
}
