//! Long run of Figure 1: continuous traffic and route churn, and a fault in two cycles of three. At
//! the end it reports leaks, losses, and anything that did not recover.
//!
//! - A cycle without a fault, or with one that leaves forwarding alone, loses no datagrams.
//!   Exceptions are losses that the kernel reports in sockets and interfaces outside vnets.
//! - Without a fault no datagram is reordered. None ever arrives twice or leaves by a wrong
//!   interface.
//! - After a fault everything recovers within [`BACK_MAX`]; losses meanwhile are reported.
//! - After every cycle the counters of every node add up. Red's tables agree with its kernel's;
//!   blue only has its kernel's. At the end green's agree too, route by route.
//! - At the end the node holds the same resources as after [`WARM_CYCLES`] cycles (`leaks`).

mod churn;
mod faults;
mod leaks;
mod report;
mod updates;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use ipnet::IpNet;
use pdp_api::{Phase, Stats};
use pdp_testbed::{end_on_signals, interrupted, retry};

use self::churn::PrefixChurn;
use self::faults::{Bag, GREEN_GUESTS, SoakFault};
use self::leaks::ResourceSample;
use self::report::{FaultCost, SoakCheck, Story};
use crate::counters::{CounterSample, PortSums};
use crate::figure::{Figure1, VNETS};
use crate::node::DemoNode;
use crate::outside::{ExternalMachine, POLL_PAUSE};
use crate::paths;
use crate::run::{self, Demo, step};
use crate::table::{AnnouncementTable, PEERS, Peers, SplitMix64};
use crate::traffic::{self, Arrival, RunningTraffic};

/// All of Figure 1.
const FIGURE: Figure1 = Figure1::ALL;
/// Default name of a soak demo.
pub const NAME: &str = "soak";

/// Cycles before the baseline of resources is taken: by then caches are warm.
const WARM_CYCLES: u64 = 3;
/// One of this many cycles is without a fault, as is the first.
const QUIET_ONE_OF: u64 = 3;
/// One of this many cycles ends with a TCP run.
const TCP_ONE_OF: u64 = 4;
/// Longest time for recovery after a fault.
const BACK_MAX: Duration = Duration::from_secs(180);
/// Longest wait for counters and tables to agree while they change.
const AGREE_MAX: Duration = Duration::from_secs(20);
/// Traffic before a fault and after recovery, and in a cycle without a fault.
const LEAD: Duration = Duration::from_secs(2);
const QUIET: Duration = Duration::from_secs(8);
/// Datagrams per second from end to end of red and of blue, and through green.
const THROUGH_PPS: u64 = 300;
const GREEN_PPS: u64 = 800;
/// Destinations in the real table, and how many of them a cycle uses.
const STEADY: usize = 10_000;
const TARGETS: usize = 1_000;
/// Neighbours of red's OSPF and of blue's IS-IS.
const NEIGHBOURS: usize = 2;
/// Sessions of green's BIRD: IPv4 and IPv6 with each peer.
const SESSIONS: usize = 2 * PEERS;

/// Options of the command line.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Duration in minutes, after everything is up
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// Seed, to repeat the same faults and route changes
    #[arg(long)]
    seed: Option<u64>,
    /// Change routes according to this file of BGP updates (MRT, gzip), second by second
    #[arg(long, value_name = "FILE")]
    updates: Option<PathBuf>,
    /// File for the report
    #[arg(long, value_name = "FILE", default_value = "soak-report.md")]
    report: PathBuf,
    /// Directory of the repository, with examples/ and data/.
    #[arg(long, default_value = ".")]
    repo: PathBuf,
}

