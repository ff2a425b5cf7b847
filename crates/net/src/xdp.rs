//! XDP program that passes frames of PdP to AF_XDP sockets and all others to the kernel, and the
//! two programs that do so for packet sockets (`bpf/pdp_xdp.bpf.c`).
//!
//! Link and maps are pinned, so that they outlive the process. The next process adopts them, and
//! replaces the program by its own version without a gap. Packet sockets have no link: a traffic
//! control filter stays until it is removed.
//!
//! Limits: [`TAKES_MAX`], [`QUEUES_MAX`].
//! Source: Linux Documentation/networking/af_xdp.rst, bpf/libbpf, tc-bpf(8).

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, Object, OpenMapMut, ProgramMut, TC_INGRESS, TcHook,
    XdpFlags,
};

pub use pdp_wire::tunnel::Take;

use crate::error::{Error, NetContext, Result};
use crate::interface::{InterfaceInfo, InterfaceState};
use crate::pins::{
    self, create_link, other, pin_link, pinned_index, program, remove_dir, remove_file,
};
pub use crate::pins::{BPF_FS, mount_bpf_fs};
use crate::ports::{Ports, SHARED_MAPS};

/// Most destinations that can be taken on one interface.
pub const TAKES_MAX: usize = 65536;

/// Most receive queues with a socket.
pub const QUEUES_MAX: u32 = 64;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pdp_xdp.bpf.o"));

const PROGRAM: &str = "pdp_xdp";
const SOCKET_PROGRAM: &str = "pdp_socket";
const FILTER_PROGRAM: &str = "pdp_tc";

/// Handle and priority of PdP's traffic control filter on an interface; unlikely to be another's.
const FILTER_HANDLE: u32 = 0x0070_6470;
const FILTER_PRIORITY: u32 = 0x7064;

/// Name of the pinned link; the maps are pinned by their own names.
const LINK: &str = "link";

const MAPS: [&str; 4] = ["sockets", "takes", "settings", "counters"];

/// Returns the program's key (`struct take`) for taken traffic.
fn key_of(take: &Take) -> [u8; 20] {
    let mut key = [0; 20];
    let (local, number, carrier) = match *take {
        Take::Udp { local, port } => (Some(local), port, 0),
        Take::Gre { local } => (Some(local), 0, TAKE_GRE),
        Take::Vlan { id } => (None, id, TAKE_VLAN),
    };
    let family = match local {
        None => 0,
        Some(IpAddr::V4(address)) => {
            key[..4].copy_from_slice(&address.octets());
            4
        }
        Some(IpAddr::V6(address)) => {
            key[..16].copy_from_slice(&address.octets());
            6
        }
    };
    key[16..18].copy_from_slice(&number.to_be_bytes());
    key[18..].copy_from_slice(&(carrier | family).to_ne_bytes());
    key
}

/// Kinds of taken traffic, beside the family; 0 is UDP.
const TAKE_GRE: u16 = 0x100;
const TAKE_VLAN: u16 = 0x200;

/// NETDEV_XDP_ACT_BASIC, _REDIRECT and _NDO_XMIT of linux/netdev.h.
const FEATURES: u64 = 1 | 2 | 4;

/// XDP mode of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// Native, in the driver.
    Native,
    /// Generic, in the kernel's stack; slower.
    Generic,
    /// No XDP: socket and traffic control filters, for packet sockets.
    Packet,
}

/// Counters of the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpCounters {
    /// Frames passed to a socket, including those that it had no
    /// space for (its XDP_STATISTICS count these).
    pub taken: u64,
    /// Frames of PdP that found no socket on their queue and went to the kernel.
    pub no_socket: u64,
    /// Other frames, passed to the kernel.
    pub passed: u64,
}

/// The program on one interface. Dropping it leaves the program there; see [`Xdp::detach`].
#[derive(Debug)]
pub struct Xdp {
    mode: XdpMode,
    /// Index of the interface that has a filter; 0: none.
    filtered: u32,
    pins: PathBuf,
    maps: [MapHandle; 4],
}

impl Xdp {
    /// Adopts the program pinned in `pins` (below a BPF file system, see [`mount_bpf_fs`]) if it is
    /// on this interface. Otherwise loads it anew, in the driver if possible. Until sockets are
    /// set, all frames go to the kernel.
    pub fn attach(device: &str, pins: &Path) -> Result<Self> {
        Self::attach_to(device, pins, None)
    }

    /// Like [`Xdp::attach`], for an interface with tunnels of kernel vrouters' ports. Frames of
    /// these tunnels go to the ports instead of to sockets, and only the ports count them.
    ///
    /// This needs the program in the driver ([`Xdp::mode`]); otherwise these frames are treated
    /// like all others. It must be called again after [`Ports::open`].
    pub fn attach_for(device: &str, pins: &Path, ports: &Ports) -> Result<Self> {
        let this = Self::attach_to(device, pins, Some(ports))?;
        if this.mode == XdpMode::Native { Ok(this) } else { Self::attach_to(device, pins, None) }
    }

