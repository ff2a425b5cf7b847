//! The short way through a vrouter of kind `kernel`: an XDP program at the inner ends of its vports that
//! sends what the namespace would only route straight to the port that it leaves by
//! (`bpf/pdp_through.bpf.c` says what that is); all else passes to the namespace's stack.
//!
//! One program and one set of maps a vrouter. The maps are pinned in a directory of the vrouter's, the links
//! where the caller says: both outlive the process, and the next one adopts them and puts its own program in
//! place of the old one's without a gap. No guest can take a link off.
//!
//! **Who says that it may.** Frames go the short way while a lease lasts ([`Through::lend`]). Whoever watches
//! the namespace gives it again before it ends; when the watcher dies, it ends by itself, and all frames pass.
//! Without one nothing goes the short way, which is what `kernelHooks: strict` wants. From Linux 6.2 the
//! program reads what the kernel itself holds of the namespace, for each frame: hooks of netfilter, tc,
//! queueing disciplines, devices over the port, reverse-path filters, IPsec policies, rules of IPv6. There
//! what is left to the watcher is the smallest MTU of a route, and to have neighbours confirmed that
//! [`Through::used`] tells of, since the kernel does not see that they are used. Before 6.2 the
//! watcher's word ([`Through::tell`]) is all that makes it stand aside, as late as the watcher is.
//!
//! **Who works, pays.** With [`Through::set_thread`] a vport is served by one kernel thread of NAPI (see [`crate::napi`])
//! or not at all: what a guest has done by others, since it turned threads off or took its end down and up, is dropped
//! and counted until its new thread is named.
//!
//! **Otherwise than Linux**, where frames go the short way: the interfaces' counters in the namespace, its SNMP
//! counters and packet sockets in it (tcpdump) don't see them. A frame that passes and one behind it that
//! doesn't may change places, within what one poll of NAPI takes (64 frames). Linux keeps the route that it found
//! with a nexthop object, so that of routes which share one and have several MTUs the first packet decides;
//! frames that are sent here do not. That apart, the same comes out, byte for byte: `tests/through.rs`.
//!
//! **Requirements.** The other end of each pair must do NAPI (an XDP program, or `gro on`), or what is sent to it
//! is lost. Frames come in by XDP or from AF_XDP and packet sockets: checksums that a sender's kernel left to the
//! device, and VLAN tags beside the frame, are not seen by XDP. Turn these offloads off at the other end.
//!
//! Limits: [`PORTS_MAX`], [`USED_MAX`]; frames of one buffer (MTU of about 3,500).
//! Source: Linux net/core/filter.c (`bpf_fib_lookup`), net/ipv4/ip_forward.c, net/ipv6/ip6_output.c;
//! Documentation/bpf/kfuncs.rst.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramMut};
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Context, Error, Result};
use crate::netns::within;
use crate::xdp::{BPF_FS, is_bpf_fs};

/// Vports of one vrouter.
pub const PORTS_MAX: usize = pdp_wire::tag::VPORTS_MAX;

/// Neighbours whose use can be noted at once.
pub const USED_MAX: usize = 256;

/// Maps have room for so many vports, or twice as many, and so on: memory is for what is there.
const PORTS_STEP: usize = 8;

/// Longest lease: how long frames may go on by the short way when nobody watches any more.
pub const LEASE_MAX: Duration = Duration::from_secs(10);

/// [`Through::lend`]: no route has an MTU.
pub const NO_MTU: u32 = u32::MAX;

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pdp_through.bpf.o"));

const PROGRAM: &str = "pdp_through";

/// Maps by the names that they are pinned by.
const MAPS: [&str; 6] = ["lease", "told", "ports", "devices", "used", "counters"];
const LEASE: usize = 0;
const TOLD: usize = 1;
const PORTS: usize = 2;
const DEVICES: usize = 3;
const USED: usize = 4;
const COUNTERS: usize = 5;

const ZERO: [u8; 4] = [0; 4];

/// `struct told` of the program.
const TOLD_BYTES: usize = 8;

/// `struct used` of the program.
const USED_BYTES: usize = 32;

/// A vport.
#[derive(Clone, Copy, Debug)]
pub struct Port<'a> {
    /// Its inner end's index, in the vrouter's namespace.
    pub index: u32,
    /// Where its link is pinned, in a BPF file system. The directory is made.
    pub pin: &'a Path,
}

/// What hooks into forwarding at a vport: these go by the stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aside {
    /// IPv4 packets that come in by it.
    pub in_v4: bool,
    /// IPv6 packets that come in by it.
    pub in_v6: bool,
    /// IPv4 packets that would go out by it.
    pub out_v4: bool,
    /// IPv6 packets that would go out by it.
    pub out_v6: bool,
}

