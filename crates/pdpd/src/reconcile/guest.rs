//! A forwarding guest.

use super::{Doing, Helper, Look, Next, Reconciler, Removal, Side, Socket};
use crate::host::HostError;
use crate::key::Key;
use crate::plan::{GuestPlan, NodePlan, Places, Plan};

impl Reconciler {
    pub(super) fn guest(
        &self,
        key: &Key,
        node: &NodePlan,
        wanted: &GuestPlan,
        plan: &Plan,
        side: &mut Side,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        let Key::Guest { vnet, node: name, number } = key else { return Ok(Next::Done) };
        let Some(network) = plan.vnets.get(vnet) else { return Ok(Next::Done) };
        let machine = &self.machine;
        let directory = &wanted.container.dir;
        let limits = format!("{:?}", wanted.container.limits);
        let made = self.made_from(key, &wanted.hash)?;
        let helper_runs = match &wanted.taps {
            Some((_, helper)) => machine.running(&helper.process.dir).is_some(),
            None => true,
        };
        if let Some(before) = made
            && !doing.renew
            && machine.running(directory).is_some()
            && helper_runs
        {
            if before != limits {
                machine.update_limits(directory, &wanted.container.limits)?;
                machine.say_quota(wanted)?;
                self.state.confirm(&key.to_string(), &wanted.hash, &limits)?;
            }
            return match self.has_arrived(vnet, network, name, *number)? {
                true => Ok(Next::Done),
                false => Ok(Next::wait(format!("{key} to have its routes"))),
            };
        }
        let waits = match side.made {
            Some(process) => machine.waits(directory, process),
            None => false,
        };
        if !waits && doing.held {
            return Ok(Next::Held);
        }
        if !waits && !machine.unpack(&wanted.container)? {
            return Ok(Next::wait(format!("the image of {key} to be unpacked")));
        }
        if !waits {
            *side = Side { tap: Helper::Bad, ..Side::default() };
            if !self.end(key)? {
                return Ok(Next::wait_for_end(format!("the end of what was {key}")));
            }
            (doing.told)(&format!("{} {key}", doing.verb()));
            self.state.intend(&key.to_string(), &limits)?;
            self.begin_arrival(vnet, network, name);
            for directory in &node.directories {
                machine.make_directory(directory)?;
            }
            machine.say_quota(wanted)?;
            let guest = machine.create(&wanted.container)?;
            side.made = Some(guest);
            if let Some((taps, _)) = &wanted.taps {
                side.taps = Some(machine.make_taps(guest, taps)?);
            }
        }
        if let Some((_, helper)) = &wanted.taps {
            match self.helper(
                &helper.process,
                Socket::Made(&helper.control),
                &mut side.tap,
                doing,
            )? {
                Look::Starting => return Ok(Next::wait(format!("the TAP helper of {key}"))),
                Look::Serves => {}
                Look::Held => return Ok(Next::Held),
                Look::Listens => {
                    let taps = side.taps.as_deref().unwrap_or_default();
                    machine.serve(helper, taps).inspect_err(|_| side.tap = Helper::Bad)?;
                    side.tap = Helper::Serves;
                }
            }
        }
        machine.start(directory)?;
        *side = Side::default();
        self.state.confirm(&key.to_string(), &wanted.hash, &limits)?;
        machine.collect_images();
        doing.started.itself = true;
        match self.has_arrived(vnet, network, name, *number)? {
            true => Ok(Next::Done),
            false => Ok(Next::wait(format!("{key} to have its routes"))),
        }
    }

    pub(super) fn remove_guest(
        &self,
        key: &Key,
        vnet: &str,
        node: &str,
        number: u32,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        (doing.told)(&format!("stopping {key}"));
        let mut removal = Removal::default();
        removal.end(self.end(key));
        removal.end(self.machine.remove_cgroup(&Places::guest_cgroup(vnet, node, number)));
        if removal.waits {
            return removal.wait(format!("the end of {key}"));
        }
        let directory = self.places.node(vnet, node).join(format!("g{number}"));
        removal.step(self.machine.remove_directory(&directory));
        self.machine.collect_images();
        removal.finish()?;
        self.state.forget(&key.to_string())?;
        Ok(Next::Gone)
    }
}
