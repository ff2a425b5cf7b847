//! A machine without real processes, for tests of the reconcile loop and of the API.

#![allow(dead_code)] // each test uses its part

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ipnet::IpNet;
use pdp_container::{GuestSpec, HelperSpec, Limits, Process, Runtime, RuntimePaths};
use pdp_model::Stats;
use pdp_net::route::StaticRouteSpec;
use pdp_net::tap::TapSpec;
use pdp_net::xdp::Xdp;
use pdp_proto::mux;
use pdp_spec::Descriptors;
use pdpd::engine::DaemonCore;
use pdpd::host::HostError;
use pdpd::host::bounds::GuestLimits;
use pdpd::host::control::{ControlError, MuxClient, MuxHello};
use pdpd::host::settings::KernelSettings;
use pdpd::intent::state::StateFile;
use pdpd::kernel::ports::{ChangedNode, KernelPorts};
use pdpd::machine::{Host, Machine};
use pdpd::plan::key::{ObjectKey, ProcessRole};
use pdpd::plan::{
    DaemonPaths, DirectoryPlan, GuestPlan, KernelLinkPortState, KernelPlan, TapHelperPlan,
};

/// A machine without real processes.
#[derive(Debug)]
pub struct Pretend {
    inside: Mutex<Inside>,
    changed: Condvar,
    /// Records of the mux.
    mux: PathBuf,
}

#[derive(Debug, Default)]
pub struct Inside {
    /// Running processes by directory, with an eventfd that is written when the process ends.
    pub processes: BTreeMap<PathBuf, (Process, OwnedFd)>,
    pub vnets: BTreeMap<String, mux::VnetConfig>,
    pub last_pid: u32,
    /// The creation of directories whose paths contain this text hangs.
    pub hangs: Option<String>,
    /// Setting the weight of this cgroup hangs.
    pub holds: Option<String>,
    /// Number of hanging calls.
    pub hanging: u32,
    /// Directories that can't be removed.
    pub refuses: BTreeSet<PathBuf>,
    /// The removal of this directory hangs.
    pub removing: Option<PathBuf>,
    /// Polls readable once a kernel port is lost.
    pub port_events: Option<Arc<OwnedFd>>,
    /// Vnets and nodes of lost kernel ports that were not reported yet.
    pub lost_ports: Vec<(String, String)>,
    /// This cgroup is not empty yet.
    pub busy: Option<String>,
    /// Directories of processes that were ended on purpose.
    pub gone: BTreeSet<PathBuf>,
    /// Directories among these for which the cause of the end was requested.
    pub asked: BTreeSet<PathBuf>,
    /// The mux does not delete this vnet.
    pub keeps: Option<String>,
    /// Mirrors whose paths contain this text never report that a guest has its routes.
    pub mute: Option<String>,
    /// Muxes with process ids below this number answer every vnet with nonsense.
    pub lies_below: u32,
    /// Guests whose limits changed while they ran.
    pub limited: BTreeSet<PathBuf>,
    /// Changes of nodes' static routes: the earlier ones and the wanted ones.
    pub routed: BTreeMap<PathBuf, [Vec<StaticRouteSpec>; 2]>,
    /// Helpers that moved to another cgroup.
    pub moved: BTreeSet<PathBuf>,
    /// Volumes that stayed after their node's removal, by the directory of its control guest.
    pub volumes: BTreeMap<PathBuf, BTreeSet<String>>,
}

fn io_error(what: &'static str, path: &Path) -> HostError {
    HostError::Io { what, path: path.into(), source: std::io::ErrorKind::NotADirectory.into() }
}

fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

impl Pretend {
    pub fn new(places: &DaemonPaths) -> Self {
        let mux = places.record(&ObjectKey::Mux, ProcessRole::Main);
        Self { inside: Mutex::default(), changed: Condvar::new(), mux }
    }

    pub fn lock(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().unwrap()
    }

