// The header pipeline as a whole: writes of other VEs change no result of a VE's frames, of the
// host's frames of that VE, nor of frames that belong to no VE. The writes differ
// between the two copies; all frames are the same, also those of other VEs.
//
// The modules with tables are black boxes. This proof assumes what the other proofs show of them:
// equal questions about the VE have equal answers. So it is about all that is between them.
module isolation_header
  import card_pkg::*;
  import card_lpm_pkg::*;
#(
    parameter  int VES         = 8,
    parameter  int LEVELS      = 15,
    // The property is stated from this cycle on: a reset may come at any cycle, also later.
    parameter  int SETTLE      = 60,
    localparam int LPM_LATENCY = lpm_latency(LEVELS, 21, 4)
) (
    input logic               clk,
    input logic               rst,
    input ve_t                own_ve_i,
    input ticks_t             now_i,
    input logic               valid_i,
    input header_in_t         header_i,
    input logic         [1:0] wr_valid_i,
    input table_t       [1:0] wr_table_i,
    input ve_t          [1:0] wr_ve_i,
    input table_index_t [1:0] wr_index_i,
    input table_data_t  [1:0] wr_data_i
);

  header_out_t [1:0] out;
  logic [1:0] valid, fault, excess, refused;
  for (genvar i = 0; i < 2; i++) begin : copy
    card_header #(
        .VES   (VES),
        .LEVELS(LEVELS)
    ) dut (
        .clk,
        .rst,
        .now_i,
        .valid_i,
        .header_i,
        .valid_o     (valid[i]),
        .header_o    (out[i]),
        .fault_o     (fault[i]),
        .excess_o    (excess[i]),
        .wr_valid_i  (wr_valid_i[i]),
        .wr_table_i  (wr_table_i[i]),
        .wr_ve_i     (wr_ve_i[i]),
        .wr_index_i  (wr_index_i[i]),
        .wr_data_i   (wr_data_i[i]),
        .wr_refused_o(refused[i])
    );
  end

  // Equal questions about the VE, and when their answers come.
  logic started_q = 1'b0;
  ve_t own_ve_q;
  logic [LPM_LATENCY:1] route_q;
  logic [6:1] hop_q;
  logic [2:1] ingress_q, egress_q, arp_q, other_q;
  logic own_route, own_6;
  assign own_route = copy[0].dut.frame_route.ve == own_ve_i;
  assign own_6 = copy[0].dut.frame_6.ve == own_ve_i;
  always_ff @(posedge clk) begin
    started_q <= 1'b1;
    own_ve_q <= own_ve_i;
    route_q <= {route_q[LPM_LATENCY-1:1], copy[0].dut.ve_2 == own_ve_i};
    hop_q <= {hop_q[5:1], own_route && copy[0].dut.leaf.group == copy[1].dut.leaf.group};
    ingress_q <= {ingress_q[1], own_6};
    egress_q <= {egress_q[1],
                 own_6 && copy[0].dut.egress_vport_6 == copy[1].dut.egress_vport_6};
    arp_q <= {arp_q[1], own_6 && copy[0].dut.hop_6.resolved == copy[1].dut.hop_6.resolved
        && copy[0].dut.hop_6.arp == copy[1].dut.hop_6.arp};
    other_q <= {other_q[1], copy[0].dut.frame_8.owned && copy[0].dut.frame_8.ve != own_ve_i};
  end

  `define EQUAL(name) copy[0].dut.name == copy[1].dut.name
  always_comb begin
    if (started_q) assume (own_ve_i == own_ve_q);
    assume (32'(own_ve_i) < VES);
    // The same frames.
    assume (`EQUAL(is_v6) && `EQUAL(key) && `EQUAL(parsed_4) && `EQUAL(hash_36));
    assume (`EQUAL(hit_2) && `EQUAL(ve_2) && `EQUAL(vport_2) && `EQUAL(over_13));
    assume (`EQUAL(route_valid));
    assume (!copy[0].dut.hit_2 || 32'(copy[0].dut.ve_2) < VES);
    if (route_q[LPM_LATENCY]) assume (`EQUAL(leaf_read) && `EQUAL(lpm_fault));
    if (own_route)
      assume (`EQUAL(enabled) && `EQUAL(options) && `EQUAL(segments) && `EQUAL(own_source));
    if (hop_q[6]) begin
      assume (`EQUAL(hop_found_6) && `EQUAL(hop_fault_6));
      if (copy[0].dut.hop_found_6) assume (`EQUAL(hop_6));
    end
    if (ingress_q[2])
      assume (`EQUAL(ingress) && `EQUAL(ingress_attached) && `EQUAL(ingress_port));
    if (egress_q[2]) assume (`EQUAL(egress) && `EQUAL(egress_attachment));
    if (arp_q[2]) begin
      assume (`EQUAL(arp_hit) && `EQUAL(arp_fault));
      if (copy[0].dut.arp_hit) assume (`EQUAL(arp_mac));
    end
  end

  logic [6:0] cycle_q = '0;  // up to SETTLE
  always_ff @(posedge clk) if (cycle_q != 7'(SETTLE)) cycle_q <= cycle_q + 1'b1;
  always_comb
    if (cycle_q == 7'(SETTLE) && !other_q[2]) begin
      assert (out[0] == out[1]);
      assert (fault[0] == fault[1] && excess[0] == excess[1]);
    end

endmodule
