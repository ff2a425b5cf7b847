//! docs/spec.md: every key of a spec, generated from the schema.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde_json::Value;

use crate::command::Command;
use crate::link::LinkEgress;
use crate::schema;

/// Text before the tables.
const INTRODUCTION: &str = "# Specs

Specs are YAML files that describe networks to PdP. This page lists their keys, [glossary.md](glossary.md) the terms.

A file has one or more documents. A machine has one `Substrate` (interfaces and CPUs) and any number of
`VirtualNetwork`s and `Tenant`s ([tenants.md](tenants.md)).

- `pdp apply -f FILE` applies a spec. With `--dry-run`, it only checks the spec.
- `pdp validate -f FILE` checks files without a daemon. If they have no Substrate, it takes this machine's default one,
  and assumes that external interfaces and tenants exist.

With this first line, editors check and complete specs by [schema/pdp-v1.json](../schema/pdp-v1.json):

```yaml
# yaml-language-server: $schema=../schema/pdp-v1.json
```

Until you apply a Substrate, PdP uses a default one. On a machine with two CPUs it is:

```yaml
apiVersion: pdp/v1
kind: Substrate
metadata: {name: default}
spec:
  mux: {cpus: \"0\", power: 1}
  forwardingEngines:
    fe1: {cpus: \"1\", capacity: 1}
```

With more CPUs, `fe1` has all but the first. With one CPU, `mux` and `fe1` have 0.5 each. A Substrate without `mux` and
`forwardingEngines` gets the default ones.

## Values

Unknown keys are errors. Keys are optional unless marked `required`. Booleans default to `false`. YAML anchors, aliases
and merge keys work.

type | notation
---|---
cores | `0.5`, or thousandths: `500m`
bytes | `268435456`, `256Mi` (`Ki Mi Gi Ti`: 1024), `1G` (`K M G T`: 1000)
bit-rate | bits per second: `100000000`, `100Mbps`, `1G`
span | `20ms`, `1.5s`, `250us`, `2m`, or milliseconds: `20`
percent | `0.1%` or `0.1`; at most seven decimals
queue | frames: `1000`, or their time at the rate: `50ms`
length | frames: `64`, or bytes with a unit: `256KiB`, `1MB`
published-port | `[ADDRESS:]PORT:NODE_PORT[/udp]`: `\"8080:80\"`; default address: 127.0.0.1
mac | unicast: `02:00:00:00:00:01`
address | `10.0.0.1/24`, `fd00::1/64`
ip | `192.0.2.1`, `2001:db8::1`
user | `frr`, `frr:frr`, `1000:1000`; numbers up to 65535
destination | `10.0.0.0/8`, `fd00::/8`, an address, or `default`
cpus | `\"0-3,6\"`
keys | `7`, or up to 64 ranges: `\"100-199,300\"`
hex | two digits per byte, at most 64 bytes: `\"0806\"`
base64 | RFC 4648 section 4, on one line
endpoint | `NODE:INTERFACE`, or `external:NAME`
command | a list of words, or a text split as in a shell, without expansions

Names are DNS labels: at most 63 lower-case letters, digits and inner `-`. Names of nodes, links and externals may have
capital letters (`PE1`). Two nodes must not differ in case only.

In nodes, `/etc/hosts` maps `NODE` to the node's first IPv4 and IPv6 address, from `loopback` if possible, and
`INTERFACE.NODE` to the interface's addresses. `/etc/hosts` in `files` replaces it.

## Addresses

Interfaces of one node may have the same address, as in Linux:

- **Link-local**: `fe80::1/64` on each interface, with `gateways: [\"fe80::1\"]` on hosts.
- **Unnumbered**: the /32 or /128 of `loopback` on each interface. Static routes have `dev: eth0, onlink: true`.
- **VRFs** that the node's commands create.

