//! Routes channel: a route mirror sends forwarding guests the forwarding state of the control
//! guest's kernel, as one snapshot and then ordered changes.
//!
//! The mirror listens. Every forwarding guest connects, sends [`FromGuest::Hello`], and gets a
//! snapshot between [`ToGuest::Begin`] and [`ToGuest::End`]. A guest that already has a table keeps
//! forwarding with it while a snapshot arrives. At `End` it removes what the snapshot did not name
//! (mark and sweep). Changes follow in the kernel's order. A guest that reads too slowly is
//! disconnected, connects again, and gets a snapshot.
//!
//! Each frame of [`crate::channel`] holds a postcard `Vec<ToGuest>` or `Vec<FromGuest>`.
//!
//! The mirror never sends prefixes inside 127.0.0.0/8, ::1, fe80::/10 and
//! ff00::/8: guests punt packets to these anyway.
//!
//! Limits: [`BATCH_MAX`] messages per frame, [`HOPS_MAX`] hops per group, [`FROM_GUEST_BYTES_MAX`]
//! bytes per frame from a guest. A peer that exceeds them is disconnected.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::channel::frame;

/// Version of this protocol, in [`FromGuest::Hello`].
pub const VERSION: u16 = 2;

/// Most messages in one frame.
pub const BATCH_MAX: usize = 4096;

/// Most hops in one group.
pub const HOPS_MAX: usize = 128;

/// Most additional MAC addresses of a vport. Guests do not accept frames to further ones.
pub const MACS_MAX: usize = 16;

/// Most bytes of a frame from a guest, without its prefix.
pub const FROM_GUEST_BYTES_MAX: usize = 8 << 20;

/// Identifier of a group of next hops, chosen by the mirror and unique while the group exists. A
/// mirror reuses no number before all have been used, and a new mirror starts at another number. So
/// guests do not confuse a group of a replaced table with a new one.
pub type GroupId = u32;

/// Message from the mirror to a forwarding guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// A snapshot begins.
    Begin,
    /// The snapshot is complete: remove everything that it did not name.
    End,
    /// Current state of a vport in the kernel; replaces the earlier state.
    Vport(Vport),
    /// Address of the router itself, or a subnet's broadcast address: punt as local.
    Local {
        /// The address.
        address: IpAddr,
        /// True if it is the router's own address: no IPv4 packet has it as its source.
        own: bool,
    },
    /// The address is no longer local.
    LocalGone(IpAddr),
    /// A group of next hops, new or replaced. Routes that name it follow the replacement at once.
    Group {
        /// The group.
        id: GroupId,
        /// Hops, at least one and at most [`HOPS_MAX`].
        hops: Vec<GroupHop>,
        /// Largest packet of its routes, bytes; 0: only the vport's MTU applies.
        mtu: u32,
    },
    /// A group that no route names any longer.
    GroupGone(GroupId),
    /// A route, new or replaced.
    Route {
        /// Destination; host bits are zero.
        prefix: IpNet,
        /// Verdict for its packets.
        target: RouteDecision,
    },
    /// The route for exactly this prefix is gone.
    RouteGone(IpNet),
    /// MAC address of a neighbour as the kernel knows it; `None`: unknown (punt).
    Neighbour {
        /// The vport's index.
        vport: u16,
        /// The neighbour's address.
        address: IpAddr,
        /// MAC address of the neighbour.
        mac: Option<[u8; 6]>,
    },
    /// Forwarding setting of the kernel, by family (net.ipv4.ip_forward and its IPv6 counterpart).
    Forwarding {
        /// IPv4.
        v4: bool,
        /// IPv6.
        v6: bool,
    },
    /// True for the families in which guests choose among several next hops.
    /// Otherwise the kernel chooses: punt as hook.
    Choosing {
        /// IPv4.
        v4: bool,
        /// IPv6.
        v6: bool,
    },
    /// Answer [`FromGuest::Applied`] with this number once everything before it is in force.
    Barrier(u64),
    /// Answer with the whole route table: [`FromGuest::Table`] frames, then `TableEnd`.
    Dump(u64),
}

