//! The control side of a node: control guest or host, TAPs, TAP helper,
//! route mirror, management helper.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use pdp_container::{HelperSpec, Process};
use pdp_net::interface::{Carrier, InterfaceState};
use serde::Serialize;

use super::node_step::{HelperResult, NodeAction, NodeContainer, NodeEnd, NodeFacts, NodeRecord};
use super::{
    GuestRuntime, HelperCheck, HelperListener, HelperState, Reconciler, Removal, StepContext,
    StepOutcome,
};
use crate::host::control::ControlError;
use crate::host::{self, HostError};
use crate::plan::allocations;
use crate::plan::key::{ObjectKey, PerProcess, ProcessRole};
use crate::plan::{DaemonPaths, KernelLinkPortState, KernelLinkTarget, NodePlan, VnetPlan};
use crate::reconcile::applied::AppliedSettings;

impl From<HelperCheck> for HelperResult {
    fn from(check: HelperCheck) -> Self {
        match check {
            HelperCheck::Serves | HelperCheck::Listens => Self::Ready,
            HelperCheck::Starting => Self::Starting,
            HelperCheck::BackingOff => Self::BackingOff,
        }
    }
}

impl NodeEnd {
    /// Returns the result of the step of a node.
    fn outcome(self, key: &ObjectKey) -> StepOutcome {
        match self {
            // A failure is reported instead.
            Self::Done | Self::ManagementFailed => StepOutcome::Done,
            Self::BackingOff => StepOutcome::BackingOff,
            Self::WaitForImage => StepOutcome::wait(format!("the image of {key} to be unpacked")),
            Self::WaitForOld => StepOutcome::wait_for_end(format!("the end of the old {key}")),
            Self::WaitForMirrorEnd => {
                StepOutcome::wait_for_end(format!("the end of the route mirror of {key}"))
            }
            Self::WaitForHelpers => StepOutcome::wait(format!("the helpers of {key}")),
            Self::WaitForManagement => StepOutcome::wait(format!("the management helper of {key}")),
        }
    }
}

impl Reconciler {
    pub(super) fn node(
        &self,
        key: &ObjectKey,
        wanted: &NodePlan,
        vnet: &VnetPlan,
        runtime: &mut GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        let machine = &self.machine;
        let directory = &wanted.control.dir;
        runtime.made = runtime.made.filter(|process| machine.awaits_start(directory, *process));
        let container = match runtime.made {
            Some(process) => NodeContainer::Created(process),
            None => {
                machine.running(directory).map_or(NodeContainer::Absent, NodeContainer::Running)
            }
        };
        let settings = AppliedSettings::of_node(wanted);
        let mut before = None;
        let mut management_failure = None;
        let mut facts = NodeFacts {
            renew: context.renew,
            backing_off: context.backing_off,
            container,
            ..NodeFacts::default()
        };
        loop {
            match facts.next() {
                NodeAction::ReadRecord => {
                    before = self.made_from(key, &wanted.hash)?;
                    facts.record = Some(match &before {
                        None => NodeRecord::Other,
                        Some(before) if *before != settings => NodeRecord::OtherSettings,
                        Some(_) => NodeRecord::Same,
                    });
                }
                NodeAction::TakeBackTaps => {
                    facts.has_taps = Some(self.take_back_taps(wanted, runtime)?);
                }
                NodeAction::ApplySettings(guest) => {
                    if let Some(before) = &before {
                        self.apply_settings(before, &settings, wanted, guest, runtime)?;
                    }
                    facts.settings_applied = true;
                }
                NodeAction::Unpack => facts.unpacked = Some(machine.unpack(&wanted.control)?),
                NodeAction::EndOld => {
                    // Nothing from before is reliable.
                    let helpers = PerProcess::all(HelperState::Bad);
                    *runtime = GuestRuntime { helpers, ..GuestRuntime::default() };
                    facts.old_ended = Some(self.end(key)?);
                }
                NodeAction::Create => {
                    (context.report)(&format!("{} {key}", context.verb()));
                    self.state.intend(&key.to_string(), &settings.to_journal())?;
                    let guest = self.create_node(key, wanted, vnet, runtime, context)?;
                    facts.container = NodeContainer::Created(guest);
                }
                NodeAction::Check(role, guest) => {
                    facts.helpers[role] = Some(match role {
                        ProcessRole::Mirror => self.mirror(key, wanted, guest, runtime, context)?,
                        ProcessRole::Management => self
                            .management(key, wanted, guest, runtime, context)
                            .unwrap_or_else(|error| {
                                management_failure = Some(error);
                                HelperResult::Failed
                            }),
                        _ => match &wanted.tap_helper {
                            Some(helper) => self.tap_helper(helper, runtime, context)?.into(),
                            None => HelperResult::Ready,
                        },
                    });
                }
                NodeAction::SetPorts(guest) => {
                    self.set_carriers(key, wanted, vnet, runtime, context)?;
                    self.see_to_ports(key, guest, wanted, vnet)?;
                    facts.ports_set = true;
                }
                NodeAction::Start => {
                    machine.start(directory)?;
                    runtime.made = None;
                    context.started.insert(ProcessRole::Main);
                    facts.started = true;
                }
                NodeAction::Confirm => {
                    self.state.confirm(&key.to_string(), &wanted.hash, &settings.to_journal())?;
                    if facts.started {
                        machine.collect_images();
                    }
                    facts.confirmed = true;
                }
                NodeAction::End(end) => {
                    return match management_failure.filter(|_| end == NodeEnd::ManagementFailed) {
                        Some(error) => Err(error),
                        None => Ok(end.outcome(key)),
                    };
                }
            }
        }
    }

