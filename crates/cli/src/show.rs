//! Status of vnets, nodes, the substrate and the machine.

use std::process::ExitCode;

use pdp_api::client::{Client, Error};
use pdp_api::{
    Condition, DataPlaneKind, LinkStatus, MachineCheck, MachineCheckState, NodeStatus, NodeType,
    Phase, ProcessStatus, ScheduleStatus, SubstrateInfo, Vnet,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::access;
use crate::args::{DoctorArgs, FdbArgs, InspectArgs, VersionArgs};
use crate::daemon;
use crate::failure::CliFailure;
use crate::output::{self, or_dash, print, section, table};
use crate::shape::Shape;

pub async fn fdb(client: &Client, args: FdbArgs) -> Result<ExitCode, CliFailure> {
    let name = &args.name;
    if args.clear {
        client.clear_fdb(&name.vnet, &name.link).await?;
        return Ok(ExitCode::SUCCESS);
    }
    print(args.format, &client.fdb(&name.vnet, &name.link).await?, |entries| {
        let rows = entries
            .iter()
            .map(|entry| [entry.endpoint.clone(), entry.mac.clone(), format!("{} s", entry.age_s)]);
        table(["END", "MAC", "HEARD"], rows.collect())
    })
}

/// Text for the NOTE column: the message, or else the parts that the object waits for. The
/// conditions follow.
pub fn note(message: Option<&String>, waits: Option<&str>, conditions: &[Condition]) -> String {
    let conditions = conditions.iter().map(|about| format!("{}: {}", about.node, about.message));
    let waits = waits.map(|waits| format!("waits for {waits}"));
    message.cloned().or(waits).into_iter().chain(conditions).collect::<Vec<_>>().join("; ")
}

/// Names the parts that a node waits for; `None` if there are none.
pub fn waits(node: &NodeStatus) -> Option<String> {
    Some(node.waits_for().join(", ")).filter(|names| !names.is_empty())
}

/// Kind of a node, and kind of its data plane.
pub fn kind_and_plane(node: &NodeStatus) -> [String; 2] {
    let kind = match node.kind {
        NodeType::Router => "router",
        NodeType::Host => "host",
    };
    [kind, node.data_plane.map_or("-", DataPlaneKind::name)].map(str::to_owned)
}

/// Prints an object. Other formats than the table print the applied document with its status. If
/// there is no document, they print only the status.
pub fn object<T>(
    shape: &Shape,
    (document, status): (Option<&Value>, &impl Serialize),
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<ExitCode, CliFailure> {
    if shape.is_table() {
        return output::write(table(value).as_bytes());
    }
    let mut object = document.cloned().unwrap_or_else(|| json!({}));
    object["status"] = serde_json::to_value(status).map_err(std::io::Error::other)?;
    shape.print(&object, |_, _| String::new())
}

pub async fn substrate_shown(client: &Client, shape: &Shape) -> Result<ExitCode, CliFailure> {
    let found = client.substrate().await?;
    object(shape, (found.spec.as_ref(), &found.status), &found, substrate)
}

pub async fn inspect(client: &Client, args: InspectArgs) -> Result<ExitCode, CliFailure> {
    let shape = &args.shape;
    if args.name == "substrate" {
        return substrate_shown(client, shape).await;
    }
    if let Some(tenant) = args.name.strip_prefix("tenant/") {
        return access::tenant(client, tenant, shape).await;
    }
    let (name, node) = match args.name.split_once('/') {
        Some((vnet, node)) => (vnet, Some(node)),
        None => (args.name.as_str(), None),
    };
    let vnet = client.vnet(name).await?;
    let Some(node) = node else {
        return object(shape, (Some(&vnet.spec), &vnet.status), &vnet, self::vnet);
    };
    let Some(status) = vnet.status.nodes.iter().find(|status| status.name == node) else {
        return Err(CliFailure::Other(format!(
            "no node {node} in vnet {name}; `pdp inspect {name}` lists them"
        )));
    };
    shape.print(status, |status, _| {
        let nodes = std::slice::from_ref(status);
        node_table(nodes)
            + &section("Conditions", &conditions(nodes))
            + &section("Commands", &commands(nodes))
            + &section("Processes", &processes(nodes))
            + &section(PORTS, &ports(nodes))
            + &section(
                "Queues",
                &queues(&vnet, |end| end.split_once(':').is_some_and(|it| it.0 == node)),
            )
    })
}

fn vnet(vnet: &Vnet) -> String {
    let status = &vnet.status;
    let links = status.links.iter().map(|link| link_row(link.name.clone(), link));
    let links = table(LINK_HEADER, links.collect());
    format!("{}: {}\n", vnet.name, state(status.phase, status.message.as_deref()))
        + &section("Conditions", &conditions(&status.nodes))
        + &section("Nodes", &node_table(&status.nodes))
        + &section("Commands", &commands(&status.nodes))
        + &section("Processes", &processes(&status.nodes))
        + &section(PORTS, &ports(&status.nodes))
        + &section("Links", if status.links.is_empty() { "" } else { &links })
        + &section("Queues", &queues(vnet, |_| true))
}

/// Table of the queues at ends of links with several queues.
fn queues(vnet: &Vnet, shows: impl Fn(&str) -> bool) -> String {
    let all = vnet.status.links.iter().flat_map(|link| &link.queues);
    let rows = all.filter(|queue| shows(&queue.end)).map(|queue| {
        let dscp = queue.dscp.iter().map(u8::to_string).collect::<Vec<_>>().join(",");
        [
            queue.end.clone(),
            queue.name.clone(),
            queue.weight.to_string(),
            queue.frames.to_string(),
            queue.bytes.map_or("-".into(), |bytes| bytes.to_string()),
            queue.buffers.to_string(),
            or_dash(dscp),
        ]
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    table(["END", "QUEUE", "WEIGHT", "FRAMES", "BYTES", "BUFFERS", "DSCP"], rows)
}

pub const LINK_HEADER: [&str; 7] = ["LINK", "ENDS", "PATH", "SET", "CARRIER", "RATE", "NOTE"];

pub fn link_row(name: String, link: &LinkStatus) -> [String; 7] {
    let set = match (link.up, link.silent) {
        (true, _) => "up",
        (false, false) => "down",
        (false, true) => "silent",
    };
    [
        name,
        link.endpoints.join(" <-> "),
        link.path.name().into(),
        set.into(),
        yes(link.carrier),
        link.rate_bps.map_or("-".into(), bits),
        link_note(link),
    ]
}

/// Text for a link's NOTE column: problems, impairments, progress of its schedule, and why it goes
/// through the mux.
fn link_note(link: &LinkStatus) -> String {
    let schedule = link.schedule.as_ref().map(|it| format!("schedule: {}", schedule(it)));
    let impairments = Some(link.impairments.clone()).filter(|words| !words.is_empty());
    let path = link.path_reason.as_ref().map(|why| format!("through the mux: {why}"));
    let all = [link.message.clone(), impairments, schedule, path].into_iter().flatten();
    all.collect::<Vec<_>>().join("; ")
}

fn schedule(schedule: &ScheduleStatus) -> String {
    let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms % 1000 / 100);
    let ScheduleStatus { elapsed_ms, steps, done, next_ms } = schedule;
    let next = next_ms.map_or_else(String::new, |ms| format!(", next at {}", seconds(ms)));
    format!("{done} of {steps} at {}{next}", seconds(*elapsed_ms))
}

fn conditions(nodes: &[NodeStatus]) -> String {
    let all = nodes.iter().flat_map(|node| &node.conditions);
    all.map(|about| format!("{}: {}\n", about.node, about.message)).collect()
}

fn node_table(nodes: &[NodeStatus]) -> String {
    let rows = nodes.iter().map(|node| {
        let [kind, plane] = kind_and_plane(node);
        [
            node.name.clone(),
            kind,
            plane,
            node.phase.name().into(),
            yes(node.ready),
            node.power_millicores.map_or("-".into(), power),
            note(node.message.as_ref(), waits(node).as_deref(), &[]),
        ]
    });
    table(["NODE", "KIND", "PLANE", "STATE", "READY", "POWER", "NOTE"], rows.collect())
}

fn commands(nodes: &[NodeStatus]) -> String {
    let rows = nodes.iter().flat_map(|node| {
        node.commands.iter().map(|command| {
            [
                node.name.clone(),
                command.name.clone(),
                command.state.name().into(),
                command.restarts.to_string(),
                command.exit.map_or("-".into(), |code| code.to_string()),
                command.message.clone().unwrap_or_default(),
            ]
        })
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    table(["NODE", "COMMAND", "STATE", "RESTARTS", "EXIT", "NOTE"], rows)
}

fn processes(nodes: &[NodeStatus]) -> String {
    let mut rows = Vec::new();
    for node in nodes {
        let mut row = |what: String, process: &ProcessStatus, place: String, mux: String| {
            rows.push([
                node.name.clone(),
                what,
                process.phase.name().into(),
                process.pid.map_or("-".into(), |pid| pid.to_string()),
                process.restarts.to_string(),
                place,
                mux,
                process.message.clone().unwrap_or_default(),
            ]);
        };
        row("control".into(), &node.control, "-".into(), "-".into());
        if let Some(tap) = &node.tap {
            row("tap".into(), tap, "-".into(), "-".into());
        }
        if let Some(mirror) = &node.mirror {
            row("mirror".into(), mirror, "-".into(), "-".into());
        }
        if let Some(management) = &node.management {
            row("management".into(), management, "-".into(), "-".into());
        }
        for guest in &node.guests {
            let place = format!("{} {}", guest.fe, power(guest.share_millicores));
            row(format!("g{}", guest.number), &guest.process, place, yes(guest.connected));
        }
        if let Some(engine) = &node.engine {
            let note = engine.message.clone().unwrap_or_default();
            let state = if engine.synced { "running" } else { "starting" };
            let dash = || "-".to_owned();
            let place = format!("mux {}", power(node.power_millicores.unwrap_or(0)));
            let name = node.name.clone();
            rows.push([
                name,
                "engine".into(),
                state.into(),
                dash(),
                dash(),
                place,
                yes(engine.synced),
                note,
            ]);
        }
    }
    table(["NODE", "PROCESS", "STATE", "PID", "RESTARTS", "FE", "CONNECTED", "NOTE"], rows)
}

/// Title of the table of ports. Routing software and commands may have set other addresses.
const PORTS: &str = "Ports (addresses as in the spec)";

fn ports(nodes: &[NodeStatus]) -> String {
    let rows = nodes.iter().flat_map(|node| {
        let loopback = (!node.loopback.is_empty()).then(|| {
            let [name, addresses] = [format!("{}:lo", node.name), node.loopback.join(",")];
            [name, addresses, "-".into(), "-".into(), "-".into(), "-".into()]
        });
        let ports = node.ports.iter().map(|port| {
            [
                format!("{}:{}", node.name, port.name),
                or_dash(port.addresses.join(",")),
                port.mac.clone(),
                port.mtu_bytes.to_string(),
                yes(port.carrier),
                or_dash(port.link.clone().unwrap_or_default()),
            ]
        });
        ports.chain(loopback)
    });
    table(["PORT", "ADDRESSES", "MAC", "MTU", "CARRIER", "LINK"], rows.collect())
}

fn substrate(substrate: &SubstrateInfo) -> String {
    let status = &substrate.status;
    let engines = status.fes.iter().map(|engine| {
        let guests = engine.guests.iter().map(|guest| {
            format!(
                "{}/{}:g{} {}",
                guest.vnet,
                guest.node,
                guest.number,
                power(guest.share_millicores)
            )
        });
        [
            engine.name.clone(),
            engine.cpus.clone(),
            cores(engine.capacity_millicores),
            cores(engine.used_millicores),
            or_dash(guests.collect::<Vec<_>>().join(", ")),
        ]
    });
    let engines = table(["FE", "CPUS", "CAPACITY", "USED", "GUESTS"], engines.collect());
    let externals = status.externals.iter().map(|external| {
        [
            external.name.clone(),
            external.device.clone(),
            external.mtu_bytes.map_or("-".into(), |mtu| mtu.to_string()),
            yes(external.attached),
            external.carrier.map_or("-".into(), yes),
            external.message.clone().unwrap_or_default(),
        ]
    });
    let header = ["EXTERNAL", "DEVICE", "MTU", "ATTACHED", "CARRIER", "NOTE"];
    let externals = table(header, externals.collect());
    // A tenant sees what it may use, without the document.
    if substrate.spec.is_none() && status.fes.is_empty() {
        return "no substrate; apply one (`kind: Substrate`)\n".into();
    }
    let mux = &status.mux;
    let pid = mux.pid.map_or(String::new(), |pid| format!(", pid {pid}"));
    format!("substrate: {}\n", state(status.phase, status.message.as_deref()))
        + &format!(
            "mux: {}{pid}, {}\n",
            state(mux.phase, mux.message.as_deref()),
            pdp_spec::count(mux.restarts, "restart")
        )
        + &format!(
            "fast paths: {} of {} guaranteed\n",
            cores(status.fastpaths.used_millicores),
            cores(status.fastpaths.capacity_millicores)
        )
        + &section("Forwarding engines", if status.fes.is_empty() { "" } else { &engines })
        + &section("External interfaces", if status.externals.is_empty() { "" } else { &externals })
}

pub async fn doctor(client: &Client, args: DoctorArgs) -> Result<ExitCode, CliFailure> {
    let checks = match client.doctor().await {
        Err(Error::NoDaemon { .. }) => daemon::checks()?,
        checks => checks?,
    };
    let missing = checks.iter().any(|check| check.state == MachineCheckState::Missing);
    let printed = print(args.format, &checks, |checks| {
        table(["CHECK", "STATE", "FOUND", "HINT"], checks.iter().map(check).collect())
    })?;
    Ok(if missing { ExitCode::FAILURE } else { printed })
}

fn check(check: &MachineCheck) -> [String; 4] {
    let state = match check.state {
        MachineCheckState::Ok => "ok",
        MachineCheckState::Warn => "warn",
        MachineCheckState::Missing => "missing",
    };
    [check.name.clone(), state.into(), check.detail.clone(), check.hint.clone().unwrap_or_default()]
}

/// Versions of both sides; `daemon` is absent if none answers.
#[derive(Serialize)]
struct Versions {
    client: &'static str,
    daemon: Option<pdp_api::DaemonVersion>,
}

pub async fn version(client: &Client, args: VersionArgs) -> Result<ExitCode, CliFailure> {
    let daemon = match client.version().await {
        Ok(version) => Some(version),
        Err(Error::NoDaemon { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let versions = Versions { client: env!("CARGO_PKG_VERSION"), daemon };
    print(args.format, &versions, |versions| {
        let daemon = match &versions.daemon {
            Some(daemon) => format!("{} (pid {})", daemon.version, daemon.pid),
            None => "none answers".into(),
        };
        let listens = versions.daemon.as_ref().and_then(|daemon| daemon.listens.as_ref());
        let listens = listens.map(|at| {
            format!("TLS {} certificate SHA-256 {}\n", at.address, at.certificate_sha256)
        });
        format!("pdp {}\npdpd {daemon}\n{}", versions.client, listens.unwrap_or_default())
    })
}

fn state(phase: Phase, message: Option<&str>) -> String {
    match message {
        Some(message) => format!("{} ({message})", phase.name()),
        None => phase.name().into(),
    }
}

pub fn yes(it_is: bool) -> String {
    if it_is { "yes" } else { "no" }.into()
}

/// Formats the guaranteed power of a router or one of its guests.
pub fn power(millicores: u64) -> String {
    if millicores == 0 { "borrows".into() } else { cores(millicores) }
}

/// Formats power in cores, in the notation of specs.
pub fn cores(millicores: u64) -> String {
    (millicores as f64 / 1000.0).to_string()
}

/// Formats a rate in the notation of specs.
pub fn bits(bps: u64) -> String {
    match bps {
        1_000_000_000.. => format!("{}Gbit/s", trimmed(bps, 1_000_000_000)),
        1_000_000.. => format!("{}Mbit/s", trimmed(bps, 1_000_000)),
        1_000.. => format!("{}kbit/s", trimmed(bps, 1_000)),
        _ => format!("{bps}bit/s"),
    }
}

fn trimmed(value: u64, unit: u64) -> f64 {
    (value as f64 * 100.0 / unit as f64).round() / 100.0
}
