//! Ports of vrouters that the kernel forwards for, in the network namespace of their control guest.
//!
//! A port is a veth pair. The *inner end* is the vrouter's interface. The *root end* is in a
//! network namespace of PdP's own, which contains no tenant and persists through a bind
//! mount. An XDP program at the root end sees everything that the vrouter's stack sends, and
//! handles it as maps say ([`LinkTarget`], [`PortRate`]). A second program at the inner end sees
//! everything that arrives. It passes frames to the stack or forwards them through [the XDP
//! bypass](Ports::activate_bypass). It also lets the kernel accept redirected frames, whatever the
//! guest configures there (`bpf/pdp_ports.bpf.c`). There is one program of each kind, and
//! one set of maps, for all vrouters of a machine.
//!
//! Namespace, pairs, links and maps survive this process: frames and counters continue. The next
//! process adopts them, and replaces the programs by its own versions without a gap.
//!
//! A link is a wire: every frame comes out unchanged, for any MAC addresses, type, VLAN tags or
//! contents. There are two exceptions. Frames without a whole Ethernet header are dropped
//! ([`Reason::Runt`]). So are frames that are longer than the egress port's MTU, an Ethernet header
//! and one VLAN tag together ([`Reason::TooBig`]). The kernel enforces the ingress port's MTU in
//! the same way, before the program sees the frame ([`KernelPortCounters::unsent`]). So a frame
//! with two VLAN tags can have 4 bytes less than the MTU.
//!
//! A guest that changes its end harms only itself. [`Ports::changes`] reports changes, and
//! [`Ports::make`] makes a deleted port again. A guest can't detach the programs, since links hold
//! them. It can't reach other ends, since its own leads to PdP's namespace. Two offloads are off
//! when it gets its end, but the guest can turn them on again. XDP loses what they keep outside the
//! frame. With checksum offload, the guest's own programs send wrong checksums. With VLAN offload,
//! their frames lose their tags.
//!
//! Limits: [`PORTS_MAX`]; [`RING_FRAMES`]. Counters take 288
//! bytes for each of [`PORTS_MAX`] and processor.
//! Source: Linux drivers/net/veth.c, kernel/bpf/devmap.c.

mod layout;
mod short;
mod veth;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenMapMut, XdpFlags};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use pdp_wire::named;
use pdp_wire::tunnel::Encapsulation;
use zerocopy::{FromBytes, IntoBytes};

use crate::error::{Error, NetContext, Result};
use crate::ethtool;
use crate::interface::InterfaceWatch;
use crate::ioctl::named_request;
use crate::netlink::set_link;
use crate::netlink_pool::NetlinkPool;
use crate::netns::{in_thread, within};
use crate::pins::{
    self, create_link, other, pin_link, pinned_index, pinned_link, program, remove_dir, remove_file,
};
use crate::sysctl;
use crate::tap;
pub use layout::{BypassCounters, Power, UsedNeighbour};
use layout::{
    EgressEntry, InnerKey, LimitEntry, OUTSIDE, PortCountsEntry, PortEntry, Taker, TunnelMapKey,
};
pub use short::{BypassExclusions, LEASE_MAX, NO_MTU, USED_MAX, now, reads_hooks};
use veth::{VethChange as Set, VethInterface};

/// Most ports of one daemon; port numbers are below it.
pub const PORTS_MAX: u32 = 16384;

/// Most frames that wait at each end of a pair until the kernel handles them; more are dropped.
pub const RING_FRAMES: u64 = 256;

/// Most bytes that a frame may have beyond the MTU: an
/// Ethernet header, and a tag (`is_skb_forwardable`).
const BEYOND_MTU: u32 = 14 + 4;

/// Most limits on traffic from tunnels; their numbers are below it.
pub const LIMITS_MAX: u32 = 32_768;

/// From `bpf/pdp_ports.h`.
const INDEX_FIRST: u32 = 4096;

/// NSFS_MAGIC of linux/magic.h.
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Alias of the root ends of complete ports. Other root ends are incomplete.
const WHOLE: &str = "whole";

/// Group of root ends that are about to be deleted.
const DOOMED: u32 = 0x7064_7021;

/// Wait for a link to disappear after its pin was removed.
const UNPINNED_WAIT: Duration = Duration::from_millis(500);

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pdp_ports.bpf.o"));

/// Names of the maps. The first ones are shared with the programs of external interfaces.
const MAPS: [&str; 10] = [
    "ports",
    "ends",
    "port_counts",
    "tunnels",
    "limits",
    "vrouters",
    "outsides",
    "devices",
    "inners",
    "used",
];

/// Maps that programs of external interfaces use too.
pub(crate) const SHARED_MAPS: [&str; 6] = [MAPS[0], MAPS[1], MAPS[2], MAPS[3], MAPS[4], MAPS[5]];

/// A port to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// Number below [`PORTS_MAX`], unique in the daemon.
    pub number: u32,
    /// Number of its vrouter, below [`PORTS_MAX`]. It is the same for all ports of the vrouter and
    /// for no others, e.g. the lowest number of its ports.
    pub vrouter: u32,
    /// Name inside the guest, at most 15 bytes.
    pub name: String,
    /// MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Addresses with prefix lengths; empty if the guest's own configuration sets them.
    pub addresses: Vec<IpNet>,
    /// Routes: destination and gateway.
    pub routes: Vec<(IpNet, IpAddr)>,
}

