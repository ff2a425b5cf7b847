//! Processes of a node, from its commands.

use std::collections::BTreeMap;
use std::path::Path;

use crate::command::{Command, NodeCommand, ReadinessCheck, RestartPolicy, RestartScope};
use crate::object::Node;

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
