//! Moves one object after the other towards a [`Plan`].
//!
//! A step looks at the current state of an object, does the next thing, and returns what
//! follows ([`StepOutcome`]). Parts that are as planned are not touched. So the same code
//! creates, changes, repairs after any crash, adopts after pdpd's own crash, and removes.
//!
//! Each side effect is written to the journal before it happens. No step waits for
//! a process to become ready, to end or to release something. Those are states
//! that a later step checks again. [`crate::reconcile::run_loop`] decides when steps are made.
//!
//! Each kind of object has its own file, with its creation, change and removal.
//!
//! Ownership of TAP descriptors: this module and the node's TAP helper both
//! hold them. A restarted helper gets them from here; a restarted pdpd gets
//! them from the helpers. If both are gone, the control guest is recreated.

pub mod applied;
pub mod backoff;
mod external;
mod guest;
mod leftovers;
mod mux;
mod node;
mod node_step;
pub mod queue;
pub mod run_loop;
mod vnet;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use pdp_container::{HelperSpec, Process};
use pdp_net::interface::InterfaceState;

use crate::host::HostError;
use crate::intent::state::StateFile;
use crate::machine::Machine;
use crate::plan::key::{ObjectKey, PerProcess, ProcessRole};
use crate::plan::{DaemonPaths, Plan, TapHelperPlan};
use crate::reconcile::applied::AppliedSettings;
use crate::util::lock;
pub use external::CutOff;
use external::ExternalRuntime;
use mux::MuxRuntime;
use vnet::VnetRuntime;

/// Longest time for killed processes to end, including those in a cgroup.
const END_MAX: Duration = Duration::from_secs(10);

/// Longest time for a helper or the mux to listen after its start.
const LISTEN_MAX: Duration = Duration::from_secs(10);

/// Result of a step: the next action for the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// Nothing: it is as planned.
    Done,
    /// Another check: something is pending.
    Wait(PendingStep),
    /// A step once this object is as planned.
    After(ObjectKey),
    /// A step when its back-off ends: a process ended too soon after its start.
    BackingOff,
    /// Nothing: it is gone, and all that was known of it is forgotten.
    Gone,
}

/// Pending work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingStep {
    /// Description.
    pub what: String,
    /// Time after which it has failed; `None` if never.
    pub max: Option<Duration>,
}

impl StepOutcome {
    fn wait(what: impl Into<String>) -> Self {
        Self::Wait(PendingStep { what: what.into(), max: None })
    }

    fn wait_for_end(what: impl Into<String>) -> Self {
        Self::Wait(PendingStep { what: what.into(), max: Some(END_MAX) })
    }
}

/// Independent steps of a removal. Each is tried even if earlier ones
/// failed, and the first failure is reported.
#[derive(Debug, Default)]
struct Removal {
    failure: Option<HostError>,
    /// True if a killed process has not ended.
    waits: bool,
}

impl Removal {
    fn step(&mut self, done: Result<(), HostError>) {
        if let Err(error) = done {
            self.failure.get_or_insert(error);
        }
    }

    /// A step that ends processes; `false` means that they have not ended yet.
    fn end(&mut self, ended: Result<bool, HostError>) {
        match ended {
            Ok(ended) => self.waits |= !ended,
            Err(error) => self.step(Err(error)),
        }
    }

    /// Returns another check later, or the first failure.
    fn wait(self, what: String) -> Result<StepOutcome, HostError> {
        self.finish().map(|()| StepOutcome::wait_for_end(what))
    }

    fn finish(self) -> Result<(), HostError> {
        self.failure.map_or(Ok(()), Err)
    }
}

/// Context of a step.
pub struct StepContext<'a> {
    /// Receives what is being done.
    pub report: &'a (dyn Fn(&str) + Sync),
    /// An object inside of this one that is still known.
    pub inner: Option<ObjectKey>,
    /// True if nothing may be started before the back-off ends.
    pub backing_off: bool,
    /// True if its processes are to be restarted.
    pub renew: bool,
    /// Processes that the step started.
    pub started: BTreeSet<ProcessRole>,
    /// Objects that now have something to do because of this step.
    pub wake: Vec<ObjectKey>,
    /// Time of the next check if nothing happens before.
    pub recheck_after: Option<Duration>,
    /// Returns the current plan, which may be newer than that of the step.
    pub newest: &'a (dyn Fn() -> Arc<Plan> + Sync),
}

impl StepContext<'_> {
    /// Returns the verb for an object that is being created.
    fn verb(&self) -> &'static str {
        if self.renew { "restarting" } else { "starting" }
    }
}

