//! Read-only answers of the API, and the API's whole [`Daemon`] interface.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use pdp_api::exec::ExecRequest;
use pdp_api::{
    ApplyRequest, CaptureQuery, ChangeReport, DaemonVersion, DownRequest, FastpathChange,
    FastpathChanged, FastpathCounters, FastpathCountersQuery, FastpathFilters,
    FastpathFiltersQuery, FastpathFrame, FastpathQueues, FastpathQueuesQuery, FdbEntry,
    GuestProcess, ImageInfo, ImageQuery, LinkChange, LinkRequest, MachineCheck, NodeProcess,
    Problem, ProblemKind, PullRequest, RestartRequest, RouteEntry, RouteHop, RouteTarget,
    RoutesQuery, ScaleRequest, Stats, StatsQuery, SubstrateInfo, TenantInfo, Trace, TraceRequest,
    TraceStep, Vnet, VnetSummary, WatchQuery,
};
use pdp_container::cgroup::Session;
use pdp_container::{Process, RunAs};
use pdp_proto::mirror::{self, TableSource};
use pdp_proto::routes::ResolvedRoute;
use pdp_proto::{mux, trace};
use pdp_spec::Tenant;
use pdp_spec::units::User;

use crate::access::{AccessScope, no_vnet};
use crate::api::{Captured, Daemon, RouteFn};
use crate::engine::{DaemonCore, link_of};
use crate::events::WatchReader;
use crate::events::node_counters::{HelperCounters, HelperEndpoint, complete};
use crate::host::HostError;
use crate::host::control::{ControlError, MirrorClient};
use crate::host::query::{HelperReply, Question};
use crate::kernel::observers::ObserverPermit;
use crate::kernel::ports::Observer;
use crate::plan::key::{ObjectKey, ProcessRole};
use crate::plan::{LinkPath, NodePlan};
use crate::status::fastpath::FastPath;
use crate::status::{kernel_frames, kernel_routes, publisher};
use crate::util::{ProgressFn, error_chain, hide};

/// Longest wait for the next part of a route table.
const ROUTES_WAIT: Duration = Duration::from_secs(60);

