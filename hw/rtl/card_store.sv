// Holds the beats of frames while the header pipeline works on their first bytes.
//
// Latency: 1 cycle from a frame's last beat to its header record. `room_o` keeps space for the
// longest frame and for SLACK beats and records that are under way. A frame above MAX_LENGTH bytes
// leaves no beat and no record; `oversize_o` reports it.
// Invariant: records leave in the order of the frames in the memory; at most RESULTS frames are
// between `header_valid_o` and `frame_done_i`.
module card_store
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS  = 512,
    parameter  int DEPTH      = DATA_BITS >= 512 ? 128 : 65536 / DATA_BITS,  // a power of two
    parameter  int RESULTS    = 128,
    localparam int BYTES_BITS = $clog2(DATA_BITS / 8 + 1)
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  valid_i,
    input  logic [ DATA_BITS-1:0] data_i,
    input  logic [BYTES_BITS-1:0] bytes_i,
    input  logic                  last_i,
    input  logic [          11:0] user_i,
    input  port_t                 port_i,
    output logic                  room_o,

    output logic       header_valid_o,
    output header_in_t header_o,
    output logic       oversize_o,
    output port_t      oversize_port_o,

    // The oldest beat; `take_i` moves on to the next one.
    input  logic                 take_i,
    output logic [DATA_BITS-1:0] data_o,
    output logic                 last_o,
    input  logic                 frame_done_i
);

  localparam int BYTES = DATA_BITS / 8;
  localparam int MAX_BEATS = (MAX_LENGTH + BYTES - 1) / BYTES;
  localparam int HEADER_BEATS = HEADER_BYTES / BYTES;
  localparam int INDEX_BITS = $clog2(HEADER_BEATS + 1);
  localparam int BITS = $clog2(DEPTH);
  localparam int FRAME_BITS = $clog2(RESULTS + 1);
  localparam int SLACK = 4;

  logic [BITS:0] wr_q, start_q, rd_q, rd_next, used;
  // verilator lint_off UNUSEDSIGNAL
  logic [BITS:0] rd_ahead;  // without the highest bit
  // verilator lint_on UNUSEDSIGNAL
  logic [FRAME_BITS-1:0] frames_q;
  logic first_q, oversize_q, too_long, keep, emit;
  logic [11:0] length_q, length;
  logic [10:0] left_q;  // MAX_LENGTH - `length_q`
  logic [INDEX_BITS-1:0] index_q;  // beat of the first 64 bytes, HEADER_BEATS behind them
  header_bytes_t bytes_q, bytes;
  logic [DATA_BITS-1:0] masked;

  assign used = wr_q - rd_q;
  assign room_o = used <= (BITS+1)'(DEPTH - MAX_BEATS - SLACK)
      && frames_q <= FRAME_BITS'(RESULTS - SLACK);
  assign length = length_q + 12'(bytes_i);
  assign too_long = oversize_q || 11'(bytes_i) > left_q;
  assign keep = valid_i && !too_long;
  assign emit = keep && last_i;
  assign rd_next = rd_q + (BITS+1)'(take_i);
  assign rd_ahead = rd_next + 1'b1;

  always_comb begin
    for (int i = 0; i < BYTES; i++)
      masked[8*i+:8] = BYTES_BITS'(i) < bytes_i ? data_i[8*i+:8] : 8'd0;
    bytes = first_q ? '0 : bytes_q;
    for (int i = 0; i < HEADER_BEATS; i++)
      if (index_q == INDEX_BITS'(i)) bytes[DATA_BITS*i+:DATA_BITS] = masked;
  end

  // The end of the oldest beat's frame, early in the cycle: if the beat before was taken one cycle
  // ago, from the word behind that one, which is old as its frame has a result; else from its own.
  logic last, last_ahead, last_q, last_ahead_q, took_q;
  assign last_o = took_q ? last_ahead_q : last_q;
  card_ram #(
      .WIDTH   (1),
      .DEPTH   (DEPTH),
      .COLLIDES(1'b0)
  ) ends (
      .clk,
      .wr_en_i  (keep),
      .wr_addr_i(wr_q[BITS-1:0]),
      .wr_data_i(last_i),
      .rd_addr_i(rd_ahead[BITS-1:0]),
      .rd_data_o(last_ahead)
  );
  card_ram #(
      .WIDTH(DATA_BITS + 1),
      .DEPTH(DEPTH),
      .COLLIDES(1'b0)
  ) beats (
      .clk,
      .wr_en_i  (keep),
      .wr_addr_i(wr_q[BITS-1:0]),
      .wr_data_i({last_i, data_i}),
      .rd_addr_i(rd_next[BITS-1:0]),
      .rd_data_o({last, data_o})
  );

  always_ff @(posedge clk) begin
    header_o.bytes <= bytes;
    header_o.length <= length[10:0];
    header_o.port <= port_i;
    header_o.segment <= port_i == HOST ? '0 : user_i;
    header_o.ve <= user_i[11:4];
    header_o.vport <= user_i[3:0];
    header_o.token <= token_t'(ingress_t'{port: port_i, length: length[10:0]});
    oversize_port_o <= port_i;
    header_valid_o <= emit && !rst;
    oversize_o <= valid_i && last_i && too_long && !rst;
    if (valid_i) begin
      bytes_q <= bytes;
      first_q <= last_i;
      oversize_q <= too_long && !last_i;
      length_q <= last_i ? '0 : too_long ? length_q : length;
      left_q <= last_i ? 11'(MAX_LENGTH) : too_long ? left_q : left_q - 11'(bytes_i);
      if (last_i) index_q <= '0;
      else if (index_q != INDEX_BITS'(HEADER_BEATS)) index_q <= index_q + 1'b1;
      if (keep) wr_q <= wr_q + 1'b1;
      if (last_i) begin
        if (too_long) wr_q <= start_q;
        else start_q <= wr_q + 1'b1;
      end
    end
    rd_q <= rd_next;
    took_q <= take_i;
    last_q <= last;
    last_ahead_q <= last_ahead;
    frames_q <= frames_q + FRAME_BITS'(emit) - FRAME_BITS'(frame_done_i);
    if (rst) begin
      first_q <= 1'b1;
      oversize_q <= 1'b0;
      length_q <= '0;
      left_q <= 11'(MAX_LENGTH);
      index_q <= '0;
      wr_q <= '0;
      start_q <= '0;
      rd_q <= '0;
      frames_q <= '0;
    end
  end

endmodule
