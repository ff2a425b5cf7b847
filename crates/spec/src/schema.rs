//! The JSON Schema of specs, generated from their types.

use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use crate::object::{Object, Substrate, Tenant, VirtualNetwork};

/// Keys of a network that provide defaults for nodes or links: name, shape, type, and description.
const GIVEN: [(&str, KeysShape, &str, &str); 5] = [
    ("defaults", KeysShape::Keys, "Node", "Keys of all nodes."),
    ("kinds", KeysShape::Named, "Node", "Keys of nodes, by kind: `router`, `host`."),
    ("groups", KeysShape::Named, "Node", "Keys of nodes, by `group`."),
    ("linkDefaults", KeysShape::Keys, "Link", "Keys of all links."),
    ("linkGroups", KeysShape::Named, "Link", "Keys of links, by `group`."),
];

/// Shape of a key in [`GIVEN`].
#[derive(Clone, Copy)]
enum KeysShape {
    /// A mapping with keys of the type.
    Keys,
    /// A mapping of names to such mappings.
    Named,
}

/// Returns the schema published as `schema/pdp-v1.json`: one document of a spec.
pub fn published() -> Value {
    let mut schema = as_written(of::<Object>());
    for of in ["Node", "Link"] {
        let mut keys = schema["$defs"][of].clone();
        if let Some(keys) = keys.as_object_mut() {
            keys.remove("required");
        }
        schema["$defs"][format!("{of}Keys")] = keys;
    }
    // A node may inherit its required keys.
    if let Some(node) = schema["$defs"]["Node"].as_object_mut() {
        node.remove("required");
    }
    for (key, holds, of, _) in GIVEN {
        let given = &mut schema["$defs"]["VirtualNetworkSpec"]["properties"][key];
        let keys = json!({ "$ref": format!("#/$defs/{of}Keys") });
        match holds {
            KeysShape::Keys => given["$ref"] = keys["$ref"].clone(),
            KeysShape::Named => given["additionalProperties"] = keys,
        }
    }
    schema["title"] = "PdP v1".into();
    schema
}

/// Returns the schema of one kind of object; `None` if there is no such kind.
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

/// Adds the keys that [`crate::expand`] removes when it expands a document.
pub(crate) fn as_written(mut schema: Value) -> Value {
    if schema["$defs"]["VirtualNetworkSpec"].is_null() {
        return schema;
    }
    for (key, holds, _, what) in GIVEN {
        let mut given = json!({ "type": "object", "description": what });
        if let KeysShape::Named = holds {
            given["additionalProperties"] = json!({ "type": "object" });
        }
        schema["$defs"]["VirtualNetworkSpec"]["properties"][key] = given;
    }
    for (of, groups) in [("Node", "groups"), ("Link", "linkGroups")] {
        schema["$defs"][of]["properties"]["group"] = json!({
            "type": ["string", "null"],
            "description": format!("Name in `{groups}`."),
        });
    }
    schema
}

fn of<T: schemars::JsonSchema>() -> Value {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>().to_value()
}
