//! The JSON Schema of specs, made from their types.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::object::{Object, Substrate, Tenant, VirtualNetwork};

/// The schema that is published as `schema/pdp-v1.json`: one document of a spec.
pub fn published() -> Value {
    let mut schema = of::<Object>();
    schema["title"] = "PdP v1".into();
    schema
}

/// The schema of one kind of object; `None` if there is no such kind.
pub(crate) fn of_kind(kind: &str) -> Option<Value> {
    let mut schema = match kind {
        "Substrate" => of::<Substrate>(),
        "VirtualNetwork" => of::<VirtualNetwork>(),
        "Tenant" => of::<Tenant>(),
        _ => return None,
    };
    schema["properties"]["kind"] = serde_json::json!({ "type": "string" });
    Some(schema)
}

fn of<T: schemars::JsonSchema>() -> Value {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>().to_value()
}
