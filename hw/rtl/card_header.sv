// The header pipeline: from a frame's first bytes to its verdict, egress, and rewritten bytes.
//
// Latency: LATENCY cycles from `valid_i` to `valid_o` for every frame, 56 without external memory.
// One frame per cycle; there is no back-pressure, and writes never delay frames.
//
// | cycle | stage |
// |---|---|
// | 0 | card_parse (2 and 4 cycles), card_vmac (2 cycles), card_flow (36 cycles) |
// | 2 | card_lpm, card_meter (11 cycles) |
// | ROUTE - 3 | card_ve |
// | ROUTE | card_nexthop: group, bucket, hop |
// | ROUTE + 6 | card_arp, card_context |
// | ROUTE + 7 | card_verdict |
// | ROUTE + 8 | card_rewrite |
// | ROUTE + 10 | out |
//
// Writes: one per cycle. The memories have an entry one cycle after `wr_refused_o` would refuse it,
// in the order of the writes, whatever the table. A write to a level of the trie is later by the
// time that look-ups take to that level. So a frame that enters later sees them all. A frame sees
// each word of a table before or after a write. A place that nothing refers to may be used for
// something else LATENCY cycles after the last word that referred to it was written.
// Invariant: a frame's result depends only on entries of its VE and on the super page's tables.
module card_header
  import card_pkg::*;
  import card_lpm_pkg::*;
