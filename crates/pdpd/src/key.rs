//! Names of the objects that pdpd creates, as in the journal.

use std::fmt;
use std::str::FromStr;

use crate::queue::Item;

/// An object. The order is that of creation: later objects need earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKey {
    /// The mux.
    Mux,
    /// An external interface, by its name in the substrate.
    External(String),
    /// A vnet as a whole.
    Vnet(String),
    /// The control guest of a node, with its helpers.
    Node {
        /// Vnet of the node.
        vnet: String,
        /// Name of the node.
        node: String,
    },
    /// A forwarding guest.
    Guest {
        /// Vnet of the vrouter.
        vnet: String,
        /// Vrouter of the guest.
        node: String,
        /// Number of the guest.
        number: u32,
    },
    /// Remains that belong to no object. Not in the journal.
    Leftovers,
}

impl ObjectKey {
    /// Returns the key of an external interface.
    pub fn external(name: &str) -> Self {
        Self::External(name.into())
    }

    /// Returns the key of a vnet.
    pub fn vnet(name: &str) -> Self {
        Self::Vnet(name.into())
    }

    /// Returns the key of a node.
    pub fn node(vnet: &str, node: &str) -> Self {
        Self::Node { vnet: vnet.into(), node: node.into() }
    }

    /// Returns the key of a forwarding guest.
    pub fn guest(vnet: &str, node: &str, number: u32) -> Self {
        Self::Guest { vnet: vnet.into(), node: node.into(), number }
    }

    /// Returns the object's name in the API: `vnet/red/node/r1`.
    pub fn object(&self) -> String {
        match self {
            Self::Mux => "mux".into(),
            Self::External(name) => format!("external/{name}"),
            Self::Vnet(vnet) => format!("vnet/{vnet}"),
            Self::Node { vnet, node } => format!("vnet/{vnet}/node/{node}"),
            Self::Guest { vnet, node, number } => format!("vnet/{vnet}/node/{node}/g{number}"),
            Self::Leftovers => "node".into(),
        }
    }

    /// Returns the name in the API of one of the object's processes,
    /// given by its id ([`crate::plan::ProcessRole::id`]).
    pub fn process_object(&self, id: &str) -> String {
        match self {
            Self::Node { vnet, node } | Self::Guest { vnet, node, .. } => {
                let part = id.splitn(3, '.').nth(2).unwrap_or("control");
                format!("vnet/{vnet}/node/{node}/{part}")
            }
            Self::Mux | Self::External(_) | Self::Vnet(_) | Self::Leftovers => self.object(),
        }
    }

    /// Returns the node that the key is or belongs to; empty if there is none.
    pub fn node_name(&self) -> &str {
        match self {
            Self::Node { node, .. } | Self::Guest { node, .. } => node,
            Self::Mux | Self::External(_) | Self::Vnet(_) | Self::Leftovers => "",
        }
    }

    /// Returns the vnet that the key is or belongs to.
    pub fn vnet_name(&self) -> Option<&str> {
        match self {
            Self::Vnet(vnet) | Self::Node { vnet, .. } | Self::Guest { vnet, .. } => Some(vnet),
            Self::Mux | Self::External(_) | Self::Leftovers => None,
        }
    }
}

impl Item for ObjectKey {
    /// Returns the tenant, or the vnet if it has no tenant; empty for the node's own objects.
    fn owner(&self) -> &str {
        let vnet = self.vnet_name().unwrap_or_default();
        vnet.split_once('.').map_or(vnet, |(tenant, _)| tenant)
    }

    fn is_tenants(&self) -> bool {
        self.vnet_name().is_some_and(|vnet| vnet.contains('.'))
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mux => f.write_str("mux"),
            Self::External(name) => write!(f, "external {name}"),
            Self::Vnet(vnet) => write!(f, "vnet {vnet}"),
            Self::Node { vnet, node } => write!(f, "node {vnet}/{node}"),
            Self::Guest { vnet, node, number } => write!(f, "guest {vnet}/{node}/{number}"),
            Self::Leftovers => f.write_str("leftovers"),
        }
    }
}

/// The text is not the name of a [`ObjectKey`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} names no object")]
pub struct InvalidObjectKey(String);

impl FromStr for ObjectKey {
    type Err = InvalidObjectKey;

    fn from_str(text: &str) -> Result<Self, InvalidObjectKey> {
        let bad = || InvalidObjectKey(text.into());
        let (kind, rest) = text.split_once(' ').unwrap_or((text, ""));
        let parts: Vec<&str> = rest.split('/').collect();
        match (kind, parts.as_slice()) {
            ("mux", [""]) => Ok(Self::Mux),
            ("external", [name]) => Ok(Self::external(name)),
            ("vnet", [vnet]) => Ok(Self::vnet(vnet)),
            ("node", [vnet, node]) => Ok(Self::node(vnet, node)),
            ("guest", [vnet, node, number]) => {
                Ok(Self::guest(vnet, node, number.parse().map_err(|_| bad())?))
            }
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_objects_use_their_public_names() {
        use crate::plan::ProcessRole;
        let (node, guest) =
            (ObjectKey::node("acme.red", "r1"), ObjectKey::guest("acme.red", "r1", 3));
        for (key, part, name) in [
            (&node, ProcessRole::Control, "control"),
            (&node, ProcessRole::Tap, "tap"),
            (&node, ProcessRole::Mirror, "mirror"),
            (&guest, ProcessRole::Guest(3), "g3"),
            (&guest, ProcessRole::GuestTap(3), "tap-g3"),
        ] {
            let object = key.process_object(&part.id("acme.red", "r1"));
            assert_eq!(object, format!("vnet/acme.red/node/r1/{name}"));
        }
        assert_eq!(guest.object(), "vnet/acme.red/node/r1/g3");
    }

    #[test]
    fn object_keys_round_trip_as_text() {
        let keys = [
            ObjectKey::Mux,
            ObjectKey::external("A"),
            ObjectKey::vnet("red"),
            ObjectKey::node("red", "r1"),
            ObjectKey::guest("red", "r1", 3),
        ];
        for key in &keys {
            assert_eq!(&key.to_string().parse::<ObjectKey>().unwrap(), key);
        }
        assert!(keys.is_sorted());
        for bad in ["", "muxx", "node red", "guest red/r1/x", "node red/r1/0"] {
            assert!(bad.parse::<ObjectKey>().is_err(), "{bad}");
        }
    }
}
