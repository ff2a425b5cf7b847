//! External interfaces: each outlet is set up and handed to the mux.
//!
//! An outlet stays as long as its inputs do not change. A new pdpd finds it in the journal and
//! in the mux. The journal's detail is the directory of its pins, or empty if it has none.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use pdp_container::Process;
use pdp_net::interface::{Carrier, InterfaceInfo, InterfaceState};
use pdp_net::xdp::{Xdp, XdpMode};
use pdp_proto::mux;
use pdp_spec::DeviceAttach;
use pdp_spec::limits::MTU_MAX;

use super::{Reconciler, Removal, StepContext, StepOutcome};
use crate::host::control::MuxHello;
use crate::host::{self, HostError};
use crate::plan::key::ObjectKey;
use crate::plan::{
    DevicePlan, DirectoryPlan, ExternalPlan, GeneratorPlan, MemifPlan, OutletPlan, Plan, VnetPlan,
};
use crate::util::{error_chain, lock};

/// Action for an external interface.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExternalAction {
    /// This pdpd set it up; only its configuration in the mux may differ.
    Configure,
    /// An earlier pdpd set it up, and the mux has it.
    Adopt,
    /// It must be set up.
    Make,
}

/// Runtime state of an external interface.
#[derive(Debug, Default)]
pub(super) struct ExternalRuntime {
    /// The mux that has it.
    mux: Option<Process>,
    attached: Option<AttachedExternal>,
    /// True if the last attempt to set it up failed.
    failed: bool,
}

/// Why frames can't pass a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutOff {
    /// No device has its name.
    Gone,
    /// The device is set down.
    Down,
    /// The device has no carrier.
    Lost,
}

impl CutOff {
    fn of(device: Option<InterfaceState>) -> Option<Self> {
        match device.map(|condition| condition.carrier) {
            None => Some(Self::Gone),
            Some(Carrier::Down) => Some(Self::Down),
            Some(Carrier::Lost) => Some(Self::Lost),
            Some(Carrier::Yes) => None,
        }
    }

    /// Describes the reason, for `device`.
    pub fn describe(self, device: &str) -> String {
        match self {
            Self::Gone => format!("there is no {device}"),
            Self::Down => format!("{device} is down (ip link set {device} up)"),
            Self::Lost => format!("{device} has no carrier"),
        }
    }
}

#[derive(Debug)]
struct AttachedExternal {
    config: mux::ExternalConfig,
    /// Description of its inputs, as in its journal entry.
    made_for: String,
    xdp: Option<Xdp>,
    /// Value of [`Ports::attach`](crate::kernel::ports::KernelPorts::attach) if its
    /// program delivers tunnel frames to ports.
    ports: Option<u64>,
    /// Why it uses packet sockets instead of AF_XDP.
    instead: Option<String>,
}

impl Reconciler {
    pub(super) fn external(
        &self,
        name: &str,
        wanted: &ExternalPlan,
        plan: &Plan,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        if self.mux_comes() {
            return Ok(StepOutcome::After(ObjectKey::Mux));
        }
        let Some(mux) = self.mux_process() else { return Err(HostError::NoMux) };
        let mut runtime = lock(&self.externals).remove(name).unwrap_or_default();
        if runtime.mux != Some(mux) {
            runtime = ExternalRuntime { mux: Some(mux), ..ExternalRuntime::default() };
        }
        if self.check_device(name, wanted) {
            // The carrier of ports depends on the device, and so do
            // frames that leave without the mux.
            context
                .wake
                .extend(plan.vnets.iter().flat_map(|(vnet, plan)| plan.nodes_at(vnet, name)));
        }
        let before = runtime.attached.is_some();
        let result = self.attach(name, wanted, &mut runtime.attached);
        if runtime.attached.is_some() && !before {
            // The mux refuses vnets that use an external which it does not have.
            let using = plan.vnets.iter().filter(|(_, vnet)| vnet.externals().any(|of| of == name));
            context.wake.extend(using.map(|(vnet, _)| ObjectKey::vnet(vnet)));
        }
        runtime.failed = result.is_err();
        lock(&self.externals).insert(name.into(), runtime);
        result.map(|()| StepOutcome::Done)
    }

