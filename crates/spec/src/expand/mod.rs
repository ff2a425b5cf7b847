//! A virtual network as people write it, with `defaults`, `kinds`, `groups` and ranges, to one in which each node,
//! external, interface and link is written out.
//!
//! - **Nearest wins**: of a node what is written at itself, then its group's, its kind's, and the defaults'; of a link
//!   its own, its group's, and the defaults'. Mappings are merged key by key; lists, and what is one thing (an image, a
//!   program, a file), are replaced; a key that is null takes away what came from further off.
//! - **Ranges**: `leaf[1-40]` is 40 names, and what is below stands there for each. A link is written out for each name
//!   of the endpoint that has ranges; where several have one, their numbers go up together. With `segment` ranges are
//!   ends of one link.
//! - **Placeholders** ([`template`]) are filled in within all that stands for several: below a name with a range, and
//!   in defaults, kinds and groups. Nowhere else, so that a file of a node keeps its braces.
//!
//! Values keep the places where they were written. A document without any of it stays as it is. How much comes of it
//! is counted before it is made: no more nodes, links and interfaces than a network may have, and no more bytes than a
//! spec file.

mod links;
mod merge;
mod range;
mod template;

use std::collections::BTreeMap;

use crate::limits::{EXTERNALS_MAX, NODES_MAX, PORTS_MAX, SPEC_BYTES_MAX};
use crate::object::NodeKind;
use crate::shape::{Fault, nearest};
use crate::tree::{Path, Place, Tree, Value};
use links::ends;
use merge::{merge, without};
use range::Pattern;
use template::Values;

/// Keys of a `spec` that are gone once it is written out.
const KEYS: [&str; 5] = ["defaults", "kinds", "groups", "linkDefaults", "linkGroups"];

/// Ranges of a node's or external's name, whose numbers are `n` and `m`.
const RANGES_MAX: usize = 2;

/// What a value counts beside its text.
const VALUE_BYTES: usize = 64;

type Entry = (Place, String, Tree);

/// A document that was written out.
pub(crate) struct Expanded {
    /// It.
    pub document: Tree,
    /// What was given for several, with the type of what it was for, so that it is looked at too where nobody has it.
    pub given: Vec<(Path, Tree, &'static str)>,
}

/// Writes a virtual network's document out; `None`: there is nothing to.
///
/// # Errors
/// What stands in the way; nothing that a look at the shape of what comes of it finds as well.
pub(crate) fn expand(document: &Tree) -> Result<Option<Expanded>, Vec<Fault>> {
    let Some(Value::Map(spec)) = document.value.get("spec").map(|spec| &spec.value) else {
        return Ok(None);
    };
    if !is_used(spec) {
        return Ok(None);
    }
    let mut expansion = Expansion { spec, room: SPEC_BYTES_MAX, faults: Vec::new() };
    let mut entries = Vec::new();
    for (place, key, tree) in spec {
        let at = Path::of(&["spec", key]);
        let value = match (key.as_str(), &tree.value) {
            (key, _) if KEYS.contains(&key) => continue,
            ("nodes", Value::Map(nodes)) => Value::Map(expansion.nodes(nodes, &at)),
            ("externals", Value::Map(all)) => Value::Map(expansion.externals(all, &at)),
            ("links", Value::List(links)) => Value::List(expansion.links(links, &at)),
            (_, value) => value.clone(),
        };
        entries.push((*place, key.clone(), Tree { place: tree.place, value }));
    }
    let given = match expansion.faults.is_empty() {
        true => expansion.given(),
        false => Vec::new(),
    };
    if !expansion.faults.is_empty() {
        return Err(expansion.faults);
    }
    let Value::Map(mut whole) = document.value.clone() else { return Ok(None) };
    for (_, _, tree) in whole.iter_mut().filter(|(_, key, _)| key == "spec").take(1) {
        tree.value = Value::Map(std::mem::take(&mut entries));
    }
    let document = Tree { place: document.place, value: Value::Map(whole) };
    Ok(Some(Expanded { document, given }))
}

/// True if a text has a placeholder, which stays where a name has no range.
pub(crate) fn has_placeholder(text: &str) -> bool {
    let all = Values { name: Some(""), n: Some(1), m: Some(1), i: Some(1) };
    !all.fill(text).is_ok_and(|filled| filled == text)
}

/// Whether anything is to be written out.
fn is_used(spec: &[Entry]) -> bool {
    let has_range = |name: &str| name.contains('[') && Pattern::read(name).is_ok();
    let map = |value: &Value, used: &dyn Fn(&Entry) -> bool| match value {
        Value::Map(entries) => entries.iter().any(used),
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
        ("links", Value::List(links)) => links.iter().any(|link| {
            let ranged = |end: &Tree| matches!(&end.value, Value::Text(end) if has_range(end));
            link.value.get("group").is_some() || ends(link).iter().any(ranged)
        }),
        (key, _) => KEYS.contains(&key),
    })
}

