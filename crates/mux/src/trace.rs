//! Traces one frame from its arrival to its end.
//!
//! A traced frame carries a mark. Through a guest it carries only the mark's last byte,
//! the number in the tag. Stages are recorded by mark. Copies that a guest makes are
//! traced as well; a trace ends with the last of them. Each mark is used once. So a frame
//! that outlives its trace, in a queue or in a guest, is not part of the next trace.

use std::sync::mpsc::Sender;
use std::time::Instant;

use pdp_proto::mux::{BpfProgram, BytePattern, TraceStage};
use pdp_proto::trace::matches;

/// Traces of one worker at a time: all that pdpd permits (`shared` of pdp-spec).
pub const TRACES_MAX: usize = 16;

/// Numbers in tags are 1..=NUMBERS, in rotation.
const NUMBERS: u32 = u8::MAX as u32;

/// Stages of one trace. Later ones are not recorded.
const STAGES_MAX: usize = 256;

/// Request to trace the next frame that matches.
#[derive(Debug)]
pub struct PendingTrace {
    /// Number by which the request can be cancelled.
    pub ticket: u64,
    /// Matches that the frame must fulfil.
    pub filter: Vec<BytePattern>,
    /// Program that the frame must also match.
    pub program: Option<BpfProgram>,
    /// Channel for the recorded stages.
    pub reply: Sender<Vec<TraceStage>>,
}

#[derive(Debug)]
struct FrameTrace {
    mark: u32,
    vnet: u16,
    wish: PendingTrace,
    since: Instant,
    open: usize,
    stages: Vec<TraceStage>,
}

/// Traces of a worker.
#[derive(Debug, Default)]
pub struct Tracer {
    /// Marks used so far.
    given: u32,
    traces: [Option<FrameTrace>; TRACES_MAX],
}

impl PendingTrace {
    /// True if the request matches this frame.
    pub fn wants(&self, frame: &[u8]) -> bool {
        matches(frame, &self.filter) && self.program.as_ref().is_none_or(|it| it.matches(frame))
    }
}

impl Tracer {
    /// Begins to trace a frame of the vnet in slot `vnet`. Returns its mark.
    /// Returns 0 and gives up the request if too many traces are running.
    pub fn start(&mut self, vnet: u16, wish: PendingTrace) -> u32 {
        let Some(free) = self.traces.iter().position(Option::is_none) else { return 0 };
        let (since, stages) = (Instant::now(), vec![]);
        let mark = loop {
            let (lap, number) = (self.given / NUMBERS, self.given % NUMBERS + 1);
            self.given = self.given.wrapping_add(1);
            // Skips numbers of running traces.
            if self.traces.iter().flatten().all(|trace| trace.mark & 0xff != number) {
                break lap << 8 | number;
            }
        };
        self.traces[free] = Some(FrameTrace { mark, vnet, wish, since, open: 1, stages });
        mark
    }

    /// Returns the mark for the number that a guest of
    /// `vnet` gave, or 0 if no trace of that vnet has it.
    pub fn mark(&self, vnet: u16, number: u8) -> u32 {
        let is_it =
            |trace: &&FrameTrace| trace.vnet == vnet && trace.mark & 0xff == u32::from(number);
        self.traces.iter().flatten().find(is_it).map_or(0, |trace| trace.mark)
    }

    /// Records a stage of the frame with this mark.
    pub fn note(&mut self, mark: u32, stage: &str, detail: impl FnOnce() -> String) {
        if mark != 0
            && let Some(trace) = self.get(mark)
            && trace.stages.len() < STAGES_MAX
        {
            let at_ns = trace.since.elapsed().as_nanos() as u64;
            trace.stages.push(TraceStage { at_ns, stage: stage.to_string(), detail: detail() });
        }
    }

    /// Notes that one more frame has this mark.
    pub fn copied(&mut self, mark: u32) {
        if mark != 0
            && let Some(trace) = self.get(mark)
        {
            trace.open += 1;
        }
    }

    /// Notes that a frame with this mark has ended.
    pub fn end(&mut self, mark: u32, stage: &str, detail: impl FnOnce() -> String) {
        if mark == 0 {
            return;
        }
        self.note(mark, stage, detail);
        let Some(trace) = self.get(mark) else { return };
        trace.open -= 1;
        if trace.open == 0 {
            let ended = |trace: &mut FrameTrace| trace.mark == mark;
            let trace = self.traces.iter_mut().find_map(|place| place.take_if(ended));
            // The requester may be gone.
            let _ = trace.map(|trace| trace.wish.reply.send(trace.stages));
        }
    }

    /// Cancels a trace. Returns the stages recorded so far.
    pub fn cancel(&mut self, ticket: u64) -> Option<Vec<TraceStage>> {
        let is_it =
            |trace: &Option<FrameTrace>| trace.as_ref().is_some_and(|t| t.wish.ticket == ticket);
        let index = self.traces.iter().position(is_it)?;
        self.traces[index].take().map(|trace| trace.stages)
    }

    fn get(&mut self, mark: u32) -> Option<&mut FrameTrace> {
        self.traces.iter_mut().flatten().find(|trace| trace.mark == mark)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_ends_with_its_last_copy() {
        let (reply, stages) = std::sync::mpsc::channel();
        let mut tracer = Tracer::default();
        let mark =
            tracer.start(3, PendingTrace { ticket: 1, filter: vec![], program: None, reply });
        assert_eq!(tracer.mark(3, mark as u8), mark);
        assert_eq!(tracer.mark(4, mark as u8), 0, "another vnet's");
        assert_eq!(tracer.mark(3, 0), 0);
        tracer.copied(mark);
        tracer.end(mark, "send", || "one".into());
        assert!(stages.try_recv().is_err());
        tracer.end(mark, "drop", || "two".into());
        let names: Vec<_> = stages.try_recv().unwrap().into_iter().map(|s| s.stage).collect();
        assert_eq!(names, ["send", "drop"]);
        tracer.end(mark, "send", || unreachable!());
    }

    /// A frame that outlives its cancelled trace does not appear in the next one,
    /// in any vnet. Nor does a frame for which a guest gives a wrong number.
    #[test]
    fn frame_outliving_its_trace_joins_no_other() {
        let (reply, stages) = std::sync::mpsc::channel();
        let wish =
            |ticket| PendingTrace { ticket, filter: vec![], program: None, reply: reply.clone() };
        let mut tracer = Tracer::default();
        let slow = tracer.start(3, wish(1));
        assert!(tracer.cancel(1).is_some());
        let kept = tracer.start(3, wish(2));
        for ticket in 3..1000 {
            let mark = tracer.start(4, wish(ticket));
            assert!(mark & 0xff != 0 && mark & 0xff != kept & 0xff);
            assert_eq!(tracer.mark(4, mark as u8), mark);
            tracer.end(slow, "send", || unreachable!());
            tracer.copied(slow);
            tracer.end(mark, "send", || "mine".into());
            let all: Vec<_> = stages.try_recv().unwrap().into_iter().map(|it| it.detail).collect();
            assert_eq!(all, ["mine"]);
        }
        assert_eq!(tracer.mark(3, kept as u8), kept);
    }
}
