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
use crate::netlink::Kept;

/// One end of a pair.
#[derive(Clone, Debug, Default)]
pub(super) struct End {
    pub index: u32,
    pub name: String,
    pub alias: String,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub up: bool,
    /// Index of the other end in its namespace.
    pub peer: u32,
    /// Number that the namespace asked has for that of the other end; `None` if it is the same.
    pub netns: Option<i32>,
    /// Frames that could not be sent.
    pub tx_dropped: u64,
}

impl End {
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

/// What is to be changed about an interface.
pub(super) enum Change {
    Up(bool),
    Mtu(u32),
    Alias(&'static str),
    Group(u32),
}

/// Makes a pair, both ends down: one here of this name and index, the other as `spec` has it in the namespace
/// `guest`. One queue each: who sends on many processors has them meet in one ring.
pub(super) fn make(
    netlink: &Kept,
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
    netlink.ask(Message::NewLink(root), NLM_F_CREATE | NLM_F_EXCL).map(drop)
}

/// The interface of this index, here or in the namespace of this number; `None` if there is none.
pub(super) fn find(netlink: &Kept, index: u32, netns: Option<i32>) -> io::Result<Option<End>> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.extend(netns.map(Attribute::IfNetnsId));
    match netlink.ask(Message::GetLink(message), 0) {
        Ok(answers) => Ok(answers.into_iter().find_map(link).map(End::of)),
        // The namespace goes, or is gone.
        Err(error) if is(&error, &[Errno::ENODEV, Errno::EINVAL, Errno::ESRCH]) => Ok(None),
        Err(error) => Err(error),
    }
}

/// All interfaces here.
pub(super) fn all(netlink: &Kept) -> io::Result<impl Iterator<Item = End>> {
    let answers = netlink.ask(Message::GetLink(LinkMessage::default()), NLM_F_DUMP)?;
    Ok(answers.into_iter().filter_map(link).map(End::of))
}

/// Changes the interface of this index here. (Of another namespace it can't be: there, the number of a namespace
/// says where an interface is to go.)
pub(super) fn change(netlink: &Kept, index: u32, change: Change) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    match change {
        Change::Up(up) => {
            message.header.change_mask = LinkFlags::Up;
            message.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
        }
        Change::Mtu(mtu) => message.attributes.push(Attribute::Mtu(mtu)),
        Change::Alias(alias) => message.attributes.push(Attribute::IfAlias(alias.into())),
        Change::Group(group) => message.attributes.push(Attribute::Group(group)),
    }
    netlink.ask(Message::SetLink(message), 0).map(drop)
}

/// Deletes all interfaces here of a group, and with each its other end. One call takes hardly longer for many
/// than for one.
pub(super) fn delete_group(netlink: &Kept, group: u32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.attributes.push(Attribute::Group(group));
    match netlink.ask(Message::DelLink(message), 0) {
        Err(error) if !is(&error, &[Errno::ENODEV]) => Err(error),
        _ => Ok(()),
    }
}

/// The number that this namespace has for another, if it has one.
pub(super) fn number_of(netlink: &Kept, netns: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    let mut message = NsidMessage::default();
    message.attributes.push(NsidAttribute::Fd(netns.as_raw_fd() as u32));
    let answers = netlink.ask(Message::GetNsId(message), 0)?;
    Ok(answers.into_iter().find_map(|answer| {
        let Message::NewNsId(message) = answer else { return None };
        message.attributes.into_iter().find_map(|attribute| match attribute {
            NsidAttribute::Id(id) => u32::try_from(id).is_ok().then_some(id),
            _ => None,
        })
    }))
}

/// Whether an error is one of these.
pub(super) fn is(error: &io::Error, those: &[Errno]) -> bool {
    error.raw_os_error().is_some_and(|code| those.contains(&Errno::from_raw(code)))
}

fn link(message: Message) -> Option<LinkMessage> {
    match message {
        Message::NewLink(link) => Some(link),
        _ => None,
    }
}
