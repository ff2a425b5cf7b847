//! Checks of the machine. Each facility is tried out. A temporary container is
//! started like a guest, in its own directories, which are removed with it.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use pdp_api::{MachineCheck, MachineCheckState};
use pdp_container::cgroup::Cgroups;
use pdp_container::{
    CommandRestart, GuestCommand, GuestSpec, LOG_BYTES_MAX, Limits, ProcessOutcome, ProcessState,
    Profile, RootFilesystem, Runtime, RuntimePaths, UserRange, safe_removal,
};
use pdp_net::probe::{self, Level};

use crate::engine::DaemonCore;
use crate::plan::allocations::{UID_BASE, UIDS_PER_VNET};
use crate::util::error_chain;

/// Longest wait for the container to start and to end.
const CONTAINER_WAIT: Duration = Duration::from_secs(10);

/// Longest wait for its remaining processes to end.
const END_WAIT: Duration = Duration::from_secs(5);

/// Name of the container check.
const CONTAINER: &str = "container";

/// Checks the facilities of the machine, and lists what earlier networks left on it.
pub fn of_node(engine: &DaemonCore) -> Vec<MachineCheck> {
    let runc = &engine.host.runtime.paths().runc;
    let mut checks = checks(runc, &engine.host.places.lib);
    checks.extend(engine.checks_of_remains());
    checks
}

/// Runs all checks, which takes a few seconds at most. `lib` is the
/// directory with pdp-shim and pdp-init.
pub fn checks(runc: &Path, lib: &Path) -> Vec<MachineCheck> {
    let mut checks: Vec<MachineCheck> = probe::run().into_iter().map(check).collect();
    // Without root nothing can be created; another check reports that.
    if rustix::process::geteuid().is_root() {
        checks.push(container(runc, lib));
        checks.push(volumes());
    }
    checks
}

fn check(found: probe::FacilityCheck) -> MachineCheck {
    MachineCheck {
        name: found.name.into(),
        state: match found.level {
            Level::Ok => MachineCheckState::Ok,
            Level::Warn => MachineCheckState::Warn,
            Level::Missing => MachineCheckState::Missing,
        },
        detail: found.detail,
        hint: Some(found.remedy).filter(|remedy| !remedy.is_empty()),
    }
}

/// Checks that a container can be started.
fn container(runc: &Path, lib: &Path) -> MachineCheck {
    let (state, detail, hint) = match tried(runc, lib) {
        Ok(()) => (MachineCheckState::Ok, "a test container started and ended".to_owned(), None),
        Err(reason) => {
            let hint = "no node can start until this is fixed; see what else is missing here";
            (MachineCheckState::Missing, reason, Some(hint.to_owned()))
        }
    };
    MachineCheck { name: CONTAINER.into(), state, detail, hint }
}

/// Checks the facilities that volumes need.
fn volumes() -> MachineCheck {
    let (state, detail, hint) = match pdp_container::volumes::probe() {
        Ok(()) => {
            (MachineCheckState::Ok, "a loop device and mke2fs are available".to_owned(), None)
        }
        Err(reason) => {
            let hint = "nodes with `volumes` can't start; all others can";
            (MachineCheckState::Warn, reason, Some(hint.to_owned()))
        }
    };
    MachineCheck { name: "volumes".into(), state, detail, hint }
}

/// Creates a container's directories, starts the container, and removes
/// everything. Returns an error that says why it did not start and end.
fn tried(runc: &Path, lib: &Path) -> Result<(), String> {
    // Several clients may run the checks at the same time.
    static MADE: AtomicU32 = AtomicU32::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let name = format!("pdp-doctor-{}-{number}", std::process::id());
    let place = Path::new("/run").join(&name);
    let failed = |error: &dyn std::error::Error| error_chain(error);
    DirBuilder::new()
        .mode(0o711)
        .create(&place)
        .map_err(|error| format!("make {}: {error}", place.display()))?;
    let paths = RuntimePaths {
        runc: runc.to_owned(),
        shim: lib.join("pdp-shim"),
        init: lib.join("pdp-init"),
        work: lib.join("pdp-work"),
        records: place.join("records"),
        runc_root: place.join("runc"),
        logs: place.join("logs"),
        images: place.join("images"),
        volumes: place.join("volumes"),
        cgroup: name.clone(),
    };
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(run(paths)));
    let result = receiver.recv_timeout(CONTAINER_WAIT).unwrap_or_else(|_| {
        Err(format!("it did not start and end within {} s", CONTAINER_WAIT.as_secs()))
    });
    let removed = Cgroups::new(&name)
        .and_then(|cgroups| {
            cgroups.remove("", END_WAIT)?;
            cgroups.remove_if_empty("");
            safe_removal::remove(&place)
        })
        .map_err(|error| failed(&error));
    result.and(removed)
}

/// Runs a forwarding guest's container until it ends.
fn run(paths: RuntimePaths) -> Result<(), String> {
    let failed = |error: pdp_container::Error| error_chain(&error);
    let spec = guest(&paths.records);
    let runtime = Runtime::new(paths).map_err(failed)?;
    runtime.create(&spec, &[]).map_err(failed)?;
    let started = runtime.start(&spec.dir);
    let end = std::time::Instant::now() + CONTAINER_WAIT;
    let exit = loop {
        match runtime.state(&spec.dir).map_err(failed)? {
            ProcessState::Exited(exit) => break exit,
            _ if started.is_err() || std::time::Instant::now() > end => break None,
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let log = runtime.logs(&spec.dir).map_err(failed)?[0].clone();
    let log = fs::read_to_string(log).unwrap_or_default();
    runtime.delete(&spec.dir).map_err(failed)?;
    started.map_err(failed)?;
    match exit {
        Some(ProcessOutcome { code: Some(0), .. }) => Ok(()),
        exit => {
            let how = match exit {
                Some(ProcessOutcome { code: Some(code), .. }) => format!("with code {code}"),
                Some(ProcessOutcome { signal: Some(signal), .. }) => format!("by signal {signal}"),
                _ => "unseen".to_owned(),
            };
            Err(format!("its command ended {how}: {}", log.trim_end().replace('\n', "; ")))
        }
    }
}

fn guest(records: &Path) -> GuestSpec {
    let id = "doctor".to_owned();
    GuestSpec {
        dir: PathBuf::from(records).join(&id),
        cgroup: id.clone(),
        owner: id.clone(),
        hostname: id.clone(),
        id,
        root: RootFilesystem::Host,
        profile: Profile::Forwarding { tap: false },
        privileged: false,
        packet_rings: false,
        users: UserRange { base: UID_BASE, length: UIDS_PER_VNET },
        uid: 1,
        files: Vec::new(),
        binds: Vec::new(),
        volumes: Vec::new(),
        commands: vec![GuestCommand::new(vec!["/bin/true".into()], CommandRestart::Never)],
        env: Default::default(),
        sysctls: Default::default(),
        limits: Limits {
            cpu_cores: Some(0.5),
            memory_bytes: Some(64 << 20),
            processes: Some(16),
            ..Limits::default()
        },
        open_files_max: 64,
        log_bytes_max: LOG_BYTES_MAX,
    }
}
