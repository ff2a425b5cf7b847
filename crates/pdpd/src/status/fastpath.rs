//! Filters, counters and frames of a fast path, for clients of the API. For the duration of a
//! request pdpd is one more program at the socket of the router's slow path ([`pdp_slowpath`]).
//!
//! It waits for the mux only, at most [`WAIT`]. The API names interfaces; the socket numbers them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pdp_api::{
    FASTPATH_COUNTERS_AT_ONCE, FASTPATH_FILTERS_AT_ONCE, FastpathChange, FastpathChanged,
    FastpathCounters, FastpathCountersQuery, FastpathDirection, FastpathFilter, FastpathFilters,
    FastpathFiltersQuery, FastpathFrame, FastpathQueue, FastpathQueueSetting, FastpathQueues,
    FastpathQueuesQuery, FilterVerdict, Problem, ProblemKind,
};
use pdp_proto::mux;
use pdp_slowpath::{
    DATA_BYTES, Error, Filter, FilterAction, FrameDestination, NO_COUNTER, PatternCode,
    QUEUES_SET_MAX, QueueSetting, SlowPathChange, SlowPathConnection, copied, pattern,
};

use crate::engine::DaemonCore;
use crate::plan::NodePlan;
use crate::util::error_chain;

/// Longest wait for the mux.
const WAIT: Duration = Duration::from_secs(20);

/// A router that the mux forwards for, with the names of its vports in order.
pub struct FastPath {
    /// `VNET/NODE`.
    name: String,
    socket: PathBuf,
    ports: Vec<String>,
}

fn invalid(text: String) -> Problem {
    Problem::new(ProblemKind::Invalid, text)
}

impl FastPath {
    /// Returns the fast path of a node of the current plan.
    ///
    /// # Errors
    /// There is no such node, or the mux does not forward for it.
    pub fn find(engine: &DaemonCore, vnet: &str, node: &str) -> Result<Self, Problem> {
        Self::of(vnet, node, &engine.node_plan(vnet, node)?)
    }

    /// Returns the fast path of a planned node.
    ///
    /// # Errors
    /// The mux does not forward for the node.
    pub fn of(vnet: &str, node: &str, plan: &NodePlan) -> Result<Self, Problem> {
        let name = format!("{vnet}/{node}");
        let Some(socket) = plan.slowpath_socket() else {
            let problem = format!("{name}: the mux has no filters for this node");
            return Err(invalid(problem).hint(
                "filters need `dataPlane: {kind: fastpath}`, with `filters` or `counters` above 0",
            ));
        };
        let ports = plan.taps.iter().map(|tap| tap.name.clone()).collect();
        Ok(Self { name, socket: socket.into(), ports })
    }

    /// Returns the state of the queues of a node's fast path.
    pub fn queues_of(
        engine: &DaemonCore,
        vnet: &str,
        node: &str,
        query: &FastpathQueuesQuery,
    ) -> Result<FastpathQueues, Problem> {
        let model = engine.model();
        let vlinks = model.plan.vnets.get(vnet).into_iter().flat_map(|plan| &plan.mux.vlinks);
        let ends = vlinks.flat_map(|vlink| vlink.ends.iter().zip(&vlink.queues));
        let names = |port: u16| {
            let is_it = |end: &mux::VlinkEnd| matches!(end, mux::VlinkEnd::Port { node: of, port: at } if *of == node && *at == port);
            let queues = ends.clone().filter(|(end, _)| is_it(end)).flat_map(|(_, queues)| queues);
            queues.map(|queue| queue.name.clone()).collect()
        };
        Self::find(engine, vnet, node)?.queues(query, names)
    }

