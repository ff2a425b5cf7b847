//! An authorized request, and its access to the node.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use hyper::http::request::Parts;
use pdp_api::{Problem, ProblemKind};
use pdp_spec::Quota;

use super::answer::{ProblemResponse, panicked};
use super::limits::RequestPermit;
use super::{Api, CALL_TIME_MAX};
use crate::access::audit::PendingAudit;
use crate::access::{AccessScope, Caller, PeerIdentity, UNKNOWN_TOKEN};
use crate::engine::DaemonCore;

/// Interval at which the client of a session is authenticated again.
const KNOWN_FOR: Duration = Duration::from_secs(1);

/// Identity that a request presents: its origin, and a token.
pub type Credentials = (PeerIdentity, Option<String>);

/// An authorized request, as handlers get it.
#[derive(Clone)]
pub struct AuthorizedRequest {
    pub api: Api,
    pub caller: Arc<Caller>,
    /// Permit, held as long as anything works for the request.
    pub permit: Arc<RequestPermit>,
    /// Identity that the request presented.
    pub credentials: Arc<Credentials>,
    /// True if the client accepts JSON and no JSON lines. A change then
    /// answers with its report or problem alone.
    pub one_value: bool,
    /// The request's audit log entry, if it may change something.
    pub audit_entry: Option<Arc<PendingAudit>>,
}

impl AuthorizedRequest {
    /// Completes when a session must end, and returns why: the daemon
    /// stops, or the client's identity changed. The latter happens when
    /// its token is revoked or expires, or when a tenant's spec changes.
    pub async fn over(&self) -> String {
        tokio::select! {
            () = self.api.stop() => "the daemon stopped".into(),
            why = self.unknown() => why,
        }
    }

    async fn unknown(&self) -> String {
        loop {
            tokio::time::sleep(KNOWN_FOR).await;
            match identify(&self.api, self.credentials.clone()).await {
                Ok(Ok((caller, _))) if caller == *self.caller => {}
                // The state can't be read; the client was not refused.
                Ok(Err((_, problem))) if problem.kind == ProblemKind::Internal => {}
                // The token was valid before and is now unknown.
                Ok(Err((who, _))) if who == UNKNOWN_TOKEN => return "the token was revoked".into(),
                Ok(Err((_, problem))) => return problem.error,
                Ok(Ok(_)) | Err(_) => return "the client lost its rights".into(),
            }
        }
    }

    /// Returns the request's access to the node.
    pub fn node(&self) -> NodeAccess {
        NodeAccess {
            daemon: self.api.daemon.clone(),
            scope: self.caller.scope.clone(),
            _permit: self.permit.clone(),
        }
    }

    /// Makes a read-only call on a blocking thread.
    pub async fn call<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&DaemonCore, &AccessScope) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, ProblemResponse> {
        let node = self.node();
        let task = tokio::task::spawn_blocking(move || node.call(ask));
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

impl FromRequestParts<Api> for AuthorizedRequest {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, _: &Api) -> Result<Self, ProblemResponse> {
        let authorized = parts.extensions.get::<Self>().cloned();
        authorized.ok_or_else(|| Problem::internal("the request was not authorized").into())
    }
}

/// Identifies the client and returns its tenant's quota. Otherwise
/// returns its apparent identity, and why it is unknown.
pub async fn identify(
    api: &Api,
    shown: Arc<Credentials>,
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

/// Access of one request to the node, with the request's permit.
#[derive(Clone)]
pub struct NodeAccess {
    daemon: Arc<DaemonCore>,
    scope: AccessScope,
    _permit: Arc<RequestPermit>,
}

impl NodeAccess {
    /// Calls the node. All endpoints get their answers here, so that no problem tells a client
    /// more than its scope allows.
    pub fn call<T>(
        &self,
        ask: impl FnOnce(&DaemonCore, &AccessScope) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        ask(&self.daemon, &self.scope).map_err(|problem| self.redact(problem))
    }

    /// Returns a problem as the client may see it.
    pub fn redact(&self, problem: Problem) -> Problem {
        self.daemon.redact_for(&self.scope, problem)
    }
}
