//! Log files of bounded size.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Mode of a log. Only the owner may read it, since it has output of tenants' programs.
const MODE: u32 = 0o600;

/// Appends to a file. If the file would exceed its limit, it is renamed to `NAME.1`, replacing the
/// previous one, and a new file begins. Bytes of one write stay together in one file. A longer
/// write may exceed the limit.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    /// `None` if a new file could not be made. The next write tries again.
    file: Option<File>,
    size: u64,
    bytes_max: u64,
}

impl LogFile {
    /// Opens the file at `path`, or makes it.
    pub fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let mut log = Self { path: path.to_owned(), file: None, size: 0, bytes_max };
        log.reopen()?;
        Ok(log)
    }

    /// Returns the path of the previous log of `path`.
    pub fn older(path: &Path) -> PathBuf {
        let mut older = path.to_owned().into_os_string();
        older.push(".1");
        older.into()
    }

    fn reopen(&mut self) -> io::Result<&mut File> {
        let file = OpenOptions::new().create(true).append(true).mode(MODE).open(&self.path)?;
        // An older version made it readable for everybody.
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
