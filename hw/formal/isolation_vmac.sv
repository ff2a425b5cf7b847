// No write but those of the super page changes a result of the VMAC-VE table.
`include "pair.svh"
module isolation_vmac
  import card_pkg::*;
#(
    parameter int VMACS  = 1024,
    parameter int VES    = 32,
    parameter int SETTLE = 5  // cycles of the first reset
) (
    input logic               clk,
    input logic               rst,
    input vmac_key_t          key_i,
    // A write; the copies may differ in those of the VEs' pages.
    input logic         [1:0] wr_valid_i,
    input table_t       [1:0] wr_table_i,
    input table_index_t [1:0] wr_index_i,
    input vmac_entry_t  [1:0] wr_entry_i
);

  logic first_q;
  logic [3:0] cycle_q = '0;
  assign first_q = cycle_q != 4'(SETTLE);
  always_ff @(posedge clk) if (first_q) cycle_q <= cycle_q + 1'b1;

  logic [1:0] hit, refused, super_;
  ve_t [1:0] ve;
  vport_t [1:0] vport;
  for (genvar i = 0; i < 2; i++) begin : copy
    card_vmac #(
        .VMACS(VMACS),
        .VES  (VES)
    ) dut (
        .clk,
        .rst,
        .key_i,
        .hit_o       (hit[i]),
        .ve_o        (ve[i]),
        .vport_o     (vport[i]),
        .wr_valid_i  (wr_valid_i[i]),
        .wr_table_i  (wr_table_i[i]),
        .wr_index_i  (wr_index_i[i]),
        .wr_entry_i  (wr_entry_i[i]),
        .wr_refused_o(refused[i])
    );
    assign super_[i] = wr_valid_i[i] && wr_table_i[i] < TABLE_VE_OPTIONS;
  end

  always_comb begin
    assume (super_[0] == super_[1]);
    if (super_[0])
      assume (wr_table_i[0] == wr_table_i[1] && wr_index_i[0] == wr_index_i[1]
          && wr_entry_i[0] == wr_entry_i[1]);
    if (first_q) assume (rst);
    assert (refused[0] == refused[1]);
    if (!first_q) begin
      assert (copy[0].dut.seed_q == copy[1].dut.seed_q);
      for (int i = 0; i < 8; i++) begin
        assert (copy[0].dut.stash_q[i].valid == copy[1].dut.stash_q[i].valid);
        if (copy[0].dut.stash_q[i].valid)
          assert (copy[0].dut.stash_q[i] == copy[1].dut.stash_q[i]);
      end
    end
  end

  for (genvar i = 0; i < 4; i++) begin : gen_way
    `PAIR(gen_way[i].ram, 1'b1, 1'b1)
  end

  always_comb
    if (!first_q) begin
      assert (hit[0] == hit[1]);
      assert (ve[0] == ve[1] && vport[0] == vport[1]);
    end

endmodule
