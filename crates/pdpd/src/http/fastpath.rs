//! Filters, counters and frames of a fast path.

use axum::Json;
use pdp_api::{
    FastpathChange, FastpathChanged, FastpathCounters, FastpathCountersQuery, FastpathFilters,
    FastpathFiltersQuery, FastpathFrame, FastpathQueues, FastpathQueuesQuery,
};

use super::Asked;
use super::answer::{Body, Failure, Names, Params};

/// Filters of a router that the mux forwards for.
#[utoipa::path(get, path = "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters", tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router"),
        FastpathFiltersQuery),
    responses((status = OK, body = FastpathFilters, description = "By their numbers")))]
pub async fn fastpath_filters(
    api: Asked,
    Names((vnet, node)): Names<(String, String)>,
    Params(query): Params<FastpathFiltersQuery>,
) -> Result<Json<FastpathFilters>, Failure> {
    api.call(move |daemon, _| daemon.fastpath_filters(&vnet, &node, query)).await.map(Json)
}

/// Changes filters of a router that the mux forwards for, all at once or none.
#[utoipa::path(post, path = "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters", tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router")),
    request_body = FastpathChange,
    responses((status = OK, body = FastpathChanged, description = "They are in force")))]
pub async fn change_fastpath(
    api: Asked,
    Names((vnet, node)): Names<(String, String)>,
    Body(change): Body<FastpathChange>,
) -> Result<Json<FastpathChanged>, Failure> {
    api.call(move |daemon, _| daemon.change_fastpath(&vnet, &node, &change)).await.map(Json)
}

/// What counters of a router that the mux forwards for have, all at one moment.
#[utoipa::path(get, path = "/v1/vnets/{vnet}/nodes/{node}/fastpath/counters", tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router"),
        FastpathCountersQuery),
    responses((status = OK, body = FastpathCounters, description = "In order")))]
pub async fn fastpath_counters(
    api: Asked,
    Names((vnet, node)): Names<(String, String)>,
    Params(query): Params<FastpathCountersQuery>,
) -> Result<Json<FastpathCounters>, Failure> {
    api.call(move |daemon, _| daemon.fastpath_counters(&vnet, &node, query)).await.map(Json)
}

/// How queues of a router that the mux forwards for are.
#[utoipa::path(get, path = "/v1/vnets/{vnet}/nodes/{node}/fastpath/queues", tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router"),
        FastpathQueuesQuery),
    responses((status = OK, body = FastpathQueues, description = "In order")))]
pub async fn fastpath_queues(
    api: Asked,
    Names((vnet, node)): Names<(String, String)>,
    Params(query): Params<FastpathQueuesQuery>,
) -> Result<Json<FastpathQueues>, Failure> {
    api.call(move |daemon, _| daemon.fastpath_queues(&vnet, &node, &query)).await.map(Json)
}

/// Sends a frame by a router that the mux forwards for.
#[utoipa::path(post, path = "/v1/vnets/{vnet}/nodes/{node}/fastpath/frames", tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router")),
    request_body = FastpathFrame, responses(
    (status = OK, description = "The mux has it; one that there is no room for is dropped and counted")))]
pub async fn send_frame(
    api: Asked,
    Names((vnet, node)): Names<(String, String)>,
    Body(frame): Body<FastpathFrame>,
) -> Result<Json<()>, Failure> {
    api.call(move |daemon, _| daemon.send_frame(&vnet, &node, &frame)).await.map(Json)
}
