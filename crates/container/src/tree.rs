//! Removes directories whatever is in them.
//!
//! No recursion, and no path is walked: what is nested is first moved up, a level at a time, so that neither
//! depth nor length of names matters. Links are removed, never followed; what is mounted inside is
//! unmounted, not walked.
//!
//! Limit: [`ENTRIES_MAX`].

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::error::{Context, Result};

/// Entries that one call looks at; more is an error, and the next call goes on.
pub const ENTRIES_MAX: u64 = 10_000_000;

/// Directories in a directory that are noted at a time.
const NAMES_MAX: usize = 1024;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes what is at `path`, if there is anything: a file, a link, a mount (which is unmounted first), or a
/// directory with all that is in it. The directories above must be root's alone. Takes time for
/// each entry, and for nothing else.
pub fn remove(path: &Path) -> Result<()> {
    let done = Removal { top: path, moved: 0, looked_at: 0 }.run();
    done.at("remove", path)
}

struct Removal<'a> {
    top: &'a Path,
    /// Directories that were moved up: the next one's name.
    moved: u64,
    looked_at: u64,
}

impl Removal<'_> {
    fn run(&mut self) -> io::Result<()> {
        match rustix::fs::lstat(self.top) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {}
            Ok(_) => return Ok(rustix::fs::unlink(self.top)?),
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        while is_mounted(self.top)? {
            unmount(self.top, DETACH)?;
        }
        let top = rustix::fs::open(self.top, DIRECTORY, Mode::empty())?;
        loop {
            let nested = self.clear(top.as_fd(), self.top, None)?;
            if nested.is_empty() {
                break;
            }
            for name in nested {
                let path = self.top.join(OsStr::from_bytes(name.as_bytes()));
                let directory = match rustix::fs::openat(&top, &name, DIRECTORY, Mode::empty()) {
                    Ok(directory) => directory,
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error.into()),
                };
                // Not all of it was noted if there was much: then it has its turn again.
                self.clear(directory.as_fd(), &path, Some(top.as_fd()))?;
                match rustix::fs::unlinkat(&top, &name, AtFlags::REMOVEDIR) {
                    Err(Errno::BUSY) => unmount(&path, DETACH)?,
                    Ok(()) | Err(Errno::NOTEMPTY | Errno::NOENT) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        match rustix::fs::rmdir(self.top) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the files of a directory, and moves the directories in it up, if somewhere is given.
    /// Returns the names of those that it left, or some of them.
    fn clear(
        &mut self,
        directory: BorrowedFd<'_>,
        path: &Path,
        up: Option<BorrowedFd<'_>>,
    ) -> io::Result<Vec<CString>> {
        let mut left = Vec::new();
        let mut entries = Dir::read_from(directory)?;
        while let Some(entry) = entries.read().transpose()? {
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            self.looked_at += 1;
            if self.looked_at > ENTRIES_MAX {
                return Err(io::Error::other(format!("more than {ENTRIES_MAX} entries")));
            }
            let result = match (kind(directory, &entry)?, up) {
                (FileType::Directory, None) => {
                    left.push(name.to_owned());
                    if left.len() == NAMES_MAX {
                        return Ok(left);
                    }
                    continue;
                }
                (FileType::Directory, Some(up)) => self.move_up(directory, name, up),
                _ => rustix::fs::unlinkat(directory, name, AtFlags::empty()),
            };
            match result {
                // Of a mount.
                Err(Errno::BUSY) => {
                    unmount(path.join(OsStr::from_bytes(name.to_bytes())), DETACH)?;
                }
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(left)
    }

    fn move_up(
        &mut self,
        from: BorrowedFd<'_>,
        name: &std::ffi::CStr,
        up: BorrowedFd<'_>,
    ) -> rustix::io::Result<()> {
        loop {
            self.moved += 1;
            let to = format!(".removed-{}", self.moved);
            match rustix::fs::renameat_with(from, name, up, to, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                result => return result,
            }
        }
    }
}

const DETACH: UnmountFlags = UnmountFlags::DETACH.union(UnmountFlags::NOFOLLOW);

fn kind(directory: BorrowedFd<'_>, entry: &rustix::fs::DirEntry) -> rustix::io::Result<FileType> {
    match entry.file_type() {
        FileType::Unknown => {
            let name = entry.file_name();
            let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
            Ok(FileType::from_raw_mode(stat.st_mode))
        }
        known => Ok(known),
    }
}

/// Whether a file system of its own is mounted at a directory.
pub fn is_mounted(directory: &Path) -> io::Result<bool> {
    let Some(above) = directory.parent() else { return Ok(true) };
    let stat = rustix::fs::statat(CWD, directory, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(stat.st_dev != rustix::fs::stat(above)?.st_dev)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_not_there_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        remove(&dir.path().join("none")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        remove(&dir.path().join("file")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// Deeper than any stack, any path and any limit of descriptors.
    #[test]
    fn a_hundred_thousand_levels_are_removed_by_a_small_stack() {
        // Where directories are in memory: a disk takes minutes.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let top = dir.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut inner = rustix::fs::open(&top, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..100_000 {
            rustix::fs::mkdirat(&inner, "d", Mode::RWXU).unwrap();
            inner = rustix::fs::openat(&inner, "d", DIRECTORY, Mode::empty()).unwrap();
        }
        drop(inner);
        let small = std::thread::Builder::new().stack_size(128 << 10);
        small.spawn(move || remove(&top)).unwrap().join().unwrap().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn links_are_not_followed_and_names_are_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let (top, kept) = (dir.path().join("top"), dir.path().join("kept"));
        fs::create_dir_all(top.join("a/b/.removed-1/.removed-2")).unwrap();
        fs::create_dir_all(top.join(".removed-1/c")).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "kept").unwrap();
        symlink(&kept, top.join("link")).unwrap();
        symlink(&kept, top.join("a/b/link")).unwrap();
        for number in 0..3000 {
            fs::create_dir(top.join(format!("a/b/d{number}"))).unwrap();
            fs::write(top.join(format!("a/f{number}")), "").unwrap();
        }
        remove(&top).unwrap();
        assert!(!top.exists() && kept.join("file").exists());
    }
}
