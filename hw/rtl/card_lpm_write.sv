// Write side of the route look-up: checks an entry's bounds and makes it what the memories hold.
//
// Latency: `wr_refused_o` LPM_WRITE_LATENCY cycles after `wr_valid_i`; the memories take an
// accepted entry in that cycle. One write per cycle, applied in order, whatever the table.
// Invariant: an accepted write changes no entry outside the VE's segments, and no index in it leads
// outside of them as they were two cycles after `wr_valid_i`. After a write to LPM_SEGMENT, wait
// LPM_WRITE_LATENCY cycles before the VE's next write.
module card_lpm_write
  import card_pkg::*;
  import card_lpm_pkg::*;
#(
    parameter  int VES        = 8,
    parameter  int LEVELS     = 20,
    parameter  int NODES      = 512,
    parameter  int LEAVES     = 2048,
    localparam int VE_BITS    = VES > 1 ? $clog2(VES) : 1,
    localparam int NODE_BITS  = $clog2(NODES),
    localparam int LEAF_BITS  = $clog2(LEAVES),
    localparam int ROOT_INDEX = NODE_BITS > LEAF_BITS ? NODE_BITS : LEAF_BITS,
    localparam int WORD_BITS  = 64 + 17 + NODE_BITS + 63 + 15 + LEAF_BITS
) (
    input logic clk,
    input logic rst,

    input  logic               wr_valid_i,
    input  lpm_table_t         wr_table_i,
    input  logic       [  4:0] wr_level_i,
    input  ve_t                wr_ve_i,
    input  logic       [ 31:0] wr_index_i,
    input  logic       [191:0] wr_data_i,
    output logic               wr_refused_o,

    output logic                   root_en_o,
    output logic [  VE_BITS+9-1:0] root_addr_o,
    output logic [ROOT_INDEX+2-1:0] root_word_o,
    output logic [       LEVELS:1] node_en_o,
    output logic [  NODE_BITS-1:0] node_addr_o,
    output logic [  WORD_BITS-1:0] node_word_o,
    output logic                   leaf_en_o,
    output logic [  LEAF_BITS-1:0] leaf_addr_o,
    output leaf_t                  leaf_word_o,
    output logic                   segment_en_o,
    output logic [    VE_BITS-1:0] segment_addr_o,
    output logic [  NODE_BITS-1:0] segment_node_base_o,
    output logic [    NODE_BITS:0] segment_node_end_o,
    output logic [  LEAF_BITS-1:0] segment_leaf_base_o,
    output logic [    LEAF_BITS:0] segment_leaf_end_o
);

  localparam int SEGMENT_BITS = 2 * NODE_BITS + 1 + 2 * LEAF_BITS + 1;

  typedef struct packed {
    logic [LEAF_BITS:0]   leaf_length;
    logic [LEAF_BITS-1:0] leaf_base;
    logic [NODE_BITS:0]   node_length;
    logic [NODE_BITS-1:0] node_base;
  } segment_t;

  typedef logic [6:0] room_t;  // free entries, at most 127; a node needs 64

  // Stage 1: the entry and its VE's segment.
  logic valid_1_q;
  lpm_table_t table_1_q;
  logic [4:0] level_1_q;
  ve_t ve_1_q;
  logic [31:0] index_1_q;
  logic [191:0] data_1_q;
  segment_t segment;
  segment_t segment_new;

  card_ram #(
      .WIDTH(SEGMENT_BITS),
      .DEPTH(VES)
  ) segments (
      .clk,
      .wr_en_i  (segment_en_o),
      .wr_addr_i(segment_addr_o),
      .wr_data_i(segment_new),
      .rd_addr_i(wr_ve_i[VE_BITS-1:0]),
      .rd_data_o(segment)
  );

  always_ff @(posedge clk) begin
    valid_1_q <= wr_valid_i && !rst;
    table_1_q <= wr_table_i;
    level_1_q <= wr_level_i;
    ve_1_q    <= wr_ve_i;
    index_1_q <= wr_index_i;
    data_1_q  <= wr_data_i;
  end

  // The reserved bits of an entry are ignored.
  // verilator lint_off UNUSEDSIGNAL
  root_write_t    root_1;
  leaf_write_t    leaf_1;
  segment_write_t segment_1;
  // verilator lint_on UNUSEDSIGNAL
  node_write_t    node_1;
  assign root_1 = root_write_t'(data_1_q);
  assign node_1 = node_write_t'(data_1_q);
  assign leaf_1 = leaf_write_t'(data_1_q);
  assign segment_1 = segment_write_t'(data_1_q);

  function automatic logic fits(logic [31:0] base, logic [31:0] length, int entries);
    return base < 32'(entries) && {1'b0, base} + {1'b0, length} <= 33'(entries);
  endfunction

  // Entries from `base` to the segment's end. The caller checks that the base is not behind it.
  function automatic room_t room(logic [31:0] base, logic [31:0] length);
    logic [31:0] difference;
    difference = length - base;
    return difference[31:7] == 0 ? difference[6:0] : '1;
  endfunction

  // Stage 2: bounds of the place and of the indices, set bits of each quarter of the maps.
  logic valid_2_q, place_ok_2_q;
  lpm_table_t table_2_q;
  logic [4:0] level_2_q;
  logic [VE_BITS-1:0] ve_2_q;
  logic [8:0] root_index_2_q;
  logic [NODE_BITS-1:0] node_addr_2_q;
  logic [LEAF_BITS-1:0] leaf_addr_2_q;
  logic [191:0] data_2_q;
  logic child_base_ok_2_q, leaf_base_ok_2_q;
  room_t child_room_2_q, leaf_room_2_q;
  logic [3:0][4:0] children_2_q, leaves_2_q;
  logic [63:0] leaf_map_1;
  assign leaf_map_1 = {node_1.leaf_map[63:1], 1'b0};

  always_ff @(posedge clk) begin
    valid_2_q <= valid_1_q && !rst;
    table_2_q <= table_1_q;
    level_2_q <= level_1_q;
    ve_2_q <= ve_1_q[VE_BITS-1:0];
    root_index_2_q <= index_1_q[8:0];
    node_addr_2_q <= segment.node_base + index_1_q[NODE_BITS-1:0];
    leaf_addr_2_q <= segment.leaf_base + index_1_q[LEAF_BITS-1:0];
    data_2_q <= data_1_q;
    child_base_ok_2_q <= node_1.child_base <= 32'(segment.node_length);
    leaf_base_ok_2_q <= node_1.leaf_base <= 32'(segment.leaf_length);
    child_room_2_q <= room(node_1.child_base, 32'(segment.node_length));
    leaf_room_2_q <= room(node_1.leaf_base, 32'(segment.leaf_length));
    for (int quarter = 0; quarter < 4; quarter++) begin
      children_2_q[quarter] <= 5'(count_byte(node_1.child_map[16*quarter+:8])) +
          5'(count_byte(node_1.child_map[16*quarter+8+:8]));
      leaves_2_q[quarter] <= 5'(count_byte(leaf_map_1[16*quarter+:8])) +
          5'(count_byte(leaf_map_1[16*quarter+8+:8]));
    end
    unique case (table_1_q)
      LPM_ROOT: begin
        place_ok_2_q <= index_1_q < 512;
        if (root_1.kind == ROOT_LEAF && root_1.index >= 32'(segment.leaf_length))
          place_ok_2_q <= 1'b0;
        if (root_1.kind == ROOT_NODE && root_1.index >= 32'(segment.node_length))
          place_ok_2_q <= 1'b0;
      end
      LPM_NODE:
      place_ok_2_q <= index_1_q < 32'(segment.node_length) && level_1_q != 0 &&
          int'(level_1_q) <= LEVELS;
      LPM_LEAF:
      place_ok_2_q <= index_1_q < 32'(segment.leaf_length) && leaf_1.leaf.kind <= LEAF_EXCESS;
      LPM_SEGMENT:
      place_ok_2_q <= fits(segment_1.node_base, segment_1.node_length, NODES) &&
          fits(segment_1.leaf_base, segment_1.leaf_length, LEAVES);
    endcase
    if (int'(ve_1_q) >= VES) place_ok_2_q <= 1'b0;
  end

  // Stage 3: cumulative counts.
  logic valid_3_q, place_ok_3_q, bases_ok_3_q;
  lpm_table_t table_3_q;
  logic [4:0] level_3_q;
  logic [VE_BITS-1:0] ve_3_q;
  logic [8:0] root_index_3_q;
  logic [NODE_BITS-1:0] node_addr_3_q;
  logic [LEAF_BITS-1:0] leaf_addr_3_q;
  logic [191:0] data_3_q;
  room_t child_room_3_q, leaf_room_3_q;
  logic [4:0] children_16_3_q, leaves_32_3_q;
  logic [5:0] children_32_3_q, children_48_3_q, leaves_48_3_q;
  logic [3:0] leaves_16_3_q;
  logic [6:0] children_all_3_q, leaves_all_3_q;

  always_ff @(posedge clk) begin
    valid_3_q <= valid_2_q && !rst;
    place_ok_3_q <= place_ok_2_q;
    bases_ok_3_q <= child_base_ok_2_q && leaf_base_ok_2_q;
    table_3_q <= table_2_q;
    level_3_q <= level_2_q;
    ve_3_q <= ve_2_q;
    root_index_3_q <= root_index_2_q;
    node_addr_3_q <= node_addr_2_q;
    leaf_addr_3_q <= leaf_addr_2_q;
    data_3_q <= data_2_q;
    child_room_3_q <= child_room_2_q;
    leaf_room_3_q <= leaf_room_2_q;
    children_16_3_q <= children_2_q[0];
    children_32_3_q <= 6'(children_2_q[0]) + 6'(children_2_q[1]);
    children_48_3_q <= 6'(children_2_q[0]) + 6'(children_2_q[1]) + 6'(children_2_q[2]);
    children_all_3_q <= 7'(children_2_q[0]) + 7'(children_2_q[1]) + 7'(children_2_q[2]) +
        7'(children_2_q[3]);
    leaves_16_3_q <= leaves_2_q[0][3:0];
    leaves_32_3_q <= leaves_2_q[0] + leaves_2_q[1];
    leaves_48_3_q <= 6'(leaves_2_q[0]) + 6'(leaves_2_q[1]) + 6'(leaves_2_q[2]);
    leaves_all_3_q <= 7'(leaves_2_q[0]) + 7'(leaves_2_q[1]) + 7'(leaves_2_q[2]) +
        7'(leaves_2_q[3]) + 7'd1;
  end

  // Stage 4: bounds of the children and leaves.
  // verilator lint_off UNUSEDSIGNAL
  root_write_t    root_3;
  leaf_write_t    leaf_3;
  segment_write_t segment_3;
  node_write_t    node_3;
  // verilator lint_on UNUSEDSIGNAL
  assign root_3 = root_write_t'(data_3_q);
  assign node_3 = node_write_t'(data_3_q);
  assign leaf_3 = leaf_write_t'(data_3_q);
  assign segment_3 = segment_write_t'(data_3_q);

  logic node_ok, accepted;
  always_comb begin
    node_ok = bases_ok_3_q && children_all_3_q <= child_room_3_q &&
        leaves_all_3_q <= leaf_room_3_q && (int'(level_3_q) < LEVELS || children_all_3_q == 0);
    accepted = valid_3_q && place_ok_3_q && (table_3_q != LPM_NODE || node_ok);
  end

  always_ff @(posedge clk) begin
    wr_refused_o <= valid_3_q && !accepted && !rst;
    root_en_o <= accepted && table_3_q == LPM_ROOT && !rst;
    leaf_en_o <= accepted && table_3_q == LPM_LEAF && !rst;
    segment_en_o <= accepted && table_3_q == LPM_SEGMENT && !rst;
    for (int level = 1; level <= LEVELS; level++)
      node_en_o[level] <= accepted && table_3_q == LPM_NODE && int'(level_3_q) == level && !rst;

    root_addr_o <= {ve_3_q, root_index_3_q};
    root_word_o <= {root_3.kind, root_3.index[ROOT_INDEX-1:0]};
    node_addr_o <= node_addr_3_q;
    node_word_o <= {
      node_3.leaf_base[LEAF_BITS-1:0],
      leaves_48_3_q,
      leaves_32_3_q,
      leaves_16_3_q,
      node_3.leaf_map[63:1],
      node_3.child_base[NODE_BITS-1:0],
      children_48_3_q,
      children_32_3_q,
      children_16_3_q,
      node_3.child_map
    };
    leaf_addr_o <= leaf_addr_3_q;
    leaf_word_o <= leaf_3.leaf;
    segment_addr_o <= ve_3_q;
    segment_new.node_base <= segment_3.node_base[NODE_BITS-1:0];
    segment_new.node_length <= segment_3.node_length[NODE_BITS:0];
    segment_new.leaf_base <= segment_3.leaf_base[LEAF_BITS-1:0];
    segment_new.leaf_length <= segment_3.leaf_length[LEAF_BITS:0];
    segment_node_end_o <= (NODE_BITS + 1)'(segment_3.node_base[NODE_BITS-1:0]) +
        segment_3.node_length[NODE_BITS:0];
    segment_leaf_end_o <= (LEAF_BITS + 1)'(segment_3.leaf_base[LEAF_BITS-1:0]) +
        segment_3.leaf_length[LEAF_BITS:0];
  end
  assign segment_node_base_o = segment_new.node_base;
  assign segment_leaf_base_o = segment_new.leaf_base;

endmodule
