//! Errors of commands that wait for each other, as users read them.

use pdp_spec::{Existing, SourceFile, check, parse};

/// Returns the errors of a host with these keys (YAML); empty if there are none.
fn said(keys: &str) -> String {
    let keys: String = keys.lines().map(|line| format!("      {line}\n")).collect();
    let text = format!(
        "apiVersion: pdp/v1\nkind: VirtualNetwork\nmetadata: {{name: red}}\nspec:\n  nodes:\n    h1:\n      \
         kind: host\n{keys}"
    );
    let file = SourceFile { name: "red.yaml".into(), text, ..Default::default() };
    let existing = Existing { unknown: true, cpus: [0, 1].into(), ..Existing::default() };
    let refused = parse(&[file]).and_then(|documents| check(&documents, &existing)).err();
    let words = refused.unwrap_or_default().iter().map(ToString::to_string).collect::<Vec<_>>();
    words.join("\n")
}

#[track_caller]
fn says(keys: &str, expected: &str) {
    let words = said(keys);
    assert_eq!(words, expected);
}

#[test]
fn valid_commands_are_accepted() {
    says(
        "commands:
- a
- [b, c]
- {run: d, name: x, after: a, ready: {tcp: 179}}
- {run: e, after: [x, b], once: true, restart: on-failure}
- {run: h, user: frr:1000, workdir: /srv/x, ready: {command: i}}
- {run: j, user: 1000, workdir: /}
- {run: f, restart: never, ready: {command: test -e /x, interval: 50ms, timeout: 1s, within: 10s}}
- {run: k, once: true, mayFail: true}
exec: [g, [h, i], {run: j, mayFail: true}, {run: [k]}]",
        "",
    );
}

#[test]
fn bad_command_names_and_order_are_refused() {
    for (keys, expected) in [
        (
            "commands: [{run: zebra}, {run: ospfd, after: zebr}]",
            "8:52: node red/h1: after \"zebr\" is no command of this node (did you mean zebra?)",
        ),
        (
            "commands: [{run: a, after: c}, {run: b, after: a}, {run: c, after: [b]}, {run: d, after: c}]",
            "8:34: node red/h1: commands wait for each other: a, b, c (remove one of these after)",
        ),
        (
            "commands: [{run: a, after: a}]",
            "8:34: node red/h1: a can't come after itself (remove it: there is no other command)",
        ),
        (
            "commands: [{run: a, name: x}, {run: b, name: x}]",
            "8:37: node red/h1: two commands of the node have the name x (rename one)",
        ),
        (
            "commands: [{run: a, name: exec-1}]\nexec: [b]",
            "8:18: node red/h1: two commands of the node have the name exec-1 (rename one)",
        ),
        (
            "commands: [{run: a, name: a b}]",
            "8:33: node red/h1: command name \"a b\" is not 1 to 63 of a-z A-Z 0-9 . _ - (name it \
             after its program)",
        ),
    ] {
        says(keys, &format!("red.yaml:{expected}"));
    }
}

#[test]
fn contradictory_command_keys_are_refused() {
    for (keys, expected) in [
        (
            "{run: a, once: true, restart: always}",
            "8:48: node red/h1: a command with once: true can't have restart: always (use restart: \
             on-failure to try until it succeeds, or remove one of the two)",
        ),
        (
            "{run: a, once: true, ready: {tcp: 1}}",
            "8:39: node red/h1: a command with once: true can't have ready: it is ready once it \
             ends with 0 (remove one of them)",
        ),
        (
            "{run: a, mayFail: true}",
            "8:36: node red/h1: mayFail is only for a command with once: true that is not \
             restarted (add once: true without restart, or remove mayFail)",
        ),
        (
            "{run: a, once: true, mayFail: true, restart: on-failure}",
            "8:48: node red/h1: mayFail is only for a command with once: true that is not \
             restarted (add once: true without restart, or remove mayFail)",
        ),
        (
            "{run: a, ready: {}}",
            "8:27: node red/h1: ready has no check (give one of command, tcp and file)",
        ),
        (
            "{run: a, ready: {tcp: 1, file: /x}}",
            "8:27: node red/h1: ready has 2 of command, tcp and file (keep one)",
        ),
        (
            "{run: a, ready: {file: x}}",
            "8:41: node red/h1: file \"x\" is not an absolute path (begin it with /)",
        ),
        (
            "{run: a, ready: {file: /x, within: 61m}}",
            "8:53: node red/h1: within 3660s is not within 10ms to 3600s",
        ),
        (
            "{run: a, ready: {command: \"'\"}}",
            "8:44: node red/h1: the command's quotes do not close (close them, or give a list)",
        ),
        (
            "{run: a, retsart: never}",
            "8:27: node red/h1: unknown key \"retsart\" (did you mean restart?)",
        ),
        ("{once: true}", "8:18: node red/h1: run is missing (add run)"),
    ] {
        says(&format!("commands: [{keys}]"), &format!("red.yaml:{expected}"));
    }
    says("exec: [\"\"]", "red.yaml:8:14: node red/h1: the command has no words (name a program)");
}

#[test]
fn command_users_and_directories_are_validated() {
    for (key, expected) in [
        (
            "user: a:b:c",
            "user \"a:b:c\" is not USER or USER:GROUP (write it like frr, frr:frr or 1000:1000)",
        ),
        (
            "user: 65536",
            "user \"65536\" has an id outside 0 to 65535 (write it like frr, frr:frr or 1000:1000)",
        ),
        (
            "workdir: srv",
            "workdir \"srv\" is not an absolute path without .. (name a directory in the node, like /srv)",
        ),
        (
            "workdir: /srv/../etc",
            "workdir \"/srv/../etc\" is not an absolute path without .. (name a directory in the node, like /srv)",
        ),
    ] {
        let words = said(&format!("commands: [{{run: a, {key}}}]"));
        assert_eq!(words.split_once("node red/h1: ").map(|said| said.1), Some(expected), "{words}");
    }
}
