//! What each profile of guest may do: capabilities, system calls, sysctls, writable places.
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

/// Writable places of forwarding guests.
const WRITABLE_FORWARDING: &[Writable] =
    &[writable("/run", 4, "1777", false), writable("/tmp", 16, "1777", false)];

/// FRR and BIRD started directly; SYS_ADMIN is for FRR's network namespaces.
const CONTROL_CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
];

const HOST_CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
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
    ("net.ipv4.ping_group_range", "0 65535"),
];

const HOST_SYSCTLS: &[(&str, &str)] = &[
    ("net.ipv6.conf.all.accept_dad", "0"),
    ("net.ipv6.conf.default.accept_dad", "0"),
    ("net.ipv6.conf.all.keep_addr_on_down", "1"),
    ("net.ipv6.conf.default.keep_addr_on_down", "1"),
    ("net.ipv4.ping_group_range", "0 65535"),
];

/// What no guest needs and what has cost kernels most: loading code, keys, tracing, new mounts
/// through descriptors, io_uring.
const DENIED_SYSCALLS: &[&str] = &[
    "acct",
    "add_key",
    "bpf",
    "create_module",
    "delete_module",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "init_module",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "mount_setattr",
    "move_mount",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "personality",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "reboot",
    "request_key",
    "setns",
    "settimeofday",
    "swapoff",
    "swapon",
    "userfaultfd",
    "vhangup",
];

/// What a program needs that starts others, computes, keeps memory and time, and talks over Unix
/// sockets, memory files and TAPs. New namespaces, tracing, mounts and all of the above stay out.
const FORWARDING_SYSCALLS: &[&str] = &[
    "accept",
    "accept4",
    "access",
    "alarm",
    "arch_prctl",
    "bind",
    "brk",
    "capget",
    "capset",
    "chdir",
    "chmod",
    "clock_getres",
    "clock_gettime",
    "clock_nanosleep",
    "close",
    "close_range",
    "connect",
    "copy_file_range",
    "dup",
    "dup2",
    "dup3",
    "epoll_create",
    "epoll_create1",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_pwait2",
    "epoll_wait",
    "eventfd",
    "eventfd2",
    "execve",
    "execveat",
    "exit",
    "exit_group",
    "faccessat",
    "faccessat2",
    "fadvise64",
    "fallocate",
    "fchdir",
    "fchmod",
    "fchmodat",
    "fcntl",
    "fdatasync",
    "flock",
    "fork",
    "fstat",
    "fstatfs",
    "fsync",
    "ftruncate",
    "futex",
    "futex_waitv",
    "get_mempolicy",
    "get_robust_list",
    "getcpu",
    "getcwd",
    "getdents",
    "getdents64",
    "getegid",
    "geteuid",
    "getgid",
    "getgroups",
    "getitimer",
    "getpeername",
    "getpgid",
    "getpgrp",
    "getpid",
    "getppid",
    "getpriority",
    "getrandom",
    "getresgid",
    "getresuid",
    "getrlimit",
    "getrusage",
    "getsid",
    "getsockname",
    "getsockopt",
    "gettid",
    "gettimeofday",
    "getuid",
    "inotify_add_watch",
    "inotify_init",
    "inotify_init1",
    "inotify_rm_watch",
    "ioctl",
    "kill",
    "link",
    "linkat",
    "listen",
    "lseek",
    "lstat",
    "madvise",
    "mbind",
    "membarrier",
    "memfd_create",
    "mincore",
    "mkdir",
    "mkdirat",
    "mlock",
    "mlock2",
    "mlockall",
    "mmap",
    "mprotect",
    "mremap",
    "msync",
    "munlock",
    "munlockall",
    "munmap",
    "nanosleep",
    "newfstatat",
    "open",
    "openat",
    "openat2",
    "pause",
    "pidfd_open",
    "pidfd_send_signal",
    "pipe",
    "pipe2",
    "poll",
    "ppoll",
    "prctl",
    "pread64",
    "preadv",
    "preadv2",
    "prlimit64",
    "pselect6",
    "pwrite64",
    "pwritev",
    "pwritev2",
    "read",
    "readahead",
    "readlink",
    "readlinkat",
    "readv",
    "recvfrom",
    "recvmmsg",
    "recvmsg",
    "rename",
    "renameat",
    "renameat2",
    "restart_syscall",
    "rmdir",
    "rseq",
    "rt_sigaction",
    "rt_sigpending",
    "rt_sigprocmask",
    "rt_sigqueueinfo",
    "rt_sigreturn",
    "rt_sigsuspend",
    "rt_sigtimedwait",
    "rt_tgsigqueueinfo",
    "sched_get_priority_max",
    "sched_get_priority_min",
    "sched_getaffinity",
    "sched_getattr",
    "sched_getparam",
    "sched_getscheduler",
    "sched_setaffinity",
    "sched_yield",
    "select",
    "sendfile",
    "sendmmsg",
    "sendmsg",
    "sendto",
    "set_mempolicy",
    "set_robust_list",
    "set_tid_address",
    "setgid",
    "setgroups",
    "setitimer",
    "setpgid",
    "setpriority",
    "setresgid",
    "setresuid",
    "setrlimit",
    "setsid",
    "setsockopt",
    "setuid",
    "shutdown",
    "sigaltstack",
    "signalfd",
    "signalfd4",
    "socket",
    "socketpair",
    "splice",
    "stat",
    "statfs",
    "statx",
    "symlink",
    "symlinkat",
    "sysinfo",
    "tee",
    "tgkill",
    "time",
    "timer_create",
    "timer_delete",
    "timer_getoverrun",
    "timer_gettime",
    "timer_settime",
    "timerfd_create",
    "timerfd_gettime",
    "timerfd_settime",
    "times",
    "tkill",
    "truncate",
    "umask",
    "uname",
    "unlink",
    "unlinkat",
    "utimensat",
    "vfork",
    "wait4",
    "waitid",
    "write",
    "writev",
];

/// Flags of clone(2) that make namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER,
/// NEWPID, NEWNET.
const CLONE_NAMESPACES: u64 = 0x7E02_0000;

const EPERM: u32 = libc::EPERM as u32;
const ENOSYS: u32 = libc::ENOSYS as u32;

impl Profile {
    pub(crate) fn capabilities(self) -> &'static [&'static str] {
        match self {
            Self::Control => CONTROL_CAPABILITIES,
            Self::Host => HOST_CAPABILITIES,
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

    pub(crate) fn is_forwarding(self) -> bool {
        matches!(self, Self::Forwarding { .. })
    }

    /// The `linux.seccomp` of the bundle.
    pub(crate) fn seccomp(self) -> serde_json::Value {
        let architectures = ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"];
        if !self.is_forwarding() {
            return serde_json::json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": architectures,
                "syscalls": [
                    { "names": DENIED_SYSCALLS, "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM },
                ],
            });
        }
        serde_json::json!({
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": EPERM,
            "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [
                { "names": FORWARDING_SYSCALLS, "action": "SCMP_ACT_ALLOW" },
                { "names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [
                    { "index": 0, "value": CLONE_NAMESPACES, "valueTwo": 0,
                      "op": "SCMP_CMP_MASKED_EQ" },
                ] },
                // The C library falls back to clone(2), whose flags can be looked at, for ENOSYS.
                { "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS },
            ],
        })
    }
}