impl Aside {
    /// Everything.
    pub const ALL: Self = Self { in_v4: true, in_v6: true, out_v4: true, out_v6: true };

    fn bits(self) -> u8 {
        let flags = [self.in_v4, self.in_v6, self.out_v4, self.out_v6];
        flags.iter().zip(0..).map(|(flag, at)| u8::from(*flag) << at).sum()
    }
}

/// Frames that came in by a vport, by what became of them. All but `short` and `unpaid` passed to the stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Sent out of another port. Of a port that is full, or down, they are lost there.
    pub short: u64,
    /// There was no lease.
    pub silent: u64,
    /// Something hooks into forwarding.
    pub hooked: u64,
    /// Not plainly routed: options, fragments, a TTL that ends, groups, errors, not IP, not for this port, ….
    pub special: u64,
    /// No plain unicast route out of another vport.
    pub route: u64,
    /// A neighbour that is not known yet.
    pub neighbour: u64,
    /// Larger than an MTU on its way.
    pub too_big: u64,
    /// A source that the stack validates: an address of the router, or one without a route.
    pub source: u64,
    /// Dropped: not served by the thread that was named.
    pub unpaid: u64,
}

/// A neighbour that frames were sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Its address.
    pub address: IpAddr,
    /// The interface that it is at.
    pub index: u32,
    /// When, by the monotonic clock of the machine; to a quarter of a second.
    pub at: Duration,
}

/// The short way through one vrouter. Dropping it leaves all in place; see [`detach`] and [`remove`].
#[derive(Debug)]
pub struct Through {
    pins: PathBuf,
    maps: [MapHandle; MAPS.len()],
}

