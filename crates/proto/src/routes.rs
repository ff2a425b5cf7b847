//! The routes channel: a route mirror tells forwarding guests what the control guest's kernel
//! holds, as one snapshot and then ordered changes.
//!
//! The mirror listens; every forwarding guest connects, says [`FromGuest::Hello`], and gets a
//! snapshot between [`ToGuest::Begin`] and [`ToGuest::End`]. A guest that already has a table
//! keeps forwarding with it while a snapshot comes, and at `End` removes what the snapshot did not
//! name (mark and sweep). Changes follow in the kernel's order. A guest that reads too slowly is
//! disconnected, connects again, and gets a snapshot.
//!
//! Each frame of [`crate::channel`] holds a postcard `Vec<ToGuest>` or `Vec<FromGuest>`.
//!
//! Never told, because a guest hands packets to them over by itself: prefixes inside 127.0.0.0/8,
//! ::1, fe80::/10 and ff00::/8.
//!
//! Limits: [`BATCH_MAX`] messages a frame, [`HOPS_MAX`] hops a group, [`FROM_GUEST_BYTES_MAX`]
//! bytes of a frame from a guest; a peer beyond them is disconnected.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::channel::frame;

/// Version of this protocol, in [`FromGuest::Hello`].
pub const VERSION: u16 = 2;

/// Messages of one frame.
pub const BATCH_MAX: usize = 4096;

/// Hops of one group.
pub const HOPS_MAX: usize = 128;

/// Link addresses of a vport beside its own; what is sent to more is not taken.
pub const MACS_MAX: usize = 16;

/// Bytes of a frame from a guest, without its prefix.
pub const FROM_GUEST_BYTES_MAX: usize = 8 << 20;

/// Name of a group of next hops, chosen by the mirror and unique while the group exists. A mirror
/// uses no number twice (before all have been used), and one that is started anew begins at
/// another number, so that a group of a table that is being replaced is not taken for a new one.
pub type GroupId = u32;

/// From the mirror to a forwarding guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// A snapshot begins.
    Begin,
    /// The snapshot is whole: what it did not name is gone.
    End,
    /// A vport as the kernel has it now; replaces what was known of it.
    Vport(Vport),
    /// An address of the router itself, or a subnet's broadcast address: punt as local.
    Local {
        /// The address.
        address: IpAddr,
        /// It is the router's itself: no packet of IPv4 comes from there.
        own: bool,
    },
    /// No longer such an address.
    LocalGone(IpAddr),
    /// A group of next hops, new or replaced. Routes that name it follow the replacement at once.
    Group {
        /// The group.
        id: GroupId,
        /// Its hops, at least one and at most [`HOPS_MAX`].
        hops: Vec<Hop>,
        /// Largest packet of its routes, bytes; 0: the vport's MTU alone counts.
        mtu: u32,
    },
    /// A group that no route names any more.
    GroupGone(GroupId),
    /// A route, new or replaced.
    Route {
        /// Destination; host bits are zero.
        prefix: IpNet,
        /// Where it goes.
        target: Target,
    },
    /// No route for exactly this prefix any more.
    RouteGone(IpNet),
    /// A neighbour's link address as the kernel knows it; `None`: not known (punt).
    Neighbour {
        /// The vport's index.
        vport: u16,
        /// The neighbour's address.
        address: IpAddr,
        /// Its link address.
        mac: Option<[u8; 6]>,
    },
    /// Whether the kernel forwards, by family (net.ipv4.ip_forward and its IPv6 counterpart).
    Forwarding {
        /// IPv4.
        v4: bool,
        /// IPv6.
        v6: bool,
    },
    /// Whether guests choose among several next hops, by family; else the kernel does: punt as hook.
    Choosing {
        /// IPv4.
        v4: bool,
        /// IPv6.
        v6: bool,
    },
    /// Answer [`FromGuest::Applied`] with this number once all before it is in force.
    Barrier(u64),
    /// Answer with the whole route table: [`FromGuest::Table`] frames, then `TableEnd`.
    Dump(u64),
}

/// From a forwarding guest to the mirror.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGuest {
    /// First message of a connection.
    Hello {
        /// [`VERSION`].
        version: u16,
        /// The guest's number in its vrouter.
        guest: u32,
    },
    /// Everything before the barrier of this number is in force.
    Applied(u64),
    /// Neighbours that frames were sent to since the last such message.
    Used(Vec<(u16, IpAddr)>),
    /// Gateways that frames were to be sent to and whose link address is not known: the kernel, which
    /// gets these frames, may send them to another and so never ask for it.
    Wanted(Vec<(u16, IpAddr)>),
    /// Part of the table that dump number `dump` asked for.
    Table {
        /// Number of the dump.
        dump: u64,
        /// Routes with their hops written out, any order.
        routes: Vec<(IpNet, Resolved)>,
    },
    /// The table of this dump is whole.
    TableEnd(u64),
}

/// What the guest needs to know of a vport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vport {
    /// Index of the vport in its vrouter.
    pub index: u16,
    /// Link address of the control guest's interface.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Administratively up and with carrier.
    pub up: bool,
    /// Frames that the kernel may treat otherwise than guests do: punt as hook.
    pub hooked: Hooked,
    /// More link addresses that frames are taken for, at most [`MACS_MAX`]: those of macvlans over the
    /// interface, such as VRRP's.
    pub macs: Vec<[u8; 6]>,
    /// Whether the kernel forwards packets of IPv4 that come by it (net.ipv4.conf.NAME.forwarding).
    pub forwards_v4: bool,
}

