//! The real daemon behind the real HTTP layer, on a pretend machine. Threads of the test answer as
//! mux, route mirrors and slow path. Commands in guests run on this machine.

#![allow(dead_code)] // each test uses its part

#[path = "../pretend/mod.rs"]
pub mod pretend;
#[path = "../../../slowpath/tests/fake/mod.rs"]
mod slowpath;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdp_api::{
    ApplyRequest, ForwardingGuest, GuestProcess, NodeProcess, NodeStatus, NodeType, Phase,
    VnetStatus,
};
use pdp_container::Process;
use pdp_model::{NodeStats, PortStats, Stats, VnetStats};
use pdp_proto::channel::Channel;
use pdp_proto::mirror::{MirrorReply, MirrorRequest, MirrorRoute, MirrorStatusReply};
use pdp_proto::mux::{self, MuxReply, MuxRequest};
use pdp_proto::routes::{GroupHop, ResolvedRoute};
use pdp_spec::SourceFile;
use pdpd::access::{AccessScope, Authenticator};
use pdpd::api::tls::Tls;
use pdpd::api::{Listeners, listen, serve};
use pdpd::engine::DaemonCore;
use pdpd::events::WatchHub;
use pdpd::plan::key::{ObjectKey, ProcessRole};
use pretend::Pretend;
use serde_json::json;
use tokio::sync::oneshot;

/// Longest wait for an event.
pub const EVENTUALLY: Duration = Duration::from_secs(60);

/// Waits until a condition holds.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + EVENTUALLY;
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// First bytes of a capture: the pcap header.
pub const PCAP: &[u8] =
    &[0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 1, 0, 0, 0];

/// Bytes before each frame of a capture.
pub const RECORD_BYTES: usize = 16;

/// Users: one that may view the whole node, one that is the tenant
/// `acme`, and (the next number) one that is `other`.
pub const VIEWER: u32 = 70_000;
pub const TENANT: u32 = 71_000;

/// Routes of each router `r1`.
pub const ROUTES: u64 = 200_000;

/// Routes of `red/breaks` before its mirror ends.
pub const ROUTES_BEFORE_END: u64 = 10_000;

/// The node's vnets. Each has the same router, hosts and links.
pub const VNETS: [&str; 3] = ["acme.red", "other.red", "red"];

/// Cgroup of all commands.
const CGROUP: &str = "commands";

