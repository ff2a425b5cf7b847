//! State of objects for the API: the desired state compared with the
//! last results of the reconcile loop and with what runs.

mod commands;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use pdp_api::{
    CommandStatus, Condition, ConditionKind, DataPlaneKind, EngineStatus, ExternalStatus,
    FastpathPower, FeGuest, FeStatus, ForwardingGuest, ForwardingPath, LinkStatus, NodeStatus,
    NodeType, Phase, PortStatus, ProcessStatus, QueueStatus, ScheduleStatus, SubstrateInfo,
    SubstrateStatus, TenantInfo, Vnet, VnetStatus, VnetSummary,
};
use pdp_container::{LimitHits, ProcessState as GuestState};
use pdp_model::{NodeStats, Stats, UnderlayProblem, VnetStats};
use pdp_net::interface::InterfaceInfo;
use pdp_net::ports::InnerEndChange;
use pdp_proto::{mirror, mux};
use pdp_spec::limits::MTU_MAX;
use pdp_spec::units::{Bytes, Percent, PublishedPort, Span};
use pdp_spec::{ExternalForm, Parallel, Resources, VirtualNetwork};

use crate::access::AccessScope;
use crate::engine::DaemonCore;
use crate::events::summary::summary;
use crate::host::control::MirrorClient;
use crate::host::query::{HelperReply, Question};
use crate::intent::model::Model;
use crate::machine::Machine;
use crate::plan::allocations;
use crate::plan::key::{ObjectKey, ProcessRole};
use crate::plan::{self, MirrorPlan, NodePlan, VnetPlan};
use crate::reconcile::run_loop::Health;
use crate::util::mac;

/// Sources of a status.
struct StatusView<'a> {
    engine: &'a DaemonCore,
    model: &'a Model,
    mux: Option<Stats>,
    /// Answers of the mirrors, by socket path.
    mirrors: BTreeMap<&'a Path, HelperReply<mirror::MirrorStatusReply>>,
}

/// Returns the substrate. A tenant gets the parts that its vnets may use, and nothing of others.
pub fn substrate(engine: &DaemonCore, scope: &AccessScope) -> SubstrateInfo {
    let model = engine.model();
    let mux = engine.host.stats(Some(""), &model.plan).ok();
    let view = StatusView { engine, model: &model, mux, mirrors: BTreeMap::new() };
    let status = view.substrate(|vnet| scope.sees(vnet));
    if let Some(tenant) = scope.tenant() {
        let granted = model.tenants.get(tenant).map(|tenant| &tenant.spec.interfaces);
        return of_tenant(status, scope, |name| granted.is_some_and(|all| all.contains_key(name)));
    }
    SubstrateInfo {
        spec: serde_json::to_value(pdp_spec::Object::Substrate(
            model.effective_substrate(&engine.cpus),
        ))
        .ok(),
        status,
    }
}

/// Returns the parts of a substrate that a tenant may know.
fn of_tenant(
    mut status: SubstrateStatus,
    scope: &AccessScope,
    granted: impl Fn(&str) -> bool,
) -> SubstrateInfo {
    for engine in &mut status.fes {
        engine.guests.retain(|guest| scope.sees(&guest.vnet));
        engine.used_millicores = engine.guests.iter().map(|guest| guest.share_millicores).sum();
    }
    status.externals.retain(|external| granted(&external.name));
    status.message = None;
    status.mux = ProcessStatus { phase: status.mux.phase, ..ProcessStatus::default() };
    status.phase = status.mux.phase;
    SubstrateInfo { spec: None, status }
}

/// Returns all vnets of a scope.
pub fn vnets(engine: &DaemonCore, scope: &AccessScope) -> Vec<VnetSummary> {
    let model = engine.model();
    let vnets = model.plan.vnets.iter().filter(|(name, _)| scope.sees(name));
    let mirrors = ask_mirrors(engine, &model, vnets.clone().map(|(name, plan)| (name, &**plan)));
    let mux = engine.host.stats(None, &model.plan).ok();
    let view = StatusView { engine, model: &model, mux, mirrors };
    let mut all: Vec<VnetSummary> =
        vnets.map(|(name, plan)| summary(name, &view.vnet(name, plan))).collect();
    // A vnet that is not wanted, or can't be used, and still occupies resources.
    let bare = |name: String, phase, message| VnetSummary {
        name,
        phase,
        message: Some(message),
        ..VnetSummary::default()
    };
    let removals = engine.removals().into_iter();
    all.extend(removals.map(|it| bare(it.vnet.clone(), Phase::Removing, it.words())));
    let damaged = model.damaged.iter().filter(|((kind, _), _)| kind == "VirtualNetwork");
    all.extend(damaged.map(|((_, name), why)| {
        bare(name.clone(), Phase::Failed, format!("{why}; apply it again, or delete it"))
    }));
    all.retain(|vnet| scope.sees(&vnet.name));
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all.dedup_by(|a, b| a.name == b.name);
    all
}

/// Returns the tenants of a scope, with their vnets.
pub fn tenants(engine: &DaemonCore, scope: &AccessScope) -> Vec<TenantInfo> {
    let model = engine.model();
    let mine = |name: &&String| scope.tenant().is_none_or(|tenant| tenant == name.as_str());
    let infos = model.tenants.keys().filter(mine).map(|name| {
        let of = AccessScope::Tenant(name.clone());
        let object = model.tenants.get(name).cloned().map(pdp_spec::Object::Tenant);
        TenantInfo {
            name: name.clone(),
            spec: serde_json::to_value(object).unwrap_or_default(),
            vnets: model.vnets.keys().filter(|vnet| of.sees(vnet)).cloned().collect(),
            image_bytes: engine.images.bytes(name),
        }
    });
    infos.collect()
}