/// What of a vport's frames goes to the control guest because of its kernel's hooks into forwarding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hooked {
    /// Every frame that comes in by it, whoever it is addressed to.
    pub all: bool,
    /// IPv4 packets that come in by it.
    pub v4: bool,
    /// IPv6 packets that come in by it.
    pub v6: bool,
    /// Packets that would go out by it.
    pub out: bool,
    /// IPv4 packets that would go out by it and came in by it.
    pub back_v4: bool,
    /// IPv6 packets that would go out by it and came in by it.
    pub back_v6: bool,
}

/// Where a route leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Target {
    /// One of the hops of a group, by flow and weight.
    Group(GroupId),
    /// To the control guest's kernel, which answers (unreachable, prohibit) or forwards by an
    /// interface that is no vport.
    Punt,
    /// Dropped silently (blackhole).
    Drop,
}

/// One next hop.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Hop {
    /// Index of the vport by which it is reached.
    pub vport: u16,
    /// The gateway; `None` where the destination is on the link itself. May be IPv6 for an IPv4
    /// route (RFC 8950).
    pub gateway: Option<IpAddr>,
    /// Share of the flows, 1..=65535.
    pub weight: u16,
}

/// A route's target with its hops written out: what two tables are compared by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Resolved {
    /// Hops in ascending order.
    Hops(Vec<Hop>),
    /// See [`Target::Punt`].
    Punt,
    /// See [`Target::Drop`].
    Drop,
}

/// A batch as one frame, prefix included.
pub fn encode<M: Serialize>(batch: &[M]) -> io::Result<Vec<u8>> {
    debug_assert!(batch.len() <= BATCH_MAX);
    frame(&postcard::to_stdvec(batch).map_err(io::Error::other)?)
}

/// The batch in one frame (without prefix); an error if it is none or has too many messages, of
/// which none is read then: as values they take many times the bytes.
pub fn decode<M: DeserializeOwned>(payload: &[u8]) -> io::Result<Vec<M>> {
    take_count(payload)?;
    postcard::from_bytes(payload).map_err(invalid)
}

/// How many messages a frame says that it has, and what follows.
fn take_count(payload: &[u8]) -> io::Result<(usize, &[u8])> {
    let (count, rest) = postcard::take_from_bytes(payload).map_err(invalid)?;
    if count > BATCH_MAX {
        return Err(invalid(format!("{count} messages in a frame, {BATCH_MAX} at most")));
    }
    Ok((count, rest))
}

/// Messages of one frame, read one at a time: thousands at once take longer than a guest may keep
/// its frames waiting.
#[derive(Debug, Default)]
pub struct Messages {
    bytes: Vec<u8>,
    taken: usize,
    left: usize,
}

impl Messages {
    /// Goes on with the frame of this payload, whatever was left of the one before.
    pub fn start(&mut self, payload: &[u8]) -> io::Result<()> {
        let (left, rest) = take_count(payload)?;
        self.bytes.clear();
        self.bytes.extend_from_slice(rest);
        (self.taken, self.left) = (0, left);
        Ok(())
    }

    /// The next message; `None` at the end of the frame.
    pub fn take<M: DeserializeOwned>(&mut self) -> io::Result<Option<M>> {
        if self.left == 0 {
            return Ok(None);
        }
        let rest = &self.bytes[self.taken..];
        let (message, after) = postcard::take_from_bytes(rest).map_err(invalid)?;
        self.taken += rest.len() - after.len();
        self.left -= 1;
        Ok(Some(message))
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_read_one_message_at_a_time() {
        let group = ToGuest::Group { id: 7, hops: vec![], mtu: 0 };
        let batch = [ToGuest::Begin, group, ToGuest::Barrier(1 << 40), ToGuest::End];
        let frame = encode(&batch).unwrap();
        let payload = &frame[4..];
        let mut messages = Messages::default();
        messages.start(payload).unwrap();
        for message in &batch {
            assert_eq!(messages.take::<ToGuest>().unwrap().as_ref(), Some(message));
        }
        assert_eq!(messages.take::<ToGuest>().unwrap(), None);
        // Every cut shows, at the latest where it is.
        for length in 0..payload.len() {
            let read = messages.start(&payload[..length]).and_then(|()| {
                while messages.take::<ToGuest>()?.is_some() {}
                Ok(())
            });
            assert!(read.is_err(), "{length}");
        }
        let many = postcard::to_stdvec(&vec![ToGuest::End; BATCH_MAX + 1]).unwrap();
        assert!(messages.start(&many).is_err());
    }
    #[test]
    fn too_many_messages_are_refused_before_one_is_read() {
        let mut payload = postcard::to_stdvec(&(BATCH_MAX + 1)).unwrap();
        payload.resize(1000, 0xff); // no message
        let refused = decode::<FromGuest>(&payload).unwrap_err().to_string();
        assert!(refused.contains("messages in a frame"), "{refused}");
    }
}
