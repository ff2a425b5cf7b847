//! Room for requests: every request has its place before anything of it but its head is read, and its
//! body is counted as it is read. Operators and viewers of the node have their room, each tenant has
//! its own, and all tenants together have a bound: none takes another's place, nor an operator's.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use bytes::Bytes;
use futures::StreamExt;
use pdp_api::{Problem, ProblemKind};
use pdp_spec::Quota;
use pdp_spec::limits::TENANT_SESSIONS_DEFAULT;
use pdp_spec::shared::BODIES;

use super::{
    BODY_TIME_MAX, CALLS_MAX, STREAMS_MAX, TENANT_CALLS_MAX, TENANTS_CALLS_MAX, TENANTS_STREAMS_MAX,
};
use crate::access::{Answer, Scope};

/// Bytes of bodies at a time, of operators and viewers of the node, from when they are read until the
/// request they came with has ended.
pub const BODIES_BYTES_MAX: usize = BODIES.operators as usize;

/// The same of one tenant: a body of the largest size, and room beside it.
pub const TENANT_BODIES_BYTES_MAX: usize = BODIES.tenant as usize;

/// The same of all tenants together.
pub const TENANTS_BODIES_BYTES_MAX: usize = BODIES.tenants() as usize;

/// Bytes that are made room for at a time where a body does not say how long it is.
const GROW_BYTES: usize = 64 << 10;

/// How many of something there are at a time.
#[derive(Debug, Default)]
struct Count(AtomicUsize);

/// Some of a [`Count`], given back when dropped.
#[derive(Debug)]
struct Taken(Arc<Count>, usize);

impl Count {
    fn take(self: &Arc<Self>, count: usize, max: usize) -> Option<Taken> {
        let more = |there: usize| there.checked_add(count).filter(|sum| *sum <= max);
        let order = Ordering::Relaxed;
        self.0.fetch_update(order, order, more).ok().map(|_| Taken(self.clone(), count))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// What there is at a time.
#[derive(Debug, Default)]
struct Counts {
    calls: Arc<Count>,
    streams: Arc<Count>,
    bytes: Arc<Count>,
}

/// How many there may be of each.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    calls: usize,
    streams: usize,
    bytes: usize,
}

const NODE: Bounds = Bounds { calls: CALLS_MAX, streams: STREAMS_MAX, bytes: BODIES_BYTES_MAX };

const TENANTS: Bounds = Bounds {
    calls: TENANTS_CALLS_MAX,
    streams: TENANTS_STREAMS_MAX,
    bytes: TENANTS_BODIES_BYTES_MAX,
};

/// Room of the operators and viewers of the node, or of one tenant with that of all around it.
#[derive(Clone)]
pub struct Room(Vec<(Arc<Counts>, Bounds)>);

/// All rooms.
#[derive(Default)]
pub struct Rooms {
    node: Arc<Counts>,
    tenants: Arc<Counts>,
    tenant: Mutex<HashMap<String, Arc<Counts>>>,
}

impl Rooms {
    /// That of a scope; `quota` is the tenant's, where it is one's.
    pub fn of(&self, scope: &Scope, quota: &Quota) -> Room {
        let Some(tenant) = scope.tenant() else { return Room(vec![(self.node.clone(), NODE)]) };
        let mut tenants = self.tenant.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let own = tenants.entry(tenant.into()).or_default().clone();
        let sessions = quota.sessions.unwrap_or(TENANT_SESSIONS_DEFAULT);
        let bounds = Bounds {
            calls: TENANT_CALLS_MAX,
            streams: usize::try_from(sessions).unwrap_or(usize::MAX),
            bytes: TENANT_BODIES_BYTES_MAX,
        };
        Room(vec![(own, bounds), (self.tenants.clone(), TENANTS)])
    }
}

/// A request's place: a call's or a stream's, and its body's. Given back when the last of what works
/// for the request has dropped it.
#[derive(Debug)]
pub struct Place {
    taken: Vec<Taken>,
}

impl Room {
    fn take(
        &self,
        count: usize,
        what: &str,
        of: impl Fn(&Counts, &Bounds) -> (Arc<Count>, usize),
    ) -> Result<Vec<Taken>, Problem> {
        let mut taken = Vec::new();
        for (counts, bounds) in &self.0 {
            let (counter, max) = of(counts, bounds);
            taken.push(counter.take(count, max).ok_or_else(|| {
                let problem = format!("{max} {what} at a time are the limit");
                Problem::new(ProblemKind::Busy, problem).hint("end some, or try again")
            })?);
        }
        Ok(taken)
    }

    /// A place for one more request.
    pub fn place(&self, answer: Answer) -> Result<Place, Problem> {
        let taken = match answer {
            Answer::Whole => self.take(1, "calls", |c, b| (c.calls.clone(), b.calls)),
            Answer::GoesOn => {
                let what = "sessions (watches, captures, logs, routes, commands)";
                self.take(1, what, |c, b| (c.streams.clone(), b.streams))
            }
        };
        Ok(Place { taken: taken? })
    }