    fn attach_to(device: &str, pins: &Path, ports: Option<&Ports>) -> Result<Self> {
        let index = InterfaceInfo::by_name(device)?.index;
        let ports = ports.map(Ports::pins);
        let object = prepare(device, pins, pinned_index(&pins.join(LINK)) == Some(index), ports)?;
        let program = program(&object, PROGRAM)?;
        if pins.join(LINK).exists() {
            let mut link =
                Link::open(pins.join(LINK)).map_err(other).on("open the XDP link of", device)?;
            link.update_prog(&program).map_err(other).on("replace the XDP program of", device)?;
        } else {
            link(&program, index, &pins.join(LINK)).on("attach the XDP program to", device)?;
        }
        let mode = mode(&program, index).on("ask the XDP mode of", device)?;
        Ok(Self { mode, filtered: 0, pins: pins.to_owned(), maps: maps(pins)? })
    }

    /// Like [`Xdp::attach`], for an interface whose frames are read by packet sockets.
    /// Sockets with the returned program get the taken frames; the kernel gets the rest.
    /// Taken frames are lost while there is no socket.
    pub fn attach_behind_sockets(device: &str, pins: &Path) -> Result<(Self, OwnedFd)> {
        let index = InterfaceInfo::by_name(device)?.index;
        let object = prepare(device, pins, filtered(pins) == Some(index), None)?;
        let filter = program(&object, FILTER_PROGRAM)?;
        let socket = program(&object, SOCKET_PROGRAM)?.as_fd().try_clone_to_owned();
        let socket = socket.on("keep the socket program of", device)?;
        let mut this = Self {
            mode: XdpMode::Packet,
            filtered: index,
            pins: pins.to_owned(),
            maps: maps(pins)?,
        };
        if filtered(pins) != Some(index) {
            // Done before there is a filter, so that a failure
            // leaves none behind. Nothing is taken yet.
            this.take_all(false)?;
        }
        let mut hook = hook(filter.as_fd(), index);
        hook.create().map_err(other).on("prepare traffic control of", device)?;
        hook.replace(true).attach().map_err(other).on("attach the filter to", device)?;
        Ok((this, socket))
    }

    /// Returns the mode in which it runs.
    pub fn mode(&self) -> XdpMode {
        self.mode
    }

    /// Sets the AF_XDP sockets by queue; other queues have none.
    pub fn set_sockets(&mut self, sockets: &[(u32, BorrowedFd<'_>)]) -> Result<()> {
        if let Some((queue, _)) = sockets.iter().find(|(queue, _)| *queue >= QUEUES_MAX) {
            let text = format!("can't have a socket; {QUEUES_MAX} queues are supported, from 0");
            return Err(Error::Invalid { object: format!("receive queue {queue}"), text });
        }
        let [map, ..] = &self.maps;
        for queue in 0..QUEUES_MAX {
            let key = queue.to_ne_bytes();
            match sockets.iter().find(|(of, _)| *of == queue) {
                Some((_, socket)) => map
                    .update(&key, &socket.as_raw_fd().to_ne_bytes(), MapFlags::ANY)
                    .map_err(other)
                    .on("set the socket of receive queue", queue)?,
                None => match map.delete(&key) {
                    Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                        return Err(other(error)).on("clear the socket of receive queue", queue);
                    }
                    _ => {}
                },
            }
        }
        Ok(())
    }

    /// Replaces the set of taken traffic. Entries in both
    /// the old and the new set are taken throughout.
    pub fn set_takes<'a>(&mut self, takes: impl IntoIterator<Item = &'a Take>) -> Result<()> {
        let keys: BTreeSet<_> = takes.into_iter().map(|take| key_of(take).to_vec()).collect();
        if keys.len() > TAKES_MAX {
            let text = format!("{} tunnels' ends, {TAKES_MAX} at most", keys.len());
            return Err(Error::Invalid { object: self.pins.display().to_string(), text });
        }
        let [_, map, ..] = &self.maps;
        let present: BTreeSet<_> = map.keys().collect();
        for key in present.difference(&keys) {
            map.delete(key).map_err(other).on("stop taking frames by", self.pins.display())?;
        }
        for key in keys.difference(&present) {
            map.update(key, &[1], MapFlags::ANY)
                .map_err(other)
                .on("take frames by", self.pins.display())?;
        }
        Ok(())
    }

    /// Takes every frame, or only those that [`Xdp::set_takes`] selects.
    pub fn take_all(&mut self, all: bool) -> Result<()> {
        let [_, _, map, _] = &self.maps;
        let settings = [u32::from(all).to_ne_bytes(), self.filtered.to_ne_bytes()];
        map.update(&0u32.to_ne_bytes(), settings.as_flattened(), MapFlags::ANY)
            .map_err(other)
            .on("take all frames by", self.pins.display())
    }

    /// Returns the counters since the program was loaded.
    pub fn counters(&self) -> Result<XdpCounters> {
        let [.., map] = &self.maps;
        let read = |counter: u32| -> Result<u64> {
            let by_cpu = map
                .lookup_percpu(&counter.to_ne_bytes(), MapFlags::ANY)
                .map_err(other)
                .on("read the counters of", self.pins.display())?;
            let number = |bytes: Vec<u8>| bytes.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
            Ok(by_cpu.unwrap_or_default().into_iter().map(number).sum())
        };
        Ok(XdpCounters { taken: read(0)?, no_socket: read(1)?, passed: read(2)? })
    }

