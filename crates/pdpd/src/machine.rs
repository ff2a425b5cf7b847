//! What the keeper needs of a machine.
//!
//! Each call does one thing and returns: none waits for a process to be ready or to end. What a call
//! does take is that of a container being made (`runc`), of a system call, or of an answer, for which
//! [`crate::control::CALL_MAX`] and [`MIRROR_WAIT`] are the bounds.
//!
//! [`Host`] is the real one; tests of the keeper have one that only pretends.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use pdp_container::{GuestSpec, HelperSpec, Limits, Process, State as GuestState};
use pdp_net::route::Route;
use pdp_net::tap::TapSpec;
use pdp_net::xdp::Xdp;
use pdp_proto::channel::Channel;
use pdp_proto::mux;

use crate::control::{ControlError, Mirror, MuxHello, TapHelper};
use crate::host::{self, Host, HostError, words};
use crate::plan::{Directory, GuestPlan, KernelPlan, PortNow, TapHelperPlan};
use crate::ports::Touched;
use crate::state::PRIVATE;

/// Longest wait at a socket whose queue of connections is full.
const LISTEN_WAIT: Duration = Duration::from_millis(20);

/// Longest wait for a route mirror's answer.
const MIRROR_WAIT: Duration = Duration::from_secs(1);

/// A machine. Its calls may come from several threads, for different objects.
pub trait Machine: Debug + Send + Sync {
    /// The process in a guest's or helper's directory, if it runs and its shim does.
    fn running(&self, dir: &Path) -> Option<Process>;

    /// Whether a process is there, started or only made.
    fn is_alive(&self, process: Process) -> bool;

    /// Whether the guest in a directory, which is this process, was made and waits for its start, and its shim
    /// is there.
    fn waits(&self, dir: &Path, process: Process) -> bool;

    /// How the process of a directory ended, in words.
    fn ending(&self, dir: &Path) -> String;

    /// A descriptor that polls readable once the process of a directory ended; `None` if it has.
    fn wait_exit(&self, dir: &Path) -> Result<Option<OwnedFd>, HostError>;

    /// Directories of all guests and helpers that there are, whole or not.
    fn list(&self) -> Result<Vec<PathBuf>, HostError>;

    /// Removes logs of others than these.
    fn remove_logs_but(&self, known: &BTreeSet<PathBuf>) -> Result<(), HostError>;

    /// Removes the volumes of the guest in a directory, which does not run, but those of these names.
    fn remove_volumes(&self, dir: &Path, kept: &BTreeSet<&str>) -> Result<(), HostError>;

    /// Removes volumes but those of the guests in these directories.
    fn remove_volumes_but(&self, known: &BTreeSet<PathBuf>) -> Result<(), HostError>;

    /// Removes images that no guest runs on. Quick where there are none. One that stays is told in the log and
    /// tried again the next time: it is nobody's fault who runs now.
    fn collect_images(&self);

    /// Begins to unpack a guest's image, and returns true once it is.
    fn unpack(&self, spec: &GuestSpec) -> Result<bool, HostError>;

    /// Makes a guest up to its namespaces.
    fn create(&self, spec: &GuestSpec) -> Result<Process, HostError>;

    /// Starts a guest that was made.
    fn start(&self, dir: &Path) -> Result<(), HostError>;

    /// Changes the limits of a guest.
    fn update_limits(&self, dir: &Path, limits: &Limits) -> Result<(), HostError>;

    /// Starts a helper, of which there is nothing; it makes `socket` and listens there.
    fn spawn(&self, spec: &HelperSpec, socket: &Path) -> Result<Process, HostError>;

    /// Starts a helper, of which there is nothing, that serves what connects to `socket`, made for it.
    fn spawn_served(&self, spec: &HelperSpec, socket: &Path) -> Result<Process, HostError>;

    /// Whether somebody listens at a socket.
    fn listens(&self, socket: &Path) -> bool;

    /// Kills a guest or helper, and removes every trace of it once it has ended; false: it has not
    /// yet.
    fn end(&self, dir: &Path) -> Result<bool, HostError>;

    /// What a helper that ended said last, if that is of why.
    fn last_words(&self, dir: &Path) -> Option<String>;

    /// Says to a forwarding guest how many cores it may use.
    fn say_quota(&self, plan: &GuestPlan) -> Result<(), HostError>;

    /// Makes TAPs in the network namespace of a guest that was made.
    fn make_taps(&self, guest: Process, taps: &[TapSpec]) -> Result<Vec<OwnedFd>, HostError>;

    /// Sets sysctls of the network namespace of a guest that was made, in this order.
    fn set_sysctls(&self, guest: Process, values: &[(String, String)]) -> Result<(), HostError>;

    /// Gives `lo` in the network namespace of a guest that was made these addresses.
    fn set_loopback(&self, guest: Process, addresses: &[IpNet]) -> Result<(), HostError>;

