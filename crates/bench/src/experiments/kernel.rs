//! Routers that forward in their network namespaces: CPU time per frame of plain forwarding, of the
//! stack behind PdP's ports and of the XDP bypass; TCP and round trips; and up to 512 routers.
//!
//! Comparisons with plain forwarding use CPU time, since the generator also limits the rate.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Result;
use pdp_testbed::{Background, TcpResult, finish, meter, output_of, retry};

use super::rtt::{ECHO_PORT, EchoSocket, TRIPS, socket};
use super::{BenchExperiment, Subject};
use crate::run::{ExperimentRun, Reading};
use crate::statistics::quantile;
use crate::vrouters::{
    FRAME_BYTES, RoutedHosts, RouterLoadResult,
    RouterPath::{self, Bypass, Plain, Stack, Vxlan},
    TrafficEnds::{Near, Tunnels},
    VrouterTestbed, command, isolated, kernel_bytes,
};

pub(super) const EXPERIMENT: BenchExperiment = BenchExperiment {
    name: "kernel",
    about: "a router whose network namespace forwards, 64-byte frames at saturation: the kernel from veth to veth, with \
            Linux's VXLAN devices, the stack behind PdP's ports, the short way; PdP's near, between ports, and far, from \
            VXLAN to VXLAN; in softirq of the generator's core, and in threads on another, charged to cgroups as pdpd has \
            them. CPU time is without that of making a frame and dropping it. TCP by iperf3 and round trips through PdP's \
            ports between two hosts of PdP, and through veths. PdP's ports are this program's, without a daemon",
    seconds: 140,
    subject: Subject::Library,
    run,
};

pub(super) const VNETS: BenchExperiment = BenchExperiment {
    name: "kernel-vnets",
    about: "1 to 512 such routers, frames to them in turn and in bursts of 32, near, and by the short way far as well. \
            Memory of the kernel, and threads, are those of a namespace with two of PdP's ports, not of a node with its \
            control guest: ports are this program's, without a daemon, since so many nodes are too much here",
    seconds: 460,
    subject: Subject::Library,
    run: vnets,
};

/// Numbers of routers.
const COUNTS: [usize; 8] = [1, 16, 32, 64, 80, 128, 256, 512];
const COUNTS_QUICK: [usize; 3] = [1, 16, 64];

/// Frames to a router before the next one: powers of two, with descriptions.
const ORDERS: [(u32, &str); 2] = [(0, "in turn"), (5, "bursts of 32")];

/// Simultaneous TCP connections.
const CONNECTIONS: [usize; 2] = [1, 8];

/// Longest time until iperf3 listens, and the time between two checks.
const LISTEN_MAX: Duration = Duration::from_secs(10);
const LISTEN_LOOK: Duration = Duration::from_millis(10);

/// In softirq, or in threads.
const SERVED: [(bool, &str); 2] = [(false, ""), (true, ", threads")];

/// Converts to figures, compared with plain forwarding of the same round.
fn readings(
    passed: &RouterLoadResult,
    plain: Option<&RouterLoadResult>,
    vxlan: Option<&RouterLoadResult>,
) -> Vec<Reading> {
    let mhz: f64 = meter::cpu("cpu MHz").parse().unwrap_or(0.0);
    let rate = Reading::new("rate", passed.rate_pps / 1e6, "Mpps");
    let mut readings = vec![
        rate.cycles(passed.cpu_ns * mhz / 1e3),
        Reading::new("CPU time", passed.cpu_ns, "ns a frame"),
    ];
    if passed.threads_ns > 0.0 {
        readings.push(Reading::new("of it threads", passed.threads_ns, "ns a frame"));
        let half = passed.threads_half_ns;
        readings.push(Reading::new("threads, at half the rate", half, "ns a frame"));
    }
    if let Some(plain) = plain {
        let share = plain.cpu_ns / passed.cpu_ns * 100.0;
        readings.push(Reading::new("of plain", share, "%"));
        let rate = passed.rate_pps / plain.rate_pps * 100.0;
        readings.push(Reading::new("rate, of plain", rate, "%"));
    }
    if let Some(vxlan) = vxlan {
        let times = vxlan.cpu_ns / passed.cpu_ns;
        readings.push(Reading::new("of VXLAN devices", times, "times"));
    }
    readings
}

