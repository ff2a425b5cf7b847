//! Ports of vrouters whose frames the kernel forwards, in the network namespace of their control guest.
//!
//! A port is a veth pair. The *inner end* is the vrouter's interface; the *root end* is in a network namespace of
//! PdP's own, which no tenant is in, and which is kept by a bind mount. An XDP program at the root end sees all
//! that the vrouter's stack sends and says what becomes of it by maps ([`Way`], [`Rate`]); a second one at the inner
//! end sees all that arrives, passes it to the stack or sends it on by [the short way](Ports::lend), and has the kernel
//! take frames that are redirected to it, whatever the guest sets there (`bpf/pdp_ports.bpf.c`). There is one program
//! of each kind, and one set of maps, for all vrouters of a machine.
//!
//! Namespace, pairs, links and maps live on without this process: frames go on, and counters too. The next process
//! adopts them and puts its own version of the programs in place of the old ones' without a gap.
//!
//! A link is a wire: what goes in comes out, whatever its link addresses, type, VLAN tags or contents. Dropped are
//! frames without a whole Ethernet header ([`Reason::Runt`]) and those of more bytes than the MTU of the port where
//! they are to come out, an Ethernet header and one VLAN tag have together ([`Reason::TooBig`]); the kernel does the
//! same by the MTU of the port where they go in, before the program sees them ([`Counters::unsent`]). So a frame with
//! two VLAN tags has 4 bytes less than the MTU.
//!
//! What a guest does to its end hurts itself: [`Ports::changes`] tells, and [`Ports::make`] makes a port again that
//! was deleted. It can't take the programs off, which links hold, and finds nobody else's end, since its own leads
//! to PdP's namespace. Two things it can turn on again that are off when it gets its end, and that are lost at XDP:
//! checksums that the device is to write, so that what its own programs send has wrong ones; and VLAN tags beside the
//! frame, so that they are gone.
//!
//! Limits: [`PORTS_MAX`]; [`RING_FRAMES`]. Counters take 288 bytes for each of [`PORTS_MAX`] and processor.
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
use rtnetlink::LinkUnspec;
use zerocopy::{FromBytes, IntoBytes};

use crate::error::{Context, Error, Result};
use crate::ethtool;
use crate::interface::Watch;
use crate::netlink::Kept;
use crate::netns::{in_thread, within};
use crate::pins::{self, remove_dir, remove_file};
use crate::sysctl;
use crate::tap;
use crate::xdp::{create_link, other, pin_link, pinned_index, pinned_link, program};
use layout::{Counts, Inner, Leaving, Limit, OUTSIDE, Port, Taker, Tunnel};
pub use short::{Aside, LEASE_MAX, NO_MTU, Power, USED_MAX, Used, Ways, now, obeys_hooks};
use veth::{Change as Set, End};

/// Ports of one daemon; their numbers are below it.
pub const PORTS_MAX: u32 = 16384;

/// Frames that wait at each end of a pair until the kernel has time for them; more are dropped.
pub const RING_FRAMES: u64 = 256;

/// Bytes that a frame may have beyond the MTU: an Ethernet header, and a tag (`is_skb_forwardable`).
const BEYOND_MTU: u32 = 14 + 4;

/// Limits of what comes by tunnels; their numbers are below it.
pub const LIMITS_MAX: u32 = 32_768;

/// Of `bpf/pdp_ports.h`.
const INDEX_FIRST: u32 = 4096;

/// NSFS_MAGIC of linux/magic.h.
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Alias of root ends whose port is all there; others were left half-made.
const WHOLE: &str = "whole";

/// Group of root ends that are to be deleted.
const DOOMED: u32 = 0x7064_7021;

/// A link whose pin somebody removed is gone a moment later.
const UNPINNED_WAIT: Duration = Duration::from_millis(500);

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pdp_ports.bpf.o"));

/// The maps. The first ones are shared with the programs of external interfaces.
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

/// Of [`MAPS`], those that programs of external interfaces have too.
pub(crate) const SHARED_MAPS: [&str; 6] = [MAPS[0], MAPS[1], MAPS[2], MAPS[3], MAPS[4], MAPS[5]];

