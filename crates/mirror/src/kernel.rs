//! Parses rtnetlink messages into [`KernelEvent`]s, and makes requests.
//!
//! It parses only the fields that the mirror uses, directly from the bytes, because a table has a
//! million routes. It never panics for any bytes; unreadable messages yield no event.
//! Sources: linux/rtnetlink.h, linux/nexthop.h, linux/netconf.h, linux/neighbour.h; RFC 3549.

use std::hash::{BuildHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use foldhash::quality::FixedState;
use ipnet::IpNet;
use libc::{
    IFLA_ADDRESS, IFLA_CARRIER, IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINK, IFLA_LINK_NETNSID,
    IFLA_LINKINFO, IFLA_MTU, NDA_DST, NDA_LLADDR, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP,
    NLM_F_EXCL, NLM_F_REPLACE, NTF_PROXY, NTF_USE, RTA_DST, RTA_ENCAP, RTA_GATEWAY, RTA_METRICS,
    RTA_MULTIPATH, RTA_OIF, RTA_PREFSRC, RTA_PRIORITY, RTA_SRC, RTA_TABLE, RTA_VIA, RTM_DELADDR,
    RTM_DELLINK, RTM_DELNEIGH, RTM_DELNETCONF, RTM_DELROUTE, RTM_GETLINK, RTM_GETNEIGH,
    RTM_GETNETCONF, RTM_GETROUTE, RTM_NEWADDR, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWNETCONF,
    RTM_NEWROUTE, RTN_ANYCAST, RTN_BLACKHOLE, RTN_BROADCAST, RTN_LOCAL, RTN_UNICAST,
};
use pdp_netlink::{Message, Request, address, attributes, family, is_v6, text, u16_at, u32_at};

/// New or replaced nexthop object. The kernel then reports all routes of the object as replaced,
/// for the same request (`nexthop_replace_notify`).
pub const RTM_NEWNEXTHOP: u16 = 104;
const RTM_DELNEXTHOP: u16 = 105;
const RTM_GETNEXTHOP: u16 = 106;

const RTA_CACHEINFO: u16 = 12;
const RTA_NH_ID: u16 = 30;

const RTAX_MTU: u16 = 2;

/// Unit of times in the kernel's messages: a hundredth of a second (`USER_HZ`), rounded down. For
/// one tick, an expired time reads as 0, which means none.
const TICK: Duration = Duration::from_millis(10);

const NHA_ID: u16 = 1;
const NHA_GROUP: u16 = 2;
const NHA_BLACKHOLE: u16 = 4;
const NHA_OIF: u16 = 5;
const NHA_GATEWAY: u16 = 6;
const NHA_ENCAP: u16 = 8;
const NHA_FDB: u16 = 11;

const NETCONFA_IFINDEX: u16 = 1;
const NETCONFA_FORWARDING: u16 = 2;
const NETCONFA_IGNORE_ROUTES_WITH_LINKDOWN: u16 = 6;

/// Interface index that stands for all interfaces in a [`KernelEvent::Conf`].
pub const CONF_ALL: i32 = -1;

const RTNH_F_DEAD: u8 = 1;
const RTNH_F_LINKDOWN: u8 = 16;
const RTPROT_RA: u8 = 9;
/// Clone of a route for one destination, which is not part of the table.
const RTM_F_CLONED: u32 = 0x200;

/// Neighbour states in which the MAC address is usable for sending.
const NUD_VALID: u16 = libc::NUD_PERMANENT
    | libc::NUD_NOARP
    | libc::NUD_REACHABLE
    | libc::NUD_PROBE
    | libc::NUD_STALE
    | libc::NUD_DELAY;

/// Tables that the mirror follows, in the kernel's order of lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelTable {
    /// Addresses of the router itself.
    Local,
    /// Routes of routing software.
    Main,
}

impl KernelTable {
    fn from_number(number: u32) -> Option<Self> {
        match number {
            255 => Some(Self::Local),
            254 => Some(Self::Main),
            _ => None,
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Local => 255,
            Self::Main => 254,
        }
    }
}

/// A next hop as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelHop {
    /// Index of the interface; 0: none.
    pub ifindex: u32,
    /// Gateway; `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Weight, 1..=65535.
    pub weight: u16,
    /// True if it uses an encapsulation that only the kernel supports.
    pub encap: bool,
    /// State, which changes without a new route.
    pub state: HopState,
}

