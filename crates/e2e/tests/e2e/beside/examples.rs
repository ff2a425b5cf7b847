//! docs/guests.md: the test follows its instructions, and it shows exactly the tested code. For the
//! labs of examples/, see alone/examples.rs.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;

use pdp_e2e::{Background, TestNode, bin, eventually};

use crate::alone::examples::LABS;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/e2e").to_path_buf()
}

pub(crate) fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A shell in the repository whose `pdp` speaks to a node under test.
pub(crate) struct Shell<'a> {
    node: &'a TestNode,
    /// Paths written for users, with their replacements here.
    pub(crate) instead: Vec<(&'static str, PathBuf)>,
}

impl<'a> Shell<'a> {
    pub(crate) fn new(node: &'a TestNode) -> Self {
        let path = node.directory.join("bin");
        fs::create_dir_all(&path).expect("a directory");
        symlink(bin("pdp"), path.join("pdp")).expect("a link");
        Self { node, instead: Vec::new() }
    }

    fn command(&self, lines: &str) -> Command {
        let mut lines = lines.to_owned();
        for (written, here) in &self.instead {
            lines = lines.replace(written, here.to_str().expect("a path"));
        }
        let path = std::env::var("PATH").expect("PATH");
        let mut command = Command::new("sh");
        command
            .args(["-ec", &lines])
            .current_dir(repository())
            .env("PATH", format!("{}:{path}", self.node.directory.join("bin").display()))
            .env("PDP_SOCKET", self.node.socket());
        command
    }

    pub(crate) fn try_run(&self, lines: &str) -> Output {
        pdp_e2e::run(&mut self.command(lines), "")
    }

    #[track_caller]
    pub(crate) fn run(&self, lines: &str) -> String {
        let output = self.try_run(lines);
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{lines}\n{words}{errors}");
        words
    }
}

/// The commands of an example's comment, after `Try:`.
pub(crate) fn commands(example: &str) -> Vec<String> {
    let text = read(example);
    let (_, tries) = text.split_once("# Try: ").expect("what to try");
    let lines = tries.lines().take_while(|line| !line.starts_with("apiVersion"));
    lines.map(|line| line.trim_start_matches(['#', ' ']).to_owned()).collect()
}

/// Preparatory commands of an example's comment, after `First:`.
pub(crate) fn first(example: &str) -> Option<String> {
    let text = read(example);
    let (_, first) = text.split_once("# First: ")?;
    let (first, _) = first.split_once("# Try: ").expect("what to try");
    Some(first.replace("\n#", "\n"))
}

/// Other examples, which are tested by lab.rs, alone/fabric.rs,
/// alone/figure1.rs, and below as the tutorial.
const ELSEWHERE: [&str; 5] = ["cable.yaml", "fabric.yaml", "figure1", "label.yaml", "links.yaml"];

#[test]
fn every_example_is_run() {
    let entries = fs::read_dir(repository().join("examples")).expect("examples/").flatten();
    let found: BTreeSet<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let run = LABS.iter().map(|(file, _)| *file).chain(ELSEWHERE).map(str::to_owned);
    assert_eq!(found, run.collect(), "each is in LABS, or run elsewhere");
    for (file, _) in LABS {
        assert!(!read(&format!("examples/{file}")).contains("kind: Substrate"), "{file}");
    }
}

/// Fenced blocks of a text, each with its language.
pub(super) fn fenced(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut block: Option<(String, String)> = None;
    for line in text.lines() {
        match (line.strip_prefix("```"), &mut block) {
            (Some(begun), None) => block = Some((begun.to_owned(), String::new())),
            (Some(_), Some(_)) => found.extend(block.take()),
            (None, Some((_, content))) => *content += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    found
}

/// Fenced blocks of a language in a text.
pub(super) fn blocks(text: &str, language: &str) -> Vec<String> {
    fenced(text).into_iter().filter(|(of, _)| of == language).map(|(_, content)| content).collect()
}

/// The tutorial part of docs/guests.md.
fn tutorial() -> String {
    let docs = read("docs/guests.md");
    let (_, rest) = docs.split_once("\n## (a) ").expect("the tutorial");
    rest.split("\n### ").next().expect("its end").to_owned()
}

#[test]
fn the_tutorial_can_be_followed() {
    let node = TestNode::start("label");
    let mut shell = Shell::new(&node);
    let spec = node.directory.join("label.yaml");
    let root = node.directory.join("root");
    let built = bin("pdp-label").parent().expect("a directory").to_path_buf();
    let text = read("examples/label.yaml");
    assert!(text.contains("rootfs: /srv/pdp-label"));
    fs::write(&spec, text.replace("/srv/pdp-label", root.to_str().expect("a path")))
        .expect("a spec");
    shell.instead = vec![
        ("/srv/pdp-label", root.clone()),
        ("target/release", built),
        ("examples/label.yaml", spec),
    ];
    let tutorial = tutorial();
    let steps = blocks(&tutorial, "sh");
    let [build, make_root, up, wait, send] = steps.as_slice() else { panic!("{steps:?}") };
    // Built before the tests, and also installed by `make install`.
    assert_eq!(build.trim(), "cargo build --release -p pdp-guest --bin pdp-label");
    shell.run(make_root);
    shell.run(up);
    let heard = ["label/h2", "label/h3"].map(|station| {
        // The same on h3, for flooded frames.
        Background::start(&mut shell.command(&wait.replace("label/h2", station)))
    });
    let heard = heard.map(|station| thread::spawn(move || station.finish()));
    eventually("both stations have heard", || {
        shell.run(send);
        heard.iter().all(thread::JoinHandle::is_finished)
    });
    let outputs = blocks(&tutorial, "");
    let output = outputs.last().expect("what is printed");
    for station in heard {
        assert_eq!(station.join().expect("a station"), *output);
    }
    let stats = node.json(&["stats", "label"]);
    let ports = stats["vnets"]["label"]["nodes"]["r1"]["ports"].as_object().expect("ports");
    let made: u64 = ports.values().map(|port| port["made"].as_u64().expect("a counter")).sum();
    assert!(made >= 1, "a flooded frame was copied: {stats}");
    assert!(node.try_pdp(&["exec", "label/r1", "--guest", "0", "--", "sh"]).is_err(), "no shell");
}

/// Lines without their indentation.
fn dedented(text: &str) -> String {
    text.lines().map(|line| line.trim().to_owned() + "\n").collect()
}

#[test]
fn documented_code_matches_the_tested_code() {
    let docs = read("docs/guests.md");
    let mut sources = vec![dedented(&read("crates/guest/src/bin/pdp-label.rs"))];
    for entry in fs::read_dir(repository().join("examples")).expect("examples/").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".yaml") {
            sources.push(dedented(&read(&format!("examples/{name}"))));
        }
    }
    let shown = blocks(&docs, "rust").into_iter().chain(blocks(&docs, "yaml"));
    // A block with `...` is a sketch.
    for block in shown.filter(|block| !block.contains("...")) {
        let source_text = dedented(&block);
        let source_text = source_text.trim_end();
        assert!(sources.iter().any(|source| source.contains(source_text)), "nowhere: {block}");
    }
}
