//! The stream of everybody who watches.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, stream};
use pdp_api::{Problem, ProblemKind, WATCH_EVERY_MS, WatchEnd, WatchLine, WatchQuery};

use super::Asked;
use super::answer::{Failure, Params};
use super::stream::{lines, ndjson};
use crate::access::no_vnet;
use crate::watch::Reader;

/// What is, and what happens from then on.
#[utoipa::path(get, path = "/v1/watch", tag = "observe", params(WatchQuery), responses(
    (status = OK, body = [WatchLine], content_type = "application/x-ndjson",
        description = "A line for each that the daemon has to say, until the client goes away")))]
pub async fn watch(api: Asked, Params(query): Params<WatchQuery>) -> Result<Response, Failure> {
    if let Some(vnet) = &query.vnet
        && !api.caller.scope.sees(vnet)
    {
        return Err(no_vnet(vnet).into());
    }
    if let Some(every_ms) = query.every_ms
        && !WATCH_EVERY_MS.contains(&every_ms)
    {
        let (min, max) = (WATCH_EVERY_MS.start(), WATCH_EVERY_MS.end());
        let problem = format!("everyMs {every_ms} is not within {min} to {max}");
        return Err(Problem::new(ProblemKind::Invalid, problem).into());
    }
    let reader = api.call(move |daemon, scope| daemon.watch(scope, query)).await?;
    Ok(ndjson(chunks(api, reader)).into_response())
}

/// Lines, until who asked may not any more or the daemon stops, which is the last of them.
fn chunks(api: Asked, reader: Reader) -> impl Stream<Item = Bytes> + Send + 'static {
    let over = {
        let api = api.clone();
        Box::pin(async move { api.over().await })
    };
    stream::unfold(Some((api, reader, over)), async |state| {
        let (api, mut reader, mut over) = state?;
        tokio::select! {
            bytes = reader.next() => Some((bytes, Some((api, reader, over)))),
            () = &mut over => {
                let reason = match api.api.stops() {
                    true => "the daemon stops; what runs goes on",
                    false => "who asked may not any more",
                };
                Some((lines(&WatchLine::End(WatchEnd { reason: reason.into() })), None))
            }
        }
    })
}
