//! Derives events from the difference between a vnet's old and new status. Pure.

use pdp_api::{
    Condition, EventKind, ExternalStatus, ForwardingGuest, LinkStatus, NodeStatus, Phase,
    PortStatus, SubstrateStatus, VnetStatus, WatchEvent,
};

/// Creates an event of this object, without number and time.
pub fn event(object: impl Into<String>, what: EventKind, message: Option<String>) -> WatchEvent {
    WatchEvent { object: object.into(), what, message, ..WatchEvent::default() }
}

/// Returns the events that lead from a vnet's old status, or from none, to its new one.
pub fn vnet(name: &str, before: Option<&VnetStatus>, now: &VnetStatus) -> Vec<WatchEvent> {
    let mut events = Vec::new();
    let object = format!("vnet/{name}");
    if before.is_none() {
        events.push(event(object.as_str(), EventKind::Created, None));
    }
    let none = VnetStatus::default();
    let before = before.unwrap_or(&none);
    for link in &now.links {
        let was = before.links.iter().find(|was| was.name == link.name);
        events.extend(self::link(&object, was, link));
    }
    for node in &now.nodes {
        let was = before.nodes.iter().find(|was| was.name == node.name);
        self::node(&object, was.unwrap_or(&NodeStatus::default()), node, &mut events);
    }
    let was = (before.phase, &before.message);
    events.extend(phase(&object, was, (now.phase, &now.message)));
    events.extend(ready(&object, before.ready, now.ready));
    events
}

fn ready(object: &str, before: bool, now: bool) -> Option<WatchEvent> {
    let what = if now { EventKind::Ready } else { EventKind::Unready };
    (before != now).then(|| event(object, what, None))
}

/// Returns the events that lead from the node's old status to its new
/// one: of its mux and its external interfaces.
pub fn node_itself(before: &SubstrateStatus, now: &SubstrateStatus) -> Vec<WatchEvent> {
    let was = (before.mux.phase, &before.mux.message);
    let mut events: Vec<_> =
        phase("mux", was, (now.mux.phase, &now.mux.message)).into_iter().collect();
    for external in &now.externals {
        let none = ExternalStatus::default();
        let was = before.externals.iter().find(|was| was.name == external.name).unwrap_or(&none);
        let object = format!("external/{}", external.name);
        let of = |what| event(object.as_str(), what, external.message.clone());
        match (was.carrier, external.carrier) {
            (was, Some(true)) if was != Some(true) => events.push(of(EventKind::CarrierUp)),
            (Some(true), Some(false) | None) => events.push(of(EventKind::CarrierDown)),
            _ => {}
        }
        if was.attached != external.attached {
            let phase = if external.attached { Phase::Running } else { Phase::Failed };
            events.push(WatchEvent { phase: Some(phase), ..of(EventKind::Phase) });
        }
    }
    events
}

fn phase(
    object: &str,
    before: (Phase, &Option<String>),
    now: (Phase, &Option<String>),
) -> Option<WatchEvent> {
    (before != now).then(|| WatchEvent {
        phase: Some(now.0),
        ..event(object, EventKind::Phase, now.1.clone())
    })
}

fn link(vnet: &str, before: Option<&LinkStatus>, now: &LinkStatus) -> Option<WatchEvent> {
    let object = format!("{vnet}/link/{}", now.name);
    let was_up = before.is_none_or(|before| before.up);
    let was_silent = before.is_some_and(|before| before.silent);
    match (was_up, now.up) {
        (true, false) => return Some(event(object, EventKind::LinkDown, now.message.clone())),
        (false, true) => return Some(event(object, EventKind::LinkUp, None)),
        (false, false) if was_silent != now.silent => {
            return Some(event(object, EventKind::LinkDown, now.message.clone()));
        }
        _ => {}
    }
    let before = before?;
    let does = |link: &LinkStatus| (link.rate_bps, link.impairments.clone());
    let (was, is) = (does(before), does(now));
    (was != is).then(|| {
        let rate = now.rate_bps.map(|bps| format!("rate {bps} bit/s"));
        let words = Some(is.1).filter(|words| !words.is_empty());
        let words: Vec<String> = rate.into_iter().chain(words).collect();
        let text = if words.is_empty() { "no limits".to_owned() } else { words.join(", ") };
        event(object, EventKind::LinkSet, Some(text))
    })
}

