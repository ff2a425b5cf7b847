//! Fixed answers in front of a real node on a pretend machine. Requests without a fixed answer go
//! to the node: commands in guests, captures, logs, watches, tokens, the audit log.

#![allow(dead_code)] // each test uses its part

#[path = "../../../pdpd/tests/node/mod.rs"]
pub mod node;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::ops::{Deref, DerefMut};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pdp_api::*;
use pdpd::util::ProgressFn;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use node::{ROUTES, TENANT, VNETS};

/// Receives routes one by one; returns false once no more shall be sent.
type RouteFn<'a> = &'a mut dyn FnMut(RouteEntry) -> bool;

#[derive(Default)]
pub struct Fake {
    /// Requested changes that are done.
    pub done: Mutex<Vec<String>>,
    samples: AtomicU64,
    /// Number of requests for a vnet.
    pub looks: AtomicU64,
    /// True if all of `red` is ready.
    pub ready: AtomicBool,
}

/// The fake and the node behind it, as long as this value lives.
pub struct Server {
    pub fake: Arc<Fake>,
    node: node::Server,
    /// Name of the socket.
    socket: &'static str,
}

impl Deref for Server {
    type Target = node::Server;

    fn deref(&self) -> &node::Server {
        &self.node
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut node::Server {
        &mut self.node
    }
}

impl Server {
    /// Starts a node without fixed answers.
    pub fn real() -> Self {
        Self { fake: Arc::default(), node: node::Server::start(), socket: "pdpd.sock" }
    }

    pub fn start() -> Self {
        let server = Self { socket: "fake.sock", ..Self::real() };
        for vnet in VNETS {
            server.hub().publish_vnet(vnet, Some(red().status), true);
        }
        let listener = UnixListener::bind(server.socket()).unwrap();
        let (fake, behind) = (server.fake.clone(), server.node.socket());
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (fake, behind) = (fake.clone(), behind.clone());
                std::thread::spawn(move || {
                    // The end of a client, or of the node, ends the connection.
                    let _ = fake.attend(client, &behind);
                });
            }
        });
        server
    }

    /// Socket to which the command connects.
    pub fn socket(&self) -> PathBuf {
        self.path(self.socket)
    }
}

/// Returns the bytes of a response that ends its connection.
fn response(status: u16, content_type: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn whole(result: Result<impl Serialize, Problem>) -> Vec<u8> {
    match result {
        Ok(value) => response(200, "application/json", &serde_json::to_vec(&value).unwrap()),
        Err(problem) => {
            let body = serde_json::to_vec(&problem).unwrap();
            response(problem.kind.status(), "application/json", &body)
        }
    }
}

/// Responds with JSON lines. A problem before the first line is the whole response.
fn lines<T: Serialize>(lines: &[T], problem: Option<Problem>) -> Vec<u8> {
    match problem.filter(|_| lines.is_empty()) {
        Some(problem) => whole(Err::<(), _>(problem)),
        None => {
            let text = lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n");
            response(200, "application/x-ndjson", text.collect::<String>().as_bytes())
        }
    }
}

fn changed(make: impl FnOnce(ProgressFn<'_>) -> Result<ChangeReport, Problem>) -> Vec<u8> {
    let mut events = Vec::new();
    let result = make(&mut |step| events.push(ChangeEvent::Progress(step)));
    let problem = result.as_ref().err().cloned();
    if problem.is_none() || !events.is_empty() {
        events.push(result.map_or_else(ChangeEvent::Problem, ChangeEvent::Result));
    }
    lines(&events, problem)
}

/// Decodes a part of a URL.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap()
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).unwrap()
}

/// Parses a query. Numbers and truth values are no text.
fn query<T: DeserializeOwned>(text: &str) -> T {
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    let values = pairs.map(|(key, value)| {
        let value = decoded(value);
        let number = value.parse::<u64>().map(Value::from);
        let other = value.parse::<bool>().map(Value::from);
        (key.to_owned(), number.or(other).unwrap_or(Value::from(value)))
    });
    serde_json::from_value(values.collect::<Map<_, _>>().into()).unwrap()
}

