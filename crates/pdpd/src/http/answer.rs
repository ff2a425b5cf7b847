//! Requests taken apart and failures put into words: every refusal is a [`Problem`].

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::http::request::Parts;
use pdp_api::{BODY_BYTES_MAX, Problem, ProblemKind};
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Asked, BODY_TIME_MAX, CALL_TIME_MAX, Daemon};
use crate::access::Scope;

/// A [`Problem`] as the answer.
pub struct Failure(Box<Problem>);

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(Box::new(problem))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status.is_server_error() {
            tracing::warn!(problem = %self.0, "request not met");
        }
        let error = Told(self.0.error.clone());
        let mut response = (status, Json(self.0)).into_response();
        response.extensions_mut().insert(error);
        response
    }
}

/// Goes with the answer of a failure, for the audit log: its problem's error.
#[derive(Clone)]
pub struct Told(pub String);

/// A request's JSON body; an empty body counts as `{}`.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let body = axum::body::to_bytes(request.into_body(), BODY_BYTES_MAX);
        let bytes = tokio::time::timeout(BODY_TIME_MAX, body)
            .await
            .map_err(|_| {
                let limit = BODY_TIME_MAX.as_secs();
                Problem::new(ProblemKind::TimedOut, format!("body: not whole after {limit} s"))
            })?
            .map_err(|_| {
                Problem::new(
                    ProblemKind::TooLarge,
                    format!("body: over {BODY_BYTES_MAX} bytes, or cut off"),
                )
                .hint("apply fewer or smaller files at a time")
            })?;
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        let value = serde_json::from_slice(text).map_err(|error| {
            Problem::new(ProblemKind::Invalid, format!("body: {error}"))
                .hint(format!("GET {} describes it", pdp_api::paths::OPENAPI))
        })?;
        Ok(Self(value))
    }
}

/// A request's query.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let Query(value) = Query::try_from_uri(&parts.uri).map_err(|error| {
            Problem::new(ProblemKind::Invalid, format!("query: {}", error.body_text()))
        })?;
        Ok(Self(value))
    }
}

/// The variable parts of a request's path.
pub struct Names<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Names<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Path(value) = Path::from_request_parts(parts, state).await.map_err(|error| {
            Problem::new(ProblemKind::Invalid, format!("path: {}", error.body_text()))
        })?;
        Ok(Self(value))
    }
}

impl Asked {
    /// Makes a call that changes nothing, on a thread of its own.
    pub async fn call<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&dyn Daemon, &Scope) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Failure> {
        let permit = self.call_permit()?;
        let daemon = self.api.daemon.clone();
        let scope = self.caller.scope.clone();
        let task = tokio::task::spawn_blocking(move || {
            let answer = ask(&*daemon, &scope);
            drop(permit);
            answer
        });
        match tokio::time::timeout(CALL_TIME_MAX, task).await {
            Ok(answer) => Ok(answer.map_err(panicked)??),
            Err(_) => {
                let limit = CALL_TIME_MAX.as_secs();
                Err(Problem::new(ProblemKind::TimedOut, format!("no answer within {limit} s"))
                    .hint("see `pdp logs`")
                    .into())
            }
        }
    }

    /// Room for one more call.
    pub fn call_permit(&self) -> Result<OwnedSemaphorePermit, Problem> {
        permit(&self.room.calls, self.room.max, "calls")
    }

    /// Room for one more stream.
    pub fn stream_permit(&self) -> Result<OwnedSemaphorePermit, Problem> {
        permit(&self.room.streams, self.room.max, "streams (captures, logs, routes, commands)")
    }
}

fn permit(
    room: &std::sync::Arc<Semaphore>,
    max: usize,
    what: &str,
) -> Result<OwnedSemaphorePermit, Problem> {
    room.clone().try_acquire_owned().map_err(|_| {
        Problem::new(ProblemKind::Busy, format!("{max} {what} at a time are the limit"))
            .hint("end some, or try again")
    })
}

/// A call that ended by a panic.
pub fn panicked(error: impl std::fmt::Display) -> Problem {
    Problem::internal(error).hint("a fault of the daemon; see `pdp logs`")
}
