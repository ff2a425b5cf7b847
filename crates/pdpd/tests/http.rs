//! The HTTP layer, over its socket, in front of a node on a pretend machine.

mod node;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use node::pretend::BROKEN;
use node::{
    EVENTUALLY, PCAP, RECORD_BYTES, ROUTES, ROUTES_BEFORE_END, Server, eventually, processes_with,
};
use pdp_api::client::{Client, Error};
use pdp_api::exec::{ExecFrame, ExecRequest, WindowSize, read_frame, write_frame};
use pdp_api::*;
use pdp_spec::SourceFile;
use pdpd::api::{STREAMS_MAX, listen, openapi};
use serde_json::Value;
use tokio::io::AsyncWriteExt;

fn client(server: &Server) -> Client {
    Client::new(server.socket())
}

fn problem<T: std::fmt::Debug>(result: Result<T, Error>) -> Problem {
    match result {
        Err(Error::Problem(problem)) => *problem,
        other => panic!("no problem: {other:?}"),
    }
}

fn vnet_file(names: &[&str]) -> SourceFile {
    let text: String = names
        .iter()
        .map(|name| {
            format!(
                "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: {name}}}\n\
                 spec: {{nodes: {{h1: {{kind: host}}}}}}\n---\n"
            )
        })
        .collect();
    SourceFile::read("test.yaml", text.trim_end_matches("---\n"), |_, _| Err("none".into()))
}

fn apply_of(names: &[&str]) -> ApplyRequest {
    ApplyRequest { files: vec![vnet_file(names)], dry_run: false, only: Vec::new() }
}

#[test]
fn the_published_description_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../schema/openapi.json");
    if std::env::var_os("PDP_PUBLISH").is_some() {
        fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schema")).unwrap();
        fs::write(path, openapi()).unwrap();
    }
    let published = fs::read_to_string(path).unwrap();
    assert!(
        published == openapi(),
        "PDP_PUBLISH=1 cargo test --workspace --test http publishes it"
    );
}

#[test]
fn openapi_names_every_path_and_defines_its_types() {
    let description: serde_json::Value = serde_json::from_str(&openapi()).unwrap();
    assert_eq!(description["openapi"], "3.1.0");
    for path in [
        paths::VERSION,
        paths::OPENAPI,
        paths::SPEC_SCHEMA,
        paths::DOCTOR,
        paths::APPLY,
        paths::UP,
        paths::DOWN,
        paths::SUBSTRATE,
        paths::VNETS,
        paths::STATS,
        paths::WATCH,
        paths::TENANTS,
        paths::TOKENS,
        paths::AUDIT,
        "/v1/logs/{process}",
        "/v1/vnets/{vnet}/links/{link}",
        "/v1/vnets/{vnet}/links/{link}/fdb",
        "/v1/vnets/{vnet}/nodes/{node}/exec",
        "/v1/vnets/{vnet}/nodes/{node}/routes",
        "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/capture",
        "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/trace",
        "/v1/vnets/{vnet}/nodes/{node}/logs/{process}",
        "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters",
        "/v1/vnets/{vnet}/nodes/{node}/fastpath/counters",
        "/v1/vnets/{vnet}/nodes/{node}/fastpath/queues",
        "/v1/vnets/{vnet}/nodes/{node}/fastpath/frames",
    ] {
        assert!(description["paths"][path].is_object(), "{path}");
    }
    let text = openapi();
    for part in text.split("\"#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap();
        assert!(description["components"]["schemas"][name].is_object(), "{name}");
    }
}

#[test]
fn openapi_is_self_contained_and_documents_change_reports() {
    let description: Value = serde_json::from_str(&openapi()).unwrap();
    let text = openapi();
    for reference in text.split("\"$ref\": \"").skip(1) {
        assert!(reference.starts_with("#/components/"), "{}", &reference[..60]);
    }
    let vnet = &description["components"]["schemas"]["VirtualNetworkDocument"];
    assert_eq!(vnet["properties"]["kind"]["const"], "VirtualNetwork");
    let answer = &description["paths"][paths::APPLY]["post"]["responses"]["200"]["content"];
    assert_eq!(answer["application/json"]["schema"]["$ref"], "#/components/schemas/ChangeReport");
    assert!(answer["application/x-ndjson"].is_object());
}

