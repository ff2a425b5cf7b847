//! The event log: the newest events with numbers, and the positions of readers.
//!
//! Pure. At most [`EVENTS_MAX`] events are kept. The owner with the most events loses its
//! oldest first, so a burst of one owner's events does not displace those of others. A tenant's
//! events have their own numbers, which reveal nothing about others' activity. A reader has a
//! position in the log ([`LogPosition`]). Events that it loses are counted and reported.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use pdp_api::{EventCursor, WatchEvent};

use crate::access::AccessScope;
use crate::util::hex;

/// Events that are kept.
pub const EVENTS_MAX: usize = 10_000;

/// Longest message of an event, bytes.
pub const MESSAGE_BYTES_MAX: usize = 512;

/// Events that are read at one time.
const READ_MAX: usize = 256;

/// Identity that tenants see for all non-tenants.
const OPERATOR: &str = "operator";

/// The event log.
#[derive(Debug)]
pub struct EventLog {
    boot: String,
    /// Number of the newest event.
    seq: u64,
    events: BTreeMap<u64, Arc<LoggedEvent>>,
    owners: BTreeMap<String, OwnerEvents>,
    /// Number of the newest event that is not kept.
    lost: u64,
    /// The newest one whose owner is forgotten.
    forgotten: u64,
}

#[derive(Debug)]
struct LoggedEvent {
    owner: String,
    /// Number among the owner's events.
    own: u64,
    /// True if a client that is not a tenant caused it.
    by_node: bool,
    event: WatchEvent,
}

/// Events of a tenant, of a vnet without a tenant, or of the node.
#[derive(Debug)]
struct OwnerEvents {
    boot: String,
    count: u64,
    kept: VecDeque<u64>,
    /// The owner's newest event that is not kept.
    lost: u64,
}

/// Selection of events for a reader.
#[derive(Clone, Debug)]
pub struct EventFilter {
    /// Scope of the client.
    pub scope: AccessScope,
    /// Only events of this vnet, if set.
    pub vnet: Option<String>,
}

impl EventFilter {
    /// True if the reader gets events of this vnet, or of the node if `None`.
    pub fn selects(&self, vnet: Option<&str>) -> bool {
        match (&self.vnet, vnet) {
            (Some(wanted), vnet) => vnet == Some(wanted) && self.scope.sees(wanted),
            (None, Some(vnet)) => self.scope.sees(vnet),
            (None, None) => self.scope == AccessScope::Node,
        }
    }

    /// Returns the owner of all selected events; `None` if there are several.
    fn owner(&self) -> Option<String> {
        match (&self.vnet, self.scope.tenant()) {
            (Some(vnet), _) => Some(owner_of(vnet)),
            (None, Some(tenant)) => Some(tenant_owner(tenant)),
            (None, None) => None,
        }
    }
}

/// Position of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogPosition {
    /// Number of the newest event that it has seen, or that is not for it.
    at: u64,
    /// Number of that event among its owner's, if there is one owner and it is known.
    own: Option<u64>,
    /// Losses up to this event are not reported.
    reported: u64,
}

/// Result of a read.
#[derive(Debug, PartialEq)]
pub enum LogRead {
    /// The next events, perhaps none.
    Events(Vec<WatchEvent>),
    /// Earlier events were lost, at most this many.
    Lost(u64),
}

fn tenant_owner(tenant: &str) -> String {
    // No vnet has such a name.
    format!("{tenant}.")
}

fn owner_of(vnet: &str) -> String {
    pdp_spec::tenant_of(vnet).map_or_else(|| vnet.to_owned(), tenant_owner)
}

/// Returns an identifier of this run, so that numbers of another run are not taken for its own.
fn boot() -> String {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    // Without random bytes the time serves, which is unique to this run.
    if !matches!(rustix::rand::getrandom(&mut bytes, flags), Ok(8)) {
        bytes = crate::plan::allocations::now_ns().to_ne_bytes();
    }
    hex(&bytes)
}

impl OwnerEvents {
    fn new() -> Self {
        Self { boot: boot(), count: 0, kept: VecDeque::new(), lost: 0 }
    }

    /// Returns how many kept events have numbers up to `at`.
    fn kept_until(&self, at: u64) -> usize {
        self.kept.partition_point(|seq| *seq <= at)
    }
}

impl Default for EventLog {
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

impl EventLog {
    /// Adds an event and assigns its number. `by_node` is true if a client
    /// caused it that is not a tenant, so tenants do not learn its identity.
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
        let owner = self.owners.entry(name.clone()).or_insert_with(OwnerEvents::new);
        owner.count += 1;
        owner.kept.push_back(self.seq);
        self.events.insert(
            self.seq,
            Arc::new(LoggedEvent { owner: name, own: owner.count, by_node, event }),
        );
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

