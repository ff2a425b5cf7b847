//! How a guest's files are shown to its container: mounts that exist before the OCI runtime makes the
//! container, in a mount namespace of the OCI runtime's own, so that the kernel locks them. A mount that
//! a container inherits from a namespace with more rights stays read-only whatever the guest may
//! do, `privileged` or not; and nothing is left mounted on the machine, whoever dies.
//!
//! An image is one copy of root's for all guests, shown through the guest's user ids (an idmapped mount).
//!
//! The guest's user namespace is made here too, by the first of its user ids: what the kernel counts by user
//! (inotify instances, queued signals, message queues, locked memory) it counts at whoever made the namespace
//! as well, and that must not be the machine's root, who would have none left.
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
use crate::error::{Context, Error, Result};
use crate::spec::{UserRange, bundle};
use crate::volumes;

/// In a bundle: the guest's root; a place to mount on, but for [`crate::Root::Host`].
pub(crate) const ROOT: &str = "root";

/// In a bundle: files that are shown in the guest.
pub(crate) const FILES: &str = "files";

/// In a bundle: a link to the unpacked image that the guest's root is, which is so kept.
pub(crate) const IMAGE: &str = "image";

/// In a bundle, where the guest may write everywhere: where its image is mounted, and the memory with what it
/// changes; the guest's root is one over the other.
pub(crate) const LOWER: &str = "lower";
pub(crate) const CHANGES: &str = "changes";

/// In a bundle: how many bytes that memory has; there where there is such.
pub(crate) const CHANGES_BYTES: &str = "changes-bytes";

/// Files and directories that a guest changes or makes.
const CHANGES_FILES_MAX: u64 = 65_536;

/// In a bundle: a link to the directory that the guest's root is.
pub(crate) const ROOTFS: &str = "rootfs";

/// In a bundle: where the guest's user namespace is mounted for the OCI runtime.
pub(crate) const USERS: &str = "users";

/// The bound of that in a user namespace.
const INOTIFY_INSTANCES: &str = "/proc/sys/user/max_inotify_instances";

/// Inotify instances of each user of a guest. The kernel counts those of all guests of a vnet at its first user id as
/// well, and has room for fewer there unless it is told.
pub const INOTIFY_INSTANCES_MAX: u32 = 128;

/// What is to be mounted for one guest.
pub(crate) struct View {
    mounts: Vec<(OwnedFd, PathBuf)>,
    changes: Option<Changes>,
}

/// What a guest changes in its image.
struct Changes {
    bundle: PathBuf,
    /// Options of the file system in memory.
    options: CString,
    /// Who is root inside.
    user: u32,
}

impl View {
    /// Prepares what the bundle in a guest's directory says. Changes nothing on the machine.
    pub fn prepare(id: &str, dir: &Path, users: UserRange) -> Result<Self> {
        let bundle = bundle(dir);
        let (root, files) = (bundle.join(ROOT), bundle.join(FILES));
        let base = users.base;
        let users = user_namespace(users).at("make a user namespace for", dir)?;
        let shown = match (fs::read_link(bundle.join(IMAGE)), fs::read_link(bundle.join(ROOTFS))) {
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
            Ok(bytes) => Some(Changes {
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
        for binds::Opened { file, writable, place } in binds::opened(id, &bundle)? {
            mounts.push((detach_opened(&file, writable).at("show for", &place)?, place));
        }
        Ok(Self { mounts, changes })
    }

    /// Puts this process into a mount namespace of its own, with all that in place. For the process
    /// that becomes the OCI runtime.
    pub fn enter(&self) -> io::Result<()> {
        // SAFETY: takes no pointer, and the calling process has one thread.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // What the machine unmounts goes here too; nothing goes the other way.
        mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
        for (mount, place) in &self.mounts {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            move_mount(mount, "", CWD, place, flags)?;
        }
        self.changes.as_ref().map_or(Ok(()), Changes::mount)
    }
}

impl Changes {
    /// Lays memory, which the kernel charges to the guest that writes to it, over the image.
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
        // Within the directory, so that no name in it is taken for an option.
        std::env::set_current_dir(&self.bundle)?;
        let layers = c"lowerdir=lower,upperdir=changes/upper,workdir=changes/work";
        // With an image's own ids from Linux 5.19 on.
        mount("overlay", ROOT, "overlay", flags, Some(layers))?;
        std::env::set_current_dir("/")
    }
}

/// What is at `path`, read-only, as a mount that is nowhere yet; with `users`, its owners' ids are
/// those inside that namespace.
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
            // With what is mounted below it.
            flags |= OpenTreeFlags::AT_RECURSIVE;
            at |= libc::AT_RECURSIVE;
        }
    }
    let mount = open_tree(CWD, path, flags)?;
    set_attributes(&mount, at, &attributes)?;
    Ok(mount)
}

/// What is open, as a mount that is nowhere yet, without what is mounted below it.
fn detach_opened(file: &OwnedFd, writable: bool) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let mount = open_tree(file, "", flags)?;
    set_attributes(&mount, libc::AT_EMPTY_PATH, &attributes(writable))?;
    Ok(mount)
}

/// Has the owners' ids in a volume be those inside of a namespace.
fn show_volume(mount: &OwnedFd, users: &OwnedFd) -> io::Result<()> {
    let mut attributes = attributes(true);
    attributes.attr_set |= libc::MOUNT_ATTR_IDMAP;
    attributes.userns_fd = users.as_raw_fd() as u64;
    set_attributes(mount, libc::AT_EMPTY_PATH, &attributes)
}

/// Of a mount in a guest.
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
        Some(libc::EINVAL) => "its file system can't show files through other user ids; have the \
            state directory on ext4, XFS or Btrfs (on a tmpfs from Linux 6.3 on)"
            .to_owned(),
        _ => format!("can't be shown through user ids: {error}"),
    };
    Error::Image { path: image.to_owned(), text }
}

/// A user namespace that maps its ids from 0 on to a range, made by the first of that; nobody is in it.
fn user_namespace(users: UserRange) -> io::Result<OwnedFd> {
    let (made, tells) = pipe_with(PipeFlags::CLOEXEC)?;
    let (waits, goes) = pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread, so the child may do whatever this one may.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => {
            drop((made, goes));
            let number = leave(users.base).err().and_then(|error| error.raw_os_error());
            let _ = File::from(tells).write_all(&number.unwrap_or(0).to_ne_bytes());
            // Until the namespace is held by its file.
            let _ = File::from(waits).read(&mut [0]);
            // SAFETY: ends this process at once; nothing of its parent's is to be run.
            unsafe { libc::_exit(0) };
        }
        child => child,
    };
    drop((tells, waits));
    let mut number = [0; 4];
    let namespace = File::from(made).read_exact(&mut number).and_then(|()| {
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

/// Becomes a user, with all capabilities still, and goes into a new user namespace, whose owner is so that user.
fn leave(user: u32) -> io::Result<()> {
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
    // Of this namespace, whose root has no right to raise it. A kernel without such bounds has others.
    let _ = fs::write(INOTIFY_INSTANCES, INOTIFY_INSTANCES_MAX.to_string());
    Ok(())
}
