//! What programs of control guests say, and what the mux makes of it.

use std::collections::BTreeMap;

use pdp_mux::actions::{Actions, Change, Changes, room_for};
use pdp_mux::queues::{AtPorts, Queues, Setting};
use pdp_proto::limits::{QUEUE_FRAMES_MAX, WEIGHT_MAX};
use pdp_proto::mux::{Leaving, Queue};
use pdp_proto::slowpath::{Filter, Reply, Request};

use crate::input::Input;

/// Filters that there may be.
const FILTERS: u32 = 40;

/// What the spec says of the two queues of the first port, which is the only one that has some: weight, frames, bytes.
const QUEUES: [(u16, u16, u32); 2] = [(3, 20, u32::MAX), (1, 4096, 9000)];

/// These.
struct Ports(Box<Queues>);

impl AtPorts for Ports {
    fn at(&mut self, vport: u8) -> Option<&mut Queues> {
        (vport == 0).then_some(&mut *self.0)
    }

    fn each(&mut self, act: &mut dyn FnMut(&mut Queues)) {
        act(&mut self.0);
    }
}

/// Packets of the socket, each with its length before it: what is read is written back the same, and the changes among
/// it leave the filters that a map of them has, all of a commit's or none.
pub(crate) fn slowpath(bytes: &[u8]) {
    let mut input = Input(bytes);
    let pieces = usize::from(input.byte()) + 1;
    let mut actions = Actions::new(FILTERS, 8);
    (actions.short, actions.long) = (Some(room_for(FILTERS, 1)), Some(room_for(FILTERS, 2)));
    let queue = |(weight, frames, bytes): (u16, u16, u32)| Queue {
        name: weight.to_string(),
        weight: weight.into(),
        frames: frames.into(),
        bytes: if bytes == u32::MAX { 0 } else { bytes.into() },
        ..Queue::default()
    };
    let Some(queues) = Queues::of(&QUEUES.map(queue), &Leaving::default()) else { return };
    let mut ports = Ports(queues);
    let mut kept = (BTreeMap::<u32, Filter>::new(), [Setting::default(); 2]);
    let mut changes = Changes::default();
    while !input.0.is_empty() {
        let length = usize::from(u16::from_be_bytes([input.byte(), input.byte()]));
        let (packet, rest) = input.0.split_at(length.min(input.0.len()));
        input.0 = rest;
        replies(packet);
        let mut packet = packet;
        while let Ok(Some(request)) = Request::take(&mut packet) {
            let mut again = Vec::new();
            request.put(&mut again);
            assert_eq!(Request::take(&mut &again[..]), Ok(Some(request.clone())));
            match request {
                // What is beyond these is refused before.
                Request::Set(filter) if filter.id < FILTERS => {
                    changes.all.push(Change::Set(filter))
                }
                Request::Remove(id) => changes.all.push(Change::Remove(id)),
                Request::Queue(setting)
                    if setting.weight <= WEIGHT_MAX && setting.frames <= QUEUE_FRAMES_MAX =>
                {
                    changes.queues.push(setting);
                }
                Request::Commit { sweep, .. } => {
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
    while let Ok(Some(reply)) = Reply::take(&mut packet) {
        let mut again = Vec::new();
        reply.put(&mut again);
        // Texts and lists are cut.
        assert!(again.len() < 1 << 16);
        assert!(matches!(Reply::take(&mut &again[..]), Ok(Some(_))));
    }
}

fn commit(
    actions: &mut Actions,
    ports: &mut Ports,
    (kept, settings): &mut (BTreeMap<u32, Filter>, [Setting; 2]),
    mut changes: Changes,
    pieces: usize,
) {
    let mut after = kept.clone();
    let mut set = Vec::new();
    for change in &changes.all {
        match change {
            Change::Set(filter) => {
                after.insert(filter.id, filter.under_mask());
                set.push(filter.id);
            }
            Change::Remove(id) => _ = after.remove(id),
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
            *settings = [Setting::default(); 2];
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
        let wanted = (or(set.weight.into(), spec.0.into()), or(set.frames.into(), spec.1.into()));
        assert_eq!((is.weight, is.frames, is.bytes), (wanted.0, wanted.1, bytes));
        assert!(is.frames <= spec.1.into() && (bytes == 0 || bytes <= spec.2));
    }
    for id in 0..FILTERS {
        assert_eq!(actions.filter(id).as_ref(), kept.get(&id));
    }
    assert_eq!(actions.count() as usize, kept.len());
}
