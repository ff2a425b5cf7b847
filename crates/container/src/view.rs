//! Mounts that show a guest's files to its container. They are made before the OCI runtime makes
//! the container, in a mount namespace of the OCI runtime's own, so that the kernel locks them. A
//! mount that a container inherits from a namespace with more rights stays read-only whatever the
//! guest does, `privileged` or not. When processes die, nothing stays mounted on the machine.
//!
//! All guests share one copy of an image, owned by root. Each guest sees it through its own user
//! ids (an idmapped mount).
//!
//! The first user id of the guest makes the guest's user namespace, also in this module. The kernel
//! counts some resources by user: inotify instances, queued signals, message queues, locked memory.
//! It charges them to the maker of the namespace as well. If that were the machine's root, root
//! would run out of them.
//!
//! Source: mount_setattr(2), user_namespaces(7); "locked" in mount_namespaces(7); kernel/ucount.c.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change,
    move_mount, open_tree,
};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions};

use crate::binds;
use crate::error::{Error, ErrorContext, Result};
use crate::image;
use crate::spec::{UserRange, bundle};
use crate::volumes;

/// In a bundle: the guest's root. It is a mount point, except for [`crate::RootFilesystem::Host`].
pub(crate) const ROOT: &str = "root";

/// In a bundle: files to show in the guest.
pub(crate) const FILES: &str = "files";

/// In a bundle of a guest that may write everywhere: the mount points of its image and of the
/// memory with its changes. The guest's root is the second over the first (overlay).
pub(crate) const LOWER: &str = "lower";
pub(crate) const CHANGES: &str = "changes";

/// In a bundle: file with the size of that memory, bytes. It exists only if there is such memory.
pub(crate) const CHANGES_BYTES: &str = "changes-bytes";

/// Largest number of files and directories that a guest may change or make.
const CHANGES_FILES_MAX: u64 = 65_536;

/// In a bundle: a link to the directory that is the guest's root.
pub(crate) const ROOTFS: &str = "rootfs";

/// In a bundle: mount point of the guest's user namespace, for the OCI runtime.
pub(crate) const USERS: &str = "users";

/// Limit of inotify instances in a user namespace.
const INOTIFY_INSTANCES: &str = "/proc/sys/user/max_inotify_instances";

/// Limit of inotify instances of each user of a guest. The kernel also counts those of all guests
/// of a vnet at the vnet's first user id. Its default limit there is lower.
pub const INOTIFY_INSTANCES_MAX: u32 = 128;

/// Mounts to make for one guest.
pub(crate) struct GuestMounts {
    mounts: Vec<(OwnedFd, PathBuf)>,
    changes: Option<ImageOverlay>,
}

/// Memory for a guest's changes of its image.
struct ImageOverlay {
    bundle: PathBuf,
    /// Mount options of the memory file system.
    options: CString,
    /// Host user id of the guest's root.
    user: u32,
}

impl GuestMounts {
    /// Prepares the mounts of the bundle in a guest's directory. Changes nothing on the machine.
    pub fn prepare(id: &str, dir: &Path, users: UserRange) -> Result<Self> {
        let bundle = bundle(dir);
        let (root, files) = (bundle.join(ROOT), bundle.join(FILES));
        let base = users.base;
        let users = user_namespace(users).at("make a user namespace for", dir)?;
        let shown =
            match (fs::read_link(bundle.join(image::LINK)), fs::read_link(bundle.join(ROOTFS))) {
                (Ok(image), _) => {
                    detach(&image, Some(&users)).map_err(|error| no_ids(&image, error))?
                }
                (_, Ok(rootfs)) => detach(&rootfs, None).at("show", &rootfs)?,
                _ => detach(&root, None).at("show", &root)?,
            };
        let own = detach(&files, None).at("show", &files)?;
        let namespace = PathBuf::from(format!("/proc/self/fd/{}", users.as_raw_fd()));
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let mut volumes = volumes::opened(&bundle)?;
        for (volume, place) in &volumes {
            show_volume(volume, &users).at("show for", place)?;
        }
        let users = open_tree(CWD, &namespace, clone).map_err(io::Error::from);
        let users = users.at("hold the user namespace of", dir)?;
        let changes = match fs::read_to_string(bundle.join(CHANGES_BYTES)) {
            Ok(bytes) => Some(ImageOverlay {
                options: CString::new(format!(
                    "mode=711,size={bytes},nr_inodes={CHANGES_FILES_MAX}"
                ))
                .map_err(io::Error::from)
                .at("mount in memory for", dir)?,
                user: base,
                bundle: bundle.clone(),
            }),
            Err(_) => None,
        };
        let place = if changes.is_some() { bundle.join(LOWER) } else { root };
        let mut mounts = vec![(own, files), (shown, place), (users, bundle.join(USERS))];
        mounts.append(&mut volumes);
        for binds::OpenedBind { file, writable, mount_point: place } in binds::opened(id, &bundle)?
        {
            mounts.push((detach_opened(&file, writable).at("show for", &place)?, place));
        }
        Ok(Self { mounts, changes })
    }

    /// Moves this process into a mount namespace of its own, with all mounts in place. The process
    /// then becomes the OCI runtime.
    pub fn enter(&self) -> io::Result<()> {
        // SAFETY: takes no pointer, and the calling process has one thread.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // The machine's unmounts propagate to this namespace; nothing propagates back.
        mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
        for (mount, place) in &self.mounts {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            move_mount(mount, "", CWD, place, flags)?;
        }
        self.changes.as_ref().map_or(Ok(()), ImageOverlay::mount)
    }
}

