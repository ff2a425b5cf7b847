//! Filters, counters and frames of a fast path.

use axum::Json;
use pdp_api::{
    FastpathChange, FastpathChanged, FastpathCounters, FastpathCountersQuery, FastpathFilters,
    FastpathFiltersQuery, FastpathFrame, FastpathQueues, FastpathQueuesQuery, paths,
};

use super::AuthorizedRequest;
use super::answer::{JsonBody, Params, PathParams, ProblemResponse};
use crate::status::fastpath::FastPath;

/// Returns filters of a router that the mux forwards for.
#[utoipa::path(get, path = paths::FASTPATH_FILTERS, tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router"),
        FastpathFiltersQuery),
    responses((status = OK, body = FastpathFilters, description = "By their numbers")))]
pub async fn fastpath_filters(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    Params(query): Params<FastpathFiltersQuery>,
) -> Result<Json<FastpathFilters>, ProblemResponse> {
    api.call(move |daemon, _| FastPath::find(daemon, &vnet, &node)?.filters(query)).await.map(Json)
}

/// Changes filters of a router that the mux forwards for, all or none.
#[utoipa::path(post, path = paths::FASTPATH_FILTERS, tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router")),
    request_body = FastpathChange,
    responses((status = OK, body = FastpathChanged, description = "The filters are in force")))]
pub async fn change_fastpath(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    JsonBody(change): JsonBody<FastpathChange>,
) -> Result<Json<FastpathChanged>, ProblemResponse> {
    api.call(move |daemon, _| FastPath::find(daemon, &vnet, &node)?.change(&change)).await.map(Json)
}

/// Returns counters of a router that the mux forwards for, all from one moment.
#[utoipa::path(get, path = paths::FASTPATH_COUNTERS, tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router"),
        FastpathCountersQuery),
    responses((status = OK, body = FastpathCounters, description = "In order")))]
pub async fn fastpath_counters(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    Params(query): Params<FastpathCountersQuery>,
) -> Result<Json<FastpathCounters>, ProblemResponse> {
    api.call(move |daemon, _| FastPath::find(daemon, &vnet, &node)?.counters(query)).await.map(Json)
}

/// Returns the state of the queues of a router that the mux forwards for.
#[utoipa::path(get, path = paths::FASTPATH_QUEUES, tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router"),
        FastpathQueuesQuery),
    responses((status = OK, body = FastpathQueues, description = "In order")))]
pub async fn fastpath_queues(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    Params(query): Params<FastpathQueuesQuery>,
) -> Result<Json<FastpathQueues>, ProblemResponse> {
    api.call(move |daemon, _| FastPath::queues_of(daemon, &vnet, &node, &query)).await.map(Json)
}

/// Sends a frame through a router that the mux forwards for.
#[utoipa::path(post, path = paths::FASTPATH_FRAMES, tag = "fastpath",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router")),
    request_body = FastpathFrame, responses(
    (status = OK, description = "The mux accepted the frame; if its queue is full, the frame is \
                                 dropped and counted")))]
pub async fn send_frame(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    JsonBody(frame): JsonBody<FastpathFrame>,
) -> Result<Json<()>, ProblemResponse> {
    api.call(move |daemon, _| FastPath::find(daemon, &vnet, &node)?.send(&frame)).await.map(Json)
}
