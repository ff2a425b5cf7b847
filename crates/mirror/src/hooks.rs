//! Kernel features that handle forwarded packets differently than
//! guests do, and the packets that they apply to.
//!
//! | hook | packets that it may concern |
//! |---|---|
//! | policy rules beside the kernel's own (`ip rule`), or missing ones of the kernel's own | of its family, in by its `iif` or by any vport |
//! | VRFs | in by a vport that is in one |
//! | any of these for a macvlan over a vport | as for the vport |
//! | bridges, bonds and other masters of a vport | every frame, in by that vport |
//! | nftables: base chains of prerouting, forward, postrouting with rules or a policy of drop | of its family |
//! | nftables: chains of ingress and egress of a vport | every frame in by it, or packets out by it |
//! | iptables of the older kind (x_tables) | of its family |
//! | `tc`: any qdisc that somebody configured | out by the vport; in by it for `ingress` and `clsact` |
//! | reverse-path filters (`rp_filter`) | IPv4, in by the vport |
//! | redirects (`send_redirects`; IPv6 always) | out by the vport that they came in by |
//! | hash policies of multipath routes but 1, `fib_multipath_use_neigh` | of its family, with several next hops |
//!
//! The result may include more packets than these hooks would really touch, never fewer. Rules that
//! no forwarded packet can match do not count:
//! - rules for a firewall mark (a forwarded packet has one only if nftables, iptables or `tc` set
//!   it, and then these hooks count);
//! - rules for an outgoing interface that a socket is bound to;
//! - rules for the loopback interface.
//!
//! The state comes from dumps; a notification only triggers one. State without notifications
//! (sysctls, x_tables) is read every [`FILES_INTERVAL`].
//!
//! Not covered: BPF programs and IPsec policies, which only `privileged` guests can use.
//! Sources: linux/fib_rules.h, linux/netfilter/nf_tables.h, linux/pkt_sched.h, ip-sysctl.rst.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pdp_netlink::{
    Message, Netlink, NetlinkRead, Request, address, attributes, error_code, family, text, u32_at,
};
use pdp_proto::mirror::{HOOKS_MAX, HookPolicy, hook_words};
use pdp_proto::routes::VportHooks;
use rustix::fs::{Mode, OFlags, openat};

use crate::kernel::CONF_ALL;
use crate::table::MirrorTable;

/// Interval between two reads of state without notifications.
pub const FILES_INTERVAL: Duration = Duration::from_millis(500);

/// Shortest pause between two full reads, in addition to this multiple of the last read's duration.
/// So a tenant that changes rules all the time does not keep the mirror from its routes.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
const CHECK_SHARE: u32 = 10;

/// Pause after a failed read.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Most reads of notifications in one go.
const READS_MAX: usize = 4096;

/// Netfilter's messages: the nf_tables subsystem, and its request for chains.
const NFT: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;
const NFT_GETCHAIN: u16 = NFT | libc::NFT_MSG_GETCHAIN as u16;

/// Hooks of nf_tables that forwarded packets pass (linux/netfilter.h).
const PREROUTING: u32 = 0;
const FORWARD: u32 = 2;
const POSTROUTING: u32 = 4;
const INET_INGRESS: u32 = 5;
/// Hook of the family `netdev`.
const NETDEV_INGRESS: u32 = 0;
const NF_DROP: u32 = 0;

const NFTA_HOOK_NUM: u16 = 1;
const NFTA_HOOK_DEV: u16 = 3;
const NFTA_HOOK_DEVS: u16 = 4;
/// All devices whose names have this prefix.
const NFTA_DEVICE_PREFIX: u16 = 2;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_USE: u16 = 6;

const FRA_DST: u16 = 1;
const FRA_SRC: u16 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_OIFNAME: u16 = 17;
const FRA_L3MDEV: u16 = 19;
const FRA_PROTOCOL: u16 = 21;
const FIB_RULE_INVERT: u32 = 2;
const FR_ACT_TO_TBL: u8 = 1;

