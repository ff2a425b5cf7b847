//! Address types of a trie.

use std::fmt::Debug;

/// An address as an unsigned number; its highest bit is the address's first bit.
pub trait AddressBits: Copy + Debug + Default + Eq + Ord {
    /// Number of bits.
    const BITS: u32;

    /// Bits that the root of a large table resolves: a multiple of six.
    const ROOT_BITS: u32;

    /// True if a node stores small values in 16 bits. That helps if most nodes have
    /// no children, since more fits in a cache line; otherwise it costs instructions.
    const SHORT_RUNS: bool;

    /// Returns the six bits from bit `depth` (`0..BITS`) as a
    /// number `0..64`. Bits beyond the address count as zero.
    fn slot(self, depth: u32) -> usize;

    /// Returns the first `bits` bits (1..=24) as a number.
    fn head(self, bits: u32) -> usize;

    /// Returns the address with all bits after the first `length` set to zero.
    fn masked(self, length: u32) -> Self;

    /// Returns the address with the six bits at `depth`, which must be zero, set to `slot`.
    fn with_slot(self, depth: u32, slot: usize) -> Self;
}

impl AddressBits for u32 {
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

impl AddressBits for u128 {
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

    fn bit<A: AddressBits>(bits: u128, index: u32) -> usize {
        if index < A::BITS { (bits >> (A::BITS - 1 - index)) as usize & 1 } else { 0 }
    }

    fn slots_agree<A: AddressBits>(address: A, bits: u128) {
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
        fn node_slots_match_address_bits(v4: u32, v6: u128) {
            slots_agree(v4, u128::from(v4));
            slots_agree(v6, v6);
        }
    }
}
