//! Images of registries and archives.

use axum::Json;
use axum::response::Response;
use pdp_api::{Event, ImageInfo, ImageQuery, PullRequest};

use super::Asked;
use super::answer::{Body, Failure, Names, Params};
use super::change::change;

/// Images that the daemon keeps; a tenant sees its own.
#[utoipa::path(get, path = "/v1/images", tag = "images", responses(
    (status = OK, body = Vec<ImageInfo>, description = "By tenant and name")))]
pub async fn images(api: Asked) -> Result<Json<Vec<ImageInfo>>, Failure> {
    api.call(|daemon, scope| daemon.images(scope)).await.map(Json)
}

/// Pulls what a name stands for now. Nodes that run keep the image that they have until they are applied again.
#[utoipa::path(post, path = "/v1/images", tag = "images", request_body = PullRequest, responses(
    (status = OK, body = [Event], content_type = "application/x-ndjson",
        description = "A line for each step, and at last one for the result or the problem")))]
pub async fn pull_image(api: Asked, Body(request): Body<PullRequest>) -> Result<Response, Failure> {
    change(&api, move |daemon, scope, progress| daemon.pull_image(scope, &request, progress)).await
}

/// Removes an image, by its digest or a name that it has; refused while a node runs on it.
#[utoipa::path(delete, path = "/v1/images/{image}", tag = "images",
    params(("image" = String, Path, description = "A name, a digest, or how one begins"), ImageQuery), responses(
    (status = OK, description = "It is removed")))]
pub async fn delete_image(
    api: Asked,
    Names(image): Names<String>,
    Params(query): Params<ImageQuery>,
) -> Result<Json<()>, Failure> {
    api.call(move |daemon, scope| daemon.delete_image(scope, &image, &query)).await.map(Json)
}

/// Removes all images that nothing uses.
#[utoipa::path(delete, path = "/v1/images", tag = "images", params(ImageQuery), responses(
    (status = OK, body = Vec<ImageInfo>, description = "What was removed")))]
pub async fn prune_images(
    api: Asked,
    Params(query): Params<ImageQuery>,
) -> Result<Json<Vec<ImageInfo>>, Failure> {
    api.call(move |daemon, scope| daemon.prune_images(scope, &query)).await.map(Json)
}