#(
    parameter int VES           = 32,     // a power of two
    parameter int VMACS         = 1024,
    parameter int LEVELS        = 20,
    parameter int NODES         = 8192,   // per level of the trie
    parameter int LEAVES        = 65536,
    parameter int EXT_FROM      = 21,
    parameter int EXT_LATENCY   = 4,
    parameter int GROUPS        = 8192,
    parameter int BUCKET_BLOCKS = 64,
    parameter int HOPS          = 8192,
    parameter int ARPS          = 16384
) (
    input logic clk,
    input logic rst,

    input  ticks_t      now_i,     // time of the meters
    input  logic        valid_i,
    input  header_in_t  header_i,
    output logic        valid_o,
    output header_out_t header_o,
    output logic        fault_o,   // an index led out of a part of the VE of `header_o`
    output logic        excess_o,  // the route of the frame did not fit

    input  logic         wr_valid_i,
    input  table_t       wr_table_i,
    input  ve_t          wr_ve_i,
    input  table_index_t wr_index_i,
    input  table_data_t  wr_data_i,
    output logic         wr_refused_o  // LPM_WRITE_LATENCY cycles after `wr_valid_i`
);

  localparam int LATENCY = header_latency(LEVELS, EXT_FROM, EXT_LATENCY);
  // Cycle of the leaf's register, behind the look-up that begins in cycle 2.
  localparam int ROUTE = LATENCY - 10;
  localparam int VE_BITS = VES > 1 ? $clog2(VES) : 1;

  if (VES < 1 || VES > 256 || VES != 1 << $clog2(VES)) begin : gen_wrong_ves
    $error("VES is not a power of two up to 256");
  end
  // card_ve keeps base + length of a part below the table's size, so 16 bits hold base + index.
  if (GROUPS > 65536 || BUCKET_BLOCKS > 65536 || HOPS > 65536 || ARPS > 65536)
  begin : gen_wrong_tables
    $error("GROUPS, BUCKET_BLOCKS, HOPS, or ARPS is more than 65,536");
  end
  if (ROUTE < 36) begin : gen_too_few_levels
    $error("LEVELS is too small: a look-up must take as long as the flow hash");
  end

  // ---------------------------------------------------------------------------------------------
  // Write bus. All memories take an entry in the cycle of its wr_refused_o, as card_lpm does.

  typedef struct packed {
    table_t       kind;
    ve_t          ve;
    table_index_t index;
    table_data_t  data;
  } write_t;

  logic [LPM_WRITE_LATENCY-1:0] wr_valid_q;
  // verilator lint_off UNUSEDSIGNAL
  write_t [LPM_WRITE_LATENCY-1:0] wr_q;  // no table but the trie's has so much data
  write_t wr;
  // verilator lint_on UNUSEDSIGNAL
  logic wr_valid, wr_exists, wr_to_lpm, wr_unknown;
  logic refused_lpm, refused_vmac, refused_ve, refused_nexthop, refused_arp, refused_context;
  logic refused_bus, refused_meter;
  hop_segments_t wr_segments;
  lpm_table_t lpm_table;

  always_ff @(posedge clk) begin
    wr_valid_q <= rst ? '0 : {wr_valid_q[LPM_WRITE_LATENCY-2:0], wr_valid_i && !wr_to_lpm};
    wr_q <= {wr_q[LPM_WRITE_LATENCY-2:0], {wr_table_i, wr_ve_i, wr_index_i, wr_data_i}};
  end

  always_comb begin
    wr_to_lpm = 1'b1;
    lpm_table = LPM_ROOT;
    case (wr_table_i)
      TABLE_LPM_ROOT:     lpm_table = LPM_ROOT;
      TABLE_LPM_NODE:     lpm_table = LPM_NODE;
      TABLE_LPM_LEAF:     lpm_table = LPM_LEAF;
      TABLE_LPM_SEGMENTS: lpm_table = LPM_SEGMENT;
      default:            wr_to_lpm = 1'b0;
    endcase
  end

  assign wr = wr_q[LPM_WRITE_LATENCY-1];
  assign wr_exists = {1'b0, wr.ve} < 9'(VES);
  assign wr_valid = wr_valid_q[LPM_WRITE_LATENCY-1] && wr_exists;
  assign wr_unknown = wr.kind > TABLE_LPM_LEAF;
  assign refused_meter = wr_valid && wr.kind == TABLE_METER && wr.index != '0;
  assign refused_bus = wr_valid_q[LPM_WRITE_LATENCY-1] && (!wr_exists || wr_unknown);
  assign wr_refused_o = refused_bus || refused_lpm || refused_vmac || refused_ve
      || refused_nexthop || refused_arp || refused_context || refused_meter;

  // ---------------------------------------------------------------------------------------------
  // Cycle 0: parser, VMAC-VE table, flow hash. All frames wait for the end in one delay line.

  logic is_v6;
  logic [127:0] key;
  parsed_t parsed_4;
  logic hit_2;
  ve_t ve_2;
  vport_t vport_2;
  logic [31:0] hash_36, hash;
  mac_t destination;
  assign destination = {<<8{header_i.bytes[47:0]}};

  card_parse parse (
      .clk,
      .bytes_i (header_i.bytes),
      .length_i(header_i.length),
      .is_v6_o (is_v6),
      .key_o   (key),
      .parsed_o(parsed_4)
  );
  card_vmac #(
      .VMACS(VMACS),
      .VES  (VES)
  ) vmac (
      .clk,
      .rst,
      .key_i       ('{segment: header_i.segment, mac: destination}),
      .hit_o       (hit_2),
      .ve_o        (ve_2),
      .vport_o     (vport_2),
      .wr_valid_i  (wr_valid),
      .wr_table_i  (wr.kind),
      .wr_index_i  (wr.index),
      .wr_entry_i  (wr.data[$bits(vmac_entry_t)-1:0]),
      .wr_refused_o(refused_vmac)
  );
  card_flow flow (
      .clk,
      .bytes_i (header_i.bytes),
      .length_i(header_i.length),
      .hash_o  (hash_36)
  );
  card_lpm_delay #(
      .WIDTH (32),
      .CYCLES(ROUTE - 36)
  ) hash_delay (
      .clk,
      .data_i(hash_36),
      .data_o(hash)
  );

  header_bytes_t bytes_8;
  length_t length_8;
  port_t port_8;
  segment_t segment_8;
  token_t token_8;
  card_delay_ram #(
      .WIDTH ($bits(header_bytes_t) + $bits(length_t) + $bits(port_t) + $bits(segment_t)
              + $bits(token_t)),
      .CYCLES(ROUTE + 8)
  ) frame_delay (
      .clk,
      .rst,
      .data_i({header_i.bytes, header_i.length, header_i.port, header_i.segment, header_i.token}),
      .data_o({bytes_8, length_8, port_8, segment_8, token_8})
  );

  // ---------------------------------------------------------------------------------------------
  // Cycle 2: route look-up, meter.

  logic [2:1] valid_q, metered_q;
  logic [4:1] from_host_q;
  length_t [2:1] length_q;
  ve_t [3:1] host_ve_q;
  vport_t [3:1] host_vport_q;
  logic [4:1][31:0] v4_source_q;
  logic over_13, over;
  logic [31:0] v4_source;
  assign v4_source = {<<8{header_i.bytes[8*26+:32]}};

  always_ff @(posedge clk) begin
    valid_q <= rst ? '0 : {valid_q[1], valid_i};
    // A group frame belongs to no VE; a runt has no address.
    metered_q <= {
      metered_q[1], header_i.port != HOST && !header_i.bytes[0] && header_i.length >= 11'd14
    };
    from_host_q <= {from_host_q[3:1], header_i.port == HOST};
    length_q <= {length_q[1], header_i.length};
    host_ve_q <= {host_ve_q[2:1], header_i.ve};
    host_vport_q <= {host_vport_q[2:1], header_i.vport};
    v4_source_q <= {v4_source_q[3:1], v4_source};
  end

  logic route_valid;
  leaf_t leaf_read;
  logic lpm_fault;
  // The frame's own delay lines have them.
  // verilator lint_off UNUSEDSIGNAL
  ve_t lpm_ve;
  token_t lpm_token;
  // verilator lint_on UNUSEDSIGNAL
  card_lpm #(
      .VES        (VES),
      .LEVELS     (LEVELS),
      .NODES      (NODES),
      .LEAVES     (LEAVES),
      .EXT_FROM   (EXT_FROM),
      .EXT_LATENCY(EXT_LATENCY)
  ) lpm (
      .clk,
      .rst,
      .valid_i     (valid_q[2]),
      .ve_i        (ve_2),
      .is_v6_i     (is_v6),
      .key_i       (key),
      .token_i     ('0),
      .valid_o     (route_valid),
      .leaf_o      (leaf_read),
      .fault_o     (lpm_fault),
      .ve_o        (lpm_ve),
      .token_o     (lpm_token),
      .wr_valid_i  (wr_valid_i && wr_to_lpm),
      .wr_table_i  (lpm_table),
      .wr_level_i  (wr_index_i[31:27]),
      .wr_ve_i,
      .wr_index_i  (lpm_table == LPM_NODE ? {5'd0, wr_index_i[26:0]} : wr_index_i),
      .wr_data_i,
      .wr_refused_o(refused_lpm)
  );

  card_meter #(
      .VES(VES)
  ) meter (
      .clk,
      .rst,
      .now_i,
      .valid_i   (valid_q[2] && metered_q[2] && hit_2),
      .ve_i      (ve_2[VE_BITS-1:0]),
      .length_i  (length_q[2]),
      .over_o    (over_13),
      .wr_en_i   (wr_valid && wr.kind == TABLE_METER && !refused_meter),
      .wr_ve_i   (wr.ve[VE_BITS-1:0]),
      .wr_meter_i(wr.data[$bits(meter_t)-1:0])
  );
  card_lpm_delay #(
      .WIDTH (1),
      .CYCLES(ROUTE + 7 - 13)
  ) over_delay (
      .clk,
      .data_i(over_13),
      .data_o(over)
  );

  // ---------------------------------------------------------------------------------------------
  // Cycles 3 and 4: VE of the frame, then a delay line up to card_ve.

  typedef struct packed {
    parsed_t parsed;
    logic    from_host;
    logic    owned;
    ve_t     ve;
    vport_t  vport;
  } frame_t;

  logic owned_3, owned_4;
  ve_t ve_3, ve_4;
  vport_t vport_3, vport_4;
  frame_t frame_early, frame_route, frame_6, frame_7;
  // verilator lint_off UNUSEDSIGNAL
  frame_t frame_8;  // some fields end before
  // verilator lint_on UNUSEDSIGNAL
  logic [31:0] v4_source_early;

  always_ff @(posedge clk) begin
    {owned_3, ve_3, vport_3} <= {hit_2, ve_2, vport_2};
    {owned_4, ve_4, vport_4} <= {owned_3, ve_3, vport_3};
    if (from_host_q[3]) begin
      owned_4 <= {1'b0, host_ve_q[3]} < 9'(VES);
      ve_4 <= host_ve_q[3];
      vport_4 <= host_vport_q[3];
    end
  end

  card_delay_ram #(
      .WIDTH ($bits(frame_t) + 32),
      .CYCLES(ROUTE - 3 - 4)
  ) early_delay (
      .clk,
      .rst,
      .data_i({parsed_4, from_host_q[4], owned_4, ve_4, vport_4, v4_source_q[4]}),
      .data_o({frame_early, v4_source_early})
  );

  logic enabled, own_source;
  ve_options_t options;
  hop_segments_t segments;
  card_ve #(
      .VES          (VES),
      .GROUPS       (GROUPS),
      .BUCKET_BLOCKS(BUCKET_BLOCKS),
      .HOPS         (HOPS),
      .ARPS         (ARPS)
  ) ve (
      .clk,
      .rst,
      .ve_i         (frame_early.ve[VE_BITS-1:0]),
      .source_i     (v4_source_early),
      .enabled_o    (enabled),
      .options_o    (options),
      .segments_o   (segments),
      .own_source_o (own_source),
      .wr_ve_early_i(wr_q[LPM_WRITE_LATENCY-2].ve[VE_BITS-1:0]),
      .wr_segments_o(wr_segments),
      .wr_valid_i   (wr_valid),
      .wr_table_i   (wr.kind),
      .wr_ve_i      (wr.ve[VE_BITS-1:0]),
      .wr_index_i   (wr.index),
      .wr_data_i    (wr.data[127:0]),
      .wr_refused_o (refused_ve)
  );
  card_lpm_delay #(
      .WIDTH ($bits(frame_t)),
      .CYCLES(3)
  ) frame_to_route (
      .clk,
      .data_i(frame_early),
      .data_o(frame_route)
  );

  // ---------------------------------------------------------------------------------------------
  // Cycle ROUTE: next hop.

  leaf_t leaf;
  logic leaf_fault;
  hop_t hop_6, hop_7;
  logic hop_found_6, hop_fault_6, hop_found_7, hop_fault_7;
  range_t arp_range_6;
  ve_options_t options_7;
  logic enabled_7, own_source_7, leaf_fault_7;
  leaf_kind_t leaf_kind_7;
  logic [LATENCY-ROUTE:0] valid_line_q;  // element n is cycle ROUTE + n

  always_ff @(posedge clk) begin
    leaf <= leaf_read;
    leaf_fault <= lpm_fault;
    valid_line_q <= rst ? '0 : {valid_line_q[LATENCY-ROUTE-1:0], route_valid};
  end

  card_nexthop #(
      .GROUPS       (GROUPS),
      .BUCKET_BLOCKS(BUCKET_BLOCKS),
      .HOPS         (HOPS)
  ) nexthop (
      .clk,
      .group_i      (leaf.group),
      .segments_i   (segments),
      .hash_i       (hash),
      .seed_i       (options.seed),
      .hop_o        (hop_6),
      .found_o      (hop_found_6),
      .fault_o      (hop_fault_6),
      .wr_valid_i   (wr_valid),
      .wr_table_i   (wr.kind),
      .wr_index_i   (wr.index),
      .wr_data_i    (wr.data[$bits(hop_t)-1:0]),
      .wr_segments_i(wr_segments),
      .wr_refused_o (refused_nexthop)
  );
  card_lpm_delay #(
      .WIDTH ($bits(frame_t) + $bits(range_t)),
      .CYCLES(6)
  ) frame_to_arp (
      .clk,
      .data_i({frame_route, segments.arp}),
      .data_o({frame_6, arp_range_6})
  );
  card_lpm_delay #(
      .WIDTH ($bits(ve_options_t) + 3 + $bits(leaf_kind_t)),
      .CYCLES(7)
  ) ve_to_verdict (
      .clk,
      .data_i({options, enabled, own_source, leaf_fault, leaf.kind}),
      .data_o({options_7, enabled_7, own_source_7, leaf_fault_7, leaf_kind_7})
  );

  // ---------------------------------------------------------------------------------------------
  // Cycle ROUTE + 6: MAC address of the neighbour, context of the vports.

  vport_t egress_vport_6, egress_vport_7, egress_vport_8, egress_vport_9;
  assign egress_vport_6 = frame_6.from_host ? frame_6.vport : hop_6.vport;

  logic arp_hit, arp_fault;
  mac_t arp_mac;
  card_arp #(
      .ARPS(ARPS)
  ) arp (
      .clk,
      .resolved_i  (hop_6.resolved),
      .index_i     (hop_6.arp),
      .range_i     (arp_range_6),
      .hit_o       (arp_hit),
      .mac_o       (arp_mac),
      .fault_o     (arp_fault),
      .wr_valid_i  (wr_valid),
      .wr_table_i  (wr.kind),
      .wr_index_i  (wr.index),
      .wr_data_i   (wr.data[$bits(arp_t)-1:0]),
      .wr_range_i  (wr_segments.arp),
      .wr_refused_o(refused_arp)
  );

  context_t ingress, egress;
  logic ingress_attached;
  port_t ingress_port;
  attachment_t egress_attachment;
  // verilator lint_off UNUSEDSIGNAL
  attachment_t egress_attachment_9;  // without `attached`
  // verilator lint_on UNUSEDSIGNAL
  card_context #(
      .VES(VES)
  ) context_ (
      .clk,
      .ve_i               (frame_6.ve[VE_BITS-1:0]),
      .ingress_i          (frame_6.vport),
      .egress_i           (egress_vport_6),
      .ingress_o          (ingress),
      .ingress_attached_o (ingress_attached),
      .ingress_port_o     (ingress_port),
      .egress_o           (egress),
      .egress_attachment_o(egress_attachment),
      .wr_valid_i         (wr_valid),
      .wr_table_i         (wr.kind),
      .wr_ve_i            (wr.ve[VE_BITS-1:0]),
      .wr_index_i         (wr.index),
      .wr_data_i          (wr.data[$bits(attachment_t)-1:0]),
      .wr_refused_o       (refused_context)
  );

  always_ff @(posedge clk) begin
    {frame_7, frame_8} <= {frame_6, frame_7};
    {egress_vport_7, egress_vport_8, egress_vport_9} <=
        {egress_vport_6, egress_vport_7, egress_vport_8};
    {hop_7, hop_found_7, hop_fault_7} <= {hop_6, hop_found_6, hop_fault_6};
    egress_attachment_9 <= egress_attachment;
  end

  // ---------------------------------------------------------------------------------------------
  // Cycle ROUTE + 7: verdict.

  verdict_t verdict_9;
  logic forward_9, group_9, owned_9, fault_9, excess_9;
  card_verdict decide (
      .clk,
      .parsed_i           (frame_7.parsed),
      .from_host_i        (frame_7.from_host),
      .owned_i            (frame_7.owned),
      .enabled_i          (enabled_7),
      .over_i             (over),
      .options_i          (options_7),
      .own_source_i       (own_source_7),
      .leaf_i             (leaf_kind_7),
      .lpm_fault_i        (leaf_fault_7),
      .hop_i              (hop_7),
      .hop_found_i        (hop_found_7),
      .hop_fault_i        (hop_fault_7),
      .ingress_i          (ingress),
      .ingress_attached_i (ingress_attached),
      .ingress_port_i     (ingress_port),
      .port_i             (port_8),
      .same_vport_i       (egress_vport_8 == frame_8.vport),
      .egress_i           (egress),
      .egress_attachment_i(egress_attachment),
      .source_i           ({<<8{bytes_8[95:48]}}),
      .arp_hit_i          (arp_hit),
      .arp_fault_i        (arp_fault),
      .verdict_o          (verdict_9),
      .forward_o          (forward_9),
      .group_o            (group_9),
      .owned_o            (owned_9),
      .fault_o            (fault_9),
      .excess_o           (excess_9)
  );

  // ---------------------------------------------------------------------------------------------
  // Cycle ROUTE + 8: rewrite.

  header_bytes_t bytes_10;
  length_t length_10;
  mac_t arp_mac_9;
  card_rewrite rewrite (
      .clk,
      .bytes_i       (bytes_8),
      .length_i      (length_8),
      .v6_i          (frame_8.parsed.kind == KIND_IPV6),
      .packet_bytes_i(frame_8.parsed.packet_bytes),
      .forward_i     (forward_9),
      .destination_i (arp_mac_9),
      .source_i      (egress_attachment_9.mac),
      .bytes_o       (bytes_10),
      .length_o      (length_10)
  );

  ve_t ve_9;
  vport_t ingress_vport_9;
  segment_t segment_9;
  token_t token_9;
  header_out_t out_q;  // without bytes and length

  always_ff @(posedge clk) begin
    arp_mac_9 <= arp_mac;
    ve_9 <= frame_8.ve;
    ingress_vport_9 <= frame_8.vport;
    segment_9 <= segment_8;
    token_9 <= token_8;

    out_q <= '0;
    out_q.verdict <= verdict_9;
    out_q.group <= group_9;
    out_q.owned <= owned_9;
    if (owned_9) begin
      out_q.ve <= ve_9;
      out_q.vport <= verdict_9 == OUT ? egress_vport_9 : ingress_vport_9;
    end
    out_q.port <= verdict_9 == OUT ? egress_attachment_9.port : HOST;
    out_q.segment <= verdict_9 == OUT ? egress_attachment_9.segment : segment_9;
    out_q.token <= token_9;
    fault_o <= fault_9;
    excess_o <= excess_9;
  end

  always_comb begin
    header_o = out_q;
    header_o.bytes = bytes_10;
    header_o.length = length_10;
  end
  assign valid_o = valid_line_q[LATENCY-ROUTE];

endmodule
