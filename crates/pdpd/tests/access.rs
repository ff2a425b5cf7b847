//! Permissions, tested over the real HTTP layer in front of a node on a pretend machine.

mod node;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use node::pretend::BROKEN;
use node::{EVENTUALLY, PCAP, Server, TENANT, VIEWER, VNETS, eventually};
use pdp_api::client::{Client, Error};
use pdp_api::{
    ApplyRequest, AuditEntry, AuditQuery, GuestProcess, LogQuery, ProblemKind, Role, StatsQuery,
    TokenRequest,
};
use pdpd::api::{CALLS_MAX, HANDSHAKE_TIME_MAX, HEAD_BYTES_MAX, TENANT_CALLS_MAX, openapi};
use pdpd::intent::state::StateFile;

/// Clients of the tests: root on the socket without a token, and clients with tokens.
fn tokens(server: &Server) -> Vec<(&'static str, Option<String>)> {
    let make = |role, tenant: Option<&str>| {
        let request = TokenRequest { role, tenant: tenant.map(Into::into), expires_seconds: None };
        let tenants = server.engine.tenants();
        Some(server.guard.create_token(&request, &tenants).unwrap().secret)
    };
    vec![
        ("root", None),
        ("operator", make(Role::Operator, None)),
        ("viewer", make(Role::Viewer, None)),
        ("tenant", make(Role::Tenant, Some("acme"))),
        ("tenant viewer", make(Role::Viewer, Some("acme"))),
    ]
}

fn request(method: &str, path: &str, token: Option<&str>) -> String {
    let bearer = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
    format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{bearer}Content-Length: 0\r\n\r\n"
    )
}

