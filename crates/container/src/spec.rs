//! Specs of guests and helpers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestSpec {
    /// Unique among the guests of a runtime: ASCII letters, digits, `.`, `_`, `-`; at most
    /// [`ID_BYTES_MAX`] bytes.
    pub id: String,
    /// Directory of the guest in [`crate::RuntimePaths::records`], named by its id.
    pub dir: PathBuf,
    /// Cgroup below the runtime's, e.g. `red/r1`. It has the limits; the guest's processes are in
    /// its leaf `guest`.
    pub cgroup: String,
    /// Owner of the guest, as part of a cgroup's name. The owner's cgroup pays for the daemon's
    /// work on the guest ([`crate::work`]). Hashes of specs exclude the owner, so that an upgrade
    /// restarts no guest.
    #[serde(skip)]
    pub owner: String,
    /// Root file system.
    pub root: RootFilesystem,
    /// Rights of the guest.
    pub profile: Profile,
    /// Permits mounts, and namespaces of its own, within its user namespace. Control guests and
    /// hosts only.
    pub privileged: bool,
    /// True if it may use kernel memory that the kernel charges to no cgroup: rings of packet
    /// sockets (tcpdump(8)) and tunnel interfaces (`/dev/net/tun`). Never true for forwarding
    /// guests.
    pub packet_rings: bool,
    /// User ids on the host that the guest's ids are mapped to, from 0 on.
    pub users: UserRange,
    /// User and group id of the commands inside. 0 for [`Profile::Control`] and [`Profile::Host`];
    /// any for [`Profile::Forwarding`].
    pub uid: u32,
    /// Host name inside.
    pub hostname: String,
    /// Files to put into it.
    pub files: Vec<GuestFile>,
    /// Files and directories of the host to show in it.
    pub binds: Vec<BindMount>,
    /// Directories that outlast it. Control guests and hosts only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeMount>,
    /// Commands, started in this order. A forwarding guest ends with the last of them; other guests
    /// stay until stopped.
    pub commands: Vec<GuestCommand>,
    /// Environment of the commands, in addition to `PATH`, `HOME` and `TERM`.
    pub env: BTreeMap<String, String>,
    /// Sysctls of its network namespace (`net.…`), in addition to the profile's. They override the
    /// profile's.
    pub sysctls: BTreeMap<String, String>,
    /// Limits of its cgroup.
    pub limits: Limits,
    /// Limit of open files per process. Lower if the runtime's own limit is lower.
    pub open_files_max: u64,
    /// Bytes of one log file; there are two.
    pub log_bytes_max: u64,
}

/// Longest id of a guest, bytes.
pub const ID_BYTES_MAX: usize = 128;

/// True if an id is valid as the name of a directory.
pub(crate) fn id_is_good(id: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !id.is_empty() && id.len() <= ID_BYTES_MAX && id.chars().all(good) && !id.starts_with('.')
}

/// Default size of one log file, bytes; there are two of each log.
pub const LOG_BYTES_MAX: u64 = 4 << 20;

impl GuestSpec {
    /// Returns the host's id for the guest's user `uid`.
    pub fn host_id(&self, uid: u32) -> u32 {
        self.users.base.saturating_add(uid)
    }
}

/// The root file system of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RootFilesystem {
    /// The host's `/usr`, read-only, and a small generated `/etc`. Needs no download. The rest of
    /// the host is not visible.
    Host,
    /// This directory, read-only, with its owners on the machine.
    Rootfs(PathBuf),
    /// An OCI image layout on disk.
    OciLayout {
        /// Directory of the layout.
        path: PathBuf,
        /// The image's `org.opencontainers.image.ref.name`; `None` if the layout has only one
        /// image.
        reference: Option<String>,
    },
    /// An image of the store ([`crate::image::ImageStore`]), with its environment and working
    /// directory. A command without a program is the image's own command. A control guest or host
    /// may write everywhere in the image; its changes are in memory of its own.
    Image {
        /// Owner of the image in the store.
        owner: String,
        /// Digest of the image's manifest.
        digest: String,
    },
}

