// Route look-up: longest-prefix match of a destination address in the tables of its VE.
//
// One trie per VE and family. Level 0 resolves the key's first eight bits by one read at
// {VE, family, bits}. Each further level resolves six bits: see card_lpm_level. The key is aligned
// to the left: an IPv4 address is in bits 127:96. Levels from EXT_FROM on have their nodes in
// external memory (card_ram_ext).
//
// Latency: LATENCY cycles (lpm_latency of card_lpm_pkg) from `valid_i` to `valid_o`, whatever the
// tables contain. One look-up per cycle; there is no back-pressure. Writes never delay look-ups.
//
// A look-up ends with `fault_o` and LEAF_NONE if an index leads outside its VE's segments, a leaf's
// kind is unknown, or the VE does not exist.
// Invariant: `leaf_o` and `fault_o` depend on entries of the look-up's VE only. A word of a memory
// is used only if its index is in the VE's segment.
//
// Writes: see card_lpm_write. A level has a node 2 * (level - 1) cycles later than it says, but no
// later than look-ups that enter with the write come to the level. A table may change while
// look-ups pass: a look-up sees each word before or after its change. A word that is no longer in
// use may be written again LATENCY cycles after the change of the word that led to it.
module card_lpm
  import card_pkg::*;
  import card_lpm_pkg::*;
