//! Makes the machine equal a [`Plan`], as often as is asked, and says how each object is.
//!
//! Level-triggered: each run looks at what there is and does the differences; what is as planned
//! is not touched. So the same code brings up, changes, repairs after a crash of anything, adopts
//! after pdpd's own, and takes down. Each side effect is written down before it is done.
//! One object's failure is its own: it is told in its health, tried again with growing pauses
//! ([`Backoff`]), and the others go on.
//!
//! Who holds what: TAPs are held here and in the node's TAP helper. A helper that died gets them
//! from here; a new pdpd gets them from the helpers. Both gone: the control guest is made anew.
//!
//! Limit: [`TASKS_AT_ONCE`] containers at a time.

mod external;
mod scale;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdp_container::{Found, Process};
use pdp_net::interface::Interface;
use pdp_net::xdp::Xdp;
use pdp_proto::mux;

use crate::backoff::Backoff;
use crate::host::{self, Host, HostError, words};
use crate::key::Key;
use crate::plan::{GuestPlan, NodePlan, Places, Plan, VnetPlan};

/// Containers that are made at a time.
const TASKS_AT_ONCE: usize = 8;

/// Time for what is left in a cgroup to end once it was killed.
const CGROUP_WAIT: Duration = Duration::from_secs(10);

/// Pause before a device that is missing is looked for again.
const DEVICE_PAUSE: Duration = Duration::from_secs(1);

/// How an object is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Times that its process was started again since pdpd knows it.
    pub restarts: u64,
    /// Those of its TAP helper.
    pub tap_restarts: u64,
    /// Those of its route mirror.
    pub mirror_restarts: u64,
    /// What is wrong; `None`: nothing.
    pub problem: Option<String>,
}

/// Which processes of an object a step started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Started {
    itself: bool,
    tap: bool,
    mirror: bool,
}

impl Started {
    const NOTHING: Self = Self { itself: false, tap: false, mirror: false };
    const ITSELF: Self = Self { itself: true, tap: false, mirror: false };

    /// Adds to the restarts of an object that was there before.
    fn count(self, health: &mut Health) {
        health.restarts += u64::from(self.itself);
        health.tap_restarts += u64::from(self.tap);
        health.mirror_restarts += u64::from(self.mirror);
    }
}

/// How all objects are.
pub type Healths = BTreeMap<Key, Health>;

/// Told what is being done: steps done, steps in all, the step.
pub type Told<'a> = &'a (dyn Fn(u64, u64, &str) + Sync);

/// Makes the machine equal plans. What it holds can be made anew from what runs.
#[derive(Debug)]
pub struct Reconciler<'a> {
    host: &'a Host,
    taps: Mutex<BTreeMap<Key, Vec<OwnedFd>>>,
    backoffs: Mutex<BTreeMap<Key, Backoff>>,
    healths: Mutex<Healths>,
    mux: MuxSide,
    looked_for_strays: bool,
}

/// What the running mux was given.
#[derive(Debug, Default)]
struct MuxSide {
    process: Option<Process>,
    vnets: BTreeMap<String, mux::Vnet>,
    externals: BTreeMap<String, Attached>,
    /// Forwarding guests that get no frames before they have their routes.
    arriving: BTreeSet<Key>,
}

#[derive(Debug)]
struct Attached {
    told: mux::External,
    /// What it was made from: that of its journal.
    made_for: String,
    xdp: Option<Xdp>,
}

/// What one run came to.
#[derive(Debug)]
pub struct Outcome {
    /// When to run again though nothing happened; `None`: not needed.
    pub again: Option<Instant>,
    /// Directories of all processes that are to run.
    pub processes: BTreeSet<PathBuf>,
}

enum Task<'p> {
    Control(Key, &'p NodePlan, &'p VnetPlan),
    Guest(Key, &'p NodePlan, &'p GuestPlan),
}

