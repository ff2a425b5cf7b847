//! Requests that change something: newline-delimited [`Event`]s, or their last one alone.

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use hyper::StatusCode;
use pdp_api::{
    ApplyRequest, DeleteQuery, DownRequest, Event, FILES_MAX, LinkChange, LinkRequest, Problem,
    ProblemKind, Progress, Report, RestartRequest, ScaleRequest,
};
use tokio::sync::mpsc;

use crate::access::{Asker, Scope, on_behalf_of};

use super::answer::{Body, Failure, Names, Params, panicked};
use super::stream::{lines, ndjson};
use super::{Asked, Daemon, ProgressFn};

/// Steps of progress that may wait for the client; more are left out.
const PROGRESS_MAX: usize = 64;

/// Applies files, or says what would change.
#[utoipa::path(post, path = "/v1/apply", tag = "changes", request_body = ApplyRequest, responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn apply(api: Asked, Body(request): Body<ApplyRequest>) -> Result<Response, Failure> {
    if request.files.len() > FILES_MAX {
        return Err(Problem::new(
            ProblemKind::TooLarge,
            format!("{} files exceed {FILES_MAX}", request.files.len()),
        )
        .into());
    }
    change(&api, move |daemon, scope, progress| daemon.apply(scope, request, progress)).await
}

/// Starts all that is stored.
#[utoipa::path(post, path = "/v1/up", tag = "changes", responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn up(api: Asked) -> Result<Response, Failure> {
    change(&api, |daemon, _, progress| daemon.up(progress)).await
}

/// Stops all vnets and the mux.
#[utoipa::path(post, path = "/v1/down", tag = "changes", request_body = DownRequest, responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn down(api: Asked, Body(request): Body<DownRequest>) -> Result<Response, Failure> {
    change(&api, move |daemon, _, progress| daemon.down(request, progress)).await
}

/// Stops and forgets a vnet, or nodes of it with their links.
#[utoipa::path(delete, path = "/v1/vnets/{vnet}", tag = "vnets",
    params(("vnet" = String, Path, description = "Its name"), DeleteQuery), responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn delete_vnet(
    api: Asked,
    Names(vnet): Names<String>,
    Params(query): Params<DeleteQuery>,
) -> Result<Response, Failure> {
    let Some(only) = query.only else {
        return change(&api, move |daemon, scope, progress| {
            daemon.delete_vnet(scope, &vnet, progress)
        })
        .await;
    };
    let nodes = only.split(',').map(str::to_owned).collect();
    let make = move |daemon: &dyn Daemon, scope: &Scope, progress: ProgressFn<'_>| {
        daemon.delete_nodes(scope, &vnet, &nodes, progress)
    };
    change(&api, make).await
}

/// Forgets the substrate; refused while there are vnets.
#[utoipa::path(delete, path = "/v1/substrate", tag = "node", responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn delete_substrate(api: Asked) -> Result<Response, Failure> {
    change(&api, |daemon, _, progress| daemon.delete_substrate(progress)).await
}

/// Forgets a tenant and its tokens; refused while it has vnets.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}", tag = "access",
    params(("tenant" = String, Path, description = "Its name")), responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn delete_tenant(api: Asked, Names(tenant): Names<String>) -> Result<Response, Failure> {
    change(&api, move |daemon, _, progress| daemon.delete_tenant(&tenant, progress)).await
}

/// Changes the number of forwarding guests of a router, without loss.
#[utoipa::path(put, path = "/v1/vnets/{vnet}/nodes/{node}/guests", tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router")),
    request_body = ScaleRequest, responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn scale(
    api: Asked,
    Names((vnet, node)): Names<(String, String)>,
    Body(request): Body<ScaleRequest>,
) -> Result<Response, Failure> {
    let make = move |daemon: &dyn Daemon, scope: &Scope, progress: ProgressFn<'_>| {
        daemon.scale(scope, &vnet, &node, request, progress)
    };
    change(&api, make).await
}