The ends of a link have different MAC and IP addresses. Only interfaces with `anycast: true` may share them, such as
gateways of leaf switches. A segment sends frames for a shared MAC address to the end that [last used
it](links.md#segments).

IPv6 needs an `mtu` of at least 1280, and a machine booted without `ipv6.disable=1`.

## Many alike

`pdp inspect` shows the expanded spec, which you can apply again.

```yaml
spec:
  defaults: {kind: router, resources: {memory: 128Mi}}       # all nodes
  kinds: {host: {commands: [/usr/sbin/sshd -D]}}             # nodes of a kind
  groups: {leaf: {env: {AS: \"{n+65000}\"}}}                   # nodes that say group: leaf
  nodes:
    leaf[1-4]:
      group: leaf
      interfaces: {\"eth[1-2]\": {addresses: [\"10.{i}.{n}.1/31\"]}}
    spine[1-2]: {interfaces: {\"eth[1-4]\": {addresses: [\"10.{n}.{i}.0/31\"]}}}
  linkDefaults: {delay: 1ms}                                 # all links; linkGroups: those of a group
  links:
    - endpoints: [\"leaf[1-4]:eth[1-2]\", \"spine{m}:eth{n}\"]
```

- **Precedence**: A node's own keys override its group's, then its kind's, then `defaults`. A link's own keys override
  its group's, then `linkDefaults`. Mappings merge key by key at every depth. PdP replaces lists, `image`, `program` and
  each file of `files` as a whole. A null value (`env: null`) removes an inherited key. A node may be empty (`h1:`).
- **Ranges**: `leaf[1-4]` means leaf1 to leaf4, `leaf[01-40]` leaf01 to leaf40. Names of nodes and externals have up to
  two ranges, of interfaces one. Up to two ranges in one endpoint make a link for each combination; its other endpoints
  use placeholders. Endpoints with one range each, of equal size, advance together: `[\"h[1-9]:eth0\", \"r1:eth[11-19]\"]`.
  With `segment`, ranges list its ends: `endpoints: [\"r1:eth0\", \"h[1-20]:eth0\"], segment: {}`. Within `{ }`, YAML needs
  quotes around brackets.
- **Placeholders**: `{n}` and `{m}` are the numbers of the name's first and second range, `{i}` is the number of the
  interface's range, and `{name}` the name of the node or external. Integers, parentheses and `+ - * / %` are allowed,
  without spaces: `{n*4+i-1}`. PdP replaces placeholders in defaults, kinds and groups, in links with ranges, and below
  names with ranges. Other braces (`function f() { … }`) and anything after a `$` stay. `{{n}}` means a literal `{n}`. A
  `from` path may have placeholders, its file may not.

## Bounds

These limits apply to the expanded spec.

per | at most
---|---
spec file | 16 MiB and 250,000 values, with aliases expanded
machine | 1,024 virtual networks, 256 tenants
tenant | 64 entries per list
substrate | 64 external interfaces, 256 forwarding engines
virtual network | 256 nodes, 4,096 links, 4,096 externals, 16,384 interfaces
node | 256 each of interfaces, routes, sysctls, environment variables, files; 64 each of `commands`, `exec`, `binds`; 16 volumes
interface, `loopback` | 32 addresses
route | 32 next hops
file | 4 MiB of UTF-8 text
command | 256 words
router | 64 punt filters, 32 program files of 256 KiB in total
flow, punt filter | 16 fields of 256 bytes in total
";

/// Text before the table of egress keys.
const EGRESS: &str = "Keys of links, of single ends (`at`), and of schedule steps (without `queues`). They apply to frames that a node's
interface sends into the link, and that a transit or segment sends to the outside.";

/// Returns the whole page.
pub fn markdown() -> String {
    let mut page = INTRODUCTION.to_owned();
    for kind in ["Substrate", "VirtualNetwork", "Tenant"] {
        let Some(schema) = schema::of_kind(kind).map(schema::as_written) else { continue };
        if kind == "Substrate" {
            page.push_str("\n## All kinds\n\n");
            let mut rows = rows(&schema, &schema);
            if let Some(row) = rows.iter_mut().find(|row| row.key == "kind") {
                row.types.push_str(", required");
                row.what = "`Substrate`, `VirtualNetwork` or `Tenant`.".into();
            }
            table(&rows, &mut page);
            page.push_str("\n### metadata\n\n");
            let (metadata, _) = resolve(&schema, &schema["properties"]["metadata"]);
            table(&self::rows(&schema, metadata), &mut page);
        }
        let _ = write!(page, "\n## {kind}\n\nKeys of `spec`:\n");
        let (spec, _) = resolve(&schema, &schema["properties"]["spec"]);
        let egress = &schema["$defs"][&*LinkEgress::schema_name()];
        let mut homes = homes(&schema, spec);
        homes.remove(&std::ptr::from_ref(egress));
        let (done, printed) = (BTreeSet::new(), BTreeSet::new());
        let egress = rows(&schema, egress);
        Sections { root: &schema, egress, homes, done, printed }.write(spec, "spec", &mut page);
    }
    page
}

/// Follows a schema's reference. Returns the target, and its name if there was a reference.
fn resolve<'a>(root: &'a Value, schema: &'a Value) -> (&'a Value, Option<&'a str>) {
    let reference = schema.get("$ref").and_then(Value::as_str);
    let target = reference.and_then(|to| root.pointer(to.trim_start_matches('#')));
    (target.unwrap_or(schema), reference.and_then(|to| to.rsplit('/').next()))
}