/// State of a hop since its route was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopState {
    /// True if the kernel does not use it (interface down, address gone, ...).
    pub dead: bool,
    /// True if its interface lost the carrier, which may be a reason not to use it.
    pub linkdown: bool,
}

/// Destination of a route in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KernelDestination {
    /// One of these hops.
    Hops(Vec<KernelHop>),
    /// Nexthop object of this number.
    Nexthop(u32),
    /// The router itself (local, anycast).
    Local,
    /// The router itself and others.
    Broadcast,
    /// Silent discard.
    Blackhole,
    /// Any type that only the kernel can answer.
    Kernel,
}

/// One route of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRoute {
    /// Destination; host bits zero.
    pub prefix: IpNet,
    /// Table.
    pub table: KernelTable,
    /// Selector of the packets that it applies to, 0 for all: the type of service (IPv4), or a
    /// digest of the source prefix (IPv6).
    pub selector: u16,
    /// Metric; lower is better.
    pub metric: u32,
    /// True if it may be one of several siblings that form a multipath route (IPv6).
    pub sibling: bool,
    /// Digest of everything by which the kernel distinguishes it
    /// from others of the same prefix and metric.
    pub identity: u32,
    /// Destination of its packets.
    pub destination: KernelDestination,
    /// Largest packet that the kernel forwards by it, bytes; 0: the interface's MTU applies.
    pub mtu: u32,
    /// Time from which the kernel no longer uses it (IPv6).
    pub expires: Option<Instant>,
}

impl KernelRoute {
    /// Returns the count of objects: itself and its hops.
    pub fn object_count(&self) -> usize {
        1 + match &self.destination {
            KernelDestination::Hops(hops) => hops.len(),
            _ => 0,
        }
    }
}

/// Position of a route among others of the same prefix and metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutePlacement {
    /// Only one: there was no other (`NLM_F_EXCL`).
    Only,
    /// Before the others.
    First,
    /// After the others.
    Last,
    /// In place of the first of them.
    Replace,
    /// Unchanged: repeated because its nexthop object changed.
    Again,
}

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInterface {
    /// Index.
    pub ifindex: u32,
    /// Name.
    pub name: String,
    /// True if administratively up.
    pub up: bool,
    /// True if it has carrier.
    pub carrier: bool,
    /// MAC address; zero if it has no address of six bytes.
    pub mac: [u8; 6],
    /// Largest packet, bytes.
    pub mtu: u32,
    /// Underlying interface, for a macvlan.
    pub over: Option<u32>,
}

/// A nexthop object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nexthop {
    /// One hop.
    Single(KernelHop),
    /// Others, with weights.
    Group(Vec<(u32, u16)>),
    /// Discards.
    Blackhole,
}

/// A change, or an object in a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelEvent {
    /// Current state of an interface.
    Link(KernelInterface),
    /// No such interface any more.
    LinkGone(u32),
    /// Settings of an interface, or of all ([`CONF_ALL`]); `None`: not included.
    Conf {
        /// True for IPv6.
        v6: bool,
        /// Interface.
        ifindex: i32,
        /// Forwarding.
        forwarding: Option<bool>,
        /// True if routes over an interface without carrier are not used.
        ignore_linkdown: Option<bool>,
    },
    /// Settings of an interface are gone.
    ConfGone {
        /// True for IPv6.
        v6: bool,
        /// Interface.
        ifindex: i32,
    },
    /// An address was added or removed.
    Address {
        /// True for IPv6.
        v6: bool,
    },
    /// A neighbour.
    Neighbour {
        /// Interface.
        ifindex: u32,
        /// Address of the neighbour.
        address: IpAddr,
        /// MAC address, while valid.
        mac: Option<[u8; 6]>,
        /// True if the kernel confirms the MAC address only after a request to use it.
        stale: bool,
    },
    /// A nexthop object, new or replaced.
    Nexthop(u32, Nexthop),
    /// No such nexthop object any more.
    NexthopGone(u32),
    /// A route, new or replaced.
    Route(KernelRoute, RoutePlacement),
    /// A route, or some of its hops (IPv6), is gone.
    RouteGone(KernelRoute),
}

