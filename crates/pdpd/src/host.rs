//! What pdpd works with on the machine, and small steps on it that can be repeated.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdp_container::{HelperSpec, Process, Runtime, State as GuestState};
use pdp_net::tap::TapSpec;

use crate::control::{self, ControlError, Mux, TapHelper};
use crate::plan::{Directory, GuestPlan, Places, TapHelperPlan};
use crate::state::{State, StateError};

/// Longest wait for a helper or the mux to listen once it was started.
const LISTEN_MAX: Duration = Duration::from_secs(10);

/// Why a step on the machine failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A guest or helper.
    #[error(transparent)]
    Container(#[from] pdp_container::Error),
    /// An interface or TAP.
    #[error(transparent)]
    Net(#[from] pdp_net::Error),
    /// An AF_XDP socket.
    #[error("AF_XDP socket on {device} queue {queue}")]
    Socket {
        /// The device.
        device: String,
        /// Its receive queue.
        queue: u32,
        /// Why not.
        source: pdp_afxdp::Error,
    },
    /// A call to a process.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The state file.
    #[error(transparent)]
    State(#[from] StateError),
    /// A file or directory.
    #[error("{what} {path}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A group that the machine has not.
    #[error("there is no group {0:?}; add it, or name another in memif.group")]
    NoGroup(String),
    /// A process that does not stay.
    #[error("{who} ended {how} before it was ready; see its log")]
    Ended {
        /// Who.
        who: String,
        /// How.
        how: String,
    },
}

/// An error with its causes, in one line.
pub fn words(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn failed<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> HostError + 'a {
    move |source| HostError::Io { what, path: path.into(), source }
}

/// The machine, as pdpd works on it.
#[derive(Debug)]
pub struct Host {
    /// Directories and names.
    pub places: Places,
    /// Guests and helpers.
    pub runtime: Runtime,
    /// What is remembered.
    pub state: Arc<State>,
    /// The mux.
    pub mux: Mux,
}

impl Host {
    /// The process in a guest's or helper's directory, if it runs and its shim does.
    pub fn running(&self, directory: &Path) -> Option<Process> {
        match self.runtime.state(directory) {
            Ok(GuestState::Running(process)) => Some(process),
            _ => None,
        }
    }

    /// How the process of a directory ended, in words.
    pub fn ending(&self, directory: &Path) -> String {
        match self.runtime.state(directory) {
            Ok(GuestState::Exited(Some(exit))) => match (exit.code, exit.signal) {
                (Some(code), _) => format!("with code {code}"),
                (None, Some(signal)) => format!("by signal {signal}"),
                (None, None) => "somehow".into(),
            },
            Ok(GuestState::Absent | GuestState::Exited(None)) => {
                "unseen (its shim was killed, or the machine stopped)".into()
            }
            Ok(GuestState::Orphaned(_)) => "with its shim, which was killed".into(),
            Ok(GuestState::Created(_)) => "before it began".into(),
            Ok(GuestState::Running(_)) => "and runs again".into(),
            Err(error) => words(&error),
        }
    }

    /// Makes a directory for the sockets of others. Those above it can be passed by everybody.
    pub fn make_directory(&self, directory: &Directory) -> Result<(), HostError> {
        let path = &directory.path;
        let parent = path.parent().unwrap_or(path);
        make_passable(&self.places.run, parent)?;
        match fs::create_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("can't make", path)(error));
            }
            _ => {}
        }
        chown(path, Some(directory.uid), Some(directory.gid))
            .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(directory.mode)))
            .map_err(failed("can't set owner and mode of", path))
    }

    /// Says to a forwarding guest how many cores it may use.
    pub fn say_quota(&self, plan: &GuestPlan) -> Result<(), HostError> {
        let Some(path) = &plan.quota else { return Ok(()) };
        let cores = plan.container.limits.cpu_cores.unwrap_or(1.0);
        write_file(path, format!("{cores}\n").as_bytes())
    }

    /// Starts a helper anew, whatever there is of it, and waits until it listens at `socket`.
    pub fn start_helper(
        &self,
        spec: &HelperSpec,
        socket: Option<(&'static str, &Path)>,
    ) -> Result<Process, HostError> {
        self.runtime.delete(&spec.dir)?;
        if let Some((_, path)) = socket {
            remove_file(path)?;
        }
        make_passable(&self.places.run, spec.dir.parent().unwrap_or(&spec.dir))?;
        let process = self.runtime.spawn_helper(spec, &[])?;
        let Some((peer, path)) = socket else { return Ok(process) };
        let end = Instant::now() + LISTEN_MAX;
        loop {
            match control::wait_for_listener(peer, path, Duration::from_millis(100)) {
                Ok(()) => return Ok(process),
                Err(_) if self.running(&spec.dir).is_none() => {
                    let how = self.ending(&spec.dir);
                    return Err(HostError::Ended { who: spec.id.clone(), how });
                }
                Err(error) if Instant::now() > end => return Err(error.into()),
                Err(_) => {}
            }
        }
    }

    /// Makes TAPs in the network namespace of a guest that was created.
    pub fn make_taps(&self, guest: Process, taps: &[TapSpec]) -> Result<Vec<OwnedFd>, HostError> {
        let path = namespace(guest, "net");
        let netns = fs::File::open(&path).map_err(failed("can't open", &path))?;
        let mut made = Vec::with_capacity(taps.len());
        for tap in taps {
            made.push(pdp_net::tap::create(netns.as_fd(), tap)?);
        }
        Ok(made)
    }

    /// Starts a TAP helper anew over TAPs that there are.
    pub fn start_tap_helper(
        &self,
        plan: &TapHelperPlan,
        taps: &[OwnedFd],
    ) -> Result<Process, HostError> {
        let process = self.start_helper(&plan.process, Some(("TAP helper", &plan.control)))?;
        let descriptors: Vec<_> = taps.iter().map(AsFd::as_fd).collect();
        TapHelper { path: plan.control.clone() }.serve(plan.ports.clone(), &descriptors)?;
        Ok(process)
    }

    /// The TAPs that a running helper holds, in the plan's order; `None` if those are not the
    /// plan's.
    pub fn held_taps(&self, plan: &TapHelperPlan) -> Result<Option<Vec<OwnedFd>>, HostError> {
        let held = TapHelper { path: plan.control.clone() }.hold()?;
        let same = held.len() == plan.ports.len()
            && held.iter().zip(&plan.ports).all(|((held, _), planned)| held == planned);
        Ok(same.then(|| held.into_iter().map(|(_, descriptor)| descriptor).collect()))
    }
}