/// Runs the shell of a guest: bash if it exists, else sh.
const SHELL: [&str; 3] =
    ["/bin/sh", "-c", "command -v bash > /dev/null && exec bash; exec /bin/sh"];

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
        if *scope == AccessScope::Node {
            return problem;
        }
        let hide = |text: String| hide(self.host.state_directory(), text);
        let mut problem =
            Problem { error: hide(problem.error), hint: problem.hint.map(hide), ..problem };
        for diagnostic in &mut problem.diagnostics {
            diagnostic.message = hide(std::mem::take(&mut diagnostic.message));
            diagnostic.hint = hide(std::mem::take(&mut diagnostic.hint));
        }
        problem
    }

    fn doctor(&self) -> Vec<MachineCheck> {
        let paths = self.host.runtime.paths();
        let mut checks = crate::status::doctor::checks(&paths.runc, &self.host.places.lib);
        checks.extend(self.checks_of_remains());
        checks
    }

    fn apply(
        &self,
        scope: &AccessScope,
        request: ApplyRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.change(scope, request, progress)
    }

    fn up(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        self.start_all(progress)
    }

    fn down(
        &self,
        request: DownRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.stop_all(request, progress)
    }

    fn substrate(&self, scope: &AccessScope) -> Result<SubstrateInfo, Problem> {
        Ok(crate::status::view::substrate(self, scope))
    }

    fn delete_substrate(&self, progress: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        self.drop_substrate(progress)
    }

    fn tenants(&self) -> Arc<BTreeMap<String, Tenant>> {
        self.model().tenants.clone()
    }

    fn tenant_infos(&self, scope: &AccessScope) -> Result<Vec<TenantInfo>, Problem> {
        Ok(crate::status::view::tenants(self, scope))
    }

    fn delete_tenant(&self, tenant: &str, _: ProgressFn<'_>) -> Result<ChangeReport, Problem> {
        self.drop_tenant(tenant)
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
        Ok(crate::status::view::vnets(self, scope))
    }

    fn vnet(&self, vnet: &str) -> Result<Vnet, Problem> {
        crate::status::view::vnet(self, vnet).ok_or_else(|| no_vnet(vnet))
    }

    fn delete_vnet(
        &self,
        scope: &AccessScope,
        vnet: &str,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.drop_vnet(scope, vnet, progress)
    }

    fn delete_nodes(
        &self,
        scope: &AccessScope,
        vnet: &str,
        nodes: &BTreeSet<String>,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.drop_nodes(scope, vnet, nodes, progress)
    }

    fn scale(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        request: ScaleRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.change_guests(scope, vnet, node, request, progress)
    }

    fn restart(
        &self,
        scope: &AccessScope,
        vnet: &str,
        request: &RestartRequest,
        progress: ProgressFn<'_>,
    ) -> Result<ChangeReport, Problem> {
        self.restart_nodes(scope, vnet, request, progress)
    }

    fn set_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: LinkRequest,
    ) -> Result<ChangeReport, Problem> {
        self.set_link_state(scope, vnet, link, request)
    }

    fn change_link(
        &self,
        scope: &AccessScope,
        vnet: &str,
        link: &str,
        request: &LinkChange,
    ) -> Result<ChangeReport, Problem> {
        self.change_impairments(scope, vnet, link, request)
    }

    fn stats(&self, scope: &AccessScope, query: StatsQuery) -> Result<Stats, Problem> {
        let model = self.model();
        if let Some(vnet) = &query.vnet
            && !model.vnets.contains_key(vnet)
        {
            return Err(no_vnet(vnet));
        }
        let mut stats = self.host.stats(query.vnet.as_deref(), &model.plan).map_err(unavailable)?;
        if *scope != AccessScope::Node {
            // A tenant learns nothing about the mux as a whole.
            stats.externals.clear();
            stats.workers.clear();
        }
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        stats.at_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        stats.vnets.retain(|vnet, _| model.plan.vnets.contains_key(vnet) && scope.sees(vnet));
        let mut nodes = Vec::new();
        for (vnet, stats) in &mut stats.vnets {
            let plan = &model.plan.vnets[vnet];
            stats.nodes.retain(|node, _| plan.nodes.contains_key(node) || node == mux::OUTSIDE);
            let known = stats.nodes.iter_mut();
            nodes.extend(known.map(|(node, stats)| (vnet, plan.nodes.get(node), stats)));
        }
        let mut questions = Vec::new();
        for (index, (vnet, plan, _)) in nodes.iter().enumerate() {
            let Some(plan) = plan else { continue };
            let helper =
                plan.tap_helper.as_ref().map(|helper| HelperEndpoint::Tap(&helper.control));
            let mirror = plan.mirror.as_ref();
            let mirror = mirror.map(|mirror| HelperEndpoint::Mirror(&mirror.config.control_socket));
            for helper in [helper, mirror].into_iter().flatten() {
                let tenant = pdp_spec::tenant_of(vnet).map(str::to_owned);
                let path = helper.path().to_owned();
                questions.push(Question { path, tenant, what: (index, helper) });
            }
        }
        let answers = self.late_helpers.query_all(&questions, |(_, helper), wait| helper.ask(wait));
        let mut replies: BTreeMap<usize, Vec<(&HelperEndpoint<'_>, HelperReply<HelperCounters>)>> =
            BTreeMap::new();
        for (Question { what: (index, helper), .. }, answer) in questions.iter().zip(answers) {
            replies.entry(*index).or_default().push((helper, answer));
        }
        for (index, (_, plan, stats)) in nodes.into_iter().enumerate() {
            complete(stats, plan, replies.remove(&index).unwrap_or_default());
        }
        Ok(stats)
    }

    fn watch(&self, scope: &AccessScope, query: WatchQuery) -> Result<WatchReader, Problem> {
        Ok(publisher::open(self, scope, query))
    }

    fn fdb(&self, vnet: &str, link: &str, clear: bool) -> Result<Vec<FdbEntry>, Problem> {
        let model = self.model();
        let Some(plan) = model.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        let link = link_of(vnet, plan, link)?;
        if link.segment.is_none() {
            let problem =
                format!("vnet {vnet}: link {} has two ends, and learns no addresses", link.name);
            return Err(
                Problem::new(ProblemKind::Invalid, problem).hint("only segments learn addresses")
            );
        }
        let ends: Vec<_> =
            link.ends.iter().map(|end| crate::status::view::endpoint(end, plan)).collect();
        let heard = self.host.mux.fdb(vnet, &link.name, clear).map_err(unavailable)?;
        let entry = |it: mux::LearnedMac| {
            let mac = it.mac.map(|byte| format!("{byte:02x}")).join(":");
            let endpoint = ends.get(usize::from(it.end)).cloned().unwrap_or_default();
            FdbEntry { endpoint, mac, age_s: it.age_s }
        };
        let mut entries: Vec<_> = heard.into_iter().map(entry).collect();
        entries.sort();
        Ok(entries)
    }

    fn routes(
        &self,
        vnet: &str,
        node: &str,
        query: RoutesQuery,
        row: RouteFn<'_>,
    ) -> Result<(), Problem> {
        let plan = self.node(vnet, node)?;
        let source = match (query.diff, query.guest) {
            (true, guest) => TableSource::Diff(guest.unwrap_or(0)),
            (false, Some(guest)) => TableSource::Guest(guest),
            (false, None) => TableSource::Kernel,
        };
        match source {
            // The mux's own tables are those of guest 0.
            TableSource::Guest(0) | TableSource::Diff(0) if plan.mux_follows() => {}
            TableSource::Guest(number) | TableSource::Diff(number) => {
                has_guest(vnet, node, &plan, number)?;
            }
            TableSource::Kernel => {}
        }
        let ports: Vec<String> = plan.taps.iter().map(|tap| tap.name.clone()).collect();
        let Some(mirror) = &plan.mirror else {
            let control = GuestProcess::Control;
            let guest = self.running(vnet, node, control, &plan.control.dir)?;
            return kernel_routes::list(guest, ports.clone(), query.within, |prefix, target| {
                let kernel = Some(target);
                row(route_row(mirror::MirrorRoute { prefix, kernel, guest: None }, &ports))
            });
        };
        MirrorClient { path: mirror.config.control_socket.clone() }
            .routes(source, query.within, ROUTES_WAIT, |rows| {
                rows.into_iter().all(|found| row(route_row(found, &ports)))
            })
            .map_err(unavailable)
    }

    fn fastpath_filters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathFiltersQuery,
    ) -> Result<FastpathFilters, Problem> {
        FastPath::of(vnet, node, &self.node(vnet, node)?)?.filters(query)
    }

    fn change_fastpath(
        &self,
        vnet: &str,
        node: &str,
        change: &FastpathChange,
    ) -> Result<FastpathChanged, Problem> {
        FastPath::of(vnet, node, &self.node(vnet, node)?)?.change(change)
    }

    fn fastpath_counters(
        &self,
        vnet: &str,
        node: &str,
        query: FastpathCountersQuery,
    ) -> Result<FastpathCounters, Problem> {
        FastPath::of(vnet, node, &self.node(vnet, node)?)?.counters(query)
    }

    fn fastpath_queues(
        &self,
        vnet: &str,
        node: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues, Problem> {
        let fastpath = FastPath::of(vnet, node, &self.node(vnet, node)?)?;
        let model = self.model();
        let spec = model.plan.vnets.get(vnet).map(|plan| &plan.mux);
        let names = |port: u16| {
            let vlinks = spec.iter().flat_map(|spec| &spec.vlinks);
            let ends = vlinks.flat_map(|vlink| vlink.ends.iter().zip(&vlink.queues));
            let is_it = |end: &mux::VlinkEnd| matches!(end, mux::VlinkEnd::Port { node: of, port: at } if of == node && *at == port);
            let queues = ends.filter(|(end, _)| is_it(end)).flat_map(|(_, queues)| queues);
            queues.map(|queue| queue.name.clone()).collect()
        };
        fastpath.queues(query, names)
    }

    fn send_frame(&self, vnet: &str, node: &str, frame: &FastpathFrame) -> Result<(), Problem> {
        FastPath::of(vnet, node, &self.node(vnet, node)?)?.send(frame)
    }

    fn capture(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        port: &str,
        query: CaptureQuery,
    ) -> Result<Captured, Problem> {
        let port = self.port(vnet, node, port)?;
        let program = program(query.filter.as_deref())?;
        let place = self.captures.acquire(scope.tenant()).map_err(observed)?;
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|error| Problem::internal(format!("pipe: {error}")))?;
        if self.is_in_kernel(&port) {
            let observer = self.observer(place, &port)?;
            kernel_frames::capture(observer, query.snap_bytes, program, write)?;
            return Ok(read.into());
        }
        let capture = self.host.mux.capture(port, query.snap_bytes, program, write.as_fd());
        capture.map_err(unavailable)?;
        Ok(Captured { frames: read, permit: Some(place) })
    }

    fn trace(
        &self,
        scope: &AccessScope,
        vnet: &str,
        node: &str,
        port: &str,
        request: TraceRequest,
    ) -> Result<Trace, Problem> {
        let port = self.port(vnet, node, port)?;
        let program = program(request.program.as_deref())?;
        let filter = request.filter.into_iter().map(|found| mux::BytePattern {
            offset: found.offset,
            value: found.value,
            mask: found.mask,
        });
        let filter: Vec<_> = filter.collect();
        let wait = Duration::from_millis(request.wait_ms);
        let path = self.port_path(&port);
        let place = self.traces.acquire(scope.tenant()).map_err(observed)?;
        if self.is_in_kernel(&port) {
            let observer = self.observer(place, &port)?;
            let link = path.map(|(link, _)| link).unwrap_or_default();
            let at = (link.as_str(), port.port.as_str());
            let stages = kernel_frames::follow(&observer, at, &filter, program, wait)
                .map_err(|problem| self.elsewhere(&port, problem))?;
            return Ok(Trace { stages });
        }
        let stages = self.host.mux.trace(port.clone(), filter, program, wait);
        let stages = stages.map_err(|error| match error {
            ControlError::Refused { reason, .. } => {
                self.elsewhere(&port, Problem::new(ProblemKind::TimedOut, reason))
            }
            other => unavailable(other),
        })?;
        let stages = stages.into_iter().map(|stage| TraceStep {
            at_ns: stage.at_ns,
            stage: stage.stage,
            detail: stage.detail,
        });
        let mut trace = Trace { stages: stages.collect() };
        if let (Some((link, LinkPath::Mux(Some(why)))), Some(first)) =
            (path, trace.stages.first_mut())
        {
            first.detail += &format!("; link {link} passes through the mux: {why}");
        }
        self.name_route(vnet, node, &mut trace);
        Ok(trace)
    }

    fn log(&self, process: NodeProcess) -> Result<PathBuf, Problem> {
        match process {
            NodeProcess::Daemon => Ok(self.host.places.run.join("pdpd.log")),
            NodeProcess::Mux => self.log_of(&ObjectKey::Mux, ProcessRole::Main),
        }
    }

    fn node_log(&self, vnet: &str, node: &str, process: GuestProcess) -> Result<PathBuf, Problem> {
        let plan = self.node(vnet, node)?;
        let key = ObjectKey::node(vnet, node);
        match process {
            GuestProcess::Control => self.log_of(&key, ProcessRole::Main),
            GuestProcess::Tap => self.log_of(&key, ProcessRole::Tap),
            GuestProcess::Mirror => self.log_of(&key, ProcessRole::Mirror),
            GuestProcess::Management => self.log_of(&key, ProcessRole::Management),
            GuestProcess::Guest(number) => {
                has_guest(vnet, node, &plan, number)?;
                self.log_of(&ObjectKey::guest(vnet, node, number), ProcessRole::Main)
            }
        }
    }

    fn exec(
        &self,
        vnet: &str,
        node: &str,
        request: &ExecRequest,
    ) -> Result<(Command, Session), Problem> {
        let plan = self.node(vnet, node)?;
        let directory = match request.process {
            GuestProcess::Control => plan.control.dir.clone(),
            GuestProcess::Guest(number) => {
                has_guest(vnet, node, &plan, number)?;
                self.host.places.record(&ObjectKey::guest(vnet, node, number), ProcessRole::Main)
            }
            other @ (GuestProcess::Tap | GuestProcess::Mirror | GuestProcess::Management) => {
                return Err(Problem::new(
                    ProblemKind::Invalid,
                    format!("{vnet}/{node}: {other} is not a guest"),
                )
                .hint("run commands in control, g0, g1, …"));
            }
        };
        let run_as = run_as(vnet, node, request)?;
        let mut argv: Vec<OsString> = request.command.iter().map(OsString::from).collect();
        if argv.is_empty() {
            argv.extend(SHELL.map(OsString::from));
        }
        let env: BTreeMap<String, String> =
            request.term.iter().map(|term| ("TERM".to_string(), term.clone())).collect();
        self.running(vnet, node, request.process, &directory)?;
        self.host
            .runtime
            .exec_command(&directory, &argv, &run_as, request.tty.is_some(), &env)
            .map_err(|error| Problem::internal(error_chain(&error)))
    }
}

