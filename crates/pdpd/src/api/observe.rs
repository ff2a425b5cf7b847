//! The API's [`Daemon`] interface of the node.

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

use crate::access::{AccessScope, no_vnet};
use crate::api::{Captured, Daemon, RouteFn};
use crate::engine::DaemonCore;
use crate::events::WatchReader;
use crate::status::fastpath::{self, FastPath};
use crate::status::{doctor, frames, publisher, stats, tables, view};
use crate::util::ProgressFn;

impl Daemon for DaemonCore {
    fn version(&self) -> DaemonVersion {
        DaemonVersion {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            managed: self.managed,
            listens: None,
        }
    }

    fn redact_for(&self, scope: &AccessScope, problem: Problem) -> Problem {
        Self::redact_for(self, scope, problem)
    }

    fn doctor(&self) -> Vec<MachineCheck> {
        doctor::of_node(self)
    }

    fn apply(
        &self,
        scope: &AccessScope,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        Self::apply(self, scope, request, progress)
    }

    fn up(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        Self::up(self, progress)
    }

    fn down(
        &self,
        request: DownRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        Self::down(self, request, progress)
    }

    fn substrate(&self, scope: &AccessScope) -> Result<SubstrateInfo, Problem> {
        Ok(view::substrate(self, scope))
    }

    fn delete_substrate(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        Self::delete_substrate(self, progress)
    }

    fn tenants(&self) -> Arc<BTreeMap<String, Tenant>> {
        Self::tenants(self)
    }

    fn tenant_infos(&self, scope: &AccessScope) -> Result<Vec<TenantInfo>, Problem> {
        Ok(view::tenants(self, scope))
    }

    fn delete_tenant(&self, tenant: &str, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        Self::delete_tenant(self, tenant)
    }

    fn images(&self, scope: &AccessScope) -> Result<Vec<ImageInfo>, Problem> {
        self.images.list(scope, &self.model())
    }

    fn pull_image(
        &self,
        scope: &AccessScope,
        request: &PullRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.images.pull(scope, request, &self.model(), progress)
    }

    fn delete_image(
        &self,
        scope: &AccessScope,
        image: &str,
        query: &ImageQuery,
    ) -> Result<(), Problem> {
        self.images.remove(scope, image, query, &|| self.model())
    }

    fn prune_images(
        &self,
        scope: &AccessScope,
        query: &ImageQuery,
    ) -> Result<Vec<ImageInfo>, Problem> {
        self.images.prune(scope, query, &|| self.model())
    }

    fn vnets(&self, scope: &AccessScope) -> Result<Vec<VnetSummary>, Problem> {
        Ok(view::vnets(self, scope))
    }

    fn vnet(&self, vnet: &str) -> Result<Vnet, Problem> {
        view::vnet(self, vnet).ok_or_else(|| no_vnet(vnet))
    }

    fn delete_vnet(
        &self,
        scope: &AccessScope,
        vnet: &str,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        Self::delete_vnet(self, scope, vnet, progress)
    }

    fn delete_nodes(
        &self,
        scope: &AccessScope,
        vnet: &str,
        nodes: &BTreeSet<String>,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        Self::delete_nodes(self, scope, vnet, nodes, progress)
    }

    fn scale(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        request: ScaleRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        Self::scale(self, scope, vnet, node, request, progress)
    }

    fn restart(
        &self,
        scope: &AccessScope,
        vnet: &str,
        request: &RestartRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        Self::restart(self, scope, vnet, request, progress)
    }

    fn set_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<ChangeReport, Problem> {
        Self::set_link(self, scope, vnet, link, request)
    }

    fn change_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<ChangeReport, Problem> {
        Self::change_link(self, scope, vnet, link, request)
    }

    fn stats(&self, scope: &AccessScope, query: StatsQuery) -> Result<Stats, Problem> {
        stats::current(self, scope, query)
    }

    fn watch(&self, scope: &AccessScope, query: WatchQuery) -> Result<WatchReader, Problem> {
        Ok(publisher::open(self, scope, query))
    }

    fn fdb(&self, vnet: &str, link: &str, clear: bool) -> Result<Vec<FdbEntry>, Problem> {
        tables::fdb(self, vnet, link, clear)
    }

    fn routes(
        &self,
        vnet: &str,
        node: &str,
        query: RoutesQuery,
        row: RouteFn<'_>,
    ) -> Result<(), Problem> {
        tables::routes(self, vnet, node, query, row)
    }

    fn fastpath_filters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathFiltersQuery,
    ) -> Result<FastpathFilters, Problem> {
        FastPath::find(self, vnet, node)?.filters(query)
    }

    fn change_fastpath(
        &self,
        vnet: &str,
        node: &str,
        change: &FastpathChange,
    ) -> Result<FastpathChanged, Problem> {
        FastPath::find(self, vnet, node)?.change(change)
    }

    fn fastpath_counters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathCountersQuery,
    ) -> Result<FastpathCounters, Problem> {
        FastPath::find(self, vnet, node)?.counters(query)
    }

    fn fastpath_queues(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues, Problem> {
        FastPath::find(self, vnet, node)?.queues(query, fastpath::queue_names(self, vnet, node))
    }

    fn send_frame(&self, vnet: &str, node: &str, frame: &FastpathFrame) -> Result<(), Problem> {
        FastPath::find(self, vnet, node)?.send(frame)
    }

    fn capture(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        port: &str,
        query: CaptureQuery,
    ) -> Result<Captured, Problem> {
        frames::capture(self, scope, vnet, node, port, query)
    }

    fn trace(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        port: &str,
        request: TraceRequest,
    ) -> Result<Trace, Problem> {
        frames::trace(self, scope, vnet, node, port, request)
    }

    fn log(&self, process: NodeProcess) -> Result<PathBuf, Problem> {
        Self::log(self, process)
    }

    fn node_log(&self, vnet: &str, node: &str, process: GuestProcess) -> Result<PathBuf, Problem> {
        Self::node_log(self, vnet, node, process)
    }

    fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<(Command, Session), Problem> {
        Self::exec(self, vnet, node, request)
    }
}
