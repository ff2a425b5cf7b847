//! Control of a TAP helper by pdpd. The helper and pdpd both hold every TAP, so that neither's
//! death takes a carrier down; a new one of either gets them from the other.

use serde::{Deserialize, Serialize};

/// Version of this protocol.
pub const VERSION: u32 = 1;

/// From pdpd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Serve the TAPs whose descriptors come with this message, one a port, in this order;
    /// replaces the whole set. Ports that stay as they are keep running.
    Serve {
        /// The ports.
        ports: Vec<Port>,
    },
    /// Give the descriptors of all TAPs back, in the order of the ports in the reply.
    Hold,
    /// Say what was carried.
    Stats,
}

/// One TAP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Index of the vport.
    pub vport: u16,
    /// Name of the interface inside the guest.
    pub name: String,
}

/// Answer of the helper; one a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done,
    /// The ports whose descriptors come with this message.
    Held {
        /// The ports, in the order of the descriptors.
        ports: Vec<Port>,
    },
    /// Counters by port.
    Stats {
        /// The ports' counters.
        ports: Vec<PortStats>,
    },
    /// The request could not be met.
    Failed {
        /// What, and what to do.
        error: String,
    },
}

/// What a helper carried for one port since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortStats {
    /// Index of the vport.
    pub vport: u16,
    /// Frames from the mux written to the TAP.
    pub to_tap: u64,
    /// Frames read from the TAP and given to the mux.
    pub from_tap: u64,
    /// Frames from the mux that the TAP refused (interface down, no room).
    pub to_tap_refused: u64,
    /// Frames from the TAP that found no room on the way to the mux, or no mux.
    pub from_tap_dropped: u64,
}
