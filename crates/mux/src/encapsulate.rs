//! Encapsulation of a vlink's frames, and their next hop.
//!
//! The mux writes the outer header from the configuration and from
//! the host's neighbour table, so that no tenant can forge it.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pdp_afxdp::{HEADROOM_BYTES, PacketBuffer};
use pdp_proto::mux::Encapsulation;
use pdp_underlay::{NextHopInfo, TunnelNextHop};
use pdp_wire::{ether, outer};

use crate::counters::Reason;
use crate::traffic_class::TrafficClass;

/// Path to the other end of a port's vlink.
#[derive(Debug)]
pub enum VlinkPath {
    /// To another port of the vnet, counted over all its nodes.
    Port(u16),
    /// Out of an external interface.
    Outside(ExternalPath),
    /// Into the vnet's segment with this number, by this end of it.
    Segment(u16, u8),
}

impl VlinkPath {
    /// Returns the next hop, as [`ExternalPath::find`].
    pub fn find(&self) -> Option<NextHopInfo> {
        match self {
            Self::Port(_) | Self::Segment(..) => None,
            Self::Outside(outside) => outside.find(),
        }
    }

    /// Returns the frames' traffic class, if they leave by an interface with a capacity.
    pub fn traffic_class(&self) -> Option<&TrafficClass> {
        match self {
            Self::Port(_) | Self::Segment(..) => None,
            Self::Outside(outside) => outside.class.as_deref(),
        }
    }
}

/// Returns the number of a tunnel's first frame, for kinds with sequence numbers.
/// A receiver drops frames with lower numbers than the last one. So a restarted
/// tunnel begins where a thousand frames a second since 1970 would have arrived.
fn first_number() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as u32
}

// Packets have headroom for the headers of every kind.
const _: () = assert!(outer::TEMPLATE_BYTES_MAX <= HEADROOM_BYTES);

/// An external end of a vlink.
#[derive(Debug)]
pub struct ExternalPath {
    /// Slot of the external interface.
    pub external: usize,
    /// Number that spreads vlinks over the interface's
    /// queues. Frames of one vlink keep their order.
    pub spread: usize,
    /// Traffic class of its frames, if the interface has a capacity.
    pub class: Option<Arc<TrafficClass>>,
    tunnel: Option<OutgoingTunnel>,
}

#[derive(Debug)]
struct OutgoingTunnel {
    template: outer::HeaderTemplate,
    /// `None`: frames are sent to their own destination, without IP around them.
    next_hop: Option<Arc<TunnelNextHop>>,
}

impl ExternalPath {
    /// Creates the end of the kind `by` on the interface in slot `external`. Calls `next_hop`
    /// for tunnels only. `None` if the tunnel's addresses are of different families.
    pub fn new(
        external: usize,
        spread: usize,
        by: &Encapsulation,
        next_hop: impl FnOnce() -> Arc<TunnelNextHop>,
    ) -> Option<Self> {
        let tunnel = match by {
            Encapsulation::Interface => None,
            by => {
                let template = outer::HeaderTemplate::new(by)?.from_number(first_number());
                Some(OutgoingTunnel { template, next_hop: by.ends().map(|_| next_hop()) })
            }
        };
        Some(Self { external, spread, class: None, tunnel })
    }

    /// True if frames are sent as they are.
    pub fn is_plain(&self) -> bool {
        self.tunnel.is_none()
    }

    /// Returns the bytes of the outer headers.
    #[inline]
    pub fn header_bytes(&self) -> usize {
        self.tunnel.as_ref().map_or(0, |tunnel| tunnel.template.len())
    }

    /// Returns the tunnel's next hop, for [`ExternalPath::wrap`]. `None`
    /// while it is unknown. Without a tunnel, returns a dummy.
    pub fn find(&self) -> Option<NextHopInfo> {
        match self.tunnel.as_ref().and_then(|tunnel| tunnel.next_hop.as_ref()) {
            None => Some(NextHopInfo { mac: [0; 6], mtu: u16::MAX }),
            Some(next_hop) => next_hop.find(),
        }
    }

    /// True if frames of up to `bytes` can surely be encapsulated.
    #[inline]
    pub fn fits(&self, bytes: usize, mtu: u32, hop: NextHopInfo) -> bool {
        match self.tunnel.as_ref().and_then(|tunnel| tunnel.template.packet_bytes(bytes)) {
            None => bytes <= ether::HEADER_BYTES + mtu as usize,
            Some(bytes) => bytes <= usize::from(hop.mtu).min(mtu as usize),
        }
    }

    /// Puts the outer headers before the frame in `packet`, for next hop `hop`.
    /// `mac` and `mtu` are the interface's. On an error the packet is unchanged.
    #[inline]
    pub fn wrap(
        &self,
        packet: &mut PacketBuffer,
        mac: [u8; 6],
        mtu: u32,
        hop: NextHopInfo,
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
        let outer::OuterPayload::Udp { remote_port, .. } = outer.carried else { panic!("no UDP") };
        remote_port
    }

    #[test]
    fn encapsulation_rejects_packets_above_link_or_path_mtu() {
        let (_pool, mut packets) = Pool::new(1).unwrap();
        let packet = &mut packets[0];
        packet.set_len(1000).unwrap();
        packet.bytes_mut().fill(7);
        let (local, remote) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let by = Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: 5 });
        let next_hop = Arc::new(TunnelNextHop::default());
        let outside = ExternalPath::new(0, 0, &by, || next_hop.clone()).unwrap();
        assert_eq!(outside.find(), None);
        next_hop.resolve(Some(NextHopInfo { mac: [6; 6], mtu: 1035 }));
        let hop = outside.find().unwrap();
        assert_eq!(outside.wrap(packet, [1; 6], 1035, hop), Err(Reason::UnderlayTooBig));
        assert_eq!(outside.wrap(packet, [1; 6], 1036, hop), Err(Reason::PathTooBig));
        let hop = NextHopInfo { mtu: 1036, ..hop };
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
    fn tunnel_source_port_varies_by_flow() {
        let (_pool, mut packets) = Pool::new(64).unwrap();
        let (local, remote) = ("::1".parse().unwrap(), "::2".parse().unwrap());
        let by = Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port: 4789, vni: 5 });
        let outside =
            ExternalPath::new(0, 0, &by, || Arc::new(TunnelNextHop::known([6; 6]))).unwrap();
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