/// A port to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// Its number, below [`PORTS_MAX`]; no other port of the daemon has it.
    pub number: u32,
    /// The number of its vrouter, below [`PORTS_MAX`]: all ports of the vrouter have it and no others do, e.g. the
    /// lowest number of its ports.
    pub vrouter: u32,
    /// Its name inside, at most 15 bytes.
    pub name: String,
    /// Its link address.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u32,
    /// Addresses with prefix lengths; none where the guest's own configuration gives them.
    pub addresses: Vec<IpNet>,
    /// Routes: destination and gateway.
    pub routes: Vec<(IpNet, IpAddr)>,
}

/// What was done so that a port is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// Nothing: all of it was there.
    Nothing,
    /// Parts of it were missing: a program, a setting, its MTU.
    Parts,
    /// All: a new pair, with addresses and routes.
    All,
}

/// Where frames go that a vrouter sends from a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// Nowhere: they are dropped.
    None,
    /// To the vrouter at the port of this number, whether it is there yet or not.
    Port(u32),
    /// By a tunnel. What comes by it comes to the port, too.
    Outside(Outside),
}

/// The outside end of a port's link. The interface runs the program of [`crate::xdp::Xdp::attach_for`] in its driver,
/// takes what the tunnel takes, and its driver sends what is redirected to it.
///
/// Known are VXLAN and Ethernet in UDP, over IPv4 and IPv6. Frames with IPv4 options, IPv6 extension headers or wrong
/// checksums are not found, and go on as all that the interface takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Index of the external interface, in the caller's network namespace.
    pub interface: u32,
    /// Its link address: that of what is sent, and whom what comes is for.
    pub mac: [u8; 6],
    /// The tunnel.
    pub by: Encapsulation,
    /// Number of the limit of what comes, below [`LIMITS_MAX`]; see [`Ports::limit`].
    pub limit: Option<u32>,
}

/// The next hop of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Its link address.
    pub mac: [u8; 6],
    /// Longest IP packet that interface and way carry, bytes.
    pub mtu: u16,
}

/// What may leave by a port: a token bucket of bytes and one of frames. Beyond it frames are dropped, none waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Bits a second; 0: any number. Of Ethernet frames from their destination address to the end of their payload.
    pub bps: u64,
    /// Burst, bytes, at least 2,048; 0: 10 ms of the rate, but at least 32 full frames.
    pub burst_bytes: u64,
    /// What each frame counts beyond its own bytes.
    pub overhead_bytes: u32,
    /// Frames a second; 0: any number. Their burst is 10 ms, but at least 32.
    pub pps: u64,
}

/// Most that a frame may count beyond its own bytes.
pub const OVERHEAD_BYTES_MAX: u32 = 4096;

named! {
    /// Why a frame was dropped at a port. Those that the mux has too have its names.
    Reason {
        /// Shorter than an Ethernet header.
        Runt = "runt",
        /// Beyond the port's rate.
        Policed = "policed",
        /// Sent out of a port without a link.
        Unconnected = "unconnected",
        /// This port is down, or that at the link's other end, or nothing is there.
        LinkDown = "link-down",
        /// Longer than the MTU of the port where it was to come out allows.
        TooBig = "too-big",
        /// Met congestion in the underlay, and what is inside can't be marked (RFC 6040 section 4.2).
        Congested = "congested",
        /// The tunnel's next hop is not known.
        UnderlayUnresolved = "underlay-unresolved",
        /// Longer than the underlay carries with the tunnel's headers.
        UnderlayTooBig = "underlay-too-big",
        /// Came for this port's vrouter, which has used the CPU time that it may ([`Ports::power`]).
        Power = "kernel-power",
        /// Came for this port's vrouter, and was served by another than the thread named for it ([`Ports::serve`]).
        Unpaid = "unpaid",
        /// Came for this port's vrouter, which did not get it: it takes frames too slowly, or its end is down or gone.
        Undelivered = "undelivered",
    }
}

/// Frames and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames.
    pub frames: u64,
    /// Their bytes, from the destination address to the end of the payload.
    pub bytes: u64,
}

