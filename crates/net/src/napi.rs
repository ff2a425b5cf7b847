//! NAPI of a device, in softirq or in kernel threads.
//!
//! In softirq, whoever runs on that CPU does the work of a receiving device and is charged for it.
//! With threaded NAPI, each receive queue has a kernel thread, `napi/DEVICE-NUMBER`. It can be put
//! into a cgroup like any other thread: quota and weights apply, and the cgroup is charged for the
//! namespace's work on each frame.
//!
//! **Finding the thread.** The kernel reports by netdev's generic netlink which thread serves a
//! queue of an interface ([`queues`]). Names do not identify threads: guests name their devices
//! freely, and two namespaces may use the same name. Before Linux 6.8 the kernel does not report
//! threads, and PdP does not guess.
//!
//! **Limits.** A cgroup's weight applies to kernel threads on every kernel, and its account
//! includes their time. Its quota applies only before Linux 6.18. Newer kernels throttle a task
//! when it returns to user space, which a kernel thread never does (`nr_throttled` grows, but it
//! continues). So traffic for a vrouter has a CPU time budget that is checked before its threads
//! are woken ([`crate::ports::Ports::power`]).
//!
//! **Influence of guests.** A guest can take its end down and up, give it more queues, or
//! delete it. Then its threads end, and new ones start in the root cgroup. With a writable
//! sysfs it can turn threads off (netlink needs the machine's CAP_NET_ADMIN); from Linux 6.17
//! on, there are none then. Renaming the device only changes the name of future threads. There
//! are no notifications for these changes, except for the interface's flags (`RTM_NEWLINK`).
//! The rest is found by polling, which takes 0.1 ms.
//!
//! Limits: an end without NAPI (a veth with neither XDP program nor `gro on`, or one that is down)
//! has no queue here. [`QUEUES_MAX`].
//! Source: Linux Documentation/networking/napi.rst, Documentation/netlink/specs/netdev.yaml.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pdp_netlink::{Netlink, Request, attributes, u16_at, u32_at};
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, fsconfig_create, fsconfig_reconfigure,
    fsconfig_set_flag, fsmount, fsopen, fspick,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::{Error, NetContext, Result};
use crate::netns::within;

/// Most receive queues that are read from one device.
pub const QUEUES_MAX: usize = 256;

/// Generic netlink (linux/genetlink.h): the controller,
/// its request for a family, and their attributes.
const CONTROLLER: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// linux/netdev.h.
const NETDEV: &str = "netdev";
const NETDEV_CMD_NAPI_GET: u8 = 11;
const NETDEV_A_NAPI_IFINDEX: u16 = 1;
const NETDEV_A_NAPI_ID: u16 = 2;
const NETDEV_A_NAPI_PID: u16 = 4;

/// Header of generic netlink, bytes.
const GENERIC_BYTES: usize = 4;

/// PF_KTHREAD of linux/sched.h.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// NAPI of a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NapiQueue {
    /// NAPI id, unique on the machine while it exists.
    pub id: u32,
    /// Kernel thread that serves it, if it is threaded; thread id in the initial PID namespace.
    pub thread: Option<u32>,
}

/// True if the kernel reports the threads: from Linux 6.8 on.
pub fn has_thread_ids() -> bool {
    static TOLD: LazyLock<bool> =
        LazyLock::new(|| Netdev::open().and_then(|mut netdev| netdev.queues(1)).is_ok());
    *TOLD
}

/// Turns threaded NAPI on or off for all receive queues of a device in a namespace. The setting
/// survives taking the device down and up, and renaming it.
///
/// # Errors
/// There is no such device. It has no NAPI (EOPNOTSUPP): it must be up and have an XDP program, or
/// `gro on`. The kernel has no threaded NAPI (before Linux 5.12).
pub fn set_threaded(netns: BorrowedFd<'_>, device: &str, threaded: bool) -> Result<()> {
    within(netns, || {
        let sysfs = sysfs().on("open sysfs for", device)?;
        let set = || {
            let mut file = fs::File::from(attribute(&sysfs, device, OFlags::WRONLY)?);
            file.write_all(if threaded { b"1" } else { b"0" }).on("set the threads of", device)
        };
        match set() {
            // All mounts of a namespace's sysfs share one superblock, and a guest's mount is
            // read-only. That mount stays read-only.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                reconfigure(&sysfs, "rw").on("write to sysfs for", device)?;
                let done = set();
                let _ = reconfigure(&sysfs, "ro");
                done
            }
            done => done,
        }
    })
}

/// True if threaded NAPI is on for the device.
pub fn is_threaded(netns: BorrowedFd<'_>, device: &str) -> Result<bool> {
    within(netns, || {
        let sysfs = sysfs().on("open sysfs for", device)?;
        let file = fs::File::from(attribute(&sysfs, device, OFlags::RDONLY)?);
        let text = io::read_to_string(file).on("read the threads of", device)?;
        Ok(text.trim() != "0")
    })
}