fn node(vnet: &str, before: &NodeStatus, now: &NodeStatus, events: &mut Vec<WatchEvent>) {
    let object = format!("{vnet}/node/{}", now.name);
    for port in &now.ports {
        let had = before.ports.iter().find(|was| was.name == port.name);
        let had = had.is_some_and(|was| was.carrier);
        let PortStatus { name, carrier, .. } = port;
        if had != *carrier {
            let what = if *carrier { EventKind::CarrierUp } else { EventKind::CarrierDown };
            events.push(event(format!("{object}/port/{name}"), what, None));
        }
    }
    for guest in &now.guests {
        let none = ForwardingGuest::default();
        let was = before.guests.iter().find(|was| was.number == guest.number).unwrap_or(&none);
        let of_guest = |what| event(format!("{object}/g{}", guest.number), what, None);
        if was.connected != guest.connected {
            events.push(of_guest(match guest.connected {
                true => EventKind::Connected,
                false => EventKind::Disconnected,
            }));
        }
        events.extend(routes(was.routes_synced, guest.routes_synced).map(of_guest));
    }
    let of_condition = |what, condition: &Condition| WatchEvent {
        condition: Some(condition.kind),
        ..event(object.as_str(), what, Some(condition.message.clone()))
    };
    // A node has one condition of each kind.
    let has = |node: &NodeStatus, kind| node.conditions.iter().any(|it| it.kind == kind);
    let gone = before.conditions.iter().filter(|was| !has(now, was.kind));
    events.extend(gone.map(|was| of_condition(EventKind::ConditionGone, was)));
    let new = now.conditions.iter().filter(|is| !before.conditions.contains(is));
    events.extend(new.map(|is| of_condition(EventKind::Condition, is)));
    if let Some(engine) = &now.engine {
        let was = before.engine.as_ref().and_then(|engine| engine.routes_synced);
        let of_engine = |what| event(format!("{object}/engine"), what, None);
        events.extend(routes(was, engine.routes_synced).map(of_engine));
    }
    let was = (before.phase, &before.message);
    events.extend(phase(&object, was, (now.phase, &now.message)));
    events.extend(ready(&object, before.ready, now.ready));
}

/// Returns the event for a change of whether tables have the kernel's routes.
fn routes(were: Option<bool>, are: Option<bool>) -> Option<EventKind> {
    match are? {
        are if were == Some(are) => None,
        true => Some(EventKind::RoutesSynced),
        false => Some(EventKind::RoutesBehind),
    }
}

#[cfg(test)]
mod tests {
    use pdp_api::{ConditionKind, EngineStatus};

    use super::*;

    fn status() -> VnetStatus {
        let guest = ForwardingGuest { connected: true, ..ForwardingGuest::default() };
        let port = PortStatus { name: "eth0".into(), carrier: true, ..PortStatus::default() };
        let node = NodeStatus {
            name: "r1".into(),
            phase: Phase::Running,
            guests: vec![guest],
            ports: vec![port],
            ..NodeStatus::default()
        };
        let link =
            LinkStatus { name: "a".into(), up: true, carrier: true, ..LinkStatus::default() };
        let (nodes, links) = (vec![node], vec![link]);
        VnetStatus { phase: Phase::Running, nodes, links, ..VnetStatus::default() }
    }

    fn events_of(before: Option<&VnetStatus>, now: &VnetStatus) -> Vec<String> {
        let events = vnet("red", before, now);
        events.iter().map(|event| format!("{} {}", event.object, event.what.label())).collect()
    }

