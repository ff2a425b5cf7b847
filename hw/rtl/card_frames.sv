// The frame path around the header pipeline: arbiter, store, merge, queues, scheduler, and one
// queue of beats per output.
//
// Latency: 2 cycles from a frame's last beat to its header record. From the result to the first
// beat at an idle output: 5 cycles for a frame of one beat, else 6. One beat per cycle in all.
// Output PORTS is the host. An output that does not take its beats delays no other one.
module card_frames
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS  = 512,
    parameter  int PORTS      = 4,
    parameter  int VES        = 32,
    parameter  int CELLS      = 2048,
    localparam int LINES      = PORTS + 1,
    localparam int SLOT_BITS  = $clog2(VES + 1),
    localparam int OUT_BITS   = $clog2(LINES),
    localparam int QUEUE_BITS = OUT_BITS + SLOT_BITS,
    localparam int BYTES_BITS = $clog2(DATA_BITS / 8 + 1)
) (
    input logic clk,
    input logic rst,

    input  logic [LINES-1:0]                 valid_i,
    output logic [LINES-1:0]                 ready_o,
    input  logic [LINES-1:0][ DATA_BITS-1:0] data_i,
    input  logic [LINES-1:0][BYTES_BITS-1:0] bytes_i,
    input  logic [LINES-1:0]                 last_i,
    input  logic [LINES-1:0][          11:0] user_i,

    output logic        header_valid_o,
    output header_in_t  header_o,
    input  logic        result_valid_i,
    input  header_out_t result_i,

    output logic        [LINES-1:0]                 valid_o,
    input  logic        [LINES-1:0]                 ready_i,
    output logic        [LINES-1:0][ DATA_BITS-1:0] data_o,
    output logic        [LINES-1:0][BYTES_BITS-1:0] bytes_o,
    output logic        [LINES-1:0]                 last_o,
    output frame_meta_t [LINES-1:0]                 meta_o,

    // Super page: quotas and weights of the queues {output, slot}.
    input logic [          15:0] pool_i,
    input logic                  wr_quota_i,
    input logic                  wr_weight_i,
    input logic [QUEUE_BITS-1:0] wr_queue_i,
    input quota_t                wr_quota_data_i,
    input logic [           7:0] wr_weight_data_i,

    // Events for counters: each frame causes one of these four, and `sent_o` if it was queued.
    output logic                  event_oversize_o,
    output port_t                 event_oversize_port_o,
    output logic                  event_dropped_o,        // by its verdict
    output logic                  event_unqueued_o,       // dropped by card_queues
    output logic                  event_queued_o,
    output port_t                 event_port_o,           // egress port of these three
    output frame_meta_t           event_meta_o,
    output logic                  event_sent_o,
    output logic [QUEUE_BITS-1:0] event_sent_queue_o,
    output length_t               event_sent_length_o
);

  localparam int BYTES = DATA_BITS / 8;
  localparam int MAX_BEATS = (MAX_LENGTH + BYTES - 1) / BYTES;
  localparam int OUT_DEPTH = 1 << $clog2(2 * MAX_BEATS + 4);
  localparam int RESULTS = 128;

  logic room, in_valid, in_last;
  logic [DATA_BITS-1:0] in_data;
  logic [BYTES_BITS-1:0] in_bytes;
  logic [11:0] in_user;
  port_t in_port;
  card_arbiter #(
      .DATA_BITS(DATA_BITS),
      .PORTS    (PORTS)
  ) arbiter (
      .clk,
      .rst,
      .valid_i,
      .ready_o,
      .data_i,
      .bytes_i,
      .last_i,
      .user_i,
      .room_i (room),
      .valid_o(in_valid),
      .data_o (in_data),
      .bytes_o(in_bytes),
      .last_o (in_last),
      .user_o (in_user),
      .port_o (in_port)
  );

  logic take, store_last, frame_done;
  logic [DATA_BITS-1:0] store_data;
  card_store #(
      .DATA_BITS(DATA_BITS),
      .RESULTS  (RESULTS)
  ) store (
      .clk,
      .rst,
      .valid_i        (in_valid),
      .data_i         (in_data),
      .bytes_i        (in_bytes),
      .last_i         (in_last),
      .user_i         (in_user),
      .port_i         (in_port),
      .room_o         (room),
      .header_valid_o,
      .header_o,
      .oversize_o     (event_oversize_o),
      .oversize_port_o(event_oversize_port_o),
      .take_i         (take),
      .data_o         (store_data),
      .last_o         (store_last),
      .frame_done_i   (frame_done)
  );

  logic merged_valid, merged_first, merged_last;
  logic [DATA_BITS-1:0] merged_data;
  logic [BYTES_BITS-1:0] merged_bytes;
  length_t merged_length;
  card_merge #(
      .DATA_BITS(DATA_BITS),
      .RESULTS  (RESULTS)
  ) merge (
      .clk,
      .rst,
      .header_valid_i(result_valid_i),
      .header_i      (result_i),
      .data_i        (store_data),
      .last_i        (store_last),
      .take_o        (take),
      .frame_done_o  (frame_done),
      .valid_o       (merged_valid),
      .first_o       (merged_first),
      .last_o        (merged_last),
      .data_o        (merged_data),
      .bytes_o       (merged_bytes),
      .length_o      (merged_length),
      .port_o        (event_port_o),
      .meta_o        (event_meta_o),
      .dropped_o     (event_dropped_o)
  );

  logic [LINES-1:0][(1<<SLOT_BITS)-1:0] waiting;
  logic idle, start, queue_valid, queue_last;
  logic [OUT_BITS-1:0] start_out, queue_out;
  logic [SLOT_BITS-1:0] start_slot;
  logic [DATA_BITS-1:0] queue_data;
  logic [BYTES_BITS-1:0] queue_bytes;
  frame_meta_t queue_meta;
  card_queues #(
      .DATA_BITS(DATA_BITS),
      .PORTS    (PORTS),
      .VES      (VES),
      .CELLS    (CELLS)
  ) queues (
      .clk,
      .rst,
      .valid_i        (merged_valid),
      .first_i        (merged_first),
      .last_i         (merged_last),
      .data_i         (merged_data),
      .bytes_i        (merged_bytes),
      .length_i       (merged_length),
      .port_i         (event_port_o),
      .meta_i         (event_meta_o),
      .queued_o       (event_queued_o),
      .dropped_o      (event_unqueued_o),
      .waiting_o      (waiting),
      .idle_o         (idle),
      .start_i        (start),
      .start_out_i    (start_out),
      .start_slot_i   (start_slot),
      .start_length_o (event_sent_length_o),
      .valid_o        (queue_valid),
      .out_o          (queue_out),
      .last_o         (queue_last),
      .data_o         (queue_data),
      .bytes_o        (queue_bytes),
      .meta_o         (queue_meta),
      .pool_i,
      .wr_quota_i,
      .wr_queue_i,
      .wr_quota_data_i
  );

  logic [LINES-1:0] out_room;
  card_scheduler #(
      .PORTS(PORTS),
      .VES  (VES)
  ) scheduler (
      .clk,
      .rst,
      .waiting_i       (waiting),
      .room_i          (out_room),
      .idle_i          (idle),
      .start_o         (start),
      .out_o           (start_out),
      .slot_o          (start_slot),
      .length_i        (event_sent_length_o),
      .wr_weight_i,
      .wr_queue_i,
      .wr_weight_data_i
  );
  assign event_sent_o = start;
  assign event_sent_queue_o = {start_out, start_slot};

  // MARGIN: the longest frame, and the beat that comes from the memory of card_queues.
  for (genvar i = 0; i < LINES; i++) begin : gen_out
    card_fifo #(
        .WIDTH (DATA_BITS + BYTES_BITS + 1 + $bits(frame_meta_t)),
        .DEPTH (OUT_DEPTH),
        .MARGIN(MAX_BEATS + 2)
    ) beats (
        .clk,
        .rst,
        .push_i (queue_valid && queue_out == OUT_BITS'(i)),
        .data_i ({queue_data, queue_bytes, queue_last, queue_meta}),
        .room_o (out_room[i]),
        .valid_o(valid_o[i]),
        .data_o ({data_o[i], bytes_o[i], last_o[i], meta_o[i]}),
        .pop_i  (valid_o[i] && ready_i[i])
    );
  end

endmodule
