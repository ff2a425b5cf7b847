//! The OCI bundle of a guest: `config.json`, the generated root, and the files to show in it.
//!
//! Source: OCI runtime specification 1.0.2; `tmpcopyup` is an extension of runc (and crun).

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, statvfs};
use serde_json::{Value, json};

use crate::binds;
use crate::cgroup::Cgroups;
use crate::error::{Error, ErrorContext, Result};
use crate::image::{self, ImageDefaults};
use crate::init;
use crate::profile::{WRITABLE_CHANGES, Writable};
use crate::root;
use crate::seccomp;
use crate::spec::{GuestSpec, ID_BYTES_MAX, Profile, RootFilesystem, USER_IDS, bundle, id_is_good};
use crate::view;
use crate::volumes;
use crate::work::Workplace;

/// Directory of PdP's own files in a guest.
const INSIDE: &str = "/run/pdp";

/// Process 1's program and its configuration, and the loader and libraries that run it if the root
/// is not the host's.
const INIT: &str = "/run/pdp/init";
pub(crate) const INIT_JSON: &str = "/run/pdp/init.json";
const INIT_LOADER: &str = "/run/pdp/init-loader";
const INIT_LIBRARIES: &str = "/run/pdp/init-lib";

/// Largest number of descriptors passed to a guest or helper.
pub(crate) const DESCRIPTORS_MAX: usize = 32;

/// Largest number of files and binds of a guest.
const FILES_AND_BINDS_MAX: usize = 512;

/// Largest number of volumes of a guest.
const VOLUMES_MAX: usize = 64;

/// Largest number of pseudo-terminals of a guest. The kernel has one limit for all guests of the
/// machine.
pub const TERMINALS_MAX: u32 = 64;

/// Largest number of commands of a guest.
const COMMANDS_MAX: usize = 128;

/// Largest size of all files of a guest, bytes.
const FILES_BYTES_MAX: usize = 64 << 20;

/// Size limits of a guest's changes in a writable image: this fraction of its memory, so that they
/// can't fill all of it, and this many bytes.
const CHANGES_PART: u64 = 4;
const CHANGES_BYTES_MAX: u64 = 4 << 30;

/// When a node's memory runs out, guests are killed before helpers. The death of a helper costs
/// more.
const OOM_SCORE_ADJUST: i32 = 500;

/// Libraries that `pdp-init` needs if the root is not the host's.
const LIBRARIES: [&str; 2] = ["libc.so.6", "libgcc_s.so.1"];
const LIBRARY_DIRS: [&str; 3] =
    ["/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"];
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

