//! BGP updates in a file, as published by route collectors: announced and withdrawn prefixes with
//! their second and the collector's neighbour.
//!
//! Never panics, whatever the bytes. Unicast only; ignores the paths' attributes. Sources: RFC 6396
//! sections 2, 3 and 4.4 (MRT, BGP4MP), RFC 4271 section 4.3 (UPDATE), RFC 4760 sections 3 and 4
//! (MP_REACH_NLRI, MP_UNREACH_NLRI).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;

/// MRT types: BGP4MP, and its variant with microseconds after the header.
const BGP4MP: u16 = 16;
const BGP4MP_ET: u16 = 17;
/// BGP4MP subtypes: a message with AS numbers of two and of four bytes.
const MESSAGE: u16 = 1;
const MESSAGE_AS4: u16 = 4;

/// BGP: the marker before each message, and the type of an UPDATE.
const MARKER_BYTES: usize = 16;
const UPDATE: u8 = 2;

/// Path attributes: the flag of a length of two bytes, and the two types of RFC 4760.
const EXTENDED_LENGTH: u8 = 0x10;
const MP_REACH: u8 = 14;
const MP_UNREACH: u8 = 15;

/// Address families, and unicast.
const AFI_IPV4: u16 = 1;
const AFI_IPV6: u16 = 2;
const UNICAST: u8 = 1;

/// Announcement or withdrawal of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// Seconds after the file's first.
    pub second: u32,
    /// AS number of the neighbour that sent it.
    pub neighbour: u32,
    /// The prefix.
    pub prefix: IpNet,
    /// True if announced, false if withdrawn.
    pub announced: bool,
}

/// Reads a file compressed by gzip.
pub fn read(path: &Path) -> Result<Vec<Update>> {
    let output = Command::new("gzip")
        .arg("-dc")
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .context("gzip: is it installed?")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "gzip -dc {}: {}", path.display(), errors.trim());
    parse(&output.stdout)
        .with_context(|| format!("{}: cut off, or no MRT file of BGP updates", path.display()))
}

/// Parses a file, in its order. `None` if a record is incomplete.
fn parse(bytes: &[u8]) -> Option<Vec<Update>> {
    let mut all = UnreadBytes(bytes);
    let (mut updates, mut first) = (Vec::new(), None);
    while !all.0.is_empty() {
        let at = all.u32()?;
        let (kind, subtype, length) = (all.u16()?, all.u16()?, all.u32()?);
        let mut record = UnreadBytes(all.take(usize::try_from(length).ok()?)?);
        if kind == BGP4MP_ET {
            record.u32()?;
        }
        if !matches!(kind, BGP4MP | BGP4MP_ET) || !matches!(subtype, MESSAGE | MESSAGE_AS4) {
            continue;
        }
        let second = at.saturating_sub(*first.get_or_insert(at));
        let neighbour = if subtype == MESSAGE_AS4 {
            let neighbour = record.u32()?;
            record.u32()?;
            neighbour
        } else {
            let neighbour = record.u16()?;
            record.u16()?;
            neighbour.into()
        };
        record.u16()?;
        let address_bytes = if record.u16()? == AFI_IPV6 { 16 } else { 4 };
        record.take(2 * address_bytes)?;
        message(record, |prefix, announced| {
            updates.push(Update { second, neighbour, prefix, announced });
        })?;
    }
    Some(updates)
}

/// Calls `each` with the announcements and withdrawals of a BGP message.
fn message(mut bytes: UnreadBytes, mut each: impl FnMut(IpNet, bool)) -> Option<()> {
    bytes.take(MARKER_BYTES)?;
    bytes.u16()?;
    if bytes.u8()? != UPDATE {
        return Some(());
    }
    let withdrawn = bytes.u16()?;
    prefixes(AFI_IPV4, UnreadBytes(bytes.take(withdrawn.into())?), |prefix| each(prefix, false))?;
    let attributes = bytes.u16()?;
    let mut attributes = UnreadBytes(bytes.take(attributes.into())?);
    while !attributes.0.is_empty() {
        let (flags, kind) = (attributes.u8()?, attributes.u8()?);
        let length = match flags & EXTENDED_LENGTH {
            0 => attributes.u8()?.into(),
            _ => attributes.u16()?,
        };
        let mut value = UnreadBytes(attributes.take(length.into())?);
        if matches!(kind, MP_REACH | MP_UNREACH) {
            let (family, unicast) = (value.u16()?, value.u8()? == UNICAST);
            if kind == MP_REACH {
                let next_hop = value.u8()?;
                value.take(next_hop.into())?;
                value.u8()?;
            }
            if unicast {
                prefixes(family, value, |prefix| each(prefix, kind == MP_REACH))?;
            }
        }
    }
    prefixes(AFI_IPV4, bytes, |prefix| each(prefix, true))
}