const TCA_KIND: u16 = 1;
const TC_H_ROOT: u32 = u32::MAX;
/// Parent of `ingress` and `clsact`.
const TC_H_INGRESS: u32 = 0xffff_fff1;

const IFLA_INFO_KIND: u16 = 1;
const NETCONFA_IFINDEX: u16 = 1;
const NETCONFA_RP_FILTER: u16 = 3;

/// Hooks that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundHooks {
    /// Descriptions, at most [`HOOKS_MAX`], plus one for the rest.
    pub descriptions: Vec<String>,
    /// Affected frames, by vport.
    pub vports: Vec<VportHooks>,
    /// True if the kernel chooses among next hops differently, for IPv4 and IPv6.
    pub multipath: [bool; 2],
    /// Count of hooks beyond [`HOOKS_MAX`].
    more: u64,
}

impl FoundHooks {
    fn add(&mut self, words: String) {
        if self.descriptions.len() == HOOKS_MAX {
            self.more += 1;
            return;
        }
        self.descriptions.push(hook_words(&words));
    }

    fn each(&mut self, hook: impl FnMut(&mut VportHooks)) {
        self.vports.iter_mut().for_each(hook);
    }

    fn family(&mut self, v6: bool) {
        self.each(|vport| *of_family(vport, v6) = true);
    }
}

fn of_family(vport: &mut VportHooks, v6: bool) -> &mut bool {
    if v6 { &mut vport.v6 } else { &mut vport.v4 }
}

/// Returns the command that shows the rules of a family.
fn ip(v6: bool) -> &'static str {
    if v6 { "ip -6" } else { "ip" }
}

/// Interface of the namespace, as far as hooks refer to it.
#[derive(Debug, Default)]
struct HookInterface {
    name: String,
    kind: String,
    master: Option<u32>,
    /// Underlying interface, if it is in this namespace.
    over: Option<u32>,
}

/// Watches for hooks.
pub struct Hooks {
    vports: Vec<String>,
    names: VportNames,
    /// Notifications of routing, and of netfilter if the kernel has it.
    notifications: Vec<Netlink>,
    requests: Netlink,
    filter: Option<Netlink>,
    sysctls: SysctlDirectories,
    files: HookFiles,
    policy: HookPolicy,
    found: FoundHooks,
    dirty: bool,
    check_at: Instant,
    files_at: Instant,
}

impl Hooks {
    /// Watches the process's network namespace, in which interfaces of these names are vports.
    ///
    /// # Errors
    /// The kernel refuses a socket.
    pub fn new(vports: Vec<String>, policy: HookPolicy) -> io::Result<Self> {
        let groups = [
            libc::RTNLGRP_LINK,
            libc::RTNLGRP_TC,
            libc::RTNLGRP_IPV4_RULE,
            libc::RTNLGRP_IPV6_RULE,
        ];
        let groups = groups.into_iter().chain([libc::RTNLGRP_IPV4_NETCONF]);
        let mut notifications = vec![Netlink::listening(libc::NETLINK_ROUTE, groups)?];
        // A kernel without nf_tables has no such hooks.
        let nft = [libc::NFNLGRP_NFTABLES as u32];
        let filter = Netlink::listening(libc::NETLINK_NETFILTER, nft).and_then(|listening| {
            notifications.push(listening);
            Netlink::open(libc::NETLINK_NETFILTER)
        });
        let now = Instant::now();
        Ok(Self {
            sysctls: SysctlDirectories::open(),
            files: HookFiles::default(),
            names: VportNames::of(&vports, &HashMap::new()),
            vports,
            notifications,
            requests: Netlink::routing()?,
            filter: filter.ok(),
            policy,
            found: FoundHooks::default(),
            dirty: true,
            check_at: now,
            files_at: now,
        })
    }

    /// Returns the hooks' descriptions as of the last step.
    pub fn descriptions(&self) -> &[String] {
        &self.found.descriptions
    }

    /// True if nothing has changed since then, as far as the kernel has notified.
    pub fn is_settled(&self) -> bool {
        !self.dirty
    }

