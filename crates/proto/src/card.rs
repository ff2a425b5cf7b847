//! Control of a card's process by pdpd.
//!
//! The process simulates one card, and forwards for routers of several networks. pdpd is the card's
//! super user: it gives each router a virtual environment (VE), and so a part of the tables. The
//! routes come from the router's mirror, as for a forwarding guest.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Request from pdpd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CardRequest {
    /// Forward for these routers, and for no others. Unchanged ones keep running.
    Serve {
        /// The routers, each in a VE of its own.
        routers: Vec<CardRouter>,
    },
    /// Return sizes and counters.
    Status,
}

/// A router on the card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardRouter {
    /// VE of the router.
    pub ve: u8,
    /// Name for messages: network and node.
    pub name: String,
    /// Socket of the mux for the router's trunk.
    pub trunk: PathBuf,
    /// Socket of the router's mirror.
    pub routes: PathBuf,
    /// Guest number that the card gives the mirror.
    pub guest: u32,
    /// Weight among the routers for the card's time, at least 1.
    pub weight: u8,
    /// Limit of its received frames; `None`: without.
    pub limit: Option<CardLimit>,
    /// False while the card drops its frames.
    pub enabled: bool,
}

/// Limit of a router's received frames. Group frames are not limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardLimit {
    /// Bits per second, from 1 Mbit/s to 2 Tbit/s, in steps of 7.6 kbit/s.
    pub bits_per_second: u64,
    /// Bytes that may pass at once, up to 1,048,575.
    pub burst_bytes: u32,
}

/// Reply of the card's process; one per request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CardReply {
    /// Done.
    Done,
    /// See [`CardRequest::Status`].
    Status(CardStatus),
    /// The request failed, and changed nothing.
    Failed {
        /// Cause, and what to do.
        error: String,
    },
}

/// Sizes and counters of a card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardStatus {
    /// VEs of the card.
    pub ves: u32,
    /// Clock cycles simulated since the start.
    pub cycles: u64,
    /// Register writes that the card refused. It is 0 unless PdP has a bug.
    pub refused_writes: u64,
    /// The routers, by VE.
    pub routers: Vec<CardRouterStatus>,
}

/// Counters of a router since it got its VE.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardRouterStatus {
    /// VE of the router.
    pub ve: u8,
    /// True if the mux serves its trunk.
    pub connected: bool,
    /// True if all routes of its mirror's snapshot are in force, or excess.
    pub synced: bool,
    /// Frames from the mux.
    pub received: u64,
    /// Frames that left by a vport.
    pub forwarded: u64,
    /// Frames to the control guest.
    pub punted: u64,
    /// Frames that were dropped.
    pub dropped: u64,
    /// Prefixes whose last change does not fit. Their packets go to the control guest.
    pub excess: u64,
    /// Free places of its part of the next hops.
    pub free_hops: u32,
    /// Free places of its part of the leaves, one or more for each route.
    pub free_leaves: u32,
    /// Routes and vports that the card cannot follow, in words; the first 16.
    pub problems: Vec<String>,
}