/// Runs it, takes everything down, and writes the report.
pub fn run(options: &Options) -> Result<()> {
    end_on_signals()?;
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut story = Story::new(options.seed.unwrap_or(clock.as_secs()));
    let soaked = soak(options, &mut story);
    if let Err(error) = &soaked {
        story.wrong(SoakCheck::Whole, format!("{error:#}"));
    }
    // The daemon's log, if anything was wrong.
    if story.problems() > 0 {
        let log = options.report.with_extension("pdpd.log");
        let _ = std::fs::copy(paths::run().join("pdpd.log"), log);
    }
    let node = DemoNode::new();
    let down = step("removing the demo", || {
        // A fault may have stopped the daemon, which is needed to remove the node. Without a node,
        // this fails and reports that.
        if paths::run().exists() {
            let _ = node.up(None);
        }
        run::remove(&node)
    });
    if let Err(error) = down {
        story.wrong(SoakCheck::Down, format!("{error:#}"));
    }
    for left in leaks::leftovers() {
        story.wrong(SoakCheck::Down, left);
    }
    let text = story.text();
    std::fs::write(&options.report, &text)
        .with_context(|| format!("write {}", options.report.display()))?;
    println!("\n{text}");
    let problems = story.problems();
    ensure!(problems == 0, "{problems} problems found; see {}", options.report.display());
    Ok(())
}

/// Brings it up and runs the cycles.
fn soak(options: &Options, story: &mut Story) -> Result<()> {
    let mut table =
        step("reading the real table", || AnnouncementTable::read(&options.repo.join("data")))?;
    let churn = PrefixChurn::new(&table, story.seed, options.updates.as_deref())?;
    table.moving = churn.moving();
    story.moving = churn.prefixes();
    let (mut demo, _) = run::bring_up(&options.repo, table, FIGURE)?;
    for problem in demo.problems.drain(..) {
        story.wrong(SoakCheck::Whole, problem);
    }
    prepare(&demo.node, &options.repo)?;
    let mut random = SplitMix64(story.seed);
    let mut steady = demo.table.draw(STEADY, &mut random);
    steady.retain(|address| churn.spares(&demo.table, *address));
    let mut soak = Soak {
        fewest: churn.fewest(&demo.table),
        demo,
        story,
        random,
        steady,
        roles: leaks::roles(&leaks::processes()),
        start: Instant::now(),
        runs: 0,
    };
    let churn = soak.cycles(churn, Duration::from_secs(60 * options.minutes))?;
    soak.close(churn)
}

/// Prepares what the demo's own checks would set up, and an engine for the temporary vnet.
fn prepare(node: &DemoNode, repo: &Path) -> Result<()> {
    for number in 1..=PEERS {
        ExternalMachine::named(&format!("g{number}"))?.accept_everything()?;
    }
    let g1 = ExternalMachine::named("g1")?.machine();
    g1.finish(&["ip", "route", "replace", "10.1.0.0/30", "via", "10.1.1.1"])?;
    let figure1 = std::fs::read_to_string(repo.join("examples/figure1/figure1.yaml"))?;
    node.apply(&faults::engine(&figure1)?)
}

struct Soak<'a> {
    demo: Demo,
    story: &'a mut Story,
    random: SplitMix64,
    /// Destinations whose routes stay.
    steady: Vec<IpAddr>,
    /// Smallest number of routes that green may have.
    fewest: usize,
    /// Processes while all is well, by role.
    roles: BTreeMap<String, u64>,
    start: Instant,
    runs: u32,
}

/// Traffic of a vnet in a cycle.
struct CycleFlow {
    vnet: &'static str,
    targets: Vec<IpAddr>,
    pps: u64,
    running: RunningTraffic,
}

/// Statistics of a cycle's datagrams.
#[derive(Clone, Copy, Debug, Default)]
struct CycleTraffic {
    sent: u64,
    arrived: u64,
    reordered: u64,
    gap_ms: u64,
}

