//! What a node runs: commands, when each is started, and when it is ready.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::check::{BAD_PATH, good_path};
use crate::limits::WORKDIR_BYTES_MAX;
use crate::object::{Command, Node, Restart};
use crate::units::{Span, User};

/// A command of a node: a command alone, which is started at once and again whenever it ends, or a mapping
/// that says more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum NodeCommand {
    /// The command alone.
    Plain(Command),
    /// With what more there is to say.
    Task(Box<Task>),
}

/// A command, and when it is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Task {
    /// The program and its arguments.
    pub run: Command,
    /// What it is called in `after` and in answers: letters, digits and `._-`. Not given: the program's file
    /// name, with `-2`, `-3`, … for those that have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// It is to end, with code 0, and is not started again then; else the node is `degraded`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub once: bool,
    /// With `once`: it may end with any code, and what comes after it is started all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_fail: bool,
    /// Whether it is started again when it ends. Not given: `always`; with `once`: `never`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartPolicy>,
    /// The command that it comes after, or several: it is started when these are ready, have ended with code 0
    /// (those with `once`), or were started (those without `ready`). Not given: it is started at once.
    #[serde(default, skip_serializing_if = "Names::is_empty")]
    pub after: Names,
    /// What tells that it is ready; looked at until it holds once, and anew whenever the command is started
    /// again. Not given: that it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
    /// Who runs it and the `command` of its `ready`: `USER` or `USER:GROUP`, by name or number, looked up
    /// in the node whenever it is started. With the groups that `/etc/group` has the user in, unless a group is named.
    /// Without the node's capabilities, unless it is root. Not given: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// The directory that it and the `command` of its `ready` are run in, by its absolute path in the node. Not
    /// given: that of the image, or `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
}

/// A command that is run once: alone, or a mapping that says more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ExecCommand {
    /// The command alone.
    Plain(Command),
    /// With what more there is to say.
    Task(ExecTask),
}

/// A command that is run once, and what its failure means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExecTask {
    /// The program and its arguments.
    pub run: Command,
    /// It may end with any code, and those after it are run all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_fail: bool,
}

impl ExecCommand {
    /// The program and its arguments.
    pub fn command(&self) -> &Command {
        match self {
            Self::Plain(command) => command,
            Self::Task(task) => &task.run,
        }
    }

    fn may_fail(&self) -> bool {
        matches!(self, Self::Task(task) if task.may_fail)
    }
}

/// A name, or several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Names {
    /// One.
    One(String),
    /// All of these.
    All(Vec<String>),
}

impl Default for Names {
    fn default() -> Self {
        Self::All(Vec::new())
    }
}

impl Names {
    /// The names.
    pub fn all(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::All(names) => names,
        }
    }

    fn is_empty(&self) -> bool {
        self.all().is_empty()
    }
}

/// Whether a command is started again when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// Whatever it returned.
    Always,
    /// If it returned another code than 0, or a signal ended it.
    OnFailure,
    /// No.
    Never,
}

/// What tells that a command is ready: exactly one of `command`, `tcp` and `file`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ready {
    /// A command in the node that returns 0 once the other is ready. What it writes is not logged; its last
    /// line is told while it fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Command>,
    /// A TCP port that takes connections at 127.0.0.1 or ::1 of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub tcp: Option<u16>,
    /// A file or socket that is there, by its absolute path in the node. One that an earlier run left counts, unless the
    /// command removes it within the first `interval`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Time before the first look, and between two.
    #[serde(default = "interval")]
    pub interval: Span,
    /// Time of one look; a `command` that takes longer is killed.
    #[serde(default = "timeout")]
    pub timeout: Span,
    /// Time after which the node is `degraded` while the command is not ready. It is looked at further.
    #[serde(default = "within")]
    pub within: Span,
}

fn interval() -> Span {
    Span(200_000_000)
}

fn timeout() -> Span {
    Span(5_000_000_000)
}

fn within() -> Span {
    Span(60_000_000_000)
}

/// Something that a node runs, from its `commands` or its `exec`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run<'a> {
    /// What it is called: unique among those of a node that passes [`crate::check()`].
    pub name: String,
    /// The program and its arguments.
    pub command: &'a Command,
    /// It is to end with code 0.
    pub once: bool,
    /// Or with any other.
    pub may_fail: bool,
    /// Whether it is started again when it ends.
    pub restart: RestartPolicy,
    /// Whether it is killed and started again when one before it is.
    pub follows: bool,
    /// Those that it comes after, by their places; names that nothing has are passed over.
    pub after: Vec<usize>,
    /// What tells that it is ready.
    pub ready: Option<&'a Ready>,
    /// Who runs it.
    pub user: Option<&'a str>,
    /// Where it is run.
    pub workdir: Option<&'a str>,
}

/// Why a text is no working directory of a command; `None`: it is one.
pub fn bad_workdir(text: &str) -> Option<String> {
    if text.len() > WORKDIR_BYTES_MAX {
        return Some(format!("workdir has {} bytes, {WORKDIR_BYTES_MAX} at most", text.len()));
    }
    let good = text == "/" || good_path(text);
    (!good || text.contains(char::is_control)).then(|| format!("workdir {text:?} is {BAD_PATH}"))
}

impl NodeCommand {
    /// The program and its arguments.
    pub fn command(&self) -> &Command {
        match self {
            Self::Plain(command) => command,
            Self::Task(task) => &task.run,
        }
    }

    /// What more is said of it.
    pub fn task(&self) -> Option<&Task> {
        match self {
            Self::Plain(_) => None,
            Self::Task(task) => Some(task),
        }
    }
}

