//! Messages to the kernel.

use std::net::IpAddr;

use crate::message::HEADER_BYTES;

/// One or more messages, which one system call sends.
#[derive(Clone, Debug, Default)]
pub struct Request {
    bytes: Vec<u8>,
    /// Start of the last message.
    start: usize,
}

impl Request {
    /// Makes a message of a type (`RTM_*`) with these `NLM_F_*` flags beside `NLM_F_REQUEST`, and
    /// the protocol's own header.
    pub fn new(kind: u16, flags: i32, header: &[u8]) -> Self {
        let mut request = Self::default();
        request.message(kind, flags, header);
        request
    }

    /// Adds another message. Attributes then belong to this one.
    pub fn message(&mut self, kind: u16, flags: i32, header: &[u8]) -> &mut Self {
        self.start = self.bytes.len();
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
        self.bytes.extend([0; 8]);
        self.raw(header)
    }

    /// Removes all messages, and keeps their memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.start = 0;
    }

    /// Adds an attribute of at most 65,531 bytes.
    pub fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.bytes.extend((4 + value.len() as u16).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.raw(value)
    }

    /// Adds an attribute: a number in the machine's byte order.
    pub fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.attribute(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute: a text with a zero byte at the end.
    pub fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        self.attribute(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds an attribute: an address.
    pub fn address(&mut self, kind: u16, value: IpAddr) -> &mut Self {
        match value {
            IpAddr::V4(v4) => self.attribute(kind, &v4.octets()),
            IpAddr::V6(v6) => self.attribute(kind, &v6.octets()),
        }
    }

    /// Adds an attribute that contains what `inner` adds.
    pub fn nested(&mut self, kind: u16, inner: impl FnOnce(&mut Self)) -> &mut Self {
        let at = self.bytes.len();
        self.attribute(kind, &[]);
        inner(self);
        let length = (self.bytes.len() - at) as u16;
        self.bytes[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        self
    }

    /// Adds bytes as they are, and pads them to a multiple of 4.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        let length = (self.bytes.len() - self.start) as u32;
        self.bytes[self.start..self.start + 4].copy_from_slice(&length.to_ne_bytes());
        self
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Sets the sequence number of the first message, and adds flags to it.
    pub(crate) fn stamp(&mut self, sequence: u32, flags: i32) {
        let header = &mut self.bytes[..HEADER_BYTES];
        let flags = u16::from_ne_bytes([header[6], header[7]]) | flags as u16;
        header[6..8].copy_from_slice(&flags.to_ne_bytes());
        header[8..12].copy_from_slice(&sequence.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{attributes, messages, text, u32_at};

    #[test]
    fn requests_are_read_as_they_were_written() {
        let mut request = Request::new(7, libc::NLM_F_CREATE, &[9]);
        request.number(1, 5).text(2, "four").nested(3, |inner| {
            inner.raw(&[1, 2, 3]).address(4, IpAddr::from([10, 0, 0, 1])).attribute(5, &[6]);
        });
        request.message(8, 0, &[1, 2, 3, 4, 5]).address(6, "fd00::1".parse().unwrap());
        let all: Vec<_> = messages(request.as_bytes()).collect();
        let [first, second] = &all[..] else { panic!("{all:?}") };
        assert_eq!((first.kind, first.flags), (7, 0x401));
        let read: Vec<_> = attributes(&first.payload[4..]).collect();
        assert_eq!((read[0].0, u32_at(read[0].1, 0)), (1, Some(5)));
        assert_eq!((read[1].0, text(read[1].1)), (2, "four".into()));
        assert_eq!((read[2].0, &read[2].1[..4]), (3, &[1, 2, 3, 0][..]));
        let inner: Vec<_> = attributes(&read[2].1[4..]).collect();
        assert_eq!(inner, [(4, &[10, 0, 0, 1][..]), (5, &[6][..])]);
        assert_eq!((second.kind, second.payload.len()), (8, 8 + 20));
        request.stamp(77, libc::NLM_F_ACK);
        let stamped: Vec<_> =
            messages(request.as_bytes()).map(|it| (it.sequence, it.flags)).collect();
        assert_eq!(stamped, [(77, 0x405), (0, 1)]);
    }
}
