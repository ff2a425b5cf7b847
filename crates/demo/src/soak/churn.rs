//! Routes that come and go: green's peers withdraw and announce again prefixes of the real table,
//! drawn in bursts, or as a file of BGP updates says.

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
use crate::outside::Machine;
use crate::table::{PEERS, Peers, Random, Table};

/// Prefixes that are drawn from.
const POOL: usize = 20_000;
/// Changes in a burst; in every other second, on average, there is one.
const BURST_MIN: u64 = 200;
const BURST_MAX: u64 = 3_000;
/// What happens together.
const SECOND: Duration = Duration::from_secs(1);
/// Shortest prefix that is taken from a file: what is shorter covers everything.
const PREFIX_BITS_MIN: u8 = 8;

/// A peer announces a prefix from now on, or no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Change {
    peer: usize,
    prefix: IpNet,
    announced: bool,
}

/// Where changes come from.
enum Source {
    /// Drawn.
    Random(Random),
    /// One list a second, over and over.
    File { seconds: Vec<Vec<Change>>, next: usize },
}

/// What changed so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prefixes announced.
    pub announced: u64,
    /// Prefixes withdrawn.
    pub withdrawn: u64,
    /// Most changes in a second.
    pub second_max: u64,
}

/// Who announces each prefix that moves.
pub struct Churn {
    source: Source,
    /// In a fixed order, for the draw.
    pool: Vec<IpNet>,
    /// Who announces each at the start and at the end: the table's.
    base: HashMap<IpNet, Peers>,
    now: HashMap<IpNet, Peers>,
    /// What changed so far.
    pub totals: Totals,
}

/// Changes under way.
pub struct Running {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Churn, Result<()>)>,
}

impl Churn {
    /// Changes drawn by a seed, or those of a file.
    pub fn new(table: &Table, seed: u64, file: Option<&Path>) -> Result<Self> {
        let Some(file) = file else {
            let mut random = Random(seed);
            let count = table.prefixes.len() as u64;
            let drawn = (0..POOL).map(|_| table.prefixes[(random.next() % count) as usize]);
            return Ok(Self::of(drawn.collect(), table, Source::Random(random)));
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
            seconds[second].push(Change { peer, prefix, announced: update.announced });
            prefixes.push(prefix);
        }
        ensure!(!seconds.is_empty(), "{}: no updates of unicast routes", file.display());
        Ok(Self::of(prefixes, table, Source::File { seconds, next: 0 }))
    }

    fn of(mut pool: Vec<IpNet>, table: &Table, source: Source) -> Self {
        pool.sort_unstable();
        pool.dedup();
        let of = |prefix: &IpNet| (*prefix, table.announced(*prefix).unwrap_or_default());
        let base: HashMap<IpNet, Peers> = pool.iter().map(of).collect();
        Self { source, pool, now: base.clone(), base, totals: Totals::default() }
    }

    /// What moves of the table.
    pub fn moving(&self) -> HashSet<IpNet> {
        let of_table = self.base.iter().filter(|(_, peers)| peers.0 != 0);
        of_table.map(|(prefix, _)| *prefix).collect()
    }

    /// Prefixes that move.
    pub fn prefixes(&self) -> usize {
        self.pool.len()
    }

    /// Whether the route to an address is none that moves.
    pub fn spares(&self, table: &Table, address: IpAddr) -> bool {
        let Some((longest, _)) = table.look_up(address) else { return false };
        let nearer = |prefix: &&IpNet| {
            prefix.prefix_len() >= longest.prefix_len() && prefix.contains(&address)
        };
        !self.pool.iter().any(|prefix| nearer(&prefix))
    }

    /// Who announces exactly this prefix now.
    pub fn announced(&self, table: &Table, prefix: IpNet) -> Option<Peers> {
        match self.now.get(&prefix) {
            Some(peers) => (peers.0 != 0).then_some(*peers),
            None => table.announced(prefix),
        }
    }

    /// How many prefixes are announced now.
    pub fn total(&self, table: &Table) -> usize {
        let count = |of: &HashMap<IpNet, Peers>| of.values().filter(|peers| peers.0 != 0).count();
        table.prefixes.len() - count(&self.base) + count(&self.now)
    }

    /// Fewest routes that there may be at any time.
    pub fn fewest(&self, table: &Table) -> usize {
        table.prefixes.len().saturating_sub(self.pool.len())
    }

    /// Changes routes from now on.
    pub fn start(mut self) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                let begin = Instant::now();
                let changes = self.draw();
                if let Err(error) = self.make(&changes) {
                    return (self, Err(error));
                }
                std::thread::sleep(SECOND.saturating_sub(begin.elapsed()));
            }
            (self, Ok(()))
        });
        Running { stop, thread }
    }

    /// Lets everybody announce again what they did at the start, and nothing else.
    pub fn restore(&mut self) -> Result<()> {
        let mut changes = Vec::new();
        for prefix in &self.pool {
            let (base, now) = (self.base[prefix], self.now[prefix]);
            for peer in (0..PEERS).filter(|peer| base.has(*peer) != now.has(*peer)) {
                changes.push(Change { peer, prefix: *prefix, announced: base.has(peer) });
            }
        }
        self.make(&changes)
    }

    /// What changes in the next second.
    fn draw(&mut self) -> Vec<Change> {
        let random = match &mut self.source {
            Source::File { seconds, next } => {
                let changes = seconds[*next].clone();
                *next = (*next + 1) % seconds.len();
                return changes;
            }
            Source::Random(random) => random,
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
            Change { peer, prefix, announced: now.has(peer) }
        };
        (0..count).map(one).collect()
    }

    fn make(&mut self, changes: &[Change]) -> Result<()> {
        let mut by_peer = [const { Vec::new() }; PEERS];
        for Change { peer, prefix, announced } in changes.iter().copied() {
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
            Machine::named(&format!("g{}", peer + 1))?.change_routes(changes.into_iter())?;
        }
        Ok(())
    }
}

impl Running {
    /// Ends it after the second that is under way.
    pub fn stop(self) -> Result<Churn> {
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

    fn churn(seed: u64) -> (Table, Churn) {
        let mut table = Table::default();
        for net in ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "2001:db8::/32"] {
            table.add(net.parse().unwrap());
        }
        let pool = vec!["10.1.0.0/16".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
        let churn = Churn::of(pool, &table, Source::Random(Random(seed)));
        (table, churn)
    }

    #[test]
    fn draws_repeat_by_seed_and_alternate_for_each_peer() {
        let (_, mut one) = churn(3);
        let (_, mut other) = churn(3);
        let mut now = one.base.clone();
        for _ in 0..20 {
            let changes = one.draw();
            assert_eq!(changes, other.draw());
            for Change { peer, prefix, announced } in changes {
                assert!(one.base[&prefix].has(peer) && announcers(prefix).has(peer));
                assert_ne!(now[&prefix].has(peer), announced);
                now.get_mut(&prefix).unwrap().0 ^= 1 << peer;
            }
            one.now = now.clone();
            other.now = now.clone();
        }
    }

    #[test]
    fn what_is_announced_follows() {
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
