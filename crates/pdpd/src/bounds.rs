//! Which owner pays for what the guests of a network ask their kernel for ([`pdp_net::limits`]).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pdp_net::limits::{self, Limits};
use pdp_net::shared;
use pdp_net::xdp::mount_bpf_fs;

use crate::host::{HostError, words};
use crate::plan::Places;
use crate::ports::owner;
use crate::reconcile::lock;

/// Time after a failure until the next try.
const AGAIN: Duration = Duration::from_secs(10);

/// Time between two looks at the machine's tracked connections.
const TRACK_INTERVAL: Duration = Duration::from_secs(30);

/// The bounds of this daemon's guests.
#[derive(Debug)]
pub struct Bounds {
    pins: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    limits: Option<Limits>,
    /// The kernel can't bound guests.
    is_impossible: bool,
    /// The last failure, which the log has, and when to try again.
    failure: Option<(String, Instant)>,
    connections: Connections,
    /// First user id of each network's guests, and whether the kernel bounds them.
    networks: BTreeMap<String, (u32, bool)>,
}

/// Bound of the connections that each network namespace may track. It is one setting for nodes and for the machine.
#[derive(Clone, Copy, Debug, Default)]
enum Connections {
    /// The kernel tracks none yet, or the setting is as low as it should be.
    #[default]
    Unbounded,
    /// pdpd lowered the setting, and found at this time that the machine itself tracks few.
    Bounded { before: u64, since: Instant },
    /// The machine itself needs more, or pdpd can't change the setting.
    Left,
}

impl Bounds {
    /// Those of the daemon that has these places.
    pub fn new(places: &Places) -> Self {
        Self { pins: places.pins.join("_limits"), state: Mutex::default() }
    }

    /// Bounds the guests of a network, whose user ids begin with `first`. After a failure, which the log tells, this
    /// and [`Bounds::attend`] try again, unless the kernel can't do it at all.
    pub fn put(&self, vnet: &str, first: u32) {
        let mut state = lock(&self.state);
        if !matches!(state.networks.get(vnet), Some((is, _)) if *is == first) {
            state.networks.insert(vnet.to_owned(), (first, false));
        }
        self.put_all(&mut state);
    }

    /// Does again what failed, and bounds the connections that each namespace may track, once the kernel tracks any.
    pub fn attend(&self) {
        let mut state = lock(&self.state);
        self.put_all(&mut state);
        Self::track(&mut state);
    }

    fn put_all(&self, state: &mut State) {
        let now = Instant::now();
        if state.is_impossible
            || state.networks.values().all(|(_, is_bound)| *is_bound)
            || state.failure.as_ref().is_some_and(|(_, again)| now < *again)
        {
            return;
        }
        let Err(error) = self.try_put_all(state) else { return };
        state.is_impossible = limits::lacking().is_ok_and(|lacks| lacks.is_some());
        let text = words(&error);
        if state.failure.as_ref().is_none_or(|(told, _)| text != *told) {
            tracing::warn!(
                "guests with CAP_NET_ADMIN can hold the kernel's lock of interfaces for as long as they like, and fill \
                 tables that nobody is charged for: {text}",
            );
        }
        state.failure = Some((text, now + AGAIN));
    }

    fn track(state: &mut State) {
        let warn = |error| {
            let why = words(&HostError::from(error));
            tracing::warn!("tracked connections take memory that no guest is charged for: {why}");
        };
        match state.connections {
            Connections::Unbounded => match shared::bound_connections() {
                Ok(Some(before)) => {
                    state.connections = Connections::Bounded { before, since: Instant::now() };
                }
                Ok(None) => {}
                Err(error) => {
                    state.connections = Connections::Left;
                    warn(error);
                }
            },
            Connections::Bounded { since, .. } if since.elapsed() < TRACK_INTERVAL => {}
            Connections::Bounded { before, .. } => match shared::unbound_connections(before) {
                Ok(false) => {
                    state.connections = Connections::Bounded { before, since: Instant::now() };
                }
                Ok(true) => {
                    state.connections = Connections::Left;
                    tracing::warn!(
                        "the machine itself tracks many connections: each node may track {before} again, in memory \
                         that no guest is charged for"
                    );
                }
                Err(error) => warn(error),
            },
            Connections::Left => {}
        }
    }

    fn try_put_all(&self, state: &mut State) -> Result<(), HostError> {
        let State { limits, networks, .. } = state;
        let limits = match limits {
            Some(limits) => limits,
            none => {
                mount_bpf_fs()?;
                none.insert(Limits::open(&self.pins)?)
            }
        };
        for (vnet, (first, is_bound)) in networks.iter_mut().filter(|(_, (_, is))| !is) {
            limits.put(*first, owner(vnet))?;
            *is_bound = true;
        }
        Ok(())
    }

    /// Bounds a network's guests no more, since they are gone. If it was the `last` one, and no other was put since
    /// then, all that was pinned goes.
    pub fn forget(&self, vnet: &str, last: bool) -> Result<(), HostError> {
        let mut state = lock(&self.state);
        let State { limits, networks, .. } = &mut *state;
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
    fn what_is_pinned_stays_while_a_network_is_put() {
        let place = tempfile::tempdir().unwrap();
        let places = Places {
            run: place.path().join("run"),
            lib: place.path().join("lib"),
            pins: place.path().into(),
        };
        let bounds = Bounds::new(&places);
        std::fs::create_dir(&bounds.pins).unwrap();
        let networks = ["a", "b"].map(|vnet| (vnet.to_owned(), (1 << 16, true)));
        lock(&bounds.state).networks.extend(networks);
        // When this was asked for there was no network, and since then somebody made one.
        bounds.forget("a", true).unwrap();
        assert!(bounds.pins.exists());
        bounds.forget("b", false).unwrap();
        assert!(bounds.pins.exists());
        bounds.forget("b", true).unwrap();
        assert!(!bounds.pins.exists());
    }
}
