//! Directories of a guest that outlast it.
//!
//! A volume is a file of root's in the state directory, with an ext4 file system in it. Only the
//! kernel and mke2fs(8) write its bytes. A guest writes to the file system, which limits it to the
//! volume's bytes and inodes. The file's bytes are allocated on the disk when it is made, so that a
//! guest that fills its volume does not fill the disk. Making a volume always leaves
//! [`FREE_BYTES_MIN`] of the disk to others.
//!
//! A volume is mounted with the other mounts of a guest ([`crate::view`]): nosuid, nodev, through
//! the guest's user ids, in a mount namespace that ends with the guest. The loop device ends with
//! its last mount. So nothing stays on the machine, whichever process dies and when. If a loop
//! device of the file still exists, it is used again. Two devices of one file would each write
//! without knowing of the other's writes.
//!
//! A file gets its name once it is complete. Anything else in the guest's directory of volumes is
//! removed when the guest is made.
//!
//! Source: Linux `include/uapi/linux/loop.h`; mke2fs(8), fsopen(2).

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, ResolveFlags, fallocate, fchmod, fchown,
    flock, fstat, fsync, open, openat, openat2, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{Gid, Uid};
use serde::{Deserialize, Serialize};

use crate::disk::free_bytes;
use crate::error::{Error, ErrorContext, Result, error_chain};
use crate::process::end_within;
use crate::safe_removal;
use crate::spec::{GuestSpec, RootFilesystem, VolumeMount};
use crate::work::{WorkOrder, Workplace};

/// Free space that a new volume leaves on its disk for the daemon and all others, bytes.
pub const FREE_BYTES_MIN: u64 = 256 << 20;

/// In a bundle: list of the files of the guest's volumes, in order.
const LIST: &str = "volumes.json";

/// In a bundle: directory of their mount points, named by number.
const PLACES: &str = "volumes";

/// Suffix of the name of a volume's file.
const END: &str = ".ext4";

/// Suffix of a volume that is being made.
const PARTIAL: &str = "partial";

/// Longest time of mke2fs(8), which writes little.
const MAKE_WAIT: Duration = Duration::from_secs(60);

/// Options for making a volume, whatever the machine's mke2fs.conf says. It has a journal, so that
/// a crash of the machine does no harm, and reserves nothing for root. Its bytes are already zero
/// and must stay allocated on the disk.
const MAKE: [&str; 18] = [
    "-q",
    "-F",
    "-t",
    "ext4",
    "-b",
    "4096",
    "-I",
    "256",
    "-i",
    "8192",
    "-m",
    "0",
    "-O",
    "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,\
     dir_nlink,extra_isize,metadata_csum",
    "-E",
    "nodiscard,lazy_itable_init=1,lazy_journal_init=1",
    "-e",
    "remount-ro",
];

/// Largest number of loop devices to try if other processes take each free one.
const LOOPS_MAX: u32 = 64;

/// Flags for opening the top directory of a file system.
const TOP: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

const LOOP_CONTROL: &str = "/dev/loop-control";
const LOOP_CONFIGURE: libc::Ioctl = 0x4c0a;
const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4c82;
/// Frees the device once it is neither open nor mounted.
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Avoids caching pages twice, for the file system and for its file. Without support by the disk,
/// they are cached twice.
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

impl LoopInfo {
    const EMPTY: Self = Self {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

/// Returns the mount point of a volume in the guest's bundle, by number.
pub(crate) fn mount_point(bundle: &Path, number: usize) -> PathBuf {
    bundle.join(PLACES).join(number.to_string())
}

/// Makes the missing volumes of a guest in its directory of volumes, and removes those that its
/// spec no longer has. `root` is its root's path on the machine. Makes the mount points in the
/// bundle, and writes the list of volumes there.
pub(crate) fn prepare(
    spec: &GuestSpec,
    directory: &Path,
    bundle: &Path,
    root: &Path,
    workplace: &Workplace,
) -> Result<()> {
    remove_others(directory, &spec.volumes.iter().map(|volume| volume.name.as_str()).collect())?;
    if spec.volumes.is_empty() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(directory).at("make", directory)?;
    let places = bundle.join(PLACES);
    fs::create_dir(&places).at("make", &places)?;
    let mut files = Vec::new();
    for (number, volume) in spec.volumes.iter().enumerate() {
        let path = file(directory, &volume.name);
        ready(spec, volume, &path, root, workplace)?;
        files.push(path);
        let place = mount_point(bundle, number);
        fs::create_dir(&place).at("make", &place)?;
    }
    let list = bundle.join(LIST);
    let text = serde_json::to_vec(&Listed { files }).map_err(io::Error::from).at("write", &list)?;
    fs::write(&list, text).at("write", &list)
}

#[derive(Serialize, Deserialize)]
struct Listed {
    files: Vec<PathBuf>,
}

fn file(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}{END}"))
}

/// Removes everything in a guest's directory of volumes except the volumes `names`. Without any,
/// removes the directory too.
pub(crate) fn remove_others(directory: &Path, names: &BTreeSet<&str>) -> Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).at("read", directory),
    };
    for entry in entries {
        let path = entry.at("read", directory)?.path();
        if !names.iter().any(|name| path == file(directory, name)) {
            safe_removal::remove(&path)?;
        }
    }
    match names.is_empty() {
        true => safe_removal::remove(directory),
        false => Ok(()),
    }
}