    /// Changes the settings of a running node from `before` to `settings`.
    fn apply_settings(
        &self,
        before: &AppliedSettings,
        settings: &AppliedSettings,
        wanted: &NodePlan,
        guest: Process,
        runtime: &mut GuestRuntime,
    ) -> Result<(), HostError> {
        let machine = &self.machine;
        machine.update_limits(&wanted.control.dir, &wanted.control.limits)?;
        self.limit_kernel(wanted)?;
        if let Some(helper) = &wanted.tap_helper
            && before.kernel.is_some() != settings.kernel.is_some()
        {
            machine.enter(&helper.process.dir, &helper.process.cgroup)?;
        }
        if before.static_routes != wanted.routes {
            machine.set_routes(guest, &before.static_routes, &wanted.routes)?;
        }
        // A mirror uses the version with which it was started.
        let mirror = &mut runtime.helpers[ProcessRole::Mirror];
        if before.routes_version != settings.routes_version && *mirror == HelperState::Serves {
            *mirror = HelperState::Bad;
        }
        Ok(())
    }

    /// Creates a node's container with its TAPs, kernel ports, addresses, and routes. A container
    /// whose network is incomplete is created again by the next step.
    fn create_node(
        &self,
        key: &ObjectKey,
        wanted: &NodePlan,
        vnet: &VnetPlan,
        runtime: &mut GuestRuntime,
        context: &StepContext<'_>,
    ) -> Result<Process, HostError> {
        let machine = &self.machine;
        self.limit_kernel(wanted)?;
        let guest = machine.create(&wanted.control)?;
        machine.set_sysctls(guest, &wanted.sysctls.before)?;
        let taps: Vec<_> = wanted.tapped().map(|(_, tap)| tap.clone()).collect();
        runtime.taps = Some(machine.make_taps(guest, &taps)?);
        // Remove the remains of an earlier one first, with its counters.
        let others = || (context.newest)().ports(Some(key));
        let any = || !(context.newest)().ports(None).is_empty();
        machine.remove_ports_but(&others, &any)?;
        self.see_to_ports(key, guest, wanted, vnet)?;
        machine.set_sysctls(guest, &wanted.sysctls.after)?;
        machine.set_loopback(guest, &wanted.loopback)?;
        machine.set_routes(guest, &[], &wanted.routes)?;
        runtime.made = Some(guest);
        Ok(guest)
    }