/// Calls `each` with the prefixes of a field: each is
/// a length in bits, and the bytes that it needs.
fn prefixes(family: u16, mut bytes: UnreadBytes, mut each: impl FnMut(IpNet)) -> Option<()> {
    let address_bytes = match family {
        AFI_IPV4 => 4,
        AFI_IPV6 => 16,
        _ => return Some(()),
    };
    while !bytes.0.is_empty() {
        let bits = bytes.u8()?;
        let given = bytes.take(usize::from(bits).div_ceil(8))?;
        let mut octets = [0; 16];
        octets[..address_bytes].get_mut(..given.len())?.copy_from_slice(given);
        let [a, b, c, d, ..] = octets;
        let address: IpAddr = match family {
            AFI_IPV4 => Ipv4Addr::new(a, b, c, d).into(),
            _ => Ipv6Addr::from(octets).into(),
        };
        each(IpNet::new(address, bits).ok()?.trunc());
    }
    Some(())
}

/// Bytes yet to be read.
#[derive(Clone, Copy)]
struct UnreadBytes<'a>(&'a [u8]);

impl<'a> UnreadBytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A BGP4MP record at a given second.
    fn record(second: u32, subtype: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = second.to_be_bytes().to_vec();
        bytes.extend(BGP4MP.to_be_bytes());
        bytes.extend(subtype.to_be_bytes());
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend(body);
        bytes
    }

    fn update(withdrawn: &[u8], attributes: &[u8], announced: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0xff; MARKER_BYTES];
        bytes.extend([0, 0, UPDATE, 0, withdrawn.len() as u8]);
        bytes.extend(withdrawn);
        bytes.extend([0, attributes.len() as u8]);
        bytes.extend(attributes);
        bytes.extend(announced);
        bytes
    }

    /// Two records: neighbour 7 withdraws and announces IPv4, neighbour 70,000 announces and
    /// withdraws IPv6.
    fn file() -> Vec<u8> {
        let mut v4 = vec![0, 7, 0, 1, 0, 0, 0, AFI_IPV4 as u8];
        v4.extend([0; 8]);
        // ORIGIN is ignored.
        v4.extend(update(&[8, 10], &[0x40, 1, 1, 0], &[24, 192, 0, 2]));
        let mut v6 = vec![0, 1, 0x11, 0x70, 0, 0, 0, 1, 0, 0, 0, AFI_IPV6 as u8];
        v6.extend([0; 32]);
        let reach = [0x90, MP_REACH, 0, 11, 0, 2, UNICAST, 1, 9, 0, 32, 0x20, 1, 0xd, 0xb8];
        let unreach = [0x80, MP_UNREACH, 5, 0, 2, UNICAST, 8, 0x20];
        v6.extend(update(&[], &[&reach[..], &unreach[..]].concat(), &[]));
        [record(100, MESSAGE, &v4), record(103, MESSAGE_AS4, &v6)].concat()
    }

    #[test]
    fn parses_updates_of_both_families() {
        let one = |second, neighbour, prefix: &str, announced| Update {
            second,
            neighbour,
            prefix: prefix.parse().unwrap(),
            announced,
        };
        let expected = [
            one(0, 7, "10.0.0.0/8", false),
            one(0, 7, "192.0.2.0/24", true),
            one(3, 70_000, "2001:db8::/32", true),
            one(3, 70_000, "2000::/8", false),
        ];
        assert_eq!(parse(&file()).unwrap(), expected);
    }

    #[test]
    fn truncated_update_files_are_refused() {
        let file = file();
        let whole: Vec<usize> =
            (0..=file.len()).filter(|length| parse(&file[..*length]).is_some()).collect();
        assert_eq!(whole.len(), 3, "nothing, one record, two: {whole:?}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            noise in prop::collection::vec(any::<u8>(), 0..200),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let _ = parse(&noise);
            let mut file = file();
            let at = at.index(file.len());
            file[at] = byte;
            let _ = parse(&file);
        }
    }
}