    fn hang_while(&self, hangs: impl Fn(&Inside) -> bool) -> std::sync::MutexGuard<'_, Inside> {
        let mut inside = self.lock();
        inside.hanging += 1;
        inside = self.changed.wait_while(inside, |inside| hangs(inside)).unwrap();
        inside.hanging -= 1;
        inside
    }

    fn begin(&self, dir: &Path) -> Process {
        let has = |part: &String| dir.to_string_lossy().contains(part);
        let mut inside = self.hang_while(|inside| inside.hangs.as_ref().is_some_and(has));
        inside.last_pid += 1;
        let process = Process { pid: inside.last_pid, start_time: 1 };
        inside.gone.remove(dir);
        let before = inside.processes.insert(dir.into(), (process, eventfd()));
        assert!(before.is_none(), "{} has one already", dir.display());
        process
    }

    pub fn kill(&self, dir: &Path) {
        let (_, end) = self.lock().processes.remove(dir).expect("it runs");
        rustix::io::write(end, &1u64.to_ne_bytes()).unwrap();
    }

    /// Loses a kernel port of a node.
    pub fn lose_port(&self, vnet: &str, node: &str) {
        let mut inside = self.lock();
        inside.lost_ports.push((vnet.into(), node.into()));
        let events = inside.port_events.get_or_insert_with(|| Arc::new(eventfd()));
        rustix::io::write(events, &1u64.to_ne_bytes()).unwrap();
    }

    pub fn set(&self, change: impl FnOnce(&mut Inside)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    pub fn pid(&self, dir: &Path) -> Option<u32> {
        self.running(dir).map(|process| process.pid)
    }
}

/// Returns a node without objects on a pretend machine, with all its files below `dir`. Commands in
/// guests are run by the program `dir/runc`. Images can't be pulled.
pub fn daemon(dir: &Path, exit: fn(bool)) -> (Arc<Pretend>, DaemonCore) {
    let path = |name: &str| dir.join(name);
    let places = DaemonPaths { run: path("run"), lib: path("lib"), pins: path("pins") };
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let any = || "/bin/true".into();
    std::fs::write(path("runc"), "#!/bin/sh\nexit 1\n").unwrap();
    let runtime = Runtime::new(RuntimePaths {
        runc: path("runc"),
        shim: any(),
        init: any(),
        work: any(),
        records: places.records(),
        runc_root: path("runc-root"),
        logs: path("state/logs"),
        images: path("state/images"),
        volumes: path("state/volumes"),
        cgroup: format!("pdp-test-{}-{number}", std::process::id()),
    });
    let machine = Arc::new(Pretend::new(&places));
    let host = Arc::new(Host {
        mux: MuxClient { path: places.mux_control() },
        ports: KernelPorts::new(&places),
        bounds: GuestLimits::new(&places),
        places,
        runtime: runtime.unwrap(),
        state: Arc::new(StateFile::open(&path("state")).unwrap()),
        settings: KernelSettings::default(),
    });
    let descriptors = Descriptors { limit: 1 << 20, unchanged_vnets: 0 };
    let cpus = (0..64).collect();
    let daemon = DaemonCore::new(host, machine.clone(), cpus, false, descriptors, exit);
    let mut daemon = daemon.unwrap();
    daemon.images.settings.skopeo = path("none");
    (machine, daemon)
}

impl Machine for Pretend {
    fn running(&self, dir: &Path) -> Option<Process> {
        self.lock().processes.get(dir).map(|(process, _)| *process)
    }

    fn is_alive(&self, process: Process) -> bool {
        self.lock().processes.values().any(|(known, _)| *known == process)
    }

    fn awaits_start(&self, dir: &Path, process: Process) -> bool {
        self.running(dir) == Some(process)
    }

    fn ending(&self, dir: &Path) -> String {
        let mut inside = self.lock();
        if inside.gone.contains(dir) {
            inside.asked.insert(dir.into());
        }
        "as it was told to".into()
    }

    fn exit_fd(&self, dir: &Path) -> Result<Option<OwnedFd>, HostError> {
        let inside = self.lock();
        Ok(inside.processes.get(dir).map(|(_, end)| end.try_clone().unwrap()))
    }

    fn list(&self) -> Result<Vec<PathBuf>, HostError> {
        Ok(self.lock().processes.keys().cloned().collect())
    }

    fn unpack(&self, _: &GuestSpec) -> Result<bool, HostError> {
        Ok(true)
    }

