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

  localparam int INDEX_BITS = $clog2(INPUTS);

  logic within_q;  // a frame of `source_q` has begun
  logic [INDEX_BITS-1:0] source_q, source;
  logic open;

  always_comb begin
    source = source_q;
    open = within_q;
    if (!within_q) begin
      // First valid input behind the last source, else the first one of all.
      for (int i = INPUTS - 1; i >= 0; i--) if (valid_i[i]) source = INDEX_BITS'(i);
      for (int i = INPUTS - 1; i >= 0; i--)
        if (valid_i[i] && INDEX_BITS'(i) > source_q) source = INDEX_BITS'(i);
      open = room_i;
    end
    for (int i = 0; i < INPUTS; i++)
      ready_o[i] = open && !rst && source == INDEX_BITS'(i);
  end

  always_ff @(posedge clk) begin
    data_o <= data_i[source];
    bytes_o <= bytes_i[source];
    last_o <= last_i[source];
    user_o <= user_i[source];
    port_o <= source == INDEX_BITS'(PORTS) ? HOST : port_t'(source);
    valid_o <= valid_i[source] && open && !rst;
    if (rst) begin
      within_q <= 1'b0;
      source_q <= INDEX_BITS'(PORTS);
    end else if (valid_i[source] && open) begin
      within_q <= !last_i[source];
      source_q <= source;
    end
  end

endmodule