/// Returns one vnet.
pub fn vnet(engine: &DaemonCore, name: &str) -> Option<Vnet> {
    let model = engine.model();
    let mux = engine.host.stats(Some(name), &model.plan).ok();
    let plan = model.plan.vnets.get_key_value(name).map(|(name, plan)| (name, &**plan));
    let mirrors = ask_mirrors(engine, &model, plan.into_iter());
    let view = StatusView { engine, model: &model, mux, mirrors };
    let plan = model.plan.vnets.get(name)?;
    let spec = pdp_spec::Object::VirtualNetwork(VirtualNetwork::clone(model.vnets.get(name)?));
    Some(Vnet {
        name: name.into(),
        spec: serde_json::to_value(spec).ok()?,
        status: view.vnet(name, plan),
    })
}

/// Returns the node's own status with all allocations, without asking any process.
pub fn node_itself(engine: &DaemonCore) -> SubstrateStatus {
    let model = engine.model();
    StatusView { engine, model: &model, mux: None, mirrors: BTreeMap::new() }.substrate(|_| true)
}

/// Returns a vnet's status from the given data: the mux's counters, and
/// the mirrors' answers by socket path. `None` if the vnet is not wanted.
pub fn status(
    engine: &DaemonCore,
    name: &str,
    mux: Option<VnetStats>,
    mirrors: impl Fn(&Path) -> Option<HelperReply<mirror::MirrorStatusReply>>,
) -> Option<VnetStatus> {
    let model = engine.model();
    let plan = model.plan.vnets.get(name)?;
    let all = plan.nodes.values().filter_map(|node| node.mirror.as_ref());
    let paths = all.map(|mirror| mirror.config.control_socket.as_path());
    let mirrors = paths.filter_map(|path| Some((path, mirrors(path)?))).collect();
    let vnets = mux.into_iter().map(|stats| (name.to_owned(), stats)).collect();
    let mux = Some(Stats { vnets, ..Stats::default() });
    let view = StatusView { engine, model: &model, mux, mirrors };
    Some(view.vnet(name, plan))
}

/// Asks the mirrors of these vnets for their status, in parallel.
pub fn ask_mirrors<'a>(
    engine: &DaemonCore,
    model: &Model,
    vnets: impl Iterator<Item = (&'a String, &'a VnetPlan)>,
) -> BTreeMap<&'a Path, HelperReply<mirror::MirrorStatusReply>> {
    if model.allocations.stopped {
        return BTreeMap::new();
    }
    let mut sockets = Vec::new();
    let mut questions = Vec::new();
    for (name, plan) in vnets {
        for mirror in plan.nodes.values().filter_map(|node| node.mirror.as_ref()) {
            let path = &mirror.config.control_socket;
            let tenant = pdp_spec::tenant_of(name).map(str::to_owned);
            sockets.push(path.as_path());
            let what = MirrorClient { path: path.clone() };
            questions.push(Question { path: path.clone(), tenant, what });
        }
    }
    let answers = engine
        .late_helpers
        .query_all(&questions, |mirror: &MirrorClient, wait| mirror.status(wait));
    sockets.into_iter().zip(answers).collect()
}

