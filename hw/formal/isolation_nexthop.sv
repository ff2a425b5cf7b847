// Writes of other VEs change no next hop of a VE, whatever indices its entries contain.
`include "pair.svh"
module isolation_nexthop
  import card_pkg::*;
#(
    parameter int GROUPS        = 64,
    parameter int BUCKET_BLOCKS = 4,
    parameter int HOPS          = 64
) (
    input logic                clk,
    input hop_segments_t       part_i,   // parts of the VE
    // A look-up; of the VE if `mine_i`. The frame is the same in both copies.
    input logic                mine_i,
    input group_index_t  [1:0] group_i,
    input hop_segments_t [1:0] segments_i,
    input logic         [31:0] hash_i,
    input logic         [31:0] seed_i,
    // A write; of the VE if `wr_mine_i`.
    input logic                wr_mine_i,
    input logic          [1:0] wr_valid_i,
    input table_t        [1:0] wr_table_i,
    input table_index_t  [1:0] wr_index_i,
    input hop_t          [1:0] wr_data_i,
    input hop_segments_t [1:0] wr_segments_i
);

  logic first_q = 1'b1;
  hop_segments_t part_q;
  logic [6:1] mine_q = '0;
  always_ff @(posedge clk) begin
    first_q <= 1'b0;
    part_q  <= part_i;
    mine_q  <= {mine_q[5:1], mine_i};
  end

  hop_t [1:0] hop;
  logic [1:0] found, fault, refused;
  for (genvar i = 0; i < 2; i++) begin : copy
    card_nexthop #(
        .GROUPS       (GROUPS),
        .BUCKET_BLOCKS(BUCKET_BLOCKS),
        .HOPS         (HOPS)
    ) dut (
        .clk,
        .group_i      (group_i[i]),
        .segments_i   (segments_i[i]),
        .hash_i,
        .seed_i,
        .hop_o        (hop[i]),
        .found_o      (found[i]),
        .fault_o      (fault[i]),
        .wr_valid_i   (wr_valid_i[i]),
        .wr_table_i   (wr_table_i[i]),
        .wr_index_i   (wr_index_i[i]),
        .wr_data_i    (wr_data_i[i]),
        .wr_segments_i(wr_segments_i[i]),
        .wr_refused_o (refused[i])
    );
  end

  // As card_ve accepts them.
  function automatic logic fits(input range_t range, input logic [16:0] entries);
    return {1'b0, range.base} + {1'b0, range.length} <= entries;
  endfunction
  function automatic logic all_fit(input hop_segments_t part);
    return fits(part.group, 17'(GROUPS)) && fits(part.bucket, 17'(BUCKET_BLOCKS))
        && fits(part.hop, 17'(HOPS));
  endfunction
  function automatic logic apart(input range_t a, input range_t b);
    return a.base + a.length <= b.base || b.base + b.length <= a.base;
  endfunction

  always_comb begin
    if (!first_q) assume (part_i == part_q);
    assume (all_fit(part_i));
    if (mine_i) assume (segments_i == {2{part_i}} && group_i[0] == group_i[1]);
    if (wr_mine_i) begin
      assume (wr_segments_i == {2{part_i}});
      assume (wr_valid_i[0] == wr_valid_i[1] && wr_table_i[0] == wr_table_i[1]);
      assume (wr_index_i[0] == wr_index_i[1] && wr_data_i[0] == wr_data_i[1]);
    end else
      for (int i = 0; i < 2; i++) begin
        assume (all_fit(wr_segments_i[i]));
        assume (apart(wr_segments_i[i].group, part_i.group));
        assume (apart(wr_segments_i[i].bucket, part_i.bucket));
        assume (apart(wr_segments_i[i].hop, part_i.hop));
      end
  end

  `PAIR_OF_PART(groups, part_i.group, 0)
  `PAIR_OF_PART(buckets, part_i.bucket, 8)
  `PAIR_OF_PART(hops, part_i.hop, 0)

  always_comb begin
    if (mine_q[6]) begin
      assert (found[0] == found[1] && fault[0] == fault[1]);
      if (found[0]) assert (hop[0] == hop[1]);
    end
    if (wr_mine_i) assert (refused[0] == refused[1]);
  end

endmodule
