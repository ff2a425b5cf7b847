//! Files and directories of the machine that a spec binds into a guest.
//!
//! Anybody who may write at such a path can change it at any moment, guests included. The path is
//! therefore opened once, when it is mounted, without following a symbolic link anywhere in it. The
//! mount shows exactly what is at that path, never the target of a link. It excludes mounts below
//! the path. Programs get no rights by it (`nosuid`), and devices can't be used (`nodev`).
//! Read-only mounts are locked, so that no process in the guest can make them writable.
//!
//! Source: openat2(2), RESOLVE_NO_SYMLINKS; "locked" in mount_namespaces(7).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{
    CWD, FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstat, fstatvfs, openat2,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorContext, Result};
use crate::spec::{BindMount, GuestSpec};

/// In a bundle: the list of binds to mount.
const WISHES: &str = "wishes.json";

/// In a bundle: directory of their mount points, named by number.
const PLACES: &str = "wishes";

/// A bind as listed in the bundle for the shim. Its number is its index in the list.
#[derive(Debug, Serialize, Deserialize)]
struct BindRequest {
    source: PathBuf,
    writable: bool,
    directory: bool,
}

/// An opened bind.
pub(crate) struct OpenedBind {
    pub file: OwnedFd,
    pub writable: bool,
    /// Mount point in the bundle.
    pub mount_point: PathBuf,
}

/// Opens a path without following links. Also returns true if it is a directory.
fn open(source: &Path) -> io::Result<(OwnedFd, bool)> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = openat2(CWD, source, flags, Mode::empty(), resolve)?;
    match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::Directory => Ok((file, true)),
        FileType::RegularFile => Ok((file, false)),
        _ => Err(io::Error::other("neither a file nor a directory")),
    }
}

/// Checks that a path can be bound.
///
/// # Errors
/// Cause, and what a person can do about it.
pub fn check(source: &Path) -> std::result::Result<(), String> {
    open(source).map(drop).map_err(|error| words(source, &error))
}

fn words(source: &Path, error: &io::Error) -> String {
    let source = source.display();
    match error.raw_os_error() {
        Some(libc::ELOOP) => {
            format!(
                "bind of {source}: the path contains a symbolic link (use the path it leads to)"
            )
        }
        _ => format!("bind of {source}: {error}"),
    }
}

/// Opens a guest's bind. Also returns true if it is a directory.
fn open_for(id: &str, source: &Path) -> Result<(OwnedFd, bool)> {
    open(source).map_err(|error| Error::Spec { id: id.to_owned(), text: words(source, &error) })
}

/// Returns the mount point of a bind in the guest's bundle, by number.
pub(crate) fn mount_point(bundle: &Path, number: usize) -> PathBuf {
    bundle.join(PLACES).join(number.to_string())
}

/// Returns the binds of a guest's spec.
pub(crate) fn of(spec: &GuestSpec) -> impl Iterator<Item = &BindMount> {
    spec.binds.iter().filter(|bind| bind.wished)
}

/// Facts about a bind's path.
pub(crate) struct BindInfo {
    pub directory: bool,
    /// True if no program can be run from there.
    pub noexec: bool,
}

/// Makes the mount points of a guest's binds in its bundle, and writes their list.
pub(crate) fn prepare(spec: &GuestSpec, bundle: &Path) -> Result<Vec<BindInfo>> {
    let (mut wishes, mut all) = (Vec::new(), Vec::new());
    for bind in of(spec) {
        let (file, directory) = open_for(&spec.id, &bind.source)?;
        let flags = fstatvfs(&file).at("look at", &bind.source)?.f_flag;
        all.push(BindInfo { directory, noexec: flags.contains(StatVfsMountFlags::NOEXEC) });
        wishes.push(BindRequest {
            source: bind.source.clone(),
            writable: bind.writable,
            directory,
        });
    }
    if wishes.is_empty() {
        return Ok(all);
    }
    let places = bundle.join(PLACES);
    fs::create_dir(&places).at("make", &places)?;
    for (number, wish) in wishes.iter().enumerate() {
        let place = mount_point(bundle, number);
        match wish.directory {
            true => fs::create_dir(&place).at("make", &place)?,
            false => fs::write(&place, "").at("make", &place)?,
        }
    }
    let path = bundle.join(WISHES);
    let text = serde_json::to_vec(&wishes).map_err(io::Error::from).at("write", &path)?;
    fs::write(&path, text).at("write", &path)?;
    Ok(all)
}

/// Opens the paths of a bundle's binds as they are now.
pub(crate) fn opened(id: &str, bundle: &Path) -> Result<Vec<OpenedBind>> {
    let path = bundle.join(WISHES);
    let wishes: Vec<BindRequest> = match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map_err(io::Error::from).at("read", &path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).at("read", &path),
    };
    let mut all = Vec::new();
    for (number, wish) in wishes.into_iter().enumerate() {
        let (file, directory) = open_for(id, &wish.source)?;
        if directory != wish.directory {
            let text =
                format!("bind of {}: the path was replaced meanwhile", wish.source.display());
            return Err(Error::Spec { id: id.to_owned(), text });
        }
        all.push(OpenedBind {
            file,
            writable: wish.writable,
            mount_point: mount_point(bundle, number),
        });
    }
    Ok(all)
}
