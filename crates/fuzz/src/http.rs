//! The API: whatever comes on a connection is answered by HTTP, with a problem where it is wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pdp_api::exec::ExecRequest;
use pdp_api::{
    ApplyRequest, CaptureQuery, Check, DownRequest, FastpathChange, FastpathChanged,
    FastpathCounters, FastpathCountersQuery, FastpathFilters, FastpathFiltersQuery, FastpathFrame,
    FastpathQueues, FastpathQueuesQuery, FdbEntry, GuestProcess, ImageInfo, ImageQuery, LinkChange,
    LinkRequest, NodeProcess, Problem, PullRequest, Report, RestartRequest, RoutesQuery,
    ScaleRequest, Stats, StatsQuery, Substrate, TenantInfo, Trace, TraceRequest, Version, Vnet,
    VnetSummary, WatchQuery,
};
use pdp_container::cgroup::Session;
use pdp_spec::Tenant;
use pdpd::access::{Guard, Peer, Scope};
use pdpd::http::{Daemon, ProgressFn, RouteFn, Server};
use pdpd::state::State;
use pdpd::watch::Reader;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bytes on their way, each way.
const PIPE_BYTES: usize = 1 << 16;

/// Nothing takes as long.
const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon that has nothing and does nothing.
struct Nothing;

fn nothing<T>() -> Result<T, Problem> {
    Err(Problem::not_found("nothing"))
}

impl Daemon for Nothing {
    fn version(&self) -> Version {
        Version { version: "0".into(), pid: 1, managed: false, listens: None }
    }

    fn doctor(&self) -> Vec<Check> {
        vec![]
    }

    fn apply(
        &self,
        _: &Scope,
        request: ApplyRequest,
        _: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        let _ = pdp_spec::parse(&request.files);
        nothing()
    }

    fn up(&self, _: ProgressFn<'_>) -> Result<Report, Problem> {
        nothing()
    }

    fn down(&self, _: DownRequest, _: ProgressFn<'_>) -> Result<Report, Problem> {
        nothing()
    }

    fn watch(&self, _: &Scope, _: WatchQuery) -> Result<Reader, Problem> {
        nothing()
    }

    fn substrate(&self, _: &Scope) -> Result<Substrate, Problem> {
        nothing()
    }

    fn delete_substrate(&self, _: ProgressFn<'_>) -> Result<Report, Problem> {
        nothing()
    }

    fn tenants(&self) -> Arc<BTreeMap<String, Tenant>> {
        Arc::default()
    }

    fn tenant_infos(&self, _: &Scope) -> Result<Vec<TenantInfo>, Problem> {
        Ok(vec![])
    }

    fn delete_tenant(&self, _: &str, _: ProgressFn<'_>) -> Result<Report, Problem> {
        nothing()
    }

    fn images(&self, _: &Scope) -> Result<Vec<ImageInfo>, Problem> {
        Ok(vec![])
    }

    fn pull_image(&self, _: &Scope, _: &PullRequest, _: ProgressFn<'_>) -> Result<Report, Problem> {
        nothing()
    }

    fn delete_image(&self, _: &Scope, _: &str, _: &ImageQuery) -> Result<(), Problem> {
        nothing()
    }

    fn prune_images(&self, _: &Scope, _: &ImageQuery) -> Result<Vec<ImageInfo>, Problem> {
        nothing()
    }

    fn vnets(&self, _: &Scope) -> Result<Vec<VnetSummary>, Problem> {
        Ok(vec![])
    }

    fn vnet(&self, _: &str) -> Result<Vnet, Problem> {
        nothing()
    }

    fn delete_vnet(&self, _: &Scope, _: &str, _: ProgressFn<'_>) -> Result<Report, Problem> {
        nothing()
    }

    fn delete_nodes(
        &self,
        _: &Scope,
        _: &str,
        _: &BTreeSet<String>,
        _: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        nothing()
    }

    fn scale(
        &self,
        _: &Scope,
        _: &str,
        _: &str,
        _: ScaleRequest,
        _: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        nothing()
    }