/// Makes steps. Its state can be rebuilt from what runs.
#[derive(Debug)]
pub struct Reconciler {
    machine: Arc<dyn Machine>,
    state: Arc<StateFile>,
    places: DaemonPaths,
    mux: Mutex<MuxRuntime>,
    externals: Mutex<BTreeMap<String, ExternalRuntime>>,
    /// Devices of externals in the condition that the last steps found; `None` if missing.
    devices: Mutex<BTreeMap<String, Option<InterfaceState>>>,
    vnets: Mutex<BTreeMap<String, Arc<Mutex<VnetRuntime>>>>,
    runtimes: Mutex<BTreeMap<ObjectKey, GuestRuntime>>,
    /// Held while the weight of all vnets together is written.
    weights: Mutex<()>,
    /// Held for reading by every step, and for writing while common directories are removed.
    places_used: RwLock<()>,
}

/// Runtime state of a node's control side, or of a forwarding guest.
#[derive(Debug, Default)]
struct GuestRuntime {
    /// The created container that has not been started.
    made: Option<Process>,
    taps: Option<Vec<OwnedFd>>,
    helpers: PerProcess<HelperState>,
}

/// State of a helper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HelperState {
    /// It is as planned, if it runs.
    #[default]
    Serves,
    /// It is unreliable and must be recreated.
    Bad,
    /// It was started at this time and does not listen yet.
    Starting(Instant),
}

/// Socket of a helper.
#[derive(Clone, Copy)]
enum HelperListener<'a> {
    /// The helper creates it.
    Own(&'a Path),
    /// It was created for the helper.
    Made(&'a Path),
}

impl HelperListener<'_> {
    fn path(&self) -> &Path {
        match self {
            Self::Own(path) | Self::Made(path) => path,
        }
    }
}

/// Result of a helper's check.
#[derive(PartialEq, Eq)]
enum HelperCheck {
    /// It runs, as before.
    Serves,
    /// It listens now, for the first time.
    Listens,
    /// It does not listen yet.
    Starting,
    /// It ended and may not be started yet.
    BackingOff,
}

impl Reconciler {
    /// Creates a reconciler for this machine, without any knowledge of it.
    pub fn new(machine: Arc<dyn Machine>, state: Arc<StateFile>, places: DaemonPaths) -> Self {
        Self {
            machine,
            state,
            places,
            mux: Mutex::default(),
            externals: Mutex::default(),
            devices: Mutex::default(),
            vnets: Mutex::default(),
            runtimes: Mutex::default(),
            weights: Mutex::default(),
            places_used: RwLock::default(),
        }
    }

    /// Makes one step of an object. The caller ensures that no other
    /// step of the object is in progress.
    pub fn step(
        &self,
        key: &ObjectKey,
        plan: &Plan,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        if *key == ObjectKey::Leftovers {
            return self.leftovers(context);
        }
        let _used = self.places_used.read().unwrap_or_else(PoisonError::into_inner);
        let mux = self.mux_process();
        let result = self.step_of(key, plan, context);
        match &result {
            // Since the step looked for a mux, one came or is expected.
            Err(HostError::NoMux) if !self.mux_failed() => {
                return Ok(StepOutcome::After(ObjectKey::Mux));
            }
            Err(HostError::Control(error)) if error.is_nonsense_of_mux() => {
                self.distrust_mux(mux, context);
            }
            // The next mux wakes all objects that it needs.
            Err(HostError::Control(error))
                if *key != ObjectKey::Mux && error.is_mux_gone() && self.is_gone(mux) =>
            {
                return Ok(StepOutcome::After(ObjectKey::Mux));
            }
            _ => {}
        }
        result
    }

    fn step_of(
        &self,
        key: &ObjectKey,
        plan: &Plan,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        match key {
            ObjectKey::Mux => match &plan.mux {
                Some(wanted) => self.mux(wanted, plan, context),
                None => self.remove_mux(context),
            },
            ObjectKey::External(name) => match plan.externals.get(name) {
                Some(wanted) => self.external(name, wanted, plan, context),
                None => self.remove_external(name, plan, context),
            },
            ObjectKey::Vnet(name) => match plan.vnets.get(name) {
                Some(wanted) => self.vnet(name, wanted, plan, context),
                None => self.remove_vnet(name, plan, context),
            },
            ObjectKey::Node { vnet, node } => {
                let mut runtime = lock(&self.runtimes).remove(key).unwrap_or_default();
                let wanted = plan.vnets.get(vnet);
                let result = match wanted.and_then(|wanted| Some((wanted, wanted.nodes.get(node)?)))
                {
                    _ if !self.is_ready(vnet, plan) => {
                        Ok(StepOutcome::After(ObjectKey::vnet(vnet)))
                    }
                    Some((vnet, wanted)) => self.node(key, wanted, vnet, &mut runtime, context),
                    None => self.remove_node(key, vnet, node, context),
                };
                self.store_runtime(key, runtime, &result);
                result
            }
            ObjectKey::Guest { vnet, node, number } => {
                let mut runtime = lock(&self.runtimes).remove(key).unwrap_or_default();
                let wanted = plan.vnets.get(vnet).and_then(|vnet| vnet.nodes.get(node));
                let wanted = wanted.and_then(|wanted| Some((wanted, wanted.guests.get(number)?)));
                let result = match wanted {
                    _ if !self.is_ready(vnet, plan) => {
                        Ok(StepOutcome::After(ObjectKey::vnet(vnet)))
                    }
                    Some((node, wanted)) => {
                        self.guest(key, node, wanted, plan, &mut runtime, context)
                    }
                    None => self.remove_guest(key, vnet, node, *number, context),
                };
                self.store_runtime(key, runtime, &result);
                result
            }
            ObjectKey::Leftovers => Ok(StepOutcome::Done),
        }
    }

