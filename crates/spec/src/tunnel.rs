//! Tunnels as they are written in specs: a type for each kind. All else of a kind is
//! [`pdp_wire::tunnel`]'s.

use std::net::IpAddr;

use pdp_wire::tunnel::{Encapsulation, KINDS, Kind};
use pdp_wire::{udp, vxlan};
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
        [vxlan, udp].into_iter().flatten().collect()
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
    /// The whole interface: all of its frames that no tunnel takes.
    pub whole: bool,
    /// Outer addresses that its tunnels may have on this side. Not given: any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub locals: Vec<IpAddr>,
}

impl Grant {
    /// Each kind with the keys of it that are given.
    pub fn keys(&self) -> [(&'static Kind, Option<&KeySet>); KINDS.len()] {
        [(&vxlan::KIND, self.vxlan.as_ref()), (&udp::KIND, self.udp.as_ref())]
    }

    /// Whether a key of a kind is given.
    pub fn has(&self, kind: &Kind, key: u32) -> bool {
        self.keys().iter().any(|(of, keys)| *of == kind && keys.is_some_and(|keys| keys.has(key)))
    }
}
