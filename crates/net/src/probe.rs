//! Checks of the machine's facilities, for `pdp doctor`.
//!
//! Each facility is tried rather than guessed from versions. The probe uses a network and a mount
//! namespace of its own, which disappear with its thread.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit};
use pdp_afxdp::{Pool, XdpSocket, bind_socket, create_socket};
use pdp_netlink::{Request, error_code};
use serde::Serialize;

use crate::error::{NetContext, Result};
use crate::interface::InterfaceInfo;
use crate::limits::{self, NetlinkLimits};
use crate::netlink::{NEW, bring_up, link_header, routing};
use crate::netns::in_thread;
use crate::pins::is_bpf_fs;
use crate::ports::{self, LinkTarget, PortSpec, Ports};
use crate::shared;
use crate::sysctl;
use crate::tap::{self, TapSpec};
use crate::version::version;
use crate::xdp::{self, Xdp, XdpMode};

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Available.
    Ok,
    /// Available with a limit, or its absence has a cost.
    Warn,
    /// Missing, but needed.
    Missing,
}

/// Result of checking one facility.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FacilityCheck {
    /// The facility.
    pub name: &'static str,
    /// Result.
    pub level: Level,
    /// Finding, as text.
    pub detail: String,
    /// Package to install or step to take; empty if none.
    pub remedy: String,
}

/// Kinds of devices that users of PdP may need for their tunnels and tests.
const DEVICE_KINDS: &[&str] = &[
    "veth",
    "vxlan",
    "bridge",
    "macvlan",
    "vlan",
    "vrf",
    "dummy",
    "gretap",
    "ip6gretap",
    "geneve",
    "ifb",
    "wireguard",
];

/// Cgroup controllers that limits need.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];

/// The other end of a pair (linux/veth.h).
const VETH_INFO_PEER: u16 = 1;

/// Names of the probe's interfaces, in its own network namespace.
const DEVICES: [&str; 2] = ["probe0", "probe1"];

/// Packets of the pool for trying AF_XDP.
const POOL_PACKETS: usize = 64;

/// Runs all checks, in a network namespace of its own, within a few
/// seconds. Needs root, and reports its absence.
pub fn run() -> Vec<FacilityCheck> {
    let mut checks = vec![
        root(),
        kernel(),
        processor(),
        cgroups(),
        user_namespaces(),
        seccomp(),
        device_files(),
        runc(),
        program("frr", &["/usr/lib/frr/zebra"], "--version", false),
        program("bird", &["/usr/sbin/bird"], "--version", false),
        program("skopeo", &["/usr/bin/skopeo"], "--version", false),
        program("passt", &["/usr/bin/passt", "/usr/local/bin/passt"], "--version", false),
        bpf_fs(),
        locked_memory(),
        socket_memory(),
        connections(),
    ];
    let apart = in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).on("make", "namespaces")?;
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .on("make private", "the mounts")?;
        Ok(apart())
    });
    match apart {
        Ok(more) => checks.extend(more),
        Err(error) => checks.push(missing("network namespaces", text(&error), "run as root")),
    }
    checks
}

/// Runs the checks that need namespaces of the probe's own.
fn apart() -> Vec<FacilityCheck> {
    let mut checks = vec![devices(), tap(), mpls(), guest_bounds()];
    match veth() {
        Ok(()) => checks.extend([xdp(), af_xdp(), kernel_links()]),
        Err(error) => checks.push(missing("veth", text(&error), "enable CONFIG_VETH")),
    }
    checks
}

fn root() -> FacilityCheck {
    if nix::unistd::geteuid().is_root() {
        ok("root", "runs as root")
    } else {
        missing("root", "does not run as root", "run pdpd and pdp doctor as root")
    }
}

/// Id-mapped mounts (mount_setattr(2)) need Linux 5.12.
fn kernel() -> FacilityCheck {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    if version(&release) >= (5, 12) {
        ok("kernel", release.trim())
    } else {
        missing("kernel", release.trim(), "install Linux 5.12 or newer")
    }
}

