//! Pairs of virtual Ethernet interfaces, seen from the network namespace of one end.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL};
use rtnetlink::packet_route::RouteNetlinkMessage as Message;
use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute as Attribute, LinkFlags, LinkInfo, LinkMessage,
};
use rtnetlink::packet_route::nsid::{NsidAttribute, NsidMessage};

use super::PortSpec;
use crate::netlink::NetlinkPool;

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
    fn of(message: LinkMessage) -> Self {
        let mut end = Self {
            index: message.header.index,
            up: message.header.flags.contains(LinkFlags::Up),
            ..Self::default()
        };
        for attribute in message.attributes {
            match attribute {
                Attribute::IfName(name) => end.name = name,
                Attribute::IfAlias(alias) => end.alias = alias,
                Attribute::Address(mac) => end.mac = mac.try_into().unwrap_or_default(),
                Attribute::Mtu(mtu) => end.mtu = mtu,
                Attribute::Link(index) => end.peer = index,
                Attribute::LinkNetNsId(netns) => end.netns = Some(netns),
                Attribute::Stats64(stats) => end.tx_dropped = stats.tx_dropped,
                _ => {}
            }
        }
        end
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
    let common = [Attribute::Mtu(spec.mtu), Attribute::NumTxQueues(1), Attribute::NumRxQueues(1)];
    let mut inner = LinkMessage::default();
    inner.attributes = vec![
        Attribute::IfName(spec.name.clone()),
        Attribute::Address(spec.mac.to_vec()),
        Attribute::NetNsFd(guest.as_raw_fd()),
    ];
    inner.attributes.extend_from_slice(&common);
    let mut root = LinkMessage::default();
    root.header.index = index;
    root.attributes = vec![Attribute::IfName(name)];
    root.attributes.extend(common);
    root.attributes.push(Attribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(inner))),
    ]));
    netlink.exchange(Message::NewLink(root), NLM_F_CREATE | NLM_F_EXCL).map(drop)
}

/// Returns the interface of this index, here or in the
/// namespace of this number; `None` if there is none.
pub(super) fn find(
    netlink: &NetlinkPool,
    index: u32,
    netns: Option<i32>,
) -> io::Result<Option<VethInterface>> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.extend(netns.map(Attribute::IfNetnsId));
    match netlink.exchange(Message::GetLink(message), 0) {
        Ok(answers) => Ok(answers.into_iter().find_map(link).map(VethInterface::of)),
        // The namespace is being removed, or is gone.
        Err(error) if is(&error, &[Errno::ENODEV, Errno::EINVAL, Errno::ESRCH]) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns all interfaces here.
pub(super) fn all(netlink: &NetlinkPool) -> io::Result<impl Iterator<Item = VethInterface>> {
    let answers = netlink.exchange(Message::GetLink(LinkMessage::default()), NLM_F_DUMP)?;
    Ok(answers.into_iter().filter_map(link).map(VethInterface::of))
}

/// Changes the interface of this index here. (An interface in another namespace can't be changed: a
/// namespace number in the request would move the interface there.)
pub(super) fn change(netlink: &NetlinkPool, index: u32, change: VethChange) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    match change {
        VethChange::Up(up) => {
            message.header.change_mask = LinkFlags::Up;
            message.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
        }
        VethChange::Mtu(mtu) => message.attributes.push(Attribute::Mtu(mtu)),
        VethChange::Alias(alias) => message.attributes.push(Attribute::IfAlias(alias.into())),
        VethChange::Group(group) => message.attributes.push(Attribute::Group(group)),
    }
    netlink.exchange(Message::SetLink(message), 0).map(drop)
}

/// Deletes all interfaces here of a group, and with each its other end. One
/// call for many takes hardly longer than for one.
pub(super) fn delete_group(netlink: &NetlinkPool, group: u32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.attributes.push(Attribute::Group(group));
    match netlink.exchange(Message::DelLink(message), 0) {
        Err(error) if !is(&error, &[Errno::ENODEV]) => Err(error),
        _ => Ok(()),
    }
}

/// Returns the number by which this namespace knows another, if it has one.
pub(super) fn number_of(netlink: &NetlinkPool, netns: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    let mut message = NsidMessage::default();
    message.attributes.push(NsidAttribute::Fd(netns.as_raw_fd() as u32));
    let answers = netlink.exchange(Message::GetNsId(message), 0)?;
    Ok(answers.into_iter().find_map(|answer| {
        let Message::NewNsId(message) = answer else { return None };
        message.attributes.into_iter().find_map(|attribute| match attribute {
            NsidAttribute::Id(id) => u32::try_from(id).is_ok().then_some(id),
            _ => None,
        })
    }))
}

/// True if the error is one of these.
pub(super) fn is(error: &io::Error, those: &[Errno]) -> bool {
    error.raw_os_error().is_some_and(|code| those.contains(&Errno::from_raw(code)))
}

fn link(message: Message) -> Option<LinkMessage> {
    match message {
        Message::NewLink(link) => Some(link),
        _ => None,
    }
}
