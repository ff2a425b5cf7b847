//! Pairs of virtual Ethernet interfaces, seen from the network namespace of one end.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use pdp_netlink::{Message, Request, attributes, error_code, text, u32_at};

use super::PortSpec;
use crate::netlink::{NEW, link_header};
use crate::netlink_pool::NetlinkPool;

/// Attributes of linux/veth.h and linux/net_namespace.h.
const VETH_INFO_PEER: u16 = 1;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;

/// Place of `tx_dropped` in `struct rtnl_link_stats64`, bytes.
const TX_DROPPED_AT: usize = 56;

/// One end of a pair.
#[derive(Clone, Debug, Default)]
pub(super) struct VethInterface {
    pub index: u32,
    pub name: String,
    pub alias: String,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub up: bool,
    /// Index of the other end in its namespace.
    pub peer: u32,
    /// Number by which the queried namespace knows that of the other end; `None` if it is the same.
    pub netns: Option<i32>,
    /// Frames that could not be sent.
    pub tx_dropped: u64,
}

impl VethInterface {
    fn read(message: &Message<'_>) -> Option<Self> {
        let payload = message.payload;
        let mut end = Self {
            index: u32_at(payload, 4)?,
            up: u32_at(payload, 8)? as i32 & libc::IFF_UP != 0,
            ..Self::default()
        };
        for (kind, value) in attributes(payload.get(16..)?) {
            match kind {
                libc::IFLA_IFNAME => end.name = text(value),
                libc::IFLA_IFALIAS => end.alias = text(value),
                libc::IFLA_ADDRESS => end.mac = value.try_into().unwrap_or_default(),
                libc::IFLA_MTU => end.mtu = u32_at(value, 0)?,
                libc::IFLA_LINK => end.peer = u32_at(value, 0)?,
                libc::IFLA_LINK_NETNSID => end.netns = Some(u32_at(value, 0)? as i32),
                libc::IFLA_STATS64 => {
                    let bytes = value.get(TX_DROPPED_AT..)?.first_chunk()?;
                    end.tx_dropped = u64::from_ne_bytes(*bytes);
                }
                _ => {}
            }
        }
        Some(end)
    }
}

/// Change of an interface.
pub(super) enum VethChange {
    Up(bool),
    Mtu(u32),
    Alias(&'static str),
    Group(u32),
}

/// Makes a pair with both ends down: one here with this name and index, the other as `spec` says in
/// the namespace `guest`. Each end has a single queue, so all sending processors share one ring.
pub(super) fn make(
    netlink: &NetlinkPool,
    (name, index): (String, u32),
    guest: BorrowedFd<'_>,
    spec: &PortSpec,
) -> io::Result<()> {
    let common = |end: &mut Request| {
        end.number(libc::IFLA_MTU, spec.mtu);
        end.number(libc::IFLA_NUM_TX_QUEUES, 1).number(libc::IFLA_NUM_RX_QUEUES, 1);
    };
    let mut root = Request::new(libc::RTM_NEWLINK, NEW, &link_header(index, 0, 0));
    common(root.text(libc::IFLA_IFNAME, &name));
    root.nested(libc::IFLA_LINKINFO, |info| {
        info.text(libc::IFLA_INFO_KIND, "veth").nested(libc::IFLA_INFO_DATA, |data| {
            data.nested(VETH_INFO_PEER, |inner| {
                inner.raw(&link_header(0, 0, 0)).text(libc::IFLA_IFNAME, &spec.name);
                inner.attribute(libc::IFLA_ADDRESS, &spec.mac);
                inner.number(libc::IFLA_NET_NS_FD, guest.as_raw_fd() as u32);
                common(inner);
            });
        });
    });
    netlink.with(|netlink| netlink.change(&mut root))
}

/// Returns the interface of this index, here or in the
/// namespace of this number; `None` if there is none.
pub(super) fn find(
    netlink: &NetlinkPool,
    index: u32,
    netns: Option<i32>,
) -> io::Result<Option<VethInterface>> {
    let mut request = Request::new(libc::RTM_GETLINK, 0, &link_header(index, 0, 0));
    if let Some(netns) = netns {
        request.number(libc::IFLA_TARGET_NETNSID, netns as u32);
    }
    match netlink.with(|netlink| netlink.query(&mut request, VethInterface::read)) {
        // The namespace is being removed, or is gone.
        Err(error) if is(&error, &[Errno::ENODEV, Errno::EINVAL, Errno::ESRCH]) => Ok(None),
        result => result,
    }
}

/// Returns all interfaces here.
pub(super) fn all(netlink: &NetlinkPool) -> io::Result<Vec<VethInterface>> {
    let mut request = Request::new(libc::RTM_GETLINK, 0, &[0; 16]);
    netlink.with(|netlink| netlink.list(&mut request, VethInterface::read))
}

/// Changes the interface of this index here. (An interface in another namespace can't be changed: a
/// namespace number in the request would move the interface there.)
pub(super) fn change(netlink: &NetlinkPool, index: u32, change: VethChange) -> io::Result<()> {
    let (flags, mask) = match change {
        VethChange::Up(up) => (if up { libc::IFF_UP } else { 0 }, libc::IFF_UP),
        _ => (0, 0),
    };
    let mut request = Request::new(libc::RTM_SETLINK, 0, &link_header(index, flags, mask));
    match change {
        VethChange::Up(_) => &mut request,
        VethChange::Mtu(mtu) => request.number(libc::IFLA_MTU, mtu),
        VethChange::Alias(alias) => request.attribute(libc::IFLA_IFALIAS, alias.as_bytes()),
        VethChange::Group(group) => request.number(libc::IFLA_GROUP, group),
    };
    netlink.with(|netlink| netlink.change(&mut request))
}

/// Deletes all interfaces here of a group, and with each its other end. One
/// call for many takes hardly longer than for one.
pub(super) fn delete_group(netlink: &NetlinkPool, group: u32) -> io::Result<()> {
    let mut request = Request::new(libc::RTM_DELLINK, 0, &[0; 16]);
    request.number(libc::IFLA_GROUP, group);
    match netlink.with(|netlink| netlink.change(&mut request)) {
        Err(error) if !is(&error, &[Errno::ENODEV]) => Err(error),
        _ => Ok(()),
    }
}

/// Returns the number by which this namespace knows another, if it has one.
pub(super) fn number_of(netlink: &NetlinkPool, netns: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    let mut request = Request::new(libc::RTM_GETNSID, 0, &[0]);
    request.number(NETNSA_FD, netns.as_raw_fd() as u32);
    let id = netlink.with(|netlink| {
        netlink.query(&mut request, |answer| {
            // Behind `struct rtgenmsg`, which is one byte.
            let mut ids = attributes(answer.payload.get(4..)?);
            ids.find(|(kind, _)| *kind == NETNSA_NSID).and_then(|(_, id)| u32_at(id, 0))
        })
    })?;
    Ok(id.map(|id| id as i32).filter(|id| *id >= 0))
}

/// True if the error is one of these.
pub(super) fn is(error: &io::Error, those: &[Errno]) -> bool {
    error_code(error).is_some_and(|code| those.contains(&Errno::from_raw(code)))
}
