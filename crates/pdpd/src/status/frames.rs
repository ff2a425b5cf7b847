//! Captures and traces of frames.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use pdp_api::{
    CaptureQuery, Problem, ProblemKind, RouteEntry, RoutesQuery, Trace, TraceRequest, TraceStep,
};
use pdp_proto::{mux, trace};

use crate::access::AccessScope;
use crate::engine::{DaemonCore, unavailable};
use crate::host::HostError;
use crate::host::control::ControlError;
use crate::kernel::observers::ObserverPermit;
use crate::kernel::ports::Observer;
use crate::plan::LinkPath;
use crate::status::{kernel_frames, tables};
use crate::util::error_chain;

/// Ends of a link that a hint names.
const ENDS_NAMED: usize = 3;

/// A capture.
#[derive(Debug)]
pub struct Captured {
    /// Frames as pcap; closing it ends the capture.
    pub frames: OwnedFd,
    /// Permit of the capture, if nobody else holds it that long.
    pub permit: Option<ObserverPermit>,
}

/// Starts a capture. The returned descriptor is the read end of a
/// pipe that supplies pcap. Closing it ends the capture.
pub fn capture(
    engine: &DaemonCore,
    scope: &AccessScope,
    vnet: &str,
    node: &str,
    port: &str,
    query: CaptureQuery,
) -> Result<Captured, Problem> {
    let port = find_port(engine, vnet, node, port)?;
    let program = program(query.filter.as_deref())?;
    let place = engine.captures.acquire(scope.tenant()).map_err(observed)?;
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| Problem::internal(format!("pipe: {error}")))?;
    if is_in_kernel(engine, &port) {
        let observer = open_observer(engine, place, &port)?;
        kernel_frames::capture(observer, query.snap_bytes, program, write)?;
        return Ok(Captured { frames: read, permit: None });
    }
    let capture = engine.host.mux.capture(port, query.snap_bytes, program, write.as_fd());
    capture.map_err(unavailable)?;
    Ok(Captured { frames: read, permit: Some(place) })
}

/// Traces the next frame that matches.
pub fn trace(
    engine: &DaemonCore,
    scope: &AccessScope,
    vnet: &str,
    node: &str,
    port: &str,
    request: TraceRequest,
) -> Result<Trace, Problem> {
    let port = find_port(engine, vnet, node, port)?;
    let program = program(request.program.as_deref())?;
    let filter = request.filter.into_iter().map(|found| mux::BytePattern {
        offset: found.offset,
        value: found.value,
        mask: found.mask,
    });
    let filter: Vec<_> = filter.collect();
    let wait = Duration::from_millis(request.wait_ms);
    let path = port_path(engine, &port);
    let place = engine.traces.acquire(scope.tenant()).map_err(observed)?;
    if is_in_kernel(engine, &port) {
        let observer = open_observer(engine, place, &port)?;
        let link = path.map(|(link, _)| link).unwrap_or_default();
        let at = (link.as_str(), port.port.as_str());
        let stages = kernel_frames::follow(&observer, at, &filter, program, wait)
            .map_err(|problem| elsewhere(engine, &port, problem))?;
        return Ok(Trace { stages });
    }
    let stages = engine.host.mux.trace(port.clone(), filter, program, wait);
    let stages = stages.map_err(|error| match error {
        ControlError::Refused { reason, .. } => {
            elsewhere(engine, &port, Problem::new(ProblemKind::TimedOut, reason))
        }
        other => unavailable(other),
    })?;
    let stages = stages.into_iter().map(|stage| TraceStep {
        at_ns: stage.at_ns,
        stage: stage.stage,
        detail: stage.detail,
    });
    let mut trace = Trace { stages: stages.collect() };
    if let (Some((link, LinkPath::Mux(Some(why)))), Some(first)) = (path, trace.stages.first_mut())
    {
        first.detail += &format!("; link {link} passes through the mux: {why}");
    }
    name_route(engine, vnet, node, &mut trace);
    Ok(trace)
}

/// Adds the matching route to a trace of a frame that a forwarding guest of this node, or the
/// mux itself, forwarded. The route is looked up now, and not when the frame was forwarded.
fn name_route(engine: &DaemonCore, vnet: &str, node: &str, trace: &mut Trace) {
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
    let result = tables::routes(engine, vnet, node, query, &mut |row| {
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

fn find_port(
    engine: &DaemonCore,
    vnet: &str,
    node: &str,
    port: &str,
) -> Result<mux::PortName, Problem> {
    let model = engine.model();
    let names: Vec<String> = match model.plan.vnets.get(vnet).filter(|_| node == mux::OUTSIDE) {
        Some(plan) => plan.mux.own_ends().iter().map(|own| own.name.into()).collect(),
        None => engine.node_plan(vnet, node)?.taps.iter().map(|tap| tap.name.clone()).collect(),
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
fn is_in_kernel(engine: &DaemonCore, port: &mux::PortName) -> bool {
    matches!(port_path(engine, port), Some((_, LinkPath::Kernel)))
}

/// Starts to observe frames of a port whose frames stay in the kernel.
fn open_observer(
    engine: &DaemonCore,
    place: ObserverPermit,
    port: &mux::PortName,
) -> Result<Observer, Problem> {
    let observer = engine.host.ports.observe(place, &port.vnet, &port.node, &port.port);
    observer.map_err(|error| {
        let problem = format!("{}/{}: {}", port.vnet, port.node, error_chain(&error));
        Problem::new(ProblemKind::Unavailable, problem).hint("`pdp inspect` shows why")
    })
}

/// Returns the link of a port, and the path of its frames.
fn port_path(engine: &DaemonCore, port: &mux::PortName) -> Option<(String, LinkPath)> {
    let model = engine.model();
    let plan = model.plan.vnets.get(&port.vnet)?;
    let taps = &plan.nodes.get(&port.node)?.taps;
    let number = taps.iter().position(|tap| tap.name == port.port)?;
    let (link, path) = plan.path_of(&port.node, number as u16)?;
    Some((link.name.clone(), path.clone()))
}

/// If a trace saw no arriving frame, adds where to trace the frames that the port sends.
fn elsewhere(engine: &DaemonCore, port: &mux::PortName, problem: Problem) -> Problem {
    if !problem.error.starts_with(trace::NO_FRAME) {
        return problem;
    }
    let mux::PortName { vnet, node, port: name } = port;
    let far = far_ends(engine, port).unwrap_or_default();
    let far: Vec<_> = far.iter().take(ENDS_NAMED).map(|end| format!("{vnet}/{end}")).collect();
    let sends = match &far[..] {
        [] => format!("`pdp capture {vnet}/{node}:{name}` shows frames that it sends"),
        far => format!("frames that it sends arrive at {}", far.join(", ")),
    };
    problem.hint(format!("a trace follows frames that {node} receives at {name}; {sends}"))
}

/// Returns the ports at the other ends of a port's link, as NODE:PORT.
fn far_ends(engine: &DaemonCore, port: &mux::PortName) -> Option<Vec<String>> {
    let model = engine.model();
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
