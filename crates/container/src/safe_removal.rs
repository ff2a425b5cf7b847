//! Removes directories with any content.
//!
//! It neither recurses nor follows paths. Nested directories are first moved up, one level at a
//! time, so that depth and length of names do not matter. Links are removed, never followed. Mounts
//! are not crossed: the kernel refuses to open a directory on another mount (`RESOLVE_NO_XDEV`).
//! Mounts anywhere inside, on directories or on files, are unmounted.
//!
//! Limit: [`ENTRIES_MAX`].

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::error::{ErrorContext, Result};

/// Largest number of entries that one call processes. With more entries the call fails, and the
/// next call removes the rest.
pub const ENTRIES_MAX: u64 = 10_000_000;

/// Largest number of directories noted at a time in one directory.
const NAMES_MAX: usize = 1024;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes whatever is at `path`: nothing, a file, a link, a mount (unmounted first), or a
/// directory with all its content. Only root may be able to write in the directories above. The
/// time depends only on the number of entries.
pub fn remove(path: &Path) -> Result<()> {
    let done = TreeRemoval { top: path, moved: 0, looked_at: 0 }.run();
    done.at("remove", path)
}

struct TreeRemoval<'a> {
    top: &'a Path,
    /// Number of directories moved up, for the name of the next one.
    moved: u64,
    looked_at: u64,
}

