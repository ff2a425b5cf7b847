//! Names of the objects that pdpd makes, as in the journal.

use std::fmt;
use std::str::FromStr;

use crate::queue::Item;

/// An object. The order is that of making: what comes later needs what comes before.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// The mux.
    Mux,
    /// An external interface, by its name in the substrate.
    External(String),
    /// A vnet as a whole.
    Vnet(String),
    /// The control side of a node.
    Node {
        /// Its vnet.
        vnet: String,
        /// Its name.
        node: String,
    },
    /// A forwarding guest.
    Guest {
        /// Its vnet.
        vnet: String,
        /// Its vrouter.
        node: String,
        /// Its number.
        number: u32,
    },
    /// What belongs to no object. Not in the journal.
    Leftovers,
}

impl Key {
    /// An external interface.
    pub fn external(name: &str) -> Self {
        Self::External(name.into())
    }

    /// A vnet.
    pub fn vnet(name: &str) -> Self {
        Self::Vnet(name.into())
    }

    /// A node.
    pub fn node(vnet: &str, node: &str) -> Self {
        Self::Node { vnet: vnet.into(), node: node.into() }
    }

    /// A forwarding guest.
    pub fn guest(vnet: &str, node: &str, number: u32) -> Self {
        Self::Guest { vnet: vnet.into(), node: node.into(), number }
    }

    /// What the API calls it: `vnet/red/node/r1`.
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

    /// What the API calls one of its processes, by the id that this has ([`crate::plan::Part::id`]).
    pub fn process_object(&self, id: &str) -> String {
        match self {
            Self::Node { vnet, node } | Self::Guest { vnet, node, .. } => {
                let part = id.splitn(3, '.').nth(2).unwrap_or("control");
                format!("vnet/{vnet}/node/{node}/{part}")
            }
            Self::Mux | Self::External(_) | Self::Vnet(_) | Self::Leftovers => self.object(),
        }
    }

    /// The node that it is or belongs to; empty where there is none.
    pub fn node_name(&self) -> &str {
        match self {
            Self::Node { node, .. } | Self::Guest { node, .. } => node,
            Self::Mux | Self::External(_) | Self::Vnet(_) | Self::Leftovers => "",
        }
    }

    /// The vnet that it is or belongs to.
    pub fn vnet_name(&self) -> Option<&str> {
        match self {
            Self::Vnet(vnet) | Self::Node { vnet, .. } | Self::Guest { vnet, .. } => Some(vnet),
            Self::Mux | Self::External(_) | Self::Leftovers => None,
        }
    }
}

impl Item for Key {
    /// The tenant of a vnet, or a vnet that is no tenant's; empty for what is the node's.
    fn owner(&self) -> &str {
        let vnet = self.vnet_name().unwrap_or_default();
        vnet.split_once('.').map_or(vnet, |(tenant, _)| tenant)
    }

    fn is_tenants(&self) -> bool {
        self.vnet_name().is_some_and(|vnet| vnet.contains('.'))
    }
}

impl fmt::Display for Key {
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

/// Not the name of a [`Key`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} names no object")]
pub struct BadKey(String);

impl FromStr for Key {
    type Err = BadKey;

    fn from_str(text: &str) -> Result<Self, BadKey> {
        let bad = || BadKey(text.into());
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
    fn processes_are_called_as_everywhere() {
        use crate::plan::Part;
        let (node, guest) = (Key::node("acme.red", "r1"), Key::guest("acme.red", "r1", 3));
        for (key, part, name) in [
            (&node, Part::Control, "control"),
            (&node, Part::Tap, "tap"),
            (&node, Part::Mirror, "mirror"),
            (&guest, Part::Guest(3), "g3"),
            (&guest, Part::GuestTap(3), "tap-g3"),
        ] {
            let object = key.process_object(&part.id("acme.red", "r1"));
            assert_eq!(object, format!("vnet/acme.red/node/r1/{name}"));
        }
        assert_eq!(guest.object(), "vnet/acme.red/node/r1/g3");
    }

    #[test]
    fn names_read_back() {
        let keys = [
            Key::Mux,
            Key::external("A"),
            Key::vnet("red"),
            Key::node("red", "r1"),
            Key::guest("red", "r1", 3),
        ];
        for key in &keys {
            assert_eq!(&key.to_string().parse::<Key>().unwrap(), key);
        }
        assert!(keys.is_sorted());
        for bad in ["", "muxx", "node red", "guest red/r1/x", "node red/r1/0"] {
            assert!(bad.parse::<Key>().is_err(), "{bad}");
        }
    }
}
