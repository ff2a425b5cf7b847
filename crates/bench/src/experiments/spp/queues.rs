//! Figures 7 and 8: a fast-path router with five ports of 800 Mb/s each. Each port has five queues,
//! one per input port. Sources and sinks are inside the mux, and its counters give the figures.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use pdp_api::Stats;
use pdp_container::cgroup::Cgroups;
use pdp_testbed::{TemporaryNode, output_of};

use crate::peers::pdp::{Design, batch};
use crate::run::{ExperimentRun, Point, Reading};
use crate::site::words;
use crate::stream::FrameStream;

/// Number of ports, and of queues at each.
const PORTS: usize = 5;

/// Rate of a port, and the input of each port in figure 7 and in figure 8, bits per second.
const RATE_BPS: u64 = 800_000_000;
const SHARED_INPUT_BPS: u64 = 400_000_000;
const INPUT_BPS: u64 = 800_000_000;

/// Weights of a port's queues, in percent.
const WEIGHTS: [u32; PORTS] = [30, 25, 20, 15, 10];

/// Burst of a port after a late mux: 10 ms of its rate, bytes.
const BURST_BYTES: u64 = RATE_BPS / 8 / 100;

/// Frames that each queue holds: the largest possible number.
const QUEUE_FRAMES: u32 = 4096;

/// Length of all frames without FCS, bytes; rates count these.
const FRAME_BYTES: usize = 1500;

/// The network, and its router.
const VNET: &str = "spp";
const ROUTER: &str = "spp/r1";

/// Steps of figure 7: inputs begin one step after the other
/// and last this long; the course ends after this many.
const INPUT_STEPS: u32 = 6;
const COURSE_STEPS: u32 = 11;

/// Phases of figure 8, and steps of each.
const PHASES: u32 = 6;
const PHASE_STEPS: u32 = 2;

/// Length of a step.
fn step(run: &ExperimentRun) -> Duration {
    if run.quick() { Duration::from_millis(500) } else { Duration::from_secs(1) }
}

pub(super) fn shares(run: &mut ExperimentRun) -> Result<()> {
    let (bed, step) = (QueueTestbed::start(run.cores()[0])?, step(run));
    run.rounds(|run| {
        let with_course = run.is_first();
        let measure = || bed.shared(step);
        run.take_points("figure 7", measure, |snapshots| shared_points(&snapshots, with_course));
        Ok(())
    })
}

pub(super) fn outputs(run: &mut ExperimentRun) -> Result<()> {
    let (bed, step) = (QueueTestbed::start(run.cores()[0])?, step(run));
    run.rounds(|run| {
        let with_course = run.is_first();
        let measure = || bed.outputs(step);
        run.take_points("figure 8", measure, |snapshots| {
            output_points(&snapshots, step, with_course)
        });
        Ok(())
    })
}

/// Counters at one moment.
struct QueueSnapshot {
    at_ns: u64,
    /// Bytes received by each port.
    received: [u64; PORTS],
    /// Bytes that each queue of each port has sent, and that wait in it.
    sent: [[u64; PORTS]; PORTS],
    waiting: [[u64; PORTS]; PORTS],
}

impl QueueSnapshot {
    /// Seconds since `before`.
    fn since(&self, before: &Self) -> f64 {
        self.at_ns.saturating_sub(before.at_ns) as f64 / 1e9
    }

    /// Rate of a byte counter since `before`, megabits per second.
    fn mbps(&self, before: &Self, bytes: impl Fn(&Self) -> u64) -> f64 {
        let bits = bytes(self).saturating_sub(bytes(before)) as f64 * 8.0;
        bits / self.since(before) / 1e6
    }

    /// Bytes that a port has sent.
    fn sent_by(&self, port: usize) -> u64 {
        self.sent[port].iter().sum()
    }
}

/// Each snapshot with the previous one, and the seconds since the first.
fn pairs(
    snapshots: &[QueueSnapshot],
) -> impl Iterator<Item = (f64, &QueueSnapshot, &QueueSnapshot)> {
    let seconds =
        |snapshot: &QueueSnapshot| (snapshot.since(&snapshots[0]) * 100.0).round() / 100.0;
    snapshots.windows(2).map(move |pair| (seconds(&pair[1]), &pair[0], &pair[1]))
}

/// Node with the router.
struct QueueTestbed {
    node: TemporaryNode,
    design: Design,
}

/// MAC address of a port.
fn mac(port: usize) -> [u8; 6] {
    [2, 0, 0, 0, 5, port as u8]
}

