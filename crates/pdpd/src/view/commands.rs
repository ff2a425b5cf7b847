//! Status of a node's commands, as its guest reports it.

use pdp_api::{CommandState, CommandStatus};
use pdp_container::GuestCommandStatus as Told;

use crate::plan::CommandPlan;

/// Returns the status of commands from the reports, in their order; `None` if there are none.
pub(super) fn commands(plans: &[CommandPlan], told: Option<Vec<Told>>) -> Vec<CommandStatus> {
    // Reports about other commands belong to a guest that is about to be recreated.
    let told = told.filter(|told| told.len() == plans.len());
    let told = told.unwrap_or_else(|| vec![Told::default(); plans.len()]);
    let mut all: Vec<_> = plans.iter().zip(told).map(|(plan, told)| command(plan, told)).collect();
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

fn command(plan: &CommandPlan, told: Told) -> CommandStatus {
    let state = state(told.state);
    let mut words = told.words;
    if told.troubled && words.is_empty() {
        words = "keeps ending".to_owned();
    }
    if told.troubled && told.restarts > 0 {
        words += &format!(" (started {} times)", u64::from(told.restarts) + 1);
        if told.exit == Some(0) && !plan.once {
            words += "; give it once: true if it is to end";
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
        troubled: told.troubled,
        restarts: told.restarts,
        exit: told.exit,
        message: Some(words).filter(|words| !words.is_empty()),
    }
}

fn state(state: pdp_container::GuestCommandState) -> CommandState {
    use pdp_container::GuestCommandState as Told;
    match state {
        Told::Waiting => CommandState::Waiting,
        Told::Starting => CommandState::Starting,
        Told::Ready => CommandState::Ready,
        Told::Running => CommandState::Running,
        Told::Restarting => CommandState::Restarting,
        Told::Done => CommandState::Done,
        Told::Failed => CommandState::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_container::GuestCommandState as State;

    fn plan(name: &str, after: &[usize], once: bool) -> CommandPlan {
        CommandPlan { name: name.into(), after: after.into(), once }
    }

    fn told(state: State) -> Told {
        Told { state, ..Told::default() }
    }

    #[test]
    fn waiting_command_names_its_predecessors() {
        let plans =
            [plan("zebra", &[], false), plan("ospfd", &[0], false), plan("exec-1", &[0, 1], true)];
        let said = |states: [State; 3]| {
            let all = commands(&plans, Some(states.map(told).into()));
            all.into_iter().map(|it| it.message.unwrap_or_default()).collect::<Vec<_>>()
        };
        let [waits, starts, runs] = [State::Waiting, State::Starting, State::Running];
        assert_eq!(said([starts, waits, waits]), ["", "waits for zebra", "waits for zebra, ospfd"]);
        assert_eq!(said([State::Ready, runs, waits]), ["", "", ""]);
    }

    #[test]
    fn command_readiness_follows_its_state() {
        let ready =
            |once, state| commands(&[plan("a", &[], once)], Some(vec![told(state)]))[0].ready;
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
            let all = commands(&[plan("a", &[], false)], Some(vec![told(State::Ready); count]));
            assert_eq!((all.len(), all[0].ready), (1, false));
        }
    }

    #[test]
    fn restarting_one_shot_command_gets_a_hint() {
        let words = "ended with code 0".to_owned();
        let state = State::Restarting;
        let it = Told { state, restarts: 4, exit: Some(0), troubled: true, words };
        let all = commands(&[plan("ip", &[], false)], Some(vec![it]));
        let message = all[0].message.as_deref();
        let want = "ended with code 0 (started 5 times); give it once: true if it is to end";
        assert_eq!(message, Some(want));
    }
}
