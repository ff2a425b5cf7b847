//! Whether objects fit together, with each other and with what there is already.

use std::collections::BTreeMap;

use pdp_alloc::{Placements, Share};

use crate::diagnostic::Diagnostic;
use crate::object::{Substrate, VirtualNetwork};
use crate::parse::Document;

/// What there is.
#[derive(Clone, Debug, Default)]
pub struct Existing {
    /// The substrate that was applied.
    pub substrate: Option<Substrate>,
    /// Virtual networks that were applied, by name.
    pub vnets: BTreeMap<String, VirtualNetwork>,
    /// Shares that vrouters have, by [`placement_key`].
    pub placements: Placements,
    /// Network devices of the machine by name; `None`: not known, nothing is checked against them.
    pub devices: Option<BTreeMap<String, InterfaceFacts>>,
    /// CPUs of the machine; empty: not known.
    pub cpus: std::collections::BTreeSet<u32>,
    /// Forwarding engines that guests can't run on at present.
    pub failed_engines: std::collections::BTreeSet<String>,
}

/// What is known of a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceFacts {
    /// Largest IP packet, bytes.
    pub mtu: u32,
}

/// What is to be, all of it: what was applied before, with the change made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Intent {
    /// The substrate.
    pub substrate: Option<Substrate>,
    /// All virtual networks by name.
    pub vnets: BTreeMap<String, VirtualNetwork>,
    /// Shares of all vrouters, by [`placement_key`]; a guest a share, in this order.
    pub placements: BTreeMap<String, Vec<Share>>,
}

/// A vrouter's key in placements.
pub fn placement_key(vnet: &str, node: &str) -> String {
    format!("{vnet}/{node}")
}

/// What is to be once `documents` are applied to what there is: objects of the same kind and name
/// are replaced, others stay.
///
/// # Errors
/// Everything that is wrong; nothing is changed then.
pub fn check(documents: &[Document], existing: &Existing) -> Result<Intent, Vec<Diagnostic>> {
    let _ = (documents, existing);
    Err(Vec::new())
}