/// Opens the sysfs of the thread's network namespace as a
/// detached mount. It disappears with the descriptor.
fn sysfs() -> rustix::io::Result<OwnedFd> {
    let new = fsopen("sysfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&new)?;
    fsmount(&new, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// Makes a file system writable (`rw`) for its writable mounts, or read-only (`ro`).
fn reconfigure(mount: &OwnedFd, access: &str) -> rustix::io::Result<()> {
    let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
    let picked = fspick(mount, c"", flags)?;
    fsconfig_set_flag(&picked, access)?;
    fsconfig_reconfigure(&picked)
}

/// Opens the attribute `threaded` of a device in a sysfs.
fn attribute(sysfs: &OwnedFd, device: &str, access: OFlags) -> Result<OwnedFd> {
    if matches!(device, "" | "." | "..") || device.contains('/') {
        return Err(Error::NoInterface(device.to_owned()));
    }
    let path = format!("class/net/{device}");
    openat(sysfs, &*path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|_| Error::NoInterface(device.to_owned()))?;
    let path = format!("{path}/threaded");
    openat(sysfs, &*path, access | OFlags::CLOEXEC, Mode::empty())
        .on("find threaded NAPI (Linux 5.12 or newer) of", device)
}

/// Returns the receive queues of an interface in a namespace, ordered
/// by id; none while it is down or has no NAPI.
///
/// # Errors
/// There is no such interface, or the kernel does not report queues (before Linux 6.8).
pub fn queues(netns: BorrowedFd<'_>, index: u32) -> Result<Vec<NapiQueue>> {
    within(netns, || {
        let queues = Netdev::open().and_then(|mut netdev| netdev.queues(index));
        queues.on("ask for the queues of interface", index)
    })
}

/// A NAPI kernel thread. Its handle distinguishes it from a later thread with the same id.
#[derive(Debug)]
pub struct NapiThread {
    /// Thread id.
    pub pid: u32,
    handle: OwnedFd,
}

impl NapiThread {
    /// True if the thread still runs. If so, its id has meant this thread until now.
    pub fn is_alive(&self) -> bool {
        let mut events = [PollFd::new(self.handle.as_fd(), PollFlags::POLLIN)];
        // Readable when it has ended.
        poll(&mut events, PollTimeout::ZERO) == Ok(0)
    }
}

/// Returns the kernel threads of an interface in a namespace, verified by their handles. To put one
/// into a cgroup, use its id and check [`NapiThread::is_alive`] afterwards.
///
/// # Errors
/// See [`queues`].
pub fn threads(netns: BorrowedFd<'_>, index: u32) -> Result<Vec<NapiThread>> {
    let handle = |pid: u32| {
        let number = pid.try_into().ok().and_then(Pid::from_raw)?;
        let handle = pidfd_open(number, PidfdFlags::empty()).ok()?;
        is_napi(pid).then_some(NapiThread { pid, handle })
    };
    let ask = || -> io::Result<Vec<NapiThread>> {
        let mut netdev = Netdev::open()?;
        let queues = netdev.queues(index)?;
        let found: Vec<_> = queues.iter().filter_map(|queue| handle(queue.thread?)).collect();
        // Ask again: the kernel no longer names a thread that ended before its
        // handle was opened, even if its id was reused.
        let again = if found.is_empty() { queues } else { netdev.queues(index)? };
        let is_named =
            |thread: &NapiThread| again.iter().any(|queue| queue.thread == Some(thread.pid));
        Ok(found.into_iter().filter(is_named).collect())
    };
    within(netns, || ask().on("ask for the threads of interface", index))
}

/// True if this is the id of a NAPI kernel thread.
fn is_napi(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // proc_pid_stat(5): the name may contain anything, and ends with the last parenthesis.
    let Some((name, rest)) = stat.rsplit_once(')') else { return false };
    let flags = rest.split_ascii_whitespace().nth(6).and_then(|flags| flags.parse::<u64>().ok());
    name.contains("(napi/") && flags.is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

/// Generic netlink socket in the thread's network namespace, and the id of the netdev family.
struct Netdev {
    netlink: Netlink,
    family: u16,
}

impl Netdev {
    fn open() -> io::Result<Self> {
        let mut netlink = Netlink::open(libc::NETLINK_GENERIC)?;
        let mut request = Request::new(CONTROLLER, 0, &[CTRL_CMD_GETFAMILY, 1, 0, 0]);
        request.text(CTRL_ATTR_FAMILY_NAME, NETDEV);
        let family = netlink.query(&mut request, |answer| {
            let mut all = attributes(answer.payload.get(GENERIC_BYTES..)?);
            all.find(|(kind, _)| *kind == CTRL_ATTR_FAMILY_ID).and_then(|(_, id)| u16_at(id, 0))
        });
        let family = family.ok().flatten().ok_or_else(|| {
            let text = "the kernel does not say which thread serves a queue: Linux 6.8 is needed";
            io::Error::new(io::ErrorKind::Unsupported, text)
        })?;
        Ok(Self { netlink, family })
    }

    fn queues(&mut self, index: u32) -> io::Result<Vec<NapiQueue>> {
        let mut request = Request::new(self.family, 0, &[NETDEV_CMD_NAPI_GET, 1, 0, 0]);
        request.number(NETDEV_A_NAPI_IFINDEX, index);
        let mut queues = self.netlink.list(&mut request, |answer| {
            let (mut id, mut thread) = (None, None);
            for (kind, value) in attributes(answer.payload.get(GENERIC_BYTES..)?) {
                match kind {
                    NETDEV_A_NAPI_ID => id = u32_at(value, 0),
                    NETDEV_A_NAPI_PID => thread = u32_at(value, 0).filter(|pid| *pid != 0),
                    _ => {}
                }
            }
            Some(NapiQueue { id: id?, thread })
        })?;
        queues.truncate(QUEUES_MAX);
        queues.sort();
        Ok(queues)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_process_is_not_a_napi_thread() {
        assert!(!is_napi(std::process::id()));
        assert!(!is_napi(1));
    }

    #[test]
    fn device_names_cannot_be_paths() {
        // Names are checked before anything is opened.
        let sysfs = std::fs::File::open("/sys").unwrap().into();
        for name in ["", ".", "..", "../lo", "lo/../lo"] {
            assert!(matches!(attribute(&sysfs, name, OFlags::RDONLY), Err(Error::NoInterface(_))));
        }
    }
}