impl KernelEvent {
    /// Returns the count of objects, of at most some hundred bytes each, that store the event:
    /// itself, with hops or members.
    pub fn object_count(&self) -> usize {
        match self {
            Self::Route(route, _) | Self::RouteGone(route) => route.object_count(),
            Self::Nexthop(_, Nexthop::Group(members)) => 1 + members.len(),
            _ => 1,
        }
    }
}

/// Kind of objects in a dump. The order is that of a full
/// dump: each kind refers only to earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DumpKind {
    /// Interfaces.
    Links,
    /// Settings (`v6`).
    Conf(bool),
    /// Neighbours.
    Neighbours,
    /// Nexthop objects.
    Nexthops,
    /// Routes of a table (`v6`).
    Routes(bool, KernelTable),
}

impl DumpKind {
    /// All.
    pub const ALL: [DumpKind; 9] = [
        Self::Links,
        Self::Conf(false),
        Self::Conf(true),
        Self::Neighbours,
        Self::Nexthops,
        Self::Routes(false, KernelTable::Local),
        Self::Routes(false, KernelTable::Main),
        Self::Routes(true, KernelTable::Local),
        Self::Routes(true, KernelTable::Main),
    ];

    /// Returns the dump request.
    pub fn request(self) -> Request {
        match self {
            Self::Links => Request::new(RTM_GETLINK, NLM_F_DUMP, &[0; 16]),
            Self::Conf(v6) => Request::new(RTM_GETNETCONF, NLM_F_DUMP, &[family(v6)]),
            Self::Neighbours => Request::new(RTM_GETNEIGH, NLM_F_DUMP, &[0; 12]),
            Self::Nexthops => Request::new(RTM_GETNEXTHOP, NLM_F_DUMP, &[0; 8]),
            Self::Routes(v6, table) => {
                let mut header = [0; 12];
                header[0] = family(v6);
                header[4] = table.number() as u8;
                let mut request = Request::new(RTM_GETROUTE, NLM_F_DUMP, &header);
                request.number(RTA_TABLE, table.number());
                request
            }
        }
    }
}

/// Returns the request to use a neighbour entry as if a packet had been sent to
/// it. The kernel then confirms a stale entry, and resolves one without a MAC
/// address. With `create`, it makes a missing entry.
pub fn use_neighbour(ifindex: u32, address: IpAddr, create: bool) -> Request {
    let mut header = [0; 12];
    header[0] = family(address.is_ipv6());
    header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    header[10] = NTF_USE;
    let mut request = Request::new(RTM_NEWNEIGH, if create { NLM_F_CREATE } else { 0 }, &header);
    request.address(NDA_DST, address);
    request
}

/// Returns a message's event, if it is relevant.
pub fn event(message: &Message<'_>) -> Option<KernelEvent> {
    let payload = message.payload;
    match message.kind {
        RTM_NEWROUTE => {
            let route = route(payload)?;
            // The kernel keeps an expired route for some time without using it.
            let is_over = route.expires.is_some_and(|at| at <= Instant::now());
            (!is_over).then(|| KernelEvent::Route(route, placement(message.flags, payload)))
        }
        RTM_DELROUTE => Some(KernelEvent::RouteGone(route(payload)?)),
        RTM_NEWNEIGH => neighbour(payload, false),
        RTM_DELNEIGH => neighbour(payload, true),
        RTM_NEWNEXTHOP => {
            let (id, nexthop) = nexthop(payload)?;
            Some(KernelEvent::Nexthop(id, nexthop?))
        }
        RTM_DELNEXTHOP => Some(KernelEvent::NexthopGone(nexthop(payload)?.0)),
        RTM_NEWLINK => Some(KernelEvent::Link(link(payload)?)),
        RTM_DELLINK => Some(KernelEvent::LinkGone(link(payload)?.ifindex)),
        RTM_NEWADDR | RTM_DELADDR => Some(KernelEvent::Address { v6: is_v6(*payload.first()?)? }),
        RTM_NEWNETCONF => conf(payload, false),
        RTM_DELNETCONF => conf(payload, true),
        _ => None,
    }
}
/// IPv4 reports the exact position of a route. IPv6 cannot put one before others.
fn placement(flags: u16, payload: &[u8]) -> RoutePlacement {
    let has = |flag: i32| flags & flag as u16 != 0;
    if has(NLM_F_REPLACE) {
        RoutePlacement::Replace
    } else if has(NLM_F_EXCL) {
        RoutePlacement::Only
    } else if has(NLM_F_APPEND) || payload.first() == Some(&family(true)) {
        RoutePlacement::Last
    } else {
        RoutePlacement::First
    }
}