/// Refuses an invalid spec before anything is made.
pub(crate) fn check(spec: &GuestSpec, fds: usize) -> Result<()> {
    let fail = |text: String| Err(Error::Spec { id: spec.id.clone(), text });
    let id_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if !id_is_good(&spec.id) {
        return fail(format!(
            "the id must be 1 to {ID_BYTES_MAX} of A-Z a-z 0-9 . _ -, no . first"
        ));
    }
    if spec.hostname.is_empty() || spec.hostname.len() > 64 || !spec.hostname.chars().all(id_char) {
        return fail(format!("host name {:?}: 1 to 64 of A-Z a-z 0-9 . _ -", spec.hostname));
    }
    let users = spec.users;
    if users.base < 65_536
        || users.length < USER_IDS
        || users.base.checked_add(users.length).is_none()
    {
        return fail(format!(
            "user ids {} + {}: use 65536 or more ids, from 65536",
            users.base, users.length
        ));
    }
    if spec.uid >= users.length {
        return fail(format!("user id {} exceeds its range of {}", spec.uid, users.length));
    }
    if fds > DESCRIPTORS_MAX {
        return fail(format!("{fds} descriptors, {DESCRIPTORS_MAX} at most"));
    }
    let count = spec.files.len() + spec.binds.len();
    if count > FILES_AND_BINDS_MAX {
        return fail(format!("{count} files and binds, {FILES_AND_BINDS_MAX} at most"));
    }
    let bytes: usize = spec.files.iter().map(|file| file.content.len()).sum();
    if bytes > FILES_BYTES_MAX {
        return fail(format!("{bytes} bytes in files, {FILES_BYTES_MAX} at most"));
    }
    let inside = spec.files.iter().map(|f| &f.path).chain(spec.binds.iter().map(|b| &b.target));
    for path in inside.chain(spec.volumes.iter().map(|volume| &volume.target)) {
        let normal = path.is_absolute() && !path.components().any(|c| c.as_os_str() == "..");
        if !normal || path == Path::new("/") || path.starts_with(Path::new(INSIDE).join("init")) {
            return fail(format!("{}: not a usable absolute path", path.display()));
        }
    }
    for bind in &spec.binds {
        // Binds of the user's spec are checked when they are opened.
        if !bind.source.is_absolute() || !(bind.wished || bind.source.exists()) {
            return fail(format!("{}: no such path to bind", bind.source.display()));
        }
    }
    let count = spec.volumes.len();
    if count > VOLUMES_MAX || (count > 0 && spec.profile.is_forwarding()) {
        return fail(format!(
            "{count} volumes, {VOLUMES_MAX} at most; a forwarding guest has none"
        ));
    }
    if let Some(volume) = spec.volumes.iter().find(|volume| !volume_is_good(&volume.name)) {
        return fail(format!("volume {:?}: its name must be of A-Z a-z 0-9 _ -", volume.name));
    }
    if let Some(file) = spec.files.iter().find(|f| f.writable && spec.profile.is_forwarding()) {
        return fail(format!("{}: a forwarding guest has no writable files", file.path.display()));
    }
    if spec.privileged && spec.profile.is_forwarding() {
        return fail("a forwarding guest can't be privileged".to_owned());
    }
    if spec.packet_rings && spec.profile.is_forwarding() {
        return fail("a forwarding guest can't have rings of packet sockets".to_owned());
    }
    let as_image =
        matches!(spec.root, RootFilesystem::Image { .. }) && !spec.profile.is_forwarding();
    if !as_image && spec.commands.iter().any(|command| command.argv.is_empty()) {
        return fail("a command without a program".to_owned());
    }
    if spec.profile.is_forwarding() && spec.commands.iter().any(|it| !it.run_as.is_default()) {
        return fail(
            "a forwarding guest's commands run as its one user, in its directory".to_owned(),
        );
    }
    let count = spec.commands.len();
    if count > COMMANDS_MAX {
        return fail(format!("{count} commands, {COMMANDS_MAX} at most"));
    }
    if let Some(place) = spec.commands.iter().flat_map(|it| &it.after).find(|it| **it >= count) {
        return fail(format!("a command waits for command {place}, but there are {count}"));
    }
    if let Some(key) = spec.sysctls.keys().find(|key| !key.starts_with("net.")) {
        return fail(format!("sysctl {key}: only net. belongs to a network namespace"));
    }
    if let Some(key) = spec.env.keys().find(|key| key.is_empty() || key.contains('=')) {
        return fail(format!("environment variable {key:?}: invalid name"));
    }
    Ok(())
}

/// True if a volume's name is valid as the name of its file.
fn volume_is_good(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    (1..=ID_BYTES_MAX).contains(&name.len()) && name.chars().all(good)
}

