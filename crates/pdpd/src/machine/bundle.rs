//! The machine as pdpd uses it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use pdp_container::{ProcessOutcome, Runtime};
use pdp_model::Stats;
use pdp_net::ports;
use pdp_proto::channel::DESCRIPTORS_MAX;

use crate::host::bounds::GuestLimits;
use crate::host::control::{ControlError, MuxClient, Put};
use crate::host::settings::KernelSettings;
use crate::host::{HostError, failed, sockets};
use crate::intent::state::StateFile;
use crate::kernel::ports::{ATTEND_INTERVAL, KernelPorts};
use crate::plan::{DaemonPaths, Plan};

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

    /// Returns the cause of a guest's end from the kernel's counts or its log; empty for a helper.
    pub(super) fn why_guest_ended(&self, directory: &Path, exit: ProcessOutcome) -> String {
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

    /// Sends a request to the mux, and repeats it once with the `planned`
    /// sockets that the mux lacks. The mux gets no socket that is not planned.
    pub(super) fn with_listeners(
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
    use pdp_proto::mux;

    use super::*;
    use crate::machine::Machine;

    /// The mux keeps reporting the planned socket as missing, and also sockets that nobody planned.
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