    /// Returns its filters, as many as fit into one answer.
    pub fn filters(&self, query: FastpathFiltersQuery) -> Result<FastpathFilters, Problem> {
        let connection = self.connect()?;
        let welcome = connection.welcome().clone();
        let code = PatternCode::of(welcome.code);
        let list = connection.into_list(query.first, FASTPATH_FILTERS_AT_ONCE);
        let (filters, more) = list.map_err(|error| self.problem(error))?;
        let last = filters.last().map(|filter| filter.id);
        Ok(FastpathFilters {
            code: match code {
                PatternCode::Ip => "ip".into(),
                PatternCode::Fields => "fields".into(),
            },
            filters_max: welcome.filters_max,
            counters: welcome.counters,
            filters: filters.iter().map(|filter| described(filter, code, &self.ports)).collect(),
            next: last.and_then(|last| last.checked_add(1)).filter(|_| more),
        })
    }

    /// Changes filters.
    pub fn change(&self, change: &FastpathChange) -> Result<FastpathChanged, Problem> {
        let set: Result<Vec<SlowPathChange>, Problem> = change
            .set
            .iter()
            .map(|filter| meant(filter, &self.ports).map(SlowPathChange::Set))
            .map(|filter| filter.map_err(|problem| self.about(problem)))
            .collect();
        if change.queues.len() > QUEUES_SET_MAX {
            let problem = format!("{} queues, {QUEUES_SET_MAX} at most", change.queues.len());
            return Err(self.about(invalid(problem).hint("set them in several requests")));
        }
        let queues: Result<Vec<SlowPathChange>, Problem> = change
            .queues
            .iter()
            .map(|queue| self.queue(queue).map(SlowPathChange::Queue))
            .collect();
        let all = set?.into_iter().chain(change.remove.iter().copied().map(SlowPathChange::Remove));
        let all = all.chain(queues?);
        let filters = self.connect()?.commit(all, change.sweep);
        Ok(FastpathChanged { filters: filters.map_err(|error| self.problem(error))? })
    }

    /// Returns the values of its counters.
    pub fn counters(&self, query: FastpathCountersQuery) -> Result<FastpathCounters, Problem> {
        let FastpathCountersQuery { first, count } = query;
        let most = FASTPATH_COUNTERS_AT_ONCE;
        if let Some(count) = count.filter(|count| *count > most) {
            return Err(invalid(format!("count {count} exceeds {most}"))
                .hint("request the rest separately"));
        }
        let mut connection = self.connect()?;
        let total = connection.welcome().counters;
        let count = count.unwrap_or(total.saturating_sub(first).min(most));
        let counters = connection.counters(first, count).map_err(|error| self.problem(error))?;
        Ok(FastpathCounters { first, counters, total })
    }

    /// Translates the requested settings of a queue.
    fn queue(&self, setting: &FastpathQueueSetting) -> Result<QueueSetting, Problem> {
        let FastpathQueueSetting { port, queue, weight, frames, bytes } = setting;
        let vport = vport(port, &self.ports).map_err(|problem| self.about(problem))?;
        let given = |value: Option<u32>, what: &str| match value {
            Some(0) => {
                let problem = invalid(format!("queue {queue} of {port}: {what} 0"));
                Err(self.about(problem.hint("leave it out for the spec's value")))
            }
            value => Ok(value.unwrap_or(0)),
        };
        let (weight, frames) = (given(*weight, "weight")?, given(*frames, "frames")?);
        Ok(QueueSetting { vport, queue: *queue, weight, frames, bytes: given(*bytes, "bytes")? })
    }