impl Through {
    /// Attaches the program to these vports of a namespace, in the driver, with maps pinned in `pins`; what is
    /// there already is adopted, and has this version of the program from then on. Vports are known by
    /// their places in `ports` from then on; others of the vrouter are neither sent to nor served, and keep their
    /// links until [`detach`]. With more vports than there is room for (a power of two, 8 at least) maps are made
    /// anew: counters begin again, and it has to be lent and told again.
    ///
    /// # Errors
    /// Too many vports; `pins` is in no BPF file system; an interface is gone, does no XDP, or has another program.
    pub fn attach(pins: &Path, netns: BorrowedFd<'_>, ports: &[Port<'_>]) -> Result<Self> {
        if ports.len() > PORTS_MAX {
            let text = format!("{} vports, {PORTS_MAX} at most", ports.len());
            return Err(Error::Invalid { object: pins.display().to_string(), text });
        }
        // Indices and the devices of a map are those of the namespace that asks.
        within(netns, || {
            let object = load(pins, ports.len())?;
            let this = Self::open(pins)?;
            this.set_ports(ports)?;
            let program = object.progs_mut().find(|program| program.name() == PROGRAM);
            let program =
                program.ok_or_else(|| io::Error::other("not in its object")).on("find", PROGRAM)?;
            ports.iter().try_for_each(|port| put(&program, port))?;
            Ok(this)
        })
    }

    /// What is there already, for who watches or counts.
    pub fn open(pins: &Path) -> Result<Self> {
        let map = |name: &str| {
            let path = pins.join(name);
            MapHandle::from_pinned_path(&path).map_err(other).on("open the map", path.display())
        };
        let [lease, told, ports, devices, used, counters] = MAPS;
        let maps =
            [map(lease)?, map(told)?, map(ports)?, map(devices)?, map(used)?, map(counters)?];
        Ok(Self { pins: pins.to_owned(), maps })
    }

    /// Lets frames go the short way for so long ([`LEASE_MAX`] at most) from now on; zero ends it. `bytes_max` are
    /// the smallest MTUs of routes in the namespace, of IPv4 and of IPv6 ([`NO_MTU`]: none has one).
    pub fn lend(&self, time: Duration, bytes_max: [u32; 2]) -> Result<()> {
        let until = if time.is_zero() { Duration::ZERO } else { now() + time.min(LEASE_MAX) };
        let until_ns = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        let [v4, v6] = bytes_max.map(u32::to_ne_bytes);
        let value = [&until_ns.to_ne_bytes()[..], &v4, &v6].concat();
        self.set(LEASE, &ZERO, &value, "lend the short way by")
    }

    /// Says what hooks into forwarding at the vport of this place, and its link address (which counts before
    /// Linux 6.2 alone). Until told, nothing does, and there it has no link address, so that all passes.
    pub fn tell(&self, port: usize, mac: [u8; 6], aside: Aside) -> Result<()> {
        let mut value = [0; TOLD_BYTES];
        value[..6].copy_from_slice(&mac);
        value[6] = aside.bits();
        self.set(TOLD, &place(port)?, &value, "tell what hooks into")
    }

    /// Has the vport of this interface served by this thread alone, or by whoever does. A frame that is served
    /// otherwise is dropped.
    ///
    /// # Errors
    /// The interface is none of the vports.
    pub fn set_thread(&self, index: u32, thread: Option<u32>) -> Result<()> {
        let key = index.to_ne_bytes();
        let there = self.maps[PORTS].lookup(&key, MapFlags::ANY).map_err(other);
        let mut value = there.on("look for the vport", index)?.ok_or_else(|| Error::Invalid {
            object: format!("interface {index}"),
            text: format!("none of the vports of {}", self.pins.display()),
        })?;
        value.truncate(4);
        value.extend(thread.unwrap_or(0).to_ne_bytes());
        self.set(PORTS, &key, &value, "name the thread of a vport of")
    }

    /// What became of the frames that came in by the vport of this place, since the maps were made.
    pub fn counters(&self, port: usize) -> Result<Counters> {
        let by_cpu = self.maps[COUNTERS]
            .lookup_percpu(&place(port)?, MapFlags::ANY)
            .map_err(other)
            .on("read the counters of", self.pins.display())?;
        let mut sums = [0_u64; 9];
        for counts in by_cpu.unwrap_or_default() {
            for (sum, count) in sums.iter_mut().zip(counts.chunks_exact(8)) {
                *sum += count.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            }
        }
        let [short, silent, hooked, special, route, neighbour, too_big, source, unpaid] = sums;
        Ok(Counters { short, silent, hooked, special, route, neighbour, too_big, source, unpaid })
    }

    /// Neighbours that frames were sent to since `since` of the monotonic clock ([`now`]), by no order. Where there
    /// are many some may be missing, but not for long.
    pub fn used(&self, since: Duration) -> Result<Vec<Used>> {
        let map = &self.maps[USED];
        let mut found = Vec::new();
        for key in 0..USED_MAX as u32 {
            let value = map.lookup(&key.to_ne_bytes(), MapFlags::ANY).map_err(other);
            let value = value.on("read the neighbours used by", self.pins.display())?;
            found.extend(value.and_then(|value| used(&value)).filter(|used| used.at >= since));
        }
        Ok(found)
    }

    fn set(&self, map: usize, key: &[u8], value: &[u8], what: &'static str) -> Result<()> {
        self.maps[map]
            .update(key, value, MapFlags::ANY)
            .map_err(other)
            .on(what, self.pins.display())
    }

    /// What leaves the maps first: nobody is sent to a port by another's place.
    fn set_ports(&self, ports: &[Port<'_>]) -> Result<()> {
        let wanted = |key: &[u8]| {
            key.first_chunk().is_some_and(|bytes| {
                let index = u32::from_ne_bytes(*bytes);
                ports.iter().any(|port| port.index == index)
            })
        };
        for map in [DEVICES, PORTS] {
            let stale: Vec<_> = self.maps[map].keys().filter(|key| !wanted(key)).collect();
            for key in stale {
                match self.maps[map].delete(&key) {
                    Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                        return Err(other(error)).on("forget a vport of", self.pins.display());
                    }
                    _ => {}
                }
            }
        }
        for (port, at) in ports.iter().zip(0_u32..) {
            let index = port.index.to_ne_bytes();
            let there = self.maps[PORTS].lookup(&index, MapFlags::ANY).ok().flatten();
            let thread = there.and_then(|value| value.last_chunk().copied()).unwrap_or([0; 4]);
            let value = [at.to_ne_bytes(), thread];
            self.set(PORTS, &index, value.as_flattened(), "set a vport of")?;
            // One that is there already would be gone for a moment.
            let device = self.maps[DEVICES].lookup(&index, MapFlags::ANY).ok().flatten();
            if device.as_deref() != Some(&index) {
                self.set(DEVICES, &index, &index, "set the device of a vport of")?;
            }
        }
        Ok(())
    }
}

/// The monotonic clock that leases and uses are counted by.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec.try_into(), now.tv_nsec.try_into());
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}

/// Takes the program off a vport, whose link is pinned here. No change if there is none.
pub fn detach(pin: &Path) -> Result<()> {
    if let Some(link) = pinned(pin) {
        // At once, though others may hold the link. Its interface may be gone.
        let _ = link.detach();
    }
    gone(fs::remove_file(pin)).on("remove", pin.display())
}

/// Removes the pinned maps of a vrouter. Programs that are still attached pass all frames from then on.
pub fn remove(pins: &Path) -> Result<()> {
    if let Ok(this) = Through::open(pins) {
        let _ = this.lend(Duration::ZERO, [0; 2]);
    }
    remove_maps(pins)?;
    gone(fs::remove_dir(pins)).on("remove", pins.display())
}