/// Returns the non-null alternatives of a schema, with references followed.
fn alternatives<'a>(root: &'a Value, schema: &'a Value) -> Vec<(&'a Value, Option<&'a str>)> {
    let (schema, name) = resolve(root, schema);
    match schema.get("anyOf").or(schema.get("oneOf")).and_then(Value::as_array) {
        Some(_) if is_command(name) => vec![(schema, name)],
        Some(several) => several.iter().flat_map(|one| alternatives(root, one)).collect(),
        None if schema["type"] == "null" => Vec::new(),
        None => vec![(schema, name)],
    }
}

/// True if this is the name of the type of commands, which the page describes once.
fn is_command(name: Option<&str>) -> bool {
    name == Some(&*Command::schema_name())
}

/// A key of an object, as the page describes it.
struct Row<'a> {
    key: &'a str,
    types: String,
    what: String,
    /// Objects that the key holds, each with its path from the object with this key.
    below: Vec<(&'a Value, String)>,
}

impl Row<'_> {
    fn line(&self) -> String {
        format!("`{}` | {} | {}\n", self.key, self.types, self.what)
    }
}

fn table(rows: &[Row<'_>], page: &mut String) {
    page.push_str("key | type | what\n---|---|---\n");
    rows.iter().for_each(|row| page.push_str(&row.line()));
}

/// Returns the keys of an object.
fn rows<'a>(root: &'a Value, object: &'a Value) -> Vec<Row<'a>> {
    let required: Vec<&str> =
        object["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let row = |(key, property): (&'a String, &'a Value)| {
        let (mut types, below) = type_text(root, property);
        let mut what = text_of(root, property);
        match default_of(property) {
            _ if required.contains(&key.as_str()) => types.push_str(", required"),
            Some(default) if what.contains(&format!("`{default}`:")) => {
                what =
                    what.replacen(&format!("`{default}`:"), &format!("`{default}` (default):"), 1);
            }
            Some(default) => _ = write!(what, " Default: `{default}`."),
            None => {}
        }
        let below = below.into_iter().map(|(object, suffix)| (object, format!("{key}{suffix}")));
        Row { key, types, what: what.trim().into(), below: below.collect() }
    };
    object["properties"].as_object().into_iter().flatten().map(row).collect()
}

/// Returns a default as in YAML. `None` for null, false, and mappings of several keys, whose own
/// tables have their defaults.
fn default_of(property: &Value) -> Option<String> {
    match property.get("default")? {
        Value::Null | Value::Bool(false) => None,
        Value::Object(keys) => match keys.iter().collect::<Vec<_>>()[..] {
            [(key, value)] => Some(format!("{{{key}: {value}}}")),
            _ => None,
        },
        default => match default.as_u64().filter(|_| property["format"] == "bytes") {
            Some(bytes) if bytes % (1 << 20) == 0 => Some(format!("{}Mi", bytes >> 20)),
            _ => Some(default.to_string().trim_matches('"').into()),
        },
    }
}

/// Returns the shortest path of each object type below `spec`.
fn homes<'a>(root: &'a Value, spec: &'a Value) -> BTreeMap<*const Value, String> {
    let mut homes = BTreeMap::new();
    let mut next = VecDeque::from([(spec, "spec".to_owned())]);
    while let Some((object, path)) = next.pop_front() {
        if homes.contains_key(&std::ptr::from_ref(object)) {
            continue;
        }
        let below = rows(root, object).into_iter().flat_map(|row| row.below);
        next.extend(below.map(|(object, suffix)| (object, format!("{path}.{suffix}"))));
        homes.insert(std::ptr::from_ref(object), path);
    }
    homes
}