/// `runc exec --cgroup` needs runc 1.1.
fn runc() -> FacilityCheck {
    let found = program("runc", &["/usr/sbin/runc", "/usr/bin/runc"], "--version", true);
    let found_version = found.detail.strip_prefix("runc version ").map(version);
    if found_version.is_some_and(|version| version < (1, 1)) {
        return missing("runc", found.detail, "install runc 1.1 or newer");
    }
    found
}

fn processor() -> FacilityCheck {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    if !std::is_x86_feature_detected!("popcnt") {
        return missing(
            "processor",
            "has no popcnt instruction",
            "use an x86-64 CPU of 2008 or later; in QEMU, -cpu max",
        );
    }
    match count {
        1 => warn("processor", "1 CPU, popcnt", "give the mux and the guests a CPU each"),
        _ => ok("processor", format!("{count} CPUs, popcnt")),
    }
}

fn cgroups() -> FacilityCheck {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let of_kind = |kind: &str| {
        let lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        lines.filter(|fields| fields.get(2) == Some(&kind)).collect::<Vec<_>>()
    };
    let first: Vec<_> = of_kind("cgroup");
    let in_first = |name: &&&str| {
        first.iter().any(|fields| fields.get(3).is_some_and(|o| o.split(',').any(|o| o == **name)))
    };
    let unified = of_kind("cgroup2");
    let (version, lacking): (_, Vec<_>) = if CONTROLLERS.iter().any(|name| in_first(&name)) {
        let version = if unified.is_empty() { "version 1" } else { "versions 1 and 2" };
        (version, CONTROLLERS.iter().filter(|name| !in_first(name)).collect())
    } else if let Some(place) = unified.first().and_then(|fields| fields.get(1)) {
        let file = Path::new(place).join("cgroup.controllers");
        let enabled = fs::read_to_string(file).unwrap_or_default();
        let has = |name: &&&str| enabled.split_ascii_whitespace().any(|word| word == **name);
        ("version 2", CONTROLLERS.iter().filter(|name| !has(name)).collect())
    } else {
        return missing("cgroups", "none mounted", "mount -t cgroup2 none /sys/fs/cgroup");
    };
    if lacking.is_empty() {
        return ok("cgroups", format!("{version} with {}", CONTROLLERS.join(", ")));
    }
    let names: Vec<_> = lacking.into_iter().copied().collect();
    let detail = format!("{version} without {}", names.join(", "));
    let remedy = format!("boot with cgroup_enable={}", names.join(","));
    missing("cgroups", detail, remedy)
}

fn user_namespaces() -> FacilityCheck {
    let file = "/proc/sys/user/max_user_namespaces";
    let count: u64 = read_number(file).unwrap_or(0);
    if count > 0 && Path::new("/proc/self/ns/user").exists() {
        ok("user namespaces", format!("up to {count}"))
    } else {
        missing("user namespaces", "none", "sysctl -w user.max_user_namespaces=10000")
    }
}

fn seccomp() -> FacilityCheck {
    if Path::new("/proc/sys/kernel/seccomp/actions_avail").exists() {
        ok("seccomp", "filters")
    } else {
        missing("seccomp", "no filters", "use a kernel with CONFIG_SECCOMP_FILTER")
    }
}

/// Every container sees these files of the machine's /dev, as a user other than root.
fn device_files() -> FacilityCheck {
    const FILES: [(&str, u64, u64); 6] = [
        ("null", 1, 3),
        ("zero", 1, 5),
        ("full", 1, 7),
        ("random", 1, 8),
        ("urandom", 1, 9),
        ("tty", 5, 0),
    ];
    let wrong = |(name, major, minor): &(&str, u64, u64)| {
        let path = format!("/dev/{name}");
        let remedy = format!("rm -f {path}; mknod -m 0666 {path} c {major} {minor}");
        let meta = match fs::metadata(&path) {
            Ok(meta) => meta,
            Err(error) => return Some((format!("{path}: {error}"), remedy)),
        };
        let device = meta.rdev();
        let is = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
        if !meta.file_type().is_char_device() || is != (*major, *minor) {
            return Some((format!("{path} is not the device {major}:{minor}"), remedy));
        }
        let mode = meta.permissions().mode() & 0o777;
        let fault = format!("{path} has mode {mode:04o}, not 0666");
        (mode & 0o666 != 0o666).then(|| (fault, format!("chmod 0666 {path}")))
    };
    let (found, remedies): (Vec<_>, Vec<_>) = FILES.iter().filter_map(wrong).unzip();
    if found.is_empty() {
        let names = FILES.map(|(name, ..)| name);
        return ok("device files", names.join(", "));
    }
    missing("device files", found.join("; "), remedies.join("; "))
}

