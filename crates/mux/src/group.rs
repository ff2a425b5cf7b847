//! Groups frames with the same destination, so that work for the same destination is done once.

use pdp_afxdp::PacketBuffer;

/// Number of destinations.
const DESTINATIONS: usize = 256;

/// Frames of one port in a row, on average, from which on grouping costs more than it saves.
const RUN_FRAMES: usize = 4;

/// Buffers for grouping, reused so that nothing is allocated.
#[derive(Debug, Default)]
pub struct FrameGrouper {
    /// Destination of each frame.
    pub destinations: Vec<u8>,
    /// Target position of each frame.
    positions: Vec<u32>,
}

impl FrameGrouper {
    /// Groups frames of a node by their ports, if their ports
    /// alternate often. `first` is the node's first port.
    #[inline]
    pub fn by_port(&mut self, first: usize, frames: &mut [PacketBuffer]) {
        let runs = frames.windows(2).filter(|pair| pair[0].port != pair[1].port).count();
        if runs * RUN_FRAMES > frames.len() {
            self.destinations.clear();
            self.destinations
                .extend(frames.iter().map(|packet| (usize::from(packet.port) - first) as u8));
            self.group(frames);
        }
    }

    /// Groups `frames` and `destinations` by destination. Frames of one destination keep their
    /// order.
    pub fn group(&mut self, frames: &mut [PacketBuffer]) {
        let Self { destinations, positions } = self;
        let mut next = [0u32; DESTINATIONS];
        destinations.iter().for_each(|to| next[usize::from(*to)] += 1);
        let mut before = 0;
        for next in &mut next {
            before += std::mem::replace(next, before);
        }
        positions.clear();
        positions.extend(destinations.iter().map(|to| {
            let next = &mut next[usize::from(*to)];
            *next += 1;
            *next - 1
        }));
        for at in 0..frames.len() {
            // Each swap brings one frame to its final position.
            while positions[at] as usize != at {
                let to = positions[at] as usize;
                frames.swap(at, to);
                destinations.swap(at, to);
                positions.swap(at, to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with the standard library's stable sort.
        #[test]
        fn frame_grouping_is_a_stable_sort(destinations in prop::collection::vec(any::<u8>(), 0..300)) {
            let (_pool, mut frames) = pdp_afxdp::Pool::new(destinations.len().max(1)).unwrap();
            frames.truncate(destinations.len());
            let mut expected: Vec<_> = destinations.iter().copied().zip(0..).collect();
            expected.sort();
            let mut groups = FrameGrouper { destinations, ..FrameGrouper::default() };
            groups.group(&mut frames);
            let sorted = groups.destinations.into_iter().zip(frames.iter().map(PacketBuffer::number));
            prop_assert_eq!(sorted.collect::<Vec<_>>(), expected);
        }
    }
}
