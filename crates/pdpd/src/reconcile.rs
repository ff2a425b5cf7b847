//! Brings one object after the other nearer to a [`Plan`].
//!
//! A step looks at what there is of an object, does the next thing, and says what is to come
//! ([`Next`]); what is as planned is not touched. So the same code brings up, changes, repairs after a
//! crash of anything, adopts after pdpd's own, and takes down. Each side effect is written down before
//! it is done. No step waits for a process to be ready, to end or to give something back: those are
//! states that are looked at again. When steps are made is up to [`crate::keeper`].
//!
//! There is a file for each kind of object, with how it is made, changed and removed.
//!
//! Who holds what: TAPs are held here and in the node's TAP helper. A helper that died gets them
//! from here; a new pdpd gets them from the helpers. Both gone: the control guest is made anew.

mod external;
mod guest;
mod leftovers;
mod mux;
mod node;
mod scale;
mod vnet;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pdp_container::{HelperSpec, Process};
use pdp_net::interface::Condition;

use crate::host::HostError;
use crate::key::Key;
use crate::machine::Machine;
use crate::plan::{Places, Plan};
use crate::state::State;
pub use external::CutOff;
use external::ExternalSide;
use mux::MuxSide;
use vnet::VnetSide;

/// Time for what was killed to end, and for what is in a cgroup.
const END_MAX: Duration = Duration::from_secs(10);

/// Longest time for a helper or the mux to listen once it was started.
const LISTEN_MAX: Duration = Duration::from_secs(10);

/// What is to come for an object after a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: it is as planned.
    Done,
    /// Another look: something is under way.
    Wait(Waiting),
    /// A step once this object is as planned.
    After(Key),
    /// A step when its back-off ends: something ended that was started too lately to be started again.
    Held,
    /// Nothing: it is gone, and so is all that was known of it.
    Gone,
}

/// What is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What, in words.
    pub what: String,
    /// When it has failed; `None`: never.
    pub max: Option<Duration>,
}

impl Next {
    fn wait(what: impl Into<String>) -> Self {
        Self::Wait(Waiting { what: what.into(), max: None })
    }

    fn wait_for_end(what: impl Into<String>) -> Self {
        Self::Wait(Waiting { what: what.into(), max: Some(END_MAX) })
    }
}

/// Steps of a removal that don't need each other: each is tried whatever became of those before, and the first
/// failure is the one that is told.
#[derive(Debug, Default)]
struct Removal {
    failure: Option<HostError>,
    /// Something that was killed has not ended.
    waits: bool,
}

impl Removal {
    fn step(&mut self, done: Result<(), HostError>) {
        if let Err(error) = done {
            self.failure.get_or_insert(error);
        }
    }

    /// A step that ends processes; `false`: they have not ended yet.
    fn end(&mut self, ended: Result<bool, HostError>) {
        match ended {
            Ok(ended) => self.waits |= !ended,
            Err(error) => self.step(Err(error)),
        }
    }

    /// Another look later; a failure is told first.
    fn wait(self, what: String) -> Result<Next, HostError> {
        self.finish().map(|()| Next::wait_for_end(what))
    }

    fn finish(self) -> Result<(), HostError> {
        self.failure.map_or(Ok(()), Err)
    }
}

/// Which processes of an object a step started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Started {
    /// Its own.
    pub itself: bool,
    /// Its TAP helper.
    pub tap: bool,
    /// Its route mirror.
    pub mirror: bool,
    /// The helper of its way out and in.
    pub management: bool,
}

impl Started {
    /// These as well.
    pub fn add(&mut self, more: Self) {
        self.itself |= more.itself;
        self.tap |= more.tap;
        self.mirror |= more.mirror;
        self.management |= more.management;
    }
}

/// A step that is being made.
pub struct Doing<'a> {
    /// Told what is being done.
    pub told: &'a (dyn Fn(&str) + Sync),
    /// An object inside of this one that is still known.
    pub inner: Option<Key>,
    /// Nothing is to be started before the back-off ends.
    pub held: bool,
    /// What runs of it is to be ended and started anew.
    pub renew: bool,
    /// Processes that were started.
    pub started: Started,
    /// Objects that this step gave something to do.
    pub wake: Vec<Key>,
    /// When it is to be looked at again, though nothing happened.
    pub again: Option<Duration>,
    /// What is wanted now, which may be newer than what the step is made for.
    pub newest: &'a (dyn Fn() -> Arc<Plan> + Sync),
}

