//! Numbered events, the newest of them, and who has seen which.
//!
//! Pure. Of [`EVENTS_MAX`] events the oldest of whoever has most goes first, so that nobody's storm takes what there is
//! of others. A tenant's events have numbers of their own, which say nothing of others' activity. A reader has a
//! place in the log ([`Place`]): what was lost after it is counted, never left out in silence.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use pdp_api::{Cursor, WatchEvent};

use crate::access::{Scope, hex};

/// Events that are kept.
pub const EVENTS_MAX: usize = 10_000;

/// Bytes of an event's message.
pub const MESSAGE_BYTES_MAX: usize = 512;

/// Events that are read at a time.
const READ_MAX: usize = 256;

/// What tenants know of who is none.
const OPERATOR: &str = "operator";

/// The log.
#[derive(Debug)]
pub struct Log {
    boot: String,
    /// Number of the newest event.
    seq: u64,
    events: BTreeMap<u64, Arc<Kept>>,
    owners: BTreeMap<String, Owner>,
    /// The newest event that is not kept.
    lost: u64,
    /// The newest one of those whose owner is forgotten.
    forgotten: u64,
}

#[derive(Debug)]
struct Kept {
    owner: String,
    /// Its number among its owner's.
    own: u64,
    /// Somebody asked for it who is no tenant.
    by_node: bool,
    event: WatchEvent,
}

/// A tenant, a vnet that is no tenant's, or the node.
#[derive(Debug)]
struct Owner {
    boot: String,
    count: u64,
    kept: VecDeque<u64>,
    /// Its newest event that is not kept.
    lost: u64,
}

/// Whose events somebody reads.
#[derive(Clone, Debug)]
pub struct Filter {
    /// What who asks may know of.
    pub scope: Scope,
    /// Only of this vnet.
    pub vnet: Option<String>,
}

impl Filter {
    /// Whether something about this vnet, or about none, is read.
    pub fn has(&self, vnet: Option<&str>) -> bool {
        match (&self.vnet, vnet) {
            (Some(wanted), vnet) => vnet == Some(wanted) && self.scope.sees(wanted),
            (None, Some(vnet)) => self.scope.sees(vnet),
            (None, None) => self.scope == Scope::Node,
        }
    }

    /// The one owner of all that is read; `None`: there are several.
    fn owner(&self) -> Option<String> {
        match (&self.vnet, self.scope.tenant()) {
            (Some(vnet), _) => Some(owner_of(vnet)),
            (None, Some(tenant)) => Some(tenant_owner(tenant)),
            (None, None) => None,
        }
    }
}

/// How far a reader is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The newest event that it has seen, or that is not for it.
    at: u64,
    /// The same among its owner's, where there is one and that is known.
    own: Option<u64>,
    /// What was lost up to here is not told.
    told: u64,
}

/// What came of a look.
#[derive(Debug, PartialEq)]
pub enum Read {
    /// The next events, perhaps none.
    Events(Vec<WatchEvent>),
    /// There were others before, which are not kept: so many at most.
    Lost(u64),
}

fn tenant_owner(tenant: &str) -> String {
    // No vnet is called so.
    format!("{tenant}.")
}

fn owner_of(vnet: &str) -> String {
    pdp_spec::tenant_of(vnet).map_or_else(|| vnet.to_owned(), tenant_owner)
}

/// Names one run, so that the numbers of another are not taken for its own.
fn boot() -> String {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    // Without random bytes: the time, which no other run has.
    if !matches!(rustix::rand::getrandom(&mut bytes, flags), Ok(8)) {
        bytes = crate::ledger::now_ns().to_ne_bytes();
    }
    hex(&bytes)
}

impl Owner {
    fn new() -> Self {
        Self { boot: boot(), count: 0, kept: VecDeque::new(), lost: 0 }
    }

    /// How many are kept up to `at`.
    fn kept_until(&self, at: u64) -> usize {
        self.kept.partition_point(|seq| *seq <= at)
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            boot: boot(),
            seq: 0,
            events: BTreeMap::new(),
            owners: BTreeMap::new(),
            lost: 0,
            forgotten: 0,
        }
    }
}

