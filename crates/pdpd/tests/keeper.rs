//! The reconcile loop on a fake machine: cost of a change, and isolation of failures.

mod pretend;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use pdp_api::{Detail, EventKind, WatchLine};
use pdp_net::route::StaticRouteSpec;
use pdp_proto::routes;
use pdp_spec::SourceFile;
use pdpd::access::AccessScope;
use pdpd::events::log::EventFilter;
use pdpd::events::{WatchReader, WatchStart};
use pdpd::intent::model::Model;
use pdpd::intent::state::StateFile;
use pdpd::machine::Machine;
use pdpd::plan::key::{ObjectKey, PerProcess, ProcessRole};
use pdpd::plan::{DaemonPaths, NodePlan, Plan};
use pdpd::reconcile::applied::AppliedSettings;
use pdpd::reconcile::run_loop::{ChangeProgress, ReconcileLoop};
use pretend::{BROKEN, Pretend};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Longest wait; far beyond the expected time of anything.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// Locked for writing by a test that measures the CPU time of the whole
/// process, and for reading by all others.
static ALONE: RwLock<()> = RwLock::new(());

const SUBSTRATE: &str = "
apiVersion: pdp/v1
kind: Substrate
metadata: {name: node}
spec:
  mux: {cpus: \"0\", power: 0.5}
  forwardingEngines: {fe1: {cpus: \"1-63\", capacity: 63}}
";

fn cpus() -> BTreeSet<u32> {
    (0..64).collect()
}

fn places() -> DaemonPaths {
    DaemonPaths { run: "/run/pretend".into(), lib: "/usr/lib/pdp".into(), pins: "/sys/none".into() }
}

/// Returns the records of a control guest or host.
fn control(vnet: &str, node: &str) -> PathBuf {
    places().record(&ObjectKey::node(vnet, node), ProcessRole::Main)
}

/// A router and a host.
fn vnet(name: &str, guests: u32) -> String {
    format!(
        "
---
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {{name: {name}}}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {{eth0: {{addresses: [10.0.1.1/24]}}}}
      dataPlane: {{power: {guests}m, guests: {guests}}}
    h1: {{kind: host, interfaces: {{eth0: {{addresses: [10.0.1.2/24]}}}}}}
  links: [{{endpoints: [\"r1:eth0\", \"h1:eth0\"]}}]
"
    )
}

fn apply(before: &Model, text: String, may_exist: impl Fn(&str) -> bool) -> Model {
    let file = SourceFile { name: "test.yaml".into(), text, ..SourceFile::default() };
    let documents = pdp_spec::parse(&[file]).unwrap_or_else(|faults| panic!("{faults:#?}"));
    let substrate = before.substrate.is_none();
    let existing = before.existing(&cpus(), substrate);
    let intent =
        pdp_spec::check(&documents, &existing).unwrap_or_else(|faults| panic!("{faults:#?}"));
    before.with(intent, &places(), &cpus(), may_exist).unwrap()
}

/// A running reconcile loop.
struct Kept {
    machine: Arc<Pretend>,
    state: Arc<StateFile>,
    reconcile_loop: Arc<ReconcileLoop>,
    model: Model,
    thread: Option<std::thread::JoinHandle<()>>,
    directory: tempfile::TempDir,
    /// Guard that delays measurements of CPU time until it is dropped.
    beside: Option<RwLockReadGuard<'static, ()>>,
}

impl Kept {
    fn new() -> Self {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
        // Measure pdpd, and not the disk.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut kept = Self::start(Arc::new(Pretend::new(&places())), directory);
        let model = apply(&kept.model, SUBSTRATE.into(), |_| false);
        kept.store(&model);
        kept.model = model;
        kept
    }

    /// Loads the stored state, on a machine where processes may run.
    fn start(machine: Arc<Pretend>, directory: tempfile::TempDir) -> Self {
        let state = Arc::new(StateFile::open(directory.path()).unwrap());
        let documents = state.documents().unwrap();
        let allocations = state.allocations().unwrap();
        let mut model = Model::load(&places(), &cpus(), &documents, allocations).unwrap();
        model.remains = Arc::new(state.remains().unwrap());
        let reconcile_loop =
            ReconcileLoop::new(machine.clone(), state.clone(), places(), model.wanted()).unwrap();
        let reconcile_loop = Arc::new(reconcile_loop);
        let runs = reconcile_loop.clone();
        let thread = Some(std::thread::spawn(move || runs.run()));
        Self { machine, state, reconcile_loop, model, thread, directory, beside: None }
    }

    /// Stops the loop, and starts another one.
    fn again(mut self) -> Self {
        self.stop();
        let directory = std::mem::replace(&mut self.directory, tempfile::tempdir().unwrap());
        let mut kept = Self::start(self.machine.clone(), directory);
        kept.beside = self.beside.take();
        kept
    }

    fn stop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.reconcile_loop.stop();
        assert!(thread.join().is_ok() || std::thread::panicking());
    }

    /// Makes a directory impossible to remove from now on.
    fn refuse(&self, directory: PathBuf) {
        self.machine.set(|inside| {
            inside.refuses.insert(directory);
        });
    }

    /// Returns the model that a check of quotas uses.
    fn counted(&self) -> Model {
        let mut model = self.model.clone();
        if let Some(open) = self.reconcile_loop.unsettled(&model.plan) {
            let node = |node: Option<&str>| node.map(str::to_owned);
            model.forget_remains(|vnet, of| !open.contains(&(vnet.to_owned(), node(of))));
        }
        model
    }

    fn store(&self, model: &Model) {
        self.state.commit(&model.change_from(&self.model)).unwrap();
    }

    fn want(&mut self, model: Model) -> Receiver<ChangeProgress> {
        self.store(&model);
        self.model = model;
        self.reconcile_loop.want(self.model.wanted(), |_| false)
    }

    fn apply(&mut self, text: String) -> Receiver<ChangeProgress> {
        self.want(apply(&self.model, text, |vnet| self.reconcile_loop.may_exist(vnet)))
    }

    fn delete(&mut self, vnet: &str) -> Receiver<ChangeProgress> {
        self.want(self.model.without(vnet, &places(), &cpus()).unwrap())
    }

    /// Creates this many vnets, and waits until the loop is idle.
    fn with_vnets(count: u32) -> Self {
        let beside = ALONE.read().unwrap_or_else(PoisonError::into_inner);
        let mut kept = Self::made(count);
        kept.beside = Some(beside);
        kept
    }

    fn made(count: u32) -> Self {
        let mut kept = Self::new();
        let text: String = (0..count).map(|number| vnet(&format!("v{number}"), 1)).collect();
        wait(&kept.apply(text));
        kept.quiet();
        kept
    }

    /// Waits until no more steps are made.
    fn quiet(&self) {
        let begin = Instant::now();
        let mut before = (self.reconcile_loop.steps(), begin);
        while before.1.elapsed() < Duration::from_millis(300) {
            assert!(begin.elapsed() < WAIT_MAX, "steps without end");
            std::thread::sleep(Duration::from_millis(20));
            if self.reconcile_loop.steps() != before.0 {
                before = (self.reconcile_loop.steps(), Instant::now());
            }
        }
    }

    /// Returns the objects of all events of one kind so far.
    fn objects(&self, what: EventKind) -> BTreeSet<String> {
        let filter = EventFilter { scope: AccessScope::Node, vnet: None };
        let (hub, from) = (self.reconcile_loop.watch_hub(), WatchStart::Since(0));
        let mut reader = WatchReader::new(hub, filter, WAIT_MAX, Detail::None, &from);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut objects = BTreeSet::new();
        let pause = Duration::from_millis(100);
        while let Ok(lines) =
            runtime.block_on(async { tokio::time::timeout(pause, reader.next()).await })
        {
            for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                if let WatchLine::Event(event) = serde_json::from_slice(line).unwrap()
                    && event.what == what
                {
                    objects.insert(event.object);
                }
            }
        }
        objects
    }

    fn guest(&self, vnet: &str, number: u32) -> PathBuf {
        places().record(&ObjectKey::guest(vnet, "r1", number), ProcessRole::Main)
    }

    /// Kills a guest. Returns the time until another one runs.
    fn replaced(&self, vnet: &str) -> Duration {
        let dir = self.guest(vnet, 0);
        let before = self.machine.pid(&dir).expect("it runs");
        let killed = Instant::now();
        self.machine.kill(&dir);
        eventually("another one runs", || self.machine.pid(&dir).is_some_and(|pid| pid != before));
        killed.elapsed()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.machine.set(|inside| (inside.hangs, inside.holds) = (None, None));
        self.stop();
    }
}

fn wait(news: &Receiver<ChangeProgress>) {
    loop {
        match news.recv_timeout(WAIT_MAX).expect("the keeper comes to an end") {
            ChangeProgress::Done => return,
            ChangeProgress::Step(_) => {}
        }
    }
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < WAIT_MAX, "not after {WAIT_MAX:?}: {what}");
        std::thread::sleep(Duration::from_micros(500));
    }
}

fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the steps of an action, and prints its steps, time and CPU time,
/// until the loop is idle again. The CPU time is that of the whole process.
fn cost(kept: &mut Kept, what: &str, act: impl FnOnce(&mut Kept) -> Duration) -> u64 {
    kept.quiet();
    let (steps, used) = (kept.reconcile_loop.steps(), cpu());
    let took = act(kept);
    let used = cpu() - used;
    kept.quiet();
    let steps = kept.reconcile_loop.steps() - steps;
    let vnets = kept.model.vnets.len();
    println!("{what} among {vnets} vnets: {steps} steps, {took:?}, {used:?} of CPU");
    steps
}

/// Most steps of a change. A vnet has two parts that are checked when one of its guests changes.
/// Each is checked a few times while it waits for the other, however many other vnets exist.
const STEPS_MAX: u64 = 12;

#[test]
fn change_cost_is_independent_of_other_vnets() {
    for count in [10, 1000] {
        let mut kept = Kept::with_vnets(count);
        let problems = kept.reconcile_loop.problems(|_| true);
        assert!(problems.is_empty(), "{problems:?}");
        // The mux, and per vnet a control guest, a host, two TAP helpers, a mirror and a guest.
        assert_eq!(kept.machine.lock().processes.len(), 1 + 6 * count as usize);
        let steps = cost(&mut kept, "one more guest", |kept| {
            let begin = Instant::now();
            wait(&kept.apply(vnet("v7", 2)));
            begin.elapsed()
        });
        assert!((1..=STEPS_MAX).contains(&steps), "{steps} steps");
        assert!(kept.machine.pid(&kept.guest("v7", 1)).is_some());
        let steps = cost(&mut kept, "a dead guest", |kept| kept.replaced("v5"));
        assert!((1..=STEPS_MAX).contains(&steps), "{steps} steps");
        let steps = cost(&mut kept, "one less vnet", |kept| {
            let begin = Instant::now();
            wait(&kept.delete("v3"));
            begin.elapsed()
        });
        assert!((1..=2 * STEPS_MAX).contains(&steps), "{steps} steps");
        assert_eq!(kept.reconcile_loop.unwanted("v3"), []);
        let model = apply(&kept.model, vnet("v8", 2), |_| false);
        let same = |name: &str| Arc::ptr_eq(&kept.model.plan.vnets[name], &model.plan.vnets[name]);
        assert!(same("v1") && !same("v8"));
    }
}

/// Number of changes among few and among many vnets, alternating.
const ROUNDS: u32 = 25;

/// Largest ratio of the median CPU time among 1,000 vnets to that among
/// 10. The actual ratio is below two, since some maps of pointers are
/// copied. It would be above ten if each change looked at all vnets.
const CPU_TIMES_MAX: u32 = 4;

#[test]
fn change_cpu_time_hardly_grows_with_vnets() {
    let _alone = ALONE.write().unwrap_or_else(PoisonError::into_inner);
    let mut nodes = [10, 1000].map(Kept::made);
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (kept, times) in nodes.iter_mut().zip(&mut times) {
            let used = cpu();
            // Parsed, checked, planned, stored, and made.
            wait(&kept.apply(vnet("v7", 1 + (round + 1) % 2)));
            times.push(cpu() - used);
        }
    }
    let [few, many] = times.map(|mut times| {
        times.sort();
        times[times.len() / 2]
    });
    println!("CPU time of a change: {few:?} among 10 vnets, {many:?} among 1,000");
    assert!(many < few * CPU_TIMES_MAX, "{many:?} among 1,000 vnets, {few:?} among 10");
}

#[test]
fn hanging_containers_do_not_block_other_vnets() {
    let mut kept = Kept::with_vnets(2);
    kept.machine.set(|inside| inside.hangs = Some("/evil".into()));
    let evil: Vec<_> =
        (0..6).map(|number| kept.apply(vnet(&format!("evil{number}"), 40))).collect();
    std::thread::sleep(Duration::from_millis(200));
    let took = kept.replaced("v1");
    println!("beside six vnets of which each has all the workers that it may have: {took:?}");
    wait(&kept.apply(vnet("good", 1)));
    assert!(kept.machine.pid(&kept.guest("good", 0)).is_some());
    wait(&kept.delete("v0"));
    assert_eq!(kept.reconcile_loop.unwanted("v0"), []);
    for number in 0..6 {
        assert_eq!(kept.machine.pid(&kept.guest(&format!("evil{number}"), 0)), None);
    }
    kept.machine.set(|inside| inside.hangs = None);
    evil.iter().for_each(wait);
    assert!(kept.machine.pid(&kept.guest("evil5", 39)).is_some());
}

#[test]
fn failed_removal_is_reported_and_blocks_no_other() {
    let mut kept = Kept::with_vnets(3);
    let node = places().node("v0", "h1");
    kept.refuse(node);
    let key = ObjectKey::node("v0", "h1");
    wait(&kept.delete("v0"));
    // The failure is reported at once; the rest may still be in progress.
    let stays = [ObjectKey::vnet("v0"), key.clone()];
    eventually("all else is gone", || kept.reconcile_loop.unwanted("v0") == stays);
    let problems = kept.reconcile_loop.problems(|_| true);
    assert!(matches!(&problems[..], [(of, problem)] if *of == key && problem.contains("can't")));
    wait(&kept.delete("v1"));
    assert_eq!(kept.reconcile_loop.unwanted("v1"), []);
    kept.replaced("v2");
    // It is retried automatically.
    kept.machine.set(|inside| inside.refuses.clear());
    eventually("it is gone", || kept.reconcile_loop.unwanted("v0").is_empty());
    assert_eq!(kept.reconcile_loop.problems(|_| true), []);
}

/// A removal of several steps: an intended end of a process is not reported as a failure.
#[test]
fn processes_ended_by_removal_are_not_failures() {
    let mut kept = Kept::with_vnets(1);
    kept.machine.set(|inside| inside.busy = Some(DaemonPaths::node_cgroup("v0", "h1")));
    let news = kept.delete("v0");
    let host = control("v0", "h1");
    eventually("it has ended", || kept.machine.running(&host).is_none());
    let steps = kept.reconcile_loop.steps();
    eventually("more steps are made", || kept.reconcile_loop.steps() > steps + 4);
    kept.machine.set(|inside| inside.busy = None);
    wait(&news);
    let (gone, asked) = {
        let inside = kept.machine.lock();
        (inside.gone.contains(&host), inside.asked.clone())
    };
    assert_eq!((gone, asked), (true, BTreeSet::new()));
}

/// A guest whose directory can't be removed: all processes of its
/// network end, and the volumes of its node are removed.
#[test]
fn unremovable_guest_keeps_neither_processes_nor_volumes() {
    let mut kept = Kept::with_vnets(2);
    let volume = "kind: router\n      volumes: [\"a:/a\"]\n";
    let text = vnet("v0", 2).replace("kind: router\n", volume);
    wait(&kept.apply(text));
    let stays = places().node("v0", "r1").join("g1");
    kept.machine.set(|inside| assert!(inside.refuses.insert(stays.clone())));
    let news = kept.delete("v0");
    let of_v0 = |dir: &PathBuf| dir.to_string_lossy().contains("/v0.");
    eventually("nothing of it runs", || !kept.machine.lock().processes.keys().any(of_v0));
    wait(&news);
    let guest = ObjectKey::guest("v0", "r1", 1);
    let left = [ObjectKey::vnet("v0"), ObjectKey::node("v0", "r1"), guest.clone()];
    eventually("all else is gone", || kept.reconcile_loop.unwanted("v0") == left);
    let volumes = control("v0", "r1");
    assert_eq!(kept.machine.lock().volumes.get(&volumes), Some(&BTreeSet::new()));
    let stuck = kept.reconcile_loop.stuck();
    assert!(matches!(&stuck[..], [one] if one.key == guest && one.why.contains("can't remove")));
    assert!(stuck[0].time <= WAIT_MAX);
    // The same after a restart: the mux and the other network run, and stopping ends both.
    let mut kept = kept.again();
    eventually("it is tried", || kept.reconcile_loop.stuck().len() == 1);
    kept.replaced("v1");
    let mut stopped = kept.model.clone();
    stopped.allocations.stopped = true;
    wait(&kept.want(stopped));
    eventually("nothing runs", || kept.machine.lock().processes.is_empty());
    kept.machine.set(|inside| inside.refuses.clear());
    eventually("all is gone", || kept.state.journal().unwrap().is_empty());
}

/// A network's processes end though the mux does not delete it.
#[test]
fn vnet_processes_end_though_mux_keeps_it() {
    let mut kept = Kept::with_vnets(2);
    kept.machine.set(|inside| inside.keeps = Some("v0".into()));
    let news = kept.delete("v0");
    let of_v0 = |dir: &PathBuf| dir.to_string_lossy().contains("/v0.");
    eventually("nothing of it runs", || !kept.machine.lock().processes.keys().any(of_v0));
    eventually(
        "it is told",
        || matches!(&kept.reconcile_loop.stuck()[..], [one] if one.key == ObjectKey::vnet("v0")),
    );
    assert!(kept.machine.lock().vnets.contains_key("v0"));
    kept.machine.set(|inside| inside.keeps = None);
    wait(&news);
    assert!(
        kept.reconcile_loop.unwanted("v0").is_empty()
            && !kept.machine.lock().vnets.contains_key("v0")
    );
}

#[test]
fn mux_with_invalid_replies_is_replaced() {
    let mut kept = Kept::with_vnets(2);
    let dir = places().records().join("mux");
    let liar = kept.machine.pid(&dir).expect("it runs");
    kept.machine.set(|inside| inside.lies_below = liar + 1);
    drop(kept.apply(vnet("one", 1)));
    let mux_has = |kept: &Kept, vnet: &str| kept.machine.lock().vnets.contains_key(vnet);
    eventually("another one knows it", || mux_has(&kept, "one"));
    assert_ne!(kept.machine.pid(&dir), Some(liar));
    // If this continues, the next mux comes later each time: after 0.2, 0.4 and 0.8 s.
    kept.machine.set(|inside| inside.lies_below = u32::MAX);
    let (begin, mut muxes) = (Instant::now(), BTreeSet::new());
    drop(kept.apply(vnet("two", 1)));
    eventually("some have come and gone", || {
        muxes.extend(kept.machine.pid(&dir));
        muxes.len() == 4
    });
    assert!(begin.elapsed() > Duration::from_secs(1), "{:?}", begin.elapsed());
    assert!(!mux_has(&kept, "two"));
    kept.machine.set(|inside| inside.lies_below = 0);
    eventually("the last one knows all", || {
        ["v0", "v1", "one", "two"].iter().all(|vnet| mux_has(&kept, vnet))
    });
}

#[test]
fn vnet_step_waits_for_the_replacement_mux() {
    let mut kept = Kept::with_vnets(1);
    let mux = places().records().join("mux");
    let hanging =
        |kept: &Kept, count| eventually("they hang", || kept.machine.lock().hanging == count);
    kept.machine.set(|inside| inside.holds = Some(DaemonPaths::vnet_cgroup("v0")));
    let news = kept.apply(vnet("v0", 2));
    hanging(&kept, 1);
    kept.machine.set(|inside| inside.hangs = Some("mux".into()));
    kept.machine.kill(&mux);
    hanging(&kept, 2);
    kept.machine.set(|inside| inside.holds = None);
    kept.quiet();
    assert_eq!(kept.reconcile_loop.problems(|_| true), []);
    kept.machine.set(|inside| inside.hangs = None);
    wait(&news);
    assert_eq!(kept.reconcile_loop.problems(|_| true), []);
}

#[test]
fn newer_change_does_not_report_older_failures() {
    let mut kept = Kept::with_vnets(1);
    kept.machine.set(|inside| inside.hangs = Some("one.h1".into()));
    let broken = format!("kind: host, env: {{{BROKEN}: \"1\"}}");
    let before = kept.apply(vnet("one", 1).replace("kind: host", &broken));
    eventually("it is being made", || kept.machine.lock().hanging == 1);
    let now = kept.apply(vnet("one", 1));
    kept.machine.set(|inside| inside.hangs = None);
    wait(&now);
    assert_eq!(kept.reconcile_loop.problems(|_| true), []);
    assert!(kept.machine.pid(&control("one", "h1")).is_some());
    wait(&before);
}

#[test]
fn delete_waits_while_removal_is_retried() {
    let mut kept = Kept::with_vnets(1);
    kept.refuse(places().node("v0", "h1"));
    let news = kept.delete("v0");
    eventually("a try fails", || {
        kept.reconcile_loop.problems(|key| key.to_string() == "node v0/h1").len() == 1
    });
    kept.machine.set(|inside| inside.refuses.clear());
    wait(&news);
    assert_eq!(kept.reconcile_loop.unwanted("v0"), []);
}

#[test]
fn number_is_reused_only_after_complete_removal() {
    let mut kept = Kept::with_vnets(2);
    let number = |kept: &Kept, vnet: &str| kept.model.allocations.number_of(vnet);
    let (first, second) = (number(&kept, "v0"), number(&kept, "v1"));
    kept.refuse(places().node("v0", "h1"));
    wait(&kept.delete("v0"));
    wait(&kept.apply(vnet("v2", 1)));
    assert!(number(&kept, "v2").is_some() && ![first, second].contains(&number(&kept, "v2")));

    let mut kept = kept.again();
    assert_eq!(number(&kept, "v0"), first);
    wait(&kept.apply(vnet("v3", 1)));
    let others = [first, second, number(&kept, "v2")];
    assert!(number(&kept, "v3").is_some() && !others.contains(&number(&kept, "v3")));
    // A vnet with the same name gets its own number again.
    wait(&kept.apply(vnet("v0", 1)));
    assert_eq!(number(&kept, "v0"), first);
    wait(&kept.delete("v0"));

    kept.machine.set(|inside| inside.refuses.clear());
    eventually("all of it is gone", || !kept.reconcile_loop.may_exist("v0"));
    wait(&kept.apply(vnet("v4", 1)));
    assert_eq!((number(&kept, "v4"), number(&kept, "v0")), (first, None));
    let kept = kept.again();
    assert_eq!((number(&kept, "v4"), number(&kept, "v0")), (first, None));
}

/// An event during a node's last step, and one after that, do not make it known again.
#[test]
fn events_during_removal_do_not_revive_a_node() {
    let mut kept = Kept::with_vnets(2);
    kept.machine.lose_port("v1", "r1");
    // The loop looks for ports to watch after a step.
    wait(&kept.apply(vnet("v0", 2)));
    eventually("they are watched", || kept.machine.lock().lost_ports.is_empty());
    let last = places().node("v1", "r1");
    kept.machine.set(|inside| inside.removing = Some(last));
    let news = kept.delete("v1");
    eventually("its last step", || kept.machine.lock().hanging > 0);
    kept.machine.lose_port("v1", "r1");
    eventually("the event is seen", || kept.machine.lock().lost_ports.is_empty());
    kept.machine.set(|inside| inside.removing = None);
    wait(&news);
    for _ in 0..2 {
        kept.quiet();
        assert_eq!(kept.reconcile_loop.unwanted("v1"), []);
        kept.machine.lose_port("v1", "r1");
        eventually("the event is seen", || kept.machine.lock().lost_ports.is_empty());
    }
}

/// Nodes that can't be removed count for their tenant until they are gone,
/// even over a restart. Deleting and applying in a loop is eventually refused.
#[test]
fn unremoved_nodes_count_in_the_tenants_quota() {
    let tenant = "apiVersion: pdp/v1\nkind: Tenant\nmetadata: {name: acme}\n\
                  spec: {quota: {vnets: 2, power: 2}}\n";
    let mut kept = Kept::with_vnets(1);
    wait(&kept.apply(tenant.into()));
    let refused = |kept: &Kept, name: &str| {
        let file = SourceFile { name: "f".into(), text: vnet(name, 1), ..SourceFile::default() };
        let documents = pdp_spec::parse(&[file]).unwrap();
        let found = pdp_spec::check(&documents, &kept.counted().existing(&cpus(), false));
        found.err().map(|faults| faults.iter().map(ToString::to_string).collect::<String>())
    };
    // Without limit, as long as the removals succeed.
    for number in 0..4 {
        let name = format!("acme.v{number}");
        wait(&kept.apply(vnet(&name, 1)));
        wait(&kept.delete(&name));
        eventually("it is gone", || kept.counted().remains.is_empty());
        kept.model = kept.counted();
    }
    // One after the other gets stuck.
    let stuck = |number| places().node(&format!("acme.s{number}"), "h1");
    for number in 0..2 {
        kept.refuse(stuck(number));
        let name = format!("acme.s{number}");
        wait(&kept.apply(vnet(&name, 1)));
        wait(&kept.delete(&name));
        if number == 0 {
            assert_eq!(refused(&kept, "acme.next"), None, "there is room for a second one");
        }
    }
    let refusal = refused(&kept, "acme.next").expect("a refusal");
    assert!(refusal.contains("vnets: 1 exceeds tenant acme's quota of 2"), "{refusal}");
    assert!(refusal.contains("networks being removed still use "), "{refusal}");
    assert!(refusal.contains(": acme.s"), "{refusal}");
    let mut kept = kept.again();
    assert!(refused(&kept, "acme.next").is_some_and(|refusal| refusal.contains("acme.s1")));
    kept.machine.set(|inside| inside.refuses.clear());
    eventually("all of it is gone", || kept.counted().remains.is_empty());
    assert_eq!(refused(&kept, "acme.next"), None);
    kept.model = kept.counted();
    wait(&kept.apply(vnet("acme.next", 1)));
}

#[test]
fn guest_without_routes_does_not_delay_others() {
    let mut kept = Kept::with_vnets(2);
    kept.machine.set(|inside| inside.mute = Some("/v0/".into()));
    let news = kept.apply(vnet("v0", 64));
    let took = kept.replaced("v1");
    println!("beside 63 guests that wait for their routes: {took:?}");
    wait(&kept.apply(vnet("v1", 2)));
    let gets = |vnet: &str, number: usize| {
        let inside = kept.machine.lock();
        let router = inside.vnets[vnet].nodes.iter().find_map(|node| node.router.clone()).unwrap();
        !router.guests[number].leaving
    };
    assert!(gets("v1", 1) && gets("v0", 0) && !gets("v0", 1));
    // The client has waited long enough.
    wait(&news);
    kept.machine.set(|inside| inside.mute = None);
    eventually("all are let in", || (0..64).all(|number| gets("v0", number)));
}

/// A network whose nodes have all kinds of processes.
const ALL_PROCESSES: &str = "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: all}
spec:
  nodes:
    r1:
      kind: router
      management: {outside: true}
      interfaces: {eth0: {addresses: [10.0.1.1/24]}}
      dataPlane: {power: 1m, program: {attach: tap, run: [sleep, \"1\"]}}
";

/// The processes of that network's router, as events name them.
const NAMES: [&str; 6] = ["control", "g0", "management", "mirror", "tap", "tap-g0"];

#[test]
fn start_of_every_process_is_reported() {
    let mut kept = Kept::with_vnets(1);
    wait(&kept.apply(ALL_PROCESSES.into()));
    kept.quiet();
    assert_eq!(kept.reconcile_loop.problems(|_| true), []);
    let object = |name| format!("vnet/all/node/r1/{name}");
    let started: Vec<_> = kept.objects(EventKind::Started).into_iter().collect();
    let of_router: Vec<_> = started.iter().filter(|it| it.starts_with("vnet/all/")).collect();
    assert_eq!(of_router, NAMES.map(object).iter().collect::<Vec<_>>());
    assert_eq!(started.first().map(String::as_str), Some("mux"));
    assert_eq!(kept.objects(EventKind::Restarted), BTreeSet::new());
}

#[test]
fn end_and_restart_of_a_process_have_the_same_object() {
    let mut kept = Kept::with_vnets(1);
    wait(&kept.apply(ALL_PROCESSES.into()));
    kept.quiet();
    let dirs: Vec<_> = kept.machine.lock().processes.keys().cloned().collect();
    for dir in dirs.iter().filter(|dir| dir.to_string_lossy().contains("/all.r1")) {
        eventually("it runs", || kept.machine.pid(dir).is_some());
        let before = kept.machine.pid(dir);
        kept.machine.kill(dir);
        eventually("another one runs", || {
            kept.machine.pid(dir).is_some_and(|it| Some(it) != before)
        });
    }
    kept.quiet();
    let object = |name| format!("vnet/all/node/r1/{name}");
    let all = NAMES.map(object).into();
    assert_eq!(kept.objects(EventKind::Ended), all);
    assert_eq!(kept.objects(EventKind::Restarted), all);
}

#[test]
fn first_start_of_an_added_helper_is_no_restart() {
    let mut kept = Kept::with_vnets(1);
    let text = vnet("v0", 1);
    let managed = "h1: {kind: host, management: {ports: [\"18081:80\"]},";
    wait(&kept.apply(text.replace("h1: {kind: host,", managed)));
    kept.quiet();
    let key = ObjectKey::node("v0", "h1");
    let object = key.process_object(ProcessRole::Management);
    let restarts = || kept.reconcile_loop.health(&key).unwrap().restarts[ProcessRole::Management];
    assert!(kept.objects(EventKind::Started).contains(&object));
    assert!(!kept.objects(EventKind::Restarted).contains(&object));
    assert_eq!(restarts(), 0);
    // From then on it is one.
    let dir = places().record(&key, ProcessRole::Management);
    kept.machine.kill(&dir);
    eventually("another one runs", || kept.machine.pid(&dir).is_some());
    kept.quiet();
    assert!(kept.objects(EventKind::Restarted).contains(&object));
    assert_eq!(restarts(), 1);
}

/// A restart is no failure, however often: no pause, no count, and a
/// process that ends by itself afterwards is restarted at once.
#[test]
fn requested_restart_causes_no_backoff() {
    let kept = Kept::with_vnets(2);
    let (node, guest) = (ObjectKey::node("v0", "r1"), ObjectKey::guest("v0", "r1", 0));
    let control = control("v0", "r1");
    let pids = |kept: &Kept| {
        let dirs = [&control, &kept.guest("v0", 0), &kept.guest("v1", 0)];
        dirs.map(|dir| kept.machine.pid(dir).expect("it runs"))
    };
    let began = Instant::now();
    let mut before = pids(&kept);
    for _ in 0..6 {
        wait(&kept.reconcile_loop.restart([node.clone()].into()));
        let now = pids(&kept);
        assert!(now[0] != before[0] && now[1..] == before[1..], "{before:?} {now:?}");
        wait(&kept.reconcile_loop.restart([guest.clone()].into()));
        before = pids(&kept);
        assert!(before[1] != now[1] && [before[0], before[2]] == [now[0], now[2]]);
    }
    // With a back-off the sixth restart alone would have waited for 3.2 s.
    println!("twelve restarts: {:?}", began.elapsed());
    for key in [&node, &guest] {
        assert_eq!(
            kept.reconcile_loop.health(key).unwrap().restarts,
            PerProcess::default(),
            "{key}"
        );
    }
    kept.replaced("v0");
    assert_eq!(kept.reconcile_loop.health(&guest).unwrap().restarts[ProcessRole::Main], 1);
    // An unknown node remains unknown.
    wait(&kept.reconcile_loop.restart([ObjectKey::node("v9", "r1")].into()));
    assert!(
        !kept.reconcile_loop.may_exist("v9")
            && kept.reconcile_loop.health(&ObjectKey::node("v9", "r1")).is_none()
    );
}

#[test]
fn everything_stops_on_empty_plan_and_restarts() {
    let kept = Kept::with_vnets(5);
    let plan = kept.model.wanted();
    wait(&kept.reconcile_loop.want(Arc::new(Plan::default()), |_| true));
    assert!(kept.machine.lock().processes.is_empty());
    assert!(
        kept.machine.lock().vnets.is_empty() || kept.reconcile_loop.problems(|_| true).is_empty()
    );
    wait(&kept.reconcile_loop.want(plan, |_| true));
    kept.quiet();
    assert_eq!(kept.machine.lock().processes.len(), 1 + 6 * 5);
    assert_eq!(kept.machine.lock().vnets.len(), 5);
    // A new mux gets everything.
    kept.machine.set(|inside| inside.vnets.clear());
    kept.machine.kill(&places().records().join("mux"));
    eventually("it has all vnets", || kept.machine.lock().vnets.len() == 5);
}

/// Number of times that an unrelated device comes and goes, over more than a second.
const BESIDE: u32 = 30;

#[test]
fn failed_external_backs_off_despite_other_device_events() {
    // Threads inherit the network namespace of the thread that starts them.
    let inside = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("needs root");
        ip("link add name ext0 type veth peer name ext1");
        let mut kept = Kept::new();
        // Its pins can't be created.
        let external = "  interfaces: {E: {device: ext0, attach: packet}}\n";
        let news = kept.apply(format!("---{SUBSTRATE}{external}"));
        wait(&news);
        assert!(matches!(
            &kept.reconcile_loop.problems(|_| true)[..],
            [(key, _)] if *key == ObjectKey::external("E")
        ));
        kept.quiet();
        let (steps, begin) = (kept.reconcile_loop.steps(), Instant::now());
        for _ in 0..BESIDE {
            ip("link add name beside type veth peer name other");
            ip("link del dev beside");
            std::thread::sleep(Duration::from_millis(20));
        }
        let (steps, pauses) = (kept.reconcile_loop.steps() - steps, begin.elapsed().as_secs() + 1);
        println!("{steps} steps in {:?}", begin.elapsed());
        assert!(steps <= pauses, "{steps} steps in {pauses} pauses");
        // After a change of its own MAC address it is retried at once.
        let steps = kept.reconcile_loop.steps();
        ip("link set dev ext0 address 02:00:00:00:00:99");
        std::thread::sleep(Duration::from_millis(500));
        assert!(kept.reconcile_loop.steps() > steps);
    });
    inside.join().unwrap();
}

fn ip(words: &str) {
    let done = std::process::Command::new("ip").args(words.split(' ')).status().unwrap();
    assert!(done.success(), "ip {words}");
}

/// Nodes with all settings that can change while they run.
const SETTINGS: &str = "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: set}
spec:
  nodes:
    r1:
      kind: router
      interfaces: {eth0: {addresses: [10.0.1.1/24]}}
      routes: [{to: default, via: 10.0.1.2}]
      dataPlane: {power: 1m}
    k1: {kind: router, interfaces: {eth0: {addresses: [10.0.1.2/24]}}, dataPlane: {kind: kernel}}
    h1:
      kind: host
      interfaces: {eth0: {addresses: [10.0.2.2/24]}}
      routes: [{to: 10.9.0.0/16, type: blackhole}]
";

/// Effects of another pdpd on running objects.
#[derive(Debug, Default, PartialEq)]
struct Adoption {
    /// Processes that it replaced or started.
    new: BTreeSet<PathBuf>,
    limited: BTreeSet<PathBuf>,
    routed: BTreeMap<PathBuf, [Vec<StaticRouteSpec>; 2]>,
    moved: BTreeSet<PathBuf>,
}

/// Returns the plan of the node that an object is or belongs to.
fn node_of<'a>(key: &ObjectKey, plan: &'a Plan) -> Option<&'a NodePlan> {
    plan.vnets[key.vnet_name()?].nodes.get(key.node_name())
}

fn settings(key: &ObjectKey, plan: &Plan) -> Option<AppliedSettings> {
    let node = node_of(key, plan)?;
    Some(match key {
        ObjectKey::Guest { number, .. } => AppliedSettings::of_guest(&node.guests[number]),
        _ => AppliedSettings::of_node(node),
    })
}

/// Returns the settings as earlier versions of pdpd wrote them.
fn old_text(key: &ObjectKey, plan: &Plan) -> String {
    let node = node_of(key, plan).expect("a node");
    if let ObjectKey::Guest { number, .. } = key {
        return format!("{:?}", node.guests[number].container.limits);
    }
    let kernel = node.kernel.as_ref().map_or(String::new(), |kernel| {
        format!(" kernel {:?} {}", kernel.limits, kernel.xdp_bypass)
    });
    let set = match node.routes.is_empty() {
        true => String::new(),
        false => format!(" static {}", serde_json::to_string(&node.routes).unwrap()),
    };
    format!("{:?}{kernel}{set} routes {}", node.control.limits, routes::VERSION)
}

/// Starts [`SETTINGS`], and then another pdpd, for which `before` has changed the journal. Returns
/// its effects. The journal then has the settings in the current version.
fn adoption(before: impl Fn(&ObjectKey, &Plan) -> String) -> (Kept, Adoption) {
    let mut kept = Kept::with_vnets(1);
    wait(&kept.apply(SETTINGS.into()));
    kept.quiet();
    kept.stop();
    let plan = kept.model.wanted();
    let current = |kept: &Kept| {
        for key in plan.keys() {
            let Some(settings) = settings(&key, &plan) else { continue };
            let entry = kept.state.journal_entry(&key.to_string()).unwrap().expect("an entry");
            assert_eq!(entry.detail, settings.to_journal(), "{key}");
        }
    };
    current(&kept);
    for key in plan.keys().iter().filter(|key| node_of(key, &plan).is_some()) {
        let entry = kept.state.journal_entry(&key.to_string()).unwrap().expect("an entry");
        let hash = entry.hash.expect("it is confirmed");
        kept.state.confirm(&key.to_string(), &hash, &before(key, &plan)).unwrap();
    }
    let processes = |kept: &Kept| -> BTreeMap<PathBuf, u32> {
        let inside = kept.machine.lock();
        inside.processes.iter().map(|(dir, (process, _))| (dir.clone(), process.pid)).collect()
    };
    let was = processes(&kept);
    kept.machine.set(|inside| {
        (inside.limited, inside.routed, inside.moved) = Default::default();
    });
    let kept = kept.again();
    kept.quiet();
    assert_eq!(kept.reconcile_loop.problems(|_| true), []);
    current(&kept);
    let is = processes(&kept);
    assert!(was.keys().eq(is.keys()), "{was:?}, then {is:?}");
    let new = is.into_iter().filter(|(dir, pid)| was[dir] != *pid).map(|(dir, _)| dir).collect();
    let inside = kept.machine.lock();
    let (limited, moved) = (inside.limited.clone(), inside.moved.clone());
    let adoption = Adoption { new, limited, routed: inside.routed.clone(), moved };
    drop(inside);
    (kept, adoption)
}

/// Returns the records of all control guests, hosts and forwarding guests.
fn guests(plan: &Plan) -> BTreeSet<PathBuf> {
    let nodes = plan.vnets.values().flat_map(|vnet| vnet.nodes.values());
    let dirs = nodes.flat_map(|node| {
        let guests = node.guests.values().map(|guest| guest.container.dir.clone());
        guests.chain([node.control.dir.clone()])
    });
    dirs.collect()
}

#[test]
fn running_processes_are_adopted_without_a_change() {
    let (_, adoption) = adoption(|key, plan| settings(key, plan).unwrap().to_journal());
    assert_eq!(adoption, Adoption::default());
}

/// Earlier versions of pdpd wrote text. Their limits can't be compared.
#[test]
fn processes_of_earlier_versions_are_adopted() {
    let (kept, adoption) = adoption(old_text);
    let limited = guests(&kept.model.plan);
    assert_eq!(adoption, Adoption { limited, ..Adoption::default() });
}

#[test]
fn settings_of_a_later_version_are_applied_again() {
    let later = r#"{"version":2,"settings":{"limits":"none"}}"#;
    let (kept, adoption) = adoption(|_, _| later.to_owned());
    let plan = &kept.model.plan;
    let mirror = |vnet| places().record(&ObjectKey::node(vnet, "r1"), ProcessRole::Mirror);
    let routes = |node| {
        let routes = plan.vnets["set"].nodes[node].routes.clone();
        assert!(!routes.is_empty());
        (control("set", node), [Vec::new(), routes])
    };
    let expected = Adoption {
        new: ["set", "v0"].map(mirror).into(),
        limited: guests(plan),
        routed: ["h1", "r1"].map(routes).into(),
        moved: [places().record(&ObjectKey::node("set", "k1"), ProcessRole::Tap)].into(),
    };
    assert_eq!(adoption, expected);
}

/// Volumes outlive a stop, and are removed with their node, even while everything is stopped.
#[test]
fn volumes_survive_a_stop_until_node_removal() {
    let mut kept = Kept::with_vnets(1);
    let text = vnet("v", 1).replace("h1: {kind: host,", "h1: {kind: host, volumes: [\"a:/a\"],");
    wait(&kept.apply(text));
    let dir = control("v", "h1");
    let mut stopped = kept.model.clone();
    stopped.allocations.stopped = true;
    wait(&kept.want(stopped));
    let names = || kept.machine.lock().volumes.get(&dir).cloned();
    assert_eq!(names(), Some(BTreeSet::from(["a".to_owned()])), "stopped");
    let gone = kept.model.without("v", &places(), &cpus()).unwrap();
    let news = kept.want(gone);
    wait(&news);
    let names = || kept.machine.lock().volumes.get(&dir).cloned();
    eventually("deleted while stopped", || names().is_none());

    let text = vnet("w", 1).replace("h1: {kind: host,", "h1: {kind: host, volumes: [\"a:/a\"],");
    wait(&kept.apply(text));
    let gone = kept.model.without("w", &places(), &cpus()).unwrap();
    wait(&kept.want(gone));
    let dir = control("w", "h1");
    let names = kept.machine.lock().volumes.get(&dir).cloned();
    assert_eq!(names, Some(BTreeSet::new()), "deleted");
}