    /// Gives a guest's network namespace static routes; `before`: those that it was given before.
    fn set_routes(
        &self,
        guest: Process,
        before: &[Route],
        wanted: &[Route],
    ) -> Result<(), HostError>;

    /// Sees to it that the ports of a node whose frames stay in the kernel are so, in the network namespace of a guest
    /// that was made.
    fn see_to_ports(
        &self,
        of: (&str, &str),
        guest: Process,
        kernel: Option<&KernelPlan>,
        ports: &[PortNow<'_>],
    ) -> Result<(), HostError>;

    /// What is readable where a guest may have done something to one, until they are looked at; `None`: there are none.
    fn watch_ports(&self) -> Option<Arc<OwnedFd>>;

    /// Looks at those of which that is told: nodes that one is gone of, or of which one is otherwise than at the last
    /// look.
    fn touched_ports(&self) -> Vec<Touched>;

    /// Removes all such ports but those of the numbers that `kept` says, which is asked while none is made: what is
    /// wanted by then stays. What all had in common stays where `any` says that some are wanted.
    fn remove_ports_but(
        &self,
        kept: &dyn Fn() -> BTreeSet<u32>,
        any: &dyn Fn() -> bool,
    ) -> Result<(), HostError>;

    /// Has the program at a device, whose pins are in `pins`, give such ports what comes by their tunnels, unless it does
    /// since `before`. Returns the program, and when it began.
    fn attach_for_ports(
        &self,
        device: &str,
        pins: &Path,
        before: Option<u64>,
    ) -> Result<Option<(Xdp, u64)>, HostError>;

    /// Raises or drops the carrier of a TAP.
    fn set_carrier(&self, tap: BorrowedFd<'_>, up: bool) -> Result<(), HostError>;

    /// Has a helper serve TAPs.
    fn serve(&self, plan: &TapHelperPlan, taps: &[OwnedFd]) -> Result<(), HostError>;

    /// The TAPs that a running helper holds, in the plan's order; `None` if those are not the plan's.
    fn held_taps(&self, plan: &TapHelperPlan) -> Result<Option<Vec<OwnedFd>>, HostError>;

    /// Whether a guest's tables equal the kernel's, as far as its mirror knows.
    fn has_routes(&self, mirror: &Path, guest: u32) -> bool;

    /// Makes a directory for the sockets of others.
    fn make_directory(&self, directory: &Directory) -> Result<(), HostError>;

    /// Whether a directory is there.
    fn has_directory(&self, path: &Path) -> bool;

    /// Makes this a file's content, in one step; whether it was another.
    fn update_file(&self, path: &Path, content: &[u8]) -> Result<bool, HostError>;

    /// Makes this the content of a file that guests have bound, which they see; it stays the same file.
    fn write_over(&self, path: &Path, content: &[u8]) -> Result<(), HostError>;

    /// Removes a directory with all that is in it, if it is there.
    fn remove_directory(&self, path: &Path) -> Result<(), HostError>;

    /// Removes all that is in a directory, which stays.
    fn clear_directory(&self, path: &Path) -> Result<(), HostError>;

    /// Makes a cgroup with these limits, or sets those of one that is there.
    fn limit(&self, cgroup: &str, limits: &Limits) -> Result<(), HostError>;

    /// Has the helper in a directory run in another cgroup, if it runs.
    fn enter(&self, dir: &Path, cgroup: &str) -> Result<(), HostError>;

    /// Says what part of a CPU a cgroup gets, thousandths of a core.
    fn weigh(&self, cgroup: &str, millicores: u32) -> Result<(), HostError>;

    /// Sees to it that the kernel's neighbour tables have room for so many entries beside the machine's own, up
    /// to a bound.
    fn make_room_for_neighbours(&self, count: u64);

    /// Sees to it that each of `all` guests, `of_vnet` of which are one network's, can have what it may of what the
    /// kernel bounds for all together.
    fn make_room_for_guests(&self, all: u64, of_vnet: u64);

    /// Has guests of a vnet, whose user ids begin with this one, pay for what they ask their kernel for, as far as the
    /// kernel can.
    fn bound(&self, vnet: &str, first_user: u32);

    /// Forgets what [`Machine::bound`] said; with the last vnet all that is left of it.
    fn unbound(&self, vnet: &str, last: bool) -> Result<(), HostError>;

    /// Kills what is left in a cgroup, and removes it once that has ended; false: it has not yet. An
    /// empty name means all below pdpd's own, which stays.
    fn remove_cgroup(&self, cgroup: &str) -> Result<bool, HostError>;

    /// Removes a cgroup and a directory below the run directory that have the same name, if nothing
    /// is in them.
    fn remove_if_empty(&self, name: &str);

    /// What the mux has.
    fn mux(&self) -> Result<MuxHello, ControlError>;

    /// Counters of a vnet, from the mux.
    fn mux_stats(&self, vnet: &str) -> Result<mux::Stats, ControlError>;

    /// Has the mux know a vnet.
    fn put_vnet(&self, vnet: mux::Vnet) -> Result<(), HostError>;

    /// Has the mux forget a vnet.
    fn delete_vnet(&self, vnet: &str) -> Result<(), HostError>;

    /// Has the mux know an external interface, with descriptors or with none to keep those it has.
    fn put_external(
        &self,
        external: mux::External,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), HostError>;

    /// Has the mux forget an external interface.
    fn delete_external(&self, name: &str) -> Result<(), HostError>;

    /// An error in words, for who asks by the API.
    fn told(&self, error: &HostError) -> String {
        words(error)
    }
}

impl Machine for Host {
    fn running(&self, dir: &Path) -> Option<Process> {
        Self::running(self, dir)
    }

    fn is_alive(&self, process: Process) -> bool {
        process.is_alive()
    }

    fn waits(&self, dir: &Path, process: Process) -> bool {
        matches!(self.runtime.state(dir), Ok(GuestState::Created(made)) if made == process)
    }

    fn ending(&self, dir: &Path) -> String {
        Self::ending(self, dir)
    }

    fn wait_exit(&self, dir: &Path) -> Result<Option<OwnedFd>, HostError> {
        Ok(self.runtime.wait_exit(dir)?)
    }

    fn list(&self) -> Result<Vec<PathBuf>, HostError> {
        // They went with all that is the node's, where nothing is wanted.
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
            tracing::warn!("images: {}", host::words(&error));
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
        self.start_served(spec, socket)
    }

    fn listens(&self, socket: &Path) -> bool {
        Channel::connect_until(socket, Instant::now() + LISTEN_WAIT).is_ok()
    }

    fn end(&self, dir: &Path) -> Result<bool, HostError> {
        // What can't be read is not waited for, but removed as what it is.
        if matches!(self.runtime.kill(dir), Ok(false)) {
            return Ok(false);
        }
        self.runtime.delete(dir)?;
        Ok(true)
    }

    fn last_words(&self, dir: &Path) -> Option<String> {
        Self::last_words(self, dir)
    }

    fn say_quota(&self, plan: &GuestPlan) -> Result<(), HostError> {
        Self::say_quota(self, plan)
    }

    fn make_taps(&self, guest: Process, taps: &[TapSpec]) -> Result<Vec<OwnedFd>, HostError> {
        Self::make_taps(self, guest, taps)
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
        before: &[Route],
        wanted: &[Route],
    ) -> Result<(), HostError> {
        let netns = host::network_namespace(guest)?;
        Ok(pdp_net::route::set(netns.as_fd(), before, wanted)?)
    }

    fn see_to_ports(
        &self,
        of: (&str, &str),
        guest: Process,
        kernel: Option<&KernelPlan>,
        ports: &[PortNow<'_>],
    ) -> Result<(), HostError> {
        self.ports.see_to(of, guest, kernel, ports, self.runtime.cgroups())
    }

    fn watch_ports(&self) -> Option<Arc<OwnedFd>> {
        self.ports.watch()
    }

    fn touched_ports(&self) -> Vec<Touched> {
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
        let helper = TapHelper { path: plan.control.clone() };
        Ok(helper.serve(plan.ports.clone(), &descriptors)?)
    }

    fn held_taps(&self, plan: &TapHelperPlan) -> Result<Option<Vec<OwnedFd>>, HostError> {
        Self::held_taps(self, plan)
    }

    fn has_routes(&self, mirror: &Path, guest: u32) -> bool {
        let status = Mirror { path: mirror.into() }.status(MIRROR_WAIT);
        let synced = |status: pdp_proto::mirror::Status| {
            status.guests.iter().any(|known| known.guest == guest && known.synced)
        };
        status.is_ok_and(synced)
    }

    fn make_directory(&self, directory: &Directory) -> Result<(), HostError> {
        Self::make_directory(self, directory)
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

    fn make_room_for_neighbours(&self, count: u64) {
        self.settings.hold_neighbours(count);
    }

    fn make_room_for_guests(&self, all: u64, of_vnet: u64) {
        self.settings.hold_guests(all, of_vnet);
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

    fn mux_stats(&self, vnet: &str) -> Result<mux::Stats, ControlError> {
        self.mux.stats(Some(vnet))
    }

    fn put_vnet(&self, vnet: mux::Vnet) -> Result<(), HostError> {
        Self::put_vnet(self, vnet)
    }

    fn delete_vnet(&self, vnet: &str) -> Result<(), HostError> {
        Ok(self.mux.delete_vnet(vnet)?)
    }

    fn put_external(
        &self,
        external: mux::External,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), HostError> {
        Self::put_external(self, external, descriptors)
    }

    fn delete_external(&self, name: &str) -> Result<(), HostError> {
        Ok(self.mux.delete_external(name)?)
    }

    fn told(&self, error: &HostError) -> String {
        host::hide(self.state_directory(), words(error))
    }
}