impl Log {
    /// Adds an event; its number is given here. `by_node`: who asked for it is no tenant, and nobody that one knows.
    pub fn push(&mut self, mut event: WatchEvent, by_node: bool) {
        if let Some(message) = &mut event.message {
            message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
            if message.contains(char::is_control) {
                *message = message.replace(char::is_control, " ");
            }
        }
        let name = event.vnet().map(owner_of).unwrap_or_default();
        if self.events.len() >= EVENTS_MAX {
            self.make_room();
        }
        self.seq += 1;
        let owner = self.owners.entry(name.clone()).or_insert_with(Owner::new);
        owner.count += 1;
        owner.kept.push_back(self.seq);
        self.events
            .insert(self.seq, Arc::new(Kept { owner: name, own: owner.count, by_node, event }));
    }

    fn make_room(&mut self) {
        let most = self.owners.iter_mut().max_by_key(|(_, owner)| owner.kept.len());
        let Some((name, owner)) = most else { return };
        let Some(seq) = owner.kept.pop_front() else { return };
        self.events.remove(&seq);
        self.lost = self.lost.max(seq);
        owner.lost = seq;
        if owner.kept.is_empty() {
            self.forgotten = self.forgotten.max(seq);
            let name = name.clone();
            self.owners.remove(&name);
        }
    }

    /// What a reader's numbers belong to, and the newest of them.
    pub fn cursor(&mut self, filter: &Filter) -> Cursor {
        let Some(tenant) = filter.scope.tenant() else {
            return Cursor { boot: self.boot.clone(), seq: self.seq };
        };
        let owner = self.owners.entry(tenant_owner(tenant)).or_insert_with(Owner::new);
        Cursor { boot: owner.boot.clone(), seq: owner.count }
    }

    /// The place after all that there is.
    pub fn end(&self, filter: &Filter) -> Place {
        let count = |name: String| self.owners.get(&name).map_or(0, |owner| owner.count);
        Place { at: self.seq, own: filter.owner().map(count), told: 0 }
    }

    /// The place after a cursor; `None`: it is of another run, or of somebody else.
    pub fn find(&self, filter: &Filter, cursor: &Cursor) -> Option<Place> {
        let Some(tenant) = filter.scope.tenant() else {
            let known = cursor.boot == self.boot && cursor.seq <= self.seq;
            return known.then_some(Place { at: cursor.seq, ..Place::default() });
        };
        let owner = self.owners.get(&tenant_owner(tenant))?;
        if cursor.boot != owner.boot || cursor.seq > owner.count {
            return None;
        }
        let first = owner.count - owner.kept.len() as u64 + 1;
        let at = match cursor.seq.checked_sub(first) {
            Some(index) => {
                usize::try_from(index).ok().and_then(|at| owner.kept.get(at)).copied()?
            }
            // After the newest that is not kept, or before it.
            None if cursor.seq + 1 == first => owner.lost,
            None => owner.lost.saturating_sub(1),
        };
        Some(Place { at, own: Some(cursor.seq), told: 0 })
    }

    /// The place before the first event that is kept and not older than this, milliseconds since 1970.
    pub fn since(&self, at_ms: u64) -> Place {
        // Not in order where somebody sets the clock; all are looked at, once.
        let first = self.events.iter().find(|(_, kept)| kept.event.at_ms >= at_ms);
        let at = first.map_or(self.seq, |(seq, _)| seq - 1);
        Place { at, own: None, told: self.lost.max(self.forgotten) }
    }

