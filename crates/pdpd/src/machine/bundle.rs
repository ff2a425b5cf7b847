//! The machine as pdpd uses it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use pdp_container::{HelperSpec, Process, ProcessOutcome, ProcessState as GuestState, Runtime};
use pdp_model::Stats;
use pdp_net::ports;
use pdp_net::tap::TapSpec;
use pdp_proto::channel::DESCRIPTORS_MAX;
use pdp_proto::mux;

use crate::host::bounds::GuestLimits;
use crate::host::control::{ControlError, MuxClient, Put, TapHelperClient};
use crate::host::settings::KernelSettings;
use crate::host::{HostError, failed, make_passable, network_namespace, sockets, write_file};
use crate::intent::state::StateFile;
use crate::kernel::ports::{ATTEND_INTERVAL, KernelPorts};
use crate::plan::{DaemonPaths, DirectoryPlan, GuestPlan, Plan, TapHelperPlan};
use crate::util::error_chain;

/// The machine as pdpd uses it.
#[derive(Debug)]
pub struct Host {
    /// Paths and names.
    pub places: DaemonPaths,
    /// Guests and helpers.
    pub runtime: Runtime,
    /// The state file.
    pub state: Arc<StateFile>,
    /// The mux.
    pub mux: MuxClient,
    /// Ports whose frames stay in the kernel.
    pub ports: KernelPorts,
    /// Limits of kernel resources that guests request.
    pub bounds: GuestLimits,
    /// Settings of the machine that grow with the networks.
    pub settings: KernelSettings,
}

impl Host {
    /// Returns the directory of everything that survives a reboot.
    pub fn state_directory(&self) -> &Path {
        let images = &self.runtime.paths().images;
        images.parent().unwrap_or(images)
    }

    /// Returns the counters of a vnet, or of all, including the plan's
    /// ports that stay in the kernel.
    pub fn stats(&self, vnet: Option<&str>, plan: &Plan) -> Result<Stats, ControlError> {
        let mut stats = self.mux.stats(vnet)?;
        self.ports.count(plan, &mut stats);
        Ok(stats)
    }

    /// Returns the process in a guest's or helper's directory, if it and its shim run.
    pub fn running(&self, directory: &Path) -> Option<Process> {
        match self.runtime.state(directory) {
            Ok(GuestState::Running(process)) => Some(process),
            _ => None,
        }
    }

    /// Describes how the process of a directory ended.
    pub fn ending(&self, directory: &Path) -> String {
        match self.runtime.state(directory) {
            Ok(GuestState::Exited(Some(exit))) => {
                let how = match (exit.code, exit.signal) {
                    (Some(code), _) => format!("with code {code}"),
                    (None, Some(signal)) => format!("by signal {signal}"),
                    (None, None) => "somehow".into(),
                };
                how + &self.why_guest_ended(directory, exit)
            }
            Ok(GuestState::Absent | GuestState::Exited(None)) => {
                "for an unknown reason (its shim was killed, or the machine stopped)".into()
            }
            Ok(GuestState::Orphaned(_)) => "with its shim, which was killed".into(),
            Ok(GuestState::Created(_)) => "before it began".into(),
            Ok(GuestState::Running(_)) => "and runs again".into(),
            Err(error) => error_chain(&error),
        }
    }

    /// Returns the cause of a guest's end from the kernel's counts or its log; empty for a helper.
    fn why_guest_ended(&self, directory: &Path, exit: ProcessOutcome) -> String {
        let Ok(hits) = self.runtime.limit_hits(directory) else { return String::new() };
        // The kernel killed process 1, or a program whose exit code
        // process 1 returns as a shell does.
        let is_killed = exit.signal == Some(9) || exit.code == Some(128 + 9);
        if is_killed && hits.memory_kills > 0 {
            return ", out of memory".into();
        }
        let failed = exit.code.filter(|code| *code != 0);
        let words = failed.and_then(|_| self.runtime.last_words(directory));
        words.map_or(String::new(), |words| format!(": {words}"))
    }

