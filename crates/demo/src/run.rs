//! The demo from start to end.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::Table as Sheet;
use indicatif::{ProgressBar, ProgressStyle};
use ipnet::IpNet;
use pdp_api::RouteTarget;
use pdp_testbed::{TcpResult, retry};

use crate::counters::{CounterSample, PortSums};
use crate::figure::Figure1;
use crate::node::DemoNode;
use crate::outside::{self, ExternalMachine, POLL_PAUSE};
use crate::paths;
use crate::table::{AnnouncementTable, PEERS, Peers, SplitMix64};
use crate::traffic::{self, Judgement, RunningTraffic};

/// Longest wait for OSPF's and IS-IS' routes.
const ADJACENCY_MAX: Duration = Duration::from_secs(90);
/// Longest wait for the whole Internet table.
const TABLE_MAX: Duration = Duration::from_secs(600);
/// Destinations drawn from the real table, and datagrams to each.
const TARGETS: usize = 10_000;
const ROUNDS: u64 = 5;
/// Datagrams a second of a run.
const PPS: u64 = 5_000;
/// Datagrams from end to end of red and of blue.
const THROUGH: u64 = 20_000;
/// Seconds of an iperf3 run.
const IPERF_SECONDS: &str = "5";
/// Pings of a vnet.
const PINGS: &str = "50";
/// Smallest part of the datagrams that each port towards a peer must take.
const SHARE_MIN: f64 = 0.1;

/// Measurements of a vnet.
#[derive(Default)]
struct Measured {
    ping: String,
    tcp: String,
    datagrams: u64,
    judgement: Judgement,
}

/// The running demo.
pub struct Demo {
    /// The node.
    pub node: DemoNode,
    /// Announced routes of green.
    pub table: AnnouncementTable,
    /// Problems found so far.
    pub problems: Vec<String>,
    figure: Figure1,
    run: u32,
}

/// Brings everything up, runs traffic, checks, and leaves
/// it running. `repo` contains examples/ and data/.
pub fn up(repo: &Path, figure: Figure1) -> Result<()> {
    let start = Instant::now();
    let table = match figure.has_green() {
        true => step("reading the real table", || AnnouncementTable::read(&repo.join("data")))?,
        false => AnnouncementTable::default(),
    };
    let (mut demo, first) = bring_up(repo, table, figure)?;
    if figure.has_green() {
        demo.compare_tables()?;
    }
    let mut measured = BTreeMap::new();
    for &vnet in figure.vnets() {
        let title = format!("{vnet}: ping, iperf3, UDP");
        measured.insert(vnet, step(&title, || demo.measure(vnet))?);
    }
    if figure.has_green() {
        demo.judge_green(&measured["green"].judgement);
        step("planting a wrong route, to see that the check finds it", || demo.plant())?;
    }
    demo.close(&first, &measured)?;
    println!("\nTook {} s.", start.elapsed().as_secs());
    demo.next_commands();
    if demo.problems.is_empty() {
        return Ok(());
    }
    bail!("{} checks failed:\n  {}", demo.problems.len(), demo.problems.join("\n  "))
}

/// Brings it up, and waits until all routes are learned. Returns counters from before that as well.
pub fn bring_up(
    repo: &Path,
    table: AnnouncementTable,
    figure: Figure1,
) -> Result<(Demo, CounterSample)> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "the demo makes network namespaces: run it as root"
    );
    let node = DemoNode::new();
    if outside::exists() {
        step("removing the running demo", || remove(&node))?;
    }
    step("making the underlay and nine external machines", || {
        outside::make_underlay()?;
        outside::make_machines()
    })?;
    step("pdp up -f examples/figure1/figure1.yaml", || node.up(Some(&figure.spec(repo)?)))?;
    let mut demo = Demo { node, table, problems: Vec::new(), figure, run: 0 };
    demo.allocation()?;
    step("waiting for all forwarding guests", || demo.guests_connected())?;
    let first = CounterSample::take(&demo.node, figure.vnets())?;
    step("starting FRR and BIRD outside", || outside::start_software(&demo.table, figure.vnets()))?;
    let begin = Instant::now();
    step("waiting for OSPF", || demo.wait_adjacency("red"))?;
    step("waiting for IS-IS", || demo.wait_adjacency("blue"))?;
    if figure.has_green() {
        demo.wait_table(begin)?;
    }
    Ok((demo, first))
}

