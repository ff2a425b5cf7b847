//! Log files that don't grow without bound.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Mode of a log: its owner's alone to read, since what tenants' programs write is in it.
const MODE: u32 = 0o600;

/// Appends to a file. Where that would grow beyond its bound, it becomes `NAME.1`, in place of the
/// one before, and a new one begins. What is written at once stays together in one file, and may
/// exceed the bound if it is longer by itself.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    /// `None` after a new one could not be made; tried again at the next write.
    file: Option<File>,
    size: u64,
    bytes_max: u64,
}

impl LogFile {
    /// Goes on with the file at `path`, or makes it.
    pub fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let mut log = Self { path: path.to_owned(), file: None, size: 0, bytes_max };
        log.reopen()?;
        Ok(log)
    }

    /// Where what was before the file at `path` is.
    pub fn older(path: &Path) -> PathBuf {
        let mut older = path.to_owned().into_os_string();
        older.push(".1");
        older.into()
    }

    fn reopen(&mut self) -> io::Result<&mut File> {
        let file = OpenOptions::new().create(true).append(true).mode(MODE).open(&self.path)?;
        // An older version made it for everybody to read.
        file.set_permissions(Permissions::from_mode(MODE))?;
        self.size = file.metadata()?.len();
        Ok(self.file.insert(file))
    }
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.size > 0 && self.size + bytes.len() as u64 > self.bytes_max {
            self.file = None;
            match std::fs::rename(&self.path, Self::older(&self.path)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let file = match &mut self.file {
            Some(file) => file,
            None => self.reopen()?,
        };
        file.write_all(bytes)?;
        self.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
