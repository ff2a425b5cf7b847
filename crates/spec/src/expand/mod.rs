//! Expands a virtual network with `defaults`, `kinds`, `groups`
//! and ranges to single nodes, externals, interfaces and links.
//!
//! - **Precedence**: a node's own values, then its group's, its kind's, and the defaults'; a
//!   link's own values, then its group's, and the defaults'. Mappings merge key by key. Lists,
//!   images, programs and files are replaced as a whole. A null value removes an inherited key.
//! - **Ranges**: `leaf[1-40]` means 40 names, each with the same value. A link is
//!   repeated for each name of the endpoint that has ranges. If several endpoints have
//!   one, their numbers advance together. With `segment`, ranges are ends of one link.
//! - **Placeholders** ([`template`]) are replaced below a name with a range,
//!   and in defaults, kinds and groups. Files of other nodes keep their braces.
//!
//! Values keep their positions in the file. A document without any of these stays
//! as it is. The size is counted before the expansion: no more nodes, links and
//! interfaces than a network may have, and no more bytes than a spec file.

mod links;
mod merge;
mod range;
mod template;

use std::collections::BTreeMap;

use crate::limits::{EXTERNALS_MAX, NODES_MAX, PORTS_MAX, SPEC_BYTES_MAX};
use crate::nearest::nearest;
use crate::object::NodeKind;
use crate::tree::{JsonPointer, SchemaFault, TextPosition, Tree, YamlValue};
use links::ends;
use merge::{merge, without};
use range::NamePattern;
use template::Values;

/// Keys of a `spec` that the expansion removes.
const KEYS: [&str; 5] = ["defaults", "kinds", "groups", "linkDefaults", "linkGroups"];

/// Ranges of a node's or external's name; their numbers are `n` and `m`.
const RANGES_MAX: usize = 2;

/// Bytes that a value counts besides its text.
const VALUE_BYTES: usize = 64;

type MapEntry = (TextPosition, String, Tree);

/// Settings that objects share: their path, their value, and the type of these objects.
pub(crate) type SharedSettings = (JsonPointer, Tree, &'static str);

/// Expands a virtual network's document. Returns its shared settings, so that unused ones are
/// checked too; `None` if there is nothing to expand.
///
/// # Errors
/// Obstacles to the expansion; the document stays as it is. Errors that a check of the result's
/// shape finds are not included.
pub(crate) fn expand(document: &mut Tree) -> Result<Option<Vec<SharedSettings>>, Vec<SchemaFault>> {
    let Some(YamlValue::Map(spec)) = document.value.get("spec").map(|spec| &spec.value) else {
        return Ok(None);
    };
    if !is_used(spec) {
        return Ok(None);
    }
    let mut expansion = Expansion { spec, bytes_left: SPEC_BYTES_MAX, faults: Vec::new() };
    let mut entries = Vec::new();
    for (place, key, tree) in spec {
        let at = JsonPointer::of(&["spec", key]);
        let value = match (key.as_str(), &tree.value) {
            (key, _) if KEYS.contains(&key) => continue,
            ("nodes", YamlValue::Map(nodes)) => YamlValue::Map(expansion.nodes(nodes, &at)),
            ("externals", YamlValue::Map(all)) => YamlValue::Map(expansion.externals(all, &at)),
            ("links", YamlValue::List(links)) => YamlValue::List(expansion.links(links, &at)),
            (_, value) => value.clone(),
        };
        entries.push((*place, key.clone(), Tree { position: tree.position, value }));
    }
    let given = match expansion.faults.is_empty() {
        true => expansion.given(),
        false => Vec::new(),
    };
    if !expansion.faults.is_empty() {
        return Err(expansion.faults);
    }
    if let Some(spec) = document.value.get_mut("spec") {
        spec.value = YamlValue::Map(entries);
    }
    Ok(Some(given))
}

/// True if a text has a placeholder, which is not replaced where a name has no range.
pub(crate) fn has_placeholder(text: &str) -> bool {
    let all = Values { name: Some(""), n: Some(1), m: Some(1), i: Some(1) };
    !all.fill(text).is_ok_and(|filled| filled == text)
}

/// True if there is anything to expand.
fn is_used(spec: &[MapEntry]) -> bool {
    let has_range = |name: &str| name.contains('[') && NamePattern::read(name).is_ok();
    let map = |value: &YamlValue, used: &dyn Fn(&MapEntry) -> bool| match value {
        YamlValue::Map(entries) => entries.iter().any(used),
        _ => false,
    };
    spec.iter().any(|(_, key, tree)| match (key.as_str(), &tree.value) {
        ("nodes", nodes) => map(nodes, &|(_, name, node)| {
            let interfaces = node.value.get("interfaces").map(|tree| &tree.value);
            let ranges = |interfaces| map(interfaces, &|(_, name, _)| has_range(name));
            name.contains('[')
                || node.value.get("group").is_some()
                || interfaces.is_some_and(ranges)
        }),
        ("externals", externals) => map(externals, &|(_, name, _)| name.contains('[')),
        ("links", YamlValue::List(links)) => links.iter().any(|link| {
            let ranged = |end: &Tree| matches!(&end.value, YamlValue::Text(end) if has_range(end));
            link.value.get("group").is_some() || ends(link).iter().any(ranged)
        }),
        (key, _) => KEYS.contains(&key),
    })
}

/// A name with ranges, its value, and its position.
struct RangedEntry<'a> {
    position: TextPosition,
    written: &'a str,
    pattern: NamePattern<'a>,
    body: &'a Tree,
}

