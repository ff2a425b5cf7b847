//! A forwarding guest.

use super::{
    GuestRuntime, HelperCheck, HelperState, Reconciler, Removal, StepContext, StepOutcome,
};
use crate::host::HostError;
use crate::plan::key::{ObjectKey, PerProcess, ProcessRole};
use crate::plan::{DaemonPaths, GuestPlan, NodePlan, Plan};
use crate::reconcile::applied::AppliedSettings;

impl Reconciler {
    pub(super) fn guest(
        &self,
        key: &ObjectKey,
        node: &NodePlan,
        wanted: &GuestPlan,
        plan: &Plan,
        runtime: &mut GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        let ObjectKey::Guest { vnet, node: name, number } = key else {
            return Ok(StepOutcome::Done);
        };
        let Some(network) = plan.vnets.get(vnet) else { return Ok(StepOutcome::Done) };
        let machine = &self.machine;
        let directory = &wanted.container.dir;
        let settings = AppliedSettings::of_guest(wanted);
        let made = self.made_from(key, &wanted.hash)?;
        let helper_runs = match &wanted.taps {
            Some((_, helper)) => machine.running(&helper.process.dir).is_some(),
            None => true,
        };
        if let Some(before) = made
            && !context.renew
            && machine.running(directory).is_some()
            && helper_runs
        {
            if before != settings {
                machine.update_limits(directory, &wanted.container.limits)?;
                machine.write_quota(wanted)?;
                self.state.confirm(&key.to_string(), &wanted.hash, &settings.to_journal())?;
            }
            return match self.has_arrived(vnet, network, name, *number)? {
                true => Ok(StepOutcome::Done),
                false => Ok(StepOutcome::wait(format!("the routes of {key}"))),
            };
        }
        let waits = match runtime.made {
            Some(process) => machine.awaits_start(directory, process),
            None => false,
        };
        if !waits && context.backing_off {
            return Ok(StepOutcome::BackingOff);
        }
        if !waits && !machine.unpack(&wanted.container)? {
            return Ok(StepOutcome::wait(format!("the image of {key} to be unpacked")));
        }
        if !waits {
            let helpers = PerProcess::all(HelperState::Bad);
            *runtime = GuestRuntime { helpers, ..GuestRuntime::default() };
            if !self.end(key)? {
                return Ok(StepOutcome::wait_for_end(format!("the end of the old {key}")));
            }
            (context.report)(&format!("{} {key}", context.verb()));
            self.state.intend(&key.to_string(), &settings.to_journal())?;
            self.begin_arrival(vnet, network, name);
            for directory in &node.directories {
                machine.make_directory(directory)?;
            }
            machine.write_quota(wanted)?;
            let guest = machine.create(&wanted.container)?;
            runtime.made = Some(guest);
            if let Some((taps, _)) = &wanted.taps {
                runtime.taps = Some(machine.make_taps(guest, taps)?);
            }
        }
        if let Some((_, helper)) = &wanted.taps {
            match self.tap_helper(helper, runtime, context)? {
                HelperCheck::Starting => {
                    return Ok(StepOutcome::wait(format!("the TAP helper of {key}")));
                }
                HelperCheck::BackingOff => return Ok(StepOutcome::BackingOff),
                HelperCheck::Serves | HelperCheck::Listens => {}
            }
        }
        machine.start(directory)?;
        *runtime = GuestRuntime::default();
        self.state.confirm(&key.to_string(), &wanted.hash, &settings.to_journal())?;
        machine.collect_images();
        context.started.insert(ProcessRole::Main);
        match self.has_arrived(vnet, network, name, *number)? {
            true => Ok(StepOutcome::Done),
            false => Ok(StepOutcome::wait(format!("the routes of {key}"))),
        }
    }

    pub(super) fn remove_guest(
        &self,
        key: &ObjectKey,
        vnet: &str,
        node: &str,
        number: u32,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        (context.report)(&format!("stopping {key}"));
        let mut removal = Removal::default();
        removal.end(self.end(key));
        removal.end(self.machine.remove_cgroup(&DaemonPaths::guest_cgroup(vnet, node, number)));
        if removal.waits {
            return removal.wait(format!("the end of {key}"));
        }
        let directory = self.places.node(vnet, node).join(format!("g{number}"));
        removal.step(self.machine.remove_directory(&directory));
        self.machine.collect_images();
        removal.finish()?;
        self.state.forget(&key.to_string())?;
        Ok(StepOutcome::Gone)
    }
}
