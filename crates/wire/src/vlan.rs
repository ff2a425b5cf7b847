//! 802.1Q: a VLAN of an interface as a tunnel, without an IP header (IEEE 802.1Q clause 9).
//!
//! Only the outermost tag counts, and only if it is one of 802.1Q. A tag
//! behind it belongs to the inner frame. Tags of 802.1ad are ignored, and so
//! are tags that only have a priority (identifier 0).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::ether;
use crate::tunnel_kind::{self, Fix, Take, TunnelHeader, TunnelKey, TunnelKind};

/// Properties of the kind. Identifier 4095 is reserved.
pub const KIND: TunnelKind = TunnelKind { name: "vlan", key: "id", keys: 1..=4094, port: None };

/// Bytes of a tag.
pub const TAG_BYTES: usize = 4;

/// Bytes before the tag: MAC addresses.
const AT: usize = 12;

/// A VLAN.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VlanTunnel {
    /// Identifier of the VLAN.
    pub id: u16,
}

impl VlanTunnel {
    /// Returns the tunnel as seen from its other end.
    pub(crate) fn reversed(&self) -> Self {
        self.clone()
    }
}

impl tunnel_kind::Tunnel for VlanTunnel {
    fn kind(&self) -> &'static TunnelKind {
        &KIND
    }

    fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        None
    }

    fn number(&self) -> Option<u32> {
        Some(self.id.into())
    }

    fn key(&self) -> u64 {
        TunnelKey::vlan(self.id)
    }

    fn takes(&self) -> Take {
        Take::Vlan { id: self.id }
    }

    fn header(&self) -> TunnelHeader {
        let bytes = [ether::kind::VLAN.to_be_bytes(), self.id.to_be_bytes()].concat();
        TunnelHeader { protocol: 0, bytes, fix: Fix::Tag }
    }

    fn key_text(&self) -> String {
        format!("id {}", self.id)
    }
}

/// Returns the identifier in a frame's outermost tag, if
/// that is one of 802.1Q and a type follows it.
pub fn id(frame: &[u8]) -> Option<u16> {
    let &[a, b, c, d, _, _] = frame.get(AT..)?.first_chunk()?;
    let is_tag = u16::from_be_bytes([a, b]) == ether::kind::VLAN;
    is_tag.then_some(u16::from_be_bytes([c, d]) & 0xfff)
}

/// Inserts a tag behind the MAC addresses of the frame that starts at offset [`TAG_BYTES`] of
/// `frame`. Returns `None`, with nothing written, if there are no addresses.
pub(crate) fn insert(frame: &mut [u8], tag: &[u8]) -> Option<()> {
    frame.get(TAG_BYTES..TAG_BYTES + AT)?;
    frame.copy_within(TAG_BYTES..TAG_BYTES + AT, 0);
    frame[AT..AT + TAG_BYTES].copy_from_slice(tag);
    Some(())
}

/// Removes the outermost tag: the frame without it starts at offset [`TAG_BYTES`]. Does nothing if
/// the frame is shorter than its tag.
pub fn strip(frame: &mut [u8]) {
    if frame.len() >= AT + TAG_BYTES {
        frame.copy_within(..AT, TAG_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outer::HeaderTemplate;
    use crate::tunnel::Encapsulation;
    use proptest::prelude::*;

    #[test]
    fn only_the_outermost_tag_of_802_1q_counts() {
        let frame = |tags: &[u8]| [&[1; 12][..], tags, &[8, 0, 1, 2, 3]].concat();
        assert_eq!(id(&frame(&[0x81, 0, 0xef, 0xfe])), Some(0xffe));
        assert_eq!(id(&frame(&[0x81, 0, 0, 5, 0x81, 0, 0, 6])), Some(5));
        assert_eq!(id(&frame(&[0x81, 0, 0xe0, 0])), Some(0));
        assert_eq!(id(&frame(&[])), None);
        assert_eq!(id(&frame(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 5])), None);
        for length in 0..18 {
            assert_eq!(id(&frame(&[0x81, 0, 0, 5])[..length]), None);
        }
    }

    proptest! {
        #[test]
        fn vlan_tag_round_trip_restores_the_frame(of in 1u16..4095, inner in prop::collection::vec(any::<u8>(), 14..90)) {
            let template = HeaderTemplate::new(&Encapsulation::Vlan(VlanTunnel { id: of })).unwrap();
            prop_assert_eq!(template.len(), TAG_BYTES);
            let mut frame = [&[0; TAG_BYTES][..], &inner].concat();
            template.write(&mut frame, [7; 6], [8; 6]).unwrap();
            prop_assert_eq!(id(&frame), Some(of));
            prop_assert_eq!(&frame[..12], &inner[..12]);
            prop_assert_eq!(&frame[16..], &inner[12..]);
            strip(&mut frame);
            prop_assert_eq!(&frame[TAG_BYTES..], &inner[..]);
        }

        #[test]
        fn vlan_leaves_short_frames_unchanged(mut bytes in prop::collection::vec(any::<u8>(), 0..16)) {
            let was = bytes.clone();
            strip(&mut bytes);
            prop_assert!(insert(&mut bytes, &[0; 4]).is_none());
            prop_assert_eq!(bytes, was);
        }
    }
}
