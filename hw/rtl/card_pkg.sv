// Types of the card that several modules share. Widths are the widest of any variant; parameters
// of the modules size the tables.
package card_pkg;

  // Virtual environment (VE): the virtual router that owns a frame.
  typedef logic [7:0] ve_t;
  // Virtual port of a VE.
  typedef logic [3:0] vport_t;
  // Physical port; HOST is the port to the driver.
  typedef logic [2:0] port_t;
  // verilator lint_off UNUSEDPARAM
  localparam port_t HOST = 3'd7;
  // verilator lint_on UNUSEDPARAM
  // Broadcast domain in which a MAC address is unique.
  typedef logic [11:0] segment_t;
  // MAC address; the byte that is first on the wire is in bits 47:40.
  typedef logic [47:0] mac_t;
  // Bytes of a frame without its check sequence, 1 to 1,714.
  typedef logic [10:0] length_t;
  // Opaque number that a frame keeps on its way through the header pipeline.
  typedef logic [15:0] token_t;

  // Bytes of a frame that the header pipeline sees. Byte 0 is in bits 7:0.
  localparam int HEADER_BYTES = 64;
  typedef logic [8*HEADER_BYTES-1:0] header_bytes_t;

  // What becomes of a frame. The names are those of PuntClass and GuestDrop in crates/wire.
  typedef enum logic [3:0] {
    OUT              = 4'd0,
    PUNT_LOCAL       = 4'd1,
    PUNT_NEIGHBOUR   = 4'd2,
    PUNT_EXCEPTION   = 4'd3,
    PUNT_HOOK        = 4'd4,
    PUNT_CONTROL     = 4'd5,
    DROP_NOT_FOR_US  = 4'd8,
    DROP_MALFORMED   = 4'd9,
    DROP_POLICY      = 4'd10,
    DROP_BLACKHOLE   = 4'd11,
    DROP_NO_VE       = 4'd12,
    DROP_RATE        = 4'd13,
    DROP_SPOOF       = 4'd14,
    DROP_QUEUE       = 4'd15
  } verdict_t;

  // A frame as it enters the header pipeline.
  typedef struct packed {
    header_bytes_t bytes;    // the first 64 bytes, zero behind the end of the frame
    length_t       length;   // bytes of the whole frame
    port_t         port;     // port that received the frame
    segment_t      segment;  // segment of that port's frame
    ve_t           ve;       // from HOST only: VE whose page sent the frame
    vport_t        vport;    // from HOST only: vport by which the frame leaves
    token_t        token;
  } header_in_t;

  // A frame as it leaves the header pipeline.
  typedef struct packed {
    header_bytes_t bytes;    // the first 64 bytes, rewritten if the verdict is OUT
    length_t       length;   // bytes of the frame to send; shorter if padding is cut off
    verdict_t      verdict;
    logic          group;    // the frame goes to each VE of the segment
    logic          owned;    // the frame belongs to `ve`; 0: to no VE
    ve_t           ve;
    vport_t        vport;    // egress vport of OUT, else ingress vport
    port_t         port;     // egress port of OUT, else HOST
    segment_t      segment;  // egress segment of OUT, else ingress segment
    token_t        token;
  } header_out_t;

  // Tables that the write bus reaches. `ve` on the bus selects the virtual environment; `index` is
  // relative to the segment of that VE where the table is pooled. Data is right-aligned: the type
  // named behind each table. "super" marks the tables that only the super page writes.
  typedef enum logic [4:0] {
    TABLE_VMAC         = 5'd0,   // super; index {way, set 8}; vmac_entry_t
    TABLE_VMAC_STASH   = 5'd1,   // super; index 0..7; vmac_entry_t
    TABLE_VMAC_SEED    = 5'd2,   // super; index 0; vmac_key_t
    TABLE_METER        = 5'd3,   // super; index 0; meter_t
    TABLE_VE_CONTROL   = 5'd4,   // super; index 0; bit 0: enabled
    TABLE_ATTACHMENT   = 5'd5,   // super; index: vport; attachment_t
    TABLE_HOP_SEGMENTS = 5'd6,   // super; index 0; hop_segments_t
    TABLE_LPM_SEGMENTS = 5'd7,   // super; index 0; segment_write_t of card_lpm_pkg
    TABLE_VE_OPTIONS   = 5'd8,   // index 0; ve_options_t
    TABLE_CONTEXT      = 5'd9,   // index: vport; context_t
    TABLE_OWN_V4       = 5'd10,  // index 0..15; own_v4_t
    TABLE_GROUP        = 5'd11,  // index: group; group_t
    TABLE_BUCKET       = 5'd12,  // index {block, bucket 8}; hop_index_t
    TABLE_HOP          = 5'd13,  // index: hop; hop_t
    TABLE_ARP          = 5'd14,  // index: ARP entry; arp_t
    TABLE_LPM_ROOT     = 5'd15,  // index {is_v6, first 8 bits}; root_write_t
    TABLE_LPM_NODE     = 5'd16,  // index {level 5, node 27}; node_write_t
    TABLE_LPM_LEAF     = 5'd17   // index: leaf; leaf_t
  } table_t;
  typedef logic [31:0] table_index_t;
  typedef logic [191:0] table_data_t;

  // Key of the VMAC-VE table.
  typedef struct packed {
    segment_t segment;
    mac_t     mac;
  } vmac_key_t;
  typedef struct packed {
    logic      valid;
    vmac_key_t key;
    ve_t       ve;
    vport_t    vport;
  } vmac_entry_t;

  // Part of a pooled table that belongs to a VE: entries base .. base + length - 1.
  typedef struct packed {
    logic [15:0] base;
    logic [15:0] length;
  } range_t;
  // Parts of a VE; `bucket` counts blocks of 256 buckets.
  typedef struct packed {
    range_t arp;
    range_t hop;
    range_t bucket;
    range_t group;
  } hop_segments_t;

  // Next-hop groups. All indices are relative to the part of the VE.
  typedef logic [9:0] group_index_t;
  typedef logic [11:0] hop_index_t;
  typedef logic [11:0] arp_index_t;
  typedef logic [7:0] bucket_t;
  typedef struct packed {
    logic       valid;  // 0: group without hops
    logic       multi;  // 1: `index` is a block of buckets, 0: a hop
    hop_index_t index;
  } group_t;
  typedef logic [13:0] mtu_t;
  typedef struct packed {
    logic       valid;
    vport_t     vport;
    logic       chosen;   // one of several hops of its group
    logic       resolved; // `arp` is an ARP entry; 0: neighbour unknown
    arp_index_t arp;
    mtu_t       mtu;      // largest packet of its routes, bytes
  } hop_t;
  typedef struct packed {
    logic valid;
    mac_t mac;
  } arp_t;

  // Place of a vport outside of its VE. The super page grants it.
  typedef struct packed {
    logic     attached;
    port_t    port;
    segment_t segment;
    mac_t     mac;
  } attachment_t;
  // Context register of a vport. Hooks are those of VportHooks in crates/proto.
  typedef struct packed {
    logic valid;        // the mirror has named the vport
    logic up;
    logic forwards_v4;
    logic hook_all;
    logic hook_v4;
    logic hook_v6;
    logic hook_out;
    logic hook_back_v4;
    logic hook_back_v6;
    mtu_t mtu;          // largest IP packet, bytes
  } context_t;
  typedef struct packed {
    logic        forwards_v4;
    logic        forwards_v6;
    logic        chooses_v4;
    logic        chooses_v6;
    logic [31:0] seed;   // of the choice among several hops
  } ve_options_t;
  // One of the VE's own IPv4 addresses.
  typedef struct packed {
    logic        valid;
    logic [31:0] address;
  } own_v4_t;

  // Token bucket. A tick is one step of the time input of card_header.
  typedef struct packed {
    logic        limited;  // 0: no limit
    logic [27:0] rate;     // 2^-20 bytes per tick
    logic [19:0] burst;    // bytes
  } meter_t;

  // What card_parse finds in a frame.
  typedef enum logic [1:0] {
    KIND_OTHER = 2'd0,
    KIND_IPV4  = 2'd1,
    KIND_IPV6  = 2'd2,
    KIND_ARP   = 2'd3
  } frame_kind_t;
  typedef struct packed {
    frame_kind_t kind;
    logic        runt;             // shorter than an Ethernet header; the rest is undefined
    logic        to_group;         // group destination MAC address
    logic        malformed;        // IP: broken header; the fields below are undefined
    logic        unknown;          // IPv4: header too long for the card
    logic        discovery;        // IPv6 neighbour or router discovery
    logic        control;          // class of a frame for the router itself: control, else local
    logic        to_router;        // IP destination: any router, by the kind of address
    logic        never;            // IP address that no packet on a link may have
    logic        from_link_local;  // IPv6 source
    logic        expired;          // TTL or hop limit 0 or 1
    logic        options;          // IPv4 options or IPv6 hop-by-hop options
    logic        dont_fragment;    // IPv4 DF
    length_t     packet_bytes;     // bytes of the IP packet without padding
  } parsed_t;

  // Time of the meters; the unit is free.
  typedef logic [47:0] ticks_t;

  // Hash of the VMAC-VE table: vmac_crc(chi ^ key ^ seed), where chi is vmac_chi(key ^ seed). Way w
  // has its index in bits 8w+7:8w. A CRC is linear, so keys that collide would do so under each
  // seed. Therefore rows of five bits pass the invertible map chi of Keccak first, under the seed.
  function automatic logic [59:0] vmac_chi(input logic [59:0] mixed);
    for (int row = 0; row < 60; row += 5)
      for (int i = 0; i < 5; i++)
        vmac_chi[row+i] = ~mixed[row+(i+1)%5] & mixed[row+(i+2)%5];
  endfunction
  // CRC-32 without inversions, from bit 59 on.
  function automatic logic [31:0] vmac_crc(input logic [59:0] data);
    vmac_crc = '0;
    for (int at = 59; at >= 0; at--)
      vmac_crc = {vmac_crc[30:0], 1'b0} ^ ((vmac_crc[31] ^ data[at]) ? 32'h04c1_1db7 : 32'h0);
  endfunction

endpackage
