//! The control side of a node: control guest or host, TAPs, TAP helper, route mirror.

use std::os::fd::AsFd;
use std::time::Duration;

use pdp_container::Process;
use pdp_net::interface::{Carrier, Condition};
use pdp_net::route::Route;
use pdp_proto::routes;

use super::{Doing, Helper, Look, Next, Reconciler, Removal, Side, Socket};
use crate::control::ControlError;
use crate::host::{self, HostError};
use crate::key::Key;
use crate::ledger;
use crate::plan::{ManagementPlan, MirrorPlan, NodePlan, Part, Places, PortNow, To, VnetPlan};

/// Before what bounds the kernel's forwarding in a node's detail in the journal.
const KERNEL: &str = " kernel ";

/// Before the static routes in a node's detail in the journal.
const SET: &str = " static ";

/// Static routes as a node's detail in the journal has them, so that it is known later which were set.
fn set_words(routes: &[Route]) -> String {
    match routes.is_empty() {
        true => String::new(),
        false => format!("{SET}{}", serde_json::to_string(routes).unwrap_or_default()),
    }
}

/// The static routes in a node's detail.
fn set_before(detail: &str) -> Vec<Route> {
    let json = detail.split_once(SET).map_or("", |(_, json)| json);
    let mut found = serde_json::Deserializer::from_str(json).into_iter();
    found.next().and_then(Result::ok).unwrap_or_default()
}

impl Reconciler {
    pub(super) fn node(
        &self,
        key: &Key,
        wanted: &NodePlan,
        vnet: &VnetPlan,
        side: &mut Side,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        let machine = &self.machine;
        let journal = key.to_string();
        let directory = &wanted.control.dir;
        // A mirror speaks the version with guests that it was started with, and is replaced alone.
        let routes = format!(" routes {}", routes::VERSION);
        let kernel = wanted.kernel.as_ref().map_or(String::new(), |kernel| {
            format!("{KERNEL}{:?} {}", kernel.limits, kernel.short_way)
        });
        let limits =
            format!("{:?}{kernel}{}{routes}", wanted.control.limits, set_words(&wanted.routes));
        let mut changed = false;
        let waits = side.made.filter(|process| machine.waits(directory, *process));
        let guest = match (waits, machine.running(directory)) {
            (Some(guest), _) => guest,
            (None, running) => {
                side.made = None;
                let made = self.made_from(key, &wanted.hash)?;
                match (running, made) {
                    (Some(guest), Some(before))
                        if !doing.renew && self.take_back_taps(wanted, side)? =>
                    {
                        if before != limits {
                            machine.update_limits(directory, &wanted.control.limits)?;
                            self.limit_kernel(wanted)?;
                            if let Some(helper) = &wanted.tap_helper
                                && before.contains(KERNEL) != wanted.kernel.is_some()
                            {
                                machine.enter(&helper.process.dir, &helper.process.cgroup)?;
                            }
                            let set = set_before(&before);
                            if set != wanted.routes {
                                machine.set_routes(guest, &set, &wanted.routes)?;
                            }
                            if !before.ends_with(&routes) && side.mirror == Helper::Serves {
                                side.mirror = Helper::Bad;
                            }
                            changed = true;
                        }
                        guest
                    }
                    _ if doing.held => return Ok(Next::Held),
                    _ if !machine.unpack(&wanted.control)? => {
                        return Ok(Next::wait(format!("the image of {key} to be unpacked")));
                    }
                    _ => {
                        // Nothing of what was there before is to be relied on.
                        *side = Side {
                            tap: Helper::Bad,
                            mirror: Helper::Bad,
                            management: Helper::Bad,
                            ..Side::default()
                        };
                        if !self.end(key)? {
                            return Ok(Next::wait_for_end(format!("the end of what was {key}")));
                        }
                        (doing.told)(&format!("{} {key}", doing.verb()));
                        self.state.intend(&journal, &limits)?;
                        self.limit_kernel(wanted)?;
                        let guest = machine.create(&wanted.control)?;
                        machine.set_sysctls(guest, &wanted.sysctls.before)?;
                        let taps: Vec<_> = wanted.tapped().map(|(_, tap)| tap.clone()).collect();
                        side.taps = Some(machine.make_taps(guest, &taps)?);
                        // What is left of one before goes first, with what it counted.
                        let others = || (doing.newest)().ports(Some(key));
                        let any = || !(doing.newest)().ports(None).is_empty();
                        machine.remove_ports_but(&others, &any)?;
                        self.see_to_ports(key, guest, wanted, vnet)?;
                        machine.set_sysctls(guest, &wanted.sysctls.after)?;
                        machine.set_loopback(guest, &wanted.loopback)?;
                        machine.set_routes(guest, &[], &wanted.routes)?;
                        // One whose network is not whole is made anew.
                        side.made = Some(guest);
                        guest
                    }
                }
            }
        };
        let (mut ready, mut held) = (true, false);
        if let Some(helper) = &wanted.tap_helper {
            match self.helper(
                &helper.process,
                Socket::Made(&helper.control),
                &mut side.tap,
                doing,
            )? {
                Look::Serves => {}
                Look::Starting => ready = false,
                Look::Held => held = true,
                Look::Listens => {
                    let taps = side.taps.as_deref().unwrap_or_default();
                    machine.serve(helper, taps).inspect_err(|_| side.tap = Helper::Bad)?;
                    side.tap = Helper::Serves;
                    doing.started.tap = true;
                }
            }
        }
        if wanted.mirror.is_none() && self.not_wanted(key, Part::Mirror)? == Look::Starting {
            return Ok(Next::wait_for_end(format!("the end of the route mirror of {key}")));
        }
        if let Some(mirror) = &wanted.mirror {
            self.configure_mirror(mirror, guest, side)?;
            let socket = &mirror.config.control_socket;
            match self.helper(&mirror.process, Socket::Own(socket), &mut side.mirror, doing)? {
                Look::Serves => {}
                Look::Starting => ready = false,
                Look::Held => held = true,
                Look::Listens => {
                    side.mirror = Helper::Serves;
                    doing.started.mirror = true;
                }
            }
        }
        // One that fails keeps the node from its start, and from nothing else.
        let management = match &wanted.management {
            Some(management) => self.management(management, guest, side, doing),
            None => self.not_wanted(key, Part::Management),
        };
        if !ready {
            return Ok(Next::wait(format!("the helpers of {key}")));
        }
        if held {
            return Ok(Next::Held);
        }
        self.set_carriers(key, wanted, vnet, side, doing)?;
        self.see_to_ports(key, guest, wanted, vnet)?;
        match management? {
            Look::Serves | Look::Listens => {}
            Look::Starting => return Ok(Next::wait(format!("the management helper of {key}"))),
            Look::Held => return Ok(Next::Held),
        }
        if side.made.is_some() {
            machine.start(directory)?;
            side.made = None;
            doing.started.itself = true;
            self.state.confirm(&journal, &wanted.hash, &limits)?;
            machine.collect_images();
        } else if changed {
            self.state.confirm(&journal, &wanted.hash, &limits)?;
        }
        Ok(Next::Done)
    }

