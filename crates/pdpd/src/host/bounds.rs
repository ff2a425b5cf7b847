//! Charges kernel resources that a network's guests request to their owner ([`pdp_net::limits`]).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pdp_net::limits::{self, NetlinkLimits};
use pdp_net::shared;
use pdp_net::xdp::mount_bpf_fs;

use crate::host::HostError;
use crate::plan::DaemonPaths;
use crate::plan::key::owner;
use crate::util::{error_chain, lock};

/// Time from a failure to the next attempt.
const AGAIN: Duration = Duration::from_secs(10);

/// Time between two checks of the machine's tracked connections.
const TRACK_INTERVAL: Duration = Duration::from_secs(30);

/// Kernel resource limits of this daemon's guests.
#[derive(Debug)]
pub struct GuestLimits {
    pins: PathBuf,
    state: Mutex<GuestLimitsState>,
}

#[derive(Debug, Default)]
struct GuestLimitsState {
    limits: Option<NetlinkLimits>,
    /// The kernel can't limit guests.
    is_impossible: bool,
    /// The last failure, which is already logged, and the time of the next attempt.
    failure: Option<(String, Instant)>,
    connections: ConntrackLimit,
    /// First user id of each network's guests, and whether the kernel limits them.
    networks: BTreeMap<String, (u32, bool)>,
}

/// Limit of the connections that each network namespace may track. One
/// setting applies to the nodes and the machine.
#[derive(Clone, Copy, Debug, Default)]
enum ConntrackLimit {
    /// The kernel tracks none yet, or the setting is low enough.
    #[default]
    Unbounded,
    /// pdpd lowered the setting. At this time it found that the machine
    /// itself tracks few connections.
    Bounded { before: u64, since: Instant },
    /// The machine itself needs more, or pdpd can't change the setting.
    Left,
}

impl GuestLimits {
    /// Limits for the daemon with these paths.
    pub fn new(places: &DaemonPaths) -> Self {
        Self { pins: places.pins.join("_limits"), state: Mutex::default() }
    }

    /// Limits the guests of a network, whose user ids begin with `first`. A failure is logged.
    /// This method and [`GuestLimits::poll`] then try again, unless the kernel can't do it at all.
    pub fn put(&self, vnet: &str, first: u32) {
        let mut state = lock(&self.state);
        if !matches!(state.networks.get(vnet), Some((is, _)) if *is == first) {
            state.networks.insert(vnet.to_owned(), (first, false));
        }
        self.put_all(&mut state);
    }

    /// Retries what failed. Limits the connections that each namespace
    /// may track, once the kernel tracks any.
    pub fn poll(&self) {
        let mut state = lock(&self.state);
        self.put_all(&mut state);
        Self::track(&mut state);
    }

    fn put_all(&self, state: &mut GuestLimitsState) {
        let now = Instant::now();
        if state.is_impossible
            || state.networks.values().all(|(_, is_bound)| *is_bound)
            || state.failure.as_ref().is_some_and(|(_, again)| now < *again)
        {
            return;
        }
        let Err(error) = self.try_put_all(state) else { return };
        state.is_impossible = limits::lacking().is_ok_and(|lacks| lacks.is_some());
        let text = error_chain(&error);
        if state.failure.as_ref().is_none_or(|(reported, _)| text != *reported) {
            tracing::warn!(
                "guests with CAP_NET_ADMIN can hold the kernel's interface lock without limit, and \
                 fill tables that no guest is charged for: {text}",
            );
        }
        state.failure = Some((text, now + AGAIN));
    }

    fn track(state: &mut GuestLimitsState) {
        let warn = |error| {
            let why = error_chain(&HostError::from(error));
            tracing::warn!("tracked connections take memory that no guest is charged for: {why}");
        };
        match state.connections {
            ConntrackLimit::Unbounded => match shared::bound_connections() {
                Ok(Some(before)) => {
                    state.connections = ConntrackLimit::Bounded { before, since: Instant::now() };
                }
                Ok(None) => {}
                Err(error) => {
                    state.connections = ConntrackLimit::Left;
                    warn(error);
                }
            },
            ConntrackLimit::Bounded { since, .. } if since.elapsed() < TRACK_INTERVAL => {}
            ConntrackLimit::Bounded { before, .. } => match shared::unbound_connections(before) {
                Ok(false) => {
                    state.connections = ConntrackLimit::Bounded { before, since: Instant::now() };
                }
                Ok(true) => {
                    state.connections = ConntrackLimit::Left;
                    tracing::warn!(
                        "the machine itself tracks many connections; each node may again track \
                         {before}, in memory that no guest is charged for"
                    );
                }
                Err(error) => warn(error),
            },
            ConntrackLimit::Left => {}
        }
    }

    fn try_put_all(&self, state: &mut GuestLimitsState) -> Result<(), HostError> {
        let GuestLimitsState { limits, networks, .. } = state;
        let limits = match limits {
            Some(limits) => limits,
            none => {
                mount_bpf_fs()?;
                none.insert(NetlinkLimits::open(&self.pins)?)
            }
        };
        for (vnet, (first, is_bound)) in networks.iter_mut().filter(|(_, (_, is))| !is) {
            limits.assign_owner(*first, owner(vnet))?;
            *is_bound = true;
        }
        Ok(())
    }

    /// Removes the limits of a network whose guests are gone. If it was the
    /// `last` network and none was added since, all pins are removed too.
    pub fn forget(&self, vnet: &str, last: bool) -> Result<(), HostError> {
        let mut state = lock(&self.state);
        let GuestLimitsState { limits, networks, .. } = &mut *state;
        let first = networks.remove(vnet).map(|(first, _)| first);
        if let (Some(first), Some(limits)) = (first, &mut *limits)
            && !networks.values().any(|(other, _)| *other == first)
        {
            limits.forget(first)?;
        }
        if last && networks.is_empty() {
            *limits = None;
            limits::destroy(&self.pins)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_removal_keeps_a_recreated_vnets_pins() {
        let place = tempfile::tempdir().unwrap();
        let places = DaemonPaths {
            run: place.path().join("run"),
            lib: place.path().join("lib"),
            pins: place.path().into(),
        };
        let bounds = GuestLimits::new(&places);
        std::fs::create_dir(&bounds.pins).unwrap();
        let networks = ["a", "b"].map(|vnet| (vnet.to_owned(), (1 << 16, true)));
        lock(&bounds.state).networks.extend(networks);
        // When the removal was requested there was no network. Since then somebody created one.
        bounds.forget("a", true).unwrap();
        assert!(bounds.pins.exists());
        bounds.forget("b", false).unwrap();
        assert!(bounds.pins.exists());
        bounds.forget("b", true).unwrap();
        assert!(!bounds.pins.exists());
    }
}
