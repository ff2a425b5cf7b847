//! Looks for what nobody tells the daemon, while somebody watches: once for all who do.
//!
//! A sample is one call to the mux (for one vnet alone, where nobody watches another), and a look at cgroups: of
//! vnets that are watched by name each time, and of all others in turn, for as long as the sampler's part of the CPU
//! lasts. Samples that cost much come less often, so that it takes [`LOAD_MAX`] of a core, whatever there is.
//! Mirrors, which run on their tenants' share of the CPU, are asked by a thread of their own: those of vnets that
//! are watched by name once a second, all others once in [`MIRROR_PAUSE`] at most, [`MIRRORS_AT_ONCE`] a
//! second.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdp_api::Usage;
use pdp_proto::mux;
use rustix::time::{ClockId, clock_gettime};

use super::taken::{NodeUsage, Taken, VnetUsage};
use super::{Seen, Wish};
use crate::ask::{Answer, Question};
use crate::control::Mirror;
use crate::engine::Engine;
use crate::plan::{NodePlan, Places, Plan};
use crate::reconcile::lock;
use crate::state::access::now_ms;

/// What the sampler takes of a core at most, as one of so many parts.
pub const LOAD_MAX: u32 = 25;

/// What looks at cgroups in turn take of a core at most, beside all else that is in a sample: they come to their end
/// however much the mux has to say.
const TURN_LOAD_MAX: u32 = 100;

/// Pause between two rounds of questions to mirrors.
const MIRRORS_EVERY: Duration = Duration::from_secs(1);

/// Pause between two questions to a mirror that nobody watches by name.
pub const MIRROR_PAUSE: Duration = Duration::from_secs(10);

/// Of those, asked in one round.
pub const MIRRORS_AT_ONCE: usize = 32;

/// Statuses that are found anew at each sample though nothing told of them, in turn: how commands are shows in files
/// alone. Those of vnets that are watched by name are all.
const TELLS_AT_ONCE: usize = 8;

/// What it keeps between samples.
#[derive(Debug, Default)]
pub struct Sampler {
    number: u64,
    usage: BTreeMap<String, Arc<VnetUsage>>,
    /// The vnet and node that were looked at last, in turn.
    last: Option<(String, String)>,
    /// The vnet whose status was found last, in turn.
    last_told: String,
}

