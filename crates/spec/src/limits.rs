//! Limits of everything in a spec that can grow.

use pdp_proto::limits as mux;

/// Directories below which files may be put into a node; other places of its root are read-only.
pub const FILE_DIRECTORIES: [&str; 5] = ["/etc", "/root", "/run", "/tmp", "/var"];
/// Like [`FILE_DIRECTORIES`], for nodes with an image.
pub const FILE_DIRECTORIES_IMAGE: [&str; 6] =
    ["/etc", "/root", "/run", "/tmp", "/var/log", "/var/tmp"];
/// Bytes of one spec file.
pub const SPEC_BYTES_MAX: usize = 16 << 20;
/// Characters of a name: a DNS label (RFC 1035 section 2.3.4).
pub const NAME_CHARS_MAX: usize = 63;
/// Characters of an interface's name: the kernel's IFNAMSIZ without the closing zero.
pub const INTERFACE_CHARS_MAX: usize = 15;
/// Virtual networks on one substrate.
pub const VNETS_MAX: usize = 1024;
/// Nodes of one virtual network.
pub const NODES_MAX: usize = 256;
/// Links of one virtual network.
pub const LINKS_MAX: usize = 4096;
/// Ends of one link; the mux's limit.
pub const ENDS_MAX: usize = mux::ENDS_MAX;
/// Addresses that one segment learns; the mux's limit.
pub const ADDRESSES_LEARNED_MAX: u32 = mux::ADDRESSES_MAX;
/// Addresses that all segments of one virtual network learn; the mux's limit.
pub const VNET_ADDRESSES_MAX: u64 = mux::VNET_ADDRESSES_MAX;
/// Frames per second that each end of a segment may flood; the mux's limit.
pub const FLOOD_PPS_MAX: u64 = mux::FLOOD_PPS_MAX;
/// External endpoints of one virtual network.
pub const EXTERNALS_MAX: usize = 4096;
/// Interfaces of one node; the tag's limit.
pub const PORTS_MAX: usize = pdp_wire::tag::VPORTS_MAX;
/// Interfaces of all nodes of one virtual network; the mux's limit.
pub const VNET_PORTS_MAX: usize = mux::PORTS_MAX;
/// Addresses of one interface.
pub const ADDRESSES_MAX: usize = 32;
/// Static routes of one node.
pub const STATIC_ROUTES_MAX: usize = 256;
/// Next hops of one static route.
pub const HOPS_MAX: usize = 32;
/// Maximum weight of a next hop. The kernel stores the weight minus one in a byte.
pub const HOP_WEIGHT_MAX: u32 = 256;
/// Smallest path MTU of IPv6 (RFC 8200 section 5).
pub const MTU_V6_MIN: u32 = 1280;
/// The kernel's table of its own addresses' routes; not available to specs.
pub const TABLE_LOCAL: u32 = 255;
/// Sysctls of one node.
pub const SYSCTLS_MAX: usize = 256;
/// Bytes of the value of a sysctl.
pub const SYSCTL_BYTES_MAX: usize = 256;
/// Files put into one node.
pub const FILES_MAX: usize = 256;
/// Directories below which programs without an image may
/// have files. Files directly below `/` are allowed too.
pub const PROGRAM_FILE_DIRECTORIES: [&str; 8] =
    ["/etc", "/home", "/opt", "/root", "/run", "/srv", "/tmp", "/var"];