impl QueueTestbed {
    fn start(core: usize) -> Result<Self> {
        let (node, design) = (TemporaryNode::start("spp"), Design::fastpath(core, 1));
        let bed = Self { node, design };
        bed.node.apply(&bed.substrate(|_| String::new()));
        bed.node.apply(&network());
        let wait = |what| bed.node.pdp(&["wait", ROUTER, "--for", what, "--timeout", "60s"]);
        wait("ready");
        let neighbour = |port| {
            let mac = words([2, 0, 0, 0, 6, port as u8]);
            format!("neigh replace 10.1.{port}.2 lladdr {mac} dev eth{port} nud permanent\n")
        };
        let neighbours: String = (0..PORTS).map(neighbour).collect();
        batch(&Cgroups::new(&bed.node.cgroup())?, VNET, &neighbours)?;
        wait("routes-synced");
        let filter = |port| {
            format!(
                "- {{id: {port}, priority: 1, match: ip in eth{port}, verdict: pass, queue: {}}}\n",
                port + 1
            )
        };
        let filters: String = (0..PORTS).map(filter).collect();
        let mut apply = bed.node.pdp_command(&["fastpath", ROUTER, "apply", "-f", "-"]);
        output_of(&mut apply, &format!("filters:\n{filters}"))?;
        Ok(bed)
    }

    /// Substrate with sources of these settings at each port.
    fn substrate(&self, settings: impl Fn(usize) -> String) -> String {
        let interface = |port| format!("    P{port}: {{generator: {{{}}}}}\n", settings(port));
        self.design.substrate(&(0..PORTS).map(interface).collect::<String>())
    }

    /// Settings of a port's source: frames for these outputs in turn.
    fn source(&self, name: &str, port: usize, outputs: &[usize], bps: u64) -> Result<String> {
        let stream = FrameStream {
            to_mac: mac(port),
            from_mac: [2, 0, 0, 0, 6, port as u8],
            source: [10, 1, port as u8, 2],
            destinations: outputs.iter().map(|output| [20, 0, *output as u8, 7]).collect(),
            bytes: FRAME_BYTES,
        };
        let file = self.node.directory.join(format!("{name}-{port}.pcap"));
        stream.write_pcap(&file, outputs.len(), &[])?;
        Ok(format!("frames: {}, pps: {}", file.display(), pps(bps)))
    }

    fn snapshot(&self) -> Result<QueueSnapshot> {
        let stats: Stats = serde_json::from_value(self.node.json(&["stats", VNET]))?;
        let router = stats.vnets.get(VNET).and_then(|vnet| vnet.nodes.get("r1"));
        let ports = &router.context("counters of the router")?.ports;
        let zero = [[0; PORTS]; PORTS];
        let mut snapshot =
            QueueSnapshot { at_ns: stats.at_ns, received: [0; PORTS], sent: zero, waiting: zero };
        for at in 0..PORTS {
            let port = ports.get(&format!("eth{at}")).context("counters of a port")?;
            snapshot.received[at] = port.received_bytes;
            ensure!(port.queues.len() == PORTS, "{} queues", port.queues.len());
            for (number, queue) in port.queues.iter().enumerate() {
                snapshot.sent[at][number] = queue.sent_bytes;
                snapshot.waiting[at][number] = queue.waiting_bytes;
            }
        }
        Ok(snapshot)
    }

    /// Applies these specs at their times, and reads the counters periodically.
    fn course(
        &self,
        acts: &[(Duration, String)],
        every: Duration,
        length: Duration,
    ) -> Result<Vec<QueueSnapshot>> {
        let start = Instant::now();
        let until = |at: Duration| {
            thread::sleep((start + at).saturating_duration_since(Instant::now()));
        };
        let snapshots = thread::scope(|scope| {
            let acting = scope.spawn(|| {
                for (at, spec) in acts {
                    until(*at);
                    self.node.try_apply(spec).map_err(|error| anyhow!("{error}"))?;
                }
                Ok::<_, anyhow::Error>(())
            });
            let mut snapshots = vec![self.snapshot()?];
            while start.elapsed() < length {
                // On a busy machine readings come late, but not two at once.
                until(start.elapsed() + every);
                snapshots.push(self.snapshot()?);
            }
            acting.join().ok().context("what acts")??;
            Ok(snapshots)
        });
        self.node.apply(&self.substrate(|_| String::new()));
        snapshots
    }

