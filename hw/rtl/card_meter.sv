// Token bucket of each virtual environment (VE): limits its bytes at ingress.
//
// Latency: 11 cycles. One frame per cycle, in any mix of VEs.
//
// A frame costs its length, plus 24 bytes for preamble, check sequence, and gap. It passes if the
// bucket holds that many bytes, which it then takes out. Otherwise `over_o` is 1 and the bucket
// keeps them. The bucket fills at `rate` and holds at most `burst` bytes. A write of a VE's limits
// fills it.
//
// Between two frames of a VE, the bucket's level is unknown for some cycles, but the time of the
// first one is not. So the time has its own RAM, the refill is computed in a pipeline, and only one
// addition has to end before the next frame (stage 10).
// Invariant: at most burst + rate * time bytes pass in any span without a write of the limits.
// Approximation: after a pause of 2^24 ticks or more, up to 4,095 of them do not refill. After one
// of 2^36 ticks, the rest of them do not.
module card_meter
  import card_pkg::*;
#(
    parameter  int VES     = 32,
    localparam int VE_BITS = VES > 1 ? $clog2(VES) : 1
) (
    input  logic               clk,
    input  logic               rst,
    input  ticks_t             now_i,
    // A frame of `ve_i`.
    input  logic               valid_i,
    input  logic [VE_BITS-1:0] ve_i,
    input  length_t            length_i,
    output logic               over_o,
    // Writes of TABLE_METER.
    input  logic               wr_en_i,
    input  logic [VE_BITS-1:0] wr_ve_i,
    input  meter_t             wr_meter_i
);

  // Bytes on the wire beyond the frame.
  localparam logic [11:0] OVERHEAD = 12'd24;

  // Fraction bits of a byte.
  localparam int FRACTION = 20;

  // Level of a bucket, and a difference of two.
  typedef logic [39:0] level_t;
  typedef logic signed [41:0] change_t;

  // VEs whose limits were written and that had no frame since. Their bucket is full.
  logic [VES-1:0] fresh_q;

  // ---------------------------------------------------------------------------------------------
  // Stages 0 to 2: limits, and time of the VE's frame before.

  logic [10:1] valid_q;
  logic [10:1][VE_BITS-1:0] ve_q;
  logic fresh_s1, fresh_s2;
  logic [7:1][11:0] cost_q;
  ticks_t now_s1, now_s2, time_read, time_s2;
  meter_t meter_read, meter_s2;

  card_ram #(
      .WIDTH($bits(meter_t)),
      .DEPTH(VES)
  ) limits (
      .clk,
      .wr_en_i,
      .wr_addr_i(wr_ve_i),
      .wr_data_i(wr_meter_i),
      .rd_addr_i(ve_i),
      .rd_data_o(meter_read)
  );
  card_ram #(
      .WIDTH($bits(ticks_t)),
      .DEPTH(VES)
  ) times (
      .clk,
      .wr_en_i  (valid_q[1]),
      .wr_addr_i(ve_q[1]),
      .wr_data_i(now_s1),
      .rd_addr_i(ve_i),
      .rd_data_o(time_read)
  );

  always_ff @(posedge clk) begin
    valid_q[1] <= valid_i && !rst;
    ve_q[1] <= ve_i;
    cost_q[1] <= {1'b0, length_i} + OVERHEAD;
    now_s1 <= now_i;
    fresh_s1 <= fresh_q[ve_i];
    if (valid_i) fresh_q[ve_i] <= 1'b0;
    if (wr_en_i) fresh_q[wr_ve_i] <= 1'b1;
    if (rst) fresh_q <= '1;

    for (int i = 2; i <= 10; i++) begin
      valid_q[i] <= valid_q[i-1] && !rst;
      ve_q[i] <= ve_q[i-1];
    end
    for (int i = 2; i <= 7; i++) cost_q[i] <= cost_q[i-1];

    fresh_s2 <= fresh_s1;
    now_s2 <= now_s1;
    meter_s2 <= meter_read;
    // The RAM does not have the time of the frame right before.
    time_s2 <= valid_q[2] && ve_q[2] == ve_q[1] ? now_s2 : time_read;
  end

  // ---------------------------------------------------------------------------------------------
  // Stages 3 to 7: refill = elapsed time * rate. The time is 24 bits, or 24 bits times 4,096.

  ticks_t elapsed_s3;
  logic [35:0] elapsed_max;
  logic [7:3] fresh_q3;
  meter_t [7:3] meter_q;
  logic [6:4] coarse_q;
  logic [23:0] elapsed_s4;
  logic [3:0][25:0] product_s5;
  logic [51:0] product_s6;
  level_t refill_s7;

  assign elapsed_max = elapsed_s3[47:36] != '0 ? '1 : elapsed_s3[35:0];

  always_ff @(posedge clk) begin
    elapsed_s3 <= fresh_s2 ? '0 : now_s2 - time_s2;
    fresh_q3[3] <= fresh_s2;
    meter_q[3] <= meter_s2;
    for (int i = 4; i <= 7; i++) begin
      fresh_q3[i] <= fresh_q3[i-1];
      meter_q[i] <= meter_q[i-1];
    end

    coarse_q[4] <= elapsed_max[35:24] != '0;
    elapsed_s4 <= elapsed_max[35:24] != '0 ? elapsed_max[35:12] : elapsed_max[23:0];

    coarse_q[5] <= coarse_q[4];
    for (int i = 0; i < 4; i++)
      product_s5[i] <= 26'(elapsed_s4[12*(i%2)+:12]) * 26'(meter_q[4].rate[14*(i/2)+:14]);

    coarse_q[6] <= coarse_q[5];
    product_s6 <= {product_s5[3], product_s5[0]} + {14'd0, product_s5[1], 12'd0}
        + {12'd0, product_s5[2], 14'd0};

    // A bucket holds less than 2^40.
    if (coarse_q[6])
      refill_s7 <= product_s6[51:28] != '0 ? '1 : {product_s6[27:0], 12'd0};
    else refill_s7 <= product_s6[51:40] != '0 ? '1 : product_s6[39:0];
  end

  // ---------------------------------------------------------------------------------------------
  // Stage 8: change if the frame passes, excess over a full bucket, rest of a full bucket.

  logic [10:8] limited_q;
  logic fresh_s8, fresh_s9;
  level_t [10:8] burst_q;
  level_t [10:8] refill_q;
  change_t [10:8] net_q, above_q, kept_q;

  level_t cost_s7, burst_s7;
  assign cost_s7  = {8'd0, cost_q[7], {FRACTION{1'b0}}};
  assign burst_s7 = {meter_q[7].burst, {FRACTION{1'b0}}};

  always_ff @(posedge clk) begin
    limited_q[8] <= meter_q[7].limited;
    fresh_s8 <= fresh_q3[7];
    fresh_s9 <= fresh_s8;
    burst_q[8] <= burst_s7;
    refill_q[8] <= refill_s7;
    net_q[8] <= change_t'({2'b00, refill_s7}) - change_t'({2'b00, cost_s7});
    above_q[8] <= change_t'({2'b00, refill_s7}) - change_t'({2'b00, burst_s7});
    kept_q[8] <= change_t'({2'b00, burst_s7}) - change_t'({2'b00, cost_s7});
    for (int i = 9; i <= 10; i++) begin
      burst_q[i] <= burst_q[i-1];
      refill_q[i] <= refill_q[i-1];
      net_q[i] <= net_q[i-1];
      above_q[i] <= above_q[i-1];
      kept_q[i] <= kept_q[i-1];
    end
    for (int i = 9; i <= 10; i++) limited_q[i] <= limited_q[i-1];
  end

  // ---------------------------------------------------------------------------------------------
  // Stages 9 and 10: the level. The RAM does not have the levels that the two frames right before
  // left; they come from stage 11, in stage 9 for the one and in stage 10 for the other.
  logic ahead_by_2_q, ahead_by_1_q;

  level_t level_read, level_s10, level, level_new, level_s11;
  // Some are used only for their sign, and some only if they are a level.
  // verilator lint_off UNUSEDSIGNAL
  change_t passed, over_burst, refilled;
  // verilator lint_on UNUSEDSIGNAL
  logic full, passes;

  card_ram #(
      .WIDTH($bits(level_t)),
      .DEPTH(VES)
  ) levels (
      .clk,
      .wr_en_i  (valid_q[10] && limited_q[10]),
      .wr_addr_i(ve_q[10]),
      .wr_data_i(level_new),
      .rd_addr_i(ve_q[8]),
      .rd_data_o(level_read)
  );

  always_comb begin
    level = ahead_by_1_q ? level_s11 : level_s10;
    passed = change_t'({2'b00, level}) + net_q[10];
    over_burst = change_t'({2'b00, level}) + above_q[10];
    refilled = change_t'({2'b00, level}) + change_t'({2'b00, refill_q[10]});
    full = !over_burst[41];
    passes = full ? !kept_q[10][41] : !passed[41];
    if (full) level_new = passes ? kept_q[10][39:0] : burst_q[10];
    else level_new = passes ? passed[39:0] : refilled[39:0];
  end

  always_ff @(posedge clk) begin
    ahead_by_2_q <= valid_q[10] && limited_q[10] && ve_q[10] == ve_q[8];
    ahead_by_1_q <= valid_q[10] && limited_q[10] && ve_q[10] == ve_q[9] && !fresh_s9;
    if (fresh_s9) level_s10 <= burst_q[9];
    else level_s10 <= ahead_by_2_q ? level_s11 : level_read;
    level_s11 <= level_new;
    over_o <= valid_q[10] && limited_q[10] && !passes;
  end

endmodule
