// External memory of fixed latency (SRAM) that takes one read and one write per cycle.
//
// Latency: `rd_data_o` has the word at `rd_addr_i` LATENCY cycles later, as it was when the read
// began. Writes take effect in the cycle after `wr_en_i`, so their order relative to writes of a
// card_ram is kept. LATENCY 1 is a card_ram. Contents and bounds: see card_ram.
module card_ram_ext #(
    parameter  int WIDTH     = 32,
    parameter  int DEPTH     = 512,
    parameter  int LATENCY   = 4,
    localparam int ADDR_BITS = DEPTH > 1 ? $clog2(DEPTH) : 1
) (
    input  logic                 clk,
    input  logic                 wr_en_i,
    input  logic [ADDR_BITS-1:0] wr_addr_i,
    input  logic [    WIDTH-1:0] wr_data_i,
    input  logic [ADDR_BITS-1:0] rd_addr_i,
    output logic [    WIDTH-1:0] rd_data_o
);

  logic [WIDTH-1:0] read;

  card_ram #(
      .WIDTH(WIDTH),
      .DEPTH(DEPTH)
  ) words (
      .clk,
      .wr_en_i,
      .wr_addr_i,
      .wr_data_i,
      .rd_addr_i,
      .rd_data_o(read)
  );

  card_lpm_delay #(
      .WIDTH (WIDTH),
      .CYCLES(LATENCY - 1)
  ) way (
      .clk,
      .data_i(read),
      .data_o(rd_data_o)
  );

endmodule
