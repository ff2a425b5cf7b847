//! Received messages and their attributes.

use std::fmt;
use std::io;
use std::net::IpAddr;

pub(crate) const HEADER_BYTES: usize = 16;
const ATTRIBUTE_TYPE_MASK: u16 = 0x3fff;

/// Explanation of an error (linux/netlink.h).
const NLMSGERR_ATTR_MSG: u16 = 1;

/// One message of a datagram.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// Type.
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    /// Sequence number of the request that it answers, or that caused the change.
    pub sequence: u32,
    /// Port of that request's sender.
    pub port: u32,
    /// Bytes behind the header.
    pub payload: &'a [u8],
}

/// Iterates over the messages of a datagram; ends at the first incomplete one.
#[inline]
pub fn messages(datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let length = u32_at(rest, 0)? as usize;
        if length < HEADER_BYTES || length > rest.len() {
            return None;
        }
        let message = Message {
            kind: u16_at(rest, 4)?,
            flags: u16_at(rest, 6)?,
            sequence: u32_at(rest, 8)?,
            port: u32_at(rest, 12)?,
            payload: &rest[HEADER_BYTES..length],
        };
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
        Some(message)
    })
}

impl Message<'_> {
    /// True if it ends an answer: an error, an acknowledgement, or the end of a dump.
    #[inline]
    pub fn is_end(&self) -> bool {
        matches!(i32::from(self.kind), libc::NLMSG_ERROR | libc::NLMSG_DONE)
    }

    /// True if the state changed during this dump, so that objects may be missing.
    #[inline]
    pub fn is_interrupted(&self) -> bool {
        self.flags & libc::NLM_F_DUMP_INTR as u16 != 0
    }

    /// Returns the request that caused the change, if it is identifiable: the sender's port, and
    /// the sequence number.
    #[inline]
    pub fn request(&self) -> Option<(u32, u32)> {
        (self.sequence != 0).then_some((self.port, self.sequence))
    }

    /// Returns the error number (positive) of an error or of a dump's end; 0 for none.
    pub fn error(&self) -> i32 {
        u32_at(self.payload, 0).map_or(0, |code| (code as i32).saturating_neg())
    }

    /// Returns the error of an [end](Self::is_end), with the kernel's explanation if it has one.
    pub fn result(&self) -> io::Result<()> {
        let code = self.error();
        if code == 0 {
            return Ok(());
        }
        let error = io::Error::from_raw_os_error(code);
        let Some(text) = self.explanation() else { return Err(error) };
        Err(io::Error::new(error.kind(), Refusal { code, text }))
    }

    /// Returns the text of an extended acknowledgement.
    fn explanation(&self) -> Option<String> {
        if self.flags & libc::NLM_F_ACK_TLVS as u16 == 0 {
            return None;
        }
        let request = match i32::from(self.kind) {
            libc::NLMSG_DONE => 0,
            _ if self.flags & libc::NLM_F_CAPPED as u16 != 0 => HEADER_BYTES,
            _ => (u32_at(self.payload, 4)? as usize).next_multiple_of(4),
        };
        let mut all = attributes(self.payload.get(4..)?.get(request..)?);
        all.find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG).map(|(_, value)| text(value))
    }
}

/// An error number with the kernel's explanation.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) code: i32,
    text: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}: {}", io::Error::from_raw_os_error(self.code), self.text)
    }
}

impl std::error::Error for Refusal {}

/// Iterates over attributes, as types and values; ends at the first incomplete one.
#[inline]
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(rest, 0)?);
        let kind = u16_at(rest, 2)? & ATTRIBUTE_TYPE_MASK;
        let value = rest.get(4..length)?;
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
        Some((kind, value))
    })
}

/// Returns true for IPv6, false for IPv4, `None` for other address families.
#[inline]
pub fn is_v6(family: u8) -> Option<bool> {
    match i32::from(family) {
        libc::AF_INET => Some(false),
        libc::AF_INET6 => Some(true),
        _ => None,
    }
}

/// Returns the address family.
#[inline]
pub fn family(v6: bool) -> u8 {
    (if v6 { libc::AF_INET6 } else { libc::AF_INET }) as u8
}

/// Reads an address of 4 or 16 bytes.
#[inline]
pub fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(IpAddr::from(*bytes.first_chunk::<4>()?)),
        16 => Some(IpAddr::from(*bytes.first_chunk::<16>()?)),
        _ => None,
    }
}

/// Reads a text that may end with a zero byte.
pub fn text(bytes: &[u8]) -> String {
    let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}

/// Reads a number in the machine's byte order.
#[inline]
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_ne_bytes)
}

/// Reads a number in the machine's byte order.
#[inline]
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hostile_bytes_yield_parts_of_themselves(
            kind in 0u16..5, flags: u16, length in 0u32..120, bytes: Vec<u8>, cut in 0usize..40,
        ) {
            let mut datagram = length.to_ne_bytes().to_vec();
            datagram.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].as_flattened());
            datagram.extend(bytes);
            datagram.truncate(datagram.len().saturating_sub(cut));
            let mut sum = 0;
            for message in messages(&datagram) {
                sum += HEADER_BYTES + message.payload.len();
                let _ = (message.result(), message.request(), message.is_end());
                let values: usize = attributes(message.payload).map(|(_, value)| value.len()).sum();
                prop_assert!(values <= message.payload.len());
            }
            prop_assert!(sum <= datagram.len());
        }
    }
}
