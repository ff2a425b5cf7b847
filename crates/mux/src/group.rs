//! Frames that go the same way, brought together, so that what is the same for all of them is done once.

use pdp_afxdp::Packet;

/// Ways that can be told apart.
const WAYS: usize = 256;

/// Frames of one port in a row on average from which on it costs more to sort them.
const RUN_FRAMES: usize = 4;

/// Room to sort in, kept so that nothing is allocated.
#[derive(Debug, Default)]
pub struct Groups {
    /// The way of each frame.
    pub ways: Vec<u8>,
    /// The place of each frame.
    places: Vec<u32>,
}

impl Groups {
    /// Sorts frames of a node whose first port is `first` by their ports, if there are several in turn.
    #[inline]
    pub fn by_port(&mut self, first: usize, frames: &mut [Packet]) {
        let runs = frames.windows(2).filter(|pair| pair[0].port != pair[1].port).count();
        if runs * RUN_FRAMES > frames.len() {
            self.ways.clear();
            self.ways.extend(frames.iter().map(|packet| (usize::from(packet.port) - first) as u8));
            self.sort(frames);
        }
    }

    /// Sorts `frames` by their ways, which are sorted with them; those of one way keep their order.
    pub fn sort(&mut self, frames: &mut [Packet]) {
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
            // Each exchange brings one frame to its place.
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
        /// Against the library's.
        #[test]
        fn sorts_and_keeps_the_order_of_equals(ways in prop::collection::vec(any::<u8>(), 0..300)) {
            let (_pool, mut frames) = pdp_afxdp::Pool::new(ways.len().max(1)).unwrap();
            frames.truncate(ways.len());
            let mut expected: Vec<_> = ways.iter().copied().zip(0..).collect();
            expected.sort();
            let mut groups = Groups { ways, ..Groups::default() };
            groups.sort(&mut frames);
            let sorted = groups.ways.into_iter().zip(frames.iter().map(Packet::number));
            prop_assert_eq!(sorted.collect::<Vec<_>>(), expected);
        }
    }
}