/// Removes every trace.
pub fn down() -> Result<()> {
    step("removing the demo", || remove(&DemoNode::new()))
}

/// Removes every trace of a node and of its environment.
pub fn remove(node: &DemoNode) -> Result<()> {
    let stopped = node.down();
    // Whatever the node reports, remove everything outside it.
    outside::remove()?;
    stopped
}

/// Runs a step with a progress sign on the terminal, and prints its duration.
pub fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let bar = ProgressBar::new_spinner().with_message(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    let start = Instant::now();
    let result = work().with_context(|| what.to_owned());
    bar.finish_and_clear();
    let mark = if result.is_ok() { "done  " } else { "failed" };
    println!("{mark} {what} ({:.1} s)", start.elapsed().as_secs_f64());
    result
}

impl Demo {
    fn expect(&mut self, holds: bool, problem: impl FnOnce() -> String) {
        if !holds {
            let problem = problem();
            println!("WRONG  {problem}");
            self.problems.push(problem);
        }
    }

    /// Engines of a vnet's r1, by guest.
    fn engines(&self, vnet: &str) -> Result<Vec<(u32, String, u64)>> {
        let vnet = self.node.inspect(vnet)?;
        let router = vnet.nodes.iter().find(|node| node.name == "r1");
        let guests = &router.context("no r1")?.guests;
        Ok(guests.iter().map(|g| (g.number, g.fe.clone(), g.share_millicores)).collect())
    }

    fn allocation(&mut self) -> Result<()> {
        for &vnet in self.figure.vnets() {
            let (engines, guests) = (self.engines(vnet)?, self.figure.guests(vnet));
            let share = if vnet == "green" { 300 } else { 150 };
            let fits = engines.len() == guests && engines.iter().all(|guest| guest.2 == share);
            self.expect(fits, || {
                format!("{vnet} does not have {guests} guests of {share} millicores: {engines:?}")
            });
            let by = match guests {
                0 => "its router's own kernel forwards (dataPlane: {kind: kernel})".to_owned(),
                1 => format!("a guest on a part of engine {} forwards", engines[0].1),
                _ => format!("{guests} guests on whole engines forward"),
            };
            println!("       {vnet}: {by}");
        }
        Ok(())
    }

    fn guests_connected(&self) -> Result<()> {
        retry(ADJACENCY_MAX, POLL_PAUSE, "forwarding guests", || {
            let stats = self.node.stats()?;
            for &vnet in self.figure.vnets() {
                let guests = self.figure.guests(vnet);
                let router = stats.vnets.get(vnet).and_then(|stats| stats.nodes.get("r1"));
                let connected = router.map_or(0, |router| {
                    router.guests.values().filter(|guest| guest.connected).count()
                });
                ensure!(connected == guests, "{vnet}: {connected} of {guests} are connected");
            }
            Ok(())
        })
    }

    /// Waits until the machines at the two ends of red or blue reach each other.
    fn wait_adjacency(&self, vnet: &str) -> Result<()> {
        let machine = ExternalMachine::named(&format!("{vnet}-x"))?.machine();
        let ping = ["ping", "-c1", "-W1", "-I", "10.0.10.1", "10.0.20.1"];
        retry(ADJACENCY_MAX, POLL_PAUSE, vnet, || Ok(machine.finish(&ping).map(drop)?))
    }

