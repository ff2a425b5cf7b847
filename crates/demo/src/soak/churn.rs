//! Route churn: green's peers withdraw prefixes of the real table and announce them again. The
//! changes are drawn in bursts, or follow a file of BGP updates.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use ipnet::IpNet;

use super::updates;
use crate::outside::ExternalMachine;
use crate::table::{AnnouncementTable, PEERS, Peers, SplitMix64};

/// Number of prefixes to draw from.
const POOL: usize = 20_000;
/// Changes in a burst. There is a burst in every other second, on average.
const BURST_MIN: u64 = 200;
const BURST_MAX: u64 = 3_000;
/// Interval in which changes happen together.
const SECOND: Duration = Duration::from_secs(1);
/// Shortest prefix taken from a file. Shorter ones would cover everything.
const PREFIX_BITS_MIN: u8 = 8;

/// A peer's announcement or withdrawal of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PrefixChange {
    peer: usize,
    prefix: IpNet,
    announced: bool,
}

/// Source of changes.
enum ChurnSource {
    /// Drawn at random.
    Random(SplitMix64),
    /// From a file: one list per second, repeated.
    File { seconds: Vec<Vec<PrefixChange>>, next: usize },
}

/// Number of changes so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prefixes announced.
    pub announced: u64,
    /// Prefixes withdrawn.
    pub withdrawn: u64,
    /// Largest number of changes in a second.
    pub second_max: u64,
}

/// Announcers of each moving prefix.
pub struct PrefixChurn {
    source: ChurnSource,
    /// Moving prefixes in a fixed order, for the draw.
    pool: Vec<IpNet>,
    /// Announcers of each at the start and at the end, from the table.
    base: HashMap<IpNet, Peers>,
    now: HashMap<IpNet, Peers>,
    /// Number of changes so far.
    pub totals: Totals,
}

/// Running changes.
pub struct RunningChurn {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(PrefixChurn, Result<()>)>,
}

impl PrefixChurn {
    /// Takes changes from a file, or draws them with a seed.
    pub fn new(table: &AnnouncementTable, seed: u64, file: Option<&Path>) -> Result<Self> {
        let Some(file) = file else {
            let mut random = SplitMix64(seed);
            let count = table.prefixes.len() as u64;
            let drawn = (0..POOL).map(|_| table.prefixes[(random.next() % count) as usize]);
            return Ok(Self::of(drawn.collect(), table, ChurnSource::Random(random)));
        };
        let mut seconds = Vec::new();
        let mut prefixes = Vec::new();
        for update in updates::read(file)? {
            if update.prefix.prefix_len() < PREFIX_BITS_MIN {
                continue;
            }
            let second = update.second as usize;
            seconds.resize_with(seconds.len().max(second + 1), Vec::new);
            let (peer, prefix) = (update.neighbour as usize % PEERS, update.prefix);
            seconds[second].push(PrefixChange { peer, prefix, announced: update.announced });
            prefixes.push(prefix);
        }
        ensure!(!seconds.is_empty(), "{}: no updates of unicast routes", file.display());
        Ok(Self::of(prefixes, table, ChurnSource::File { seconds, next: 0 }))
    }

    fn of(mut pool: Vec<IpNet>, table: &AnnouncementTable, source: ChurnSource) -> Self {
        pool.sort_unstable();
        pool.dedup();
        let of = |prefix: &IpNet| (*prefix, table.announced(*prefix).unwrap_or_default());
        let base: HashMap<IpNet, Peers> = pool.iter().map(of).collect();
        Self { source, pool, now: base.clone(), base, totals: Totals::default() }
    }

    /// Moving prefixes that are in the table.
    pub fn moving(&self) -> HashSet<IpNet> {
        let of_table = self.base.iter().filter(|(_, peers)| peers.0 != 0);
        of_table.map(|(prefix, _)| *prefix).collect()
    }

    /// Number of moving prefixes.
    pub fn prefixes(&self) -> usize {
        self.pool.len()
    }

    /// True if the route to an address does not move.
    pub fn spares(&self, table: &AnnouncementTable, address: IpAddr) -> bool {
        let Some((longest, _)) = table.look_up(address) else { return false };
        let nearer = |prefix: &&IpNet| {
            prefix.prefix_len() >= longest.prefix_len() && prefix.contains(&address)
        };
        !self.pool.iter().any(|prefix| nearer(&prefix))
    }

    /// Peers that announce exactly this prefix now.
    pub fn announced(&self, table: &AnnouncementTable, prefix: IpNet) -> Option<Peers> {
        match self.now.get(&prefix) {
            Some(peers) => (peers.0 != 0).then_some(*peers),
            None => table.announced(prefix),
        }
    }

    /// Number of prefixes announced now.
    pub fn total(&self, table: &AnnouncementTable) -> usize {
        let count = |of: &HashMap<IpNet, Peers>| of.values().filter(|peers| peers.0 != 0).count();
        table.prefixes.len() - count(&self.base) + count(&self.now)
    }

    /// Smallest number of routes that may exist at any time.
    pub fn fewest(&self, table: &AnnouncementTable) -> usize {
        table.prefixes.len().saturating_sub(self.pool.len())
    }

