//! memif between two processes of DPDK's testpmd, as the upper bound for anything that uses memif.
//! Also peers that forward such a process's frames back to it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pdp_testbed::meter::Clock;
use pdp_testbed::{TemporaryNode, eventually};

use super::{BenchExperiment, Subject};
use crate::peers::pdp::{Design, Pdp};
use crate::peers::testpmd::{Testpmd, TestpmdInterface, TestpmdMode, socket};
use crate::run::{ExperimentRun, Reading};

pub(super) const RAW: BenchExperiment = BenchExperiment {
    name: "memif-raw",
    about: "frames over memif between two processes of DPDK testpmd, a core each",
    seconds: 35,
    subject: Subject::Machine,
    run: raw,
};

pub(super) const MEMIF: BenchExperiment = BenchExperiment {
    name: "memif",
    about: "DPDK testpmd as generator and sink over memif on one core, what forwards on another: \
            testpmd that exchanges link addresses, and PdP's router, its guest beside the mux or \
            beside the generator",
    seconds: 45,
    subject: Subject::Pdp,
    run: memif,
};

/// Longest time until frames flow.
const WARM_UP: Duration = Duration::from_millis(300);

const FRAME_BYTES: usize = 64;

fn raw(run: &mut ExperimentRun) -> Result<()> {
    let sizes: &[usize] = if run.quick() { &[64] } else { &[64, 512, 1500] };
    let (cores, clock) = (run.cores(), Clock::of_this_machine());
    run.rounds(|run| {
        for &bytes in sizes {
            let time = run.time();
            let Some((mut sink, mut generator, _directory)) = run.attempt("testpmd", |_| {
                pair([TestpmdMode::RxOnly, TestpmdMode::TxOnly], bytes, cores)
            }) else {
                continue;
            };
            run.take("testpmd to testpmd", bytes as f64, "bytes", || {
                let pids = [sink.pid(), generator.pid()];
                flowing(&mut [&mut sink, &mut generator], 0, &pids, time, &clock)
            });
        }
        Ok(())
    })
}

fn memif(run: &mut ExperimentRun) -> Result<()> {
    let (cores, clock, time) = (run.cores(), Clock::of_this_machine(), run.time());
    let [core, generator_core] = cores;
    let mut routers = Vec::new();
    for (series, guest) in [("pdp, one core", core), ("pdp, two cores", generator_core)] {
        routers.extend(run.attempt(series, |_| Ok((series, router(core, guest)?))));
    }
    let (bytes, x_unit) = (FRAME_BYTES as f64, "bytes");
    run.rounds(|run| {
        // Fresh processes each time: testpmd does not resume after its generator was stopped.
        let start = |_: &mut ExperimentRun| {
            pair([TestpmdMode::MacSwap, TestpmdMode::FlowGen], FRAME_BYTES, cores)
        };
        let pair = run.wants_series("testpmd").then(|| run.attempt("testpmd", start)).flatten();
        if let Some((mut forwarder, mut generator, _directory)) = pair {
            let pids = [forwarder.pid()];
            run.take("testpmd", bytes, x_unit, || {
                flowing(&mut [&mut generator, &mut forwarder], 0, &pids, time, &clock)
            });
        }
        for (series, (node, pdp)) in &routers {
            let generator = run.attempt(series, |_| {
                let socket = node.run_dir().join("externals/A0/memif.sock").display().to_string();
                let end = TestpmdInterface { server: false, id: 0, socket };
                let mut generator =
                    Testpmd::start(&[end], TestpmdMode::FlowGen, FRAME_BYTES, generator_core)?;
                generator.connected()?;
                Ok(generator)
            });
            let Some(mut generator) = generator else { continue };
            run.take(series, bytes, x_unit, || {
                flowing(&mut [&mut generator], 0, &pdp.processes, time, &clock)
            });
        }
        Ok(())
    })
}

/// Router that sends testpmd's flows back to their source.
fn router(mux: usize, guest: usize) -> Result<(TemporaryNode, Pdp)> {
    let node = TemporaryNode::start("memif");
    let interfaces = "    A0: {memif: {}}\n    B0: {generator: {}}\n";
    let pdp = Pdp::start(&node, &Design::plain(mux, guest), interfaces)?;
    node.exec("bench0/r1", "ip route replace 10.253.0.0/16 via 10.0.1.2 dev eth0");
    eventually("the guest has the route", || {
        let routes = node.try_pdp(&["routes", "bench0/r1", "--guest", "0"]);
        routes.is_ok_and(|routes| routes.contains("10.253.0.0/16"))
    });
    Ok((node, pdp))
}

/// Two processes with a memif interface between them, one core each. The first listens.
fn pair(
    modes: [TestpmdMode; 2],
    bytes: usize,
    cores: [usize; 2],
) -> Result<(Testpmd, Testpmd, tempfile::TempDir)> {
    let directory = tempfile::tempdir()?;
    let end = |server| TestpmdInterface { server, id: 0, socket: socket(directory.path()) };
    let mut first = Testpmd::start(&[end(true)], modes[0], bytes, cores[0])?;
    let mut second = Testpmd::start(&[end(false)], modes[1], bytes, cores[1])?;
    second.connected()?;
    first.connected()?;
    Ok((first, second, directory))
}

/// Runs these processes for `time`. Returns the frames received by the one at index `counting`, and
/// the cycles of some processes.
fn flowing(
    testpmds: &mut [&mut Testpmd],
    counting: usize,
    processes: &[u32],
    time: Duration,
    clock: &Clock,
) -> Result<Vec<Reading>> {
    for testpmd in &mut *testpmds {
        testpmd.forward()?;
    }
    std::thread::sleep(WARM_UP);
    let meter = clock.start(processes, false);
    let (before, start) = (testpmds[counting].counters()?, Instant::now());
    std::thread::sleep(time);
    let (after, seconds) = (testpmds[counting].counters()?, start.elapsed().as_secs_f64());
    let cycles = clock.stop(meter);
    for testpmd in testpmds.iter_mut().rev() {
        testpmd.rest()?;
    }
    let received =
        |ports: &[crate::peers::testpmd::TestpmdCounters]| ports.first().map_or(0, |p| p.received);
    let frames = received(&after).saturating_sub(received(&before)) as f64;
    ensure!(frames > 0.0, "no frame arrived");
    let rate = frames / seconds / 1e6;
    Ok(vec![Reading::new("rate", rate, "Mpps").cycles((cycles.user + cycles.kernel) / frames)])
}
