//! What the mux takes at most. A spec is held to the same constants, so that what was accepted comes
//! up.

/// External interfaces of a mux.
pub const EXTERNALS_MAX: usize = 64;

/// Ports of all nodes of a vnet.
pub const PORTS_MAX: usize = 16_384;

/// Ends of a vlink.
pub const ENDS_MAX: usize = 256;

/// Addresses that one segment learns.
pub const ADDRESSES_MAX: u32 = 65_536;

/// Addresses that all segments of a vnet may learn. Each takes 24 bytes of the mux.
pub const VNET_ADDRESSES_MAX: u64 = 1 << 18;

/// Frames that each end of a segment may flood in a second.
pub const FLOOD_PPS_MAX: u64 = 1_000_000;

/// Longest delay of a vlink, nanoseconds; jitter may double it.
pub const DELAY_NS_MAX: u64 = 10_000_000_000;

/// Bytes of the mux that frames of a vnet take which wait for delays.
pub const VNET_LINES_BYTES_MAX: u64 = 4 << 30;

/// Steps of the schedules of all vlinks of a vnet.
pub const SCHEDULE_STEPS_MAX: usize = 1024;

/// Most weight of a vlink on an external interface.
pub const WEIGHT_MAX: u32 = 1000;

/// Most bytes that each frame of a vlink counts beyond its own.
pub const OVERHEAD_BYTES_MAX: u32 = 256;

/// Forwarding guests of one vrouter.
pub const GUESTS_MAX: usize = 64;

/// Punt filters of one vrouter.
pub const PUNT_FILTERS_MAX: usize = 64;

/// Bytes of all fields of a flow key, or of all matches of one punt filter. The mux compares them with
/// each frame.
pub const PATTERN_BYTES_MAX: usize = 256;

/// Packets that a mux has unless it is told otherwise, in equal parts for its workers.
pub const POOL_PACKETS: u32 = 32_768;

/// The part of a worker's packets that queues can have set aside for them.
pub const BUFFERS_PART: u32 = 2;

/// Frames that may wait in each direction of a vlink: an eighth of [`POOL_PACKETS`].
pub const QUEUE_FRAMES_MAX: u32 = POOL_PACKETS / 8;

/// Stations on links of a router that one of its forwarding guests has the kernel ask for at a time (3 s).
/// Each is an entry of the kernel's neighbour table, which all networks of a machine share.
pub const ASKED_MAX: usize = 256;

/// Of those, how many may answer within that time: an entry that is new stays for some seconds, too.
pub const ANSWERED_MAX: usize = 2048;

/// Queues of one end of a vlink.
pub const QUEUES_MAX: usize = 4096;

/// Queues of all ends of a vnet. Each takes 90 bytes of the mux when it is empty, and what is said of it.
pub const VNET_QUEUES_MAX: usize = 65_536;

/// Bytes that may wait in one of them: as many as the longest frames that may have.
pub const QUEUE_BYTES_MAX: u64 = 8 << 20;

/// Highest DSCP (RFC 2474 section 3).
pub const DSCP_MAX: u8 = 63;