/// Files of a program. Each of its forwarding guests holds a copy in memory.
pub const PROGRAM_FILES_MAX: usize = 32;
/// Bytes of all files of a program.
pub const PROGRAM_FILES_BYTES_MAX: usize = 256 << 10;
/// Bytes of an image's path.
pub const IMAGE_PATH_BYTES_MAX: usize = 1024;
/// Binds of one node.
pub const BINDS_MAX: usize = 64;
/// Bytes of a bind's path.
pub const BIND_BYTES_MAX: usize = 1024;
/// Volumes of one node.
pub const VOLUMES_MAX: usize = 16;
/// Characters of a volume's name.
pub const VOLUME_NAME_CHARS_MAX: usize = 63;
/// Smallest volume, bytes; its journal takes 4 MiB.
pub const VOLUME_BYTES_MIN: u64 = 16 << 20;
/// Largest volume, bytes.
pub const VOLUME_BYTES_MAX: u64 = 1 << 40;
/// Default size of a volume, bytes.
pub const VOLUME_BYTES_DEFAULT: u64 = 64 << 20;
/// Bytes of one file put into a node.
pub const FILE_BYTES_MAX: usize = 4 << 20;
/// Commands of one node, and entries of its `exec`.
pub const COMMANDS_MAX: usize = 64;
/// Shortest time of a command's `ready`, nanoseconds.
pub const CHECK_NS_MIN: u64 = 10_000_000;
/// Longest time of a command's `ready`, nanoseconds: an hour.
pub const CHECK_NS_MAX: u64 = 3_600_000_000_000;
/// Characters of a command's user name, and of its group name.
pub const USER_CHARS_MAX: usize = 64;
/// Largest user or group id in a node.
pub const USER_ID_MAX: u32 = 65_535;
/// Bytes of a command's working directory path.
pub const WORKDIR_BYTES_MAX: usize = 1024;
/// Words of one command.
pub const WORDS_MAX: usize = 256;
/// Environment variables of one node.
pub const ENV_MAX: usize = 256;
/// Labels of one object or one node.
pub const LABELS_MAX: usize = 64;
/// Characters of the name in a node's label, and of the label's value.
pub const LABEL_CHARS_MAX: usize = 63;
/// Characters of the domain before the name in a node's label.
pub const LABEL_PREFIX_CHARS_MAX: usize = 253;
/// External interfaces of a substrate; the mux's limit.
pub const INTERFACES_MAX: usize = mux::EXTERNALS_MAX;
/// Forwarding engines of a substrate.
pub const ENGINES_MAX: usize = 256;
/// Worker threads of the mux.
pub const WORKERS_MAX: u32 = 64;
/// Upper bound of CPU numbers, exclusive.
pub const CPUS_MAX: u32 = 4096;
/// Forwarding guests of one vrouter; the mux's limit.
pub const GUESTS_MAX: usize = mux::GUESTS_MAX;
/// Smallest power of a vrouter and capacity of an engine, thousandths of a
/// core. Below it, a CPU quota is shorter than a scheduler tick in ten periods.
pub const POWER_MILLICORES_MIN: u32 = pdp_alloc::SHARE_MILLICORES_MIN;

