//! The mux.

use pdp_container::Process;

use super::{Doing, Helper, Look, Next, Reconciler, Removal, Socket, lock};
use crate::host::HostError;
use crate::key::Key;
use crate::plan::{MuxPlan, Plan};

/// The mux, as far as it is known.
#[derive(Debug, Default)]
pub(super) struct MuxSide {
    /// The one that listens, and is told what there is.
    pub(super) process: Option<Process>,
    /// Whether the last attempt to have one failed.
    failed: bool,
    how: Helper,
}

impl Reconciler {
    /// The mux that runs. Whatever the last one was told is to be told to it.
    pub(super) fn mux_process(&self) -> Option<Process> {
        lock(&self.mux).process
    }

    /// Whether there will be a mux soon, and there is none now.
    pub(super) fn mux_comes(&self) -> bool {
        let mux = lock(&self.mux);
        mux.process.is_none() && !mux.failed
    }

    /// Whether the last attempt to have one failed.
    pub(super) fn mux_failed(&self) -> bool {
        lock(&self.mux).failed
    }

    /// Whether the mux that a step began with has ended, or is being replaced.
    pub(super) fn is_gone(&self, mux: Option<Process>) -> bool {
        let is_alive = |mux| self.machine.is_alive(mux);
        mux.is_some() && (self.mux_process() != mux || !mux.is_some_and(is_alive))
    }

    /// Has the mux made anew that answered what none does, if it is still there.
    pub(super) fn distrust_mux(&self, answered: Option<Process>, doing: &mut Doing<'_>) {
        let mut mux = lock(&self.mux);
        if mux.process == answered && mux.how == Helper::Serves {
            tracing::warn!("the mux answered what none does; another takes its place");
            mux.how = Helper::Bad;
            doing.wake.push(Key::Mux);
        }
    }

    pub(super) fn mux(
        &self,
        wanted: &MuxPlan,
        plan: &Plan,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        let (before, mut how) = {
            let mux = lock(&self.mux);
            ((mux.process, mux.failed), mux.how)
        };
        let result = self.mux_step(wanted, &mut how, doing);
        let failed = matches!(result, Err(_) | Ok(Next::Held));
        let process = match result {
            Ok(Next::Done) => self.machine.running(&wanted.process.dir),
            _ => None,
        };
        {
            let mut mux = lock(&self.mux);
            (mux.process, mux.how) = (process, how);
            mux.failed = failed;
        }
        if (process, failed) != before {
            // A new one knows nothing; without one all are told so.
            doing.wake.extend(plan.externals.keys().map(|name| Key::external(name)));
            doing.wake.extend(plan.vnets.keys().map(|name| Key::vnet(name)));
        }
        result
    }

    fn mux_step(
        &self,
        wanted: &MuxPlan,
        how: &mut Helper,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        let (machine, key) = (&self.machine, Key::Mux.to_string());
        let helper = &wanted.process;
        let made = self.made_from(&Key::Mux, &wanted.hash)?.is_some();
        if *how == Helper::Serves {
            if made && machine.running(&helper.dir).is_some() {
                machine.limit(&helper.cgroup, &wanted.limits)?;
                return Ok(Next::Done);
            }
            if doing.held {
                return Ok(Next::Held);
            }
            (doing.told)("starting the mux");
            self.state.intend(&key, "")?;
            *how = Helper::Bad;
        }
        if *how == Helper::Bad {
            // Whom it does not answer from now on waits for the next.
            lock(&self.mux).process = None;
            if !machine.end(&helper.dir)? {
                return Ok(Next::wait_for_end("the end of the mux"));
            }
            // The old one's cgroup went with it; the limits are there before the new one.
            machine.limit(&helper.cgroup, &wanted.limits)?;
        }
        let socket = self.places.mux_control();
        match self.helper(helper, Socket::Made(&socket), how, doing)? {
            Look::Starting => Ok(Next::wait("the mux to listen")),
            Look::Held => Ok(Next::Held),
            Look::Serves | Look::Listens => {
                self.state.confirm(&key, &wanted.hash, "")?;
                *how = Helper::Serves;
                doing.started.itself = true;
                Ok(Next::Done)
            }
        }
    }

    pub(super) fn remove_mux(&self, doing: &mut Doing<'_>) -> Result<Next, HostError> {
        if let Some(inner) = doing.inner.take() {
            return Ok(Next::After(inner));
        }
        (doing.told)("stopping mux");
        let mut removal = Removal::default();
        removal.end(self.end(&Key::Mux));
        removal.end(self.machine.remove_cgroup("mux"));
        if removal.waits {
            return removal.wait("the end of the mux".into());
        }
        *lock(&self.mux) = MuxSide::default();
        removal.step(self.machine.remove_directory(&self.places.run.join("mux")));
        removal.finish()?;
        self.state.forget(&Key::Mux.to_string())?;
        Ok(Next::Gone)
    }
}