    /// Limits the kernel's work for a node whose kernel forwards.
    fn limit_kernel(&self, plan: &NodePlan) -> Result<(), HostError> {
        let Some(kernel) = &plan.kernel else { return Ok(()) };
        self.machine.limit(&kernel.cgroup, &kernel.limits)
    }

    /// Returns true if this process holds the node's TAPs. Asks its helper for them if needed.
    fn take_back_taps(
        &self,
        plan: &NodePlan,
        runtime: &mut GuestRuntime,
    ) -> Result<bool, HostError> {
        let Some(helper) = &plan.tap_helper else { return Ok(true) };
        if runtime.taps.is_none() && self.machine.running(&helper.process.dir).is_some() {
            runtime.taps = match self.machine.reported_taps(helper) {
                // The answer makes no sense, and will not later.
                Err(HostError::Control(
                    ControlError::Unexpected { .. } | ControlError::Refused { .. },
                )) => None,
                held => held?,
            };
        }
        Ok(runtime.taps.is_some())
    }

    /// Makes sure that the node's route mirror serves, or ends one that is not planned. A mirror
    /// that was started with another configuration is recreated. Forwarding continues meanwhile.
    fn mirror(
        &self,
        key: &ObjectKey,
        wanted: &NodePlan,
        guest: Process,
        runtime: &mut GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<HelperResult, HostError> {
        let Some(plan) = &wanted.mirror else { return self.not_wanted(key, ProcessRole::Mirror) };
        let config = pdp_proto::mirror::MirrorConfig {
            netns: host::namespace(guest, "net"),
            userns: Some(host::namespace(guest, "user")),
            ..plan.config.clone()
        };
        let role = ProcessRole::Mirror;
        let files = (plan.config_file.as_path(), config.control_socket.as_path());
        self.configured_helper(role, &plan.process, files, &config, runtime, context)
    }

    /// Makes sure that the node's management helper serves, or ends one that is not planned.
    fn management(
        &self,
        key: &ObjectKey,
        wanted: &NodePlan,
        guest: Process,
        runtime: &mut GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<HelperResult, HostError> {
        let Some(plan) = &wanted.management else {
            return self.not_wanted(key, ProcessRole::Management);
        };
        let config = pdp_proto::management::ManagementConfig {
            netns: host::namespace(guest, "net"),
            ..plan.config.clone()
        };
        let role = ProcessRole::Management;
        let files = (plan.config_file.as_path(), config.control_socket.as_path());
        match self.configured_helper(role, &plan.process, files, &config, runtime, context) {
            Err(HostError::Ended { who, how }) => {
                // The start counts, so that the helper is not restarted at once.
                context.started.insert(role);
                let cause = self.machine.last_error(&plan.process.dir);
                Err(HostError::Ended { who, how: cause.unwrap_or(how) })
            }
            check => check,
        }
    }

    /// Makes sure that a helper with this configuration serves; the `files` are that of its
    /// configuration, and its socket. One that was started with another is started again.
    fn configured_helper(
        &self,
        role: ProcessRole,
        process: &HelperSpec,
        (file, socket): (&Path, &Path),
        config: &impl Serialize,
        runtime: &mut GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<HelperResult, HostError> {
        let how = &mut runtime.helpers[role];
        let text = serde_json::to_vec_pretty(config).unwrap_or_default();
        if self.machine.update_file(file, &text)? {
            *how = HelperState::Bad;
        }
        let check = self.helper(process, HelperListener::Own(socket), how, context)?;
        if check == HelperCheck::Listens {
            *how = HelperState::Serves;
            context.started.insert(role);
        }
        Ok(check.into())
    }

    /// Ends the remains of a helper that is no longer wanted.
    fn not_wanted(&self, key: &ObjectKey, role: ProcessRole) -> Result<HelperResult, HostError> {
        let directory = self.places.record(key, role);
        let ended = self.machine.running(&directory).is_none() || self.machine.end(&directory)?;
        Ok(if ended { HelperResult::Ready } else { HelperResult::Ending })
    }

    /// Sets the carrier of all ports. A port has carrier if its link is up and,
    /// for an external link, if the device has carrier too. A port without a
    /// link has none. The next check is due when a link's schedule changes it.
    fn set_carriers(
        &self,
        key: &ObjectKey,
        plan: &NodePlan,
        vnet: &VnetPlan,
        runtime: &GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<(), HostError> {
        let now_ns = allocations::now_ns();
        for ((index, _), tap) in plan.tapped().zip(runtime.taps.iter().flatten()) {
            let link = vnet.link_of(key.node_name(), index);
            let changes_ns = link.and_then(|link| link.next_change_ns(now_ns));
            let changes = changes_ns.map(|at_ns| Duration::from_nanos(at_ns - now_ns));
            context.recheck_after = [context.recheck_after, changes].into_iter().flatten().min();
            let up = link.is_some_and(|link| {
                vnet.has_carrier(link, now_ns)
                    && VnetPlan::cut_off_by(link).all(|name| self.cut_off(name).is_none())
            });
            self.machine.set_carrier(tap.as_fd(), up)?;
        }
        Ok(())
    }

    /// Sets up ports whose frames stay in the kernel as planned, with carrier if their link is up.
    fn see_to_ports(
        &self,
        key: &ObjectKey,
        guest: Process,
        plan: &NodePlan,
        vnet: &VnetPlan,
    ) -> Result<(), HostError> {
        let ObjectKey::Node { vnet: of, node } = key else { return Ok(()) };
        let now_ns = allocations::now_ns();
        let ports = plan.kernel_links.iter().map(|(&vport, port)| {
            let link = vnet.link_of(node, vport);
            let (mut device, mut reaches) = (None, true);
            if let KernelLinkTarget::Outside(outside) = &port.to {
                device = InterfaceState::of(&outside.device);
                reaches = device.is_some_and(|device| device.carrier == Carrier::Yes);
            }
            let carrier = link.is_some_and(|link| vnet.has_carrier(link, now_ns)) && reaches;
            let joined = link.is_some_and(|link| link.is_up(now_ns));
            KernelLinkPortState { port, carrier, joined, device }
        });
        let ports: Vec<_> = ports.collect();
        self.machine.see_to_ports((of, node), guest, plan.kernel.as_ref(), &ports)
    }

    pub(super) fn remove_node(
        &self,
        key: &ObjectKey,
        vnet: &str,
        node: &str,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        (context.report)(&format!("stopping {key}"));
        // Remove everything that does not depend on the end of its guests. A guest
        // that can't be removed thus keeps nothing else of the node running.
        let (machine, mut removal) = (&self.machine, Removal::default());
        removal.end(self.end(key));
        removal.end(machine.remove_cgroup(&DaemonPaths::node_cgroup(vnet, node)));
        if removal.waits {
            return removal.wait(format!("the end of {key}"));
        }
        // The threads of its ports end with them.
        removal.step(machine.remove_ports_but(&|| (context.newest)().ports(None), &|| false));
        removal.end(machine.remove_cgroup(&DaemonPaths::kernel_cgroup(vnet, node)));
        if removal.waits {
            return removal.wait(format!("the end of the kernel's work for {key}"));
        }
        // The volumes of a node that is only stopped stay.
        let record = self.places.record(key, ProcessRole::Main);
        let plan = (context.newest)();
        if !plan.damaged.contains(vnet) {
            removal.step(machine.remove_volumes(&record, &plan.volumes(vnet, node)));
        }
        if let Some(inner) = context.inner.take() {
            removal.finish()?;
            return Ok(StepOutcome::After(inner));
        }
        removal.step(machine.remove_directory(&self.places.node(vnet, node)));
        machine.collect_images();
        removal.finish()?;
        self.state.forget(&key.to_string())?;
        Ok(StepOutcome::Gone)
    }
}