/// Makes the bundle in the guest's directory. Unpacks images below `images`, and keeps the guest's
/// volumes in `own_volumes`.
pub(crate) fn make(
    spec: &GuestSpec,
    cgroups: &Cgroups,
    init_program: &Path,
    images: &Path,
    own_volumes: &Path,
    workplace: &Workplace,
) -> Result<()> {
    let dir = bundle(&spec.dir);
    let files = dir.join(view::FILES);
    for dir in [&dir, &files] {
        fs::create_dir(dir).at("make", dir)?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o711)).at("set the mode of", dir)?;
    }
    let users = dir.join(view::USERS);
    fs::write(&users, "").at("make", &users)?;
    // First the root as the container finds it, then its path on the machine.
    let shown = dir.join(view::ROOT);
    let mut own = None;
    let of_host = if spec.root == RootFilesystem::Host { root::shown(spec) } else { Vec::new() };
    let (root, image) = match &spec.root {
        RootFilesystem::Host => {
            root::make(spec, &shown, &of_host)?;
            (shown.clone(), false)
        }
        RootFilesystem::Rootfs(path) => {
            let link = dir.join(view::ROOTFS);
            symlink(path, &link).at("link", &link)?;
            has_places(spec, path)?;
            (path.clone(), true)
        }
        RootFilesystem::OciLayout { path, reference } => {
            let user = dir.join(image::LINK);
            let layout = (&**path, reference.as_deref());
            (image::unpack_for(&user, layout, images, (workplace, &spec.owner))?, true)
        }
        RootFilesystem::Image { owner, digest } => {
            let layout = image::layout(images, owner, digest);
            own = Some(ImageDefaults::read(&layout)?);
            let (user, by) = (dir.join(image::LINK), (workplace, &*spec.owner));
            (image::unpack_for(&user, (&layout, None), images, by)?, true)
        }
    };
    if image {
        fs::create_dir(&shown).at("make", &shown)?;
    }
    let as_image = own.map(|own| ImageGuest::of(spec, own, &root));
    let (spec, workdir) = match &as_image {
        Some(as_image) => (&as_image.spec, &*as_image.workdir),
        None => (spec, "/"),
    };
    let config = init::InitConfig {
        commands: spec.commands.clone(),
        files: Vec::new(),
        ends: spec.profile.is_forwarding(),
        tells: !spec.profile.is_forwarding(),
        open_files_max: spec.open_files_max,
        keeps_home: spec.env.contains_key("HOME"),
        made: as_image.as_ref().and_then(|as_image| as_image.made.clone()),
    };
    let memory = spec.limits.memory_bytes;
    let changes = as_image.is_some() && !spec.profile.is_forwarding();
    if changes {
        for name in [view::LOWER, view::CHANGES] {
            let place = dir.join(name);
            fs::create_dir(&place).at("make", &place)?;
        }
        let bytes = CHANGES_BYTES_MAX.min(memory.unwrap_or(u64::MAX) / CHANGES_PART);
        let path = dir.join(view::CHANGES_BYTES);
        fs::write(&path, bytes.to_string()).at("write", &path)?;
    }
    let mut mounts = system_mounts(spec.profile);
    let writable = match changes {
        true => WRITABLE_CHANGES,
        false => spec.profile.writable(image),
    };
    mounts.extend(writable.iter().map(|place| writable_mount(place, memory)));
    mounts.extend(of_host.iter().map(|path| bind_mount(path, path, false)));
    let init = write_init_files(spec, config, &files, init_program, (&root, image), &mut mounts)?;
    let own = spec.binds.iter().filter(|bind| !bind.wished);
    mounts.extend(own.map(|b| bind_mount(&b.source, &b.target, b.writable)));
    volumes::prepare(spec, own_volumes, &dir, &root, workplace)?;
    let found = binds::prepare(spec, &dir)?;
    // Volumes and binds of the spec: target, true for a directory, and mount.
    let mut asked: Vec<(&Path, bool, Value)> = Vec::new();
    for (number, volume) in spec.volumes.iter().enumerate() {
        let place = volumes::mount_point(&dir, number);
        asked.push((&volume.target, true, mount_of(&place, &volume.target, true, false)));
    }
    for (number, (bind, found)) in binds::of(spec).zip(found).enumerate() {
        let place = binds::mount_point(&dir, number);
        let mount = mount_of(&place, &bind.target, bind.writable, found.noexec);
        asked.push((&bind.target, found.directory, mount));
    }
    // Outer targets first.
    asked.sort_by(|a, b| a.0.cmp(b.0));
    let below = |path: &Path| writable.iter().any(|place| path.starts_with(place.path));
    for (target, directory, mount) in asked {
        if !image && !below(target) && !of_host.iter().any(|it| target.starts_with(it)) {
            // The guest's generated root lacks the mount point.
            root::make_mount_point(spec, &shown, target, directory)?;
        }
        mounts.push(mount);
    }
    let config = json!({
        "ociVersion": "1.0.2",
        "hostname": spec.hostname,
        "root": { "path": shown, "readonly": !changes },
        "process": process(spec, &init, workdir),
        "mounts": mounts,
        "linux": linux(spec, cgroups),
    });
    let path = dir.join("config.json");
    fs::write(&path, config.to_string()).at("write", &path)
}

