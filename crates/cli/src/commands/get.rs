//! `pdp get`: lists of vnets and their parts.

use std::process::ExitCode;

use pdp_api::client::{Client, Error};
use pdp_api::{LinkStatus, NodeStatus, ProblemKind, Vnet, VnetSummary};
use serde::Serialize;
use serde_json::Value;

use super::{inspect, tenants};
use crate::failure::CliFailure;
use crate::input::selector::Selector;
use crate::output::shape::Shape;
use crate::output::status::{LINK_HEADER, kind_and_plane, link_row, note, waits};
use crate::output::words::{cores, power, yes};
use crate::output::{or_dash, table};

/// List vnets, or their nodes, links or external ends; list tenants; or show the substrate.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: pdp get\n         pdp get red blue -o json\n         \
                  pdp get nodes -l role=spine -o wide\n         pdp get links red\n         \
                  pdp get nodes red -o jsonpath='{[*].name}'\n         pdp get tenants")]
pub struct GetArgs {
    /// Kind of objects (default: vnets; or nodes, links, externals, tenants, substrate), and then
    /// only those of these vnets.
    #[arg(value_name = "nodes|links|externals|tenants|substrate|VNET", add = crate::daemon::complete::vnets())]
    pub names: Vec<String>,
    /// Only nodes whose labels match: key=value, key!=value, key, !key, key in (a,b); several with
    /// commas.
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    pub selector: Option<Selector>,
    #[command(flatten)]
    pub shape: Shape,
}

/// Kind of listed objects; its names are singular or plural.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ListingKind {
    Vnets,
    Nodes,
    Links,
    Externals,
    Tenants,
    Substrate,
}

const WHAT: [(&str, &str, ListingKind); 6] = [
    ("vnet", "vnets", ListingKind::Vnets),
    ("node", "nodes", ListingKind::Nodes),
    ("link", "links", ListingKind::Links),
    ("external", "externals", ListingKind::Externals),
    ("tenant", "tenants", ListingKind::Tenants),
    ("substrate", "substrate", ListingKind::Substrate),
];

pub async fn get(client: &Client, args: GetArgs) -> Result<ExitCode, CliFailure> {
    let GetArgs { names, selector, shape } = args;
    let of =
        |name: &String| WHAT.iter().find(|(one, many, _)| [*one, *many].contains(&name.as_str()));
    let (what, names) = match names.split_first().map(|(first, rest)| (of(first), rest)) {
        Some((Some((.., what)), rest)) => (*what, rest),
        _ => (ListingKind::Vnets, &names[..]),
    };
    if selector.is_some() && what != ListingKind::Nodes {
        return Err(CliFailure::Usage("-l selects nodes: pdp get nodes -l SELECTOR".into()));
    }
    if !names.is_empty() && matches!(what, ListingKind::Tenants | ListingKind::Substrate) {
        return Err(CliFailure::Usage("`get tenants` and `get substrate` take no names".into()));
    }
    match what {
        ListingKind::Vnets => vnets(client, names, &shape).await,
        ListingKind::Nodes => nodes(client, names, selector.as_ref(), &shape).await,
        ListingKind::Links => links(client, names, &shape).await,
        ListingKind::Externals => externals(client, names, &shape).await,
        ListingKind::Tenants => tenants::tenants(client, &shape).await,
        ListingKind::Substrate => inspect::substrate_shown(client, &shape).await,
    }
}

async fn vnets(client: &Client, names: &[String], shape: &Shape) -> Result<ExitCode, CliFailure> {
    let vnets = named(client, names).await?;
    shape.print(&vnets, |vnets, _| {
        if vnets.is_empty() {
            return "no vnets; `pdp apply FILE` makes some\n".into();
        }
        let header = [
            "VNET", "STATE", "READY", "ROUTERS", "HOSTS", "LINKS", "GUESTS", "POWER", "FES", "NOTE",
        ];
        table(header, vnets.iter().map(summary).collect())
    })
}

