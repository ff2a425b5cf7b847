//! Checks of a node's volumes by themselves, and against its previous volumes.

use std::collections::{BTreeMap, BTreeSet};

use super::binds::NOT_THERE;
use super::{DesiredState, Existing, Reporter};
use crate::limits::{
    BIND_BYTES_MAX, VOLUME_BYTES_MAX, VOLUME_BYTES_MIN, VOLUME_NAME_CHARS_MAX, VOLUMES_MAX,
};
use crate::node_check::NodeCheck;
use crate::object::Node;
use crate::path::{BAD_PATH, good_path, is_below};
use crate::units::Bytes;

pub(super) fn check(check: &mut NodeCheck<'_>, node: &Node) {
    check.too_many(&["volumes"], node.volumes.len(), VOLUMES_MAX);
    let binds = node.binds.iter().filter_map(|bind| Some(bind.parts()?.target));
    let mut targets: BTreeSet<String> =
        binds.map(|target| target.trim_end_matches('/').to_owned()).collect();
    let mut names = BTreeSet::new();
    for (index, volume) in node.volumes.iter().enumerate() {
        let index = index.to_string();
        let path = ["volumes", index.as_str()];
        let Some(parts) = volume.parts() else {
            let hint = "write NAME:TARGET, or a mapping with source, target and size";
            check.fault(&path, "the volume is not NAME:TARGET", hint);
            continue;
        };
        let name = &parts.source;
        if !is_name(name) {
            let hint = "use a name like frr-state; for a path of the machine use binds";
            let what = format!(
                "source {name:?} is not a volume name: 1 to {VOLUME_NAME_CHARS_MAX} letters, \
                 digits, - and _"
            );
            check.fault(&path, what, hint);
        } else if !names.insert(name.clone()) {
            let message = format!("volume {name} is defined twice");
            check.fault(&path, message, "a volume has one target; rename or remove one");
        }
        let (size, min, max) = (parts.size, Bytes(VOLUME_BYTES_MIN), Bytes(VOLUME_BYTES_MAX));
        if size < min || size > max {
            let message = format!("volume {name}: size {size} is not within {min} to {max}");
            check.fault(&path, message, "choose a size within these bounds");
        }
        if !good_path(&parts.target) || parts.target.len() > BIND_BYTES_MAX {
            let message = format!("target {:?} is {BAD_PATH}", parts.target);
            check.fault(&path, message, "name a directory in the node, like /var/lib/frr");
            continue;
        }
        let target = parts.target.trim_end_matches('/');
        // At, above or below a path that PdP needs in the node.
        let meets =
            |place: &str| target == place || is_below(target, place) || is_below(place, target);
        if NOT_THERE.iter().any(|place| meets(place)) {
            let message = format!("target {target} can't have a volume");
            let hint =
                format!("choose a place that is not at, above or below {}", NOT_THERE.join(", "));
            check.fault(&path, message, hint);
        }
        if !targets.insert(target.to_owned()) {
            let message = format!("target {target} is used by another volume or bind");
            check.fault(&path, message, "give each its own target");
        }
    }
}

/// True for letters, digits, `-` and `_`, so that the name is always a plain file name.
fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    (1..=VOLUME_NAME_CHARS_MAX).contains(&name.len())
        && name.chars().all(good)
        && !name.starts_with('-')
}

/// Checks that no existing volume changes its size.
pub(super) fn sizes(desired: &DesiredState<'_>, existing: &Existing, reporter: &mut Reporter) {
    for (name, vnet) in &desired.changed {
        let Some(before) = existing.vnets.get(name) else { continue };
        for (node_name, node) in &vnet.spec.nodes {
            let Some(before) = before.spec.nodes.get(node_name) else { continue };
            let before: BTreeMap<String, Bytes> = sizes_of(before).collect();
            for (index, (source, size)) in sizes_of(node).enumerate() {
                let Some(was) = before.get(&source).filter(|was| **was != size) else { continue };
                let index = index.to_string();
                let message = format!("volume {source}: size {size} differs from its {was}");
                let hint = "keep its size, or rename it, which removes its content";
                reporter.vnet(
                    name,
                    &["spec", "nodes", node_name, "volumes", &index],
                    message,
                    hint,
                );
            }
        }
    }
}

fn sizes_of(node: &Node) -> impl Iterator<Item = (String, Bytes)> {
    node.volumes.iter().filter_map(|it| it.parts()).map(|parts| (parts.source, parts.size))
}
