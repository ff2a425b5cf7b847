//! Control of a route mirror by pdpd, and its configuration file.

use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::routes::Resolved;

/// Version of this protocol, and of the configuration file.
pub const VERSION: u32 = 2;

/// The file that a mirror is started with (JSON).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Network namespace of the control guest, e.g. `/proc/123/ns/net`.
    pub netns: PathBuf,
    /// User namespace that owns it; joined after the netlink sockets are open.
    pub userns: Option<PathBuf>,
    /// Names of the control guest's interfaces that are vports, by index.
    pub vports: Vec<String>,
    /// Where forwarding guests connect.
    pub routes_socket: PathBuf,
    /// Where pdpd connects.
    pub control_socket: PathBuf,
    /// Routes the vrouter may hold; more are not passed on, counted, and shown in the status.
    pub routes_max: u64,
    /// Bytes of notifications that the kernel is asked to keep for the mirror. It keeps twice as many,
    /// charged to nobody's cgroup, and reports what it loses.
    pub receive_bytes: u64,
    /// What becomes of frames that the kernel may treat otherwise than guests do.
    #[serde(default)]
    pub hooks: HookPolicy,
}

/// What becomes of frames that hooks of the control guest's kernel may treat otherwise than guests do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookPolicy {
    /// They are punted: the kernel decides.
    #[default]
    Strict,
    /// Guests forward them all the same.
    Ignore,
}

/// From pdpd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// How the mirror is.
    Status,
    /// Routes, as [`Reply::Routes`] in parts, then [`Reply::End`].
    Routes {
        /// Whose.
        source: Source,
        /// Only routes that cover or are inside this prefix.
        within: Option<IpNet>,
    },
}

/// Whose table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// The control guest's kernel, dumped anew.
    Kernel,
    /// Forwarding guest of this number.
    Guest(u32),
    /// Where kernel (dumped anew) and guest differ. The mirror repeats the comparison for the
    /// differing prefixes once all notifications up to then are applied, so that routes in change
    /// do not show as differences.
    Diff(u32),
}

/// Answer of the mirror.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// See [`Request::Status`].
    Status(Status),
    /// Some of the routes.
    Routes(Vec<RouteRow>),
    /// No more routes.
    End,
    /// The request could not be met.
    Failed {
        /// What, and what to do.
        error: String,
    },
}

/// One route of an answer. For a single table only `route` of that side is set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteRow {
    /// Destination.
    pub prefix: IpNet,
    /// In the kernel.
    pub kernel: Option<Resolved>,
    /// In the guest.
    pub guest: Option<Resolved>,
}

/// How a mirror is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// IPv4 routes in the mirror's copy of the kernel's main table.
    pub routes_v4: u64,
    /// IPv6 routes.
    pub routes_v6: u64,
    /// Groups of next hops in use.
    pub groups: u64,
    /// Neighbours with a known link address.
    pub neighbours: u64,
    /// Routes not passed on because of `routes_max`.
    pub routes_refused: u64,
    /// Notifications read from the kernel.
    pub notifications: u64,
    /// Full dumps after the first: after lost notifications, link events.
    pub resyncs: u64,
    /// Times the kernel said that notifications were lost (ENOBUFS).
    pub overruns: u64,
    /// Every notification was read, no dump runs or is due, and every guest has applied all that it
    /// was sent: what was in the kernel when the request was sent is in the guests. (A reply can
    /// follow a look at the kernel just before the request; the next one cannot.)
    #[serde(default)]
    pub settled: bool,
    /// What hooks into the kernel's forwarding, in words of `ip`, `nft` and `tc`: names in it are the
    /// tenant's. At most [`HOOKS_MAX`], and one that counts the rest.
    #[serde(default)]
    pub hooks: Vec<String>,
    /// Forwarding guests connected.
    pub guests: Vec<GuestStatus>,
}

/// Hooks that are told one by one.
pub const HOOKS_MAX: usize = 16;

/// Bytes of the words for a hook.
pub const HOOK_BYTES_MAX: usize = 160;

/// Words for a hook without control characters, cut at [`HOOK_BYTES_MAX`].
pub fn hook_words(words: &str) -> String {
    let mut bytes = 0;
    let letters = words.chars().filter(|letter| !letter.is_control());
    letters
        .take_while(|letter| {
            bytes += letter.len_utf8();
            bytes <= HOOK_BYTES_MAX
        })
        .collect()
}

/// How one forwarding guest's copy is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// Number of the guest in its vrouter.
    pub guest: u32,
    /// Has the whole snapshot, and all changes up to the last barrier that was answered.
    pub synced: bool,
    /// Bytes waiting to be read by it.
    pub backlog_bytes: u64,
    /// From a notification's being read to the guest's having applied it, of the last barrier, µs.
    pub apply_us: u64,
    /// Largest such time since it connected, µs.
    pub apply_us_max: u64,
}