    /// Returns the error that a helper logged before it ended: the last
    /// line of its log that begins with `Error: `.
    pub fn last_error(&self, directory: &Path) -> Option<String> {
        const TAIL: u64 = 4096;
        let [log, _] = self.runtime.logs(directory).ok()?;
        let mut log = File::open(log).ok()?;
        let length = log.metadata().ok()?.len();
        log.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
        let mut tail = Vec::new();
        log.take(TAIL).read_to_end(&mut tail).ok()?;
        let tail = String::from_utf8_lossy(&tail);
        // Each line begins with its time.
        let error = |line: &str| Some(line.split_once(" Error: ")?.1.to_owned());
        tail.lines().rev().find_map(error).map(|why| format!("({why})"))
    }

    /// Creates a directory for sockets. Everybody may traverse those above it.
    pub fn make_directory(&self, directory: &DirectoryPlan) -> Result<(), HostError> {
        let path = &directory.path;
        make_passable(&self.places.run, path.parent().unwrap_or(path))?;
        let made = match directory.writable {
            true => sockets::make_writable_directory(path, directory.gid),
            false => sockets::make_directory(path, directory.gid),
        };
        made.map_err(failed("can't make", path))
    }

    /// Adds or changes a vnet in the mux, and passes the listening sockets that the mux lacks.
    pub fn put_vnet(&self, vnet: mux::VnetConfig) -> Result<(), HostError> {
        let sockets = vnet.sockets().map(PathBuf::from).collect();
        self.with_listeners(&sockets, || self.mux.put_vnet(vnet.clone()))
    }

    /// Adds or changes an external interface in the mux, with its descriptors
    /// ([`MuxClient::put_external`]). Passes the listening socket if the mux lacks it.
    pub fn put_external(
        &self,
        external: mux::ExternalConfig,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), HostError> {
        let sockets = external.socket().map(PathBuf::from).into_iter().collect();
        self.with_listeners(&sockets, || self.mux.put_external(external.clone(), descriptors))
    }

    /// Sends a request to the mux, and repeats it once with the `planned`
    /// sockets that the mux lacks. The mux gets no socket that is not planned.
    fn with_listeners(
        &self,
        planned: &BTreeSet<PathBuf>,
        put: impl Fn() -> Result<Put, ControlError>,
    ) -> Result<(), HostError> {
        let Put::Lacks(lacking) = put()? else { return Ok(()) };
        // Each socket once, however often the mux asks for it.
        let lacking = BTreeSet::from_iter(lacking);
        let missing: Vec<PathBuf> = planned.intersection(&lacking).cloned().collect();
        for paths in missing.chunks(DESCRIPTORS_MAX) {
            let listeners: Vec<OwnedFd> = paths
                .iter()
                .map(|path| {
                    sockets::listen(path, sockets::SocketKind::Memif)
                        .map_err(failed("can't listen at", path))
                })
                .collect::<Result<_, _>>()?;
            let listeners: Vec<_> = listeners.iter().map(AsFd::as_fd).collect();
            self.mux.listen(paths.to_vec(), &listeners)?;
        }
        match put()? {
            Put::Done => Ok(()),
            Put::Lacks(_) => Err(ControlError::Refused {
                peer: "mux",
                reason: "it asks for sockets that it already has, or that no vnet uses".into(),
            }
            .into()),
        }
    }

    /// Tells a forwarding guest how many cores it may use.
    pub fn write_quota(&self, plan: &GuestPlan) -> Result<(), HostError> {
        let Some(path) = &plan.quota else { return Ok(()) };
        let cores = plan.container.limits.cpu_cores.unwrap_or(1.0);
        write_file(path, format!("{cores}\n").as_bytes(), 0o644)
    }

    /// Starts a new helper that serves connections to `socket`. The
    /// socket is created here and becomes the helper's standard input.
    pub fn start_served(&self, spec: &HelperSpec, socket: &Path) -> Result<Process, HostError> {
        make_passable(&self.places.run, socket.parent().unwrap_or(socket))?;
        let listener = sockets::listen(socket, sockets::SocketKind::Control);
        let listener = listener.map_err(failed("can't listen at", socket))?;
        Ok(self.runtime.spawn_helper(spec, Some(listener.as_fd()))?)
    }

    /// Creates TAPs in the network namespace of a created guest.
    pub fn make_taps(&self, guest: Process, taps: &[TapSpec]) -> Result<Vec<OwnedFd>, HostError> {
        let netns = network_namespace(guest)?;
        let mut made = Vec::with_capacity(taps.len());
        for tap in taps {
            made.push(pdp_net::tap::create(netns.as_fd(), tap)?);
        }
        Ok(made)
    }

