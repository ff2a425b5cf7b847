// Meter of a VE: in any span without a write of its limits, the frames that pass have at most
// burst + refills bytes, and the refills belong to disjoint times. The proof meter_refill shows
// that a refill is at most rate * time. So burst + rate * time bounds the bytes that pass. The span
// begins with any frame of the VE.
module meter
  import card_pkg::*;
#(
    parameter  int VES     = 8,
    localparam int VE_BITS = $clog2(VES)
) (
    input logic               clk,
    input logic               rst,
    input logic [VE_BITS-1:0] own_ve_i,
    input meter_t             limits_i,
    input logic               begin_i,   // the span begins with this frame, if not before
    input ticks_t             now_i,
    input logic               valid_i,
    input logic [VE_BITS-1:0] ve_i,
    input length_t            length_i,
    input logic               wr_en_i,
    input logic [VE_BITS-1:0] wr_ve_i,
    input meter_t             wr_meter_i
);

  logic over;
  card_meter #(
      .VES(VES)
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

  // The VE's frames, at each stage.
  logic started_q = 1'b0;
  logic [VE_BITS-1:0] own_ve_q;
  meter_t limits_q;
  logic mine;
  logic [11:1] mine_q = '0, first_q, begin_q;
  logic [11:1][11:0] cost_q;
  ticks_t [3:1] time_q;  // since the VE's last frame
  ticks_t last_time_q, last_time_late_q;
  logic seen_q;          // the VE had a frame since the reset
  assign mine = valid_i && ve_i == own_ve_i && !rst;
  always_ff @(posedge clk) begin
    started_q <= 1'b1;
    own_ve_q <= own_ve_i;
    limits_q <= limits_i;
    mine_q <= rst ? '0 : {mine_q[10:1], mine};
    first_q <= {first_q[10:1], !seen_q};
    begin_q <= {begin_q[10:1], begin_i};
    cost_q <= {cost_q[10:1], 12'(length_i) + 12'd24};
    time_q <= {time_q[2:1], now_i - last_time_q};
    last_time_late_q <= last_time_q;
    if (mine) last_time_q <= now_i;
    seen_q <= !rst && (seen_q || mine);
  end

  // Allowance of the span: burst, and refills, without what has passed. Saturated.
  typedef logic [51:0] allowance_t;
  allowance_t allowance_q, allowance, left;
  logic span_q, any_q;
  logic [39:0] refill_q, level_q, cost, burst;
  logic [10:1] older;  // the VE has an older frame in a stage up to 10
  assign burst = {limits_i.burst, 20'd0};
  assign cost = {8'd0, cost_q[11], 20'd0};
  always_comb begin
    for (int i = 1; i <= 10; i++) begin
      older[i] = 1'b0;
      for (int j = i + 1; j <= 10; j++) older[i] |= mine_q[j];
    end
    allowance = allowance_q + allowance_t'(refill_q);
    if (allowance_q[51]) allowance = allowance_q;
    if (!span_q) allowance = allowance_t'(burst);
    left = over ? allowance : allowance - allowance_t'(cost);
  end
  always_ff @(posedge clk) begin
    refill_q <= dut.refill_q[10];
    if (mine_q[10]) level_q <= dut.level_new;
    if (mine_q[10]) any_q <= 1'b1;
    if (mine_q[11] && (span_q || begin_q[11])) begin
      span_q <= 1'b1;
      allowance_q <= left;
    end
    if (rst) {span_q, any_q} <= '0;
  end

  always_comb begin
    assume (dut.limits.row == own_ve_i && dut.times.row == own_ve_i && dut.levels.row == own_ve_i);
    if (!started_q) assume (rst && dut.limits.word_q == limits_i);
    else assume (own_ve_i == own_ve_q && limits_i == limits_q);
    if (wr_en_i) assume (wr_ve_i != own_ve_i);
    assume (limits_i.limited);

    if (started_q) begin
      // A frame passes only if the allowance has its bytes.
      if (mine_q[11] && (span_q || begin_q[11]) && !over) assert (allowance >= allowance_t'(cost));
      if (mine_q[3] && !first_q[3]) assert (dut.elapsed_s3 == time_q[3]);
      if (mine_q[10] && first_q[10]) assert (dut.level == burst);

      // Invariants: the stages have the limits and the cost of the VE's frames, and the memories
      // what its last frame left.
      assert (dut.limits.word_q == limits_i);
      assert (dut.fresh_q[own_ve_i] == !seen_q);
      for (int i = 1; i <= 10; i++) begin
        assert (mine_q[i] == (dut.valid_q[i] && dut.ve_q[i] == own_ve_i));
        if (mine_q[i]) begin
          assert (seen_q && first_q[i] != (any_q || older[i]));
          if (i <= 7) assert (dut.cost_q[i] == cost_q[i]);
          if (i >= 3 && i <= 7)
            assert (dut.meter_q[i] == limits_i && dut.fresh_q3[i] == first_q[i]);
          if (i >= 8) begin
            assert (dut.burst_q[i] == burst && dut.limited_q[i]);
            assert (dut.kept_q[i] == 42'(burst) - 42'({cost_q[i], 20'd0}));
            assert (dut.net_q[i] == 42'(dut.refill_q[i]) - 42'({cost_q[i], 20'd0}));
            assert (dut.above_q[i] == 42'(dut.refill_q[i]) - 42'(burst));
          end
        end
      end
      if (mine_q[1]) assert (dut.fresh_s1 == first_q[1] && dut.meter_read == limits_i);
      if (mine_q[2]) assert (dut.fresh_s2 == first_q[2] && dut.meter_s2 == limits_i);
      if (mine_q[8]) assert (dut.fresh_s8 == first_q[8]);
      if (mine_q[9]) assert (dut.fresh_s9 == first_q[9]);
      if (mine_q[11]) assert (any_q);
      if (seen_q && mine_q[10:1] == '0) assert (any_q);
      if (any_q) assert (seen_q);
      if (span_q) assert (any_q);
      if (any_q) begin
        assert (dut.levels.word_q == level_q);
        assert (level_q <= burst);
        if (mine_q[10]) assert (dut.level == level_q);
      end
      if (span_q && !mine_q[11]) assert (allowance_t'(level_q) <= allowance_q);
      if (mine_q[11] && (span_q || begin_q[11])) assert (allowance_t'(level_q) <= left);
      if (seen_q && !mine_q[1]) assert (dut.times.word_q == last_time_late_q);
    end
  end

endmodule
