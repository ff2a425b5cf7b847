//! Commands of a node, when they start, and when they are ready.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::check::{BAD_PATH, good_path};
use crate::limits::WORKDIR_BYTES_MAX;
use crate::object::{Command, Node, RestartScope};
use crate::units::{Span, User};

/// A command, started at once and restarted when it ends, or a mapping with options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum NodeCommand {
    /// Command without options.
    Plain(Command),
    /// Command with options.
    Task(Box<Task>),
}

/// A command and its start conditions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Task {
    /// Program and arguments.
    pub run: Command,
    /// Name of up to 63 letters, digits and `._-`. Default: the program's file name, with `-2`,
    /// `-3`, … for repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Run once; it must end with code 0.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub once: bool,
    /// With `once`: accept any exit code.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_fail: bool,
    /// When to restart it. Default: `always`; with `once`: `never`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartPolicy>,
    /// Commands to wait for until they are ready, started (without `ready`) or done (`once`).
    #[serde(default, skip_serializing_if = "NameList::is_empty")]
    pub after: NameList,
    /// Readiness check, repeated until it succeeds. Default: ready once started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<ReadinessCheck>,
    /// User, or user and group (docs/ready.md). Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// Absolute working directory, also of `ready`. Default: the image's, or `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
}

/// A command to run once, or a mapping with options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ExecCommand {
    /// Command without options.
    Plain(Command),
    /// Command with options.
    Task(ExecTask),
}

/// A command to run once, and the effect of its failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExecTask {
    /// Program and arguments.
    pub run: Command,
    /// Accept any exit code, and continue.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_fail: bool,
}

impl ExecCommand {
    /// Program and arguments.
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
pub enum NameList {
    /// One name.
    One(String),
    /// Several names.
    All(Vec<String>),
}

impl Default for NameList {
    fn default() -> Self {
        Self::All(Vec::new())
    }
}

impl NameList {
    /// Returns the names.
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

/// Restart condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// After any exit code.
    Always,
    /// After a code other than 0, or a signal.
    OnFailure,
    /// Never.
    Never,
}

/// A readiness check.
///
/// Set exactly one of `command`, `tcp` and `file`. Times are 10 ms to 1 h.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReadinessCheck {
    /// Command that must return 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Command>,
    /// TCP port that must accept connections at 127.0.0.1 or ::1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub tcp: Option<u16>,
    /// Absolute path of a file or socket that must exist. An old one counts if the command keeps it
    /// for the first `interval`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Time before the first check, and between checks.
    #[serde(default = "interval")]
    pub interval: Span,
    /// Time limit of a check; PdP kills a slower `command`.
    #[serde(default = "timeout")]
    pub timeout: Span,
    /// Time until the node becomes `degraded` if the command is not ready.
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

/// A process of a node, from its `commands` or its `exec`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTask<'a> {
    /// Name, unique in a node that passes [`crate::check()`].
    pub name: String,
    /// Program and arguments.
    pub command: &'a Command,
    /// True if it must end with code 0.
    pub once: bool,
    /// True if a `once` command may end with any code.
    pub may_fail: bool,
    /// Restart condition.
    pub restart: RestartPolicy,
    /// True if it is killed and restarted when an earlier command restarts.
    pub follows: bool,
    /// Positions of the commands that it waits for. Unknown names are skipped.
    pub after: Vec<usize>,
    /// Readiness check.
    pub ready: Option<&'a ReadinessCheck>,
    /// User and group.
    pub user: Option<&'a str>,
    /// Working directory.
    pub workdir: Option<&'a str>,
}

/// Returns why a text is not a valid working directory; `None` if it is valid.
pub fn bad_workdir(text: &str) -> Option<String> {
    if text.len() > WORKDIR_BYTES_MAX {
        return Some(format!("workdir has {} bytes, {WORKDIR_BYTES_MAX} at most", text.len()));
    }
    let good = text == "/" || good_path(text);
    (!good || text.contains(char::is_control)).then(|| format!("workdir {text:?} is {BAD_PATH}"))
}

