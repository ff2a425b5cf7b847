//! Limits of requests. Every request needs a permit before more than its head is
//! read, and its body is counted as it is read. Operators and viewers of the node
//! have one set of limits, each tenant has its own, and all tenants together have
//! another. So nobody uses up the permits of another tenant or of an operator.

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
use crate::access::AccessScope;

/// Limit of the request bodies in memory at one time, bytes, of operators and
/// viewers of the node. A body counts from when it is read until its request ends.
pub const BODIES_BYTES_MAX: usize = BODIES.operators as usize;

/// Limit of the request bodies of one tenant, bytes: one body of the largest size, and some more.
pub const TENANT_BODIES_BYTES_MAX: usize = BODIES.tenant as usize;

/// Limit of the request bodies of all tenants together, bytes.
pub const TENANTS_BODIES_BYTES_MAX: usize = BODIES.tenants() as usize;

/// Smallest buffer for a body without a declared length, bytes.
const GROW_BYTES: usize = 64 << 10;

/// Duration of the answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseMode {
    /// Once: at once, or after a change.
    Whole,
    /// A session, which lasts as long as there is something to send.
    Session,
}

/// Number of items in use.
#[derive(Debug, Default)]
struct Count(AtomicUsize);

/// Part of a [`Count`], released when dropped.
#[derive(Debug)]
struct CountPermit(Arc<Count>, usize);

impl Count {
    fn take(self: &Arc<Self>, count: usize, max: usize) -> Option<CountPermit> {
        let more = |taken: usize| taken.checked_add(count).filter(|sum| *sum <= max);
        let order = Ordering::Relaxed;
        self.0.fetch_update(order, order, more).ok().map(|_| CountPermit(self.clone(), count))
    }
}

