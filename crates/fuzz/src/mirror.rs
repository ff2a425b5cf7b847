//! The route mirror: what the kernel says, or somebody in its place.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use pdp_mirror::kernel::{Kind, messages};
use pdp_mirror::table::{NEIGHBOURS_MAX, Table};
use pdp_proto::routes::{GroupId, Hop, Resolved, Target, ToGuest, Vport};

use crate::input::Input;

/// Few enough that a fuzzer reaches it.
const ROUTES_MAX: u64 = 16;

/// Prefixes of a part of a snapshot.
const PART: usize = 4;

/// What a guest holds.
#[derive(Debug, Default, PartialEq)]
struct Guest {
    vports: BTreeMap<u16, Vport>,
    locals: BTreeMap<IpAddr, bool>,
    groups: BTreeMap<GroupId, (Vec<Hop>, u32)>,
    routes: BTreeMap<IpNet, Target>,
    neighbours: BTreeMap<(u16, IpAddr), [u8; 6]>,
    forwarding: (bool, bool),
}

impl Guest {
    fn apply(&mut self, message: ToGuest) {
        match message {
            ToGuest::Vport(vport) => drop(self.vports.insert(vport.index, vport)),
            ToGuest::Local { address, own } => drop(self.locals.insert(address, own)),
            ToGuest::LocalGone(address) => {
                assert!(self.locals.remove(&address).is_some(), "{address}");
            }
            ToGuest::Group { id, hops, mtu } => {
                assert!(!hops.is_empty(), "group {id} leads nowhere");
                drop(self.groups.insert(id, (hops, mtu)));
            }
            ToGuest::GroupGone(id) => {
                assert!(self.groups.remove(&id).is_some(), "no group {id}");
                let target = Target::Group(id);
                assert!(self.routes.values().all(|other| *other != target), "{id} is in use");
            }
            ToGuest::Route { prefix, target } => {
                if let Target::Group(id) = target {
                    assert!(self.groups.contains_key(&id), "no group {id} yet");
                }
                self.routes.insert(prefix, target);
            }
            ToGuest::RouteGone(prefix) => {
                assert!(self.routes.remove(&prefix).is_some(), "no route {prefix}");
            }
            ToGuest::Neighbour { vport, address, mac } => match mac {
                Some(mac) => drop(self.neighbours.insert((vport, address), mac)),
                None => drop(self.neighbours.remove(&(vport, address))),
            },
            ToGuest::Forwarding { v4, v6 } => self.forwarding = (v4, v6),
            ToGuest::Choosing { .. }
            | ToGuest::Begin
            | ToGuest::End
            | ToGuest::Barrier(_)
            | ToGuest::Dump(_) => {}
        }
    }

    /// Groups by what they are, not by number.
    fn resolved(&self) -> BTreeMap<IpNet, Resolved> {
        let resolve = |(prefix, target): (&IpNet, &Target)| match target {
            Target::Group(id) => (*prefix, Resolved::Hops(self.groups[id].0.clone())),
            Target::Punt => (*prefix, Resolved::Punt),
            Target::Drop => (*prefix, Resolved::Drop),
        };
        self.routes.iter().map(resolve).collect()
    }
}

fn table() -> Table {
    Table::new(vec!["eth0".into(), "eth1".into()], ROUTES_MAX, 7)
}

/// Datagrams as notifications and in dumps, with flushes between. A guest that was told of each
/// change holds what one is told that comes at the end.
pub(crate) fn netlink(bytes: &[u8]) {
    let mut input = Input(bytes);
    let (mut table, mut early) = (table(), Guest::default());
    let mut dumping = false;
    while !input.is_empty() {
        let what = input.byte();
        match what & 7 {
            0..=3 => {
                let datagram = input.counted();
                for message in messages(datagram) {
                    assert!(message.payload.len() <= datagram.len());
                    message.error();
                    message.request();
                    let Some(event) = message.event() else { continue };
                    if dumping && what & 1 == 0 {
                        table.dumped(event);
                    } else {
                        table.apply(&event);
                    }
                }
            }
            4 => table.flush(&mut |message| early.apply(message)),
            5 if !dumping => {
                table.begin(Kind::ALL[usize::from(what >> 3) % Kind::ALL.len()]);
                dumping = true;
            }
            5 | 6 if dumping => {
                table.end(what & 8 != 0);
                dumping = false;
            }
            7 if dumping => {
                table.abort();
                dumping = false;
            }
            _ => drop(table.take_suspects()),
        }
        let counts = table.counts();
        assert!(counts.routes.iter().sum::<u64>() <= ROUTES_MAX, "{counts:?}");
        assert!(counts.neighbours <= NEIGHBOURS_MAX as u64);
    }
    table.flush(&mut |message| early.apply(message));
    let mut late = Guest::default();
    table.snapshot_head(&mut |message| late.apply(message));
    let mut from = None;
    while let Some(last) = table.snapshot_routes(from, PART, &mut |message| late.apply(message)) {
        assert!(from.is_none_or(|from| from < last), "a snapshot goes on");
        from = Some(last);
    }
    assert_eq!(early.resolved(), late.resolved());
    assert_eq!(early, late);
    // Nothing is told twice.
    table.flush(&mut |message| panic!("told again: {message:?}"));
}