fn remove_maps(pins: &Path) -> Result<()> {
    MAPS.iter().try_for_each(|name| {
        let path = pins.join(name);
        gone(fs::remove_file(&path)).on("remove", path.display())
    })
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })
}

fn place(port: usize) -> Result<[u8; 4]> {
    let number = u32::try_from(port).ok().filter(|_| port < PORTS_MAX);
    let invalid = || {
        let text = format!("no vport has this place; {PORTS_MAX} are supported, from 0");
        Error::Invalid { object: format!("vport {port}"), text }
    };
    number.map(u32::to_ne_bytes).ok_or_else(invalid)
}

fn used(value: &[u8]) -> Option<Used> {
    let word = |at: usize| value.get(at..at + 4)?.first_chunk().copied().map(u32::from_ne_bytes);
    let ns = u64::from_ne_bytes(*value.get(24..USED_BYTES)?.first_chunk()?);
    let address = match i32::try_from(word(20)?) {
        Ok(libc::AF_INET) => Ipv4Addr::from(*value.first_chunk::<4>()?).into(),
        Ok(libc::AF_INET6) => Ipv6Addr::from(*value.first_chunk::<16>()?).into(),
        _ => return None,
    };
    Some(Used { address, index: word(16)?, at: Duration::from_nanos(ns) })
}

/// The pinned link. Of one that is not there the library would say so on standard error.
fn pinned(pin: &Path) -> Option<Link> {
    pin.exists().then(|| Link::open(pin).ok())?
}

/// Loads the program with the pinned maps, or with new ones that are pinned then: with room for so many vports.
fn load(pins: &Path, count: usize) -> Result<Object> {
    libbpf_rs::set_print(None);
    let make = |directory: &Path| {
        fs::create_dir_all(directory).on("make", directory.display())?;
        if is_bpf_fs(directory) {
            return Ok(());
        }
        let text = format!("not in a BPF file system; mount -t bpf bpf {BPF_FS}");
        Err(Error::Invalid { object: directory.display().to_string(), text })
    };
    make(pins)?;
    let load = || {
        let mut object = ObjectBuilder::default().open_memory(OBJECT)?;
        for mut map in object.maps_mut() {
            if let Some(name) = map.name().to_str().filter(|name| MAPS.contains(name)) {
                let path = pins.join(name);
                if [TOLD, PORTS, DEVICES, COUNTERS].iter().any(|of| MAPS[*of] == name) {
                    map.set_max_entries(room(&path, count))?;
                }
                map.set_pin_path(path)?;
            }
        }
        object.load()
    };
    let object = load().or_else(|_| {
        // Maps of another shape: of an older version, or with too little room. Links stay: frames go by the stack meanwhile.
        remove_maps(pins).map_err(|error| libbpf_rs::Error::from(io::Error::other(error)))?;
        load()
    });
    object.map_err(other).on("load the program of the short way for", pins.display())
}

/// For how many vports there is room in a map that is pinned, or is to be.
fn room(pin: &Path, count: usize) -> u32 {
    let wanted = count.next_power_of_two().clamp(PORTS_STEP, PORTS_MAX) as u32;
    let there = pin.exists().then(|| MapHandle::from_pinned_path(pin).ok()).flatten();
    // What has more room stays as it is, with what it counted.
    there.map_or(wanted, |map| map.max_entries().max(wanted))
}

/// Puts the program where it is to be.
fn put(program: &ProgramMut<'_>, port: &Port<'_>) -> Result<()> {
    let of = |link: &Link| match link.info().ok()?.info {
        LinkTypeInfo::Xdp(info) => Some(info.ifindex),
        _ => None,
    };
    if let Some(mut link) = pinned(port.pin) {
        if of(&link) == Some(port.index) {
            let replaced = link.update_prog(program).map_err(other);
            return replaced.on("replace the program of", port.pin.display());
        }
        // Of an interface that is gone, or has moved.
        drop(link);
        detach(port.pin)?;
    }
    if let Some(directory) = port.pin.parent() {
        fs::create_dir_all(directory).on("make", directory.display())?;
    }
    let index = i32::try_from(port.index).map_err(io::Error::other);
    let index = index.on("attach the short way to interface", port.index)?;
    let link = program.attach_xdp(index).map_err(other);
    let mut link = link.on("attach the short way to interface", port.index)?;
    link.pin(port.pin).map_err(other).on("pin", port.pin.display())
}

fn other(error: libbpf_rs::Error) -> io::Error {
    io::Error::other(error)
}
