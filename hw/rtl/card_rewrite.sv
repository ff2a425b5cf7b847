// Rewrites a frame that is forwarded: MAC addresses, TTL or hop limit, IPv4 checksum. Cuts off what
// follows the IP packet, such as Ethernet's padding; those bytes of `bytes_o` are undefined.
//
// Latency: 2 cycles from `bytes_i`, `parsed_i` and `length_i`; 1 cycle from `forward_i` and the MAC
// addresses.
module card_rewrite
  import card_pkg::*;
(
    input  logic          clk,
    input  header_bytes_t bytes_i,
    input  length_t       length_i,
    input  logic          v6_i,
    input  length_t       packet_bytes_i,
    // One cycle later.
    input  logic          forward_i,
    input  mac_t          destination_i,
    input  mac_t          source_i,
    output header_bytes_t bytes_o,
    output length_t       length_o
);

  // The first byte on the wire is in the lowest bits of a frame.
  function automatic mac_t on_wire(input mac_t mac);
    return {<<8{mac}};
  endfunction

  // RFC 1141: the sum decreases by 0x0100, so its complement increases by that, with end-around
  // carry. As in crates/wire, the result is never 0xffff.
  logic [15:0] checksum;
  logic [16:0] more;
  assign checksum = {bytes_i[8*24+:8], bytes_i[8*25+:8]};
  assign more = {1'b0, checksum} + 17'h0_0100;

  header_bytes_t bytes_q;
  length_t length_q, length_cut_q;
  logic v6_q;
  logic [7:0] ttl_q, hop_limit_q;
  logic [15:0] checksum_q;

  always_ff @(posedge clk) begin
    bytes_q <= bytes_i;
    length_q <= length_i;
    length_cut_q <= packet_bytes_i + 11'd14;
    v6_q <= v6_i;
    ttl_q <= bytes_i[8*22+:8] - 8'd1;
    hop_limit_q <= bytes_i[8*21+:8] - 8'd1;
    checksum_q <= more[15:0] + 16'(more >= 17'h0_ffff);

    bytes_o <= bytes_q;
    length_o <= length_q;
    if (forward_i) begin
      length_o <= length_cut_q;
      bytes_o[0+:48] <= on_wire(destination_i);
      bytes_o[48+:48] <= on_wire(source_i);
      if (v6_q) bytes_o[8*21+:8] <= hop_limit_q;
      else begin
        bytes_o[8*22+:8] <= ttl_q;
        bytes_o[8*24+:16] <= {checksum_q[7:0], checksum_q[15:8]};
      end
    end
  end

endmodule
