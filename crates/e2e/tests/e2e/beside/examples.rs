//! The files of examples/, and docs/guests.md: what they say is done as they say it, and what
//! is shown in the documentation is what was run. `figure1/` is run by alone/figure1.rs, `links.yaml` by lab.rs;
//! `fabric.yaml` wants more of a machine than tests have, and is checked as all are by pdp-spec's tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;

use pdp_e2e::{Background, Node, all_answered, bin, eventually};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/e2e").to_path_buf()
}

pub(super) fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A shell in the repository whose `pdp` speaks to a node under test.
pub(super) struct Shell<'a> {
    node: &'a Node,
    /// Paths as they are written for users, and what stands for them here.
    instead: Vec<(&'static str, PathBuf)>,
}

impl<'a> Shell<'a> {
    pub(super) fn new(node: &'a Node) -> Self {
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

    fn try_run(&self, lines: &str) -> Output {
        pdp_e2e::run(&mut self.command(lines), "")
    }

    #[track_caller]
    pub(super) fn run(&self, lines: &str) -> String {
        let output = self.try_run(lines);
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{lines}\n{words}{errors}");
        words
    }
}

/// The commands of an example's comment, after `Try:`.
pub(super) fn commands(example: &str) -> Vec<String> {
    let text = read(example);
    let (_, tries) = text.split_once("# Try: ").expect("what to try");
    let lines = tries.lines().take_while(|line| !line.starts_with("apiVersion"));
    lines.map(|line| line.trim_start_matches(['#', ' ']).to_owned()).collect()
}

/// Brings an example up and does what its comment says; what the commands after `up` printed.
fn follow(node: &Node, example: &str) -> Vec<String> {
    let shell = Shell::new(node);
    let commands = commands(example);
    let up = commands[0].strip_suffix(" --wait").unwrap_or(&commands[0]);
    assert_eq!(up, format!("pdp up -f {example}"));
    shell.run(&commands[0]);
    let mut said = Vec::new();
    for command in &commands[1..] {
        // What was waited for is there.
        if up == commands[0] {
            eventually(command, || shell.try_run(command).status.success());
        }
        said.push(shell.run(command));
    }
    said
}

/// Pings of several sizes; ping checks the payload of the answers.
fn hosts_talk(node: &Node, vnet: &str) {
    for bytes in [0, 56, 1472] {
        let line = format!("ping -c5 -i0.1 -w60 -p a55a -s {bytes} 10.0.0.2");
        let words = node.exec(&format!("{vnet}/h1"), &line);
        assert!(all_answered(&words, 5) && !words.contains("wrong"), "{words}");
    }
    let stats = node.json(&["stats", vnet]);
    let r1 = &stats["vnets"][vnet]["nodes"]["r1"];
    let count = |name: &str| r1["guests"]["0"][name].as_u64().expect("a counter");
    assert!(count("toGuest") >= 30 && count("fromGuest") >= 30, "{r1}");
}

#[test]
fn ospf() {
    let node = Node::start("ospf");
    let said = follow(&node, "examples/ospf.yaml");
    let [ping, neighbours, diff] = said.as_slice() else { panic!("{said:?}") };
    assert!(all_answered(ping, 3), "{ping}");
    assert!(neighbours.contains("Full/"), "{neighbours}");
    assert!(!diff.contains("10."), "{diff}");
    let route = node.pdp(&["routes", "ospf/r1", "--guest", "0", "--within", "10.2.0.0/24"]);
    assert!(route.contains("10.0.12.2") && route.contains("eth1"), "{route}");
}

#[test]
fn testpmd_of_debian_is_a_data_plane() {
    let node = Node::start("memif");
    follow(&node, "examples/testpmd.yaml");
    hosts_talk(&node, "testpmd");
    let line = "grep -c Cap.*0000000000000000 /proc/self/status";
    let found = node.pdp(&["exec", "testpmd/r1", "--guest", "0", "--", "sh", "-c", line]);
    assert_eq!(found.trim(), "5", "CapInh, CapPrm, CapEff, CapBnd and CapAmb are empty");
}

#[test]
fn a_program_on_taps_is_a_data_plane() {
    let node = Node::start("taps");
    follow(&node, "examples/taps.yaml");
    hosts_talk(&node, "taps");
}

/// The fenced blocks of a language in a text.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<(&str, String)> = None;
    for line in text.lines() {
        match (line.strip_prefix("```"), &mut block) {
            (Some(begun), None) => block = Some((begun, String::new())),
            (Some(_), Some(_)) => found.extend(block.take()),
            (None, Some((_, content))) => *content += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    found.into_iter().filter(|(of, _)| *of == language).map(|(_, content)| content).collect()
}

/// The part of docs/guests.md that is the tutorial.
fn tutorial() -> String {
    let docs = read("docs/guests.md");
    let (_, rest) = docs.split_once("\n## (a) ").expect("the tutorial");
    rest.split("\n### ").next().expect("its end").to_owned()
}

#[test]
fn the_tutorial_can_be_followed() {
    let node = Node::start("label");
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
    // Built before the tests, and installed by `make install` too.
    assert_eq!(build.trim(), "cargo build --release -p pdp-guest --bin pdp-label");
    shell.run(make_root);
    shell.run(up);
    let heard = ["label/h2", "label/h3"].map(|station| {
        // The same on h3, for what is flooded.
        Background::start(&mut shell.command(&wait.replace("label/h2", station)))
    });
    let heard = heard.map(|station| thread::spawn(move || station.finish()));
    eventually("both stations have heard", || {
        shell.run(send);
        heard.iter().all(thread::JoinHandle::is_finished)
    });
    let outputs = blocks(&tutorial, "");
    let said = outputs.last().expect("what is printed");
    for station in heard {
        assert_eq!(station.join().expect("a station"), *said);
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
fn what_the_documentation_shows_is_what_is_run() {
    let docs = read("docs/guests.md");
    let mut sources = vec![dedented(&read("crates/guest/src/bin/pdp-label.rs"))];
    let mut found: Vec<String> = Vec::new();
    for entry in fs::read_dir(repository().join("examples")).expect("examples/").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".yaml") {
            sources.push(dedented(&read(&format!("examples/{name}"))));
        }
        found.push(name);
    }
    found.sort();
    assert_eq!(
        found,
        [
            "fabric.yaml",
            "figure1",
            "label.yaml",
            "links.yaml",
            "ospf.yaml",
            "taps.yaml",
            "testpmd.yaml"
        ],
        "every example is run here"
    );
    let shown = blocks(&docs, "rust").into_iter().chain(blocks(&docs, "yaml"));
    // What has `...` in it is a sketch.
    for block in shown.filter(|block| !block.contains("...")) {
        let wanted = dedented(&block);
        let wanted = wanted.trim_end();
        assert!(sources.iter().any(|source| source.contains(wanted)), "nowhere: {block}");
    }
}
