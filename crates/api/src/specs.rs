//! References from the OpenAPI description to the JSON Schemas of specs, which it contains.

use utoipa::openapi::{Ref, RefOr, Schema};

/// Returns the name of a document's schema in the OpenAPI description.
pub fn document(kind: &str) -> String {
    format!("{kind}Document")
}

fn of(kind: &str) -> RefOr<Schema> {
    RefOr::Ref(Ref::from_schema_name(document(kind)))
}

/// Returns a reference to the schema of a Substrate.
pub fn substrate() -> RefOr<Schema> {
    of("Substrate")
}

/// Returns a reference to the schema of a VirtualNetwork.
pub fn vnet() -> RefOr<Schema> {
    of("VirtualNetwork")
}

/// Returns a reference to the schema of a Tenant.
pub fn tenant() -> RefOr<Schema> {
    of("Tenant")
}