/// Checks for a program at one of `places`, and reports the first line of its version output.
fn program(name: &'static str, places: &[&str], argument: &str, needed: bool) -> FacilityCheck {
    let remedy = match name {
        "bird" => "apt install bird2".to_owned(),
        name => format!("apt install {name}"),
    };
    let Some(place) = places.iter().find(|place| Path::new(place).exists()) else {
        let detail = format!("not in {}", places.join(", "));
        return match needed {
            true => missing(name, detail, remedy),
            false => warn(name, detail, format!("{remedy}, if vnets use it")),
        };
    };
    let output = Command::new(place).arg(argument).stdin(Stdio::null()).output();
    match output {
        Ok(output) => {
            // BIRD says its version on standard error.
            let all = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&all);
            ok(name, format!("{} at {place}", text.lines().next().unwrap_or("there").trim()))
        }
        Err(error) => missing(name, format!("{place}: {error}"), remedy),
    }
}

fn bpf_fs() -> FacilityCheck {
    let place = Path::new(xdp::BPF_FS);
    if is_bpf_fs(place) {
        ok("BPF file system", format!("at {}", xdp::BPF_FS))
    } else if place.exists() {
        let remedy = format!("pdpd mounts it; mount -t bpf bpf {}", xdp::BPF_FS);
        warn("BPF file system", "not mounted", remedy)
    } else {
        missing("BPF file system", "unknown", "use a kernel with CONFIG_BPF_SYSCALL")
    }
}

/// Packet pools beyond this limit need CAP_IPC_LOCK, which root usually has.
fn locked_memory() -> FacilityCheck {
    let Ok((soft, _)) = getrlimit(Resource::RLIMIT_MEMLOCK) else {
        return warn("locked memory", "unknown limit", "see ulimit -l");
    };
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    const IPC_LOCK: u64 = 1 << 14;
    if bits.unwrap_or(0) & IPC_LOCK != 0 {
        ok("locked memory", format!("limit {soft} bytes, which CAP_IPC_LOCK lifts"))
    } else {
        let detail = format!("{soft} bytes, without CAP_IPC_LOCK");
        warn("locked memory", detail, "raise LimitMEMLOCK= of pdpd, or keep the packet pool small")
    }
}

/// Limits on socket memory: one per guest, or a single one for all.
fn socket_memory() -> FacilityCheck {
    const NAME: &str = "socket memory";
    match shared::low_socket_memory() {
        Ok(low) if low.is_empty() => ok(NAME, "limited by cgroups only"),
        Ok(low) => {
            let names = low.join(" and ");
            let remedy =
                format!("pdpd raises them at its start; set {names} to all memory, in pages");
            warn(NAME, format!("{names}: one guest's sockets can use up the limit of all"), remedy)
        }
        Err(error) => warn(NAME, text(&error), "start pdpd in the machine's first namespaces"),
    }
}

/// Limits on tracked connections in each network namespace.
fn connections() -> FacilityCheck {
    const NAME: &str = "tracked connections";
    match shared::connections_max() {
        Ok(None) => ok(NAME, "no connections are tracked yet"),
        Ok(Some(most)) if most <= shared::CONNECTIONS_MAX => {
            ok(NAME, format!("{most} per namespace"))
        }
        Ok(Some(most)) => warn(
            NAME,
            format!("{most} per namespace, 1.6 KB each, not charged to guests"),
            format!("sysctl -w net.netfilter.nf_conntrack_max={}", shared::CONNECTIONS_MAX),
        ),
        Err(error) => warn(NAME, text(&error), "start pdpd in the machine's first namespaces"),
    }
}