/// Refuses a root directory without the needed mount points. PdP can't make them in it.
fn has_places(spec: &GuestSpec, rootfs: &Path) -> Result<()> {
    let system = ["proc", "dev", "sys"].map(PathBuf::from);
    let places = spec.profile.writable_directories(true).map(|place| PathBuf::from(&place[1..]));
    let lacks = |place: &PathBuf| root::lacks_directory(rootfs, place);
    let missing: Vec<_> = system.into_iter().chain(places).filter(lacks).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = missing.iter().map(|place| place.display().to_string()).collect();
    let (top, names) = (rootfs.display(), names.join(" "));
    let text = format!("rootfs {top} lacks directories to mount on; cd {top}; mkdir -p {names}");
    Err(Error::Spec { id: spec.id.clone(), text })
}

/// A guest on an image with an environment, a directory and a command of its own.
struct ImageGuest {
    /// The guest's spec, completed by the image's settings.
    spec: GuestSpec,
    /// Working directory of process 1, and of commands that run later.
    workdir: String,
    /// Default working directory of commands; made if it does not exist.
    made: Option<PathBuf>,
}

impl ImageGuest {
    /// `root`: directory of the image's files.
    fn of(spec: &GuestSpec, own: ImageDefaults, root: &Path) -> Self {
        let mut merged = spec.clone();
        merged.env = own.env.into_iter().chain(spec.env.clone()).collect();
        let elsewhere = own.workdir != "/" && !spec.profile.is_forwarding();
        let made = elsewhere.then(|| PathBuf::from(&own.workdir));
        for command in &mut merged.commands {
            if command.argv.is_empty() {
                command.argv.clone_from(&own.argv);
                command.run_as.user = Some(own.user.clone()).filter(|user| !user.is_empty());
            }
            command.run_as.workdir = command.run_as.workdir.take().or_else(|| made.clone());
        }
        let exists = image::has_directory(root, Path::new(&own.workdir));
        let workdir = if exists { own.workdir } else { "/".to_owned() };
        Self { spec: merged, workdir, made }
    }
}