    /// Returns the time at which [`Self::step`] has work even without a notification.
    pub fn due(&self) -> Instant {
        if self.dirty { self.check_at.min(self.files_at) } else { self.files_at }
    }

    /// Returns the sockets for notifications.
    pub fn sockets(&self) -> impl Iterator<Item = &Netlink> {
        self.notifications.iter()
    }

    /// Reads notifications, reads the hooks if it is time, and applies the result to the table.
    pub fn step(&mut self, table: &mut MirrorTable) {
        let now = Instant::now();
        for socket in &mut self.notifications {
            for _ in 0..READS_MAX {
                match socket.receive() {
                    Ok(NetlinkRead::Empty) => break,
                    Ok(NetlinkRead::Datagram(_) | NetlinkRead::Lost) => self.dirty = true,
                    Err(_) => {
                        self.dirty = true;
                        break;
                    }
                }
            }
        }
        if now >= self.files_at {
            self.files_at = now + FILES_INTERVAL;
            let files = HookFiles::read(&self.sysctls, &self.names);
            self.dirty |= files != self.files;
            self.files = files;
        }
        if !self.dirty || now < self.check_at {
            return;
        }
        let mut pause = LOOK_INTERVAL;
        match self.read_all() {
            Ok(found) => {
                self.dirty = false;
                if self.found != found && self.policy == HookPolicy::Strict {
                    table.set_hooked(&found.vports, found.multipath);
                }
                self.found = found;
            }
            Err(error) => {
                // The rest of this answer must not be mistaken for the next one's.
                if let Ok(requests) = Netlink::routing() {
                    self.requests = requests;
                }
                if self.filter.is_some()
                    && let Ok(filter) = Netlink::open(libc::NETLINK_NETFILTER)
                {
                    self.filter = Some(filter);
                }
                // Mostly because of a change during the dump.
                if error.kind() != io::ErrorKind::Interrupted {
                    let words = format!("can't check for forwarding hooks: {error}");
                    tracing::warn!("{words}");
                    self.found.descriptions = vec![words];
                    pause = RETRY_INTERVAL;
                }
            }
        }
        self.check_at = now + pause + now.elapsed() * CHECK_SHARE;
    }

    /// Looks at everything.
    fn read_all(&mut self) -> io::Result<FoundHooks> {
        let Self { vports, names, requests, filter, sysctls, files, .. } = self;
        let mut found = FoundHooks {
            vports: vec![VportHooks::default(); vports.len()],
            ..FoundHooks::default()
        };
        let mut interfaces: HashMap<u32, HookInterface> = HashMap::new();
        dump(requests, libc::RTM_GETLINK, &[0; 16], |message| {
            interfaces.extend(interface(message.payload));
        })?;
        let seen = VportNames::of(vports, &interfaces);
        if seen != *names {
            *names = seen;
            *files = HookFiles::read(sysctls, names);
        }
        let names = &*names;
        masters(&mut found, names, &interfaces);
        for v6 in [false, true] {
            let mut rules = Rules::default();
            let mut header = [0; 12];
            header[0] = family(v6);
            dump(requests, libc::RTM_GETRULE, &header, |message| {
                rules.see(&mut found, names, message.payload, v6);
            })?;
            // A kernel without IPv6 has none of its rules.
            if !v6 || rules.any || !files.hash_policy[1].is_empty() {
                rules.end(&mut found, v6);
            }
        }
        dump(requests, libc::RTM_GETQDISC, &[0; 20], |message| {
            qdisc(&mut found, names, &interfaces, message.payload);
        })?;
        let mut filters = Vec::new();
        dump(requests, libc::RTM_GETNETCONF, &[family(false)], |message| {
            filters.extend(rp_filter(message.payload));
        })?;
        reverse_path(&mut found, names, &interfaces, &filters);
        if let Some(filter) = filter {
            // nfgenmsg: every family, version 0.
            let chains = dump(filter, NFT_GETCHAIN, &[0; 4], |message| {
                chain(&mut found, names, message.payload);
            });
            match chains {
                // No nf_tables in this kernel.
                Err(error) if error_code(&error) == Some(libc::EINVAL) => {}
                other => other?,
            }
        }
        files.report(&mut found);
        if found.more > 0 {
            let more = format!("and {} more", found.more);
            found.descriptions.push(more);
        }
        Ok(found)
    }
}