/// Writes the tables of one kind of object, each type and each row once.
struct Sections<'a> {
    root: &'a Value,
    /// Keys that links, their ends, and steps of their schedules have in common.
    egress: Vec<Row<'a>>,
    /// Path at which each type is described.
    homes: BTreeMap<*const Value, String>,
    /// Types with a table.
    done: BTreeSet<*const Value>,
    /// Path and text of each row.
    printed: BTreeSet<(String, String)>,
}

impl<'a> Sections<'a> {
    /// Writes an object's table, then those of the objects below it.
    fn write(&mut self, object: &'a Value, path: &str, page: &mut String) {
        let mut rows = rows(self.root, object);
        let has_egress = object["properties"].get("jitter").is_some();
        rows.retain(|row| !has_egress || self.egress.iter().all(|other| other.key != row.key));
        let mut below = self.below(&mut rows, path);
        let new = |row: &Row<'_>| self.printed.insert((path.to_owned(), row.line()));
        let (rows, again): (Vec<_>, Vec<_>) = rows.into_iter().partition(new);
        page.push('\n');
        table(&rows, page);
        if !again.is_empty() {
            let again: Vec<String> = again.iter().map(|row| format!("`{}`", row.key)).collect();
            let _ = write!(page, "\nAlso, as above: {}.\n", again.join(", "));
        }
        if object["properties"].get("schedule").is_some() {
            let _ = write!(page, "\n### {path}, egress keys\n\n{EGRESS}\n\n");
            let mut egress = std::mem::take(&mut self.egress);
            below.extend(self.below(&mut egress, path));
            table(&egress, page);
            self.egress = egress;
        }
        if object["properties"].get("geneve").is_some() && !below.is_empty() {
            let _ = write!(page, "\n### {path}, keys of tunnels\n\n");
            self.tunnels(&std::mem::take(&mut below), page);
        }
        for (object, here) in below {
            let _ = write!(page, "\n### {here}");
            if let Some(kind) = kind_of(self.root, object) {
                let _ = write!(page, ", kind {kind}");
            }
            page.push('\n');
            if let Some(text) = rules(object) {
                let _ = write!(page, "\n{text}\n");
            }
            self.write(object, &here, page);
        }
    }

