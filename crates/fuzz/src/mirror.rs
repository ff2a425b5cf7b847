//! The route mirror: messages from the kernel, or from an impostor.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use pdp_mirror::kernel::{DumpKind, event};
use pdp_mirror::table::{MirrorTable, NEIGHBOURS_MAX};
use pdp_netlink::messages;
use pdp_proto::routes::{GroupHop, GroupId, ResolvedRoute, RouteDecision, ToGuest, Vport};

use crate::input::FuzzInput;

/// Small enough for a fuzzer to reach.
const ROUTES_MAX: u64 = 16;

/// Prefixes in one part of a snapshot.
const PART: usize = 4;

/// State of a guest.
#[derive(Debug, Default, PartialEq)]
struct MirrorGuest {
    vports: BTreeMap<u16, Vport>,
    locals: BTreeMap<IpAddr, bool>,
    groups: BTreeMap<GroupId, (Vec<GroupHop>, u32)>,
    routes: BTreeMap<IpNet, RouteDecision>,
    neighbours: BTreeMap<(u16, IpAddr), [u8; 6]>,
    forwarding: (bool, bool),
}

impl MirrorGuest {
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
                let target = RouteDecision::Group(id);
                assert!(self.routes.values().all(|other| *other != target), "{id} is in use");
            }
            ToGuest::Route { prefix, target } => {
                if let RouteDecision::Group(id) = target {
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

    /// Resolves groups to their contents, as numbers may differ.
    fn resolved(&self) -> BTreeMap<IpNet, ResolvedRoute> {
        let resolve = |(prefix, target): (&IpNet, &RouteDecision)| match target {
            RouteDecision::Group(id) => (*prefix, ResolvedRoute::Hops(self.groups[id].0.clone())),
            RouteDecision::Punt => (*prefix, ResolvedRoute::Punt),
            RouteDecision::Drop => (*prefix, ResolvedRoute::Drop),
        };
        self.routes.iter().map(resolve).collect()
    }
}

fn table() -> MirrorTable {
    MirrorTable::new(vec!["eth0".into(), "eth1".into()], ROUTES_MAX, 7)
}

/// Datagrams as notifications and in dumps, with flushes between. A guest that got each change has
/// the same state as a guest that connects at the end.
pub(crate) fn netlink(bytes: &[u8]) {
    let mut input = FuzzInput(bytes);
    let (mut table, mut early) = (table(), MirrorGuest::default());
    let mut dumping = false;
    while !input.is_empty() {
        let choice = input.byte();
        match choice & 7 {
            0..=3 => {
                let datagram = input.counted();
                for message in messages(datagram) {
                    assert!(message.payload.len() <= datagram.len());
                    let _ = message.result();
                    message.request();
                    let Some(event) = event(&message) else { continue };
                    if dumping && choice & 1 == 0 {
                        table.dumped(event);
                    } else {
                        table.apply(&event);
                    }
                }
            }
            4 => table.flush(&mut |message| early.apply(message)),
            5 if !dumping => {
                table.begin(DumpKind::ALL[usize::from(choice >> 3) % DumpKind::ALL.len()]);
                dumping = true;
            }
            5 | 6 if dumping => {
                table.end(choice & 8 != 0);
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
    let mut late_guest = MirrorGuest::default();
    table.snapshot_head(&mut |message| late_guest.apply(message));
    let mut from = None;
    while let Some(last) =
        table.snapshot_routes(from, PART, &mut |message| late_guest.apply(message))
    {
        assert!(from.is_none_or(|from| from < last), "a snapshot goes on");
        from = Some(last);
    }
    assert_eq!(early.resolved(), late_guest.resolved());
    assert_eq!(early, late_guest);
    // Nothing is sent twice.
    table.flush(&mut |message| panic!("told again: {message:?}"));
}