impl Task<'_> {
    fn key(&self) -> &Key {
        match self {
            Self::Control(key, ..) | Self::Guest(key, ..) => key,
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is inside is whole after every step; a panic elsewhere does not make it wrong.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl<'a> Reconciler<'a> {
    /// For this machine; knows nothing of it yet.
    pub fn new(host: &'a Host) -> Self {
        Self {
            host,
            taps: Mutex::default(),
            backoffs: Mutex::default(),
            healths: Mutex::default(),
            mux: MuxSide::default(),
            looked_for_strays: false,
        }
    }

    /// How all objects were at the end of the last run.
    pub fn healths(&self) -> Healths {
        lock(&self.healths).clone()
    }

    /// Tries everything again at once that waits because it failed.
    pub fn forgive(&mut self) {
        lock(&self.backoffs).retain(|_, backoff| {
            backoff.forgive();
            true
        });
    }

    /// One run.
    pub fn run(&mut self, plan: &Plan, told: Told<'_>) -> Outcome {
        let wanted = wanted(plan);
        lock(&self.healths).retain(|key, _| wanted.contains(key));
        lock(&self.backoffs).retain(|key, _| wanted.contains(key));
        let mut again: Option<Instant> = None;
        let mut soon = |at: Instant| again = Some(again.map_or(at, |before| before.min(at)));

        let mux_runs = plan.mux.is_some() && self.mux(plan, told);
        if mux_runs && !self.externals(plan) {
            soon(Instant::now() + DEVICE_PAUSE);
        }
        let mut blocked = BTreeSet::new();
        for (name, vnet) in &plan.vnets {
            if let Err(error) = self.vnet(name, vnet, mux_runs, told) {
                lock(&self.healths).entry(Key::vnet(name)).or_default().problem =
                    Some(words(&error));
                blocked.insert(name);
            }
        }
        if let Err(error) = self.remove_unwanted(plan, &wanted, told) {
            tracing::warn!("taking down what is not wanted: {}", words(&error));
            soon(Instant::now() + DEVICE_PAUSE);
        }
        let tasks: VecDeque<Task<'_>> = plan
            .vnets
            .iter()
            .filter(|(name, _)| !blocked.contains(name))
            .flat_map(|(name, vnet)| tasks(name, vnet))
            .collect();
        for (cgroup, weight) in plan.weights(|name| !blocked.contains(name)) {
            if let Err(error) = self.host.runtime.cgroups().weigh(&cgroup, weight) {
                tracing::warn!("CPU weights: {}", words(&error));
                soon(Instant::now() + DEVICE_PAUSE);
                break;
            }
        }
        self.work(tasks, told);
        if mux_runs && !self.let_in(plan, told) {
            soon(Instant::now() + DEVICE_PAUSE);
        }
        let now = Instant::now();
        for at in lock(&self.backoffs).values().filter_map(|backoff| backoff.waits_until(now)) {
            soon(at);
        }
        if !blocked.is_empty() {
            soon(Instant::now() + DEVICE_PAUSE);
        }
        Outcome { again, processes: processes(plan) }
    }

    fn work(&self, tasks: VecDeque<Task<'_>>, told: Told<'_>) {
        let total = tasks.len() as u64;
        let done = AtomicU64::new(0);
        let threads = tasks.len().min(TASKS_AT_ONCE);
        let queue = Mutex::new(tasks);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let Some(task) = lock(&queue).pop_front() else { break };
                        let step = || {
                            let what = format!("starting {}", task.key());
                            told(done.load(Ordering::Relaxed), total, &what);
                        };
                        match &task {
                            Task::Control(key, node, vnet) => {
                                self.guarded(key, || self.control(key, node, vnet, &step));
                            }
                            Task::Guest(key, node, guest) => {
                                self.guarded(key, || self.guest(key, node, guest, &step));
                            }
                        }
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
    }

    /// Runs a step unless it failed lately, and keeps its object's health.
    fn guarded(&self, key: &Key, step: impl FnOnce() -> Result<Started, HostError>) {
        if lock(&self.backoffs).get(key).is_some_and(|backoff| backoff.waits(Instant::now())) {
            return;
        }
        let result = step();
        let now = Instant::now();
        let mut backoffs = lock(&self.backoffs);
        let backoff = backoffs.entry(key.clone()).or_default();
        let mut healths = lock(&self.healths);
        let known = healths.contains_key(key);
        let health = healths.entry(key.clone()).or_default();
        match result {
            Ok(started) => {
                if started != Started::NOTHING {
                    backoff.started(now);
                }
                if known {
                    started.count(health);
                }
                health.problem = None;
            }
            Err(error) => {
                backoff.failed(now);
                let problem = words(&error);
                tracing::warn!("{key}: {problem}");
                health.problem = Some(problem);
            }
        }
    }

    // ---- the mux and external interfaces

    fn mux(&mut self, plan: &Plan, told: Told<'_>) -> bool {
        let Some(wanted) = &plan.mux else { return false };
        let key = Key::Mux;
        let mut process = self.host.running(&wanted.process.dir);
        let host = self.host;
        self.guarded(&key, || {
            let thing = host.state.thing(&key.to_string())?;
            let same = thing.and_then(|thing| thing.hash).as_ref() == Some(&wanted.hash);
            let cgroups = host.runtime.cgroups();
            if same && process.is_some() {
                cgroups.ensure(&wanted.process.cgroup, &wanted.limits)?;
                return Ok(Started::NOTHING);
            }
            told(0, 1, "starting the mux");
            host.state.intend(&key.to_string(), "")?;
            host.make_directory(&crate::plan::Directory {
                path: host.places.run.join("mux"),
                uid: crate::plan::MUX_UID,
                gid: crate::plan::MUX_UID,
                mode: 0o711,
            })?;
            let socket = host.places.mux_control();
            process = None;
            // The old one's cgroup goes with it; the limits are there before the new one.
            host.runtime.delete(&wanted.process.dir)?;
            cgroups.ensure(&wanted.process.cgroup, &wanted.limits)?;
            process = Some(host.start_helper(&wanted.process, Some(("mux", &socket)))?);
            host.state.confirm(&key.to_string(), &wanted.hash, "")?;
            Ok(Started::ITSELF)
        });
        if process != self.mux.process {
            self.mux = MuxSide { process, ..MuxSide::default() };
        }
        process.is_some()
    }

    /// Whether all externals are as planned.
    fn externals(&mut self, plan: &Plan) -> bool {
        let mut whole = true;
        for (name, wanted) in &plan.externals {
            let key = Key::external(name);
            let result = self.external(name, wanted);
            let mut healths = lock(&self.healths);
            let health = healths.entry(key).or_default();
            health.problem = result.err().map(|error| words(&error));
            whole &= health.problem.is_none();
        }
        whole
    }

    /// Whether the device of an external is another one than the last run saw, or gone. The kernel
    /// is asked, so this is to be called now and then.
    pub fn devices_changed(&self) -> bool {
        self.mux.externals.values().any(|attached| {
            let told = &attached.told;
            told.device().is_some_and(|was| {
                Interface::by_name(&was.device).map_or(true, |device| {
                    (device.index, device.mac, device.mtu) != (was.ifindex, was.mac, told.mtu)
                })
            })
        })
    }

    // ---- vnets

    /// Directories and the mux's side of a vnet.
    fn vnet(
        &mut self,
        name: &str,
        plan: &VnetPlan,
        mux_runs: bool,
        told: Told<'_>,
    ) -> Result<(), HostError> {
        let key = Key::vnet(name);
        let host = self.host;
        if host.state.thing(&key.to_string())?.is_none() {
            host.state.intend(&key.to_string(), "")?;
        }
        for node in plan.nodes.values() {
            for directory in &node.directories {
                if !directory.path.is_dir() || self.mux.vnets.get(name) != Some(&plan.mux) {
                    host.make_directory(directory)?;
                }
            }
        }
        if mux_runs {
            self.hold_back(name, plan);
            let wanted = self.vnet_told(name, plan);
            if self.mux.vnets.get(name) != Some(&wanted) {
                self.let_out(name, plan, &wanted, told)?;
                host.mux.put_vnet(wanted.clone())?;
                self.mux.vnets.insert(name.into(), wanted);
            }
        }
        let mut healths = lock(&self.healths);
        let health = healths.entry(key).or_default();
        health.problem = (!mux_runs).then(|| "the mux does not run".to_string());
        Ok(())
    }

    /// The control side of a node: control guest or host, TAPs, TAP helper, route mirror.
    fn control(
        &self,
        key: &Key,
        plan: &NodePlan,
        vnet: &VnetPlan,
        step: &dyn Fn(),
    ) -> Result<Started, HostError> {
        let host = self.host;
        let journal = key.to_string();
        let limits = format!("{:?}", plan.control.limits);
        let thing = host.state.thing(&journal)?;
        let made = thing.as_ref().and_then(|thing| thing.hash.as_ref()) == Some(&plan.hash);
        let guest = host.running(&plan.control.dir);
        let mut anew = false;
        let guest = match guest {
            Some(guest) if made && self.take_back_taps(key, plan)? => {
                if thing.is_some_and(|thing| thing.detail != limits) {
                    host.runtime.update_limits(&plan.control.dir, &plan.control.limits)?;
                    host.state.confirm(&journal, &plan.hash, &limits)?;
                }
                guest
            }
            _ => {
                step();
                anew = true;
                host.state.intend(&journal, &limits)?;
                self.remove_control_side(key, &plan.directory)?;
                host::make_passable(&host.places.run, &plan.directory)?;
                let guest = host.runtime.create(&plan.control, &[])?;
                let taps = host.make_taps(guest, &plan.taps)?;
                lock(&self.taps).insert(key.clone(), taps);
                guest
            }
        };
        let mut started = Started { itself: anew, ..Started::NOTHING };
        if let Some(helper) = &plan.tap_helper
            && (anew || host.running(&helper.process.dir).is_none())
        {
            started.tap = true;
            let held = self.copies(key)?;
            host.start_tap_helper(helper, &held)?;
        }
        if let Some(mirror) = &plan.mirror
            && (anew || host.running(&mirror.process.dir).is_none())
        {
            started.mirror = true;
            let config = pdp_proto::mirror::Config {
                netns: host::namespace(guest, "net"),
                userns: Some(host::namespace(guest, "user")),
                ..mirror.config.clone()
            };
            let text = serde_json::to_vec_pretty(&config).unwrap_or_default();
            host::write_file(&mirror.config_file, &text)?;
            let socket = ("route mirror", mirror.config.control_socket.as_path());
            host.start_helper(&mirror.process, Some(socket))?;
        }
        self.set_carriers(key, plan, vnet)?;
        if anew {
            host.runtime.start(&plan.control.dir)?;
            host.state.confirm(&journal, &plan.hash, &limits)?;
        }
        Ok(started)
    }

    /// Whether this node's TAPs are held here now; asks its helper for them where they are not.
    fn take_back_taps(&self, key: &Key, plan: &NodePlan) -> Result<bool, HostError> {
        let Some(helper) = &plan.tap_helper else { return Ok(true) };
        if lock(&self.taps).contains_key(key) {
            return Ok(true);
        }
        if self.host.running(&helper.process.dir).is_none() {
            return Ok(false);
        }
        let taps = self.host.held_taps(helper)?;
        let held = taps.is_some();
        if let Some(taps) = taps {
            lock(&self.taps).insert(key.clone(), taps);
        }
        Ok(held)
    }

    fn copies(&self, key: &Key) -> Result<Vec<OwnedFd>, HostError> {
        let taps = lock(&self.taps);
        let taps = taps.get(key).map_or(&[][..], Vec::as_slice);
        taps.iter()
            .map(|tap| {
                tap.try_clone().map_err(|source| HostError::Io {
                    what: "can't copy the descriptor of a TAP of",
                    path: key.to_string().into(),
                    source,
                })
            })
            .collect()
    }

    /// A port has carrier where its link is up; one without a link has none.
    fn set_carriers(&self, key: &Key, plan: &NodePlan, vnet: &VnetPlan) -> Result<(), HostError> {
        let taps = lock(&self.taps);
        let Some(taps) = taps.get(key) else { return Ok(()) };
        for (index, tap) in taps.iter().enumerate().take(plan.taps.len()) {
            pdp_net::tap::set_carrier(tap.as_fd(), vnet.carrier(key.node_name(), index as u16))?;
        }
        Ok(())
    }

    /// A forwarding guest.
    fn guest(
        &self,
        key: &Key,
        node: &NodePlan,
        plan: &GuestPlan,
        step: &dyn Fn(),
    ) -> Result<Started, HostError> {
        let host = self.host;
        let journal = key.to_string();
        let limits = format!("{:?}", plan.container.limits);
        let directory = &plan.container.dir;
        let thing = host.state.thing(&journal)?;
        let made = thing.as_ref().and_then(|thing| thing.hash.as_ref()) == Some(&plan.hash);
        let runs = host.running(directory).is_some();
        let helper_runs = match &plan.taps {
            Some((_, helper)) => host.running(&helper.process.dir).is_some(),
            None => true,
        };
        if made && runs && helper_runs {
            if thing.is_some_and(|thing| thing.detail != limits) {
                host.runtime.update_limits(directory, &plan.container.limits)?;
                host.say_quota(plan)?;
                host.state.confirm(&journal, &plan.hash, &limits)?;
            }
            return Ok(Started::NOTHING);
        }
        step();
        host.state.intend(&journal, &limits)?;
        self.remove_guest(key, &node.directory)?;
        for directory in &node.directories {
            host.make_directory(directory)?;
        }
        host.say_quota(plan)?;
        let guest = host.runtime.create(&plan.container, &[])?;
        if let Some((taps, helper)) = &plan.taps {
            let made = host.make_taps(guest, taps)?;
            host.start_tap_helper(helper, &made)?;
        }
        host.runtime.start(directory)?;
        host.state.confirm(&journal, &plan.hash, &limits)?;
        Ok(Started::ITSELF)
    }

    // ---- taking down

    fn remove_control_side(&self, key: &Key, directory: &Path) -> Result<(), HostError> {
        let host = self.host;
        host.runtime.delete(&directory.join("helpers/mirror"))?;
        host.runtime.delete(&directory.join("helpers/tap"))?;
        host.runtime.delete(&directory.join("control"))?;
        lock(&self.taps).remove(key);
        Ok(())
    }

    fn remove_guest(&self, key: &Key, node: &Path) -> Result<(), HostError> {
        let Key::Guest { number, .. } = key else { return Ok(()) };
        self.host.runtime.delete(&node.join(format!("helpers/tap-g{number}")))?;
        self.host.runtime.delete(&node.join(format!("g{number}")))?;
        Ok(())
    }

    /// Takes down what the journal knows and the plan does not.
    fn remove_unwanted(
        &mut self,
        plan: &Plan,
        wanted: &BTreeSet<Key>,
        told: Told<'_>,
    ) -> Result<(), HostError> {
        let host = self.host;
        if !self.looked_for_strays {
            self.remove_strays(plan)?;
            self.looked_for_strays = true;
        }
        let mut unwanted: Vec<(Key, String)> = Vec::new();
        for (text, thing) in host.state.things()? {
            match text.parse::<Key>() {
                Ok(key) if wanted.contains(&key) => {}
                Ok(key) => unwanted.push((key, thing.detail)),
                Err(_) => tracing::warn!("journal: {text:?} is not of this version; left alone"),
            }
        }
        // Keys are in order: the mux, externals, vnets, nodes, guests. Inner things go first.
        unwanted.sort_by(|(a, _), (b, _)| b.cmp(a));
        let total = unwanted.len() as u64;
        let done = AtomicU64::new(0);
        let (parts, wholes): (Vec<_>, Vec<_>) = unwanted
            .into_iter()
            .partition(|(key, _)| matches!(key, Key::Guest { .. } | Key::Node { .. }));
        for (key, _) in &wholes {
            // The mux forgets it first, so that nothing is sent to what goes.
            if let Key::Vnet(vnet) = key
                && self.mux.process.is_some()
            {
                self.mux.vnets.remove(vnet);
                if host.mux.hello()?.vnets.contains(vnet) {
                    host.mux.delete_vnet(vnet)?;
                }
            }
        }
        for guests in [true, false] {
            let queue: VecDeque<&Key> = parts
                .iter()
                .map(|(key, _)| key)
                .filter(|key| matches!(key, Key::Guest { .. }) == guests)
                .collect();
            self.remove_parts(queue, &|key| {
                told(done.fetch_add(1, Ordering::Relaxed), total, &format!("stopping {key}"));
            })?;
        }
        for (key, detail) in wholes {
            told(done.fetch_add(1, Ordering::Relaxed), total, &format!("stopping {key}"));
            match &key {
                Key::Vnet(vnet) => {
                    host.runtime.cgroups().remove(&Places::vnet_cgroup(vnet), CGROUP_WAIT)?;
                    host::remove_directory(&host.places.run.join("vnets").join(vnet))?;
                }
                Key::External(name) => {
                    let known = self.mux.externals.remove(name);
                    if self.mux.process.is_some() && known.is_some() {
                        host.mux.delete_external(name)?;
                    }
                    self.remove_external(name, &detail)?;
                }
                Key::Mux => {
                    host.runtime.delete(&host.places.run.join("mux/process"))?;
                    self.mux = MuxSide::default();
                    host.runtime.cgroups().remove("mux", CGROUP_WAIT)?;
                    host::remove_directory(&host.places.run.join("mux"))?;
                }
                Key::Node { .. } | Key::Guest { .. } => {}
            }
            host.state.forget(&key.to_string())?;
        }
        if plan.externals.is_empty() {
            host::remove_directory(&host.places.run.join("externals"))?;
        }
        if plan.vnets.is_empty() {
            host.runtime.cgroups().remove("vnets", CGROUP_WAIT)?;
            host::remove_directory(&host.places.run.join("vnets"))?;
        }
        Ok(())
    }

    /// Ends what runs in the run directory and is in no plan, where the journal was lost too.
    fn remove_strays(&self, plan: &Plan) -> Result<(), HostError> {
        let known = processes(plan);
        for found in self.host.runtime.list(&self.host.places.run)? {
            let directory = match &found {
                Found::Guest(guest) => &guest.dir,
                Found::Helper(helper) => &helper.dir,
            };
            if !known.contains(directory) {
                tracing::info!("{} is not wanted", directory.display());
                self.host.runtime.delete(directory)?;
            }
        }
        Ok(())
    }

    fn remove_parts(
        &self,
        queue: VecDeque<&Key>,
        told: &(dyn Fn(&Key) + Sync),
    ) -> Result<(), HostError> {
        let threads = queue.len().min(TASKS_AT_ONCE);
        let queue = Mutex::new(queue);
        let failure = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let Some(key) = lock(&queue).pop_front() else { break };
                        told(key);
                        if let Err(error) = self.remove_part(key) {
                            *lock(&failure) = Some(error);
                        }
                    }
                });
            }
        });
        lock(&failure).take().map_or(Ok(()), Err)
    }

    fn remove_part(&self, key: &Key) -> Result<(), HostError> {
        let host = self.host;
        let (Key::Node { vnet, node } | Key::Guest { vnet, node, .. }) = key else {
            return Ok(());
        };
        let directory = host.places.node(vnet, node);
        match key {
            Key::Guest { number, .. } => {
                self.remove_guest(key, &directory)?;
                let cgroup = format!("{}/{node}.g{number}", Places::vnet_cgroup(vnet));
                host.runtime.cgroups().remove(&cgroup, CGROUP_WAIT)?;
                host::remove_directory(&directory.join(format!("g{number}")))?;
            }
            _ => {
                self.remove_control_side(key, &directory)?;
                let cgroup = format!("{}/{node}", Places::vnet_cgroup(vnet));
                host.runtime.cgroups().remove(&cgroup, CGROUP_WAIT)?;
                host::remove_directory(&directory)?;
            }
        }
        host.state.forget(&key.to_string())?;
        Ok(())
    }
}

