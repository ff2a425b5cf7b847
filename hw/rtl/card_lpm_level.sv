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
// quarter of a map. As bit s of the child map is set if there is a child, the bits are counted up
// to s, and the base is one less.
//
// Behind the last level, each leaf's index is absolute: LAST adds the base of the VE's leaves, also
// to an index that an earlier level found. A child of the last level is a fault.
//
// A write passes through the levels as look-ups do, two cycles a level: `wr_addr_o` and `wr_word_o`
// are what came in two cycles ago. So each level has registers of its own, near its memory.
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
    parameter  bit LAST        = 1'b0,
    parameter  bit EXTERNAL    = 1'b0,              // nodes in a card_ram_ext
    parameter  int EXT_LATENCY = 4,
    parameter  int INDEX_BITS  = 14,
    parameter  int KEY_BITS    = 120,               // key bits from this level on
    localparam int NODE_BITS   = $clog2(NODES),
    localparam int LEAF_BITS   = $clog2(LEAVES),
    localparam int NEXT_BITS   = LAST ? 1 : KEY_BITS - 6,
    localparam int ADDR_BITS   = LAST ? LEAF_BITS : NODE_BITS,
    localparam int BASE_BITS   = LAST ? LEAF_BITS : NODE_BITS + 1,
    localparam int WORD_BITS   = 64 + 17 + NODE_BITS + 63 + 15 + LEAF_BITS
) (
    input logic clk,

    input  walk_kind_t                   kind_i,
    input  logic       [ INDEX_BITS-1:0] index_i,
    input  logic       [  NODE_BITS-1:0] addr_i,       // of the node if `kind_i` is WALK_NODE
    input  logic       [  BASE_BITS-1:0] base_i,       // of the VE's nodes, less 1; LAST: leaves
    input  logic       [    NODE_BITS:0] node_end_i,
    input  logic       [   KEY_BITS-1:0] key_i,
    output walk_kind_t                   kind_o,
    output logic       [ INDEX_BITS-1:0] index_o,
    output logic       [  ADDR_BITS-1:0] addr_o,       // of the node; if LAST, of the leaf
    output logic       [  BASE_BITS-1:0] base_o,
    output logic       [    NODE_BITS:0] node_end_o,
    output logic       [  NEXT_BITS-1:0] key_o,

    input  logic                 wr_en_i,
    input  logic [NODE_BITS-1:0] wr_addr_i,
    input  logic [WORD_BITS-1:0] wr_word_i,
    output logic [NODE_BITS-1:0] wr_addr_o,
    output logic [WORD_BITS-1:0] wr_word_o
);

  localparam int RAM_LATENCY = EXTERNAL ? EXT_LATENCY : 1;
  localparam int SUM_BITS = LEAF_BITS + 2;  // base + leaf_base + 63 if LEAVES >= 64
  localparam int CHILD_BITS = NODE_BITS + 2;  // base + child_base + 63 if NODES >= 64
  localparam int CARRY_BITS =
      $bits(walk_kind_t) + INDEX_BITS + BASE_BITS + NODE_BITS + 1 + KEY_BITS;

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

  logic [1:0][NODE_BITS-1:0] wr_addr_q;
  logic [1:0][WORD_BITS-1:0] wr_word_q;
  always_ff @(posedge clk) begin
    wr_addr_q <= {wr_addr_q[0], wr_addr_i};
    wr_word_q <= {wr_word_q[0], wr_word_i};
  end
  assign wr_addr_o = wr_addr_q[1];
  assign wr_word_o = wr_word_q[1];

  // Read. A word that is written right then is in `late` (see card_ram). The memory's output leaves
  // time for two gates, so the choice is part of the selection of the slot's quarter.
  word_t word, late;
  logic is_late;
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
    assign late = '0;
    assign is_late = 1'b0;
  end else begin : gen_ram
    logic [1:0] wr_en_q;
    logic [NODE_BITS-1:0] addr_q;
    always_ff @(posedge clk) begin
      wr_en_q <= {wr_en_q[0], wr_en_i};
      addr_q <= addr_i;
    end
    assign late = wr_word_q[1];
    assign is_late = wr_en_q[1] && wr_addr_q[1] == addr_q;
    card_ram #(
        .WIDTH   (WORD_BITS),
        .DEPTH   (NODES),
        .COLLIDES(1'b0)
    ) nodes (
        .clk,
        .wr_en_i  (wr_en_q[0]),
        .wr_addr_i(wr_addr_q[0]),
        .wr_data_i(wr_word_q[0]),
        .rd_addr_i(addr_i),
        .rd_data_o(word)
    );
  end

  walk_kind_t                  kind_r;
  logic       [INDEX_BITS-1:0] index_r;
  logic       [ BASE_BITS-1:0] base_r;
  logic       [   NODE_BITS:0] end_r;
  logic       [  KEY_BITS-1:0] key_r;
  logic       [CARRY_BITS-1:0] carry;
  card_lpm_delay #(
      .WIDTH (CARRY_BITS),
      .CYCLES(RAM_LATENCY)
  ) beside (
      .clk,
      .data_i({kind_i, index_i, base_i, node_end_i, key_i}),
      .data_o(carry)
  );
  assign index_r = carry[KEY_BITS+BASE_BITS+NODE_BITS+1+:INDEX_BITS];
  assign base_r = carry[KEY_BITS+NODE_BITS+1+:BASE_BITS];
  assign end_r = carry[KEY_BITS+:NODE_BITS+1];
  assign key_r = carry[KEY_BITS-1:0];
  assign kind_r = walk_kind_t'(carry[CARRY_BITS-1-:$bits(walk_kind_t)]);

  // Select the slot's quarter, check the bound.
  walk_kind_t                  kind_q;
  logic       [INDEX_BITS-1:0] index_q;
  logic       [ BASE_BITS-1:0] base_q;
  logic       [   NODE_BITS:0] end_q;
  logic       [           3:0] slot_q;
  logic       [ NEXT_BITS-1:0] key_q;
  logic       [          15:0] child_map_q;  // up to the slot
  logic       [          15:0] leaf_map_q;
  logic       [           5:0] children_q;  // set bits in front of the quarter
  logic       [           5:0] leaves_q;
  logic       [CHILD_BITS-1:0] child_base_q;  // absolute
  logic       [  SUM_BITS-1:0] leaf_base_q;  // absolute if LAST

  // Parts of a word, selected by masks: four gates and one more, where multiplexers take three.
  typedef struct packed {
    logic [15:0] child_map;
    logic [15:0] leaf_map;
    logic [5:0]  children;  // in front of the quarter
    logic [5:0]  leaves;
  } part_t;

  // verilator lint_off UNUSEDSIGNAL
  function automatic part_t part_of(input word_t of, input logic [3:0][15:0] mask,
                                    input logic [3:0] quarter);
    // verilator lint_on UNUSEDSIGNAL
    logic [63:0] leaf_map;
    leaf_map = {of.leaf_map, 1'b0};
    part_of = '0;
    for (int i = 0; i < 4; i++) begin
      part_of.child_map |= of.child_map[16*i+:16] & mask[i];
      part_of.leaf_map |= leaf_map[16*i+:16] & mask[i];
    end
    part_of.children = 6'(of.children_16) & {6{quarter[1]}} | of.children_32 & {6{quarter[2]}}
        | of.children_48 & {6{quarter[3]}};
    part_of.leaves = 6'(of.leaves_16) & {6{quarter[1]}} | 6'(of.leaves_32) & {6{quarter[2]}}
        | of.leaves_48 & {6{quarter[3]}};
  endfunction

  logic [15:0] upto;  // mask of the slots in the quarter up to the key's
  logic [3:0] quarter, quarter_late;  // of the word that counts
  logic [3:0][15:0] mask, mask_late;
  part_t part;
  logic [LEAF_BITS-1:0] leaf_base;
  always_comb begin
    upto = 16'((17'd2 << key_r[KEY_BITS-3-:4]) - 17'd1);
    // Nothing is added to a leaf that was found before.
    if (LAST && kind_r != WALK_NODE) upto = '0;
    for (int i = 0; i < 4; i++) begin
      quarter[i] = !is_late && key_r[KEY_BITS-1-:2] == 2'(i);
      quarter_late[i] = is_late && key_r[KEY_BITS-1-:2] == 2'(i);
      mask[i] = upto & {16{quarter[i]}};
      mask_late[i] = upto & {16{quarter_late[i]}};
    end
    part = part_of(word, mask, quarter) | part_of(late, mask_late, quarter_late);
    leaf_base = is_late ? late.leaf_base : word.leaf_base;
  end

  always_ff @(posedge clk) begin
    kind_q <= kind_r == WALK_NODE && index_r >= INDEX_BITS'(end_r) ? WALK_FAULT : kind_r;
    index_q <= index_r;
    base_q <= base_r;
    end_q <= end_r;
    slot_q <= key_r[KEY_BITS-3-:4];
    key_q <= key_r[NEXT_BITS-1:0];
    child_map_q <= part.child_map;
    leaf_map_q <= part.leaf_map;
    children_q <= part.children;
    leaves_q <= part.leaves;
    child_base_q <= CHILD_BITS'(signed'(base_r))
        + CHILD_BITS'(is_late ? late.child_base : word.child_base);
    leaf_base_q <= SUM_BITS'(leaf_base);
    if (LAST) begin
      leaf_base_q <= SUM_BITS'(base_r)
          + (kind_r == WALK_NODE ? SUM_BITS'(leaf_base) : SUM_BITS'(index_r));
      if (kind_r != WALK_NODE) leaves_q <= '0;
    end
  end

  // Count the bits in front of the slot.
  logic [CHILD_BITS-1:0] child;
  logic [  SUM_BITS-1:0] leaf;
  always_comb begin
    child = child_base_q + CHILD_BITS'(children_q) + CHILD_BITS'(count_byte(child_map_q[7:0])) +
        CHILD_BITS'(count_byte(child_map_q[15:8]));
    leaf = leaf_base_q + SUM_BITS'(leaves_q) + SUM_BITS'(count_byte(leaf_map_q[7:0])) +
        SUM_BITS'(count_byte(leaf_map_q[15:8]));
    // The reader ignores the address's word if `kind_o` says that there is none.
    addr_o = LAST ? ADDR_BITS'(leaf) : ADDR_BITS'(child);
  end

  always_comb begin
    kind_o = kind_q;
    index_o = LAST ? INDEX_BITS'(leaf) : index_q;
    if (kind_q == WALK_NODE) begin
      if (child_map_q[slot_q]) begin
        kind_o  = LAST ? WALK_FAULT : WALK_NODE;
        index_o = INDEX_BITS'(child);
      end else begin
        kind_o  = WALK_LEAF;
        index_o = INDEX_BITS'(leaf);
      end
    end
    base_o = base_q;
    node_end_o = end_q;
    key_o = key_q;
  end

endmodule
