//! The system calls that each profile of guest may make, as lists of what is allowed: whatever is
//! not named fails with EPERM, and what is newer than the lists with ENOSYS (the OCI runtime's
//! doing).
//!
//! Source: Docker's default profile, moby/profiles, `seccomp/v0.2.3` (`seccomp/default.json`, Apache
//! License 2.0). [`CONTAINERS`] has the names that it allows without a condition and that x86-64
//! has. Of what it allows by condition nothing is taken over but what the lists of additions name:
//! so neither `ptrace`, `process_vm_readv`, `personality` and `modify_ldt`, which no guest needs, nor what it
//! allows with CAP_SYS_ADMIN (mounts, namespaces, `bpf`, `perf_event_open`, …), a capability that
//! FRR wants to start with and then has nothing to use on.
//!
//! x86-64 alone: a call by way of the 32-bit or x32 interface ends the process. Docker's profile
//! has both, but its looks at arguments do not hold there (`socketcall`).

use serde_json::{Value, json};

use crate::spec::Profile;

/// What containers need, by the source.
const CONTAINERS: &str = "\
    accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown \
    clock_adjtime clock_getres clock_gettime clock_nanosleep close close_range connect \
    copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old \
    epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit \
    exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod fchmodat \
    fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr \
    fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv futex_wake \
    futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid \
    getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom \
    getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday \
    getuid getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch \
    io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit ioctl ioprio_get ioprio_set \
    kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link \
    linkat listen listmount listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat \
    madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod \
    mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify mq_open mq_timedreceive \
    mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall \
    munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause pidfd_open \
    pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 \
    preadv preadv2 prlimit64 process_mrelease pselect6 pwrite64 pwritev pwritev2 read readahead \
    readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr removexattrat \
    rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask \
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo \
    sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam \
    sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam \
    sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg \
    sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid \
    setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid \
    setsockopt setuid setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd \
    signalfd4 socketpair splice stat statfs statmount statx symlink symlinkat sync sync_file_range \
    syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime \
    timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname \
    unlink unlinkat uretprobe utime utimensat utimes vfork vmsplice wait4 waitid write writev";

/// Of those, what no guest may call.
const REMOVED: &[&str] = &[
    // The machine has one number of asynchronous requests for all (fs.aio-max-nr), and the mux
    // needs some.
    "io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit",
    // Write all of the machine's file systems to disk; a guest has no file there.
    "sync syncfs",
    // Memory that the kernel can neither move nor write out.
    "memfd_secret",
    // Never existed on x86-64 but by name.
    "epoll_ctl_old epoll_wait_old",
];

/// What all may call beside them.
const ADDED: &[&str] = &[
    // Thread-local storage; a condition of the source that x86-64 fulfils.
    "arch_prctl",
];

/// System calls that control guests and hosts may make too.
const ADDED_OF_MACHINES: &[&str] = &[
    // Servers that lock themselves in; a condition of the source (CAP_SYS_CHROOT).
    "chroot",
];

/// What a `privileged` control guest or host may call beside them: mounts and namespaces of its
/// own, in its own user namespace.
const ADDED_PRIVILEGED: &[&str] = &[
    "fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree umount2",
    "clone clone3 pivot_root setdomainname sethostname setns unshare",
];

/// What forwarding guests may not call. They need what a program needs that computes, starts others,
/// keeps memory and time, and talks over Unix sockets, memory files and TAPs; and they share memory
/// with the mux, which must not wait for them.
const REMOVED_FORWARDING: &[&str] = &[
    // Punches holes into memory: the mux, touching it, sleeps until that is done.
    "fallocate",
    // Also by advice: see `ADVICE`.
    "madvise",
    // Memory and queues of System V and POSIX. Nobody else is in its IPC namespace.
    "mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink",
    "msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget",
    // Owners, attributes and special files: it has no files but some in memory.
    "chown fchown fchownat lchown futimesat utime utimes mknod mknodat",
    "fgetxattr flistxattr fremovexattr fsetxattr getxattr getxattrat lgetxattr listxattr",
    "listxattrat llistxattr lremovexattr lsetxattr removexattr removexattrat setxattr setxattrat",
    "fanotify_mark listmount name_to_handle_at statmount sync_file_range",
    // Other users than its own.
    "setfsgid setfsuid setregid setreuid",
    // Clocks, and how it is scheduled.
    "adjtimex clock_adjtime ioprio_get ioprio_set sched_rr_get_interval sched_setattr",
    "sched_setparam sched_setscheduler",
    // Ways with memory and threads that nobody was seen to use.
    "cachestat get_thread_area pkey_alloc pkey_free pkey_mprotect process_mrelease",
    "remap_file_pages set_thread_area vmsplice",
    // Filters of its own.
    "landlock_add_rule landlock_create_ruleset landlock_restrict_self seccomp",
];

