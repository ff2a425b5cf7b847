//! A node's quota of numbers that the whole machine
//! uses: ephemeral UDP ports, and echo identifiers.
//!
//! Nodes use half of the machine's numbers; the other half is for the machine's own programs. A
//! node may have one [`PART`]th of the free numbers of the nodes' half. So k nodes with unlimited
//! demand have 1/(`PART` + k) of the half each, regardless of who came first. A node that comes
//! later gets as much. Switches use such dynamic thresholds to divide a buffer among ports
//! (Choudhury and Hahne, 1998). The helpers need not know each other.

use std::fs::{self, File};
use std::io::{self, Read, Seek};

/// A node may have one flow for each of this many free numbers of the nodes' half.
pub const PART: usize = 32;

/// Flows that a node may always have, however few numbers are free.
pub const FLOWS_SURE: usize = 4;

/// Reads the numbers in use, and computes how many of them a node may have.
#[derive(Debug)]
pub struct FlowQuota {
    /// Counters of the network namespace in which it was opened.
    counters: File,
    /// Beginning of the line with the count, and the count's position among the words after it.
    place: (&'static str, usize),
    /// Numbers for all nodes.
    shared: usize,
    /// Most flows of a node.
    most: usize,
}

impl FlowQuota {
    /// Opens the quota of ephemeral UDP ports in this thread's network namespace.
    pub fn of_ports(most: usize) -> io::Result<Self> {
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
        let mut range = range.split_whitespace().map(|port| port.parse::<usize>().unwrap_or(0));
        let (first, last) = (range.next().unwrap_or(0), range.next().unwrap_or(0));
        let counters = File::open("/proc/thread-self/net/sockstat")?;
        let shared = (last + 1).saturating_sub(first) / 2;
        Ok(Self { counters, place: ("UDP: inuse ", 0), shared, most })
    }

    /// Opens the quota of echo identifiers in this thread's network namespace.
    pub fn of_identifiers(most: usize) -> io::Result<Self> {
        let counters = File::open("/proc/thread-self/net/protocols")?;
        // The kernel never uses the identifier 0.
        let shared = usize::from(u16::MAX) / 2;
        Ok(Self { counters, place: ("PING ", 1), shared, most })
    }

    /// Numbers in use on the machine.
    pub fn in_use(&self) -> io::Result<usize> {
        let mut text = String::new();
        let mut counters = &self.counters;
        counters.rewind()?;
        counters.read_to_string(&mut text)?;
        let (line, word) = self.place;
        let words = text.lines().find_map(|text| text.strip_prefix(line));
        let count = words.and_then(|words| words.split_whitespace().nth(word)?.parse().ok());
        count.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// True if a node with this many flows may have one more.
    pub fn allows(&self, flows: usize) -> bool {
        let in_use = self.in_use().unwrap_or(self.shared);
        flows < allowed(self.shared, in_use.saturating_add(1), self.most)
    }

    /// True if a node has more flows than it may have now.
    pub fn is_exceeded(&self, flows: usize) -> bool {
        self.in_use().is_ok_and(|in_use| flows > allowed(self.shared, in_use, self.most))
    }

    /// Sets the numbers for all nodes.
    #[cfg(test)]
    pub fn set_shared(&mut self, shared: usize) {
        self.shared = shared;
    }
}

/// Flows that a node may have while `in_use` numbers are in use.
fn allowed(shared: usize, in_use: usize, most: usize) -> usize {
    (shared.saturating_sub(in_use) / PART).clamp(FLOWS_SURE, most)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Half of Linux's default range of ephemeral ports.
    const HALF: usize = 14_116;

    /// Lets nodes in turn take all that they may and release the excess, until nothing changes.
    fn settle(flows: &mut [usize], others: usize, most: usize, order: &[usize]) {
        for _ in 0..10_000 {
            let before = flows.to_vec();
            for &node in order {
                let in_use = |flows: &[usize]| others + flows.iter().sum::<usize>();
                while flows[node] > allowed(HALF, in_use(flows), most) {
                    flows[node] -= 1;
                }
                while flows[node] < allowed(HALF, in_use(flows) + 1, most) {
                    flows[node] += 1;
                }
            }
            if before == flows {
                return;
            }
        }
        panic!("it never settles: {flows:?}");
    }

    #[test]
    fn each_node_gets_flows_despite_greedy_tenants() {
        // A tenant with the default quota and unlimited demand.
        let mut flows = vec![0; 256];
        let first: Vec<_> = (0..128).collect();
        settle(&mut flows, 0, 256, &first);
        let taken: usize = flows.iter().sum();
        assert!(taken <= HALF * 4 / 5 && flows[..128].iter().all(|&flows| flows >= 87));
        // A node of another tenant has as many at once. Its
        // 128 nodes have half of the numbers in the end.
        assert!(allowed(HALF, taken + 85, 256) >= 85);
        let both: Vec<_> = (0..256).collect();
        settle(&mut flows, 0, 256, &both);
        assert!(flows.iter().all(|flows| (47..=50).contains(flows)), "{flows:?}");
        // A single node has all of its flows.
        let mut flows = vec![0];
        settle(&mut flows, 1_000, 256, &[0]);
        assert_eq!(flows, [256]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Whatever was taken before, and in any order of the nodes.
        #[test]
        fn flow_quotas_are_equal_and_leave_half(
            before in prop::collection::vec(0..=256usize, 1..500), others in 0..HALF, seed: prop::sample::Index,
        ) {
            let count = before.len();
            let mut order: Vec<_> = (0..count).collect();
            order.rotate_left(seed.index(count));
            let mut flows = before;
            settle(&mut flows, others, 256, &order);
            let part = ((HALF - others) / (PART + count)).min(256);
            prop_assert!(flows.iter().all(|&flows| flows + 2 > part), "{part}: {flows:?}");
            let sure = others + FLOWS_SURE * count;
            prop_assert!(others + flows.iter().sum::<usize>() <= HALF.max(sure));
        }
    }
}