/// What a port has counted since it was made first; making it again goes on from there.
///
/// What the vrouter sent went on its way or was dropped: `from_vrouter` = `to_link` + all of `dropped`. What came to it
/// by its link was delivered or refused: `from_link` = `to_vrouter` + all of `refused` + [`Counters::under_way`]. What
/// went the short way is in these as if it had gone through the vrouter's stack.
/// (Exactly so where nothing moves: reading takes a moment.) What a program gave to an external interface that had no
/// room for it is sent, here; the kernel counts it at the interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Sent by the vrouter, as far as they got to PdP's program.
    pub from_vrouter: Traffic,
    /// Given to the link.
    pub to_link: Traffic,
    /// Came by the link.
    pub from_link: Traffic,
    /// Given to the vrouter's kernel.
    pub to_vrouter: Traffic,
    /// Frames that the vrouter sent and that were dropped, by reason, in the order of [`Reason::ALL`].
    pub dropped: [u64; Reason::ALL.len()],
    /// Frames that came by the link and were dropped, by reason, in the order of [`Reason::ALL`].
    pub refused: [u64; Reason::ALL.len()],
    /// What became of the frames of `to_vrouter`, which is their sum.
    pub ways: Ways,
    /// Frames that the vrouter's kernel could not send, and knows so: its own count of what its interface dropped,
    /// of the present pair. The ring of [`RING_FRAMES`] was full, or the frame longer than its MTU allows. These
    /// are in none of the other counters.
    pub unsent: u64,
}

impl Counters {
    /// Frames dropped for a reason, either way.
    pub fn dropped(&self, reason: Reason) -> u64 {
        self.dropped[reason as usize] + self.refused[reason as usize]
    }

    /// Frames that came by the link and are between there and the vrouter: at most [`RING_FRAMES`] and what a
    /// processor has in hand. And those that were in the ring when the guest set its end down: the kernel does not
    /// count them, and they are known for lost when the pair is gone.
    pub fn under_way(&self) -> u64 {
        self.missing().saturating_sub(self.refused[Reason::Undelivered as usize])
    }

    /// Frames of which the programs don't know what became.
    fn missing(&self) -> u64 {
        let programs = &self.refused[..Reason::Undelivered as usize];
        self.from_link.frames.saturating_sub(self.to_vrouter.frames + programs.iter().sum::<u64>())
    }
}

/// What is other about a port's inner end than it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is deleted or in another network namespace; [`Ports::make`] makes it again.
    Gone,
    /// It has this name.
    Renamed(String),
    /// It has this MTU, bytes.
    Resized(u32),
    /// It has this link address.
    Readdressed([u8; 6]),
    /// It is set down.
    Down,
}

impl fmt::Display for Change {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => write!(to, "deleted or moved away"),
            Self::Renamed(name) => write!(to, "renamed to {name}"),
            Self::Resized(mtu) => write!(to, "its MTU set to {mtu}"),
            Self::Readdressed([a, b, c, d, e, f]) => {
                write!(
                    to,
                    "its link address set to {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"
                )
            }
            Self::Down => write!(to, "set down"),
        }
    }
}

/// All ports of a daemon. Dropping it leaves everything as it is; see [`destroy`].
///
/// Threads may use it at the same time, but for one port: no two of them may make or remove that. None waits for
/// another one whose request to the kernel takes long.
#[derive(Debug)]
pub struct Ports {
    netns: OwnedFd,
    netlink: Kept,
    pins: PathBuf,
    /// The programs of this version, for root ends and inner ends.
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
    /// Of what is read from a map, changed and written back, which takes no more than that.
    changing: Mutex<()>,
}

/// Which end of a pair: its program's link is pinned as `PINS/NUMBER/out` or `PINS/NUMBER/in`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Root,
    Inner,
}

