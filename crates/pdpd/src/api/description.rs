//! The description of the API, OpenAPI 3.1, built from the handlers'
//! descriptions and the common parts.

use axum::response::{IntoResponse, Response};
use hyper::header::CONTENT_TYPE;
use pdp_api::{Problem, paths};
use serde_json::{Map, Value, json};
use utoipa::openapi::content::Content;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::response::Response as Answer;
use utoipa::openapi::schema::{ArrayItems, Object, Schema, SchemaType, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{OpenApi as Document, Ref, RefOr, SecurityRequirement};
use utoipa::{Modify, OpenApi};

use super::answer::{JSON, NDJSON, PCAP};

/// Names of the token's security scheme and of the problem response.
const TOKEN: &str = "token";
const PROBLEM: &str = "Problem";

/// Schemas of one line of a change's response, and of its report.
const EVENT: &str = "ChangeEvent";
const REPORT: &str = "ChangeReport";

#[derive(OpenApi)]
#[openapi(
    info(
        title = "PdP",
        description = "A node that hosts isolated virtual networks. JSON over HTTP/1.1 on the Unix \
                       socket /run/pdp/pdpd.sock, where the kernel identifies the client, or over \
                       TLS 1.3 with a token. Every failure is a Problem. An answer of type \
                       application/x-ndjson is described as the array of its lines, each of which \
                       is one JSON value. A change whose client accepts application/json and not \
                       application/x-ndjson answers with its report alone, once it has ended.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(pdp_api::NodeProcess, Problem)),
    servers(
        (url = "http://pdp", description = "The Unix socket; the host name is ignored"),
        (url = "https://{address}", description = "TLS, if pdpd has --listen",
            variables(("address" = (default = "localhost:7443", description = "Host and port"))))
    ),
    modifiers(&Common)
)]
pub struct Description;

/// Parts that all operations have in common.
struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut Document) {
        let components = document.components.get_or_insert_default();
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
            "A token of `pdp token create`, over TLS. The Unix socket needs none: the kernel \
             identifies the user.",
        ));
        components.add_security_scheme(TOKEN, SecurityScheme::Http(scheme.build()));
        let mut refused =
            Answer::new("The request was refused or failed: the reason, and what to do");
        let schema = Ref::from_schema_name(PROBLEM);
        refused.content.insert(JSON.into(), Content::new(Some(schema)).into());
        components.responses.insert(PROBLEM.into(), refused.into());
        let none: [&str; 0] = [];
        document.security =
            Some(vec![SecurityRequirement::default(), SecurityRequirement::new(TOKEN, none)]);
    }
}

/// Completes the handlers' descriptions.
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
        good.content.insert(JSON.into(), Content::new(Some(null)).into());
    }
    if matches!(good.content.get(NDJSON), Some(RefOr::T(lines)) if has_events(lines)) {
        let report = Ref::from_schema_name(REPORT);
        good.content.insert(JSON.into(), Content::new(Some(report)).into());
    }
    // Bytes have no schema.
    if let Some(content) = good.content.get_mut(PCAP) {
        *content = Content::default().into();
    }
}

/// True if the lines of a response are those of a change.
fn has_events(content: &Content) -> bool {
    let Some(RefOr::T(Schema::Array(lines))) = &content.schema else { return false };
    let ArrayItems::RefOrSchema(line) = &lines.items else { return false };
    **line == RefOr::Ref(Ref::from_schema_name(EVENT))
}

/// Returns the document together with the schemas of specs. Those of
/// the objects are included as in [`pdp_api::specs::document`]. All
/// others get a prefix, since the API has schemas of the same names.
pub fn with_specs(document: &Document) -> Value {
    // Plain data with string keys: can't fail.
    let mut document = serde_json::to_value(document).unwrap_or_default();
    let mut specs = pdp_spec::schema::published();
    prefix_references(&mut specs);
    enumerate(&mut specs);
    let mut schemas = Map::new();
    if let Some(Value::Object(definitions)) = specs.get_mut("$defs").map(Value::take) {
        schemas
            .extend(definitions.into_iter().map(|(name, schema)| (format!("Spec{name}"), schema)));
    }
    if let Some(Value::Array(objects)) = specs.get_mut("oneOf").map(Value::take) {
        for object in objects {
            let kind = object["properties"]["kind"]["const"].as_str().unwrap_or_default();
            schemas.insert(pdp_api::specs::document(kind), object);
        }
    }
    if let Some(own) = document["components"]["schemas"].as_object_mut() {
        own.extend(schemas);
    }
    document
}

fn prefix_references(schema: &mut Value) {
    match schema {
        Value::Object(keys) => {
            for (key, value) in keys {
                let definition = value.as_str().and_then(|at| at.strip_prefix("#/$defs/"));
                match definition.map(|name| format!("#/components/schemas/Spec{name}")) {
                    Some(reference) if key == "$ref" => *value = reference.into(),
                    _ => prefix_references(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(prefix_references),
        _ => {}
    }
}

/// Replaces each `oneOf` of constants by an `enum`: client generators take the first constant for
/// the only one.
fn enumerate(schema: &mut Value) {
    let constants = schema["oneOf"].as_array().and_then(|all| all.iter().map(constant).collect());
    let constants: Option<Vec<(Value, Option<&str>)>> = constants;
    if let Some(constants) = constants {
        let mut description = schema["description"].as_str().unwrap_or_default().to_owned();
        for (value, text) in &constants {
            let text = text.map_or(String::new(), |text| format!(": {text}"));
            description += &format!("\n- `{}`{text}", value.as_str().unwrap_or_default());
        }
        let values: Vec<Value> = constants.into_iter().map(|(value, _)| value).collect();
        *schema = json!({"description": description.trim(), "enum": values, "type": "string"});
        return;
    }
    match schema {
        Value::Object(keys) => keys.values_mut().for_each(enumerate),
        Value::Array(values) => values.iter_mut().for_each(enumerate),
        _ => {}
    }
}

/// The value and the description of a schema that permits a single text.
fn constant(schema: &Value) -> Option<(Value, Option<&str>)> {
    let value = schema.get("const").filter(|value| value.is_string())?;
    Some((value.clone(), schema["description"].as_str()))
}

/// Returns this document.
#[utoipa::path(get, path = paths::OPENAPI, tag = "node", responses(
    (status = OK, body = Object, description = "OpenAPI 3.1")))]
pub async fn openapi() -> Response {
    ([(CONTENT_TYPE, JSON)], super::openapi()).into_response()
}

/// Returns the JSON Schema of specs.
#[utoipa::path(get, path = paths::SPEC_SCHEMA, tag = "node", responses(
    (status = OK, body = Object, description = "JSON Schema, draft 2020-12",
        content_type = "application/schema+json")))]
pub async fn spec_schema() -> Response {
    ([(CONTENT_TYPE, "application/schema+json")], pdp_spec::schema::published().to_string())
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_of_constants_becomes_an_enum_and_other_choices_stay() {
        let host = json!({"const": "host", "type": "string", "description": "An end."});
        let router = json!({"const": "router", "type": "string"});
        let other = json!({"oneOf": [host, {"type": "integer"}]});
        let mut schema = json!({
            "kind": {"description": "Kind of node.", "oneOf": [router, host]},
            "other": other,
        });
        enumerate(&mut schema);
        let expected = json!({
            "description": "Kind of node.\n- `router`\n- `host`: An end.",
            "enum": ["router", "host"],
            "type": "string",
        });
        assert_eq!(schema, json!({"kind": expected, "other": other}));
    }
}
