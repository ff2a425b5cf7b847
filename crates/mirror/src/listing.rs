//! The routes of a kernel, read anew: those of the main table, and prefixes of the local table that are no addresses.
//!
//! Promises that they owe nothing to anybody's copy, and that routes are passed on prefix by prefix. Kept are only what
//! they are read with (interfaces, nexthop objects, the local table) and the routes of the prefix that is read.
//!
//! Limits: those of [`Table`]; things that are kept, as who asks says.

use std::io;

use ipnet::IpNet;
use pdp_proto::routes::Resolved;

use crate::follower::{DumpRun, Part};
use crate::kernel::{Event, Kind, Table as KernelTable};
use crate::table::Table;

/// A listing that is being made, of the network namespace that the thread is in.
pub struct Listing {
    fresh: Table,
    /// What is still to be dumped, the next one last.
    kinds: Vec<Kind>,
    run: Option<(DumpRun, Kind)>,
    kept: usize,
    kept_max: usize,
}

impl Listing {
    /// Hops over `vports` are told by their index among these. `kept_max`: things that may be kept ([`Event::things`]).
    pub fn new(vports: Vec<String>, kept_max: usize) -> Self {
        let unneeded = |kind: &Kind| matches!(kind, Kind::Neighbours);
        Self {
            fresh: Table::new(vports, u64::MAX, 0),
            kinds: Kind::ALL.into_iter().rev().filter(|kind| !unneeded(kind)).collect(),
            run: None,
            kept: 0,
            kept_max,
        }
    }

    /// The next prefixes and where they lead, maybe none; `None`: there are no more. Takes a few milliseconds at most.
    ///
    /// # Errors
    /// The kernel does not tell, or has more than may be kept: what was passed on is not all.
    pub fn part(&mut self) -> Result<Option<Vec<(IpNet, Resolved)>>, String> {
        let Some((run, kind)) = &mut self.run else { return self.next_kind() };
        let failed = |error: &io::Error| failed(*kind, error);
        let is_main = matches!(kind, Kind::Routes(_, KernelTable::Main));
        let (events, last) = match run.part().map_err(|error| failed(&error))? {
            Part::Events(events) => (events, false),
            Part::Last(events, _) => (events, true),
            Part::Failed => return Err(failed(&io::ErrorKind::Interrupted.into())),
        };
        let mut routes = Vec::new();
        for event in events {
            match event {
                Event::Route(route, _) if is_main => routes.extend(self.fresh.resolve(route)),
                event => {
                    self.kept += event.things();
                    self.fresh.dumped(event);
                }
            }
            if self.kept + self.fresh.gathered() > self.kept_max {
                return Err(format!(
                    "there are more than {} interfaces, nexthop objects, local routes, and routes of one prefix",
                    self.kept_max
                ));
            }
        }
        if last {
            self.run = None;
            match is_main {
                true => routes.extend(self.fresh.resolve_rest()),
                false => drop(self.fresh.end(false)),
            }
        }
        Ok(Some(routes))
    }

    /// Begins the next dump. After the last one it is the local table's turn.
    fn next_kind(&mut self) -> Result<Option<Vec<(IpNet, Resolved)>>, String> {
        let Some(kind) = self.kinds.pop() else {
            let local = self.fresh.resolve_local();
            return Ok((!local.is_empty()).then_some(local));
        };
        let run = DumpRun::start(kind).map_err(|error| failed(kind, &error))?;
        self.fresh.begin(kind);
        self.run = Some((run, kind));
        Ok(Some(Vec::new()))
    }
}

/// Whether a route of this prefix is wanted where only those that cover `within` or are inside it are.
pub fn is_within(within: Option<&IpNet>, prefix: &IpNet) -> bool {
    within.is_none_or(|within| within.contains(prefix) || prefix.contains(within))
}

fn failed(kind: Kind, error: &io::Error) -> String {
    format!("the kernel's dump of {kind:?} failed ({error}): try again")
}
