//! Parses requests and formats failures: every refusal is a [`Problem`].

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::http::request::Parts;
use pdp_api::{BODY_BYTES_MAX, Problem, ProblemKind};
use serde::de::DeserializeOwned;

/// Content type of a single value.
pub const JSON: &str = "application/json";

/// Content type of JSON lines.
pub const NDJSON: &str = "application/x-ndjson";

/// Content type of captures.
pub const PCAP: &str = "application/vnd.tcpdump.pcap";

/// Response with a [`Problem`].
pub struct ProblemResponse(Box<Problem>);

impl From<Problem> for ProblemResponse {
    fn from(problem: Problem) -> Self {
        Self(Box::new(problem))
    }
}

impl IntoResponse for ProblemResponse {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status.is_server_error() {
            tracing::warn!(problem = %self.0, "request not met");
        }
        let error = AuditError(self.0.error.clone());
        let mut response = (status, Json(self.0)).into_response();
        response.extensions_mut().insert(error);
        response
    }
}

/// Error of a failed response, attached for the audit log.
#[derive(Clone)]
pub struct AuditError(pub String);

/// Largest body that is parsed on the async thread, bytes; larger ones
/// are parsed on a blocking thread.
const PARSED_AT_ONCE_BYTES: usize = 16 << 10;

/// A request's JSON body, already read by the authorization layer. An empty body counts as `{}`.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send + 'static, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ProblemResponse;

    async fn from_request(request: Request, _: &S) -> Result<Self, ProblemResponse> {
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

/// Query parameters of a request.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ProblemResponse> {
        let Query(value) = Query::try_from_uri(&parts.uri).map_err(|error| {
            Problem::new(ProblemKind::Invalid, format!("query: {}", error.body_text()))
        })?;
        Ok(Self(value))
    }
}

/// Path parameters of a request.
pub struct PathParams<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParams<T> {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ProblemResponse> {
        let Path(value) = Path::from_request_parts(parts, state).await.map_err(|error| {
            Problem::new(ProblemKind::Invalid, format!("path: {}", error.body_text()))
        })?;
        Ok(Self(value))
    }
}

/// Problem of a call that panicked.
pub fn panicked(error: impl std::fmt::Display) -> Problem {
    Problem::internal(error).hint("a fault of the daemon; see `pdp logs`")
}
