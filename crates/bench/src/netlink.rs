//! Writes routes into a kernel by rtnetlink, as many per call as possible.
//!
//! Source: linux/rtnetlink.h, RFC 3549 section 3.1.1.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result, bail};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_ROUTE;
use pdp_net::netns::within;

use crate::site::Prefix;

const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const NLMSG_ERROR: u16 = 2;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;

const AF_INET: u8 = 2;
const TABLE_MAIN: u8 = 254;
const PROTOCOL_BGP: u8 = 186;
const TYPE_UNICAST: u8 = 1;

const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;

/// Messages per call: 26 KB of the 200 that a socket takes by default.
pub const MESSAGES_MAX: usize = 512;

/// Receive buffer, bytes: one error with the message that caused it.
const ERROR_BYTES: usize = 512;

/// A change of a route.
#[derive(Clone, Copy, Debug)]
pub struct RouteUpdate {
    /// Destination.
    pub prefix: Prefix,
    /// New next hop; `None` to remove the route.
    pub gateway: Option<[u8; 4]>,
}

/// Writes routes through one interface.
#[derive(Debug)]
pub struct RouteWriter {
    socket: Socket,
    interface: u32,
    bytes: Vec<u8>,
}

impl RouteWriter {
    /// Opens it for a network namespace, and an interface there by its index.
    pub fn open(netns: &Path, interface: u32) -> Result<Self> {
        let file = File::open(netns).with_context(|| netns.display().to_string())?;
        let socket = within(file.as_fd(), || Ok(Self::socket()))??;
        Ok(Self { socket, interface, bytes: Vec::new() })
    }

    fn socket() -> io::Result<Socket> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        Ok(socket)
    }

    /// Makes up to [`MESSAGES_MAX`] changes. Fails if the kernel refuses one.
    pub fn write(&mut self, changes: &[RouteUpdate]) -> Result<()> {
        self.bytes.clear();
        for change in changes {
            message(&mut self.bytes, *change, self.interface);
        }
        let sent = self.socket.send(&self.bytes, 0).context("routes")?;
        if sent != self.bytes.len() {
            bail!("{sent} of {} bytes of routes", self.bytes.len());
        }
        // Without acknowledgements, any answer is an error.
        let mut answer = [0; ERROR_BYTES];
        let Ok(count) = self.socket.recv(&mut &mut answer[..], 0) else { return Ok(()) };
        let kind = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
        let code = answer.get(16..20).and_then(|code| code.first_chunk().copied());
        match (kind, code.map(i32::from_ne_bytes)) {
            (Some(NLMSG_ERROR), Some(code)) if count >= 20 => {
                Err(io::Error::from_raw_os_error(-code)).context("a route")
            }
            _ => bail!("{count} bytes of the kernel that are no error"),
        }
    }
}

fn message(bytes: &mut Vec<u8>, change: RouteUpdate, interface: u32) {
    let (kind, flags) = match change.gateway {
        Some(_) => (RTM_NEWROUTE, NLM_F_REQUEST | NLM_F_CREATE | NLM_F_REPLACE),
        None => (RTM_DELROUTE, NLM_F_REQUEST),
    };
    let start = bytes.len();
    let (address, length) = change.prefix;
    bytes.extend([0; 4]);
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([AF_INET, length, 0, 0, TABLE_MAIN, PROTOCOL_BGP, 0, TYPE_UNICAST, 0, 0, 0, 0]);
    attribute(bytes, RTA_DST, address);
    if let Some(gateway) = change.gateway {
        attribute(bytes, RTA_OIF, interface.to_ne_bytes());
        attribute(bytes, RTA_GATEWAY, gateway);
    }
    let count = (bytes.len() - start) as u32;
    bytes[start..start + 4].copy_from_slice(&count.to_ne_bytes());
}

fn attribute(bytes: &mut Vec<u8>, kind: u16, value: [u8; 4]) {
    bytes.extend(8u16.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
}
