//! Specs in the description of the API: by the JSON Schema that is published beside it.

use utoipa::openapi::{Ref, RefOr, Schema};

fn of(place: usize) -> RefOr<Schema> {
    RefOr::Ref(Ref::new(format!("pdp-v1.json#/oneOf/{place}")))
}

pub fn substrate() -> RefOr<Schema> {
    of(0)
}

pub fn vnet() -> RefOr<Schema> {
    of(1)
}

pub fn tenant() -> RefOr<Schema> {
    of(2)
}