/// Rights of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Profile {
    /// Runs routing software: forwarding on, redirects and reverse-path filter off. It has
    /// capabilities inside its own user namespace.
    Control,
    /// End system, with the same capabilities.
    Host,
    /// Processes packets: no capability, a list of permitted system calls, and an empty network
    /// namespace with `lo` down.
    Forwarding {
        /// True for programs that work on TAPs passed to them. They get CAP_NET_ADMIN and
        /// CAP_NET_RAW over the guest's own network namespace.
        tap: bool,
    },
}

/// User ids of a guest on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRange {
    /// First id, not below 65536.
    pub base: u32,
    /// Number of ids.
    pub length: u32,
}

/// A file put into a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestFile {
    /// Absolute path: where the guest may write, or over a file of its root. A read-only file may
    /// be anywhere in [`RootFilesystem::Host`].
    pub path: PathBuf,
    /// Content of the file.
    pub content: String,
    /// Permission bits.
    pub mode: u32,
    /// Owner inside the guest.
    pub owner: FileOwner,
    /// True: the guest gets a copy, which it may change. False: the file is shown read-only. True
    /// only for control guests and hosts.
    pub writable: bool,
}

/// Owner of a file inside a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileOwner {
    /// Ids inside the guest.
    Ids {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
    },
    /// Names in the root's `/etc/passwd` and `/etc/group`, or numbers. In [`RootFilesystem::Host`],
    /// these are the machine's system accounts.
    Named {
        /// The user.
        user: String,
        /// The group; the user's own if absent.
        group: Option<String>,
    },
}

impl FileOwner {
    /// Root inside the guest.
    pub const ROOT: Self = Self::Ids { uid: 0, gid: 0 };
}

/// A file or directory of the host shown in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindMount {
    /// Absolute path on the host.
    pub source: PathBuf,
    /// Absolute path in the guest.
    pub target: PathBuf,
    /// True if the guest may write, as far as permissions allow.
    pub writable: bool,
    /// True for a bind of the user's spec. It is opened when it is mounted, without following a
    /// symbolic link anywhere in its path, and without mounts below it. False for PdP's own binds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wished: bool,
}

/// A directory of a guest that outlasts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// Name, unique within the guest: ASCII letters, digits, `-` and `_`.
    pub name: String,
    /// Absolute path in the guest.
    pub target: PathBuf,
    /// Size on the disk, bytes. A volume of the same name and another size is removed and replaced.
    pub bytes: u64,
}

/// A command of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestCommand {
    /// Program and arguments. Empty on [`RootFilesystem::Image`]: the image's own command, as the
    /// image's user.
    pub argv: Vec<String>,
    /// Action when it ends.
    pub restart: CommandRestart,
    /// True if it is killed and restarted when a command before it is restarted.
    /// [`CommandRestart::WithPrevious`] is this together with [`CommandRestart::Always`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub with_previous: bool,
    /// True if it must end with code 0. It is restarted only if it did not and
    /// [`CommandRestart::OnFailure`] is set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub once: bool,
    /// True if a command with `once` may end with any code.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_fail: bool,
    /// Indices of the commands that it waits for. It waits until they are ready or, for commands
    /// with `once`, have ended well. There are no cycles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<usize>,
    /// Check of its readiness; `None`: it is ready once started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<CommandProbe>,
    /// User and directory of the command and of its check's program. Control guests and hosts only.
    #[serde(default, skip_serializing_if = "RunAs::is_default")]
    pub run_as: RunAs,
}

/// User and directory of a command in a guest. Processes of the guest look them up whenever the
/// command starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// `USER` or `USER:GROUP` by name or number as in docker, below [`USER_IDS`]. `None`: the user
    /// that runs the guest. `HOME` is the user's home, unless the guest's environment sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Working directory, absolute. `None`: the guest's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<PathBuf>,
}