impl StatusView<'_> {
    fn health(&self, key: &ObjectKey) -> Option<Health> {
        self.engine.reconcile_loop.health(key)
    }

    /// Returns a condition if hooks in a router's kernel may treat
    /// packets differently from its forwarding guests.
    fn hooks(&self, name: &str, plan: &NodePlan) -> Option<Condition> {
        let config = &plan.mirror.as_ref()?.config;
        let HelperReply::Reply(report) = self.mirrors.get(config.control_socket.as_path())? else {
            return None;
        };
        // A user's own program follows no kernel.
        if report.hooks.is_empty() || plan.followers() == 0 {
            return None;
        }
        let found = hook_words(&report.hooks);
        let message = match config.hooks {
            mirror::HookPolicy::Strict => format!(
                "{found}: affected packets take the slower path through the kernel (kernelHooks: \
                 strict)"
            ),
            mirror::HookPolicy::Ignore => {
                format!("{found}: not applied to forwarded packets (kernelHooks: ignore)")
            }
        };
        Some(Condition { kind: ConditionKind::KernelHooks, node: name.into(), message })
    }

    /// Returns a condition if a node's processes reached `processes` or
    /// `memory` of the spec since these limits were set.
    fn reached(&self, vnet: &str, name: &str, plan: &NodePlan) -> Option<Condition> {
        let node = self.model.vnets.get(vnet)?.spec.nodes.get(name)?;
        let hits = |dir: &Path| self.engine.host.runtime.limit_hits(dir).unwrap_or_default();
        let Resources { processes, memory, .. } = node.resources;
        let mut words = reached_words("resources", processes, memory, hits(&plan.control.dir));
        let plane = node.guests();
        for (number, guest) in &plan.guests {
            let Some(&Parallel { processes, memory, .. }) = plane else { break };
            let hits = hits(&guest.container.dir);
            let of_guest = reached_words("dataPlane", processes, memory, hits);
            words.extend(of_guest.into_iter().map(|words| format!("g{number} {words}")));
        }
        let message = words.join("; ");
        let kind = ConditionKind::LimitReached;
        (!words.is_empty()).then(|| Condition { kind, node: name.into(), message })
    }

    fn vnet(&self, name: &str, plan: &VnetPlan) -> VnetStatus {
        let nodes: Vec<NodeStatus> = plan
            .nodes
            .iter()
            .map(|(node, plan_node)| self.node(name, node, plan_node, plan))
            .collect();
        let problem = self.health(&ObjectKey::vnet(name)).and_then(|health| health.problem);
        let phases: Vec<Phase> = nodes.iter().map(|node| node.phase).collect();
        let phase = match problem {
            Some(_) => Phase::Failed,
            None => self.overall(name, &phases),
        };
        let up: BTreeSet<&String> =
            nodes.iter().filter(|node| node.control.pid.is_some()).map(|node| &node.name).collect();
        let now_ns = allocations::now_ns();
        let mut queues_left = QUEUES_SHOWN;
        let mut link_status = |(link, path): (&mux::Vlink, &plan::LinkPath)| {
            let schedule = link.schedule.as_ref().map(|it| schedule_status(it, now_ns));
            let now = link.at(now_ns);
            let missing = link.ends.iter().find_map(|end| self.missing(end, &up));
            let silent = plan.silent.contains(&link.name);
            let set = match (link.up, silent) {
                (true, _) => None,
                (false, false) => Some("set down".to_owned()),
                (false, true) => Some("set down, silently: its ends keep their carrier".to_owned()),
            };
            let by_schedule = (link.up && !now.up).then(|| "down by its schedule".to_owned());
            let (path, path_reason) = match path {
                plan::LinkPath::Kernel => (ForwardingPath::Kernel, None),
                plan::LinkPath::Mux(why) => (ForwardingPath::Mux, why.clone()),
            };
            LinkStatus {
                name: link.name.clone(),
                endpoints: link.ends.iter().map(|end| end_words(end, plan)).collect(),
                path,
                path_reason,
                up: link.up,
                silent,
                carrier: plan.has_carrier(link, now_ns)
                    && (missing.is_none() || link.segment.is_some()),
                message: set
                    .or(by_schedule)
                    .or(missing)
                    .or_else(|| self.underlay(name, link, plan)),
                rate_bps: now.leaving.iter().filter_map(|leaving| leaving.rate_bps).max(),
                impairments: impairments(&now, plan),
                schedule,
                queues: queues(&now, plan, &mut queues_left),
            }
        };
        let links = plan.mux.vlinks.iter().zip(&plan.paths).map(&mut link_status).collect();
        let message = problem.or_else(|| {
            let parts = nodes.iter().flat_map(|node| {
                let parts = parts(node).map(|(part, status)| (part, &status.message));
                let troubles = parts.chain(failing(node));
                troubles.map(|(what, message)| (format!("{}/{what}", node.name), message))
            });
            let trouble = |link: &mux::Vlink| {
                let wrong = link.up.then(|| self.cut_off_outside(link)).flatten();
                (link.name.clone(), wrong.or_else(|| self.underlay(name, link, plan)))
            };
            let by_link: Vec<_> = plan.mux.vlinks.iter().map(trouble).collect();
            by_cause(parts.chain(by_link.iter().map(|(link, wrong)| (link.clone(), wrong))))
        });
        let ready = phase == Phase::Running && nodes.iter().all(|node| node.ready);
        VnetStatus { phase, message, ready, links, nodes }
    }

    /// Describes a problem with the path of a link's tunnel, and its solution.
    fn underlay(&self, vnet: &str, link: &mux::Vlink, plan: &VnetPlan) -> Option<String> {
        if !link.up || self.model.allocations.stopped {
            return None;
        }
        let counters = self.mux.as_ref()?.vnets.get(vnet)?;
        let ports: Vec<_> = link
            .ports()
            .filter_map(|(node, port)| {
                let tap = plan.nodes.get(node)?.taps.get(usize::from(port))?;
                Some((node, tap.name.as_str(), tap.mtu))
            })
            .collect();
        link.ends.iter().find_map(|end| {
            let mux::VlinkEnd::External { name, interface, by } = end else { return None };
            let (node, port) = match link.is_wire() {
                true => ports.first().map(|(node, port, _)| (*node, *port))?,
                false => (mux::OUTSIDE, name.as_str()),
            };
            let problem = counters.nodes.get(node)?.ports.get(port)?.underlay?;
            let external = self.model.plan.externals.get(interface);
            let device = external.and_then(|plan| plan.device()).unwrap_or(interface);
            Some(underlay_words(problem, by.ends()?, device, &ports))
        })
    }

    /// Returns why a link's external end has no carrier.
    fn cut_off_outside(&self, link: &mux::Vlink) -> Option<String> {
        link.ends.iter().find_map(|end| match end {
            mux::VlinkEnd::Port { .. } => None,
            mux::VlinkEnd::External { interface, .. } => {
                self.cut_off(interface).map(|why| external_words(interface, &why))
            }
        })
    }

    /// Returns why an end of a link is missing.
    fn missing(&self, end: &mux::VlinkEnd, up: &BTreeSet<&String>) -> Option<String> {
        match end {
            mux::VlinkEnd::Port { node, .. } => {
                (!up.contains(node)).then(|| format!("{node} does not run"))
            }
            mux::VlinkEnd::External { interface, .. } => {
                let health = self.health(&ObjectKey::external(interface));
                let problem = health.map_or(Some("not attached yet".into()), |it| it.problem);
                let why = self.cut_off(interface).or(problem);
                why.map(|why| external_words(interface, &why))
            }
        }
    }

    /// Returns why frames can't pass the device of an external.
    fn cut_off(&self, external: &str) -> Option<String> {
        let device = self.model.plan.externals.get(external)?.device()?;
        Some(self.engine.reconcile_loop.cut_off(external)?.describe(device))
    }

    fn overall(&self, vnet: &str, phases: &[Phase]) -> Phase {
        if self.model.allocations.stopped {
            return Phase::Stopped;
        }
        if self.health(&ObjectKey::vnet(vnet)).is_none() {
            return Phase::Starting;
        }
        let count = |phase| phases.iter().filter(|&&other| other == phase).count();
        match () {
            () if count(Phase::Running) == phases.len() => Phase::Running,
            () if count(Phase::Failed) == phases.len() => Phase::Failed,
            () if count(Phase::Failed) + count(Phase::Degraded) > 0 => Phase::Degraded,
            () => Phase::Starting,
        }
    }

    fn node(&self, vnet: &str, name: &str, plan: &NodePlan, network: &VnetPlan) -> NodeStatus {
        let key = ObjectKey::node(vnet, name);
        let health = self.health(&key);
        let (health, known) = (health.as_ref(), health.is_some());
        let control = self.process(&plan.control.dir, health, known);
        let helper = |directory: &Path, role: ProcessRole| {
            let mut status = self.process(directory, None, known);
            status.restarts = health.map_or(0, |health| health.restarts[role]);
            // The helper depends on the control guest, whose own
            // message explains why that does not run.
            status.message = status.message.filter(|_| control.message.is_none());
            status
        };
        let tap = plan.tap_helper.as_ref().map(|tap| helper(&tap.process.dir, ProcessRole::Tap));
        let mirror = plan.mirror.as_ref().map(|mirror| {
            let mut status = helper(&mirror.process.dir, ProcessRole::Mirror);
            if status.phase == Phase::Running {
                match self.mirrors.get(mirror.config.control_socket.as_path()) {
                    Some(HelperReply::Reply(reply)) => {
                        status.message = refused_routes(mirror, reply.stats.routes_refused);
                    }
                    Some(HelperReply::TimedOut) => status.late = true,
                    Some(HelperReply::None) | None => {}
                }
            }
            status
        });
        let commands = self.commands(plan, control.pid.is_some());
        let management = plan
            .management
            .as_ref()
            .map(|management| helper(&management.process.dir, ProcessRole::Management));
        let counters = self.mux.as_ref().and_then(|mux| mux.vnets.get(vnet)?.nodes.get(name));
        let guests: Vec<ForwardingGuest> = plan
            .guests
            .iter()
            .map(|(&number, guest)| ForwardingGuest {
                number,
                fe: guest.placement.engine.clone(),
                share_millicores: u64::from(guest.placement.power_millicores),
                connected: counters
                    .and_then(|node| node.guests.get(&number))
                    .is_some_and(|guest| guest.connected),
                routes_synced: self.routes_synced(plan, number),
                process: self.object(&guest.container.dir, &ObjectKey::guest(vnet, name, number)),
            })
            .collect();
        let engine = counters.and_then(|node| node.engine.as_ref());
        let router = plan.kind == pdp_spec::NodeKind::Router;
        let changed = changed_ports(name, &self.engine.host.ports.changes(vnet, name));
        let limiting = counters.and_then(|node| limiting_ports(name, node));
        let mut node = NodeStatus {
            name: name.into(),
            kind: if router { NodeType::Router } else { NodeType::Host },
            data_plane: self.data_plane(vnet, name),
            labels: self.labels(vnet, name),
            phase: Phase::Failed,
            message: None,
            conditions: [self.hooks(name, plan), self.reached(vnet, name, plan), limiting, changed]
                .into_iter()
                .flatten()
                .collect(),
            ready: false,
            commands,
            power_millicores: router.then(|| {
                let placements = plan.placements().map(|it| u64::from(it.power_millicores));
                placements.sum::<u64>() + u64::from(plan.mux_millicores)
            }),
            ports: self.ports(name, plan, network, control.pid.is_some()),
            loopback: plan.loopback.iter().map(ToString::to_string).collect(),
            control,
            tap,
            mirror,
            management,
            published: published(plan),
            guests,
            engine: plan.engine.as_ref().map(|_| EngineStatus {
                synced: engine.is_some_and(|engine| engine.synced),
                routes_synced: self.routes_synced(plan, 0),
                message: engine.and_then(|engine| engine.fault.clone()),
            }),
        };
        let troubles = parts(&node).map(|(part, status)| (part, &status.message));
        let engine = node.engine.iter().map(|engine| ("mux".to_owned(), &engine.message));
        let message = by_cause(troubles.chain(failing(&node)).chain(engine));
        let all_run = parts(&node).all(|(_, status)| status.phase == Phase::Running);
        node.phase = match (self.model.allocations.stopped, node.control.phase) {
            (true, _) => Phase::Stopped,
            (false, Phase::Running) if all_run && message.is_none() => Phase::Running,
            (false, Phase::Running) if !known => Phase::Starting,
            (false, Phase::Running) => Phase::Degraded,
            (false, other) => other,
        };
        let ready = node.phase == Phase::Running
            && node.commands.iter().all(|command| command.ready)
            && node.guests.iter().all(|guest| guest.connected)
            && node.engine.iter().all(|engine| engine.synced);
        NodeStatus { message, ready, ..node }
    }

    /// Returns the status of a node's commands; empty if the version
    /// that started the node does not report it.
    fn commands(&self, plan: &NodePlan, runs: bool) -> Vec<CommandStatus> {
        match self.engine.host.runtime.commands(&plan.control.dir) {
            Ok(Some(report)) if runs => commands::commands(&plan.commands, Some(report)),
            Ok(None) if runs => Vec::new(),
            _ => commands::commands(&plan.commands, None),
        }
    }

    fn data_plane(&self, vnet: &str, node: &str) -> Option<DataPlaneKind> {
        Some(self.model.vnets.get(vnet)?.spec.nodes.get(node)?.plane()?.kind())
    }

    fn labels(&self, vnet: &str, node: &str) -> BTreeMap<String, String> {
        let node = self.model.vnets.get(vnet).and_then(|vnet| vnet.spec.nodes.get(node));
        node.map(|node| node.labels.clone()).unwrap_or_default()
    }

    /// True if a guest's routes equal the kernel's, as far as its mirror knows.
    fn routes_synced(&self, plan: &NodePlan, number: u32) -> Option<bool> {
        let path = plan.mirror.as_ref()?.config.control_socket.as_path();
        let HelperReply::Reply(report) = self.mirrors.get(path)? else { return None };
        let guest = report.stats.guests.iter().find(|guest| guest.guest == number);
        match guest {
            Some(guest) => Some(guest.synced && report.settled),
            None => {
                let mirrored = plan.guests.get(&number).is_some_and(|guest| guest.mirrored);
                (mirrored || plan.mux_follows()).then_some(false)
            }
        }
    }

    fn ports(&self, node: &str, plan: &NodePlan, vnet: &VnetPlan, runs: bool) -> Vec<PortStatus> {
        let (mut ports, now_ns) = (Vec::new(), allocations::now_ns());
        for (index, tap) in plan.taps.iter().enumerate() {
            let link = vnet.link_of(node, index as u16);
            let is_cut_off =
                |link| VnetPlan::cut_off_by(link).any(|name| self.cut_off(name).is_some());
            ports.push(PortStatus {
                name: tap.name.clone(),
                mac: mac(tap.mac),
                mtu_bytes: tap.mtu,
                addresses: tap.addresses.iter().map(ToString::to_string).collect(),
                link: link.map(|link| link.name.clone()),
                carrier: runs
                    && link.is_some_and(|link| vnet.has_carrier(link, now_ns) && !is_cut_off(link)),
            });
        }
        ports
    }

    fn object(&self, directory: &Path, key: &ObjectKey) -> ProcessStatus {
        let health = self.health(key);
        self.process(directory, health.as_ref(), health.is_some())
    }

    fn process(&self, directory: &Path, health: Option<&Health>, known: bool) -> ProcessStatus {
        let pid = self.engine.host.running(directory).map(|process| process.pid);
        // The name of the guest is shown next to it.
        let id = directory.file_name().unwrap_or_default().to_string_lossy();
        let own = |problem: &String| problem.replace(&format!("guest {id}: "), "");
        let problem = health.and_then(|health| health.problem.as_ref()).map(own);
        let phase = match (pid, &problem) {
            (Some(_), _) => Phase::Running,
            (None, _) if self.model.allocations.stopped => Phase::Stopped,
            (None, Some(_)) => Phase::Failed,
            (None, None) if known => Phase::Failed,
            (None, None) => Phase::Starting,
        };
        let message = problem.or_else(|| {
            (phase == Phase::Failed).then(|| match self.engine.host.runtime.state(directory) {
                Ok(GuestState::Absent) => "not started yet".to_owned(),
                _ => format!("ended {}", self.engine.host.ending(directory)),
            })
        });
        let restarts = health.map_or(0, |health| health.restarts[ProcessRole::Main]);
        ProcessStatus { phase, pid, restarts, message, late: false }
    }

    /// Returns the status of the substrate, with fast paths of the
    /// vnets for which `sees` returns true.
    fn substrate(&self, sees: impl Fn(&str) -> bool) -> SubstrateStatus {
        let spec = self.model.effective_substrate(&self.engine.cpus).spec;
        let mux = match &self.model.plan.mux {
            Some(plan) => self.object(&plan.process.dir, &ObjectKey::Mux),
            None => ProcessStatus::default(),
        };
        let mut used: BTreeMap<&str, Vec<FeGuest>> = BTreeMap::new();
        for (vnet, allocation) in &*self.model.allocations.vnets {
            for (node, guests) in &allocation.guests {
                for (&number, placement) in guests {
                    used.entry(&placement.engine).or_default().push(FeGuest {
                        vnet: vnet.clone(),
                        node: node.clone(),
                        number,
                        share_millicores: u64::from(placement.power_millicores),
                    });
                }
            }
        }
        let mut fes = Vec::new();
        for (name, engine) in &spec.forwarding_engines {
            let guests = used.remove(name.as_str()).unwrap_or_default();
            fes.push(FeStatus {
                name: name.clone(),
                cpus: engine.cpus.to_string(),
                capacity_millicores: u64::from(engine.capacity.0),
                used_millicores: guests.iter().map(|guest| guest.share_millicores).sum(),
                guests,
            });
        }
        let mut externals = Vec::new();
        for (name, interface) in &spec.interfaces {
            let health = self.health(&ObjectKey::external(name));
            let problem = health.as_ref().and_then(|health| health.problem.clone());
            let (outlet, mtu_bytes) = match interface.outlet() {
                Some(ExternalForm::Device(device, _)) => {
                    (device.into(), InterfaceInfo::by_name(device).ok().map(|device| device.mtu))
                }
                Some(ExternalForm::Memif(memif)) => {
                    let socket = self.engine.host.places.external_memif(name);
                    (format!("memif {}", socket.display()), Some(memif.mtu))
                }
                Some(ExternalForm::Generator(_)) => ("generator".into(), Some(MTU_MAX)),
                None => continue,
            };
            let cut_off = self.cut_off(name);
            let loses = self.engine.reconcile_loop.loses_long_frames(name).then(|| {
                format!(
                    "{outlet} has no native XDP: it drops frames that rely on its segmentation \
                     offload; give attach: packet"
                )
            });
            let instead = self
                .engine
                .reconcile_loop
                .instead_of_xdp(name)
                .map(|why| format!("packet sockets replace AF_XDP, and are slower ({why})"));
            let attached = health.is_some() && problem.is_none();
            let present = interface.device.is_some() && mtu_bytes.is_some();
            let carrier = present.then_some(cut_off.is_none());
            let notes: Vec<String> =
                problem.or(cut_off).into_iter().chain(loses).chain(instead).collect();
            externals.push(ExternalStatus {
                name: name.clone(),
                device: outlet,
                mtu_bytes,
                attached,
                carrier,
                message: Some(notes.join("; ")).filter(|text| !text.is_empty()),
            });
        }
        let (fastpaths, _) = spec.mux.fastpath_power();
        let seen = self.model.plan.vnets.iter().filter(|(name, _)| sees(name));
        let nodes = seen.flat_map(|(_, vnet)| vnet.nodes.values());
        let fastpaths = FastpathPower {
            capacity_millicores: u64::from(fastpaths.0),
            used_millicores: nodes.map(|node| u64::from(node.mux_millicores)).sum(),
        };
        let plan = self.model.wanted();
        let gone = self.engine.reconcile_loop.problems(|key| !plan.has(key));
        let wrong: Vec<String> = externals
            .iter()
            // PdP can do nothing about a missing carrier.
            .filter(|external| !external.attached)
            .filter_map(|external| {
                external.message.as_ref().map(|text| format!("{}: {text}", external.name))
            })
            .chain(mux.message.iter().map(|text| format!("mux: {text}")))
            .chain(gone.iter().map(|(key, text)| format!("{key} can't be removed: {text}")))
            .collect();
        let phase = match mux.phase {
            Phase::Running if !wrong.is_empty() => Phase::Degraded,
            other => other,
        };
        let message = Some(wrong.join("; ")).filter(|text| !text.is_empty());
        SubstrateStatus { phase, message, mux, fastpaths, fes, externals }
    }
}