fn run(run: &mut ExperimentRun) -> Result<()> {
    isolated(|| {
        run.attempt("frames", frames);
        run.attempt("TCP and round trips", paths);
        Ok(())
    })
}

fn frames(run: &mut ExperimentRun) -> Result<()> {
    let [generator, cpu] = run.cores();
    let time = run.time() / 4;
    let mut field = VrouterTestbed::new([1, 1, 1], generator)?;
    let mut router_paths =
        vec![Plain, Vxlan, Stack(Near), Bypass(Near), Stack(Tunnels), Bypass(Tunnels)];
    router_paths.retain(|router_path| run.wants_series(router_path.series()));
    run.rounds(|run| {
        for (in_threads, served) in SERVED {
            for router_path in [Plain, Vxlan, Stack(Near)] {
                field.set_threads(router_path, usize::from(in_threads), cpu)?;
            }
            let mut passed: BTreeMap<RouterPath, RouterLoadResult> = BTreeMap::new();
            for &router_path in &router_paths {
                let series = format!("{}{served}", router_path.series());
                let offer = || field.offer(router_path, 1, 0, time);
                run.take_as(&series, FRAME_BYTES as f64, "bytes", offer, |it| {
                    let vxlan = passed.get(&Vxlan).filter(|_| router_path == Stack(Tunnels));
                    let readings = readings(&it, passed.get(&Plain), vxlan);
                    passed.insert(router_path, it);
                    readings
                });
            }
        }
        Ok(())
    })
}

/// Measures paths from the view of programs.
fn paths(run: &mut ExperimentRun) -> Result<()> {
    const ROUTER_PATHS: [RouterPath; 3] = [Plain, Stack(Near), Bypass(Near)];
    const TRIP: &str = "round trip, median";
    let plain = RoutedHosts::plain()?;
    let mut pdp = RoutedHosts::pdp()?;
    let echo = |path: &RoutedHosts| {
        let [a, b] = [&path.hosts[0], &path.hosts[1]];
        let server = socket(b.as_fd(), "10.2.0.2", ECHO_PORT)?;
        EchoSocket::between(socket(a.as_fd(), "10.1.0.2", 0)?, server)
    };
    let echoes = [echo(&plain)?, echo(&pdp)?];
    let trips = if run.quick() { TRIPS / 4 } else { TRIPS };
    let seconds = run.time().as_secs().max(1);
    run.rounds(|run| {
        let mut of_plain = None;
        for (in_threads, served) in SERVED {
            pdp.set_threads(in_threads)?;
            // Veths without a program handle frames from
            // sockets in softirq, with or without threads.
            let router_paths = if in_threads { &ROUTER_PATHS[1..] } else { &ROUTER_PATHS };
            for &router_path in router_paths {
                let (path, echo) =
                    if router_path == Plain { (&plain, &echoes[0]) } else { (&pdp, &echoes[1]) };
                let trips = || {
                    path.set_bypass(router_path == Bypass(Near))?;
                    echo.trips(trips)
                };
                let series = format!("{}{served}", router_path.series());
                run.take_as(&series, FRAME_BYTES as f64, "bytes", trips, |times| {
                    let at = |what, share| Reading::new(what, quantile(&times, share), "µs");
                    let [median, p99] = [at(TRIP, 0.5), at("round trip, p99", 0.99)];
                    if router_path == Plain {
                        of_plain = Some(median.value());
                    }
                    let added = of_plain.map(|plain| median.value() - plain);
                    let added = added.map(|added| Reading::new("round trip added", added, "µs"));
                    [median, p99]
                        .into_iter()
                        .chain(added.filter(|_| router_path != Plain))
                        .collect()
                });
            }
        }
        let kinds = [
            (Plain, "kernel, plain, segmentation offload", true),
            (Plain, "kernel, plain, no segmentation offload", false),
            (Stack(Near), "pdp, stack, threads", false),
            (Bypass(Near), "pdp, short way, threads", false),
        ];
        for connections in CONNECTIONS {
            for (router_path, series, offload) in kinds {
                let path = if router_path == Plain { &plain } else { &pdp };
                run.take(series, connections as f64, "TCP connections", || {
                    if router_path == Plain {
                        path.set_offload(offload)?;
                    }
                    path.set_bypass(router_path == Bypass(Near))?;
                    let gbps = tcp(path, connections, seconds)? / 1e9;
                    Ok(vec![Reading::new("TCP", gbps, "Gbit/s")])
                });
            }
        }
        plain.set_offload(true)
    })
}

