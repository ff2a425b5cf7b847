//! What a vlink's frames look like outside, and where they go.
//!
//! The outer header is written here, from what was configured and from the host's neighbours, so
//! that no tenant can forge it.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pdp_afxdp::{HEADROOM_BYTES, Packet};
use pdp_proto::mux::Encapsulation;
use pdp_underlay::{Hop, NextHop};
use pdp_wire::{ether, outer};

use crate::class::Class;
use crate::counters::Reason;

/// The far side of a port's vlink.
#[derive(Debug)]
pub enum Way {
    /// Another port of the vnet, counted over all its nodes.
    Port(u16),
    /// Out of an external interface.
    Outside(Outside),
    /// Into this one of the vnet's segments, by this end of it.
    Segment(u16, u8),
}

impl Way {
    /// As [`Outside::find`].
    pub fn find(&self) -> Option<Hop> {
        match self {
            Self::Port(_) | Self::Segment(..) => None,
            Self::Outside(outside) => outside.find(),
        }
    }

    /// What its frames have of the capacity of an interface, if it has one.
    pub fn class(&self) -> Option<&Class> {
        match self {
            Self::Port(_) | Self::Segment(..) => None,
            Self::Outside(outside) => outside.class.as_deref(),
        }
    }
}

/// The number of a tunnel's first frame, where frames have one. Who counts on takes none that is lower than the last
/// that it saw, so one that begins anew goes on where a thousand frames a second since 1970 would have come to.
fn first_number() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as u32
}

// Packets have room for the headers of any kind.
const _: () = assert!(outer::TEMPLATE_BYTES_MAX <= HEADROOM_BYTES);

/// The outside end of a vlink.
#[derive(Debug)]
pub struct Outside {
    /// Slot of the external interface.
    pub external: usize,
    /// Spreads vlinks over the interface's queues; frames of one vlink keep their order.
    pub spread: usize,
    /// Where the interface has a capacity: what its frames have of that.
    pub class: Option<Arc<Class>>,
    tunnel: Option<Tunnel>,
}

#[derive(Debug)]
struct Tunnel {
    template: outer::Template,
    /// `None`: frames go to whom they say, without IP around them.
    next_hop: Option<Arc<NextHop>>,
}

impl Outside {
    /// By `by` on the interface in slot `external`. `next_hop` is asked for tunnels only. `None`
    /// if the tunnel's addresses are of different families.
    pub fn new(
        external: usize,
        spread: usize,
        by: &Encapsulation,
        next_hop: impl FnOnce() -> Arc<NextHop>,
    ) -> Option<Self> {
        let tunnel = match by {
            Encapsulation::Interface => None,
            by => {
                let template = outer::Template::new(by)?.from_number(first_number());
                Some(Tunnel { template, next_hop: by.ends().map(|_| next_hop()) })
            }
        };
        Some(Self { external, spread, class: None, tunnel })
    }

    /// Whether frames go out as they are.
    pub fn is_plain(&self) -> bool {
        self.tunnel.is_none()
    }

