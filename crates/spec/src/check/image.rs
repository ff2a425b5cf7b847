//! Whether the images and binds that virtual networks name are there.

use crate::diagnostic::Diagnostic;
use crate::object::{Image, Object};
use crate::parse::{Document, at_most};
use crate::tree::Path;

/// What is wrong with the images and with the sources of binds of virtual networks' nodes, as `look` and
/// `look_bind` say; of those nodes for which `changes`, given the names of network and node, is true.
pub fn check_images(
    documents: &[Document],
    changes: impl Fn(&str, &str) -> bool,
    look: impl Fn(&Image) -> Result<(), String>,
    look_bind: impl Fn(&str) -> Result<(), String>,
) -> Vec<Diagnostic> {
    let mut diagnostics = Vec::new();
    for document in documents {
        let Object::VirtualNetwork(vnet) = &document.object else { continue };
        for (name, node) in &vnet.spec.nodes {
            if !changes(&vnet.metadata.name, name) {
                continue;
            }
            let mut one = |image: &Image, path: &[&str]| {
                if let Err(why) = look(image) {
                    let path = [&["spec", "nodes", name], path].concat();
                    let hint = "paths of images are those of the daemon's machine";
                    diagnostics.push(document.at(&Path::of(&path), why, hint));
                }
            };
            one(&node.image, &["image"]);
            if let Some(program) = node.program() {
                one(&program.image, &["dataPlane", "program", "image"]);
            }
            for (index, bind) in node.binds.iter().enumerate() {
                let Some(Err(why)) = bind.parts().map(|parts| look_bind(&parts.source)) else {
                    continue;
                };
                let index = index.to_string();
                let path = Path::of(&["spec", "nodes", name, "binds", &index]);
                let hint = "sources of binds are paths of the daemon's machine";
                diagnostics.push(document.at(&path, why, hint));
            }
        }
    }
    at_most(diagnostics)
}