    /// Returns the state of its queues. `names` returns the names of a vport's queues.
    pub fn queues(
        &self,
        query: &FastpathQueuesQuery,
        names: impl Fn(u16) -> Vec<String>,
    ) -> Result<FastpathQueues, Problem> {
        let selected = query.port.as_ref().map(|port| vport(port, &self.ports));
        let selected = selected.transpose().map_err(|problem| self.about(problem))?;
        let mut connection = self.connect()?;
        let mut all = FastpathQueues::default();
        for (at, port) in (0..).zip(&self.ports) {
            let names = match selected.is_none_or(|selected| selected == at) {
                true => names(at.into()),
                false => vec![],
            };
            if names.is_empty() {
                continue;
            }
            let queues = connection.queues(at).map_err(|error| self.problem(error))?;
            for (number, (queue, name)) in (1..).zip(queues.into_iter().zip(names)) {
                all.queues.push(FastpathQueue {
                    port: port.clone(),
                    queue: number,
                    name,
                    weight: queue.weight,
                    frames: queue.frames,
                    bytes: Some(queue.bytes).filter(|bytes| *bytes > 0),
                    buffers: queue.buffers,
                    waiting: queue.waiting,
                    waiting_bytes: queue.waiting_bytes,
                    sent: queue.sent,
                    sent_bytes: queue.sent_bytes,
                    dropped: queue.dropped,
                });
            }
        }
        Ok(all)
    }

    /// Sends a frame.
    pub fn send(&self, frame: &FastpathFrame) -> Result<(), Problem> {
        let vport = vport(&frame.port, &self.ports).map_err(|problem| self.about(problem))?;
        let destination = match (frame.direction, frame.queue) {
            (FastpathDirection::In, None) => FrameDestination::In(vport),
            (FastpathDirection::In, Some(_)) => {
                return Err(invalid("queue: only frames with direction out have one".into()));
            }
            (FastpathDirection::Out, queue) => FrameDestination::Out(vport, queue.unwrap_or(0)),
        };
        let bytes = hex(&frame.frame).ok_or_else(|| {
            invalid("frame: not hexadecimal".into()).hint("write it like ffffffffffff020000000001…")
        })?;
        let mut connection = self.connect()?;
        connection.frame(destination, &bytes).map_err(|error| self.problem(error))?;
        // When the next request is answered, the mux has taken the frame.
        connection.counters(0, 0).map(drop).map_err(|error| self.problem(error))
    }

    fn connect(&self) -> Result<SlowPathConnection, Problem> {
        SlowPathConnection::open(&self.socket, Instant::now() + WAIT)
            .map_err(|error| self.problem(error))
    }

    fn about(&self, problem: Problem) -> Problem {
        Problem { error: format!("{}: {}", self.name, problem.error), ..problem }
    }

    fn problem(&self, error: Error) -> Problem {
        let kind = match &error {
            Error::Refused { .. }
            | Error::Counters { .. }
            | Error::Vport { .. }
            | Error::Frame(_) => ProblemKind::Invalid,
            Error::Gone { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                let problem = format!("{}: no socket for its slow path yet", self.name);
                return Problem::new(ProblemKind::Unavailable, problem)
                    .hint("it exists while the router runs");
            }
            Error::Gone { .. } | Error::Bye(_) => ProblemKind::Unavailable,
            Error::Unexpected(_) => ProblemKind::Internal,
        };
        self.about(Problem::new(kind, error_chain(&error)))
    }
}

/// Returns the number of an interface.
fn vport(name: &str, ports: &[String]) -> Result<u8, Problem> {
    let found = ports.iter().position(|port| port == name);
    found.and_then(|vport| u8::try_from(vport).ok()).ok_or_else(|| {
        let hint = format!("its interfaces are {}", ports.join(", "));
        invalid(format!("no interface {name:?}")).hint(hint)
    })
}

/// Returns the name of an interface, or its number if it no longer has a name.
fn port(vport: u8, ports: &[String]) -> String {
    ports.get(usize::from(vport)).cloned().unwrap_or_else(|| vport.to_string())
}

