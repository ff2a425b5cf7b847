//! The API: it answers any bytes on a connection by HTTP, and invalid ones with a problem.

#[path = "../../pdpd/tests/pretend/mod.rs"]
mod pretend;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pdp_api::{ApplyRequest, Problem};
use pdp_spec::SourceFile;
use pdpd::access::{AccessScope, Authenticator, PeerIdentity};
use pdpd::api::HttpServer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bytes in flight in each direction.
const PIPE_BYTES: usize = 1 << 16;

/// Upper limit for any request.
const PATIENCE: Duration = Duration::from_secs(20);

/// A network that exists at first.
const RED: &str = "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec:
  nodes:
    r1: {kind: router, interfaces: {eth0: {}}}
    h1: {kind: host, interfaces: {eth0: {}}}
  links: [{name: x, endpoints: [\"r1:eth0\", \"h1:eth0\"]}]
";

/// The API of a node on a pretend machine, made once. Its state is in memory if possible.
fn server() -> &'static HttpServer {
    static SERVER: OnceLock<(HttpServer, tempfile::TempDir, tokio::sync::watch::Sender<bool>)> =
        OnceLock::new();
    let make = || {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.expect("a directory");
        let (_, daemon) = pretend::daemon(directory.path(), |_| ());
        let daemon = Arc::new(daemon);
        let runs = daemon.clone();
        std::thread::spawn(move || runs.reconcile_loop.run());
        let file = SourceFile { name: "red.yaml".into(), text: RED.into(), ..Default::default() };
        let request = ApplyRequest { files: vec![file], dry_run: false, only: Vec::new() };
        daemon.apply(&AccessScope::Node, request, &mut |_| ()).expect("a network");
        let state = daemon.host.state.clone();
        let guard = Authenticator { state, operators: vec![], viewers: vec![] };
        let made = pdpd::api::server(daemon, Arc::new(guard), None);
        let (server, stop) = made.expect("a thread");
        (server, directory, stop)
    };
    &SERVER.get_or_init(make).0
}

/// Bytes of a client with the operator's rights, which then closes its side.
pub(crate) fn http(bytes: &[u8]) {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
    }
    let answer = RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
            let (mut read, mut write) = tokio::io::split(ours);
            let served = server().other(theirs, PeerIdentity::Unix { uid: 0, pid: 1 });
            let served = served.expect("room");
            let written = async {
                let _ = write.write_all(bytes).await;
                let _ = write.shutdown().await;
            };
            let heard = async {
                let mut answer = Vec::new();
                let _ = read.read_to_end(&mut answer).await;
                answer
            };
            let all = async { tokio::join!(served, written, heard).2 };
            tokio::time::timeout(PATIENCE, all).await.expect("an end")
        })
    });
    check_answers(&answer);
}

/// Checks that every answer is valid HTTP, and that failures are problems.
fn check_answers(mut rest: &[u8]) {
    while !rest.is_empty() {
        let end = rest.windows(4).position(|four| four == b"\r\n\r\n").expect("a whole head");
        let head = std::str::from_utf8(&rest[..end]).expect("text").to_ascii_lowercase();
        let status = head.strip_prefix("http/1.1 ").or(head.strip_prefix("http/1.0 "));
        let status: u16 = status.and_then(|rest| rest.get(..3)?.parse().ok()).expect("a status");
        assert!(status < 500 || status == 503, "{head}");
        rest = &rest[end + 4..];
        let Some((_, length)) = head.split_once("content-length: ") else { return };
        let digits = length.split("\r\n").next().expect("a line");
        let length: usize = digits.parse().expect("a number");
        // The answer to HEAD has none of the bytes that it announces.
        let Some((body, after)) = rest.split_at_checked(length) else { return };
        let is_http = |bytes: &[u8]| bytes.starts_with(b"HTTP/1.");
        if length > 0 && is_http(body) {
            continue;
        }
        if status >= 400 && length > 0 {
            let problem: Result<Problem, _> = serde_json::from_slice(body);
            assert!(problem.is_ok(), "{head}: {}", String::from_utf8_lossy(body));
        }
        rest = after;
    }
}