    /// Bounds what the kernel does for a node whose namespace forwards.
    fn limit_kernel(&self, plan: &NodePlan) -> Result<(), HostError> {
        let Some(kernel) = &plan.kernel else { return Ok(()) };
        self.machine.limit(&kernel.cgroup, &kernel.limits)
    }

    /// Whether this node's TAPs are held here now; asks its helper for them where they are not.
    fn take_back_taps(&self, plan: &NodePlan, side: &mut Side) -> Result<bool, HostError> {
        let Some(helper) = &plan.tap_helper else { return Ok(true) };
        if side.taps.is_none() && self.machine.running(&helper.process.dir).is_some() {
            side.taps = match self.machine.held_taps(helper) {
                // What it says makes no sense, and no more will later.
                Err(HostError::Control(
                    ControlError::Unexpected { .. } | ControlError::Refused { .. },
                )) => None,
                held => held?,
            };
        }
        Ok(side.taps.is_some())
    }

    /// Writes down whose routes a mirror follows, and how; one that was started by other words is to be
    /// made anew. Forwarding goes on meanwhile.
    fn configure_mirror(
        &self,
        mirror: &MirrorPlan,
        guest: Process,
        side: &mut Side,
    ) -> Result<(), HostError> {
        let config = pdp_proto::mirror::Config {
            netns: host::namespace(guest, "net"),
            userns: Some(host::namespace(guest, "user")),
            ..mirror.config.clone()
        };
        let text = serde_json::to_vec_pretty(&config).unwrap_or_default();
        if self.machine.update_file(&mirror.config_file, &text)? {
            side.mirror = Helper::Bad;
        }
        Ok(())
    }

