//! Faults of a node.

use super::Reporter;

/// Checks of one node.
pub struct NodeCheck<'a, 'b, 'c> {
    pub(super) vnet: &'a str,
    pub(super) node: &'a str,
    pub(super) reporter: &'b mut Reporter<'c>,
}

impl NodeCheck<'_, '_, '_> {
    pub(crate) fn fault(
        &mut self,
        path: &[&str],
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        let path = [&["spec", "nodes", self.node], path].concat();
        self.reporter.vnet(self.vnet, &path, message, hint);
    }

    pub(crate) fn too_many(&mut self, path: &[&str], count: usize, max: usize) {
        if count > max {
            let what = path.last().copied().unwrap_or("entries");
            self.fault(path, format!("{count} {what} exceed {max}"), "remove some");
        }
    }
}
