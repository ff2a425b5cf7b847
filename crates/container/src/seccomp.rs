//! The system calls that each guest profile may make, as lists of permitted calls. All other calls
//! fail with EPERM; calls newer than the lists fail with ENOSYS (by the OCI runtime).
//!
//! Source: Docker's default profile, moby/profiles, `seccomp/v0.2.3` (`seccomp/default.json`,
//! Apache License 2.0). [`CONTAINERS`] has the names that it permits unconditionally and that
//! x86-64 has. Of the calls that it permits conditionally, only those named in the lists of
//! additions are taken over. `ptrace`, `process_vm_readv`, `personality` and `modify_ldt` are left
//! out, since no guest needs them. So are the calls permitted with CAP_SYS_ADMIN (mounts,
//! namespaces, `bpf`, `perf_event_open`, …). FRR needs that capability to start, but has nothing to
//! use it on.
//!
//! Only x86-64: a call through the 32-bit or x32 interface ends the process. Docker's profile
//! permits both, but its checks of arguments do not work there (`socketcall`).

use serde_json::{Value, json};

use crate::spec::Profile;

/// Calls that containers need, according to the source.
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

/// Calls of the source that no guest may make.
const REMOVED: &[&str] = &[
    // The machine has one limit of asynchronous requests for all processes (fs.aio-max-nr), and the
    // mux needs some.
    "io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit",
    // They write all of the machine's file systems to disk. A guest has no file there.
    "sync syncfs",
    // Memory that the kernel can neither move nor write out.
    "memfd_secret",
    // On x86-64 only the names exist.
    "epoll_ctl_old epoll_wait_old",
];

/// Calls that all guests may make in addition.
const ADDED: &[&str] = &[
    // Thread-local storage. The source permits it under a condition that x86-64 meets.
    "arch_prctl",
];

/// Calls that control guests and hosts may make in addition.
const ADDED_OF_MACHINES: &[&str] = &[
    // For servers that confine themselves. The source permits it with CAP_SYS_CHROOT.
    "chroot",
];

/// Calls that a `privileged` control guest or host may make in addition: mounts and namespaces of
/// its own, in its own user namespace.
const ADDED_PRIVILEGED: &[&str] = &[
    "fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree umount2",
    "clone clone3 pivot_root setdomainname sethostname setns unshare",
];

/// Calls that forwarding guests may not make. Their programs compute, start others, manage memory
/// and time, and use Unix sockets, memory files and TAPs. They share memory with the mux, which
/// must not wait for them.
const REMOVED_FORWARDING: &[&str] = &[
    // Punches holes into memory. If the mux touches such memory, it sleeps until the call is done.
    "fallocate",
    // The same by advice: see `ADVICE`.
    "madvise",
    // Memory and queues of System V and POSIX. Its IPC namespace has no other process.
    "mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink",
    "msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget",
    // Owners, attributes and special files. Its only files are in memory.
    "chown fchown fchownat lchown futimesat utime utimes mknod mknodat",
    "fgetxattr flistxattr fremovexattr fsetxattr getxattr getxattrat lgetxattr listxattr",
    "listxattrat llistxattr lremovexattr lsetxattr removexattr removexattrat setxattr setxattrat",
    "fanotify_mark listmount name_to_handle_at statmount sync_file_range",
    // Other users than its own.
    "setfsgid setfsuid setregid setreuid",
    // Clocks, and scheduling parameters.
    "adjtimex clock_adjtime ioprio_get ioprio_set sched_rr_get_interval sched_setattr",
    "sched_setparam sched_setscheduler",
    // Calls for memory and threads that no program was seen to use.
    "cachestat get_thread_area pkey_alloc pkey_free pkey_mprotect process_mrelease",
    "remap_file_pages set_thread_area vmsplice",
    // Filters of its own.
    "landlock_add_rule landlock_create_ruleset landlock_restrict_self seccomp",
];

/// Calls that forwarding guests may make in addition.
const ADDED_FORWARDING: &[&str] = &[
    // For libnuma, and with it DPDK. Not `mbind`: its policy would apply to the mux, too.
    "get_mempolicy set_mempolicy",
];

/// Advice of madvise(2) that forwarding guests may give: hints, and changes of only the caller's
/// own page tables. Excluded are MADV_REMOVE (a hole), MADV_PAGEOUT, MADV_COLD and MADV_COLLAPSE
/// (they take pages away that the mux then waits for), and MADV_MERGEABLE. It is a list of
/// permitted values because the kernel uses the lower 32 bits of the argument and the filter
/// compares all bits.
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

/// Socket families that belong to a network namespace and that routers and hosts use. The source
/// permits all but AF_ALG and AF_VSOCK, which leads out of the machine. Each kernel adds more such
/// families.
const FAMILIES: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_PACKET];

/// Netlink protocols without `privileged`: those of routing software, firewalls and the tools of
/// hosts. Excluded are NETLINK_XFRM (and with it the kernel's IPsec) and all protocols about the
/// machine. XFRM policies take 1 KiB each that the kernel charges to nobody.
const NETLINK: &[i32] = &[
    libc::NETLINK_ROUTE,
    libc::NETLINK_SOCK_DIAG,
    libc::NETLINK_AUDIT,
    libc::NETLINK_NETFILTER,
    libc::NETLINK_KOBJECT_UEVENT,
    libc::NETLINK_GENERIC,
];

/// Levels of setsockopt(2) without rings of packet sockets: all levels of the families above. It is
/// a list of permitted values, for the reason given at [`ADVICE`].
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

/// Some C libraries lack it: linux/socket.h.
const SOL_MPTCP: i32 = 284;

/// Options of packet sockets (linux/if_packet.h) without rings: all up to PACKET_VNET_HDR_SZ except
/// PACKET_RX_RING and PACKET_TX_RING. One call allocates up to 4 GiB for a ring, which the kernel
/// charges to nobody.
const PACKET_OPTIONS: std::ops::RangeInclusive<i32> = 1..=24;
const PACKET_RINGS: [i32; 2] = [libc::PACKET_RX_RING, libc::PACKET_TX_RING];

/// Flags of clone(2) that make namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER,
/// NEWPID, NEWNET.
const CLONE_NAMESPACES: u64 = 0x7E02_0000;

const EPERM: u32 = libc::EPERM as u32;
const ENOSYS: u32 = libc::ENOSYS as u32;

/// Returns the calls that a profile permits with any arguments.
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

/// Returns the `linux.seccomp` of a bundle.
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
        // On ENOSYS the C library falls back to clone(2), whose flags the filter can check.
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

    /// Calls that lead out of a guest, or to resources that all share.
    const NEVER: &str = "add_key bpf delete_module finit_module init_module io_setup io_uring_enter \
        io_uring_register io_uring_setup kcmp kexec_load keyctl mbind migrate_pages move_pages \
        open_by_handle_at perf_event_open personality pidfd_getfd process_madvise \
        process_vm_readv process_vm_writev ptrace quotactl reboot request_key settimeofday swapon \
        sync syslog userfaultfd";

    const MOUNTS_AND_NAMESPACES: &str = "clone clone3 fsconfig fsmount fsopen mount mount_setattr \
        move_mount open_tree pivot_root setns umount2 unshare";

    #[test]
    fn syscall_changes_differ_from_the_source_list() {
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
    fn profiles_forbid_escape_syscalls() {
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
                // Permitted only with a check of its arguments.
                assert!(!names.contains(&"socket"), "{profile:?}");
            }
        }
    }
}