    /// Detaches the program from the interface and removes the pins.
    pub fn detach(self) -> Result<()> {
        detach(&self.pins)
    }
}

/// True if an interface's driver runs programs and sends frames redirected to it. Tunnels of ports
/// that use the interface need this ([`crate::ports::LinkTarget::Outside`]). False if another
/// program is attached in the stack. `None`: there is no such interface. Kernels before Linux 6.3
/// do not report it, which counts as false.
///
/// The driver of a veth end sends redirected frames while the other
/// end has NAPI: with GRO turned on, or a program.
pub fn redirects(device: &str) -> Option<bool> {
    let index = i32::try_from(InterfaceState::of(device)?.index).ok()?;
    let mut options = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: the options outlive the call and say their own size.
    let error = unsafe { libbpf_sys::bpf_xdp_query(index, 0, &mut options) };
    let has = options.feature_flags & FEATURES == FEATURES;
    let free = u32::from(options.attach_mode) != libbpf_sys::XDP_ATTACHED_SKB;
    Some(error == 0 && has && free)
}

/// Removes the pins in `pins`, and with them the program from
/// its interface. Does nothing if there is none.
pub fn detach(pins: &Path) -> Result<()> {
    pins::detach_link(&pins.join(LINK));
    if let (Some(index), Ok(map)) = (filtered(pins), settings(pins)) {
        // The interface may be gone. The descriptor is not used here.
        let _ = hook(map.as_fd(), index).detach();
    }
    [LINK].iter().chain(&MAPS).try_for_each(|name| remove_file(&pins.join(name)))?;
    remove_dir(pins)
}

/// Returns the index of the interface whose filter uses the pinned maps.
fn filtered(pins: &Path) -> Option<u32> {
    let value = settings(pins).ok()?.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).ok()??;
    let index = u32::from_ne_bytes(*value.last_chunk()?);
    Some(index).filter(|index| value.len() == 8 && *index != 0)
}

fn settings(pins: &Path) -> libbpf_rs::Result<MapHandle> {
    MapHandle::from_pinned_path(pins.join(MAPS[2]))
}

fn hook(program: BorrowedFd<'_>, index: u32) -> TcHook {
    let mut hook = TcHook::new(program);
    hook.ifindex(index as i32).attach_point(TC_INGRESS);
    hook.handle(FILTER_HANDLE).priority(FILTER_PRIORITY);
    hook
}

/// Loads the programs with the maps in `pins` if `keep`, otherwise with new ones. Uses the maps of
/// ports in `ports`, or else ones without any port.
fn prepare(device: &str, pins: &Path, keep: bool, ports: Option<&Path>) -> Result<Object> {
    let empty = || detach(pins).and_then(|()| pins::make_dir(pins));
    pins::make_dir(pins)?;
    if !keep {
        // Pins of an interface that is gone, or incomplete ones.
        empty()?;
    }
    let place = |map: &mut OpenMapMut<'_>| {
        let name = map.name().to_owned();
        let is = |names: &[&str]| names.iter().any(|other| name == *other);
        match ports {
            _ if is(&MAPS) => Ok(Some(pins.join(&name))),
            Some(ports) if is(&SHARED_MAPS) => Ok(Some(ports.join(&name))),
            None if is(&SHARED_MAPS) => map.set_max_entries(1).map(|()| None),
            _ => Ok(None),
        }
    };
    pins::load(OBJECT, &format!("the XDP program for {device}"), place, empty)
}

fn maps(pins: &Path) -> Result<[MapHandle; 4]> {
    let map = |name| pins::map(pins, name);
    Ok([map(MAPS[0])?, map(MAPS[1])?, map(MAPS[2])?, map(MAPS[3])?])
}

/// Attaches in the driver, or else in the stack, and pins the link.
fn link(program: &ProgramMut<'_>, index: u32, pin: &Path) -> io::Result<()> {
    let program = program.as_fd();
    let link = create_link(program, index, XdpFlags::DRV_MODE).or_else(|native| {
        // If both fail, the driver's error is more telling, unless another program is attached.
        create_link(program, index, XdpFlags::SKB_MODE).map_err(|generic| match generic.kind() {
            io::ErrorKind::ResourceBusy => generic,
            _ => native,
        })
    })?;
    pin_link(&link, pin)
}

fn mode(program: &ProgramMut<'_>, index: u32) -> io::Result<XdpMode> {
    let index = i32::try_from(index).map_err(io::Error::other)?;
    let query = libbpf_rs::Xdp::new(program.as_fd()).query(index, XdpFlags::NONE);
    match u32::from(query.map_err(other)?.attach_mode) {
        libbpf_sys::XDP_ATTACHED_SKB => Ok(XdpMode::Generic),
        _ => Ok(XdpMode::Native),
    }
}
