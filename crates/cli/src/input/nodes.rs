//! Several nodes of a vnet on the command line: `VNET/NODE[,NODE…]`, or `VNET` with `-l` or
//! `--all`.

use std::str::FromStr;

use pdp_api::client::Client;

use crate::failure::CliFailure;
use crate::input::selector::Selector;

/// Nodes of a vnet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeNames {
    pub vnet: String,
    /// The named nodes; `None` if only the vnet is given.
    named: Option<Vec<String>>,
}

impl FromStr for NodeNames {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (vnet, nodes) = match text.split_once('/') {
            Some((vnet, nodes)) => {
                (vnet, Some(nodes.split(',').map(str::to_owned).collect::<Vec<_>>()))
            }
            None => (text, None),
        };
        let bad = |name: &str| name.is_empty() || name.contains(['/', ':', ',']);
        if bad(vnet) || nodes.iter().flatten().any(|name| bad(name)) {
            return Err(
                "use VNET/NODE[,NODE...], for example red/r1, or VNET with -l or --all".into()
            );
        }
        Ok(Self { vnet: vnet.into(), named: nodes })
    }
}

/// Flags that select nodes of a vnet.
#[derive(Debug, clap::Args)]
pub struct NodeChoice {
    /// Nodes of VNET whose labels match: key=value, key!=value, key, !key, key in (a,b); several
    /// with commas.
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "all")]
    selector: Option<Selector>,
    /// All nodes of VNET.
    #[arg(short, long)]
    all: bool,
}

impl NodeNames {
    /// Returns the node if exactly one is named.
    pub fn one(&self, choice: &NodeChoice) -> Option<&str> {
        match self.named.as_deref() {
            Some([one]) if choice.selector.is_none() && !choice.all => Some(one),
            _ => None,
        }
    }

    /// Returns all selected nodes, at least one. Nodes that are not named come in the spec's order.
    pub async fn chosen(
        &self,
        client: &Client,
        choice: &NodeChoice,
    ) -> Result<Vec<String>, CliFailure> {
        let vnet = &self.vnet;
        match (&self.named, choice.selector.is_some() || choice.all) {
            (Some(_), true) => {
                Err(CliFailure::Usage(format!("-l and --all need a vnet without nodes: {vnet}")))
            }
            (None, false) => Err(CliFailure::Usage(format!(
                "{vnet} is a vnet: name a node, {vnet}/NODE, or choose some with -l or --all"
            ))),
            (Some(nodes), false) => {
                let mut nodes = nodes.clone();
                let mut seen = std::collections::BTreeSet::new();
                nodes.retain(|node| seen.insert(node.clone()));
                Ok(nodes)
            }
            (None, true) => {
                let mut nodes = client.vnet(vnet).await?.status.nodes;
                if let Some(selector) = &choice.selector {
                    nodes.retain(|node| selector.selects(&node.labels));
                    if nodes.is_empty() {
                        let hint = format!("`pdp get nodes {vnet} -o wide` shows their labels");
                        return Err(CliFailure::Other(format!(
                            "no node of {vnet} matches {selector}; {hint}"
                        )));
                    }
                }
                Ok(nodes.into_iter().map(|node| node.name).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_lists_are_parsed_or_refused() {
        let named = |text: &str| text.parse::<NodeNames>().map(|nodes| (nodes.vnet, nodes.named));
        let of = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(named("red"), Ok(("red".into(), None)));
        assert_eq!(named("acme.red/r1"), Ok(("acme.red".into(), of(&["r1"]))));
        assert_eq!(named("red/r1,h1"), Ok(("red".into(), of(&["r1", "h1"]))));
        for bad in ["", "/", "red/", "/r1", "red/r1,", "red/r1:eth0", "red/r1/x", "red,blue"] {
            assert!(named(bad).is_err(), "{bad}");
        }
    }
}
