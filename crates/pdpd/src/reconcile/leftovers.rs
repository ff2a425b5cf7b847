//! Objects without an owner: processes that neither plan nor journal know, after
//! the journal was lost. Once nothing is to run, also the common directories.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{Reconciler, Removal, StepContext, StepOutcome};
use crate::host::HostError;
use crate::plan::key::ObjectKey;
use crate::util::error_chain;

impl Reconciler {
    pub(super) fn leftovers(
        &self,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        let machine = &self.machine;
        // New objects must not be taken for leftovers.
        let Ok(_alone) = self.places_used.try_write() else {
            return Ok(StepOutcome::wait("the end of other steps"));
        };
        let found = machine.list()?;
        let entries = self.state.journal()?;
        let journal = entries.keys().filter_map(|key| key.parse::<ObjectKey>().ok());
        let keys = (context.newest)().keys().into_iter().chain(journal);
        let known: BTreeSet<PathBuf> = keys.flat_map(|key| self.places.processes(&key)).collect();
        let mut removal = Removal::default();
        for directory in found {
            if known.contains(&directory) {
                continue;
            }
            tracing::info!("{}: left over, removing it", directory.display());
            let ended = machine.end(&directory);
            if let Err(error) = &ended {
                tracing::warn!("{}: {}", directory.display(), error_chain(error));
            }
            removal.end(ended);
        }
        removal.step(machine.remove_logs_but(&known));
        // The removal of a node removes its volumes too.
        let plan = (context.newest)();
        let kept: BTreeSet<PathBuf> = plan.with_volumes().cloned().chain(known).collect();
        // A damaged vnet's nodes are unknown, and so are their volumes.
        if plan.damaged.is_empty() {
            removal.step(machine.remove_volumes_but(&kept));
        }
        if removal.waits {
            return removal.wait("the end of processes that are left over".into());
        }
        // Steps of a newer plan begin after this one has ended.
        if !(context.newest)().is_empty() {
            return removal.finish().map(|()| StepOutcome::Done);
        }
        if let Some(inner) = context.inner.take() {
            return removal.finish().map(|()| StepOutcome::After(inner));
        }
        removal.end(machine.remove_cgroup(""));
        if removal.waits {
            return removal.wait("the end of the processes in pdpd's cgroup".into());
        }
        removal.step(machine.remove_ports_but(&BTreeSet::new, &|| false));
        removal.step(machine.clear_directory(&self.places.pins));
        for name in ["runc", "records", "mux", "externals", "vnets"] {
            removal.step(machine.remove_directory(&self.places.run.join(name)));
        }
        removal.finish().map(|()| StepOutcome::Done)
    }
}
