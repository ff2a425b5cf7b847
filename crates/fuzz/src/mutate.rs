//! Repeatable mutations of inputs: cut, flipped, overwritten, spliced.

/// First and last values of ranges.
const INTERESTING: [u64; 12] =
    [0, 1, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff];

/// Most changes of one input.
const CHANGES_MAX: u64 = 6;

/// Random numbers (SplitMix64), repeatable for a seed on every machine.
#[derive(Clone, Debug)]
pub struct SeededRandom(pub u64);

impl SeededRandom {
    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.number() % (end as u64).max(1)) as usize
    }
}

/// Changes `bytes` in one or more places, with pieces from
/// `other`. The result has at most `bytes_max` bytes.
pub fn mutate(bytes: &mut Vec<u8>, other: &[u8], bytes_max: usize, random: &mut SeededRandom) {
    for _ in 0..=random.number() % CHANGES_MAX {
        let at = random.below(bytes.len());
        match random.number() % 8 {
            0 => bytes.truncate(at),
            1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            2 if !bytes.is_empty() => bytes[at] = random.number() as u8,
            3 => {
                let value = INTERESTING[random.below(INTERESTING.len())];
                let width = 1 << random.below(4);
                let value = match random.number() % 2 {
                    0 => value.to_le_bytes()[..width].to_vec(),
                    _ => value.to_be_bytes()[8 - width..].to_vec(),
                };
                bytes.iter_mut().skip(at).zip(value).for_each(|(to, from)| *to = from);
            }
            4 => {
                let from = random.below(other.len());
                let piece = &other[from..from + random.below(other.len() - from + 1)];
                bytes.splice(at..at, piece.iter().copied());
            }
            5 => {
                let end = at + random.below(bytes.len() - at + 1).min(64);
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            6 => {
                let end = at + random.below(bytes.len() - at + 1).min(64);
                bytes.drain(at..end);
            }
            _ => {
                let count = random.below(16);
                let noise: Vec<u8> = (0..count).map(|_| random.number() as u8).collect();
                bytes.splice(at..at, noise);
            }
        }
        bytes.truncate(bytes_max);
    }
}