    /// Returns the newest number for a reader, and the run to which it belongs.
    pub fn cursor(&mut self, filter: &EventFilter) -> EventCursor {
        let Some(tenant) = filter.scope.tenant() else {
            return EventCursor { boot: self.boot.clone(), seq: self.seq };
        };
        let owner = self.owners.entry(tenant_owner(tenant)).or_insert_with(OwnerEvents::new);
        EventCursor { boot: owner.boot.clone(), seq: owner.count }
    }

    /// Returns the position after all events.
    pub fn end(&self, filter: &EventFilter) -> LogPosition {
        let count = |name: String| self.owners.get(&name).map_or(0, |owner| owner.count);
        LogPosition { at: self.seq, own: filter.owner().map(count), reported: 0 }
    }

    /// Returns the position after a cursor; `None` if it belongs to another run or client.
    pub fn find(&self, filter: &EventFilter, cursor: &EventCursor) -> Option<LogPosition> {
        let Some(tenant) = filter.scope.tenant() else {
            let valid = cursor.boot == self.boot && cursor.seq <= self.seq;
            return valid.then_some(LogPosition { at: cursor.seq, ..LogPosition::default() });
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
            // After the newest event that is not kept, or before it.
            None if cursor.seq + 1 == first => owner.lost,
            None => owner.lost.saturating_sub(1),
        };
        Some(LogPosition { at, own: Some(cursor.seq), reported: 0 })
    }

    /// Returns the position before the first kept event that is not
    /// older than this, milliseconds since 1970.
    pub fn since(&self, at_ms: u64) -> LogPosition {
        // If somebody sets the clock the events are not in order, so all are checked once.
        let first = self.events.iter().find(|(_, kept)| kept.event.at_ms >= at_ms);
        let at = first.map_or(self.seq, |(seq, _)| seq - 1);
        LogPosition { at, own: None, reported: self.lost.max(self.forgotten) }
    }

    /// Returns the events after a position and advances it.
    pub fn read(&self, filter: &EventFilter, place: &mut LogPosition) -> LogRead {
        let name = filter.owner();
        let owner = name.as_ref().and_then(|name| self.owners.get(name));
        let lost = match (&name, owner) {
            (None, _) => self.lost,
            (Some(_), Some(owner)) => owner.lost.max(self.forgotten),
            (Some(_), None) => self.forgotten,
        };
        let lost = lost > place.at.max(place.reported);
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
            return LogRead::Lost(count);
        }
        let kept: &mut dyn Iterator<Item = u64> = match owner {
            Some(owner) => &mut owner.kept.range(owner.kept_until(place.at)..).copied(),
            None if name.is_some() => &mut std::iter::empty(),
            None => &mut self.events.range(place.at + 1..).map(|(seq, _)| *seq),
        };
        let mut events = Vec::new();
        for seq in kept {
            let Some(kept) = self.events.get(&seq) else { continue };
            *place = LogPosition { at: seq, own: place.own.map(|_| kept.own), ..*place };
            if filter.selects(kept.event.vnet()) {
                events.push(self.shown(filter, seq, kept));
                if events.len() == READ_MAX {
                    return LogRead::Events(events);
                }
            }
        }
        *place = self.end(filter);
        LogRead::Events(events)
    }

