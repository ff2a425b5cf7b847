// One level of the route look-up: six bits of the key in one node.
//
// A node has 64 slots. Bit s of its child map is set if slot s leads to a node of the next level;
// the children of a node are neighbours. Otherwise the slot has a leaf; neighbouring slots with
// equal leaves share one, and bit s of the leaf map is set where a new leaf begins. Bit 0 is not
// stored: the first leaf always begins there.
//
//   child = child_base + number of child_map bits below s
//   leaf  = leaf_base + number of leaf_map bits from 1 to s
//
// To keep the adders short, card_lpm_write also stores how many bits are set in front of each
// quarter of a map.
//
// Latency: RAM_LATENCY + 1 cycles. No register is in front of the memory's address: `addr_o` of a
// level is the sum of its adder and the next level's `addr_i`.
// Invariant: a walk in WALK_NODE continues only if its index, absolute at this point, is below the
// end of its VE's segment. It cannot be below its base, as it is a sum of it.
module card_lpm_level
  import card_lpm_pkg::*;
#(
    parameter  int NODES       = 512,
    parameter  int LEAVES      = 2048,
    parameter  bit LAST        = 1'b0,              // a child ends in a fault
    parameter  bit EXTERNAL    = 1'b0,              // nodes in a card_ram_ext
    parameter  int EXT_LATENCY = 4,
    parameter  int INDEX_BITS  = 14,
    parameter  int KEY_BITS    = 120,               // key bits from this level on
    localparam int NODE_BITS   = $clog2(NODES),
    localparam int LEAF_BITS   = $clog2(LEAVES),
    localparam int NEXT_BITS   = LAST ? 1 : KEY_BITS - 6,
    localparam int WORD_BITS   = 64 + 17 + NODE_BITS + 63 + 15 + LEAF_BITS
) (
    input logic clk,

    input  walk_kind_t                   kind_i,
    input  logic       [ INDEX_BITS-1:0] index_i,
    input  logic       [  NODE_BITS-1:0] addr_i,       // of the node if `kind_i` is WALK_NODE
    input  logic       [  NODE_BITS-1:0] node_base_i,
    input  logic       [    NODE_BITS:0] node_end_i,
    input  logic       [   KEY_BITS-1:0] key_i,
    output walk_kind_t                   kind_o,
    output logic       [ INDEX_BITS-1:0] index_o,
    output logic       [  NODE_BITS-1:0] addr_o,
    output logic       [  NODE_BITS-1:0] node_base_o,
    output logic       [    NODE_BITS:0] node_end_o,
    output logic       [  NEXT_BITS-1:0] key_o,

    input logic                 wr_en_i,
    input logic [NODE_BITS-1:0] wr_addr_i,
    input logic [WORD_BITS-1:0] wr_word_i
);

  localparam int RAM_LATENCY = EXTERNAL ? EXT_LATENCY : 1;
  localparam int CHILD_BITS = NODE_BITS + 2;  // base + child_base + 63 if NODES >= 64
  localparam int CARRY_BITS = $bits(walk_kind_t) + INDEX_BITS + 2 * NODE_BITS + 1 + KEY_BITS;

  typedef struct packed {
    logic [LEAF_BITS-1:0] leaf_base;
    logic [5:0]           leaves_48;  // leaf map bits 1 to 47
    logic [4:0]           leaves_32;
    logic [3:0]           leaves_16;
    logic [63:1]          leaf_map;
    logic [NODE_BITS-1:0] child_base;
    logic [5:0]           children_48;  // child map bits 0 to 47
    logic [5:0]           children_32;
    logic [4:0]           children_16;
    logic [63:0]          child_map;
  } word_t;

  // Read.
  word_t word;
  if (EXTERNAL) begin : gen_ext
    card_ram_ext #(
        .WIDTH  (WORD_BITS),
        .DEPTH  (NODES),
        .LATENCY(EXT_LATENCY)
    ) nodes (
        .clk,
        .wr_en_i,
        .wr_addr_i,
        .wr_data_i(wr_word_i),
        .rd_addr_i(addr_i),
        .rd_data_o(word)
    );
  end else begin : gen_ram
    card_ram #(
        .WIDTH(WORD_BITS),
        .DEPTH(NODES)
    ) nodes (
        .clk,
        .wr_en_i,
        .wr_addr_i,
        .wr_data_i(wr_word_i),
        .rd_addr_i(addr_i),
        .rd_data_o(word)
    );
  end

  walk_kind_t                  kind_r;
  logic       [INDEX_BITS-1:0] index_r;
  logic       [ NODE_BITS-1:0] base_r;
  logic       [   NODE_BITS:0] end_r;
  logic       [  KEY_BITS-1:0] key_r;
  logic       [CARRY_BITS-1:0] carry;
  card_lpm_delay #(
      .WIDTH (CARRY_BITS),
      .CYCLES(RAM_LATENCY)
  ) beside (
      .clk,
      .data_i({kind_i, index_i, node_base_i, node_end_i, key_i}),
      .data_o(carry)
  );
  assign index_r = carry[KEY_BITS+2*NODE_BITS+1+:INDEX_BITS];
  assign base_r = carry[KEY_BITS+NODE_BITS+1+:NODE_BITS];
  assign end_r = carry[KEY_BITS+:NODE_BITS+1];
  assign key_r = carry[KEY_BITS-1:0];
  assign kind_r = walk_kind_t'(carry[CARRY_BITS-1-:$bits(walk_kind_t)]);

  // Select the slot's quarter, check the bound.
  walk_kind_t                  kind_q;
  logic       [INDEX_BITS-1:0] index_q;
  logic       [ NODE_BITS-1:0] base_q;
  logic       [   NODE_BITS:0] end_q;
  logic       [           3:0] slot_q;
  logic       [ NEXT_BITS-1:0] key_q;
  logic       [          15:0] child_map_q;
  logic       [          15:0] children_below_q;  // bits of the child map below the slot
  logic       [          15:0] leaves_upto_q;  // bits of the leaf map up to the slot
  logic       [           5:0] children_q;  // set bits in front of the quarter
  logic       [           5:0] leaves_q;
  logic       [CHILD_BITS-1:0] child_base_q;  // absolute
  logic       [ LEAF_BITS-1:0] leaf_base_q;

  logic [1:0] quarter;
  logic [3:0][15:0] below;  // mask of the slots below, by quarter; 0 for the other quarters
  logic [3:0][15:0] upto;
  always_comb begin
    quarter = key_r[KEY_BITS-1-:2];
    below = '0;
    below[quarter] = 16'((17'd1 << key_r[KEY_BITS-3-:4]) - 17'd1);
    upto = '0;
    upto[quarter] = {below[quarter][14:0], 1'b1};
  end

  always_ff @(posedge clk) begin
    kind_q <= kind_r == WALK_NODE && index_r >= INDEX_BITS'(end_r) ? WALK_FAULT : kind_r;
    index_q <= index_r;
    base_q <= base_r;
    end_q <= end_r;
    slot_q <= key_r[KEY_BITS-3-:4];
    key_q <= key_r[NEXT_BITS-1:0];
    child_map_q <= word.child_map[16*quarter+:16];
    children_below_q <= word.child_map[15:0] & below[0] | word.child_map[31:16] & below[1] |
        word.child_map[47:32] & below[2] | word.child_map[63:48] & below[3];
    leaves_upto_q <= {word.leaf_map[15:1], 1'b0} & upto[0] | word.leaf_map[31:16] & upto[1] |
        word.leaf_map[47:32] & upto[2] | word.leaf_map[63:48] & upto[3];
    unique case (quarter)
      2'd0: {children_q, leaves_q} <= '0;
      2'd1: {children_q, leaves_q} <= {6'(word.children_16), 6'(word.leaves_16)};
      2'd2: {children_q, leaves_q} <= {word.children_32, 6'(word.leaves_32)};
      2'd3: {children_q, leaves_q} <= {word.children_48, word.leaves_48};
    endcase
    child_base_q <= CHILD_BITS'(base_r) + CHILD_BITS'(word.child_base);
    leaf_base_q  <= word.leaf_base;
  end

  // Count the bits in front of the slot.
  logic [CHILD_BITS-1:0] child;
  logic [   LEAF_BITS:0] leaf;
  always_comb begin
    child = child_base_q + CHILD_BITS'(children_q) +
        CHILD_BITS'(count_byte(children_below_q[7:0])) +
        CHILD_BITS'(count_byte(children_below_q[15:8]));
    leaf = (LEAF_BITS + 1)'(leaf_base_q) + (LEAF_BITS + 1)'(leaves_q) +
        (LEAF_BITS + 1)'(count_byte(leaves_upto_q[7:0])) +
        (LEAF_BITS + 1)'(count_byte(leaves_upto_q[15:8]));
    // The next level ignores the address's word if `kind_o` is not WALK_NODE.
    addr_o = child[NODE_BITS-1:0];
  end

  always_comb begin
    kind_o = kind_q;
    index_o = index_q;
    if (kind_q == WALK_NODE) begin
      if (child_map_q[slot_q]) begin
        kind_o  = LAST ? WALK_FAULT : WALK_NODE;
        index_o = INDEX_BITS'(child);
      end else begin
        kind_o  = WALK_LEAF;
        index_o = INDEX_BITS'(leaf);
      end
    end
    node_base_o = base_q;
    node_end_o = end_q;
    key_o = key_q;
  end

endmodule
