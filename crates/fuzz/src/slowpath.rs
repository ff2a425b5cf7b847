//! Requests of programs in control guests, and the mux's reaction.

use std::collections::BTreeMap;

use pdp_mux::actions::{Actions, ChangeSet, FilterChange, with_capacity};
use pdp_mux::queues::{AtPorts, QueueParameters, Queues};
use pdp_proto::limits::{QUEUE_FRAMES_MAX, WEIGHT_MAX};
use pdp_proto::mux::{EgressConfig, QueueConfig};
use pdp_proto::slowpath::{Filter, SlowPathReply, SlowPathRequest};

use crate::input::FuzzInput;

/// Most filters.
const FILTERS: u32 = 40;

/// Spec of the two queues of the first port, the only one with queues: weight, frames, bytes.
const QUEUES: [(u16, u16, u32); 2] = [(3, 20, u32::MAX), (1, 4096, 9000)];

/// Port with these queues.
struct QueuePorts(Box<Queues>);

impl AtPorts for QueuePorts {
    fn at(&mut self, vport: u8) -> Option<&mut Queues> {
        (vport == 0).then_some(&mut *self.0)
    }

    fn each(&mut self, act: &mut dyn FnMut(&mut Queues)) {
        act(&mut self.0);
    }
}

/// Packets of the socket, each preceded by its length. Messages are written back unchanged. Each
/// commit changes the filters like a plain map of them, completely or not at all.
pub(crate) fn slowpath(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let pieces = usize::from(input.byte()) + 1;
    let mut actions = Actions::new(FILTERS, 8);
    (actions.short, actions.long) =
        (Some(with_capacity(FILTERS, 1)), Some(with_capacity(FILTERS, 2)));
    let queue = |(weight, frames, bytes): (u16, u16, u32)| QueueConfig {
        name: weight.to_string(),
        weight: weight.into(),
        frames: frames.into(),
        bytes: if bytes == u32::MAX { 0 } else { bytes.into() },
        ..QueueConfig::default()
    };
    let Some(queues) = Queues::of(&QUEUES.map(queue), &EgressConfig::default()) else { return };
    let mut ports = QueuePorts(queues);
    let mut kept = (BTreeMap::<u32, Filter>::new(), [QueueParameters::default(); 2]);
    let mut changes = ChangeSet::default();
    while !input.0.is_empty() {
        let length = usize::from(u16::from_be_bytes([input.byte(), input.byte()]));
        let (packet, rest) = input.0.split_at(length.min(input.0.len()));
        input.0 = rest;
        replies(packet);
        let mut packet = packet;
        while let Ok(Some(request)) = SlowPathRequest::decode(&mut packet) {
            let mut again = Vec::new();
            request.encode(&mut again);
            assert_eq!(SlowPathRequest::decode(&mut &again[..]), Ok(Some(request.clone())));
            match request {
                // Higher numbers were refused earlier.
                SlowPathRequest::Set(filter) if filter.id < FILTERS => {
                    changes.all.push(FilterChange::Set(filter))
                }
                SlowPathRequest::Remove(id) => changes.all.push(FilterChange::Remove(id)),
                SlowPathRequest::Queue(setting)
                    if setting.weight <= WEIGHT_MAX && setting.frames <= QUEUE_FRAMES_MAX =>
                {
                    changes.queues.push(setting);
                }
                SlowPathRequest::Commit { sweep, .. } => {
                    changes.sweep = sweep;
                    let changes = std::mem::take(&mut changes);
                    commit(&mut actions, &mut ports, &mut kept, changes, pieces);
                }
                _ => {}
            }
        }
    }
}

fn replies(mut packet: &[u8]) {
    while let Ok(Some(reply)) = SlowPathReply::decode(&mut packet) {
        let mut again = Vec::new();
        reply.encode(&mut again);
        // Texts and lists are cut.
        assert!(again.len() < 1 << 16);
        assert!(matches!(SlowPathReply::decode(&mut &again[..]), Ok(Some(_))));
    }
}

fn commit(
    actions: &mut Actions,
    ports: &mut QueuePorts,
    (kept, settings): &mut (BTreeMap<u32, Filter>, [QueueParameters; 2]),
    mut changes: ChangeSet,
    pieces: usize,
) {
    let mut after = kept.clone();
    let mut set = Vec::new();
    for change in &changes.all {
        match change {
            FilterChange::Set(filter) => {
                after.insert(filter.id, filter.under_mask());
                set.push(filter.id);
            }
            FilterChange::Remove(id) => _ = after.remove(id),
        }
    }
    if changes.sweep {
        after.retain(|id, _| set.contains(id));
    }
    loop {
        let mut left = pieces;
        let mut go_on = || {
            left = left.saturating_sub(1);
            left > 0
        };
        if actions.apply(&mut changes, ports, &mut go_on) {
            break;
        }
    }
    if matches!(changes.result, Some(Ok(_))) {
        *kept = after;
        if changes.sweep {
            *settings = [QueueParameters::default(); 2];
        }
        for it in &changes.queues {
            let here = usize::from(it.queue).checked_sub(1).and_then(|at| settings.get_mut(at));
            let here = here.filter(|_| it.vport == 0).expect("others are refused");
            (here.weight, here.frames, here.bytes) = (it.weight as u16, it.frames as u16, it.bytes);
        }
    }
    for ((is, set), spec) in ports.0.states(0).zip(settings).zip(QUEUES) {
        let or = |set: u32, spec: u32| if set == 0 { spec } else { set };
        let bytes = Some(or(set.bytes, spec.2)).filter(|bytes| *bytes < u32::MAX).unwrap_or(0);
        let expected = (or(set.weight.into(), spec.0.into()), or(set.frames.into(), spec.1.into()));
        assert_eq!((is.weight, is.frames, is.bytes), (expected.0, expected.1, bytes));
        assert!(is.frames <= spec.1.into() && (bytes == 0 || bytes <= spec.2));
    }
    for id in 0..FILTERS {
        assert_eq!(actions.filter(id).as_ref(), kept.get(&id));
    }
    assert_eq!(actions.count() as usize, kept.len());
}
