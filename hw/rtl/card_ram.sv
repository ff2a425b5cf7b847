// Memory with one write port and one read port; becomes block RAM.
//
// Latency: `rd_data_o` has the word at `rd_addr_i` one cycle later. A read in the cycle of a write
// to the same word returns the old word. The contents are not reset: the driver clears them. There
// are no words from DEPTH on: callers check their bounds.
module card_ram #(
    parameter  int WIDTH     = 32,
    parameter  int DEPTH     = 512,
    localparam int ADDR_BITS = DEPTH > 1 ? $clog2(DEPTH) : 1
) (
    input  logic                 clk,
    input  logic                 wr_en_i,
    input  logic [ADDR_BITS-1:0] wr_addr_i,
    input  logic [    WIDTH-1:0] wr_data_i,
    input  logic [ADDR_BITS-1:0] rd_addr_i,
    output logic [    WIDTH-1:0] rd_data_o
);

  logic [WIDTH-1:0] words_q[DEPTH];

  always_ff @(posedge clk) begin
    if (wr_en_i) words_q[wr_addr_i] <= wr_data_i;
    rd_data_o <= words_q[rd_addr_i];
  end

endmodule
