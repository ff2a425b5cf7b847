//! The API: it answers any bytes on a connection by HTTP, and invalid ones with a problem.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pdp_api::exec::ExecRequest;
use pdp_api::{
    ApplyRequest, CaptureQuery, ChangeReport, DaemonVersion, DownRequest, FastpathChange,
    FastpathChanged, FastpathCounters, FastpathCountersQuery, FastpathFilters,
    FastpathFiltersQuery, FastpathFrame, FastpathQueues, FastpathQueuesQuery, FdbEntry,
    GuestProcess, ImageInfo, ImageQuery, LinkChange, LinkRequest, MachineCheck, NodeProcess,
    Problem, PullRequest, RestartRequest, RoutesQuery, ScaleRequest, Stats, StatsQuery,
    SubstrateInfo, TenantInfo, Trace, TraceRequest, Vnet, VnetSummary, WatchQuery,
};
use pdp_container::cgroup::Session;
use pdp_spec::Tenant;
use pdpd::access::{AccessScope, Authenticator, PeerIdentity};
use pdpd::api::{Daemon, HttpServer, RouteFn};
use pdpd::events::WatchReader;
use pdpd::intent::state::StateFile;
use pdpd::util::ProgressFn;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bytes in flight in each direction.
const PIPE_BYTES: usize = 1 << 16;

/// Upper limit for any request.
const PATIENCE: Duration = Duration::from_secs(20);

/// Daemon without objects that does nothing.
struct Nothing;

fn nothing<T>() -> Result<T, Problem> {
    Err(Problem::not_found("nothing"))
}

impl Daemon for Nothing {
    fn version(&self) -> DaemonVersion {
        DaemonVersion { version: "0".into(), pid: 1, managed: false, listens: None }
    }

    fn doctor(&self) -> Vec<MachineCheck> {
        vec![]
    }

    fn apply(
        &self,
        _: &AccessScope,
        request: ApplyRequest,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        let _ = pdp_spec::parse(&request.files);
        nothing()
    }

    fn up(&self, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn down(&self, _: DownRequest, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn watch(&self, _: &AccessScope, _: WatchQuery) -> Result<WatchReader, Problem> {
        nothing()
    }

    fn substrate(&self, _: &AccessScope) -> Result<SubstrateInfo, Problem> {
        nothing()
    }

    fn delete_substrate(&self, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn tenants(&self) -> Arc<BTreeMap<String, Tenant>> {
        Arc::default()
    }

    fn tenant_infos(&self, _: &AccessScope) -> Result<Vec<TenantInfo>, Problem> {
        Ok(vec![])
    }

    fn delete_tenant(&self, _: &str, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn images(&self, _: &AccessScope) -> Result<Vec<ImageInfo>, Problem> {
        Ok(vec![])
    }

    fn pull_image(
        &self,
        _: &AccessScope,
        _: &PullRequest,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn delete_image(&self, _: &AccessScope, _: &str, _: &ImageQuery) -> Result<(), Problem> {
        nothing()
    }

    fn prune_images(&self, _: &AccessScope, _: &ImageQuery) -> Result<Vec<ImageInfo>, Problem> {
        nothing()
    }

    fn vnets(&self, _: &AccessScope) -> Result<Vec<VnetSummary>, Problem> {
        Ok(vec![])
    }

    fn vnet(&self, _: &str) -> Result<Vnet, Problem> {
        nothing()
    }

    fn delete_vnet(
        &self,
        _: &AccessScope,
        _: &str,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn delete_nodes(
        &self,
        _: &AccessScope,
        _: &str,
        _: &BTreeSet<String>,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn scale(
        &self,
        _: &AccessScope,
        _: &str,
        _: &str,
        _: ScaleRequest,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn restart(
        &self,
        _: &AccessScope,
        _: &str,
        _: &RestartRequest,
        _: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn set_link(
        &self,
        _: &AccessScope,
        _: &str,
        _: &str,
        _: LinkRequest,
    ) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn change_link(
        &self,
        _: &AccessScope,
        _: &str,
        _: &str,
        _: &LinkChange,
    ) -> Result<ChangeReport, Problem> {
        nothing()
    }

    fn stats(&self, _: &AccessScope, _: StatsQuery) -> Result<Stats, Problem> {
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
        _: &AccessScope,
        _: &str,
        _: &str,
        _: &str,
        _: CaptureQuery,
    ) -> Result<pdpd::api::Captured, Problem> {
        nothing()
    }

    fn trace(
        &self,
        _: &AccessScope,
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

/// The API of that daemon, made once. Its state is in memory if possible.
fn server() -> &'static HttpServer {
    static SERVER: OnceLock<(HttpServer, tempfile::TempDir, tokio::sync::watch::Sender<bool>)> =
        OnceLock::new();
    let make = || {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.expect("a directory");
        let state = Arc::new(StateFile::open(directory.path()).expect("a state"));
        let guard = Authenticator { state, operators: vec![], viewers: vec![] };
        let made = pdpd::api::server(Arc::new(Nothing), Arc::new(guard), None);
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
