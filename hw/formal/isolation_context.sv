// Writes of other VEs change no context register and no attachment of a VE.
`include "pair.svh"
module isolation_context
  import card_pkg::*;
#(
    parameter  int VES     = 4,
    localparam int VE_BITS = VES > 1 ? $clog2(VES) : 1
) (
    input logic                     clk,
    input logic       [VE_BITS-1:0] own_ve_i,
    // A look-up; the two copies may differ in one of another VE.
    input logic  [1:0][VE_BITS-1:0] ve_i,
    input vport_t             [1:0] ingress_i,
    input vport_t             [1:0] egress_i,
    // A write; of the VE if `wr_mine_i`.
    input logic                     wr_mine_i,
    input logic               [1:0] wr_valid_i,
    input table_t             [1:0] wr_table_i,
    input logic  [1:0][VE_BITS-1:0] wr_ve_i,
    input table_index_t       [1:0] wr_index_i,
    input attachment_t        [1:0] wr_data_i
);

  logic first_q = 1'b1;
  logic [VE_BITS-1:0] own_ve_q;
  logic [2:1] ingress_q = '0, egress_q = '0;  // equal questions about the VE
  always_ff @(posedge clk) begin
    first_q <= 1'b0;
    own_ve_q <= own_ve_i;
    ingress_q <= {ingress_q[1], ve_i[0] == own_ve_i && ingress_i[0] == ingress_i[1]};
    egress_q <= {egress_q[1], ve_i[0] == own_ve_i && egress_i[0] == egress_i[1]};
  end

  context_t [1:0] ingress, egress;
  attachment_t [1:0] attachment;
  port_t [1:0] port;
  logic [1:0] attached, refused;
  for (genvar i = 0; i < 2; i++) begin : copy
    card_context #(
        .VES(VES)
    ) dut (
        .clk,
        .ve_i               (ve_i[i]),
        .ingress_i          (ingress_i[i]),
        .egress_i           (egress_i[i]),
        .ingress_o          (ingress[i]),
        .ingress_attached_o (attached[i]),
        .ingress_port_o     (port[i]),
        .egress_o           (egress[i]),
        .egress_attachment_o(attachment[i]),
        .wr_valid_i         (wr_valid_i[i]),
        .wr_table_i         (wr_table_i[i]),
        .wr_ve_i            (wr_ve_i[i]),
        .wr_index_i         (wr_index_i[i]),
        .wr_data_i          (wr_data_i[i]),
        .wr_refused_o       (refused[i])
    );
  end

  always_comb begin
    if (!first_q) assume (own_ve_i == own_ve_q);
    if (ve_i[0] == own_ve_i) assume (ve_i[1] == own_ve_i);
    if (wr_mine_i) begin
      assume (wr_valid_i[0] == wr_valid_i[1] && wr_table_i[0] == wr_table_i[1]);
      assume (wr_ve_i[0] == wr_ve_i[1] && wr_index_i[0] == wr_index_i[1]);
      assume (wr_data_i[0] == wr_data_i[1]);
    end else assume (wr_ve_i[0] != own_ve_i && wr_ve_i[1] != own_ve_i);
  end

  `PAIR_OF_VE(ingress_contexts, 4)
  `PAIR_OF_VE(egress_contexts, 4)
  `PAIR_OF_VE(ingress_attachments, 4)
  `PAIR_OF_VE(egress_attachments, 4)

  always_comb begin
    if (ingress_q[2])
      assert (ingress[0] == ingress[1] && attached[0] == attached[1] && port[0] == port[1]);
    if (egress_q[2]) assert (egress[0] == egress[1] && attachment[0] == attachment[1]);
    if (wr_mine_i) assert (refused[0] == refused[1]);
  end

endmodule
