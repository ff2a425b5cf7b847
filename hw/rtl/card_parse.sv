// Reads the headers of a frame: Ethernet, IPv4 and IPv6, as crates/wire does.
//
// Latency: 2 cycles for key_o and is_v6_o, 4 cycles for parsed_o.
//
// Only the first 64 bytes of a frame are known. The checksum of an IPv4 header of more than 48
// bytes can't be verified: `unknown`.
module card_parse
  import card_pkg::*;
(
    input  logic          clk,
    input  header_bytes_t bytes_i,
    input  length_t       length_i,
    // Destination address, left-aligned.
    output logic          is_v6_o,
    output logic [127:0]  key_o,
    output parsed_t       parsed_o
);

  // Bytes of the Ethernet header, and of the fixed IP headers.
  localparam length_t ETHER = 11'd14;
  localparam length_t ETHER_V4 = 11'd34;
  localparam length_t ETHER_V6 = 11'd54;

  // Smallest traffic class with a DSCP of CS6.
  localparam logic [7:0] CS6 = 8'd192;

  // Smallest Ethernet type; below are lengths of LLC frames.
  localparam logic [15:0] TYPE_MIN = 16'h0600;

  // Halfwords of the longest IPv4 header that is wholly within the known bytes.
  localparam int HALFWORDS = 24;

  // Byte at an offset of the frame, and big-endian words.
  logic [7:0] at[HEADER_BYTES];
  always_comb
    for (int i = 0; i < HEADER_BYTES; i++) at[i] = bytes_i[8*i+:8];

  logic [15:0] ether_type;
  logic [3:0] header_words;
  logic [127:0] v6_destination;
  logic [31:0] v4_destination;
  logic v6_source_low;  // unspecified or loopback
  always_comb begin
    ether_type = {at[12], at[13]};
    header_words = at[14][3:0];
    v4_destination = {at[30], at[31], at[32], at[33]};
    v6_source_low = at[37][7:1] == '0;
    for (int i = 0; i < 16; i++) begin
      v6_destination[127-8*i-:8] = at[38+i];
      if (i < 15 && at[22+i] != '0) v6_source_low = 1'b0;
    end
  end

  // First octet of an address with the top bits of 0/8, 127/8, or 224/4 and above.
  function automatic logic never_v4(input logic [7:0] first);
    return first == 8'd0 || first == 8'd127 || first >= 8'd224;
  endfunction

  // fe80::/10.
  localparam logic [9:0] LINK_LOCAL = 10'h3fa;

  // ---------------------------------------------------------------------------------------------
  // Stage 1: fields.

  frame_kind_t kind_s1;
  logic runt_s1, to_group_s1, llc_s1;
  length_t payload_s1, payload_v6_s1;
  logic v4_bad_s1, v6_bad_s1, v4_unknown_s1;
  logic [5:0] header_bytes_s1;
  logic [15:0] total_s1, v6_payload_s1;
  logic v4_control_s1, v6_control_s1, v6_icmp_s1;
  logic v4_to_router_s1, v6_multicast_s1, v6_link_local_s1;
  logic v4_never_s1, v6_never_s1, v6_from_link_local_s1;
  logic v4_expired_s1, v6_expired_s1, v4_options_s1, v6_options_s1, dont_fragment_s1;
  logic v6_discovery_type_s1;
  logic [HALFWORDS/4-1:0][17:0] sums_s1;
  logic [127:0] key_s1;

  always_ff @(posedge clk) begin
    case (ether_type)
      16'h0800: kind_s1 <= KIND_IPV4;
      16'h86dd: kind_s1 <= KIND_IPV6;
      16'h0806: kind_s1 <= KIND_ARP;
      default:  kind_s1 <= KIND_OTHER;
    endcase
    runt_s1 <= length_i < ETHER;
    to_group_s1 <= at[0][0];
    llc_s1 <= ether_type < TYPE_MIN;
    payload_s1 <= length_i - ETHER;
    payload_v6_s1 <= length_i - ETHER_V6;
    // RFC 1812 section 5.2.2.
    v4_bad_s1 <= length_i < ETHER_V4 || at[14][7:4] != 4'd4 || header_words < 4'd5;
    v6_bad_s1 <= length_i < ETHER_V6 || at[14][7:4] != 4'd6;
    v4_unknown_s1 <= header_words > 4'(HALFWORDS / 2);
    header_bytes_s1 <= {header_words, 2'b00};
    total_s1 <= {at[16], at[17]};
    v6_payload_s1 <= {at[18], at[19]};
    v4_control_s1 <= at[15] >= CS6;
    // The second byte of a frame of 15 bytes is zero, and does not count.
    v6_control_s1 <= {at[14][3:0], at[15][7:4]} >= CS6 && length_i > ETHER + 11'd1;
    v6_icmp_s1 <= at[20] == 8'd58;
    v6_discovery_type_s1 <= at[54] >= 8'd133 && at[54] <= 8'd137;
    v4_to_router_s1 <= v4_destination[31:28] == 4'he || v4_destination == '1;
    v6_multicast_s1 <= at[38] == 8'hff;
    v6_link_local_s1 <= v6_destination[127:118] == LINK_LOCAL;
    // RFC 1122 section 3.2.1.3: 0/8, 127/8; from 224/4 on multicast, reserved, broadcast.
    v4_never_s1 <= never_v4(v4_destination[31:24]) || never_v4(at[26]);
    v6_never_s1 <= v6_destination[127:1] == '0 || v6_source_low || at[22] == 8'hff;
    v6_from_link_local_s1 <= {at[22], at[23][7:6]} == LINK_LOCAL;
    v4_expired_s1 <= at[22] <= 8'd1;
    v6_expired_s1 <= at[21] <= 8'd1;
    v4_options_s1 <= header_words > 4'd5;
    v6_options_s1 <= at[20] == 8'd0;
    dont_fragment_s1 <= at[20][6];
    key_s1 <= ether_type == 16'h86dd ? v6_destination : {v4_destination, 96'd0};
  end

  // Sums of four halfwords, those behind the header taken as zero.
  always_ff @(posedge clk) begin
    for (int i = 0; i < HALFWORDS / 4; i++) begin
      logic [17:0] sum;
      sum = '0;
      for (int j = 4 * i; j < 4 * i + 4; j++)
        if (6'(j) < {1'b0, header_words, 1'b0}) sum += {2'b00, at[14+2*j], at[15+2*j]};
      sums_s1[i] <= sum;
    end
  end

  // ---------------------------------------------------------------------------------------------
  // Stage 2: lengths.

  parsed_t parsed_s2;
  logic v4_checked_s2;
  logic [1:0][19:0] sums_s2;

  logic v4_malformed, v6_malformed, v6_discovery;
  always_comb begin
    v4_malformed = v4_bad_s1 || total_s1 < {10'd0, header_bytes_s1}
        || total_s1 > {5'd0, payload_s1};
    v6_malformed = v6_bad_s1 || v6_payload_s1 > {5'd0, payload_v6_s1};
    v6_discovery = v6_icmp_s1 && v6_payload_s1 != '0 && v6_discovery_type_s1;
  end

  always_ff @(posedge clk) begin
    parsed_s2 <= '0;
    parsed_s2.kind <= kind_s1;
    parsed_s2.runt <= runt_s1;
    parsed_s2.to_group <= to_group_s1;
    v4_checked_s2 <= kind_s1 == KIND_IPV4 && !v4_unknown_s1;
    case (kind_s1)
      KIND_IPV4: begin
        parsed_s2.malformed <= v4_malformed;
        parsed_s2.unknown <= v4_unknown_s1 && !v4_malformed;
        parsed_s2.control <= v4_control_s1;
        parsed_s2.to_router <= v4_to_router_s1;
        parsed_s2.never <= v4_never_s1;
        parsed_s2.expired <= v4_expired_s1;
        parsed_s2.options <= v4_options_s1;
        parsed_s2.dont_fragment <= dont_fragment_s1;
        parsed_s2.packet_bytes <= total_s1[10:0];
      end
      KIND_IPV6: begin
        parsed_s2.malformed <= v6_malformed;
        parsed_s2.discovery <= v6_discovery && !v6_malformed;
        parsed_s2.control <= v6_control_s1;
        parsed_s2.to_router <= v6_multicast_s1 || v6_link_local_s1;
        parsed_s2.never <= v6_never_s1;
        parsed_s2.from_link_local <= v6_from_link_local_s1;
        parsed_s2.expired <= v6_expired_s1;
        parsed_s2.options <= v6_options_s1;
        parsed_s2.packet_bytes <= v6_payload_s1[10:0] + 11'd40;
      end
      default: parsed_s2.control <= llc_s1;
    endcase
    for (int i = 0; i < 2; i++)
      sums_s2[i] <= {2'b00, sums_s1[3*i]} + {2'b00, sums_s1[3*i+1]} + {2'b00, sums_s1[3*i+2]};
    is_v6_o <= kind_s1 == KIND_IPV6;
    key_o <= key_s1;
  end

  // ---------------------------------------------------------------------------------------------
  // Stages 3 and 4: checksum (RFC 1071). The sum of a header is never zero, because its version
  // is not. So the header is right if the folded sum is all ones.

  parsed_t parsed_s3;
  logic v4_checked_s3;
  logic [20:0] sum_s3;
  logic [16:0] folded;
  assign folded = {1'b0, sum_s3[15:0]} + {12'd0, sum_s3[20:16]};

  always_ff @(posedge clk) begin
    parsed_s3 <= parsed_s2;
    v4_checked_s3 <= v4_checked_s2;
    sum_s3 <= {1'b0, sums_s2[0]} + {1'b0, sums_s2[1]};

    parsed_o <= parsed_s3;
    // A carry of the fold wraps around to at most 31 and never to all ones.
    if (v4_checked_s3 && folded != 17'h0ffff) parsed_o.malformed <= 1'b1;
  end

endmodule