/// Default power of a vrouter that needs a guarantee but names no power, thousandths of a core.
pub const POWER_MILLICORES_DEFAULT: u32 = 100;
/// Fast paths can be guaranteed the mux's power divided by this. The rest is
/// reserved for moving frames: for receiving, classifying and sending all frames,
/// which no guarantee covers, and for frames of guests and hosts (docs/fastpath.md).
pub const FASTPATH_POWER_PART: u32 = 2;
/// Maximum millicores of any value.
pub const MILLICORES_MAX: u32 = 4_096_000;
/// Punt filters of one vrouter; the mux's limit.
pub const PUNT_FILTERS_MAX: usize = mux::PUNT_FILTERS_MAX;
/// Fields of one flow key or one punt filter.
pub const FIELDS_MAX: usize = 16;
/// Bytes of one field of a flow key or a punt filter.
pub const FIELD_BYTES_MAX: usize = 64;
/// Bytes of all fields of one flow key or one punt filter; the mux's limit.
pub const FIELDS_BYTES_MAX: usize = mux::PATTERN_BYTES_MAX;
/// Smallest IP packet size of an interface (RFC 791).
pub const MTU_MIN: u32 = 68;
/// Largest IP packet size of an interface. The mux's packets have 2,048
/// bytes, of which 256 are headroom. Outer headers and the tag need the rest.
pub const MTU_MAX: u32 = 1700;
/// IP packet size of an interface, unless the spec or a tunnel sets another.
pub const MTU_DEFAULT: u32 = 1500;
/// Queue length of a link's direction, frames; the mux's limit.
pub const QUEUE_FRAMES_MAX: u32 = mux::QUEUE_FRAMES_MAX;
/// Queues of one end of a link; the mux's limit.
pub const QUEUES_MAX: usize = mux::QUEUES_MAX;
/// Queues of all links' ends in one virtual network; the mux's limit.
pub const VNET_QUEUES_MAX: usize = mux::VNET_QUEUES_MAX;
/// Memory of the mux for an empty queue, bytes, besides its configuration.
pub const QUEUE_MEMORY_BYTES: u64 = 128;
/// Packets of the mux, divided equally among its workers.
pub const POOL_PACKETS: u32 = mux::POOL_PACKETS;
/// Queues may reserve one worker's packets divided by this.
pub const BUFFERS_PART: u32 = mux::BUFFERS_PART;
/// Bytes that may wait in one queue; the mux's limit.
pub const QUEUE_BYTES_MAX: u64 = mux::QUEUE_BYTES_MAX;
/// Highest DSCP; the mux's limit.
pub const DSCP_MAX: u8 = mux::DSCP_MAX;
/// Number of DSCPs.
pub const DSCPS: usize = DSCP_MAX as usize + 1;
/// Longest span of time of any value, nanoseconds: a day.
pub const SPAN_NS_MAX: u64 = 86_400_000_000_000;
/// Longest delay of a link, nanoseconds; the mux's limit.
pub const DELAY_NS_MAX: u64 = mux::DELAY_NS_MAX;
/// Schedule steps of all links of one virtual network; the mux's limit.
pub const SCHEDULE_STEPS_MAX: usize = mux::SCHEDULE_STEPS_MAX;
/// Maximum weight of a link on an interface; the mux's limit.
pub const WEIGHT_MAX: u32 = mux::WEIGHT_MAX;
/// Maximum bytes that a frame counts beyond its own length; the mux's limit.
pub const OVERHEAD_BYTES_MAX: u32 = mux::OVERHEAD_BYTES_MAX;
/// Smallest burst of a link, bytes: the longest frame.
pub const BURST_BYTES_MIN: u64 = 2048;
/// Largest burst of a link, bytes.
pub const BURST_BYTES_MAX: u64 = 64 << 20;
/// Bytes of delayed frames of one virtual network; the mux's limit.
pub const VNET_LINES_BYTES_MAX: u64 = mux::VNET_LINES_BYTES_MAX;
/// Lowest rate of a link, bits per second: one frame of the largest size in about two seconds.
pub const RATE_BPS_MIN: u64 = 8_000;
/// Highest rate of any value, bits per second.
pub const RATE_BPS_MAX: u64 = 1_000_000_000_000;
/// Highest packet rate of any value, packets per second.
pub const RATE_PPS_MAX: u64 = 1_000_000_000;
/// Tenants of one PdP node.
pub const TENANTS_MAX: usize = 256;
/// Unix users of one tenant, its image directories, and the registries that it may pull from.
pub const TENANT_ENTRIES_MAX: usize = 64;
/// Default quota for the specs of a tenant's virtual
/// networks, bytes. PdP stores them on disk and in memory.
pub const TENANT_SPECS_DEFAULT: u64 = 64 << 20;
/// Default quotas for all virtual networks of a tenant together. They suffice for work,
/// and are a small part of a node's resources. Power and CPU are in thousandths of a core.
pub const TENANT_VNETS_DEFAULT: u64 = 16;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_NODES_DEFAULT: u64 = 128;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_POWER_DEFAULT: u64 = 1000;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_CPU_DEFAULT: u64 = 16_000;
/// See [`TENANT_VNETS_DEFAULT`]; bytes.
pub const TENANT_MEMORY_DEFAULT: u64 = 8 << 30;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_PROCESSES_DEFAULT: u64 = 16_384;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_VPORTS_DEFAULT: u64 = 512;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_ROUTES_DEFAULT: u64 = 4_000_000;
/// See [`TENANT_VNETS_DEFAULT`]; bytes.
pub const TENANT_LOGS_DEFAULT: u64 = 4 << 30;
/// See [`TENANT_VNETS_DEFAULT`]; bytes.
pub const TENANT_VOLUMES_DEFAULT: u64 = 1 << 30;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_OCI_IMAGES_DEFAULT: u64 = 8;
/// See [`TENANT_VNETS_DEFAULT`]; bytes.
pub const TENANT_IMAGES_DEFAULT: u64 = 4 << 30;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_IMAGE_FILES_DEFAULT: u64 = 200_000;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_DESCRIPTORS_DEFAULT: u64 = 1024;
/// See [`TENANT_VNETS_DEFAULT`].
pub const TENANT_REGIONS_DEFAULT: u64 = 512;
/// See [`TENANT_VNETS_DEFAULT`]: an eighth of what one worker can reserve.
pub const TENANT_BUFFERS_DEFAULT: u64 = 2048;
/// Bytes of one log file of a process, which has two.
/// The daemon's tests compare this with its setting.
pub const LOG_BYTES_MAX: u64 = 4 << 20;
/// Memory regions of one memif connection of a program that is not on the runtime.
pub const MEMIF_REGIONS_MAX: u64 = 16;
/// Memory regions that the mux maps in total.
pub const REGIONS_MAX: u64 = 16_384;
/// Default quota for concurrent sessions of a tenant: captures, logs, route tables, commands.
pub const TENANT_SESSIONS_DEFAULT: u32 = 16;
/// Default quota for audit log entries of a tenant: for each of changes, reads and refusals.
pub const TENANT_AUDIT_DEFAULT: u32 = 10_000;
/// Ranges of one set of tunnel keys.
pub const KEY_RANGES_MAX: usize = 64;
/// Smallest memory limit of a guest, bytes.
pub const MEMORY_BYTES_MIN: u64 = 4 << 20;
/// Largest memory limit, bytes.
pub const MEMORY_BYTES_MAX: u64 = 1 << 44;
/// Maximum number of processes of a guest.
pub const PROCESSES_MAX: u32 = 65_536;
/// Maximum number of routes of a vrouter.
pub const ROUTES_MAX: u32 = 16_000_000;
/// Diagnostics that one call returns. If there are more, a last one reports it.
pub const DIAGNOSTICS_MAX: usize = 200;
/// Bytes of a generator's pcap file. Its base64 form fits in
/// a spec file, so that a stored spec can be applied again.
pub const PCAP_BYTES_MAX: usize = 10 << 20;
/// Shortest frame of a generator, bytes: an Ethernet header.
pub const FRAME_BYTES_MIN: usize = 14;
/// Longest frame of a generator, bytes: an Ethernet header and the largest packet.
pub const FRAME_BYTES_MAX: usize = FRAME_BYTES_MIN + MTU_MAX as usize;
/// Frames per ring and direction of a forwarding guest: minimum, maximum, and default.
pub const GUEST_QUEUE_MIN: u32 = 64;
/// See [`GUEST_QUEUE_MIN`].
pub const GUEST_QUEUE_MAX: u32 = 16_384;
/// See [`GUEST_QUEUE_MIN`].
pub const GUEST_QUEUE_DEFAULT: u32 = 1024;
/// Memory of a forwarding guest on the runtime besides its packets, bytes.
pub const GUEST_MEMORY_BASE: u64 = 16 << 20;
/// Memory of a forwarding guest on the runtime per frame of its queue,
/// bytes: a 2 KiB buffer in each of two rings, and as many in the program.
pub const GUEST_MEMORY_PER_FRAME: u64 = 8 << 10;

/// Default number of filters, and of counters, of a fast path.
pub const FILTERS: u32 = 1024;

/// Filters of a fast path, for each of IPv4 and IPv6.
pub const FILTERS_MAX: u32 = pdp_proto::slowpath::FILTERS_MAX;

/// Counters of a fast path.
pub const COUNTERS_MAX: u32 = pdp_proto::slowpath::COUNTERS_MAX;

/// Bytes of a key of `code: fields`.
pub const KEY_BYTES_MAX: usize = pdp_proto::mux::KEY_FIELD_BYTES_MAX;