    /// Sees to a node's way out and in, as it is wanted.
    fn management(
        &self,
        plan: &ManagementPlan,
        guest: Process,
        side: &mut Side,
        doing: &mut Doing<'_>,
    ) -> Result<Look, HostError> {
        let config = pdp_proto::management::Config {
            netns: host::namespace(guest, "net"),
            ..plan.config.clone()
        };
        let text = serde_json::to_vec_pretty(&config).unwrap_or_default();
        if self.machine.update_file(&plan.config_file, &text)? {
            side.management = Helper::Bad;
        }
        let socket = Socket::Own(&config.control_socket);
        let look = self.helper(&plan.process, socket, &mut side.management, doing);
        match look {
            Ok(Look::Listens) => {
                side.management = Helper::Serves;
                doing.started.management = true;
                Ok(Look::Listens)
            }
            Err(HostError::Ended { who, how }) => {
                // What was started counts, so that it is not started at once again.
                doing.started.management = true;
                let said = self.machine.last_words(&plan.process.dir);
                Err(HostError::Ended { who, how: said.unwrap_or(how) })
            }
            look => look,
        }
    }

    /// Ends what is left of a helper that is wanted no more.
    fn not_wanted(&self, key: &Key, part: Part) -> Result<Look, HostError> {
        let Key::Node { vnet, node } = key else { return Ok(Look::Serves) };
        let directory = self.places.record(vnet, node, part);
        let ended = self.machine.running(&directory).is_none() || self.machine.end(&directory)?;
        Ok(if ended { Look::Serves } else { Look::Starting })
    }

    /// A port has carrier where its link is up and, of one to the outside, the device there has; one
    /// without a link has none. Another look is due when a link turns by its schedule.
    fn set_carriers(
        &self,
        key: &Key,
        plan: &NodePlan,
        vnet: &VnetPlan,
        side: &Side,
        doing: &mut Doing<'_>,
    ) -> Result<(), HostError> {
        let now_ns = ledger::now_ns();
        for ((index, _), tap) in plan.tapped().zip(side.taps.iter().flatten()) {
            let link = vnet.link_of(key.node_name(), index);
            let turns_ns = link.and_then(|link| link.turns_ns(now_ns));
            let turns = turns_ns.map(|at_ns| Duration::from_nanos(at_ns - now_ns));
            doing.again = [doing.again, turns].into_iter().flatten().min();
            let up = link.is_some_and(|link| {
                vnet.has_carrier(link, now_ns)
                    && VnetPlan::cut_off_by(link).all(|name| self.cut_off(name).is_none())
            });
            self.machine.set_carrier(tap.as_fd(), up)?;
        }
        Ok(())
    }

    /// Sees to it that ports whose frames stay in the kernel are there as planned, with carrier where their link is up.
    fn see_to_ports(
        &self,
        key: &Key,
        guest: Process,
        plan: &NodePlan,
        vnet: &VnetPlan,
    ) -> Result<(), HostError> {
        let Key::Node { vnet: of, node } = key else { return Ok(()) };
        let now_ns = ledger::now_ns();
        let ports = plan.straight.iter().map(|(&vport, port)| {
            let link = vnet.link_of(node, vport);
            let (mut device, mut reaches) = (None, true);
            if let To::Outside(far) = &port.to {
                device = Condition::of(&far.device);
                reaches = device.is_some_and(|device| device.carrier == Carrier::Yes);
            }
            let carrier = link.is_some_and(|link| vnet.has_carrier(link, now_ns)) && reaches;
            let joined = link.is_some_and(|link| link.is_up(now_ns));
            PortNow { port, carrier, joined, device }
        });
        let ports: Vec<_> = ports.collect();
        self.machine.see_to_ports((of, node), guest, plan.kernel.as_ref(), &ports)
    }

    pub(super) fn remove_node(
        &self,
        key: &Key,
        vnet: &str,
        node: &str,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        (doing.told)(&format!("stopping {key}"));
        // All that does not need its guests to be gone: one that can't be removed keeps nothing of the node running.
        let (machine, mut removal) = (&self.machine, Removal::default());
        removal.end(self.end(key));
        removal.end(machine.remove_cgroup(&Places::node_cgroup(vnet, node)));
        if removal.waits {
            return removal.wait(format!("the end of {key}"));
        }
        // Threads that work for its ports go with them.
        removal.step(machine.remove_ports_but(&|| (doing.newest)().ports(None), &|| false));
        removal.end(machine.remove_cgroup(&Places::kernel_cgroup(vnet, node)));
        if removal.waits {
            return removal.wait(format!("the end of the kernel's work for {key}"));
        }
        // Those of one that is only stopped stay.
        let record = self.places.record(vnet, node, Part::Control);
        let plan = (doing.newest)();
        if !plan.damaged.contains(vnet) {
            removal.step(machine.remove_volumes(&record, &plan.volumes(vnet, node)));
        }
        if let Some(inner) = doing.inner.take() {
            removal.finish()?;
            return Ok(Next::After(inner));
        }
        removal.step(machine.remove_directory(&self.places.node(vnet, node)));
        machine.collect_images();
        removal.finish()?;
        self.state.forget(&key.to_string())?;
        Ok(Next::Gone)
    }
}