/// Checks the description against the schema of OpenAPI 3.1 documents that the OpenAPI
/// Initiative publishes (<https://spec.openapis.org/oas/3.1/schema/2022-10-07>), and
/// its schemas against that of JSON Schema.
#[test]
fn the_description_is_valid_openapi() {
    let description: Value = serde_json::from_str(&openapi()).unwrap();
    let schema = serde_json::from_str(include_str!("data/oas-3.1-schema.json")).unwrap();
    let faults: Vec<String> = jsonschema::validator_for(&schema)
        .unwrap()
        .iter_errors(&description)
        .map(|fault| format!("{}: {fault}", fault.instance_path()))
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for (name, schema) in description["components"]["schemas"].as_object().unwrap() {
        let valid = jsonschema::draft202012::meta::validate(schema);
        assert!(valid.is_ok(), "{name}: {valid:?}");
    }
    let mut operations = BTreeSet::new();
    for (path, item) in description["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(operations.insert(id.to_owned()), "{id} stands twice");
            let named = |parameter: &Value| {
                (parameter["in"] == "path").then(|| parameter["name"].as_str().unwrap().to_owned())
            };
            let named: BTreeSet<String> = operation["parameters"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(named)
                .collect();
            let wanted = path.split('{').skip(1).map(|rest| rest.split('}').next().unwrap().into());
            assert_eq!(named, wanted.collect(), "{method} {path}");
        }
    }
}