impl Soak<'_> {
    fn minute(&self) -> f64 {
        self.start.elapsed().as_secs_f64() / 60.0
    }

    /// Runs all cycles. Takes the baseline of resources
    /// after the first few, with the routes as at the end.
    fn cycles(&mut self, churn: PrefixChurn, time: Duration) -> Result<PrefixChurn> {
        let mut bag = Bag::new(self.story.seed);
        let mut running = churn.start();
        while self.start.elapsed() < time || self.story.baseline.is_none() {
            ensure!(!interrupted(), "interrupted");
            let fault = (!self.story.cycles.is_multiple_of(QUIET_ONE_OF)).then(|| bag.draw());
            self.cycle(fault)?;
            self.story.cycles += 1;
            self.story.minutes = self.minute();
            if self.story.cycles == WARM_CYCLES {
                let mut churn = running.stop()?;
                self.restore(&mut churn)?;
                self.story.baseline = Some(ResourceSample::take(self.minute())?);
                running = churn.start();
            }
        }
        running.stop()
    }

    /// Runs one cycle: traffic, a fault, and all checks.
    fn cycle(&mut self, fault: Option<SoakFault>) -> Result<()> {
        let number = self.story.cycles + 1;
        let first = CounterSample::take(&self.demo.node, &VNETS)?;
        let dropped = dropped(&self.demo.node.stats()?);
        let flows = self.start_flows()?;
        std::thread::sleep(LEAD);
        let begin = Instant::now();
        let injected = match fault {
            Some(fault) => fault.inject(&self.demo.node).map(Some),
            None => {
                std::thread::sleep(QUIET);
                Ok(None)
            }
        };
        let detail = injected.and_then(|detail| self.wait_back().map(|()| detail));
        let took = begin.elapsed();
        std::thread::sleep(LEAD);
        let traffic_sums = self.finish_flows(flows, fault.is_some())?;
        let lost = traffic_sums.sent.saturating_sub(traffic_sums.arrived);
        let CycleTraffic { gap_ms, .. } = traffic_sums;
        self.story.sent += traffic_sums.sent;
        self.story.arrived += traffic_sums.arrived;
        let last = CounterSample::take(&self.demo.node, &VNETS)?;
        let (devices, sockets) = (last.lost_in_underlay(&first), last.lost_outside(&first));
        let outside = lost.min(devices + sockets);
        let took_s = took.as_secs_f64();
        let what = match (fault, detail) {
            (Some(SoakFault { kind, vnet, .. }), Err(error)) => {
                let what = format!("cycle {number}: {} ({vnet}): {error:#}", kind.name());
                self.story.wrong(SoakCheck::Back, what);
                // After this wait it will not recover.
                bail!("ended after cycle {number}");
            }
            (Some(SoakFault { kind, .. }), Ok(detail)) => {
                self.story.lost_in_faults += lost;
                let cost = FaultCost { took_s, lost, outside, gap_ms };
                self.story.faults.entry(kind).or_default().push(cost);
                let detail = detail.unwrap_or_default();
                format!("{} ({detail}), back in {took_s:.1} s", kind.name())
            }
            (None, detail) => {
                detail?;
                self.story.lost_in_kernel += outside;
                self.judge_quiet(number, &traffic_sums, &first, &last);
                "no fault".to_owned()
            }
        };
        let what = format!(
            "{number:>5}  {what}: {lost} of {} lost, gap {gap_ms} ms; the kernel reports {devices} \
             in interfaces, {sockets} in sockets",
            traffic_sums.sent
        );
        println!("{what}");
        if lost > outside && fault.is_none_or(|fault| fault.is_harmless()) {
            self.lost(&what, lost - outside, &dropped)?;
        }
        self.agree(number)?;
        if number.is_multiple_of(TCP_ONE_OF) {
            self.tcp((number / TCP_ONE_OF) as usize);
        }
        self.story.samples.push(ResourceSample::take(self.minute())?);
        Ok(())
    }

    /// Starts the traffic of all vnets.
    fn start_flows(&mut self) -> Result<Vec<CycleFlow>> {
        let mut flows = Vec::new();
        for vnet in VNETS {
            self.runs += 1;
            let named = (vnet, self.runs);
            let (from, sinks, targets, pps) = if vnet == "green" {
                let sinks: Vec<String> = (1..=PEERS).map(|number| format!("g{number}")).collect();
                let count = self.steady.len() as u64;
                let draw = |_| self.steady[(self.random.next() % count) as usize];
                ("g0".to_owned(), sinks, (0..TARGETS).map(draw).collect(), GREEN_PPS)
            } else {
                let target = "10.0.20.1".parse()?;
                (format!("{vnet}-x"), vec![format!("{vnet}-y")], vec![target], THROUGH_PPS)
            };
            let sinks: Vec<&ExternalMachine> =
                sinks.iter().map(|name| ExternalMachine::named(name)).collect::<Result<_>>()?;
            let from = ExternalMachine::named(&from)?;
            let running = RunningTraffic::start(named, from, &sinks, &targets, (0, pps))?;
            flows.push(CycleFlow { vnet, targets, pps, running });
        }
        Ok(flows)
    }

    /// Ends the traffic, and checks where it went.
    fn finish_flows(&mut self, flows: Vec<CycleFlow>, fault: bool) -> Result<CycleTraffic> {
        let mut traffic_sums = CycleTraffic::default();
        for CycleFlow { vnet, targets, pps, running } in flows {
            let (sent, arrivals) = running.finish()?;
            let table = &self.demo.table;
            let judgement = traffic::judge(&targets, &arrivals, |address| {
                if vnet != "green" {
                    return Some((IpNet::from(address), Peers(1)));
                }
                let (prefix, peers) = table.look_up(address)?;
                // A fault may withdraw routes; then a shorter prefix applies.
                Some((prefix, if fault { table.look_up_any(address) } else { peers }))
            });
            traffic_sums.sent += sent;
            traffic_sums.arrived += judgement.arrived() - judgement.twice;
            traffic_sums.reordered += judgement.reordered;
            traffic_sums.gap_ms = traffic_sums.gap_ms.max(gap_ms(&arrivals, pps));
            let cycle = self.story.cycles + 1;
            if let Some(wrong) = judgement.wrong.first() {
                let what = format!("cycle {cycle}, {vnet}: {}: {wrong:?}", judgement.wrong.len());
                self.story.wrong(SoakCheck::Paths, what);
            }
            if judgement.twice > 0 {
                let what = format!("cycle {cycle}, {vnet}: {} arrived twice", judgement.twice);
                self.story.wrong(SoakCheck::Order, what);
            }
        }
        Ok(traffic_sums)
    }

    /// Reports losses, beyond those that the kernel reports, in a cycle that must lose nothing.
    fn lost(&mut self, what: &str, count: u64, before: &BTreeMap<String, u64>) -> Result<()> {
        let mut dropped = dropped(&self.demo.node.stats()?);
        for (reason, count) in &mut dropped {
            *count -= before.get(reason).copied().unwrap_or(0).min(*count);
        }
        dropped.retain(|_, count| *count > 0);
        self.story.lost += count;
        self.story.wrong(
            SoakCheck::Lost,
            format!("{what}: {count} unexplained; dropped by reason: {dropped:?}"),
        );
        Ok(())
    }

    /// Further checks of a cycle without a fault.
    fn judge_quiet(
        &mut self,
        number: u64,
        traffic_sums: &CycleTraffic,
        first: &CounterSample,
        last: &CounterSample,
    ) {
        if traffic_sums.reordered > 0 {
            let what = format!("cycle {number}: {} of one flow reordered", traffic_sums.reordered);
            self.story.wrong(SoakCheck::Order, what);
        }
        for vnet in VNETS {
            for difference in last.disagreements(first, vnet) {
                self.story.wrong(SoakCheck::Kernel, format!("cycle {number}: {difference}"));
            }
        }
    }

    fn wait_back(&self) -> Result<()> {
        retry(BACK_MAX, POLL_PAUSE, "recovery", || self.is_back())
    }

    /// Succeeds if everything has recovered.
    fn is_back(&self) -> Result<()> {
        let node = &self.demo.node;
        let stats = node.stats()?;
        for vnet in VNETS {
            let guests = FIGURE.guests(vnet);
            let router = stats.vnets.get(vnet).and_then(|stats| stats.nodes.get("r1"));
            let router = router.with_context(|| format!("no counters of {vnet}/r1"))?;
            let connected = router.guests.values().filter(|guest| guest.connected).count();
            ensure!(connected == guests, "{vnet}: {connected} of {guests} guests connected");
            let status = node.inspect(vnet)?;
            ensure!(status.phase == Phase::Running, "{vnet}: {:?}", status.message);
            let down = status.links.iter().find(|link| !link.carrier);
            ensure!(down.is_none(), "{vnet}: no carrier on {down:?}");
            if guests == 0 {
                continue;
            }
            let routes = router.routes.as_ref().context("no route mirror")?;
            let synced = routes.guests.iter().filter(|g| g.synced && g.backlog_bytes == 0).count();
            ensure!(synced == guests, "{vnet}: {synced} of {guests} guests have all routes");
            let count = routes.routes_v4 + routes.routes_v6;
            let least = if vnet == "green" { self.fewest as u64 } else { 0 };
            ensure!(count >= least, "{vnet}: {count} routes, {least} expected at least");
        }
        let substrate = node.substrate()?;
        ensure!(substrate.phase == Phase::Running, "substrate: {:?}", substrate.message);
        ensure!(substrate.externals.iter().all(|it| it.attached), "{:?}", substrate.externals);
        let roles = leaks::roles(&leaks::processes());
        ensure!(roles == self.roles, "processes: {roles:?}, before {:?}", self.roles);
        let igps = [("red", "show ip ospf neighbor", "Full"), ("blue", "show isis neighbor", "Up")];
        for (vnet, show, up) in igps {
            let neighbours = node.exec(&format!("{vnet}/r1"), &["vtysh", "-c", show])?;
            let count = neighbours.matches(up).count();
            ensure!(count == NEIGHBOURS, "{vnet}: {count} of {NEIGHBOURS} neighbours are up");
            let from = ExternalMachine::named(&format!("{vnet}-x"))?.machine();
            from.finish(&["ping", "-c1", "-W1", "-I", "10.0.10.1", "10.0.20.1"])?;
            node.exec(&format!("{vnet}/h1"), &["ping", "-c1", "-W1", "10.0.20.1"])?;
        }
        ExternalMachine::named("g0")?.machine().finish(&["ping", "-c1", "-W1", "10.1.1.2"])?;
        let birdc = |words: &[&str]| {
            node.exec("green/r1", &[&["birdc", "-s", "/run/bird.ctl", "show"], words].concat())
        };
        let sessions = birdc(&["protocols"])?.matches("Established").count();
        ensure!(sessions == SESSIONS, "green: {sessions} of {SESSIONS} BGP sessions");
        let count = birdc(&["route", "count"])?;
        let total = networks(&count);
        ensure!(total >= self.fewest, "green: BIRD has {total} of {} networks", self.fewest);
        Ok(())
    }

    /// Checks that must hold after every cycle.
    fn agree(&mut self, number: u64) -> Result<()> {
        let node = &self.demo.node;
        let adds_up = retry(AGREE_MAX, POLL_PAUSE, "counters", || {
            for (vnet, stats) in node.stats()?.vnets {
                for (name, stats) in stats.nodes {
                    let missing = PortSums::of(&stats).missing();
                    ensure!(missing == 0, "{vnet}/{name}: {missing} frames unaccounted for");
                }
            }
            Ok(())
        });
        let tables = retry(AGREE_MAX, POLL_PAUSE, "tables", || {
            node.pdp(&["routes", "red/r1", "--diff"]).map(drop)
        });
        if let Err(error) = adds_up {
            self.story.wrong(SoakCheck::Counters, format!("cycle {number}: {error:#}"));
        }
        if let Err(error) = tables {
            self.story.wrong(SoakCheck::Tables, format!("cycle {number}: {error:#}"));
        }
        Ok(())
    }

    /// Measures TCP through one of the vnets.
    fn tcp(&mut self, round: usize) {
        let (from, to, source, address) = [
            ("red-x", "red-y", Some("10.0.10.1"), "10.0.20.1"),
            ("blue-x", "blue-y", Some("10.0.10.1"), "10.0.20.1"),
            ("g0", "g1", None, "10.1.1.2"),
        ][round % 3];
        let machines =
            ExternalMachine::named(from).and_then(|from| Ok((from, ExternalMachine::named(to)?)));
        let result = machines.and_then(|(from, to)| run::iperf(from, to, source, address));
        match result {
            Ok(result) => println!("       TCP {from} to {to}: {result}"),
            Err(error) => self.story.wrong(SoakCheck::Tcp, format!("{from} to {to}: {error:#}")),
        }
    }

    /// Compares green's tables with the announcements, route by route.
    fn compare(&mut self, churn: &PrefixChurn, when: &str) -> Result<()> {
        for guest in 0..GREEN_GUESTS as u32 {
            let table = &self.demo.table;
            let title = format!("comparing green's guest {guest} with the announcements, {when}");
            let equal = step(&title, || {
                retry(BACK_MAX, POLL_PAUSE, "the announced table", || {
                    let faults = self.demo.table_faults(guest, churn.total(table), |prefix| {
                        churn.announced(table, prefix)
                    })?;
                    ensure!(faults.is_empty(), "{} routes differ: {}", faults.len(), faults[0]);
                    Ok(())
                })
            });
            if let Err(error) = equal {
                self.story.wrong(SoakCheck::Tables, format!("{error:#}"));
            }
        }
        Ok(())
    }

    /// Restores the routes of the start, and waits for recovery.
    fn restore(&mut self, churn: &mut PrefixChurn) -> Result<()> {
        churn.restore()?;
        self.compare(churn, "with all routes as at the start")?;
        self.wait_back()
    }

    /// Final comparisons, without traffic and changes.
    fn close(&mut self, mut churn: PrefixChurn) -> Result<()> {
        self.compare(&churn, "as after the changes")?;
        self.restore(&mut churn)?;
        let diff = self.demo.node.pdp(&["routes", "green/r1", "--diff"]);
        if let Err(error) = diff {
            self.story.wrong(SoakCheck::Tables, format!("{error:#}"));
        }
        for round in 0..3 {
            self.tcp(round);
        }
        self.agree(self.story.cycles)?;
        self.story.churn = churn.totals;
        self.story.end = Some(ResourceSample::take(self.minute())?);
        Ok(())
    }
}

