//! The order of actions in a step of a node, without the machine (pure).
//!
//! A step knows [`NodeFacts`]. [`NodeFacts::next`] returns its next action from them. The step does
//! that action and adds the result to the facts, until the action is [`NodeAction::End`]. No
//! action repeats, so each step ends.
//!
//! ```text
//! running ──► journal ──► TAPs ──► settings ────────────┐
//!    │ (another plan, no TAPs, or a restart)            ▼
//!    ▼                                               helpers ──► ports ──► start ──► journal
//! absent ──► unpack ──► end the old one ──► create ─────▲
//! ```

use pdp_container::Process;

use crate::plan::key::{PerProcess, ProcessRole};

/// Container of a node's control side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum NodeContainer {
    /// It does not run, or it must be made anew.
    #[default]
    Absent,
    /// This daemon created it. Its program has not been started.
    Created(Process),
    /// It runs.
    Running(Process),
}

/// Record of a node in the journal, compared with the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeRecord {
    /// None, or another plan.
    Other,
    /// This plan, with other settings that can be changed while it runs.
    OtherSettings,
    /// This plan.
    Same,
}

/// Result of a helper's check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HelperResult {
    /// It serves. One that is not planned has ended.
    Ready,
    /// It was started, and does not listen yet.
    Starting,
    /// It is not planned, and has not ended yet.
    Ending,
    /// It ended, and may not be started yet.
    BackingOff,
    /// It failed.
    Failed,
}

/// Facts that a step knows so far. `None` and false: the step has not asked or done that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeFacts {
    /// True if the node is to be restarted.
    pub renew: bool,
    /// True if nothing may be started before the back-off ends.
    pub backing_off: bool,
    /// The container.
    pub container: NodeContainer,
    /// The journal's record.
    pub record: Option<NodeRecord>,
    /// True if this daemon holds the node's TAPs.
    pub has_taps: Option<bool>,
    /// True once the running container has all planned settings.
    pub settings_applied: bool,
    /// True if the image is unpacked.
    pub unpacked: Option<bool>,
    /// True if all processes of the old container have ended.
    pub old_ended: Option<bool>,
    /// Results of the helpers' checks.
    pub helpers: PerProcess<Option<HelperResult>>,
    /// True once carriers and kernel ports are as planned.
    pub ports_set: bool,
    /// True once this step started the container's program.
    pub started: bool,
    /// True once the journal has the plan with its settings.
    pub confirmed: bool,
}

/// Action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeAction {
    /// Read the journal.
    ReadRecord,
    /// Get the TAPs back from their helper.
    TakeBackTaps,
    /// Change the settings of the running container.
    ApplySettings(Process),
    /// Unpack the image.
    Unpack,
    /// End all processes of the old container.
    EndOld,
    /// Create the container with its TAPs, kernel ports, addresses, and routes.
    Create,
    /// Check a helper of the container; start or end it.
    Check(ProcessRole, Process),
    /// Set carriers and kernel ports of the container.
    SetPorts(Process),
    /// Start the container's program.
    Start,
    /// Write the plan and its settings to the journal.
    Confirm,
    /// Nothing more now.
    End(NodeEnd),
}

/// End of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeEnd {
    /// The node is as planned.
    Done,
    /// A process may not be started before its back-off ends.
    BackingOff,
    /// The image is being unpacked.
    WaitForImage,
    /// Processes of the old container have not ended.
    WaitForOld,
    /// A route mirror that is not planned has not ended.
    WaitForMirrorEnd,
    /// Helpers that the node needs do not listen yet.
    WaitForHelpers,
    /// The management helper does not listen, or has not ended.
    WaitForManagement,
    /// The management helper failed.
    ManagementFailed,
}

/// Helpers in the order of their checks.
const HELPERS: [ProcessRole; 3] = [ProcessRole::Tap, ProcessRole::Mirror, ProcessRole::Management];

/// Helpers that a node needs before its ports are set. Without management access it works.
const NEEDED: [ProcessRole; 2] = [ProcessRole::Tap, ProcessRole::Mirror];

impl NodeFacts {
    /// Returns the next action.
    pub fn next(&self) -> NodeAction {
        match (self.container, self.record) {
            (NodeContainer::Created(process), _) => self.next_of_parts(process, true),
            (_, None) => NodeAction::ReadRecord,
            (NodeContainer::Running(process), Some(record))
                if record != NodeRecord::Other && !self.renew =>
            {
                match self.has_taps {
                    None => NodeAction::TakeBackTaps,
                    Some(true) if record == NodeRecord::OtherSettings && !self.settings_applied => {
                        NodeAction::ApplySettings(process)
                    }
                    Some(true) => self.next_of_parts(process, false),
                    Some(false) => self.next_of_creation(),
                }
            }
            _ => self.next_of_creation(),
        }
    }