/// Answers match their description, and specs in them match their own schema.
#[test]
fn answers_match_the_openapi_description() {
    const PLACE: &str = "http://pdp/v1/openapi.json";
    let server = Server::start();
    let description: Value = serde_json::from_str(&openapi()).unwrap();
    let registry = jsonschema::Registry::new()
        .add(PLACE, description.clone())
        .and_then(|all| all.add("http://pdp/v1/pdp-v1.json", pdp_spec::schema::published()))
        .and_then(|all| all.prepare())
        .unwrap();
    let node = "/v1/vnets/red/nodes/r1";
    let fastpath = "/v1/vnets/red/nodes/f1/fastpath";
    for (method, path, real, body) in [
        ("get", paths::VERSION, paths::VERSION.to_owned(), ""),
        ("get", paths::OPENAPI, paths::OPENAPI.into(), ""),
        ("get", paths::SPEC_SCHEMA, paths::SPEC_SCHEMA.into(), ""),
        ("get", paths::DOCTOR, paths::DOCTOR.into(), ""),
        ("get", paths::SUBSTRATE, paths::SUBSTRATE.into(), ""),
        ("get", paths::VNETS, paths::VNETS.into(), ""),
        ("get", "/v1/vnets/{vnet}", "/v1/vnets/red".into(), ""),
        ("get", "/v1/vnets/{vnet}", "/v1/vnets/none".into(), ""),
        ("get", paths::STATS, paths::STATS.into(), ""),
        ("get", paths::TENANTS, paths::TENANTS.into(), ""),
        ("post", paths::TOKENS, paths::TOKENS.into(), r#"{"role": "viewer"}"#),
        ("get", paths::TOKENS, paths::TOKENS.into(), ""),
        ("delete", "/v1/tokens/{id}", paths::token(1), ""),
        ("get", "/v1/vnets/{vnet}/nodes/{node}/routes", format!("{node}/routes"), ""),
        ("get", "/v1/logs/{process}", "/v1/logs/mux".into(), ""),
        ("post", paths::APPLY, paths::APPLY.into(), r#"{"files": [{"name": "x", "text": "x"}]}"#),
        (
            "post",
            "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/trace",
            format!("{node}/ports/eth0/trace"),
            r#"{"waitMs": 1}"#,
        ),
        (
            "put",
            "/v1/vnets/{vnet}/links/{link}",
            "/v1/vnets/red/links/r1-h1".into(),
            r#"{"up": true}"#,
        ),
        (
            "patch",
            "/v1/vnets/{vnet}/links/{link}",
            "/v1/vnets/red/links/r1-h1".into(),
            r#"{"set": {"delay": "20ms"}}"#,
        ),
        ("get", "/v1/vnets/{vnet}/links/{link}/fdb", "/v1/vnets/red/links/lan/fdb".into(), ""),
        ("delete", "/v1/vnets/{vnet}/links/{link}/fdb", "/v1/vnets/red/links/lan/fdb".into(), ""),
        (
            "put",
            "/v1/vnets/{vnet}/nodes/{node}/guests",
            format!("{node}/guests"),
            r#"{"guests": 2}"#,
        ),
        (
            "get",
            "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters",
            format!("{fastpath}/filters"),
            "",
        ),
        (
            "post",
            "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters",
            format!("{fastpath}/filters"),
            r#"{"set": [{"id": 1, "priority": 1, "match": "ip", "verdict": "drop"}]}"#,
        ),
        (
            "get",
            "/v1/vnets/{vnet}/nodes/{node}/fastpath/counters",
            format!("{fastpath}/counters"),
            "",
        ),
        (
            "get",
            "/v1/vnets/{vnet}/nodes/{node}/fastpath/queues",
            format!("{fastpath}/queues?port=eth1"),
            "",
        ),
        (
            "post",
            "/v1/vnets/{vnet}/nodes/{node}/fastpath/frames",
            format!("{fastpath}/frames"),
            r#"{"port": "eth0", "direction": "out", "frame": "0200000000010200000000020800"}"#,
        ),
        ("post", paths::UP, paths::UP.into(), ""),
        ("post", paths::DOWN, paths::DOWN.into(), "{}"),
        ("delete", paths::SUBSTRATE, paths::SUBSTRATE.into(), ""),
        ("get", paths::AUDIT, paths::AUDIT.into(), ""),
    ] {
        // With HTTP/1.0 the end of the connection ends the body, and there are no chunks.
        let request = format!(
            "{} {real} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}",
            method.to_uppercase(),
            body.len()
        );
        let answer = server.raw(request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap();
        let kind = head.lines().find_map(|line| line.strip_prefix("content-type: ")).unwrap();
        let value: Value = match kind {
            "application/x-ndjson" => {
                body.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()).collect()
            }
            "text/plain; charset=utf-8" => body.into(),
            _ => serde_json::from_str(body).unwrap(),
        };
        let refused = match real.as_str() {
            "/v1/vnets/none" | paths::APPLY => true,
            paths::SUBSTRATE => method == "delete",
            real => real.ends_with("/trace"),
        };
        assert_eq!(status != "200", refused, "{method} {real}: {body}");
        let answers = if status == "200" {
            let path = path.replace('/', "~1").replace('{', "%7B").replace('}', "%7D");
            format!("/paths/{path}/{method}/responses/200")
        } else {
            "/components/responses/Problem".to_owned()
        };
        let kind = kind.replace('/', "~1").replace(' ', "%20");
        let schema =
            serde_json::json!({"$ref": format!("{PLACE}#{answers}/content/{kind}/schema")});
        let validator = jsonschema::options().with_registry(&registry).build(&schema);
        let faults: Vec<String> = validator
            .unwrap()
            .iter_errors(&value)
            .map(|fault| format!("{}: {fault}", fault.instance_path()))
            .collect();
        assert!(faults.is_empty(), "{method} {real}: {}: {value}", faults.join("\n"));
    }
}

/// More filters than one request may have.
fn many_filters() -> String {
    let one = r#"{"id":1,"priority":1,"match":"","verdict":"drop"},"#;
    let all = one.repeat(pdp_api::FASTPATH_FILTERS_MAX + 1);
    format!("{{\"set\":[{}]}}", all.trim_end_matches(','))
}

/// Each of these requests gets a problem with this status.
#[test]
fn bad_requests_are_problems() {
    let server = Server::start();
    let with_body = |method: &str, path: &str, body: &str| {
        format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let get = |path: &str| with_body("GET", path, "");
    for (status, request) in [
        (404, get("/")),
        (404, get("/v1/nothing")),
        (404, get("/v1/vnets/none")),
        (404, get("/v1/vnets/..%2F..")),
        (400, get("/v1/vnets/%ff")),
        (400, get("/v1/logs/kernel")),
        (400, get("/v1/vnets/red/nodes/r1/logs/g-1")),
        (400, get("/v1/stats?vnets=red")),
        (400, get("/v1/logs/mux?tail=-1")),
        (400, get("/v1/vnets/red/nodes/r1/routes?within=10.0.0.0/33")),
        (405, get("/v1/apply")),
        (405, with_body("PATCH", "/v1/vnets", "")),
        (400, with_body("POST", "/v1/apply", "{")),
        (400, with_body("POST", "/v1/apply", "")),
        (400, with_body("POST", "/v1/apply", r#"{"files": [], "dry-run": true}"#)),
        (400, with_body("POST", "/v1/apply", r#"{"files": 7}"#)),
        (400, with_body("POST", "/v1/apply", &"[".repeat(100_000))),
        (400, with_body("POST", "/v1/down", r#"{"purge": "yes"}"#)),
        (400, with_body("POST", "/v1/vnets/red/nodes/r1/fastpath/filters", &many_filters())),
        (
            400,
            with_body("POST", "/v1/vnets/red/nodes/r1/fastpath/frames", r#"{"direction": "up"}"#),
        ),
        (400, get("/v1/vnets/red/nodes/r1/fastpath/filters?first=-1")),
        (400, with_body("PUT", "/v1/vnets/red/links/x", "{}")),
        (409, with_body("DELETE", "/v1/substrate", "")),
        (400, with_body("POST", "/v1/vnets/red/nodes/r1/exec", "{}")),
        (
            400,
            with_body("POST", "/v1/vnets/red/nodes/r1/ports/eth0/trace", r#"{"waitMs": 99999999}"#),
        ),
        (
            400,
            with_body(
                "POST",
                "/v1/vnets/red/nodes/r1/ports/eth0/trace",
                r#"{"waitMs": 1, "filter": [{"offset": 0, "value": [1], "mask": []}]}"#,
            ),
        ),
        (400, with_body("POST", "/v1/vnets/red/nodes/r1/ports/eth0/trace", &long_filter())),
    ] {
        let answer = server.raw(request.as_bytes());
        let line = request.lines().next().unwrap_or_default();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{line}: {answer}");
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let problem: Problem = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body}"));
        assert!(!problem.error.is_empty(), "{line}");
    }
}

/// A trace whose filter has too many parts, each of no bytes.
fn long_filter() -> String {
    let part = r#"{"offset": 0, "value": [], "mask": []}"#;
    format!(r#"{{"waitMs": 1, "filter": [{}]}}"#, vec![part; 257].join(", "))
}

#[test]
fn a_body_over_the_limit_is_refused() {
    let server = Server::start();
    let mut request = format!(
        "POST /v1/apply HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        BODY_BYTES_MAX + 1
    )
    .into_bytes();
    request.resize(request.len() + BODY_BYTES_MAX + 1, b' ');
    let answer = server.raw(&request);
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains(r#""kind":"tooLarge""#), "{answer}");
}

#[tokio::test]
async fn too_many_files_are_refused() {
    let server = Server::start();
    let files = vec![SourceFile::default(); FILES_MAX + 1];
    let result = client(&server)
        .apply(&ApplyRequest { files, dry_run: false, only: Vec::new() }, |_| ())
        .await;
    assert_eq!(problem(result).kind, ProblemKind::TooLarge);
}

#[tokio::test]
async fn silent_clients_do_not_delay_others() {
    let server = Server::start();
    let mut idle: Vec<_> = (0..50).map(|_| UnixStream::connect(server.socket()).unwrap()).collect();
    for stream in &mut idle {
        stream.write_all(b"POST /v1/apply HTTP/1.1\r\nContent-Length: 10\r\n").unwrap();
    }
    assert_eq!(client(&server).version().await.unwrap().pid, std::process::id());
}

#[tokio::test]
async fn change_streams_its_steps_and_result() {
    let server = Server::start();
    let mut steps = Vec::new();
    let report =
        client(&server).apply(&apply_of(&["a", "b"]), |step| steps.push(step.what)).await.unwrap();
    let objects: Vec<_> = report.changes.iter().map(|change| change.object.as_str()).collect();
    for vnet in ["a", "b"] {
        let step = format!("starting node {vnet}/h1");
        assert!(steps.contains(&step), "{steps:?}");
        assert!(objects.contains(&&*format!("vnet/{vnet}")), "{objects:?}");
        assert!(server.vnets().contains(&vnet.to_owned()));
    }
}

#[test]
fn change_answers_one_json_value_if_requested() {
    let server = Server::start();
    let ask = |accept: &str, names: &[&str]| {
        let body = serde_json::to_string(&apply_of(names)).unwrap();
        let length = body.len();
        let request = format!(
            "POST /v1/apply HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept: {accept}\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        server.raw(request.as_bytes()).to_ascii_lowercase()
    };
    let one = ask("text/html, application/json;q=0.9", &["a"]);
    assert!(
        one.starts_with("http/1.1 200") && one.contains("content-type: application/json"),
        "{one}"
    );
    assert!(one.contains("{\"changes\":[") && !one.contains("starting node"), "{one}");
    for (accept, name) in [("*/*", "b"), ("application/json, application/x-ndjson", "c")] {
        let lines = ask(accept, &[name]);
        assert!(lines.contains("x-ndjson") && lines.contains("starting node"), "{lines}");
    }
}

#[tokio::test]
async fn refused_files_are_reported_with_file_and_line() {
    let server = Server::start();
    let text = "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {name: a}\nspek: {}\n";
    let file = SourceFile { name: "x.yaml".into(), text: text.into(), ..Default::default() };
    let request = ApplyRequest { files: vec![file], dry_run: false, only: Vec::new() };
    let problem = problem(client(&server).apply(&request, |_| ()).await);
    assert_eq!(problem.kind, ProblemKind::Invalid);
    assert!(problem.diagnostics.iter().any(|d| d.file == "x.yaml" && d.line == 4), "{problem:?}");
}

#[tokio::test]
async fn late_failures_and_panics_become_problems() {
    let server = Server::start();
    let mut request = apply_of(&["fails-late"]);
    let text = &mut request.files[0].text;
    *text = text.replace("kind: host", &format!("kind: host, env: {{{BROKEN}: \"1\"}}"));
    let late = problem(client(&server).apply(&request, |_| ()).await);
    assert!(late.error.starts_with("node fails-late/h1: can't create"), "{late:?}");
    // What ends the daemon panics.
    let request = DownRequest { purge: false, exit: true };
    let panic = problem(client(&server).down(&request, |_| ()).await);
    assert_eq!(panic.kind, ProblemKind::Internal);
    assert!(panic.error.contains("panicked"), "{panic:?}");
    assert_eq!(client(&server).version().await.unwrap().pid, std::process::id());
}

#[tokio::test]
async fn change_continues_after_its_client_disconnects() {
    let server = Server::start();
    server.machine.set(|inside| inside.hangs = Some("/waits.".into()));
    let client = client(&server);
    let request = apply_of(&["waits", "after"]);
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
    server.machine.set(|inside| inside.hangs = None);
    let trail = &server.guard.state.trail;
    let row = || trail.entries(&AuditQuery::default(), None).unwrap().pop().unwrap();
    eventually("the change is done", || row().status == Some(200));
}

#[tokio::test]
async fn routes_stream_completely_and_in_order() {
    let server = Server::start();
    let mut last = None;
    let count = client(&server)
        .routes("red", "r1", &RoutesQuery::default(), |row| {
            assert!(last < Some(row.prefix));
            last = Some(row.prefix);
            Ok(())
        })
        .await
        .unwrap();
    assert_eq!(count, ROUTES);
}

#[tokio::test]
async fn interrupted_route_table_is_a_problem() {
    let server = Server::start();
    let mut rows = 0;
    let result = client(&server)
        .routes("red", "breaks", &RoutesQuery::default(), |_| {
            rows += 1;
            Ok(())
        })
        .await;
    assert_eq!(problem(result).kind, ProblemKind::Unavailable);
    assert_eq!(rows, ROUTES_BEFORE_END);
    let none = client(&server).routes("red", "r9", &RoutesQuery::default(), |_| Ok(())).await;
    assert_eq!(problem(none).kind, ProblemKind::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn route_table_ends_when_its_client_disconnects() {
    let server = Server::start();
    let result = client(&server)
        .routes("red", "r1", &RoutesQuery::default(), |_| Err(std::io::ErrorKind::Other.into()))
        .await;
    assert!(matches!(result, Err(Error::Io(_))));
    eventually("the table ends", || server.left.load(std::sync::atomic::Ordering::Relaxed) == 1);
}

#[test]
fn route_table_times_out_if_client_stops_reading() {
    let server = Server::start();
    let mut client = UnixStream::connect(server.socket()).unwrap();
    let request =
        "GET /v1/vnets/red/nodes/r1/routes HTTP/1.1\r\nhost: pdp\r\nconnection: close\r\n\r\n";
    client.write_all(request.as_bytes()).unwrap();
    eventually("the table ends", || server.left.load(std::sync::atomic::Ordering::Relaxed) == 1);
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let last = answer.lines().rfind(|line| line.contains('{')).unwrap();
    assert!(last.contains("the client took no routes for 30 s"), "{last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_streams_and_ends_with_its_client() {
    let server = Server::start();
    let query = CaptureQuery { snap_bytes: 77, filter: None };
    let mut stream = client(&server).capture("red", "r1", "eth0", &query).await.unwrap();
    let first = stream.next().await.unwrap().unwrap();
    assert_eq!(&first[..PCAP.len()], PCAP);
    assert_eq!(first[PCAP.len() + RECORD_BYTES], 77);
    assert!(stream.next().await.unwrap().is_some());
    drop(stream);
    let left = || server.left.load(std::sync::atomic::Ordering::Relaxed);
    eventually("the capture ends", || left() == 1);
    let none = client(&server).capture("red", "r1", "eth9", &query).await;
    assert_eq!(problem(none.map(|_| ())).kind, ProblemKind::NotFound);
}

async fn all(mut stream: client::ResponseStream) -> String {
    let mut text = Vec::new();
    while let Some(bytes) = stream.next().await.unwrap() {
        text.extend_from_slice(&bytes);
    }
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn logs_include_rotated_half_and_support_tail() {
    let server = Server::start();
    let client = client(&server);
    let tail = |count| LogQuery { tail: Some(count), follow: false };
    let mux = async |query| all(client.logs(NodeProcess::Mux, &query).await.unwrap()).await;
    let whole = mux(LogQuery::default()).await;
    assert_eq!(whole, "mux 0\nmux 1\nmux 2\nmux 3\n");
    for (count, text) in [
        (0, ""),
        (1, "mux 3\n"),
        (3, "mux 1\nmux 2\nmux 3\n"),
        (4, whole.as_str()),
        (5, whole.as_str()),
        (u64::MAX, whole.as_str()),
    ] {
        assert_eq!(mux(tail(count)).await, text, "tail {count}");
    }
    let guest =
        client.node_logs("red", "r1", GuestProcess::Guest(0), &LogQuery::default()).await.unwrap();
    assert_eq!(all(guest).await, "router starts\n");
    let none = client.node_logs("red", "r1", GuestProcess::Tap, &LogQuery::default()).await;
    assert_eq!(problem(none.map(|_| ())).kind, ProblemKind::NotFound);
}

#[tokio::test]
async fn followed_log_survives_rotation_and_truncation() {
    let server = Server::start();
    let path = server.path("run/pdpd.log");
    let query = LogQuery { tail: Some(1), follow: true };
    let mut stream = client(&server).logs(NodeProcess::Daemon, &query).await.unwrap();
    let mut text = String::new();
    let mut expect = async |end: &str| {
        let read = async {
            while !text.ends_with(end) {
                text += std::str::from_utf8(&stream.next().await.unwrap().unwrap()).unwrap();
            }
        };
        tokio::time::timeout(EVENTUALLY, read).await.unwrap();
    };
    expect("three\n").await;
    let mut file = fs::File::options().append(true).open(&path).unwrap();
    writeln!(file, "four").unwrap();
    expect("four\n").await;
    fs::rename(&path, server.path("run/pdpd.log.1")).unwrap();
    fs::write(&path, "five\n").unwrap();
    expect("five\n").await;
    fs::write(&path, "").unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    fs::write(&path, "6\n").unwrap();
    expect("6\n").await;
    assert_eq!(text, "three\nfour\nfive\n6\n");
}

#[tokio::test]
async fn streams_are_limited_and_release_their_permits() {
    let server = Server::start();
    let client = client(&server);
    let query = LogQuery { tail: None, follow: true };
    let mut open = Vec::new();
    for _ in 0..STREAMS_MAX {
        open.push(client.logs(NodeProcess::Daemon, &query).await.unwrap());
    }
    let full = client.logs(NodeProcess::Daemon, &query).await;
    assert_eq!(problem(full.map(|_| ())).kind, ProblemKind::Busy);
    drop(open);
    let end = std::time::Instant::now() + EVENTUALLY;
    while client.logs(NodeProcess::Daemon, &query).await.is_err() {
        assert!(std::time::Instant::now() < end, "places never come back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn sh(script: &str) -> ExecRequest {
    let command = ["sh", "-c", script].map(String::from).to_vec();
    ExecRequest { command, ..Default::default() }
}

/// Returns a command's output on either stream, and its exit code.
async fn outcome(server: &Server, request: &ExecRequest, input: &[u8]) -> (Vec<u8>, Vec<u8>, i32) {
    let connection = client(server).exec("red", "r1", request).await.unwrap();
    let (mut from, mut to) = tokio::io::split(connection);
    let chunks: Vec<Vec<u8>> = input.chunks(50_000).map(<[u8]>::to_vec).collect();
    tokio::spawn(async move {
        for chunk in chunks {
            if write_frame(&mut to, &ExecFrame::Stdin(chunk)).await.is_err() {
                return;
            }
        }
        let _ = write_frame(&mut to, &ExecFrame::StdinEnd).await;
        // Stay connected, since the end of a client ends the command.
        std::future::pending::<()>().await;
    });
    let (mut out, mut err) = (Vec::new(), Vec::new());
    loop {
        let frame = tokio::time::timeout(EVENTUALLY, read_frame(&mut from)).await.unwrap();
        match frame.unwrap().expect("an exit code before the end") {
            ExecFrame::Stdout(bytes) => out.extend(bytes),
            ExecFrame::Stderr(bytes) => err.extend(bytes),
            ExecFrame::Exit(code) => return (out, err, code),
            frame => panic!("{frame:?}"),
        }
    }
}

#[tokio::test]
async fn command_returns_its_streams_and_exit_code() {
    let server = Server::start();
    let script = "echo $PDP_NODE $PDP_PROCESS; echo bad >&2; exit 7";
    let (out, err, code) = outcome(&server, &sh(script), b"").await;
    assert_eq!((out.as_slice(), err.as_slice(), code), (&b"r1 control\n"[..], &b"bad\n"[..], 7));
    let (_, _, killed) = outcome(&server, &sh("kill -9 $$"), b"").await;
    assert_eq!(killed, 137);
}

#[tokio::test]
async fn command_streams_pass_bytes_unchanged() {
    let server = Server::start();
    let input: Vec<u8> =
        (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (out, _, code) = outcome(&server, &sh("cat"), &input).await;
    assert_eq!(code, 0);
    assert!(out == input, "{} bytes of {}", out.len(), input.len());
}

#[tokio::test]
async fn command_may_ignore_input_and_leave_processes() {
    let server = Server::start();
    let script = "sleep 600 & echo $! > left; echo done";
    let (out, _, code) = outcome(&server, &sh(script), &vec![0; 500_000]).await;
    assert_eq!((out.as_slice(), code), (&b"done\n"[..], 0));
    // The guest ends this process, not this layer.
    let left: i32 = fs::read_to_string(server.path("left")).unwrap().trim().parse().unwrap();
    let left = nix::unistd::Pid::from_raw(left);
    nix::sys::signal::kill(left, nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_command_that_does_not_exist_is_a_problem() {
    let server = Server::start();
    let request = ExecRequest { command: vec!["/no/such/program".into()], ..Default::default() };
    let (_, err, code) = outcome(&server, &request, b"").await;
    assert_eq!(code, 127, "{}", String::from_utf8_lossy(&err));
    // The program that would run it in the guest.
    fs::remove_file(server.path("runc")).unwrap();
    let refused = client(&server).exec("red", "r1", &request).await;
    assert!(problem(refused.map(|_| ())).error.contains("No such file"));
    let nowhere = client(&server).exec("none", "r1", &sh("true")).await;
    assert_eq!(problem(nowhere.map(|_| ())).kind, ProblemKind::NotFound);
}

#[tokio::test]
async fn terminal_belongs_to_command_and_can_be_resized() {
    let server = Server::start();
    let mut request = sh("stty size; trap 'stty size; echo got $TERM; exit 3' WINCH; \
         : > ready; ps -o tty= -p $$; while :; do sleep 0.05; done");
    request.tty = Some(WindowSize { rows: 33, columns: 111 });
    request.term = Some("vt100".into());
    let connection = client(&server).exec("red", "r1", &request).await.unwrap();
    let (mut from, mut to) = tokio::io::split(connection);
    eventually("the trap is set", || server.path("ready").exists());
    let size = WindowSize { rows: 44, columns: 55 };
    write_frame(&mut to, &ExecFrame::Resize(size)).await.unwrap();
    let mut text = String::new();
    let code = loop {
        let frame = tokio::time::timeout(EVENTUALLY, read_frame(&mut from)).await.unwrap();
        match frame.unwrap().unwrap() {
            ExecFrame::Stdout(bytes) => text += &String::from_utf8(bytes).unwrap(),
            ExecFrame::Exit(code) => break code,
            frame => panic!("{frame:?}"),
        }
    };
    assert_eq!(code, 3, "{text}");
    let lines: Vec<&str> = text.lines().map(|line| line.trim_end_matches('\r')).collect();
    assert_eq!(lines[0], "33 111");
    assert!(lines[1].starts_with("pts/"), "{text}");
    assert_eq!(lines[2..], ["44 55", "got vt100"]);
}

#[tokio::test]
async fn terminal_interprets_control_characters() {
    let server = Server::start();
    let mut request = sh("cat; echo ended");
    request.tty = Some(WindowSize { rows: 24, columns: 80 });
    // Ctrl-D ends the input of `cat`, and so does the end of the client's input.
    for input in [&b"hello\n\x04"[..], b"hello\n"] {
        let (out, _, code) = outcome(&server, &request, input).await;
        assert_eq!(code, 0);
        assert_eq!(String::from_utf8(out).unwrap(), "hello\r\nhello\r\nended\r\n");
    }
}

/// Runs a command that is found by a mark, disconnects, and waits for the command's end.
async fn goes_with_its_client(script: &str, tty: bool, full_input: bool) {
    let server = Server::start();
    // The mark is in the command lines.
    let mark = format!("3{:09}", std::process::id() as u64 * 1000 + script.len() as u64);
    let mut request = sh(&script.replace("MARK", &mark));
    request.tty = tty.then_some(WindowSize { rows: 24, columns: 80 });
    let connection = client(&server).exec("red", "r1", &request).await.unwrap();
    eventually("the command runs", || server.path("began").exists());
    let (from, mut to) = tokio::io::split(connection);
    if full_input {
        let more = async {
            while write_frame(&mut to, &ExecFrame::Stdin(vec![0; 60_000])).await.is_ok() {}
        };
        // Until the connection takes no more.
        let _ = tokio::time::timeout(Duration::from_secs(1), more).await;
    } else {
        to.flush().await.unwrap();
    }
    assert!(processes_with(&mark) > 0);
    drop(from.unsplit(to));
    eventually("the command is gone", || processes_with(&mark) == 0);
}

#[tokio::test]
async fn a_command_is_killed_when_its_client_goes_away() {
    goes_with_its_client(": > began; sleep MARK", false, false).await;
}

#[tokio::test]
async fn disconnect_kills_children_in_other_sessions() {
    let script = "trap '' TERM HUP; setsid sleep MARK & : > began; sleep MARK; sleep MARK; wait";
    goes_with_its_client(script, false, false).await;
}

#[tokio::test]
async fn disconnect_kills_daemonized_children() {
    let script = "(setsid sh -c 'setsid sleep MARK & sleep MARK & : > began' &); sleep MARK";
    goes_with_its_client(script, false, false).await;
}

#[tokio::test]
async fn disconnect_kills_command_on_a_terminal() {
    goes_with_its_client("trap '' HUP TERM; : > began; sleep MARK; sleep MARK", true, false).await;
}

#[tokio::test]
async fn disconnect_kills_command_that_ignores_its_input() {
    goes_with_its_client(": > began; exec sleep MARK", false, true).await;
}

#[tokio::test]
async fn client_with_malformed_exec_frames_is_disconnected() {
    let server = Server::start();
    for bytes in [&[9, 0, 0, 0, 0][..], &[0, 255, 255, 255, 255], &[3, 0, 0, 0, 1, 7]] {
        let connection = client(&server).exec("red", "r1", &sh("sleep 600")).await.unwrap();
        let (mut from, mut to) = tokio::io::split(connection);
        to.write_all(bytes).await.unwrap();
        let end = async {
            while let Ok(Some(frame)) = read_frame(&mut from).await {
                assert_eq!(frame, ExecFrame::Stdout(Vec::new()));
            }
        };
        tokio::time::timeout(EVENTUALLY, end).await.unwrap();
    }
}

#[tokio::test]
async fn daemon_stop_ends_streams_and_commands() {
    let mut server = Server::start();
    let client = client(&server);
    let query = LogQuery { tail: None, follow: true };
    let mut log = client.logs(NodeProcess::Daemon, &query).await.unwrap();
    assert_eq!(&log.next().await.unwrap().unwrap()[..], b"one\ntwo\nthree\n");
    let mark = format!("4{:09}", std::process::id());
    let command = client.exec("red", "r1", &sh(&format!("sleep {mark}"))).await.unwrap();
    eventually("the command runs", || processes_with(&mark) > 0);
    let server = tokio::task::spawn_blocking(move || {
        server.stop();
        server
    });
    let _server = server.await.unwrap();
    let end = log.next().await;
    assert!(matches!(end, Err(Error::BrokenOff(_))), "{end:?}");
    eventually("the command is gone", || processes_with(&mark) == 0);
    drop(command);
    let gone = client.version().await;
    assert!(matches!(gone, Err(Error::NoDaemon { .. })), "{gone:?}");
}

#[test]
fn listen_replaces_only_dead_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pdpd.sock");
    drop(UnixListener::bind(&path).unwrap());
    let alive = listen(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
    let second = listen(&path).unwrap_err();
    assert_eq!(second.kind(), std::io::ErrorKind::AddrInUse);
    let mut peer = UnixStream::connect(&path).unwrap();
    drop(alive);
    let mut byte = [0];
    assert!(matches!(peer.read(&mut byte), Ok(0) | Err(_)));
}

#[test]
fn listen_replaces_socket_inherited_by_orphan_child() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pdpd.sock");
    let script = "
import os, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
if os.fork() == 0:
    os.close(0), os.close(1)
    time.sleep(60)
    os._exit(0)
print('listens', flush=True)
sys.stdin.read()
";
    let mut daemon = Command::new("python3");
    daemon.args(["-c", script]).arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut daemon = daemon.process_group(0).spawn().unwrap();
    daemon.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).unwrap();
    assert_eq!(listen(&path).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    drop(daemon.stdin.take());
    daemon.wait().unwrap();
    assert!(UnixStream::connect(&path).is_ok(), "the child holds it");
    let taken = listen(&path);
    let group = rustix::process::Pid::from_raw(daemon.id() as i32).unwrap();
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
    taken.unwrap();
}
