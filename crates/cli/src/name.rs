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
pub struct PortName {
    pub vnet: String,
    pub node: String,
    pub port: String,
}

impl std::fmt::Display for PortName {
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

/// Where a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Standard input or output.
    Stream,
    /// A file of this machine.
    Here(PathBuf),
    /// A path in a node.
    Node(NodeName, String),
}

impl Place {
    /// `-`, `VNET/NODE:PATH`, and all else is a file here; `./a:b` and `/tmp:b` too, as no vnet is called so.
    pub fn of(text: OsString) -> Self {
        let in_node = |text: &str| {
            let (node, path) = text.split_once(':')?;
            let name = node.parse().ok().filter(|name: &NodeName| !name.vnet.starts_with('.'))?;
            Some(Self::Node(name, path.into()))
        };
        match text.to_str() {
            Some("-") => Self::Stream,
            Some(text) => in_node(text).unwrap_or_else(|| Self::Here(text.into())),
            None => Self::Here(text.into()),
        }
    }
}

/// A text that is no such name.
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

impl FromStr for PortName {
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
    fn names_are_taken_apart() {
        let node: NodeName = "red/r1".parse().unwrap();
        assert_eq!((node.vnet.as_str(), node.node.as_str()), ("red", "r1"));
        let port: PortName = "red/r1:eth0.5".parse().unwrap();
        assert_eq!((port.node.as_str(), port.port.as_str()), ("r1", "eth0.5"));
        let link: LinkName = "red/r1:eth0".parse().unwrap();
        assert_eq!(link.link, "r1:eth0");
    }

    #[test]
    fn files_are_here_or_in_a_node() {
        let of = |text: &str| Place::of(text.into());
        let node: NodeName = "acme.red/r1".parse().unwrap();
        assert_eq!(of("acme.red/r1:/a:b c"), Place::Node(node.clone(), "/a:b c".into()));
        assert_eq!(of("acme.red/r1:"), Place::Node(node, String::new()));
        assert_eq!(of("-"), Place::Stream);
        for here in ["a", "a:b", "./a:b", "../a:b", "/tmp:b", "/tmp/a:b", "a/b/c:d", "./-", ""] {
            assert_eq!(of(here), Place::Here(here.into()), "{here}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "red", "red/", "/r1", "red/r1/x", "red/r1:eth0"] {
            assert!(text.parse::<NodeName>().is_err(), "{text}");
        }
        for text in ["red/r1", "red/:eth0", "red/r1:", "r1:eth0", "red/r1:eth0/1"] {
            assert!(text.parse::<PortName>().is_err(), "{text}");
        }
        for text in ["red", "red/", "/r1"] {
            assert!(text.parse::<LinkName>().is_err(), "{text}");
        }
    }
}
