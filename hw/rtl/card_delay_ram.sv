// Delay line in block RAM: `data_o` is `data_i` of CYCLES cycles ago. For wide and long lines; see
// card_lpm_delay for others.
//
// Not reset but for its place: what entered before a reset comes out undefined.
module card_delay_ram #(
    parameter int WIDTH  = 32,
    parameter int CYCLES = 32   // at least 3
) (
    input  logic             clk,
    input  logic             rst,
    input  logic [WIDTH-1:0] data_i,
    output logic [WIDTH-1:0] data_o
);

  localparam int PLACE_BITS = $clog2(CYCLES);

  logic [PLACE_BITS-1:0] place_q;
  logic [WIDTH-1:0] read;

  card_ram #(
      .WIDTH(WIDTH),
      .DEPTH(1 << PLACE_BITS),
      .COLLIDES(1'b0)
  ) line (
      .clk,
      .wr_en_i  (1'b1),
      .wr_addr_i(place_q),
      .wr_data_i(data_i),
      .rd_addr_i(place_q - PLACE_BITS'(CYCLES - 2)),
      .rd_data_o(read)
  );

  always_ff @(posedge clk) begin
    place_q <= rst ? '0 : place_q + 1'b1;
    data_o <= read;
  end

endmodule
