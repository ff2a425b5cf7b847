//! Small repeatable steps on the machine, and calls to other processes.

pub mod bounds;
pub mod claim;
pub mod control;
pub mod query;
pub mod settings;
pub mod sockets;
pub mod upgrade;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use pdp_container::Process;
use pdp_spec::{Image, ImageSource};
use rustix::event::{Timespec, epoll};

use crate::host::control::ControlError;
use crate::intent::state::StateError;
use crate::util::error_chain;

/// Why a step on the machine failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A guest or helper failed.
    #[error(transparent)]
    Container(#[from] pdp_container::Error),
    /// An interface or TAP failed.
    #[error(transparent)]
    Net(#[from] pdp_net::Error),
    /// An AF_XDP socket can't be opened.
    #[error("AF_XDP socket on {device} queue {queue}")]
    Socket {
        /// The device.
        device: String,
        /// Receive queue of the device.
        queue: u32,
        /// The cause.
        source: pdp_afxdp::Error,
    },
    /// A device strips VLAN tags that belong to a vlink's frames.
    #[error(
        "{0} strips VLAN tags from received frames, and this can't be switched off (give attach: \
         packet)"
    )]
    Tags(String),
    /// A device that ports in the kernel can't use.
    #[error(
        "{0} lacks native XDP, or does not send redirected frames: links of kernel routers that \
         use it without the mux forward nothing; apply any change of their networks to move these \
         links to the mux"
    )]
    Redirects(String),
    /// No ports exist whose frames stay in the kernel.
    #[error("there are no kernel ports")]
    NoPorts,
    /// Too many clients observe frames.
    #[error("{of}: the limit of {most} {what} is reached")]
    Observed {
        /// Captures or traces.
        what: &'static str,
        /// The limit.
        most: u64,
        /// Owner to whom the limit applies.
        of: &'static str,
    },
    /// The machine's routes can't be followed.
    #[error("can't follow the machine's routes and neighbours")]
    Underlay(#[source] io::Error),
    /// A call to a process failed.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The state file can't be read or written.
    #[error(transparent)]
    State(#[from] StateError),
    /// A file or directory can't be used.
    #[error("{what} {path}")]
    Io {
        /// The attempted action.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The group does not exist on this machine.
    #[error("there is no group {0:?}; add it, or name another in memif.group")]
    NoGroup(String),
    /// The mux is needed and can't be started.
    #[error("the mux does not run")]
    NoMux,
    /// A process does not listen in time.
    #[error("{who} does not listen after {seconds} s; see its log")]
    NotReady {
        /// The process.
        who: String,
        /// Time that it had, seconds.
        seconds: u64,
    },
    /// Something does not end in time.
    #[error("waited {seconds} s for {what}; the daemon retries")]
    Stuck {
        /// Event for which pdpd waited.
        what: String,
        /// Time that it had, seconds.
        seconds: u64,
    },
    /// A process ended before it was ready.
    #[error("{who} ended {how} before it was ready; see its log")]
    Ended {
        /// The process.
        who: String,
        /// Exit code or signal.
        how: String,
    },
}

pub(crate) fn failed<'a>(
    what: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> HostError + 'a {
    move |source| HostError::Io { what, path: path.into(), source }
}

/// Lets only cgroups limit the memory of sockets, as far as this machine allows it.
pub fn leave_sockets_to_cgroups() {
    if let Err(error) = pdp_net::shared::raise_socket_memory() {
        tracing::warn!(
            "one guest's TCP and UDP sockets can use up the memory of all others': {}; set \
             net.ipv4.tcp_mem and net.ipv4.udp_mem to the machine's memory in pages",
            error_chain(&error)
        );
    }
}

/// Opens the network namespace of a running guest.
pub fn network_namespace(guest: Process) -> Result<OwnedFd, HostError> {
    let path = namespace(guest, "net");
    let opened = fs::File::open(&path).and_then(|netns| {
        // Check after opening. If another process had the id by then, this would show.
        guest.is_alive().then_some(netns).ok_or(rustix::io::Errno::SRCH.into())
    });
    Ok(opened.map_err(failed("can't open", &path))?.into())
}

/// Creates an epoll instance that waits for nothing yet.
pub fn epoll() -> Result<OwnedFd, HostError> {
    let made = epoll::create(epoll::CreateFlags::CLOEXEC);
    made.map_err(|errno| failed("can't make", Path::new("an epoll instance"))(errno.into()))
}

/// Adds a descriptor to the instance under the name `token`, until the descriptor is closed.
pub fn epoll_add(all: BorrowedFd<'_>, one: BorrowedFd<'_>, token: u64) -> Result<(), HostError> {
    let added = epoll::add(all, one, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
    added.map_err(|errno| failed("can't wait with", Path::new("an epoll instance"))(errno.into()))
}

/// Returns the tokens of readable descriptors, at most `count_max`.
pub fn epoll_ready(all: BorrowedFd<'_>, count_max: usize) -> BTreeSet<u64> {
    let mut events = Vec::with_capacity(count_max.max(1));
    let none = Timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = epoll::wait(all, rustix::buffer::spare_capacity(&mut events), Some(&none));
    events.iter().map(|event| event.data.u64()).collect()
}

/// Returns the path of a process's namespace.
pub fn namespace(process: Process, kind: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{}/ns/{kind}", process.pid))
}

/// Creates `path` and missing directories between it and `root`. They
/// belong to root, and everybody may traverse them.
pub fn make_passable(root: &Path, path: &Path) -> Result<(), HostError> {
    if path.starts_with(root) && path != root {
        make_passable(root, path.parent().unwrap_or(root))?;
    }
    match fs::create_dir(path) {
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(0o711))
            .map_err(failed("can't set the mode of", path)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(failed("can't make", path)(error)),
    }
}

/// Kernel setting: who gets huge pages in shared memory.
pub const SHARED_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Lets programs request huge pages in shared memory (`MADV_HUGEPAGE` on a
/// memfd), as forwarding guests do for the buffers of their rings. Linux's
/// default forbids it. Programs that do not request them are not affected.
///
/// The setting stays unchanged if the operator chose something other than
/// `never`, or if the kernel lacks it. `path` is [`SHARED_HUGE_PAGES`].
pub fn allow_huge_pages(path: &Path) {
    if fs::read_to_string(path).is_ok_and(|now| now.contains("[never]"))
        && let Err(error) = fs::write(path, "advise")
    {
        tracing::warn!(
            "forwarding guests get no huge pages, and many on a core are slower: {}: {error}; write \
             `advise` there",
            path.display()
        );
    }
}

/// Returns the id of a group, given by name or number.
pub fn group_id(group: &str) -> Result<u32, HostError> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let found = nix::unistd::Group::from_name(group)
        .map_err(|error| failed("can't find group", Path::new(group))(error.into()))?;
    match found {
        Some(found) => Ok(found.gid.as_raw()),
        None => Err(HostError::NoGroup(group.into())),
    }
}

/// Checks that an image exists.
pub fn find_image(image: &Image) -> Result<(), String> {
    match image.source() {
        ImageSource::Host => Ok(()),
        ImageSource::Rootfs(path) => match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => Ok(()),
            Ok(_) => Err(format!("rootfs {path} is not a directory")),
            Err(error) => Err(format!("rootfs {path}: {error}")),
        },
        // Found earlier ([`crate::images`]), or not needed for a dry run.
        ImageSource::Archive(..) | ImageSource::Pull(..) => Ok(()),
        ImageSource::OciLayout(path, reference) => {
            pdp_container::image::check(path.as_ref(), reference)
                .map_err(|error| error_chain(&error))
        }
    }
}

/// Largest file of pdpd's own that is compared with its intended content, bytes.
const OWN_BYTES_MAX: u64 = 16 << 20;

/// Returns the content of a file of pdpd's own, if it exists. Anything
/// else of that name is removed, since reading a pipe would never end.
pub fn read_own(path: &Path) -> Result<Option<Vec<u8>>, HostError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() && meta.len() <= OWN_BYTES_MAX => {
            fs::read(path).map(Some).map_err(failed("can't read", path))
        }
        Ok(_) => remove_directory(path).map(|()| None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("can't inspect", path)(error)),
    }
}

