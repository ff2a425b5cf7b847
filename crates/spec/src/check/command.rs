//! Checks if a node's commands can run, and their order.

use crate::command::{ExecCommand, ReadinessCheck, RestartPolicy, Task, bad_workdir};
use crate::limits::{CHECK_NS_MAX, CHECK_NS_MIN, COMMANDS_MAX, NAME_CHARS_MAX};
use crate::nearest::nearest;
use crate::node_check::NodeCheck;
use crate::object::Node;
use crate::units::Span;

impl NodeCheck<'_> {
    pub(super) fn commands(&mut self, node: &Node) {
        self.too_many(&["commands"], node.commands.len(), COMMANDS_MAX);
        self.too_many(&["exec"], node.exec.len(), COMMANDS_MAX);
        for (index, command) in node.exec.iter().enumerate() {
            let index = index.to_string();
            match command {
                ExecCommand::Plain(command) => self.command(&["exec", &index], command),
                ExecCommand::Task(task) => self.command(&["exec", &index, "run"], &task.run),
            }
        }
        for (index, command) in node.commands.iter().enumerate() {
            let index = index.to_string();
            match command.task() {
                None => self.command(&["commands", &index], command.command()),
                Some(task) => {
                    self.command(&["commands", &index, "run"], &task.run);
                    self.task(&index, task);
                }
            }
        }
        // Longer lists are rejected already, and this compares each name with all others.
        if node.commands.len() <= COMMANDS_MAX && node.exec.len() <= COMMANDS_MAX {
            self.order(node);
        }
    }

    fn task(&mut self, index: &str, task: &Task) {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if let Some(name) = &task.name
            && (name.is_empty() || name.len() > NAME_CHARS_MAX || !name.chars().all(good))
        {
            let message =
                format!("command name {name:?} is not 1 to {NAME_CHARS_MAX} of a-z A-Z 0-9 . _ -");
            self.fault(&["commands", index, "name"], message, "name it after its program");
        }
        if task.once && task.restart == Some(RestartPolicy::Always) {
            let message = "a command with once: true can't have restart: always";
            let hint = "use restart: on-failure to try until it succeeds, or remove one of the two";
            self.fault(&["commands", index, "restart"], message, hint);
        }
        if task.may_fail && (!task.once || task.restart == Some(RestartPolicy::OnFailure)) {
            let message = "mayFail is only for a command with once: true that is not restarted";
            let hint = "add once: true without restart, or remove mayFail";
            self.fault(&["commands", index, "mayFail"], message, hint);
        }
        if task.once && task.ready.is_some() {
            let message =
                "a command with once: true can't have ready: it is ready once it ends with 0";
            self.fault(&["commands", index, "ready"], message, "remove one of them");
        }
        if let Some(ready) = &task.ready {
            self.ready(index, ready);
        }
        if let Some(message) = task.workdir.as_deref().and_then(bad_workdir) {
            self.fault(
                &["commands", index, "workdir"],
                message,
                "name a directory in the node, like /srv",
            );
        }
    }

    fn ready(&mut self, index: &str, ready: &ReadinessCheck) {
        let path = |key| ["commands", index, "ready", key];
        let given = [ready.command.is_some(), ready.tcp.is_some(), ready.file.is_some()];
        match given.iter().filter(|given| **given).count() {
            1 => {}
            0 => {
                let message = "ready has no check";
                let hint = "give one of command, tcp and file";
                self.fault(&["commands", index, "ready"], message, hint);
            }
            count => {
                let message = format!("ready has {count} of command, tcp and file");
                self.fault(&["commands", index, "ready"], message, "keep one");
            }
        }
        if let Some(command) = &ready.command {
            self.command(&path("command"), command);
        }
        if ready.tcp == Some(0) {
            self.fault(&path("tcp"), "tcp 0 is not a port", "give 1 to 65535");
        }
        if let Some(file) = &ready.file
            && (!file.starts_with('/') || file.contains('\0'))
        {
            let message = format!("file {file:?} is not an absolute path");
            self.fault(&path("file"), message, "begin it with /");
        }
        let spans =
            [("interval", ready.interval), ("timeout", ready.timeout), ("within", ready.within)];
        for (key, span) in spans {
            if !(CHECK_NS_MIN..=CHECK_NS_MAX).contains(&span.0) {
                let (min, max) = (Span(CHECK_NS_MIN), Span(CHECK_NS_MAX));
                self.fault(&path(key), format!("{key} {span} is not within {min} to {max}"), "");
            }
        }
    }

    /// Checks that names are unique, and that `after` names existing commands without cycles.
    fn order(&mut self, node: &Node) {
        let runs = node.runs();
        let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
        for (index, name) in names.iter().enumerate() {
            if let Some(other) = names.iter().take(index).position(|it| it == name) {
                let place = index.min(node.commands.len().saturating_sub(1)).max(other).to_string();
                let message = format!("two commands of the node have the name {name}");
                self.fault(&["commands", &place], message, "rename one");
            }
        }
        for (index, command) in node.commands.iter().enumerate() {
            let place = index.to_string();
            for after in command.task().map_or(&[][..], |task| task.after.all()) {
                let known = &names[..node.commands.len()];
                let message = match after {
                    _ if !known.contains(&after.as_str()) => {
                        format!("after {after:?} is no command of this node")
                    }
                    _ if after == names[index] => format!("{after} can't come after itself"),
                    _ => continue,
                };
                let others = known.iter().copied().filter(|name| *name != names[index]);
                let hint = match (nearest(after, others.clone()), others.count()) {
                    (_, 0) => "remove it: there is no other command".to_owned(),
                    (Some(name), _) => format!("did you mean {name}?"),
                    (None, _) => format!("commands: {}", known.join(", ")),
                };
                self.fault(&["commands", &place, "after"], message, hint);
            }
        }
        // Commands that can start one by one are in no
        // cycle, nor are those that no cycle waits for.
        let mut left: Vec<usize> = (0..node.commands.len()).collect();
        loop {
            let waits = |of: usize, on: usize| of != on && runs[of].after.contains(&on);
            let stays = |it: &usize| {
                left.iter().any(|other| waits(*it, *other))
                    && left.iter().any(|other| waits(*other, *it))
            };
            let stay: Vec<usize> = left.iter().copied().filter(stays).collect();
            if stay.len() == left.len() {
                break;
            }
            left = stay;
        }
        if let Some(first) = left.first() {
            let names: Vec<_> = left.iter().map(|index| names[*index]).collect();
            let message = format!("commands wait for each other: {}", names.join(", "));
            let place = first.to_string();
            self.fault(&["commands", &place, "after"], message, "remove one of these after");
        }
    }
}
