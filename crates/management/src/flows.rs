//! Table of a node's flows by one protocol: the socket
//! of each flow, and the time when it loses it (pure).
//!
//! A flow is the node's port or echo identifier, and the far end that the
//! node addresses. The times are those of Linux's connection tracking
//! (`nf_conntrack_udp_timeout`, `nf_conntrack_udp_timeout_stream` and
//! `nf_conntrack_icmp_timeout`), as used by NAT on a Linux machine.

use std::collections::HashMap;
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

/// Idle time after which a question and its answer are over.
pub const QUESTION: Duration = Duration::from_secs(30);

/// Idle time after which a UDP flow ends if the peer answered it for longer than [`STREAM_FROM`].
pub const STREAM: Duration = Duration::from_secs(120);

/// Age from which an answer makes a flow a stream.
const STREAM_FROM: Duration = Duration::from_secs(2);

/// Flow as the node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OutboundFlow {
    /// The node's port, or the identifier of its echo requests.
    pub port: u16,
    /// The far end; port 0 for echo requests.
    pub to: SocketAddrV4,
}

#[derive(Clone, Copy, Debug)]
struct FlowEntry {
    flow: OutboundFlow,
    since: Instant,
    used: Instant,
    stream: bool,
}

impl FlowEntry {
    fn over(&self, now: Instant, stream: Duration) -> bool {
        let time = if self.stream { stream } else { QUESTION };
        now.saturating_duration_since(self.used) >= time
    }
}

/// Socket of a flow, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowSlot {
    /// The flow already has this socket.
    Has(usize),
    /// The flow gets this free socket.
    Gets(usize),
    /// The flow gets the socket of the least recently used flow, which ends.
    Takes(usize),
}

/// Table of flows; see the module.
pub struct Flows {
    slots: Vec<Option<FlowEntry>>,
    known: HashMap<OutboundFlow, usize>,
    free: Vec<usize>,
    stream: Duration,
}

impl Flows {
    /// Makes a table for this many sockets, at least one.
    /// Streams end after `stream` without an answer.
    pub fn new(sockets: usize, stream: Duration) -> Self {
        let free = (0..sockets).rev().collect();
        Self { slots: vec![None; sockets], known: HashMap::with_capacity(sockets), free, stream }
    }

    /// Number of flows.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// Records a message of the node, and returns the socket of its flow. `more` returns true if a
    /// node with that many flows may have one more.
    pub fn sent(
        &mut self,
        flow: OutboundFlow,
        now: Instant,
        more: impl FnOnce(usize) -> bool,
    ) -> FlowSlot {
        if let Some(&at) = self.known.get(&flow) {
            if let Some(entry) = &mut self.slots[at] {
                entry.used = now;
            }
            return FlowSlot::Has(at);
        }
        let grows = !self.free.is_empty() && (self.known.is_empty() || more(self.known.len()));
        let free = if grows { self.free.pop() } else { None };
        let slot = match free {
            Some(at) => FlowSlot::Gets(at),
            // If none is free, all are in use.
            None => FlowSlot::Takes(self.least_recent().unwrap_or(0)),
        };
        let (FlowSlot::Has(at) | FlowSlot::Gets(at) | FlowSlot::Takes(at)) = slot;
        let entry = FlowEntry { flow, since: now, used: now, stream: false };
        if let Some(lost) = self.slots[at].replace(entry) {
            self.known.remove(&lost.flow);
        }
        self.known.insert(flow, at);
        slot
    }

    fn least_recent(&self) -> Option<usize> {
        let in_use = self.slots.iter().enumerate();
        in_use.filter_map(|(at, entry)| Some((entry.as_ref()?.used, at))).min().map(|(_, at)| at)
    }

    /// Flow that uses a socket.
    pub fn of(&self, at: usize) -> Option<OutboundFlow> {
        Some(self.slots.get(at)?.as_ref()?.flow)
    }

    /// Records an answer of the far end.
    pub fn answered(&mut self, at: usize, now: Instant) {
        if let Some(Some(entry)) = self.slots.get_mut(at) {
            entry.used = now;
            entry.stream |= now.saturating_duration_since(entry.since) >= STREAM_FROM;
        }
    }

    /// Ends the flow that uses a socket.
    pub fn end(&mut self, at: usize) {
        if let Some(entry) = self.slots.get_mut(at).and_then(Option::take) {
            self.known.remove(&entry.flow);
            self.free.push(at);
        }
    }

    /// Ends the least recently used flow, and returns its socket.
    pub fn end_least_recent(&mut self) -> Option<usize> {
        let at = self.least_recent()?;
        self.end(at);
        Some(at)
    }

