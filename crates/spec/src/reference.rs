//! docs/spec.md: every key of a spec, made from the schema.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use crate::schema;

/// What stands before the tables.
const INTRODUCTION: &str = "# Specs

A spec is a YAML file of one or more documents. Each document is an object with `apiVersion`,
`kind`, `metadata` and `spec`; the daemon adds `status` when it is read back. There is one
`Substrate` a node and any number of `VirtualNetwork`s and of `Tenant`s
([tenants.md](tenants.md)). `pdp apply -f FILE` applies it; `pdp validate -f FILE` checks files and
changes nothing. Editors check and complete with
[schema/pdp-v1.json](../schema/pdp-v1.json):

```yaml
# yaml-language-server: $schema=../schema/pdp-v1.json
```

`pdp validate` needs no daemon and finds all that is wrong within the files. Where no Substrate is among
them, it assumes the default Substrate of this machine, and that any external interface or tenant the files
mention exists. `pdp apply --dry-run` checks against a node as it is, and that images are there.

Where no Substrate was applied, a default one holds: the mux with one worker and a power of 1 on the
first CPU, one engine `fe1` with all of the others and a capacity of 1 for each, and no external
interface; on a machine with one CPU both are on it, each with 0.5. `pdp inspect substrate` shows it with who is
on it, `--format yaml` as it would be written. A Substrate that is applied replaces it as a whole, but one that names
neither `mux` nor `forwardingEngines` has those of the default one. `pdp delete substrate` brings it back. On a machine with two CPUs it is:

```yaml
apiVersion: pdp/v1
kind: Substrate
metadata: {name: default}
spec:
  mux: {cpus: \"0\", power: 1}
  forwardingEngines:
    fe1: {cpus: \"1\", capacity: 1}
```

