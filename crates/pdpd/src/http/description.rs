//! The description of the API, OpenAPI 3.1: what the handlers say of themselves, and what all have in common.

use axum::response::{IntoResponse, Response};
use hyper::header::CONTENT_TYPE;
use pdp_api::Problem;
use utoipa::openapi::content::Content;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::response::Response as Answer;
use utoipa::openapi::schema::{Object, SchemaType, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{OpenApi as Document, Ref, RefOr, SecurityRequirement};
use utoipa::{Modify, OpenApi};

/// The type of captures.
pub const PCAP: &str = "application/vnd.tcpdump.pcap";

/// What a token is called as a security scheme, and a refusal as an answer.
const TOKEN: &str = "token";
const PROBLEM: &str = "Problem";

#[derive(OpenApi)]
#[openapi(
    info(
        title = "PdP",
        description = "A node that hosts isolated virtual networks. JSON over HTTP/1.1 on the \
            Unix socket /run/pdp/pdpd.sock, where the kernel says who asks, or over TLS 1.3 with \
            a token. Every failure is a Problem. An answer of type application/x-ndjson is \
            described as the array of its lines, each of which is one JSON value. Specs are \
            described by pdp-v1.json beside this document.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(pdp_api::NodeProcess, Problem)),
    servers(
        (url = "http://pdp", description = "The Unix socket, on which the host name means nothing"),
        (url = "https://{address}", description = "Over TLS, where pdpd has --listen",
            variables(("address" = (default = "localhost:7443", description = "Host and port"))))
    ),
    modifiers(&Common)
)]
pub struct Description;

/// What all operations have in common.
struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut Document) {
        let components = document.components.get_or_insert_default();
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
            "A token of `pdp token create`, over TLS. On the Unix socket none is needed: the user at \
             its other end is who asks.",
        ));
        components.add_security_scheme(TOKEN, SecurityScheme::Http(scheme.build()));
        let mut refused = Answer::new("It was refused or failed: why, and what to do about it");
        let schema = Ref::from_schema_name(PROBLEM);
        refused.content.insert("application/json".into(), Content::new(Some(schema)).into());
        components.responses.insert(PROBLEM.into(), refused.into());
        let none: [&str; 0] = [];
        document.security =
            Some(vec![SecurityRequirement::default(), SecurityRequirement::new(TOKEN, none)]);
    }
}

/// Completes what the handlers said.
pub fn complete(mut document: Document) -> Document {
    for item in document.paths.paths.values_mut() {
        operations(item).for_each(one);
    }
    document
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.post, &mut item.delete].into_iter().flatten()
}

fn one(operation: &mut Operation) {
    let answers = &mut operation.responses.responses;
    answers.insert("default".into(), RefOr::Ref(Ref::from_response_name(PROBLEM)));
    let Some(RefOr::T(good)) = answers.get_mut("200") else { return };
    if good.content.is_empty() {
        let null = Object::with_type(SchemaType::new(Type::Null));
        good.content.insert("application/json".into(), Content::new(Some(null)).into());
    }
    // Bytes have no schema.
    if let Some(content) = good.content.get_mut(PCAP) {
        *content = Content::default().into();
    }
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "node", responses(
    (status = OK, body = Object, description = "OpenAPI 3.1")))]
pub async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], super::openapi()).into_response()
}

/// The JSON Schema of specs.
#[utoipa::path(get, path = "/v1/pdp-v1.json", tag = "node", responses(
    (status = OK, body = Object, description = "JSON Schema, draft 2020-12",
        content_type = "application/schema+json")))]
pub async fn spec_schema() -> Response {
    ([(CONTENT_TYPE, "application/schema+json")], pdp_spec::schema::published().to_string())
        .into_response()
}
