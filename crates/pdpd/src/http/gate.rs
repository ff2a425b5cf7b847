//! The gate that every request passes: who asks, whether that may, its place, its body, and the row in
//! the audit log; in this order, so that who may not, or has no place, costs no more than its head.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts, MatchedPath, RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode, Uri};
use pdp_api::{AuditEntry, BODY_BYTES_MAX, Problem, ProblemKind, paths};
use pdp_spec::Quota;
use pdp_spec::limits::TENANT_AUDIT_DEFAULT;

use super::answer::{Failure, Told, panicked};
use super::description::JSON;
use super::room::Place;
use super::stream::NDJSON;
use super::{Api, SMALL_BODY_BYTES_MAX};
use crate::access::{Answer, Caller, Peer, Right, UNKNOWN_TOKEN, answer, rule};
use crate::audit::{self, Begun};
use crate::state::access::now_ms;

/// How often who is behind an answer that goes on is looked at again.
const KNOWN_FOR: Duration = Duration::from_secs(1);

/// Paths, as the API describes them, whose requests have much to say.
const LARGE_BODIES: [&str; 2] = [paths::APPLY, "/v1/vnets/{vnet}/nodes/{node}/fastpath/filters"];

/// What a request shows of who asks: from where, and a token.
type Shown = (Peer, Option<String>);

/// A request that was let through: what handlers have.
#[derive(Clone)]
pub struct Asked {
    pub api: Api,
    pub caller: Arc<Caller>,
    /// Taken as long as anything works for it.
    pub place: Arc<Place>,
    /// What it showed of itself.
    shown: Arc<Shown>,
    /// True if the client accepts JSON and no JSON lines. A change then answers with its report or problem alone.
    pub one_value: bool,
    /// Its row in the audit log, where it may change something.
    pub begun: Option<Arc<Begun>>,
}

impl Asked {
    /// Ends when an answer that goes on has to: the daemon stops, or who asked is not any more who it was,
    /// by a token that was revoked or is over, or by another specification of tenants. Returns why.
    pub async fn over(&self) -> String {
        tokio::select! {
            () = self.api.stop() => "the daemon stopped".into(),
            why = self.unknown() => why,
        }
    }

    async fn unknown(&self) -> String {
        loop {
            tokio::time::sleep(KNOWN_FOR).await;
            match identify(&self.api, self.shown.clone()).await {
                Ok(Ok((caller, _))) if caller == *self.caller => {}
                // The state can't be read: nobody was refused.
                Ok(Err((_, problem))) if problem.kind == ProblemKind::Internal => {}
                // A token that was known and is unknown.
                Ok(Err((who, _))) if who == UNKNOWN_TOKEN => return "the token was revoked".into(),
                Ok(Err((_, problem))) => return problem.error,
                Ok(Ok(_)) | Err(_) => return "who asked may not any more".into(),
            }
        }
    }
}

impl FromRequestParts<Api> for Asked {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &Api) -> Result<Self, Failure> {
        let asked = parts.extensions.get::<Self>().cloned();
        asked.ok_or_else(|| Problem::internal("a request beside the gate").into())
    }
}

/// Lets a request through to what answers it, or not, and has it written down.
pub async fn gate(State(api): State<Api>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let (mut parts, body) = request.into_parts();
    let row = AuditEntry {
        at_ms: now_ms(),
        what: audit::what(parts.method.as_str(), &parts.uri.to_string()),
        vnet: vnet_of(&mut parts).await,
        ..AuditEntry::default()
    };
    let path = parts.extensions.get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let mut pass = Pass { api: &api, row, start, kept: TENANT_AUDIT_DEFAULT.into() };
    let (asked, body) = match pass.ask(&parts, path.as_deref(), body).await {
        Ok(asked) => asked,
        Err(problem) => {
            let mut response = match problem.kind {
                // As axum answers it, had it been asked.
                ProblemKind::Invalid => no_such_method(parts.method, parts.uri).await,
                _ => Failure::from(problem).into_response(),
            };
            if response.status() == StatusCode::UNAUTHORIZED {
                let bearer = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
            }
            pass.note(outcome(&response)).await;
            return response;
        }
    };
    let begun = asked.begun.clone();
    parts.extensions.insert(asked);
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

struct Pass<'a> {
    api: &'a Api,
    row: AuditEntry,
    start: Instant,
    /// Rows of the audit log that are kept of who asks, where that is a tenant.
    kept: u64,
}

