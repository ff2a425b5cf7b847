//! Authorization of every request. In this order: the client's identity, its
//! permission, a permit within the limits, the body, and the audit log entry. A client
//! without permission or permit thus costs no more than reading its request head.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode, Uri};
use pdp_api::{AuditEntry, Problem, ProblemKind};
use pdp_spec::limits::TENANT_AUDIT_DEFAULT;

use super::answer::{AuditError, JSON, NDJSON, ProblemResponse};
use super::endpoints::RequestRules;
use super::limits::ResponseMode;
use super::request::{AuthorizedRequest, identify};
use super::{Api, SMALL_BODY_BYTES_MAX};
use crate::access::audit::{self, PendingAudit};
use crate::access::{PeerIdentity, Permission};
use crate::util::now_ms;

/// Rules for requests to a path that does not exist. An authenticated client is told so.
const NO_ENDPOINT: RequestRules = RequestRules {
    permission: Permission::Known,
    mode: ResponseMode::Whole,
    body_bytes_max: SMALL_BODY_BYTES_MAX,
};

/// Authorizes a request, passes it to its handler, and logs it.
pub async fn authorize(State(api): State<Api>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let (mut parts, body) = request.into_parts();
    let row = AuditEntry {
        at_ms: now_ms(),
        what: audit::what(parts.method.as_str(), &parts.uri.to_string()),
        vnet: vnet_of(&mut parts).await,
        ..AuditEntry::default()
    };
    let path = parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let mut pass = RequestCheck { api: &api, row, start, kept: TENANT_AUDIT_DEFAULT.into() };
    let (authorized, body) = match pass.ask(&parts, path.as_deref(), body).await {
        Ok(authorized) => authorized,
        Err(problem) => {
            let mut response = match problem.kind {
                // The same response as axum's.
                ProblemKind::Invalid => no_such_method(parts.method, parts.uri).await,
                _ => ProblemResponse::from(problem).into_response(),
            };
            if response.status() == StatusCode::UNAUTHORIZED {
                let bearer = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
            }
            pass.note(outcome(&response)).await;
            return response;
        }
    };
    let begun = authorized.audit_entry.clone();
    parts.extensions.insert(authorized);
    let response = next.run(Request::from_parts(parts, body)).await;
    match begun {
        None => pass.note(outcome(&response)).await,
        Some(begun) if begun.is_taken() => {}
        Some(begun) => {
            let (status, error) = outcome(&response);
            begun.end(status, error.as_deref(), None).await;
        }
    }
    response
}

struct RequestCheck<'a> {
    api: &'a Api,
    row: AuditEntry,
    start: Instant,
    /// Audit log entries that are kept for the client, if it is a tenant.
    kept: u64,
}

impl RequestCheck<'_> {
    async fn ask(
        &mut self,
        parts: &Parts,
        path: Option<&str>,
        body: Body,
    ) -> Result<(AuthorizedRequest, Body), Problem> {
        let peer = parts.extensions.get::<PeerIdentity>().copied();
        let peer = peer.ok_or_else(|| Problem::internal("the request has no peer"))?;
        self.row.from = peer.to_string();
        let shown = Arc::new((peer, token_of(&parts.headers)));
        let caller = identify(self.api, shown.clone()).await?;
        let (caller, quota) = caller.map_err(|(who, problem)| {
            self.row.who = who;
            problem
        })?;
        self.kept = quota.audit.unwrap_or(TENANT_AUDIT_DEFAULT).into();
        self.row.who = caller.identity.clone();
        self.row.role = Some(caller.role);
        self.row.tenant = caller.scope.tenant().map(str::to_owned);
        let found = path.map_or(Some(NO_ENDPOINT), |path| self.api.rules.find(&parts.method, path));
        let RequestRules { permission, mode, body_bytes_max } =
            found.ok_or_else(|| Problem::new(ProblemKind::Invalid, "no such method"))?;
        permission.check(&caller, self.row.vnet.as_deref())?;
        let room = self.api.quotas.of(&caller.scope, &quota);
        let mut place = room.acquire(mode)?;
        let body = room.body(&mut place, body, body_bytes_max).await?;
        let begun = match permission.changes() {
            true => Some(Arc::new(self.begin().await?)),
            false => None,
        };
        let (api, caller, place) = (self.api.clone(), Arc::new(caller), Arc::new(place));
        let one_value = accepts(&parts.headers, JSON) && !accepts(&parts.headers, NDJSON);
        Ok((
            AuthorizedRequest {
                api,
                caller,
                permit: place,
                credentials: shown,
                one_value,
                audit_entry: begun,
            },
            body.into(),
        ))
    }

    async fn begin(&mut self) -> Result<PendingAudit, Problem> {
        self.row.changes = true;
        self.api.audit.begin(self.row.clone(), self.kept, self.start).await
    }

    async fn note(&mut self, (status, error): (u16, Option<String>)) {
        let error = error.map(|error| audit::line(&error));
        let duration_us = Some(audit::us(self.start));
        let row = AuditEntry { status: Some(status), error, duration_us, ..self.row.clone() };
        self.api.audit.note(AuditEntry { changes: false, ..row }, self.kept).await;
    }
}

/// Returns the token of a request; empty if the request has credentials of another kind.
fn token_of(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(AUTHORIZATION)?.to_str().unwrap_or("");
    let (scheme, token) = text.split_once(' ').unwrap_or(("", ""));
    // RFC 9110 section 11.1: the scheme is case-insensitive.
    let is_token = scheme.eq_ignore_ascii_case("bearer");
    Some(if is_token { token.trim().to_owned() } else { String::new() })
}

/// True if the client explicitly accepts this content type.
fn accepts(headers: &HeaderMap, content_type: &str) -> bool {
    let lists = headers.get_all(ACCEPT).iter().filter_map(|list| list.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|range| {
        let range = range.split(';').next().unwrap_or_default();
        range.trim().eq_ignore_ascii_case(content_type)
    })
}

/// Returns the vnet that a path names.
async fn vnet_of(parts: &mut Parts) -> Option<String> {
    let names = RawPathParams::from_request_parts(parts, &()).await.ok()?;
    names.iter().find(|(name, _)| *name == "vnet").map(|(_, vnet)| vnet.to_owned())
}

fn outcome(response: &Response) -> (u16, Option<String>) {
    let error = response.extensions().get::<AuditError>().map(|error| error.0.clone());
    (response.status().as_u16(), error)
}

pub async fn no_such_path(uri: Uri) -> ProblemResponse {
    Problem::not_found(format!("no such path: {}", uri.path()))
        .hint(format!("GET {} lists them", pdp_api::paths::OPENAPI))
        .into()
}

pub async fn no_such_method(method: Method, uri: Uri) -> Response {
    let problem = Problem::new(ProblemKind::Invalid, format!("{method} is not for {}", uri.path()))
        .hint(format!("GET {} lists the methods", pdp_api::paths::OPENAPI));
    (StatusCode::METHOD_NOT_ALLOWED, Json(problem)).into_response()
}
