//! How objects are, for the API: what is wanted beside what the keeper last saw and what runs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use pdp_api::{
    ExternalStatus, FeGuest, FeStatus, ForwardingGuest, LinkStatus, NodeKind, NodeStatus, Phase,
    PortStatus, ProcessStatus, Substrate, SubstrateStatus, TenantInfo, Vnet, VnetStatus,
    VnetSummary,
};
use pdp_net::interface::Interface;
use pdp_proto::mux;
use pdp_spec::limits::MTU_MAX;
use pdp_spec::{Outlet, VirtualNetwork};

use crate::access::Scope;
use crate::ask::{Answer, Question};
use crate::control::Mirror;
use crate::engine::Engine;
use crate::keeper::Health;
use crate::key::Key;
use crate::model::Model;
use crate::plan::{ExternalPlan, MirrorPlan, NodePlan, VnetPlan};

/// What it is told from.
struct View<'a> {
    engine: &'a Engine,
    model: &'a Model,
    mux: Option<mux::Stats>,
    /// Routes that mirrors do not pass on, by where they listen.
    refused: BTreeMap<&'a Path, Answer<u64>>,
}

/// The substrate; of it, for a tenant, what its vnets may use, with nothing of others.
pub fn substrate(engine: &Engine, scope: &Scope) -> Substrate {
    let model = engine.model();
    let mux = engine.host.mux.stats(Some("")).ok();
    let view = View { engine, model: &model, mux, refused: BTreeMap::new() };
    let status = view.substrate();
    if let Some(tenant) = scope.tenant() {
        let granted = model.tenants.get(tenant).map(|tenant| &tenant.spec.interfaces);
        return of_tenant(status, scope, |name| granted.is_some_and(|all| all.contains_key(name)));
    }
    Substrate {
        spec: model
            .substrate
            .as_ref()
            .and_then(|spec| serde_json::to_value(pdp_spec::Object::Substrate(spec.clone())).ok()),
        status,
    }
}

/// What a tenant may know of a substrate.
fn of_tenant(
    mut status: SubstrateStatus,
    scope: &Scope,
    granted: impl Fn(&str) -> bool,
) -> Substrate {
    for engine in &mut status.fes {
        engine.guests.retain(|guest| scope.sees(&guest.vnet));
        engine.used_millicores = engine.guests.iter().map(|guest| guest.share_millicores).sum();
    }
    status.externals.retain(|external| granted(&external.name));
    status.message = None;
    status.mux = ProcessStatus { phase: status.mux.phase, ..ProcessStatus::default() };
    status.phase = status.mux.phase;
    Substrate { spec: None, status }
}

/// All vnets of a scope.
pub fn vnets(engine: &Engine, scope: &Scope) -> Vec<VnetSummary> {
    let model = engine.model();
    let vnets = model.plan.vnets.iter().filter(|(name, _)| scope.sees(name));
    let refused = refused(engine, &model, vnets.clone().map(|(name, plan)| (name, &**plan)));
    let mux = engine.host.mux.stats(None).ok();
    let view = View { engine, model: &model, mux, refused };
    vnets.map(|(name, plan)| view.summary(name, plan)).collect()
}

/// Tenants of a scope, with their vnets.
pub fn tenants(engine: &Engine, scope: &Scope) -> Vec<TenantInfo> {
    let model = engine.model();
    let mine = |name: &&String| scope.tenant().is_none_or(|tenant| tenant == name.as_str());
    let infos = model.tenants.keys().filter(mine).map(|name| {
        let of = Scope::Tenant(name.clone());
        let object = model.tenants.get(name).cloned().map(pdp_spec::Object::Tenant);
        TenantInfo {
            name: name.clone(),
            spec: serde_json::to_value(object).unwrap_or_default(),
            vnets: model.vnets.keys().filter(|vnet| of.sees(vnet)).cloned().collect(),
        }
    });
    infos.collect()
}

/// One vnet.
pub fn vnet(engine: &Engine, name: &str) -> Option<Vnet> {
    let model = engine.model();
    let mux = engine.host.mux.stats(Some(name)).ok();
    let plan = model.plan.vnets.get_key_value(name).map(|(name, plan)| (name, &**plan));
    let refused = refused(engine, &model, plan.into_iter());
    let view = View { engine, model: &model, mux, refused };
    let plan = model.plan.vnets.get(name)?;
    let spec = pdp_spec::Object::VirtualNetwork(VirtualNetwork::clone(model.vnets.get(name)?));
    Some(Vnet {
        name: name.into(),
        spec: serde_json::to_value(spec).ok()?,
        status: view.vnet(name, plan),
    })
}

