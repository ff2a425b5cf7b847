//! One frame followed from its arrival to its end.
//!
//! A traced frame carries a number (in the packet's mark, and in the tag through a guest); stages
//! are noted under it. Copies that a guest makes are followed as well: a trace ends with the last
//! of them.

use std::sync::mpsc::Sender;
use std::time::Instant;

use pdp_proto::mux::{Match, TraceStage};

/// Traces of one worker at a time; numbers are 1..=TRACES_MAX.
pub const TRACES_MAX: usize = 8;

/// Stages of one trace; what follows is left out.
const STAGES_MAX: usize = 256;

/// A wish to follow the next frame that has these bytes.
#[derive(Debug)]
pub struct Wish {
    /// By which it can be taken back.
    pub ticket: u64,
    /// Which frame.
    pub filter: Vec<Match>,
    /// Where the stages go.
    pub reply: Sender<Vec<TraceStage>>,
}

#[derive(Debug)]
struct Trace {
    vnet: u16,
    wish: Wish,
    since: Instant,
    open: usize,
    stages: Vec<TraceStage>,
}

/// The traces of a worker.
#[derive(Debug, Default)]
pub struct Tracer {
    traces: [Option<Trace>; TRACES_MAX],
}

impl Tracer {
    /// Begins to follow a frame of the vnet in slot `vnet`. Returns its mark, 0 if too many are
    /// followed already (the wish is given up then).
    pub fn start(&mut self, vnet: u16, wish: Wish) -> u32 {
        let Some(free) = self.traces.iter().position(Option::is_none) else { return 0 };
        let (since, stages) = (Instant::now(), vec![]);
        self.traces[free] = Some(Trace { vnet, wish, since, open: 1, stages });
        free as u32 + 1
    }

    /// The mark for the number that a guest of `vnet` gave, 0 if it is none of that vnet's.
    pub fn mark(&self, vnet: u16, number: u8) -> u32 {
        let index = usize::from(number).wrapping_sub(1);
        let trace = self.traces.get(index).and_then(Option::as_ref);
        if trace.is_some_and(|trace| trace.vnet == vnet) { u32::from(number) } else { 0 }
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
        if trace.open == 0
            && let Some(trace) = self.traces[mark as usize - 1].take()
        {
            // Whoever asked may have gone away.
            let _ = trace.wish.reply.send(trace.stages);
        }
    }

    /// Stops following; returns what is known so far.
    pub fn cancel(&mut self, ticket: u64) -> Option<Vec<TraceStage>> {
        let is_it = |trace: &Option<Trace>| trace.as_ref().is_some_and(|t| t.wish.ticket == ticket);
        let index = self.traces.iter().position(is_it)?;
        self.traces[index].take().map(|trace| trace.stages)
    }

    fn get(&mut self, mark: u32) -> Option<&mut Trace> {
        self.traces.get_mut((mark as usize).wrapping_sub(1))?.as_mut()
    }
}

/// Whether `frame` has all these bytes. Bytes beyond its end match nothing.
pub fn matches(frame: &[u8], wanted: &[Match]) -> bool {
    wanted.iter().all(|wanted| {
        let start = usize::from(wanted.offset);
        let bytes = frame.get(start..start + wanted.value.len());
        bytes.is_some_and(|bytes| {
            bytes
                .iter()
                .zip(&wanted.value)
                .zip(&wanted.mask)
                .all(|((byte, value), mask)| byte & mask == value & mask)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_ends_with_its_last_copy() {
        let (reply, stages) = std::sync::mpsc::channel();
        let mut tracer = Tracer::default();
        let mark = tracer.start(3, Wish { ticket: 1, filter: vec![], reply });
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

    #[test]
    fn matching() {
        let wanted = |offset, value: &[u8], mask: &[u8]| {
            vec![Match { offset, value: value.to_vec(), mask: mask.to_vec() }]
        };
        assert!(matches(b"abc", &wanted(1, b"b", &[0xff])));
        assert!(matches(b"abc", &wanted(1, b"c", &[0xfe])));
        assert!(!matches(b"abc", &wanted(1, b"c", &[0xff])));
        assert!(!matches(b"abc", &wanted(2, b"cd", &[0xff, 0])));
        assert!(matches(b"", &[]));
    }
}
