//! VXLAN headers (RFC 7348 section 5).

/// Bytes of a header.
pub const HEADER_BYTES: usize = 8;

/// Network identifiers are below this (24 bits).
pub const VNI_END: u32 = 1 << 24;

/// The flag that says that the identifier is valid.
const I_FLAG: u8 = 0x08;

/// The network identifier in the header at the start of `bytes`; `None` if it is too short or the
/// I flag is not set. Reserved bits are ignored on receipt, as the RFC demands.
pub fn parse(bytes: &[u8]) -> Option<u32> {
    let &[flags, _, _, _, high, middle, low, _] = bytes.first_chunk::<HEADER_BYTES>()?;
    (flags & I_FLAG != 0).then_some(u32::from_be_bytes([0, high, middle, low]))
}

/// The header for `vni`, of which the low 24 bits count.
pub fn emit(vni: u32) -> [u8; HEADER_BYTES] {
    let [_, high, middle, low] = vni.to_be_bytes();
    [I_FLAG, 0, 0, 0, high, middle, low, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vector() {
        assert_eq!(emit(0x12_3456), [8, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
        assert_eq!(parse(&[0xf7, 0, 0, 0, 0, 0, 1, 0]), None);
        for length in 0..HEADER_BYTES {
            assert_eq!(parse(&emit(1)[..length]), None);
        }
    }

    proptest! {
        #[test]
        fn reserved_bits_are_ignored(vni in 0..VNI_END, noise: [u8; HEADER_BYTES]) {
            let mut bytes = emit(vni);
            for at in [0, 1, 2, 3, 7] {
                bytes[at] |= noise[at];
            }
            prop_assert_eq!(parse(&bytes), Some(vni));
        }
    }
}