/// Returns status and body of a raw request over the socket. Of a session it reads only the head.
fn ask(server: &Server, method: &str, path: &str, token: Option<&str>) -> (u16, String) {
    let mut stream = UnixStream::connect(server.socket()).unwrap();
    stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
    stream.write_all(request(method, path, token).as_bytes()).unwrap();
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) | Err(_) => break,
            Ok(count) => bytes.extend_from_slice(&chunk[..count]),
        }
        let goes_on = path.ends_with("/capture") || path == "/v1/watch";
        if goes_on && bytes.starts_with(b"HTTP/1.1 200") {
            break;
        }
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let status = text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    (status, text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

/// Expected permission of each role for each route of the description.
/// All vnets in the paths exist at first.
fn allowed(method: &str, path: &str, who: &str) -> bool {
    let of_vnet = path.contains("{vnet}");
    let enters = ["/exec", "/capture", "/trace"].iter().any(|end| path.ends_with(end));
    let reads = method == "GET" && !enters;
    match who {
        "root" | "operator" => true,
        "viewer" => reads,
        "tenant" | "tenant viewer" => {
            let described = ["openapi.json", "pdp-v1.json"];
            let shared =
                ["version", "vnets", "stats", "watch", "substrate", "tenants", "audit", "images"];
            let shared = shared.iter().chain(&described).any(|word| path == format!("/v1/{word}"));
            let mine = of_vnet || path == "/v1/apply" || path.starts_with("/v1/images");
            (reads && (shared || of_vnet)) || (who == "tenant" && mine)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn every_api_route_enforces_its_role_rule() {
    let server = Server::start();
    let tokens = tokens(&server);
    let description: serde_json::Value = serde_json::from_str(&openapi()).unwrap();
    let mut asked = 0;
    for (path, methods) in description["paths"].as_object().unwrap() {
        for method in ["GET", "PUT", "POST", "DELETE", "PATCH"] {
            if methods[method.to_lowercase()].is_null() {
                continue;
            }
            let real = path
                .replace("{vnet}", "acme.red")
                .replace("{node}", "r1")
                .replace("{port}", "eth0")
                .replace("{link}", "r1-h1")
                .replace("{tenant}", "other")
                .replace("{id}", "99")
                .replace(
                    "/logs/{process}",
                    if path.contains("{vnet}") { "/logs/g0" } else { "/logs/mux" },
                );
            for (who, token) in &tokens {
                let (status, body) = ask(&server, method, &real, token.as_deref());
                let may = allowed(method, path, who);
                assert_eq!(status != 403, may, "{method} {path} as {who}: {status} {body}");
                assert!(status != 401 && status != 405 && status != 0, "{method} {path} as {who}");
                asked += 1;
            }
        }
    }
    assert!(asked > 100, "{asked}");
}

#[test]
fn foreign_objects_are_answered_like_missing_ones() {
    let server = Server::start();
    let steps = server.engine.reconcile_loop.steps();
    let tokens = tokens(&server);
    let description: serde_json::Value = serde_json::from_str(&openapi()).unwrap();
    let paths = description["paths"].as_object().unwrap();
    for (path, methods) in paths.iter().filter(|(path, _)| path.contains("{vnet}")) {
        for method in ["GET", "PUT", "POST", "DELETE"] {
            if methods[method.to_lowercase()].is_null() {
                continue;
            }
            let fill = |vnet: &str| {
                path.replace("{vnet}", vnet)
                    .replace("{node}", "r1")
                    .replace("{port}", "eth0")
                    .replace("{link}", "x")
                    .replace("{process}", "g0")
            };
            for (who, token) in tokens.iter().filter(|(who, _)| who.starts_with("tenant")) {
                // `red` belongs to operators, `other.red` to another
                // tenant. Both exist.
                for (there, not) in [("red", "rad"), ("other.red", "other.rad")] {
                    let (status, body) = ask(&server, method, &fill(there), token.as_deref());
                    let (none, same) = ask(&server, method, &fill(not), token.as_deref());
                    assert_eq!((status, none), (404, 404), "{method} {path} as {who}");
                    assert_eq!(body.replace(there, not), same, "{method} {path} as {who}");
                }
            }
        }
    }
    // The answer is also the same as for a missing vnet of its own.
    let token = tokens[3].1.as_deref();
    let (_, own) = ask(&server, "GET", "/v1/vnets/acme.none", token);
    let (_, others) = ask(&server, "GET", "/v1/vnets/other.red", token);
    assert_eq!(others.replace("other.red", "acme.none"), own);
    let (status, by_query) = ask(&server, "GET", "/v1/stats?vnet=other.red", token);
    assert_eq!((status, by_query), (404, others));
    assert_eq!(server.vnets(), VNETS);
    assert_eq!(server.engine.reconcile_loop.steps(), steps, "nothing was changed");
}

/// An operator learns where the log would be, and a tenant does not.
#[test]
fn problems_of_tenants_name_no_path_of_the_machine() {
    let server = Server::start();
    let tokens = tokens(&server);
    let log = "/v1/vnets/acme.red/nodes/r1/logs/tap";
    let directory = server.path("state").display().to_string();
    let (status, body) = ask(&server, "GET", log, None);
    assert!(status == 404 && body.contains(&directory), "{body}");
    let (status, body) = ask(&server, "GET", log, tokens[3].1.as_deref());
    assert!(status == 404 && body.contains("STATE/logs/"), "{body}");
    assert!(!body.contains(&directory), "{body}");
}

#[test]
fn path_names_are_decoded_only_once() {
    let server = Server::start();
    let tokens = tokens(&server);
    let token = tokens[3].1.as_deref();
    for path in [
        "/v1/vnets/other%2Ered",
        "/v1/vnets/acme.%2e%2e%2fother.red",
        "/v1/vnets/acme.red%2F..%2Fother.red",
        "/v1/vnets/acme.red/../other.red",
        "/v1/vnets/ACME.red",
        "/v1/vnets/acme",
        "/v1/vnets/.red",
        "/v1/vnets//other.red",
        "/v1/vnets/acme%2Ered%00",
    ] {
        let (status, body) = ask(&server, "DELETE", path, token);
        assert_eq!(status, 404, "{path}: {body}");
    }
    assert_eq!(ask(&server, "DELETE", "/v1/vnets/%ff", token).0, 400);
    assert_eq!(server.vnets(), VNETS);
}

/// Runs a shell line as another user of the machine, who can reach the server's directory.
fn as_user(server: &Server, uid: u32, path: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(server.dir.path(), open).unwrap();
    let mut child = Command::new("setpriv")
        .args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups", "socat"])
        .args(["STDIO,ignoreeof", &format!("UNIX-CONNECT:{}", server.socket().display())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(request("GET", path, None).as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn unix_users_are_identified_by_the_kernel() {
    let server = Server::start();
    let mine = as_user(&server, TENANT, "/v1/vnets");
    assert!(mine.contains("acme.red") && !mine.contains("other.red"), "{mine}");
    let others = as_user(&server, TENANT + 1, "/v1/vnets/acme.red");
    assert!(others.starts_with("HTTP/1.1 404"), "{others}");
    let viewer = as_user(&server, VIEWER, "/v1/vnets");
    assert!(viewer.contains("other.red"), "{viewer}");
    let nobody = as_user(&server, TENANT + 7, "/v1/vnets");
    assert!(nobody.starts_with("HTTP/1.1 403") && nobody.contains("ask an operator"), "{nobody}");
    let who: Vec<String> = audited(&server).into_iter().map(|row| row.who).collect();
    assert!(who.contains(&format!("user:{}", TENANT + 7)), "{who:?}");
}

fn audited(server: &Server) -> Vec<AuditEntry> {
    // The request flushes the entries of earlier ones.
    assert_eq!(ask(server, "GET", "/v1/audit?limit=1", None).0, 200);
    server.guard.state.trail.entries(&AuditQuery::default(), None).unwrap()
}

#[test]
fn every_request_is_audited_without_secrets() {
    let server = Server::start();
    let tokens = tokens(&server);
    let tenant = tokens[3].1.as_deref();
    ask(&server, "GET", "/v1/vnets", None);
    ask(&server, "GET", "/v1/vnets/other.red", tenant);
    ask(&server, "DELETE", "/v1/vnets/acme.red", tenant);
    ask(&server, "POST", "/v1/up", tenant);
    ask(&server, "POST", "/v1/apply", tenant);
    ask(&server, "GET", "/v1/vnets", Some("pdp_wrong"));
    ask(&server, "GET", "/v1/nothing", None);
    ask(&server, "PATCH", "/v1/vnets", None);
    let rows = audited(&server);
    let short: Vec<_> = rows
        .iter()
        .map(|row| (row.who.as_str(), row.what.as_str(), row.status, row.changes))
        .filter(|row| !row.1.contains("audit"))
        .collect();
    for expected in [
        ("user:root", "GET /v1/vnets", Some(200), false),
        ("token:3", "GET /v1/vnets/other.red", Some(404), false),
        ("token:3", "DELETE /v1/vnets/acme.red", Some(200), true),
        ("token:3", "POST /v1/up", Some(403), false),
        ("token:3", "POST /v1/apply", Some(400), true),
        ("token:?", "GET /v1/vnets", Some(401), false),
        ("user:root", "GET /v1/nothing", Some(404), false),
        ("user:root", "PATCH /v1/vnets", Some(405), false),
    ] {
        assert!(short.contains(&expected), "{expected:?} in {short:?}");
    }
    assert_eq!(short.len(), 8, "{short:?}");
    let refused = rows.iter().find(|row| row.what == "POST /v1/up").unwrap();
    assert_eq!(refused.error.as_deref(), Some("the role tenant may not do this"));
    assert!(rows.iter().all(|row| row.duration_us.is_some() && row.from.starts_with("pid ")));
    let text = serde_json::to_string(&rows).unwrap();
    assert!(!text.contains("pdp_"), "{text}");

    // A tenant sees its own requests.
    let (_, body) = ask(&server, "GET", "/v1/audit", tenant);
    let own: Vec<AuditEntry> = serde_json::from_str(&body).unwrap();
    assert!(own.len() >= 4 && own.iter().all(|row| row.who == "token:3"), "{own:?}");
}

#[test]
fn requests_of_vanished_clients_are_audited() {
    let server = Server::start();
    for number in 0..20 {
        let mut stream = UnixStream::connect(server.socket()).unwrap();
        let path = format!("/v1/vnets/none-{number}");
        stream.write_all(request("GET", &path, None).as_bytes()).unwrap();
    }
    eventually("all are written down", || {
        audited(&server).iter().filter(|row| row.what.contains("none-")).count() == 20
    });
}

#[tokio::test]
async fn change_is_audited_before_and_after_it_acts() {
    let server = Server::start();
    server.machine.set(|inside| inside.hangs = Some("/waits.".into()));
    let state = server.guard.state.clone();
    let client = Client::new(server.socket());
    let text = "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {name: waits}\n\
                spec: {nodes: {h1: {kind: host}}}\n";
    let file = pdp_spec::SourceFile::read("x.yaml", text, |_, _| Err("none".into()));
    let request = ApplyRequest { files: vec![file], dry_run: false, only: Vec::new() };
    let row = || state.trail.entries(&AuditQuery::default(), None).unwrap().pop().unwrap();
    let (began, begun) = tokio::sync::oneshot::channel();
    let mut began = Some(began);
    {
        let apply = client.apply(&request, |_| {
            let _ = began.take().map(|began| began.send(()));
        });
        tokio::select! {
            _ = apply => panic!("it waits"),
            _ = begun => {}
        }
    }
    // If the daemon were killed now, this entry would stay as it is.
    let (path, unfinished) = (server.path("state"), row());
    assert_eq!((unfinished.what.as_str(), unfinished.status), ("POST /v1/apply", None));
    let copy = server.path("copy");
    std::fs::create_dir(&copy).unwrap();
    for file in std::fs::read_dir(&path).unwrap() {
        let file = file.unwrap().path();
        if file.is_file() {
            std::fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
        }
    }
    let left = StateFile::open(&copy).unwrap().trail.entries(&AuditQuery::default(), None).unwrap();
    assert_eq!(left, [unfinished]);
    server.machine.set(|inside| inside.hangs = None);
    eventually("its end is written, though its client went away", || row().status == Some(200));
}

#[test]
fn late_failures_of_changes_are_audited() {
    let server = Server::start();
    let text = format!(
        "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: fails-late}}\n\
         spec: {{nodes: {{h1: {{kind: host, env: {{{BROKEN}: \"1\"}}}}}}}}\n"
    );
    let body = serde_json::json!({"files": [{"name": "x", "text": text}]}).to_string();
    let request = format!(
        "POST /v1/apply HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = server.raw(request.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 200"), "it fails after its first step: {answer}");
    let row = audited(&server).into_iter().find(|row| row.what == "POST /v1/apply").unwrap();
    let error = row.error.unwrap_or_default();
    assert!(error.starts_with("node fails-late/h1: can't create"), "{error}");
    assert_eq!(row.status, Some(500));
}

#[tokio::test]
async fn exec_arguments_and_exit_are_audited() {
    let server = Server::start();
    let client = Client::new(server.socket());
    let exec = |words: &[&str]| pdp_api::exec::ExecRequest {
        command: words.iter().map(ToString::to_string).collect(),
        ..Default::default()
    };
    let mut done = client.exec("red", "r1", &exec(&["sh", "-c", "exit 7"])).await.unwrap();
    while let Ok(Some(_)) = pdp_api::exec::read_frame(&mut done).await {}
    drop(client.exec("red", "r1", &exec(&["sleep", "600"])).await.unwrap());
    let mut found = Vec::new();
    eventually("both have ended", || {
        let rows = audited(&server).into_iter().filter(|row| row.what.ends_with("/exec"));
        found = rows.map(|row| (row.command, row.status, row.exit, row.error)).collect();
        found.len() == 2 && found.iter().all(|row| row.1.is_some())
    });
    let text = |text: &str| Some(text.to_owned());
    let gone = text("broken off: the client went away");
    assert_eq!(
        found,
        [
            (text("sh -c 'exit 7'"), Some(101), Some(7), None),
            (text("sleep 600"), Some(101), None, gone),
        ]
    );
}

#[test]
fn tenant_cannot_exhaust_other_clients_requests() {
    let server = Server::start();
    let tokens = tokens(&server);
    let path = "/v1/vnets/acme.red/nodes/r1/logs/control?follow=true";
    let mut open = Vec::new();
    for number in 0..=TENANT_CALLS_MAX {
        let mut stream = UnixStream::connect(server.socket()).unwrap();
        stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
        stream.write_all(request("GET", path, tokens[3].1.as_deref()).as_bytes()).unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        let status = if number < TENANT_CALLS_MAX { "200" } else { "429" };
        assert_eq!(&head, format!("HTTP/1.1 {status}").as_bytes(), "{number}");
        open.push(stream);
    }
    const { assert!(TENANT_CALLS_MAX < CALLS_MAX) };
    let (status, _) = ask(&server, "GET", "/v1/vnets/red/nodes/r1/logs/g0", None);
    assert_eq!(status, 200, "an operator has its own room");
}

/// The server sends `100 Continue` when it begins to read a body whose
/// client waits for that (RFC 9110, 10.1.1).
#[test]
fn request_over_quota_is_refused_before_its_body() {
    let server = Server::start();
    let tokens = tokens(&server);
    let ask = || {
        let mut stream = UnixStream::connect(server.socket()).unwrap();
        stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
        let head = request("POST", "/v1/apply", tokens[3].1.as_deref());
        let waits = "Expect: 100-continue\r\nContent-Length: 5";
        stream.write_all(head.replace("Content-Length: 0", waits).as_bytes()).unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        (String::from_utf8_lossy(&status).into_owned(), stream)
    };
    let mut places = Vec::new();
    for number in 0..TENANT_CALLS_MAX {
        let (status, stream) = ask();
        assert_eq!(status, "HTTP/1.1 100", "{number}");
        places.push(stream);
    }
    assert_eq!(ask().0, "HTTP/1.1 429", "its body was not asked for");
    // A client that goes away releases its permit.
    places.pop();
    eventually("a place is left", || ask().0 == "HTTP/1.1 100");
}

fn over_tls(server: &Server) -> Client {
    let authority = std::fs::read(server.path("tls.crt")).unwrap();
    let url = format!("https://{}", server.address);
    Client::over_tls(&url, &authority).unwrap()
}

fn kind<T: std::fmt::Debug>(result: Result<T, Error>) -> ProblemKind {
    match result {
        Err(Error::Problem(problem)) => problem.kind,
        other => panic!("no problem: {other:?}"),
    }
}

#[tokio::test]
async fn tls_clients_are_identified_by_their_token() {
    let server = Server::start();
    let tokens = tokens(&server);
    let client = over_tls(&server);
    assert_eq!(kind(client.version().await), ProblemKind::Unauthorized);
    let wrong = client.clone().with_token("pdp_wrong");
    assert_eq!(kind(wrong.version().await), ProblemKind::Unauthorized);
    let tenant = client.clone().with_token(tokens[3].1.clone().unwrap());
    let names: Vec<_> = tenant.vnets().await.unwrap().into_iter().map(|vnet| vnet.name).collect();
    assert_eq!(names, ["acme.red"]);
    let listens = tenant.version().await.unwrap().listens.unwrap();
    assert_eq!(listens.address, server.address.to_string());
    assert_eq!(listens.certificate_sha256.len(), 64);
    let query = StatsQuery { vnet: Some("red".into()) };
    assert_eq!(kind(tenant.stats(&query).await), ProblemKind::NotFound);
    // Changes, streams and upgraded connections go over TLS as well.
    let gone = "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {name: acme.gone}\n\
                spec: {nodes: {h1: {kind: host}}}\n";
    server.apply(gone.into());
    tenant.delete_vnet("acme.gone", |_| ()).await.unwrap();
    let capture = pdp_api::CaptureQuery { snap_bytes: 1, filter: None };
    let mut stream = tenant.capture("acme.red", "r1", "eth0", &capture).await.unwrap();
    assert!(stream.next().await.unwrap().unwrap().starts_with(PCAP));
    let exec = pdp_api::exec::ExecRequest {
        command: ["sh", "-c", "exit 7"].map(String::from).to_vec(),
        ..Default::default()
    };
    let mut connection = tenant.exec("acme.red", "r1", &exec).await.unwrap();
    loop {
        match pdp_api::exec::read_frame(&mut connection).await.unwrap() {
            Some(pdp_api::exec::ExecFrame::Exit(code)) => break assert_eq!(code, 7),
            Some(_) => {}
            None => panic!("no exit code"),
        }
    }
    // The next request with a revoked token is refused, and open sessions end.
    let query = LogQuery { tail: None, follow: true };
    let control = GuestProcess::Control;
    let mut log = tenant.node_logs("acme.red", "r1", control, &query).await.unwrap();
    let exec = pdp_api::exec::ExecRequest {
        command: ["sleep", "1000"].map(String::from).to_vec(),
        ..Default::default()
    };
    let mut connection = tenant.exec("acme.red", "r1", &exec).await.unwrap();
    let ends = async |what: &str, end: &mut (dyn Future<Output = ()> + Unpin)| {
        let ended = tokio::time::timeout(Duration::from_secs(20), end).await;
        assert!(ended.is_ok(), "{what} goes on");
    };
    // Longer than the interval at which clients are authenticated again.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let mut rest = Box::pin(async {
        let end = loop {
            match log.next().await {
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        // The log does not end as if it were complete.
        assert!(matches!(end, Err(Error::BrokenOff(_))), "{end:?}");
    });
    let still = tokio::time::timeout(Duration::from_millis(200), &mut rest).await;
    assert!(still.is_err(), "a log that is followed ended for nothing");
    server.guard.revoke_token(3).unwrap();
    assert_eq!(kind(tenant.vnets().await), ProblemKind::Unauthorized);
    ends("a log that is followed", &mut rest).await;
    let command = async {
        let mut last = None;
        while let Ok(Some(frame)) = pdp_api::exec::read_frame(&mut connection).await {
            last = Some(frame);
        }
        let why = pdp_api::exec::ExecFrame::BrokenOff("the token was revoked".into());
        assert_eq!(last, Some(why));
    };
    ends("a command", &mut Box::pin(command)).await;
    let row = audited(&server).into_iter().find(|row| row.what.starts_with("DELETE")).unwrap();
    assert!(row.from.starts_with("127.0.0.1:"), "{row:?}");
}

#[tokio::test]
async fn client_refuses_another_server_certificate() {
    let (one, two) = (Server::start(), Server::start());
    let url = format!("https://{}", one.address);
    let other = std::fs::read(two.path("tls.crt")).unwrap();
    let client = Client::over_tls(&url, &other).unwrap().with_token("secret");
    let refused = client.version().await;
    assert!(matches!(refused, Err(Error::Tls { .. })), "{refused:?}");
    for bad in ["http://x:1", "https://x", "x:1", "https://x:1/path", ""] {
        assert!(matches!(Client::over_tls(bad, &other), Err(Error::InvalidAddress(_))), "{bad}");
    }
    assert!(matches!(Client::over_tls(&url, b"nothing"), Err(Error::InvalidAddress(_))));
}

#[tokio::test]
async fn hostile_tls_clients_do_not_block_others() {
    let server = Server::start();
    let token = tokens(&server)[1].1.clone().unwrap();
    let client = over_tls(&server).with_token(token.clone());
    // A silent client, and one with half a handshake, are disconnected after a while.
    let mut silent = TcpStream::connect(server.address).unwrap();
    let mut half = TcpStream::connect(server.address).unwrap();
    half.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).unwrap();
    let begin = Instant::now();
    // Garbage and plain HTTP, even with a valid token, get no HTTP answer.
    for bytes in [
        request("GET", "/v1/version", Some(&token)).into_bytes(),
        vec![0; 100_000],
        (0..=255).collect(),
        [0x16, 3, 1, 0xff, 0xff].into_iter().chain(std::iter::repeat_n(7, 70_000)).collect(),
    ] {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.windows(4).any(|part| part == b"HTTP"), "{answer:?}");
        client.version().await.unwrap();
    }
    for stream in [&mut silent, &mut half] {
        stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
        let mut answer = Vec::new();
        // Closed or reset; what matters is that it ends.
        match stream.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) => assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "still open"),
        }
    }
    assert!(begin.elapsed() + Duration::from_secs(1) >= HANDSHAKE_TIME_MAX);
    client.version().await.unwrap();
}

#[tokio::test]
async fn connections_per_address_are_limited() {
    let server = Server::start();
    let token = tokens(&server)[1].1.clone().unwrap();
    let max = pdpd::api::CONNECTIONS_PER_PEER_MAX;
    let mut open: Vec<_> = (0..max).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    let client = over_tls(&server).with_token(token);
    assert!(client.version().await.is_err(), "no more from this address");
    assert!(Client::new(server.socket()).version().await.is_ok(), "the socket has its own room");
    open.clear();
    let end = Instant::now() + EVENTUALLY;
    while client.version().await.is_err() {
        assert!(Instant::now() < end, "places never come back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn request_heads_are_limited() {
    let server = Server::start();
    // The buffer may be somewhat larger than the limit.
    let long = "x".repeat(2 * HEAD_BYTES_MAX);
    let by_header = format!("GET /v1/version HTTP/1.1\r\nHost: x\r\nX: {long}\r\n\r\n");
    let by_path = format!("GET /v1/{long} HTTP/1.1\r\nHost: x\r\n\r\n");
    let by_count = format!("GET /v1/version HTTP/1.1\r\n{}\r\n", "X: x\r\n".repeat(5000));
    for head in [by_header, by_path, by_count] {
        let answer = server.raw(head.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer:.60}");
    }
    let path = format!("/v1/{}", "y".repeat(2000));
    assert_eq!(ask(&server, "GET", &path, None).0, 404);
    let rows = audited(&server);
    let longest = rows.iter().map(|row| row.what.chars().count()).max().unwrap();
    assert!(longest <= 512, "{longest}");
}

#[test]
fn malformed_token_is_refused_even_for_root() {
    let server = Server::start();
    for value in ["Basic cm9vdDo=", "Bearer", "Bearer ", "", "\u{7f}"] {
        let head = format!(
            "GET /v1/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {value}\r\n\r\n"
        );
        let answer = server.raw(head.as_bytes());
        assert!(!answer.starts_with("HTTP/1.1 200"), "{value:?}: {answer}");
    }
    let answer = server.raw(request("GET", "/v1/version", Some("pdp_0")).as_bytes());
    assert!(answer.to_lowercase().contains("www-authenticate: bearer"), "{answer}");
}
