//! BPF programs, maps and links that are pinned in a BPF
//! file system, so that they outlive the daemon.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{
    Link, MapCore, MapHandle, Object, ObjectBuilder, OpenMapMut, ProgramMut, XdpFlags,
};

use crate::error::{Error, NetContext, Result};

/// Usual mount point of the BPF file system.
pub const BPF_FS: &str = "/sys/fs/bpf";

/// BPF_FS_MAGIC of include/uapi/linux/magic.h.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Makes a directory for pins, unless it exists.
///
/// # Errors
/// It is not in a BPF file system.
pub(crate) fn make_dir(pins: &Path) -> Result<()> {
    libbpf_rs::set_print(None);
    fs::create_dir_all(pins).on("make", pins.display())?;
    if is_bpf_fs(pins) {
        return Ok(());
    }
    let text = format!("not in a BPF file system; mount -t bpf bpf {BPF_FS}");
    Err(Error::Invalid { object: pins.display().to_string(), text })
}

/// Loads the programs of an object; errors name them as `what`. `place`
/// prepares a map and returns the path of its pin, if it has one. The kernel
/// uses the map that is pinned there, or pins the new one.
///
/// If a pinned map has another shape than the object's (another version pinned it), this calls
/// `empty`, which removes such pins, and then makes new maps.
pub(crate) fn load(
    object: &[u8],
    what: &str,
    place: impl Fn(&mut OpenMapMut<'_>) -> libbpf_rs::Result<Option<PathBuf>>,
    empty: impl FnOnce() -> Result<()>,
) -> Result<Object> {
    let object = ObjectBuilder::default().open_memory(object);
    let mut object = object.map_err(other).on("open", what)?;
    let mut fits = true;
    for mut map in object.maps_mut() {
        let pin = place(&mut map).map_err(other).on("prepare the map", map.name().display())?;
        if let Some(pin) = pin {
            map.set_pin_path(&pin).map_err(other).on("pin", pin.display())?;
            fits &= !pin.exists()
                || MapHandle::from_pinned_path(&pin).is_ok_and(|pinned| {
                    (
                        pinned.map_type(),
                        pinned.key_size(),
                        pinned.value_size(),
                        pinned.max_entries(),
                    ) == (map.map_type(), map.key_size(), map.value_size(), map.max_entries())
                });
        }
    }
    if !fits {
        empty()?;
    }
    object.load().map_err(other).on("load", what)
}

/// Opens the map of this name that is pinned in `pins`.
pub(crate) fn map(pins: &Path, name: &str) -> Result<MapHandle> {
    let path = pins.join(name);
    MapHandle::from_pinned_path(&path).map_err(other).on("open the map", path.display())
}

/// Removes a file, if there is one.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    gone(fs::remove_file(path), path)
}

/// Removes an empty directory, if there is one.
pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    gone(fs::remove_dir(path), path)
}

fn gone(removed: io::Result<()>, path: &Path) -> Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).on("remove", path.display())
        }
        _ => Ok(()),
    }
}

/// Mounts the BPF file system at [`BPF_FS`], unless it is there.
pub fn mount_bpf_fs() -> Result<()> {
    // Otherwise, if two threads found none, the second mount would hide the first thread's pins.
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

/// True if a path is in a BPF file system.
pub(crate) fn is_bpf_fs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == BPF_FS_MAGIC)
}

/// Opens the link pinned at a path. Checks that it exists first, since the
/// library would report its absence on standard error.
pub(crate) fn pinned_link(path: &Path) -> Option<Link> {
    path.exists().then(|| Link::open(path).ok())?
}

/// Returns the interface index of the link pinned at a path; 0 if the interface is gone.
pub(crate) fn pinned_index(path: &Path) -> Option<u32> {
    match pinned_link(path)?.info().ok()?.info {
        LinkTypeInfo::Xdp(info) => Some(info.ifindex),
        _ => None,
    }
}

/// Detaches the link pinned at a path, though others may keep it open. Returns false without one.
pub(crate) fn detach_link(path: &Path) -> bool {
    let Some(link) = pinned_link(path) else { return false };
    // It may belong to an interface that is gone.
    let _ = link.detach();
    true
}

pub(crate) fn program<'o>(object: &'o Object, name: &str) -> Result<ProgramMut<'o>> {
    let program = object.progs_mut().find(|program| program.name() == name);
    program.ok_or_else(|| io::Error::other("not in its object")).on("find", name)
}

/// Attaches a program to an interface of the calling thread's network namespace. It stays attached
/// while the link is open or pinned.
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

pub(crate) fn other(error: libbpf_rs::Error) -> io::Error {
    io::Error::other(error)
}
