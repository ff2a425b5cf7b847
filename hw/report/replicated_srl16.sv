// Shift register of 16 bits of which one is read: an SRL16 of Xilinx.
//
// Latency: none from `at_i` to `bit_o`. A shift takes the next cycle.
module replicated_srl16 (
    input  logic       clk,
    input  logic       shift_i,
    input  logic       bit_i,
    input  logic [3:0] at_i,
    output logic       bit_o
);

  logic [15:0] bits_q;
  always_ff @(posedge clk) if (shift_i) bits_q <= {bits_q[14:0], bit_i};
  assign bit_o = bits_q[at_i];

endmodule