/// Returns the processes of a node.
fn parts(node: &NodeStatus) -> impl Iterator<Item = (String, &ProcessStatus)> {
    let own = [
        ("control", Some(&node.control)),
        ("tap", node.tap.as_ref()),
        ("mirror", node.mirror.as_ref()),
        ("management", node.management.as_ref()),
    ];
    let own = own.into_iter().filter_map(|(name, status)| Some((name.to_owned(), status?)));
    own.chain(node.guests.iter().map(|guest| (format!("g{}", guest.number), &guest.process)))
}

/// Returns the failing commands of a node.
fn failing(node: &NodeStatus) -> impl Iterator<Item = (String, &Option<String>)> {
    let failing = node.commands.iter().filter(|command| command.troubled);
    failing.map(|command| (command.name.clone(), &command.message))
}

/// Most ports that a condition names.
const PORTS_NAMED: usize = 4;

/// Returns a condition for a node at whose ports limits of the spec drop packets now.
fn limiting_ports(node: &str, counters: &NodeStats) -> Option<Condition> {
    let mut ports: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (port, counted) in &counters.ports {
        for reason in &counted.limiting {
            let key = match reason.strip_prefix("punt-limit-") {
                Some(class) => format!("puntLimits.{class}"),
                None => "floodPps of its link".into(),
            };
            ports.entry(key).or_default().push(port);
        }
    }
    let words = ports.iter().map(|(key, ports)| {
        let named = ports[..ports.len().min(PORTS_NAMED)].join(", ");
        let more = if ports.len() > PORTS_NAMED { ", …" } else { "" };
        format!("{named}{more}: {key} drops packets")
    });
    let words: Vec<_> = words.collect();
    (!words.is_empty()).then(|| Condition {
        kind: ConditionKind::LimitDrops,
        node: node.into(),
        message: format!("{}; raise the limit, or send less", words.join("; ")),
    })
}

