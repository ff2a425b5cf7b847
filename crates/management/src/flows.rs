//! Table of a node's flows by one protocol: the socket that each flow has, and the time when it loses it (pure).
//!
//! A flow is the node's port, or the identifier of its echo requests, and the far end that the node names. The times
//! are those of Linux's connection tracking (`nf_conntrack_udp_timeout`, `nf_conntrack_udp_timeout_stream` and
//! `nf_conntrack_icmp_timeout`), which is what NAT on a Linux machine does.

use std::collections::HashMap;
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

/// Time without a datagram after which a question and its answer are over.
pub const QUESTION: Duration = Duration::from_secs(30);

/// Idle time after which a UDP flow ends if the peer answered it for longer than [`STREAM_FROM`].
pub const STREAM: Duration = Duration::from_secs(120);

/// Age from which an answer makes a flow a stream.
const STREAM_FROM: Duration = Duration::from_secs(2);

/// A flow as the node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The node's port, or the identifier of its echo requests.
    pub port: u16,
    /// The far end that the node sends to; port 0 with echo requests.
    pub to: SocketAddrV4,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    flow: Flow,
    since: Instant,
    used: Instant,
    stream: bool,
}

impl Entry {
    fn over(&self, now: Instant, stream: Duration) -> bool {
        let time = if self.stream { stream } else { QUESTION };
        now.saturating_duration_since(self.used) >= time
    }
}

/// A flow's socket, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The flow has this socket.
    Has(usize),
    /// The flow gets this socket, which no flow has.
    Gets(usize),
    /// The flow gets this socket, which the least recently used flow has lost to it.
    Takes(usize),
}

/// See the module.
pub struct Flows {
    slots: Vec<Option<Entry>>,
    known: HashMap<Flow, usize>,
    free: Vec<usize>,
    stream: Duration,
}

impl Flows {
    /// Makes a table over so many sockets, one at least; streams end after `stream` without an answer.
    pub fn new(sockets: usize, stream: Duration) -> Self {
        let free = (0..sockets).rev().collect();
        Self { slots: vec![None; sockets], known: HashMap::with_capacity(sockets), free, stream }
    }

    /// Returns how many flows there are.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// Notes a message of the node, and returns the socket of its flow. `more` says whether a node with so many flows
    /// may have one more.
    pub fn sent(&mut self, flow: Flow, now: Instant, more: impl FnOnce(usize) -> bool) -> Slot {
        if let Some(&at) = self.known.get(&flow) {
            if let Some(entry) = &mut self.slots[at] {
                entry.used = now;
            }
            return Slot::Has(at);
        }
        let grows = !self.free.is_empty() && (self.known.is_empty() || more(self.known.len()));
        let free = if grows { self.free.pop() } else { None };
        let slot = match free {
            Some(at) => Slot::Gets(at),
            // Where none is free all are in use.
            None => Slot::Takes(self.least_recent().unwrap_or(0)),
        };
        let (Slot::Has(at) | Slot::Gets(at) | Slot::Takes(at)) = slot;
        let entry = Entry { flow, since: now, used: now, stream: false };
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

    /// Returns the flow that has a socket.
    pub fn of(&self, at: usize) -> Option<Flow> {
        Some(self.slots.get(at)?.as_ref()?.flow)
    }

    /// Notes an answer of the far end.
    pub fn answered(&mut self, at: usize, now: Instant) {
        if let Some(Some(entry)) = self.slots.get_mut(at) {
            entry.used = now;
            entry.stream |= now.saturating_duration_since(entry.since) >= STREAM_FROM;
        }
    }

    /// Takes the socket from its flow.
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
        let over = |entry: &Option<Entry>| entry.is_some_and(|entry| entry.over(now, stream));
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

    fn flow(number: u16) -> Flow {
        Flow { port: number, to: SocketAddrV4::new(Ipv4Addr::new(198, 51, 100, 9), 53) }
    }

    #[test]
    fn questions_and_streams_end_after_their_times() {
        let start = Instant::now();
        let later = |seconds| start + Duration::from_secs(seconds);
        let mut flows = Flows::new(4, STREAM);
        for number in 0..3 {
            assert_eq!(flows.sent(flow(number), start, |_| true), Slot::Gets(number.into()));
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
        // Where streams have no time of their own they end as questions do.
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
        assert_eq!(flows.sent(flow(2), later(3), |_| true), Slot::Takes(1));
        assert_eq!((flows.end_least_recent(), flows.of(1)), (Some(0), Some(flow(2))));
        assert_eq!((flows.end_least_recent(), flows.end_least_recent()), (Some(1), None));
        // A table that may not grow is full.
        let mut flows = Flows::new(8, STREAM);
        flows.sent(flow(0), start, |_| false);
        assert_eq!(flows.sent(flow(1), start, |_| false), Slot::Takes(0));
    }

    proptest! {
        /// Against a list of all flows in the order of their use.
        #[test]
        fn sockets_are_one_flows_at_a_time(
            steps in prop::collection::vec((0..12u16, 0..5u8, 0..40u64), 1..200),
        ) {
            const SOCKETS: usize = 5;
            let mut flows = Flows::new(SOCKETS, STREAM);
            let mut listed: Vec<(Flow, usize)> = Vec::new();
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
                        // The order of two uses at one time is nobody's promise.
                        now += Duration::from_millis(1);
                        let slot = flows.sent(flow, now, |_| true);
                        let at = match (place, slot) {
                            (Some(place), Slot::Has(at)) => {
                                prop_assert_eq!(listed.remove(place), (flow, at));
                                at
                            }
                            (None, Slot::Gets(at)) => {
                                prop_assert!(listed.len() < SOCKETS);
                                at
                            }
                            (None, Slot::Takes(at)) => {
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
