// Look-up tables of one VE, as the paper has them: longest-prefix match, then the neighbour's MAC
// address.
//
// Latency: 5 cycles. Of several entries that match, the lowest wins, so the driver orders routes by
// prefix length.
module replicated_ve
  import card_pkg::*;
  import replicated_pkg::*;
(
    input  logic              clk,
    input  logic              rst,
    input  logic       [31:0] address_i,
    output route_t            route_o,      // `valid` is 0 if there is none
    output logic              known_o,      // the neighbour's address is known
    output mac_t              mac_o,

    input logic                     wr_en_i,
    input replicated_table_t        wr_table_i,
    input logic              [ 9:0] wr_index_i,
    input logic              [47:0] wr_data_i
);

  function automatic logic [ENTRY_BITS-1:0] lowest(input logic [ENTRIES-1:0] match);
    lowest = '0;
    for (int i = ENTRIES - 1; i >= 0; i--) if (match[i]) lowest = ENTRY_BITS'(i);
  endfunction

  // Cycle 0: address. Cycle 1: entries that match. Cycle 2: route.
  logic [ENTRIES-1:0] used_q, match, match_1;
  logic [1:0][31:0] address_q;
  logic found_q;
  route_t route, route_2, route_3_q, route_4_q;

  replicated_tcam #(
      .KEY_BITS(32),
      .ENTRIES (ENTRIES)
  ) tcam (
      .clk,
      .key_i     (address_i),
      .match_o   (match),
      .wr_en_i   (wr_en_i && wr_table_i == ROUTE_BITS),
      .wr_entry_i(wr_index_i[ENTRY_BITS-1:0]),
      .wr_row_i  (wr_data_i[7:0])
  );
  assign match_1 = match & used_q;
  card_ram #(
      .WIDTH($bits(route_t)),
      .DEPTH(ENTRIES)
  ) routes (
      .clk,
      .wr_en_i  (wr_en_i && wr_table_i == ROUTE_HOP),
      .wr_addr_i(wr_index_i[ENTRY_BITS-1:0]),
      .wr_data_i(wr_data_i[$bits(route_t)-1:0]),
      .rd_addr_i(lowest(match_1)),
      .rd_data_o(route)
  );

  always_ff @(posedge clk) begin
    // An entry whose rows are being shifted matches nothing.
    if (wr_en_i && wr_table_i == ROUTE_HOP)
      used_q[wr_index_i[ENTRY_BITS-1:0]] <= wr_data_i[$bits(route_t)-1];
    if (rst) used_q <= '0;
    address_q <= {address_q[0], address_i};
    found_q <= match_1 != '0;
  end

  always_comb begin
    route_2 = route;
    route_2.valid = found_q && route.valid;
    if (route.direct) route_2.next_hop = address_q[1];
  end

  // Cycle 4: neighbours that match. Cycle 5: MAC address.
  logic [ENTRIES-1:0] neighbours;
  replicated_cam #(
      .KEY_BITS(32),
      .ENTRIES (ENTRIES)
  ) arp (
      .clk,
      .key_i     (route_2.next_hop),
      .match_o   (neighbours),
      .wr_en_i   (wr_en_i && wr_table_i == ARP_WORD),
      .wr_part_i (wr_index_i[9:8]),
      .wr_value_i(wr_index_i[7:0]),
      .wr_word_i (wr_data_i[ENTRIES-1:0])
  );
  card_ram #(
      .WIDTH($bits(mac_t)),
      .DEPTH(ENTRIES)
  ) macs (
      .clk,
      .wr_en_i  (wr_en_i && wr_table_i == ARP_MAC),
      .wr_addr_i(wr_index_i[ENTRY_BITS-1:0]),
      .wr_data_i,
      .rd_addr_i(lowest(neighbours)),
      .rd_data_o(mac_o)
  );

  always_ff @(posedge clk) begin
    route_3_q <= route_2;
    route_4_q <= route_3_q;
    route_o <= route_4_q;
    known_o <= neighbours != '0;
  end

endmodule