    /// Returns an external interface of a vnet that was not tried for this mux yet.
    pub(super) fn external_to_come(&self, vnet: &VnetPlan, plan: &Plan) -> Option<ObjectKey> {
        let mux = self.mux_process()?;
        let sides = lock(&self.externals);
        let tried = |name: &str| {
            let runtime = sides.get(name).filter(|runtime| runtime.mux == Some(mux));
            runtime.is_some_and(|runtime| runtime.attached.is_some() || runtime.failed)
        };
        let mut names = vnet.externals();
        let name = names.find(|name| plan.externals.contains_key(*name) && !tried(name))?;
        Some(ObjectKey::external(name))
    }

    /// Returns externals whose device changed since their last step: it
    /// disappeared, appeared, or its carrier changed. Asks the kernel.
    pub fn changed_devices(&self, plan: &Plan) -> Vec<ObjectKey> {
        let devices = lock(&self.devices);
        let changed = plan.externals.iter().filter(|(name, wanted)| {
            let is = wanted.device().map(InterfaceState::of);
            is.is_some() && devices.get(*name).copied() != is
        });
        changed.map(|(name, _)| ObjectKey::external(name)).collect()
    }

    /// Returns why frames can't pass the device of an external; `None`
    /// if they can, or if nothing is known.
    pub fn cut_off(&self, external: &str) -> Option<CutOff> {
        CutOff::of(*lock(&self.devices).get(external)?)
    }

    /// True if an external loses long frames that senders leave to its device to segment. A
    /// software device without its own XDP passes them on unchanged, and AF_XDP takes none.
    pub fn loses_long_frames(&self, external: &str) -> bool {
        let sides = lock(&self.externals);
        let attached = sides.get(external).and_then(|runtime| runtime.attached.as_ref());
        attached.is_some_and(|attached| {
            let mode = attached.xdp.as_ref().map(Xdp::mode);
            mode == Some(XdpMode::Generic)
                && attached.config.device().is_some_and(|it| it.is_virtual)
        })
    }

    /// Returns why an external uses packet sockets instead of AF_XDP, if it does.
    pub fn instead_of_xdp(&self, external: &str) -> Option<String> {
        lock(&self.externals).get(external)?.attached.as_ref()?.instead.clone()
    }

    /// Checks the device of an external. Returns true if it has become usable or unusable.
    fn check_device(&self, name: &str, wanted: &ExternalPlan) -> bool {
        let is = wanted.device().map(InterfaceState::of);
        let mut all = lock(&self.devices);
        let was = match is {
            Some(is) => all.insert(name.into(), is),
            None => all.remove(name),
        };
        let ports = wanted.device_plan().is_some_and(|device| device.selection.ports);
        was.and_then(CutOff::of) != is.and_then(CutOff::of) || ports && was != is
    }

    fn attach(
        &self,
        name: &str,
        wanted: &ExternalPlan,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        let bps = wanted.capacity_bps;
        match &wanted.outlet {
            OutletPlan::Device(device) => match device.attach {
                // Kernel ports have no other receiver for their frames.
                DeviceAttach::AfXdp if !device.selection.ports => {
                    self.device(name, bps, device, attached)
                }
                DeviceAttach::AfXdp | DeviceAttach::AfXdpBusyPoll => {
                    self.xdp_device(name, bps, device, attached)
                }
                DeviceAttach::Packet => self.packet_device(name, bps, device, attached),
            },
            OutletPlan::Memif(memif) => self.memif(name, bps, memif, attached),
            OutletPlan::Generator(generator) => self.generator(name, bps, generator, attached),
        }
    }

