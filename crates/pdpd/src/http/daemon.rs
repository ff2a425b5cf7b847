//! What the API asks of the rest of the daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use pdp_api::exec::ExecRequest;
use pdp_api::{
    ApplyRequest, CaptureQuery, Check, DownRequest, FastpathChange, FastpathChanged,
    FastpathCounters, FastpathCountersQuery, FastpathFilters, FastpathFiltersQuery, FastpathFrame,
    FastpathQueues, FastpathQueuesQuery, FdbEntry, GuestProcess, ImageInfo, ImageQuery, LinkChange,
    LinkRequest, NodeProcess, Problem, Progress, PullRequest, Report, RestartRequest, RouteRow,
    RoutesQuery, ScaleRequest, Stats, StatsQuery, Substrate, TenantInfo, Trace, TraceRequest,
    Version, Vnet, VnetSummary, WatchQuery,
};
use pdp_container::cgroup::Session;
use pdp_spec::Tenant;

use crate::access::Scope;
use crate::observers::Place;
use crate::watch::Reader;

/// Told what is being done. Never blocks for long.
pub type ProgressFn<'a> = &'a mut (dyn FnMut(Progress) + Send);

/// Takes routes one by one, and holds up whoever calls while its client reads slowly. `false`:
/// the client went away, send no more.
pub type RouteFn<'a> = &'a mut (dyn FnMut(RouteRow) -> bool + Send);

/// A capture.
#[derive(Debug)]
pub struct Captured {
    /// Frames as pcap, until they are not read any more.
    pub frames: OwnedFd,
    /// Its place, where nobody else keeps it as long as that.
    pub place: Option<Place>,
}

impl From<OwnedFd> for Captured {
    fn from(frames: OwnedFd) -> Self {
        Self { frames, place: None }
    }
}