fn clock(id: ClockId) -> Duration {
    let now = clock_gettime(id);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// CPU time of this thread.
fn cpu() -> Duration {
    clock(ClockId::ThreadCPUTime)
}

/// The monotonic clock, nanoseconds.
fn at_ns() -> u64 {
    u64::try_from(clock(ClockId::Monotonic).as_nanos()).unwrap_or(u64::MAX)
}

/// Takes samples while somebody watches. Does not return.
pub fn run(engine: &Engine) {
    let (board, mut sampler) = (engine.board(), Sampler::default());
    loop {
        let wishes = board.wait_for_wishes();
        let every = wishes.iter().map(|wish| wish.every).min().unwrap_or_default();
        let began = (Instant::now(), cpu());
        sampler.sample(engine, &wishes, every);
        // Whoever comes meanwhile need not wait for the next sample, but for its share of the CPU.
        let least = (cpu() - began.1) * LOAD_MAX;
        std::thread::sleep(least.saturating_sub(began.0.elapsed()));
        board.wait_for_others(every.saturating_sub(began.0.elapsed()));
    }
}

/// The vnets that are watched by name; `None`: somebody watches all.
fn named(wishes: &[Wish]) -> Option<Vec<&str>> {
    let names: Option<Vec<&str>> = wishes.iter().map(|wish| wish.vnet.as_deref()).collect();
    names.map(|mut names| {
        names.sort_unstable();
        names.dedup();
        names
    })
}

impl Sampler {
    fn sample(&mut self, engine: &Engine, wishes: &[Wish], every: Duration) {
        let began = cpu();
        let (board, plan) = (engine.board(), engine.model().plan.clone());
        let names = named(wishes);
        let one = match names.as_deref() {
            Some([name]) => Some(*name),
            _ => None,
        };
        let stats = match engine.host.stats(one, &plan) {
            Ok(stats) => stats,
            Err(error) if error.is_late() => return,
            // None runs, or none of this vnet.
            Err(_) => mux::Stats::default(),
        };
        let mux::Stats { externals, vnets, workers } = stats;
        // Kept twice, for statuses and for the sample: shared, since there are many counters.
        let vnets = shared(vnets);
        let changed = lock(&board.seen).absorb(&vnets, one);
        board.touch_vnets(changed.iter().map(String::as_str));
        self.usage.retain(|name, _| plan.vnets.contains_key(name));
        match &names {
            Some(names) => board.touch_vnets(names.iter().copied()),
            None => {
                let named = wishes.iter().filter_map(|wish| wish.vnet.as_deref());
                let after = (Bound::Excluded(self.last_told.as_str()), Bound::Unbounded);
                let after = plan.vnets.range::<str, _>(after).map(|(name, _)| name.as_str());
                let turn: Vec<&str> = after.take(TELLS_AT_ONCE).collect();
                let full = turn.len() == TELLS_AT_ONCE;
                let last = turn.last().filter(|_| full).map(|name| (*name).to_owned());
                board.touch_vnets(turn.into_iter().chain(named));
                self.last_told = last.unwrap_or_default();
            }
        }
        let enough = |began: Duration, part: u32| cpu() - began > every / part;
        for wish in wishes {
            let wanted = wish.vnet.as_ref().and_then(|name| plan.vnets.get_key_value(name));
            let Some((name, vnet)) = wanted else { continue };
            for (node, wanted) in &vnet.nodes {
                if enough(began, LOAD_MAX) {
                    break;
                }
                self.look(engine, name, node, wanted);
            }
        }
        if names.is_none() {
            let began = cpu();
            self.look_in_turn(engine, &plan, || enough(began, TURN_LOAD_MAX));
        }
        self.number += 1;
        let mirrors = lock(&board.seen).mirrors.clone();
        board.tell_sample(Taken {
            number: self.number,
            at_ms: now_ms(),
            at_ns: at_ns(),
            vnets,
            externals,
            workers,
            plan,
            usage: self.usage.clone(),
            mirrors,
        });
    }

    /// Looks at nodes from where the last turn ended, once around at most.
    fn look_in_turn(&mut self, engine: &Engine, plan: &Plan, enough: impl Fn() -> bool) {
        let (first, node) = self.last.take().unwrap_or_default();
        let after = plan.vnets.range::<str, _>((Bound::Included(first.as_str()), Bound::Unbounded));
        let before =
            plan.vnets.range::<str, _>((Bound::Unbounded, Bound::Excluded(first.as_str())));
        for (name, vnet) in after.chain(before) {
            for (at, wanted) in &vnet.nodes {
                if *name == first && *at <= node {
                    continue;
                }
                self.look(engine, name, at, wanted);
                if enough() {
                    self.last = Some((name.clone(), at.clone()));
                    return;
                }
            }
        }
    }

    fn look(&mut self, engine: &Engine, vnet: &str, node: &str, plan: &NodePlan) {
        let cgroups = engine.host.runtime.cgroups();
        let usage = |cgroup: &str| {
            // One that is not there has used nothing yet.
            let used = cgroups.usage(cgroup).ok()?;
            Some(Usage {
                usage_at_ns: at_ns(),
                cpu_ns: used.cpu_ns,
                throttled_ns: used.throttled_ns,
                memory_bytes: used.memory_bytes,
                memory_kills: used.memory_kills,
            })
        };
        let guests = plan.guests.keys().filter_map(|&number| {
            Some((number, usage(&Places::guest_cgroup(vnet, node, number))?))
        });
        let guests = guests.collect();
        let control = usage(&Places::node_cgroup(vnet, node)).unwrap_or_default();
        let kernel = plan.kernel.as_ref().and_then(|kernel| usage(&kernel.cgroup));
        let nodes = Arc::make_mut(self.usage.entry(vnet.to_owned()).or_default());
        nodes.insert(node.to_owned(), NodeUsage { control, guests, kernel });
    }
}

/// What the mux counted, by vnet.
type Counted = BTreeMap<String, Arc<mux::VnetStats>>;

pub(super) fn shared(vnets: BTreeMap<String, mux::VnetStats>) -> Counted {
    vnets.into_iter().map(|(name, stats)| (name, Arc::new(stats))).collect()
}

impl Seen {
    /// Takes what the mux said, of one vnet or of all; the vnets whose status that may change.
    pub(super) fn absorb(&mut self, vnets: &Counted, one: Option<&str>) -> Vec<String> {
        let mut changed = Vec::new();
        for (name, now) in vnets {
            let before = self.mux.insert(name.clone(), now.clone());
            if before.is_none_or(|before| tells(&before) != tells(now)) {
                changed.push(name.clone());
            }
        }
        let is_gone =
            |name: &String| !vnets.contains_key(name) && one.is_none_or(|one| one == name);
        let gone: Vec<String> = self.mux.keys().filter(|name| is_gone(name)).cloned().collect();
        for name in gone {
            self.mux.remove(&name);
            changed.push(name);
        }
        changed
    }
}

/// What of a vnet's counters shows in its status.
fn tells(stats: &mux::VnetStats) -> Vec<(bool, Option<mux::UnderlayProblem>, &[String])> {
    let nodes = stats.nodes.values();
    let each = nodes.flat_map(|node| {
        let guests = node.guests.values().map(|guest| guest.connected);
        let engine = node.engine.iter().map(|engine| engine.synced);
        let processes = guests.chain(engine).map(|is| (is, None, &[][..]));
        processes.chain(node.ports.values().map(|port| (false, port.underlay, &port.limiting[..])))
    });
    each.collect()
}

/// Asks mirrors while somebody watches. Does not return.
pub fn ask_mirrors(engine: &Engine) {
    loop {
        let wishes = engine.board().wait_for_wishes();
        ask_some(engine, &wishes);
        std::thread::sleep(MIRRORS_EVERY);
    }
}

/// Asks those of vnets that are watched by name, and if somebody watches all, some others that were not asked for
/// long.
fn ask_some(engine: &Engine, wishes: &[Wish]) {
    let plan = engine.model().wanted();
    let is_named = |name: &str| wishes.iter().any(|wish| wish.vnet.as_deref() == Some(name));
    let all = named(wishes).is_none();
    let said = lock(&engine.board().seen).mirrors.clone();
    let (mut chosen, mut others) = (Vec::new(), Vec::new());
    for (name, vnet) in plan.vnets.iter() {
        let wanted = is_named(name);
        if !wanted && !all {
            continue;
        }
        for mirror in vnet.nodes.values().filter_map(|node| node.mirror.as_ref()) {
            let path = &mirror.config.control_socket;
            let asked = said.get(name).and_then(|said| said.get(path)).map(|(asked, _)| *asked);
            match (wanted, asked) {
                (true, _) => chosen.push((name, path)),
                (false, Some(asked)) if asked.elapsed() < MIRROR_PAUSE => {}
                (false, asked) => others.push((asked, name, path)),
            }
        }
    }
    others.sort_unstable();
    chosen.extend(others.into_iter().take(MIRRORS_AT_ONCE).map(|(_, name, path)| (name, path)));
    let questions: Vec<_> = chosen
        .iter()
        .map(|(name, path)| Question {
            path: (*path).clone(),
            tenant: pdp_spec::tenant_of(name).map(str::to_owned),
            what: Mirror { path: (*path).clone() },
        })
        .collect();
    let answers = engine.late.ask(&questions, |mirror: &Mirror, wait| mirror.status(wait));
    for ((name, path), answer) in chosen.into_iter().zip(answers) {
        keep(engine, name, path, answer);
    }
}

/// Keeps what a mirror said, and has the status of its vnet found anew if that changes it.
pub(super) fn keep(
    engine: &Engine,
    vnet: &str,
    path: &std::path::Path,
    answer: Answer<pdp_proto::mirror::Status>,
) {
    let shown = |answer: &Answer<pdp_proto::mirror::Status>| match answer {
        Answer::Said(said) => {
            let guests: Vec<_> =
                said.guests.iter().map(|guest| (guest.guest, guest.synced)).collect();
            Answer::Said((said.settled, said.routes_refused > 0, said.hooks.clone(), guests))
        }
        Answer::None => Answer::None,
        Answer::Late => Answer::Late,
    };
    let board = engine.board();
    let mut seen = lock(&board.seen);
    let said = Arc::make_mut(seen.mirrors.entry(vnet.to_owned()).or_default());
    let is = shown(&answer);
    let was = said.insert(path.into(), (Instant::now(), answer));
    drop(seen);
    if was.is_none_or(|(_, was)| shown(&was) != is) {
        board.touch_vnets([vnet]);
    }
}
