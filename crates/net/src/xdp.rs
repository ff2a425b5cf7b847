//! The XDP program that gives frames which belong to PdP to AF_XDP sockets and all others to the
//! kernel, and the two that do so for packet sockets (`bpf/pdp_xdp.bpf.c`).
//!
//! Link and maps are pinned, so that they outlive the process; the next one adopts them, and puts
//! its own version of the program in place of the old one's without a gap. For packet sockets there
//! is no link: a traffic control filter stays where it is until it is taken off.
//!
//! Limits: [`TAKES_MAX`], [`QUEUES_MAX`].
//! Source: Linux Documentation/networking/af_xdp.rst, bpf/libbpf, tc-bpf(8).

use std::collections::BTreeSet;
use std::ffi::CString;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, Object, OpenMapMut, ProgramMut, TC_INGRESS, TcHook,
    XdpFlags,
};

pub use pdp_wire::tunnel::Take;

use crate::error::{Context, Error, Result};
use crate::interface::{Condition, Interface};
use crate::pins::{self, remove_dir, remove_file};
use crate::ports::{Ports, SHARED_MAPS};

/// Destinations that can be taken on one interface.
pub const TAKES_MAX: usize = 65536;

/// Receive queues that can have a socket.
pub const QUEUES_MAX: u32 = 64;

/// Where BPF file systems usually are.
pub const BPF_FS: &str = "/sys/fs/bpf";

/// BPF_FS_MAGIC of include/uapi/linux/magic.h.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pdp_xdp.bpf.o"));

const PROGRAM: &str = "pdp_xdp";
const SOCKET_PROGRAM: &str = "pdp_socket";
const FILTER_PROGRAM: &str = "pdp_tc";

/// Which of an interface's filters is ours, by traffic control's numbers: unlikely to be another's.
const FILTER_HANDLE: u32 = 0x0070_6470;
const FILTER_PRIORITY: u32 = 0x7064;

/// Name of the pinned link; the maps are pinned by their own names.
const LINK: &str = "link";

const MAPS: [&str; 4] = ["sockets", "takes", "settings", "counters"];

/// What is taken as `struct take` of the program.
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

/// In the kind of what the program takes, beside the family: 0 is UDP.
const TAKE_GRE: u16 = 0x100;
const TAKE_VLAN: u16 = 0x200;

/// NETDEV_XDP_ACT_BASIC, _REDIRECT and _NDO_XMIT of linux/netdev.h.
const FEATURES: u64 = 1 | 2 | 4;

/// How the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the kernel's stack; slower.
    Generic,
    /// Not XDP: behind packet sockets.
    Packet,
}

/// What the program did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames given to a socket. Those that it had no room for count here too (XDP_STATISTICS of
    /// the socket says how many).
    pub taken: u64,
    /// Frames of PdP that found no socket on their queue and went to the kernel.
    pub no_socket: u64,
    /// Other frames, given to the kernel.
    pub passed: u64,
}

/// The program on one interface. Dropping it leaves the program there; see [`Xdp::detach`].
#[derive(Debug)]
pub struct Xdp {
    mode: Mode,
    /// The interface that has a filter; 0: none.
    filtered: u32,
    pins: PathBuf,
    maps: [MapHandle; 4],
}

impl Xdp {
    /// Adopts what is pinned in `pins` (below a BPF file system, see [`mount_bpf_fs`]) if it is on
    /// this interface; else loads it anew, in the driver if it can. Until sockets are set, all goes
    /// to the kernel.
    pub fn attach(device: &str, pins: &Path) -> Result<Self> {
        Self::attach_to(device, pins, None)
    }

    /// As [`Xdp::attach`], where some of what is taken may be for ports of kernel vrouters: frames of their tunnels go
    /// to them and not to sockets, and count there alone. Where it does not run in the driver ([`Xdp::mode`]) they can't
    /// be given to ports, and go as the others do. After [`Ports::open`] this has to be called too.
    pub fn attach_for(device: &str, pins: &Path, ports: &Ports) -> Result<Self> {
        let this = Self::attach_to(device, pins, Some(ports))?;
        if this.mode == Mode::Native { Ok(this) } else { Self::attach_to(device, pins, None) }
    }

