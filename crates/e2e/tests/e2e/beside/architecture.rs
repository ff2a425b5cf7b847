//! Architecture: the modules of each crate use each other in one direction only.
//!
//! A module uses another one if it names the other's items by a path (an import, an expression, a
//! macro's argument, an attribute), calls its functions as `Type::function`, or calls its methods.
//! A call `x.method()` counts if the type of `x` is easy to tell: `self`, a field of it, a
//! parameter. Otherwise it counts if one module alone defines a method of this name, and neither
//! the standard library nor another crate of PdP that this crate uses has one. Code in
//! `#[cfg(test)]` does not count. A name that a module re-exports belongs to the module that
//! declares it.
//!
//! A folder is one unit for the modules beside it: if `a/x.rs` uses `b/y.rs` and `b/z.rs` uses
//! `a/w.rs`, `a` and `b` are a cycle. A module and the modules inside it may use each other,
//! because the inner ones are its parts. A crate's root is a module like others, but what it
//! publishes by `pub use` is no use.

mod graph;
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use graph::{Edges, ROOT, between_siblings, cycles};
use sources::{Crate, Module};

/// Known cycles: crate, modules, reason. A cycle that is gone or has shrunk must leave this list.
const KNOWN: &[(&str, &[&str], &str)] = &[
    (
        "mux",
        &["control::apply", "control::schedule"],
        "a schedule's steps are changes, which a change of a schedule starts",
    ),
    (
        "mux",
        &["deliver", "dispatch", "egress", "forward", "ingress", "relay", "vnet"],
        "each step passes frames on to the next",
    ),
    ("mux", &["demux", "worker"], "the worker's first step is a part of the worker"),
    (
        "container",
        &["image", "volumes", "work"],
        "a workplace of tests does the work of images and volumes in its own process",
    ),
];

/// Layers of crates, from the top down: each row has a crate's modules (folders or files) that may
/// use only those of later rows. Modules of one row must not use each other.
const LAYERS: &[(&str, &[&[&str]])] = &[
    (
        "cli",
        &[
            &["args", "tip"],
            &["commands"],
            &["daemon"],
            &["input"],
            &["interrupt", "output"],
            &["failure"],
        ],
    ),
    (
        "pdpd",
        &[
            &["api"],
            &["status"],
            &["engine"],
            &["reconcile"],
            &["machine"],
            &["images"],
            &["events"],
            &["kernel"],
            &["host"],
            &["access"],
            &["intent"],
            &["plan"],
            &["util"],
        ],
    ),
];

/// A library or a program: the crate's name, the uses between its modules, its top-level modules.
type Root = (String, Edges, BTreeSet<String>);

/// All crates.
static WORKSPACE: LazyLock<Vec<Root>> = LazyLock::new(workspace);

fn workspace() -> Vec<Root> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates");
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(crates).expect("crates").flatten() {
        let manifest = fs::read_to_string(entry.path().join("Cargo.toml")).expect("a manifest");
        let roots = ["lib.rs", "main.rs"].map(|name| entry.path().join("src").join(name));
        let roots = roots.iter().filter(|root| root.exists());
        let roots: Vec<_> = roots.map(|root| Crate::new(Module::read(root))).collect();
        assert!(!roots.is_empty(), "{entry:?}");
        all.insert(entry.file_name().to_string_lossy().into_owned(), (manifest, roots));
    }
    let mut found = Vec::new();
    for (name, (manifest, roots)) in &all {
        let is_used = |other: &str| {
            ["pdp-", ""].iter().any(|before| manifest.contains(&format!("\n{before}{other}")))
        };
        let others = all.iter().filter(|(other, _)| *other != name && is_used(other));
        let foreign = others.flat_map(|(_, (_, roots))| roots.iter().flat_map(Crate::methods));
        let foreign: BTreeSet<&str> = foreign.collect();
        for root in roots {
            let top = root.top().into_iter().map(str::to_owned).collect();
            found.push((name.clone(), between_siblings(&root.edges(&foreign)), top));
        }
    }
    found
}