impl Drop for CountPermit {
    fn drop(&mut self) {
        self.0.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// Items in use.
#[derive(Debug, Default)]
struct InFlightCounts {
    calls: Arc<Count>,
    streams: Arc<Count>,
    bytes: Arc<Count>,
}

/// Limit of each item.
#[derive(Clone, Copy, Debug)]
struct InFlightLimits {
    calls: usize,
    streams: usize,
    bytes: usize,
}

const NODE: InFlightLimits =
    InFlightLimits { calls: CALLS_MAX, streams: STREAMS_MAX, bytes: BODIES_BYTES_MAX };

const TENANTS: InFlightLimits = InFlightLimits {
    calls: TENANTS_CALLS_MAX,
    streams: TENANTS_STREAMS_MAX,
    bytes: TENANTS_BODIES_BYTES_MAX,
};

/// Limits that apply to a scope: those of the node's operators and
/// viewers, or one tenant's and those of all tenants.
#[derive(Clone)]
pub struct RequestQuota(Vec<(Arc<InFlightCounts>, InFlightLimits)>);

/// Limits of all scopes.
#[derive(Default)]
pub struct RequestQuotas {
    node: Arc<InFlightCounts>,
    tenants: Arc<InFlightCounts>,
    tenant: Mutex<HashMap<String, Arc<InFlightCounts>>>,
}

impl RequestQuotas {
    /// Returns the limits of a scope. `quota` is the tenant's, if the scope is a tenant's.
    pub fn of(&self, scope: &AccessScope, quota: &Quota) -> RequestQuota {
        let Some(tenant) = scope.tenant() else {
            return RequestQuota(vec![(self.node.clone(), NODE)]);
        };
        let mut tenants = self.tenant.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let own = tenants.entry(tenant.into()).or_default().clone();
        let sessions = quota.sessions.unwrap_or(TENANT_SESSIONS_DEFAULT);
        let bounds = InFlightLimits {
            calls: TENANT_CALLS_MAX,
            streams: usize::try_from(sessions).unwrap_or(usize::MAX),
            bytes: TENANT_BODIES_BYTES_MAX,
        };
        RequestQuota(vec![(own, bounds), (self.tenants.clone(), TENANTS)])
    }
}

/// Permit of one request, for a call or a stream and for its body. It
/// is released when the last user of the request drops it.
#[derive(Debug)]
pub struct RequestPermit {
    taken: Vec<CountPermit>,
}

impl RequestQuota {
    fn take(
        &self,
        count: usize,
        what: &str,
        of: impl Fn(&InFlightCounts, &InFlightLimits) -> (Arc<Count>, usize),
    ) -> Result<Vec<CountPermit>, Problem> {
        let mut taken = Vec::new();
        for (counts, bounds) in &self.0 {
            let (counter, max) = of(counts, bounds);
            taken.push(counter.take(count, max).ok_or_else(|| {
                let problem = format!("the limit of {max} {what} at a time is reached");
                Problem::new(ProblemKind::Busy, problem).hint("end some, or try again")
            })?);
        }
        Ok(taken)
    }

    /// Returns the permit of one more request.
    pub fn acquire(&self, answer: ResponseMode) -> Result<RequestPermit, Problem> {
        let taken = match answer {
            ResponseMode::Whole => self.take(1, "calls", |c, b| (c.calls.clone(), b.calls)),
            ResponseMode::Session => {
                let what = "sessions (watches, captures, logs, routes, commands)";
                self.take(1, what, |c, b| (c.streams.clone(), b.streams))
            }
        };
        Ok(RequestPermit { taken: taken? })
    }

    /// Reads the whole body of a request with a permit, at most `bytes_max`.
    pub async fn body(
        &self,
        place: &mut RequestPermit,
        body: Body,
        bytes_max: usize,
    ) -> Result<Bytes, Problem> {
        let read = self.read(place, body, bytes_max);
        tokio::time::timeout(BODY_TIME_MAX, read).await.unwrap_or_else(|_| {
            let limit = BODY_TIME_MAX.as_secs();
            Err(Problem::new(ProblemKind::TimedOut, format!("body: incomplete after {limit} s")))
        })
    }

    async fn read(
        &self,
        place: &mut RequestPermit,
        body: Body,
        bytes_max: usize,
    ) -> Result<Bytes, Problem> {
        let too_large = || {
            let problem = format!("body: over {bytes_max} bytes, or cut off");
            Problem::new(ProblemKind::TooLarge, problem)
                .hint("apply fewer or smaller files at a time")
        };
        // Reserve the declared length, or grow as the body arrives.
        let declared = hyper::body::Body::size_hint(&body).exact();
        let declared = declared.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if declared.is_some_and(|bytes| bytes > bytes_max) {
            return Err(too_large());
        }
        let mut bytes: Vec<u8> = Vec::new();
        let mut room = 0;
        let mut make_room = |bytes: &mut Vec<u8>, needed: usize| {
            if needed > room {
                let more = needed - room;
                let what = "bytes of requests";
                place.taken.extend(self.take(more, what, |c, b| (c.bytes.clone(), b.bytes))?);
                bytes.reserve_exact(needed - bytes.len());
                room = needed;
            }
            Ok::<_, Problem>(())
        };
        make_room(&mut bytes, declared.unwrap_or(0))?;
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| too_large())?;
            let length = bytes.len() + chunk.len();
            if length > bytes_max {
                return Err(too_large());
            }
            if length > bytes.capacity() {
                // Double the size each time, so that little is copied.
                let needed = length.max(2 * bytes.capacity()).max(GROW_BYTES);
                make_room(&mut bytes, needed.min(bytes_max))?;
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> AccessScope {
        AccessScope::Tenant(name.into())
    }

    async fn read(
        room: &RequestQuota,
        place: &mut RequestPermit,
        bytes: usize,
    ) -> Result<Bytes, Problem> {
        // As a stream without a declared length.
        let chunks = (0..bytes.div_ceil(1 << 20)).map(move |index| {
            let left = bytes - (index << 20);
            Ok::<_, std::io::Error>(Bytes::from(vec![b' '; left.min(1 << 20)]))
        });
        let body = Body::from_stream(futures::stream::iter(chunks));
        room.body(place, body, 32 << 20).await
    }

    #[tokio::test]
    async fn body_limits_apply_per_tenant_and_overall() {
        let rooms = RequestQuotas::default();
        let quota = Quota::default();
        let acme = rooms.of(&tenant("acme"), &quota);
        let mut first = acme.acquire(ResponseMode::Whole).unwrap();
        assert_eq!(read(&acme, &mut first, 32 << 20).await.unwrap().len(), 32 << 20);
        let mut second = acme.acquire(ResponseMode::Whole).unwrap();
        let full = read(&acme, &mut second, 32 << 20).await.unwrap_err();
        assert_eq!(full.kind, ProblemKind::Busy);
        drop(second);
        let mut permits = vec![first];
        let full = loop {
            let room = rooms.of(&tenant(&format!("t{}", permits.len())), &quota);
            let mut place = room.acquire(ResponseMode::Whole).unwrap();
            match read(&room, &mut place, 32 << 20).await {
                Ok(_) => permits.push(place),
                Err(problem) => break problem,
            }
        };
        assert_eq!(full.kind, ProblemKind::Busy);
        assert_eq!(permits.len(), TENANTS_BODIES_BYTES_MAX / (32 << 20));
        // Operators have their own limits.
        let node = rooms.of(&AccessScope::Node, &quota);
        let mut place = node.acquire(ResponseMode::Whole).unwrap();
        read(&node, &mut place, 32 << 20).await.unwrap();
        permits.clear();
        let mut again = acme.acquire(ResponseMode::Whole).unwrap();
        read(&acme, &mut again, 32 << 20).await.unwrap();
        let large = read(&acme, &mut again, (32 << 20) + 1).await.unwrap_err();
        assert!(matches!(large.kind, ProblemKind::TooLarge | ProblemKind::Busy), "{large}");
    }

    #[test]
    fn session_quota_limits_each_tenant_separately() {
        let rooms = RequestQuotas::default();
        let quota = Quota { sessions: Some(3), ..Quota::default() };
        let acme = rooms.of(&tenant("acme"), &quota);
        let permits: Vec<_> =
            (0..3).map(|_| acme.acquire(ResponseMode::Session).unwrap()).collect();
        assert_eq!(acme.acquire(ResponseMode::Session).unwrap_err().kind, ProblemKind::Busy);
        acme.acquire(ResponseMode::Whole).unwrap();
        let other = rooms.of(&tenant("other"), &quota);
        other.acquire(ResponseMode::Session).unwrap();
        // A raised quota applies at once.
        let more = Quota { sessions: Some(4), ..Quota::default() };
        rooms.of(&tenant("acme"), &more).acquire(ResponseMode::Session).unwrap();
        drop(permits);
        acme.acquire(ResponseMode::Session).unwrap();
    }
}
