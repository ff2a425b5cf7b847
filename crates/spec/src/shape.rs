//! Checks a document's shape against the schema of its kind: known
//! keys, types and bounds. Finds all errors, not just the first.
//!
//! Supports the part of JSON Schema that schemars generates
//! from our types, and the formats of [`crate::units`].

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::Value as Json;

use crate::expand::has_placeholder;
use crate::nearest::nearest;
use crate::tree::{JsonPointer, SchemaFault, Tree, YamlValue};
use crate::units::check_format;

/// Returns all errors of `tree` by `schema`.
pub(crate) fn faults(schema: &Json, tree: &Tree) -> Vec<SchemaFault> {
    let mut walk = SchemaWalk { root: schema, faults: Vec::new() };
    walk.visit(schema, tree, &JsonPointer::root(), tree.position);
    walk.faults
}

/// Returns all errors of settings for several objects of one of
/// the schema's types, by its name. No key is required there.
pub(crate) fn faults_of_part(
    schema: &Json,
    of: &str,
    tree: &Tree,
    path: &JsonPointer,
) -> Vec<SchemaFault> {
    let mut walk = SchemaWalk { root: schema, faults: Vec::new() };
    let Some(part) = schema.pointer(&format!("/$defs/{of}")) else { return Vec::new() };
    walk.visit(part, tree, path, tree.position);
    walk.faults.retain(|fault| !fault.message.ends_with(MISSING));
    walk.faults
}

/// Turns texts of digits into numbers where the schema
/// allows a number but no text. They come from placeholders.
pub(crate) fn numbers(schema: &Json, tree: &mut Tree) {
    SchemaWalk { root: schema, faults: Vec::new() }.numbers(schema, tree);
}

/// Like [`numbers`], for the settings of [`faults_of_part`].
pub(crate) fn numbers_of_part(schema: &Json, of: &str, tree: &mut Tree) {
    if let Some(part) = schema.pointer(&format!("/$defs/{of}")) {
        SchemaWalk { root: schema, faults: Vec::new() }.numbers(part, tree);
    }
}

/// Key that distinguishes objects of several kinds.
const KIND: &str = "kind";

/// Hint for a value whose placeholder was not replaced.
const PLACEHOLDER_HINT: &str = "placeholders need a range in the name: write \"r[1-4]\", or \
                                \"r[1-1]\" for one";

/// End of the message about a missing key.
const MISSING: &str = " is missing";

/// Returns this project's name for a node kind of other tools.
fn elsewhere(kind: &str) -> Option<&'static str> {
    match kind.to_lowercase().as_str() {
        "switch" | "bridge" | "lan" | "hub" | "ovs-bridge" => Some(
            "a link with more than two endpoints is a segment, which PdP switches; for a Linux \
             bridge use a host (examples/lan.yaml)",
        ),
        "linux" | "container" | "docker" | "pc" | "server" | "node" | "vm" => {
            Some("use kind: host")
        }
        "frr" | "bird" | "firewall" | "gateway" | "quagga" => Some(
            "use kind: router, and start the routing software with commands (examples/ospf.yaml)",
        ),
        _ => None,
    }
}

struct SchemaWalk<'a> {
    root: &'a Json,
    faults: Vec<SchemaFault>,
}

impl<'a> SchemaWalk<'a> {
    fn fault(&mut self, place: (u32, u32), path: &JsonPointer, message: String, hint: String) {
        self.faults.push(SchemaFault { position: place, path: path.clone(), message, hint });
    }

