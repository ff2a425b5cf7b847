//! Limits of the mux. The spec's check uses the same
//! constants, so that every accepted spec can start.

/// External interfaces of a mux.
pub const EXTERNALS_MAX: usize = 64;

/// Ports of all nodes of a vnet.
pub const PORTS_MAX: usize = 16_384;

/// Ends of a vlink.
pub const ENDS_MAX: usize = 256;

/// Most addresses that one segment learns.
pub const ADDRESSES_MAX: u32 = 65_536;

/// Most addresses that all segments of a vnet may learn. Each takes 24 bytes of the mux's memory.
pub const VNET_ADDRESSES_MAX: u64 = 1 << 18;

/// Most frames per second that each end of a segment may flood.
pub const FLOOD_PPS_MAX: u64 = 1_000_000;

/// Longest delay of a vlink, nanoseconds; jitter may double it.
pub const DELAY_NS_MAX: u64 = 10_000_000_000;

/// Most bytes of the mux's memory for a vnet's frames in delay lines.
pub const VNET_LINES_BYTES_MAX: u64 = 4 << 30;

/// Most steps in the schedules of all vlinks of a vnet.
pub const SCHEDULE_STEPS_MAX: usize = 1024;

/// Highest weight of a vlink on an external interface.
pub const WEIGHT_MAX: u32 = 1000;

/// Most bytes of overhead that each frame of a vlink may count beyond its own.
pub const OVERHEAD_BYTES_MAX: u32 = 256;

/// Forwarding guests of one vrouter.
pub const GUESTS_MAX: usize = 64;

/// Punt filters of one vrouter.
pub const PUNT_FILTERS_MAX: usize = 64;

/// Most bytes in all fields of a flow key, or in all matches of one punt
/// filter. The mux compares them with each frame.
pub const PATTERN_BYTES_MAX: usize = 256;

/// Default count of packets in a mux's pool, divided equally among its workers.
pub const POOL_PACKETS: u32 = 32_768;

/// Divisor: queues may reserve one part in this many of a worker's packets.
pub const BUFFERS_PART: u32 = 2;

/// Frames that may wait in each direction of a vlink: an eighth of [`POOL_PACKETS`].
pub const QUEUE_FRAMES_MAX: u32 = POOL_PACKETS / 8;

/// Most neighbours on a router's links that one of its forwarding guests may have
/// the kernel resolve at a time (3 s). Each is an entry of the kernel's neighbour
/// table, which all networks of a machine share.
pub const ASKED_MAX: usize = 256;

/// Most of these that may answer within that time. A new entry stays for some seconds, too.
pub const ANSWERED_MAX: usize = 2048;

/// Queues of one end of a vlink.
pub const QUEUES_MAX: usize = 4096;

/// Most queues of all ends of a vnet. Each empty one takes 90 bytes
/// of the mux's memory, plus its configuration.
pub const VNET_QUEUES_MAX: usize = 65_536;

/// Most bytes that may wait in one queue: as many as the highest count of the longest frames has.
pub const QUEUE_BYTES_MAX: u64 = 8 << 20;

/// Highest DSCP (RFC 2474 section 3).
pub const DSCP_MAX: u8 = 63;
