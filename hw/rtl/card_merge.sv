// Joins the results of the header pipeline with the frames in card_store, in order. Replaces the
// first 64 bytes, cuts the length, and discards the frames that the header pipeline drops.
//
// Latency: 2 cycles from `header_valid_i` to the frame's first beat. One beat per cycle, without a
// gap within a frame; nothing stops the output.
module card_merge
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter int DATA_BITS = 512,
    parameter int RESULTS   = 128  // a power of two
) (
    input  logic        clk,
    input  logic        rst,
    input  logic        header_valid_i,
    // The token and the port are for card_admission.
    // verilator lint_off UNUSEDSIGNAL
    input  header_out_t header_i,
    // verilator lint_on UNUSEDSIGNAL

    input  logic [DATA_BITS-1:0] data_i,
    input  logic                 last_i,
    output logic                 take_o,
    output logic                 frame_done_o,

    output logic                 valid_o,
    output logic                 first_o,
    output logic                 last_o,
    output logic [DATA_BITS-1:0] data_o,
    output length_t              length_o,  // of the frame
    output frame_meta_t          meta_o
);

  localparam int BYTES = DATA_BITS / 8;
  localparam int HEADER_BEATS = HEADER_BYTES / BYTES;
  localparam int INDEX_BITS = $clog2(HEADER_BEATS + 1);

  typedef struct packed {
    header_bytes_t bytes;
    length_t       length;
    length_t       rest;    // `length` without the first beat
    logic          single;  // one beat
    frame_meta_t   meta;
  } result_t;

  result_t result_in, result;
  // The credits of card_store keep space.
  // verilator lint_off UNUSEDSIGNAL
  logic room;
  // verilator lint_on UNUSEDSIGNAL
  logic valid, first_q, ended_q, forward, ends;
  length_t left_q;
  logic [INDEX_BITS-1:0] index_q;
  header_bytes_t bytes_q;  // of `result` one cycle ago

  assign result_in = '{
      bytes: header_i.bytes,
      length: header_i.length,
      rest: header_i.length - length_t'(BYTES),
      single: header_i.length <= length_t'(BYTES),
      meta: '{
          verdict: header_i.verdict,
          group: header_i.group,
          owned: header_i.owned,
          ve: header_i.ve,
          vport: header_i.vport,
          segment: header_i.segment
      }
  };

  card_fifo #(
      .WIDTH($bits(result_t)),
      .DEPTH(RESULTS)
  ) results (
      .clk,
      .rst,
      .push_i (header_valid_i),
      .data_i (result_in),
      .room_o (room),
      .valid_o(valid),
      .data_o (result),
      .pop_i  (frame_done_o)
  );

  assign take_o = valid;
  assign frame_done_o = valid && last_i;
  assign forward = !result.meta.verdict[3];
  assign ends = first_q ? result.single : left_q <= length_t'(BYTES);

  always_ff @(posedge clk) begin
    valid_o <= valid && forward && !ended_q && !rst;
    first_o <= first_q;
    last_o <= ends || last_i;
    length_o <= result.length;
    meta_o <= result.meta;
    // The word of `results` comes late.
    if (first_q) data_o <= result.bytes[DATA_BITS-1:0];
    else if (index_q == INDEX_BITS'(HEADER_BEATS)) data_o <= data_i;
    else data_o <= bytes_q[DATA_BITS*index_q+:DATA_BITS];
    bytes_q <= result.bytes;
    if (valid) begin
      first_q <= last_i;
      ended_q <= (ended_q || ends) && !last_i;
      left_q <= first_q ? result.rest : left_q - length_t'(BYTES);
      if (last_i) index_q <= '0;
      else if (index_q != INDEX_BITS'(HEADER_BEATS)) index_q <= index_q + 1'b1;
    end
    if (rst) begin
      first_q <= 1'b1;
      ended_q <= 1'b0;
      index_q <= '0;
    end
  end

endmodule