    /// Takes the objects below some rows. Returns those to describe next, with their paths. Rows
    /// with other objects get these objects' path.
    fn below(&mut self, rows: &mut [Row<'a>], path: &str) -> Vec<(&'a Value, String)> {
        let mut below = Vec::new();
        for row in rows {
            for (object, suffix) in std::mem::take(&mut row.below) {
                let here = format!("{path}.{suffix}");
                match self.homes.get(&std::ptr::from_ref(object)) {
                    Some(home) if *home != here => _ = write!(row.types, " as `{home}`"),
                    Some(_) if self.done.insert(object) => below.push((object, here)),
                    _ => {}
                }
            }
        }
        below
    }

    /// Writes one table for all kinds of tunnels.
    fn tunnels(&self, tunnels: &[(&'a Value, String)], page: &mut String) {
        let mut lines: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (object, path) in tunnels {
            let kind = path.rsplit('.').next().unwrap_or_default();
            for Row { key, types, what, .. } in rows(self.root, object) {
                lines.entry(format!("`{key}` | {types} | {what}")).or_default().push(kind);
            }
        }
        page.push_str("key | type | what | tunnels\n---|---|---|---\n");
        for (line, kinds) in lines {
            let _ = writeln!(page, "{line} | {}", kinds.join(", "));
        }
    }
}

/// Returns what a type's description says beyond its first paragraph, which only names the type.
fn rules(object: &Value) -> Option<String> {
    let (_, rules) = object.get("description")?.as_str()?.split_once("\n\n")?;
    Some(one_line(rules))
}

/// Returns an object's only possible kind, if there are alternatives with other kinds.
fn kind_of<'a>(root: &'a Value, object: &'a Value) -> Option<&'a str> {
    match alternatives(root, &object["properties"]["kind"])[..] {
        [(one, _)] => one.get("const")?.as_str(),
        _ => None,
    }
}

/// Returns what a key does, with the meaning of each of its words.
fn text_of(root: &Value, property: &Value) -> String {
    let text = property.get("description").and_then(Value::as_str);
    let mut text = one_line(text.unwrap_or(""));
    let alternatives = alternatives(root, property);
    let is_only = alternatives.len() == 1;
    for (one, _) in alternatives {
        match (one.get("const").and_then(Value::as_str), one.get("description")) {
            (Some(word), _) if is_only => _ = write!(text, " `{word}`."),
            (Some(word), Some(means)) => {
                let means = one_line(means.as_str().unwrap_or(""));
                let _ = match means.to_lowercase().trim_end_matches('.') == word {
                    true => write!(text, " `{word}`."),
                    false => write!(text, " `{word}`: {means}"),
                };
            }
            _ => {}
        }
    }
    text
}

/// Returns a description as one line, with links to pages instead of their paths.
fn one_line(text: &str) -> String {
    let mut line = String::new();
    for (index, part) in text.replace('\n', " ").replace('|', "\\|").split("docs/").enumerate() {
        match part.split_once(".md") {
            Some((page, rest)) if index > 0 => {
                let _ = write!(line, "[{page}]({page}.md){rest}");
            }
            _ => line.push_str(part),
        }
    }
    line
}

/// Returns a property's type in words, and the objects
/// that it refers to, each with its path suffix.
fn type_text<'a>(root: &'a Value, property: &'a Value) -> (String, Vec<(&'a Value, String)>) {
    let mut texts: Vec<String> = Vec::new();
    let mut objects = Vec::new();
    for (one, name) in alternatives(root, property) {
        let types = one.get("type");
        let first = match types {
            Some(Value::Array(several)) => several.first().and_then(Value::as_str),
            Some(one) => one.as_str(),
            None => None,
        };
        let text = match (first, one.get("format").and_then(Value::as_str)) {
            _ if one.get("const").is_some() => "word".into(),
            _ if is_command(name) => "command".into(),
            (Some("array"), _) if name.is_none() || one.get("items").is_some() => {
                let (inner, below) = type_text(root, &one["items"]);
                objects.extend(below.into_iter().map(|(o, suffix)| (o, format!("[]{suffix}"))));
                format!("list of {inner}{}", bounds(one, "minItems", "maxItems"))
            }
            (Some("object"), _) => {
                match one.get("additionalProperties").filter(|p| p.is_object()) {
                    Some(values) if one.get("properties").is_none() => {
                        let (inner, below) = type_text(root, values);
                        objects.extend(
                            below.into_iter().map(|(o, suffix)| (o, format!(".NAME{suffix}"))),
                        );
                        format!("map of {inner}")
                    }
                    _ => {
                        if one.get("properties").is_some() {
                            objects.push((one, String::new()));
                        }
                        "mapping".into()
                    }
                }
            }
            (Some("integer"), Some(format)) if format.starts_with("uint") => {
                format!("number{}", bounds(one, "minimum", "maximum"))
            }
            (_, Some(format)) => format.into(),
            (Some("string"), None) => {
                format!("text{}", bounds(one, "minLength", "maxLength"))
            }
            (Some("boolean"), None) => "boolean".into(),
            (first, None) => first.unwrap_or("any").into(),
        };
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    (texts.join(" or "), objects)
}

fn bounds(schema: &Value, min: &str, max: &str) -> String {
    match (schema.get(min), schema.get(max)) {
        (Some(min), Some(max)) => format!(" {min}–{max}"),
        (Some(min), None) if min.as_u64() == Some(0) => String::new(),
        (Some(min), None) => format!(" ≥{min}"),
        (None, Some(max)) => format!(" ≤{max}"),
        (None, None) => String::new(),
    }
}
