//! Names on the command line: `VNET/NODE`, `VNET/NODE:PORT`, `VNET/NODE:PATH`, `VNET/LINK`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

/// A node of a vnet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeName {
    pub vnet: String,
    pub node: String,
}

/// A port of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VnetPortName {
    pub vnet: String,
    pub node: String,
    pub port: String,
}

impl std::fmt::Display for VnetPortName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}:{}", self.vnet, self.node, self.port)
    }
}

/// A link, by its name or one of its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkName {
    pub vnet: String,
    pub link: String,
}

/// Location of a file to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyLocation {
    /// Standard input or output.
    Stream,
    /// A file of this machine.
    Local(PathBuf),
    /// A path in a node.
    Node(NodeName, String),
}

impl CopyLocation {
    /// Parses `-` or `VNET/NODE:PATH`; any other text is a file of this machine. So are `./a:b` and
    /// `/tmp:b`, since no vnet has such a name.
    pub fn of(text: OsString) -> Self {
        let in_node = |text: &str| {
            let (node, path) = text.split_once(':')?;
            let name = node.parse().ok().filter(|name: &NodeName| !name.vnet.starts_with('.'))?;
            Some(Self::Node(name, path.into()))
        };
        match text.to_str() {
            Some("-") => Self::Stream,
            Some(text) => in_node(text).unwrap_or_else(|| Self::Local(text.into())),
            None => Self::Local(text.into()),
        }
    }
}

/// Text that is not a name of the expected form.
#[derive(Debug, thiserror::Error)]
#[error("use {form}, for example {example}")]
pub struct BadName {
    form: &'static str,
    example: &'static str,
}

fn pair(text: &str, at: char) -> Option<(String, String)> {
    let (left, right) = text.split_once(at)?;
    let good = !left.is_empty() && !right.is_empty() && !right.contains('/');
    good.then(|| (left.into(), right.into()))
}

impl FromStr for NodeName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = BadName { form: "VNET/NODE", example: "red/r1" };
        let (vnet, node) = pair(text, '/').filter(|(_, node)| !node.contains(':')).ok_or(bad)?;
        Ok(Self { vnet, node })
    }
}

impl FromStr for VnetPortName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = || BadName { form: "VNET/NODE:PORT", example: "red/r1:eth0" };
        let (vnet, rest) = pair(text, '/').ok_or_else(bad)?;
        let (node, port) = pair(&rest, ':').ok_or_else(bad)?;
        Ok(Self { vnet, node, port })
    }
}

impl FromStr for LinkName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad =
            BadName { form: "VNET/LINK or VNET/NODE:PORT", example: "red/r1-r2 or red/r1:eth0" };
        let (vnet, link) = pair(text, '/').ok_or(bad)?;
        Ok(Self { vnet, link })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_names_are_split_into_parts() {
        let node: NodeName = "red/r1".parse().unwrap();
        assert_eq!((node.vnet.as_str(), node.node.as_str()), ("red", "r1"));
        let port: VnetPortName = "red/r1:eth0.5".parse().unwrap();
        assert_eq!((port.node.as_str(), port.port.as_str()), ("r1", "eth0.5"));
        let link: LinkName = "red/r1:eth0".parse().unwrap();
        assert_eq!(link.link, "r1:eth0");
    }

    #[test]
    fn copy_locations_are_local_or_in_a_node() {
        let of = |text: &str| CopyLocation::of(text.into());
        let node: NodeName = "acme.red/r1".parse().unwrap();
        assert_eq!(of("acme.red/r1:/a:b c"), CopyLocation::Node(node.clone(), "/a:b c".into()));
        assert_eq!(of("acme.red/r1:"), CopyLocation::Node(node, String::new()));
        assert_eq!(of("-"), CopyLocation::Stream);
        for here in ["a", "a:b", "./a:b", "../a:b", "/tmp:b", "/tmp/a:b", "a/b/c:d", "./-", ""] {
            assert_eq!(of(here), CopyLocation::Local(here.into()), "{here}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "red", "red/", "/r1", "red/r1/x", "red/r1:eth0"] {
            assert!(text.parse::<NodeName>().is_err(), "{text}");
        }
        for text in ["red/r1", "red/:eth0", "red/r1:", "r1:eth0", "red/r1:eth0/1"] {
            assert!(text.parse::<VnetPortName>().is_err(), "{text}");
        }
        for text in ["red", "red/", "/r1"] {
            assert!(text.parse::<LinkName>().is_err(), "{text}");
        }
    }
}
