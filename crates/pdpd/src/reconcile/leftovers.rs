//! What belongs to no object: what runs though neither plan nor journal know of it, where the journal
//! was lost; and once nothing is to run, the places that all have in common.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{Doing, Next, Reconciler, Removal};
use crate::host::{HostError, words};
use crate::key::Key;

impl Reconciler {
    pub(super) fn leftovers(&self, doing: &mut Doing<'_>) -> Result<Next, HostError> {
        let machine = &self.machine;
        // What is made meanwhile must not be taken for one of them.
        let Ok(_alone) = self.places_used.try_write() else {
            return Ok(Next::wait("what others do"));
        };
        let found = machine.list()?;
        let things = self.state.things()?;
        let journal = things.keys().filter_map(|key| key.parse::<Key>().ok());
        let keys = (doing.newest)().keys().into_iter().chain(journal);
        let known: BTreeSet<PathBuf> = keys.flat_map(|key| self.places.processes(&key)).collect();
        let mut removal = Removal::default();
        for directory in found {
            if known.contains(&directory) {
                continue;
            }
            tracing::info!("{} is not wanted", directory.display());
            let ended = machine.end(&directory);
            if let Err(error) = &ended {
                tracing::warn!("{}: {}", directory.display(), words(error));
            }
            removal.end(ended);
        }
        removal.step(machine.remove_logs_but(&known));
        // Nodes that are being removed have them removed with them.
        let plan = (doing.newest)();
        let kept: BTreeSet<PathBuf> = plan.with_volumes().cloned().chain(known).collect();
        // Whose nodes are not known has volumes that are not known.
        if plan.damaged.is_empty() {
            removal.step(machine.remove_volumes_but(&kept));
        }
        if removal.waits {
            return removal.wait("the end of what is not wanted".into());
        }
        // A step for anything newer than this begins once this has ended.
        if !(doing.newest)().is_empty() {
            return removal.finish().map(|()| Next::Done);
        }
        if let Some(inner) = doing.inner.take() {
            return removal.finish().map(|()| Next::After(inner));
        }
        removal.end(machine.remove_cgroup(""));
        if removal.waits {
            return removal.wait("the end of what is in pdpd's cgroup".into());
        }
        removal.step(machine.remove_ports_but(&BTreeSet::new, &|| false));
        removal.step(machine.clear_directory(&self.places.pins));
        for name in ["runc", "records", "mux", "externals", "vnets"] {
            removal.step(machine.remove_directory(&self.places.run.join(name)));
        }
        removal.finish().map(|()| Next::Done)
    }
}