impl Side {
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
    /// Adopts the namespace that is kept at the path `netns`, and what is pinned in `pins` (below a BPF file system,
    /// see [`crate::xdp::mount_bpf_fs`]); makes what is missing. All ports that are there run this version's programs
    /// afterwards. Maps of a version that had others are replaced: then links, rates and counters begin anew, and
    /// [`Ports::make`] finds parts missing.
    pub fn open(netns: &Path, pins: &Path) -> Result<Self> {
        let netns = open_netns(netns)?;
        let netlink = within(netns.as_fd(), Kept::open)?;
        pins::make_dir(pins)?;
        let place = |map: &mut OpenMapMut<'_>| {
            Ok(MAPS.into_iter().find(|name| map.name() == *name).map(|name| pins.join(name)))
        };
        let empty = || unpin(pins).and_then(|()| pins::make_dir(pins));
        let object = pins::load(OBJECT, "the programs of ports", place, empty)?;
        let fd = |side: Side| {
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
            programs: [fd(Side::Root)?, fd(Side::Inner)?],
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
            for side in Side::ALL {
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

    /// Where its maps are pinned.
    pub(crate) fn pins(&self) -> &Path {
        &self.pins
    }

    /// The namespace of the root ends.
    pub fn netns(&self) -> BorrowedFd<'_> {
        self.netns.as_fd()
    }

    /// Tells that some port's root end may have changed or gone: a guest deleted its end, or took it down or up.
    /// Changes of an inner end's name, MTU or address are not told.
    pub fn watch(&self) -> Result<Watch> {
        within(self.netns(), Watch::new)
    }

    /// The numbers of all ports of which anything is there.
    pub fn all(&self) -> Result<BTreeSet<u32>> {
        let ends = veth::all(&self.netlink).on("list", "root ends")?;
        let mut numbers: BTreeSet<u32> =
            ends.filter_map(|end| end.index.checked_sub(INDEX_FIRST)).collect();
        numbers.split_off(&PORTS_MAX);
        numbers.extend(pinned_numbers(&self.pins)?);
        Ok(numbers)
    }

    /// Makes what is missing of a port whose inner end is in the network namespace `guest`: the pair, with
    /// addresses and routes, and the programs; sets its MTU if it has another one from here. What else the guest has
    /// changed about its end stays. A port that is new has no link and no limit, and is up; one that is made again
    /// has what it had.
    ///
    /// # Errors
    /// What the kernel refuses, e.g. since the guest has another interface of this name. Nothing is left of a pair
    /// that could not be finished.
    pub fn make(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<Made> {
        let number = spec.number;
        check_number("port", number)?;
        check_number("vrouter", spec.vrouter)?;
        // The kernel would cut it, or say no more than that it is wrong.
        tap::named_request(&spec.name)?;
        let root = self.root(number)?;
        if let Some(root) = root.as_ref().filter(|root| root.alias == WHOLE)
            && let Some(inner) = self.inner(root, guest)?
        {
            return self.mend(guest, spec, root, &inner);
        }
        if root.is_some() {
            self.delete(&[number])?;
        }
        // The index that its inner end had may be another's by now: it leads nowhere before there is a root end again.
        self.forget_inner(number, &self.port(number)?)?;
        // Of a pair that is gone nothing is under way.
        let lost = self.counts(number)?.missing();
        self.change(number, |port| port.settled = lost)?;
        let made = self.make_pair(guest, spec);
        if made.is_err() {
            // Whatever was in the way of it tells more.
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
        // Before either end is up, so that no frame passes by.
        self.attach(*number, Side::Root, self.netns(), root.index)?;
        self.attach(*number, Side::Inner, guest, root.peer)?;
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
            let link = LinkUnspec::new_with_index(root.peer).up().build();
            tap::equip(name, link, &spec.addresses, &spec.routes)
        })?;
        set(Set::Alias(WHOLE))?;
        if closed { set(Set::Up(false)) } else { Ok(()) }
    }

    /// Of a port whose pair is there.
    fn mend(
        &self,
        guest: BorrowedFd<'_>,
        spec: &PortSpec,
        root: &End,
        inner: &End,
    ) -> Result<Made> {
        let number = spec.number;
        let mut made = Made::Nothing;
        for (side, netns, end) in [(Side::Root, self.netns(), root), (Side::Inner, guest, inner)] {
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
            let set = |netlink: &Kept, index| {
                veth::change(netlink, index, Set::Mtu(spec.mtu)).on("set the MTU of", &spec.name)
            };
            set(&self.netlink, root.index)?;
            within(guest, || set(&Kept::open()?, root.peer))?;
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

    /// Says where frames go that the vrouter sends from port `number`. A link between two ports needs two calls. A
    /// tunnel's next hop is not known until [`Ports::set_hop`] says it, or what it was where the tunnel is the same.
    ///
    /// # Errors
    /// A tunnel of a kind that is not known here, or that is another port's.
    pub fn join(&self, number: u32, way: Way) -> Result<()> {
        let before = self.leaving(number)?.map(|leaving| leaving.tunnel);
        let now = match &way {
            Way::None | Way::Port(_) => None,
            Way::Outside(outside) => Some(self.connect(number, outside)?),
        };
        self.change(number, |port| {
            port.to = match way {
                Way::None => 0,
                Way::Port(other) => other.saturating_add(1),
                Way::Outside(_) => OUTSIDE,
            }
        })?;
        let delete = |map: &MapHandle, key: &[u8]| match map.delete(key) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(other(error)).on("let go the tunnel of port", number)
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

    /// Has what comes by a tunnel come to a port, and what the port sends to a tunnel go by it.
    fn connect(&self, number: u32, outside: &Outside) -> Result<Tunnel> {
        let Outside { interface, mac, by, limit } = outside;
        let invalid = |text| Err(Error::Invalid { object: format!("port {number} by {by}"), text });
        let Some(new) = Leaving::new(*interface, by, *mac) else {
            return invalid("not a tunnel that the kernel data plane knows".into());
        };
        if limit.is_some_and(|limit| limit >= LIMITS_MAX) {
            return invalid(format!("{LIMITS_MAX} limits at most, from 0"));
        }
        let key = new.tunnel.as_bytes();
        let _alone = self.alone();
        let there = self.tunnels.lookup(key, MapFlags::ANY).map_err(other);
        let there = there.on("look for the tunnel of port", number)?;
        if let Some(taker) = there.and_then(|bytes| Taker::read_from_bytes(&bytes).ok())
            && taker.port != number
        {
            return invalid(format!("taken by port {}", taker.port));
        }
        let set = |map: &MapHandle, key: &[u8], value: &[u8]| {
            map.update(key, value, MapFlags::ANY)
                .map_err(other)
                .on("set the tunnel of port", number)
        };
        let port = number.to_ne_bytes();
        if !self.leaving(number)?.is_some_and(|old| old.is_like(new)) {
            set(&self.outsides, &port, new.as_bytes())?;
        }
        set(&self.devices, &port, &interface.to_ne_bytes())?;
        let limit = limit.map_or(0, |limit| limit + 1);
        let taker = Taker { port: number, limit, mac: *mac, reserved: 0 };
        set(&self.tunnels, key, taker.as_bytes())?;
        Ok(new.tunnel)
    }

    /// Says where frames of the tunnel of port `number` are sent to; `None`: it is not known, and they are dropped.
    /// No change where it has no tunnel.
    pub fn set_hop(&self, number: u32, hop: Option<Hop>) -> Result<()> {
        let _alone = self.alone();
        let Some(mut leaving) = self.leaving(number)? else { return Ok(()) };
        leaving.set_hop(hop);
        self.outsides
            .update(&number.to_ne_bytes(), leaving.as_bytes(), MapFlags::EXIST)
            .map_err(other)
            .on("set the next hop of port", number)
    }

    /// Limits what comes by all tunnels that have limit `number`; `None`: no more. Frames count as they are behind the
    /// outer headers, and nothing beyond that.
    pub fn limit(&self, number: u32, rate: Option<Rate>) -> Result<()> {
        let key = number.to_ne_bytes();
        let _alone = self.alone();
        let found =
            self.limits.lookup(&key, MapFlags::LOCK).map_err(other).on("read limit", number)?;
        let found = found.and_then(|bytes| Limit::read_from_bytes(&bytes).ok());
        let mut limit = found.ok_or(Errno::ENOENT).on("read limit", number)?;
        limit.police(rate);
        self.limits
            .update(&key, limit.as_bytes(), MapFlags::LOCK)
            .map_err(other)
            .on("set limit", number)
    }

    fn leaving(&self, number: u32) -> Result<Option<Leaving>> {
        let found = self.outsides.lookup(&number.to_ne_bytes(), MapFlags::ANY).map_err(other);
        let found = found.on("read the tunnel of port", number)?;
        Ok(found.and_then(|bytes| Leaving::read_from_bytes(&bytes).ok()))
    }

    /// Limits what the vrouter sends from port `number`; `None`: no more. Where the limit stays as it is, its burst is
    /// not had anew.
    pub fn police(&self, number: u32, rate: Option<Rate>) -> Result<()> {
        if let Some(Rate { overhead_bytes, .. }) = rate
            && overhead_bytes > OVERHEAD_BYTES_MAX
        {
            let text = format!("{overhead_bytes} bytes, {OVERHEAD_BYTES_MAX} at most");
            return Err(Error::Invalid { object: format!("overhead of port {number}"), text });
        }
        self.change(number, |port| port.police(rate))
    }

    /// Gives the inner end of port `number` its carrier or takes it. Without it nothing goes either way, also where the
    /// port is made again.
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
        // Whoever asks for it has the kernel tell of it at once (tap::set_carrier).
        let _ = self.peer(&root);
        Ok(())
    }

    /// What is other about the inner end of a port than `spec` has it; nothing if it is as it was made.
    pub fn changes(&self, guest: BorrowedFd<'_>, spec: &PortSpec) -> Result<Vec<Change>> {
        let root = self.root(spec.number)?.filter(|root| root.alias == WHOLE);
        let inner = root.map(|root| self.inner(&root, guest)).transpose()?.flatten();
        let Some(inner) = inner else { return Ok(vec![Change::Gone]) };
        let changes = [
            (inner.name != spec.name).then_some(Change::Renamed(inner.name)),
            (inner.mtu != spec.mtu).then_some(Change::Resized(inner.mtu)),
            (inner.mac != spec.mac).then_some(Change::Readdressed(inner.mac)),
            (!inner.up).then_some(Change::Down),
        ];
        Ok(changes.into_iter().flatten().collect())
    }

    /// Index of the inner end of a port in the network namespace `guest`; `None`: it is not there.
    pub fn index(&self, guest: BorrowedFd<'_>, number: u32) -> Result<Option<u32>> {
        let root = self.root(number)?;
        let inner = root.map(|root| self.inner(&root, guest)).transpose()?.flatten();
        Ok(inner.map(|inner| inner.index))
    }

    /// What port `number` has counted.
    pub fn counters(&self, number: u32) -> Result<Counters> {
        // In this order, so that nothing is lost before it came.
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

    /// Frames that were dropped at port `number` since nobody pays for them ([`Reason::Unpaid`]).
    pub fn unpaid(&self, number: u32) -> Result<u64> {
        Ok(self.counts(number)?.refused[Reason::Unpaid as usize])
    }

    /// Frames that the vrouter sent from port `number`, be they dropped or not. Takes one system call.
    pub fn made(&self, number: u32) -> Result<u64> {
        Ok(self.counts(number)?.from_vrouter.frames)
    }

    /// Removes ports with all that is theirs. What other ports send to them goes nowhere. No change if there are none.
    pub fn remove(&self, numbers: &[u32]) -> Result<()> {
        let gone: BTreeSet<u32> = numbers.iter().copied().collect();
        // All that were ever joined: a port may have the number later.
        for (key, port) in self.all_settings()? {
            if port.to != OUTSIDE && port.to.checked_sub(1).is_some_and(|to| gone.contains(&to)) {
                self.change(key, |port| port.to = 0)?;
            }
        }
        self.delete_pairs(numbers)?;
        // Pins last: by them the next process knows what is left to be removed, should this one die.
        let mut vrouters = BTreeSet::new();
        for number in gone.iter().copied().filter(|number| *number < PORTS_MAX) {
            let key = number.to_ne_bytes();
            self.join(number, Way::None)?;
            let port = self.port(number)?;
            self.forget_inner(number, &port)?;
            vrouters.insert(port.vrouter);
            self.change(number, |port| *port = Port::default())?;
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

    /// Deletes pairs and the pins of their links. Their settings stay.
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

    fn pin(&self, number: u32, side: Side) -> PathBuf {
        self.pins.join(number.to_string()).join(side.pin())
    }

    /// Attaches the program of one end, and pins its link in place of what was pinned.
    fn attach(&self, number: u32, side: Side, netns: BorrowedFd<'_>, index: u32) -> Result<()> {
        let (pin, program) = (self.pin(number, side), &self.programs[side as usize]);
        if let Some(link) = pinned_link(&pin) {
            // It may be that of an interface that is gone.
            let _ = link.detach();
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

    /// Says that the root end of a port is there.
    fn set_end(&self, number: u32) -> Result<()> {
        // The kernel looks for the index in the caller's namespace.
        within(self.netns(), || {
            let index = (number + INDEX_FIRST).to_ne_bytes();
            self.ends
                .update(&number.to_ne_bytes(), &index, MapFlags::ANY)
                .map_err(other)
                .on("set the root end of port", number)
        })
    }

    /// Says which interface of which vrouter the inner end of a port is; whether that was not said yet.
    fn set_inner(&self, guest: BorrowedFd<'_>, spec: &PortSpec, index: u32) -> Result<bool> {
        let PortSpec { number, vrouter, mac, .. } = *spec;
        let was = self.port(number)?;
        // The kernel has 32 bits for it.
        let netns =
            rustix::fs::fstat(guest).on("ask for the namespace of port", number)?.st_ino as u32;
        let key = Inner { netns, index };
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

    /// Takes it back; another port that got the index since keeps it.
    fn forget_inner(&self, number: u32, port: &Port) -> Result<()> {
        let _alone = self.alone();
        let key = Inner { netns: port.netns, index: port.inner };
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

    fn root(&self, number: u32) -> Result<Option<End>> {
        let index = number.saturating_add(INDEX_FIRST);
        veth::find(&self.netlink, index, None).on("find the root end of port", number)
    }

    /// The other end, wherever it is.
    fn peer(&self, root: &End) -> Result<Option<End>> {
        veth::find(&self.netlink, root.peer, root.netns).on("find the inner end of", &root.name)
    }

    /// The other end, if it is in this namespace.
    fn inner(&self, root: &End, guest: BorrowedFd<'_>) -> Result<Option<End>> {
        let netns = veth::number_of(&self.netlink, guest).on("find", "a guest's namespace")?;
        if netns.is_none() || netns != root.netns {
            return Ok(None);
        }
        self.peer(root)
    }

    /// The settings of all ports, whether they are there or not, by number.
    fn all_settings(&self) -> Result<Vec<(u32, Port)>> {
        let batch = self.ports.lookup_batch(1024, MapFlags::LOCK, MapFlags::ANY).map_err(other);
        let all = batch.on("read", "the settings of ports")?.filter_map(|(key, value)| {
            let key = u32::read_from_bytes(&key).ok()?;
            Some((key, Port::read_from_bytes(&value).ok()?))
        });
        Ok(all.collect())
    }

    fn port(&self, number: u32) -> Result<Port> {
        let found = self.ports.lookup(&number.to_ne_bytes(), MapFlags::LOCK);
        let found = found.map_err(other).on("read the settings of port", number)?;
        let found = found.and_then(|bytes| Port::read_from_bytes(&bytes).ok());
        found.ok_or(Errno::ENOENT).on("read the settings of port", number)
    }

    /// Programs see all of a change or nothing. What they take of the rate meanwhile is not charged.
    fn change(&self, number: u32, change: impl FnOnce(&mut Port)) -> Result<()> {
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

    fn counts(&self, number: u32) -> Result<Counters> {
        let by_cpu = self.counts.lookup_percpu(&number.to_ne_bytes(), MapFlags::ANY);
        let by_cpu = by_cpu.map_err(other).on("read the counters of port", number)?;
        Ok(Counts::sum(by_cpu.unwrap_or_default()))
    }
}

/// Removes all ports, the namespace and what is pinned. No change if there is nothing.
pub fn destroy(netns: &Path, pins: &Path) -> Result<()> {
    unpin(pins)?;
    // Without it nothing keeps the namespace, nor what is in it.
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

/// Longest frame that is delivered at a port.
fn frame_bytes_max(mtu: u32, closed: bool) -> u32 {
    if closed { 0 } else { mtu + BEYOND_MTU }
}

/// The network namespace kept at a path, made if there is none.
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
        // Root ends are to say nothing by themselves.
        for scope in ["all", "default"] {
            sysctl::set_v6_here(&format!("net.ipv6.conf.{scope}.disable_ipv6"), "1")?;
        }
        rustix::mount::mount_bind("/proc/thread-self/ns/net", path)
            .on("keep a network namespace at", path.display())
    })?;
    kept().ok_or(Errno::ENOENT).on("keep a network namespace at", path.display())
}

/// The numbers of ports of which links are pinned.
fn pinned_numbers(pins: &Path) -> Result<BTreeSet<u32>> {
    let entries = match fs::read_dir(pins) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.on("list", pins.display())?,
    };
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    Ok(entries.filter_map(number).collect())
}

/// Removes all that is pinned, and takes the programs off.
fn unpin(pins: &Path) -> Result<()> {
    for number in pinned_numbers(pins)? {
        unpin_port(&pins.join(number.to_string()))?;
    }
    MAPS.iter().try_for_each(|name| remove_file(&pins.join(name)))?;
    remove_dir(pins)
}

fn unpin_port(pins: &Path) -> Result<()> {
    Side::ALL.iter().try_for_each(|side| remove_file(&pins.join(side.pin())))?;
    remove_dir(pins)
}
