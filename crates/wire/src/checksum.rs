//! The Internet checksum (RFC 1071).

/// Partial sum: add the pieces, then call [`Sum::finish`]. Every piece
/// but the last must have an even count of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes, taken as big-endian 16-bit words; an odd last byte is padded with zero.
    #[must_use]
    #[inline]
    pub fn with(self, bytes: &[u8]) -> Self {
        // Word sums don't depend on word size (RFC 1071, 2.C): 32 bits at a time can't overflow
        // 64 bits below 2^32 words.
        let (words, rest) = bytes.as_chunks::<4>();
        let mut sum = self.0;
        for word in words {
            sum += u64::from(u32::from_be_bytes(*word));
        }
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        Self(fold(sum + u64::from(u32::from_be_bytes(last))))
    }

    /// Adds one 16-bit word.
    #[must_use]
    pub fn with_word(self, word: u16) -> Self {
        Self(fold(self.0 + u64::from(word)))
    }

    /// Returns the checksum to write; 0 over bytes that include their valid checksum.
    #[inline]
    pub fn finish(self) -> u16 {
        let sum = (self.0 >> 16) + (self.0 & 0xffff);
        let sum = (sum >> 16) + (sum & 0xffff);
        !(((sum >> 16) + (sum & 0xffff)) as u16)
    }
}

/// Folds a sum to about 32 bits without changing it modulo 2^16 - 1.
#[inline]
fn fold(sum: u64) -> u64 {
    (sum >> 32) + (sum & 0xffff_ffff)
}

/// Returns the checksum of `bytes`.
#[inline]
pub fn checksum(bytes: &[u8]) -> u16 {
    Sum::default().with(bytes).finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 1071 section 4.1, word by word.
    fn slow(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    #[test]
    fn checksum_matches_the_rfc_1071_example() {
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
    }

    proptest! {
        #[test]
        fn checksum_matches_the_slow_sum(bytes: Vec<u8>, cut: prop::sample::Index) {
            prop_assert_eq!(checksum(&bytes), slow(&bytes));
            let cut = cut.index(bytes.len() + 1) & !1;
            let pieces = Sum::default().with(&bytes[..cut]).with(&bytes[cut..]);
            prop_assert_eq!(pieces.finish(), slow(&bytes));
        }

        #[test]
        fn all_ones_do_not_overflow(count in 0usize..4096) {
            let bytes = vec![0xff; count];
            prop_assert_eq!(checksum(&bytes), slow(&bytes));
        }
    }
}
