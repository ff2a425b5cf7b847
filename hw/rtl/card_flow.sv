// Hash of a packet's flow: flow::ip of crates/wire, for IPv6 and for IPv4 without options. The hash
// of other frames is undefined, because none of them is forwarded.
//
// Latency: 36 cycles.
//
// IPv6 takes steps 0 to 3 for the addresses; IPv4 takes step 3. Then the protocol; the ports if
// there are any; and the end.
module card_flow
  import card_pkg::*;
(
    input  logic          clk,
    // verilator lint_off UNUSEDSIGNAL
    input  header_bytes_t bytes_i,
    // verilator lint_on UNUSEDSIGNAL
    input  length_t       length_i,
    output logic [31:0]   hash_o
);

  localparam int STEP = 5;

  // Bytes of a frame up to the end of the ports.
  localparam length_t PORTS_V4 = 11'd38;
  localparam length_t PORTS_V6 = 11'd58;

  function automatic logic has_ports(input logic [7:0] protocol);
    return protocol == 8'd6 || protocol == 8'd17 || protocol == 8'd132;  // TCP, UDP, SCTP
  endfunction

  logic v6, ports;
  logic [7:0] protocol;
  always_comb begin
    v6 = bytes_i[8*12+:16] == 16'hdd86;
    protocol = v6 ? bytes_i[8*20+:8] : bytes_i[8*23+:8];
    if (v6) ports = has_ports(protocol) && length_i >= PORTS_V6;
    // Not of fragments: all of a packet's are one flow. The reserved flag and DF don't count.
    else
      ports = has_ports(protocol) && length_i >= PORTS_V4
          && {bytes_i[8*20+:6], bytes_i[8*21+:8]} == '0;
  end

  // Words that later steps take.
  logic [63:0] word_1, word_2, word_3;
  logic v6_3;
  logic [7:0] word_4;
  logic [31:0] word_5;
  logic ports_6;
  card_lpm_delay #(
      .WIDTH (64),
      .CYCLES(1 * STEP)
  ) delay_1 (
      .clk,
      .data_i(bytes_i[8*30+:64]),
      .data_o(word_1)
  );
  card_lpm_delay #(
      .WIDTH (64),
      .CYCLES(2 * STEP)
  ) delay_2 (
      .clk,
      .data_i(bytes_i[8*38+:64]),
      .data_o(word_2)
  );
  card_lpm_delay #(
      .WIDTH (65),
      .CYCLES(3 * STEP)
  ) delay_3 (
      .clk,
      .data_i({v6, v6 ? bytes_i[8*46+:64] : bytes_i[8*26+:64]}),
      .data_o({v6_3, word_3})
  );
  card_lpm_delay #(
      .WIDTH (8),
      .CYCLES(4 * STEP)
  ) delay_4 (
      .clk,
      .data_i(protocol),
      .data_o(word_4)
  );
  card_lpm_delay #(
      .WIDTH (32),
      .CYCLES(5 * STEP)
  ) delay_5 (
      .clk,
      .data_i(v6 ? bytes_i[8*54+:32] : bytes_i[8*34+:32]),
      .data_o(word_5)
  );
  card_lpm_delay #(
      .WIDTH (1),
      .CYCLES(6 * STEP)
  ) delay_6 (
      .clk,
      .data_i(ports),
      .data_o(ports_6)
  );

  localparam int STEPS = 7;
  logic [63:0] state_in[STEPS], word_in[STEPS], state_out[STEPS];
  logic [63:0] state_5_late;

  card_lpm_delay #(
      .WIDTH (64),
      .CYCLES(STEP)
  ) around_5 (
      .clk,
      .data_i(state_in[5]),
      .data_o(state_5_late)
  );

  always_comb begin
    word_in = '{bytes_i[8*22+:64], word_1, word_2, word_3, 64'(word_4), 64'(word_5), 64'd0};
    state_in[0] = '0;
    for (int i = 1; i < STEPS; i++) state_in[i] = state_out[i-1];
    if (!v6_3) state_in[3] = '0;
    if (!ports_6) state_in[6] = state_5_late;
  end

  for (genvar i = 0; i < STEPS; i++) begin : gen_step
    card_flow_step step (
        .clk,
        .state_i(state_in[i]),
        .word_i (word_in[i]),
        .state_o(state_out[i])
    );
  end

  always_ff @(posedge clk) hash_o <= state_out[STEPS-1][63:32];

endmodule