    /// Returns the next action towards a new container.
    fn next_of_creation(&self) -> NodeAction {
        match (self.unpacked, self.old_ended) {
            _ if self.backing_off => NodeAction::End(NodeEnd::BackingOff),
            (None, _) => NodeAction::Unpack,
            (Some(false), _) => NodeAction::End(NodeEnd::WaitForImage),
            (_, None) => NodeAction::EndOld,
            (_, Some(false)) => NodeAction::End(NodeEnd::WaitForOld),
            (_, Some(true)) => NodeAction::Create,
        }
    }

    /// Returns the next action for the helpers, ports, and program of a
    /// container, which is created or runs as planned.
    fn next_of_parts(&self, process: Process, is_created: bool) -> NodeAction {
        for role in HELPERS {
            match self.helpers[role] {
                None => return NodeAction::Check(role, process),
                Some(HelperResult::Ending) if role == ProcessRole::Mirror => {
                    return NodeAction::End(NodeEnd::WaitForMirrorEnd);
                }
                _ => {}
            }
        }
        let needed = |result| NEEDED.iter().any(|role| self.helpers[*role] == Some(result));
        if needed(HelperResult::Starting) {
            return NodeAction::End(NodeEnd::WaitForHelpers);
        }
        if needed(HelperResult::BackingOff) {
            return NodeAction::End(NodeEnd::BackingOff);
        }
        if !self.ports_set {
            return NodeAction::SetPorts(process);
        }
        match self.helpers[ProcessRole::Management] {
            Some(HelperResult::Failed) => return NodeAction::End(NodeEnd::ManagementFailed),
            Some(HelperResult::BackingOff) => return NodeAction::End(NodeEnd::BackingOff),
            Some(HelperResult::Starting | HelperResult::Ending) => {
                return NodeAction::End(NodeEnd::WaitForManagement);
            }
            Some(HelperResult::Ready) | None => {}
        }
        if is_created && !self.started {
            NodeAction::Start
        } else if (self.started || self.settings_applied) && !self.confirmed {
            NodeAction::Confirm
        } else {
            NodeAction::End(NodeEnd::Done)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESS: Process = Process { pid: 1, start_time: 1 };

    /// Returns the facts after each possible result of an action.
    fn after(facts: &NodeFacts, action: NodeAction) -> Vec<NodeFacts> {
        let with = |change: &dyn Fn(&mut NodeFacts)| {
            let mut facts = facts.clone();
            change(&mut facts);
            facts
        };
        let both = |change: &dyn Fn(&mut NodeFacts, bool)| {
            [true, false].map(|is| with(&|facts| change(facts, is))).to_vec()
        };
        match action {
            NodeAction::ReadRecord => {
                [NodeRecord::Other, NodeRecord::OtherSettings, NodeRecord::Same]
                    .map(|record| with(&|facts| facts.record = Some(record)))
                    .to_vec()
            }
            NodeAction::TakeBackTaps => both(&|facts, is| facts.has_taps = Some(is)),
            NodeAction::ApplySettings(_) => vec![with(&|facts| facts.settings_applied = true)],
            NodeAction::Unpack => both(&|facts, is| facts.unpacked = Some(is)),
            NodeAction::EndOld => both(&|facts, is| facts.old_ended = Some(is)),
            NodeAction::Create => {
                vec![with(&|facts| facts.container = NodeContainer::Created(PROCESS))]
            }
            NodeAction::Check(role, _) => {
                let results = [
                    HelperResult::Ready,
                    HelperResult::Starting,
                    HelperResult::Ending,
                    HelperResult::BackingOff,
                    HelperResult::Failed,
                ];
                // A needed helper's failure fails the step, and each node keeps its TAP helper.
                let may = |result: &HelperResult| match result {
                    HelperResult::Failed => role == ProcessRole::Management,
                    HelperResult::Ending => role != ProcessRole::Tap,
                    _ => true,
                };
                let results = results.into_iter().filter(may);
                results.map(|result| with(&|facts| facts.helpers[role] = Some(result))).collect()
            }
            NodeAction::SetPorts(_) => vec![with(&|facts| facts.ports_set = true)],
            NodeAction::Start => vec![with(&|facts| facts.started = true)],
            NodeAction::Confirm => vec![with(&|facts| facts.confirmed = true)],
            NodeAction::End(_) => vec![],
        }
    }

    /// Calls `seen` with the actions and the last facts of every possible step.
    fn every_step(seen: &mut dyn FnMut(&NodeFacts, &[NodeAction], &NodeFacts)) {
        fn go(
            first: &NodeFacts,
            facts: &NodeFacts,
            done: &mut Vec<NodeAction>,
            seen: &mut dyn FnMut(&NodeFacts, &[NodeAction], &NodeFacts),
        ) {
            let action = facts.next();
            assert!(!done.contains(&action), "{action:?} repeats: {first:?} {done:?}");
            done.push(action);
            match action {
                NodeAction::End(_) => seen(first, done, facts),
                _ => after(facts, action).iter().for_each(|facts| go(first, facts, done, seen)),
            }
            done.pop();
        }
        let containers = [
            NodeContainer::Absent,
            NodeContainer::Created(PROCESS),
            NodeContainer::Running(PROCESS),
        ];
        for container in containers {
            for (renew, backing_off) in [(false, false), (false, true), (true, false), (true, true)]
            {
                let first = NodeFacts { container, renew, backing_off, ..NodeFacts::default() };
                go(&first, &first, &mut vec![], seen);
            }
        }
    }

    /// All results of all actions, from all states.
    #[test]
    fn every_step_ends_and_keeps_the_order() {
        let mut ends = Vec::new();
        every_step(&mut |first, done, last| {
            let at = |action| done.iter().position(|it| *it == action);
            let before = |a, b| match at(b) {
                Some(b) => at(a).is_some_and(|a| a < b),
                None => true,
            };
            let set_ports = NodeAction::SetPorts(PROCESS);
            let case = || format!("{first:?} {done:?}");
            // The container: nothing is created beside an old one, or without its image.
            assert!(before(NodeAction::Unpack, NodeAction::EndOld), "{}", case());
            assert!(before(NodeAction::EndOld, NodeAction::Create), "{}", case());
            // Its program starts last, with all helpers and ports, and the journal has it then.
            for role in HELPERS {
                assert!(before(NodeAction::Check(role, PROCESS), set_ports), "{}", case());
                let ready = last.helpers[role] == Some(HelperResult::Ready);
                assert!(ready || at(NodeAction::Start).is_none(), "{}", case());
            }
            assert!(before(set_ports, NodeAction::Start), "{}", case());
            let changes = [NodeAction::Start, NodeAction::ApplySettings(PROCESS)];
            let changed = changes.iter().any(|action| at(*action).is_some());
            let is_done = at(NodeAction::End(NodeEnd::Done)).is_some();
            assert_eq!(at(NodeAction::Confirm).is_some(), changed && is_done, "{}", case());
            // A back-off lets nothing new run, and a restart nothing old.
            let created = at(NodeAction::Create).is_some();
            assert!(!(first.backing_off && created), "{}", case());
            let running = first.container == NodeContainer::Running(PROCESS);
            assert!(!(first.renew && running && is_done && !created), "{}", case());
            // A node that runs as planned is never created anew.
            let kept = last.record == Some(NodeRecord::Same) && last.has_taps == Some(true);
            assert!(!(kept && created), "{}", case());
            // Without management access, the ports are as planned all the same.
            let failed = at(NodeAction::End(NodeEnd::ManagementFailed)).is_some();
            assert!(!failed || last.ports_set, "{}", case());
            ends.push(*done.last().expect("an end"));
        });
        for end in [
            NodeEnd::Done,
            NodeEnd::BackingOff,
            NodeEnd::WaitForImage,
            NodeEnd::WaitForOld,
            NodeEnd::WaitForMirrorEnd,
            NodeEnd::WaitForHelpers,
            NodeEnd::WaitForManagement,
            NodeEnd::ManagementFailed,
        ] {
            assert!(ends.contains(&NodeAction::End(end)), "{end:?}");
        }
    }

    /// Follows one step, with the given facts after each action.
    #[test]
    fn running_node_as_planned_is_only_checked() {
        let mut facts =
            NodeFacts { container: NodeContainer::Running(PROCESS), ..NodeFacts::default() };
        let mut done = Vec::new();
        loop {
            let action = facts.next();
            done.push(action);
            facts = match action {
                NodeAction::End(_) => break,
                NodeAction::ReadRecord => {
                    NodeFacts { record: Some(NodeRecord::Same), ..facts.clone() }
                }
                // The first is the good result.
                _ => after(&facts, action).remove(0),
            };
        }
        let expected = [
            NodeAction::ReadRecord,
            NodeAction::TakeBackTaps,
            NodeAction::Check(ProcessRole::Tap, PROCESS),
            NodeAction::Check(ProcessRole::Mirror, PROCESS),
            NodeAction::Check(ProcessRole::Management, PROCESS),
            NodeAction::SetPorts(PROCESS),
            NodeAction::End(NodeEnd::Done),
        ];
        assert_eq!(done, expected);
    }
}