    fn create(&self, spec: &GuestSpec) -> Result<Process, HostError> {
        let process = self.begin(&spec.dir);
        match spec.env.contains_key(BROKEN) {
            true => {
                self.lock().processes.remove(&spec.dir);
                Err(io_error("can't create", &spec.dir))
            }
            false => Ok(process),
        }
    }

    fn start(&self, _: &Path) -> Result<(), HostError> {
        Ok(())
    }

    fn update_limits(&self, dir: &Path, _: &Limits) -> Result<(), HostError> {
        self.lock().limited.insert(dir.into());
        Ok(())
    }

    fn spawn(&self, spec: &HelperSpec, _: &Path) -> Result<Process, HostError> {
        Ok(self.begin(&spec.dir))
    }

    fn spawn_served(&self, spec: &HelperSpec, _: &Path) -> Result<Process, HostError> {
        Ok(self.begin(&spec.dir))
    }

    fn remove_logs_but(&self, _: &BTreeSet<PathBuf>) -> Result<(), HostError> {
        Ok(())
    }

    fn remove_volumes(&self, dir: &Path, kept: &BTreeSet<&str>) -> Result<(), HostError> {
        let kept = kept.iter().map(|name| (*name).to_owned()).collect();
        self.lock().volumes.insert(dir.to_owned(), kept);
        Ok(())
    }

    fn remove_volumes_but(&self, known: &BTreeSet<PathBuf>) -> Result<(), HostError> {
        self.lock().volumes.retain(|dir, _| known.contains(dir));
        Ok(())
    }

    fn collect_images(&self) {}

    fn listens(&self, _: &Path) -> bool {
        true
    }

    fn end(&self, dir: &Path) -> Result<bool, HostError> {
        let mut inside = self.lock();
        if let Some((_, end)) = inside.processes.remove(dir) {
            inside.gone.insert(dir.into());
            rustix::io::write(end, &1u64.to_ne_bytes()).unwrap();
        }
        Ok(true)
    }

    fn last_error(&self, _: &Path) -> Option<String> {
        None
    }

    fn write_quota(&self, _: &GuestPlan) -> Result<(), HostError> {
        Ok(())
    }

