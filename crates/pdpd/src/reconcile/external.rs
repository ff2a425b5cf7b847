//! External interfaces: what is behind each is made and handed to the mux.
//!
//! What was made stays as long as it is made from the same: a new pdpd finds it in the journal and
//! in the mux. The journal's detail of one is where its pins are, nothing where it has none.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use pdp_container::Process;
use pdp_net::interface::{Carrier, Condition, Interface};
use pdp_net::xdp::{Mode, Xdp};
use pdp_proto::mux;
use pdp_spec::DeviceAttach;
use pdp_spec::limits::MTU_MAX;

use super::{Doing, Next, Reconciler, Removal, lock};
use crate::control::MuxHello;
use crate::host::{self, HostError};
use crate::key::Key;
use crate::plan::{
    DevicePlan, Directory, ExternalPlan, GeneratorPlan, MemifPlan, OutletPlan, Plan, VnetPlan,
};

/// What is to be done about an external interface.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It is as this pdpd made it; only what the mux is told may differ.
    Tell,
    /// The mux has it from a pdpd before.
    Adopt,
    /// It is to be made.
    Make,
}

/// What is known of an external interface.
#[derive(Debug, Default)]
pub(super) struct ExternalSide {
    /// The mux that has it.
    mux: Option<Process>,
    attached: Option<Attached>,
    /// Whether the last attempt to make it failed.
    failed: bool,
}

/// Why frames can't go over a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutOff {
    /// There is none of its name.
    Gone,
    /// It was set down.
    Down,
    /// It has no carrier.
    Lost,
}

impl CutOff {
    fn of(device: Option<Condition>) -> Option<Self> {
        match device.map(|condition| condition.carrier) {
            None => Some(Self::Gone),
            Some(Carrier::Down) => Some(Self::Down),
            Some(Carrier::Lost) => Some(Self::Lost),
            Some(Carrier::Yes) => None,
        }
    }

    /// In words, for `device`.
    pub fn words(self, device: &str) -> String {
        match self {
            Self::Gone => format!("there is no {device}"),
            Self::Down => format!("{device} is down (ip link set {device} up)"),
            Self::Lost => format!("{device} has no carrier"),
        }
    }
}

#[derive(Debug)]
struct Attached {
    told: mux::External,
    /// What it was made from: that of its journal.
    made_for: String,
    xdp: Option<Xdp>,
    /// Since when its program gives ports what comes by their tunnels, if it does.
    ports: Option<u64>,
    /// Why packet sockets took the place of AF_XDP.
    instead: Option<String>,
}

impl Reconciler {
    pub(super) fn external(
        &self,
        name: &str,
        wanted: &ExternalPlan,
        plan: &Plan,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        if self.mux_comes() {
            return Ok(Next::After(Key::Mux));
        }
        let Some(mux) = self.mux_process() else { return Err(HostError::NoMux) };
        let mut side = lock(&self.externals).remove(name).unwrap_or_default();
        if side.mux != Some(mux) {
            side = ExternalSide { mux: Some(mux), ..ExternalSide::default() };
        }
        if self.look_at_device(name, wanted) {
            // Carriers of ports follow, and what frames carry that leave without the mux.
            doing.wake.extend(plan.vnets.iter().flat_map(|(vnet, plan)| plan.nodes_at(vnet, name)));
        }
        let before = side.attached.is_some();
        let result = self.attach(name, wanted, &mut side.attached);
        if side.attached.is_some() && !before {
            // The mux refuses vnets that use what it has not.
            let using = plan.vnets.iter().filter(|(_, vnet)| vnet.externals().any(|of| of == name));
            doing.wake.extend(using.map(|(vnet, _)| Key::vnet(vnet)));
        }
        side.failed = result.is_err();
        lock(&self.externals).insert(name.into(), side);
        result.map(|()| Next::Done)
    }

    /// An external interface of a vnet that nobody has tried to make for this mux.
    pub(super) fn external_to_come(&self, vnet: &VnetPlan, plan: &Plan) -> Option<Key> {
        let mux = self.mux_process()?;
        let sides = lock(&self.externals);
        let tried = |name: &str| {
            let side = sides.get(name).filter(|side| side.mux == Some(mux));
            side.is_some_and(|side| side.attached.is_some() || side.failed)
        };
        let mut names = vnet.externals();
        let name = names.find(|name| plan.externals.contains_key(*name) && !tried(name))?;
        Some(Key::external(name))
    }

    /// Externals whose device is another one than their last step found, gone or there again, or has carrier
    /// where it had none, or the other way. The kernel is asked.
    pub fn changed_devices(&self, plan: &Plan) -> Vec<Key> {
        let devices = lock(&self.devices);
        let changed = plan.externals.iter().filter(|(name, wanted)| {
            let is = wanted.device().map(Condition::of);
            is.is_some() && devices.get(*name).copied() != is
        });
        changed.map(|(name, _)| Key::external(name)).collect()
    }