/// Limits on guests' requests to the kernel, tried in a BPF file system of the probe's own.
fn guest_bounds() -> FacilityCheck {
    const NAME: &str = "guest bounds";
    let here = Path::new(xdp::BPF_FS);
    let pins = here.join("probe-limits");
    let tried = mount(Some("bpf"), here, Some("bpf"), MsFlags::empty(), None::<&str>)
        .on("mount a BPF file system at", xdp::BPF_FS)
        .and_then(|()| NetlinkLimits::open(&pins).map(drop));
    let _ = limits::destroy(&pins);
    match tried {
        Ok(()) => ok(NAME, "interfaces, and kernel time for them, are limited per tenant"),
        Err(error) => warn(
            NAME,
            text(&error),
            "use Linux 5.17 or newer with CONFIG_BPF_LSM, booted with bpf among lsm=; until then a guest with \
             CAP_NET_ADMIN can block interface changes of other tenants",
        ),
    }
}

/// Kinds of devices that the kernel has. Only veth is required, and has a check of its own.
fn devices() -> FacilityCheck {
    let has = |kind: &&&str| {
        let mut request = Request::new(libc::RTM_NEWLINK, NEW, &link_header(0, 0, 0));
        request.nested(libc::IFLA_LINKINFO, |info| _ = info.text(libc::IFLA_INFO_KIND, kind));
        // An unknown kind fails with EOPNOTSUPP. Other
        // errors mean that the request lacks parameters.
        routing().is_ok_and(|mut netlink| match netlink.change(&mut request) {
            Ok(()) => true,
            Err(error) => error_code(&error) != Some(libc::EOPNOTSUPP),
        })
    };
    let (present, lacking): (Vec<_>, Vec<_>) = DEVICE_KINDS.iter().partition(|kind| has(kind));
    let list = |kinds: Vec<&&str>| kinds.into_iter().copied().collect::<Vec<_>>().join(", ");
    let without = if lacking.is_empty() { "".into() } else { format!("; no {}", list(lacking)) };
    ok("devices", format!("{}{without}", list(present)))
}

fn mpls() -> FacilityCheck {
    match sysctl::exists("net.mpls.platform_labels") {
        true => ok("MPLS", "net.mpls.* can be set in nodes"),
        false => warn("MPLS", "nodes have no net.mpls.*", sysctl::module_advice("mpls_router")),
    }
}

fn tap() -> FacilityCheck {
    let made = fs::File::open("/proc/thread-self/ns/net")
        .on("open", "the network namespace")
        .and_then(|netns| {
            let spec = TapSpec {
                name: "probe-tap".into(),
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1500,
                addresses: vec![],
                routes: vec![],
                queue_frames: None,
                owner: None,
            };
            let tap = tap::create(netns.as_fd(), &spec)?;
            tap::set_carrier(tap.as_fd(), false)
        });
    match made {
        Ok(()) => ok("TAP", "with carrier control"),
        Err(error) => missing("TAP", text(&error), "modprobe tun; needs /dev/net/tun"),
    }
}

fn veth() -> Result<()> {
    let mut netlink = routing()?;
    let mut veth = Request::new(libc::RTM_NEWLINK, NEW, &link_header(0, 0, 0));
    veth.text(libc::IFLA_IFNAME, DEVICES[0]).nested(libc::IFLA_LINKINFO, |info| {
        info.text(libc::IFLA_INFO_KIND, "veth").nested(libc::IFLA_INFO_DATA, |data| {
            data.nested(VETH_INFO_PEER, |peer| {
                peer.raw(&link_header(0, 0, 0)).text(libc::IFLA_IFNAME, DEVICES[1]);
            });
        });
    });
    netlink.change(&mut veth).on("make", "veth")?;
    DEVICES.iter().try_for_each(|name| netlink.change(&mut bring_up(name)).on("set up", name))
}