    /// Removes everything that was set up for an external.
    pub(super) fn remove_external(
        &self,
        name: &str,
        plan: &Plan,
        context: &mut StepContext<'_>,
    ) -> Result<StepOutcome, HostError> {
        if plan.mux.is_some() && self.mux_comes() {
            return Ok(StepOutcome::After(ObjectKey::Mux));
        }
        let sides: Vec<_> = lock(&self.vnets)
            .iter()
            .map(|(vnet, runtime)| (vnet.clone(), runtime.clone()))
            .collect();
        for (vnet, runtime) in sides {
            if lock(&runtime).applied.as_ref().is_some_and(|vnet| uses(vnet, name)) {
                return Ok(StepOutcome::After(ObjectKey::vnet(&vnet)));
            }
        }
        (context.report)(&format!("stopping external {name}"));
        let (machine, mut removal) = (&self.machine, Removal::default());
        removal.step(self.forget_external_in_mux(name));
        lock(&self.externals).remove(name);
        lock(&self.devices).remove(name);
        let key = ObjectKey::external(name).to_string();
        if let Some(entry) = self.state.journal_entry(&key)?
            && !entry.detail.is_empty()
        {
            removal.step(pdp_net::xdp::detach(Path::new(&entry.detail)).map_err(HostError::from));
        }
        let socket = self.places.external_memif(name);
        removal.step(machine.remove_directory(socket.parent().unwrap_or(&socket)));
        removal.finish()?;
        if plan.externals.is_empty() {
            machine.remove_if_empty("externals");
        }
        self.state.forget(&key)?;
        Ok(StepOutcome::Gone)
    }

    fn forget_external_in_mux(&self, name: &str) -> Result<(), HostError> {
        let machine = &self.machine;
        if self.mux_process().is_some() && machine.mux()?.externals.iter().any(|has| has == name) {
            machine.delete_external(name)?;
        }
        Ok(())
    }

    /// Attaches a device by AF_XDP, or by packet sockets if the kernel or driver lacks AF_XDP.
    fn device(
        &self,
        name: &str,
        capacity_bps: Option<u64>,
        wanted: &DevicePlan,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        let why = match attached.as_mut().and_then(|attached| attached.instead.take()) {
            Some(why) => why,
            None => match self.xdp_device(name, capacity_bps, wanted, attached) {
                Err(HostError::Socket { source, .. }) if source.is_unsupported() => {
                    error_chain(&source)
                }
                done => return done,
            },
        };
        let packet = DevicePlan { attach: DeviceAttach::Packet, ..wanted.clone() };
        let done = self.packet_device(name, capacity_bps, &packet, attached);
        if let Some(attached) = attached {
            attached.instead = Some(why);
        }
        done
    }

