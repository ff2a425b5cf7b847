// No queue of an output starves. While a queue waits, at most SLOTS turns of other queues pass,
// each of at most 255 * 2,048 + 7,524 bytes. If the output has space, it is offered a frame
// within seven cycles. The memory of card_queues returns anything.
module scheduler
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int SLOTS     = 64,
    parameter  int WEIGHT    = 255,  // largest one
    localparam int SLOT_BITS = $clog2(SLOTS)
) (
    input logic                 clk,
    input logic                 rst,
    input logic [SLOT_BITS-1:0] own_slot_i,
    input logic [SLOT_BITS-1:0] early_slot_i,
    input logic                 insert_i,
    input logic [SLOT_BITS-1:0] insert_slot_i,
    input queued_t              insert_frame_i,
    input logic                 room_i,
    input logic                 start_i,
    input queued_t              next_i,
    input logic                 start_chain_i,
    input logic                 wr_weight_i,
    input logic [SLOT_BITS-1:0] wr_slot_i,
    input logic [          7:0] wr_weight_data_i
);

  localparam int DEBT = 4096;  // a balance is above its negative
  localparam int TURN_BYTES = WEIGHT * 2048 + 2 * MAX_LENGTH + DEBT;

  logic linked, valid, direct, chain, recent;
  cell_t newest;
  queued_t frame, recent_q;
  logic [SLOT_BITS-1:0] slot;
  card_scheduler #(
      .SLOTS(SLOTS)
  ) dut (
      .clk,
      .rst,
      .early_slot_i,
      .insert_i,
      .insert_slot_i,
      .insert_frame_i,
      .linked_o     (linked),
      .newest_o     (newest),
      .room_i,
      .valid_o      (valid),
      .direct_o     (direct),
      .frame_o      (frame),
      .slot_o       (slot),
      .start_i,
      .next_i,
      .recent_i     (recent_q),
      .chain_o      (chain),
      .recent_o     (recent),
      .start_chain_i,
      .wr_weight_i,
      .wr_slot_i,
      .wr_weight_data_i
  );

  logic reset_q = 1'b0;
  logic [SLOT_BITS-1:0] own_slot_q, early_slot_q, last_slot_q, behind;
  logic waits_q;               // a frame of the queue has come since the last one started
  logic [SLOT_BITS:0] turns_q; // turns of other queues while it waits
  logic [21:0] bytes_q;        // bytes of the turn while it waits
  logic [3:0] idle_q;          // cycles without an offer
  logic starts, mine;
  length_t length;
  assign starts = start_i || start_chain_i;
  assign mine = slot == own_slot_i;
  assign length = start_i ? frame.length : recent ? recent_q.length : next_i.length;
  always_ff @(posedge clk) begin
    reset_q <= 1'b1;
    own_slot_q <= own_slot_i;
    early_slot_q <= early_slot_i;
    recent_q <= insert_frame_i;
    if (insert_i && insert_slot_i == own_slot_i) waits_q <= 1'b1;
    else if (starts && mine) waits_q <= 1'b0;
    if (starts) begin
      last_slot_q <= slot;
      if (slot != last_slot_q) turns_q <= turns_q + 1'b1;
      bytes_q <= (slot == last_slot_q ? bytes_q : '0) + 22'(length);
    end
    if (!waits_q || (starts && mine)) {turns_q, bytes_q} <= '0;
    idle_q <= waits_q && room_i && !valid && !chain ? idle_q + 1'b1 : '0;
    if (rst) {waits_q, turns_q, bytes_q, idle_q, last_slot_q} <= '0;
  end

  // Balance before and behind the frame that started.
  logic signed [22:0] started_with, balance;
  assign behind = own_slot_i - dut.turn_q;  // turns up to the queue's
  assign started_with = dut.settles_q ? 23'(dut.owed_q) + 23'(dut.top_up_q) : 23'(dut.balance_q);
  assign balance = started_with - (dut.started_q ? $signed(23'(dut.length_q)) : 23'sd0);

  always_comb begin
    if (!reset_q) assume (rst);
    else begin
      assume (own_slot_i == own_slot_q);
      if (insert_i) assume (insert_slot_i == early_slot_q);
    end
    assume (dut.weight <= 8'(WEIGHT));
    assume (!start_i || valid);
    assume (!start_chain_i || (chain && !start_i));
    assume (insert_frame_i.length <= length_t'(MAX_LENGTH));
    assume (next_i.length <= length_t'(MAX_LENGTH));
    assume (dut.frame_picked.length <= length_t'(MAX_LENGTH));

    if (reset_q) begin
      if (waits_q) begin
        assert (turns_q <= (SLOT_BITS + 1)'(SLOTS));
        assert (bytes_q <= 22'(TURN_BYTES));
        assert (idle_q <= 4'd6);
      end

      // Invariants.
      assert (2'(dut.have_q) + 2'(dut.started_q) + 2'(dut.pick_q) <= 2'd1);
      assert (dut.frame_q.length <= length_t'(MAX_LENGTH) || !dut.have_q);
      assert (dut.length_q <= length_t'(MAX_LENGTH) || !dut.started_q);
      assert (balance <= $signed(23'(WEIGHT * 2048)) && balance >= -$signed(23'(DEBT)));
      if (dut.have_q || dut.started_q) begin
        assert (dut.top_up_q >= 2048 && 32'(dut.top_up_q) <= WEIGHT * 2048);
        assert (started_with >= -2048);
      end
      if (dut.settles_q) assert (dut.have_q && dut.owed_q <= 0 && dut.owed_q >= -DEBT);
      // A frame is taken at once only if no queue waits.
      assert ((dut.waiting_q == '0) == (!dut.other_valid_q && !dut.inserted_q));
      for (int i = 0; i < SLOTS; i++) assert (dut.behind_q[i] == (SLOT_BITS'(i) > dut.turn_q));
      if (waits_q) begin
        assert (dut.waiting_q[own_slot_i]);
        if (dut.turn_q != own_slot_i)
          assert (32'(turns_q) + 32'(dut.turn_q != last_slot_q) + 32'(behind) <= SLOTS);
        else if (last_slot_q == own_slot_i) assert (turns_q == '0);
        else assert (32'(turns_q) < SLOTS);
        if (dut.turn_q == last_slot_q && !mine)
          assert ($signed({1'b0, bytes_q}) + balance <= $signed(23'(TURN_BYTES - DEBT)));
      end
    end
  end

endmodule