/// Ends and starts anew what runs of nodes, whether it runs well or not.
#[utoipa::path(post, path = "/v1/vnets/{vnet}/restart", tag = "vnets",
    params(("vnet" = String, Path, description = "The vnet")),
    request_body = RestartRequest, responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn restart(
    api: Asked,
    Names(vnet): Names<String>,
    Body(request): Body<RestartRequest>,
) -> Result<Response, Failure> {
    let make = move |daemon: &dyn Daemon, scope: &Scope, progress: ProgressFn<'_>| {
        daemon.restart(scope, &vnet, &request, progress)
    };
    change(&api, make).await
}

/// Sets a link up, or down with the carrier of both ends or without.
#[utoipa::path(put, path = "/v1/vnets/{vnet}/links/{link}", tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    request_body = LinkRequest, responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn set_link(
    api: Asked,
    Names((vnet, link)): Names<(String, String)>,
    Body(request): Body<LinkRequest>,
) -> Result<Response, Failure> {
    change(&api, move |daemon, scope, _| daemon.set_link(scope, &vnet, &link, request)).await
}

/// Changes how frames leave by a link's ends: rate, queue, delay, loss and so on. The stored spec has it from then
/// on; frames that wait are neither lost nor overtaken.
#[utoipa::path(patch, path = "/v1/vnets/{vnet}/links/{link}", tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    request_body = LinkChange, responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn change_link(
    api: Asked,
    Names((vnet, link)): Names<(String, String)>,
    Body(request): Body<LinkChange>,
) -> Result<Response, Failure> {
    change(&api, move |daemon, scope, _| daemon.change_link(scope, &vnet, &link, &request)).await
}

/// Makes a change on a thread of its own, to its end whatever the client does. One that fails
/// before its first step, or whose client wants one value, is answered with the status of its problem.
pub(super) async fn change(
    api: &Asked,
    make: impl FnOnce(&dyn Daemon, &Scope, ProgressFn<'_>) -> Result<Report, Problem> + Send + 'static,
) -> Result<Response, Failure> {
    let place = api.place.clone();
    let daemon = api.api.daemon.clone();
    let scope = api.caller.scope.clone();
    let begun = api.begun.clone();
    let asker = Asker { who: api.caller.who.clone(), scope: scope.clone(), begun: begun.clone() };
    if let Some(begun) = &begun {
        begun.take();
    }
    let (steps, mut queue) = mpsc::channel::<Progress>(PROGRESS_MAX);
    let task = tokio::task::spawn_blocking(move || {
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            on_behalf_of(asker, || {
                make(&*daemon, &scope, &mut |step| {
                    // A client that reads slowly must not hold the change up.
                    let _ = steps.try_send(step);
                })
            })
        }));
        let result = made.unwrap_or_else(|_| Err(panicked("a change panicked")));
        let result = result.map_err(|problem| daemon.shown_to(&scope, problem));
        if let Some(begun) = begun {
            match &result {
                Ok(_) => begun.end_blocking(StatusCode::OK.as_u16(), None),
                Err(problem) => begun.end_blocking(problem.kind.status(), Some(&problem.error)),
            }
        }
        drop(place);
        result
    });
    let end = async move {
        match task.await {
            Ok(Ok(report)) => Event::Result(report),
            Ok(Err(problem)) => Event::Problem(problem),
            Err(error) => Event::Problem(panicked(error)),
        }
    };
    let first = if api.one_value { None } else { queue.recv().await };
    let first = match first {
        Some(step) => Event::Progress(step),
        None => {
            return match end.await {
                Event::Problem(problem) => Err(problem.into()),
                Event::Result(report) if api.one_value => Ok(Json(report).into_response()),
                event => Ok(ndjson(stream::iter([lines(&event)])).into_response()),
            };
        }
    };
    let rest = stream::unfold(queue, async |mut queue| Some((queue.recv().await?, queue)));
    let events = stream::iter([first]).chain(rest.map(Event::Progress)).chain(stream::once(end));
    Ok(ndjson(events.map(|event| lines(&event))).into_response())
}
