//! What the machine can and can't do: facilities that are tried out one by one, and a throw-away container that is
//! started as guests are, in places of its own that go with it.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use pdp_api::{Check, CheckState};
use pdp_container::cgroup::Cgroups;
use pdp_container::{
    Command, Exit, GuestSpec, LOG_BYTES_MAX, Limits, Paths, Profile, Restart, Root, Runtime, State,
    UserRange, tree,
};
use pdp_net::probe::{self, Level};

use crate::host::words;
use crate::ledger::{UID_BASE, UIDS_PER_VNET};

/// Longest wait for the container to start and to end.
const CONTAINER_WAIT: Duration = Duration::from_secs(10);

/// Longest wait for what is left of it to end.
const END_WAIT: Duration = Duration::from_secs(5);

/// What the check of the container is called.
const CONTAINER: &str = "container";

/// Tries everything out, which takes a few seconds at most. `lib` has pdp-shim and pdp-init.
pub fn checks(runc: &Path, lib: &Path) -> Vec<Check> {
    let mut checks: Vec<Check> = probe::run().into_iter().map(check).collect();
    // Without root nothing can be made, and that is said.
    if rustix::process::geteuid().is_root() {
        checks.push(container(runc, lib));
        checks.push(volumes());
    }
    checks
}

fn check(found: probe::Check) -> Check {
    Check {
        name: found.name.into(),
        state: match found.level {
            Level::Ok => CheckState::Ok,
            Level::Warn => CheckState::Warn,
            Level::Missing => CheckState::Missing,
        },
        detail: found.detail,
        hint: Some(found.remedy).filter(|remedy| !remedy.is_empty()),
    }
}

/// Starts a container.
fn container(runc: &Path, lib: &Path) -> Check {
    let (state, detail, hint) = match tried(runc, lib) {
        Ok(()) => (CheckState::Ok, "one was started and ended".to_owned(), None),
        Err(reason) => {
            let hint = "no node can start before this is put right; see what else is missing here";
            (CheckState::Missing, reason, Some(hint.to_owned()))
        }
    };
    Check { name: CONTAINER.into(), state, detail, hint }
}

/// Looks for what volumes need.
fn volumes() -> Check {
    let (state, detail, hint) = match pdp_container::volumes::probe() {
        Ok(()) => (CheckState::Ok, "a loop device and mke2fs are there".to_owned(), None),
        Err(reason) => {
            let hint = "nodes with `volumes` can't start before; all others can";
            (CheckState::Warn, reason, Some(hint.to_owned()))
        }
    };
    Check { name: "volumes".into(), state, detail, hint }
}

/// Makes a container's places, starts it, and removes all of them; an error says why it did not start and end.
fn tried(runc: &Path, lib: &Path) -> Result<(), String> {
    // The daemon may be asked by several at a time.
    static MADE: AtomicU32 = AtomicU32::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let name = format!("pdp-doctor-{}-{number}", std::process::id());
    let place = Path::new("/run").join(&name);
    let failed = |error: &dyn std::error::Error| words(error);
    DirBuilder::new()
        .mode(0o711)
        .create(&place)
        .map_err(|error| format!("make {}: {error}", place.display()))?;
    let paths = Paths {
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
    let said = receiver.recv_timeout(CONTAINER_WAIT).unwrap_or_else(|_| {
        Err(format!("it did not start and end within {} s", CONTAINER_WAIT.as_secs()))
    });
    let removed = Cgroups::new(&name)
        .and_then(|cgroups| {
            cgroups.remove("", END_WAIT)?;
            cgroups.remove_if_empty("");
            tree::remove(&place)
        })
        .map_err(|error| failed(&error));
    said.and(removed)
}

/// A forwarding guest's container, to its end.
fn run(paths: Paths) -> Result<(), String> {
    let failed = |error: pdp_container::Error| words(&error);
    let spec = guest(&paths.records);
    let runtime = Runtime::new(paths).map_err(failed)?;
    runtime.create(&spec, &[]).map_err(failed)?;
    let started = runtime.start(&spec.dir);
    let end = std::time::Instant::now() + CONTAINER_WAIT;
    let exit = loop {
        match runtime.state(&spec.dir).map_err(failed)? {
            State::Exited(exit) => break exit,
            _ if started.is_err() || std::time::Instant::now() > end => break None,
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let log = runtime.logs(&spec.dir).map_err(failed)?[0].clone();
    let log = fs::read_to_string(log).unwrap_or_default();
    runtime.delete(&spec.dir).map_err(failed)?;
    started.map_err(failed)?;
    match exit {
        Some(Exit { code: Some(0), .. }) => Ok(()),
        exit => {
            let how = match exit {
                Some(Exit { code: Some(code), .. }) => format!("with code {code}"),
                Some(Exit { signal: Some(signal), .. }) => format!("by signal {signal}"),
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
        root: Root::Host,
        profile: Profile::Forwarding { tap: false },
        privileged: false,
        packet_rings: false,
        users: UserRange { base: UID_BASE, length: UIDS_PER_VNET },
        uid: 1,
        files: Vec::new(),
        binds: Vec::new(),
        volumes: Vec::new(),
        commands: vec![Command::new(vec!["/bin/true".into()], Restart::Never)],
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
