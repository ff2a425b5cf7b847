//! Images from registries and archives.

use axum::Json;
use axum::response::Response;
use pdp_api::{ChangeEvent, ImageInfo, ImageQuery, PullRequest, paths};

use super::AuthorizedRequest;
use super::answer::{JsonBody, Params, PathParams, ProblemResponse};
use super::change::change;

/// Returns the stored images; a tenant sees its own.
#[utoipa::path(get, path = paths::IMAGES, tag = "images", responses(
    (status = OK, body = Vec<ImageInfo>, description = "By tenant and name")))]
pub async fn images(api: AuthorizedRequest) -> Result<Json<Vec<ImageInfo>>, ProblemResponse> {
    api.call(|daemon, scope| daemon.images.list(scope, &daemon.model())).await.map(Json)
}

/// Pulls the image that a name refers to now. Running nodes keep their
/// image until they are applied again.
#[utoipa::path(post, path = paths::IMAGES, tag = "images", request_body = PullRequest, responses(
    (status = OK, body = [ChangeEvent], content_type = "application/x-ndjson",
        description = "One line per step; the last line is the result or the problem")))]
pub async fn pull_image(
    api: AuthorizedRequest,
    JsonBody(request): JsonBody<PullRequest>,
) -> Result<Response, ProblemResponse> {
    change(&api, move |daemon, scope, progress| {
        daemon.images.pull(scope, &request, &daemon.model(), progress)
    })
    .await
}

/// Removes an image, given by its digest or one of its names; refused while a node runs on it.
#[utoipa::path(delete, path = paths::IMAGE, tag = "images",
    params(
        ("image" = String, Path, description = "A name, a digest, or the beginning of a digest"),
        ImageQuery), responses(
    (status = OK, description = "The image is removed")))]
pub async fn delete_image(
    api: AuthorizedRequest,
    PathParams(image): PathParams<String>,
    Params(query): Params<ImageQuery>,
) -> Result<Json<()>, ProblemResponse> {
    api.call(move |daemon, scope| daemon.images.remove(scope, &image, &query, &|| daemon.model()))
        .await
        .map(Json)
}

/// Removes all unused images.
#[utoipa::path(delete, path = paths::IMAGES, tag = "images", params(ImageQuery), responses(
    (status = OK, body = Vec<ImageInfo>, description = "The removed images")))]
pub async fn prune_images(
    api: AuthorizedRequest,
    Params(query): Params<ImageQuery>,
) -> Result<Json<Vec<ImageInfo>>, ProblemResponse> {
    api.call(move |daemon, scope| daemon.images.prune(scope, &query, &|| daemon.model()))
        .await
        .map(Json)
}