/// Result of making a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// Nothing was missing.
    Nothing,
    /// Parts were missing and have been restored: a program, a setting, the MTU.
    Parts,
    /// The port is new: a new pair, with addresses and routes.
    All,
}

/// Target of frames that a vrouter sends from a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkTarget {
    /// None: frames are dropped.
    None,
    /// Vrouter at the port of this number; the port need not exist yet.
    Port(u32),
    /// Tunnel. Frames from the tunnel go to the port, too.
    Outside(ExternalEnd),
}

/// External end of a port's link. The interface runs the program of [`crate::xdp::Xdp::attach_for`]
/// in its driver, takes the tunnel's traffic, and its driver sends redirected frames.
///
/// Supported are VXLAN and Ethernet in UDP, over IPv4 and IPv6. The program does not recognize
/// frames with IPv4 options, IPv6 extension headers or wrong checksums. They are treated like all
/// other frames that the interface takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalEnd {
    /// Index of the external interface, in the caller's network namespace.
    pub interface: u32,
    /// MAC address of the interface: source of sent frames,
    /// and required destination of received ones.
    pub mac: [u8; 6],
    /// The tunnel.
    pub by: Encapsulation,
    /// Number of the limit on received frames, below [`LIMITS_MAX`]; see [`Ports::limit`].
    pub limit: Option<u32>,
}

/// The next hop of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnderlayHop {
    /// MAC address of the next hop.
    pub mac: [u8; 6],
    /// Longest IP packet for both the interface and the path, bytes.
    pub mtu: u16,
}

/// Rate limit of a port: a token bucket of bytes and one of
/// frames. Excess frames are dropped, not queued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortRate {
    /// Bits per second; 0: no limit. Counts Ethernet frames from their
    /// destination address to the end of their payload.
    pub bps: u64,
    /// Burst, bytes, at least 2,048; 0: 10 ms of the rate, but at least 32 full frames.
    pub burst_bytes: u64,
    /// Overhead that each frame counts beyond its own bytes.
    pub overhead_bytes: u32,
    /// Frames per second; 0: no limit. The burst is 10 ms, but at least 32 frames.
    pub pps: u64,
}

/// Most bytes of overhead per frame.
pub const OVERHEAD_BYTES_MAX: u32 = 4096;

named! {
    /// Reason why a frame was dropped at a port. Reasons that the mux also has use the mux's names.
    Reason {
        /// Shorter than an Ethernet header.
        Runt = "runt",
        /// Beyond the port's rate.
        Policed = "policed",
        /// Sent out of a port without a link.
        Unconnected = "unconnected",
        /// This port is down, or the link's other end is down or missing.
        LinkDown = "link-down",
        /// Longer than the egress port's MTU allows.
        TooBig = "too-big",
        /// Met congestion in the underlay, and the inner
        /// packet can't be marked (RFC 6040 section 4.2).
        Congested = "congested",
        /// The tunnel's next hop is unknown.
        UnderlayUnresolved = "underlay-unresolved",
        /// Longer than the underlay allows with the tunnel's headers.
        UnderlayTooBig = "underlay-too-big",
        /// Sent to this port's vrouter, which has used up its CPU time ([`Ports::power`]).
        Power = "kernel-power",
        /// Sent to this port's vrouter, and served by a thread other than
        /// the one named for it ([`Ports::serve`]).
        Unpaid = "unpaid",
        /// Sent to this port's vrouter, but not delivered: the vrouter takes
        /// frames too slowly, or its end is down or gone.
        Undelivered = "undelivered",
    }
}

/// Frames and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames.
    pub frames: u64,
    /// Bytes of the frames, from the destination address to the end of the payload.
    pub bytes: u64,
}

/// Counters of a port since it was first made; they continue when it is made again.
///
/// Every frame that the vrouter sent was forwarded or dropped: `from_vrouter` = `to_link` + all of
/// `dropped`. Every frame from the link was delivered or refused: `from_link` = `to_vrouter` + all
/// of `refused` + [`KernelPortCounters::in_transit`]. Frames that used the XDP bypass count as if
/// they had passed through the vrouter's stack. (The equations hold exactly only at rest, since
/// reading takes a moment.) A frame that a program gave to an external interface counts as sent
/// here, even if the interface's queue was full; the kernel counts that drop at the interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelPortCounters {
    /// Frames sent by the vrouter, as far as they reached PdP's program.
    pub from_vrouter: Traffic,
    /// Frames sent into the link.
    pub to_link: Traffic,
    /// Frames received from the link.
    pub from_link: Traffic,
    /// Frames delivered to the vrouter's kernel.
    pub to_vrouter: Traffic,
    /// Dropped frames that the vrouter sent, by reason, in the order of [`Reason::ALL`].
    pub dropped: [u64; Reason::ALL.len()],
    /// Dropped frames from the link, by reason, in the order of [`Reason::ALL`].
    pub refused: [u64; Reason::ALL.len()],
    /// Frames of `to_vrouter` by their further path; their sum is `to_vrouter`.
    pub bypass: BypassCounters,
    /// Frames that the vrouter's kernel could not send, by its own counter of drops at the
    /// interface of the current pair. Either the ring of [`RING_FRAMES`] was full, or the frame was
    /// longer than the MTU allows. None of the other counters includes them.
    pub unsent: u64,
}

