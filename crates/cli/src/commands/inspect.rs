//! `pdp inspect`: a vnet, a node, a tenant, or the substrate.

use std::process::ExitCode;

use pdp_api::client::Client;
use pdp_api::{NodeStatus, Phase, ProcessStatus, SubstrateInfo, Vnet};

use super::tenants;
use crate::daemon::complete;
use crate::failure::CliFailure;
use crate::output::shape::Shape;
use crate::output::status::{LINK_HEADER, kind_and_plane, link_row, note, waits};
use crate::output::words::{cores, power, yes};
use crate::output::{or_dash, section, table};

pub async fn substrate_shown(client: &Client, shape: &Shape) -> Result<ExitCode, CliFailure> {
    let found = client.substrate().await?;
    shape.print_object((found.spec.as_ref(), &found.status), &found, substrate)
}

/// Show the spec and status of a vnet, one of its nodes, a tenant, or the substrate.
///
/// As JSON or YAML it is the object as applied, with its status. It can be applied again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp inspect red\n         pdp inspect red/r1\n         \
                        pdp inspect red/r1 -o jsonpath={.phase}")]
pub struct InspectArgs {
    /// VNET, VNET/NODE, `tenant/NAME`, or `substrate`.
    #[arg(value_name = "NAME", add = complete::nodes())]
    pub name: String,
    #[command(flatten)]
    pub shape: Shape,
}

pub async fn inspect(client: &Client, args: InspectArgs) -> Result<ExitCode, CliFailure> {
    let shape = &args.shape;
    if args.name == "substrate" {
        return substrate_shown(client, shape).await;
    }
    if let Some(tenant) = args.name.strip_prefix("tenant/") {
        return tenants::tenant(client, tenant, shape).await;
    }
    let (name, node) = match args.name.split_once('/') {
        Some((vnet, node)) => (vnet, Some(node)),
        None => (args.name.as_str(), None),
    };
    let vnet = client.vnet(name).await?;
    let Some(node) = node else {
        return shape.print_object((Some(&vnet.spec), &vnet.status), &vnet, self::vnet);
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

fn state(phase: Phase, message: Option<&str>) -> String {
    match message {
        Some(message) => format!("{} ({message})", phase.name()),
        None => phase.name().into(),
    }
}