    fn restart(
        &self,
        _: &Scope,
        _: &str,
        _: &RestartRequest,
        _: ProgressFn<'_>,
    ) -> Result<Report, Problem> {
        nothing()
    }

    fn set_link(&self, _: &Scope, _: &str, _: &str, _: LinkRequest) -> Result<Report, Problem> {
        nothing()
    }

    fn change_link(&self, _: &Scope, _: &str, _: &str, _: &LinkChange) -> Result<Report, Problem> {
        nothing()
    }

    fn stats(&self, _: &Scope, _: StatsQuery) -> Result<Stats, Problem> {
        nothing()
    }

    fn fdb(&self, _: &str, _: &str, _: bool) -> Result<Vec<FdbEntry>, Problem> {
        nothing()
    }

    fn routes(&self, _: &str, _: &str, _: RoutesQuery, _: RouteFn<'_>) -> Result<(), Problem> {
        nothing()
    }

    fn fastpath_filters(
        &self,
        _: &str,
        _: &str,
        _: FastpathFiltersQuery,
    ) -> Result<FastpathFilters, Problem> {
        nothing()
    }

    fn change_fastpath(
        &self,
        _: &str,
        _: &str,
        _: &FastpathChange,
    ) -> Result<FastpathChanged, Problem> {
        nothing()
    }

    fn fastpath_counters(
        &self,
        _: &str,
        _: &str,
        _: FastpathCountersQuery,
    ) -> Result<FastpathCounters, Problem> {
        nothing()
    }

    fn fastpath_queues(
        &self,
        _: &str,
        _: &str,
        _: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues, Problem> {
        nothing()
    }

    fn send_frame(&self, _: &str, _: &str, _: &FastpathFrame) -> Result<(), Problem> {
        nothing()
    }

    fn capture(
        &self,
        _: &Scope,
        _: &str,
        _: &str,
        _: &str,
        _: CaptureQuery,
    ) -> Result<pdpd::http::Captured, Problem> {
        nothing()
    }

    fn trace(
        &self,
        _: &Scope,
        _: &str,
        _: &str,
        _: &str,
        _: TraceRequest,
    ) -> Result<Trace, Problem> {
        nothing()
    }

    fn log(&self, _: NodeProcess) -> Result<PathBuf, Problem> {
        nothing()
    }

    fn node_log(&self, _: &str, _: &str, _: GuestProcess) -> Result<PathBuf, Problem> {
        nothing()
    }

    fn exec(&self, _: &str, _: &str, _: &ExecRequest) -> Result<(Command, Session), Problem> {
        nothing()
    }
}

/// The API of that daemon, made once. Its state is in memory where that can be had.
fn server() -> &'static Server {
    static SERVER: OnceLock<(Server, tempfile::TempDir, tokio::sync::watch::Sender<bool>)> =
        OnceLock::new();
    let make = || {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.expect("a directory");
        let state = Arc::new(State::open(directory.path()).expect("a state"));
        let guard = Guard { state, operators: vec![], viewers: vec![] };
        let made = pdpd::http::server(Arc::new(Nothing), Arc::new(guard), None);
        let (server, stop) = made.expect("a thread");
        (server, directory, stop)
    };
    &SERVER.get_or_init(make).0
}

/// Bytes of a client, an operator, that then says no more.
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
            let served = server().other(theirs, Peer::Unix { uid: 0, pid: 1 });
            let served = served.expect("room");
            let told = async {
                let _ = write.write_all(bytes).await;
                let _ = write.shutdown().await;
            };
            let heard = async {
                let mut answer = Vec::new();
                let _ = read.read_to_end(&mut answer).await;
                answer
            };
            let all = async { tokio::join!(served, told, heard).2 };
            tokio::time::timeout(PATIENCE, all).await.expect("an end")
        })
    });
    check_answers(&answer);
}

/// Every answer is one; failures are problems.
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
        // The answer to HEAD has none of the bytes that it says there are.
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