    fn wait_table(&mut self, begin: Instant) -> Result<()> {
        let total = self.table.prefixes.len() as u64;
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template(
            "green learns the Internet {bar:30} {human_pos}/{human_len} {elapsed}",
        ) {
            bar.set_style(style);
        }
        let (want_v4, want_v6) = (self.table.count(true) as u64, self.table.count(false) as u64);
        let waited = retry(TABLE_MAX, POLL_PAUSE, "the whole table", || {
            let routes = self.node.stats_of("green", "r1")?.routes.context("no route mirror")?;
            bar.set_position((routes.routes_v4 + routes.routes_v6).min(total));
            ensure!(routes.routes_refused == 0, "{} routes refused", routes.routes_refused);
            ensure!(
                routes.routes_v4 >= want_v4
                    && routes.routes_v6 >= want_v6
                    && routes.guests.len() == 2
                    && routes.guests.iter().all(|guest| guest.synced && guest.backlog_bytes == 0),
                "{routes:?}"
            );
            Ok(())
        });
        bar.finish_and_clear();
        let took = begin.elapsed().as_secs_f64();
        println!("done   green learned {want_v4} IPv4 and {want_v6} IPv6 routes ({took:.1} s)");
        waited
    }

    /// Compares both forwarding guests' tables with the announcements, route by route.
    fn compare_tables(&mut self) -> Result<()> {
        for guest in [0, 1] {
            let title = format!("comparing green's guest {guest} with the announcements");
            let wrong = step(&title, || {
                // Next hops may still change while the last peer's updates come in.
                let mut wrong = Vec::new();
                retry(Duration::from_secs(60), POLL_PAUSE, &title, || {
                    wrong = self.table_faults(guest, self.table.prefixes.len(), |prefix| {
                        self.table.announced(prefix)
                    })?;
                    ensure!(wrong.is_empty(), "{} routes differ: {}", wrong.len(), wrong[0]);
                    Ok(())
                })
                .or_else(|error| if wrong.is_empty() { Err(error) } else { Ok(()) })?;
                Ok(wrong)
            })?;
            self.expect(wrong.is_empty(), || {
                format!(
                    "green guest {guest}: {} routes differ: {:?}",
                    wrong.len(),
                    &wrong[..wrong.len().min(3)]
                )
            });
        }
        Ok(())
    }

    /// Differences of a guest's table from the announcements, which have `total` prefixes.
    pub fn table_faults(
        &self,
        guest: u32,
        total: usize,
        announced: impl Fn(IpNet) -> Option<Peers>,
    ) -> Result<Vec<String>> {
        let mut faults = Vec::new();
        let mut matched = 0;
        self.node.routes("green/r1", guest, |row| {
            let ports: Peers = match row.guest.as_ref().or(row.kernel.as_ref()) {
                Some(RouteTarget::Hops(hops)) => {
                    let number = |port: &str| port.strip_prefix("eth")?.parse::<u8>().ok();
                    let bits = hops.iter().filter_map(|hop| number(&hop.port)?.checked_sub(1));
                    Peers(bits.fold(0, |set, bit| set | 1u8.checked_shl(bit.into()).unwrap_or(0)))
                }
                _ => Peers(0),
            };
            match announced(row.prefix) {
                Some(peers) if peers == ports => matched += 1,
                Some(peers) => {
                    faults.push(format!("{} by {ports:?}, announced by {peers:?}", row.prefix));
                }
                None if own_prefix(row.prefix) => {}
                None => faults.push(format!("no peer announced {}", row.prefix)),
            }
            Ok(())
        })?;
        if faults.is_empty() && matched != total {
            faults.push(format!("{} of {total} routes are missing", total - matched));
        }
        Ok(faults)
    }

