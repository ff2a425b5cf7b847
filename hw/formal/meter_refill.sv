// The refill of a bucket is at most rate * elapsed time. One of the two is any power of two, the
// other one any number.
module meter_refill
  import card_pkg::*;
(
    input logic       clk,
    input logic       rst,
    input logic       rate_i,    // the rate is the power of two
    input logic [5:0] shift_i,
    input ticks_t     now_i,
    input logic       valid_i,
    input logic       ve_i,
    input length_t    length_i,
    input logic       wr_en_i,
    input logic       wr_ve_i,
    input meter_t     wr_meter_i
);

  logic over;
  card_meter #(
      .VES(2)
  ) dut (
      .clk,
      .rst,
      .now_i,
      .valid_i,
      .ve_i,
      .length_i,
      .over_o(over),
      .wr_en_i,
      .wr_ve_i,
      .wr_meter_i
  );

  logic [75:0] product;
  logic [7:4][75:0] product_q;
  logic [7:4] known_q = '0;
  assign product = (rate_i ? 76'(dut.elapsed_s3) : 76'(dut.meter_q[3].rate)) << shift_i;
  always_ff @(posedge clk) begin
    product_q <= {product_q[6:4], product};
    known_q <= {known_q[6:4], 1'b1};
  end

  always_comb begin
    if (rate_i) assume (shift_i < 6'd28 && dut.meter_q[3].rate == 28'd1 << shift_i);
    else assume (shift_i < 6'd48 && dut.elapsed_s3 == 48'd1 << shift_i);
    if (known_q[7]) assert (76'(dut.refill_s7) <= product_q[7]);
  end

endmodule