/// Returns the user and directory with which a command shall run.
fn run_as(vnet: &str, node: &str, request: &ExecRequest) -> Result<RunAs, Problem> {
    let invalid = |text: String| Problem::new(ProblemKind::Invalid, text);
    let user = request.user.as_deref().map(str::parse::<User>).transpose();
    user.map_err(|bad| invalid(format!("{vnet}/{node}: user {bad}")).hint(bad.hint))?;
    if let Some(why) = request.workdir.as_deref().and_then(pdp_spec::bad_workdir) {
        return Err(invalid(format!("{vnet}/{node}: {why}")));
    }
    let run_as =
        RunAs { user: request.user.clone(), workdir: request.workdir.clone().map(Into::into) };
    if run_as != RunAs::default() && request.process != GuestProcess::Control {
        let text = format!(
            "{vnet}/{node}: commands in {} run as its program's user, in its directory",
            request.process
        );
        return Err(
            invalid(text).hint("leave out the user and the directory for a forwarding guest")
        );
    }
    Ok(run_as)
}

impl DaemonCore {
    /// Adds the matching route to a trace of a frame that a forwarding guest of this node, or the
    /// mux itself, forwarded. The route is looked up now, and not when the frame was forwarded.
    fn name_route(&self, vnet: &str, node: &str, trace: &mut Trace) {
        let of = |stage: &str, trace: &Trace| trace.stages.iter().position(|it| it.stage == stage);
        let at = of("distribute", trace).or(of("forward", trace));
        let (Some(classify), Some(at)) = (of("classify", trace), at) else { return };
        let to = trace.stages[classify].detail.rsplit_once(trace::ADDRESSES);
        let to = to.and_then(|(_, to)| to.parse::<IpAddr>().ok());
        let guest = match trace.stages[at].stage.as_str() {
            "forward" => Some(0),
            _ => trace.stages[at].detail.strip_prefix("to guest ").and_then(|n| n.parse().ok()),
        };
        let (Some(to), Some(guest)) = (to, guest) else { return };
        let query = RoutesQuery { guest: Some(guest), diff: false, within: Some(to.into()) };
        let mut best: Option<RouteEntry> = None;
        let length = |row: &RouteEntry| row.prefix.prefix_len();
        // The trace omits the route if the look-up fails.
        let result = self.routes(vnet, node, query, &mut |row| {
            if best.as_ref().is_none_or(|best| length(best) < length(&row)) {
                best = Some(row);
            }
            true
        });
        let detail = &mut trace.stages[at].detail;
        match best.map(|row| (row.prefix, row.guest.or(row.kernel))) {
            Some((prefix, Some(target))) => *detail += &format!(", by its route {prefix} {target}"),
            _ if result.is_ok() => *detail += &format!(", which has no route to {to}"),
            _ => {}
        }
    }

