//! The mux.

use pdp_container::Process;

use super::{
    HelperCheck, HelperListener, HelperState, Reconciler, Removal, StepContext, StepOutcome,
};
use crate::host::HostError;
use crate::plan::key::{ObjectKey, ProcessRole};
use crate::plan::{MuxPlan, Plan};
use crate::util::lock;

/// Runtime state of the mux.
#[derive(Debug, Default)]
pub(super) struct MuxRuntime {
    /// The mux that listens and gets the configuration.
    pub(super) process: Option<Process>,
    /// True if the last attempt to start one failed.
    failed: bool,
    how: HelperState,
}

impl Reconciler {
    /// Returns the running mux. It needs everything that an earlier mux had.
    pub(super) fn mux_process(&self) -> Option<Process> {
        lock(&self.mux).process
    }

    /// True if no mux runs now, and one is expected soon.
    pub(super) fn mux_comes(&self) -> bool {
        let mux = lock(&self.mux);
        mux.process.is_none() && !mux.failed
    }

    /// True if the last attempt to start one failed.
    pub(super) fn mux_failed(&self) -> bool {
        lock(&self.mux).failed
    }

    /// True if the mux with which a step began has ended, or is being replaced.
    pub(super) fn is_gone(&self, mux: Option<Process>) -> bool {
        let is_alive = |mux| self.machine.is_alive(mux);
        mux.is_some() && (self.mux_process() != mux || !mux.is_some_and(is_alive))
    }

    /// Replaces a mux that answered nonsense, if it is still in use.
    pub(super) fn distrust_mux(&self, answered: Option<Process>, context: &mut StepContext<'_>) {
        let mut mux = lock(&self.mux);
        if mux.process == answered && mux.how == HelperState::Serves {
            tracing::warn!("the mux sent an invalid answer; replacing it");
            mux.how = HelperState::Bad;
            context.wake.push(ObjectKey::Mux);
        }
    }

    pub(super) fn mux(
        &self,
        wanted: &MuxPlan,
        plan: &Plan,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        let (before, mut how) = {
            let mux = lock(&self.mux);
            ((mux.process, mux.failed), mux.how)
        };
        let result = self.mux_step(wanted, &mut how, context);
        let failed = matches!(result, Err(_) | Ok(StepOutcome::BackingOff));
        let process = match result {
            Ok(StepOutcome::Done) => self.machine.running(&wanted.process.dir),
            _ => None,
        };
        {
            let mut mux = lock(&self.mux);
            (mux.process, mux.how) = (process, how);
            mux.failed = failed;
        }
        if (process, failed) != before {
            // A new mux knows nothing. Without a mux all objects must know that.
            context.wake.extend(plan.externals.keys().map(|name| ObjectKey::external(name)));
            context.wake.extend(plan.vnets.keys().map(|name| ObjectKey::vnet(name)));
        }
        result
    }

    fn mux_step(
        &self,
        wanted: &MuxPlan,
        how: &mut HelperState,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        let (machine, key) = (&self.machine, ObjectKey::Mux.to_string());
        let helper = &wanted.process;
        let made = self.made_from(&ObjectKey::Mux, &wanted.hash)?.is_some();
        if *how == HelperState::Serves {
            if made && machine.running(&helper.dir).is_some() {
                machine.limit(&helper.cgroup, &wanted.limits)?;
                return Ok(StepOutcome::Done);
            }
            if context.backing_off {
                return Ok(StepOutcome::BackingOff);
            }
            (context.report)("starting the mux");
            self.state.intend(&key, "")?;
            *how = HelperState::Bad;
        }
        if *how == HelperState::Bad {
            // From now on, steps that get no answer wait for the next mux.
            lock(&self.mux).process = None;
            if !machine.end(&helper.dir)? {
                return Ok(StepOutcome::wait_for_end("the end of the mux"));
            }
            // The old mux's cgroup is gone. Set the limits before the new one starts.
            machine.limit(&helper.cgroup, &wanted.limits)?;
        }
        let socket = self.places.mux_control();
        match self.helper(helper, HelperListener::Made(&socket), how, context)? {
            HelperCheck::Starting => Ok(StepOutcome::wait("the mux to listen")),
            HelperCheck::BackingOff => Ok(StepOutcome::BackingOff),
            HelperCheck::Serves | HelperCheck::Listens => {
                self.state.confirm(&key, &wanted.hash, "")?;
                *how = HelperState::Serves;
                context.started.insert(ProcessRole::Main);
                Ok(StepOutcome::Done)
            }
        }
    }

    pub(super) fn remove_mux(
        &self,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        if let Some(inner) = context.inner.take() {
            return Ok(StepOutcome::After(inner));
        }
        (context.report)("stopping mux");
        let mut removal = Removal::default();
        removal.end(self.end(&ObjectKey::Mux));
        removal.end(self.machine.remove_cgroup("mux"));
        if removal.waits {
            return removal.wait("the end of the mux".into());
        }
        *lock(&self.mux) = MuxRuntime::default();
        removal.step(self.machine.remove_directory(&self.places.run.join("mux")));
        removal.finish()?;
        self.state.forget(&ObjectKey::Mux.to_string())?;
        Ok(StepOutcome::Gone)
    }
}