/// Path of a namespace of a process.
pub fn namespace(process: Process, kind: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{}/ns/{kind}", process.pid))
}

/// Makes `path` and what is missing between it and `root`, root's, for everybody to pass.
pub fn make_passable(root: &Path, path: &Path) -> Result<(), HostError> {
    if path.starts_with(root) && path != root {
        make_passable(root, path.parent().unwrap_or(root))?;
    }
    match fs::create_dir(path) {
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(0o711))
            .map_err(failed("can't set the mode of", path)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(failed("can't make", path)(error)),
    }
}

/// The id of a group of this machine, by name or number.
pub fn group_id(group: &str) -> Result<u32, HostError> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let found = nix::unistd::Group::from_name(group)
        .map_err(|error| failed("can't look up group", Path::new(group))(error.into()))?;
    match found {
        Some(found) => Ok(found.gid.as_raw()),
        None => Err(HostError::NoGroup(group.into())),
    }
}

/// Replaces a file's content in one step.
pub fn write_file(path: &Path, content: &[u8]) -> Result<(), HostError> {
    let partial = path.with_extension("partial");
    fs::write(&partial, content)
        .and_then(|()| fs::rename(&partial, path))
        .map_err(failed("can't write", path))
}

/// Removes a file if it is there.
pub fn remove_file(path: &Path) -> Result<(), HostError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed("can't remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Removes a directory with all that is in it, if it is there.
pub fn remove_directory(path: &Path) -> Result<(), HostError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed("can't remove", path)(error))
        }
        _ => Ok(()),
    }
}
