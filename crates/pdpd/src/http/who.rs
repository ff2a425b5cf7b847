//! Tenants, tokens, the audit log.

use axum::Json;
use pdp_api::{AuditEntry, AuditQuery, NewToken, Problem, TenantInfo, Token, TokenRequest};

use super::Asked;
use super::answer::{Body, Failure, Names, Params};
use crate::host::words;

/// Tenants: all, or for a tenant itself.
#[utoipa::path(get, path = "/v1/tenants", tag = "access", responses(
    (status = OK, body = Vec<TenantInfo>, description = "By name")))]
pub async fn tenants(api: Asked) -> Result<Json<Vec<TenantInfo>>, Failure> {
    api.call(|daemon, scope| daemon.tenant_infos(scope)).await.map(Json)
}

/// Tokens, without what makes them ones.
#[utoipa::path(get, path = "/v1/tokens", tag = "access", responses(
    (status = OK, body = Vec<Token>, description = "By number")))]
pub async fn tokens(api: Asked) -> Result<Json<Vec<Token>>, Failure> {
    let guard = api.api.guard.clone();
    let read = move || guard.state.tokens().map_err(|error| Problem::internal(words(&error)));
    api.call(move |_, _| read()).await.map(Json)
}

/// Makes a token. It is told in the answer and nowhere else.
#[utoipa::path(post, path = "/v1/tokens", tag = "access", request_body = TokenRequest, responses(
    (status = OK, body = NewToken, description = "The token, which nobody can read again")))]
pub async fn create_token(
    api: Asked,
    Body(request): Body<TokenRequest>,
) -> Result<Json<NewToken>, Failure> {
    let guard = api.api.guard.clone();
    api.call(move |daemon, _| guard.create_token(&request, &daemon.tenants())).await.map(Json)
}

/// Revokes a token: from the next request on it is none, and what it has open breaks off
/// within seconds.
#[utoipa::path(delete, path = "/v1/tokens/{id}", tag = "access",
    params(("id" = u64, Path, description = "Its number")), responses(
    (status = OK, description = "It is revoked")))]
pub async fn revoke_token(api: Asked, Names(id): Names<u64>) -> Result<Json<()>, Failure> {
    let guard = api.api.guard.clone();
    api.call(move |_, _| guard.revoke_token(id)).await.map(Json)
}

/// Requests that came, oldest first; a tenant sees its own.
#[utoipa::path(get, path = "/v1/audit", tag = "access", params(AuditQuery), responses(
    (status = OK, body = Vec<AuditEntry>, description = "Oldest first")))]
pub async fn audit(
    api: Asked,
    Params(query): Params<AuditQuery>,
) -> Result<Json<Vec<AuditEntry>>, Failure> {
    // What was answered before this was asked is in it.
    api.api.audit.flush().await;
    let guard = api.api.guard.clone();
    let read = move |tenant: Option<&str>| {
        guard.state.trail.rows(&query, tenant).map_err(|error| Problem::internal(words(&error)))
    };
    api.call(move |_, scope| read(scope.tenant())).await.map(Json)
}
