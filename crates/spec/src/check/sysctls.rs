//! Checks of a node's sysctls: they are allowed, and their interfaces exist.

use crate::limits::{SYSCTL_BYTES_MAX, SYSCTLS_MAX};
use crate::nearest::nearest;
use crate::node_check::NodeCheck;
use crate::object::{Node, NodeKind};
use crate::sysctl::{SysctlOf, bad_value, refused, sysctl_of};

pub(super) fn check(check: &mut NodeCheck<'_>, node: &Node) {
    check.too_many(&["sysctls"], node.sysctls.len(), SYSCTLS_MAX);
    for (name, value) in &node.sysctls {
        let path = ["sysctls", name];
        if let Some((message, hint)) = refused(name, node.kind == NodeKind::Router) {
            check.fault(&path, message, hint);
            continue;
        }
        if let (SysctlOf::Interface(written), _) = sysctl_of(name) {
            let interface = written.replace('/', ".");
            if interface != "lo" && !node.interfaces.contains_key(&interface) {
                let known = node.interfaces.keys().map(String::as_str);
                let hint = match nearest(&interface, known.clone()) {
                    Some(nearest) => format!("did you mean {nearest}?"),
                    None => format!(
                        "interfaces: {}; or all, default",
                        known.collect::<Vec<_>>().join(", ")
                    ),
                };
                check.fault(&path, format!("interface {interface} does not exist"), hint);
            }
        }
        let value = value.to_string();
        if value.trim().is_empty()
            || value.len() > SYSCTL_BYTES_MAX
            || value.chars().any(char::is_control)
        {
            let message = format!("sysctl {name} has no usable value");
            let hint = format!("give one line of at most {SYSCTL_BYTES_MAX} characters");
            check.fault(&path, message, hint);
        } else if let Some((message, hint)) = bad_value(name, &value) {
            check.fault(&path, message, hint);
        }
    }
}
