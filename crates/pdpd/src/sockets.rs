//! Directories and sockets by which others reach the mux and the helpers.
//!
//! All are root's, made by pdpd, which hands the listening sockets over: nobody below root can put another
//! socket, or a link, in the place of one. Where clients insist on writing beside their socket, the directory is
//! a file system of its own with a bound ([`FILES_MAX`], [`BYTES_MAX`]), in which only who owns a
//! file may remove it (mode 1770).

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use pdp_container::tree;
use rustix::fs::{Gid, Mode, Uid};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Files in a directory that others may write.
pub const FILES_MAX: u32 = 64;

/// Bytes of all files in it.
pub const BYTES_MAX: u32 = 64 << 10;

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Attempts to find a name that is free.
const TRIES: u32 = 16;

/// What is said over a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Control, by root.
    Control,
    /// memif, by who may enter the directory.
    Memif,
}

/// Listens at `path`, in the place of who listened there before, in a directory of root's. Whoever connected
/// to that stays connected to it. Where others may write and left no room, what they wrote goes: a
/// guest that has the directory by a mount of its own does not see the new one.
pub fn listen(path: &Path, kind: Kind) -> io::Result<OwnedFd> {
    match listen_once(path, kind) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            let directory = path.parent().unwrap_or(path);
            if !tree::is_mounted(directory)? {
                return Err(error);
            }
            let gid = rustix::fs::stat(directory)?.st_gid;
            unmount(directory, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
            make_writable_directory(directory, gid)?;
            listen_once(path, kind)
        }
        result => result,
    }
}

fn listen_once(path: &Path, kind: Kind) -> io::Result<OwnedFd> {
    let (socket_type, mode) = match kind {
        Kind::Control => (SocketType::STREAM, 0o600),
        Kind::Memif => (SocketType::SEQPACKET, 0o666),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, socket_type, flags, None)?;
    // Under a name that nobody knows before, and from there to its own: what may be there is replaced, not
    // removed and made, so that nobody comes between.
    for _ in 0..TRIES {
        let mut number = [0; 4];
        rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())?;
        let name = path.with_file_name(format!(".{:08x}", u32::from_ne_bytes(number)));
        match rustix::net::bind(&socket, &SocketAddrUnix::new(&name)?) {
            Err(rustix::io::Errno::ADDRINUSE) => continue,
            result => result?,
        }
        let placed = rustix::fs::chmod(&name, Mode::from_raw_mode(mode))
            .and_then(|()| rustix::net::listen(&socket, BACKLOG))
            .and_then(|()| rustix::fs::rename(&name, path));
        if placed.is_err() {
            // What failed is what the caller has to know.
            let _ = rustix::fs::unlink(&name);
        }
        return Ok(placed.map(|()| socket)?);
    }
    Err(io::Error::other(format!("no name was free in {TRIES} attempts")))
}

/// Makes a directory whose files root alone makes, and which processes of group `gid` may enter. One that is
/// there is set right.
pub fn make_directory(path: &Path, gid: u32) -> io::Result<()> {
    if tree::is_mounted(path).unwrap_or(false) {
        unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    }
    mkdir(path)?;
    rustix::fs::chown(path, Some(Uid::ROOT), Some(Gid::from_raw(gid)))?;
    Ok(rustix::fs::chmod(path, Mode::from_raw_mode(0o750))?)
}

/// Makes a directory in which processes of group `gid` may make files too. One that is there for the same
/// group stays, with what is in it.
pub fn make_writable_directory(path: &Path, gid: u32) -> io::Result<()> {
    mkdir(path)?;
    if tree::is_mounted(path)? {
        if rustix::fs::stat(path)?.st_gid == gid {
            return Ok(());
        }
        unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let options = format!("size={BYTES_MAX},nr_inodes={FILES_MAX},mode=1770,uid=0,gid={gid}");
    let options = std::ffi::CString::new(options)?;
    Ok(mount("pdp", path, "tmpfs", flags, Some(options.as_c_str()))?)
}

fn mkdir(path: &Path) -> io::Result<()> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o700)) {
        Err(rustix::io::Errno::EXIST) if path.is_dir() && !path.is_symlink() => Ok(()),
        result => Ok(result?),
    }
}
