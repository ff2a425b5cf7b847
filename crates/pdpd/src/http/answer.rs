//! Requests taken apart and failures put into words: every refusal is a [`Problem`].

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::http::request::Parts;
use pdp_api::{BODY_BYTES_MAX, Problem, ProblemKind};
use serde::de::DeserializeOwned;

use super::{Asked, CALL_TIME_MAX, Daemon};
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

/// Bytes of a body that are parsed where they came; more of them on a thread of their own.
const PARSED_AT_ONCE_BYTES: usize = 16 << 10;

/// A request's JSON body, which the gate has read; an empty body counts as `{}`.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let bytes = axum::body::to_bytes(request.into_body(), BODY_BYTES_MAX);
        let bytes = bytes.await.map_err(Problem::internal)?;
        let bytes_len = bytes.len();
        let parse = move || {
            let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
            serde_json::from_slice(text).map_err(|error| {
                Problem::new(ProblemKind::Invalid, format!("body: {error}"))
                    .hint(format!("GET {} describes it", pdp_api::paths::OPENAPI))
            })
        };
        let value = match bytes_len {
            ..=PARSED_AT_ONCE_BYTES => parse(),
            _ => tokio::task::spawn_blocking(parse).await.map_err(panicked)?,
        };
        Ok(Self(value?))
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
        let daemon = self.api.daemon.clone();
        let scope = self.caller.scope.clone();
        let place = self.place.clone();
        let task = tokio::task::spawn_blocking(move || {
            let answer = ask(&*daemon, &scope).map_err(|problem| daemon.shown_to(&scope, problem));
            drop(place);
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
}

/// A call that ended by a panic.
pub fn panicked(error: impl std::fmt::Display) -> Problem {
    Problem::internal(error).hint("a fault of the daemon; see `pdp logs`")
}
