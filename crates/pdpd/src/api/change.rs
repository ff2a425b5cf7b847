//! Requests that change something. The response is newline-delimited
//! [`ChangeEvent`]s, or the last one alone.

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use hyper::StatusCode;
use pdp_api::{
    ApplyRequest, ChangeEvent, ChangeReport, DeleteQuery, DownRequest, FILES_MAX, LinkChange,
    LinkRequest, Problem, ProblemKind, Progress, RestartRequest, ScaleRequest, paths,
};
use tokio::sync::mpsc;

use crate::access::{AccessScope, Requester, on_behalf_of};
use crate::engine::DaemonCore;
use crate::util::ProgressFn;

use super::AuthorizedRequest;
use super::answer::{JsonBody, Params, PathParams, ProblemResponse, panicked};
use super::stream::{lines, ndjson};

/// Progress steps that may wait for the client; excess steps are dropped.
const PROGRESS_MAX: usize = 64;

/// Applies files, or returns what would change.
#[utoipa::path(post, path = paths::APPLY, tag = "changes", request_body = ApplyRequest, responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn apply(
    api: AuthorizedRequest,
    JsonBody(request): JsonBody<ApplyRequest>,
) -> Result<Response, ProblemResponse> {
    if request.files.len() > FILES_MAX {
        return Err(Problem::new(
            ProblemKind::TooLarge,
            format!("{} files exceed {FILES_MAX}", request.files.len()),
        )
        .into());
    }
    change(&api, move |daemon, scope, progress| daemon.apply(scope, request, progress)).await
}

/// Starts everything that is stored.
#[utoipa::path(post, path = paths::UP, tag = "changes", responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn up(api: AuthorizedRequest) -> Result<Response, ProblemResponse> {
    change(&api, |daemon, _, progress| daemon.up(progress)).await
}

/// Stops all vnets and the mux.
#[utoipa::path(post, path = paths::DOWN, tag = "changes", request_body = DownRequest, responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn down(
    api: AuthorizedRequest,
    JsonBody(request): JsonBody<DownRequest>,
) -> Result<Response, ProblemResponse> {
    change(&api, move |daemon, _, progress| daemon.down(request, progress)).await
}

/// Stops and deletes a vnet, or some of its nodes with their links.
#[utoipa::path(delete, path = paths::VNET, tag = "vnets",
    params(("vnet" = String, Path, description = "Its name"), DeleteQuery), responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn delete_vnet(
    api: AuthorizedRequest,
    PathParams(vnet): PathParams<String>,
    Params(query): Params<DeleteQuery>,
) -> Result<Response, ProblemResponse> {
    let Some(only) = query.only else {
        return change(&api, move |daemon, scope, progress| {
            daemon.delete_vnet(scope, &vnet, progress)
        })
        .await;
    };
    let nodes = only.split(',').map(str::to_owned).collect();
    let make = move |daemon: &DaemonCore, scope: &AccessScope, progress: ProgressFn<'_>| {
        daemon.delete_nodes(scope, &vnet, &nodes, progress)
    };
    change(&api, make).await
}

/// Deletes the substrate; refused while vnets exist.
#[utoipa::path(delete, path = paths::SUBSTRATE, tag = "node", responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn delete_substrate(api: AuthorizedRequest) -> Result<Response, ProblemResponse> {
    change(&api, |daemon, _, progress| daemon.delete_substrate(progress)).await
}

/// Deletes a tenant and its tokens; refused while it has vnets.
#[utoipa::path(delete, path = paths::TENANT, tag = "access",
    params(("tenant" = String, Path, description = "Its name")), responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn delete_tenant(
    api: AuthorizedRequest,
    PathParams(tenant): PathParams<String>,
) -> Result<Response, ProblemResponse> {
    change(&api, move |daemon, _, _| daemon.delete_tenant(&tenant)).await
}

/// Changes the number of a router's forwarding guests, without loss.
#[utoipa::path(put, path = paths::GUESTS, tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router")),
    request_body = ScaleRequest, responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn scale(
    api: AuthorizedRequest,
    PathParams((vnet, node)): PathParams<(String, String)>,
    JsonBody(request): JsonBody<ScaleRequest>,
) -> Result<Response, ProblemResponse> {
    let make = move |daemon: &DaemonCore, scope: &AccessScope, progress: ProgressFn<'_>| {
        daemon.scale(scope, &vnet, &node, request, progress)
    };
    change(&api, make).await
}