fn route(payload: &[u8]) -> Option<KernelRoute> {
    let header = payload.first_chunk::<12>()?;
    let v6 = is_v6(header[0])?;
    let [_, length, source_length, tos, table, protocol, scope, kind, ..] = *header;
    let flags = u32_at(payload, 8)?;
    if flags & RTM_F_CLONED != 0 {
        return None;
    }
    let mut table = u32::from(table);
    let mut prefix =
        if v6 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    let mut source = 0;
    let (mut metric, mut nexthop, mut prefsrc, mut metrics) = (0, None, &[][..], &[][..]);
    let mut single = KernelHop {
        ifindex: 0,
        gateway: None,
        weight: 1,
        encap: false,
        state: hop_state(flags as u8),
    };
    let mut hops = Vec::new();
    let mut expires = None;
    for (kind, value) in attributes(&payload[12..]) {
        match kind {
            RTA_DST => prefix = address(value)?,
            RTA_TABLE => table = u32_at(value, 0)?,
            RTA_SRC => {
                source = digest(&(source_length, value), &KernelDestination::Kernel) as u16 | 1
            }
            RTA_PRIORITY => metric = u32_at(value, 0)?,
            RTA_NH_ID => nexthop = Some(u32_at(value, 0)?),
            RTA_PREFSRC => prefsrc = value,
            RTA_METRICS => metrics = value,
            RTA_CACHEINFO if v6 => expires = expiry(u32_at(value, 8)? as i32),
            RTA_MULTIPATH => hops = multipath(value)?,
            _ => hop_attribute(&mut single, kind, value)?,
        }
    }
    let destination = match (kind, nexthop) {
        (RTN_UNICAST | RTN_BLACKHOLE, Some(id)) => KernelDestination::Nexthop(id),
        (RTN_UNICAST, None) => {
            if hops.is_empty() {
                hops.push(single);
            }
            KernelDestination::Hops(hops)
        }
        (RTN_LOCAL | RTN_ANYCAST, _) => KernelDestination::Local,
        (RTN_BROADCAST, _) => KernelDestination::Broadcast,
        (RTN_BLACKHOLE, None) => KernelDestination::Blackhole,
        _ => KernelDestination::Kernel,
    };
    // If a nexthop object discards packets, the route's
    // displayed type changes; it is still the same route.
    let kind = if nexthop.is_some() { RTN_UNICAST } else { kind };
    let ifindex = if nexthop.is_some() { 0 } else { single.ifindex };
    let identity = digest(&(kind, protocol, scope, prefsrc, metrics, ifindex), &destination);
    let sibling = v6
        && protocol != RTPROT_RA
        && matches!(&destination, KernelDestination::Hops(hops) if hops.iter().all(|h| h.gateway.is_some()));
    Some(KernelRoute {
        prefix: IpNet::new(prefix, length).ok()?.trunc(),
        table: KernelTable::from_number(table)?,
        selector: if source_length == 0 { tos.into() } else { source },
        metric,
        sibling,
        identity: identity as u32,
        destination,
        mtu: mtu(metrics)?,
        expires,
    })
}

/// Returns the expiry time of a route that has so many hundredths of a second left.
fn expiry(ticks: i32) -> Option<Instant> {
    let left = TICK * ticks.unsigned_abs();
    match ticks {
        0 => None,
        1.. => Instant::now().checked_add(left + 2 * TICK),
        _ => Instant::now().checked_sub(left).or_else(|| Some(Instant::now())),
    }
}

/// Returns the largest packet of a route with these metrics, locked or not
/// (ip_dst_mtu_maybe_forward, ip6_fragment).
fn mtu(metrics: &[u8]) -> Option<u32> {
    let mtu = attributes(metrics).find(|(kind, _)| *kind == RTAX_MTU);
    mtu.map_or(Some(0), |(_, value)| u32_at(value, 0))
}

/// Returns a digest of a route without its changing state.
fn digest(value: &impl Hash, destination: &KernelDestination) -> u64 {
    let mut digest = FixedState::default().build_hasher();
    value.hash(&mut digest);
    match destination {
        KernelDestination::Hops(hops) => {
            let lasting = |hop: &KernelHop| KernelHop { state: HopState::default(), ..*hop };
            hops.iter().for_each(|hop| lasting(hop).hash(&mut digest));
        }
        other => other.hash(&mut digest),
    }
    digest.finish()
}