    fn see_to_ports(
        &self,
        _: (&str, &str),
        _: Process,
        _: Option<&KernelPlan>,
        _: &[KernelLinkPortState<'_>],
    ) -> Result<(), HostError> {
        Ok(())
    }

    fn watch_ports(&self) -> Option<Arc<OwnedFd>> {
        self.lock().port_events.clone()
    }

    fn touched_ports(&self) -> Vec<ChangedNode> {
        let mut inside = self.lock();
        let lost = std::mem::take(&mut inside.lost_ports);
        if let Some(events) = inside.port_events.as_ref().filter(|_| !lost.is_empty()) {
            rustix::io::read(events, &mut [0; 8]).unwrap();
        }
        lost.into_iter().map(|node| ChangedNode { node, port_gone: true }).collect()
    }

    fn remove_ports_but(
        &self,
        _: &dyn Fn() -> BTreeSet<u32>,
        _: &dyn Fn() -> bool,
    ) -> Result<(), HostError> {
        Ok(())
    }

    fn attach_for_ports(
        &self,
        _: &str,
        _: &Path,
        _: Option<u64>,
    ) -> Result<Option<(Xdp, u64)>, HostError> {
        Ok(None)
    }

    fn make_taps(&self, _: Process, taps: &[TapSpec]) -> Result<Vec<OwnedFd>, HostError> {
        Ok(taps.iter().map(|_| eventfd()).collect())
    }

    fn set_sysctls(&self, _: Process, _: &[(String, String)]) -> Result<(), HostError> {
        Ok(())
    }

    fn set_loopback(&self, _: Process, _: &[IpNet]) -> Result<(), HostError> {
        Ok(())
    }

    fn set_routes(
        &self,
        guest: Process,
        before: &[StaticRouteSpec],
        wanted: &[StaticRouteSpec],
    ) -> Result<(), HostError> {
        let mut inside = self.lock();
        let dir = inside.processes.iter().find(|(_, (process, _))| *process == guest);
        let dir = dir.expect("it runs").0.clone();
        inside.routed.insert(dir, [before.into(), wanted.into()]);
        Ok(())
    }

    fn set_carrier(&self, _: BorrowedFd<'_>, _: bool) -> Result<(), HostError> {
        Ok(())
    }

    fn serve(&self, _: &TapHelperPlan, _: &[OwnedFd]) -> Result<(), HostError> {
        Ok(())
    }

    fn reported_taps(&self, plan: &TapHelperPlan) -> Result<Option<Vec<OwnedFd>>, HostError> {
        Ok(Some(plan.ports.iter().map(|_| eventfd()).collect()))
    }

    fn has_routes(&self, mirror: &Path, _: u32) -> bool {
        let inside = self.lock();
        inside.mute.as_ref().is_none_or(|part| !mirror.to_string_lossy().contains(part))
    }

    fn make_directory(&self, _: &DirectoryPlan) -> Result<(), HostError> {
        Ok(())
    }

    fn has_directory(&self, path: &Path) -> bool {
        !self.lock().gone.contains(path)
    }

    fn update_file(&self, _: &Path, _: &[u8]) -> Result<bool, HostError> {
        Ok(false)
    }

    fn write_over(&self, _: &Path, _: &[u8]) -> Result<(), HostError> {
        Ok(())
    }

    fn remove_directory(&self, path: &Path) -> Result<(), HostError> {
        let hangs = |inside: &Inside| inside.removing.as_deref() == Some(path);
        match self.hang_while(hangs).refuses.contains(path) {
            true => Err(io_error("can't remove", path)),
            false => Ok(()),
        }
    }

    fn clear_directory(&self, _: &Path) -> Result<(), HostError> {
        Ok(())
    }

    fn enter(&self, dir: &Path, _: &str) -> Result<(), HostError> {
        self.lock().moved.insert(dir.into());
        Ok(())
    }

    fn limit(&self, _: &str, _: &Limits) -> Result<(), HostError> {
        Ok(())
    }

    fn weigh(&self, cgroup: &str, _: u32) -> Result<(), HostError> {
        drop(self.hang_while(|inside| inside.holds.as_deref() == Some(cgroup)));
        Ok(())
    }

    fn raise_neighbour_limits(&self, _: u64) {}

    fn raise_guest_limits(&self, _: u64, _: u64) {}

    fn bound(&self, _: &str, _: u32) {}

    fn unbound(&self, _: &str, _: bool) -> Result<(), HostError> {
        Ok(())
    }

    fn remove_cgroup(&self, path: &str) -> Result<bool, HostError> {
        Ok(self.lock().busy.as_deref() != Some(path))
    }

    fn remove_if_empty(&self, _: &str) {}

    fn mux(&self) -> Result<MuxHello, ControlError> {
        let pool = std::fs::File::open("/dev/null").unwrap().into();
        let vnets = self.lock().vnets.keys().cloned().collect();
        Ok(MuxHello { externals: Vec::new(), vnets, pool })
    }

    fn mux_stats(&self, _: &str) -> Result<Stats, ControlError> {
        Ok(Stats::default())
    }

    fn put_vnet(&self, vnet: mux::VnetConfig) -> Result<(), HostError> {
        let (peer, path, request) = ("mux", PathBuf::new(), "put vnet");
        match self.pid(&self.mux) {
            None => {
                let source = std::io::ErrorKind::ConnectionRefused.into();
                return Err(ControlError::Unreachable { peer, path, request, source }.into());
            }
            Some(mux) if mux < self.lock().lies_below => {
                return Err(ControlError::Unexpected { peer, path, request }.into());
            }
            Some(_) => {}
        }
        self.lock().vnets.insert(vnet.name.clone(), vnet);
        Ok(())
    }

    fn delete_vnet(&self, vnet: &str) -> Result<(), HostError> {
        let mut inside = self.lock();
        if inside.keeps.as_deref() == Some(vnet) {
            return Err(ControlError::Refused { peer: "mux", reason: "it is in use".into() }.into());
        }
        inside.vnets.remove(vnet).expect("the mux has it");
        Ok(())
    }

    fn put_external(&self, _: mux::ExternalConfig, _: &[BorrowedFd<'_>]) -> Result<(), HostError> {
        Ok(())
    }

    fn delete_external(&self, _: &str) -> Result<(), HostError> {
        Ok(())
    }
}

/// A guest with this variable can't be created.
pub const BROKEN: &str = "BROKEN";
