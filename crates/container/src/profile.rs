//! What each profile of guest may do: capabilities, sysctls, writable places. The system calls are in
//! [`crate::seccomp`].
//!
//! Capabilities are those inside the guest's own user namespace; they say nothing on the host.

use crate::spec::Profile;

/// A place in memory that a guest may write to.
pub(crate) struct Writable {
    pub path: &'static str,
    /// Bound, charged to the guest's memory limit as it fills.
    pub bytes_max: u64,
    pub mode: &'static str,
    /// Begins as a copy of what the root has there.
    pub copy: bool,
}

const fn writable(path: &'static str, mib_max: u64, mode: &'static str, copy: bool) -> Writable {
    Writable { path, bytes_max: mib_max << 20, mode, copy }
}

/// Writable places of control guests and hosts.
const WRITABLE: &[Writable] = &[
    writable("/etc", 8, "755", true),
    writable("/run", 16, "755", true),
    writable("/tmp", 64, "1777", false),
    writable("/var", 64, "755", true),
    writable("/root", 8, "700", false),
];

/// The same over an image, whose `/var` may be large.
const WRITABLE_IMAGE: &[Writable] = &[
    writable("/etc", 16, "755", true),
    writable("/run", 16, "755", true),
    writable("/tmp", 64, "1777", false),
    writable("/var/log", 64, "755", true),
    writable("/var/tmp", 16, "1777", false),
    writable("/root", 8, "700", false),
];

/// The same over an image that can be written to everywhere: what is gone with a new start in it too.
pub(crate) const WRITABLE_CHANGES: &[Writable] =
    &[writable("/run", 16, "755", true), writable("/tmp", 64, "1777", false)];

/// Writable places of forwarding guests.
const WRITABLE_FORWARDING: &[Writable] =
    &[writable("/run", 4, "1777", false), writable("/tmp", 16, "1777", false)];

/// Control guests and hosts alike: a server or routing software runs in either. Each capability is over what belongs to
/// the guest's user namespace; what leads further is not in the list of system calls ([`crate::seccomp`]).
const CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
    // FRR's zebra ends at once without it (it is for its network namespaces). No system call that takes it is open:
    // no mount, no namespace, no setns(2), no bpf(2).
    "CAP_SYS_ADMIN",
    // Servers that lock themselves in, as sshd does for each login. The root is the guest's own, and it has no
    // descriptor of a directory outside.
    "CAP_SYS_CHROOT",
];

const TAP_CAPABILITIES: &[&str] = &["CAP_NET_ADMIN", "CAP_NET_RAW"];

/// Sysctls of routers. `default` holds for interfaces that come later; `all` is or-ed or
/// overrides, as each one's documentation says (ip-sysctl.rst).
const CONTROL_SYSCTLS: &[(&str, &str)] = &[
    ("net.ipv4.ip_forward", "1"),
    ("net.ipv6.conf.all.forwarding", "1"),
    ("net.ipv6.conf.default.forwarding", "1"),
    ("net.ipv4.conf.all.rp_filter", "0"),
    ("net.ipv4.conf.default.rp_filter", "0"),
    ("net.ipv4.conf.all.send_redirects", "0"),
    ("net.ipv4.conf.default.send_redirects", "0"),
    ("net.ipv4.conf.all.accept_redirects", "0"),
    ("net.ipv4.conf.default.accept_redirects", "0"),
    ("net.ipv6.conf.all.accept_redirects", "0"),
    ("net.ipv6.conf.default.accept_redirects", "0"),
    ("net.ipv6.conf.all.accept_ra", "0"),
    ("net.ipv6.conf.default.accept_ra", "0"),
    // vlinks have two ends, both given their addresses by us: nothing to detect, and addresses
    // are of use at once.
    ("net.ipv6.conf.all.accept_dad", "0"),
    ("net.ipv6.conf.default.accept_dad", "0"),
    // As IPv4 does: a link that goes down and up again has its addresses.
    ("net.ipv6.conf.all.keep_addr_on_down", "1"),
    ("net.ipv6.conf.default.keep_addr_on_down", "1"),
    // Flows by addresses and ports over several next hops, as the forwarding guests do.
    ("net.ipv4.fib_multipath_hash_policy", "1"),
    ("net.ipv6.fib_multipath_hash_policy", "1"),
    // A port below 1024 is a node's own, whoever of its users takes it: as docker has it since 20.10, since programs of
    // other users than root have no capability for it (no new privileges).
    ("net.ipv4.ip_unprivileged_port_start", "0"),
    ("net.ipv4.ping_group_range", "0 65535"),
];

const HOST_SYSCTLS: &[(&str, &str)] = &[
    ("net.ipv6.conf.all.accept_dad", "0"),
    ("net.ipv6.conf.default.accept_dad", "0"),
    ("net.ipv6.conf.all.keep_addr_on_down", "1"),
    ("net.ipv6.conf.default.keep_addr_on_down", "1"),
    ("net.ipv4.ip_unprivileged_port_start", "0"),
    ("net.ipv4.ping_group_range", "0 65535"),
];

impl Profile {
    /// With `privileged` or without: that opens system calls.
    pub(crate) fn capabilities(self) -> &'static [&'static str] {
        match self {
            Self::Control | Self::Host => CAPABILITIES,
            Self::Forwarding { tap: true } => TAP_CAPABILITIES,
            Self::Forwarding { tap: false } => &[],
        }
    }

    pub(crate) fn sysctls(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Control => CONTROL_SYSCTLS,
            Self::Host => HOST_SYSCTLS,
            Self::Forwarding { .. } => &[],
        }
    }

    pub(crate) fn writable(self, image: bool) -> &'static [Writable] {
        match (self, image) {
            (Self::Forwarding { .. }, _) => WRITABLE_FORWARDING,
            (_, true) => WRITABLE_IMAGE,
            (_, false) => WRITABLE,
        }
    }

    /// Directories that a guest may write to; files may be put into it below these. `image`: it has
    /// a root of its own.
    pub fn writable_places(self, image: bool) -> impl Iterator<Item = &'static str> {
        self.writable(image).iter().map(|place| place.path)
    }

    pub(crate) fn is_forwarding(self) -> bool {
        matches!(self, Self::Forwarding { .. })
    }
}
