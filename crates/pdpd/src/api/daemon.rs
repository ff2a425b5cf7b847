//! Interface between the API and the rest of the daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

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

use crate::access::AccessScope;
use crate::events::WatchReader;
use crate::status::frames::Captured;
use crate::status::tables::RouteFn;
use crate::util::ProgressFn;

/// The node behind the API.
///
/// Calls arrive on separate threads, several at a time, and may block. A call
/// that changes something is never aborted, even if its client goes away.
///
/// If a call has a [`AccessScope`], its answer, steps and problem name nothing
/// outside of it. A vnet that a call names is in the client's scope.
pub trait Daemon: Send + Sync + 'static {
    /// Returns the daemon's version.
    fn version(&self) -> DaemonVersion;

    /// Returns a problem as the client may see it. Tenants do not learn paths of the machine.
    fn redact_for(&self, _: &AccessScope, problem: Problem) -> Problem {
        problem
    }

    /// Checks the facilities of the machine.
    fn doctor(&self) -> Vec<MachineCheck>;

    /// Applies files, or returns what would change. All files are checked before anything is done.
    fn apply(
        &self,
        scope: &AccessScope,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem>;

    /// Starts everything that is stored.
    fn up(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem>;

    /// Stops all vnets and the mux. If [`ChangeReport::exits`] is set, the
    /// daemon exits by itself a moment after this returns.
    fn down(&self, request: DownRequest, progress: ProgressFn<'_>)
    -> Result<ChangeReport, Problem>;

    /// Returns the substrate. A tenant gets the parts that its vnets may use.
    fn substrate(&self, scope: &AccessScope) -> Result<SubstrateInfo, Problem>;

    /// Deletes the substrate; refused while vnets exist.
    fn delete_substrate(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem>;

    /// Returns the applied tenants by name.
    fn tenants(&self) -> Arc<BTreeMap<String, Tenant>>;

    /// Returns the tenants with their vnets.
    fn tenant_infos(&self, scope: &AccessScope) -> Result<Vec<TenantInfo>, Problem>;

    /// Deletes a tenant and its tokens; refused while it has vnets.
    fn delete_tenant(
        &self,
        tenant: &str,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem>;

    /// Returns the stored images.
    fn images(&self, scope: &AccessScope) -> Result<Vec<ImageInfo>, Problem>;

    /// Pulls the image that a name refers to now.
    fn pull_image(
        &self,
        scope: &AccessScope,
        request: &PullRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem>;

    /// Removes an image, given by one of its names or its digest; refused while a node runs on it.
    fn delete_image(
        &self,
        scope: &AccessScope,
        image: &str,
        query: &ImageQuery,
    ) -> Result<(), Problem>;

    /// Removes all unused images and returns them.
    fn prune_images(
        &self,
        scope: &AccessScope,
        query: &ImageQuery,
    ) -> Result<Vec<ImageInfo>, Problem>;

    /// Returns all vnets, by name.
    fn vnets(&self, scope: &AccessScope) -> Result<Vec<VnetSummary>, Problem>;

    /// Returns one vnet.
    fn vnet(&self, vnet: &str) -> Result<Vnet, Problem>;

    /// Stops and deletes a vnet.
    fn delete_vnet(
        &self,
        scope: &AccessScope,
        vnet: &str,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem>;

    /// Stops and deletes nodes of a vnet, with their links.
    fn delete_nodes(
        &self,
        scope: &AccessScope,
        vnet: &str,
        nodes: &BTreeSet<String>,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem>;

    /// Changes the number of a router's forwarding guests.
    fn scale(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        request: ScaleRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem>;

    /// Restarts the processes of nodes.
    fn restart(
        &self,
        scope: &AccessScope,
        vnet: &str,
        request: &RestartRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem>;

    /// Sets a link's administrative state; `link` is its name or one of its ends, `r1:eth0`.
    fn set_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<ChangeReport, Problem>;

    /// Changes the impairments of a link's ends, like an applied spec
    /// with them. `link` is as above.
    fn change_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<ChangeReport, Problem>;

    /// Returns the current counters.
    fn stats(&self, scope: &AccessScope, query: StatsQuery) -> Result<Stats, Problem>;

    /// Starts a watch. If it is for one vnet, that vnet is in scope.
    fn watch(&self, scope: &AccessScope, query: WatchQuery) -> Result<WatchReader, Problem>;

    /// Returns the addresses that a segment has learned, by ends. With
    /// `clear` the segment forgets them all, and nothing is returned.
    fn fdb(&self, vnet: &str, link: &str, clear: bool) -> Result<Vec<FdbEntry>, Problem>;

    /// Passes each route of a router or host to `row`.
    fn routes(
        &self,
        vnet: &str,
        node: &str,
        query: RoutesQuery,
        row: RouteFn<'_>,
    ) -> Result<(), Problem>;

    /// Returns filters of a fast path, as many as fit into one answer.
    fn fastpath_filters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathFiltersQuery,
    ) -> Result<FastpathFilters, Problem>;

    /// Changes filters of a fast path, all or none.
    fn change_fastpath(
        &self,
        vnet: &str,
        node: &str,
        change: &FastpathChange,
    ) -> Result<FastpathChanged, Problem>;

    /// Returns counters of a fast path.
    fn fastpath_counters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathCountersQuery,
    ) -> Result<FastpathCounters, Problem>;

    /// Returns the state of a fast path's queues.
    fn fastpath_queues(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues, Problem>;

    /// Makes a fast path send a frame.
    fn send_frame(&self, vnet: &str, node: &str, frame: &FastpathFrame) -> Result<(), Problem>;

    /// Starts a capture. The returned descriptor is the read end of a
    /// pipe that supplies pcap. Closing it ends the capture.
    fn capture(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        port: &str,
        query: CaptureQuery,
    ) -> Result<Captured, Problem>;

    /// Traces the next frame that matches.
    fn trace(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        port: &str,
        request: TraceRequest,
    ) -> Result<Trace, Problem>;

    /// Returns the log file of one of the node's own processes. Its writer
    /// may replace or truncate the file at any time; this module follows.
    fn log(&self, process: NodeProcess) -> Result<PathBuf, Problem>;

    /// Returns the log file of a process of a vnet's node.
    fn node_log(&self, vnet: &str, node: &str, process: GuestProcess) -> Result<PathBuf, Problem>;

    /// Returns the command, not yet started, that runs `request.command` in a guest, or a shell
    /// if that is empty. Also returns the cgroup for the command and all its descendants.
    ///
    /// This module gives the command pipes, or a terminal that becomes its
    /// session's own. It kills everything in the cgroup when the client goes away.
    fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<(Command, Session), Problem>;
}