    fn measure(&mut self, vnet: &str) -> Result<Measured> {
        if vnet == "green" {
            let (from, to) = (ExternalMachine::named("g0")?, ExternalMachine::named("g1")?);
            // g1 answers g0 through the router, and only that.
            to.machine().finish(&["ip", "route", "replace", "10.1.0.0/30", "via", "10.1.1.1"])?;
            let ping = ping(from, None, "10.1.1.2")?;
            let tcp = iperf(from, to, None, "10.1.1.2")?;
            let targets = self.table.draw(TARGETS, &mut SplitMix64(2009));
            let (sent, judgement) = self.shower(&targets, ROUNDS)?;
            return Ok(Measured { ping, tcp, datagrams: sent, judgement });
        }
        let from = ExternalMachine::named(&format!("{vnet}-x"))?;
        let to = ExternalMachine::named(&format!("{vnet}-y"))?;
        let inner = self.node.exec(&format!("{vnet}/h1"), &["ping", "-c3", "-W2", "10.0.20.1"]);
        self.expect(inner.is_ok(), || format!("{vnet}/h1 does not reach {vnet}-y: {inner:?}"));
        let ping = ping(from, Some("10.0.10.1"), "10.0.20.1")?;
        let tcp = iperf(from, to, Some("10.0.10.1"), "10.0.20.1")?;
        let target: IpAddr = "10.0.20.1".parse()?;
        let (sent, arrivals) = self.send(from, &[to], &[target], THROUGH)?;
        let judgement =
            traffic::judge(&[target], &arrivals, |address| Some((IpNet::from(address), Peers(1))));
        Ok(Measured { ping, tcp, datagrams: sent, judgement })
    }

    /// Sends datagrams from g0 to targets in the real table; judges them by the reference look-up.
    fn shower(&mut self, targets: &[IpAddr], rounds: u64) -> Result<(u64, Judgement)> {
        let from = ExternalMachine::named("g0")?;
        let mut peers = Vec::new();
        for number in 1..=PEERS {
            let peer = ExternalMachine::named(&format!("g{number}"))?;
            peer.accept_everything()?;
            peers.push(peer);
        }
        let (sent, arrivals) = self.send(from, &peers, targets, rounds)?;
        Ok((sent, traffic::judge(targets, &arrivals, |address| self.table.look_up(address))))
    }

    /// Sends datagrams and collects the arrivals at each sink.
    fn send(
        &mut self,
        from: &ExternalMachine,
        sinks: &[&ExternalMachine],
        targets: &[IpAddr],
        rounds: u64,
    ) -> Result<(u64, Vec<Vec<traffic::Arrival>>)> {
        self.run += 1;
        RunningTraffic::start(("check", self.run), from, sinks, targets, (rounds, PPS))?.finish()
    }

    fn judge_green(&mut self, judgement: &Judgement) {
        let arrived = judgement.arrived();
        for (peer, count) in judgement.by_peer.iter().enumerate() {
            let share = *count as f64 / arrived.max(1) as f64;
            println!(
                "       green: {:.1}% of the datagrams left by eth{}",
                share * 100.0,
                peer + 1
            );
            self.expect(share >= SHARE_MIN, || format!("eth{} took only {share:.3}", peer + 1));
        }
        let wrong = &judgement.wrong;
        self.expect(wrong.is_empty(), || {
            format!("{} datagrams left by a wrong interface: {:?}", wrong.len(), wrong.first())
        });
        println!(
            "done   {arrived} datagrams left by interfaces that the reference look-up allows: {}",
            if wrong.is_empty() { "all" } else { "not all" }
        );
    }

    /// Plants a wrong route for one prefix in green's control
    /// guest, and expects the check to find exactly that route.
    fn plant(&mut self) -> Result<()> {
        let (target, prefix, peer) = self.single().context("no prefix with one announcer")?;
        let wrong = (peer + 2) % PEERS + 1;
        let (prefix_text, gateway) = (prefix.to_string(), format!("10.1.{wrong}.2"));
        let device = format!("eth{wrong}");
        let route = |verb| ["ip", "route", verb, &*prefix_text, "via", &*gateway, "dev", &*device];
        let mut targets = self.table.draw(50, &mut SplitMix64(7));
        targets.retain(|other| !prefix.contains(other));
        targets.push(target);
        // Metric 0 wins over BIRD's.
        self.node.exec("green/r1", &route("replace"))?;
        let found = retry(Duration::from_secs(30), POLL_PAUSE, "the wrong route", || {
            let (_, judgement) = self.shower(&targets, 10)?;
            ensure!(!judgement.wrong.is_empty(), "nothing was found");
            let of_it = |wrong: &traffic::Misdelivery| wrong.prefix == Some(prefix);
            ensure!(judgement.wrong.iter().all(of_it), "others too: {:?}", judgement.wrong);
            Ok(())
        });
        self.node.exec("green/r1", &route("delete"))?;
        if found.is_ok() {
            println!("       {prefix}, announced by g{} alone, left by {device}: found", peer + 1);
        }
        self.expect(found.is_ok(), || format!("a planted wrong route for {prefix}: {found:?}"));
        let clean = retry(Duration::from_secs(30), POLL_PAUSE, "the right route", || {
            let (_, judgement) = self.shower(&targets, 10)?;
            ensure!(judgement.wrong.is_empty(), "still wrong: {:?}", judgement.wrong.first());
            Ok(())
        });
        self.expect(clean.is_ok(), || format!("after the wrong route was removed: {clean:?}"));
        Ok(())
    }

