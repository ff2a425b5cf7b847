//! Control of a TAP helper by pdpd. Both hold a descriptor of every TAP, so that carriers stay up
//! when either dies. A new helper or pdpd gets the descriptors from the other.

use pdp_model::TapStats;
use serde::{Deserialize, Serialize};

/// Version of this protocol.
pub const VERSION: u32 = 1;

/// Request from pdpd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TapRequest {
    /// Serve the TAPs whose descriptors come with this message, one per port, in this order. The
    /// list replaces the whole set; unchanged ports keep running.
    Serve {
        /// The ports.
        ports: Vec<TapPort>,
    },
    /// Return the descriptors of all TAPs, in the order of the ports in the reply.
    Hold,
    /// Return the counters.
    Stats,
}

/// One TAP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapPort {
    /// Index of the vport.
    pub vport: u16,
    /// Name of the interface inside the guest.
    pub name: String,
}

/// Reply of the helper; one per request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TapReply {
    /// Done.
    Done,
    /// The ports whose descriptors come with this message.
    Held {
        /// The ports, in the order of the descriptors.
        ports: Vec<TapPort>,
    },
    /// Counters by port.
    Stats {
        /// The ports' counters.
        ports: Vec<TapPortStats>,
    },
    /// The request failed.
    Failed {
        /// Cause, and what to do.
        error: String,
    },
}

/// Counters of one port since the helper started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TapPortStats {
    /// Index of the vport.
    pub vport: u16,
    /// Counters of the TAP.
    #[serde(flatten)]
    pub stats: TapStats,
}
