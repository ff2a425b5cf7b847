//! The XDP program that gives frames which belong to PdP to AF_XDP sockets and all others to the
//! kernel (`bpf/pdp_xdp.bpf.c`).
//!
//! Link and maps are pinned, so that they outlive the process; the next one adopts them, and puts
//! its own version of the program in place of the old one's without a gap.
//!
//! Limits: [`TAKES_MAX`], [`QUEUES_MAX`].
//! Source: Linux Documentation/networking/af_xdp.rst, bpf/libbpf.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramMut, XdpFlags};

use crate::error::{Context, Error, Result};
use crate::interface::Interface;

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

/// Name of the pinned link; the maps are pinned by their own names.
const LINK: &str = "link";

const MAPS: [&str; 4] = ["sockets", "takes", "settings", "counters"];

/// UDP to here is taken: VXLAN and UDP tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Take {
    /// Outer destination address.
    pub local: IpAddr,
    /// UDP destination port.
    pub port: u16,
}

impl Take {
    /// As `struct take` of the program.
    fn key(self) -> [u8; 20] {
        let mut key = [0; 20];
        let family: u16 = match self.local {
            IpAddr::V4(address) => {
                key[..4].copy_from_slice(&address.octets());
                4
            }
            IpAddr::V6(address) => {
                key[..16].copy_from_slice(&address.octets());
                6
            }
        };
        key[16..18].copy_from_slice(&self.port.to_be_bytes());
        key[18..].copy_from_slice(&family.to_ne_bytes());
        key
    }
}

/// How the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the kernel's stack; slower.
    Generic,
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
    pins: PathBuf,
    maps: [MapHandle; 4],
}

impl Xdp {
    /// Adopts what is pinned in `pins` (below a BPF file system, see [`mount_bpf_fs`]) if it is on
    /// this interface; else loads it anew, in the driver if it can. Until sockets are set, all goes
    /// to the kernel.
    pub fn attach(device: &str, pins: &Path) -> Result<Self> {
        let index = Interface::by_name(device)?.index;
        libbpf_rs::set_print(None);
        fs::create_dir_all(pins).on("make", pins.display())?;
        if !is_bpf_fs(pins) {
            let text = format!("not in a BPF file system; mount -t bpf bpf {BPF_FS}");
            return Err(Error::Invalid { object: pins.display().to_string(), text });
        }
        if pinned_index(pins) != Some(index) {
            // Of an interface that is gone, or half-made.
            detach(pins)?;
            fs::create_dir_all(pins).on("make", pins.display())?;
        }
        let object = match load(pins) {
            // Maps of an older version, of another shape.
            Err(_) if pins.join(LINK).exists() => {
                detach(pins)?;
                fs::create_dir_all(pins).on("make", pins.display())?;
                load(pins)
            }
            object => object,
        }
        .map_err(other)
        .on("load the XDP program for", device)?;
        let program = object.progs_mut().find(|program| program.name() == PROGRAM);
        let program =
            program.ok_or_else(|| io::Error::other("not in its object")).on("find", PROGRAM)?;
        if pins.join(LINK).exists() {
            let mut link =
                Link::open(pins.join(LINK)).map_err(other).on("open the XDP link of", device)?;
            link.update_prog(&program).map_err(other).on("replace the XDP program of", device)?;
        } else {
            link(&program, index, &pins.join(LINK)).on("attach the XDP program to", device)?;
        }
        let map = |name| {
            MapHandle::from_pinned_path(pins.join(name))
                .map_err(other)
                .on("open the XDP map of", device)
        };
        let maps = [map(MAPS[0])?, map(MAPS[1])?, map(MAPS[2])?, map(MAPS[3])?];
        let mode = mode(&program, index).on("ask the XDP mode of", device)?;
        Ok(Self { mode, pins: pins.to_owned(), maps })
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
    pub fn set_takes(&mut self, takes: &[Take]) -> Result<()> {
        let wanted: BTreeSet<_> = takes.iter().map(|take| take.key().to_vec()).collect();
        if wanted.len() > TAKES_MAX {
            let text = format!("{} addresses and ports, {TAKES_MAX} at most", wanted.len());
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
        map.update(&0u32.to_ne_bytes(), &u32::from(all).to_ne_bytes(), MapFlags::ANY)
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

/// Removes the pins in `pins`, and with them the program from its interface. No change if there is
/// none.
pub fn detach(pins: &Path) -> Result<()> {
    // At once, though others may hold the link.
    if let Ok(link) = Link::open(pins.join(LINK)) {
        // It may be that of an interface that is gone.
        let _ = link.detach();
    }
    for name in [LINK].iter().chain(&MAPS) {
        let path = pins.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).on("remove", path.display());
            }
            _ => {}
        }
    }
    match fs::remove_dir(pins) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).on("remove", pins.display())
        }
        _ => Ok(()),
    }
}

/// Mounts the BPF file system at [`BPF_FS`] unless it is there.
pub fn mount_bpf_fs() -> Result<()> {
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

/// Index of the interface of the pinned link; zero if that is gone.
fn pinned_index(pins: &Path) -> Option<u32> {
    match Link::open(pins.join(LINK)).ok()?.info().ok()?.info {
        LinkTypeInfo::Xdp(info) => Some(info.ifindex),
        _ => None,
    }
}

/// Loads the program, with the maps that are pinned, or with new ones that are pinned then.
fn load(pins: &Path) -> libbpf_rs::Result<Object> {
    let mut object = ObjectBuilder::default().open_memory(OBJECT)?;
    for mut map in object.maps_mut() {
        if let Some(name) = map.name().to_str().filter(|name| MAPS.contains(name)) {
            let path = pins.join(name);
            map.set_pin_path(path)?;
        }
    }
    object.load()
}

/// Attaches in the driver, or else in the stack, and pins the link.
fn link(program: &ProgramMut<'_>, index: u32, pin: &Path) -> io::Result<()> {
    let index = i32::try_from(index).map_err(io::Error::other)?;
    let create = |flags: u32| -> io::Result<OwnedFd> {
        let options = libbpf_sys::bpf_link_create_opts {
            sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
            flags,
            ..Default::default()
        };
        // SAFETY: the program's descriptor is open as long as `program`; the options outlive the
        // call and say their own size.
        let fd = unsafe {
            libbpf_sys::bpf_link_create(
                program.as_fd().as_raw_fd(),
                index,
                libbpf_sys::BPF_XDP,
                &options,
            )
        };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        // SAFETY: just opened for us and owned by nobody else.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let link = create(XdpFlags::DRV_MODE.bits()).or_else(|native| {
        // If neither does, what the driver said tells more, except where another is attached.
        create(XdpFlags::SKB_MODE.bits()).map_err(|generic| match generic.kind() {
            io::ErrorKind::ResourceBusy => generic,
            _ => native,
        })
    })?;
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

fn other(error: libbpf_rs::Error) -> io::Error {
    io::Error::other(error)
}