/// Describes the refusals by the limits of processes and memory, which
/// are keys of `of` in the spec.
fn reached_words(of: &str, processes: u32, memory: Bytes, hits: LimitHits) -> Vec<String> {
    // Large counts are rounded down, since each new text is an event for all watchers.
    let count = |count: u64| match count {
        0..10 => count.to_string(),
        _ => format!("at least {}", 10_u64.pow(count.ilog10())),
    };
    let LimitHits { memory_kills, processes_refused } = hits;
    let refused = (processes_refused > 0).then(|| {
        format!(
            "reached {of}.processes ({processes}): the kernel refused processes or threads {}; \
             raise it",
            pdp_spec::count(count(processes_refused), "time")
        )
    });
    let killed = (memory_kills > 0).then(|| {
        format!(
            "reached {of}.memory ({memory}): the kernel killed {} of its processes; raise it",
            count(memory_kills)
        )
    });
    refused.into_iter().chain(killed).collect()
}

/// Describes ports that a guest changed.
fn changed_ports(node: &str, changed: &[(String, Vec<InnerEndChange>)]) -> Option<Condition> {
    let each = changed.iter().map(|(port, changes)| {
        let words = changes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        // The name may contain any bytes.
        format!("port {port}: {}", words.escape_debug())
    });
    let message = each.collect::<Vec<_>>().join("; ") + " (by the guest itself)";
    let node = node.into();
    (!changed.is_empty()).then_some(Condition { kind: ConditionKind::PortChanged, node, message })
}

