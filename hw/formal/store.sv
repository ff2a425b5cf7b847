// Arbiter and store: the store of beats and the queue of results never overflow, whatever frames
// come and however late they are taken. Frames are not mixed: the beats between a frame's first and
// last one are of one port. Each beat that an input offers stays until it is accepted.
module store
  import card_pkg::*;
  import card_frame_pkg::*;
#(
    parameter  int DATA_BITS  = 512,
    parameter  int PORTS      = 4,
    parameter  int DEPTH      = 128,
    parameter  int RESULTS    = 128,
    localparam int INPUTS     = PORTS + 1,
    localparam int BYTES      = DATA_BITS / 8,
    localparam int BYTES_BITS = $clog2(BYTES + 1)
) (
    input logic                              clk,
    input logic                              rst,
    input logic [INPUTS-1:0]                 valid_i,
    input logic [INPUTS-1:0][ DATA_BITS-1:0] data_i,
    input logic [INPUTS-1:0][BYTES_BITS-1:0] bytes_i,
    input logic [INPUTS-1:0]                 last_i,
    input logic [INPUTS-1:0][          11:0] user_i,
    input logic                              take_i,
    input logic                              frame_done_i
);

  localparam int MAX_BEATS = (MAX_LENGTH + BYTES - 1) / BYTES;
  localparam int BITS = $clog2(DEPTH);
  localparam int SLACK = 4;
  localparam int FRAME_BITS = $clog2(RESULTS + 1);

  logic [INPUTS-1:0] ready;
  logic room, valid, last, header_valid, oversize, out_last;
  logic [DATA_BITS-1:0] data, out_data;
  logic [BYTES_BITS-1:0] bytes;
  logic [11:0] user;
  port_t port, oversize_port;
  header_in_t header;
  card_arbiter #(
      .DATA_BITS(DATA_BITS),
      .PORTS    (PORTS)
  ) arbiter (
      .clk,
      .rst,
      .valid_i,
      .ready_o(ready),
      .data_i,
      .bytes_i,
      .last_i,
      .user_i,
      .room_i (room),
      .valid_o(valid),
      .data_o (data),
      .bytes_o(bytes),
      .last_o (last),
      .user_o (user),
      .port_o (port)
  );
  card_store #(
      .DATA_BITS(DATA_BITS),
      .DEPTH    (DEPTH),
      .RESULTS  (RESULTS)
  ) dut (
      .clk,
      .rst,
      .valid_i        (valid),
      .data_i         (data),
      .bytes_i        (bytes),
      .last_i         (last),
      .user_i         (user),
      .port_i         (port),
      .room_o         (room),
      .header_valid_o (header_valid),
      .header_o       (header),
      .oversize_o     (oversize),
      .oversize_port_o(oversize_port),
      .take_i,
      .data_o         (out_data),
      .last_o         (out_last),
      .frame_done_i
  );

  // Beats of the frame whose beats the arbiter accepts, or of the last one, up to MAX_BEATS.
  logic [7:0] beats_q;
  logic [INPUTS-1:0] accepts;
  logic starts_q, started_q = 1'b0;
  logic within_q;  // a frame has begun and not ended, as the arbiter's output shows it
  port_t port_q;
  assign accepts = valid_i & ready;
  always_ff @(posedge clk) begin
    started_q <= 1'b1;
    if (accepts != '0) begin
      starts_q <= (accepts & last_i) != '0;
      if (starts_q) beats_q <= 8'd1;
      else if (beats_q < 8'(MAX_BEATS)) beats_q <= beats_q + 1'b1;
    end
    if (valid) begin
      within_q <= !last;
      port_q <= port;
    end
    if (rst) begin
      starts_q <= 1'b1;
      beats_q <= '0;
      within_q <= 1'b0;
    end
  end

  // Beats of whole frames, and of the frame that arrives.
  logic [BITS:0] whole, part;
  logic [BITS+1:0] all;
  assign whole = dut.start_q - dut.rd_q;
  assign part = dut.wr_q - dut.start_q;
  assign all = (BITS + 2)'(whole) + (BITS + 2)'(part) + (BITS + 2)'(dut.keep);

  always_comb begin
    if (!started_q) assume (rst);
    for (int i = 0; i < INPUTS; i++) begin
      assume (bytes_i[i] != '0 && bytes_i[i] <= BYTES_BITS'(BYTES));
      if (!last_i[i]) assume (bytes_i[i] == BYTES_BITS'(BYTES));
    end
    // card_merge takes beats of whole frames only.
    if (take_i) assume (whole != '0);
    if (frame_done_i) assume (dut.frames_q != '0);

    if (started_q) begin
      assert (dut.used <= (BITS + 1)'(DEPTH));
      assert (dut.frames_q <= FRAME_BITS'(RESULTS));
      assert ((accepts & (accepts - 1'b1)) == '0);
      if (valid && within_q) assert (port == port_q);

      // Invariants.
      assert (beats_q <= 8'(MAX_BEATS));
      assert (all <= (BITS + 2)'(DEPTH - MAX_BEATS - SLACK + 1) + (BITS + 2)'(beats_q));
      if (!dut.oversize_q && (!starts_q || valid)) assert (beats_q == 8'(part) + 8'(valid));
      if (dut.oversize_q && !starts_q) assert (beats_q == 8'(MAX_BEATS));
      assert (whole <= (BITS + 1)'(DEPTH) && part <= (BITS + 1)'(MAX_BEATS));
      assert (dut.oversize_q || dut.length_q == 12'(part) * 12'(BYTES));
      assert (dut.first_q == (dut.length_q == '0 && !dut.oversize_q));
      assert (dut.length_q <= 12'(MAX_LENGTH));
      if (dut.oversize_q) assert (!dut.first_q);
      if (valid) begin
        assert (bytes != '0 && bytes <= BYTES_BITS'(BYTES));
        if (!last) assert (bytes == BYTES_BITS'(BYTES));
      end
      assert (arbiter.within_q == !starts_q);
      assert (valid ? starts_q == last : starts_q == !within_q);
      assert (within_q == !dut.first_q);
      assert (dut.left_q == 11'(MAX_LENGTH) - 11'(dut.length_q));
      if (valid) assert (port == HOST || port < port_t'(PORTS));
      if (within_q) assert (port_q == HOST || port_q < port_t'(PORTS));
      if (!starts_q) begin
        assert (port == HOST || port < port_t'(PORTS));
        assert (arbiter.source_q == INPUTS'(1) << (port == HOST ? port_t'(PORTS) : port));
        if (!valid) assert (port == port_q);
      end
      assert (dut.frames_q + FRAME_BITS'(valid && last)
          <= FRAME_BITS'(RESULTS - SLACK + 1) + FRAME_BITS'(starts_q));
    end
  end

endmodule