impl Fake {
    /// Answers the first request of a connection, or passes the connection on.
    fn attend(&self, mut client: UnixStream, behind: &std::path::Path) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        let mut chunk = [0; 4096];
        let end = loop {
            let count = client.read(&mut chunk)?;
            if count == 0 {
                return Ok(());
            }
            bytes.extend_from_slice(&chunk[..count]);
            if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
        };
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        while bytes.len() < end + length {
            let count = client.read(&mut chunk)?;
            if count == 0 {
                return Ok(());
            }
            bytes.extend_from_slice(&chunk[..count]);
        }
        let line = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut words = line.split(' ');
        let (method, target) = (words.next().unwrap(), words.next().unwrap());
        if let Some(answer) = self.answer(method, target, &bytes[end..end + length]) {
            return client.write_all(&answer);
        }
        let mut node = UnixStream::connect(behind)?;
        node.write_all(&bytes)?;
        let (mut from, mut to) = (node.try_clone()?, client.try_clone()?);
        let answers = std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
        let _ = std::io::copy(&mut client, &mut node);
        let _ = node.shutdown(Shutdown::Both);
        let _ = answers.join();
        Ok(())
    }

    /// Returns the response to a request; `None` if the node shall answer it.
    fn answer(&self, method: &str, target: &str, body: &[u8]) -> Option<Vec<u8>> {
        let (path, asked) = target.split_once('?').unwrap_or((target, ""));
        let parts: Vec<String> = path.strip_prefix("/v1/")?.split('/').map(decoded).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        Some(match (method, &parts[..]) {
            ("GET", ["doctor"]) => whole(Ok(self.doctor())),
            ("POST", ["apply"]) => changed(|progress| self.apply(given(body), progress)),
            ("POST", ["up"]) => changed(|_| self.up()),
            ("POST", ["down"]) => changed(|_| self.down(given(body))),
            ("GET", ["substrate"]) => whole(self.substrate()),
            ("DELETE", ["substrate"]) => changed(|_| self.delete_substrate()),
            ("GET", ["tenants"]) => whole(self.tenant_infos()),
            ("DELETE", ["tenants", tenant]) => changed(|_| self.delete_tenant(tenant)),
            ("GET", ["images"]) => whole(self.images()),
            ("POST", ["images"]) => changed(|progress| self.pull_image(&given(body), progress)),
            ("DELETE", ["images"]) => whole(self.prune_images(&query(asked))),
            ("DELETE", ["images", image]) => whole(self.delete_image(image, &query(asked))),
            ("GET", ["vnets"]) => whole(self.vnets()),
            ("GET", ["stats"]) => whole(self.stats(query(asked))),
            ("GET", ["vnets", vnet]) => whole(self.vnet(vnet)),
            ("DELETE", ["vnets", vnet]) => match query::<DeleteQuery>(asked).only {
                None => changed(|_| self.delete_vnet(vnet)),
                Some(only) => {
                    let nodes = only.split(',').map(str::to_owned).collect();
                    changed(|_| self.delete_nodes(vnet, &nodes))
                }
            },
            ("POST", ["vnets", vnet, "restart"]) => changed(|_| self.restart(vnet, &given(body))),
            ("PUT", ["vnets", vnet, "links", link]) => {
                changed(|_| self.set_link(vnet, link, given(body)))
            }
            ("PATCH", ["vnets", vnet, "links", link]) => {
                changed(|_| self.change_link(vnet, link, &given(body)))
            }
            ("GET", ["vnets", vnet, "links", link, "fdb"]) => whole(self.fdb(vnet, link, false)),
            ("DELETE", ["vnets", vnet, "links", link, "fdb"]) => {
                whole(self.fdb(vnet, link, true).map(drop))
            }
            (_, ["vnets", vnet, "nodes", node, rest @ ..]) => match (method, rest) {
                ("PUT", ["guests"]) => {
                    changed(|progress| self.scale(vnet, node, given(body), progress))
                }
                ("GET", ["routes"]) => {
                    let mut rows = Vec::new();
                    let result = self.routes(vnet, node, query(asked), &mut |row| {
                        rows.push(RouteLine::Route(row));
                        true
                    });
                    let end = RouteLine::End(RouteEnd { count: rows.len() as u64 });
                    let problem = result.err();
                    if problem.is_none() || !rows.is_empty() {
                        rows.push(problem.clone().map_or(end, RouteLine::Problem));
                    }
                    lines(&rows, problem)
                }
                ("POST", ["ports", port, "trace"]) => {
                    whole(self.trace(vnet, node, port, given(body)))
                }
                ("GET", ["fastpath", "filters"]) => {
                    whole(self.fastpath_filters(vnet, node, query(asked)))
                }
                ("POST", ["fastpath", "filters"]) => {
                    whole(self.change_fastpath(vnet, node, &given(body)))
                }
                ("GET", ["fastpath", "counters"]) => {
                    whole(self.fastpath_counters(vnet, node, query(asked)))
                }
                ("GET", ["fastpath", "queues"]) => {
                    whole(self.fastpath_queues(vnet, node, &query(asked)))
                }
                ("POST", ["fastpath", "frames"]) => {
                    whole(self.send_frame(vnet, node, &given(body)))
                }
                _ => return None,
            },
            _ => return None,
        })
    }

    fn known(&self, vnet: &str) -> Result<(), Problem> {
        if VNETS.contains(&vnet) { Ok(()) } else { Err(pdpd::access::no_vnet(vnet)) }
    }

    fn note(&self, what: impl Into<String>) {
        self.done.lock().unwrap().push(what.into());
    }

    pub fn noted(&self, what: &str) -> bool {
        self.done.lock().unwrap().iter().any(|done| done == what)
    }
}