impl KernelPortCounters {
    /// Returns the frames dropped for a reason, in both directions.
    pub fn dropped(&self, reason: Reason) -> u64 {
        self.dropped[reason as usize] + self.refused[reason as usize]
    }

    /// Returns the frames from the link that have not reached the vrouter yet: at most
    /// [`RING_FRAMES`], plus the batch of a processor.
    ///
    /// It includes frames that were in the ring when the guest set its end down. The kernel does
    /// not count these; they are known to be lost once the pair is gone.
    pub fn in_transit(&self) -> u64 {
        self.missing().saturating_sub(self.refused[Reason::Undelivered as usize])
    }

    /// Returns the frames whose verdict the programs don't know.
    fn missing(&self) -> u64 {
        let programs = &self.refused[..Reason::Undelivered as usize];
        self.from_link.frames.saturating_sub(self.to_vrouter.frames + programs.iter().sum::<u64>())
    }
}

/// Difference between a port's inner end and its specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InnerEndChange {
    /// Deleted or moved to another network namespace; [`Ports::make`] makes it again.
    Gone,
    /// Renamed, with the new name.
    Renamed(String),
    /// MTU changed, with the new value in bytes.
    Resized(u32),
    /// MAC address changed, with the new one.
    Readdressed([u8; 6]),
    /// Set down.
    Down,
}

impl fmt::Display for InnerEndChange {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => write!(to, "deleted or moved away"),
            Self::Renamed(name) => write!(to, "renamed to {name}"),
            Self::Resized(mtu) => write!(to, "its MTU set to {mtu}"),
            Self::Readdressed([a, b, c, d, e, f]) => {
                write!(to, "its MAC address set to {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
            }
            Self::Down => write!(to, "set down"),
        }
    }
}

/// All ports of a daemon. Dropping it leaves everything as it is; see [`destroy`].
///
/// Threads may use it at the same time, as long as no two of them make or remove the same port. No
/// thread waits while the kernel handles another one's long request.
#[derive(Debug)]
pub struct Ports {
    netns: OwnedFd,
    netlink: NetlinkPool,
    pins: PathBuf,
    /// Programs of this version, for root ends and inner ends.
    programs: [OwnedFd; 2],
    ports: MapHandle,
    ends: MapHandle,
    counts: MapHandle,
    tunnels: MapHandle,
    limits: MapHandle,
    outsides: MapHandle,
    devices: MapHandle,
    vrouters: MapHandle,
    inners: MapHandle,
    used: MapHandle,
    /// Guards read-modify-write of map entries; held only for that.
    changing: Mutex<()>,
}

/// End of a pair. The link of its program is pinned as `PINS/NUMBER/out` or `PINS/NUMBER/in`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PairEnd {
    Root,
    Inner,
}

impl PairEnd {
    const ALL: [Self; 2] = [Self::Root, Self::Inner];

    fn program(self) -> &'static str {
        match self {
            Self::Root => "pdp_out",
            Self::Inner => "pdp_in",
        }
    }

    fn pin(self) -> &'static str {
        match self {
            Self::Root => "out",
            Self::Inner => "in",
        }
    }
}

