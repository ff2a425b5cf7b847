// Writes of other VEs change no option, own address, part, and no state of a VE.
`include "pair.svh"
module isolation_ve
  import card_pkg::*;
#(
    parameter  int VES     = 4,
    parameter  int SETTLE  = 6,  // first cycles, without a difference
    localparam int VE_BITS = VES > 1 ? $clog2(VES) : 1
) (
    input logic                     clk,
    input logic                     rst,
    input logic       [VE_BITS-1:0] own_ve_i,
    // A look-up; the two copies may differ in one of another VE.
    input logic  [1:0][VE_BITS-1:0] ve_i,
    input logic         [1:0][31:0] source_i,
    // A write; of the VE if `wr_mine_i`.
    input logic                     wr_mine_i,
    input logic  [1:0][VE_BITS-1:0] wr_ve_early_i,
    input logic               [1:0] wr_valid_i,
    input table_t             [1:0] wr_table_i,
    input logic  [1:0][VE_BITS-1:0] wr_ve_i,
    input table_index_t       [1:0] wr_index_i,
    input logic        [1:0][127:0] wr_data_i
);

  logic first_q, early_q = 1'b0;
  logic [3:0] cycle_q = '0;
  assign first_q = cycle_q != 4'(SETTLE);
  logic [VE_BITS-1:0] own_ve_q;
  logic [3:1] mine_q = '0;
  always_ff @(posedge clk) begin
    if (first_q) cycle_q <= cycle_q + 1'b1;
    own_ve_q <= own_ve_i;
    mine_q   <= {mine_q[2:1], ve_i[0] == own_ve_i};
    early_q  <= wr_ve_early_i[0] == own_ve_i && wr_ve_early_i[1] == own_ve_i;
  end

  logic [1:0] enabled, own_source, refused;
  ve_options_t [1:0] options;
  hop_segments_t [1:0] segments, wr_segments;
  for (genvar i = 0; i < 2; i++) begin : copy
    card_ve #(
        .VES(VES)
    ) dut (
        .clk,
        .rst,
        .ve_i         (ve_i[i]),
        .source_i     (source_i[i]),
        .enabled_o    (enabled[i]),
        .options_o    (options[i]),
        .segments_o   (segments[i]),
        .own_source_o (own_source[i]),
        .wr_ve_early_i(wr_ve_early_i[i]),
        .wr_segments_o(wr_segments[i]),
        .wr_valid_i   (wr_valid_i[i]),
        .wr_table_i   (wr_table_i[i]),
        .wr_ve_i      (wr_ve_i[i]),
        .wr_index_i   (wr_index_i[i]),
        .wr_data_i    (wr_data_i[i]),
        .wr_refused_o (refused[i])
    );
  end

  always_comb begin
    if (cycle_q != '0) assume (own_ve_i == own_ve_q);
    if (ve_i[0] == own_ve_i) assume (ve_i[1] == own_ve_i && source_i[0] == source_i[1]);
    if (wr_mine_i) begin
      assume (wr_valid_i[0] == wr_valid_i[1] && wr_table_i[0] == wr_table_i[1]);
      assume (wr_ve_i[0] == wr_ve_i[1] && wr_index_i[0] == wr_index_i[1]);
      assume (wr_data_i[0] == wr_data_i[1]);
    end else assume (wr_ve_i[0] != own_ve_i && wr_ve_i[1] != own_ve_i);
    if (first_q)
      assume (copy[0].dut.enabled_q[own_ve_i] == copy[1].dut.enabled_q[own_ve_i]);
    else assert (copy[0].dut.enabled_q[own_ve_i] == copy[1].dut.enabled_q[own_ve_i]);
  end

  `PAIR_OF_VE(options_ram, 0)
  `PAIR_OF_VE(segments_ram, 0)
  `PAIR_OF_VE(wr_segments_ram, 0)
  for (genvar i = 0; i < 16; i++) begin : gen_own
    `PAIR_OF_VE(gen_own[i].own_ram, 0)
  end

  always_comb begin
    if (!first_q && mine_q[3]) begin
      assert (enabled[0] == enabled[1] && own_source[0] == own_source[1]);
      assert (options[0] == options[1] && segments[0] == segments[1]);
    end
    if (!first_q && early_q) assert (wr_segments[0] == wr_segments[1]);
    if (!first_q && wr_mine_i) assert (refused[0] == refused[1]);
  end

endmodule
