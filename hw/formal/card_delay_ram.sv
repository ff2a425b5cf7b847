// Delay line for proofs: takes the place of hw/rtl/card_delay_ram.sv, which the proof `delay`
// compares with it.
module card_delay_ram #(
    parameter int WIDTH  = 32,
    parameter int CYCLES = 32
) (
    input  logic             clk,
    // verilator lint_off UNUSEDSIGNAL
    input  logic             rst,
    // verilator lint_on UNUSEDSIGNAL
    input  logic [WIDTH-1:0] data_i,
    output logic [WIDTH-1:0] data_o
);

  card_lpm_delay #(
      .WIDTH (WIDTH),
      .CYCLES(CYCLES)
  ) line (
      .clk,
      .data_i,
      .data_o
  );

endmodule