/// Requests a dump, and passes each message of the answer to `each`. A kernel without this kind of
/// objects has none of them.
fn dump(
    socket: &mut Netlink,
    kind: u16,
    header: &[u8],
    each: impl FnMut(&Message<'_>),
) -> io::Result<()> {
    match socket.dump(&mut Request::new(kind, 0, header), each) {
        Err(error)
            if matches!(
                error_code(&error),
                Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT)
            ) =>
        {
            Ok(())
        }
        result => result,
    }
}

fn interface(payload: &[u8]) -> Option<(u32, HookInterface)> {
    let (mut interface, mut elsewhere) = (HookInterface::default(), false);
    for (kind, value) in attributes(payload.get(16..)?) {
        match kind {
            libc::IFLA_IFNAME => interface.name = text(value),
            libc::IFLA_MASTER => interface.master = u32_at(value, 0),
            libc::IFLA_LINK => interface.over = u32_at(value, 0),
            libc::IFLA_LINK_NETNSID => elsewhere = true,
            libc::IFLA_LINKINFO => {
                let mut kinds = attributes(value).filter(|(kind, _)| *kind == IFLA_INFO_KIND);
                interface.kind = kinds.next().map(|(_, value)| text(value)).unwrap_or_default();
            }
            _ => {}
        }
    }
    interface.over = interface.over.filter(|_| !elsewhere);
    Some((u32_at(payload, 4)?, interface))
}

/// Vports by the names of their interfaces, and of macvlans over these. Frames for
/// a macvlan's MAC address arrive on the vport.
#[derive(Clone, Debug, PartialEq, Eq)]
struct VportNames(Vec<(String, usize)>);

impl VportNames {
    fn of(vports: &[String], interfaces: &HashMap<u32, HookInterface>) -> Self {
        let named: Vec<_> = vports.iter().cloned().zip(0..).collect();
        let mut names = Self(named);
        let over = |interface: &HookInterface| {
            let under = interfaces.get(&interface.over.filter(|_| interface.kind == "macvlan")?)?;
            Some((interface.name.clone(), names.vport(&under.name)?))
        };
        let mut macvlans: Vec<_> = interfaces.values().filter_map(over).collect();
        macvlans.sort();
        names.0.append(&mut macvlans);
        names
    }

    fn vport(&self, name: &str) -> Option<usize> {
        self.0.iter().find(|(interface, _)| interface == name).map(|(_, vport)| *vport)
    }
}

fn masters(found: &mut FoundHooks, names: &VportNames, interfaces: &HashMap<u32, HookInterface>) {
    let mut taken: Vec<(usize, &str, &HookInterface)> = interfaces
        .values()
        .filter_map(|interface| {
            let master = interfaces.get(&interface.master?)?;
            Some((names.vport(&interface.name)?, &*interface.name, master))
        })
        .collect();
    taken.sort_by_key(|(vport, name, _)| (*vport, *name));
    for (vport, name, HookInterface { name: of, kind, .. }) in taken {
        if kind == "vrf" {
            (found.vports[vport].v4, found.vports[vport].v6) = (true, true);
            found.add(format!("{name} is in VRF {of}"));
        } else {
            found.vports[vport].all = true;
            found.add(format!("{name} is in {kind} {of}"));
        }
    }
}

/// The kernel's own rules that were found.
#[derive(Debug, Default)]
struct Rules {
    any: bool,
    local: bool,
    main: bool,
}

