//! Checks a node's binds by themselves. [`super::tenant`] checks if a tenant may have them.

use std::collections::BTreeSet;

use crate::limits::{BIND_BYTES_MAX, BINDS_MAX};
use crate::node_check::NodeCheck;
use crate::object::Node;
use crate::path::{BAD_PATH, good_path, is_below};

/// Places that can't be bind targets.
pub(super) const NOT_THERE: [&str; 4] = ["/dev", "/proc", "/sys", "/run/pdp"];

pub(super) fn check(check: &mut NodeCheck<'_>, node: &Node) {
    check.too_many(&["binds"], node.binds.len(), BINDS_MAX);
    let mut targets = BTreeSet::new();
    for (index, bind) in node.binds.iter().enumerate() {
        let index = index.to_string();
        let path = ["binds", index.as_str()];
        let Some(parts) = bind.parts() else {
            let hint = "write SOURCE:TARGET or SOURCE:TARGET:ro";
            check.fault(
                &path,
                "the bind is not SOURCE:TARGET, SOURCE:TARGET:ro or SOURCE:TARGET:rw",
                hint,
            );
            continue;
        };
        let mut whole = true;
        for (key, value) in [("source", &parts.source), ("target", &parts.target)] {
            if !good_path(value) || value.len() > BIND_BYTES_MAX {
                let hint = match key {
                    "source" => "name a file or directory of the daemon's machine, like /srv/lab",
                    _ => "name a place in the node, like /srv/lab",
                };
                check.fault(&path, format!("{key} {value:?} is {BAD_PATH}"), hint);
                whole = false;
            }
        }
        if !whole {
            continue;
        }
        let target = parts.target.trim_end_matches('/');
        if NOT_THERE.iter().any(|place| target == *place || is_below(target, place)) {
            let message = format!("target {target} can't be bound");
            let hint = format!("choose a place that is not below {}", NOT_THERE.join(", "));
            check.fault(&path, message, hint);
        }
        if !targets.insert(target.to_owned()) {
            let message = format!("target {target} is used by another bind");
            check.fault(&path, message, "give each its own target");
        }
    }
}
