//! Rights of each guest profile: capabilities, sysctls, writable places. [`crate::seccomp`] has the
//! system calls.
//!
//! Capabilities apply inside the guest's own user namespace. They give no rights on the host.

use crate::spec::Profile;

/// A place in memory that a guest may write to.
pub(crate) struct Writable {
    pub path: &'static str,
    /// Size limit, bytes. Its content is charged to the guest's memory limit.
    pub bytes_max: u64,
    pub mode: &'static str,
    /// True if it begins as a copy of the root's content there.
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

/// Writable places of control guests and hosts on an image, whose `/var` may be large.
const WRITABLE_IMAGE: &[Writable] = &[
    writable("/etc", 16, "755", true),
    writable("/run", 16, "755", true),
    writable("/tmp", 64, "1777", false),
    writable("/var/log", 64, "755", true),
    writable("/var/tmp", 16, "1777", false),
    writable("/root", 8, "700", false),
];

/// Memory file systems on an image that is writable everywhere. Their content is lost with each
/// start even there.
pub(crate) const WRITABLE_CHANGES: &[Writable] =
    &[writable("/run", 16, "755", true), writable("/tmp", 64, "1777", false)];

/// Writable places of forwarding guests.
const WRITABLE_FORWARDING: &[Writable] =
    &[writable("/run", 4, "1777", false), writable("/tmp", 16, "1777", false)];

/// Capabilities of control guests and hosts. Both run servers or routing software. Each capability
/// applies to objects of the guest's user namespace. The list of system calls excludes everything
/// beyond that ([`crate::seccomp`]).
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
    // FRR's zebra ends at once without it (it uses it for its network namespaces). No system call
    // that needs it is allowed: no mount, no namespace, no setns(2), no bpf(2).
    "CAP_SYS_ADMIN",
    // For servers that confine themselves, as sshd does for each login. The root is the guest's
    // own, and the guest has no descriptor of a directory outside.
    "CAP_SYS_CHROOT",
];

const TAP_CAPABILITIES: &[&str] = &["CAP_NET_ADMIN", "CAP_NET_RAW"];

/// Sysctls of routers. `default` holds for interfaces that come later. `all` is or-ed or overrides,
/// depending on the sysctl (ip-sysctl.rst).
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
    // PdP assigns the addresses of both ends of a vlink. There is nothing to detect, and addresses
    // are usable at once.
    ("net.ipv6.conf.all.accept_dad", "0"),
    ("net.ipv6.conf.default.accept_dad", "0"),
    // Like IPv4: addresses stay when a link goes down and up again.
    ("net.ipv6.conf.all.keep_addr_on_down", "1"),
    ("net.ipv6.conf.default.keep_addr_on_down", "1"),
    // Distribute flows over several next hops by addresses and ports, as the forwarding guests do.
    ("net.ipv4.fib_multipath_hash_policy", "1"),
    ("net.ipv6.fib_multipath_hash_policy", "1"),
    // All users of a node may use its ports below 1024, as in docker since 20.10. Programs of other
    // users than root have no capability for it (no new privileges).
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
    /// Capabilities do not depend on `privileged`; that permits system calls.
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

    /// Returns the directories that a guest may write to. Files may be put below them. `image`: the
    /// guest has a root of its own.
    pub fn writable_directories(self, image: bool) -> impl Iterator<Item = &'static str> {
        self.writable(image).iter().map(|place| place.path)
    }

    pub(crate) fn is_forwarding(self) -> bool {
        matches!(self, Self::Forwarding { .. })
    }
}