    /// Starts changing routes.
    pub fn start(mut self) -> RunningChurn {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let begin = Instant::now();
                let changes = self.draw();
                if let Err(error) = self.make(&changes) {
                    return (self, Err(error));
                }
                std::thread::sleep(SECOND.saturating_sub(begin.elapsed()));
            }
            (self, Ok(()))
        });
        RunningChurn { stop, thread }
    }

    /// Restores all peers' announcements of the start.
    pub fn restore(&mut self) -> Result<()> {
        let mut changes = Vec::new();
        for prefix in &self.pool {
            let (base, now) = (self.base[prefix], self.now[prefix]);
            for peer in (0..PEERS).filter(|peer| base.has(*peer) != now.has(*peer)) {
                changes.push(PrefixChange { peer, prefix: *prefix, announced: base.has(peer) });
            }
        }
        self.make(&changes)
    }

    /// Returns the changes of the next second.
    fn draw(&mut self) -> Vec<PrefixChange> {
        let random = match &mut self.source {
            ChurnSource::File { seconds, next } => {
                let changes = seconds[*next].clone();
                *next = (*next + 1) % seconds.len();
                return changes;
            }
            ChurnSource::Random(random) => random,
        };
        if random.next() % 2 == 0 {
            return Vec::new();
        }
        let count = BURST_MIN + random.next() % (BURST_MAX - BURST_MIN);
        let mut drawn: HashMap<IpNet, Peers> = HashMap::new();
        let one = |_| {
            let prefix = self.pool[(random.next() % self.pool.len() as u64) as usize];
            let base = self.base[&prefix];
            let nth = random.next() % u64::from(base.0.count_ones().max(1));
            let peer = (0..PEERS).filter(|peer| base.has(*peer)).nth(nth as usize).unwrap_or(0);
            let now = drawn.entry(prefix).or_insert(self.now[&prefix]);
            now.0 ^= 1 << peer;
            PrefixChange { peer, prefix, announced: now.has(peer) }
        };
        (0..count).map(one).collect()
    }

    fn make(&mut self, changes: &[PrefixChange]) -> Result<()> {
        let mut by_peer = [const { Vec::new() }; PEERS];
        for PrefixChange { peer, prefix, announced } in changes.iter().copied() {
            let now = self.now.entry(prefix).or_default();
            if now.has(peer) != announced {
                now.0 ^= 1 << peer;
                by_peer[peer].push((prefix, announced));
            }
        }
        let count: usize = by_peer.iter().map(Vec::len).sum();
        let announced = by_peer.iter().flatten().filter(|(_, announced)| *announced).count();
        self.totals.announced += announced as u64;
        self.totals.withdrawn += (count - announced) as u64;
        self.totals.second_max = self.totals.second_max.max(count as u64);
        for (peer, changes) in by_peer.into_iter().enumerate().filter(|(_, all)| !all.is_empty()) {
            ExternalMachine::named(&format!("g{}", peer + 1))?
                .change_routes(changes.into_iter())?;
        }
        Ok(())
    }
}

impl RunningChurn {
    /// Ends it after the current second.
    pub fn stop(self) -> Result<PrefixChurn> {
        self.stop.store(true, Ordering::Relaxed);
        let (churn, result) =
            self.thread.join().map_err(|_| anyhow!("changing routes panicked"))?;
        result.map(|()| churn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::announcers;

    fn churn(seed: u64) -> (AnnouncementTable, PrefixChurn) {
        let mut table = AnnouncementTable::default();
        for net in ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "2001:db8::/32"] {
            table.add(net.parse().unwrap());
        }
        let pool = vec!["10.1.0.0/16".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
        let churn = PrefixChurn::of(pool, &table, ChurnSource::Random(SplitMix64(seed)));
        (table, churn)
    }

    #[test]
    fn churn_is_repeatable_and_alternates_per_peer() {
        let (_, mut one) = churn(3);
        let (_, mut other) = churn(3);
        let mut now = one.base.clone();
        for _ in 0..20 {
            let changes = one.draw();
            assert_eq!(changes, other.draw());
            for PrefixChange { peer, prefix, announced } in changes {
                assert!(one.base[&prefix].has(peer) && announcers(prefix).has(peer));
                assert_ne!(now[&prefix].has(peer), announced);
                now.get_mut(&prefix).unwrap().0 ^= 1 << peer;
            }
            one.now = now.clone();
            other.now = now.clone();
        }
    }

    #[test]
    fn announcements_follow_the_churn() {
        let (table, mut churn) = churn(1);
        let prefix: IpNet = "10.1.0.0/16".parse().unwrap();
        assert_eq!(churn.total(&table), 4);
        assert_eq!(churn.announced(&table, prefix), Some(announcers(prefix)));
        churn.now.insert(prefix, Peers(0));
        assert_eq!(churn.total(&table), 3);
        assert_eq!(churn.announced(&table, prefix), None);
        let spared = |address: &str| churn.spares(&table, address.parse().unwrap());
        assert!(spared("10.2.0.1") && spared("10.1.2.1"));
        assert!(!spared("10.1.3.1") && !spared("2001:db8::1") && !spared("192.0.2.1"));
    }
}
