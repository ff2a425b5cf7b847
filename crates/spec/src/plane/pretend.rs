//! A pretend data plane, which takes something of everything. This file and its lines in the
//! module above (`mod`, `use`, and `kinds!`) are all that it needs, so another kind needs no more.

use std::fs;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    DataPlane, DataPlaneKind, DataPlaneNeeds, EngineDemand, KernelHooks, Plane, PuntFilter,
    PuntLimits, Punts,
};
use crate::check::{Existing, check};
use crate::node_check::NodeCheck;
use crate::parse::parse;
use crate::source::SourceFile;
use crate::units::Cores;

/// The kind of [`Pretend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PretendKind {
    /// Nothing forwards.
    Pretend,
}

/// Two shares of engines, a tenth of a core of the mux, and all punts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pretend {
    /// Kind.
    pub kind: PretendKind,
    /// Power of both shares.
    pub power: Option<Cores>,
    /// Use of spare power.
    pub borrow: Option<bool>,
    /// Frames to punt.
    #[serde(default)]
    pub punt: Vec<PuntFilter>,
    /// Rates of punts.
    #[serde(default)]
    pub punt_limits: PuntLimits,
    /// Number of cards.
    pub cards: u32,
}

impl Plane for Pretend {
    fn name(&self) -> &'static str {
        DataPlaneKind::Pretend.name()
    }

    fn forwarder(&self) -> &'static str {
        "nothing"
    }

    fn needs(&self) -> DataPlaneNeeds<'_> {
        DataPlaneNeeds {
            engines: Some(EngineDemand {
                power: self.power,
                borrows: self.borrow == Some(true),
                shares: Some(2),
                split: false,
            }),
            slowpath: Some((1000, 0)),
            mux_millicores: 100,
            punts: Some(Punts {
                filters: &self.punt,
                limits: &self.punt_limits,
                hooks: KernelHooks::Ignore,
            }),
            ..DataPlaneNeeds::default()
        }
    }

    fn power_mut(&mut self) -> Option<(&mut Option<Cores>, &mut Option<bool>)> {
        Some((&mut self.power, &mut self.borrow))
    }

    fn check(&self, check: &mut NodeCheck<'_>) {
        check.plane_power(self.power);
        check.too_many(&["dataPlane", "cards"], self.cards as usize, 1);
    }
}

const MACHINE: &str = "
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: \"0\"}
  forwardingEngines: {fe1: {cpus: \"1\", capacity: 1}, fe2: {cpus: \"2\", capacity: 1}}
---
apiVersion: pdp/v1
kind: Tenant
metadata: {name: acme}
spec: {quota: {power: 1}}
";

/// A tenant's router with these keys, in a network where others use forwarding guests.
fn router(keys: &str) -> String {
    format!(
        "{MACHINE}---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: acme.a}}
spec:
  defaults: {{dataPlane: {{guests: 3}}}}
  nodes: {{r1: {{kind: router, dataPlane: {{kind: pretend, {keys}}}}}}}
"
    )
}

/// Applies these files. Returns the faults, a line each, if there are any.
fn apply(text: String) -> Result<Existing, String> {
    let file = SourceFile { name: "f".into(), text, ..SourceFile::default() };
    let lines = |faults: Vec<crate::Diagnostic>| {
        faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let documents = parse(&[file]).map_err(lines)?;
    let machine = Existing { cpus: (0..3).collect(), ..Existing::default() };
    let intent = check(&documents, &machine).map_err(lines)?;
    Ok(Existing { vnets: intent.vnets, ..machine })
}

#[test]
fn a_pretend_kind_is_checked_allocated_and_counted() {
    let node = apply(router("cards: 1, power: 0.5")).unwrap();
    let vnet = &node.vnets["acme.a"];
    let node = &vnet.spec.nodes["r1"];
    let plane = node.plane().unwrap();
    assert!(matches!(plane, DataPlane::Pretend(_)), "{plane:?}");
    assert_eq!((plane.name(), plane.kind().name()), ("pretend", "pretend"));
    assert!(node.guests().is_none() && node.program().is_none());
    // Allocation: two shares, and a part of the mux.
    let shares: Vec<u32> = vnet.shares()["r1"].iter().map(|share| share.millicores).collect();
    assert_eq!(shares, [250, 250]);
    assert_eq!(vnet.usage().power_millicores, 600);
    // Defaults: a tenant's power is a guarantee.
    let node = apply(router("cards: 1")).unwrap();
    assert_eq!(node.vnets["acme.a"].usage().power_millicores, 200);
    // Checks: its own keys, those of its needs, and the keys of other kinds.
    for (keys, fault) in [
        ("cards: 2", "node acme.a/r1: 2 cards exceed 1 (remove some)"),
        ("cards: 1, power: 0", "node acme.a/r1: power 0 is below 0.001 (ask for more)"),
        ("cards: 1, power: 0.95", "power: 1.05 exceeds tenant acme's quota of 1"),
        ("cards: 1, puntLimits: {local: {}}", "neither rate nor pps is given"),
        ("cards: 1, split: true", "\"split\" is not a key of kind pretend"),
    ] {
        let faults = apply(router(keys)).err().unwrap_or_default();
        assert!(faults.contains(fault), "{keys}: {faults}");
    }
}

#[test]
fn a_kinds_words_agree() {
    for word in ["parallel", "fastpath", "kernel", "pretend, cards: 1"] {
        let plane = router("").replace("kind: pretend, ", &format!("kind: {word}"));
        let node = apply(plane).unwrap_or_else(|faults| panic!("{word}: {faults}"));
        let plane = node.vnets["acme.a"].spec.nodes["r1"].plane().unwrap().clone();
        let json = serde_json::to_value(&plane).unwrap();
        let kind = serde_json::to_value(plane.kind()).unwrap();
        let words = [json["kind"].as_str(), kind.as_str(), Some(plane.kind().name())];
        assert_eq!(words, [Some(plane.name()); 3]);
    }
}

/// Rust files below a directory.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(directory).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// Product code elsewhere names no kind, so it can't tell one from another.
#[test]
fn no_other_code_names_a_kind() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for entry in fs::read_dir(&crates).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut files);
    }
    files.retain(|file| !file.starts_with(crates.join("spec/src/plane")));
    assert!(files.len() > 300, "{}", files.len());
    let names_kind = |line: &str| {
        ["DataPlane::", "DataPlaneKind::"].iter().any(|list| {
            let mut uses = line.split(list).skip(1);
            uses.any(|rest| !rest.starts_with(|c: char| c.is_ascii_lowercase()))
        })
    };
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let lines = code.lines().enumerate().filter(|(_, line)| !line.trim().starts_with("//"));
        for (number, line) in lines.filter(|(_, line)| names_kind(line)) {
            found.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
        }
    }
    assert!(found.is_empty(), "ask `Plane` instead:\n{}", found.join("\n"));
}