fn summary(vnet: &VnetSummary) -> [String; 10] {
    [
        vnet.name.clone(),
        vnet.phase.name().into(),
        yes(vnet.ready),
        vnet.routers.to_string(),
        vnet.hosts.to_string(),
        vnet.links.to_string(),
        format!("{}/{}", vnet.guests_connected, vnet.guests),
        cores(vnet.power_millicores),
        or_dash(vnet.fes.join(",")),
        note(vnet.message.as_ref(), vnet.waits_for.as_deref(), &vnet.conditions),
    ]
}

/// Returns the vnets with these names, or all.
async fn named(client: &Client, names: &[String]) -> Result<Vec<VnetSummary>, CliFailure> {
    let mut vnets = client.vnets().await?;
    for name in names {
        if !vnets.iter().any(|vnet| vnet.name == *name) {
            return Err(CliFailure::Other(format!("no vnet {name}; `pdp get` lists them")));
        }
    }
    vnets.retain(|vnet| names.is_empty() || names.contains(&vnet.name));
    Ok(vnets)
}

/// Returns the vnets with these names, or all, with spec and status.
async fn whole(client: &Client, names: &[String]) -> Result<Vec<Vnet>, CliFailure> {
    let mut all = Vec::new();
    for VnetSummary { name, .. } in named(client, names).await? {
        match client.vnet(&name).await {
            Ok(vnet) => all.push(Vnet { name, ..vnet }),
            // A vnet deleted meanwhile is left out.
            Err(Error::Problem(problem)) if problem.kind == ProblemKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(all)
}

/// An object with the name of its vnet.
#[derive(Serialize)]
struct InVnet<T> {
    vnet: String,
    #[serde(flatten)]
    it: T,
}

async fn nodes(
    client: &Client,
    names: &[String],
    selector: Option<&Selector>,
    shape: &Shape,
) -> Result<ExitCode, CliFailure> {
    let mut nodes: Vec<InVnet<NodeStatus>> = Vec::new();
    for vnet in whole(client, names).await? {
        let of = |it| InVnet { vnet: vnet.name.clone(), it };
        nodes.extend(vnet.status.nodes.into_iter().map(of));
    }
    nodes.retain(|node| selector.is_none_or(|selector| selector.selects(&node.it.labels)));
    shape.print(&nodes, |nodes, wide| match (nodes.is_empty(), selector, wide) {
        (true, Some(selector), _) => format!("no nodes match {selector}\n"),
        (true, None, _) => "no nodes; a vnet has them in `spec.nodes`\n".into(),
        (false, _, true) => table(
            [
                "NODE",
                "KIND",
                "PLANE",
                "STATE",
                "READY",
                "POWER",
                "RESTARTS",
                "PID",
                "ADDRESSES",
                "PUBLISHED",
                "LABELS",
                "NOTE",
            ],
            nodes.iter().map(wide_row).collect(),
        ),
        (false, _, false) => table(
            ["NODE", "KIND", "PLANE", "STATE", "READY", "POWER", "RESTARTS", "NOTE"],
            nodes.iter().map(node_row).collect(),
        ),
    })
}

fn node_row(of: &InVnet<NodeStatus>) -> [String; 8] {
    let node = &of.it;
    let [kind, plane] = kind_and_plane(node);
    let commands = node.commands.iter().map(|command| u64::from(command.restarts));
    let restarts = node.control.restarts + commands.sum::<u64>();
    [
        format!("{}/{}", of.vnet, node.name),
        kind,
        plane,
        node.phase.name().into(),
        yes(node.ready),
        node.power_millicores.map_or("-".into(), power),
        restarts.to_string(),
        note(node.message.as_ref(), waits(node).as_deref(), &node.conditions),
    ]
}

fn wide_row(of: &InVnet<NodeStatus>) -> [String; 12] {
    let [name, kind, plane, state, ready, power, restarts, note] = node_row(of);
    let node = &of.it;
    let of_ports = node.ports.iter().flat_map(|port| &port.addresses);
    let addresses: Vec<&str> = of_ports.chain(&node.loopback).map(String::as_str).collect();
    let label = |(key, value): (&String, &String)| format!("{key}={value}");
    let labels: Vec<String> = node.labels.iter().map(label).collect();
    [
        name,
        kind,
        plane,
        state,
        ready,
        power,
        restarts,
        node.control.pid.map_or("-".into(), |pid| pid.to_string()),
        or_dash(addresses.join(",")),
        or_dash(node.published.join(",")),
        or_dash(labels.join(",")),
        note,
    ]
}

async fn links(client: &Client, names: &[String], shape: &Shape) -> Result<ExitCode, CliFailure> {
    let mut links: Vec<InVnet<LinkStatus>> = Vec::new();
    for vnet in whole(client, names).await? {
        let of = |it| InVnet { vnet: vnet.name.clone(), it };
        links.extend(vnet.status.links.into_iter().map(of));
    }
    shape.print(&links, |links, _| {
        if links.is_empty() {
            return "no links; a vnet has them in `spec.links`\n".into();
        }
        let row = |of: &InVnet<LinkStatus>| link_row(format!("{}/{}", of.vnet, of.it.name), &of.it);
        table(LINK_HEADER, links.iter().map(row).collect())
    })
}

/// An external end from its vnet's spec, with its link.
#[derive(Serialize)]
struct ListedExternal {
    name: String,
    /// Name of the substrate's external interface.
    interface: String,
    /// Kind of its tunnel. `interface`: all frames of the interface that no tunnel receives.
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<LinkStatus>,
    /// Text for the end in the link's status.
    #[serde(skip)]
    words: String,
}

async fn externals(
    client: &Client,
    names: &[String],
    shape: &Shape,
) -> Result<ExitCode, CliFailure> {
    let mut externals = Vec::new();
    for vnet in whole(client, names).await? {
        for (name, spec) in vnet.spec["spec"]["externals"].as_object().into_iter().flatten() {
            let it = ListedExternal::of(&vnet, name, spec);
            externals.push(InVnet { vnet: vnet.name.clone(), it });
        }
    }
    shape.print(&externals, |externals, _| {
        if externals.is_empty() {
            let hint = "a vnet has them in `spec.externals`, the machine's interfaces are in `pdp get substrate`";
            return format!("no externals; {hint}\n");
        }
        let row = |of: &InVnet<ListedExternal>| {
            let link = of.it.link.as_ref();
            [
                format!("{}/{}", of.vnet, of.it.name),
                of.it.words.clone(),
                or_dash(link.map(|link| link.name.clone()).unwrap_or_default()),
                link.map_or("-".into(), |link| yes(link.carrier)),
                link.and_then(|link| link.message.clone()).unwrap_or_default(),
            ]
        };
        table(["EXTERNAL", "BY", "LINK", "CARRIER", "NOTE"], externals.iter().map(row).collect())
    })
}

impl ListedExternal {
    fn of(vnet: &Vnet, name: &str, spec: &Value) -> Self {
        let end = Value::from(format!("external:{name}"));
        let mut link = None;
        for spec in vnet.spec["spec"]["links"].as_array().into_iter().flatten() {
            let ends = spec["endpoints"].as_array().into_iter().flatten();
            if let Some(index) = ends.into_iter().position(|it| *it == end) {
                let mut links = vnet.status.links.iter();
                link = links.find(|link| spec["name"] == *link.name).map(|link| (link, index));
            }
        }
        let interface = spec["interface"].as_str().unwrap_or_default().to_owned();
        let mut keys = spec.as_object().into_iter().flatten().map(|(key, _)| key);
        let kind = keys.find(|key| *key != "interface").map_or("interface", String::as_str);
        let words = link.and_then(|(link, index)| link.endpoints.get(index).cloned());
        Self {
            name: name.into(),
            words: words.unwrap_or_else(|| format!("{interface} ({kind})")),
            interface,
            kind: kind.into(),
            link: link.map(|(link, _)| link.clone()),
        }
    }
}