/// Returns the machine's ports that lead into a node.
fn published(plan: &NodePlan) -> Vec<String> {
    let ports = plan.management.iter().flat_map(|management| &management.config.ports);
    ports.map(|&port| PublishedPort(port).to_string()).collect()
}

fn external_words(name: &str, why: &str) -> String {
    format!("external {name}: {why}")
}

/// Describes problems by their objects. A cause that several objects have in common appears once.
fn by_cause<'a>(all: impl Iterator<Item = (String, &'a Option<String>)>) -> Option<String> {
    let mut causes: Vec<(&str, Vec<String>)> = Vec::new();
    for (name, cause) in all.filter_map(|(name, cause)| Some((name, cause.as_deref()?))) {
        match causes.iter_mut().find(|(known, _)| *known == cause) {
            Some((_, names)) => names.push(name),
            None => causes.push((cause, vec![name])),
        }
    }
    let texts = causes.iter().map(|(cause, names)| format!("{}: {cause}", names.join(", ")));
    Some(texts.collect::<Vec<_>>().join("; ")).filter(|text| !text.is_empty())
}

/// Describes routes that a mirror does not pass on.
fn refused_routes(plan: &MirrorPlan, refused: u64) -> Option<String> {
    let max = plan.config.routes_max;
    (refused > 0).then(|| {
        format!(
            "{refused} of the kernel's routes are not in the forwarding guests: \
             resources.routes is {max}; raise it"
        )
    })
}