/// Message from a forwarding guest to the mirror.
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
    /// Neighbours that received frames since the last such message.
    Used(Vec<(u16, IpAddr)>),
    /// Gateways that the guest has frames for, but no MAC address. The kernel gets these frames. It
    /// may send them to another gateway and so never resolve this one.
    Wanted(Vec<(u16, IpAddr)>),
    /// Part of the table that dump number `dump` requested.
    Table {
        /// Number of the dump.
        dump: u64,
        /// Routes with their hops written out, any order.
        routes: Vec<(IpNet, ResolvedRoute)>,
    },
    /// The table of this dump is complete.
    TableEnd(u64),
}

/// State of a vport that a guest needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vport {
    /// Index of the vport in its vrouter.
    pub index: u16,
    /// MAC address of the control guest's interface.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// True if administratively up and with carrier.
    pub up: bool,
    /// Frames that the kernel may handle differently than guests do: punt as hook.
    pub hooked: VportHooks,
    /// More MAC addresses whose frames the vport accepts, at most [`MACS_MAX`]: those of macvlans
    /// over the interface, such as VRRP's.
    pub macs: Vec<[u8; 6]>,
    /// True if the kernel forwards IPv4 packets that arrive on the vport
    /// (net.ipv4.conf.NAME.forwarding).
    pub forwards_v4: bool,
}

/// Frames of a vport that guests punt because the control guest's kernel hooks into forwarding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VportHooks {
    /// Every frame that arrives on the vport, whatever its destination address.
    pub all: bool,
    /// IPv4 packets that arrive on the vport.
    pub v4: bool,
    /// IPv6 packets that arrive on the vport.
    pub v6: bool,
    /// Packets that would leave on the vport.
    pub out: bool,
    /// IPv4 packets that arrived on the vport and would leave on it.
    pub back_v4: bool,
    /// IPv6 packets that arrived on the vport and would leave on it.
    pub back_v6: bool,
}

/// Verdict of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RouteDecision {
    /// Forward to one of the hops of a group, by flow and weight.
    Group(GroupId),
    /// Punt to the control guest's kernel, which answers (unreachable, prohibit) or forwards on an
    /// interface that is not a vport.
    Punt,
    /// Drop silently (blackhole).
    Drop,
}

/// One next hop.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupHop {
    /// Index of the vport that reaches it.
    pub vport: u16,
    /// Gateway; `None` if the destination is on the link
    /// itself. May be IPv6 for an IPv4 route (RFC 8950).
    pub gateway: Option<IpAddr>,
    /// Weight among the hops, by which flows are distributed, 1..=65535.
    pub weight: u16,
}

/// A route's verdict with its hops written out, for comparing two tables.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ResolvedRoute {
    /// Hops in ascending order.
    Hops(Vec<GroupHop>),
    /// See [`RouteDecision::Punt`].
    Punt,
    /// See [`RouteDecision::Drop`].
    Drop,
}

/// Encodes a batch as one frame, prefix included.
pub fn encode<M: Serialize>(batch: &[M]) -> io::Result<Vec<u8>> {
    debug_assert!(batch.len() <= BATCH_MAX);
    frame(&postcard::to_stdvec(batch).map_err(io::Error::other)?)
}

/// Decodes the batch in one frame (without prefix).
///
/// Returns an error if the payload is no batch or has too many messages. It reads no message then:
/// decoded, messages take many times their bytes.
pub fn decode<M: DeserializeOwned>(payload: &[u8]) -> io::Result<Vec<M>> {
    take_count(payload)?;
    postcard::from_bytes(payload).map_err(invalid)
}

/// Returns a frame's count of messages, and the bytes that follow it.
fn take_count(payload: &[u8]) -> io::Result<(usize, &[u8])> {
    let (count, rest) = postcard::take_from_bytes(payload).map_err(invalid)?;
    if count > BATCH_MAX {
        return Err(invalid(format!("{count} messages in a frame, {BATCH_MAX} at most")));
    }
    Ok((count, rest))
}

/// Reads the messages of one frame one at a time. Reading thousands at once takes longer than a
/// guest may keep its frames waiting.
#[derive(Debug, Default)]
pub struct Messages {
    bytes: Vec<u8>,
    taken: usize,
    left: usize,
}

impl Messages {
    /// Continues with the frame of this payload, and discards the rest of the previous one.
    pub fn start(&mut self, payload: &[u8]) -> io::Result<()> {
        let (left, rest) = take_count(payload)?;
        self.bytes.clear();
        self.bytes.extend_from_slice(rest);
        (self.taken, self.left) = (0, left);
        Ok(())
    }

    /// Returns the next message; `None` at the end of the frame.
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