#[test]
fn modules_use_each_other_in_one_direction() {
    let mut wrong = String::new();
    let mut known: BTreeSet<_> = KNOWN.iter().map(|(name, cycle, _)| (*name, set(cycle))).collect();
    for (name, edges, _) in WORKSPACE.iter() {
        for cycle in cycles(edges) {
            if !known.remove(&(name.as_str(), cycle.clone())) {
                wrong += &format!("new cycle in {name}: {cycle:?}\n{}", describe(&cycle, edges));
            }
        }
    }
    for (name, cycle) in known {
        wrong += &format!("no such cycle any more: {name} {cycle:?}\n");
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn layers_use_only_lower_layers() {
    for (name, layers) in LAYERS {
        let (_, edges, top) = WORKSPACE
            .iter()
            .find(|(other, _, top)| other == name && layers.iter().any(|row| top.contains(row[0])))
            .expect("a crate with these layers");
        let wrong = breaches(layers, edges, top);
        assert!(wrong.is_empty(), "{name}:\n{wrong}");
    }
}

/// Lists the modules of a cycle with the code that leads from one to the next.
fn describe(cycle: &BTreeSet<String>, edges: &Edges) -> String {
    let inside = edges.iter().filter(|((from, to), _)| cycle.contains(from) && cycle.contains(to));
    inside.map(|((from, to), causes)| line(from, to, causes)).collect()
}

fn line(from: &str, to: &str, causes: &BTreeSet<String>) -> String {
    let causes: Vec<_> = causes.iter().take(6).map(String::as_str).collect();
    format!("  {from} uses {to}: {}\n", causes.join(", "))
}

/// Lists the uses that do not point downward, and the differences between table and crate.
fn breaches(layers: &[&[&str]], edges: &Edges, top: &BTreeSet<String>) -> String {
    let mut wrong = String::new();
    let table: BTreeSet<String> = layers.iter().copied().flatten().map(|&it| it.into()).collect();
    for module in table.symmetric_difference(top) {
        wrong += &format!("  {module}: either in the table or in the crate only\n");
    }
    let layer = |module: &str| match module {
        ROOT => Some(0),
        _ => layers.iter().position(|row| row.contains(&module)).map(|layer| layer + 1),
    };
    for ((from, to), causes) in edges {
        if let (Some(above), Some(below)) = (layer(from), layer(to))
            && above >= below
        {
            wrong += &line(from, to, causes);
        }
    }
    wrong
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Returns the uses between made-up modules.
fn made_up(modules: &[(&str, &str)]) -> Edges {
    let modules = modules.iter().flat_map(|(name, text)| Module::parse(name, text)).collect();
    between_siblings(&Crate::new(modules).edges(&BTreeSet::from(["foreign"])))
}

/// Type and function that a module uses without an import.
const DOOR: &str = "pub struct Door { pub lamp: Lamp } impl Door { pub fn unlatch(&self) {} }";

#[test]
fn analysis_finds_cycles() {
    for (name, a, b) in [
        ("an import", "use crate::b::Key; pub fn f() {}", "use super::a::f; pub struct Key;"),
        ("a group", "use crate::{b::{self, Key}}; pub fn f() {}", "pub struct Key(crate::a::T);"),
        ("an expression", "pub fn f() { crate::b::g() }", "pub fn g() { super::a::f() }"),
        ("a macro", "pub fn f() { println!(\"{}\", crate::b::g()) }", "use crate::a; fn g() {}"),
        ("tokens", "pub fn f() { m! { x => crate::b::g() } }", "use crate::a; fn g() {}"),
        ("an attribute", "#[x(with = \"crate::b::g\")] pub struct S;", "use crate::a; fn g() {}"),
        ("a glob", "use crate::b::*; fn f() { g() }", "use crate::a; pub fn g() {}"),
        ("an exported name", "use crate::Key; pub fn f() {}", "use crate::a; pub struct Key;"),
        ("a name exported by a glob", "use crate::Door;", &format!("use crate::a; {DOOR}")),
        ("a method", "pub fn f() { door().unlatch() }", &format!("use crate::a; {DOOR}")),
        ("a method in a macro", "fn f() { m!(d().unlatch()) }", &format!("use crate::a; {DOOR}")),
        ("a method in tokens", "fn f() { m!(d.unlatch() => 1) }", &format!("use crate::a; {DOOR}")),
        (
            "a trait's method",
            "pub fn f() { it().unlatch() }",
            "use crate::a; pub trait Lock { fn unlatch(&self); }",
        ),
        (
            "a path to a function of a type",
            "pub fn f() { crate::Door::unlatch(&d) }",
            &format!("use crate::a; {DOOR}"),
        ),
        (
            "the part of a type in another module",
            "pub struct Lamp; impl Lamp { fn f(&self) { self.get(); } }",
            "use crate::a::Lamp; impl Lamp { pub fn get(&self) {} }",
        ),
        (
            "the same through Self",
            "pub struct Lamp; impl Lamp { fn f() { Self::new(); } }",
            "use crate::a::Lamp; impl Lamp { pub fn new() {} }",
        ),
        (
            "a common name on a field of a known type",
            "pub struct Lamp; pub struct S { lamp: Lamp } impl S { fn f(&self) { self.lamp.get(); } }",
            "use crate::a::Lamp; impl Lamp { pub fn get(&self) {} }",
        ),
        (
            "a common name on a parameter of a known type",
            "pub struct Lamp; fn f(lamp: &mut Lamp) { lamp.get(); }",
            "use crate::a::Lamp; impl Lamp { pub fn get(&self) {} }",
        ),
    ] {
        let root = "mod a; mod b; pub use b::Key; pub use b::*;";
        let edges = made_up(&[("", root), ("a", a), ("b", b)]);
        assert_eq!(cycles(&edges), BTreeSet::from([set(&["a", "b"])]), "{name}: {edges:?}");
    }
}

#[test]
fn analysis_finds_cycles_of_folders_and_of_the_root() {
    let edges = made_up(&[
        ("", "mod a; mod b;"),
        ("a", "mod x; mod z;"),
        ("a::x", "use crate::b::y::Y;"),
        ("a::z", ""),
        ("b", "mod y; mod w;"),
        ("b::y", "pub struct Y;"),
        ("b::w", "use crate::a::z;"),
    ]);
    assert_eq!(cycles(&edges), BTreeSet::from([set(&["a", "b"])]));
    let edges = made_up(&[("", "mod a; fn f() { a::g() }"), ("a", "use crate::f; fn g() {}")]);
    assert_eq!(cycles(&edges), BTreeSet::from([set(&[ROOT, "a"])]));
    let edges = made_up(&[(
        "",
        "mod a { use super::b::B; pub struct A; } mod b { use super::a::A; pub struct B; }",
    )]);
    assert_eq!(cycles(&edges), BTreeSet::from([set(&["a", "b"])]));
}

#[test]
fn analysis_finds_no_cycle_in_layers() {
    let modules = [
        ("", "mod top; mod middle; mod low; pub use low::Low; fn main() { top::run() }"),
        (
            "top",
            "use crate::middle::Middle; use crate::Low; pub fn run(m: Middle, low: Low, x: Other) {
                m.turn(&low); x.foreign(); x.name(); x.both(); println!(\"{}\", low.turns()); }",
        ),
        // The module and its part may use each other.
        ("middle", "mod part; use crate::low::Low; pub struct Middle(part::Part);"),
        (
            "middle::part",
            "use super::Middle; pub struct Part; impl Middle { pub fn turn(&self, it: &crate::Low)
                { it.turns(); } pub fn both(&self) {} pub fn foreign(&self) {}
                pub fn len(&self) {} }",
        ),
        (
            "low",
            "//! See [`crate::top`].
             pub struct Low; impl Low { pub fn turns(&self) {} fn both(&self) { x.foreign() }
                 pub fn name(&self) { x.len() } }
             #[cfg(test)] mod tests { use crate::top::run; #[test] fn f() { run() } }
             #[cfg(test)] impl Low { fn f() { crate::top::run() } }",
        ),
    ];
    let edges = made_up(&modules);
    assert_eq!(cycles(&edges), BTreeSet::new(), "{edges:#?}");
    let uses: Vec<_> = edges.keys().map(|(from, to)| format!("{from} {to}")).collect();
    assert_eq!(uses, [&format!("{ROOT} top"), "middle low", "top low", "top middle"]);
    let top = set(&["top", "middle", "low"]);
    assert_eq!(breaches(&[&["top"], &["middle"], &["low"]], &edges, &top), "");
    let wrong = breaches(&[&["top"], &["low"], &["middle"]], &edges, &top);
    assert!(wrong.starts_with("  middle uses low: ") && wrong.lines().count() == 1, "{wrong}");
    assert!(breaches(&[&["top"], &["middle", "low"]], &edges, &top).contains("middle uses low"));
    let wrong = breaches(&[&["top"], &["low"], &["old"]], &edges, &top);
    assert_eq!(wrong.matches("only").count(), 2, "{wrong}");
}
