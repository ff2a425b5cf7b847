// The queues of beats at the outputs never overflow, whatever frames the queues hold and however
// slowly the outputs take the beats. See fifo.sv for the queue of beats.
module outputs
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS  = 512,
    parameter  int PORTS      = 4,
    parameter  int VES        = 8,
    parameter  int CELLS      = 64,
    localparam int LINES      = PORTS + 1,
    localparam int OUT_BITS   = $clog2(LINES),
    localparam int QUEUE_BITS = OUT_BITS + $clog2(VES + 1),
    localparam int BYTES      = DATA_BITS / 8
) (
    input logic                  clk,
    input logic                  rst,
    input logic                  valid_i,
    input logic                  first_i,
    input logic                  last_i,
    input logic [ DATA_BITS-1:0] data_i,
    input length_t               length_i,
    input frame_meta_t           meta_i,
    input logic                  accept_i,
    input logic                  pooled_i,
    input logic [QUEUE_BITS-1:0] queue_i,
    input logic [     LINES-1:0] ready_i,
    input logic                  wr_weight_i,
    input logic [QUEUE_BITS-1:0] wr_queue_i,
    input logic [           7:0] wr_weight_data_i
);

  // As in card_frames.
  localparam int MAX_BEATS = (MAX_LENGTH + BYTES - 1) / BYTES;
  localparam int OUT_DEPTH = 1 << $clog2(2 * MAX_BEATS + 4);
  localparam int MARGIN = 2 * MAX_BEATS;
  localparam int COUNT_BITS = $clog2(OUT_DEPTH) + 1;

  logic valid, last, sent, release_, release_pooled;
  logic [LINES-1:0] room, out_valid, out_last;
  logic [OUT_BITS-1:0] out;
  logic [DATA_BITS-1:0] data;
  logic [$clog2(BYTES+1)-1:0] bytes;
  frame_meta_t meta;
  logic [QUEUE_BITS-1:0] sent_queue, release_queue;
  length_t sent_length;
  beats_t release_cells;
  card_queues #(
      .DATA_BITS(DATA_BITS),
      .PORTS    (PORTS),
      .VES      (VES),
      .CELLS    (CELLS)
  ) dut (
      .clk,
      .rst,
      .valid_i,
      .first_i,
      .last_i,
      .data_i,
      .length_i,
      .meta_i,
      .accept_i,
      .pooled_i,
      .queue_i,
      .room_i          (room),
      .valid_o         (valid),
      .out_o           (out),
      .last_o          (last),
      .data_o          (data),
      .bytes_o         (bytes),
      .meta_o          (meta),
      .sent_o          (sent),
      .sent_queue_o    (sent_queue),
      .sent_length_o   (sent_length),
      .release_o       (release_),
      .release_queue_o (release_queue),
      .release_cells_o (release_cells),
      .release_pooled_o(release_pooled),
      .wr_weight_i,
      .wr_queue_i,
      .wr_weight_data_i
  );

  logic started_q = 1'b0;
  logic [LINES-1:0][COUNT_BITS-1:0] count;
  logic [LINES-1:0][9:0] all;  // with the beats of the frame that are on their way
  always_ff @(posedge clk) started_q <= 1'b1;

  for (genvar i = 0; i < LINES; i++) begin : gen_out
    card_fifo #(
        .WIDTH (1),
        .DEPTH (OUT_DEPTH),
        .MARGIN(MARGIN)
    ) beats (
        .clk,
        .rst,
        .push_i (valid && out == OUT_BITS'(i)),
        .data_i (last),
        .room_o (room[i]),
        .valid_o(out_valid[i]),
        .data_o (out_last[i]),
        .pop_i  (out_valid[i] && ready_i[i])
    );
    assign count[i] = beats.count_q;
    assign all[i] = 10'(count[i])
        + (out == OUT_BITS'(i) ? 10'(valid) + (dut.busy_q ? 10'(dut.left) : '0) : '0);
    always_comb
      if (started_q) begin
        assert (all[i] <= 10'(OUT_DEPTH));
        // An output with a chosen frame has space for it; so has one that may be chosen.
        if (dut.next_hot_q[i]) assert (all[i] <= 10'(OUT_DEPTH - MAX_BEATS));
        else if (dut.able[i]) assert (all[i] <= 10'(OUT_DEPTH - MARGIN + MAX_BEATS));
        assert (out_valid[i] == (count[i] != '0));
        if (dut.gen_output[i].scheduler.room_q)
          assert (10'(count[i]) <= 10'(OUT_DEPTH - MARGIN + 1));
        assert (dut.next_hot_q[i] == (dut.next_valid_q && dut.next_out_q == OUT_BITS'(i)));
        assert (!dut.able[i] || dut.gen_output[i].scheduler.have_q);
        assert (!dut.next_hot_q[i] || dut.gen_output[i].scheduler.have_q);
        assert (2'(dut.gen_output[i].scheduler.have_q) + 2'(dut.gen_output[i].scheduler.started_q)
            + 2'(dut.gen_output[i].scheduler.pick_q) <= 2'd1);
        // The frame that began last is that of this output's scheduler.
        assert (!dut.gen_output[i].scheduler.started_q || (dut.began_q && out == OUT_BITS'(i)));
      end
  end

  always_comb begin
    if (!started_q) assume (rst);
    // What card_merge gives, the memories return: the number of beats is that of the length.
    if (dut.begins || dut.chains) begin
      assume (dut.begin_frame.length != '0 && dut.begin_frame.length <= length_t'(MAX_LENGTH));
      assume (dut.begin_frame.single == (dut.begin_frame.length <= length_t'(BYTES)));
    end
    if (started_q) begin
      assert (!dut.next_valid_q || 32'(dut.next_out_q) < LINES);
      if (dut.busy_q)
        assert (valid && dut.left != '0 && dut.left < beats_t'(MAX_BEATS) && 32'(out) < LINES);
      if (dut.began_q) assert (dut.length_q != '0 && dut.length_q <= length_t'(MAX_LENGTH)
          && dut.busy_q == (dut.length_q > length_t'(BYTES)));
    end
  end

endmodule
