//! Interface between the reconcile loop and the machine.
//!
//! Each call does one thing and returns. It never waits for a process to become ready or
//! to end. A call takes as long as a container's creation (`runc`), a system call, or an
//! answer. Answers are limited by [`crate::host::control::CALL_MAX`] and [`MIRROR_WAIT`].
//!
//! [`Host`] is the real implementation; tests of the loop use a fake one.

mod bundle;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_container::{GuestSpec, HelperSpec, Limits, Process, ProcessState as GuestState};
use pdp_model::Stats;
use pdp_net::route::StaticRouteSpec;
use pdp_net::tap::TapSpec;
use pdp_net::xdp::Xdp;
use pdp_proto::channel::Channel;
use pdp_proto::mux;

pub use bundle::{Host, spawn_monitor};

use crate::host::control::{ControlError, MirrorClient, MuxHello, TapHelperClient};
use crate::host::{self, HostError, failed, make_passable, network_namespace, sockets, write_file};
use crate::kernel::ports::ChangedNode;
use crate::plan::{DirectoryPlan, GuestPlan, KernelLinkPortState, KernelPlan, TapHelperPlan};
use crate::util::{PRIVATE, error_chain, hide};

/// Longest wait at a socket whose accept queue is full.
const LISTEN_WAIT: Duration = Duration::from_millis(20);

/// Longest wait for a route mirror's answer.
const MIRROR_WAIT: Duration = Duration::from_secs(1);

/// A machine. Calls may come from several threads, for different objects.
pub trait Machine: Debug + Send + Sync {
    /// Returns the process in a guest's or helper's directory, if it and its shim run.
    fn running(&self, dir: &Path) -> Option<Process>;

    /// True if a process exists, whether started or only created.
    fn is_alive(&self, process: Process) -> bool;

    /// True if `process` is the guest in this directory, was created
    /// but not started, and its shim runs.
    fn awaits_start(&self, dir: &Path, process: Process) -> bool;

    /// Describes how the process of a directory ended.
    fn ending(&self, dir: &Path) -> String;

    /// Returns a descriptor that polls readable once the process of a
    /// directory has ended; `None` if it has.
    fn exit_fd(&self, dir: &Path) -> Result<Option<OwnedFd>, HostError>;

    /// Returns the directories of all guests and helpers, complete or not.
    fn list(&self) -> Result<Vec<PathBuf>, HostError>;

    /// Removes all logs except those of these directories.
    fn remove_logs_but(&self, known: &BTreeSet<PathBuf>) -> Result<(), HostError>;

    /// Removes the volumes of a stopped guest, except those with these names.
    fn remove_volumes(&self, dir: &Path, kept: &BTreeSet<&str>) -> Result<(), HostError>;

    /// Removes all volumes except those of the guests in these directories.
    fn remove_volumes_but(&self, known: &BTreeSet<PathBuf>) -> Result<(), HostError>;

    /// Removes images that no guest uses; quick if there are none. An image that can't be
    /// removed is logged and tried again the next time, since no running guest is at fault.
    fn collect_images(&self);

    /// Starts to unpack a guest's image. Returns true once it is unpacked.
    fn unpack(&self, spec: &GuestSpec) -> Result<bool, HostError>;

    /// Creates a guest with its namespaces.
    fn create(&self, spec: &GuestSpec) -> Result<Process, HostError>;

    /// Starts a created guest.
    fn start(&self, dir: &Path) -> Result<(), HostError>;

    /// Changes the limits of a guest.
    fn update_limits(&self, dir: &Path, limits: &Limits) -> Result<(), HostError>;

    /// Starts a new helper, which creates `socket` and listens there.
    fn spawn(&self, spec: &HelperSpec, socket: &Path) -> Result<Process, HostError>;

    /// Starts a new helper that serves connections to `socket`, which is created for it and
    /// becomes its standard input.
    fn spawn_served(&self, spec: &HelperSpec, socket: &Path) -> Result<Process, HostError>;

    /// True if a process listens at a socket.
    fn listens(&self, socket: &Path) -> bool;

    /// Kills a guest or helper, and removes every trace of it once it
    /// has ended. Returns false if it has not ended yet.
    fn end(&self, dir: &Path) -> Result<bool, HostError>;

    /// Returns the last line that an ended helper logged, if it is an error.
    fn last_error(&self, dir: &Path) -> Option<String>;

    /// Tells a forwarding guest how many cores it may use.
    fn write_quota(&self, plan: &GuestPlan) -> Result<(), HostError>;