    /// Returns the process of a node, whose records are in this directory.
    fn running(
        &self,
        vnet: &str,
        node: &str,
        process: GuestProcess,
        directory: &Path,
    ) -> Result<Process, Problem> {
        self.host.running(directory).ok_or_else(|| {
            let text = format!("{vnet}/{node}: {process} does not run");
            Problem::new(ProblemKind::Conflict, text).hint("`pdp inspect` shows why")
        })
    }

    /// Returns the log of an object's process.
    fn log_of(&self, key: &ObjectKey, role: ProcessRole) -> Result<PathBuf, Problem> {
        let logs = self.host.runtime.logs(&self.host.places.record(key, role));
        logs.map(|[log, _]| log).map_err(|error| Problem::internal(error_chain(&error)))
    }

    fn node(&self, vnet: &str, node: &str) -> Result<NodePlan, Problem> {
        let model = self.model();
        let Some(plan) = model.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
        plan.nodes.get(node).cloned().ok_or_else(|| {
            let names: Vec<&str> = plan.nodes.keys().map(String::as_str).collect();
            Problem::not_found(format!("vnet {vnet}: no node {node:?}"))
                .hint(format!("its nodes are {}", names.join(", ")))
        })
    }

    fn port(&self, vnet: &str, node: &str, port: &str) -> Result<mux::PortName, Problem> {
        let model = self.model();
        let names: Vec<String> = match model.plan.vnets.get(vnet).filter(|_| node == mux::OUTSIDE) {
            Some(plan) => plan.mux.own_ends().iter().map(|own| own.name.into()).collect(),
            None => self.node(vnet, node)?.taps.iter().map(|tap| tap.name.clone()).collect(),
        };
        if !names.iter().any(|name| name == port) {
            // A trace at an external observes the other end of its link.
            let plan = model.plan.vnets.get(vnet).filter(|_| node == mux::OUTSIDE);
            if let Some((node, port)) = plan.and_then(|plan| plan.other_end(port)) {
                return Ok(mux::PortName { vnet: vnet.into(), node, port });
            }
            return Err(Problem::not_found(format!("node {vnet}/{node}: no port {port:?}"))
                .hint(format!("its ports are {}", names.join(", "))));
        }
        Ok(mux::PortName { vnet: vnet.into(), node: node.into(), port: port.into() })
    }