/// How many routes the mirrors of these vnets do not pass on, asked side by side.
fn refused<'a>(
    engine: &Engine,
    model: &Model,
    vnets: impl Iterator<Item = (&'a String, &'a VnetPlan)>,
) -> BTreeMap<&'a Path, Answer<u64>> {
    if model.ledger.stopped {
        return BTreeMap::new();
    }
    let mut sockets = Vec::new();
    let mut questions = Vec::new();
    for (name, plan) in vnets {
        for mirror in plan.nodes.values().filter_map(|node| node.mirror.as_ref()) {
            let path = &mirror.config.control_socket;
            let tenant = pdp_spec::tenant_of(name).map(str::to_owned);
            sockets.push(path.as_path());
            let what = Mirror { path: path.clone() };
            questions.push(Question { path: path.clone(), tenant, what });
        }
    }
    let ask = |mirror: &Mirror, wait| mirror.status(wait).map(|status| status.routes_refused);
    sockets.into_iter().zip(engine.late.ask(&questions, ask)).collect()
}

impl View<'_> {
    fn health(&self, key: &Key) -> Option<Health> {
        self.engine.keeper.health(key)
    }

    fn summary(&self, name: &str, plan: &VnetPlan) -> VnetSummary {
        let status = self.vnet(name, plan);
        let guests = || status.nodes.iter().flat_map(|node| &node.guests);
        let fes: BTreeSet<&String> = guests().map(|guest| &guest.fe).collect();
        let routers = status.nodes.iter().filter(|node| node.kind == NodeKind::Router).count();
        VnetSummary {
            name: name.into(),
            phase: status.phase,
            routers: routers as u32,
            hosts: (status.nodes.len() - routers) as u32,
            links: status.links.len() as u32,
            guests_connected: guests().filter(|guest| guest.connected).count() as u32,
            guests: guests().count() as u32,
            power_millicores: status.nodes.iter().filter_map(|node| node.power_millicores).sum(),
            fes: fes.into_iter().cloned().collect(),
            late: status.nodes.iter().filter_map(|node| node.mirror.as_ref()).any(|m| m.late),
            message: status.message,
        }
    }

    fn vnet(&self, name: &str, plan: &VnetPlan) -> VnetStatus {
        let nodes: Vec<NodeStatus> = plan
            .nodes
            .iter()
            .map(|(node, plan_node)| self.node(name, node, plan_node, plan))
            .collect();
        let problem = self.health(&Key::vnet(name)).and_then(|health| health.problem);
        let phases: Vec<Phase> = nodes.iter().map(|node| node.phase).collect();
        let phase = match problem {
            Some(_) => Phase::Failed,
            None => self.overall(name, &phases),
        };
        let up: BTreeSet<&String> =
            nodes.iter().filter(|node| node.control.pid.is_some()).map(|node| &node.name).collect();
        let links = plan.mux.vlinks.iter().map(|link| LinkStatus {
            name: link.name.clone(),
            endpoints: vec![end_words(&link.a, plan), end_words(&link.b, plan)],
            up: link.up,
            carrier: link.up && self.is_there(&link.a, &up) && self.is_there(&link.b, &up),
            rate_bps: link.rate_bps,
            message: self.underlay(name, link, plan),
        });
        let links: Vec<LinkStatus> = links.collect();
        let message = problem.or_else(|| {
            let nodes = nodes.iter().map(|node| (&node.name, &node.message));
            let all = nodes.chain(links.iter().map(|link| (&link.name, &link.message)));
            let wrong = all.filter_map(|(name, text)| Some(format!("{name}: {}", text.as_ref()?)));
            Some(wrong.collect::<Vec<_>>().join("; ")).filter(|text| !text.is_empty())
        });
        VnetStatus { phase, message, links, nodes }
    }

    /// What is wrong with the way of a link's tunnel, and what to do.
    fn underlay(&self, vnet: &str, link: &mux::Vlink, plan: &VnetPlan) -> Option<String> {
        if !link.up || self.model.ledger.stopped {
            return None;
        }
        let counters = self.mux.as_ref()?.vnets.get(vnet)?;
        [(&link.a, &link.b), (&link.b, &link.a)].into_iter().find_map(|(near, far)| {
            let mux::End::Port { node, port } = near else { return None };
            let mux::End::External { interface, by } = far else { return None };
            let tap = plan.nodes.get(node)?.taps.get(usize::from(*port))?;
            let problem = counters.nodes.get(node)?.ports.get(&tap.name)?.underlay?;
            let device = match self.model.plan.externals.get(interface).map(|plan| &**plan) {
                Some(ExternalPlan::Device(device)) => &device.device,
                _ => interface,
            };
            let (local, remote) = match by {
                mux::Encapsulation::Interface => return None,
                mux::Encapsulation::Vxlan { local, remote, .. }
                | mux::Encapsulation::Udp { local, remote, .. } => (*local, *remote),
            };
            Some(underlay_words(problem, (local, remote), device, &end_words(near, plan), tap.mtu))
        })
    }

    fn is_there(&self, end: &mux::End, up: &BTreeSet<&String>) -> bool {
        match end {
            mux::End::Port { node, .. } => up.contains(node),
            mux::End::External { interface, .. } => self
                .health(&Key::external(interface))
                .is_some_and(|health| health.problem.is_none()),
        }
    }

    fn overall(&self, vnet: &str, phases: &[Phase]) -> Phase {
        if self.model.ledger.stopped {
            return Phase::Stopped;
        }
        if self.health(&Key::vnet(vnet)).is_none() {
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
        let key = Key::node(vnet, name);
        let health = self.health(&key);
        let (health, known) = (health.as_ref(), health.is_some());
        let control = self.process(&plan.control.dir, health, known);
        let helper = |directory: &Path, restarts: Option<u64>| ProcessStatus {
            restarts: restarts.unwrap_or(0),
            ..self.process(directory, None, known)
        };
        let tap = plan
            .tap_helper
            .as_ref()
            .map(|tap| helper(&tap.process.dir, health.map(|health| health.tap_restarts)));
        let mirror = plan.mirror.as_ref().map(|mirror| {
            let mut status =
                helper(&mirror.process.dir, health.map(|health| health.mirror_restarts));
            if status.phase == Phase::Running {
                match self.refused.get(mirror.config.control_socket.as_path()) {
                    Some(Answer::Said(count)) => status.message = refused_routes(mirror, *count),
                    Some(Answer::Late) => status.late = true,
                    Some(Answer::None) | None => {}
                }
            }
            status
        });
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
                process: self.object(&guest.container.dir, &Key::guest(vnet, name, number)),
            })
            .collect();
        let mut parts = vec![("control".to_string(), &control)];
        parts.extend(tap.iter().map(|part| ("tap".to_string(), part)));
        parts.extend(mirror.iter().map(|part| ("mirror".to_string(), part)));
        parts.extend(guests.iter().map(|guest| (format!("g{}", guest.number), &guest.process)));
        let wrong: Vec<String> = parts
            .iter()
            .filter_map(|(part, status)| {
                status.message.as_ref().map(|message| format!("{part}: {message}"))
            })
            .collect();
        let all_run = parts.iter().all(|(_, status)| status.phase == Phase::Running);
        let phase = match (self.model.ledger.stopped, control.phase) {
            (true, _) => Phase::Stopped,
            (false, Phase::Running) if all_run && wrong.is_empty() => Phase::Running,
            (false, Phase::Running) if !known => Phase::Starting,
            (false, Phase::Running) => Phase::Degraded,
            (false, other) => other,
        };
        NodeStatus {
            name: name.into(),
            kind: if plan.mirror.is_some() { NodeKind::Router } else { NodeKind::Host },
            phase,
            message: Some(wrong.join("; ")).filter(|text| !text.is_empty()),
            power_millicores: plan
                .mirror
                .is_some()
                .then(|| guests.iter().map(|guest| guest.share_millicores).sum()),
            ports: ports(name, plan, network, control.pid.is_some()),
            control,
            tap,
            mirror,
            guests,
        }
    }

    fn object(&self, directory: &Path, key: &Key) -> ProcessStatus {
        let health = self.health(key);
        self.process(directory, health.as_ref(), health.is_some())
    }

    fn process(&self, directory: &Path, health: Option<&Health>, known: bool) -> ProcessStatus {
        let pid = self.engine.host.running(directory).map(|process| process.pid);
        let problem = health.and_then(|health| health.problem.clone());
        let phase = match (pid, &problem) {
            (Some(_), _) => Phase::Running,
            (None, _) if self.model.ledger.stopped => Phase::Stopped,
            (None, Some(_)) => Phase::Failed,
            (None, None) if known => Phase::Failed,
            (None, None) => Phase::Starting,
        };
        let message = problem.or_else(|| {
            (phase == Phase::Failed)
                .then(|| format!("ended {}", self.engine.host.ending(directory)))
        });
        let restarts = health.map_or(0, |health| health.restarts);
        ProcessStatus { phase, pid, restarts, message, late: false }
    }

    fn substrate(&self) -> SubstrateStatus {
        let spec = self.model.effective_substrate(&self.engine.cpus).spec;
        let mux = match &self.model.plan.mux {
            Some(plan) => self.object(&plan.process.dir, &Key::Mux),
            None => ProcessStatus::default(),
        };
        let mut used: BTreeMap<&str, Vec<FeGuest>> = BTreeMap::new();
        for (vnet, holding) in &*self.model.ledger.vnets {
            for (node, guests) in &holding.guests {
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
            let health = self.health(&Key::external(name));
            let problem = health.as_ref().and_then(|health| health.problem.clone());
            let (outlet, mtu_bytes) = match interface.outlet() {
                Some(Outlet::Device(device, _)) => {
                    (device.into(), Interface::by_name(device).ok().map(|device| device.mtu))
                }
                Some(Outlet::Memif(memif)) => {
                    let socket = self.engine.host.places.external_memif(name);
                    (format!("memif {}", socket.display()), Some(memif.mtu))
                }
                Some(Outlet::Generator(_)) => ("generator".into(), Some(MTU_MAX)),
                None => continue,
            };
            externals.push(ExternalStatus {
                name: name.clone(),
                device: outlet,
                mtu_bytes,
                attached: health.is_some() && problem.is_none(),
                message: problem,
            });
        }
        let plan = self.model.wanted();
        let gone = self.engine.keeper.problems(|key| !plan.has(key));
        let wrong: Vec<String> = externals
            .iter()
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
        SubstrateStatus { phase, message, mux, fes, externals }
    }
}

