// The card without its registers and port adapters: frame path and header pipeline.
//
// Latency: at most 64 cycles from the acceptance of a frame's last beat to its first beat at an
// idle output. Output and input PORTS are the host. See card_frames and
// card_header.
module card_top
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS     = 512,
    parameter  int PORTS         = 4,
    parameter  int VES           = 32,
    parameter  int CELLS         = 2048,
    parameter  bit SINGLE_QUEUE  = 1'b0,   // see card_frames
    parameter  int VMACS         = 1024,
    parameter  int LEVELS        = 20,
    parameter  int NODES         = 8192,
    parameter  int LEAVES        = 65536,
    parameter  int EXT_FROM      = 21,
    parameter  int EXT_LATENCY   = 4,
    parameter  int GROUPS        = 8192,
    parameter  int BUCKET_BLOCKS = 64,
    parameter  int HOPS          = 8192,
    parameter  int ARPS          = 16384,
    localparam int LINES         = PORTS + 1,
    localparam int QUEUE_BITS    = $clog2(LINES) + $clog2(VES + 1),
    localparam int BYTES_BITS    = $clog2(DATA_BITS / 8 + 1)
) (
    input logic clk,
    input logic rst,

    input  logic [LINES-1:0]                 valid_i,
    output logic [LINES-1:0]                 ready_o,
    input  logic [LINES-1:0][ DATA_BITS-1:0] data_i,
    input  logic [LINES-1:0][BYTES_BITS-1:0] bytes_i,
    input  logic [LINES-1:0]                 last_i,
    input  logic [LINES-1:0][          11:0] user_i,

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

    // Events for counters. Each frame that arrives is accepted or too long.
    output logic                  event_accepted_o,
    output ingress_t              event_accepted_ingress_o,
    output logic                  event_oversize_o,
    output port_t                 event_oversize_port_o,
    // Each accepted frame causes one of these three, and `sent_o` if it was queued.
    output logic                  event_dropped_o,        // by its verdict
    output logic                  event_unqueued_o,       // dropped by card_admission
    output logic                  event_queued_o,
    output frame_meta_t           event_meta_o,           // of these three
    output ingress_t              event_ingress_o,        // their frame as it was received
    output logic                  event_sent_o,
    output logic [QUEUE_BITS-1:0] event_sent_queue_o,
    output length_t               event_sent_length_o,
    output logic                  event_fault_o,   // see card_header
    output logic                  event_excess_o,
    output ve_t                   event_header_ve_o,  // VE of these two

    input  ticks_t       now_i,
    input  logic         wr_valid_i,
    input  table_t       wr_table_i,
    input  ve_t          wr_ve_i,
    input  table_index_t wr_index_i,
    input  table_data_t  wr_data_i,
    output logic         wr_refused_o
);

  logic header_valid, result_valid;
  header_in_t header;
  header_out_t result;
  logic fault, excess;
  assign event_accepted_o = header_valid;
  assign event_accepted_ingress_o = '{port: header.port, length: header.length};
  assign event_fault_o = fault && result_valid;
  assign event_excess_o = excess && result_valid;
  assign event_header_ve_o = result.ve;

  card_frames #(
      .DATA_BITS   (DATA_BITS),
      .PORTS       (PORTS),
      .VES         (VES),
      .CELLS       (CELLS),
      .SINGLE_QUEUE(SINGLE_QUEUE)
  ) frames (
      .clk,
      .rst,
      .valid_i,
      .ready_o,
      .data_i,
      .bytes_i,
      .last_i,
      .user_i,
      .valid_o,
      .ready_i,
      .data_o,
      .bytes_o,
      .last_o,
      .meta_o,
      .pool_i,
      .wr_quota_i,
      .wr_weight_i,
      .wr_queue_i,
      .wr_quota_data_i,
      .wr_weight_data_i,
      .event_oversize_o,
      .event_oversize_port_o,
      .event_dropped_o,
      .event_unqueued_o,
      .event_queued_o,
      .event_meta_o,
      .event_ingress_o,
      .event_sent_o,
      .event_sent_queue_o,
      .event_sent_length_o,
      .header_valid_o(header_valid),
      .header_o      (header),
      .result_valid_i(result_valid),
      .result_i      (result)
  );

  card_header #(
      .VES          (VES),
      .VMACS        (VMACS),
      .LEVELS       (LEVELS),
      .NODES        (NODES),
      .LEAVES       (LEAVES),
      .EXT_FROM     (EXT_FROM),
      .EXT_LATENCY  (EXT_LATENCY),
      .GROUPS       (GROUPS),
      .BUCKET_BLOCKS(BUCKET_BLOCKS),
      .HOPS         (HOPS),
      .ARPS         (ARPS)
  ) header_pipeline (
      .clk,
      .rst,
      .now_i,
      .valid_i (header_valid),
      .header_i(header),
      .valid_o (result_valid),
      .header_o(result),
      .fault_o (fault),
      .excess_o(excess),
      .wr_valid_i,
      .wr_table_i,
      .wr_ve_i,
      .wr_index_i,
      .wr_data_i,
      .wr_refused_o
  );

endmodule
