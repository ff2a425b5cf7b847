//! What a guest or a helper is to be.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestSpec {
    /// Unique among the guests of a runtime: ASCII letters, digits, `.`, `_`, `-`; at most
    /// [`ID_BYTES_MAX`] bytes.
    pub id: String,
    /// Its directory: of its id's name, in [`crate::Paths::records`].
    pub dir: PathBuf,
    /// Its cgroup below the runtime's, e.g. `red/r1`: that has the limits, and the guest's
    /// processes are in its leaf `guest`.
    pub cgroup: String,
    /// Owner of the guest, as part of a cgroup's name: its cgroup pays for the daemon's work on the guest
    /// ([`crate::work`]). Hashes of specs leave it out, so that an upgrade restarts no guest.
    #[serde(skip)]
    pub owner: String,
    /// Its root file system.
    pub root: Root,
    /// What it may do.
    pub profile: Profile,
    /// Mounts, and namespaces of its own, within its user namespace. Control guests and hosts only.
    pub privileged: bool,
    /// True if it may use kernel memory that no cgroup is charged for: rings of packet sockets (tcpdump(8)) and tunnel
    /// interfaces (`/dev/net/tun`). Never true for forwarding guests.
    pub packet_rings: bool,
    /// The user ids on the host that its own are mapped to, from 0.
    pub users: UserRange,
    /// Inside: user and group id of the commands. 0 for [`Profile::Control`] and
    /// [`Profile::Host`]; any for [`Profile::Forwarding`].
    pub uid: u32,
    /// Host name inside.
    pub hostname: String,
    /// Files put into it.
    pub files: Vec<File>,
    /// Files and directories of the host shown in it.
    pub binds: Vec<Bind>,
    /// Directories of it that outlast it. Control guests and hosts only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// What it runs, started in this order. A forwarding guest ends with the last of them; the
    /// others stay until stopped.
    pub commands: Vec<Command>,
    /// Environment of the commands, beside `PATH`, `HOME` and `TERM`.
    pub env: BTreeMap<String, String>,
    /// Sysctls of its network namespace (`net.…`), beside the profile's own and before them in
    /// rank.
    pub sysctls: BTreeMap<String, String>,
    /// Limits of its cgroup.
    pub limits: Limits,
    /// Open files of each of its processes; fewer where the runtime itself may have no more.
    pub open_files_max: u64,
    /// Bytes of one log file; there are two.
    pub log_bytes_max: u64,
}

/// Bytes of a guest's id.
pub const ID_BYTES_MAX: usize = 128;

/// Whether an id can be one: its name is that of a directory.
pub(crate) fn id_is_good(id: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !id.is_empty() && id.len() <= ID_BYTES_MAX && id.chars().all(good) && !id.starts_with('.')
}

/// Bytes of one log file where nothing else is wanted; there are two of each log.
pub const LOG_BYTES_MAX: u64 = 4 << 20;

impl GuestSpec {
    /// The host's id for the guest's user `uid`.
    pub fn host_id(&self, uid: u32) -> u32 {
        self.users.base.saturating_add(uid)
    }
}

/// The root file system of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Root {
    /// The host's `/usr`, read-only, and a small made `/etc`: needs no download. Nothing else of
    /// the host is seen.
    Host,
    /// This directory, read-only, with the owners that it has on the machine.
    Rootfs(PathBuf),
    /// An OCI image layout on disk.
    OciLayout {
        /// Its directory.
        path: PathBuf,
        /// The image's `org.opencontainers.image.ref.name`; `None` if there is one image only.
        reference: Option<String>,
    },
    /// An image of the store ([`crate::image::Store`]), with its own environment and working directory, and its
    /// own command where one is given without a program. A control guest or host may write everywhere in it, into
    /// memory of its own.
    Image {
        /// Whose it is in the store.
        owner: String,
        /// Its manifest's digest.
        digest: String,
    },
}

/// What a guest may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Profile {
    /// Runs routing software: forwarding on, redirects and reverse-path filter off. Capabilities inside its own user
    /// namespace.
    Control,
    /// An end system, with the same capabilities.
    Host,
    /// Processes packets: no capability, a list of permitted system calls, an empty network
    /// namespace with `lo` down.
    Forwarding {
        /// For programs that work on TAPs, which they are given: CAP_NET_ADMIN and CAP_NET_RAW over the guest's own
        /// network namespace.
        tap: bool,
    },
}

/// User ids of a guest on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRange {
    /// The first, not below 65536.
    pub base: u32,
    /// How many.
    pub length: u32,
}

/// A file put into a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// Where, absolute: where the guest may write, over a file that its root has, or of one that is shown
    /// anywhere in [`Root::Host`].
    pub path: PathBuf,
    /// What is in it.
    pub content: String,
    /// Permission bits.
    pub mode: u32,
    /// Who owns it inside.
    pub owner: Owned,
    /// Copied into the guest, which may change its copy; else shown read-only.
    /// Control guests and hosts only.
    pub writable: bool,
}

/// Owner of a file inside a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owned {
    /// By ids inside.
    Ids {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
    },
    /// By names in the root's `/etc/passwd` and `/etc/group`, or numbers; in [`Root::Host`] those
    /// are the system's accounts of the machine.
    Named {
        /// The user.
        user: String,
        /// The group; the user's own if there is none.
        group: Option<String>,
    },
}