/// Number of user and group ids that every guest has, from 0 on.
pub(crate) const USER_IDS: u32 = 65_536;

impl RunAs {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl GuestCommand {
    /// Returns a command that starts at once and that no other command waits for.
    pub fn new(argv: Vec<String>, restart: CommandRestart) -> Self {
        Self {
            argv,
            restart,
            with_previous: false,
            once: false,
            may_fail: false,
            after: Vec::new(),
            ready: None,
            run_as: RunAs::default(),
        }
    }

    /// Returns an image's own command. It restarts on failure, like docker's `on-failure`: a shell
    /// without input just ends.
    pub fn of_image() -> Self {
        Self::new(Vec::new(), CommandRestart::OnFailure)
    }

    /// True if it is restarted with a command before it.
    pub(crate) fn restarts_with_previous(&self) -> bool {
        self.with_previous || self.restart == CommandRestart::WithPrevious
    }
}

/// Check of a command's readiness. It is repeated until it succeeds once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandProbe {
    /// Subject of the check.
    pub what: Probe,
    /// Pause between two probes.
    pub interval_ms: u64,
    /// Longest time of one probe.
    pub timeout_ms: u64,
    /// Time after which a command that is not ready is reported. Probing continues.
    pub within_ms: u64,
}

/// Subject of a readiness check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Probe {
    /// This program, with its arguments, returns 0.
    Command(Vec<String>),
    /// A TCP port of 127.0.0.1 or ::1 accepts connections.
    Tcp(u16),
    /// This file exists.
    File(PathBuf),
}

/// Action when a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommandRestart {
    /// Nothing.
    Never,
    /// Restart it, after a pause that grows while it keeps ending.
    Always,
    /// Restart it if its exit code is not 0.
    OnFailure,
    /// Restart it always. Also kill and restart it, and later commands of this kind, when the
    /// command before it ends.
    WithPrevious,
}

/// Limits of a cgroup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// CPU time, cores; `None`: no limit.
    pub cpu_cores: Option<f64>,
    /// Period of the CPU limit, microseconds. `None`: [`crate::cgroup::CPU_PERIOD_US`]. Kernels
    /// with a 4 ms tick enforce shorter periods badly.
    pub cpu_period_us: Option<u64>,
    /// Weight for CPU time, as in [`crate::cgroup::Cgroups::weigh`]. `None`: the kernel's default.
    pub cpu_weight: Option<u32>,
    /// Memory, bytes.
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
    /// CPUs, as in cpuset.cpus, e.g. `0-2,5`.
    pub cpus: Option<String>,
    /// Weight for a disk's bandwidth, 1 to 1000, if the disk's scheduler has weights. The kernel's
    /// default is 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_weight: Option<u16>,
}

/// A process beside a guest, or a process of the PdP node itself (the mux).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelperSpec {
    /// Unique among all guests and helpers, in the form of a guest's id.
    pub id: String,
    /// Directory of the helper in [`crate::RuntimePaths::records`], named by its id.
    pub dir: PathBuf,
    /// Program and arguments; the program's path is absolute.
    pub argv: Vec<String>,
    /// Environment, in addition to `PATH`.
    pub env: BTreeMap<String, String>,
    /// Cgroup below the runtime's, without further cgroups of processes below it: `mux`,
    /// `red/r1/helpers`.
    pub cgroup: String,
    /// User and group id on the host.
    pub uid: u32,
    /// True: keeps root and its capabilities (the route mirror drops them by itself after entering
    /// the guest's namespaces). False: `uid`, no capability, no new privileges.
    pub keep_root: bool,
    /// Bytes of one log file; there are two.
    pub log_bytes_max: u64,
}

/// Name of the bundle in a guest's directory.
pub(crate) const BUNDLE: &str = "bundle";

/// Path of a guest's bundle.
pub(crate) fn bundle(dir: &Path) -> PathBuf {
    dir.join(BUNDLE)
}
