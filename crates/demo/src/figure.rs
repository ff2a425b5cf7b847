//! Networks of Figure 1 to bring up, and the data planes of their routers.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::paths;

/// All of Figure 1's networks.
pub const VNETS: [&str; 3] = ["red", "blue", "green"];

/// Location of the specs, below the repository and below [`paths::outside`].
const SPECS: &str = "examples/figure1";
const SPEC: &str = "figure1.yaml";

/// The data planes of red's router and of blue's.
const PLANES: [&str; 2] = ["dataPlane: {power: 0.15}", "dataPlane: {kind: kernel}"];

/// Figure 1 as in examples/figure1/figure1.yaml, unless options change it.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Figure1 {
    /// Let the kernel forward for red and a guest for blue; figure1.yaml does the opposite
    #[arg(long)]
    swap: bool,
    /// Omit green, whose Internet table takes most of the time
    #[arg(long)]
    quick: bool,
}

impl Figure1 {
    /// As in figure1.yaml.
    pub const ALL: Self = Self { swap: false, quick: false };

    /// True if green is included, with the Internet's routes.
    pub fn has_green(self) -> bool {
        !self.quick
    }

    /// Networks to bring up.
    pub fn vnets(self) -> &'static [&'static str] {
        if self.quick { &VNETS[..2] } else { &VNETS }
    }

    /// Network whose router has the kernel data plane.
    pub fn kernel(self) -> &'static str {
        if self.swap { "red" } else { "blue" }
    }

    /// Forwarding guests of a network's router.
    pub fn guests(self, vnet: &str) -> usize {
        match vnet {
            "green" => 2,
            _ => usize::from(vnet != self.kernel()),
        }
    }

    /// Path of the spec to apply: the repository's, or one made from it.
    pub fn spec(self, repo: &Path) -> Result<PathBuf> {
        let from = repo.join(SPECS);
        if !self.swap && !self.quick {
            return Ok(from.join(SPEC));
        }
        // Copies the files that it refers to.
        let to = paths::outside().join("specs");
        fs::create_dir_all(&to)?;
        for entry in fs::read_dir(&from).with_context(|| format!("read {}", from.display()))? {
            let entry = entry?;
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
        let spec = to.join(SPEC);
        fs::write(&spec, self.changed(&fs::read_to_string(&spec)?)?)?;
        Ok(spec)
    }

    /// Selects the networks to bring up and sets their data planes.
    fn changed(self, spec: &str) -> Result<String> {
        let is_of =
            |document: &str, vnet: &str| document.contains(&format!("metadata: {{name: {vnet}}}"));
        let mut documents: Vec<String> = spec.split("\n---\n").map(str::to_owned).collect();
        documents.retain(|document| self.has_green() || !is_of(document, "green"));
        for (vnet, own, other) in [("red", 0, 1), ("blue", 1, 0)] {
            let document = documents.iter_mut().find(|document| is_of(document, vnet));
            let document = document.with_context(|| format!("{SPEC} has no {vnet}"))?;
            ensure!(document.contains(PLANES[own]), "{vnet}'s router lacks {}", PLANES[own]);
            if self.swap {
                *document = document.replace(PLANES[own], PLANES[other]);
            }
        }
        Ok(documents.join("\n---\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_are_swapped_and_green_is_left_out() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/figure1/figure1.yaml");
        let spec = fs::read_to_string(path).unwrap();
        let [red, blue] = ["red", "blue"].map(|name| format!("metadata: {{name: {name}}}"));
        for swap in [false, true] {
            let figure = Figure1 { swap, quick: true };
            let changed = figure.changed(&spec).unwrap();
            assert!(!changed.contains("name: green") && changed.contains("kind: Substrate"));
            let (before, after) = changed.split_once(&blue).unwrap();
            assert!(before.contains(&red));
            assert_eq!((before.contains(PLANES[1]), after.contains(PLANES[1])), (swap, !swap));
            assert_eq!(
                [figure.guests("red"), figure.guests("blue")],
                [!swap, swap].map(usize::from)
            );
        }
        assert_eq!(Figure1::ALL.changed(&spec).unwrap(), spec);
    }
}