    /// What comes after a place, which moves on.
    pub fn read(&self, filter: &Filter, place: &mut Place) -> Read {
        let name = filter.owner();
        let owner = name.as_ref().and_then(|name| self.owners.get(name));
        let lost = match (&name, owner) {
            (None, _) => self.lost,
            (Some(_), Some(owner)) => owner.lost.max(self.forgotten),
            (Some(_), None) => self.forgotten,
        };
        let lost = lost > place.at.max(place.told);
        if lost {
            let count = match (owner, place.own) {
                (Some(owner), Some(own)) => {
                    let kept = owner.kept.len() - owner.kept_until(place.at);
                    owner.count.saturating_sub(own).saturating_sub(kept as u64)
                }
                _ => {
                    let kept = self.events.range(place.at + 1..).count() as u64;
                    (self.seq - place.at).saturating_sub(kept)
                }
            };
            *place = self.end(filter);
            return Read::Lost(count);
        }
        let kept: &mut dyn Iterator<Item = u64> = match owner {
            Some(owner) => &mut owner.kept.range(owner.kept_until(place.at)..).copied(),
            None if name.is_some() => &mut std::iter::empty(),
            None => &mut self.events.range(place.at + 1..).map(|(seq, _)| *seq),
        };
        let mut events = Vec::new();
        for seq in kept {
            let Some(kept) = self.events.get(&seq) else { continue };
            *place = Place { at: seq, own: place.own.map(|_| kept.own), ..*place };
            if filter.has(kept.event.vnet()) {
                events.push(self.shown(filter, seq, kept));
                if events.len() == READ_MAX {
                    return Read::Events(events);
                }
            }
        }
        *place = self.end(filter);
        Read::Events(events)
    }

