//! Control of a route mirror by pdpd, and the mirror's configuration file.

use std::path::PathBuf;

use ipnet::IpNet;
use pdp_model::RouteStats;
use serde::{Deserialize, Serialize};

use crate::routes::ResolvedRoute;

/// Version of this protocol, and of the configuration file.
pub const VERSION: u32 = 2;

/// Configuration file of a mirror (JSON).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorConfig {
    /// Network namespace of the control guest, e.g. `/proc/123/ns/net`.
    pub netns: PathBuf,
    /// User namespace that owns the network namespace; joined after the netlink sockets are open.
    pub userns: Option<PathBuf>,
    /// Names of the control guest's interfaces that are vports, by index.
    pub vports: Vec<String>,
    /// Socket that forwarding guests connect to.
    pub routes_socket: PathBuf,
    /// Socket that pdpd connects to.
    pub control_socket: PathBuf,
    /// Most routes that the vrouter may have. Further routes are not passed
    /// on; they are counted and shown in the status.
    pub routes_max: u64,
    /// Receive buffer for the kernel's notifications, bytes. The kernel allocates twice as many,
    /// charges no cgroup for them, and reports losses.
    pub receive_bytes: u64,
    /// Treatment of frames that the kernel may handle differently than guests do.
    #[serde(default)]
    pub hooks: HookPolicy,
}

/// Treatment of frames that hooks of the control guest's
/// kernel may handle differently than guests do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookPolicy {
    /// Punt them: the kernel decides.
    #[default]
    Strict,
    /// Let guests forward them anyway.
    Ignore,
}

/// Request from pdpd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MirrorRequest {
    /// Status of the mirror.
    Status,
    /// Routes, as [`MirrorReply::Routes`] in parts, then [`MirrorReply::End`].
    Routes {
        /// Table to return.
        source: TableSource,
        /// Only routes that cover or are inside this prefix.
        within: Option<IpNet>,
    },
}

/// Table that a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TableSource {
    /// The control guest's kernel, dumped anew.
    Kernel,
    /// Forwarding guest of this number.
    Guest(u32),
    /// Differences between the kernel (dumped anew) and a guest. The mirror compares
    /// differing prefixes again once all earlier notifications are applied, so that
    /// routes in transition do not show as differences.
    Diff(u32),
}

/// Reply of the mirror.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MirrorReply {
    /// See [`MirrorRequest::Status`].
    Status(MirrorStatusReply),
    /// Some of the routes.
    Routes(Vec<MirrorRoute>),
    /// End of the routes.
    End,
    /// The request failed.
    Failed {
        /// Cause, and what to do.
        error: String,
    },
}

/// One route of a reply. For a single table, only that side is set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorRoute {
    /// Destination.
    pub prefix: IpNet,
    /// Route in the kernel.
    pub kernel: Option<ResolvedRoute>,
    /// Route in the guest.
    pub guest: Option<ResolvedRoute>,
}

/// Status of a mirror.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorStatusReply {
    /// Counters.
    #[serde(flatten)]
    pub stats: RouteStats,
    /// True if every notification was read, no dump runs or is due, and every guest has
    /// applied everything that it was sent. Then the guests have everything that the
    /// kernel had when the request was sent. (A reply may reflect a read of the kernel
    /// just before the request; the next reply cannot.)
    #[serde(default)]
    pub settled: bool,
    /// Hooks into the kernel's forwarding, in the notation of `ip`, `nft` and `tc`. Names in it are
    /// the tenant's. At most [`HOOKS_MAX`], plus one that counts the rest.
    #[serde(default)]
    pub hooks: Vec<String>,
}

/// Most hooks that are listed one by one.
pub const HOOKS_MAX: usize = 16;

/// Most bytes of a hook's description.
pub const HOOK_BYTES_MAX: usize = 160;

/// Returns a hook's description without control characters, cut at [`HOOK_BYTES_MAX`].
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
