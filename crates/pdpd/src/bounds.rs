//! Which owner pays for what the guests of a network ask their kernel for ([`pdp_net::limits`]).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use pdp_net::limits::{self, Limits};
use pdp_net::xdp::mount_bpf_fs;

use crate::host::{HostError, words};
use crate::plan::Places;
use crate::ports::owner;
use crate::reconcile::lock;

/// The bounds of this daemon's guests.
#[derive(Debug)]
pub struct Bounds {
    pins: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    limits: Option<Limits>,
    /// The kernel can't do it, and that was told.
    is_told: bool,
    /// Each namespace has its bound of tracked connections, or can't have it, which was told.
    is_tracking_told: bool,
    /// First user id of each network's guests.
    networks: BTreeMap<String, u32>,
}

impl Bounds {
    /// Those of the daemon that has these places.
    pub fn new(places: &Places) -> Self {
        Self { pins: places.pins.join("_limits"), state: Mutex::default() }
    }

    /// Bounds the guests of a network, whose user ids begin with `first`. Where the kernel can't, that is told once.
    pub fn put(&self, vnet: &str, first: u32) {
        let mut state = lock(&self.state);
        if state.networks.get(vnet) == Some(&first) || state.is_told {
            return;
        }
        if let Err(error) = self.try_put(&mut state, vnet, first) {
            state.is_told = true;
            tracing::warn!(
                "guests with CAP_NET_ADMIN can hold the kernel's lock of interfaces for as long as they like, and fill \
                 tables that nobody is charged for: {}",
                words(&error)
            );
        }
    }

    /// Bounds the connections that each namespace may track, once the kernel tracks any.
    pub fn track(&self) {
        let mut state = lock(&self.state);
        if state.is_tracking_told {
            return;
        }
        let bounded = pdp_net::shared::bound_connections();
        state.is_tracking_told = *bounded.as_ref().unwrap_or(&true);
        if let Err(error) = bounded {
            tracing::warn!(
                "tracked connections take memory that no guest is charged for: {}",
                words(&HostError::from(error))
            );
        }
    }

    fn try_put(&self, state: &mut State, vnet: &str, first: u32) -> Result<(), HostError> {
        let limits = match &mut state.limits {
            Some(limits) => limits,
            none => {
                mount_bpf_fs()?;
                none.insert(Limits::open(&self.pins)?)
            }
        };
        limits.put(first, owner(vnet))?;
        state.networks.insert(vnet.to_owned(), first);
        Ok(())
    }

    /// Bounds a network's guests no more, since they are gone. With the last network all that was pinned goes.
    pub fn forget(&self, vnet: &str, last: bool) -> Result<(), HostError> {
        let mut state = lock(&self.state);
        let State { limits, networks, .. } = &mut *state;
        let first = networks.remove(vnet);
        if let (Some(first), Some(limits)) = (first, &mut *limits)
            && !networks.values().any(|other| *other == first)
        {
            limits.forget(first)?;
        }
        if last {
            *limits = None;
            limits::destroy(&self.pins)?;
        }
        Ok(())
    }
}