    /// The whole body of a request that has a place, `bytes_max` at most.
    pub async fn body(
        &self,
        place: &mut Place,
        body: Body,
        bytes_max: usize,
    ) -> Result<Bytes, Problem> {
        let read = self.read(place, body, bytes_max);
        tokio::time::timeout(BODY_TIME_MAX, read).await.unwrap_or_else(|_| {
            let limit = BODY_TIME_MAX.as_secs();
            Err(Problem::new(ProblemKind::TimedOut, format!("body: not whole after {limit} s")))
        })
    }

    async fn read(
        &self,
        place: &mut Place,
        body: Body,
        bytes_max: usize,
    ) -> Result<Bytes, Problem> {
        let too_large = || {
            let problem = format!("body: over {bytes_max} bytes, or cut off");
            Problem::new(ProblemKind::TooLarge, problem)
                .hint("apply fewer or smaller files at a time")
        };
        // As much as it says to have, or else as it comes.
        let said = hyper::body::Body::size_hint(&body).exact();
        let said = said.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if said.is_some_and(|bytes| bytes > bytes_max) {
            return Err(too_large());
        }
        let mut bytes: Vec<u8> = Vec::new();
        let mut room = 0;
        let mut make_room = |bytes: &mut Vec<u8>, wanted: usize| {
            if wanted > room {
                let more = wanted - room;
                let what = "bytes of requests";
                place.taken.extend(self.take(more, what, |c, b| (c.bytes.clone(), b.bytes))?);
                bytes.reserve_exact(wanted - bytes.len());
                room = wanted;
            }
            Ok::<_, Problem>(())
        };
        make_room(&mut bytes, said.unwrap_or(0))?;
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| too_large())?;
            let length = bytes.len() + chunk.len();
            if length > bytes_max {
                return Err(too_large());
            }
            if length > bytes.capacity() {
                // Twice as much each time, so that nothing is copied often.
                let wanted = length.max(2 * bytes.capacity()).max(GROW_BYTES);
                make_room(&mut bytes, wanted.min(bytes_max))?;
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Scope {
        Scope::Tenant(name.into())
    }

    async fn read(room: &Room, place: &mut Place, bytes: usize) -> Result<Bytes, Problem> {
        // As it comes, without saying how long it is.
        let chunks = (0..bytes.div_ceil(1 << 20)).map(move |index| {
            let left = bytes - (index << 20);
            Ok::<_, std::io::Error>(Bytes::from(vec![b' '; left.min(1 << 20)]))
        });
        let body = Body::from_stream(futures::stream::iter(chunks));
        room.body(place, body, 32 << 20).await
    }

    #[tokio::test]
    async fn bodies_are_bounded_by_tenant_and_over_all_and_give_their_room_back() {
        let rooms = Rooms::default();
        let quota = Quota::default();
        let acme = rooms.of(&tenant("acme"), &quota);
        let mut first = acme.place(Answer::Whole).unwrap();
        assert_eq!(read(&acme, &mut first, 32 << 20).await.unwrap().len(), 32 << 20);
        let mut second = acme.place(Answer::Whole).unwrap();
        let full = read(&acme, &mut second, 32 << 20).await.unwrap_err();
        assert_eq!(full.kind, ProblemKind::Busy);
        drop(second);
        let mut held = vec![first];
        let full = loop {
            let room = rooms.of(&tenant(&format!("t{}", held.len())), &quota);
            let mut place = room.place(Answer::Whole).unwrap();
            match read(&room, &mut place, 32 << 20).await {
                Ok(_) => held.push(place),
                Err(problem) => break problem,
            }
        };
        assert_eq!(full.kind, ProblemKind::Busy);
        assert_eq!(held.len(), TENANTS_BODIES_BYTES_MAX / (32 << 20));
        // An operator has its own.
        let node = rooms.of(&Scope::Node, &quota);
        let mut place = node.place(Answer::Whole).unwrap();
        read(&node, &mut place, 32 << 20).await.unwrap();
        held.clear();
        let mut again = acme.place(Answer::Whole).unwrap();
        read(&acme, &mut again, 32 << 20).await.unwrap();
        let large = read(&acme, &mut again, (32 << 20) + 1).await.unwrap_err();
        assert!(matches!(large.kind, ProblemKind::TooLarge | ProblemKind::Busy), "{large}");
    }

    #[test]
    fn sessions_are_as_many_as_the_quota_says_and_those_of_others_are_theirs() {
        let rooms = Rooms::default();
        let quota = Quota { sessions: Some(3), ..Quota::default() };
        let acme = rooms.of(&tenant("acme"), &quota);
        let held: Vec<_> = (0..3).map(|_| acme.place(Answer::GoesOn).unwrap()).collect();
        assert_eq!(acme.place(Answer::GoesOn).unwrap_err().kind, ProblemKind::Busy);
        acme.place(Answer::Whole).unwrap();
        let other = rooms.of(&tenant("other"), &quota);
        other.place(Answer::GoesOn).unwrap();
        // A quota that was raised holds at once.
        let more = Quota { sessions: Some(4), ..Quota::default() };
        rooms.of(&tenant("acme"), &more).place(Answer::GoesOn).unwrap();
        drop(held);
        acme.place(Answer::GoesOn).unwrap();
    }
}