    fn store_runtime(
        &self,
        key: &ObjectKey,
        runtime: GuestRuntime,
        result: &Result<StepOutcome, HostError>,
    ) {
        if !matches!(result, Ok(StepOutcome::Gone)) {
            lock(&self.runtimes).insert(key.clone(), runtime);
        }
    }

    /// Makes sure that a helper runs and listens. On [`HelperCheck::Listens`]
    /// the caller must make it serve, and then set its state.
    fn helper(
        &self,
        spec: &HelperSpec,
        socket: HelperListener<'_>,
        how: &mut HelperState,
        context: &StepContext<'_>,
    ) -> Result<HelperCheck, HostError> {
        let machine = &self.machine;
        match *how {
            HelperState::Serves if machine.running(&spec.dir).is_some() => Ok(HelperCheck::Serves),
            HelperState::Serves | HelperState::Bad if context.backing_off => {
                Ok(HelperCheck::BackingOff)
            }
            HelperState::Serves | HelperState::Bad => {
                *how = HelperState::Bad;
                if machine.end(&spec.dir)? {
                    match socket {
                        HelperListener::Own(path) => machine.spawn(spec, path)?,
                        HelperListener::Made(path) => machine.spawn_served(spec, path)?,
                    };
                    *how = HelperState::Starting(Instant::now());
                }
                Ok(HelperCheck::Starting)
            }
            HelperState::Starting(_) if machine.listens(socket.path()) => Ok(HelperCheck::Listens),
            HelperState::Starting(since) => {
                let who = || spec.id.clone();
                if machine.running(&spec.dir).is_none() {
                    *how = HelperState::Bad;
                    return Err(HostError::Ended { who: who(), how: machine.ending(&spec.dir) });
                }
                if since.elapsed() > LISTEN_MAX {
                    *how = HelperState::Bad;
                    let seconds = LISTEN_MAX.as_secs();
                    return Err(HostError::NotReady { who: who(), seconds });
                }
                Ok(HelperCheck::Starting)
            }
        }
    }

    /// Makes sure that a TAP helper runs and serves the TAPs of a control side or guest.
    fn tap_helper(
        &self,
        plan: &TapHelperPlan,
        runtime: &mut GuestRuntime,
        context: &mut StepContext<'_>,
    ) -> Result<HelperCheck, HostError> {
        let how = &mut runtime.helpers[ProcessRole::Tap];
        let check =
            self.helper(&plan.process, HelperListener::Made(&plan.control), how, context)?;
        if check == HelperCheck::Listens {
            let taps = runtime.taps.as_deref().unwrap_or_default();
            self.machine.serve(plan, taps).inspect_err(|_| *how = HelperState::Bad)?;
            *how = HelperState::Serves;
            context.started.insert(ProcessRole::Tap);
        }
        Ok(check)
    }

    /// Ends all processes of an object; a failure does not stop the
    /// rest. Returns true if all have ended.
    fn end(&self, key: &ObjectKey) -> Result<bool, HostError> {
        let mut removal = Removal::default();
        for directory in self.places.processes(key) {
            removal.end(self.machine.end(&directory));
        }
        let ended = !removal.waits;
        removal.finish().map(|()| ended)
    }

    /// Checks whether the journal has an object made from inputs with
    /// this hash. Returns the settings with which it was confirmed.
    fn made_from(&self, key: &ObjectKey, hash: &str) -> Result<Option<AppliedSettings>, HostError> {
        let entry = self.state.journal_entry(&key.to_string())?;
        let same = entry.filter(|entry| entry.hash.as_deref() == Some(hash));
        Ok(same.map(|entry| AppliedSettings::from_journal(&entry.detail)))
    }
}
