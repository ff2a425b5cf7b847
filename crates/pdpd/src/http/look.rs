//! Requests that change nothing and answer at once.

use axum::Json;
use pdp_api::{
    Check, FdbEntry, Problem, ProblemKind, Stats, StatsQuery, Substrate, TRACE_WAIT_MS_MAX, Trace,
    TraceRequest, Version, Vnet, VnetSummary,
};
use pdp_proto::limits::PATTERN_BYTES_MAX;

use super::Asked;
use super::answer::{Body, Failure, Names, Params};
use crate::access::no_vnet;

/// Who answers.
#[utoipa::path(get, path = "/v1/version", tag = "node", responses(
    (status = OK, body = Version, description = "The daemon")))]
pub async fn version(api: Asked) -> Result<Json<Version>, Failure> {
    let listens = api.api.listens.clone();
    api.call(move |daemon, _| Ok(Version { listens, ..daemon.version() })).await.map(Json)
}

/// What the machine can and can't do.
#[utoipa::path(get, path = "/v1/doctor", tag = "node", responses(
    (status = OK, body = Vec<Check>, description = "What was tried, in order")))]
pub async fn doctor(api: Asked) -> Result<Json<Vec<Check>>, Failure> {
    api.call(|daemon, _| Ok(daemon.doctor())).await.map(Json)
}

/// The substrate.
#[utoipa::path(get, path = "/v1/substrate", tag = "node", responses(
    (status = OK, body = Substrate, description = "What is wanted of it and what is; a tenant sees what it may use")))]
pub async fn substrate(api: Asked) -> Result<Json<Substrate>, Failure> {
    api.call(|daemon, scope| daemon.substrate(scope)).await.map(Json)
}

/// All vnets.
#[utoipa::path(get, path = "/v1/vnets", tag = "vnets", responses(
    (status = OK, body = Vec<VnetSummary>, description = "Those that who asks may see, by name")))]
pub async fn vnets(api: Asked) -> Result<Json<Vec<VnetSummary>>, Failure> {
    api.call(|daemon, scope| daemon.vnets(scope)).await.map(Json)
}

/// One vnet: its spec and its status.
#[utoipa::path(get, path = "/v1/vnets/{vnet}", tag = "vnets",
    params(("vnet" = String, Path, description = "Its name")), responses(
    (status = OK, body = Vnet, description = "The network")))]
pub async fn vnet(api: Asked, Names(vnet): Names<String>) -> Result<Json<Vnet>, Failure> {
    api.call(move |daemon, _| daemon.vnet(&vnet)).await.map(Json)
}

/// Counters now.
#[utoipa::path(get, path = "/v1/stats", tag = "observe", params(StatsQuery), responses(
    (status = OK, body = Stats, description = "Counters of this moment")))]
pub async fn stats(api: Asked, Params(query): Params<StatsQuery>) -> Result<Json<Stats>, Failure> {
    if let Some(vnet) = &query.vnet
        && !api.caller.scope.sees(vnet)
    {
        return Err(no_vnet(vnet).into());
    }
    api.call(move |daemon, scope| daemon.stats(scope, query)).await.map(Json)
}

/// What an Ethernet segment (a link of more than two ends) has learned.
#[utoipa::path(get, path = "/v1/vnets/{vnet}/links/{link}/fdb", tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    responses((status = OK, body = Vec<FdbEntry>, description = "By ends and addresses")))]
pub async fn fdb(
    api: Asked,
    Names((vnet, link)): Names<(String, String)>,
) -> Result<Json<Vec<FdbEntry>>, Failure> {
    api.call(move |daemon, _| daemon.fdb(&vnet, &link, false)).await.map(Json)
}

/// Has an Ethernet segment forget what it has learned.
#[utoipa::path(delete, path = "/v1/vnets/{vnet}/links/{link}/fdb", tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    responses((status = OK, description = "It has")))]
pub async fn clear_fdb(
    api: Asked,
    Names((vnet, link)): Names<(String, String)>,
) -> Result<Json<()>, Failure> {
    api.call(move |daemon, _| daemon.fdb(&vnet, &link, true).map(drop)).await.map(Json)
}

/// Follows the next frame that arrives at a port.
#[utoipa::path(post, path = "/v1/vnets/{vnet}/nodes/{node}/ports/{port}/trace", tag = "observe",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The node"),
        ("port" = String, Path, description = "The port")),
    request_body = TraceRequest, responses(
    (status = OK, body = Trace, description = "The stages that the frame passed, in order")))]
pub async fn trace(
    api: Asked,
    Names((vnet, node, port)): Names<(String, String, String)>,
    Body(request): Body<TraceRequest>,
) -> Result<Json<Trace>, Failure> {
    check_trace(&request)?;
    api.call(move |daemon, scope| daemon.trace(scope, &vnet, &node, &port, request)).await.map(Json)
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
