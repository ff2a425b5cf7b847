//! A daemon with fixed answers behind the real HTTP layer, for tests of
//! the layer and of the command.

#![allow(dead_code)] // each test uses its part

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pdp_api::exec::ExecRequest;
use pdp_api::*;
use pdp_container::cgroup::{Cgroups, Session};
use pdp_spec::Tenant;
use pdpd::access::{AccessScope, Authenticator, no_vnet};
use pdpd::api::tls::Tls;
use pdpd::api::{Captured, Daemon, Listeners, RouteFn, listen, serve};
use pdpd::events::log::EventFilter;
use pdpd::events::{WatchHub, WatchReader, WatchStart};
use pdpd::intent::state::StateFile;
use pdpd::util::ProgressFn;
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

/// The only image that the daemon has.
fn image(tenant: Option<&str>) -> ImageInfo {
    ImageInfo {
        tenant: tenant.map(str::to_owned),
        names: vec!["registry.example/frr:10".into()],
        digest: format!("sha256:{}", "5e".repeat(32)),
        packed_bytes: 40 << 20,
        unpacked_bytes: 100 << 20,
        at_ms: 1_700_000_000_000,
        used_by: vec![format!("{}red/r1", tenant.map_or(String::new(), |name| format!("{name}.")))],
        problem: None,
    }
}

/// Routes of `red/r1`.
pub const ROUTES: u64 = 200_000;

pub struct Fake {
    dir: PathBuf,
    /// Requested changes that are done.
    pub done: Mutex<Vec<String>>,
    /// Captures and route tables whose reader went away.
    pub left: AtomicU64,
    /// Lets a waiting change continue.
    pub go: AtomicBool,
    samples: AtomicU64,
    /// Number of requests for a vnet.
    pub looks: AtomicU64,
    /// True if all of `red` is ready.
    pub ready: AtomicBool,
    /// Hub of the watchers, with `red`, `acme.red` and `other.red`.
    pub hub: Arc<WatchHub>,
    /// Cgroups of its commands.
    cgroups: Cgroups,
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = self.cgroups.remove("", Duration::from_secs(10));
        self.cgroups.remove_if_empty("");
    }
}

/// The fake behind the HTTP layer, as long as this value lives.
pub struct Server {
    pub dir: tempfile::TempDir,
    pub fake: Arc<Fake>,
    pub guard: Arc<Authenticator>,
    /// TLS address of the server.
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("daemon.log", "one\ntwo\nthree\n"),
            ("mux.log", "mux 2\nmux 3\n"),
            ("mux.log.1", "mux 0\nmux 1\n"),
            ("control", "zebra starts\n"),
            ("g0", "router starts\n"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let cgroups = Cgroups::new(&format!("pdp-fake-{}-{number}", std::process::id())).unwrap();
        cgroups.ensure_leaf("guest").unwrap();
        let fake = Arc::new(Fake {
            cgroups,
            dir: dir.path().into(),
            done: Mutex::default(),
            left: AtomicU64::new(0),
            go: AtomicBool::new(false),
            samples: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            ready: AtomicBool::new(false),
            hub: Arc::default(),
        });
        for vnet in ["red", "acme.red", "other.red"] {
            fake.hub.publish_vnet(vnet, Some(red().status), true);
        }
        let unix = listen(&dir.path().join("pdpd.sock")).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let tls = Tls::self_signed(dir.path(), address).unwrap();
        let listeners = Listeners { unix, tls: Some((tcp, tls)) };
        let state = Arc::new(StateFile::open(&dir.path().join("state")).unwrap());
        let guard =
            Arc::new(Authenticator { state, operators: vec![], viewers: vec![VIEWER.to_string()] });
        let (stop, stopped) = oneshot::channel::<()>();
        let (daemon, at_gate) = (fake.clone(), guard.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let stop = async { drop(stopped.await) };
                serve(listeners, daemon, at_gate, stop).await.unwrap();
            });
            runtime.shutdown_timeout(Duration::from_millis(100));
        });
        Self { dir, fake, guard, address, stop: Some(stop), thread: Some(thread) }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("pdpd.sock")
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
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.fake.go.store(true, Ordering::Relaxed);
        self.stop();
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
    fn known(&self, vnet: &str) -> Result<(), Problem> {
        if ["red", "acme.red", "other.red"].contains(&vnet) { Ok(()) } else { Err(no_vnet(vnet)) }
    }

    fn note(&self, what: impl Into<String>) {
        self.done.lock().unwrap().push(what.into());
    }

    pub fn noted(&self, what: &str) -> bool {
        self.done.lock().unwrap().iter().any(|done| done == what)
    }
}

