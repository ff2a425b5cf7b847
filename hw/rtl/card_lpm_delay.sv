// Delay line: `data_o` is `data_i` of CYCLES cycles ago. Not reset.
module card_lpm_delay #(
    parameter int WIDTH  = 1,
    parameter int CYCLES = 1
) (
    // Unused if CYCLES is 0.
    // verilator lint_off UNUSEDSIGNAL
    input  logic             clk,
    // verilator lint_on UNUSEDSIGNAL
    input  logic [WIDTH-1:0] data_i,
    output logic [WIDTH-1:0] data_o
);

  if (CYCLES == 0) begin : gen_wire
    assign data_o = data_i;
  end else begin : gen_line
    logic [CYCLES-1:0][WIDTH-1:0] line_q;
    always_ff @(posedge clk) begin
      line_q[0] <= data_i;
      for (int i = 1; i < CYCLES; i++) line_q[i] <= line_q[i-1];
    end
    assign data_o = line_q[CYCLES-1];
  end

endmodule