    fn attach_to(device: &str, pins: &Path, ports: Option<&Ports>) -> Result<Self> {
        let index = Interface::by_name(device)?.index;
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

    /// As [`Xdp::attach`], for an interface whose frames come by packet sockets: those get what is
    /// taken if they have the program that is returned, and the kernel gets the rest. What is taken
    /// is lost while there is no socket.
    pub fn attach_behind_sockets(device: &str, pins: &Path) -> Result<(Self, OwnedFd)> {
        let index = Interface::by_name(device)?.index;
        let object = prepare(device, pins, filtered(pins) == Some(index), None)?;
        let filter = program(&object, FILTER_PROGRAM)?;
        let socket = program(&object, SOCKET_PROGRAM)?.as_fd().try_clone_to_owned();
        let socket = socket.on("keep the socket program of", device)?;
        let mut this =
            Self { mode: Mode::Packet, filtered: index, pins: pins.to_owned(), maps: maps(pins)? };
        if filtered(pins) != Some(index) {
            // Before there is a filter, so that none is left behind. Nothing is taken yet.
            this.take_all(false)?;
        }
        let mut hook = hook(filter.as_fd(), index);
        hook.create().map_err(other).on("prepare traffic control of", device)?;
        hook.replace(true).attach().map_err(other).on("attach the filter to", device)?;
        Ok((this, socket))
    }

    /// How it runs.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Gives the AF_XDP sockets by queue; queues not named have none.
    pub fn set_sockets(&mut self, sockets: &[(u32, BorrowedFd<'_>)]) -> Result<()> {
        if let Some((queue, _)) = sockets.iter().find(|(queue, _)| *queue >= QUEUES_MAX) {
            let text = format!("no socket there; {QUEUES_MAX} queues are supported, from 0");
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

    /// Replaces what is taken. Those in both old and new never stop being taken.
    pub fn set_takes<'a>(&mut self, takes: impl IntoIterator<Item = &'a Take>) -> Result<()> {
        let wanted: BTreeSet<_> = takes.into_iter().map(|take| key_of(take).to_vec()).collect();
        if wanted.len() > TAKES_MAX {
            let text = format!("{} tunnels' ends, {TAKES_MAX} at most", wanted.len());
            return Err(Error::Invalid { object: self.pins.display().to_string(), text });
        }
        let [_, map, ..] = &self.maps;
        let there: BTreeSet<_> = map.keys().collect();
        for key in there.difference(&wanted) {
            map.delete(key).map_err(other).on("stop taking frames by", self.pins.display())?;
        }
        for key in wanted.difference(&there) {
            map.update(key, &[1], MapFlags::ANY)
                .map_err(other)
                .on("take frames by", self.pins.display())?;
        }
        Ok(())
    }

    /// Takes every frame, or only what [`Xdp::set_takes`] says.
    pub fn take_all(&mut self, all: bool) -> Result<()> {
        let [_, _, map, _] = &self.maps;
        let settings = [u32::from(all).to_ne_bytes(), self.filtered.to_ne_bytes()];
        map.update(&0u32.to_ne_bytes(), settings.as_flattened(), MapFlags::ANY)
            .map_err(other)
            .on("take all frames by", self.pins.display())
    }

    /// What the program did since it was loaded.
    pub fn counters(&self) -> Result<Counters> {
        let [.., map] = &self.maps;
        let read = |counter: u32| -> Result<u64> {
            let by_cpu = map
                .lookup_percpu(&counter.to_ne_bytes(), MapFlags::ANY)
                .map_err(other)
                .on("read the counters of", self.pins.display())?;
            let number = |bytes: Vec<u8>| bytes.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
            Ok(by_cpu.unwrap_or_default().into_iter().map(number).sum())
        };
        Ok(Counters { taken: read(0)?, no_socket: read(1)?, passed: read(2)? })
    }

    /// Takes the program off the interface and removes the pins.
    pub fn detach(self) -> Result<()> {
        detach(&self.pins)
    }
}

/// Whether an interface's driver runs programs and sends what they redirect to it, as it has to where tunnels of ports
/// leave by it ([`crate::ports::Way::Outside`]); not where another program is in its way in the stack. `None`: there is
/// no such interface. Kernels before Linux 6.3 do not tell, and count as if it did not.
///
/// The driver of one end of a veth sends while the other end has NAPI: with GRO turned on, or a program.
pub fn redirects(device: &str) -> Option<bool> {
    let index = i32::try_from(Condition::of(device)?.index).ok()?;
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

/// Removes the pins in `pins`, and with them the program from its interface. No change if there is
/// none.
pub fn detach(pins: &Path) -> Result<()> {
    // At once, though others may hold the link.
    if let Some(link) = pinned_link(&pins.join(LINK)) {
        // It may be that of an interface that is gone.
        let _ = link.detach();
    }
    if let (Some(index), Ok(map)) = (filtered(pins), settings(pins)) {
        // As above. The descriptor has no meaning here.
        let _ = hook(map.as_fd(), index).detach();
    }
    [LINK].iter().chain(&MAPS).try_for_each(|name| remove_file(&pins.join(name)))?;
    remove_dir(pins)
}

/// Mounts the BPF file system at [`BPF_FS`] unless it is there.
pub fn mount_bpf_fs() -> Result<()> {
    // Of two threads that found none, the second would hide what the first pins.
    static LOOKING: Mutex<()> = Mutex::new(());
    let _alone = LOOKING.lock();
    if is_bpf_fs(Path::new(BPF_FS)) {
        return Ok(());
    }
    let flags = rustix::mount::MountFlags::NOSUID
        | rustix::mount::MountFlags::NODEV
        | rustix::mount::MountFlags::NOEXEC;
    rustix::mount::mount("bpf", BPF_FS, "bpf", flags, c"mode=700")
        .on("mount a BPF file system at", BPF_FS)
}

/// Whether a path is in a BPF file system.
pub(crate) fn is_bpf_fs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == BPF_FS_MAGIC)
}

/// The link pinned at a path. Of one that is not there the library would say so on standard error.
pub(crate) fn pinned_link(path: &Path) -> Option<Link> {
    path.exists().then(|| Link::open(path).ok())?
}

/// Index of the interface of the link pinned at a path; zero if that is gone.
pub(crate) fn pinned_index(path: &Path) -> Option<u32> {
    match pinned_link(path)?.info().ok()?.info {
        LinkTypeInfo::Xdp(info) => Some(info.ifindex),
        _ => None,
    }
}

/// Index of the interface whose filter has the pinned maps.
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

/// Loads the programs with the maps in `pins` if those are to be kept, else with new ones.
/// With the maps of ports in `ports`, or with ones without any port.
fn prepare(device: &str, pins: &Path, keep: bool, ports: Option<&Path>) -> Result<Object> {
    let empty = || detach(pins).and_then(|()| pins::make_dir(pins));
    pins::make_dir(pins)?;
    if !keep {
        // Of an interface that is gone, or half-made.
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

pub(crate) fn program<'o>(object: &'o Object, name: &str) -> Result<ProgramMut<'o>> {
    let program = object.progs_mut().find(|program| program.name() == name);
    program.ok_or_else(|| io::Error::other("not in its object")).on("find", name)
}

fn maps(pins: &Path) -> Result<[MapHandle; 4]> {
    let map = |name| pins::map(pins, name);
    Ok([map(MAPS[0])?, map(MAPS[1])?, map(MAPS[2])?, map(MAPS[3])?])
}

/// Attaches in the driver, or else in the stack, and pins the link.
fn link(program: &ProgramMut<'_>, index: u32, pin: &Path) -> io::Result<()> {
    let program = program.as_fd();
    let link = create_link(program, index, XdpFlags::DRV_MODE).or_else(|native| {
        // If neither does, what the driver said tells more, except where another is attached.
        create_link(program, index, XdpFlags::SKB_MODE).map_err(|generic| match generic.kind() {
            io::ErrorKind::ResourceBusy => generic,
            _ => native,
        })
    })?;
    pin_link(&link, pin)
}

/// Attaches a program to an interface of the calling thread's network namespace, as long as the link is open or
/// pinned.
pub(crate) fn create_link(
    program: BorrowedFd<'_>,
    index: u32,
    mode: XdpFlags,
) -> io::Result<OwnedFd> {
    let index = i32::try_from(index).map_err(io::Error::other)?;
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: mode.bits(),
        ..Default::default()
    };
    // SAFETY: the program's descriptor is open as long as `program`; the options outlive the
    // call and say their own size.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(program.as_raw_fd(), index, libbpf_sys::BPF_XDP, &options)
    };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: just opened for us and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn pin_link(link: &OwnedFd, pin: &Path) -> io::Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a zero and outlives the call.
    match unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), path.as_ptr()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

fn mode(program: &ProgramMut<'_>, index: u32) -> io::Result<Mode> {
    let index = i32::try_from(index).map_err(io::Error::other)?;
    let query = libbpf_rs::Xdp::new(program.as_fd()).query(index, XdpFlags::NONE);
    match u32::from(query.map_err(other)?.attach_mode) {
        libbpf_sys::XDP_ATTACHED_SKB => Ok(Mode::Generic),
        _ => Ok(Mode::Native),
    }
}

pub(crate) fn other(error: libbpf_rs::Error) -> io::Error {
    io::Error::other(error)
}