impl Ports {
    /// Opens the ports, adopting the namespace at the path `netns` and the pins in `pins` (below a
    /// BPF file system, see [`crate::xdp::mount_bpf_fs`]). Makes whatever is missing.
    ///
    /// Afterwards, all existing ports run this version's programs. If an earlier
    /// version had other maps, they are replaced: links, rates and counters start
    /// anew, and [`Ports::make`] finds parts missing.
    pub fn open(netns: &Path, pins: &Path) -> Result<Self> {
        let netns = open_netns(netns)?;
        let netlink = within(netns.as_fd(), NetlinkPool::open)?;
        pins::make_dir(pins)?;
        let place = |map: &mut OpenMapMut<'_>| {
            Ok(MAPS.into_iter().find(|name| map.name() == *name).map(|name| pins.join(name)))
        };
        let empty = || unpin(pins).and_then(|()| pins::make_dir(pins));
        let object = pins::load(OBJECT, "the programs of ports", place, empty)?;
        let fd = |side: PairEnd| {
            program(&object, side.program())?
                .as_fd()
                .try_clone_to_owned()
                .on("keep", side.program())
        };
        let map = |name| pins::map(pins, name);
        let this = Self {
            netns,
            netlink,
            pins: pins.to_owned(),
            programs: [fd(PairEnd::Root)?, fd(PairEnd::Inner)?],
            ports: map(MAPS[0])?,
            ends: map(MAPS[1])?,
            counts: map(MAPS[2])?,
            tunnels: map(MAPS[3])?,
            limits: map(MAPS[4])?,
            vrouters: map(MAPS[5])?,
            outsides: map(MAPS[6])?,
            devices: map(MAPS[7])?,
            inners: map(MAPS[8])?,
            used: map(MAPS[9])?,
            changing: Mutex::default(),
        };
        for number in pinned_numbers(pins)? {
            for side in PairEnd::ALL {
                let Some(mut link) = pinned_link(&this.pin(number, side)) else { continue };
                let program = program(&object, side.program())?;
                match link.update_prog(&program).map_err(other) {
                    // Its interface is gone.
                    Err(_) if pinned_index(&this.pin(number, side)) == Some(0) => {}
                    result => result.on("replace the program of port", number)?,
                }
            }
        }
        Ok(this)
    }

    fn alone(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the directory in which its maps are pinned.
    pub(crate) fn pins(&self) -> &Path {
        &self.pins
    }

    /// Returns the namespace of the root ends.
    pub fn netns(&self) -> BorrowedFd<'_> {
        self.netns.as_fd()
    }

    /// Watches for changes or deletions of ports' root ends: a guest deleted its end, or took it
    /// down or up. Changes of an inner end's name, MTU or address cause no notification.
    pub fn watch(&self) -> Result<InterfaceWatch> {
        within(self.netns(), InterfaceWatch::new)
    }

    /// Returns the numbers of all ports that exist at least in part.
    pub fn all(&self) -> Result<BTreeSet<u32>> {
        let ends = veth::all(&self.netlink).on("list", "root ends")?;
        let mut numbers: BTreeSet<u32> =
            ends.iter().filter_map(|end| end.index.checked_sub(INDEX_FIRST)).collect();
        numbers.split_off(&PORTS_MAX);
        numbers.extend(pinned_numbers(&self.pins)?);
        Ok(numbers)
    }

    /// Makes the missing parts of a port whose inner end is in the network namespace `guest`: the
    /// pair, with addresses and routes, and the programs. Sets the port's MTU if it differs. Other
    /// changes that the guest made to its end stay.
    ///
    /// A new port has no link and no limit, and is up. A port that is made
    /// again keeps its earlier link, limit and state.
    ///
    /// # Errors
    /// The kernel's refusal, e.g. because the guest has another interface
    /// of this name. An incomplete pair is removed.
    pub fn make(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<Made> {
        let number = spec.number;
        check_number("port", number)?;
        check_number("vrouter", spec.vrouter)?;
        // The kernel would truncate the name, or report a meaningless error.
        named_request(&spec.name)?;
        let root = self.root(number)?;
        if let Some(root) = root.as_ref().filter(|root| root.alias == WHOLE)
            && let Some(inner) = self.inner(root, guest)?
        {
            return self.mend(guest, spec, root, &inner);
        }
        if root.is_some() {
            self.delete(&[number])?;
        }
        // The inner end's old index may belong to another interface by now. It must lead nowhere
        // until there is a root end again.
        self.forget_inner(number, &self.port(number)?)?;
        // A pair that is gone has no frames under way.
        let lost = self.counts(number)?.missing();
        self.change(number, |port| port.settled = lost)?;
        let made = self.make_pair(guest, spec);
        if made.is_err() {
            // The error that caused this tells more.
            let _ = self.delete(&[number]);
        }
        made.map(|()| Made::All)
    }

    fn make_pair(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<()> {
        let PortSpec { number, name, mtu, .. } = spec;
        let place = (root_name(*number), number + INDEX_FIRST);
        veth::make(&self.netlink, place, guest, spec).on("make port", name)?;
        let gone = || Err(Errno::ENODEV).on("make port", name);
        let Some(root) = self.root(*number)? else { return gone() };
        // Before either end is up, so that the programs see every frame.
        self.attach(*number, PairEnd::Root, self.netns(), root.index)?;
        self.attach(*number, PairEnd::Inner, guest, root.peer)?;
        self.set_end(*number)?;
        self.set_inner(guest, spec, root.peer)?;
        let mut closed = false;
        self.change(*number, |port| {
            closed = port.closed != 0;
            port.frame_bytes_max = frame_bytes_max(*mtu, closed);
        })?;
        let set = |change| {
            veth::change(&self.netlink, root.index, change).on("set up the root end of", name)
        };
        set(Set::Up(true))?;
        within(guest, || {
            ethtool::all_in_frames(name)?;
            let link = set_link(root.peer, libc::IFF_UP);
            tap::equip(name, root.peer, link, &spec.addresses, &spec.routes)
        })?;
        set(Set::Alias(WHOLE))?;
        if closed { set(Set::Up(false)) } else { Ok(()) }
    }

    /// Repairs a port whose pair exists.
    fn mend(
        &self,
        guest: BorrowedFd<'_>,
        spec: &PortSpec,
        root: &VethInterface,
        inner: &VethInterface,
    ) -> Result<Made> {
        let number = spec.number;
        let mut made = Made::Nothing;
        for (side, netns, end) in
            [(PairEnd::Root, self.netns(), root), (PairEnd::Inner, guest, inner)]
        {
            if pinned_index(&self.pin(number, side)) != Some(end.index) {
                self.attach(number, side, netns, end.index)?;
                made = Made::Parts;
            }
        }
        let end = self.ends.lookup(&number.to_ne_bytes(), MapFlags::ANY).map_err(other);
        if end.on("find the root end of port", number)? != Some(root.index.to_ne_bytes().to_vec()) {
            self.set_end(number)?;
            made = Made::Parts;
        }
        if self.set_inner(guest, spec, inner.index)? {
            made = Made::Parts;
        }
        if root.mtu != spec.mtu {
            let set = |netlink: &NetlinkPool, index| {
                veth::change(netlink, index, Set::Mtu(spec.mtu)).on("set the MTU of", &spec.name)
            };
            set(&self.netlink, root.index)?;
            within(guest, || set(&NetlinkPool::open()?, root.peer))?;
            made = Made::Parts;
        }
        let mut up = true;
        self.change(number, |port| {
            up = port.closed == 0;
            let most = frame_bytes_max(spec.mtu, !up);
            if port.frame_bytes_max != most {
                port.frame_bytes_max = most;
                made = Made::Parts;
            }
        })?;
        if root.up != up {
            veth::change(&self.netlink, root.index, Set::Up(up))
                .on("set the carrier of", &spec.name)?;
            made = Made::Parts;
        }
        Ok(made)
    }

    /// Sets the target of frames that the vrouter sends from port `number`. A link between two
    /// ports needs two calls. A tunnel's next hop is unknown until [`Ports::set_hop`] sets it; an
    /// unchanged tunnel keeps its next hop.
    ///
    /// # Errors
    /// The tunnel is of an unsupported kind, or belongs to another port.
    pub fn join(&self, number: u32, target: LinkTarget) -> Result<()> {
        let before = self.egress(number)?.map(|egress| egress.tunnel);
        let now = match &target {
            LinkTarget::None | LinkTarget::Port(_) => None,
            LinkTarget::Outside(outside) => Some(self.connect(number, outside)?),
        };
        self.change(number, |port| {
            port.to = match target {
                LinkTarget::None => 0,
                LinkTarget::Port(other) => other.saturating_add(1),
                LinkTarget::Outside(_) => OUTSIDE,
            }
        })?;
        let delete = |map: &MapHandle, key: &[u8]| match map.delete(key) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(other(error)).on("release the tunnel of port", number)
            }
            _ => Ok(()),
        };
        if let Some(before) = before.filter(|before| Some(*before) != now) {
            delete(&self.tunnels, before.as_bytes())?;
        }
        if before.is_some() && now.is_none() {
            delete(&self.outsides, &number.to_ne_bytes())?;
            delete(&self.devices, &number.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Connects a port and a tunnel, in both directions.
    fn connect(&self, number: u32, outside: &ExternalEnd) -> Result<TunnelMapKey> {
        let ExternalEnd { interface, mac, by, limit } = outside;
        let invalid = |text| Err(Error::Invalid { object: format!("port {number} by {by}"), text });
        let Some(new) = EgressEntry::new(*interface, by, *mac) else {
            return invalid("the kernel data plane does not support this tunnel".into());
        };
        if limit.is_some_and(|limit| limit >= LIMITS_MAX) {
            return invalid(format!("{LIMITS_MAX} limits at most, from 0"));
        }
        let key = new.tunnel.as_bytes();
        let _alone = self.alone();
        let current = self.tunnels.lookup(key, MapFlags::ANY).map_err(other);
        let current = current.on("look for the tunnel of port", number)?;
        if let Some(taker) = current.and_then(|bytes| Taker::read_from_bytes(&bytes).ok())
            && taker.port != number
        {
            return invalid(format!("already used by port {}", taker.port));
        }
        let set = |map: &MapHandle, key: &[u8], value: &[u8]| {
            map.update(key, value, MapFlags::ANY)
                .map_err(other)
                .on("set the tunnel of port", number)
        };
        let port = number.to_ne_bytes();
        if !self.egress(number)?.is_some_and(|old| old.is_like(new)) {
            set(&self.outsides, &port, new.as_bytes())?;
        }
        set(&self.devices, &port, &interface.to_ne_bytes())?;
        let limit = limit.map_or(0, |limit| limit + 1);
        let taker = Taker { port: number, limit, mac: *mac, reserved: 0 };
        set(&self.tunnels, key, taker.as_bytes())?;
        Ok(new.tunnel)
    }

    /// Sets the next hop of the tunnel of port `number`; `None`: unknown, its frames are dropped.
    /// Does nothing if the port has no tunnel.
    pub fn set_hop(&self, number: u32, hop: Option<UnderlayHop>) -> Result<()> {
        let _alone = self.alone();
        let Some(mut egress) = self.egress(number)? else { return Ok(()) };
        egress.set_hop(hop);
        self.outsides
            .update(&number.to_ne_bytes(), egress.as_bytes(), MapFlags::EXIST)
            .map_err(other)
            .on("set the next hop of port", number)
    }

    /// Limits the traffic from all tunnels that use limit `number`; `None`: no limit. Frames count
    /// without their outer headers and without overhead.
    pub fn limit(&self, number: u32, rate: Option<PortRate>) -> Result<()> {
        let key = number.to_ne_bytes();
        let _alone = self.alone();
        let found =
            self.limits.lookup(&key, MapFlags::LOCK).map_err(other).on("read limit", number)?;
        let found = found.and_then(|bytes| LimitEntry::read_from_bytes(&bytes).ok());
        let mut limit = found.ok_or(Errno::ENOENT).on("read limit", number)?;
        limit.police(rate);
        self.limits
            .update(&key, limit.as_bytes(), MapFlags::LOCK)
            .map_err(other)
            .on("set limit", number)
    }

    fn egress(&self, number: u32) -> Result<Option<EgressEntry>> {
        let found = self.outsides.lookup(&number.to_ne_bytes(), MapFlags::ANY).map_err(other);
        let found = found.on("read the tunnel of port", number)?;
        Ok(found.and_then(|bytes| EgressEntry::read_from_bytes(&bytes).ok()))
    }

    /// Limits the traffic that the vrouter sends from port `number`; `None`: no limit. An unchanged
    /// limit keeps its bucket's state.
    pub fn police(&self, number: u32, rate: Option<PortRate>) -> Result<()> {
        if let Some(PortRate { overhead_bytes, .. }) = rate
            && overhead_bytes > OVERHEAD_BYTES_MAX
        {
            let text = format!("{overhead_bytes} bytes, {OVERHEAD_BYTES_MAX} at most");
            return Err(Error::Invalid { object: format!("overhead of port {number}"), text });
        }
        self.change(number, |port| port.police(rate))
    }

    /// Sets or clears the carrier of the inner end of port `number`. Without carrier, the port
    /// forwards nothing in either direction. The setting survives making the port again.
    pub fn set_carrier(&self, number: u32, on: bool) -> Result<()> {
        let root = self.root(number)?;
        self.change(number, |port| {
            port.closed = u8::from(!on);
            let mtu = root.as_ref().map(|root| root.mtu);
            port.frame_bytes_max = mtu.map_or(0, |mtu| frame_bytes_max(mtu, !on));
        })?;
        let Some(root) = root else { return Ok(()) };
        veth::change(&self.netlink, root.index, Set::Up(on))
            .on("set the carrier of port", number)?;
        // The query makes the kernel announce the carrier at once (tap::set_carrier).
        let _ = self.peer(&root);
        Ok(())
    }

    /// Returns the differences between a port's inner end and `spec`; empty if there are none.
    pub fn changes(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<Vec<InnerEndChange>> {
        let root = self.root(spec.number)?.filter(|root| root.alias == WHOLE);
        let inner = root.map(|root| self.inner(&root, guest)).transpose()?.flatten();
        let Some(inner) = inner else { return Ok(vec![InnerEndChange::Gone]) };
        let changes = [
            (inner.name != spec.name).then_some(InnerEndChange::Renamed(inner.name)),
            (inner.mtu != spec.mtu).then_some(InnerEndChange::Resized(inner.mtu)),
            (inner.mac != spec.mac).then_some(InnerEndChange::Readdressed(inner.mac)),
            (!inner.up).then_some(InnerEndChange::Down),
        ];
        Ok(changes.into_iter().flatten().collect())
    }

    /// Returns the index of a port's inner end in the network
    /// namespace `guest`; `None` if it is not there.
    pub fn index(&self, guest: BorrowedFd<'_>, number: u32) -> Result<Option<u32>> {
        let root = self.root(number)?;
        let inner = root.map(|root| self.inner(&root, guest)).transpose()?.flatten();
        Ok(inner.map(|inner| inner.index))
    }

    /// Returns the counters of port `number`.
    pub fn counters(&self, number: u32) -> Result<KernelPortCounters> {
        // Read in this order, so that no frame counts as lost before it counts as arrived.
        let root = self.root(number)?;
        let inner = root.as_ref().map(|root| self.peer(root)).transpose()?.flatten();
        let mut counters = self.counts(number)?;
        counters.refused[Reason::Undelivered as usize] = match root {
            Some(root) => self.port(number)?.settled + root.tx_dropped,
            None => counters.missing(),
        };
        counters.unsent = inner.map_or(0, |inner| inner.tx_dropped);
        Ok(counters)
    }

    /// Returns the frames dropped at port `number` because no
    /// thread is charged for them ([`Reason::Unpaid`]).
    pub fn unpaid(&self, number: u32) -> Result<u64> {
        Ok(self.counts(number)?.refused[Reason::Unpaid as usize])
    }

    /// Returns the frames that the vrouter sent from port `number`,
    /// dropped ones included. Takes one system call.
    pub fn frames_sent(&self, number: u32) -> Result<u64> {
        Ok(self.counts(number)?.from_vrouter.frames)
    }

    /// Removes ports and all of their state. Frames that other ports send to them are dropped.
    /// Ignores ports that do not exist.
    pub fn remove(&self, numbers: &[u32]) -> Result<()> {
        let gone: BTreeSet<u32> = numbers.iter().copied().collect();
        // All ports that were ever joined to them: a later port may have the number.
        for (key, port) in self.all_settings()? {
            if port.to != OUTSIDE && port.to.checked_sub(1).is_some_and(|to| gone.contains(&to)) {
                self.change(key, |port| port.to = 0)?;
            }
        }
        self.delete_pairs(numbers)?;
        // Pins last: if this process dies, they show the next one what is left to remove.
        let mut vrouters = BTreeSet::new();
        for number in gone.iter().copied().filter(|number| *number < PORTS_MAX) {
            let key = number.to_ne_bytes();
            self.join(number, LinkTarget::None)?;
            let port = self.port(number)?;
            self.forget_inner(number, &port)?;
            vrouters.insert(port.vrouter);
            self.change(number, |port| *port = PortEntry::default())?;
            let bytes = self.counts.value_size() as usize;
            let cpus = libbpf_rs::num_possible_cpus().map_err(other).on("count", "processors")?;
            self.counts
                .update_percpu(&key, &vec![vec![0; bytes]; cpus], MapFlags::ANY)
                .map_err(other)
                .on("clear the counters of port", number)?;
        }
        self.forget_vrouters(vrouters)?;
        self.unpin_ports(numbers)
    }

    /// Deletes pairs and the pins of their links. The ports' settings stay.
    fn delete(&self, numbers: &[u32]) -> Result<()> {
        self.delete_pairs(numbers)?;
        self.unpin_ports(numbers)
    }

    fn delete_pairs(&self, numbers: &[u32]) -> Result<()> {
        let mut any = false;
        for &number in numbers {
            self.change(number, |port| port.frame_bytes_max = 0)?;
            if let Some(root) = self.root(number)? {
                veth::change(&self.netlink, root.index, Set::Group(DOOMED))
                    .on("delete port", number)?;
                any = true;
            }
        }
        if any {
            veth::delete_group(&self.netlink, DOOMED).on("delete", "ports")?;
        }
        Ok(())
    }

    fn unpin_ports(&self, numbers: &[u32]) -> Result<()> {
        numbers.iter().try_for_each(|number| unpin_port(&self.pins.join(number.to_string())))
    }

    fn pin(&self, number: u32, side: PairEnd) -> PathBuf {
        self.pins.join(number.to_string()).join(side.pin())
    }

    /// Attaches the program of one end. Pins its link, replacing the earlier pin.
    fn attach(&self, number: u32, side: PairEnd, netns: BorrowedFd<'_>, index: u32) -> Result<()> {
        let (pin, program) = (self.pin(number, side), &self.programs[side as usize]);
        if pins::detach_link(&pin) {
            remove_file(&pin)?;
        }
        fs::create_dir_all(self.pins.join(number.to_string())).on("make", pin.display())?;
        within(netns, || {
            let deadline = Instant::now() + UNPINNED_WAIT;
            loop {
                match create_link(program.as_fd(), index, XdpFlags::DRV_MODE) {
                    Err(error)
                        if error.kind() == io::ErrorKind::ResourceBusy
                            && Instant::now() < deadline =>
                    {
                        thread::sleep(Duration::from_millis(1));
                    }
                    link => {
                        return link
                            .and_then(|link| pin_link(&link, &pin))
                            .on("attach the program of port", number);
                    }
                }
            }
        })
    }

    /// Enters the root end of a port into the map.
    fn set_end(&self, number: u32) -> Result<()> {
        // The kernel looks up the index in the caller's namespace.
        within(self.netns(), || {
            let index = (number + INDEX_FIRST).to_ne_bytes();
            self.ends
                .update(&number.to_ne_bytes(), &index, MapFlags::ANY)
                .map_err(other)
                .on("set the root end of port", number)
        })
    }

    /// Enters the interface and vrouter of a port's inner end into the maps.
    /// Returns true if they were not entered yet.
    fn set_inner(&self, guest: BorrowedFd<'_>, spec: &PortSpec, index: u32) -> Result<bool> {
        let PortSpec { number, vrouter, mac, .. } = *spec;
        let was = self.port(number)?;
        // The kernel has 32 bits for it.
        let netns =
            rustix::fs::fstat(guest).on("ask for the namespace of port", number)?.st_ino as u32;
        let key = InnerKey { netns, index };
        let found = self.inners.lookup(key.as_bytes(), MapFlags::ANY).map_err(other);
        let found = found.on("find the inner end of port", number)?;
        let is_said = (was.vrouter, was.netns, was.inner, was.mac) == (vrouter, netns, index, mac);
        if is_said && found.as_deref() == Some(&number.to_ne_bytes()) {
            return Ok(false);
        }
        self.forget_inner(number, &was)?;
        self.inners
            .update(key.as_bytes(), &number.to_ne_bytes(), MapFlags::ANY)
            .map_err(other)
            .on("set the inner end of port", number)?;
        self.change(number, |port| {
            (port.vrouter, port.mac) = (vrouter, mac);
            (port.netns, port.inner) = (netns, index);
        })?;
        if was.inner != 0 && was.vrouter != vrouter {
            self.forget_vrouters([was.vrouter].into())?;
        }
        Ok(true)
    }

    /// Removes a port's inner end from the map, unless another port has the index by now.
    fn forget_inner(&self, number: u32, port: &PortEntry) -> Result<()> {
        let _alone = self.alone();
        let key = InnerKey { netns: port.netns, index: port.inner };
        let found = self.inners.lookup(key.as_bytes(), MapFlags::ANY).map_err(other);
        let found = found.on("find the inner end of port", number)?;
        if found.as_deref() == Some(&number.to_ne_bytes()) {
            self.inners
                .delete(key.as_bytes())
                .map_err(other)
                .on("forget the inner end of port", number)?;
        }
        Ok(())
    }

    fn root(&self, number: u32) -> Result<Option<VethInterface>> {
        let index = number.saturating_add(INDEX_FIRST);
        veth::find(&self.netlink, index, None).on("find the root end of port", number)
    }

    /// Returns the other end, in whichever namespace it is.
    fn peer(&self, root: &VethInterface) -> Result<Option<VethInterface>> {
        veth::find(&self.netlink, root.peer, root.netns).on("find the inner end of", &root.name)
    }

    /// Returns the other end, if it is in this namespace.
    fn inner(&self, root: &VethInterface, guest: BorrowedFd<'_>) -> Result<Option<VethInterface>> {
        let netns = veth::number_of(&self.netlink, guest).on("find", "a guest's namespace")?;
        if netns.is_none() || netns != root.netns {
            return Ok(None);
        }
        self.peer(root)
    }

    /// Returns the settings of all port numbers, whether the ports exist or not.
    fn all_settings(&self) -> Result<Vec<(u32, PortEntry)>> {
        let batch = self.ports.lookup_batch(1024, MapFlags::LOCK, MapFlags::ANY).map_err(other);
        let all = batch.on("read", "the settings of ports")?.filter_map(|(key, value)| {
            let key = u32::read_from_bytes(&key).ok()?;
            Some((key, PortEntry::read_from_bytes(&value).ok()?))
        });
        Ok(all.collect())
    }

    fn port(&self, number: u32) -> Result<PortEntry> {
        let found = self.ports.lookup(&number.to_ne_bytes(), MapFlags::LOCK);
        let found = found.map_err(other).on("read the settings of port", number)?;
        let found = found.and_then(|bytes| PortEntry::read_from_bytes(&bytes).ok());
        found.ok_or(Errno::ENOENT).on("read the settings of port", number)
    }

    /// Programs see either all of a change or nothing. Rate that they use meanwhile is not charged.
    fn change(&self, number: u32, change: impl FnOnce(&mut PortEntry)) -> Result<()> {
        let _alone = self.alone();
        let was = self.port(number)?;
        let mut port = was;
        change(&mut port);
        if port == was {
            return Ok(());
        }
        self.ports
            .update(&number.to_ne_bytes(), port.as_bytes(), MapFlags::LOCK)
            .map_err(other)
            .on("change the settings of port", number)
    }

    fn counts(&self, number: u32) -> Result<KernelPortCounters> {
        let by_cpu = self.counts.lookup_percpu(&number.to_ne_bytes(), MapFlags::ANY);
        let by_cpu = by_cpu.map_err(other).on("read the counters of port", number)?;
        Ok(PortCountsEntry::sum(by_cpu.unwrap_or_default()))
    }
}

/// Removes all ports, the namespace and all pins. Does nothing if there are none.
pub fn destroy(netns: &Path, pins: &Path) -> Result<()> {
    unpin(pins)?;
    // Without this mount, nothing keeps the namespace and its contents.
    match nix::mount::umount2(netns, nix::mount::MntFlags::MNT_DETACH) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => remove_file(netns),
        Err(error) => Err(error).on("unmount", netns.display()),
    }
}

fn check_number(what: &str, number: u32) -> Result<()> {
    if number < PORTS_MAX {
        return Ok(());
    }
    let text = format!("{PORTS_MAX} {what}s at most, from 0");
    Err(Error::Invalid { object: format!("{what} number {number}"), text })
}

fn root_name(number: u32) -> String {
    format!("p{number}")
}

/// Returns the longest frame that is delivered at a port.
fn frame_bytes_max(mtu: u32, closed: bool) -> u32 {
    if closed { 0 } else { mtu + BEYOND_MTU }
}

/// Opens the network namespace at a path; makes one if there is none.
fn open_netns(path: &Path) -> Result<OwnedFd> {
    let kept = || -> Option<OwnedFd> {
        let file = File::open(path).ok()?;
        let is = rustix::fs::fstatfs(&file).is_ok_and(|stat| stat.f_type == NSFS_MAGIC);
        is.then(|| file.into())
    };
    if let Some(netns) = kept() {
        return Ok(netns);
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).on("make", parent.display())?;
    }
    File::create(path).on("make", path.display())?;
    in_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).on("make", "a network namespace")?;
        // Root ends must not send anything by themselves.
        for scope in ["all", "default"] {
            sysctl::set_v6_here(&format!("net.ipv6.conf.{scope}.disable_ipv6"), "1")?;
        }
        rustix::mount::mount_bind("/proc/thread-self/ns/net", path)
            .on("keep a network namespace at", path.display())
    })?;
    kept().ok_or(Errno::ENOENT).on("keep a network namespace at", path.display())
}

/// Returns the numbers of ports with pinned links.
fn pinned_numbers(pins: &Path) -> Result<BTreeSet<u32>> {
    let entries = match fs::read_dir(pins) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.on("list", pins.display())?,
    };
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    Ok(entries.filter_map(number).collect())
}

/// Removes all pins, which detaches the programs.
fn unpin(pins: &Path) -> Result<()> {
    for number in pinned_numbers(pins)? {
        unpin_port(&pins.join(number.to_string()))?;
    }
    MAPS.iter().try_for_each(|name| remove_file(&pins.join(name)))?;
    remove_dir(pins)
}

fn unpin_port(pins: &Path) -> Result<()> {
    PairEnd::ALL.iter().try_for_each(|side| remove_file(&pins.join(side.pin())))?;
    remove_dir(pins)
}