impl Doing<'_> {
    /// What is done to an object that is made.
    fn verb(&self) -> &'static str {
        if self.renew { "restarting" } else { "starting" }
    }
}

/// Makes steps. What it holds can be made anew from what runs.
#[derive(Debug)]
pub struct Reconciler {
    machine: Arc<dyn Machine>,
    state: Arc<State>,
    places: Places,
    mux: Mutex<MuxSide>,
    externals: Mutex<BTreeMap<String, ExternalSide>>,
    /// Devices of externals as the last steps of those found them; `None`: there is none.
    devices: Mutex<BTreeMap<String, Option<Condition>>>,
    vnets: Mutex<BTreeMap<String, Arc<Mutex<VnetSide>>>>,
    sides: Mutex<BTreeMap<Key, Side>>,
    /// Held while the weight of all vnets together is written.
    weights: Mutex<()>,
    /// Held to read by every step; to write by who removes the places that all have in common.
    places_used: RwLock<()>,
}

/// What is known of a node's control side, or of a forwarding guest.
#[derive(Debug, Default)]
struct Side {
    /// The container that was made and has not been started.
    made: Option<Process>,
    taps: Option<Vec<OwnedFd>>,
    tap: Helper,
    mirror: Helper,
    management: Helper,
}

/// How far a helper is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Helper {
    /// As it should be, if it runs.
    #[default]
    Serves,
    /// Not to be relied on: to be made anew.
    Bad,
    /// Started then, and does not listen yet.
    Starting(Instant),
}

/// Where a helper listens.
#[derive(Clone, Copy)]
enum Socket<'a> {
    /// At one that it makes.
    Own(&'a Path),
    /// At one that was made for it.
    Made(&'a Path),
}

impl Socket<'_> {
    fn path(&self) -> &Path {
        match self {
            Self::Own(path) | Self::Made(path) => path,
        }
    }
}