/// What forwarding guests may call beside.
const ADDED_FORWARDING: &[&str] = &[
    // libnuma, and with it DPDK. Not `mbind`: its policy would hold for the mux, too.
    "get_mempolicy set_mempolicy",
];

/// Advice of madvise(2) that forwarding guests may give: hints, and what changes the caller's own
/// page tables alone. Not MADV_REMOVE (a hole), MADV_PAGEOUT, MADV_COLD and MADV_COLLAPSE (take
/// pages away that the mux then waits for) and MADV_MERGEABLE. A list of what is allowed, since the
/// kernel looks at the lower 32 bits of the argument and the filter at all.
const ADVICE: &[i32] = &[
    libc::MADV_NORMAL,
    libc::MADV_RANDOM,
    libc::MADV_SEQUENTIAL,
    libc::MADV_WILLNEED,
    libc::MADV_DONTNEED,
    libc::MADV_FREE,
    libc::MADV_DONTFORK,
    libc::MADV_DOFORK,
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
    libc::MADV_DONTDUMP,
    libc::MADV_DODUMP,
    libc::MADV_WIPEONFORK,
    libc::MADV_KEEPONFORK,
    libc::MADV_POPULATE_READ,
    libc::MADV_POPULATE_WRITE,
];

/// Families of sockets: those that belong to a network namespace and that routers and hosts speak.
/// The source has all but AF_ALG and AF_VSOCK, which leads out of the machine; others like these
/// come with each kernel.
const FAMILIES: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_PACKET];

/// Protocols of netlink, without `privileged`: those of routing software, firewalls and the tools of hosts.
/// Not NETLINK_XFRM (and with it IPsec of the kernel), whose policies take 1 KiB each that the kernel charges
/// to nobody, and none that is about the machine.
const NETLINK: &[i32] = &[
    libc::NETLINK_ROUTE,
    libc::NETLINK_SOCK_DIAG,
    libc::NETLINK_AUDIT,
    libc::NETLINK_NETFILTER,
    libc::NETLINK_KOBJECT_UEVENT,
    libc::NETLINK_GENERIC,
];

/// Levels of setsockopt(2), without rings of packet sockets: all that the families above have. A list of what is
/// allowed, as with [`ADVICE`].
const LEVELS: &[i32] = &[
    libc::SOL_SOCKET,
    libc::IPPROTO_IP,
    libc::IPPROTO_TCP,
    libc::IPPROTO_UDP,
    libc::IPPROTO_UDPLITE,
    libc::IPPROTO_IPV6,
    libc::IPPROTO_ICMPV6,
    libc::IPPROTO_SCTP,
    libc::IPPROTO_RAW,
    libc::SOL_NETLINK,
    libc::SOL_TLS,
    SOL_MPTCP,
];

/// Not in every C library's headers: linux/socket.h.
const SOL_MPTCP: i32 = 284;

/// Options of packet sockets (linux/if_packet.h) without rings: all up to PACKET_VNET_HDR_SZ but
/// PACKET_RX_RING and PACKET_TX_RING. One call takes up to 4 GiB for a ring, which the kernel charges to nobody.
const PACKET_OPTIONS: std::ops::RangeInclusive<i32> = 1..=24;
const PACKET_RINGS: [i32; 2] = [libc::PACKET_RX_RING, libc::PACKET_TX_RING];

/// Flags of clone(2) that make namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER,
/// NEWPID, NEWNET.
const CLONE_NAMESPACES: u64 = 0x7E02_0000;

const EPERM: u32 = libc::EPERM as u32;
const ENOSYS: u32 = libc::ENOSYS as u32;

/// The names of a profile that are allowed whatever their arguments.
fn allowed(profile: Profile, privileged: bool) -> Vec<&'static str> {
    let (removed, added): (&[&str], &[&str]) = match profile {
        Profile::Control | Profile::Host => (&[], ADDED_OF_MACHINES),
        Profile::Forwarding { .. } => (REMOVED_FORWARDING, ADDED_FORWARDING),
    };
    let privileged = if privileged { ADDED_PRIVILEGED } else { &[] };
    let removed: Vec<_> = words(&[REMOVED, removed]).collect();
    let of_source = CONTAINERS.split_whitespace().filter(|name| !removed.contains(name));
    let mut names: Vec<_> = of_source.chain(words(&[ADDED, added, privileged])).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn words(lists: &[&'static [&'static str]]) -> impl Iterator<Item = &'static str> {
    let lines: Vec<&'static str> = lists.concat();
    lines.into_iter().flat_map(str::split_whitespace)
}

