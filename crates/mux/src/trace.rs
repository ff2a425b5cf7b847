//! One frame followed from its arrival to its end.
//!
//! A traced frame carries a mark, and through a guest the mark's last byte, which is the number in the
//! tag; stages are noted under it. Copies that a guest makes are followed as well: a trace ends with
//! the last of them. A mark is given once: a frame that outlives its trace, in a queue or in a guest,
//! is none of the next one's.

use std::sync::mpsc::Sender;
use std::time::Instant;

use pdp_proto::mux::{Match, Program, TraceStage};
use pdp_proto::trace::matches;

/// Traces of one worker at a time: all that pdpd shares out (`shared` of pdp-spec).
pub const TRACES_MAX: usize = 16;

/// Numbers in tags: 1..=NUMBERS, given in turn.
const NUMBERS: u32 = u8::MAX as u32;

/// Stages of one trace; what follows is left out.
const STAGES_MAX: usize = 256;

/// A wish to follow the next frame that has these bytes.
#[derive(Debug)]
pub struct Wish {
    /// By which it can be taken back.
    pub ticket: u64,
    /// Which frame.
    pub filter: Vec<Match>,
    /// And of those, which.
    pub program: Option<Program>,
    /// Where the stages go.
    pub reply: Sender<Vec<TraceStage>>,
}

#[derive(Debug)]
struct Trace {
    mark: u32,
    vnet: u16,
    wish: Wish,
    since: Instant,
    open: usize,
    stages: Vec<TraceStage>,
}

/// The traces of a worker.
#[derive(Debug, Default)]
pub struct Tracer {
    /// Marks given so far.
    given: u32,
    traces: [Option<Trace>; TRACES_MAX],
}

impl Wish {
    /// Whether it is of this frame.
    pub fn wants(&self, frame: &[u8]) -> bool {
        matches(frame, &self.filter) && self.program.as_ref().is_none_or(|it| it.matches(frame))
    }
}

impl Tracer {
    /// Begins to follow a frame of the vnet in slot `vnet`. Returns its mark, 0 if too many are
    /// followed already (the wish is given up then).
    pub fn start(&mut self, vnet: u16, wish: Wish) -> u32 {
        let Some(free) = self.traces.iter().position(Option::is_none) else { return 0 };
        let (since, stages) = (Instant::now(), vec![]);
        let mark = loop {
            let (turn, number) = (self.given / NUMBERS, self.given % NUMBERS + 1);
            self.given = self.given.wrapping_add(1);
            // The number of one that still goes on is left out.
            if self.traces.iter().flatten().all(|trace| trace.mark & 0xff != number) {
                break turn << 8 | number;
            }
        };
        self.traces[free] = Some(Trace { mark, vnet, wish, since, open: 1, stages });
        mark
    }

    /// The mark for the number that a guest of `vnet` gave, 0 if it is none of that vnet's.
    pub fn mark(&self, vnet: u16, number: u8) -> u32 {
        let is_it = |trace: &&Trace| trace.vnet == vnet && trace.mark & 0xff == u32::from(number);
        self.traces.iter().flatten().find(is_it).map_or(0, |trace| trace.mark)
    }

    /// Notes a stage of the frame with this mark.
    pub fn note(&mut self, mark: u32, stage: &str, detail: impl FnOnce() -> String) {
        if mark != 0
            && let Some(trace) = self.get(mark)
            && trace.stages.len() < STAGES_MAX
        {
            let at_ns = trace.since.elapsed().as_nanos() as u64;
            trace.stages.push(TraceStage { at_ns, stage: stage.to_string(), detail: detail() });
        }
    }

    /// One more frame has this mark.
    pub fn copied(&mut self, mark: u32) {
        if mark != 0
            && let Some(trace) = self.get(mark)
        {
            trace.open += 1;
        }
    }

    /// A frame with this mark has ended.
    pub fn end(&mut self, mark: u32, stage: &str, detail: impl FnOnce() -> String) {
        if mark == 0 {
            return;
        }
        self.note(mark, stage, detail);
        let Some(trace) = self.get(mark) else { return };
        trace.open -= 1;
        if trace.open == 0 {
            let ended = |trace: &mut Trace| trace.mark == mark;
            let trace = self.traces.iter_mut().find_map(|place| place.take_if(ended));
            // Whoever asked may have gone away.
            let _ = trace.map(|trace| trace.wish.reply.send(trace.stages));
        }
    }

    /// Stops following; returns what is known so far.
    pub fn cancel(&mut self, ticket: u64) -> Option<Vec<TraceStage>> {
        let is_it = |trace: &Option<Trace>| trace.as_ref().is_some_and(|t| t.wish.ticket == ticket);
        let index = self.traces.iter().position(is_it)?;
        self.traces[index].take().map(|trace| trace.stages)
    }

    fn get(&mut self, mark: u32) -> Option<&mut Trace> {
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
        let mark = tracer.start(3, Wish { ticket: 1, filter: vec![], program: None, reply });
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

    /// A frame that waits somewhere while its trace is given up is none of the next trace's, in
    /// whatever vnet that is; nor is one of whose number a guest says too much.
    #[test]
    fn what_outlives_its_trace_is_not_taken_for_another() {
        let (reply, stages) = std::sync::mpsc::channel();
        let wish = |ticket| Wish { ticket, filter: vec![], program: None, reply: reply.clone() };
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
