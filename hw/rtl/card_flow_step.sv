// One step of the flow hash: FlowHash::write_u64 of crates/wire/src/flow.rs.
//
// Latency: 5 cycles. `state_o` comes from registers through one exclusive or.
module card_flow_step (
    input  logic        clk,
    input  logic [63:0] state_i,
    input  logic [63:0] word_i,
    output logic [63:0] state_o
);

  localparam logic [63:0] SPREAD = 64'h9e37_79b9_7f4a_7c15;
  localparam logic [63:0] FACTOR = 64'ha076_1d64_78bd_642f;

  // The product of 64 bits by 64 bits: of quarters, rows of them, pairs of rows, all.
  logic [63:0] mixed_q;
  logic [3:0][3:0][31:0] quarter_q;
  logic [3:0][79:0] row_q;
  logic [1:0][95:0] pair_q;
  logic [127:0] product_q;

  always_ff @(posedge clk) begin
    mixed_q <= {state_i[40:0], state_i[63:41]} ^ word_i ^ SPREAD;
    for (int i = 0; i < 4; i++) begin
      for (int j = 0; j < 4; j++)
        quarter_q[i][j] <= 32'(mixed_q[16*i+:16]) * 32'(FACTOR[16*j+:16]);
      row_q[i] <= {16'd0, quarter_q[i][2], quarter_q[i][0]}
          + {quarter_q[i][3], quarter_q[i][1], 16'd0};
    end
    for (int i = 0; i < 2; i++) pair_q[i] <= {16'd0, row_q[2*i]} + {row_q[2*i+1], 16'd0};
    product_q <= {32'd0, pair_q[0]} + {pair_q[1], 32'd0};
  end

  assign state_o = product_q[127:64] ^ product_q[63:0];

endmodule