    /// True if a port's frames stay in the kernel.
    fn is_in_kernel(&self, port: &mux::PortName) -> bool {
        matches!(self.port_path(port), Some((_, LinkPath::Kernel)))
    }

    /// Starts to observe frames of a port whose frames stay in the kernel.
    fn observer(&self, place: ObserverPermit, port: &mux::PortName) -> Result<Observer, Problem> {
        let observer = self.host.ports.observe(place, &port.vnet, &port.node, &port.port);
        observer.map_err(|error| {
            let problem = format!("{}/{}: {}", port.vnet, port.node, error_chain(&error));
            Problem::new(ProblemKind::Unavailable, problem).hint("`pdp inspect` shows why")
        })
    }

    /// Returns the link of a port, and the path of its frames.
    fn port_path(&self, port: &mux::PortName) -> Option<(String, LinkPath)> {
        let model = self.model();
        let plan = model.plan.vnets.get(&port.vnet)?;
        let taps = &plan.nodes.get(&port.node)?.taps;
        let number = taps.iter().position(|tap| tap.name == port.port)?;
        let (link, path) = plan.path_of(&port.node, number as u16)?;
        Some((link.name.clone(), path.clone()))
    }

    /// If a trace saw no arriving frame, adds where to trace the frames that the port sends.
    fn elsewhere(&self, port: &mux::PortName, problem: Problem) -> Problem {
        if !problem.error.starts_with(trace::NO_FRAME) {
            return problem;
        }
        let mux::PortName { vnet, node, port: name } = port;
        let far = self.far_ends(port).unwrap_or_default();
        let far: Vec<_> = far.iter().take(ENDS_NAMED).map(|end| format!("{vnet}/{end}")).collect();
        let sends = match &far[..] {
            [] => format!("`pdp capture {vnet}/{node}:{name}` shows frames that it sends"),
            far => format!("frames that it sends arrive at {}", far.join(", ")),
        };
        problem.hint(format!("a trace follows frames that {node} receives at {name}; {sends}"))
    }

