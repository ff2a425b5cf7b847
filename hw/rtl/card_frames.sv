// The frame path around the header pipeline: arbiter, store, merge, queues, scheduler, and one
// queue of beats per output.
//
// Latency: 2 cycles from a frame's last beat to its header record; 6 cycles from the result to the
// first beat at an output if no other frame is in the queues. One beat per cycle in all. Output
// PORTS is the host. An output that does not take its beats delays no other one. After a reset, the
// card takes no frame while card_admission clears its counts: one cycle per queue.
module card_frames
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS    = 512,
    parameter  int PORTS        = 4,
    parameter  int VES          = 32,
    parameter  int CELLS        = 2048,
    // One queue per output for all VEs, as in the paper, instead of one per VE.
    parameter  bit SINGLE_QUEUE = 1'b0,
    localparam int LINES        = PORTS + 1,
    localparam int SLOT_BITS    = $clog2(VES + 1),
    localparam int OUT_BITS     = $clog2(LINES),
    localparam int QUEUE_BITS   = OUT_BITS + SLOT_BITS,
    localparam int BYTES_BITS   = $clog2(DATA_BITS / 8 + 1)
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
    output logic                  event_unqueued_o,       // dropped by card_admission
    output logic                  event_queued_o,
    output frame_meta_t           event_meta_o,           // of these three
    output ingress_t              event_ingress_o,        // their frame as it was received
    output logic                  event_sent_o,
    output logic [QUEUE_BITS-1:0] event_sent_queue_o,
    output length_t               event_sent_length_o
);

  localparam int BYTES = DATA_BITS / 8;
  localparam int MAX_BEATS = (MAX_LENGTH + BYTES - 1) / BYTES;
  localparam int OUT_DEPTH = 1 << $clog2(2 * MAX_BEATS + 4);
  localparam int RESULTS = 128;

  if (!(DATA_BITS inside {64, 128, 256, 512})) begin : gen_wrong_width
    $error("DATA_BITS is not 64, 128, 256, or 512");
  end
  if (PORTS < 1 || PORTS > 6) begin : gen_wrong_ports
    $error("PORTS is not 1 to 6");
  end
  if (CELLS < 16 || CELLS > 32768 || CELLS != 1 << $clog2(CELLS)) begin : gen_wrong_cells
    $error("CELLS is not a power of two from 16 to 32,768");
  end

  logic room, store_room, counts_ready, in_valid, in_last;
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

  assign room = store_room && counts_ready;
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
      .room_o         (store_room),
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
  length_t merged_length;
  frame_meta_t merged_meta;
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
      .length_o      (merged_length),
      .meta_o        (merged_meta)
  );

  logic accept, pooled, release_, release_pooled;
  logic [QUEUE_BITS-1:0] queue;
  logic [QUEUE_BITS-1:0] release_queue;
  beats_t release_cells;
  // verilator lint_off UNUSEDSIGNAL
  token_t event_token;  // has bits of reserve
  // verilator lint_on UNUSEDSIGNAL
  assign event_ingress_o = event_token[$bits(ingress_t)-1:0];
  card_admission #(
      .DATA_BITS   (DATA_BITS),
      .PORTS       (PORTS),
      .VES         (VES),
      .CELLS       (CELLS - SPARE_CELLS),
      .RESULTS     (RESULTS),
      .SINGLE_QUEUE(SINGLE_QUEUE)
  ) admission (
      .clk,
      .rst,
      .ready_o         (counts_ready),
      .valid_i         (result_valid_i),
      .header_i        (result_i),
      .take_i          (merged_valid && merged_first),
      .accept_o        (accept),
      .pooled_o        (pooled),
      .queue_o         (queue),
      .dropped_o       (event_dropped_o),
      .unqueued_o      (event_unqueued_o),
      .queued_o        (event_queued_o),
      .meta_o          (event_meta_o),
      .token_o         (event_token),
      .release_i       (release_),
      .release_queue_i (release_queue),
      .release_beats_i (release_cells),
      .release_pooled_i(release_pooled),
      .pool_i,
      .wr_quota_i,
      .wr_queue_i,
      .wr_quota_data_i
  );

  logic queue_valid, queue_last;
  logic [LINES-1:0] out_room;
  logic [OUT_BITS-1:0] queue_out;
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
      .valid_i         (merged_valid),
      .first_i         (merged_first),
      .last_i          (merged_last),
      .data_i          (merged_data),
      .length_i        (merged_length),
      .meta_i          (merged_meta),
      .accept_i        (accept),
      .pooled_i        (pooled),
      .queue_i         (queue),
      .room_i          (out_room),
      .valid_o         (queue_valid),
      .out_o           (queue_out),
      .last_o          (queue_last),
      .data_o          (queue_data),
      .bytes_o         (queue_bytes),
      .meta_o          (queue_meta),
      .sent_o          (event_sent_o),
      .sent_queue_o    (event_sent_queue_o),
      .sent_length_o   (event_sent_length_o),
      .release_o       (release_),
      .release_queue_o (release_queue),
      .release_cells_o (release_cells),
      .release_pooled_o(release_pooled),
      .wr_weight_i,
      .wr_queue_i,
      .wr_weight_data_i
  );

  // MARGIN: two of the longest frames, as card_queues chooses one while it reads one.
  for (genvar i = 0; i < LINES; i++) begin : gen_out
    card_fifo #(
        .WIDTH (DATA_BITS + BYTES_BITS + 1 + $bits(frame_meta_t)),
        .DEPTH (OUT_DEPTH),
        .MARGIN(2 * MAX_BEATS)
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