const SUBSTRATE: &str = "apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: \"0\", power: 0.5}
  forwardingEngines: {fe1: {cpus: \"1-63\", capacity: 63}}
";

/// Further nodes of `red`: a router whose mirror breaks off, and one with a fast path.
const MORE: &str = "
    breaks: {kind: router, dataPlane: {power: 1m}}
    f1:
      kind: router
      interfaces: {eth0: {}, eth1: {}}
      dataPlane: {kind: fastpath, filters: 10, counters: 4}
    h3: {kind: host, interfaces: {eth0: {}}}
    h4: {kind: host, interfaces: {eth0: {}}}
  links:
    - {endpoints: [\"f1:eth0\", \"h3:eth0\"]}
    - endpoints: [\"f1:eth1\", \"h4:eth0\"]
      rate: 10Mbps
      queues: [{name: rest, weight: 10}, {name: voice, weight: 30, dscp: [46]}]";

fn specs() -> String {
    let mut text = SUBSTRATE.to_owned();
    for (tenant, user) in [("acme", TENANT), ("other", TENANT + 1)] {
        text += &format!(
            "---\napiVersion: pdp/v1\nkind: Tenant\nmetadata: {{name: {tenant}}}\n\
             spec: {{unixUsers: [\"{user}\"]}}\n"
        );
    }
    for vnet in VNETS {
        let more = if vnet == "red" { MORE } else { "\n  links:" };
        text += &format!(
            "---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {vnet}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{addresses: [10.0.0.1/24]}}, eth1: {{}}}}
      dataPlane: {{power: 2m, guests: 2}}
    h1: {{kind: host, interfaces: {{eth0: {{addresses: [10.0.0.2/24]}}, eth1: {{}}}}}}
    h2: {{kind: host, interfaces: {{eth0: {{}}}}}}{more}
    - {{name: r1-h1, endpoints: [\"r1:eth0\", \"h1:eth0\"]}}
    - {{name: lan, endpoints: [\"r1:eth1\", \"h1:eth1\", \"h2:eth0\"]}}
"
        );
    }
    text
}

/// The daemon, as long as this value lives.
pub struct Server {
    pub dir: tempfile::TempDir,
    pub machine: Arc<Pretend>,
    pub engine: Arc<DaemonCore>,
    pub guard: Arc<Authenticator>,
    /// TLS address of the server.
    pub address: SocketAddr,
    /// Captures and route tables whose reader went away.
    pub left: Arc<AtomicU64>,
    stop: Option<oneshot::Sender<()>>,
    threads: Vec<JoinHandle<()>>,
    slowpath: Option<slowpath::Fake>,
}

impl Server {
    /// Starts a node with [`VNETS`].
    pub fn start() -> Self {
        let mut server = Self::new();
        let keeps = server.engine.clone();
        server.threads.push(std::thread::spawn(move || keeps.reconcile_loop.run()));
        server.serve_mux();
        server.apply(specs());
        server.serve_helpers();
        server.write_records();
        server.quiet();
        server
    }

    /// Starts a node without objects, whose reconcile loop does not run. Its watchers see statuses
    /// of [`VNETS`] that the test publishes.
    pub fn idle() -> Self {
        let server = Self::new();
        for vnet in VNETS {
            server.hub().publish_vnet(vnet, Some(status()), true);
        }
        server
    }

    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (machine, engine) = pretend::daemon(dir.path(), |_| panic!("as asked"));
        let engine = Arc::new(engine);
        let unix = listen(&path("pdpd.sock")).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let tls = Tls::self_signed(dir.path(), address).unwrap();
        let listeners = Listeners { unix, tls: Some((tcp, tls)) };
        let state = engine.host.state.clone();
        let guard =
            Arc::new(Authenticator { state, operators: vec![], viewers: vec![VIEWER.to_string()] });
        let (stop, stopped) = oneshot::channel::<()>();
        let (daemon, at_gate) = (engine.clone(), guard.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let stop = async { drop(stopped.await) };
                serve(listeners, daemon, at_gate, stop).await.unwrap();
            });
            runtime.shutdown_timeout(Duration::from_millis(100));
        });
        Self {
            dir,
            machine,
            engine,
            guard,
            address,
            left: Arc::default(),
            stop: Some(stop),
            threads: vec![thread],
            slowpath: None,
        }
    }

    /// Applies these specs as an operator.
    pub fn apply(&self, text: String) {
        let file = SourceFile { name: "test.yaml".into(), text, ..SourceFile::default() };
        let request = ApplyRequest { files: vec![file], dry_run: false, only: Vec::new() };
        let applied = self.engine.apply(&AccessScope::Node, request, &mut |_| ());
        applied.unwrap_or_else(|problem| panic!("{problem:?}"));
    }

    /// Waits until the reconcile loop makes no more steps.
    fn quiet(&self) {
        let steps = || self.engine.reconcile_loop.steps();
        let mut before = (steps(), Instant::now());
        while before.1.elapsed() < Duration::from_millis(100) {
            std::thread::sleep(Duration::from_millis(10));
            if steps() != before.0 {
                before = (steps(), Instant::now());
            }
        }
    }

    pub fn hub(&self) -> &Arc<WatchHub> {
        self.engine.watch_hub()
    }

    /// Returns the names of the stored vnets.
    pub fn vnets(&self) -> Vec<String> {
        self.engine.model().vnets.keys().cloned().collect()
    }

    pub fn socket(&self) -> PathBuf {
        self.path("pdpd.sock")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sends raw bytes, and returns everything received until the connection ends.
    pub fn raw(&self, request: &[u8]) -> String {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(EVENTUALLY)).unwrap();
        // The answer may arrive, and the connection end, before everything was sent.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    pub fn stop(&mut self) {
        self.machine.set(|inside| inside.hangs = None);
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        self.engine.reconcile_loop.stop();
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok() || std::thread::panicking());
        }
    }

    /// Answers as the mux.
    fn serve_mux(&self) {
        let left = self.left.clone();
        answer_at(&self.engine.host.places.mux_control(), move |mut channel| {
            let Ok(Some((request, fds))) = channel.receive::<MuxRequest>() else { return };
            let _ = channel.send(&mux_reply(request, fds, &left), &[]);
        });
    }

    /// Answers as the route mirrors of all routers, and as the mux's side of the slow path.
    fn serve_helpers(&mut self) {
        let model = self.engine.model();
        for plan in model.plan.vnets.values() {
            for (name, node) in &plan.nodes {
                if let Some(path) = node.slowpath_socket() {
                    let path = Path::new(path);
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    self.slowpath = Some(slowpath::Fake::start(path));
                }
                let Some(mirror) = &node.mirror else { continue };
                let (breaks, left) = (name == "breaks", self.left.clone());
                answer_at(&mirror.config.control_socket, move |mut channel| {
                    let request = channel.receive::<MirrorRequest>();
                    let sent = match request {
                        Ok(Some((MirrorRequest::Routes { .. }, _))) => routes(&mut channel, breaks),
                        Ok(Some((MirrorRequest::Status, _))) => {
                            channel.send(&MirrorReply::Status(MirrorStatusReply::default()), &[])
                        }
                        _ => Ok(()),
                    };
                    if sent.is_err() {
                        left.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
    }

    /// Writes logs, and records by which commands can run in all nodes, in the test's directory.
    fn write_records(&self) {
        let host = &self.engine.host;
        let cgroups = host.runtime.cgroups();
        cgroups.ensure_leaf(&format!("{CGROUP}/guest")).unwrap();
        let session = cgroups.session(&format!("{CGROUP}/guest")).unwrap();
        let leaf = session.dir().parent().unwrap();
        let script = format!(
            "#!/bin/sh\nwhile [ $1 != exec ]; do shift; done\nshift\n\
             while :; do case $1 in\n--cgroup) cgroup=${{2#*:}}; shift 2;;\n--tty) shift;;\n\
             --env) export \"$2\"; shift 2;;\n*) break;;\nesac; done\n\
             node=${{1#*.}}; shift\nexport PDP_NODE=${{node%%.*}} PDP_PROCESS=control\n\
             case $node in *.*) PDP_PROCESS=${{node#*.}};; esac\n\
             echo $$ > {}/$cgroup/cgroup.procs\ncd {}\nexec env --default-signal=INT \"$@\"\n",
            leaf.display(),
            self.dir.path().display()
        );
        let runc = &host.runtime.paths().runc;
        fs::write(runc, script).unwrap();
        fs::set_permissions(runc, fs::Permissions::from_mode(0o755)).unwrap();
        let process = serde_json::to_vec(&Process::of(std::process::id()).unwrap()).unwrap();
        let record = json!({"version": 2, "kind": "guest", "cgroup": CGROUP}).to_string();
        for (vnet, plan) in self.engine.model().plan.vnets.iter() {
            let keys = plan.nodes.iter().flat_map(|(name, node)| {
                let guests = node.guests.keys();
                let guests = guests.map(|number| ObjectKey::guest(vnet, name, *number));
                guests.chain([ObjectKey::node(vnet, name)])
            });
            for key in keys {
                let dir = host.places.record(&key, ProcessRole::Main);
                fs::create_dir_all(&dir).unwrap();
                fs::write(dir.join("record.json"), &record).unwrap();
                fs::write(dir.join("pid"), &process).unwrap();
                fs::write(dir.join("shim"), &process).unwrap();
            }
            let log = |process, text| {
                let path = self.engine.node_log(vnet, "r1", process).unwrap();
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            };
            log(GuestProcess::Control, "zebra starts\n");
            log(GuestProcess::Guest(0), "router starts\n");
        }
        let log = |process, end: &str, text| {
            let mut path = self.engine.log(process).unwrap().into_os_string();
            path.push(end);
            fs::write(path, text).unwrap();
        };
        log(NodeProcess::Daemon, "", "one\ntwo\nthree\n");
        log(NodeProcess::Mux, "", "mux 2\nmux 3\n");
        log(NodeProcess::Mux, ".1", "mux 0\nmux 1\n");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let cgroups = self.engine.host.runtime.cgroups();
        let _ = cgroups.remove("", Duration::from_secs(10));
        cgroups.remove_if_empty("");
    }
}

/// Calls `answer` on a thread of its own for each connection to a socket.
fn answer_at(path: &Path, answer: impl Fn(Channel) + Clone + Send + 'static) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = answer.clone();
            std::thread::spawn(move || answer(Channel::new(stream)));
        }
    });
}

fn mux_reply(request: MuxRequest, mut fds: Vec<OwnedFd>, left: &Arc<AtomicU64>) -> MuxReply {
    match request {
        MuxRequest::Stats { .. } => MuxReply::Stats(Box::new(stats())),
        MuxRequest::Fdb { clear: false, .. } => MuxReply::Fdb {
            heard: vec![mux::LearnedMac { mac: [2, 0, 0, 0, 0, 1], end: 1, age_s: 7 }],
        },
        MuxRequest::Fdb { clear: true, .. } => MuxReply::Done,
        MuxRequest::Capture { snap_bytes, .. } => capture(snap_bytes, "", fds.pop(), left),
        MuxRequest::CaptureBy { snap_bytes, program, .. } => {
            capture(snap_bytes, &program.to_string(), fds.pop(), left)
        }
        MuxRequest::Trace { filter, .. } if !filter.is_empty() => {
            let stage = |at_ns, stage: &str, detail: String| mux::TraceStage {
                at_ns,
                stage: stage.into(),
                detail,
            };
            let detail = format!("{:?}", filter[0].value);
            MuxReply::Traced { stages: vec![stage(0, "receive", detail)] }
        }
        MuxRequest::Trace { .. } => MuxReply::Failed { error: "no frame came within 1 s".into() },
        other => MuxReply::Failed { error: format!("unexpected: {other:?}") },
    }
}

/// Writes frames that contain the request's parameters, until nobody reads them.
fn capture(snap_bytes: u32, program: &str, to: Option<OwnedFd>, left: &Arc<AtomicU64>) -> MuxReply {
    let mut to = fs::File::from(to.expect("a descriptor"));
    let (frame, left) =
        ([&snap_bytes.to_le_bytes()[..], program.as_bytes()].concat(), left.clone());
    std::thread::spawn(move || {
        let length = (frame.len() as u32).to_le_bytes();
        let record = [&[0; 8][..], &length, &length, &frame].concat();
        let mut bytes = [PCAP, &record].concat();
        while to.write_all(&bytes).is_ok() {
            bytes.clone_from(&record);
            std::thread::sleep(Duration::from_millis(5));
        }
        left.fetch_add(1, Ordering::Relaxed);
    });
    MuxReply::Done
}

/// Sends the routes of a table in parts.
fn routes(channel: &mut Channel, breaks: bool) -> std::io::Result<()> {
    let count = if breaks { ROUTES_BEFORE_END } else { ROUTES };
    let hop = GroupHop { vport: 0, gateway: Some(Ipv4Addr::new(10, 0, 0, 2).into()), weight: 1 };
    let kernel = Some(ResolvedRoute::Hops(vec![hop]));
    let route = |number: u64| {
        let address = Ipv4Addr::from_bits(0x0a00_0000 + ((number as u32) << 4));
        let prefix = format!("{address}/28").parse().unwrap();
        MirrorRoute { prefix, kernel: kernel.clone(), guest: None }
    };
    for first in (0..count).step_by(1000) {
        let part = (first..first + 1000).map(route).collect();
        channel.send(&MirrorReply::Routes(part), &[])?;
    }
    if breaks { Ok(()) } else { channel.send(&MirrorReply::End, &[]) }
}

fn stats() -> Stats {
    let port = PortStats {
        received: 5000,
        dropped: [("guest-no-route".into(), 5)].into(),
        ..PortStats::default()
    };
    let node = NodeStats { ports: [("eth0".to_owned(), port)].into(), ..NodeStats::default() };
    let vnet = VnetStats { nodes: [("r1".to_owned(), node)].into() };
    Stats { vnets: VNETS.map(|name| (name.to_owned(), vnet.clone())).into(), ..Stats::default() }
}

/// A router with two guests, one of which is connected.
fn status() -> VnetStatus {
    let guest = |number: u32| ForwardingGuest {
        number,
        fe: "fe1".into(),
        share_millicores: 250,
        connected: number == 0,
        routes_synced: Some(number == 0),
        ..ForwardingGuest::default()
    };
    let router = NodeStatus {
        name: "r1".into(),
        kind: NodeType::Router,
        phase: Phase::Degraded,
        guests: vec![guest(0), guest(1)],
        ..NodeStatus::default()
    };
    VnetStatus { phase: Phase::Degraded, nodes: vec![router], ..VnetStatus::default() }
}

/// Returns the number of processes whose command lines contain this text.
pub fn processes_with(text: &str) -> usize {
    let Ok(entries) = fs::read_dir("/proc") else { return 0 };
    let holds = |path: &Path| {
        fs::read(path.join("cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).replace('\0', " ").contains(text))
    };
    entries.flatten().filter(|entry| holds(&entry.path())).count()
}
