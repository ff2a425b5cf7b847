//! memif alone, between two processes of DPDK's testpmd: the ceiling for whatever crosses it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::Experiment;
use crate::peers::testpmd::{Interface, Mode, Testpmd, socket};
use crate::run::{Reading, Run};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "memif-raw",
    about: "frames over memif between two processes of DPDK testpmd, a core each",
    run,
};

/// Frames begin to flow within this time.
const WARM_UP: Duration = Duration::from_millis(200);

fn run(run: &mut Run) -> Result<()> {
    let sizes: &[usize] = if run.quick() { &[64] } else { &[64, 512, 1500] };
    let cores = run.cores();
    run.rounds(|run| {
        for &bytes in sizes {
            let time = run.time();
            let mut pair = None;
            run.attempt("testpmd", |_| {
                pair = Some(Pair::new([Mode::TxOnly, Mode::RxOnly], bytes, cores)?);
                Ok(())
            });
            if let Some(pair) = &mut pair {
                run.take("testpmd to testpmd", bytes as f64, "bytes", || pair.one_way(time));
            }
            drop(pair.take());
            run.attempt("testpmd", |_| {
                pair = Some(Pair::new([Mode::FlowGen, Mode::MacSwap], bytes, cores)?);
                Ok(())
            });
            if let Some(pair) = &mut pair {
                run.take("testpmd, there and back", bytes as f64, "bytes", || pair.back(time));
            }
        }
        Ok(())
    })
}

/// Two processes with a memif interface between them.
struct Pair {
    generator: Testpmd,
    other: Testpmd,
    _directory: tempfile::TempDir,
}

impl Pair {
    fn new(modes: [Mode; 2], bytes: usize, cores: [usize; 2]) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let end = |server| Interface { server, id: 0, socket: socket(directory.path()) };
        let mut other = Testpmd::start(&[end(true)], modes[1], bytes, cores[0])?;
        let mut generator = Testpmd::start(&[end(false)], modes[0], bytes, cores[1])?;
        generator.connected()?;
        other.connected()?;
        Ok(Self { generator, other, _directory: directory })
    }

    /// What the other process takes.
    fn one_way(&mut self, time: Duration) -> Result<Vec<Reading>> {
        self.flowing(time, |pair| Ok(pair.other.counters()?[0].received))
    }

    /// What the generator gets back.
    fn back(&mut self, time: Duration) -> Result<Vec<Reading>> {
        self.flowing(time, |pair| Ok(pair.generator.counters()?[0].received))
    }

    fn flowing(
        &mut self,
        time: Duration,
        count: impl Fn(&mut Self) -> Result<u64>,
    ) -> Result<Vec<Reading>> {
        self.other.forward()?;
        self.generator.forward()?;
        std::thread::sleep(WARM_UP);
        let (before, start) = (count(self)?, Instant::now());
        std::thread::sleep(time);
        let (after, seconds) = (count(self)?, start.elapsed().as_secs_f64());
        self.generator.rest()?;
        self.other.rest()?;
        ensure!(after > before, "no frame came");
        let rate = (after - before) as f64 / seconds;
        let cycles = pdp_e2e::meter::cpu("cpu MHz").parse::<f64>()? * 1e6 / rate;
        let notes = "cycles of one core; both poll all the time";
        Ok(vec![Reading::new("rate", rate / 1e6, "Mpps").cycles(cycles).notes(notes)])
    }
}