impl Owned {
    /// Root inside.
    pub const ROOT: Self = Self::Ids { uid: 0, gid: 0 };
}

/// A file or directory of the host shown in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// On the host, absolute.
    pub source: PathBuf,
    /// In the guest, absolute.
    pub target: PathBuf,
    /// Whether the guest may write, as far as permissions go.
    pub writable: bool,
    /// It is somebody's wish: opened when it is mounted, without following a link anywhere in its path, a file or
    /// directory without what is mounted below it. Else it is PdP's own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wished: bool,
}

/// A directory of a guest that outlasts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// What it is called among the guest's: ASCII letters, digits, `-` and `_`.
    pub name: String,
    /// Where it is in the guest, absolute.
    pub target: PathBuf,
    /// Bytes of the disk that it takes. One of its name and other bytes is another, and goes.
    pub bytes: u64,
}

/// A command of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; empty on [`Root::Image`]: the image's own, as its own user.
    pub argv: Vec<String>,
    /// What when it ends.
    pub restart: Restart,
    /// Killed, and started again, when one before it is: beside [`Restart::WithPrevious`], which is this with
    /// [`Restart::Always`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub with_previous: bool,
    /// It has to end with code 0, and is started again only if it did not and [`Restart::OnFailure`] says so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub once: bool,
    /// One that runs once may end with any code.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_fail: bool,
    /// Indices of the commands that it waits for: until they are ready, or, of commands that run once, have ended well.
    /// There are no cycles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<usize>,
    /// What tells that it is ready; `None`: that it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Check>,
    /// As whom and where it runs, and the program of its check. Control guests and hosts only.
    #[serde(default, skip_serializing_if = "RunAs::is_default")]
    pub run_as: RunAs,
}

/// As whom and where a command runs in a guest: looked up in the guest, by its own processes, whenever it is started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunAs {
    /// `USER` or `USER:GROUP` by name or number, as docker has them, below [`USER_IDS`]; `None`: whoever runs all of
    /// the guest. Its home is `HOME`, where the environment of the guest does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Its working directory, absolute; `None`: the guest's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<PathBuf>,
}

/// User and group ids that every guest has, from 0.
pub(crate) const USER_IDS: u32 = 65_536;

impl RunAs {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Command {
    /// A command that is started at once, and of which nothing is waited for.
    pub fn new(argv: Vec<String>, restart: Restart) -> Self {
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

    /// An image's own. As docker's `on-failure`: a shell that nobody talks to ends, and that is all.
    pub fn of_image() -> Self {
        Self::new(Vec::new(), Restart::OnFailure)
    }

    /// Whether it is started again when one before it is.
    pub(crate) fn hangs_on_previous(&self) -> bool {
        self.with_previous || self.restart == Restart::WithPrevious
    }
}

/// What tells that a command is ready: looked at again and again until it holds once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What is to hold.
    pub what: Probe,
    /// Pause between two looks.
    pub interval_ms: u64,
    /// Time of one look.
    pub timeout_ms: u64,
    /// Time after which a command that is not ready is told of; it is looked at further.
    pub within_ms: u64,
}

/// What is to hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Probe {
    /// This program, with its arguments, returns 0.
    Command(Vec<String>),
    /// A TCP port of 127.0.0.1 or ::1 takes connections.
    Tcp(u16),
    /// There is such a file.
    File(PathBuf),
}

/// What when a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Restart {
    /// Nothing.
    Never,
    /// It is started again, after a pause that grows while it keeps ending.
    Always,
    /// The same, if it ended with another code than 0.
    OnFailure,
    /// The same, and it is killed, with those after it that are of this kind, when the one before ends.
    WithPrevious,
}

/// Limits of a cgroup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// CPU time, cores; `None`: no limit.
    pub cpu_cores: Option<f64>,
    /// Period over which it holds, microseconds; `None`: [`crate::cgroup::CPU_PERIOD_US`]
    /// (below that it is enforced badly on kernels with a 4 ms tick).
    pub cpu_period_us: Option<u64>,
    /// Its part of a CPU that it shares with others, as [`crate::cgroup::Cgroups::weigh`] has it;
    /// `None`: as the kernel has it.
    pub cpu_weight: Option<u32>,
    /// Memory, bytes.
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
    /// CPUs, as in cpuset.cpus, e.g. `0-2,5`.
    pub cpus: Option<String>,
    /// Share of a disk's bandwidth, 1 to 1000, where the disk's scheduler has weights; the kernel's default is 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_weight: Option<u16>,
}

/// A process beside a guest, or of the node itself (the mux).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelperSpec {
    /// Unique, as those of guests and among them.
    pub id: String,
    /// Its directory: of its id's name, in [`crate::Paths::records`].
    pub dir: PathBuf,
    /// Program and arguments; the program's path is absolute.
    pub argv: Vec<String>,
    /// Environment, beside `PATH`.
    pub env: BTreeMap<String, String>,
    /// Its cgroup below the runtime's, without processes' cgroups below it: `mux`,
    /// `red/r1/helpers`.
    pub cgroup: String,
    /// User and group id on the host.
    pub uid: u32,
    /// Keeps root and its capabilities (the route mirror drops them by itself, after it entered
    /// the guest's namespaces). Else: `uid`, no capability, no new privileges.
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