impl Node {
    /// All that it runs: `commands`, and then `exec`, whose first comes after all commands, and each other after
    /// the one before.
    pub fn runs(&self) -> Vec<Run<'_>> {
        let names = names(&self.commands);
        let mut runs = Vec::new();
        for (command, name) in self.commands.iter().zip(&names) {
            let task = command.task();
            let once = task.is_some_and(|task| task.once);
            let after = task.map_or(&[][..], |task| task.after.all()).iter();
            runs.push(Run {
                name: name.clone(),
                command: command.command(),
                once,
                may_fail: task.is_some_and(|task| task.may_fail),
                restart: task.and_then(|task| task.restart).unwrap_or(match once {
                    true => RestartPolicy::Never,
                    false => RestartPolicy::Always,
                }),
                follows: self.restart == Restart::Following,
                after: after.filter_map(|name| names.iter().position(|it| it == name)).collect(),
                ready: task.and_then(|task| task.ready.as_ref()),
                user: task.and_then(|task| Some(&*task.user.as_ref()?.0)),
                workdir: task.and_then(|task| task.workdir.as_deref()),
            });
        }
        let count = runs.len();
        for (index, command) in self.exec.iter().enumerate() {
            runs.push(Run {
                name: format!("exec-{}", index + 1),
                command: command.command(),
                once: true,
                may_fail: command.may_fail(),
                restart: RestartPolicy::Never,
                follows: false,
                after: match index {
                    0 => (0..count).collect(),
                    _ => vec![count + index - 1],
                },
                ready: None,
                user: None,
                workdir: None,
            });
        }
        runs
    }
}

/// What commands are called: by their own names, or by those of their programs.
fn names(commands: &[NodeCommand]) -> Vec<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let name = |command: &NodeCommand| {
        if let Some(name) = command.task().and_then(|task| task.name.clone()) {
            return name;
        }
        let words = command.command().words();
        let program = words.first().map(String::as_str).unwrap_or_default();
        let name = Path::new(program).file_name().map_or(program.into(), |it| it.to_string_lossy());
        let count = seen.entry(name.to_string()).or_default();
        *count += 1;
        if *count == 1 { name.into() } else { format!("{name}-{count}") }
    };
    commands.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::USER_CHARS_MAX;

    fn node(text: &str) -> Node {
        serde_saphyr::from_str(&format!("kind: host\n{text}")).expect("a node")
    }

    #[test]
    fn names_are_those_of_programs_and_unique() {
        let node = node(
            "commands:\n- /usr/lib/frr/zebra -K 60\n- [sh, -c, a]\n- {run: sh -c b}\n- {run: sh, name: last}",
        );
        let names: Vec<_> = node.runs().into_iter().map(|run| run.name).collect();
        assert_eq!(names, ["zebra", "sh", "sh-2", "last"]);
    }

    #[test]
    fn users_are_names_or_numbers_of_a_node() {
        for good in ["root", "frr:frr", "1000", "0:65535", "www-data", "_x.y:1", "7a"] {
            assert_eq!(good.parse(), Ok(User(good.into())));
        }
        let bad = [
            "", ":", "a:", ":b", "a:b:c", "a b", "../a", "a/b", "-1", ".", "é", "a\0", "a\n", "$a",
        ];
        for bad in bad {
            assert!(
                bad.parse::<User>().is_err_and(|it| it.problem.contains("not a user")),
                "{bad:?}"
            );
        }
        for bad in ["65536", "root:65536", "4294967295", "99999999999999999999"] {
            assert!(bad.parse::<User>().is_err_and(|it| it.problem.contains("id")), "{bad:?}");
        }
        assert!("a".repeat(USER_CHARS_MAX).parse::<User>().is_ok());
        assert!("a".repeat(USER_CHARS_MAX + 1).parse::<User>().is_err());
    }

    #[test]
    fn working_directories_are_absolute() {
        for good in ["/", "/srv", "/srv/a b/"] {
            assert_eq!(bad_workdir(good), None, "{good}");
        }
        for bad in ["", "srv", "./x", "/a/../b", "/a\0b", "/a\nb", "/\u{1b}"] {
            assert!(bad_workdir(bad).is_some(), "{bad:?}");
        }
        assert!(bad_workdir(&format!("/{}", "a".repeat(WORKDIR_BYTES_MAX))).is_some());
    }

    #[test]
    fn exec_comes_after_all_commands_one_by_one() {
        let node = node("commands: [a, {run: b, after: a}]\nexec: [c, d, e]");
        let after: Vec<_> = node.runs().into_iter().map(|run| run.after).collect();
        assert_eq!(after, [vec![], vec![0], vec![0, 1], vec![2], vec![3]]);
        let once: Vec<_> = node.runs().into_iter().map(|run| run.once).collect();
        assert_eq!(once, [false, false, true, true, true]);
    }

    #[test]
    fn once_is_not_started_again_unless_it_is_said() {
        let node = node(
            "commands: [a, {run: a, once: true}, {run: a, once: true, restart: on-failure}, {run: a, restart: never}]",
        );
        let restart: Vec<_> = node.runs().into_iter().map(|run| run.restart).collect();
        use RestartPolicy::{Always, Never, OnFailure};
        assert_eq!(restart, [Always, Never, OnFailure, Never]);
    }

    #[test]
    fn what_says_nothing_more_is_written_as_it_was() {
        let node = node("commands: [ip a, [b, c], {run: d}]");
        let text = serde_json::to_value(&node).expect("JSON");
        assert_eq!(text["commands"], serde_json::json!(["ip a", ["b", "c"], {"run": "d"}]));
        assert!(text.get("exec").is_none());
    }
}