`capacity` is what can be guaranteed of an engine, as `power` of routers that name some
(`spec.nodes.NAME.dataPlane`). Routers that name none borrow what is not used, and are counted nowhere. Of the mux's
`power` half can be guaranteed, as `power` of fast paths ([fastpath.md](fastpath.md#power)).

A key that is not here is an error. A field is required unless its default column has a value or
\"not given\". YAML anchors, aliases and merge keys work; a file with aliases replaced by what they stand for has at
most 16 MiB and 250,000 values. Tables here are made from the types (`cargo run -p pdp-spec --example publish`).

A link between nodes has a rate of 1 Gbps unless its `rate` says otherwise. Links are described in
[links.md](links.md).

How values are written:

| type | written |
|---|---|
| cores | `0.5`, or thousandths `500m`; at most three decimals |
| bytes | `268435456`, `256Mi` (`Ki Mi Gi Ti`: 1024), `1G` (`K M G T`: 1000) |
| bit-rate | `100000000`, `100Mbps`, `1G`; without a unit: bits a second |
| span | `20ms`, `1.5s`, `250us`, `2m`; without a unit: milliseconds (`20`) |
| percent | `0.1%`, or without the sign `0.1`; at most seven decimals |
| queue | frames `1000`, or the time that they take at the rate `50ms` |
| length | frames `64`, or bytes with their unit `256KiB`, `1MB` |
| published-port | `\"8080:80\"`, `\"127.0.0.1:5353:53/udp\"`: the machine's address (not given: 127.0.0.1) and port, and the node's |
| mac | `02:00:00:00:00:01`; unicast |
| address | `10.0.0.1/24`, `fd00::1/64` |
| ip | `192.0.2.1`, `2001:db8::1` |
| user | `frr`, `frr:frr`, `1000`, `1000:1000`; names of letters, digits and `._-`, numbers to 65535 |
| destination | `10.0.0.0/8`, `fd00::/8`, an address, or `default` |
| cpus | `\"0-3,6\"` |
| keys | `7`, or ranges `\"100-199,300\"`; at most 64 ranges |
| hex | `\"0806\"`, two digits a byte, at most 64 bytes |
| base64 | RFC 4648 section 4, in one line |
| endpoint | `NODE:INTERFACE`, or `external:NAME` |
| command | a list of words, or a text split as a shell does, without expansions; in a node's `commands` and `exec` also a mapping that says more ([ready.md](ready.md)) |

Names of objects are DNS labels: lower-case letters, digits and `-`, with a letter or digit first and last, at most 63.
Those of nodes, links and externals may have capital letters (`PE1`); no two nodes of one network differ in case only.

Hosts and control guests find all nodes of their network in `/etc/hosts`: by its name a node's first IPv4 and first IPv6
address, of `loopback` where it has one there, by `INTERFACE.NODE` every address. It is read-only, and follows what is
applied while they run. A file that `files` has at `/etc/hosts` is there instead.

## Addresses

Each interface has an address once. Several interfaces of one node may have the same address, as Linux allows it:

- **Link-local**: `fe80::1/64` on each interface. Hosts have it as gateway: `gateways: [\"fe80::1\"]`.
- **Unnumbered**: the /32 or /128 of `loopback` on each interface, with OSPF, or with static routes that say
  `dev: eth0, onlink: true`.
- **VRFs** that the node's own commands make. Until they do, the kernel has two routes to one subnet and takes the
  first.

The two ends of a link have different MAC and IP addresses. Interfaces with `anycast: true` may share them, as the
anycast gateways of several leaves do on one segment. A segment learns a MAC address at the end that it was heard at
last, so frames for a shared MAC address reach one of its ends and move between them, at most 16 times a second. Each
of these ends must be able to forward them. A gateway's ARP answers come from all of them.

An interface with IPv6 needs an `mtu` of at least 1280. A machine that is booted with `ipv6.disable=1` runs IPv4
networks, and refuses IPv6 addresses when they are applied.

## Many alike

What many nodes or links have in common is written once. `pdp inspect` shows what came of it, with every node and link
for itself, and can be applied again.

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

- **Nearest wins**: what is written at a node, then its group's, its kind's, and the defaults'; of a link its own, its
  group's, and the defaults'. Mappings are merged key by key, at every depth. Lists are replaced as a whole, and so are
  `image`, `program` and each file of `files`. A key that is null (`env: null`) takes away what comes from further
  off. The kind may come from the group or the defaults, and a node may be empty (`h1:`).
- **Ranges**: `leaf[1-4]` stands for leaf1 to leaf4, `leaf[01-40]` for leaf01 to leaf40. Names of nodes and externals have up
  to two, of interfaces one. A link is written out for each name of the endpoint with ranges, of which it has up to
  two, each combination once; the other ends follow by placeholders. Where several endpoints have a range, one each and
  equally many, their numbers go up together: `[\"h[1-9]:eth0\", \"r1:eth[11-19]\"]`. In a link with `segment` they are
  ends of one segment: `endpoints: [\"r1:eth0\", \"h[1-20]:eth0\"], segment: {}`. Within `{ }` YAML wants
  names with brackets in quotes.
- **Placeholders**: `{n}` is the number of the first range of the node, external or link, `{m}` of the second, `{i}` of
  the interface's, `{name}` the node's or external's name; with numbers and `+ - * / %` between (`{n*4+i-1}`), and no
  spaces. They are filled in, in keys and values, below names with ranges, in links with ranges, and in defaults, kinds
  and groups; nowhere else. Other braces stay (`function f() { … }`), and so does what follows a `$`. `{{n}}` is `{n}` itself. A file may be one a node:
  `from: \"conf/{name}.conf\"`; what is in such a file is taken as it is.

Nodes, links and interfaces after that have the bounds below; all of it together has no more bytes than a spec file. What is
wrong in it is told once, at the place where it is written.

## Bounds

Limits of counts: 1,024 virtual networks; 256 tenants with 64 users and 64 image directories each; 256 nodes, 4,096 links and 4,096 externals of one; 256
interfaces of a node with 32 addresses each, 32 loopback addresses, 256 routes of 32 next hops and 256 sysctls; 256 files of at most 4 MiB, 32 files of a
program of at most 256 KiB in all, 64 commands and 64 entries of `exec` of 256 words,
256 environment variables of a node; 16,384 interfaces of all nodes together; 64 punt filters of 16
matches; 16 fields of a flow; 256 bytes of all fields of a flow or of one filter; 64 external
interfaces and 256 forwarding engines of a substrate; 64 forwarding guests of a router;
16 MiB of a spec file. Files are UTF-8 text. Generators' frames have 14 to 1,714 bytes and come in
pcap files of at most 10 MiB; all of a substrate, in base64, have at most 16 MiB.
";

/// The whole page.
pub fn markdown() -> String {
    let mut page = INTRODUCTION.to_owned();
    for kind in ["Substrate", "VirtualNetwork", "Tenant"] {
        let Some(schema) = schema::of_kind(kind).map(schema::as_written) else { continue };
        let _ = write!(page, "\n## {kind}\n");
        let mut done = BTreeSet::new();
        section(&schema, &schema, "", &mut done, &mut page);
    }
    page
}

/// The schema that a reference leads to.
fn resolve<'a>(root: &'a Value, schema: &'a Value) -> (&'a Value, Option<&'a str>) {
    let reference = schema.get("$ref").and_then(Value::as_str);
    let target = reference.and_then(|to| root.pointer(to.trim_start_matches('#')));
    (target.unwrap_or(schema), reference.and_then(|to| to.rsplit('/').next()))
}

/// The alternatives of a schema that are not null, references followed.
fn alternatives<'a>(root: &'a Value, schema: &'a Value) -> Vec<(&'a Value, Option<&'a str>)> {
    let (schema, name) = resolve(root, schema);
    match schema.get("anyOf").or(schema.get("oneOf")).and_then(Value::as_array) {
        Some(several) => several.iter().flat_map(|one| alternatives(root, one)).collect(),
        None if schema["type"] == "null" => Vec::new(),
        None => vec![(schema, name)],
    }
}

