//! Tunnels in specs: a type for each kind. [`pdp_wire::tunnel`] defines everything else.

use std::net::IpAddr;

use pdp_wire::tunnel::{Encapsulation, KINDS, TunnelKind};
use pdp_wire::{geneve, gre, udp, vlan, vxlan};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::KeySet;

/// A connection to the outside.
///
/// Set at most one tunnel. Without a tunnel, the external gets all frames that no tunnel takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct External {
    /// Name of the external interface (docs/outside.md).
    pub interface: String,
    /// VXLAN (RFC 7348).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vxlan: Option<Vxlan>,
    /// Ethernet frames in UDP datagrams.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<Udp>,
    /// Ethernet over GRE (RFC 2784, RFC 2890).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gre: Option<Gre>,
    /// Geneve (RFC 8926). PdP drops frames with critical options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geneve: Option<Geneve>,
    /// VLAN (802.1Q).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<Vlan>,
}

/// A VXLAN tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Vxlan {
    /// Virtual network identifier.
    #[schemars(range(max = vxlan::VNI_END - 1))]
    pub vni: u32,
    /// Local address of the tunnel.
    pub local: IpAddr,
    /// Remote address of the tunnel.
    pub remote: IpAddr,
    /// UDP destination port.
    #[serde(default = "vxlan_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
}

fn vxlan_port() -> u16 {
    vxlan::PORT
}

/// A tunnel of Ethernet frames in UDP datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Udp {
    /// Local address of the tunnel.
    pub local: IpAddr,
    /// Remote address of the tunnel.
    pub remote: IpAddr,
    /// Local UDP port.
    #[schemars(range(min = 1))]
    pub local_port: u16,
    /// Remote UDP port.
    #[schemars(range(min = 1))]
    pub remote_port: u16,
}

/// A tunnel of Ethernet frames over GRE.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gre {
    /// Local address of the tunnel.
    pub local: IpAddr,
    /// Remote address of the tunnel.
    pub remote: IpAddr,
    /// GRE key, for several tunnels between the same addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<u32>,
    /// Send and require checksums.
    #[serde(default)]
    pub checksum: bool,
    /// Send sequence numbers; drop late frames.
    #[serde(default)]
    pub sequence: bool,
}

/// A Geneve tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Geneve {
    /// Virtual network identifier.
    #[schemars(range(max = vxlan::VNI_END - 1))]
    pub vni: u32,
    /// Local address of the tunnel.
    pub local: IpAddr,
    /// Remote address of the tunnel.
    pub remote: IpAddr,
    /// UDP destination port.
    #[serde(default = "geneve_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
}

fn geneve_port() -> u16 {
    geneve::PORT
}

/// A VLAN of an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Vlan {
    /// VLAN identifier.
    #[schemars(range(min = 1, max = 4094))]
    pub id: u16,
}

impl External {
    /// Returns the tunnels that are set; valid specs have one at most.
    pub fn tunnels(&self) -> Vec<Encapsulation> {
        let vxlan = self.vxlan.as_ref().map(|it| {
            let Vxlan { vni, local, remote, port } = *it;
            Encapsulation::Vxlan(vxlan::VxlanTunnel { local, remote, port, vni })
        });
        let udp = self.udp.as_ref().map(|it| {
            let Udp { local, remote, local_port, remote_port } = *it;
            Encapsulation::Udp(udp::UdpTunnel { local, remote, local_port, remote_port })
        });
        let gre = self.gre.as_ref().map(|it| {
            let Gre { local, remote, key, checksum, sequence } = *it;
            Encapsulation::Gre(gre::GreTunnel { local, remote, key, checksum, sequence })
        });
        let geneve = self.geneve.as_ref().map(|it| {
            let Geneve { vni, local, remote, port } = *it;
            Encapsulation::Geneve(geneve::GeneveTunnel { local, remote, port, vni })
        });
        let vlan = self.vlan.as_ref().map(|it| Encapsulation::Vlan(vlan::VlanTunnel { id: it.id }));
        [vxlan, udp, gre, geneve, vlan].into_iter().flatten().collect()
    }

    /// Identifies its frames on its interface.
    pub fn encapsulation(&self) -> Encapsulation {
        self.tunnels().into_iter().next().unwrap_or(Encapsulation::Interface)
    }
}

/// Rights of a tenant on an external interface.
///
/// No other tenant and no operators' network may use these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Grant {
    /// Network identifiers, on UDP port 4789.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vxlan: Option<KeySet>,
    /// Local UDP ports, except 4789 and 6081.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp: Option<KeySet>,
    /// GRE keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gre: Option<KeySet>,
    /// Network identifiers, on UDP port 6081.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub geneve: Option<KeySet>,
    /// VLAN identifiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<KeySet>,
    /// All frames that no tunnel takes.
    pub whole: bool,
    /// Local addresses of its tunnels. Default: any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub locals: Vec<IpAddr>,
}

impl Grant {
    /// Returns each kind with its granted keys.
    pub fn keys(&self) -> [(&'static TunnelKind, Option<&KeySet>); KINDS.len()] {
        [
            (&vxlan::KIND, self.vxlan.as_ref()),
            (&udp::KIND, self.udp.as_ref()),
            (&gre::KIND, self.gre.as_ref()),
            (&geneve::KIND, self.geneve.as_ref()),
            (&vlan::KIND, self.vlan.as_ref()),
        ]
    }

    /// True if a key of a kind is granted.
    pub fn has(&self, kind: &TunnelKind, key: u32) -> bool {
        self.keys().iter().any(|(of, keys)| *of == kind && keys.is_some_and(|keys| keys.has(key)))
    }
}
