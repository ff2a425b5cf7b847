//! Groups frames with the same destination, so that work for the same destination is done once.

use pdp_afxdp::PacketBuffer;

/// Number of destinations.
const WAYS: usize = 256;

/// Frames of one port in a row, on average, from which on grouping costs more than it saves.
const RUN_FRAMES: usize = 4;

/// Buffers for grouping, reused so that nothing is allocated.
#[derive(Debug, Default)]
pub struct FrameGrouper {
    /// Destination of each frame.
    pub ways: Vec<u8>,
    /// Target position of each frame.
    places: Vec<u32>,
}

impl FrameGrouper {
    /// Groups frames of a node by their ports, if their ports
    /// alternate often. `first` is the node's first port.
    #[inline]
    pub fn by_port(&mut self, first: usize, frames: &mut [PacketBuffer]) {
        let runs = frames.windows(2).filter(|pair| pair[0].port != pair[1].port).count();
        if runs * RUN_FRAMES > frames.len() {
            self.ways.clear();
            self.ways.extend(frames.iter().map(|packet| (usize::from(packet.port) - first) as u8));
            self.sort(frames);
        }
    }

    /// Sorts `frames` and `ways` by destination. Frames with the same destination keep their order.
    pub fn sort(&mut self, frames: &mut [PacketBuffer]) {
        let Self { ways, places } = self;
        let mut next = [0u32; WAYS];
        ways.iter().for_each(|way| next[usize::from(*way)] += 1);
        let mut before = 0;
        for next in &mut next {
            before += std::mem::replace(next, before);
        }
        places.clear();
        places.extend(ways.iter().map(|way| {
            let next = &mut next[usize::from(*way)];
            *next += 1;
            *next - 1
        }));
        for at in 0..frames.len() {
            // Each swap brings one frame to its final position.
            while places[at] as usize != at {
                let to = places[at] as usize;
                frames.swap(at, to);
                ways.swap(at, to);
                places.swap(at, to);
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
        fn frame_grouping_is_a_stable_sort(ways in prop::collection::vec(any::<u8>(), 0..300)) {
            let (_pool, mut frames) = pdp_afxdp::Pool::new(ways.len().max(1)).unwrap();
            frames.truncate(ways.len());
            let mut expected: Vec<_> = ways.iter().copied().zip(0..).collect();
            expected.sort();
            let mut groups = FrameGrouper { ways, ..FrameGrouper::default() };
            groups.sort(&mut frames);
            let sorted = groups.ways.into_iter().zip(frames.iter().map(PacketBuffer::number));
            prop_assert_eq!(sorted.collect::<Vec<_>>(), expected);
        }
    }
}