impl Rules {
    fn see(&mut self, found: &mut FoundHooks, names: &VportNames, payload: &[u8], v6: bool) {
        let Some(&[_, to_length, from_length, tos, table, _, _, action, ..]) =
            payload.first_chunk::<12>()
        else {
            return;
        };
        self.any = true;
        let invert = u32_at(payload, 8).is_some_and(|flags| flags & FIB_RULE_INVERT != 0);
        let mut table = u32::from(table);
        let (mut priority, mut mark, mut mask, mut suppress) = (0, 0, u32::MAX, u32::MAX);
        let (mut iif, mut oif, mut l3mdev, mut selects) = (None, false, false, false);
        let mut words = String::new();
        // Writing to a string does not fail.
        if invert {
            let _ = write!(words, " not");
        }
        for (kind, value) in attributes(&payload[12..]) {
            let number = u32_at(value, 0);
            match kind {
                FRA_TABLE => table = number.unwrap_or(table),
                FRA_PRIORITY => priority = number.unwrap_or(0),
                FRA_FWMARK => mark = number.unwrap_or(0),
                FRA_FWMASK => {
                    mask = number.unwrap_or(u32::MAX);
                    selects |= mask != 0;
                }
                FRA_SUPPRESS_PREFIXLEN => suppress = number.unwrap_or(u32::MAX),
                FRA_L3MDEV => l3mdev = value.first() == Some(&1),
                FRA_OIFNAME => oif = true,
                FRA_IIFNAME => iif = Some(text(value)),
                FRA_PROTOCOL => {}
                FRA_SRC | FRA_DST => {
                    let (word, length) =
                        if kind == FRA_SRC { ("from", from_length) } else { ("to", to_length) };
                    if let Some(address) = address(value) {
                        let _ = write!(words, " {word} {address}/{length}");
                    }
                }
                // Other selectors, actions, and lookup options.
                _ => selects |= value.iter().any(|byte| *byte != 0),
            }
        }
        let selective = from_length != 0 || to_length != 0 || tos != 0 || selects || invert;
        let plain = !selective && iif.is_none() && !oif && mark == 0 && suppress == u32::MAX;
        if plain && action == FR_ACT_TO_TBL {
            match (priority, table) {
                (0, 255) => return self.local = true,
                (32_766, 254) => return self.main = true,
                (32_767, 253) => return,
                _ => {}
            }
        }
        if l3mdev || !invert && (mark & mask != 0 || oif) {
            return;
        }
        match &iif {
            Some(name) if !invert => match names.vport(name) {
                Some(vport) => *of_family(&mut found.vports[vport], v6) = true,
                None => return,
            },
            _ => found.family(v6),
        }
        if tos != 0 {
            let _ = write!(words, " tos {tos:#x}");
        }
        if mark != 0 {
            let _ = write!(words, " fwmark {mark:#x}");
        }
        if let Some(iif) = iif {
            let _ = write!(words, " iif {iif}");
        }
        if action == FR_ACT_TO_TBL {
            let _ = write!(words, " lookup {table}");
        }
        if suppress != u32::MAX {
            let _ = write!(words, " suppress_prefixlength {suppress}");
        }
        found.add(format!("{} rule {priority}:{words}", ip(v6)));
    }

    fn end(self, found: &mut FoundHooks, v6: bool) {
        for (seen, name) in [(self.local, "0: lookup local"), (self.main, "32766: lookup main")] {
            if !seen {
                found.family(v6);
                found.add(format!("no {} rule {name}", ip(v6)));
            }
        }
    }
}

fn qdisc(
    found: &mut FoundHooks,
    names: &VportNames,
    interfaces: &HashMap<u32, HookInterface>,
    payload: &[u8],
) {
    let word = |at| u32_at(payload, at).unwrap_or_default();
    let (handle, parent) = (word(8), word(12));
    // The kernel's default qdiscs have no handle.
    if handle == 0 || parent != TC_H_ROOT && parent != TC_H_INGRESS {
        return;
    }
    let Some(interface) = interfaces.get(&word(4)) else { return };
    let Some(vport) = names.vport(&interface.name) else { return };
    let mut kinds =
        attributes(payload.get(20..).unwrap_or_default()).filter(|(kind, _)| *kind == TCA_KIND);
    let kind = kinds.next().map(|(_, value)| text(value)).unwrap_or_default();
    let hooked = &mut found.vports[vport];
    hooked.all |= parent == TC_H_INGRESS;
    hooked.out |= kind != "ingress";
    found.add(format!("tc qdisc {kind} on {}", interface.name));
}