impl ImageOverlay {
    /// Mounts memory over the image (overlay). The kernel charges it to the guest that writes to
    /// it.
    fn mount(&self) -> io::Result<()> {
        let memory = self.bundle.join(CHANGES);
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", &memory, "tmpfs", flags, Some(&*self.options))?;
        let (upper, work) = (memory.join("upper"), memory.join("work"));
        for dir in [&upper, &work] {
            fs::create_dir(dir)?;
        }
        fs::set_permissions(&upper, fs::Permissions::from_mode(0o755))?;
        chown(&upper, Some(self.user), Some(self.user))?;
        // Relative paths, so that no name in the bundle's path is taken for an option.
        std::env::set_current_dir(&self.bundle)?;
        let layers = c"lowerdir=lower,upperdir=changes/upper,workdir=changes/work";
        // Keeps the image's own ids from Linux 5.19 on.
        mount("overlay", ROOT, "overlay", flags, Some(layers))?;
        std::env::set_current_dir("/")
    }
}

/// Returns a read-only, unattached mount of `path`. With `users`, its owners' ids are those inside
/// that namespace.
fn detach(path: &Path, users: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let mut at = libc::AT_EMPTY_PATH;
    let mut attributes = attributes(false);
    match users {
        Some(users) => {
            attributes.attr_set |= libc::MOUNT_ATTR_IDMAP;
            attributes.userns_fd = users.as_raw_fd() as u64;
        }
        None => {
            // Include mounts below it.
            flags |= OpenTreeFlags::AT_RECURSIVE;
            at |= libc::AT_RECURSIVE;
        }
    }
    let mount = open_tree(CWD, path, flags)?;
    set_attributes(&mount, at, &attributes)?;
    Ok(mount)
}

/// Returns an unattached mount of an open file or directory, without mounts below it.
fn detach_opened(file: &OwnedFd, writable: bool) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let mount = open_tree(file, "", flags)?;
    set_attributes(&mount, libc::AT_EMPTY_PATH, &attributes(writable))?;
    Ok(mount)
}

/// Maps the owners' ids in a volume to those inside a namespace.
fn show_volume(mount: &OwnedFd, users: &OwnedFd) -> io::Result<()> {
    let mut attributes = attributes(true);
    attributes.attr_set |= libc::MOUNT_ATTR_IDMAP;
    attributes.userns_fd = users.as_raw_fd() as u64;
    set_attributes(mount, libc::AT_EMPTY_PATH, &attributes)
}

/// Returns the attributes of a mount in a guest.
fn attributes(writable: bool) -> libc::mount_attr {
    let read_only = if writable { 0 } else { libc::MOUNT_ATTR_RDONLY };
    let attr_set = read_only | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    libc::mount_attr { attr_set, attr_clr: 0, propagation: 0, userns_fd: 0 }
}

fn set_attributes(
    mount: &OwnedFd,
    at: libc::c_int,
    attributes: &libc::mount_attr,
) -> io::Result<()> {
    // SAFETY: the path is an empty string with its end, and `attributes` is valid for reads of the
    // size given, both for the call's time.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            at,
            std::ptr::from_ref(attributes),
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn no_ids(image: &Path, error: io::Error) -> Error {
    let text = match error.raw_os_error() {
        Some(libc::EINVAL) => {
            "its file system can't map user ids (put the state directory on ext4, XFS \
            or Btrfs, or on tmpfs with Linux 6.3 or newer)"
                .to_owned()
        }
        _ => format!("can't be mounted with mapped user ids: {error}"),
    };
    Error::Image { path: image.to_owned(), text }
}

/// Returns a user namespace that maps its ids from 0 on to a range. Its maker is the first id of
/// the range, and it has no process.
fn user_namespace(users: UserRange) -> io::Result<OwnedFd> {
    let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC)?;
    let (waits, goes) = pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread, so the child may do whatever this one may.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => {
            drop((read_end, goes));
            let number =
                enter_user_namespace(users.base).err().and_then(|error| error.raw_os_error());
            let _ = File::from(write_end).write_all(&number.unwrap_or(0).to_ne_bytes());
            // Wait until the parent holds the namespace by its file.
            let _ = File::from(waits).read(&mut [0]);
            // SAFETY: ends this process at once; nothing of its parent's is to be run.
            unsafe { libc::_exit(0) };
        }
        child => child,
    };
    drop((write_end, waits));
    let mut number = [0; 4];
    let namespace = File::from(read_end).read_exact(&mut number).and_then(|()| {
        match i32::from_ne_bytes(number) {
            0 => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
        let map = format!("0 {} {}\n", users.base, users.length);
        for file in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{child}/{file}"), &map)?;
        }
        File::open(format!("/proc/{child}/ns/user")).map(OwnedFd::from)
    });
    drop(goes);
    rustix::process::waitpid(Pid::from_raw(child), WaitOptions::empty())?;
    namespace
}

/// Becomes a user, keeps all capabilities, and enters a new user namespace, which the user owns.
fn enter_user_namespace(user: u32) -> io::Result<()> {
    let check = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // Machines where ordinary users may make no user namespaces look at the capabilities.
    // SAFETY: none of these takes a pointer, and the calling process has one thread.
    unsafe {
        check(libc::prctl(libc::PR_SET_SECUREBITS, libc::SECBIT_NO_SETUID_FIXUP, 0, 0, 0))?;
        check(libc::setresuid(user, user, user))?;
        check(libc::unshare(libc::CLONE_NEWUSER))?;
    }
    // Sets the limit of this namespace; its root has no right to raise it. If the kernel lacks this
    // limit, other limits apply.
    let _ = fs::write(INOTIFY_INSTANCES, INOTIFY_INSTANCES_MAX.to_string());
    Ok(())
}
