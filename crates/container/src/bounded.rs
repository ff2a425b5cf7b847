//! Files of root's with a size limit. Writing and reading have the same limit, so that every
//! written file can be read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::safe_removal;

/// Files with a size limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounded {
    pub bytes_max: u64,
}

impl Bounded {
    /// Reads what [`Bounded::write`] wrote; `None` if there is no file. Refuses links, devices,
    /// pipes without a writer, and files of other users.
    pub fn read<T: DeserializeOwned>(self, path: &Path) -> io::Result<Option<T>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            file => file?,
        };
        let stat = rustix::fs::fstat(&file)?;
        let own = stat.st_uid == rustix::process::geteuid().as_raw();
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !own {
            return Err(io::Error::other("not a file of root"));
        }
        let bytes = self.read_from(File::from(file))?;
        Ok(Some(serde_json::from_slice(&bytes)?))
    }

    /// Reads a file to its end.
    pub fn read_from(self, file: File) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        file.take(self.bytes_max + 1).read_to_end(&mut bytes)?;
        self.check(bytes.len())?;
        Ok(bytes)
    }

    /// Replaces whatever is at `path` by a file, atomically even if the machine stops. Changes
    /// nothing if the file would be too large to read.
    pub fn write<T: Serialize>(self, path: &Path, value: &T) -> io::Result<()> {
        let bytes = serde_json::to_vec(value)?;
        self.check(bytes.len())?;
        let part = part(path);
        // Removing it first keeps a symbolic link from being followed.
        safe_removal::remove(&part).map_err(io::Error::other)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            safe_removal::remove(path).map_err(io::Error::other)?;
        }
        fs::rename(&part, path)
    }

    fn check(self, bytes: usize) -> io::Result<()> {
        match bytes as u64 > self.bytes_max {
            true => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("more than {} bytes", self.bytes_max),
            )),
            false => Ok(()),
        }
    }
}

/// Path of the temporary file for `path`.
pub(crate) fn part(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.part"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Holds for any content of any size.
        #[test]
        fn reads_back_written_content(
            words in proptest::collection::vec(any::<String>(), 0..40), bytes_max in 0u64..800,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            let bounded = Bounded { bytes_max };
            let before = bounded.write(&path, &1).is_ok().then(|| "1".to_owned());
            match bounded.write(&path, &words) {
                Ok(()) => prop_assert_eq!(bounded.read::<Vec<String>>(&path).unwrap(), Some(words)),
                Err(_) => {
                    prop_assert!(serde_json::to_vec(&words).unwrap().len() as u64 > bytes_max);
                    prop_assert_eq!(fs::read_to_string(&path).ok(), before, "as it was");
                }
            }
        }
    }

    #[test]
    fn damaged_files_fail_to_read_and_get_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let (bounded, kept) = (Bounded { bytes_max: 100 }, dir.path().join("kept"));
        fs::write(&kept, "1").unwrap();
        let damage: [&dyn Fn(); 5] = [
            &|| fs::write(&path, "{").unwrap(),
            &|| fs::write(&path, [0xff; 50]).unwrap(),
            &|| fs::write(&path, vec![b' '; 1000]).unwrap(),
            &|| fs::create_dir_all(path.join("a/b")).unwrap(),
            &|| std::os::unix::fs::symlink(&kept, &path).unwrap(),
        ];
        for damage in damage {
            damage();
            assert!(bounded.read::<u32>(&path).is_err());
            bounded.write(&path, &7).unwrap();
            assert_eq!(bounded.read::<u32>(&path).unwrap(), Some(7));
            fs::remove_file(&path).unwrap();
        }
        assert_eq!(fs::read_to_string(&kept).unwrap(), "1");
        assert_eq!(bounded.read::<u32>(&path).unwrap(), None);
    }
}
