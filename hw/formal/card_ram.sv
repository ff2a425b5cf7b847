// Memory for proofs: takes the place of hw/rtl/card_ram.sv. It keeps one word only, at `row`, which
// is any address of the memory, and returns `other` for all other addresses. Both are free.
//
// A proof of two copies asserts that the words at `row` are equal if the row belongs to a VE. As
// `row` is any address, the proof then assumes that `other` is also equal if the address that both
// copies read belongs to that VE. So tables have their real size, and any contents.
// `undefined` is also free.
module card_ram #(
    parameter  int WIDTH     = 32,
    parameter  int DEPTH     = 512,
    parameter  bit COLLIDES  = 1'b1,
    localparam int ADDR_BITS = DEPTH > 1 ? $clog2(DEPTH) : 1
) (
    input  logic                 clk,
    input  logic                 wr_en_i,
    input  logic [ADDR_BITS-1:0] wr_addr_i,
    input  logic [    WIDTH-1:0] wr_data_i,
    input  logic [ADDR_BITS-1:0] rd_addr_i,
    output logic [    WIDTH-1:0] rd_data_o
);

  logic [ADDR_BITS-1:0] row, row_q;
  logic [WIDTH-1:0] other, undefined, word_q;
  logic started_q = 1'b0;

  always_ff @(posedge clk) begin
    started_q <= 1'b1;
    row_q <= row;
    if (wr_en_i && wr_addr_i == row) word_q <= wr_data_i;
    rd_data_o <= rd_addr_i == row ? word_q : other;
    if (!COLLIDES && wr_en_i && wr_addr_i == rd_addr_i) rd_data_o <= undefined;
  end

  always_comb if (started_q) assume (row == row_q);

endmodule
