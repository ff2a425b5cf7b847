// Memory with one write port and one read port; becomes block RAM.
//
// Latency: `rd_data_o` has the word at `rd_addr_i` one cycle later. A read in the cycle of a write
// to the same word returns the old word. The contents are not reset: the driver clears them. There
// are no words from DEPTH on: callers check their bounds.
//
// Block RAM leaves a read undefined that meets a write to the same word. So the words are written a
// cycle late, and a read that needs the late word takes it from a register. The comparison of the
// addresses runs beside the read. With COLLIDES 0 there are no such registers: the caller does not
// use what it reads in the cycle of a write to the same word. Verilator inverts such a word, so that
// tests notice its use.
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

  // The attributes are for Yosys: no logic of its own for collisions; small memories of LUTs, as
  // these are faster.
  (* no_rw_check, ram_style = DEPTH <= 128 && WIDTH <= 64 ? "distributed" : "auto" *)
  logic [WIDTH-1:0] words_q[DEPTH];

  // The word that a read returns. `meets`: the same word is being written.
  function automatic logic [WIDTH-1:0] met(input logic [WIDTH-1:0] stored, input logic meets);
`ifdef VERILATOR
    return meets ? ~stored : stored;
`else
    return stored;
`endif
  endfunction

  if (COLLIDES) begin : gen_bypass
    logic wr_en_q, late_en_q;
    logic [ADDR_BITS-1:0] wr_addr_q, late_addr_q, rd_addr_q;
    logic [WIDTH-1:0] wr_data_q, late_data_q, read_q;

    always_ff @(posedge clk) begin
      wr_en_q <= wr_en_i;
      wr_addr_q <= wr_addr_i;
      wr_data_q <= wr_data_i;
      if (wr_en_q) words_q[wr_addr_q] <= wr_data_q;
      read_q <= met(words_q[rd_addr_i], wr_en_q && wr_addr_q == rd_addr_i);
      late_en_q <= wr_en_q;
      late_addr_q <= wr_addr_q;
      late_data_q <= wr_data_q;
      rd_addr_q <= rd_addr_i;
    end
    assign rd_data_o = late_en_q && late_addr_q == rd_addr_q ? late_data_q : read_q;
  end else begin : gen_words
    always_ff @(posedge clk) begin
      if (wr_en_i) words_q[wr_addr_i] <= wr_data_i;
      rd_data_o <= met(words_q[rd_addr_i], wr_en_i && wr_addr_i == rd_addr_i);
    end
  end

endmodule
