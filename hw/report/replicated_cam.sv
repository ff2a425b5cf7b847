// Associative memory in block RAM, as the paper's: one memory for each eight bits of the key. Its
// word at a value of these bits has a 1 for each entry that has this value there.
//
// Latency: 2 cycles. To write an entry, the driver writes the words that change.
module replicated_cam #(
    parameter  int KEY_BITS  = 32,
    parameter  int ENTRIES   = 32,
    localparam int PARTS     = KEY_BITS / 8,
    localparam int PART_BITS = $clog2(PARTS)
) (
    input  logic                 clk,
    input  logic [ KEY_BITS-1:0] key_i,
    output logic [  ENTRIES-1:0] match_o,
    input  logic                 wr_en_i,
    input  logic [PART_BITS-1:0] wr_part_i,
    input  logic [          7:0] wr_value_i,
    input  logic [  ENTRIES-1:0] wr_word_i
);

  logic [PARTS-1:0][ENTRIES-1:0] word;
  logic [ENTRIES-1:0] match;

  for (genvar part = 0; part < PARTS; part++) begin : gen_part
    card_ram #(
        .WIDTH(ENTRIES),
        .DEPTH(256)
    ) words (
        .clk,
        .wr_en_i  (wr_en_i && wr_part_i == PART_BITS'(part)),
        .wr_addr_i(wr_value_i),
        .wr_data_i(wr_word_i),
        .rd_addr_i(key_i[8*part+:8]),
        .rd_data_o(word[part])
    );
  end

  always_comb begin
    match = '1;
    for (int part = 0; part < PARTS; part++) match &= word[part];
  end
  always_ff @(posedge clk) match_o <= match;

endmodule