fn hop_state(flags: u8) -> HopState {
    HopState { dead: flags & RTNH_F_DEAD != 0, linkdown: flags & RTNH_F_LINKDOWN != 0 }
}

/// Applies an attribute to a hop; `None` if it is malformed.
fn hop_attribute(hop: &mut KernelHop, kind: u16, value: &[u8]) -> Option<()> {
    match kind {
        RTA_OIF => hop.ifindex = u32_at(value, 0)?,
        RTA_GATEWAY => hop.gateway = Some(address(value)?),
        RTA_VIA => hop.gateway = Some(address(value.get(2..)?)?),
        RTA_ENCAP => hop.encap = true,
        _ => {}
    }
    Some(())
}

fn multipath(mut rest: &[u8]) -> Option<Vec<KernelHop>> {
    let mut hops = Vec::new();
    while let Some(header) = rest.first_chunk::<8>() {
        let length = usize::from(u16_at(header, 0)?);
        let own = rest.get(8..length)?;
        let mut hop = KernelHop {
            ifindex: u32_at(header, 4)?,
            gateway: None,
            weight: u16::from(header[3]) + 1,
            encap: false,
            state: hop_state(header[2]),
        };
        for (kind, value) in attributes(own) {
            hop_attribute(&mut hop, kind, value)?;
        }
        hops.push(hop);
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    Some(hops)
}

fn nexthop(payload: &[u8]) -> Option<(u32, Option<Nexthop>)> {
    let mut id = None;
    let mut hop = KernelHop {
        ifindex: 0,
        gateway: None,
        weight: 1,
        encap: false,
        state: HopState::default(),
    };
    let (mut group, mut blackhole, mut bridge) = (None, false, false);
    for (kind, value) in attributes(payload.get(8..)?) {
        match kind {
            NHA_ID => id = Some(u32_at(value, 0)?),
            NHA_GROUP => {
                let member = |m: &[u8]| {
                    let weight = u16::from_ne_bytes([m[4], m[5]]).saturating_add(1);
                    (u32::from_ne_bytes([m[0], m[1], m[2], m[3]]), weight)
                };
                group = Some(value.chunks_exact(8).map(member).collect());
            }
            NHA_BLACKHOLE => blackhole = true,
            NHA_OIF => hop.ifindex = u32_at(value, 0)?,
            NHA_GATEWAY => hop.gateway = Some(address(value)?),
            NHA_ENCAP => hop.encap = true,
            NHA_FDB => bridge = true,
            _ => {}
        }
    }
    let nexthop = match group {
        _ if bridge => None,
        Some(group) => Some(Nexthop::Group(group)),
        None if blackhole => Some(Nexthop::Blackhole),
        None => Some(Nexthop::Single(hop)),
    };
    Some((id?, nexthop))
}

fn link(payload: &[u8]) -> Option<KernelInterface> {
    if *payload.first()? != libc::AF_UNSPEC as u8 {
        return None; // a bridge port's or a protocol's view of a link
    }
    let flags = u32_at(payload, 8)?;
    let mut link = KernelInterface {
        ifindex: u32_at(payload, 4)?,
        name: String::new(),
        up: flags & libc::IFF_UP as u32 != 0,
        carrier: false,
        mac: [0; 6],
        mtu: 0,
        over: None,
    };
    let (mut is_macvlan, mut is_elsewhere) = (false, false);
    for (kind, value) in attributes(payload.get(16..)?) {
        match kind {
            IFLA_IFNAME => link.name = text(value),
            IFLA_ADDRESS => link.mac = value.try_into().unwrap_or_default(),
            IFLA_MTU => link.mtu = u32_at(value, 0)?,
            IFLA_CARRIER => link.carrier = *value.first()? != 0,
            IFLA_LINK => link.over = Some(u32_at(value, 0)?),
            IFLA_LINK_NETNSID => is_elsewhere = true,
            IFLA_LINKINFO => {
                is_macvlan = attributes(value)
                    .any(|(kind, value)| kind == IFLA_INFO_KIND && value.starts_with(b"macvlan\0"));
            }
            _ => {}
        }
    }
    link.over = link.over.filter(|_| is_macvlan && !is_elsewhere);
    Some(link)
}

fn neighbour(payload: &[u8], gone: bool) -> Option<KernelEvent> {
    is_v6(*payload.first()?)?;
    let ifindex = u32_at(payload, 4)?;
    let state = u16_at(payload, 8)?;
    if *payload.get(10)? & NTF_PROXY != 0 {
        return None;
    }
    let (mut neighbour, mut mac) = (None, None);
    for (kind, value) in attributes(payload.get(12..)?) {
        match kind {
            NDA_DST => neighbour = Some(address(value)?),
            NDA_LLADDR => mac = value.try_into().ok(),
            _ => {}
        }
    }
    let valid = !gone && state & NUD_VALID != 0;
    Some(KernelEvent::Neighbour {
        ifindex,
        address: neighbour?,
        mac: mac.filter(|_| valid),
        stale: valid && state & libc::NUD_STALE != 0,
    })
}

fn conf(payload: &[u8], gone: bool) -> Option<KernelEvent> {
    let v6 = is_v6(*payload.first()?)?;
    let (mut ifindex, mut forwarding, mut ignore_linkdown) = (None, None, None);
    for (kind, value) in attributes(payload.get(4..)?) {
        match kind {
            NETCONFA_IFINDEX => ifindex = Some(u32_at(value, 0)? as i32),
            NETCONFA_FORWARDING => forwarding = Some(u32_at(value, 0)? != 0),
            NETCONFA_IGNORE_ROUTES_WITH_LINKDOWN => {
                ignore_linkdown = Some(u32_at(value, 0)? != 0);
            }
            _ => {}
        }
    }
    let ifindex = ifindex?;
    Some(match gone {
        true => KernelEvent::ConfGone { v6, ifindex },
        false => KernelEvent::Conf { v6, ifindex, forwarding, ignore_linkdown },
    })
}

#[cfg(test)]
mod tests {
    use pdp_netlink::messages;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parses_multipath_routes() {
        let hop = |weight: u8, flags: u8, ifindex: u32, gateway: [u8; 4]| {
            let mut bytes = vec![16, 0, flags, weight - 1];
            bytes.extend(ifindex.to_ne_bytes());
            bytes.extend([8, 0, RTA_GATEWAY as u8, 0]);
            bytes.extend(gateway);
            bytes
        };
        let hops = [hop(3, RTNH_F_DEAD, 7, [1, 2, 3, 4]), hop(1, 0, 8, [5, 6, 7, 8])].concat();
        let header = [libc::AF_INET as u8, 8, 0, 0, 254, 4, 0, RTN_UNICAST, 0, 0, 0, 0];
        let mut request = Request::new(RTM_NEWROUTE, NLM_F_REPLACE, &header);
        request.attribute(RTA_DST, &[10, 1, 1, 1]).number(RTA_PRIORITY, 5);
        request.attribute(RTA_MULTIPATH, &hops);
        let read: Vec<_> = messages(request.as_bytes()).filter_map(|it| event(&it)).collect();
        let [KernelEvent::Route(route, RoutePlacement::Replace)] = &read[..] else {
            panic!("{read:?}")
        };
        assert_eq!(route.prefix, "10.0.0.0/8".parse().unwrap());
        assert_eq!((route.metric, route.table, route.selector), (5, KernelTable::Main, 0));
        let hop = |ifindex, gateway: [u8; 4], weight, dead| KernelHop {
            ifindex,
            gateway: Some(gateway.into()),
            weight,
            encap: false,
            state: HopState { dead, linkdown: false },
        };
        let want = vec![hop(7, [1, 2, 3, 4], 3, true), hop(8, [5, 6, 7, 8], 1, false)];
        assert_eq!(route.destination, KernelDestination::Hops(want));
    }

    proptest! {
        #[test]
        fn netlink_parser_survives_noise(
            kind in 0u16..120, flags: u16, mut bytes: Vec<u8>, family in 0u8..12, cut in 0usize..80,
        ) {
            if let Some(first) = bytes.first_mut() {
                *first = family;
            }
            let mut request = Request::new(kind, flags.into(), &bytes);
            request.attribute(1, &[1, 2, 3, 4]);
            let datagram = request.as_bytes();
            let datagram = &datagram[..datagram.len().saturating_sub(cut)];
            for message in messages(datagram) {
                event(&message);
            }
        }
    }
}
