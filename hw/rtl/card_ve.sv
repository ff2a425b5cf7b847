// Tables that have one row per virtual environment (VE): enabled, options, own IPv4 addresses, and
// its parts of the pooled tables of next hops.
//
// Latency: 3 cycles; own_source_o through one gate behind the last register. After a reset, all VEs
// are disabled.
module card_ve
  import card_pkg::*;
#(
    parameter  int VES           = 32,
    parameter  int GROUPS        = 8192,
    parameter  int BUCKET_BLOCKS = 64,
    parameter  int HOPS          = 8192,
    parameter  int ARPS          = 16384,
    localparam int VE_BITS       = VES > 1 ? $clog2(VES) : 1
) (
    input  logic               clk,
    input  logic               rst,
    input  logic [VE_BITS-1:0] ve_i,
    input  logic [       31:0] source_i,
    output logic               enabled_o,
    output ve_options_t        options_o,
    output hop_segments_t      segments_o,
    // The source is one of the VE's own addresses.
    output logic               own_source_o,

    // Write bus one cycle early, for the segments of its VE; then the write. `wr_refused_o` is in
    // the same cycle as `wr_valid_i`.
    input  logic [VE_BITS-1:0] wr_ve_early_i,
    output hop_segments_t      wr_segments_o,
    input  logic               wr_valid_i,
    input  table_t             wr_table_i,
    input  logic [VE_BITS-1:0] wr_ve_i,
    input  table_index_t       wr_index_i,
    input  logic [      127:0] wr_data_i,
    output logic               wr_refused_o
);

  localparam int ADDRESSES = 16;

  // ---------------------------------------------------------------------------------------------
  // Writes.

  function automatic logic fits(input range_t range, input logic [16:0] entries);
    return {1'b0, range.base} + {1'b0, range.length} <= entries;
  endfunction

  hop_segments_t wr_segments;
  logic wr_bounds, wr_control, wr_options, wr_own, wr_parts;
  assign wr_segments = hop_segments_t'(wr_data_i);

  always_comb begin
    wr_bounds = wr_table_i == TABLE_OWN_V4 ? wr_index_i < 32'(ADDRESSES) : wr_index_i == '0;
    if (wr_table_i == TABLE_HOP_SEGMENTS)
      wr_bounds = wr_bounds && fits(wr_segments.group, 17'(GROUPS))
          && fits(wr_segments.bucket, 17'(BUCKET_BLOCKS)) && fits(wr_segments.hop, 17'(HOPS))
          && fits(wr_segments.arp, 17'(ARPS));
    wr_control = wr_valid_i && wr_bounds && wr_table_i == TABLE_VE_CONTROL;
    wr_options = wr_valid_i && wr_bounds && wr_table_i == TABLE_VE_OPTIONS;
    wr_own = wr_valid_i && wr_bounds && wr_table_i == TABLE_OWN_V4;
    wr_parts = wr_valid_i && wr_bounds && wr_table_i == TABLE_HOP_SEGMENTS;
    wr_refused_o = wr_valid_i && !wr_bounds && wr_table_i inside
        {TABLE_VE_CONTROL, TABLE_VE_OPTIONS, TABLE_OWN_V4, TABLE_HOP_SEGMENTS};
  end

  // ---------------------------------------------------------------------------------------------
  // Look-ups.

  logic [VES-1:0] enabled_q;
  logic [2:0] enabled_line_q;
  ve_options_t options, options_q;
  hop_segments_t segments, segments_q;
  own_v4_t [ADDRESSES-1:0] own, own_q;
  logic [1:0][31:0] source_q;
  logic [ADDRESSES-1:0] equal_q;

  card_ram #(
      .WIDTH($bits(ve_options_t)),
      .DEPTH(VES)
  ) options_ram (
      .clk,
      .wr_en_i  (wr_options),
      .wr_addr_i(wr_ve_i),
      .wr_data_i(wr_data_i[$bits(ve_options_t)-1:0]),
      .rd_addr_i(ve_i),
      .rd_data_o(options)
  );
  card_ram #(
      .WIDTH($bits(hop_segments_t)),
      .DEPTH(VES)
  ) segments_ram (
      .clk,
      .wr_en_i  (wr_parts),
      .wr_addr_i(wr_ve_i),
      .wr_data_i(wr_segments),
      .rd_addr_i(ve_i),
      .rd_data_o(segments)
  );
  card_ram #(
      .WIDTH($bits(hop_segments_t)),
      .DEPTH(VES)
  ) wr_segments_ram (
      .clk,
      .wr_en_i  (wr_parts),
      .wr_addr_i(wr_ve_i),
      .wr_data_i(wr_segments),
      .rd_addr_i(wr_ve_early_i),
      .rd_data_o(wr_segments_o)
  );
  for (genvar i = 0; i < ADDRESSES; i++) begin : gen_own
    card_ram #(
        .WIDTH($bits(own_v4_t)),
        .DEPTH(VES)
    ) own_ram (
        .clk,
        .wr_en_i  (wr_own && wr_index_i[3:0] == 4'(i)),
        .wr_addr_i(wr_ve_i),
        .wr_data_i(wr_data_i[$bits(own_v4_t)-1:0]),
        .rd_addr_i(ve_i),
        .rd_data_o(own[i])
    );
  end

  always_ff @(posedge clk) begin
    if (wr_control) enabled_q[wr_ve_i] <= wr_data_i[0];
    if (rst) enabled_q <= '0;
    enabled_line_q <= {enabled_line_q[1:0], enabled_q[ve_i]};
    options_q <= options;
    options_o <= options_q;
    segments_q <= segments;
    segments_o <= segments_q;
    source_q <= {source_q[0], source_i};
    for (int i = 0; i < ADDRESSES; i++) begin
      own_q[i] <= own[i];
      equal_q[i] <= own_q[i].valid && own_q[i].address == source_q[1];
    end
  end

  assign enabled_o = enabled_line_q[2];
  assign own_source_o = equal_q != '0;

endmodule
