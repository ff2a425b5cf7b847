// Writes of other VEs change no route look-up of a VE, whatever indices its entries contain. The
// segments of VEs are apart, and those of the VE do not change.
//
// The step of the induction spans a look-up. What the proof asserts in front of a level follows
// from the level before only. So it holds for any number of levels; the proof has a first, an
// inner, and a last one.
`include "pair.svh"
module isolation_lpm
  import card_pkg::*;
  import card_lpm_pkg::*;
#(
    parameter  int VES         = 4,
    parameter  int LEVELS      = 3,
    parameter  int NODES       = 64,
    parameter  int LEAVES      = 128,
    parameter  int EXT_FROM    = 4,
    parameter  int SETTLE      = 8,      // cycles of the first reset
    localparam int LATENCY     = lpm_latency(LEVELS, EXT_FROM, 1),
    localparam int NODE_BITS   = $clog2(NODES),
    localparam int LEAF_BITS   = $clog2(LEAVES)
) (
    input logic                        clk,
    input logic                        rst,
    input ve_t                         own_ve_i,
    // Segments of the VE.
    input logic        [NODE_BITS-1:0] node_base_i,
    input logic        [  NODE_BITS:0] node_end_i,
    input logic        [LEAF_BITS-1:0] leaf_base_i,
    input logic        [  LEAF_BITS:0] leaf_end_i,
    // A look-up; of the VE if `mine_i`.
    input logic                        mine_i,
    input logic                  [1:0] valid_i,
    input ve_t                   [1:0] ve_i,
    input logic                  [1:0] is_v6_i,
    input logic           [1:0][127:0] key_i,
    // A write; of the VE if `wr_mine_i`.
    input logic                        wr_mine_i,
    input logic                  [1:0] wr_valid_i,
    input lpm_table_t            [1:0] wr_table_i,
    input logic             [1:0][4:0] wr_level_i,
    input ve_t                   [1:0] wr_ve_i,
    input logic            [1:0][31:0] wr_index_i,
    input logic           [1:0][191:0] wr_data_i
);

  typedef struct packed {
    logic [LEAF_BITS:0]   leaf_length;
    logic [LEAF_BITS-1:0] leaf_base;
    logic [NODE_BITS:0]   node_length;
    logic [NODE_BITS-1:0] node_base;
  } segment_t;

  // The first cycles are a reset, which empties the pipelines of writes.
  logic first_q;
  logic [3:0] cycle_q = '0;
  assign first_q = cycle_q != 4'(SETTLE);
  segment_t segment, segment_q;
  ve_t own_ve_q;
  logic [LATENCY:1] mine_q = '0;
  logic [LPM_WRITE_LATENCY:1] wr_mine_q = '0;
  always_ff @(posedge clk) begin
    if (first_q) cycle_q <= cycle_q + 1'b1;
    own_ve_q <= own_ve_i;
    segment_q <= segment;
    mine_q <= {mine_q[LATENCY-1:1], mine_i};
    wr_mine_q <= {wr_mine_q[LPM_WRITE_LATENCY-1:1], wr_mine_i};
  end
  assign segment.node_base = node_base_i;
  assign segment.node_length = node_end_i - (NODE_BITS + 1)'(node_base_i);
  assign segment.leaf_base = leaf_base_i;
  assign segment.leaf_length = leaf_end_i - (LEAF_BITS + 1)'(leaf_base_i);

  logic [1:0] valid, fault, refused;
  leaf_t [1:0] leaf;
  ve_t [1:0] ve;
  token_t [1:0] token;
  for (genvar i = 0; i < 2; i++) begin : copy
    card_lpm #(
        .VES        (VES),
        .LEVELS     (LEVELS),
        .NODES      (NODES),
        .LEAVES     (LEAVES),
        .EXT_FROM   (EXT_FROM)
    ) dut (
        .clk,
        .rst,
        .valid_i     (valid_i[i]),
        .ve_i        (ve_i[i]),
        .is_v6_i     (is_v6_i[i]),
        .key_i       (key_i[i]),
        .token_i     ('0),
        .valid_o     (valid[i]),
        .leaf_o      (leaf[i]),
        .fault_o     (fault[i]),
        .ve_o        (ve[i]),
        .token_o     (token[i]),
        .wr_valid_i  (wr_valid_i[i]),
        .wr_table_i  (wr_table_i[i]),
        .wr_level_i  (wr_level_i[i]),
        .wr_ve_i     (wr_ve_i[i]),
        .wr_index_i  (wr_index_i[i]),
        .wr_data_i   (wr_data_i[i]),
        .wr_refused_o(refused[i])
    );

    // The VE's segment is as the super page wrote it; those of other VEs are apart from it.
    segment_t other;
    assign other = dut.write.segments.other;
    always_comb begin
      assume (dut.write.segments.row == own_ve_i[$clog2(VES)-1:0]);
      assume (dut.node_segments.row == own_ve_i[$clog2(VES)-1:0]);
      assume (dut.leaf_segments.row == own_ve_i[$clog2(VES)-1:0]);
      if (first_q) begin
        assume (dut.write.segments.word_q == segment);
        assume (dut.node_segments.word_q == {node_end_i, node_base_i});
        assume (dut.leaf_segments.word_q == {leaf_end_i, leaf_base_i});
      end else begin
        assert (dut.write.segments.word_q == segment);
        assert (dut.node_segments.word_q == {node_end_i, node_base_i});
        assert (dut.leaf_segments.word_q == {leaf_end_i, leaf_base_i});
      end
      assume (32'(other.node_base) + 32'(other.node_length) <= NODES);
      assume (32'(other.leaf_base) + 32'(other.leaf_length) <= LEAVES);
      assume (32'(other.node_base) + 32'(other.node_length) <= 32'(node_base_i)
          || 32'(other.node_base) >= 32'(node_end_i));
      assume (32'(other.leaf_base) + 32'(other.leaf_length) <= 32'(leaf_base_i)
          || 32'(other.leaf_base) >= 32'(leaf_end_i));
    end
  end

  always_comb begin
    if (first_q) begin
      assume (rst && !mine_i && !wr_mine_i);
      assert (mine_q == '0 && wr_mine_q == '0);
    end
    if (cycle_q != '0) assume (own_ve_i == own_ve_q && segment == segment_q);
    assume (32'(own_ve_i) < VES);
    assume (node_end_i >= (NODE_BITS + 1)'(node_base_i) && 32'(node_end_i) <= NODES);
    assume (leaf_end_i >= (LEAF_BITS + 1)'(leaf_base_i) && 32'(leaf_end_i) <= LEAVES);
    if (mine_i) begin
      assume (valid_i == 2'b11 && ve_i[0] == own_ve_i && ve_i[1] == own_ve_i);
      assume (is_v6_i[0] == is_v6_i[1] && key_i[0] == key_i[1]);
    end else
      for (int i = 0; i < 2; i++) assume (!valid_i[i] || ve_i[i] != own_ve_i);
    if (wr_mine_i) begin
      assume (wr_valid_i[0] == wr_valid_i[1] && wr_table_i[0] == wr_table_i[1]);
      assume (wr_level_i[0] == wr_level_i[1] && wr_ve_i[0] == own_ve_i && wr_ve_i[1] == own_ve_i);
      assume (wr_index_i[0] == wr_index_i[1] && wr_data_i[0] == wr_data_i[1]);
      assume (wr_table_i[0] != LPM_SEGMENT);
    end else assume (wr_ve_i[0] != own_ve_i && wr_ve_i[1] != own_ve_i);
  end

  `PAIR_OF_VE(roots, 9)
  `define NODE(at) 32'(at) >= 32'(node_base_i) && 32'(at) < 32'(node_end_i)
  `define LEAF(at) 32'(at) >= 32'(leaf_base_i) && 32'(at) < 32'(leaf_end_i)
  for (genvar i = 1; i <= LEVELS; i++) begin : gen_nodes
    `PAIR(gen_level[i].walk.gen_ram.nodes,
          `NODE(copy[0].dut.gen_level[i].walk.gen_ram.nodes.rd_addr_i),
          `NODE(copy[0].dut.gen_level[i].walk.gen_ram.nodes.row))
  end
  `PAIR(leaves, `LEAF(copy[0].dut.leaves.rd_addr_i), `LEAF(copy[0].dut.leaves.row))

  // In front of each level, the walk is the same in both copies.
  `define SAME(name) \
    (copy[0].dut.gen_level[i].walk.name == copy[1].dut.gen_level[i].walk.name)
  for (genvar i = 1; i <= LEVELS; i++) begin : gen_front
    localparam int FRONT = lpm_latency(i - 1, EXT_FROM, 1) - 1;
    always_comb
      if (!first_q && mine_q[FRONT]) begin
        assert (`SAME(kind_i) && `SAME(key_i) && `SAME(base_i) && `SAME(node_end_i));
        assert (copy[0].dut.gen_level[i].walk.node_end_i == node_end_i);
        if (copy[0].dut.gen_level[i].walk.kind_i inside {WALK_NODE, WALK_LEAF})
          assert (`SAME(index_i));
        if (copy[0].dut.gen_level[i].walk.kind_i == WALK_NODE) begin
          assert (`SAME(addr_i));
          assert (copy[0].dut.gen_level[i].walk.index_i >= node_base_i);
          if (copy[0].dut.gen_level[i].walk.index_i < node_end_i)
            assert (copy[0].dut.gen_level[i].walk.addr_i
                == NODE_BITS'(copy[0].dut.gen_level[i].walk.index_i));
        end
      end
  end

  // In front of the leaf.
  always_comb
    if (!first_q && mine_q[LATENCY-1]) begin
      assert (copy[0].dut.kind[LEVELS] == copy[1].dut.kind[LEVELS]);
      if (copy[0].dut.kind[LEVELS] == WALK_LEAF) begin
        assert (copy[0].dut.index[LEVELS] == copy[1].dut.index[LEVELS]);
        assert (copy[0].dut.leaf_addr == copy[1].dut.leaf_addr);
        assert (copy[0].dut.index[LEVELS] >= leaf_base_i);
        if (copy[0].dut.index[LEVELS] < leaf_end_i)
          assert (copy[0].dut.leaf_addr == LEAF_BITS'(copy[0].dut.index[LEVELS]));
      end
    end

  always_comb begin
    for (int i = 1; i <= LATENCY; i++)
      if (!first_q && mine_q[i])
        assert (copy[0].dut.valid_q[i-1] == copy[1].dut.valid_q[i-1]);
    if (!first_q && mine_q[LATENCY]) begin
      assert (valid[0] == valid[1]);
      assert (copy[0].dut.leaf_end_late == leaf_end_i && copy[1].dut.leaf_end_late == leaf_end_i);
      assert (leaf[0] == leaf[1] && fault[0] == fault[1]);
    end
    if (!first_q && wr_mine_q[LPM_WRITE_LATENCY]) assert (refused[0] == refused[1]);
  end

endmodule
