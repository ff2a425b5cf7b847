//! Commands of a control guest or host.

use pdp_container::{CommandProbe, CommandRestart, GuestCommand, Probe, RunAs};
use pdp_spec::units::Span;
use pdp_spec::{ImageSource, Node, NodeTask, ReadinessCheck, RestartPolicy};

/// Name of an image's own command. It is unique in its node, since such a node has no `commands`.
const OF_IMAGE: &str = "image";

/// Name of a command, and the indexes of the commands that it follows, among those of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandPlan {
    /// Name of the command, unique in its node.
    pub name: String,
    /// Indexes of the commands that it follows.
    pub after: Vec<usize>,
    /// True if it is ready once it has ended.
    pub once: bool,
}

/// Returns the commands of a node with their plans. A command without start conditions
/// is represented as in older versions, so that an upgrade does not recreate its guest.
pub(super) fn commands(node: &Node) -> (Vec<GuestCommand>, Vec<CommandPlan>) {
    let runs = node.runs();
    let plans = runs.iter().map(|run| CommandPlan {
        name: run.name.clone(),
        after: run.after.clone(),
        once: run.once,
    });
    let (mut commands, mut plans) = (runs.iter().map(command).collect(), plans.collect());
    if node.commands.is_empty()
        && matches!(node.image.source(), ImageSource::Archive(..) | ImageSource::Pull(..))
    {
        of_image(&mut commands, &mut plans);
    }
    (commands, plans)
}

/// Inserts an image's own command before those of a node without `commands`. All of them follow it.
fn of_image(commands: &mut Vec<GuestCommand>, plans: &mut Vec<CommandPlan>) {
    let moved = |after: &mut Vec<usize>| {
        after.iter_mut().for_each(|place| *place += 1);
        after.insert(0, 0);
    };
    commands.iter_mut().for_each(|command| moved(&mut command.after));
    plans.iter_mut().for_each(|plan| moved(&mut plan.after));
    commands.insert(0, GuestCommand::of_image());
    plans.insert(0, CommandPlan { name: OF_IMAGE.into(), after: Vec::new(), once: false });
}

fn command(run: &NodeTask<'_>) -> GuestCommand {
    let (restart, with_previous) = match (run.restart, run.follows) {
        (RestartPolicy::Always, false) => (CommandRestart::Always, false),
        (RestartPolicy::Always, true) => (CommandRestart::WithPrevious, false),
        (RestartPolicy::OnFailure, follows) => (CommandRestart::OnFailure, follows),
        (RestartPolicy::Never, follows) => (CommandRestart::Never, follows),
    };
    GuestCommand {
        with_previous,
        once: run.once,
        may_fail: run.may_fail,
        after: run.after.clone(),
        ready: run.ready.map(check),
        run_as: RunAs { user: run.user.map(str::to_owned), workdir: run.workdir.map(Into::into) },
        ..GuestCommand::new(run.command.words(), restart)
    }
}

fn check(ready: &ReadinessCheck) -> CommandProbe {
    let what = match (&ready.command, ready.tcp, &ready.file) {
        (Some(command), _, _) => Probe::Command(command.words()),
        (None, Some(port), _) => Probe::Tcp(port),
        (None, None, file) => Probe::File(file.clone().unwrap_or_default().into()),
    };
    let ms = |span: Span| span.0 / 1_000_000;
    CommandProbe {
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
    fn image_command_is_the_default_and_precedes_exec() {
        let named = |image: serde_json::Value, own: &[&str]| {
            let node: Node = serde_json::from_value(serde_json::json!({
                "kind": "host", "image": image, "commands": own, "exec": ["ip a", "ip r"],
            }))
            .expect("a node");
            let (commands, plans) = commands(&node);
            let after = |plan: &CommandPlan| plan.after.clone();
            assert_eq!(
                plans.iter().map(after).collect::<Vec<_>>(),
                commands.iter().map(|it| it.after.clone()).collect::<Vec<_>>()
            );
            let programs = commands.iter().map(|it| it.argv.len());
            (
                plans.iter().map(|it| it.name.clone()).collect::<Vec<_>>(),
                plans.iter().map(after).collect::<Vec<_>>(),
                programs.collect::<Vec<_>>(),
            )
        };
        let names = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        for image in [serde_json::json!("frr:10"), serde_json::json!({"archive": "/srv/x.tar"})] {
            let (called, after, programs) = named(image.clone(), &[]);
            assert_eq!(called, names(&["image", "exec-1", "exec-2"]));
            assert_eq!(after, [vec![], vec![0], vec![0, 1]]);
            assert_eq!(programs, [0, 2, 2]);
            assert_eq!(named(image, &["bird"]).0, names(&["bird", "exec-1", "exec-2"]));
        }
        let called = named(serde_json::json!({"ociLayout": "/srv/x"}), &[]).0;
        assert_eq!(called, names(&["exec-1", "exec-2"]));
    }

    #[test]
    fn commands_use_their_user_and_exec_uses_root() {
        let node: Node = serde_json::from_value(serde_json::json!({
            "kind": "host", "commands": [{"run": "a", "user": "frr:7", "workdir": "/srv"}, "b"], "exec": ["c"],
        }))
        .expect("a node");
        let commands = commands(&node).0;
        let ran = RunAs { user: Some("frr:7".into()), workdir: Some("/srv".into()) };
        let all = commands.iter().map(|command| command.run_as.clone()).collect::<Vec<_>>();
        assert_eq!(all, [ran, RunAs::default(), RunAs::default()]);
    }

    #[test]
    fn commands_without_new_keys_serialize_unchanged() {
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