impl NodeCommand {
    /// Program and arguments.
    pub fn command(&self) -> &Command {
        match self {
            Self::Plain(command) => command,
            Self::Task(task) => &task.run,
        }
    }

    /// Options, if given as a mapping.
    pub fn task(&self) -> Option<&Task> {
        match self {
            Self::Plain(_) => None,
            Self::Task(task) => Some(task),
        }
    }
}

impl Node {
    /// Returns all processes: `commands`, then `exec`. The first of
    /// `exec` waits for all commands, each other one for the one before.
    pub fn runs(&self) -> Vec<NodeTask<'_>> {
        let names = names(&self.commands);
        let mut runs = Vec::new();
        for (command, name) in self.commands.iter().zip(&names) {
            let task = command.task();
            let once = task.is_some_and(|task| task.once);
            let after = task.map_or(&[][..], |task| task.after.all()).iter();
            runs.push(NodeTask {
                name: name.clone(),
                command: command.command(),
                once,
                may_fail: task.is_some_and(|task| task.may_fail),
                restart: task.and_then(|task| task.restart).unwrap_or(match once {
                    true => RestartPolicy::Never,
                    false => RestartPolicy::Always,
                }),
                follows: self.restart == RestartScope::Following,
                after: after.filter_map(|name| names.iter().position(|it| it == name)).collect(),
                ready: task.and_then(|task| task.ready.as_ref()),
                user: task.and_then(|task| Some(&*task.user.as_ref()?.0)),
                workdir: task.and_then(|task| task.workdir.as_deref()),
            });
        }
        let count = runs.len();
        for (index, command) in self.exec.iter().enumerate() {
            runs.push(NodeTask {
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

/// Returns the commands' names: their own, or their programs' file names.
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
    fn command_names_default_to_unique_program_names() {
        let node = node(
            "commands:\n- /usr/lib/frr/zebra -K 60\n- [sh, -c, a]\n- {run: sh -c b}\n- {run: sh, name: last}",
        );
        let names: Vec<_> = node.runs().into_iter().map(|run| run.name).collect();
        assert_eq!(names, ["zebra", "sh", "sh-2", "last"]);
    }

    #[test]
    fn users_are_names_or_node_ids() {
        for good in ["root", "frr:frr", "1000", "0:65535", "www-data", "_x.y:1", "7a"] {
            assert_eq!(good.parse(), Ok(User(good.into())));
        }
        let bad = [
            "", ":", "a:", ":b", "a:b:c", "a b", "../a", "a/b", "-1", ".", "é", "a\0", "a\n", "$a",
        ];
        for bad in bad {
            assert!(
                bad.parse::<User>().is_err_and(|it| it.problem.contains("not USER")),
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
    fn exec_runs_sequentially_after_all_commands() {
        let node = node("commands: [a, {run: b, after: a}]\nexec: [c, d, e]");
        let after: Vec<_> = node.runs().into_iter().map(|run| run.after).collect();
        assert_eq!(after, [vec![], vec![0], vec![0, 1], vec![2], vec![3]]);
        let once: Vec<_> = node.runs().into_iter().map(|run| run.once).collect();
        assert_eq!(once, [false, false, true, true, true]);
    }

    #[test]
    fn once_commands_restart_only_if_asked() {
        let node = node(
            "commands: [a, {run: a, once: true}, {run: a, once: true, restart: on-failure}, {run: a, restart: never}]",
        );
        let restart: Vec<_> = node.runs().into_iter().map(|run| run.restart).collect();
        use RestartPolicy::{Always, Never, OnFailure};
        assert_eq!(restart, [Always, Never, OnFailure, Never]);
    }

    #[test]
    fn plain_commands_serialize_as_written() {
        let node = node("commands: [ip a, [b, c], {run: d}]");
        let text = serde_json::to_value(&node).expect("JSON");
        assert_eq!(text["commands"], serde_json::json!(["ip a", ["b", "c"], {"run": "d"}]));
        assert!(text.get("exec").is_none());
    }
}
