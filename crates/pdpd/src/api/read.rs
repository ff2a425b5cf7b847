//! Read-only requests with an immediate response.

use axum::Json;
use pdp_api::{
    DaemonVersion, FdbEntry, MachineCheck, Problem, ProblemKind, Stats, StatsQuery, SubstrateInfo,
    TRACE_WAIT_MS_MAX, Trace, TraceRequest, Vnet, VnetSummary, paths,
};
use pdp_proto::limits::PATTERN_BYTES_MAX;

use super::AuthorizedRequest;
use super::answer::{JsonBody, Params, PathParams, ProblemResponse};
use crate::access::no_vnet;
use crate::status::{doctor, frames, stats, tables, view};

/// Returns the daemon's version.
#[utoipa::path(get, path = paths::VERSION, tag = "node", responses(
    (status = OK, body = DaemonVersion, description = "The daemon")))]
pub async fn version(api: AuthorizedRequest) -> Result<Json<DaemonVersion>, ProblemResponse> {
    let listens = api.api.listens.clone();
    let (version, pid) = (env!("CARGO_PKG_VERSION").into(), std::process::id());
    let managed = api.api.daemon.managed;
    Ok(Json(DaemonVersion { version, pid, managed, listens }))
}

/// Checks the facilities of the machine.
#[utoipa::path(get, path = paths::DOCTOR, tag = "node", responses(
    (status = OK, body = Vec<MachineCheck>, description = "Results in the order of the checks")))]
pub async fn doctor(api: AuthorizedRequest) -> Result<Json<Vec<MachineCheck>>, ProblemResponse> {
    api.call(|daemon, _| Ok(doctor::of_node(daemon))).await.map(Json)
}

/// Returns the substrate.
#[utoipa::path(get, path = paths::SUBSTRATE, tag = "node", responses(
    (status = OK, body = SubstrateInfo,
        description = "Spec and status; a tenant sees what it may use")))]
pub async fn substrate(api: AuthorizedRequest) -> Result<Json<SubstrateInfo>, ProblemResponse> {
    api.call(|daemon, scope| Ok(view::substrate(daemon, scope))).await.map(Json)
}

/// Returns all vnets.
#[utoipa::path(get, path = paths::VNETS, tag = "vnets", responses(
    (status = OK, body = Vec<VnetSummary>,
        description = "Vnets that the client may see, by name")))]
pub async fn vnets(api: AuthorizedRequest) -> Result<Json<Vec<VnetSummary>>, ProblemResponse> {
    api.call(|daemon, scope| Ok(view::vnets(daemon, scope))).await.map(Json)
}

/// Returns one vnet: its spec and its status.
#[utoipa::path(get, path = paths::VNET, tag = "vnets",
    params(("vnet" = String, Path, description = "Its name")), responses(
    (status = OK, body = Vnet, description = "The network")))]
pub async fn vnet(
    api: AuthorizedRequest,
    PathParams(vnet): PathParams<String>,
) -> Result<Json<Vnet>, ProblemResponse> {
    api.call(move |daemon, _| view::vnet(daemon, &vnet).ok_or_else(|| no_vnet(&vnet)))
        .await
        .map(Json)
}

/// Returns the current counters.
#[utoipa::path(get, path = paths::STATS, tag = "observe", params(StatsQuery), responses(
    (status = OK, body = Stats, description = "Counters of this moment")))]
pub async fn stats(
    api: AuthorizedRequest,
    Params(query): Params<StatsQuery>,
) -> Result<Json<Stats>, ProblemResponse> {
    if let Some(vnet) = &query.vnet
        && !api.caller.scope.sees(vnet)
    {
        return Err(no_vnet(vnet).into());
    }
    api.call(move |daemon, scope| stats::current(daemon, scope, query)).await.map(Json)
}

/// Returns the addresses that an Ethernet segment (a link with more than two ends) has learned.
#[utoipa::path(get, path = paths::FDB, tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    responses((status = OK, body = Vec<FdbEntry>, description = "By ends and addresses")))]
pub async fn fdb(
    api: AuthorizedRequest,
    PathParams((vnet, link)): PathParams<(String, String)>,
) -> Result<Json<Vec<FdbEntry>>, ProblemResponse> {
    api.call(move |daemon, _| tables::fdb(daemon, &vnet, &link, false)).await.map(Json)
}

/// Makes an Ethernet segment forget the addresses that it has learned.
#[utoipa::path(delete, path = paths::FDB, tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    responses((status = OK, description = "The addresses are forgotten")))]
pub async fn clear_fdb(
    api: AuthorizedRequest,
    PathParams((vnet, link)): PathParams<(String, String)>,
) -> Result<Json<()>, ProblemResponse> {
    api.call(move |daemon, _| tables::fdb(daemon, &vnet, &link, true).map(drop)).await.map(Json)
}

/// Traces the next frame that arrives at a port.
#[utoipa::path(post, path = paths::TRACE, tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The node"),
        ("port" = String, Path, description = "The port")),
    request_body = TraceRequest, responses(
    (status = OK, body = Trace, description = "The stages that the frame passed, in order")))]
pub async fn trace(
    api: AuthorizedRequest,
    PathParams((vnet, node, port)): PathParams<(String, String, String)>,
    JsonBody(request): JsonBody<TraceRequest>,
) -> Result<Json<Trace>, ProblemResponse> {
    check_trace(&request)?;
    api.call(move |daemon, scope| frames::trace(daemon, scope, &vnet, &node, &port, request))
        .await
        .map(Json)
}

fn check_trace(request: &TraceRequest) -> Result<(), Problem> {
    if request.wait_ms > TRACE_WAIT_MS_MAX {
        return Err(Problem::new(
            ProblemKind::Invalid,
            format!("waitMs {} exceeds {TRACE_WAIT_MS_MAX}", request.wait_ms),
        ));
    }
    let bytes: usize = request.filter.iter().map(|part| part.value.len()).sum();
    if request.filter.len().max(bytes) > PATTERN_BYTES_MAX {
        let text = format!(
            "a filter of {} parts and {bytes} bytes, {PATTERN_BYTES_MAX} of each at most",
            request.filter.len()
        );
        return Err(Problem::new(ProblemKind::Invalid, text).hint("give a program"));
    }
    match request.filter.iter().find(|part| part.value.len() != part.mask.len()) {
        Some(part) => Err(Problem::new(
            ProblemKind::Invalid,
            format!(
                "filter at offset {}: value of {}, mask of {}",
                part.offset,
                pdp_spec::count(part.value.len(), "byte"),
                part.mask.len()
            ),
        )
        .hint("make them equally long")),
        None => Ok(()),
    }
}