/// Throughput of `connections` connections, bits per second.
fn tcp(path: &RoutedHosts, connections: usize, seconds: u64) -> Result<f64> {
    let mut server = command(&path.hosts[1], "iperf3");
    let _server = Background::start(server.args(["--server", "--one-off"]));
    retry(LISTEN_MAX, LISTEN_LOOK, "iperf3 listens", || {
        let mut ss = command(&path.hosts[1], "sh");
        Ok(finish(ss.args(["-c", "ss -Htln | grep -q :5201"]))?)
    })?;
    let (seconds, connections) = (seconds.to_string(), connections.to_string());
    let mut client = command(&path.hosts[0], "iperf3");
    client.args(["--client", "10.2.0.2", "--json", "--omit", "1"]);
    let text = output_of(client.args(["--time", &seconds, "--parallel", &connections]), "")?;
    Ok(TcpResult::parse(&text)?.received_bps)
}

fn vnets(run: &mut ExperimentRun) -> Result<()> {
    isolated(|| many(run))
}

fn many(run: &mut ExperimentRun) -> Result<()> {
    let [generator, cpu] = run.cores();
    let time = run.time() / 8;
    let mut counts = run.choose(&COUNTS, &COUNTS_QUICK);
    // Reference for the others.
    if !counts.contains(&1) {
        counts.insert(0, 1);
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let start = Instant::now();
    let mut field = VrouterTestbed::new([most, 0, most], generator)?;
    eprintln!("  {most} routers of each kind in {:?}", start.elapsed());
    let mut idle = |series: &str, bytes: u64, threads: usize| {
        let each = |sum: f64| sum / most as f64;
        run.take(series, most as f64, "vrouters", || {
            let memory = Reading::new("memory", each(bytes as f64 / 1024.0), "KiB each");
            Ok(vec![memory, Reading::new("threads", each(threads as f64), "each")])
        });
    };
    idle("pdp, idle", field.bytes, 0);
    let before = kernel_bytes();
    let threads = field.set_threads(Stack(Near), most, cpu)?;
    idle("pdp, idle, threads", field.bytes + kernel_bytes().saturating_sub(before), threads);
    let mut router_paths = vec![Plain, Stack(Near), Bypass(Near), Bypass(Tunnels)];
    router_paths.retain(|router_path| run.wants_series(router_path.series()));
    run.rounds(|run| {
        for (in_threads, served) in SERVED {
            let mut one = BTreeMap::new();
            for &count in &counts {
                for router_path in [Plain, Stack(Near)] {
                    field.set_threads(router_path, if in_threads { count } else { 0 }, cpu)?;
                }
                for (shift, order) in ORDERS {
                    let mut plain = None;
                    for &router_path in &router_paths {
                        let series = format!("{}, {order}{served}", router_path.series());
                        let offer = || field.offer(router_path, count, shift, time);
                        run.take_as(&series, count as f64, "vrouters", offer, |it| {
                            let mut readings = readings(&it, plain.as_ref(), None);
                            if router_path == Plain {
                                plain = Some(it);
                            }
                            if count == 1 {
                                one.insert((router_path, shift), it);
                            }
                            if let Some(one) = one.get(&(router_path, shift)) {
                                let share = one.cpu_ns / it.cpu_ns * 100.0;
                                readings.push(Reading::new("of one", share, "%"));
                            }
                            readings
                        });
                    }
                }
            }
        }
        Ok(())
    })
}
