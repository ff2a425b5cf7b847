// hw/rtl/card_delay_ram.sv returns what it had CYCLES cycles ago, if there was no reset since.
module delay #(
    parameter int CYCLES = 6
) (
    input logic       clk,
    input logic       rst,
    input logic [1:0] data_i
);

  logic [1:0] data;
  card_delay_ram #(
      .WIDTH (2),
      .CYCLES(CYCLES)
  ) dut (
      .clk,
      .rst,
      .data_i,
      .data_o(data)
  );

  logic [CYCLES:1][1:0] line_q;
  logic [CYCLES:1] known_q = '0;
  always_ff @(posedge clk) begin
    line_q <= {line_q[CYCLES-1:1], data_i};
    known_q <= rst ? '0 : {known_q[CYCLES-1:1], 1'b1};
  end

  always_comb if (known_q[CYCLES]) assert (data == line_q[CYCLES]);

endmodule