    /// Bytes that are put before a frame.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        self.tunnel.as_ref().map_or(0, |tunnel| tunnel.template.len())
    }

    /// The tunnel's next hop, for [`Outside::wrap`]; `None` while it is not known. Where there is no
    /// tunnel, anything.
    pub fn find(&self) -> Option<Hop> {
        match self.tunnel.as_ref().and_then(|tunnel| tunnel.next_hop.as_ref()) {
            None => Some(Hop { mac: [0; 6], mtu: u16::MAX }),
            Some(next_hop) => next_hop.find(),
        }
    }

    /// Whether frames of up to `bytes` surely can be wrapped.
    #[inline]
    pub fn fits(&self, bytes: usize, mtu: u32, hop: Hop) -> bool {
        match self.tunnel.as_ref().and_then(|tunnel| tunnel.template.packet_bytes(bytes)) {
            None => bytes <= ether::HEADER_BYTES + mtu as usize,
            Some(bytes) => bytes <= usize::from(hop.mtu).min(mtu as usize),
        }
    }

    /// Puts the outer headers before the frame in `packet`, on its way by `hop`; `mac` and `mtu` are
    /// the interface's. On an error the packet is as it was.
    #[inline]
    pub fn wrap(
        &self,
        packet: &mut Packet,
        mac: [u8; 6],
        mtu: u32,
        hop: Hop,
    ) -> Result<(), Reason> {
        let template = self.tunnel.as_ref().map(|tunnel| &tunnel.template);
        match template.and_then(|template| template.packet_bytes(packet.len())) {
            Some(bytes) if bytes > mtu as usize => return Err(Reason::UnderlayTooBig),
            Some(bytes) if bytes > usize::from(hop.mtu) => return Err(Reason::PathTooBig),
            None if packet.len() > ether::HEADER_BYTES + mtu as usize
                && ether::payload_len(packet.bytes()) > mtu as usize =>
            {
                return Err(Reason::UnderlayTooBig);
            }
            _ => {}
        }
        let Some(template) = template else { return Ok(()) };
        packet.prepend(template.len()).ok_or(Reason::UnderlayTooBig)?;
        let written = template.write(packet.bytes_mut(), hop.mac, mac);
        if written.is_none() {
            let _ = packet.advance(template.len());
        }
        written.ok_or(Reason::UnderlayTooBig)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pdp_afxdp::Pool;
    use pdp_wire::{udp, vxlan};

    fn source_port(outer: &outer::Outer) -> u16 {
        let outer::Carried::Udp { remote_port, .. } = outer.carried else { panic!("no UDP") };
        remote_port
    }

    #[test]
    fn what_is_too_big_for_the_wire_or_the_way_stays_whole() {
        let (_pool, mut packets) = Pool::new(1).unwrap();
        let packet = &mut packets[0];
        packet.set_len(1000).unwrap();
        packet.bytes_mut().fill(7);
        let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let by = Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port: 4789, vni: 5 });
        let next_hop = Arc::new(NextHop::default());
        let outside = Outside::new(0, 0, &by, || next_hop.clone()).unwrap();
        assert_eq!(outside.find(), None);
        next_hop.resolve(Some(Hop { mac: [6; 6], mtu: 1035 }));
        let hop = outside.find().unwrap();
        assert_eq!(outside.wrap(packet, [1; 6], 1035, hop), Err(Reason::UnderlayTooBig));
        assert_eq!(outside.wrap(packet, [1; 6], 1036, hop), Err(Reason::PathTooBig));
        let hop = Hop { mtu: 1036, ..hop };
        assert_eq!(packet.bytes(), [7; 1000]);
        assert_eq!(outside.wrap(packet, [1; 6], 1036, hop), Ok(()));
        assert_eq!(by.overhead(), 1036 - (1000 - 14));
        assert_eq!(packet.len(), 1050);
        assert_eq!(packet.bytes()[..12], [6, 6, 6, 6, 6, 6, 1, 1, 1, 1, 1, 1]);
        let outer = outer::parse(packet.bytes()).unwrap();
        assert!(source_port(&outer) >= udp::SPREAD_FIRST);
        assert_eq!(packet.bytes()[outer.payload()][8..], [7; 1000]);
    }

    #[test]
    fn flows_have_source_ports_of_their_own() {
        let (_pool, mut packets) = Pool::new(64).unwrap();
        let (local, remote) = ("::1".parse().unwrap(), "::2".parse().unwrap());
        let by = Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port: 4789, vni: 5 });
        let outside = Outside::new(0, 0, &by, || Arc::new(NextHop::known([6; 6]))).unwrap();
        let hop = outside.find().unwrap();
        let ports: std::collections::HashSet<u16> = packets
            .iter_mut()
            .map(|packet| {
                packet.set_len(60).unwrap();
                let number = packet.number() as u64;
                packet.bytes_mut()[..8].copy_from_slice(&number.to_be_bytes());
                outside.wrap(packet, [1; 6], 1500, hop).unwrap();
                source_port(&outer::parse(packet.bytes()).unwrap())
            })
            .collect();
        assert!(ports.len() > 55);
    }
}
