//! Columns of tables of nodes and links.

use pdp_api::{Condition, DataPlaneKind, LinkStatus, NodeStatus, NodeType, ScheduleStatus};

use super::words::{bits, yes};

/// Text for the NOTE column: the message, or else the parts that the object waits for. The
/// conditions follow.
pub fn note(message: Option<&String>, waits: Option<&str>, conditions: &[Condition]) -> String {
    let conditions = conditions.iter().map(|about| format!("{}: {}", about.node, about.message));
    let waits = waits.map(|waits| format!("waits for {waits}"));
    message.cloned().or(waits).into_iter().chain(conditions).collect::<Vec<_>>().join("; ")
}

/// Names the parts that a node waits for; `None` if there are none.
pub fn waits(node: &NodeStatus) -> Option<String> {
    Some(node.waits_for().join(", ")).filter(|names| !names.is_empty())
}

/// Kind of a node, and kind of its data plane.
pub fn kind_and_plane(node: &NodeStatus) -> [String; 2] {
    let kind = match node.kind {
        NodeType::Router => "router",
        NodeType::Host => "host",
    };
    [kind, node.data_plane.map_or("-", DataPlaneKind::name)].map(str::to_owned)
}

pub const LINK_HEADER: [&str; 7] = ["LINK", "ENDS", "PATH", "SET", "CARRIER", "RATE", "NOTE"];

pub fn link_row(name: String, link: &LinkStatus) -> [String; 7] {
    let set = match (link.up, link.silent) {
        (true, _) => "up",
        (false, false) => "down",
        (false, true) => "silent",
    };
    [
        name,
        link.endpoints.join(" <-> "),
        link.path.name().into(),
        set.into(),
        yes(link.carrier),
        link.rate_bps.map_or("-".into(), bits),
        link_note(link),
    ]
}

/// Text for a link's NOTE column: problems, impairments, progress of its schedule, and why it goes
/// through the mux.
fn link_note(link: &LinkStatus) -> String {
    let schedule = link.schedule.as_ref().map(|it| format!("schedule: {}", schedule(it)));
    let impairments = Some(link.impairments.clone()).filter(|words| !words.is_empty());
    let path = link.path_reason.as_ref().map(|why| format!("through the mux: {why}"));
    let all = [link.message.clone(), impairments, schedule, path].into_iter().flatten();
    all.collect::<Vec<_>>().join("; ")
}

fn schedule(schedule: &ScheduleStatus) -> String {
    let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms % 1000 / 100);
    let ScheduleStatus { elapsed_ms, steps, done, next_ms } = schedule;
    let next = next_ms.map_or_else(String::new, |ms| format!(", next at {}", seconds(ms)));
    format!("{done} of {steps} at {}{next}", seconds(*elapsed_ms))
}
