// MAC addresses of neighbours, for ARP and for IPv6 neighbour discovery.
//
// Latency: 2 cycles. One look-up per cycle.
//
// The index is relative to the VE's part of the table, and checked against it on each write and on
// each look-up.
module card_arp
  import card_pkg::*;
#(
    parameter int ARPS = 16384
) (
    input  logic         clk,
    input  logic         resolved_i,   // there is an entry
    input  arp_index_t   index_i,
    input  range_t       range_i,
    output logic         hit_o,
    output mac_t         mac_o,
    output logic         fault_o,      // the index leads out of the VE's part

    // Write bus; `wr_refused_o` is in the same cycle.
    input  logic         wr_valid_i,
    input  table_t       wr_table_i,
    input  table_index_t wr_index_i,
    input  arp_t         wr_data_i,
    input  range_t       wr_range_i,
    output logic         wr_refused_o
);

  localparam int ARP_BITS = $clog2(ARPS);

  logic wr_en, wr_bounds;
  always_comb begin
    wr_bounds = wr_index_i < 32'(wr_range_i.length);
    wr_en = wr_valid_i && wr_bounds && wr_table_i == TABLE_ARP;
    wr_refused_o = wr_valid_i && !wr_bounds && wr_table_i == TABLE_ARP;
  end

  arp_t read;
  logic known_q, fault_q;

  card_ram #(
      .WIDTH($bits(arp_t)),
      .DEPTH(ARPS)
  ) entries (
      .clk,
      .wr_en_i  (wr_en),
      .wr_addr_i(ARP_BITS'(wr_range_i.base + wr_index_i[15:0])),
      .wr_data_i,
      .rd_addr_i(ARP_BITS'(range_i.base + 16'(index_i))),
      .rd_data_o(read)
  );

  always_ff @(posedge clk) begin
    known_q <= resolved_i && 16'(index_i) < range_i.length;
    fault_q <= resolved_i && 16'(index_i) >= range_i.length;
    hit_o <= known_q && read.valid;
    mac_o <= read.mac;
    fault_o <= fault_q;
  end

endmodule