/// Translates a filter of the API into one of the mux.
fn meant(filter: &FastpathFilter, ports: &[String]) -> Result<Filter, Problem> {
    let FastpathFilter { id, priority, r#match, verdict, out, to, queue, counter, copies, data } =
        filter;
    let about =
        |problem: Problem| Problem { error: format!("filter {id}: {}", problem.error), ..problem };
    let wrong = |text: String| about(invalid(text));
    let pattern =
        pattern::parse(r#match, ports).map_err(|error| wrong(format!("match: {error}")))?;
    let mut action =
        FilterAction { verdict: *verdict, queue: queue.unwrap_or(0), ..FilterAction::default() };
    if let Some(counter) = counter {
        if *counter == NO_COUNTER {
            return Err(wrong(format!("counter {counter} is reserved")));
        }
        action.counter = *counter;
    }
    match (action.verdict, out) {
        (FilterVerdict::Send, Some(out)) => action.vport = vport(out, ports).map_err(about)?,
        (FilterVerdict::Send, None) => {
            return Err(wrong("verdict send needs `out`, an interface".into()));
        }
        (_, None) if to.is_none() && data.is_none() => {}
        _ => return Err(wrong("`out`, `to` and `data` need the verdict send".into())),
    }
    match (to, data) {
        (Some(_), Some(_)) => {
            return Err(wrong("`to` and `data` are the same bytes: give one".into()));
        }
        (Some(to), None) => {
            let address = link_address(to).ok_or_else(|| {
                wrong(format!("to {to:?} is not a MAC address"))
                    .hint("write it like 02:00:00:00:00:01")
            })?;
            action.data[..address.len()].copy_from_slice(&address);
        }
        (None, Some(data)) => {
            let bytes = hex(data).filter(|bytes| bytes.len() <= DATA_BYTES).ok_or_else(|| {
                wrong(format!("data: not hexadecimal, or over {DATA_BYTES} bytes"))
            })?;
            action.data[..bytes.len()].copy_from_slice(&bytes);
        }
        (None, None) => {}
    }
    let vports: Result<Vec<u8>, Problem> = copies.iter().map(|name| vport(name, ports)).collect();
    let vports = vports.map_err(about)?;
    let action = copied(action, &vports).ok_or_else(|| {
        wrong(format!("{} copies, {} at most", vports.len(), pdp_slowpath::COPIES_MAX))
    })?;
    Ok(Filter { id: *id, priority: *priority, pattern, action })
}

/// Translates a filter of the mux into one of the API.
fn described(filter: &Filter, code: PatternCode, ports: &[String]) -> FastpathFilter {
    let Filter { id, priority, pattern, action } = filter;
    let sent = action.verdict == FilterVerdict::Send;
    let address = || {
        let bytes = action.data[..6].iter().map(|byte| format!("{byte:02x}"));
        bytes.collect::<Vec<_>>().join(":")
    };
    FastpathFilter {
        id: *id,
        priority: *priority,
        r#match: pattern::text(pattern, code, ports),
        verdict: action.verdict,
        out: sent.then(|| port(action.vport, ports)),
        to: (sent && code == PatternCode::Ip).then(address),
        queue: Some(action.queue).filter(|queue| *queue != 0),
        counter: Some(action.counter).filter(|counter| *counter != NO_COUNTER),
        copies: action.copies().iter().map(|vport| port(*vport, ports)).collect(),
        data: (sent && code == PatternCode::Fields).then(|| crate::util::hex(&action.data)),
    }
}

/// Parses a MAC address, unicast or group.
fn link_address(text: &str) -> Option<[u8; 6]> {
    let parts: Vec<&str> = text.split(':').collect();
    let good = parts.len() == 6 && parts.iter().all(|part| part.len() == 2);
    good.then(|| hex(&parts.concat()))??.try_into().ok()
}

/// Parses hexadecimal digits.
fn hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
#[path = "../../../slowpath/tests/fake/mod.rs"]
mod fake;

#[cfg(test)]
mod tests {
    use pdp_slowpath::FilterCounter;

    use super::fake::Fake;
    use super::*;

    fn ports() -> Vec<String> {
        ["eth0", "eth1", "eth2"].map(Into::into).into()
    }

    fn whole() -> FastpathFilter {
        FastpathFilter {
            id: 7,
            priority: 9,
            r#match: "ip dst 192.0.2.0/24 proto udp dport 53 in eth0".into(),
            verdict: FilterVerdict::Send,
            out: Some("eth2".into()),
            to: Some("02:00:00:00:00:0a".into()),
            queue: Some(3),
            counter: Some(0),
            copies: vec!["eth1".into(), "eth0".into()],
            data: None,
        }
    }

    #[test]
    fn filter_description_round_trips() {
        let filter = meant(&whole(), &ports()).unwrap();
        let FilterAction { verdict, vport, queue, counter, data, .. } = filter.action;
        assert_eq!((verdict, vport, queue, counter), (FilterVerdict::Send, 2, 3, 0));
        assert_eq!((filter.action.copies(), data[5]), (&[1, 0][..], 10));
        assert_eq!(described(&filter, PatternCode::Ip, &ports()), whole());
        for verdict in [FilterVerdict::Drop, FilterVerdict::Pass, FilterVerdict::Punt] {
            let simple = FastpathFilter { r#match: "ip6".into(), verdict, ..Default::default() };
            let filter = meant(&simple, &ports()).unwrap();
            assert_eq!(described(&filter, PatternCode::Ip, &ports()), simple);
        }
        let raw = FastpathFilter {
            to: None,
            data: Some("0a".to_owned() + &"00".repeat(15)),
            r#match: "raw 0102030405060708090a0b0c0d0e0f in eth1".into(),
            ..whole()
        };
        assert_eq!(described(&meant(&raw, &ports()).unwrap(), PatternCode::Fields, &ports()), raw);
        // A program may name a port that does not exist.
        assert_eq!(port(200, &ports()), "200");
    }

    #[test]
    fn invalid_filter_is_refused_with_its_number() {
        let pass = || FastpathFilter { verdict: FilterVerdict::Pass, ..whole() };
        for (filter, why) in [
            (FastpathFilter { r#match: "ip port 5".into(), ..whole() }, "match: unknown word"),
            (FastpathFilter { out: None, ..whole() }, "send needs `out`"),
            (FastpathFilter { out: Some("eth9".into()), ..whole() }, "no interface \"eth9\""),
            (FastpathFilter { copies: vec!["x".into()], ..whole() }, "no interface \"x\""),
            (FastpathFilter { copies: vec!["eth0".into(); 9], ..whole() }, "9 copies, 8 at most"),
            (FastpathFilter { to: Some("02:0:0:0:0:1".into()), ..whole() }, "is not a MAC address"),
            (FastpathFilter { data: Some("00".into()), ..whole() }, "give one"),
            (
                FastpathFilter { to: None, data: Some("0".into()), ..whole() },
                "data: not hexadecimal, or over 16",
            ),
            (
                FastpathFilter { to: None, data: Some("00".repeat(17)), ..whole() },
                "data: not hexadecimal",
            ),
            (FastpathFilter { counter: Some(u32::MAX), ..whole() }, "is reserved"),
            (FastpathFilter { to: None, ..pass() }, "need the verdict send"),
            (FastpathFilter { out: None, ..pass() }, "need the verdict send"),
        ] {
            let problem = meant(&filter, &ports()).unwrap_err();
            assert_eq!(problem.kind, ProblemKind::Invalid);
            assert!(problem.error.starts_with("filter 7: "), "{problem}");
            assert!(problem.error.contains(why), "{problem}: {why}");
        }
    }

    /// A fast path with a fake mux that a test controls.
    fn start() -> (tempfile::TempDir, Fake, FastPath) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("control.sock");
        let fake = Fake::start(&socket);
        (directory, fake, FastPath { name: "red/r1".into(), socket, ports: ports() })
    }

    fn numbered(id: u32) -> FastpathFilter {
        FastpathFilter { id, r#match: format!("ip dport {id}"), ..Default::default() }
    }

    #[test]
    fn filters_change_atomically_and_are_read_in_pages() {
        let (_directory, fake, path) = start();
        let count = FASTPATH_FILTERS_AT_ONCE as u32 + 1;
        let set: Vec<FastpathFilter> = (0..count).map(numbered).collect();
        let change = FastpathChange { set: set.clone(), ..Default::default() };
        assert_eq!(path.change(&change).unwrap().filters, count);
        let first = path.filters(FastpathFiltersQuery::default()).unwrap();
        assert_eq!((first.next, first.filters.len()), (Some(count - 1), FASTPATH_FILTERS_AT_ONCE));
        let rest = path.filters(FastpathFiltersQuery { first: count - 1 }).unwrap();
        assert_eq!((rest.next, rest.filters_max), (None, 70_000));
        assert_eq!([first.filters, rest.filters].concat(), set);
        // A filter that is wrong for pdpd, and one that is wrong for the mux.
        let wrong = FastpathFilter { r#match: "udp".into(), ..numbered(1) };
        let distant = FastpathFilter { id: 70_000, ..numbered(1) };
        for (wrong, why) in
            [(wrong, "red/r1: filter 1: match: "), (distant, "red/r1: filter 70000: ")]
        {
            let set = vec![numbered(9000), wrong];
            let change = FastpathChange { set, sweep: true, ..Default::default() };
            let problem = path.change(&change).unwrap_err();
            assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
            assert!(problem.error.starts_with(why), "{problem}");
        }
        assert_eq!(fake.table().filters.len(), count as usize);
        let all = FastpathChange { set: vec![numbered(5)], sweep: true, ..Default::default() };
        assert_eq!(path.change(&all).unwrap().filters, 1);
        let none = FastpathChange { remove: vec![5, 6], ..Default::default() };
        assert_eq!(path.change(&none).unwrap().filters, 0);
    }

    #[test]
    fn fast_path_reads_counters_and_sends_frames() {
        let (_directory, mut fake, path) = start();
        fake.table().counters[4999] =
            FilterCounter { packets: 7, bytes: 700, sent: 5, sent_bytes: 500 };
        let counters = |first, count| path.counters(FastpathCountersQuery { first, count });
        let all = counters(0, None).unwrap();
        assert_eq!((all.counters.len(), all.total), (5000, 5000));
        let last = counters(4999, Some(1)).unwrap();
        let expected = FilterCounter { packets: 7, bytes: 700, sent: 5, sent_bytes: 500 };
        assert_eq!(last.counters, [expected]);
        for (first, count) in [(5001, None), (4999, Some(2)), (0, Some(u32::MAX))] {
            let problem = counters(first, count).unwrap_err();
            assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
        }
        let frame = |port: &str, direction, frame: &str| FastpathFrame {
            port: port.into(),
            direction,
            queue: None,
            frame: frame.into(),
        };
        path.send(&frame("eth2", FastpathDirection::Out, &"01".repeat(60))).unwrap();
        assert_eq!(fake.table().frames.len(), 1);
        for (port, bytes) in
            [("eth3", "01".repeat(60)), ("eth0", "0".into()), ("eth0", "01".into())]
        {
            let problem = path.send(&frame(port, FastpathDirection::In, &bytes)).unwrap_err();
            assert_eq!(problem.kind, ProblemKind::Invalid, "{problem}");
        }
        // A connection that is refused, and one without a mux.
        fake.table().farewell = Some("more than 4 programs".into());
        let problem = counters(0, None).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Unavailable);
        assert!(problem.error.contains("more than 4 programs"), "{problem}");
        fake.kill();
        assert_eq!(counters(0, None).unwrap_err().kind, ProblemKind::Unavailable);
        std::fs::remove_file(&path.socket).unwrap();
        let problem = counters(0, None).unwrap_err();
        assert!(problem.error.contains("no socket for its slow path yet"), "{problem}");
    }
}
