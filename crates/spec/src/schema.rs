//! The JSON Schema of specs, made from their types.

use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use crate::object::{Object, Substrate, Tenant, VirtualNetwork};

/// Keys of a network that give others something, with what they hold and for what.
const GIVEN: [(&str, Holds, &str, &str); 5] = [
    ("defaults", Holds::Keys, "Node", "What all nodes have that say nothing else: keys of a node."),
    (
        "kinds",
        Holds::Named,
        "Node",
        "The same for all nodes of a kind, `router` or `host`; nearer than `defaults`.",
    ),
    (
        "groups",
        Holds::Named,
        "Node",
        "The same for all nodes whose `group` it is, by name; nearer than `kinds`.",
    ),
    (
        "linkDefaults",
        Holds::Keys,
        "Link",
        "What all links have that say nothing else: keys of a link.",
    ),
    (
        "linkGroups",
        Holds::Named,
        "Link",
        "The same for all links whose `group` it is, by name; nearer than `linkDefaults`.",
    ),
];

/// What one of [`GIVEN`] holds.
#[derive(Clone, Copy)]
enum Holds {
    /// Keys.
    Keys,
    /// Keys, by a name.
    Named,
}

/// The schema that is published as `schema/pdp-v1.json`: one document of a spec.
pub fn published() -> Value {
    let mut schema = as_written(of::<Object>());
    for of in ["Node", "Link"] {
        let mut keys = schema["$defs"][of].clone();
        if let Some(keys) = keys.as_object_mut() {
            keys.remove("required");
        }
        schema["$defs"][format!("{of}Keys")] = keys;
    }
    // They may come from elsewhere.
    if let Some(node) = schema["$defs"]["Node"].as_object_mut() {
        node.remove("required");
    }
    for (key, holds, of, _) in GIVEN {
        let given = &mut schema["$defs"]["VirtualNetworkSpec"]["properties"][key];
        let keys = json!({ "$ref": format!("#/$defs/{of}Keys") });
        match holds {
            Holds::Keys => given["$ref"] = keys["$ref"].clone(),
            Holds::Named => given["additionalProperties"] = keys,
        }
    }
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

/// A schema with the keys that are gone once a document is written out ([`crate::expand`]).
pub(crate) fn as_written(mut schema: Value) -> Value {
    if schema["$defs"]["VirtualNetworkSpec"].is_null() {
        return schema;
    }
    for (key, holds, _, what) in GIVEN {
        let mut given = json!({ "type": "object", "description": what });
        if let Holds::Named = holds {
            given["additionalProperties"] = json!({ "type": "object" });
        }
        schema["$defs"]["VirtualNetworkSpec"]["properties"][key] = given;
    }
    for (of, groups) in [("Node", "groups"), ("Link", "linkGroups")] {
        schema["$defs"][of]["properties"]["group"] = json!({
            "type": ["string", "null"],
            "description": format!("The one of `{groups}` that it is in. Not given: none."),
        });
    }
    schema
}

fn of<T: schemars::JsonSchema>() -> Value {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>().to_value()
}