struct Expansion<'a> {
    spec: &'a [MapEntry],
    /// Bytes left for the expansion.
    bytes_left: usize,
    faults: Vec<SchemaFault>,
}

impl<'a> Expansion<'a> {
    fn fault(&mut self, place: TextPosition, path: &JsonPointer, message: String, hint: &str) {
        self.faults.push(SchemaFault {
            position: place,
            path: path.clone(),
            message,
            hint: hint.into(),
        });
    }

    /// Returns the value of one of [`KEYS`].
    fn of(&self, key: &str) -> Option<&'a Tree> {
        self.spec.iter().find(|(_, found, _)| found == key).map(|(_, _, tree)| tree)
    }

    /// Returns names with their values, if they expand to no more than `max` of `what`.
    fn several(
        &mut self,
        entries: &'a [MapEntry],
        (what, max, ranges_max): (&str, usize, usize),
        at: &JsonPointer,
    ) -> Vec<RangedEntry<'a>> {
        let (mut all, mut count) = (Vec::new(), 0u64);
        for (place, name, body) in entries {
            let path = at.key(name);
            let pattern = match NamePattern::read(name) {
                Ok(pattern) if pattern.ranges() > ranges_max => {
                    let message =
                        format!("{name:?} has {} ranges, {ranges_max} at most", pattern.ranges());
                    self.fault(*place, &path, message, "write it with fewer ranges");
                    continue;
                }
                Ok(pattern) => pattern,
                // The kernel allows brackets in an interface's name.
                Err(_) if what == "interfaces" => NamePattern::read_or_plain(name),
                Err(message) => {
                    self.fault(*place, &path, message, RANGE_HINT);
                    continue;
                }
            };
            let own = pattern.count();
            count = count.saturating_add(own);
            if count > max as u64 && own > 1 {
                let message = format!("with {name:?} there are {count} {what}, {max} at most");
                self.fault(*place, &path, message, "make the range shorter");
                return Vec::new();
            }
            all.push(RangedEntry { position: *place, written: name, pattern, body });
        }
        all
    }

    fn nodes(&mut self, nodes: &'a [MapEntry], at: &JsonPointer) -> Vec<MapEntry> {
        let (mut made, mut writers) = (Vec::new(), BTreeMap::new());
        for node in self.several(nodes, ("nodes", NODES_MAX, RANGES_MAX), at) {
            for which in 0..node.pattern.count() {
                let (name, numbers) = node.pattern.at(which);
                let path = at.key(&name);
                // The shape check reports the same text twice.
                let before = writers.insert(name.clone(), node.written);
                if let Some(before) = before.filter(|before| *before != node.written) {
                    let message =
                        format!("{name:?} is defined twice, by {before:?} and {:?}", node.written);
                    self.fault(node.position, &path, message, TWICE_HINT);
                    return made;
                }
                let Some(value) = self.node(&node, &name, &numbers, &path) else { return made };
                made.push((node.position, name, value));
            }
        }
        made
    }

    /// Expands one node; `None` after an error common to all of its names.
    fn node(
        &mut self,
        node: &RangedEntry<'_>,
        name: &str,
        numbers: &[u64],
        path: &JsonPointer,
    ) -> Option<Tree> {
        let template = Values { name: Some(name), ..Values::of(numbers) };
        let group = self.group("groups", node.body, path)?;
        let defaults = self.of("defaults");
        let kind = [Some(node.body), group, defaults].into_iter().flatten();
        let kind = kind.filter_map(|layer| layer.value.text("kind")).next();
        let kind = self.of("kinds").and_then(|kinds| kinds.value.get(kind?));
        let mut whole = Tree { position: node.body.position, value: YamlValue::Map(Vec::new()) };
        for layer in [defaults, kind, group].into_iter().flatten() {
            let layer = self.layer(layer, &template, path)?;
            merge(&mut whole, layer, &mut Vec::new());
        }
        let own = if node.pattern.ranges() > 0 { template } else { Values::default() };
        let own = self.layer(node.body, &own, path)?;
        merge(&mut whole, without(own, "group"), &mut Vec::new());
        Some(whole)
    }

    fn externals(&mut self, externals: &'a [MapEntry], at: &JsonPointer) -> Vec<MapEntry> {
        let mut made = Vec::new();
        for external in self.several(externals, ("externals", EXTERNALS_MAX, RANGES_MAX), at) {
            for which in 0..external.pattern.count() {
                let (name, numbers) = external.pattern.at(which);
                let mut values = Values::of(&numbers);
                values.name = (!numbers.is_empty()).then_some(&name);
                let Some(value) = self.fill(external.body, &values, &at.key(&name)) else {
                    return made;
                };
                made.push((external.position, name, value));
            }
        }
        made
    }

    /// Returns the group's settings for a node or link; `Some(None)` if it is in no group.
    fn group(&mut self, key: &str, member: &Tree, path: &JsonPointer) -> Option<Option<&'a Tree>> {
        let Some(group) = member.value.get("group") else { return Some(None) };
        let path = path.key("group");
        let YamlValue::Text(name) = &group.value else {
            self.fault(group.position, &path, format!("group is not a name in {key}"), "");
            return None;
        };
        let groups = match self.of(key).map(|groups| &groups.value) {
            Some(YamlValue::Map(groups)) => &groups[..],
            _ => &[],
        };
        if let Some((.., found)) = groups.iter().find(|(_, found, _)| found == name) {
            return Some(Some(found));
        }
        let known = || groups.iter().map(|(_, known, _)| known.as_str());
        let hint = match nearest(name, known()) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None if groups.is_empty() => format!("define it in spec.{key}"),
            None => format!("{key}: {}", known().collect::<Vec<_>>().join(", ")),
        };
        self.fault(group.position, &path, format!("group {name:?} is not in spec.{key}"), &hint);
        None
    }

    /// Returns all shared settings once each, expanded for a first object.
    fn given(&mut self) -> Vec<SharedSettings> {
        let values = Values { name: Some("name"), n: Some(1), m: Some(1), i: Some(1) };
        let mut given = Vec::new();
        for key in KEYS {
            let Some(tree) = self.of(key) else { continue };
            let (path, node) = (JsonPointer::of(&["spec", key]), !key.starts_with("link"));
            let entries = match (&tree.value, key) {
                (_, "defaults" | "linkDefaults") => vec![(path, tree)],
                (YamlValue::Map(entries), _) => {
                    for (place, kind, _) in entries.iter().filter(|_| key == "kinds") {
                        if serde_json::from_value::<NodeKind>(kind.as_str().into()).is_err() {
                            let message = format!("{kind:?} is not a kind of node");
                            self.fault(
                                *place,
                                &path.key(kind),
                                message,
                                "kinds are router and host",
                            );
                        }
                    }
                    entries.iter().map(|(_, name, tree)| (path.key(name), tree)).collect()
                }
                _ => {
                    let message = format!("{key} is not a mapping of names to settings");
                    self.fault(tree.position, &path, message, "");
                    Vec::new()
                }
            };
            for (path, tree) in entries {
                let whole = if node {
                    self.layer(tree, &values, &path)
                } else {
                    self.fill(tree, &values, &path)
                };
                let Some(whole) = whole else { return given };
                given.push((path, whole, if node { "Node" } else { "Link" }));
            }
        }
        given
    }

    /// Expands the settings of a node at one level: placeholders
    /// and interface names. A null value means an empty mapping.
    fn layer(&mut self, layer: &Tree, values: &Values<'_>, path: &JsonPointer) -> Option<Tree> {
        let entries = match &layer.value {
            YamlValue::Map(entries) => &entries[..],
            YamlValue::Null => &[],
            _ => return self.fill(layer, values, path),
        };
        let mut made = Vec::new();
        for (place, key, tree) in entries {
            let value = match (key.as_str(), &tree.value) {
                ("interfaces", YamlValue::Map(interfaces)) => {
                    let value =
                        YamlValue::Map(self.interfaces(interfaces, values, &path.key(key))?);
                    Tree { position: tree.position, value }
                }
                _ => self.fill(tree, values, &path.key(key))?,
            };
            made.push((*place, key.clone(), value));
        }
        Some(Tree { position: layer.position, value: YamlValue::Map(made) })
    }

    fn interfaces(
        &mut self,
        interfaces: &[MapEntry],
        values: &Values<'_>,
        at: &JsonPointer,
    ) -> Option<Vec<MapEntry>> {
        let faults = self.faults.len();
        let mut made = Vec::new();
        // The names belong to `interfaces`, not to the document.
        let mut all = Expansion { spec: &[], bytes_left: self.bytes_left, faults: Vec::new() };
        for interface in all.several(interfaces, ("interfaces", PORTS_MAX, 1), at) {
            for which in 0..interface.pattern.count() {
                let (name, numbers) = interface.pattern.at(which);
                let values = Values { i: numbers.first().copied(), ..*values };
                let Some(value) = all.fill(interface.body, &values, &at.key(&name)) else { break };
                made.push((interface.position, name, value));
            }
        }
        self.bytes_left = all.bytes_left;
        self.faults.extend(all.faults);
        (self.faults.len() == faults).then_some(made)
    }

    /// Returns a value with all placeholders replaced;
    /// `None` after an error or if the total is too large.
    fn fill(&mut self, tree: &Tree, values: &Values<'_>, path: &JsonPointer) -> Option<Tree> {
        let text = match &tree.value {
            YamlValue::Text(text) => text.len(),
            _ => 0,
        };
        self.take(VALUE_BYTES + text, tree.position, path)?;
        let value = match &tree.value {
            YamlValue::Text(text) => {
                YamlValue::Text(self.fill_text(text, values, tree.position, path)?)
            }
            YamlValue::List(items) => {
                let items = items.iter().enumerate();
                let items = items.map(|(index, item)| self.fill(item, values, &path.index(index)));
                YamlValue::List(items.collect::<Option<_>>()?)
            }
            YamlValue::Map(entries) => {
                let mut made = Vec::with_capacity(entries.len().min(1024));
                for (place, key, value) in entries {
                    self.take(key.len(), *place, path)?;
                    let key = self.fill_text(key, values, *place, path)?;
                    let value = self.fill(value, values, &path.key(&key))?;
                    made.push((*place, key, value));
                }
                YamlValue::Map(made)
            }
            other => other.clone(),
        };
        Some(Tree { position: tree.position, value })
    }

    fn fill_text(
        &mut self,
        text: &str,
        values: &Values<'_>,
        place: TextPosition,
        path: &JsonPointer,
    ) -> Option<String> {
        match values.fill(text) {
            Ok(filled) => Some(filled.into_owned()),
            Err(message) => {
                self.fault(place, path, message, "change the placeholder or the range");
                None
            }
        }
    }

    /// Counts bytes of the expansion; `None` if they are too many.
    fn take(&mut self, bytes: usize, place: TextPosition, path: &JsonPointer) -> Option<()> {
        match self.bytes_left.checked_sub(bytes) {
            Some(room) => self.bytes_left = room,
            None => {
                let message = format!("expanded, the spec exceeds {SPEC_BYTES_MAX} bytes");
                self.fault(
                    place,
                    path,
                    message,
                    "use fewer or shorter values; put large files into an image",
                );
                return None;
            }
        }
        Some(())
    }
}

const RANGE_HINT: &str = "write a range like leaf[1-40]";
const TWICE_HINT: &str = "leave it out of the range, and define shared settings by kinds or a \
                          group; for placeholders, write a name like \"r[1-1]\"";
