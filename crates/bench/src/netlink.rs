//! Writes routes into a kernel by rtnetlink, as many per call as possible.
//!
//! Source: linux/rtnetlink.h, RFC 3549 section 3.1.1.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result};
use pdp_net::netns::within;
use pdp_netlink::{Netlink, Request, family};

use crate::site::Prefix;

const PROTOCOL_BGP: u8 = 186;

/// Messages per call: 26 KB of the 200 that a socket takes by default.
pub const MESSAGES_MAX: usize = 512;

/// A change of a route.
#[derive(Clone, Copy, Debug)]
pub struct RouteUpdate {
    /// Destination.
    pub prefix: Prefix,
    /// New next hop; `None` to remove the route.
    pub gateway: Option<[u8; 4]>,
}

/// Writes routes through one interface.
pub struct RouteWriter {
    netlink: Netlink,
    interface: u32,
    batch: Request,
}

impl RouteWriter {
    /// Opens it for a network namespace, and an interface there by its index.
    pub fn open(netns: &Path, interface: u32) -> Result<Self> {
        let file = File::open(netns).with_context(|| netns.display().to_string())?;
        let netlink = within(file.as_fd(), || Ok(Netlink::routing()))??;
        Ok(Self { netlink, interface, batch: Request::default() })
    }

    /// Makes up to [`MESSAGES_MAX`] changes. Fails if the kernel refuses one.
    pub fn write(&mut self, changes: &[RouteUpdate]) -> Result<()> {
        self.batch.clear();
        for change in changes {
            add(&mut self.batch, *change, self.interface);
        }
        self.netlink.change_all(&self.batch).context("routes")
    }
}

fn add(batch: &mut Request, change: RouteUpdate, interface: u32) {
    let (kind, flags) = match change.gateway {
        Some(_) => (libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_REPLACE),
        None => (libc::RTM_DELROUTE, 0),
    };
    let (address, length) = change.prefix;
    let (table, unicast) = (libc::RT_TABLE_MAIN, libc::RTN_UNICAST);
    let header = [family(false), length, 0, 0, table, PROTOCOL_BGP, 0, unicast, 0, 0, 0, 0];
    batch.message(kind, flags, &header).attribute(libc::RTA_DST, &address);
    if let Some(gateway) = change.gateway {
        batch.number(libc::RTA_OIF, interface).attribute(libc::RTA_GATEWAY, &gateway);
    }
}