    /// Why frames can't go over the device of an external; `None`: they can, or nothing is known.
    pub fn cut_off(&self, external: &str) -> Option<CutOff> {
        CutOff::of(*lock(&self.devices).get(external)?)
    }

    /// Whether an external loses long frames that senders leave to its device: one that is software and has
    /// no XDP of its own hands them over as they are, and AF_XDP takes none.
    pub fn loses_long_frames(&self, external: &str) -> bool {
        let sides = lock(&self.externals);
        let attached = sides.get(external).and_then(|side| side.attached.as_ref());
        attached.is_some_and(|attached| {
            let mode = attached.xdp.as_ref().map(Xdp::mode);
            mode == Some(Mode::Generic) && attached.told.device().is_some_and(|it| it.is_virtual)
        })
    }

    /// Returns why packet sockets take the place of AF_XDP at an external, if they do.
    pub fn instead_of_xdp(&self, external: &str) -> Option<String> {
        lock(&self.externals).get(external)?.attached.as_ref()?.instead.clone()
    }

    /// Looks at the device of an external; whether it is new that frames can go over it, or can't.
    fn look_at_device(&self, name: &str, wanted: &ExternalPlan) -> bool {
        let is = wanted.device().map(Condition::of);
        let mut all = lock(&self.devices);
        let was = match is {
            Some(is) => all.insert(name.into(), is),
            None => all.remove(name),
        };
        let ports = wanted.device_plan().is_some_and(|device| device.takes.ports);
        was.and_then(CutOff::of) != is.and_then(CutOff::of) || ports && was != is
    }