/// Returns an interface (or [`CONF_ALL`]) and its reverse-path filter.
fn rp_filter(payload: &[u8]) -> Option<(i32, u32)> {
    let (mut ifindex, mut filter) = (None, None);
    for (kind, value) in attributes(payload.get(4..)?) {
        match kind {
            NETCONFA_IFINDEX => ifindex = u32_at(value, 0),
            NETCONFA_RP_FILTER => filter = u32_at(value, 0),
            _ => {}
        }
    }
    Some((ifindex? as i32, filter?))
}

fn reverse_path(
    found: &mut FoundHooks,
    names: &VportNames,
    interfaces: &HashMap<u32, HookInterface>,
    filters: &[(i32, u32)],
) {
    let all = filters.iter().find(|(ifindex, _)| *ifindex == CONF_ALL).map_or(0, |(_, all)| *all);
    for (ifindex, own) in filters {
        let filter = all.max(*own);
        let interface = u32::try_from(*ifindex).ok().and_then(|ifindex| interfaces.get(&ifindex));
        if let Some(interface) = interface.filter(|_| filter != 0)
            && let Some(vport) = names.vport(&interface.name)
        {
            found.vports[vport].v4 = true;
            found.add(format!("rp_filter {filter} on {}", interface.name));
        }
    }
}