/// Describes the problem of a tunnel between these addresses over `device` whose
/// frames do not reach the other end. `ports` are this end's, with their MTUs.
fn underlay_words(
    problem: UnderlayProblem,
    (local, remote): (IpAddr, IpAddr),
    device: &str,
    ports: &[(&str, &str, u32)],
) -> String {
    use UnderlayProblem as Problem;
    let protocol = if remote.is_ipv4() { "ARP" } else { "neighbour discovery" };
    match problem {
        Problem::Down => format!("device {device} is down: `ip link set {device} up`"),
        Problem::NoCarrier => format!(
            "device {device} has no carrier: check its cable and the device at its other end"
        ),
        Problem::NoAddress => format!(
            "{local} is not an address of this machine: `ip address add {local}/PREFIX dev \
             {device}`"
        ),
        Problem::NoRoute => {
            format!("no route to {remote} over {device}: add one, or an address of its network")
        }
        Problem::Unanswered { router: false } => format!(
            "{remote} does not answer {protocol} on {device}: check that it is up and on this \
             network"
        ),
        Problem::Unanswered { router: true } => format!(
            "the router on the path to {remote} does not answer {protocol} on {device}: see `ip \
             route get {remote}`"
        ),
        Problem::PathMtu { path_bytes, packet_bytes } => {
            let mtu = ports.iter().map(|(_, _, mtu)| *mtu).max().unwrap_or(0);
            let fits = mtu.saturating_sub(packet_bytes.saturating_sub(path_bytes));
            let names: Vec<_> =
                ports.iter().map(|(node, port, _)| format!("{node}:{port}")).collect();
            let to_do = match names.is_empty() {
                true => "longer ones are dropped".to_owned(),
                false => format!("set the mtu of {} to at most {fits}", names.join(", ")),
            };
            format!(
                "the path to {remote} carries packets up to {path_bytes} bytes, this link's have \
                 up to {packet_bytes}: {to_do}"
            )
        }
    }
}

/// Describes the hooks that a mirror reports, within the mirror's
/// limits. The mirror may be compromised.
fn hook_words(hooks: &[String]) -> String {
    // One more entry contains the number of the rest.
    let hooks = hooks.iter().take(mirror::HOOKS_MAX + 1).map(|words| mirror::hook_words(words));
    hooks.collect::<Vec<_>>().join("; ")
}

/// Returns an end of a link in the notation of specs.
pub fn endpoint(end: &mux::VlinkEnd, plan: &VnetPlan) -> String {
    match end {
        mux::VlinkEnd::Port { node, port } => {
            let tap = plan.nodes.get(node).and_then(|plan| plan.taps.get(usize::from(*port)));
            format!("{node}:{}", tap.map_or("?", |tap| tap.name.as_str()))
        }
        mux::VlinkEnd::External { name, .. } => format!("{}:{name}", mux::OUTSIDE),
    }
}

fn schedule_status(schedule: &mux::Schedule, now_ns: u64) -> ScheduleStatus {
    let next = schedule.steps.get(schedule.done(now_ns));
    ScheduleStatus {
        elapsed_ms: now_ns.saturating_sub(schedule.began_ns) / 1_000_000,
        steps: schedule.steps.len(),
        done: schedule.done(now_ns),
        next_ms: next.map(|step| step.at_ns / 1_000_000),
    }
}

/// Most queues of a network's links that are shown. There may be many
/// more, and watchers get an update at each change.
const QUEUES_SHOWN: usize = 1024;

/// Describes a link's impairments: of all ends if they are equal, or of each end that has some.
fn impairments(link: &mux::Vlink, plan: &VnetPlan) -> String {
    let each: Vec<_> = link.leaving.iter().map(|it| impairment_words(&it.impairments)).collect();
    if each.windows(2).all(|two| two[0] == two[1]) {
        return each.into_iter().next().unwrap_or_default();
    }
    let ends = link.ends.iter().zip(each).filter(|(_, words)| !words.is_empty());
    let words = ends.map(|(end, words)| format!("{}: {words}", endpoint(end, plan)));
    words.collect::<Vec<_>>().join("; ")
}

