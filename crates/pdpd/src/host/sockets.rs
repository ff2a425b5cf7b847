//! Directories and sockets by which other processes reach the mux and the helpers.
//!
//! All belong to root. pdpd creates them and passes on the listening sockets, so no
//! unprivileged process can replace a socket by another one or by a link. If clients insist
//! on writing next to their socket, the directory is a file system of its own with a limit
//! ([`FILES_MAX`], [`BYTES_MAX`]). Only the owner of a file can remove it there (mode 1770).

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use pdp_container::safe_removal;
use rustix::fs::{Gid, Mode, Uid};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Files in a directory that others may write.
pub const FILES_MAX: u32 = 64;

/// Total size of these files, bytes.
pub const BYTES_MAX: u32 = 64 << 10;

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Attempts to find a free name.
const TRIES: u32 = 16;

/// Protocol of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    /// Control protocol; only root may connect.
    Control,
    /// memif; everybody who may enter the directory may connect.
    Memif,
}

/// Listens at `path`, in a directory of root's, and replaces an earlier
/// socket. Existing connections to the earlier one stay.
///
/// If others may write to the directory and have filled it, their files are
/// removed. A guest that has mounted the directory does not see the new one.
pub fn listen(path: &Path, kind: SocketKind) -> io::Result<OwnedFd> {
    match listen_once(path, kind) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            let directory = path.parent().unwrap_or(path);
            if !safe_removal::is_mounted(directory)? {
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

fn listen_once(path: &Path, kind: SocketKind) -> io::Result<OwnedFd> {
    let (socket_type, mode) = match kind {
        SocketKind::Control => (SocketType::STREAM, 0o600),
        SocketKind::Memif => (SocketType::SEQPACKET, 0o666),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, socket_type, flags, None)?;
    // Under a random name first, and then renamed. An existing socket
    // is thus replaced atomically, and nobody can interfere.
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
            // The caller needs the first error.
            let _ = rustix::fs::unlink(&name);
        }
        return Ok(placed.map(|()| socket)?);
    }
    Err(io::Error::other(format!("no name was free in {TRIES} attempts")))
}

/// Creates a directory in which only root can create files, and which
/// processes of group `gid` may enter. Corrects an existing one.
pub fn make_directory(path: &Path, gid: u32) -> io::Result<()> {
    if safe_removal::is_mounted(path).unwrap_or(false) {
        unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    }
    mkdir(path)?;
    rustix::fs::chown(path, Some(Uid::ROOT), Some(Gid::from_raw(gid)))?;
    Ok(rustix::fs::chmod(path, Mode::from_raw_mode(0o750))?)
}

/// Creates a directory in which processes of group `gid` may create files
/// too. An existing one for the same group stays, with its content.
pub fn make_writable_directory(path: &Path, gid: u32) -> io::Result<()> {
    mkdir(path)?;
    if safe_removal::is_mounted(path)? {
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
