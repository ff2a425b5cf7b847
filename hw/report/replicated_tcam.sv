// Ternary associative memory in shift registers, as the paper's: one per entry and digit of four
// bits of the key. A shift register holds for each value of its digit whether the entry matches.
//
// Latency: 1 cycle. To write an entry, the driver shifts in 16 rows, for the digits' value 15 first.
module replicated_tcam #(
    parameter  int KEY_BITS   = 32,
    parameter  int ENTRIES    = 32,
    localparam int DIGITS     = KEY_BITS / 4,
    localparam int ENTRY_BITS = $clog2(ENTRIES)
) (
    input  logic                  clk,
    input  logic [  KEY_BITS-1:0] key_i,
    output logic [   ENTRIES-1:0] match_o,
    input  logic                  wr_en_i,
    input  logic [ENTRY_BITS-1:0] wr_entry_i,
    input  logic [    DIGITS-1:0] wr_row_i     // one bit per digit, the lowest digit first
);

  for (genvar entry = 0; entry < ENTRIES; entry++) begin : gen_entry
    logic [DIGITS-1:0] equal;
    logic shift;
    assign shift = wr_en_i && wr_entry_i == ENTRY_BITS'(entry);
    for (genvar digit = 0; digit < DIGITS; digit++) begin : gen_digit
      replicated_srl16 bits (
          .clk,
          .shift_i(shift),
          .bit_i  (wr_row_i[digit]),
          .at_i   (key_i[4*digit+:4]),
          .bit_o  (equal[digit])
      );
    end
    always_ff @(posedge clk) match_o[entry] <= &equal;
  end

endmodule