/// The node behind the API.
///
/// Calls come on threads of their own, several at a time, and may block. A call that changes
/// something is never given up, even when its client goes away.
///
/// Where a call has a [`Scope`], its answer, its steps and its problem name nothing outside of it. A
/// vnet that is asked for by name is in the scope of who asks.
pub trait Daemon: Send + Sync + 'static {
    /// Who answers.
    fn version(&self) -> Version;

    /// A problem as somebody may know it: tenants are not told where on the machine things are.
    fn shown_to(&self, _: &Scope, problem: Problem) -> Problem {
        problem
    }

    /// What the machine can do.
    fn doctor(&self) -> Vec<Check>;

    /// Applies files (or says what would change). All files are checked before anything is done.
    fn apply(
        &self,
        scope: &Scope,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem>;

    /// Starts all that is stored.
    fn up(&self, progress: ProgressFn<'_>) -> Result<Report, Problem>;

    /// Stops all vnets and the mux. The daemon exits by itself where [`Report::exits`] is set, a
    /// moment after this returned.
    fn down(&self, request: DownRequest, progress: ProgressFn<'_>) -> Result<Report, Problem>;

    /// The substrate; of it, for a tenant, what its vnets may use.
    fn substrate(&self, scope: &Scope) -> Result<Substrate, Problem>;

    /// Forgets the substrate; refused while there are vnets.
    fn delete_substrate(&self, progress: ProgressFn<'_>) -> Result<Report, Problem>;

    /// Tenants as applied, by name.
    fn tenants(&self) -> Arc<BTreeMap<String, Tenant>>;

    /// Tenants with their vnets.
    fn tenant_infos(&self, scope: &Scope) -> Result<Vec<TenantInfo>, Problem>;

    /// Forgets a tenant and its tokens; refused while it has vnets.
    fn delete_tenant(&self, tenant: &str, progress: ProgressFn<'_>) -> Result<Report, Problem>;

    /// Images that are kept.
    fn images(&self, scope: &Scope) -> Result<Vec<ImageInfo>, Problem>;

    /// Pulls what a name stands for now.
    fn pull_image(
        &self,
        scope: &Scope,
        request: &PullRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem>;

    /// Removes an image, by a name that it has or its digest; refused while a node runs on it.
    fn delete_image(&self, scope: &Scope, image: &str, query: &ImageQuery) -> Result<(), Problem>;

    /// Removes all images that nothing uses; returns which.
    fn prune_images(&self, scope: &Scope, query: &ImageQuery) -> Result<Vec<ImageInfo>, Problem>;

    /// All vnets, by name.
    fn vnets(&self, scope: &Scope) -> Result<Vec<VnetSummary>, Problem>;

    /// One vnet.
    fn vnet(&self, vnet: &str) -> Result<Vnet, Problem>;

    /// Stops and forgets a vnet.
    fn delete_vnet(
        &self,
        scope: &Scope,
        vnet: &str,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem>;

    /// Stops and forgets nodes of a vnet, with their links.
    fn delete_nodes(
        &self,
        scope: &Scope,
        vnet: &str,
        nodes: &BTreeSet<String>,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem>;

    /// Changes the number of forwarding guests of a router.
    fn scale(
        &self,
        scope: &Scope,
        vnet: &str,
        node: &str,
        request: ScaleRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem>;

    /// Ends and starts anew what runs of nodes.
    fn restart(
        &self,
        scope: &Scope,
        vnet: &str,
        request: &RestartRequest,
        progress: ProgressFn<'_>,
    ) -> Result<Report, Problem>;

    /// Sets a link's administrative state; `link` is its name or one of its ends, `r1:eth0`.
    fn set_link(
        &self,
        scope: &Scope,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<Report, Problem>;

    /// Changes how frames leave by a link's ends, as an applied spec with that would; `link` is as above.
    fn change_link(
        &self,
        scope: &Scope,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<Report, Problem>;

    /// Counters now.
    fn stats(&self, scope: &Scope, query: StatsQuery) -> Result<Stats, Problem>;

    /// Begins a watch, of a vnet in scope if of one.
    fn watch(&self, scope: &Scope, query: WatchQuery) -> Result<Reader, Problem>;

    /// What a segment has learned, by ends; with `clear` it forgets all, and nothing is returned.
    fn fdb(&self, vnet: &str, link: &str, clear: bool) -> Result<Vec<FdbEntry>, Problem>;

    /// Routes of a router or host, each to `row`.
    fn routes(
        &self,
        vnet: &str,
        node: &str,
        query: RoutesQuery,
        row: RouteFn<'_>,
    ) -> Result<(), Problem>;

    /// Filters of a fast path, as many as one answer has.
    fn fastpath_filters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathFiltersQuery,
    ) -> Result<FastpathFilters, Problem>;

    /// Changes filters of a fast path, all at once or none.
    fn change_fastpath(
        &self,
        vnet: &str,
        node: &str,
        change: &FastpathChange,
    ) -> Result<FastpathChanged, Problem>;

    /// What counters of a fast path have.
    fn fastpath_counters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathCountersQuery,
    ) -> Result<FastpathCounters, Problem>;

    /// How queues of a fast path are.
    fn fastpath_queues(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues, Problem>;

    /// Has a fast path send a frame.
    fn send_frame(&self, vnet: &str, node: &str, frame: &FastpathFrame) -> Result<(), Problem>;

    /// Begins a capture; what comes out of the descriptor (the read end of a pipe) is pcap.
    /// Closing it ends the capture.
    fn capture(
        &self,
        scope: &Scope,
        vnet: &str,
        node: &str,
        port: &str,
        query: CaptureQuery,
    ) -> Result<Captured, Problem>;

    /// Follows the next frame that matches.
    fn trace(
        &self,
        scope: &Scope,
        vnet: &str,
        node: &str,
        port: &str,
        request: TraceRequest,
    ) -> Result<Trace, Problem>;

    /// Where a process of the node itself logs. The file may be replaced or cut off by its
    /// writer at any time; this module follows.
    fn log(&self, process: NodeProcess) -> Result<PathBuf, Problem>;

    /// Where a process of a node of a vnet logs.
    fn node_log(&self, vnet: &str, node: &str, process: GuestProcess) -> Result<PathBuf, Problem>;

    /// The command that runs `request.command` (a shell, if that is empty) in a guest, not
    /// started, and the cgroup that it and all that it starts will be in. This module gives it pipes, or a
    /// terminal, which the command makes its session's own; and kills all that is in the cgroup when the client
    /// goes away.
    fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<(Command, Session), Problem>;
}