/// Returns the queues at a link's ends, at most `left`.
fn queues(link: &mux::Vlink, plan: &VnetPlan, left: &mut usize) -> Vec<QueueStatus> {
    let ends = link.ends.iter().zip(&link.leaving).zip(&link.queues);
    let each = ends.flat_map(|((end, leaving), queues)| {
        queues.iter().map(move |queue| {
            let (frames, bytes) = match (queue.frames, queue.bytes) {
                (0, 0) => (leaving.queue_frames, leaving.queue_bytes),
                given => given,
            };
            QueueStatus {
                end: end_words(end, plan),
                name: queue.name.clone(),
                weight: queue.weight,
                frames,
                bytes: Some(bytes).filter(|bytes| *bytes > 0),
                buffers: queue.buffers,
                dscp: queue.dscp.clone(),
            }
        })
    });
    let shown: Vec<_> = each.take(*left).collect();
    *left -= shown.len();
    shown
}

fn impairment_words(what: &mux::Impairments) -> String {
    let spans = [("delay", what.delay_ns), ("jitter", what.jitter_ns)];
    let shares = [
        ("loss", what.loss),
        ("reorder", what.reorder),
        ("corrupt", what.corrupt),
        ("duplicate", what.duplicate),
    ];
    let spans = spans.iter().filter(|(_, ns)| *ns > 0);
    let shares = shares.iter().filter(|(_, share)| share.0 > 0);
    let words = spans.map(|(name, ns)| format!("{name} {}", Span(*ns)));
    let words = words.chain(shares.map(|(name, share)| format!("{name} {}", Percent(share.0))));
    words.collect::<Vec<_>>().join(", ")
}

fn end_words(end: &mux::VlinkEnd, plan: &VnetPlan) -> String {
    match end {
        mux::VlinkEnd::Port { .. } => endpoint(end, plan),
        mux::VlinkEnd::External { interface, by: mux::Encapsulation::Interface, .. } => {
            interface.clone()
        }
        mux::VlinkEnd::External { interface, by, .. } => format!("{interface} ({by})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_model::PortStats;

    #[test]
    fn port_changes_are_described_without_control_characters() {
        assert_eq!(changed_ports("r1", &[]), None);
        let renamed = vec![InnerEndChange::Renamed("\u{1b}[2J".into()), InnerEndChange::Down];
        let changed =
            [("eth0".into(), renamed), ("eth1".into(), vec![InnerEndChange::Resized(1400)])];
        let condition = changed_ports("r1", &changed).expect("a condition");
        assert_eq!((condition.kind, &*condition.node), (ConditionKind::PortChanged, "r1"));
        let words = "port eth0: renamed to \\u{1b}[2J, set down; port eth1: its MTU set to 1400 (by the guest itself)";
        assert_eq!(condition.message, words);
    }

    #[test]
    fn limits_that_drop_packets_are_named_with_their_ports() {
        let port = |limiting: &[&str]| PortStats {
            limiting: limiting.iter().map(|it| (*it).to_owned()).collect(),
            ..PortStats::default()
        };
        let mut counters = NodeStats::default();
        counters.ports.insert("eth0".into(), port(&[]));
        assert_eq!(limiting_ports("r1", &counters), None);
        counters.ports.insert("eth9".into(), port(&["punt-limit-hook", "flood-limit"]));
        for name in ["eth1", "eth2", "eth3", "eth4", "eth5"] {
            counters.ports.insert(name.into(), port(&["punt-limit-hook"]));
        }
        let condition = limiting_ports("r1", &counters).expect("a condition");
        assert_eq!((condition.kind, &*condition.node), (ConditionKind::LimitDrops, "r1"));
        let words = "eth9: floodPps of its link drops packets; eth1, eth2, eth3, eth4, …: puntLimits.hook drops packets; \
                     raise the limit, or send less";
        assert_eq!(condition.message, words);
    }

    #[test]
    fn reached_limits_name_their_spec_keys() {
        let reached = |memory_kills, processes_refused| {
            let hits = LimitHits { memory_kills, processes_refused };
            reached_words("resources", 256, Bytes(64 << 20), hits)
        };
        assert_eq!(reached(0, 0), [""; 0]);
        let refused = |count| {
            format!(
                "reached resources.processes (256): the kernel refused processes or threads \
                 {count}; raise it"
            )
        };
        assert_eq!(reached(0, 1), [refused("1 time")]);
        assert_eq!(reached(0, 9), [refused("9 times")]);
        let killed =
            "reached resources.memory (64Mi): the kernel killed 1 of its processes; raise it";
        assert_eq!(reached(1, 1_234), [refused("at least 1000 times"), killed.into()]);
    }

    #[test]
    fn shared_cause_is_reported_once() {
        let [a, b] = ["no room", "ended"].map(|cause| Some(cause.to_owned()));
        let all = [("h1", &a), ("h2", &None), ("r1", &b), ("r2", &a)];
        let text = by_cause(all.into_iter().map(|(name, cause)| (name.to_owned(), cause)));
        assert_eq!(text.as_deref(), Some("h1, r2: no room; r1: ended"));
        assert_eq!(by_cause([("h2".to_owned(), &None)].into_iter()), None);
    }

    #[test]
    fn hook_texts_of_hostile_mirrors_are_sanitized() {
        let hooks = vec![format!("\u{1b}[2J{}", "é".repeat(1 << 10)); 1 << 10];
        let text = hook_words(&hooks);
        assert!(text.starts_with("[2Jé") && !text.contains(char::is_control), "{text}");
        let words = text.split("; ").map(str::len).collect::<Vec<_>>();
        assert_eq!(words, [mirror::HOOK_BYTES_MAX - 1; mirror::HOOKS_MAX + 1]);
    }
}
