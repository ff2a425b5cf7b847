//! Status of a node's commands, as its guest reports it.

use pdp_api::{CommandState, CommandStatus};
use pdp_container::GuestCommandStatus as Report;

use crate::plan::CommandPlan;

/// Returns the status of commands from the reports, in their order; `None` if there are none.
pub(super) fn commands(plans: &[CommandPlan], reports: Option<Vec<Report>>) -> Vec<CommandStatus> {
    // Reports about other commands belong to a guest that is about to be recreated.
    let reports = reports.filter(|reports| reports.len() == plans.len());
    let reports = reports.unwrap_or_else(|| vec![Report::default(); plans.len()]);
    let mut all: Vec<_> =
        plans.iter().zip(reports).map(|(plan, report)| command(plan, report)).collect();
    for (index, plan) in plans.iter().enumerate() {
        if all[index].state == CommandState::Waiting {
            let open = plan.after.iter().filter_map(|place| all.get(*place));
            let names: Vec<_> =
                open.filter(|other| !other.ready).map(|other| other.name.as_str()).collect();
            let waits = format!("waits for {}", names.join(", "));
            all[index].message = (!names.is_empty()).then_some(waits);
        }
    }
    all
}

fn command(plan: &CommandPlan, report: Report) -> CommandStatus {
    let state = report.state;
    let mut words = report.words;
    if report.troubled && words.is_empty() {
        words = "keeps ending".to_owned();
    }
    if report.troubled && report.restarts > 0 {
        words += &format!(" (started {} times)", u64::from(report.restarts) + 1);
        if report.exit == Some(0) && !plan.once {
            words += "; set once: true if it should end";
        }
    }
    CommandStatus {
        name: plan.name.clone(),
        state,
        ready: match state {
            CommandState::Ready | CommandState::Done => true,
            CommandState::Running => !plan.once,
            _ => false,
        },
        troubled: report.troubled,
        restarts: report.restarts,
        exit: report.exit,
        message: Some(words).filter(|words| !words.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CommandState as State;

    fn plan(name: &str, after: &[usize], once: bool) -> CommandPlan {
        CommandPlan { name: name.into(), after: after.into(), once }
    }

    fn report(state: State) -> Report {
        Report { state, ..Report::default() }
    }

    #[test]
    fn waiting_command_names_its_predecessors() {
        let plans =
            [plan("zebra", &[], false), plan("ospfd", &[0], false), plan("exec-1", &[0, 1], true)];
        let messages = |states: [State; 3]| {
            let all = commands(&plans, Some(states.map(report).into()));
            all.into_iter().map(|it| it.message.unwrap_or_default()).collect::<Vec<_>>()
        };
        let [waits, starts, runs] = [State::Waiting, State::Starting, State::Running];
        assert_eq!(
            messages([starts, waits, waits]),
            ["", "waits for zebra", "waits for zebra, ospfd"]
        );
        assert_eq!(messages([State::Ready, runs, waits]), ["", "", ""]);
    }

    #[test]
    fn command_readiness_follows_its_state() {
        let ready =
            |once, state| commands(&[plan("a", &[], once)], Some(vec![report(state)]))[0].ready;
        for (state, daemon, once) in [
            (State::Waiting, false, false),
            (State::Starting, false, false),
            (State::Running, true, false),
            (State::Ready, true, true),
            (State::Restarting, false, false),
            (State::Done, true, true),
            (State::Failed, false, false),
        ] {
            assert_eq!((ready(false, state), ready(true, state)), (daemon, once), "{state:?}");
        }
    }

    #[test]
    fn command_states_of_another_length_are_ignored() {
        for count in [0, 2] {
            let all = commands(&[plan("a", &[], false)], Some(vec![report(State::Ready); count]));
            assert_eq!((all.len(), all[0].ready), (1, false));
        }
    }

    #[test]
    fn restarting_one_shot_command_gets_a_hint() {
        let words = "ended with code 0".to_owned();
        let state = State::Restarting;
        let it = Report { state, restarts: 4, exit: Some(0), troubled: true, words };
        let all = commands(&[plan("ip", &[], false)], Some(vec![it]));
        let message = all[0].message.as_deref();
        let want = "ended with code 0 (started 5 times); set once: true if it should end";
        assert_eq!(message, Some(want));
    }
}
