//! Forwarding tables: routes of nodes, and addresses that segments have learned.

use std::time::Duration;

use pdp_api::{
    FdbEntry, GuestProcess, Problem, ProblemKind, RouteEntry, RouteHop, RouteTarget, RoutesQuery,
};
use pdp_proto::mirror::{self, TableSource};
use pdp_proto::mux;
use pdp_proto::routes::ResolvedRoute;

use crate::access::no_vnet;
use crate::engine::{DaemonCore, has_guest, link_of, unavailable};
use crate::host::control::MirrorClient;
use crate::status::kernel_routes;
use crate::status::view;

/// Longest wait for the next part of a route table.
const ROUTES_WAIT: Duration = Duration::from_secs(60);

/// Receives routes one by one. Blocks the caller while its client reads slowly.
/// Returns false if the client went away and no more routes shall be sent.
pub type RouteFn<'a> = &'a mut (dyn FnMut(RouteEntry) -> bool + Send);

/// Returns the addresses that a segment has learned, by ends. With
/// `clear` the segment forgets them all, and nothing is returned.
pub fn fdb(
    engine: &DaemonCore,
    vnet: &str,
    link: &str,
    clear: bool,
) -> Result<Vec<FdbEntry>, Problem> {
    let model = engine.model();
    let Some(plan) = model.plan.vnets.get(vnet) else { return Err(no_vnet(vnet)) };
    let link = link_of(vnet, plan, link)?;
    if link.segment.is_none() {
        let problem =
            format!("vnet {vnet}: link {} has two ends, and learns no addresses", link.name);
        return Err(
            Problem::new(ProblemKind::Invalid, problem).hint("only segments learn addresses")
        );
    }
    let ends: Vec<_> = link.ends.iter().map(|end| view::endpoint(end, plan)).collect();
    let heard = engine.host.mux.fdb(vnet, &link.name, clear).map_err(unavailable)?;
    let entry = |it: mux::LearnedMac| {
        let mac = it.mac.map(|byte| format!("{byte:02x}")).join(":");
        let endpoint = ends.get(usize::from(it.end)).cloned().unwrap_or_default();
        FdbEntry { endpoint, mac, age_s: it.age_s }
    };
    let mut entries: Vec<_> = heard.into_iter().map(entry).collect();
    entries.sort();
    Ok(entries)
}

/// Passes each route of a router or host to `row`.
pub fn routes(
    engine: &DaemonCore,
    vnet: &str,
    node: &str,
    query: RoutesQuery,
    row: RouteFn<'_>,
) -> Result<(), Problem> {
    let plan = engine.node_plan(vnet, node)?;
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
        let guest = engine.running(vnet, node, control, &plan.control.dir)?;
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
