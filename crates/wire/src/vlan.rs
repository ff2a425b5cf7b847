//! 802.1Q: a VLAN of an interface as a tunnel, without IP around it (IEEE 802.1Q clause 9).
//!
//! Only the outermost tag counts, and only one of 802.1Q: a tag behind it is the frame's own, one of
//! 802.1ad is none of ours, and neither is one that is there for its priority alone (identifier 0).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::ether;
use crate::tunnel::{self, Encapsulation, Fix, Header, Key, Kind, Take};

/// The kind. Identifier 4095 is reserved.
pub const KIND: Kind = Kind { name: "vlan", key: "id", keys: 1..=4094, port: None };

/// Bytes of a tag.
pub const TAG_BYTES: usize = 4;

/// Bytes before it: link addresses.
const AT: usize = 12;

/// A VLAN.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tunnel {
    /// Its identifier.
    pub id: u16,
}

impl tunnel::Tunnel for Tunnel {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        None
    }

    fn number(&self) -> Option<u32> {
        Some(self.id.into())
    }

    fn key(&self) -> u64 {
        Key::vlan(self.id)
    }

    fn takes(&self) -> Take {
        Take::Vlan { id: self.id }
    }

    fn header(&self) -> Header {
        let bytes = [ether::kind::VLAN.to_be_bytes(), self.id.to_be_bytes()].concat();
        Header { protocol: 0, bytes, fix: Fix::Tag }
    }

    fn reversed(&self) -> Encapsulation {
        Encapsulation::Vlan(self.clone())
    }

    fn key_text(&self) -> String {
        format!("id {}", self.id)
    }
}

/// The identifier in a frame's outermost tag, if that is one of 802.1Q and a type follows it.
pub fn id(frame: &[u8]) -> Option<u16> {
    let &[a, b, c, d, _, _] = frame.get(AT..)?.first_chunk()?;
    let is_tag = u16::from_be_bytes([a, b]) == ether::kind::VLAN;
    is_tag.then_some(u16::from_be_bytes([c, d]) & 0xfff)
}

/// Puts a tag behind the link addresses of the frame that stands [`TAG_BYTES`] behind the start of `frame`.
/// `None`, with nothing written, if there are no addresses.
pub(crate) fn put(frame: &mut [u8], tag: &[u8]) -> Option<()> {
    frame.get(TAG_BYTES..TAG_BYTES + AT)?;
    frame.copy_within(TAG_BYTES..TAG_BYTES + AT, 0);
    frame[AT..AT + TAG_BYTES].copy_from_slice(tag);
    Some(())
}

/// Takes the outermost tag off: the frame without it begins [`TAG_BYTES`] later. Nothing happens to one that
/// is shorter than its tag.
pub fn take_off(frame: &mut [u8]) {
    if frame.len() >= AT + TAG_BYTES {
        frame.copy_within(..AT, TAG_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outer::Template;
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
        fn what_is_put_on_comes_off(of in 1u16..4095, inner in prop::collection::vec(any::<u8>(), 14..90)) {
            let template = Template::new(&Encapsulation::Vlan(Tunnel { id: of })).unwrap();
            prop_assert_eq!(template.len(), TAG_BYTES);
            let mut frame = [&[0; TAG_BYTES][..], &inner].concat();
            template.write(&mut frame, [7; 6], [8; 6]).unwrap();
            prop_assert_eq!(id(&frame), Some(of));
            prop_assert_eq!(&frame[..12], &inner[..12]);
            prop_assert_eq!(&frame[16..], &inner[12..]);
            take_off(&mut frame);
            prop_assert_eq!(&frame[TAG_BYTES..], &inner[..]);
        }

        #[test]
        fn short_frames_stay(mut bytes in prop::collection::vec(any::<u8>(), 0..16)) {
            let was = bytes.clone();
            take_off(&mut bytes);
            prop_assert!(put(&mut bytes, &[0; 4]).is_none());
            prop_assert_eq!(bytes, was);
        }
    }
}
