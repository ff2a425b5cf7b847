//! Puts a layer's files into the directory of an image.
//!
//! No other process writes into the directory meanwhile. Links are resolved as in a guest: within
//! the directory, whatever their target.
//!
//! Source: OCI image specification 1.1, layer.md (whiteouts; entries below a link of a lower
//! layer).

use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use tar::{Archive, EntryType};

use super::{IDS, OPAQUE, UnpackBudget, WHITEOUT, invalid};
use crate::safe_removal;

/// Largest number of attempts to resolve a link. The kernel fails with EAGAIN while any process on
/// the machine renames a file.
const RESOLVES_MAX: usize = 10_000;

/// Unpacks a tar into the directory of an image.
pub(super) fn apply(tar: impl Read, root: &Path, left: &mut UnpackBudget) -> io::Result<()> {
    let mut archive = Archive::new(tar);
    archive.set_preserve_permissions(true);
    archive.set_overwrite(true);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        let path = entry.path()?.into_owned();
        let Some(path) = relative(&path) else { continue };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { continue };
        left.take(entry.size())?;
        if kind == EntryType::XGlobalHeader {
            // A comment of git-archive(1).
            continue;
        }
        let Some(parent) = directory(root, parent, Some(left))? else {
            return Err(no_directory(&path));
        };
        let name = name.as_bytes();
        if name == OPAQUE {
            for old in fs::read_dir(&parent)? {
                remove(&old?.path())?;
            }
            continue;
        }
        if let Some(gone) = name.strip_prefix(WHITEOUT) {
            if !matches!(gone, b"" | b"." | b"..") {
                remove(&parent.join(std::ffi::OsStr::from_bytes(gone)))?;
            }
            continue;
        }
        if matches!(kind, EntryType::Char | EntryType::Block | EntryType::Fifo) {
            continue;
        }
        let place = parent.join(std::ffi::OsStr::from_bytes(name));
        if kind == EntryType::Link {
            let target = entry.link_name()?.unwrap_or_default().into_owned();
            link(root, &target, &place).map_err(|error| {
                invalid(format!("{}: hard link to {}: {error}", path.display(), target.display()))
            })?;
            continue;
        }
        let both_dirs = kind.is_dir() && place.symlink_metadata().is_ok_and(|meta| meta.is_dir());
        if !both_dirs {
            remove(&place)?;
        }
        // No part of the path is a link, so the entry goes exactly there. An unpacked link is not
        // followed.
        entry.unpack(&place).map_err(|error| cause(&path, error))?;
        let id = |id: u64| if id < IDS { id as u32 } else { 0 };
        let (uid, gid) = (id(entry.header().uid()?), id(entry.header().gid()?));
        lchown(&place, Some(uid), Some(gid))?;
        let meta = place.symlink_metadata()?;
        if meta.is_file() {
            // Set-user-ID is useless in a guest, and would be root's on the machine.
            let mode = meta.permissions().mode() & 0o1777;
            fs::set_permissions(&place, Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

/// Adds the underlying cause to an error, which the library's text lacks.
fn cause(path: &Path, error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.source());
    let causes = std::iter::successors(inner, |cause| cause.source()).map(ToString::to_string);
    match causes.last() {
        Some(cause) => invalid(format!("{}: {cause}", path.display())),
        None => invalid(format!("{}: {error}", path.display())),
    }
}

fn no_directory(path: &Path) -> io::Error {
    let path = path.display();
    invalid(format!("{path}: a parent is a file, or a link to a missing path"))
}

/// Makes a hard link to a file of the image.
fn link(root: &Path, target: &Path, place: &Path) -> io::Result<()> {
    let outside = || invalid("leads out of the image".to_owned());
    let target = relative(target).ok_or_else(outside)?;
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
        return Err(outside());
    };
    let parent = directory(root, parent, None)?;
    let from = parent.ok_or_else(|| invalid("no such file".to_owned()))?.join(name);
    if from == *place {
        return Err(invalid("it is the same path".to_owned()));
    }
    remove(place)?;
    // If the target is a symbolic link, this links to the symbolic link itself.
    fs::hard_link(from, place)
}

/// Returns the path below the root; `None` for the root itself and for paths with `..`.
fn relative(path: &Path) -> Option<PathBuf> {
    let mut below = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => below.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (!below.as_os_str().is_empty()).then_some(below)
}

/// Returns the real path of the directory at `path` below the root, without links in it. Makes
/// missing directories, unless `make` is `None`. Makes nothing for a link without an existing
/// target. Returns `None` if there is no directory.
pub(super) fn directory(
    root: &Path,
    path: &Path,
    mut make: Option<&mut UnpackBudget>,
) -> io::Result<Option<PathBuf>> {
    let mut dir = root.to_owned();
    for component in path.components() {
        let next = dir.join(component);
        dir = match next.symlink_metadata() {
            Ok(meta) if meta.is_dir() => next,
            Ok(meta) if meta.is_symlink() => match resolve(root, &next)? {
                Some(end) => end,
                None => return Ok(None),
            },
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let Some(left) = &mut make else { return Ok(None) };
                left.take(0)?;
                fs::create_dir(&next)?;
                fs::set_permissions(&next, Permissions::from_mode(0o755))?;
                next
            }
            Err(error) => return Err(error),
        };
    }
    Ok(Some(dir))
}

/// Returns the directory that a link leads to, if it is below the root. The kernel enforces that.
fn resolve(root: &Path, link: &Path) -> io::Result<Option<PathBuf>> {
    let Ok(below) = link.strip_prefix(root) else { return Ok(None) };
    let top = File::open(root)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let end = (0..RESOLVES_MAX)
        .map(|_| openat2(&top, below, flags, Mode::empty(), inside))
        .find(|end| !matches!(end, Err(Errno::AGAIN | Errno::INTR)));
    let end = match end {
        Some(Ok(end)) => end,
        None => return Err(Errno::AGAIN.into()),
        // The target is missing, no directory, or a loop of links.
        Some(Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG)) => {
            return Ok(None);
        }
        Some(Err(error)) => return Err(error.into()),
    };
    let [top, end] = [top.as_fd(), end.as_fd()]
        .map(|fd| fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())));
    match end?.strip_prefix(top?) {
        Ok(below) => Ok(Some(root.join(below))),
        Err(_) => Err(invalid("a link leads out of the image".to_owned())),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(meta) if meta.is_dir() => safe_removal::remove(path).map_err(io::Error::other),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}