/// A name that stands for several, what is written for them, and where.
struct Several<'a> {
    place: Place,
    written: &'a str,
    pattern: Pattern<'a>,
    body: &'a Tree,
}

struct Expansion<'a> {
    spec: &'a [Entry],
    /// Bytes that may still come.
    room: usize,
    faults: Vec<Fault>,
}

impl<'a> Expansion<'a> {
    fn fault(&mut self, place: Place, path: &Path, message: String, hint: &str) {
        self.faults.push(Fault { place, path: path.clone(), message, hint: hint.into() });
    }

    /// What one of [`KEYS`] has.
    fn of(&self, key: &str) -> Option<&'a Tree> {
        self.spec.iter().find(|(_, found, _)| found == key).map(|(_, _, tree)| tree)
    }

    /// Names and what is written for them, if that is no more than `max` of `what`.
    fn several(
        &mut self,
        entries: &'a [Entry],
        (what, max, ranges_max): (&str, usize, usize),
        at: &Path,
    ) -> Vec<Several<'a>> {
        let (mut all, mut count) = (Vec::new(), 0u64);
        for (place, name, body) in entries {
            let path = at.key(name);
            let pattern = match Pattern::read(name) {
                Ok(pattern) if pattern.ranges() > ranges_max => {
                    let message =
                        format!("{name:?} has {} ranges, {ranges_max} at most", pattern.ranges());
                    self.fault(*place, &path, message, "write the names out by one range less");
                    continue;
                }
                Ok(pattern) => pattern,
                // Kernels take brackets in an interface's name.
                Err(_) if what == "interfaces" => Pattern::read_or_plain(name),
                Err(message) => {
                    self.fault(*place, &path, message, RANGE_HINT);
                    continue;
                }
            };
            let own = pattern.count();
            count = count.saturating_add(own);
            if count > max as u64 && own > 1 {
                let message = format!("{name:?} makes it {count} {what}, {max} at most");
                self.fault(*place, &path, message, "make the range shorter");
                return Vec::new();
            }
            all.push(Several { place: *place, written: name, pattern, body });
        }
        all
    }

    fn nodes(&mut self, nodes: &'a [Entry], at: &Path) -> Vec<Entry> {
        let (mut made, mut writers) = (Vec::new(), BTreeMap::new());
        for node in self.several(nodes, ("nodes", NODES_MAX, RANGES_MAX), at) {
            for which in 0..node.pattern.count() {
                let (name, numbers) = node.pattern.at(which);
                let path = at.key(&name);
                // The same text twice is found with the shape.
                let before = writers.insert(name.clone(), node.written);
                if let Some(before) = before.filter(|before| *before != node.written) {
                    let message =
                        format!("{name:?} is defined twice, by {before:?} and {:?}", node.written);
                    self.fault(node.place, &path, message, TWICE_HINT);
                    return made;
                }
                let Some(value) = self.node(&node, &name, &numbers, &path) else { return made };
                made.push((node.place, name, value));
            }
        }
        made
    }

    /// One node; `None`: something is wrong that all of its name have in common.
    fn node(
        &mut self,
        node: &Several<'_>,
        name: &str,
        numbers: &[u64],
        path: &Path,
    ) -> Option<Tree> {
        let template = Values { name: Some(name), ..Values::of(numbers) };
        let group = self.group("groups", node.body, path)?;
        let defaults = self.of("defaults");
        let kind = [Some(node.body), group, defaults].into_iter().flatten();
        let kind = kind.filter_map(|layer| layer.value.text("kind")).next();
        let kind = self.of("kinds").and_then(|kinds| kinds.value.get(kind?));
        let mut whole = Tree { place: node.body.place, value: Value::Map(Vec::new()) };
        for layer in [defaults, kind, group].into_iter().flatten() {
            let layer = self.layer(layer, &template, path)?;
            merge(&mut whole, layer, &mut Vec::new());
        }
        let own = if node.pattern.ranges() > 0 { template } else { Values::default() };
        let own = self.layer(node.body, &own, path)?;
        merge(&mut whole, without(own, "group"), &mut Vec::new());
        Some(whole)
    }

    fn externals(&mut self, externals: &'a [Entry], at: &Path) -> Vec<Entry> {
        let mut made = Vec::new();
        for external in self.several(externals, ("externals", EXTERNALS_MAX, RANGES_MAX), at) {
            for which in 0..external.pattern.count() {
                let (name, numbers) = external.pattern.at(which);
                let mut values = Values::of(&numbers);
                values.name = (!numbers.is_empty()).then_some(&name);
                let Some(value) = self.fill(external.body, &values, &at.key(&name)) else {
                    return made;
                };
                made.push((external.place, name, value));
            }
        }
        made
    }

    /// What the group of a node or link has; `Some(None)`: it is in none.
    fn group(&mut self, key: &str, member: &Tree, path: &Path) -> Option<Option<&'a Tree>> {
        let Some(group) = member.value.get("group") else { return Some(None) };
        let path = path.key("group");
        let Value::Text(name) = &group.value else {
            self.fault(group.place, &path, format!("group is not a name of one of {key}"), "");
            return None;
        };
        let groups = match self.of(key).map(|groups| &groups.value) {
            Some(Value::Map(groups)) => &groups[..],
            _ => &[],
        };
        if let Some((.., found)) = groups.iter().find(|(_, found, _)| found == name) {
            return Some(Some(found));
        }
        let known = || groups.iter().map(|(_, known, _)| known.as_str());
        let hint = match nearest(name, known()) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None if groups.is_empty() => format!("describe it in spec.{key}"),
            None => format!("{key}: {}", known().collect::<Vec<_>>().join(", ")),
        };
        self.fault(group.place, &path, format!("group {name:?} is not in spec.{key}"), &hint);
        None
    }

    /// What is given for several, each once, as for a first of them.
    fn given(&mut self) -> Vec<(Path, Tree, &'static str)> {
        let values = Values { name: Some("name"), n: Some(1), m: Some(1), i: Some(1) };
        let mut given = Vec::new();
        for key in KEYS {
            let Some(tree) = self.of(key) else { continue };
            let (path, node) = (Path::of(&["spec", key]), !key.starts_with("link"));
            let entries = match (&tree.value, key) {
                (_, "defaults" | "linkDefaults") => vec![(path, tree)],
                (Value::Map(entries), _) => {
                    for (place, kind, _) in entries.iter().filter(|_| key == "kinds") {
                        if serde_json::from_value::<NodeKind>(kind.as_str().into()).is_err() {
                            let message = format!("{kind:?} is not a kind of nodes");
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
                    let message = format!("{key} is not a mapping of names to what they give");
                    self.fault(tree.place, &path, message, "");
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

    /// What is written for a node at one place, filled in, its interfaces written out. Nothing stands for a mapping
    /// without keys.
    fn layer(&mut self, layer: &Tree, values: &Values<'_>, path: &Path) -> Option<Tree> {
        let entries = match &layer.value {
            Value::Map(entries) => &entries[..],
            Value::Null => &[],
            _ => return self.fill(layer, values, path),
        };
        let mut made = Vec::new();
        for (place, key, tree) in entries {
            let value = match (key.as_str(), &tree.value) {
                ("interfaces", Value::Map(interfaces)) => {
                    let value = Value::Map(self.interfaces(interfaces, values, &path.key(key))?);
                    Tree { place: tree.place, value }
                }
                _ => self.fill(tree, values, &path.key(key))?,
            };
            made.push((*place, key.clone(), value));
        }
        Some(Tree { place: layer.place, value: Value::Map(made) })
    }

    fn interfaces(
        &mut self,
        interfaces: &[Entry],
        values: &Values<'_>,
        at: &Path,
    ) -> Option<Vec<Entry>> {
        let faults = self.faults.len();
        let mut made = Vec::new();
        // The names are of `interfaces`, and not of the document.
        let mut all = Expansion { spec: &[], room: self.room, faults: Vec::new() };
        for interface in all.several(interfaces, ("interfaces", PORTS_MAX, 1), at) {
            for which in 0..interface.pattern.count() {
                let (name, numbers) = interface.pattern.at(which);
                let values = Values { i: numbers.first().copied(), ..*values };
                let Some(value) = all.fill(interface.body, &values, &at.key(&name)) else { break };
                made.push((interface.place, name, value));
            }
        }
        self.room = all.room;
        self.faults.extend(all.faults);
        (self.faults.len() == faults).then_some(made)
    }

    /// A value with all placeholders below filled in; `None`: one can't be, or it is too much in all.
    fn fill(&mut self, tree: &Tree, values: &Values<'_>, path: &Path) -> Option<Tree> {
        let text = match &tree.value {
            Value::Text(text) => text.len(),
            _ => 0,
        };
        self.take(VALUE_BYTES + text, tree.place, path)?;
        let value = match &tree.value {
            Value::Text(text) => Value::Text(self.fill_text(text, values, tree.place, path)?),
            Value::List(items) => {
                let items = items.iter().enumerate();
                let items = items.map(|(index, item)| self.fill(item, values, &path.index(index)));
                Value::List(items.collect::<Option<_>>()?)
            }
            Value::Map(entries) => {
                let mut made = Vec::with_capacity(entries.len().min(1024));
                for (place, key, value) in entries {
                    self.take(key.len(), *place, path)?;
                    let key = self.fill_text(key, values, *place, path)?;
                    let value = self.fill(value, values, &path.key(&key))?;
                    made.push((*place, key, value));
                }
                Value::Map(made)
            }
            other => other.clone(),
        };
        Some(Tree { place: tree.place, value })
    }

    fn fill_text(
        &mut self,
        text: &str,
        values: &Values<'_>,
        place: Place,
        path: &Path,
    ) -> Option<String> {
        match values.fill(text) {
            Ok(filled) => Some(filled.into_owned()),
            Err(message) => {
                self.fault(place, path, message, "change the placeholder or the range");
                None
            }
        }
    }

    /// Counts bytes that come; `None`: they are too many.
    fn take(&mut self, bytes: usize, place: Place, path: &Path) -> Option<()> {
        match self.room.checked_sub(bytes) {
            Some(room) => self.room = room,
            None => {
                let message = format!(
                    "written out, this is more than the {SPEC_BYTES_MAX} bytes of a spec file"
                );
                self.fault(
                    place,
                    path,
                    message,
                    "give fewer or shorter ones; put large files into an image",
                );
                return None;
            }
        }
        Some(())
    }
}

const RANGE_HINT: &str = "write a range like leaf[1-40]";
const TWICE_HINT: &str = "leave it out of the range, and give both what they share by kinds or a \
                          group; a name like \"r[1-1]\" keeps its placeholders";
