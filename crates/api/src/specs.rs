//! Specs in the description of the API, which has their JSON Schema among its own.

use utoipa::openapi::{Ref, RefOr, Schema};

/// Name of a document's schema in the description.
pub fn document(kind: &str) -> String {
    format!("{kind}Document")
}

fn of(kind: &str) -> RefOr<Schema> {
    RefOr::Ref(Ref::from_schema_name(document(kind)))
}

/// Reference to the schema of a Substrate.
pub fn substrate() -> RefOr<Schema> {
    of("Substrate")
}

/// Reference to the schema of a VirtualNetwork.
pub fn vnet() -> RefOr<Schema> {
    of("VirtualNetwork")
}

/// Reference to the schema of a Tenant.
pub fn tenant() -> RefOr<Schema> {
    of("Tenant")
}
