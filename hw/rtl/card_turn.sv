// Round robin: the first line that waits behind the last one, else the first one of all.
//
// Combinational. `behind_i` is a mask of the lines behind the last one, as a comparison of indices
// would take longer. `next_o` has one bit, or none if no line waits.
module card_turn #(
    parameter int LINES = 5
) (
    input  logic [LINES-1:0] waiting_i,
    input  logic [LINES-1:0] behind_i,
    output logic [LINES-1:0] next_o
);

  function automatic logic [LINES-1:0] lowest(input logic [LINES-1:0] lines);
    logic [LINES-1:0] filled;  // from the lowest bit on
    filled = lines;
    for (int step = 1; step < LINES; step *= 2) filled |= filled << step;
    return lines & ~(filled << 1);
  endfunction

  logic [LINES-1:0] behind;
  assign behind = waiting_i & behind_i;
  assign next_o = behind != '0 ? lowest(behind) : lowest(waiting_i);

endmodule