fn xdp() -> FacilityCheck {
    let here = Path::new(xdp::BPF_FS);
    if let Err(error) = mount(Some("bpf"), here, Some("bpf"), MsFlags::empty(), None::<&str>) {
        return missing("XDP", format!("no BPF file system: {error}"), "enable CONFIG_BPF_SYSCALL");
    }
    let pins = here.join("probe");
    let attached = Xdp::attach(DEVICES[0], &pins);
    let _ = xdp::detach(&pins);
    match attached.map(|xdp| xdp.mode()) {
        Ok(XdpMode::Native | XdpMode::Packet) => {
            ok("XDP", "native on veth, links and maps can be pinned")
        }
        Ok(XdpMode::Generic) => {
            warn("XDP", "generic only on veth", "slower; physical drivers may do better")
        }
        Err(error) => missing("XDP", text(&error), "use a kernel with CONFIG_XDP_SOCKETS"),
    }
}

fn af_xdp() -> FacilityCheck {
    let made = || -> std::result::Result<XdpSocket, pdp_afxdp::Error> {
        let (pool, _packets) = Pool::new(POOL_PACKETS)?;
        let index = InterfaceInfo::by_name(DEVICES[0]).map_or(0, |interface| interface.index);
        let socket = XdpSocket::new(create_socket(pool.memfd())?, &pool)?;
        bind_socket(socket.as_fd(), index, 0).map(|()| socket)
    };
    match made() {
        Ok(_) => ok("AF_XDP", "a socket on veth"),
        Err(error) => missing("AF_XDP", text(&error), "use a kernel with CONFIG_XDP_SOCKETS"),
    }
}

/// Requirements of links between two kernel vrouters: programs at both ends of veths, and maps of
/// devices in other namespaces. Uses the BPF file system that [`xdp`] has mounted.
fn kernel_links() -> FacilityCheck {
    const NAME: &str = "kernel links";
    let tried = || -> Result<()> {
        let place = Path::new("/tmp");
        mount(Some("tmpfs"), place, Some("tmpfs"), MsFlags::empty(), None::<&str>)
            .on("mount a tmpfs at", place.display())?;
        let (netns, pins) = (place.join("ports"), Path::new(xdp::BPF_FS).join("probe-ports"));
        let guest = File::open("/proc/thread-self/ns/net").on("open", "a network namespace")?;
        let made = Ports::open(&netns, &pins).and_then(|ports| {
            for (number, name) in ["probe2", "probe3"].into_iter().enumerate() {
                let (number, name) = (number as u32, name.to_owned());
                let mac = [2, 0, 0, 0, 0, number as u8];
                let (addresses, routes) = (Vec::new(), Vec::new());
                let spec = PortSpec { number, vrouter: 0, name, mac, mtu: 1500, addresses, routes };
                ports.make(guest.as_fd(), &spec)?;
                ports.join(number, LinkTarget::Port(1 - number))?;
            }
            Ok(())
        });
        ports::destroy(&netns, &pins)?;
        made
    };
    match tried() {
        Ok(()) => ok(NAME, "between kernel routers: programs at both ends of veths"),
        Err(error) => warn(
            NAME,
            text(&error),
            "linked kernel routers do not start; use a kernel with XDP and device maps",
        ),
    }
}

fn read_number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the text of an error, with its causes.
fn text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

fn ok(name: &'static str, detail: impl Into<String>) -> FacilityCheck {
    FacilityCheck { name, level: Level::Ok, detail: detail.into(), remedy: String::new() }
}

fn warn(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> FacilityCheck {
    FacilityCheck { name, level: Level::Warn, detail: detail.into(), remedy: remedy.into() }
}

fn missing(
    name: &'static str,
    detail: impl Into<String>,
    remedy: impl Into<String>,
) -> FacilityCheck {
    FacilityCheck { name, level: Level::Missing, detail: detail.into(), remedy: remedy.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_version_numbers() {
        let read =
            ["6.1.0-31-cloud-amd64\n", "1.1.5+ds1 at /usr/sbin/runc", "5.12", "1.0-rc9", "x"];
        assert_eq!(read.map(version), [(6, 1), (1, 1), (5, 12), (1, 0), (0, 0)]);
    }
}