/// The `linux.seccomp` of a bundle.
pub(crate) fn filter(profile: Profile, privileged: bool, packet_rings: bool) -> Value {
    let mut names = allowed(profile, privileged);
    names.retain(|name| packet_rings || *name != "setsockopt");
    let mut calls = vec![allow(&names)];
    let mut allow_if = |name: &str, arguments: &[(u32, i32)]| {
        let equal = |(index, value): &(u32, i32)| json!({ "index": index, "value": value, "op": "SCMP_CMP_EQ" });
        let arguments: Vec<_> = arguments.iter().map(equal).collect();
        calls.push(json!({ "names": [name], "action": "SCMP_ACT_ALLOW", "args": arguments }));
    };
    FAMILIES.iter().for_each(|&family| allow_if("socket", &[(0, family)]));
    match privileged {
        true => allow_if("socket", &[(0, libc::AF_NETLINK)]),
        false => NETLINK.iter().for_each(|&protocol| {
            allow_if("socket", &[(0, libc::AF_NETLINK), (2, protocol)]);
        }),
    }
    if !packet_rings {
        LEVELS.iter().for_each(|&level| allow_if("setsockopt", &[(1, level)]));
        let options = PACKET_OPTIONS.filter(|option| !PACKET_RINGS.contains(option));
        options.for_each(|option| allow_if("setsockopt", &[(1, libc::SOL_PACKET), (2, option)]));
    }
    if profile.is_forwarding() {
        ADVICE.iter().for_each(|&advice| allow_if("madvise", &[(2, advice)]));
    }
    if !privileged {
        calls.push(json!({ "names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [
            { "index": 0, "value": CLONE_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ" },
        ] }));
        // The C library falls back to clone(2), whose flags can be looked at, for ENOSYS.
        calls.push(json!({
            "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS,
        }));
    }
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": calls,
    })
}

fn allow(names: &[&str]) -> Value {
    json!({ "names": names, "action": "SCMP_ACT_ALLOW" })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What opens a way out of a guest, or to what all share.
    const NEVER: &str = "add_key bpf delete_module finit_module init_module io_setup io_uring_enter \
        io_uring_register io_uring_setup kcmp kexec_load keyctl mbind migrate_pages move_pages \
        open_by_handle_at perf_event_open personality pidfd_getfd process_madvise \
        process_vm_readv process_vm_writev ptrace quotactl reboot request_key settimeofday swapon \
        sync syslog userfaultfd";

    const MOUNTS_AND_NAMESPACES: &str = "clone clone3 fsconfig fsmount fsopen mount mount_setattr \
        move_mount open_tree pivot_root setns umount2 unshare";

    #[test]
    fn differences_from_the_source_are_differences() {
        let source: Vec<_> = CONTAINERS.split_whitespace().collect();
        for removed in words(&[REMOVED, REMOVED_FORWARDING]) {
            assert!(source.contains(&removed), "{removed} is not in the source");
        }
        for added in words(&[ADDED, ADDED_OF_MACHINES, ADDED_PRIVILEGED, ADDED_FORWARDING]) {
            assert!(!source.contains(&added), "{added} is in the source");
        }
        let mut names: Vec<_> = words(&[REMOVED, REMOVED_FORWARDING]).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "one is removed twice");
    }

    #[test]
    fn nobody_may_call_what_leads_out() {
        let forwarding = [true, false].map(|tap| Profile::Forwarding { tap });
        for profile in [Profile::Control, Profile::Host].into_iter().chain(forwarding) {
            for privileged in [false, true] {
                let names = allowed(profile, privileged);
                for name in NEVER.split_whitespace() {
                    assert!(!names.contains(&name), "{profile:?} {privileged}: {name}");
                }
                for name in MOUNTS_AND_NAMESPACES.split_whitespace() {
                    assert_eq!(names.contains(&name), privileged, "{profile:?}: {name}");
                }
                for name in ["fallocate", "madvise", "shmget", "chown"] {
                    assert_eq!(names.contains(&name), !profile.is_forwarding(), "{name}");
                }
                assert_eq!(names.contains(&"chroot"), !profile.is_forwarding(), "{profile:?}");
                // Never without a look at its arguments.
                assert!(!names.contains(&"socket"), "{profile:?}");
            }
        }
    }
}
