//! Entering the control guest's namespaces, and dropping all privileges but one.
//!
//! The mirror starts as root of the host with one thread. It opens its files there. Then it enters
//! the network namespace for its sockets to the kernel, whose large buffer only the host's root may
//! request. Last, it enters the user namespace that owns the network namespace, if there is one.
//! There it keeps CAP_NET_ADMIN, to have neighbours confirmed: the kernel requires it of both the
//! socket's opener and the sender.

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

/// Errors before the mirror runs.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// See the text.
    #[error(
        "cannot enter namespace {path} (it must exist, and this process must be root with one thread)"
    )]
    Namespace {
        /// Path of the namespace.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// See the text.
    #[error("cannot listen at {path} (its directory must exist and be writable)")]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// See the text.
    #[error("cannot give up privileges")]
    Privileges(#[source] io::Error),
}

/// Listens at `path`, replacing an earlier process's socket, with the access rights `mode`.
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

/// Opens a namespace's file, for [`enter`] after entering others.
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
        // The namespace's owner may have forbidden this; then there are no groups to drop.
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

/// Permanently drops every capability but CAP_NET_ADMIN.
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