/// What is to be said of routes that a mirror does not pass on.
fn refused_routes(plan: &MirrorPlan, refused: u64) -> Option<String> {
    let max = plan.config.routes_max;
    (refused > 0).then(|| {
        format!(
            "{refused} of the kernel's routes are not in the forwarding guests: \
             resources.routes is {max}; raise it"
        )
    })
}

/// What is to be said of a tunnel between these addresses over `device` whose frames do not get to its
/// other end; `port` is this one, and `mtu` its MTU.
fn underlay_words(
    problem: mux::UnderlayProblem,
    (local, remote): (IpAddr, IpAddr),
    device: &str,
    port: &str,
    mtu: u32,
) -> String {
    use mux::UnderlayProblem as Problem;
    let asked = if remote.is_ipv4() { "ARP" } else { "neighbour discovery" };
    match problem {
        Problem::Down => format!("device {device} is down: `ip link set {device} up`"),
        Problem::NoCarrier => format!(
            "device {device} has no carrier: see to its cable, or to what is at its other end"
        ),
        Problem::NoAddress => format!(
            "{local} is no address of this machine: `ip address add {local}/PREFIX dev {device}`"
        ),
        Problem::NoRoute => format!(
            "there is no route to {remote} by {device}: add one, or an address of its network"
        ),
        Problem::Unanswered { router: false } => format!(
            "{remote} does not answer {asked} on {device}: see whether it is up and on this network"
        ),
        Problem::Unanswered { router: true } => format!(
            "the router on the way to {remote} does not answer {asked} on {device}: see \
             `ip route get {remote}`"
        ),
        Problem::PathMtu { path_bytes, packet_bytes } => {
            let fits = mtu.saturating_sub(packet_bytes.saturating_sub(path_bytes));
            format!(
                "the way to {remote} carries packets of {path_bytes} bytes, and those of this link \
                 have up to {packet_bytes}: set the mtu of {port} to at most {fits}"
            )
        }
    }
}

