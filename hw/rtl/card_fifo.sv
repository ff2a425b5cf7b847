// First-in first-out queue in block RAM.
//
// Latency: 1 cycle from `push_i` to `valid_o`. The caller pushes only while there is space;
// `room_o` is 1 while at least MARGIN words are free.
module card_fifo #(
    parameter int WIDTH  = 32,
    parameter int DEPTH  = 64,  // a power of two
    parameter int MARGIN = 1
) (
    input  logic             clk,
    input  logic             rst,
    input  logic             push_i,
    input  logic [WIDTH-1:0] data_i,
    output logic             room_o,
    output logic             valid_o,
    output logic [WIDTH-1:0] data_o,
    input  logic             pop_i     // only with `valid_o`
);

  localparam int BITS = $clog2(DEPTH);

  logic [BITS:0] count_q;
  logic valid_q;  // `count_q` is not 0
  logic [BITS-1:0] wr_q, rd_q, rd_next;
  // The word that was written in the cycle in which the memory was read.
  logic bypass_q;
  logic [WIDTH-1:0] bypass_data_q, read;

  assign rd_next = rd_q + BITS'(pop_i);
  assign valid_o = valid_q;
  assign room_o = count_q <= (BITS+1)'(DEPTH - MARGIN);
  assign data_o = bypass_q ? bypass_data_q : read;

  card_ram #(
      .WIDTH(WIDTH),
      .DEPTH(DEPTH),
      .COLLIDES(1'b0)
  ) words (
      .clk,
      .wr_en_i  (push_i),
      .wr_addr_i(wr_q),
      .wr_data_i(data_i),
      .rd_addr_i(rd_next),
      .rd_data_o(read)
  );

  always_ff @(posedge clk) begin
    bypass_q <= push_i && count_q == (BITS+1)'(pop_i);
    bypass_data_q <= data_i;
    valid_q <= push_i || count_q > (BITS+1)'(pop_i);
    if (rst) begin
      valid_q <= 1'b0;
      count_q <= '0;
      wr_q <= '0;
      rd_q <= '0;
    end else begin
      count_q <= count_q + (BITS+1)'(push_i) - (BITS+1)'(pop_i);
      wr_q <= wr_q + BITS'(push_i);
      rd_q <= rd_next;
    end
  end

endmodule
