//! Tenants, tokens, the audit log.

use crate::util::error_chain;
use axum::Json;
use pdp_api::{AuditEntry, AuditQuery, NewToken, Problem, TenantInfo, Token, TokenRequest, paths};

use super::AuthorizedRequest;
use super::answer::{JsonBody, Params, PathParams, ProblemResponse};
use crate::status::view;

/// Returns all tenants; a tenant gets itself alone.
#[utoipa::path(get, path = paths::TENANTS, tag = "access", responses(
    (status = OK, body = Vec<TenantInfo>, description = "By name")))]
pub async fn tenants(api: AuthorizedRequest) -> Result<Json<Vec<TenantInfo>>, ProblemResponse> {
    api.call(|daemon, scope| Ok(view::tenants(daemon, scope))).await.map(Json)
}

/// Lists the tokens without their secrets.
#[utoipa::path(get, path = paths::TOKENS, tag = "access", responses(
    (status = OK, body = Vec<Token>, description = "By number")))]
pub async fn tokens(api: AuthorizedRequest) -> Result<Json<Vec<Token>>, ProblemResponse> {
    let guard = api.api.guard.clone();
    let read = move || guard.state.tokens().map_err(|error| Problem::internal(error_chain(&error)));
    api.call(move |_, _| read()).await.map(Json)
}

/// Creates a token. Only this response contains it.
#[utoipa::path(post, path = paths::TOKENS, tag = "access", request_body = TokenRequest, responses(
    (status = OK, body = NewToken, description = "The token, which can't be read again")))]
pub async fn create_token(
    api: AuthorizedRequest,
    JsonBody(request): JsonBody<TokenRequest>,
) -> Result<Json<NewToken>, ProblemResponse> {
    let guard = api.api.guard.clone();
    api.call(move |daemon, _| guard.create_token(&request, &daemon.tenants())).await.map(Json)
}

/// Revokes a token. The next request with it is refused, and its open sessions end within seconds.
#[utoipa::path(delete, path = paths::TOKEN, tag = "access",
    params(("id" = u64, Path, description = "Its number")), responses(
    (status = OK, description = "The token is revoked")))]
pub async fn revoke_token(
    api: AuthorizedRequest,
    PathParams(id): PathParams<u64>,
) -> Result<Json<()>, ProblemResponse> {
    let guard = api.api.guard.clone();
    api.call(move |_, _| guard.revoke_token(id)).await.map(Json)
}

/// Returns logged requests, oldest first; a tenant sees its own.
#[utoipa::path(get, path = paths::AUDIT, tag = "access", params(AuditQuery), responses(
    (status = OK, body = Vec<AuditEntry>, description = "Oldest first")))]
pub async fn audit(
    api: AuthorizedRequest,
    Params(query): Params<AuditQuery>,
) -> Result<Json<Vec<AuditEntry>>, ProblemResponse> {
    // The result includes every request that was answered before this one arrived.
    api.api.audit.flush().await;
    let guard = api.api.guard.clone();
    let read = move |tenant: Option<&str>| {
        guard
            .state
            .trail
            .entries(&query, tenant)
            .map_err(|error| Problem::internal(error_chain(&error)))
    };
    api.call(move |_, scope| read(scope.tenant())).await.map(Json)
}