    /// Returns the TAPs of a running helper, in the plan's order;
    /// `None` if they differ from the plan's.
    pub fn reported_taps(&self, plan: &TapHelperPlan) -> Result<Option<Vec<OwnedFd>>, HostError> {
        let taps = TapHelperClient { path: plan.control.clone() }.taps()?;
        // The helper may lie about its TAPs, but the kernel identifies the descriptors.
        let is_tap = |tap: &OwnedFd, name: &str| {
            pdp_net::tap::name(tap.as_fd()).is_ok_and(|tap| tap == name)
        };
        let same = taps.len() == plan.ports.len()
            && taps
                .iter()
                .zip(&plan.ports)
                .all(|((port, tap), planned)| port == planned && is_tap(tap, &planned.name));
        Ok(same.then(|| taps.into_iter().map(|(_, descriptor)| descriptor).collect()))
    }
}

/// Monitors all ports of a machine periodically, as long as the daemon lives.
///
/// # Errors
/// The thread can't be started.
pub fn spawn_monitor(host: &Arc<Host>) -> std::io::Result<()> {
    let host = Arc::downgrade(host);
    let attend = move || {
        let (mut attended, mut since) = (BTreeMap::new(), ports::now());
        while let Some(host) = Weak::upgrade(&host) {
            let now = ports::now();
            host.bounds.poll();
            host.ports.attend(host.runtime.cgroups(), &mut attended, since);
            since = now;
            drop(host);
            std::thread::sleep(ATTEND_INTERVAL);
        }
    };
    std::thread::Builder::new().name("ports".into()).spawn(attend).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use pdp_container::RuntimePaths;
    use pdp_proto::channel::Channel;

    use super::*;

    /// A mux that reports the planned socket as missing many times, and
    /// also sockets that are not planned, whatever it gets.
    #[test]
    fn lying_mux_gets_each_planned_socket_once() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let any = || "/bin/true".into();
        let runtime = Runtime::new(RuntimePaths {
            runc: any(),
            shim: any(),
            init: any(),
            work: any(),
            records: at("records"),
            runc_root: at("runc"),
            logs: at("logs"),
            images: at("images"),
            volumes: at("volumes"),
            cgroup: "pdp-host-test".into(),
        });
        let control = at("mux.sock");
        let places = DaemonPaths { run: at("run"), lib: at("lib"), pins: at("pins") };
        let host = Host {
            mux: MuxClient { path: control.clone() },
            ports: KernelPorts::new(&places),
            bounds: GuestLimits::new(&places),
            places,
            runtime: runtime.unwrap(),
            state: Arc::new(StateFile::open(&at("state")).unwrap()),
            settings: KernelSettings::default(),
        };
        let (planned, other) = (at("memif.sock"), at("other.sock"));
        let mut sockets = vec![planned.clone(); 20_000];
        sockets.extend(["/etc/passwd".into(), other.clone()]);
        let listener = UnixListener::bind(&control).unwrap();
        let fake = std::thread::spawn(move || {
            let mut got = Vec::new();
            loop {
                let mut channel = Channel::new(listener.accept().unwrap().0);
                let reply = match channel.receive::<mux::MuxRequest>().unwrap() {
                    Some((mux::MuxRequest::PutExternal(_), _)) => {
                        mux::MuxReply::Lacks { sockets: sockets.clone() }
                    }
                    Some((mux::MuxRequest::Listen { sockets }, descriptors)) => {
                        got.push((sockets, descriptors.len()));
                        mux::MuxReply::Done
                    }
                    _ => return got,
                };
                channel.send(&reply, &[]).unwrap();
            }
        });
        let outlet = mux::OutletConfig::Memif { socket: planned.clone() };
        let external = mux::ExternalConfig::new("M", 1500, outlet);
        let error = host.put_external(external, &[]).unwrap_err();
        assert!(error.to_string().contains("asks for sockets"), "{error}");
        assert!(host.mux.hello().is_err(), "it ends");
        assert_eq!(fake.join().unwrap(), [(vec![planned], 1)]);
        assert!(!other.exists());
    }
}