/// Parses a body. No body counts as `{}`.
fn given<T: DeserializeOwned>(body: &[u8]) -> T {
    serde_json::from_slice(if body.is_empty() { b"{}" } else { body }).unwrap()
}

/// The only image that the daemon has.
fn image() -> ImageInfo {
    ImageInfo {
        tenant: None,
        names: vec!["registry.example/frr:10".into()],
        digest: format!("sha256:{}", "5e".repeat(32)),
        packed_bytes: 40 << 20,
        unpacked_bytes: 100 << 20,
        at_ms: 1_700_000_000_000,
        used_by: vec!["red/r1".into()],
        problem: None,
    }
}

fn process(pid: u32) -> ProcessStatus {
    ProcessStatus { phase: Phase::Running, pid: Some(pid), restarts: 0, message: None, late: false }
}

fn port(name: &str, address: &str, last: u8) -> PortStatus {
    PortStatus {
        name: name.into(),
        mac: format!("02:00:00:00:00:{last:02x}"),
        mtu_bytes: 1500,
        addresses: vec![address.into()],
        link: Some("r1-h1".into()),
        carrier: true,
    }
}

fn guest(number: u32, fe: &str) -> ForwardingGuest {
    ForwardingGuest {
        number,
        fe: fe.into(),
        share_millicores: 250,
        connected: number == 0,
        routes_synced: Some(number == 0),
        process: ProcessStatus { restarts: u64::from(number), ..process(200 + number) },
    }
}

fn condition() -> Condition {
    Condition {
        kind: ConditionKind::KernelHooks,
        node: "r1".into(),
        message: "nft chain inet filter forward: the kernel forwards".into(),
    }
}

