//! Published files match the types, and the examples are valid.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pdp_spec::{
    Existing, InterfaceFacts, Object, SourceFile, VirtualNetwork, check, parse, reference, schema,
    sysctl,
};
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

const PUBLISH: &str = "run `cargo run -p pdp-spec --example publish` and commit what it wrote";

#[test]
fn schema_is_current() {
    let text = std::fs::read_to_string(root().join("schema/pdp-v1.json")).unwrap();
    let published: Value = serde_json::from_str(&text).unwrap();
    assert!(published == schema::published(), "{PUBLISH}");
}

#[test]
fn reference_is_current() {
    let text = std::fs::read_to_string(root().join("docs/spec.md")).unwrap();
    assert!(text == reference::markdown(), "{PUBLISH}");
}

#[test]
fn sysctl_list_is_current() {
    let text = std::fs::read_to_string(root().join("docs/sysctls.md")).unwrap();
    assert!(text == sysctl::markdown(), "{PUBLISH}");
}

/// Collects every key of the schema, at any depth.
fn keys(schema: &Value, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(entries) => {
            if let Some(Value::Object(properties)) = entries.get("properties") {
                found.extend(properties.keys().cloned());
            }
            entries.values().for_each(|value| keys(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| keys(item, found)),
        _ => {}
    }
}

#[test]
fn reference_has_every_key_of_the_schema() {
    let mut all = BTreeSet::new();
    keys(&schema::published(), &mut all);
    assert!(all.len() > 70, "{all:?}");
    let page = reference::markdown();
    let missing: Vec<_> =
        all.iter().filter(|key| !page.contains(&format!("\n`{key}` |"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

fn spec_files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(spec_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            files.push(path);
        }
    }
    files
}

/// Checks the examples' objects, each file by itself, with devices and CPUs as they name them.
#[test]
fn examples_are_valid() {
    let validator = jsonschema::validator_for(&schema::published()).unwrap();
    let files = spec_files(&root().join("examples"));
    let text = std::fs::read_to_string(root().join("examples/cable.yaml")).unwrap();
    let source = SourceFile { name: "cable".into(), text, ..SourceFile::default() };
    let Object::Substrate(cable) = parse(&[source]).unwrap().remove(0).object else {
        panic!("a Substrate")
    };
    assert!(!files.is_empty());
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let directory = path.parent().unwrap();
        let source = SourceFile::read(path.display().to_string(), text.clone(), |from, _| {
            std::fs::read(directory.join(from)).map_err(|error| error.to_string())
        });
        let documents = parse(&[source]).unwrap_or_else(|wrong| panic!("{wrong:#?}"));
        let own = documents.iter().find_map(|document| match &document.object {
            Object::Substrate(substrate) => Some(substrate.clone()),
            _ => None,
        });
        let mut devices = BTreeMap::new();
        for interface in own.as_ref().unwrap_or(&cable).spec.interfaces.values() {
            let device = interface.device.iter().cloned();
            devices.extend(device.map(|device| (device, InterfaceFacts { mtu: 1500 })));
        }
        let existing = Existing {
            substrate: own.is_none().then(|| cable.clone()),
            devices: Some(devices),
            ..Existing::default()
        };
        let intent = check(&documents, &existing).unwrap_or_else(|wrong| panic!("{wrong:#?}"));
        // As written and as stored.
        let stored = intent.vnets.values();
        let stored = stored.map(|vnet| Object::VirtualNetwork(VirtualNetwork::clone(vnet)));
        let stored: Vec<Object> =
            intent.substrate.into_iter().map(Object::Substrate).chain(stored).collect();
        let mut written: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        written.extend(stored.iter().map(|object| serde_json::to_value(object).unwrap()));
        for document in written {
            let wrong: Vec<String> =
                validator.iter_errors(&document).map(|error| error.to_string()).collect();
            assert!(wrong.is_empty(), "{}: {wrong:#?}", path.display());
        }
    }
}

/// Keys that links, single ends, and schedule steps have in common stand in one table.
#[test]
fn egress_keys_are_described_once() {
    let page = pdp_spec::reference::markdown();
    let links: Vec<&str> =
        page.split("\n### ").filter(|section| section.starts_with("spec.links[]")).collect();
    for key in ["delay", "rate", "loss", "jitter"] {
        let row = format!("\n`{key}` |");
        let described: Vec<&&str> = links.iter().filter(|it| it.contains(&row)).collect();
        let [section] = described[..] else { panic!("{key}: {described:?}") };
        assert!(section.starts_with("spec.links[], egress keys\n"), "{key}: {section}");
    }
}
