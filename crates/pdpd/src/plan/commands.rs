//! What a control guest or host runs.

use pdp_container::{Check, Command, Probe, Restart};
use pdp_spec::units::Span;
use pdp_spec::{Node, Ready, RestartPolicy, Run};

/// What a command is called, and those that it comes after: of the commands of a guest, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandPlan {
    /// Its name, unique in its node.
    pub name: String,
    /// Places of the others.
    pub after: Vec<usize>,
    /// It is ready when it has ended.
    pub once: bool,
}

/// The commands of a node, and what they are called. Those that say nothing of when they are started are as
/// they were before there was anything to say: their guest must not be made anew for an upgrade.
pub(super) fn commands(node: &Node) -> (Vec<Command>, Vec<CommandPlan>) {
    let runs = node.runs();
    let plans = runs.iter().map(|run| CommandPlan {
        name: run.name.clone(),
        after: run.after.clone(),
        once: run.once,
    });
    (runs.iter().map(command).collect(), plans.collect())
}

fn command(run: &Run<'_>) -> Command {
    let (restart, with_previous) = match (run.restart, run.follows) {
        (RestartPolicy::Always, false) => (Restart::Always, false),
        (RestartPolicy::Always, true) => (Restart::WithPrevious, false),
        (RestartPolicy::OnFailure, follows) => (Restart::OnFailure, follows),
        (RestartPolicy::Never, follows) => (Restart::Never, follows),
    };
    Command {
        with_previous,
        once: run.once,
        after: run.after.clone(),
        ready: run.ready.map(check),
        ..Command::new(run.command.words(), restart)
    }
}

fn check(ready: &Ready) -> Check {
    let what = match (&ready.command, ready.tcp, &ready.file) {
        (Some(command), _, _) => Probe::Command(command.words()),
        (None, Some(port), _) => Probe::Tcp(port),
        (None, None, file) => Probe::File(file.clone().unwrap_or_default().into()),
    };
    let ms = |span: Span| span.0 / 1_000_000;
    Check {
        what,
        interval_ms: ms(ready.interval),
        timeout_ms: ms(ready.timeout),
        within_ms: ms(ready.within),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_nothing_more_is_as_it_was_before_there_was_more_to_say() {
        for (restart, word) in [("each", "always"), ("following", "withprevious")] {
            let node: Node = serde_json::from_value(serde_json::json!({
                "kind": "host", "restart": restart, "commands": ["zebra -K 60", ["ospfd"]],
            }))
            .expect("a node");
            let written = serde_json::to_value(commands(&node).0).expect("JSON");
            let was = serde_json::json!([
                {"argv": ["zebra", "-K", "60"], "restart": word},
                {"argv": ["ospfd"], "restart": word},
            ]);
            assert_eq!(written, was);
        }
    }
}
