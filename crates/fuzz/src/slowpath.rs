//! What programs of control guests say, and what the mux makes of it.

use std::collections::BTreeMap;

use pdp_mux::actions::{Actions, Change, Changes, Set};
use pdp_proto::slowpath::{Filter, Reply, Request};

use crate::input::Input;

/// Filters that there may be.
const FILTERS: u32 = 40;

/// Packets of the socket, each with its length before it: what is read is written back the same, and the changes among
/// it leave the filters that a map of them has, all of a commit's or none.
pub(crate) fn slowpath(bytes: &[u8]) {
    let mut input = Input(bytes);
    let pieces = usize::from(input.byte()) + 1;
    let mut actions = Actions::new(FILTERS, 8);
    actions.short = Some(Box::new(Set::new(FILTERS, 1)));
    actions.long = Some(Box::new(Set::new(FILTERS, 2)));
    let mut kept = BTreeMap::<u32, Filter>::new();
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
                Request::Commit { sweep, .. } => {
                    changes.sweep = sweep;
                    commit(&mut actions, &mut kept, std::mem::take(&mut changes), pieces);
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
    kept: &mut BTreeMap<u32, Filter>,
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
        if actions.apply(&mut changes, &mut go_on) {
            break;
        }
    }
    if matches!(changes.result, Some(Ok(_))) {
        *kept = after;
    }
    for id in 0..FILTERS {
        assert_eq!(actions.filter(id).as_ref(), kept.get(&id));
    }
    assert_eq!(actions.count() as usize, kept.len());
}
