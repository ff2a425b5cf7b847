//! Cost of each stage of a worker: cycles of the time-stamp counter, and frames.
//!
//! The counter is read between stages, not for each frame.
//! That costs some 20 cycles for each batch and stage.

use pdp_model::StageStats;
use pdp_wire::named;
use quanta::Clock;

named! {
    /// Stages of a round, in order, and the time outside of rounds.
    Stage {
        /// Reads frames from sockets, memif and generators into packets.
        Receive = "receive",
        /// Finds the port by the outer header.
        Classify = "classify",
        /// Polices and checks frames, chooses guests, and copies frames into their memory.
        Distribute = "distribute",
        /// Forwards frames in the mux: parse, look up, rewrite.
        Forward = "forward",
        /// Applies route changes, and handles slow paths.
        Routes = "routes",
        /// Copies frames out of a guest's memory, and reads their tags.
        Dispatch = "dispatch",
        /// Shapes, encapsulates and sends frames.
        Send = "send",
        /// Runs commands, updates the time, and collects returned packets.
        Control = "control",
        /// Rounds that found no work.
        Idle = "idle",
        /// Blocks, or is about to.
        Sleep = "sleep",
    }
}

const STAGES: usize = Stage::ALL.len();

/// Cycles and frames by stage.
#[derive(Debug)]
pub struct CycleMeter {
    clock: Clock,
    last: u64,
    cycles: [u64; STAGES],
    frames: [u64; STAGES],
    /// Cycles as of the beginning of the round.
    before: [u64; STAGES],
}

impl Default for CycleMeter {
    fn default() -> Self {
        let clock = Clock::new();
        let last = clock.raw();
        Self { clock, last, cycles: [0; STAGES], frames: [0; STAGES], before: [0; STAGES] }
    }
}

impl CycleMeter {
    /// Returns the clock that it reads.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Returns the time-stamp counter, cycles.
    #[inline]
    pub fn now(&self) -> u64 {
        self.clock.raw()
    }

    /// Charges the time since the last call to `stage`, with `frames` frames.
    #[inline]
    pub fn lap(&mut self, stage: Stage, frames: usize) {
        let now = self.clock.raw();
        self.cycles[stage as usize] += now.saturating_sub(self.last);
        self.frames[stage as usize] += frames as u64;
        self.last = now;
    }

    /// Ends a round. If it had no work, all of its time was idle.
    pub fn round(&mut self, work: bool) {
        if !work {
            let spent = |cycles: &[u64; STAGES]| cycles.iter().sum::<u64>();
            let idle = spent(&self.cycles) - spent(&self.before);
            self.cycles = self.before;
            self.cycles[Stage::Idle as usize] += idle;
        }
        self.before = self.cycles;
    }

    /// Returns the counters, by stage in order.
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
    fn meter_counts_rounds_without_work_as_idle() {
        let mut meter = CycleMeter::default();
        meter.lap(Stage::Receive, 3);
        meter.round(true);
        let of = |meter: &CycleMeter, stage: Stage| meter.stats()[stage as usize].cycles;
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
