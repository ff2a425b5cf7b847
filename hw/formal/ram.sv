// hw/rtl/card_ram.sv returns the word that was last written before the read, also if the read meets
// a write to the same word, if COLLIDES is 1.
module ram #(
    parameter bit COLLIDES = 1'b1
) (
    input logic       clk,
    input logic       wr_en_i,
    input logic [1:0] wr_addr_i,
    input logic [1:0] wr_data_i,
    input logic [1:0] rd_addr_i
);

  logic [1:0] read;
  card_ram #(
      .WIDTH   (2),
      .DEPTH   (4),
      .COLLIDES(COLLIDES)
  ) dut (
      .clk,
      .wr_en_i,
      .wr_addr_i,
      .wr_data_i,
      .rd_addr_i,
      .rd_data_o(read)
  );

  // All words are known once they were written.
  logic [3:0][1:0] words_q;
  logic [3:0] known_q = '0;
  logic known_read_q = 1'b0;
  logic [1:0] read_q;
  always_ff @(posedge clk) begin
    if (wr_en_i) words_q[wr_addr_i] <= wr_data_i;
    if (wr_en_i) known_q[wr_addr_i] <= 1'b1;
    read_q <= words_q[rd_addr_i];
    known_read_q <= known_q[rd_addr_i]
        && (COLLIDES || !(wr_en_i && wr_addr_i == rd_addr_i));
  end

  always_comb begin
    if (known_read_q) assert (read == read_q);
    // What the memory holds, with the write that is on its way.
    for (int i = 0; i < 4; i++)
      if (known_q[i])
        assert (words_q[i] == (dut.gen_bypass.wr_en_q && dut.gen_bypass.wr_addr_q == 2'(i)
            ? dut.gen_bypass.wr_data_q : dut.words_q[i]));
  end

endmodule