fn red() -> Vnet {
    let r1 = NodeStatus {
        name: "r1".into(),
        kind: NodeType::Router,
        data_plane: Some(DataPlaneKind::Parallel),
        labels: [("role".to_owned(), "edge".to_owned())].into(),
        phase: Phase::Degraded,
        message: Some("g1 is not connected".into()),
        conditions: vec![condition()],
        ready: false,
        commands: vec![CommandStatus {
            name: "zebra".into(),
            state: CommandState::Restarting,
            ready: false,
            troubled: true,
            restarts: 3,
            exit: Some(1),
            message: Some("ended with code 1: no such interface (started 4 times)".into()),
        }],
        power_millicores: Some(500),
        control: process(100),
        tap: Some(process(101)),
        mirror: Some(process(102)),
        management: None,
        published: vec!["8080:80".into(), "192.0.2.1:53:53/udp".into()],
        guests: vec![guest(0, "fe1"), guest(1, "fe2")],
        engine: None,
        ports: vec![port("eth0", "10.0.0.1/24", 1)],
        loopback: vec!["1.1.1.1/32".into()],
    };
    let h1 = NodeStatus {
        name: "h1".into(),
        kind: NodeType::Host,
        phase: Phase::Running,
        ready: true,
        control: process(110),
        tap: Some(process(111)),
        ports: vec![port("eth0", "10.0.0.2/24", 2)],
        ..Default::default()
    };
    let link = LinkStatus {
        name: "r1-h1".into(),
        endpoints: vec!["r1:eth0".into(), "h1:eth0".into()],
        path: ForwardingPath::Mux,
        path_reason: Some("h1 is a host".into()),
        up: true,
        carrier: true,
        silent: false,
        message: None,
        rate_bps: Some(10_000_000),
        impairments: "delay 20ms".into(),
        schedule: Some(ScheduleStatus {
            elapsed_ms: 12_345,
            steps: 3,
            done: 1,
            next_ms: Some(60_000),
        }),
        queues: vec![QueueStatus {
            end: "r1:eth0".into(),
            name: "voice".into(),
            weight: 30,
            frames: 64,
            buffers: 16,
            dscp: vec![46, 44],
            ..Default::default()
        }],
    };
    Vnet {
        name: "red".into(),
        spec: json!({"apiVersion": "pdp/v1", "kind": "VirtualNetwork", "metadata": {"name": "red"},
            "spec": {"nodes": {"h1": {"kind": "host",
                "files": {"/etc/word": {"content": "as applied\n", "mode": "0644", "owner": "root"}}}},
                "externals": {"to-x": {"interface": "A", "vxlan": {"vni": 7,
                    "local": "192.0.2.1", "remote": "192.0.2.2"}}}}}),
        status: VnetStatus {
            phase: Phase::Degraded,
            message: Some("1 of 2 nodes is degraded".into()),
            ready: false,
            nodes: vec![r1, h1],
            links: vec![link],
        },
    }
}

fn change(object: &str, action: ChangeAction, detail: &str) -> ObjectChange {
    ObjectChange { object: object.into(), action, detail: detail.into() }
}

impl Fake {
    fn doctor(&self) -> Vec<MachineCheck> {
        let check = |name: &str, state, detail: &str, hint: Option<&str>| MachineCheck {
            name: name.into(),
            state,
            detail: detail.into(),
            hint: hint.map(Into::into),
        };
        vec![
            check("kernel", MachineCheckState::Ok, "6.1", None),
            check("AF_XDP zero copy", MachineCheckState::Warn, "not on veth", None),
            check("runc", MachineCheckState::Missing, "not in PATH", Some("apt install runc")),
        ]
    }

    fn apply(
        &self,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let documents = pdp_spec::parse(&request.files).map_err(|diagnostics| Problem {
            diagnostics,
            ..Problem::new(ProblemKind::Invalid, "the files are not valid")
        })?;
        for (done, document) in documents.iter().enumerate() {
            let name = document.object.name();
            progress(Progress {
                done: done as u64,
                total: documents.len() as u64,
                what: format!("starting {name}"),
            });
            let only = request.only.iter().map(|node| format!(" {node}")).collect::<String>();
            self.note(format!("applied {name}{only}"));
        }
        let action = if request.dry_run { ChangeAction::Change } else { ChangeAction::Create };
        let mut changes = vec![change("vnet/red", ChangeAction::Unchanged, "")];
        changes.extend(
            documents
                .iter()
                .map(|document| change(&format!("vnet/{}", document.object.name()), action, "new")),
        );
        Ok(ChangeReport { changes, dry_run: request.dry_run, exits: false })
    }