    /// All inputs begin one after the other and send to the first output, each to its own queue.
    fn shared(&self, step: Duration) -> Result<Vec<QueueSnapshot>> {
        let count = pps(SHARED_INPUT_BPS) * u64::from(INPUT_STEPS) * step.as_millis() as u64 / 1000;
        let sources: Vec<_> = (0..PORTS)
            .map(|port| {
                let source = self.source("shared", port, &[0], SHARED_INPUT_BPS)?;
                Ok(format!("{source}, count: {count}"))
            })
            .collect::<Result<_>>()?;
        let acts: Vec<_> = (0..PORTS)
            .map(|last| {
                let on =
                    |port: usize| if port <= last { sources[port].clone() } else { String::new() };
                (step * last as u32, self.substrate(on))
            })
            .collect();
        let snapshots = self.course(&acts, step / 5, step * COURSE_STEPS)?;
        let all = while_full(&snapshots);
        ensure!(all.len() > 1, "the queues were not all full at once");
        Ok(snapshots)
    }

    /// All inputs send the same mix. Each phase overloads one output twofold, sends nothing to the
    /// output of the previous phase, and loads each other output fully.
    fn outputs(&self, step: Duration) -> Result<Vec<QueueSnapshot>> {
        let acts: Vec<_> = (0..PHASES)
            .map(|phase| {
                let most = phase as usize % PORTS;
                let none = (most + PORTS - 1) % PORTS;
                let mix: Vec<_> =
                    [most].into_iter().chain((0..PORTS).filter(|port| *port != none)).collect();
                let name = format!("phase{phase}");
                let sources: Vec<_> = (0..PORTS)
                    .map(|port| self.source(&name, port, &mix, INPUT_BPS))
                    .collect::<Result<_>>()?;
                Ok((step * PHASE_STEPS * phase, self.substrate(|port| sources[port].clone())))
            })
            .collect::<Result<_>>()?;
        self.course(&acts, step / 10, step * PHASES * PHASE_STEPS)
    }
}

/// Frames per second at a rate.
fn pps(bps: u64) -> u64 {
    bps / 8 / FRAME_BYTES as u64
}

/// Spec of the router.
fn network() -> String {
    let (mut interfaces, mut routes, mut externals, mut links) =
        (String::new(), String::new(), String::new(), String::new());
    let queue = |(at, weight): (usize, &u32)| {
        format!("{{name: q{at}, weight: {weight}, length: {QUEUE_FRAMES}}}")
    };
    let queues = WEIGHTS.iter().enumerate().map(queue).collect::<Vec<_>>().join(", ");
    for port in 0..PORTS {
        let mac = words(mac(port));
        interfaces +=
            &format!("        eth{port}: {{addresses: [10.1.{port}.1/24], mac: \"{mac}\"}}\n");
        routes += &format!("        - {{to: 20.0.{port}.0/24, via: 10.1.{port}.2}}\n");
        externals += &format!("    p{port}: {{interface: P{port}}}\n");
        links += &format!(
            "    - {{endpoints: [\"r1:eth{port}\", \"external:p{port}\"], rate: {RATE_BPS}bps, burst: {BURST_BYTES}, queues: [{queues}]}}\n"
        );
    }
    format!(
        "apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {VNET}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces:
{interfaces}      routes:
{routes}      dataPlane: {{kind: fastpath}}
  externals:
{externals}  links:
{links}"
    )
}

fn point(series: String, x: f64, x_unit: &'static str, readings: Vec<Reading>) -> Point {
    Point { series, x, x_unit, readings }
}

/// Consecutive snapshots of figure 7 in which all queues have frames.
fn while_full(snapshots: &[QueueSnapshot]) -> &[QueueSnapshot] {
    let is_full = |snapshot: &QueueSnapshot| snapshot.waiting[0].iter().all(|waiting| *waiting > 0);
    let runs = snapshots.split(|snapshot| !is_full(snapshot));
    runs.max_by_key(|run| run.len()).unwrap_or_default()
}