/// What came of a look at a helper.
#[derive(PartialEq, Eq)]
enum Look {
    /// It runs, as before.
    Serves,
    /// It listens now, for the first time.
    Listens,
    /// It does not yet.
    Starting,
    /// It ended, and is not to be started yet.
    Held,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is inside is whole after every step; a panic elsewhere does not make it wrong.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Reconciler {
    /// For this machine; knows nothing of it yet.
    pub fn new(machine: Arc<dyn Machine>, state: Arc<State>, places: Places) -> Self {
        Self {
            machine,
            state,
            places,
            mux: Mutex::default(),
            externals: Mutex::default(),
            devices: Mutex::default(),
            vnets: Mutex::default(),
            sides: Mutex::default(),
            weights: Mutex::default(),
            places_used: RwLock::default(),
        }
    }

    /// One step of an object, which nobody else makes one of at the time.
    pub fn step(&self, key: &Key, plan: &Plan, doing: &mut Doing<'_>) -> Result<Next, HostError> {
        if *key == Key::Leftovers {
            return self.leftovers(doing);
        }
        let _used = self.places_used.read().unwrap_or_else(PoisonError::into_inner);
        let mux = self.mux_process();
        let result = self.step_of(key, plan, doing);
        match &result {
            // One came or is to come since the step looked for it.
            Err(HostError::NoMux) if !self.mux_failed() => return Ok(Next::After(Key::Mux)),
            Err(HostError::Control(error)) if error.is_nonsense_of_mux() => {
                self.distrust_mux(mux, doing);
            }
            // The next one wakes all that it has to be told of.
            Err(HostError::Control(error))
                if *key != Key::Mux && error.is_mux_gone() && self.is_gone(mux) =>
            {
                return Ok(Next::After(Key::Mux));
            }
            _ => {}
        }
        result
    }

    fn step_of(&self, key: &Key, plan: &Plan, doing: &mut Doing<'_>) -> Result<Next, HostError> {
        match key {
            Key::Mux => match &plan.mux {
                Some(wanted) => self.mux(wanted, plan, doing),
                None => self.remove_mux(doing),
            },
            Key::External(name) => match plan.externals.get(name) {
                Some(wanted) => self.external(name, wanted, plan, doing),
                None => self.remove_external(name, plan, doing),
            },
            Key::Vnet(name) => match plan.vnets.get(name) {
                Some(wanted) => self.vnet(name, wanted, plan, doing),
                None => self.remove_vnet(name, plan, doing),
            },
            Key::Node { vnet, node } => {
                let mut side = lock(&self.sides).remove(key).unwrap_or_default();
                let wanted = plan.vnets.get(vnet);
                let result = match wanted.and_then(|wanted| Some((wanted, wanted.nodes.get(node)?)))
                {
                    _ if !self.is_ready(vnet, plan) => Ok(Next::After(Key::vnet(vnet))),
                    Some((vnet, wanted)) => self.node(key, wanted, vnet, &mut side, doing),
                    None => self.remove_node(key, vnet, node, doing),
                };
                self.keep_side(key, side, &result);
                result
            }
            Key::Guest { vnet, node, number } => {
                let mut side = lock(&self.sides).remove(key).unwrap_or_default();
                let wanted = plan.vnets.get(vnet).and_then(|vnet| vnet.nodes.get(node));
                let wanted = wanted.and_then(|wanted| Some((wanted, wanted.guests.get(number)?)));
                let result = match wanted {
                    _ if !self.is_ready(vnet, plan) => Ok(Next::After(Key::vnet(vnet))),
                    Some((node, wanted)) => self.guest(key, node, wanted, plan, &mut side, doing),
                    None => self.remove_guest(key, vnet, node, *number, doing),
                };
                self.keep_side(key, side, &result);
                result
            }
            Key::Leftovers => Ok(Next::Done),
        }
    }

    fn keep_side(&self, key: &Key, side: Side, result: &Result<Next, HostError>) {
        if !matches!(result, Ok(Next::Gone)) {
            lock(&self.sides).insert(key.clone(), side);
        }
    }

    /// Sees to it that a helper runs and listens. Whoever is told that it listens has it serve, and
    /// says then how it is.
    fn helper(
        &self,
        spec: &HelperSpec,
        socket: Socket<'_>,
        how: &mut Helper,
        doing: &Doing<'_>,
    ) -> Result<Look, HostError> {
        let machine = &self.machine;
        match *how {
            Helper::Serves if machine.running(&spec.dir).is_some() => Ok(Look::Serves),
            Helper::Serves | Helper::Bad if doing.held => Ok(Look::Held),
            Helper::Serves | Helper::Bad => {
                *how = Helper::Bad;
                if machine.end(&spec.dir)? {
                    match socket {
                        Socket::Own(path) => machine.spawn(spec, path)?,
                        Socket::Made(path) => machine.spawn_served(spec, path)?,
                    };
                    *how = Helper::Starting(Instant::now());
                }
                Ok(Look::Starting)
            }
            Helper::Starting(_) if machine.listens(socket.path()) => Ok(Look::Listens),
            Helper::Starting(since) => {
                let who = || spec.id.clone();
                if machine.running(&spec.dir).is_none() {
                    *how = Helper::Bad;
                    return Err(HostError::Ended { who: who(), how: machine.ending(&spec.dir) });
                }
                if since.elapsed() > LISTEN_MAX {
                    *how = Helper::Bad;
                    let seconds = LISTEN_MAX.as_secs();
                    return Err(HostError::NotReady { who: who(), seconds });
                }
                Ok(Look::Starting)
            }
        }
    }

    /// Ends all processes of an object, each whatever becomes of the others; true if that is done.
    fn end(&self, key: &Key) -> Result<bool, HostError> {
        let mut removal = Removal::default();
        for directory in self.places.processes(key) {
            removal.end(self.machine.end(&directory));
        }
        let ended = !removal.waits;
        removal.finish().map(|()| ended)
    }

    /// Whether the journal says that an object was made from what has this hash, and the detail that
    /// it was confirmed with.
    fn made_from(&self, key: &Key, hash: &str) -> Result<Option<String>, HostError> {
        let thing = self.state.thing(&key.to_string())?;
        let same = thing.filter(|thing| thing.hash.as_deref() == Some(hash));
        Ok(same.map(|thing| thing.detail))
    }
}