impl Daemon for Fake {
    fn version(&self) -> DaemonVersion {
        DaemonVersion { version: "0.0-fake".into(), pid: 4711, managed: false, listens: None }
    }

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
        _: &AccessScope,
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
            match name {
                "panics" => panic!("as asked"),
                "fails-late" => return Err(Problem::internal("runc: no such file")),
                "waits" => eventually("told to go on", || self.go.load(Ordering::Relaxed)),
                _ => {}
            }
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

    fn up(&self, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        self.note("up");
        Ok(ChangeReport {
            changes: vec![change("vnet/red", ChangeAction::Restart, "")],
            ..Default::default()
        })
    }

    fn down(&self, request: DownRequest, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        self.note(format!("down purge={} exit={}", request.purge, request.exit));
        Ok(ChangeReport {
            changes: vec![change("vnet/red", ChangeAction::Delete, "")],
            ..Default::default()
        })
    }

    fn substrate(&self, _: &AccessScope) -> Result<SubstrateInfo, Problem> {
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

    fn delete_substrate(&self, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        Err(Problem::new(ProblemKind::Conflict, "substrate: vnet red uses it")
            .hint("delete it first"))
    }

    fn tenants(&self) -> Arc<BTreeMap<String, Tenant>> {
        let tenant = |(name, user): (&str, u32)| {
            let text = json!({"apiVersion": "pdp/v1", "metadata": {"name": name},
                "spec": {"unixUsers": [user.to_string()]}});
            (name.to_string(), serde_json::from_value(text).unwrap())
        };
        Arc::new([("acme", TENANT), ("other", TENANT + 1)].map(tenant).into())
    }

    fn tenant_infos(&self, scope: &AccessScope) -> Result<Vec<TenantInfo>, Problem> {
        let mine = |name: &String| scope.tenant().is_none_or(|tenant| tenant == name);
        let infos = Arc::unwrap_or_clone(self.tenants())
            .into_iter()
            .filter(|(name, _)| mine(name))
            .map(|(name, spec)| {
                let vnets = vec![format!("{name}.red")];
                let spec = serde_json::to_value(pdp_spec::Object::Tenant(spec)).unwrap();
                let image_bytes = if name == "acme" { 140 << 20 } else { 0 };
                TenantInfo { name, spec, vnets, image_bytes }
            });
        Ok(infos.collect())
    }

    fn delete_tenant(&self, tenant: &str, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        self.note(format!("deleted tenant {tenant}"));
        let object = format!("tenant/{tenant}");
        Ok(ChangeReport {
            changes: vec![change(&object, ChangeAction::Delete, "")],
            ..Default::default()
        })
    }

    fn images(&self, scope: &AccessScope) -> Result<Vec<ImageInfo>, Problem> {
        Ok(vec![image(scope.tenant())])
    }

    fn pull_image(
        &self,
        _: &AccessScope,
        request: &PullRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        progress(Progress { done: 0, total: 1, what: format!("getting image {}", request.image) });
        Ok(ChangeReport::default())
    }

    fn delete_image(
        &self,
        _: &AccessScope,
        image: &str,
        query: &ImageQuery,
    ) -> Result<(), Problem> {
        self.note(format!("deleted image {image} of {:?}", query.tenant));
        Ok(())
    }

    fn prune_images(&self, scope: &AccessScope, _: &ImageQuery) -> Result<Vec<ImageInfo>, Problem> {
        Ok(vec![image(scope.tenant())])
    }

    fn vnets(&self, scope: &AccessScope) -> Result<Vec<VnetSummary>, Problem> {
        if let Some(tenant) = scope.tenant() {
            return Ok(vec![VnetSummary { name: format!("{tenant}.red"), ..Default::default() }]);
        }
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

    fn delete_vnet(
        &self,
        _: &AccessScope,
        vnet: &str,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        self.note(format!("deleted {vnet}"));
        let object = format!("vnet/{vnet}");
        Ok(ChangeReport {
            changes: vec![change(&object, ChangeAction::Delete, "")],
            ..Default::default()
        })
    }

    fn delete_nodes(
        &self,
        _: &AccessScope,
        vnet: &str,
        nodes: &BTreeSet<String>,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.known(vnet)?;
        let object = |node: &String| format!("vnet/{vnet}/node/{node}");
        let changes = nodes.iter().map(|node| change(&object(node), ChangeAction::Delete, ""));
        Ok(ChangeReport { changes: changes.collect(), ..Default::default() })
    }

    fn scale(
        &self,
        _: &AccessScope,
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

    fn restart(
        &self,
        _: &AccessScope,
        vnet: &str,
        request: &RestartRequest,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
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
        _: &AccessScope,
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
        _: &AccessScope,
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

    fn watch(&self, scope: &AccessScope, query: WatchQuery) -> Result<WatchReader, Problem> {
        let every = Duration::from_millis(query.every_ms.unwrap_or(WATCH_EVERY_MS_DEFAULT));
        let from = WatchStart::of(&query);
        let filter = EventFilter { scope: scope.clone(), vnet: query.vnet };
        Ok(WatchReader::new(&self.hub, filter, every, query.detail, &from))
    }

    fn stats(&self, _: &AccessScope, query: StatsQuery) -> Result<Stats, Problem> {
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
                        self.left.fetch_add(1, Ordering::Relaxed);
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

    fn capture(
        &self,
        _: &AccessScope,
        vnet: &str,
        _: &str,
        port: &str,
        query: CaptureQuery,
    ) -> Result<Captured, Problem> {
        self.known(vnet)?;
        if port != "eth0" {
            return Err(Problem::not_found(format!("no port {port}")));
        }
        let (reader, mut writer) = std::io::pipe().map_err(Problem::internal)?;
        let left = self.dir.join("left");
        std::thread::spawn(move || {
            // Frames that contain the request's parameters.
            let filter = query.filter.unwrap_or_default();
            let frame = [&query.snap_bytes.to_le_bytes()[..], filter.as_bytes()].concat();
            let length = (frame.len() as u32).to_le_bytes();
            let record = [&[0; 8][..], &length, &length, &frame].concat();
            let mut bytes = [PCAP, &record].concat();
            while writer.write_all(&bytes).is_ok() {
                bytes.clone_from(&record);
                std::thread::sleep(Duration::from_millis(5));
            }
            fs::write(left, "capture").unwrap();
        });
        Ok(OwnedFd::from(reader).into())
    }

    fn trace(
        &self,
        _: &AccessScope,
        vnet: &str,
        _: &str,
        _: &str,
        request: TraceRequest,
    ) -> Result<Trace, Problem> {
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

    fn log(&self, process: NodeProcess) -> Result<PathBuf, Problem> {
        Ok(match process {
            NodeProcess::Daemon => self.dir.join("daemon.log"),
            NodeProcess::Mux => self.dir.join("mux.log"),
        })
    }

    fn node_log(&self, vnet: &str, _: &str, process: GuestProcess) -> Result<PathBuf, Problem> {
        self.known(vnet)?;
        Ok(self.dir.join(process.to_string()))
    }

    /// Runs the command itself on this machine, in its own cgroup. An
    /// empty command runs a shell that prints where it would run.
    fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<(Command, Session), Problem> {
        self.known(vnet)?;
        // A test in the background ignores SIGINT; the shell shall not inherit that.
        let shell = ["env", "--default-signal=INT", "sh"].map(String::from);
        let words = if request.command.is_empty() { &shell[..] } else { &request.command };
        let session = self.cgroups.session("guest").map_err(Problem::internal)?;
        // As in a guest, its input is its controlling terminal.
        let leads = request.tty.map_or(&[][..], |_| &["setsid", "--ctty"]);
        let mut all: Vec<&str> = leads.to_vec();
        let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", session.dir().display());
        if !words[0].starts_with('/') {
            all.extend(["sh", "-c", &enter, "sh"]);
        }
        all.extend(words.iter().map(String::as_str));
        let mut command = Command::new(all[0]);
        command.args(&all[1..]);
        command.env("PDP_NODE", node).env("PDP_PROCESS", request.process.to_string());
        if let Some(term) = &request.term {
            command.env("TERM", term);
        }
        command.current_dir(&self.dir);
        Ok((command, session))
    }
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