    fn xdp_device(
        &self,
        name: &str,
        capacity_bps: Option<u64>,
        wanted: &DevicePlan,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        let machine = &self.machine;
        let device = device(wanted, attached)?;
        let config = device_config(name, capacity_bps, &device, mux::OutletConfig::Xdp);
        let packet = || device_config(name, capacity_bps, &device, mux::OutletConfig::Packet);
        let busily = wanted.attach == DeviceAttach::AfXdpBusyPoll;
        let how = if busily { "busy-poll " } else { "" };
        let made_for = format!("{how}{} {}", wanted.device, device.index);
        let pins = wanted.pins.to_string_lossy();
        let step = self.begin(name, &made_for, &pins, attached)?;
        if step == ExternalAction::Configure {
            self.set_port_delivery(wanted, attached)?;
            self.retake(wanted, config, attached)?;
            whole_frames(wanted, &device)?;
            return redirects(wanted);
        }
        prepare_pins(&wanted.pins)?;
        let (mut xdp, ports) = match wanted.selection.ports {
            true => self.machine.attach_for_ports(&wanted.device, &wanted.pins, None)?.unzip(),
            false => (None, None),
        };
        let mut xdp = match xdp.take() {
            Some(xdp) => xdp,
            None => Xdp::attach(&wanted.device, &wanted.pins)?,
        };
        if step == ExternalAction::Adopt {
            // The map already contains the mux's sockets.
            machine.put_external(config.clone(), &[])?;
        } else {
            let MuxHello { pool, externals, .. } = machine.mux()?;
            if externals.iter().any(|known| known == name) {
                // A queue can have one AF_XDP socket, so the mux must close its old ones.
                machine.put_external(packet(), &[])?;
            }
            let mut sockets = Vec::new();
            for queue in 0..device.receive_queues.max(1) {
                let failed =
                    |source| HostError::Socket { device: wanted.device.clone(), queue, source };
                let socket = pdp_afxdp::create_socket(pool.as_fd()).map_err(failed)?;
                if busily {
                    pdp_afxdp::poll_busily(socket.as_fd()).map_err(failed)?;
                }
                sockets.push((queue, socket));
            }
            let descriptors: Vec<_> = sockets.iter().map(|(_, socket)| socket.as_fd()).collect();
            machine.put_external(config.clone(), &descriptors)?;
            // After the mux mapped their rings, since before Linux 6.4 it can't do so later.
            for (queue, socket) in &sockets {
                let bound = pdp_afxdp::bind_socket(socket.as_fd(), device.index, *queue);
                if let Err(source) = bound {
                    machine.put_external(packet(), &[])?;
                    let device = wanted.device.clone();
                    return Err(HostError::Socket { device, queue: *queue, source });
                }
            }
            let by_queue: Vec<_> =
                sockets.iter().map(|(queue, socket)| (*queue, socket.as_fd())).collect();
            xdp.set_sockets(&by_queue)?;
        }
        take(&mut xdp, wanted)?;
        let made = self.made(name, config, made_for, &pins, Some(xdp))?;
        *attached = Some(AttachedExternal { ports, ..made });
        whole_frames(wanted, &device)?;
        redirects(wanted)
    }

    /// Makes the program of an unchanged device start or stop delivering
    /// tunnel frames to ports. The mux's traffic is not affected.
    fn set_port_delivery(
        &self,
        wanted: &DevicePlan,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        let Some(attached) = attached else { return Ok(()) };
        if wanted.selection.ports {
            let machine = &self.machine;
            let new = machine.attach_for_ports(&wanted.device, &wanted.pins, attached.ports)?;
            if let Some((xdp, since)) = new {
                (attached.xdp, attached.ports) = (Some(xdp), Some(since));
            }
        } else if attached.ports.take().is_some() {
            attached.xdp = Some(Xdp::attach(&wanted.device, &wanted.pins)?);
        }
        Ok(())
    }

    fn packet_device(
        &self,
        name: &str,
        capacity_bps: Option<u64>,
        wanted: &DevicePlan,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        let device = device(wanted, attached)?;
        let config = device_config(name, capacity_bps, &device, mux::OutletConfig::Packet);
        let made_for = format!("packet {} {} {}", wanted.device, device.index, wanted.workers);
        let pins = wanted.pins.to_string_lossy();
        let step = self.begin(name, &made_for, &pins, attached)?;
        if step == ExternalAction::Configure {
            return self.retake(wanted, config, attached);
        }
        prepare_pins(&wanted.pins)?;
        let (mut xdp, filter) = Xdp::attach_behind_sockets(&wanted.device, &wanted.pins)?;
        take(&mut xdp, wanted)?;
        let mut sockets = Vec::new();
        if step == ExternalAction::Make {
            let filter = filter.as_fd();
            sockets = pdp_net::packet::open(&wanted.device, device.index, wanted.workers, filter)?;
        }
        let descriptors: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        self.machine.put_external(config.clone(), &descriptors)?;
        *attached = Some(self.made(name, config, made_for, &pins, Some(xdp))?);
        Ok(())
    }