/// Replaces a file's content and mode in one step.
pub fn write_file(path: &Path, content: &[u8], mode: u32) -> Result<(), HostError> {
    let partial = path.with_extension("partial");
    fs::write(&partial, content)
        .and_then(|()| fs::set_permissions(&partial, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&partial, path))
        .map_err(failed("can't write", path))
}

/// Overwrites a file that guests have bound; everybody may read it. The file keeps its
/// inode. A concurrent reader sees a mixture of lines at worst, and never an empty
/// file. Excess length is cut off last, after it was overwritten with empty lines.
pub fn write_over(path: &Path, content: &[u8]) -> Result<(), HostError> {
    let before = match read_own(path)? {
        Some(before) if before == content => return Ok(()),
        Some(before) => before.len(),
        None => 0,
    };
    let mut padded = content.to_vec();
    padded.resize(content.len().max(before), b'\n');
    let options = fs::File::options().write(true).create(true).truncate(false).open(path);
    options
        .and_then(|file| {
            file.set_permissions(fs::Permissions::from_mode(0o644))?;
            file.write_all_at(&padded, 0)?;
            file.set_len(content.len() as u64)
        })
        .map_err(failed("can't write", path))
}

/// Removes a file if it exists.
pub fn remove_file(path: &Path) -> Result<(), HostError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed("can't remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Removes a directory and its content, if it exists.
pub fn remove_directory(path: &Path) -> Result<(), HostError> {
    Ok(pdp_container::safe_removal::remove(path)?)
}

/// Removes the content of a directory, if it exists, and keeps the directory.
pub fn clear_directory(path: &Path) -> Result<(), HostError> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed("can't read", path))?,
    };
    for entry in entries {
        remove_directory(&entry.map_err(failed("can't read", path))?.path())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;

    #[test]
    fn reused_pid_is_not_mistaken_for_the_guest() {
        let guest = Process::of(std::process::id()).unwrap();
        assert!(network_namespace(guest).is_ok());
        let ended = Process { start_time: guest.start_time + 1, ..guest };
        let error = error_chain(&network_namespace(ended).unwrap_err());
        assert!(error.contains("No such process"), "{error}");
    }

    #[test]
    fn huge_pages_setting_changes_only_from_never() {
        let setting = tempfile::NamedTempFile::new().unwrap();
        for (before, after) in [
            ("always within_size advise [never] deny force\n", "advise"),
            ("always within_size [advise] never deny force\n", ""),
            ("always within_size advise never [deny] force\n", ""),
            ("[always] within_size advise never deny force\n", ""),
        ] {
            fs::write(setting.path(), before).unwrap();
            allow_huge_pages(setting.path());
            let is = fs::read_to_string(setting.path()).unwrap();
            assert_eq!(is, if after.is_empty() { before } else { after });
        }
        let none = setting.path().with_extension("none");
        allow_huge_pages(&none);
        assert!(!none.exists());
    }

    #[test]
    fn overwritten_file_keeps_its_inode() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("hosts");
        write_over(&path, b"one\ntwo\nthree\n").unwrap();
        let mut file = fs::File::open(&path).unwrap();
        for content in ["one\n", "one\ntwo\nthree\nfour\n", ""] {
            write_over(&path, content.as_bytes()).unwrap();
            let mut text = String::new();
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, content);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        assert!(write_over(&place.path().join("none/hosts"), b"").is_err());
    }

    /// A pipe without a writer, a directory, and a far too large file.
    #[test]
    fn foreign_objects_at_own_file_paths_are_replaced() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        let damage: [&dyn Fn(); 4] = [
            &|| nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            &|| fs::create_dir_all(path.join("a/b")).unwrap(),
            &|| std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
            &|| fs::File::create(&path).unwrap().set_len(OWN_BYTES_MAX + 1).unwrap(),
        ];
        for damage in damage {
            damage();
            write_over(&path, b"one\n").unwrap();
            assert_eq!(read_own(&path).unwrap().as_deref(), Some(&b"one\n"[..]));
            fs::remove_file(&path).unwrap();
            damage();
            assert_eq!(read_own(&path).unwrap(), None);
            write_file(&path, b"two", 0o600).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"two");
            fs::remove_file(&path).unwrap();
        }
    }
}
