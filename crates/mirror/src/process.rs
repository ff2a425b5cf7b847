//! Into the control guest's namespaces, and out of all privileges but one.
//!
//! The mirror starts as root of the host with one thread. It opens its files there, goes into
//! the network namespace for its sockets to the kernel (whose large room only the host's root may
//! ask for), and then into the user namespace that owns it, if there is one. What it keeps is
//! CAP_NET_ADMIN there, to have neighbours confirmed: the kernel asks for it from who opened the
//! socket and from who sends.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, move_into_link_name_space, set_capabilities,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// What can go wrong before the mirror runs.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// See the text.
    #[error(
        "cannot enter namespace {path}: is it there, and is this process root with one thread?"
    )]
    Namespace {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// See the text.
    #[error("cannot listen at {path}: is its directory there and writable?")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// See the text.
    #[error("cannot give up privileges")]
    Privileges(#[source] io::Error),
}

/// Listens at `path`, in the place of an earlier process, for who has the rights of `mode`.
pub fn listen(path: &Path, mode: u32) -> Result<UnixListener, StartError> {
    let listen = || {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        Ok(listener)
    };
    listen().map_err(|source| StartError::Listen { path: path.into(), source })
}

/// Opens a namespace's file, for [`enter`] after others were entered.
pub fn open(path: &Path) -> Result<File, StartError> {
    File::open(path).map_err(|source| StartError::Namespace { path: path.into(), source })
}

/// Moves this thread, the only one, into a namespace.
pub fn enter(path: &Path, file: &File, kind: LinkNameSpaceType) -> Result<(), StartError> {
    move_into_link_name_space(file.as_fd(), Some(kind))
        .map_err(|error| StartError::Namespace { path: path.into(), source: error.into() })
}

/// Becomes root of the user namespace just entered.
pub fn become_its_root() -> Result<(), StartError> {
    let become_root = || {
        // The namespace's owner may have forbidden this, and then there is nothing to drop.
        match set_thread_groups(&[]) {
            Ok(()) | Err(rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error),
        }
        let (gid, uid) = (Gid::ROOT, Uid::ROOT);
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)
    };
    become_root().map_err(|error| StartError::Privileges(error.into()))
}

/// Gives up every capability but CAP_NET_ADMIN, for good.
pub fn drop_privileges() -> Result<(), StartError> {
    let only = CapabilitySet::NET_ADMIN;
    let none = CapabilitySet::empty();
    let drop = || {
        set_no_new_privs(true)?;
        set_capabilities(
            None,
            CapabilitySets { effective: only, permitted: only, inheritable: none },
        )
    };
    drop().map_err(|error| StartError::Privileges(error.into()))
}