    /// Updates the mux and the program of an unchanged device.
    fn retake(
        &self,
        wanted: &DevicePlan,
        config: mux::ExternalConfig,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        self.update_config(config, attached)?;
        match attached.as_mut().and_then(|attached| attached.xdp.as_mut()) {
            Some(xdp) => take(xdp, wanted),
            None => Ok(()),
        }
    }

    fn memif(
        &self,
        name: &str,
        capacity_bps: Option<u64>,
        wanted: &MemifPlan,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        let gid = wanted.group.as_deref().map_or(Ok(0), host::group_id)?;
        // DPDK's client refuses a socket in a directory that is not writable for it.
        let path = wanted.socket.parent().unwrap_or(&wanted.socket).into();
        let directory = DirectoryPlan { path, gid, writable: true };
        let machine = &self.machine;
        let socket = wanted.socket.clone();
        let config =
            mux::ExternalConfig::new(name, wanted.mtu, mux::OutletConfig::Memif { socket });
        let config = mux::ExternalConfig { capacity_bps, ..config };
        self.simple(name, config, format!("memif {gid}"), attached, || {
            machine.make_directory(&directory).map(|()| None)
        })
    }

    fn generator(
        &self,
        name: &str,
        capacity_bps: Option<u64>,
        wanted: &GeneratorPlan,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        let outlet = mux::OutletConfig::Generator(wanted.config.clone());
        let config =
            mux::ExternalConfig { capacity_bps, ..mux::ExternalConfig::new(name, MTU_MAX, outlet) };
        let made_for = format!("generator {}", wanted.hash);
        self.simple(name, config, made_for, attached, || frames_memfd(wanted).map(Some))
    }

    /// Sets up an external without pins: with one descriptor, or none.
    fn simple(
        &self,
        name: &str,
        config: mux::ExternalConfig,
        made_for: String,
        attached: &mut Option<AttachedExternal>,
        make: impl FnOnce() -> Result<Option<OwnedFd>, HostError>,
    ) -> Result<(), HostError> {
        let descriptor = match self.begin(name, &made_for, "", attached)? {
            ExternalAction::Configure => return self.update_config(config, attached),
            ExternalAction::Adopt => None,
            ExternalAction::Make => make()?,
        };
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
        self.machine.put_external(config.clone(), &descriptors)?;
        *attached = Some(self.made(name, config, made_for, "", None)?);
        Ok(())
    }

