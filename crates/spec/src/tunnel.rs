//! Tunnels as they are written in specs: a type for each kind. All else of a kind is
//! [`pdp_wire::tunnel`]'s.

use std::net::IpAddr;

use pdp_wire::tunnel::{Encapsulation, KINDS, Kind};
use pdp_wire::{geneve, gre, udp, vlan, vxlan};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::KeySet;

/// An end outside: a tunnel of one kind, or without any the whole interface, all of its frames that no
/// tunnel takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct External {
    /// Name of the substrate's external interface.
    pub interface: String,
    /// A VXLAN tunnel (RFC 7348).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vxlan: Option<Vxlan>,
    /// A tunnel of Ethernet frames in UDP datagrams with no header between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<Udp>,
    /// A tunnel of Ethernet frames over GRE (RFC 2784, RFC 2890), as Linux's gretap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gre: Option<Gre>,
    /// A Geneve tunnel (RFC 8926).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geneve: Option<Geneve>,
    /// A VLAN (802.1Q) of the interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<Vlan>,
}

/// A VXLAN tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Vxlan {
    /// Network identifier.
    #[schemars(range(max = vxlan::VNI_END - 1))]
    pub vni: u32,
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
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
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
    pub remote: IpAddr,
    /// UDP port of this side.
    #[schemars(range(min = 1))]
    pub local_port: u16,
    /// UDP port of the other side.
    #[schemars(range(min = 1))]
    pub remote_port: u16,
}

/// A tunnel of Ethernet frames over GRE.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gre {
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
    pub remote: IpAddr,
    /// What tells it from others between the same addresses. Not given: frames have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<u32>,
    /// Whether frames have a checksum, in both directions.
    #[serde(default)]
    pub checksum: bool,
    /// Whether frames have numbers, in both directions; those that come late are dropped.
    #[serde(default)]
    pub sequence: bool,
}

/// A Geneve tunnel. Options are skipped; frames with options that must be understood are dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Geneve {
    /// Network identifier.
    #[schemars(range(max = vxlan::VNI_END - 1))]
    pub vni: u32,
    /// Outer address of this side.
    pub local: IpAddr,
    /// Outer address of the other side.
    pub remote: IpAddr,
    /// UDP destination port.
    #[serde(default = "geneve_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
}

fn geneve_port() -> u16 {
    geneve::PORT
}

/// A VLAN of an interface. A tag inside of it is the frame's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Vlan {
    /// Its identifier.
    #[schemars(range(min = 1, max = 4094))]
    pub id: u16,
}

impl External {
    /// The tunnels that are given, of which there may be one.
    pub fn tunnels(&self) -> Vec<Encapsulation> {
        let vxlan = self.vxlan.as_ref().map(|it| {
            let Vxlan { vni, local, remote, port } = *it;
            Encapsulation::Vxlan(vxlan::Tunnel { local, remote, port, vni })
        });
        let udp = self.udp.as_ref().map(|it| {
            let Udp { local, remote, local_port, remote_port } = *it;
            Encapsulation::Udp(udp::Tunnel { local, remote, local_port, remote_port })
        });
        let gre = self.gre.as_ref().map(|it| {
            let Gre { local, remote, key, checksum, sequence } = *it;
            Encapsulation::Gre(gre::Tunnel { local, remote, key, checksum, sequence })
        });
        let geneve = self.geneve.as_ref().map(|it| {
            let Geneve { vni, local, remote, port } = *it;
            Encapsulation::Geneve(geneve::Tunnel { local, remote, port, vni })
        });
        let vlan = self.vlan.as_ref().map(|it| Encapsulation::Vlan(vlan::Tunnel { id: it.id }));
        [vxlan, udp, gre, geneve, vlan].into_iter().flatten().collect()
    }

    /// How its frames are told apart on its interface.
    pub fn encapsulation(&self) -> Encapsulation {
        self.tunnels().into_iter().next().unwrap_or(Encapsulation::Interface)
    }
}

/// What a tenant may use of an external interface. What one tenant may use, no other and no
/// operator's virtual network can.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Grant {
    /// VXLAN network identifiers, on UDP port 4789. Not given: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vxlan: Option<KeySet>,
    /// UDP ports of this side for Ethernet in UDP, without those of other kinds. Not given: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp: Option<KeySet>,
    /// Keys of GRE. Not given: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gre: Option<KeySet>,
    /// Geneve network identifiers, on UDP port 6081. Not given: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub geneve: Option<KeySet>,
    /// VLANs. Not given: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<KeySet>,
    /// The whole interface: all of its frames that no tunnel takes.
    pub whole: bool,
    /// Outer addresses that its tunnels may have on this side. Not given: any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub locals: Vec<IpAddr>,
}

impl Grant {
    /// Each kind with the keys of it that are given.
    pub fn keys(&self) -> [(&'static Kind, Option<&KeySet>); KINDS.len()] {
        [
            (&vxlan::KIND, self.vxlan.as_ref()),
            (&udp::KIND, self.udp.as_ref()),
            (&gre::KIND, self.gre.as_ref()),
            (&geneve::KIND, self.geneve.as_ref()),
            (&vlan::KIND, self.vlan.as_ref()),
        ]
    }

    /// Whether a key of a kind is given.
    pub fn has(&self, kind: &Kind, key: u32) -> bool {
        self.keys().iter().any(|(of, keys)| *of == kind && keys.is_some_and(|keys| keys.has(key)))
    }
}