    fn up(&self) -> Result<ChangeReport, Problem> {
        self.note("up");
        Ok(ChangeReport {
            changes: vec![change("vnet/red", ChangeAction::Restart, "")],
            ..Default::default()
        })
    }

    fn down(&self, request: DownRequest) -> Result<ChangeReport, Problem> {
        self.note(format!("down purge={} exit={}", request.purge, request.exit));
        Ok(ChangeReport {
            changes: vec![change("vnet/red", ChangeAction::Delete, "")],
            ..Default::default()
        })
    }

    fn substrate(&self) -> Result<SubstrateInfo, Problem> {
        let status = SubstrateStatus {
            phase: Phase::Running,
            message: None,
            mux: process(50),
            fastpaths: FastpathPower { capacity_millicores: 500, used_millicores: 200 },
            fes: vec![FeStatus {
                name: "fe1".into(),
                cpus: "0-1".into(),
                capacity_millicores: 1000,
                used_millicores: 250,
                guests: vec![FeGuest {
                    vnet: "red".into(),
                    node: "r1".into(),
                    number: 0,
                    share_millicores: 250,
                }],
            }],
            externals: vec![ExternalStatus {
                name: "A".into(),
                device: "veth-a".into(),
                mtu_bytes: None,
                attached: false,
                carrier: None,
                message: Some("no such device".into()),
            }],
        };
        let spec = json!({"apiVersion": "pdp/v1", "kind": "Substrate", "metadata": {"name": "node"},
            "spec": {"mux": {"cpus": "0"}}});
        Ok(SubstrateInfo { spec: Some(spec), status })
    }

    fn delete_substrate(&self) -> Result<ChangeReport, Problem> {
        Err(Problem::new(ProblemKind::Conflict, "substrate: vnet red uses it")
            .hint("delete it first"))
    }

    fn tenant_infos(&self) -> Result<Vec<TenantInfo>, Problem> {
        let info = |(name, user): (&str, u32)| {
            let spec = json!({"apiVersion": "pdp/v1", "kind": "Tenant", "metadata": {"name": name},
                "spec": {"unixUsers": [user.to_string()]}});
            let image_bytes = if name == "acme" { 140 << 20 } else { 0 };
            TenantInfo { name: name.into(), spec, vnets: vec![format!("{name}.red")], image_bytes }
        };
        Ok([("acme", TENANT), ("other", TENANT + 1)].map(info).into())
    }

    fn delete_tenant(&self, tenant: &str) -> Result<ChangeReport, Problem> {
        self.note(format!("deleted tenant {tenant}"));
        let object = format!("tenant/{tenant}");
        Ok(ChangeReport {
            changes: vec![change(&object, ChangeAction::Delete, "")],
            ..Default::default()
        })
    }

    fn images(&self) -> Result<Vec<ImageInfo>, Problem> {
        Ok(vec![image()])
    }

    fn pull_image(
        &self,
        request: &PullRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        progress(Progress { done: 0, total: 1, what: format!("getting image {}", request.image) });
        Ok(ChangeReport::default())
    }

    fn delete_image(&self, image: &str, query: &ImageQuery) -> Result<(), Problem> {
        self.note(format!("deleted image {image} of {:?}", query.tenant));
        Ok(())
    }

    fn prune_images(&self, _: &ImageQuery) -> Result<Vec<ImageInfo>, Problem> {
        Ok(vec![image()])
    }

