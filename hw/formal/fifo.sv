// A queue (card_fifo) loses no word, keeps the order, and keeps a word at its output until the word
// is taken, if the caller pushes only into a queue that is not full. The proof follows any word.
module fifo #(
    parameter  int DEPTH  = 8,
    parameter  int MARGIN = 3,
    localparam int BITS   = $clog2(DEPTH)
) (
    input logic       clk,
    input logic       rst,
    input logic       push_i,
    input logic [1:0] data_i,
    input logic       pop_i,
    input logic       mark_i   // follow the word that is pushed
);

  logic room, valid;
  logic [1:0] data;
  card_fifo #(
      .WIDTH (2),
      .DEPTH (DEPTH),
      .MARGIN(MARGIN)
  ) dut (
      .clk,
      .rst,
      .push_i,
      .data_i,
      .room_o (room),
      .valid_o(valid),
      .data_o (data),
      .pop_i
  );

  logic [BITS:0] count_q, ahead_q;  // words in all, words before the marked one
  logic marked_q, held_q, started_q = 1'b0;
  logic [1:0] word_q, data_q;
  always_ff @(posedge clk) begin
    started_q <= 1'b1;
    count_q <= rst ? '0 : count_q + (BITS + 1)'(push_i) - (BITS + 1)'(pop_i);
    held_q <= valid && !pop_i && !rst;
    data_q <= data;
    if (push_i && mark_i && !marked_q) begin
      marked_q <= 1'b1;
      ahead_q <= count_q - (BITS + 1)'(pop_i);
      word_q <= data_i;
    end else if (marked_q && pop_i) begin
      if (ahead_q == '0) marked_q <= 1'b0;
      ahead_q <= ahead_q - 1'b1;
    end
    if (rst) marked_q <= 1'b0;
  end

  always_comb begin
    if (!started_q) assume (rst);
    if (push_i) assume (count_q < (BITS + 1)'(DEPTH));
    if (pop_i) assume (valid);
    if (started_q) begin
      assert (count_q <= (BITS + 1)'(DEPTH));
      assert (valid == (count_q != '0));
      assert (room == (count_q + (BITS + 1)'(MARGIN) <= (BITS + 1)'(DEPTH)));
      if (held_q) assert (valid && data == data_q);
      if (marked_q && ahead_q == '0) assert (valid && data == word_q);
      // Invariants.
      assert (dut.count_q == count_q && dut.wr_q == dut.rd_q + count_q[BITS-1:0]);
      if (marked_q) begin
        assert (ahead_q < count_q);
        assert (dut.words.words_q[dut.rd_q+ahead_q[BITS-1:0]] == word_q);
      end
    end
  end

endmodule