/// Makes a volume unless it exists with the right size.
fn ready(
    spec: &GuestSpec,
    volume: &VolumeMount,
    path: &Path,
    root: &Path,
    workplace: &Workplace,
) -> Result<()> {
    let fail = |error: Error| Error::Spec {
        id: spec.id.clone(),
        text: format!("volume {}: {}", volume.name, error_chain(&error)),
    };
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() && meta.len() == volume.bytes => return Ok(()),
        // An earlier volume of the same name and another size.
        Ok(_) => safe_removal::remove(path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).at("look at", path),
    }
    let partial = path.with_extension(PARTIAL);
    safe_removal::remove(&partial)?;
    make(spec, volume, &partial, root, workplace)
        .and_then(|()| fs::rename(&partial, path).at("name", &partial))
        .map_err(|error| {
            let _ = safe_removal::remove(&partial);
            fail(error)
        })
}

/// Makes a volume's file system. Its top directory gets the owner and mode of the directory there
/// in the guest's root.
fn make(
    spec: &GuestSpec,
    volume: &VolumeMount,
    path: &Path,
    root: &Path,
    workplace: &Workplace,
) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    let file = file.at("make", path)?;
    take(&file, path, volume.bytes)?;
    workplace
        .run(&spec.owner, &WorkOrder::MakeFileSystem { file: path.to_owned() })
        .map_err(io::Error::other)
        .at("make a file system in", path)?;
    let mount = mounted(path).at("mount", path)?;
    let top = openat(&mount, ".", TOP, Mode::empty());
    let top = top.at("open", path)?;
    // It is for e2fsck(8), which makes it again. Programs that need an empty directory reject one
    // with it.
    unlinkat(&top, "lost+found", AtFlags::REMOVEDIR).at("clear", path)?;
    let (uid, gid, mode) = like(spec, root, &volume.target);
    fchown(&top, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).at("give away", path)?;
    fchmod(&top, Mode::from_raw_mode(mode)).at("set the mode of", path)?;
    drop((top, mount));
    // The file is complete before it is renamed, even if the machine crashes.
    fsync(&file).at("write", path)
}

/// Runs mke2fs(8) on a file.
pub(crate) fn make_file_system(path: &Path) -> io::Result<()> {
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        .args(MAKE)
        .arg(path)
        .env_clear()
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .env("MKE2FS_CONFIG", "/dev/null")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let missing = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::other("mke2fs is missing (install e2fsprogs)"),
        _ => error,
    };
    let status =
        mke2fs.spawn().map_err(missing).and_then(|mut it| end_within(&mut it, MAKE_WAIT))?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("mke2fs ended with {status}"))),
    }
}

/// Returns owner inside, group inside and mode of the directory at a path in a guest's root. If
/// there is none: root's, readable for all.
fn like(spec: &GuestSpec, root: &Path, target: &Path) -> (u32, u32, u32) {
    const OTHERWISE: (u32, u32, u32) = (0, 0, 0o755);
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let Ok(root) = open(root, directory, Mode::empty()) else { return OTHERWISE };
    // IN_ROOT resolves an absolute path from there.
    let found = openat2(&root, target, directory, Mode::empty(), resolve).and_then(fstat);
    let Ok(found) = found else { return OTHERWISE };
    let inside = |id: u32| match spec.root {
        // Ids in an unpacked image are those inside.
        RootFilesystem::OciLayout { .. } | RootFilesystem::Image { .. } => id,
        RootFilesystem::Host | RootFilesystem::Rootfs(_) => match id.checked_sub(spec.users.base) {
            Some(id) if id < spec.users.length => id,
            _ => 0,
        },
    };
    (inside(found.st_uid), inside(found.st_gid), found.st_mode & 0o1777)
}

/// Allocates a new file's bytes on the disk, and makes sure that enough stays free.
fn take(file: &File, path: &Path, bytes: u64) -> Result<()> {
    let full = || {
        let text = format!(
            "{} exceed its disk's free space; {} must stay free (free some, or make it smaller)",
            mib(bytes),
            mib(FREE_BYTES_MIN)
        );
        Err(io::Error::other(text)).at("make", path)
    };
    let left = || free_bytes(path).at("look at the disk of", path);
    if left()? < bytes.saturating_add(FREE_BYTES_MIN) {
        return full();
    }
    match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => {}
        Err(Errno::NOSPC | Errno::DQUOT) => return full(),
        Err(Errno::OPNOTSUPP) => {
            let text = "its file system can't allocate space in advance (put the state directory on \
                        ext4 or XFS)";
            return Err(io::Error::other(text)).at("make", path);
        }
        Err(error) => return Err(error).at("take bytes for", path),
    }
    // Other processes may have allocated some at the same time.
    if left()? < FREE_BYTES_MIN { full() } else { Ok(()) }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Mounts the volumes that a bundle lists. Returns unattached mounts with their mount points. Their