    fn vnets(&self) -> Result<Vec<VnetSummary>, Problem> {
        Ok(vec![
            VnetSummary {
                name: "blue".into(),
                waits_for: Some("r1 ospfd".into()),
                ..Default::default()
            },
            VnetSummary {
                name: "red".into(),
                phase: Phase::Degraded,
                message: Some("1 of 2 nodes is degraded".into()),
                waits_for: None,
                conditions: vec![condition()],
                ready: false,
                routers: 1,
                hosts: 1,
                links: 1,
                guests_connected: 1,
                guests: 2,
                power_millicores: 500,
                fes: vec!["fe1".into(), "fe2".into()],
                late: false,
            },
        ])
    }

    fn vnet(&self, vnet: &str) -> Result<Vnet, Problem> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        self.known(vnet)?;
        let mut red = red();
        if self.ready.load(Ordering::Relaxed) {
            let nodes = red.status.nodes.iter_mut();
            nodes.for_each(|node| (node.phase, node.ready) = (Phase::Running, true));
            (red.status.phase, red.status.ready) = (Phase::Running, true);
        }
        Ok(red)
    }

    fn delete_vnet(&self, vnet: &str) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        self.note(format!("deleted {vnet}"));
        let object = format!("vnet/{vnet}");
        Ok(ChangeReport {
            changes: vec![change(&object, ChangeAction::Delete, "")],
            ..Default::default()
        })
    }

    fn delete_nodes(&self, vnet: &str, nodes: &BTreeSet<String>) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        let object = |node: &String| format!("vnet/{vnet}/node/{node}");
        let changes = nodes.iter().map(|node| change(&object(node), ChangeAction::Delete, ""));
        Ok(ChangeReport { changes: changes.collect(), ..Default::default() })
    }

    fn scale(
        &self,
        vnet: &str,
        node: &str,
        request: ScaleRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        if request.guests > 8 {
            return Err(Problem::new(ProblemKind::Conflict, "power 9 exceeds 1 free (fe1: 1)")
                .hint("ask for less"));
        }
        progress(Progress { done: 0, total: 1, what: "starting guest".into() });
        let power = request.power_millicores.map_or("as it is".into(), |power| power.to_string());
        self.note(format!("scaled {vnet}/{node} to {} with power {power}", request.guests));
        let object = format!("vnet/{vnet}/node/{node}");
        let changes = vec![change(&object, ChangeAction::Change, "g2 new")];
        Ok(ChangeReport { changes, ..Default::default() })
    }

    fn restart(&self, vnet: &str, request: &RestartRequest) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        let guest = request.guest.map_or(String::new(), |guest| format!(" g{guest}"));
        self.note(format!("restarted {vnet}/{}{guest}", request.nodes.join(",")));
        let object = |node: &String| format!("vnet/{vnet}/node/{node}");
        let changes =
            request.nodes.iter().map(|node| change(&object(node), ChangeAction::Restart, &guest));
        Ok(ChangeReport { changes: changes.collect(), ..Default::default() })
    }

    fn fdb(&self, vnet: &str, link: &str, clear: bool) -> Result<Vec<FdbEntry>, Problem> {
        self.known(vnet)?;
        if clear {
            self.note(format!("fdb {link} cleared"));
            return Ok(vec![]);
        }
        let (endpoint, mac) = ("h1:eth0".into(), "02:00:00:00:00:01".into());
        Ok(vec![FdbEntry { endpoint, mac, age_s: 7 }])
    }

    fn fastpath_filters(
        &self,
        vnet: &str,
        _: &str,
        query: FastpathFiltersQuery,
    ) -> Result<FastpathFilters, Problem> {
        self.known(vnet)?;
        let dropped = FastpathFilter {
            id: 1,
            priority: 100,
            r#match: "ip proto udp dport 53".into(),
            verdict: FilterVerdict::Drop,
            counter: Some(2),
            ..Default::default()
        };
        let sent = FastpathFilter {
            id: 5,
            priority: 7,
            r#match: "ip6 in eth0".into(),
            verdict: FilterVerdict::Send,
            out: Some("eth1".into()),
            to: Some("02:00:00:00:00:09".into()),
            queue: Some(3),
            copies: vec!["eth0".into()],
            ..Default::default()
        };
        // One at a time.
        let (filters, next) = match query.first {
            0..=1 => (vec![dropped], Some(2)),
            2..=5 => (vec![sent], None),
            _ => (vec![], None),
        };
        Ok(FastpathFilters { code: "ip".into(), filters_max: 10, counters: 4, filters, next })
    }

    fn change_fastpath(
        &self,
        vnet: &str,
        node: &str,
        change: &FastpathChange,
    ) -> Result<FastpathChanged, Problem> {
        self.known(vnet)?;
        if change.remove.contains(&9) {
            let problem = format!("{vnet}/{node}: filter 9: as asked");
            return Err(Problem::new(ProblemKind::Invalid, problem));
        }
        self.note(format!("fastpath {node} {}", serde_json::to_string(change).unwrap()));
        Ok(FastpathChanged { filters: change.set.len() as u32 })
    }

    fn fastpath_counters(
        &self,
        vnet: &str,
        _: &str,
        query: FastpathCountersQuery,
    ) -> Result<FastpathCounters, Problem> {
        self.known(vnet)?;
        let sample = self.samples.fetch_add(1, Ordering::Relaxed);
        let counter = |packets| FilterCounter {
            packets,
            bytes: 64 * packets,
            sent: packets / 2,
            sent_bytes: 32 * packets,
        };
        let all = [counter(0), counter(0), counter(1000 + 10 * sample), counter(0)];
        let first = query.first.min(4);
        let end = query.count.map_or(4, |count| first.saturating_add(count).min(4));
        let counters = all[first as usize..end as usize].to_vec();
        Ok(FastpathCounters { first, counters, total: 4 })
    }

    fn fastpath_queues(
        &self,
        vnet: &str,
        _: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues, Problem> {
        self.known(vnet)?;
        let queue = FastpathQueue {
            port: query.port.clone().unwrap_or_else(|| "eth1".into()),
            queue: 1,
            name: "voice".into(),
            weight: 30,
            frames: 64,
            buffers: 16,
            waiting: 3,
            waiting_bytes: 180,
            sent: 1000,
            sent_bytes: 60_000,
            dropped: 2,
            ..Default::default()
        };
        Ok(FastpathQueues { queues: vec![queue] })
    }

    fn send_frame(&self, vnet: &str, node: &str, frame: &FastpathFrame) -> Result<(), Problem> {
        self.known(vnet)?;
        self.note(format!("frame {node} {}", serde_json::to_string(frame).unwrap()));
        Ok(())
    }

    fn set_link(
        &self,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        let LinkRequest { up, silent } = request;
        self.note(format!("link {link} {up}{}", if silent { " silent" } else { "" }));
        let object = format!("vnet/{vnet}/link/{link}");
        let detail = if up { "up" } else { "down" };
        Ok(ChangeReport {
            changes: vec![change(&object, ChangeAction::Change, detail)],
            ..Default::default()
        })
    }

    fn change_link(
        &self,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        let at = request.at.as_deref().unwrap_or("all");
        self.note(format!("link {link} at {at}: {:?}", request.set));
        let object = format!("vnet/{vnet}/link/{link}");
        let changes = vec![change(&object, ChangeAction::Change, "impairments")];
        Ok(ChangeReport { changes, ..Default::default() })
    }

    fn stats(&self, query: StatsQuery) -> Result<Stats, Problem> {
        if let Some(vnet) = &query.vnet {
            self.known(vnet)?;
        }
        // Each sample is a second and a thousand packets after the previous one.
        let sample = self.samples.fetch_add(1, Ordering::Relaxed);
        let port = PortStats {
            received: 5000 + 1000 * sample,
            received_bytes: 1000 * 64 * sample,
            made: 2,
            sent: 4990 + 1000 * sample,
            sent_bytes: 1000 * 64 * sample,
            punted: 7,
            dropped: [("guest-no-route".into(), 5), ("rate".into(), 0)].into(),
            ..Default::default()
        };
        let guest = GuestStats {
            fe: "fe1".into(),
            share_millicores: 250,
            connected: true,
            to_guest: 5000,
            from_guest: 4995,
            completed: 5000,
            ..Default::default()
        };
        let node = NodeStats {
            ports: [("eth0".to_string(), port)].into(),
            guests: [(0, guest)].into(),
            in_flight: 3,
            routes: Some(RouteStats { routes_v4: 12, routes_v6: 4, ..Default::default() }),
            ..Default::default()
        };
        let vnet = VnetStats { nodes: [("r1".to_string(), node)].into() };
        Ok(Stats {
            at_ns: 1_000_000_000 * sample,
            externals: [("A".to_string(), ExternalStats { received: 9, ..Default::default() })]
                .into(),
            vnets: BTreeMap::from([("red".to_string(), vnet)]),
            workers: vec![WorkerStats {
                stages: vec![
                    StageStats {
                        stage: "arrive".into(),
                        cycles: 300_000 * sample,
                        frames: 1000 * sample,
                    },
                    StageStats { stage: "idle".into(), cycles: 700_000 * sample, frames: 0 },
                ],
                ..WorkerStats::default()
            }],
        })
    }

    fn routes(
        &self,
        vnet: &str,
        node: &str,
        query: RoutesQuery,
        row: RouteFn<'_>,
    ) -> Result<(), Problem> {
        self.known(vnet)?;
        let hop = |port: &str, gateway: Option<&str>| RouteHop {
            port: port.into(),
            gateway: gateway.map(|text| text.parse().unwrap()),
            weight: 1,
        };
        if query.diff {
            if query.guest == Some(1) {
                row(RouteEntry {
                    prefix: "10.9.0.0/16".parse().unwrap(),
                    kernel: Some(RouteTarget::Hops(vec![hop("eth0", Some("10.0.0.2"))])),
                    guest: Some(RouteTarget::Drop),
                });
                row(RouteEntry {
                    prefix: "2001:db8::/32".parse().unwrap(),
                    kernel: Some(RouteTarget::Punt),
                    guest: None,
                });
            }
            return Ok(());
        }
        if let Some(within) = query.within {
            let hops = vec![hop("eth0", Some("10.0.0.2")), hop("eth1", None)];
            row(RouteEntry { prefix: within, kernel: Some(RouteTarget::Hops(hops)), guest: None });
            return Ok(());
        }
        match node {
            "r1" => {
                for number in 0..ROUTES as u32 {
                    let address = std::net::Ipv4Addr::from(0x0a00_0000 + (number << 4));
                    let route = RouteEntry {
                        prefix: format!("{address}/28").parse().unwrap(),
                        kernel: Some(RouteTarget::Hops(vec![hop("eth0", Some("10.0.0.2"))])),
                        guest: None,
                    };
                    if !row(route) {
                        return Ok(());
                    }
                }
                Ok(())
            }
            "breaks" => {
                for _ in 0..10_000 {
                    row(RouteEntry {
                        prefix: "10.0.0.0/8".parse().unwrap(),
                        kernel: Some(RouteTarget::Drop),
                        guest: None,
                    });
                }
                Err(Problem::new(ProblemKind::Unavailable, "mirror of red/breaks: gone"))
            }
            _ => Err(Problem::not_found(format!("no router {node} in vnet {vnet}"))),
        }
    }

    fn trace(&self, vnet: &str, _: &str, _: &str, request: TraceRequest) -> Result<Trace, Problem> {
        self.known(vnet)?;
        if request.filter.is_empty() {
            self.note(format!("traced {}", request.program.unwrap_or_default()));
            return Err(Problem::new(ProblemKind::TimedOut, "no frame came within 10 s"));
        }
        let stage =
            |at_ns, stage: &str, detail: String| TraceStep { at_ns, stage: stage.into(), detail };
        Ok(Trace {
            stages: vec![
                stage(0, "receive", format!("{:?}", request.filter[0].value)),
                stage(1500, "distribute", "g0".into()),
                stage(9000, "send", "eth1".into()),
            ],
        })
    }
}