    /// Ends the flows whose time is over, and returns their sockets.
    pub fn expire(&mut self, now: Instant) -> Vec<usize> {
        let stream = self.stream;
        let over = |entry: &Option<FlowEntry>| entry.is_some_and(|entry| entry.over(now, stream));
        let ended: Vec<_> = (0..self.slots.len()).filter(|&at| over(&self.slots[at])).collect();
        ended.iter().for_each(|&at| self.end(at));
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn flow(number: u16) -> OutboundFlow {
        OutboundFlow { port: number, to: SocketAddrV4::new(Ipv4Addr::new(198, 51, 100, 9), 53) }
    }

    #[test]
    fn flows_expire_after_their_timeouts() {
        let start = Instant::now();
        let later = |seconds| start + Duration::from_secs(seconds);
        let mut flows = Flows::new(4, STREAM);
        for number in 0..3 {
            assert_eq!(flows.sent(flow(number), start, |_| true), FlowSlot::Gets(number.into()));
        }
        // Answered at once, answered as a stream, never answered.
        flows.answered(0, later(1));
        flows.answered(1, later(3));
        assert!(flows.expire(later(29)).is_empty());
        assert_eq!(flows.expire(later(30)), [2]);
        assert_eq!(flows.expire(later(31)), [0]);
        assert!(flows.expire(later(122)).is_empty());
        assert_eq!(flows.expire(later(123)), [1]);
        assert_eq!(flows.of(1), None);
        // Without their own time, streams end like questions.
        let mut flows = Flows::new(1, QUESTION);
        flows.sent(flow(0), start, |_| true);
        flows.answered(0, later(3));
        assert_eq!(flows.expire(later(33)), [0]);
    }

    #[test]
    fn a_full_table_ends_the_least_recently_used_flow() {
        let start = Instant::now();
        let later = |seconds| start + Duration::from_secs(seconds);
        let mut flows = Flows::new(2, STREAM);
        flows.sent(flow(0), start, |_| true);
        flows.sent(flow(1), later(1), |_| true);
        flows.sent(flow(0), later(2), |_| true);
        assert_eq!(flows.sent(flow(2), later(3), |_| true), FlowSlot::Takes(1));
        assert_eq!((flows.end_least_recent(), flows.of(1)), (Some(0), Some(flow(2))));
        assert_eq!((flows.end_least_recent(), flows.end_least_recent()), (Some(1), None));
        // A table that may not grow is full.
        let mut flows = Flows::new(8, STREAM);
        flows.sent(flow(0), start, |_| false);
        assert_eq!(flows.sent(flow(1), start, |_| false), FlowSlot::Takes(0));
    }

    proptest! {
        /// Compares with a list of all flows in the order of their use.
        #[test]
        fn socket_belongs_to_one_flow_at_a_time(
            steps in prop::collection::vec((0..12u16, 0..5u8, 0..40u64), 1..200),
        ) {
            const SOCKETS: usize = 5;
            let mut flows = Flows::new(SOCKETS, STREAM);
            let mut listed: Vec<(OutboundFlow, usize)> = Vec::new();
            let mut now = Instant::now();
            for (number, kind, seconds) in steps {
                now += Duration::from_secs(seconds);
                for ended in flows.expire(now) {
                    listed.retain(|(_, at)| *at != ended);
                }
                let flow = flow(number);
                let place = listed.iter().position(|(known, _)| *known == flow);
                match kind {
                    0 => {
                        let Some(place) = place else { continue };
                        let known = listed.remove(place);
                        now += Duration::from_millis(1);
                        flows.answered(known.1, now);
                        listed.push(known);
                    }
                    1 => {
                        let Some(place) = place else { continue };
                        flows.end(listed.remove(place).1);
                    }
                    2 => {
                        let least = if listed.is_empty() { None } else { Some(listed.remove(0).1) };
                        prop_assert_eq!(flows.end_least_recent(), least);
                    }
                    _ => {
                        // The order of two simultaneous uses is not defined.
                        now += Duration::from_millis(1);
                        let slot = flows.sent(flow, now, |_| true);
                        let at = match (place, slot) {
                            (Some(place), FlowSlot::Has(at)) => {
                                prop_assert_eq!(listed.remove(place), (flow, at));
                                at
                            }
                            (None, FlowSlot::Gets(at)) => {
                                prop_assert!(listed.len() < SOCKETS);
                                at
                            }
                            (None, FlowSlot::Takes(at)) => {
                                prop_assert_eq!(listed.len(), SOCKETS);
                                prop_assert_eq!(listed.remove(0).1, at);
                                at
                            }
                            _ => return Err(TestCaseError::fail(format!("{place:?} {slot:?}"))),
                        };
                        prop_assert!(listed.iter().all(|(_, other)| *other != at));
                        listed.push((flow, at));
                    }
                }
                for (flow, at) in &listed {
                    prop_assert_eq!(flows.of(*at), Some(*flow));
                }
                prop_assert_eq!(flows.known.len() + flows.free.len(), SOCKETS);
            }
        }
    }
}
