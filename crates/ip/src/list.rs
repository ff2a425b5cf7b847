//! Frames in memory, for tests and fuzzing.

use crate::forward::{Decision, FrameBatch};

/// A batch of frames: ingress vport, bytes, and verdict. Panics if the forwarder decides twice on a
/// frame or makes it longer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FrameList(pub Vec<(u16, Vec<u8>, Option<Decision>)>);

impl FrameBatch for FrameList {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn vport(&self, frame: usize) -> u16 {
        self.0[frame].0
    }

    fn bytes(&self, frame: usize) -> &[u8] {
        &self.0[frame].1
    }

    fn bytes_mut(&mut self, frame: usize) -> &mut [u8] {
        &mut self.0[frame].1
    }

    fn cut(&mut self, frame: usize, bytes: usize) {
        assert!(bytes <= self.0[frame].1.len(), "no frame grows");
        self.0[frame].1.truncate(bytes);
    }

    fn decide(&mut self, frame: usize, decision: Decision) {
        assert_eq!(self.0[frame].2.replace(decision), None, "decided once");
    }
}