    /// Creates TAPs in the network namespace of a created guest.
    fn make_taps(&self, guest: Process, taps: &[TapSpec]) -> Result<Vec<OwnedFd>, HostError>;

    /// Sets sysctls in the network namespace of a created guest, in this order.
    fn set_sysctls(&self, guest: Process, values: &[(String, String)]) -> Result<(), HostError>;

    /// Sets the addresses of `lo` in the network namespace of a created guest.
    fn set_loopback(&self, guest: Process, addresses: &[IpNet]) -> Result<(), HostError>;

    /// Sets static routes in a guest's network namespace. `before` are those set earlier.
    fn set_routes(
        &self,
        guest: Process,
        before: &[StaticRouteSpec],
        wanted: &[StaticRouteSpec],
    ) -> Result<(), HostError>;

    /// Sets up a node's ports whose frames stay in the kernel, in the
    /// network namespace of a created guest.
    fn see_to_ports(
        &self,
        of: (&str, &str),
        guest: Process,
        kernel: Option<&KernelPlan>,
        ports: &[KernelLinkPortState<'_>],
    ) -> Result<(), HostError>;

    /// Returns a descriptor that is readable from when a guest may have changed
    /// such a port until the ports are checked; `None` if no such ports exist.
    fn watch_ports(&self) -> Option<Arc<OwnedFd>>;

    /// Checks the ports that the descriptor reports. Returns nodes with
    /// a port that is gone, or that changed since the last check.
    fn touched_ports(&self) -> Vec<ChangedNode>;

    /// Removes all such ports except the numbers that `kept` returns. `kept`
    /// is called while no port is being created, so ports wanted by then stay.
    /// The common state stays if `any` returns true because some are wanted.
    fn remove_ports_but(
        &self,
        kept: &dyn Fn() -> BTreeSet<u32>,
        any: &dyn Fn() -> bool,
    ) -> Result<(), HostError>;

    /// Makes the program at a device, with pins in `pins`, deliver tunnel
    /// frames to such ports. Does nothing if it does so since `before`, an
    /// earlier result. Returns the program, and the new value for `before`.
    fn attach_for_ports(
        &self,
        device: &str,
        pins: &Path,
        before: Option<u64>,
    ) -> Result<Option<(Xdp, u64)>, HostError>;

    /// Raises or drops the carrier of a TAP.
    fn set_carrier(&self, tap: BorrowedFd<'_>, up: bool) -> Result<(), HostError>;

    /// Makes a helper serve TAPs.
    fn serve(&self, plan: &TapHelperPlan, taps: &[OwnedFd]) -> Result<(), HostError>;

    /// Returns the TAPs of a running helper, in the plan's order;
    /// `None` if they differ from the plan's.
    fn reported_taps(&self, plan: &TapHelperPlan) -> Result<Option<Vec<OwnedFd>>, HostError>;

    /// True if a guest's tables equal the kernel's, as far as its mirror knows.
    fn has_routes(&self, mirror: &Path, guest: u32) -> bool;

    /// Creates a directory for sockets of other processes. Everybody may traverse those above it.
    fn make_directory(&self, directory: &DirectoryPlan) -> Result<(), HostError>;

    /// True if a directory exists.
    fn has_directory(&self, path: &Path) -> bool;

    /// Sets a file's content atomically. Returns true if it was different.
    fn update_file(&self, path: &Path, content: &[u8]) -> Result<bool, HostError>;

    /// Overwrites a file that guests have bound and see; the file keeps its inode.
    fn write_over(&self, path: &Path, content: &[u8]) -> Result<(), HostError>;

    /// Removes a directory and its content, if it exists.
    fn remove_directory(&self, path: &Path) -> Result<(), HostError>;

    /// Removes the content of a directory and keeps the directory.
    fn clear_directory(&self, path: &Path) -> Result<(), HostError>;

    /// Creates a cgroup with these limits, or sets the limits of an existing one.
    fn limit(&self, cgroup: &str, limits: &Limits) -> Result<(), HostError>;

    /// Moves the helper in a directory to another cgroup, if it runs.
    fn enter(&self, dir: &Path, cgroup: &str) -> Result<(), HostError>;

    /// Sets the CPU weight of a cgroup, thousandths of a core.
    fn weigh(&self, cgroup: &str, millicores: u32) -> Result<(), HostError>;

    /// Enlarges the kernel's neighbour tables for this many entries
    /// besides the machine's own, up to a limit.
    fn raise_neighbour_limits(&self, count: u64);

    /// Raises the kernel's common limits such that each of `all` guests,
    /// `of_vnet` of which belong to one network, can use its allowance.
    fn raise_guest_limits(&self, all: u64, of_vnet: u64);

    /// Charges kernel resources of a vnet's guests to its owner, as far
    /// as the kernel can. `first_user` is the guests' first user id.
    fn bound(&self, vnet: &str, first_user: u32);

    /// Reverts [`Machine::bound`]. With the last vnet, removes all its state.
    fn unbound(&self, vnet: &str, last: bool) -> Result<(), HostError>;

    /// Kills the processes in a cgroup, and removes it once they have ended. Returns false if they
    /// have not ended yet. An empty name means everything below pdpd's own cgroup, which stays.
    fn remove_cgroup(&self, cgroup: &str) -> Result<bool, HostError>;

    /// Removes a cgroup, and the directory of the same name below the
    /// run directory, if they are empty.
    fn remove_if_empty(&self, name: &str);

    /// Returns the objects that the mux has.
    fn mux(&self) -> Result<MuxHello, ControlError>;

    /// Returns the mux's counters of a vnet.
    fn mux_stats(&self, vnet: &str) -> Result<Stats, ControlError>;

    /// Adds or changes a vnet in the mux, and passes the listening sockets that the mux lacks.
    fn put_vnet(&self, vnet: mux::VnetConfig) -> Result<(), HostError>;

    /// Deletes a vnet from the mux.
    fn delete_vnet(&self, vnet: &str) -> Result<(), HostError>;

    /// Adds or changes an external interface in the mux, with descriptors or with none to keep
    /// those it has. Passes the listening socket if the mux lacks it.
    fn put_external(
        &self,
        external: mux::ExternalConfig,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), HostError>;

    /// Deletes an external interface from the mux.
    fn delete_external(&self, name: &str) -> Result<(), HostError>;

    /// Formats an error for clients of the API.
    fn error_text(&self, error: &HostError) -> String {
        error_chain(error)
    }
}

impl Machine for Host {
    fn running(&self, dir: &Path) -> Option<Process> {
        match self.runtime.state(dir) {
            Ok(GuestState::Running(process)) => Some(process),
            _ => None,
        }
    }

    fn is_alive(&self, process: Process) -> bool {
        process.is_alive()
    }

    fn awaits_start(&self, dir: &Path, process: Process) -> bool {
        matches!(self.runtime.state(dir), Ok(GuestState::Created(made)) if made == process)
    }

    fn ending(&self, dir: &Path) -> String {
        match self.runtime.state(dir) {
            Ok(GuestState::Exited(Some(exit))) => {
                let how = match (exit.code, exit.signal) {
                    (Some(code), _) => format!("with code {code}"),
                    (None, Some(signal)) => format!("by signal {signal}"),
                    (None, None) => "somehow".into(),
                };
                how + &self.why_guest_ended(dir, exit)
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

    fn exit_fd(&self, dir: &Path) -> Result<Option<OwnedFd>, HostError> {
        Ok(self.runtime.wait_exit(dir)?)
    }

    fn list(&self) -> Result<Vec<PathBuf>, HostError> {
        // They were removed with the node's other objects, since nothing is wanted.
        if !self.places.records().exists() {
            return Ok(Vec::new());
        }
        Ok(self.runtime.list()?)
    }

    fn remove_logs_but(&self, known: &BTreeSet<PathBuf>) -> Result<(), HostError> {
        Ok(self.runtime.remove_logs_but(known)?)
    }

    fn remove_volumes(&self, dir: &Path, kept: &BTreeSet<&str>) -> Result<(), HostError> {
        Ok(self.runtime.remove_volumes(dir, kept)?)
    }

    fn remove_volumes_but(&self, known: &BTreeSet<PathBuf>) -> Result<(), HostError> {
        Ok(self.runtime.remove_volumes_but(known)?)
    }

    fn collect_images(&self) {
        if let Err(error) = self.runtime.collect_images() {
            tracing::warn!("images: {}", error_chain(&error));
        }
    }

    fn unpack(&self, spec: &GuestSpec) -> Result<bool, HostError> {
        Ok(self.runtime.unpack(spec)?)
    }

    fn create(&self, spec: &GuestSpec) -> Result<Process, HostError> {
        Ok(self.runtime.create(spec, &[])?)
    }

    fn start(&self, dir: &Path) -> Result<(), HostError> {
        Ok(self.runtime.start(dir)?)
    }

    fn update_limits(&self, dir: &Path, limits: &Limits) -> Result<(), HostError> {
        Ok(self.runtime.update_limits(dir, limits)?)
    }

    fn spawn(&self, spec: &HelperSpec, socket: &Path) -> Result<Process, HostError> {
        host::remove_file(socket)?;
        Ok(self.runtime.spawn_helper(spec, None)?)
    }

    fn spawn_served(&self, spec: &HelperSpec, socket: &Path) -> Result<Process, HostError> {
        make_passable(&self.places.run, socket.parent().unwrap_or(socket))?;
        let listener = sockets::listen(socket, sockets::SocketKind::Control);
        let listener = listener.map_err(failed("can't listen at", socket))?;
        Ok(self.runtime.spawn_helper(spec, Some(listener.as_fd()))?)
    }

    fn listens(&self, socket: &Path) -> bool {
        Channel::connect_until(socket, Instant::now() + LISTEN_WAIT).is_ok()
    }

    fn end(&self, dir: &Path) -> Result<bool, HostError> {
        // Unreadable records are not waited for, but removed as files.
        if matches!(self.runtime.kill(dir), Ok(false)) {
            return Ok(false);
        }
        self.runtime.delete(dir)?;
        Ok(true)
    }

    fn last_error(&self, dir: &Path) -> Option<String> {
        const TAIL: u64 = 4096;
        let [log, _] = self.runtime.logs(dir).ok()?;
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

    fn write_quota(&self, plan: &GuestPlan) -> Result<(), HostError> {
        let Some(path) = &plan.quota else { return Ok(()) };
        let cores = plan.container.limits.cpu_cores.unwrap_or(1.0);
        write_file(path, format!("{cores}\n").as_bytes(), 0o644)
    }

    fn make_taps(&self, guest: Process, taps: &[TapSpec]) -> Result<Vec<OwnedFd>, HostError> {
        let netns = network_namespace(guest)?;
        let mut made = Vec::with_capacity(taps.len());
        for tap in taps {
            made.push(pdp_net::tap::create(netns.as_fd(), tap)?);
        }
        Ok(made)
    }

    fn set_sysctls(&self, guest: Process, values: &[(String, String)]) -> Result<(), HostError> {
        let netns = host::network_namespace(guest)?;
        Ok(pdp_net::sysctl::set_all(netns.as_fd(), values)?)
    }

    fn set_loopback(&self, guest: Process, addresses: &[IpNet]) -> Result<(), HostError> {
        let netns = host::network_namespace(guest)?;
        Ok(pdp_net::route::set_loopback(netns.as_fd(), addresses)?)
    }

    fn set_routes(
        &self,
        guest: Process,
        before: &[StaticRouteSpec],
        wanted: &[StaticRouteSpec],
    ) -> Result<(), HostError> {
        let netns = host::network_namespace(guest)?;
        Ok(pdp_net::route::set(netns.as_fd(), before, wanted)?)
    }

    fn see_to_ports(
        &self,
        of: (&str, &str),
        guest: Process,
        kernel: Option<&KernelPlan>,
        ports: &[KernelLinkPortState<'_>],
    ) -> Result<(), HostError> {
        self.ports.see_to(of, guest, kernel, ports, self.runtime.cgroups())
    }

    fn watch_ports(&self) -> Option<Arc<OwnedFd>> {
        self.ports.watch()
    }

    fn touched_ports(&self) -> Vec<ChangedNode> {
        self.ports.touched()
    }

    fn remove_ports_but(
        &self,
        kept: &dyn Fn() -> BTreeSet<u32>,
        any: &dyn Fn() -> bool,
    ) -> Result<(), HostError> {
        self.ports.remove_but(kept, any)
    }

    fn attach_for_ports(
        &self,
        device: &str,
        pins: &Path,
        before: Option<u64>,
    ) -> Result<Option<(Xdp, u64)>, HostError> {
        self.ports.attach(device, pins, before)
    }

    fn set_carrier(&self, tap: BorrowedFd<'_>, up: bool) -> Result<(), HostError> {
        Ok(pdp_net::tap::set_carrier(tap, up)?)
    }

    fn serve(&self, plan: &TapHelperPlan, taps: &[OwnedFd]) -> Result<(), HostError> {
        let descriptors: Vec<_> = taps.iter().map(AsFd::as_fd).collect();
        let helper = TapHelperClient { path: plan.control.clone() };
        Ok(helper.serve(plan.ports.clone(), &descriptors)?)
    }

    fn reported_taps(&self, plan: &TapHelperPlan) -> Result<Option<Vec<OwnedFd>>, HostError> {
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

    fn has_routes(&self, mirror: &Path, guest: u32) -> bool {
        let status = MirrorClient { path: mirror.into() }.status(MIRROR_WAIT);
        let synced = |status: pdp_proto::mirror::MirrorStatusReply| {
            status.stats.guests.iter().any(|known| known.guest == guest && known.synced)
        };
        status.is_ok_and(synced)
    }

    fn make_directory(&self, directory: &DirectoryPlan) -> Result<(), HostError> {
        let path = &directory.path;
        make_passable(&self.places.run, path.parent().unwrap_or(path))?;
        let made = match directory.writable {
            true => sockets::make_writable_directory(path, directory.gid),
            false => sockets::make_directory(path, directory.gid),
        };
        made.map_err(failed("can't make", path))
    }

    fn has_directory(&self, path: &Path) -> bool {
        path.is_dir()
    }

    fn update_file(&self, path: &Path, content: &[u8]) -> Result<bool, HostError> {
        if host::read_own(path)?.is_some_and(|before| before == content) {
            return Ok(false);
        }
        host::write_file(path, content, PRIVATE).map(|()| true)
    }

    fn write_over(&self, path: &Path, content: &[u8]) -> Result<(), HostError> {
        host::write_over(path, content)
    }

    fn remove_directory(&self, path: &Path) -> Result<(), HostError> {
        host::remove_directory(path)
    }

    fn clear_directory(&self, path: &Path) -> Result<(), HostError> {
        host::clear_directory(path)
    }

    fn enter(&self, dir: &Path, cgroup: &str) -> Result<(), HostError> {
        let Some(process) = self.running(dir) else { return Ok(()) };
        Ok(self.runtime.cgroups().enter(cgroup, process.pid)?)
    }

    fn limit(&self, cgroup: &str, limits: &Limits) -> Result<(), HostError> {
        Ok(self.runtime.cgroups().ensure(cgroup, limits)?)
    }

    fn weigh(&self, cgroup: &str, millicores: u32) -> Result<(), HostError> {
        Ok(self.runtime.cgroups().weigh(cgroup, millicores)?)
    }

    fn raise_neighbour_limits(&self, count: u64) {
        self.settings.raise_neighbour_limits(count);
    }

    fn raise_guest_limits(&self, all: u64, of_vnet: u64) {
        self.settings.raise_guest_limits(all, of_vnet);
    }

    fn bound(&self, vnet: &str, first_user: u32) {
        self.bounds.put(vnet, first_user);
    }

    fn unbound(&self, vnet: &str, last: bool) -> Result<(), HostError> {
        self.bounds.forget(vnet, last)
    }

    fn remove_cgroup(&self, cgroup: &str) -> Result<bool, HostError> {
        Ok(self.runtime.cgroups().try_remove(cgroup)?)
    }

    fn remove_if_empty(&self, name: &str) {
        self.runtime.cgroups().remove_if_empty(name);
        let _ = std::fs::remove_dir(self.places.run.join(name));
    }

    fn mux(&self) -> Result<MuxHello, ControlError> {
        self.mux.hello()
    }

    fn mux_stats(&self, vnet: &str) -> Result<Stats, ControlError> {
        self.mux.stats(Some(vnet))
    }

    fn put_vnet(&self, vnet: mux::VnetConfig) -> Result<(), HostError> {
        let sockets = vnet.sockets().map(PathBuf::from).collect();
        self.with_listeners(&sockets, || self.mux.put_vnet(vnet.clone()))
    }

    fn delete_vnet(&self, vnet: &str) -> Result<(), HostError> {
        Ok(self.mux.delete_vnet(vnet)?)
    }

    fn put_external(
        &self,
        external: mux::ExternalConfig,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), HostError> {
        let sockets = external.socket().map(PathBuf::from).into_iter().collect();
        self.with_listeners(&sockets, || self.mux.put_external(external.clone(), descriptors))
    }

    fn delete_external(&self, name: &str) -> Result<(), HostError> {
        Ok(self.mux.delete_external(name)?)
    }

    fn error_text(&self, error: &HostError) -> String {
        hide(self.state_directory(), error_chain(error))
    }
}