impl Pass<'_> {
    async fn ask(
        &mut self,
        parts: &Parts,
        path: Option<&str>,
        body: Body,
    ) -> Result<(Asked, Body), Problem> {
        let peer = parts.extensions.get::<Peer>().copied();
        let peer = peer.ok_or_else(|| Problem::internal("a request from nowhere"))?;
        self.row.from = peer.to_string();
        let shown = Arc::new((peer, token_of(&parts.headers)));
        let caller = identify(self.api, shown.clone()).await?;
        let (caller, quota) = caller.map_err(|(who, problem)| {
            self.row.who = who;
            problem
        })?;
        self.kept = quota.audit.unwrap_or(TENANT_AUDIT_DEFAULT).into();
        self.row.who = caller.who.clone();
        self.row.role = Some(caller.role);
        self.row.tenant = caller.scope.tenant().map(str::to_owned);
        let right = match path {
            // Nothing is there; who is known is told so.
            None => Right::Known,
            Some(path) => rule(parts.method.as_str(), path)
                .ok_or_else(|| Problem::new(ProblemKind::Invalid, "no such method"))?,
        };
        right.check(&caller, self.row.vnet.as_deref())?;
        let room = self.api.rooms.of(&caller.scope, &quota);
        let mut place = room.place(path.map_or(Answer::Whole, answer))?;
        let is_large = path.is_some_and(|path| LARGE_BODIES.contains(&path));
        let bytes_max = if is_large { BODY_BYTES_MAX } else { SMALL_BODY_BYTES_MAX };
        let body = room.body(&mut place, body, bytes_max).await?;
        let begun = match right.changes() {
            true => Some(Arc::new(self.begin().await?)),
            false => None,
        };
        let (api, caller, place) = (self.api.clone(), Arc::new(caller), Arc::new(place));
        let one_value = accepts(&parts.headers, JSON) && !accepts(&parts.headers, NDJSON);
        Ok((Asked { api, caller, place, shown, one_value, begun }, body.into()))
    }

    async fn begin(&mut self) -> Result<Begun, Problem> {
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

/// Who asks, with the quota of the tenant that it is, or who it seems to be and why it is nobody.
async fn identify(
    api: &Api,
    shown: Arc<Shown>,
) -> Result<Result<(Caller, Quota), (String, Problem)>, Problem> {
    let (guard, daemon) = (api.guard.clone(), api.daemon.clone());
    let identify = move || {
        let tenants = daemon.tenants();
        let caller = guard.identify(shown.0, shown.1.as_deref(), &tenants)?;
        let tenant = caller.scope.tenant().and_then(|tenant| tenants.get(tenant));
        let quota = tenant.map(|tenant| tenant.spec.quota).unwrap_or_default();
        Ok((caller, quota))
    };
    tokio::task::spawn_blocking(identify).await.map_err(panicked)
}

/// The token of a request; an empty one where there is a credential of another kind.
fn token_of(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(AUTHORIZATION)?.to_str().unwrap_or("");
    let (scheme, token) = text.split_once(' ').unwrap_or(("", ""));
    // RFC 9110 section 11.1: the scheme in any case.
    let is_token = scheme.eq_ignore_ascii_case("bearer");
    Some(if is_token { token.trim().to_owned() } else { String::new() })
}

/// True if the client names this content type among those that it accepts.
fn accepts(headers: &HeaderMap, content_type: &str) -> bool {
    let lists = headers.get_all(ACCEPT).iter().filter_map(|list| list.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|range| {
        let range = range.split(';').next().unwrap_or_default();
        range.trim().eq_ignore_ascii_case(content_type)
    })
}

/// The vnet that a path names.
async fn vnet_of(parts: &mut Parts) -> Option<String> {
    let names = RawPathParams::from_request_parts(parts, &()).await.ok()?;
    names.iter().find(|(name, _)| *name == "vnet").map(|(_, vnet)| vnet.to_owned())
}

fn outcome(response: &Response) -> (u16, Option<String>) {
    let error = response.extensions().get::<Told>().map(|told| told.0.clone());
    (response.status().as_u16(), error)
}

pub async fn no_such_path(uri: Uri) -> Failure {
    Problem::not_found(format!("no such path: {}", uri.path()))
        .hint(format!("GET {} lists them", pdp_api::paths::OPENAPI))
        .into()
}

pub async fn no_such_method(method: Method, uri: Uri) -> Response {
    let problem = Problem::new(ProblemKind::Invalid, format!("{method} is not for {}", uri.path()))
        .hint(format!("GET {} lists the methods", pdp_api::paths::OPENAPI));
    (StatusCode::METHOD_NOT_ALLOWED, Json(problem)).into_response()
}