fn shared_points(snapshots: &[QueueSnapshot], with_course: bool) -> Vec<Point> {
    let mut points = Vec::new();
    for (seconds, before, now) in pairs(snapshots).filter(|_| with_course) {
        let mut sum = 0.0;
        for (at, weight) in WEIGHTS.iter().enumerate() {
            sum += now.mbps(before, |snapshot| snapshot.sent[0][at]);
            let rate = now.mbps(before, |snapshot| snapshot.received[at]);
            let waiting = now.waiting[0][at] as f64 / 1e6;
            let readings = vec![
                Reading::new("figure 7: rate in", rate, "Mb/s"),
                Reading::new("figure 7: rate out, with those above", sum, "Mb/s"),
                Reading::new("figure 7: waiting", waiting, "MB"),
            ];
            let series = format!("input {}, {weight} %", at + 1);
            points.push(point(series, seconds, "s", readings));
        }
    }
    let all = while_full(snapshots);
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return points };
    let parts = |from: &QueueSnapshot, to: &QueueSnapshot| {
        let sent: [u64; PORTS] = std::array::from_fn(|at| to.sent[0][at] - from.sent[0][at]);
        let sum: u64 = sent.iter().sum();
        sent.map(|sent| sent as f64 / sum as f64 * 100.0)
    };
    // Any second, or the whole time if steps are short.
    let second = last.since(first).min(1.0);
    let (mut off, mut rate_off) = (0.0f64, 0.0f64);
    for (at, from) in all.iter().enumerate() {
        let Some(to) = all[at..].iter().find(|to| to.since(from) >= second) else { break };
        for (part, weight) in parts(from, to).iter().zip(WEIGHTS) {
            off = off.max((part - f64::from(weight)).abs());
        }
        let rate = to.mbps(from, |snapshot| snapshot.sent_by(0)) * 1e6;
        rate_off = rate_off.max((rate / RATE_BPS as f64 - 1.0).abs() * 100.0);
    }
    for (part, weight) in parts(first, last).into_iter().zip(WEIGHTS) {
        let reading = Reading::new("figure 7: part of the output", part, "%");
        points.push(point("pdp, a queue".into(), weight.into(), "% by weight", vec![reading]));
    }
    let whole = vec![
        Reading::new("figure 7: part off in any second, worst", off, "%"),
        Reading::new("figure 7: rate off in any second", rate_off, "%"),
    ];
    points.push(point("pdp, all queues full".into(), PORTS as f64, "queues", whole));
    points
}

fn output_points(snapshots: &[QueueSnapshot], step: Duration, with_course: bool) -> Vec<Point> {
    let mut points = Vec::new();
    let all_out = |snapshot: &QueueSnapshot| (0..PORTS).map(|port| snapshot.sent_by(port)).sum();
    for (seconds, before, now) in pairs(snapshots).filter(|_| with_course) {
        let rate = |mbps| vec![Reading::new("figure 8: rate of all", mbps, "Mb/s")];
        let come = now.mbps(before, |snapshot| snapshot.received.iter().sum());
        points.push(point("inputs".into(), seconds, "s", rate(come)));
        points.push(point("outputs".into(), seconds, "s", rate(now.mbps(before, all_out))));
        for port in 0..PORTS {
            let waiting = now.waiting[port].iter().sum::<u64>() as f64 / 1e6;
            let readings = vec![
                Reading::new(
                    "figure 8: rate out",
                    now.mbps(before, |snapshot| snapshot.sent_by(port)),
                    "Mb/s",
                ),
                Reading::new("figure 8: waiting", waiting, "MB"),
            ];
            points.push(point(format!("output {}", port + 1), seconds, "s", readings));
        }
    }
    let (mut most, mut usual, mut come, mut waited) = (0.0f64, Vec::new(), Vec::new(), 0);
    let phase = step.as_secs_f64() * f64::from(PHASE_STEPS);
    for (seconds, before, now) in pairs(snapshots) {
        let out = now.mbps(before, all_out);
        most = most.max(out);
        waited =
            waited.max((0..PORTS).map(|port| now.waiting[port].iter().sum()).max().unwrap_or(0));
        // The last part of each phase, when the idle output's queues have drained.
        if seconds % phase > 0.6 * phase && seconds % phase < 0.9 * phase {
            usual.push(out);
            come.push(now.mbps(before, |snapshot| snapshot.received.iter().sum()));
        }
    }
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    };
    let whole = vec![
        Reading::new("figure 8: all inputs", median(come), "Mb/s"),
        Reading::new("figure 8: all outputs, usually", median(usual), "Mb/s"),
        Reading::new("figure 8: all outputs, most", most, "Mb/s"),
        Reading::new("figure 8: most that waited for an output", waited as f64 / 1e6, "MB"),
    ];
    points.push(point("pdp, five outputs".into(), PORTS as f64, "outputs", whole));
    points
}