    /// Returns the ports at the other ends of a port's link, as NODE:PORT.
    fn far_ends(&self, port: &mux::PortName) -> Option<Vec<String>> {
        let model = self.model();
        let plan = model.plan.vnets.get(&port.vnet)?;
        let name = |(node, number): (&str, u16)| {
            let tap = plan.nodes.get(node)?.taps.get(usize::from(number))?;
            Some((node.to_owned(), tap.name.clone()))
        };
        let near = (port.node.clone(), port.port.clone());
        let mut links = plan.mux.vlinks.iter().map(|it| it.ports().filter_map(name));
        let ends = links.find_map(|ends| {
            let ends: Vec<_> = ends.collect();
            ends.contains(&near).then_some(ends)
        })?;
        let far = ends.into_iter().filter(|end| *end != near);
        Some(far.map(|(node, port)| format!("{node}:{port}")).collect())
    }
}

/// Ends of a link that a hint names.
const ENDS_NAMED: usize = 3;

/// Problem: too many captures or traces.
fn observed(error: HostError) -> Problem {
    Problem::new(ProblemKind::Conflict, error_chain(&error))
        .hint("end one, or wait: a trace ends within a minute")
}

/// Parses the filter of an API request into a program for the mux.
fn program(text: Option<&str>) -> Result<Option<mux::BpfProgram>, Problem> {
    let parsed = text.map(str::parse::<mux::BpfProgram>).transpose();
    parsed.map_err(|fault| {
        let problem = Problem::new(ProblemKind::Invalid, format!("the filter {fault}"));
        problem.hint("send what `tcpdump -ddd` prints, with commas instead of line ends")
    })
}

