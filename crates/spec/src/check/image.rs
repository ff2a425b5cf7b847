//! Checks that the images and binds of virtual networks exist.

use crate::diagnostic::Diagnostic;
use crate::image::Image;
use crate::object::Object;
use crate::parse::{Document, at_most};
use crate::tree::JsonPointer;

/// Reports bad images and bind sources of virtual networks' nodes,
/// as found by `check_image` and `check_bind`. Only checks nodes for which
/// `changes` returns true, given the names of network and node.
pub fn check_images(
    documents: &[Document],
    changes: impl Fn(&str, &str) -> bool,
    check_image: impl Fn(&Image) -> Result<(), String>,
    check_bind: impl Fn(&str) -> Result<(), String>,
) -> Vec<Diagnostic> {
    let mut diagnostics = Vec::new();
    for document in documents {
        let Object::VirtualNetwork(vnet) = &document.object else { continue };
        for (name, node) in &vnet.spec.nodes {
            if !changes(&vnet.metadata.name, name) {
                continue;
            }
            let mut check_one = |image: &Image, path: &[&str]| {
                if let Err(why) = check_image(image) {
                    let path = [&["spec", "nodes", name], path].concat();
                    let hint = "image paths are those of the daemon's machine";
                    diagnostics.push(document.at(&JsonPointer::of(&path), why, hint));
                }
            };
            check_one(&node.image, &["image"]);
            if let Some(program) = node.program() {
                check_one(&program.image, &["dataPlane", "program", "image"]);
            }
            for (index, bind) in node.binds.iter().enumerate() {
                let Some(Err(why)) = bind.parts().map(|parts| check_bind(&parts.source)) else {
                    continue;
                };
                let index = index.to_string();
                let path = JsonPointer::of(&["spec", "nodes", name, "binds", &index]);
                let hint = "bind sources are paths of the daemon's machine";
                diagnostics.push(document.at(&path, why, hint));
            }
        }
    }
    at_most(diagnostics)
}