/// A table of an object's keys, then one for each object below it.
fn section(
    root: &Value,
    schema: &Value,
    path: &str,
    done: &mut BTreeSet<String>,
    page: &mut String,
) {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return };
    page.push_str("\n| key | type | default | what |\n|---|---|---|---|\n");
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut below = Vec::new();
    for (key, property) in properties {
        if path.is_empty() && key == "kind" {
            let _ = writeln!(page, "| `kind` | text | required | Kind of the object. |");
            continue;
        }
        let default = match property.get("default") {
            _ if required.contains(&key.as_str()) => "required".into(),
            Some(Value::Null) | None => "not given".into(),
            Some(Value::Object(_)) => "its keys' defaults".into(),
            Some(default) => format!("`{}`", default.to_string().trim_matches('"')),
        };
        let what = text_of(root, property);
        let (kind, objects) = type_text(root, property);
        let _ = writeln!(page, "| `{key}` | {kind} | {default} | {what} |");
        let here = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        below.extend(
            objects.into_iter().map(|(object, suffix)| (object, format!("{here}{suffix}"))),
        );
    }
    for (object, here) in below {
        let title = object.get("title").and_then(Value::as_str).unwrap_or("");
        let id = format!("{}{}", object["properties"], title);
        if !done.insert(id) {
            continue;
        }
        let level = "#".repeat(3);
        let _ = write!(page, "\n{level} {here}");
        if let Some(kind) = kind_of(root, object) {
            let _ = write!(page, ", kind {kind}");
        }
        page.push('\n');
        if let Some(text) = object.get("description").and_then(Value::as_str) {
            let _ = write!(page, "\n{}\n", one_line(text));
        }
        section(root, object, &here, done, page);
    }
}

/// The only kind that an object can have, where others can be in its place.
fn kind_of<'a>(root: &'a Value, object: &'a Value) -> Option<&'a str> {
    match alternatives(root, &object["properties"]["kind"])[..] {
        [(one, _)] => one.get("const")?.as_str(),
        _ => None,
    }
}

fn text_of(root: &Value, property: &Value) -> String {
    let text = property.get("description").and_then(Value::as_str);
    let mut text = one_line(text.unwrap_or(""));
    for (one, _) in alternatives(root, property) {
        if let (Some(word), Some(means)) = (one.get("const"), one.get("description")) {
            let means = one_line(means.as_str().unwrap_or(""));
            let _ = write!(text, " `{}`: {means}", word.as_str().unwrap_or(""));
        }
    }
    text
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

/// A property's type for people, and the objects that it leads to with what their path adds.
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
                        format!("mapping of names to {inner}")
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
            (Some("boolean"), None) => "true or false".into(),
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
        (Some(min), Some(max)) if min == max => format!(", {min}"),
        (Some(min), Some(max)) => format!(", {min}–{max}"),
        (Some(min), None) => format!(", from {min}"),
        (None, Some(max)) => format!(", to {max}"),
        (None, None) => String::new(),
    }
}
