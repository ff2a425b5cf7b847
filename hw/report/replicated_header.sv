// Header pipeline with look-up tables for each VE, as in the paper: the VMAC-VE table chooses one of
// VES tables. Parser and rewrite are the card's. For resource reports only; IPv4 only.
//
// Latency: 10 cycles. One frame per cycle.
//
// | frame | verdict |
// |---|---|
// | shorter than an Ethernet header, broken IPv4 header | drop malformed |
// | from the host | out by the given port, unmodified |
// | to a group address, or neither IPv4 nor ARP | punt local, or punt neighbour if it is ARP |
// | to an unknown MAC address, or to one of another port | drop no-ve, or drop not-for-us |
// | to the router's own address | punt local |
// | IPv4 options, TTL 0 or 1, no route | punt exception |
// | unknown neighbour | punt neighbour |
// | any other | out, rewritten |
module replicated_header
  import card_pkg::*;
  import replicated_pkg::*;
#(
    parameter  int VES      = 8,                        // a power of two, at most 64
    localparam int VMACS    = 4 * VES,
    localparam int VE_BITS  = VES > 1 ? $clog2(VES) : 1
) (
    input logic clk,
    input logic rst,

    input  logic        valid_i,
    input  header_in_t  header_i,
    output logic        valid_o,
    output header_out_t header_o,

    input logic                           wr_en_i,
    input replicated_table_t              wr_table_i,
    input logic              [       7:0] wr_ve_i,
    input logic              [      10:0] wr_index_i,
    // verilator lint_off UNUSEDSIGNAL
    input logic              [     255:0] wr_data_i
    // verilator lint_on UNUSEDSIGNAL
);

  localparam int VMAC_BITS = $clog2(VMACS);
  localparam int LATENCY = 10;

  // ---------------------------------------------------------------------------------------------
  // Cycle 0: parser, VMAC-VE table, delay line.

  // verilator lint_off UNUSEDSIGNAL
  logic is_v6;
  logic [127:0] key;
  parsed_t parsed_4, parsed;
  // verilator lint_on UNUSEDSIGNAL
  mac_t destination;
  logic [VMACS-1:0] vmac_match;
  logic [VMAC_BITS-1:0] vmac_entry;
  logic vmac_hit_q;
  vmac_place_t vmac_place;
  assign destination = {<<8{header_i.bytes[47:0]}};

  card_parse parse (
      .clk,
      .bytes_i (header_i.bytes),
      .length_i(header_i.length),
      .is_v6_o (is_v6),
      .key_o   (key),
      .parsed_o(parsed_4)
  );
  replicated_cam #(
      .KEY_BITS(48),
      .ENTRIES (VMACS)
  ) vmac (
      .clk,
      .key_i     (destination),
      .match_o   (vmac_match),
      .wr_en_i   (wr_en_i && wr_table_i == VMAC_WORD),
      .wr_part_i (wr_index_i[10:8]),
      .wr_value_i(wr_index_i[7:0]),
      .wr_word_i (wr_data_i[VMACS-1:0])
  );
  always_comb begin
    vmac_entry = '0;
    for (int i = VMACS - 1; i >= 0; i--) if (vmac_match[i]) vmac_entry = VMAC_BITS'(i);
  end
  card_ram #(
      .WIDTH($bits(vmac_place_t)),
      .DEPTH(VMACS)
  ) vmac_places (
      .clk,
      .wr_en_i  (wr_en_i && wr_table_i == VMAC_ENTRY),
      .wr_addr_i(wr_index_i[VMAC_BITS-1:0]),
      .wr_data_i(wr_data_i[$bits(vmac_place_t)-1:0]),
      .rd_addr_i(vmac_entry),
      .rd_data_o(vmac_place)
  );
  always_ff @(posedge clk) vmac_hit_q <= vmac_match != '0;

  header_in_t header_8;
  card_delay_ram #(
      .WIDTH ($bits(header_in_t)),
      .CYCLES(8)
  ) frame_delay (
      .clk,
      .rst,
      .data_i(header_i),
      .data_o(header_8)
  );

  // ---------------------------------------------------------------------------------------------
  // Cycle 2: the tables of all VEs.

  route_t [VES-1:0] route;
  logic [VES-1:0] known;
  mac_t [VES-1:0] mac;
  for (genvar i = 0; i < VES; i++) begin : gen_ve
    replicated_ve tables (
        .clk,
        .rst,
        .address_i (key[127:96]),
        .route_o   (route[i]),
        .known_o   (known[i]),
        .mac_o     (mac[i]),
        .wr_en_i   (wr_en_i && wr_ve_i == 8'(i)),
        .wr_table_i,
        .wr_index_i(wr_index_i[9:0]),
        .wr_data_i (wr_data_i[47:0])
    );
  end

  // ---------------------------------------------------------------------------------------------
  // Cycle 7: the tables of the frame's VE.

  logic hit_7, hit;
  vmac_place_t place_7, place;
  // verilator lint_off UNUSEDSIGNAL
  route_t chosen;  // without the next hop
  // verilator lint_on UNUSEDSIGNAL
  logic neighbour;
  mac_t neighbour_mac, neighbour_mac_q, source_mac;
  logic [VE_BITS-1:0] ve_7;

  card_lpm_delay #(
      .WIDTH (1 + $bits(vmac_place_t)),
      .CYCLES(4)
  ) vmac_delay (
      .clk,
      .data_i({vmac_hit_q, vmac_place}),
      .data_o({hit_7, place_7})
  );
  card_lpm_delay #(
      .WIDTH ($bits(parsed_t)),
      .CYCLES(4)
  ) parsed_delay (
      .clk,
      .data_i(parsed_4),
      .data_o(parsed)
  );
  assign ve_7 = place_7.ve[VE_BITS-1:0];
  always_ff @(posedge clk) begin
    {hit, place} <= {hit_7, place_7};
    chosen <= route[ve_7];
    neighbour <= known[ve_7];
    neighbour_mac <= mac[ve_7];
    neighbour_mac_q <= neighbour_mac;
  end

  // ---------------------------------------------------------------------------------------------
  // Cycle 8: verdict.

  verdict_t verdict, verdict_9;
  logic group, owned, forward_9;
  small_port_t egress;
  header_out_t out_q;  // without bytes and length
  logic [LATENCY-1:0] valid_q;

  always_comb begin
    group = 1'b0;
    owned = 1'b1;
    egress = header_8.port == HOST ? header_8.vport[1:0] : chosen.port;
    if (parsed.runt) begin
      verdict = DROP_MALFORMED;
      owned = 1'b0;
    end else if (header_8.port == HOST) verdict = OUT;
    else if (parsed.to_group) begin
      verdict = parsed.kind == KIND_ARP ? PUNT_NEIGHBOUR : PUNT_LOCAL;
      group = 1'b1;
      owned = 1'b0;
    end else if (!hit) begin
      verdict = DROP_NO_VE;
      owned = 1'b0;
    end else if (header_8.port != {1'b0, place.port}) verdict = DROP_NOT_FOR_US;
    else if (parsed.kind == KIND_ARP) verdict = PUNT_NEIGHBOUR;
    else if (parsed.kind != KIND_IPV4) verdict = PUNT_LOCAL;
    else if (parsed.malformed) verdict = DROP_MALFORMED;
    else if (!parsed.unknown && chosen.valid && chosen.local_) verdict = PUNT_LOCAL;
    else if (parsed.unknown || parsed.options || parsed.expired || !chosen.valid)
      verdict = PUNT_EXCEPTION;
    else if (!neighbour) verdict = PUNT_NEIGHBOUR;
    else verdict = OUT;
  end

  // ---------------------------------------------------------------------------------------------
  // Cycle 9: MAC addresses.

  card_ram #(
      .WIDTH($bits(mac_t)),
      .DEPTH(4 * VES)
  ) source_macs (
      .clk,
      .wr_en_i  (wr_en_i && wr_table_i == SOURCE_MAC),
      .wr_addr_i(VMAC_BITS'({wr_ve_i, wr_index_i[1:0]})),
      .wr_data_i(wr_data_i[47:0]),
      .rd_addr_i(VMAC_BITS'({place.ve, egress})),
      .rd_data_o(source_mac)
  );

  header_bytes_t bytes_10;
  length_t length_10;
  card_rewrite rewrite (
      .clk,
      .bytes_i       (header_8.bytes),
      .length_i      (header_8.length),
      .v6_i          (1'b0),
      .packet_bytes_i(parsed.packet_bytes),
      .forward_i     (forward_9),
      .destination_i (neighbour_mac_q),
      .source_i      (source_mac),
      .bytes_o       (bytes_10),
      .length_o      (length_10)
  );

  header_out_t out_9;
  always_ff @(posedge clk) begin
    verdict_9 <= verdict;
    forward_9 <= verdict == OUT && header_8.port != HOST;
    out_9 <= '0;
    out_9.group <= group;
    out_9.owned <= owned;
    if (owned) begin
      out_9.ve <= header_8.port == HOST ? header_8.ve : place.ve;
      out_9.vport <= {2'd0, verdict == OUT ? egress : place.port};
    end
    out_9.port <= verdict == OUT ? {1'b0, egress} : HOST;
    out_9.segment <= header_8.segment;
    out_9.token <= header_8.token;
    out_q <= out_9;
    out_q.verdict <= verdict_9;
    valid_q <= rst ? '0 : {valid_q[LATENCY-2:0], valid_i};
  end

  always_comb begin
    header_o = out_q;
    header_o.bytes = bytes_10;
    header_o.length = length_10;
  end
  assign valid_o = valid_q[LATENCY-1];

endmodule
