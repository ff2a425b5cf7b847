//! What each stage of a worker costs: cycles of the time-stamp counter, and frames.
//!
//! The counter is read between stages, not for each frame: some 20 cycles a batch and stage.

use pdp_proto::mux::StageStats;
use pdp_wire::named;
use quanta::Clock;

named! {
    /// The stages of a round, in their order, and what is beside them.
    Stage {
        /// From sockets, memif and generators into packets.
        Receive = "receive",
        /// Outer header to port.
        Classify = "classify",
        /// Police, check, pick a guest, copy into its memory.
        Distribute = "distribute",
        /// What the mux forwards by itself: parse, look up, rewrite.
        Forward = "forward",
        /// Changes of routes for that.
        Routes = "routes",
        /// Copy out of a guest's memory, read its tag.
        Dispatch = "dispatch",
        /// Shape, encapsulate, send.
        Send = "send",
        /// Commands, time, packets that come home.
        Control = "control",
        /// Rounds that found no work.
        Idle = "idle",
        /// Blocked, or about to.
        Sleep = "sleep",
    }
}

const STAGES: usize = Stage::ALL.len();

/// Counts.
#[derive(Debug)]
pub struct Meter {
    clock: Clock,
    last: u64,
    cycles: [u64; STAGES],
    frames: [u64; STAGES],
    /// As of the beginning of the round.
    before: [u64; STAGES],
}

impl Default for Meter {
    fn default() -> Self {
        let clock = Clock::new();
        let last = clock.raw();
        Self { clock, last, cycles: [0; STAGES], frames: [0; STAGES], before: [0; STAGES] }
    }
}

impl Meter {
    /// The clock that it reads.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The time-stamp counter, cycles.
    #[inline]
    pub fn now(&self) -> u64 {
        self.clock.raw()
    }

    /// What went by since the last call was `stage`, for `frames` frames.
    #[inline]
    pub fn lap(&mut self, stage: Stage, frames: usize) {
        let now = self.clock.raw();
        self.cycles[stage as usize] += now.saturating_sub(self.last);
        self.frames[stage as usize] += frames as u64;
        self.last = now;
    }

    /// A round is over. Without work all of it was idle.
    pub fn round(&mut self, work: bool) {
        if !work {
            let spent = |cycles: &[u64; STAGES]| cycles.iter().sum::<u64>();
            let idle = spent(&self.cycles) - spent(&self.before);
            self.cycles = self.before;
            self.cycles[Stage::Idle as usize] += idle;
        }
        self.before = self.cycles;
    }

    /// Counters, stages in their order.
    pub fn stats(&self) -> Vec<StageStats> {
        let counted = Stage::ALL.iter().zip(self.cycles).zip(self.frames);
        let stats = |((stage, cycles), frames): ((&Stage, _), _)| StageStats {
            stage: stage.name().to_string(),
            cycles,
            frames,
        };
        counted.map(stats).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_without_work_is_idle_and_nothing_is_lost() {
        let mut meter = Meter::default();
        meter.lap(Stage::Receive, 3);
        meter.round(true);
        let of = |meter: &Meter, stage: Stage| meter.stats()[stage as usize].cycles;
        let received = of(&meter, Stage::Receive);
        assert!(received > 0 && of(&meter, Stage::Idle) == 0);
        meter.lap(Stage::Receive, 0);
        meter.lap(Stage::Send, 0);
        meter.round(false);
        assert_eq!(of(&meter, Stage::Receive), received);
        assert_eq!(of(&meter, Stage::Send), 0);
        assert!(of(&meter, Stage::Idle) > 0);
        assert_eq!(meter.stats()[Stage::Receive as usize].frames, 3);
        assert_eq!(meter.stats()[Stage::Sleep as usize].stage, "sleep");
    }
}
