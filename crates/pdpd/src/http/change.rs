//! Requests that change something: newline-delimited [`Event`]s.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use pdp_api::{
    ApplyRequest, DownRequest, Event, FILES_MAX, LinkRequest, Problem, ProblemKind, Progress,
    Report, ScaleRequest,
};
use tokio::sync::mpsc;

use super::answer::{Body, Failure, Names, panicked};
use super::stream::{lines, ndjson};
use super::{Api, Daemon, ProgressFn};

/// Steps of progress that may wait for the client; more are left out.
const PROGRESS_MAX: usize = 64;

/// Applies files, or says what would change.
#[utoipa::path(post, path = "/v1/apply", tag = "changes", request_body = ApplyRequest, responses(
    (status = OK, body = Event, content_type = "application/x-ndjson"),
    (status = "default", body = Problem)))]
pub async fn apply(
    State(api): State<Api>,
    Body(request): Body<ApplyRequest>,
) -> Result<Response, Failure> {
    if request.files.len() > FILES_MAX {
        return Err(Problem::new(
            ProblemKind::TooLarge,
            format!("{} files exceed {FILES_MAX}", request.files.len()),
        )
        .into());
    }
    change(&api, move |daemon, progress| daemon.apply(request, progress)).await
}

/// Starts all that is stored.
#[utoipa::path(post, path = "/v1/up", tag = "changes", responses(
    (status = OK, body = Event, content_type = "application/x-ndjson"),
    (status = "default", body = Problem)))]
pub async fn up(State(api): State<Api>) -> Result<Response, Failure> {
    change(&api, |daemon, progress| daemon.up(progress)).await
}

/// Stops all vnets and the mux.
#[utoipa::path(post, path = "/v1/down", tag = "changes", request_body = DownRequest, responses(
    (status = OK, body = Event, content_type = "application/x-ndjson"),
    (status = "default", body = Problem)))]
pub async fn down(
    State(api): State<Api>,
    Body(request): Body<DownRequest>,
) -> Result<Response, Failure> {
    change(&api, move |daemon, progress| daemon.down(request, progress)).await
}

/// Stops and forgets a vnet.
#[utoipa::path(delete, path = "/v1/vnets/{vnet}", tag = "vnets",
    params(("vnet" = String, Path, description = "Its name")), responses(
    (status = OK, body = Event, content_type = "application/x-ndjson"),
    (status = "default", body = Problem)))]
pub async fn delete_vnet(
    State(api): State<Api>,
    Names(vnet): Names<String>,
) -> Result<Response, Failure> {
    change(&api, move |daemon, progress| daemon.delete_vnet(&vnet, progress)).await
}

/// Forgets the substrate; refused while there are vnets.
#[utoipa::path(delete, path = "/v1/substrate", tag = "node", responses(
    (status = OK, body = Event, content_type = "application/x-ndjson"),
    (status = "default", body = Problem)))]
pub async fn delete_substrate(State(api): State<Api>) -> Result<Response, Failure> {
    change(&api, |daemon, progress| daemon.delete_substrate(progress)).await
}

/// Changes the number of forwarding guests of a router, without loss.
#[utoipa::path(put, path = "/v1/vnets/{vnet}/nodes/{node}/guests", tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("node" = String, Path, description = "The router")),
    request_body = ScaleRequest, responses(
    (status = OK, body = Event, content_type = "application/x-ndjson"),
    (status = "default", body = Problem)))]
pub async fn scale(
    State(api): State<Api>,
    Names((vnet, node)): Names<(String, String)>,
    Body(request): Body<ScaleRequest>,
) -> Result<Response, Failure> {
    change(&api, move |daemon, progress| daemon.scale(&vnet, &node, request, progress)).await
}

/// Sets a link up or down.
#[utoipa::path(put, path = "/v1/vnets/{vnet}/links/{link}", tag = "vnets",
    params(
        ("vnet" = String, Path, description = "The vnet"),
        ("link" = String, Path, description = "Its name, or one of its ends: `r1:eth0`")),
    request_body = LinkRequest, responses(
    (status = OK, body = Event, content_type = "application/x-ndjson"),
    (status = "default", body = Problem)))]
pub async fn set_link(
    State(api): State<Api>,
    Names((vnet, link)): Names<(String, String)>,
    Body(request): Body<LinkRequest>,
) -> Result<Response, Failure> {
    change(&api, move |daemon, _| daemon.set_link(&vnet, &link, request.up)).await
}

/// Makes a change on a thread of its own, to its end whatever the client does. One that fails
/// before its first step is answered with the status of its problem.
async fn change(
    api: &Api,
    make: impl FnOnce(&dyn Daemon, ProgressFn<'_>) -> Result<Report, Problem> + Send + 'static,
) -> Result<Response, Failure> {
    let permit = api.call_permit()?;
    let daemon = api.daemon.clone();
    let (steps, mut queue) = mpsc::channel::<Progress>(PROGRESS_MAX);
    let task = tokio::task::spawn_blocking(move || {
        let result = make(&*daemon, &mut |step| {
            // A client that reads slowly must not hold the change up.
            let _ = steps.try_send(step);
        });
        drop(permit);
        result
    });
    let end = async move {
        match task.await {
            Ok(Ok(report)) => Event::Result(report),
            Ok(Err(problem)) => Event::Problem(problem),
            Err(error) => Event::Problem(panicked(error)),
        }
    };
    let first = match queue.recv().await {
        Some(step) => Event::Progress(step),
        None => {
            return match end.await {
                Event::Problem(problem) => Err(problem.into()),
                event => Ok(ndjson(stream::iter([lines(&event)])).into_response()),
            };
        }
    };
    let rest = stream::unfold(queue, async |mut queue| Some((queue.recv().await?, queue)));
    let events = stream::iter([first]).chain(rest.map(Event::Progress)).chain(stream::once(end));
    Ok(ndjson(events.map(|event| lines(&event))).into_response())
}