#(
    parameter  int VES         = 8,     // a power of two
    parameter  int LEVELS      = 20,    // levels of six bits, at least 1; 20 for all of IPv6
    parameter  int NODES       = 512,   // nodes per level, for all VEs: a power of two, at least 64
    parameter  int LEAVES      = 2048,  // a power of two, at least 128
    parameter  int EXT_FROM    = 21,    // first level in external memory
    parameter  int EXT_LATENCY = 4,
    localparam int LATENCY     = lpm_latency(LEVELS, EXT_FROM, EXT_LATENCY)
) (
    input logic clk,
    input logic rst,

    input logic           valid_i,
    input ve_t            ve_i,
    input logic           is_v6_i,
    // Bits behind the last level are unused.
    // verilator lint_off UNUSEDSIGNAL
    input logic   [127:0] key_i,
    // verilator lint_on UNUSEDSIGNAL
    input token_t         token_i,

    output logic   valid_o,
    output leaf_t  leaf_o,
    output logic   fault_o,
    output ve_t    ve_o,
    output token_t token_o,

    input  logic               wr_valid_i,
    input  lpm_table_t         wr_table_i,
    input  logic       [  4:0] wr_level_i,   // of LPM_NODE: 1 to LEVELS
    input  ve_t                wr_ve_i,
    input  logic       [ 31:0] wr_index_i,   // in the VE's segment; LPM_ROOT: {is_v6, bits}
    input  logic       [191:0] wr_data_i,
    output logic               wr_refused_o
);

  localparam int VE_BITS = VES > 1 ? $clog2(VES) : 1;
  localparam int NODE_BITS = $clog2(NODES);
  localparam int LEAF_BITS = $clog2(LEAVES);
  localparam int ROOT_INDEX = NODE_BITS > LEAF_BITS ? NODE_BITS : LEAF_BITS;
  localparam int INDEX_BITS = (NODE_BITS > LEAF_BITS ? NODE_BITS : LEAF_BITS) + 2;
  localparam int WORD_BITS = 64 + 17 + NODE_BITS + 63 + 15 + LEAF_BITS;
  localparam int KEY_BITS = 6 * LEVELS;  // behind level 0

  // Writes.
  logic root_en, leaf_en, segment_en;
  logic  [          LEVELS:1] node_en;
  // With one VE, its bit is unused.
  // verilator lint_off UNUSEDSIGNAL
  logic  [  VE_BITS+9-1:0] root_addr;
  // verilator lint_on UNUSEDSIGNAL
  logic  [ROOT_INDEX+2-1:0] root_wr;
  logic  [   NODE_BITS-1:0] node_addr;
  logic  [   WORD_BITS-1:0] node_wr;
  logic  [   LEAF_BITS-1:0] leaf_wr_addr;
  leaf_t                    leaf_wr;
  logic  [     VE_BITS-1:0] segment_addr;
  logic  [   NODE_BITS-1:0] segment_node_base;
  logic  [     NODE_BITS:0] segment_node_end;
  logic  [   LEAF_BITS-1:0] segment_leaf_base;
  logic  [     LEAF_BITS:0] segment_leaf_end;

  card_lpm_write #(
      .VES   (VES),
      .LEVELS(LEVELS),
      .NODES (NODES),
      .LEAVES(LEAVES)
  ) write (
      .clk,
      .rst,
      .wr_valid_i,
      .wr_table_i,
      .wr_level_i,
      .wr_ve_i,
      .wr_index_i,
      .wr_data_i,
      .wr_refused_o,
      .root_en_o            (root_en),
      .root_addr_o          (root_addr),
      .root_word_o          (root_wr),
      .node_en_o            (node_en),
      .node_addr_o          (node_addr),
      .node_word_o          (node_wr),
      .leaf_en_o            (leaf_en),
      .leaf_addr_o          (leaf_wr_addr),
      .leaf_word_o          (leaf_wr),
      .segment_en_o         (segment_en),
      .segment_addr_o       (segment_addr),
      .segment_node_base_o  (segment_node_base),
      .segment_node_end_o   (segment_node_end),
      .segment_leaf_base_o  (segment_leaf_base),
      .segment_leaf_end_o   (segment_leaf_end)
  );

  // Level 0, and the VE's segment of nodes, in two cycles.
  logic [ROOT_INDEX+2-1:0] root_word;
  root_kind_t root_kind_q;
  logic [ROOT_INDEX-1:0] root_index_q;
  logic [NODE_BITS-1:0] node_base, node_base_q;
  logic [NODE_BITS:0] node_base_less_q;  // less 1
  logic [NODE_BITS:0] node_end, node_end_q;
  logic [1:0] ve_exists_q;
  logic [1:0][KEY_BITS-1:0] key_q;

  card_ram #(
      .WIDTH(ROOT_INDEX + 2),
      .DEPTH(VES * 512)
  ) roots (
      .clk,
      .wr_en_i  (root_en),
      .wr_addr_i($clog2(VES * 512)'(root_addr)),
      .wr_data_i(root_wr),
      .rd_addr_i($clog2(VES * 512)'({ve_i[VE_BITS-1:0], is_v6_i, key_i[127:120]})),
      .rd_data_o(root_word)
  );
  card_ram #(
      .WIDTH(2 * NODE_BITS + 1),
      .DEPTH(VES)
  ) node_segments (
      .clk,
      .wr_en_i  (segment_en),
      .wr_addr_i(segment_addr),
      .wr_data_i({segment_node_end, segment_node_base}),
      .rd_addr_i(ve_i[VE_BITS-1:0]),
      .rd_data_o({node_end, node_base})
  );
  always_ff @(posedge clk) begin
    ve_exists_q <= {ve_exists_q[0], int'(ve_i) < VES};
    key_q <= {key_q[0], key_i[119-:KEY_BITS]};
    root_kind_q <= root_kind_t'(root_word[ROOT_INDEX+:2]);
    root_index_q <= root_word[ROOT_INDEX-1:0];
    {node_end_q, node_base_q} <= {node_end, node_base};
    node_base_less_q <= {1'b0, node_base} - 1'b1;
  end

  // Levels 1 to LEVELS. Element n is the walk in front of level n + 1.
  walk_kind_t                  kind [LEVELS+1];
  logic       [INDEX_BITS-1:0] index[LEVELS+1];
  logic       [ NODE_BITS-1:0] addr [LEVELS];
  logic       [   NODE_BITS:0] base [LEVELS];
  logic       [   NODE_BITS:0] limit[LEVELS];
  logic       [ LEAF_BITS-1:0] leaf_base, leaf_addr;

  logic [INDEX_BITS-1:0] first_node;
  always_comb begin
    first_node = INDEX_BITS'(node_base_q) + INDEX_BITS'(root_index_q[NODE_BITS-1:0]);
    addr[0] = first_node[NODE_BITS-1:0];
    index[0] = INDEX_BITS'(root_index_q);
    unique case (root_kind_q)
      ROOT_NONE:   kind[0] = WALK_NONE;
      ROOT_LEAF:   kind[0] = WALK_LEAF;
      ROOT_NODE: begin
        kind[0]  = WALK_NODE;
        index[0] = first_node;
      end
      ROOT_EXCESS: kind[0] = WALK_EXCESS;
    endcase
    if (!ve_exists_q[1]) kind[0] = WALK_FAULT;
    base[0]  = node_base_less_q;
    limit[0] = node_end_q;
  end

  for (genvar level = 1; level <= LEVELS; level++) begin : gen_level
    localparam bit LAST = level == LEVELS;
    localparam int LEFT = 6 * (LEVELS + 1 - level);
    localparam int NEXT = LAST ? 1 : LEFT - 6;
    localparam int ADDR = LAST ? LEAF_BITS : NODE_BITS;
    localparam int BASE = LAST ? LEAF_BITS : NODE_BITS + 1;
    logic [LEFT-1:0] key;
    logic [ADDR-1:0] addr_out;
    logic [BASE-1:0] base_in;
    // Unused behind the last level.
    // verilator lint_off UNUSEDSIGNAL
    logic [NEXT-1:0] key_next;
    logic [BASE-1:0] base_out;
    logic [NODE_BITS:0] limit_out;
    logic [NODE_BITS-1:0] wr_addr_next;
    logic [WORD_BITS-1:0] wr_word_next;
    // verilator lint_on UNUSEDSIGNAL
    logic wr_en;
    logic [NODE_BITS-1:0] wr_addr;
    logic [WORD_BITS-1:0] wr_word;
    card_lpm_delay #(
        .WIDTH (1),
        .CYCLES(2 * (level - 1))
    ) wr_en_delay (
        .clk,
        .data_i(node_en[level]),
        .data_o(wr_en)
    );
    if (level == 1) begin : gen_first
      assign key = key_q[1];
      assign {wr_addr, wr_word} = {node_addr, node_wr};
    end else begin : gen_other
      assign key = gen_level[level-1].key_next;
      assign wr_addr = gen_level[level-1].wr_addr_next;
      assign wr_word = gen_level[level-1].wr_word_next;
    end
    if (LAST) begin : gen_last
      assign base_in   = leaf_base;
      assign leaf_addr = addr_out;
    end else begin : gen_inner
      assign base_in = base[level-1];
      assign {addr[level], base[level], limit[level]} = {addr_out, base_out, limit_out};
    end
    card_lpm_level #(
        .NODES      (NODES),
        .LEAVES     (LEAVES),
        .LAST       (LAST),
        .EXTERNAL   (level >= EXT_FROM),
        .EXT_LATENCY(EXT_LATENCY),
        .INDEX_BITS (INDEX_BITS),
        .KEY_BITS   (LEFT)
    ) walk (
        .clk,
        .kind_i    (kind[level-1]),
        .index_i   (index[level-1]),
        .addr_i    (addr[level-1]),
        .base_i    (base_in),
        .node_end_i(limit[level-1]),
        .key_i     (key),
        .kind_o    (kind[level]),
        .index_o   (index[level]),
        .addr_o    (addr_out),
        .base_o    (base_out),
        .node_end_o(limit_out),
        .key_o     (key_next),
        .wr_en_i   (wr_en),
        .wr_addr_i (wr_addr),
        .wr_word_i (wr_word),
        .wr_addr_o (wr_addr_next),
        .wr_word_o (wr_word_next)
    );
  end

  // Beside the walk: LATENCY cycles. The VE reads its segment of leaves for the last level.
  localparam int LAST_LATENCY = 1 + (LEVELS >= EXT_FROM ? EXT_LATENCY : 1);
  logic [LATENCY-1:0] valid_q;
  ve_t ve_late;
  token_t token_late;
  always_ff @(posedge clk) valid_q <= rst ? '0 : {valid_q[LATENCY-2:0], valid_i};
  card_lpm_delay #(
      .WIDTH ($bits(ve_t) + $bits(token_t)),
      .CYCLES(LATENCY - 2 - LAST_LATENCY)
  ) beside (
      .clk,
      .data_i({ve_i, token_i}),
      .data_o({ve_late, token_late})
  );
  card_lpm_delay #(
      .WIDTH ($bits(ve_t) + $bits(token_t)),
      .CYCLES(2 + LAST_LATENCY)
  ) beside_leaf (
      .clk,
      .data_i({ve_late, token_late}),
      .data_o({ve_o, token_o})
  );
  assign valid_o = valid_q[LATENCY-1];

  // The leaf: its word, and its bound beside it.
  logic [LEAF_BITS:0] leaf_end, leaf_end_late;
  card_ram #(
      .WIDTH(2 * LEAF_BITS + 1),
      .DEPTH(VES)
  ) leaf_segments (
      .clk,
      .wr_en_i  (segment_en),
      .wr_addr_i(segment_addr),
      .wr_data_i({segment_leaf_end, segment_leaf_base}),
      .rd_addr_i(ve_late[VE_BITS-1:0]),
      .rd_data_o({leaf_end, leaf_base})
  );
  card_lpm_delay #(
      .WIDTH (LEAF_BITS + 1),
      .CYCLES(1 + LAST_LATENCY)
  ) beside_end (
      .clk,
      .data_i(leaf_end),
      .data_o(leaf_end_late)
  );

  walk_kind_t kind_q;
  logic [INDEX_BITS-1:0] index_q;
  leaf_t leaf_word;
  always_ff @(posedge clk) begin
    kind_q  <= kind[LEVELS];
    index_q <= index[LEVELS];
  end
  card_ram #(
      .WIDTH($bits(leaf_t)),
      .DEPTH(LEAVES)
  ) leaves (
      .clk,
      .wr_en_i  (leaf_en),
      .wr_addr_i(leaf_wr_addr),
      .wr_data_i(leaf_wr),
      .rd_addr_i(leaf_addr),
      .rd_data_o(leaf_word)
  );

  always_comb begin
    leaf_o  = '{kind: LEAF_NONE, group: '0};
    fault_o = 1'b0;
    case (kind_q)
      WALK_NONE:   ;
      WALK_LEAF: begin
        if (leaf_word.kind <= LEAF_EXCESS && index_q < INDEX_BITS'(leaf_end_late))
          leaf_o = leaf_word;
        else fault_o = 1'b1;
      end
      WALK_EXCESS: leaf_o.kind = LEAF_EXCESS;
      default:     fault_o = 1'b1;
    endcase
  end

endmodule
