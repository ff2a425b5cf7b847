// Writes of other VEs change no neighbour of a VE, whatever index its next hop contains.
`include "pair.svh"
module isolation_arp
  import card_pkg::*;
#(
    parameter int ARPS = 16384
) (
    input logic               clk,
    input range_t             part_i,  // part of the VE
    // A look-up; of the VE if `mine_i`.
    input logic               mine_i,
    input logic         [1:0] resolved_i,
    input arp_index_t   [1:0] index_i,
    input range_t       [1:0] range_i,
    // A write; of the VE if `wr_mine_i`.
    input logic               wr_mine_i,
    input logic         [1:0] wr_valid_i,
    input table_t       [1:0] wr_table_i,
    input table_index_t [1:0] wr_index_i,
    input arp_t         [1:0] wr_data_i,
    input range_t       [1:0] wr_range_i
);

  logic first_q = 1'b1;
  range_t part_q;
  logic [2:1] mine_q = '0;
  always_ff @(posedge clk) begin
    first_q <= 1'b0;
    part_q  <= part_i;
    mine_q  <= {mine_q[1], mine_i};
  end

  logic [1:0] hit, fault, refused;
  mac_t [1:0] mac;
  for (genvar i = 0; i < 2; i++) begin : copy
    card_arp #(
        .ARPS(ARPS)
    ) dut (
        .clk,
        .resolved_i  (resolved_i[i]),
        .index_i     (index_i[i]),
        .range_i     (range_i[i]),
        .hit_o       (hit[i]),
        .mac_o       (mac[i]),
        .fault_o     (fault[i]),
        .wr_valid_i  (wr_valid_i[i]),
        .wr_table_i  (wr_table_i[i]),
        .wr_index_i  (wr_index_i[i]),
        .wr_data_i   (wr_data_i[i]),
        .wr_range_i  (wr_range_i[i]),
        .wr_refused_o(refused[i])
    );
  end

  // As card_ve accepts it.
  function automatic logic fits(input range_t range);
    return {1'b0, range.base} + {1'b0, range.length} <= 17'(ARPS);
  endfunction

  always_comb begin
    if (!first_q) assume (part_i == part_q);
    assume (fits(part_i));
    if (mine_i)
      assume (range_i == {2{part_i}} && index_i[0] == index_i[1] && resolved_i[0] == resolved_i[1]);
    if (wr_mine_i) begin
      assume (wr_range_i == {2{part_i}});
      assume (wr_valid_i[0] == wr_valid_i[1] && wr_table_i[0] == wr_table_i[1]);
      assume (wr_index_i[0] == wr_index_i[1] && wr_data_i[0] == wr_data_i[1]);
    end else
      for (int i = 0; i < 2; i++) begin
        assume (fits(wr_range_i[i]));
        assume (wr_range_i[i].base + wr_range_i[i].length <= part_i.base
            || part_i.base + part_i.length <= wr_range_i[i].base);
      end
  end

  `PAIR_OF_PART(entries, part_i, 0)

  always_comb begin
    if (mine_q[2]) begin
      assert (hit[0] == hit[1] && fault[0] == fault[1]);
      if (hit[0]) assert (mac[0] == mac[1]);
    end
    if (wr_mine_i) assert (refused[0] == refused[1]);
  end

endmodule