/// Frames dropped in all nodes, by reason.
fn dropped(stats: &Stats) -> BTreeMap<String, u64> {
    let mut dropped = BTreeMap::new();
    for (vnet, stats) in &stats.vnets {
        for (name, stats) in &stats.nodes {
            for (reason, count) in PortSums::of(stats).dropped {
                *dropped.entry(format!("{vnet}/{name} {reason}")).or_default() += count;
            }
        }
    }
    dropped
}

/// Longest gap between two datagrams at any sink, calculated from their numbers.
fn gap_ms(arrivals: &[Vec<Arrival>], pps: u64) -> u64 {
    let at_sink = |arrivals: &Vec<Arrival>| {
        let mut numbers: Vec<u64> = arrivals.iter().map(|arrival| arrival.seq).collect();
        numbers.sort_unstable();
        numbers.windows(2).map(|pair| pair[1] - pair[0] - 1).max().unwrap_or(0)
    };
    arrivals.iter().map(at_sink).max().unwrap_or(0) * 1000 / pps.max(1)
}

/// Networks in all tables, from BIRD's `show route count`: `5 of 5 routes for 3 networks in table
/// …`.
fn networks(text: &str) -> usize {
    let lines = text.lines().filter(|line| line.contains(" in table "));
    let count = |line: &str| line.split(" for ").nth(1)?.split(' ').next()?.parse::<usize>().ok();
    lines.filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_traffic_gaps() {
        let at = |numbers: &[u64]| {
            numbers.iter().map(|seq| Arrival { seq: *seq, delay_ns: 0 }).collect::<Vec<_>>()
        };
        assert_eq!(gap_ms(&[at(&[0, 1, 2]), at(&[9, 5, 7])], 100), 10);
        assert_eq!(gap_ms(&[at(&[0, 1, 2])], 100), 0);
        assert_eq!(gap_ms(&[Vec::new()], 0), 0);
    }

    #[test]
    fn networks_are_counted() {
        let text = "BIRD 2.0.12 ready.
7 of 7 routes for 5 networks in table master4
                    2 of 2 routes for 2 networks in table master6
Total: 9 of 9 routes for 7 networks in 2 tables
";
        assert_eq!(networks(text), 7);
    }
}
