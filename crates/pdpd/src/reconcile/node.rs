//! The control side of a node: control guest or host, TAPs, TAP helper,
//! route mirror, management helper.

use std::os::fd::AsFd;
use std::time::Duration;

use pdp_container::Process;
use pdp_net::interface::{Carrier, InterfaceState};

use super::{
    GuestRuntime, HelperCheck, HelperListener, HelperState, Reconciler, Removal, StepContext,
    StepOutcome,
};
use crate::host::control::ControlError;
use crate::host::{self, HostError};
use crate::plan::allocations;
use crate::plan::key::{ObjectKey, PerProcess, ProcessRole};
use crate::plan::{
    DaemonPaths, KernelLinkPortState, KernelLinkTarget, ManagementPlan, MirrorPlan, NodePlan,
    VnetPlan,
};
use crate::reconcile::applied::AppliedSettings;

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
        let journal = key.to_string();
        let directory = &wanted.control.dir;
        let settings = AppliedSettings::of_node(wanted);
        let mut changed = false;
        let waits = runtime.made.filter(|process| machine.awaits_start(directory, *process));
        let guest = match (waits, machine.running(directory)) {
            (Some(guest), _) => guest,
            (None, running) => {
                runtime.made = None;
                let made = self.made_from(key, &wanted.hash)?;
                match (running, made) {
                    (Some(guest), Some(before))
                        if !context.renew && self.take_back_taps(wanted, runtime)? =>
                    {
                        if before != settings {
                            machine.update_limits(directory, &wanted.control.limits)?;
                            self.limit_kernel(wanted)?;
                            if let Some(helper) = &wanted.tap_helper
                                && before.kernel.is_some() != settings.kernel.is_some()
                            {
                                machine.enter(&helper.process.dir, &helper.process.cgroup)?;
                            }
                            if before.static_routes != wanted.routes {
                                let set = &before.static_routes;
                                machine.set_routes(guest, set, &wanted.routes)?;
                            }
                            // A mirror uses the version with which it was started.
                            let mirror = &mut runtime.helpers[ProcessRole::Mirror];
                            if before.routes_version != settings.routes_version
                                && *mirror == HelperState::Serves
                            {
                                *mirror = HelperState::Bad;
                            }
                            changed = true;
                        }
                        guest
                    }
                    _ if context.backing_off => return Ok(StepOutcome::BackingOff),
                    _ if !machine.unpack(&wanted.control)? => {
                        return Ok(StepOutcome::wait(format!("the image of {key} to be unpacked")));
                    }
                    _ => {
                        // Nothing from before is reliable.
                        let helpers = PerProcess::all(HelperState::Bad);
                        *runtime = GuestRuntime { helpers, ..GuestRuntime::default() };
                        if !self.end(key)? {
                            return Ok(StepOutcome::wait_for_end(format!(
                                "the end of the old {key}"
                            )));
                        }
                        (context.report)(&format!("{} {key}", context.verb()));
                        self.state.intend(&journal, &settings.to_journal())?;
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
                        // A guest whose network is incomplete is recreated.
                        runtime.made = Some(guest);
                        guest
                    }
                }
            }
        };
        let (mut ready, mut held) = (true, false);
        if let Some(helper) = &wanted.tap_helper {
            match self.tap_helper(helper, runtime, context)? {
                HelperCheck::Serves | HelperCheck::Listens => {}
                HelperCheck::Starting => ready = false,
                HelperCheck::BackingOff => held = true,
            }
        }
        if wanted.mirror.is_none()
            && self.not_wanted(key, ProcessRole::Mirror)? == HelperCheck::Starting
        {
            return Ok(StepOutcome::wait_for_end(format!("the end of the route mirror of {key}")));
        }
        if let Some(mirror) = &wanted.mirror {
            self.configure_mirror(mirror, guest, runtime)?;
            let socket = &mirror.config.control_socket;
            match self.helper(
                &mirror.process,
                HelperListener::Own(socket),
                &mut runtime.helpers[ProcessRole::Mirror],
                context,
            )? {
                HelperCheck::Serves => {}
                HelperCheck::Starting => ready = false,
                HelperCheck::BackingOff => held = true,
                HelperCheck::Listens => {
                    runtime.helpers[ProcessRole::Mirror] = HelperState::Serves;
                    context.started.insert(ProcessRole::Mirror);
                }
            }
        }
        // A failure delays the node's start, and nothing else.
        let management = match &wanted.management {
            Some(management) => self.management(management, guest, runtime, context),
            None => self.not_wanted(key, ProcessRole::Management),
        };
        if !ready {
            return Ok(StepOutcome::wait(format!("the helpers of {key}")));
        }
        if held {
            return Ok(StepOutcome::BackingOff);
        }
        self.set_carriers(key, wanted, vnet, runtime, context)?;
        self.see_to_ports(key, guest, wanted, vnet)?;
        match management? {
            HelperCheck::Serves | HelperCheck::Listens => {}
            HelperCheck::Starting => {
                return Ok(StepOutcome::wait(format!("the management helper of {key}")));
            }
            HelperCheck::BackingOff => return Ok(StepOutcome::BackingOff),
        }
        if runtime.made.is_some() {
            machine.start(directory)?;
            runtime.made = None;
            context.started.insert(ProcessRole::Main);
            self.state.confirm(&journal, &wanted.hash, &settings.to_journal())?;
            machine.collect_images();
        } else if changed {
            self.state.confirm(&journal, &wanted.hash, &settings.to_journal())?;
        }
        Ok(StepOutcome::Done)
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

    /// Writes a mirror's configuration. A mirror that was started with
    /// another one must be recreated. Forwarding continues meanwhile.
    fn configure_mirror(
        &self,
        mirror: &MirrorPlan,
        guest: Process,
        runtime: &mut GuestRuntime,
    ) -> Result<(), HostError> {
        let config = pdp_proto::mirror::MirrorConfig {
            netns: host::namespace(guest, "net"),
            userns: Some(host::namespace(guest, "user")),
            ..mirror.config.clone()
        };
        let text = serde_json::to_vec_pretty(&config).unwrap_or_default();
        if self.machine.update_file(&mirror.config_file, &text)? {
            runtime.helpers[ProcessRole::Mirror] = HelperState::Bad;
        }
        Ok(())
    }

    /// Sets up a node's management access as planned.
    fn management(
        &self,
        plan: &ManagementPlan,
        guest: Process,
        runtime: &mut GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<HelperCheck, HostError> {
        let config = pdp_proto::management::ManagementConfig {
            netns: host::namespace(guest, "net"),
            ..plan.config.clone()
        };
        let text = serde_json::to_vec_pretty(&config).unwrap_or_default();
        let how = &mut runtime.helpers[ProcessRole::Management];
        if self.machine.update_file(&plan.config_file, &text)? {
            *how = HelperState::Bad;
        }
        let socket = HelperListener::Own(&config.control_socket);
        match self.helper(&plan.process, socket, how, context) {
            Ok(HelperCheck::Listens) => {
                *how = HelperState::Serves;
                context.started.insert(ProcessRole::Management);
                Ok(HelperCheck::Listens)
            }
            Err(HostError::Ended { who, how }) => {
                // The start counts, so that the helper is not restarted at once.
                context.started.insert(ProcessRole::Management);
                let cause = self.machine.last_error(&plan.process.dir);
                Err(HostError::Ended { who, how: cause.unwrap_or(how) })
            }
            check => check,
        }
    }

    /// Ends the remains of a helper that is no longer wanted.
    fn not_wanted(&self, key: &ObjectKey, role: ProcessRole) -> Result<HelperCheck, HostError> {
        let directory = self.places.record(key, role);
        let ended = self.machine.running(&directory).is_none() || self.machine.end(&directory)?;
        Ok(if ended { HelperCheck::Serves } else { HelperCheck::Starting })
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
