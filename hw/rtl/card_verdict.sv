// Verdict on a frame: the card's own rules, then those of crates/ip/src/forward.rs in their order.
//
// Latency: 2 cycles from the first group of inputs, 1 cycle from the second.
//
// Rules of the card:
//
// | frame | verdict |
// |---|---|
// | shorter than an Ethernet header | drop malformed |
// | from the host, by a vport that is up, from the vport's MAC address | out, unmodified |
// | from the host, any other | drop spoof |
// | to a group address | punt, once, for no VE |
// | to a MAC address that no VE has on this segment, or whose VE is disabled | drop no-ve |
// | beyond the VE's rate | drop rate |
// | to a vport that is not named | punt local |
// | to a vport of another port | drop not-for-us |
// | from here on, the rules of forward.rs | |
//
// Here, IPv4 headers of which the card does not see all are punted as exceptions instead of being
// checked, as are packets whose look-up ends in a fault or an excess route.
module card_verdict
  import card_pkg::*;
  import card_lpm_pkg::*;
(
    input logic clk,

    // Of the tables' entries, only some fields matter here.
    // verilator lint_off UNUSEDSIGNAL
    // First group.
    input parsed_t     parsed_i,
    input logic        from_host_i,
    input logic        owned_i,         // the VE is known
    input logic        enabled_i,       // the VE is enabled
    input logic        over_i,          // beyond the VE's rate
    input ve_options_t options_i,
    input logic        own_source_i,
    input leaf_kind_t  leaf_i,
    input logic        lpm_fault_i,
    input hop_t        hop_i,
    input logic        hop_found_i,
    input logic        hop_fault_i,

    // Second group.
    input context_t    ingress_i,
    input logic        ingress_attached_i,
    input port_t       ingress_port_i,       // port of the ingress vport
    input port_t       port_i,               // port that received the frame
    input logic        same_vport_i,         // ingress and egress vport are the same
    input context_t    egress_i,
    input attachment_t egress_attachment_i,
    input mac_t        source_i,             // source address of the frame
    input logic        arp_hit_i,
    input logic        arp_fault_i,
    // verilator lint_on UNUSEDSIGNAL

    output verdict_t verdict_o,
    output logic     forward_o,      // rewrite the frame
    output logic     group_o,
    output logic     owned_o,
    output logic     fault_o,        // the verdict is due to a fault
    output logic     excess_o        // the verdict is due to a route that did not fit
);

  // ---------------------------------------------------------------------------------------------
  // First cycle: what does not depend on a vport.

  // A rule that may apply.
  typedef struct packed {
    logic     applies;
    verdict_t verdict;
  } rule_t;

  logic v4, v6, local_;
  verdict_t own;
  rule_t early, address, route, too_big;
  logic refuses;

  always_comb begin
    v4 = parsed_i.kind == KIND_IPV4;
    v6 = parsed_i.kind == KIND_IPV6;
    own = parsed_i.control ? PUNT_CONTROL : PUNT_LOCAL;

    // The card's rules, but for frames from the host.
    early = '{applies: 1'b1, verdict: DROP_MALFORMED};
    if (parsed_i.runt) early.verdict = DROP_MALFORMED;
    else if (from_host_i) early.applies = 1'b0;
    else if (parsed_i.to_group)
      early.verdict = parsed_i.kind == KIND_ARP || parsed_i.discovery ? PUNT_NEIGHBOUR : own;
    else if (!owned_i || !enabled_i) early.verdict = DROP_NO_VE;
    else if (over_i) early.verdict = DROP_RATE;
    else early.applies = 1'b0;

    // Kind, header, addresses.
    local_ = parsed_i.to_router || leaf_i == LEAF_LOCAL;
    address = '{applies: 1'b1, verdict: own};
    if (parsed_i.kind == KIND_ARP) address.verdict = PUNT_NEIGHBOUR;
    else if (parsed_i.kind == KIND_OTHER) address.verdict = own;
    else if (parsed_i.malformed) address.verdict = DROP_MALFORMED;
    else if (parsed_i.unknown) address.verdict = PUNT_EXCEPTION;
    else if (local_ && parsed_i.discovery) address.verdict = PUNT_NEIGHBOUR;
    else if (local_) address.verdict = own;
    else if (parsed_i.never || (v4 && own_source_i)) address.verdict = DROP_POLICY;
    else address.applies = 1'b0;

    refuses = parsed_i.expired || parsed_i.from_link_local
        || !(v6 ? options_i.forwards_v6 : options_i.forwards_v4);

    // Routes that lead to no hop.
    route = '{applies: 1'b1, verdict: PUNT_EXCEPTION};
    case (leaf_i)
      LEAF_GROUP:     route.applies = lpm_fault_i || !hop_found_i;
      LEAF_BLACKHOLE: route.verdict = lpm_fault_i ? PUNT_EXCEPTION : DROP_BLACKHOLE;
      LEAF_HOOK:      route.verdict = lpm_fault_i ? PUNT_EXCEPTION : PUNT_HOOK;
      default:        ;
    endcase

    too_big.applies = 14'(parsed_i.packet_bytes) > hop_i.mtu;
    too_big.verdict = v4 && !parsed_i.dont_fragment ? PUNT_HOOK : PUNT_EXCEPTION;
  end

  rule_t early_q, address_q, route_q, too_big_q;
  logic from_host_q, host_ok_q, group_q, owned_q, v6_q, refuses_q, options_q, chosen_q;
  logic fault_q, excess_q;
  length_t packet_bytes_q;

  always_ff @(posedge clk) begin
    early_q <= early;
    address_q <= address;
    route_q <= route;
    too_big_q <= too_big;
    from_host_q <= from_host_i;
    host_ok_q <= owned_i && enabled_i;
    group_q <= parsed_i.to_group && !parsed_i.runt && !from_host_i;
    owned_q <= owned_i && (from_host_i || (!parsed_i.to_group && !parsed_i.runt));
    v6_q <= v6;
    refuses_q <= refuses;
    options_q <= parsed_i.options;
    // The kernel chooses among several hops in another way.
    chosen_q <= hop_i.chosen && !(v6 ? options_i.chooses_v6 : options_i.chooses_v4);
    fault_q <= lpm_fault_i || (leaf_i == LEAF_GROUP && hop_fault_i);
    excess_q <= leaf_i == LEAF_EXCESS && !lpm_fault_i;
    packet_bytes_q <= parsed_i.packet_bytes;
  end

  // ---------------------------------------------------------------------------------------------
  // Second cycle: what depends on the vports.

  logic hooked, named, up, may_send, routed, back, big;
  rule_t punt;
  verdict_t verdict, routed_verdict;
  logic arp_stops;

  always_comb begin
    named = ingress_attached_i && ingress_i.valid;
    up = egress_attachment_i.attached && egress_i.valid && egress_i.up;
    may_send = host_ok_q && up && source_i == egress_attachment_i.mac;
    hooked = v6_q ? ingress_i.hook_v6 : ingress_i.hook_v4;
    back = (v6_q ? egress_i.hook_back_v6 : egress_i.hook_back_v4) && same_vport_i;
    big = too_big_q.applies || 14'(packet_bytes_q) > egress_i.mtu;

    // From the route on. The first punt stays, whatever else would be punted or dropped later.
    punt = '{applies: hooked || options_q, verdict: hooked ? PUNT_HOOK : PUNT_EXCEPTION};
    arp_stops = 1'b0;
    if (route_q.applies) begin
      if (!punt.applies) punt = route_q;
    end else begin
      if (!punt.applies && chosen_q) punt = '{applies: 1'b1, verdict: PUNT_HOOK};
      if (!up) begin
        if (!punt.applies) punt = '{applies: 1'b1, verdict: PUNT_EXCEPTION};
      end else begin
        if (!punt.applies && big) punt = '{applies: 1'b1, verdict: too_big_q.verdict};
        if (!punt.applies && (egress_i.hook_out || back))
          punt = '{applies: 1'b1, verdict: PUNT_HOOK};
        arp_stops = arp_fault_i;
        if (!punt.applies && !arp_hit_i)
          punt = '{applies: 1'b1, verdict: arp_fault_i ? PUNT_EXCEPTION : PUNT_NEIGHBOUR};
      end
    end
    routed_verdict = punt.applies ? punt.verdict : OUT;

    routed = 1'b0;
    if (early_q.applies) verdict = early_q.verdict;
    else if (from_host_q) verdict = may_send ? OUT : DROP_SPOOF;
    else if (!named) verdict = PUNT_LOCAL;
    else if (ingress_port_i != port_i) verdict = DROP_NOT_FOR_US;
    else if (ingress_i.hook_all) verdict = PUNT_HOOK;
    else if (address_q.applies) verdict = address_q.verdict;
    else if (!hooked && (refuses_q || (!v6_q && !ingress_i.forwards_v4))) verdict = PUNT_EXCEPTION;
    else begin
      verdict = routed_verdict;
      routed = 1'b1;
    end
  end

  always_ff @(posedge clk) begin
    verdict_o <= verdict;
    forward_o <= routed && routed_verdict == OUT;
    group_o <= group_q;
    owned_o <= owned_q;
    fault_o <= routed && (route_q.applies ? fault_q : arp_stops);
    excess_o <= routed && route_q.applies && excess_q;
  end

endmodule
