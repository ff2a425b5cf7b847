//! What belongs to no object: what runs though neither plan nor journal know of it, where the journal
//! was lost; and once nothing is to run, the places that all have in common.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{Doing, Next, Reconciler};
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
        let (mut left, mut failure) = (false, None);
        for directory in found {
            if known.contains(&directory) {
                continue;
            }
            tracing::info!("{} is not wanted", directory.display());
            match machine.end(&directory) {
                Ok(ended) => left |= !ended,
                Err(error) => {
                    tracing::warn!("{}: {}", directory.display(), words(&error));
                    failure = Some(error);
                }
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        machine.remove_logs_but(&known)?;
        // Nodes that are being removed have them removed with them.
        let plan = (doing.newest)();
        let kept: BTreeSet<PathBuf> = plan.with_volumes().cloned().chain(known).collect();
        machine.remove_volumes_but(&kept)?;
        if left {
            return Ok(Next::wait_for_end("the end of what is not wanted"));
        }
        if let Some(inner) = doing.inner.take()
            && (doing.newest)().is_empty()
        {
            return Ok(Next::After(inner));
        }
        // A step for anything newer than this begins once this has ended.
        if !(doing.newest)().is_empty() {
            return Ok(Next::Done);
        }
        if !machine.remove_cgroup("")? {
            return Ok(Next::wait_for_end("the end of what is in pdpd's cgroup"));
        }
        machine.remove_ports_but(&BTreeSet::new, &|| false)?;
        machine.clear_directory(&self.places.pins)?;
        for name in ["runc", "records", "mux", "externals", "vnets"] {
            machine.remove_directory(&self.places.run.join(name))?;
        }
        Ok(Next::Done)
    }
}