/// Puts `pdp-init`, its configuration and the guest's files where they can be mounted. Returns the
/// command that runs it.
fn write_init_files(
    spec: &GuestSpec,
    mut config: init::InitConfig,
    files: &Path,
    program: &Path,
    (root, image): (&Path, bool),
    mounts: &mut Vec<Value>,
) -> Result<Vec<String>> {
    let inside = Path::new(INSIDE);
    let mut shown = Vec::new();
    for (index, file) in spec.files.iter().enumerate() {
        let host = files.join(index.to_string());
        let owner = root::ids(spec, root, &file.owner)?;
        let below = |place: &str| file.path.starts_with(place);
        if !file.writable && !image && !spec.profile.writable_directories(image).any(below) {
            // A generated root belongs to the guest. It can have files in places that can't be
            // mounted on later.
            root::write_file(spec, root, file, owner)?;
            continue;
        }
        write_owned(spec, &host, file.content.as_bytes(), file.mode, owner)?;
        if file.writable {
            let from = inside.join("init-files").join(index.to_string());
            let (uid, gid) = owner;
            let to = file.path.clone();
            config.files.push(init::FileCopy { from: from.clone(), to, mode: file.mode, uid, gid });
            mounts.push(bind_mount(&host, &from, false));
        } else {
            // They follow PdP's own mounts, so that these do not hide them.
            shown.push(bind_mount(&host, &file.path, false));
        }
    }
    let text = serde_json::to_vec(&config).map_err(|error| Error::Spec {
        id: spec.id.clone(),
        text: format!("its commands can't be written: {error}"),
    })?;
    let host = files.join("init.json");
    write_owned(spec, &host, &text, 0o400, (spec.uid, spec.uid))?;
    mounts.push(bind_mount(program, Path::new(INIT), false));
    mounts.push(bind_mount(&host, Path::new(INIT_JSON), false));
    if image {
        // The image may have another C library or none. Mount ours, with its loader.
        for name in LIBRARIES {
            let found = LIBRARY_DIRS.iter().map(|dir| Path::new(dir).join(name));
            let found = found.into_iter().find(|path| path.exists()).ok_or(Error::Spec {
                id: spec.id.clone(),
                text: format!("{name} is not in {}", LIBRARY_DIRS.join(", ")),
            })?;
            mounts.push(bind_mount(&real(&found)?, &Path::new(INIT_LIBRARIES).join(name), false));
        }
        mounts.push(bind_mount(&real(Path::new(LOADER))?, Path::new(INIT_LOADER), false));
    }
    mounts.extend(shown);
    Ok(init_call(image).chain([INIT_JSON]).map(str::to_owned).collect())
}

/// Returns the command that runs process 1's program in a guest, without arguments. `image`: the
/// root is not [`RootFilesystem::Host`].
pub(crate) fn init_call(image: bool) -> impl Iterator<Item = &'static str> {
    let loader: &[&str] =
        if image { &[INIT_LOADER, "--library-path", INIT_LIBRARIES] } else { &[] };
    loader.iter().copied().chain([INIT])
}

fn real(path: &Path) -> Result<PathBuf> {
    fs::canonicalize(path).at("find", path)
}

fn write_owned(
    spec: &GuestSpec,
    path: &Path,
    bytes: &[u8],
    mode: u32,
    owner: (u32, u32),
) -> Result<()> {
    fs::write(path, bytes).at("write", path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o777))
        .at("set the mode of", path)?;
    root::own(spec, path, owner)
}

fn process(spec: &GuestSpec, init: &[String], workdir: &str) -> Value {
    let mut env = vec![
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/frr".to_owned(),
        "HOME=/root".to_owned(),
        "TERM=xterm".to_owned(),
    ];
    env.extend(spec.env.iter().map(|(key, value)| format!("{key}={value}")));
    let capabilities = spec.profile.capabilities();
    // Another user than root keeps capabilities over exec only if they are ambient.
    let kept: &[&str] = if spec.uid == 0 { &[] } else { capabilities };
    json!({
        "terminal": false,
        "user": { "uid": spec.uid, "gid": spec.uid },
        "args": init,
        "env": env,
        "cwd": workdir,
        "noNewPrivileges": true,
        "oomScoreAdj": OOM_SCORE_ADJUST,
        "capabilities": {
            "bounding": capabilities,
            "effective": capabilities,
            "permitted": capabilities,
            "inheritable": kept,
            "ambient": kept,
        },
    })
}