    #[test]
    fn conditions_cause_events_when_set_changed_and_cleared() {
        let with = |conditions: &[(ConditionKind, &str)]| {
            let mut now = status();
            let all = conditions.iter().map(|(kind, message)| Condition {
                kind: *kind,
                node: "r1".into(),
                message: (*message).into(),
            });
            now.nodes[0].conditions = all.collect();
            now
        };
        let events_of = |before: &VnetStatus, now: &VnetStatus| -> Vec<_> {
            let events = vnet("red", Some(before), now).into_iter();
            let each = events.map(|it| {
                assert_eq!(it.object, "vnet/red/node/r1");
                (it.what, it.condition.unwrap(), it.message.unwrap())
            });
            each.collect()
        };
        let (hooks, port) = (ConditionKind::KernelHooks, ConditionKind::PortChanged);
        let all = [
            with(&[]),
            with(&[(port, "a")]),
            with(&[(hooks, "h"), (port, "a")]),
            with(&[(hooks, "h"), (port, "b")]),
            with(&[(port, "b")]),
            with(&[]),
        ];
        let steps: Vec<_> = all.windows(2).map(|pair| events_of(&pair[0], &pair[1])).collect();
        let (is, gone) = (EventKind::Condition, EventKind::ConditionGone);
        let one = |what, kind, message: &str| vec![(what, kind, message.to_owned())];
        let expected = [
            one(is, port, "a"),
            one(is, hooks, "h"),
            one(is, port, "b"),
            one(gone, hooks, "h"),
            one(gone, port, "b"),
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn each_status_change_causes_exactly_one_event() {
        let all = status();
        assert_eq!(
            events_of(None, &all),
            [
                "vnet/red created",
                "vnet/red/node/r1/port/eth0 carrier up",
                "vnet/red/node/r1/g0 connected",
                "vnet/red/node/r1 phase",
                "vnet/red phase",
            ]
        );
        assert!(events_of(Some(&all), &all).is_empty());
        let change = |change: fn(&mut VnetStatus)| {
            let mut now = status();
            change(&mut now);
            events_of(Some(&all), &now)
        };
        assert_eq!(change(|it| it.links[0].up = false), ["vnet/red/link/a link down"]);
        assert_eq!(change(|it| it.links[0].rate_bps = Some(7)), ["vnet/red/link/a link set"]);
        assert_eq!(
            change(|it| it.nodes[0].guests[0].connected = false),
            ["vnet/red/node/r1/g0 disconnected"]
        );
        for (synced, what) in [(true, "routes synced"), (false, "routes behind")] {
            let mut now = status();
            now.nodes[0].guests[0].routes_synced = Some(synced);
            assert_eq!(events_of(Some(&all), &now), [format!("vnet/red/node/r1/g0 {what}")]);
            assert!(events_of(Some(&now), &all).is_empty(), "nobody says");
            let engine = |routes_synced| {
                let mut now = status();
                now.nodes[0].engine = Some(EngineStatus { routes_synced, ..Default::default() });
                now
            };
            let now = engine(Some(synced));
            let words = [format!("vnet/red/node/r1/engine {what}")];
            assert_eq!(events_of(Some(&engine(None)), &now), words);
            assert!(events_of(Some(&now), &now).is_empty());
        }
        assert_eq!(change(|it| it.message = Some("why".into())), ["vnet/red phase"]);
        assert_eq!(change(|it| it.ready = true), ["vnet/red ready"]);
        assert_eq!(change(|it| it.nodes[0].ready = true), ["vnet/red/node/r1 ready"]);
        // Values that always change cause no event.
        assert!(change(|it| it.nodes[0].control.pid = Some(7)).is_empty());
        assert!(change(|it| it.links[0].schedule = Some(Default::default())).is_empty());
    }
}
