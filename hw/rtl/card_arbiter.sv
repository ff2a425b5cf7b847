// Joins the ports and the host (the last input) to one stream of frames, round robin by frame.
//
// Latency: 1 cycle. A frame starts only while `room_i` says that card_store has space for the
// longest frame. So nothing behind the arbiter needs back-pressure. A source that pauses within a
// frame holds up all others: port adapters offer whole frames. After a reset each source starts
// with a new frame.
module card_arbiter
  import card_pkg::*;
#(
    parameter  int DATA_BITS  = 512,
    parameter  int PORTS      = 4,
    localparam int INPUTS     = PORTS + 1,
    localparam int BYTES_BITS = $clog2(DATA_BITS / 8 + 1)
) (
    input  logic                                  clk,
    input  logic                                  rst,
    input  logic [INPUTS-1:0]                     valid_i,
    output logic [INPUTS-1:0]                     ready_o,
    input  logic [INPUTS-1:0][     DATA_BITS-1:0] data_i,
    input  logic [INPUTS-1:0][    BYTES_BITS-1:0] bytes_i,
    input  logic [INPUTS-1:0]                     last_i,
    input  logic [INPUTS-1:0][              11:0] user_i,   // segment; of the host {ve, vport}
    input  logic                                  room_i,
    output logic                                  valid_o,
    output logic             [     DATA_BITS-1:0] data_o,
    output logic             [    BYTES_BITS-1:0] bytes_o,
    output logic                                  last_o,
    output logic             [              11:0] user_o,
    output port_t                                 port_o
);

  logic within_q;  // a frame of `source_q` has begun
  logic open, accepts;
  logic [INPUTS-1:0] source_q, source, next, behind_q;  // one bit each, but `behind_q`
  logic [INPUTS-1:0] behind;
  port_t port;
  logic [DATA_BITS-1:0] data;
  logic [BYTES_BITS-1:0] bytes;
  logic [11:0] user;
  logic last;

  card_turn #(
      .LINES(INPUTS)
  ) turn (
      .waiting_i(valid_i),
      .behind_i (behind_q),
      .next_o   (next)
  );

  assign source = within_q ? source_q : next;
  assign open = (within_q || room_i) && !rst;
  assign ready_o = open ? source : '0;
  assign accepts = open && (within_q ? (valid_i & source_q) : valid_i) != '0;

  always_comb begin
    {data, bytes, user, last} = '0;
    port = '0;
    behind = '0;
    for (int i = 0; i < INPUTS; i++) begin
      data |= data_i[i] & {DATA_BITS{source[i]}};
      bytes |= bytes_i[i] & {BYTES_BITS{source[i]}};
      user |= user_i[i] & {12{source[i]}};
      last |= last_i[i] && source[i];
      port |= (i == PORTS ? HOST : port_t'(i)) & {$bits(port_t){next[i]}};
      behind |= {INPUTS{next[i]}} & ~((INPUTS'(2) << i) - 1'b1);
    end
  end

  always_ff @(posedge clk) begin
    data_o <= data;
    bytes_o <= bytes;
    last_o <= last;
    user_o <= user;
    if (!within_q) port_o <= port;
    valid_o <= accepts;
    if (rst) begin
      within_q <= 1'b0;
      behind_q <= '0;
    end else if (accepts) begin
      within_q <= !last;
      source_q <= source;
      if (!within_q) behind_q <= behind;
    end
  end

endmodule
