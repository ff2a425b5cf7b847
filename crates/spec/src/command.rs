//! Commands of a node, when they start, and when they are ready.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits::WORKDIR_BYTES_MAX;
use crate::path::{BAD_PATH, good_path};
use crate::units::{Span, User};

/// A command: a list of words, or a text that is split like in a shell, without expansions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Command {
    /// List of words.
    Words(Vec<String>),
    /// Text to split into words.
    Line(String),
}

impl Command {
    /// Returns the words; empty if quotes are unbalanced, which [`crate::check`] rejects.
    pub fn words(&self) -> Vec<String> {
        match self {
            Self::Words(words) => words.clone(),
            Self::Line(line) => shlex::split(line).unwrap_or_default(),
        }
    }
}

/// Commands to restart when one ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RestartScope {
    /// Only that one.
    #[default]
    Each,
    /// That one and all after it.
    Following,
}

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

    pub(crate) fn may_fail(&self) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::USER_CHARS_MAX;

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
}