fn has_guest(vnet: &str, node: &str, plan: &NodePlan, number: u32) -> Result<(), Problem> {
    if plan.guests.contains_key(&number) {
        return Ok(());
    }
    let numbers: Vec<String> = plan.guests.keys().map(|number| format!("g{number}")).collect();
    let problem = Problem::not_found(format!("{vnet}/{node}: no forwarding guest g{number}"));
    match numbers.is_empty() {
        true => {
            Err(problem
                .hint("it has none: it is a host, or the mux or its own kernel forwards for it"))
        }
        false => Err(problem.hint(format!("it has {}", numbers.join(", ")))),
    }
}

fn unavailable(error: ControlError) -> Problem {
    let kind = match &error {
        ControlError::Refused { .. } => ProblemKind::Conflict,
        ControlError::Unreachable { .. } => ProblemKind::Unavailable,
        ControlError::Unexpected { .. } => ProblemKind::Internal,
    };
    Problem::new(kind, error_chain(&error))
}

fn route_row(row: mirror::MirrorRoute, ports: &[String]) -> RouteEntry {
    RouteEntry {
        prefix: row.prefix,
        kernel: row.kernel.map(|target| route_target(target, ports)),
        guest: row.guest.map(|target| route_target(target, ports)),
    }
}

fn route_target(target: ResolvedRoute, ports: &[String]) -> RouteTarget {
    match target {
        ResolvedRoute::Punt => RouteTarget::Punt,
        ResolvedRoute::Drop => RouteTarget::Drop,
        ResolvedRoute::Hops(hops) => RouteTarget::Hops(
            hops.into_iter()
                .map(|hop| RouteHop {
                    port: ports
                        .get(usize::from(hop.vport))
                        .cloned()
                        .unwrap_or_else(|| format!("vport {}", hop.vport)),
                    gateway: hop.gateway,
                    weight: hop.weight,
                })
                .collect(),
        ),
    }
}