    /// Decides what to do for an external with the inputs `made_for`, and
    /// records it in the journal. Removes the pins of its former outlet.
    fn begin(
        &self,
        name: &str,
        made_for: &str,
        pins: &str,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<ExternalAction, HostError> {
        if attached.as_ref().is_some_and(|attached| attached.made_for == made_for) {
            return Ok(ExternalAction::Configure);
        }
        *attached = None;
        let key = ObjectKey::external(name).to_string();
        let entry = self.state.journal_entry(&key)?;
        if let Some(entry) = &entry {
            if entry.hash.as_deref() == Some(made_for) {
                let known = self.machine.mux()?.externals.iter().any(|known| known == name);
                return Ok(if known { ExternalAction::Adopt } else { ExternalAction::Make });
            }
            if !entry.detail.is_empty() && entry.detail != pins {
                pdp_net::xdp::detach(Path::new(&entry.detail))?;
            }
        }
        self.state.intend(&key, pins)?;
        Ok(ExternalAction::Make)
    }

    /// Updates the mux's configuration of an external that it has, if it changed.
    fn update_config(
        &self,
        config: mux::ExternalConfig,
        attached: &mut Option<AttachedExternal>,
    ) -> Result<(), HostError> {
        if let Some(attached) = attached
            && attached.config != config
        {
            self.machine.put_external(config.clone(), &[])?;
            attached.config = config;
        }
        Ok(())
    }

    fn made(
        &self,
        name: &str,
        config: mux::ExternalConfig,
        made_for: String,
        pins: &str,
        xdp: Option<Xdp>,
    ) -> Result<AttachedExternal, HostError> {
        self.state.confirm(&ObjectKey::external(name).to_string(), &made_for, pins)?;
        Ok(AttachedExternal { config, made_for, xdp, ports: None, instead: None })
    }
}

/// Finds the device of an external. If the device is gone, so is what was set up for it.
fn device(
    wanted: &DevicePlan,
    attached: &mut Option<AttachedExternal>,
) -> Result<InterfaceInfo, HostError> {
    Ok(InterfaceInfo::by_name(&wanted.device).inspect_err(|_| *attached = None)?)
}

fn uses(vnet: &mux::VnetConfig, external: &str) -> bool {
    vnet.vlinks.iter().flat_map(mux::Vlink::interfaces).any(|interface| interface == external)
}

/// Configures which frames the program takes for PdP.
fn take(xdp: &mut Xdp, wanted: &DevicePlan) -> Result<(), HostError> {
    xdp.set_takes(&wanted.selection.tunnels)?;
    xdp.take_all(wanted.selection.all)?;
    if wanted.attach == DeviceAttach::Packet && wanted.selection.anybodys() {
        pdp_net::ethtool::aggregation_off(&wanted.device)?;
    }
    Ok(())
}

/// Makes sure that all frames of a whole interface or of its VLANs arrive, with their
/// tags. If this is impossible, the error is reported, and everything else continues.
fn whole_frames(wanted: &DevicePlan, device: &InterfaceInfo) -> Result<(), HostError> {
    if wanted.selection.anybodys() {
        pdp_net::interface::receive_all(&wanted.device)?;
    }
    let peer = device.veth_peer.as_deref();
    if wanted.selection.anybodys() && !pdp_net::ethtool::tags_in_frames(&device.name, peer)? {
        return Err(HostError::Tags(wanted.device.clone()));
    }
    Ok(())
}

/// Checks that ports can use a device whose program shall deliver tunnel frames to them.
fn redirects(wanted: &DevicePlan) -> Result<(), HostError> {
    match wanted.selection.ports && pdp_net::xdp::redirects(&wanted.device) == Some(false) {
        true => Err(HostError::Redirects(wanted.device.clone())),
        false => Ok(()),
    }
}

/// Makes sure that a file system for pins is mounted.
fn prepare_pins(pins: &Path) -> Result<(), HostError> {
    if pins.starts_with(pdp_net::xdp::BPF_FS) {
        pdp_net::xdp::mount_bpf_fs()?;
    }
    Ok(())
}

fn device_config(
    name: &str,
    capacity_bps: Option<u64>,
    device: &InterfaceInfo,
    outlet: impl FnOnce(mux::Device) -> mux::OutletConfig,
) -> mux::ExternalConfig {
    let mux_device = mux::Device {
        device: device.name.clone(),
        ifindex: device.index,
        mac: device.mac,
        is_virtual: device.is_virtual,
    };
    mux::ExternalConfig {
        capacity_bps,
        ..mux::ExternalConfig::new(name, device.mtu, outlet(mux_device))
    }
}

/// Returns a generator's frames in the mux's format; empty for a sink.
fn frames_memfd(wanted: &GeneratorPlan) -> Result<OwnedFd, HostError> {
    let failed = |source: std::io::Error| HostError::Io {
        what: "can't store a generator's frames in",
        path: "memfd".into(),
        source,
    };
    // The check of specs has read it already.
    let pcap = wanted.pcap.as_ref().map_or(&[][..], |pcap| &pcap.0);
    let mut bytes = Vec::with_capacity(pcap.len());
    for frame in pdp_spec::frames::read(pcap).unwrap_or_default() {
        bytes.extend((frame.len() as u16).to_le_bytes());
        bytes.extend(frame);
    }
    let memfd = rustix::fs::memfd_create("pdp-frames", rustix::fs::MemfdFlags::CLOEXEC);
    let mut file = File::from(memfd.map_err(|error| failed(error.into()))?);
    file.write_all(&bytes).map_err(failed)?;
    Ok(file.into())
}