    /// Returns an IPv4 address whose longest prefix has a single announcer.
    fn single(&self) -> Option<(IpAddr, IpNet, usize)> {
        let mut random = SplitMix64(11);
        (0..1000).find_map(|_| {
            let target = *self.table.draw(1, &mut random).first()?;
            let (prefix, peers) = self.table.look_up(target)?;
            let one = target.is_ipv4() && peers.0.count_ones() == 1;
            one.then_some((target, prefix, peers.0.trailing_zeros() as usize))
        })
    }

    /// Prints the closing table.
    fn close(&mut self, first: &CounterSample, measured: &BTreeMap<&str, Measured>) -> Result<()> {
        let last = CounterSample::take(&self.node, self.figure.vnets())?;
        let stats = self.node.stats()?;
        let mut sheet = Sheet::new();
        let vnets = self.figure.vnets();
        sheet.set_header([&[""], vnets].concat());
        let mut rows: Vec<(&str, Vec<String>)> = [
            "forwards",
            "routes",
            "in",
            "made",
            "out",
            "punted",
            "consumed",
            "dropped",
            "in flight",
            "adds up",
            "agrees with the kernel",
            "TCP",
            "ping",
            "UDP sent",
            "UDP lost",
            "UDP delay",
            "reordered",
            "twice",
        ]
        .map(|row| (row, Vec::new()))
        .into();
        for &vnet in vnets {
            let router = stats.vnets.get(vnet).and_then(|stats| stats.nodes.get("r1"));
            let router = router.with_context(|| format!("no counters of {vnet}/r1"))?;
            let sums = PortSums::of(router);
            let missing = sums.missing();
            self.expect(missing == 0, || {
                format!("{vnet}/r1: {missing} frames are unaccounted for")
            });
            let differences = last.disagreements(first, vnet);
            let agrees = differences.is_empty();
            for difference in differences {
                self.expect(false, || difference);
            }
            let guests: Vec<String> = router
                .guests
                .iter()
                .map(|(number, g)| format!("{number}: {} {}m", g.fe, g.share_millicores))
                .collect();
            let routes = router.routes.as_ref();
            let udp = &measured[vnet];
            let judgement = &udp.judgement;
            let loss = udp.datagrams.saturating_sub(judgement.arrived());
            self.expect(judgement.reordered == 0, || {
                format!("{vnet}: {} datagrams of one flow were reordered", judgement.reordered)
            });
            let cells = [
                if guests.is_empty() { "the kernel".into() } else { guests.join("\n") },
                routes.map_or("in the kernel".into(), |r| {
                    format!("{} v4, {} v6", r.routes_v4, r.routes_v6)
                }),
                sums.received.to_string(),
                sums.made.to_string(),
                sums.sent.to_string(),
                sums.punted.to_string(),
                sums.consumed.to_string(),
                sums.dropped_text(),
                sums.in_flight.to_string(),
                if missing == 0 { "yes".into() } else { format!("no: {missing}") },
                if agrees { "yes" } else { "no" }.into(),
                udp.tcp.clone(),
                udp.ping.clone(),
                udp.datagrams.to_string(),
                format!("{loss} ({:.3}%)", loss as f64 * 100.0 / udp.datagrams.max(1) as f64),
                format!("{:.0} µs, p99 {:.0}", judgement.delay_us(0.5), judgement.delay_us(0.99)),
                judgement.reordered.to_string(),
                judgement.twice.to_string(),
            ];
            for (row, cell) in rows.iter_mut().zip(cells) {
                row.1.push(cell);
            }
        }
        for (name, cells) in rows {
            sheet.add_row([vec![name.to_owned()], cells].concat());
        }
        println!("\n{sheet}");
        println!(
            "Lost by the kernel outside vnets: {} frames by interfaces between the machines and the \
             mux, {} in the machines' sockets.",
            last.lost_in_underlay(first),
            last.lost_outside(first)
        );
        Ok(())
    }