fn linux(spec: &GuestSpec, cgroups: &Cgroups) -> Value {
    let mapping =
        json!([{ "containerID": 0, "hostID": spec.users.base, "size": spec.users.length }]);
    let namespaces = ["pid", "network", "ipc", "uts", "mount", "cgroup"];
    let mut namespaces: Vec<_> = namespaces.iter().map(|kind| json!({ "type": kind })).collect();
    namespaces.push(json!({ "type": "user", "path": bundle(&spec.dir).join(view::USERS) }));
    let mut devices = vec![json!({ "allow": false, "access": "rwm" })];
    let mut nodes = Vec::new();
    if spec.packet_rings {
        devices.push(
            json!({ "allow": true, "type": "c", "major": 10, "minor": 200, "access": "rwm" }),
        );
        nodes.push(json!({
            "path": "/dev/net/tun", "type": "c", "major": 10, "minor": 200, "fileMode": 0o666,
        }));
    }
    let mut read_only = vec!["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sysrq-trigger"];
    if spec.profile.is_forwarding() {
        read_only.push("/proc/sys");
    }
    json!({
        "uidMappings": mapping,
        "gidMappings": mapping,
        "namespaces": namespaces,
        "cgroupsPath": cgroups.oci_path(&leaf(&spec.cgroup)),
        "resources": { "devices": devices },
        "devices": nodes,
        "sysctl": sysctls(spec),
        "seccomp": seccomp::filter(spec.profile, spec.privileged, spec.packet_rings),
        "maskedPaths": [
            "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
            "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
            "/sys/firmware", "/sys/fs/cgroup", "/sys/kernel/debug",
        ],
        "readonlyPaths": read_only,
    })
}

/// Returns the cgroup of a guest's processes.
pub(crate) fn leaf(cgroup: &str) -> String {
    format!("{cgroup}/guest")
}

/// Returns the sysctls that this kernel has. The spec's override the profile's.
fn sysctls(spec: &GuestSpec) -> serde_json::Map<String, Value> {
    let own = spec.profile.sysctls().iter().map(|&(key, value)| (key.to_owned(), value));
    let own = own.filter(|(key, _)| Path::new("/proc/sys").join(key.replace('.', "/")).exists());
    let given = spec.sysctls.iter().map(|(key, value)| (key.clone(), value.as_str()));
    own.chain(given).map(|(key, value)| (key, value.into())).collect()
}

fn system_mounts(profile: Profile) -> Vec<Value> {
    let mount = |target: &str, kind: &str, options: &[&str]| json!({ "destination": target, "type": kind, "source": kind, "options": options });
    let mut shared = vec!["nosuid", "noexec", "nodev", "mode=1777"];
    shared.push(if profile.is_forwarding() { "size=4m" } else { "size=64m" });
    let terminals = format!("max={TERMINALS_MAX}");
    vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=64k"]),
        mount(
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5", &terminals],
        ),
        mount("/dev/shm", "tmpfs", &shared),
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    ]
}

fn bind_mount(source: &Path, target: &Path, writable: bool) -> Value {
    // Debian mounts /run with noexec. The file itself may not exist yet.
    let place = source.ancestors().find_map(|path| statvfs(path).ok());
    let noexec = place.is_some_and(|place| place.f_flag.contains(StatVfsMountFlags::NOEXEC));
    mount_of(source, target, writable, noexec)
}

fn mount_of(source: &Path, target: &Path, writable: bool, noexec: bool) -> Value {
    let mut options = vec!["bind", if writable { "rw" } else { "ro" }, "nosuid", "nodev"];
    // A user namespace can't remove flags from a mount.
    if noexec {
        options.push("noexec");
    }
    json!({ "destination": target, "type": "bind", "source": source, "options": options })
}

/// Fraction of a guest's memory that one writable place may fill. Killing processes does not free
/// its content. Filling all places must not end the guest.
const WRITABLE_PART: u64 = 8;

fn writable_mount(place: &Writable, memory_bytes: Option<u64>) -> Value {
    let part = memory_bytes.map_or(u64::MAX, |bytes| bytes / WRITABLE_PART);
    let mut options = vec![
        "nosuid".to_owned(),
        "nodev".to_owned(),
        format!("mode={}", place.mode),
        format!("size={}", place.bytes_max.min(part)),
    ];
    if place.copy {
        options.push("tmpcopyup".to_owned());
    }
    json!({ "destination": place.path, "type": "tmpfs", "source": "tmpfs", "options": options })
}