/// owners' ids are those in the file systems.
pub(crate) fn opened(bundle: &Path) -> Result<Vec<(OwnedFd, PathBuf)>> {
    let list = bundle.join(LIST);
    let Listed { files } = match fs::read(&list) {
        Ok(text) => serde_json::from_slice(&text).map_err(io::Error::from).at("read", &list)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).at("read", &list),
    };
    let mut all = Vec::new();
    for (number, path) in files.into_iter().enumerate() {
        let mount = mounted(&path).at("mount", &path)?;
        all.push((mount, mount_point(bundle, number)));
    }
    Ok(all)
}

/// Mounts the file system in a file, unattached.
fn mounted(path: &Path) -> io::Result<OwnedFd> {
    let options = |write| {
        let mut options = OpenOptions::new();
        options.read(true).write(write).custom_flags(libc::O_NOFOLLOW);
        options
    };
    // Only one process at a time looks for a device of the file. The device itself uses another
    // descriptor, without the lock.
    let lock = options(false).open(path)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let file = options(true).open(path)?;
    let device = Loop::of(&file, path)?;
    let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", &device.path)?;
    // The file's bytes were zero from the beginning.
    fsconfig_set_flag(&context, "noinit_itable")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok(mount)
}

/// A loop device. It is free again once this is closed and no mount uses it.
struct Loop {
    _open: File,
    path: String,
}

impl Loop {
    /// Returns the loop device of a file, or attaches one. `path`: path of the file.
    fn of(file: &File, path: &Path) -> io::Result<Self> {
        let meta = file.metadata()?;
        for entry in fs::read_dir("/sys/block")? {
            let name = entry?.file_name();
            let Some(name) = name.to_str().filter(|name| name.starts_with("loop")) else {
                continue;
            };
            // The name of the backing file decides: devices of others are not opened, and free
            // devices have no backing file.
            let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
            let backing = fs::read_to_string(backing).unwrap_or_default();
            if Path::new(backing.trim_end_matches('\n')).file_name() != path.file_name() {
                continue;
            }
            let path = format!("/dev/{name}");
            // An open device keeps its file. Before it is opened, it may have got another file.
            let Ok(device) = OpenOptions::new().read(true).write(true).open(&path) else {
                continue;
            };
            let mut info = LoopInfo::EMPTY;
            // SAFETY: the descriptor is open, and `info` has the layout of `struct loop_info64` and
            // is valid for writes for the call's time.
            let known =
                unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) };
            if known == 0 && (info.device, info.inode) == (meta.dev(), meta.ino()) {
                return Ok(Self { _open: device, path });
            }
        }
        Self::take(file)
    }

    fn take(file: &File) -> io::Result<Self> {
        let hint = |error: io::Error| {
            let text = format!("no loop device ({LOOP_CONTROL}: {error}); run `modprobe loop`");
            io::Error::other(text)
        };
        let control = OpenOptions::new().read(true).write(true).open(LOOP_CONTROL).map_err(hint)?;
        let mut last = io::Error::from(Errno::BUSY);
        for _ in 0..LOOPS_MAX {
            // SAFETY: the descriptor is open, and the call takes no pointer.
            let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
            let path = format!("/dev/loop{number}");
            let device = OpenOptions::new().read(true).write(true).open(&path).map_err(hint)?;
            let flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
            let config = LoopConfig {
                fd: file.as_raw_fd() as u32,
                block_size: 0,
                info: LoopInfo { flags, ..LoopInfo::EMPTY },
                reserved: [0; 8],
            };
            // SAFETY: both descriptors are open, and `config` has the layout of `struct
            // loop_config` and is valid for reads for the call's time.
            match check(unsafe {
                libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config)
            }) {
                Ok(_) => return Ok(Self { _open: device, path }),
                // Another process has taken it meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = error,
                Err(error) => return Err(hint(error)),
            }
        }
        Err(hint(last))
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Checks that the machine has what volumes need: loop devices, and mke2fs(8).
///
/// # Errors
/// What is missing, and what to do.
pub fn probe() -> std::result::Result<(), String> {
    let found = ["/usr/sbin/mke2fs", "/sbin/mke2fs"].iter().any(|path| Path::new(path).exists());
    if !found {
        return Err("mke2fs is missing (install e2fsprogs)".into());
    }
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(LOOP_CONTROL)
        .map(drop)
        .map_err(|error| format!("{LOOP_CONTROL}: {error}; `modprobe loop`"))
}