fn tasks<'p>(name: &str, vnet: &'p VnetPlan) -> Vec<Task<'p>> {
    let mut tasks = Vec::new();
    for (node, plan) in &vnet.nodes {
        tasks.push(Task::Control(Key::node(name, node), plan, vnet));
        for (&number, guest) in &plan.guests {
            tasks.push(Task::Guest(Key::guest(name, node, number), plan, guest));
        }
    }
    tasks
}

/// Keys of all objects of a plan.
fn wanted(plan: &Plan) -> BTreeSet<Key> {
    let mut keys: BTreeSet<Key> = plan.externals.keys().map(|name| Key::external(name)).collect();
    keys.extend(plan.mux.is_some().then_some(Key::Mux));
    for (name, vnet) in &plan.vnets {
        keys.insert(Key::vnet(name));
        keys.extend(tasks(name, vnet).iter().map(|task| task.key().clone()));
    }
    keys
}

fn processes(plan: &Plan) -> BTreeSet<PathBuf> {
    let mut directories = BTreeSet::new();
    directories.extend(plan.mux.iter().map(|mux| mux.process.dir.clone()));
    for node in plan.vnets.values().flat_map(|vnet| vnet.nodes.values()) {
        directories.insert(node.control.dir.clone());
        directories.extend(node.tap_helper.iter().map(|helper| helper.process.dir.clone()));
        directories.extend(node.mirror.iter().map(|mirror| mirror.process.dir.clone()));
        for guest in node.guests.values() {
            directories.insert(guest.container.dir.clone());
            directories.extend(guest.taps.iter().map(|(_, helper)| helper.process.dir.clone()));
        }
    }
    directories
}