fn chain(found: &mut FoundHooks, names: &VportNames, payload: &[u8]) {
    let Some(&family) = payload.first() else { return };
    let (mut table, mut name) = (String::new(), String::new());
    let (mut number, mut policy, mut uses) = (None, 1, 0);
    let mut devices: Vec<(String, bool)> = Vec::new();
    for (kind, value) in attributes(payload.get(4..).unwrap_or_default()) {
        match kind {
            NFTA_CHAIN_TABLE => table = text(value),
            NFTA_CHAIN_NAME => name = text(value),
            NFTA_CHAIN_POLICY => policy = big_endian(value),
            NFTA_CHAIN_USE => uses = big_endian(value),
            NFTA_CHAIN_HOOK => {
                for (kind, value) in attributes(value) {
                    match kind {
                        NFTA_HOOK_NUM => number = Some(big_endian(value)),
                        NFTA_HOOK_DEV => devices.push((text(value), false)),
                        NFTA_HOOK_DEVS => {
                            let named = |(kind, name)| (text(name), kind == NFTA_DEVICE_PREFIX);
                            devices.extend(attributes(value).map(named));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let Some(number) = number else { return };
    if uses == 0 && policy != NF_DROP {
        return;
    }
    let of_device = |found: &mut FoundHooks, ingress: bool| {
        let is = |name: &str| {
            devices
                .iter()
                .any(|(device, prefix)| name == device || *prefix && name.starts_with(&**device))
        };
        let of: Vec<usize> =
            names.0.iter().filter(|(name, _)| is(name)).map(|(_, vport)| *vport).collect();
        for &vport in &of {
            let hooked = &mut found.vports[vport];
            *(if ingress { &mut hooked.all } else { &mut hooked.out }) = true;
        }
        !of.is_empty()
    };
    let forwarding = matches!(number, PREROUTING | FORWARD | POSTROUTING);
    let (concerns, word) = match i32::from(family) {
        libc::NFPROTO_INET if number == INET_INGRESS => (of_device(found, true), "inet"),
        libc::NFPROTO_INET if forwarding => {
            found.family(false);
            found.family(true);
            (true, "inet")
        }
        libc::NFPROTO_IPV4 if forwarding => {
            found.family(false);
            (true, "ip")
        }
        libc::NFPROTO_IPV6 if forwarding => {
            found.family(true);
            (true, "ip6")
        }
        libc::NFPROTO_NETDEV => (of_device(found, number == NETDEV_INGRESS), "netdev"),
        _ => (false, ""),
    };
    if concerns {
        found.add(format!("nft chain {word} {table} {name}"));
    }
}

/// Contents of files that have no notifications.
#[derive(Debug, Default, PartialEq, Eq)]
struct HookFiles {
    /// Hash policies by family.
    hash_policy: [String; 2],
    use_neigh: String,
    /// Names of x_tables tables, by family.
    x_tables: [String; 2],
    /// True if redirects are on for all interfaces; then the
    /// interfaces that have them on, by name and vport.
    redirects_all: bool,
    redirects: Vec<(String, usize)>,
}

/// Directories of a network namespace's sysctls, for IPv4 and, if the kernel has it, IPv6. They are
/// opened once, because a lookup below `/proc/sys/net` walks through those of all namespaces.
#[derive(Debug)]
struct SysctlDirectories([Option<OwnedFd>; 2]);

impl SysctlDirectories {
    /// Opens those of the process's namespace.
    fn open() -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path| rustix::fs::open(path, flags, Mode::empty()).ok();
        Self(["/proc/sys/net/ipv4", "/proc/sys/net/ipv6"].map(open))
    }

    fn read(&self, v6: bool, name: &str) -> String {
        let directory = self.0[usize::from(v6)].as_ref();
        let open = |it| openat(it, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
        let file = directory.and_then(open);
        words(file.map_or(Ok(String::new()), |file| io::read_to_string(File::from(file))))
    }
}

/// Returns a file's words, separated by single spaces.
fn words(text: io::Result<String>) -> String {
    text.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

impl HookFiles {
    fn read(sysctls: &SysctlDirectories, names: &VportNames) -> Self {
        let redirects = |of: &str| sysctls.read(false, &format!("conf/{of}/send_redirects")) == "1";
        Self {
            hash_policy: [false, true].map(|v6| sysctls.read(v6, "fib_multipath_hash_policy")),
            use_neigh: sysctls.read(false, "fib_multipath_use_neigh"),
            x_tables: ["ip", "ip6"].map(|family| {
                words(std::fs::read_to_string(format!("/proc/net/{family}_tables_names")))
            }),
            redirects_all: redirects("all"),
            redirects: names.0.iter().filter(|(name, _)| redirects(name)).cloned().collect(),
        }
    }

    fn report(&self, found: &mut FoundHooks) {
        for (v6, policy) in self.hash_policy.iter().enumerate() {
            // Policy 1 uses addresses and ports, as guests do. A
            // kernel without IPv6 has no policy for it.
            if policy != "1" && !policy.is_empty() {
                found.multipath[v6] = true;
                let family = ["ipv4", "ipv6"][v6];
                found.add(format!("net.{family}.fib_multipath_hash_policy = {policy}"));
            }
        }
        if self.use_neigh == "1" {
            found.multipath[0] = true;
            found.add("net.ipv4.fib_multipath_use_neigh = 1".into());
        }
        for (v6, tables) in self.x_tables.iter().enumerate() {
            if !tables.is_empty() {
                found.family(v6 == 1);
                found.add(format!("{}: tables {tables}", ["iptables", "ip6tables"][v6]));
            }
        }
        // The kernel always sends IPv6 redirects.
        found.each(|vport| vport.back_v6 = true);
        if self.redirects_all {
            found.each(|vport| vport.back_v4 = true);
            found.add("send_redirects on all".into());
        }
        for (name, vport) in self.redirects.iter().filter(|_| !self.redirects_all) {
            found.vports[*vport].back_v4 = true;
            found.add(format!("send_redirects on {name}"));
        }
    }
}

fn big_endian(bytes: &[u8]) -> u32 {
    bytes.first_chunk().copied().map_or(0, u32::from_be_bytes)
}