    fn next_commands(&self) {
        let pdp = self.node.command_line();
        let red_x = paths::netns("red-x");
        let kernel = self.figure.kernel();
        let green = match self.figure.has_green() {
            true => format!(
                "  {pdp} routes green/r1 --within 193.0.0.0/16\n  {pdp} routes green/r1 --diff\n"
            ),
            false => String::new(),
        };
        let down = match paths::name() {
            paths::NAME_DEFAULT => "make demo-down".to_owned(),
            name => format!("target/release/pdp-demo down --name {name}"),
        };
        println!(
            "\nIt is up. Try:
  {pdp} get
  {pdp} stats --watch
  {pdp} exec red/r1 -- vtysh -c 'show ip ospf neighbor'
  {pdp} exec blue/r1 -- vtysh -c 'show isis neighbor'
  {pdp} exec {kernel}/r1 -- ip route
{green}  {pdp} capture red/r1:eth0 -w - | tcpdump -nr -
  {pdp} trace red/r1:eth0
  ip netns exec {red_x} traceroute -s 10.0.10.1 10.0.20.1
  {down}"
        );
    }
}

/// True for prefixes that green itself has: its links', and those of every IPv6 interface.
fn own_prefix(prefix: IpNet) -> bool {
    let own = ["10.1.0.0/16", "fd00:1::/32", "fe80::/10", "ff00::/8"];
    own.iter().filter_map(|net| net.parse::<IpNet>().ok()).any(|net| net.contains(&prefix))
}

/// Round-trip times and loss between two machines.
fn ping(from: &ExternalMachine, source: Option<&str>, to: &str) -> Result<String> {
    let mut words = vec!["ping", "-q", "-i", "0.05", "-W", "2", "-c", PINGS];
    words.extend(source.into_iter().flat_map(|source| ["-I", source]));
    words.push(to);
    let text = from.machine().finish(&words)?;
    let loss = text.split(", ").find(|part| part.contains("packet loss")).unwrap_or("?");
    let times = text.lines().find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "));
    let average = times.and_then(|times| times.split('/').nth(1)).unwrap_or("?");
    Ok(format!("{average} ms, {}", loss.split_whitespace().next().unwrap_or("?")))
}

/// Measures TCP between two machines.
pub fn iperf(
    from: &ExternalMachine,
    to: &ExternalMachine,
    source: Option<&str>,
    address: &str,
) -> Result<String> {
    let log = paths::outside().join(to.name).join("iperf3.log");
    let server = ["iperf3", "-s", "-1", "-B", address, "--forceflush"];
    let mut server = to.machine().background(&server, &log)?;
    let listening = retry(Duration::from_secs(10), POLL_PAUSE, "iperf3", || {
        let mut output = String::new();
        fs::File::open(&log)?.read_to_string(&mut output)?;
        ensure!(output.contains("listening"), "it does not listen: {output}");
        Ok(())
    });
    let mut words = vec!["iperf3", "-c", address, "-t", IPERF_SECONDS, "-J"];
    words.extend(source.into_iter().flat_map(|source| ["-B", source]));
    let text = listening.and_then(|()| Ok(from.machine().finish(&words)?));
    // It serves one run; without a run it would wait for ever.
    let _ = server.kill();
    let _ = server.wait();
    let TcpResult { received_bps, retransmits } = TcpResult::parse(&text?)?;
    ensure!(received_bps > 0.0, "iperf3 carried nothing");
    Ok(format!("{:.0} Mbit/s, {retransmits} retransmits", received_bps / 1e6))
}