impl TreeRemoval<'_> {
    fn run(&mut self) -> io::Result<()> {
        let above = match self.top.parent() {
            Some(above) if above.as_os_str().is_empty() => Path::new("."),
            Some(above) => above,
            None => return Err(io::Error::other("the root directory is not removed")),
        };
        let above = match rustix::fs::open(above, DIRECTORY, Mode::empty()) {
            Ok(above) => above,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let name = self.top.file_name().unwrap_or_default();
        let top = match self.enter(above.as_fd(), name, self.top) {
            Ok(top) => top,
            Err(Errno::NOENT) => return Ok(()),
            // A file or a link. Mounts on it have been unmounted.
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(rustix::fs::unlink(self.top)?),
            Err(error) => return Err(error.into()),
        };
        loop {
            let nested = self.clear(top.as_fd(), self.top, None)?;
            if nested.is_empty() {
                break;
            }
            for name in nested {
                let path = self.top.join(OsStr::from_bytes(name.as_bytes()));
                let directory = match self.enter(top.as_fd(), &name, &path) {
                    Ok(directory) => directory,
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error.into()),
                };
                // A large directory is only partly noted. It is processed again in the next round.
                self.clear(directory.as_fd(), &path, Some(top.as_fd()))?;
                match rustix::fs::unlinkat(&top, &name, AtFlags::REMOVEDIR) {
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

    /// Opens a directory once nothing is mounted on it. `path` also leads to it. Unmounts files as
    /// well, and returns the error of opening them.
    fn enter(
        &mut self,
        above: BorrowedFd<'_>,
        name: impl rustix::path::Arg + Copy,
        path: &Path,
    ) -> rustix::io::Result<OwnedFd> {
        loop {
            // Each mount on a mount counts as one entry.
            self.looked_at += 1;
            match open_here(above, name, DIRECTORY) {
                Err(Errno::XDEV) if self.looked_at <= ENTRIES_MAX => unmount(path, DETACH)?,
                opened => return opened,
            }
        }
    }

    /// Removes the files of a directory. With `up`, moves its directories there. Returns the names
    /// of directories that it left, or some of them.
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
            let kind = match kind(directory, &entry) {
                Err(Errno::NOENT) => continue,
                kind => kind?,
            };
            if kind == FileType::Directory && up.is_none() {
                left.push(name.to_owned());
                if left.len() == NAMES_MAX {
                    return Ok(left);
                }
                continue;
            }
            loop {
                let result = match up {
                    Some(up) if kind == FileType::Directory => self.move_up(directory, name, up),
                    _ => rustix::fs::unlinkat(directory, name, AtFlags::empty()),
                };
                match result {
                    // Something is mounted on it.
                    Err(Errno::BUSY) => {
                        unmount(path.join(OsStr::from_bytes(name.to_bytes())), DETACH)?;
                    }
                    Ok(()) | Err(Errno::NOENT) => break,
                    Err(error) => return Err(error.into()),
                }
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

/// Opens an entry of a directory that is on the same mount. Returns `XDEV` if something is mounted
/// there.
fn open_here(
    directory: BorrowedFd<'_>,
    name: impl rustix::path::Arg,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve)
}

/// True if something is mounted at a directory: another file system, or another part of the same
/// one.
pub fn is_mounted(directory: &Path) -> io::Result<bool> {
    let (Some(above), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Ok(true);
    };
    let above = rustix::fs::openat(CWD, above, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    match open_here(above.as_fd(), name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC) {
        Err(Errno::XDEV) => Ok(true),
        opened => Ok(opened.map(|_| false)?),
    }
}

/// Returns all mount points that this process sees, in the order in which they were mounted.
pub fn mounts() -> Result<Vec<PathBuf>> {
    let table = Path::new("/proc/thread-self/mountinfo");
    let text = std::fs::read(table).at("read", table)?;
    let places = text.split(|byte| *byte == b'\n').filter_map(|line| {
        // `ID PARENT DEVICE ROOT PLACE …`, with blanks and the like written as `\040`.
        let place = line.split(|byte| *byte == b' ').nth(4)?;
        Some(PathBuf::from(OsStr::from_bytes(&unescaped(place))))
    });
    Ok(places.collect())
}

fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let number = match (first, after) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..]) => {
                Some((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'))
            }
            _ => None,
        };
        plain.push(number.unwrap_or(*first));
        rest = if number.is_some() { &after[3..] } else { after };
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn removing_a_missing_path_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        remove(&dir.path().join("none")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        remove(&dir.path().join("file")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// Deeper than any stack, any path and any limit of descriptors permits.
    #[test]
    fn removes_hundred_thousand_levels_with_a_small_stack() {
        // In memory: a disk would take minutes.
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
    fn removal_follows_no_links_and_tolerates_name_clashes() {
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

    fn mount_at(source: &str, path: &Path, kind: Option<&str>) {
        let flags = match kind {
            Some(_) => rustix::mount::MountFlags::empty(),
            None => rustix::mount::MountFlags::BIND,
        };
        rustix::mount::mount(source, path, kind.unwrap_or_default(), flags, None).unwrap();
    }

    /// Runs a test in a mount namespace of its own thread, invisible to the machine.
    fn in_private_mounts(test: impl FnOnce(&Path) + Send + 'static) {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let run = move || {
            use rustix::mount::{MountPropagationFlags, mount_change};
            // SAFETY: descriptors are not unshared, and no other thread shares the namespace: this
            // thread ends with the test.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            mount_change("/", private).unwrap();
            let dir = tempfile::tempdir_in("/dev/shm").unwrap();
            test(dir.path());
        };
        std::thread::spawn(run).join().unwrap();
    }

    /// The directory of memif sockets is such a mount, and its guest writes in it.
    #[test]
    fn unmounts_nested_mounts_below_the_top() {
        in_private_mounts(|dir| {
            let (top, kept) = (dir.join("top"), dir.join("kept"));
            fs::create_dir_all(kept.join("a/b")).unwrap();
            fs::write(kept.join("a/b/file"), "kept").unwrap();
            // Mounts of other file systems at each depth, with directories, and mounts on them and
            // in them.
            for place in ["memif", "a/b/memif", "a/memif"] {
                let place = top.join(place);
                fs::create_dir_all(&place).unwrap();
                fs::write(place.join("under"), "").unwrap();
                for _ in 0..3 {
                    mount_at("t", &place, Some("tmpfs"));
                    fs::create_dir_all(place.join("d/e/f")).unwrap();
                    fs::write(place.join("d/file"), "").unwrap();
                    mount_at("t", &place.join("d/e"), Some("tmpfs"));
                    fs::create_dir_all(place.join("d/e/deep/deeper")).unwrap();
                }
            }
            // Mounts of the same file system, whose files must stay untouched; on directories and
            // on files.
            for place in ["bind", "x/bind", "x/y/z/bind"] {
                let place = top.join(place);
                fs::create_dir_all(&place).unwrap();
                mount_at(kept.to_str().unwrap(), &place, None);
                let file = place.with_file_name("file");
                fs::write(&file, "").unwrap();
                mount_at(kept.join("a/b/file").to_str().unwrap(), &file, None);
            }
            remove(&top).unwrap();
            assert!(!top.exists());
            assert_eq!(fs::read_to_string(kept.join("a/b/file")).unwrap(), "kept");
            let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
            assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
        });
    }

    #[test]
    fn unmounts_a_top_of_any_type() {
        in_private_mounts(|dir| {
            let (top, kept) = (dir.join("top"), dir.join("kept"));
            fs::create_dir(&kept).unwrap();
            fs::write(kept.join("file"), "kept").unwrap();
            fs::create_dir(&top).unwrap();
            assert!(!is_mounted(&top).unwrap());
            mount_at(kept.to_str().unwrap(), &top, None);
            assert!(is_mounted(&top).unwrap(), "the same file system");
            mount_at("t", &top, Some("tmpfs"));
            assert!(is_mounted(&top).unwrap());
            remove(&top).unwrap();
            assert!(!top.exists());
            fs::write(&top, "").unwrap();
            mount_at(kept.join("file").to_str().unwrap(), &top, None);
            remove(&top).unwrap();
            assert!(!top.exists());
            fs::create_dir(&top).unwrap();
            fs::write(top.join("alone"), "").unwrap();
            for _ in 0..2 {
                mount_at(kept.join("file").to_str().unwrap(), &top.join("alone"), None);
            }
            remove(&top).unwrap();
            assert!(!top.exists());
            symlink(&kept, &top).unwrap();
            remove(&top).unwrap();
            assert!(!top.is_symlink());
            assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "kept");
        });
    }

    #[test]
    fn finds_mounts_with_blanks_in_their_names() {
        in_private_mounts(|dir| {
            let places = [dir.join("a b\\c\td"), dir.join("a b\\c\td/inner"), dir.join("a")];
            for place in &places {
                fs::create_dir(place).unwrap();
                mount_at("t", place, Some("tmpfs"));
            }
            let mut mounts = mounts().unwrap();
            mounts.retain(|mount| mount.starts_with(dir));
            assert_eq!(mounts, places);
        });
    }
}