/// Restarts the processes of nodes, whether they run well or not.
#[utoipa::path(post, path = paths::RESTART, tag = "vnets",
    params(("vnet" = String, Path, description = "The vnet")),
    request_body = RestartRequest, responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn restart(
    api: AuthorizedRequest,
    PathParams(vnet): PathParams<String>,
    JsonBody(request): JsonBody<RestartRequest>,
) -> Result<Response, ProblemResponse> {
    let make = move |daemon: &DaemonCore, scope: &AccessScope, progress: ProgressFn<'_>| {
        daemon.restart(scope, &vnet, &request, progress)
    };
    change(&api, make).await
}

/// Sets a link up or down. A link that is set down silently keeps the carrier of both ends.
#[utoipa::path(put, path = paths::LINK, tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    request_body = LinkRequest, responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn set_link(
    api: AuthorizedRequest,
    PathParams((vnet, link)): PathParams<(String, String)>,
    JsonBody(request): JsonBody<LinkRequest>,
) -> Result<Response, ProblemResponse> {
    change(&api, move |daemon, scope, _| daemon.set_link(scope, &vnet, &link, request)).await
}

/// Changes the impairments of a link's ends: rate, queue, delay, loss and so on. The
/// stored spec has them from then on. Frames in the queue are neither lost nor overtaken.
#[utoipa::path(patch, path = paths::LINK, tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    request_body = LinkChange, responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn change_link(
    api: AuthorizedRequest,
    PathParams((vnet, link)): PathParams<(String, String)>,
    JsonBody(request): JsonBody<LinkChange>,
) -> Result<Response, ProblemResponse> {
    change(&api, move |daemon, scope, _| daemon.change_link(scope, &vnet, &link, &request)).await
}

/// Makes a change on its own thread. It runs to its end, whatever the
/// client does. If it fails before its first step, or if the client
/// wants one value, the response has the status of its problem.
pub(super) async fn change(
    api: &AuthorizedRequest,
    make: impl FnOnce(&DaemonCore, &AccessScope, ProgressFn<'_>) -> Result<ChangeReport, Problem>
    + Send
    + 'static,
) -> Result<Response, ProblemResponse> {
    let node = api.node();
    let begun = api.audit_entry.clone();
    let asker = Requester {
        identity: api.caller.identity.clone(),
        scope: api.caller.scope.clone(),
        audit_entry: begun.clone(),
    };
    if let Some(begun) = &begun {
        begun.take();
    }
    let (steps, mut queue) = mpsc::channel::<Progress>(PROGRESS_MAX);
    let task = tokio::task::spawn_blocking(move || {
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // A slow client must not delay the change.
            let mut progress = |step| drop(steps.try_send(step));
            on_behalf_of(asker, || node.call(|daemon, scope| make(daemon, scope, &mut progress)))
        }));
        let result = made.unwrap_or_else(|_| Err(panicked("a change panicked")));
        if let Some(begun) = begun {
            match &result {
                Ok(_) => begun.end_blocking(StatusCode::OK.as_u16(), None),
                Err(problem) => begun.end_blocking(problem.kind.status(), Some(&problem.error)),
            }
        }
        drop(node);
        result
    });
    let end = async move {
        match task.await {
            Ok(Ok(report)) => ChangeEvent::Result(report),
            Ok(Err(problem)) => ChangeEvent::Problem(problem),
            Err(error) => ChangeEvent::Problem(panicked(error)),
        }
    };
    let first = if api.one_value { None } else { queue.recv().await };
    let first = match first {
        Some(step) => ChangeEvent::Progress(step),
        None => {
            return match end.await {
                ChangeEvent::Problem(problem) => Err(problem.into()),
                ChangeEvent::Result(report) if api.one_value => Ok(Json(report).into_response()),
                event => Ok(ndjson(stream::iter([lines(&event)])).into_response()),
            };
        }
    };
    let rest = stream::unfold(queue, async |mut queue| Some((queue.recv().await?, queue)));
    let events =
        stream::iter([first]).chain(rest.map(ChangeEvent::Progress)).chain(stream::once(end));
    Ok(ndjson(events.map(|event| lines(&event))).into_response())
}
