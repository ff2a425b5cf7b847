//! A vnet's entry in a list.

use std::collections::BTreeSet;

use pdp_api::{NodeStatus, NodeType, VnetStatus, VnetSummary};

/// Returns a vnet's entry in a list.
pub fn summary(name: &str, status: &VnetStatus) -> VnetSummary {
    let guests = || status.nodes.iter().flat_map(|node| &node.guests);
    let fes: BTreeSet<&String> = guests().map(|guest| &guest.fe).collect();
    let routers = status.nodes.iter().filter(|node| node.kind == NodeType::Router).count();
    VnetSummary {
        name: name.into(),
        phase: status.phase,
        ready: status.ready,
        routers: routers as u32,
        hosts: (status.nodes.len() - routers) as u32,
        links: status.links.len() as u32,
        guests_connected: guests().filter(|guest| guest.connected).count() as u32,
        guests: guests().count() as u32,
        power_millicores: status.nodes.iter().filter_map(|node| node.power_millicores).sum(),
        fes: fes.into_iter().cloned().collect(),
        late: status.nodes.iter().filter_map(|node| node.mirror.as_ref()).any(|m| m.late),
        message: status.message.clone(),
        waits_for: waits_for(status),
        conditions: status.nodes.iter().flat_map(|node| node.conditions.clone()).collect(),
    }
}

/// Most parts that a vnet's note names.
const WAITS_NAMED: usize = 4;

/// Names the parts that a vnet waits for; `None` if something is wrong or nothing is missing.
fn waits_for(status: &VnetStatus) -> Option<String> {
    if status.message.is_some() {
        return None;
    }
    let each = |node: &NodeStatus| {
        let name = node.name.clone();
        node.waits_for().into_iter().map(move |what| format!("{name} {what}"))
    };
    let mut all: Vec<String> = status.nodes.iter().flat_map(each).collect();
    let more = all.len().saturating_sub(WAITS_NAMED);
    all.truncate(WAITS_NAMED);
    all.extend((more > 0).then(|| format!("and {more} more")));
    (!all.is_empty()).then(|| all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_api::{CommandState, CommandStatus, Phase};

    #[test]
    fn vnet_message_names_pending_parts_unless_degraded() {
        let command = |name: &str, state| CommandStatus {
            name: name.into(),
            state,
            ..CommandStatus::default()
        };
        let node = |name: &str, commands| NodeStatus {
            name: name.into(),
            phase: Phase::Running,
            commands,
            ..NodeStatus::default()
        };
        let starting = || {
            vec![command("zebra", CommandState::Starting), command("ospfd", CommandState::Waiting)]
        };
        let nodes = vec![
            node("r1", starting()),
            node("h1", vec![command("exec-1", CommandState::Waiting)]),
        ];
        let mut status = VnetStatus { nodes, ..VnetStatus::default() };
        assert_eq!(waits_for(&status).as_deref(), Some("r1 zebra, h1 exec-1"));
        status.nodes = (1..=6).map(|number| node(&format!("r{number}"), starting())).collect();
        let words = "r1 zebra, r2 zebra, r3 zebra, r4 zebra, and 2 more";
        assert_eq!(waits_for(&status).as_deref(), Some(words));
        status.message = Some("no room".into());
        assert_eq!(waits_for(&status), None);
        assert_eq!(waits_for(&VnetStatus::default()), None);
    }
}