    /// Returns an event with its number for a reader.
    fn shown(&self, filter: &EventFilter, seq: u64, kept: &LoggedEvent) -> WatchEvent {
        let (boot, seq) = match filter.scope {
            AccessScope::Node => (&self.boot, seq),
            AccessScope::Tenant(_) => {
                (self.owners.get(&kept.owner).map_or(&self.boot, |owner| &owner.boot), kept.own)
            }
        };
        let mut event = WatchEvent { boot: boot.clone(), seq, ..kept.event.clone() };
        if kept.by_node && filter.scope != AccessScope::Node && event.who.is_some() {
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

    fn node(vnet: Option<&str>) -> EventFilter {
        EventFilter { scope: AccessScope::Node, vnet: vnet.map(Into::into) }
    }

    fn tenant(name: &str) -> EventFilter {
        EventFilter { scope: AccessScope::Tenant(name.into()), vnet: None }
    }

    fn all(
        log: &EventLog,
        filter: &EventFilter,
        place: &mut LogPosition,
    ) -> Result<Vec<WatchEvent>, u64> {
        let mut events = Vec::new();
        loop {
            match log.read(filter, place) {
                LogRead::Events(more) if more.is_empty() => return Ok(events),
                LogRead::Events(more) => events.extend(more),
                LogRead::Lost(count) => return Err(count),
            }
        }
    }

    #[test]
    fn event_flood_evicts_no_other_owners_events() {
        let mut log = EventLog::default();
        log.push(event("vnet/acme.red"), false);
        log.push(event("mux"), false);
        let places = [node(None), node(Some("acme.red")), tenant("acme"), tenant("other")];
        let mut places = places.map(|filter| (log.end(&filter), filter));
        let first = log.cursor(&tenant("acme"));
        (0..3 * EVENTS_MAX).for_each(|_| log.push(event("vnet/other.blue/node/r1"), false));
        assert_eq!(log.events.len(), EVENTS_MAX);
        let lost = (2 * EVENTS_MAX + 2) as u64;
        let reported: Vec<_> = places
            .iter_mut()
            .map(|(place, filter)| all(&log, filter, place).map(|events| events.len()))
            .collect();
        assert_eq!(reported, [Err(lost), Ok(0), Ok(0), Err(lost)]);
        let mut begin = LogPosition::default();
        assert_eq!(all(&log, &node(Some("acme.red")), &mut begin).unwrap().len(), 1);
        let mut found = log.find(&tenant("acme"), &first).unwrap();
        assert!(all(&log, &tenant("acme"), &mut found).unwrap().is_empty(), "it missed nothing");
    }

    #[test]
    fn reading_since_a_time_returns_kept_events() {
        let mut log = EventLog::default();
        for at_ms in 0..2 * EVENTS_MAX as u64 {
            log.push(WatchEvent { at_ms, ..event("vnet/acme.red") }, false);
        }
        let first = |at_ms: usize, filter: &EventFilter| {
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
    fn cursor_is_valid_for_one_run_and_reader() {
        let mut log = EventLog::default();
        (0..5).for_each(|_| log.push(event("vnet/acme.red"), false));
        log.push(event("vnet/other.red"), false);
        let (acme, other) = (tenant("acme"), tenant("other"));
        let (mine, others, all) = (log.cursor(&acme), log.cursor(&other), log.cursor(&node(None)));
        assert_eq!((mine.seq, others.seq, all.seq), (5, 1, 6));
        for (filter, cursor) in [(&acme, &others), (&acme, &all), (&other, &mine)] {
            assert_eq!(log.find(filter, cursor), None);
        }
        assert_eq!(EventLog::default().find(&node(None), &all), None, "another run's");
        let future = EventCursor { seq: 7, ..all };
        assert_eq!(log.find(&node(None), &future), None);
        let mut place = log.find(&acme, &EventCursor { seq: 3, ..mine }).unwrap();
        let LogRead::Events(events) = log.read(&acme, &mut place) else { panic!("kept") };
        assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn events_hide_operator_identity_from_tenants() {
        let mut log = EventLog::default();
        for (identity, by_node) in [("user:root", true), ("token:7", false)] {
            log.push(WatchEvent { who: Some(identity.into()), ..event("vnet/acme.red") }, by_node);
        }
        let identities = |filter: &EventFilter| {
            let mut place = LogPosition::default();
            let events = all(&log, filter, &mut place).unwrap();
            events.into_iter().filter_map(|event| event.who).collect::<Vec<_>>()
        };
        assert_eq!(identities(&node(None)), ["user:root", "token:7"]);
        assert_eq!(identities(&tenant("acme")), ["operator", "token:7"]);
    }

    #[test]
    fn event_messages_fit_on_one_bounded_line() {
        let mut log = EventLog::default();
        let message = Some(format!("\u{1b}[2J\n{}", "é".repeat(MESSAGE_BYTES_MAX)));
        let mut place = log.end(&node(None));
        log.push(WatchEvent { message, ..event("mux") }, false);
        let reported = all(&log, &node(None), &mut place).unwrap().remove(0).message.unwrap();
        assert!(
            reported.len() <= MESSAGE_BYTES_MAX && !reported.contains(char::is_control),
            "{reported}"
        );
    }

    proptest! {
        /// Compared with a list of all events: a reader gets exactly the
        /// events in its scope, in order, or learns that some are missing.
        #[test]
        fn reader_gets_every_event_or_a_gap(
            steps in proptest::collection::vec((0usize..4, 1usize..4000), 1..12),
            looks in proptest::collection::vec(any::<bool>(), 12),
        ) {
            const OBJECTS: [&str; 4] = ["vnet/acme.a", "vnet/other.b", "vnet/c", "mux"];
            let mut log = EventLog::default();
            let filters = [node(None), node(Some("c")), tenant("acme"), tenant("other")];
            let mut places = filters.each_ref().map(|filter| log.end(filter));
            let mut happened: [u64; 4] = [0; 4];
            for ((what, count), look) in steps.into_iter().zip(looks) {
                for _ in 0..count {
                    log.push(event(OBJECTS[what]), false);
                    for (filter, happened) in filters.iter().zip(&mut happened) {
                        *happened += u64::from(filter.selects(event(OBJECTS[what]).vnet()));
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