    fn attach(
        &self,
        name: &str,
        wanted: &ExternalPlan,
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        let bps = wanted.capacity_bps;
        match &wanted.outlet {
            OutletPlan::Device(device) => match device.attach {
                // Kernel ports have nobody else who takes what comes for them.
                DeviceAttach::AfXdp if !device.takes.ports => {
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

    /// Removes what was made for an external.
    pub(super) fn remove_external(
        &self,
        name: &str,
        plan: &Plan,
        doing: &mut Doing<'_>,
    ) -> Result<Next, HostError> {
        if plan.mux.is_some() && self.mux_comes() {
            return Ok(Next::After(Key::Mux));
        }
        let sides: Vec<_> =
            lock(&self.vnets).iter().map(|(vnet, side)| (vnet.clone(), side.clone())).collect();
        for (vnet, side) in sides {
            if lock(&side).told.as_ref().is_some_and(|told| uses(told, name)) {
                return Ok(Next::After(Key::vnet(&vnet)));
            }
        }
        (doing.told)(&format!("stopping external {name}"));
        let (machine, mut removal) = (&self.machine, Removal::default());
        removal.step(self.forget_external_in_mux(name));
        lock(&self.externals).remove(name);
        lock(&self.devices).remove(name);
        let key = Key::external(name).to_string();
        if let Some(thing) = self.state.thing(&key)?
            && !thing.detail.is_empty()
        {
            removal.step(pdp_net::xdp::detach(Path::new(&thing.detail)).map_err(HostError::from));
        }
        let socket = self.places.external_memif(name);
        removal.step(machine.remove_directory(socket.parent().unwrap_or(&socket)));
        removal.finish()?;
        if plan.externals.is_empty() {
            machine.remove_if_empty("externals");
        }
        self.state.forget(&key)?;
        Ok(Next::Gone)
    }

    fn forget_external_in_mux(&self, name: &str) -> Result<(), HostError> {
        let machine = &self.machine;
        if self.mux_process().is_some() && machine.mux()?.externals.iter().any(|has| has == name) {
            machine.delete_external(name)?;
        }
        Ok(())
    }

    /// Attaches a device by AF_XDP, or by packet sockets if the kernel or the driver has no AF_XDP.
    fn device(
        &self,
        name: &str,
        capacity_bps: Option<u64>,
        wanted: &DevicePlan,
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        let why = match attached.as_mut().and_then(|attached| attached.instead.take()) {
            Some(why) => why,
            None => match self.xdp_device(name, capacity_bps, wanted, attached) {
                Err(HostError::Socket { source, .. }) if source.is_unsupported() => {
                    host::words(&source)
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
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        let machine = &self.machine;
        let device = device(wanted, attached)?;
        let tell = device_told(name, capacity_bps, &device, mux::Outlet::Xdp);
        let packet = || device_told(name, capacity_bps, &device, mux::Outlet::Packet);
        let busily = wanted.attach == DeviceAttach::AfXdpBusyPoll;
        let how = if busily { "busy-poll " } else { "" };
        let made_for = format!("{how}{} {}", wanted.device, device.index);
        let pins = wanted.pins.to_string_lossy();
        let step = self.begin(name, &made_for, &pins, attached)?;
        if step == Step::Tell {
            self.share(wanted, attached)?;
            self.retake(wanted, tell, attached)?;
            whole_frames(wanted, &device)?;
            return redirects(wanted);
        }
        prepare_pins(&wanted.pins)?;
        let (mut xdp, ports) = match wanted.takes.ports {
            true => self.machine.attach_for_ports(&wanted.device, &wanted.pins, None)?.unzip(),
            false => (None, None),
        };
        let mut xdp = match xdp.take() {
            Some(xdp) => xdp,
            None => Xdp::attach(&wanted.device, &wanted.pins)?,
        };
        if step == Step::Adopt {
            // The mux's sockets are in the map already.
            machine.put_external(tell.clone(), &[])?;
        } else {
            let MuxHello { pool, externals, .. } = machine.mux()?;
            if externals.iter().any(|known| known == name) {
                // A queue has one AF_XDP socket: the mux closes those that it has.
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
            machine.put_external(tell.clone(), &descriptors)?;
            // After the mux mapped their rings: before Linux 6.4 it can't later.
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
        let made = self.made(name, tell, made_for, &pins, Some(xdp))?;
        *attached = Some(Attached { ports, ..made });
        whole_frames(wanted, &device)?;
        redirects(wanted)
    }

    /// Has the program of a device that is as this pdpd made it give ports what comes by their tunnels, or no more. What
    /// the mux gets by it goes on.
    fn share(&self, wanted: &DevicePlan, attached: &mut Option<Attached>) -> Result<(), HostError> {
        let Some(attached) = attached else { return Ok(()) };
        if wanted.takes.ports {
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
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        let device = device(wanted, attached)?;
        let tell = device_told(name, capacity_bps, &device, mux::Outlet::Packet);
        let made_for = format!("packet {} {} {}", wanted.device, device.index, wanted.workers);
        let pins = wanted.pins.to_string_lossy();
        let step = self.begin(name, &made_for, &pins, attached)?;
        if step == Step::Tell {
            return self.retake(wanted, tell, attached);
        }
        prepare_pins(&wanted.pins)?;
        let (mut xdp, filter) = Xdp::attach_behind_sockets(&wanted.device, &wanted.pins)?;
        take(&mut xdp, wanted)?;
        let mut sockets = Vec::new();
        if step == Step::Make {
            let filter = filter.as_fd();
            sockets = pdp_net::packet::open(&wanted.device, device.index, wanted.workers, filter)?;
        }
        let descriptors: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        self.machine.put_external(tell.clone(), &descriptors)?;
        *attached = Some(self.made(name, tell, made_for, &pins, Some(xdp))?);
        Ok(())
    }

    /// Tells the mux and the program of a device that is as this pdpd made it.
    fn retake(
        &self,
        wanted: &DevicePlan,
        tell: mux::External,
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        self.retell(tell, attached)?;
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
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        let gid = wanted.group.as_deref().map_or(Ok(0), host::group_id)?;
        // DPDK's client refuses a socket in a directory that it can't write.
        let path = wanted.socket.parent().unwrap_or(&wanted.socket).into();
        let directory = Directory { path, gid, writable: true };
        let machine = &self.machine;
        let socket = wanted.socket.clone();
        let tell = mux::External::new(name, wanted.mtu, mux::Outlet::Memif { socket });
        let tell = mux::External { capacity_bps, ..tell };
        self.simple(name, tell, format!("memif {gid}"), attached, || {
            machine.make_directory(&directory).map(|()| None)
        })
    }

    fn generator(
        &self,
        name: &str,
        capacity_bps: Option<u64>,
        wanted: &GeneratorPlan,
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        let outlet = mux::Outlet::Generator(wanted.told.clone());
        let tell = mux::External { capacity_bps, ..mux::External::new(name, MTU_MAX, outlet) };
        let made_for = format!("generator {}", wanted.hash);
        self.simple(name, tell, made_for, attached, || frames_memfd(wanted).map(Some))
    }

    /// An external without pins: one descriptor, or none.
    fn simple(
        &self,
        name: &str,
        tell: mux::External,
        made_for: String,
        attached: &mut Option<Attached>,
        make: impl FnOnce() -> Result<Option<OwnedFd>, HostError>,
    ) -> Result<(), HostError> {
        let descriptor = match self.begin(name, &made_for, "", attached)? {
            Step::Tell => return self.retell(tell, attached),
            Step::Adopt => None,
            Step::Make => make()?,
        };
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
        self.machine.put_external(tell.clone(), &descriptors)?;
        *attached = Some(self.made(name, tell, made_for, "", None)?);
        Ok(())
    }

    /// What is to be done for an external that is to be made from `made_for`; the journal knows of
    /// it then. The pins of what it was before are removed.
    fn begin(
        &self,
        name: &str,
        made_for: &str,
        pins: &str,
        attached: &mut Option<Attached>,
    ) -> Result<Step, HostError> {
        if attached.as_ref().is_some_and(|attached| attached.made_for == made_for) {
            return Ok(Step::Tell);
        }
        *attached = None;
        let key = Key::external(name).to_string();
        let thing = self.state.thing(&key)?;
        if let Some(thing) = &thing {
            if thing.hash.as_deref() == Some(made_for) {
                let known = self.machine.mux()?.externals.iter().any(|known| known == name);
                return Ok(if known { Step::Adopt } else { Step::Make });
            }
            if !thing.detail.is_empty() && thing.detail != pins {
                pdp_net::xdp::detach(Path::new(&thing.detail))?;
            }
        }
        self.state.intend(&key, pins)?;
        Ok(Step::Make)
    }

    /// Tells the mux of an external that it has, if there is anything new.
    fn retell(
        &self,
        tell: mux::External,
        attached: &mut Option<Attached>,
    ) -> Result<(), HostError> {
        if let Some(attached) = attached
            && attached.told != tell
        {
            self.machine.put_external(tell.clone(), &[])?;
            attached.told = tell;
        }
        Ok(())
    }

    fn made(
        &self,
        name: &str,
        told: mux::External,
        made_for: String,
        pins: &str,
        xdp: Option<Xdp>,
    ) -> Result<Attached, HostError> {
        self.state.confirm(&Key::external(name).to_string(), &made_for, pins)?;
        Ok(Attached { told, made_for, xdp, ports: None, instead: None })
    }
}

/// The device of an external. What was made for one that is gone is no longer there.
fn device(wanted: &DevicePlan, attached: &mut Option<Attached>) -> Result<Interface, HostError> {
    Ok(Interface::by_name(&wanted.device).inspect_err(|_| *attached = None)?)
}

fn uses(told: &mux::Vnet, external: &str) -> bool {
    told.vlinks.iter().flat_map(mux::Vlink::interfaces).any(|interface| interface == external)
}

/// Has the program take what is PdP's.
fn take(xdp: &mut Xdp, wanted: &DevicePlan) -> Result<(), HostError> {
    xdp.set_takes(&wanted.takes.tunnels)?;
    xdp.take_all(wanted.takes.all)?;
    if wanted.attach == DeviceAttach::Packet && wanted.takes.anybodys() {
        pdp_net::ethtool::aggregation_off(&wanted.device)?;
    }
    Ok(())
}

/// Sees to it that all frames of a whole interface or of its VLANs come, with their tags. What can't be had is told,
/// and stops nothing.
fn whole_frames(wanted: &DevicePlan, device: &Interface) -> Result<(), HostError> {
    if wanted.takes.anybodys() {
        pdp_net::interface::receive_all(&wanted.device)?;
    }
    if wanted.takes.anybodys() && !pdp_net::ethtool::tags_in_frames(device)? {
        return Err(HostError::Tags(wanted.device.clone()));
    }
    Ok(())
}

/// That ports can use a device whose program is to give them what comes by their tunnels.
fn redirects(wanted: &DevicePlan) -> Result<(), HostError> {
    match wanted.takes.ports && pdp_net::xdp::redirects(&wanted.device) == Some(false) {
        true => Err(HostError::Redirects(wanted.device.clone())),
        false => Ok(()),
    }
}

/// Sees to it that there is a file system for pins.
fn prepare_pins(pins: &Path) -> Result<(), HostError> {
    if pins.starts_with(pdp_net::xdp::BPF_FS) {
        pdp_net::xdp::mount_bpf_fs()?;
    }
    Ok(())
}

fn device_told(
    name: &str,
    capacity_bps: Option<u64>,
    device: &Interface,
    outlet: impl FnOnce(mux::Device) -> mux::Outlet,
) -> mux::External {
    let told = mux::Device {
        device: device.name.clone(),
        ifindex: device.index,
        mac: device.mac,
        is_virtual: device.is_virtual,
    };
    mux::External { capacity_bps, ..mux::External::new(name, device.mtu, outlet(told)) }
}

/// A generator's frames as the mux wants them; no bytes for a sink.
fn frames_memfd(wanted: &GeneratorPlan) -> Result<OwnedFd, HostError> {
    let failed = |source: std::io::Error| HostError::Io {
        what: "can't hold the frames of a generator in",
        path: "memfd".into(),
        source,
    };
    // The check of specs has read it before.
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
