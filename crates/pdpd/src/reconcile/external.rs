//! External interfaces: what is behind each is made and handed to the mux.
//!
//! What was made stays as long as it is made from the same: a new pdpd finds it in the journal and
//! in the mux. The journal's detail of one is where its pins are, nothing where it has none.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use pdp_net::interface::Interface;
use pdp_net::xdp::Xdp;
use pdp_proto::mux;
use pdp_spec::DeviceAttach;
use pdp_spec::limits::MTU_MAX;

use super::{Attached, Reconciler};
use crate::host::{self, HostError};
use crate::key::Key;
use crate::plan::{DevicePlan, Directory, ExternalPlan, GeneratorPlan, MUX_UID, MemifPlan};

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

impl Reconciler<'_> {
    pub(super) fn external(&mut self, name: &str, wanted: &ExternalPlan) -> Result<(), HostError> {
        match wanted {
            ExternalPlan::Device(device) => match device.attach {
                DeviceAttach::AfXdp => self.xdp_device(name, device),
                DeviceAttach::Packet => self.packet_device(name, device),
            },
            ExternalPlan::Memif(memif) => self.memif(name, memif),
            ExternalPlan::Generator(generator) => self.generator(name, generator),
        }
    }

    /// Removes what was made for an external that the mux has forgotten.
    pub(super) fn remove_external(&self, name: &str, pins: &str) -> Result<(), HostError> {
        if !pins.is_empty() {
            pdp_net::xdp::detach(Path::new(pins))?;
        }
        let socket = self.host.places.external_memif(name);
        host::remove_directory(socket.parent().unwrap_or(&socket))
    }

    fn xdp_device(&mut self, name: &str, wanted: &DevicePlan) -> Result<(), HostError> {
        let host = self.host;
        let device = self.device(name, wanted)?;
        let tell = device_told(name, &device, mux::Outlet::Xdp);
        let made_for = format!("{} {}", wanted.device, device.index);
        let pins = wanted.pins.to_string_lossy();
        let step = self.begin(name, &made_for, &pins)?;
        let xdp = match step {
            Step::Tell => None,
            Step::Adopt | Step::Make => {
                prepare_pins(&wanted.pins)?;
                Some(Xdp::attach(&wanted.device, &wanted.pins)?)
            }
        };
        let Some(mut xdp) = xdp else { return self.retake(name, wanted, tell) };
        if step == Step::Adopt {
            // The mux's sockets are in the map already.
            host.mux.put_external(tell.clone(), &[])?;
        } else {
            let pool = host.mux.hello()?.pool;
            let mut sockets = Vec::new();
            for queue in 0..device.receive_queues.max(1) {
                let mode = pdp_afxdp::Mode::ZeroCopyIfPossible;
                let socket = pdp_afxdp::create_socket(pool.as_fd(), device.index, queue, mode);
                let socket = socket.map_err(|source| HostError::Socket {
                    device: wanted.device.clone(),
                    queue,
                    source,
                })?;
                sockets.push((queue, socket));
            }
            let descriptors: Vec<_> = sockets.iter().map(|(_, socket)| socket.as_fd()).collect();
            host.mux.put_external(tell.clone(), &descriptors)?;
            let by_queue: Vec<_> =
                sockets.iter().map(|(queue, socket)| (*queue, socket.as_fd())).collect();
            xdp.set_sockets(&by_queue)?;
        }
        take(&mut xdp, wanted)?;
        self.made(name, tell, made_for, &pins, Some(xdp))
    }

    fn packet_device(&mut self, name: &str, wanted: &DevicePlan) -> Result<(), HostError> {
        let device = self.device(name, wanted)?;
        let tell = device_told(name, &device, mux::Outlet::Packet);
        let made_for = format!("packet {} {} {}", wanted.device, device.index, wanted.workers);
        let pins = wanted.pins.to_string_lossy();
        let step = self.begin(name, &made_for, &pins)?;
        if step == Step::Tell {
            return self.retake(name, wanted, tell);
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
        self.host.mux.put_external(tell.clone(), &descriptors)?;
        self.made(name, tell, made_for, &pins, Some(xdp))
    }

    /// Tells the mux and the program of a device that is as this pdpd made it.
    fn retake(
        &mut self,
        name: &str,
        wanted: &DevicePlan,
        tell: mux::External,
    ) -> Result<(), HostError> {
        self.tell(name, tell)?;
        let attached = self.mux.externals.get_mut(name);
        if let Some(xdp) = attached.and_then(|attached| attached.xdp.as_mut()) {
            take(xdp, wanted)?;
        }
        Ok(())
    }

    fn memif(&mut self, name: &str, wanted: &MemifPlan) -> Result<(), HostError> {
        let gid = wanted.group.as_deref().map_or(Ok(0), host::group_id)?;
        // DPDK's client refuses a socket in a directory that it can't write.
        let directory = Directory {
            path: wanted.socket.parent().unwrap_or(&wanted.socket).into(),
            uid: MUX_UID,
            gid,
            mode: 0o770,
        };
        let host = self.host;
        let socket = wanted.socket.clone();
        let tell = mux::External {
            name: name.into(),
            mtu: wanted.mtu,
            outlet: mux::Outlet::Memif { socket },
        };
        self.simple(name, tell, format!("memif {gid}"), || {
            host.make_directory(&directory).map(|()| None)
        })
    }

    fn generator(&mut self, name: &str, wanted: &GeneratorPlan) -> Result<(), HostError> {
        let outlet = mux::Outlet::Generator(wanted.told.clone());
        let tell = mux::External { name: name.into(), mtu: MTU_MAX, outlet };
        let made_for = format!("generator {}", wanted.hash);
        self.simple(name, tell, made_for, || frames_memfd(wanted).map(Some))
    }

    /// An external without pins: one descriptor, or none.
    fn simple(
        &mut self,
        name: &str,
        tell: mux::External,
        made_for: String,
        make: impl FnOnce() -> Result<Option<OwnedFd>, HostError>,
    ) -> Result<(), HostError> {
        let descriptor = match self.begin(name, &made_for, "")? {
            Step::Tell => return self.tell(name, tell),
            Step::Adopt => None,
            Step::Make => make()?,
        };
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
        self.host.mux.put_external(tell.clone(), &descriptors)?;
        self.made(name, tell, made_for, "", None)
    }

    fn device(&mut self, name: &str, wanted: &DevicePlan) -> Result<Interface, HostError> {
        let device = Interface::by_name(&wanted.device);
        Ok(device.inspect_err(|_| drop(self.mux.externals.remove(name)))?)
    }

    /// What is to be done for an external that is to be made from `made_for`; the journal knows of
    /// it then. The pins of what it was before are removed.
    fn begin(&mut self, name: &str, made_for: &str, pins: &str) -> Result<Step, HostError> {
        let attached = self.mux.externals.get(name);
        if attached.is_some_and(|attached| attached.made_for == made_for) {
            return Ok(Step::Tell);
        }
        self.mux.externals.remove(name);
        let host = self.host;
        let key = Key::external(name).to_string();
        let thing = host.state.thing(&key)?;
        if let Some(thing) = &thing {
            if thing.hash.as_deref() == Some(made_for) {
                let known = host.mux.hello()?.externals.iter().any(|known| known == name);
                return Ok(if known { Step::Adopt } else { Step::Make });
            }
            if !thing.detail.is_empty() && thing.detail != pins {
                pdp_net::xdp::detach(Path::new(&thing.detail))?;
            }
        }
        host.state.intend(&key, pins)?;
        Ok(Step::Make)
    }

    /// Tells the mux of an external that it has, if there is anything new.
    fn tell(&mut self, name: &str, tell: mux::External) -> Result<(), HostError> {
        if let Some(attached) = self.mux.externals.get_mut(name)
            && attached.told != tell
        {
            self.host.mux.put_external(tell.clone(), &[])?;
            attached.told = tell;
        }
        Ok(())
    }

    fn made(
        &mut self,
        name: &str,
        told: mux::External,
        made_for: String,
        pins: &str,
        xdp: Option<Xdp>,
    ) -> Result<(), HostError> {
        self.host.state.confirm(&Key::external(name).to_string(), &made_for, pins)?;
        self.mux.externals.insert(name.into(), Attached { told, made_for, xdp });
        Ok(())
    }
}

/// Has the program take what is PdP's.
fn take(xdp: &mut Xdp, wanted: &DevicePlan) -> Result<(), HostError> {
    xdp.set_takes(&wanted.takes())?;
    xdp.take_all(wanted.take_all)?;
    if wanted.attach == DeviceAttach::Packet && wanted.take_all {
        pdp_net::ethtool::aggregation_off(&wanted.device)?;
    }
    Ok(())
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
    device: &Interface,
    outlet: impl FnOnce(mux::Device) -> mux::Outlet,
) -> mux::External {
    let told = mux::Device { device: device.name.clone(), ifindex: device.index, mac: device.mac };
    mux::External { name: name.into(), mtu: device.mtu, outlet: outlet(told) }
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
