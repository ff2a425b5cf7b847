//! Fresh listing of a kernel's routes: those of the main table, and the
//! prefixes of the local table that are not addresses.
//!
//! Guarantees independence from any copy, and output prefix by prefix. It stores only interfaces,
//! nexthop objects, the local table, and the routes of the current prefix.
//!
//! Limits: those of [`MirrorTable`](crate::table::MirrorTable), and the caller's limit on stored
//! objects.

use std::io;

use ipnet::IpNet;
use pdp_proto::routes::ResolvedRoute;

use crate::follower::{DumpPart, DumpRun};
use crate::kernel::{DumpKind, KernelEvent, KernelTable};
use crate::table::MirrorTable;

/// A listing in progress, of the thread's network namespace.
pub struct Listing {
    fresh: MirrorTable,
    /// Kinds still to dump, in reverse order.
    kinds: Vec<DumpKind>,
    run: Option<(DumpRun, DumpKind)>,
    kept: usize,
    kept_max: usize,
}

impl Listing {
    /// Starts a listing. Hops over `vports` have their index among these. `kept_max` limits the
    /// stored objects ([`KernelEvent::object_count`]).
    pub fn new(vports: Vec<String>, kept_max: usize) -> Self {
        let unneeded = |kind: &DumpKind| matches!(kind, DumpKind::Neighbours);
        Self {
            fresh: MirrorTable::new(vports, u64::MAX, 0),
            kinds: DumpKind::ALL.into_iter().rev().filter(|kind| !unneeded(kind)).collect(),
            run: None,
            kept: 0,
            kept_max,
        }
    }

    /// Returns the next prefixes and their routes, possibly none; `None` at
    /// the end. Takes a few milliseconds at most.
    ///
    /// # Errors
    /// The kernel fails to dump, or has more objects than may be
    /// stored. Then the earlier output is incomplete.
    pub fn part(&mut self) -> Result<Option<Vec<(IpNet, ResolvedRoute)>>, String> {
        let Some((run, kind)) = &mut self.run else { return self.next_kind() };
        let failed = |error: &io::Error| failed(*kind, error);
        let is_main = matches!(kind, DumpKind::Routes(_, KernelTable::Main));
        let (events, last) = match run.part().map_err(|error| failed(&error))? {
            DumpPart::Events(events) => (events, false),
            DumpPart::Last(events, _) => (events, true),
            DumpPart::Failed => return Err(failed(&io::ErrorKind::Interrupted.into())),
        };
        let mut routes = Vec::new();
        for event in events {
            match event {
                KernelEvent::Route(route, _) if is_main => routes.extend(self.fresh.resolve(route)),
                event => {
                    self.kept += event.object_count();
                    self.fresh.dumped(event);
                }
            }
            if self.kept + self.fresh.count() > self.kept_max {
                return Err(format!(
                    "more than {} interfaces, nexthop objects, local routes, and routes of one prefix",
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

    /// Begins the next dump. After the last one, the local table follows.
    fn next_kind(&mut self) -> Result<Option<Vec<(IpNet, ResolvedRoute)>>, String> {
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

/// True if a prefix covers `within` or is inside it; always true without `within`.
pub fn is_within(within: Option<&IpNet>, prefix: &IpNet) -> bool {
    within.is_none_or(|within| within.contains(prefix) || prefix.contains(within))
}

fn failed(kind: DumpKind, error: &io::Error) -> String {
    format!("the kernel's dump of {kind:?} failed ({error}): try again")
}
