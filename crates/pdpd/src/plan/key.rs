//! Names of the objects that pdpd creates, as in the journal, and of their processes.

use std::fmt;
use std::ops::{Index, IndexMut};
use std::str::FromStr;

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

    /// Returns the roles of all processes that the object may have, outer ones first.
    pub fn roles(&self) -> &'static [ProcessRole] {
        match self {
            Self::Node { .. } => &ProcessRole::ALL,
            Self::Guest { .. } => &[ProcessRole::Main, ProcessRole::Tap],
            Self::Mux => &[ProcessRole::Main],
            Self::External(_) | Self::Vnet(_) | Self::Leftovers => &[],
        }
    }

    /// Returns the name in the API of one of the object's processes, as in
    /// events: `vnet/red/node/r1/tap-g3`.
    pub fn process_object(&self, role: ProcessRole) -> String {
        match (self, self.process_name(role)) {
            (Self::Node { vnet, node } | Self::Guest { vnet, node, .. }, name) => {
                format!("vnet/{vnet}/node/{node}/{}", name.as_deref().unwrap_or("control"))
            }
            _ => self.object(),
        }
    }

    /// Returns the id of one of the object's processes: `red.r1.tap-g3`. It is unique
    /// since names of vnets (made [`dotless`]) and nodes have no dot.
    pub fn process_id(&self, role: ProcessRole) -> String {
        match (self, self.process_name(role)) {
            (Self::Node { vnet, node } | Self::Guest { vnet, node, .. }, name) => {
                let name = name.map_or(String::new(), |name| format!(".{name}"));
                format!("{}.{node}{name}", dotless(vnet))
            }
            _ => self.to_string(),
        }
    }

    /// Returns the name of one of the object's processes in its node; `None` for the control guest.
    fn process_name(&self, role: ProcessRole) -> Option<String> {
        let name = match role {
            ProcessRole::Main => None,
            ProcessRole::Tap => Some("tap"),
            ProcessRole::Mirror => Some("mirror"),
            ProcessRole::Management => Some("management"),
        };
        match (self, name) {
            (Self::Guest { number, .. }, None) => Some(format!("g{number}")),
            (Self::Guest { number, .. }, Some(name)) => Some(format!("{name}-g{number}")),
            (_, name) => name.map(str::to_owned),
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

/// Process of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessRole {
    /// The object itself: the mux, the control guest or host, the forwarding guest.
    Main,
    /// The helper that serves its TAPs.
    Tap,
    /// The route mirror.
    Mirror,
    /// The management helper, which gives the node access besides its networks.
    Management,
}

impl ProcessRole {
    /// All roles, outer processes first.
    pub const ALL: [Self; 4] = [Self::Main, Self::Tap, Self::Mirror, Self::Management];
}

/// One value for each process that an object may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerProcess<T>([T; ProcessRole::ALL.len()]);

impl<T: Copy> PerProcess<T> {
    /// Gives all processes the same value.
    pub fn all(value: T) -> Self {
        Self([value; ProcessRole::ALL.len()])
    }
}

impl<T> Index<ProcessRole> for PerProcess<T> {
    type Output = T;

    fn index(&self, role: ProcessRole) -> &T {
        &self.0[role as usize]
    }
}

impl<T> IndexMut<ProcessRole> for PerProcess<T> {
    fn index_mut(&mut self, role: ProcessRole) -> &mut T {
        &mut self.0[role as usize]
    }
}

/// Returns a vnet's name without dots. A dot separates the parts of container ids, and kernel files
/// next to cgroups have one, like `cpu.max`. No name contains `_`, so the results are unique.
pub fn dotless(vnet: &str) -> String {
    vnet.replace('.', "_")
}

impl Item for ObjectKey {
    /// Returns the tenant, or the vnet if it has no tenant; empty for the node's own objects.
    fn owner(&self) -> &str {
        owner(self.vnet_name().unwrap_or_default())
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

/// Returns the owner of a vnet's resources: its tenant, or the vnet itself if it has none.
pub(crate) fn owner(vnet: &str) -> &str {
    pdp_spec::tenant_of(vnet).unwrap_or(vnet)
}

/// Key of an object to work on.
pub trait Item: Clone + Ord {
    /// Returns the owner of the work.
    fn owner(&self) -> &str;

    /// True if the owner is a tenant.
    fn is_tenants(&self) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_objects_use_their_public_names() {
        let (node, guest) =
            (ObjectKey::node("acme.red", "r1"), ObjectKey::guest("acme.red", "r1", 3));
        let names = |key: &ObjectKey| -> Vec<(String, String)> {
            let of = |role: &ProcessRole| (key.process_object(*role), key.process_id(*role));
            key.roles().iter().map(of).collect()
        };
        let named = |name: &str, id: &str| {
            (format!("vnet/acme.red/node/r1/{name}"), format!("acme_red.r1{id}"))
        };
        let of_node = [
            named("control", ""),
            named("tap", ".tap"),
            named("mirror", ".mirror"),
            named("management", ".management"),
        ];
        assert_eq!(names(&node), of_node);
        assert_eq!(names(&guest), [named("g3", ".g3"), named("tap-g3", ".tap-g3")]);
        assert_eq!(names(&ObjectKey::Mux), [("mux".to_owned(), "mux".to_owned())]);
        assert_eq!(guest.object(), guest.process_object(ProcessRole::Main));
    }

    #[test]
    fn each_process_has_its_own_value() {
        let mut values = PerProcess::default();
        for (number, role) in ProcessRole::ALL.into_iter().enumerate() {
            values[role] = number;
        }
        assert_eq!(ProcessRole::ALL.map(|role| values[role]), [0, 1, 2, 3]);
        assert_eq!(PerProcess::all(7)[ProcessRole::Mirror], 7);
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