fn ports(node: &str, plan: &NodePlan, vnet: &VnetPlan, runs: bool) -> Vec<PortStatus> {
    let mut ports = Vec::new();
    for (index, tap) in plan.taps.iter().enumerate() {
        let link = vnet.link_of(node, index as u16);
        let mac: Vec<String> = tap.mac.iter().map(|byte| format!("{byte:02x}")).collect();
        ports.push(PortStatus {
            name: tap.name.clone(),
            mac: mac.join(":"),
            mtu_bytes: tap.mtu,
            addresses: tap.addresses.iter().map(ToString::to_string).collect(),
            link: link.map(|link| link.name.clone()),
            carrier: runs && link.is_some_and(|link| link.up),
        });
    }
    ports
}

fn end_words(end: &mux::End, plan: &VnetPlan) -> String {
    match end {
        mux::End::Port { node, port } => {
            let tap = plan.nodes.get(node).and_then(|plan| plan.taps.get(usize::from(*port)));
            format!("{node}:{}", tap.map_or("?", |tap| tap.name.as_str()))
        }
        mux::End::External { interface, by } => match by {
            mux::Encapsulation::Interface => interface.clone(),
            mux::Encapsulation::Vxlan { local, remote, vni, .. } => {
                format!("{interface} (vxlan {local} > {remote} vni {vni})")
            }
            mux::Encapsulation::Udp { local, remote, local_port, remote_port } => {
                format!("{interface} (udp {local} port {local_port} > {remote} port {remote_port})")
            }
        },
    }
}