    /// An event with the number that it has for a reader.
    fn shown(&self, filter: &Filter, seq: u64, kept: &Kept) -> WatchEvent {
        let (boot, seq) = match filter.scope {
            Scope::Node => (&self.boot, seq),
            Scope::Tenant(_) => {
                (self.owners.get(&kept.owner).map_or(&self.boot, |owner| &owner.boot), kept.own)
            }
        };
        let mut event = WatchEvent { boot: boot.clone(), seq, ..kept.event.clone() };
        if kept.by_node && filter.scope != Scope::Node && event.who.is_some() {
            event.who = Some(OPERATOR.into());
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(object: &str) -> WatchEvent {
        WatchEvent { object: object.into(), ..WatchEvent::default() }
    }

    fn node(vnet: Option<&str>) -> Filter {
        Filter { scope: Scope::Node, vnet: vnet.map(Into::into) }
    }

    fn tenant(name: &str) -> Filter {
        Filter { scope: Scope::Tenant(name.into()), vnet: None }
    }

    fn all(log: &Log, filter: &Filter, place: &mut Place) -> Result<Vec<WatchEvent>, u64> {
        let mut events = Vec::new();
        loop {
            match log.read(filter, place) {
                Read::Events(more) if more.is_empty() => return Ok(events),
                Read::Events(more) => events.extend(more),
                Read::Lost(count) => return Err(count),
            }
        }
    }

    #[test]
    fn nobodys_storm_takes_what_there_is_of_others() {
        let mut log = Log::default();
        log.push(event("vnet/acme.red"), false);
        log.push(event("mux"), false);
        let places = [node(None), node(Some("acme.red")), tenant("acme"), tenant("other")];
        let mut places = places.map(|filter| (log.end(&filter), filter));
        let first = log.cursor(&tenant("acme"));
        (0..3 * EVENTS_MAX).for_each(|_| log.push(event("vnet/other.blue/node/r1"), false));
        assert_eq!(log.events.len(), EVENTS_MAX);
        let lost = (2 * EVENTS_MAX + 2) as u64;
        let told: Vec<_> = places
            .iter_mut()
            .map(|(place, filter)| all(&log, filter, place).map(|events| events.len()))
            .collect();
        assert_eq!(told, [Err(lost), Ok(0), Ok(0), Err(lost)]);
        let mut begin = Place::default();
        assert_eq!(all(&log, &node(Some("acme.red")), &mut begin).unwrap().len(), 1);
        let mut found = log.find(&tenant("acme"), &first).unwrap();
        assert!(all(&log, &tenant("acme"), &mut found).unwrap().is_empty(), "it missed nothing");
    }

    #[test]
    fn since_a_time_is_what_is_kept_of_it() {
        let mut log = Log::default();
        for at_ms in 0..2 * EVENTS_MAX as u64 {
            log.push(WatchEvent { at_ms, ..event("vnet/acme.red") }, false);
        }
        let first = |at_ms: usize, filter: &Filter| {
            let mut place = log.since(at_ms as u64);
            all(&log, filter, &mut place).unwrap().first().map(|event| event.at_ms)
        };
        for filter in [node(None), tenant("acme")] {
            assert_eq!(first(EVENTS_MAX + 7, &filter), Some(EVENTS_MAX as u64 + 7));
            assert_eq!(first(0, &filter), Some(EVENTS_MAX as u64), "the oldest that is kept");
            assert_eq!(first(2 * EVENTS_MAX, &filter), None);
        }
        assert_eq!(first(0, &tenant("other")), None);
    }

    #[test]
    fn a_cursor_is_of_one_run_and_of_who_has_it() {
        let mut log = Log::default();
        (0..5).for_each(|_| log.push(event("vnet/acme.red"), false));
        log.push(event("vnet/other.red"), false);
        let (acme, other) = (tenant("acme"), tenant("other"));
        let (mine, others, all) = (log.cursor(&acme), log.cursor(&other), log.cursor(&node(None)));
        assert_eq!((mine.seq, others.seq, all.seq), (5, 1, 6));
        for (filter, cursor) in [(&acme, &others), (&acme, &all), (&other, &mine)] {
            assert_eq!(log.find(filter, cursor), None);
        }
        assert_eq!(Log::default().find(&node(None), &all), None, "another run's");
        let future = Cursor { seq: 7, ..all };
        assert_eq!(log.find(&node(None), &future), None);
        let mut place = log.find(&acme, &Cursor { seq: 3, ..mine }).unwrap();
        let Read::Events(events) = log.read(&acme, &mut place) else { panic!("kept") };
        assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn a_tenant_is_told_of_an_operator_and_not_which() {
        let mut log = Log::default();
        for (who, by_node) in [("user:root", true), ("token:7", false)] {
            log.push(WatchEvent { who: Some(who.into()), ..event("vnet/acme.red") }, by_node);
        }
        let who = |filter: &Filter| {
            let mut place = Place::default();
            let events = all(&log, filter, &mut place).unwrap();
            events.into_iter().filter_map(|event| event.who).collect::<Vec<_>>()
        };
        assert_eq!(who(&node(None)), ["user:root", "token:7"]);
        assert_eq!(who(&tenant("acme")), ["operator", "token:7"]);
    }

    #[test]
    fn what_is_told_fits_on_a_line_and_in_its_bound() {
        let mut log = Log::default();
        let message = Some(format!("\u{1b}[2J\n{}", "é".repeat(MESSAGE_BYTES_MAX)));
        let mut place = log.end(&node(None));
        log.push(WatchEvent { message, ..event("mux") }, false);
        let told = all(&log, &node(None), &mut place).unwrap().remove(0).message.unwrap();
        assert!(told.len() <= MESSAGE_BYTES_MAX && !told.contains(char::is_control), "{told}");
    }

    proptest! {
        /// Against a list of all that ever happened: what a reader gets is what happened in its scope, in
        /// order, or it is told that something is missing.
        #[test]
        fn nothing_is_missing_in_silence(
            steps in proptest::collection::vec((0usize..4, 1usize..4000), 1..12),
            looks in proptest::collection::vec(any::<bool>(), 12),
        ) {
            const OBJECTS: [&str; 4] = ["vnet/acme.a", "vnet/other.b", "vnet/c", "mux"];
            let mut log = Log::default();
            let filters = [node(None), node(Some("c")), tenant("acme"), tenant("other")];
            let mut places = filters.each_ref().map(|filter| log.end(filter));
            let mut happened: [u64; 4] = [0; 4];
            for ((what, count), look) in steps.into_iter().zip(looks) {
                for _ in 0..count {
                    log.push(event(OBJECTS[what]), false);
                    for (filter, happened) in filters.iter().zip(&mut happened) {
                        *happened += u64::from(filter.has(event(OBJECTS[what]).vnet()));
                    }
                }
                if !look {
                    continue;
                }
                for ((filter, place), happened) in filters.iter().zip(&mut places).zip(&mut happened) {
                    match all(&log, filter, place) {
                        Ok(events) => {
                            prop_assert_eq!(events.len() as u64, *happened);
                            prop_assert!(events.is_sorted_by_key(|event| event.seq));
                        }
                        Err(lost) => {
                            prop_assert!(lost > 0 && lost <= *happened.max(&mut log.seq));
                        }
                    }
                    *happened = 0;
                }
            }
            prop_assert!(log.events.len() <= EVENTS_MAX);
        }
    }
}