    /// Returns the schema with its reference followed.
    fn resolve(&self, schema: &'a Json) -> &'a Json {
        let name = schema.get("$ref").and_then(Json::as_str);
        let definition = name.and_then(|name| self.root.pointer(name.trim_start_matches('#')));
        definition.unwrap_or(schema)
    }

    /// Returns the alternatives of a schema, with references followed.
    fn alternatives(&self, schema: &'a Json) -> Vec<&'a Json> {
        let schema = self.resolve(schema);
        match schema.get("anyOf").or(schema.get("oneOf")).and_then(Json::as_array) {
            Some(several) => several.iter().flat_map(|one| self.alternatives(one)).collect(),
            None => vec![schema],
        }
    }

    fn numbers(&self, schema: &'a Json, tree: &mut Tree) {
        let alternatives = self.alternatives(schema);
        let first = |kind: &str| alternatives.iter().copied().find(|one| admits(one, kind));
        match &mut tree.value {
            YamlValue::Text(text) => {
                let digits = text.bytes().all(|byte| byte.is_ascii_digit());
                if digits
                    && first("integer").is_some()
                    && first("string").is_none()
                    && let Ok(number) = text.parse()
                {
                    tree.value = YamlValue::Unsigned(number);
                }
            }
            YamlValue::List(items) => {
                let schema = first("array").and_then(|schema| schema.get("items"));
                let Some(schema) = schema else { return };
                items.iter_mut().for_each(|item| self.numbers(schema, item));
            }
            YamlValue::Map(entries) => {
                let objects = alternatives.iter().copied().filter(|one| admits(one, "object"));
                let Ok(schema) = self.schema_of_kind(&objects.collect::<Vec<_>>(), entries) else {
                    return;
                };
                let others = schema.get("additionalProperties").filter(|others| others.is_object());
                for (_, key, value) in entries {
                    let known = schema.get("properties").and_then(|known| known.get(&*key));
                    if let Some(schema) = known.or(others) {
                        self.numbers(schema, value);
                    }
                }
            }
            _ => {}
        }
    }

    fn visit(&mut self, schema: &'a Json, tree: &Tree, path: &JsonPointer, key: (u32, u32)) {
        let alternatives = self.alternatives(schema);
        let kind = tree.value.kind();
        let fitting: Vec<&Json> =
            alternatives.iter().copied().filter(|schema| admits(schema, kind)).collect();
        let words = words(&fitting);
        if !words.is_empty() {
            if let YamlValue::Text(text) = &tree.value
                && !words.contains(&text.as_str())
            {
                self.not_of(words, tree, path);
            }
            return;
        }
        match fitting.first() {
            Some(schema) => self.visit_one(schema, &fitting, tree, path, key),
            None => {
                let expected: BTreeSet<&str> =
                    alternatives.iter().flat_map(|schema| types(schema)).collect();
                let expected: Vec<&str> =
                    expected.into_iter().filter(|t| *t != "null").map(people_type).collect();
                let place =
                    if matches!(kind, "null" | "object" | "array") { key } else { tree.position };
                let shown = tree.value.scalar().map_or(String::new(), |text| format!(" {text}"));
                let message = format!(
                    "{}{shown} is {}, not {}",
                    last(path),
                    people_type(kind),
                    expected.join(" or ")
                );
                let hint = if expected == ["text"] && !shown.is_empty() {
                    "put it in quotes".to_owned()
                } else {
                    String::new()
                };
                self.fault(place, path, message, hint);
            }
        }
    }

    fn visit_one(
        &mut self,
        schema: &'a Json,
        fitting: &[&'a Json],
        tree: &Tree,
        path: &JsonPointer,
        key: (u32, u32),
    ) {
        match &tree.value {
            YamlValue::Map(entries) => match self.schema_of_kind(fitting, entries) {
                Ok(schema) => self.visit_entries(schema, fitting, entries, path, key),
                Err(Some((kind, words))) => self.not_of(words, kind, &path.key(KIND)),
                Err(None) => {}
            },
            YamlValue::List(items) => {
                let bound = |name: &str| schema.get(name).and_then(Json::as_u64);
                let count = items.len() as u64;
                let (min, max) = (bound("minItems"), bound("maxItems"));
                if min.is_some_and(|min| count < min) || max.is_some_and(|max| count > max) {
                    let expected = range_text(min.map(|n| n as f64), max.map(|n| n as f64));
                    let has = crate::count(count, "entry");
                    let message = format!("{} has {has}, not {expected}", last(path));
                    self.fault(key, path, message, String::new());
                }
                if let Some(schema) = schema.get("items") {
                    for (index, item) in items.iter().enumerate() {
                        self.visit(schema, item, &path.index(index), item.position);
                    }
                }
            }
            _ => self.visit_scalar(schema, tree, path),
        }
    }

    /// Returns the schema of an object's kind among several. Without a kind, it is the
    /// one that does not require it. The error is an unknown kind, and the known ones.
    fn schema_of_kind<'t>(
        &self,
        fitting: &[&'a Json],
        entries: &'t [((u32, u32), String, Tree)],
    ) -> Result<&'a Json, Option<(&'t Tree, Vec<&'a str>)>> {
        let kinds: Vec<_> =
            fitting.iter().filter_map(|schema| Some((*schema, self.kind(schema)?))).collect();
        let given = entries.iter().find(|(_, key, _)| key == KIND).map(|(_, _, kind)| kind);
        match given {
            Some(kind @ Tree { value: YamlValue::Text(text), .. }) if kinds.len() > 1 => {
                let is_it = |(_, kind): &&(_, &str)| kind == text;
                let found = kinds.iter().find(is_it).map(|(schema, _)| *schema);
                found.ok_or_else(|| Some((kind, kinds.iter().map(|(_, kind)| *kind).collect())))
            }
            Some(_) => fitting.first().copied().ok_or(None),
            None => {
                let free = fitting.iter().find(|schema| !required(schema).any(|key| key == KIND));
                free.or(fitting.first()).copied().ok_or(None)
            }
        }
    }

    /// Returns the only kind that an object of this schema can have.
    fn kind(&self, schema: &'a Json) -> Option<&'a str> {
        let kind = schema.get("properties")?.get(KIND)?;
        match words(&self.alternatives(kind))[..] {
            [word] => Some(word),
            _ => None,
        }
    }

    /// Reports a word that is not one of these.
    fn not_of(&mut self, words: Vec<&str>, tree: &Tree, path: &JsonPointer) {
        let YamlValue::Text(text) = &tree.value else { return };
        let message = format!("unknown {} {text:?}: use {}", last(path), join_alternatives(&words));
        // With a single word, the message already contains it.
        let hint = nearest(text, words.iter().copied()).filter(|_| words.len() > 1);
        let hint = match (hint, elsewhere(text).filter(|_| words.contains(&"router"))) {
            (Some(word), _) => format!("did you mean {word}?"),
            (None, tip) => tip.unwrap_or_default().to_owned(),
        };
        self.fault(tree.position, path, message, hint);
    }

    fn visit_entries(
        &mut self,
        schema: &'a Json,
        fitting: &[&'a Json],
        entries: &[((u32, u32), String, Tree)],
        path: &JsonPointer,
        at: (u32, u32),
    ) {
        let properties = schema.get("properties").and_then(Json::as_object);
        let others = schema.get("additionalProperties");
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        for (place, name, value) in entries {
            if !seen.insert(name) {
                let message = format!("{name:?} is defined twice");
                self.fault(*place, &path.key(name), message, "remove or rename one".into());
                continue;
            }
            let known = properties.and_then(|properties| properties.get(name));
            match known.or(others.filter(|others| others.is_object())) {
                Some(schema) => self.visit(schema, value, &path.key(name), *place),
                None if others == Some(&Json::Bool(false)) => {
                    let of = fitting.iter().filter(|other| other["properties"].get(name).is_some());
                    let of: Vec<_> = of.filter_map(|other| self.kind(other)).collect();
                    if let (Some(kind), false) = (self.kind(schema), of.is_empty()) {
                        let message = format!("{name:?} is not a key of kind {kind}");
                        let hint = format!("remove it, or use kind: {}", of.join(" or "));
                        self.fault(*place, path, message, hint);
                        continue;
                    }
                    let known = properties.into_iter().flat_map(|p| p.keys().map(String::as_str));
                    let unused = known.filter(|key| !entries.iter().any(|(_, k, _)| k == key));
                    let names: Vec<&str> = unused.collect();
                    let hint = match nearest(name, names.iter().copied()) {
                        Some(nearest) => format!("did you mean {nearest}?"),
                        None => format!("keys here: {}", names.join(", ")),
                    };
                    self.fault(*place, path, format!("unknown key {name:?}"), hint);
                }
                None => {}
            }
        }
        for name in required(schema).filter(|name| !seen.contains(name)) {
            self.fault(at, path, format!("{name}{MISSING}"), format!("add {name}"));
        }
    }

    fn visit_scalar(&mut self, schema: &'a Json, tree: &Tree, path: &JsonPointer) {
        let Some(text) = tree.value.scalar() else { return };
        if let Some(format) = schema.get("format").and_then(Json::as_str)
            && let Err(bad) = check_format(format, &text)
        {
            let message = format!("{} {:?} {}", last(path), beginning(&text), bad.problem);
            let hint = if has_placeholder(&text) { PLACEHOLDER_HINT } else { bad.hint };
            self.fault(tree.position, path, message, hint.into());
            return;
        }
        let bound = |name: &str| schema.get(name).and_then(Json::as_f64);
        let number = match &tree.value {
            YamlValue::Unsigned(number) => Some(*number as f64),
            YamlValue::Signed(number) => Some(*number as f64),
            YamlValue::Float(number) => Some(*number),
            _ => None,
        };
        // Bounds of the field's integer type; schemas omit them for large types.
        let type_max = match schema.get("format").and_then(Json::as_str) {
            Some("uint32") => Some(f64::from(u32::MAX)),
            _ => None,
        };
        if let Some(number) = number {
            let beyond = type_max.filter(|max| number > *max);
            let (min, max) = (bound("minimum"), bound("maximum").or(beyond));
            if max.is_some_and(|max| number > max) || min.is_some_and(|min| number < min) {
                let message = format!("{} {text} is not {}", last(path), range_text(min, max));
                self.fault(tree.position, path, message, String::new());
            }
        } else {
            let (min, max) = (bound("minLength"), bound("maxLength"));
            let chars = text.chars().count() as f64;
            if max.is_some_and(|max| chars > max) || min.is_some_and(|min| chars < min) {
                let expected = range_text(min, max);
                let message = format!(
                    "{} {:?} has {chars} characters, not {expected}",
                    last(path),
                    beginning(&text)
                );
                self.fault(tree.position, path, message, String::new());
            }
        }
    }
}

/// Returns a text for a message. Long texts, such as a file's content, are cut off.
fn beginning(text: &str) -> Cow<'_, str> {
    const SHOWN_CHARS: usize = 80;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

/// Returns the types that a schema admits.
fn types(schema: &Json) -> Vec<&str> {
    match schema.get("type") {
        Some(Json::String(one)) => vec![one],
        Some(Json::Array(several)) => several.iter().filter_map(Json::as_str).collect(),
        _ => Vec::new(),
    }
}

fn admits(schema: &Json, kind: &str) -> bool {
    let types = types(schema);
    types.is_empty() || types.contains(&kind) || (kind == "integer" && types.contains(&"number"))
}

/// Returns the required keys of an object.
fn required(schema: &Json) -> impl Iterator<Item = &str> {
    let keys = schema.get("required").and_then(Json::as_array);
    keys.into_iter().flatten().filter_map(Json::as_str)
}

/// Returns the allowed words, if only words are allowed.
fn words<'a>(schemas: &[&'a Json]) -> Vec<&'a str> {
    let mut words = Vec::new();
    for schema in schemas {
        match (schema.get("const"), schema.get("enum")) {
            (Some(Json::String(word)), _) => words.push(word.as_str()),
            (_, Some(Json::Array(several))) => {
                words.extend(several.iter().filter_map(Json::as_str))
            }
            _ => return Vec::new(),
        }
    }
    words
}

/// Joins words with commas, and `or` before the last.
pub(crate) fn join_alternatives(words: &[&str]) -> String {
    match words {
        [before @ .., last] if !before.is_empty() => format!("{} or {last}", before.join(", ")),
        _ => words.concat(),
    }
}

/// Returns the last key of a path. For an index, the name of its list is included.
fn last(path: &JsonPointer) -> String {
    let segments = path.segments();
    match segments.as_slice() {
        [.., list, index] if index.bytes().all(|b| b.is_ascii_digit()) => {
            format!("{list}[{index}]")
        }
        [.., key] => key.clone(),
        [] => "document".into(),
    }
}

fn people_type(kind: &str) -> &str {
    match kind {
        "null" => "empty",
        "boolean" => "true or false",
        "integer" => "a whole number",
        "number" => "a number",
        "string" => "text",
        "array" => "a list",
        _ => "a mapping",
    }
}

fn range_text(min: Option<f64>, max: Option<f64>) -> String {
    match (min, max) {
        (Some(min), Some(max)) if min == max => format!("{min}"),
        (Some(min), Some(max)) => format!("within {min} to {max}"),
        (Some(min), None) => format!("at least {min}"),
        (None, Some(max)) => format!("at most {max}"),
        (None, None) => String::new(),
    }
}
