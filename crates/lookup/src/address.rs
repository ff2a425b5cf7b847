//! What a trie needs to know of an address.

use std::fmt::Debug;

/// An address as an unsigned number whose highest bit is the first of the address.
pub trait Address: Copy + Debug + Default + Eq + Ord {
    /// Bits of an address.
    const BITS: u32;

    /// Bits that the root of a large table resolves: a multiple of six.
    const ROOT_BITS: u32;

    /// Whether a node stores small values in 16 bits: good where most nodes have no children,
    /// because more fits in a cache line; else it costs instructions.
    const SHORT_RUNS: bool;

    /// The six bits that begin at bit `depth` (`0..BITS`), as a number `0..64`; bits beyond the
    /// address count as zero.
    fn slot(self, depth: u32) -> usize;

    /// The first `bits` bits (1..=24) as a number.
    fn head(self, bits: u32) -> usize;

    /// The address with all but the first `length` bits set to zero.
    fn masked(self, length: u32) -> Self;

    /// The address with the six bits at `depth` set to `slot`, where they were zero.
    fn with_slot(self, depth: u32, slot: usize) -> Self;
}

impl Address for u32 {
    const BITS: u32 = 32;
    const ROOT_BITS: u32 = 18;
    const SHORT_RUNS: bool = true;

    #[inline(always)]
    fn slot(self, depth: u32) -> usize {
        ((u64::from(self) << 32) >> (58 - depth)) as usize % 64
    }

    #[inline(always)]
    fn head(self, bits: u32) -> usize {
        (self >> (32 - bits)) as usize
    }

    fn masked(self, length: u32) -> Self {
        if length == 0 { 0 } else { self & (u32::MAX << (32 - length)) }
    }

    fn with_slot(self, depth: u32, slot: usize) -> Self {
        self | (((slot as u64) << (58 - depth)) >> 32) as u32
    }
}

impl Address for u128 {
    const BITS: u32 = 128;
    const ROOT_BITS: u32 = 24;
    const SHORT_RUNS: bool = false;

    #[inline(always)]
    fn slot(self, depth: u32) -> usize {
        let bits = if depth <= 58 {
            ((self >> 64) as u64) >> (58 - depth)
        } else if depth <= 122 {
            (self >> (122 - depth)) as u64
        } else {
            (self as u64) << (depth - 122)
        };
        bits as usize % 64
    }

    #[inline(always)]
    fn head(self, bits: u32) -> usize {
        (((self >> 64) as u64) >> (64 - bits)) as usize
    }

    fn masked(self, length: u32) -> Self {
        if length == 0 { 0 } else { self & (u128::MAX << (128 - length)) }
    }

    fn with_slot(self, depth: u32, slot: usize) -> Self {
        let slot = slot as u128;
        self | if depth <= 122 { slot << (122 - depth) } else { slot >> (depth - 122) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bit<A: Address>(bits: u128, index: u32) -> usize {
        if index < A::BITS { (bits >> (A::BITS - 1 - index)) as usize & 1 } else { 0 }
    }

    fn slots_agree<A: Address>(address: A, bits: u128) {
        let mut again = A::default();
        for depth in (0..A::BITS).step_by(6) {
            let want = (0..6).fold(0, |slot, i| slot * 2 + bit::<A>(bits, depth + i));
            assert_eq!(address.slot(depth), want, "depth {depth} of {address:?}");
            again = again.with_slot(depth, want);
        }
        assert_eq!(again, address);
        for length in [1, 6, 18, 24] {
            let want = (0..length).fold(0, |head, i| head * 2 + bit::<A>(bits, i));
            assert_eq!(address.head(length), want);
        }
    }

    proptest! {
        #[test]
        fn slots_are_the_bits_of_the_address(v4: u32, v6: u128) {
            slots_agree(v4, u128::from(v4));
            slots_agree(v6, v6);
        }
    }
}
